"""The buddy allocator against a naive map of units."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rangekv.engine.index.extents import Extent, ExtentTable
from rangekv.engine.index.ledger import Ledger
from rangekv.format.geometry import Geometry, ModelGeometry

GEOMETRY = Geometry.derive(ModelGeometry(2, 1024, 64), 8 << 20)


def units_of(extent: Extent) -> set[tuple[int, int]]:
    first = (extent.offset - GEOMETRY.pack_offset(extent.pack_index)) // GEOMETRY.unit_bytes
    return {(extent.pack_index, first + i) for i in range(1 << extent.order)}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, GEOMETRY.order_max), st.integers(0, 99))))
def test_live_extents_are_disjoint_and_space_is_never_lost(steps):
    table = ExtentTable(GEOMETRY, Ledger())
    live: list[Extent] = []
    units = GEOMETRY.pack_count << GEOMETRY.order_max
    for allocate, order, pick in steps:
        if allocate:
            extent = table.allocate(order)
            used = set().union(*map(units_of, live)) if live else set()
            if extent is None:
                # Refused only when no aligned run of that size is free.
                for pack in range(GEOMETRY.pack_count):
                    for start in range(0, 1 << GEOMETRY.order_max, 1 << order):
                        assert any((pack, start + i) in used for i in range(1 << order))
            else:
                assert not units_of(extent) & used
                assert extent.width == GEOMETRY.stripe_bytes_min << order
                table.hold(extent)
                live.append(extent)
        elif live:
            table.drop(live.pop(pick % len(live)))
        assert table.used_bytes == sum(len(units_of(e)) for e in live) * GEOMETRY.unit_bytes
    fresh = ExtentTable(GEOMETRY, Ledger())
    for extent in live:
        fresh.claim(extent)  # what a reopen does
    assert fresh.used_bytes == table.used_bytes
    for extent in live:
        table.drop(extent)
    whole = [table.allocate(GEOMETRY.order_max) for _ in range(GEOMETRY.pack_count)]
    assert None not in whole
    assert table.used_bytes == units * GEOMETRY.unit_bytes


def test_generations_only_rise():
    table = ExtentTable(GEOMETRY, Ledger())
    seen = []
    for _ in range(5):
        extent = table.allocate(0)
        table.hold(extent)
        seen.append(extent.generation)
        table.drop(extent)
    assert seen == sorted(set(seen))
