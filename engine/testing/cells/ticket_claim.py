"""Faults of a request's ticket at its claim: what was promised is compared with what is asked for.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

from typing import Any

from rangekv.engine.index.tickets import TicketState
from rangekv.engine.store import create
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.cells.ticket import BLOCKS, looked_up, refuse_claim, still_good
from rangekv.engine.testing.scene import (
    CAPACITY_BYTES,
    MODEL,
    NAMESPACE,
    PROMPT_TOKENS,
    Scene,
)
from rangekv.format.namespace import Namespace

TABLE = Table("ticket")


@TABLE.cells(
    {
        "claim.altered-tokens-first": {"at": 0},
        "claim.altered-tokens-middle": {"at": PROMPT_TOKENS // 2},
        "claim.altered-tokens-last": {"at": PROMPT_TOKENS - 1},
        "claim.altered-tokens-high-bits": {"at": 3, "by": 1 << 31},
    }
)
def altered_tokens(scene: Scene, at: int, by: int = 1) -> None:
    """A claim whose tokens differ from those that were looked up is refused."""
    with looked_up(scene) as (engine, prompt, ticket):
        altered = prompt.copy()
        altered[at] ^= by
        refuse_claim(scene, engine, ticket, altered, "tokens-changed")


@TABLE.cell("claim.altered-tokens-shorter")
def shorter_tokens(scene: Scene) -> None:
    """A claim with one token less than was promised is refused."""
    with looked_up(scene) as (engine, prompt, ticket):
        refuse_claim(scene, engine, ticket, prompt[:-1], "tokens-changed")


@TABLE.cell("claim.altered-tokens-longer")
def longer_tokens(scene: Scene) -> None:
    """A claim's tokens may go on behind the promised endpoint; nothing is delivered there."""
    with looked_up(scene) as (engine, prompt, ticket):
        longer = scene.prompt(prompt, same_tokens=len(prompt), token_count=len(prompt) + 1)
        still_good(scene, engine, ticket, longer)


@TABLE.cells(
    {
        "claim.altered-endpoint-none": {"count": 0},
        "claim.altered-endpoint-one-less": {"count": BLOCKS - 1},
        "claim.altered-endpoint-one-more": {"count": BLOCKS + 1},
    }
)
def altered_endpoint(scene: Scene, count: int) -> None:
    """A claim of another number of blocks than was promised is refused."""
    with looked_up(scene) as (engine, prompt, ticket):
        more = scene.take(1)[0]
        refuse_claim(
            scene,
            engine,
            ticket,
            prompt,
            "endpoint-changed",
            lambda taken: [*taken.tolist(), more][:count],
        )


@TABLE.cells(
    {
        "claim.block-named-twice": {"block": lambda taken: taken[1]},
        "claim.block-below-zero": {"block": lambda taken: -1},
        "claim.block-behind-the-end": {"block": lambda taken: 1 << 20},
    }
)
def bad_block(scene: Scene, block: Any) -> None:
    """A destination that is no block of paged KV, or one twice, is refused before a byte moves."""
    with looked_up(scene) as (engine, prompt, ticket):
        refuse_claim(
            scene,
            engine,
            ticket,
            prompt,
            "bad-block-id",
            lambda taken: [block(taken), *taken[1:].tolist()],
        )


@TABLE.cell("claim.wrong-rank")
def wrong_rank(scene: Scene) -> None:
    """A ticket of another rank is refused."""
    with looked_up(scene) as (engine, prompt, ticket):
        ticket.rank += 1
        refuse_claim(scene, engine, ticket, prompt, "foreign-ticket")


@TABLE.cells(
    {
        "claim.wrong-session": {"namespace": NAMESPACE},
        "claim.wrong-namespace": {"namespace": Namespace({"model": "another"})},
    }
)
def wrong_engine(scene: Scene, namespace: Namespace) -> None:
    """A ticket of another engine is refused there, and stays good where it was given."""
    with looked_up(scene) as (engine, prompt, ticket):
        store = scene.store.parent / "other"
        create(str(store), capacity_bytes=CAPACITY_BYTES, model=MODEL, namespace=namespace)
        other = scene.open(store=store, namespace=namespace)
        try:
            scene.require(other.epoch == engine.epoch, "both engines are in the same epoch")
            blocks = scene.take(BLOCKS)
            scene.refused("foreign-ticket", lambda: other.claim(ticket, prompt, blocks))
            other.release(ticket)
            scene.require(ticket.state is TicketState.OPEN, "the other engine leaves it alone")
            scene.require_untouched(blocks)
        finally:
            other.close()
        still_good(scene, engine, ticket, prompt)


@TABLE.cell("claim.stale-epoch")
def stale_epoch(scene: Scene) -> None:
    """A ticket that outlived its session is refused by the next one."""
    with looked_up(scene) as (engine, prompt, ticket):
        engine.release(ticket)
    ticket.state = TicketState.OPEN
    with scene.engine() as engine:
        scene.states.append("reopened")
        blocks = scene.take(BLOCKS)
        scene.refused("foreign-ticket", lambda: engine.claim(ticket, prompt, blocks))
        scene.require_untouched(blocks)
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "a new lookup hits")


@TABLE.cell("claim.retired-generation")
def retired_generation(scene: Scene) -> None:
    """A ticket whose generation was retired since its lookup is refused."""
    with looked_up(scene) as (engine, prompt, ticket):
        engine.reset()
        scene.states.append("retired")
        refuse_claim(scene, engine, ticket, prompt, "stale-ticket")
        scene.require(engine.stats().used_bytes == 0, "the retired space is free again")


@TABLE.cell("claim.reused-generation")
def reused_generation(scene: Scene) -> None:
    """A ticket is refused though its tokens were saved again, into a new generation."""
    with looked_up(scene) as (engine, prompt, ticket):
        engine.reset()
        scene.states.append("retired")
        scene.require(scene.save(engine, prompt), "the same tokens are saved again")
        scene.states.append("saved again")
        blocks = scene.take(BLOCKS)
        scene.refused("stale-ticket", lambda: engine.claim(ticket, prompt, blocks))
        scene.require_untouched(blocks)
        scene.require(scene.restore(engine, prompt) == PROMPT_TOKENS, "a new lookup hits")


@TABLE.cell("claim.eviction-since-lookup")
def eviction_since_lookup(scene: Scene) -> None:
    """Between lookup and claim nothing can evict what was promised, however short space is."""
    with looked_up(scene) as (engine, prompt, ticket):
        scene.fill(engine)
        scene.require(engine.stats().counters["evicted_bytes"] > 0, "space is short")
        scene.states.append("evictions")
        still_good(scene, engine, ticket, prompt)


@TABLE.cell("claim.double-claim")
def double_claim(scene: Scene) -> None:
    """A ticket is claimed once: a second claim is refused and the first goes on."""
    with looked_up(scene) as (engine, prompt, ticket):
        restore, blocks = scene.claim(engine, ticket, prompt)
        second = scene.take(BLOCKS)
        scene.refused("stale-ticket", lambda: engine.claim(ticket, prompt, second))
        scene.require(all(scene.delivered(restore)), "the first claim delivers")
        scene.require_delivered(prompt, blocks)
        scene.require_untouched(second)
        restore.finish()


@TABLE.cell("claim.after-release")
def after_release(scene: Scene) -> None:
    """A ticket that was given back cannot be claimed."""
    with looked_up(scene) as (engine, prompt, ticket):
        engine.release(ticket)
        scene.states.append("release")
        refuse_claim(scene, engine, ticket, prompt, "stale-ticket")


@TABLE.cell("claim.of-a-miss")
def claim_of_a_miss(scene: Scene) -> None:
    """A miss promises nothing that could be claimed."""
    with scene.engine() as engine:
        prompt = scene.prompt()
        ticket = scene.lookup(engine, prompt)
        refuse_claim(scene, engine, ticket, prompt, "stale-ticket", lambda taken: taken[:0])


@TABLE.cell("claim.late-for-its-deadline")
def late_claim(scene: Scene) -> None:
    """A claim behind the ticket's deadline is refused."""
    with looked_up(scene, ticket_deadline_s=0.01) as (engine, prompt, ticket):
        scene.until(engine, lambda: ticket.state is TicketState.RELEASED, "the deadline fires")
        refuse_claim(scene, engine, ticket, prompt, "stale-ticket")


@TABLE.cell("claim.at-close")
def claim_at_close(scene: Scene) -> None:
    """An engine that closes gives open tickets back and refuses claims by name."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
    engine = scene.open()
    ticket = scene.lookup(engine, prompt)
    scene.closed(engine.close(scene.patience_s), "clean")
    blocks = scene.take(BLOCKS)
    scene.refused("engine-closed", lambda: engine.claim(ticket, prompt, blocks))
    scene.require(engine.stats().leases_open == 0, "its lease ended")
    scene.require_untouched(blocks)
    scene.check_closed()
