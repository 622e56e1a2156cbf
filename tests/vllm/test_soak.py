"""Real vLLM over HTTP under a mix of chats, branches and aborts, in two data-parallel replicas.

Short by default; RANGE_LONG=1 asks a thousand times and kills a worker on the way.
"""

from __future__ import annotations

import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine import inspection, stores
from support.effort import LONG, effort
from support.vllm_http import UNI, Server, serving
from support.vllm_process import BLOCK_TOKENS, IN_PROCESS

REQUESTS = effort(120, 1000)
AT_ONCE = 6
ANSWER_COUNT = 6
# So few blocks that vLLM's own prefix cache forgets all the time, and requests wait and preempt.
BLOCKS = 60
RANDOM = random.Random(1000)


def some_tokens(count: int) -> list[int]:
    return [RANDOM.randrange(10, 2000) for _ in range(count)]


def some_prompts() -> list[list[int]]:
    """Return prompts of which most continue or leave an earlier one."""
    prompts = [some_tokens(RANDOM.randrange(200, 500)) for _ in range(12)]
    while len(prompts) < REQUESTS // 4:
        parent = RANDOM.choice(prompts)[: RANDOM.randrange(32, 600)]
        prompts.append(parent + some_tokens(RANDOM.randrange(1, 80)))
    return prompts


PROMPTS = some_prompts()
MIX = [(RANDOM.choice(PROMPTS), RANDOM.random() < 0.15) for _ in range(REQUESTS)]


@dataclass
class Soak:
    """What the servers of one soak answered, showed and left."""

    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt, tokens
    computed: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)
    logs: list[str] = field(default_factory=list)
    returncode: int = -1
    reports: list[inspection.StoreReport] = field(default_factory=list)


def ask(server: Server, prompt: list[int], *, is_aborted: bool = False, **fields: Any) -> list[int]:
    if is_aborted:
        server.abandon(prompt, max_tokens=200)
        return []
    answer = server.complete(prompt, max_tokens=ANSWER_COUNT, **fields)
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def ask_all(server: Server, mix: list[tuple[list[int], bool]], soak: Soak) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = threads.map(lambda each: ask(server, each[0], is_aborted=each[1]), mix)
        soak.answers += [
            (prompt, tokens)
            for (prompt, is_aborted), tokens in zip(mix, answers, strict=True)
            if not is_aborted
        ]


def kill_a_worker(server: Server) -> None:
    """Kill the worker that opened a store last; vLLM then ends by itself."""
    pid = re.findall(r"\(Worker pid=(\d+)\).*range: open", server.log)[-1]
    os.kill(int(pid), signal.SIGKILL)
    server.process.wait(120)


@pytest.fixture(scope="module")
def soak(module_path: Path, model: Path) -> Soak:
    (module_path / "cache").mkdir()
    transfer = {
        "kv_connector": "RangeConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": str(module_path / "cache"),
            "capacity": "96MiB",  # so small that it evicts
            "save_bank": "4MiB",
            "lookup_timeout_ms": 10_000,
        },
    }
    arguments = [
        *("--shutdown-timeout", "30", "--data-parallel-size", "2", "--api-server-count", "1"),
        *("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "1024"),
        *(() if LONG else UNI),
    ]
    found = Soak()
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} | ({} if LONG else IN_PROCESS)
    half = len(MIX) // 2
    rest = MIX
    if LONG:
        with serving(module_path / "killed", model, transfer, *arguments, **environment) as server:
            ask_all(server, MIX[:half], found)
            kill_a_worker(server)
            found.logs.append(server.log)
        rest = MIX[half:]
    with serving(module_path / "last", model, transfer, *arguments, **environment) as server:
        ask_all(server, rest, found)
        prompts = {tuple(prompt) for prompt, _ in found.answers}
        for number, prompt in enumerate(sorted(prompts)):
            # A tenant of its own has nothing to be hit.
            found.computed[prompt] = ask(server, list(prompt), cache_salt=str(number))
        found.metrics = server.metrics()
        found.returncode = server.terminate()
        found.logs.append(server.log)
    found.reports = [
        inspection.read_store(place.path)
        for place in stores.list_stores(str(module_path / "cache"))
    ]
    return found


def test_every_answer_is_that_of_a_fresh_computation(soak: Soak) -> None:
    assert len(soak.answers) > REQUESTS // 2
    assert len({tuple(tokens) for tokens in soak.computed.values()}) > len(soak.computed) // 2
    for prompt, tokens in soak.answers:
        assert tokens == soak.computed[tuple(prompt)]


def test_the_store_was_at_work(soak: Soak) -> None:
    assert soak.metrics["delivered_tokens_total", "0"] > 10 * BLOCK_TOKENS
    assert soak.metrics["saves_published_total", "0"] > 10
    assert soak.metrics["evicted_bytes_total", "0"] > 0
    assert soak.metrics["saves_accepted_ratio", "0"] > 0.5
    assert ("checksum_failures_total", "0") not in soak.metrics
    assert soak.metrics["banks_in_quarantine", "0"] == 0


def test_nothing_is_leaked(soak: Soak) -> None:
    assert soak.returncode == 0
    log = soak.logs[-1]
    assert log.count("range: close state=clean") == 2
    assert log.count("leases_open=0 ") == log.count("leases_open=") > 0
    assert log.count("banks_quarantined=0 ") == log.count("banks_quarantined=") > 0


@pytest.mark.skipif(LONG, reason="its workers have processes of their own")
def test_each_replica_looks_up_in_its_own_process(soak: Soak) -> None:
    calls = re.findall(r"range: scheduler .*lookups_in_process=(\d+)", soak.logs[-1])
    lookups = re.findall(r"range: lookups=(\d+)", soak.logs[-1])
    assert len(calls) == 2
    assert sorted(calls) == sorted(lookups)


def test_each_replica_has_its_own_store(soak: Soak) -> None:
    names = sorted(report.path.rpartition("/")[2] for report in soak.reports)
    assert names == ["dp-1-rank-0-of-1", "rank-0-of-1"]
    assert all(report.state == "warm" for report in soak.reports)
    assert all(report.tables and report.tables.records for report in soak.reports)
