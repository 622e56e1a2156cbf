"""Faults of a request's ticket when it is given back, runs out or is lost.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

import gc
import threading

from rangekv.engine.index.tickets import TicketState
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.cells.ticket import BLOCKS, looked_up
from rangekv.engine.testing.faulty_files import error
from rangekv.engine.testing.scene import PROMPT_TOKENS, Scene
from rangekv.engine.transfer.restore import RestoreState

TABLE = Table("ticket")


@TABLE.cells(
    {
        "release.twice-open": {"claimed": False},
        "release.twice-claimed": {"claimed": True},
    }
)
def released_twice(scene: Scene, claimed: bool) -> None:
    """A ticket is given back once, however often: no lease is counted twice."""
    with looked_up(scene) as (engine, prompt, ticket):
        if claimed:
            restore, _ = scene.claim(engine, ticket, prompt)
            scene.require(all(scene.delivered(restore)), "the restore delivers")
        threads = [threading.Thread(target=engine.release, args=(ticket,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scene.patience_s)
        engine.release(ticket)
        scene.states.append("release")
        scene.until(engine, lambda: not engine._catalog.leases.open, "its lease ends")
        counters = engine.stats().counters
        taken, released = counters["leases_taken"], counters["leases_released"]
        scene.require(taken == released, f"{taken} leases were taken, {released} given back")


@TABLE.cell("release.before-claim-reads-in-flight")
def released_while_reading(scene: Scene) -> None:
    """A ticket given back while reads run keeps lease and banks until they have returned."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold, skip=1, times=2)
        ticket = scene.lookup(engine, prompt)
        scene.reached(hold)
        scene.reached(hold)
        engine.release(ticket)
        scene.states += ["lookup", "reading", "release"]
        scene.require(engine.stats().leases_open == 1, "the lease lives as long as a read")
        scene.require(engine._read_banks.free_count == 2, "so do their banks")
        hold.let_go()


@TABLE.cell("release.claimed-reads-in-flight")
def released_while_claimed(scene: Scene) -> None:
    """A claimed ticket given back while reads run delivers nothing after that."""
    with scene.engine() as engine:
        prompt, other = scene.saved(engine), scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold)
        restore, blocks = scene.started(engine, prompt)
        scene.reached(hold)
        engine.release(restore.ticket)
        delivered = {block for block in blocks.tolist() if block not in restore.failed_blocks()}
        scene.require(not delivered, "what was not read yet has failed")
        scene.give(blocks)
        scene.states += ["claim", "reading", "release"]
        scene.require(engine.stats().leases_open >= 1, "the lease lives as long as the read")
        scene.require(scene.restore(engine, other) == PROMPT_TOKENS, "others restore meanwhile")
        hold.let_go()
        scene.until(engine, lambda: not engine._catalog.leases.open, "the lease ends")
        scene.require_untouched(blocks)


@TABLE.cell("release.during-scatter")
def released_while_scattering(scene: Scene) -> None:
    """A ticket given back during a copy comes back when the copy has ended, not before."""
    with looked_up(scene) as (engine, prompt, ticket):
        gate = scene.hold_copies(engine, "scatter")
        restore, blocks = scene.claim(engine, ticket, prompt)
        scene.require(gate.wait_reached(scene.patience_s), "a copy runs")
        scene.require_waits(lambda: engine.release(ticket), gate.let_go)
        scene.states += ["claim", "scatter", "release"]
        failed = set(restore.failed_blocks())
        whole = [n for n, block in enumerate(blocks.tolist()) if block not in failed]
        scene.require(not whole or len(whole) == BLOCKS, "blocks are whole or reported as failed")


@TABLE.cell("release.finished-twice")
def finished_twice(scene: Scene) -> None:
    """A restore that is finished again, from two threads, ends once and is counted once."""
    with looked_up(scene) as (engine, prompt, ticket):
        restore, blocks = scene.claim(engine, ticket, prompt)
        scene.require(all(scene.delivered(restore)), "the restore delivers")
        threads = [threading.Thread(target=restore.finish) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(scene.patience_s)
        restore.finish()
        scene.states += ["claim", "release"]
        counters = engine.stats().counters
        scene.require(counters["delivered_tokens"] == PROMPT_TOKENS, "it is counted once")
        scene.require_delivered(prompt, blocks)


@TABLE.cell("release.never-claimed")
def never_claimed(scene: Scene) -> None:
    """A ticket that nobody claims ends at its deadline, though no other call ever comes."""
    with looked_up(scene, ticket_deadline_s=0.01) as (engine, _, ticket):
        scene.until(engine, lambda: ticket.state is TicketState.RELEASED, "the deadline fires")
        scene.states.append("deadline")
        scene.until(engine, lambda: not engine._catalog.leases.open, "its lease ends")
        scene.require(engine.stats().counters["miss_deadline"] == 1, "it is counted")


@TABLE.cell("release.never-claimed-reads-stand-still")
def never_claimed_and_stalled(scene: Scene) -> None:
    """Reads of a ticket that ran out quarantine their banks until they return."""
    with scene.engine(ticket_deadline_s=0.01) as engine:
        prompt = scene.saved(engine)
        hold = scene.hold()
        scene.files.on_read(hold, times=2)
        ticket = scene.lookup(engine, prompt)
        scene.reached(hold)
        scene.until(engine, lambda: ticket.state is TicketState.RELEASED, "the deadline fires")
        scene.states += ["lookup", "reading", "deadline"]
        scene.require(engine.stats().banks_in_quarantine > 0, "the stall is seen in the counters")
        scene.require(engine.stats().leases_open == 1, "the lease lives as long as the reads")
        hold.let_go()


@TABLE.cell("release.never-claimed-reads-failed")
def never_claimed_and_failed(scene: Scene) -> None:
    """A ticket whose reads failed before anybody claimed it is given back like any other."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        scene.files.on_read(error(5), times=4)
        ticket = scene.lookup(engine, prompt)
        scene.until(engine, lambda: len(ticket.restore.errors) > 0, "a read fails")
        engine.release(ticket)
        scene.states += ["lookup", "read failed", "release"]


@TABLE.cell("release.collected-by-python")
def collected(scene: Scene) -> None:
    """A lease does not end because Python collects the ticket that holds it."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        key = scene.key()
        engine.lookup(key, prompt)
        gc.collect()
        scene.require(engine.stats().leases_open == 1, "the lease outlives the ticket object")
        scene.fill(engine)
        scene.states += ["lookup", "collected", "evictions"]
        scene.require(scene.hit(engine, prompt) == PROMPT_TOKENS, "its bytes cannot be evicted")
        engine.release(engine.lookup(key, prompt))


@TABLE.cell("release.after-retire")
def released_after_retire(scene: Scene) -> None:
    """Retired bytes under a lease stay until the ticket is given back, and are free then."""
    with looked_up(scene) as (engine, _, ticket):
        engine.reset()
        scene.require(engine.stats().used_bytes > 0, "leased bytes are not free yet")
        engine.release(ticket)
        scene.states += ["retired", "release"]
        scene.until(engine, lambda: not engine._catalog.leases.open, "the lease ends")
        scene.require(engine.stats().used_bytes == 0, "now they are")


@TABLE.cell("release.at-close-while-claimed")
def claimed_at_close(scene: Scene) -> None:
    """A close ends restores that run: nothing is delivered after it, and the store is warm."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
    engine = scene.open()
    hold = scene.hold()
    scene.files.on_read(hold)
    restore, blocks = scene.started(engine, prompt)
    scene.reached(hold)
    scene.require_waits(lambda: engine.close(scene.patience_s), hold.let_go)
    scene.states += ["claim", "reading", "closed"]
    scene.require(restore.state is RestoreState.CLOSED, "the restore is ended")
    layers = [n for n, layer in enumerate(scene.kv) if (layer[blocks] != 0xDB).any()]
    scene.require_delivered(prompt, blocks, layers=layers)
    scene.check_closed()
