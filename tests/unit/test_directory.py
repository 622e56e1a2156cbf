"""The catalog's lookups against a naive oracle: the longest published prefix, whole blocks."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.directory import common_prefix
from rangekv.engine.index.image import dump, load
from rangekv.engine.index.reservation import ReservationState
from rangekv.engine.stats import Counters
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.tables import check_tables

GEOMETRY = Geometry.derive(ModelGeometry(2, 2048, 2), 64 << 20)
PROMPT = st.lists(st.integers(0, 1), min_size=0, max_size=14)


def packed(tokens: list[int]) -> memoryview:
    return memoryview(np.array(tokens, dtype=np.uint32).tobytes())


def held(catalog: Catalog, tokens: list[int]) -> int:
    return sum(match.token_count for match in catalog.find(0, packed(tokens), len(tokens)))


def hashes(reservation, end: int) -> list[np.ndarray]:
    return [
        np.zeros((2, GEOMETRY.page_count(min(part.token_count, end - part.token_start))), np.uint64)
        for part in reservation.parts
        if part.token_start < end
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["save", "open", "publish", "void", "retire"]), PROMPT),
        max_size=25,
    )
)
def test_lookup_is_the_longest_published_prefix(steps):
    catalog = Catalog(GEOMETRY, Counters())
    published: set[tuple[int, ...]] = set()
    pending: list[tuple[object, list[int]]] = []

    def settle(reservation, tokens) -> None:
        end = reservation.token_end
        for part in reservation.parts:
            catalog.raise_append_mark(part, part.token_start + part.token_count)
        catalog.publish(reservation, end, hashes(reservation, end))
        if reservation.state is not ReservationState.VOID:
            published.update(tuple(tokens[:n]) for n in range(2, end + 1, 2))
        catalog.settle(reservation)

    for action, tokens in steps:
        if action in ("save", "open"):
            reservation = catalog.reserve(0, packed(tokens), 0, len(tokens))
            if not isinstance(reservation, str):
                pending.append((reservation, tokens))
                if action == "save":
                    # Ancestors that are still open would hide it; publish them first.
                    for entry in pending:
                        settle(*entry)
                    pending.clear()
        elif action == "publish" and pending:
            for entry in pending:
                settle(*entry)
            pending.clear()
        elif action == "void" and pending:
            reservation, _ = pending.pop(0)
            catalog.void(reservation)
            catalog.settle(reservation)
        elif action == "retire":
            path = catalog.find(0, packed(tokens), len(tokens))
            if path:
                victim = path[-1].record
                start = tuple(tokens[: victim.token_start])
                gone = start + tuple(np.frombuffer(victim.tokens, np.uint32).tolist())
                catalog.retire(victim)
                first = len(start) + 2
                published = {p for p in published if p[:first] != gone[:first]}
        longest = max(
            (n for n in range(len(tokens) + 1) if tuple(tokens[:n]) in published), default=0
        )
        assert held(catalog, tokens) == longest
    for reservation, _ in pending:
        if reservation.state is ReservationState.OPEN:
            catalog.void(reservation)
        catalog.settle(reservation)
    assert not catalog.leases.open
    tables = dump(catalog)
    check_tables(tables, GEOMETRY)
    again = Catalog(GEOMETRY, Counters())
    load(again, tables)
    assert again.extents.used_bytes == catalog.extents.used_bytes
    for prefix in published:
        assert held(again, list(prefix)) == len(prefix)


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 300))
def test_common_prefix(left, right, shared):
    right = left[:shared] + right
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(left, right) == expected


def test_common_prefix_across_pieces():
    left = bytes(200_000)
    for at in (0, 65_535, 65_536, 131_073, 199_999):
        right = bytearray(left)
        right[at] = 1
        assert common_prefix(left, bytes(right)) == at
