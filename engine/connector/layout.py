"""KV tensors as rows of opaque bytes: one writable [block_count, block_bytes] view per layer.

Finds out how blocks lie in memory and refuses what it cannot prove; never copies KV and never
looks inside a block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rangekv.format.errors import UsageError
from rangekv.format.geometry import ModelGeometry

if TYPE_CHECKING:
    import torch

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")


@dataclass(frozen=True, slots=True)
class PagedLayers:
    """The layers that own KV on this rank, in layer order.

    `rows[i]` is a view of layer i's tensor; it lives as long as the tensor's storage does.
    `kernel_block_tokens` is the block size of the attention kernel, which may divide vLLM's.
    """

    names: tuple[str, ...]
    rows: tuple[npt.NDArray[np.uint8], ...]
    block_bytes: int
    kernel_block_tokens: int

    def geometry(self, block_tokens: int) -> ModelGeometry:
        """Return what the model fixes of a store: layers, bytes of a token, tokens of a block."""
        return ModelGeometry(len(self.names), self.block_bytes // block_tokens, block_tokens)


def paged_layers(
    tensors: Mapping[str, torch.Tensor], block_count: int, block_tokens: int
) -> PagedLayers:
    """Return the rows of every layer; raises UsageError for a layout that is not proved.

    Layers that share another layer's memory are left out: their KV is that layer's.
    """
    owners: dict[int, str] = {}
    for name in sorted(tensors, key=layer_number):
        owners.setdefault(tensors[name].data_ptr(), name)
    names = tuple(owners.values())
    numbers = [layer_number(name) for name in names]
    if len(set(numbers)) != len(numbers):
        raise _refuse(names[0], "several KV tensors carry one layer number")
    rows = tuple(_rows(name, tensors[name], block_count, block_tokens) for name in names)
    kernel_blocks = {tensors[name].shape[0] for name in names}
    block_bytes = {each.shape[1] for each in rows}
    if len(block_bytes) != 1 or len(kernel_blocks) != 1:
        raise _refuse(names[0], f"layers differ in bytes of a block: {sorted(block_bytes)}")
    size = block_bytes.pop()
    if size % block_tokens:
        raise _refuse(names[0], f"{size} bytes of a block are no multiple of {block_tokens} tokens")
    return PagedLayers(names, rows, size, block_tokens * block_count // kernel_blocks.pop())


def layer_number(name: str) -> int:
    """Return the layer number in a name such as `model.layers.7.self_attn.attn`."""
    numbers = _NUMBER.findall(name)
    if len(numbers) != 1:
        raise _refuse(name, f"the name has {len(numbers)} numbers, expected the layer's alone")
    return int(numbers[0])


def _rows(
    name: str, tensor: torch.Tensor, block_count: int, block_tokens: int
) -> npt.NDArray[np.uint8]:
    """View one layer's tensor [blocks, ...] as rows, if each block is one dense run of bytes."""
    import torch

    if tensor.device.type != "cpu":
        raise _refuse(name, f"the tensor lies on {tensor.device.type}, expected cpu")
    ratio, rest = divmod(tensor.shape[0], block_count)
    if rest or ratio < 1 or block_tokens % ratio:
        raise _refuse(
            name, f"{tensor.shape[0]} kernel blocks for {block_count} blocks of {block_tokens}"
        )
    run = 1
    inner = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    for stride, size in inner:
        if size != 1 and stride != run:
            raise _refuse(
                name,
                f"a block is not dense: shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            )
        run *= size
    if tensor.stride(0) < run or (ratio > 1 and tensor.stride(0) != run):
        raise _refuse(name, f"blocks overlap or kernel blocks are apart: {tensor.stride()}")
    item = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    view = flat.as_strided(
        (block_count, ratio * run * item),
        (tensor.stride(0) * ratio * item, 1),
        tensor.storage_offset() * item,
    )
    rows: npt.NDArray[np.uint8] = view.numpy()
    return rows


def _refuse(name: str, found: str) -> UsageError:
    return UsageError(
        "unknown-layout",
        f"KV of layer {name!r}: {found}; Range restores only layouts that are proved, "
        "serve this model without the connector",
    )
