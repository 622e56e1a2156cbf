"""Owns the order in which extents grow cold, and finds the coldest room for a new one.

It holds no records and frees nothing; how cold an extent is it asks anew before that decides.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rangekv.engine.index.extents import Extent, ExtentTable

Age = tuple[int, int]
"""(access rank, minus the position of the first token): of one chain the tail goes first."""


class ColdOrder:
    """Extents that hold records, coldest first. Guarded by the engine's lock.

    An age only rises while an extent holds records, so what is kept of each is an age that it had
    once: a lower bound, mended when its turn comes. Being used therefore costs nothing here, and
    finding the coldest extent costs what changed since, not the number of extents.
    """

    def __init__(self, table: ExtentTable, age: Callable[[Extent], Age | None]) -> None:
        """`age` returns None for an extent that holds no records any more."""
        self._table = table
        self._age = age
        self._heap: list[tuple[Age, int, Extent]] = []

    def add(self, extent: Extent) -> None:
        """Note an extent that begins to hold records."""
        age = self._age(extent)
        if age is not None:
            heapq.heappush(self._heap, (age, extent.generation, extent))

    def coldest_region(self, order: int, evictable: Callable[[Extent], bool]) -> list[Extent]:
        """Return the extents whose retirement makes the coldest room for one of `order`.

        They fill one aligned region of that size, or are one larger extent; all are `evictable`,
        and the hottest of them is as cold as can be. Returns none when there is no such region.
        """
        waiting: dict[tuple[int, int, int], set[Extent]] = {}
        looked_at: list[tuple[Age, int, Extent]] = []
        found: list[Extent] = []
        while self._heap and not found:
            age, generation, extent = heapq.heappop(self._heap)
            now = self._age(extent)
            if now is None:
                continue
            if now > age:
                heapq.heappush(self._heap, (now, generation, extent))
                continue
            looked_at.append((age, generation, extent))
            if not evictable(extent):
                continue
            region = self._table.region(extent, order)
            inside = waiting.get(region)
            if inside is None:
                inside = waiting[region] = set(self._table.inside(region))
            inside.discard(extent)
            if not inside:
                found = self._table.inside(region)
        for entry in looked_at:
            heapq.heappush(self._heap, entry)
        return found
