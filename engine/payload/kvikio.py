"""Owns payload I/O through KvikIO: its start, its file, and operations that own what they move.

It never retries, never chooses another path by itself, and never calls a path proved by its name.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from rangekv.engine.devices.cpu import Bytes
from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.payload.cufile_stats import CufileStats
from rangekv.engine.payload.evidence import Evidence, Witness
from rangekv.format.errors import EnvironmentFault, TransferError, UsageError, ensure

log = logging.getLogger("rangekv.engine")

INSTALL = "pip install 'rangekv[gds-cu13]', or rangekv[gds-cu12] for a driver of CUDA 12"
TASK_ALIGNMENT = 4096  # KvikIO takes multiples of a page as the size of a task
PROBE_BYTES = 4096
# What KvikIO raises: RuntimeError for all that the system or cuFile reports, the rest for a buffer
# or a number that it does not take. None of them carries an errno.
LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, OverflowError, OSError)


class DeviceBytes(Protocol):
    """Contiguous bytes in the memory of a CUDA device; its owner is this object."""

    @property
    def nbytes(self) -> int:
        """Bytes that may be moved."""
        ...

    @property
    def __cuda_array_interface__(self) -> Mapping[str, Any]:
        """The address, and whether it may be written, as numba defines it (version 3)."""
        ...


@dataclass(frozen=True, slots=True)
class _Start:
    """How KvikIO was started in this process: its settings and its one pool are global."""

    pid: int
    mode: str
    threads: int
    library: Any


_start: _Start | None = None
# Every operation that may still touch its memory, whoever has let go of it. KvikIO's futures own
# nothing: a buffer that is freed in flight corrupts the heap.
_in_flight: set[Operation] = set()
_kept: list[Any] = []


def load(mode: str) -> Any:
    """Import KvikIO and return it; nothing is started. `mode` is named in errors.

    Raises EnvironmentFault `no-kvikio` (with what to install), `kvikio-version`.
    """
    try:
        import kvikio
        import kvikio.defaults
    # Not ImportError alone: a missing libcufile is cuda.pathfinder's own kind of error.
    except Exception as error:
        raise EnvironmentFault(
            "no-kvikio",
            f"payload {mode!r} needs KvikIO, which cannot be imported ({_first_line(error)}); "
            f"{INSTALL}, or set payload to posix",
        ) from error
    if not hasattr(kvikio, "SummaryMonitor"):
        raise EnvironmentFault(
            "kvikio-version",
            f"found KvikIO {kvikio.__version__}, expected 26.10, the first that counts its bytes "
            f"by backend; {INSTALL}",
        )
    return kvikio


def start(mode: str, threads: int, files: Files = OS_FILES) -> Any:
    """Start KvikIO in this process, once, and return the module.

    `mode` is `compat` (POSIX calls and, to a device, pinned bounce buffers) or `gds` (cuFile, and
    an error where cuFile cannot). `threads` is how many operations will be in flight at most.
    Raises EnvironmentFault `kvikio-forked`, UsageError `payload-differs`, and as `load` does.
    """
    global _start  # noqa: PLW0603
    library = load(mode)
    if _start is not None:
        _check_process(_start.pid, files)
        if (_start.mode, _start.threads) != (mode, threads):
            raise UsageError(
                "payload-differs",
                f"KvikIO runs in this process already with payload {_start.mode!r} and "
                f"{_start.threads} threads; it cannot also run with {mode!r} and {threads}",
            )
        return library
    # KvikIO's own defaults are one thread, and reads through the page cache.
    library.defaults.set(
        {
            "compat_mode": library.CompatMode.ON if mode == "compat" else library.CompatMode.OFF,
            # As many as our own queue lets in at once, one task each: nothing ever waits in
            # KvikIO's queue, which knows neither reads nor writes, only who came first.
            "num_threads": threads,
            # For calls that do not name theirs; every operation of ours is one task.
            "task_size": 32 << 20,
            # Below it device I/O would go through the host on the calling thread, GDS or not.
            "gds_threshold": 0,
            "auto_direct_io_read": True,
            "auto_direct_io_write": True,
        }
    )
    _start = _Start(files.pid(), mode, threads, library)
    return library


def _check_process(pid: int, files: Files) -> None:
    """Refuse a child forked after the start: the threads of KvikIO are its parent's alone."""
    if files.pid() != pid:
        raise EnvironmentFault(
            "kvikio-forked",
            f"KvikIO was started in process {pid} and this is a fork of it, {files.pid()}, where "
            "an operation would wait for ever; use the spawn start method, or open the engine "
            "after the fork",
        )


class Operation:
    """One read or write of one contiguous range; it owns buffer and file until it is done.

    Whoever lets go of it without `wait` frees nothing: it stays referenced while it may be moving.
    """

    __slots__ = ("_buffer", "_file", "_future", "length", "offset", "verb")

    def __init__(self, file: Any, verb: str, buffer: Bytes | DeviceBytes, offset: int) -> None:
        """Submit it: `verb` is `read` or `write`, `offset` in bytes. Raises TransferError."""
        self.verb = verb
        self.offset = offset
        self.length = buffer.nbytes
        self._file = file
        self._buffer = buffer
        if verb == "read":
            # KvikIO overwrites bytes objects and read-only arrays without a word.
            _require_writable(buffer, offset)
        submit = file.pread if verb == "read" else file.pwrite
        task_bytes = max(1, -(-self.length // TASK_ALIGNMENT)) * TASK_ALIGNMENT
        _in_flight.add(self)
        try:
            self._future = submit(buffer, self.length, offset, task_bytes)
        except LIBRARY_ERRORS as error:
            _in_flight.discard(self)
            raise self._failure(error) from error

    def wait(self) -> None:
        """Return when every byte has moved; raise TransferError otherwise. Only once.

        Either way nothing touches the buffer any more: KvikIO raises after its last task.
        """
        future, self._future = self._future, None
        ensure(future is not None, "an operation was waited for twice")
        # What is neither a return nor an error of KvikIO is no evidence: it stays in flight then.
        try:
            got = future.get()
        except LIBRARY_ERRORS as error:
            _in_flight.discard(self)
            raise self._failure(error) from error
        _in_flight.discard(self)
        if got != self.length:
            raise TransferError(
                f"short-{self.verb}",
                f"{self.verb} of {self.length} bytes returned {got}; expected all of them",
                offset=self.offset,
            )

    def touches(self, file: Any) -> bool:
        """Whether this operation uses `file`."""
        return self._file is file

    def _failure(self, error: BaseException) -> TransferError:
        what = f"{self.verb} of {self.length} bytes"
        if str(error).endswith("POSIX error on pread: EOF"):
            return TransferError(
                "short-read",
                f"{what} met the end of the file; the pack file may be truncated",
                offset=self.offset,
            )
        name = errno_name(str(error))
        why = name or f"an unknown error of KvikIO: {_first_line(error)}"
        return TransferError(f"{self.verb}-failed", f"{what} failed with {why}", offset=self.offset)


def errno_name(text: str) -> str | None:
    """Return the name of the errno (`ENOSPC`) that a text of KvikIO stands for, None if unknown."""
    if text.endswith("POSIX error: Operation not permitted"):
        return "EBADF"  # KvikIO's own words for it; EPERM is told as "POSIX error on pread: …"
    _, found, rest = text.rpartition(" POSIX error on ")
    if not found:
        return None
    _, _, reason = rest.partition(": ")
    names = [name for number, name in errno.errorcode.items() if os.strerror(number) == reason]
    return names[0] if len(names) == 1 else None


class KvikioPayload:
    """Payload I/O of one pack file through KvikIO: the same calls as PosixPayload.

    Every call waits for what it has submitted, one operation at a time, so that the pool of workers
    that makes the calls is the whole queue, and reads pass writes there. A return, of either kind,
    is the evidence that frees a bank. Buffers lie in host memory or, with
    `__cuda_array_interface__`, on a device. `direct` says whether KvikIO opened with O_DIRECT.
    """

    def __init__(self, files: Files, pack_fd: int, *, mode: str, threads: int) -> None:
        """Start KvikIO where it has not been, open what `pack_fd` has open, and read once.

        Raises EnvironmentFault `no-kvikio`, `kvikio-version`, `kvikio-forked`, `kvikio-open`,
        `other-file`, `no-libcuda`, `kvikio-io`; UsageError `payload-differs`.
        """
        self._files = files
        self._pid = files.pid()
        self.mode = mode
        self.library = start(mode, threads, files)
        self._file: Any = _open_locked(self.library, files, pack_fd, mode)
        self.direct = bool(self._file._handle.is_direct_io_supported())
        self._registered: list[Any] = []
        try:
            self.read(0, [np.empty(PROBE_BYTES, dtype=np.uint8)])
            cufile = _cufile_stats(self.library) if mode == "gds" else None
        except BaseException as error:
            self.close()
            if isinstance(error, TransferError):
                raise _no_io(mode, error) from error
            raise
        self.witness = Witness(self.library, files, pack_fd, cufile)
        self._begin = self.witness.snapshot()

    @property
    def path(self) -> str:
        """What the bytes moved so far prove: see Evidence.path."""
        return self.evidence().path

    def evidence(self) -> Evidence:
        """Return what has been counted since the opening."""
        return self.witness.since(self._begin)

    def account(self) -> str:
        """Return the evidence as one line of key=value."""
        return self.evidence().line()

    def read(self, offset: int, buffers: Sequence[Bytes | DeviceBytes]) -> int:
        """Fill `buffers` from byte `offset`; return the number of operations, one a buffer."""
        return self._move("read", offset, buffers)

    def read_scattered(self, offset: int, iovec: npt.NDArray[np.uint64]) -> int:
        """Fill the places of `iovec` (uint64[n, 2]: address, bytes); return the operations.

        Neighbours in memory are one operation. The caller keeps the memory, which is the host's,
        alive until return.
        """
        return self._move("read", offset, _places(iovec))

    def write(self, offset: int, buffers: Sequence[Bytes | DeviceBytes]) -> int:
        """Write `buffers` at byte `offset`; return the number of operations, one a buffer."""
        return self._move("write", offset, buffers)

    def register(self, memory: Any) -> None:
        """Register memory of a device with cuFile, which else does it anew for each transfer.

        It stays referenced until `close`: a driver can deadlock over memory freed before that.
        """
        if self.mode == "gds":
            try:
                self.library.memory_register(memory)
            except LIBRARY_ERRORS as error:
                raise EnvironmentFault(
                    "not-registered",
                    f"cuFile does not register {memory.nbytes} bytes of the GPU for direct access "
                    f"({_first_line(error)}); use smaller banks, or set payload to compat",
                ) from error
            self._registered.append(memory)

    def close(self) -> None:
        """Close what KvikIO opened; only once nothing moves any more. Idempotent."""
        file, self._file = self._file, None
        if file is None:
            return
        ensure(
            not any(operation.touches(file) for operation in list(_in_flight)),
            "a file was closed under an operation of KvikIO",
        )
        while self._registered:
            memory = self._registered.pop()
            try:
                self.library.memory_deregister(memory)
            except LIBRARY_ERRORS as error:
                # Rather held for good than freed under the driver; and a close goes on.
                _kept.append(memory)
                log.warning("cuFile keeps %d bytes registered: %s", memory.nbytes, error)
        file.close()

    def _move(self, verb: str, offset: int, buffers: Sequence[Bytes | DeviceBytes]) -> int:
        _check_process(self._pid, self._files)
        file = self._file
        if file is None:
            raise TransferError("payload-closed", f"{verb} of a closed pack file", offset=offset)
        for buffer in buffers:
            Operation(file, verb, buffer, offset).wait()
            offset += buffer.nbytes
        return len(buffers)


def _open_locked(library: Any, files: Files, pack_fd: int, mode: str) -> Any:
    """Open what the locked descriptor has open, not what its name has come to mean since.

    KvikIO takes no descriptor and opens a path twice; this path leads to the open file itself.
    The lock is the descriptor's: closing KvikIO's own does not give it up.
    """
    name = f"/proc/self/fd/{pack_fd}"
    try:
        file = library.CuFile(name, "r+")
    except LIBRARY_ERRORS as error:
        raise EnvironmentFault(
            "kvikio-open",
            f"payload {mode!r}: KvikIO cannot open the pack file ({_first_line(error)}); set "
            "payload to posix",
        ) from error
    opened, locked = files.statx(file.fileno()), files.statx(pack_fd)
    if (opened.device, opened.inode) != (locked.device, locked.inode):
        file.close()
        raise EnvironmentFault(
            "other-file",
            f"KvikIO opened inode {opened.inode}, expected the locked {locked.inode}; is /proc "
            "mounted here?",
        )
    return file


def _cufile_stats(library: Any) -> CufileStats | None:
    """Return the counts of the cuFile that KvikIO has loaded and, by opening a file, started."""
    try:
        cufile = ctypes.CDLL("libcufile.so.0")
    except OSError:
        return None
    driver = import_module(f"{library.__name__}.cufile_driver")
    return CufileStats.start(cufile, driver.libcufile_version())


def _no_io(mode: str, error: TransferError) -> EnvironmentFault:
    if "libcuda" in error.message:
        return EnvironmentFault(
            "no-libcuda",
            f"payload {mode!r} needs libcuda.so.1, which is not there: without a CUDA driver "
            "KvikIO moves nothing, not even to host memory; install the driver (a container needs "
            "--gpus), or set payload to posix",
        )
    return EnvironmentFault(
        "kvikio-io", f"payload {mode!r}: a first {error.message}; set payload to posix"
    )


def _require_writable(buffer: Bytes | DeviceBytes, offset: int) -> None:
    interface = getattr(buffer, "__cuda_array_interface__", None)
    # Stubs for Python 3.11 do not know that an array is a buffer.
    host: Any = buffer
    read_only = memoryview(host).readonly if interface is None else interface["data"][1]
    if read_only:
        raise TransferError("read-only-target", "a read was given read-only memory", offset=offset)


def _places(iovec: npt.NDArray[np.uint64]) -> list[Bytes]:
    """Return host memory as arrays, one for each run of places that touch."""
    if not len(iovec):
        return []
    addresses, lengths = iovec[:, 0], iovec[:, 1]
    ends = addresses + lengths
    first = np.flatnonzero(np.append(True, ends[:-1] != addresses[1:]))
    sizes = np.add.reduceat(lengths, first)
    return [_host(int(at), int(size)) for at, size in zip(addresses[first], sizes, strict=True)]


def _host(address: int, size: int) -> Bytes:
    place = memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
    return np.frombuffer(place, dtype=np.uint8)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
