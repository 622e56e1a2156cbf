"""The paired statistic: medians, the 15-pair rule, the interval's coverage, the verdict."""

from __future__ import annotations

import random

import pytest

from rangectl.statistics import PAIRS_MIN, Paired, Verdict, percentile


def test_median_and_range_of_ratios_taken_pair_by_pair() -> None:
    ratio = Paired.ratio([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert (ratio.median, ratio.low, ratio.high, ratio.pair_count) == (2.0, 1.0, 3.0, 3)


def test_sequences_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        Paired.ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="at least one pair"):
        Paired.ratio([], [])


@pytest.mark.parametrize("count", range(1, PAIRS_MIN))
def test_below_fifteen_pairs_there_is_no_interval_and_no_verdict(count: int) -> None:
    ratio = Paired.ratio([9.0] * count, [1.0] * count)
    assert ratio.interval is None
    assert ratio.verdict(1.0) is None


def test_fifteen_pairs_take_the_fourth_and_twelfth_value() -> None:
    """P(binomial(15, 1/2) <= 3) is 0.0176, and <= 4 is 0.0592: the ranks of every table."""
    ratio = Paired.ratio([float(n) for n in range(1, 16)], [1.0] * 15)
    assert ratio.interval == (4.0, 12.0)


def test_a_target_is_met_by_the_median_and_missed_only_by_the_whole_interval() -> None:
    ratio = Paired.ratio([float(n) for n in range(1, 16)], [1.0] * 15)
    assert ratio.verdict(8.0) is Verdict.MET
    assert ratio.verdict(7.9) is Verdict.UNDECIDED
    assert ratio.verdict(4.0) is Verdict.UNDECIDED
    assert ratio.verdict(3.9) is Verdict.MISSED


@pytest.mark.parametrize("count", [15, 16, 25, 40])
def test_the_interval_covers_the_median_of_a_skewed_distribution(count: int) -> None:
    source = random.Random(count)
    trials = 2000
    covered = 0
    for _ in range(trials):
        sample = [source.expovariate(1.0) for _ in range(count)]
        interval = Paired.ratio(sample, [1.0] * count).interval
        assert interval is not None
        covered += interval[0] <= 0.6931 <= interval[1]
    assert covered / trials > 0.94


def test_differences_are_taken_pair_by_pair() -> None:
    difference = Paired.difference([1.0, 4.0, 9.0], [1.0, 1.0, 1.0])
    assert (difference.median, difference.low, difference.high) == (3.0, 0.0, 8.0)


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1.0), (1, 1.0), (50, 50.0), (95, 95.0), (99, 99.0), (100, 100.0)]
)
def test_a_percentile_is_a_sample(percent: int, expected: float) -> None:
    samples = [float(n) for n in range(1, 101)]
    random.Random(0).shuffle(samples)
    assert percentile(samples, percent) == expected


def test_a_percentile_of_few_samples_is_the_next_larger_one() -> None:
    assert [percentile([1.0, 2.0, 3.0], percent) for percent in (33, 34, 50, 99)] == [1, 2, 2, 3]
