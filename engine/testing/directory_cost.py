"""What the directory costs as it grows: to add a prompt, a turn or a branch, and to make room.

    python -m rangekv.engine.testing.directory_cost [--records 100000] [--branches 1000]

No payload is written: the catalog alone is timed. Each prompt has 320 tokens, each turn and each
branch as many; branches leave one prompt at tokens of their own. Every line is the mean of the
steps that it names, with so many records in the directory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.stats import Counters
from rangekv.format.geometry import Geometry, ModelGeometry

MODEL = ModelGeometry(layer_count=2, token_bytes=256, block_tokens=16)
PROMPT_TOKENS = 320
SAMPLE = 1000

Tokens = npt.NDArray[np.uint32]


class Directory:
    """A catalog, and prompts that are published in it as an engine does."""

    def __init__(self, capacity_bytes: int) -> None:
        self.catalog = Catalog(Geometry.derive(MODEL, capacity_bytes), Counters())
        self._chance = np.random.default_rng(7)

    @property
    def records(self) -> int:
        return self.catalog.record_count

    def tokens(self, count: int) -> Tokens:
        """Return token ids that no other prompt has."""
        return self._chance.integers(0, 1 << 32, count, dtype=np.uint32)

    def publish(self, prompt: Tokens) -> None:
        """Make what is new of a prompt visible."""
        data = memoryview(prompt.tobytes())
        reservation = self.catalog.reserve(0, data, 0, len(prompt))
        if isinstance(reservation, str):
            raise SystemExit(f"a prompt was declined: {reservation}")
        hashes = []
        for part in reservation.parts:
            self.catalog.raise_append_mark(part, part.token_start + part.token_count)
            pages = self.catalog.geometry.page_count(part.token_count)
            hashes.append(np.zeros((MODEL.layer_count, pages), dtype=np.uint64))
        self.catalog.publish(reservation, reservation.token_end, hashes)
        self.catalog.settle(reservation)

    def mean_us(self, prompts: list[Tokens]) -> float:
        """Publish prompts one after another; return microseconds for each."""
        begin = time.perf_counter()
        for prompt in prompts:
            self.publish(prompt)
        return (time.perf_counter() - begin) / len(prompts) * 1e6


def measure(record_count: int, branch_count: int, sample: int) -> Iterator[tuple[str, int, float]]:
    """Yield (what, records there, microseconds a step)."""
    stripe_bytes = PROMPT_TOKENS * MODEL.token_bytes
    room = 8 * (record_count + branch_count + 8 * sample) * stripe_bytes * MODEL.layer_count
    directory = Directory(room)
    size = max(1, record_count // 100)
    while True:
        size = min(size, record_count)
        while directory.records < size:
            directory.publish(directory.tokens(PROMPT_TOKENS))
        prompts = [directory.tokens(PROMPT_TOKENS) for _ in range(sample)]
        yield "a prompt", size, directory.mean_us(prompts)
        turns = [np.concatenate([each, directory.tokens(PROMPT_TOKENS)]) for each in prompts]
        yield "a turn of it", size, directory.mean_us(turns)
        if size == record_count:
            break
        size *= 10
    trunk = directory.tokens(PROMPT_TOKENS)
    directory.publish(trunk)
    branches = [np.concatenate([trunk, directory.tokens(16)]) for _ in range(branch_count)]
    for first, last in ((0, branch_count // 10), (branch_count // 10, branch_count)):
        yield (
            f"a branch, {first:,} there",
            directory.records,
            directory.mean_us(branches[first:last]),
        )
    begin = time.perf_counter()
    for branch in branches:
        path = directory.catalog.directory.walk(
            0, memoryview(branch.tobytes()), len(branch), reserved=False
        )
        if sum(match.token_count for match in path) != len(branch):
            raise SystemExit("a branch was not found")
    seconds = time.perf_counter() - begin
    yield "a lookup of a branch", directory.records, seconds / branch_count * 1e6
    yield from _evictions(record_count, sample)


def _evictions(record_count: int, sample: int) -> Iterator[tuple[str, int, float]]:
    """Fill a store, then publish into what must be evicted first."""
    stripe_bytes = PROMPT_TOKENS * MODEL.token_bytes
    full = Directory(record_count * stripe_bytes * MODEL.layer_count)
    evicted = full.catalog.counters
    while not evicted.evicted_bytes:
        full.publish(full.tokens(PROMPT_TOKENS))
    prompts = [full.tokens(PROMPT_TOKENS) for _ in range(sample)]
    records = full.records
    yield "a prompt that evicts", records, full.mean_us(prompts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--branches", type=int, default=1_000)
    given = parser.parse_args()
    for what, records, microseconds in measure(given.records, given.branches, SAMPLE):
        print(f"{what:<24} {records:>9,} records  {microseconds:>8.1f} us")


if __name__ == "__main__":
    main()
