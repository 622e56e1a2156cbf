"""A real process, killed again and again: what it left serves no wrong byte, and what it kept."""

from __future__ import annotations

from collections import Counter

from rangekv.engine.testing.kill import Killer
from rangekv.engine.testing.scene import Scene
from support.effort import effort

CYCLES = {"journal": effort(50, 2_000), "discard": effort(10, 500)}


def killed_again_and_again(tmp_path, recovery: str) -> tuple[Killer, Counter[str], int]:
    killer = Killer(Scene.new(tmp_path, seed=0).store, seed=0, recovery=recovery)
    found: Counter[str] = Counter()
    tokens = 0
    for _ in range(CYCLES[recovery]):
        killed = killer.cycle()
        found[killed.found] += 1
        tokens += killed.tokens
    killer.settle()
    return killer, found, tokens


def test_a_killed_process_with_a_journal_keeps_what_it_committed(tmp_path, figure):
    killer, found, tokens = killed_again_and_again(tmp_path, "journal")
    assert set(found) <= {"warm", "would-recover"}
    assert found["would-recover"] > CYCLES["journal"] / 4
    assert killer.account.old_tokens > 0
    killer.account.require_kept()
    figure(
        "kill -9 cycles",
        f"{CYCLES['journal']}, {found['warm']} warm, {found['would-recover']} recovered, "
        f"{tokens:,} tokens compared, 0 wrong bytes; {killer.account.line()}"
        f" (rangectl replay-fault kill9 --cycles {CYCLES['journal']})",
    )


def test_a_killed_process_without_a_journal_leaves_no_wrong_byte(tmp_path, figure):
    _, found, tokens = killed_again_and_again(tmp_path, "discard")
    assert set(found) <= {"warm", "dirty-marker"}
    assert found["dirty-marker"] > CYCLES["discard"] / 4
    figure(
        "kill -9 cycles without a journal",
        f"{CYCLES['discard']}, {found['warm']} warm reopens, {tokens:,} tokens compared, "
        "0 wrong bytes (rangectl replay-fault kill9 --recovery discard)",
    )
