"""The whole fault matrix: every cell in a store of its own, with several seeds where it is long."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from rangekv.engine.testing import cases
from rangekv.engine.testing.cases import CASES, CELLS, NAMED, Verdict, run_case
from rangekv.engine.testing.mutants import MUTANTS
from support.effort import effort

SEEDS = range(effort(1, 20))
NAMED_SEEDS = range(effort(3, 40))


# Cells kill the thread that makes commits; which threads must live they look at themselves.
@pytest.mark.filterwarnings(
    "ignore:Exception in thread range-journal:pytest.PytestUnhandledThreadExceptionWarning"
)
@pytest.mark.parametrize("case", CELLS, ids=[case.case_id for case in CELLS])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_cell_holds(tmp_path, case, seed):
    outcome = run_case(case, tmp_path, seed)
    assert outcome.held, outcome.violation
    assert outcome.evidence
    assert outcome.states or outcome.verdict is Verdict.ABSENT


@pytest.mark.parametrize("case", NAMED, ids=[case.case_id for case in NAMED])
@pytest.mark.parametrize("seed", NAMED_SEEDS)
def test_every_kind_of_fault_is_held(tmp_path, case, seed):
    outcome = run_case(case, tmp_path, seed)
    assert outcome.held, f"rangectl replay-fault run {case.case_id} --seed {seed}"
    assert outcome.states


def test_the_table_is_well_formed(figure):
    owners = Counter(case.owner for case in CELLS)
    assert set(owners) == {
        *("ticket", "read-bank", "placement", "save-bank", "extent"),
        *("marker", "snapshot", "journal", "store"),
    }
    ids = [case.case_id for case in CASES]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"[a-z0-9]+([-.][a-z0-9]+)*", case_id) for case_id in ids)
    assert all(case.case_id.startswith(f"{case.owner}.") for case in CELLS)
    assert all(case.rule.endswith(".") and "\n" not in case.rule for case in CASES)
    present = sum(case.absent is None for case in CELLS)
    assert present >= 420
    figure(
        "fault cells", f"{present} held, {len(CELLS) - present} absent (rangectl replay-fault run)"
    )


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_an_engine_without_one_of_its_rules_is_caught(tmp_path, mutant):
    known = {case.case_id: case for case in cases.CASES}
    with mutant.put_in():
        for number, case_id in enumerate(mutant.cases):
            place = tmp_path / str(number)
            place.mkdir()
            outcome = run_case(known[case_id], place, 0, patience_s=1.0)
            if outcome.verdict is Verdict.VIOLATED:
                return
    pytest.fail("no case sees that a rule is gone")


def test_mutants_are_counted(figure):
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    figure("engine mutants", f"{len(MUTANTS)} caught (rangectl replay-fault --self-test)")
