"""A serving engine in miniature: paged KV, a block allocator and an oracle outside the engine."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import xxhash
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.files import Files
from rangekv.engine.store import create
from rangekv.engine.testing.gpu_blocks import layers_of, paged_memory
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace

MIB = 1 << 20
POISON = 0xDB
NAMESPACE = Namespace({"model": "test-model", "revision": "r1"})
RIGS: list[Rig] = []  # of the running test; see `forget_all`
SMALL = ModelGeometry(layer_count=4, token_bytes=1024, block_tokens=16)
MLA = ModelGeometry(layer_count=3, token_bytes=1152, block_tokens=16)  # blocks of 4.5 pieces


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 32, count, dtype=np.uint32)


def block_of(model: ModelGeometry, layer: int, prefix: np.ndarray) -> np.ndarray:
    """The KV of the last block of `prefix`: like real KV it depends on every token before it."""
    seed = xxhash.xxh3_64_intdigest(prefix.tobytes(), seed=layer)
    words = np.arange(model.block_bytes // 8, dtype=np.uint64)
    return (words * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)).view(np.uint8)


def forget_all() -> None:
    """Let go of the banks of engines that a test has left open, as one does that plays a death.

    Their threads keep the engines alive, 300 MiB each. Whoever still fills a bank has it in hand.
    """
    for rig in RIGS:
        for bank in (*rig.engine._read_banks.banks, *rig.engine._save_banks.banks):
            bank.memory = np.empty(0, dtype=np.uint8)
    RIGS.clear()


class Rig:
    def __init__(
        self,
        path: Path,
        *,
        model: ModelGeometry = SMALL,
        capacity: int = 64 * MIB,
        config: EngineConfig | None = None,
        files: Files | None = None,
        block_count: int = 512,
        new: bool = True,
        zero: bool = False,
        namespace: Namespace = NAMESPACE,
        device: str = "cpu",
    ) -> None:
        self.path, self.model = path, model
        self.device = device
        self.config = config or EngineConfig(read_workers=4, lock_wait_s=0.5, device=device)
        if new:
            create(str(path), capacity_bytes=capacity, model=model, namespace=namespace, zero=zero)
        self.engine = Engine.open(
            path, namespace=namespace, geometry=model, config=self.config, files=files
        )
        shape = (block_count, model.block_bytes)
        self.layers = [paged_memory(device, shape) for _ in range(model.layer_count)]
        for layer in self.layers:
            layer[:] = POISON
        self.engine.attach(layers_of(self.layers))
        RIGS.append(self)
        self.free = list(np.random.default_rng(7).permutation(block_count))
        self.attempt = 0

    def reopen(self, **changes: object) -> Rig:
        self.engine.close(30)
        device = str(changes.pop("device", self.device))
        config = replace(self.config, device=device)
        return Rig(self.path, model=self.model, config=config, new=False, device=device, **changes)

    def close_damaged(self) -> None:
        """Close, then flip a bit of each layer of the one extent, with the file's time put back."""
        (extent,) = self.engine._catalog.extents.live
        self.engine.close(30)
        path = Path(self.path) / "range.pack"
        was = path.stat()
        with open(path, "r+b") as pack:
            for layer_index in range(self.model.layer_count):
                pack.seek(extent.offset + layer_index * extent.width + 100)
                byte = pack.read(1)[0]
                pack.seek(-1, os.SEEK_CUR)
                pack.write(bytes([byte ^ 1]))
        os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))

    def key(self, name: str = "request") -> RequestKey:
        self.attempt += 1
        return RequestKey(name, "session", self.attempt)

    def take(self, count: int) -> np.ndarray:
        assert len(self.free) >= count, "the rig has too few blocks"
        taken, self.free = self.free[:count], self.free[count:]
        return np.array(taken, dtype=np.int64)

    def give(self, block_ids: np.ndarray) -> None:
        for layer in self.layers:
            layer[block_ids] = POISON
        self.free.extend(block_ids)

    def produce(self, tokens: np.ndarray, block_ids: np.ndarray, first_block: int = 0) -> None:
        """Compute the KV of blocks first_block… of `tokens` into `block_ids`."""
        size = self.model.block_tokens
        for i, block in enumerate(block_ids):
            prefix = tokens[: (first_block + i + 1) * size]
            for layer in range(self.model.layer_count):
                self.layers[layer][block] = block_of(self.model, layer, prefix)

    def announce(self, save, block_ids, *, begin=0, end=None, piece=None, by_layer=False) -> None:
        """Announce tokens [begin, end) in pieces; block_ids[0] holds token 0's block."""
        size = self.model.block_tokens
        end = len(block_ids) * size if end is None else end
        piece = piece or end - begin
        ranges = [(at, min(at + piece, end)) for at in range(begin, end, piece)]
        layers = range(self.model.layer_count)
        order = (
            [(r, n) for n in layers for r in ranges]
            if by_layer
            else [(r, n) for r in ranges for n in layers]
        )
        for (first, last), layer in order:
            save.layer_ready(layer, (first, last), block_ids[first // size : last // size])

    def save(self, tokens: np.ndarray, *, piece=None, by_layer=False, start_token=0) -> bool:
        """Save the whole blocks of `tokens`; whether anything became visible."""
        save = self.engine.save(self.key(), tokens, start_token=start_token)
        if save is None:
            return False
        block_ids = self.take(len(tokens) // self.model.block_tokens)
        self.produce(tokens, block_ids)
        self.announce(save, block_ids, piece=piece, by_layer=by_layer)
        assert save.extracted(30)
        self.give(block_ids)
        save.finish()
        return save.wait(30)

    def hit(self, tokens: np.ndarray) -> int:
        """Length of the stored prefix, without restoring it."""
        ticket = self.engine.lookup(self.key(), tokens)
        self.engine.release(ticket)
        return ticket.token_count

    def restore(self, tokens: np.ndarray, *, skip: int = 0, most: int | None = None) -> int:
        """Restore what is stored, compare every byte with the oracle, return the endpoint."""
        ticket = self.engine.lookup(self.key(), tokens, skip_tokens=skip, max_tokens=most)
        if ticket.token_count == 0:
            return 0
        size = self.model.block_tokens
        block_ids = self.take((ticket.token_count - skip) // size)
        restore = self.engine.claim(ticket, tokens, block_ids)
        for layer in range(self.model.layer_count):
            assert restore.wait_layer(layer, 30), restore.errors
            self.check_layer(layer, tokens, block_ids, skip // size)
        assert restore.failed_blocks() == []
        restore.finish()
        self.give(block_ids)
        return ticket.token_count

    def check_layer(self, layer, tokens, block_ids, first_block=0) -> None:
        size = self.model.block_tokens
        for i, block in enumerate(block_ids):
            want = block_of(self.model, layer, tokens[: (first_block + i + 1) * size])
            assert np.array_equal(self.layers[layer][block], want), (layer, i)

    def check_quiet(self) -> None:
        """What holds after every run: no lease left, space accounted for."""
        catalog = self.engine._catalog
        assert self.engine._events.wait_until(lambda: not catalog.leases.open, 10)
        stats = self.engine.stats()
        assert stats.leases_open == 0
        assert stats.used_bytes == sum(
            self.engine.geometry.extent_bytes(extent.width) for extent in catalog.residents
        )
        assert all(
            extent.references == len(records) for extent, records in catalog.residents.items()
        )


def save_some_turn(
    rig: Rig, random: np.random.Generator, seed: int, turn: int, prompts: list[np.ndarray]
) -> np.ndarray:
    """Save a prompt that leaves an earlier one anywhere, now and then of a tenant or only in part.

    Return it, saved or not; `prompts` are those before it.
    """
    size = rig.model.block_tokens
    base = prompts[random.integers(len(prompts))]
    cut = random.integers(0, len(base) // size + 1) * size
    tail = tokens_of(1000 * seed + turn, int(random.integers(1, 12)) * size)
    prompt = np.concatenate([base[:cut], tail])[: 48 * size]
    root = rig.engine.root(hashlib.sha256(bytes([turn % 3])).digest()) if turn % 4 == 0 else 0
    save = rig.engine.save(rig.key(), prompt, root=root)
    if save is not None:
        blocks = rig.take(len(prompt) // size)
        rig.produce(prompt, blocks)
        end = int(random.integers(0, len(blocks) + 1)) * size
        rig.announce(save, blocks, end=end if turn % 5 == 0 else None, piece=3 * size)
        assert save.extracted(30)
        rig.give(blocks)
        save.finish()
        save.wait(30)
    return prompt
