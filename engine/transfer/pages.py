"""Owns the checksums of a save's pages while its bytes pass by in pieces; it never writes them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash
from rangekv.format.errors import ensure
from rangekv.format.geometry import Geometry


class _OpenPage:
    """A page of which only the first `size_bytes` have passed."""

    __slots__ = ("hasher", "size_bytes")

    def __init__(self) -> None:
        self.hasher = xxhash.xxh3_64()
        self.size_bytes = 0


class PageHasher:
    """xxh3_64 of each page of one layer of one part (one record to be).

    A page is `page_bytes` counted from its record's start; the last one is shorter. A page that
    straddles two steps of a save is continued (SPEC.md, checksums). Pieces that begin at a page may
    be hashed in any order and at once; one that begins inside a page follows its predecessor.
    """

    __slots__ = ("_done", "_open", "_page_bytes", "_starts")

    def __init__(self, geometry: Geometry, starts: Sequence[int]) -> None:
        """`starts` are the byte offsets in the part at which records begin; the first is 0.

        It may grow while hashing goes on, but only behind what has been hashed.
        """
        self._page_bytes = geometry.page_bytes
        self._starts = starts
        self._done: dict[int, int] = {}
        self._open: dict[int, _OpenPage] = {}

    def cut(self, position: int, size_bytes: int) -> Iterator[tuple[int, int, bool]]:
        """Yield (begin, end, is a whole page) of what lies at byte `position` of the part."""
        end = position + size_bytes
        while position < end:
            page, page_end = self._page_at(position)
            piece_end = min(page_end, end)
            yield position, piece_end, position == page and piece_end == page_end
            position = piece_end

    def note(self, position: int, digest: int) -> None:
        """Take the hash of the whole page that begins at byte `position` of the part."""
        self._done[position] = digest

    def update(self, position: int, data: memoryview) -> None:
        """Hash `data`, which begins at byte `position` of the part and lies in one page."""
        page, page_end = self._page_at(position)
        open_page = self._open.setdefault(page, _OpenPage())
        ensure(open_page.size_bytes == position - page, "a page was hashed out of order")
        open_page.hasher.update(data)
        open_page.size_bytes += len(data)
        if position + len(data) == page_end:
            self._done[page] = open_page.hasher.intdigest()
            del self._open[page]

    def pages(self, size_bytes: int) -> npt.NDArray[np.uint64] | None:
        """Return the page hashes of the first `size_bytes`, or None if they cannot be known.

        They can where every page up to there is complete, or hashed exactly so far.
        """
        hashes: list[int] = []
        position = 0
        while position < size_bytes:
            _, page_end = self._page_at(position)
            done, open_page = self._done.get(position), self._open.get(position)
            if done is not None and page_end <= size_bytes:
                hashes.append(done)
            elif open_page is not None and position + open_page.size_bytes == size_bytes:
                hashes.append(open_page.hasher.intdigest())
            else:
                return None
            position = page_end
        return np.array(hashes, dtype=np.uint64)

    def page_floor(self, size_bytes: int) -> int:
        """Return the last page boundary before byte `size_bytes`."""
        return self._page_at(size_bytes - 1)[0] if size_bytes > 0 else 0

    def _page_at(self, position: int) -> tuple[int, int]:
        """Return begin and end of the page that holds byte `position`."""
        index = bisect_right(self._starts, position) - 1
        start = self._starts[index]
        page = position - (position - start) % self._page_bytes
        end = page + self._page_bytes
        if index + 1 < len(self._starts):
            end = min(end, self._starts[index + 1])
        return page, end
