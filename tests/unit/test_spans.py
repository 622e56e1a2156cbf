"""The planner as a pure function: every byte once, inside its extent, aligned, layer by layer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rangekv.engine.index.directory import Match, Record
from rangekv.engine.index.extents import Extent
from rangekv.engine.transfer.spans import plan
from rangekv.format.geometry import Geometry, ModelGeometry

GEOMETRY = Geometry.derive(ModelGeometry(3, 1024, 16), 64 << 20)
MLA = Geometry.derive(ModelGeometry(3, 1152, 16), 64 << 20)


def chain(geometry: Geometry, counts: list[int], *, one_extent: bool) -> list[Match]:
    matches, start, in_extent, extent = [], 0, 0, None
    for index, blocks in enumerate(counts):
        count = blocks * geometry.block_tokens
        if extent is None or not one_extent:
            order = 6 if one_extent else 3
            extent = Extent(
                index + 1,
                geometry.pack_offset(index),
                geometry.stripe_bytes_min << order,
                index,
                order,
            )
            in_extent = 0
        record = Record(
            record_id=index,
            root=0,
            parent=matches[-1].record if matches else None,
            parent_tokens=matches[-1].token_count if matches else 0,
            token_start=start,
            tokens=bytes(4 * count),
            extent=extent,
            extent_token_start=in_extent,
        )
        record.hashes = np.zeros((3, geometry.page_count(count)), dtype=np.uint64)
        matches.append(Match(record, count))
        start, in_extent = start + count, in_extent + count
    return matches


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([GEOMETRY, MLA]),
    st.booleans(),
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from([512 * 1024, 1 << 20, 8 << 20]),
)
def test_spans_deliver_every_block_of_every_layer_once(
    geometry, one_extent, counts, skip, cut, bank_bytes
):
    if one_extent and geometry is MLA:
        counts = [count * 2 for count in counts]  # growth in place starts at multiples of 4096
    matches = chain(geometry, counts, one_extent=one_extent)
    total = sum(counts)
    end = max(1, total - cut % total)
    while sum(match.token_count for match in matches[:-1]) >= end * geometry.block_tokens:
        matches.pop()
    before = sum(match.token_count for match in matches[:-1])
    matches[-1] = Match(matches[-1].record, end * geometry.block_tokens - before)
    skip %= end
    spans = plan(geometry, matches, skip * geometry.block_tokens, bank_bytes)
    delivered = set()
    for span in spans:
        assert span.offset % 4096 == span.length % 4096 == 0
        assert span.length <= bank_bytes
        run = span.run
        for segment in span.segments:
            for i in range(segment.block_count):
                # Where the bank says this block comes from must be where the address rule puts it.
                index = segment.block_begin + i
                token = (skip + index) * geometry.block_tokens
                record = next(
                    m.record
                    for m in matches
                    if m.record.token_start <= token < m.record.token_start + m.record.token_count
                )
                at = geometry.address(
                    record.extent.offset,
                    record.extent.width,
                    segment.layer_index,
                    record.extent_token_start + token - record.token_start,
                )
                bank_offset = segment.deliver_offset + i * geometry.block_bytes
                assert span.offset + bank_offset == at
                assert bank_offset + geometry.block_bytes <= span.length
                delivered.add((segment.layer_index, index))
            for page in range(segment.page_first, segment.page_last):
                base = segment.bank_offset - run.page_begin[segment.page_first]
                begin = base + run.page_begin[page]
                assert begin >= 0
                assert begin + run.page_bytes[page] <= span.length
    assert delivered == {(layer, i) for layer in range(3) for i in range(end - skip)}
    assert sum(span.block_count for span in spans) == len(delivered)
    firsts = [span.layer_first for span in spans]
    assert firsts == sorted(firsts)


@pytest.mark.parametrize("records", [1, 2, 8, 64])
def test_spans_do_not_follow_the_number_of_records(records):
    one = plan(GEOMETRY, chain(GEOMETRY, [64], one_extent=True), 0, 8 << 20)
    many = plan(GEOMETRY, chain(GEOMETRY, [64 // records] * records, one_extent=True), 0, 8 << 20)
    assert [(s.offset, s.length) for s in many] == [(s.offset, s.length) for s in one]
