"""Every unsafe change of the protocol is found out, on the engine's own traces."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from functools import partial

import pytest
from rangekv.engine.folder import SNAPSHOT
from rangekv.engine.testing.crash.explorer import Explorer, Search
from rangekv.engine.testing.crash.findings import CAME_BACK, COLD_CLOSE, WRONG_KV
from rangekv.engine.testing.crash.guards import Guard
from rangekv.engine.testing.crash.journal_mutants import JOURNAL_MUTANTS
from rangekv.engine.testing.crash.mutants import MUTANTS, Mutant, MutantFiles
from rangekv.engine.testing.crash.operations import Leave, Move
from rangekv.engine.testing.crash.scenarios import SCENARIOS
from support.effort import LONG, effort

SCENARIO_OF = {scenario.name: scenario for scenario in SCENARIOS}
# What serves wrong KV when payload is not verified; the slow ones are left to the long tier.
WRONG = [mutant for mutant in MUTANTS if mutant.breaks == WRONG_KV]
QUICK = {
    "no-c4-directory-sync-without-epoch-without-mtime",
    "c5-before-c4-without-epoch-without-mtime",
}


def by_name(mutant: Mutant) -> str:
    return mutant.name


@pytest.fixture(scope="module")
def found_out() -> set[str]:
    """Names of the unsafe protocols that were found out so far."""
    return set()


@pytest.mark.parametrize("mutant", MUTANTS, ids=by_name)
def test_a_mutant_is_found_out_or_as_safe_as_it_should_be(mutant, found_out, figure):
    findings = mutant.explore(Search())
    assert mutant.as_expected(findings), findings.violations[:3]
    if mutant.unsafe:
        found_out.add(mutant.name)
        unsafe = sum(one.unsafe for one in MUTANTS)
        figure("unsafe protocol mutants", f"{len(found_out)} of {unsafe} found out")
        last = findings.violations[-1]
        assert last.kind == mutant.breaks
        assert last.trace


@pytest.mark.parametrize("mutant", JOURNAL_MUTANTS, ids=by_name)
def test_a_mutant_of_the_journal_is_found_out_or_redundant(mutant, found_out, figure):
    if not mutant.unsafe:
        mutant = replace(mutant, crashes=effort(mutant.crashes, 2))
    findings = mutant.explore(Search(rot_recoveries=LONG))
    assert mutant.as_expected(findings), findings.violations[:3]
    if mutant.unsafe:
        found_out.add(mutant.name)
        unsafe = {one.name for one in JOURNAL_MUTANTS if one.unsafe}
        found = len(found_out & unsafe)
        figure("unsafe journal mutants", f"{found} of {len(unsafe)} found out")
        assert findings.violations[-1].kind == mutant.breaks


@pytest.mark.parametrize(
    "scenario", [s for s in SCENARIOS if "bind" in s.name], ids=lambda one: one.name
)
@pytest.mark.parametrize("name", ["no-sync-before-slot", "one-slot"])
def test_a_bind_needs_both_slots_and_their_order(scenario, name):
    mutant = next(one for one in MUTANTS if one.name == name)
    findings = mutant.explore(Search(), scenario)
    assert mutant.as_expected(findings)
    kill = re.fullmatch(r"[a-z-]+@(\d+)\..*", findings.violations[-1].place)
    assert int(kill[1]) < 30, "found in the bind, before any session"


class DropsAreNotSynced(MutantFiles):
    """Neither that names are gone nor that another snapshot has taken the place of one."""

    def fsync_dir(self, dir_fd: int) -> None:
        kind, name = self.last_named(dir_fd)
        if kind is not Leave and (kind, name) != (Move, SNAPSHOT):
            super().fsync_dir(dir_fd)


@pytest.mark.parametrize(
    ("name", "blind"), [("drop", {Guard.EPOCH, Guard.MTIME}), ("drop-namespace", set())]
)
def test_what_was_dropped_and_comes_back_is_found_out(name, blind):
    search = Search(crashes=1, stop_at=CAME_BACK)
    process = partial(DropsAreNotSynced, blind=frozenset(blind))
    assert CAME_BACK in Explorer(SCENARIO_OF[name], process, search).run().kinds


@pytest.mark.parametrize("mutant", WRONG, ids=by_name)
def test_with_verified_payload_wrong_bytes_become_misses(mutant):
    deep = mutant.name in QUICK or "RANGE_LONG" in os.environ
    findings = mutant.explore(Search(crashes=2 if deep else 1, verified=True))
    assert findings.kinds <= {COLD_CLOSE}
    if deep or mutant.name in ("no-c2", "c2-retried"):
        assert findings.misses > 0


def test_every_guard_and_every_step_of_the_table_is_there():
    assert {mutant.breaks for mutant in MUTANTS} == {"wrong-kv", "refused", "cold-close", None}
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
    assert {type_.__name__ for type_ in {mutant.files for mutant in MUTANTS}} >= {
        "NoC2",
        "C2Retried",
        "NoO5Sync",
        "NoO6Sync",
        "NoC4TempSync",
        "NoC4DirectorySync",
        "C5BeforeC4",
        "NoC5Sync",
        "OneSlot",
        "NoF6",
        "FixedTempNames",
        "NoSyncBeforeSlot",
    }
