"""Owns payload reads and writes of one pack file through the file seam; it never retries.

One call moves one span with one vectored system call and compares the count with what was asked.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rangekv.engine.devices.cpu import Bytes
from rangekv.engine.files import Files
from rangekv.format.errors import TransferError

IOV_MAX = 1024  # places in memory of one system call, <limits.h>


class PosixPayload:
    """Vectored preadv/pwritev on a descriptor that the store owns (O_DIRECT where it can).

    The kernel is done with the buffers when a call returns, whatever it returns: that return is the
    evidence that frees a bank. A short count is an error, never a partial success.
    """

    def __init__(self, files: Files, pack_fd: int, *, direct: bool) -> None:
        """`direct` says whether the descriptor is open with O_DIRECT."""
        self.path = "posix-direct" if direct else "posix-buffered"
        self._files = files
        self._pack_fd = pack_fd

    def account(self) -> str:
        """Return the path: the kernel counts the rest."""
        return f"path={self.path}"

    def register(self, memory: Bytes) -> None:
        """The kernel knows all memory of the host."""

    def close(self) -> None:
        """The descriptor is the store's."""

    def read(self, offset: int, buffers: Sequence[Bytes]) -> int:
        """Fill `buffers` from byte `offset`; return the number of system calls (1)."""
        asked = sum(buffer.nbytes for buffer in buffers)
        try:
            got = self._files.preadv(self._pack_fd, buffers, offset)
        except OSError as error:
            raise _failure("read", offset, asked, error) from error
        if got != asked:
            raise _short_read(offset, asked, got)
        return 1

    def read_scattered(self, offset: int, iovec: npt.NDArray[np.uint64]) -> int:
        """Fill the places of `iovec` (uint64[n, 2]: address, bytes); return the system calls.

        The kernel takes IOV_MAX places a call. The caller keeps the memory alive until return.
        """
        calls = 0
        for first in range(0, len(iovec), IOV_MAX):
            part = iovec[first : first + IOV_MAX]
            asked = int(part[:, 1].sum())
            try:
                got = self._files.preadv_iovec(self._pack_fd, part, offset)
            except OSError as error:
                raise _failure("read", offset, asked, error) from error
            if got != asked:
                raise _short_read(offset, asked, got)
            offset += asked
            calls += 1
        return calls

    def write(self, offset: int, buffers: Sequence[Bytes]) -> int:
        """Write `buffers` at byte `offset`; return the number of system calls (1)."""
        asked = sum(buffer.nbytes for buffer in buffers)
        try:
            got = self._files.pwritev(self._pack_fd, buffers, offset)
        except OSError as error:
            raise _failure("write", offset, asked, error) from error
        if got != asked:
            raise TransferError(
                "short-write",
                f"write of {asked} bytes returned {got}; check the space and limits of the device",
                offset=offset,
            )
        return 1


def _short_read(offset: int, asked: int, got: int) -> TransferError:
    return TransferError(
        "short-read",
        f"read of {asked} bytes returned {got}; the pack file may be truncated",
        offset=offset,
    )


def _failure(operation: str, offset: int, length: int, error: OSError) -> TransferError:
    name = errno.errorcode.get(error.errno or 0, "unknown error")
    return TransferError(
        f"{operation}-failed", f"{operation} of {length} bytes failed with {name}", offset=offset
    )
