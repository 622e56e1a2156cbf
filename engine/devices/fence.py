"""Owns the evidence that a copy on a device has ended; it never starts or stops a copy."""

from __future__ import annotations

from enum import Enum


class FenceState(Enum):
    """What is known of a copy: only DONE and FAILED prove that nothing touches its memory."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


class Fence:
    """State of one copy; the CPU device settles it before it returns."""

    __slots__ = ("_state",)

    def __init__(self, state: FenceState = FenceState.PENDING) -> None:
        self._state = state

    def state(self) -> FenceState:
        """Return what is known now; UNKNOWN never becomes anything else."""
        return self._state

    def wait(self) -> FenceState:
        """Return what is known once the copy has ended; PENDING where nothing will tell its end."""
        return self.state()

    def settle(self, state: FenceState) -> None:
        """Record the outcome."""
        self._state = state
