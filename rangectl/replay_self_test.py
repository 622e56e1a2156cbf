"""`rangectl replay-fault --self-test`: engines that lack a rule, which the cases must catch.

Owns the printing; the mutants live in `rangekv.engine.testing.mutants`.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from rangekv.format.errors import ExitCode

from rangectl.output import Output
from rangectl.scratch import scratch_directory

_PATIENCE_S = 1.0


def run_self_test(folder: Path, seed: int, *, as_json: bool) -> int:
    """Run every mutant against its cases; one that none catches is a failed check."""
    from rangekv.engine.testing.cases import CASES, run_case
    from rangekv.engine.testing.mutants import MUTANTS

    # A mutant's complaints, and the deaths of its threads, are what the cases are there for.
    logging.getLogger("rangekv").setLevel(logging.CRITICAL + 1)
    threading.excepthook = lambda _: None
    known = {case.case_id: case for case in CASES}
    out = Output("replay-fault-mutant", as_json=as_json)
    missed = 0
    for mutant in MUTANTS:
        caught_by = None
        violation = None
        with mutant.put_in():
            for case_id in mutant.cases:
                with scratch_directory(folder, "fault") as place:
                    outcome = run_case(known[case_id], place, seed, patience_s=_PATIENCE_S)
                if not outcome.held:
                    caught_by, violation = case_id, outcome.violation
                    break
        missed += caught_by is None
        verdict = "MISSED" if caught_by is None else "caught"
        fields = {"mutant": mutant.name, "caught_by": caught_by, "violation": violation}
        human = [f"{verdict:<8}{mutant.name:<44} {caught_by or 'by nothing'}"]
        if violation is not None:
            human.append(f"{'':<8}{violation}")
        out.line(caught_by is not None, fields, human)
    line = f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants caught, seed {seed}"
    counts = {"seed": seed, "mutants": len(MUTANTS), "missed": missed}
    Output("replay-fault-self-test", as_json=as_json).line(not missed, counts, [line])
    return ExitCode.CHECK_FAILED if missed else ExitCode.OK
