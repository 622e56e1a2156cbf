"""Faults of a read bank in its states scatter and free.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

from typing import Any

from rangekv.engine.devices.device import Strip
from rangekv.engine.devices.fence import Fence, FenceState
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.cells.read_bank import layer_reads
from rangekv.engine.testing.checks import Violation
from rangekv.engine.testing.gpu_blocks import fill
from rangekv.engine.testing.scene import PROMPT_TOKENS, Scene

TABLE = Table("read-bank")

_LAYERS = (0, 1, 2, 3)


# -- scatter ---------------------------------------------------------------------------------------


@TABLE.cells(
    {
        "scatter.fence-failed": {"state": FenceState.FAILED, "quarantined": 0},
        "scatter.fence-unknown": {"state": FenceState.UNKNOWN, "quarantined": 1},
        "scatter.fence-pending": {"state": FenceState.PENDING, "quarantined": 1},
        "scatter.raises": {"state": None, "quarantined": 1},
    }
)
def unproved(scene: Scene, state: FenceState | None, quarantined: int) -> None:
    """A copy that is not proved is no layer event; unless it has ended its bank is not reused."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        scatter, layer_index = engine._device.scatter, scene.random.choice(_LAYERS)

        def faulty(lane: Any, source: Any, strips: list[Strip], ids: Any) -> Fence:
            if all(strip.layer_index != layer_index for strip in strips):
                return scatter(lane, source, strips, ids)
            if state is None:
                raise RuntimeError("injected into a copy")
            return Fence(state)

        with scene.copies_through(engine, "scatter", faulty):
            restore, blocks = scene.started(engine, prompt)
            ready = scene.delivered(restore)
        scene.require(ready == [n != layer_index for n in _LAYERS], f"layer {layer_index} fails")
        scene.require_failed(restore, blocks)
        restore.finish()
        scene.give(blocks)
        scene.quarantined = quarantined
        scene.states += ["free", "read", "scatter", "QUARANTINED" if quarantined else "free"]
        stats = engine.stats()
        scene.require(stats.banks_in_quarantine == quarantined, "the counters say so")
        for _ in range(3):
            scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "others are restored")


@TABLE.cell("scatter.cancelled")
def cancelled_scatter(scene: Scene) -> None:
    """A finish during a copy returns when the copy has ended: then the blocks are the caller's."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        gate = scene.hold_copies(engine, "scatter")
        restore, blocks = scene.started(engine, prompt)
        scene.require(gate.wait_reached(scene.patience_s), "a copy runs")
        scene.require_waits(restore.finish, gate.let_go)
        scene.states += ["read", "scatter", "free"]
        scene.give(blocks)
        scene.until(engine, lambda: engine._read_banks.free_count == 4, "all banks come back")
        scene.require_untouched(blocks)


@TABLE.cell("scatter.outlives-the-deadline")
def late_scatter(scene: Scene) -> None:
    """A copy that ends behind the restore's deadline is proved, and its layer counts."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        gate = scene.hold_copies(engine, "scatter")
        restore, _ = scene.started(engine, prompt)
        scene.require(gate.wait_reached(scene.patience_s), "a copy runs")
        copied = scene.expire(engine, restore)
        scene.until(engine, lambda: restore.errors != [] or not restore.pending, "the rest is late")
        gate.let_go()
        ready = scene.delivered(restore)
        scene.states += ["read", "scatter", "free"]
        scene.require(copied != set(), "a layer is being copied as its deadline passes")
        scene.require(all(ready[n] for n in copied), "the copied layers are delivered")
        restore.finish()


@TABLE.cell("scatter.engine-failed")
def failed_engine(scene: Scene) -> None:
    """After a defect in an event handler lookups miss, and a finish still waits for its copies."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
    engine = scene.open()
    gate = scene.hold_copies(engine, "scatter")
    restore, _ = scene.started(engine, prompt)
    scene.require(gate.wait_reached(scene.patience_s), "a copy runs")
    engine._events.post(_defect)
    scene.require(scene.lookup(engine, prompt).reason == "engine-failed", "lookups miss")
    scene.require_waits(restore.finish, gate.let_go)
    scene.closed(engine.close(scene.patience_s), "dirty")
    scene.reopened("dirty-marker")


def _defect() -> None:
    raise RuntimeError("injected into an event handler")


# -- free ------------------------------------------------------------------------------------------


@TABLE.cells({"free.fewer-than-requests": {"banks": 2}, "free.only-one": {"banks": 1}})
def few_banks(scene: Scene, banks: int) -> None:
    """More restores than banks all end: a request never holds a bank while it waits for one."""
    with scene.engine(read_banks=banks) as engine:
        prompts = [scene.saved(engine) for _ in range(4)]
        running = [scene.started(engine, prompt) for prompt in prompts]
        for prompt, (restore, blocks) in zip(prompts, running, strict=True):
            scene.require(all(scene.delivered(restore)), "every restore is delivered")
            scene.require_delivered(prompt, blocks)
            restore.finish()
        scene.states += ["free", "read", "scatter", "free"]


@TABLE.cell("free.prefetch-leaves-one")
def prefetch_leaves_one(scene: Scene) -> None:
    """Reading ahead takes seven of eight banks: the eighth serves scheduled work."""
    with scene.engine(read_banks=8, read_workers=8) as engine:
        prompt, other = scene.saved(engine), scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold, times=7)
        waiting = [scene.lookup(engine, prompt) for _ in range(8)]
        for _ in range(7):
            scene.reached(hold)
        scene.require(engine._read_banks.free_count == 1, "one bank is free")
        scene.states += ["free", "7 of 8 read ahead"]
        scene.require(scene.restore(engine, other) == PROMPT_TOKENS, "it serves a restore")
        hold.let_go()
        for ticket in waiting:
            restore, blocks = scene.claim(engine, ticket, prompt)
            scene.require(all(scene.delivered(restore)), "what was read ahead is delivered")
            scene.require_delivered(prompt, blocks)
            restore.finish()


@TABLE.cell("free.taken-back")
def taken_back(scene: Scene) -> None:
    """A bank that was read ahead goes to scheduled work; its owner reads again."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        others = [scene.saved(engine) for _ in range(2)]
        ticket = scene.lookup(engine, prompt)
        scene.until(engine, lambda: len(ticket.restore.read) == 3, "three banks are read ahead")
        hold = scene.hold()
        scene.files.on_read(hold, times=2)
        running = [scene.started(engine, other) for other in others]
        scene.reached(hold)
        scene.reached(hold)
        scene.require(len(ticket.restore.read) < 3, "a bank was taken back")
        scene.states += ["read ahead", "taken back", "read again"]
        hold.let_go()
        for other, (restore, blocks) in zip(others, running, strict=True):
            scene.require(all(scene.delivered(restore)), "the scheduled restores are delivered")
            scene.require_delivered(other, blocks)
            restore.finish()
        restore, blocks = scene.claim(engine, ticket, prompt)
        scene.require(all(scene.delivered(restore)), "so is the one that gave way")
        scene.require_delivered(prompt, blocks)
        restore.finish()


@TABLE.cell("free.first-layer-first")
def first_layer_first(scene: Scene) -> None:
    """A restore begins with its first layer's reads; two more begin for each that has returned."""
    with scene.engine(read_banks=8, read_workers=8) as engine:
        prompt = scene.saved(engine)
        holds = [scene.hold() for _ in range(4)]
        for layer_index, hold in enumerate(holds):
            scene.files.arm(layer_reads(scene, engine, layer_index), hold)
        restore, blocks = scene.started(engine, prompt)
        for number, in_flight in enumerate([1, 2, 2, 1]):  # the last layer has no successor
            scene.reached(holds[number])
            reading = sorted(span.layer_first for span in restore.reading)
            expected = list(range(number, number + in_flight))
            scene.require(reading == expected, f"layers {expected} are read, not {reading}")
            holds[number].let_go()
            scene.require(restore.wait_layer(number, scene.patience_s), f"layer {number} arrives")
        scene.require_delivered(prompt, blocks)
        restore.finish()
        scene.states += ["1 read", "2 reads", "delivered"]


@TABLE.cells({"free.stalled-but-for-most": {"banks": 8}, "free.all-stalled": {"banks": 2}})
def disk_stalled(scene: Scene, banks: int) -> None:
    """Once two reads are past their deadlines a lookup misses at once, until one returns."""
    with scene.engine(read_banks=banks, read_workers=4) as engine:
        prompts = [scene.saved(engine) for _ in range(3)]
        holds = [scene.hold() for _ in range(2)]
        for prompt, hold in zip(prompts, holds, strict=False):
            scene.files.on_read(hold)
            with scene.short_deadlines(engine):
                restore, _ = scene.started(engine, prompt)
            scene.reached(hold)
            scene.require(not any(scene.delivered(restore)), "the restore fails at its deadline")
            restore.finish()
        scene.require(scene.lookup(engine, prompts[2]).reason == "stalled", "the miss is named")
        scene.states += ["QUARANTINED", "QUARANTINED", "miss"]
        holds[0].let_go()
        scene.until(engine, lambda: engine._read_banks.free_count == banks - 1, "one comes back")
        scene.require(scene.restore(engine, prompts[2]) == PROMPT_TOKENS, "and all are served")
        holds[1].let_go()


@TABLE.cell("free.stall-of-another-request")
def others_go_on(scene: Scene) -> None:
    """A read that stands still holds one bank and one thread: other requests go on."""
    with scene.engine() as engine:
        prompt, other = scene.saved(engine), scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        scene.states += ["read", "others restore and save"]
        for _ in range(3):
            scene.require(scene.restore(engine, other) == PROMPT_TOKENS, "others restore")
            scene.saved(engine)
        hold.let_go()
        scene.require(all(scene.delivered(restore)), "the slow one ends too")
        scene.require_delivered(prompt, blocks)
        restore.finish()


@TABLE.cell("free.written-while-free")
def written_while_free(scene: Scene) -> None:
    """The checks themselves notice a byte that reaches a bank which is free."""
    try:
        with scene.engine() as engine:
            scene.saved(engine)
            fill(engine._read_banks.banks[0].memory[17:18], 0)
    except Violation as seen:
        scene.states += ["free", "written"]
        scene.evidence.append(f"the check says: {seen}")
    else:
        raise Violation("a write into a free bank is seen")
