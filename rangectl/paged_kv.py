"""A stand-in for a serving engine's paged KV: one mapping of blocks for all layers.

Owns that memory, fills it with self-describing payload and checks it; never reads a store.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from rangekv.engine.testing.gpu_blocks import layers_of, paged_memory
from rangekv.engine.testing.payload import WORD_BYTES, Mismatch, Payload, as_words
from rangekv.format.geometry import ModelGeometry

BlockIds = npt.NDArray[np.int64]


class PagedKV:
    """[layer_count, block_count, block_bytes], as a paged KV cache lies in memory.

    `device` is the engine's setting: in a GPU's memory `blocks` are GpuBlocks instead of an array.
    """

    def __init__(self, model: ModelGeometry, block_count: int, device: str = "cpu") -> None:
        self.model = model
        self.block_count = block_count
        self.blocks: Any = paged_memory(device, (model.layer_count, block_count, model.block_bytes))

    @property
    def layers(self) -> list[Any]:
        """One writable [block_count, block_bytes] view per layer; valid as long as this object."""
        return layers_of(self.blocks)

    def write(self, payload: Payload, block_ids: BlockIds) -> None:
        """Put the payload's tokens 0 … into `block_ids`, all layers."""
        for layer_index, layer in enumerate(self.blocks):
            rows = payload.blocks(layer_index, 0, len(block_ids) * self.model.block_tokens)
            layer[block_ids] = rows.view(np.uint8).reshape(len(block_ids), -1)

    def poison(self) -> None:
        """Make every block wrong at both of its ends, so that what a restore left out shows."""
        self.blocks[..., :16] = 0xDB
        self.blocks[..., -16:] = 0xDB

    def check(self, payload: Payload, block_ids: BlockIds, *, whole: bool) -> Mismatch | None:
        """Compare `block_ids` with the payload: every byte, or only both ends of every block."""
        word_count = self.model.block_bytes // WORD_BYTES
        stride = 1 if whole else max(1, word_count - 1)
        for layer_index, layer in enumerate(self.blocks):
            words = as_words(np.asarray(layer))[:, ::stride][block_ids]
            wrong = payload.check(layer_index, 0, words, stride=stride)
            if wrong is not None:
                return wrong
        return None
