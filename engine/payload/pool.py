"""Owns the threads that do payload I/O and copies, and the order in which they take jobs.

It never touches the state of a bank, ticket or record: every outcome is posted as an event.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from rangekv.engine.events import EventQueue
from rangekv.format.errors import TransferError

log = logging.getLogger("rangekv.engine")

Done = Callable[[Any, BaseException | None], None]


class Priority(IntEnum):
    """Lower runs first: copies free banks, reads are waited for, nobody waits for writes."""

    COPY = 0
    READ = 1
    WRITE = 2


class WorkerPool:
    """A fixed set of threads over one read-first queue.

    There is one thread more than may be in I/O at once, so that copies go on while every read
    stands still. At most half of the I/O (at least one) is writes, so that a slow device cannot
    keep all of it in writes while a restore waits. With one I/O thread a read waits for at most one
    write.
    """

    def __init__(
        self, events: EventQueue, io_threads: int, affinity: frozenset[int] | None
    ) -> None:
        self._events = events
        self._affinity = affinity
        self._io_max = io_threads
        self._writes_max = max(1, io_threads // 2)
        # Guards all that follows; never held while a job runs.
        self._ready = threading.Condition(threading.Lock())
        self._queues: dict[Priority, deque[tuple[Callable[[], Any], Done]]] = {
            priority: deque() for priority in Priority
        }
        self._running: Counter[Priority] = Counter()
        self._closed = False
        self._when_stopped: Callable[[], None] | None = None
        self.threads = [
            threading.Thread(target=self._work, name=f"range-io-{index}", daemon=True)
            for index in range(io_threads + 1)
        ]
        self._alive = len(self.threads)
        for thread in self.threads:
            thread.start()

    def submit(self, priority: Priority, job: Callable[[], Any], done: Done) -> None:
        """Run `job` on a worker, then post `done(result, None)` or `done(None, error)`."""
        with self._ready:
            if not self._closed:
                self._queues[priority].append((job, done))
                self._ready.notify()
                return
        self._refuse(done)

    def close(self, deadline_s: float) -> bool:
        """Stop; return False if a thread is still in a job after `deadline_s` seconds.

        Jobs that have not begun never do: their `done` is posted with the error `engine-closed`.
        """
        with self._ready:
            self._closed = True
            dropped = [done for queue in self._queues.values() for _, done in queue]
            for queue in self._queues.values():
                queue.clear()
            self._ready.notify_all()
        for done in dropped:
            self._refuse(done)
        end = self._events.clock() + deadline_s
        for thread in self.threads:
            thread.join(max(0.0, end - self._events.clock()))
        return not any(thread.is_alive() for thread in self.threads)

    def when_stopped(self, call: Callable[[], None]) -> None:
        """Call `call` once no job runs any more, at once if that is now. After `close` only."""
        with self._ready:
            if self._alive:
                self._when_stopped = call
                return
        call()

    def _refuse(self, done: Done) -> None:
        error = TransferError("engine-closed", "the engine closed before this transfer began")
        self._events.post(done, None, error)

    def _work(self) -> None:
        self._set_affinity()
        while True:
            taken = self._take()
            if taken is None:
                break
            priority, job, done = taken
            try:
                result, error = job(), None
            except BaseException as caught:  # a worker thread never dies of a job's exception
                result, error = None, caught
            with self._ready:
                self._running[priority] -= 1
                self._ready.notify()
            self._events.post(done, result, error)
            # An idle worker keeps nothing of its last job alive.
            del taken, job, done, result, error
        self._leave()

    def _set_affinity(self) -> None:
        if self._affinity:
            # vLLM pins its main thread before the engine exists; threads inherit that one core.
            try:
                os.sched_setaffinity(0, self._affinity)
            except OSError as error:
                log.warning("worker threads keep their CPUs: %s", error.strerror)

    def _leave(self) -> None:
        with self._ready:
            self._alive -= 1
            call = None if self._alive else self._when_stopped
        if call is not None:
            call()

    def _take(self) -> tuple[Priority, Callable[[], Any], Done] | None:
        with self._ready:
            while True:
                if self._closed:
                    return None
                priority = next((p for p in Priority if self._queues[p] and self._room(p)), None)
                if priority is not None:
                    self._running[priority] += 1
                    return (priority, *self._queues[priority].popleft())
                self._ready.wait()

    def _room(self, priority: Priority) -> bool:
        """Whether one more job of this kind may run now."""
        if priority is Priority.COPY:
            return True
        writes = self._running[Priority.WRITE]
        if priority is Priority.WRITE and writes >= self._writes_max:
            return False
        return self._running[Priority.READ] + writes < self._io_max
