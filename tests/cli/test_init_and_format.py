"""`init` preallocates and never touches what is there; `format` asks before it destroys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store

BOUND = (
    *("--layers", 4, "--token-bytes", 256, "--block-tokens", 16),
    *("--namespace", "model=test", "--namespace", "revision=1"),
)


def test_a_blank_store_for_every_rank_shares_the_capacity(rangectl, tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    made = rangectl("init", kv, "--capacity", "8MiB", "--world-size", 2, "--json")
    assert made.status == 0
    assert list(made.json)[:2] == ["schema", "ok"]
    paths = [Path(store["path"]) for store in made.json["stores"]]
    assert paths == [kv / "blank" / f"rank-{rank}-of-2" for rank in range(2)]
    for path in paths:
        pack = (path / "range.pack").stat()
        assert pack.st_size == (4 << 20) + (1 << 20)
        assert pack.st_blocks * 512 >= pack.st_size, "every block is allocated"
        assert read_store(str(path)).blank


def test_the_geometry_options_bind_the_store_in_path_itself(rangectl, tmp_path: Path) -> None:
    made = rangectl("init", tmp_path / "kv", "--capacity", "8MiB", *BOUND)
    assert made.status == 0, made.err
    report = read_store(str(tmp_path / "kv"))
    assert report.state == "warm"
    assert report.namespace is not None
    assert report.namespace.fields == {"model": "test", "revision": "1"}
    assert report.geometry is not None
    assert report.geometry.layer_count == 4


@pytest.mark.parametrize(
    "some", [BOUND[:2], BOUND[:6], BOUND[6:], (*BOUND, "--world-size", 2)], ids=str
)
def test_half_a_binding_is_refused(rangectl, tmp_path: Path, some: tuple[object, ...]) -> None:
    refused = rangectl("init", tmp_path / "kv", "--capacity", "8MiB", *some)
    assert (refused.status, refused.out) == (2, "")
    assert "[half-bound]" in refused.err
    assert not (tmp_path / "kv").exists()


def test_a_dry_run_says_all_and_makes_nothing(rangectl, tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    shown = rangectl("init", kv, "--capacity", "8MiB", *BOUND, "--dry-run", "--json")
    assert shown.status == 0
    store = shown.json["stores"][0]
    assert store["geometry"]["pack_count"] * store["geometry"]["pack_bytes"] == 8 << 20
    assert shown.json["dry_run"] is True
    assert not kv.exists()


def test_an_existing_store_is_refused_by_what_it_holds(rangectl, scene) -> None:
    before = (scene.store / "range.snapshot").read_bytes()
    refused = rangectl("init", scene.store, "--capacity", "8MiB", *BOUND)
    assert (refused.status, refused.out) == (2, "")
    assert "a store is here already (warm, 2 records, 512 tokens)" in refused.err
    assert "[store-exists]" in refused.err
    assert (scene.store / "range.snapshot").read_bytes() == before


def test_zero_writes_every_byte_and_the_store_is_warm(rangectl, tmp_path: Path) -> None:
    made = rangectl("init", tmp_path / "kv", "--capacity", "8MiB", *BOUND, "--zero")
    assert made.status == 0
    assert read_store(str(tmp_path / "kv")).state == "warm"


def test_format_without_a_terminal_needs_yes(rangectl, scene, monkeypatch) -> None:
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        refused = rangectl("format", scene.store)
    assert (refused.status, refused.out) == (2, "")
    assert "[not-confirmed]" in refused.err
    assert read_store(str(scene.store)).state == "warm"


def test_a_format_dry_run_names_the_loss_and_changes_nothing(rangectl, scene) -> None:
    shown = rangectl("format", scene.store, "--dry-run")
    assert shown.status == 0
    assert "warm, 2 records, 512 tokens" in shown.out
    report = read_store(str(scene.store))
    assert report.tables is not None
    assert len(report.tables.records) == 2


def test_format_keeps_the_file_and_the_binding(rangectl, scene) -> None:
    before = read_store(str(scene.store))
    inode = (scene.store / "range.pack").stat().st_ino
    formatted = rangectl("format", scene.store, "--yes", "--json")
    assert formatted.status == 0
    assert formatted.json["lost_tokens"] == 512
    after = read_store(str(scene.store))
    assert (after.state, after.tables.records) == ("warm", [])
    assert after.namespace == before.namespace
    assert after.superblock.store_uuid != before.superblock.store_uuid
    assert (scene.store / "range.pack").stat().st_ino == inode


def test_a_store_without_superblocks_is_the_rank_that_its_name_or_its_user_says(
    rangectl, tmp_path: Path
) -> None:
    assert rangectl("init", tmp_path, "--capacity", "8MiB", "--world-size", 2).status == 0
    store = tmp_path / "blank/rank-1-of-2"
    asked = ("--rank", 2, "--world-size", 4)
    known = rangectl("format", store, "--yes", *asked)
    assert known.status == 2
    assert "the superblock says rank 1 of 2; leave --rank and --world-size out" in known.err

    def emptied(*options: object) -> tuple[int, int]:
        with (store / "range.pack").open("r+b") as pack:
            pack.write(bytes(1 << 20))
        assert rangectl("format", store, "--dry-run", *options).status == 0
        shown = rangectl("format", store, "--yes", "--json", *options).json
        return shown["rank"], shown["world_size"]

    assert emptied() == (1, 2)
    assert emptied(*asked) == (2, 4)
    store = store.rename(tmp_path / "elsewhere")
    assert emptied() == (0, 1)
    with (store / "range.pack").open("r+b") as pack:
        pack.write(bytes(1 << 20))
    for options in (("--rank", 1), ("--world-size", 2), ("--rank", 2, "--world-size", 2)):
        refused = rangectl("format", store, "--yes", *options)
        assert refused.status == 2
        assert "[bad-rank]" in refused.err


def test_the_typed_path_confirms_and_anything_else_does_not(rangectl, scene, monkeypatch) -> None:
    monkeypatch.setattr("rangectl.confirm.sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.prompt", lambda *args, **kwargs: "yes")
    refused = rangectl("format", scene.store)
    assert refused.status == 2
    assert "nothing was changed" in refused.err
    monkeypatch.setattr("click.prompt", lambda *args, **kwargs: str(scene.store))
    assert rangectl("format", scene.store).status == 0
