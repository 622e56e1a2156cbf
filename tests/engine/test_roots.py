"""Tenants never meet: one tree per root, whatever happens to the store."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import numpy as np
import pytest
from rangekv.engine import RequestKey
from rangekv.engine.index import roots as roots_module
from rangekv.engine.index.roots import RootTable
from rangekv.format.errors import UsageError
from rangekv.format.records import NO_SALT
from support.rig import MIB, SMALL, Rig, tokens_of

BLOCK = SMALL.block_tokens


def digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class Tenant:
    """Saves and restores under one root; its KV differs from what another tenant would compute."""

    def __init__(self, rig: Rig, name: str) -> None:
        self.rig, self.name = rig, name
        self.root = rig.engine.root(digest(name)) if name else 0

    def _kv(self, layer: int, tokens: np.ndarray) -> np.ndarray:
        seed = int.from_bytes(digest(f"{self.name} {layer} {tokens.tobytes().hex()}")[:8], "little")
        return np.full(SMALL.block_bytes // 8, seed, dtype=np.uint64).view(np.uint8)

    def save(self, tokens: np.ndarray) -> bool:
        save = self.rig.engine.save(self.rig.key(self.name), tokens, root=self.root)
        if save is None:
            return False
        block_ids = self.rig.take(len(tokens) // BLOCK)
        for at, block in enumerate(block_ids):
            for layer in range(SMALL.layer_count):
                self.rig.layers[layer][block] = self._kv(layer, tokens[: (at + 1) * BLOCK])
        self.rig.announce(save, block_ids)
        assert save.extracted(30)
        self.rig.give(block_ids)
        save.finish()
        return save.wait(30)

    def restore(self, tokens: np.ndarray) -> int:
        ticket = self.rig.engine.lookup(self.rig.key(self.name), tokens, root=self.root)
        if ticket.token_count:
            block_ids = self.rig.take(ticket.token_count // BLOCK)
            restore = self.rig.engine.claim(ticket, tokens, block_ids)
            for layer in range(SMALL.layer_count):
                assert restore.wait_layer(layer, 30)
                for at, block in enumerate(block_ids):
                    want = self._kv(layer, tokens[: (at + 1) * BLOCK])
                    assert np.array_equal(self.rig.layers[layer][block], want)
            restore.finish()
            self.rig.give(block_ids)
        return ticket.token_count


def tenants(rig: Rig) -> list[Tenant]:
    return [Tenant(rig, name) for name in ("", "a", "b")]


def test_the_same_tokens_under_each_root_are_three_prefixes(tmp_path: Path):
    rig = Rig(tmp_path / "store")
    nobody, alice, bob = tenants(rig)
    tokens = tokens_of(1, 4 * BLOCK)
    assert alice.save(tokens)
    assert (nobody.restore(tokens), alice.restore(tokens), bob.restore(tokens)) == (0, 64, 0)
    assert nobody.save(tokens)
    assert bob.save(tokens[: 2 * BLOCK])
    assert (nobody.restore(tokens), alice.restore(tokens), bob.restore(tokens)) == (64, 64, 32)
    assert rig.engine.stats().counters["miss_absent"] == 2
    rig.check_quiet()
    rig.engine.close(30)


def test_they_survive_a_reopen_and_only_their_digests_do(tmp_path: Path):
    rig = Rig(tmp_path / "store")
    tokens = tokens_of(2, 3 * BLOCK)
    for number in range(5):  # so that numbers change over the reopen
        rig.engine.root(digest(f"idle {number}"))
    _, alice, bob = tenants(rig)
    assert alice.root == 6
    assert bob.save(tokens)
    assert alice.save(tokens[: 2 * BLOCK])
    again = rig.reopen()
    assert again.engine.open_result.state == "warm"
    nobody, bob, alice = (Tenant(again, name) for name in ("", "b", "a"))
    assert (alice.root, bob.root) == (1, 2)
    assert (nobody.restore(tokens), alice.restore(tokens), bob.restore(tokens)) == (0, 32, 48)
    assert again.engine.root(digest("idle 3")) == 3
    once_more = again.reopen()
    assert len(once_more.engine._catalog.roots) == 3
    once_more.engine.close(30)


def test_eviction_and_reset_cover_every_root(tmp_path: Path):
    rig = Rig(tmp_path / "store", capacity=8 * MIB)
    nobody, alice, bob = tenants(rig)
    first = tokens_of(3, 16 * BLOCK)
    assert alice.save(first)
    for seed in range(10, 40):
        assert bob.save(tokens_of(seed, 16 * BLOCK))
    assert rig.engine.stats().counters["evicted_bytes"] > 0
    assert alice.restore(first) == 0, "what another tenant saved is newer"
    assert bob.restore(tokens_of(39, 16 * BLOCK)) == 16 * BLOCK
    for tenant in (nobody, alice, bob):
        assert tenant.save(tokens_of(500, 4 * BLOCK))
    rig.engine.reset()
    for tenant in (nobody, alice, bob):
        assert tenant.restore(tokens_of(500, 4 * BLOCK)) == 0
    assert rig.engine.stats().used_bytes == 0
    again = rig.reopen()
    assert len(again.engine._catalog.roots) == 1
    again.engine.close(30)


def test_no_salt_is_root_0_and_a_digest_has_32_bytes(tmp_path: Path):
    rig = Rig(tmp_path / "store")
    assert rig.engine.root(NO_SALT) == 0
    assert rig.engine.root(digest("a")) == rig.engine.root(digest("a")) == 1
    for bad in (b"", b"../../etc/passwd", digest("a") + b"\x00", b"x" * 10_000_000):
        with pytest.raises(UsageError, match="bad-root"):
            rig.engine.root(bad)
    rig.engine.close(30)


def test_a_number_that_was_never_given_is_a_miss_and_a_declined_save(tmp_path: Path):
    rig = Rig(tmp_path / "store")
    tokens = tokens_of(4, 2 * BLOCK)
    for root in (-1, 1, 2**40):
        ticket = rig.engine.lookup(RequestKey("r", "s", root), tokens, root=root)
        assert (ticket.token_count, ticket.reason) == (0, "absent")
        assert rig.engine.save(RequestKey("r", "s", root), tokens, root=root) is None
    assert rig.engine.stats().counters["saves_declined_unknown-root"] == 3
    rig.engine.close(30)


def test_threads_get_one_number_for_one_digest(tmp_path: Path):
    rig = Rig(tmp_path / "store")
    start, found = threading.Barrier(8), [[] for _ in range(8)]

    def ask(mine: list[int]) -> None:
        start.wait()
        mine.extend(rig.engine.root(digest(str(number))) for number in range(500))

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == found[0] for mine in found)
    assert sorted(found[0]) == list(range(1, 501))
    rig.engine.close(30)


def test_a_full_table_forgets_the_oldest_without_records_and_no_number_comes_twice(monkeypatch):
    monkeypatch.setattr(roots_module, "ROOTS_MAX", 5)
    table = RootTable()
    numbers = [table.number(digest(str(one)), set()) for one in range(4)]
    assert numbers == [1, 2, 3, 4]
    assert table.number(digest("new"), {1, 3}) == 5
    assert 2 not in table, "the older half of 2 and 4"
    assert all(number in table for number in (0, 1, 3, 4, 5))
    again = table.number(digest("1"), {1, 3, 4})
    assert again == 6, "asked again, it gets another number"
    assert 5 not in table
    with pytest.raises(UsageError, match="too-many-roots"):
        table.number(digest("one more"), {1, 3, 4, 6})
    assert len(table) == 5
