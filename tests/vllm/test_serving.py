"""Real vLLM on the CPU: prompts outlive the process, and nothing wrong is ever served.

One store goes through the lives of several vLLM processes, each as short as it can be; the tests
then read what each life has left. Every output is compared with a run without the connector.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine import inspection, stores
from support.vllm_model import LAYERS, TOKEN_BYTES
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

RANDOM = random.Random(20)


def some_tokens(count: int) -> list[int]:
    return [RANDOM.randrange(10, 2000) for _ in range(count)]


def floor(count: int) -> int:
    return count // BLOCK_TOKENS * BLOCK_TOKENS


LONG = some_tokens(2100)
BRANCH = LONG[:1000] + some_tokens(100)  # leaves LONG in the middle of a block
BUSY = some_tokens(2000)  # its prefill takes so long that the rest of its batch is one step
FRESH = some_tokens(300)
BATCH = [
    BUSY,
    LONG[:700] + some_tokens(60),
    LONG[:1500] + some_tokens(60),
    LONG[:960],  # whole blocks: the last one is computed
    FRESH,
    FRESH[:200] + some_tokens(50),
]
BATCH_CACHED = [0, floor(700), floor(1500), 960 - BLOCK_TOKENS, 0, floor(200)]
BESIDE = some_tokens(290)  # computed in the step whose restore fails
DAMAGED = LONG[:1600] + some_tokens(64)
SHARING = DAMAGED[:1550] + some_tokens(40)  # takes the failed blocks as vLLM's own
# The first is new to the store: while it is computed, the others gather for one step.
DAMAGED_BATCH = [some_tokens(1510), DAMAGED, SHARING, BESIDE]
CHUNKED = some_tokens(1300)
CHUNKED_BATCH = [BRANCH[:900] + some_tokens(30), BRANCH[:900] + some_tokens(40), CHUNKED]
CHUNKED_MORE = [*CHUNKED, *some_tokens(70)]
SALTED = some_tokens(200)
ASKED = some_tokens(400)
ANSWER_COUNT = 69
CHAT = [{"prompts": [ASKED], "max_tokens": ANSWER_COUNT}, {"continue": some_tokens(40)}]
PREEMPTED = {"prompts": [some_tokens(700), some_tokens(333)], "max_tokens": 40}

SCORED: dict[str, Any] = {"prompts": [some_tokens(330)], "prompt_logprobs": 0}

SECOND = {
    "branch": {"prompts": [BRANCH]},
    "batch": {"prompts": BATCH, "reset": "local"},
    "salt a": {"prompts": [SALTED], "extra": {"cache_salt": "a"}},
    "salt a again": {"prompts": [SALTED], "extra": {"cache_salt": "a"}, "reset": "local"},
    "salt b": {"prompts": [SALTED], "extra": {"cache_salt": "b"}, "reset": "local"},
    "no salt": {"prompts": [SALTED], "reset": "local"},
    "salt b again": {"prompts": [SALTED], "extra": {"cache_salt": "b"}, "reset": "local"},
    "no salt again": {"prompts": [SALTED], "reset": "local"},
    "forgotten": {"prompts": [LONG], "reset": "all"},
    "restored": {"prompts": [LONG], "reset": "local"},
    "asked": CHAT[0],
    "continued": CHAT[1] | {"reset": "local"},
    "scored": SCORED,
    "scored again": SCORED,
    "scored prompt": {"prompts": SCORED["prompts"], "reset": "local"},
    "preempted": PREEMPTED | {"preempt": 9},
}
# Steps of an engine core in the test's own process, and room for one long request at a time.
ABORTED: list[dict[str, Any]] = [
    {"prompts": [BUSY, BRANCH], "abort": [1], "after": 3, "max_tokens": 12},  # waits, looked up
    {"prompts": [BRANCH], "reset": "local"},
    {"prompts": [BRANCH, FRESH], "abort": [0], "after": 1, "reset": "local"},  # just restored
    {"prompts": [BRANCH]},
    {"prompts": [DAMAGED], "abort": [0], "after": 1, "reset": "local"},  # its restore has failed
    {"prompts": [DAMAGED]},  # takes what vLLM's prefix cache has left of it
    {"prompts": SCORED["prompts"], "preempt": 0, "reset": "local"},  # its restore has failed
    {"prompts": SCORED["prompts"]},
]
ABORTED_BLOCKS = 1 + -(-len(BUSY) // BLOCK_TOKENS) + 10
INTERRUPTED = some_tokens(1100)  # aborted after its first chunk
CHUNK = 512
ALL_BATCHES = [
    *([LONG], [BRANCH], BATCH, DAMAGED_BATCH, CHUNKED_BATCH, [CHUNKED_MORE], [SALTED]),
    [INTERRUPTED],
]


@dataclass(frozen=True)
class Lives:
    """The store's path and each process that used it, in order."""

    path: str
    plain: dict[tuple[int, ...], Output]  # what a run without the connector gives, by prompt
    plain_chat: list[Output]
    plain_preempted: list[Output]
    first: Run
    after_first: inspection.StoreReport
    inspect_first: str
    second: Run
    turns: dict[str, list[Output]]  # what `second` served, by the names of SECOND
    damaged: Run
    after_damaged: inspection.StoreReport
    killed: Run
    after_killed: inspection.StoreReport
    last: Run
    aborted: Run


@pytest.fixture(scope="module")
def lives(module_path: Path, model: Path) -> Lives:
    cache = module_path / "cache"
    rangectl("init", str(cache), "--capacity", "2GiB")
    # A loaded machine must not turn hits into misses here.
    connector = {"store": str(cache), "lookup_timeout_ms": 10_000, "load_mode": "layerwise"}

    def report() -> inspection.StoreReport:
        (place,) = stores.list_stores(str(cache))
        return inspection.read_store(place.path)

    plain_run = run_vllm(
        module_path / "plain",
        model,
        [*({"prompts": batch} for batch in ALL_BATCHES), SCORED, *CHAT, PREEMPTED],
        environment=IN_PROCESS,
        enable_prefix_caching=False,
    )
    plain = {
        tuple(prompt): output
        for batch, outputs in zip(
            [*ALL_BATCHES, SCORED["prompts"]], plain_run.batches, strict=False
        )
        for prompt, output in zip(batch, outputs, strict=True)
    }
    first = run_vllm(module_path / "first", model, [{"prompts": [LONG]}], connector=connector)
    after_first = report()
    inspect_first = rangectl("inspect", str(cache))
    second = run_vllm(
        module_path / "second",
        model,
        list(SECOND.values()),
        connector=connector,
    )
    flip_byte_of(report(), LONG, layer_index=2, token=500)
    damaged = run_vllm(
        module_path / "damaged",
        model,
        [{"prompts": DAMAGED_BATCH}, {"prompts": [DAMAGED], "reset": "local", "patience_s": 60}],
        connector=connector,
        environment=IN_PROCESS,
    )
    after_damaged = report()
    # What a journal saves of a killed session is seen in test_recovery; this one has none.
    killed = run_vllm(
        module_path / "killed",
        model,
        [
            *({"prompts": batch} for batch in ([BRANCH], CHUNKED_BATCH, [CHUNKED_MORE])),
            {"prompts": [INTERRUPTED], "abort": [0], "after": 1},
            {"prompts": [BRANCH]},  # the worker hears of the abort with the step of another
            {"prompts": [INTERRUPTED]},
        ],
        connector=connector | {"recovery": "discard"},
        killed_by=FRESH,
        environment=IN_PROCESS,
        enable_prefix_caching=False,
        max_num_batched_tokens=CHUNK,
    )
    after_killed = report()
    last = run_vllm(
        module_path / "last",
        model,
        [
            {"prompts": [LONG]},
            {"prompts": [BRANCH], "reset": "local"},
            {"prompts": SCORED["prompts"]},
        ],
        connector=connector | {"recovery": "discard", "placement": "direct"},
        environment=IN_PROCESS | {"THP_MEM_ALLOC_ENABLE": "1"},
    )
    flip_byte_of(report(), LONG, layer_index=2, token=1500)
    flip_byte_of(report(), SCORED["prompts"][0], layer_index=1, token=200)
    aborted = run_vllm(
        module_path / "aborted",
        model,
        ABORTED,
        connector=connector,
        environment=IN_PROCESS,
        num_gpu_blocks_override=ABORTED_BLOCKS,
        max_model_len=2200,
    )
    return Lives(
        after_first.path,
        plain,
        [output for batch in plain_run.batches[-3:-1] for output in batch],
        plain_run.batches[-1],
        first,
        after_first,
        inspect_first,
        second,
        dict(zip(SECOND, second.batches, strict=True)),
        damaged,
        after_damaged,
        killed,
        after_killed,
        last,
        aborted,
    )


def assert_as_plain(lives: Lives, prompts: list[list[int]], outputs: list[Output]) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_same(output, lives.plain[tuple(prompt)])


def test_outputs_differ_between_prompts(lives: Lives) -> None:
    """With uniform logits every comparison below would hold for any KV."""
    assert len({tuple(output.tokens) for output in lives.plain.values()}) == len(lives.plain)
    assert all(output.cached == 0 for output in lives.plain.values())


def test_blank_store_is_adopted(lives: Lives) -> None:
    namespace = lives.after_first.namespace
    assert namespace is not None
    assert lives.path.endswith(f"{namespace.folder}/rank-0-of-1")
    assert lives.first.opened["store"] == lives.path
    assert not os.listdir(os.path.join(os.path.dirname(os.path.dirname(lives.path)), "blank"))


def test_namespace_names_what_kv_depends_on(lives: Lives) -> None:
    namespace = lives.after_first.namespace
    assert namespace is not None
    fields = dict(namespace.fields)
    assert fields.pop("weights")
    assert fields.pop("config")
    assert fields.pop("isa") != "none"
    assert fields.pop("vllm")
    assert fields == {
        "model": "LlamaForCausalLM",
        "revision": "",
        "kv_dtype": "float32",
        "layout": "LBHNC",
        "attention_backend": "CPU_ATTN",
        "kernel_block": BLOCK_TOKENS,
        "block_tokens": BLOCK_TOKENS,
        "layer_count": 4,
        "token_bytes": TOKEN_BYTES,
        "tp_size": 1,
        "tags": "{}",
    }


def test_prompt_of_a_process_that_exits_at_once_is_stored(lives: Lives) -> None:
    assert_as_plain(lives, [LONG], lives.first.batches[0])
    assert lives.first.returncode == 0
    assert (lives.after_first.state, lives.after_first.reason) == ("warm", None)
    assert stored_tokens(lives.after_first) == floor(len(LONG))
    lines = lives.inspect_first.splitlines()
    assert lines[0].split() == ["state", "warm"]
    assert f"{floor(len(LONG)):,} tokens" in lives.inspect_first


def test_new_process_restores_up_to_the_block_where_the_prompts_part(lives: Lives) -> None:
    assert lives.second.opened["state"] == "warm"
    assert lives.second.opened["tokens"] == str(floor(len(LONG)))
    (output,) = lives.turns["branch"]
    assert output.cached == floor(1000)
    assert_as_plain(lives, [BRANCH], [output])


def test_batch_of_shared_and_parting_prefixes_gets_each_its_own(lives: Lives) -> None:
    outputs = lives.turns["batch"]
    assert [output.cached for output in outputs] == BATCH_CACHED
    assert_as_plain(lives, BATCH, outputs)


@pytest.mark.parametrize(
    ("turn", "cached"),
    [
        ("salt a", 0),
        ("salt a again", floor(len(SALTED) - 1)),
        ("salt b", 0),
        ("no salt", 0),
        ("salt b again", floor(len(SALTED) - 1)),
        ("no salt again", floor(len(SALTED) - 1)),
    ],
)
def test_tenants_hit_their_own_prompts_only(lives: Lives, turn: str, cached: int) -> None:
    (output,) = lives.turns[turn]
    assert output.cached == cached
    assert_as_plain(lives, [SALTED], [output])


def test_reset_forgets_what_is_stored_and_saving_goes_on(lives: Lives) -> None:
    (forgotten,), (restored,) = lives.turns["forgotten"], lives.turns["restored"]
    assert forgotten.cached == 0
    assert restored.cached == floor(len(LONG) - 1)
    assert_as_plain(lives, [LONG, LONG], [forgotten, restored])


def test_next_turn_is_hit_behind_the_last_answer(lives: Lives) -> None:
    (asked,), (continued,) = lives.turns["asked"], lives.turns["continued"]
    assert len(asked.tokens) == ANSWER_COUNT
    assert continued.cached == floor(len(ASKED) + ANSWER_COUNT - 1) > floor(len(ASKED))
    assert_same(asked, lives.plain_chat[0])
    assert_same(continued, lives.plain_chat[1])


def test_preempted_requests_go_on_as_if_nothing_had_happened(lives: Lives) -> None:
    outputs = lives.turns["preempted"]
    for output, plain in zip(outputs, lives.plain_preempted, strict=True):
        assert_same(output, plain)


def test_damaged_byte_becomes_recomputation(lives: Lives) -> None:
    assert lives.damaged.opened["state"] == "warm"
    assert_as_plain(lives, DAMAGED_BATCH, lives.damaged.batches[0])
    assert "Recovered from KV load failure" in lives.damaged.log
    assert int(lives.damaged.counters["checksum_failures"]) == 1
    assert int(lives.damaged.counters["records_retired"]) >= 1


def test_nothing_of_the_failed_step_is_saved(lives: Lives) -> None:
    saved = [tokens_of(lives.after_damaged, each) for each in lives.after_damaged.tables.records]
    assert not any(each[:64] == BESIDE[:64] for each in saved)
    assert any(each[:64] == DAMAGED[:64] for each in saved)  # by the steps that recomputed it


def test_recomputed_prompt_is_stored_right(lives: Lives) -> None:
    (output,) = lives.damaged.batches[1]
    assert output.cached == floor(len(DAMAGED) - 1)
    assert_as_plain(lives, [DAMAGED], [output])


def test_chunked_prefill_without_prefix_cache(lives: Lives) -> None:
    outputs = [output for batch in lives.killed.batches[:3] for output in batch]
    prompts = [BRANCH, *CHUNKED_BATCH, CHUNKED_MORE]
    assert [output.cached for output in outputs] == [
        floor(1000),
        floor(900),
        floor(900),
        0,
        floor(len(CHUNKED)),
    ]
    assert_as_plain(lives, prompts, outputs)


def test_request_aborted_while_it_is_saved_leaves_its_first_chunk(lives: Lives) -> None:
    aborted, _, (again,) = lives.killed.batches[3:]
    assert not aborted
    assert again.cached == CHUNK
    assert_as_plain(lives, [INTERRUPTED], [again])


def test_killed_process_leaves_a_cold_store_and_right_output(lives: Lives) -> None:
    assert lives.killed.returncode == -9
    assert (lives.after_killed.state, lives.after_killed.reason) == ("cold", "dirty-marker")
    assert (lives.last.opened["state"], lives.last.opened["reason"]) == ("cold", "dirty-marker")
    (output,) = lives.last.batches[0]
    assert output.cached == 0
    assert_as_plain(lives, [LONG], [output])


def test_blocks_are_filled_in_place_where_memory_allows_it(lives: Lives) -> None:
    assert lives.last.opened["placement"] == "'direct'"
    (output,) = lives.last.batches[1]
    assert output.cached == floor(1000)
    assert_as_plain(lives, [BRANCH], [output])
    assert int(lives.last.counters["direct_spans"]) > 0
    # Of each layer, the page in which the hit ends is verified whole, so it comes through a bank.
    assert int(lives.last.counters["scatters"]) <= LAYERS


def test_prompt_that_is_scored_is_computed_whole_and_saved(lives: Lives) -> None:
    plain = lives.plain[tuple(SCORED["prompts"][0])]
    assert len(plain.prompt_logprobs) == len(SCORED["prompts"][0]) - 1
    for turn in ("scored", "scored again"):
        (output,) = lives.turns[turn]
        assert output.cached == 0
        assert_same(output, plain)
    (output,) = lives.turns["scored prompt"]
    assert output.cached == floor(len(SCORED["prompts"][0]) - 1)
    assert (output.tokens, output.prompt_logprobs) == (plain.tokens, [])


def test_request_aborted_while_it_waits_gives_its_ticket_back(lives: Lives) -> None:
    (busy,), (again,) = lives.aborted.batches[:2]
    assert busy.tokens[:4] == lives.plain[tuple(BUSY)].tokens
    assert again.cached == floor(len(BRANCH) - 1)
    assert_as_plain(lives, [BRANCH], [again])


def test_request_aborted_right_after_its_restore_harms_nobody(lives: Lives) -> None:
    (fresh,), (again,) = lives.aborted.batches[2:4]
    assert again.cached == floor(len(BRANCH) - 1)
    assert_as_plain(lives, [FRESH, BRANCH], [fresh, again])


def test_request_aborted_right_after_a_failed_restore_leaves_nothing_wrong(lives: Lives) -> None:
    assert not lives.aborted.batches[4]
    (again,) = lives.aborted.batches[5]
    assert again.cached < 1500
    assert_as_plain(lives, [DAMAGED], [again])
    assert lives.aborted.counters["checksum_failures"] == "2"  # this one, and the next test's


def test_request_preempted_right_after_a_failed_restore_starts_anew(lives: Lives) -> None:
    plain = lives.plain[tuple(SCORED["prompts"][0])]
    for (output,) in lives.aborted.batches[6:]:
        assert (output.tokens, output.finish) == (plain.tokens, plain.finish)
        assert output.logprobs == pytest.approx(plain.logprobs, abs=1e-3)


def test_scheduler_and_worker_in_one_process_need_no_socket_for_lookups(lives: Lives) -> None:
    for run in (lives.damaged, lives.last, lives.aborted):
        assert run.counters_of_scheduler["lookups_in_process"] == run.counters["lookups"] != "0"
    far = lives.second
    assert far.counters_of_scheduler["lookups_in_process"] == "0" != far.counters["lookups"]


def test_what_sigterm_would_do_is_said_at_start(lives: Lives) -> None:
    assert "lets SIGTERM kill the workers" in lives.first.log


def test_every_life_but_the_killed_one_closed_clean(lives: Lives) -> None:
    for run in (lives.first, lives.second, lives.damaged, lives.last, lives.aborted):
        assert run.returncode == 0
        assert "range: close state=clean" in run.log
        assert run.counters["leases_open"] == "0"
        assert run.counters["banks_quarantined"] == "0"
        assert run.counters["pieces_dropped"] == "0"
