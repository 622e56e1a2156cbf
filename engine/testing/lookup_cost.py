"""What a lookup costs: one hit of many tokens, named in fewer or more objects, saved in turns.

    python -m rangekv.engine.testing.lookup_cost [--tokens 49152] [--repeat 30] [--dir .]

Prints a line for each number of records that hold the prompt and each number of objects (arrays of
token ids) that name it. Nothing is restored: a lookup reads memory only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.devices.cpu import bank_memory
from rangekv.engine.store import create
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace

MODEL = ModelGeometry(layer_count=2, token_bytes=256, block_tokens=8)
NAMESPACE = Namespace({"model": "lookup-cost"})
TURNS = (1, 48)
OBJECT_TOKENS = (49_152, 2_048, 256, 8)

Tokens = npt.NDArray[np.uint32]


def measure(directory: str, token_count: int, turns: int, repeat: int) -> Iterator[str]:
    """Save one prompt in so many turns and look it up under every name; yield a line each."""
    blocks = token_count // MODEL.block_tokens
    with tempfile.TemporaryDirectory(prefix="range-lookup-cost-", dir=directory) as place:
        create(f"{place}/store", capacity_bytes=256 << 20, model=MODEL, namespace=NAMESPACE)
        engine = Engine.open(
            f"{place}/store",
            namespace=NAMESPACE,
            geometry=MODEL,
            config=EngineConfig(allow_buffered=True, read_banks=1, save_banks=2),
        )
        try:
            memory = [bank_memory(blocks * MODEL.block_bytes) for _ in range(MODEL.layer_count)]
            engine.attach([layer.reshape(blocks, -1) for layer in memory])
            chance = np.random.default_rng(7)
            tokens = chance.integers(0, 1 << 17, token_count, dtype=np.uint32)
            for turn in range(1, turns + 1):
                begin, end = (token_count * done // turns for done in (turn - 1, turn))
                _save(engine, tokens, begin, end)
            sizes = [size for size in OBJECT_TOKENS if size <= token_count]
            taken: dict[int, list[float]] = {size: [] for size in sizes}
            order = random.Random(0)
            for _ in range(repeat):
                for size in order.sample(sizes, len(sizes)):
                    taken[size].append(_lookup(engine, tokens, size))
            records = engine.stats().records
            for size, seconds in taken.items():
                middle, low, high = statistics.median(seconds), min(seconds), max(seconds)
                yield (
                    f"{records:>3} records, {-(-token_count // size):>6,} objects: "
                    f"{middle * 1000:.3f} ms ({low * 1000:.3f}-{high * 1000:.3f})"
                )
        finally:
            engine.close(30)


def _save(engine: Engine, tokens: Tokens, begin: int, end: int) -> None:
    save = engine.save(RequestKey(f"turn {end}", "cost"), tokens[:end])
    if save is None:
        raise SystemExit(f"a save was declined: {engine.stats().line()}")
    first, last = begin // MODEL.block_tokens, end // MODEL.block_tokens
    for layer in range(MODEL.layer_count):
        save.layer_ready(layer, (begin, end), np.arange(first, last))
    save.extracted(60)
    save.finish()
    if not save.wait(60):
        raise SystemExit(f"a save failed: {save.error}")


def _lookup(engine: Engine, tokens: Tokens, object_tokens: int) -> float:
    objects = [tokens[at : at + object_tokens] for at in range(0, len(tokens), object_tokens)]
    begin = time.perf_counter()
    ticket = engine.lookup(RequestKey("hit", "cost"), objects)
    seconds = time.perf_counter() - begin
    if ticket.token_count != len(tokens):
        raise SystemExit(f"{ticket.token_count} of {len(tokens)} tokens were hit: {ticket.reason}")
    engine.release(ticket)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=49_152)
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--dir", default=".")
    given = parser.parse_args()
    for turns in TURNS:
        for line in measure(given.dir, given.tokens, turns, given.repeat):
            print(line)


if __name__ == "__main__":
    main()
