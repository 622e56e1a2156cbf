"""Faults of direct placement: spans that are read straight into paged KV, with no bank between.

Owns those rows of the matrix; where the file system has no direct I/O they say so and show nothing.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rangekv.engine import Engine
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.checks import Absent
from rangekv.engine.testing.faulty_files import Act, error, flipped, misdirected, raising, short
from rangekv.engine.testing.scene import PROMPT_TOKENS, Prompt, Scene

TABLE = Table("placement")

_LAYERS = (0, 1, 2, 3)


def _require_direct_io(scene: Scene) -> None:
    with scene.engine() as engine:
        path = engine.store.io_path
    if path != "posix-direct":
        raise Absent("this file system has no direct I/O")
    scene.evidence.clear()


@contextmanager
def _direct(scene: Scene, **settings: Any) -> Iterator[tuple[Engine, Prompt]]:
    """Open a store whose restores go straight into their blocks, with one prompt in it."""
    _require_direct_io(scene)
    with scene.engine(placement="direct", **settings) as engine:
        prompt = scene.saved(engine)
        yield engine, prompt
        scene.require(engine.stats().counters["scatters"] == 0, "nothing went through a bank")


@TABLE.cell("read.without-a-fault")
def no_fault(scene: Scene) -> None:
    """A claimed restore takes no bank, and nothing is read before its blocks are known."""
    with _direct(scene) as (engine, prompt):
        ticket = scene.lookup(engine, prompt)
        scene.require(engine.stats().counters["reads"] == 0, "nothing is read ahead")
        scene.require(engine._read_banks.free_count == 4, "no bank is taken")
        restore, blocks = scene.claim(engine, ticket, prompt)
        scene.require(all(scene.delivered(restore)), "every layer is delivered")
        scene.require_delivered(prompt, blocks)
        restore.finish()
        scene.states += ["pending", "placing", "delivered"]
        scene.require(engine.stats().counters["direct_spans"] == 4, "one span a layer")


@TABLE.cells(
    {
        "read.short-0": {"act": short(lambda asked: 0)},
        "read.short-4096": {"act": short(lambda asked: 4096)},
        "read.short-all-but-one": {"act": short(lambda asked: asked - 1)},
        "read.eio": {"act": error(errno.EIO)},
        "read.eintr": {"act": error(errno.EINTR)},
        "read.value-error": {"act": raising(ValueError("no kernel says this"))},
    }
)
def failed(scene: Scene, act: Act) -> None:
    """Blocks of a direct read that failed are reported as failed, whatever bytes are in them."""
    with _failed(scene, act) as (engine, prompt):
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "the next one is whole")


@TABLE.cells(
    {
        "read.bit-flip": {"act": flipped(lambda asked: asked // 2)},
        "read.misdirected": {"act": misdirected(4096)},
    }
)
def mismatched(scene: Scene, act: Act) -> None:
    """Wrong bytes in their blocks are found by their checksum: failed blocks, a retired record."""
    with _failed(scene, act) as (engine, prompt):
        scene.require(scene.hit(engine, prompt) == 0, "the record is retired")
        scene.require(engine.stats().counters["checksum_failures"] == 1, "the mismatch is counted")


@contextmanager
def _failed(scene: Scene, act: Act) -> Iterator[tuple[Engine, Prompt]]:
    """Let one direct read of a restore meet a fault, and require what its caller is told."""
    with _direct(scene) as (engine, prompt):
        at = scene.random.choice(_LAYERS)
        scene.files.on_read(act, skip=at)
        restore, blocks = scene.started(engine, prompt)
        ready = scene.delivered(restore)
        scene.states += ["pending", "placing", "failed"]
        scene.require(ready.count(False) == 1, f"one layer fails: {ready}")
        scene.require_failed(restore, blocks)
        scene.require_delivered(prompt, blocks, layers=[n for n in _LAYERS if ready[n]])
        scene.evidence.append(f"refused: {restore.errors[0]}")
        restore.finish()
        scene.give(blocks)
        yield engine, prompt


@TABLE.cells(
    {"read.finished-in-flight": {"by": "finish"}, "read.released-in-flight": {"by": "release"}}
)
def cancelled(scene: Scene, by: str) -> None:
    """A direct read cannot be cancelled: blocks are the caller's again when it has returned."""
    # One read at a time: the others have not begun when the first stands still.
    with _direct(scene, read_workers=1) as (engine, prompt):
        hold = scene.hold()
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        end = restore.finish if by == "finish" else lambda: engine.release(restore.ticket)
        scene.require_waits(end, hold.let_go)
        failed = set(restore.failed_blocks())
        scene.states += ["placing", by, "returned"]
        scene.require(failed == set(blocks.tolist()), "what was not read has failed")
        scene.give(blocks)
        scene.until(engine, lambda: not engine._catalog.leases.open, "the lease ends")
        scene.require_untouched(blocks)


@TABLE.cell("read.in-flight-at-close")
def at_close(scene: Scene) -> None:
    """A close waits for a read that fills paged KV."""
    with _direct(scene) as (_, prompt):
        pass
    engine = scene.open(placement="direct")
    hold = scene.hold()
    scene.files.on_read(hold)
    scene.started(engine, prompt)
    scene.reached(hold)
    scene.require_waits(lambda: engine.close(0.0), hold.let_go)
    scene.states += ["placing", "closed"]
    scene.check_closed()


@TABLE.cell("read.stands-still-past-its-deadline")
def stalled(scene: Scene) -> None:
    """A direct read that stands still ends the process: its blocks cannot be taken back."""
    with _direct(scene) as (engine, prompt):
        lines: list[str] = []
        engine._restores._on_stall = lines.append
        hold = scene.hold()
        scene.files.on_read(hold)
        with scene.short_deadlines(engine):
            restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        scene.until(engine, lambda: lines != [], "the process would be ended")
        scene.states += ["placing", "stands still", "process ends"]
        scene.evidence.append(lines[0])
        scene.require("[direct-read-stalled]" in lines[0], "the line has a code")
        scene.require(set(restore.failed_blocks()) <= set(blocks.tolist()), "no other block")
        hold.let_go()
        restore.finish()


@TABLE.cell("read.record-retired-in-flight")
def retired_in_flight(scene: Scene) -> None:
    """A record retired while it is read into blocks keeps its bytes until the read returns."""
    with _direct(scene) as (engine, prompt):
        hold = scene.hold()
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        engine.reset()
        for _ in range(3):
            scene.saved(engine)
        hold.let_go()
        scene.require(all(scene.delivered(restore)), "the restore gets the old bytes")
        scene.require_delivered(prompt, blocks)
        restore.finish()
        scene.states += ["placing", "retired", "delivered"]


@TABLE.cell("read.stall-of-another-request")
def others_go_on(scene: Scene) -> None:
    """A direct read that stands still takes one thread: other restores and saves go on."""
    with _direct(scene) as (engine, prompt):
        other = scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        for _ in range(2):
            scene.require(scene.restore(engine, other) == PROMPT_TOKENS, "others restore")
            scene.saved(engine)
        hold.let_go()
        scene.require(all(scene.delivered(restore)), "the slow one ends too")
        scene.require_delivered(prompt, blocks)
        restore.finish()
        scene.states += ["placing", "others placing", "delivered"]


@TABLE.cell("read.while-banks-stand-still")
def banks_stand_still(scene: Scene) -> None:
    """Who waits for a bank holds up nobody who needs none."""
    _require_direct_io(scene)
    with scene.engine(placement="direct", read_banks=1, read_workers=4) as engine:
        prompt, other = scene.saved(engine), scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold)
        waiting = [scene.lookup(engine, prompt, max_tokens=100) for _ in range(2)]
        running = [scene.claim(engine, ticket, prompt) for ticket in waiting]
        scene.reached(hold)
        scene.states += ["the only bank stands still", "another waits for it", "others placing"]
        scene.require(scene.restore(engine, other) == PROMPT_TOKENS, "a direct restore goes on")
        hold.let_go()
        for restore, blocks in running:
            scene.require(all(scene.delivered(restore)), "the others end too")
            scene.require_delivered(prompt, blocks)
            restore.finish()


@TABLE.cells(
    {
        "claim.inside-a-page": {"skip": 16, "limit": PROMPT_TOKENS},
        "claim.ends-inside-a-page": {"skip": 0, "limit": 100},
    }
)
def partial_page(scene: Scene, skip: int, limit: int) -> None:
    """A page that is partly wanted is verified in a bank: no other block is touched."""
    _require_direct_io(scene)
    with scene.engine(placement="direct") as engine:
        prompt = scene.saved(engine)
        others = scene.take(40)
        ticket = scene.lookup(engine, prompt, skip_tokens=skip, max_tokens=limit)
        restore, blocks = scene.claim(engine, ticket, prompt)
        scene.require(all(scene.delivered(restore)), "what is wanted is delivered")
        scene.require_delivered(prompt, blocks, first_token=skip)
        restore.finish()
        scene.require_untouched(others)
        scene.require(engine.stats().counters["scatters"] > 0, "the page went through a bank")
        scene.states += ["read", "scatter", "delivered"]
