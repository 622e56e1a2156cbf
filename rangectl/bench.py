"""`rangectl bench`: one write and one read figure for the disk under a directory, or a sweep.

Owns the temporary file, which has no name from its first moment on; never touches a store.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click
from rangekv.format.errors import ExitCode

from rangectl.output import Advance, Output, columns, facts, human_bytes
from rangectl.verb import EXISTING_DIRECTORY, Listed, Size, Verb, json_option

if TYPE_CHECKING:
    from rangectl.bench_sweep import Cell, Plan
    from rangectl.machine import Machine
    from rangectl.measure import Sample

SPAN_BYTES = 32 << 20
DIRECTIONS = ("read", "write", "mixed")
PATHS = ("direct", "buffered")


@dataclass(frozen=True, slots=True)
class Bench:
    """What was measured, and how."""

    machine: Machine
    path: str
    size_bytes: int
    threads: int
    writes: list[Sample] = field(default_factory=list)
    reads: list[Sample] = field(default_factory=list)
    write_latencies: list[float] = field(default_factory=list)
    """Seconds of each span of all samples."""
    read_latencies: list[float] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """Return the fields of the JSON object."""
        return {
            "path": self.path,
            "filesystem": self.machine.filesystem,
            "device": self.machine.device,
            "huge_pages": self.machine.huge_pages,
            "size_bytes": self.size_bytes,
            "span_bytes": SPAN_BYTES,
            "threads": self.threads,
            "write": self._figure(self.writes, self.write_latencies),
            "read": {
                **self._figure(self.reads, self.read_latencies),
                "physical_read_bytes": [sample.physical_read_bytes for sample in self.reads],
            },
            "sweep": [cell.as_json(self.size_bytes) for cell in self.cells],
        }

    def human(self) -> Iterator[str]:
        """Yield the report for a reader."""
        machine = self.machine
        yield from facts(
            [
                ("path", f"{self.path} on {machine.filesystem} ({machine.device})"),
                (
                    "spans",
                    f"{self.size_bytes // SPAN_BYTES} x {human_bytes(SPAN_BYTES)},"
                    f" {self.threads} threads, huge pages {machine.huge_pages}",
                ),
                ("samples", f"{len(self.reads)}; median (min-max)"),
                ("write", f"{self._rates(self.writes)}, final fdatasync included"),
                ("read", self._rates(self.reads)),
            ]
        )
        if self.cells:
            from rangectl.bench_sweep import rows

            yield ""
            yield from columns(rows(self.cells, self.size_bytes))

    def _figure(self, samples: list[Sample], latencies: list[float]) -> dict[str, object]:
        from rangectl.statistics import PERCENTS, percentile

        seconds = [sample.seconds for sample in samples]
        return {
            "bytes_per_second": self.size_bytes / median(seconds),
            "seconds": seconds,
            "latency_seconds": {
                f"p{percent}": percentile(latencies, percent) for percent in PERCENTS
            },
        }

    def _rates(self, samples: list[Sample]) -> str:
        rates = [self.size_bytes / sample.seconds / 2**30 for sample in samples]
        return f"{median(rates):.2f} GiB/s ({min(rates):.2f}-{max(rates):.2f})"


@click.command(
    cls=Verb,
    help="Measure the raw speed of a directory's disk in 32 MiB spans.",
    examples=(
        "rangectl bench --dir /kv",
        "rangectl bench --dir /kv --size 8GiB --json",
        "rangectl bench --sweep read,mixed --threads 1,8 --request-size 128KiB,1MiB",
    ),
    exits=(ExitCode.ENVIRONMENT,),
)
@click.option(
    "--dir",
    "folder",
    default=".",
    show_default=True,
    type=EXISTING_DIRECTORY,
    help="Directory on that disk.",
)
@click.option(
    "--size",
    type=Size(multiple_of=SPAN_BYTES),
    default="1GiB",
    show_default=True,
    help="Bytes to write and to read, in a file without a name.",
)
@click.option(
    "--sweep",
    "directions",
    default=(),
    type=Listed(click.Choice(DIRECTIONS)),
    help=f"Measure these too, in all combinations: {', '.join(DIRECTIONS)}.",
)
@click.option(
    "--threads",
    default="8",
    show_default=True,
    type=Listed(click.IntRange(1, 64)),
    help="One number, or several for a sweep; the two figures take the largest.",
)
@click.option(
    "--request-size",
    default="32MiB",
    show_default=True,
    type=Listed(Size(multiple_of=4096)),
    help="Sizes of one call in a sweep.",
)
@click.option(
    "--io",
    "paths",
    default="direct",
    show_default=True,
    type=Listed(click.Choice(PATHS)),
    help="Past the page cache, through it, or both, in a sweep.",
)
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(1, 1000))
@click.option("--allow-buffered", is_flag=True, help="Go on where there is no O_DIRECT.")
@json_option
def command(
    *,
    folder: Path,
    size: int,
    directions: tuple[str, ...],
    threads: tuple[int, ...],
    request_size: tuple[int, ...],
    paths: tuple[str, ...],
    repeat: int,
    allow_buffered: bool,
    as_json: bool,
) -> int:
    """Measure and print."""
    from rangectl.bench_sweep import Plan

    out = Output("bench", as_json=as_json)
    plan = Plan(directions, paths, threads, request_size)
    plan.check(size)
    with out.progress("bench", (1 + (2 + plan.cell_count) * repeat) * size) as advance:
        bench = _measure(
            folder=folder,
            size=size,
            plan=plan,
            repeat=repeat,
            allow_buffered=allow_buffered,
            advance=advance,
        )
    out.result(True, bench.as_json(), bench.human())
    return ExitCode.OK


def _measure(
    *, folder: Path, size: int, plan: Plan, repeat: int, allow_buffered: bool, advance: Advance
) -> Bench:
    from rangectl.bench_sweep import run_sweep
    from rangectl.machine import Machine, require_room
    from rangectl.measure import Run
    from rangectl.raw_file import RawFile
    from rangectl.raw_spans import Span, SpanWorkers, latencies

    threads = max(plan.threads)
    require_room(folder, disk_bytes=size, memory_bytes=2 * threads * SPAN_BYTES)
    with ExitStack() as stack:
        file = RawFile(folder, size, allow_buffered=allow_buffered)
        stack.callback(file.close)
        workers = SpanWorkers(threads)
        stack.callback(workers.close)
        workers.fill()
        spans = [Span(offset, SPAN_BYTES) for offset in range(0, size, SPAN_BYTES)]
        # The first write turns preallocated extents into written ones; it is not a sample.
        workers.write(file.fd, spans)
        os.fdatasync(file.fd)
        advance(size)
        bench = Bench(
            Machine.at(folder, file.filesystem),
            "posix-direct" if file.direct else "posix-buffered",
            size,
            threads,
        )
        for _ in range(repeat):
            run = Run()
            moved = workers.write(file.fd, spans)
            os.fdatasync(file.fd)
            bench.writes.append(run.done())
            bench.write_latencies.extend(latencies(moved))
            advance(size)
            file.drop_residency()
            run = Run()
            moved = workers.read(file.fd, spans)
            bench.reads.append(run.done())
            bench.read_latencies.extend(latencies(moved))
            advance(size)
        bench.cells.extend(run_sweep(plan, file, size, repeat, advance))
        return bench
