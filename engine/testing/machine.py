"""A machine of one thread for the engine: its clock, its workers, its disk and its faults in order.

Owns what happens when, by seed; the requests that the engine serves on it are simulation.py's.
"""

from __future__ import annotations

import ctypes
import errno
import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from rangekv.engine.devices.fence import Fence, FenceState
from rangekv.engine.events import Deadline, EventQueue, Handler
from rangekv.engine.files import Files
from rangekv.engine.payload.pool import Done, Priority, WorkerPool
from rangekv.engine.store import CloseResult, OpenResult, Store
from rangekv.engine.testing.checks import Violation
from rangekv.format.errors import ExitCode, TransferError
from rangekv.format.geometry import DATA_OFFSET, Geometry
from rangekv.format.tables import Tables

if TYPE_CHECKING:
    from rangekv.engine.files import Iovec, Segments


@dataclass(slots=True, eq=False)
class Task:
    """A job that a worker has been given, and what came of it once it has run."""

    priority: Priority
    job: Callable[[], Any]
    done: Done
    stalled: bool = False
    has_run: bool = False
    result: Any = None
    error: BaseException | None = None


class Machine(EventQueue):
    """The event queue of a simulation: nothing happens but what `step` chooses.

    Whoever waits lets the machine go on until what it waits for is there. That is what other
    threads do meanwhile, in an order that follows from the seed.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__(clock=lambda: self.now)
        self.now = 0.0
        self.tasks: list[Task] = []
        self.stall_rate = 0.0
        self.steps = 0
        self.copy_fault_rate = 0.0
        self.unproved = 0
        """Copies of which nobody knows whether they have ended."""
        self.story: list[str] = []
        self._chance = chance
        self._lose = self._lost = False
        self._due: list[tuple[float, int, Deadline]] = []
        self._count = 0

    # -- what the engine sees ----------------------------------------------------------------------

    def at(self, delay_s: float, handler: Handler, *args: Any) -> Deadline:
        deadline = Deadline(self.now + delay_s, handler, args)
        self._count += 1
        heapq.heappush(self._due, (deadline.when, self._count, deadline))
        return deadline

    def wait_until(self, predicate: Callable[[], bool], deadline_s: float | None) -> bool:
        end = None if deadline_s is None else self.now + deadline_s
        while not predicate() and self.fault is None:
            if self.step():
                continue
            if end is not None and (not self._due or self._due[0][0] > end):
                self.now = max(self.now, end)
                break
            self._go_on("a wait")
        return predicate()

    def wait_for_proof(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            if not self.step():
                self._go_on("a wait for proof")

    def close(self) -> None:
        self._due.clear()

    # -- what happens ------------------------------------------------------------------------------

    def submit(self, priority: Priority, job: Callable[[], Any], done: Done) -> None:
        """Give a worker a job; some of them stand still."""
        stalled = priority is not Priority.COPY and self._chance.random() < self.stall_rate
        self.tasks.append(Task(priority, job, done, stalled))

    def step(self) -> bool:
        """Let one task run or one result arrive; False where none can."""
        ready = [task for task in self.tasks if not task.stalled]
        if not ready:
            return False
        self.steps += 1
        task = self._chance.choice(ready)
        if not task.has_run:
            self._run_task(task)
            if self._chance.random() < 0.5:
                return True
        self.tasks.remove(task)
        self.post(task.done, task.result, task.error)
        return True

    def _run_task(self, task: Task) -> None:
        task.has_run = True
        copies = task.priority is Priority.COPY
        if copies and self._chance.random() < self.copy_fault_rate:
            self._lose = True
        try:
            task.result = task.job()
        except Exception as error:
            task.error = error
        if copies and self._lost:
            self.unproved += 1
        self._lose = self._lost = False

    def copies_through(self, copy: Callable[..., Fence]) -> Callable[..., Fence]:
        """Return a device's copy that is not proved once in a while, and may not have happened."""

        def faulty(*arguments: Any) -> Fence:
            if not self._lose:
                return copy(*arguments)
            self._lost = True
            if self._chance.random() < 0.5:
                copy(*arguments)
            if self._chance.random() < 0.3:
                raise RuntimeError("simulated: a copy raised")
            return Fence(self._chance.choice([FenceState.UNKNOWN, FenceState.PENDING]))

        return faulty

    def wake(self) -> bool:
        """Let one task that stood still go on; False where none stands."""
        standing = [task for task in self.tasks if task.stalled]
        if not standing:
            return False
        self._chance.choice(standing).stalled = False
        return True

    def pass_time(self, seconds: float) -> None:
        """Let the clock go on and every deadline on the way fire."""
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self._fire()
        self.now = end

    def refuse(self) -> None:
        """Drop what has not begun, as a pool that closes does."""
        waiting = [task for task in self.tasks if not task.has_run and not task.stalled]
        for task in waiting:
            self.tasks.remove(task)
            error = TransferError("engine-closed", "the engine closed before this began")
            self.post(task.done, None, error)

    def _fire(self) -> None:
        when, _, deadline = heapq.heappop(self._due)
        self.now = max(self.now, when)
        if not deadline.cancelled:
            self.post(self._if_live, deadline)

    def _go_on(self, who: str) -> None:
        """Nothing can run: what stands still comes back, or time passes to the next deadline."""
        if self._due and (self._chance.random() < 0.5 or not any(t.stalled for t in self.tasks)):
            self._fire()
        elif not self.wake():
            raise Violation(f"a deadlock: {who} will never end")


class MachinePool(WorkerPool):
    """The workers of a machine: they run when it says so."""

    def __init__(
        self, events: EventQueue, io_threads: int, affinity: frozenset[int] | None
    ) -> None:
        assert isinstance(events, Machine)
        self._machine = events
        self.threads = []

    def submit(self, priority: Priority, job: Callable[[], Any], done: Done) -> None:
        self._machine.submit(priority, job, done)

    def close(self, deadline_s: float) -> bool:
        self._machine.refuse()
        return not self._machine.tasks

    def when_stopped(self, call: Callable[[], None]) -> None:
        call()


@dataclass
class MachineFiles(Files):
    """A pack file in memory, whose reads and writes fail as often as they are told to."""

    size_bytes: int
    chance: random.Random
    fault_rate: float = 0.0
    rot_rate: float = 0.0
    faults: int = 0
    rotten: int = 0
    memory: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.memory = bytearray(self.size_bytes)

    def preadv(self, fd: int, buffers: Segments, offset: int) -> int:
        views = [memoryview(buffer).cast("B") for buffer in buffers]  # type: ignore[arg-type]
        return self._read(views, offset)

    def preadv_iovec(self, fd: int, iovec: Iovec, offset: int) -> int:
        views = [
            memoryview((ctypes.c_uint8 * length).from_address(address)).cast("B")
            for address, length in iovec.tolist()
        ]
        return self._read(views, offset)

    def pwritev(self, fd: int, buffers: Segments, offset: int) -> int:
        data = b"".join(memoryview(buffer).cast("B") for buffer in buffers)  # type: ignore[arg-type]
        if self.chance.random() < self.fault_rate:
            self.faults += 1
            kept = self.chance.randrange(len(data) // 4096 + 1) * 4096
            self.memory[offset : offset + kept] = data[:kept]
            if self.chance.random() < 0.5:
                raise OSError(self.chance.choice([errno.EIO, errno.ENOSPC]), "simulated")
            return min(kept, len(data) - 1)
        self.memory[offset : offset + len(data)] = data
        return len(data)

    def direct_alignment(self, fd: int) -> tuple[int, int]:
        return 4096, 4096

    def _read(self, views: list[memoryview], offset: int) -> int:
        asked = sum(map(len, views))
        count = asked
        if self.chance.random() < self.fault_rate:
            self.faults += 1
            if self.chance.random() < 0.5:
                raise OSError(errno.EIO, "simulated")
            count = self.chance.randrange(asked)
        data = bytearray(self.memory[offset : offset + count]) + b"\x5a" * (asked - count)
        if self.chance.random() < self.rot_rate:
            self.rotten += 1
            at = self.chance.randrange(asked)
            data[at] ^= 1 << at % 8
        for view in views:
            view[:] = data[: len(view)]
            del data[: len(view)]
        return count


class MachineStore(Store):
    """A store that is always open and always in memory; its protocol is the crash explorer's."""

    def __init__(self, geometry: Geometry, files: MachineFiles, tables: Tables | None) -> None:
        self.geometry = geometry
        self.tables = tables
        self.journal = None
        self._pack_failed = False
        self.open_result = OpenResult("cold" if tables is None else "warm", None, "simulated")
        self.kept: Tables | None = None
        self._files = files

    @property
    def path(self) -> str:
        return "simulated"

    @property
    def files(self) -> Files:
        return self._files

    @property
    def pack_fd(self) -> int:
        return -1

    @property
    def io_path(self) -> Any:
        return "posix-direct"

    @property
    def epoch(self) -> int:
        return 1

    @property
    def session(self) -> str:
        return f"{id(self):x}-1"

    def close(self, tables: Tables | None) -> CloseResult:
        self.kept = tables
        state: Any = "dirty" if tables is None else "clean"
        return CloseResult(state, ExitCode.OK, "simulated")

    def abandon(self) -> None:
        self.kept = None


def machine_files(geometry: Geometry, chance: random.Random) -> MachineFiles:
    """Return an empty pack file of this geometry."""
    return MachineFiles(DATA_OFFSET + geometry.usable_bytes, chance)


def random_bytes(chance: random.Random, count: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return bytes that belong to nobody."""
    return np.frombuffer(chance.randbytes(count), dtype=np.uint8)
