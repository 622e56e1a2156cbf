"""Owns the view of one layer's KV tensor as rows of opaque bytes, on whatever device it lies.

It refuses by name every layout in which a block is not one run of bytes; it never copies KV and
never looks inside a block. It has been run on CPU tensors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rangekv.format.errors import UsageError

if TYPE_CHECKING:
    import torch

_DIMENSIONS = (4, 5)  # [blocks, heads, tokens, content] and [blocks, 2, tokens, heads, size]


def block_rows(name: str, tensor: torch.Tensor, block_count: int) -> torch.Tensor:
    """Return uint8[block_count, block_bytes] over the tensor's own memory; blocks may lie apart.

    The tensor is [blocks, ...] with 4 or 5 dimensions in any order of strides that leaves a block
    in one piece. Where an attention kernel cuts a block into several of its own, the tensor holds
    a multiple of `block_count`. Raises `UsageError` (unknown-layout) for everything else. The view
    keeps the storage alive; the caller keeps its content.
    """
    import torch

    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    if len(shape) not in _DIMENSIONS:
        raise _refuse(name, f"{len(shape)} dimensions {shape}, expected 4 or 5")
    ratio, rest = divmod(shape[0], block_count) if block_count > 0 else (0, shape[0])
    if rest or ratio < 1:
        raise _refuse(
            name, f"{shape[0]} blocks in the first of {shape}, expected {block_count} or a multiple"
        )
    run = 1
    for stride, size in sorted(zip(strides[1:], shape[1:], strict=True)):
        if size != 1 and stride != run:
            raise _refuse(name, f"a block is not in one piece: shape {shape}, strides {strides}")
        run *= size
    if run == 0 or strides[0] < run or (ratio > 1 and strides[0] != run):
        raise _refuse(
            name, f"blocks overlap, are empty or torn apart: shape {shape}, strides {strides}"
        )
    item = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return flat.as_strided(
        (block_count, ratio * run * item),
        (strides[0] * ratio * item, 1),
        tensor.storage_offset() * item,
    )


def _refuse(name: str, found: str) -> UsageError:
    return UsageError(
        "unknown-layout",
        f"KV of layer {name!r}: {found}; Range restores only layouts that are proved, "
        "serve this model without the connector",
    )
