"""Many restores at once: how fast they are together, and what saves beside them cost.

Owns the comparison of these runs, its JSON fields and its table; `concurrent_runs` runs them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rangectl.benchmark_result import ArmResult
from rangectl.statistics import Paired

RESTORES, SAVES = "restores", "saves"
ALONE, BESIDE = "alone", "beside"


@dataclass(frozen=True, slots=True)
class ArmConcurrency:
    """One arm: samples by how many restores ran at once, and of restores and saves together."""

    at_once: dict[int, ArmResult]
    """All requests, so many at a time: equal bytes, whatever the number."""
    together: dict[tuple[str, str], ArmResult]
    """(restores or saves, alone or beside the other); all restores at once."""

    def rate(self, count: int) -> Paired:
        """Return the throughput of `count` at once ÷ that of one after another."""
        one = min(self.at_once)
        return Paired.ratio(self.at_once[one].seconds, self.at_once[count].seconds)

    def kept(self, kind: str) -> Paired:
        """Return the throughput of restores or saves beside the other ÷ alone."""
        alone, beside = self.together[kind, ALONE], self.together[kind, BESIDE]
        return Paired.ratio(alone.seconds, beside.seconds)


@dataclass(frozen=True, slots=True)
class ConcurrencyResult:
    """All arms; every request restores or saves `request_bytes` of its own."""

    requests: int
    saves: int
    request_bytes: int
    arms: dict[str, ArmConcurrency]

    def as_json(self) -> dict[str, object]:
        """Return the fields of the JSON object."""
        return {
            "requests": self.requests,
            "saves": self.saves,
            "request_bytes": self.request_bytes,
            "arms": {
                name: {
                    "at_once": {
                        str(count): {**_json(got), "rate_ratio": arm.rate(count).median}
                        for count, got in arm.at_once.items()
                    },
                    "together": {
                        kind: {
                            "alone": _json(arm.together[kind, ALONE]),
                            "beside": _json(arm.together[kind, BESIDE]),
                            "rate_ratio": arm.kept(kind).median,
                        }
                        for kind in (RESTORES, SAVES)
                    },
                }
                for name, arm in self.arms.items()
            },
        }

    def rows(self) -> Iterator[Sequence[str]]:
        """Yield the table."""
        one = min(next(iter(self.arms.values())).at_once)
        mib = f"{self.request_bytes / 2**20:g} MiB"
        yield f"{self.requests} restores of {mib}", "arm", "seconds", "GiB/s", "rate ÷"
        for name, arm in self.arms.items():
            for count, got in arm.at_once.items():
                cells = _cells(got, arm.rate(count), self.requests * self.request_bytes)
                yield f"{count} at once ÷ {one} at once", name, *cells
            for kind, other, count in (
                (RESTORES, f"{self.saves} saves", self.requests),
                (SAVES, f"{self.requests} restores", self.saves),
            ):
                cells = _cells(
                    arm.together[kind, BESIDE], arm.kept(kind), count * self.request_bytes
                )
                yield f"{count} {kind} beside {other} ÷ alone", name, *cells


def _cells(got: ArmResult, rate: Paired, moved_bytes: int) -> Sequence[str]:
    seconds = median(got.seconds)
    low, high = rate.interval or (rate.low, rate.high)
    spread = f"{rate.median:.2f} ({low:.2f}-{high:.2f})"
    return f"{seconds:.2f}", f"{moved_bytes / 2**30 / seconds:.2f}", spread


def _json(got: ArmResult) -> dict[str, object]:
    return {"seconds": got.seconds, "counts": dict(sorted(got.counts.items()))}
