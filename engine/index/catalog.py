"""Owns the life of records and extents: reserve → publish → retire → reclaim, and eviction.

It never does I/O and never waits; what it hands out is proved by the callers that write bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from rangekv.engine.index.directory import TOKEN_BYTES, Directory, Match, Record, RecordState
from rangekv.engine.index.eviction import Age, ColdOrder
from rangekv.engine.index.extents import Extent, ExtentTable
from rangekv.engine.index.leases import LeaseTable
from rangekv.engine.index.ledger import Ledger
from rangekv.engine.index.reservation import Reservation, ReservationState
from rangekv.engine.index.roots import RootTable
from rangekv.engine.index.watch import Watch
from rangekv.engine.stats import Counters
from rangekv.format.errors import ensure
from rangekv.format.geometry import ALIGNMENT, Geometry

Hashes = npt.NDArray[np.uint64]


class Catalog:
    """Everything one store holds. Guarded by the engine's lock."""

    def __init__(self, geometry: Geometry, counters: Counters) -> None:
        self.geometry = geometry
        self.counters = counters
        self.directory = Directory(geometry.block_tokens)
        self.ledger = Ledger()
        self.extents = ExtentTable(geometry, self.ledger)
        self.leases = LeaseTable(self.extents, counters)
        self.roots = RootTable()
        self.watch = Watch()
        self.record_id_next = 0
        self.access_clock = 0
        self.record_count = 0
        self.token_count = 0
        # Proved records by extent: each holds one reference on it.
        self.residents: dict[Extent, set[Record]] = {}
        self._cold = ColdOrder(self.extents, self._age)
        self._reservation_of: dict[Record, Reservation] = {}

    def root(self, digest: bytes) -> int:
        """Return the number of a tenant's root; raises UsageError `bad-root`, `too-many-roots`."""
        return self.roots.number(digest, self.directory.roots())

    def find(
        self, root: int, tokens: memoryview, token_limit: int, clock: int | None = None
    ) -> list[Match]:
        """Return the visible chain for a prefix of `tokens` and mark it as used now."""
        path = self.directory.walk(root, tokens, token_limit)
        self.touch([match.record for match in path], clock)
        return path

    def touch(self, records: Sequence[Record], clock: int | None = None) -> None:
        """Mark records as the most recently used, or as used at `clock`; a chain shares one rank.

        Stores that are touched at the same clocks evict alike, whenever their writes return.
        """
        now = self.access_clock + 1 if clock is None else clock
        self.access_clock = max(self.access_clock, now)
        for record in records:
            record.access_rank = max(record.access_rank, now)

    # -- reserve ---------------------------------------------------------------------------------

    def reserve(
        self,
        root: int,
        tokens: memoryview,
        start_token: int,
        end_token: int,
        clock: int | None = None,
    ) -> Reservation | str:
        """Reserve space and places for what the store lacks of tokens[:end_token].

        Returns the reason instead when nothing is to be saved: `held` or `joined` (stored, or being
        stored, already), `gap` (the store ends before `start_token`), `too-large`, `full`.
        """
        end_token -= end_token % self.geometry.block_tokens
        path = self.directory.walk(root, tokens, end_token, reserved=True)
        held = sum(match.token_count for match in path)
        if held >= end_token:
            pending = any(match.record.state is RecordState.RESERVED for match in path)
            return "joined" if pending else "held"
        if held < start_token:
            return "gap"
        chain = [match.record for match in path]
        lease = self.leases.take(chain)
        self.touch(chain, clock)
        grown, places = self._places(path, held, end_token)
        if isinstance(places, str):
            self.leases.release(lease)
            return places
        parts = self._hang(root, tokens, path, held, places)
        if grown is not None:
            grown.growing = True
        reservation = Reservation(parts, grown, lease, held, end_token, clock)
        for record in parts:
            self._reservation_of[record] = reservation
        return reservation

    def _places(
        self, path: Sequence[Match], begin: int, end: int
    ) -> tuple[Extent | None, list[tuple[Extent, int, int]] | str]:
        """Return (extent grown in place or None, [(extent, extent_token_start, token_count)])."""
        geometry = self.geometry
        remaining = end - begin
        places: list[tuple[Extent, int, int]] = []
        grown: Extent | None = None
        if path and self._grows(path[-1]):
            extent = path[-1].record.extent
            mark = extent.append_mark_tokens
            room = extent.width // geometry.token_bytes - mark
            count = min(remaining, room)
            places.append((extent, mark, count))
            remaining -= count
            grown = extent
        stripe_tokens = geometry.stripe_bytes_max // geometry.token_bytes
        orders: list[tuple[int, int, int]] = []
        while remaining:
            count = min(remaining, stripe_tokens)
            headroom = max(count + count // 2, begin // 4)
            orders.append((self._order(headroom), self._order(count), count))
            remaining -= count
        need = sum(geometry.unit_bytes << least for _, least, _ in orders)
        if need > geometry.usable_bytes:
            return None, "too-large"
        for extent, _, _ in places:
            self.extents.hold(extent)
        for wanted, least, count in orders:
            fresh = self.extents.allocate(wanted) or self.extents.allocate(least)
            while fresh is None and self._evict_for(least):
                fresh = self.extents.allocate(least)
            if fresh is None:
                for extent, _, _ in places:
                    self.extents.drop(extent)
                return None, "full"
            self.extents.hold(fresh)
            places.append((fresh, 0, count))
        return grown, places

    def _grows(self, match: Match) -> bool:
        """Whether the next record may start in the free tail of this record's extent.

        Only at a multiple of 4096: otherwise direct I/O would rewrite visible bytes (SPEC.md).
        """
        record, extent = match.record, match.record.extent
        mark = extent.append_mark_tokens
        return (
            record.state is RecordState.VISIBLE
            and match.token_count == record.token_count
            and not extent.growing
            and record.extent_token_start + record.token_count == mark
            and mark * self.geometry.token_bytes % ALIGNMENT == 0
            and (mark + self.geometry.block_tokens) * self.geometry.token_bytes <= extent.width
        )

    def _order(self, token_count: int) -> int:
        """Return the smallest order whose stripe holds `token_count` tokens, or the highest."""
        stripes = -(-token_count * self.geometry.token_bytes // self.geometry.stripe_bytes_min)
        return min(self.geometry.order_max, max(0, (stripes - 1).bit_length()))

    def _hang(
        self,
        root: int,
        tokens: memoryview,
        path: Sequence[Match],
        begin: int,
        places: Sequence[tuple[Extent, int, int]],
    ) -> list[Record]:
        parent = path[-1].record if path else None
        at = path[-1].token_count if path else 0
        parts: list[Record] = []
        for extent, extent_token_start, count in places:
            record = self._record(
                root=root,
                parent=parent,
                parent_tokens=at,
                token_start=begin,
                tokens=bytes(tokens[begin * TOKEN_BYTES : (begin + count) * TOKEN_BYTES]),
                extent=extent,
                extent_token_start=extent_token_start,
            )
            self.directory.insert(record)
            parts.append(record)
            parent, at, begin = record, count, begin + count
        return parts

    def _record(
        self,
        *,
        root: int,
        parent: Record | None,
        parent_tokens: int,
        token_start: int,
        tokens: bytes,
        extent: Extent,
        extent_token_start: int,
    ) -> Record:
        self.record_id_next += 1
        return Record(
            record_id=self.record_id_next,
            root=root,
            parent=parent,
            parent_tokens=parent_tokens,
            token_start=token_start,
            tokens=tokens,
            extent=extent,
            extent_token_start=extent_token_start,
        )

    def raise_append_mark(self, record: Record, token_end: int) -> None:
        """Note that bytes of a reserved record up to token `token_end` may be written from now on.

        The mark rises when a write is accepted, not when it returns: it may land even if its save
        fails, and nobody may write there again before the extent is reclaimed (SPEC.md).
        """
        end = record.extent_token_start + token_end - record.token_start
        record.extent.append_mark_tokens = max(record.extent.append_mark_tokens, end)

    # -- publish ---------------------------------------------------------------------------------

    def publish(
        self,
        reservation: Reservation,
        token_end: int,
        hashes: Sequence[Hashes],
        cuts: Sequence[int] = (),
    ) -> None:
        """Make tokens [token_begin, token_end) of a reservation visible, all at once.

        The caller proved that every layer's bytes up to `token_end` are written. `hashes[i]` is
        uint64[layer_count, page_count] of part i. `cuts` are tokens at which records are split
        (tests only); pages then start anew at each cut. Where the parent is still reserved, the
        records become visible right after it.
        """
        if reservation.state is not ReservationState.OPEN:
            return
        if token_end <= reservation.token_begin:
            self.void(reservation)
            return
        self._truncate(reservation, token_end)
        for record, pages in zip(reservation.parts, hashes, strict=False):
            record.hashes = pages
        if cuts:
            self._split(reservation, cuts)
        for record in reservation.parts:
            self.settle_in(record)
        reservation.state = ReservationState.PROVED
        self._reveal(reservation)

    def settle_in(self, record: Record) -> None:
        """Let a proved record hold its extent."""
        self.extents.hold(record.extent)
        known = record.extent in self.residents
        self.residents.setdefault(record.extent, set()).add(record)
        if not known:
            self._cold.add(record.extent)

    def show(self, record: Record) -> None:
        """Let lookups see a record."""
        record.state = RecordState.VISIBLE
        self.record_count += 1
        self.token_count += record.token_count

    def _truncate(self, reservation: Reservation, token_end: int) -> None:
        kept: list[Record] = []
        for record in reservation.parts:
            count = min(record.token_count, token_end - record.token_start)
            for child in list(record.children.values()):
                if child.parent_tokens > max(count, 0) and child not in reservation.parts:
                    self.void(self._reservation_of[child])
            if count > 0:
                record.tokens = record.tokens[: count * TOKEN_BYTES]
                kept.append(record)
        for record in reversed(reservation.parts):
            if record not in kept:
                self._forget(record)
        reservation.parts = kept
        reservation.token_end = token_end

    def _split(self, reservation: Reservation, cuts: Sequence[int]) -> None:
        parts: list[Record] = []
        for record in reservation.parts:
            bounds = [record.token_start]
            end = record.token_start + record.token_count
            bounds += [*sorted(cut for cut in set(cuts) if record.token_start < cut < end), end]
            later = dict(record.children)
            record.children.clear()
            tokens, pages, page = record.tokens, record.hashes, 0
            piece = record
            for begin, stop in pairwise(bounds):
                if begin != record.token_start:
                    piece = self._record(
                        root=record.root,
                        parent=piece,
                        parent_tokens=piece.token_count,
                        token_start=begin,
                        tokens=b"",
                        extent=record.extent,
                        extent_token_start=record.extent_token_start + begin - record.token_start,
                    )
                first = (begin - record.token_start) * TOKEN_BYTES
                piece.tokens = tokens[first : first + (stop - begin) * TOKEN_BYTES]
                count = self.geometry.page_count(stop - begin)
                piece.hashes = None if pages is None else pages[:, page : page + count]
                page += count
                if piece is not record:
                    self.directory.insert(piece)
                    self._reservation_of[piece] = reservation
                parts.append(piece)
            for (at, _), child in later.items():
                owner = next(
                    p for p in parts if p.token_start < record.token_start + at <= end_of(p)
                )
                child.parent = owner
                child.parent_tokens = record.token_start + at - owner.token_start
                self.directory.insert(child)
        reservation.parts = parts

    def _reveal(self, reservation: Reservation) -> None:
        parent = reservation.parts[0].parent
        if parent is not None and parent.state is not RecordState.VISIBLE:
            return
        for record in reservation.parts:
            self.show(record)
            self.ledger.published(record)
            del self._reservation_of[record]
        reservation.state = ReservationState.VISIBLE
        self.counters.saves_published += 1
        self.touch(chain_of(reservation.parts[-1]), reservation.clock)
        self.leases.release(reservation.lease)
        waiting = {
            self._reservation_of[child]
            for record in reservation.parts
            for child in record.children.values()
            if child in self._reservation_of
        }
        for later in waiting:
            if later.state is ReservationState.PROVED:
                self._reveal(later)

    def settle(self, reservation: Reservation) -> None:
        """Give back what a reservation holds, once no write of it can still land."""
        ensure(not reservation.settled, "a reservation was settled twice")
        ensure(reservation.state is not ReservationState.OPEN, "an open reservation was settled")
        reservation.settled = True
        if reservation.grown is not None:
            reservation.grown.growing = False
        for extent in reservation.extents:
            self.extents.drop(extent)

    # -- retire ----------------------------------------------------------------------------------

    def void(self, reservation: Reservation) -> None:
        """Withdraw a reservation that will never be visible, with everything that hangs on it."""
        if reservation.state in (ReservationState.VOID, ReservationState.VISIBLE):
            return
        reservation.state = ReservationState.VOID
        for record in reversed(reservation.parts):
            for child in list(record.children.values()):
                if child not in reservation.parts:
                    self.void(self._reservation_of[child])
            self._forget(record)
        self.leases.release(reservation.lease)

    def retire(self, record: Record, *, for_good: bool = False) -> None:
        """Take a visible record and all its descendants out of the directory.

        `for_good`: a replay of the journal must not bring it back (damage, a failed save, a drop).
        """
        if record.state is not RecordState.VISIBLE:
            return
        self.ledger.gone(record, for_good=for_good)
        for below in reversed(self.directory.subtree(record)):
            if below.state is RecordState.VISIBLE:
                self.counters.records_retired += 1
                self._forget(below)
            elif below.state is RecordState.RESERVED and below in self._reservation_of:
                self.void(self._reservation_of[below])

    def prefix_of(self, record: Record) -> bytes:
        """Return all tokens up to the end of a record, as packed uint32."""
        pieces = [bytes(record.tokens)]
        while record.parent is not None:
            pieces.append(bytes(record.parent.tokens[: record.parent_tokens * TOKEN_BYTES]))
            record = record.parent
        return b"".join(reversed(pieces))

    def retire_from(self, root: int, tokens: memoryview, start_token: int) -> None:
        """Retire the first visible record of a prefix that reaches past `start_token`."""
        end = 0
        for match in self.directory.walk(root, tokens, len(tokens) // TOKEN_BYTES):
            end += match.token_count
            if end > start_token:
                self.retire(match.record, for_good=True)
                return

    def retire_all(self) -> None:
        """Empty the directory, reservations included."""
        for reservation in set(self._reservation_of.values()):
            self.void(reservation)
        for record in self.directory.top():
            self.retire(record)
        self.ledger.reset()

    def _forget(self, record: Record) -> None:
        self.directory.remove(record)
        if record.state is RecordState.VISIBLE:
            self.record_count -= 1
            self.token_count -= record.token_count
            self.ledger.gone(record, for_good=False)
            self.watch.gone(record.record_id)
        record.state = RecordState.RETIRED
        self._reservation_of.pop(record, None)
        residents = self.residents.get(record.extent)
        if residents is not None and record in residents:
            residents.remove(record)
            if not residents:
                del self.residents[record.extent]
            self.extents.drop(record.extent)

    def _age(self, extent: Extent) -> Age | None:
        records = self.residents.get(extent)
        if not records:
            return None
        rank = max(record.access_rank for record in records)
        return rank, -min(record.token_start for record in records)

    def _evictable(self, extent: Extent) -> bool:
        """Whether nothing but visible records needs an extent: no lease, save or restore does."""
        records = self.residents.get(extent, set())
        return extent.references == len(records) and all(
            record.state is RecordState.VISIBLE for record in records
        )

    def _evict_for(self, order: int) -> bool:
        """Retire the coldest aligned region that can give an extent of `order`; False if none can.

        A chain shares its youngest rank, so a region's rank (its hottest record) is never below
        that of what hangs on it: nothing hotter is lost with it.
        """
        region = self._cold.coldest_region(order, self._evictable)
        before = self.extents.used_bytes
        for extent in region:
            for record in list(self.residents.get(extent, ())):
                self.retire(record)
        freed = before - self.extents.used_bytes
        self.counters.evicted_bytes += freed
        return freed > 0


def end_of(record: Record) -> int:
    """Return the token behind the last one of a record."""
    return record.token_start + record.token_count


def chain_of(record: Record) -> list[Record]:
    """Return a record and its ancestors, the record first."""
    chain: list[Record] = []
    step: Record | None = record
    while step is not None:
        chain.append(step)
        step = step.parent
    return chain
