"""Medians of paired ratios and differences, their 95 % interval, the verdict on a target.

Owns the statistics that benchmarks report; never prints and never rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from math import comb
from statistics import median

PAIRS_MIN = 15
"""Fewer pairs than this carry no interval and no verdict."""

PERCENTS = (50, 95, 99)
"""The percentiles of a latency that are reported."""


class Verdict(Enum):
    """What a sample says about a target; below `PAIRS_MIN` pairs it says nothing."""

    MET = "met"
    MISSED = "missed"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Paired:
    """Samples taken next to each other, compared pair by pair: median, range and interval."""

    median: float
    low: float
    high: float
    pair_count: int
    interval: tuple[float, float] | None
    """95 % interval of the median; None below `PAIRS_MIN` pairs."""

    @classmethod
    def ratio(cls, numerators: Sequence[float], denominators: Sequence[float]) -> Paired:
        """Divide by position; raises ValueError unless both are of one length."""
        return cls._of([n / d for n, d in zip(numerators, denominators, strict=True)])

    @classmethod
    def difference(cls, samples: Sequence[float], references: Sequence[float]) -> Paired:
        """Subtract by position; raises ValueError unless both are of one length."""
        return cls._of([s - r for s, r in zip(samples, references, strict=True)])

    @classmethod
    def _of(cls, compared: Sequence[float]) -> Paired:
        if not compared:
            raise ValueError("a paired statistic needs at least one pair")
        ordered = sorted(compared)
        return cls(median(ordered), ordered[0], ordered[-1], len(ordered), _interval(ordered))

    def verdict(self, target: float) -> Verdict | None:
        """Judge "at most `target`": the median meets it, only a whole interval beyond misses it."""
        if self.interval is None:
            return None
        if self.median <= target:
            return Verdict.MET
        return Verdict.MISSED if self.interval[0] > target else Verdict.UNDECIDED


def percentile(samples: Sequence[float], percent: int) -> float:
    """Return the smallest sample that at least `percent` of 100 samples do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def _interval(ordered: Sequence[float]) -> tuple[float, float] | None:
    """Return the narrowest pair of order statistics that covers the median with 95 %.

    The number of samples below the true median is binomial(n, 1/2) whatever the distribution
    is, so this holds for the skewed times of a shared disk, and nothing has to be resampled.
    """
    count = len(ordered)
    if count < PAIRS_MIN:
        return None
    rank, tail = 0, comb(count, 0)
    while 2 * (tail + comb(count, rank + 1)) <= 0.05 * 2**count:
        rank += 1
        tail += comb(count, rank)
    return ordered[rank], ordered[count - 1 - rank]
