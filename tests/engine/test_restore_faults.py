"""An error under a restore is a miss: failed blocks, never wrong bytes, never a lost bank."""

from __future__ import annotations

import os

import numpy as np
import pytest
from rangekv.engine import EngineConfig
from rangekv.engine.devices.fence import Fence, FenceState
from support.faulty import FaultyFiles, Gate
from support.rig import POISON, Rig, tokens_of

TOKENS = tokens_of(1, 320)


def start(tmp_path, **config):
    files = FaultyFiles()
    settings = {"read_workers": 4, "lock_wait_s": 0.5, **config}
    rig = Rig(tmp_path / "s", files=files, config=EngineConfig(**settings))
    assert rig.save(TOKENS)
    return rig, files


def claim(rig, tokens=TOKENS):
    ticket = rig.engine.lookup(rig.key(), tokens)
    block_ids = rig.take(ticket.token_count // 16)
    return rig.engine.claim(ticket, tokens, block_ids), block_ids


@pytest.mark.parametrize("count", [0, 4096, -4096, -1])
def test_a_short_read_is_never_delivered(tmp_path, count):
    rig, files = start(tmp_path)
    files.on_read = lambda offset, length: count if count >= 0 else length + count
    restore, ids = claim(rig)
    assert not restore.wait_layer(0, 10)
    assert sorted(restore.failed_blocks()) == sorted(ids)
    restore.finish()
    assert all((layer[ids] == POISON).all() for layer in rig.layers)
    files.on_read = None
    assert rig.restore(TOKENS) == 320
    rig.check_quiet()
    rig.engine.close()


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_a_failed_read_fails_its_layer_and_no_other(tmp_path, layer):
    rig, files = start(tmp_path)
    extent = next(iter(rig.engine._catalog.residents))
    bad = extent.offset + layer * extent.width

    def fail(offset, length):
        if offset == bad:
            raise OSError(5, "injected")

    files.on_read = fail
    restore, ids = claim(rig)
    assert [restore.wait_layer(n, 10) for n in range(4)] == [n != layer for n in range(4)]
    assert "EIO" in str(restore.errors[0])
    assert sorted(restore.failed_blocks()) == sorted(ids)
    restore.finish()
    assert rig.engine.stats().counters["delivered_tokens"] == 0
    files.on_read = None
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


@pytest.mark.parametrize("error", [OSError(22, "x"), ValueError("x"), MemoryError()])
def test_workers_outlive_any_exception(tmp_path, error):
    rig, files = start(tmp_path)

    def fail(offset, length):
        raise error

    files.on_read = fail
    for _ in range(8):
        restore, ids = claim(rig)
        assert not restore.wait_layer(3, 10)
        restore.finish()
        rig.give(ids)
    files.on_read = None
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_byte_is_a_miss_and_retires_its_record(tmp_path, place):
    rig, _ = start(tmp_path)
    other = tokens_of(2, 64)
    assert rig.save(other)
    child = np.concatenate([TOKENS, tokens_of(3, 32)])
    assert rig.save(child)
    extent = next(r.extent for r in rig.engine._catalog.directory.visible() if r.token_count == 320)
    size = 320 * 1024
    at = {"first": 0, "middle": size // 2, "last": size - 1}[place]
    with open(tmp_path / "s" / "range.pack", "r+b") as pack:
        pack.seek(extent.offset + extent.width + at)
        byte = pack.read(1)
        pack.seek(-1, os.SEEK_CUR)
        pack.write(bytes([byte[0] ^ 0x40]))
    restore, ids = claim(rig)
    assert restore.wait_layer(0, 10)
    assert not restore.wait_layer(1, 10)
    assert len(restore.failed_blocks()) > 0
    restore.finish()
    assert (rig.layers[1][ids] == POISON).all()
    stats = rig.engine.stats()
    assert stats.counters["checksum_failures"] == 1
    assert stats.counters["records_retired"] == 2  # it and what continued it
    assert rig.hit(TOKENS) == rig.hit(child) == 0
    assert rig.restore(other) == 64
    rig.check_quiet()
    rig.engine.close()


def test_a_stalled_read_becomes_failed_blocks_and_quarantines_its_banks(tmp_path):
    rig, files = start(tmp_path, restore_deadline_s=0.05)
    gate = Gate()
    (first,) = (r.extent.offset for r in rig.engine._catalog.directory.visible())
    files.on_read = lambda offset, length: gate(offset, length) if offset > first else None
    restore, ids = claim(rig)
    assert restore.wait_layer(0, 10)
    assert not restore.wait_layer(1, 10)
    assert sorted(restore.failed_blocks()) == sorted(ids)
    restore.finish()
    stats = rig.engine.stats()
    assert stats.banks_in_quarantine == stats.banks_quarantined == 2
    assert stats.leases_open == 1  # the reads may still touch the extent's bytes
    files.on_read = None
    gate.opened.set()
    assert rig.engine._events.wait_until(lambda: not rig.engine._catalog.leases.open, 10)
    assert rig.engine.stats().banks_in_quarantine == 0
    assert all((layer[ids] == POISON).all() for layer in rig.layers[1:])
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


def test_a_stalled_read_does_not_stop_other_requests(tmp_path):
    rig, files = start(tmp_path, restore_deadline_s=30)
    other = tokens_of(2, 64)
    assert rig.save(other)
    gate = Gate()
    stalled = {r.extent.offset for r in rig.engine._catalog.directory.visible()}
    victim = min(stalled)
    files.on_read = lambda offset, length: gate(offset, length) if offset == victim else None
    restore, _ = claim(rig)
    assert gate.reached.acquire(timeout=10)
    assert rig.restore(other) == 64
    gate.opened.set()
    assert all(restore.wait_layer(n, 10) for n in range(4))
    restore.finish()
    rig.engine.close()


def test_cancel_with_reads_in_flight_keeps_the_banks_until_they_return(tmp_path):
    rig, files = start(tmp_path)
    gate = Gate()
    files.on_read = gate
    ticket = rig.engine.lookup(rig.key(), TOKENS)
    assert gate.reached.acquire(timeout=10)
    rig.engine.release(ticket)
    assert rig.engine._read_banks.free_count == 7
    files.on_read = None
    gate.opened.set()
    assert rig.engine._events.wait_until(lambda: rig.engine._read_banks.free_count == 8, 10)
    rig.check_quiet()
    rig.engine.close()


@pytest.mark.parametrize("state", [FenceState.UNKNOWN, FenceState.FAILED])
def test_an_unproved_copy_quarantines_its_bank_for_good(tmp_path, state):
    rig, _ = start(tmp_path)
    scatter = rig.engine._device.scatter
    rig.engine._device.scatter = lambda lane, source, strips, ids: (
        Fence(state) if strips[0].layer_index == 1 else scatter(lane, source, strips, ids)
    )
    restore, ids = claim(rig)
    assert [restore.wait_layer(n, 10) for n in range(4)] == [True, False, True, True]
    assert sorted(restore.failed_blocks()) == sorted(ids)
    restore.finish()
    rig.engine._device.scatter = scatter
    unknown = state is FenceState.UNKNOWN
    assert rig.engine.stats().banks_in_quarantine == unknown
    assert rig.engine._read_banks.free_count == 8 - unknown
    assert rig.restore(TOKENS) == 320
    rig.engine.close()


def test_prefetch_leaves_a_bank_and_gives_others_back(tmp_path):
    rig, _ = start(tmp_path, read_banks=3)
    other = tokens_of(2, 64)
    assert rig.save(other)
    waiting = rig.engine.lookup(rig.key(), TOKENS)
    assert rig.engine._events.wait_until(lambda: len(waiting.restore.read) == 2, 10)
    assert rig.engine._read_banks.free_count == 1
    assert rig.restore(other) == 64
    # What was taken back is read again; the promise holds.
    ids = rig.take(20)
    restore = rig.engine.claim(waiting, TOKENS, ids)
    for layer in range(4):
        assert restore.wait_layer(layer, 10)
        rig.check_layer(layer, TOKENS, ids)
    restore.finish()
    rig.check_quiet()
    rig.engine.close()


def test_first_touch_verifies_each_page_once_and_off_never(tmp_path):
    for policy, pages in (("always", 16), ("first-touch", 8), ("off", 0)):
        (tmp_path / policy).mkdir()
        rig, _ = start(tmp_path / policy, verify=policy)
        rig.restore(TOKENS)
        rig.restore(TOKENS)
        assert rig.engine.stats().counters["checksum_pages"] == pages
        rig.engine.close()
