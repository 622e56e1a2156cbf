"""The content of a disk at one moment: directories, files, their bytes, times and identities.

Owns the values and their digests; what of them survives a power cut is the medium's matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import xxhash
from rangekv.engine.folder import PACK, TEMP_PREFIX, TEMP_SUFFIX
from rangekv.engine.testing.crash.operations import (
    PAGE_BYTES,
    Birth,
    Enter,
    Leave,
    NameOperation,
)
from rangekv.format.geometry import DATA_OFFSET

ROOT_KEY = 0
HEAD_PAGES = DATA_OFFSET // PAGE_BYTES
_SUM_MASK = 2**64 - 1


class Page(NamedTuple):
    """4096 bytes and a hash of them and their place; the hash of zeros is 0."""

    data: bytes
    hash: int


ZERO_PAGE = Page(bytes(PAGE_BYTES), 0)
Pages = Mapping[int, Page]


@dataclass(frozen=True, slots=True)
class Content:
    """The bytes of one file, in pages; a page that is not there is zero. Never changed in place.

    `head_sum` and `body_sum` are sums of page hashes, below DATA_OFFSET and from there on: contents
    of one size are equal when both sums are.
    """

    pages: Pages = field(default_factory=dict)
    size: int = 0
    head_sum: int = 0
    body_sum: int = 0

    def read(self, offset: int, length: int) -> bytes:
        """Return up to `length` bytes, fewer at the end of the file."""
        end = min(offset + length, self.size)
        pieces = []
        while offset < end:
            index, within = divmod(offset, PAGE_BYTES)
            piece = self.pages.get(index, ZERO_PAGE).data[within : within + end - offset]
            pieces.append(piece)
            offset += len(piece)
        return b"".join(pieces)

    def written(self, offset: int, data: bytes) -> Content:
        """Return the content with `data` at `offset`; a gap before it reads as zeros."""
        if not data:
            return self
        return self.with_pages(self.pages_of(offset, data), offset + len(data))

    def pages_of(self, offset: int, data: bytes) -> dict[int, Page]:
        """Return the whole pages that writing `data` at `offset` would change."""
        first, within = divmod(offset, PAGE_BYTES)
        last, end = divmod(offset + len(data), PAGE_BYTES)
        if within:
            data = self.pages.get(first, ZERO_PAGE).data[:within] + data
        if end:
            data += self.pages.get(last, ZERO_PAGE).data[end:]
        return {
            first + at // PAGE_BYTES: _page(first + at // PAGE_BYTES, data[at : at + PAGE_BYTES])
            for at in range(0, len(data), PAGE_BYTES)
        }

    def with_pages(self, fresh: Pages, end: int = 0) -> Content:
        """Return the content with these whole pages; it ends at `end` or later."""
        pages = dict(self.pages)
        head, body = self.head_sum, self.body_sum
        for index, page in fresh.items():
            change = page.hash - pages.get(index, ZERO_PAGE).hash
            if index < HEAD_PAGES:
                head += change
            else:
                body += change
            pages[index] = page
        return Content(pages, max(self.size, end), head & _SUM_MASK, body & _SUM_MASK)

    def resized(self, size: int) -> Content:
        """Return the content with another length."""
        return self if size == self.size else replace(self, size=size)


EMPTY = Content()


def _page(index: int, data: bytes) -> Page:
    return (
        ZERO_PAGE if data == ZERO_PAGE.data else Page(data, xxhash.xxh3_64_intdigest(data, index))
    )


@dataclass(frozen=True, slots=True)
class Node:
    """One file or directory; `content` is None for a directory."""

    birth: Birth
    content: Content | None
    mtime_ns: int = 0

    @property
    def data(self) -> Content:
        """The bytes of a file; raises IsADirectoryError."""
        if self.content is None:
            raise IsADirectoryError
        return self.content


ROOT_BIRTH = Birth(inode=2, btime_ns=1, generation=1, is_directory=True)


@dataclass(slots=True)
class Image:
    """Everything on one disk. `clock_ns` and `key_next` make what comes next unique."""

    nodes: dict[int, Node]
    entries: dict[int, dict[str, int]]
    """Names by directory key."""
    clock_ns: int = 1_000_000_000
    key_next: int = ROOT_KEY + 1

    @classmethod
    def empty(cls) -> Image:
        return cls({ROOT_KEY: Node(ROOT_BIRTH, None)}, {ROOT_KEY: {}})

    def copy(self) -> Image:
        entries = {key: dict(names) for key, names in self.entries.items()}
        return Image(dict(self.nodes), entries, self.clock_ns, self.key_next)

    def find(self, path: Sequence[str], start: int = ROOT_KEY) -> int | None:
        """Return the key of what `path` names below directory `start`, or None."""
        key: int | None = start
        for name in path:
            key = None if key is None else self.entries.get(key, {}).get(name)
        return key

    def rename(self, operation: NameOperation) -> None:
        """Apply one change of names."""
        if isinstance(operation, Enter):
            self.add(operation.key, operation.birth)
            self.entries[operation.directory][operation.name] = operation.key
        elif isinstance(operation, Leave):
            self.entries[operation.directory].pop(operation.name, None)
        else:
            self.entries[operation.source_directory].pop(operation.source, None)
            self.entries[operation.target_directory][operation.target] = operation.key

    def add(self, key: int, birth: Birth) -> None:
        """Make a file or directory that has no name yet; nothing if it is known."""
        if key not in self.nodes:
            self.nodes[key] = Node(birth, None if birth.is_directory else EMPTY)
            if birth.is_directory:
                self.entries[key] = {}

    def update(self, key: int, content: Content, mtime_ns: int | None = None) -> None:
        """Give a file other bytes, and another modification time unless it is None."""
        node = self.nodes[key]
        self.nodes[key] = Node(node.birth, content, node.mtime_ns if mtime_ns is None else mtime_ns)

    def prune(self) -> None:
        """Forget what no name leads to."""
        reachable, waiting = set[int](), [ROOT_KEY]
        while waiting:
            key = waiting.pop()
            reachable.add(key)
            waiting.extend(self.entries.get(key, {}).values())
        self.nodes = {key: node for key, node in self.nodes.items() if key in reachable}
        self.entries = {key: names for key, names in self.entries.items() if key in reachable}

    def digest(self, *, payload: bool = True) -> int:
        """Return a hash of all that a reader could tell apart; without `payload` of the metadata.

        Temps are counted, but neither their names nor their bytes matter to anybody.
        """
        return hash(self._digest(ROOT_KEY, payload))

    def _digest(self, directory: int, payload: bool) -> tuple[object, ...]:
        found: list[object] = []
        for name, key in sorted(self.entries[directory].items()):
            node = self.nodes[key]
            if node.content is None:
                found.append((name, self._digest(key, payload)))
            elif name.startswith(TEMP_PREFIX) and name.endswith(TEMP_SUFFIX):
                found.append(TEMP_SUFFIX)
            else:
                content = node.content
                found.append((name, content.size, content.head_sum, payload and content.body_sum))
                if name == PACK:
                    found.append((node.birth, node.mtime_ns))
        return tuple(found)
