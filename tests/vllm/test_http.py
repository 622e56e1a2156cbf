"""Real vLLM over HTTP, as it is operated: named by its name alone, watched, ended by SIGTERM."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.vllm_http import UNI, serving
from support.vllm_process import BLOCK_TOKENS, IN_PROCESS, rangectl

RANDOM = random.Random(8)
MINIMUM = 2 * BLOCK_TOKENS


def some_tokens(count: int) -> list[int]:
    return [RANDOM.randrange(10, 2000) for _ in range(count)]


def floor(count: int) -> int:
    return count // BLOCK_TOKENS * BLOCK_TOKENS


LONG = some_tokens(1500)
STREAMED = LONG[:900] + some_tokens(50)
SMALL = some_tokens(100)
BRIEF = LONG[: BLOCK_TOKENS + 8] + some_tokens(60)  # a hit of one block


@dataclass(frozen=True)
class Life:
    """What one server answered, showed and logged."""

    answers: dict[str, dict[str, Any]]
    streamed: list[int]
    metrics: dict[tuple[str, str], float]
    inspected: dict[str, Any]  # by `rangectl inspect live`
    log: str
    returncode: int


def connector(cache: Path) -> dict[str, Any]:
    return {
        "kv_connector": "RangeConnector",  # by its entry point
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": str(cache),
            "capacity": "256MiB",
            "lookup_timeout_ms": 10_000,
            "min_restore_tokens": MINIMUM,
        },
    }


def beside_another(cache: Path, other: Path) -> dict[str, Any]:
    """Range and a connector of vLLM's own, which puts files into `other`."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(other)},
    }
    ours = connector(cache)
    ours["kv_connector_extra_config"]["write_budget_per_day"] = "4KiB"  # spent by the first save
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, example]},
    }


def live(
    folder: Path, model: Path, transfer: dict[str, Any], cache: Path, opening: list[int]
) -> Life:
    arguments = ("--shutdown-timeout", "30", *UNI)
    with serving(folder, model, transfer, *arguments, **IN_PROCESS) as server:
        server.complete(opening)
        answers = {
            "long": server.complete(LONG),
            "small": server.complete(SMALL, cache_salt="tenant"),
        }
        streamed = server.stream(STREAMED)
        answers["small without salt"] = server.complete(SMALL)
        metrics = server.metrics()
        inspected = json.loads(rangectl("inspect", str(cache), "live", "--json"))
        return Life(answers, streamed, metrics, inspected, server.log, server.terminate())


@pytest.fixture(scope="module")
def lives(module_path: Path, model: Path) -> tuple[Life, Life]:
    cache, other = module_path / "cache", module_path / "other"
    cache.mkdir()
    first = live(module_path / "first", model, connector(cache), cache, some_tokens(100))
    second = live(module_path / "second", model, beside_another(cache, other), cache, BRIEF)
    return first, second


def tokens_of(answer: dict[str, Any]) -> list[int]:
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


def test_server_that_got_sigterm_reopens_warm(lives: tuple[Life, Life]) -> None:
    first, second = lives
    assert first.returncode == second.returncode == 0
    assert "range: open" in first.log
    assert "lets SIGTERM kill" not in first.log
    assert "state=warm" in second.log
    assert cached(first.answers["long"]) == 0
    assert cached(second.answers["long"]) == floor(len(LONG) - 1)


def test_answers_after_the_restart_are_the_same(lives: tuple[Life, Life]) -> None:
    first, second = lives
    for name, answer in first.answers.items():
        assert tokens_of(second.answers[name]) == tokens_of(answer), name
    assert second.streamed == first.streamed
    assert len({*map(tuple, (first.streamed, *map(tokens_of, first.answers.values())))}) == 3


def test_first_life_is_seen_to_save(lives: tuple[Life, Life]) -> None:
    seen = lives[0].metrics
    assert seen["lookups_total", "0"] == 5
    assert seen["lookup_tokens_total", "0"] == 100 + len(LONG) + len(STREAMED) + 2 * len(SMALL)
    assert seen["miss_total", "0 absent"] == 4
    assert seen["saves_published_total", "0"] >= 2
    assert seen["write_bytes_total", "0"] > 0
    assert seen["save_seconds_total", "0"] > 0
    assert seen["saves_accepted_ratio", "0"] == 1
    assert 0 < seen["used_bytes", "0"] < seen["capacity_bytes", "0"] <= 256 << 20
    assert seen["banks_in_quarantine", "0"] == 0


def test_second_life_is_seen_to_restore_and_to_decline(lives: tuple[Life, Life]) -> None:
    seen = lives[1].metrics
    assert seen["hit_tokens_total", "0"] >= floor(len(LONG) - 1)
    assert seen["delivered_tokens_total", "0"] >= floor(len(LONG) - 1) - BLOCK_TOKENS
    # of BRIEF, and of STREAMED what lies behind vLLM's own hit
    assert seen["declined_tokens_total", "scheduler below-minimum"] == 2 * BLOCK_TOKENS
    assert seen["saves_declined_total", "scheduler write-budget"] >= 1
    assert seen["read_bytes_total", "0"] > 0
    assert seen["restore_seconds_total", "0"] > 0
    assert ("checksum_failures_total", "0") not in seen
    assert seen["read_banks_in_use", "0"] == 0


def test_live_store_tells_what_the_metrics_show(lives: tuple[Life, Life]) -> None:
    for life in lives:
        stats = life.inspected["live"]
        assert stats["lookups"] == life.metrics["lookups_total", "0"]
        assert stats["used_bytes"] == life.metrics["used_bytes", "0"] > 0
        assert stats["leases_open"] == 0
