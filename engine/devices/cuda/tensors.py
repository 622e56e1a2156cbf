"""Owns what a tensor must be before its address goes to a kernel; it touches no element.

Kernels follow addresses blindly: whatever is wrong with a tensor must be found here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rangekv.format.errors import UsageError

if TYPE_CHECKING:
    import torch


def check_rows(name: str, layer: torch.Tensor) -> None:
    """Raise `UsageError` unless `layer` is uint8[block_count, block_bytes] with dense rows."""
    import torch

    if not isinstance(layer, torch.Tensor):
        raise UsageError("bad-layers", f"{name} is a {type(layer).__name__}, expected a tensor")
    if (
        layer.dtype != torch.uint8
        or layer.dim() != 2
        or layer.stride(1) != 1
        or not layer.shape[1]
        or layer.stride(0) < layer.shape[1]
    ):
        raise UsageError(
            "bad-layers",
            f"{name} is {layer.dtype} of shape {tuple(layer.shape)} and strides {layer.stride()}, "
            "expected uint8 [block_count, block_bytes] with dense rows that do not overlap",
        )


def check_bank(bank: torch.Tensor) -> None:
    """Raise `UsageError` unless `bank` is contiguous uint8[bank_bytes]."""
    import torch

    if bank.dtype != torch.uint8 or bank.dim() != 1 or not bank.is_contiguous():
        raise UsageError(
            "bad-bank",
            f"the bank is {bank.dtype} of shape {tuple(bank.shape)} and strides {bank.stride()}, "
            "expected contiguous uint8 [bank_bytes]",
        )


def check_block_ids(block_ids: torch.Tensor) -> None:
    """Raise `UsageError` unless `block_ids` are contiguous int32 or int64 [blocks]."""
    import torch

    if (
        block_ids.dtype not in (torch.int32, torch.int64)
        or block_ids.dim() != 1
        or not block_ids.is_contiguous()
    ):
        raise UsageError(
            "bad-block-id",
            f"block ids are {block_ids.dtype} of shape {tuple(block_ids.shape)} and strides "
            f"{block_ids.stride()}, expected contiguous int32 or int64 [blocks]",
        )


def check_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """Raise `UsageError` unless `tensor` lies on `device`."""
    if tensor.device != device:
        raise UsageError("bad-device", f"{name} lies on {tensor.device}, expected {device}")
