"""The report of a restore benchmark for a reader.

Owns the tables and their wording; never measures and decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from rangectl import work_units
from rangectl.ablations import ABLATIONS
from rangectl.benchmark_plan import Setup
from rangectl.benchmark_report import TARGETS, Report
from rangectl.output import columns, facts, human_bytes
from rangectl.statistics import PAIRS_MIN, Paired

EXPOSED_TARGET = 1.02
"""Largest ratio of exposed time to the first layer's, where computing takes longer than reading."""

Rows = Iterator[Sequence[str]]


def human(report: Report) -> Iterator[str]:
    """Yield the lines of the report."""
    yield from facts(_facts(report))
    setup = report.setup
    tables = [_times(report), _comparisons(report), work_units.table(report.points), _saves(report)]
    if setup.compute_seconds:
        tables.append(_exposed(report))
    if setup.ablations:
        tables.append(_ablations(report))
    if report.concurrency is not None:
        tables.append(report.concurrency.rows())
    for table in tables:
        yield ""
        yield from columns(table)
    yield ""
    if setup.repeat < PAIRS_MIN:
        yield f"no verdict below {PAIRS_MIN} pairs: --repeat {PAIRS_MIN} gives one"
    else:
        yield "[95 % interval of the median of paired ratios or differences]"
    yield from (f"FAULT        {fault}" for fault in report.faults())


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    setup, machine = report.setup, report.machine
    yield (
        "payload",
        f"{human_bytes(setup.payload_bytes)} = {setup.token_count:,} tokens x"
        f" {setup.model.layer_count} layers, blocks of {human_bytes(setup.model.block_bytes)}",
    )
    yield (
        "path",
        f"{report.path}{_memory(setup)} on {machine.filesystem} ({machine.device}),"
        f" {setup.thread_count} threads"
        + (f", {setup.read_workers} in Range" if setup.read_workers != setup.thread_count else "")
        + f", huge pages {machine.huge_pages}",
    )
    yield "residency", _residency(report)
    yield (
        "samples",
        f"{setup.repeat} of each arm at each object size, in random order, seed {setup.seed};"
        " shown are median (min-max)",
    )


def _memory(setup: Setup) -> str:
    return "" if setup.device == "cpu" else f" to {setup.device}"


def _residency(report: Report) -> str:
    if report.path == "posix-buffered":
        return "page cache dropped before each run; buffered reads, so caches may still help"
    if report.path != "posix-direct":
        return "page cache dropped before each run; how the bytes went is in path"
    lowest = min((n for _, _, n in report.physical_reads()), default=None)
    if lowest is None:
        return "O_DIRECT; this kernel does not count physical reads, so they are not proved"
    return f"O_DIRECT; the kernel counted at least {human_bytes(lowest)} read in every run"


def _times(report: Report) -> Rows:
    yield "objects", "arm", "seconds", "÷ ceiling", "first layer", "CPU s/GiB"
    gib = report.setup.payload_bytes / 2**30
    for result in report.points:
        label = result.label
        for arm, got in result.arms.items():
            ratio = result.ratio_to_ceiling(arm)
            cpu_seconds = median(sample.cpu_seconds for sample in got.samples)
            layered = bool(got.samples[0].layer_seconds)
            yield (
                label,
                arm,
                _seconds(got.seconds),
                _spread(ratio.median, ratio.low, ratio.high),
                f"{median(got.first_layer_seconds):.3f} s" if layered else "-",
                f"{cpu_seconds / gib:.3f}",
            )
            label = ""


def _comparisons(report: Report) -> Rows:
    """Yield one row a ratio, one cell an object size."""
    first = report.points[0]
    arms = report.range_arms
    yield "ratio", *(result.label for result in report.points)
    for arm in arms:
        ratios = [result.ratio_to_ceiling(arm) for result in report.points]
        cells = [_cell(ratio, TARGETS[arm]) for ratio in ratios]
        yield f"{arm} ÷ ceiling, target ≤ {TARGETS[arm]:.2f}", *cells
    if "scattered" in first.arms:
        # What reading in place costs by itself, and what the engine adds to that.
        for upper, lower in (("scattered", "ceiling"), ("range_direct", "scattered")):
            pairs = [(result.arms[upper], result.arms[lower]) for result in report.points]
            ratios = [Paired.ratio(one.seconds, other.seconds) for one, other in pairs]
            yield f"{upper} ÷ {lower}", *map(_cell, ratios)
    for arm in arms:
        pairs = [(result.arms["control"], result.arms[arm]) for result in report.points]
        ratios = [Paired.ratio(control.seconds, own.seconds) for control, own in pairs]
        yield f"control ÷ {arm}", *map(_cell, ratios)
    for arm in (*arms, "control"):
        reference = first.normalised(arm)
        ratios = [Paired.ratio(result.normalised(arm), reference) for result in report.points]
        yield f"{arm} ÷ {arm} at {first.label}", *map(_cell, ratios)


def _saves(report: Report) -> Rows:
    yield "saved as", "by", "seconds", "GiB/s", "÷ raw writes", "CPU s/GiB", "gathers", "writes"
    gib = report.setup.payload_bytes / 2**30
    for result in report.points:
        label = result.label
        for name, saved in result.saves.items():
            counts = saved.counts
            yield (
                label,
                name,
                _seconds(saved.seconds),
                f"{gib / median(saved.seconds):.2f}",
                _cell(Paired.ratio(saved.seconds, result.saves["raw"].seconds)),
                f"{median(sample.cpu_seconds for sample in saved.samples) / gib:.3f}",
                f"{counts['gathers']:,}" if "gathers" in counts else "-",
                f"{counts['writes']:,}",
            )
            label = ""


def _exposed(report: Report) -> Rows:
    """Yield what a consumer waits for that computes on each layer, over a resident prefix."""
    compute = report.setup.compute_seconds
    yield f"exposed at {compute * 1000:g} ms a layer", *(r.label for r in report.points)
    columns_of = zip(*(result.exposed(compute) for result in report.points), strict=True)
    for cells in columns_of:
        arm = cells[0][0]
        target = EXPOSED_TARGET if arm in TARGETS else None
        ratios = [Paired.ratio(exposed, first_layer) for _, exposed, first_layer in cells]
        yield f"{arm}, seconds", *(_seconds(exposed) for _, exposed, _ in cells)
        wanted = "" if target is None else f", target ≤ {target:.2f}"
        yield f"{arm} ÷ its first layer{wanted}", *(_cell(ratio, target) for ratio in ratios)


def _ablations(report: Report) -> Rows:
    yield "ablation, seconds added", *(result.label for result in report.points)
    for name in report.setup.ablations:
        added = [result.added_seconds(name) for result in report.points]
        first_layer = [result.added_to_first_layer(name) for result in report.points]
        yield f"{name} - {ABLATIONS[name].against}", *map(_signed, added)
        yield "  the same of the first layer", *map(_signed, first_layer)


def _seconds(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.3f} ({min(seconds):.3f}-{max(seconds):.3f})"


def _spread(middle: float, low: float, high: float) -> str:
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def _signed(added: Paired) -> str:
    low, high = added.interval or (added.low, added.high)
    shown = f"{low:+.3f} to {high:+.3f}"
    return f"{added.median:+.3f} " + (f"({shown})" if added.interval is None else f"[{shown}]")


def _cell(ratio: Paired, target: float | None = None) -> str:
    """Return median and range; from 15 pairs up the interval instead, and the verdict."""
    if ratio.interval is None:
        return _spread(ratio.median, ratio.low, ratio.high)
    verdict = None if target is None else ratio.verdict(target)
    shown = f"{ratio.median:.2f} [{ratio.interval[0]:.2f}-{ratio.interval[1]:.2f}]"
    return shown if verdict is None else f"{shown} {verdict.value}"
