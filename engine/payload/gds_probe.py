"""Owns the proof that a file reaches GPU memory past the host: one read in a process of its own.

Opening cuFile's driver has crashed and hung where the machine was not set up for it: never here.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from rangekv.engine.files import OS_FILES
from rangekv.engine.payload.kvikio import KvikioPayload
from rangekv.format.errors import EnvironmentFault, RangeError

PROBE_BYTES = 1 << 20
DEADLINE_S = 30.0
AFTER_KILL_S = 2.0


@dataclass(frozen=True, slots=True)
class GdsProbe:
    """`proved` only where cuFile itself counted reads past the host, and none through it."""

    proved: bool
    detail: str


def probe(
    path: str, deadline_s: float = DEADLINE_S, command: Sequence[str] | None = None
) -> GdsProbe:
    """Read the first MiB of the file at `path` into GPU memory, in another process.

    Whatever becomes of that process is an answer: nothing is raised. It is killed at the deadline.
    """
    argv = command or (sys.executable, "-m", "rangekv.engine.payload.gds_probe")
    # Its answer and cuFile's log go there; a child that is stuck in the kernel may keep it.
    with (
        tempfile.TemporaryDirectory(prefix="rangekv-", ignore_cleanup_errors=True) as folder,
        open(os.path.join(folder, "answer"), "w+", encoding="utf-8") as said,
    ):
        try:
            child = subprocess.Popen(
                [*argv, path],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.DEVNULL,
                cwd=folder,
            )
        except OSError as error:
            return GdsProbe(False, f"the probe could not be started: {error.strerror}")
        try:
            status = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            child.kill()
            with suppress(subprocess.TimeoutExpired):
                child.wait(AFTER_KILL_S)
            return GdsProbe(False, f"the probe did not answer within {deadline_s:g} s")
        said.seek(0)
        return _understood(said.read(), status)


def _understood(told: str, status: int) -> GdsProbe:
    if status < 0:
        return GdsProbe(False, f"the probe died of {signal.Signals(-status).name}")
    try:
        answer = json.loads(told.splitlines()[-1])
        return GdsProbe(answer["proved"] is True, str(answer["detail"]))
    except (ValueError, LookupError, TypeError):
        return GdsProbe(False, f"the probe ended with status {status} and no answer")


class DeviceBuffer:
    """Memory of the first GPU, taken through the driver: the probe needs no torch."""

    def __init__(self, size: int) -> None:
        self.nbytes = size
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise EnvironmentFault("cuda", "libcuda.so.1 cannot be loaded") from error
        context, address = ctypes.c_void_p(), ctypes.c_uint64()
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self._call("cuCtxSetCurrent", context)
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._address = address

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self._address.value, False),
            "version": 3,
            "strides": None,
        }

    def content(self) -> bytes:
        """Return the bytes that are in it."""
        host = ctypes.create_string_buffer(self.nbytes)
        self._call("cuMemcpyDtoH_v2", host, self._address, ctypes.c_size_t(self.nbytes))
        return host.raw

    def _call(self, name: str, *arguments: Any) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result:
            raise EnvironmentFault("cuda", f"{name} returned CUDA error {result}")


def answer(path: str, mode: str = "gds") -> GdsProbe:
    """Do the read, in this process, and say what it proves."""
    try:
        return _answer(path, mode)
    except RangeError as error:
        return GdsProbe(False, error.message)


def _answer(path: str, mode: str) -> GdsProbe:
    files = OS_FILES
    folder, _, name = path.rpartition("/")
    dir_fd = files.open_dir(folder)
    fd = files.open_pack(dir_fd, name, write=True, direct=False)
    buffer = DeviceBuffer(PROBE_BYTES)
    payload = KvikioPayload(files, fd, mode=mode, threads=1)
    begin = payload.witness.snapshot()
    payload.read(0, [buffer])
    evidence = payload.witness.since(begin)
    expected = np.empty(PROBE_BYTES, dtype=np.uint8)
    files.preadv(fd, [expected], 0)
    payload.close()
    if buffer.content() != expected.tobytes():
        return GdsProbe(
            False, f"the bytes in GPU memory are not those of the file; {evidence.line()}"
        )
    return GdsProbe(evidence.path == "cufile-gds", evidence.line())


if __name__ == "__main__":
    result = answer(sys.argv[1])
    print(json.dumps({"proved": result.proved, "detail": result.detail}))
