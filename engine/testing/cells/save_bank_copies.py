"""Faults of a save bank in its states gather and free.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

import threading
from typing import Any

from rangekv.engine.devices.fence import Fence, FenceState
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.cells.save_bank import LAYERS, LONG, require_invisible
from rangekv.engine.testing.scene import PROMPT_TOKENS, UNALIGNED_MODEL, Scene
from rangekv.engine.transfer.save import SaveState

TABLE = Table("save-bank")


# -- gather ----------------------------------------------------------------------------------------


@TABLE.cells(
    {
        "gather.fence-failed": {"state": FenceState.FAILED, "quarantined": 0, "every": False},
        "gather.fence-unknown": {"state": FenceState.UNKNOWN, "quarantined": 1, "every": False},
        "gather.fence-pending": {"state": FenceState.PENDING, "quarantined": 1, "every": False},
        "gather.raises": {"state": None, "quarantined": 1, "every": False},
        "gather.raises-twice": {"state": None, "quarantined": 2, "every": True},
    }
)
def unproved(scene: Scene, state: FenceState | None, quarantined: int, every: bool) -> None:
    """A gather that is not proved publishes nothing; unless it has ended its bank is not reused."""
    with scene.engine(read_workers=4) as engine:
        prompt = scene.prompt(token_count=LONG)
        save, blocks = scene.begin_save(engine, prompt)
        gather, layer_index = engine._device.gather, scene.random.choice(LAYERS)
        gate = threading.Barrier(2)

        def faulty(lane: Any, target: Any, strips: Any, ids: Any) -> Fence:
            if every:
                gate.wait(scene.patience_s)
            elif all(strip.layer_index != layer_index for strip in strips):
                return gather(lane, target, strips, ids)
            if state is None:
                raise RuntimeError("injected into a copy")
            return Fence(state)

        with scene.copies_through(engine, "gather", faulty):
            scene.announce(save, blocks)
            scene.require(not save.extracted(scene.patience_s), "the extraction says so")
        scene.give(blocks)
        scene.quarantined = quarantined
        scene.states += ["free", "gather", "QUARANTINED" if quarantined else "free"]
        require_invisible(scene, engine, save, prompt)


@TABLE.cell("gather.source-freed-early")
def source_freed(scene: Scene) -> None:
    """Blocks that a producer takes back before extraction are never read as its KV."""
    with scene.engine(save_banks=1) as engine:
        first, other_blocks = scene.begin_save(engine, scene.prompt())
        hold = scene.hold()
        scene.files.on_write(hold)
        scene.announce(first, other_blocks)
        first.extracted(scene.patience_s)
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        scene.announce(save, blocks)
        save.finish()
        scene.give(blocks)
        scene.states += ["announced", "finished", "blocks reused"]
        hold.let_go()
        first.finish()
        scene.require(first.wait(scene.patience_s), "another save is published")
        scene.require(not save.wait(scene.patience_s), "this one is not")
        scene.require(scene.hit(engine, prompt) == 0, "nothing of it is visible")


@TABLE.cell("gather.source-reused-after-extraction")
def source_reused(scene: Scene) -> None:
    """After extraction the blocks are the producer's: what it puts there is not what is written."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        hold = scene.hold()
        scene.files.on_write(hold, times=4)
        scene.announce(save, blocks)
        scene.require(save.extracted(scene.patience_s), "the extraction is whole")
        scene.produce(scene.prompt(), blocks)
        hold.let_go()
        save.finish()
        scene.require(save.wait(scene.patience_s), "it is published")
        scene.states += ["gather", "blocks reused", "write", "visible"]
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "with the KV of its tokens")


@TABLE.cells({"gather.cancelled": {"by": "cancel"}, "gather.finished": {"by": "finish"}})
def ended_while_gathering(scene: Scene, by: str) -> None:
    """Whoever ends a save during a copy gets its blocks back when the copy has ended."""
    with scene.engine() as engine:
        save, blocks = scene.begin_save(engine, scene.prompt())
        gate = scene.hold_copies(engine, "gather")
        scene.announce(save, blocks)
        scene.require(gate.wait_reached(scene.patience_s), "a copy runs")
        scene.require_waits(getattr(save, by), gate.let_go)
        scene.give(blocks)
        scene.states += ["gather", by, "free"]
        scene.until(engine, lambda: save.settled, "the save ends")


@TABLE.cell("gather.reset")
def reset_while_gathering(scene: Scene) -> None:
    """A save that a reset voids goes on to its end and is never visible."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        scene.announce(save, blocks, layers=[0, 1])
        engine.reset()
        scene.announce(save, blocks, layers=[2, 3])
        scene.states += ["gather", "reset"]
        save.extracted(scene.patience_s)
        scene.give(blocks)
        require_invisible(scene, engine, save, prompt)


@TABLE.cell("gather.one-layer-behind", model=UNALIGNED_MODEL)
def uneven(scene: Scene) -> None:
    """Where layers end at different tokens, what all of them have is published and no more."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        size = scene.model.block_tokens
        for layer_index in LAYERS:
            ready = 9 if layer_index == 2 else 16
            save.layer_ready(layer_index, (0, ready * size), blocks[:ready])
        save.extracted(scene.patience_s)
        scene.give(blocks)
        save.finish()
        save.wait(scene.patience_s)
        end = scene.restore(engine, prompt)
        scene.states += ["gather", f"{end} of {9 * size} tokens visible"]
        scene.require(end <= 9 * size, "nothing behind the slowest layer is visible")


@TABLE.cell("gather.pieces-out-of-order")
def out_of_order(scene: Scene) -> None:
    """Pieces announced in any order, some twice, are saved as one range."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        size = scene.model.block_tokens
        pieces = [(layer, block) for layer in LAYERS for block in range(16)] * 2
        scene.random.shuffle(pieces)
        for layer, block in pieces:
            save.layer_ready(layer, (block * size, (block + 1) * size), blocks[block : block + 1])
        scene.require(save.extracted(scene.patience_s), "the extraction is whole")
        scene.give(blocks)
        save.finish()
        scene.require(save.wait(scene.patience_s), "it is published")
        scene.states += ["gather", "write", "visible"]
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "as a whole")


# -- free ------------------------------------------------------------------------------------------


@TABLE.cell("free.none-in-time")
def none_in_time(scene: Scene) -> None:
    """Where no bank comes free in time the piece is dropped and counted."""
    with scene.engine(save_banks=1) as engine:
        first, more = scene.begin_save(engine, scene.prompt())
        hold = scene.hold()
        scene.files.on_write(hold)
        scene.announce(first, more)
        first.extracted(scene.patience_s)
        prompt = scene.prompt()
        save, blocks = scene.begin_save(engine, prompt)
        scene.announce(save, blocks)
        scene.require(not save.extracted(0.0), "the extraction does not wait longer than it may")
        scene.give(blocks)
        scene.states += ["no bank", "dropped"]
        scene.require(engine.stats().counters["pieces_dropped"] > 0, "it is counted")
        hold.let_go()
        first.finish()
        save.finish()
        scene.require(first.wait(scene.patience_s), "the other save is published")
        scene.require(not save.wait(scene.patience_s), "this one has nothing to publish")


@TABLE.cell("free.comes-in-time")
def comes_in_time(scene: Scene) -> None:
    """An extraction waits for a bank that a write gives back, and nothing is dropped."""
    with scene.engine(save_banks=1) as engine:
        prompt = scene.prompt(token_count=LONG)
        save, blocks = scene.begin_save(engine, prompt)
        scene.announce(save, blocks)
        scene.require(save.extracted(scene.patience_s), "all of it is extracted through one bank")
        scene.give(blocks)
        save.finish()
        scene.require(save.wait(scene.patience_s), "it is published")
        scene.states += ["free", "gather", "write", "free", "gather", "write", "visible"]
        scene.require(scene.restore(engine, prompt) == LONG, "as a whole")


@TABLE.cell("free.fewer-than-saves")
def fewer_than_saves(scene: Scene) -> None:
    """More saves than banks, all at once, are all published: none waits for itself."""
    with scene.engine(save_banks=1) as engine:
        prompts = [scene.prompt() for _ in range(6)]
        begun = [scene.begin_save(engine, prompt) for prompt in prompts]
        for layer_index in LAYERS:
            for save, blocks in begun:
                scene.announce(save, blocks, layers=[layer_index])
        for save, blocks in begun:
            scene.require(save.extracted(scene.patience_s), "every extraction is whole")
            scene.give(blocks)
            save.finish()
        scene.require(all(save.wait(scene.patience_s) for save, _ in begun), "all are published")
        scene.states += ["6 saves", "1 bank", "6 visible"]


@TABLE.cell("free.all-in-quarantine")
def all_in_quarantine(scene: Scene) -> None:
    """With every bank in quarantine saves are dropped and counted, and restores go on."""
    with scene.engine(save_banks=2) as engine:
        other = scene.saved(engine)
        with scene.copies_through(engine, "gather", lambda *_: Fence(FenceState.UNKNOWN)):
            for _ in range(2):
                save, blocks = scene.begin_save(engine, scene.prompt())
                scene.announce(save, blocks)
                scene.require(not save.extracted(scene.patience_s), "the gather is not proved")
                scene.give(blocks)
                save.finish()
        scene.quarantined = 2
        save, blocks = scene.begin_save(engine, scene.prompt())
        scene.announce(save, blocks)
        scene.require(not save.extracted(0.0), "without a bank a save is dropped")
        save.finish()
        scene.states += ["QUARANTINED", "QUARANTINED", "dropped"]
        scene.require(scene.restore(engine, other) == PROMPT_TOKENS, "restores go on")


@TABLE.cell("free.producer-goes-away")
def producer_goes_away(scene: Scene) -> None:
    """A save that its producer leaves open is ended by the close, with what was extracted of it."""
    engine = scene.open()
    prompt = scene.prompt()
    save, blocks = scene.begin_save(engine, prompt)
    scene.announce(save, blocks)
    save.extracted(scene.patience_s)
    scene.closed(engine.close(scene.patience_s), "clean")
    scene.states.append("visible")
    scene.require(save.state is SaveState.PUBLISHED, "what was written is published")
    with scene.engine() as engine:
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "and there after a reopen")
