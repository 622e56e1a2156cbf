"""Owns what is known of the way that payload took in one phase, and the name that this proves.

It counts and compares; it never takes the name of a backend or a setting for evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rangekv.engine.files import Files
from rangekv.engine.payload.cufile_stats import Calls, CufileStats

UNPROVED = "unproved"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was counted between two moments. Bytes and calls; None is for what nobody told."""

    host_bytes: int
    """By POSIX calls of KvikIO: into host memory, or through it to a device."""
    cufile_bytes: int
    """Handed to cuFile, which may still have sent them through the host."""
    calls: Calls | None = None
    """How cuFile says that its calls went."""
    resident_bytes: int | None = None
    """Growth of the page cache over the range that was watched; 0 after direct I/O."""

    @property
    def path(self) -> str:
        """`cufile-gds`, `cufile-compat`, or `unproved`: one byte by the host makes it compat.

        The counts are the process's: another user of KvikIO can take a proof away, and give none.
        """
        if self.host_bytes or (self.calls is not None and self.calls.bounced):
            return "cufile-compat"
        if self.cufile_bytes and self.calls is not None and self.calls.direct:
            return "cufile-gds"
        return UNPROVED

    def line(self) -> str:
        """Return one line of key=value, as in logs and reports."""
        direct, bounced = ("unknown", "unknown")
        if self.calls is not None:
            direct, bounced = str(self.calls.direct), str(self.calls.bounced)
        resident = "unknown" if self.resident_bytes is None else str(self.resident_bytes)
        return (
            f"path={self.path} host_bytes={self.host_bytes} cufile_bytes={self.cufile_bytes} "
            f"cufile_direct={direct} cufile_bounced={bounced} page_cache_bytes={resident}"
        )


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The moment at which a phase began."""

    summary: Any
    calls: Calls | None
    watched: tuple[int, int]
    resident_bytes: int | None


class Witness:
    """Takes snapshots of one pack file's payload and tells what has happened since."""

    def __init__(
        self, library: Any, files: Files, pack_fd: int, cufile: CufileStats | None
    ) -> None:
        """`library` is KvikIO; `cufile` None where cuFile does not count."""
        self._monitor = library.SummaryMonitor()
        self._files = files
        self._pack_fd = pack_fd
        self._cufile = cufile

    def snapshot(self, watch: tuple[int, int] = (0, 0)) -> Snapshot:
        """Begin a phase; `watch` is the (offset, bytes) whose pages in the cache are counted too.

        Counting costs time and memory that grow with the range: not for the whole of a pack file.
        """
        return Snapshot(self._monitor.get(), self._calls(), watch, self._resident(watch))

    def since(self, begin: Snapshot) -> Evidence:
        """Return what has happened since `begin`."""
        moved = self._monitor.since(begin.summary).by_backend
        resident = self._resident(begin.watched)
        calls = self._calls()
        if calls is None or begin.calls is None:
            calls = None
        else:
            calls = Calls(calls.direct - begin.calls.direct, calls.bounced - begin.calls.bounced)
        return Evidence(
            # A backend that we do not know is not cuFile: count it as the worse one.
            host_bytes=sum(_bytes(one) for name, one in moved.items() if name != "GDS"),
            cufile_bytes=_bytes(moved.get("GDS", {})),
            calls=calls,
            resident_bytes=None
            if resident is None or begin.resident_bytes is None
            else max(0, resident - begin.resident_bytes),
        )

    def _calls(self) -> Calls | None:
        return None if self._cufile is None else self._cufile.calls()

    def _resident(self, watch: tuple[int, int]) -> int | None:
        offset, length = watch
        return self._files.resident_bytes(self._pack_fd, offset, length) if length else None


def _bytes(totals: Any) -> int:
    return int(totals.get("bytes_transferred", 0))
