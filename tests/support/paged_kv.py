"""Paged KV tensors in every memory layout that vLLM has, one allocation for all layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# Logical [B, H, N, C] of one layer, by the physical order of (layer, block, head, token, content).
ORDERS_4D = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")
# Logical [B, 2, N, H, D] of one layer (P: the K and the V plane).
ORDERS_5D = ("LBPNHD", "LBPHND", "LPBNHD")
IN_ONE_PIECE = ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "LBPNHD", "LBPHND")


@dataclass(frozen=True)
class Shape:
    """How much KV: a block of one layer has heads x tokens x content elements."""

    layers: int = 3
    blocks: int = 9
    heads: int = 2
    tokens: int = 4
    content: int = 16  # K and V together

    @property
    def block_elements(self) -> int:
        return self.heads * self.tokens * self.content


def paged_kv(order: str, shape: Shape, dtype: Any) -> tuple[Any, list[Any]]:
    """Return (the whole allocation as uint8[bytes], one tensor per layer), random bytes."""
    import torch

    logical = "BPNHD" if "P" in order else "BHNC"
    sizes = {
        "L": shape.layers,
        "B": shape.blocks,
        "H": shape.heads,
        "N": shape.tokens,
        "C": shape.content,
        "P": 2,
        "D": shape.content // 2,
    }
    item = torch.empty(0, dtype=dtype).element_size()
    memory = torch.randint(
        0, 256, (math.prod(sizes[axis] for axis in order) * item,), dtype=torch.uint8
    )
    strides = {
        axis: math.prod(sizes[after] for after in order[i + 1 :]) for i, axis in enumerate(order)
    }
    elements = memory.view(dtype)
    layers = [
        elements.as_strided(
            [sizes[axis] for axis in logical],
            [strides[axis] for axis in logical],
            layer * strides["L"],
        )
        for layer in range(shape.layers)
    ]
    return memory, layers
