"""Owns what one GPU gives: memory, streams, events, the kernels that run there.

It never decides what is copied and knows no bank. It is the seam at which tests stand in for a GPU;
`TorchRuntime` has never been run on one.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from rangekv.engine.devices.cuda.copies import BlockCopies, TorchCopies, TritonCopies
from rangekv.engine.devices.cuda.event_fence import Event
from rangekv.engine.devices.cuda.hashes import PageHashes, TorchHashes, TritonHashes
from rangekv.engine.devices.device import BlockIds, Strip
from rangekv.format.errors import EnvironmentFault, UsageError
from rangekv.format.geometry import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

log = logging.getLogger("rangekv.engine")

Made = TypeVar("Made")

STREAMS = 8
TRIED_BYTES = 64 << 10


class Runtime(Protocol):
    """One GPU as a device sees it; every call may raise what the driver reports."""

    device: torch.device
    in_host_memory: bool

    def free_bytes(self) -> int:
        """Return the bytes that can be allocated now."""
        ...

    def empty(self, size_bytes: int) -> torch.Tensor:
        """Return uint8[size_bytes] at a multiple of 4096, its content undefined."""
        ...

    def stream(self) -> Any:
        """Return a stream that is not the default one."""

    def current_stream(self) -> Any:
        """Return the stream that the calling thread gives its work to."""

    def event(self) -> Event:
        """Return a new event."""
        ...

    def wait_event(self, stream: Any, event: Event) -> None:
        """Let what comes next on `stream` run behind `event`."""

    def drained(self) -> bool:
        """Wait for all that the device has been given; True, or it raises: then nobody knows."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Let the calling thread give its work to `stream`."""
        ...

    def upload(self, block_ids: BlockIds) -> torch.Tensor:
        """Return the ids as int64 on the device, ordered on the calling thread's stream."""
        ...

    def payload_view(self, memory: torch.Tensor) -> Any:
        """Return what payload I/O takes for `memory`."""

    def copies(self, layers: Sequence[torch.Tensor]) -> BlockCopies:
        """Return the copies between these layers and banks."""
        ...

    def hashes(self) -> PageHashes:
        """Return the hashes of pages in banks."""
        ...


class TorchRuntime:
    """The GPU that is torch's current one when this is made."""

    in_host_memory = False

    def __init__(self) -> None:
        """Raises EnvironmentFault `no-torch`, `no-gpu`."""
        try:
            import torch
        except ImportError as error:
            raise EnvironmentFault(
                "no-torch", f"device 'cuda' needs torch ({error}); install it, or use device 'cpu'"
            ) from error
        if not torch.cuda.is_available():
            raise EnvironmentFault(
                "no-gpu",
                f"device 'cuda' needs a GPU, and torch {torch.__version__} finds none; install "
                "the driver (a container needs --gpus) and a CUDA build of torch, or use 'cpu'",
            )
        self._torch: Any = torch
        self.device = torch.device("cuda", torch.cuda.current_device())
        # Of their own: torch's pool is vLLM's too, and its allocator keeps memory for each stream.
        # Before others in rank: a copy is short, and somebody waits for it.
        streams = [torch.cuda.Stream(device=self.device, priority=-1) for _ in range(STREAMS)]
        self._streams = itertools.cycle(streams)
        self._pools: list[Any] = []

    def free_bytes(self) -> int:
        """See `Runtime`; what torch keeps for itself and does not use counts as free."""
        cuda = self._torch.cuda
        free, _ = cuda.mem_get_info(self.device)
        kept = cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device)
        return int(free + kept)

    def empty(self, size_bytes: int) -> torch.Tensor:
        """See `Runtime`: the driver's own allocation, shared with no other tensor.

        Payload I/O is not ordered by streams, so nothing may still run in this memory; and cuFile
        registers an allocation as a whole. Raises EnvironmentFault `no-device-memory`.
        """
        made, cuda = self._torch, self._torch.cuda
        pool = cuda.MemPool()
        self._pools.append(pool)
        try:
            # Made by a model's thread, used by workers: they may not share its inference mode.
            with made.inference_mode(False), cuda.use_mem_pool(pool, self.device):
                memory = self._plain(size_bytes + ALIGNMENT)
        except RuntimeError as error:
            raise EnvironmentFault(
                "no-device-memory",
                f"the GPU does not give {size_bytes} bytes for banks ({error}); lower vLLM's "
                "--gpu-memory-utilization, or save_bank, save_banks or read_banks",
            ) from error
        cuda.current_stream(self.device).synchronize()
        start = -memory.data_ptr() % ALIGNMENT
        aligned: torch.Tensor = memory[start : start + size_bytes]
        return aligned

    def _plain(self, size_bytes: int) -> torch.Tensor:
        memory: torch.Tensor = self._torch.empty(
            size_bytes, dtype=self._torch.uint8, device=self.device
        )
        return memory

    def stream(self) -> Any:
        """See `Runtime`: the next of a few. Never raises; called under the engine's lock."""
        return next(self._streams)

    def current_stream(self) -> Any:
        """See `Runtime`."""
        return self._torch.cuda.current_stream(self.device)

    def event(self) -> Event:
        """See `Runtime`; whoever waits for it sleeps and leaves the core to others."""
        event: Event = self._torch.cuda.Event(enable_timing=False, blocking=True)
        return event

    def drained(self) -> bool:
        """See `Runtime`: what an event cannot tell, such as while a graph is captured."""
        self._torch.cuda.synchronize(self.device)
        return True

    def wait_event(self, stream: Any, event: Event) -> None:
        """See `Runtime`."""
        stream.wait_event(event)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """See `Runtime`; threads begin on device 0, whatever the one that started them uses."""
        with ExitStack() as stack:
            stack.enter_context(self._torch.cuda.device(self.device))
            stack.enter_context(self._torch.cuda.stream(stream))
            yield

    def upload(self, block_ids: BlockIds) -> torch.Tensor:
        """See `Runtime`; from pageable memory, so the ids may be let go of on return."""
        ids = self._torch.from_numpy(np.ascontiguousarray(block_ids, dtype=np.int64))
        uploaded: torch.Tensor = ids.to(self.device)
        return uploaded

    def payload_view(self, memory: torch.Tensor) -> Any:
        """See `Runtime`: a tensor tells its address by `__cuda_array_interface__`."""
        return memory

    def copies(self, layers: Sequence[torch.Tensor]) -> BlockCopies:
        """See `Runtime`."""

        def tried() -> BlockCopies:
            """Copy a block out and back: kernels are compiled now, not by the first request."""
            copies = TritonCopies(layers)
            bank, ids = self._plain(copies.block_bytes), self.upload(np.zeros(1, dtype=np.int64))
            copies.gather([Strip(0, 0, 0, 1)], ids, bank)
            copies.scatter(bank, [Strip(0, 0, 0, 1)], ids)
            self.drained()
            return copies

        return _first_that_runs(tried, lambda: TorchCopies(layers), "copies of blocks")

    def hashes(self) -> PageHashes:
        """See `Runtime`."""

        def tried() -> PageHashes:
            hashes = TritonHashes(self.device)
            hashes.in_bank(self._plain(TRIED_BYTES), [0], [TRIED_BYTES]).cpu()
            return hashes

        return _first_that_runs(tried, TorchHashes, "page checksums")


def _first_that_runs(triton: Callable[[], Made], plain: Callable[[], Made], what: str) -> Made:
    """Return the Triton implementation, or the one of torch alone where that does not run.

    Triton may be installed and not compile: it needs a C compiler and Python's headers.
    """
    try:
        return triton()
    except UsageError:
        raise
    except Exception as error:
        log.warning("%s run with torch alone, which is slower: %s", what, error)
        return plain()
