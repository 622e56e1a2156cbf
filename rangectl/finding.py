"""One finding of `doctor`: what was looked at, how it stands, and what to do about it.

Owns the verdicts; never looks at anything itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail", "fact"]


@dataclass(frozen=True, slots=True)
class Finding:
    """`fact` is for what is only told: nothing depends on it yet."""

    name: str
    verdict: Verdict
    found: str
    advice: str | None = None
    """What to do; None where there is nothing to do."""


def judged(name: str, found: str, *, fail: str | None = None, warn: str | None = None) -> Finding:
    """Return a finding that fails or warns with the first advice there is, else is ok."""
    if fail is not None:
        return Finding(name, "fail", found, fail)
    if warn is not None:
        return Finding(name, "warn", found, warn)
    return Finding(name, "ok", found)
