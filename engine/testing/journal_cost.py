"""What the journal costs: the same saves into a full store with and without it, in pairs.

    python -m rangekv.engine.testing.journal_cost [--dir .] [--pairs 15] [--size 512MiB]
        [--times 24] [--commit-interval-s 5]

Each run starts a store of its own and saves `--times` its capacity, one save after another. With
`--commit-interval-s 0.5` nearly every save writes into space that the journal must give free first.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time

import numpy as np
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.devices.cpu import bank_memory
from rangekv.engine.sizes import parse_size
from rangekv.engine.store import create
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace

MODEL = ModelGeometry(layer_count=32, token_bytes=4096, block_tokens=16)
NAMESPACE = Namespace({"model": "journal-cost"})
PROMPT_BLOCKS = 32  # 512 tokens, 64 MiB


def run(
    directory: str, recovery: str, size_bytes: int, times: int, interval_s: float
) -> dict[str, float]:
    """Fill a store `times` over; return seconds, bytes a second and what waited."""
    place = tempfile.mkdtemp(prefix="range-journal-cost-", dir=directory)
    try:
        create(
            f"{place}/store", capacity_bytes=size_bytes, model=MODEL, namespace=NAMESPACE, zero=True
        )
        engine = Engine.open(
            f"{place}/store",
            namespace=NAMESPACE,
            geometry=MODEL,
            config=EngineConfig(
                recovery=recovery, commit_interval_s=interval_s, save_banks=4, read_banks=1
            ),
        )
        layers = [
            bank_memory(PROMPT_BLOCKS * MODEL.block_bytes).reshape(PROMPT_BLOCKS, -1)
            for _ in range(MODEL.layer_count)
        ]
        engine.attach(layers)
        prompt_bytes = PROMPT_BLOCKS * MODEL.block_bytes * MODEL.layer_count
        count = times * size_bytes // prompt_bytes
        begin = time.perf_counter()
        for number in range(count):
            _save(engine, number)
        seconds = time.perf_counter() - begin
        stats = engine.stats()
        engine.close(60)
        return {
            "seconds": seconds,
            "bytes": stats.counters["write_bytes"],
            "evicted": stats.counters["evicted_bytes"],
            "writes_held": stats.counters["writes_held"],
            "commits": stats.journal_commits,
            "journal_bytes": stats.journal_bytes,
        }
    finally:
        shutil.rmtree(place)


def _save(engine: Engine, number: int) -> None:
    token_count = PROMPT_BLOCKS * MODEL.block_tokens
    tokens = np.random.default_rng(number).integers(0, 1 << 32, token_count, dtype=np.uint32)
    save = engine.save(RequestKey(f"{number}", "cost"), tokens)
    if save is None:
        raise SystemExit(f"a save was declined: {engine.stats().line()}")
    blocks = np.arange(PROMPT_BLOCKS)
    for layer in range(MODEL.layer_count):
        save.layer_ready(layer, (0, token_count), blocks)
    save.extracted(60)
    save.finish()
    if not save.wait(60):
        raise SystemExit(f"a save failed: {save.error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--size", default="512MiB")
    parser.add_argument("--times", type=int, default=24)
    parser.add_argument("--commit-interval-s", type=float, default=5.0)
    given = parser.parse_args()
    chance, ratios = random.Random(0), []
    size_bytes = parse_size(given.size, name="--size")
    for _ in range(given.pairs):
        found = {}
        for recovery in chance.sample(["journal", "discard"], 2):
            os.sync()  # what an earlier run left is not this one's to write
            found[recovery] = run(
                given.dir, recovery, size_bytes, given.times, given.commit_interval_s
            )
        ratios.append(found["discard"]["seconds"] / found["journal"]["seconds"])
        print(json.dumps(found))
    line = f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})"
    print(f"save throughput with the journal ÷ without: {line}, {len(ratios)} pairs")


if __name__ == "__main__":
    main()
