"""Owns the plan of a restore: which bytes are read in which calls and where their blocks go.

Pure functions on integers and arrays; it never touches a file, a bank or a directory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rangekv.engine.index.directory import Match, Record
from rangekv.format.errors import ensure
from rangekv.format.geometry import ALIGNMENT, Geometry

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Neighbouring records of one extent, read together in every layer.

    `read_begin`/`read_end` are bytes inside a stripe, page- and 4096-aligned outwards.
    `deliver_begin`/`deliver_end` are the bytes that the caller asked for. `page_begin[i]` and
    `page_bytes[i]` place page i inside the stripe; `expected` is [layer_count, page_count], or None
    where the bytes carry no checksum. Page i is page `page_index[i]` of `page_record[i]`.
    `block_begin` is the index of the first delivered block in the caller's destination list.
    """

    extent_offset: int
    width: int
    read_begin: int
    read_end: int
    deliver_begin: int
    deliver_end: int
    page_begin: tuple[int, ...]
    page_bytes: tuple[int, ...]
    page_record: tuple[Record, ...]
    page_index: tuple[int, ...]
    expected: Hashes | None
    block_begin: int


@dataclass(frozen=True, slots=True)
class Segment:
    """One layer's part of a span: where it lies in the bank, its pages and its blocks."""

    layer_index: int
    bank_offset: int
    page_first: int
    page_last: int
    deliver_offset: int
    block_begin: int
    block_count: int


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """One native read: `length` bytes at file offset `offset` into one bank.

    A `direct` span goes straight into its blocks instead: one layer, whole pages, no bank.
    """

    run: Run
    offset: int
    length: int
    segments: tuple[Segment, ...]
    direct: bool = False

    @property
    def layer_first(self) -> int:
        """First layer this span carries; spans are read in this order."""
        return self.segments[0].layer_index

    @property
    def block_count(self) -> int:
        """Blocks that the span delivers to paged KV, over all its layers."""
        return sum(segment.block_count for segment in self.segments)


def plan(
    geometry: Geometry,
    matches: Sequence[Match],
    skip_tokens: int,
    bank_bytes: int,
    *,
    direct: bool = False,
) -> list[Span]:
    """Return the spans that bring tokens [skip_tokens, end of matches) to paged KV, layer-major.

    Address rule (SPEC.md): a(layer, token) = extent_offset + layer·width + token·token_bytes. Every
    span lies inside its extent; one that goes through a bank fits it, and starts and ends at
    multiples of 4096. With `direct`, whole pages are read straight into their blocks, and only a
    page that the caller wants a part of goes through a bank.
    """
    runs = _runs(geometry, matches, skip_tokens)
    cut = _direct_spans if direct else _spans
    spans = [span for run in runs for span in cut(geometry, run, bank_bytes)]
    spans.sort(key=lambda span: span.layer_first)
    for span in spans:
        extent_end = span.run.extent_offset + geometry.layer_count * span.run.width
        ensure(
            (span.direct or (span.length <= bank_bytes and span.length % ALIGNMENT == 0))
            and span.offset % ALIGNMENT == 0
            and span.run.extent_offset <= span.offset
            and span.offset + span.length <= extent_end,
            "a planned span leaves its extent, bank or alignment",
        )
    return spans


def _runs(geometry: Geometry, matches: Sequence[Match], skip_tokens: int) -> list[Run]:
    runs: list[Run] = []
    group: list[tuple[Record, int, int]] = []
    block_begin = 0
    for match in matches:
        record = match.record
        begin = max(0, skip_tokens - record.token_start)
        if begin >= match.token_count:
            continue
        piece = (record, begin, match.token_count)
        if group and not _continues(group[-1], piece):
            runs.append(_run(geometry, group, block_begin))
            block_begin += sum(end - start for _, start, end in group) // geometry.block_tokens
            group = []
        group.append(piece)
    if group:
        runs.append(_run(geometry, group, block_begin))
    return runs


def _continues(before: tuple[Record, int, int], after: tuple[Record, int, int]) -> bool:
    left, _, left_end = before
    right, right_begin, _ = after
    return (
        left.extent is right.extent
        and left_end == left.token_count
        and right_begin == 0
        and right.extent_token_start == left.extent_token_start + left.token_count
        and (left.hashes is None) == (right.hashes is None)
    )


def _run(geometry: Geometry, group: Sequence[tuple[Record, int, int]], block_begin: int) -> Run:
    page_tokens, token_bytes = geometry.page_tokens, geometry.token_bytes
    begins: list[int] = []
    lengths: list[int] = []
    owners: list[Record] = []
    indices: list[int] = []
    expected: list[Hashes] = []
    for record, begin, end in group:
        first, last = begin // page_tokens, -(-end // page_tokens)
        base = record.extent_token_start
        for page in range(first, last):
            start = page * page_tokens
            stop = min(start + page_tokens, record.token_count)
            begins.append((base + start) * token_bytes)
            lengths.append((stop - start) * token_bytes)
            owners.append(record)
            indices.append(page)
        if record.hashes is not None:
            expected.append(record.hashes[:, first:last])
    first_record, first_begin, _ = group[0]
    last_record, _, last_end = group[-1]
    read_end = begins[-1] + lengths[-1]
    return Run(
        extent_offset=first_record.extent.offset,
        width=first_record.extent.width,
        read_begin=begins[0],
        read_end=-(-read_end // ALIGNMENT) * ALIGNMENT,
        deliver_begin=(first_record.extent_token_start + first_begin) * token_bytes,
        deliver_end=(last_record.extent_token_start + last_end) * token_bytes,
        page_begin=tuple(begins),
        page_bytes=tuple(lengths),
        page_record=tuple(owners),
        page_index=tuple(indices),
        expected=np.concatenate(expected, axis=1) if expected else None,
        block_begin=block_begin,
    )


def _spans(geometry: Geometry, run: Run, bank_bytes: int) -> list[Span]:
    length = run.read_end - run.read_begin
    if length > bank_bytes:
        return _split_stripe(geometry, run, bank_bytes)
    # Only full stripes of adjacent layers touch each other in the file.
    layers_per_span = bank_bytes // run.width if length == run.width else 1
    spans = []
    for layer in range(0, geometry.layer_count, layers_per_span):
        count = min(layers_per_span, geometry.layer_count - layer)
        segments = tuple(
            _segment(geometry.block_bytes, run, layer + i, i * run.width, (0, len(run.page_begin)))
            for i in range(count)
        )
        offset = run.extent_offset + layer * run.width + run.read_begin
        spans.append(Span(run, offset, (count - 1) * run.width + length, segments))
    return spans


def _direct_spans(geometry: Geometry, run: Run, bank_bytes: int) -> list[Span]:
    last = len(run.page_begin)
    whole_first = int(run.page_begin[0] < run.deliver_begin)
    whole_last = last - int(run.page_begin[-1] + run.page_bytes[-1] > run.deliver_end)
    pieces = [(0, 1, False)] if whole_first else []
    if whole_first < whole_last:
        pieces.append((whole_first, whole_last, True))
    if whole_last < last and whole_last >= whole_first:
        pieces.append((whole_last, last, False))
    return [
        _piece(geometry, run, layer, (first, end), direct=direct)
        for layer in range(geometry.layer_count)
        for first, end, direct in pieces
    ]


def _piece(
    geometry: Geometry, run: Run, layer: int, pages: tuple[int, int], *, direct: bool
) -> Span:
    """Return the span of one layer's pages [first, last)."""
    first, last = pages
    begin, end = run.page_begin[first], run.page_begin[last - 1] + run.page_bytes[last - 1]
    length = end - begin if direct else -(-end // ALIGNMENT) * ALIGNMENT - begin
    segment = _segment(geometry.block_bytes, run, layer, 0, pages)
    offset = run.extent_offset + layer * run.width + begin
    return Span(run, offset, length, (segment,), direct)


def _split_stripe(geometry: Geometry, run: Run, bank_bytes: int) -> list[Span]:
    pieces: list[tuple[int, int]] = []
    first = 0
    for page in range(1, len(run.page_begin) + 1):
        last = page == len(run.page_begin)
        end = run.read_end if last else run.page_begin[page] + run.page_bytes[page]
        if last or -(-end // ALIGNMENT) * ALIGNMENT - run.page_begin[first] > bank_bytes:
            pieces.append((first, page))
            first = page
    return [
        _piece(geometry, run, layer, pages, direct=False)
        for layer in range(geometry.layer_count)
        for pages in pieces
    ]


def _segment(
    block_bytes: int, run: Run, layer: int, bank_offset: int, pages: tuple[int, int]
) -> Segment:
    first, last = pages
    begin = max(run.deliver_begin, run.page_begin[first])
    end = min(run.deliver_end, run.page_begin[last - 1] + run.page_bytes[last - 1])
    return Segment(
        layer_index=layer,
        bank_offset=bank_offset,
        page_first=first,
        page_last=last,
        deliver_offset=bank_offset + begin - run.page_begin[first],
        block_begin=run.block_begin + (begin - run.deliver_begin) // block_bytes,
        block_count=(end - begin) // block_bytes,
    )
