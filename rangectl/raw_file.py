"""A preallocated file without a name: what it held is gone with its last descriptor.

Owns that descriptor and whether it is direct; never leaves anything behind, not even when killed.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES
from rangekv.engine.pack import NEVER_DIRECT, filesystem_name
from rangekv.format.errors import EnvironmentFault


class RawFile:
    """`size_bytes` of disk below `folder`, open for direct I/O where the file system has it."""

    def __init__(self, folder: Path, size_bytes: int, *, allow_buffered: bool) -> None:
        with translated(str(folder), "make a temporary file"):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (closed by close)
        try:
            self._prepare(folder, size_bytes, allow_buffered)
        except BaseException:
            self._file.close()
            raise

    def _prepare(self, folder: Path, size_bytes: int, allow_buffered: bool) -> None:
        named = self._file.fileno()
        self.filesystem = filesystem_name(OS_FILES.filesystem_magic(named))
        with translated(str(folder), f"allocate {size_bytes} bytes"):
            OS_FILES.fallocate(named, 0, size_bytes)
        self.direct = self.filesystem not in NEVER_DIRECT
        again = f"/proc/self/fd/{named}"
        flags = os.O_RDWR | os.O_CLOEXEC
        try:
            self.fd = os.open(again, flags | (os.O_DIRECT if self.direct else 0))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self.direct = False
            self.fd = os.open(again, flags)
        if not (self.direct or allow_buffered):
            os.close(self.fd)
            raise EnvironmentFault(
                "no-direct-io",
                f"{self.filesystem} has no direct I/O, so this would measure memory; choose a"
                " directory on an SSD, or go on with --allow-buffered",
                path=str(folder),
            )

    @property
    def buffered_fd(self) -> int:
        """Another descriptor of the file, whose transfers go through the page cache."""
        return self._file.fileno()

    def drop_residency(self) -> None:
        """Take the file's clean pages out of the page cache."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the disk space back."""
        os.close(self.fd)
        self._file.close()
