"""What is asked of KvikIO and made of its answers, with a library that answers as it is told."""

from __future__ import annotations

import os
import sys
import threading
import types
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from rangekv.engine.events import EventQueue
from rangekv.engine.files import OS_FILES
from rangekv.engine.payload import kvikio
from rangekv.engine.payload.kvikio import KvikioPayload, Operation, errno_name
from rangekv.engine.payload.pool import Priority, WorkerPool
from rangekv.format.errors import EnvironmentFault, InvariantError, TransferError

PACK_BYTES = 1 << 20


class Answer:
    """A future: waits for a permit where there are any, then returns or raises."""

    def __init__(self, library: Library, verb: str, size: int):
        self.library, self.verb, self.size = library, verb, size
        with library.told:
            library.flying += 1
            library.most = max(library.most, library.flying)
            library.begun.append(verb)
            library.told.notify_all()

    def get(self) -> int:
        if self.library.permits is not None:
            assert self.library.permits.acquire(timeout=60)
        with self.library.told:
            self.library.flying -= 1
        if isinstance(self.library.outcome, BaseException):
            raise self.library.outcome
        return self.size + self.library.outcome


class File:
    def __init__(self, library: Library, path: str, flags: str):
        self.library, self.flags = library, flags
        self.fd = os.open(library.instead or path, os.O_RDWR)
        self._handle = types.SimpleNamespace(is_direct_io_supported=lambda: True)
        library.opened.append(self)

    def pread(self, buffer, size: int, offset: int, task_size: int) -> Answer:
        self.library.tasks.append((size, task_size))
        return Answer(self.library, "read", size)

    def pwrite(self, buffer, size: int, offset: int, task_size: int) -> Answer:
        self.library.tasks.append((size, task_size))
        return Answer(self.library, "write", size)

    def fileno(self) -> int:
        return self.fd

    def close(self) -> None:
        os.close(self.fd)
        self.fd = -1


class Monitor:
    """Counts nothing."""

    def get(self) -> Monitor:
        return self

    def since(self, begin: Monitor) -> Monitor:
        return self

    by_backend: ClassVar[dict] = {}


class Library:
    """As much of KvikIO as is asked of it."""

    def __init__(self) -> None:
        self.told = threading.Condition()
        self.permits: threading.Semaphore | None = None
        self.flying = self.most = 0
        self.begun: list[str] = []
        self.tasks: list[tuple[int, int]] = []
        self.opened: list[File] = []
        self.instead: Path | None = None
        self.outcome: int | BaseException = 0
        self.CompatMode = types.SimpleNamespace(ON="on", OFF="off")
        self.SummaryMonitor = Monitor
        self.defaults = types.SimpleNamespace(set=self.take)
        self.taken: list[dict] = []

    def take(self, settings: dict) -> None:
        self.taken.append(settings)

    def CuFile(self, path: str, flags: str) -> File:  # noqa: N802
        return File(self, path, flags)


@pytest.fixture
def library(monkeypatch) -> Library:
    one = Library()
    monkeypatch.setattr(kvikio, "load", lambda mode: one)
    monkeypatch.setattr(kvikio, "_start", None)
    monkeypatch.setattr(kvikio, "_in_flight", set())
    return one


@pytest.fixture
def pack(tmp_path: Path):
    fd = os.open(tmp_path / "pack", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, PACK_BYTES)
    yield fd
    os.close(fd)


def opened(pack: int, threads: int = 2, mode: str = "compat") -> KvikioPayload:
    return KvikioPayload(OS_FILES, pack, mode=mode, threads=threads)


@pytest.mark.parametrize("missing", [1, 4096])
@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_short_count_is_an_error(library, pack, verb: str, missing: int) -> None:
    payload, buffer = opened(pack), np.zeros(8192, dtype=np.uint8)
    library.outcome = -missing
    with pytest.raises(TransferError, match=f"{verb} of 8192 bytes returned {8192 - missing}") as e:
        getattr(payload, verb)(4096, [buffer])
    assert (e.value.code, e.value.offset) == (f"short-{verb}", 4096)
    payload.close()


def test_modes_and_flags(library, pack, monkeypatch) -> None:
    monkeypatch.setattr(kvikio, "_cufile_stats", lambda library: None)
    payload = opened(pack, mode="gds")
    assert payload.path == "unproved"
    assert library.taken[0]["compat_mode"] == "off"
    assert library.opened[0].flags == "r+"
    payload.close()
    assert library.opened[0].fd == -1


def test_an_operation_is_one_task_of_whole_pages(library, pack) -> None:
    payload = opened(pack)
    library.tasks.clear()
    for size in (0, 1, 4096, 4097):
        payload.read(0, [np.zeros(size, dtype=np.uint8)])
    assert library.tasks == [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192)]
    payload.close()


def test_another_file_behind_the_path_is_refused(library, pack, tmp_path: Path) -> None:
    library.instead = tmp_path / "other"
    library.instead.write_bytes(bytes(PACK_BYTES))
    with pytest.raises(EnvironmentFault, match="expected the locked") as caught:
        opened(pack)
    assert caught.value.code == "other-file"
    assert library.opened[0].fd == -1


def test_a_first_read_that_fails_is_refused_and_leaves_nothing_open(library, pack) -> None:
    library.outcome = RuntimeError("CUDA_ERROR_NO_DEVICE")
    with pytest.raises(EnvironmentFault, match="CUDA_ERROR_NO_DEVICE") as caught:
        opened(pack)
    assert caught.value.code == "kvikio-io"
    assert library.opened[0].fd == -1


def test_an_interrupted_wait_is_no_evidence(library, pack) -> None:
    payload = opened(pack)
    library.outcome = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        payload.read(0, [np.zeros(4096, dtype=np.uint8)])
    assert len(kvikio._in_flight) == 1
    with pytest.raises(InvariantError, match="closed under an operation"):
        payload.close()


def test_a_second_wait_never_reaches_the_library(library, pack) -> None:
    payload = opened(pack)
    operation = Operation(payload._file, "read", np.zeros(4096, dtype=np.uint8), 0)
    operation.wait()
    with pytest.raises(InvariantError, match="waited for twice"):
        operation.wait()
    payload.close()


def test_the_workers_are_the_whole_queue_and_reads_pass_writes(library, pack) -> None:
    threads = 4
    events = EventQueue()
    payload = opened(pack, threads)
    library.begun.clear()
    library.permits = threading.Semaphore(0)
    pool = WorkerPool(events, threads, None)
    buffer = np.zeros(4096, dtype=np.uint8)
    done: list[BaseException | None] = []

    def submit(priority: Priority, job) -> None:
        pool.submit(priority, lambda: job(0, [buffer]), lambda _, error: done.append(error))

    def begun(count: int) -> list[str]:
        with library.told:
            assert library.told.wait_for(lambda: len(library.begun) >= count, 60)
            return list(library.begun)

    for _ in range(12):
        submit(Priority.WRITE, payload.write)
    begun(2)
    for _ in range(6):
        submit(Priority.READ, payload.read)
    # Of 18 KvikIO has four to do, half of them writes, though all writes came first.
    assert begun(4) == ["write"] * 2 + ["read"] * 2
    for count in range(5, 9):
        library.permits.release()
        assert begun(count)[-1] == "read"
    library.permits.release(18)
    assert events.wait_until(lambda: len(done) == 18, 60)
    assert done == [None] * 18
    assert library.most == threads == library.taken[0]["num_threads"]
    assert pool.close(60)
    events.close()
    payload.close()


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("KvikIO failure at: x.hpp:91: POSIX error on pwrite: No space left on device", "ENOSPC"),
        ("KvikIO failure at: x.hpp:91: POSIX error on pread: Input/output error", "EIO"),
        ("KvikIO failure at: x.hpp:91: POSIX error on pwrite: Operation not permitted", "EPERM"),
        ("KvikIO failure at: x.hpp:89: POSIX error: Operation not permitted", "EBADF"),
        ("KvikIO failure at: x.hpp:91: POSIX error on pread: Unknown error 9999", None),
        ("cuFile error at: x.hpp:12: internal error", None),
        ("", None),
    ],
)
def test_a_text_has_the_name_of_its_errno_or_none(text: str, name: str | None) -> None:
    assert errno_name(text) == name


class Missing(RuntimeError):
    """Stands for cuda.pathfinder's DynamicLibNotFoundError, which is a RuntimeError."""


class Finder:
    def __init__(self, error: Exception):
        self.error = error

    def find_spec(self, name, path=None, target=None):
        if name == "kvikio":
            raise self.error


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'kvikio'"), Missing("libcufile.so.0 not found")]
)
def test_what_to_install_is_said(monkeypatch, error: Exception) -> None:
    monkeypatch.delitem(sys.modules, "kvikio", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(error), *sys.meta_path])
    with pytest.raises(EnvironmentFault, match=r"rangekv\[gds-cu13\]") as caught:
        kvikio.load("compat")
    assert caught.value.code == "no-kvikio"
    assert str(error) in caught.value.message


def test_an_older_kvikio_is_refused(monkeypatch) -> None:
    old = types.ModuleType("kvikio")
    old.__version__ = "26.08.00"
    monkeypatch.setitem(sys.modules, "kvikio", old)
    monkeypatch.setitem(sys.modules, "kvikio.defaults", types.ModuleType("kvikio.defaults"))
    with pytest.raises(
        EnvironmentFault, match=r"found KvikIO 26\.08\.00, expected 26\.10"
    ) as caught:
        kvikio.load("compat")
    assert caught.value.code == "kvikio-version"
