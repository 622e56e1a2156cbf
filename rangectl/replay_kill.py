"""`rangectl replay-fault kill9`: a real process, killed again and again on the user's file system.

Owns the options and the printing; killing and judging live in `rangekv.engine.testing.kill`.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import click
from rangekv.engine.config import RECOVERIES
from rangekv.format.errors import ExitCode

from rangectl.output import Output
from rangectl.scratch import scratch_directory
from rangectl.verb import EXISTING_DIRECTORY, Verb, json_option


@click.command(
    "kill9",
    cls=Verb,
    help="Kill a working process at random times and at every step; look at what it left.",
    examples=(
        "rangectl replay-fault kill9 --cycles 200 --dir /kv",
        "rangectl replay-fault kill9 --cycles 20 --seed 3 --recovery discard --json",
    ),
    exits=(ExitCode.CHECK_FAILED, ExitCode.ENVIRONMENT),
)
@click.option("--cycles", default=50, show_default=True, type=click.IntRange(1))
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option(
    "--recovery",
    default="journal",
    show_default=True,
    type=click.Choice(RECOVERIES),
    help="As in the engine, whose default is the same: with a journal what was published two"
    " commit intervals before a kill must be hit after it (95 %), with discard nothing.",
)
@click.option(
    "--dir",
    "folder",
    default=".",
    show_default=True,
    type=EXISTING_DIRECTORY,
    help="Directory on the file system to test; all that is written there is removed.",
)
@json_option
def kill9(*, cycles: int, seed: int, recovery: str, folder: Path, as_json: bool) -> int:
    """One violation ends it; a killed process keeps the page cache, a power cut does not."""
    from rangekv.engine.testing.checks import Violation
    from rangekv.engine.testing.kill import Killed, Killer
    from rangekv.engine.testing.scene import Scene

    begin = time.monotonic()
    found: Counter[str] = Counter()
    done: list[Killed] = []
    violation = None
    with scratch_directory(folder, "kill") as place:
        killer = Killer(Scene.new(place, seed).store, seed, recovery=recovery)
        account = killer.account
        try:
            for _ in range(cycles):
                done.append(killer.cycle())
                found[done[-1].found] += 1
            killer.settle()
            account.require_kept()
        except Violation as broken:
            where = "at the end" if len(done) == cycles else f"in cycle {len(done) + 1}"
            violation = f"{where}: {broken}"
    tokens, deaths = sum(one.tokens for one in done), sum(one.died for one in done)
    repeat = f"rangectl replay-fault kill9 --cycles {min(cycles, len(done) + 1)} --seed {seed}"
    repeat += f" --recovery {recovery}"
    seconds = time.monotonic() - begin
    human = [f"{one.how} → {one.found}, {one.tokens} tokens visible" for one in done]
    if recovery == "journal":
        human.append(account.line())
    reopens = ", ".join(f"{count} {name}" for name, count in sorted(found.items()))
    human.append(
        f"{len(done)} processes, {deaths} deaths, in {seconds:.0f} s, reopens: {reopens}; "
        f"{tokens:,} visible tokens compared, 0 wrong bytes; "
        "not shown: power cuts (rangectl replay-fault crash)"
    )
    if violation is not None:
        human[-1] = f"VIOLATED  {violation}"
        human.append(f"{'':<10}repeat: {repeat}")
    fields = {
        "seed": seed,
        "recovery": recovery,
        "cycles": len(done),
        "deaths": deaths,
        "seconds": round(seconds, 1),
        "reopens": dict(found),
        "tokens_compared": tokens,
        "old_tokens": account.old_tokens,
        "old_tokens_hit": account.hit_tokens,
        "old_tokens_hit_percent": round(account.percent, 2) if account.old_tokens else None,
        "violation": violation,
        "repeat": repeat,
    }
    Output("replay-fault-kill9", as_json=as_json).result(violation is None, fields, human)
    return ExitCode.OK if violation is None else ExitCode.CHECK_FAILED
