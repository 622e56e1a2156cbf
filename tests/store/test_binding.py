"""Blank stores get their namespace and place once, whatever interrupts that."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from rangekv.engine import stores
from rangekv.engine.inspection import read_store
from rangekv.engine.store import create
from rangekv.format.errors import EnvironmentFault, OtherNamespace, StoreLocked, UsageError
from rangekv.format.geometry import Geometry, ModelGeometry
from support.stores import (
    CAPACITY_BYTES,
    MODEL,
    NAMESPACE,
    OTHER_NAMESPACE,
    AnyFiles,
    FailingFiles,
    RecordingFiles,
    contents,
    filled_tables,
    open_store,
)

RANK = "rank-0-of-1"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    stores.create_ranks(str(tmp_path / "kv"), capacity_bytes=CAPACITY_BYTES, files=AnyFiles())
    return tmp_path / "kv"


def adopt(directory: Path, files: AnyFiles | None = None, namespace=NAMESPACE) -> str:
    return stores.resolve(
        str(directory), namespace=namespace, geometry=MODEL, files=files or AnyFiles()
    )


def test_opening_a_blank_store_binds_it_in_place(tmp_path):
    create(str(tmp_path / "store"), capacity_bytes=CAPACITY_BYTES, files=AnyFiles())
    store = open_store(tmp_path / "store")
    assert store.path == str(tmp_path / "store")
    assert store.open_result.state == "warm"
    assert store.namespace == NAMESPACE
    assert store.geometry == Geometry.derive(MODEL, CAPACITY_BYTES)
    assert store.epoch == 1
    store.close(filled_tables(store.geometry))
    again = open_store(tmp_path / "store")
    assert again.tables == filled_tables(store.geometry)
    again.abandon()
    with pytest.raises(OtherNamespace):
        open_store(tmp_path / "store", namespace=OTHER_NAMESPACE)


def test_opening_below_blank_moves_it_to_its_namespace(directory):
    store = open_store(directory / "blank" / RANK)
    assert store.path == str(directory / NAMESPACE.folder / RANK)
    assert store.open_result.state == "warm"
    assert store.close(store.tables).state == "clean"
    assert list((directory / "blank").iterdir()) == []
    assert read_store(store.path, AnyFiles()).state == "warm"


def test_resolve_adopts_once(directory):
    path = adopt(directory)
    assert path == str(directory / NAMESPACE.folder / RANK)
    assert adopt(directory) == path
    with pytest.raises(UsageError, match="capacity-required"):
        adopt(directory, namespace=OTHER_NAMESPACE)


def test_the_steps_of_a_bind(directory):
    files = RecordingFiles()
    adopt(directory, files)
    start = files.calls.index("fdatasync range.pack")
    assert [call for call in files.calls[start:] if not call.startswith(("pwrite ", "statx"))] == [
        "fdatasync range.pack",  # B1
        "pwritev range.pack 524288",
        "fdatasync range.pack",
        "fdatasync range.pack",  # B2
        "pwritev range.pack 0",
        "fdatasync range.pack",
        "fsync range.pack",  # B3
        "create_temp .range.snapshot.tmp",
        "fsync .range.snapshot.tmp",
        "close .range.snapshot.tmp",
        "rename .range.snapshot.tmp range.snapshot",
        f"fsync_dir {RANK}",
        f"mkdir {NAMESPACE.folder}",  # B4
        "open_dir kv",
        "fsync_dir kv",
        "close kv",
        "open_dir blank",
        f"open_dir {NAMESPACE.folder}",
        f"rename_noreplace {RANK} {RANK}",
        f"fsync_dir {NAMESPACE.folder}",
        "fsync_dir blank",
        "close blank",
        f"close {NAMESPACE.folder}",
        "close range.pack",
        f"close {RANK}",
    ]


@pytest.mark.parametrize(
    ("method", "at", "bound"),
    [
        ("fdatasync", 1, False),
        ("pwritev", 1, False),
        ("fdatasync", 2, True),
        ("pwritev", 2, True),
        ("fdatasync", 4, True),
        ("fsync", 1, True),
        ("fsync_dir", 1, True),
        ("mkdir", 1, True),
        ("rename_noreplace", 1, True),
    ],
)
def test_an_interrupted_bind_is_finished_by_the_same_namespace(directory, method, at, bound):
    with pytest.raises(EnvironmentFault):
        adopt(directory, FailingFiles(method, at=at))
    if bound:
        with pytest.raises(UsageError, match="capacity-required"):
            adopt(directory, namespace=OTHER_NAMESPACE)
    path = adopt(directory)
    store = open_store(Path(path))
    assert store.open_result.state == "warm"
    assert all(one.superblock.namespace == NAMESPACE for one in read_slots(path))
    store.abandon()


def read_slots(path: str):
    return read_store(path, AnyFiles()).slots


def test_a_folder_that_a_killed_process_made_is_made_durable(directory):
    (directory / NAMESPACE.folder).mkdir(0o700)
    files = RecordingFiles()
    adopt(directory, files)
    moved = files.calls.index(f"rename_noreplace {RANK} {RANK}")
    assert files.calls.index("fsync_dir kv") < moved


def test_a_copied_blank_store_gets_its_own_identity(directory, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(directory / "blank" / RANK, copy)
    blank_uuid = read_store(str(copy), AnyFiles()).superblock.store_uuid
    store = open_store(copy)
    assert store.open_result.state == "warm"
    assert store.superblock.store_uuid != blank_uuid
    store.abandon()


def test_a_taken_place_is_refused(directory):
    adopt(directory)
    stores.create_ranks(str(directory), capacity_bytes=CAPACITY_BYTES, files=AnyFiles())
    with pytest.raises(UsageError, match="store-exists"):
        open_store(directory / "blank" / RANK)
    assert adopt(directory) == str(directory / NAMESPACE.folder / RANK)


def test_what_a_killed_creator_left_in_its_place_is_cleared(directory):
    place = directory / NAMESPACE.folder / RANK
    place.mkdir(parents=True, mode=0o700)
    (place / ".range.pack.0123456789abcdef.tmp").touch(0o600)
    assert adopt(directory) == str(place)
    assert read_store(str(place), AnyFiles()).state == "warm"


def test_a_creator_at_work_in_its_place_is_not_disturbed(directory):
    place = directory / NAMESPACE.folder / RANK
    place.mkdir(parents=True, mode=0o700)
    held = AnyFiles().open_dir(str(place))
    AnyFiles().flock(held)
    with pytest.raises(StoreLocked):
        adopt(directory)
    os.close(held)
    assert adopt(directory) == str(place)


def test_too_small_for_the_model_is_refused_and_stays_blank(directory):
    before = contents(directory)
    big = ModelGeometry(80, 4096, 16)
    with pytest.raises(UsageError, match="capacity-too-small"):
        stores.resolve(str(directory), namespace=NAMESPACE, geometry=big, files=AnyFiles())
    assert contents(directory) == before


def test_another_ranks_blank_store_is_not_taken(tmp_path):
    stores.create_ranks(
        str(tmp_path / "kv"), capacity_bytes=2 * CAPACITY_BYTES, world_size=2, files=AnyFiles()
    )
    with pytest.raises(UsageError, match=f"no blank one for {RANK}"):
        adopt(tmp_path / "kv")
    with pytest.raises(OtherNamespace, match="other-rank"):
        open_store(tmp_path / "kv" / "blank" / "rank-1-of-2", world_size=2)
    os.rename(tmp_path / "kv" / "blank" / "rank-1-of-2", tmp_path / "kv" / "blank" / "rank-0-of-1")
    with pytest.raises(UsageError, match="capacity-required"):
        adopt(tmp_path / "kv")


@pytest.mark.parametrize("name", ["mine", RANK])
def test_a_store_in_use_is_left_alone_whatever_its_directory_is_called(tmp_path, name):
    (tmp_path / "blank").mkdir()
    path = tmp_path / "blank" / name
    create(
        str(path),
        capacity_bytes=CAPACITY_BYTES,
        model=MODEL,
        namespace=NAMESPACE,
        files=AnyFiles(),
    )
    if name == RANK:  # as if a used store had been moved here
        path = path.rename(tmp_path / RANK)
    store = open_store(path)
    store.close(filled_tables(store.geometry))
    path = path.rename(tmp_path / "blank" / name)
    again = open_store(path)
    assert again.path == str(path)
    assert again.tables == filled_tables(store.geometry)
    again.abandon()
