"""Owns leases: the references that keep records' bytes alive. It never frees space itself."""

from __future__ import annotations

from collections.abc import Sequence

from rangekv.engine.index.directory import Record
from rangekv.engine.index.extents import ExtentTable
from rangekv.engine.stats import Counters


class Lease:
    """One reference on each record of a chain and on its extent, given back exactly once.

    It lives until `release`, whatever Python's garbage collector does to those who hold it.
    """

    __slots__ = ("_released", "generations", "records")

    def __init__(self, records: Sequence[Record]) -> None:
        self.records = tuple(records)
        self.generations = tuple(record.extent.generation for record in records)
        self._released = False

    @property
    def released(self) -> bool:
        """Whether the reference has been given back."""
        return self._released


class LeaseTable:
    """All open leases of one engine. Guarded by the engine's lock."""

    def __init__(self, extents: ExtentTable, counters: Counters) -> None:
        self._extents = extents
        self._counters = counters
        self.open: set[Lease] = set()

    def take(self, records: Sequence[Record]) -> Lease:
        """Return a lease on `records`; an empty chain gives an empty lease."""
        lease = Lease(records)
        for record in lease.records:
            record.leases += 1
            self._extents.hold(record.extent)
        self.open.add(lease)
        self._counters.leases_taken += 1
        return lease

    def release(self, lease: Lease) -> None:
        """Give the reference back; a second call does nothing."""
        if lease._released:
            return
        lease._released = True
        self.open.remove(lease)
        self._counters.leases_released += 1
        for record in lease.records:
            record.leases -= 1
            self._extents.drop(record.extent)
