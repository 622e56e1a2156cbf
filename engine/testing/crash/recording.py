"""The file seam of the operating system, with everything written down that it does to files.

Owns the recording of real calls; a trace of them is explored like one that was made in memory.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rangekv.engine.files import AT_FDCWD, FileStat
from rangekv.engine.testing.crash.image import ROOT_KEY
from rangekv.engine.testing.crash.operations import (
    Allocate,
    Birth,
    Enter,
    FailedSync,
    Leave,
    Log,
    Move,
    Operation,
    Sync,
    SyncDirectory,
    Write,
)
from rangekv.engine.testing.crash.seam import EXT4, WatchedFiles, serial, views

if TYPE_CHECKING:
    from rangekv.engine.files import Segments
    from typing_extensions import Buffer


@dataclass(slots=True)
class Recording:
    """What processes did below the empty directory `root`, and the key of each inode there."""

    root: str
    log: Log = field(default_factory=Log)
    keys: dict[int, int] = field(default_factory=dict)
    """The newest file with an inode number has it: numbers are handed out again."""
    key_next: int = ROOT_KEY + 1

    def __post_init__(self) -> None:
        self.keys[os.stat(self.root).st_ino] = ROOT_KEY


@dataclass(frozen=True, slots=True)
class _Handle:
    key: int
    name: str


class RecordingFiles(WatchedFiles):
    """One process that works on real files below a recording's root."""

    def __init__(self, recording: Recording) -> None:
        super().__init__(recording.log)
        self._recording = recording
        self._handles: dict[int, _Handle] = {}

    def die(self) -> None:
        """Close every descriptor, as the kernel does for a killed process."""
        super().die()
        for fd in list(self._handles):
            self._handles.pop(fd)
            super().close(fd)

    def filesystem_magic(self, fd: int) -> int:
        """Whatever lies below, the explorer's own medium takes its place."""
        return EXT4

    # -- descriptors -----------------------------------------------------------------------------

    @serial
    def open_dir(self, path: str) -> int:
        return self._opened(super().open_dir(path), os.path.basename(path))

    @serial
    def open_file(self, dir_fd: int, name: str) -> int:
        return self._opened(super().open_file(dir_fd, name), name)

    @serial
    def open_pack(self, dir_fd: int, name: str, *, write: bool, direct: bool) -> int:
        return self._opened(super().open_pack(dir_fd, name, write=write, direct=direct), name)

    @serial
    def create_temp(self, dir_fd: int, name: str) -> int:
        fd = super().create_temp(dir_fd, name)
        self._enter(self._handles[dir_fd].key, name, fd, is_directory=False)
        return self._opened(fd, name)

    @serial
    def close(self, fd: int) -> None:
        if self._handles.pop(fd, None) is not None:
            super().close(fd)

    # -- bytes -----------------------------------------------------------------------------------

    @serial
    def fallocate(self, fd: int, offset: int, length: int) -> None:
        super().fallocate(fd, offset, length)
        self._do(Allocate(*self._named(fd), offset + length))

    @serial
    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return self._written(fd, offset, bytes(data), super().pwrite(fd, data, offset))

    @serial
    def pwritev(self, fd: int, buffers: Segments, offset: int) -> int:
        data = b"".join(views(buffers))
        return self._written(fd, offset, data, super().pwritev(fd, buffers, offset))

    # -- durability ------------------------------------------------------------------------------

    @serial
    def fsync(self, fd: int) -> None:
        self._require_no_failure(fd)
        super().fsync(fd)
        self._do(Sync(*self._named(fd), times=True))

    @serial
    def fdatasync(self, fd: int) -> None:
        self._require_no_failure(fd)
        super().fdatasync(fd)
        self._do(Sync(*self._named(fd), times=False))

    @serial
    def fsync_dir(self, dir_fd: int) -> None:
        super().fsync_dir(dir_fd)
        self._do(SyncDirectory(*self._named(dir_fd)))

    # -- names -----------------------------------------------------------------------------------

    @serial
    def rename(self, dir_fd: int, source: str, target: str) -> None:
        key = self._key(super().statx_at(dir_fd, source))
        super().rename(dir_fd, source, target)
        directory = self._handles[dir_fd].key
        self._do(Move(directory, source, directory, target, key))

    @serial
    def rename_noreplace(
        self, source_dir_fd: int, source: str, target_dir_fd: int, target: str
    ) -> None:
        key = self._key(super().statx_at(source_dir_fd, source))
        super().rename_noreplace(source_dir_fd, source, target_dir_fd, target)
        source_key, target_key = self._handles[source_dir_fd].key, self._handles[target_dir_fd].key
        self._do(Move(source_key, source, target_key, target, key))

    @serial
    def unlink(self, dir_fd: int, name: str) -> None:
        super().unlink(dir_fd, name)
        self._do(Leave(self._handles[dir_fd].key, name))

    @serial
    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        fd = super().open_dir(path)
        try:
            self._enter(self._parent(path), os.path.basename(path), fd, is_directory=True)
        finally:
            super().close(fd)

    @serial
    def rmdir(self, path: str) -> None:
        super().rmdir(path)
        self._do(Leave(self._parent(path), os.path.basename(path)))

    # -- inside ----------------------------------------------------------------------------------

    def _do(self, operation: Operation) -> None:
        self.log.operations.append(operation)

    def _require_no_failure(self, fd: int) -> None:
        key, name = self._named(fd)
        if self.fails(name):
            self._do(FailedSync(key, name))
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def _opened(self, fd: int, name: str) -> int:
        self._handles[fd] = _Handle(self._key(super().statx(fd)), name)
        return fd

    def _named(self, fd: int) -> tuple[int, str]:
        handle = self._handles[fd]
        return handle.key, handle.name

    def _key(self, status: FileStat) -> int:
        return self._recording.keys[status.inode]

    def _parent(self, path: str) -> int:
        return self._key(super().statx_at(AT_FDCWD, os.path.dirname(path)))

    def _enter(self, directory: int, name: str, fd: int, *, is_directory: bool) -> None:
        recording = self._recording
        status = super().statx(fd)
        key, recording.key_next = recording.key_next, recording.key_next + 1
        recording.keys[status.inode] = key
        generation = super().inode_generation(fd)
        birth = Birth(status.inode, status.btime_ns, generation, is_directory)
        self._do(Enter(directory, name, key, birth))

    def _written(self, fd: int, offset: int, data: bytes, count: int) -> int:
        mtime_ns = super().statx(fd).mtime_ns
        self._do(Write(*self._named(fd), offset, data[:count], mtime_ns))
        return count
