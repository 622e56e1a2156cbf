"""What one case did to its files, written down so that somebody else can play it again.

Owns the trace file: JSON lines, the case and its seed first, then every operation on a file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from rangekv.engine.testing.case import Outcome
from rangekv.format.errors import UsageError

SCHEMA = "rangectl.replay-fault-trace/1"


@dataclass(frozen=True, slots=True)
class Trace:
    """A case, its seed, what was found then, and the operations on files in their order."""

    case_id: str
    seed: int
    violation: str | None
    calls: tuple[str, ...]


def write(outcome: Outcome, seed: int, place: Path) -> None:
    """Write the trace of one outcome to `place`."""
    head = {
        "schema": SCHEMA,
        "id": outcome.case.case_id,
        "seed": seed,
        "violation": outcome.violation,
        "states": outcome.states,
    }
    lines = [json.dumps(head), *(json.dumps({"call": call}) for call in outcome.calls)]
    place.write_text("\n".join(lines) + "\n", "utf-8")


def read(place: Path) -> Trace:
    """Read a trace; raises UsageError `bad-trace`."""
    try:
        lines = [json.loads(line) for line in place.read_text("utf-8").splitlines() if line]
        head = lines[0]
        if head["schema"] != SCHEMA:
            raise ValueError(f"its schema is {head['schema']!r}, expected {SCHEMA!r}")
        calls = tuple(str(line["call"]) for line in lines[1:])
        return Trace(str(head["id"]), int(head["seed"]), head["violation"], calls)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError("bad-trace", f"this is no trace: {error}", path=str(place)) from error


def first_difference(then: Sequence[str], now: Sequence[str]) -> str | None:
    """Return where two runs part, as one line; None where they did the same."""
    for number, (old, new) in enumerate(zip_longest(then, now), 1):
        if old != new:
            return f"operation {number}: then {old or 'nothing more'}, now {new or 'nothing more'}"
    return None
