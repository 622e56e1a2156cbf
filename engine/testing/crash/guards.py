"""A process that lacks some of the checks of a reopen: to see that each of the others suffices.

Owns the disarming. The reader's code stays as it is; it is shown a snapshot that passes the check.
"""

from __future__ import annotations

import errno
import os
from enum import Enum

from rangekv.engine.folder import MARKER, PACK, SNAPSHOT
from rangekv.engine.testing.crash.disk import Disk
from rangekv.engine.testing.crash.disk_files import DiskFiles
from rangekv.engine.testing.crash.image import EMPTY, Content
from rangekv.format.checksum import xxh3_128_le
from rangekv.format.envelope import HEADER, HEADER_BYTES, SECTION, SECTION_COUNT_MAX
from rangekv.format.errors import FormatError
from rangekv.format.geometry import SUPERBLOCK_OFFSETS
from rangekv.format.layout import Layout
from rangekv.format.superblock import SUPERBLOCK_BYTES, Slot, Superblock, choose


class Guard(Enum):
    """A check that stands between a store and a wrong index."""

    MARKER = "marker"
    EPOCH = "epoch"
    MTIME = "mtime"
    CHECKSUM = "checksum"


class BlindFiles(DiskFiles):
    """A process whose reopen does without the `blind` checks; all else is the real protocol."""

    def __init__(self, disk: Disk, blind: frozenset[Guard] = frozenset()) -> None:
        super().__init__(disk)
        self.blind = blind

    def open_file(self, dir_fd: int, name: str) -> int:
        if name == MARKER and Guard.MARKER in self.blind:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return super().open_file(dir_fd, name)

    def shown(self, directory: int, name: str, content: Content) -> Content | None:
        if name != SNAPSHOT or not self.blind - {Guard.MARKER}:
            return None
        data = bytearray(content.read(0, content.size))
        if Guard.CHECKSUM in self.blind:
            _seal_sections(data)
            _seal(data)
        if not _sealed(data):
            return None
        pack = self.disk.image.nodes[self.disk.image.entries[directory][PACK]]
        superblock = read_superblock(pack.data)
        if superblock is not None and _get(data, HEADER, "store_uuid") == superblock.store_uuid:
            if Guard.EPOCH in self.blind:
                _put(data, "epoch", superblock.epoch)
            if Guard.MTIME in self.blind:
                _put(data, "pack_mtime_sec", pack.mtime_ns // 10**9)
                _put(data, "pack_mtime_nsec", pack.mtime_ns % 10**9)
        _seal(data)
        return EMPTY.written(0, bytes(data))


def read_superblock(pack: Content) -> Superblock | None:
    """Return the superblock that counts in a pack file, or None."""
    try:
        return choose(
            [
                Slot.read(pack.read(offset, SUPERBLOCK_BYTES), index)
                for index, offset in enumerate(SUPERBLOCK_OFFSETS)
            ]
        )
    except FormatError:
        return None


def _place(layout: Layout, name: str, base: int = 0) -> slice:
    offset, length = next(row[:2] for row in layout.rows if row[2] == name)
    return slice(base + offset, base + offset + length)


def _get(data: bytearray, layout: Layout, name: str, base: int = 0) -> bytes:
    return bytes(data[_place(layout, name, base)])


def _put(data: bytearray, name: str, value: int) -> None:
    place = _place(HEADER, name)
    data[place] = value.to_bytes(place.stop - place.start, "little")


def _number(data: bytearray, layout: Layout, name: str, base: int = 0) -> int:
    return int.from_bytes(_get(data, layout, name, base), "little")


def _table_end(data: bytearray) -> int:
    count = min(_number(data, HEADER, "section_count"), SECTION_COUNT_MAX)
    return HEADER_BYTES + count * SECTION.size


def _seal_sections(data: bytearray) -> None:
    for base in range(HEADER_BYTES, min(_table_end(data), len(data)), SECTION.size):
        start = _number(data, SECTION, "offset", base)
        end = start + _number(data, SECTION, "length", base)
        data[_place(SECTION, "section_xxh3_128", base)] = xxh3_128_le(data[start:end])


def _digest(data: bytearray) -> bytes:
    return HEADER.seal(data[: HEADER.seal_offset], data[HEADER_BYTES : _table_end(data)])


def _sealed(data: bytearray) -> bool:
    return len(data) >= HEADER_BYTES and _get(data, HEADER, "xxh3_128") == _digest(data)


def _seal(data: bytearray) -> None:
    if len(data) >= HEADER_BYTES:
        data[_place(HEADER, "xxh3_128")] = _digest(data)
