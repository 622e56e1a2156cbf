"""What each arm does for one restore and one save, counted: objects, lookups, reads, copies.

Owns which counts are shown under which names; never measures time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rangectl.benchmark_result import PointResult

RESTORE_UNITS = {
    "hashes": "hashes",
    "lookups": "lookups",
    "records": "records_selected",
    "leases": "leases_taken",
    "reads": "reads",
    "syscalls": "syscalls",
    "checksums": "checksum_pages",
    "copies": "scatters",
    "in place": "direct_spans",
    "events": "layer_events",
}
"""Columns of the table, and the counts of a restore that fill them."""

SAVE_UNITS = {"gathers": "gathers", "writes": "writes"}
"""The same of a save."""

Units = dict[str, int | None]


def work_units(result: PointResult, arm: str) -> Units:
    """Return the work of one arm at one object size; None where an arm knows no such thing."""
    counts = result.arms[arm].counts
    units = {**RESTORE_UNITS, **SAVE_UNITS}
    return {name: counts.get(count) for name, count in units.items()}


def table(points: Sequence[PointResult]) -> Iterator[Sequence[str]]:
    """Yield one row for each arm and each amount of work that it does at some object sizes."""
    yield "work of", "objects", *RESTORE_UNITS, *SAVE_UNITS
    for arm in points[0].arms:
        amounts: dict[tuple[int | None, ...], list[PointResult]] = {}
        for result in points:
            amounts.setdefault(tuple(work_units(result, arm).values()), []).append(result)
        for amount, where in amounts.items():
            yield arm, _objects(where), *("-" if n is None else f"{n:,}" for n in amount)


def _objects(where: Sequence[PointResult]) -> str:
    counts = [result.point.objects for result in where]
    low, high = min(counts), max(counts)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
