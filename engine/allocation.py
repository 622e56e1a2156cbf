"""Owns the room of a pack file: asking for it, taking it, and saying plainly that it is not there.

It takes blocks for a file that is open already and never makes or removes one.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from rangekv.engine.faults import environment_fault
from rangekv.engine.folder import PACK, Folder, write_all
from rangekv.format.errors import EnvironmentFault

ZERO_BYTES = 16 * 1024 * 1024

Progress = Callable[[int, int], None]
"""Called with (bytes written, bytes in all)."""


def require_room(path: str, needed_bytes: int, free_bytes: int) -> None:
    """Raise EnvironmentFault `no-space` unless the free bytes suffice."""
    if free_bytes < needed_bytes:
        raise _no_space(path, needed_bytes, free_bytes)


def allocate(
    folder: Folder, fd: int, file_bytes: int, *, zero: bool, progress: Progress | None
) -> None:
    """Give an empty file `file_bytes` of blocks; with `zero` also write every one of them.

    Raises EnvironmentFault: `no-space` with the needed and the free bytes, `no-fallocate` where
    only writing would do and `zero` is false.
    """
    try:
        try:
            folder.files.fallocate(fd, 0, file_bytes)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            if not zero:
                raise EnvironmentFault(
                    "no-fallocate",
                    "this file system cannot preallocate; write the whole file instead (--zero)",
                    path=folder.path,
                ) from error
        if zero:
            _write_zeros(folder, fd, file_bytes, progress)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free_bytes = folder.files.free_bytes(folder.fd)
            raise _no_space(folder.path, file_bytes, free_bytes) from error
        doing = f"preallocate {file_bytes} bytes"
        raise environment_fault(error, folder.place(PACK), doing) from error


def _write_zeros(folder: Folder, fd: int, file_bytes: int, progress: Progress | None) -> None:
    piece = memoryview(bytes(ZERO_BYTES))
    for offset in range(0, file_bytes, ZERO_BYTES):
        length = min(ZERO_BYTES, file_bytes - offset)
        write_all(folder.files, fd, [piece[:length]], offset)
        if progress is not None:
            progress(offset + length, file_bytes)


def _no_space(path: str, needed_bytes: int, free_bytes: int) -> EnvironmentFault:
    return EnvironmentFault(
        "no-space",
        f"{needed_bytes} bytes are needed, {free_bytes} are free; "
        "free some space or use a smaller capacity",
        path=path,
    )
