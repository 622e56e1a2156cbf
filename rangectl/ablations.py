"""Ablations: the range arm with one cost put back that its design takes away.

Owns what each of them changes and what it is compared with; never runs one.
"""

from __future__ import annotations

from dataclasses import dataclass

from rangectl.benchmark_plan import Point, Setup
from rangectl.consumer import Consumer

CLAIMED_LATER = "range, claimed later"
"""The range arm with time between lookup and claim, in which it reads ahead."""


@dataclass(frozen=True, slots=True)
class Ablation:
    """What one ablation pays for, and the run that does not."""

    costs: str
    against: str = "range"


ABLATIONS = {
    "scalar-index": Ablation("one prefix hash and one index access for each object"),
    "object-issue": Ablation("one native read for each object"),
    "whole-prefix-barrier": Ablation("no layer is used before the last one is there"),
    "no-prefetch": Ablation("reads begin at the claim, not at the lookup", CLAIMED_LATER),
}


def consumers(setup: Setup, point: Point) -> dict[str, Consumer]:
    """Return the consumer of each ablation that is asked for, and of the run it is compared with.

    An object of one layer or of all layers has `object_bytes`, so reads of that size are as many
    as there are objects; at objects as large as a span nothing changes.
    """
    delay = setup.claim_delay_seconds
    known = {
        "scalar-index": Consumer(name_objects=True),
        "object-issue": Consumer(read_bytes_max=point.object_bytes),
        "whole-prefix-barrier": Consumer(whole_prefix=True),
        "no-prefetch": Consumer(claim_delay_seconds=delay, lookup_late=True),
    }
    chosen = {name: known[name] for name in setup.ablations}
    if any(ABLATIONS[name].against == CLAIMED_LATER for name in chosen):
        chosen[CLAIMED_LATER] = Consumer(claim_delay_seconds=delay)
    return chosen
