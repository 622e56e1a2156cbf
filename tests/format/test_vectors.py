"""The files of tests/vectors: derived from named inputs, and read alike by two readers."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rangekv.format import journal, snapshot
from rangekv.format.envelope import HEAD_BYTES_MAX, IDENTITY_FIELDS, SnapshotHeader
from rangekv.format.errors import FormatError
from rangekv.format.marker import Marker
from rangekv.format.superblock import GEOMETRY_FIELDS, Superblock
from rangekv.format.tables import TableLimits
from support.recovered import named, recovered, summary
from vectors import decoder, examples, generate

VECTORS = Path(__file__).parent.parent / "vectors"
INDEX = json.loads((VECTORS / "vectors.json").read_text("utf-8"))
EXAMPLES = examples.names()
GOOD = [name for name, about in INDEX.items() if about["expect"] == "ok"]

JOURNALS = [name for name in GOOD if INDEX[name]["kind"] == "journal"]


def bytes_of(name: str) -> bytes:
    return (VECTORS / name).read_bytes()


def superblock_of(about: dict) -> Superblock:
    name = about["superblock"]
    return Superblock.decode(bytes_of(name), INDEX[name]["copy_index"])


def read_by_range(about: dict, data: bytes) -> object:
    if about["kind"] == "superblock":
        return Superblock.decode(data, about["copy_index"])
    if about["kind"] == "marker":
        return Marker.decode(data)
    superblock = superblock_of(about)
    if about["kind"] == "journal":
        beside = INDEX[about["snapshot"]], bytes_of(about["snapshot"])
        header, tables = read_by_range(*beside)
        marker = Marker.decode(bytes_of(about["marker"]))
        return recovered(data, marker, tables, header.envelope, superblock)
    geometry = superblock.geometry
    header = SnapshotHeader.decode(data[:HEAD_BYTES_MAX], len(data), TableLimits.of(geometry))
    return header, snapshot.decode(data, header, geometry)


def read_by_decoder(about: dict, data: bytes) -> dict:
    if about["kind"] == "superblock":
        return decoder.decode_superblock(data, about["copy_index"])
    if about["kind"] == "marker":
        return decoder.decode_marker(data)
    copy = INDEX[about["superblock"]]["copy_index"]
    superblock = decoder.decode_superblock(bytes_of(about["superblock"]), copy)
    if about["kind"] == "journal":
        marker = decoder.decode_marker(bytes_of(about["marker"]))
        beside = decoder.decode_snapshot(bytes_of(about["snapshot"]), superblock)
        return decoder.recover(data, marker, beside, superblock)
    return decoder.decode_snapshot(data, superblock)


def test_every_file_is_derived_from_named_inputs():
    found = generate.vectors()
    assert (VECTORS / "vectors.json").read_text("utf-8") == generate.index(found)
    assert {path.name for path in VECTORS.glob("*.bin")} == found.keys()
    for name, (_, data) in found.items():
        assert (VECTORS / name).read_bytes() == data, name


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_dump_in_the_text_is_the_file(name):
    data = bytes_of(name)
    _, dumped = generate.example(name)
    assert dumped == data[: len(dumped)]
    assert not any(data[len(dumped) :]), "only zeros may be left out at the end"


def test_the_decoder_shares_no_code_with_range():
    tree = ast.parse((VECTORS / "decoder.py").read_text("utf-8"))
    imported = {
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([one.name for one in node.names] + [getattr(node, "module", None) or ""])
    }
    assert not {name for name in imported if name.startswith(("rangekv", "rangectl", "support"))}


@pytest.mark.parametrize("name", INDEX)
def test_both_readers_decide_as_the_index_says(name):
    about, data = INDEX[name], (VECTORS / name).read_bytes()
    if about["expect"] == "ok":
        read_by_range(about, data)
        read_by_decoder(about, data)
        return
    with pytest.raises(FormatError) as refused:
        read_by_range(about, data)
    assert refused.value.code == about["expect"]
    with pytest.raises(decoder.Refused, match=f"^{about['expect']}$"):
        read_by_decoder(about, data)


@pytest.mark.parametrize("name", [name for name in GOOD if name.startswith("superblock")])
def test_both_readers_find_the_same_superblock(name):
    data = (VECTORS / name).read_bytes()
    mine, theirs = read_by_range(INDEX[name], data), read_by_decoder(INDEX[name], data)
    same = ["store_uuid", "sequence", "epoch", "fs_magic", "rank", "world_size"]
    same += ["created_unix_ns", "version_minor"]
    same += ["feature_compat", "feature_ro_compat", "feature_incompat"]
    assert {key: getattr(mine, key) for key in same} == {key: theirs[key] for key in same}
    for key in IDENTITY_FIELDS:
        assert getattr(mine.identity, key) == theirs[key]
    assert mine.blank == theirs["blank"]
    assert mine.geometry_digest() == theirs["geometry_xxh3_128"]
    if mine.geometry is not None:
        for key in GEOMETRY_FIELDS:
            assert getattr(mine.geometry, key) == theirs[key]
        assert mine.namespace.fields == theirs["namespace"]


@pytest.mark.parametrize("name", [name for name in GOOD if name.startswith("snapshot")])
def test_both_readers_find_the_same_snapshot(name):
    data = (VECTORS / name).read_bytes()
    (header, mine), theirs = read_by_range(INDEX[name], data), read_by_decoder(INDEX[name], data)
    assert [row._asdict() for row in mine.records] == theirs["records"]
    assert [row._asdict() for row in mine.extents] == theirs["extents"]
    assert list(memoryview(mine.tokens).cast("I")) == theirs["tokens"]
    assert list(memoryview(mine.checksums).cast("Q")) == theirs["checksums"]
    assert mine.roots == theirs["roots"]
    envelope = header.envelope
    for key in IDENTITY_FIELDS:
        assert getattr(envelope.identity, key) == theirs[key]
    assert envelope.pack_mtime_ns == theirs["pack_mtime_sec"] * 10**9 + theirs["pack_mtime_nsec"]
    assert envelope.geometry_digest == theirs["geometry_xxh3_128"]
    assert (envelope.store_uuid, envelope.epoch) == (theirs["store_uuid"], theirs["epoch"])
    assert mine.generation_max == theirs["generation_max"]


def test_both_readers_find_the_same_marker():
    data = (VECTORS / "marker.bin").read_bytes()
    mine, theirs = Marker.decode(data), decoder.decode_marker(data)
    assert theirs == {"version": 1} | {key: getattr(mine, key) for key in Marker.__slots__}


@pytest.mark.parametrize("name", JOURNALS)
def test_every_commit_leads_where_the_index_says(name):
    about, data = INDEX[name], bytes_of(name)
    (found, last), theirs = read_by_range(about, data), read_by_decoder(about, data)
    assert found.torn_bytes == theirs["torn_bytes"] == about["torn_bytes"]
    geometry = superblock_of(about).geometry
    ends = [journal.HEADER_BYTES, *(frame.end for frame in found.frames)]
    assert ends == theirs["ends"]
    for end, expected in zip(ends, about["after"], strict=True):
        _, tables = read_by_range(about, data[:end])
        mine, theirs = named(tables, geometry), read_by_decoder(about, data[:end])
        assert summary(mine) == summary(theirs) == expected
        assert mine == {key: theirs[key] for key in mine}
    assert named(last, geometry) == mine


def test_the_decoder_is_a_program():
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "decoder.py", *arguments],
            cwd=VECTORS,
            capture_output=True,
            text=True,
            check=False,
        )

    good = run("snapshot", "snapshot-four-records.bin", "superblock-bound.bin")
    assert json.loads(good.stdout)["records"][2]["parent_tokens"] == 16
    beside = ("snapshot-four-records.bin", "superblock-bound.bin")
    kept = run("journal", "journal-four-commits.bin", *beside)
    assert list(json.loads(kept.stdout)["records"]) == ["34"]
    bad = run("superblock", "hostile-superblock-major-2.bin")
    assert (bad.returncode, bad.stdout) == (1, "unsupported-version\n")
