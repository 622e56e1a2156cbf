"""The scheduler side alone, with a rank that answers what the test says."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from rangekv.engine.connector.messages import Loss, RequestStep, RestoreBinding, StepReport
from rangekv.engine.connector.scheduler import OUTCOME_STEPS_MAX, SchedulerSide
from rangekv.engine.connector.settings import Settings
from rangekv.format.records import NO_SALT
from support.vllm_scheduler import BLOCK, FakeRank, FakeRanks, a_request, an_output


class FakeTable:
    def __init__(self, **blocks: list[int]) -> None:
        self.blocks = blocks
        self.evicted: set[int] = set()

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        return (self.blocks.get(request_id, []),)

    def evict_blocks(self, block_ids: set[int]) -> None:
        self.evicted = block_ids


def a_side(hit: int | None = 0, **settings: Any) -> tuple[SchedulerSide, FakeRank]:
    ranks = FakeRanks(hit)
    side = SchedulerSide(Settings.parse({"store": "/c"} | settings), BLOCK, ranks)
    return side, ranks.each[0]


def two_ranks(*hits: int | None, **settings: Any) -> tuple[SchedulerSide, FakeRanks]:
    ranks = FakeRanks(*hits)
    return SchedulerSide(Settings.parse({"store": "/c"} | settings), BLOCK, ranks), ranks


def blocks_of(step: RequestStep) -> list[int]:
    return array("i", step.block_ids).tolist()


@pytest.mark.parametrize(
    ("length", "stored", "local", "external"),
    [
        (100, 1000, 0, 96),
        (100, 50, 0, 48),
        (96, 1000, 0, 80),  # one token stays to be computed
        (97, 1000, 0, 96),
        (100, 1000, 32, 64),
        (100, 48, 48, 0),
        (100, 64, 48, 16),
        (100, 0, 0, 0),
        (16, 1000, 0, 0),
        (1, 1000, 0, 0),
    ],
)
def test_hits_are_whole_blocks_below_the_last_token(
    length: int, stored: int, local: int, external: int
) -> None:
    side, _ = a_side(stored)
    assert side.matched_tokens(a_request(length=length), local) == external


def test_no_answer_is_a_miss() -> None:
    side, _ = a_side(None)
    assert side.matched_tokens(a_request(), 0) == 0


@pytest.mark.parametrize(
    "field",
    [
        {"lora_request": object()},
        {"mm_features": [1]},
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"resumable": True},
    ],
)
def test_ineligible_requests_are_neither_looked_up_nor_saved(field: dict[str, Any]) -> None:
    side, link = a_side(1000)
    request = a_request(**field)
    assert side.matched_tokens(request, 0) == 0
    side.bind(request, 0)
    plan = side.plan(an_output(new={"a": ([1, 2], 0, 100)}))
    assert not link.asked
    assert not plan.requests
    assert sum(side.counts.values()) == 1


def test_repeated_lookup_keeps_its_ticket_and_another_question_releases_it() -> None:
    side, link = a_side(96)
    request = a_request()
    assert [side.matched_tokens(request, 0) for _ in range(3)] == [96, 96, 96]
    assert len(link.tickets) == 1
    assert side.matched_tokens(request, 32) == 64
    assert len(link.tickets) == 2
    assert side.plan(an_output()).released == [(0, 1)]
    assert side.plan(an_output()).released == []


def test_ticket_is_bound_to_the_blocks_behind_the_local_hit() -> None:
    side, _ = a_side(96)
    request = a_request()
    external = side.matched_tokens(request, 32)
    side.bind(request, external)
    plan = side.plan(an_output(new={"a": ([9, 8, 7, 6, 5, 4, 3], 96, 4)}))
    (step,) = plan.requests
    assert step.restore == RestoreBinding((1,), 32, 96)
    assert blocks_of(step) == [9, 8, 7, 6, 5, 4, 3]
    assert step.tokens == array("I", range(100)).tobytes()
    assert (step.save_tokens, step.end_token, step.last) == (96, 96, True)
    assert not plan.released


def test_question_that_got_no_answer_is_not_asked_again_under_its_key() -> None:
    """Its answer may still come, and then gives back a ticket that nobody else may hold."""
    side, link = a_side(None)
    request = a_request()
    side.matched_tokens(request, 0)
    link.hit = 96
    side.matched_tokens(request, 0)
    assert link.asked[0][:4] != link.asked[1][:4]


def test_promise_whose_renewal_got_no_answer_is_released() -> None:
    side, link = a_side(96)
    request = a_request()
    side.matched_tokens(request, 0)
    link.hit = None
    assert side.matched_tokens(request, 0) == 0
    assert side.plan(an_output()).released == [(0, 1)]


def test_unused_promises_are_released() -> None:
    side, _ = a_side(96)
    ignored = a_request("ignored")
    side.matched_tokens(ignored, 0)
    side.bind(ignored, 0)  # vLLM did not take the hit
    waiting = a_request("waiting")
    side.matched_tokens(waiting, 0)
    side.finish(waiting, [])  # aborted before it was scheduled
    assert side.plan(an_output(finished={"waiting"})).released == [(0, 1), (0, 2)]


def test_request_that_reads_no_cache_asks_nothing_but_is_saved() -> None:
    side, link = a_side(96)
    request = a_request(skip_reading_prefix_cache=True)
    assert side.matched_tokens(request, 0) == 0
    side.bind(request, 0)
    assert not link.asked
    assert len(side.plan(an_output(new={"a": ([1], 0, 100)})).requests) == 1


def test_small_hits_are_declined_and_released() -> None:
    side, _ = a_side(48, min_restore_tokens=64)
    assert side.matched_tokens(a_request(), 0) == 0
    assert side.plan(an_output()).released == [(0, 1)]


def test_late_tickets_are_released_with_the_next_step() -> None:
    side, ranks = two_ranks(0, 0)
    ranks.late = [(1, 5)]
    assert side.plan(an_output()).released == [(1, 5)]
    assert side.plan(an_output()).released == []


@pytest.mark.parametrize("chunk", [1, 15, 16, 17, 40, 100])
def test_chunks_end_on_blocks_and_the_last_one_says_so(chunk: int) -> None:
    side, _ = a_side()
    request = a_request()
    side.matched_tokens(request, 0)
    side.bind(request, 0)
    computed, blocks, steps = 0, 0, []
    while computed < 100:
        scheduled = min(chunk, 100 - computed)
        needed = -(-(computed + scheduled) // BLOCK)
        entry = {"a": (list(range(blocks, needed)) or None, computed, scheduled)}
        if computed == 0:
            output = an_output(new={"a": (list(range(needed)), 0, scheduled)})
        else:
            output = an_output(cached=entry)
        steps += side.plan(output).requests
        computed, blocks = computed + scheduled, needed
    assert [step.last for step in steps] == [False] * (len(steps) - 1) + [True]
    assert steps[-1].end_token == 96
    assert all(step.end_token % BLOCK == 0 for step in steps)
    assert [step.tokens is not None for step in steps] == [True] + [False] * (len(steps) - 1)
    held = [block for step in steps for block in blocks_of(step)]
    assert held[:6] == [0, 1, 2, 3, 4, 5]


def test_decoding_requests_cost_nothing() -> None:
    side, _ = a_side()
    request = a_request()
    side.matched_tokens(request, 0)
    side.plan(an_output(new={"a": (list(range(7)), 0, 100)}))
    assert not side.plan(an_output(cached={"a": ([7], 100, 1)})).requests


def test_request_that_was_set_back_is_planned_again() -> None:
    side, _ = a_side()
    request = a_request()
    side.matched_tokens(request, 0)
    side.plan(an_output(new={"a": (list(range(7)), 0, 100)}))
    (step,) = side.plan(an_output(cached={"a": (None, 32, 68)})).requests
    assert (step.tokens, step.end_token, step.last) == (None, 96, True)


def test_resumed_request_starts_anew_with_all_its_tokens() -> None:
    side, link = a_side(1000)
    request = a_request()
    side.bind(request, side.matched_tokens(request, 0))
    side.plan(an_output(new={"a": (list(range(7)), 96, 4)}))
    request.all_token_ids = list(range(130))
    request.num_tokens = 130
    assert side.matched_tokens(request, 0) == 128
    side.bind(request, 128)
    plan = side.plan(
        an_output(cached={"a": ([20, 21, 22], 128, 2)}, resumed={"a"}, preempted={"a"})
    )
    (step,) = plan.requests
    assert plan.preempted == ["a"]
    assert step.tokens == array("I", range(130)).tobytes()
    assert step.save_tokens == 96
    assert step.restore == RestoreBinding((2,), 0, 128)
    assert len({each[3] for each in link.asked}) == 2  # attempts


def test_prompt_below_one_block_is_not_planned() -> None:
    side, _ = a_side()
    request = a_request(length=15)
    side.matched_tokens(request, 0)
    assert not side.plan(an_output(new={"a": ([1], 0, 15)})).requests


def test_failed_blocks_and_all_behind_them_leave_the_prefix_cache() -> None:
    side, _ = a_side()
    first, sharer, other = a_request("first"), a_request("sharer"), a_request("other")
    for request in (first, sharer, other):
        side.note_request(request)
    first.num_computed_tokens = 32  # vLLM has set this one back
    sharer.num_computed_tokens = 96  # and left this one to wait for it
    other.num_computed_tokens = 96
    table = FakeTable(first=[1, 2, 3, 4], sharer=[1, 2, 3, 9], other=[5, 6])
    side.clean_failed_blocks({3}, table)
    assert table.evicted == {3, 4, 9}
    assert first.num_computed_tokens == 32
    assert sharer.num_computed_tokens == 32
    assert other.num_computed_tokens == 96


def test_finished_requests_are_forgotten() -> None:
    side, _ = a_side()
    request = a_request()
    side.note_request(request)
    side.matched_tokens(request, 0)
    side.finish(request, [])
    side.finish(request, [])
    assert not side._requests
    assert not side._tracked


@pytest.mark.parametrize(
    ("length", "computed", "saved"),
    [(140, 139, 128), (129, 128, 128), (128, 127, 112), (112, 111, 0), (140, 50, 0), (140, 0, 0)],
)
def test_answer_is_saved_as_far_as_its_kv_was_computed(
    length: int, computed: int, saved: int
) -> None:
    side, _ = a_side()
    request = a_request(length=100)
    side.matched_tokens(request, 0)
    side.plan(an_output(new={"a": (list(range(7)), 0, 100)}))
    request.all_token_ids = list(range(length))
    request.num_tokens, request.num_computed_tokens = length, computed
    side.finish(request, list(range(50, 60)))
    answered = side.plan(an_output(finished={"a"})).answered
    assert not side.plan(an_output()).answered
    if not saved:
        assert not answered
        return
    (answer,) = answered
    assert answer.tokens == array("I", range(saved)).tobytes()
    assert answer.block_ids == array("i", range(50, 50 + saved // BLOCK)).tobytes()


def test_answers_are_left_alone_where_the_setting_says_so() -> None:
    side, _ = a_side(save_generated=False)
    request = a_request(length=100)
    side.matched_tokens(request, 0)
    request.num_tokens, request.num_computed_tokens = 200, 199
    side.finish(request, list(range(20)))
    assert not side.plan(an_output(finished={"a"})).answered


def test_reset_is_true_only_when_every_rank_confirms() -> None:
    side, ranks = two_ranks(0, 0)
    assert side.reset() is True
    ranks.each[1].hit = None
    assert side.reset() is False


def test_tenants_have_roots_of_their_own_in_lookup_and_save() -> None:
    side, link = a_side()
    salts = [None, "a", "b", "", "\ud800"]
    roots = []
    for number, salt in enumerate(salts):
        request = a_request(str(number), cache_salt=salt)
        side.matched_tokens(request, 0)
        side.bind(request, 0)
        plan = side.plan(an_output(new={str(number): (list(range(7)), 0, 100)}))
        request.num_tokens, request.num_computed_tokens = 140, 139
        request.all_token_ids = list(range(140))
        side.finish(request, list(range(9)))
        (answered,) = side.plan(an_output(finished={str(number)})).answered
        assert plan.requests[0].root == answered.root == link.asked[-1][7]
        roots.append(answered.root)
    assert roots[0] == NO_SALT
    assert len(set(roots)) == len(salts)
    assert {len(root) for root in roots} == {32}


def test_minimum_of_the_ranks_counts_and_longer_promises_are_clipped() -> None:
    side, ranks = two_ranks(96, 48)
    request = a_request()
    assert side.matched_tokens(request, 0) == 48
    assert [call[6] for call in ranks.each[0].asked] == [96, 48]
    side.bind(request, 48)
    plan = side.plan(an_output(new={"a": (list(range(7)), 48, 52)}))
    assert plan.requests[0].restore == RestoreBinding((2, 2), 0, 48)
    assert plan.released == [(0, 1), (1, 1)]  # those of the first question


def test_renewed_question_asks_for_what_every_rank_has() -> None:
    side, ranks = two_ranks(96, 48)
    request = a_request()
    assert [side.matched_tokens(request, 0) for _ in range(3)] == [48, 48, 48]
    assert [call[6] for call in ranks.each[0].asked] == [96, 48, 48, 48]
    assert side.plan(an_output()).released == [(0, 1), (1, 1)]


@pytest.mark.parametrize("other", [None, 0, 16])
def test_rank_without_answer_or_hit_makes_it_a_miss_and_frees_the_others(other: int | None) -> None:
    side, ranks = two_ranks(96, other)
    assert side.matched_tokens(a_request(), 16) == 0
    assert side.plan(an_output()).released == [(0, 1)]
    assert len(ranks.each[0].asked) == 1


def test_rank_that_goes_silent_between_the_questions_makes_it_a_miss() -> None:
    side, ranks = two_ranks(96, 48)
    quiet = ranks.each[0]
    answer = quiet.answer
    quiet.answer = lambda *call: answer(*call) if len(quiet.asked) < 1 else None  # type: ignore[method-assign]
    assert side.matched_tokens(a_request(), 0) == 0
    assert side.plan(an_output()).released == [(0, 1), (1, 1), (1, 2)]


def test_nobody_is_asked_while_a_rank_rests() -> None:
    side, ranks = two_ranks(96, 96)
    ranks.rests = True
    assert side.matched_tokens(a_request(), 0) == 0
    assert not ranks.each[0].asked


def test_reports_of_ranks_reach_all_of_them_with_the_next_step() -> None:
    side, _ = two_ranks(0, 0)
    request = a_request()
    side.matched_tokens(request, 0)
    first = side.plan(an_output(new={"a": (list(range(7)), 0, 100)}))
    assert side.waits_for_step
    loss = Loss(NO_SALT, b"tokens", 16)
    report = StepReport(first.step).joined(StepReport(first.step, [loss]))
    side.note_report(report, {7})
    assert side.waits_for_step  # until the ranks have been told
    second = side.plan(an_output())
    assert (second.settled_step, second.void_steps, second.lost) == (1, [1], [loss])
    assert not side.waits_for_step
    third = side.plan(an_output())
    assert (third.settled_step, third.void_steps, third.lost) == (1, [], [])


def test_outcome_that_never_comes_is_not_waited_for_for_ever() -> None:
    side, _ = a_side()
    request = a_request()
    side.matched_tokens(request, 0)
    side.plan(an_output(new={"a": (list(range(7)), 0, 100)}))
    steps = 0
    while side.waits_for_step:
        side.plan(an_output())
        steps += 1
    assert steps == OUTCOME_STEPS_MAX


def test_one_rank_has_nobody_to_keep_up_with() -> None:
    side, _ = a_side()
    side.note_report(StepReport(1, [Loss(NO_SALT, b"tokens", 16)]))
    assert not side.plan(an_output()).lost


def allocated(*block_ids: int) -> Any:
    return SimpleNamespace(get_block_ids=lambda: (list(block_ids),))


def test_load_in_background_comes_before_the_first_step_of_its_request() -> None:
    side, link = a_side(96, load_mode="async")
    request = a_request()
    external = side.matched_tokens(request, 32)
    assert external == 64
    assert side.loads_in_background(request)
    side.bind(request, external, allocated(9, 8, 7, 6, 5, 4))
    plan = side.plan(an_output())
    (load,) = plan.loads
    assert load.restore == RestoreBinding((1,), 32, 96)
    assert array("i", load.block_ids).tolist() == [7, 6, 5, 4]
    assert not plan.requests
    assert not side.plan(an_output()).loads
    side.note_report(StepReport(2))
    side.note_loaded({"a"})
    side.bind(request, 0, allocated(9, 8, 7, 6, 5, 4, 3))
    plan = side.plan(an_output(new={"a": ([9, 8, 7, 6, 5, 4, 3], 96, 4)}))
    (step,) = plan.requests
    assert step.restore is None
    assert step.tokens is not None
    assert not plan.released
    assert len(link.asked) == 1


def test_failed_load_in_background_voids_no_step_and_is_not_asked_for_again() -> None:
    side, link = a_side(96, load_mode="async")
    request = a_request()
    side.bind(request, side.matched_tokens(request, 0), allocated(*range(6)))
    side.plan(an_output())
    side.note_report(StepReport(1, failed_loads={"a": [0, 1, 2]}), {0, 1, 2})
    side.note_loaded({"a"})
    assert side.matched_tokens(request, 0) == 0
    assert side.plan(an_output()).void_steps == []
    assert len(link.asked) == 1


def test_failure_beside_that_of_a_load_in_background_voids_its_step() -> None:
    side, _ = a_side(96, load_mode="async")
    side.plan(an_output())
    side.note_report(StepReport(1, failed_loads={"a": [0, 1]}), {0, 1, 5})
    assert side.plan(an_output()).void_steps == [1]


@pytest.mark.parametrize("is_loaded", [False, True])
def test_request_aborted_while_it_loads_saves_nothing(is_loaded: bool) -> None:
    """It was preempted after it had answered, so what is loaded reaches behind its prompt."""
    side, _ = a_side(160, load_mode="async")
    request = a_request(length=100)
    request.all_token_ids, request.num_tokens = list(range(170)), 170
    side.bind(request, side.matched_tokens(request, 0), allocated(*range(10)))
    side.plan(an_output())
    request.num_computed_tokens = 160
    if is_loaded:
        side.note_loaded({"a"})
    side.finish(request, list(range(10)))
    assert bool(side.plan(an_output()).answered) == is_loaded


def test_hit_that_loads_slower_than_it_is_computed_is_declined() -> None:
    side, _ = a_side(96)
    for step in range(1, 4):
        side.note_report(StepReport(step, computed=(1000, 0.1), loads=[(1000, 0.2)]))
    assert side.matched_tokens(a_request(), 0) == 0
    assert side.counts["declined_tokens_slower-than-prefill"] == 96
    assert side.plan(an_output()).released == [(0, 1)]


def test_long_load_runs_in_background_only_while_others_decode() -> None:
    side, _ = a_side(96)
    for step in range(1, 4):
        side.note_report(StepReport(step, computed=(1000, 10), loads=[(100, 1.0)]))
    first, second = a_request("a"), a_request("b")
    assert side.matched_tokens(first, 0) == 96
    assert not side.loads_in_background(first)
    side.plan(an_output(cached={"c": (None, 40, 1)}))
    assert side.matched_tokens(second, 0) == 96
    assert side.loads_in_background(second)
