"""A damaged structure is shown field by field, and the field with the changed byte is named."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from rangekv.format import snapshot
from rangekv.format.checksum import xxh3_128_le
from rangekv.format.dissect import Structure
from rangekv.format.envelope import HEADER, HEADER_BYTES, SECTION, Envelope
from rangekv.format.geometry import Geometry
from rangekv.format.identity import FileIdentity
from rangekv.format.marker import MARKER, Marker
from rangekv.format.records import EXTENT, RECORD, encode_extents, encode_records
from rangekv.format.row_fields import extent_fields, extent_rows, record_fields, record_rows
from rangekv.format.snapshot_fields import head_fields
from rangekv.format.superblock import SUPERBLOCK, Superblock
from rangekv.format.superblock_fields import superblock_fields
from support.stores import CAPACITY_BYTES, MODEL, NAMESPACE, filled_tables

GEOMETRY = Geometry.derive(MODEL, CAPACITY_BYTES)
FILE = FileIdentity(77, (1 << 20) + CAPACITY_BYTES, 1_700_000_000, 5, 9, 3)
STORE = Superblock(
    store_uuid=bytes(range(16)),
    sequence=12,
    epoch=5,
    identity=FILE,
    fs_magic=0xEF53,
    rank=0,
    world_size=1,
    created_unix_ns=1_700_000_000_000_000_000,
    geometry=GEOMETRY,
    namespace=NAMESPACE,
)
TABLES = filled_tables(GEOMETRY)
MTIME_NS = 1_700_000_001_000_000_002


def a_snapshot() -> bytes:
    envelope = Envelope(STORE.store_uuid, 5, FILE, MTIME_NS, STORE.geometry_digest(), 1)
    return b"".join(snapshot.encode(TABLES, envelope))


def head(data: bytes):
    def digest(offset: int, length: int) -> bytes:
        return xxh3_128_le(data[offset : offset + length])

    return head_fields(data, len(data), digest, superblock=STORE, file=FILE, mtime_ns=MTIME_NS)


def flipped(data: bytes, position: int, mask: int = 0xFF) -> bytes:
    changed = bytearray(data)
    changed[position] ^= mask
    return bytes(changed)


def field_at(layout, position: int) -> str:
    return next(name for at, size, name in layout.rows if at <= position < at + size)


def extents(data: bytes) -> list[Structure]:
    return list(extent_fields(data, 0, extent_rows(data, 0), GEOMETRY, TABLES.generation_max))


def records(data: bytes) -> list[Structure]:
    rows = record_rows(data, 0)
    return list(record_fields(data, 0, rows, TABLES.extents, GEOMETRY, len(TABLES.roots)))


def test_nothing_is_marked_in_what_an_engine_writes():
    for copy_index in (0, 1):
        assert superblock_fields(STORE.encode(copy_index), copy_index, FILE, None).faults == {}
    blank = replace(STORE, geometry=None, namespace=None)
    assert superblock_fields(blank.encode(0), 0, FILE, None).faults == {}
    header, sections = head(a_snapshot())
    assert [one.faults for one in (header, *sections)] == [{}] * 6
    assert [one.faults for one in extents(encode_extents(TABLES.extents))] == [{}] * 2
    assert [one.faults for one in records(encode_records(TABLES.records))] == [{}] * 3


def test_a_changed_byte_of_a_superblock_is_the_one_field_that_is_marked():
    page = STORE.encode(1)
    positions = random.Random(0).sample(range(SUPERBLOCK.size), 15)
    for position in [*positions, *range(64, 4096, 800), 4090]:
        name = field_at(SUPERBLOCK, position)
        mask = 0x10 if name == "namespace" else 0xFF
        found = superblock_fields(flipped(page, position, mask), 1, FILE, None)
        assert list(found.faults) == [name], position
        assert not found.sealed


def test_a_changed_byte_of_a_header_or_section_table_is_the_one_that_is_marked():
    data = a_snapshot()
    for position in range(0, HEADER_BYTES + 5 * SECTION.size, 11):
        header, sections = head(flipped(data, position))
        marked = {(0, name) for name in header.faults}
        for ordinal, row in enumerate(sections, 1):
            marked |= {(ordinal, name) for name in row.faults}
        if position < HEADER_BYTES:
            assert marked == {(0, field_at(HEADER, position))}, position
        else:
            ordinal, within = divmod(position - HEADER_BYTES, SECTION.size)
            # The seal of the header covers the table: it does not hold, and the row says why.
            expected = {(0, "xxh3_128"), (ordinal + 1, field_at(SECTION, within))}
            assert marked == expected, position


@pytest.mark.parametrize("kind", ["extents", "records"])
def test_a_changed_byte_of_a_row_is_the_one_field_that_is_marked(kind: str):
    layout, look = {"extents": (EXTENT, extents), "records": (RECORD, records)}[kind]
    data = bytes(
        encode_extents(TABLES.extents) if kind == "extents" else encode_records(TABLES.records)
    )
    for position in range(0, len(data), 5):
        rows = look(flipped(data, position))
        ordinal, within = divmod(position, layout.size)
        marked = {(row, name) for row, one in enumerate(rows) for name in one.faults}
        assert marked == {(ordinal, field_at(layout, within))}, position


def test_what_several_changed_bytes_did_is_told_by_the_other_copy():
    page = bytearray(STORE.encode(0))
    page[104:112] = b"\x11" * 8
    found = superblock_fields(page, 0, FILE, STORE)
    assert set(found.faults) == {"stripe_bytes_max", "xxh3_128"}
    assert found.faults["stripe_bytes_max"].endswith("(superblock B)")
    alone = superblock_fields(page, 0, FILE, None)
    assert {"stripe_bytes_max", "pack_bytes", "xxh3_128"} <= set(alone.faults)


def test_a_sealed_lie_is_marked_where_fields_contradict_each_other():
    rows = [TABLES.records[0]._replace(token_count=3), *TABLES.records[1:]]
    marked = records(bytes(encode_records(rows)))
    assert "token_count" in marked[0].faults
    assert "token_index" in marked[1].faults
    other = replace(FILE, inode=78)
    assert set(superblock_fields(STORE.encode(0), 0, other, None).faults) == {"inode"}


@pytest.mark.parametrize("length", [0, 11, 100, 255, 300, 500, 700])
def test_what_is_cut_off_is_marked_and_nothing_raises(length: int):
    data = a_snapshot()[:length]
    header, sections = head(data)
    assert header.faults
    assert all(one.fields() for one in (header, *sections))
    assert superblock_fields(STORE.encode(0)[:length], 0, FILE, None).faults
    for row in records(bytes(encode_records(TABLES.records))[:length]):
        assert row.fields()


def test_noise_of_every_length_raises_nothing():
    dice = random.Random(1)
    for _ in range(20):
        noise = dice.randbytes(dice.randrange(800))
        head(noise)
        extents(noise)
        records(noise)
    assert superblock_fields(dice.randbytes(4096), 0, FILE, STORE).faults


def test_a_marker_is_a_structure_like_the_others():
    data = Marker(bytes(16), 5, 7, 4242, bytes(16)).encode()
    assert Structure(MARKER, data, 0).faults == {}
    assert list(Structure(MARKER, flipped(data, 50), 0).faults) == ["pid"]
