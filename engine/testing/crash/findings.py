"""What an exploration saw and what it found broken.

Owns the figures and the names of states; how they come about is for the explorer.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

WRONG_KV = "wrong-kv"
REFUSED = "refused"
COLD_CLOSE = "cold-close"
CAME_BACK = "came-back"
NOT_KEPT = "not-kept"
TRACEBACK = "traceback"

KILL = "kill"
_PLACE = re.compile(r"([a-z-]+)((?:@\d+\.(?:\d+(?:-[a-z-]+)?|kill))+)")
_COUNTS = (
    "points",
    "states",
    "distinct",
    "reopens",
    "recoveries",
    "warm",
    "clean_closes",
    "rotten",
    "rotten_warm",
    "misses",
)


@dataclass(frozen=True, slots=True)
class Violation:
    """A state in which a rule does not hold; `place` is its name, `trace` how it came about."""

    kind: str
    detail: str
    place: str
    trace: tuple[str, ...]


@dataclass(slots=True)
class Findings:
    """What one exploration saw.

    Of images that differ in payload only, one is reopened where that one shows no record: a reopen
    does not read payload.
    """

    points: int = 0
    """Crash points: operation boundaries of the recorded trace and of every recovery."""
    states: int = 0
    """Images that a power cut could have left at those points."""
    distinct: int = 0
    """Images of which no two are equal."""
    reopens: int = 0
    recoveries: int = 0
    """Reopens that went on to save and close, and whose own crashes were explored."""
    warm: int = 0
    clean_closes: int = 0
    rotten: int = 0
    """Reopens of a cut that something was damaged in besides."""
    rotten_warm: int = 0
    """Those of them that lost nothing but what was damaged."""
    misses: int = 0
    """Blocks that a verified restore did not deliver because a checksum was wrong."""
    cold: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)

    def add(self, other: Findings) -> None:
        """Count another exploration in."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.cold += other.cold
        self.violations += other.violations

    def counts(self) -> dict[str, int]:
        """Return the plain figures by name."""
        return {name: getattr(self, name) for name in _COUNTS}

    @property
    def kinds(self) -> set[str]:
        """The kinds of rules that were broken."""
        return {one.kind for one in self.violations}


Step = tuple[int, str]
"""One crash: operations done before it, and the number of the cut or KILL."""


def parse_place(place: str) -> tuple[str, tuple[Step, ...]] | None:
    """Split the name of a state into its scenario and its crashes; None if it is no such name."""
    found = _PLACE.fullmatch(place)
    if found is None:
        return None
    steps = [step.partition(".") for step in found[2].split("@")[1:]]
    return found[1], tuple((int(done), how) for done, _, how in steps)
