"""`rangectl replay-fault`: the fault cases, run on the user's own file system.

Owns the temporary folder and the printing; the cases live in `rangekv.engine.testing`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rangekv.format.errors import ExitCode, UsageError

from rangectl.machine import require_proof
from rangectl.output import Output
from rangectl.replay_crash import crash
from rangectl.replay_kill import kill9
from rangectl.replay_self_test import run_self_test
from rangectl.replay_simulation import simulate
from rangectl.scratch import scratch_directory
from rangectl.verb import EXISTING_DIRECTORY, Verb, VerbGroup, device_option, json_option

if TYPE_CHECKING:
    from rangekv.engine.testing.case import Case, Outcome

EXITS = (ExitCode.CHECK_FAILED, ExitCode.ENVIRONMENT)

_seed_option = click.option("--seed", default=0, show_default=True, type=click.IntRange(0))
_dir_option = click.option(
    "--dir",
    "folder",
    default=".",
    show_default=True,
    type=EXISTING_DIRECTORY,
    help="Directory on the file system to test; only what a broken rule leaves stays there.",
)
_owner_option = click.option("--owner", help="Only the cases of this owner, such as read-bank.")


@click.command(
    cls=VerbGroup,
    default="run",
    help="Show on this file system that the ownership rules hold.",
    examples=(
        "rangectl replay-fault --dir /kv",
        "rangectl replay-fault run stale-ticket --seed 7",
        "rangectl replay-fault kill9 --cycles 200",
    ),
    exits=EXITS,
)
def command() -> None:
    """`run` is what happens when no subcommand is named."""


command.add_command(crash)
command.add_command(kill9)
command.add_command(simulate)


@command.command(
    "list",
    cls=Verb,
    help="List the fault cases: their owners and the rules they test.",
    examples=("rangectl replay-fault list --owner ticket", "rangectl replay-fault list --json"),
    exits=(),
)
@_owner_option
@json_option
def list_cases(*, owner: str | None, as_json: bool) -> int:
    """Print the table of cases."""
    cases = _chosen((), owner)
    rows = [
        {"id": case.case_id, "owner": case.owner, "rule": case.rule, "absent": case.absent}
        for case in cases
    ]
    width = max(len(case.case_id) for case in cases)
    human = [
        f"{case.case_id:<{width}}  {case.rule}"
        + ("" if case.absent is None else f" (absent: {case.absent})")
        for case in cases
    ]
    human.append(f"{len(cases)} cases")
    Output("replay-fault-list", as_json=as_json).result(True, {"cases": rows}, human)
    return ExitCode.OK


@command.command(
    "run",
    cls=Verb,
    help="Run fault cases, all of them or those named, each in a fresh store.",
    examples=(
        "rangectl replay-fault run --dir /kv",
        "rangectl replay-fault run read-bank.read --seed 7 --json",
    ),
    exits=EXITS,
)
@click.argument("case_ids", nargs=-1, metavar="[ID]...")
@_owner_option
@_seed_option
@_dir_option
@device_option("Where paged KV and banks lie; with cuda, bytes go from the files through the host.")
@click.option(
    "--self-test", is_flag=True, help="Run engines that lack a rule: the cases must catch them."
)
@json_option
def run(
    *,
    case_ids: Sequence[str],
    owner: str | None,
    seed: int,
    folder: Path,
    device: str,
    self_test: bool,
    as_json: bool,
) -> int:
    """Play the cases one by one; a broken rule is a failed check."""
    require_proof(folder)
    if self_test:
        return run_self_test(folder, seed, as_json=as_json)
    out = Output("replay-fault-case", as_json=as_json)
    verdicts: Counter[str] = Counter()
    if device == "cuda":
        # Imported late: numpy is needed for the run, not for the help.
        from rangekv.engine.devices.open import open_device

        open_device(device, 1, 4096)  # what is missing is said once, not by every case
    for case in _chosen(case_ids, owner):
        outcome, kept = _play(case, folder, seed, device)
        verdicts[outcome.verdict.name] += 1
        repeat = _repeat(outcome, seed, device)
        out.line(outcome.held, _as_json(outcome, kept, repeat), _as_text(outcome, kept, repeat))
    held, violated, absent = (verdicts[name] for name in ("HELD", "VIOLATED", "ABSENT"))
    total = Output("replay-fault", as_json=as_json)
    line = f"{held} of {held + violated} cases held, seed {seed}"
    if device != "cpu":
        line += f", device {device}"
    if absent:
        line += f"; {absent} absent: this engine has no such state"
    counts = {"seed": seed, "device": device, "held": held, "violated": violated, "absent": absent}
    total.line(not violated, counts, [line])
    return ExitCode.CHECK_FAILED if violated else ExitCode.OK


@command.command(
    "trace",
    cls=Verb,
    help="Play the case of a trace again, and say where the two runs part.",
    examples=("rangectl replay-fault trace range-fault-stale-ticket-7/trace.jsonl",),
    exits=EXITS,
)
@click.argument("place", metavar="FILE", type=click.Path(path_type=Path))
@_dir_option
@json_option
def trace(*, place: Path, folder: Path, as_json: bool) -> int:
    """A violation that is still there is a failed check."""
    from rangekv.engine.testing import trace as traces

    then = traces.read(place)
    outcome, kept = _play(_chosen((then.case_id,), None)[0], folder, then.seed)
    parted = traces.first_difference(then.calls, outcome.calls)
    human = [f"then: {then.violation or 'held'}", f"now: {outcome.violation or 'held'}"]
    human.append(parted or f"the same {len(then.calls)} operations on files")
    fields = _as_json(outcome, kept, _repeat(outcome, then.seed)) | {
        "then": then.violation,
        "parted": parted,
    }
    Output("replay-fault-trace", as_json=as_json).result(outcome.held, fields, human)
    return ExitCode.OK if outcome.held else ExitCode.CHECK_FAILED


def _play(case: Case, folder: Path, seed: int, device: str = "cpu") -> tuple[Outcome, Path | None]:
    """Play a case in a scratch directory; keep store and trace only where a rule was broken."""
    from rangekv.engine.testing import trace as traces
    from rangekv.engine.testing.case import run_case

    with scratch_directory(folder, "fault") as place:
        outcome = run_case(case, place, seed, device=device)
        if outcome.held:
            return outcome, None
        kept = _unused(folder / f"range-fault-{case.case_id}-{seed}")
        kept.mkdir(mode=0o700)
        traces.write(outcome, seed, kept / "trace.jsonl")
        for left in place.iterdir():
            left.rename(kept / left.name)
        return outcome, kept


def _unused(place: Path) -> Path:
    number = 1
    candidate = place
    while candidate.exists():
        number += 1
        candidate = place.with_name(f"{place.name}.{number}")
    return candidate


def _chosen(case_ids: Sequence[str], owner: str | None) -> list[Case]:
    """Return the cases that are named, by id or by the beginning of one; all without a name."""
    from rangekv.engine.testing.cases import CASES

    cases = [case for case in CASES if owner in (None, case.owner)]
    if not cases:
        owners = ", ".join(dict.fromkeys(case.owner for case in CASES))
        raise UsageError("unknown-owner", f"no owner {owner!r}; there are {owners}")
    chosen: list[Case] = []
    for case_id in case_ids:
        found = [c for c in cases if c.case_id == case_id or c.case_id.startswith(f"{case_id}.")]
        if not found:
            nearest = get_close_matches(case_id, [c.case_id for c in cases], n=1, cutoff=0.4)
            hint = f"did you mean {nearest[0]}?" if nearest else "see rangectl replay-fault list"
            raise UsageError("unknown-case", f"no fault case {case_id!r}; {hint}")
        chosen += found
    return chosen if case_ids else cases


def _as_json(outcome: Outcome, kept: Path | None, repeat: str) -> dict[str, Any]:
    return {
        "id": outcome.case.case_id,
        "owner": outcome.case.owner,
        "held": outcome.held,
        "verdict": outcome.verdict.value.lower(),
        "states": outcome.states,
        "evidence": outcome.evidence,
        "violation": outcome.violation,
        "milliseconds": round(outcome.milliseconds, 1),
        "kept": None if kept is None else str(kept),
        "repeat": repeat,
    }


def _as_text(outcome: Outcome, kept: Path | None, repeat: str) -> Iterator[str]:
    yield (
        f"{outcome.verdict.value:<9} {outcome.case.case_id:<46}"
        f" {outcome.milliseconds:6.0f} ms  {' → '.join(outcome.states)}"
    ).rstrip()
    for line in outcome.evidence:
        yield f"{'':<10}{line}"
    if outcome.violation is not None:
        yield f"{'':<10}{outcome.violation}"
        yield f"{'':<10}kept: {kept}"
        yield f"{'':<10}repeat: {repeat}"


def _repeat(outcome: Outcome, seed: int, device: str = "cpu") -> str:
    line = f"rangectl replay-fault run {outcome.case.case_id} --seed {seed}"
    return line if device == "cpu" else f"{line} --device {device}"
