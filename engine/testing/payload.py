"""Payload that describes itself: every 16 bytes name their generation, layer, token and place.

Owns the pattern and the comparison, so that a misplaced byte names its source; never moves bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rangekv.format.errors import ensure
from rangekv.format.geometry import ModelGeometry

Words = npt.NDArray[np.uint64]
WORD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Origin:
    """Where 16 bytes of payload come from; `word_index` counts them inside their token."""

    generation: int
    layer_index: int
    token_index: int
    word_index: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first 16 bytes that are not what they should be: whose they are, whose they should be."""

    expected: Origin
    found: Origin

    def line(self) -> str:
        """Return one line that names both."""
        return f"expected {self.expected}, found {self.found}"


class Payload:
    """The blocks of one token sequence, for every layer of a model.

    `generation` tells sequences apart (below 2**32): one for all blocks, or an array of one for
    each. `token_bytes` must be a multiple of 16.
    """

    def __init__(self, model: ModelGeometry, generation: int | npt.NDArray[np.uint64]) -> None:
        ensure(model.token_bytes % WORD_BYTES == 0, "token_bytes is not a multiple of 16")
        self.model = model
        self._generations = np.atleast_1d(np.asarray(generation, dtype=np.uint64))
        self._token_words = model.token_bytes // WORD_BYTES

    def blocks(self, layer_index: int, token_start: int, token_count: int) -> Words:
        """Return new words [blocks, words of a block, 2] of whole blocks of one layer."""
        words = np.empty(self._shape(token_count), dtype=np.uint64)
        words[..., 0] = self._owner(layer_index)
        words[..., 1] = self._places(token_start, token_count)
        return words

    def check(
        self, layer_index: int, token_start: int, words: Words, *, stride: int = 1
    ) -> Mismatch | None:
        """Compare words of whole blocks from `token_start` with the pattern; None if equal.

        `words` is [blocks, words of a block, 2]; with a stride only every stride-th word of each
        block is there, which is how large payloads are probed at both ends of every block.
        """
        places = self._places(token_start, len(words) * self.model.block_tokens)[:, ::stride]
        owners = self._owner(layer_index)
        wrong = (words[..., 0] != owners) | (words[..., 1] != places)
        if not wrong.any():
            return None
        at = np.unravel_index(int(wrong.argmax()), wrong.shape)
        owner = int(np.broadcast_to(owners, wrong.shape)[at])
        found = _origin(int(words[at][0]), int(words[at][1]))
        return Mismatch(_origin(owner, int(places[at])), found)

    def _shape(self, token_count: int) -> tuple[int, int, int]:
        tokens = self.model.block_tokens
        ensure(token_count % tokens == 0, "payload is made of whole blocks")
        return token_count // tokens, tokens * self._token_words, 2

    def _owner(self, layer_index: int) -> Words:
        """Return the first word of every 16 bytes: [1 or blocks, 1]."""
        owners: Words = self._generations[:, None] | np.uint64(layer_index << 32)
        return owners

    def _places(self, token_start: int, token_count: int) -> npt.NDArray[np.uint64]:
        """Return the second word of every 16 bytes: token and place in it, [blocks, words]."""
        tokens = np.arange(token_start, token_start + token_count, dtype=np.uint64)
        words = np.arange(self._token_words, dtype=np.uint64) << np.uint64(32)
        return (tokens[:, None] | words[None, :]).reshape(self._shape(token_count)[:2])


def as_words(rows: npt.NDArray[np.uint8]) -> Words:
    """View contiguous rows [blocks, block_bytes] as words [blocks, words of a block, 2]."""
    words: Words = rows.view(np.uint64).reshape(len(rows), -1, 2)
    return words


def _origin(owner: int, place: int) -> Origin:
    low = 2**32 - 1
    return Origin(owner & low, owner >> 32, place & low, place >> 32)
