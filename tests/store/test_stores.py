"""Many namespaces and ranks in one directory: found, listed, made, counted."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
from rangekv.engine import stores
from rangekv.engine.inspection import read_store
from rangekv.format.errors import EnvironmentFault, StoreMissing, UsageError
from rangekv.format.namespace import Namespace
from support.stores import (
    CAPACITY_BYTES,
    MODEL,
    NAMESPACE,
    OTHER_NAMESPACE,
    AnyFiles,
    FailingFiles,
    make_store,
    open_store,
)


def resolve(directory: Path, **changes: object) -> str:
    arguments = {"namespace": NAMESPACE, "geometry": MODEL, "capacity_bytes": CAPACITY_BYTES}
    return stores.resolve(str(directory), **{"files": AnyFiles()} | arguments | changes)


def test_a_new_namespace_gets_its_own_folder(tmp_path):
    path = resolve(tmp_path)
    assert path == str(tmp_path / NAMESPACE.folder / "rank-0-of-1")
    assert resolve(tmp_path) == resolve(tmp_path, capacity_bytes=None) == path
    other = resolve(tmp_path, namespace=OTHER_NAMESPACE)
    assert stores.find_stores(str(tmp_path)) == sorted([path, other])
    assert stores.find_stores(path) == [path]
    assert stores.find_stores(str(tmp_path / NAMESPACE.folder)) == [path]
    assert stores.find_stores(str(tmp_path / "none")) == []
    open_store(Path(path)).abandon()


def test_ranks_share_the_capacity(tmp_path):
    paths = [
        resolve(tmp_path, rank=rank, world_size=2, capacity_bytes=2 * CAPACITY_BYTES + 4096)
        for rank in range(2)
    ]
    sizes = {read_store(path, AnyFiles()).superblock.capacity_bytes for path in paths}
    assert sizes == {CAPACITY_BYTES}
    assert stores.rank_capacity_bytes(2 * CAPACITY_BYTES + 4096, 2) == CAPACITY_BYTES


def test_replicas_have_their_own_stores_and_the_first_is_as_if_alone(tmp_path):
    stores.create_ranks(str(tmp_path), capacity_bytes=CAPACITY_BYTES, files=AnyFiles())
    second = resolve(tmp_path, replica=1)
    assert second == str(tmp_path / NAMESPACE.folder / "dp-1-rank-0-of-1")
    assert resolve(tmp_path, replica=0) == resolve(tmp_path)  # takes the blank one
    assert resolve(tmp_path, replica=1, capacity_bytes=None) == second
    with pytest.raises(EnvironmentFault, match="dir-capacity-exceeded"):
        resolve(tmp_path, replica=2, dir_capacity_bytes=2 * CAPACITY_BYTES)
    with pytest.raises(UsageError, match="dp-2-rank-0-of-1"):
        resolve(tmp_path, replica=2, capacity_bytes=None)


def test_a_directory_that_is_itself_a_store(tmp_path):
    path = make_store(tmp_path / "store")
    assert resolve(path) == str(path)
    assert stores.find_stores(str(path)) == [str(path)]


def test_another_capacity_is_refused_with_what_to_do(tmp_path):
    resolve(tmp_path)
    with pytest.raises(UsageError, match="rangectl drop") as caught:
        resolve(tmp_path, capacity_bytes=2 * CAPACITY_BYTES)
    assert caught.value.code == "capacity-differs"
    assert str(CAPACITY_BYTES) in caught.value.message
    (tmp_path / "kv").mkdir()
    stores.create_ranks(str(tmp_path / "kv"), capacity_bytes=CAPACITY_BYTES, files=AnyFiles())
    with pytest.raises(UsageError, match="capacity-differs"):
        resolve(tmp_path / "kv", capacity_bytes=2 * CAPACITY_BYTES)


def test_dir_capacity_bounds_all_namespaces_together(tmp_path):
    limit = 3 * CAPACITY_BYTES
    resolve(tmp_path, dir_capacity_bytes=limit)
    two_ranks = {"namespace": OTHER_NAMESPACE, "world_size": 2, "dir_capacity_bytes": limit}
    for rank in range(2):  # the second rank does not count the first one's share twice
        resolve(tmp_path, rank=rank, capacity_bytes=2 * CAPACITY_BYTES, **two_ranks)
    with pytest.raises(EnvironmentFault, match="dir-capacity-exceeded") as caught:
        resolve(tmp_path, namespace=Namespace({"model": "third"}), dir_capacity_bytes=limit)
    assert str(limit) in caught.value.message
    resolve(tmp_path, dir_capacity_bytes=1)


def test_what_is_missing(tmp_path):
    with pytest.raises(StoreMissing, match="no-store"):
        resolve(tmp_path / "none")
    with pytest.raises(UsageError, match="rangectl init"):
        resolve(tmp_path, capacity_bytes=None)


def test_a_failed_create_leaves_nothing_behind(tmp_path):
    with pytest.raises(EnvironmentFault, match="no-space"):
        resolve(tmp_path, files=FailingFiles("fallocate", errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


def test_listing_says_what_is_damaged(tmp_path):
    good, bad = resolve(tmp_path), resolve(tmp_path, namespace=OTHER_NAMESPACE)
    (Path(bad) / "range.pack").write_bytes(bytes(5 * 1024 * 1024))
    held = open_store(Path(good))
    places = {place.path: place for place in stores.list_stores(str(tmp_path), AnyFiles())}
    held.abandon()
    assert places[good].namespace == NAMESPACE
    assert places[good].problem is None
    assert places[good].file_bytes == 5 * 1024 * 1024
    assert places[bad].namespace is None
    assert "not-a-store" in places[bad].problem


def test_the_nearest_other_namespace(tmp_path):
    mine = Namespace({"model": "m", "vllm": "0.32", "tags": ""})
    near = Namespace({"model": "m", "vllm": "0.33", "tags": ""})
    far = Namespace({"model": "n", "vllm": "0.33", "tags": ""})
    assert stores.nearest_other(str(tmp_path), mine, AnyFiles()) is None
    for namespace in (mine, far, near):
        resolve(tmp_path, namespace=namespace)
    found = stores.nearest_other(str(tmp_path), mine, AnyFiles())
    assert found.namespace == near
    assert found.differences == [("vllm", "0.32", "0.33")]
    assert found.path == str(tmp_path / near.folder / "rank-0-of-1")


def test_blank_stores_for_every_rank_or_none(tmp_path):
    planned = stores.create_ranks(
        str(tmp_path / "kv"),
        capacity_bytes=2 * CAPACITY_BYTES,
        world_size=2,
        files=AnyFiles(),
        dry_run=True,
    )
    assert not (tmp_path / "kv").exists()
    made = stores.create_ranks(
        str(tmp_path / "kv"), capacity_bytes=2 * CAPACITY_BYTES, world_size=2, files=AnyFiles()
    )
    assert [one.path for one in made] == [one.path for one in planned]
    assert stores.find_stores(str(tmp_path)) == [], "only two levels are looked at"
    assert stores.find_stores(str(tmp_path / "kv")) == [one.path for one in made]
    with pytest.raises(UsageError, match="store-exists"):
        stores.create_ranks(str(tmp_path / "kv"), capacity_bytes=CAPACITY_BYTES, world_size=2)
    for arguments, error in (
        ({"world_size": 0}, UsageError),
        ({"capacity_bytes": 1 << 60, "world_size": 4}, EnvironmentFault),
    ):
        with pytest.raises(error):
            stores.create_ranks(
                str(tmp_path / "more"), **{"capacity_bytes": CAPACITY_BYTES} | arguments
            )
    with pytest.raises(UsageError, match="parent-missing"):
        stores.create_ranks(str(tmp_path / "a" / "b"), capacity_bytes=CAPACITY_BYTES)
    assert [one.name for one in tmp_path.iterdir()] == ["kv"]


def test_blanks_of_a_call_that_was_stopped_are_completed(tmp_path):
    how = {"capacity_bytes": 2 * CAPACITY_BYTES, "world_size": 2, "files": AnyFiles()}
    both = [one.path for one in stores.create_ranks(str(tmp_path / "kv"), **how)]
    shutil.rmtree(both[1])
    with pytest.raises(UsageError, match="capacity-differs"):
        stores.create_ranks(str(tmp_path / "kv"), **how | {"capacity_bytes": CAPACITY_BYTES})
    assert [one.path for one in stores.create_ranks(str(tmp_path / "kv"), **how)] == both[1:]


def test_blanks_that_fail_leave_no_directory(tmp_path):
    for call in ("mkdir", "fsync_dir", "fallocate", "fsync", "rename_noreplace"):
        with pytest.raises(EnvironmentFault):
            stores.create_ranks(
                str(tmp_path / "kv"), capacity_bytes=CAPACITY_BYTES, files=FailingFiles(call)
            )
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "broken link"])
def test_what_stands_in_the_place_of_a_directory(tmp_path, kind):
    place = tmp_path / "kv"
    if kind == "file":
        place.touch()
    else:
        place.symlink_to("nowhere")
    with pytest.raises(UsageError, match="not-a-directory"):
        stores.create_ranks(str(place), capacity_bytes=CAPACITY_BYTES)
