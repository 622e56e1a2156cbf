"""Owns paged KV in a GPU's memory as checks see it: indexed like an array, whose bytes come to the
host when they are asked for. It starts no copy that an engine would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rangekv.engine.devices.cpu import bank_memory

if TYPE_CHECKING:
    import torch


class GpuBlocks:
    """uint8[...] on a device. One integer gives the part of that index, all else numpy copies."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getitem__(self, key: Any) -> Any:
        part = self.tensor[_index(key)]
        return GpuBlocks(part) if isinstance(key, int) else part.cpu().numpy()

    def __setitem__(self, key: Any, value: Any) -> None:
        import torch

        if not isinstance(value, int):
            value = torch.from_numpy(np.ascontiguousarray(value)).to(self.tensor.device)
        self.tensor[_index(key)] = value
        settle(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """As an array's."""
        return tuple(self.tensor.shape)

    def __len__(self) -> int:
        return len(self.tensor)

    def __iter__(self) -> Iterator[GpuBlocks]:
        return (GpuBlocks(part) for part in self.tensor)

    def view(self, dtype: type[np.generic]) -> GpuBlocks:
        """Return the same memory as words of another type that torch knows."""
        import torch

        return GpuBlocks(self.tensor.view(getattr(torch, np.dtype(dtype).name)))

    def __array__(self, *_: Any, **__: Any) -> npt.NDArray[Any]:
        array: npt.NDArray[Any] = self.tensor.cpu().numpy()
        return array


def paged_memory(device: str, shape: tuple[int, ...]) -> Any:
    """Return uint8[shape] on the device of that name: an array, or GpuBlocks."""
    size_bytes = math.prod(shape)
    if device == "cpu":
        return bank_memory(size_bytes).reshape(shape)
    from rangekv.engine.devices.cuda import runtime

    return GpuBlocks(runtime.TorchRuntime().empty(size_bytes).reshape(shape))


def fill(memory: Any, value: int) -> None:
    """Fill memory of any device, an array or a tensor."""
    memory[:] = value
    if not isinstance(memory, np.ndarray):
        settle(memory)


def layers_of(memory: Any) -> list[Any]:
    """Return what an engine is to attach: one buffer or tensor for each first index."""
    return [part.tensor if isinstance(part, GpuBlocks) else part for part in memory]


def settle(tensor: torch.Tensor) -> None:
    """Wait: a test that has written goes on as if the host had."""
    import torch

    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def _index(key: Any) -> Any:
    import torch

    if isinstance(key, tuple):
        return tuple(_index(part) for part in key)
    if isinstance(key, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(key))
    return key
