"""Faults of an extent's generation in its states visible and retired.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

import numpy as np
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.cells.extent import PACK_TOKENS, PACKS, extent_of, longer
from rangekv.engine.testing.forge import forge
from rangekv.engine.testing.scene import (
    MODEL,
    PROMPT_TOKENS,
    Prompt,
    Scene,
)
from rangekv.format.layout import COUNTER_MAX

TABLE = Table("extent")


# -- visible ---------------------------------------------------------------------------------------


@TABLE.cells(
    {"visible.retired-under-one-lease": {"leases": 1}, "visible.retired-under-many": {"leases": 3}}
)
def retired_under_leases(scene: Scene, leases: int) -> None:
    """A retired generation keeps its bytes until its last lease ends; its readers get them."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        running = [scene.started(engine, prompt) for _ in range(leases)]
        engine.reset()
        scene.states += ["visible", "retired"]
        for restore, blocks in running:
            scene.require(engine.stats().used_bytes > 0, "leased bytes are not free")
            scene.require(all(scene.delivered(restore)), "a reader gets the old bytes")
            scene.require_delivered(prompt, blocks)
            restore.finish()
        scene.until(engine, lambda: not engine._catalog.leases.open, "every lease ends")
        scene.require(engine.stats().used_bytes == 0, "then the space is free")
        scene.states.append("reclaimed")


@TABLE.cell("visible.evicted-during-read")
def evicted_during_read(scene: Scene) -> None:
    """An extent that is read is not evicted: its reader gets its bytes."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        scene.fill(engine)
        hold.let_go()
        scene.require(all(scene.delivered(restore)), "the reader gets its bytes")
        scene.require_delivered(prompt, blocks)
        restore.finish()
        scene.states += ["visible", "read", "evictions of others"]
        scene.require(scene.hit(engine, prompt) == PROMPT_TOKENS, "it is still there")


@TABLE.cell("visible.evicted-least-recently-used")
def evicted_in_order(scene: Scene) -> None:
    """What was used last is evicted last."""
    with scene.engine() as engine:
        prompts = [scene.saved(engine, token_count=PACK_TOKENS) for _ in range(PACKS)]
        scene.require(scene.restore(engine, prompts[0]) == PACK_TOKENS, "the oldest is used")
        scene.saved(engine, token_count=PACK_TOKENS)
        hits = [scene.hit(engine, prompt) for prompt in prompts]
        scene.states += ["visible", "evicted"]
        expected = [PACK_TOKENS, 0, PACK_TOKENS, PACK_TOKENS]
        scene.require(hits == expected, f"the least recently used one is gone: {hits}")


@TABLE.cell("visible.evicted-with-descendants")
def evicted_with_descendants(scene: Scene) -> None:
    """Where a record is retired, so is all that hangs on it: no chain has a hole."""
    with scene.engine() as engine:
        parent = scene.saved(engine, token_count=512)
        child = longer(scene, parent, PACK_TOKENS + 512)
        grand = longer(scene, child, PACK_TOKENS + 768)
        for prompt in (child, grand):
            scene.require(scene.save(engine, prompt), "the save is published")
        scene.fill(engine)
        hits = [scene.restore(engine, prompt) for prompt in (parent, child, grand)]
        scene.states += ["visible", "evicted"]
        scene.require(hits == sorted(hits), f"a chain ends where it was cut: {hits}")
        scene.require(len(set(hits)) == 1, "all three end at the same token")


@TABLE.cells(
    {
        "visible.diverges-inside-first-block": {"same": 5},
        "visible.diverges-inside-a-block": {"same": 101},
        "visible.diverges-at-a-block": {"same": 96},
        "visible.diverges-at-the-last-token": {"same": PROMPT_TOKENS - 1},
    }
)
def diverges(scene: Scene, same: int) -> None:
    """A prompt that leaves a stored one gets the whole blocks before that, then its own."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        other = scene.prompt(prompt, same_tokens=same)
        common = same // MODEL.block_tokens * MODEL.block_tokens
        scene.require(scene.restore(engine, other) == common, f"{common} tokens are common")
        scene.require(scene.save(engine, other), "the rest of the other is saved")
        scene.states += ["visible", f"{common} tokens shared", "both visible"]
        for each in (prompt, other):
            scene.require(scene.restore(engine, each) == PROMPT_TOKENS, "each gets its own bytes")


@TABLE.cell("visible.grown-in-place")
def grown_in_place(scene: Scene) -> None:
    """Turns go into the free tail of one extent, and no visible byte is written again."""
    with scene.engine() as engine:
        prompt = scene.saved(engine, token_count=64)
        home = extent_of(engine, prompt)
        before = [
            scene.read_pack(home.offset + layer * home.width, 64 * MODEL.token_bytes)
            for layer in range(4)
        ]
        while len(prompt) * MODEL.token_bytes < home.width:
            prompt = longer(scene, prompt, len(prompt) + 16)
            scene.require(scene.save(engine, prompt), "a turn is saved")
        after = [
            scene.read_pack(home.offset + layer * home.width, 64 * MODEL.token_bytes)
            for layer in range(4)
        ]
        scene.states += ["visible", "grown", f"{len(prompt)} tokens"]
        scene.require(extent_of(engine, prompt) is home, "all turns lie in one extent")
        scene.require(before == after, "the first turn's bytes are as they were")
        scene.require(scene.restore(engine, prompt) == len(prompt), "all turns come back")


@TABLE.cell("visible.damaged-with-descendants")
def damaged_with_descendants(scene: Scene) -> None:
    """A record whose bytes rotted is retired with all that continues it, and with nothing else."""
    with scene.engine() as engine:
        parent, other = scene.saved(engine), scene.saved(engine)
        child = longer(scene, parent, PROMPT_TOKENS + 64)
        scene.require(scene.save(engine, child), "the child is published")
        extent = extent_of(engine, parent)
        scene.rot(extent.offset + 2 * extent.width + 4000)
        restore, _ = scene.started(engine, child)
        ready = scene.delivered(restore)
        scene.require(ready == [True, True, False, True], f"the rotten layer fails: {ready}")
        scene.require(len(restore.failed_blocks()) >= 16, "its blocks are reported as failed")
        restore.finish()
        scene.require(not scene.hit(engine, parent), "the record is retired")
        scene.require(not scene.hit(engine, child), "so is its descendant")
        scene.require(scene.restore(engine, other) == PROMPT_TOKENS, "others are not")
        scene.states += ["visible", "rotten", "retired"]


# -- retired ---------------------------------------------------------------------------------------


@TABLE.cell("retired.referenced")
def reclaim_with_references(scene: Scene) -> None:
    """Space of a retired generation is not handed out again while somebody may read it."""
    with scene.engine() as engine:
        prompt = scene.saved(engine, token_count=PACK_TOKENS)
        extent = extent_of(engine, prompt)
        ticket = scene.lookup(engine, prompt)
        engine.reset()
        scene.fill(engine)
        places = {live.offset for live in engine._catalog.extents.live if live is not extent}
        scene.require(extent in engine._catalog.extents.live, "the retired generation lives on")
        scene.require(extent.offset not in places, "nobody else has its space")
        engine.release(ticket)
        scene.until(engine, lambda: not engine._catalog.leases.open, "the lease ends")
        scene.require(extent not in engine._catalog.extents.live, "then it is free")
        scene.states += ["retired", "referenced", "reclaimed"]


@TABLE.cell("retired.reused-under-an-old-ticket")
def reused_under_old_ticket(scene: Scene) -> None:
    """An old ticket never reads the new generation that took its space."""
    with scene.engine() as engine:
        prompt = scene.saved(engine, token_count=PACK_TOKENS)
        extent = extent_of(engine, prompt)
        ticket = scene.lookup(engine, prompt)
        engine.reset()
        engine.release(ticket)
        scene.until(engine, lambda: not engine._catalog.leases.open, "the lease ends")
        scene.fill(engine)
        same = [live for live in engine._catalog.extents.live if live.offset == extent.offset]
        scene.require(len(same) == 1 and same[0].generation > extent.generation, "it is reused")
        blocks = scene.take(PACK_TOKENS // MODEL.block_tokens)
        scene.refused("stale-ticket", lambda: engine.claim(ticket, prompt, blocks))
        scene.require_untouched(blocks)
        scene.states += ["retired", "reclaimed", "new generation", "refused"]


@TABLE.cell("retired.retired-again")
def retired_again(scene: Scene) -> None:
    """Retiring what is retired changes nothing: no reference is given back twice."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        ticket = scene.lookup(engine, prompt)
        (match,) = ticket.matches
        for _ in range(2):
            engine.reset()
            engine._catalog.retire(match.record)
        scene.require(engine.stats().counters["records_retired"] == 1, "it is counted once")
        engine.release(ticket)
        scene.until(engine, lambda: not engine._catalog.leases.open, "the lease ends")
        scene.states += ["retired", "retired", "reclaimed"]


@TABLE.cell("retired.parent-of-a-save")
def parent_of_a_save(scene: Scene) -> None:
    """A save whose parent is retired under it ends invisible, and its space returns."""
    with scene.engine() as engine:
        parent = scene.saved(engine)
        prompt = longer(scene, parent, 2 * PROMPT_TOKENS)
        save, blocks = scene.begin_save(engine, prompt)
        scene.announce(save, blocks, layers=[0, 1])
        engine._catalog.retire(save.parts[0].parent)  # type: ignore[arg-type]
        scene.announce(save, blocks, layers=[2, 3])
        save.extracted(scene.patience_s)
        save.finish()
        scene.require(not save.wait(scene.patience_s), "it is not published")
        scene.require(scene.hit(engine, prompt) == 0, "nothing is visible")
        scene.states += ["reserved", "parent retired", "void"]
        scene.require(engine.stats().used_bytes == 0, "all space returned")


@TABLE.cell("retired.while-saves-and-restores-run")
def reset_under_load(scene: Scene) -> None:
    """What began before a reset is never visible after it, whatever was under way."""
    with scene.engine() as engine:
        stored = scene.saved(engine)
        save, blocks = scene.begin_save(engine, scene.prompt())
        restore, taken = scene.started(engine, stored)
        scene.announce(save, blocks)
        engine.reset()
        later = scene.saved(engine)
        save.extracted(scene.patience_s)
        save.finish()
        scene.require(not save.wait(scene.patience_s), "the older save is void")
        scene.require(all(scene.delivered(restore)), "the older restore gets its bytes")
        scene.require_delivered(stored, taken)
        restore.finish()
        scene.require(scene.hit(engine, stored) == 0, "what was stored before is gone")
        scene.require(scene.restore(engine, later) == PROMPT_TOKENS, "what came later is there")
        scene.states += ["visible", "reset", "visible again"]


@TABLE.cell("retired.generation-at-its-limit")
def generation_limit(scene: Scene) -> None:
    """A generation number is never used twice: at its limit the store reopens cold, not wrong."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
    forge(scene, lambda tables: setattr(tables, "generation_max", COUNTER_MAX))
    engine = scene.open()
    scene.require(engine.open_result.state == "warm", "the limit itself is accepted")
    scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "what is there is served")
    scene.saved(engine)
    engine.close(scene.patience_s)
    scene.reopened("bad-snapshot")
    with scene.engine() as engine:
        scene.require(scene.hit(engine, prompt) == 0, "a cold store serves nothing")
        scene.saved(engine)


@TABLE.cell("retired.ten-times-the-capacity")
def ten_times(scene: Scene) -> None:
    """Ten times the capacity goes through a file that does not grow, and all of it is right."""
    with scene.engine() as engine:
        size = (scene.store / "range.pack").stat().st_size
        sizes = np.array([64, 256, 512, 1024])
        stored: list[Prompt] = []
        written = 0
        while written < 10 * engine.geometry.usable_bytes:
            length = int(scene.random.choice(sizes.tolist()))
            like = scene.random.choice(stored) if stored and scene.random.random() < 0.4 else None
            same = min(len(like), length) // 32 * 16 if like is not None else 0
            prompt = scene.prompt(like, same_tokens=same, token_count=length)
            hit = scene.hit(engine, prompt)
            if hit < length:
                scene.require(scene.save(engine, prompt), "each save finds room")
            scene.require(scene.restore(engine, prompt) == length, "and is there at once")
            written += (length - hit) * MODEL.token_bytes * MODEL.layer_count
            stored = [*stored[-40:], prompt]
        for prompt in stored:
            scene.restore(engine, prompt)
        scene.require(engine.stats().counters["checksum_failures"] == 0, "no page ever mismatched")
        scene.require((scene.store / "range.pack").stat().st_size == size, "the file is as it was")
        scene.states += ["reserved", "visible", "retired", "reclaimed"]
