"""A sweep of `rangectl bench`: rates and latencies by direction, path, threads and request size.

Owns its cells, their order and their table; the file it works on belongs to the caller.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from statistics import median

from rangekv.engine.sizes import format_size
from rangekv.format.errors import EnvironmentFault, UsageError

from rangectl.measure import Run
from rangectl.output import Advance
from rangectl.raw_file import RawFile
from rangectl.raw_spans import SPAN_BYTES, Span, SpanWorkers, latencies
from rangectl.statistics import PERCENTS, percentile


@dataclass(frozen=True, slots=True)
class Plan:
    """What is swept: every combination of these.

    A direction is `read`, `write` or `mixed`, which alternates both over the same file; a path is
    `direct` or `buffered`.
    """

    directions: tuple[str, ...]
    paths: tuple[str, ...]
    threads: tuple[int, ...]
    request_bytes: tuple[int, ...]

    @property
    def cell_count(self) -> int:
        """Number of combinations."""
        shape = (self.directions, self.paths, self.threads, self.request_bytes)
        return prod(map(len, shape))

    def check(self, size_bytes: int) -> None:
        """Raise UsageError unless every request size divides the file and fits a bank."""
        for request in self.request_bytes:
            if request > SPAN_BYTES or size_bytes % request:
                raise UsageError(
                    "bad-request-size",
                    f"requests of {format_size(request)}: expected at most"
                    f" {format_size(SPAN_BYTES)}, and {format_size(size_bytes)} a multiple of it",
                )


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination and its samples; latencies are those of all its requests."""

    direction: str
    path: str
    threads: int
    request_bytes: int
    seconds: list[float] = field(default_factory=list)
    latencies: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of each request, by `read` and `write`."""

    def as_json(self, size_bytes: int) -> dict[str, object]:
        """Return the fields of the JSON object; percentiles instead of every latency."""
        return {
            "direction": self.direction,
            "path": self.path,
            "threads": self.threads,
            "request_bytes": self.request_bytes,
            "seconds": self.seconds,
            "bytes_per_second": size_bytes / median(self.seconds),
            "latency_seconds": {
                kind: {
                    "requests": len(seconds),
                    **{f"p{percent}": percentile(seconds, percent) for percent in PERCENTS},
                }
                for kind, seconds in self.latencies.items()
            },
        }


def run_sweep(
    plan: Plan, file: RawFile, size_bytes: int, repeat: int, advance: Advance
) -> list[Cell]:
    """Measure every cell `repeat` times in random order; the file must be written already."""
    order = random.Random(0)
    cells = [
        Cell(*place)
        for place in product(plan.directions, plan.paths, plan.threads, plan.request_bytes)
    ]
    if not file.direct and "direct" in plan.paths and cells:
        raise EnvironmentFault(
            "no-direct-io", f"{file.filesystem} has no direct I/O to sweep; take --io buffered"
        )
    for _ in range(repeat):
        for cell in order.sample(cells, len(cells)):
            _measure(cell, file, size_bytes, order)
            advance(size_bytes)
    return cells


def _measure(cell: Cell, file: RawFile, size_bytes: int, order: random.Random) -> None:
    fd = file.fd if cell.path == "direct" else file.buffered_fd
    size = cell.request_bytes
    spans = [Span(offset, size) for offset in range(0, size_bytes, size)]
    order.shuffle(spans)
    kinds = [cell.direction] * len(spans)
    if cell.direction == "mixed":
        kinds = ["read" if index % 2 == 0 else "write" for index in range(len(spans))]
    calls = {"read": os.preadv, "write": os.pwritev}
    os.fdatasync(fd)
    file.drop_residency()
    workers = SpanWorkers(cell.threads, size)
    try:
        workers.fill()
        run = Run()
        moved = workers.move(
            [(calls[kind], fd, span) for kind, span in zip(kinds, spans, strict=True)]
        )
        if cell.direction != "read":
            os.fdatasync(fd)
        cell.seconds.append(run.done().seconds)
    finally:
        workers.close()
    for kind, seconds in zip(kinds, latencies(moved), strict=True):
        cell.latencies.setdefault(kind, []).append(seconds)


def rows(cells: Sequence[Cell], size_bytes: int) -> Iterator[Sequence[str]]:
    """Yield the table: one row a cell, two for a mixed one."""
    yield (
        "sweep",
        "path",
        "threads",
        "request",
        "GiB/s",
        *(f"p{percent} ms" for percent in PERCENTS),
    )
    for cell in cells:
        rates = [size_bytes / seconds / 2**30 for seconds in cell.seconds]
        rate = f"{median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})"
        for kind, seconds in sorted(cell.latencies.items()):
            name = kind if cell.direction == kind else f"{cell.direction}: {kind}"
            yield (
                name,
                cell.path,
                str(cell.threads),
                format_size(cell.request_bytes),
                rate,
                *(f"{percentile(seconds, percent) * 1000:.2f}" for percent in PERCENTS),
            )
