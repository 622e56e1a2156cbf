"""`rangectl replay-fault crash`: every crash state of a small store, looked at one by one.

Owns the options and the printing; the exploration lives in `rangekv.engine.testing.crash`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rangekv.format.errors import ExitCode, UsageError

from rangectl.output import Output, columns
from rangectl.scratch import scratch_directory
from rangectl.verb import EXISTING_DIRECTORY, Verb, json_option

if TYPE_CHECKING:
    from rangekv.engine.testing.crash.explorer import Explorer, Search
    from rangekv.engine.testing.crash.findings import Findings, Violation
    from rangekv.engine.testing.crash.scenarios import Scenario

VIOLATIONS_SHOWN = 5


@click.command(
    "crash",
    cls=Verb,
    help="Record what a store does to its files, then look at every power cut and kill of it.",
    examples=(
        "rangectl replay-fault crash",
        "rangectl replay-fault crash --scenario bind --depth 3 --json",
    ),
    exits=(ExitCode.CHECK_FAILED, ExitCode.ENVIRONMENT),
)
@click.option(
    "--depth",
    default=2,
    show_default=True,
    type=click.IntRange(1, 4),
    help="Crashes in a row: 2 crashes the recovery too.",
)
@click.option(
    "--scenario",
    "names",
    multiple=True,
    metavar="NAME",
    help="Explore only this course of events; may be given again. Default: all.",
)
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
@click.option(
    "--dir",
    "folder",
    type=EXISTING_DIRECTORY,
    help="Record on this file system instead of in memory; what is written there is removed.",
)
@click.option(
    "--state",
    metavar="STATE",
    help="Show one state, named as a violation names it, and how it comes about.",
)
@click.option(
    "--self-test", is_flag=True, help="Explore protocols that lack a step: they must be found out."
)
@json_option
def crash(
    *,
    depth: int,
    names: Sequence[str],
    seed: int,
    folder: Path | None,
    state: str | None,
    self_test: bool,
    as_json: bool,
) -> int:
    """Explore; a violation is a failed check."""
    from rangekv.engine.testing.crash.explorer import Search

    out = Output("replay-fault-crash", as_json=as_json)
    if state is not None:
        return _show(state, seed, out)
    search = Search(crashes=depth, seed=seed)
    if self_test:
        return _test_the_explorer(search, out)
    runs = [_explore(scenario, search, folder) for scenario in _chosen(names)]
    held = not any(run.findings.violations for run in runs)
    out.result(held, _as_json(runs, search), _as_text(runs, search))
    return ExitCode.OK if held else ExitCode.CHECK_FAILED


@dataclass(frozen=True, slots=True)
class _Run:
    name: str
    findings: Findings
    seconds: float


def _chosen(names: Sequence[str]) -> list[Scenario]:
    from rangekv.engine.testing.crash.scenarios import JOURNAL_SCENARIOS, SCENARIOS

    known = {scenario.name: scenario for scenario in (*SCENARIOS, *JOURNAL_SCENARIOS)}
    for name in names:
        if name not in known:
            raise UsageError(
                "unknown-scenario", f"no scenario {name!r}; there are {', '.join(known)}"
            )
    return [known[name] for name in names] or list(known.values())


def _explore(scenario: Scenario, search: Search, folder: Path | None) -> _Run:
    from rangekv.engine.testing.crash.explorer import Explorer

    begin = time.monotonic()
    explorer = Explorer(scenario, search=search)
    findings = explorer.run() if folder is None else _explore_real(explorer, folder)
    return _Run(scenario.name, findings, time.monotonic() - begin)


def _explore_real(explorer: Explorer, folder: Path) -> Findings:
    """Record on real files below `folder`, remove them, and explore the recording."""
    from rangekv.engine.testing.crash.recording import Recording, RecordingFiles

    with scratch_directory(folder.absolute(), "crash") as place:
        recording = Recording(str(place))
        explorer.record(lambda: RecordingFiles(recording), recording.log, str(place))
    return explorer.explore(recording.log)


def _show(state: str, seed: int, out: Output) -> int:
    """Go to one state and tell what happened on the way."""
    from rangekv.engine.testing.crash.explorer import Explorer, Search
    from rangekv.engine.testing.crash.findings import parse_place

    place = parse_place(state)
    if place is None:
        raise UsageError("bad-state", f"{state!r} is no state; it looks like serve@42.7@13.0")
    name, route = place
    explorer = Explorer(_chosen([name])[0], search=Search(route=route, seed=seed))
    findings = explorer.run()
    if findings.reopens < len(route):
        raise UsageError("no-such-state", f"there is no state {state}; see --seed and --scenario")
    held = not findings.violations
    out.result(held, {"state": state, "seed": seed, "story": explorer.story}, explorer.story)
    return ExitCode.OK if held else ExitCode.CHECK_FAILED


def _test_the_explorer(search: Search, out: Output) -> int:
    """Explore every mutant of the protocol; each must be found out, or be as safe as it should."""
    from rangekv.engine.testing.crash.journal_mutants import JOURNAL_MUTANTS
    from rangekv.engine.testing.crash.mutants import MUTANTS

    rows: list[dict[str, Any]] = []
    for mutant in (*MUTANTS, *JOURNAL_MUTANTS):
        findings = mutant.explore(search)
        rows.append(
            {
                "mutant": mutant.name,
                "expected": mutant.breaks or "safe",
                "found": sorted(findings.kinds) or ["safe"],
                "as_expected": mutant.as_expected(findings),
                "states": findings.states,
            }
        )
    held = all(row["as_expected"] for row in rows)
    human = [
        f"{'ok' if row['as_expected'] else 'MISSED':<7} {row['mutant']:<55}"
        f" expected {row['expected']:<11} found {', '.join(row['found'])}"
        for row in rows
    ]
    human.append(f"{sum(row['as_expected'] for row in rows)} of {len(rows)} protocols as expected")
    out.result(held, {"depth": search.crashes, "mutants": rows}, human)
    return ExitCode.OK if held else ExitCode.CHECK_FAILED


def _total(runs: Sequence[_Run]) -> Findings:
    from rangekv.engine.testing.crash.findings import Findings

    total = Findings()
    for run in runs:
        total.add(run.findings)
    return total


def _as_json(runs: Sequence[_Run], search: Search) -> dict[str, Any]:
    total = _total(runs)
    return {
        "seed": search.seed,
        "depth": search.crashes,
        **total.counts(),
        "scenarios": [
            {"name": run.name, "seconds": round(run.seconds, 1), **run.findings.counts()}
            for run in runs
        ],
        "violations": [
            {
                "kind": one.kind,
                "state": one.place,
                "detail": one.detail,
                "trace": one.trace,
                "repeat": _repeat(one, search),
            }
            for one in total.violations
        ],
    }


def _as_text(runs: Sequence[_Run], search: Search) -> Iterator[str]:
    head = ("scenario", "crash points", "states", "distinct", "reopens", "warm", "clean", "s")
    rows = [
        (
            run.name,
            f"{run.findings.points:,}",
            f"{run.findings.states:,}",
            f"{run.findings.distinct:,}",
            f"{run.findings.reopens:,}",
            f"{run.findings.warm:,}",
            f"{run.findings.clean_closes:,}",
            f"{run.seconds:.1f}",
        )
        for run in runs
    ]
    yield from columns([head, *rows])
    total = _total(runs)
    for one in total.violations[:VIOLATIONS_SHOWN]:
        yield f"VIOLATED  {one.kind} in {one.place}: {one.detail}"
        yield from (f"{'':<10}{line}" for line in one.trace)
        yield f"{'':<10}repeat: {_repeat(one, search)}"
    verdict = f"{len(total.violations)} violations"
    if not total.violations:
        verdict = "no wrong KV, no refused store, every clean close warm"
    yield f"{total.points:,} crash points, {total.states:,} states: {verdict}"


def _repeat(violation: Violation, search: Search) -> str:
    return f"rangectl replay-fault crash --state {violation.place} --seed {search.seed}"
