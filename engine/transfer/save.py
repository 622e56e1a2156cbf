"""Owns one save: what was announced of it, what is under way, how it ended.

Plain state under the engine's lock; the coordinator alone changes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from rangekv.engine.events import Deadline
from rangekv.engine.index.reservation import Reservation, ReservationState
from rangekv.engine.index.tickets import RequestKey, pack_block_ids
from rangekv.engine.transfer.banks import Bank
from rangekv.engine.transfer.gather import Sources
from rangekv.engine.transfer.pages import PageHasher
from rangekv.engine.transfer.production import Piece, Production

if TYPE_CHECKING:
    from rangekv.engine.transfer.saves import SaveCoordinator


class SaveState(Enum):
    """OPEN while pieces come in; FINISHING until all writes have returned; then an outcome."""

    OPEN = "open"
    FINISHING = "finishing"
    PUBLISHED = "published"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True, eq=False)
class Group:
    """Pieces of one save that fill one bank, and the writes that carry them out of it."""

    pieces: list[Piece]
    bank: Bank | None = None
    writes_left: int = 0
    size_bytes: int = 0
    deadline: Deadline | None = None


class Save:
    """One range of tokens on its way from paged KV to the store.

    The producer may reuse a block once the `extracted` call after its announcement has returned.
    Methods may be called from any thread.
    """

    def __init__(
        self, key: RequestKey, reservation: Reservation, owner: SaveCoordinator, bank_bytes: int
    ) -> None:
        geometry = owner.geometry
        self.key = key
        self.reservation = reservation
        self.state = SaveState.OPEN
        self.error: BaseException | None = None
        self.start_token = reservation.token_begin
        self.token_end = reservation.token_end
        self.token_limit = reservation.token_end
        self.parts = list(reservation.parts)
        self.production = Production(geometry, self.parts, bank_bytes)
        self.part_starts: list[list[int]] = [[0] for _ in self.parts]
        self.hashers = [
            [PageHasher(geometry, starts) for _ in range(geometry.layer_count)]
            for starts in self.part_starts
        ]
        self.sources = Sources(
            geometry, owner.device, owner.device.lane(), self.parts, self.hashers
        )
        self.filling: list[Piece] = []
        self.filling_bytes = 0
        self.waiting = 0
        self.gathering = 0
        self.writing = 0
        self.gathered_end = [self.start_token] * geometry.layer_count
        self._owner = owner

    @property
    def token_count(self) -> int:
        """End of the range this save wants: it saves tokens [start_token, token_count)."""
        return self.token_end

    @property
    def outstanding(self) -> int:
        """Groups that wait for a bank, are gathered, or are written."""
        return self.waiting + self.gathering + self.writing

    def layer_ready(self, layer_index: int, token_range: tuple[int, int], block_ids: Any) -> None:
        """Note that tokens [begin, end) of a layer lie in paged KV, in blocks `block_ids`.

        Both ends are multiples of block_tokens. Only notes it, unless it fills a bank.
        """
        self._owner.layer_ready(self, layer_index, token_range, pack_block_ids(block_ids))

    def extracted(self, deadline_s: float | None = None) -> bool:
        """Copy all that was announced out of paged KV; True if nothing had to be dropped.

        Waits for free banks up to `deadline_s` seconds and then drops what has none; always waits
        for copies that have begun.
        """
        return self._owner.extracted(self, deadline_s)

    def finish(self) -> None:
        """Publish the proved whole-block prefix once its writes have returned.

        Returns at once; what was announced and not extracted is dropped.
        """
        self._owner.finish(self)

    def cancel(self) -> None:
        """Publish nothing; the space returns when all accepted writes have."""
        self._owner.cancel(self)

    def wait(self, deadline_s: float | None = None) -> bool:
        """Block until the outcome is known; True if anything of it became visible."""
        self._owner.events.wait_until(lambda: self.settled, deadline_s)
        return self.reservation.state is ReservationState.VISIBLE

    @property
    def published_end(self) -> int:
        """End of the tokens that became visible, `start_token` if none did; once it has settled."""
        if self.state is not SaveState.PUBLISHED:
            return self.start_token
        last = self.reservation.parts[-1]
        return last.token_start + last.token_count

    @property
    def settled(self) -> bool:
        """Whether no write of this save can still land."""
        return self.reservation.settled

    @property
    def decided(self) -> bool:
        """Whether it is settled, and visible or never to be.

        A settled save that continues another one waits for that to become visible.
        """
        return self.settled and self.reservation.state is not ReservationState.PROVED
