"""Owns what one GPU gives: memory, streams, events, the kernels that run there.

It never decides what is copied and knows no bank. It is the seam at which tests stand in for a GPU;
`TorchRuntime` has never been run on one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from rangekv.engine.devices.cuda.copies import BlockCopies, TorchCopies, TritonCopies
from rangekv.engine.devices.cuda.event_fence import Event
from rangekv.engine.devices.cuda.hashes import PageHashes, TorchHashes, TritonHashes
from rangekv.engine.devices.device import BlockIds
from rangekv.format.errors import EnvironmentFault
from rangekv.format.geometry import ALIGNMENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

log = logging.getLogger("rangekv.engine")

Made = TypeVar("Made")


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

    def free_bytes(self) -> int:
        """See `Runtime`; what torch keeps for itself and does not use counts as free."""
        cuda = self._torch.cuda
        free, _ = cuda.mem_get_info(self.device)
        kept = cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device)
        return int(free + kept)

    def empty(self, size_bytes: int) -> torch.Tensor:
        """See `Runtime`."""
        dtype = self._torch.uint8
        memory = self._torch.empty(size_bytes + ALIGNMENT, dtype=dtype, device=self.device)
        start = -memory.data_ptr() % ALIGNMENT
        aligned: torch.Tensor = memory[start : start + size_bytes]
        return aligned

    def stream(self) -> Any:
        """See `Runtime`; torch hands out those of a pool, so it costs no call to the driver."""
        return self._torch.cuda.Stream(device=self.device)

    def current_stream(self) -> Any:
        """See `Runtime`."""
        return self._torch.cuda.current_stream(self.device)

    def event(self) -> Event:
        """See `Runtime`; without the time, whose recording costs more."""
        event: Event = self._torch.cuda.Event(enable_timing=False)
        return event

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
        return _first_that_runs(
            lambda: TritonCopies(layers), lambda: TorchCopies(layers), "copies of blocks"
        )

    def hashes(self) -> PageHashes:
        """See `Runtime`."""
        return _first_that_runs(lambda: TritonHashes(self.device), TorchHashes, "page checksums")


def _first_that_runs(triton: Callable[[], Made], plain: Callable[[], Made], what: str) -> Made:
    """Return the Triton implementation, or the one of torch alone where there is no Triton."""
    try:
        return triton()
    except EnvironmentFault as fault:
        if fault.code != "no-triton":
            raise
        log.warning("%s run with torch alone, which is slower: %s", what, fault)
        return plain()
