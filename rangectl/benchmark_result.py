"""What a restore benchmark measured at one object size: samples, counts, and how they compare.

Owns the pairing of samples; never runs an arm and never prints.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rangekv.engine.sizes import format_size
from rangekv.format.errors import ensure

from rangectl.ablations import ABLATIONS
from rangectl.benchmark_plan import Point
from rangectl.measure import Sample
from rangectl.statistics import Paired


@dataclass(slots=True)
class ArmResult:
    """One arm at one point: a sample per repeat and the counts of one run."""

    samples: list[Sample] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, sample: Sample, counts: Counter[str]) -> None:
        """Keep one run; `counts` of every run of an arm at one point are the same."""
        ensure(not self.samples or self.counts == counts, "two runs of a kind differ in counts")
        self.samples.append(sample)
        self.counts = counts

    @property
    def seconds(self) -> list[float]:
        return [sample.seconds for sample in self.samples]

    @property
    def first_layer_seconds(self) -> list[float]:
        return [sample.first_layer_seconds for sample in self.samples]


@dataclass(frozen=True, slots=True)
class PointResult:
    """All runs at one object size; samples of equal position were taken next to each other."""

    point: Point
    arms: dict[str, ArmResult]
    saves: dict[str, ArmResult]
    """By arm; `raw` writes the spans of the range arm's save."""
    computing: dict[str, ArmResult]
    """The arms whose consumer really computes on each layer."""
    ablated: dict[str, ArmResult]
    """By ablation, and the runs they are compared with that are no arms."""

    @property
    def label(self) -> str:
        """Return `2,048 x 1MiB layerwise`."""
        kind = " layerwise" if self.point.layerwise else ""
        return f"{self.point.objects:,} x {format_size(self.point.object_bytes)}{kind}"

    def count_saves(self) -> None:
        """Note with each arm what one save by it wrote and gathered."""
        for name, arm in self.arms.items():
            saved = self.saves.get("range" if name == "range_direct" else name)
            for count in ("writes", "gathers"):
                if saved is not None:
                    arm.counts[count] = saved.counts[count]

    def ratio_to_ceiling(self, arm: str) -> Paired:
        return Paired.ratio(self.arms[arm].seconds, self.arms["ceiling"].seconds)

    def normalised(self, arm: str) -> list[float]:
        """Return seconds ÷ the neighbouring ceiling's: what two points can be compared by."""
        pairs = zip(self.arms[arm].seconds, self.arms["ceiling"].seconds, strict=True)
        return [seconds / ceiling for seconds, ceiling in pairs]

    def exposed(self, compute_seconds: float) -> list[tuple[str, list[float], list[float]]]:
        """Return (arm, exposed seconds, first layer's seconds) of every arm that has layers.

        A real consumer tells it where there is one. Raw reads and the control have none that could
        wait: the times of their layers tell it by the same rule.
        """
        if not compute_seconds:
            return []
        return [
            (
                arm,
                [sample.exposed_seconds(compute_seconds) for sample in got.samples],
                got.first_layer_seconds,
            )
            for arm, got in {**self.arms, **self.computing}.items()
            if got.samples[0].layer_seconds
        ]

    def against(self, ablation: str) -> ArmResult:
        """Return the runs that an ablation is compared with."""
        name = ABLATIONS[ablation].against
        return self.ablated[name] if name in self.ablated else self.arms[name]

    def added_seconds(self, ablation: str) -> Paired:
        """Return by how much an ablation ends later than the runs it is compared with."""
        return Paired.difference(self.ablated[ablation].seconds, self.against(ablation).seconds)

    def added_to_first_layer(self, ablation: str) -> Paired:
        """Return by how much later an ablation has its first layer."""
        ablated, against = self.ablated[ablation], self.against(ablation)
        return Paired.difference(ablated.first_layer_seconds, against.first_layer_seconds)
