"""No power cut and no kill of a session with a journal loses a commit or shows a wrong byte."""

from __future__ import annotations

import pytest
from rangekv.engine.testing.crash.explorer import Explorer, Search
from rangekv.engine.testing.crash.findings import Findings
from rangekv.engine.testing.crash.guards import Guard
from rangekv.engine.testing.crash.scenarios import JOURNAL_SCENARIOS
from support.effort import LONG
from support.explorations import SCENARIO_OF, SHALLOW, WITHOUT_MARKER

NAMES = [scenario.name for scenario in JOURNAL_SCENARIOS]
THREE_CRASHES = NAMES if LONG else ["journal-once"]


@pytest.mark.parametrize("name", NAMES)
def test_what_was_committed_is_served_after_every_crash(explored, name):
    findings = explored(name)
    assert findings.violations == []
    assert findings.recoveries > 50 or name in SHALLOW
    assert findings.rotten > 50
    # A slot that has gone bad costs the index only around an open or a close.
    assert findings.rotten > findings.rotten_warm > findings.rotten // 2


@pytest.mark.parametrize("name", THREE_CRASHES)
def test_crashes_of_one_recovery_after_another(name):
    search = Search(crashes=3, opens=True, rot_recoveries=True)
    findings = Explorer(SCENARIO_OF[name], search=search).run()
    assert findings.violations == []
    assert findings.recoveries > 500


@pytest.mark.parametrize("name", WITHOUT_MARKER)
def test_the_marker_is_not_needed_for_it(explored, name):
    assert explored(name, Guard.MARKER).violations == []


def test_enough_was_looked_at(explored, figure):
    total = Findings()
    for name in NAMES:
        total.add(explored(name))
    figure(
        "crash states of journals",
        f"{total.points:,} crash points, {total.states:,} states ({total.distinct:,} distinct) and "
        f"{total.rotten:,} with damage: {len(total.violations)} violations",
    )
    assert total.states >= 60_000
    assert sum(explored(name, Guard.MARKER).states for name in WITHOUT_MARKER) >= 60_000
