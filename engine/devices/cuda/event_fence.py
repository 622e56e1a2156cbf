"""Owns what an event behind a copy proves of it; it never starts, waits for or repeats a copy.

An event is anything with CUDA's three calls, such as torch.cuda.Event. This has been run with
events made for tests, never on a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, Self

from rangekv.engine.devices.fence import Fence, FenceState
from rangekv.format.errors import ensure


class Event(Protocol):
    """The part of torch.cuda.Event that a fence needs; every call may raise."""

    def record(self, stream: Any) -> None:
        """Take place on `stream` behind everything that it has been given so far."""

    def query(self) -> bool:
        """Return whether the event has taken place."""

    def synchronize(self) -> None:
        """Return when the event has taken place."""


def _proves_nothing(_: Exception) -> bool:
    return False


class EventFence(Fence):
    """State of one copy, as its event tells it; any thread may ask.

    DONE comes only from a query that answers True. An error is UNKNOWN, whatever it says: after one
    a GPU may still write. Only `proves_end(error)`, from whoever knows the error to mean that the
    copy has ended, makes it FAILED. The first outcome stays; `error` is what led to it, or None.
    """

    __slots__ = ("_ended", "_event", "_lock", "_proves_end", "error")

    def __init__(
        self,
        event: Event,
        *,
        failure: Exception | None = None,
        proves_end: Callable[[Exception], bool] = _proves_nothing,
    ) -> None:
        """`event` has been recorded: one that never was would answer True. See `behind`."""
        super().__init__()
        self.error = failure
        self._event = event
        self._ended = FenceState.DONE if failure is None else FenceState.FAILED
        self._proves_end = proves_end
        self._lock = threading.Lock()  # held over a query, which does not block

    @classmethod
    def behind(
        cls,
        event: Event,
        stream: Any,
        *,
        failure: Exception | None = None,
        proves_end: Callable[[Exception], bool] = _proves_nothing,
    ) -> Self:
        """Record `event` on `stream` and return the fence of the copy started just before.

        `failure` is what starting the copy raised: a part of it may run, so its memory is free when
        the event says so, but then the copy is FAILED. A copy whose event cannot be recorded is
        UNKNOWN, unless `proves_end` knows better: nothing else will tell when it ends.
        """
        fence = cls(event, failure=failure, proves_end=proves_end)
        try:
            event.record(stream)
        except Exception as error:
            fence._settle_first(fence._after(error), error)
        return fence

    def state(self) -> FenceState:
        """Ask the event, unless the outcome is known; never blocks."""
        with self._lock:
            if self._state is not FenceState.PENDING:
                return self._state
            try:
                answer: object = self._event.query()
            except Exception as error:
                self._settle_first(self._after(error), error)
            else:
                if answer is True:
                    self._settle_first(self._ended)
                elif answer is not False:
                    self._settle_first(FenceState.UNKNOWN)
            return self._state

    def wait(self) -> FenceState:
        """Block until the event has taken place or raised; no deadline can end it."""
        if self.state() is FenceState.PENDING:
            try:
                self._event.synchronize()
            except Exception as error:
                with self._lock:
                    self._settle_first(self._after(error), error)
        # That a wait returned is no proof yet: the query behind it is.
        return self.state()

    def settle(self, state: FenceState) -> None:
        """Give up on a pending copy: UNKNOWN is all that anybody but the event can say."""
        ensure(state is FenceState.UNKNOWN, f"a fence was told {state.value} without its event")
        with self._lock:
            self._settle_first(state)

    def _after(self, error: Exception) -> FenceState:
        try:
            ended = self._proves_end(error)
        except Exception:
            return FenceState.UNKNOWN
        return FenceState.FAILED if ended is True else FenceState.UNKNOWN

    def _settle_first(self, state: FenceState, error: Exception | None = None) -> None:
        if self._state is FenceState.PENDING:
            self._state = state
            self.error = error or self.error
