"""Owns every system call on a store: one thin method each, so that tests can record and fail them.

It takes and returns plain integers and bytes, raises OSError as the kernel reports it, never
retries and never decides what an error means.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from typing_extensions import Buffer

    # Stubs for Python 3.11 do not know that an array is a buffer.
    Segments = Sequence[Buffer] | Sequence[npt.NDArray[np.uint8]]
    # struct iovec[n] as uint64[n, 2]: address, length in bytes.
    Iovec = npt.NDArray[np.uint64]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.preadv.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_libc.preadv.restype = ctypes.c_ssize_t
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_MAP_FAILED = ctypes.c_void_p(-1).value

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_EMPTY_PATH = 0x1000
STATX_BASIC_STATS = 0x7FF
STATX_BTIME = 0x800
STATX_DIOALIGN = 0x2000
RENAME_NOREPLACE = 1
FS_IOC_GETVERSION = 0x80087601
# mask nlink uid mode inode size btime mtime device, as struct statx lays them out.
STATX = struct.Struct("<I12xII4xH2xQQ32xqI4x16xqI12xII")
OPEN_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC
# Reading must not hang on a pipe that stands in a file's place; regular files ignore the flag.
READ_FLAGS = OPEN_FLAGS | os.O_RDONLY | os.O_NONBLOCK


@dataclass(frozen=True, slots=True)
class FileStat:
    """What statx says about one file; btime is None where the file system keeps none."""

    mode: int
    uid: int
    nlink: int
    size: int
    inode: int
    device: tuple[int, int]
    mtime_ns: int
    btime_ns: int | None


class Files:
    """The real system calls. Subclasses record them or inject faults; engines share one object."""

    def open_dir(self, path: str) -> int:
        """Open a directory that is no symbolic link."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def open_file(self, dir_fd: int, name: str) -> int:
        """Open a small file for reading; never follows a link, never blocks on a pipe."""
        return os.open(name, READ_FLAGS, dir_fd=dir_fd)

    def open_pack(self, dir_fd: int, name: str, *, write: bool, direct: bool) -> int:
        """Open a pack file; with `direct` every transfer bypasses the page cache."""
        flags = OPEN_FLAGS | os.O_RDWR if write else READ_FLAGS
        return os.open(name, flags | (os.O_DIRECT if direct else 0), dir_fd=dir_fd)

    def create_temp(self, dir_fd: int, name: str) -> int:
        """Create a new file for reading and writing, mode 0600; fails when it exists."""
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o600, dir_fd=dir_fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def flock(self, fd: int, *, shared: bool = False) -> None:
        """Lock the open file description or raise BlockingIOError at once."""
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def statx(self, fd: int) -> FileStat:
        return _statx(fd, b"", AT_EMPTY_PATH)

    def statx_at(self, dir_fd: int, name: str) -> FileStat:
        """Stat a name without following a link."""
        return _statx(dir_fd, os.fsencode(name), AT_SYMLINK_NOFOLLOW)

    def filesystem_magic(self, fd: int) -> int:
        """Return statfs f_type, 32 bits."""
        buffer = ctypes.create_string_buffer(256)
        _check(_libc.fstatfs(fd, buffer))
        return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], "little") & 0xFFFFFFFF

    def free_bytes(self, fd: int) -> int:
        """Return the bytes that an ordinary user may still allocate."""
        status = os.fstatvfs(fd)
        return status.f_bavail * status.f_frsize

    def inode_generation(self, fd: int) -> int | None:
        """Return the inode's generation, or None where the file system does not tell."""
        try:
            answer = fcntl.ioctl(fd, FS_IOC_GETVERSION, bytes(8))
        except OSError:
            return None
        return int.from_bytes(answer[:4], "little")

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        """Allocate blocks with fallocate(2) itself: glibc's emulation would write them one by one.

        A signal may interrupt it; the call is then repeated from the start, which is harmless.
        """
        while True:
            try:
                _check(_libc.fallocate(fd, 0, offset, length))
                return
            except InterruptedError:
                continue

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, buffers: Segments, offset: int) -> int:
        """Fill `buffers` with one system call; returns the bytes read, which may be fewer."""
        return os.preadv(fd, buffers, offset)  # type: ignore[arg-type]

    def preadv_iovec(self, fd: int, iovec: Iovec, offset: int) -> int:
        """Read into at most 1,024 places in memory with one system call; see `preadv`.

        Thousands of buffer objects would cost more than the read: the kernel takes the array as it
        is. The caller keeps the memory alive and the addresses right.
        """
        while True:
            try:
                return _check(_libc.preadv(fd, iovec.ctypes.data, len(iovec), offset))
            except InterruptedError:
                continue

    def direct_alignment(self, fd: int) -> tuple[int, int]:
        """Return what direct I/O asks of (memory address, file offset); 4096 where not told."""
        buffer = ctypes.create_string_buffer(256)
        _check(_libc.statx(fd, b"", AT_EMPTY_PATH, STATX_DIOALIGN, buffer))
        (mask,) = struct.unpack_from("<I", buffer, 0)
        memory, offset = struct.unpack_from("<II", buffer, 152)
        if not mask & STATX_DIOALIGN or not memory or not offset:
            return 4096, 4096
        return memory, offset

    def resident_bytes(self, fd: int, offset: int, length: int) -> int:
        """Return how many bytes of whole pages in that range of a file the page cache holds.

        `offset` is a multiple of the page size. The kernel tells the owner of the file only.
        """
        address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
        if address == _MAP_FAILED:
            _check(-1)
        try:
            told = ctypes.create_string_buffer(-(-length // mmap.PAGESIZE))
            _check(_libc.mincore(address, length, told))
        finally:
            _libc.munmap(address, length)
        return sum(byte & 1 for byte in told.raw) * mmap.PAGESIZE

    def pwritev(self, fd: int, buffers: Segments, offset: int) -> int:
        """Write `buffers` with one system call; returns the bytes written, which may be fewer."""
        return os.pwritev(fd, buffers, offset)  # type: ignore[arg-type]

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync_dir(self, dir_fd: int) -> None:
        """Make creations, renames and removals in a directory durable."""
        os.fsync(dir_fd)

    def rename(self, dir_fd: int, source: str, target: str) -> None:
        """Rename inside one directory, replacing the target."""
        os.rename(source, target, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    def rename_noreplace(
        self, source_dir_fd: int, source: str, target_dir_fd: int, target: str
    ) -> None:
        """Rename; fails with FileExistsError when the target exists."""
        names = os.fsencode(source), os.fsencode(target)
        _check(_libc.renameat2(source_dir_fd, names[0], target_dir_fd, names[1], RENAME_NOREPLACE))

    def unlink(self, dir_fd: int, name: str) -> None:
        os.unlink(name, dir_fd=dir_fd)

    def exists(self, path: str) -> bool:
        """Whether something of any kind has this path; a broken link counts."""
        return os.path.lexists(path)

    def is_directory(self, path: str) -> bool:
        """Whether the path leads to a directory, through links too."""
        return os.path.isdir(path)

    def mkdir(self, path: str) -> None:
        """Create a directory, mode 0700."""
        os.mkdir(path, 0o700)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def listdir(self, dir_fd: int) -> list[str]:
        return os.listdir(dir_fd)

    def monotonic(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def unix_ns(self) -> int:
        return time.time_ns()

    def random_bytes(self, count: int) -> bytes:
        return os.urandom(count)

    def pid(self) -> int:
        return os.getpid()

    def boot_id(self) -> bytes:
        """Return the 16 bytes that name this boot of the machine; zeros where it has no name."""
        try:
            text = Path("/proc/sys/kernel/random/boot_id").read_text("ascii")
        except OSError:
            return bytes(16)
        return bytes.fromhex(text.strip().replace("-", ""))


OS_FILES = Files()


def _check(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _statx(dir_fd: int, name: bytes, flags: int) -> FileStat:
    buffer = ctypes.create_string_buffer(256)
    _check(_libc.statx(dir_fd, name, flags, STATX_BASIC_STATS | STATX_BTIME, buffer))
    (mask, nlink, uid, mode, inode, size, btime_sec, btime_nsec, mtime_sec, mtime_nsec, *device) = (
        STATX.unpack_from(buffer)
    )
    return FileStat(
        mode=mode,
        uid=uid,
        nlink=nlink,
        size=size,
        inode=inode,
        device=(device[0], device[1]),
        mtime_ns=mtime_sec * 1_000_000_000 + mtime_nsec,
        btime_ns=btime_sec * 1_000_000_000 + btime_nsec if mask & STATX_BTIME else None,
    )
