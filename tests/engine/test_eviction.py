"""The file is the capacity: old ranges make room, leased and growing ones never do."""

from __future__ import annotations

import os

import numpy as np
import pytest
from support.rig import MIB, Rig, tokens_of


@pytest.mark.parametrize("zero", [True, False])
def test_ten_times_the_capacity_through_a_store(tmp_path, zero):
    rig = Rig(tmp_path / "s", capacity=8 * MIB, zero=zero)
    pack = tmp_path / "s" / "range.pack"
    blocks, size = os.stat(pack).st_blocks, os.stat(pack).st_size
    rng = np.random.default_rng(5)
    prompts: list[np.ndarray] = []
    written = 0
    while written < 10 * rig.engine.geometry.usable_bytes:
        turns = prompts[int(rng.integers(len(prompts)))] if prompts and rng.random() < 0.4 else None
        fresh = tokens_of(1000 + len(prompts), int(rng.integers(1, 40)) * 16)
        tokens = fresh if turns is None else np.concatenate([turns[: len(turns) // 2], fresh])
        before = rig.hit(tokens)
        assert rig.save(tokens) or before == len(tokens) // 16 * 16
        assert rig.restore(tokens) == len(tokens) // 16 * 16
        written += (len(tokens) - before) * rig.model.token_bytes * rig.model.layer_count
        prompts.append(tokens)
    stats = rig.engine.stats()
    assert stats.counters["evicted_bytes"] > 0
    assert stats.used_bytes <= stats.capacity_bytes
    # Everything that is visible is byte-equal to its source.
    for tokens in prompts:
        rig.restore(tokens)
    assert rig.engine.stats().counters["checksum_failures"] == 0
    assert os.stat(pack).st_size == size
    # First writes into unwritten extents may split the file system's own extent tree, whose blocks
    # st_blocks counts too; the file's data never grows.
    grown = os.stat(pack).st_blocks - blocks
    assert grown == 0 if zero else grown * 512 <= 64 * 1024
    rig.check_quiet()
    kept = [rig.hit(tokens) for tokens in prompts]
    assert sum(kept) > 0
    rig = rig.reopen()
    assert rig.engine.open_result.state == "warm"
    assert [rig.hit(tokens) for tokens in prompts] == kept
    rig.engine.close()


def test_the_least_recently_used_goes_first(tmp_path):
    rig = Rig(tmp_path / "s", capacity=4 * MIB)
    stripe = rig.engine.geometry.stripe_bytes_max // rig.model.token_bytes
    prompts = [tokens_of(n, stripe) for n in range(rig.engine.geometry.pack_count)]
    for tokens in prompts:
        assert rig.save(tokens)
    assert rig.restore(prompts[0]) == stripe
    assert rig.save(tokens_of(99, stripe))
    assert [rig.hit(tokens) > 0 for tokens in prompts] == [True, False, True, True]
    rig.engine.close()


def test_what_is_leased_stays_and_the_save_is_declined(tmp_path):
    rig = Rig(tmp_path / "s", capacity=4 * MIB, block_count=2048)
    stripe = rig.engine.geometry.stripe_bytes_max // rig.model.token_bytes
    prompts = [tokens_of(n, stripe) for n in range(rig.engine.geometry.pack_count)]
    for tokens in prompts:
        assert rig.save(tokens)
    tickets = [rig.engine.lookup(rig.key(), tokens) for tokens in prompts]
    assert not rig.save(tokens_of(99, stripe))
    assert rig.engine.stats().counters["saves_declined_full"] == 1
    for ticket, tokens in zip(tickets, prompts, strict=True):
        ids = rig.take(stripe // 16)
        restore = rig.engine.claim(ticket, tokens, ids)
        for layer in range(4):
            assert restore.wait_layer(layer, 10)
            rig.check_layer(layer, tokens, ids)
        restore.finish()
        rig.give(ids)
    assert rig.save(tokens_of(99, stripe))
    rig.check_quiet()
    rig.engine.close()


def test_a_reader_of_an_evicted_generation_gets_old_bytes(tmp_path):
    rig = Rig(tmp_path / "s", capacity=4 * MIB, block_count=2048)
    tokens = tokens_of(1, 320)
    assert rig.save(tokens)
    ticket = rig.engine.lookup(rig.key(), tokens)
    ids = rig.take(20)
    restore = rig.engine.claim(ticket, tokens, ids)
    rig.engine.reset()
    for seed in range(2, 30):
        rig.save(tokens_of(seed, 320))
    for layer in range(4):
        assert restore.wait_layer(layer, 10)
        rig.check_layer(layer, tokens, ids)
    restore.finish()
    assert rig.hit(tokens) == 0
    rig.check_quiet()
    rig.engine.close()
