"""`verify --read-data-subset`: which pages are read, that media is read, and what is said of it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rangekv.engine.store import Store, create
from rangekv.format.checksum import xxh3_64
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.namespace import Namespace
from rangekv.format.records import NO_CHECKSUM, NO_PARENT, Extent, Record
from rangekv.format.tables import Tables

from rangectl.subset import Subset

COMMAND = [sys.executable, "-c", "from rangectl.cli import main; main()"]
MODEL = ModelGeometry(layer_count=4, token_bytes=4096, block_tokens=16)
NAMESPACE = Namespace({"model": "verify"})
# 3 pages and a shorter one a layer, 4 layers; the second record carries no checksums.
TOKENS = 3 * 64 + 16


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store of random payload: 16 pages with a checksum and 16 without."""
    path = tmp_path / "store"
    create(str(path), capacity_bytes=32 << 20, model=MODEL, namespace=NAMESPACE)
    opened = Store.open(str(path), namespace=NAMESPACE, model=MODEL, allow_buffered=True)
    geometry = opened.geometry
    width = geometry.widths()[-2]
    extents = [
        Extent(1, geometry.pack_offset(0), width, 0, TOKENS),
        Extent(2, geometry.pack_offset(1), width, 1, TOKENS),
    ]
    dice = np.random.default_rng(0)
    hashes = []
    with (path / "range.pack").open("r+b") as file:
        for layer in range(4):
            stripe = dice.bytes(TOKENS * 4096)
            file.seek(geometry.address(extents[0].offset, width, layer, 0))
            file.write(stripe)
            size = geometry.page_bytes
            hashes += [xxh3_64(stripe[at : at + size]) for at in range(0, len(stripe), size)]
    records = [
        Record(1, 0, 0, 1, 0, 0, 0, TOKENS, NO_PARENT, 0, 0),
        Record(2, TOKENS, NO_CHECKSUM, 2, 1, 0, 0, TOKENS, NO_PARENT, 0, 0),
    ]
    tables = Tables(
        extents,
        records,
        np.arange(2 * TOKENS, dtype="<u4").tobytes(),
        np.array(hashes, dtype="<u8").tobytes(),
        generation_max=2,
    )
    assert opened.close(tables).state == "clean"
    assert geometry == Geometry.derive(MODEL, 32 << 20)
    return path


def break_page(store: Path, layer: int, page: int) -> None:
    pack = store / "range.pack"
    times = pack.stat()
    geometry = Geometry.derive(MODEL, 32 << 20)
    with pack.open("r+b") as file:
        width = geometry.widths()[-2]
        offset = geometry.address(geometry.pack_offset(0), width, layer, 64 * page)
        file.seek(offset + 5)
        byte = file.read(1)[0]
        file.seek(offset + 5)
        file.write(bytes([byte ^ 1]))
    os.utime(pack, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_the_parts_of_a_seed_are_all_pages_each_once(rangectl, store: Path) -> None:
    counts = [
        rangectl("verify", store, "--read-data-subset", f"{part}/5", "--json").json
        for part in range(1, 6)
    ]
    assert sum(one["pages"]["ok"] for one in counts) == 16
    assert sum(one["pages"]["read_bytes"] for one in counts) == 4 * TOKENS * 4096
    assert all(one["pages"]["unverifiable"] == 16 for one in counts)
    assert counts[0]["subset"] == {"share": "1/5", "seed": 0, "pages": 3, "of_pages": 16}


def test_one_bad_page_is_in_one_part_and_named_by_place(rangectl, store: Path) -> None:
    break_page(store, 2, 3)
    found = [rangectl("verify", store, "--read-data-subset", f"{part}/4") for part in range(1, 5)]
    assert sorted(one.status for one in found) == [0, 0, 0, 1]
    (bad,) = [one.out for one in found if one.status]
    geometry = Geometry.derive(MODEL, 32 << 20)
    at = geometry.address(geometry.pack_offset(0), geometry.widths()[-2], 2, 192)
    assert (
        "bad page     record 1, extent 0, layer 2, from token 192 (page 3),"
        f" at byte {at} in pack 0: checksum mismatch\n" in bad
    )
    assert "records bad  1\n" in bad


def test_the_seed_decides_and_a_larger_share_holds_the_smaller(store: Path) -> None:
    sizes = np.full(1000, 4096, dtype=np.int64)

    def chosen(text: str, seed: int) -> set[int]:
        return set(np.flatnonzero(Subset.parse(text).choose(sizes, seed)).tolist())

    assert chosen("10%", 3) == chosen("10%", 3) != chosen("10%", 4)
    assert len(chosen("10%", 3)) == 100
    assert chosen("10%", 3) < chosen("12.5%", 3) < chosen("1MiB", 3)
    assert len(chosen("1MiB", 3)) == 256
    assert len(chosen("1", 3)) == len(chosen("0.001%", 3)) == 1
    assert chosen("100%", 3) == chosen("1/1", 3) == chosen("1GiB", 3) == set(range(1000))
    # The order is written down: the same pages with every release.
    assert sorted(chosen("0.5%", 0)) == [254, 366, 410, 503, 821]
    assert not Subset.parse("10%").choose(sizes[:0], 0).any()


def test_a_share_as_a_size_reads_about_that_much(rangectl, store: Path) -> None:
    pages = rangectl("verify", store, "--read-data-subset", "1MiB", "--json").json["pages"]
    assert 1 << 20 <= pages["read_bytes"] <= (1 << 20) + (256 << 10)


@pytest.mark.parametrize("share", ["0/3", "4/3", "0%", "101%", "4G", "x", "", "1/", "%"])
def test_a_share_that_is_none(rangectl, store: Path, share: str) -> None:
    refused = rangectl("verify", store, "--read-data-subset", share)
    assert (refused.status, refused.out) == (2, "")
    assert "--read-data-subset: " in refused.err
    both = rangectl("verify", store, "--read-data", "--read-data-subset", "1/2")
    assert "[both-shares]" in both.err


def test_what_is_in_the_page_cache_is_read_from_the_device_all_the_same(
    rangectl, store: Path
) -> None:
    for _ in range(2):
        (store / "range.pack").read_bytes()
        media = rangectl("verify", store, "--read-data", "--json").json["media"]
        if media["physical_read_bytes"] is None:
            pytest.skip("this kernel does not count reads")
        if media["direct"]:
            assert media["proved"]
            assert media["physical_read_bytes"] >= 4 * TOKENS * 4096


@pytest.mark.parametrize("threads", [1, 7])
def test_every_number_of_threads_finds_the_same(rangectl, store: Path, threads: int) -> None:
    for layer in range(4):
        break_page(store, layer, layer % 4)
    shown = rangectl("verify", store, "--read-data", "--threads", threads, "--json")
    pages = shown.json["pages"]
    assert (shown.status, pages["ok"], pages["bad"]) == (1, 12, 4)
    places = [(one["layer_index"], one["page_index"]) for one in pages["bad_pages"]]
    assert places == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert pages["bad_records"] == [1]


def test_golden_text(rangectl, store: Path) -> None:
    shown = rangectl("verify", store, "--read-data-subset", "1/4", "--seed", 7)
    assert shown.status == 0
    head, _, media = shown.out.partition("media ")
    assert (
        head
        == f"""\
state        warm
path         {store}
structure    ok
records      2
subset       1/4 with seed 7: 4 of 16 pages
pages ok     4
pages bad    0
unverifiable 16 pages without a checksum
"""
    )
    assert "the kernel counted" in media


def test_a_terminal_gets_a_bar_and_stdout_stays_clean(store: Path) -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "verify", str(store), "--read-data"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        check=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        assert b"verify" in terminal.read(65536)
    assert "\x1b" not in done.stdout
    assert done.stdout.startswith("state        warm\n")
