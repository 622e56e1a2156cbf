"""Owns the bytes of a snapshot file: the five tables of a cleanly closed store.

It builds and reads bytes and proves what it read; it never touches a file.
"""

from __future__ import annotations

from collections.abc import Iterator

from rangekv.format.checksum import Octets, xxh3_128_le
from rangekv.format.envelope import (
    ENTRY_BYTES,
    HEADER_BYTES,
    MUST_UNDERSTAND,
    SECTION,
    Envelope,
    Section,
    SectionKind,
    SnapshotHeader,
    encode_head,
    section_start,
)
from rangekv.format.errors import BadChecksum, OutOfBounds
from rangekv.format.geometry import Geometry
from rangekv.format.records import (
    ROOT_BYTES,
    decode_extents,
    decode_records,
    encode_extents,
    encode_records,
)
from rangekv.format.tables import Tables, check_tables

__all__ = ["Tables", "decode", "encode"]


def decode(snapshot: Octets, header: SnapshotHeader, geometry: Geometry | None) -> Tables:
    """Return the tables of a whole snapshot file, proved against `geometry`.

    `tokens` and `checksums` are views into `snapshot`, which must not change any more.
    Raises FormatError `bad-snapshot`.
    """
    view = memoryview(snapshot)
    if len(view) != header.snapshot_bytes:
        raise OutOfBounds(
            "bad-snapshot", f"{len(view)} bytes were read, expected {header.snapshot_bytes}"
        )
    bodies: dict[int, memoryview] = {}
    end = HEADER_BYTES + len(header.sections) * SECTION.size
    for section in header.sections:
        if any(view[end : section.offset]):
            raise OutOfBounds("bad-snapshot", "padding between sections is not zero", offset=end)
        end = section.offset + section.length
        body = view[section.offset : end]
        if xxh3_128_le(body) != section.digest:
            raise BadChecksum(
                "bad-snapshot",
                f"section kind {section.kind} does not match its checksum",
                offset=section.offset,
            )
        bodies[section.kind] = body
    roots = bytes(bodies[SectionKind.ROOTS])
    tables = Tables(
        extents=decode_extents(bodies[SectionKind.EXTENTS]),
        records=decode_records(bodies[SectionKind.RECORDS]),
        tokens=bodies[SectionKind.TOKENS],
        checksums=bodies[SectionKind.CHECKSUMS],
        roots=[roots[start : start + ROOT_BYTES] for start in range(0, len(roots), ROOT_BYTES)],
        generation_max=header.generation_max,
    )
    check_tables(tables, geometry)
    return tables


def encode(tables: Tables, envelope: Envelope) -> Iterator[Octets]:
    """Yield the pieces of a snapshot file in order; tokens and checksums are not copied."""
    bodies: dict[SectionKind, Octets] = {
        SectionKind.RECORDS: encode_records(tables.records),
        SectionKind.TOKENS: memoryview(tables.tokens).cast("B"),
        SectionKind.CHECKSUMS: memoryview(tables.checksums).cast("B"),
        SectionKind.EXTENTS: encode_extents(tables.extents),
        SectionKind.ROOTS: b"".join(tables.roots),
    }
    sections = []
    end = HEADER_BYTES + len(bodies) * SECTION.size
    for kind, body in bodies.items():
        offset = section_start(end)
        end = offset + len(body)
        count = len(body) // ENTRY_BYTES[kind]
        sections.append(Section(kind, MUST_UNDERSTAND, offset, len(body), count, xxh3_128_le(body)))
    head = encode_head(
        envelope,
        sections,
        generation_max=tables.generation_max,
        record_count=len(tables.records),
        token_count=tables.token_count,
    )
    yield head
    end = len(head)
    for section, body in zip(sections, bodies.values(), strict=True):
        yield bytes(section.offset - end)
        yield body
        end = section.offset + section.length
