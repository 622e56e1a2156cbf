"""The fault cases hold, whatever the seed, and a broken rule is told as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rangekv.engine.engine import Engine
from rangekv.engine.testing.cases import CASES, CELLS, NAMED
from rangekv.engine.testing.kept import Account

PAPER = [
    "stale-ticket",
    "divergent-prefix",
    "partial-completion",
    "cancel-in-flight",
    "dirty-reopen",
    "clean-reopen",
]
KINDS = [
    *("short-read", "eio-read", "eio-write", "enospc-write", "torn-write", "bit-flip", "delay"),
    *("never-complete", "kill-at", "cancel-at", "preempt-at", "evict-between"),
    *("wrong-rank-ticket", "other-namespace-reopen", "truncate-file", "replace-file"),
    *("second-opener", "fork-during-read"),
]


def lines_of(played) -> list[dict]:
    return [json.loads(line) for line in played.out.splitlines()]


def test_the_papers_six_cases_and_every_kind_of_fault_are_there() -> None:
    assert [case.case_id for case in NAMED] == PAPER + KINDS


def test_a_case_is_told_with_what_was_seen_and_how_to_repeat_it(rangectl, tmp_path: Path) -> None:
    played = rangectl(
        "replay-fault", "run", "stale-ticket", "--seed", 7, "--dir", tmp_path, "--json"
    )
    assert played.status == 0, played.out
    case, total = lines_of(played)
    assert case["schema"] == "rangectl.replay-fault-case/1"
    assert (case["id"], case["held"], case["violation"]) == ("stale-ticket", True, None)
    assert case["states"]
    assert case["evidence"]
    assert case["repeat"] == "rangectl replay-fault run stale-ticket --seed 7"
    assert total["schema"] == "rangectl.replay-fault/1"
    assert (total["ok"], total["held"], total["violated"], total["seed"]) == (True, 1, 0, 7)
    assert os.listdir(tmp_path) == []


def test_cases_can_be_named_by_their_beginning_and_their_owner(rangectl, tmp_path: Path) -> None:
    played = rangectl("replay-fault", "run", "ticket.lookup", "--dir", tmp_path)
    expected = [case.case_id for case in CELLS if case.case_id.startswith("ticket.lookup.")]
    assert [line.split()[1] for line in played.out.splitlines() if line[:4] == "held"] == expected
    assert played.out.endswith(f"{len(expected)} of {len(expected)} cases held, seed 0\n")
    listed = rangectl("replay-fault", "list", "--owner", "marker", "--json")
    assert {case["owner"] for case in listed.json["cases"]} == {"marker"}
    assert rangectl("replay-fault", "list", "--owner", "nobody").status == 2


def test_list_names_owner_and_rule(rangectl) -> None:
    shown = rangectl("replay-fault", "list", "--json")
    assert [case["id"] for case in shown.json["cases"]] == [case.case_id for case in CASES]
    assert all(case["owner"] and case["rule"].endswith(".") for case in shown.json["cases"])


def test_an_unknown_case_names_its_nearest_match(rangectl) -> None:
    refused = rangectl("replay-fault", "run", "stale-tickt")
    assert refused.status == 2
    assert "did you mean stale-ticket?" in refused.err


def test_an_engine_that_breaks_a_rule_is_caught(rangectl, tmp_path: Path, monkeypatch) -> None:
    """A reset that forgets nothing: its old tickets can still be claimed."""
    monkeypatch.setattr(Engine, "reset", lambda self: None)
    case_id = "ticket.claim.retired-generation"
    played = rangectl("replay-fault", case_id, "--dir", tmp_path)
    assert played.status == 1
    assert f"VIOLATED  {case_id}" in played.out
    assert "broken: it is refused as stale-ticket" in played.out
    assert f"repeat: rangectl replay-fault run {case_id} --seed 0" in played.out
    kept = tmp_path / f"range-fault-{case_id}-0"
    assert os.listdir(tmp_path) == [kept.name]
    assert sorted(os.listdir(kept)) == ["store", "trace.jsonl"]
    again = rangectl("replay-fault", "trace", kept / "trace.jsonl", "--dir", tmp_path, "--json")
    assert again.status == 1
    assert again.json["then"] == again.json["violation"]


def test_a_trace_says_that_its_violation_is_gone(rangectl, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(Engine, "reset", lambda self: None)
        rangectl("replay-fault", "ticket.claim.retired-generation", "--dir", tmp_path)
    (kept,) = tmp_path.iterdir()
    again = rangectl("replay-fault", "trace", kept / "trace.jsonl", "--dir", tmp_path)
    assert again.status == 0
    assert "now: held" in again.out
    refused = rangectl("replay-fault", "trace", kept / "store" / "range.pack")
    assert refused.status == 2
    assert "[bad-trace]" in refused.err


def test_a_payload_that_is_not_verified_is_caught(
    rangectl, tmp_path: Path, scatter_backwards
) -> None:
    """A scatter that writes to the wrong blocks: the payload names its source."""
    from rangekv.engine.devices.cpu import CpuDevice

    scatter_backwards(CpuDevice)
    played = rangectl("replay-fault", "clean-reopen", "--dir", tmp_path)
    assert played.status == 1
    assert "expected (block 0 of prompt 1, layer 0, token 0, word 0), found (block" in played.out


@pytest.mark.parametrize(
    ("recovery", "reopens"),
    [("journal", {"warm", "would-recover"}), ("discard", {"warm", "dirty-marker"})],
)
def test_a_store_is_killed_and_looked_at(
    rangectl, tmp_path: Path, recovery: str, reopens: set[str]
) -> None:
    shown = rangectl(
        *("replay-fault", "kill9", "--cycles", 3, "--recovery", recovery),
        *("--dir", tmp_path, "--json"),
    )
    assert shown.status == 0, shown.out
    assert (shown.json["cycles"], shown.json["violation"]) == (3, None)
    assert shown.json["recovery"] == recovery
    assert sum(shown.json["reopens"].values()) == 3
    assert set(shown.json["reopens"]) <= reopens
    assert shown.json["old_tokens_hit"] <= shown.json["old_tokens"]
    assert os.listdir(tmp_path) == []


def test_too_little_that_is_hit_after_a_kill_is_a_violation(
    rangectl, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(Account, "percent", 94.9)
    shown = rangectl("replay-fault", "kill9", "--cycles", 1, "--dir", tmp_path)
    assert shown.status == 1
    assert "VIOLATED  at the end: at least 95 %:" in shown.out
    assert "repeat: rangectl replay-fault kill9 --cycles 1 --seed 0 --recovery journal" in shown.out


def test_a_disk_that_refuses_a_store_violates_no_rule(tmp_path: Path) -> None:
    command = f"ulimit -f 100; exec {sys.executable} -m rangectl replay-fault"
    refused = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (refused.returncode, refused.stdout) == (3, "")
    assert "[file-size-limit]" in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--seed", "-1"], ["--dir", "/nowhere"]])
def test_arguments_that_cannot_work(rangectl, arguments: list[str]) -> None:
    assert rangectl("replay-fault", *arguments).status in (2, 3)
