"""What ranks need of their engines to go on holding the same: retiring by name, one clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from rangekv.engine.index.directory import RecordState
from rangekv.format.errors import UsageError
from rangekv.format.layout import COUNTER_MAX
from support.rig import MIB, Rig, tokens_of

PROMPT = tokens_of(1, 512)
SALTED = b"s" * 32


@pytest.mark.parametrize(
    ("start_token", "left"),
    [(0, 0), (100, 0), (511, 0), (512, 512), (700, 512), (768, 768), (9999, 768)],
)
def test_retiring_takes_the_first_record_past_a_token_and_all_behind_it(
    tmp_path: Path, start_token: int, left: int
) -> None:
    rig = Rig(tmp_path / "s")
    longer = tokens_of(1, 768)
    assert (longer[:512] == PROMPT).all()
    assert rig.save(PROMPT)
    assert rig.save(longer)
    other = tokens_of(3, 256)
    assert rig.save(other)
    rig.engine.retire(longer, start_token=start_token)
    assert rig.restore(longer) == left
    assert rig.restore(other) == 256
    rig.engine.retire(longer, root=99)  # nobody's
    assert rig.save(longer) is (left < 768)
    assert rig.restore(longer) == 768
    rig.check_quiet()


def test_save_says_what_became_visible_of_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "s")
    save = rig.engine.save(rig.key(), PROMPT)
    assert save is not None
    block_ids = rig.take(32)
    rig.produce(PROMPT, block_ids)
    rig.announce(save, block_ids, end=256)
    assert save.extracted(30)
    save.finish()
    assert save.wait(30)
    assert save.published_end == 256
    cancelled = rig.engine.save(rig.key(), PROMPT)
    assert cancelled is not None
    cancelled.cancel()
    assert cancelled.published_end == 256  # where it began
    rig.check_quiet()


def test_damaged_records_are_named_once_even_where_nobody_claims_them(tmp_path: Path) -> None:
    """Reading ahead finds the damage before a claim does."""
    rig = Rig(tmp_path / "s")
    root = rig.engine.root(SALTED)
    longer = tokens_of(1, 768)
    for count in (512, 768):
        save = rig.engine.save(rig.key(), longer[:count], root=root)
        assert save is not None
        block_ids = rig.take(count // 16)
        rig.announce(save, block_ids)
        assert save.extracted(30)
        save.finish()
        assert save.wait(30)
        rig.give(block_ids)
    (bad,) = [r for r in rig.engine._catalog.directory.visible() if r.token_start == 512]
    bad.hashes[:] ^= 1
    ticket = rig.engine.lookup(rig.key(), longer, root=root)
    assert ticket.token_count == 768
    assert rig.engine._events.wait_until(lambda: bad.state is RecordState.RETIRED, 30)
    rig.engine.release(ticket)
    assert rig.engine.take_bad() == [(SALTED, longer.tobytes(), 512)]
    assert rig.engine.take_bad() == []
    rig.check_quiet()


def test_stores_with_one_clock_evict_alike_whatever_their_own_order(tmp_path: Path) -> None:
    """Rank b publishes and answers in another order than rank a, and is asked more often."""
    prompts = [tokens_of(seed, 1024) for seed in range(40)]
    held = []
    for name in "ab":
        rig = Rig(tmp_path / name, capacity=8 * MIB)
        for clock, prompt in enumerate(prompts, 1):
            save = rig.engine.save(rig.key(), prompt, clock=2 * clock)
            assert save is not None
            block_ids = rig.take(64)
            rig.announce(save, block_ids)
            assert save.extracted(30)
            older = prompts[max(0, clock - 3)]
            if name == "b":
                rig.engine.release(rig.engine.lookup(rig.key(), older, clock=2 * clock + 1))
            save.finish()
            assert save.wait(30)
            rig.give(block_ids)
            if name == "a":
                rig.engine.release(rig.engine.lookup(rig.key(), older, clock=2 * clock + 1))
        held.append([number for number, prompt in enumerate(prompts) if rig.hit(prompt)])
        assert rig.engine.stats().counters["evicted_bytes"] > 0
        rig.check_quiet()
        rig.engine.close()
    assert held[0] == held[1] != []


@pytest.mark.parametrize("clock", [-1, COUNTER_MAX + 1])
def test_clock_that_no_snapshot_can_hold_is_refused(tmp_path: Path, clock: int) -> None:
    rig = Rig(tmp_path / "s")
    for ask in (rig.engine.lookup, rig.engine.save):
        with pytest.raises(UsageError, match="clock"):
            ask(rig.key(), PROMPT, clock=clock)
