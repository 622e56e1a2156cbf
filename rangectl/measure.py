"""What one timed run cost: seconds, processor seconds, and the bytes the disk really gave.

Owns clocks and the kernel's counters of this process; never runs what it measures.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROCESS_IO = Path("/proc/self/io")


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed run."""

    seconds: float
    cpu_seconds: float
    """User and system time of all threads of this process."""
    layer_seconds: tuple[float, ...]
    """When each layer was ready, from the beginning; empty for a run that has no layers."""
    physical_read_bytes: int | None
    """Bytes fetched from the block device, as the kernel counts them; None where it does not."""
    path: str | None = None
    """The way that the engine proved its bytes to have taken; None for arms without an engine."""

    @property
    def first_layer_seconds(self) -> float:
        """When a consumer could begin; the end of a run that has no layers."""
        return self.layer_seconds[0] if self.layer_seconds else self.seconds

    def exposed_seconds(self, compute_seconds: float) -> float:
        """Return by how much a pass over these layers ends later than over a resident prefix.

        Computing on a layer takes `compute_seconds`; it begins when the layer is ready and the
        layer before it has been computed.
        """
        computed = 0.0
        for ready in self.layer_seconds:
            computed = max(ready, computed) + compute_seconds
        return computed - len(self.layer_seconds) * compute_seconds


class Run:
    """A run that is being timed from its creation to `done`."""

    def __init__(self) -> None:
        self._physical = physical_read_bytes()
        self._cpu = time.process_time()
        self._layers_ns: Sequence[int] = ()
        self._start_ns = time.monotonic_ns()

    def layers(self, ready_ns: Sequence[int]) -> None:
        """Note the monotonic ns at which each layer was ready."""
        self._layers_ns = ready_ns

    def done(self) -> Sample:
        """Stop the clocks."""
        end_ns = time.monotonic_ns()
        cpu_seconds = time.process_time() - self._cpu
        physical, before = physical_read_bytes(), self._physical
        return Sample(
            (end_ns - self._start_ns) / 1e9,
            cpu_seconds,
            tuple((at_ns - self._start_ns) / 1e9 for at_ns in self._layers_ns),
            None if physical is None or before is None else physical - before,
        )


def layers_ready(layer_count: int, finished: Iterable[tuple[range, int]]) -> list[int]:
    """Return when each layer was whole, from (layers, monotonic ns) of every piece of them."""
    ready_ns = [0] * layer_count
    for layers, at_ns in finished:
        for layer_index in layers:
            ready_ns[layer_index] = max(ready_ns[layer_index], at_ns)
    return ready_ns


def physical_read_bytes() -> int | None:
    """Return how many bytes the block layer has read for this process, or None if unknown."""
    try:
        lines = _PROCESS_IO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def drop_residency(path: str) -> None:
    """Take a file's clean pages out of the page cache, so that a read has to go to the device."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
