"""Kills a real process at random times and at every step, and looks at what it left.

Owns the parent's side: what the store may show after a death, told from the child's last words. The
page cache survives a process: power cuts are the crash explorer's.
"""

from __future__ import annotations

import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rangekv.engine.inspection import StoreReport, read_store
from rangekv.engine.testing.checks import reason_without_journal, require
from rangekv.engine.testing.kept import Account
from rangekv.engine.testing.oracle import Oracle, prefixes
from rangekv.engine.testing.scene import MODEL
from rangekv.engine.testing.victim import FORGOTTEN, POINTS, Orders, prompt

_STEPS = 12
_RUN_S = {"journal": 1.0, "discard": 0.15}


@dataclass(frozen=True, slots=True)
class Killed:
    """One cycle: how the process ended, what a reopen would find, and how much of it is visible."""

    how: str
    died: bool
    """False where it had closed before it was to die."""
    found: str
    tokens: int


@dataclass(frozen=True, slots=True)
class _Heard:
    """What one process said, and when it was killed on CLOCK_MONOTONIC; None if it was not."""

    lines: list[str]
    killed_ns: int | None

    @property
    def last(self) -> dict[str, list[str]]:
        """By its first word, the last line that begins with it."""
        return {line.split()[0]: line.split() for line in self.lines}


class Killer:
    """Runs and kills processes on one store, cycle after cycle.

    Without a journal what the last clean close left stays visible until the next session's marker
    is there; after that a death makes the store cold, until a close has taken the marker away. With
    one no death makes it cold: `account` tells what must be left.
    """

    def __init__(
        self, store: Path, seed: int, *, recovery: str = "journal", patience_s: float = 20.0
    ) -> None:
        self.account = Account()
        self._store = store
        self._recovery = recovery
        self._random = random.Random(seed)
        self._patience_s = patience_s
        self._oracle = Oracle(MODEL)
        self._prompts = 0
        self._kept = 0
        """Visible tokens of a reopen now."""
        self._report = read_store(str(store))

    def cycle(self) -> Killed:
        """Start a process, let it die or end, and judge the store. Raises Violation."""
        how, point, after = self._choose()
        heard = self._run(how, point, after, _STEPS)
        last = heard.lines[-1] if heard.lines else ""
        found = self._report.reason or self._report.state
        if self._recovery == "discard":
            found = reason_without_journal(self._report) or "warm"
        how += f" ({last or 'nothing said'})"
        return Killed(how, heard.killed_ns is not None, found, self._kept)

    def settle(self) -> None:
        """Let one more process answer for what the last one left, and close. Raises Violation."""
        heard = self._run("not killed", "", after=False, steps=0)
        require("closed" in heard.last, "a process that nobody kills closes")

    def _choose(self) -> tuple[str, str, bool]:
        chance = self._random.random()
        if chance < 0.5:
            return "killed at some time", "", False
        if chance < 0.6 and self._recovery == "journal":
            return "killed when it had forgotten", FORGOTTEN, False
        point = self._random.choice(list(POINTS[self._recovery]))
        after = self._random.random() < 0.5
        return f"killed {'after' if after else 'before'} {point}", point, after

    def _run(self, how: str, point: str, after: bool, steps: int) -> _Heard:
        """Run one process to its end and judge what it left; return what it said."""
        numbers = range(self._prompts, self._prompts + steps)
        self.account.add_prompts(numbers)
        for number in numbers:
            self._oracle.note_saved(prompt(number))
        orders = Orders(
            store=str(self._store),
            seed=self._random.randrange(1 << 30),
            first=self._prompts,
            steps=steps,
            recovery=self._recovery,
            asked=self.account.asks(),
            point=point,
            after=after,
        )
        heard = self._hear(orders, at_random=not point and steps > 0)
        self._prompts += steps
        self._require_opened_as_expected(heard)
        before, self._report = self._report, read_store(str(self._store))
        self._require_right_bytes()
        if self._recovery == "journal":
            self._judge_journal(heard)
        else:
            self._judge(before, heard)
        return heard

    def _hear(self, orders: Orders, *, at_random: bool) -> _Heard:
        """Run one process to its end, or kill it at some time; return what it said."""
        child = subprocess.Popen(
            [sys.executable, "-m", "rangekv.engine.testing.victim", orders.line()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        killed_ns = None
        try:
            if at_random:
                assert child.stdout is not None
                select.select([child.stdout], [], [], self._patience_s)
                time.sleep(self._random.random() * _RUN_S[self._recovery])
                killed_ns = time.monotonic_ns()
                child.kill()
            said, complained = child.communicate(timeout=self._patience_s)
        finally:
            child.kill()
            child.wait()
        require(
            child.returncode in (0, -signal.SIGKILL), f"the process failed: {complained.strip()}"
        )
        heard = _Heard(said.splitlines(), killed_ns)
        if "dying" in heard.last:
            return _Heard(heard.lines, int(heard.last["dying"][1]))
        return heard if child.returncode else _Heard(heard.lines, None)

    def _require_opened_as_expected(self, heard: _Heard) -> None:
        opened = heard.last.get("opened")
        if opened is None:
            return
        if self._recovery == "journal":
            state = "recovered" if self._report.state == "would-recover" else self._report.state
            expected = [state, str(self._report.reason), str(self._kept)]
        else:
            reason = reason_without_journal(self._report)
            expected = ["warm" if reason is None else "cold", str(reason), str(self._kept)]
        require(opened[1:] == expected, f"it opened {opened[1:]}, expected {expected}")

    def _require_right_bytes(self) -> None:
        """Require that every byte that an open would show is what was saved."""
        report = self._report
        if not self._keeps(report) or report.tables is None or report.geometry is None:
            self._kept = 0
            return
        wrong = self._oracle.check_tables(report.tables, report.geometry, self._read)
        require(wrong is None, f"every visible byte is right: {wrong}")
        self._kept = report.tables.token_count

    def _keeps(self, report: StoreReport) -> bool:
        if self._recovery == "journal":
            return report.keeps_index
        return reason_without_journal(report) is None

    def _judge_journal(self, heard: _Heard) -> None:
        """Require what a session with a journal may have left after these last words."""
        report, words = self._report, heard.last
        require(
            report.keeps_index and report.tables is not None,
            f"what was committed is kept: the store is {report.state} ({report.detail})",
        )
        assert report.tables is not None
        if "closed" in words:
            require(words["closed"][1] == "clean", "an undisturbed close is clean")
            require(report.state == "warm", f"after a clean close the store is {report.state}")
        elif "opened" in words and "closing" not in words:
            require(report.state == "would-recover", f"an open store died: it is {report.state}")
        if report.state == "warm" and "closing" in words:
            require(self._kept == int(words["closing"][1]), "all that was visible is there")
        self.account.hear(heard.lines)
        shown = (
            tokens[:end]
            for record, tokens in prefixes(report.tables)
            for end in _block_ends(record.token_start, record.token_count)
        )
        self.account.see(shown, heard.killed_ns, opened="opened" in words)

    def _judge(self, before: StoreReport, heard: _Heard) -> None:
        """Require what a session without a journal may have left after these last words."""
        report, words = self._report, heard.last
        known = report.state in ("warm", "would-recover", "cold")
        require(known, f"the store is {report.state}: {report.detail}")
        reason, expected = reason_without_journal(report), reason_without_journal(before)
        if "closed" in words:
            require(words["closed"][1] == "clean", "an undisturbed close is clean")
            require(reason is None, f"after a clean close the store is warm: {reason}")
        elif "closing" in words:
            require(reason in (None, "dirty-marker"), f"in a close: warm or dirty, {reason}")
        elif "opened" in words:
            require(reason == "dirty-marker", f"an open store died: {reason}")
        else:
            allowed = (expected, "dirty-marker")
            require(reason in allowed, f"in an open: as before or dirty, {reason}")
            kept = before.tables.token_count if before.tables is not None else 0
            require(reason is not None or self._kept == kept, "as much as before is there")
        if reason is None and "closing" in words:
            require(self._kept == int(words["closing"][1]), "all that was visible is there")

    def _read(self, offset: int, length: int) -> bytes:
        with open(self._store / "range.pack", "rb") as pack:
            pack.seek(offset)
            return pack.read(length)


def _block_ends(token_start: int, token_count: int) -> range:
    """Return where the blocks of a record end in its prompt, in bytes of its tokens."""
    size = MODEL.block_tokens
    return range((token_start + size) * 4, (token_start + token_count) * 4 + 1, size * 4)
