"""What is evicted is what a search through everything would have found coldest."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.extents import Extent
from rangekv.engine.index.reservation import Reservation
from rangekv.engine.stats import Counters
from rangekv.format.geometry import Geometry, ModelGeometry

GEOMETRY = Geometry.derive(ModelGeometry(1, 4096, 4), 8 << 20)  # 16 extents of 64 KiB in a pack
STEP = st.tuples(
    st.sampled_from(["save", "find", "lease", "release", "evict"]),
    st.lists(st.integers(0, 3), min_size=1, max_size=20),
    st.integers(0, GEOMETRY.order_max),
)


def packed(prompt: list[int]) -> memoryview:
    return memoryview(np.repeat(np.array(prompt, "<u4"), GEOMETRY.block_tokens).tobytes())


def save(catalog: Catalog, prompt: list[int]) -> None:
    tokens = packed(prompt)
    outcome = catalog.reserve(0, tokens, 0, len(tokens) // 4)
    if not isinstance(outcome, Reservation):
        return
    for part in outcome.parts:
        catalog.raise_append_mark(part, part.token_start + part.token_count)
    pages = [
        np.zeros((1, GEOMETRY.page_count(part.token_count)), np.uint64) for part in outcome.parts
    ]
    catalog.publish(outcome, outcome.token_end, pages)
    catalog.settle(outcome)


def rank_of(catalog: Catalog, extent: Extent) -> int:
    return max(record.access_rank for record in catalog.residents[extent])


def coldest_rank(catalog: Catalog, order: int) -> int | None:
    """Look at every aligned region; return the rank of the hottest record in the coldest one."""
    regions: dict[tuple[int, int, int], list[Extent]] = {}
    for extent in catalog.extents.live:
        size = max(order, extent.order)
        unit = (extent.offset - GEOMETRY.pack_offset(extent.pack_index)) // GEOMETRY.unit_bytes
        regions.setdefault((size, extent.pack_index, unit >> size), []).append(extent)
    ranks = [
        max(rank_of(catalog, extent) for extent in extents)
        for extents in regions.values()
        if all(extent.references == len(catalog.residents.get(extent, ())) for extent in extents)
    ]
    return min(ranks, default=None)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEP, max_size=60))
def test_the_coldest_region_goes(steps):
    catalog = Catalog(GEOMETRY, Counters())
    leases = []
    for action, prompt, order in steps:
        tokens = packed(prompt)
        if action == "save":
            save(catalog, prompt)
        elif action == "find":
            catalog.find(0, tokens, len(tokens) // 4)
        elif action == "lease":
            path = catalog.find(0, tokens, len(tokens) // 4)
            leases.append(catalog.leases.take([match.record for match in path]))
        elif action == "release" and leases:
            catalog.leases.release(leases.pop())
        elif action == "evict":
            expected = coldest_rank(catalog, order)
            ranks = {extent: rank_of(catalog, extent) for extent in catalog.residents}
            assert catalog._evict_for(order) == (expected is not None)
            gone = [rank for extent, rank in ranks.items() if extent not in catalog.residents]
            assert max(gone, default=None) == expected
            assert expected is None or catalog.extents.allocate(order) is not None
            for extent in set(catalog.extents.live) - set(catalog.residents):
                if extent.references == 0:  # the one that was allocated
                    catalog.extents.hold(extent)
                    catalog.extents.drop(extent)
        visible = list(catalog.directory.visible())
        assert catalog.record_count == len(visible)
        assert catalog.token_count == sum(record.token_count for record in visible)


def test_of_one_conversation_the_tail_goes_first():
    catalog = Catalog(GEOMETRY, Counters())
    blocks = GEOMETRY.stripe_bytes_max // GEOMETRY.block_bytes
    prompt = [number % 4 for number in range(2 * blocks)]
    save(catalog, prompt)
    assert catalog._evict_for(GEOMETRY.order_max)
    tokens = packed(prompt)
    path = catalog.find(0, tokens, len(tokens) // 4)
    assert sum(match.token_count for match in path) == len(tokens) // 4 // 2
