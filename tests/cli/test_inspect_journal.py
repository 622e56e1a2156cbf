"""`rangectl inspect PATH journal`: the commits of a killed session, whole and damaged."""

from __future__ import annotations

import re

import pytest
from rangekv.engine.testing.scene import Scene
from rangekv.format.journal import FRAME, HEADER_BYTES

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"


@pytest.fixture
def killed(scene: Scene) -> Scene:
    """Three commits: a prompt, nothing, another prompt beside one that is retired."""
    engine = scene.open(recovery="journal", commit_interval_s=3600)
    first = scene.prompt()
    assert scene.save(engine, first)
    assert engine.commit(10)
    assert engine.commit(10)
    assert scene.save(engine, scene.prompt())
    engine.retire(first)
    assert engine.commit(10)
    engine._commits.close()
    engine._pool.close(10)
    engine.store.abandon()
    return scene


def frames(scene: Scene) -> list[int]:
    """Where the frames lie."""
    data = (scene.store / "range.journal").read_bytes()
    return [found.start() for found in re.finditer(re.escape(FRAME.magic), data)]


def overwrite(scene: Scene, offset: int, data: bytes) -> None:
    with (scene.store / "range.journal").open("r+b") as file:
        file.seek(offset)
        file.write(data)


def commits(rangectl, scene: Scene) -> list[str]:
    return [
        re.sub(TIME, "TIME", line)
        for line in rangectl("inspect", scene.store, "journal").out.splitlines()
        if line.startswith("commit")
    ]


def test_every_commit_says_what_it_did(rangectl, killed):
    places = frames(killed)
    assert commits(rangectl, killed) == [
        f"commit 1 at byte {HEADER_BYTES}, 1.31 KiB, TIME: 1 record of 256 tokens became visible",
        f"commit 2 at byte {places[1]}, 128 B, TIME: nothing",
        f"commit 3 at byte {places[2]}, 1.38 KiB, TIME: "
        "1 record retired, 1 extent retired, 1 record of 256 tokens became visible",
    ]
    shown = rangectl("inspect", killed.store, "journal")
    assert shown.status == 0
    assert "bad fields   none" in shown.out


def test_json_has_the_entries(rangectl, killed):
    shown = rangectl("inspect", killed.store, "journal", "--json").json
    assert [one["offset"] for one in shown["commits"]] == frames(killed)
    kinds = [[entry["kind"] for entry in one["entries"]] for one in shown["commits"]]
    assert kinds == [["publish"], [], ["retire-record", "retire", "publish"]]
    (record,) = shown["commits"][0]["entries"][0]["records"]
    assert (record["token_start"], record["token_count"]) == (0, 256)
    assert shown["torn_bytes"] == 0
    assert not any("hex" in field for field in shown["header"]["fields"])
    as_hex = rangectl("inspect", killed.store, "journal", "--json", "--hex").json
    assert as_hex["commits"][1]["fields"][0]["hex"] == FRAME.magic.hex()


def test_hex_shows_every_field(rangectl, killed):
    lines = rangectl("inspect", killed.store, "journal", "--hex").out.splitlines()
    assert sum(" previous_xxh3_128 " in line for line in lines) == 3
    assert any(line.startswith("  0x00000020     8  epoch ") for line in lines)


def test_a_damaged_commit_is_marked_and_the_later_ones_are_read(rangectl, killed):
    second = frames(killed)[1]
    overwrite(killed, second + 40, bytes([99]))
    shown = rangectl("inspect", killed.store, "journal")
    assert shown.status == 1
    assert "! generation_max     99" in shown.out
    assert shown.out.count("!") == 1
    assert len(commits(rangectl, killed)) == 3
    assert "a commit that holds follows it" in commits(rangectl, killed)[1]
    assert commits(rangectl, killed)[2].endswith("1 record of 256 tokens became visible")


def test_a_header_of_another_session_is_marked(rangectl, killed):
    overwrite(killed, 32, (77).to_bytes(8, "little"))
    shown = rangectl("inspect", killed.store, "journal", "--json").json
    bad = {field["name"]: field["expected"] for field in shown["header"]["fields"]}
    assert bad["epoch"].startswith("2 ")
    assert shown["bad_fields"] == 1
    assert len(shown["commits"]) == 3


def test_a_torn_end_is_no_damage(rangectl, killed):
    path = killed.store / "range.journal"
    path.write_bytes(path.read_bytes()[:-1])
    shown = rangectl("inspect", killed.store, "journal")
    assert shown.status == 0
    torn = path.stat().st_size - frames(killed)[2]
    assert shown.out.splitlines()[-1] == f"{torn:,} bytes behind the last commit: a torn one"
    assert len(commits(rangectl, killed)) == 2


@pytest.mark.parametrize("length", [0, 5, HEADER_BYTES - 20])
def test_a_header_that_is_cut_off_is_marked(rangectl, killed, length):
    path = killed.store / "range.journal"
    path.write_bytes(path.read_bytes()[:length])
    shown = rangectl("inspect", killed.store, "journal")
    assert shown.status == 1
    assert "the file ends before" in shown.out


def test_a_store_that_was_closed_has_none(rangectl, scene):
    shown = rangectl("inspect", scene.store, "journal")
    assert shown.out.splitlines()[-1] == "no journal to read: a closed session has none"
    assert shown.status == 0
