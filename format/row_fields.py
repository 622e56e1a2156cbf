"""Owns what each field of an extent or a record ought to say, for tables that may be damaged.

It explains and never decides: what is accepted is for records.py and tables.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rangekv.format.checksum import Octets
from rangekv.format.dissect import Structure
from rangekv.format.geometry import Geometry
from rangekv.format.layout import COUNTER_MAX, Layout
from rangekv.format.records import EXTENT, NO_CHECKSUM, NO_PARENT, RECORD, Extent, Record
from rangekv.format.tables import TOKEN_POSITION_MAX

# Beyond it a bad row is shown with its checksum alone: looking for its byte takes 20 ms.
MENDED_ROWS_MAX = 100
_Row = TypeVar("_Row", Extent, Record)


@dataclass(frozen=True, slots=True)
class Rows(Generic[_Row]):
    """The whole rows of one section, and a closer look at those whose seal does not hold."""

    rows: list[_Row]
    """As they most likely were: see `Structure.values`."""
    mended: dict[int, Structure]
    unsealed: bytearray
    """One byte a row: 1 where its seal does not hold and nothing explains it."""

    def doubtful(self, ordinal: int) -> bool:
        return bool(self.unsealed[ordinal])


def extent_rows(section: Octets, offset: int) -> Rows[Extent]:
    """Return the rows of an EXTENTS section that lies at `offset`; nothing is proved."""
    return _read_rows(EXTENT, Extent._make, section, offset)


def record_rows(section: Octets, offset: int) -> Rows[Record]:
    """Return the rows of a RECORDS section that lies at `offset`; nothing is proved."""
    return _read_rows(RECORD, Record._make, section, offset)


def _read_rows(
    layout: Layout, make: Callable[[Iterable[int]], _Row], section: Octets, offset: int
) -> Rows[_Row]:
    view = memoryview(section)[: len(section) // layout.size * layout.size]
    rows: list[_Row] = []
    mended: dict[int, Structure] = {}
    unsealed = bytearray(len(view) // layout.size)
    tried = 0
    for ordinal, found in enumerate(layout.struct.iter_unpack(view)):
        values, start = found, ordinal * layout.size
        seal_at = start + layout.seal_offset
        if layout.seal(view[start:seal_at]) != view[seal_at : start + layout.size]:
            unsealed[ordinal] = 1
            if tried < MENDED_ROWS_MAX:
                tried += 1
                row = Structure(layout, view[start : start + layout.size], offset + start)
                if row.mended:
                    mended[ordinal], unsealed[ordinal] = row, 0
                    values = tuple(row.values.values())
        rows.append(make(values[:-2]))
    return Rows(rows, mended, unsealed)


def _structures(
    layout: Layout, mended: Mapping[int, Structure], section: Octets, offset: int
) -> Iterator[Structure]:
    """Yield every row, the last one perhaps cut off by the end of the file."""
    view = memoryview(section)
    for ordinal, start in enumerate(range(0, len(view), layout.size)):
        yield mended.get(ordinal) or Structure(
            layout, view[start : start + layout.size], offset + start, mend=False
        )


def extent_fields(
    section: Octets,
    offset: int,
    extents: Rows[Extent],
    geometry: Geometry | None,
    generation_max: int,
) -> Iterator[Structure]:
    """Yield the rows of an EXTENTS section that lies at `offset`, each with what is wrong in it."""
    rows = extents.rows
    overlaps = {} if geometry is None else _overlaps(rows, geometry)
    for ordinal, row in enumerate(_structures(EXTENT, extents.mended, section, offset)):
        if ordinal < len(rows):
            most = generation_max
            row.require("generation", rows[ordinal].generation <= most, f"at most {most}")
            if geometry is not None:
                _place_of_extent(row, rows[ordinal], geometry)
            if ordinal in overlaps:
                row.fault("offset", f"other bytes than extent {overlaps[ordinal]} has")
        yield row


def _place_of_extent(row: Structure, extent: Extent, geometry: Geometry) -> None:
    widths = geometry.widths()
    row.require(
        "width", extent.width in widths, f"{widths[0]} times a power of two, to {widths[-1]}"
    )
    packs = geometry.pack_count
    row.require("pack_index", extent.pack_index < packs, f"below pack_count {packs}")
    if extent.pack_index < packs and extent.width in widths:
        size = geometry.extent_bytes(extent.width)
        first = geometry.pack_offset(extent.pack_index)
        last = first + geometry.pack_bytes - size
        row.require(
            "offset",
            first <= extent.offset <= last and (extent.offset - first) % size == 0,
            f"{first} to {last} in steps of {size}: pack {extent.pack_index}",
        )
    mark = extent.append_mark_tokens
    most = extent.width // geometry.token_bytes
    row.require(
        "append_mark_tokens",
        mark <= most and mark % geometry.block_tokens == 0,
        f"a multiple of {geometry.block_tokens} up to {most}",
    )


def record_fields(
    section: Octets,
    offset: int,
    records: Rows[Record],
    extents: Sequence[Extent],
    geometry: Geometry | None,
    root_count: int,
) -> Iterator[Structure]:
    """Yield the rows of a RECORDS section that lies at `offset`, each with what is wrong in it."""
    shares = _shares(records.rows)
    seen: set[int] = set()
    # Where the next row's tokens and checksums begin; None behind a row that cannot tell.
    token_index: int | None = 0
    checksum_index: int | None = 0
    for ordinal, row in enumerate(_structures(RECORD, records.mended, section, offset)):
        if ordinal >= len(records.rows):
            yield row
            return
        record = records.rows[ordinal]
        row.require("flags", record.flags == 0, "0")
        row.require("root", record.root < root_count, f"below {root_count} roots")
        for name in ("record_id", "access_rank"):
            row.require(name, getattr(record, name) <= COUNTER_MAX, f"at most {COUNTER_MAX}")
        row.require("record_id", record.record_id not in seen, "another one than an earlier row")
        seen.add(record.record_id)
        _follow(row, "token_index", record.token_index, token_index)
        token_index = record.token_index + record.token_count
        if geometry is not None and record.checksum_index != NO_CHECKSUM:
            _follow(row, "checksum_index", record.checksum_index, checksum_index)
            pages = geometry.page_count(record.token_count)
            checksum_index = record.checksum_index + geometry.layer_count * pages
        if records.doubtful(ordinal):
            token_index = checksum_index = None
        _parent_of(row, record, ordinal, records)
        _range_of(row, record, extents, geometry)
        if ordinal in shares:
            row.fault("extent_token_start", f"other tokens than record row {shares[ordinal]} has")
        yield row


def _follow(row: Structure, name: str, found: int, expected: int | None) -> None:
    if expected is not None:
        row.require(name, found == expected, f"{expected} (behind the row before)")


def _parent_of(row: Structure, record: Record, ordinal: int, records: Rows[Record]) -> None:
    if record.parent == NO_PARENT:
        for name in ("token_start", "parent_tokens"):
            row.require(name, getattr(record, name) == 0, "0 (no parent)")
        return
    row.require("parent", record.parent < ordinal, f"an earlier row than {ordinal}, or none")
    if record.parent < ordinal and not records.doubtful(record.parent):
        parent = records.rows[record.parent]
        start = parent.token_start + record.parent_tokens
        row.require(
            "parent_tokens",
            0 < record.parent_tokens <= parent.token_count,
            f"1 to {parent.token_count}, the tokens of its parent",
        )
        row.require("token_start", record.token_start == start, f"{start} (behind its parent)")
        row.require("root", record.root == parent.root, f"{parent.root} (its parent's)")


def _range_of(
    row: Structure, record: Record, extents: Sequence[Extent], geometry: Geometry | None
) -> None:
    row.require("token_count", record.token_count > 0, "at least one block")
    if geometry is not None:
        block = geometry.block_tokens
        for name in ("token_count", "token_start", "extent_token_start"):
            row.require(name, getattr(record, name) % block == 0, f"a multiple of {block}")
    end = record.token_start + record.token_count
    row.require("token_start", end <= TOKEN_POSITION_MAX, f"an end up to {TOKEN_POSITION_MAX}")
    row.require("extent", record.extent < len(extents), f"below {len(extents)} extents")
    if record.extent < len(extents):
        mark = extents[record.extent].append_mark_tokens
        row.require(
            "extent_token_start",
            record.extent_token_start + record.token_count <= mark,
            f"an end up to the append mark {mark} of extent {record.extent}",
        )


def _overlaps(rows: Sequence[Extent], geometry: Geometry) -> dict[int, int]:
    """Return {row: row that has its first bytes already}."""
    found: dict[int, int] = {}
    end, owner = 0, -1
    for ordinal in sorted(range(len(rows)), key=lambda one: rows[one].offset):
        extent = rows[ordinal]
        if extent.offset < end:
            found[ordinal] = owner
        behind = extent.offset + geometry.extent_bytes(extent.width)
        if behind > end:
            end, owner = behind, ordinal
    return found


def _shares(rows: Sequence[Record]) -> dict[int, int]:
    """Return {row: row that has its first tokens of the extent already}."""
    found: dict[int, int] = {}
    extent, end, owner = -1, 0, -1
    order = sorted(
        range(len(rows)), key=lambda one: (rows[one].extent, rows[one].extent_token_start)
    )
    for ordinal in order:
        record = rows[ordinal]
        if record.extent == extent and record.extent_token_start < end:
            found[ordinal] = owner
        behind = record.extent_token_start + record.token_count
        if record.extent != extent or behind > end:
            extent, end, owner = record.extent, behind, ordinal
    return found
