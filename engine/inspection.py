"""Owns the read-only look at one store: what is there, and what a reopen would make of it.

It never writes, never repairs, and reports damage instead of raising about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from rangekv.engine import markers
from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.folder import Folder
from rangekv.engine.pack import Pack, Slots
from rangekv.engine.reopen import judge
from rangekv.format.envelope import SnapshotHeader
from rangekv.format.errors import ExitCode, FormatError, UnsupportedVersion
from rangekv.format.geometry import Geometry
from rangekv.format.identity import FileIdentity
from rangekv.format.journal import Journal
from rangekv.format.marker import Marker
from rangekv.format.namespace import Namespace
from rangekv.format.superblock import Superblock, choose
from rangekv.format.tables import Tables

State = Literal["warm", "would-recover", "cold", "live", "unusable", "unsupported"]

EXIT_CODES: dict[State, ExitCode] = {
    "warm": ExitCode.OK,
    "would-recover": ExitCode.OK,
    "live": ExitCode.OK,
    "cold": ExitCode.COLD,
    "unusable": ExitCode.CHECK_FAILED,
    "unsupported": ExitCode.UNSUPPORTED,
}


@dataclass(frozen=True, slots=True)
class StoreReport:
    """One store as it was found. `reason` and `detail` say why it is not warm."""

    path: str
    state: State
    reason: str | None
    detail: str
    filesystem: str
    identity: FileIdentity
    """Of the pack file as it is; compare with `superblock.identity`."""
    mtime_ns: int
    slots: Slots
    """Both superblocks, each decoded or with its problem."""
    superblock: Superblock | None
    """The one that counts; None when neither can be used."""
    header: SnapshotHeader | None
    tables: Tables | None
    """The index where it can be read, also when a reopen would discard it."""
    marker: Marker | None
    marker_exists: bool
    journal: Journal | None
    """Where one is there and can be read, also when it does not belong to the snapshot."""

    @property
    def geometry(self) -> Geometry | None:
        """None for a blank or unusable store."""
        return None if self.superblock is None else self.superblock.geometry

    @property
    def namespace(self) -> Namespace | None:
        """None for a blank or unusable store."""
        return None if self.superblock is None else self.superblock.namespace

    @property
    def keeps_index(self) -> bool:
        """Whether an open would keep the index that was read: it is warm or would recover."""
        return self.state in ("warm", "would-recover")

    @property
    def blank(self) -> bool:
        return self.superblock is not None and self.superblock.blank

    @property
    def exit_code(self) -> ExitCode:
        return EXIT_CODES[self.state]


@dataclass(frozen=True, slots=True)
class Reading:
    """A report and the descriptor it came from, under a shared lock unless the store is live."""

    report: StoreReport
    folder: Folder
    pack_fd: int
    direct: bool
    """True when reads through `pack_fd` bypass the page cache and need aligned buffers."""


def read_store(path: str, files: Files = OS_FILES) -> StoreReport:
    """Return the report of the store in directory `path`.

    Raises StoreMissing, UsageError and EnvironmentFault when there is nothing to look at or
    looking is not allowed; never for damaged content.
    """
    with reading(path, files) as current:
        return current.report


@contextmanager
def reading(path: str, files: Files = OS_FILES) -> Iterator[Reading]:
    """Hold the store's shared lock while the caller reads payload; errors as `read_store`.

    No writer can open the store meanwhile. A live store is not held: its report says so.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(Folder.open(files, path))
        pack, held = Pack.open_to_read(folder)
        stack.callback(pack.close)
        with translated(folder.path, "examine the store"):
            report = _report(pack, held=held)
        yield Reading(report, folder, pack.fd, pack.direct)


def _report(pack: Pack, *, held: bool) -> StoreReport:
    slots = pack.read_slots()
    state: State
    try:
        superblock = pack.choose(slots)
    except FormatError as error:
        state = "unsupported" if isinstance(error, UnsupportedVersion) else "unusable"
        return _brief(pack, slots, state, error.code, error.message)
    if not held:
        detail = f"{markers.holder(pack.folder)} holds the store"
        return _brief(pack, slots, "live", None, detail)
    verdict = judge(pack, superblock, read_anyway=True)
    _, mtime_ns = pack.stat()
    return StoreReport(
        path=pack.folder.path,
        state="would-recover" if verdict.state == "recovered" else verdict.state,
        reason=verdict.reason,
        detail=verdict.line,
        filesystem=pack.filesystem,
        identity=verdict.identity,
        mtime_ns=mtime_ns,
        slots=slots,
        superblock=superblock,
        header=verdict.header,
        tables=verdict.tables,
        marker=verdict.remains.marker,
        marker_exists=verdict.remains.marker_exists,
        journal=verdict.remains.journal,
    )


def _brief(pack: Pack, slots: Slots, state: State, reason: str | None, detail: str) -> StoreReport:
    """Report a store whose index is not looked at."""
    identity, mtime_ns = pack.stat()
    marker, marker_exists = markers.read(pack.folder)
    try:
        superblock = choose(slots)
    except FormatError:
        superblock = None
    return StoreReport(
        path=pack.folder.path,
        state=state,
        reason=reason,
        detail=detail,
        filesystem=pack.filesystem,
        identity=identity,
        mtime_ns=mtime_ns,
        slots=slots,
        superblock=superblock,
        header=None,
        tables=None,
        marker=marker,
        marker_exists=marker_exists,
        journal=None,
    )
