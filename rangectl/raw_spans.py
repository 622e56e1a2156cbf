"""Raw spans: what the disk gives when nothing but reads or writes happens.

Owns the threads and the timing of plain native calls into banks; never checks or delivers bytes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from rangekv.engine.devices.cpu import Bytes, bank_memory
from rangekv.format.errors import EnvironmentFault

SPAN_BYTES = 32 << 20
_NOISE_BYTES = 1 << 20
NativeCall = Callable[..., int]


@dataclass(frozen=True, slots=True)
class Span:
    """One contiguous byte range of a file = one native call."""

    offset: int
    length_bytes: int


class Moved(NamedTuple):
    """When one call began and had returned, in monotonic ns."""

    start_ns: int
    end_ns: int


def latencies(moved: Sequence[Moved]) -> list[float]:
    """Return the seconds that each call took."""
    return [(one.end_ns - one.start_ns) / 1e9 for one in moved]


class SpanWorkers:
    """A fixed set of threads, each with one huge-page bank; close it to end the threads."""

    def __init__(self, thread_count: int, bank_bytes: int = SPAN_BYTES) -> None:
        self.banks: list[Bytes] = [bank_memory(bank_bytes) for _ in range(thread_count)]
        self._threads = ThreadPoolExecutor(thread_count, thread_name_prefix="rangectl-span")

    def fill(self) -> None:
        """Fill the banks with bytes that no device can compress or leave out."""
        for bank in self.banks:
            noise = np.frombuffer(os.urandom(min(len(bank), _NOISE_BYTES)), dtype=np.uint8)
            bank[:] = np.resize(noise, len(bank))

    def read(self, fd: int, spans: Sequence[Span]) -> list[Moved]:
        """Read all spans, one call each; return when each call was under way."""
        return self.move([(os.preadv, fd, span) for span in spans])

    def read_into(self, fd: int, reads: Sequence[tuple[Span, Sequence[Bytes]]]) -> list[Moved]:
        """Read each span with one call into the caller's memory; return when it was under way."""
        return self.move([(_into(memory), fd, span) for span, memory in reads])

    def write(self, fd: int, spans: Sequence[Span]) -> list[Moved]:
        """Write all spans from the banks' content, one call each; not durable by itself."""
        return self.move([(os.pwritev, fd, span) for span in spans])

    def move(self, calls: Sequence[tuple[NativeCall, int, Span]]) -> list[Moved]:
        """Make all calls, each on (descriptor, bank, offset); return when each was under way."""
        moved = [Moved(0, 0)] * len(calls)

        def job(index: int) -> Callable[[Bytes], None]:
            call, fd, span = calls[index]

            def move_one(bank: Bytes) -> None:
                start_ns = time.monotonic_ns()
                _whole(call, fd, span, bank)
                moved[index] = Moved(start_ns, time.monotonic_ns())

            return move_one

        self.each([job(index) for index in range(len(calls))])
        return moved

    def each(self, jobs: Sequence[Callable[[Bytes], None]]) -> None:
        """Run jobs in their order over the threads; each gets the bank of the thread it runs on."""
        queue = deque(jobs)

        def work(bank: Bytes) -> None:
            try:
                while True:
                    queue.popleft()(bank)
            except IndexError:
                return
            except BaseException:
                queue.clear()
                raise

        running = [self._threads.submit(work, bank) for bank in self.banks]
        try:
            wait(running)
        finally:
            # Nothing may still be writing into a bank when the caller goes on, Ctrl-C included.
            queue.clear()
            wait(running)
        for future in running:
            future.result()

    def close(self) -> None:
        """End the threads; waits for calls that are in flight."""
        self._threads.shutdown(cancel_futures=True)


def _into(memory: Sequence[Bytes]) -> NativeCall:
    call: NativeCall = os.preadv

    def preadv(fd: int, _: Sequence[Bytes], offset: int) -> int:
        return call(fd, memory, offset)

    return preadv


def _whole(call: NativeCall, fd: int, span: Span, bank: Bytes) -> None:
    """Move one span with one call; anything but the full count makes the measurement void."""
    count = call(fd, [bank[: span.length_bytes]], span.offset)
    if count != span.length_bytes:
        raise EnvironmentFault(
            "short-transfer",
            f"{call.__name__} moved {count} of {span.length_bytes} bytes; check the disk's space",
            offset=span.offset,
        )
