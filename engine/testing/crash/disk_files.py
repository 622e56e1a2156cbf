"""The file seam over a disk in memory, on which the engine and the store run for an exploration.

Owns one process's descriptors and locks, with the kernel's own errors; what a power cut would leave
of its work is not known here.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from rangekv.engine.files import FileStat
from rangekv.engine.folder import PACK
from rangekv.engine.testing.crash.disk import Disk
from rangekv.engine.testing.crash.image import Content, Node
from rangekv.engine.testing.crash.operations import (
    PAGE_BYTES,
    Allocate,
    FailedSync,
    Leave,
    Move,
    Operation,
    Sync,
    SyncDirectory,
    Write,
)
from rangekv.engine.testing.crash.seam import EXT4, WatchedFiles, serial, views
from rangekv.format.geometry import DATA_OFFSET

if TYPE_CHECKING:
    from rangekv.engine.files import Iovec, Segments
    from typing_extensions import Buffer

UNIX_NS = 1_700_000_000_000_000_000
FREE_BYTES = 1 << 40


@dataclass(slots=True)
class Handle:
    """One open file description."""

    key: int
    name: str
    direct: bool = False
    shown: Content | None = None
    """What reads return where that is not the file's own content."""
    locked: bool | None = None
    """None without a lock, else whether it is shared."""


class DiskFiles(WatchedFiles):
    """One process on a disk, and the only one that runs: its locks are seen by itself alone."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk.log)
        self.disk = disk
        self.payload_reads = 0
        self._handles: dict[int, Handle] = {}
        self._fd_next = 1000

    def do(self, operation: Operation) -> None:
        """Carry out one operation and write it down."""
        self.disk.do(operation)

    def shown(self, directory: int, name: str, content: Content) -> Content | None:
        """Return other bytes to show to readers of a small file, or None for its own."""
        return None

    def content(self, fd: int) -> Content:
        """Return all bytes of an open file."""
        return self._node(fd).data

    # -- opening ---------------------------------------------------------------------------------

    @serial
    def open_dir(self, path: str) -> int:
        key = self.disk.find(path)
        if self.disk.image.nodes[key].content is not None:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        return self._open(Handle(key, os.path.basename(path)))

    @serial
    def open_file(self, dir_fd: int, name: str) -> int:
        directory = self._handles[dir_fd].key
        key = self.disk.entry(directory, name)
        shown = self.shown(directory, name, self.disk.image.nodes[key].data)
        return self._open(Handle(key, name, shown=shown))

    @serial
    def open_pack(self, dir_fd: int, name: str, *, write: bool, direct: bool) -> int:
        key = self.disk.entry(self._handles[dir_fd].key, name)
        return self._open(Handle(key, name, direct=direct))

    @serial
    def create_temp(self, dir_fd: int, name: str) -> int:
        directory = self._handles[dir_fd].key
        self._require_free(directory, name)
        return self._open(Handle(self._create(directory, name, is_directory=False), name))

    @serial
    def close(self, fd: int) -> None:
        self._handles.pop(fd)

    @serial
    def flock(self, fd: int, *, shared: bool = False) -> None:
        mine = self._handles[fd]
        for other in self._handles.values():
            held = other is not mine and other.key == mine.key and other.locked is not None
            if held and not (shared and other.locked):
                raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))
        mine.locked = shared

    # -- looking ---------------------------------------------------------------------------------

    @serial
    def statx(self, fd: int) -> FileStat:
        return _stat(self._node(fd), self._handles[fd].shown)

    @serial
    def statx_at(self, dir_fd: int, name: str) -> FileStat:
        key = self.disk.entry(self._handles[dir_fd].key, name)
        return _stat(self.disk.image.nodes[key], None)

    def filesystem_magic(self, fd: int) -> int:
        return EXT4

    def free_bytes(self, fd: int) -> int:
        return FREE_BYTES

    @serial
    def inode_generation(self, fd: int) -> int | None:
        return self._node(fd).birth.generation

    def direct_alignment(self, fd: int) -> tuple[int, int]:
        return PAGE_BYTES, PAGE_BYTES

    @serial
    def exists(self, path: str) -> bool:
        return self.disk.lookup(path) is not None

    @serial
    def is_directory(self, path: str) -> bool:
        key = self.disk.lookup(path)
        return key is not None and self.disk.image.nodes[key].content is None

    @serial
    def listdir(self, dir_fd: int) -> list[str]:
        return list(self.disk.image.entries[self._handles[dir_fd].key])

    # -- bytes -----------------------------------------------------------------------------------

    @serial
    def fallocate(self, fd: int, offset: int, length: int) -> None:
        self.do(Allocate(*self._named(fd), offset + length))

    @serial
    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return self._write(fd, bytes(data), offset)

    @serial
    def pwritev(self, fd: int, buffers: Segments, offset: int) -> int:
        self._require_aligned(fd, buffers, offset)
        return self._write(fd, b"".join(views(buffers)), offset)

    @serial
    def preadv(self, fd: int, buffers: Segments, offset: int) -> int:
        handle = self._handles[fd]
        self._require_aligned(fd, buffers, offset)
        self.payload_reads += handle.name == PACK and offset >= DATA_OFFSET
        content = handle.shown or self.content(fd)
        begin = offset
        for view in views(buffers):
            data = content.read(offset, len(view))
            view[: len(data)] = data
            offset += len(data)
        return offset - begin

    @serial
    def preadv_iovec(self, fd: int, iovec: Iovec, offset: int) -> int:
        self.payload_reads += 1
        content, begin = self.content(fd), offset
        for address, length in iovec.tolist():
            data = content.read(offset, length)
            ctypes.memmove(address, data, len(data))
            offset += len(data)
        return offset - begin

    # -- durability ------------------------------------------------------------------------------

    @serial
    def fsync(self, fd: int) -> None:
        self._sync(fd, times=True)

    @serial
    def fdatasync(self, fd: int) -> None:
        self._sync(fd, times=False)

    @serial
    def fsync_dir(self, dir_fd: int) -> None:
        self.do(SyncDirectory(*self._named(dir_fd)))

    # -- names -----------------------------------------------------------------------------------

    @serial
    def rename(self, dir_fd: int, source: str, target: str) -> None:
        directory = self._handles[dir_fd].key
        self.do(Move(directory, source, directory, target, self.disk.entry(directory, source)))

    @serial
    def rename_noreplace(
        self, source_dir_fd: int, source: str, target_dir_fd: int, target: str
    ) -> None:
        source_key, target_key = self._handles[source_dir_fd].key, self._handles[target_dir_fd].key
        key = self.disk.entry(source_key, source)
        self._require_free(target_key, target)
        self.do(Move(source_key, source, target_key, target, key))

    @serial
    def unlink(self, dir_fd: int, name: str) -> None:
        directory = self._handles[dir_fd].key
        self.disk.entry(directory, name)
        self.do(Leave(directory, name))

    @serial
    def mkdir(self, path: str) -> None:
        parent, name = self.disk.find(os.path.dirname(path)), os.path.basename(path)
        self._require_free(parent, name)
        self._create(parent, name, is_directory=True)

    @serial
    def rmdir(self, path: str) -> None:
        if self.disk.image.entries[self.disk.find(path)]:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self.do(Leave(self.disk.find(os.path.dirname(path)), os.path.basename(path)))

    # -- time and chance -------------------------------------------------------------------------

    def sleep(self, seconds: float) -> None:
        """Time stands still: nobody else would act meanwhile."""

    def unix_ns(self) -> int:
        return UNIX_NS

    @serial
    def random_bytes(self, count: int) -> bytes:
        return self.disk.draw(count)

    def pid(self) -> int:
        return 1

    def boot_id(self) -> bytes:
        return bytes(16)

    # -- inside ----------------------------------------------------------------------------------

    def _open(self, handle: Handle) -> int:
        self._fd_next += 1
        self._handles[self._fd_next] = handle
        return self._fd_next

    def _node(self, fd: int) -> Node:
        return self.disk.image.nodes[self._handles[fd].key]

    def _named(self, fd: int) -> tuple[int, str]:
        handle = self._handles[fd]
        return handle.key, handle.name

    def _create(self, directory: int, name: str, *, is_directory: bool) -> int:
        open_keys = {handle.key for handle in self._handles.values()}
        return self.disk.create(directory, name, is_directory=is_directory, open_keys=open_keys)

    def _write(self, fd: int, data: bytes, offset: int) -> int:
        self.do(Write(*self._named(fd), offset, data, self.disk.now()))
        return len(data)

    def _sync(self, fd: int, *, times: bool) -> None:
        key, name = self._named(fd)
        if self.fails(name):
            self.do(FailedSync(key, name))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.do(Sync(key, name, times))

    def _require_free(self, directory: int, name: str) -> None:
        if name in self.disk.image.entries[directory]:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)

    def _require_aligned(self, fd: int, buffers: Segments, offset: int) -> None:
        """Refuse what a kernel would refuse of direct I/O."""
        if not self._handles[fd].direct:
            return
        for view in views(buffers):
            address = np.frombuffer(view, dtype=np.uint8).ctypes.data
            if (address | len(view) | offset) % PAGE_BYTES:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


def _stat(node: Node, shown: Content | None) -> FileStat:
    content = shown or node.content
    return FileStat(
        mode=stat.S_IFDIR | 0o700 if content is None else stat.S_IFREG | 0o600,
        uid=os.geteuid(),
        nlink=1,
        size=0 if content is None else content.size,
        inode=node.birth.inode,
        device=(0, 1),
        mtime_ns=node.mtime_ns,
        btime_ns=node.birth.btime_ns,
    )
