"""One writer at a time; readers look without disturbing it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from rangekv.engine.inspection import read_store, reading
from rangekv.format.errors import ExitCode, StoreLocked
from support.stores import AnyFiles, make_store, open_store

HOLDER = """
import sys
from support.stores import open_store
store = open_store(sys.argv[1])
print(flush=True)
sys.stdin.read()
"""


class StillClock(AnyFiles):
    """Time passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.on_sleep = lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.on_sleep()


def test_a_second_open_in_the_same_process_is_refused(tmp_path):
    path = make_store(tmp_path / "store")
    store = open_store(path)
    with pytest.raises(StoreLocked, match=f"process {os.getpid()}") as caught:
        open_store(path)
    assert caught.value.exit_code == ExitCode.LOCKED
    store.close(store.tables)
    open_store(path).abandon()


def test_another_process_is_named(tmp_path):
    path = make_store(tmp_path / "store")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as holder:
        holder.stdout.readline()
        with pytest.raises(StoreLocked, match=f"process {holder.pid}"):
            open_store(path)
        report = read_store(str(path), AnyFiles())
        holder.stdin.close()
    assert report.state == "live"
    assert report.detail == f"process {holder.pid} or a child of it holds the store"
    assert report.superblock.epoch == 1
    assert report.tables is None
    assert report.exit_code == ExitCode.OK


def test_an_open_waits_for_the_lock(tmp_path):
    path = make_store(tmp_path / "store")
    holder = open_store(path)
    clock = StillClock()

    def let_go():
        if clock.now > 1:
            holder.abandon()

    clock.on_sleep = let_go
    waiting = open_store(path, clock, lock_wait_s=15)
    assert 1 < clock.now < 2
    waiting.abandon()


def test_a_lock_that_never_comes_ends_at_the_deadline(tmp_path):
    path = make_store(tmp_path / "store")
    holder = open_store(path)
    clock = StillClock()
    with pytest.raises(StoreLocked):
        open_store(path, clock, lock_wait_s=0.5)
    assert 0.5 <= clock.now < 0.6
    holder.abandon()


def test_a_reader_keeps_writers_out_while_it_reads_payload(tmp_path):
    path = make_store(tmp_path / "store")
    with reading(str(path), AnyFiles()) as current:
        assert current.report.state == "warm"
        assert read_store(str(path), AnyFiles()).state == "warm", "readers share"
        with pytest.raises(StoreLocked, match="another process"):
            open_store(path)
    open_store(path).abandon()


def test_a_pack_that_was_replaced_while_waiting_is_opened_anew(tmp_path):
    path = make_store(tmp_path / "store")
    other = make_store(tmp_path / "other")

    class Replaced(AnyFiles):
        swapped = False

        def flock(self, fd, *, shared=False):
            super().flock(fd, shared=shared)
            if not self.swapped:
                self.swapped = True
                (other / "range.pack").rename(path / "range.pack")

    files = Replaced()
    store = open_store(path, files, lock_wait_s=1)
    assert os.fstat(store.pack_fd).st_ino == (path / "range.pack").stat().st_ino
    assert store.open_result.reason == "uuid-mismatch"
    store.abandon()
