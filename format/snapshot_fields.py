"""Owns what each field of a snapshot's head ought to say, for a file that may be damaged.

It explains and never decides: what is accepted is for envelope.py.
"""

from __future__ import annotations

from typing import Protocol

from rangekv.format.checksum import Octets
from rangekv.format.dissect import Structure, shown
from rangekv.format.envelope import (
    ENTRY_BYTES,
    HEADER,
    HEADER_BYTES,
    MUST_UNDERSTAND,
    SECTION,
    SECTION_COUNT_MAX,
    VERSION_MAJOR,
    SectionKind,
    section_start,
)
from rangekv.format.identity import FileIdentity
from rangekv.format.layout import COUNTER_MAX
from rangekv.format.superblock import Superblock
from rangekv.format.superblock_fields import identity_fields
from rangekv.format.tables import TableLimits


class Digest(Protocol):
    """Hashes `length` bytes of the snapshot file from `offset`, as they are."""

    def __call__(self, offset: int, length: int) -> bytes: ...


def head_fields(
    head: Octets,
    snapshot_bytes: int,
    digest: Digest,
    *,
    superblock: Superblock | None,
    file: FileIdentity,
    mtime_ns: int,
) -> tuple[Structure, list[Structure]]:
    """Return the header and the rows of the section table of a snapshot file of `snapshot_bytes`.

    `file` and `mtime_ns` are the pack file as it is now; `superblock` is the one that counts.
    """
    header, table = _header(memoryview(head))
    header.expect("version_major", VERSION_MAJOR)
    header.expect("header_bytes", HEADER_BYTES)
    at_least = len(SectionKind)
    header.require(
        "section_count",
        at_least <= header.integer("section_count") <= SECTION_COUNT_MAX,
        f"{at_least} to {SECTION_COUNT_MAX}",
    )
    header.expect("snapshot_bytes", snapshot_bytes, "this file")
    if superblock is not None:
        header.expect("store_uuid", superblock.store_uuid, "the superblock")
        header.expect("epoch", superblock.epoch, "the superblock")
        header.expect("geometry_xxh3_128", superblock.geometry_digest(), "the superblock")
    header.require(
        "generation_max", header.integer("generation_max") <= COUNTER_MAX, f"at most {COUNTER_MAX}"
    )
    mtime_sec, mtime_nsec = divmod(mtime_ns, 1_000_000_000)
    header.expect("pack_mtime_sec", mtime_sec, "this pack file")
    header.expect("pack_mtime_nsec", mtime_nsec, "this pack file")
    identity_fields(header, file)
    limits = TableLimits.of(superblock.geometry) if superblock is not None else None
    sections = _section_fields(table, snapshot_bytes, digest, limits, header.trailer_fault)
    counts = {row.values["kind"]: row.values["count"] for row in sections}
    for name, kind in (("record_count", SectionKind.RECORDS), ("token_count", SectionKind.TOKENS)):
        if kind in counts:
            header.expect(name, counts[kind], f"the section {kind.name}")
    return header, sections


def _header(head: memoryview) -> tuple[Structure, memoryview]:
    """Return the header and its section table; a damaged count is not what ends the table."""
    found = min(int.from_bytes(head[20:24], "little"), SECTION_COUNT_MAX)
    for count in (found, len(SectionKind)):
        table = head[HEADER_BYTES : HEADER_BYTES + count * SECTION.size]
        header = Structure(HEADER, head[:HEADER_BYTES], 0, table)
        if not header.doubtful:
            break
    return header, table


def _section_fields(
    table: memoryview,
    snapshot_bytes: int,
    digest: Digest,
    limits: TableLimits | None,
    changed: tuple[int, int] | None,
) -> list[Structure]:
    sections: list[Structure] = []
    end = HEADER_BYTES + len(table)
    kinds = list(SectionKind)
    for ordinal in range(-(-len(table) // SECTION.size)):
        start = ordinal * SECTION.size
        row = Structure(SECTION, table[start : start + SECTION.size], HEADER_BYTES + start)
        sections.append(row)
        if changed is not None and 0 <= changed[0] - start < SECTION.size:
            row.fault_at(changed[0] - start, changed[1])
        get = row.integer
        if ordinal < len(kinds):
            row.expect("kind", kinds[ordinal].value, kinds[ordinal].name)
        row.expect("offset", section_start(end), "behind what comes before")
        kind = SectionKind(get("kind")) if get("kind") in kinds else None
        if kind is not None:
            row.expect("flags", MUST_UNDERSTAND)
            row.expect("length", get("count") * ENTRY_BYTES[kind], f"count x {ENTRY_BYTES[kind]}")
            most = None if limits is None else getattr(limits, f"{kind.name.lower()}_max")
            row.require("count", most is None or get("count") <= most, f"at most {most}")
        end = get("offset") + get("length")
        if end > snapshot_bytes:
            row.fault("length", f"at most {max(0, snapshot_bytes - get('offset'))}: the file ends")
        elif not row.faults.keys() & {"length", "count"}:
            # A length that its own row refuses is not read: it may be any.
            found = digest(get("offset"), get("length"))
            if found != row.octets("section_xxh3_128"):
                row.fault("section_xxh3_128", f"{shown(found)} (of the section as it is)")
        if ordinal == len(table) // SECTION.size - 1:
            row.require("length", end >= snapshot_bytes, f"to end at byte {snapshot_bytes}")
    return sections
