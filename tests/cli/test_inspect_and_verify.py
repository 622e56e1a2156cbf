"""Golden output of `inspect`, and what `inspect` and `verify` say about every kind of damage."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from rangekv.engine.inspection import read_store
from rangekv.format.checksum import xxh3_128_le
from rangekv.format.geometry import SUPERBLOCK_OFFSETS

GOLDEN = """\
state        warm
path         STORE
format       1.0 on FS
store        UUID   epoch 1   rank 0 of 1
namespace    3f9d30c34f06
             model  replay-fault
geometry     4 layers x 256 bytes a token, blocks of 16 tokens (4.00 KiB), \
stripes 64.00 KiB to 256.00 KiB
capacity     4.00 MiB   4 packs x 1.00 MiB
used         1.00 MiB   2 records   512 tokens   1 pack in use
"""

GOLDEN_KEYS = [
    "schema",
    "ok",
    "path",
    "state",
    "reason",
    "detail",
    "filesystem",
    "identity",
    "superblocks",
    "marker",
    "marker_exists",
    "journal",
    "format",
    "store_uuid",
    "epoch",
    "rank",
    "world_size",
    "blank",
    "namespace",
    "capacity_bytes",
    "geometry",
    "used_bytes",
    "records",
    "extents",
    "tokens",
    "roots",
    "record_table",
]


def overwrite(path: Path, offset: int, data: bytes) -> None:
    """Change bytes of a file and leave its times as they were, as decay does."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def flip(path: Path, offset: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        byte = file.read(1)
    overwrite(path, offset, bytes([byte[0] ^ 0xFF]))


def masked(text: str, scene) -> str:
    text = text.replace(str(scene.store), "STORE")
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", text)
    return re.sub(r"(format +1\.0 on) \S+", r"\1 FS", text)


def test_golden_text(rangectl, scene) -> None:
    shown = rangectl("inspect", scene.store)
    assert (shown.status, shown.err) == (0, "")
    assert masked(shown.out, scene) == GOLDEN


def test_golden_json(rangectl, scene) -> None:
    shown = rangectl("inspect", scene.store, "--json")
    assert (shown.status, shown.err) == (0, "")
    fields = shown.json
    assert list(fields) == GOLDEN_KEYS
    assert (fields["schema"], fields["ok"]) == ("rangectl.inspect/1", True)
    assert fields["superblocks"] == [
        {"valid": True, "sequence": 1, "epoch": 0},
        {"valid": True, "sequence": 2, "epoch": 1},
    ]
    assert fields["namespace"]["fields"] == {"model": "replay-fault"}
    assert fields["geometry"]["usable_bytes"] == fields["capacity_bytes"] == 4 << 20
    assert (fields["used_bytes"], fields["tokens"]) == (1 << 20, 512)
    assert [row["token_count"] for row in fields["record_table"]] == [256, 256]
    assert all(row["checksums"] for row in fields["record_table"])


def test_a_killed_store_tells_what_an_open_would_recover(rangectl, scene) -> None:
    engine = scene.open(recovery="journal", commit_interval_s=3600)
    assert scene.save(engine, scene.prompt())
    assert engine.commit(10)
    engine._commits.close()
    engine._pool.close(10)
    engine.store.abandon()
    kept = "would-recover (3 records, 768 tokens; 1 commits, its journal is complete)"
    shown = rangectl("inspect", scene.store)
    lines = shown.out.splitlines()
    assert (shown.status, lines[0]) == (0, f"state        {kept}")
    journal = rangectl("inspect", scene.store, "--json").json["journal"]
    length = (scene.store / "range.journal").stat().st_size
    assert (journal["commits"], journal["bytes"], journal["torn_bytes"]) == (1, length, 0)
    assert journal["last_commit_unix_ns"] > 0
    assert re.match(r"journal      1 commit, the last \d seconds? ago, in ", lines[-1])
    assert not any(line.startswith("detail") for line in lines)
    with (scene.store / "range.journal").open("ab") as file:
        file.write(bytes(5))
    assert rangectl("inspect", scene.store).out.endswith("   5 bytes of a torn one\n")
    assert rangectl("format", scene.store, "--dry-run").out.count("768 tokens") == 1


def test_token_ids_are_shown_only_on_request(rangectl, scene) -> None:
    written = scene.prompt()
    with scene.engine() as engine:
        assert scene.save(engine, written)
    prompt = written.tolist()
    text = " ".join(map(str, prompt[:8]))
    assert text not in rangectl("inspect", scene.store).out
    rows = rangectl("inspect", scene.store, "--json").json["record_table"]
    assert not any("token_ids" in row for row in rows)
    assert text in rangectl("inspect", scene.store, "--show-tokens").out
    shown = rangectl("inspect", scene.store, "--show-tokens", "--json").json
    assert prompt in [row["token_ids"] for row in shown["record_table"]]


def test_a_directory_means_the_one_store_below_it(rangectl, scene) -> None:
    assert rangectl("inspect", scene.store.parent).out == rangectl("inspect", scene.store).out


def test_several_stores_are_listed_and_the_worst_decides(rangectl, tmp_path: Path) -> None:
    rangectl("init", tmp_path / "kv", "--capacity", "8MiB", "--world-size", 2)
    shown = rangectl("inspect", tmp_path / "kv")
    assert shown.status == 0
    lines = shown.out.splitlines()
    assert [line.split()[1] for line in lines[:3]] == ["state", "warm", "warm"]
    assert lines[4].split() == ["namespace", "stores", "capacity", "used", "tokens", "model"]
    assert lines[5].split() == ["blank", "2", "8.00", "MiB", "0", "B", "0", "-"]
    (tmp_path / "kv/blank/rank-1-of-2/range.dirty").touch()
    assert rangectl("inspect", tmp_path / "kv").status == 4
    refused = rangectl("verify", tmp_path / "kv")
    assert refused.status == 2
    assert "blank/rank-0-of-2, blank/rank-1-of-2" in refused.err


def test_one_unreadable_store_of_several_hides_no_other(rangectl, tmp_path: Path) -> None:
    rangectl("init", tmp_path / "kv", "--capacity", "8MiB", "--world-size", 2)
    place = tmp_path / "kv/blank/rank-0-of-2"
    place.chmod(0o755)
    shown = rangectl("inspect", tmp_path / "kv")
    assert shown.status == 3
    _, other, unreadable, why, *_ = shown.out.splitlines()
    assert other.split()[:2] == [str(tmp_path / "kv/blank/rank-1-of-2"), "warm"]
    assert unreadable.split()[:3] == [str(place), "unreadable", "(wrong-mode)"]
    assert why.startswith(f"unreadable   {place}: mode 0755 lets other users in")
    stores = rangectl("inspect", tmp_path / "kv", "--json").json["stores"]
    assert [(one["state"], one["reason"]) for one in stores] == [
        ("warm", None),
        ("unreadable", "wrong-mode"),
    ]
    alone = rangectl("inspect", place)
    assert (alone.status, alone.out) == (3, "")
    assert "[wrong-mode]" in alone.err


def test_a_live_store_is_told_and_not_verified(rangectl, scene) -> None:
    with scene.engine():
        shown = rangectl("inspect", scene.store)
        assert shown.status == 0
        holder = f"process {os.getpid()} or a child of it holds the store"
        assert shown.out.startswith(f"state        live ({holder})\n")
        refused = rangectl("verify", scene.store)
        assert (refused.status, refused.out) == (11, "")
        assert f"process {os.getpid()}" in refused.err
        assert rangectl("format", scene.store, "--yes").status == 11


def test_a_dirty_store_is_cold_with_its_reason(rangectl, scene) -> None:
    (scene.store / "range.dirty").touch()
    shown = rangectl("inspect", scene.store)
    assert shown.status == 4
    assert shown.out.startswith("state        cold (dirty-marker)\n")
    assert rangectl("inspect", scene.store, "--json").json["reason"] == "dirty-marker"
    checked = rangectl("verify", scene.store, "--read-data")
    assert checked.status == 4
    assert "not read: an open would not serve it" in checked.out


def test_verify_reads_every_page(rangectl, scene) -> None:
    checked = rangectl("verify", scene.store, "--read-data", "--json")
    assert checked.status == 0
    pages = checked.json["pages"]
    assert (pages["ok"], pages["bad"], pages["unverifiable"]) == (8, 0, 0)
    assert pages["read_bytes"] == 2 * 256 * 4 * 256


def test_one_flipped_payload_byte_is_one_bad_page(rangectl, scene) -> None:
    row = rangectl("inspect", scene.store, "--json").json["record_table"][1]
    flip(scene.store / "range.pack", row["offset"] + 2 * row["width"] + 777)
    assert rangectl("verify", scene.store).status == 0, "the structure is whole"
    checked = rangectl("verify", scene.store, "--read-data", "--json")
    assert checked.status == 1
    pages = checked.json["pages"]
    assert (pages["ok"], pages["bad"], pages["unverifiable"]) == (7, 1, 0)
    assert pages["bad_pages"] == [
        {
            "record_id": row["record_id"],
            "layer_index": 2,
            "token_start": 0,
            "offset": row["offset"] + 2 * row["width"],
            "problem": "checksum mismatch",
            "extent": 0,
            "pack_index": row["pack_index"],
            "page_index": 0,
        }
    ]
    assert pages["bad_records"] == [row["record_id"]]
    assert "layer 2, from token 0" in rangectl("verify", scene.store, "--read-data").out


@pytest.mark.parametrize("copy_index", [0, 1])
def test_one_bad_superblock_is_shown_and_fails_the_check(rangectl, scene, copy_index: int) -> None:
    flip(scene.store / "range.pack", SUPERBLOCK_OFFSETS[copy_index] + 300)
    shown = rangectl("inspect", scene.store)
    assert f"damaged      superblock {'AB'[copy_index]}: " in shown.out
    checked = rangectl("verify", scene.store)
    assert checked.status == 1
    assert f"superblock {'AB'[copy_index]}" in checked.out


def test_two_bad_superblocks_are_no_store(rangectl, scene) -> None:
    for offset in SUPERBLOCK_OFFSETS:
        flip(scene.store / "range.pack", offset + 300)
    shown = rangectl("inspect", scene.store)
    assert shown.status == 1
    assert shown.out.startswith("state        unusable (not-a-store)\n")
    assert rangectl("verify", scene.store).status == 1


def test_a_truncated_pack_is_named(rangectl, scene) -> None:
    os.truncate(scene.store / "range.pack", 3 << 20)
    shown = rangectl("inspect", scene.store)
    assert shown.status == 1
    assert "unusable (truncated-pack)" in shown.out
    assert "3145728 bytes long, expected 5242880" in shown.out
    assert rangectl("verify", scene.store).status == 1
    assert rangectl("format", scene.store, "--yes").status == 1


def test_a_damaged_snapshot_is_cold_to_inspect_and_bad_to_verify(rangectl, scene) -> None:
    flip(scene.store / "range.snapshot", 400)
    shown = rangectl("inspect", scene.store)
    assert shown.status == 4
    assert shown.out.startswith("state        cold (bad-snapshot)\n")
    checked = rangectl("verify", scene.store)
    assert checked.status == 1
    assert "snapshot: " in checked.out


def test_a_newer_version_is_unsupported(rangectl, scene) -> None:
    pack = scene.store / "range.pack"
    for offset in SUPERBLOCK_OFFSETS:
        page = bytearray(pack.read_bytes()[offset : offset + 4096])
        page[12:14] = (2).to_bytes(2, "little")
        page[4080:] = xxh3_128_le(bytes(page[:4080]))
        overwrite(pack, offset, bytes(page))
    shown = rangectl("inspect", scene.store)
    assert shown.status == 5
    assert shown.out.startswith("state        unsupported (unsupported-version)\n")
    assert rangectl("verify", scene.store).status == 5


def test_nothing_that_looks_changes_anything(rangectl, scene) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in scene.store.iterdir()}
    rangectl("inspect", scene.store)
    rangectl("verify", scene.store, "--read-data")
    assert {path.name: path.stat().st_mtime_ns for path in scene.store.iterdir()} == before
    assert read_store(str(scene.store)).state == "warm"
