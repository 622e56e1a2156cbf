"""Taking records or a whole namespace out of closed stores: exact, warm after it, safe to stop."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from rangekv.engine import EngineConfig
from rangekv.engine.inspection import read_store
from rangekv.engine.pruning import NotWarm, plan, prune, with_descendants, without
from rangekv.engine.removal import remove_namespace
from rangekv.engine.stores import find_stores
from rangekv.format.errors import OtherNamespace, RangeError, StoreLocked, UsageError
from rangekv.format.geometry import Geometry
from rangekv.format.tables import Tables, check_tables
from support.interruption import Died, Interrupted
from support.rig import Rig, tokens_of
from support.stores import (
    CAPACITY_BYTES,
    MODEL,
    NAMESPACE,
    AnyFiles,
    filled_tables,
    make_store,
    open_store,
)

GEOMETRY = Geometry.derive(MODEL, CAPACITY_BYTES)
RANKS = ("rank-0-of-2", "rank-1-of-2")


def filled_store(path: Path) -> Path:
    store = open_store(make_store(path))
    assert store.close(filled_tables(store.geometry)).state == "clean"
    return path


def row(number: int):
    return lambda tables: {number} & set(range(len(tables.records)))


@pytest.mark.parametrize(
    ("asked", "left"),
    [({0}, [12]), ({1}, [10, 12]), ({2}, [10, 11]), ({0, 1, 2}, []), (set(), None)],
)
def test_what_is_left_is_what_its_reader_accepts(asked: set[int], left: list[int] | None):
    tables = filled_tables(GEOMETRY)
    after = without(tables, GEOMETRY, with_descendants(tables, asked))
    check_tables(after, GEOMETRY)
    if left is None:
        assert after == tables
        return
    assert [record.record_id for record in after.records] == left
    block = GEOMETRY.block_tokens
    ids = np.frombuffer(after.tokens, dtype="<u4").tolist()
    kept = [one - 10 for one in left]
    assert ids == [t for one in kept for t in range(one * block, (one + 1) * block)]
    pages = GEOMETRY.layer_count * GEOMETRY.page_count(block)
    hashed = [one for one in kept if one < 2]
    expected = [t for one in hashed for t in range(one * pages, (one + 1) * pages)]
    assert np.frombuffer(after.checksums, dtype="<u8").tolist() == expected
    assert len(after.roots) == (2 if 12 in left else 1)
    assert after.generation_max == tables.generation_max


def test_survivors_restore_byte_for_byte_and_the_dropped_are_gone(tmp_path: Path):
    rig = Rig(tmp_path / "store")
    start, other = tokens_of(1, 256), tokens_of(2, 256)
    longer = np.concatenate([start, tokens_of(3, 128)])
    branch = np.concatenate([start[:128], tokens_of(4, 128)])
    for prompt in (start, longer, branch, other):
        assert rig.save(prompt)
    rig.engine.close(30)
    report = read_store(str(rig.path))
    records = report.tables.records
    (turn,) = [n for n, one in enumerate(records) if one.token_start == 256]
    assert plan(report, row(turn)).records == 1
    assert read_store(str(rig.path)) == report, "a plan changes nothing"
    gone = prune(report, row(turn))
    assert (gone.records, gone.tokens, gone.tokens_left) == (1, 128, 256 + 128 + 256)
    again = Rig(rig.path, new=False, config=rig.config)
    assert again.engine.open_result.state == "warm"
    assert [again.restore(one) for one in (start, longer, branch, other)] == [256, 256, 256, 256]
    assert again.save(longer), "its room can be used again"
    assert again.restore(longer) == 384
    again.check_quiet()
    again.engine.close(30)
    report = read_store(str(rig.path))
    (top,) = [
        n
        for n, one in enumerate(report.tables.records)
        if one.token_start == 0
        and bytes(report.tables.tokens[4 * one.token_index :][:64]) == start[:16].tobytes()
    ]
    assert prune(report, row(top)).records == 3
    last = Rig(rig.path, new=False, config=rig.config)
    assert [last.restore(one) for one in (start, longer, branch, other)] == [0, 0, 0, 256]
    last.engine.close(30)


def test_a_tenant_goes_and_the_others_stay(tmp_path: Path):
    rig = Rig(tmp_path / "store")
    tokens = tokens_of(9, 128)
    digest = hashlib.sha256(b"tenant").digest()
    save = rig.engine.save(rig.key(), tokens, root=rig.engine.root(digest), start_token=0)
    block_ids = rig.take(8)
    rig.produce(tokens, block_ids)
    rig.announce(save, block_ids)
    assert save.extracted(30)
    save.finish()
    assert save.wait(30)
    rig.give(block_ids)
    assert rig.save(tokens)
    rig.engine.close(30)
    report = read_store(str(rig.path))
    assert digest in report.tables.roots
    root = report.tables.roots.index(digest)
    prune(report, lambda t: {n for n, one in enumerate(t.records) if one.root == root})
    after = read_store(str(rig.path))
    assert (after.state, digest in after.tables.roots, len(after.tables.records)) == (
        "warm",
        False,
        1,
    )
    assert digest not in (rig.path / "range.snapshot").read_bytes()


def test_what_is_dropped_from_a_killed_session_is_gone_and_the_rest_is_kept(tmp_path: Path):
    rig = Rig(
        tmp_path / "store",
        config=EngineConfig(read_workers=4, lock_wait_s=0.5, commit_interval_s=3600),
    )
    kept, gone = tokens_of(5, 128), tokens_of(6, 128)
    for prompt in (kept, gone):
        assert rig.save(prompt)
    assert rig.engine.commit(30)
    rig.engine._commits.close()
    rig.engine._pool.close(30)
    rig.engine.store.abandon()
    report = read_store(str(rig.path))
    assert (report.state, len(report.tables.records)) == ("would-recover", 2)
    first = gone[:16].astype("<u4").tobytes()
    (last,) = [
        n
        for n, one in enumerate(report.tables.records)
        if bytes(report.tables.tokens)[4 * one.token_index :].startswith(first)
    ]
    assert prune(report, row(last)).records == 1
    again = Rig(rig.path, new=False, config=rig.config)
    assert again.engine.open_result.state == "warm"
    assert (again.restore(kept), again.hit(gone)) == (128, 0)
    again.engine.close(30)


def test_a_held_store_is_refused(tmp_path: Path):
    path = filled_store(tmp_path / "store")
    report = read_store(str(path))
    store = open_store(path)
    try:
        with pytest.raises(StoreLocked):
            prune(report, row(0))
    finally:
        store.close(filled_tables(GEOMETRY))


def stopped(run, at: int, death: bool) -> tuple[Interrupted, object]:
    files = Interrupted(at, death=death)
    result: object = None
    try:
        result = run(files)
    except (Died, RangeError, OSError) as raised:
        result = raised
    files.bury()
    return files, result


@pytest.mark.parametrize("death", [False, True])
def test_a_prune_that_is_stopped_anywhere_leaves_all_or_the_rest_or_a_cold_store(
    tmp_path: Path, death: bool
):
    outcomes = set()
    whole = filled_tables(GEOMETRY)
    rest = without(whole, GEOMETRY, {2})
    for at in range(1, 200):
        path = filled_store(tmp_path / f"{at}")
        report = read_store(str(path))
        files, result = stopped(lambda seam, r=report: prune(r, row(2), seam), at, death)
        after = read_store(str(path), AnyFiles())
        ids = [one.record_id for one in after.tables.records] if after.tables else []
        outcomes.add((after.state, len(ids)))
        assert after.state in ("warm", "would-recover", "cold")
        if isinstance(result, NotWarm):
            assert ids == []  # the open could not read the index, and said so
        elif after.state != "cold":
            assert ids in ([10, 11, 12], [10, 11])
        store = open_store(path)
        assert store.close(store.tables or Tables.empty()).state == "clean"
        shutil.rmtree(path)
        if not files.reached:
            assert ids == [one.record_id for one in rest.records]
            break
    else:
        raise AssertionError("the protocol never ends")
    assert {("warm", 3), ("warm", 2)} <= outcomes


def namespace_folder(directory: Path) -> Path:
    folder = directory / NAMESPACE.folder
    folder.mkdir(parents=True, mode=0o700)
    for name in RANKS:
        filled_store(folder / name)
    return folder


@pytest.mark.parametrize("death", [False, True])
def test_a_removal_that_is_stopped_anywhere_is_finished_by_the_next(tmp_path: Path, death: bool):
    for at in range(1, 300):
        directory = tmp_path / f"{at}"
        folder = namespace_folder(directory)
        files, _ = stopped(lambda seam, f=folder: remove_namespace(str(f), seam), at, death)
        for path in find_stores(str(directory)):
            report = read_store(path, AnyFiles())
            assert report.state in ("warm", "cold")
            if report.state == "warm":
                assert len(report.tables.records) == 3
        if folder.exists():
            remove_namespace(str(folder))
        assert list(directory.iterdir()) == []
        directory.rmdir()
        if not files.reached:
            return
    raise AssertionError("the removal never ends")


def test_nothing_goes_while_one_rank_is_held_or_something_else_lies_there(tmp_path: Path):
    folder = namespace_folder(tmp_path)
    store = open_store(folder / RANKS[1])
    try:
        with pytest.raises(StoreLocked):
            remove_namespace(str(folder))
    finally:
        store.close(filled_tables(GEOMETRY))
    for name in ("notes.txt", f"{RANKS[0]}/notes.txt"):
        (folder / name).touch()
        with pytest.raises(UsageError, match="foreign-file"):
            remove_namespace(str(folder))
        (folder / name).unlink()
    assert [read_store(str(folder / name)).state for name in RANKS] == ["warm", "warm"]
    assert [one.file_bytes for one in remove_namespace(str(folder), dry_run=True)] == [
        CAPACITY_BYTES + (1 << 20)
    ] * 2
    assert folder.exists()


def test_only_a_namespace_s_own_folder_is_removed(tmp_path: Path):
    plain = tmp_path / "kv"
    filled_store(plain)
    with pytest.raises(UsageError, match="not-a-namespace"):
        remove_namespace(str(plain))
    elsewhere = tmp_path / "0123456789ab" / RANKS[0]
    elsewhere.parent.mkdir(mode=0o700)
    filled_store(elsewhere)
    with pytest.raises(OtherNamespace, match=NAMESPACE.folder):
        remove_namespace(str(elsewhere.parent))
    link = tmp_path / "ba9876543210"
    link.symlink_to(namespace_folder(tmp_path / "real"))
    with pytest.raises(RangeError):
        remove_namespace(str(link))
    assert (link / RANKS[0] / "range.pack").exists()


def test_a_destroyed_store_and_leftovers_can_be_removed(tmp_path: Path):
    folder = namespace_folder(tmp_path)
    with (folder / RANKS[0] / "range.pack").open("r+b") as file:
        file.write(bytes(1 << 20))
    (folder / RANKS[1] / "range.pack").unlink()
    (folder / RANKS[1] / ".range.pack.0123456789abcdef.tmp").touch()
    assert [bool(one.file_bytes) for one in remove_namespace(str(folder))] == [True, False]
    assert os.listdir(tmp_path) == []
