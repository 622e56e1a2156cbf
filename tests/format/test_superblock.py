"""Superblocks: round trips, damage of every bit, fields that contradict each other, the choice."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from rangekv.format.errors import FormatError, NotAStore, UnsupportedVersion
from rangekv.format.geometry import DATA_OFFSET, Geometry, ModelGeometry
from rangekv.format.identity import FileIdentity
from rangekv.format.namespace import Namespace
from rangekv.format.superblock import (
    SUPERBLOCK,
    SUPERBLOCK_BYTES,
    Slot,
    Superblock,
    choose,
    older,
)

CAPACITY = 4 * 1024 * 1024
BLANK = Superblock(
    store_uuid=bytes(range(16)),
    sequence=3,
    epoch=2,
    identity=FileIdentity(11, DATA_OFFSET + CAPACITY, 1_700_000_000, 999, 77, 3),
    fs_magic=0xEF53,
    rank=0,
    world_size=2,
    created_unix_ns=1_700_000_000_000_000_001,
)
BOUND = replace(
    BLANK,
    geometry=Geometry.derive(ModelGeometry(2, 4096, 16), CAPACITY),
    namespace=Namespace({"model": "tiny"}),
)


@pytest.mark.parametrize("superblock", [BLANK, BOUND])
@pytest.mark.parametrize("copy_index", [0, 1])
def test_round_trip(superblock, copy_index):
    page = superblock.encode(copy_index)
    assert len(page) == SUPERBLOCK_BYTES
    assert Superblock.decode(page, copy_index) == superblock
    assert superblock.capacity_bytes == CAPACITY
    with pytest.raises(FormatError, match="copy_index"):
        Superblock.decode(page, 1 - copy_index)


def test_every_flipped_bit_is_refused():
    page = bytearray(BOUND.encode(0))
    for bit in range(len(page) * 8):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            Superblock.decode(page, 0)
        page[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("length", [0, 1, 11, 12, 4080, 4095, 4097])
def test_other_lengths_are_refused(length):
    page = (BOUND.encode(0) + bytes(1))[:length]
    with pytest.raises(FormatError):
        Superblock.decode(page, 0)


def resealed(page: bytes, offset: int, octets: bytes) -> bytes:
    body = bytearray(page[: SUPERBLOCK.seal_offset])
    body[offset : offset + len(octets)] = octets
    return bytes(body) + SUPERBLOCK.seal(body)


@pytest.mark.parametrize("superblock", [BLANK, BOUND])
@pytest.mark.parametrize(("offset", "size", "name"), SUPERBLOCK.rows[:-1])
def test_sealed_mutations_give_a_superblock_or_a_format_error(superblock, offset, size, name):
    page = superblock.encode(0)
    top = bytes(size - 1) + b"\x80"
    for octets in (bytes(size), b"\xff" * size, b"\x01" + bytes(size - 1), top):
        edited = resealed(page, offset, octets)
        with suppress(FormatError):
            assert Superblock.decode(edited, 0).encode(0) == edited, name


@pytest.mark.parametrize("offset", [232, 1023, 3072, 4079])
def test_reserved_bytes_must_be_zero(offset):
    with pytest.raises(FormatError, match="reserved"):
        Superblock.decode(resealed(BOUND.encode(0), offset, b"\x01"), 0)


@pytest.mark.parametrize("offset", range(96, 124, 4))
def test_a_half_blank_store_is_no_store(offset):
    with pytest.raises(FormatError):
        Superblock.decode(resealed(BLANK.encode(0), offset, b"\x01"), 0)
    with pytest.raises(FormatError):
        Superblock.decode(resealed(BOUND.encode(0), 224, bytes(4)), 0)


def test_versions_and_features():
    page = BOUND.encode(0)
    for offset, octets in ((12, b"\x02"), (40, b"\x01"), (47, b"\x80")):
        newer = resealed(page, offset, octets)
        with pytest.raises(UnsupportedVersion, match="unsupported-version"):
            Superblock.decode(newer, 0)
        # A newer version may use what is reserved here: it is named, not called damaged.
        with pytest.raises(UnsupportedVersion):
            Superblock.decode(resealed(newer, 300, b"\x01"), 0)
    read_only = Superblock.decode(resealed(page, 32, b"\x01"), 0)
    assert not read_only.writable
    compatible = Superblock.decode(resealed(page, 24, b"\x01"), 0)
    assert compatible.writable
    assert Superblock.decode(compatible.encode(1), 1) == compatible


def slots(first: Superblock | bytes, second: Superblock | bytes) -> tuple[Slot, Slot]:
    pages = [
        one if isinstance(one, bytes) else one.encode(index)
        for index, one in enumerate((first, second))
    ]
    return Slot.read(pages[0], 0), Slot.read(pages[1], 1)


def test_the_higher_sequence_counts_and_the_other_is_overwritten():
    new, old = replace(BOUND, sequence=9), replace(BOUND, sequence=8)
    assert choose(slots(new, old)).sequence == choose(slots(old, new)).sequence == 9
    assert older(slots(new, old)).copy_index == 1
    assert older(slots(old, new)).copy_index == 0


def test_of_two_equal_slots_one_counts_and_the_other_is_overwritten():
    pair = slots(BOUND, BOUND)
    assert choose(pair) is pair[0].superblock
    assert older(pair).copy_index == 1


def test_one_bad_slot_is_tolerated_and_written_first():
    for pair, bad in ((slots(BOUND, bytes(4096)), 1), (slots(b"", BOUND), 0)):
        assert choose(pair) == BOUND
        assert older(pair).copy_index == bad
        assert pair[bad].problem is not None


def test_two_bad_slots_are_no_store():
    with pytest.raises(NotAStore, match="not-a-store"):
        choose(slots(bytes(4096), b"short"))


def test_a_newer_slot_refuses_the_store_even_beside_a_good_one():
    newer = resealed(BOUND.encode(1), 12, b"\x02")
    with pytest.raises(UnsupportedVersion):
        choose(slots(BOUND, newer))


def test_the_geometry_digest_follows_the_geometry_only():
    assert replace(BOUND, epoch=9, rank=1).geometry_digest() == BOUND.geometry_digest()
    other = replace(BOUND.geometry, checksum_page_blocks=8)
    assert replace(BOUND, geometry=other).geometry_digest() != BOUND.geometry_digest()
