"""What is worth writing: an SSD wears with every byte, and many prompts never come again.

Remembers hashes and counts bytes, both bounded; never looks at tokens and never saves anything.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from rangekv.engine.connector.settings import Settings

BLOCKS_REMEMBERED = 1 << 18  # 8 million tokens in blocks of 32, some 40 MB at most
DAY_S = 86_400


class Touches:
    """Which blocks have been part of some request; used by the scheduler's thread.

    Every hash stands for its block and all before it. The least recent half is forgotten at once
    when there are too many.
    """

    def __init__(self, remembered: int = BLOCKS_REMEMBERED) -> None:
        self._half = remembered // 2
        self._recent: set[int] = set()
        self._older: set[int] = set()

    def note(self, hashes: Sequence[Hashable]) -> int:
        """Remember these blocks of one request; return how many of them, from the first on, were
        known before.
        """
        known = bisect_left(range(len(hashes)), True, key=lambda at: not self._knows(hashes[at]))
        self._recent.update(map(hash, hashes))
        if len(self._recent) > self._half:
            self._older, self._recent = self._recent, set()
        return known

    def _knows(self, block: Hashable) -> bool:
        return hash(block) in self._recent or hash(block) in self._older


class WriteBudget:
    """Bytes that may be written: a day's worth at first, coming back evenly over each day.

    What was begun is written to its end, so it may be overdrawn by the saves under way. It begins
    anew with each process.
    """

    def __init__(
        self, bytes_per_day: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_day = bytes_per_day
        self._clock = clock
        self._left = float(bytes_per_day or 0)
        self._last = clock()

    def spend(self, byte_count: int) -> None:
        """Take what has been written since the last call."""
        if self._bytes_per_day is not None:
            now = self._clock()
            gained = (now - self._last) * self._bytes_per_day / DAY_S
            self._left = min(self._bytes_per_day, self._left + gained) - byte_count
            self._last = now

    @property
    def is_spent(self) -> bool:
        """Whether nothing more is to be saved for now."""
        self.spend(0)
        return self._bytes_per_day is not None and self._left <= 0


class Admission:
    """What is saved of a request, as `admit`, `write_budget_per_day` and `save_generated` say.

    Used by the scheduler's thread, so that all ranks save the same. What it declines is counted in
    `counts`.
    """

    def __init__(self, settings: Settings, block_tokens: int, counts: Counter[str]) -> None:
        self.budget = WriteBudget(settings.write_budget_per_day)
        self._touches = Touches() if settings.admit == "second-touch" else None
        self._saves_answers = settings.save_generated
        self._block_tokens = block_tokens
        self._counts = counts

    def prompt_tokens(self, request: Any) -> int:
        """Return how many tokens of a new request's prompt are worth saving, whole blocks."""
        prompt = request.num_prompt_tokens // self._block_tokens * self._block_tokens
        admitted = prompt
        if self._touches is not None:
            known = self._touches.note(request.block_hashes)
            admitted = min(prompt, known * self._block_tokens)
            self._counts["saves_declined_first-touch"] += admitted < prompt
        if admitted and self.budget.is_spent:
            self._counts["saves_declined_write-budget"] += 1
            return 0
        return int(admitted)

    def takes_answer(self, request: Any) -> bool:
        """Say whether what a request has generated is worth saving; a first touch is remembered."""
        if self._touches is not None:
            self._touches.note(request.block_hashes)
            return False
        return self._saves_answers and not self.budget.is_spent
