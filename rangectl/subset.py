"""A share of a store's pages to read: `1/5`, `10%` or `4GiB`, the same one for the same seed.

Owns the spelling and the choice; never reads a page.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rangekv.engine.sizes import parse_size
from rangekv.format.errors import UsageError

_PART = re.compile(r"(\d{1,9})/(\d{1,9})", re.ASCII)
_PERCENT = re.compile(r"(\d{1,3})(?:\.(\d{1,4}))?%", re.ASCII)
# Mixing constants of splitmix64: a fixed order of pages that no library release can change.
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, slots=True)
class Subset:
    """One of several parts, a share, or as many pages as make up a size.

    The parts 1/n to n/n of one seed are all pages, each of them once; what a small share or size
    of a seed takes, a larger one of the same seed takes too.
    """

    text: str
    part: int = 1
    parts: int = 1
    share: float = 1.0
    size_bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Subset:
        """Raises UsageError `bad-subset` or `bad-size`."""
        if found := _PART.fullmatch(text):
            part, parts = int(found[1]), int(found[2])
            if not 0 < part <= parts:
                raise _bad(text, f"there is no part {part} of {parts}")
            return cls(text, part, parts)
        if _PERCENT.fullmatch(text):
            share = float(text[:-1]) / 100
            if not 0 < share <= 1:
                raise _bad(text, "expected more than 0% and at most 100%")
            return cls(text, share=share)
        if "/" in text or "%" in text:
            raise _bad(text, "expected a share such as 1/5, 10% or 4GiB")
        return cls(text, size_bytes=parse_size(text, name="--read-data-subset"))

    def choose(self, sizes: npt.NDArray[np.int64], seed: int) -> npt.NDArray[np.bool_]:
        """Return which pages of `sizes` bytes to read; at least one where there is any."""
        count = len(sizes)
        order = _order(count, seed)
        if self.size_bytes is not None:
            end = int(np.searchsorted(np.cumsum(sizes[order]), self.size_bytes)) + 1
            taken = order[:end]
        elif self.parts > 1:
            taken = order[count * (self.part - 1) // self.parts : count * self.part // self.parts]
        else:
            taken = order[: int(np.ceil(count * self.share))]
        chosen = np.zeros(count, dtype=np.bool_)
        chosen[taken] = True
        return chosen


def _order(count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return the pages in an order that looks random and follows from the seed alone."""
    with np.errstate(over="ignore"):
        mixed = np.arange(1, count + 1, dtype=np.uint64) * _STEP + np.uint64(seed) * _MIX_2
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX_1
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX_2
        mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable")


def _bad(text: str, problem: str) -> UsageError:
    return UsageError("bad-subset", f"--read-data-subset: {text[:40]!r}: {problem}")
