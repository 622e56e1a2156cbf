"""Stores that hold prompts twice, as a run of `serve-benchmark` leaves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.connector.tenant import root_digest
from rangekv.engine.devices.cpu import bank_memory
from rangekv.engine.store import create
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace

MODEL = ModelGeometry(layer_count=2, token_bytes=1024, block_tokens=16)
CAPACITY_BYTES = 8 << 20

Floats = np.ndarray
Change = Callable[[int, Floats], Floats]
"""What becomes of one layer's [blocks, elements] of a copy."""


@dataclass(frozen=True)
class Copy:
    """One prompt under one tenant; without a change two copies of a prompt are equal."""

    salt: str | None
    tokens: Sequence[int]
    change: Change = lambda layer_index, values: values


def plus(difference: float, layer_index: int = 1, block: int = 0) -> Change:
    """Change one element; all elements are 1 or -1, so it is by `difference` of their RMS."""

    def change(layer: int, values: Floats) -> Floats:
        if layer == layer_index:
            values[block, 5] += difference
        return values

    return change


def values_of(tokens: Sequence[int], layer_index: int, blocks: int, elements: int) -> Floats:
    """KV of a prompt: 1 or -1 by chance, the same for the same first block and layer."""
    chance = np.random.default_rng([layer_index, *tokens[: MODEL.block_tokens]])
    return chance.choice(np.array([-1, 1], dtype=np.float32), (blocks, elements))


def packed(values: Floats, dtype: str) -> np.ndarray:
    """Return the values in another dtype as rows of bytes."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    return values.astype(dtype).view(np.uint8)


def write_copies(
    directory: Path,
    copies: Sequence[Copy],
    *,
    dtype: str = "float32",
    rank: int = 0,
    world_size: int = 1,
) -> Path:
    """Write a closed store of these copies below `directory` and return its path."""
    path = directory / "namespace" / f"rank-{rank}-of-{world_size}"
    path.parent.mkdir(parents=True, exist_ok=True)
    namespace = Namespace({"model": "copies", "kv_dtype": dtype})
    create(
        str(path),
        capacity_bytes=CAPACITY_BYTES,
        model=MODEL,
        namespace=namespace,
        rank=rank,
        world_size=world_size,
    )
    config = EngineConfig(rank=rank, world_size=world_size, save_banks=1, read_banks=1)
    itemsize = 4 if dtype == "float32" else 2
    with Engine.open(path, namespace=namespace, geometry=MODEL, config=config) as engine:
        blocks = max(len(copy.tokens) for copy in copies) // MODEL.block_tokens
        layers = [
            bank_memory(blocks * MODEL.block_bytes).reshape(blocks, -1)
            for _ in range(MODEL.layer_count)
        ]
        engine.attach(layers)
        for number, copy in enumerate(copies):
            count = len(copy.tokens) // MODEL.block_tokens
            root = engine.root(root_digest(SimpleNamespace(cache_salt=copy.salt)))
            tokens = np.asarray(copy.tokens, dtype=np.uint32)
            save = engine.save(RequestKey(str(number), "copies"), tokens, root=root)
            assert save is not None
            for index, layer in enumerate(layers):
                values = values_of(copy.tokens, index, count, MODEL.block_bytes // itemsize)
                layer[:count] = packed(copy.change(index, values), dtype)
                span = (save.start_token, count * MODEL.block_tokens)
                first = save.start_token // MODEL.block_tokens
                save.layer_ready(index, span, np.arange(first, count))
            assert save.extracted(30)
            save.finish()
            assert save.wait(30)
    return path
