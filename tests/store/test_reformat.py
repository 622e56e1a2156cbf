"""The verb that empties: new identity, empty index, same file, cold at worst."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store
from rangekv.engine.store import reformat
from rangekv.format.errors import EnvironmentFault, NotAStore, StoreLocked, UsageError
from rangekv.format.geometry import ModelGeometry
from rangekv.format.tables import Tables
from support.stores import (
    CAPACITY_BYTES,
    NAMESPACE,
    OTHER_NAMESPACE,
    AnyFiles,
    FailingFiles,
    RecordingFiles,
    filled_tables,
    make_store,
    open_store,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = make_store(tmp_path / "store")
    store = open_store(path)
    store.close(filled_tables(store.geometry))
    return path


def test_it_empties_and_keeps_the_binding(path):
    before = read_store(str(path), AnyFiles()).superblock
    after = reformat(str(path), files=AnyFiles())
    assert after.store_uuid != before.store_uuid
    assert (after.namespace, after.geometry) == (before.namespace, before.geometry)
    assert after.epoch == before.epoch + 1
    report = read_store(str(path), AnyFiles())
    assert (report.state, report.tables) == ("warm", Tables.empty())
    assert {slot.superblock.store_uuid for slot in report.slots} == {after.store_uuid}
    store = open_store(path)
    assert store.open_result.state == "warm"
    store.abandon()


def test_it_rebinds_when_told(path):
    model = ModelGeometry(4, 2048, 16)
    after = reformat(str(path), model=model, namespace=OTHER_NAMESPACE, files=AnyFiles())
    assert (after.namespace, after.geometry.model) == (OTHER_NAMESPACE, model)
    with pytest.raises(UsageError, match="half-bound"):
        reformat(str(path), model=model, files=AnyFiles())
    with pytest.raises(UsageError, match="capacity-too-small"):
        reformat(
            str(path),
            model=ModelGeometry(80, 4096, 16),
            namespace=NAMESPACE,
            files=AnyFiles(),
        )


def test_it_clears_a_dirty_store(path):
    open_store(path).abandon()
    (path / "range.journal").write_bytes(b"of a version that keeps one")
    reformat(str(path), files=AnyFiles())
    assert {one.name for one in path.iterdir()} == {"range.pack", "range.snapshot"}
    assert read_store(str(path), AnyFiles()).state == "warm"


def test_lost_superblocks_become_a_blank_store(path):
    with (path / "range.pack").open("r+b") as file:
        file.write(bytes(1024 * 1024))
    after = reformat(str(path), rank=1, world_size=2, files=AnyFiles())
    assert after.blank
    assert (after.rank, after.world_size, after.capacity_bytes) == (1, 2, CAPACITY_BYTES)
    report = read_store(str(path), AnyFiles())
    assert (report.state, report.blank) == ("warm", True)
    assert all(slot.superblock is not None for slot in report.slots)


def test_what_it_refuses(path):
    store = open_store(path)
    with pytest.raises(StoreLocked):
        reformat(str(path), files=AnyFiles(), lock_wait_s=0)
    store.abandon()
    os.truncate(path / "range.pack", 2_000_000)
    with pytest.raises(NotAStore, match="truncated-pack"):
        reformat(str(path), files=AnyFiles())


def test_its_steps(path):
    files = RecordingFiles()
    reformat(str(path), files=files)
    start = files.calls.index("create_temp .range.dirty.tmp")
    assert [call for call in files.calls[start:] if not call.startswith(("pwrite ", "statx"))] == [
        "create_temp .range.dirty.tmp",  # R2
        "fsync .range.dirty.tmp",
        "close .range.dirty.tmp",
        "rename .range.dirty.tmp range.dirty",
        "fsync_dir store",
        "unlink range.snapshot",  # R3
        "unlink range.journal (none)",
        "listdir store",
        "fsync_dir store",
        "fdatasync range.pack",  # R4
        "pwritev range.pack 0",
        "fdatasync range.pack",
        "fdatasync range.pack",  # R5
        "pwritev range.pack 524288",
        "fdatasync range.pack",
        "fsync range.pack",  # R6
        "create_temp .range.snapshot.tmp",
        "fsync .range.snapshot.tmp",
        "close .range.snapshot.tmp",
        "rename .range.snapshot.tmp range.snapshot",
        "fsync_dir store",
        "unlink range.dirty",  # R7
        "fsync_dir store",
        "close range.pack",
        "close store",
    ]


@pytest.mark.parametrize(
    ("method", "at"),
    [
        ("fsync_dir", 1),
        ("fsync_dir", 2),
        ("fdatasync", 1),
        ("pwritev", 1),
        ("pwritev", 2),
        ("fdatasync", 4),
        ("fsync", 2),
        ("fsync", 3),
        ("rename", 2),
        ("fsync_dir", 3),
    ],
)
def test_an_interrupted_reformat_reopens_cold_and_empty(path, method, at):
    with pytest.raises(EnvironmentFault):
        reformat(str(path), files=FailingFiles(method, at=at))
    store = open_store(path)
    assert (store.open_result.state, store.open_result.reason) == ("cold", "dirty-marker")
    assert store.close(Tables.empty()).state == "clean"
