"""Owns which visible records somebody wants to hear of, and which of those have left since.

It keeps record ids alone, bounded by what is watched; it never keeps a record alive or in place.
"""

from __future__ import annotations

from collections.abc import Iterable


class Watch:
    """Empty until somebody watches. Guarded by the engine's lock."""

    def __init__(self) -> None:
        self._watched: set[int] = set()
        self._gone: list[int] = []

    def note(self, record_ids: Iterable[int]) -> None:
        """Watch these visible records."""
        self._watched.update(record_ids)

    def gone(self, record_id: int) -> None:
        """A record has left the directory."""
        if record_id in self._watched:
            self._watched.remove(record_id)
            self._gone.append(record_id)

    def take_gone(self) -> list[int]:
        """Return what has left since the last call, in order."""
        gone, self._gone = self._gone, []
        return gone

    def give_up(self) -> None:
        """Count everything as gone: lookups find nothing any more."""
        self._gone += self._watched
        self._watched.clear()
