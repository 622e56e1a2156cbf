"""Warm only when everything is proved; every doubt is cold with its one reason."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store
from rangekv.engine.store import reformat
from rangekv.format.errors import (
    EnvironmentFault,
    ExitCode,
    NotAStore,
    OtherNamespace,
    UnsupportedVersion,
)
from rangekv.format.geometry import SUPERBLOCK_OFFSETS, ModelGeometry
from rangekv.format.superblock import SUPERBLOCK_BYTES, Superblock
from rangekv.format.tables import Tables
from support.stores import (
    NFS,
    OTHER_NAMESPACE,
    AnyFiles,
    ChangedStat,
    FailingFiles,
    contents,
    filled_tables,
    make_store,
    open_store,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store that was closed with three records."""
    return filled(make_store(tmp_path / "store"))


def filled(path: Path) -> Path:
    store = open_store(path)
    assert store.close(filled_tables(store.geometry)).exit_code == ExitCode.OK
    return path


def reason(path: Path, files: AnyFiles | None = None, **changes: object) -> str | None:
    """Open, and return why it was cold; what inspect says must be the same."""
    foretold = read_store(str(path), files or AnyFiles())
    store = open_store(path, files, **changes)
    result = store.open_result
    store.abandon()
    if foretold.state == "would-recover":  # by an open that keeps what is proved; this one does not
        assert (result.state, result.reason) == ("cold", "dirty-marker")
    else:
        assert (foretold.state, foretold.reason) == (result.state, result.reason)
    assert (result.state == "warm") == (result.reason is None) == (store.tables is not None)
    return result.reason


def patch_slot(path: Path, copy_index: int, page: bytes) -> None:
    """Overwrite one superblock and leave the modification time as it was."""
    pack = path / "range.pack"
    before = pack.stat()
    with pack.open("r+b") as file:
        file.seek(SUPERBLOCK_OFFSETS[copy_index])
        file.write(page)
    os.utime(pack, ns=(before.st_atime_ns, before.st_mtime_ns))


def read_slot(path: Path, copy_index: int) -> Superblock:
    with (path / "range.pack").open("rb") as file:
        file.seek(SUPERBLOCK_OFFSETS[copy_index])
        return Superblock.decode(file.read(SUPERBLOCK_BYTES), copy_index)


def newest(path: Path) -> int:
    return max((0, 1), key=lambda index: read_slot(path, index).sequence)


def test_a_closed_store_is_warm_with_what_was_kept(path):
    store = open_store(path)
    assert store.open_result.state == "warm"
    assert store.tables == filled_tables(store.geometry)
    assert store.epoch == 2
    assert store.session.endswith("-2")
    store.close(store.tables)
    again = open_store(path)
    assert again.tables == filled_tables(store.geometry)
    assert again.epoch == 3
    again.abandon()


def test_a_fresh_store_is_warm_and_empty(tmp_path):
    store = open_store(make_store(tmp_path / "fresh"))
    assert store.open_result.state == "warm"
    assert store.tables == Tables.empty()
    store.abandon()


def test_an_abandoned_session_is_cold_and_names_it(path):
    open_store(path).abandon()
    store = open_store(path)
    assert (store.open_result.state, store.open_result.reason) == ("cold", "dirty-marker")
    assert f"process {os.getpid()}, epoch 2" in store.open_result.detail
    assert store.tables is None
    assert store.close(Tables.empty()).state == "clean"
    assert reason(path) is None


def test_an_unreturned_write_keeps_the_store_dirty(path):
    result = open_store(path).close(None)
    assert (result.state, result.exit_code) == ("dirty", ExitCode.UNRETURNED_WRITE)
    assert reason(path) == "dirty-marker"


@pytest.mark.parametrize("octets", [b"", b"torn", bytes(128)])
def test_a_marker_counts_whatever_it_says(path, octets):
    (path / "range.dirty").write_bytes(octets)
    assert reason(path) == "dirty-marker"


def test_a_lost_marker_does_not_make_it_warm(path):
    open_store(path).abandon()
    (path / "range.dirty").unlink()
    assert reason(path) == "epoch-mismatch"


def test_no_snapshot(path):
    (path / "range.snapshot").unlink()
    assert reason(path) == "no-snapshot"


@pytest.mark.parametrize("length", [0, 255, 600, 1000])
def test_a_truncated_snapshot(path, length):
    os.truncate(path / "range.snapshot", length)
    assert reason(path) == "bad-snapshot"


def test_a_damaged_snapshot(path):
    data = bytearray((path / "range.snapshot").read_bytes())
    data[-1] ^= 1
    (path / "range.snapshot").write_bytes(data)
    assert reason(path) == "bad-snapshot"


def test_something_else_in_the_snapshots_place(path, tmp_path):
    snapshot = path / "range.snapshot"
    target = tmp_path / "elsewhere"
    snapshot.rename(target)
    snapshot.symlink_to(target)
    assert reason(path) == "bad-snapshot"
    snapshot.unlink()
    os.mkfifo(snapshot)
    (path / "range.dirty").unlink()
    assert reason(path) == "bad-snapshot"


def test_a_snapshot_of_another_version(path):
    data = bytearray((path / "range.snapshot").read_bytes())
    data[12] = 2
    (path / "range.snapshot").write_bytes(data)
    assert reason(path) == "bad-snapshot", "its checksum does not match either"


def test_the_snapshot_of_another_store(path, tmp_path):
    other = filled(make_store(tmp_path / "other"))
    shutil.copy(other / "range.snapshot", path / "range.snapshot")
    assert reason(path) == "uuid-mismatch"


def test_the_snapshot_of_an_earlier_session(path):
    kept = (path / "range.snapshot").read_bytes()
    filled(path)
    (path / "range.snapshot").write_bytes(kept)
    assert reason(path) == "epoch-mismatch"


def test_a_copied_store_is_cold_and_becomes_its_own(path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(path, copy)
    copied = (copy / "range.pack").stat().st_mtime_ns == (path / "range.pack").stat().st_mtime_ns
    assert copied, "shutil keeps the time, as cp -a does"
    store = open_store(copy)
    assert (store.open_result.state, store.open_result.reason) == ("cold", "inode-mismatch")
    assert store.superblock.store_uuid != read_slot(path, 0).store_uuid
    store.close(Tables.empty())
    assert reason(copy) is None
    assert reason(path) is None


def test_a_moved_store_stays_warm(path, tmp_path):
    (tmp_path / "deeper").mkdir()
    moved = path.rename(tmp_path / "deeper" / "moved")
    assert reason(moved) is None


def test_a_changed_modification_time(path):
    os.utime(path / "range.pack", ns=(1, 1))
    assert reason(path) == "mtime-changed"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"inode": 1}, "inode-mismatch"),
        ({"btime_ns": 1}, "birth-time-mismatch"),
    ],
)
def test_identity(path, changes, expected):
    class Changed(ChangedStat):
        def statx_at(self, dir_fd, name):
            return self._changed(super().statx_at(dir_fd, name))

    assert reason(path, Changed(**changes)) == expected


def test_another_generation(path):
    class Changed(ChangedStat):
        def inode_generation(self, fd):
            return 12345

    store_generation = read_slot(path, newest(path)).identity
    if not store_generation.identity_flags & 2:
        pytest.skip("this file system tells no inode generation")
    assert reason(path, Changed()) == "generation-mismatch"


def test_nothing_but_an_inode_is_no_proof(path):
    class Bare(ChangedStat):
        def inode_generation(self, fd):
            return None

    assert reason(path, Bare(btime_ns=None)) == "no-identity"


def test_a_longer_file_is_cold_and_heals(path):
    with (path / "range.pack").open("ab") as file:
        file.write(bytes(4096))
    store = open_store(path)
    assert store.open_result.reason == "size-mismatch"
    store.close(Tables.empty())
    assert reason(path) is None


def test_a_network_file_system_is_never_warm(path):
    class OnNfs(AnyFiles):
        def filesystem_magic(self, fd):
            return NFS

    assert reason(path, OnNfs()) == "unsupported-filesystem"


def test_another_geometry_in_the_superblock(path):
    index = newest(path)
    superblock = read_slot(path, index)
    changed = replace(superblock.geometry, checksum_page_blocks=8)
    patch_slot(path, index, replace(superblock, geometry=changed).encode(index))
    assert reason(path) == "geometry-mismatch"


def test_snapshot_limits(path):
    """A superblock that allows less than the snapshot holds."""
    index = newest(path)
    superblock = read_slot(path, index)
    geometry = superblock.geometry
    smaller = replace(
        geometry,
        block_tokens=256,
        stripe_bytes_min=geometry.stripe_bytes_max * 2,
        stripe_bytes_max=geometry.stripe_bytes_max * 2,
        pack_bytes=geometry.pack_bytes * 2,
        pack_count=1,
        checksum_page_blocks=1,
    )
    patch_slot(path, index, replace(superblock, geometry=smaller).encode(index))
    model = ModelGeometry(2, 4096, 256)
    assert reason(path, model=model) == "snapshot-limits"


def test_one_bad_superblock_is_tolerated(path):
    index = newest(path)
    patch_slot(path, 1 - index, bytes(SUPERBLOCK_BYTES))
    assert reason(path) is None
    assert read_slot(path, 1 - index).epoch == 2, "the bad one was rewritten"


def test_a_lost_newest_superblock_is_cold_and_its_epoch_is_not_used_again(path):
    index = newest(path)
    patch_slot(path, index, bytes(SUPERBLOCK_BYTES))
    store = open_store(path)
    assert store.open_result.reason == "epoch-mismatch"
    assert store.epoch == 2, "above the snapshot's epoch 1, not equal to it"
    store.abandon()


def test_two_bad_superblocks_are_refused_and_nothing_changes(path):
    for index in range(2):
        patch_slot(path, index, b"\xff" * SUPERBLOCK_BYTES)
    before = contents(path)
    with pytest.raises(NotAStore, match="not-a-store") as caught:
        open_store(path)
    assert caught.value.exit_code == ExitCode.CHECK_FAILED
    assert contents(path) == before
    report = read_store(str(path), AnyFiles())
    assert (report.state, report.reason, report.exit_code) == ("unusable", "not-a-store", 1)
    assert [slot.problem.code for slot in report.slots] == ["bad-superblock"] * 2


@pytest.mark.parametrize("length", [0, 4096, 600_000, 2_000_000])
def test_a_truncated_pack_is_refused_and_nothing_changes(path, length):
    os.truncate(path / "range.pack", length)
    before = contents(path)
    with pytest.raises(NotAStore, match="truncated-pack") as caught:
        open_store(path)
    assert caught.value.exit_code == ExitCode.CHECK_FAILED
    assert contents(path) == before
    assert read_store(str(path), AnyFiles()).reason == "truncated-pack"


def test_another_namespace_is_refused_by_its_differing_fields(path):
    before = contents(path)
    with pytest.raises(OtherNamespace, match="tags None") as caught:
        open_store(path, namespace=OTHER_NAMESPACE)
    assert caught.value.exit_code == ExitCode.OTHER_NAMESPACE
    with pytest.raises(OtherNamespace, match="other-geometry"):
        open_store(path, model=ModelGeometry(2, 2048, 16))
    with pytest.raises(OtherNamespace, match="other-rank"):
        open_store(path, rank=1, world_size=2)
    assert contents(path) == before
    assert reason(path) is None


def test_features_of_a_newer_version(path):
    index = newest(path)
    superblock = read_slot(path, index)
    patch_slot(path, index, replace(superblock, feature_ro_compat=1).encode(index))
    with pytest.raises(UnsupportedVersion, match="reading only"):
        open_store(path)
    assert read_store(str(path), AnyFiles()).state == "warm"
    patch_slot(path, index, replace(superblock, feature_incompat=1).encode(index))
    with pytest.raises(UnsupportedVersion) as caught:
        open_store(path)
    assert caught.value.exit_code == ExitCode.UNSUPPORTED
    assert read_store(str(path), AnyFiles()).exit_code == ExitCode.UNSUPPORTED


def test_what_a_killed_writer_left_is_swept(path):
    (path / ".range.snapshot.0123456789abcdef.tmp").write_bytes(b"torn")
    open_store(path).abandon()
    assert {one.name for one in path.iterdir()} == {"range.pack", "range.snapshot", "range.dirty"}


@pytest.mark.parametrize(
    ("method", "at"),
    [("fsync", 1), ("fsync_dir", 1), ("fdatasync", 1), ("fdatasync", 2), ("pwritev", 1)],
)
def test_a_failed_sync_in_open_is_an_error_and_never_warm_after(path, method, at):
    files = FailingFiles(method, at=at)
    with pytest.raises(EnvironmentFault, match="io-error"):
        open_store(path, files)
    assert files.counts[method] == at, "nothing was repeated"
    if method == "fsync":
        assert reason(path) is None, "the marker was not yet there and nothing was written"
    else:
        assert reason(path) == "dirty-marker"


@pytest.mark.parametrize(
    ("method", "number", "at"),
    [
        ("fsync", errno.EIO, 1),
        ("fsync", errno.EIO, 2),
        ("pwrite", errno.ENOSPC, 1),
        ("rename", errno.EIO, 1),
        ("fsync_dir", errno.EIO, 1),
        ("unlink", errno.EIO, 1),
    ],
)
def test_a_failed_close_publishes_nothing_and_stays_dirty(path, method, number, at):
    store = open_store(path)
    files = FailingFiles(method, number, at)
    store._pack.files = store._pack.folder.files = files
    result = store.close(store.tables)
    assert (result.state, result.exit_code) == ("dirty", ExitCode.ENVIRONMENT)
    assert "cold" in result.detail
    if method == "fsync":
        assert files.counts["fsync"] == at, "a failed fsync is never repeated"
    assert not [one for one in path.iterdir() if one.name.endswith(".tmp")]
    assert reason(path) == "dirty-marker"


def test_a_failed_last_sync_leaves_a_store_that_is_whole(path):
    store = open_store(path)
    store._pack.files = store._pack.folder.files = FailingFiles("fsync_dir", at=2)
    assert store.close(store.tables).state == "dirty"
    assert reason(path) is None, "the snapshot was durable before the marker went"


def test_a_directory_named_like_a_temp_is_in_nobodys_way(tmp_path):
    path = make_store(tmp_path / "store")
    (path / ".range.pack.0123.tmp").mkdir()
    open_store(path).abandon()
    reformat(str(path), files=AnyFiles())
    assert (path / ".range.pack.0123.tmp").is_dir()


def test_a_copied_store_says_so_in_words(tmp_path):
    path = make_store(tmp_path / "store")
    shutil.copytree(path, tmp_path / "copy")
    detail = read_store(str(tmp_path / "copy"), AnyFiles()).detail
    assert detail.startswith("the pack file was copied, restored or resized: found inode ")
    assert "FileIdentity" not in detail
