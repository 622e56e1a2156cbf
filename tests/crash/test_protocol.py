"""No power cut and no kill of the real protocol: no wrong KV, no lost store, no cold close."""

from __future__ import annotations

import pytest
from rangekv.engine.testing.crash.findings import Findings
from rangekv.engine.testing.crash.guards import Guard
from rangekv.engine.testing.crash.scenarios import SCENARIOS

NAMES = [scenario.name for scenario in SCENARIOS]


@pytest.mark.parametrize("name", NAMES)
def test_every_crash_state_holds(explored, name):
    findings = explored(name)
    assert findings.violations == []
    assert findings.clean_closes > findings.recoveries > 50


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("guard", [Guard.MARKER, Guard.EPOCH])
def test_marker_and_epoch_are_each_enough_alone(explored, guard, name):
    """Without the modification time too, which may not have changed in the same tick."""
    assert explored(name, guard, Guard.MTIME).violations == []


@pytest.mark.parametrize("name", NAMES)
def test_verified_restores_deliver_every_block(explored, name):
    """Through an engine that checks payload: on what is visible no checksum is ever wrong."""
    findings = explored(name, verified=True)
    assert findings.violations == []
    assert findings.misses == 0


def test_enough_was_looked_at(explored, figure):
    total = Findings()
    for name in NAMES:
        total.add(explored(name))
    figure(
        "crash states",
        f"{total.points:,} crash points, {total.states:,} states ({total.distinct:,} distinct), "
        f"{total.clean_closes:,} clean closes: {len(total.violations)} violations",
    )
    assert total.points >= 15_000
    assert total.states >= 60_000
