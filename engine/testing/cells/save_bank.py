"""Faults of a save bank, in its state write.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from typing import Any

from rangekv.engine import Engine
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.faulty_files import (
    WRITES,
    Act,
    Call,
    error,
    raising,
    short,
    torn,
)
from rangekv.engine.testing.scene import PROMPT_TOKENS, Scene
from rangekv.engine.transfer.save import Save, SaveState
from rangekv.format.errors import ExitCode, StoreLocked

TABLE = Table("save-bank")

LAYERS = (0, 1, 2, 3)
LONG = 2 * PROMPT_TOKENS  # two banks of two layers each


def layer_writes(save: Save, layer_index: int) -> Callable[[Call], bool]:
    """Return a test for the writes of one layer of a save in one extent."""
    extent = save.parts[0].extent
    begin = extent.offset + layer_index * extent.width
    return lambda call: call.name in WRITES and begin <= call.offset < begin + extent.width


def require_invisible(scene: Scene, engine: Engine, save: Save, prompt: Any) -> None:
    """Require that a save ends with nothing visible, its space returned, and can be repeated."""
    used_bytes = sum(
        engine.geometry.extent_bytes(record.extent.width)
        for record in {r.extent: r for r in engine._catalog.directory.visible()}.values()
    )
    save.finish()
    scene.require(not save.wait(scene.patience_s), "the save is not published")
    scene.require(save.settled, "it has ended")
    scene.require(scene.hit(engine, prompt) == 0, "nothing of it is visible")
    scene.require(engine.stats().used_bytes == used_bytes, "its space returned")
    scene.files.disarm()
    scene.require(scene.save(engine, prompt), "the same prompt can be saved again")
    scene.require(scene.restore(engine, prompt) == len(prompt), "and is whole then")


def _each_layer(name: str, act: Act) -> dict[str, dict[str, Any]]:
    places = {"first": 0, "middle": 1, "last": 3}
    return {
        f"write.{name}-layer-{place}": {"layer_index": layer_index, "act": act}
        for place, layer_index in places.items()
    }


@TABLE.cells(
    {
        **_each_layer("eio", error(errno.EIO)),
        **_each_layer("enospc", error(errno.ENOSPC)),
        **_each_layer("short", short(lambda asked: asked // 2)),
        **_each_layer("torn", torn(errno.EIO)),
        "write.short-0": {"layer_index": 2, "act": short(lambda asked: 0)},
        "write.short-all-but-4096": {"layer_index": 2, "act": short(lambda asked: asked - 4096)},
        "write.edquot": {"layer_index": 1, "act": error(errno.EDQUOT)},
        "write.efbig": {"layer_index": 1, "act": error(errno.EFBIG)},
        "write.eintr": {"layer_index": 1, "act": error(errno.EINTR)},
        "write.value-error": {"layer_index": 1, "act": raising(ValueError("no kernel says this"))},
        "write.memory-error": {"layer_index": 1, "act": raising(MemoryError())},
    }
)
def failed(scene: Scene, layer_index: int, act: Act) -> None:
    """A write that did not return its full count keeps the whole range invisible."""
    with scene.engine() as engine:
        scene.saved(engine)
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        scene.files.arm(layer_writes(save, layer_index), act)
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.give(blocks)
        require_invisible(scene, engine, save, prompt)
        scene.states += ["free", "gather", "write", "free"]
        scene.require(save.state is SaveState.FAILED, "it has failed")
        scene.evidence.append(f"layer {layer_index} refused: {save.error}")


@TABLE.cell("write.every-layer-fails")
def fails_twice(scene: Scene) -> None:
    """A save all of whose writes fail, fails once: its space and bank return once."""
    with scene.engine() as engine:
        prompt = scene.prompt(token_count=LONG)
        save, blocks = scene.begin_save(engine, prompt)
        scene.files.on_write(error(errno.EIO), times=4)
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.give(blocks)
        scene.states += ["gather", "write", "free"]
        require_invisible(scene, engine, save, prompt)
        counters = engine.stats().counters
        scene.require(counters["saves_declined_failed"] == 1, "it is counted once")


@TABLE.cell("write.late-after-the-failure")
def late_writer(scene: Scene) -> None:
    """Space of a failed save stays taken until the last of its accepted writes has returned."""
    with scene.engine(read_workers=4) as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        hold = scene.hold()
        scene.files.arm(layer_writes(save, 0), hold)
        scene.files.arm(layer_writes(save, 1), error(errno.EIO))
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.give(blocks)
        scene.reached(hold)
        scene.until(engine, lambda: save.state is SaveState.FAILED, "another write fails")
        scene.states += ["write", "failed", "one write late"]
        scene.require(engine.stats().used_bytes > 0, "its space is not free yet")
        scene.require(engine._save_banks.free_count == 3, "nor is its bank")
        scene.saved(engine)
        hold.let_go()
        save.finish()
        scene.require(not save.wait(scene.patience_s), "it stays invisible")
        scene.states.append("free")


@TABLE.cell("write.not-returned-yet")
def not_returned(scene: Scene) -> None:
    """Nothing of a finished save is visible before its last write has returned."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        hold = scene.hold()
        scene.files.arm(layer_writes(save, 3), hold)
        scene.announce(save, blocks)
        scene.require(save.extracted(scene.patience_s), "extraction does not wait for writes")
        scene.give(blocks)
        save.finish()
        scene.reached(hold)
        scene.states += ["gather", "write"]
        scene.require(scene.hit(engine, prompt) == 0, "nothing is visible")
        hold.let_go()
        scene.require(save.wait(scene.patience_s), "then it is")
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "and whole")
        scene.states.append("visible")


@TABLE.cell("write.stands-still-past-its-deadline")
def stalled(scene: Scene) -> None:
    """A write that stands still gives its save up; bank and space wait for its return."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        hold = scene.hold()
        scene.files.on_write(hold)
        with scene.short_deadlines(engine):
            scene.announce(save, blocks)
            save.extracted(scene.patience_s)
        scene.give(blocks)
        save.finish()
        scene.reached(hold)
        scene.until(engine, lambda: save.error is not None, "the deadline fires")
        scene.states += ["gather", "write", "QUARANTINED"]
        scene.require(engine.stats().banks_in_quarantine == 1, "the counters show it")
        scene.require(engine.stats().used_bytes > 0, "its space is not free yet")
        scene.require(scene.hit(engine, prompt) == 0, "nothing is visible")
        hold.let_go()
        scene.require(not save.wait(scene.patience_s), "and never is")
        scene.states.append("free")
        scene.require(engine._save_banks.free_count == 4, "the bank is back")


@TABLE.cell("write.in-flight-at-close")
def at_close(scene: Scene) -> None:
    """A close with an accepted write under way stays dirty, and locked until that has returned."""
    engine = scene.open()
    prompt = scene.prompt()
    save, blocks = scene.begin_save(engine, prompt)
    hold = scene.hold()
    scene.files.on_write(hold)
    scene.announce(save, blocks)
    save.extracted(scene.patience_s)
    scene.reached(hold)
    result = engine.close(0.02)
    scene.states += ["gather", "write"]
    scene.closed(result, "dirty")
    scene.require(result.exit_code is ExitCode.UNRETURNED_WRITE, "the close names the reason")
    try:
        scene.open().close()
    except StoreLocked as refused:
        scene.evidence.append(f"refused: {refused.code}")
    else:
        scene.require(False, "nobody opens the store while the write may land")
    writes = sum(line.startswith("pwritev") for line in scene.files.calls)
    hold.let_go()
    for thread in engine._pool.threads:
        thread.join(scene.patience_s)
    later = sum(line.startswith("pwritev") for line in scene.files.calls)
    scene.require(later <= writes + 2, "writes that had not begun never do")
    scene.reopened("dirty-marker")
    with scene.engine() as engine:
        scene.require(engine.open_result.reason == "dirty-marker", "the reopen is cold")
        scene.saved(engine)


@TABLE.cell("write.cancelled")
def cancelled(scene: Scene) -> None:
    """A save cancelled during its writes is not published, and its space waits for them."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        hold = scene.hold()
        scene.files.on_write(hold)
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.reached(hold)
        save.cancel()
        scene.give(blocks)
        scene.states += ["gather", "write", "cancelled"]
        scene.require(engine.stats().used_bytes > 0, "its space is not free yet")
        hold.let_go()
        require_invisible(scene, engine, save, prompt)
        scene.states.append("free")


@TABLE.cell("write.reads-go-first")
def reads_first(scene: Scene) -> None:
    """Writes that stand still take at most half of the I/O: restores go on beside them."""
    with scene.engine(read_workers=2) as engine:
        other = scene.saved(engine)
        hold = scene.hold()
        scene.files.on_write(hold, times=math.inf)
        prompts = [scene.prompt(), scene.prompt()]
        saves = []
        for prompt in prompts:
            save, blocks = scene.begin_save(engine, prompt)
            scene.announce(save, blocks)
            save.extracted(scene.patience_s)
            scene.give(blocks)
            save.finish()
            saves.append(save)
        scene.reached(hold)
        scene.states += ["writes stand still", "restores go on"]
        for _ in range(4):
            scene.require(scene.restore(engine, other) == PROMPT_TOKENS, "restores go on")
        hold.let_go()
        scene.require(all(save.wait(scene.patience_s) for save in saves), "then the writes end")


@TABLE.cell("write.parent-fails")
def parent_fails(scene: Scene) -> None:
    """A range whose parent is never published is never visible, though all of it was written."""
    with scene.engine(read_workers=4) as engine:
        parent = scene.prompt()
        child = scene.prompt(parent, same_tokens=PROMPT_TOKENS, token_count=LONG)
        save, blocks = scene.begin_save(engine, parent)
        hold = scene.hold(error(errno.EIO))
        scene.files.on_write(hold)
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.reached(hold)
        after, more = scene.begin_save(engine, child)
        scene.require(after.start_token == PROMPT_TOKENS, "the child goes on behind its parent")
        scene.announce(after, more)
        after.extracted(scene.patience_s)
        after.finish()
        scene.until(engine, lambda: after.settled, "all of the child is written")
        scene.states += ["parent written", "child proved"]
        scene.require(scene.hit(engine, child) == 0, "neither is visible yet")
        hold.let_go()
        save.finish()
        scene.require(not save.wait(scene.patience_s), "the parent fails")
        scene.require(scene.hit(engine, child) == 0, "the child is not visible")
        scene.states.append("neither visible")


@TABLE.cells(
    {
        "write.duplicate-of-the-same-range": {"length": PROMPT_TOKENS},
        "write.duplicate-of-a-part": {"length": 100},
    }
)
def duplicate(scene: Scene, length: int) -> None:
    """A save of what is being saved joins it: one reservation, one set of writes."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        hold = scene.hold()
        scene.files.on_write(hold)
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.give(blocks)
        scene.reached(hold)
        again = engine.save(scene.key(), prompt[:length])
        scene.require(again is None, "the second save is declined")
        scene.require(engine.stats().counters["saves_declined_joined"] == 1, "as joined")
        hold.let_go()
        save.finish()
        scene.require(save.wait(scene.patience_s), "the first one is published")
        scene.states += ["write", "joined", "visible"]
        scene.require(engine.stats().counters["writes"] == 4, "every layer is written once")
        scene.require(engine.save(scene.key(), prompt[:length]) is None, "then it is held")


TABLE.absent(
    "gather.stream-error",
    "An error of a CUDA stream is a fence that is not proved.",
    "this engine has no CUDA device",
)
TABLE.absent(
    "write.cufile-short",
    "A short count of a GPU-direct write keeps the range invisible.",
    "this engine writes through POSIX only",
)
