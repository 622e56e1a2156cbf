"""The event queue: who is woken by an event, and by whom."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from rangekv.engine.events import EventQueue

UNRELATED = 100
PATIENCE_S = 30.0


class Waiter:
    """A thread that waits for `flag`; counts which threads have looked whether it is set."""

    def __init__(self, events: EventQueue) -> None:
        self.flag = False
        self.looks: Counter[int] = Counter()
        self.found: bool | None = None
        self.thread = threading.Thread(target=self._wait, args=(events,))
        self.thread.start()
        while not self.looks[self.thread.ident or 0]:
            time.sleep(0.001)

    def _wait(self, events: EventQueue) -> None:
        self.found = events.wait_until(self._holds, PATIENCE_S)

    def _holds(self) -> bool:
        self.looks[threading.get_ident()] += 1
        return self.flag

    def set(self) -> None:
        self.flag = True


@pytest.fixture
def events() -> EventQueue:
    return EventQueue()


def test_an_event_wakes_nobody_who_waits_for_another(events: EventQueue) -> None:
    waiters = [Waiter(events) for _ in range(4)]
    for _ in range(UNRELATED):
        events.post(lambda: None)
    for waiter in waiters:
        events.post(waiter.set)
        waiter.thread.join(PATIENCE_S)
        assert waiter.found
        # Once before it slept, and after it was woken: in the wait and as its answer.
        assert waiter.looks[waiter.thread.ident or 0] <= 3
        assert waiter.looks[threading.get_ident()] > UNRELATED


def test_a_failed_handler_ends_every_wait(events: EventQueue) -> None:
    waiters = [Waiter(events) for _ in range(3)]

    def fail() -> None:
        raise RuntimeError("a defect")

    events.post(fail)
    for waiter in waiters:
        waiter.thread.join(PATIENCE_S)
        assert waiter.found is False


def test_a_wait_ends_at_its_deadline(events: EventQueue) -> None:
    assert not events.wait_until(lambda: False, 0.01)
    events.post(lambda: None)  # nothing is left behind that would be asked


def test_what_two_wait_for_wakes_both(events: EventQueue) -> None:
    flag = threading.Event()
    threads = [
        threading.Thread(target=events.wait_for_proof, args=(flag.is_set,)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    events.post(flag.set)
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
