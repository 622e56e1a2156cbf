"""Explores one scenario of the crash explorer, in a module that spawned processes can import."""

from __future__ import annotations

from rangekv.engine.testing.crash.cuts import Breadth
from rangekv.engine.testing.crash.explorer import Explorer, Search
from rangekv.engine.testing.crash.findings import Findings
from rangekv.engine.testing.crash.guards import BlindFiles, Guard
from rangekv.engine.testing.crash.scenarios import JOURNAL_SCENARIOS, SCENARIOS

from support.effort import LONG

DEPTH = 3 if LONG else 2
SHALLOW = () if LONG else ("journal-failed",)  # what failed syncs may have lost is much
BREADTH = Breadth(payload_all=3, random_cuts=32, cuts_max=1000) if LONG else Breadth()
SCENARIO_OF = {scenario.name: scenario for scenario in (*SCENARIOS, *JOURNAL_SCENARIOS)}
WITHOUT_MARKER = tuple(
    scenario.name
    for scenario in JOURNAL_SCENARIOS
    if LONG or scenario.name in ("journal-once", "journal-discard", "journal-checkpoint")
)
"""The sessions with a journal that are also explored without the marker."""


def explore(name: str, without: frozenset[Guard], verified: bool) -> Findings:
    """Explore a scenario without some checks of a reopen, or with payload verified."""
    # An engine for each warm image takes its time: one crash less.
    search = Search(DEPTH - (verified or name in SHALLOW), BREADTH, verified)
    return Explorer(SCENARIO_OF[name], lambda disk: BlindFiles(disk, without), search).run()
