"""Real vLLM with KV events: a router hears what the store holds, by the hashes of vLLM's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine import inspection, stores
from support.vllm_events import Event, Listener, blocks_of
from support.vllm_http import UNI, Server, serving
from support.vllm_process import BLOCK_TOKENS
from support.vllm_store import stored_tokens

RANDOM = random.Random(77)
STORAGE, GPU = "STORAGE", "GPU"
CAPACITY = "24MiB"  # some 3,000 tokens


def some_tokens(count: int) -> list[int]:
    return [RANDOM.randrange(10, 2000) for _ in range(count)]


LONG = some_tokens(1000)
LONG_BLOCKS = len(LONG) // BLOCK_TOKENS
ANSWER = 40  # fills one block more
OTHERS = [some_tokens(1100) for _ in range(2)]  # with LONG more than fits


@dataclass
class Told:
    """What was told by some moment: of the store, and by vLLM of its own memory."""

    stored: list[Event]
    removed: list[Event]
    held: set[Any]
    own: list[Event]


def told(listener: Listener) -> Told:
    return Told(
        listener.told("BlockStored", STORAGE),
        listener.told("BlockRemoved", STORAGE),
        listener.held(STORAGE),
        listener.told("BlockStored", GPU),
    )


@dataclass
class Lives:
    """What two servers with one store had told by each turn."""

    saved: Told
    forgotten: Told
    cached: int
    restored: Told
    evicted: Told
    stored_at_end: int


@contextmanager
def listening(folder: Path, model: Path, cache: Path) -> Iterator[tuple[Server, Listener]]:
    transfer = {
        "kv_connector": "RangeConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "store": str(cache),
            "capacity": CAPACITY,
            "lookup_timeout_ms": 10_000,
        },
    }
    with Listener() as listener:
        arguments = ("--shutdown-timeout", "60", *UNI, *listener.arguments)
        development = {"VLLM_SERVER_DEV_MODE": "1"}  # for resets
        with serving(folder, model, transfer, *arguments, **development) as server:
            yield server, listener


@pytest.fixture(scope="module")
def lives(module_path: Path, model: Path) -> Lives:
    cache = module_path / "cache"
    cache.mkdir()

    def nudge() -> None:
        server.complete([5, 6, 7], max_tokens=1)  # less than a block: nothing of it is stored

    def held() -> set[Any]:
        return listener.held(STORAGE)

    with listening(module_path / "first", model, cache) as (server, listener):
        server.complete(LONG, max_tokens=ANSWER)
        listener.wait_for(lambda: len(held()) > LONG_BLOCKS, nudge)
        saved = told(listener)
        server.reset()
        listener.wait_for(lambda: not held(), nudge)
        forgotten = told(listener)
        server.complete(LONG, max_tokens=1)
        listener.wait_for(lambda: len(held()) == LONG_BLOCKS, nudge)
        assert server.terminate() == 0
    with listening(module_path / "second", model, cache) as (server, listener):
        answer = server.complete(LONG, max_tokens=1)
        listener.wait_for(lambda: bool(held()), nudge)
        restored = told(listener)
        for other in OTHERS:
            before = {block for each in told(listener).stored for block in each["block_hashes"]}
            server.complete(other, max_tokens=1)
            listener.wait_for(lambda: not held() <= before, nudge)  # noqa: B023
        evicted = told(listener)
        assert server.terminate() == 0
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    (place,) = stores.list_stores(str(cache))
    left = stored_tokens(inspection.read_store(place.path))
    return Lives(saved, forgotten, cached, restored, evicted, left)


def test_prompt_and_answer_are_told_by_vllms_own_hashes(lives: Lives) -> None:
    stored = blocks_of(lives.saved.stored)
    assert stored == blocks_of(lives.saved.own)
    assert len(stored) == len(set(stored)) == (len(LONG) + ANSWER - 1) // BLOCK_TOKENS


def test_events_are_as_vllms_own(lives: Lives) -> None:
    own = {block: event for event in lives.saved.own for block in event["block_hashes"]}
    before = None
    for event in lives.saved.stored:
        assert event["parent_block_hash"] == before
        before = event["block_hashes"][-1]
        for name in ("block_size", "group_idx", "kv_cache_spec_kind"):
            assert event[name] == own[before][name], name
        assert event["token_ids"] == []  # those of vLLM's own event say it
        assert event["locality"] == "LOCAL"


def test_reset_is_told_and_what_is_saved_again(lives: Lives) -> None:
    assert sorted(blocks_of(lives.forgotten.removed)) == sorted(blocks_of(lives.saved.stored))
    assert not lives.forgotten.held


def test_what_was_there_before_the_start_is_told_when_it_is_hit(lives: Lives) -> None:
    assert lives.cached == LONG_BLOCKS * BLOCK_TOKENS
    assert blocks_of(lives.restored.stored) == blocks_of(lives.restored.own)
    assert len(lives.restored.held) == LONG_BLOCKS
    assert lives.restored.stored[0]["parent_block_hash"] is None
    assert not lives.restored.removed


def test_eviction_is_told(lives: Lives) -> None:
    held = [block in lives.evicted.held for block in blocks_of(lives.restored.stored)]
    assert held == sorted(held, reverse=True)  # what is evicted has nothing behind it
    assert not all(held)
    lost = lives.restored.held - lives.evicted.held
    assert lost <= set(blocks_of(lives.evicted.removed))


def test_what_was_told_at_the_end_is_what_the_store_holds(lives: Lives) -> None:
    assert len(lives.evicted.held) * BLOCK_TOKENS == lives.stored_at_end
