"""What a restore benchmark found: its JSON object, and what disproves its claims.

Owns the names of the JSON fields; never runs anything and prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from statistics import median

from rangectl.ablations import ABLATIONS
from rangectl.benchmark_plan import Setup
from rangectl.benchmark_result import ArmResult, PointResult
from rangectl.concurrency import ConcurrencyResult
from rangectl.machine import Machine
from rangectl.statistics import Paired
from rangectl.work_units import work_units

COUNTS = (
    "reads",
    "scatters",
    "layer_events",
    "payload_allocations",
    "leases_taken",
    "records_selected",
    "writes",
    "gathers",
    "read_calls",
    "direct_spans",
    "checksum_pages",
    "syscalls",
)
"""Per restore, writes and gathers per save: what must not depend on the object size in Range."""

TARGETS = {"range": 1.30, "range_direct": 1.05}
"""Largest ratio to the ceiling that an arm is meant to have."""


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run."""

    setup: Setup
    machine: Machine
    path: str
    points: list[PointResult]
    concurrency: ConcurrencyResult | None = None

    @property
    def range_arms(self) -> list[str]:
        """The arms whose counts and times must not depend on the object size."""
        return [arm for arm in TARGETS if arm in self.points[0].arms]

    def faults(self) -> list[str]:
        """Return what disproves the run's claims: unequal counts, reads that were not physical."""
        return [*self._unequal_counts(), *self._unproved_reads()]

    def physical_reads(self) -> Iterator[tuple[PointResult, str, int]]:
        """Yield (point, arm, bytes that the device gave) of every run the kernel counted."""
        for result in self.points:
            for arm, got in result.arms.items():
                for sample in got.samples:
                    if sample.physical_read_bytes is not None:
                        yield result, arm, sample.physical_read_bytes

    def as_json(self) -> dict[str, object]:
        """Return the fields of the JSON object; fields are only ever added."""
        setup, machine = self.setup, self.machine
        return {
            "payload_bytes": setup.payload_bytes,
            "layers": setup.model.layer_count,
            "block_tokens": setup.model.block_tokens,
            "token_bytes": setup.model.token_bytes,
            "seed": setup.seed,
            "path": self.path,
            "filesystem": machine.filesystem,
            "device": machine.device,
            "huge_pages": machine.huge_pages,
            "cpu_count": machine.cpu_count,
            "repeat": setup.repeat,
            "threads": setup.thread_count,
            "capacity_bytes": setup.capacity_bytes,
            "faults": self.faults(),
            "points": [self._point_json(result) for result in self.points],
            "work_units": [
                {
                    "arm": arm,
                    "objects": result.point.objects,
                    "layerwise": result.point.layerwise,
                    **work_units(result, arm),
                }
                for arm in self.points[0].arms
                for result in self.points
            ],
            "compute_ms_per_layer": setup.compute_seconds * 1000,
            "claim_delay_ms": setup.claim_delay_seconds * 1000,
            "read_workers": setup.read_workers,
            "memory": setup.device,
            "concurrency": None if self.concurrency is None else self.concurrency.as_json(),
        }

    def _unequal_counts(self) -> Iterator[str]:
        first = self.points[0]
        for result, arm, name in product(self.points[1:], self.range_arms, COUNTS):
            was, now = (p.arms[arm].counts[name] for p in (first, result))
            if was != now:
                yield (
                    f"{arm}: {name} is {now} for {result.label} and {was} for"
                    f" {first.label}; it must not depend on the object size"
                )

    def _unproved_reads(self) -> Iterator[str]:
        if self.path != "posix-direct":
            return
        for result, arm, read_bytes in self.physical_reads():
            if read_bytes < self.setup.payload_bytes:
                yield (
                    f"{arm}, {result.label}: the kernel counted {read_bytes} bytes"
                    f" read from the device, fewer than the payload's {self.setup.payload_bytes}"
                )

    def _point_json(self, result: PointResult) -> dict[str, object]:
        point = result.point
        return {
            "objects": point.objects,
            "object_bytes": point.object_bytes,
            "layerwise": point.layerwise,
            "arms": {arm: self._arm_json(result, arm) for arm in result.arms},
            "saves": {
                name: {
                    **_samples_json(saved),
                    "bytes_per_second": self.setup.payload_bytes / median(saved.seconds),
                    "ratio_to_raw": _paired_json(
                        Paired.ratio(saved.seconds, result.saves["raw"].seconds)
                    ),
                }
                for name, saved in result.saves.items()
            },
            "compute": {
                arm: {"exposed_seconds": exposed, "first_layer_seconds": first_layer}
                for arm, exposed, first_layer in result.exposed(self.setup.compute_seconds)
            },
            "ablations": {
                name: {
                    "costs": ABLATIONS[name].costs,
                    "against": ABLATIONS[name].against,
                    **_samples_json(result.ablated[name]),
                    "first_layer_seconds": result.ablated[name].first_layer_seconds,
                    "against_seconds": result.against(name).seconds,
                    "difference_seconds": _paired_json(result.added_seconds(name)),
                    "first_layer_difference_seconds": _paired_json(
                        result.added_to_first_layer(name)
                    ),
                }
                for name in self.setup.ablations
            },
        }

    def _arm_json(self, result: PointResult, arm: str) -> dict[str, object]:
        got, ratio = result.arms[arm], result.ratio_to_ceiling(arm)
        return {
            "seconds": got.seconds,
            "cpu_seconds": [sample.cpu_seconds for sample in got.samples],
            "first_layer_seconds": got.first_layer_seconds,
            "ratio_to_ceiling": ratio.median,
            "ratio_range": [ratio.low, ratio.high],
            "ratio_interval": ratio.interval,
            "physical_read_bytes": [sample.physical_read_bytes for sample in got.samples],
            "paths": sorted({sample.path for sample in got.samples if sample.path is not None}),
            "counts": dict(sorted(got.counts.items())),
        }


def _samples_json(got: ArmResult) -> dict[str, object]:
    return {
        "seconds": got.seconds,
        "cpu_seconds": [sample.cpu_seconds for sample in got.samples],
        "counts": dict(sorted(got.counts.items())),
    }


def _paired_json(paired: Paired) -> dict[str, object]:
    return {
        "median": paired.median,
        "range": [paired.low, paired.high],
        "interval": paired.interval,
    }
