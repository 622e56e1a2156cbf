"""Owns the look at one store's metadata field by field, however damaged it is.

It reads under the lock of a `Reading`, in bounded memory, and never decides what an open would do.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

from rangekv.engine.files import Files
from rangekv.engine.folder import JOURNAL, SNAPSHOT, read_all
from rangekv.engine.inspection import Reading, StoreReport
from rangekv.format.checksum import xxh3_128_of
from rangekv.format.dissect import Structure
from rangekv.format.envelope import ENTRY_BYTES, HEAD_BYTES_MAX, SectionKind
from rangekv.format.errors import FormatError
from rangekv.format.geometry import Geometry
from rangekv.format.journal import JOURNAL_BYTES_MAX
from rangekv.format.journal_fields import JournalLook, journal_fields
from rangekv.format.records import ROOT_BYTES, Extent, Record
from rangekv.format.row_fields import (
    Rows,
    extent_fields,
    extent_rows,
    record_fields,
    record_rows,
)
from rangekv.format.snapshot_fields import head_fields
from rangekv.format.superblock import Superblock
from rangekv.format.superblock_fields import superblock_fields

PIECE_BYTES = 8 * 1024 * 1024
# Read of a section whose store has lost its geometry, and so its limits.
UNKNOWN_SECTION_BYTES_MAX = 8 * 1024 * 1024


def dissect_slots(report: StoreReport) -> list[Structure]:
    """Return both superblocks field by field, A first."""
    likely = likely_superblock(report)
    return [
        superblock_fields(
            slot.page,
            slot.copy_index,
            report.identity,
            other.superblock or (likely if slot.superblock is None else None),
        )
        for slot, other in (report.slots, report.slots[::-1])
    ]


def likely_superblock(report: StoreReport) -> Superblock | None:
    """Return the superblock that counts, or one that counted before one of its bytes changed.

    To look by, and for nothing else: an open refuses it.
    """
    if report.superblock is not None:
        return report.superblock
    for slot in report.slots:
        found = superblock_fields(slot.page, slot.copy_index, report.identity, None)
        with suppress(FormatError):
            return Superblock.decode(found.right, slot.copy_index)
    return None


def dissect_journal(reading: Reading) -> JournalLook | None:
    """Return the journal field by field; None where there is none to read.

    Raises OSError when it cannot be read at all.
    """
    files = reading.folder.files
    try:
        fd = files.open_file(reading.folder.fd, JOURNAL)
    except FileNotFoundError:
        return None
    try:
        status = files.statx(fd)
        if not stat.S_ISREG(status.mode):
            return None
        data = read_all(files, fd, min(status.size, JOURNAL_BYTES_MAX))
    finally:
        files.close(fd)
    header = reading.report.header
    return journal_fields(
        data, likely_superblock(reading.report), None if header is None else header.envelope.epoch
    )


@dataclass(frozen=True)
class SnapshotLook:
    """A snapshot file, held open; what it says may be wrong, and is marked where it is."""

    files: Files
    fd: int
    geometry: Geometry | None
    header: Structure
    sections: list[Structure]

    def extents(self) -> Iterator[Structure]:
        """Yield the rows of the extent table."""
        section, offset = self._section(SectionKind.EXTENTS)
        return extent_fields(
            section, offset, self.extent_table, self.geometry, self.header.integer("generation_max")
        )

    def records(self) -> Iterator[Structure]:
        """Yield the rows of the record table."""
        section, offset = self._section(SectionKind.RECORDS)
        return record_fields(
            section,
            offset,
            self.record_table,
            self.extent_table.rows,
            self.geometry,
            len(self.roots),
        )

    @cached_property
    def extent_table(self) -> Rows[Extent]:
        return extent_rows(*self._section(SectionKind.EXTENTS))

    @cached_property
    def record_table(self) -> Rows[Record]:
        return record_rows(*self._section(SectionKind.RECORDS))

    @cached_property
    def roots(self) -> list[bytes]:
        """The digests of all tenants."""
        section = bytes(self._section(SectionKind.ROOTS)[0])
        return [section[at : at + ROOT_BYTES] for at in range(0, len(section), ROOT_BYTES)]

    def tokens(self) -> memoryview:
        """Return the token ids of all records: what users wrote."""
        section = self._section(SectionKind.TOKENS)[0]
        return section[: len(section) // 4 * 4].cast("I")

    def _section(self, kind: SectionKind) -> tuple[memoryview, int]:
        """Return (bytes, offset) of a section as far as it is there and may be that long."""
        for row in self.sections:
            if row.values["kind"] == kind:
                offset = row.integer("offset")
                return _read(self.files, self.fd, offset, self._bounded(row, kind)), offset
        return memoryview(b""), 0

    def _bounded(self, row: Structure, kind: SectionKind) -> int:
        """Return how much of a section is believed: what its count allows, or a little."""
        allowed = row.integer("count") * ENTRY_BYTES[kind]
        if self.geometry is None or "count" in row.faults:
            allowed = UNKNOWN_SECTION_BYTES_MAX
        return min(row.integer("length"), allowed)


@contextmanager
def dissecting(reading: Reading) -> Iterator[SnapshotLook | None]:
    """Hold the snapshot file open and look at its head; None where there is none to read.

    Raises OSError when it cannot be read at all.
    """
    report, folder = reading.report, reading.folder
    files = folder.files
    try:
        fd = files.open_file(folder.fd, SNAPSHOT)
    except FileNotFoundError:
        yield None
        return
    try:
        status = files.statx(fd)
        if not stat.S_ISREG(status.mode):
            yield None
            return

        def digest(offset: int, length: int) -> bytes:
            return _digest(files, fd, offset, length)

        superblock = likely_superblock(report)
        header, sections = head_fields(
            read_all(files, fd, min(status.size, HEAD_BYTES_MAX)),
            status.size,
            digest,
            superblock=superblock,
            file=report.identity,
            mtime_ns=report.mtime_ns,
        )
        geometry = None if superblock is None else superblock.geometry
        yield SnapshotLook(files, fd, geometry, header, sections)
    finally:
        files.close(fd)


def _digest(files: Files, fd: int, offset: int, length: int) -> bytes:
    end = offset + length
    return xxh3_128_of(
        _read(files, fd, start, min(PIECE_BYTES, end - start))
        for start in range(offset, end, PIECE_BYTES)
    )


def _read(files: Files, fd: int, offset: int, length: int) -> memoryview:
    """Return the bytes of a range, fewer where the file ends before."""
    length = max(0, min(length, files.statx(fd).size - offset))
    buffer = memoryview(bytearray(length))
    end = 0
    while end < length:
        count = files.preadv(fd, [buffer[end:]], offset + end)
        if count == 0:
            break
        end += count
    return buffer[:end]
