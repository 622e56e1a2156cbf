"""What a session does to files and directories, as values that can be replayed.

Owns the vocabulary of a recorded trace and nothing else. Files are named by a key that is never
used twice, unlike the numbers of inodes.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Birth:
    """What is fixed about a file or directory from its creation on."""

    inode: int
    btime_ns: int | None
    generation: int | None
    is_directory: bool


@dataclass(frozen=True, slots=True)
class Enter:
    """A new file or directory `key` gets a name."""

    directory: int
    name: str
    key: int
    birth: Birth

    def line(self) -> str:
        return f"{'mkdir' if self.birth.is_directory else 'create'} {self.name}"


@dataclass(frozen=True, slots=True)
class Leave:
    """A name is removed."""

    directory: int
    name: str

    def line(self) -> str:
        return f"unlink {self.name}"


@dataclass(frozen=True, slots=True)
class Move:
    """`key` leaves one name and takes another, replacing what was there."""

    source_directory: int
    source: str
    target_directory: int
    target: str
    key: int

    def line(self) -> str:
        return f"rename {self.source} to {self.target}"


@dataclass(frozen=True, slots=True)
class Allocate:
    """A file is extended with zeros to `length` bytes."""

    key: int
    name: str
    length: int

    def line(self) -> str:
        return f"fallocate {self.name} to {self.length} bytes"


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes are written; the file's modification time becomes `mtime_ns`."""

    key: int
    name: str
    offset: int
    data: bytes
    mtime_ns: int

    def line(self) -> str:
        return f"write {self.name} {self.offset}+{len(self.data)}"


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync of a file, or fdatasync, which leaves the modification time behind."""

    key: int
    name: str
    times: bool

    def line(self) -> str:
        return f"{'fsync' if self.times else 'fdatasync'} {self.name}"


@dataclass(frozen=True, slots=True)
class FailedSync:
    """fsync returned an error: what was unsynced may be lost, and no later sync brings it back."""

    key: int
    name: str

    def line(self) -> str:
        return f"fsync {self.name} fails"


@dataclass(frozen=True, slots=True)
class SyncDirectory:
    """fsync of a directory."""

    directory: int
    name: str

    def line(self) -> str:
        return f"fsync directory {self.name}"


NameOperation = Enter | Leave | Move
Operation = NameOperation | Allocate | Write | Sync | FailedSync | SyncDirectory


@dataclass(frozen=True, slots=True)
class Created:
    """A note: the store has been made; from here on it must never be refused."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A note: a close was clean; a reopen must be warm and show exactly these blocks."""

    blocks: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Removing:
    """A note: the store is being removed; from here on it may be missing until it is made again."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A note: a drop has returned; none of these blocks may ever be visible again."""

    blocks: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Kept:
    """A note: a journal proves at least these blocks; every crash from here on must show them.

    `without_last` are those that must be shown even where the journal's last commit has rotted.
    """

    blocks: frozenset[bytes] = frozenset()
    without_last: frozenset[bytes] = frozenset()
    either_slot: bool = field(default=False, compare=False)
    """Whether all of it must be shown even where one copy of the superblock has gone bad."""


Note = Created | Closed | Removing | Dropped | Kept


@dataclass(slots=True)
class Log:
    """What processes did, in order, and notes on what holds after so many operations."""

    operations: list[Operation] = field(default_factory=list)
    notes: list[tuple[int, Note]] = field(default_factory=list)

    @property
    def kept(self) -> Kept:
        """What is kept by now."""
        return next((note for _, note in reversed(self.notes) if isinstance(note, Kept)), Kept())

    def note(self, note: Note) -> None:
        """Note that something holds from the last operation on."""
        self.note_at(len(self.operations), note)

    def note_at(self, done: int, note: Note) -> None:
        """Note that something holds from the moment on when `done` operations had been done."""
        place = bisect_right(self.notes, done, key=lambda one: one[0])
        self.notes.insert(place, (done, note))
