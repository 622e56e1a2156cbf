"""Engines with one rule taken out: each must be caught by a fault case, or the cases prove nothing.

Owns the mutants and how they are put in and taken out; each changes a line of the engine's text.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from rangekv.engine import reopen, store
from rangekv.engine.commits import Committer
from rangekv.engine.engine import Engine
from rangekv.engine.events import EventQueue
from rangekv.engine.index import image
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.leases import LeaseTable
from rangekv.engine.index.ledger import Ledger
from rangekv.engine.index.tickets import Ticket
from rangekv.engine.payload.pool import WorkerPool
from rangekv.engine.payload.posix import PosixPayload
from rangekv.engine.recovery import Remains
from rangekv.engine.store import Store
from rangekv.engine.transfer import gather, verify
from rangekv.engine.transfer.banks import BankSet
from rangekv.engine.transfer.desk import TicketDesk
from rangekv.engine.transfer.restore import Restore
from rangekv.engine.transfer.restores import RestoreCoordinator
from rangekv.engine.transfer.save import Save
from rangekv.engine.transfer.saves import SaveCoordinator
from rangekv.format.errors import ensure


@dataclass(frozen=True, slots=True)
class Mutant:
    """One function with `old` replaced by `new`, and the cases one of which must see it."""

    name: str
    owner: Any
    function: str
    old: str
    new: str
    cases: tuple[str, ...]

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Run the body with the mutant in the engine's place."""
        original = inspect.getattr_static(self.owner, self.function)
        real: Any = original.fget if isinstance(original, property) else original
        assert isinstance(real, FunctionType)
        text = textwrap.dedent(inspect.getsource(real))
        ensure(text.count(self.old) == 1, f"mutant {self.name} has lost its place")
        text = text.replace(self.old, self.new).removeprefix("@property\n")
        found: dict[str, Any] = {}
        exec(
            compile(f"from __future__ import annotations\n{text}", self.name, "exec"),
            real.__globals__,
            found,
        )
        mutated = found[self.function]
        wrapped = property(mutated) if isinstance(original, property) else mutated
        setattr(self.owner, self.function, wrapped)
        try:
            yield
        finally:
            setattr(self.owner, self.function, original)


MUTANTS: tuple[Mutant, ...] = (
    # -- tickets -----------------------------------------------------------------------------------
    Mutant(
        "a claim's tokens are not compared",
        Ticket,
        "check",
        "if tokens[:promised] != self.tokens[:promised]:",
        "if False:",
        ("ticket.claim.altered-tokens-first", "ticket.claim.altered-tokens-last"),
    ),
    Mutant(
        "a claim's session is not compared",
        Ticket,
        "check",
        "if (self.rank, self.session, self.epoch) != (rank, session, epoch):",
        "if False:",
        ("ticket.claim.wrong-rank", "ticket.claim.wrong-session"),
    ),
    Mutant(
        "a claim's generations are not compared",
        Ticket,
        "check",
        "if not self.valid():",
        "if False:",
        ("ticket.claim.retired-generation", "ticket.claim.reused-generation"),
    ),
    Mutant(
        "a ticket can be claimed twice",
        TicketDesk,
        "claim",
        "ticket.state = TicketState.CLAIMED",
        "pass",
        ("ticket.claim.double-claim", "ticket.lookup.while-claimed"),
    ),
    Mutant(
        "a key's tokens are not compared at a repeated lookup",
        TicketDesk,
        "lookup",
        "if (known.root, known.tokens) != (root, tokens):",
        "if False:",
        ("ticket.lookup.other-tokens-first", "ticket.lookup.other-tenant"),
    ),
    Mutant(
        "a ticket's deadline needs somebody to look",
        EventQueue,
        "at",
        "if self._thread is None and not self._closed:",
        "if False:",
        ("ticket.release.never-claimed",),
    ),
    Mutant(
        "an engine gives back tickets of another",
        TicketDesk,
        "release",
        "and self.open.get(ticket.key) is ticket",
        "",
        ("ticket.claim.wrong-session",),
    ),
    Mutant(
        "a refused claim keeps its lease",
        TicketDesk,
        "claim",
        "    except RangeError:\n        self.release(ticket)\n",
        "    except RangeError:\n",
        ("ticket.claim.altered-tokens-first",),
    ),
    # -- leases and extents ------------------------------------------------------------------------
    Mutant(
        "a lease is not counted on its extent",
        LeaseTable,
        "take",
        "self._extents.hold(record.extent)",
        "pass",
        ("ticket.claim.eviction-since-lookup", "ticket.lookup.same-again"),
    ),
    Mutant(
        "a lease is never given back",
        LeaseTable,
        "release",
        "self._extents.drop(record.extent)",
        "pass",
        ("ticket.lookup.same-again",),
    ),
    Mutant(
        "eviction ignores leases",
        Catalog,
        "_evictable",
        "extent.references == len(records) and ",
        "",
        ("ticket.claim.eviction-since-lookup", "extent.visible.evicted-during-read"),
    ),
    Mutant(
        "retiring a record keeps what hangs on it",
        Catalog,
        "retire",
        "reversed(self.directory.subtree(record))",
        "[record]",
        ("extent.visible.damaged-with-descendants", "extent.retired.parent-of-a-save"),
    ),
    Mutant(
        "a reset forgets nothing",
        Catalog,
        "retire_all",
        "self.retire(record)",
        "pass",
        ("ticket.claim.retired-generation",),
    ),
    Mutant(
        "the append mark is lowered when a save fails",
        Catalog,
        "void",
        "reservation.state = ReservationState.VOID",
        "reservation.state = ReservationState.VOID\n"
        "    for part in reservation.parts:\n"
        "        part.extent.append_mark_tokens = part.extent_token_start",
        ("extent.reserved.append-after-failed-append",),
    ),
    Mutant(
        "two saves append to one extent",
        Catalog,
        "_grows",
        "and not extent.growing",
        "",
        ("extent.reserved.two-appenders",),
    ),
    Mutant(
        "growth rewrites a piece with visible bytes",
        Catalog,
        "_grows",
        "and mark * self.geometry.token_bytes % ALIGNMENT == 0",
        "",
        ("extent.reserved.append-at-unaligned-token",),
    ),
    Mutant(
        "a child is visible before its parent",
        Catalog,
        "_reveal",
        "if parent is not None and parent.state is not RecordState.VISIBLE:",
        "if False:",
        ("save-bank.write.parent-fails",),
    ),
    Mutant(
        "space of a failed save is free before its writes returned",
        SaveCoordinator,
        "_abandon",
        "self._settle_if_done(save)",
        "self._catalog.settle(save.reservation); self.active.discard(save)",
        ("save-bank.write.late-after-the-failure", "save-bank.write.cancelled"),
    ),
    # -- saves -------------------------------------------------------------------------------------
    Mutant(
        "a save is published before its last write",
        Save,
        "outstanding",
        "return self.waiting + self.gathering + self.writing",
        "return self.waiting + self.gathering",
        ("save-bank.write.not-returned-yet", "save-bank.write.eio-layer-last"),
    ),
    Mutant(
        "a short write counts as whole",
        PosixPayload,
        "write",
        "if got != asked:",
        "if got > asked:",
        ("save-bank.write.short-layer-first", "save-bank.write.short-0"),
    ),
    Mutant(
        "a failed write is forgotten",
        SaveCoordinator,
        "_write_done",
        "self._fail(save, error)",
        "pass",
        ("save-bank.write.eio-layer-middle",),
    ),
    Mutant(
        "blocks are read after finish",
        SaveCoordinator,
        "_finish",
        "self._drop_waiting(save)",
        "self._flush(save)",
        ("save-bank.gather.source-freed-early",),
    ),
    Mutant(
        "cancel does not wait for a gather",
        SaveCoordinator,
        "cancel",
        "self.events.wait_for_proof(lambda: not save.gathering)",
        "pass",
        ("save-bank.gather.cancelled",),
    ),
    Mutant(
        "an unproved gather counts as done",
        gather,
        "_copy",
        ".wait()",
        ".wait() and FenceState.DONE",
        ("save-bank.gather.fence-unknown", "save-bank.gather.fence-failed"),
    ),
    Mutant(
        "a failed gather leaves its save open",
        SaveCoordinator,
        "_gather_done",
        "        self._fail(save, error or told or unproved)\n        self._settle_if_done(save)\n",
        "        self._fail(save, error or told or unproved)\n",
        ("save-bank.gather.raises-twice",),
    ),
    # -- restores ----------------------------------------------------------------------------------
    Mutant(
        "a bank is free before its cancelled read returned",
        RestoreCoordinator,
        "cancel",
        "restore.pending.clear()",
        "restore.pending.clear()\n"
        "    for bank in restore.reading.values():\n"
        "        bank.state = BankState.FREE\n"
        "        self.banks._free.append(bank)",
        ("read-bank.read.returns-after-cancel", "ticket.release.before-claim-reads-in-flight"),
    ),
    Mutant(
        "a bank is free at its deadline",
        RestoreCoordinator,
        "_expire",
        "self.banks.quarantine(bank)",
        "self.banks.release(bank, Evidence.IO_RETURNED)",
        ("read-bank.read.stands-still-past-its-deadline",),
    ),
    Mutant(
        "a late read is delivered",
        RestoreCoordinator,
        "_read_done",
        "if error is not None or expired or restore.state is RestoreState.CLOSED:",
        "if error is not None:",
        ("read-bank.read.returns-after-cancel", "read-bank.read.stands-still-past-its-deadline"),
    ),
    Mutant(
        "an unknown fence frees its bank",
        RestoreCoordinator,
        "_scatter_done",
        "if state in (None, FenceState.UNKNOWN, FenceState.PENDING):",
        "if False:",
        ("read-bank.scatter.fence-unknown",),
    ),
    Mutant(
        "an unproved copy makes its layer ready",
        RestoreCoordinator,
        "_scatter_done",
        "if state is FenceState.DONE:",
        "if True:",
        ("read-bank.scatter.fence-failed", "read-bank.scatter.fence-unknown"),
    ),
    Mutant(
        "a failed range is not reported",
        RestoreCoordinator,
        "_fail_all",
        "restore.failed_ranges.add((begin, begin + segment.block_count))",
        "pass",
        ("read-bank.read.eio", "placement.read.eio"),
    ),
    Mutant(
        "a failed layer is ready",
        RestoreCoordinator,
        "_fail_all",
        "restore.layer_failed[segment.layer_index] = True",
        "pass",
        ("read-bank.read.eio",),
    ),
    Mutant(
        "finish does not wait for copies and direct reads",
        RestoreCoordinator,
        "finish",
        "self.events.wait_for_proof(lambda: not restore.scattering and not restore.placing)",
        "pass",
        ("read-bank.scatter.cancelled", "placement.read.finished-in-flight"),
    ),
    Mutant(
        "a stalled direct read is only reported as failed",
        RestoreCoordinator,
        "_expire",
        "if restore.placing:",
        "if False:",
        ("placement.read.stands-still-past-its-deadline",),
    ),
    Mutant(
        "reading ahead takes the last bank",
        RestoreCoordinator,
        "_pump",
        "banked=self.banks.free_count > 1",
        "banked=self.banks.free_count > 0",
        ("read-bank.free.prefetch-leaves-one",),
    ),
    Mutant(
        "all layers are read at once",
        Restore,
        "begin_read",
        "self._reads_allowed -= 1",
        "pass",
        ("read-bank.free.first-layer-first",),
    ),
    Mutant(
        "the disk is stalled when no bank is left",
        RestoreCoordinator,
        "stalled",
        "overdue >= OVERDUE_MAX or",
        "False or",
        ("read-bank.free.stalled-but-for-most",),
    ),
    Mutant(
        "banks that were read ahead are never given back",
        RestoreCoordinator,
        "_read_ahead",
        "return next(ahead, None)",
        "return None",
        ("read-bank.free.taken-back",),
    ),
    Mutant(
        "a checksum is not compared",
        verify,
        "_check",
        "if digest != run.expected[segment.layer_index, page]:",
        "if digest is None:",
        ("read-bank.read.bit-flip-first", "store.files.write-that-was-lost"),
    ),
    Mutant(
        "a short read counts as whole",
        PosixPayload,
        "read",
        "if got != asked:",
        "if got > asked:",
        ("read-bank.read.short-all-but-one", "read-bank.read.short-0"),
    ),
    Mutant(
        "a short direct read counts as whole",
        PosixPayload,
        "read_scattered",
        "if got != asked:",
        "if got > asked:",
        ("placement.read.short-all-but-one", "placement.read.short-0"),
    ),
    Mutant(
        "a bank is never quarantined",
        BankSet,
        "quarantine",
        "bank.state = BankState.QUARANTINED",
        "pass",
        ("read-bank.scatter.fence-unknown", "save-bank.gather.fence-unknown"),
    ),
    # -- threads and close -------------------------------------------------------------------------
    Mutant(
        "a worker dies of an exception that it does not know",
        WorkerPool,
        "_work",
        "except BaseException as caught:",
        "except OSError as caught:",
        ("read-bank.read.value-error", "save-bank.write.value-error"),
    ),
    Mutant(
        "writes take every thread",
        WorkerPool,
        "_room",
        "if priority is Priority.WRITE and writes >= self._writes_max:",
        "if False:",
        ("save-bank.write.reads-go-first",),
    ),
    Mutant(
        "a close does not wait for writes",
        Engine,
        "_close_store",
        "if drained and ended and fault is None:",
        "if ended and fault is None:",
        ("save-bank.write.in-flight-at-close",),
    ),
    Mutant(
        "the lock is dropped under a write",
        Engine,
        "_close_store",
        "self._pool.when_stopped(self._abandon)",
        "self.store.abandon()",
        ("save-bank.write.in-flight-at-close",),
    ),
    Mutant(
        "a failed sync at close is passed over",
        Store,
        "close",
        "self._pack.sync()",
        "import contextlib\n            with contextlib.suppress(OSError): self._pack.sync()",
        ("snapshot.clean.pack-fsync-eio",),
    ),
    Mutant(
        "a pack file that was written since is believed",
        reopen,
        "_modified",
        "if envelope.pack_mtime_ns == mtime_ns:",
        "if True:",
        ("snapshot.reopen.touched-pack",),
    ),
    Mutant(
        "a snapshot of another session is believed",
        Remains,
        "dirty",
        "return self.marker_exists or envelope.epoch != superblock.epoch",
        "return self.marker_exists",
        ("snapshot.reopen.old-epoch", "marker.present.deleted-by-hand-after-death"),
    ),
    # -- journal -----------------------------------------------------------------------------------
    Mutant(
        "a write into listed space is not held",
        SaveCoordinator,
        "_start_writes",
        "self._held.append((save, group, bank, writes))",
        "self._write(save, group, bank, writes)",
        ("journal.held.order", "journal.held.fdatasync-stands-still"),
    ),
    Mutant(
        "space is written again after one commit",
        Ledger,
        "committed",
        "self._reusable = self._durable",
        "self._reusable = cut.event",
        ("journal.held.order",),
    ),
    Mutant(
        "held writes of a cancelled save go on",
        SaveCoordinator,
        "resume",
        "if save.state not in (SaveState.OPEN, SaveState.FINISHING):",
        "if False:",
        ("journal.held.cancelled",),
    ),
    Mutant(
        "a write has no deadline",
        SaveCoordinator,
        "_start_writes",
        "self.events.at(self._deadline_s, self._expire, save, group, bank)",
        "None",
        ("journal.held.past-its-deadline",),
    ),
    Mutant(
        "a close waits for held writes in vain",
        Engine,
        "close",
        "self._events.post(self._saves.give_up_held)",
        "pass",
        ("journal.held.close",),
    ),
    Mutant(
        "what is published is not told",
        Ledger,
        "published",
        "self._unlisted[record] = None",
        "pass",
        ("journal.replaying.again-and-again",),
    ),
    Mutant(
        "what is forgotten for good is not told",
        Ledger,
        "gone",
        "elif for_good and self.active and record.listed:",
        "elif False:",
        ("journal.replaying.forgotten-in-a-living-extent",),
    ),
    Mutant(
        "nobody commits by the clock",
        Committer,
        "__init__",
        "min(interval_s, threading.TIMEOUT_MAX)",
        "threading.TIMEOUT_MAX",
        ("journal.idle.by-the-clock",),
    ),
    Mutant(
        "a reset returns before it is durable",
        Engine,
        "reset",
        "self._commits.settle(event)",
        "pass",
        ("journal.held.reset-waits",),
    ),
    Mutant(
        "a commit does not sync the pack",
        Store,
        "commit",
        "self._pack.files.fdatasync(self._pack.fd)",
        "pass",
        ("journal.committing.pack-sync-eio",),
    ),
    Mutant(
        "a failed sync of a commit is passed over",
        Store,
        "commit",
        "self._pack_failed = True\n"
        '        self._give_up_journal(error, "its pack file cannot be synced")\n'
        "        return False",
        "pass",
        ("journal.committing.pack-sync-eio",),
    ),
    Mutant(
        "a failed append counts as durable",
        Store,
        "commit",
        'self._give_up_journal(error, "it cannot be written")\n        return False',
        "pass",
        ("journal.committing.append-eio",),
    ),
    Mutant(
        "a close gives up the journal too",
        Store,
        "commit",
        "if last:",
        "if False:",
        ("journal.closing.disk-full",),
    ),
    Mutant(
        "a journal that is given up stays on disk",
        Store,
        "_give_up_journal",
        "journals.discard(self._pack.folder)",
        "pass",
        ("journal.committing.append-eio", "journal.closing.pack-fsync-eio"),
    ),
    Mutant(
        "saves go on where the pack cannot be synced",
        Engine,
        "save",
        "if self.store.pack_failed:",
        "if False:",
        ("journal.committing.pack-sync-eio",),
    ),
    Mutant(
        "an index is published over a pack that was not synced",
        Store,
        "close",
        "if self._pack_failed:",
        "if False:",
        ("journal.committing.pack-sync-eio", "journal.closing.pack-sync-eio"),
    ),
    Mutant(
        "space that a stuck journal names is written",
        Committer,
        "_after",
        "elif stuck:",
        "elif False:",
        ("journal.held.unlink-eio",),
    ),
    Mutant(
        "the lock is dropped under a commit",
        Engine,
        "_abandon",
        "self._commits.when_ended(self.store.abandon)",
        "self.store.abandon()",
        ("journal.committing.fdatasync-stands-still-at-close",),
    ),
    Mutant(
        "a superblock that a checkpoint cannot write is passed over",
        Store,
        "checkpoint",
        "self._slots = self._pack.write_slot(self._slots, session)  # K5: O6\n"
        "    except OSError as error:",
        "self._slots = self._pack.write_slot(self._slots, session)  # K5: O6\n"
        "    except ZeroDivisionError:",
        ("journal.checkpointing.slot-write-fails",),
    ),
    Mutant(
        "a checkpoint's snapshot is empty",
        image,
        "freeze",
        "catalog.directory",
        "type(catalog.directory)(16)",
        ("journal.checkpointing.writes-short",),
    ),
    Mutant(
        "a recovered state is not written before its journal goes",
        store,
        "_settle_accepted",
        "snapshots.publish(pack, accepted, tables)",
        "pass",
        ("journal.replaying.again-and-again",),
    ),
    Mutant(
        "a session without a journal leaves the one before",
        store,
        "_mark_dirty",
        "folder.unlink_if_there(JOURNAL)",
        "pass",
        ("journal.replaying.discarded",),
    ),
    Mutant(
        "a journal of another store is replayed",
        Remains,
        "follows",
        "and journal.header.store_uuid == envelope.store_uuid",
        "",
        ("journal.replaying.other-store",),
    ),
    Mutant(
        "a journal of another geometry is replayed",
        Remains,
        "doubt",
        "if self.journal.header.geometry_digest != envelope.geometry_digest:",
        "if False:",
        ("journal.replaying.other-geometry",),
    ),
    Mutant(
        "recovered pages are not verified",
        Engine,
        "_policy",
        'if self.config.verify == "off" and self.open_result.state == "recovered":',
        "if False:",
        ("journal.replaying.unverified",),
    ),
)
