"""A file seam whose payload operations fail, stall or lie on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rangekv.engine.files import Files


class FaultyFiles(Files):
    """`on_read` and `on_write` see (offset, length) first: they may raise, block or count."""

    def __init__(self) -> None:
        super().__init__()
        self.on_read: Callable[[int, int], int | None] | None = None
        self.on_write: Callable[[int, int], int | None] | None = None
        self.reads: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []

    def preadv(self, fd, buffers, offset):
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        self.reads.append((offset, length))
        if self.on_read is not None:
            count = self.on_read(offset, length)
            if count is not None:
                return count
        return super().preadv(fd, buffers, offset)

    def preadv_iovec(self, fd, iovec, offset):
        length = int(iovec[:, 1].sum())
        self.reads.append((offset, length))
        if self.on_read is not None:
            count = self.on_read(offset, length)
            if count is not None:
                return count
        return super().preadv_iovec(fd, iovec, offset)

    def pwritev(self, fd, buffers, offset):
        length = sum(memoryview(buffer).nbytes for buffer in buffers)
        self.writes.append((offset, length))
        if self.on_write is not None:
            count = self.on_write(offset, length)
            if count is not None:
                return count
        return super().pwritev(fd, buffers, offset)


class Gate:
    """Holds the operations that pass through it until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, offset: int, length: int) -> None:
        self.reached.release()
        assert self.opened.wait(30), "a test left its gate shut"
