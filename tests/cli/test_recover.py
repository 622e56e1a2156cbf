"""`rangectl recover`: what a killed session leaves, kept offline."""

from __future__ import annotations

import pytest
from rangekv.engine.testing.scene import Scene


@pytest.fixture
def killed(scene: Scene) -> Scene:
    """Two prompts of a clean close, a committed one, and one that was not committed."""
    engine = scene.open(recovery="journal", commit_interval_s=3600)
    assert scene.save(engine, scene.prompt())
    assert engine.commit(10)
    assert scene.save(engine, scene.prompt())
    engine._commits.close()
    engine._pool.close(10)
    engine.store.abandon()
    return scene


def test_a_killed_store_is_warm_afterwards(rangectl, killed):
    before = rangectl("inspect", killed.store, "--json").json
    assert before["state"] == "would-recover"
    dry = rangectl("recover", killed.store, "--dry-run", "--json")
    assert (dry.status, dry.json["state"], dry.json["tokens"]) == (0, "would-recover", 768)
    assert rangectl("inspect", killed.store, "--json").json == before, "a dry run changes nothing"
    done = rangectl("recover", killed.store, "--json")
    assert (done.status, done.json["found"], done.json["state"]) == (
        0,
        "would-recover",
        "recovered",
    )
    assert (done.json["records"], done.json["tokens"]) == (3, 768)
    after = rangectl("inspect", killed.store, "--json")
    assert (after.status, after.json["state"]) == (0, "warm")
    verified = rangectl("verify", killed.store, "--read-data", "--json")
    assert verified.status == 0
    again = rangectl("recover", killed.store, "--json")
    assert (again.status, again.json["state"], again.json["lost"]) == (0, "warm", "nothing")


def test_it_says_in_words_what_is_kept_and_lost(rangectl, killed):
    text = rangectl("recover", killed.store).out
    assert text.splitlines() == [
        f"store        {killed.store}",
        "found        would-recover (3 records, 768 tokens; 1 commits, its journal is complete)",
        "lost         what was published after the last commit",
        "now          warm",
    ]


def test_a_damaged_journal_costs_all_and_is_left_alone(rangectl, killed):
    journal = killed.store / "range.journal"
    journal.write_bytes(journal.read_bytes()[:100])
    result = rangectl("recover", killed.store, "--json")
    assert (result.status, result.json["reason"]) == (4, "bad-journal")
    assert result.json["lost"] == "all of it; the next session starts empty"
    assert journal.stat().st_size == 100


def test_a_store_in_use_is_not_touched(rangectl, scene):
    with scene.engine():
        result = rangectl("recover", scene.store, "--json")
    assert (result.status, result.json["code"]) == (11, "store-locked")


def test_where_there_is_no_store(rangectl, tmp_path):
    assert rangectl("recover", tmp_path / "none", "--json").status == 10
