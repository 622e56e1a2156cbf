"""Owns the roots of a store: which tenant's token tree has which number in this session.

It never sees what a digest stands for, and never gives a number twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rangekv.format.errors import UsageError
from rangekv.format.records import NO_SALT, ROOT_BYTES
from rangekv.format.tables import ROOTS_MAX


class RootTable:
    """Numbers of roots; 0 stands for requests without a salt. Guarded by the engine's lock."""

    def __init__(self, digests: Sequence[bytes] = (NO_SALT,)) -> None:
        """`digests` are those of a snapshot: each one's place is its number."""
        self._digests = dict(enumerate(digests))
        self._numbers = {digest: number for number, digest in self._digests.items()}
        self._next = len(digests)

    def __contains__(self, number: int) -> bool:
        return number in self._digests

    def __len__(self) -> int:
        return len(self._digests)

    def digest(self, number: int) -> bytes:
        return self._digests[number]

    def known(self, digest: bytes) -> int | None:
        """Return the number of a digest that has one."""
        return self._numbers.get(digest)

    def number(self, digest: bytes, in_use: Collection[int]) -> int:
        """Return the number of a digest, a new one if need be.

        When the table is full, the older half of the roots that are not `in_use` is forgotten:
        their numbers lead nowhere from then on. Raises UsageError `bad-root`, `too-many-roots`.
        """
        if len(digest) != ROOT_BYTES:
            raise UsageError(
                "bad-root", f"a root's digest has {ROOT_BYTES} bytes, found {len(digest)}"
            )
        known = self._numbers.get(digest)
        if known is not None:
            return known
        if len(self) >= ROOTS_MAX:
            self._forget([one for one in self._digests if one and one not in in_use])
        if len(self) >= ROOTS_MAX:
            raise UsageError(
                "too-many-roots",
                f"the store holds records of {ROOTS_MAX} tenants, the most it can tell apart; "
                "use another store, or reset this one",
            )
        number, self._next = self._next, self._next + 1
        self._digests[number] = digest
        self._numbers[digest] = number
        return number

    def _forget(self, unused: Sequence[int]) -> None:
        for number in unused[: -(-len(unused) // 2)]:
            del self._numbers[self._digests.pop(number)]
