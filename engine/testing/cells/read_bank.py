"""Faults of a read bank, in its state read.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from rangekv.engine.testing.case import Table
from rangekv.engine.testing.faulty_files import (
    READS,
    Act,
    Call,
    error,
    flipped,
    misdirected,
    raising,
    short,
)
from rangekv.engine.testing.scene import PROMPT_TOKENS, Scene
from rangekv.engine.transfer.banks import BankState

TABLE = Table("read-bank")

_LAYERS = (0, 1, 2, 3)


def layer_reads(scene: Scene, engine: Any, layer_index: int) -> Callable[[Call], bool]:
    """Return a test for the reads of one layer of the only extent there is."""
    (extent,) = engine._catalog.residents
    begin = extent.offset + layer_index * extent.width
    return lambda call: call.name in READS and begin <= call.offset < begin + extent.width


@TABLE.cells(
    {
        "read.short-0": {"act": short(lambda asked: 0)},
        "read.short-4096": {"act": short(lambda asked: 4096)},
        "read.short-all-but-4096": {"act": short(lambda asked: asked - 4096)},
        "read.short-all-but-one": {"act": short(lambda asked: asked - 1)},
        "read.longer-than-asked": {"act": lambda call: call.go() + 4096},
        "read.eio": {"act": error(errno.EIO)},
        "read.eintr": {"act": error(errno.EINTR)},
        "read.einval": {"act": error(errno.EINVAL)},
        "read.enomem": {"act": error(errno.ENOMEM)},
        "read.value-error": {"act": raising(ValueError("no kernel says this"))},
        "read.memory-error": {"act": raising(MemoryError())},
    }
)
def failed(scene: Scene, act: Act) -> None:
    """A read without its full count fails its layer, delivers nothing and frees its bank."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        layer_index = scene.random.choice(_LAYERS)
        scene.files.arm(layer_reads(scene, engine, layer_index), act)
        restore, blocks = scene.started(engine, prompt)
        ready = scene.delivered(restore)
        scene.states += ["free", "read", "free"]
        expected = [other != layer_index for other in _LAYERS]
        scene.require(ready == expected, f"layer {layer_index} fails and no other: {ready}")
        scene.require_failed(restore, blocks)
        scene.require_untouched(blocks, layers=[layer_index])
        scene.evidence.append(f"layer {layer_index} refused: {restore.errors[0]}")
        restore.finish()
        scene.give(blocks)
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "the next restore is whole")


@TABLE.cells(
    {
        "read.bit-flip-first": {"place": lambda asked: 0},
        "read.bit-flip-middle": {"place": lambda asked: asked // 2},
        "read.bit-flip-last": {"place": lambda asked: asked - 1},
    }
)
def bit_flip(scene: Scene, place: Callable[[int], int]) -> None:
    """One flipped bit is a miss: nothing of that layer is delivered, and the record is retired."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        _require_mismatch(scene, engine, prompt, flipped(place))


@TABLE.cells(
    {
        "read.misdirected-next-layer": {"layers": 1, "tokens": 0},
        "read.misdirected-next-piece": {"layers": 0, "tokens": 16},
    }
)
def misplaced(scene: Scene, layers: int, tokens: int) -> None:
    """Bytes from another place of the file are a miss, though they are somebody's KV."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        (extent,) = engine._catalog.residents
        distance = layers * extent.width + tokens * scene.model.token_bytes
        _require_mismatch(scene, engine, prompt, misdirected(distance), last_layer=2)


def _require_mismatch(
    scene: Scene, engine: Any, prompt: Any, act: Act, last_layer: int = 3
) -> None:
    other = scene.saved(engine, token_count=32)
    extent = next(
        e
        for e, records in engine._catalog.residents.items()
        if any(record.token_count == PROMPT_TOKENS for record in records)
    )
    layer_index = scene.random.randint(0, last_layer)
    begin = extent.offset + layer_index * extent.width
    hold = scene.hold(act)
    scene.files.arm(lambda call: call.name in READS and call.offset == begin, hold)
    restore, blocks = scene.started(engine, prompt)
    hold.let_go()
    ready = scene.delivered(restore)
    scene.states += ["free", "read", "free", "record retired"]
    scene.require(ready == [n != layer_index for n in _LAYERS], f"layer {layer_index} fails")
    scene.require_failed(restore, blocks)
    scene.require_untouched(blocks, layers=[layer_index])
    restore.finish()
    counters = engine.stats().counters
    scene.require(counters["checksum_failures"] == 1, "the mismatch is counted")
    scene.require(scene.hit(engine, prompt) == 0, "the record is retired")
    scene.require(scene.restore(engine, other) == 32, "other records are not")


@TABLE.cell("read.bit-flip-before-claim")
def bit_flip_before_claim(scene: Scene) -> None:
    """A flipped bit that is found while reading ahead makes the claim a refusal."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        scene.files.on_read(flipped(lambda asked: asked // 3))
        ticket = scene.lookup(engine, prompt)
        counted = engine._counters
        scene.until(engine, lambda: counted.checksum_failures == 1, "the mismatch is found")
        blocks = scene.take(16)
        scene.refused("stale-ticket", lambda: engine.claim(ticket, prompt, blocks))
        scene.states += ["free", "read", "free", "record retired"]
        scene.require_untouched(blocks)
        scene.require(scene.save(engine, prompt), "the prompt can be saved again")


@TABLE.cell("read.stands-still-past-its-deadline")
def stalled(scene: Scene) -> None:
    """A read that stands still is a miss at its deadline; its bank waits for it in quarantine."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold, times=2)
        with scene.short_deadlines(engine):
            restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        scene.require(not all(scene.delivered(restore)), "the restore fails at its deadline")
        scene.require_failed(restore, blocks)
        restore.finish()
        scene.give(blocks)
        scene.states += ["free", "read", "QUARANTINED"]
        stats = engine.stats()
        scene.require(stats.banks_in_quarantine > 0, "the counters show it")
        scene.require(stats.leases_open == 1, "the lease lives as long as the read")
        hold.let_go()
        scene.until(engine, lambda: engine._read_banks.free_count == 4, "the banks come back")
        scene.states.append("free")
        scene.require_untouched(blocks)


@TABLE.cells(
    {
        "read.returns-after-its-deadline-failed": {"act": error(errno.EIO)},
        "read.returns-after-its-deadline-short": {"act": short(lambda asked: 0)},
    }
)
def stalled_then_failed(scene: Scene, act: Act) -> None:
    """A read that fails behind its deadline frees its bank like one that succeeds."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        hold = scene.hold(act)
        scene.files.on_read(hold, times=2)
        with scene.short_deadlines(engine):
            restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        scene.require(not restore.wait_layer(3, scene.patience_s), "the restore fails")
        hold.let_go()
        scene.until(engine, lambda: engine._read_banks.free_count == 4, "the banks come back")
        restore.finish()
        scene.states += ["free", "read", "QUARANTINED", "free"]
        scene.require_failed(restore, blocks)
        scene.require_untouched(blocks)


@TABLE.cells(
    {
        "read.returns-after-cancel": {"act": Call.go},
        "read.fails-after-cancel": {"act": error(errno.EIO)},
    }
)
def cancelled(scene: Scene, act: Act) -> None:
    """A cancelled read keeps its bank until it returns, and its bytes go nowhere."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        hold = scene.hold(act)
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        restore.finish()
        scene.give(blocks)
        reading = [b for b in engine._read_banks.banks if b.state is BankState.READ]
        scene.states += ["free", "read", "cancelled"]
        scene.require(len(reading) >= 1, "the bank is still owned by the read")
        hold.let_go()
        scene.until(engine, lambda: engine._read_banks.free_count == 4, "the bank comes back")
        scene.states.append("free")
        scene.require_untouched(blocks)


@TABLE.cell("read.in-flight-at-close")
def at_close(scene: Scene) -> None:
    """A read that has not returned cannot harm the pack: the close is clean without its bank."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
    engine = scene.open()
    hold = scene.hold()
    scene.files.on_read(hold)
    engine_ticket = scene.lookup(engine, prompt)
    scene.reached(hold)
    scene.states += ["free", "read"]
    scene.closed(engine.close(0.02), "clean")
    hold.let_go()
    for thread in engine._pool.threads:
        thread.join(scene.patience_s)
    scene.require(engine_ticket.token_count == PROMPT_TOKENS, "the ticket was good before")
    scene.check_closed()


@TABLE.cell("read.record-retired-in-flight")
def retired_in_flight(scene: Scene) -> None:
    """A record retired while it is read keeps its bytes until the read has returned."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        engine.reset()
        scene.require(engine.stats().used_bytes > 0, "its space is not free yet")
        for _ in range(3):
            scene.saved(engine)
        scene.states += ["read", "retired", "saves"]
        hold.let_go()
        scene.require(all(scene.delivered(restore)), "the claimed restore gets the old bytes")
        scene.require_delivered(prompt, blocks)
        restore.finish()


@TABLE.cell("read.layers-return-out-of-order")
def disordered_layers(scene: Scene) -> None:
    """A layer is ready when its own reads are in, whatever order the disk answers in."""
    with scene.engine(read_workers=4) as engine:
        prompt = scene.saved(engine)
        holds = [scene.hold() for _ in _LAYERS]
        for layer_index, hold in zip(_LAYERS, holds, strict=True):
            scene.files.arm(layer_reads(scene, engine, layer_index), hold)
        restore, blocks = scene.started(engine, prompt)
        # Two more reads begin for each that has returned: 2 stands beside 1, then 3 does.
        for layer_index in (0, 2, 3, 1):
            scene.reached(holds[layer_index])
            ready = restore.wait_layer(layer_index, 0.0)
            scene.require(not ready, f"layer {layer_index} is not ready before its read")
            holds[layer_index].let_go()
            scene.require(restore.wait_layer(layer_index, scene.patience_s), "then it is")
            scene.require_delivered(prompt, blocks, layers=[layer_index])
            scene.states.append(f"layer {layer_index}")
        restore.finish()


TABLE.absent(
    "read.cufile-short",
    "A short count of a GPU-direct read fails its layer.",
    "this engine reads through POSIX only",
)
TABLE.absent(
    "scatter.stream-error",
    "An error of a CUDA stream is a fence that is not proved.",
    "this engine has no CUDA device",
)
TABLE.absent(
    "scatter.fence-settles-later",
    "A pending fence that is proved later frees its bank then.",
    "copies of the CPU device are settled when they return",
)
