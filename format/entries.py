"""Owns what a commit can say: records published, extents and records retired, all forgotten.

It builds and reads bytes and checks that they hold together; what they change is for replay.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from rangekv.format.checksum import Octets
from rangekv.format.errors import FormatError, OutOfBounds
from rangekv.format.layout import COUNTER_MAX, Layout
from rangekv.format.records import EXTENT, ROOT_BYTES, Extent, decode_extents, encode_extents
from rangekv.format.tables import TableLimits

NO_PARENT_ID = 2**64 - 1
HAS_CHECKSUMS = 1

ENTRY = Layout(
    "bad-journal",
    16,
    (
        (0, 4, "kind"),
        (4, 4, "flags"),
        (8, 8, "entry_bytes"),
    ),
)

PUBLISH = Layout(
    "bad-journal",
    32,
    (
        (0, 4, "root_count"),
        (4, 4, "extent_count"),
        (8, 4, "record_count"),
        (12, 4, "reserved"),
        (16, 8, "checksum_count"),
        (24, 8, "token_count"),
    ),
)

PUBLISHED = Layout(
    "bad-journal",
    64,
    (
        (0, 8, "record_id"),
        (8, 8, "parent_id"),
        (16, 8, "generation"),
        (24, 8, "access_rank"),
        (32, 4, "extent_token_start"),
        (36, 4, "token_start"),
        (40, 4, "token_count"),
        (44, 4, "parent_tokens"),
        (48, 4, "root"),
        (52, 4, "flags"),
        (56, 8, "reserved"),
    ),
)


class EntryKind(IntEnum):
    """What an entry does to the state before it."""

    PUBLISH = 1
    RETIRE = 2
    RETIRE_RECORD = 3
    RESET = 4


class Published(NamedTuple):
    """One record as it becomes visible. All token figures are whole blocks."""

    record_id: int
    parent_id: int
    """`record_id` of the record before it, or NO_PARENT_ID."""
    generation: int
    """Of the extent that holds it."""
    access_rank: int
    extent_token_start: int
    token_start: int
    token_count: int
    parent_tokens: int
    root: int
    """Place in the entry's own list of roots."""
    flags: int


@dataclass(slots=True)
class Publish:
    """Records that became visible, parents first, with the extents that hold them as they are now.

    Tokens and checksums lie one after another in the order of the records; buffers may be views.
    """

    extents: Sequence[Extent]
    records: Sequence[Published]
    roots: Sequence[bytes]
    tokens: Octets
    checksums: Octets


@dataclass(slots=True)
class Retire:
    """Extents whose content is over: their records and all that continue them are gone."""

    generations: list[int] = field(default_factory=list)


@dataclass(slots=True)
class RetireRecord:
    """Records that must never be served again, with all that continue them."""

    record_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Reset:
    """Everything before it is gone."""


Entry: TypeAlias = Publish | Retire | RetireRecord | Reset


def encode(entry: Entry) -> bytes:
    """Return one entry, padded to 8 bytes."""
    kind, body = _body(entry)
    size = ENTRY.size + len(body)
    padding = -size % 8
    head = ENTRY.pack({"kind": kind, "flags": 0, "entry_bytes": size + padding}, {})
    return head + body + bytes(padding)


def _body(entry: Entry) -> tuple[EntryKind, bytes]:
    if isinstance(entry, Publish):
        return EntryKind.PUBLISH, _publish_body(entry)
    if isinstance(entry, Retire):
        return EntryKind.RETIRE, _packed(entry.generations)
    if isinstance(entry, RetireRecord):
        return EntryKind.RETIRE_RECORD, _packed(entry.record_ids)
    return EntryKind.RESET, b""


def _publish_body(entry: Publish) -> bytes:
    checksums = memoryview(entry.checksums).cast("B")
    tokens = memoryview(entry.tokens).cast("B")
    head = PUBLISH.pack(
        {
            "root_count": len(entry.roots),
            "extent_count": len(entry.extents),
            "record_count": len(entry.records),
            "checksum_count": len(checksums) // 8,
            "token_count": len(tokens) // 4,
        },
        {},
    )
    rows = b"".join(PUBLISHED.struct.pack(*record, 0) for record in entry.records)
    return b"".join([head, *entry.roots, encode_extents(entry.extents), rows, checksums, tokens])


def decode(body: Octets, entry_count: int, limits: TableLimits) -> Iterator[Entry]:
    """Yield the entries of a frame's body; raises FormatError `bad-journal`.

    Tokens and checksums are views into `body`. Counts are bounded by `limits` and by the bytes.
    """
    view, end = memoryview(body), 0
    for _ in range(entry_count):
        if len(view) - end < ENTRY.size:
            raise _refuse(f"{entry_count} entries do not fit the frame")
        fields, _ = ENTRY.unpack(view[end : end + ENTRY.size])
        kind, size = fields["kind"], fields["entry_bytes"]
        if fields["flags"] or size % 8 or not ENTRY.size <= size <= len(view) - end:
            raise _refuse(f"an entry of kind {kind} has {size} bytes and flags {fields['flags']}")
        yield _decode_one(kind, view[end + ENTRY.size : end + size], limits)
        end += size
    if any(view[end:]) or len(view) - end >= 64:
        raise _refuse("bytes behind the last entry of a frame are not padding")


def _decode_one(kind: int, body: memoryview, limits: TableLimits) -> Entry:
    if kind == EntryKind.PUBLISH:
        return _decode_publish(body, limits)
    if kind == EntryKind.RETIRE:
        return Retire(_counters(body))
    if kind == EntryKind.RETIRE_RECORD:
        return RetireRecord(_counters(body))
    if kind == EntryKind.RESET and not body:
        return Reset()
    raise _refuse(f"an entry has kind {kind} and {len(body)} bytes")


def _packed(counters: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(counters)}Q", *counters)


def _counters(body: memoryview) -> list[int]:
    return list(struct.unpack(f"<{len(body) // 8}Q", body))


def _decode_publish(body: memoryview, limits: TableLimits) -> Publish:
    if len(body) < PUBLISH.size:
        raise _refuse("an entry ends inside its head")
    head, _ = PUBLISH.unpack(body[: PUBLISH.size])
    PUBLISH.require_zero_reserved(body[: PUBLISH.size])
    for name, most in (
        ("root_count", limits.roots_max),
        ("extent_count", limits.extents_max),
        ("record_count", limits.records_max),
        ("checksum_count", limits.checksums_max),
        ("token_count", limits.tokens_max),
    ):
        if head[name] > most:
            raise _refuse(f"{name} is {head[name]}, this store allows {most}")
    at = PUBLISH.size
    parts: list[memoryview] = []
    for size in (
        ROOT_BYTES * head["root_count"],
        EXTENT.size * head["extent_count"],
        PUBLISHED.size * head["record_count"],
        8 * head["checksum_count"],
        4 * head["token_count"],
    ):
        parts.append(body[at : at + size])
        at += size
    if not 0 <= len(body) - at < 8 or any(body[at:]):
        raise _refuse(f"an entry has {len(body)} bytes, its counts need {at}")
    roots, table, records, checksums, tokens = parts
    try:
        extents = decode_extents(table)
    except FormatError as error:
        raise _refuse(f"an extent of an entry is damaged: {error.message}") from error
    return Publish(
        extents=extents,
        records=list(_records(records)),
        roots=[bytes(roots[first : first + ROOT_BYTES]) for first in range(0, len(roots), 32)],
        tokens=tokens,
        checksums=checksums,
    )


def _records(table: memoryview) -> Iterator[Published]:
    for values in PUBLISHED.struct.iter_unpack(table):
        record = Published._make(values[:-1])
        if values[-1] or record.flags not in (0, HAS_CHECKSUMS):
            raise _refuse(f"record {record.record_id} has unknown flags or reserved bytes")
        if max(record.record_id, record.generation, record.access_rank) > COUNTER_MAX:
            raise _refuse("a record has a counter outside its limit")
        yield record


def _refuse(message: str) -> OutOfBounds:
    return OutOfBounds("bad-journal", message)
