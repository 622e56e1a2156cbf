"""Restores that run beside the steps of other requests, from their claim until they are reported.

Polled once a step and never waited for; decides neither what is loaded nor what a failure means.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rangekv.engine import Restore


@dataclass(frozen=True, slots=True)
class Ended:
    """A load that is over; `failed_blocks` hold no proved KV. `seconds` from claim to end."""

    request_id: str
    token_count: int
    seconds: float
    failed_blocks: list[int]


@dataclass(frozen=True, slots=True)
class _Loading:
    restore: Restore
    token_count: int
    begin: float


class BackgroundLoads:
    """Used by the model's thread. vLLM keeps a request's blocks until its load is reported."""

    def __init__(self) -> None:
        self._running: dict[str, _Loading] = {}
        self._refused: list[Ended] = []

    def start(self, request_id: str, restore: Restore, token_count: int) -> None:
        """Take over a claimed restore."""
        self._running[request_id] = _Loading(restore, token_count, time.monotonic())

    def refuse(self, request_id: str, block_ids: list[int]) -> None:
        """Note a load that could not begin: it ends with the next poll, all its blocks failed."""
        self._refused.append(Ended(request_id, 0, 0.0, block_ids))

    def take_ended(self) -> list[Ended]:
        """Return the loads that are over since the last call; each is reported once.

        A late or aborted one ends like any other, at the engine's own deadline if need be: until
        then reads may still fill its blocks.
        """
        ended, self._refused = self._refused, []
        for request_id, loading in list(self._running.items()):
            if not loading.restore.is_settled:
                continue
            del self._running[request_id]
            loading.restore.finish()
            ended.append(
                Ended(
                    request_id,
                    loading.token_count,
                    time.monotonic() - loading.begin,
                    loading.restore.failed_blocks(),
                )
            )
        return ended
