"""`rangectl replay-fault simulate`: every order of events, chosen by seeds, in memory.

Owns the options and the printing; the simulation lives in `rangekv.engine.testing.simulation`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

import click
from rangekv.format.errors import ExitCode

from rangectl.output import Output
from rangectl.verb import Verb, json_option


@click.command(
    "simulate",
    cls=Verb,
    help="Let seeds choose the order of all events of the engine, with faults; touches no disk.",
    examples=(
        "rangectl replay-fault simulate --seeds 2000",
        "rangectl replay-fault simulate --first 41 --seeds 1 --json",
    ),
    exits=(ExitCode.CHECK_FAILED,),
)
@click.option("--seeds", default=200, show_default=True, type=click.IntRange(1))
@click.option("--first", default=0, show_default=True, type=click.IntRange(0), help="First seed.")
@click.option("--events", default=200, show_default=True, type=click.IntRange(1))
@json_option
def simulate(*, seeds: int, first: int, events: int, as_json: bool) -> int:
    """The first violation ends it; its seed repeats it."""
    from rangekv.engine.testing.checks import Violation
    from rangekv.engine.testing.simulation import simulate as play

    # What the engine has to say of faults that are injected is no news to anybody.
    logging.getLogger("rangekv").setLevel(logging.CRITICAL + 1)
    begin = time.monotonic()
    counts: Counter[str] = Counter()
    violation, repeat = None, None
    for seed in range(first, first + seeds):
        try:
            counts += play(seed, events)
        except Violation as broken:
            violation = str(broken)
            repeat = f"rangectl replay-fault simulate --first {seed} --seeds 1 --events {events}"
            break
    seconds = time.monotonic() - begin
    human = [f"{name:<18} {count:>12,}" for name, count in sorted(counts.items())]
    if violation is None:
        human.append(f"{seeds:,} seeds of {events} events in {seconds:.0f} s: every rule held")
    else:
        human += [f"VIOLATED  {violation}", f"{'':<10}repeat: {repeat}"]
    fields = {
        "first": first,
        "seeds": seeds,
        "events": events,
        "seconds": round(seconds, 1),
        "counts": dict(sorted(counts.items())),
        "violation": violation,
        "repeat": repeat,
    }
    Output("replay-fault-simulate", as_json=as_json).result(violation is None, fields, human)
    return ExitCode.OK if violation is None else ExitCode.CHECK_FAILED
