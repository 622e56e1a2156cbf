"""Stands in for a GPU: host memory, streams that only count, events that tell what a test says.

Copies and hashes are those of torch alone, on the CPU; what is tested is everything around them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from rangekv.engine.devices.cuda import runtime
from rangekv.engine.devices.cuda.copies import BlockCopies, TorchCopies
from rangekv.engine.devices.cuda.hashes import PageHashes, TorchHashes

GIB = 1 << 30


class StandInEvent:
    """An event that has taken place when its runtime says so; recorded once, like a real one."""

    def __init__(self, owner: StandIn) -> None:
        self._runtime = owner
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self._runtime.fail("record")
        self.stream = stream

    def query(self) -> bool:
        assert self.stream is not None, "an event was asked that was never recorded"
        self._runtime.fail("query")
        return not self._runtime.held.is_set()

    def synchronize(self) -> None:
        self._runtime.fail("synchronize")
        while self._runtime.held.is_set():
            assert self._runtime.released.wait(30)


class Stream:
    def __init__(self, number: int) -> None:
        self.number = number
        self.follows: list[StandInEvent] = []


class StandIn:
    """See `Runtime`. `errors[call]` is what that call raises; while `held`, no event happens."""

    in_host_memory = True

    def __init__(self, free_bytes: int = 8 * GIB) -> None:
        self.device = torch.device("cpu")
        self.errors: dict[str, BaseException] = {}
        self.held = threading.Event()
        self.released = threading.Event()
        self.streams: list[Stream] = [Stream(0)]
        self.copied: list[BlockCopies] = []
        self._free_bytes = free_bytes
        self._current = threading.local()

    def hold(self) -> None:
        self.released.clear()
        self.held.set()

    def let_go(self) -> None:
        self.held.clear()
        self.released.set()

    def fail(self, call: str) -> None:
        if call in self.errors:
            raise self.errors[call]

    def free_bytes(self) -> int:
        return self._free_bytes

    def empty(self, size_bytes: int) -> torch.Tensor:
        memory = torch.empty(size_bytes + 4096, dtype=torch.uint8)
        start = -memory.data_ptr() % 4096
        return memory[start : start + size_bytes]

    def stream(self) -> Stream:
        self.streams.append(Stream(len(self.streams)))
        return self.streams[-1]

    def current_stream(self) -> Stream:
        found: Stream = getattr(self._current, "stream", self.streams[0])
        return found

    def event(self) -> StandInEvent:
        return StandInEvent(self)

    def wait_event(self, stream: Stream, event: Any) -> None:
        self.fail("wait_event")
        stream.follows.append(event)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def drained(self) -> bool:
        self.fail("drained")
        return True

    def upload(self, block_ids: Any) -> torch.Tensor:
        self.fail("upload")
        return torch.from_numpy(np.array(block_ids, dtype=np.int64))

    def payload_view(self, memory: torch.Tensor) -> Any:
        return memory.numpy()

    def copies(self, layers: Sequence[torch.Tensor]) -> BlockCopies:
        self.copied.append(StandInCopies(layers, self))
        return self.copied[-1]

    def hashes(self) -> PageHashes:
        return StandInHashes(self)


def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Let engines of device `cuda` find a stand-in until the test ends; return it."""
    found = StandIn()
    monkeypatch.setattr(runtime, "TorchRuntime", lambda: found)
    return found


class StandInHashes(TorchHashes):
    def __init__(self, owner: StandIn) -> None:
        self.runtime = owner

    def _in_bank(self, bank: Any, pages: Any) -> torch.Tensor:
        self.runtime.fail("hash")
        return super()._in_bank(bank, pages)


class StandInCopies(TorchCopies):
    """Copies at once, and notes how many strips each launch had, and on which stream."""

    def __init__(self, layers: Sequence[torch.Tensor], owner: StandIn) -> None:
        super().__init__(layers)
        self.runtime = owner
        self.launches: list[tuple[str, int, int]] = []

    def _copy(self, bank: Any, strips: Any, block_ids: Any, *, to_bank: bool) -> None:
        kind = "gather" if to_bank else "scatter"
        self.launches.append((kind, len(strips), self.runtime.current_stream().number))
        self.runtime.fail(kind)
        super()._copy(bank, strips, block_ids, to_bank=to_bank)
