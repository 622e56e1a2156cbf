"""Owns xxh3_64 of checksum pages in one device's memory, equal to the host's (SPEC.md, checksums).

It starts work on the device's current stream and never waits for it, and never compares a hash with
what is expected. Its kernels have been run under Triton's interpreter only.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rangekv.engine.devices.cuda import xxh3
from rangekv.engine.devices.cuda.hash_torch import hash_rows
from rangekv.engine.devices.cuda.launch import LAUNCH
from rangekv.engine.devices.cuda.tensors import (
    check_bank,
    check_block_ids,
    check_device,
    check_rows,
)
from rangekv.format.errors import EnvironmentFault, UsageError

if TYPE_CHECKING:
    import torch

_TILE = 8  # XXH3 blocks of one program: 8 KiB, 64 bytes a thread
_PAGE_BYTES_MAX = 1 << 28  # 8 times SPEC.md's limit; a grid has 65,535 tiles


class PageHashes(ABC):
    """Hashes of many pages at once, on one device.

    Results are int64[pages] on the device, the bits of unsigned hashes: on the host
    `result.numpy().view(numpy.uint64)`. The caller keeps what is hashed alive and unchanged until a
    fence recorded behind the work is settled.
    """

    def in_bank(
        self, bank: torch.Tensor, page_begin: Sequence[int], page_bytes: Sequence[int]
    ) -> torch.Tensor:
        """Hash pages that lie in `bank`, uint8[bank_bytes]: page i from byte `page_begin[i]` on."""
        check_bank(bank)
        pages = _pages(page_begin, page_bytes)
        for begin, size in pages:
            if begin + size > len(bank):
                raise _bad_page(begin, size, f"a bank of {len(bank)} bytes")
        return self._in_bank(bank, pages)

    def in_blocks(
        self,
        layer: torch.Tensor,
        block_ids: torch.Tensor,
        page_first: Sequence[int],
        page_bytes: Sequence[int],
    ) -> torch.Tensor:
        """Hash pages of whole blocks that lie in `layer`, uint8[block_count, block_bytes].

        Page i is the blocks `block_ids[page_first[i]:]`, as many as its bytes fill. Block ids are
        int32 or int64 on the device; that they name blocks, the caller has checked on the host.
        """
        check_rows("the layer", layer)
        check_block_ids(block_ids)
        check_device("the array of block ids", block_ids, layer.device)
        pages = _pages(page_first, page_bytes)
        block_bytes = layer.shape[1]
        for first, size in pages:
            blocks, rest = divmod(size, block_bytes)
            if rest or first + blocks > len(block_ids):
                raise _bad_page(
                    first, size, f"{len(block_ids)} block ids, or blocks of {block_bytes} bytes"
                )
        return self._in_blocks(layer, block_ids, pages)

    @abstractmethod
    def _in_bank(self, bank: torch.Tensor, pages: list[tuple[int, int]]) -> torch.Tensor: ...

    @abstractmethod
    def _in_blocks(
        self, layer: torch.Tensor, block_ids: torch.Tensor, pages: list[tuple[int, int]]
    ) -> torch.Tensor: ...


class TritonHashes(PageHashes):
    """Two launches for any number of pages: parallel over pages, and inside a page."""

    def __init__(self, device: torch.device | str) -> None:
        import torch

        try:
            from rangekv.engine.devices.cuda import hash_kernel
        except ImportError as error:
            raise EnvironmentFault(
                "no-triton",
                f"the hash kernels need triton ({error}); install the one that belongs to your "
                "torch, or hash with torch alone",
            ) from error
        self._kernels = hash_kernel
        self._table = torch.tensor(xxh3.table(), dtype=torch.int64, device=device)

    def _in_bank(self, bank: torch.Tensor, pages: list[tuple[int, int]]) -> torch.Tensor:
        check_device("the bank", bank, self._table.device)
        common = math.gcd(bank.data_ptr(), *(field for page in pages for field in page))
        return self._launch(bank.data_ptr(), self._table, 0, pages, 0, common)

    def _in_blocks(
        self, layer: torch.Tensor, block_ids: torch.Tensor, pages: list[tuple[int, int]]
    ) -> torch.Tensor:
        check_device("the layer", layer, self._table.device)
        block_bytes = layer.shape[1]
        place, stride = layer.data_ptr(), layer.stride(0)
        common = math.gcd(place, stride, block_bytes)
        return self._launch(place, block_ids, stride, pages, block_bytes, common)

    def _launch(
        self,
        base: int,
        block_ids: torch.Tensor,
        stride: int,
        pages: list[tuple[int, int]],
        block_bytes: int,
        common: int,
    ) -> torch.Tensor:
        import torch

        device = self._table.device
        hashes = torch.empty(len(pages), dtype=torch.int64, device=device)
        if not pages:
            return hashes
        table = torch.tensor(pages, dtype=torch.int64).to(device)
        longest = max(size for _, size in pages)
        blocks_max = -(-longest // xxh3.BLOCK_BYTES) if longest > xxh3.SHORT_MAX else 0
        sums = torch.empty((len(pages), blocks_max, 8), dtype=torch.int64, device=device)
        # Triton launches on the current device, which need not be the one that holds the pages.
        with LAUNCH, torch.cuda.device_of(hashes):
            if blocks_max:
                self._kernels.sum_blocks[(len(pages), -(-blocks_max // _TILE))](
                    table,
                    base,
                    block_ids,
                    stride,
                    self._table,
                    sums,
                    blocks_max,
                    block_bytes=block_bytes,
                    width=next(size for size in (8, 4, 1) if common % size == 0),
                    tile=_TILE,
                )
            self._kernels.finish_pages[(len(pages),)](
                table,
                base,
                block_ids,
                stride,
                self._table,
                sums,
                blocks_max,
                hashes,
                block_bytes=block_bytes,
                num_warps=1,
            )
        return hashes


class TorchHashes(PageHashes):
    """The same with torch alone: some launches for every KiB of a page, and a copy of the pages."""

    def _in_bank(self, bank: torch.Tensor, pages: list[tuple[int, int]]) -> torch.Tensor:
        return _by_size(bank, pages, lambda begin, size: bank[begin : begin + size])

    def _in_blocks(
        self, layer: torch.Tensor, block_ids: torch.Tensor, pages: list[tuple[int, int]]
    ) -> torch.Tensor:
        size_of = layer.shape[1]

        def bytes_of(first: int, size: int) -> torch.Tensor:
            return layer[block_ids[first : first + size // size_of].long()].flatten()

        return _by_size(layer, pages, bytes_of)


def _by_size(
    where: torch.Tensor,
    pages: list[tuple[int, int]],
    bytes_of: Callable[[int, int], torch.Tensor],
) -> torch.Tensor:
    """Hash pages of one size together."""
    import torch

    hashes = torch.empty(len(pages), dtype=torch.int64, device=where.device)
    for size in {size for _, size in pages}:
        chosen = [index for index, page in enumerate(pages) if page[1] == size]
        rows = torch.stack([bytes_of(*pages[index]) for index in chosen])
        hashes[torch.tensor(chosen, device=where.device)] = hash_rows(rows)
    return hashes


def _pages(begins: Sequence[int], sizes: Sequence[int]) -> list[tuple[int, int]]:
    pages = [(int(begin), int(size)) for begin, size in zip(begins, sizes, strict=True)]
    for begin, size in pages:
        if begin < 0 or not 0 < size <= _PAGE_BYTES_MAX:
            raise _bad_page(begin, size, "its limits: from 0 on, of 1 byte to 256 MiB")
    return pages


def _bad_page(begin: int, size: int, bounds: str) -> UsageError:
    return UsageError(
        "bad-page", f"a page begins at {begin} and has {size} bytes: outside {bounds}"
    )
