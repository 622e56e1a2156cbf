"""A million mutated files: nothing but FormatError, little time, little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

from support.effort import effort
from support.fuzz import HEADROOM_BYTES, SHARES, Mutator, Superblocks

PROCESSES = 2
INPUTS = effort(1_000_000, 20_000_000)
SEED = int(os.environ.get("RANGE_SEED", "1"))
TESTS = Path(__file__).parent.parent
CODES = {
    "bad-superblock",
    "bad-snapshot",
    "bad-marker",
    "bad-journal",
    "journal-mismatch",
    "dirty-marker",
    "bad-namespace",
    "snapshot-limits",
    "unknown-section",
    "unsupported-version",
}


def test_no_input_does_more_than_be_refused(figure):
    commands = [
        [sys.executable, "-m", "support.fuzz", str(SEED + process), str(INPUTS // PROCESSES)]
        for process in range(PROCESSES)
    ]
    running = [
        subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    answers = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * PROCESSES
    found = [json.loads(answer) for answer in answers]
    assert [failure for one in found for failure in one["failures"]] == []
    inputs, accepted = Counter(), Counter()
    for one in found:
        inputs.update(one["inputs"])
        accepted.update(one["accepted"])
        assert one["slowest_s"] < 0.05
        assert one["grown_bytes"] < HEADROOM_BYTES
    assert inputs.total() == INPUTS
    assert {code for one in found for code in one["codes"]} == CODES
    assert set(accepted) == set(SHARES), "every parser also saw inputs that are good"
    sealed = sum(one["sealed"] for one in found)
    assert sealed * 2 == INPUTS
    figure(
        "parser inputs",
        f"{INPUTS:,}, {sealed:,} of them sealed anew, {accepted.total():,} accepted, "
        f"{sum(one['compared'] for one in found):,} shown to the second reader, 0 errors but "
        f"FormatError; slowest {max(one['slowest_s'] for one in found) * 1000:.1f} ms, "
        f"{sum(one['cpu_s'] for one in found):.0f} s of CPU",
    )


def test_a_seed_repeats_itself():
    first, second = (Superblocks(Mutator(7)) for _ in range(2))
    assert [first.make(number % 2 == 0) for number in range(100)] == [
        second.make(number % 2 == 0) for number in range(100)
    ]
