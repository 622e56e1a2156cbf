"""Owns paged KV and banks in a GPU's memory: copies on each request's own stream, page checksums.

It proves copies by events only, and never brings bytes of a bank to the host but for a page that a
save cuts in two. It has been run over what stands in for a GPU in tests, never on one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from rangekv.engine.devices.cuda.copies import BlockCopies
from rangekv.engine.devices.cuda.event_fence import EventFence
from rangekv.engine.devices.cuda.runtime import Runtime
from rangekv.engine.devices.device import BlockIds, Lane, Strip, check_block_ids
from rangekv.engine.devices.fence import FenceState
from rangekv.format.errors import UsageError, ensure

if TYPE_CHECKING:
    import torch


class StreamLane:
    """A stream for one request's copies, and one for its checksums, which nothing holds up."""

    def __init__(self, runtime: Runtime) -> None:
        self.stream = runtime.stream()
        self.hashing = runtime.stream()
        self._runtime = runtime

    def follow(self) -> None:
        """Let the stream wait, on the device, for what the calling thread's stream has been given.

        vLLM computes on its current stream: KV it has produced is gathered behind it, and blocks
        that it still reads are written behind it.
        """
        event = self._runtime.event()
        event.record(self._runtime.current_stream())
        self._runtime.wait_event(self.stream, event)


class CopyFence(EventFence):
    """A fence that keeps what its copy touches until the copy is proved to have ended.

    Where nothing proves it the memory is never given up: a GPU may write to it at any time.
    """

    __slots__ = ("_touched",)

    _forever: ClassVar[list[Any]] = []

    def keep(self, *touched: Any) -> None:
        """Hold on to `touched`."""
        self._touched = touched

    def wait(self) -> FenceState:
        """See `EventFence`."""
        state = super().wait()
        if state not in (FenceState.DONE, FenceState.FAILED):
            self._forever.append(self._touched)
        return state


class CudaDevice:
    """Paged KV of one rank in a GPU's memory: see `Device`."""

    gathers_in_place = True

    def __init__(self, layer_count: int, block_bytes: int, runtime: Runtime) -> None:
        self.layer_count = layer_count
        self.block_bytes = block_bytes
        self.block_count = 0
        self.runtime = runtime
        self._copies: BlockCopies | None = None
        self._hashes = runtime.hashes()

    @property
    def in_host_memory(self) -> bool:
        """See `Device`; true only of what stands in for a GPU."""
        return self.runtime.in_host_memory

    def free_bytes(self) -> int:
        """See `Device`."""
        return self.runtime.free_bytes()

    @property
    def attached(self) -> bool:
        """Whether paged KV has been attached."""
        return self._copies is not None

    def attach(self, layers: Sequence[torch.Tensor]) -> None:
        """Take one tensor uint8[block_count, block_bytes] per layer; see `cuda.rows.block_rows`."""
        if self._copies is not None:
            raise UsageError("already-attached", "paged KV is attached already; open a new engine")
        if len(layers) != self.layer_count:
            raise UsageError(
                "bad-layers", f"got {len(layers)} layer tensors, expected {self.layer_count}"
            )
        copies = self.runtime.copies(layers)
        if copies.device != self.runtime.device or copies.block_bytes != self.block_bytes:
            raise UsageError(
                "bad-layers",
                f"layers lie on {copies.device} with blocks of {copies.block_bytes} bytes, "
                f"expected {self.runtime.device} with blocks of {self.block_bytes}",
            )
        self.block_count = layers[0].shape[0]
        self._copies = copies

    def check_block_ids(self, block_ids: BlockIds, *, unique: bool) -> None:
        """See `Device`."""
        check_block_ids(block_ids, self.block_count, unique=unique)

    def bank_memory(self, size_bytes: int) -> torch.Tensor:
        """See `Device`."""
        return self.runtime.empty(size_bytes)

    def lane(self) -> StreamLane:
        """See `Device`."""
        return StreamLane(self.runtime)

    def scatter(
        self, lane: Lane, source: torch.Tensor, strips: Sequence[Strip], block_ids: BlockIds
    ) -> CopyFence:
        """See `Device`: one launch, whatever number of strips."""
        return self._copy(lane, source, strips, block_ids, to_bank=False)

    def gather(
        self, lane: Lane, target: torch.Tensor, strips: Sequence[Strip], block_ids: BlockIds
    ) -> CopyFence:
        """See `Device`: one launch, whatever number of strips."""
        return self._copy(lane, target, strips, block_ids, to_bank=True)

    def _copy(
        self,
        lane: Lane,
        bank: torch.Tensor,
        strips: Sequence[Strip],
        block_ids: BlockIds,
        *,
        to_bank: bool,
    ) -> CopyFence:
        copies, stream = self._copies, _of(lane).stream
        if copies is None:
            raise UsageError("not-attached", "no paged KV is attached; call attach() first")
        failure: Exception | None = None
        ids: torch.Tensor | None = None
        with self.runtime.on(stream):
            try:
                ids = self.runtime.upload(block_ids)
                if to_bank:
                    copies.gather(strips, ids, bank)
                else:
                    copies.scatter(bank, strips, ids)
            except Exception as error:
                failure = error
            fence = CopyFence.behind(
                self.runtime.event(), stream, failure=failure, proves_end=self._has_ended
            )
        fence.keep(bank, ids)
        return fence

    def digests(
        self, lane: Lane, memory: torch.Tensor, pages: Sequence[tuple[int, int]]
    ) -> list[int]:
        """See `Device`; all pages at once, waited for."""
        begins, sizes = [begin for begin, _ in pages], [size for _, size in pages]
        with self.runtime.on(_of(lane).hashing):
            hashes = self._hashes.in_bank(memory, begins, sizes).cpu()
        unsigned: list[int] = hashes.numpy().view(np.uint64).tolist()
        return unsigned

    def put(self, lane: Lane, target: torch.Tensor, source: torch.Tensor | None) -> None:
        """See `Device`."""
        self._settled(lane, lambda: target.zero_() if source is None else target.copy_(source))

    def copy_of(self, lane: Lane, memory: torch.Tensor) -> torch.Tensor:
        """See `Device`."""
        copy: torch.Tensor = self._settled(lane, memory.clone)
        return copy

    def _settled(self, lane: Lane, work: Any) -> Any:
        stream = _of(lane).stream
        with self.runtime.on(stream):
            result = work()
            fence = EventFence.behind(self.runtime.event(), stream, proves_end=self._has_ended)
        ensure(fence.wait() is FenceState.DONE, f"a copy in a bank is not proved: {fence.error}")
        return result

    def _has_ended(self, _: Exception) -> bool:
        """Whether a copy has ended of which its event tells nothing: a drained device runs none."""
        return self.runtime.drained()

    def host_view(self, lane: Lane, memory: torch.Tensor) -> memoryview:
        """See `Device`."""
        with self.runtime.on(_of(lane).hashing):
            return memoryview(memory.cpu().numpy())

    def payload_view(self, memory: torch.Tensor) -> Any:
        """See `Device`."""
        return self.runtime.payload_view(memory)

    # -- direct placement ------------------------------------------------------------------------

    def direct_obstacle(self, alignment_bytes: int) -> str | None:
        """See `Device`: cuFile fills one range a call, and blocks of a prefix are thousands."""
        return "paged KV lies in a GPU's memory"

    def keep_from_children(self) -> None:
        """A GPU's memory is no forked child's."""

    def iovec(self, layer_index: int, block_ids: BlockIds) -> npt.NDArray[np.uint64]:
        """Never called: see `direct_obstacle`."""
        raise UsageError("no-direct-placement", str(self.direct_obstacle(0)))

    def block_rows(self, layer_index: int) -> tuple[memoryview, int]:
        """Never called: see `direct_obstacle`."""
        raise UsageError("no-direct-placement", str(self.direct_obstacle(0)))


def _of(lane: Lane) -> StreamLane:
    if not isinstance(lane, StreamLane):
        raise UsageError("bad-device", "a copy on a GPU was given the lane of another device")
    return lane
