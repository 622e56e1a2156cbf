"""`replay-fault crash` prints its figures, and a broken protocol with the command to repeat it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rangekv.engine.pack import Pack


def test_a_shallow_exploration_holds(rangectl):
    played = rangectl("replay-fault", "crash", "--depth", 1, "--json")
    assert played.status == 0
    shown = played.json
    assert shown["ok"] is True
    assert shown["violations"] == []
    assert shown["states"] == sum(one["states"] for one in shown["scenarios"]) > 5_000
    assert [one["name"] for one in shown["scenarios"]][:1] == ["serve"]


def test_the_figures_are_printed(rangectl):
    played = rangectl("replay-fault", "crash", "--depth", 1, "--scenario", "bind")
    head, row, verdict = played.out.splitlines()
    assert head.split()[:2] == ["scenario", "crash"]
    assert row.split()[0] == "bind"
    assert verdict.endswith("no wrong KV, no refused store, every clean close warm")


def test_recorded_on_real_files(rangectl, tmp_path: Path):
    played = rangectl(
        "replay-fault", "crash", "--depth", 1, "--scenario", "serve", "--dir", tmp_path, "--json"
    )
    assert played.status == 0, played.out
    assert os.listdir(tmp_path) == []


@pytest.fixture
def _no_c2(monkeypatch):
    """The real code without its load-bearing sync."""
    monkeypatch.setattr(Pack, "sync", lambda self: None)


@pytest.mark.usefixtures("_no_c2")
def test_a_missing_sync_is_a_violation_that_can_be_repeated(rangectl):
    played = rangectl("replay-fault", "crash", "--depth", 1, "--scenario", "serve", "--json")
    assert played.status == 1
    wrong = next(one for one in played.json["violations"] if one["kind"] == "wrong-kv")
    assert "expected Origin(" in wrong["detail"]
    assert any(line.startswith(("lost: ", "torn: ")) for line in wrong["trace"])
    again = rangectl(*wrong["repeat"].split()[1:], "--json")
    assert again.status == 1
    assert f"wrong-kv: {wrong['detail']}" in again.json["story"]


@pytest.mark.usefixtures("_no_c2")
def test_a_violation_reads_well(rangectl):
    played = rangectl("replay-fault", "crash", "--depth", 1, "--scenario", "serve")
    assert played.status == 1
    assert "VIOLATED  wrong-kv in serve@" in played.out
    assert "repeat: rangectl replay-fault crash --state serve@" in played.out


def test_one_state_is_told_step_by_step(rangectl):
    shown = rangectl("replay-fault", "crash", "--state", "serve@40.1@27.1")
    assert shown.status == 0
    told = [line for line in shown.out.splitlines() if line.startswith(("crash", "reopen"))]
    assert told == [
        "crash 1, serve@40.1",
        "reopen: dirty-marker",
        "crash 2, serve@40.1@27.1",
        "reopen: dirty-marker",
    ]


def test_a_damaged_state_is_told_too(rangectl):
    shown = rangectl("replay-fault", "crash", "--state", "journal-once@36.0-last-commit")
    assert shown.status == 0
    assert shown.out.splitlines()[-2:] == ["damaged: last-commit", "reopen: recovered"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--scenario", "nosuch"), "unknown-scenario"),
        (("--state", "serve"), "bad-state"),
        (("--state", "nosuch@1.0"), "unknown-scenario"),
        (("--state", "serve@9999.0"), "no-such-state"),
    ],
)
def test_arguments_that_cannot_work(rangectl, arguments, code):
    refused = rangectl("replay-fault", "crash", *arguments)
    assert refused.status == 2
    assert code in refused.err
