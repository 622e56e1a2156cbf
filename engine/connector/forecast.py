"""How a hit is loaded: layer by layer, beside the steps of others, or not at all.

Decides by what this process has measured, never by a guess; it measures nothing itself.
"""

from __future__ import annotations

import statistics
from collections import deque
from enum import Enum

SAMPLES_KEPT = 9
SAMPLES_MIN = 3
PREFILL_TOKENS_MIN = 64  # a step of fewer tokens costs what a step costs, whatever its tokens
STALL_MAX_S = 0.025  # how much longer a step may take for requests that decode in it
DECLINES_IN_A_ROW = 15  # then one is loaded all the same: what loading costs may have changed


class LoadChoice(Enum):
    """LAYERWISE runs inside the request's first step, BACKGROUND before it."""

    LAYERWISE = "layerwise"
    BACKGROUND = "async"
    DECLINED = "declined"


class Rate:
    """Seconds that a token takes, by the median of the last measurements."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=SAMPLES_KEPT)

    def note(self, tokens: int, seconds: float) -> None:
        """Take one measurement."""
        self._samples.append(seconds / tokens)

    def seconds(self, tokens: int) -> float | None:
        """Return the prediction for `tokens`, or None while too little is measured."""
        if len(self._samples) < SAMPLES_MIN:
            return None
        return statistics.median(self._samples) * tokens


class Forecast:
    """Used by the scheduler's thread. With `mode` layerwise or async the choice is the user's."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._load = Rate()
        self._prefill = Rate()
        self._declines = 0

    def note(self, computed: tuple[int, float], loads: list[tuple[int, float]]) -> None:
        """Take what a step has measured: (tokens, seconds) of its computation and of its loads."""
        tokens, seconds = computed
        if tokens >= PREFILL_TOKENS_MIN:
            self._prefill.note(tokens, seconds)
        for tokens, seconds in loads:
            self._load.note(tokens, seconds)

    def choose(self, tokens: int, *, others_decode: bool) -> LoadChoice:
        """Return what to do with a hit of `tokens` tokens.

        A prompt costs more a token the longer it is, so the prediction of a prefill, measured on
        what was computed, is rather too low than too high.
        """
        if self._mode != "auto":
            return LoadChoice(self._mode)
        load, prefill = self._load.seconds(tokens), self._prefill.seconds(tokens)
        if load is not None and prefill is not None and load > prefill:
            self._declines += 1
            if self._declines <= DECLINES_IN_A_ROW:
                return LoadChoice.DECLINED
        self._declines = 0
        if others_decode and (load is None or load > STALL_MAX_S):
            return LoadChoice.BACKGROUND
        return LoadChoice.LAYERWISE
