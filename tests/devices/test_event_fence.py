"""What an event proves of a copy, with events in every state: DONE is never said without proof."""

from __future__ import annotations

import threading

import pytest
from rangekv.engine.devices.cuda.event_fence import EventFence
from rangekv.engine.devices.fence import Fence, FenceState
from rangekv.format.errors import InvariantError

DONE, FAILED = FenceState.DONE, FenceState.FAILED
PENDING, UNKNOWN = FenceState.PENDING, FenceState.UNKNOWN


class FakeEvent:
    """Answers what it is told to; each call pops one answer, the last one stays."""

    def __init__(self, *answers: object, wait: object = None, record: object = None) -> None:
        self.answers = list(answers)
        self.on_wait, self.on_record = wait, record
        self.calls: list[str] = []
        self.stream: object = None

    def record(self, stream: object) -> None:
        self.calls.append("record")
        self.stream = stream
        self._play(self.on_record)

    def query(self) -> bool:
        self.calls.append("query")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return self._play(answer)

    def synchronize(self) -> None:
        self.calls.append("synchronize")
        self._play(self.on_wait)

    @staticmethod
    def _play(answer: object) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer() if callable(answer) else answer


def states(fence: Fence, count: int) -> list[FenceState]:
    return [fence.state() for _ in range(count)]


def test_pending_then_done_and_never_asked_again():
    event = FakeEvent(False, False, True, RuntimeError("late"))
    fence = EventFence.behind(event, "stream")
    assert event.stream == "stream"
    assert states(fence, 5) == [PENDING, PENDING, DONE, DONE, DONE]
    assert event.calls == ["record", "query", "query", "query"]
    assert fence.error is None


def test_an_error_on_a_query_is_unknown_and_stays_so():
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    fence = EventFence(FakeEvent(False, error, True))
    assert states(fence, 4) == [PENDING, UNKNOWN, UNKNOWN, UNKNOWN]
    assert fence.error is error


def test_an_error_that_proves_the_end_is_failed_and_stays_so():
    gone = RuntimeError("the context is destroyed")
    fence = EventFence(FakeEvent(gone, True), proves_end=lambda error: error is gone)
    assert states(fence, 3) == [FAILED, FAILED, FAILED]
    assert fence.error is gone
    other = EventFence(FakeEvent(RuntimeError("else"), True), proves_end=lambda e: e is gone)
    assert states(other, 2) == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize("verdict", [None, 1, "yes", ValueError("cannot tell")])
def test_only_a_plain_yes_proves_the_end(verdict):
    def proves(_: Exception) -> bool:
        return FakeEvent._play(verdict)

    assert EventFence(FakeEvent(RuntimeError("x")), proves_end=proves).state() is UNKNOWN
    assert EventFence(FakeEvent(0, wait=RuntimeError("x")), proves_end=proves).wait() is UNKNOWN


@pytest.mark.parametrize("answer", [None, 1, 0, "done", []])
def test_an_answer_that_is_neither_yes_nor_no_is_unknown(answer):
    assert states(EventFence(FakeEvent(answer, True)), 2) == [UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(("proved", "outcome"), [(False, UNKNOWN), (True, FAILED)])
def test_an_event_that_cannot_be_recorded_proves_nothing_itself(proved, outcome):
    """Only who knows otherwise that the copy has ended says so; delivered it is in no case."""
    error = RuntimeError("CUDA error: out of memory")
    event = FakeEvent(True, record=error)
    fence = EventFence.behind(event, "stream", proves_end=lambda _: proved)
    assert states(fence, 2) == [outcome, outcome]
    assert fence.wait() is outcome
    assert event.calls == ["record"]  # an event never recorded would answer True
    assert fence.error is error


def test_a_copy_that_did_not_start_whole_is_failed_once_its_event_has_passed():
    failure = RuntimeError("the second launch was refused")
    fence = EventFence.behind(FakeEvent(False, True), "stream", failure=failure)
    assert states(fence, 3) == [PENDING, FAILED, FAILED]
    assert fence.error is failure
    late = RuntimeError("and then this")
    fence = EventFence.behind(FakeEvent(late), "stream", failure=failure)
    assert fence.state() is UNKNOWN
    assert fence.error is late


def test_a_wait_is_proved_by_the_query_behind_it():
    assert EventFence(FakeEvent(False, True)).wait() is DONE
    assert EventFence(FakeEvent(False, False)).wait() is PENDING
    assert EventFence(FakeEvent(False, RuntimeError("x"))).wait() is UNKNOWN
    done = FakeEvent(True)
    assert EventFence(done).wait() is DONE
    assert done.calls == ["query"]


def test_a_wait_that_raises_is_unknown_or_failed():
    event = FakeEvent(False, True, wait=RuntimeError("launch failure"))
    fence = EventFence(event)
    assert [fence.wait(), fence.state(), fence.wait()] == [UNKNOWN] * 3
    assert event.calls == ["query", "synchronize"]
    event = FakeEvent(False, True, wait=RuntimeError("gone"))
    assert EventFence(event, proves_end=lambda _: True).wait() is FAILED


def test_an_interrupted_wait_says_nothing_of_the_copy():
    fence = EventFence(FakeEvent(False, False, True, wait=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        fence.wait()
    assert states(fence, 2) == [PENDING, DONE]


def test_nobody_but_the_event_says_done_or_failed():
    fence = EventFence(FakeEvent(False, True))
    for state in (DONE, FAILED, PENDING):
        with pytest.raises(InvariantError, match="without its event"):
            fence.settle(state)
    assert fence.state() is PENDING
    fence.settle(UNKNOWN)
    assert states(fence, 2) == [UNKNOWN, UNKNOWN]
    done = EventFence(FakeEvent(True))
    assert done.state() is DONE
    done.settle(UNKNOWN)
    assert done.state() is DONE


def test_the_first_outcome_stays_when_a_wait_ends_behind_it():
    def settle_meanwhile() -> None:
        fence.settle(UNKNOWN)

    fence = EventFence(FakeEvent(False, True, wait=settle_meanwhile))
    assert fence.wait() is UNKNOWN

    def done_meanwhile() -> None:
        assert other.state() is DONE
        raise RuntimeError("too late")

    other = EventFence(FakeEvent(False, True, wait=done_meanwhile))
    assert other.wait() is DONE
    assert other.error is None


def test_threads_that_ask_at_once_get_one_outcome():
    entered, go = threading.Event(), threading.Event()

    def slow() -> bool:
        entered.set()
        assert go.wait(60)
        return True

    fence = EventFence(FakeEvent(slow, RuntimeError("asked twice")))
    seen: list[FenceState] = []
    threads = [threading.Thread(target=lambda: seen.append(fence.state())) for _ in range(4)]
    threads[0].start()
    assert entered.wait(60)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(60)
    assert seen == [DONE] * 4
