"""What one rank or the scheduler side tells an operator: figures since the last time it was asked.

Plain numbers by name, from the engine's own counters; it knows neither vLLM nor Prometheus.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rangekv.engine import Engine
    from rangekv.engine.connector.worker import WorkerSide

logger = logging.getLogger("vllm.rangekv")

Figures = dict[str, float]

HEALTH_REQUESTS = 100  # health looks back on so many prompts
# Counters of the engine that are shown under their own names; reasons follow a prefix.
COUNTED = (
    "lookups",
    "lookup_tokens",
    "hit_tokens",
    "delivered_tokens",
    "read_bytes",
    "write_bytes",
    "checksum_failures",
    "records_retired",
    "evicted_bytes",
    "saves_published",
    "pieces_dropped",
)
REASONED = ("miss", "saves_declined")
SHOWN = (
    "read_banks_in_use",
    "save_banks_in_use",
    "banks_in_quarantine",
    "used_bytes",
    "capacity_bytes",
)
_NOTHING_TO_SAVE = ("saves_declined_held", "saves_declined_joined")


class Differences:
    """Turns totals into what has been added since the last call."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}

    def take(self, totals: Mapping[str, float]) -> Figures:
        """Return what rose, by name; what stood still is left out."""
        risen = {name: value - self._last.get(name, 0) for name, value in totals.items()}
        self._last = dict(totals)
        return {name: value for name, value in risen.items() if value}


class RankMeter:
    """Reads one rank after each step; used by the model's thread."""

    def __init__(self, engine: Engine, worker: WorkerSide) -> None:
        self._engine = engine
        self._worker = worker
        self._differences = Differences()
        self._shown: Figures = {}
        # (prompts that had something to save, those whose save was taken) of each reading
        self._recent: deque[tuple[int, int]] = deque()
        self._is_warned = False

    def take(self) -> tuple[Figures, Figures]:
        """Return (what was added, what stands now): counters and gauges that have changed."""
        stats = self._engine.stats()
        totals: dict[str, float] = {
            name: value
            for name, value in stats.counters.items()
            if name in COUNTED or name.startswith(REASONED)
        }
        worker = self._worker
        totals["restore_seconds"] = worker.restore_s
        totals["save_seconds"] = worker.save_s
        totals["prompts"] = worker.keeper.prompts
        totals["saves_taken"] = stats.counters["saves"] + sum(
            stats.counters.get(name, 0) for name in _NOTHING_TO_SAVE
        )
        added = self._differences.take(totals)
        prompts, taken = int(added.pop("prompts", 0)), int(added.pop("saves_taken", 0))
        now: Figures = {name: getattr(stats, name) for name in SHOWN}
        now["saves_accepted_ratio"] = self._health(prompts, taken)
        changed = {name: value for name, value in now.items() if self._shown.get(name) != value}
        self._shown = now
        return added, changed

    def _health(self, prompts: int, taken: int) -> float:
        """Return the share of the last prompts whose save was taken, 1 before the first one."""
        if prompts:
            self._recent.append((prompts, taken))
        asked = sum(each[0] for each in self._recent)
        while self._recent and asked - self._recent[0][0] >= HEALTH_REQUESTS:
            asked -= self._recent.popleft()[0]
        accepted = sum(each[1] for each in self._recent)
        if accepted:
            self._is_warned = False
        elif asked >= HEALTH_REQUESTS and not self._is_warned:
            self._is_warned = True
            logger.warning("range: nothing of the last %d prompts was saved", asked)
        return min(1.0, accepted / asked) if asked else 1.0
