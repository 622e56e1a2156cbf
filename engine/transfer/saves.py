"""Owns the schedule of all saves: gathers into banks, native writes, the proof of a written range.

State machines fed by events under the engine's lock. Nothing becomes visible before every layer's
write has returned its full count; no request waits for more than its extraction.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from rangekv.engine.devices.device import BlockIds, Device
from rangekv.engine.devices.fence import FenceState
from rangekv.engine.events import EventQueue
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.reservation import Reservation, ReservationState
from rangekv.engine.index.tickets import RequestKey
from rangekv.engine.payload.io import PayloadIO
from rangekv.engine.payload.pool import Priority, WorkerPool
from rangekv.engine.stats import Counters
from rangekv.engine.transfer.banks import Bank, BankSet, BankState, Evidence
from rangekv.engine.transfer.gather import Gathered, Write, fill_bank, join_writes
from rangekv.engine.transfer.production import Piece
from rangekv.engine.transfer.save import Group, Save, SaveState
from rangekv.format.errors import TransferError, UsageError, ensure
from rangekv.format.geometry import Geometry


class SaveCoordinator:
    """Runs all saves of one engine over the save banks, first come first served."""

    def __init__(
        self,
        *,
        geometry: Geometry,
        events: EventQueue,
        pool: WorkerPool,
        payload: PayloadIO,
        device: Device,
        banks: BankSet,
        catalog: Catalog,
        counters: Counters,
        join_pieces: bool,
        deadline_s: float,
        on_wait: Callable[[int], None],
    ) -> None:
        """`on_wait` is told the ledger's event that a write waits for; `resume` follows it."""
        self.geometry = geometry
        self.events = events
        self.banks = banks
        self.active: set[Save] = set()
        self._pool = pool
        self._payload = payload
        self.device = device
        self._catalog = catalog
        self._counters = counters
        self._join_pieces = join_pieces
        self._deadline_s = deadline_s
        self._on_wait = on_wait
        self._queue: deque[tuple[Save, Group]] = deque()
        self._held: list[tuple[Save, Group, Bank, list[Write]]] = []

    def begin(self, key: RequestKey, reservation: Reservation) -> Save:
        """Start a save over a reservation, which it settles when it ends."""
        save = Save(key, reservation, self, self.banks.bank_bytes)
        self.active.add(save)
        self._counters.saves += 1
        return save

    # -- the producer's side ---------------------------------------------------------------------

    def layer_ready(
        self, save: Save, layer_index: int, token_range: tuple[int, int], block_ids: BlockIds
    ) -> None:
        """See Save.layer_ready."""
        begin, end = token_range
        block_tokens = self.geometry.block_tokens
        if begin % block_tokens or end % block_tokens or not 0 <= begin <= end:
            raise UsageError(
                "bad-token-range",
                f"tokens {begin}..{end} are not whole blocks of {block_tokens} tokens",
            )
        if len(block_ids) != (end - begin) // block_tokens:
            raise UsageError(
                "bad-block-id",
                f"{len(block_ids)} block ids for {(end - begin) // block_tokens} blocks",
            )
        with self.events.lock:
            if save.state is not SaveState.OPEN:
                return
            self.device.check_block_ids(block_ids, unique=False)
            if not self._follow(save):
                return
            save.production.note(layer_index, begin, end, block_ids)
            if not self._join_pieces and layer_index == 0:
                self._cut(save, begin)
            for piece in save.production.take_full(layer_index):
                self._fill(save, piece)

    def _follow(self, save: Save) -> bool:
        """Order its gathers behind the computation that has just announced; False if it fails."""
        try:
            save.sources.lane.follow()
        except Exception as error:
            self._fail(save, error)
            return False
        return True

    def _cut(self, save: Save, token: int) -> None:
        for part, starts in zip(save.parts, save.part_starts, strict=True):
            offset = (token - part.token_start) * self.geometry.token_bytes
            if 0 < token - part.token_start < part.token_count and offset not in starts:
                insort(starts, offset)

    def _fill(self, save: Save, piece: Piece) -> None:
        """Add a piece to the group that is being filled; a full group asks for a bank."""
        if piece.end > save.token_limit:
            return
        size = piece.room_bytes
        if save.filling_bytes + size > self.banks.bank_bytes:
            self._submit_filling(save)
        save.filling.append(piece)
        save.filling_bytes += size
        if save.filling_bytes == self.banks.bank_bytes:
            self._submit_filling(save)

    def _submit_filling(self, save: Save) -> None:
        if save.filling:
            self._queue.append((save, Group(save.filling, size_bytes=save.filling_bytes)))
            save.waiting += 1
            save.filling, save.filling_bytes = [], 0
            self.events.post(self._pump)

    def _flush(self, save: Save) -> None:
        for piece in save.production.take_all():
            self._fill(save, piece)
        self._submit_filling(save)

    def extracted(self, save: Save, deadline_s: float | None) -> bool:
        """See Save.extracted."""
        with self.events.lock:
            if save.state is not SaveState.OPEN:
                return False
            limit = save.token_limit
            self._flush(save)
        self.events.wait_until(lambda: not save.waiting, deadline_s)
        with self.events.lock:
            self._drop_waiting(save)
        self.events.wait_for_proof(lambda: not save.gathering)
        with self.events.lock:
            return save.token_limit == limit and save.state is SaveState.OPEN

    def _drop_waiting(self, save: Save) -> None:
        dropped = [group for owner, group in self._queue if owner is save]
        if not dropped:
            return
        self._queue = deque(entry for entry in self._queue if entry[0] is not save)
        save.waiting = 0
        pieces = [piece for group in dropped for piece in group.pieces]
        self._counters.pieces_dropped += len(pieces)
        # A layer that misses a piece ends there, and with it the range of the save.
        save.token_limit = min([save.token_limit, *(piece.begin for piece in pieces)])

    def finish(self, save: Save) -> None:
        """See Save.finish."""
        self.events.post(self._finish, save)
        self.events.wait_for_proof(lambda: not save.gathering)

    def _finish(self, save: Save) -> None:
        if save.state is SaveState.OPEN:
            # Blocks that were announced and not extracted may be somebody else's by now.
            self._drop_waiting(save)
            save.filling, save.filling_bytes = [], 0
            save.state = SaveState.FINISHING
            self._settle_if_done(save)

    def cancel(self, save: Save) -> None:
        """See Save.cancel."""
        self.events.post(self._cancel, save)
        self.events.wait_for_proof(lambda: not save.gathering)

    def _cancel(self, save: Save) -> None:
        if save.state in (SaveState.OPEN, SaveState.FINISHING):
            self._abandon(save, SaveState.CANCELLED)

    # -- gather and write ------------------------------------------------------------------------

    def _pump(self) -> None:
        while self._queue:
            bank = self.banks.take(BankState.GATHER)
            if bank is None:
                return
            save, group = self._queue.popleft()
            group.bank = bank
            save.waiting -= 1
            save.gathering += 1
            self._start_gather(save, group, bank)

    def _start_gather(self, save: Save, group: Group, bank: Bank) -> None:
        def gather() -> Gathered:
            return fill_bank(save.sources, group.pieces, bank.memory)

        self._pool.submit(
            Priority.COPY,
            gather,
            lambda result, error: self._gather_done(save, group, bank, result, error),
        )

    def _gather_done(
        self,
        save: Save,
        group: Group,
        bank: Bank,
        result: Gathered | None,
        error: BaseException | None,
    ) -> None:
        save.gathering -= 1
        # Of a gather that raised nobody knows how far it came.
        if result is None or result.state is not FenceState.DONE:
            if result is None or result.state is not FenceState.FAILED:
                self.banks.quarantine(bank)
            else:
                self.banks.release(bank, Evidence.FENCE_SETTLED)
            unproved = TransferError("unproved-fence", "a gather is not proved done")
            told = result.error if result is not None else None
            self._fail(save, error or told or unproved)
            self._settle_if_done(save)
            self._pump()
            return
        self._counters.gathers += 1
        self._counters.payload_allocations += result.temporaries
        for piece in group.pieces:
            layer = piece.layer_index
            save.gathered_end[layer] = max(save.gathered_end[layer], piece.end)
        if save.state in (SaveState.FAILED, SaveState.CANCELLED):
            self.banks.release(bank, Evidence.FENCE_SETTLED)
            self._settle_if_done(save)
            self._pump()
            return
        self.banks.advance(bank, BankState.WRITE)
        self._start_writes(save, group, bank, result.writes)

    def _start_writes(self, save: Save, group: Group, bank: Bank, writes: list[Write]) -> None:
        save.writing += 1
        group.deadline = self.events.at(self._deadline_s, self._expire, save, group, bank)
        event = _writable_after(save, group)
        if self._catalog.ledger.reusable(event):
            self._write(save, group, bank, writes)
            return
        self._counters.writes_held += 1
        self._held.append((save, group, bank, writes))
        self._on_wait(event)

    def resume(self) -> None:
        """Start the writes that waited for their space; called when the journal got on."""
        held, self._held = self._held, []
        for save, group, bank, writes in held:
            if save.state not in (SaveState.OPEN, SaveState.FINISHING):
                self._group_written(save, group, bank)
            elif self._catalog.ledger.reusable(_writable_after(save, group)):
                self._write(save, group, bank, writes)
            else:
                self._held.append((save, group, bank, writes))

    def _write(self, save: Save, group: Group, bank: Bank, writes: list[Write]) -> None:
        for piece in group.pieces:
            self._catalog.raise_append_mark(save.parts[piece.part_index], piece.end)
        joined = join_writes(writes, self.geometry.stripe_bytes_max)
        group.writes_left = len(joined)
        if not joined:
            self._group_written(save, group, bank)
            return
        for write in joined:
            view = self.device.payload_view(bank.memory[write.begin : write.end])

            def job(offset: int = write.offset, view: Any = view) -> tuple[int, int]:
                return self._payload.write(offset, [view]), view.nbytes

            self._pool.submit(
                Priority.WRITE,
                job,
                lambda outcome, error: self._write_done(save, group, bank, outcome, error),
            )

    def _write_done(
        self,
        save: Save,
        group: Group,
        bank: Bank,
        outcome: tuple[int, int] | None,
        error: BaseException | None,
    ) -> None:
        if outcome is not None:
            calls, size_bytes = outcome
            self._counters.writes += 1
            self._counters.write_calls += calls
            self._counters.write_bytes += size_bytes
        elif error is not None:
            self._fail(save, error)
        group.writes_left -= 1
        if group.writes_left == 0:
            self._group_written(save, group, bank)

    def _expire(self, save: Save, group: Group, bank: Bank) -> None:
        """Give up a save whose writes stand still; its bank and space wait for their return."""
        late = TransferError("write-deadline", f"not written within {self._deadline_s} seconds")
        if not self._give_up_held(late, group):
            self.banks.quarantine(bank)
            self._fail(save, late)

    def give_up_held(self) -> None:
        """Give up every save whose writes wait for the journal: none of its bytes is under way."""
        self._give_up_held(TransferError("write-deadline", "not written before the close"))

    def _give_up_held(self, error: TransferError, only: Group | None = None) -> bool:
        chosen = [entry for entry in self._held if only in (None, entry[1])]
        self._held = [entry for entry in self._held if only not in (None, entry[1])]
        for save, group, bank, _ in chosen:
            self._fail(save, error)
            self._group_written(save, group, bank)
        return bool(chosen)

    def _group_written(self, save: Save, group: Group, bank: Bank) -> None:
        if group.deadline is not None:
            group.deadline.cancel()
        self.banks.release(bank, Evidence.IO_RETURNED)
        save.writing -= 1
        self._settle_if_done(save)
        self._pump()

    # -- outcome ---------------------------------------------------------------------------------

    def _fail(self, save: Save, error: BaseException) -> None:
        if save.error is None:
            save.error = error
        if save.state in (SaveState.OPEN, SaveState.FINISHING):
            self._abandon(save, SaveState.FAILED)

    def _abandon(self, save: Save, state: SaveState) -> None:
        self._drop_waiting(save)
        save.filling, save.filling_bytes = [], 0
        save.state = state
        if state is SaveState.FAILED:
            self._counters.saves_declined["failed"] += 1
        self._catalog.void(save.reservation)
        self._settle_if_done(save)

    def _settle_if_done(self, save: Save) -> None:
        """End a save once nothing of it is under way; publish what is proved if it finished."""
        if save.outstanding or save.state is SaveState.OPEN or save.reservation.settled:
            return
        if save.state is SaveState.FINISHING:
            self._publish(save)
        elif save.reservation.state is ReservationState.OPEN:
            self._catalog.void(save.reservation)
        self._catalog.settle(save.reservation)
        self.active.discard(save)

    def _publish(self, save: Save) -> None:
        end = self._proved_end(save)
        hashes: list[npt.NDArray[np.uint64]] = []
        for index, part in enumerate(save.parts):
            size = min(end, part.token_start + part.token_count) - part.token_start
            if size <= 0:
                break
            size_bytes = size * self.geometry.token_bytes
            pages = [hasher.pages(size_bytes) for hasher in save.hashers[index]]
            proved = [layer for layer in pages if layer is not None]
            ensure(len(proved) == len(pages), "a proved range has no checksums")
            hashes.append(np.stack(proved))
        cuts = [
            part.token_start + start // self.geometry.token_bytes
            for part, starts in zip(save.parts, save.part_starts, strict=True)
            for start in starts[1:]
        ]
        self._catalog.publish(save.reservation, end, hashes, cuts)
        published = save.reservation.state in (ReservationState.PROVED, ReservationState.VISIBLE)
        save.state = SaveState.PUBLISHED if published else SaveState.CANCELLED

    def _proved_end(self, save: Save) -> int:
        """Return the end of what every layer has written and hashed.

        Where layers ended at different tokens, that is the last page boundary all of them passed; a
        rest that waits for its write unit is not written, so it is not proved.
        """
        geometry = self.geometry
        end = min([save.token_limit, *save.gathered_end])
        part = next((p for p in reversed(save.parts) if p.token_start < end), None)
        if part is None:
            return save.start_token
        size = (end - part.token_start) * geometry.token_bytes
        complete = end == part.token_start + part.token_count
        if not complete:
            size -= size % geometry.write_align_bytes
        index = save.parts.index(part)
        while any(hasher.pages(size) is None for hasher in save.hashers[index]):
            size = save.hashers[index][0].page_floor(size)
        return part.token_start + size // geometry.token_bytes


def _writable_after(save: Save, group: Group) -> int:
    """Return the ledger's event before which no byte of a group may be written."""
    return max(save.parts[piece.part_index].extent.writable_after for piece in group.pieces)
