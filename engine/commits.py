"""Owns the commits of one engine: when the journal is told, and what may go on once it is durable.

One thread of its own does them. Nobody who serves or saves waits for it, except writes into space
that a replay might still name, and a reset. What is told is the ledger's, how is the store's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from rangekv.engine.events import EventQueue
from rangekv.engine.index import image
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.ledger import Cut
from rangekv.engine.store import Store
from rangekv.format.entries import Entry
from rangekv.format.errors import EnvironmentFault

log = logging.getLogger("rangekv.engine")

CHECKPOINT_BYTES = 64 << 20  # of a journal: read back in a second or two
PATIENCE_S = 10.0  # of a close with a commit under way: a slow disk is no broken one


class Committer:
    """Commits every `interval_s` seconds where there is something to tell, and at once on request.

    `on_progress` is called under the engine's lock after each commit, and when there is no journal
    any more. Close it before the store.
    """

    def __init__(
        self,
        events: EventQueue,
        catalog: Catalog,
        store: Store,
        interval_s: float,
        affinity: frozenset[int],
        on_progress: Callable[[], None],
    ) -> None:
        self._events = events
        self._catalog = catalog
        self._ledger = catalog.ledger
        self._store = store
        self._interval_s = min(interval_s, threading.TIMEOUT_MAX)
        self._affinity = affinity
        self._on_progress = on_progress
        self.checkpoint_bytes = CHECKPOINT_BYTES
        self.patience_s = PATIENCE_S
        self._wake = threading.Event()
        # Guarded by the engine's lock.
        self._wanted = 0  # last event that somebody waits to be reusable
        self._asked = 0  # commits asked for, and done
        self._done = 0
        self._last = False
        self._closing = False
        self.failed = False
        self._running = False
        self._when_ended: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        if store.journal is not None:
            self._ledger.active = self._running = True
            self._thread = threading.Thread(target=self._run, name="range-journal", daemon=True)
            self._thread.start()

    # -- called under the engine's lock ----------------------------------------------------------

    def want(self, event: int) -> None:
        """Make commits until space that event `event` retired may be written again."""
        self._wanted = max(self._wanted, event)
        self._wake.set()

    # -- called without it -----------------------------------------------------------------------

    def commit(self, deadline_s: float | None) -> bool:
        """Commit what is visible now; return whether that is durable before the deadline."""
        with self._events.lock:
            if not self._ledger.active or self._closing:
                return False
            self._asked += 1
            mine = self._asked
            self._wake.set()
        self._events.wait_until(lambda: self._done >= mine or self._over, deadline_s)
        with self._events.lock:
            return self._done >= mine

    def flush(self, deadline_s: float | None) -> None:
        """Make the last commit, if there is something to tell: nothing may be written any more."""
        with self._events.lock:
            self._last = True
            waiting = self._ledger.waiting
        if waiting:
            self.commit(deadline_s)

    def settle(self, event: int) -> None:
        """Wait until `event` and one later commit are durable, or nothing on disk names anything.

        Raises EnvironmentFault `index-not-retracted` when that cannot be had.
        """
        with self._events.lock:
            self.want(event)
        self._events.wait_until(lambda: self._ledger.reusable(event) or self._over, None)
        with self._events.lock:
            if not self._ledger.reusable(event):
                raise EnvironmentFault(
                    "index-not-retracted",
                    "the journal can be neither written nor removed: after a crash this store may "
                    "show what was forgotten; stop the engine and run rangectl format",
                    path=self._store.path,
                )

    @property
    def _over(self) -> bool:
        """Whether no commit follows any more."""
        return self._closing or self.failed or not self._ledger.active or bool(self._events.fault)

    def close(self) -> bool:
        """End after the commit that is under way; return False where that stands still."""
        with self._events.lock:
            self._closing = True
            self._wake.set()
        if self._thread is not None:
            self._thread.join(self.patience_s)
        return self._thread is None or not self._thread.is_alive()

    def when_ended(self, call: Callable[[], None]) -> None:
        """Call `call` once no commit is under way, at once if that is now. After `close` only."""
        with self._events.lock:
            if self._running:
                self._when_ended = call
                return
        call()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        with suppress(OSError):  # a new thread inherits what its maker was pinned to
            os.sched_setaffinity(0, self._affinity)
        try:
            self._commit_until_over()
        except Exception:  # a defect of ours: nobody may wait for commits that never come
            log.exception("the journal of %s is not written any more", self._store.path)
            self._events.post(self._give_up)
        finally:
            with self._events.lock:
                self._running, call = False, self._when_ended
            if call is not None:
                call()

    def _give_up(self) -> None:
        self.failed = True
        self._on_progress()

    def _commit_until_over(self) -> None:
        """Commit all there is at each interval and on request, what is over where space is wanted.

        Space comes sooner without the records that are new: their bytes need not be durable for it,
        and a record that leaves before it is listed gives its space back at once.
        """
        clock = self._events.clock
        due = clock() + self._interval_s
        while True:
            self._wake.wait(max(0.0, due - clock()))
            self._wake.clear()
            while True:
                with self._events.lock:
                    if self._over:
                        return
                    asked = self._asked > self._done
                    whole = asked or (clock() >= due and self._ledger.waiting)
                    if not whole and self._ledger.reusable(self._wanted):
                        break
                    number, cut = self._asked, self._ledger.cut(over_only=not whole)
                    said = self._said(cut)
                    generation_max = self._catalog.extents.generation_max
                self._commit(number, cut, said, generation_max)
                self._checkpoint_if_long()
                if whole:
                    due = clock() + self._interval_s
            if clock() >= due:
                due = clock() + self._interval_s

    def _said(self, cut: Cut) -> list[Entry]:  # J1
        said: list[Entry] = list(cut.over)
        if cut.published:
            said.append(image.publication(self._catalog, cut.published))
        return said

    def _commit(self, asked: int, cut: Cut, said: list[Entry], generation_max: int) -> None:
        durable, stuck = self._attempt(
            lambda: self._store.commit(said, generation_max, last=self._last)
        )
        self._events.post(self._after, asked, cut, durable, stuck)

    def _attempt(self, step: Callable[[], bool]) -> tuple[bool, bool]:
        """Return (durable, stuck): stuck where the journal can be neither written nor removed."""
        try:
            return step(), False
        except Exception:
            log.exception("the journal of %s can be neither written nor removed", self._store.path)
            return False, True

    def _checkpoint_if_long(self) -> None:
        """Begin a new journal when this one is long; only commits wait meanwhile."""
        journal = self._store.journal
        if journal is None or journal.length < self.checkpoint_bytes:
            return
        with self._events.lock:
            if self._over:
                return
            asked, cut = self._asked, self._ledger.cut()  # K1
            state = image.freeze(self._catalog)
        begun, stuck = self._attempt(lambda: self._store.checkpoint(state.tables()))
        with self._events.lock:
            if begun:
                self._ledger.settled(cut.event)
            self._events.post(self._after, asked, cut, begun, stuck)

    def _after(self, asked: int, cut: Cut, durable: bool, stuck: bool) -> None:
        if durable:
            self._ledger.committed(cut)
            self._done = asked
        elif stuck:
            # What is on disk may still name any space: none is written again.
            self.failed = True
        else:
            self._ledger.end()
        self._on_progress()
