"""A disk in memory that processes work on: its image, its paths, and the log of what was done.

Owns what one operation does to the image, and where new numbers, times and random bytes come from:
the same ones in every run. Descriptors and locks belong to a process.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Set
from dataclasses import dataclass, field

import xxhash
from rangekv.engine.testing.crash.image import ROOT_KEY, Image
from rangekv.engine.testing.crash.operations import (
    Allocate,
    Birth,
    Enter,
    Leave,
    Log,
    Move,
    Operation,
    Write,
)

ROOT = "/crash-model"
FIRST_INODE = 3
TICK_NS = 1000


@dataclass(slots=True)
class Disk:
    """An image, seen by processes below the path `root`."""

    image: Image
    root: str = ROOT
    log: Log = field(default_factory=Log)
    draws: int = 0

    def do(self, operation: Operation) -> None:
        """Carry out one operation and write it down."""
        self.log.operations.append(operation)
        image = self.image
        if isinstance(operation, Write):
            content = image.nodes[operation.key].data.written(operation.offset, operation.data)
            image.update(operation.key, content, operation.mtime_ns)
        elif isinstance(operation, Allocate):
            content = image.nodes[operation.key].data
            image.update(operation.key, content.resized(max(content.size, operation.length)))
        elif isinstance(operation, Enter | Leave | Move):
            image.rename(operation)

    def create(self, directory: int, name: str, *, is_directory: bool, open_keys: Set[int]) -> int:
        """Make a file or directory and return its key; `open_keys` are still in use by somebody."""
        image = self.image
        key, image.key_next = image.key_next, image.key_next + 1
        named = {key for names in image.entries.values() for key in names.values()}
        used = {image.nodes[key].birth.inode for key in named | open_keys}
        # Like a real file system, hand out the number of a removed file again.
        inode = next(n for n in range(FIRST_INODE, FIRST_INODE + len(used) + 1) if n not in used)
        self.do(Enter(directory, name, key, Birth(inode, self.now(), 1, is_directory)))
        return key

    def lookup(self, path: str) -> int | None:
        """Return the key of what an absolute path leads to, or None."""
        if path == self.root:
            return ROOT_KEY
        if not path.startswith(self.root + "/"):
            return None
        return self.image.find(path[len(self.root) + 1 :].split("/"))

    def find(self, path: str) -> int:
        """Return the key of what an absolute path leads to; raises FileNotFoundError."""
        return _there(self.lookup(path), path)

    def entry(self, directory: int, name: str) -> int:
        """Return the key of a name, or of a relative path; raises FileNotFoundError."""
        return _there(self.image.find(name.split("/"), directory), name)

    def now(self) -> int:
        """Return a time later than all before."""
        self.image.clock_ns += TICK_NS
        return self.image.clock_ns

    def draw(self, count: int) -> bytes:
        """Return bytes that do not come back, not even after a power cut: no key does either."""
        self.draws += 1
        seed = b"%d %d" % (self.image.key_next, self.draws)
        return (xxhash.xxh3_128_digest(seed) * (count // 16 + 1))[:count]


def _there(key: int | None, path: str) -> int:
    if key is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    return key
