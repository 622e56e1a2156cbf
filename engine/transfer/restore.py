"""Owns one restore: its spans in every stage, the readiness of each layer, what has failed.

Plain state under the engine's lock; the coordinator alone moves spans from stage to stage.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from rangekv.engine.devices.device import BlockIds, Lane
from rangekv.engine.events import Deadline
from rangekv.engine.index.tickets import Ticket
from rangekv.engine.transfer.banks import Bank
from rangekv.engine.transfer.spans import Span
from rangekv.format.geometry import Geometry

if TYPE_CHECKING:
    from rangekv.engine.transfer.restores import RestoreCoordinator


IN_FLIGHT_BYTES_MAX = 64 << 20  # of one restore: two banks of the default size


class RestoreState(Enum):
    """PREFETCH until block ids are bound; CLOSED when the caller is done or has given up."""

    PREFETCH = "prefetch"
    BOUND = "bound"
    CLOSED = "closed"


class Restore:
    """One ticket on its way into paged KV.

    The destination blocks belong to the restore until `finish` returns. All methods may be called
    from any thread.
    """

    def __init__(
        self,
        ticket: Ticket,
        spans: list[Span],
        geometry: Geometry,
        owner: RestoreCoordinator,
        lane: Lane,
    ) -> None:
        self.ticket = ticket
        self.lane = lane
        self.state = RestoreState.PREFETCH
        self.block_ids: BlockIds | None = None
        self.pending = deque(spans)
        self._reads_allowed = sum(span.layer_first == spans[0].layer_first for span in spans)
        self._bytes_in_flight = 0
        self.reading: dict[Span, Bank] = {}
        self.read: dict[Span, Bank] = {}
        self.scattering: dict[Span, Bank] = {}
        # Direct reads fill the caller's blocks: they cannot be cancelled, only waited for.
        self.placing: set[Span] = set()
        self.segments_left = [0] * geometry.layer_count
        for span in spans:
            for segment in span.segments:
                self.segments_left[segment.layer_index] += 1
        self.layer_failed = [False] * geometry.layer_count
        self.failed_ranges: set[tuple[int, int]] = set()
        self.errors: list[BaseException] = []
        self.deadline: Deadline | None = None
        self._owner = owner

    @property
    def block_count(self) -> int:
        """Number of destination blocks in each layer."""
        ticket = self.ticket
        return (ticket.token_count - ticket.skip_tokens) // self._owner.geometry.block_tokens

    @property
    def is_settled(self) -> bool:
        """Whether every layer is delivered or has failed, so that `finish` waits for nothing."""
        with self._owner.events.lock:
            under_way = self.scattering or self.placing
            return not under_way and (
                self.state is RestoreState.CLOSED or not any(self.segments_left)
            )

    @property
    def may_read(self) -> bool:
        """Whether the next span's read may begin now.

        Reads share the disk: with all of them under way, the first layer would come when the last
        one does, and each later one as late. So the first layer has the disk for itself, two more
        reads may begin for each that has returned, and no more than keep the disk busy.
        """
        if not self.pending or not self._reads_allowed:
            return False
        in_flight = self._bytes_in_flight
        return not in_flight or in_flight + self.pending[0].length <= IN_FLIGHT_BYTES_MAX

    def begin_read(self) -> Span:
        """Take the next span to read; only where `may_read`."""
        span = self.pending.popleft()
        self._reads_allowed -= 1
        self._bytes_in_flight += span.length
        return span

    def note_returned(self, span: Span) -> None:
        """Note that the disk is done with a read, whatever came of it."""
        self._reads_allowed += 2
        self._bytes_in_flight -= span.length

    def wait_layer(self, layer_index: int, deadline_s: float | None = None) -> bool:
        """Block until layer `layer_index` is delivered or has failed, at most `deadline_s` seconds.

        Returns True only if every span of the layer was read, verified and copied.
        """
        done = self._owner.events.wait_until(
            lambda: not self.segments_left[layer_index] or self.state is RestoreState.CLOSED,
            deadline_s,
        )
        with self._owner.events.lock:
            delivered = done and not self.segments_left[layer_index]
            return delivered and not self.layer_failed[layer_index]

    def failed_blocks(self) -> list[int]:
        """Return the destination block ids that hold no proved KV, in destination order.

        Once any layer has failed for a block, the block has failed.
        """
        with self._owner.events.lock:
            if self.block_ids is None:
                return []
            bad = np.zeros(len(self.block_ids), dtype=np.bool_)
            for begin, end in self.failed_ranges:
                bad[begin:end] = True
            return [int(block) for block in self.block_ids[bad]]

    def finish(self) -> None:
        """End the restore: drop what is not yet read, wait for what fills blocks, end the lease.

        Blocks that were not delivered in all layers are failed blocks afterwards. Idempotent.
        """
        self._owner.finish(self)
