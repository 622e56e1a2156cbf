"""Scenes of KvikIO at work, each in a process of its own: python -m support.kvikio_scenes NAME."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import io
import logging
import os
import resource
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rangekv.engine import EngineConfig
from rangekv.engine.devices.cpu import bank_memory
from rangekv.engine.files import OS_FILES
from rangekv.engine.payload import gds_probe
from rangekv.engine.payload.kvikio import KvikioPayload, Operation, load, start
from rangekv.engine.payload.posix import PosixPayload
from rangekv.format.errors import EnvironmentFault, InvariantError, RangeError, TransferError

from support.rig import Rig, tokens_of

MIB = 1 << 20
FILE_BYTES = 8 * MIB
# (offset, bytes): aligned, odd, one byte, across tasks, to the last byte
RANGES = [
    *((0, size) for size in (1, 511, 512, 4095, 4096, 4097, 65536, MIB, MIB + 1, 5 * MIB)),
    *((offset, 100_001) for offset in (1, 511, 512, 777, 4095, 4096, 4097, MIB - 1)),
    (FILE_BYTES - 1, 1),
    (FILE_BYTES - 4097, 4097),
    (777, FILE_BYTES - 777),
]
SHIFTS = (0, 1, 512, 777)  # of the buffer against a page


class Device:
    """Memory of the fake device: unreachable by the host, `seen` is the second view of it."""

    def __init__(self, driver: ctypes.CDLL, size: int, shift: int = 0, read_only: bool = False):
        driver.fake_device_alloc.restype = ctypes.c_void_p
        driver.fake_device_alloc.argtypes = (ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p))
        host = ctypes.c_void_p()
        address = driver.fake_device_alloc(size + shift, ctypes.byref(host))
        assert address
        assert host.value
        self.nbytes = size
        self.seen = np.frombuffer(
            (ctypes.c_uint8 * size).from_address(host.value + shift), dtype=np.uint8
        )
        self.__cuda_array_interface__ = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address + shift, read_only),
            "version": 3,
            "strides": None,
        }


class Part:
    """The first bytes of a Device."""

    def __init__(self, device: Device, size: int):
        self.nbytes = size
        self.__cuda_array_interface__ = {**device.__cuda_array_interface__, "shape": (size,)}


def content(size: int = FILE_BYTES, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def new_file(folder: Path, name: str = "pack", data: np.ndarray | None = None) -> int:
    (content() if data is None else data).tofile(folder / name)
    return os.open(folder / name, os.O_RDWR)


def opened(fd: int, threads: int = 4) -> KvikioPayload:
    return KvikioPayload(OS_FILES, fd, mode="compat", threads=threads)


def raised(call: Callable[[], Any]) -> RangeError:
    try:
        call()
    except RangeError as error:
        return error
    raise AssertionError("nothing was raised")


def host_memory(folder: Path, driver: ctypes.CDLL) -> None:
    """Reads and writes of host memory are those of the posix path, byte for byte."""
    fd, twin = new_file(folder), new_file(folder, "twin")
    payload, posix = opened(fd), PosixPayload(OS_FILES, twin, direct=True)
    assert payload.direct
    for offset, size in RANGES:
        for shift in SHIFTS:
            got, expected = (bank_memory(size + 4096)[shift : shift + size] for _ in range(2))
            assert payload.read(offset, [got]) == posix.read(offset, [expected]) == 1
            assert np.array_equal(got, expected), (offset, size, shift)
            got[:] = content(size, seed=size + shift)
            assert payload.write(offset, [got]) == posix.write(offset, [got]) == 1
    assert (folder / "pack").read_bytes() == (folder / "twin").read_bytes()


def many_places(folder: Path, driver: ctypes.CDLL) -> None:
    """Several buffers, and the places of an iovec in any order, take consecutive bytes."""
    fd = new_file(folder)
    payload, posix, data = opened(fd), PosixPayload(OS_FILES, fd, direct=True), content()
    parts = [bank_memory(size) for size in (4096, 8192, 100)]
    assert payload.read(4096, parts) == 3
    assert np.array_equal(np.concatenate(parts), data[4096 : 4096 + 12388])
    block, count = 4096, 1500  # more than the kernel takes in one call
    order = np.random.default_rng(3).permutation(count)
    order[100:200] = np.sort(order[100:200])
    for ids in (order, np.arange(count), order[:1], order[:0]):
        memory = [bank_memory(count * block) for _ in range(2)]
        for one, reader in zip(memory, (payload, posix), strict=True):
            iovec = np.empty((len(ids), 2), dtype=np.uint64)
            iovec[:, 0] = one.ctypes.data + ids * block
            iovec[:, 1] = block
            reader.read_scattered(4096, iovec)
        assert np.array_equal(*memory)
    runs = np.array([[memory[0].ctypes.data + i * block, block] for i in range(count)], np.uint64)
    assert payload.read_scattered(0, runs) == 1


def device_memory(folder: Path, driver: ctypes.CDLL) -> None:
    """Reads and writes of device memory go through copies of the driver, and are the same bytes."""
    fd, twin = new_file(folder), new_file(folder, "twin")
    payload, posix = opened(fd), PosixPayload(OS_FILES, twin, direct=True)
    driver.fake_copied_bytes.restype = ctypes.c_long
    for shift in SHIFTS:
        device = Device(driver, FILE_BYTES, shift)
        for offset, size in RANGES:
            device.seen[:] = 0xDB
            expected, copied = np.empty(size, dtype=np.uint8), driver.fake_copied_bytes()
            posix.read(offset, [expected])
            assert payload.read(offset, [Part(device, size)]) == 1
            assert np.array_equal(device.seen[:size], expected), (offset, size, shift)
            assert (device.seen[size:] == 0xDB).all(), "bytes beyond the buffer were written"
            assert driver.fake_copied_bytes() - copied == size
            device.seen[:size] = content(size, seed=size + shift)
            assert payload.write(offset, [Part(device, size)]) == 1
            posix.write(offset, [device.seen[:size].copy()])
    assert (folder / "pack").read_bytes() == (folder / "twin").read_bytes()


def end_of_file(folder: Path, driver: ctypes.CDLL) -> None:
    """A read across or past the end is an error with the code of the posix path."""
    fd = new_file(folder)
    payload, posix = opened(fd), PosixPayload(OS_FILES, fd, direct=True)
    device = Device(driver, 8192)
    for offset in (FILE_BYTES - 4096, FILE_BYTES, 2 * FILE_BYTES):
        buffer = bank_memory(8192)
        codes = {raised(lambda p=p: p.read(offset, [buffer])).code for p in (payload, posix)}  # noqa: B023
        error = raised(lambda: payload.read(offset, [device]))  # noqa: B023
        assert codes | {error.code} == {"short-read"}
        assert error.offset == offset
        assert "8192 bytes" in error.message


def errors(folder: Path, driver: ctypes.CDLL) -> None:
    """What KvikIO tells in words has the name of its errno; what it does not tell stays unknown."""
    fd = new_file(folder)
    payload, library, buffer = opened(fd), load("compat"), bank_memory(MIB)
    full = library.CuFile("/dev/full", "r+")
    error = raised(lambda: Operation(full, "write", buffer, 4096).wait())
    assert (error.code, error.offset) == ("write-failed", 4096)
    assert error.message == f"write of {MIB} bytes failed with ENOSPC"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, resource.RLIM_INFINITY))
    error = raised(lambda: payload.write(FILE_BYTES, [buffer]))
    assert error.message == f"write of {MIB} bytes failed with EFBIG"
    assert payload.write(FILE_BYTES - MIB, [buffer]) == 1
    only_read = library.CuFile(folder / "pack", "r")
    error = raised(lambda: Operation(only_read, "write", buffer, 0).wait())
    assert "EBADF" in error.message
    only_read.close()
    error = raised(lambda: Operation(only_read, "read", buffer, 0).wait())
    assert "EBADF" in error.message
    error = raised(lambda: payload.read(0, [bank_memory(8192)[::2]]))
    assert "unknown error of KvikIO: Array must be contiguous" in error.message
    error = raised(lambda: payload.read(-1, [buffer]))
    assert (error.code, error.offset) == ("read-failed", -1)
    payload.close()
    payload.close()
    assert raised(lambda: payload.read(0, [buffer])).code == "payload-closed"


def read_only(folder: Path, driver: ctypes.CDLL) -> None:
    """KvikIO would overwrite what Python calls read-only; we refuse, and it keeps its bytes."""
    fd = new_file(folder)
    payload = opened(fd)
    whole = np.zeros(4096, dtype=np.uint8)
    array = whole[:]
    array.flags.writeable = False
    device = Device(driver, 4096, read_only=True)
    device.seen[:] = 0
    for buffer in (array, np.frombuffer(bytes(4096), dtype=np.uint8), device):
        assert raised(lambda b=buffer: payload.read(0, [b])).code == "read-only-target"
        assert payload.write(0, [buffer]) == 1
    assert not whole.any()
    assert not device.seen.any()


def owned(folder: Path, driver: ctypes.CDLL) -> None:
    """Buffers and file of operations that everybody has let go of live until these are done."""
    fd = new_file(folder)
    payload = opened(fd, threads=1)
    live = []
    for _ in range(24):
        buffer = np.empty(FILE_BYTES, dtype=np.uint8)
        live.append(weakref.ref(buffer))
        Operation(payload._file, "read", buffer, 0)
        del buffer
    gc.collect()
    assert all(ref() is not None for ref in live)
    refused = raised(payload.close)
    assert isinstance(refused, InvariantError), "a file was closed under its operations"
    last = Operation(opened(fd, threads=1)._file, "read", np.empty(1, dtype=np.uint8), 0)
    last.wait()  # one thread, first in, first out: all of them are done
    assert all(np.array_equal(ref(), content()) for ref in live)
    assert isinstance(raised(last.wait), InvariantError), "a second wait went through"


def forked(folder: Path, driver: ctypes.CDLL) -> None:
    """A child of a process with KvikIO is refused, and not left waiting for ever."""
    fd = new_file(folder)
    payload, buffer = opened(fd), bank_memory(4096)
    calls = [lambda: payload.read(0, [buffer]), lambda: start("compat", 4), lambda: opened(fd)]
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it would wait for ever, and outlive the test
        codes = [raised(call).code for call in calls]
        os._exit(0 if codes == ["kvikio-forked"] * 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert payload.read(0, [buffer]) == 1


def forked_before(folder: Path, driver: ctypes.CDLL) -> None:
    """A fork after the import and before the start may use KvikIO."""
    fd = new_file(folder)
    load("compat")
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # it would wait for ever, and outlive the test
        buffer = bank_memory(4096)
        assert opened(fd).read(0, [buffer]) == 1
        os._exit(0 if np.array_equal(buffer, content()[:4096]) else 1)
    assert os.waitpid(child, 0)[1] == 0


def settings(folder: Path, driver: ctypes.CDLL) -> None:
    """The defaults are ours, whatever the environment says; other ones are refused afterwards."""
    fd = new_file(folder)
    payload = opened(fd, threads=3)
    get = payload.library.defaults.get
    assert get("compat_mode") == payload.library.CompatMode.ON
    expected = {
        "num_threads": 3,
        "task_size": 32 * MIB,
        "gds_threshold": 0,
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
    }
    assert {name: get(name) for name in expected} == expected
    for mode, threads in (("gds", 3), ("compat", 4)):
        assert raised(lambda m=mode, t=threads: start(m, t)).code == "payload-differs"


def evidence(folder: Path, driver: ctypes.CDLL) -> None:
    """What is told of a phase is what moved in it, and leaves no page in the cache."""
    payload = opened(new_file(folder))
    assert payload.path == "unproved", "the read at the start counted as evidence"
    payload.library.drop_file_page_cache(folder / "pack")
    begin = payload.witness.snapshot(watch=(0, FILE_BYTES))
    payload.read(0, [bank_memory(MIB)])
    seen = payload.witness.since(begin)
    assert (seen.path, seen.host_bytes, seen.cufile_bytes) == ("cufile-compat", MIB, 0)
    assert (seen.calls, seen.resident_bytes) == (None, 0)
    payload.read(MIB, [Device(driver, MIB)])
    assert payload.witness.since(begin).host_bytes == 2 * MIB
    begin = payload.witness.snapshot(watch=(0, FILE_BYTES))
    assert payload.witness.since(begin).path == "unproved"
    (folder / "pack").read_bytes()
    assert payload.witness.since(begin).resident_bytes == FILE_BYTES
    assert payload.path == "cufile-compat"


def probe_answer(folder: Path, driver: ctypes.CDLL) -> None:
    """The probe's own steps, all but cuFile: here the bytes pass the host, and it says so."""
    os.close(new_file(folder))
    told = gds_probe.answer(str(folder / "pack"), mode="compat")
    assert not told.proved
    assert told.detail.startswith(f"path=cufile-compat host_bytes={gds_probe.PROBE_BYTES} ")


def engine(folder: Path, driver: ctypes.CDLL) -> None:
    """A whole engine on KvikIO; what it has saved is served by the posix path too."""
    log, said = logging.getLogger("rangekv.engine"), io.StringIO()
    log.addHandler(logging.StreamHandler(said))
    log.setLevel(logging.INFO)
    for placement in ("banks", "direct"):
        place = folder / placement
        place.mkdir(0o700)
        config = EngineConfig(
            read_workers=4, lock_wait_s=0.5, placement=placement, payload="compat"
        )
        rig = Rig(place, config=config)
        assert rig.engine.stats().path == "unproved"
        tokens = [tokens_of(seed, 2048) for seed in range(3)]
        for index, one in enumerate(tokens):
            assert rig.save(one, piece=(None, 512, 32)[index])
        assert rig.engine.stats().path == "cufile-compat"
        rig = rig.reopen()
        assert "payload path=cufile-compat host_bytes=" in said.getvalue()
        for one in tokens:
            assert rig.restore(one) == len(one)
        stats = rig.engine.stats()
        assert stats.path == "cufile-compat"
        assert bool(stats.counters["direct_spans"]) == (placement == "direct")
        rig.config = dataclasses.replace(config, payload="posix")
        rig = rig.reopen()
        for one in tokens:
            assert rig.restore(one) == len(one)
        assert rig.engine.stats().path == "posix-direct"
        assert rig.engine.close(30).state == "clean"
        names = map(os.path.realpath, Path("/proc/self/fd").iterdir())
        assert not any(name.endswith("range.pack") for name in names), "the pack is left open"


def the_locked_file(folder: Path, driver: ctypes.CDLL) -> None:
    """What is read is what the descriptor has open, though its name means another file by now."""
    fd = new_file(folder)
    content(seed=9).tofile(folder / "other")
    os.rename(folder / "other", folder / "pack")
    buffer = bank_memory(MIB)
    opened(fd).read(MIB, [buffer])
    assert np.array_equal(buffer, content()[MIB : 2 * MIB])


def no_driver(folder: Path, driver: ctypes.CDLL | None) -> None:
    """Without a CUDA driver KvikIO moves nothing; the refusal says so before anything is served."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        fd = new_file(folder)
        error = raised(lambda: opened(fd))
        assert isinstance(error, EnvironmentFault)
        assert error.code == "no-libcuda"
        assert "set payload to posix" in error.message
    else:
        print("this machine has a CUDA driver")


def main(name: str, folder: str, driver: str | None = None) -> None:
    # Later look-ups by this soname, KvikIO's own, find what is loaded already.
    library = None if driver is None else ctypes.CDLL(driver, ctypes.RTLD_GLOBAL)
    globals()[name](Path(folder), library)


if __name__ == "__main__":
    assert issubclass(TransferError, RangeError)
    main(*sys.argv[1:])
