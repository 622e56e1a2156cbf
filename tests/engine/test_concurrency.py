"""Many requests at once: each gets its own KV, and nobody waits for a bank that never comes."""

from __future__ import annotations

import threading

import numpy as np
from rangekv.engine import EngineConfig, RequestKey
from support.rig import MIB, Rig, block_of, tokens_of


def test_a_batch_with_shared_and_diverging_prefixes(tmp_path):
    rig = Rig(tmp_path / "s", block_count=2048)
    base = tokens_of(1, 320)
    prompts = [base]
    for n in range(8):
        prompts.append(np.concatenate([base[: n * 40], tokens_of(50 + n, 160)]))
    for tokens in prompts:
        assert rig.save(tokens)
    tickets = [rig.engine.lookup(rig.key(), tokens) for tokens in prompts]
    ids = [rig.take(ticket.token_count // 16) for ticket in tickets]
    claims = zip(tickets, prompts, ids, strict=True)
    restores = [rig.engine.claim(ticket, tokens, mine) for ticket, tokens, mine in claims]
    for layer in range(4):
        for restore, tokens, mine in zip(restores, prompts, ids, strict=True):
            assert restore.wait_layer(layer, 10)
            rig.check_layer(layer, tokens, mine)
    for restore in restores:
        restore.finish()
    rig.check_quiet()
    rig.engine.close()


def test_sixteen_requests_restore_and_save_at_once(tmp_path):
    """Every thread owns its blocks; eviction, growth, joins and misses happen all the time."""
    config = EngineConfig(read_workers=4, lock_wait_s=0.5, read_banks=4, save_banks=2)
    rig = Rig(tmp_path / "s", capacity=16 * MIB, config=config, block_count=16 * 64)
    errors: list[BaseException] = []
    delivered = [0] * 16

    def run(worker: int) -> None:
        rng = np.random.default_rng(worker)
        mine = np.arange(worker * 64, worker * 64 + 64)
        size = rig.model.block_tokens
        for turn in range(12):
            shared = tokens_of(int(rng.integers(3)), 20 * size)
            own = tokens_of(100 + int(rng.integers(6)), 20 * size)
            tokens = np.concatenate([shared[: int(rng.integers(1, 20)) * size], own])
            key = RequestKey(f"r{worker}", "s", turn)
            ticket = rig.engine.lookup(key, tokens)
            ids = rng.permutation(mine)[: len(tokens) // size]
            hit = ticket.token_count // size
            if hit:
                restore = rig.engine.claim(ticket, tokens, ids[:hit])
                for layer in range(rig.model.layer_count):
                    assert restore.wait_layer(layer, 30), restore.errors
                    rig.check_layer(layer, tokens, ids[:hit])
                restore.finish()
                delivered[worker] += hit
            for i in range(hit, len(ids)):
                for layer in range(rig.model.layer_count):
                    block = block_of(rig.model, layer, tokens[: (i + 1) * size])
                    rig.layers[layer][ids[i]] = block
            save = rig.engine.save(key, tokens)
            if save is not None:
                rig.announce(save, ids, piece=3 * size)
                save.extracted(10)
                if rng.random() < 0.2:
                    save.cancel()
                save.finish()

    def guarded(worker: int) -> None:
        try:
            run(worker)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert not errors, errors[0]
    assert sum(delivered) > 0
    assert rig.engine._events.wait_until(lambda: not rig.engine._saves.active, 30)
    assert rig.engine._events.fault is None
    rig.check_quiet()
    rig = rig.reopen()
    assert rig.engine.open_result.state == "warm"
    rig.engine.close()
