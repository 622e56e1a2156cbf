"""A disk as a power cut would find it: what is durable, and what was done since and is not synced.

Owns the rules of durability that SPEC.md assumes of a medium; never chooses what a cut keeps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from rangekv.engine.folder import PACK
from rangekv.engine.testing.crash.image import EMPTY, Image
from rangekv.engine.testing.crash.operations import (
    Allocate,
    Enter,
    FailedSync,
    Move,
    NameOperation,
    Operation,
    Sync,
    SyncDirectory,
    Write,
)


@dataclass(frozen=True, slots=True)
class PendingData:
    """A write or an allocation that no sync has made durable.

    `lost` after a failed sync: no later sync of the file covers it. `dropped` are its pages that a
    later durable write has replaced.
    """

    operation: Write | Allocate
    lost: bool = False
    dropped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class PendingNames:
    """A change of names, and the directories of it that no fsync has made durable.

    It happens as a whole or not at all, and is durable once all its directories are.
    """

    operation: NameOperation
    directories: frozenset[int]


@dataclass(slots=True)
class Medium:
    """The durable image and all that is pending on top of it, in the order it was done."""

    durable: Image
    data: list[PendingData]
    names: list[PendingNames]
    times: dict[int, int]
    """Modification times of the pack file that no fsync has made durable, by key."""

    @classmethod
    def of(cls, image: Image) -> Medium:
        return cls(image.copy(), [], [], {})

    def copy(self) -> Medium:
        return Medium(self.durable.copy(), list(self.data), list(self.names), dict(self.times))

    def live(self) -> Image:
        """Return what running processes see: everything, synced or not."""
        image = self.durable.copy()
        for names in self.names:
            image.rename(names.operation)
        for pending in self.data:
            apply_data(image, pending)
        for key, mtime_ns in self.times.items():
            image.nodes[key] = replace(image.nodes[key], mtime_ns=mtime_ns)
        return image

    def apply(self, operation: Operation) -> None:
        """Do one operation of a trace."""
        durable = self.durable
        if isinstance(operation, Write):
            self.data.append(PendingData(operation))
            self.times[operation.key] = operation.mtime_ns
            durable.clock_ns = max(durable.clock_ns, operation.mtime_ns)
        elif isinstance(operation, Allocate):
            self.data.append(PendingData(operation))
        elif isinstance(operation, Sync):
            self._sync(operation)
        elif isinstance(operation, FailedSync):
            self.data = [
                replace(one, lost=True) if one.operation.key == operation.key else one
                for one in self.data
            ]
        elif isinstance(operation, SyncDirectory):
            self._sync_names(operation.directory)
        else:
            directories = (
                {operation.directory}
                if not isinstance(operation, Move)
                else {
                    operation.source_directory,
                    operation.target_directory,
                }
            )
            if isinstance(operation, Enter):
                durable.add(operation.key, operation.birth)
                durable.key_next = max(durable.key_next, operation.key + 1)
            self.names.append(PendingNames(operation, frozenset(directories)))

    def _sync(self, operation: Sync) -> None:
        key = operation.key
        done = [one for one in self.data if one.operation.key == key and not one.lost]
        for one in done:
            apply_data(self.durable, one)
        written = frozenset(page for one in done for page in _pages(one.operation))
        self.data = [
            replace(one, dropped=one.dropped | written) if one.operation.key == key else one
            for one in self.data
            if one.operation.key != key or one.lost
        ]
        if operation.times and key in self.times:
            node = self.durable.nodes[key]
            self.durable.nodes[key] = replace(node, mtime_ns=self.times.pop(key))

    def _sync_names(self, directory: int) -> None:
        waiting = []
        for one in self.names:
            rest = one.directories - {directory}
            if rest:
                waiting.append(replace(one, directories=rest))
            else:
                self.durable.rename(one.operation)
        self.names = waiting

    def unsynced(self) -> tuple[int, int, bool]:
        """Return how many changes of names and times are not durable, and whether data is not."""
        return len(self.names), len(self.times), bool(self.data)

    def timed(self) -> Iterable[int]:
        """Return the files whose pending modification time somebody looks at: the pack file's."""
        packs = {
            key
            for names in (self.live().entries if self.names else self.durable.entries).values()
            for name, key in names.items()
            if name == PACK
        }
        return [key for key in self.times if key in packs]


def apply_data(image: Image, pending: PendingData) -> None:
    """Do a pending write or allocation as a whole; the time stays."""
    operation = pending.operation
    content = image.nodes[operation.key].data
    if isinstance(operation, Allocate):
        image.update(operation.key, content.resized(max(content.size, operation.length)))
        return
    if pending.dropped:
        pages = content.pages_of(operation.offset, operation.data)
        kept = {index: page for index, page in pages.items() if index not in pending.dropped}
        image.update(operation.key, content.with_pages(kept))
        return
    image.update(operation.key, content.written(operation.offset, operation.data))


def _pages(operation: Write | Allocate) -> Iterable[int]:
    if isinstance(operation, Allocate):
        return ()
    return EMPTY.pages_of(operation.offset, operation.data)
