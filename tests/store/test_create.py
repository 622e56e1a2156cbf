"""A pack file appears whole or not at all, and never over another."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store
from rangekv.engine.store import create
from rangekv.format.errors import EnvironmentFault, ExitCode, StoreLocked, UsageError
from support.stores import (
    CAPACITY_BYTES,
    MODEL,
    NAMESPACE,
    AnyFiles,
    FailingFiles,
    RecordingFiles,
    contents,
    make_store,
    open_store,
)

MIB = 1024 * 1024


def test_a_bound_store(tmp_path):
    created = create(
        str(tmp_path / "store"),
        capacity_bytes=CAPACITY_BYTES + 4095,
        model=MODEL,
        namespace=NAMESPACE,
        files=AnyFiles(),
    )
    pack = tmp_path / "store" / "range.pack"
    status = pack.stat()
    assert created.file_bytes == status.st_size == CAPACITY_BYTES + MIB
    assert status.st_blocks * 512 >= status.st_size, "every block is allocated"
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert {one.stat().st_mode & 0o777 for one in (tmp_path / "store").iterdir()} == {0o600}
    report = read_store(str(tmp_path / "store"), AnyFiles())
    assert (report.state, report.namespace, report.geometry) == (
        "warm",
        NAMESPACE,
        created.geometry,
    )
    assert [slot.superblock.sequence for slot in report.slots] == [1, 0]
    assert report.superblock.epoch == 0
    assert report.superblock.store_uuid[6] >> 4 == 4


def test_a_blank_store(tmp_path):
    created = create(
        str(tmp_path / "store"),
        capacity_bytes=CAPACITY_BYTES,
        rank=1,
        world_size=2,
        files=AnyFiles(),
    )
    report = read_store(str(tmp_path / "store"), AnyFiles())
    assert created.geometry is None
    assert (report.state, report.blank, report.namespace) == ("warm", True, None)
    assert (report.superblock.rank, report.superblock.world_size) == (1, 2)


def test_zero_writes_every_byte_and_says_how_far_it_is(tmp_path):
    seen = []
    create(
        str(tmp_path / "store"),
        capacity_bytes=20 * MIB,
        files=AnyFiles(),
        zero=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(16 * MIB, 21 * MIB), (21 * MIB, 21 * MIB)]
    assert read_store(str(tmp_path / "store"), AnyFiles()).state == "warm"


def test_a_dry_run_changes_nothing(tmp_path):
    created = create(
        str(tmp_path / "a" / "b"), capacity_bytes=CAPACITY_BYTES, files=AnyFiles(), dry_run=True
    )
    assert created.file_bytes == CAPACITY_BYTES + MIB
    assert created.free_bytes > 0
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(EnvironmentFault, match="no-space"):
        create(str(tmp_path / "a"), capacity_bytes=1 << 60, files=AnyFiles(), dry_run=True)
    make_store(tmp_path / "store")
    with pytest.raises(UsageError, match="store-exists"):
        create(
            str(tmp_path / "store"), capacity_bytes=CAPACITY_BYTES, files=AnyFiles(), dry_run=True
        )


def test_an_existing_store_is_not_touched(tmp_path):
    path = make_store(tmp_path / "store")
    before = contents(path)
    with pytest.raises(UsageError, match="store-exists") as caught:
        make_store(path)
    assert caught.value.exit_code == ExitCode.USAGE
    assert contents(path) == before


def test_a_store_that_appears_meanwhile_is_not_replaced(tmp_path):
    class Rival(AnyFiles):
        def rename_noreplace(self, source_dir_fd, source, target_dir_fd, target):
            (tmp_path / "store" / "range.pack").write_bytes(b"the rival's")
            super().rename_noreplace(source_dir_fd, source, target_dir_fd, target)

    with pytest.raises(UsageError, match="store-exists"):
        make_store(tmp_path / "store", Rival())
    assert contents(tmp_path / "store") == {"range.pack": b"the rival's"}


@pytest.mark.parametrize(
    ("method", "number", "at", "code"),
    [
        ("fallocate", errno.ENOSPC, 1, "no-space"),
        ("fallocate", errno.EDQUOT, 1, "no-space"),
        ("fallocate", errno.EFBIG, 1, "file-size-limit"),
        ("fallocate", errno.EOPNOTSUPP, 1, "no-fallocate"),
        ("create_temp", errno.EACCES, 1, "permission"),
        ("create_temp", errno.EROFS, 1, "read-only"),
        ("pwrite", errno.ENOSPC, 1, "no-space"),
        ("fsync", errno.EIO, 1, "io-error"),
        ("rename_noreplace", errno.EINVAL, 1, "io-error"),
        ("mkdir", errno.EACCES, 1, "permission"),
    ],
)
def test_a_failed_create_leaves_nothing_behind(tmp_path, method, number, at, code):
    with pytest.raises(EnvironmentFault) as caught:
        make_store(tmp_path / "store", FailingFiles(method, number, at))
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.ENVIRONMENT)
    assert list(tmp_path.iterdir()) == []


def test_no_space_names_needed_and_free_bytes(tmp_path):
    with pytest.raises(EnvironmentFault) as caught:
        make_store(tmp_path / "store", FailingFiles("fallocate", errno.ENOSPC))
    assert str(CAPACITY_BYTES + MIB) in str(caught.value)
    free = caught.value.message.split(" are free")[0].rsplit(" ", 1)[1]
    assert int(free) > 0


def test_a_directory_that_was_there_stays(tmp_path):
    (tmp_path / "store").mkdir(0o700)
    with pytest.raises(EnvironmentFault):
        make_store(tmp_path / "store", FailingFiles("fallocate", errno.ENOSPC))
    assert list((tmp_path / "store").iterdir()) == []


def test_a_directory_that_a_killed_creator_made_is_made_durable(tmp_path):
    """It may never have been: then a power cut after this create would lose the whole store."""
    (tmp_path / "store").mkdir(0o700)
    files = RecordingFiles()
    make_store(tmp_path / "store", files)
    named = files.calls.index("rename_noreplace .range.pack.tmp range.pack")
    assert files.calls.index(f"fsync_dir {tmp_path.name}") < named


def test_zero_does_without_fallocate(tmp_path):
    create(
        str(tmp_path / "store"),
        capacity_bytes=CAPACITY_BYTES,
        files=FailingFiles("fallocate", errno.EOPNOTSUPP),
        zero=True,
    )
    assert read_store(str(tmp_path / "store"), AnyFiles()).state == "warm"


def test_a_store_without_its_snapshot_is_whole_and_cold(tmp_path):
    with pytest.raises(EnvironmentFault):
        make_store(tmp_path / "store", FailingFiles("rename"))
    assert [one.name for one in (tmp_path / "store").iterdir()] == ["range.pack"]
    store = open_store(tmp_path / "store")
    assert store.open_result.reason == "no-snapshot"
    store.abandon()


def test_leftovers_of_a_lost_pack_do_not_outlive_create(tmp_path):
    path = make_store(tmp_path / "store")
    open_store(path).abandon()
    (path / "range.pack").unlink()
    (path / "range.journal").write_bytes(b"old")
    (path / ".range.pack.0123456789abcdef.tmp").write_bytes(b"old")
    make_store(path)
    assert {one.name for one in path.iterdir()} == {"range.pack", "range.snapshot"}
    assert read_store(str(path), AnyFiles()).state == "warm"


def test_another_creator_at_work_is_not_disturbed(tmp_path):
    path = tmp_path / "store"

    class Nested(AnyFiles):
        def fallocate(self, fd, offset, length):
            with pytest.raises(StoreLocked):
                make_store(path)
            super().fallocate(fd, offset, length)

    make_store(path, Nested())
    assert read_store(str(path), AnyFiles()).state == "warm"


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"capacity_bytes": 0}, "capacity-too-small"),
        ({"capacity_bytes": -1}, "capacity-too-small"),
        ({"capacity_bytes": 4096}, "capacity-too-small"),
        ({"namespace": None}, "half-bound"),
        ({"model": None}, "half-bound"),
        ({"rank": 1}, "bad-rank"),
        ({"rank": -1}, "bad-rank"),
    ],
)
def test_arguments_that_cannot_work(tmp_path, changes, code):
    arguments = {"capacity_bytes": CAPACITY_BYTES, "model": MODEL, "namespace": NAMESPACE}
    with pytest.raises(UsageError) as caught:
        create(str(tmp_path / "store"), files=AnyFiles(), **arguments | changes)
    assert (caught.value.code, caught.value.exit_code) == (code, ExitCode.USAGE)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_work(tmp_path):
    with pytest.raises(UsageError, match="parent-missing"):
        make_store(tmp_path / "no" / "store")
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(UsageError, match="not-a-directory"):
        make_store(file)
    with pytest.raises(UsageError, match="not-a-directory"):
        make_store(file / "store")


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_store(Path("store"))
    store = open_store(Path("store"))
    assert store.path == os.path.realpath(tmp_path / "store")
    store.abandon()
