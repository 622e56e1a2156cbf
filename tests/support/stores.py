"""Stores for tests: a small model, filled tables, file seams that record or fail."""

from __future__ import annotations

import errno
import os
import re
from array import array
from collections import Counter
from pathlib import Path

from rangekv.engine.files import Files, FileStat
from rangekv.engine.pack import NEVER_DIRECT, NEVER_WARM, filesystem_name
from rangekv.engine.store import Store, create
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.namespace import Namespace
from rangekv.format.records import NO_CHECKSUM, NO_PARENT, NO_SALT, Extent, Record
from rangekv.format.tables import Tables

MODEL = ModelGeometry(layer_count=2, token_bytes=4096, block_tokens=16)
NAMESPACE = Namespace({"model": "tiny", "block_tokens": 16})
OTHER_NAMESPACE = Namespace({"model": "tiny", "block_tokens": 16, "tags": "other"})
CAPACITY_BYTES = 4 * 1024 * 1024
EXT4 = 0xEF53
NFS = 0x6969


class AnyFiles(Files):
    """Real calls; only the file system's name is ext4 where the machine's would rule warm out."""

    def filesystem_magic(self, fd: int) -> int:
        magic = super().filesystem_magic(fd)
        return EXT4 if filesystem_name(magic) in NEVER_WARM | NEVER_DIRECT else magic


class RecordingFiles(AnyFiles):
    """Writes down every call as one line, with names for descriptors and without chance."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._names: dict[int, str] = {}

    def _opened(self, line: str, fd: int, name: str) -> int:
        self._names[fd] = name
        self.calls.append(line)
        return fd

    def _note(self, *words: object) -> None:
        self.calls.append(" ".join(map(str, words)))

    def open_dir(self, path):
        name = Path(path).name
        return self._opened(f"open_dir {name}", super().open_dir(path), name)

    def open_file(self, dir_fd, name):
        try:
            return self._opened(f"open_file {name}", super().open_file(dir_fd, name), name)
        except FileNotFoundError:
            self._note("open_file", name, "(none)")
            raise

    def open_pack(self, dir_fd, name, *, write, direct):
        line = f"open_pack {name} {'write' if write else 'read'}"
        return self._opened(line, super().open_pack(dir_fd, name, write=write, direct=direct), name)

    def create_temp(self, dir_fd, name):
        fd = super().create_temp(dir_fd, name)
        return self._opened(f"create_temp {_plain(name)}", fd, _plain(name))

    def close(self, fd):
        self._note("close", self._names.pop(fd))
        super().close(fd)

    def flock(self, fd, *, shared=False):
        self._note("flock", self._names[fd], *(["shared"] if shared else []))
        super().flock(fd, shared=shared)

    def statx(self, fd):
        self._note("statx", self._names[fd])
        return super().statx(fd)

    def statx_at(self, dir_fd, name):
        self._note("statx_at", self._names[dir_fd], name)
        return super().statx_at(dir_fd, name)

    def fallocate(self, fd, offset, length):
        self._note("fallocate", self._names[fd], offset, length)
        super().fallocate(fd, offset, length)

    def pwrite(self, fd, data, offset):
        self._note("pwrite", self._names[fd], offset)
        return super().pwrite(fd, data, offset)

    def preadv(self, fd, buffers, offset):
        self._note("preadv", self._names[fd], offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        self._note("pwritev", self._names[fd], offset)
        return super().pwritev(fd, buffers, offset)

    def fsync(self, fd):
        self._note("fsync", self._names[fd])
        super().fsync(fd)

    def fdatasync(self, fd):
        self._note("fdatasync", self._names[fd])
        super().fdatasync(fd)

    def fsync_dir(self, dir_fd):
        self._note("fsync_dir", self._names[dir_fd])
        super().fsync_dir(dir_fd)

    def rename(self, dir_fd, source, target):
        self._note("rename", _plain(source), target)
        super().rename(dir_fd, source, target)

    def rename_noreplace(self, source_dir_fd, source, target_dir_fd, target):
        self._note("rename_noreplace", _plain(source), target)
        super().rename_noreplace(source_dir_fd, source, target_dir_fd, target)

    def unlink(self, dir_fd, name):
        try:
            super().unlink(dir_fd, name)
            self._note("unlink", name)
        except FileNotFoundError:
            self._note("unlink", name, "(none)")
            raise

    def mkdir(self, path):
        self._note("mkdir", Path(path).name)
        super().mkdir(path)

    def listdir(self, dir_fd):
        self._note("listdir", self._names[dir_fd])
        return super().listdir(dir_fd)


class FailingFiles(AnyFiles):
    """Fails the numbered call of one method, counted from 1, without doing anything."""

    def __init__(self, method: str, number: int = errno.EIO, at: int = 1) -> None:
        self.counts: Counter[str] = Counter()
        self._method, self._number, self._at = method, number, at

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if name.startswith("_") or name == "counts" or name != self._method:
            return value

        def call(*args, **kwargs):
            self.counts[name] += 1
            if self.counts[name] == self._at:
                raise OSError(self._number, os.strerror(self._number))
            return value(*args, **kwargs)

        return call


class ChangedStat(AnyFiles):
    """Lets every statx answer differ in the given fields."""

    def __init__(self, **changes: object) -> None:
        self._changes = changes

    def _changed(self, status: FileStat) -> FileStat:
        fields = {name: getattr(status, name) for name in FileStat.__slots__}
        return FileStat(**fields | self._changes)

    def statx(self, fd):
        return self._changed(super().statx(fd))


def _plain(name: str) -> str:
    return re.sub(r"\.[0-9a-f]{16}\.tmp$", ".tmp", name)


def make_store(path: Path, files: Files | None = None) -> Path:
    create(
        str(path),
        capacity_bytes=CAPACITY_BYTES,
        model=MODEL,
        namespace=NAMESPACE,
        files=files or AnyFiles(),
    )
    return path


def open_store(path: Path, files: Files | None = None, **changes: object) -> Store:
    arguments = {"namespace": NAMESPACE, "model": MODEL, "lock_wait_s": 0, "allow_buffered": True}
    return Store.open(str(path), files=files or AnyFiles(), **arguments | changes)


def filled_tables(geometry: Geometry) -> Tables:
    """Two records of one conversation and one without checksums, in two extents of two widths."""
    narrow, wide = geometry.widths()[0], geometry.widths()[1]
    block = geometry.block_tokens
    extents = [
        Extent(1, geometry.pack_offset(0), narrow, 0, block),
        Extent(3, geometry.pack_offset(1), wide, 1, 2 * block),
    ]
    pages = geometry.layer_count * geometry.page_count(block)
    records = [
        Record(10, 0, 0, 7, 0, 0, 0, block, NO_PARENT, 0, 0),
        Record(11, block, pages, 8, 1, 0, block, block, 0, block, 0),
        Record(12, 2 * block, NO_CHECKSUM, 9, 1, block, 0, block, NO_PARENT, 0, 1),
    ]
    return Tables(
        extents,
        records,
        tokens=array("I", range(3 * block)).tobytes(),
        checksums=array("Q", range(2 * pages)).tobytes(),
        roots=[NO_SALT, bytes(range(32))],
        generation_max=3,
    )


def contents(path: Path) -> dict[str, bytes]:
    """Every file below a directory with its bytes: to show that nothing changed."""
    return {
        str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()
    }
