"""`drop` on the command line: what it says, asks and refuses."""

from __future__ import annotations

import hashlib
import os
import pty
import subprocess
import sys
from array import array
from pathlib import Path

import pytest
from rangekv.engine.store import Store, create
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace
from rangekv.format.records import NO_CHECKSUM, NO_PARENT, NO_SALT, Extent, Record
from rangekv.format.tables import Tables

COMMAND = [sys.executable, "-c", "from rangectl.cli import main; main()"]
MODEL = ModelGeometry(layer_count=4, token_bytes=256, block_tokens=16)
NAMESPACE = Namespace({"model": "drop"})
TENANT = hashlib.sha256(b"a salt").hexdigest()


def filled(path: Path, rank: int = 0, world_size: int = 1) -> Path:
    """A store of a prompt of two records and one of a tenant, 64 tokens each."""
    where = {"rank": rank, "world_size": world_size}
    create(str(path), capacity_bytes=4 << 20, model=MODEL, namespace=NAMESPACE, **where)
    store = Store.open(str(path), namespace=NAMESPACE, model=MODEL, allow_buffered=True, **where)
    at, width = 1 << 20, 64 << 10
    extents = [Extent(one + 1, at + one * 4 * width, width, 0, 128) for one in range(2)]
    records = [
        Record(7, 0, NO_CHECKSUM, 1, 0, 0, 0, 64, NO_PARENT, 0, 0),
        Record(8, 64, NO_CHECKSUM, 2, 0, 64, 64, 64, 0, 64, 0),
        Record(9, 128, NO_CHECKSUM, 3, 1, 0, 0, 64, NO_PARENT, 0, 1),
    ]
    roots = [NO_SALT, bytes.fromhex(TENANT)]
    tokens = array("I", range(192)).tobytes()
    assert store.close(Tables(extents, records, tokens, b"", roots, 2)).state == "clean"
    return path


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return filled(tmp_path / "store")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A namespace's folder with two ranks."""
    folder = tmp_path / "kv" / NAMESPACE.folder
    folder.mkdir(parents=True)
    for rank in range(2):
        filled(folder / f"rank-{rank}-of-2", rank, 2)
    return folder


def test_golden_record(rangectl, store: Path) -> None:
    shown = rangectl("drop", store, "--record", 8, "--yes")
    assert (shown.status, shown.err) == (0, "")
    assert (
        shown.out
        == f"""\
store        {store}
dropped      1 record, 64 tokens
room         0 B free again
left         2 records, 128 tokens
"""
    )
    after = rangectl("inspect", store, "--json").json
    assert (after["state"], after["records"]) == ("warm", 2)
    gone = rangectl("drop", store, "--record", 7, "--yes", "--json").json
    assert list(gone) == ["schema", "ok", "dry_run", "path", "stores"]
    assert gone["stores"] == [
        {
            "path": str(store),
            "records": 1,
            "tokens": 64,
            "freed_bytes": 256 << 10,
            "records_left": 1,
            "tokens_left": 64,
        }
    ]


def test_a_record_takes_what_continues_it(rangectl, store: Path) -> None:
    shown = rangectl("drop", store, "--record", 7, "--dry-run")
    assert "would drop   2 records, 128 tokens" in shown.out
    assert rangectl("inspect", store, "--json").json["records"] == 3


def test_a_tenant_goes_from_every_rank(rangectl, folder: Path) -> None:
    shown = rangectl("drop", folder, "--root", TENANT[:12], "--yes", "--json")
    assert shown.status == 0, shown.err
    assert [one["records"] for one in shown.json["stores"]] == [1, 1]
    for rank in range(2):
        after = rangectl("inspect", folder / f"rank-{rank}-of-2", "--json").json
        assert (after["state"], after["records"], after["roots"]) == ("warm", 2, 1)
    left = rangectl("drop", folder, "--root", "no-salt", "--yes")
    assert left.out.count("left         0 records, 0 tokens") == 2


def test_golden_namespace(rangectl, folder: Path) -> None:
    planned = rangectl("drop", folder, "--dry-run")
    assert planned.status == 0
    assert planned.out.count("would drop ") == 2
    assert f"namespace    {folder} is still there\n" in planned.out
    shown = rangectl("drop", folder, "--yes")
    assert (shown.status, shown.err) == (0, "")
    assert (
        shown.out
        == f"""\
dropped      {folder}/rank-0-of-2   5.00 MiB
dropped      {folder}/rank-1-of-2   5.00 MiB
namespace    {folder} is gone
"""
    )
    assert list(folder.parent.iterdir()) == []
    assert rangectl("drop", folder, "--yes").status == 10


@pytest.mark.parametrize("how", [["--record", 7], ["--root", "no-salt"], []])
def test_it_asks_and_does_nothing_without_a_terminal(rangectl, folder: Path, how: list) -> None:
    place = folder / "rank-0-of-2" if "--record" in how else folder
    refused = rangectl("drop", place, *how)
    assert (refused.status, refused.out) == (2, "")
    assert "[not-confirmed]" in refused.err
    assert rangectl("inspect", folder / "rank-0-of-2", "--json").json["records"] == 3


@pytest.mark.parametrize(("answer", "status"), [("other", 2), (None, 0)])
def test_a_terminal_has_to_type_the_path(folder: Path, answer: str | None, status: int) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer or folder}\n".encode())
    done = subprocess.run(
        [*COMMAND, "drop", str(folder)], stdin=theirs, capture_output=True, text=True, check=False
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == status
    assert f"{folder} is 2 stores, 10.00 MiB" in done.stderr
    assert folder.exists() == bool(status)


@pytest.mark.parametrize("how", [["--record", 7], ["--root", "no-salt"], []])
def test_a_live_store_is_refused_with_its_holder(rangectl, folder: Path, how: list) -> None:
    live = folder / "rank-1-of-2"
    held = Store.open(
        str(live), namespace=NAMESPACE, model=MODEL, allow_buffered=True, rank=1, world_size=2
    )
    try:
        for more in (["--yes"], ["--dry-run"]):
            refused = rangectl("drop", live if "--record" in how else folder, *how, *more)
            assert (refused.status, refused.out) == (11, "")
            assert f"process {os.getpid()}" in refused.err
    finally:
        held.abandon()
    assert rangectl("inspect", folder / "rank-0-of-2", "--json").json["records"] == 3


def test_a_cold_store_has_nothing_to_take_out(rangectl, store: Path) -> None:
    (store / "range.dirty").touch()
    refused = rangectl("drop", store, "--record", 7, "--yes")
    assert (refused.status, refused.out) == (4, "")
    assert "cold (dirty-marker)" in refused.err


@pytest.mark.parametrize(
    ("how", "code"),
    [
        (["--record", 99], "nothing-to-drop"),
        (["--root", "00000000"], "nothing-to-drop"),
        (["--root", "0000"], "bad-root"),
        (["--root", "a user"], "bad-root"),
        (["--root", "no-salt", "--record", 1], "both-kinds"),
        ([], "not-a-namespace"),
    ],
)
def test_what_cannot_be_meant(rangectl, store: Path, how: list, code: str) -> None:
    refused = rangectl("drop", store, *how, "--yes")
    assert (refused.status, refused.out) == (2, "")
    assert f"[{code}]" in refused.err
    assert rangectl("inspect", store, "--json").json["records"] == 3
