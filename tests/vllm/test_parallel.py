"""Real vLLM with two ranks: each has its store, all of them hold the same, the minimum counts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine import inspection, stores
from support.vllm_events import Event, Listener, blocks_of
from support.vllm_model import TOKEN_BYTES
from support.vllm_process import (
    BLOCK_TOKENS,
    IN_PROCESS,
    Output,
    Run,
    assert_same,
    rangectl,
    run_vllm,
)
from support.vllm_store import flip_byte_of, stored_tokens, tokens_of

RANDOM = random.Random(6)


def some_tokens(count: int) -> list[int]:
    return [RANDOM.randrange(10, 2000) for _ in range(count)]


def floor(count: int) -> int:
    return count // BLOCK_TOKENS * BLOCK_TOKENS


LONG = some_tokens(2100)
BRANCH = LONG[:1000] + some_tokens(40)
DAMAGED = LONG[:1600] + some_tokens(64)
BESIDE = some_tokens(290)  # computed on both ranks beside a restore that fails on one
BUSY = some_tokens(1800)  # its prefill takes so long that the rest of its batch is one step
AFTER = LONG[:1800] + some_tokens(30)
CHUNKED = some_tokens(700)
DAMAGED_TOKEN = 1500
PLAIN = [[LONG], [BRANCH], [BUSY, DAMAGED, BESIDE], [AFTER], [CHUNKED]]
# Two workers, one core each: without it vLLM wants a NUMA node for each.
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
PARALLEL: dict[str, Any] = {"tensor_parallel_size": 2, "environment": ONE_CORE_EACH}
# The scheduler in the script's process, where the last prompt is not saved: no step follows it.
NEAR = PARALLEL | {"environment": IN_PROCESS | ONE_CORE_EACH}


@dataclass(frozen=True)
class Lives:
    """What the processes that shared one pair of stores have served and left behind."""

    plain: dict[tuple[int, ...], Output]  # computed by a tenant that has nothing, by prompt
    first: Run
    after_first: list[inspection.StoreReport]
    damaged: Run
    after_damaged: list[inspection.StoreReport]
    wiped: Run
    told_by_wiped: list[Event]
    after_wiped: list[inspection.StoreReport]


@pytest.fixture(scope="module")
def lives(module_path: Path, model: Path) -> Lives:
    cache = module_path / "cache"
    rangectl("init", str(cache), "--capacity", "1GiB", "--world-size", "2")
    connector = {"store": str(cache), "lookup_timeout_ms": 10_000, "load_mode": "layerwise"}

    def reports() -> list[inspection.StoreReport]:
        return [inspection.read_store(place.path) for place in stores.list_stores(str(cache))]

    first = run_vllm(
        module_path / "first",
        model,
        [{"prompts": [LONG], "max_tokens": 1}],  # ends in the step that it is computed in
        connector=connector,
        **PARALLEL,
    )
    after_first = reports()
    flip_byte_of(after_first[1], LONG, layer_index=2, token=DAMAGED_TOKEN)
    damaged = run_vllm(
        module_path / "damaged",
        model,
        [
            {"prompts": [BRANCH]},
            {"prompts": [BUSY, DAMAGED, BESIDE]},
            {"prompts": [DAMAGED], "reset": "local", "patience_s": 60},
            {"prompts": [LONG], "reset": "local"},
        ],
        connector=connector,
        **NEAR,
    )
    after_damaged = reports()
    rangectl("format", after_damaged[0].path, "--yes")
    with Listener() as listener, listener.following():
        wiped = run_vllm(
            module_path / "wiped",
            model,
            [
                {"prompts": [LONG]},
                {"prompts": [AFTER], "reset": "local"},
                {"prompts": [CHUNKED], "extra": {"cache_salt": "a"}},
                {"prompts": [CHUNKED], "extra": {"cache_salt": "a"}, "reset": "local"},
                {"prompts": [CHUNKED], "extra": {"cache_salt": "b"}, "reset": "local"},
                *(
                    {"prompts": batch, "extra": {"cache_salt": f"plain {number}"}}
                    for number, batch in enumerate(PLAIN)
                ),
            ],
            connector=connector | {"load_mode": "async"},
            max_num_batched_tokens=512,
            kv_events_config=listener.config,
            **NEAR,
        )
    plain = {
        tuple(prompt): output
        for batch, outputs in zip(PLAIN, wiped.batches[-len(PLAIN) :], strict=True)
        for prompt, output in zip(batch, outputs, strict=True)
    }
    assert all(output.cached == 0 for output in plain.values())
    told = listener.events
    return Lives(plain, first, after_first, damaged, after_damaged, wiped, told, reports())


def assert_as_plain(lives: Lives, prompts: list[list[int]], outputs: list[Output]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, lives.plain[tuple(prompt)])


def test_each_rank_has_its_own_store_of_its_share(lives: Lives) -> None:
    paths = [report.path for report in lives.after_first]
    assert [path.rpartition("/")[2] for path in paths] == ["rank-0-of-2", "rank-1-of-2"]
    for report in lives.after_first:
        assert (report.state, report.reason) == ("warm", None)
        assert stored_tokens(report) == floor(len(LONG))
        assert report.geometry is not None
        assert report.geometry.token_bytes == TOKEN_BYTES // 2
        assert report.geometry.usable_bytes <= 512 << 20


def test_new_process_restores_on_both_ranks(lives: Lives) -> None:
    (output,) = lives.damaged.batches[0]
    assert output.cached == floor(1000)
    assert_as_plain(lives, [BRANCH], [output])


def test_restore_that_fails_on_one_rank_costs_time_only(lives: Lives) -> None:
    assert_as_plain(lives, [BUSY, DAMAGED, BESIDE], lives.damaged.batches[1])
    assert "Recovered from KV load failure" in lives.damaged.log
    failures = sorted(each["checksum_failures"] for each in lives.damaged.counters_of_ranks)
    assert failures == ["0", "1"]
    (again,) = lives.damaged.batches[2]
    assert again.cached == floor(len(DAMAGED) - 1)
    assert_as_plain(lives, [DAMAGED], [again])


def test_what_one_rank_lost_is_gone_on_both(lives: Lives) -> None:
    """The rank that still had it whole does not go on to promise what no other can give."""
    retired = [int(each["records_retired"]) for each in lives.damaged.counters_of_ranks]
    assert retired[0] == retired[1] >= 1
    (output,) = lives.damaged.batches[3]
    assert output.cached == floor(1600)  # what DAMAGED has brought back of LONG
    held = [
        sorted(tokens_of(report, each) for each in report.tables.records)  # type: ignore[union-attr]
        for report in lives.after_damaged
    ]
    assert held[0] == held[1]


def test_nothing_of_the_failed_step_is_saved_on_any_rank(lives: Lives) -> None:
    for report in lives.after_damaged:
        assert report.tables is not None
        saved = [tokens_of(report, each)[:64] for each in report.tables.records]
        assert BESIDE[:64] not in saved


def test_rank_whose_store_was_wiped_recovers_with_one_prompt(lives: Lives) -> None:
    (missed,), (hit,) = lives.wiped.batches[:2]
    assert missed.cached == 0
    assert hit.cached == floor(1800)
    assert_as_plain(lives, [LONG, AFTER], [missed, hit])


def test_router_hears_of_a_prompt_once_both_ranks_have_it(lives: Lives) -> None:
    """One of them had it all along; the other one saves it at the end of its prefill."""
    stored = [each for each in lives.told_by_wiped if each["type"] == "BlockStored"]
    of_disk = [each.get("medium") == "STORAGE" for each in stored]
    own = blocks_of([each for each in stored if each.get("medium") == "GPU"])
    prompt = own[: len(LONG) // BLOCK_TOKENS]
    first = of_disk.index(True)
    assert set(prompt) <= set(blocks_of(stored[:first]))  # vLLM has computed all of it by then
    told = blocks_of([each for each in stored if each.get("medium") == "STORAGE"])
    assert told[: len(prompt)] == prompt
    assert len(told) == len(set(told))


def test_tenants_of_two_ranks_hit_their_own_prompts_only(lives: Lives) -> None:
    outputs = [output for (output,) in lives.wiped.batches[2:5]]
    assert [output.cached for output in outputs] == [0, floor(len(CHUNKED) - 1), 0]
    assert_as_plain(lives, [CHUNKED] * 3, outputs)


def test_both_ranks_close_clean(lives: Lives) -> None:
    for run in (lives.first, lives.damaged, lives.wiped):
        assert run.returncode == 0
        assert run.log.count("range: close state=clean") == 2
        for counters in run.counters_of_ranks:
            assert counters["leases_open"] == "0"
            assert counters["banks_quarantined"] == "0"
    assert all(report.state == "warm" for report in lives.after_wiped)
