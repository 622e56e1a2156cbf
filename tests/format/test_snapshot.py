"""Snapshots: round trips, truncation at every byte, damage, limits, and hostile tables."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from rangekv.format import snapshot
from rangekv.format.envelope import (
    HEAD_BYTES_MAX,
    HEADER,
    HEADER_BYTES,
    SECTION,
    Envelope,
    SectionKind,
    SnapshotHeader,
)
from rangekv.format.errors import FormatError
from rangekv.format.geometry import DATA_OFFSET, Geometry
from rangekv.format.identity import FileIdentity
from rangekv.format.records import EXTENT, NO_CHECKSUM, NO_PARENT, NO_SALT, RECORD, Extent, Record
from rangekv.format.tables import ROOTS_MAX, TableLimits, Tables, check_tables
from support.hostile import sealed_snapshot
from support.stores import CAPACITY_BYTES, MODEL, filled_tables

GEOMETRY = Geometry.derive(MODEL, CAPACITY_BYTES)
LIMITS = TableLimits.of(GEOMETRY)
ENVELOPE = Envelope(
    store_uuid=bytes(range(16)),
    epoch=4,
    identity=FileIdentity(11, DATA_OFFSET + CAPACITY_BYTES, 1, 2, 3, 3),
    pack_mtime_ns=1_700_000_000_123_456_789,
    geometry_digest=bytes(range(16, 32)),
    published_unix_ns=1_700_000_001_000_000_000,
)


def encode(tables: Tables) -> bytes:
    return b"".join(snapshot.encode(tables, ENVELOPE))


def decode(data: bytes, limits: TableLimits = LIMITS) -> tuple[SnapshotHeader, Tables]:
    header = SnapshotHeader.decode(data[:HEAD_BYTES_MAX], len(data), limits)
    return header, snapshot.decode(data, header, GEOMETRY)


def refused(data: bytes) -> str:
    with pytest.raises(FormatError) as caught:
        decode(data)
    return caught.value.code


def test_round_trip():
    tables = filled_tables(GEOMETRY)
    header, found = decode(encode(tables))
    assert header.envelope == ENVELOPE
    assert (header.record_count, header.token_count, header.generation_max) == (3, 48, 3)
    assert found == tables


def test_an_empty_index_round_trips_for_bound_and_blank_stores():
    data = encode(Tables.empty(generation_max=5))
    assert decode(data)[1] == Tables.empty(generation_max=5)
    header = SnapshotHeader.decode(data, len(data), TableLimits.of(None))
    assert snapshot.decode(data, header, None) == Tables.empty(generation_max=5)


def test_a_blank_store_holds_no_entries():
    data = encode(filled_tables(GEOMETRY))
    with pytest.raises(FormatError, match="snapshot-limits"):
        SnapshotHeader.decode(data, len(data), TableLimits.of(None))
    with pytest.raises(FormatError):
        check_tables(filled_tables(GEOMETRY), None)


def test_buffers_may_be_arrays_and_are_views_when_read():
    tables = filled_tables(GEOMETRY)
    tables.tokens = memoryview(array("I", range(48)))
    assert encode(tables) == encode(filled_tables(GEOMETRY))
    assert isinstance(decode(encode(tables))[1].tokens, memoryview)


def test_every_truncation_is_refused():
    data = encode(filled_tables(GEOMETRY))
    for length in range(len(data)):
        assert refused(data[:length]) == "bad-snapshot"
    assert refused(data + b"\x00") == "bad-snapshot"


def test_every_flipped_byte_is_refused():
    data = bytearray(encode(filled_tables(GEOMETRY)))
    for index in range(len(data)):
        data[index] ^= 0x41
        refused(bytes(data))
        data[index] ^= 0x41


def edits(data: bytes, start: int, layout) -> list[bytes]:
    """Every integer field of one structure set to values at and beyond its bounds."""
    found = []
    for offset, size, name in layout.rows:
        if size not in (2, 4, 8) or name == "xxh3_64":
            continue
        place = slice(start + offset, start + offset + size)
        value = int.from_bytes(data[place], "little")
        top = 256**size - 1
        for edit in {0, 1, value - 1, value + 1, value * 2, top >> 1, top - 1, top} - {value, -1}:
            edited = bytearray(data)
            edited[place] = min(edit, top).to_bytes(size, "little")
            found.append(sealed_snapshot(bytes(edited)))
    return found


def test_sealed_mutations_of_every_field_give_tables_or_a_format_error():
    data = encode(filled_tables(GEOMETRY))
    header, _ = decode(data)
    offsets = {SectionKind(section.kind): section.offset for section in header.sections}
    targets = [(0, HEADER)]
    targets += [(HEADER_BYTES + index * SECTION.size, SECTION) for index in range(5)]
    targets += [(offsets[SectionKind.RECORDS] + row * RECORD.size, RECORD) for row in range(3)]
    targets += [(offsets[SectionKind.EXTENTS] + row * EXTENT.size, EXTENT) for row in range(2)]
    accepted, codes = 0, set()
    for start, layout in targets:
        for edited in edits(data, start, layout):
            try:
                _, tables = decode(edited)
            except FormatError as error:
                codes.add(error.code)
            else:
                accepted += 1
                check_tables(tables, GEOMETRY)
    assert accepted > 0, "some fields are free, such as access_rank"
    assert codes == {"bad-snapshot", "unknown-section", "unsupported-version"}


def with_sections(data: bytes, change) -> bytes:
    """Rebuild a snapshot's section table; `change` gets and returns (kind, flags, body) rows."""
    header, _ = decode(data)
    rows = [
        (one.kind, one.flags, data[one.offset : one.offset + one.length], one.count)
        for one in header.sections
    ]
    rows = change(rows)
    end = HEADER_BYTES + len(rows) * SECTION.size
    table, bodies = b"", b""
    for kind, flags, body, count in rows:
        padding = -end % 64
        offset = end + padding
        bodies += bytes(padding) + body
        end = offset + len(body)
        table += SECTION.struct.pack(kind, flags, offset, len(body), count, bytes(16))
    head = bytearray(data[:HEADER_BYTES])
    head[20:24] = len(rows).to_bytes(4, "little")
    head[24:32] = end.to_bytes(8, "little")
    return sealed_snapshot(bytes(head) + table + bodies)


def test_unknown_sections():
    data = encode(filled_tables(GEOMETRY))
    optional = with_sections(data, lambda rows: [*rows, (99, 0, b"later", 1)])
    assert decode(optional)[1] == filled_tables(GEOMETRY)
    needed = with_sections(data, lambda rows: [*rows, (99, 1, b"later", 1)])
    assert refused(needed) == "unknown-section"
    needed = with_sections(data, lambda rows: [*rows, (99, 3, b"later", 1)])
    assert refused(needed) == "unknown-section"
    odd = with_sections(data, lambda rows: [*rows, (99, 2, b"later", 1)])
    assert refused(odd) == "bad-snapshot"
    large = with_sections(data, lambda rows: [*rows, (99, 0, bytes(2**20 + 1), 1)])
    assert refused(large) == "snapshot-limits"


def test_sections_lie_in_order_and_must_be_understood():
    data = encode(filled_tables(GEOMETRY))
    assert refused(with_sections(data, lambda rows: rows[::-1])) == "bad-snapshot"
    first = with_sections(data, lambda rows: [(0, 0, b"before", 1), *rows])
    assert refused(first) == "bad-snapshot"
    optional = with_sections(data, lambda rows: [(*rows[0][:1], 0, *rows[0][2:]), *rows[1:]])
    assert refused(optional) == "bad-snapshot"


def test_sections_are_there_once_and_at_most_eight():
    data = encode(filled_tables(GEOMETRY))
    assert refused(with_sections(data, lambda rows: rows[:-1])) == "bad-snapshot"
    assert refused(with_sections(data, lambda rows: [*rows, rows[0]])) == "bad-snapshot"
    extra = [(kind, 0, b"", 0) for kind in range(90, 94)]
    assert refused(with_sections(data, lambda rows: rows + extra)) == "bad-snapshot"


def test_limits_refuse_before_anything_is_read():
    data = encode(filled_tables(GEOMETRY))
    for field, kind in (
        ("records_max", "RECORDS"),
        ("tokens_max", "TOKENS"),
        ("checksums_max", "CHECKSUMS"),
        ("extents_max", "EXTENTS"),
        ("roots_max", "ROOTS"),
    ):
        limits = replace(LIMITS, **{field: 1})
        with pytest.raises(FormatError, match=kind) as caught:
            SnapshotHeader.decode(data[:HEAD_BYTES_MAX], len(data), limits)
        assert caught.value.code == "snapshot-limits"


def test_limits_of_a_geometry():
    assert LIMITS.extents_max == GEOMETRY.pack_count * (
        GEOMETRY.stripe_bytes_max // GEOMETRY.stripe_bytes_min
    )
    assert LIMITS.records_max == GEOMETRY.usable_bytes // (2 * GEOMETRY.block_bytes)
    assert LIMITS.tokens_max == LIMITS.records_max * 16
    assert LIMITS.checksums_max == LIMITS.records_max * 2
    assert LIMITS.roots_max == ROOTS_MAX


BLOCK = GEOMETRY.block_tokens
NARROW = GEOMETRY.stripe_bytes_min


def edit(tables: Tables, **rows: dict[str, object]) -> Tables:
    """Change fields of rows named record_N or extent_N."""
    for name, changes in rows.items():
        kind, _, index = name.partition("_")
        table = tables.records if kind == "record" else tables.extents
        table[int(index)] = table[int(index)]._replace(**changes)
    return tables


@pytest.mark.parametrize(
    "rows",
    [
        {"extent_0": {"width": NARROW * 3}},
        {"extent_0": {"width": GEOMETRY.stripe_bytes_max * 2}},
        {"extent_0": {"pack_index": GEOMETRY.pack_count}},
        {"extent_0": {"pack_index": 1}},
        {"extent_0": {"offset": GEOMETRY.pack_offset(0) + 4096}},
        {"extent_0": {"offset": 0}},
        {"extent_1": {"offset": GEOMETRY.pack_offset(1) + GEOMETRY.unit_bytes}},
        {"extent_0": {"append_mark_tokens": NARROW // 4096 + BLOCK}},
        {"extent_0": {"append_mark_tokens": BLOCK + 1}},
        {"extent_0": {"generation": 4}},
        {"extent_1": {"offset": GEOMETRY.pack_offset(0), "pack_index": 0}},
        {"record_0": {"extent": 2}},
        {"record_0": {"flags": 1}},
        {"record_0": {"root": 2}},
        {"record_0": {"token_count": 0}},
        {"record_0": {"token_count": 2 * BLOCK}},
        {"record_0": {"token_count": BLOCK - 1}},
        {"record_0": {"extent_token_start": BLOCK}},
        {"record_0": {"token_start": BLOCK}},
        {"record_0": {"parent_tokens": BLOCK}},
        {"record_0": {"parent": 0}},
        {"record_0": {"parent": 1}},
        {"record_0": {"token_index": 48}},
        {"record_0": {"checksum_index": 3}},
        {"record_1": {"parent_tokens": 2 * BLOCK, "token_start": 2 * BLOCK}},
        {"record_1": {"token_start": 0}},
        {"record_1": {"root": 1}},
        {"record_1": {"parent_tokens": 0, "token_start": 0}},
        {"record_1": {"token_index": 0}},
        {"record_1": {"record_id": 10}},
        {"record_1": {"record_id": 2**63}},
        {"record_1": {"access_rank": 2**63}},
        {"record_1": {"checksum_index": NO_CHECKSUM}},
        {"record_2": {"extent_token_start": 0}},
    ],
)
def test_tables_that_contradict_themselves_are_refused(rows):
    tables = edit(filled_tables(GEOMETRY), **rows)
    with pytest.raises(FormatError, match="bad-snapshot"):
        check_tables(tables, GEOMETRY)
    assert refused(encode(tables)) == "bad-snapshot"


def test_a_prefix_leads_to_one_record():
    block_bytes = 4 * BLOCK
    good = filled_tables(GEOMETRY)
    mine, theirs, third = (good.tokens[i * block_bytes : (i + 1) * block_bytes] for i in range(3))
    twins = edit(filled_tables(GEOMETRY), record_2={"root": 0})
    check_tables(twins, GEOMETRY)
    twins.tokens = mine + theirs + mine
    with pytest.raises(FormatError, match="record 2 begins as another one"):
        check_tables(twins, GEOMETRY)
    extent = good.extents[0]._replace(append_mark_tokens=2 * BLOCK, width=2 * NARROW)
    longer = edit(filled_tables(GEOMETRY), record_0={"token_count": 2 * BLOCK})
    longer.extents[0] = extent
    longer.records[1] = longer.records[1]._replace(token_index=2 * BLOCK)
    longer.records[2] = longer.records[2]._replace(token_index=3 * BLOCK)
    longer.tokens = mine + third + theirs + mine
    check_tables(longer, GEOMETRY)
    longer.tokens = mine + theirs + theirs + mine
    with pytest.raises(FormatError, match="record 1 begins as its parent goes on"):
        check_tables(longer, GEOMETRY)


@pytest.mark.parametrize(
    "roots", [[], [bytes(range(32))], [NO_SALT, NO_SALT], [NO_SALT, b"\x01" * 32, b"\x01" * 32]]
)
def test_roots_start_with_no_salt_and_are_distinct(roots):
    tables = Tables(roots=roots)
    with pytest.raises(FormatError):
        check_tables(tables, GEOMETRY)


def test_a_prompt_cannot_outgrow_its_position_field():
    far = 2**32 - BLOCK
    tables = filled_tables(GEOMETRY)
    tables.records[0] = tables.records[0]._replace(token_start=far, parent=NO_PARENT)
    with pytest.raises(FormatError):
        check_tables(tables, GEOMETRY)


def test_a_full_store_passes_its_own_reader():
    """Every smallest extent in use, one record a block: the most that the limits allow."""
    extents, records = [], []
    per_extent = NARROW // GEOMETRY.block_bytes
    for ordinal in range(LIMITS.extents_max):
        offset = GEOMETRY.pack_offset(0) + ordinal * GEOMETRY.unit_bytes
        pack_index = ordinal * GEOMETRY.unit_bytes // GEOMETRY.pack_bytes
        extents.append(Extent(ordinal, offset, NARROW, pack_index, per_extent * BLOCK))
        for block in range(per_extent):
            index = len(records)
            records.append(
                Record(
                    record_id=index,
                    token_index=index * BLOCK,
                    checksum_index=index * GEOMETRY.layer_count,
                    access_rank=0,
                    extent=ordinal,
                    extent_token_start=block * BLOCK,
                    token_start=0,
                    token_count=BLOCK,
                    parent=NO_PARENT,
                    parent_tokens=0,
                    root=0,
                )
            )
    tables = Tables(
        extents,
        records,
        tokens=array("I", range(BLOCK * len(records))).tobytes(),
        checksums=bytes(8 * GEOMETRY.layer_count * len(records)),
        generation_max=LIMITS.extents_max,
    )
    assert len(records) == LIMITS.records_max
    assert decode(encode(tables))[1] == tables
