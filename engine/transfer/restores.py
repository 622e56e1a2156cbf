"""Owns the schedule of all restores: reads into banks or blocks, checks, scatters, outcomes.

State machines fed by events under the engine's lock; they never block, and no error of theirs can
become anything but a miss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rangekv.engine.devices.device import BlockIds, Device, Strip
from rangekv.engine.devices.fence import FenceState
from rangekv.engine.events import EventQueue
from rangekv.engine.index.directory import Record
from rangekv.engine.index.tickets import Ticket
from rangekv.engine.payload.io import PayloadIO
from rangekv.engine.payload.pool import Priority, WorkerPool
from rangekv.engine.stats import Counters
from rangekv.engine.transfer.banks import Bank, BankSet, BankState, Evidence
from rangekv.engine.transfer.restore import Restore, RestoreState
from rangekv.engine.transfer.spans import Span
from rangekv.engine.transfer.verify import check_blocks, check_pages
from rangekv.format.errors import TicketError, TransferError
from rangekv.format.geometry import Geometry

OVERDUE_MAX = 2  # reads past their deadline while others are still begun


class _Room(NamedTuple):
    """Which kinds of read may begin now: through a bank, straight into blocks."""

    banked: bool
    direct: bool = False


class RestoreCoordinator:
    """Schedules the spans of all restores over the read banks."""

    def __init__(
        self,
        *,
        geometry: Geometry,
        events: EventQueue,
        pool: WorkerPool,
        payload: PayloadIO,
        device: Device,
        banks: BankSet,
        counters: Counters,
        verify: str,
        deadline_s: float,
        on_bad_record: Callable[[Record], None],
        on_closed: Callable[[Ticket], None],
        on_stall: Callable[[str], None],
        direct_reads_max: int,
    ) -> None:
        self.geometry = geometry
        self.events = events
        self.banks = banks
        self._pool = pool
        self._payload = payload
        self._device = device
        self._counters = counters
        self._verify = verify
        self._deadline_s = deadline_s
        self._on_bad_record = on_bad_record
        self._on_closed = on_closed
        self._on_stall = on_stall
        self._direct_reads_max = direct_reads_max
        self._direct_reads = 0
        self._active: list[Restore] = []

    @property
    def stalled(self) -> bool:
        """Whether nothing more should be promised: no bank is left, or two reads are overdue.

        One may be a bad place of the disk; two are the disk, and whoever is promised something
        waits out its deadline. It is over as soon as one of them returns.
        """
        reading = (bank for restore in self._active for bank in restore.reading.values())
        overdue = sum(bank.state is BankState.QUARANTINED for bank in reading)
        return overdue >= OVERDUE_MAX or self.banks.quarantined_count == len(self.banks.banks)

    # -- called by the engine, under its lock ----------------------------------------------------

    def begin(self, ticket: Ticket, spans: list[Span]) -> Restore:
        """Start reading ahead for a ticket."""
        restore = Restore(ticket, spans, self.geometry, self, self._device.lane())
        self._active.append(restore)
        self._pump()
        return restore

    def bind(self, restore: Restore, block_ids: BlockIds) -> None:
        """Give a restore its destination: `block_ids[i]` is block skip_tokens/block_tokens + i."""
        if restore.state is not RestoreState.PREFETCH:
            raise TicketError("stale-ticket", "the restore behind this ticket is not open any more")
        if len(block_ids) != restore.block_count:
            raise TicketError(
                "endpoint-changed",
                f"the claim names {len(block_ids)} blocks, the ticket promised "
                f"{restore.block_count}; look up again",
            )
        self._device.check_block_ids(block_ids, unique=True)
        try:
            restore.lane.follow()
        except Exception as error:
            raise TicketError(
                "device-failed", f"the device does not say when the blocks are free: {error}"
            ) from error
        restore.block_ids = block_ids
        restore.state = RestoreState.BOUND
        restore.deadline = self.events.at(self._deadline_s, self._expire, restore)
        for span, bank in list(restore.read.items()):
            del restore.read[span]
            self._start_scatter(restore, span, bank)
        self._pump()

    def give_up(self, restore: Restore) -> None:
        """Cancel a restore that nobody has claimed in time; reads that stand still are seen."""
        for bank in restore.reading.values():
            self.banks.quarantine(bank)
        self.cancel(restore)

    def cancel(self, restore: Restore) -> None:
        """Stop a restore; its banks come back as their operations return."""
        if restore.state is RestoreState.CLOSED:
            return
        if restore.state is RestoreState.BOUND:
            # Reads that a deadline has failed already are quarantined, not READ.
            reading = [s for s, bank in restore.reading.items() if bank.state is BankState.READ]
            self._fail_all(restore, [*restore.pending, *reading])
        restore.state = RestoreState.CLOSED
        if restore.deadline is not None and not restore.placing:
            restore.deadline.cancel()
        restore.pending.clear()
        for span, bank in restore.read.items():
            self._counters.prefetch_dropped_bytes += span.length
            self.banks.release(bank, Evidence.IO_RETURNED)
        restore.read.clear()
        self._close_if_quiet(restore)
        self._pump()

    # -- called by users of a Restore ------------------------------------------------------------

    def finish(self, restore: Restore) -> None:
        """See Restore.finish."""
        with self.events.lock:
            if restore.state is RestoreState.CLOSED:
                first_close = False
            else:
                first_close = True
                self.events.post(self.cancel, restore)
        self.events.wait_for_proof(lambda: not restore.scattering and not restore.placing)
        if first_close:
            with self.events.lock:
                self._count_delivered(restore)

    def _count_delivered(self, restore: Restore) -> None:
        if restore.block_ids is None:
            return
        first_bad = min((begin for begin, _ in restore.failed_ranges), default=restore.block_count)
        self._counters.delivered_tokens += first_bad * self.geometry.block_tokens

    # -- scheduling ------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Start reads: bound restores by layer first, then prefetch, which leaves a bank free.

        Within a restore as many at a time as `Restore.may_read` allows.
        """
        while (restore := self._next(RestoreState.BOUND, self._room())) is not None:
            if restore.pending[0].direct:
                self._start_direct(restore)
            else:
                self._start_read(restore)
        # What can go straight into its blocks is not read ahead into a bank.
        while restore := self._next(RestoreState.PREFETCH, _Room(banked=self.banks.free_count > 1)):
            self._start_read(restore)

    def _next(self, state: RestoreState, room: _Room) -> Restore | None:
        """Return the restore whose next read comes first; of a kind that there is room for."""
        if not (room.banked or room.direct):
            return None
        waiting = (
            restore
            for restore in self._active
            if restore.state is state
            and restore.may_read
            and (room.direct if restore.pending[0].direct else room.banked)
        )
        return min(waiting, key=lambda restore: restore.pending[0].layer_first, default=None)

    def _room(self) -> _Room:
        """Return what scheduled reads there is room for; one kind that must wait holds up no other.

        Looked at once for all restores: each event comes here.
        """
        return _Room(
            banked=self.banks.free_count > 0 or self._read_ahead() is not None,
            direct=self._direct_reads < self._direct_reads_max,
        )

    def _read_ahead(self) -> Restore | None:
        """Return the latest restore that holds bytes which nobody has claimed yet."""
        ahead = (r for r in reversed(self._active) if r.state is RestoreState.PREFETCH and r.read)
        return next(ahead, None)

    def _take_back(self) -> None:
        """Free a bank whose prefetched bytes nobody has claimed yet, last layer first."""
        restore = self._read_ahead()
        if restore is not None:
            span = max(restore.read, key=lambda s: s.layer_first)
            self.banks.release(restore.read.pop(span), Evidence.IO_RETURNED)
            self._counters.prefetch_dropped_bytes += span.length
            restore.pending.append(span)
            restore.pending = deque(sorted(restore.pending, key=lambda s: s.layer_first))

    def _start_read(self, restore: Restore) -> None:
        if not self.banks.free_count:
            self._take_back()
        span = restore.begin_read()
        bank = self.banks.take(BankState.READ)
        if bank is None:
            raise TransferError("no-bank", "a read was started without a free bank")
        restore.reading[span] = bank
        device, memory = self._device, bank.memory[: span.length]

        def read() -> tuple[int, int, Record | None]:
            try:
                calls = self._payload.read(span.offset, [device.payload_view(memory)])
            finally:
                self.events.post(self._read_returned, restore, span)
            return (calls, *check_pages(span, device, restore.lane, memory, self._verify))

        self._pool.submit(
            Priority.READ, read, lambda result, error: self._read_done(restore, span, result, error)
        )

    def _read_returned(self, restore: Restore, span: Span) -> None:
        """The disk is free for more, while what it brought is still being checked."""
        restore.note_returned(span)
        self._pump()

    def _read_done(
        self, restore: Restore, span: Span, result: Any, error: BaseException | None
    ) -> None:
        bank = restore.reading.pop(span)
        error = self._count_read(span, result, error)
        expired = bank.state is BankState.QUARANTINED
        if error is not None or expired or restore.state is RestoreState.CLOSED:
            self.banks.release(bank, Evidence.IO_RETURNED)
            if restore.state is not RestoreState.CLOSED and not expired:
                if error is not None:
                    restore.errors.append(error)
                self._fail_all(restore, [span])
            self._close_if_quiet(restore)
        elif restore.state is RestoreState.BOUND:
            self._start_scatter(restore, span, bank)
        else:
            restore.read[span] = bank
        self._pump()

    def _start_direct(self, restore: Restore) -> None:
        span = restore.begin_read()
        restore.placing.add(span)
        self._direct_reads += 1
        segment = span.segments[0]
        assert restore.block_ids is not None
        begin = segment.block_begin
        targets = restore.block_ids[begin : begin + segment.block_count]

        def read() -> tuple[int, int, Record | None]:
            iovec = self._device.iovec(segment.layer_index, targets)
            try:
                calls = self._payload.read_scattered(span.offset, iovec)
            finally:
                self.events.post(self._read_returned, restore, span)
            return (calls, *check_blocks(span, self._device, targets, self._verify))

        self._pool.submit(
            Priority.READ,
            read,
            lambda result, error: self._direct_done(restore, span, result, error),
        )

    def _direct_done(
        self, restore: Restore, span: Span, result: Any, error: BaseException | None
    ) -> None:
        restore.placing.remove(span)
        self._direct_reads -= 1
        error = self._count_read(span, result, error)
        if error is None:
            self._counters.direct_spans += 1
            self._layers_done(restore, span)
        else:
            restore.errors.append(error)
            self._fail_all(restore, [span])
        self._close_if_quiet(restore)
        self._pump()

    def _count_read(
        self, span: Span, result: Any, error: BaseException | None
    ) -> BaseException | None:
        """Count a read that has returned; return what is wrong with it."""
        if error is not None:
            return error
        calls, pages, bad_record = result
        self._counters.reads += 1
        self._counters.read_calls += calls
        self._counters.read_bytes += span.length
        self._counters.checksum_pages += pages
        useful = span.block_count * self.geometry.block_bytes
        self._counters.overread_bytes += span.length - useful
        if bad_record is None:
            return None
        self._counters.checksum_failures += 1
        self._on_bad_record(bad_record)
        return TransferError(
            "checksum-mismatch",
            "a page read from the pack does not match its checksum; its record is retired",
            offset=span.offset,
        )

    def _start_scatter(self, restore: Restore, span: Span, bank: Bank) -> None:
        self.banks.advance(bank, BankState.SCATTER)
        restore.scattering[span] = bank
        block_ids = restore.block_ids
        assert block_ids is not None
        strips = [
            Strip(part.layer_index, part.deliver_offset, part.block_begin, part.block_count)
            for part in span.segments
        ]

        def scatter() -> FenceState:
            return self._device.scatter(restore.lane, bank.memory, strips, block_ids).wait()

        self._pool.submit(
            Priority.COPY,
            scatter,
            lambda result, error: self._scatter_done(restore, span, result, error),
        )

    def _scatter_done(
        self,
        restore: Restore,
        span: Span,
        state: FenceState | None,
        error: BaseException | None,
    ) -> None:
        bank = restore.scattering.pop(span)
        # Of a copy that raised nobody knows how far it came.
        if state in (None, FenceState.UNKNOWN, FenceState.PENDING):
            self.banks.quarantine(bank)
        else:
            self.banks.release(bank, Evidence.FENCE_SETTLED)
        if state is FenceState.DONE:
            self._counters.scatters += len(span.segments)
            self._layers_done(restore, span)
        else:
            restore.errors.append(
                error or TransferError("unproved-fence", "a copy to paged KV is not proved done")
            )
            self._fail_all(restore, [span])
        self._close_if_quiet(restore)
        self._pump()

    # -- outcomes --------------------------------------------------------------------------------

    def _layers_done(self, restore: Restore, span: Span) -> None:
        for segment in span.segments:
            restore.segments_left[segment.layer_index] -= 1
            if not restore.segments_left[segment.layer_index]:
                self._counters.layer_events += 1

    def _fail_all(self, restore: Restore, spans: Sequence[Span]) -> None:
        for span in spans:
            for segment in span.segments:
                restore.segments_left[segment.layer_index] -= 1
                restore.layer_failed[segment.layer_index] = True
                begin = segment.block_begin
                restore.failed_ranges.add((begin, begin + segment.block_count))

    def _expire(self, restore: Restore) -> None:
        """Fail what has not been read in time; the banks stay away until their reads return.

        A direct read that stalls may still fill blocks that the caller is about to reuse: nothing
        short of the process can take them back, so `on_stall` ends it.
        """
        if restore.placing:
            self._on_stall(
                f"a direct read of over {self._deadline_s} s still fills paged KV; this process "
                "ends because its blocks cannot be taken back: check the disk [direct-read-stalled]"
            )
        if restore.state is not RestoreState.BOUND:
            return
        late = [*restore.pending, *restore.reading]  # fires once: none of them has failed yet
        if not late:
            return
        restore.pending.clear()
        for bank in restore.reading.values():
            self.banks.quarantine(bank)
        self._fail_all(restore, late)
        restore.errors.append(
            TransferError("restore-deadline", f"not read within {self._deadline_s} seconds")
        )
        self._pump()

    def _close_if_quiet(self, restore: Restore) -> None:
        under_way = restore.reading or restore.scattering or restore.placing
        if restore.state is RestoreState.CLOSED and not under_way:
            if restore in self._active:
                self._active.remove(restore)
            if restore.deadline is not None:
                restore.deadline.cancel()
            self._on_closed(restore.ticket)
