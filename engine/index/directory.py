"""Owns the token trees of a store: which record holds which exact tokens, one tree per root.

It never knows space, leases or I/O. Tokens are compared exactly, as bytes; nothing is hashed away.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
from rangekv.engine.index.extents import Extent
from rangekv.format.checksum import Octets
from rangekv.format.errors import ensure

TOKEN_BYTES = 4
_COMPARE_BYTES = 64 * 1024


class RecordState(Enum):
    """Life of a record: reserved by a save, visible to lookups, retired."""

    RESERVED = "reserved"
    VISIBLE = "visible"
    RETIRED = "retired"


class Record:
    """A range of tokens under one parent: its own tokens only, and their place in one extent.

    `tokens` is uint32 little-endian bytes, perhaps a view of a larger buffer. `hashes` is
    uint64[layer_count, page_count] or None, and `verified` marks the pages that a first-touch
    restore has checked. `listed` once the journal or a snapshot may name it. `parent` is None
    directly under a root; `parent_tokens` is where it leaves its parent.
    """

    __slots__ = (
        "access_rank",
        "children",
        "extent",
        "extent_token_start",
        "hashes",
        "leases",
        "listed",
        "parent",
        "parent_tokens",
        "record_id",
        "root",
        "state",
        "token_start",
        "tokens",
        "verified",
    )

    def __init__(
        self,
        *,
        record_id: int,
        root: int,
        parent: Record | None,
        parent_tokens: int,
        token_start: int,
        tokens: Octets,
        extent: Extent,
        extent_token_start: int,
    ) -> None:
        self.record_id = record_id
        self.root = root
        self.parent = parent
        self.parent_tokens = parent_tokens
        self.token_start = token_start
        self.tokens = tokens
        self.extent = extent
        self.extent_token_start = extent_token_start
        self.hashes: npt.NDArray[np.uint64] | None = None
        self.verified: npt.NDArray[np.bool_] | None = None
        self.state = RecordState.RESERVED
        self.access_rank = 0
        self.leases = 0
        self.listed = False
        self.children: dict[tuple[int, bytes], Record] = {}

    @property
    def token_count(self) -> int:
        """Number of tokens of this record alone."""
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Match:
    """The first `token_count` tokens of `record` are on the path (whole blocks)."""

    record: Record
    token_count: int


class Directory:
    """Compressed prefix trees over records. Guarded by the engine's lock.

    A child hangs at (tokens of the parent before it, its first block). Records hold whole blocks,
    and a child's first block differs from the block its parent has there, so a walk that matches
    the parent to block n can only go on at exactly n: cost follows token bytes and records touched.
    """

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._roots: dict[int, dict[tuple[int, bytes], Record]] = {}

    def walk(
        self, root: int, tokens: memoryview, token_limit: int, *, reserved: bool = False
    ) -> list[Match]:
        """Return the chain of records that holds the longest prefix of `tokens`, whole blocks only.

        `tokens` is a flat byte view of uint32 ids; at most `token_limit` of them are used. With
        `reserved`, records that a save has reserved count too (a save continues behind them).
        """
        block_bytes = self.block_tokens * TOKEN_BYTES
        limit = min(len(tokens), token_limit * TOKEN_BYTES)
        path: list[Match] = []
        children, at, position = self._roots.get(root, {}), 0, 0
        while position + block_bytes <= limit:
            child = children.get((at, bytes(tokens[position : position + block_bytes])))
            if child is None or (child.state is RecordState.RESERVED and not reserved):
                break
            common = common_prefix(child.tokens, tokens[position:limit])
            at = common // block_bytes * self.block_tokens
            path.append(Match(child, at))
            position += at * TOKEN_BYTES
            children = child.children
        return path

    def insert(self, record: Record) -> None:
        """Hang a record into its tree; the place must be free."""
        children = self._children(record)
        key = self._key(record)
        ensure(key not in children, "two records claim the same place in the token tree")
        children[key] = record

    def remove(self, record: Record) -> None:
        """Take a record without children out of its tree."""
        ensure(not record.children, "a record was removed before its children")
        removed = self._children(record).pop(self._key(record), None)
        ensure(removed is record, "the token tree lost a record")
        if record.parent is None and not self._roots[record.root]:
            del self._roots[record.root]

    def visible(self) -> Iterator[Record]:
        """Yield all visible records, every parent before its children."""
        for root in sorted(self._roots):
            stack = list(self._roots[root].values())
            while stack:
                record = stack.pop()
                if record.state is RecordState.VISIBLE:
                    yield record
                    stack.extend(record.children.values())

    def subtree(self, record: Record) -> list[Record]:
        """Return a record and all below it, every parent before its children."""
        found, index = [record], 0
        while index < len(found):
            found.extend(found[index].children.values())
            index += 1
        return found

    def roots(self) -> Set[int]:
        """Return the roots that have records, reserved ones included; a view."""
        return self._roots.keys()

    def top(self) -> list[Record]:
        """Return the records directly under the roots."""
        return [record for children in self._roots.values() for record in children.values()]

    def _children(self, record: Record) -> dict[tuple[int, bytes], Record]:
        if record.parent is not None:
            return record.parent.children
        return self._roots.setdefault(record.root, {})

    def _key(self, record: Record) -> tuple[int, bytes]:
        first = bytes(record.tokens[: self.block_tokens * TOKEN_BYTES])
        return (record.parent_tokens, first)


def common_prefix(left: Octets, right: Octets) -> int:
    """Return the number of equal leading bytes; piecewise, so that an early end is cheap."""
    length = min(len(left), len(right))
    a = np.frombuffer(left, dtype=np.uint8, count=length)
    b = np.frombuffer(right, dtype=np.uint8, count=length)
    for start in range(0, length, _COMPARE_BYTES):
        differs = a[start : start + _COMPARE_BYTES] != b[start : start + _COMPARE_BYTES]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return length
