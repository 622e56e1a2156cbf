"""Thousands of mixed requests from sixteen threads: no wrong byte, nothing left, memory flat."""

from __future__ import annotations

import gc
import random
import resource
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.devices.cpu import bank_memory
from rangekv.engine.store import create
from rangekv.engine.testing import checks
from rangekv.engine.testing.checks import BankWatch
from rangekv.engine.testing.oracle import Oracle
from rangekv.engine.testing.scene import MODEL, NAMESPACE
from rangekv.format.errors import EnvironmentFault, TicketError
from support.effort import effort

REQUESTS = {"banks": effort(5_000, 200_000), "direct": effort(2_000, 100_000)}
THREADS = 16
CAPACITY = 24 << 20
BLOCK = MODEL.block_tokens
BLOCKS_OF_ONE = 40  # of paged KV, for each thread
DEADLINE_S = 60.0
# Memory may still grow while caches fill; from the first fifth on it must not.
GROWTH_MAX = 24 << 20


class Soak:
    """One store and sixteen clients, each with its own blocks and its own chance."""

    patience_s, quarantined = DEADLINE_S, 0

    def __init__(self, store: Path, placement: str) -> None:
        self.store = store
        self.engine = Engine.open(
            store,
            namespace=NAMESPACE,
            geometry=MODEL,
            config=EngineConfig(
                read_bank=256 << 10,
                save_bank=256 << 10,
                read_workers=4,
                save_banks=4,
                lock_wait_s=0.0,
                placement=placement,
                allow_buffered=placement == "banks",
            ),
        )
        shape = (MODEL.layer_count, THREADS * BLOCKS_OF_ONE, MODEL.block_bytes)
        self.kv = bank_memory(int(np.prod(shape))).reshape(shape)
        self.engine.attach(list(self.kv))
        self.watch = BankWatch(self.engine)
        self.oracle = Oracle(MODEL)
        self.requests = self.left = REQUESTS[placement]
        self.lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.resident: list[int] = []
        self.broken: list[BaseException] = []

    def read_pack(self, offset: int, length: int) -> bytes:
        with open(self.store / "range.pack", "rb") as pack:
            pack.seek(offset)
            return pack.read(length)

    def run(self) -> None:
        clients = [threading.Thread(target=self.client, args=(n,)) for n in range(THREADS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        if self.broken:
            raise self.broken[0]

    def client(self, number: int) -> None:
        chance = random.Random(number)
        mine = np.arange(number * BLOCKS_OF_ONE, (number + 1) * BLOCKS_OF_ONE)
        try:
            while self.broken == []:
                with self.lock:
                    if self.left == 0:
                        return
                    self.left -= 1
                    turn = self.requests - self.left
                    if turn % (self.requests // 50) == 0:
                        self.resident.append(resident_bytes())
                self.request(f"{number}-{turn}", chance, mine)
        except BaseException as broken:
            broken.add_note(f"client {number}")
            self.broken.append(broken)

    def count(self, what: str, how_many: int = 1) -> None:
        with self.lock:
            self.counts[what] += how_many

    def prompt(self, chance: random.Random) -> np.ndarray:
        """One of a few popular beginnings, then a tail that is popular too, or nobody else's."""
        base = np.random.default_rng(chance.randrange(6)).integers(0, 1 << 17, 20 * BLOCK)
        tail_seed = 100 + chance.randrange(8 if chance.random() < 0.7 else 1 << 30)
        tail = np.random.default_rng(tail_seed).integers(0, 1 << 17, 20 * BLOCK)
        same = chance.randrange(0, 20 * BLOCK)
        same -= same % (BLOCK if chance.random() < 0.8 else 1)
        length = chance.randrange(BLOCK, 30 * BLOCK)
        return np.concatenate([base[:same], tail])[:length].astype(np.uint32)

    def request(self, name: str, chance: random.Random, mine: np.ndarray) -> None:
        tokens = self.prompt(chance)
        whole = len(tokens) // BLOCK
        ids = np.array(chance.sample(mine.tolist(), whole), dtype=np.int64)
        key = RequestKey(name, "soak", 0)
        ticket = self.engine.lookup(key, tokens)
        kind = "miss" if ticket.token_count == 0 else "hit"
        if 0 < ticket.token_count < whole * BLOCK:
            kind = "partial"
        self.count(kind)
        if chance.random() < 0.15:
            self.engine.release(ticket)
            self.count("aborted before its claim")
            return
        delivered = self.restore(ticket, tokens, ids, chance) if ticket.token_count else 0
        if delivered is None:
            return
        for layer in range(MODEL.layer_count):
            rows = self.oracle.rows(tokens, layer, delivered, whole - delivered)
            self.kv[layer][ids[delivered:]] = rows
        self.save(key, tokens, ids, chance)

    def restore(self, ticket, tokens, ids, chance) -> int | None:
        """Return the blocks that were delivered, or None where the request was aborted."""
        count = ticket.token_count // BLOCK
        try:
            restore = self.engine.claim(ticket, tokens, ids[:count])
        except TicketError:
            self.count("stale")
            return 0
        if chance.random() < 0.1:
            if chance.random() < 0.5:
                restore.wait_layer(chance.randrange(4), DEADLINE_S)
            self.engine.release(ticket)
            self.count("aborted in its restore")
            return None
        for layer in range(MODEL.layer_count):
            assert restore.wait_layer(layer, DEADLINE_S), restore.errors
            wrong = self.oracle.check(tokens, layer, 0, self.kv[layer][ids[:count]])
            assert wrong is None, wrong
        restore.finish()
        assert restore.failed_blocks() == []
        self.count("blocks compared", count * MODEL.layer_count)
        return count

    def save(self, key, tokens, ids, chance) -> None:
        with self.lock:
            self.oracle.note_saved(tokens)
        save = self.engine.save(key, tokens)
        if save is None:
            self.count("save declined")
            return
        step = chance.choice([4, 8, len(ids)])
        for first in range(0, len(ids), step):
            last = min(first + step, len(ids))
            for layer in range(MODEL.layer_count):
                save.layer_ready(layer, (first * BLOCK, last * BLOCK), ids[first:last])
            save.extracted(DEADLINE_S)
            if chance.random() < 0.05:
                save.cancel()
                self.count("save cancelled")
                return
        save.finish()
        self.count("saved")


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("placement", ["banks", "direct"])
def test_soak(tmp_path, placement, figure):
    path = tmp_path / "store"
    create(str(path), capacity_bytes=CAPACITY, model=MODEL, namespace=NAMESPACE)
    try:
        soak = Soak(path, placement)
    except EnvironmentFault as refused:
        pytest.skip(refused.line())
    begin = time.monotonic()
    soak.run()
    seconds = time.monotonic() - begin
    checks.check_quiet(soak.engine, soak.oracle, soak, soak.watch)
    stats = soak.engine.stats()
    assert stats.leases_open == 0
    assert stats.counters["checksum_failures"] == 0
    assert stats.counters["evicted_bytes"] > CAPACITY
    counts = soak.counts
    aborts = ("aborted before its claim", "aborted in its restore", "save cancelled")
    kinds = ("hit", "miss", "partial", "saved", "save declined", *aborts)
    assert min(counts[kind] for kind in kinds) > 0
    assert sum(counts[kind] for kind in ("hit", "miss", "partial")) == soak.requests
    gc.collect()
    settled = soak.resident[len(soak.resident) // 5]
    growth = max(0, resident_bytes() - settled)
    assert growth < GROWTH_MAX, f"memory grew by {growth >> 20} MiB: {soak.resident}"
    assert soak.engine.close(DEADLINE_S).state == "clean"
    figure(
        f"soak, {placement}",
        f"{soak.requests:,} requests of {THREADS} threads in {seconds:.0f} s: {counts['hit']:,}"
        f" hits, {counts['partial']:,} partial, {counts['miss']:,} misses,"
        f" {counts['blocks compared']:,} blocks compared, 0 wrong bytes, 0 leases left,"
        f" memory +{growth >> 20} MiB",
    )
