"""Direct placement: whole pages go straight into their blocks, and nothing can take them back."""

from __future__ import annotations

import os

import numpy as np
import pytest
from rangekv.engine import Engine, EngineConfig
from rangekv.engine.devices.cpu import bank_memory
from rangekv.engine.store import create
from rangekv.format.errors import UsageError
from rangekv.format.geometry import ModelGeometry
from support.faulty import FaultyFiles, Gate
from support.rig import MIB, MLA, NAMESPACE, SMALL, Rig, tokens_of

DIRECT = EngineConfig(placement="direct", read_workers=4, lock_wait_s=0.5)
TOKENS = tokens_of(1, 640)


def start(tmp_path, **config):
    files = FaultyFiles()
    settings = {"placement": "direct", "read_workers": 4, "lock_wait_s": 0.5, **config}
    rig = Rig(tmp_path / "s", files=files, config=EngineConfig(**settings))
    assert rig.save(TOKENS)
    return rig, files


def test_whole_pages_use_neither_banks_nor_copies(tmp_path):
    rig, _ = start(tmp_path)
    assert rig.engine.placement == "direct"
    assert rig.restore(TOKENS) == 640
    counters = rig.engine.stats().counters
    assert counters["reads"] == counters["read_calls"] == counters["direct_spans"] == 4
    assert counters["scatters"] == counters["overread_bytes"] == 0
    assert counters["checksum_pages"] == 4 * 3
    rig.check_quiet()
    rig.engine.close()


@pytest.mark.parametrize("model", [SMALL, MLA])
def test_partial_pages_at_both_ends_go_through_banks(tmp_path, model):
    rig = Rig(tmp_path / "s", model=model, config=DIRECT)
    size = model.block_tokens
    tokens = tokens_of(2, 50 * size)
    assert rig.save(tokens[: 20 * size])
    assert rig.save(tokens)
    for skip in (0, 1, 16, 19, 20, 33, 49):
        for end in (skip + 1, skip + 17, 50):
            most = min(end, 50) * size + (size - 1)
            assert rig.restore(tokens, skip=skip * size, most=most) == min(end, 50) * size
    counters = rig.engine.stats().counters
    assert counters["direct_spans"] > 0
    assert counters["scatters"] > 0
    assert counters["checksum_failures"] == 0
    rig.check_quiet()
    rig.engine.close()


def test_more_blocks_than_one_call_takes(tmp_path):
    model = ModelGeometry(2, 512, 1)  # blocks of 512 bytes, the alignment of direct I/O here
    rig = Rig(tmp_path / "s", model=model, config=DIRECT, block_count=3000)
    tokens = tokens_of(3, 2500)
    assert rig.save(tokens)
    assert rig.restore(tokens) == 2500
    counters = rig.engine.stats().counters
    assert counters["direct_spans"] == 2
    assert counters["read_calls"] == 2 * 3
    rig.engine.close()


def test_nothing_is_read_ahead_of_the_claim(tmp_path):
    rig, files = start(tmp_path)
    files.reads.clear()
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    assert files.reads == []
    rig.engine.release(ticket)
    rig.check_quiet()
    rig.engine.close()


@pytest.mark.parametrize("kind", ["eio", "short", "flip"])
def test_a_bad_direct_read_fails_its_blocks(tmp_path, kind):
    rig, files = start(tmp_path)
    extent = next(iter(rig.engine._catalog.residents))
    bad = extent.offset + 2 * extent.width
    if kind == "flip":
        with open(tmp_path / "s" / "range.pack", "r+b") as pack:
            pack.seek(bad + 300_000)
            byte = pack.read(1)
            pack.seek(-1, os.SEEK_CUR)
            pack.write(bytes([byte[0] ^ 1]))

    def fail(offset, length):
        if offset != bad or kind == "flip":
            return None
        if kind == "short":
            return length - 4096
        raise OSError(5, "injected")

    files.on_read = fail
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    ids = rig.take(40)
    restore = rig.engine.claim(ticket, TOKENS, ids)
    assert [restore.wait_layer(n, 10) for n in range(4)] == [True, True, False, True]
    restore.finish()
    assert sorted(restore.failed_blocks()) == sorted(ids)
    files.on_read = None
    rig.give(ids)
    assert rig.restore(TOKENS) == (0 if kind == "flip" else 640)
    rig.check_quiet()
    rig.engine.close()


def test_finish_waits_for_reads_into_live_blocks(tmp_path):
    rig, files = start(tmp_path)
    gate = Gate()
    files.on_read = gate
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    restore = rig.engine.claim(ticket, TOKENS, rig.take(40))
    assert gate.reached.acquire(timeout=10)
    import threading

    done = threading.Event()
    thread = threading.Thread(target=lambda: (restore.finish(), done.set()))
    thread.start()
    assert not done.wait(0.2)
    gate.opened.set()
    assert done.wait(10)
    thread.join()
    rig.check_quiet()
    rig.engine.close()


def test_a_stalled_direct_read_ends_the_process_with_one_line(tmp_path):
    rig, files = start(tmp_path, restore_deadline_s=0.05)
    lines: list[str] = []
    rig.engine._restores._on_stall = lines.append
    gate = Gate()
    files.on_read = gate
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    restore = rig.engine.claim(ticket, TOKENS, rig.take(40))
    assert rig.engine._events.wait_until(lambda: bool(lines), 10) or lines
    gate.opened.set()
    assert "direct-read-stalled" in lines[0]
    restore.finish()
    rig.check_quiet()
    rig.engine.close()


@pytest.mark.parametrize(
    ("offset", "placement", "found"),
    [
        (64, "auto", "banks (paged KV of layer 0 starts at a page + 64"),
        (0, "auto", "direct"),
        (0, "banks", "banks (as the setting says)"),
        (64, "direct", None),
    ],
)
def test_which_placement_runs_and_why(tmp_path, offset, placement, found):
    model = ModelGeometry(2, 4096, 16)
    create(str(tmp_path / "s"), capacity_bytes=64 * MIB, model=model, namespace=NAMESPACE)
    config = EngineConfig(placement=placement, read_workers=1)
    with Engine.open(tmp_path / "s", namespace=NAMESPACE, geometry=model, config=config) as engine:
        layers = [
            bank_memory(8 * model.block_bytes + 4096)[offset : offset + 8 * model.block_bytes]
            for _ in range(2)
        ]
        if found is None:
            with pytest.raises(UsageError, match="no-direct-placement"):
                engine.attach(layers)
        else:
            engine.attach(layers)
            assert engine.placement.startswith(found)


def test_strided_blocks_are_reached_in_place(tmp_path):
    model = ModelGeometry(2, 1024, 16)
    rig = Rig(tmp_path / "s", model=model, config=DIRECT)
    tokens = tokens_of(4, 320)
    assert rig.save(tokens)
    rig.engine.close()
    # Both layers in one allocation, block by block, as layouts with the block outermost lie.
    memory = bank_memory(2 * 64 * model.block_bytes).reshape(64, 2, -1)
    with Engine.open(tmp_path / "s", namespace=NAMESPACE, geometry=model, config=DIRECT) as engine:
        engine.attach([memory[:, 0], memory[:, 1]])
        ids = np.random.default_rng(0).permutation(64)[:20]
        restore = engine.claim(engine.lookup(rig.key(), tokens), tokens, ids)
        rig.layers = [memory[:, 0], memory[:, 1]]
        for layer in range(2):
            assert restore.wait_layer(layer, 10)
            rig.check_layer(layer, tokens, ids)
        restore.finish()
        assert engine.stats().counters["direct_spans"] == 2
