"""What is saved: prompts that come again, within a budget of bytes a day."""

from __future__ import annotations

from typing import Any

import pytest
from rangekv.engine.connector.admission import DAY_S, Touches, WriteBudget
from rangekv.engine.connector.messages import StepReport
from rangekv.engine.connector.scheduler import SchedulerSide
from rangekv.engine.connector.settings import Settings
from support.vllm_scheduler import BLOCK, FakeRanks, a_request, an_output


def a_side(**settings: Any) -> SchedulerSide:
    return SchedulerSide(Settings.parse({"store": "/c"} | settings), BLOCK, FakeRanks(0))


def saved_tokens(side: SchedulerSide, request: Any) -> int:
    """Ask and plan a whole request in one step; return how much of its prompt is saved."""
    side.matched_tokens(request, 0)
    side.bind(request, 0)
    blocks = list(range(-(-request.num_tokens // BLOCK)))
    plan = side.plan(an_output(new={request.request_id: (blocks, 0, request.num_tokens)}))
    return sum(step.save_tokens for step in plan.requests)


def hashes_of(*names: str) -> list[bytes]:
    """Chained hashes, as vLLM makes them: each stands for all blocks up to its own."""
    return ["/".join(names[: at + 1]).encode() for at in range(len(names))]


def test_blocks_are_known_from_their_second_request_on() -> None:
    touches = Touches()
    assert touches.note(hashes_of("a", "b", "c")) == 0
    assert touches.note(hashes_of("a", "b", "d")) == 2
    assert touches.note(hashes_of("a", "b", "d", "e")) == 3
    assert touches.note([]) == 0


def test_memory_is_bounded_and_forgets_what_is_old() -> None:
    touches = Touches(remembered=100)
    touches.note(hashes_of("first"))
    for number in range(200):
        touches.note(hashes_of(str(number)))
        assert len(touches._recent) + len(touches._older) <= 102
    assert touches.note(hashes_of("first")) == 0
    assert touches.note(hashes_of("199")) == 1


def test_unique_prompts_are_never_written_and_a_repeated_one_is() -> None:
    side = a_side(admit="second-touch")
    requests = [
        a_request(str(number), 50, block_hashes=hashes_of("x", str(number), "z"))
        for number in range(1000)
    ]
    assert [saved_tokens(side, each) for each in requests[:1]] == [0]
    # all later ones share their first block with the first
    assert {saved_tokens(side, each) for each in requests[1:]} == {BLOCK}
    again = a_request("again", 50, block_hashes=hashes_of("x", "7", "z"))
    assert saved_tokens(side, again) == 48
    assert side.counts["saves_declined_first-touch"] == 1000


def test_answer_is_a_first_touch() -> None:
    side = a_side(admit="second-touch")
    asked = a_request("a", 32, block_hashes=hashes_of("q", "r"))
    saved_tokens(side, asked)
    asked.all_token_ids, asked.num_tokens, asked.num_computed_tokens = list(range(49)), 49, 48
    asked.block_hashes = hashes_of("q", "r", "answer")
    side.finish(asked, [0, 1, 2])
    assert not side.plan(an_output()).answered
    following = a_request("b", 64, block_hashes=hashes_of("q", "r", "answer", "more"))
    assert saved_tokens(side, following) == 48


def test_budget_that_is_spent_stops_saves_and_comes_back() -> None:
    now = 0.0
    budget = WriteBudget(DAY_S * 10, lambda: now)
    assert not budget.is_spent
    budget.spend(DAY_S * 10 + 100)
    assert budget.is_spent
    now = 9.0
    assert budget.is_spent
    now = 11.0
    assert not budget.is_spent
    now = 100 * DAY_S  # it never holds more than a day's worth
    budget.spend(DAY_S * 10)
    assert budget.is_spent


def test_no_budget_is_never_spent() -> None:
    budget = WriteBudget(None)
    budget.spend(1 << 50)
    assert not budget.is_spent


@pytest.mark.parametrize(("written", "saved"), [(0, 96), (2 << 20, 0)])
def test_ranks_spend_one_budget(written: int, saved: int) -> None:
    side = a_side(write_budget_per_day="1MiB")
    report = StepReport(1, written_bytes=written // 2)
    side.note_report(report.joined(report))
    request = a_request()
    assert saved_tokens(side, request) == saved
    assert side.counts["saves_declined_write-budget"] == (saved == 0)
    request.num_tokens, request.all_token_ids = 150, list(range(150))
    request.num_computed_tokens = 144
    side.finish(request, list(range(9)))
    assert bool(side.plan(an_output()).answered) == (saved > 0)
