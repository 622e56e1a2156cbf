"""A server that is killed under load: the next one has what was committed, and answers alike."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine import stores
from rangekv.engine.inspection import StoreReport, read_store
from support.effort import LONG
from support.vllm_http import Server, serving
from support.vllm_process import BLOCK_TOKENS, rangectl

RANDOM = random.Random(88)
INTERVAL_S = 0.2
AT_ONCE = 3
ANSWER_COUNT = 4


def some_tokens(length: int) -> list[int]:
    return [RANDOM.randrange(10, 2000) for _ in range(length)]


def processes_of(server: Server) -> list[int]:
    """The processes that a server has started: its session is its own."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != server.process.pid:
            try:
                if os.getsid(int(name)) == server.process.pid:
                    found.append(int(name))
            except ProcessLookupError:
                continue
    return found


def terminate(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)


def kill_server(server: Server) -> None:
    server.process.kill()


def kill_engine_core(server: Server) -> None:
    os.kill(_pid(server, "EngineCore"), signal.SIGKILL)


def kill_worker(server: Server) -> None:
    os.kill(_pid(server, "Worker"), signal.SIGKILL)


def _pid(server: Server, name: str) -> int:
    return int(re.findall(rf"\({name}[^)]*pid=(\d+)\)", server.log)[-1])


# Each costs a start of the server: all four are tried with RANGE_LONG=1.
KILLS: list[Callable[[Server], None]] = [terminate, kill_worker]
if LONG:
    KILLS += [kill_server, kill_engine_core]


@dataclass
class Story:
    """One store through the lives of several servers."""

    anchors: list[list[int]] = field(default_factory=list)  # asked well before each kill
    answers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    reports: list[StoreReport] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # of each anchor, after its kill
    computed: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    metrics: dict[tuple[str, str], float] = field(default_factory=dict)


class CutShort(Exception):
    """A server that ends answers with what it has by then: its finish reason is `abort`."""


def ask(server: Server, prompt: list[int], **fields: Any) -> tuple[list[int], int]:
    answer = server.complete(prompt, max_tokens=ANSWER_COUNT, **fields)
    (choice,) = answer["choices"]
    if choice["finish_reason"] == "abort":
        raise CutShort
    assert choice["finish_reason"] == "length"
    details = answer["usage"]["prompt_tokens_details"] or {}
    return choice["token_ids"], int(details.get("cached_tokens", 0))


def load(server: Server, story: Story, seed: int, ended: threading.Event) -> None:
    """Ask for new and for longer prompts until the server is gone."""
    chance = random.Random(seed)
    prompt: list[int] = []
    while not ended.is_set():
        fresh = [chance.randrange(10, 2000) for _ in range(chance.randrange(40, 400))]
        prompt = fresh if len(prompt) > 800 or chance.random() < 0.4 else prompt + fresh
        try:
            tokens, _ = ask(server, prompt)
        except (OSError, CutShort):
            return
        story.answers.append((prompt, tokens))


def wait_for_commits(cache: Path, count: int) -> None:
    """Return when the live store has made so many more: on a slow disk they take their time."""

    def done() -> int:
        live = json.loads(rangectl("inspect", str(cache), "live", "--json"))["live"]
        return int(live["journal_commits"])

    wanted = done() + count
    while done() < wanted:
        time.sleep(INTERVAL_S)


def kill_under_load(
    server: Server, story: Story, kill: Callable[[Server], None], cache: Path
) -> None:
    anchor = some_tokens(700)
    story.anchors.append(anchor)
    ended = threading.Event()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        for number in range(AT_ONCE):
            threads.submit(load, server, story, 10 * len(story.anchors) + number, ended)
        try:
            time.sleep(RANDOM.random())
            story.answers.append((anchor, ask(server, anchor)[0]))
            time.sleep(5 * INTERVAL_S)
            wait_for_commits(cache, 3)
            kill(server)
            with suppress(subprocess.TimeoutExpired):  # it waits for clients that wait for it
                server.process.wait(5)
        finally:
            ended.set()
            with suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait(30)
    while processes_of(server):
        time.sleep(0.05)


@pytest.fixture(scope="module")
def story(module_path: Path, model: Path) -> Story:
    cache = module_path / "cache"
    cache.mkdir()
    transfer = {
        "kv_connector": "RangeConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": str(cache),
            "capacity": "1GiB",  # what is asked before a kill is not evicted before it
            "save_bank": "4MiB",
            "lookup_timeout_ms": 10_000,
            "commit_interval_s": INTERVAL_S,
        },
    }
    found = Story()
    for number, kill in enumerate([*KILLS, None]):
        with serving(module_path / str(number), model, transfer) as server:
            found.opened.append(re.findall(r"range: open.*", server.log)[-1])
            for anchor in found.anchors[len(found.cached) :]:
                tokens, cached = ask(server, anchor)
                found.answers.append((anchor, tokens))
                found.cached.append(cached)
            if kill is not None:
                kill_under_load(server, found, kill, cache)
                (place,) = stores.list_stores(str(cache))
                found.reports.append(read_store(place.path))
                continue
            chosen = found.answers[:: 1 + len(found.answers) // 40]
            for salt, (prompt, _) in enumerate([*found.answers[:1], *chosen]):
                found.answers.append((prompt, ask(server, prompt)[0]))
                # A tenant of its own has nothing to be hit.
                found.computed[tuple(prompt)] = ask(server, prompt, cache_salt=str(salt))[0]
            found.metrics = server.metrics()
    return found


def test_no_kill_leaves_a_cold_store(story: Story) -> None:
    """A worker that outlives its engine core closes; one that is killed has its journal."""
    left = [report.state for report in story.reports]
    assert left[KILLS.index(kill_worker)] == "would-recover"
    assert {"would-recover"} <= set(left) <= {"would-recover", "warm"}
    opened = {"would-recover": "state=recovered", "warm": "state=warm"}
    for state, line in zip(left, story.opened[1:], strict=True):
        assert opened[state] in line


def test_what_was_saved_two_intervals_before_a_kill_is_hit_after_it(story: Story) -> None:
    whole = [(len(anchor) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for anchor in story.anchors]
    assert story.cached == whole


def test_answers_after_kills_are_those_of_a_fresh_computation(story: Story) -> None:
    compared = 0
    for prompt, tokens in story.answers:
        if tuple(prompt) in story.computed:
            assert tokens == story.computed[tuple(prompt)]
            compared += 1
    assert compared >= 20
    assert story.metrics.get(("checksum_failures_total", "0"), 0) == 0
