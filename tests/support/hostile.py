"""Bytes that no Range wrote but whose checksums all match: fields put in place, then sealed anew.

It knows where fields lie, from the codec's own tables, and nothing about what they mean.
"""

from __future__ import annotations

from collections.abc import Iterator

from rangekv.format.checksum import xxh3_128_le
from rangekv.format.entries import ENTRY, PUBLISH, PUBLISHED, EntryKind
from rangekv.format.envelope import HEADER, HEADER_BYTES, SECTION, SECTION_COUNT_MAX
from rangekv.format.journal import FRAME, JOURNAL
from rangekv.format.journal import HEADER_BYTES as JOURNAL_HEADER_BYTES
from rangekv.format.layout import INTEGER_CODES, SEAL_BYTES, Layout
from rangekv.format.marker import MARKER
from rangekv.format.records import EXTENT, RECORD, ROOT_BYTES
from rangekv.format.superblock import SUPERBLOCK

ROW_LAYOUTS = {1: RECORD, 4: EXTENT}


def put(data: bytes, layout: Layout, start: int, name: str, value: int | bytes) -> bytes:
    """Return `data` with one field of the structure at `start` set; checksums are left as is."""
    offset, size = next((at, length) for at, length, field in layout.rows if field == name)
    octets = value if isinstance(value, bytes) else (value % 256**size).to_bytes(size, "little")
    place = start + offset
    return data[:place] + octets + data[place + len(octets) :]


def fields(layout: Layout) -> list[tuple[int, int, str]]:
    """Return (offset, size, name) of the integers of a structure that are no checksum."""
    return [
        row
        for row in layout.rows
        if row[1] in INTEGER_CODES and row[2] not in ("magic", *SEAL_BYTES)
    ]


def sealed(data: bytes, layout: Layout) -> bytes:
    """Seal one whole structure: a superblock or a marker."""
    body = data[: layout.seal_offset]
    return body + layout.seal(body)


def sealed_superblock(page: bytes) -> bytes:
    return sealed(page, SUPERBLOCK)


def sealed_marker(data: bytes) -> bytes:
    return sealed(data, MARKER)


def sections(snapshot: bytes) -> list[tuple[int, int, int, int]]:
    """Return (table entry, kind, offset, length) of each section that the header announces."""
    count = min(int.from_bytes(snapshot[20:24], "little"), SECTION_COUNT_MAX)
    found = []
    for entry in range(HEADER_BYTES, HEADER_BYTES + count * SECTION.size, SECTION.size):
        if entry + SECTION.size > len(snapshot):
            break
        kind, _, offset, length, _, _ = SECTION.struct.unpack_from(snapshot, entry)
        found.append((entry, kind, offset, length))
    return found


def sealed_snapshot(snapshot: bytes) -> bytes:
    """Seal rows, sections and header, as far as they lie inside the file."""
    edited = bytearray(snapshot)
    for entry, kind, offset, length in sections(snapshot):
        if offset + length > len(edited):
            continue
        layout = ROW_LAYOUTS.get(kind)
        if layout is not None:
            for row in range(offset, offset + length - layout.size + 1, layout.size):
                seal_at = row + layout.seal_offset
                edited[seal_at : row + layout.size] = layout.seal(edited[row:seal_at])
        edited[entry + 32 : entry + 48] = xxh3_128_le(edited[offset : offset + length])
    count = min(int.from_bytes(edited[20:24], "little"), SECTION_COUNT_MAX)
    table = bytes(edited[HEADER_BYTES : HEADER_BYTES + count * SECTION.size])
    edited[HEADER.seal_offset : HEADER_BYTES] = HEADER.seal(
        bytes(edited[: HEADER.seal_offset]), table
    )
    return bytes(edited)


def structures(snapshot: bytes) -> Iterator[tuple[int, Layout]]:
    """Yield (start, layout) of the header, the table entries and every row of a good snapshot."""
    yield 0, HEADER
    for entry, _, _, _ in sections(snapshot):
        yield entry, SECTION
    for _, kind, offset, length in sections(snapshot):
        layout = ROW_LAYOUTS.get(kind)
        if layout is not None:
            yield from ((row, layout) for row in range(offset, offset + length, layout.size))


def journal_frames(journal: bytes) -> list[tuple[int, int]]:
    """Return (start, length) of the frames that lie one after another, whatever they hold."""
    found, at = [], JOURNAL_HEADER_BYTES
    while journal[at : at + len(FRAME.magic)] == FRAME.magic and at + FRAME.size <= len(journal):
        size = int.from_bytes(journal[at + 24 : at + 32], "little")
        if size < FRAME.size or at + size > len(journal):
            break
        found.append((at, size))
        at += size
    return found


def sealed_journal(journal: bytes, *, linked: bool = True) -> bytes:
    """Seal the header, the rows and every frame; unless `linked`, a frame names what it did."""
    edited = bytearray(journal)
    for start, layout in journal_structures(journal):
        if layout is EXTENT:
            row = edited[start : start + EXTENT.seal_offset]
            edited[start : start + EXTENT.size] = row + EXTENT.seal(row)
    link = JOURNAL.seal(edited[: JOURNAL.seal_offset])
    if len(edited) >= JOURNAL_HEADER_BYTES:
        edited[JOURNAL.seal_offset : JOURNAL_HEADER_BYTES] = link
    for start, size in journal_frames(journal):
        if linked:
            edited[start + 48 : start + 64] = link
        body = bytes(edited[start + FRAME.size : start + size])
        link = FRAME.seal(edited[start : start + FRAME.seal_offset], body)
        edited[start + FRAME.seal_offset : start + FRAME.size] = link
    return bytes(edited)


def journal_structures(journal: bytes) -> Iterator[tuple[int, Layout]]:
    """Yield (start, layout) of everything that lies in a journal as far as it announces it."""
    if len(journal) >= JOURNAL_HEADER_BYTES:
        yield 0, JOURNAL
    for start, size in journal_frames(journal):
        yield start, FRAME
        at, end = start + FRAME.size, start + size
        while at + ENTRY.size <= end:
            kind, _, entry_bytes = ENTRY.struct.unpack_from(journal, at)
            if not ENTRY.size <= entry_bytes <= end - at:
                break
            yield at, ENTRY
            if kind == EntryKind.PUBLISH and entry_bytes >= ENTRY.size + PUBLISH.size:
                yield from _published(journal, at + ENTRY.size, at + entry_bytes)
            at += entry_bytes


def _published(journal: bytes, at: int, end: int) -> Iterator[tuple[int, Layout]]:
    yield at, PUBLISH
    roots, extents, records, *_ = PUBLISH.struct.unpack_from(journal, at)
    at += PUBLISH.size + ROOT_BYTES * roots
    for layout, count in ((EXTENT, extents), (PUBLISHED, records)):
        for _ in range(count):
            if at + layout.size > end:
                return
            yield at, layout
            at += layout.size
