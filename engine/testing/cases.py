"""The fault table: the named cases, each a kind of fault, and behind them every cell of the matrix.

Owns the table that `rangectl replay-fault` and the tests run; a named case draws the cells of its
kind by seed, and adds those whose place in time only a seed can name.
"""

from __future__ import annotations

from collections.abc import Callable

from rangekv.engine.config import RECOVERIES
from rangekv.engine.testing.case import Case, Outcome, Verdict, run_case
from rangekv.engine.testing.cells import (
    extent,
    extent_life,
    journal,
    journal_life,
    marker,
    placement,
    read_bank,
    read_bank_copies,
    save_bank,
    save_bank_copies,
    snapshot,
    store,
    ticket,
    ticket_claim,
    ticket_release,
)
from rangekv.engine.testing.checks import POISON
from rangekv.engine.testing.kill import Killer
from rangekv.engine.testing.scene import MODEL, PROMPT_TOKENS, Scene

__all__ = ["CASES", "CELLS", "NAMED", "Case", "Outcome", "Verdict", "run_case"]

_MODULES = (
    *(ticket, ticket_claim, ticket_release, read_bank, read_bank_copies, placement),
    *(save_bank, save_bank_copies, extent, extent_life, marker, snapshot),
    *(journal, journal_life, store),
)
CELLS: tuple[Case, ...] = tuple(case for module in _MODULES for case in module.TABLE.cases)


def _drawn(case_id: str, owner: str, rule: str, *prefixes: str) -> Case:
    """Return a case that plays one cell of its kind, drawn by seed."""
    cells = [
        cell
        for cell in CELLS
        if cell.case_id.startswith(prefixes) and cell.absent is None and cell.model is MODEL
    ]

    def play(scene: Scene) -> None:
        cell = scene.random.choice(cells)
        scene.evidence.append(f"drawn: {cell.case_id}")
        cell.play(scene)

    return Case(case_id, owner, rule, play)


def _played(owner: str, play: Callable[[Scene], None]) -> Case:
    rule = " ".join((play.__doc__ or "").split())
    return Case(play.__name__.replace("_", "-"), owner, rule, play)


def delay(scene: Scene) -> None:
    """Reads that return in any order, after any time, deliver each layer's own bytes."""
    with scene.engine(read_workers=8, read_banks=8) as engine:
        prompts = [scene.saved(engine) for _ in range(2)]
        holds = [scene.hold() for _ in range(8)]
        for number, hold in enumerate(holds):
            scene.files.on_read(hold, skip=number)
        numbers, left = iter(holds), [MODEL.layer_count] * len(prompts)
        standing = []

        def begin(owner: int, count: int) -> None:
            """`count` reads of a restore come, or as many as it has left."""
            for _ in range(min(count, left[owner])):
                left[owner] -= 1
                hold = next(numbers)
                scene.reached(hold)
                standing.append((hold, owner))

        running = []
        for owner, prompt in enumerate(prompts):
            running.append(scene.started(engine, prompt))
            begin(owner, 1)
        while standing:
            hold, owner = standing.pop(scene.random.randrange(len(standing)))
            hold.let_go()
            begin(owner, 2)  # each that returns lets two more begin
        for prompt, (restore, blocks) in zip(prompts, running, strict=True):
            scene.require(all(scene.delivered(restore)), "every restore is delivered")
            scene.require_delivered(prompt, blocks)
            restore.finish()
        scene.states += ["reads stand", "let go in any order", "delivered"]


def cancel_at(scene: Scene) -> None:
    """A restore cancelled at any point delivers whole layers or nothing, and leaks nothing."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        point = scene.random.randrange(8)
        copies = point >= 4
        hold = scene.hold()
        if copies:
            scene.hold_copies(engine, "scatter", hold, skip=point - 4)
        else:
            scene.files.on_read(hold, skip=point)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        scene.states += [f"{'scatter' if copies else 'read'} {point % 4 + 1} of 4", "cancelled"]
        if copies:
            hold.let_go()
        engine.release(restore.ticket)
        hold.let_go()
        scene.until(engine, lambda: not engine._catalog.leases.open, "the lease ends")
        whole = [n for n in range(MODEL.layer_count) if (scene.kv[n][blocks] != POISON).any()]
        scene.require_delivered(prompt, blocks, layers=whole)
        failed = restore.failed_blocks()
        scene.require(
            not failed or len(failed) == len(blocks), "its blocks are all proved or all failed"
        )


def preempt_at(scene: Scene) -> None:
    """A save preempted after any step keeps what was extracted; reused blocks are not read."""
    with scene.engine() as engine:
        prompt = scene.prompt(token_count=2 * PROMPT_TOKENS)
        save, blocks = scene.begin_save(engine, prompt)
        size = MODEL.block_tokens
        steps, preempted = 8, scene.random.randrange(1, 8)
        per_step = len(blocks) // steps
        for step in range(preempted):
            first, last = step * per_step, (step + 1) * per_step
            for layer_index in range(MODEL.layer_count):
                save.layer_ready(layer_index, (first * size, last * size), blocks[first:last])
            scene.require(save.extracted(scene.patience_s), "a step is extracted")
            scene.produce(scene.prompt(), blocks[first:last])
        announced = preempted * per_step
        save.layer_ready(0, (announced * size, len(prompt)), blocks[announced:])
        save.finish()
        scene.give(blocks)
        scene.require(save.wait(scene.patience_s), "what was extracted is published")
        end = scene.restore(engine, prompt)
        scene.states += [f"step {preempted} of {steps}", "preempted", f"{end} tokens visible"]
        scene.require(0 < end <= announced * size, "and nothing that was not")


def kill_at(scene: Scene) -> None:
    """A process killed at any step, of a commit too, leaves no wrong byte to be served."""
    seed, recovery = scene.random.randrange(1 << 30), scene.random.choice(RECOVERIES)
    killer = Killer(scene.store, seed, recovery=recovery, patience_s=scene.patience_s)
    scene.states.append(f"recovery {recovery}")
    for _ in range(2):
        killed = killer.cycle()
        scene.states.append(f"{killed.how} → {killed.found}")
        scene.evidence.append(f"{killed.tokens} visible tokens byte for byte")
    killer.settle()


NAMED: tuple[Case, ...] = (
    _drawn(
        "stale-ticket",
        "ticket",
        "A ticket whose generation has been retired since its lookup is refused at the claim.",
        "ticket.claim.retired",
        "ticket.claim.reused",
        "extent.retired.reused",
    ),
    _drawn(
        "divergent-prefix",
        "extent",
        "A prompt that leaves a stored one inside a block gets the whole blocks before that point.",
        "extent.visible.diverges",
    ),
    _drawn(
        "partial-completion",
        "save-bank",
        "A save of which one layer's write failed never becomes visible, and its space returns.",
        "save-bank.write.eio",
        "save-bank.write.short",
        "save-bank.write.late",
    ),
    _drawn(
        "cancel-in-flight",
        "read-bank",
        "A cancelled restore delivers nothing more, and its bank waits for the read to return.",
        "ticket.release.claimed-reads",
        "read-bank.read.returns-after-cancel",
        "read-bank.read.fails-after-cancel",
    ),
    _drawn(
        "dirty-reopen",
        "marker",
        "Without a journal a store whose process died opens cold, with the reason.",
        "marker.present.process-killed",
        "marker.present.deleted-by-hand-after-death",
    ),
    _drawn(
        "clean-reopen",
        "snapshot",
        "A store that was closed opens warm, and every byte comes back.",
        "snapshot.reopen.as-it-was",
        "snapshot.reopen.moved",
    ),
    _drawn(
        "short-read",
        "read-bank",
        "A read that returns fewer bytes than asked is a miss; stale bytes are never delivered.",
        "read-bank.read.short",
        "placement.read.short",
    ),
    _drawn(
        "eio-read",
        "read-bank",
        "A read that fails is a miss of its blocks and of nothing else.",
        "read-bank.read.e",
        "placement.read.e",
    ),
    _drawn(
        "eio-write",
        "save-bank",
        "A write that fails keeps its whole range invisible.",
        "save-bank.write.eio",
        "save-bank.write.eintr",
    ),
    _drawn(
        "enospc-write",
        "save-bank",
        "A write without space or quota keeps its whole range invisible.",
        "save-bank.write.enospc",
        "save-bank.write.edquot",
        "save-bank.write.efbig",
    ),
    _drawn(
        "torn-write",
        "save-bank",
        "A write of which only a part arrived keeps its whole range invisible.",
        "save-bank.write.torn",
        "store.files.write-that",
    ),
    _drawn(
        "bit-flip",
        "read-bank",
        "One flipped bit is a miss, wherever it is, and its record is retired.",
        "read-bank.read.bit-flip",
        "read-bank.read.misdirected",
        "placement.read.bit-flip",
        "extent.visible.damaged",
    ),
    _played("read-bank", delay),
    _drawn(
        "never-complete",
        "read-bank",
        "I/O that never returns is a miss at its deadline and holds up nobody else.",
        "read-bank.read.stands-still",
        "read-bank.free.stall",
        "read-bank.free.all-stalled",
        "read-bank.free.stalled-but",
        "save-bank.write.stands-still",
        "placement.read.stands-still",
        "placement.read.stall",
    ),
    _played("marker", kill_at),
    _played("ticket", cancel_at),
    _played("save-bank", preempt_at),
    _drawn(
        "evict-between",
        "extent",
        "Between a lookup and its claim nothing can evict what was promised.",
        "ticket.claim.eviction",
        "extent.visible.evicted-during",
        "extent.reserved.append-against",
    ),
    _drawn(
        "wrong-rank-ticket",
        "ticket",
        "A ticket of another rank, session or store is refused where it was not given.",
        "ticket.claim.wrong",
        "ticket.claim.stale-epoch",
    ),
    _drawn(
        "other-namespace-reopen",
        "store",
        "A store of another model, layout or rank is refused by name and left as it is.",
        "store.open.other",
    ),
    _drawn(
        "truncate-file",
        "store",
        "A pack file that lost its end is refused by name, or read as misses while it is open.",
        "store.files.truncated",
    ),
    _drawn(
        "replace-file",
        "store",
        "A pack file that is not the one that was closed is never believed.",
        "store.files.replaced",
        "snapshot.reopen.replaced",
        "snapshot.reopen.copied",
    ),
    _drawn(
        "second-opener",
        "store",
        "A store that is open is refused to everybody else, and its owner notices nothing.",
        "store.open.second",
    ),
    _drawn(
        "fork-during-read",
        "store",
        "A process forked during a read has no part in it; the lock ends with the last of them.",
        "store.open.fork",
        "store.open.child",
    ),
)

CASES: tuple[Case, ...] = (*NAMED, *CELLS)
