"""Owns the space of a store: which extents exist, their generations and references.

It never knows tokens or requests; free space is derived from the extents, never stored.
"""

from __future__ import annotations

import heapq

from rangekv.engine.index.ledger import Ledger
from rangekv.format.errors import ensure
from rangekv.format.geometry import Geometry


class Extent:
    """layer_count stripes of `width` bytes at file offset `offset`, one generation of content.

    `append_mark_tokens` only rises: bytes behind it are never written again in this generation.
    `references` counts live records, leases and open reservations; at zero the space returns.
    `listed` once the journal or a snapshot may name it; nothing is written into it before event
    `writable_after` of the ledger is settled: a replay might still find there what was before.
    """

    __slots__ = (
        "append_mark_tokens",
        "generation",
        "growing",
        "listed",
        "offset",
        "order",
        "pack_index",
        "references",
        "width",
        "writable_after",
    )

    def __init__(
        self, generation: int, offset: int, width: int, pack_index: int, order: int
    ) -> None:
        self.generation = generation
        self.offset = offset
        self.width = width
        self.pack_index = pack_index
        self.order = order
        self.append_mark_tokens = 0
        self.references = 0
        self.growing = False
        self.listed = False
        self.writable_after = 0


class ExtentTable:
    """A buddy allocator per pack, in units of layer_count · stripe_bytes_min bytes.

    Order k holds 2^k units, which is one stripe width of stripe_bytes_min · 2^k. Halves are exact
    and alignment is natural because a pack is one extent of the highest order.
    """

    def __init__(self, geometry: Geometry, ledger: Ledger, generation_max: int = 0) -> None:
        self.geometry = geometry
        self.ledger = ledger
        self.generation_max = generation_max
        self.live: set[Extent] = set()
        # By pack and first unit of the extent.
        self._placed: dict[tuple[int, int], Extent] = {}
        self.used_bytes = 0
        # By pack: (first unit, unit behind the last, event) of space that a replay may still name.
        self._named: dict[int, list[tuple[int, int, int]]] = {}
        top = geometry.order_max
        self._free: list[set[tuple[int, int]]] = [set() for _ in range(top + 1)]
        # Lowest address first; entries may be stale, `_free` decides.
        self._lowest: list[list[tuple[int, int]]] = [[] for _ in range(top + 1)]
        for pack_index in range(geometry.pack_count):
            self._put(top, (pack_index, 0))

    def allocate(self, order: int) -> Extent | None:
        """Return a fresh extent of a new generation, or None when no space of that size is free."""
        place = self._split_down(order)
        if place is None:
            return None
        pack_index, unit = place
        self.generation_max += 1
        geometry = self.geometry
        extent = Extent(
            self.generation_max,
            geometry.pack_offset(pack_index) + unit * geometry.unit_bytes,
            geometry.stripe_bytes_min << order,
            pack_index,
            order,
        )
        extent.writable_after = self._settled_by(pack_index, unit, unit + (1 << order))
        self._adopt(extent)
        return extent

    def claim(self, extent: Extent) -> None:
        """Take the space of an extent that a checked snapshot names."""
        unit = self._unit(extent)
        order = extent.order
        while (extent.pack_index, unit >> order << order) not in self._free[order]:
            order += 1
            ensure(order <= self.geometry.order_max, "a snapshot extent overlaps another")
        self._take(order, (extent.pack_index, unit >> order << order))
        while order > extent.order:
            order -= 1
            start = unit >> (order + 1) << (order + 1)
            wanted = unit >> order << order
            other = start if wanted != start else start + (1 << order)
            self._put(order, (extent.pack_index, other))
        self._adopt(extent)

    def hold(self, extent: Extent) -> None:
        """Add one reference."""
        extent.references += 1

    def drop(self, extent: Extent) -> None:
        """Give one reference back; at zero the space returns and the generation is over."""
        ensure(extent.references > 0, "an extent lost more references than it had")
        extent.references -= 1
        if extent.references == 0:
            self._reclaim(extent)

    def region(self, extent: Extent, order: int) -> tuple[int, int, int]:
        """Return (order, pack, index) of the aligned region that would give room for `order`."""
        size = max(order, extent.order)
        return size, extent.pack_index, self._unit(extent) >> size

    def inside(self, region: tuple[int, int, int]) -> list[Extent]:
        """Return the live extents of a region, by address."""
        size, pack_index, index = region
        unit, end = index << size, (index + 1) << size
        found: list[Extent] = []
        while unit < end:
            extent = self._placed.get((pack_index, unit))
            if extent is not None:
                found.append(extent)
            unit += 1 if extent is None else 1 << extent.order
        return found

    def _unit(self, extent: Extent) -> int:
        """Return the first unit of an extent, counted in its pack."""
        geometry = self.geometry
        return (extent.offset - geometry.pack_offset(extent.pack_index)) // geometry.unit_bytes

    def _adopt(self, extent: Extent) -> None:
        self.live.add(extent)
        self._placed[extent.pack_index, self._unit(extent)] = extent
        self.used_bytes += self.geometry.extent_bytes(extent.width)

    def _reclaim(self, extent: Extent) -> None:
        self.live.remove(extent)
        self.used_bytes -= self.geometry.extent_bytes(extent.width)
        unit = self._unit(extent)
        del self._placed[extent.pack_index, unit]
        event = self.ledger.retired(extent)
        if event:
            named = self._named.setdefault(extent.pack_index, [])
            named.append((unit, unit + (1 << extent.order), event))
        order = extent.order
        while order < self.geometry.order_max:
            buddy = (extent.pack_index, unit ^ (1 << order))
            if buddy not in self._free[order]:
                break
            self._take(order, buddy)
            unit &= ~(1 << order)
            order += 1
        self._put(order, (extent.pack_index, unit))

    def _settled_by(self, pack_index: int, begin: int, end: int) -> int:
        """Return the last event that must be settled before these units are written; 0 for none."""
        named = [n for n in self._named.pop(pack_index, ()) if not self.ledger.reusable(n[2])]
        if named:
            self._named[pack_index] = named
        return max(
            (event for first, stop, event in named if first < end and begin < stop), default=0
        )

    def _split_down(self, order: int) -> tuple[int, int] | None:
        for have in range(order, self.geometry.order_max + 1):
            place = self._first(have)
            if place is None:
                continue
            self._take(have, place)
            pack_index, unit = place
            for half in range(have - 1, order - 1, -1):
                self._put(half, (pack_index, unit + (1 << half)))
            return place
        return None

    def _first(self, order: int) -> tuple[int, int] | None:
        lowest, free = self._lowest[order], self._free[order]
        while lowest and lowest[0] not in free:
            heapq.heappop(lowest)
        return lowest[0] if lowest else None

    def _put(self, order: int, place: tuple[int, int]) -> None:
        free = self._free[order]
        free.add(place)
        if len(self._lowest[order]) > 2 * len(free) + 64:
            self._lowest[order] = sorted(free)
        else:
            heapq.heappush(self._lowest[order], place)

    def _take(self, order: int, place: tuple[int, int]) -> None:
        self._free[order].remove(place)
