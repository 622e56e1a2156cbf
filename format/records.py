"""Owns the two tables of a store: extents (space with a content version) and records (tokens).

A row here is exactly a row on disk; whether rows agree with each other is for tables.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from rangekv.format.checksum import Octets
from rangekv.format.layout import Layout

NO_PARENT = 2**32 - 1
NO_CHECKSUM = 2**64 - 1
ROOT_BYTES = 32
NO_SALT = bytes(ROOT_BYTES)

EXTENT = Layout(
    "bad-snapshot",
    48,
    (
        (0, 8, "generation"),
        (8, 8, "offset"),
        (16, 8, "width"),
        (24, 4, "pack_index"),
        (28, 4, "append_mark_tokens"),
        (32, 8, "reserved"),
        (40, 8, "xxh3_64"),
    ),
)

RECORD = Layout(
    "bad-snapshot",
    96,
    (
        (0, 8, "record_id"),
        (8, 8, "token_index"),
        (16, 8, "checksum_index"),
        (24, 8, "access_rank"),
        (32, 4, "extent"),
        (36, 4, "extent_token_start"),
        (40, 4, "token_start"),
        (44, 4, "token_count"),
        (48, 4, "parent"),
        (52, 4, "parent_tokens"),
        (56, 4, "root"),
        (60, 4, "flags"),
        (64, 24, "reserved"),
        (88, 8, "xxh3_64"),
    ),
)


class Extent(NamedTuple):
    """layer_count x width contiguous bytes of one pack, holding one content version."""

    generation: int
    offset: int
    """Absolute file offset."""
    width: int
    """Stripe bytes of one layer."""
    pack_index: int
    append_mark_tokens: int
    """Tokens from the stripe's start that were ever handed out; it only rises."""


class Record(NamedTuple):
    """One published token range. All token figures are whole blocks."""

    record_id: int
    token_index: int
    """First own token in the TOKENS section, counted in tokens."""
    checksum_index: int
    """First checksum in CHECKSUMS (layer-major pages), or NO_CHECKSUM."""
    access_rank: int
    """Order of last use; larger is more recent."""
    extent: int
    """Row of the extent table."""
    extent_token_start: int
    token_start: int
    """Position of the first own token in the whole prompt."""
    token_count: int
    parent: int
    """Row of the record before it, always an earlier row, or NO_PARENT."""
    parent_tokens: int
    """Tokens of the parent's own range that precede this record."""
    root: int
    """Row of ROOTS: whose tree it belongs to."""
    flags: int = 0


def encode_extents(extents: Iterable[Extent]) -> bytearray:
    """Return the EXTENTS section."""
    return EXTENT.pack_rows(extents)


def decode_extents(section: Octets) -> list[Extent]:
    """Raises FormatError `bad-snapshot` for a damaged row."""
    return list(map(Extent._make, EXTENT.unpack_rows(section)))


def encode_records(records: Iterable[Record]) -> bytearray:
    """Return the RECORDS section."""
    return RECORD.pack_rows(records)


def decode_records(section: Octets) -> list[Record]:
    """Raises FormatError `bad-snapshot` for a damaged row."""
    return list(map(Record._make, RECORD.unpack_rows(section)))
