"""Owns the head of a snapshot file: what ties it to one store, and where its sections lie.

Whether a snapshot is still current is decided by who compares its envelope with the superblock
and the pack file; what the sections hold is for snapshot.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

from rangekv.format.checksum import Octets
from rangekv.format.errors import FormatError, OutOfBounds, UnsupportedVersion
from rangekv.format.identity import FileIdentity
from rangekv.format.layout import COUNTER_MAX, Layout
from rangekv.format.records import EXTENT, RECORD, ROOT_BYTES
from rangekv.format.tables import TableLimits

HEADER_BYTES = 256
SECTION_ALIGN = 64
SECTION_COUNT_MAX = 8
UNKNOWN_SECTION_BYTES_MAX = 1024 * 1024
MUST_UNDERSTAND = 1
VERSION_MAJOR = 1
VERSION_MINOR = 0

HEADER = Layout(
    "bad-snapshot",
    HEADER_BYTES,
    (
        (0, 12, "magic"),
        (12, 2, "version_major"),
        (14, 2, "version_minor"),
        (16, 4, "header_bytes"),
        (20, 4, "section_count"),
        (24, 8, "snapshot_bytes"),
        (32, 16, "store_uuid"),
        (48, 8, "epoch"),
        (56, 8, "generation_max"),
        (64, 8, "pack_mtime_sec"),
        (72, 4, "pack_mtime_nsec"),
        (76, 4, "identity_flags"),
        (80, 8, "inode"),
        (88, 8, "btime_sec"),
        (96, 4, "btime_nsec"),
        (100, 4, "inode_generation"),
        (104, 8, "file_bytes"),
        (112, 16, "geometry_xxh3_128"),
        (128, 8, "published_unix_ns"),
        (136, 8, "record_count"),
        (144, 8, "token_count"),
        (152, 88, "reserved"),
        (240, 16, "xxh3_128"),
    ),
    magic=b"\x89RANGESN\r\n\x1a\n",
)

SECTION = Layout(
    "bad-snapshot",
    48,
    (
        (0, 4, "kind"),
        (4, 4, "flags"),
        (8, 8, "offset"),
        (16, 8, "length"),
        (24, 8, "count"),
        (32, 16, "section_xxh3_128"),
    ),
)

HEAD_BYTES_MAX = HEADER_BYTES + SECTION_COUNT_MAX * SECTION.size
IDENTITY_FIELDS = tuple(field.name for field in fields(FileIdentity))


class SectionKind(IntEnum):
    """The five sections, in the order in which they lie in the file."""

    RECORDS = 1
    TOKENS = 2
    CHECKSUMS = 3
    EXTENTS = 4
    ROOTS = 5


ENTRY_BYTES = {
    SectionKind.RECORDS: RECORD.size,
    SectionKind.TOKENS: 4,
    SectionKind.CHECKSUMS: 8,
    SectionKind.EXTENTS: EXTENT.size,
    SectionKind.ROOTS: ROOT_BYTES,
}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What ties a snapshot to one store, one session and one state of the pack file."""

    store_uuid: bytes
    epoch: int
    identity: FileIdentity
    pack_mtime_ns: int
    geometry_digest: bytes
    published_unix_ns: int = 0


@dataclass(frozen=True, slots=True)
class Section:
    """One row of the section table."""

    kind: int
    flags: int
    offset: int
    length: int
    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class SnapshotHeader:
    """A header and section table that passed their checksum and all limits."""

    envelope: Envelope
    snapshot_bytes: int
    generation_max: int
    record_count: int
    token_count: int
    sections: tuple[Section, ...]

    @classmethod
    def decode(cls, head: Octets, file_bytes: int, limits: TableLimits) -> SnapshotHeader:
        """Read the first HEAD_BYTES_MAX bytes (or all) of a snapshot file of `file_bytes`.

        Nothing is allocated for a section before its size is known to be possible. Raises
        FormatError with the reason code: bad-snapshot, snapshot-limits, unknown-section,
        unsupported-version.
        """
        view = memoryview(head)
        if len(view) < HEADER_BYTES:
            raise _refuse(f"the file ends after {len(view)} bytes, inside its header")
        _, _, _, header_bytes, section_count, *_ = HEADER.struct.unpack(view[:HEADER_BYTES])
        table_end = HEADER_BYTES + min(section_count, SECTION_COUNT_MAX) * SECTION.size
        table = view[HEADER_BYTES:table_end]
        integers, octets = HEADER.unpack(view[:HEADER_BYTES], trailer=table)
        if integers["version_major"] != VERSION_MAJOR:
            raise UnsupportedVersion(
                "unsupported-version",
                f"snapshot version {integers['version_major']}, expected {VERSION_MAJOR}",
            )
        HEADER.require_zero_reserved(view[:HEADER_BYTES])
        if section_count > SECTION_COUNT_MAX or header_bytes != HEADER_BYTES:
            raise _refuse(f"{section_count} sections behind a header of {header_bytes} bytes")
        if integers["snapshot_bytes"] != file_bytes or len(view) < table_end:
            raise _refuse(
                f"the file is {file_bytes} bytes long, its header says {integers['snapshot_bytes']}"
            )
        if integers["pack_mtime_nsec"] >= 1_000_000_000 or integers["epoch"] > COUNTER_MAX:
            raise _refuse("time or epoch is outside its limit")
        sections = _decode_sections(table, file_bytes, limits)
        counts = {section.kind: section.count for section in sections}
        if (integers["record_count"], integers["token_count"]) != (
            counts[SectionKind.RECORDS],
            counts[SectionKind.TOKENS],
        ):
            raise _refuse("record_count or token_count differs from its section")
        envelope = Envelope(
            store_uuid=octets["store_uuid"],
            epoch=integers["epoch"],
            identity=FileIdentity(**{name: integers[name] for name in IDENTITY_FIELDS}),
            pack_mtime_ns=integers["pack_mtime_sec"] * 1_000_000_000 + integers["pack_mtime_nsec"],
            geometry_digest=octets["geometry_xxh3_128"],
            published_unix_ns=integers["published_unix_ns"],
        )
        return cls(
            envelope,
            snapshot_bytes=file_bytes,
            generation_max=integers["generation_max"],
            record_count=integers["record_count"],
            token_count=integers["token_count"],
            sections=sections,
        )


def _decode_sections(
    table: memoryview, file_bytes: int, limits: TableLimits
) -> tuple[Section, ...]:
    maxima = {
        SectionKind.RECORDS: limits.records_max,
        SectionKind.TOKENS: limits.tokens_max,
        SectionKind.CHECKSUMS: limits.checksums_max,
        SectionKind.EXTENTS: limits.extents_max,
        SectionKind.ROOTS: limits.roots_max,
    }
    sections = tuple(Section(*values) for values in SECTION.struct.iter_unpack(table))
    end = HEADER_BYTES + len(table)
    kind_before = 0
    for section in sections:
        if section.offset != section_start(end):
            raise _refuse(f"section kind {section.kind} starts at {section.offset}", end)
        end = section.offset + section.length
        if section.kind <= kind_before:
            raise _refuse(f"section kind {section.kind} follows kind {kind_before}")
        kind_before = section.kind
        if section.kind not in maxima:
            _check_unknown(section)
            continue
        kind = SectionKind(section.kind)
        if section.flags != MUST_UNDERSTAND:
            raise _refuse(f"{kind.name} has flags {section.flags}")
        if section.length != section.count * ENTRY_BYTES[kind]:
            raise _refuse(f"{kind.name} is {section.length} bytes for {section.count} entries")
        if section.count > maxima[kind]:
            raise OutOfBounds(
                "snapshot-limits",
                f"{kind.name} has {section.count} entries, this store allows {maxima[kind]}",
            )
    if [section.kind for section in sections[: len(SectionKind)]] != list(SectionKind):
        raise _refuse("a section is missing")
    if end != file_bytes:
        raise _refuse(f"the last section ends at {end} of {file_bytes} bytes")
    return sections


def _check_unknown(section: Section) -> None:
    """Let a section of a later version pass if it may be skipped and is small."""
    if section.flags & MUST_UNDERSTAND:
        raise FormatError(
            "unknown-section", f"section kind {section.kind} must be understood and is not"
        )
    if section.flags:
        raise _refuse(f"section kind {section.kind} has flags {section.flags}")
    if section.length > UNKNOWN_SECTION_BYTES_MAX:
        raise OutOfBounds(
            "snapshot-limits",
            f"section kind {section.kind} is {section.length} bytes long, at most "
            f"{UNKNOWN_SECTION_BYTES_MAX} are read of what is not known",
        )


def encode_head(
    envelope: Envelope,
    sections: Sequence[Section],
    *,
    generation_max: int,
    record_count: int,
    token_count: int,
) -> bytes:
    """Return header and section table; the file ends where the last section does."""
    table = b"".join(
        SECTION.pack(
            {
                "kind": section.kind,
                "flags": section.flags,
                "offset": section.offset,
                "length": section.length,
                "count": section.count,
            },
            {"section_xxh3_128": section.digest},
        )
        for section in sections
    )
    mtime_sec, mtime_nsec = divmod(envelope.pack_mtime_ns, 1_000_000_000)
    integers = {name: getattr(envelope.identity, name) for name in IDENTITY_FIELDS}
    integers.update(
        version_major=VERSION_MAJOR,
        version_minor=VERSION_MINOR,
        header_bytes=HEADER_BYTES,
        section_count=len(sections),
        snapshot_bytes=sections[-1].offset + sections[-1].length,
        epoch=envelope.epoch,
        generation_max=generation_max,
        pack_mtime_sec=mtime_sec,
        pack_mtime_nsec=mtime_nsec,
        published_unix_ns=envelope.published_unix_ns,
        record_count=record_count,
        token_count=token_count,
    )
    octets = {
        "store_uuid": envelope.store_uuid,
        "geometry_xxh3_128": envelope.geometry_digest,
    }
    return HEADER.pack(integers, octets, trailer=table) + table


def section_start(end: int) -> int:
    """Return where the next section starts when the one before ends at `end`."""
    return -(-end // SECTION_ALIGN) * SECTION_ALIGN


def _refuse(message: str, offset: int | None = None) -> OutOfBounds:
    return OutOfBounds("bad-snapshot", message, offset=offset)
