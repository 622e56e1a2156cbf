"""What a KV-aware router may be told: which of vLLM's blocks a store holds, and which all ranks do.

Knows block hashes and record ids; never computes a hash, and never claims what no directory holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rangekv.engine.connector.messages import BlockRun, HoldingsChange

TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Named:
    """A prefix of one tenant, packed uint32, with vLLM's hashes of its full blocks."""

    root: bytes
    tokens: bytes
    hashes: tuple[bytes, ...]


class Saving(Protocol):
    """What it needs of a save."""

    @property
    def decided(self) -> bool: ...


class Watched(Protocol):
    """What it needs of the engine: see `Engine.watch`."""

    def watch(
        self, prefixes: Sequence[tuple[bytes, memoryview]]
    ) -> tuple[list[int], list[list[tuple[int, int]]]]: ...


class Holdings:
    """One rank's: which blocks its store holds, of those that vLLM has named. Model's thread only.

    What a record holds is reported when a request that has those blocks is planned or has been
    saved, and taken back when the record leaves the store. It keeps the hashes of what it has
    reported, and nothing else once saves have ended.
    """

    def __init__(self, engine: Watched, block_tokens: int) -> None:
        self._engine = engine
        self._block_tokens = block_tokens
        self._reported: dict[int, list[bytes]] = {}  # by record id, from its first block on
        self._asked: list[Named] = []
        self._saving: list[tuple[Saving, Named]] = []

    @property
    def is_saving(self) -> bool:
        """Whether it is still unknown how some save ends."""
        return bool(self._saving)

    def look_for(self, named: Named) -> None:
        """Find out with the next report what the store holds of a prefix."""
        self._asked.append(named)

    def expect(self, save: Saving, named: Named) -> None:
        """Find out what the store holds of a prefix once a save of it has ended."""
        if named.hashes:
            self._saving.append((save, named))

    def take_change(self) -> HoldingsChange:
        """Return what is different from the last report."""
        asked, saving = self._asked, self._saving
        self._asked, self._saving = [], []
        for save, named in saving:
            if save.decided:  # before the engine is asked: what will be visible is so by now
                asked.append(named)
            else:
                self._saving.append((save, named))
        gone, chains = self._engine.watch([self._prefix(named) for named in asked])
        removed: list[bytes] = []
        for record_id in gone:
            removed += self._reported.pop(record_id, ())
        stored: list[BlockRun] = []
        for named, chain in zip(asked, chains, strict=True):
            stored += self._found(named, chain)
        return HoldingsChange(removed, stored)

    def _prefix(self, named: Named) -> tuple[bytes, memoryview]:
        size = len(named.hashes) * self._block_tokens * TOKEN_BYTES
        return named.root, memoryview(named.tokens)[:size]

    def _found(self, named: Named, chain: Sequence[tuple[int, int]]) -> Iterator[BlockRun]:
        """Yield what of a chain was not reported before; a record is known from its front on."""
        record_begin = 0
        for record_id, token_count in chain:
            record_end = record_begin + token_count // self._block_tokens
            known = self._reported.setdefault(record_id, [])
            begin = record_begin + len(known)
            if begin < record_end:
                hashes = list(named.hashes[begin:record_end])
                known += hashes
                yield BlockRun(named.hashes[begin - 1] if begin else None, hashes)
            record_begin = record_end


class Announcements:
    """The scheduler's: what all ranks hold is stored, and removed once the first of them lost it.

    It remembers only blocks that some ranks hold and others do not.
    """

    def __init__(self, rank_count: int) -> None:
        self._all = (1 << rank_count) - 1
        self._holders: dict[bytes, int] = {}  # one bit a rank; neither none nor all
        self._news: list[list[bytes] | BlockRun] = []

    def note(self, holdings: Mapping[int, HoldingsChange]) -> None:
        """Take what ranks report, by rank."""
        for rank, change in holdings.items():
            removed = [each for each in change.removed if self._lose(each, 1 << rank)]
            if removed:
                self._news.append(removed)
            for run in change.stored:
                self._news += self._gain(run, 1 << rank)

    def take(self) -> list[list[bytes] | BlockRun]:
        """Return, in order and once, hashes that were removed and runs that were stored."""
        news, self._news = self._news, []
        return news

    def _lose(self, block: bytes, rank: int) -> bool:
        """Note that a rank lost a block; say whether all held it until now."""
        holders = self._holders.pop(block, self._all)
        if holders & ~rank:
            self._holders[block] = holders & ~rank
        return holders == self._all

    def _gain(self, run: BlockRun, rank: int) -> Iterator[BlockRun]:
        """Note that a rank holds a run; yield those parts of it that all hold from now on."""
        part = BlockRun(run.parent, [])
        for block in run.hashes:
            holders = self._holders.pop(block, 0) | rank
            if holders == self._all:
                part.hashes.append(block)
            else:
                self._holders[block] = holders
                if part.hashes:
                    yield part
                part = BlockRun(block, [])
        if part.hashes:
            yield part
