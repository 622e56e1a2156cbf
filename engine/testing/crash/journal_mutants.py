"""Journal protocols with one rule taken out: the explorer must find what each of them breaks.

Owns the table. What is a matter of files is changed in the file seam, what is a rule of the engine
or of a reader in the one function that it lives in; all else is the real code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rangekv.engine import journals, store
from rangekv.engine.commits import Committer
from rangekv.engine.folder import JOURNAL, MARKER, PACK
from rangekv.engine.index.ledger import Ledger
from rangekv.engine.recovery import Remains
from rangekv.engine.reopen import Verdict
from rangekv.engine.testing import mutants as engine_mutants
from rangekv.engine.testing.crash.findings import CAME_BACK, NOT_KEPT, WRONG_KV
from rangekv.engine.testing.crash.guards import Guard
from rangekv.engine.testing.crash.mutants import Mutant, MutantFiles
from rangekv.engine.testing.crash.operations import FailedSync, Leave, Sync, Write
from rangekv.engine.testing.crash.scenarios import JOURNAL_SCENARIOS
from rangekv.engine.testing.crash.told import JOURNAL_TEMP
from rangekv.format import journal, replay
from rangekv.format.checksum import Octets
from rangekv.format.entries import Entry, Reset
from rangekv.format.geometry import DATA_OFFSET

if TYPE_CHECKING:
    from rangekv.engine.pack import Pack
    from rangekv.format.superblock import Superblock

Patch = Callable[[], AbstractContextManager[None]]


class JournalMutantFiles(MutantFiles):
    def is_commit(self, fd: int) -> bool:
        """Whether the pack is synced for a commit (J2): not around a superblock."""
        last = self.last()
        wrote = isinstance(last, Write) and last.name == PACK and last.offset >= DATA_OFFSET
        told = isinstance(last, Sync) and last.name.startswith(JOURNAL_TEMP)
        return self.name(fd) == PACK and (wrote or told)


class NoJ2(JournalMutantFiles):
    def fdatasync(self, fd: int) -> None:
        if not self.is_commit(fd):
            super().fdatasync(fd)


class J2Failed(JournalMutantFiles):
    def fdatasync(self, fd: int) -> None:
        if self.is_commit(fd):  # and nobody is told
            self.do(FailedSync(self._handles[fd].key, PACK))
        else:
            super().fdatasync(fd)


class NoJ4(JournalMutantFiles):
    def fdatasync(self, fd: int) -> None:
        if not self.name(fd).startswith(JOURNAL_TEMP):
            super().fdatasync(fd)


class JournalStaysAtClose(JournalMutantFiles):
    def unlink(self, dir_fd: int, name: str) -> None:
        if name != JOURNAL or self.last_named(dir_fd) != (Leave, MARKER):
            super().unlink(dir_fd, name)


def _rewritten(owner: Any, function: str, old: str, new: str) -> Patch:
    """One function with `old` replaced by `new`."""
    return engine_mutants.Mutant("crash", owner, function, old, new, ()).put_in


@contextmanager
def _put(owner: Any, name: str, value: object) -> Iterator[None]:
    real = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, real)


def _before(step: str, other: str) -> Patch:
    """A checkpoint that takes another step before one of its own."""
    return _rewritten(store.Store, "checkpoint", step, f"{other}\n        {step}")


def _preceded_by(step: Callable[[Pack, Superblock], object]) -> Patch:
    """An open that takes a step before O5a; it is given the superblock of the session."""
    settle = store._settle_accepted

    def settled(pack: Pack, accepted: Superblock, verdict: Verdict) -> None:
        step(pack, _session(pack, accepted))
        settle(pack, accepted, verdict)

    return lambda: _put(store, "_settle_accepted", settled)


def _followed_by(step: Callable[[Pack, Superblock], object]) -> Patch:
    """An open that takes a step between O5a and O5b."""
    settle = store._settle_accepted

    def settled(pack: Pack, accepted: Superblock, verdict: Verdict) -> None:
        settle(pack, accepted, verdict)
        step(pack, _session(pack, accepted))

    return lambda: _put(store, "_settle_accepted", settled)


def _session(pack: Pack, accepted: Superblock) -> Superblock:
    sequence = pack.choose(pack.read_slots()).sequence + 1
    return replace(accepted, sequence=sequence, epoch=accepted.epoch + 1)


def _mark(pack: Pack, session: Superblock) -> None:
    store._mark_dirty(pack.folder, session, keep_journal=True)


def _write_slot(pack: Pack, session: Superblock) -> None:
    pack.write_slot(pack.read_slots(), session)


def _keeps_journal() -> AbstractContextManager[None]:
    mark = store._mark_dirty
    return _put(
        store, "_mark_dirty", lambda folder, session, **_: mark(folder, session, keep_journal=True)
    )


@contextmanager
def _settles_all() -> Iterator[None]:
    """What was over at the end of a checkpoint counts as told, not only what was at its cut."""
    settled = _rewritten(Ledger, "settled", "max(self._durable, event)", "self._event")
    committed = _rewritten(Ledger, "committed", "= cut.event", "= max(self._durable, cut.event)")
    with settled(), committed():
        yield


def _resets_last() -> AbstractContextManager[None]:
    """A RESET takes effect after everything else that its commit says."""
    real = journal.Frame.entries

    def entries(self: journal.Frame, limits: Any) -> list[Entry]:
        return sorted(real(self, limits), key=lambda entry: isinstance(entry, Reset))

    return _put(journal.Frame, "entries", entries)


def _decode_past(data: Octets) -> journal.Journal:
    """Read every frame that holds, whatever lies between them."""
    view = memoryview(data)
    header = journal.JournalHeader.decode(view)
    frames: list[journal.Frame] = []
    at = journal.HEADER_BYTES
    while at < len(view):
        frame = journal.frame_at(view, at, header.epoch)
        if frame is not None:
            frames.append(frame)
        at += journal.FRAME_ALIGN if frame is None else frame.size
    return journal.Journal(header, tuple(frames), len(view), 0)


_SCENARIO_OF = {scenario.name: scenario for scenario in JOURNAL_SCENARIOS}


def _mutant(
    name: str,
    breaks: str | None,
    scenario: str,
    change: type[MutantFiles] | Patch,
    *without: Guard,
    crashes: int = 1,
) -> Mutant:
    name = "-".join([name, *(f"without-{guard.value}" for guard in without)])
    files, patch = (change, nullcontext) if isinstance(change, type) else (MutantFiles, change)
    return Mutant(name, files, breaks, frozenset(without), _SCENARIO_OF[scenario], patch, crashes)


_NO_PACK_SYNC = _rewritten(store, "_settle_accepted", "    pack.sync()\n", "")
_PUBLISH = "snapshots.publish(self._pack, superblock, tables)"

JOURNAL_MUTANTS: tuple[Mutant, ...] = (
    # -- commits ---------------------------------------------------------------------------------
    _mutant("no-j2", WRONG_KV, "journal-grow", NoJ2),
    _mutant("j2-failed", WRONG_KV, "journal-grow", J2Failed),
    _mutant("no-j4", NOT_KEPT, "journal-grow", NoJ4),
    _mutant(
        "reuse-before-durable-retire",
        WRONG_KV,
        "journal-evict",
        _rewritten(Ledger, "retired", "return self._event", "return 0"),
    ),
    _mutant(
        "reuse-after-one-commit",
        WRONG_KV,
        "journal-evict",
        _rewritten(Ledger, "committed", "= self._durable", "= cut.event"),
    ),
    _mutant(
        "reset-returns-early",
        CAME_BACK,
        "journal-forget",
        lambda: _put(Committer, "settle", lambda *_: None),
    ),
    _mutant(
        "given-up-without-directory-sync",
        WRONG_KV,
        "journal-failed",
        _rewritten(journals, "discard", "folder.sync()", "pass"),
    ),
    _mutant(
        "given-up-but-not-removed",
        WRONG_KV,
        "journal-failed",
        lambda: _put(journals, "discard", lambda *_: None),
    ),
    _mutant(
        "close-after-failed-j2",
        WRONG_KV,
        "journal-failed",
        _rewritten(store.Store, "close", "if self._pack_failed:", "if False:"),
    ),
    # -- replay ----------------------------------------------------------------------------------
    _mutant(
        "retire-keeps-descendants",
        NOT_KEPT,  # what is left contradicts itself, and all of it is refused
        "journal-forget",
        _rewritten(replay._State, "_retire", "waiting += node.children", "pass"),
    ),
    _mutant(
        "displaced-record-stays",
        NOT_KEPT,
        "journal-grow",
        _rewritten(replay._State, "_add", "self._retire(evicted)", "pass"),
    ),
    _mutant("reset-frees-later-extents", NOT_KEPT, "journal-forget", _resets_last),
    _mutant(
        "replay-past-a-bad-frame",
        WRONG_KV,
        "journal-evict",
        lambda: _put(journal, "decode", _decode_past),
    ),
    _mutant(
        "no-damage-rule",
        WRONG_KV,
        "journal-evict",
        lambda: _put(journal, "stray_frame", lambda *_: None),
    ),
    # -- which journal belongs to which snapshot -------------------------------------------------
    _mutant(
        "any-epoch-pair",
        NOT_KEPT,
        "journal-once",
        _rewritten(Remains, "follows", "journal.header.epoch == envelope.epoch + 1", "True"),
        crashes=2,
    ),
    _mutant(
        "any-superblock-of-a-pair",
        None,  # while every open that keeps no journal removes it, and a cold one takes the epoch
        "journal-discard",
        _rewritten(
            Remains,
            "doubt",
            "superblock.epoch not in (envelope.epoch, envelope.epoch + 1)",
            "False",
        ),
    ),
    _mutant(
        "only-the-newer-superblock-of-a-pair",
        NOT_KEPT,
        "journal-grow",
        _rewritten(
            Remains,
            "doubt",
            "superblock.epoch not in (envelope.epoch, envelope.epoch + 1)",
            "superblock.epoch != envelope.epoch + 1",
        ),
    ),
    _mutant("journal-stays-without-recovery", WRONG_KV, "journal-discard", _keeps_journal),
    _mutant(
        "journal-stays-at-close",
        None,  # its epoch is that of the new snapshot, so it follows none
        "journal-once",
        JournalStaysAtClose,
        crashes=2,
    ),
    # -- the order of an open --------------------------------------------------------------------
    _mutant(
        "no-pack-sync-in-o5a",
        None,  # a replay names only what J2 has synced, and a dirty store's times are not compared
        "journal-once",
        _NO_PACK_SYNC,
        crashes=2,
    ),
    _mutant(
        "no-pack-sync-in-o5a", NOT_KEPT, "journal-once", _NO_PACK_SYNC, Guard.MARKER, crashes=2
    ),
    _mutant(
        "no-directory-sync-in-o5a",
        NOT_KEPT,
        "journal-once",
        _rewritten(store, "_settle_accepted", "pack.folder.sync()", "pass"),
        crashes=2,
    ),
    _mutant("o5-before-o5a", NOT_KEPT, "journal-once", _preceded_by(_mark), crashes=2),
    _mutant("o5-before-o5b", NOT_KEPT, "journal-once", _followed_by(_mark), crashes=2),
    _mutant("o6-before-o5b", NOT_KEPT, "journal-once", _followed_by(_write_slot), crashes=2),
    _mutant(
        "cold-open-without-empty-snapshot",
        NOT_KEPT,
        "journal-discard",
        _rewritten(
            store,
            "_settle_accepted",
            "if verdict.reason is None and not verdict.commits:",
            "if verdict.reason is not None or not verdict.commits:",
        ),
        crashes=2,
    ),
    _mutant(
        "cold-open-with-superblock-epoch",
        None,  # what an earlier session left is gone before a byte of this one is written
        "journal-discard",
        _rewritten(
            Verdict, "epoch", "return max([superblock.epoch, *own])", "return superblock.epoch"
        ),
    ),
    # -- checkpoints -----------------------------------------------------------------------------
    _mutant(
        "checkpoint-without-c2",
        WRONG_KV,
        "journal-checkpoint",
        _rewritten(store.Store, "checkpoint", "self._pack.sync()", "pass"),
    ),
    _mutant(
        "checkpoint-without-o6",
        NOT_KEPT,
        "journal-checkpoint",
        _rewritten(
            store.Store,
            "checkpoint",
            "self._slots = self._pack.write_slot(self._slots, session)",
            "pass",
        ),
    ),
    _mutant(
        "k4-before-k3",
        NOT_KEPT,
        "journal-checkpoint",
        _before(_PUBLISH, "JournalFile.create(self._pack.folder, session).close()"),
    ),
    _mutant(
        "k5-before-k3",
        NOT_KEPT,
        "journal-checkpoint",
        _before(_PUBLISH, "self._pack.write_slot(self._slots, session)"),
    ),
    _mutant(
        "k5-before-k4",
        NOT_KEPT,
        "journal-checkpoint",
        _before("journal, old =", "self._pack.write_slot(self._slots, session)"),
    ),
    _mutant(
        "retired-after-the-cut-is-reused",
        WRONG_KV,
        "journal-checkpoint",
        _settles_all,
    ),
)
