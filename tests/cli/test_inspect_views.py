"""Golden output of the views of `inspect`, on a whole store and on damaged ones."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import resource
import subprocess
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

import pytest
from rangekv.engine.store import Store, create
from rangekv.format.geometry import SUPERBLOCK_OFFSETS, ModelGeometry
from rangekv.format.namespace import Namespace
from rangekv.format.records import (
    EXTENT,
    NO_CHECKSUM,
    NO_PARENT,
    NO_SALT,
    RECORD,
    Extent,
    Record,
)
from rangekv.format.superblock import SUPERBLOCK
from rangekv.format.tables import Tables

COMMAND = [sys.executable, "-c", "from rangectl.cli import main; main()"]
VIEWS = ("superblock", "journal", "snapshot", "extents", "records", "packs", "tree")


MODEL = ModelGeometry(layer_count=4, token_bytes=256, block_tokens=16)
NAMESPACE = Namespace({"model": "chat"})
TENANT = hashlib.sha256(b"a salt").digest()


@dataclass(frozen=True)
class Chat:
    """A closed store; `store` is its directory."""

    store: Path

    def open(self) -> Store:
        how = {"namespace": NAMESPACE, "model": MODEL, "allow_buffered": True}
        return Store.open(str(self.store), **how)


@pytest.fixture
def chat(tmp_path: Path) -> Chat:
    """A prompt that goes on in two ways, one of them over two turns, and one of another tenant."""
    chat = Chat(tmp_path / "store")
    create(str(chat.store), capacity_bytes=4 << 20, model=MODEL, namespace=NAMESPACE)
    at = 1 << 20
    extents = [
        Extent(1, at, 128 << 10, 0, 384),
        Extent(2, at + (512 << 10), 64 << 10, 0, 64),
        Extent(3, at + (2 << 20), 256 << 10, 2, 1024),
    ]
    rows = [  # id, rank of last use, extent, start in it, start, count, parent, its tokens, root
        (1, 30, 0, 0, 0, 256, NO_PARENT, 0, 0),
        (2, 30, 0, 256, 256, 64, 0, 256, 0),
        (3, 10, 1, 0, 128, 64, 0, 128, 0),
        (4, 30, 0, 320, 320, 64, 1, 64, 0),
        (5, 20, 2, 0, 0, 1024, NO_PARENT, 0, 1),
    ]
    records, token_index = [], 0
    for record_id, rank, extent, in_extent, start, count, parent, parent_tokens, root in rows:
        records.append(
            Record(
                *(record_id, token_index, NO_CHECKSUM, rank, extent, in_extent, start, count),
                *(parent, parent_tokens, root),
            )
        )
        token_index += count
    tokens = array("I", range(7000, 7000 + token_index)).tobytes()
    tables = Tables(extents, records, tokens, b"", [NO_SALT, TENANT], generation_max=3)
    store = chat.open()
    assert store.close(tables).state == "clean"
    return chat


PACKS = """\
one row a pack of 1.00 MiB, one cell 32.00 KiB

0    ████████████----░░------........    75 %  2 extents
1    ................................     0 %  free
2    ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓   100 %  1 extent
3    ................................     0 %  free

░ oldest   ▒ older   ▓ younger   █ youngest   - room for the next turn   . free
"""

TREE = f"""\
root 0   no salt   4 records   448 tokens
  └─ tokens 0-255   record 1   extent 0
     ├─ tokens 128-191   record 3   extent 1
     └─ tokens 256-319   record 2   extent 0
        tokens 320-383   record 4   extent 0
root 1   salt {TENANT.hex()[:16]}   1 record   1,024 tokens
  └─ tokens 0-1,023   record 5   extent 2
"""

EXTENTS = """\
  row  generation   offset   width  pack_index  append_mark_tokens
  0             1  1048576  131072           0                 384
  1             2  1572864   65536           0                  64
  2             3  3145728  262144           2                1024
"""


def view(shown) -> str:
    """The lines behind the head."""
    return shown.out.partition("\n\n")[2]


def flip(path: Path, *offsets: int, mask: int = 0xFF) -> None:
    times = path.stat()
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ mask]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def section(rangectl, scene: Chat, kind: int) -> int:
    sections = rangectl("inspect", scene.store, "snapshot", "--json").json["sections"]
    row = {field["name"]: field["value"] for field in sections[kind - 1]["fields"]}
    assert row["kind"] == kind
    return row["offset"]


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_of_a_whole_store_marks_nothing(rangectl, chat, name: str) -> None:
    shown = rangectl("inspect", chat.store, name)
    assert (shown.status, shown.err) == (0, "")
    head, _, _ = shown.out.partition("\n\n")
    assert head == f"state        warm\npath         {chat.store}\nbad fields   none"
    assert not re.search("^!", shown.out, re.MULTILINE)
    fields = rangectl("inspect", chat.store, name, "--json").json
    assert list(fields)[:7] == ["schema", "ok", "path", "state", "reason", "view", "bad_fields"]
    assert (fields["ok"], fields["view"], fields["bad_fields"]) == (True, name, 0)
    for more in ("--hex", "--show-tokens"):
        assert rangectl("inspect", chat.store, name, more).status == 0


def test_golden_packs_tree_and_extents(rangectl, chat) -> None:
    assert view(rangectl("inspect", chat.store, "packs")) == PACKS
    assert view(rangectl("inspect", chat.store, "tree")) == TREE
    assert view(rangectl("inspect", chat.store, "extents")) == EXTENTS


def test_golden_json_of_packs_and_records(rangectl, chat) -> None:
    packs = rangectl("inspect", chat.store, "packs", "--json").json
    assert packs["pack_bytes"] == 1 << 20
    assert packs["packs"][0] == {
        "pack_index": 0,
        "used_bytes": 768 << 10,
        "extents": 2,
        "cells": [["youngest", 12], ["room", 4], ["oldest", 2], ["room", 6], ["free", 8]],
    }
    (first, *_) = rangectl("inspect", chat.store, "records", "--json").json["records"]
    names = [name for _, _, name in RECORD.rows if not name.startswith("reserved")]
    assert list(first) == ["offset", "ok", *names, "bad"]
    assert (first["record_id"], first["token_count"], first["bad"]) == (1, 256, {})


def test_the_slots_are_shown_field_by_field_from_the_codec_s_own_table(rangectl, chat) -> None:
    slots = rangectl("inspect", chat.store, "superblock", "--hex", "--json").json["superblocks"]
    page = (chat.store / "range.pack").read_bytes()[: SUPERBLOCK_OFFSETS[1] + 4096]
    for slot, start in zip(slots, SUPERBLOCK_OFFSETS, strict=True):
        shown = [(one["offset"] - start, one["name"]) for one in slot["fields"]]
        assert shown == [(at, name) for at, _, name in SUPERBLOCK.rows]
        raw = b"".join(bytes.fromhex(one["hex"]) for one in slot["fields"])
        assert raw == page[start : start + 4096]
    text = rangectl("inspect", chat.store, "superblock", "--hex").out
    (line,) = re.findall("^.*0x00080050.*$", text, re.MULTILINE)
    assert " ".join(line.split()) == "0x00080050 8 file_bytes 00 00 50 00 00 00 00 00 5242880"


def test_a_changed_byte_is_named_with_what_was_there(rangectl, chat) -> None:
    flip(chat.store / "range.pack", SUPERBLOCK_OFFSETS[1] + 72)
    shown = rangectl("inspect", chat.store, "superblock")
    assert shown.status == 1
    assert re.findall("^!.*$", shown.out, re.MULTILINE) == [
        "! epoch                 254   expected 1 (then the checksum is right)"
    ]


def test_two_lost_superblocks_do_not_hide_the_map(rangectl, chat) -> None:
    flip(chat.store / "range.pack", 104, SUPERBLOCK_OFFSETS[1] + 104, SUPERBLOCK_OFFSETS[1] + 105)
    assert "unusable" in rangectl("inspect", chat.store).out
    shown = rangectl("inspect", chat.store, "packs")
    assert shown.status == 1
    assert view(shown) == PACKS


def test_damaged_rows_are_marked_and_the_others_shown(rangectl, chat) -> None:
    record = section(rangectl, chat, 1) + RECORD.size
    extent = section(rangectl, chat, 4) + EXTENT.size
    flip(chat.store / "range.snapshot", record + 44, extent + 10, extent + 11)
    shown = rangectl("inspect", chat.store, "records")
    assert shown.status == 1
    assert re.findall("^!.*is .*$", shown.out, re.MULTILINE) == [
        "!     token_count is 191, expected 64 (then the checksum is right)"
    ]
    assert "! " in view(rangectl("inspect", chat.store, "tree"))
    packs = view(rangectl("inspect", chat.store, "packs"))
    assert "! extent 1 is damaged" in packs
    bad = rangectl("inspect", chat.store, "extents", "--json").json["extents"][1]["bad"]
    assert set(bad) == {"offset", "xxh3_64"}
    sections = rangectl("inspect", chat.store, "snapshot").out
    assert "section RECORDS: damaged" in sections
    assert "section TOKENS: ok" in sections


@pytest.mark.parametrize("length", [0, 40, 300, 600, 1100])
@pytest.mark.parametrize("name", VIEWS[2:])
def test_a_snapshot_that_is_cut_off_is_shown_as_far_as_it_goes(
    rangectl, chat, name: str, length: int
) -> None:
    os.truncate(chat.store / "range.snapshot", length)
    shown = rangectl("inspect", chat.store, name)
    assert shown.status in (1, 4), shown.err
    assert shown.out.startswith("state        cold (bad-snapshot)\n")
    assert rangectl("inspect", chat.store, name, "--hex").err == ""
    (chat.store / "range.snapshot").unlink()
    assert "no snapshot to read" in rangectl("inspect", chat.store, name).out


def test_lengths_that_ask_for_memory_do_not_get_it(rangectl, chat) -> None:
    snapshot = chat.store / "range.snapshot"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # of all tests in this process
    with snapshot.open("r+b") as file:
        for kind in range(5):
            file.seek(256 + 48 * kind + 16)
            file.write((1 << 45).to_bytes(8, "little"))
        file.truncate(1 << 43)
    for name in VIEWS:
        shown = rangectl("inspect", chat.store, name)
        assert shown.status in (1, 4), shown.err
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak < max(before, 1 << 20) + (1 << 20), f"{before} KiB before, {peak} after"


def test_token_ids_are_in_no_view_unless_asked_for(rangectl, chat) -> None:
    for name in VIEWS:
        for how in ([], ["--json"], ["--hex"]):
            shown = rangectl("inspect", chat.store, name, *how)
            assert "7007" not in shown.out
            assert "5f 1b 00 00" not in shown.out
    assert "7000 7001 7002" in rangectl("inspect", chat.store, "tree", "--show-tokens").out
    rows = rangectl("inspect", chat.store, "tree", "--show-tokens", "--json").json["records"]
    assert list(range(7000, 7256)) in [row["token_ids"] for row in rows]


def test_a_live_store_shows_its_superblocks_and_nothing_stale(rangectl, chat) -> None:
    store = chat.open()
    try:
        assert rangectl("inspect", chat.store, "superblock").out.startswith("state        live")
        refused = rangectl("inspect", chat.store, "tree")
        assert (refused.status, refused.out) == (11, "")
        assert f"process {os.getpid()}" in refused.err
    finally:
        store.abandon()


def test_a_blank_store_has_every_view(rangectl, tmp_path: Path) -> None:
    rangectl("init", tmp_path / "kv", "--capacity", "4MiB")
    for name in VIEWS:
        assert rangectl("inspect", tmp_path / "kv", name).status == 0
    assert "no packs before" in rangectl("inspect", tmp_path / "kv", "packs").out


def test_an_unknown_view_and_hex_without_one(rangectl, chat) -> None:
    refused = rangectl("inspect", chat.store, "pack")
    assert refused.status == 2
    assert refused.err == "rangectl: no view 'pack'; did you mean packs? [unknown-view]\n"
    assert "[hex-without-view]" in rangectl("inspect", chat.store, "--hex").err


def test_the_map_is_coloured_and_as_wide_as_its_terminal(chat) -> None:
    def lines(width: int, **environment: str) -> list[str]:
        ours, theirs = pty.openpty()
        subprocess.run(["stty", "cols", str(width)], stdin=theirs, check=True)
        plain = {key: value for key, value in os.environ.items() if key not in ("COLUMNS",)}
        subprocess.run(
            [*COMMAND, "inspect", str(chat.store), "packs"],
            stdout=theirs,
            check=True,
            env=plain | {"TERM": "xterm-256color", **environment},
        )
        os.close(theirs)
        with os.fdopen(ours, "rb", buffering=0) as terminal:
            return terminal.read(65536).decode().splitlines()

    wide = lines(120)
    assert any("\x1b[38;5;" in line for line in wide)
    assert not any("\x1b" in line for line in lines(120, NO_COLOR="1"))
    assert not any("\x1b" in line for line in lines(120, TERM="dumb"))
    narrow = lines(60, NO_COLOR="1")
    assert max(map(len, narrow[4:8])) <= 60


def test_a_terminal_without_block_characters_gets_digits(chat) -> None:
    shown = subprocess.run(
        [*COMMAND, "inspect", str(chat.store), "packs"],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    ).stdout
    assert "444444444444----11------........" in shown
    assert "1 oldest" in shown


def several(directory: Path) -> list[Path]:
    paths = []
    for revision in ("a1", "b2"):
        namespace = Namespace({"model": "m", "revision": revision, "kv_dtype": "bfloat16"})
        path = directory / namespace.folder / "rank-0-of-1"
        path.parent.mkdir(parents=True)
        create(
            str(path),
            capacity_bytes=4 << 20,
            model=ModelGeometry(4, 256, 16),
            namespace=namespace,
        )
        paths.append(path)
    return sorted(paths)


def test_a_directory_lists_its_namespaces_and_their_sizes(rangectl, tmp_path: Path) -> None:
    paths = several(tmp_path)
    shown = rangectl("inspect", tmp_path)
    rows = [line.split() for line in shown.out.partition("\n\n")[2].splitlines()[1:]]
    assert [row[0] for row in rows] == [path.parent.name for path in paths]
    assert all(row[1:] == ["1", "4.00", "MiB", "0", "B", "0", "m"] for row in rows)
    assert [
        one["capacity_bytes"] for one in rangectl("inspect", tmp_path, "--json").json["namespaces"]
    ] == [4 << 20] * 2


def test_diff_names_the_fields_that_differ_and_no_other(rangectl, tmp_path: Path) -> None:
    first, second = several(tmp_path)
    shown = rangectl("inspect", tmp_path, "--diff")
    assert (shown.status, shown.err) == (12, "")
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[0] == ["field", first.parent.name, second.parent.name]
    assert [line[0] for line in lines[1:]] == ["revision"]
    assert sorted(lines[1][1:]) == ["a1", "b2"]
    pair = rangectl("inspect", "--diff", first, second, "--json")
    assert (pair.status, pair.json["ok"]) == (12, False)
    assert [one["field"] for one in pair.json["differences"]] == ["revision"]
    assert rangectl("inspect", "--diff", first, first).status == 0
    assert json.loads(rangectl("inspect", "--diff", first, "--json").err)["code"] == "one-namespace"
    (first / "range.pack").write_bytes(b"")
    assert rangectl("inspect", tmp_path, "--diff").status == 1
