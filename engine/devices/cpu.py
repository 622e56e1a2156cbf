"""Owns paged KV and bank memory on a host: huge-page banks, gather and scatter of whole blocks.

It never decides what is copied where, and never takes payload memory after start without counting.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from rangekv.engine.devices.device import BlockIds, Lane, Strip, check_block_ids
from rangekv.engine.devices.fence import Fence, FenceState
from rangekv.format.errors import UsageError
from rangekv.format.geometry import ALIGNMENT

log = logging.getLogger("rangekv.engine")

Bytes = npt.NDArray[np.uint8]

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not exported by the mmap module
_HUGE_PAGE = 2 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def bank_memory(size_bytes: int) -> Bytes:
    """Return `size_bytes` of private anonymous memory, huge pages asked for and faulted in.

    O_DIRECT reads into physically contiguous memory are 3-5 times faster than into scattered
    4 KiB pages; Python's default mapping is shared memory, where MADV_HUGEPAGE has no effect.
    The memory is left out of forked children: open(2) forbids a fork during direct I/O into it.
    """
    length = -(-size_bytes // _HUGE_PAGE) * _HUGE_PAGE
    area = mmap.mmap(-1, length + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area.madvise(mmap.MADV_HUGEPAGE)
    area.madvise(mmap.MADV_DONTFORK)
    whole = np.frombuffer(area, dtype=np.uint8)
    start = -whole.ctypes.data % _HUGE_PAGE
    memory = whole[start : start + length]
    try:
        area.madvise(_MADV_POPULATE_WRITE)
    except OSError:
        memory[:: mmap.PAGESIZE] = 0
    return memory[:size_bytes]


class HostLane:
    """The order of copies that have ended when they return."""

    def follow(self) -> None:
        """Nothing runs behind the host's back."""


class CpuDevice:
    """Paged KV of one rank in host memory: see `Device`.

    Copies are synchronous: the returned fence is settled.
    """

    in_host_memory = True

    def __init__(self, layer_count: int, block_bytes: int) -> None:
        self.layer_count = layer_count
        self.block_bytes = block_bytes
        self.block_count = 0
        self._layers: list[npt.NDArray[Any]] = []
        # Rows of 8-byte words copy markedly faster than rows of single bytes.
        self._word = np.dtype(np.int64) if block_bytes % 8 == 0 else np.dtype(np.uint8)

    def free_bytes(self) -> None:
        """See `Device`."""

    @property
    def attached(self) -> bool:
        """Whether paged KV has been attached."""
        return bool(self._layers)

    def attach(self, layers: Sequence[Any]) -> None:
        """Take one writable buffer [block_count, block_bytes] per layer, in layer order."""
        if self._layers:
            raise UsageError("already-attached", "paged KV is attached already; open a new engine")
        if len(layers) != self.layer_count:
            raise UsageError(
                "bad-layers", f"got {len(layers)} layer buffers, expected {self.layer_count}"
            )
        views = [self._view(index, layer) for index, layer in enumerate(layers)]
        counts = {len(view) for view in views}
        if len(counts) != 1:
            raise UsageError(
                "bad-layers", f"layers hold {sorted(counts)} blocks, expected one count for all"
            )
        self.block_count = counts.pop()
        self._layers = views

    def _view(self, index: int, layer: Any) -> npt.NDArray[Any]:
        view = layer if isinstance(layer, np.ndarray) else np.frombuffer(layer, dtype=np.uint8)
        if view.dtype != np.uint8:
            raise UsageError(
                "bad-layers", f"layer {index} has dtype {view.dtype}, expected uint8 bytes"
            )
        if view.ndim == 1 and view.size % self.block_bytes == 0:
            view = view.reshape(-1, self.block_bytes)
        if view.ndim != 2 or view.shape[1] != self.block_bytes or view.strides[1] != 1:
            raise UsageError(
                "bad-layers",
                f"layer {index} has shape {view.shape} and strides {view.strides}, expected "
                f"[block_count, {self.block_bytes}] with contiguous rows",
            )
        if not view.flags.writeable:
            raise UsageError("bad-layers", f"layer {index} is read-only, expected writable memory")
        if self._word.itemsize == 8 and view.strides[0] % 8 == 0 and view.ctypes.data % 8 == 0:
            return view.view(np.int64)
        return view

    @property
    def gathers_in_place(self) -> bool:
        """Whether a gather copies straight into its target, without a temporary array."""
        return all(layer.flags.c_contiguous for layer in self._layers)

    def check_block_ids(self, block_ids: BlockIds, *, unique: bool) -> None:
        """See `Device`."""
        check_block_ids(block_ids, self.block_count, unique=unique)

    def bank_memory(self, size_bytes: int) -> Bytes:
        """See the function of this name."""
        return bank_memory(size_bytes)

    def lane(self) -> HostLane:
        """See `Device`."""
        return HostLane()

    def direct_obstacle(self, alignment_bytes: int) -> str | None:
        """Return why direct I/O cannot reach the blocks in place, or None if it can."""
        if self.block_bytes % alignment_bytes:
            return f"blocks of {self.block_bytes} bytes are no multiple of {alignment_bytes}"
        for index, layer in enumerate(self._layers):
            if layer.strides[0] % alignment_bytes:
                return f"blocks of layer {index} are {layer.strides[0]} bytes apart"
            if layer.ctypes.data % alignment_bytes:
                rest = layer.ctypes.data % ALIGNMENT
                return (
                    f"paged KV of layer {index} starts at a page + {rest}; with torch, "
                    "THP_MEM_ALLOC_ENABLE=1 aligns it"
                )
        return None

    def keep_from_children(self) -> None:
        """Leave paged KV out of forked children: no fork may share pages that a read fills."""
        for layer in self._layers:
            begin = -(-layer.ctypes.data // ALIGNMENT) * ALIGNMENT
            end = layer.ctypes.data + (len(layer) - 1) * layer.strides[0] + self.block_bytes
            length = (end - begin) // ALIGNMENT * ALIGNMENT
            if length > 0 and _libc.madvise(begin, length, mmap.MADV_DONTFORK):
                log.warning(
                    "paged KV could not be kept from forked children: errno %d", ctypes.get_errno()
                )

    def iovec(self, layer_index: int, block_ids: BlockIds) -> npt.NDArray[np.uint64]:
        """Return the places of those blocks as struct iovec[n]: uint64[n, 2], address and bytes."""
        layer = self._layers[layer_index]
        places = np.empty((len(block_ids), 2), dtype=np.uint64)
        places[:, 0] = layer.ctypes.data + block_ids * layer.strides[0]
        places[:, 1] = self.block_bytes
        return places

    def block_rows(self, layer_index: int) -> tuple[memoryview, int]:
        """Return a layer's memory as one flat byte view, and the bytes between two blocks."""
        layer = self._layers[layer_index]
        stride = layer.strides[0]
        size = (len(layer) - 1) * stride + self.block_bytes
        return memoryview((ctypes.c_uint8 * size).from_address(layer.ctypes.data)).cast("B"), stride

    def scatter(
        self, lane: Lane, source: Bytes, strips: Sequence[Strip], block_ids: BlockIds
    ) -> Fence:
        """See `Device`; the copies have ended on return."""
        for strip in strips:
            end = strip.bank_offset + strip.block_count * self.block_bytes
            ids = block_ids[strip.block_begin : strip.block_begin + strip.block_count]
            self._scatter(strip.layer_index, source[strip.bank_offset : end], ids)
        return Fence(FenceState.DONE)

    def _scatter(self, layer_index: int, source: Bytes, block_ids: BlockIds) -> None:
        layer = self._layers[layer_index]
        rows = source.reshape(len(block_ids), self.block_bytes)
        if layer.dtype != np.uint8 and source.ctypes.data % 8 == 0:
            layer[block_ids] = rows.view(layer.dtype)
        elif layer.dtype != np.uint8:
            layer.view(np.uint8)[block_ids] = rows
        else:
            layer[block_ids] = rows

    def gather(
        self, lane: Lane, target: Bytes, strips: Sequence[Strip], block_ids: BlockIds
    ) -> Fence:
        """See `Device`; the copies have ended on return."""
        for strip in strips:
            end = strip.bank_offset + strip.block_count * self.block_bytes
            ids = block_ids[strip.block_begin : strip.block_begin + strip.block_count]
            self._gather(strip.layer_index, ids, target[strip.bank_offset : end])
        return Fence(FenceState.DONE)

    def _gather(self, layer_index: int, block_ids: BlockIds, target: Bytes) -> None:
        layer = self._layers[layer_index].view(np.uint8)
        rows = target.reshape(len(block_ids), self.block_bytes)
        if layer.flags.c_contiguous:
            # mode="clip" writes straight into `out`; "raise" would go through a temporary.
            np.take(layer, block_ids, axis=0, out=rows, mode="clip")
        else:
            rows[:] = layer[block_ids]

    def digests(self, lane: Lane, memory: Bytes, pages: Sequence[tuple[int, int]]) -> Iterator[int]:
        """See `Device`; a page is hashed when it is asked for."""
        view = memory.data
        return (xxhash.xxh3_64_intdigest(view[begin : begin + size]) for begin, size in pages)

    def host_view(self, lane: Lane, memory: Bytes) -> memoryview:
        """See `Device`."""
        return memory.data

    def put(self, lane: Lane, target: Bytes, source: Bytes | None) -> None:
        """See `Device`."""
        target[:] = 0 if source is None else source

    def copy_of(self, lane: Lane, memory: Bytes) -> Bytes:
        """See `Device`."""
        return memory.copy()

    def payload_view(self, memory: Bytes) -> Bytes:
        """See `Device`."""
        return memory
