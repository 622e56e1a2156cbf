"""Real vLLM with loads in the background: what was computed first is what comes back.

An engine core in the test's own process, so that an abort comes between two certain steps.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine import inspection, stores
from support.vllm_process import (
    BLOCK_TOKENS,
    IN_PROCESS,
    Output,
    Run,
    assert_same,
    rangectl,
    run_vllm,
)
from support.vllm_store import flip_byte_of

RANDOM = random.Random(66)


def some_tokens(count: int) -> list[int]:
    return [RANDOM.randrange(10, 2000) for _ in range(count)]


def floor(count: int) -> int:
    return count // BLOCK_TOKENS * BLOCK_TOKENS


LONG = some_tokens(2100)
BRANCH = LONG[:1000] + some_tokens(100)
OTHER = some_tokens(700)
FIRST: dict[str, dict[str, Any]] = {
    "branch computed": {"prompts": [BRANCH]},
    "other computed": {"prompts": [OTHER], "reset": "all"},
    "long computed": {"prompts": [LONG], "reset": "all"},
    "branch": {"prompts": [BRANCH], "reset": "local"},
    "beside": {"prompts": [OTHER, LONG], "reset": "local"},
    # The first step starts the load and computes nothing; nothing can be reset until it is over.
    "aborted": {"prompts": [LONG], "reset": "local", "abort": [0], "after": 1},
    "after abort": {"prompts": [LONG]},
}
SECOND: dict[str, dict[str, Any]] = {
    "damaged in the middle": {"prompts": [LONG]},
    "mended": {"prompts": [LONG], "reset": "local"},
    "damaged in the first block": {"prompts": [OTHER]},
    "mended as well": {"prompts": [OTHER], "reset": "local"},
}


@dataclass(frozen=True)
class Lives:
    """Two processes with one store, damaged in between, and what they served by name."""

    first: Run
    second: Run
    served: dict[str, list[Output]]


@pytest.fixture(scope="module")
def lives(module_path: Path, model: Path) -> Lives:
    cache = module_path / "cache"
    rangectl("init", str(cache), "--capacity", "512MiB")
    connector = {"store": str(cache), "lookup_timeout_ms": 10_000, "load_mode": "async"}

    def live(name: str, turns: dict[str, dict[str, Any]]) -> Run:
        return run_vllm(
            module_path / name,
            model,
            list(turns.values()),
            connector=connector,
            environment=IN_PROCESS,
        )

    first = live("first", FIRST)
    (place,) = stores.list_stores(str(cache))
    flip_byte_of(inspection.read_store(place.path), LONG, layer_index=2, token=1500)
    flip_byte_of(inspection.read_store(place.path), OTHER, layer_index=0, token=3)
    second = live("second", SECOND)
    served = dict(zip([*FIRST, *SECOND], [*first.batches, *second.batches], strict=True))
    return Lives(first, second, served)


@pytest.mark.parametrize(
    ("turn", "cached", "computed"),
    [
        ("branch", [floor(1000)], ["branch computed"]),
        ("beside", [0, floor(len(LONG) - 1)], ["other computed", "long computed"]),
        ("after abort", [floor(len(LONG) - 1)], ["long computed"]),
        ("mended", [floor(len(LONG) - 1)], ["long computed"]),
        ("mended as well", [floor(len(OTHER) - 1)], ["other computed"]),
    ],
)
def test_loaded_is_as_computed(
    lives: Lives, turn: str, cached: list[int], computed: list[str]
) -> None:
    outputs = lives.served[turn]
    assert [output.cached for output in outputs] == cached
    for output, name in zip(outputs, computed, strict=True):
        (plain,) = lives.served[name]
        assert plain.cached == 0
        assert_same(output, plain)


@pytest.mark.parametrize(
    ("turn", "computed"),
    [
        ("damaged in the middle", "long computed"),
        ("damaged in the first block", "other computed"),
    ],
)
def test_load_that_fails_becomes_recomputation(lives: Lives, turn: str, computed: str) -> None:
    (output,), (plain,) = lives.served[turn], lives.served[computed]
    assert_same(output, plain)


def test_every_hit_was_loaded_in_the_background(lives: Lives) -> None:
    for run, loads in ((lives.first, 4), (lives.second, 4)):
        assert f"background_loads={loads} " in run.log
    assert lives.second.log.count("Recovered from KV load failure") == 2
    assert lives.second.counters["checksum_failures"] == "2"


def test_nothing_is_left_behind(lives: Lives) -> None:
    assert not lives.served["aborted"]
    for run in (lives.first, lives.second):
        assert run.returncode == 0
        assert "range: close state=clean" in run.log
        assert run.counters["leases_open"] == "0"
        assert run.counters["banks_quarantined"] == "0"
