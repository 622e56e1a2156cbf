"""Fail the first, second, third … operation on files of a store's whole life, until none is left.

No wrong byte, no leak, no hang: each run ends in a named error, in misses, or as if nothing was.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.inspection import read_store
from rangekv.engine.store import create
from rangekv.engine.testing.faulty_files import READS, WRITES, FaultyFiles, error, short
from rangekv.engine.testing.oracle import Oracle
from rangekv.engine.testing.scene import MODEL, NAMESPACE
from rangekv.format.errors import ExitCode, InvariantError, RangeError

CAPACITY = 1 << 20  # four packs of four 64 KiB stripes
TRANSFERS = (*READS, *WRITES, "pwrite")
PATIENCE_S = 10.0
FAULTS = {
    "EIO": error(errno.EIO),
    "ENOSPC": error(errno.ENOSPC),
    "EINTR": error(errno.EINTR),
    "short": short(lambda asked: asked // 2),
}
RUNS: Counter[tuple[str, float]] = Counter()
KV = np.zeros((MODEL.layer_count, 64, MODEL.block_bytes), np.uint8)


def prompt_of(number: int, count: int = 256) -> np.ndarray:
    return np.random.default_rng(number).integers(1, 1 << 17, count, dtype=np.uint32)


LONGER = np.concatenate([prompt_of(9, 64), prompt_of(10, 32)])


class Life:
    """One store from its making to its last close, on one seam; it never expects success."""

    def __init__(self, path: Path, files: FaultyFiles) -> None:
        self.path, self.files = path, files
        self.oracle = Oracle(MODEL)
        self.keys = 0
        self.made = False

    def run(self) -> None:
        create(
            str(self.path),
            capacity_bytes=CAPACITY,
            model=MODEL,
            namespace=NAMESPACE,
            files=self.files,
        )
        self.made = True
        with self.session(dies=True) as engine:
            for number in range(2):
                self.save(engine, prompt_of(number))
        with self.session() as engine:
            for number in range(5):  # one more than there is room for
                self.save(engine, prompt_of(number))
            self.save(engine, LONGER[:64])
            self.save(engine, LONGER)  # grows in place
            self.restore(engine, LONGER)
            self.restore(engine, prompt_of(4))
        with self.session() as engine:
            self.restore(engine, LONGER)

    @contextmanager
    def session(self, *, dies: bool = False):
        engine = Engine.open(
            str(self.path),
            namespace=NAMESPACE,
            geometry=MODEL,
            config=EngineConfig(
                allow_buffered=True,
                placement="banks",
                read_bank=256 << 10,
                save_bank=256 << 10,
                read_banks=1,
                save_banks=1,
                read_workers=1,
                lock_wait_s=0.0,
            ),
            files=self.files,
        )
        try:
            engine.attach(list(KV))
            yield engine
            self.require_quiet(engine)
        finally:
            if dies:
                assert engine._pool.close(PATIENCE_S)
                engine._commits.close()
                engine._events.close()
                engine.store.abandon()
            else:
                result = engine.close(PATIENCE_S)
                assert result.exit_code in (ExitCode.OK, ExitCode.ENVIRONMENT), result

    def require_quiet(self, engine: Engine) -> None:
        leases = engine._catalog.leases.open
        assert engine._events.wait_until(lambda: not leases, PATIENCE_S)
        assert engine._events.wait_until(lambda: not engine._saves.active, PATIENCE_S)
        assert engine._events.fault is None
        assert engine.stats().banks_in_quarantine == 0
        assert engine._read_banks.free_count == engine._save_banks.free_count == 1
        assert all(thread.is_alive() for thread in engine._pool.threads)

    def key(self) -> RequestKey:
        self.keys += 1
        return RequestKey(f"r{self.keys}", "life", 0)

    def save(self, engine: Engine, tokens: np.ndarray) -> None:
        self.oracle.note_saved(tokens)
        save = engine.save(self.key(), tokens)
        if save is None:
            return
        blocks = np.arange(len(tokens) // MODEL.block_tokens)
        for layer in range(MODEL.layer_count):
            KV[layer][blocks] = self.oracle.rows(tokens, layer, 0, len(blocks))
            save.layer_ready(layer, (0, len(blocks) * MODEL.block_tokens), blocks)
        save.extracted(PATIENCE_S)
        KV[:] = 0xDB
        save.finish()
        save.wait(PATIENCE_S)
        assert save.settled

    def restore(self, engine: Engine, tokens: np.ndarray) -> int:
        ticket = engine.lookup(self.key(), tokens)
        if ticket.token_count == 0:
            return 0
        blocks = np.arange(ticket.token_count // MODEL.block_tokens)
        try:
            restore = engine.claim(ticket, tokens, blocks)
        except RangeError as refused:  # reading ahead has found damage
            assert refused.code == "stale-ticket"  # noqa: PT017 (most claims are not refused)
            return 0
        ready = [restore.wait_layer(layer, PATIENCE_S) for layer in range(MODEL.layer_count)]
        failed = set(restore.failed_blocks())
        for layer, rows in enumerate(KV):
            for block in blocks:
                if block not in failed:
                    row = rows[block : block + 1]
                    assert self.oracle.check(tokens, layer, int(block), row) is None
        restore.finish()
        assert all(ready) == (not failed)
        return 0 if failed else ticket.token_count

    def require_right_afterwards(self) -> None:
        """On a disk that is well again: what a reopen shows is right, and the store works."""
        if not self.made:
            return
        self.files.disarm()
        report = read_store(str(self.path))
        assert report.state in ("warm", "would-recover", "cold"), report
        if report.state != "cold":
            with open(self.path / "range.pack", "rb") as pack:

                def read(offset: int, length: int) -> bytes:
                    pack.seek(offset)
                    return pack.read(length)

                assert self.oracle.check_tables(report.tables, report.geometry, read) is None
        with self.session() as engine:
            fresh = prompt_of(77)
            self.save(engine, fresh)
            assert self.restore(engine, fresh) == len(fresh)


def is_any(call) -> bool:
    return True


def is_transfer(call) -> bool:
    return call.name in TRANSFERS


@pytest.fixture(scope="module")
def fast_folder(module_path):
    """Memory where there is any: thousands of stores are made, and no disk is tested here."""
    if os.access("/dev/shm", os.W_OK):
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="range-test-") as folder:
            yield Path(folder)
    else:
        yield module_path


def run_one(folder: Path, name: str, number: int, times: float) -> tuple[str, bool]:
    """Run one life whose operation `number` fails; return how it ended, whether it came to it."""
    files = FaultyFiles()
    matches = is_transfer if name == "short" else is_any
    reached = []

    def act(call):
        reached.append(call.line())
        return FAULTS[name](call)

    files.arm(matches, act, skip=number, times=times)
    life = Life(folder / "store", files)
    ended = "as if nothing was"
    try:
        life.run()
    except InvariantError:
        raise
    except RangeError as refused:
        ended = refused.code
    life.require_right_afterwards()
    return ended, bool(reached)


@pytest.mark.parametrize("times", [1, math.inf], ids=["once", "persistent"])
@pytest.mark.parametrize("name", FAULTS)
def test_every_operation_may_fail(fast_folder, name, times, figure):
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    endings: Counter[str] = Counter()
    number = 0
    while True:
        folder = fast_folder / f"{name}-{times}-{number}"
        folder.mkdir(mode=0o700)
        try:
            ended, reached = run_one(folder, name, number, times)
        except BaseException as broken:
            broken.add_note(f"{name}, {times} times, from operation {number}")
            raise
        shutil.rmtree(folder)
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) == descriptors
        if not reached:
            assert ended == "as if nothing was"
            break
        endings[ended] += 1
        number += 1
    assert number > 50
    assert len(endings) > 1
    RUNS[name, times] = number
    figure(
        "fail at N",
        f"{sum(RUNS.values()):,} lives of a store, {max(RUNS.values())} operations each, once and"
        " from then on, 0 wrong bytes (pytest tests/faults/test_fail_at_n.py)",
    )
