"""Owns what the journal must still be told, and which space waits until it has been.

It never does I/O: the committer takes what there is to say, and says when it is durable.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rangekv.format.entries import Reset, Retire, RetireRecord

if TYPE_CHECKING:
    from rangekv.engine.index.directory import Record
    from rangekv.engine.index.extents import Extent


@dataclass(frozen=True, slots=True)
class Cut:
    """What one commit says: first what is over, in the order of events, then what is new."""

    over: list[Retire | RetireRecord | Reset]
    published: list[Record]
    event: int
    """Number of the last event in it."""

    @property
    def empty(self) -> bool:
        return not self.over and not self.published


class Ledger:
    """Events since the last commit. Guarded by the engine's lock.

    A record that leaves before it was listed is never told of. An extent that was listed is
    written again only when its retirement and one later commit are durable (SPEC.md 12.6): it is
    given out at once, but `writable` holds back the writes. Without a journal nothing is noted.
    """

    def __init__(self) -> None:
        self.active = False
        self._over: list[Retire | RetireRecord | Reset] = []
        self._unlisted: dict[Record, None] = {}
        self._event = 0
        # Numbers of the last events that are in a durable commit, and in one before that.
        self._durable = 0
        self._reusable = 0

    @property
    def waiting(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._over or self._unlisted)

    @property
    def event(self) -> int:
        """Number of the last event that must be told."""
        return self._event

    def reusable(self, event: int) -> bool:
        """Whether an event and one later commit are durable, or no journal names anything."""
        return not self.active or event <= self._reusable

    def published(self, record: Record) -> None:
        """A record has become visible."""
        if self.active:
            self._unlisted[record] = None

    def gone(self, record: Record, *, for_good: bool) -> None:
        """A record has left the directory; `for_good` where it must not come back by a replay.

        Others may come back: their bytes stay as they are until their extent is retired.
        """
        if record in self._unlisted:
            del self._unlisted[record]
        elif for_good and self.active and record.listed:
            self._note(RetireRecord([record.record_id]))

    def retired(self, extent: Extent) -> int:
        """An extent is over; return the event that must be durable before it is written again."""
        if not (self.active and extent.listed):
            return 0
        self._note(Retire([extent.generation]))
        return self._event

    def reset(self) -> None:
        """Everything is over."""
        if self.active:
            self._note(Reset())

    def cut(self, *, over_only: bool = False) -> Cut:
        """Take what there is to say, or only what is over; it counts as told from now on."""
        cut = Cut(self._over, [] if over_only else list(self._unlisted), self._event)
        for record in cut.published:
            record.listed = True
            record.extent.listed = True
            del self._unlisted[record]
        self._over = []
        return cut

    def committed(self, cut: Cut) -> None:
        """The commit of a cut is durable."""
        self._reusable = self._durable
        self._durable = cut.event

    def settled(self, event: int) -> None:
        """A snapshot of the state after `event` is durable: nothing names what was over by then."""
        self._reusable = self._durable = max(self._durable, event)

    def end(self) -> None:
        """There is no journal any more, and none on disk: nothing has to wait."""
        self.active = False
        self._over, self._unlisted = [], {}

    def _note(self, event: Retire | RetireRecord | Reset) -> None:
        self._event += 1
        last = self._over[-1] if self._over else None
        if isinstance(event, Retire) and isinstance(last, Retire):
            last.generations += event.generations
        elif isinstance(event, RetireRecord) and isinstance(last, RetireRecord):
            last.record_ids += event.record_ids
        else:
            self._over.append(event)
