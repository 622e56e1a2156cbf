"""Faults of an extent's generation, in its state reserved.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

import errno
import threading
from typing import Any

from rangekv.engine import Engine
from rangekv.engine.index.extents import Extent
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.faulty_files import error
from rangekv.engine.testing.scene import (
    PROMPT_TOKENS,
    UNALIGNED_MODEL,
    Prompt,
    Scene,
)
from rangekv.engine.transfer.save import SaveState

TABLE = Table("extent")

PACK_TOKENS = 1024  # one pack: four stripes of 256 KiB
PACKS = 4


def extent_of(engine: Engine, prompt: Prompt) -> Extent:
    """Return the extent that holds the last token of a stored prompt."""
    path = engine._catalog.directory.walk(0, memoryview(prompt.tobytes()), len(prompt))
    return path[-1].record.extent


def longer(scene: Scene, prompt: Prompt, token_count: int) -> Prompt:
    """Return a prompt that goes on behind the end of another."""
    return scene.prompt(prompt, same_tokens=len(prompt), token_count=token_count)


@TABLE.cells(
    {
        "reserved.layer-missing-first": {"missing": 0},
        "reserved.layer-missing-middle": {"missing": 2},
        "reserved.layer-missing-last": {"missing": 3},
    }
)
def layer_missing(scene: Scene, missing: int) -> None:
    """A range of which one layer never came is not published, and its space returns."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        scene.announce(save, blocks, layers=[n for n in range(4) if n != missing])
        save.extracted(scene.patience_s)
        scene.give(blocks)
        save.finish()
        scene.require(not save.wait(scene.patience_s), "it is not published")
        scene.states += ["reserved", "reclaimed"]
        scene.require(engine.stats().used_bytes == 0, "its space returned")


@TABLE.cell("reserved.published-twice")
def published_twice(scene: Scene) -> None:
    """A save that is finished again, and cancelled after that, is published once."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.give(blocks)
        threads = [threading.Thread(target=save.finish) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scene.patience_s)
        scene.require(save.wait(scene.patience_s), "it is published")
        save.cancel()
        save.finish()
        scene.states += ["reserved", "visible"]
        counters = engine.stats().counters
        scene.require(counters["saves_published"] == 1, "it is counted once")
        scene.require(save.state is SaveState.PUBLISHED, "a late cancel changes nothing")
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "it is there")


@TABLE.cell("reserved.published-after-retire")
def published_after_retire(scene: Scene) -> None:
    """A reservation that a reset withdrew is never published, though all its writes returned."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        hold = scene.hold()
        scene.files.on_write(hold)
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.give(blocks)
        scene.reached(hold)
        engine.reset()
        scene.require(engine.stats().used_bytes > 0, "a write may still land in its space")
        hold.let_go()
        save.finish()
        scene.require(not save.wait(scene.patience_s), "it is not published")
        scene.states += ["reserved", "retired", "reclaimed"]
        scene.require(engine.stats().used_bytes == 0, "then its space returned")
        scene.require(scene.save(engine, prompt), "the prompt can be saved again")


@TABLE.cell("reserved.looked-up")
def looked_up(scene: Scene) -> None:
    """A lookup sees nothing of a reservation, and what it branches from is as it was."""
    with scene.engine() as engine:
        parent = scene.saved(engine)
        child = longer(scene, parent, 2 * PROMPT_TOKENS)
        save, blocks = scene.begin_save(engine, child)
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        scene.states += ["reserved", "looked up"]
        scene.require(scene.restore(engine, child) == PROMPT_TOKENS, "only the parent is there")
        save.finish()
        scene.require(save.wait(scene.patience_s), "then it is published")
        scene.require(scene.restore(engine, child) == 2 * PROMPT_TOKENS, "and seen")


@TABLE.cells(
    {"reserved.allocator-full": {"leased": True}, "reserved.all-reserved": {"leased": False}}
)
def allocator_full(scene: Scene, leased: bool) -> None:
    """Where all space is leased or reserved a save is declined by name, and nothing is evicted."""
    with scene.engine() as engine:
        held: list[Any] = []
        prompts = []
        for _ in range(PACKS):
            prompt = scene.prompt(token_count=PACK_TOKENS)
            if leased:
                scene.require(scene.save(engine, prompt), "the save is published")
                held.append(scene.lookup(engine, prompt))
            else:
                scene.oracle.note_saved(prompt)
                held.append(engine.save(scene.key(), prompt))
            prompts.append(prompt)
        declined = engine.save(scene.key(), scene.prompt())
        scene.states += ["full", "declined"]
        scene.require(declined is None, "a save without room is declined")
        scene.require(engine.stats().counters["saves_declined_full"] == 1, "as full")
        for one, prompt in zip(held, prompts, strict=True):
            if leased:
                engine.release(one)
                scene.require(scene.hit(engine, prompt) == PACK_TOKENS, "nothing was evicted")
            else:
                one.cancel()


@TABLE.cells(
    {
        "reserved.too-large": {"length": 5 * PACK_TOKENS, "start": 0, "reason": "too-large"},
        "reserved.gap-before-it": {"length": PROMPT_TOKENS, "start": 32, "reason": "gap"},
    }
)
def declined(scene: Scene, length: int, start: int, reason: str) -> None:
    """What can never be saved is declined by name and takes no space."""
    with scene.engine() as engine:
        prompt = scene.prompt(token_count=length)
        save = engine.save(scene.key(), prompt, start_token=start)
        scene.states.append("declined")
        scene.require(save is None, "the save is declined")
        scene.require(engine.stats().counters[f"saves_declined_{reason}"] == 1, f"as {reason}")
        scene.require(engine.stats().used_bytes == 0, "it takes no space")


@TABLE.cell("reserved.two-appenders")
def two_appenders(scene: Scene) -> None:
    """Two branches behind one record: one grows in its extent, the other gets its own."""
    with scene.engine() as engine:
        parent = scene.saved(engine, token_count=64)
        one, two = (longer(scene, parent, 96) for _ in range(2))
        saves = [scene.begin_save(engine, prompt) for prompt in (one, two)]
        extents = [save.parts[0].extent for save, _ in saves]
        home = extent_of(engine, parent)
        scene.require(extents[0] is home, "the first grows in place")
        scene.require(extents[1] is not home, "the second does not")
        for save, blocks in reversed(saves):
            scene.announce(save, blocks)
            save.extracted(scene.patience_s)
            save.finish()
            scene.require(save.wait(scene.patience_s), "each is published")
        scene.states += ["visible", "two reserved", "both visible"]
        for prompt in (one, two):
            scene.require(scene.restore(engine, prompt) == 96, "each has its own bytes")


@TABLE.cell("reserved.append-against-evict")
def append_against_evict(scene: Scene) -> None:
    """An extent that is grown cannot be evicted, however cold it is and however short space is."""
    with scene.engine() as engine:
        parent = scene.saved(engine, token_count=64)
        prompt = longer(scene, parent, 96)
        save, blocks = scene.begin_save(engine, prompt)
        scene.fill(engine)
        scene.require(engine.stats().counters["evicted_bytes"] > 0, "space is short")
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        save.finish()
        scene.require(save.wait(scene.patience_s), "the growth is published")
        scene.states += ["visible", "growing", "evictions", "visible"]
        scene.require(scene.restore(engine, prompt) == 96, "parent and growth are there")


@TABLE.cell("reserved.append-at-unaligned-token", model=UNALIGNED_MODEL)
def unaligned_append(scene: Scene) -> None:
    """Growth that would rewrite 4096 bytes with visible ones among them gets its own extent."""
    with scene.engine() as engine:
        parent = scene.saved(engine, token_count=48)
        prompt = longer(scene, parent, 96)
        save, blocks = scene.begin_save(engine, prompt)
        scene.require(save.parts[0].extent is not extent_of(engine, parent), "it has its own")
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        save.finish()
        scene.require(save.wait(scene.patience_s), "it is published")
        scene.states += ["visible", "reserved", "visible"]
        scene.require(scene.restore(engine, prompt) == 96, "both ranges are whole")


@TABLE.cell("reserved.append-after-failed-append")
def append_after_failure(scene: Scene) -> None:
    """The append mark only rises: nobody writes again where a failed append may still land."""
    with scene.engine() as engine:
        parent = scene.saved(engine, token_count=64)
        home = extent_of(engine, parent)
        failing = longer(scene, parent, 96)
        save, blocks = scene.begin_save(engine, failing)
        scene.require(save.parts[0].extent is home, "the first append grows in place")
        scene.files.on_write(error(errno.EIO))
        scene.announce(save, blocks)
        save.extracted(scene.patience_s)
        save.finish()
        scene.require(not save.wait(scene.patience_s), "it fails")
        scene.require(home.append_mark_tokens == 96, "the mark stays where a write was accepted")
        prompt = longer(scene, parent, 96)
        again, _ = scene.begin_save(engine, prompt)
        scene.require(again.parts[0].extent is not home, "the next append goes elsewhere")
        again.cancel()
        scene.states += ["visible", "append failed", "mark kept"]
        scene.require(scene.restore(engine, parent) == 64, "the parent is whole")
