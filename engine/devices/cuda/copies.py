"""Owns gather and scatter of whole blocks between paged KV and banks in one device's memory.

It starts copies on the device's current stream and never waits for one, never proves one done, and
never decides what is copied where. Its kernel has been run under Triton's interpreter only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rangekv.engine.devices.cuda.launch import LAUNCH
from rangekv.engine.devices.cuda.tensors import (
    check_bank,
    check_block_ids,
    check_device,
    check_rows,
)
from rangekv.engine.devices.device import Strip
from rangekv.format.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    import torch

_CHUNK_WORDS_MAX = 2048  # of one program: 16 words a thread keep enough loads in flight


class BlockCopies(ABC):
    """Copies between the layers of one rank and any bank on the same device.

    `layers` are uint8[block_count, block_bytes] in layer order, rows contiguous, blocks any stride
    apart; the caller keeps them, every bank and all block ids alive until a fence recorded behind
    the copies is settled. Block ids are int32 or int64 on the device: that they name blocks, and in
    a scatter each only once, the caller has checked on the host.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        if not layers:
            raise UsageError("bad-layers", "got no layers, expected one tensor per layer")
        first = layers[0]
        for index, layer in enumerate(layers):
            check_rows(f"layer {index}", layer)
            if layer.shape != first.shape or layer.device != first.device:
                raise UsageError(
                    "bad-layers",
                    f"layer {index} is {tuple(layer.shape)} on {layer.device}, layer 0 is "
                    f"{tuple(first.shape)} on {first.device}; expected one shape and device",
                )
        self.layers = tuple(layers)
        self.device = first.device
        self.block_bytes = first.shape[1]

    def scatter(self, bank: torch.Tensor, strips: Sequence[Strip], block_ids: torch.Tensor) -> None:
        """Start copying every strip from `bank`, uint8[bank_bytes], to its blocks."""
        self._check(bank, strips, block_ids)
        self._copy(bank, [s for s in strips if s.block_count], block_ids, to_bank=False)

    def gather(self, strips: Sequence[Strip], block_ids: torch.Tensor, bank: torch.Tensor) -> None:
        """Start copying the blocks of every strip to its place in `bank`, uint8[bank_bytes]."""
        self._check(bank, strips, block_ids)
        self._copy(bank, [s for s in strips if s.block_count], block_ids, to_bank=True)

    @abstractmethod
    def _copy(
        self, bank: torch.Tensor, strips: list[Strip], block_ids: torch.Tensor, *, to_bank: bool
    ) -> None: ...

    def _check(self, bank: torch.Tensor, strips: Sequence[Strip], block_ids: torch.Tensor) -> None:
        check_bank(bank)
        check_block_ids(block_ids)
        check_device("the bank", bank, self.device)
        check_device("the array of block ids", block_ids, self.device)
        for strip in strips:
            end = strip.bank_offset + strip.block_count * self.block_bytes
            if (
                min(strip.layer_index, strip.bank_offset, strip.block_begin, strip.block_count) < 0
                or strip.layer_index >= len(self.layers)
                or strip.block_begin + strip.block_count > len(block_ids)
                or end > len(bank)
            ):
                raise UsageError(
                    "bad-strip",
                    f"{strip} leaves {len(self.layers)} layers, {len(block_ids)} block ids or a "
                    f"bank of {len(bank)} bytes (blocks of {self.block_bytes} bytes)",
                )


class TritonCopies(BlockCopies):
    """One launch per call, whatever number of strips, in words as wide as all addresses allow."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        super().__init__(layers)
        try:
            from rangekv.engine.devices.cuda import copy_kernel
        except ImportError as error:
            raise EnvironmentFault(
                "no-triton",
                f"the copy kernel needs triton ({error}); install the one that belongs to your "
                "torch, or copy with torch alone",
            ) from error
        self._kernel = copy_kernel.copy_blocks

    def _copy(
        self, bank: torch.Tensor, strips: list[Strip], block_ids: torch.Tensor, *, to_bank: bool
    ) -> None:
        import torch

        if not strips:
            return
        table = []
        for strip in strips:
            layer = self.layers[strip.layer_index]
            place = bank.data_ptr() + strip.bank_offset
            fields = (layer.data_ptr(), layer.stride(0), place)
            table.append((*fields, strip.block_begin, strip.block_count))
        common = math.gcd(self.block_bytes, *(field for row in table for field in row[:3]))
        word_bytes = next(size for size in (16, 8, 4, 1) if common % size == 0)
        element = min(word_bytes, 8)
        block_words = self.block_bytes // element
        chunk_words = min(_CHUNK_WORDS_MAX, 1 << (block_words - 1).bit_length())
        chunks = -(-block_words // chunk_words)
        most = max(strip.block_count for strip in strips)
        # Triton launches on the current device, which need not be the one that holds the bank.
        with LAUNCH, torch.cuda.device_of(bank):
            self._kernel[(most * chunks, len(strips))](
                torch.tensor(table, dtype=torch.int64).to(self.device),
                block_ids,
                block_words=block_words,
                chunks=chunks,
                word_bytes=word_bytes,
                chunk_words=chunk_words,
                to_bank=to_bank,
            )


class TorchCopies(BlockCopies):
    """The same with torch alone: one indexing call a strip, in words of 8 bytes or of 1."""

    def _copy(
        self, bank: torch.Tensor, strips: list[Strip], block_ids: torch.Tensor, *, to_bank: bool
    ) -> None:
        import torch

        for strip in strips:
            layer = self.layers[strip.layer_index]
            size = strip.block_count * self.block_bytes
            place = bank[strip.bank_offset : strip.bank_offset + size].view(-1, self.block_bytes)
            ids = block_ids[strip.block_begin : strip.block_begin + strip.block_count]
            offsets = (layer.storage_offset(), place.storage_offset())
            addresses = (layer.data_ptr(), place.data_ptr())
            if math.gcd(self.block_bytes, layer.stride(0), *offsets, *addresses) % 8 == 0:
                layer, place = layer.view(torch.int64), place.view(torch.int64)
            if to_bank:
                torch.index_select(layer, 0, ids, out=place)
            else:
                layer.index_copy_(0, ids.long(), place)
