"""Owns one rank's open store: the protocol steps O1 to O7 and C1 to C6, in their order, and the
journal of the session between them.

Whatever it cannot prove makes the store cold, never wrong; records, leases and payload are
the engine's, and nothing here interprets them.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from rangekv.engine import binding, journals, markers, snapshots
from rangekv.engine.create import Created, create, new_uuid
from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.folder import JOURNAL, MARKER, Folder
from rangekv.engine.journals import JournalFile
from rangekv.engine.pack import Pack, Slots
from rangekv.engine.reformat import reformat
from rangekv.engine.reopen import Verdict, judge
from rangekv.format.entries import Entry, Publish
from rangekv.format.errors import (
    ExitCode,
    InvariantError,
    OtherNamespace,
    UnsupportedVersion,
    ensure,
)
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.namespace import Namespace
from rangekv.format.superblock import Superblock
from rangekv.format.tables import Tables

__all__ = ["CloseResult", "Created", "OpenResult", "Store", "create", "reformat"]

logger = logging.getLogger("rangekv.engine")


@dataclass(frozen=True, slots=True)
class OpenResult:
    """How an open went. `reason` is None for warm, else one stable code."""

    state: Literal["warm", "recovered", "cold"]
    reason: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class CloseResult:
    """How a close went: clean reopens warm, dirty with what the journal proves, if there is one."""

    state: Literal["clean", "dirty"]
    exit_code: ExitCode
    detail: str


UNRETURNED = CloseResult(
    "dirty",
    ExitCode.UNRETURNED_WRITE,
    "a native write has not returned; the store stays dirty",
)
UNRETURNED_COMMIT = CloseResult(
    "dirty",
    ExitCode.UNRETURNED_WRITE,
    "a commit has not returned; the store stays dirty, with what its journal holds",
)


class Store:
    """An open, locked store of one rank.

    `tables` is the accepted index, None when the open was cold; the engine takes it over.
    `pack_fd` belongs to the store: payload is read and written through it until `close` begins,
    and nobody else closes it. `journal` is None when the session keeps none, or none any more.
    Not thread-safe; one owner opens and closes, and commits in between.
    """

    def __init__(
        self,
        pack: Pack,
        superblock: Superblock,
        open_result: OpenResult,
        tables: Tables | None,
        journal: JournalFile | None,
        slots: Slots,
    ) -> None:
        if superblock.geometry is None or superblock.namespace is None:
            raise InvariantError("invariant", "a blank store was opened without being bound")
        self._pack = pack
        self._slots = slots
        # A checkpoint raises the epoch of the store, the engine run stays what it is.
        self._session = f"{superblock.store_uuid.hex()}-{superblock.epoch}"
        self._open = True
        self.superblock = superblock
        self.geometry: Geometry = superblock.geometry
        self.namespace: Namespace = superblock.namespace
        self.open_result = open_result
        self.tables = tables
        self.journal = journal
        self._pack_failed = False

    @classmethod
    def open(
        cls,
        path: str,
        *,
        namespace: Namespace,
        model: ModelGeometry,
        files: Files = OS_FILES,
        lock_wait_s: float = 0.5,
        rank: int = 0,
        world_size: int = 1,
        allow_buffered: bool = False,
        recover: bool = False,
    ) -> Store:
        """Open the store in directory `path` to write; a blank one is bound first.

        With `recover` what the journal of an unclosed session proves is kept, and a new one begins.

        Raises StoreMissing, StoreLocked, OtherNamespace, NotAStore, UnsupportedVersion,
        UsageError and EnvironmentFault; then nothing on disk has changed, except that a failed
        sync or write past O4 leaves the store dirty.
        """
        with ExitStack() as undo:
            folder = Folder.open(files, path)
            undo.callback(folder.close)
            pack = Pack.open_to_write(  # O1
                folder, lock_wait_s=lock_wait_s, allow_buffered=allow_buffered
            )
            undo.callback(pack.close)
            slots = pack.read_slots()  # O2
            superblock = pack.choose(slots)
            _require_own(
                superblock, folder.path, namespace, model, rank=rank, world_size=world_size
            )
            slots, superblock = binding.settle(pack, slots, superblock, namespace, model)
            with translated(folder.path, "examine the store"):
                verdict = judge(pack, superblock, recover=recover)  # O3, O4
            epoch = verdict.epoch(superblock, slots)
            accepted = _accepted(pack, superblock, verdict, epoch)
            session = replace(accepted, sequence=superblock.sequence + 1, epoch=epoch + 1)
            with translated(folder.path, "open the store to write"):
                journal = None
                if recover:
                    _settle_accepted(pack, accepted, verdict)  # O5a
                    journal = JournalFile.create(folder, session)  # O5b
                    undo.callback(journal.close)
                _mark_dirty(folder, session, keep_journal=recover)  # O5
                slots = pack.write_slot(slots, session)  # O6
            tables = verdict.tables if verdict.reason is None else None
            store = cls(pack, session, _open_result(verdict), tables, journal, slots)
            undo.pop_all()
        logger.log(
            logging.INFO if verdict.same_file else logging.WARNING,
            "store open path=%s state=%s reason=%s epoch=%d detail=%r",
            store.path,
            store.open_result.state,
            store.open_result.reason,
            store.epoch,
            store.open_result.detail,
        )
        return store  # O7

    @property
    def path(self) -> str:
        """The store's directory; a blank store has moved to its namespace's folder."""
        return self._pack.folder.path

    @property
    def files(self) -> Files:
        return self._pack.files

    @property
    def pack_fd(self) -> int:
        return self._pack.fd

    @property
    def io_path(self) -> Literal["posix-direct", "posix-buffered"]:
        return "posix-direct" if self._pack.direct else "posix-buffered"

    @property
    def filesystem(self) -> str:
        return self._pack.filesystem

    @property
    def epoch(self) -> int:
        return self.superblock.epoch

    @property
    def session(self) -> str:
        """Name of this engine run: store and epoch."""
        return self._session

    def commit(self, said: Sequence[Entry], generation_max: int, *, last: bool = False) -> bool:
        """Make durable what `said` names, then that it was said; return whether both are.

        Where the journal cannot be written it is given up, and with it the snapshot on disk: the
        session goes on without. Behind the `last` commit of a session nothing is written that a
        replay could mistake, so both stay. Where the pack file cannot be synced, nothing may be
        saved any more either (`pack_failed`). Raises OSError when even giving up is not durable.
        """
        ensure(self._open and self.journal is not None, "a commit without a journal")
        assert self.journal is not None
        try:
            if any(isinstance(entry, Publish) for entry in said):
                self._pack.files.fdatasync(self._pack.fd)  # J2
        except OSError as error:
            self._pack_failed = True
            self._give_up_journal(error, "its pack file cannot be synced")
            return False
        try:
            self.journal.append(said, generation_max)
        except OSError as error:
            if last:
                logger.warning(
                    "store journal path=%s: the last commit failed: %s", self.path, error.strerror
                )
            else:
                self._give_up_journal(error, "it cannot be written")
            return False
        return True

    def checkpoint(self, tables: Tables) -> bool:
        """Begin a new journal on top of `tables`, the state of the last cut (K1); whether it did.

        Every byte that `tables` names was written before the call; others may be written meanwhile.
        What fails costs the journal, as in `commit`. Raises OSError as `commit` does.
        """
        ensure(self._open and self.journal is not None, "a checkpoint without a journal")
        try:
            self._pack.sync()  # K2: C2
        except OSError as error:
            self._pack_failed = True
            self._give_up_journal(error, "its pack file cannot be synced")
            return False
        superblock = self.superblock
        session = replace(superblock, sequence=superblock.sequence + 1, epoch=superblock.epoch + 1)
        try:
            snapshots.publish(self._pack, superblock, tables)  # K3: C3, C4
            journal, old = JournalFile.create(self._pack.folder, session), self.journal  # K4: O5b
            self.journal = journal
            if old is not None:
                old.close()
        except OSError as error:
            self._give_up_journal(error, "a new one cannot be begun")
            return False
        try:
            self._slots = self._pack.write_slot(self._slots, session)  # K5: O6
        except OSError as error:
            # It syncs the pack file too, and which epoch the store has is not known any more.
            self._pack_failed = True
            self._give_up_journal(error, "its superblock cannot be written")
            return False
        self.superblock = session
        return True

    @property
    def pack_failed(self) -> bool:
        """Whether bytes that were written may not be durable, and never will be provably."""
        return self._pack_failed

    def _give_up_journal(self, error: OSError, why: str) -> None:
        """Say why and remove journal and snapshot; raises OSError when that is not durable."""
        if self.journal is not None:
            logger.warning(
                "store journal path=%s is given up: %s: %s; a session that does not close loses "
                "the index",
                self.path,
                why,
                error.strerror,
            )
        journal, self.journal = self.journal, None
        if journal is not None:
            journal.close()
        journals.discard(self._pack.folder)

    def close(self, tables: Tables | None) -> CloseResult:
        """Publish `tables` and release the store. No write may be in flight or begin (C1).

        With None (a native write never returned) the store stays dirty. A failed sync is never
        repeated: file systems mark the pages clean, and a second one would lie.
        """
        if tables is None:
            self.abandon()
            return UNRETURNED
        ensure(self._open, "a store is closed once")
        folder = self._pack.folder
        try:
            if self._pack_failed:
                raise OSError(errno.EIO, "a sync of the pack file has failed before")
            try:
                self._pack.sync()  # C2
            except OSError as error:
                self._pack_failed = True
                self._give_up_journal(error, "its pack file cannot be synced")
                raise
            snapshots.publish(self._pack, self.superblock, tables)  # C3, C4
            folder.unlink_if_there(MARKER)  # C5
            if self.journal is not None:
                folder.unlink_if_there(JOURNAL)  # C5
            folder.sync()  # C5
        except OSError as error:
            detail = f"cannot publish the index: {error.strerror}; {self._left()}"
            return CloseResult("dirty", ExitCode.ENVIRONMENT, detail)
        finally:
            self.abandon()  # C6
        return CloseResult("clean", ExitCode.OK, f"{len(tables.records)} records kept")

    def _left(self) -> str:
        if self.journal is None:
            return "the store reopens cold"
        return f"the store reopens with what its journal holds ({self.journal.commit} commits)"

    def abandon(self) -> None:
        """Close the descriptors and drop the lock, leaving on disk what is there."""
        if self._open:
            self._open = False
            if self.journal is not None:
                self.journal.close()
            self._pack.close()
            self._pack.folder.close()


def _require_own(
    superblock: Superblock,
    path: str,
    namespace: Namespace,
    model: ModelGeometry,
    *,
    rank: int,
    world_size: int,
) -> None:
    """Refuse a store of another namespace, geometry or rank, or one that is only to be read."""
    if not superblock.writable:
        raise UnsupportedVersion(
            "unsupported-version",
            f"feature bits {superblock.feature_ro_compat:#x} allow reading only; "
            "use the Range that wrote it",
            path=path,
        )
    if (superblock.rank, superblock.world_size) != (rank, world_size):
        raise OtherNamespace(
            "other-rank",
            f"this is the store of rank {superblock.rank} of {superblock.world_size}, "
            f"expected rank {rank} of {world_size}; give the path of the rank's own store",
            path=path,
        )
    if superblock.geometry is None or superblock.namespace is None:
        return
    if superblock.namespace != namespace:
        differing = ", ".join(
            f"{key} {theirs!r} (expected {mine!r})"
            for key, mine, theirs in namespace.differences(superblock.namespace)
        )
        raise OtherNamespace(
            "other-namespace",
            f"the store belongs to another namespace: {differing}; give another directory, or "
            "empty this one with rangectl format",
            path=path,
        )
    if superblock.geometry.model != model:
        raise OtherNamespace(
            "other-geometry",
            f"the store holds {superblock.geometry.model}, expected {model}; "
            "give another directory",
            path=path,
        )


def _accepted(pack: Pack, superblock: Superblock, verdict: Verdict, epoch: int) -> Superblock:
    """Return the superblock under which the accepted state counts, at `epoch`.

    A copy becomes a store of its own, so that the two can never be taken for each other.
    """
    if verdict.same_file:
        return replace(superblock, epoch=epoch)
    return replace(
        superblock,
        epoch=epoch,
        store_uuid=new_uuid(pack.files),
        identity=verdict.identity,
        fs_magic=pack.fs_magic,
    )


def _settle_accepted(pack: Pack, accepted: Superblock, verdict: Verdict) -> None:  # O5a
    """Make the snapshot on disk that of the accepted state: a journal changes what it holds."""
    pack.sync()
    if verdict.reason is None and not verdict.commits:
        pack.folder.sync()
        return
    tables = Tables.empty() if verdict.reason is not None else verdict.tables
    ensure(tables is not None, "a state was accepted without its tables")
    assert tables is not None
    snapshots.publish(pack, accepted, tables)


def _mark_dirty(folder: Folder, session: Superblock, *, keep_journal: bool) -> None:  # O5
    """Make the marker durable before any payload byte may change; raises OSError."""
    markers.write(folder, session)
    if not keep_journal:
        # One of an earlier session must not survive what this session does not tell it.
        folder.unlink_if_there(JOURNAL)
    folder.sweep_temps()
    folder.sync()


def _open_result(verdict: Verdict) -> OpenResult:
    return OpenResult(verdict.state, verdict.reason, verdict.line or "the snapshot was accepted")
