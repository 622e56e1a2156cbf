"""Owns the directory of one store: its names, its safety checks, and durable changes to it.

It knows which files lie there but never what their bytes mean.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from rangekv.engine.faults import environment_fault, translated
from rangekv.engine.files import Files, FileStat
from rangekv.format.checksum import Octets
from rangekv.format.errors import EnvironmentFault, StoreMissing, UsageError

if TYPE_CHECKING:
    from types import TracebackType

PACK = "range.pack"
SNAPSHOT = "range.snapshot"
MARKER = "range.dirty"
JOURNAL = "range.journal"
BLANK = "blank"  # directory of stores that have no namespace yet
TEMP_PREFIX = ".range."
TEMP_SUFFIX = ".tmp"
WRITE_BYTES_MAX = 64 * 1024 * 1024  # of one call; the kernel stops at 2 GiB


class Folder:
    """An open store directory. Close it, or use it as a context manager."""

    def __init__(self, files: Files, path: str, fd: int) -> None:
        self.files = files
        self.path = path
        self.fd = fd

    @classmethod
    def open(cls, files: Files, path: str) -> Folder:
        """Open `path` and refuse a directory that others own or may enter.

        Raises StoreMissing, UsageError `not-a-directory`, EnvironmentFault.
        """
        path = os.path.abspath(path)
        try:
            fd = files.open_dir(path)
        except FileNotFoundError:
            raise StoreMissing(
                "no-store",
                "there is no such directory; create a store with rangectl init",
                path=path,
            ) from None
        except NotADirectoryError:
            if os.path.islink(path):
                raise EnvironmentFault(
                    "symlink",
                    "the store directory is a symbolic link; give its real path",
                    path=path,
                ) from None
            raise UsageError(
                "not-a-directory", "found a file, expected the directory of a store", path=path
            ) from None
        except OSError as error:
            raise environment_fault(error, path, "open the store directory") from error
        try:
            with translated(path, "examine the store directory"):
                check_private(files.statx(fd), path, "chmod 700")
        except BaseException:
            let_go(files, fd)
            raise
        return cls(files, path, fd)

    def close(self) -> None:
        """Close the descriptor; never raises OSError."""
        let_go(self.files, self.fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def place(self, name: str) -> str:
        """Return the full path of a name, for messages."""
        return os.path.join(self.path, name)

    def exists(self, name: str) -> bool:
        try:
            self.files.statx_at(self.fd, name)
        except FileNotFoundError:
            return False
        return True

    def in_place(self) -> bool:
        """Whether `path` still leads to this directory: it may be removed while it is open."""
        try:
            found = self.files.open_dir(self.path)
        except FileNotFoundError:
            return False
        try:
            return self.files.statx(found).inode == self.files.statx(self.fd).inode
        finally:
            let_go(self.files, found)

    def unlink_if_there(self, name: str) -> None:
        try:
            self.files.unlink(self.fd, name)
        except FileNotFoundError:
            return

    def sync(self) -> None:
        """Make the directory's entries durable."""
        self.files.fsync_dir(self.fd)

    def create_temp(self, purpose: str) -> tuple[str, int]:
        """Return (name, fd) of a new file; names never repeat, so a torn one is never reused."""
        name = f"{TEMP_PREFIX}{purpose}.{self.files.random_bytes(8).hex()}{TEMP_SUFFIX}"
        return name, self.files.create_temp(self.fd, name)

    def replace(self, name: str, pieces: Iterable[Octets]) -> None:
        """Write `pieces` to a temp, fsync it, rename it to `name`; the caller syncs the folder.

        Nothing is left behind when a step fails; raises OSError.
        """
        temp, fd = self.create_temp(name.removeprefix("range."))
        try:
            try:
                write_all(self.files, fd, pieces)
                self.files.fsync(fd)
            finally:
                self.files.close(fd)
            self.files.rename(self.fd, temp, name)
        except BaseException:
            self.unlink_if_there(temp)
            raise

    def sweep_temps(self) -> None:
        """Remove what killed writers left: temps that nobody holds locked."""
        for name in self.files.listdir(self.fd):
            if not (name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX)):
                continue
            try:
                fd = self.files.open_file(self.fd, name)
            except OSError:
                continue  # gone already, or no file of ours
            try:
                self.files.flock(fd)
                self.files.unlink(self.fd, name)
            except (BlockingIOError, IsADirectoryError):
                continue  # its writer lives, or no file of ours
            finally:
                self.files.close(fd)


def rank_folder(rank: int, world_size: int, replica: int = 0) -> str:
    """Return the name of one rank's directory; the first replica's is that of an engine alone."""
    prefix = f"dp-{replica}-" if replica else ""
    return f"{prefix}rank-{rank}-of-{world_size}"


def let_go(files: Files, fd: int) -> None:
    """Close a descriptor through which nothing is waiting to be durable; never raises OSError.

    Linux closes it whatever it reports, and an error that is met here has nothing left to spoil.
    """
    with suppress(OSError):
        files.close(fd)


def write_all(files: Files, fd: int, pieces: Iterable[Octets], offset: int = 0) -> None:
    """Write `pieces` one after another from `offset`, in calls of bounded size."""
    for piece in pieces:
        rest = memoryview(piece)
        while rest:
            count = files.pwrite(fd, rest[:WRITE_BYTES_MAX], offset)
            if count == 0:
                raise OSError(errno.EIO, "a write made no progress")
            rest = rest[count:]
            offset += count


def read_all(files: Files, fd: int, length: int) -> memoryview:
    """Return the first `length` bytes of a file, fewer when it ends before."""
    buffer = memoryview(bytearray(length))
    end = 0
    while end < length:
        count = files.preadv(fd, [buffer[end:]], end)
        if count == 0:
            break
        end += count
    return buffer[:end]


def make_directory(files: Files, path: str) -> None:
    """Make a directory, mode 0700, unless it is there.

    Its name is durable afterwards in both cases: the process that made it may have been killed
    before that. Raises OSError.
    """
    try:
        files.mkdir(path)
    except FileExistsError:
        made = False
    else:
        made = True
    try:
        sync_directory(files, os.path.dirname(path))
    except PermissionError:
        # Who may not even read the parent did not make what lies in it.
        if made:
            raise


def sync_directory(files: Files, path: str) -> None:
    """Make the entries of a directory durable; `path` may lead through links. Raises OSError."""
    fd = files.open_dir(os.path.realpath(path))
    try:
        files.fsync_dir(fd)
    finally:
        files.close(fd)


def remove_if_empty(files: Files, path: str) -> None:
    """Take back a directory that was made for nothing, unless somebody has moved in.

    Only under its lock: who holds that is about to move in, and `claim` notices what went before.
    """
    with suppress(OSError):
        fd = files.open_dir(path)
        try:
            files.flock(fd)
            files.rmdir(path)
        finally:
            files.close(fd)


def check_private(status: FileStat, path: str, remedy: str) -> None:
    """Raise EnvironmentFault when another user owns `path` or its mode lets others in."""
    if status.uid != os.geteuid():
        raise EnvironmentFault(
            "wrong-owner",
            f"owned by user {status.uid}, expected user {os.geteuid()}: cached prompts belong to "
            "one user; run as its owner or chown it",
            path=path,
        )
    mode = stat.S_IMODE(status.mode)
    if mode & 0o077:
        raise EnvironmentFault(
            "wrong-mode",
            f"mode {mode:04o} lets other users in, and a store holds prompts; {remedy} {path}",
            path=path,
        )
