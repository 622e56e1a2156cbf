"""What people do to files: moved is warm, copied or replaced is cold with its reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store
from rangekv.engine.store import Store
from rangekv.format.errors import EnvironmentFault, RangeError, StoreMissing
from rangekv.format.tables import Tables
from support.stores import AnyFiles, contents, filled_tables, make_store, open_store

NOT_THIS_FILE = {"inode-mismatch", "birth-time-mismatch", "generation-mismatch"}
LATER = Tables.empty(generation_max=99)


def copy(source: Path, target: Path) -> Path:
    """As an administrator would: with modes, owners and times."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    return target


def later_session(path: Path) -> None:
    assert open_store(path).close(LATER).state == "clean"


def overwrite(path: Path, source: Path) -> None:
    """New bytes and the old time in the same file, as some backup programs do."""
    status = source.stat()
    with path.open("r+b") as file:
        file.write(source.read_bytes())
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


# -- what leaves it the same file --------------------------------------------------------------


def nothing(path: Path, tmp: Path) -> Path:
    return path


def moved(path: Path, tmp: Path) -> Path:
    (tmp / "deeper").mkdir()
    subprocess.run(["mv", str(path), str(tmp / "deeper" / "there")], check=True)
    return tmp / "deeper" / "there"


def moved_and_back(path: Path, tmp: Path) -> Path:
    path.rename(tmp / "away")
    return (tmp / "away").rename(path)


def directory_above_renamed(path: Path, tmp: Path) -> Path:
    above = path.parent.rename(tmp / "another name")
    return above / path.name


def pack_renamed_and_back(path: Path, tmp: Path) -> Path:
    (path / "range.pack").rename(path / "x")
    (path / "x").rename(path / "range.pack")
    return path


def snapshot_copied(path: Path, tmp: Path) -> Path:
    """Its bytes count, not its inode."""
    copy(path / "range.snapshot", tmp / "snapshot")
    (path / "range.snapshot").unlink()
    (tmp / "snapshot").rename(path / "range.snapshot")
    return path


def link_made_and_removed(path: Path, tmp: Path) -> Path:
    os.link(path / "range.pack", tmp / "second")
    (tmp / "second").unlink()
    return path


def modes_changed_and_back(path: Path, tmp: Path) -> Path:
    for mode in (0o777, 0o700):
        path.chmod(mode)
    for mode in (0o666, 0o600):
        (path / "range.pack").chmod(mode)
    return path


def wholly_restored_in_place(path: Path, tmp: Path) -> Path:
    """Pack and snapshot are what they were, in the same files at the same time."""
    backup = copy(path, tmp / "backup")
    later_session(path)
    for name in ("range.pack", "range.snapshot"):
        overwrite(path / name, backup / name)
    os.truncate(path / "range.snapshot", (backup / "range.snapshot").stat().st_size)
    return path


WARM = [nothing, moved, moved_and_back, directory_above_renamed, pack_renamed_and_back,
        snapshot_copied, link_made_and_removed, modes_changed_and_back,
        wholly_restored_in_place]  # fmt: skip


# -- what makes it another one, or an old one --------------------------------------------------


def copied(path: Path, tmp: Path) -> Path:
    return copy(path, tmp / "copy")


def copied_over_itself(path: Path, tmp: Path) -> Path:
    copy(path / "range.pack", tmp / "pack")
    (tmp / "pack").rename(path / "range.pack")
    return path


def restored_from_backup(path: Path, tmp: Path) -> Path:
    backup = copy(path, tmp / "backup")
    later_session(path)
    shutil.rmtree(path)
    return copy(backup, path)


def restored_at_once(path: Path, tmp: Path) -> Path:
    """Removed and restored with the same time; the file system may give the same inode."""
    backup = copy(path, tmp / "backup")
    shutil.rmtree(path)
    return copy(backup, path)


def snapshot_restored(path: Path, tmp: Path) -> Path:
    backup = copy(path / "range.snapshot", tmp / "backup")
    later_session(path)
    backup.rename(path / "range.snapshot")
    return path


def pack_restored_in_place(path: Path, tmp: Path) -> Path:
    backup = copy(path / "range.pack", tmp / "backup")
    later_session(path)
    overwrite(path / "range.pack", backup)
    return path


def pack_of_another_store(path: Path, tmp: Path) -> Path:
    other = open_store(make_store(tmp / "other"))
    other.close(filled_tables(other.geometry))
    (tmp / "other" / "range.pack").rename(path / "range.pack")
    return path


def snapshot_of_another_store(path: Path, tmp: Path) -> Path:
    other = open_store(make_store(tmp / "other"))
    other.close(filled_tables(other.geometry))
    (tmp / "other" / "range.snapshot").rename(path / "range.snapshot")
    return path


def touched(path: Path, tmp: Path) -> Path:
    (path / "range.pack").touch()
    return path


def one_byte_of_payload(path: Path, tmp: Path) -> Path:
    with (path / "range.pack").open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"x")
    return path


def longer(path: Path, tmp: Path) -> Path:
    os.truncate(path / "range.pack", (path / "range.pack").stat().st_size + 4096)
    return path


def marker_by_hand(path: Path, tmp: Path) -> Path:
    (path / "range.dirty").touch(0o600)
    return path


def marker_as_a_directory(path: Path, tmp: Path) -> Path:
    (path / "range.dirty").mkdir()
    return path


def marker_as_a_link(path: Path, tmp: Path) -> Path:
    (path / "range.dirty").symlink_to("nowhere")
    return path


def marker_removed(path: Path, tmp: Path) -> Path:
    open_store(path).abandon()
    (path / "range.dirty").unlink()
    return path


def snapshot_as_a_link(path: Path, tmp: Path) -> Path:
    (path / "range.snapshot").rename(tmp / "elsewhere")
    (path / "range.snapshot").symlink_to(tmp / "elsewhere")
    return path


def snapshot_as_a_directory(path: Path, tmp: Path) -> Path:
    (path / "range.snapshot").unlink()
    (path / "range.snapshot").mkdir()
    return path


COLD: dict[Callable[[Path, Path], Path], set[str]] = {
    copied: NOT_THIS_FILE,
    copied_over_itself: NOT_THIS_FILE,
    restored_from_backup: NOT_THIS_FILE,
    restored_at_once: NOT_THIS_FILE,
    snapshot_restored: {"epoch-mismatch"},
    pack_restored_in_place: {"epoch-mismatch"},
    pack_of_another_store: {"uuid-mismatch"},
    snapshot_of_another_store: {"uuid-mismatch"},
    touched: {"mtime-changed"},
    one_byte_of_payload: {"mtime-changed"},
    longer: {"size-mismatch"},
    marker_by_hand: {"dirty-marker"},
    marker_as_a_link: {"dirty-marker"},
    marker_removed: {"epoch-mismatch"},
    snapshot_as_a_link: {"bad-snapshot"},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "above").mkdir()
    store = open_store(make_store(tmp_path / "above" / "store"))
    store.close(filled_tables(store.geometry))
    return tmp_path / "above" / "store"


def opened(path: Path) -> Store:
    """Open; what inspection foretells must be what happens."""
    foretold = read_store(str(path), AnyFiles())
    store = open_store(path)
    assert (foretold.state, foretold.reason) == (store.open_result.state, store.open_result.reason)
    return store


@pytest.mark.parametrize("happened", WARM, ids=lambda one: one.__name__)
def test_the_same_file_is_warm(path, tmp_path, happened):
    store = opened(happened(path, tmp_path))
    assert store.open_result.reason is None
    assert store.tables == filled_tables(store.geometry)
    store.abandon()


@pytest.mark.parametrize("happened", COLD, ids=lambda one: one.__name__)
def test_another_file_or_state_is_cold_and_says_why(path, tmp_path, happened):
    found = happened(path, tmp_path)
    store = opened(found)
    assert store.open_result.reason in COLD[happened]
    assert store.tables is None
    assert store.open_result.detail
    assert store.close(filled_tables(store.geometry)).state == "clean"
    again = opened(found)
    assert again.tables == filled_tables(store.geometry), "once is enough"
    again.abandon()


def test_a_directory_in_the_markers_place_is_an_error_that_says_so(path, tmp_path):
    marker_as_a_directory(path, tmp_path)
    assert read_store(str(path), AnyFiles()).reason == "dirty-marker"
    with pytest.raises(EnvironmentFault, match="not-a-regular-file"):
        open_store(path)


def test_a_directory_in_the_snapshots_place_is_cold_and_the_close_says_so(path, tmp_path):
    snapshot_as_a_directory(path, tmp_path)
    store = opened(path)
    assert store.open_result.reason == "bad-snapshot"
    result = store.close(Tables.empty())
    assert result.state == "dirty"
    assert "Is a directory; the store reopens cold" in result.detail


def test_original_and_copy_go_their_own_ways(path, tmp_path):
    twin = copied(path, tmp_path)
    first, second = opened(path), opened(twin)
    assert first.open_result.state == "warm"
    assert first.superblock.store_uuid != second.superblock.store_uuid
    for store in (first, second):
        store.close(filled_tables(store.geometry))
    for place in (path, twin):
        store = opened(place)
        assert store.open_result.state == "warm"
        store.close(filled_tables(store.geometry))
    shutil.copy2(path / "range.snapshot", twin / "range.snapshot")
    store = opened(twin)
    assert store.open_result.reason == "uuid-mismatch"
    store.abandon()


def recreated_with_its_inode(pack: Path) -> bool:
    """Remove a pack file and make it anew in the same inode, if the file system hands it out."""
    before, data = pack.stat(), pack.read_bytes()
    pack.unlink()
    others = [pack.with_name(f"other-{number}") for number in range(64)]
    for one in others:
        one.touch(0o600)
        if one.stat().st_ino == before.st_ino:
            one.rename(pack)
            pack.write_bytes(data)
            os.utime(pack, ns=(before.st_atime_ns, before.st_mtime_ns))
            break
    for one in others:
        one.unlink(missing_ok=True)
    return pack.exists()


def test_a_reused_inode_is_not_taken_for_the_file(tmp_path):
    """Somebody else may get the inode first: then it is tried again."""
    for attempt in range(30):
        path = make_store(tmp_path / f"store-{attempt}")
        store = open_store(path)
        store.close(filled_tables(store.geometry))
        before = (path / "range.pack").stat()
        if recreated_with_its_inode(path / "range.pack"):
            break
    else:
        pytest.skip("this file system gave other inodes every time")
    after = (path / "range.pack").stat()
    same = ("st_ino", "st_size", "st_mtime_ns", "st_mode")
    assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
    store = opened(path)
    assert store.open_result.reason in {"birth-time-mismatch", "generation-mismatch"}
    store.abandon()


# -- what is refused ---------------------------------------------------------------------------


def refused(path: Path) -> RangeError:
    """Both an open and a look are refused with one code, and nothing on disk changes."""
    before = contents(path.resolve())
    with pytest.raises((EnvironmentFault, StoreMissing)) as caught:
        open_store(path)
    with pytest.raises((EnvironmentFault, StoreMissing)) as seen:
        read_store(str(path), AnyFiles())
    assert seen.value.code == caught.value.code
    assert contents(path.resolve()) == before
    return caught.value


@pytest.mark.parametrize("name", [".", "range.pack"])
@pytest.mark.parametrize("mode", [0o010, 0o020, 0o040, 0o001, 0o002, 0o004, 0o077])
def test_every_bit_that_lets_others_in_is_refused(path, name, mode):
    place = path / name
    own = place.stat().st_mode & 0o777
    place.chmod(own | mode)
    assert refused(path).code == "wrong-mode"
    place.chmod(own)
    assert opened(path).close(Tables.empty()).state == "clean"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", [".", "range.pack"])
def test_a_file_of_another_user_is_refused(path, name):
    os.chown(path / name, 12345, -1)
    error = refused(path)
    assert error.code == "wrong-owner"
    assert "12345" in error.message
    os.chown(path / name, os.geteuid(), -1)
    assert opened(path).close(Tables.empty()).state == "clean"


def test_links_are_refused(path, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(path)
    assert refused(link).code == "symlink"
    os.link(path / "range.pack", tmp_path / "second")
    assert refused(path).code == "hard-linked"
    (path / "range.pack").unlink()
    (path / "range.pack").symlink_to(tmp_path / "second")
    assert refused(path).code == "symlink"
    (path / "range.pack").unlink()
    assert refused(path).code == "no-store"
