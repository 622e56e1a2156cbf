"""Faults of a request's ticket while it is open: repeated lookups, misses, clips.

Owns those rows of the matrix; what every run must end with is in checks.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rangekv.engine import Engine
from rangekv.engine.index.tickets import Ticket, TicketState
from rangekv.engine.testing.case import Table
from rangekv.engine.testing.scene import (
    MODEL,
    PROMPT_TOKENS,
    Prompt,
    Scene,
)

TABLE = Table("ticket")

BLOCKS = PROMPT_TOKENS // MODEL.block_tokens


@contextmanager
def looked_up(scene: Scene, **settings: Any) -> Iterator[tuple[Engine, Prompt, Ticket]]:
    """Open a store with one prompt in it and a ticket on all of it."""
    with scene.engine(**settings) as engine:
        prompt = scene.saved(engine)
        scene.states.append("lookup")
        ticket = scene.lookup(engine, prompt)
        scene.require(ticket.token_count == PROMPT_TOKENS, "the lookup hits the whole prompt")
        yield engine, prompt, ticket


def still_good(scene: Scene, engine: Engine, ticket: Ticket, prompt: Prompt) -> None:
    """Require that a ticket can be claimed and delivers what it promised."""
    restore, blocks = scene.claim(engine, ticket, prompt)
    scene.states.append("claim")
    scene.require(all(scene.delivered(restore)), "the ticket delivers what it promised")
    scene.require_delivered(prompt, blocks)
    restore.finish()
    scene.states.append("release")
    scene.give(blocks)


def refuse_claim(
    scene: Scene, engine: Engine, ticket: Ticket, prompt: Prompt, code: str, blocks: Any = None
) -> None:
    """Require that a claim is refused by name, delivers nothing and ends the ticket."""
    taken = scene.take(BLOCKS)
    chosen = taken if blocks is None else blocks(taken)
    scene.refused(code, lambda: engine.claim(ticket, prompt, chosen))
    scene.states.append("refused")
    scene.until(engine, lambda: not engine._catalog.leases.open, "the refused ticket's lease ends")
    scene.require_untouched(taken)


@TABLE.cell("lookup.same-again")
def same_again(scene: Scene) -> None:
    """The same lookup again is the same ticket under one lease."""
    with looked_up(scene) as (engine, prompt, ticket):
        taken = engine.stats().counters["leases_taken"]
        again = engine.lookup(ticket.key, prompt)
        scene.require(again is ticket, "a repeated lookup is the same ticket")
        scene.require(engine.stats().counters["leases_taken"] == taken, "no second lease is taken")
        still_good(scene, engine, ticket, prompt)


@TABLE.cells(
    {
        "lookup.other-session": {"change": {"session_id": "another"}},
        "lookup.other-attempt": {"change": {"attempt": 1}},
        "lookup.other-request": {"change": {"request_id": "another"}},
    }
)
def other_key(scene: Scene, change: dict[str, Any]) -> None:
    """A ticket belongs to one attempt of one request in one session: others get their own."""
    with looked_up(scene) as (engine, prompt, ticket):
        other = engine.lookup(replace(ticket.key, **change), prompt)
        scene.require(other is not ticket, "another key gets another ticket")
        engine.release(other)
        scene.require(ticket.state is TicketState.OPEN, "its release leaves the first ticket alone")
        still_good(scene, engine, ticket, prompt)


@TABLE.cells(
    {
        "lookup.other-tokens-first": {"at": 0, "length": PROMPT_TOKENS},
        "lookup.other-tokens-last": {"at": PROMPT_TOKENS - 1, "length": PROMPT_TOKENS},
        "lookup.other-tokens-shorter": {"at": None, "length": PROMPT_TOKENS - 1},
        "lookup.other-tokens-longer": {"at": None, "length": PROMPT_TOKENS + 1},
    }
)
def other_tokens(scene: Scene, at: int | None, length: int) -> None:
    """A key stands for one query: other tokens under it are refused, and the ticket stays good."""
    with looked_up(scene) as (engine, prompt, ticket):
        altered = scene.prompt(prompt, same_tokens=len(prompt), token_count=length + 1)[:length]
        if at is not None:
            altered[at] += 1
        scene.refused("tokens-changed", lambda: engine.lookup(ticket.key, altered))
        still_good(scene, engine, ticket, prompt)


@TABLE.cell("lookup.other-tenant")
def other_tenant(scene: Scene) -> None:
    """A tenant sees nothing of another's tree, under its own key or the other's."""
    with looked_up(scene) as (engine, prompt, ticket):
        root = engine.root(bytes(range(32)))
        scene.refused("tokens-changed", lambda: engine.lookup(ticket.key, prompt, root=root))
        foreign = scene.lookup(engine, prompt, root=root)
        scene.require(foreign.reason == "absent", "another tenant's lookup is a miss")
        still_good(scene, engine, ticket, prompt)


@TABLE.cells(
    {
        "lookup.other-endpoint": {"how": {"max_tokens": 100}, "blocks": 6},
        "lookup.other-local-hit": {"how": {"skip_tokens": 64}, "blocks": 12},
    }
)
def other_range(scene: Scene, how: dict[str, int], blocks: int) -> None:
    """Another range under the same key is another ticket; the one before can no more be claimed."""
    with looked_up(scene) as (engine, prompt, ticket):
        other = engine.lookup(ticket.key, prompt, **how)
        scene.require(other is not ticket, "another range is another ticket")
        scene.refused("stale-ticket", lambda: engine.claim(ticket, prompt, scene.take(BLOCKS)))
        restore, taken = scene.claim(engine, other, prompt)
        scene.require(len(taken) == blocks, f"the new ticket promises {blocks} blocks")
        scene.require(all(scene.delivered(restore)), "the new ticket delivers")
        scene.require_delivered(prompt, taken, first_token=how.get("skip_tokens", 0))
        restore.finish()


@TABLE.cells(
    {
        "lookup.clip-to-nothing": {"limit": 15, "promised": 0},
        "lookup.clip-to-one-block": {"limit": 16, "promised": 16},
        "lookup.clip-inside-a-block": {"limit": 47, "promised": 32},
    }
)
def clipped(scene: Scene, limit: int, promised: int) -> None:
    """A promise ends at a block boundary, not behind the caller's limit, and delivers no more."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        ticket = scene.lookup(engine, prompt, max_tokens=limit)
        scene.states.append("lookup")
        scene.require(ticket.token_count == promised, f"{promised} tokens are promised")
        if promised:
            still_good(scene, engine, ticket, prompt)
        else:
            scene.require(ticket.reason == "below-one-block", "the miss is named")


@TABLE.cells(
    {
        "lookup.all-is-local": {
            "how": {"skip_tokens": PROMPT_TOKENS},
            "reason": "nothing-beyond-skip",
        },
        "lookup.unknown-tokens": {"how": {}, "reason": "absent"},
        "lookup.unknown-root": {"how": {"root": 7}, "reason": "absent"},
    }
)
def missed(scene: Scene, how: dict[str, int], reason: str) -> None:
    """A miss has its reason, holds no lease and starts no read."""
    with scene.engine() as engine:
        prompt = scene.saved(engine)
        asked = prompt if how else scene.prompt()
        ticket = scene.lookup(engine, asked, **how)
        scene.states.append("miss")
        scene.require((ticket.token_count, ticket.reason) == (0, reason), f"the miss is {reason}")
        counters = engine.stats().counters
        scene.require(counters[f"miss_{reason}"] == 1, "the miss is counted")
        scene.require(
            engine.stats().leases_open == 0 and counters["reads"] == 0, "it holds nothing"
        )
        engine.release(ticket)


@TABLE.cell("lookup.while-claimed")
def while_claimed(scene: Scene) -> None:
    """A lookup under the key of a running restore is refused and does not disturb it."""
    with looked_up(scene) as (engine, prompt, ticket):
        restore, blocks = scene.claim(engine, ticket, prompt)
        scene.states.append("claim")
        scene.refused("stale-ticket", lambda: engine.lookup(ticket.key, prompt))
        scene.require(all(scene.delivered(restore)), "the restore goes on")
        scene.require_delivered(prompt, blocks)
        restore.finish()


@TABLE.cell("lookup.retired-since")
def retired_since(scene: Scene) -> None:
    """A repeated lookup after its records were retired is a miss, and the old lease ends."""
    with looked_up(scene) as (engine, prompt, ticket):
        engine.reset()
        scene.states.append("retired")
        again = engine.lookup(ticket.key, prompt)
        scene.require((again.token_count, again.reason) == (0, "absent"), "the repeat is a miss")
        scene.require(ticket.state is TicketState.RELEASED, "the old ticket is given back")


@TABLE.cell("lookup.after-its-deadline")
def after_deadline(scene: Scene) -> None:
    """A lookup under a key whose ticket ran out is a new ticket that can be claimed."""
    with looked_up(scene, ticket_deadline_s=0.01) as (engine, prompt, ticket):
        scene.until(engine, lambda: ticket.state is TicketState.RELEASED, "the deadline fires")
    with scene.engine() as engine:
        again = engine.lookup(ticket.key, prompt)
        scene.require(again is not ticket, "it is a new ticket")
        still_good(scene, engine, again, prompt)
