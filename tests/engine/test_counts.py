"""The rule of the house as counts: work follows bytes, never the objects that name them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.store import create
from rangekv.format.geometry import ModelGeometry
from support.rig import MIB, NAMESPACE, Rig, tokens_of

# The default geometry of restore-benchmark with 1/32 of its bytes: 32 layers, pages of 8 blocks
# would be 256 KiB there; here blocks of 1 KiB make one page of 256 blocks.
MODEL = ModelGeometry(layer_count=32, token_bytes=128, block_tokens=8)
CAPACITY = 128 * MIB
TOKENS = 16384
OBJECT_TOKENS = {"32MiB": 256, "8MiB": 64, "2MiB": 16, "1MiB": 8}


def counts_of(path, piece_tokens: int, *, by_layer: bool, join_pieces: bool = True, save_bank=MIB):
    """Save and restore one payload in pieces; return the counters of one save and one restore."""
    create(str(path), capacity_bytes=CAPACITY, model=MODEL, namespace=NAMESPACE)
    config = EngineConfig(
        read_bank=MIB, save_bank=save_bank, join_pieces=join_pieces, read_workers=4
    )
    blocks = TOKENS // MODEL.block_tokens
    rng = np.random.default_rng(3)
    layers = [rng.integers(0, 256, (blocks, MODEL.block_bytes), np.uint8) for _ in range(32)]
    source = [layer.copy() for layer in layers]
    tokens = rng.integers(0, 1 << 32, TOKENS, dtype=np.uint32)
    ids = rng.permutation(blocks)
    starts = range(0, TOKENS, piece_tokens)
    pieces = [ids[at // 8 : (at + piece_tokens) // 8] for at in starts]
    with Engine.open(path, namespace=NAMESPACE, geometry=MODEL, config=config) as engine:
        engine.attach(layers)
        save = engine.save(RequestKey("a", "s"), tokens)
        order = [(n, i) for n in range(32) for i in range(len(pieces))]
        for n, i in order if by_layer else sorted(order, key=lambda place: place[1]):
            save.layer_ready(n, (starts[i], starts[i] + piece_tokens), pieces[i])
        assert save.extracted(30)
        save.finish()
        assert save.wait(30)
        saved = engine.stats().counters
        for layer in layers:
            layer[:] = 0
        names = [tokens[at : at + piece_tokens] for at in starts]
        ticket = engine.lookup(RequestKey("b", "s"), names)
        restore = engine.claim(ticket, names, pieces)
        for n in range(32):
            assert restore.wait_layer(n, 30)
            assert np.array_equal(layers[n], source[n])
        restore.finish()
        total = engine.stats().counters
    return {name: total[name] - (saved[name] if name in RESTORE else 0) for name in COUNTED}


RESTORE = (
    "records_selected",
    "leases_taken",
    "reads",
    "read_calls",
    "scatters",
    "layer_events",
    "checksum_pages",
    "overread_bytes",
)
COUNTED = (*RESTORE, "payload_allocations", "writes", "gathers")


@pytest.fixture(scope="module")
def expected(module_path):
    return counts_of(module_path / "s", 256, by_layer=False)


def test_counts_are_those_of_the_contract(expected):
    assert expected == {
        "records_selected": 2,
        "leases_taken": 1,
        "reads": 64,
        "read_calls": 64,
        "scatters": 64,
        "layer_events": 32,
        "checksum_pages": 2 * 32 * 4,
        "overread_bytes": 0,
        "payload_allocations": 0,
        "writes": 64,
        "gathers": 64,
    }


@pytest.mark.parametrize("name", OBJECT_TOKENS)
@pytest.mark.parametrize("by_layer", [False, True])
def test_counts_are_equal_at_every_granularity(tmp_path, expected, name, by_layer):
    assert counts_of(tmp_path / "s", OBJECT_TOKENS[name], by_layer=by_layer) == expected


def test_the_same_assertion_fails_when_pieces_are_not_joined(tmp_path, expected):
    found = counts_of(tmp_path / "s", 8, by_layer=True, join_pieces=False)
    assert found["records_selected"] == TOKENS // 8
    assert found != expected


def test_large_save_banks_take_several_stripes_a_gather(tmp_path, expected):
    found = counts_of(tmp_path / "s", 256, by_layer=True, save_bank=8 * MIB)
    assert found == {**expected, "gathers": 8}


def test_a_chat_of_50_turns_is_read_in_a_few_spans(tmp_path):
    """Extents grow with the chat, so their number follows its logarithm, not its turns."""
    rig = Rig(tmp_path / "s", capacity=256 * MIB, block_count=256)
    chat = tokens_of(1, 50 * 32)
    for turn in range(1, 51):
        assert rig.save(chat[: turn * 32])
    before = rig.engine.stats().counters
    assert rig.restore(chat) == len(chat)
    after = rig.engine.stats().counters
    assert after["records_selected"] - before["records_selected"] == 50
    assert after["reads"] - before["reads"] <= 12
    assert rig.engine.stats().extents <= 12


def test_stats_name_every_counter_of_the_contract(tmp_path):
    create(str(tmp_path / "s"), capacity_bytes=CAPACITY, model=MODEL, namespace=NAMESPACE)
    with Engine.open(tmp_path / "s", namespace=NAMESPACE, geometry=MODEL) as engine:
        found = engine.stats().as_dict()
        assert dataclasses.is_dataclass(engine.stats())
    wanted = {
        *("lookups", "lookup_tokens", "hit_tokens", "delivered_tokens", "reads", "read_bytes"),
        *("overread_bytes", "read_calls", "writes", "write_bytes", "write_calls", "scatters"),
        *("direct_spans", "gathers", "layer_events", "leases_taken", "leases_released"),
        *("payload_allocations", "records_selected", "records", "extents", "used_bytes"),
        *("capacity_bytes", "checksum_pages", "checksum_failures", "records_retired"),
        *("evicted_bytes", "banks_quarantined", "saves", "path"),
    }
    assert wanted <= set(found)
