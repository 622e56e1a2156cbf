"""What ranks have promised: asks all of them as one, keeps the minimum, gives the rest back.

Owns tickets from lookup to the step that claims or releases them; plans nothing.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from rangekv.engine.connector.messages import RestoreBinding


class Ranks(Protocol):
    """What the scheduler side needs of the ranks: see `lookup_client.RankGroup`."""

    def __len__(self) -> int: ...

    @property
    def unanswered(self) -> int: ...

    @property
    def calls(self) -> int: ...

    @property
    def rests(self) -> bool: ...

    def ask(self, kind: str, *arguments: Any, deadline_s: float) -> list[list[Any] | None]: ...

    def take_late(self) -> list[tuple[int, int]]: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class Tracked:
    """One eligible request. `tokens` is packed once and again only when the request has grown."""

    request: Any
    root: bytes
    tokens: bytes = b""
    token_count: int = 0
    save_tokens: int = 0  # whole blocks of the prompt
    attempt: int = 0
    query: tuple[int, int] | None = None  # (local tokens, all tokens) that `promise` answers
    limit: int = 0  # end of what is asked for: at first all, then what every rank has
    promise: RestoreBinding | None = None  # tickets of the last lookup, not yet bound
    binding: RestoreBinding | None = None  # bound to blocks, not yet handed to the worker
    is_complete: bool = False  # the worker was told the last chunk
    in_background: bool = False  # the promise is to be loaded beside the steps of others
    is_loading: bool = False  # that load is not reported yet: its blocks hold no KV
    has_failed: bool = False  # such a load has failed: vLLM asks anew, and would for ever


class Promises:
    """Used by the scheduler's thread. `ranks` may be replaced later (handshake)."""

    def __init__(self, ranks: Ranks, block_tokens: int, timeout_s: float) -> None:
        self.ranks = ranks
        self._block_tokens = block_tokens
        self._timeout_s = timeout_s
        self._session = uuid.uuid4().hex
        self._released: list[tuple[int, int]] = []
        self._clock = 0

    def take_released(self) -> list[tuple[int, int]]:
        """Return (rank, ticket id) of what nobody will claim, once."""
        released, self._released = self._released + self.ranks.take_late(), []
        return released

    def tick(self) -> int:
        """Return the time by which all ranks say what they have used last; it rises over starts."""
        self._clock = max(self._clock + 1, time.time_ns() // 1000)
        return self._clock

    def renew(self, tracked: Tracked, begin: int) -> int:
        """Ask for tokens [begin, tracked.limit) and return how many of them every rank promises.

        Most tickets of a renewed promise, often all, are those of the last one; others go back.
        """
        promise = self._lookup(tracked, begin)
        kept = set() if promise is None else set(enumerate(promise.ticket_ids))
        if tracked.promise is not None:
            old = enumerate(tracked.promise.ticket_ids)
            self._released += [each for each in old if each not in kept]
        tracked.promise = promise
        return 0 if promise is None else promise.end_token - begin

    def _lookup(self, tracked: Tracked, begin: int) -> RestoreBinding | None:
        """Return the promise of all ranks, or None for nothing.

        The minimum counts: where ranks differ, all are asked again up to there. A rank that does
        not answer makes it a miss, and what the others promised goes back.
        """
        if self.ranks.rests:
            return None
        deadline = time.monotonic() + self._timeout_s
        hits = self._ask(tracked, begin, deadline)
        end = min(tokens for _, tokens in hits)
        if any(tokens > end > begin for _, tokens in hits):
            self._give_back(hits)
            tracked.limit = end
            hits = self._ask(tracked, begin, deadline)
        if end > begin and all(tokens == end for _, tokens in hits):
            return RestoreBinding(tuple(ticket_id for ticket_id, _ in hits), begin, end)
        self._give_back(hits)
        return None

    def _give_back(self, hits: Iterable[tuple[int, int]]) -> None:
        self._released += [(rank, each) for rank, (each, _) in enumerate(hits) if each]

    def _ask(self, tracked: Tracked, begin: int, deadline: float) -> list[tuple[int, int]]:
        """Return each rank's (ticket id, hit tokens); (0, 0) is a miss, no answer included."""
        answers = self.ranks.ask(
            "lookup",
            tracked.request.request_id,
            self._session,
            tracked.attempt,
            tracked.tokens,
            begin,
            tracked.limit,
            tracked.root,
            self.tick(),
            deadline_s=deadline - time.monotonic(),
        )
        hits = []
        for answer in answers:
            match answer:
                case [int(ticket_id), int(tokens), *_] if ticket_id:
                    whole = tokens - tokens % self._block_tokens
                    hits.append((ticket_id, min(whole, tracked.limit)))
                case _:
                    hits.append((0, 0))
        return hits

    def release(self, tracked: Tracked) -> None:
        """Give back what `tracked` was promised.

        Its next question is a new one: an answer to this one that is still to come gets released,
        and must not take the next one's ticket with it.
        """
        for held in (tracked.promise, tracked.binding):
            if held is not None:
                self._released += enumerate(held.ticket_ids)
        tracked.promise = tracked.binding = tracked.query = None
        tracked.attempt += 1
