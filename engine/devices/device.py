"""What an engine asks of the memory that paged KV and its banks lie in; it moves nothing itself.

Implementations are `cpu` and `cuda`; which one runs is the choice of the setting `device`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from rangekv.engine.devices.fence import Fence
from rangekv.format.errors import UsageError

BlockIds = npt.NDArray[np.int64]
Memory = Any
"""uint8[n] on a device: a numpy array or a tensor. A slice of it is a view; `nbytes` counts it."""


@dataclass(frozen=True, slots=True)
class Strip:
    """Blocks of one layer that lie one behind another in a bank, from byte `bank_offset`.

    They are blocks `block_ids[block_begin : block_begin + block_count]` of the layer.
    """

    layer_index: int
    bank_offset: int
    block_begin: int
    block_count: int


class Lane(Protocol):
    """The order of one request's copies: each runs behind those before it."""

    def follow(self) -> None:
        """Let what comes next run behind all that the calling thread has given the device so far.

        Called by the thread that computes with the blocks, before it lets anybody copy them. May
        raise whatever the device does; the blocks must not be copied then.
        """


class Device(Protocol):
    """Paged KV of one rank, the memory of its banks, and the copies between them.

    `attach` keeps views of the caller's buffers; the caller keeps the buffers alive until close.
    Copies are started by a worker, which waits for their fence: `Fence.wait` says what is proved.
    """

    layer_count: int
    block_bytes: int
    block_count: int

    @property
    def in_host_memory(self) -> bool:
        """Whether the kernel's own reads and writes reach banks and blocks."""
        ...

    def free_bytes(self) -> int | None:
        """Return the bytes left for banks on a device that has a memory of its own, else None."""
        ...

    @property
    def attached(self) -> bool:
        """Whether paged KV has been attached."""
        ...

    @property
    def gathers_in_place(self) -> bool:
        """Whether a gather copies straight into its target, without a temporary array."""
        ...

    def attach(self, layers: Sequence[Any]) -> None:
        """Take one writable buffer [block_count, block_bytes] per layer, in layer order."""

    def check_block_ids(self, block_ids: BlockIds, *, unique: bool) -> None:
        """Raise `UsageError` unless every id names a block, and each only once if `unique`."""

    def bank_memory(self, size_bytes: int) -> Memory:
        """Return memory for banks, once for all banks of an engine."""

    def lane(self) -> Lane:
        """Return the order in which the copies of one request will run."""
        ...

    def scatter(
        self, lane: Lane, source: Memory, strips: Sequence[Strip], block_ids: BlockIds
    ) -> Fence:
        """Start copying every strip from the bank `source` to its blocks of paged KV."""
        ...

    def gather(
        self, lane: Lane, target: Memory, strips: Sequence[Strip], block_ids: BlockIds
    ) -> Fence:
        """Start copying every strip from its blocks of paged KV to the bank `target`."""
        ...

    def digests(
        self, lane: Lane, memory: Memory, pages: Sequence[tuple[int, int]]
    ) -> Iterable[int]:
        """Return xxh3_64 of each page (begin, bytes) of `memory`, which nothing changes by now."""
        ...

    def host_view(self, lane: Lane, memory: Memory) -> memoryview:
        """Return the bytes of `memory` to read on the host; of a GPU's memory they are a copy."""
        ...

    def put(self, lane: Lane, target: Memory, source: Memory | None) -> None:
        """Fill `target` with a copy of `source`, or with zeros; it has ended on return."""

    def copy_of(self, lane: Lane, memory: Memory) -> Memory:
        """Return a copy of `memory` that is the caller's; it has ended on return."""

    def payload_view(self, memory: Memory) -> Any:
        """Return what payload I/O takes for `memory`."""

    # -- direct placement: reads straight into the blocks ----------------------------------------

    def direct_obstacle(self, alignment_bytes: int) -> str | None:
        """Return why direct I/O cannot reach the blocks in place, or None if it can."""
        ...

    def keep_from_children(self) -> None:
        """Leave paged KV out of forked children: no fork may share pages that a read fills."""

    def iovec(self, layer_index: int, block_ids: BlockIds) -> npt.NDArray[np.uint64]:
        """Return the places of those blocks as struct iovec[n]: uint64[n, 2], address and bytes."""
        ...

    def block_rows(self, layer_index: int) -> tuple[memoryview, int]:
        """Return a layer's memory as one flat byte view, and the bytes between two blocks."""
        ...


def check_block_ids(block_ids: BlockIds, block_count: int, *, unique: bool) -> None:
    """Raise `UsageError` unless every id names one of the blocks, each only once if `unique`."""
    if not block_count:
        raise UsageError("not-attached", "no paged KV is attached; call attach() first")
    if block_ids.size == 0:
        return
    low, high = int(block_ids.min()), int(block_ids.max())
    if low < 0 or high >= block_count:
        raise UsageError(
            "bad-block-id", f"block ids span {low}..{high}, expected 0..{block_count - 1}"
        )
    if unique and np.unique(block_ids).size != block_ids.size:
        raise UsageError("bad-block-id", "a destination block is named twice")
