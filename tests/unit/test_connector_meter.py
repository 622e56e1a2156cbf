"""What an operator sees: differences of counters, gauges that changed, health, the way to vLLM."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from rangekv.engine.connector.meter import HEALTH_REQUESTS, Differences, RankMeter


class FakeEngine:
    def __init__(self) -> None:
        self.counters = {"lookups": 0, "saves": 0, "gathers": 5}
        self.used_bytes = 0

    def stats(self) -> Any:
        return SimpleNamespace(
            counters=dict(self.counters),
            used_bytes=self.used_bytes,
            capacity_bytes=100,
            read_banks_in_use=0,
            save_banks_in_use=0,
            banks_in_quarantine=0,
        )


def a_meter() -> tuple[RankMeter, FakeEngine, Any]:
    engine = FakeEngine()
    worker = SimpleNamespace(keeper=SimpleNamespace(prompts=0), restore_s=0.0, save_s=0.0)
    return RankMeter(engine, worker), engine, worker  # type: ignore[arg-type]


def test_totals_become_what_was_added() -> None:
    differences = Differences()
    assert differences.take({"a": 3, "b": 0}) == {"a": 3}
    assert differences.take({"a": 3, "b": 2, "c": 1}) == {"b": 2, "c": 1}
    assert differences.take({"a": 3, "b": 2, "c": 1}) == {}


def test_quiet_rank_tells_nothing_and_a_busy_one_what_moved() -> None:
    meter, engine, worker = a_meter()
    added, shown = meter.take()
    assert added == {}
    assert shown["capacity_bytes"] == 100
    assert meter.take() == ({}, {})
    engine.counters |= {"lookups": 2, "miss_absent": 1, "gathers": 9}
    engine.used_bytes, worker.restore_s = 50, 0.5
    assert meter.take() == (
        {"lookups": 2, "miss_absent": 1, "restore_seconds": 0.5},
        {"used_bytes": 50},
    )


def test_health_is_the_share_of_the_last_prompts_that_were_saved() -> None:
    meter, engine, worker = a_meter()
    assert meter.take()[1]["saves_accepted_ratio"] == 1
    worker.keeper.prompts, engine.counters["saves"] = 10, 3
    engine.counters["saves_declined_held"] = 2  # stored already: as good as saved
    engine.counters["saves_declined_full"] = 5
    assert meter.take()[1]["saves_accepted_ratio"] == 0.5
    for _ in range(HEALTH_REQUESTS):
        worker.keeper.prompts += 1
        engine.counters["saves"] += 1
        _, shown = meter.take()
    assert shown["saves_accepted_ratio"] == 1


def test_store_that_takes_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    meter, engine, worker = a_meter()
    with caplog.at_level(logging.WARNING, logger="vllm.rangekv"):
        for _ in range(3 * HEALTH_REQUESTS):
            worker.keeper.prompts += 1
            meter.take()
        assert len(caplog.records) == 1
        worker.keeper.prompts += 1
        engine.counters["saves"] += 1
        meter.take()
        for _ in range(2 * HEALTH_REQUESTS):
            worker.keeper.prompts += 1
            meter.take()
    assert len(caplog.records) == 2
