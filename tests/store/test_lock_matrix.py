"""Who holds a store: real processes that hold, die, fork, stop and race."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store
from rangekv.format.errors import StoreLocked
from support.stores import AnyFiles, filled_tables, make_store, open_store

# Each is a process that opens the store, says so, and waits for the end of its input.
HOLD = """
import sys
from support.stores import open_store
store = open_store(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""
FORK = """
import os, signal, sys
from support.stores import open_store
store = open_store(sys.argv[1])
child = os.fork()
if child == 0:
    sys.stdin.read()
    os._exit(0)
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
EXEC = """
import os, signal, subprocess, sys
from support.stores import open_store
store = open_store(sys.argv[1])
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], close_fds=False)
print(child.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
READ = """
import sys
from rangekv.engine.inspection import reading
from support.stores import AnyFiles
with reading(sys.argv[1], AnyFiles()):
    print(flush=True)
    sys.stdin.read()
"""
CREATE = """
import sys
from rangekv.format.errors import RangeError
from support.stores import make_store
print(flush=True)
sys.stdin.readline()
try:
    make_store(sys.argv[1])
    print("made", flush=True)
except RangeError as error:
    print(error.code, flush=True)
"""
OPEN = """
import sys
from rangekv.format.errors import RangeError
from support.stores import open_store
print(flush=True)
sys.stdin.readline()
try:
    store = open_store(sys.argv[1])
except RangeError as error:
    print(error.code, flush=True)
else:
    print("open", flush=True)
    sys.stdin.read()
    store.abandon()
"""
WAIT_S = 15.0
SOON_S = 10.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = open_store(make_store(tmp_path / "store"))
    store.close(filled_tables(store.geometry))
    return tmp_path / "store"


@contextmanager
def process(script: str, path: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a script; its input ends with the context."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as running:
        yield running
        running.stdin.close()


def reason_after(path: Path, lock_wait_s: float) -> str | None:
    store = open_store(path, lock_wait_s=lock_wait_s)
    reason = store.open_result.reason
    store.abandon()
    return reason


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_the_lock_of_a_dying_process_is_taken_while_it_is_waited_for(path, ending):
    with process(HOLD, path) as holder:
        holder.stdout.readline()
        asked, found = threading.Event(), []

        class Asking(AnyFiles):
            def sleep(self, seconds):
                asked.set()
                super().sleep(seconds)

        def take() -> None:
            store = open_store(path, Asking(), lock_wait_s=WAIT_S)
            found.append(store.open_result.reason)
            store.abandon()

        waiting = threading.Thread(target=take)
        begin = time.monotonic()
        waiting.start()
        assert asked.wait(WAIT_S), "it did not find the lock held"
        holder.send_signal(ending)
        waiting.join(WAIT_S)
        assert found == ["dirty-marker"]
        assert time.monotonic() - begin < SOON_S


def test_a_forked_child_keeps_the_lock_and_is_named_as_what_it_may_be(path):
    with process(FORK, path) as parent:
        child = int(parent.stdout.readline())
        parent.wait()
        with pytest.raises(StoreLocked, match=f"process {parent.pid} or a child of it"):
            open_store(path)
        assert read_store(str(path), AnyFiles()).state == "live"
        os.kill(child, signal.SIGKILL)
        assert reason_after(path, WAIT_S) == "dirty-marker"


def test_a_program_that_was_started_does_not_keep_the_lock(path):
    with process(EXEC, path) as parent:
        parent.stdout.readline()
        parent.wait()
        assert reason_after(path, WAIT_S) == "dirty-marker", "its descriptors are closed on exec"


def test_a_stopped_process_keeps_the_lock_until_it_dies(path):
    with process(HOLD, path) as holder:
        holder.stdout.readline()
        holder.send_signal(signal.SIGSTOP)
        with pytest.raises(StoreLocked):
            open_store(path, lock_wait_s=0.2)
        holder.kill()
        assert reason_after(path, WAIT_S) == "dirty-marker"


def test_a_reader_of_another_process_delays_a_writer_and_changes_nothing(path):
    with process(READ, path) as reader:
        reader.stdout.readline()
        assert read_store(str(path), AnyFiles()).state == "warm"
        with pytest.raises(StoreLocked, match="another process"):
            open_store(path)
        reader.kill()
        assert reason_after(path, WAIT_S) is None


@pytest.mark.parametrize(
    ("script", "first", "others"),
    [(CREATE, "made", {"store-locked", "store-exists"}), (OPEN, "open", {"store-locked"})],
    ids=["create", "open"],
)
def test_of_eight_at_once_one_wins_and_seven_are_told(tmp_path, script, first, others):
    path = tmp_path / "store"
    if script is OPEN:
        make_store(path)
    with ExitStack() as stack:
        rivals = [stack.enter_context(process(script, path)) for _ in range(8)]
        for rival in rivals:
            rival.stdout.readline()
        for rival in rivals:
            rival.stdin.write("\n")
            rival.stdin.flush()
        answers = [rival.stdout.readline().strip() for rival in rivals]
    assert answers.count(first) == 1
    assert set(answers) - {first} <= others
    names = {one.name for one in path.iterdir()}
    assert names <= {"range.pack", "range.snapshot", "range.dirty"}
    assert reason_after(path, WAIT_S) in (None, "dirty-marker")


class Interrupted(AnyFiles):
    """Something else happens once, beside the first call of one kind."""

    def __init__(self, call: str, meanwhile: Callable[[], object], *, before: bool) -> None:
        super().__init__()
        self.call = call
        self.meanwhile = meanwhile
        self.before = before

    def _once(self, call: str, *, before: bool) -> None:
        if (call, before) == (self.call, self.before):
            self.call = ""
            self.meanwhile()

    def mkdir(self, path):
        super().mkdir(path)
        self._once("mkdir", before=False)

    def flock(self, fd, *, shared=False):
        self._once("flock", before=True)
        super().flock(fd, shared=shared)
        self._once("flock", before=False)


def test_who_comes_second_leaves_the_directory_to_the_first(tmp_path):
    path = tmp_path / "store"

    def second() -> None:
        # It found no directory either, but came to the lock too late.
        with pytest.raises(StoreLocked, match="another process creates a store here"):
            make_store(path, NotYetThere())

    class NotYetThere(AnyFiles):
        def exists(self, path):
            return False

        def is_directory(self, path):
            return True

    make_store(path, Interrupted("flock", second, before=False))
    assert reason_after(path, WAIT_S) is None


@pytest.mark.parametrize(("call", "before"), [("mkdir", False), ("flock", True)])
def test_a_directory_that_was_taken_back_meanwhile_is_said_so(tmp_path, call, before):
    path = tmp_path / "store"
    with pytest.raises(StoreLocked, match="try again"):
        make_store(path, Interrupted(call, path.rmdir, before=before))
    assert not path.exists()
    make_store(path)
