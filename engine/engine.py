"""Owns the engine's public face: open, attach, lookup, claim, save, reset, stats, close.

It joins the parts and holds the lock around them; it decides nothing that a part can decide.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from rangekv.engine.commits import Committer
from rangekv.engine.config import EngineConfig
from rangekv.engine.devices.open import open_device
from rangekv.engine.events import EventQueue
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.index import image
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.directory import TOKEN_BYTES, Match, Record, RecordState
from rangekv.engine.index.tickets import (
    RequestKey,
    Ticket,
    TicketState,
    pack_block_ids,
    pack_tokens,
)
from rangekv.engine.payload.io import PayloadIO
from rangekv.engine.payload.path import open_payload
from rangekv.engine.payload.pool import WorkerPool
from rangekv.engine.stats import Counters, Stats, flatten
from rangekv.engine.store import UNRETURNED, UNRETURNED_COMMIT, CloseResult, OpenResult, Store
from rangekv.engine.transfer.bank_sizes import bank_sizes
from rangekv.engine.transfer.banks import BankSet
from rangekv.engine.transfer.desk import TicketDesk
from rangekv.engine.transfer.restore import Restore
from rangekv.engine.transfer.restores import RestoreCoordinator
from rangekv.engine.transfer.save import Save
from rangekv.engine.transfer.saves import SaveCoordinator
from rangekv.format.checksum import Octets
from rangekv.format.errors import ExitCode, UsageError
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.layout import COUNTER_MAX
from rangekv.format.namespace import Namespace
from rangekv.format.tables import Tables

log = logging.getLogger("rangekv.engine")

# Below it, direct I/O into many small places costs more than one copy (restore-benchmark).
DIRECT_BLOCK_BYTES_MIN = 64 * 1024


BAD_RECORDS_KEPT = 64  # for whoever must tell other ranks


class EngineState(Enum):
    """SERVING until close begins; CLOSED afterwards, whatever the outcome."""

    SERVING = "serving"
    CLOSED = "closed"


class Engine:
    """One rank's engine over one store. Thread-safe; use as a context manager or call close().

    A process that dies leaves the store dirty: what its journal holds (`recovery` journal) is kept,
    everything published later, or with `discard` everything, is lost.
    """

    def __init__(
        self,
        store: Store,
        config: EngineConfig,
        *,
        events: EventQueue | None = None,
        pool_type: type[WorkerPool] = WorkerPool,
        payload: Callable[..., PayloadIO] = open_payload,
    ) -> None:
        """Take over an open store; `open` is the usual way in.

        Tests give their own order of events, a queue with its clock and the pool that feeds it, and
        their own way of bytes.
        """
        self.config = config
        self.store = store
        self.geometry: Geometry = store.geometry
        self.epoch: int = store.epoch
        self.open_result: OpenResult = store.open_result
        self._state = EngineState.SERVING
        self._close_result: CloseResult | None = None
        self._counters = Counters()
        self._events = events or EventQueue()
        self._catalog = Catalog(self.geometry, self._counters)
        if store.tables is not None:
            image.load(self._catalog, store.tables)
        self._device = open_device(
            config.device, self.geometry.layer_count, self.geometry.block_bytes
        )
        sizes = bank_sizes(config, self.geometry, self._device.free_bytes())
        # One piece: a driver registers what it has allocated as one, and no part of it twice.
        read_bytes = config.read_banks * sizes.read
        memory = self._device.bank_memory(read_bytes + config.save_banks * sizes.save)
        self._read_banks = BankSet(config.read_banks, sizes.read, memory[:read_bytes])
        self._save_banks = BankSet(config.save_banks, sizes.save, memory[read_bytes:])
        self._payload = payload(
            config.payload,
            store.files,
            store.pack_fd,
            store_path=store.path,
            direct=store.io_path == "posix-direct",
            threads=config.read_workers,
            device_memory=not self._device.in_host_memory,
        )
        try:
            self._payload.register(self._device.payload_view(memory))
        except BaseException:
            self._payload.close()
            raise
        # Last of what can be refused: threads cannot be taken back.
        affinity = config.affinity or frozenset(os.sched_getaffinity(0))
        self._pool = pool_type(self._events, config.read_workers, affinity)
        self._restores = RestoreCoordinator(
            geometry=self.geometry,
            events=self._events,
            pool=self._pool,
            payload=self._payload,
            device=self._device,
            banks=self._read_banks,
            counters=self._counters,
            verify=self._policy(),
            deadline_s=config.restore_deadline_s,
            on_bad_record=self._retire_bad,
            on_closed=self._end_ticket,
            on_stall=end_process,
            direct_reads_max=config.read_workers,
        )
        self._desk = TicketDesk(
            events=self._events,
            catalog=self._catalog,
            counters=self._counters,
            restores=self._restores,
            rank=config.rank,
            session=store.session,
            epoch=self.epoch,
            deadline_s=config.ticket_deadline_s,
        )
        self._saves = SaveCoordinator(
            geometry=self.geometry,
            events=self._events,
            pool=self._pool,
            payload=self._payload,
            device=self._device,
            banks=self._save_banks,
            catalog=self._catalog,
            counters=self._counters,
            join_pieces=config.join_pieces,
            deadline_s=config.restore_deadline_s,
            on_wait=self._want_commits,
        )
        self._commits = Committer(
            self._events,
            self._catalog,
            store,
            config.commit_interval_s,
            affinity,
            self._saves.resume,
        )
        self.placement = "banks (no paged KV is attached)"
        self._bad: deque[tuple[bytes, bytes, int]] = deque(maxlen=BAD_RECORDS_KEPT)
        # The catalog has them now; kept, the rows would cost memory for the whole session.
        store.tables = None

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        namespace: Namespace,
        geometry: ModelGeometry,
        config: EngineConfig | None = None,
        files: Files | None = None,
        **parts: Any,
    ) -> Engine:
        """Open the store at `path` for writing and start an engine on it.

        `open_result` says whether its content was kept (warm, or recovered from the journal of a
        session that did not close) or discarded (cold, with the reason).
        A blank store is bound to `namespace` and `geometry`. Raises the errors of Store.open.
        `parts` are those of the constructor, for tests.
        """
        config = config or EngineConfig()
        store = Store.open(
            os.fspath(path),
            namespace=namespace,
            model=geometry,
            files=files or OS_FILES,
            lock_wait_s=config.lock_wait_s,
            rank=config.rank,
            world_size=config.world_size,
            allow_buffered=config.allow_buffered,
            recover=config.recovery == "journal",
        )
        try:
            return cls(store, config, **parts)
        except BaseException:
            # Nothing was written: what the open accepted is published again, nothing is lost.
            store.close(store.tables or Tables.empty())
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _want_commits(self, event: int) -> None:
        self._commits.want(event)

    def _policy(self) -> str:
        """Return the verify policy: what a killed session wrote is looked at once in any case."""
        if self.config.verify == "off" and self.open_result.state == "recovered":
            return "first-touch"
        return self.config.verify

    # -- paged KV --------------------------------------------------------------------------------

    def attach(self, layers: Sequence[Any]) -> None:
        """Take the paged KV: one writable uint8 buffer [block_count, block_bytes] per layer.

        With device `cuda` they are tensors on the GPU. Called once, before the first claim or save.
        The caller keeps the buffers alive until close.
        """
        with self._events.lock:
            self._device.attach(layers)
            obstacle = self._direct_obstacle()
            if obstacle is None:
                self._device.keep_from_children()
                self._desk.direct = True
            elif self.config.placement == "direct":
                raise UsageError("no-direct-placement", f"placement is 'direct', but {obstacle}")
            self.placement = "direct" if self._desk.direct else f"banks ({obstacle})"

    def _direct_obstacle(self) -> str | None:
        """Return why restored bytes go through banks, or None where blocks are read in place."""
        if self.config.placement == "banks":
            return "as the setting says"
        if self.store.io_path != "posix-direct":
            return f"the pack is read {self.store.io_path}"
        if self.config.placement == "auto" and self.geometry.block_bytes < DIRECT_BLOCK_BYTES_MIN:
            return f"blocks of {self.geometry.block_bytes} bytes are faster through banks"
        return self._device.direct_obstacle(
            max(self.store.files.direct_alignment(self.store.pack_fd))
        )

    # -- tenants ---------------------------------------------------------------------------------

    def root(self, digest: bytes) -> int:
        """Return the `root` for lookups and saves of one tenant: see `RootTable.number`.

        `digest` is the SHA-256 (32 bytes) of what separates the tenant's requests from all others.
        Numbers hold for this engine alone: ask anew for each request, it costs a dictionary lookup.
        Raises UsageError `bad-root`, `too-many-roots`.
        """
        with self._events.lock:
            return self._catalog.root(digest)

    # -- restore ---------------------------------------------------------------------------------

    def lookup(
        self,
        key: RequestKey,
        tokens: Any,
        *,
        root: int = 0,
        skip_tokens: int = 0,
        max_tokens: int | None = None,
        clock: int | None = None,
    ) -> Ticket:
        """Find the longest stored prefix of `tokens` and promise it to `key`.

        `tokens` is one buffer of uint32 ids or a sequence of buffers. The promise ends at a block
        boundary, at most at `max_tokens`; only tokens from `skip_tokens` (a multiple of
        block_tokens) on will be restored, and reading them ahead begins now. The same key and
        tokens again re-validate the ticket and renew its deadline; other tokens or another root
        under the same key raise TicketError `tokens-changed`. A miss is a ticket with token_count 0
        and a reason. Ranks that are given the same rising `clock` with each call evict alike.
        """
        packed = pack_tokens(tokens)
        _check_clock(clock)
        block_tokens = self.geometry.block_tokens
        if skip_tokens < 0 or skip_tokens % block_tokens:
            raise UsageError(
                "bad-skip", f"skip_tokens is {skip_tokens}, expected a multiple of {block_tokens}"
            )
        limit = len(packed) // TOKEN_BYTES
        if max_tokens is not None:
            limit = min(limit, max_tokens)
        with self._events.lock:
            self._check_serving()
            self._counters.lookups += 1
            self._counters.lookup_tokens += len(packed) // TOKEN_BYTES
            return self._desk.lookup(
                key, packed, root=root, skip_tokens=skip_tokens, limit=limit, clock=clock
            )

    def claim(self, ticket: Ticket, tokens: Any, block_ids: Any) -> Restore:
        """Bind a ticket to its destination and return the running restore.

        `block_ids[i]` (integers, one array or a sequence of them) is where block
        skip_tokens/block_tokens + i goes, up to the promised endpoint. Raises TicketError when the
        claim is not exactly what was promised; the ticket is then released.
        """
        packed, ids = pack_tokens(tokens), pack_block_ids(block_ids)
        with self._events.lock:
            self._check_serving()
            return self._desk.claim(ticket, packed, ids)

    def release(self, ticket: Ticket) -> None:
        """Give a ticket back and cancel its reads; banks return only by evidence. Idempotent."""
        self._events.post(self._desk.release, ticket)
        if ticket.state is TicketState.CLAIMED:
            ticket.restore.finish()

    def _end_ticket(self, ticket: Ticket) -> None:
        self._desk.close(ticket)

    # -- save ------------------------------------------------------------------------------------

    def save(
        self,
        key: RequestKey,
        tokens: Any,
        *,
        root: int = 0,
        start_token: int = 0,
        clock: int | None = None,
    ) -> Save | None:
        """Begin to save the whole blocks of `tokens` that the store does not hold yet.

        The producer will announce tokens from `start_token` on. Returns None when there is nothing
        to save or no room; the reason is counted as `saves_declined_<reason>`. `clock` is as in
        `lookup`.
        """
        packed = pack_tokens(tokens)
        _check_clock(clock)
        with self._events.lock:
            self._check_serving()
            if self._events.fault is not None:
                self._counters.saves_declined["engine-failed"] += 1
                return None
            if not self._device.attached:
                raise UsageError("not-attached", "no paged KV is attached; call attach() first")
            if root not in self._catalog.roots:
                self._counters.saves_declined["unknown-root"] += 1
                return None
            if self.store.pack_failed:
                self._counters.saves_declined["sync-failed"] += 1
                return None
            outcome = self._catalog.reserve(
                root, memoryview(packed), start_token, len(packed) // TOKEN_BYTES, clock
            )
            if isinstance(outcome, str):
                self._counters.saves_declined[outcome] += 1
                return None
            return self._saves.begin(key, outcome)

    # -- whole engine ----------------------------------------------------------------------------

    def retire(self, tokens: Any, *, root: int = 0, start_token: int = 0) -> None:
        """Forget what is stored of this prefix from the first record that reaches past start_token.

        What continues those records goes with them; leased bytes stay until the lease ends.
        """
        packed = pack_tokens(tokens)
        with self._events.lock:
            self._check_serving()
            if root in self._catalog.roots:
                self._catalog.retire_from(root, memoryview(packed), start_token)

    def _retire_bad(self, record: Record) -> None:
        if record.state is RecordState.VISIBLE:
            digest = self._catalog.roots.digest(record.root)
            self._bad.append((digest, self._catalog.prefix_of(record), record.token_start))
            self._catalog.retire(record, for_good=True)

    def take_bad(self) -> list[tuple[bytes, bytes, int]]:
        """Return (digest of the root, tokens, start_token) of records retired for damage, once.

        `tokens` are those of the whole prefix, packed. Nobody need ask; the last few are kept.
        """
        with self._events.lock:
            bad = list(self._bad)
            self._bad.clear()
        return bad

    def watch(
        self, prefixes: Sequence[tuple[bytes, Octets]]
    ) -> tuple[list[int], list[list[tuple[int, int]]]]:
        """Say which watched records have left since the last call, and what holds each prefix now.

        `prefixes` are (digest of the root, packed tokens). Each answer is a chain of visible
        records from the first token on: (record id, how many of its tokens match, whole blocks
        only). They are watched from now on, and not marked as used. Both answers are of one moment:
        what has left by then is in the first, or was told before, and in no chain.
        """
        with self._events.lock:
            self._check_serving()
            watch, chains = self._catalog.watch, []
            if self._events.fault is not None:
                watch.give_up()  # every lookup is a miss from now on
                return watch.take_gone(), [[] for _ in prefixes]
            for digest, tokens in prefixes:
                root = self._catalog.roots.known(digest)
                path: list[Match] = []
                if root is not None:
                    limit = len(tokens) // TOKEN_BYTES
                    path = self._catalog.directory.walk(root, memoryview(tokens), limit)
                chains.append([(match.record.record_id, match.token_count) for match in path])
                watch.note(match.record.record_id for match in path)
            return watch.take_gone(), chains

    def reset(self) -> None:
        """Forget everything that is stored, durably; saves begun before never become visible.

        Bytes under a lease stay until the lease ends; open tickets can no longer be claimed. With a
        journal it returns when no crash can bring anything back. Raises EnvironmentFault
        `index-not-retracted` when the disk does not allow that.
        """
        with self._events.lock:
            self._check_serving()
            self._events.post(self._catalog.retire_all)
            event = self._catalog.ledger.event
        self._commits.settle(event)

    def commit(self, deadline_s: float | None = None) -> bool:
        """Make what is published by now survive a crash, without waiting for the next commit.

        Returns whether it is durable within `deadline_s` seconds (None = however long it takes);
        False where the engine keeps no journal, or none any more.
        """
        self._check_serving()
        return self._commits.commit(deadline_s)

    def stats(self) -> Stats:
        """Return one consistent snapshot of counters and contents."""
        journal = self.store.journal
        with self._events.lock:
            return Stats(
                counters=flatten(self._counters),
                records=self._catalog.record_count,
                extents=len(self._catalog.extents.live),
                used_bytes=self._catalog.extents.used_bytes,
                capacity_bytes=self.geometry.usable_bytes,
                tokens=self._catalog.token_count,
                banks_quarantined=self._read_banks.quarantined_ever
                + self._save_banks.quarantined_ever,
                banks_in_quarantine=self._read_banks.quarantined_count
                + self._save_banks.quarantined_count,
                read_banks_in_use=len(self._read_banks.banks) - self._read_banks.free_count,
                save_banks_in_use=len(self._save_banks.banks) - self._save_banks.free_count,
                leases_open=len(self._catalog.leases.open),
                journal_commits=0 if journal is None else journal.commit,
                journal_bytes=0 if journal is None else journal.length,
                path=self._payload.path,
                state=self.open_result.state,
                reason=self.open_result.reason,
            )

    def close(self, deadline_s: float | None = None) -> CloseResult:
        """Finish what was accepted, write the snapshot and leave the store warm. Idempotent.

        Waits at most `deadline_s` seconds (setting close_deadline_s) for accepted writes. A write
        that has not returned by then, or a commit that stands still, leaves the store dirty and
        locked until it does: the result says so, and the next open keeps what the journal holds, if
        there is one. A quarantined read bank cannot harm the pack and does not keep it dirty.
        """
        deadline = self.config.close_deadline_s if deadline_s is None else deadline_s
        begin = self._events.clock()
        with self._events.lock:
            if self._close_result is not None:
                return self._close_result
            if self._state is EngineState.CLOSED:
                raise UsageError("engine-closed", "another thread is closing the engine")
            self._state = EngineState.CLOSED
            saves, tickets = list(self._saves.active), list(self._desk.open.values())
        for ticket in tickets:
            self.release(ticket)
        for save in saves:
            save.finish()
        # C1: nothing may be written to the pack after the drain.
        drained = self._events.wait_until(lambda: not self._saves.active, deadline)
        if not drained:
            # What waits for a commit has not begun to be written: it need not keep the store dirty.
            self._events.post(self._saves.give_up_held)
            drained = self._events.wait_until(lambda: not self._saves.active, 0.0)
        stopped = self._pool.close(deadline if drained else 0.0)
        if drained:
            # Should the index not be written, or not in time, the journal has all of it.
            self._commits.flush(deadline)
        ended = self._commits.close()
        self._events.close()
        if drained and not stopped:
            log.warning("a payload read had not returned at close; its bank is abandoned")
        self._pool.when_stopped(self._payload.close)
        with self._events.lock:
            log.info("closed %s", self.stats().line())
            log.info("payload %s", self._payload.account())
            self._close_result = self._close_store(begin, drained, ended, deadline)
            for banks in (self._read_banks, self._save_banks):
                # Now, not when the garbage collector comes to it: it is hundreds of megabytes.
                if stopped and banks.free_count == len(banks.banks):
                    banks.let_go()
        return self._close_result

    def _close_store(
        self, begin: float, drained: bool, ended: bool, deadline_s: float
    ) -> CloseResult:
        fault = self._events.fault
        if drained and ended and fault is None:
            return self._publish(begin, deadline_s)
        # A write may still land: until it has, the descriptors and the lock are not given up.
        self._pool.when_stopped(self._abandon)
        if not drained:
            return UNRETURNED
        if not ended:
            return UNRETURNED_COMMIT
        return CloseResult(
            "dirty", ExitCode.CHECK_FAILED, f"the engine failed ({fault!r}); the store stays dirty"
        )

    def _abandon(self) -> None:
        self._payload.close()
        self._commits.when_ended(self.store.abandon)

    def _publish(self, close_begin: float, deadline_s: float) -> CloseResult:
        """Write the index (C2 to C6); say how long it took, and what to raise where that is long.

        It cannot be cut short: an index that is half written is worth nothing.
        """
        begin = self._events.clock()
        result = self.store.close(image.dump(self._catalog))
        seconds = self._events.clock() - begin
        if seconds > deadline_s:
            log.warning(
                "the close took %.1f s, %.1f of them for the index of %d tokens; close_deadline_s "
                "is %.1f: allow the process as long as the close before it is killed",
                self._events.clock() - close_begin,
                seconds,
                self._catalog.token_count,
                deadline_s,
            )
        return replace(result, detail=f"{result.detail}; index written in {seconds:.2f} s")

    def _check_serving(self) -> None:
        if self._state is not EngineState.SERVING:
            raise UsageError("engine-closed", "the engine is closed; open a new one")


def _check_clock(clock: int | None) -> None:
    if clock is not None and not 0 <= clock <= COUNTER_MAX:
        raise UsageError("bad-clock", f"clock is {clock}, expected 0 to {COUNTER_MAX}")


def end_process(line: str) -> None:
    """End this process at once, with one line: see `RestoreCoordinator._expire`."""
    log.critical("%s", line)
    os._exit(ExitCode.ENVIRONMENT)
