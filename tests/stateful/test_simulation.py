"""Every order of events: thousands of seeds of the whole engine on a machine that they control."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest
from rangekv.engine.testing.mutants import MUTANTS
from rangekv.engine.testing.simulation import EVENTS, simulate
from support.effort import effort
from support.seeds import CHUNK, play

SEEDS = effort(2_000, 200_000)

# Rules whose breach only an order of events can show, with the seeds that it takes.
SEEN_BY_SEEDS = {
    "a lease is not counted on its extent",
    "a save is published before its last write",
    "space of a failed save is free before its writes returned",
    "a bank is free before its cancelled read returned",
    "a bank is free at its deadline",
    "a late read is delivered",
    "finish does not wait for copies and direct reads",
    "a failed range is not reported",
    "reading ahead takes the last bank",
    "banks that were read ahead are never given back",
    "an unknown fence frees its bank",
    "a child is visible before its parent",
    "eviction ignores leases",
}


def test_every_order_of_events_keeps_every_rule(figure):
    total: Counter[str] = Counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool:
        for counts in pool.map(play, range(0, SEEDS, CHUNK)):
            total += counts
    # A simulation in which nothing happens proves nothing.
    for what in ("hit", "published", "delivered blocks", "failed blocks", "stale", "evicted bytes"):
        assert total[what] > SEEDS / 20, what
    assert total["process ended"] > 0
    figure(
        "simulated orders",
        f"{SEEDS:,} seeds of {EVENTS} events, {total['delivered blocks']:,} blocks compared"
        f" (rangectl replay-fault simulate --seeds {SEEDS})",
    )


def test_a_seed_repeats_everything():
    assert simulate(5) == simulate(5)


@pytest.mark.parametrize("name", sorted(SEEN_BY_SEEDS))
def test_an_engine_without_one_of_its_rules_is_caught_by_a_seed(name):
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    with mutant.put_in():
        for seed in range(200):
            try:
                simulate(seed)
            except Exception:
                return
    pytest.fail("no seed sees that the rule is gone")
