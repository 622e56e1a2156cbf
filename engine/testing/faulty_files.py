"""Files that fail, fall short, lie or stand still where a test says so, and are real elsewhere.

Owns the injected faults of one file seam; never decides what a fault must lead to.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rangekv.engine.files import Files
from rangekv.engine.folder import TEMP_PREFIX
from rangekv.format.geometry import ALIGNMENT, DATA_OFFSET

READS = ("preadv", "preadv_iovec")
WRITES = ("pwritev",)
OPENS = ("open_dir", "open_file", "open_pack", "create_temp")
# Every method that reaches the kernel and can fail; what asks for time or chance is none of them.
OPERATIONS = (
    *OPENS,
    *READS,
    *WRITES,
    *("close", "flock", "statx", "statx_at", "filesystem_magic", "free_bytes"),
    *("fallocate", "pwrite", "fsync", "fdatasync", "fsync_dir", "rename", "rename_noreplace"),
    *("unlink", "mkdir", "rmdir", "listdir", "direct_alignment"),
)
_BUFFERED = (*READS, *WRITES, "pwrite")
_STALE = 0x5A


class Call:
    """One call of one operation, about to be made."""

    def __init__(self, name: str, file: str, arguments: tuple[Any, ...], go: Callable[..., Any]):
        self.name = name
        self.file = file
        """Name of the file or directory it is about; a temp's chance part is left out."""
        self.arguments = arguments
        self._go = go

    @property
    def offset(self) -> int:
        """Byte offset of a transfer, else 0."""
        return int(self.arguments[2]) if self.name in _BUFFERED else 0

    @property
    def is_payload(self) -> bool:
        """Whether it moves KV, not metadata."""
        return self.name in (*READS, *WRITES) and self.offset >= DATA_OFFSET

    def go(self) -> Any:
        """Make the call as it is."""
        return self._go(*self.arguments)

    def go_at(self, offset: int) -> Any:
        """Make a transfer at another byte offset."""
        return self._go(*self.arguments[:2], offset)

    def go_with(self, data: bytes) -> Any:
        """Write other bytes in this call's place."""
        aligned = _aligned(data).data
        one = aligned if self.name == "pwrite" else [aligned]
        return self._go(self.arguments[0], one, self.arguments[2])

    def views(self) -> list[memoryview]:
        """Return the memory of a transfer, piece by piece."""
        if self.name == "preadv_iovec":
            return [
                memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")
                for address, size in self.arguments[1].tolist()
            ]
        pieces = [self.arguments[1]] if self.name == "pwrite" else self.arguments[1]
        return [memoryview(piece).cast("B") for piece in pieces]

    @property
    def length(self) -> int:
        """Bytes that a transfer was asked for."""
        return sum(view.nbytes for view in self.views()) if self.name in _BUFFERED else 0

    def line(self) -> str:
        """Return the call as one line that is the same in every run."""
        place = f" {self.offset}+{self.length}" if self.name in _BUFFERED else ""
        return f"{self.name} {self.file}{place}"


Act = Callable[[Call], Any]


def error(number: int) -> Act:
    """Fail with an errno, doing nothing; a descriptor is closed all the same, as in Linux."""

    def act(call: Call) -> Any:
        if call.name == "close":
            call.go()
        raise OSError(number, f"injected into {call.name}")

    return act


def raising(exception: BaseException) -> Act:
    """Raise something that no kernel raises."""

    def act(call: Call) -> Any:
        raise exception

    return act


def short(count: Callable[[int], int]) -> Act:
    """Move and report only `count(asked)` bytes; the rest of a reader's memory stays stale."""

    def act(call: Call) -> int:
        moved = max(0, count(call.length))
        if call.name in READS:
            call.go()
            left = moved
            for view in call.views():
                view[left:] = bytes([_STALE]) * max(0, view.nbytes - left)
                left = max(0, left - view.nbytes)
        else:
            # Direct I/O moves whole pieces, whatever it reports.
            whole = moved if call.name == "pwrite" else moved // ALIGNMENT * ALIGNMENT
            if whole:
                call.go_with(b"".join(call.views())[:whole])
        return moved

    return act


def torn(number: int) -> Act:
    """Write the first half in pieces of 4096 and then fail."""

    def act(call: Call) -> Any:
        short(lambda asked: asked // 2)(call)
        raise OSError(number, f"injected into {call.name} after half of it")

    return act


def lost(call: Call) -> Any:
    """Report a write that never reached the disk."""
    return call.length


def misdirected(distance: int) -> Act:
    """Read or write `distance` bytes away from where it was asked to."""
    return lambda call: call.go_at(call.offset + distance)


def flipped(place: Callable[[int], int]) -> Act:
    """Flip one bit of byte `place(asked)` on the way, in either direction."""

    def act(call: Call) -> Any:
        at = place(call.length)
        if call.name in WRITES:
            data = bytearray(b"".join(call.views()))
            data[at] ^= 1 << at % 8
            return call.go_with(bytes(data))
        count = call.go()
        for view in call.views():
            if at < view.nbytes:
                view[at] ^= 1 << at % 8
                break
            at -= view.nbytes
        return count

    return act


class Hold:
    """A place where calls stand still, in the kernel's stead, until they are let go."""

    def __init__(self, then: Act = Call.go) -> None:
        self._reached = threading.Semaphore(0)
        self._let_go = threading.Event()
        self._then = then

    def wait_reached(self, deadline_s: float) -> bool:
        """Wait until one more call stands here; False if none came."""
        return self._reached.acquire(timeout=deadline_s)

    def let_go(self) -> None:
        """Let the calls go on; those that come later do not stop."""
        self._let_go.set()

    def stand(self) -> None:
        """Stand here until the hold is let go."""
        self._reached.release()
        self._let_go.wait()

    def __call__(self, call: Call) -> Any:
        self.stand()
        return self._then(call)


@dataclass(slots=True)
class _Armed:
    """A fault that acts on `times` calls that match, after `skip` others went through."""

    matches: Callable[[Call], bool]
    act: Act
    skip: int
    times: float


class FaultyFiles(Files):
    """The real file seam with faults armed on any of its operations, and a log of all of them."""

    def __init__(self) -> None:
        self.calls: deque[str] = deque(maxlen=10_000)
        self.call_count = 0
        self._names: dict[int, str] = {}
        self._armed: list[_Armed] = []
        self._lock = threading.Lock()

    def arm(
        self,
        matches: str | Callable[[Call], bool],
        act: Act,
        *,
        skip: int = 0,
        times: float = 1,
    ) -> None:
        """Let `act` stand for `times` calls (infinity for all), after `skip` that went through.

        `matches` is an operation, an operation and a file (`fsync range.pack`), or a predicate.
        """
        test = _named(matches) if isinstance(matches, str) else matches
        with self._lock:
            self._armed.append(_Armed(test, act, skip, times))

    def on_read(self, act: Act, *, skip: int = 0, times: float = 1) -> None:
        """Arm a fault on reads of KV."""
        self.arm(lambda call: call.is_payload and call.name in READS, act, skip=skip, times=times)

    def on_write(self, act: Act, *, skip: int = 0, times: float = 1) -> None:
        """Arm a fault on writes of KV."""
        self.arm(lambda call: call.is_payload and call.name in WRITES, act, skip=skip, times=times)

    def disarm(self, act: Act | None = None) -> None:
        """Let everything through from now on, or all but one act; what stands still goes on so."""
        with self._lock:
            self._armed = [one for one in self._armed if act is not None and one.act is not act]

    def through(self, name: str, go: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Make one call, or what is armed in its place."""
        call = Call(name, self._file(name, arguments), arguments, go)
        act = self._count(call)
        note = "" if act is None else " (fault)"
        try:
            result = call.go() if act is None else act(call)
        except BaseException as raised:
            self.calls.append(f"{call.line()}{note} raised {type(raised).__name__}")
            raise
        self.calls.append(f"{call.line()}{note}")
        if name in OPENS:
            self._names[result] = call.file
        return result

    def _file(self, name: str, arguments: tuple[Any, ...]) -> str:
        given = [one for one in arguments if isinstance(one, str)]
        if given:
            last = given[-1].rpartition("/")[2]
            if last.startswith(TEMP_PREFIX):
                return f"{TEMP_PREFIX}{last.split('.')[2]}.tmp"
            return last
        return self._names.get(arguments[0], "?") if isinstance(arguments[0], int) else "?"

    def _count(self, call: Call) -> Act | None:
        """Count this call against every armed fault that it matches; return what happens to it."""
        with self._lock:
            self.call_count += 1
            chosen: Act | None = None
            for armed in self._armed:
                if not armed.matches(call):
                    continue
                if armed.skip:
                    armed.skip -= 1
                elif chosen is None:
                    chosen = armed.act
                    armed.times -= 1
                    if armed.times <= 0:
                        self._armed = [one for one in self._armed if one is not armed]
            return chosen


def _named(name: str) -> Callable[[Call], bool]:
    operation, _, file = name.partition(" ")
    return lambda call: call.name == operation and file in ("", call.file)


def _faulty(name: str) -> Callable[..., Any]:
    real = getattr(Files, name)

    def call(self: FaultyFiles, *arguments: Any, **options: Any) -> Any:
        return self.through(name, lambda *now: real(self, *now, **options), arguments)

    return call


for _name in OPERATIONS:
    setattr(FaultyFiles, _name, _faulty(_name))


def _aligned(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return `data` in memory that direct I/O accepts."""
    room = np.empty(len(data) + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    place = room[start : start + len(data)]
    place[:] = np.frombuffer(data, dtype=np.uint8)
    return place
