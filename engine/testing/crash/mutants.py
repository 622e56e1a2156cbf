"""Protocols with one step left out or moved: the explorer must find what each of them breaks.

Owns the table. A mutant lives in the file seam, so that the engine and the store that run on it are
the real ones.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rangekv.engine.folder import MARKER, PACK, SNAPSHOT, TEMP_PREFIX
from rangekv.engine.testing.crash.disk import Disk
from rangekv.engine.testing.crash.disk_files import DiskFiles
from rangekv.engine.testing.crash.explorer import Explorer, Search
from rangekv.engine.testing.crash.findings import COLD_CLOSE, REFUSED, WRONG_KV, Findings
from rangekv.engine.testing.crash.guards import BlindFiles, Guard
from rangekv.engine.testing.crash.operations import (
    Enter,
    FailedSync,
    Leave,
    Move,
    Operation,
    Write,
)
from rangekv.engine.testing.crash.scenarios import SCENARIOS, Scenario
from rangekv.engine.testing.crash.seam import views
from rangekv.format.geometry import DATA_OFFSET, SUPERBLOCK_OFFSETS
from rangekv.format.superblock import Superblock

if TYPE_CHECKING:
    from rangekv.engine.files import Segments
    from typing_extensions import Buffer

SNAPSHOT_TEMP = f"{TEMP_PREFIX}snapshot."
PACK_TEMP = f"{TEMP_PREFIX}pack."


class MutantFiles(BlindFiles):
    """What the mutants ask: whose descriptor is it, and what happened last."""

    def name(self, fd: int) -> str:
        """Return the name under which a descriptor was opened."""
        return self._handles[fd].name

    def last(self) -> Operation | None:
        """Return what was done last."""
        return self.log.operations[-1] if self.log.operations else None

    def last_named(self, dir_fd: int) -> tuple[type[Operation], str]:
        """Return (kind, name) of the last change of a name that is no temp's in a directory."""
        directory = self._handles[dir_fd].key
        for operation in reversed(self.log.operations):
            if isinstance(operation, Move) and operation.target_directory == directory:
                return Move, operation.target
            if (
                isinstance(operation, Enter | Leave)
                and operation.directory == directory
                and not operation.name.startswith(TEMP_PREFIX)
            ):
                return type(operation), operation.name
        return Enter, ""

    def after_slot(self) -> bool:
        """Whether the last operation wrote a superblock over an older one."""
        last = self.last()
        return isinstance(last, Write) and last.name == PACK and last.offset < DATA_OFFSET


class NoC2(MutantFiles):
    def fsync(self, fd: int) -> None:
        if self.name(fd) != PACK:
            super().fsync(fd)


class C2Retried(MutantFiles):
    def fsync(self, fd: int) -> None:
        if self.name(fd) != PACK:
            super().fsync(fd)
        else:  # it fails; the second one finds clean pages and succeeds
            self.do(FailedSync(self._handles[fd].key, PACK))


class NoO5Sync(MutantFiles):
    def fsync_dir(self, dir_fd: int) -> None:
        if self.last_named(dir_fd) != (Move, MARKER):
            super().fsync_dir(dir_fd)


class NoO6Sync(MutantFiles):
    def fdatasync(self, fd: int) -> None:
        if not self.after_slot():
            super().fdatasync(fd)


class NoSyncBeforeSlot(MutantFiles):
    def fdatasync(self, fd: int) -> None:
        if self.after_slot():
            super().fdatasync(fd)


class NoC4TempSync(MutantFiles):
    def fsync(self, fd: int) -> None:
        if not self.name(fd).startswith(SNAPSHOT_TEMP):
            super().fsync(fd)


class NoC4DirectorySync(MutantFiles):
    def fsync_dir(self, dir_fd: int) -> None:
        if self.last_named(dir_fd) != (Move, SNAPSHOT):
            super().fsync_dir(dir_fd)


class C5BeforeC4(MutantFiles):
    def create_temp(self, dir_fd: int, name: str) -> int:
        if name.startswith(SNAPSHOT_TEMP) and MARKER in self.listdir(dir_fd):
            self.unlink(dir_fd, MARKER)
            self.fsync_dir(dir_fd)
        return super().create_temp(dir_fd, name)


class NoC5Sync(MutantFiles):
    def fsync_dir(self, dir_fd: int) -> None:
        if self.last_named(dir_fd) != (Leave, MARKER):
            super().fsync_dir(dir_fd)


class OneSlot(MutantFiles):
    """There is no superblock B: every write of one goes over A."""

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        if offset == SUPERBLOCK_OFFSETS[1]:
            return memoryview(data).nbytes
        return super().pwrite(fd, data, offset)

    def pwritev(self, fd: int, buffers: Segments, offset: int) -> int:
        if offset != SUPERBLOCK_OFFSETS[1]:
            return super().pwritev(fd, buffers, offset)
        copy = Superblock.decode(b"".join(views(buffers)), 1).encode(0)
        return DiskFiles.pwrite(self, fd, copy, SUPERBLOCK_OFFSETS[0])


class NoF6(MutantFiles):
    def fsync(self, fd: int) -> None:
        if not self.name(fd).startswith(PACK_TEMP):
            super().fsync(fd)


class FixedTempNames(MutantFiles):
    def random_bytes(self, count: int) -> bytes:
        return bytes(count) if count == 8 else super().random_bytes(count)


class ParentSyncedByItsMakerOnly(MutantFiles):
    """A directory that was there already is taken to be durable."""

    def fsync_dir(self, dir_fd: int) -> None:
        last = self.last()
        others = isinstance(last, Enter) and last.birth.is_directory
        if others or self.last_named(dir_fd)[0] is Move or self.last_named(dir_fd)[0] is Leave:
            super().fsync_dir(dir_fd)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One protocol that is not the real one. `breaks` is the kind of its violations, or None.

    `patch` changes one rule of the engine for as long as its context is entered.
    """

    name: str
    files: type[MutantFiles]
    breaks: str | None
    blind: frozenset[Guard] = frozenset()
    scenario: Scenario = SCENARIOS[0]
    """What shows it."""
    patch: Callable[[], AbstractContextManager[None]] = nullcontext
    crashes: int = 2
    """How many in a row it takes."""

    def process(self, disk: Disk) -> DiskFiles:
        """Start a process under this protocol."""
        return self.files(disk, self.blind)

    def explore(self, search: Search, scenario: Scenario | None = None) -> Findings:
        """Look for what this protocol breaks; ends as soon as an unsafe one is found out."""
        search = replace(search, crashes=min(search.crashes, self.crashes))
        if self.unsafe and not search.verified:
            search = replace(search, stop_at=self.breaks)
        with self.patch():
            return Explorer(scenario or self.scenario, self.process, search).run()

    @property
    def unsafe(self) -> bool:
        """Whether more than warmth is lost."""
        return self.breaks not in (None, COLD_CLOSE)

    def as_expected(self, findings: Findings) -> bool:
        """Whether an unsafe protocol was found out, and a safe one broke nothing else."""
        if self.unsafe:
            return self.breaks in findings.kinds
        return findings.kinds == ({self.breaks} if self.breaks else set())


def _mutant(name: str, files: type[MutantFiles], breaks: str | None, *without: Guard) -> Mutant:
    name = "-".join([name, *(f"without-{guard.value}" for guard in without)])
    return Mutant(name, files, breaks, frozenset(without))


_M, _E, _T, _C = Guard.MARKER, Guard.EPOCH, Guard.MTIME, Guard.CHECKSUM

MUTANTS: tuple[Mutant, ...] = (
    _mutant("no-c2", NoC2, WRONG_KV),
    _mutant("c2-retried", C2Retried, WRONG_KV),
    _mutant("no-o5-sync", NoO5Sync, None),
    _mutant("no-o5-sync", NoO5Sync, WRONG_KV, _E),
    _mutant("no-o6-sync", NoO6Sync, None),
    _mutant("no-o6-sync", NoO6Sync, WRONG_KV, _M),
    _mutant("reopen", MutantFiles, None, _M, _T),
    _mutant("reopen", MutantFiles, None, _E, _T),
    _mutant("reopen", MutantFiles, WRONG_KV, _M, _E),
    _mutant("no-c4-temp-sync", NoC4TempSync, COLD_CLOSE),
    _mutant("no-c4-temp-sync", NoC4TempSync, WRONG_KV, _C),
    _mutant("no-c4-directory-sync", NoC4DirectorySync, COLD_CLOSE),
    _mutant("no-c4-directory-sync", NoC4DirectorySync, WRONG_KV, _E, _T),
    _mutant("c5-before-c4", C5BeforeC4, None),
    _mutant("c5-before-c4", C5BeforeC4, None, _E),
    _mutant("c5-before-c4", C5BeforeC4, WRONG_KV, _E, _T),
    _mutant("no-c5-sync", NoC5Sync, COLD_CLOSE),
    _mutant("one-slot", OneSlot, REFUSED),
    _mutant("no-sync-before-slot", NoSyncBeforeSlot, REFUSED),
    _mutant("no-f6", NoF6, REFUSED),
    _mutant("fixed-temp-names", FixedTempNames, REFUSED),
    _mutant("parent-synced-by-its-maker-only", ParentSyncedByItsMakerOnly, REFUSED),
)
