"""Owns the tickets of one engine: at most one promise a key, its deadline, its lease, its end.

It never reads a byte and never decides what is stored; all of it runs under the engine's lock.
"""

from __future__ import annotations

from rangekv.engine.devices.device import BlockIds
from rangekv.engine.events import EventQueue
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.directory import Match
from rangekv.engine.index.tickets import RequestKey, Ticket, TicketState
from rangekv.engine.stats import Counters
from rangekv.engine.transfer.restore import Restore
from rangekv.engine.transfer.restores import RestoreCoordinator
from rangekv.engine.transfer.spans import plan
from rangekv.format.errors import RangeError, TicketError


class TicketDesk:
    """Gives tickets out and takes them back; `direct` says how the bytes behind new ones come."""

    def __init__(
        self,
        *,
        events: EventQueue,
        catalog: Catalog,
        counters: Counters,
        restores: RestoreCoordinator,
        rank: int,
        session: str,
        epoch: int,
        deadline_s: float,
    ) -> None:
        self.direct = False
        self.open: dict[RequestKey, Ticket] = {}
        self._events = events
        self._catalog = catalog
        self._counters = counters
        self._restores = restores
        self._rank = rank
        self._session = session
        self._epoch = epoch
        self._deadline_s = deadline_s
        self._count = 0

    def lookup(
        self,
        key: RequestKey,
        tokens: bytes,
        *,
        root: int,
        skip_tokens: int,
        limit: int,
        clock: int | None,
    ) -> Ticket:
        """See Engine.lookup. `tokens` are packed, `limit` says how many of them may be promised."""
        known = self.open.get(key)
        if known is not None:
            if (known.root, known.tokens) != (root, tokens):
                raise TicketError(
                    "tokens-changed",
                    "a ticket of this key stands for other tokens; release it or raise attempt",
                )
            if known.state is TicketState.CLAIMED:
                raise TicketError("stale-ticket", "the ticket of this key is claimed already")
            if (known.skip_tokens, known.token_limit) == (skip_tokens, limit) and known.valid():
                self._arm(known)
                return known
            self.release(known)
        path, reason = self._find(tokens, root, skip_tokens, limit, clock)
        end = sum(match.token_count for match in path)
        self._count += 1
        ticket = Ticket(
            ticket_id=self._count,
            key=key,
            root=root,
            rank=self._rank,
            session=self._session,
            epoch=self._epoch,
            tokens=tokens,
            token_limit=limit,
            token_count=end if reason is None else 0,
            skip_tokens=skip_tokens,
            reason=reason,
        )
        if reason is not None:
            self._counters.misses[reason] += 1
            return ticket
        self._counters.hit_tokens += end
        self._counters.records_selected += len(path)
        self._promise(ticket, path)
        return ticket

    def _find(
        self, tokens: bytes, root: int, skip_tokens: int, limit: int, clock: int | None
    ) -> tuple[list[Match], str | None]:
        """Return what is stored of these tokens, and why it is a miss where it is one."""
        whole = limit - limit % self._restores.geometry.block_tokens
        if self._events.fault is not None:
            return [], "engine-failed"
        if self._restores.stalled:
            return [], "stalled"
        if whole == 0:
            return [], "below-one-block"
        if root not in self._catalog.roots:
            return [], "absent"
        path = self._catalog.find(root, memoryview(tokens), whole, clock)
        if not path:
            return [], "absent"
        if sum(match.token_count for match in path) <= skip_tokens:
            return path, "nothing-beyond-skip"
        return path, None

    def _promise(self, ticket: Ticket, path: list[Match]) -> None:
        """Keep what was found from being evicted, and begin to read it."""
        restores = self._restores
        spans = plan(
            restores.geometry,
            path,
            ticket.skip_tokens,
            restores.banks.bank_bytes,
            direct=self.direct,
        )
        ticket.matches = path
        ticket.lease = self._catalog.leases.take([match.record for match in path])
        self.open[ticket.key] = ticket
        self._arm(ticket)
        ticket.restore = restores.begin(ticket, spans)

    def claim(self, ticket: Ticket, tokens: bytes, block_ids: BlockIds) -> Restore:
        """See Engine.claim; `tokens` are packed."""
        try:
            ticket.check(tokens=tokens, rank=self._rank, session=self._session, epoch=self._epoch)
            restore: Restore = ticket.restore
            self._restores.bind(restore, block_ids)
        except RangeError:
            self.release(ticket)
            raise
        ticket.state = TicketState.CLAIMED
        if ticket.deadline is not None:
            ticket.deadline.cancel()
        return restore

    def release(self, ticket: Ticket) -> None:
        """Take back a ticket that nobody has claimed; any other is left alone."""
        # A ticket of another engine owns banks and leases there, none here.
        if ticket.state is TicketState.OPEN and self.open.get(ticket.key) is ticket:
            self._end(ticket)
            self._restores.cancel(ticket.restore)

    def close(self, ticket: Ticket) -> None:
        """The restore behind a ticket has become quiet: its lease ends."""
        self._end(ticket)
        if ticket.lease is not None:
            self._catalog.leases.release(ticket.lease)

    def _arm(self, ticket: Ticket) -> None:
        if ticket.deadline is not None:
            ticket.deadline.cancel()
        ticket.deadline = self._events.at(self._deadline_s, self._expire, ticket)

    def _expire(self, ticket: Ticket) -> None:
        if ticket.state is TicketState.OPEN:
            self._counters.misses["deadline"] += 1
            self._end(ticket)
            self._restores.give_up(ticket.restore)

    def _end(self, ticket: Ticket) -> None:
        ticket.state = TicketState.RELEASED
        if ticket.deadline is not None:
            ticket.deadline.cancel()
        if self.open.get(ticket.key) is ticket:
            del self.open[ticket.key]
