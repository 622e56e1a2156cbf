"""Owns the order in which events reach the state machines: a queue, a lock, a deadline thread.

It never does I/O or copies and knows nothing of what an event means.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

log = logging.getLogger("rangekv.engine")

Handler = Callable[..., None]


class Deadline:
    """A handler that fires once at a point of the monotonic clock unless it is cancelled."""

    __slots__ = ("args", "cancelled", "handler", "when")

    def __init__(self, when: float, handler: Handler, args: tuple[Any, ...]) -> None:
        self.when = when
        self.handler = handler
        self.args = args
        self.cancelled = False

    def cancel(self) -> None:
        """Make sure that the handler is not called any more; harmless afterwards.

        It may stay queued until it is due, so it lets go of what it would have acted on.
        """
        self.cancelled = True
        self.args = ()


class EventQueue:
    """Serialises all events of one engine.

    `lock` protects every state machine of the engine; public calls of the engine hold it too.
    Handlers run under it, in the thread that posted, in the order of posting. A handler that raises
    is a defect of ours: the first such error is kept in `fault`, and the engine stops serving.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.RLock()
        self.fault: BaseException | None = None
        self._waiting: dict[threading.Condition, Callable[[], bool]] = {}
        self._queue: deque[tuple[Handler, tuple[Any, ...]]] = deque()
        self._draining = False
        # Guards _deadlines and _closed only; never taken together with a call to a handler.
        self._timer = threading.Condition(threading.Lock())
        self._deadlines: list[tuple[float, int, Deadline]] = []
        self._order = itertools.count()
        self._sweep_at = 64
        self._closed = False
        self._thread: threading.Thread | None = None

    def post(self, handler: Handler, *args: Any) -> None:
        """Queue one event and run what is queued; events posted by a handler run after it."""
        with self.lock:
            self._queue.append((handler, args))
            if self._draining:
                return
            self._draining = True
            try:
                while self._queue:
                    self._run(*self._queue.popleft())
            finally:
                self._draining = False
                self._wake()

    def _wake(self) -> None:
        """Wake whoever waits for what holds now.

        The poster looks, under the lock: if it woke everybody to look for themselves, each event
        would cost a thread switch for each restore that waits for another one.
        """
        for waiter, predicate in self._waiting.items():
            if self.fault is not None or predicate():
                waiter.notify()

    def _run(self, handler: Handler, args: tuple[Any, ...]) -> None:
        try:
            handler(*args)
        except BaseException as error:  # a worker thread must outlive any defect of a handler
            if self.fault is None:
                self.fault = error
            if not isinstance(error, Exception):
                raise  # an interrupt that hit a handler is still an interrupt
            log.exception("event handler failed; the engine stops serving")

    def at(self, delay_s: float, handler: Handler, *args: Any) -> Deadline:
        """Post `handler` after `delay_s` seconds, without needing any other traffic."""
        deadline = Deadline(self.clock() + delay_s, handler, args)
        with self._timer:
            heapq.heappush(self._deadlines, (deadline.when, next(self._order), deadline))
            if len(self._deadlines) >= self._sweep_at:
                self._sweep()
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._fire_deadlines, name="range-deadline", daemon=True
                )
                self._thread.start()
            self._timer.notify()
        return deadline

    def _sweep(self) -> None:
        """Forget cancelled deadlines: nearly all are, long before they are due."""
        self._deadlines = [entry for entry in self._deadlines if not entry[2].cancelled]
        heapq.heapify(self._deadlines)
        self._sweep_at = 64 + 2 * len(self._deadlines)

    def wait_until(self, predicate: Callable[[], bool], deadline_s: float | None) -> bool:
        """Block until `predicate` holds or `deadline_s` seconds passed; return whether it holds.

        It also ends when a handler has failed: what has not happened by then may never happen.
        `predicate` is called under the lock by whoever posts: it only looks, and never raises.
        """
        with self.lock:
            self._wait(lambda: predicate() or self.fault is not None, deadline_s)
            return predicate()

    def wait_for_proof(self, predicate: Callable[[], bool]) -> None:
        """Block until `predicate` holds, whatever else fails: for memory that a copy may touch."""
        with self.lock:
            self._wait(predicate, None)

    def _wait(self, predicate: Callable[[], bool], deadline_s: float | None) -> None:
        waiter = threading.Condition(self.lock)
        self._waiting[waiter] = predicate
        try:
            waiter.wait_for(predicate, deadline_s)
        finally:
            del self._waiting[waiter]

    def close(self) -> None:
        """Stop the deadline thread; deadlines not yet due never fire."""
        with self._timer:
            self._closed = True
            self._deadlines.clear()
            self._timer.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _fire_deadlines(self) -> None:
        while True:
            with self._timer:
                if self._closed:
                    return
                due: Deadline | None = None
                if not self._deadlines:
                    self._timer.wait()
                elif self._deadlines[0][0] > self.clock():
                    self._timer.wait(self._deadlines[0][0] - self.clock())
                else:
                    due = heapq.heappop(self._deadlines)[2]
            if due is not None and not due.cancelled:
                self.post(self._if_live, due)

    def _if_live(self, deadline: Deadline) -> None:
        if not deadline.cancelled:
            deadline.handler(*deadline.args)
