"""KV events: what ranks report of their stores, and what the scheduler side makes of it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rangekv.engine.connector.events import Announcements, Holdings, Named
from rangekv.engine.connector.messages import (
    Answered,
    BackgroundLoad,
    BlockRun,
    HoldingsChange,
    RequestStep,
    RestoreBinding,
    StepPlan,
    StepReport,
    pack_block_ids,
    pack_tokens,
)
from rangekv.engine.connector.scheduler import NEWS_WAIT_S, SchedulerSide
from rangekv.engine.connector.settings import Settings
from rangekv.engine.connector.worker import WorkerSide
from rangekv.engine.index.reservation import ReservationState
from rangekv.format.records import NO_SALT
from support.rig import MIB, Rig, tokens_of
from support.vllm_scheduler import BLOCK, FakeRanks, a_request, an_output

TENANT = hashlib.sha256(b"tenant").digest()


def hashes_of(tokens: Sequence[int] | np.ndarray, root: bytes = NO_SALT) -> tuple[bytes, ...]:
    """Hash the full blocks of tokens as vLLM does: each one with all before it, and the salt."""
    packed = np.asarray(tokens, np.uint32).tobytes()
    size = 4 * BLOCK
    return tuple(
        hashlib.sha256(root + packed[:end]).digest() for end in range(size, len(packed) + 1, size)
    )


def named(tokens: np.ndarray, root: bytes = NO_SALT) -> Named:
    return Named(root, tokens.tobytes(), hashes_of(tokens, root))


class TestAnnouncements:
    def test_one_rank_is_passed_on_in_order(self) -> None:
        ledger = Announcements(1)
        run = BlockRun(None, [b"a", b"b"])
        ledger.note({0: HoldingsChange([], [run])})
        ledger.note({0: HoldingsChange([b"b"], [BlockRun(b"a", [b"c"])])})
        assert ledger.take() == [run, [b"b"], BlockRun(b"a", [b"c"])]
        assert ledger.take() == []

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_stored_once_both_ranks_hold_it(self, order: tuple[int, int]) -> None:
        ledger = Announcements(2)
        run = BlockRun(b"parent", [b"a", b"b"])
        ledger.note({order[0]: HoldingsChange([], [run])})
        assert ledger.take() == []
        ledger.note({order[1]: HoldingsChange([], [run])})
        assert ledger.take() == [run]

    def test_one_step_of_both_ranks_is_enough(self) -> None:
        ledger = Announcements(2)
        run = BlockRun(None, [b"a"])
        ledger.note({0: HoldingsChange([], [run]), 1: HoldingsChange([], [run])})
        assert ledger.take() == [run]

    def test_part_of_a_run_names_the_block_before_it(self) -> None:
        ledger = Announcements(2)
        ledger.note({0: HoldingsChange([], [BlockRun(None, [b"a"]), BlockRun(b"b", [b"c", b"d"])])})
        ledger.note({1: HoldingsChange([], [BlockRun(None, [b"a", b"b", b"c", b"d", b"e"])])})
        assert ledger.take() == [BlockRun(None, [b"a"]), BlockRun(b"b", [b"c", b"d"])]

    def test_removed_once_the_first_rank_lost_it(self) -> None:
        ledger = Announcements(2)
        run = BlockRun(None, [b"a", b"b"])
        ledger.note({rank: HoldingsChange([], [run]) for rank in (0, 1)})
        ledger.take()
        ledger.note({1: HoldingsChange([b"b", b"a"], [])})
        assert ledger.take() == [[b"b", b"a"]]
        ledger.note({0: HoldingsChange([b"a"], [])})
        assert ledger.take() == []
        ledger.note({1: HoldingsChange([], [run])})
        assert ledger.take() == [BlockRun(b"a", [b"b"])]  # rank 0 has lost the first one
        ledger.note({0: HoldingsChange([], [BlockRun(None, [b"a"])])})
        assert ledger.take() == [BlockRun(None, [b"a"])]

    def test_removed_before_the_second_rank_stored_it(self) -> None:
        ledger = Announcements(2)
        run = BlockRun(None, [b"a"])
        ledger.note({0: HoldingsChange([], [run])})
        ledger.note({0: HoldingsChange([b"a"], [])})
        ledger.note({1: HoldingsChange([], [run])})
        assert ledger.take() == []
        ledger.note({0: HoldingsChange([], [run])})
        assert ledger.take() == [run]

    @pytest.mark.parametrize("rank_count", [1, 2, 3])
    def test_what_is_announced_is_what_all_ranks_hold(self, rank_count: int) -> None:
        chance, ledger = random.Random(rank_count), Announcements(rank_count)
        chain = [bytes([number]) for number in range(20)]
        held: list[set[bytes]] = [set() for _ in range(rank_count)]
        announced: set[bytes] = set()
        for _ in range(500):
            rank = chance.randrange(rank_count)
            lost = [each for each in chain if each in held[rank] and chance.random() < 0.3]
            held[rank].difference_update(lost)
            begin, end = sorted((chance.randrange(20), chance.randrange(20)))
            runs = [
                BlockRun(chain[at - 1] if at else None, [chain[at]])
                for at in range(begin, end)
                if chain[at] not in held[rank]
            ]
            held[rank].update(run.hashes[0] for run in runs)
            ledger.note({rank: HoldingsChange(lost, runs)})
            for news in ledger.take():
                if isinstance(news, BlockRun):
                    assert announced.isdisjoint(news.hashes)
                    first = chain.index(news.hashes[0])
                    assert news.hashes == chain[first : first + len(news.hashes)]
                    assert news.parent == (chain[first - 1] if first else None)
                    announced.update(news.hashes)
                else:
                    assert announced.issuperset(news)
                    announced.difference_update(news)
            assert announced == set.intersection(*held)
        for rank in range(rank_count):
            ledger.note({rank: HoldingsChange(sorted(held[rank]), [])})
        assert not ledger._holders  # what no rank holds is not remembered


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "store")
    yield rig
    rig.engine.close(30)


@pytest.fixture
def holdings(rig: Rig) -> Holdings:
    return Holdings(rig.engine, BLOCK)


def begin_save(rig: Rig, tokens: np.ndarray, root: bytes = NO_SALT) -> Any:
    """Save the whole blocks of `tokens` up to the point where only `finish` is left."""
    save = rig.engine.save(rig.key(), tokens, root=rig.engine.root(root))
    assert save is not None
    blocks = rig.take(len(tokens) // BLOCK)
    rig.produce(tokens, blocks)
    rig.announce(save, blocks)
    assert save.extracted(30)
    rig.give(blocks)
    return save


def wait_until_decided(rig: Rig, save: Any) -> None:
    assert rig.engine._events.wait_until(lambda: save.decided, 30)


class TestHoldings:
    def test_prompt_is_reported_once_its_save_has_ended(self, rig: Rig, holdings: Holdings) -> None:
        prompt = tokens_of(1, 10 * BLOCK + 3)
        holdings.look_for(named(prompt))
        assert holdings.take_change() == HoldingsChange([], [])
        save = begin_save(rig, prompt)
        holdings.expect(save, named(prompt))
        assert holdings.take_change() == HoldingsChange([], [])
        assert holdings.is_saving
        save.finish()
        wait_until_decided(rig, save)
        assert holdings.take_change() == HoldingsChange(
            [], [BlockRun(None, list(hashes_of(prompt)))]
        )
        assert not holdings.is_saving

    def test_save_that_was_cancelled_is_not_reported(self, rig: Rig, holdings: Holdings) -> None:
        prompt = tokens_of(1, 10 * BLOCK)
        save = begin_save(rig, prompt)
        holdings.expect(save, named(prompt))
        save.cancel()
        wait_until_decided(rig, save)
        assert holdings.take_change() == HoldingsChange([], [])
        assert not holdings.is_saving

    def test_what_requests_share_is_reported_once(self, rig: Rig, holdings: Holdings) -> None:
        prompt, tail = tokens_of(1, 10 * BLOCK), tokens_of(2, 5 * BLOCK)
        branch = np.concatenate([prompt[: 6 * BLOCK], tail])
        assert rig.save(prompt)
        holdings.look_for(named(prompt[: 4 * BLOCK]))
        holdings.look_for(named(prompt))
        holdings.look_for(named(prompt))
        hashes = list(hashes_of(prompt))
        assert holdings.take_change().stored == [
            BlockRun(None, hashes[:4]),
            BlockRun(hashes[3], hashes[4:]),
        ]
        assert rig.save(branch)
        holdings.look_for(named(branch))
        holdings.look_for(named(prompt))
        assert holdings.take_change().stored == [
            BlockRun(hashes[5], list(hashes_of(branch)[6:])),
        ]

    def test_continuation_waits_for_what_it_continues(self, rig: Rig, holdings: Holdings) -> None:
        longer = tokens_of(1, 20 * BLOCK)
        prompt = longer[: 8 * BLOCK]
        first = begin_save(rig, prompt)
        second = begin_save(rig, longer)
        for save, tokens in ((first, prompt), (second, longer)):
            holdings.expect(save, named(tokens))
        second.finish()
        second.wait(30)
        assert second.settled
        assert second.reservation.state is ReservationState.PROVED
        assert holdings.take_change() == HoldingsChange([], [])
        assert holdings.is_saving
        first.finish()
        wait_until_decided(rig, second)
        stored = [block for run in holdings.take_change().stored for block in run.hashes]
        assert stored == list(hashes_of(longer))
        assert not holdings.is_saving

    def test_tenants_are_told_apart(self, rig: Rig, holdings: Holdings) -> None:
        prompt = tokens_of(1, 4 * BLOCK)
        save = begin_save(rig, prompt, TENANT)
        save.finish()
        wait_until_decided(rig, save)
        holdings.look_for(named(prompt))
        holdings.look_for(named(prompt, hashlib.sha256(b"nobody").digest()))
        assert holdings.take_change().stored == []
        holdings.look_for(named(prompt, TENANT))
        assert holdings.take_change().stored == [BlockRun(None, list(hashes_of(prompt, TENANT)))]

    def test_reset_takes_everything_back(self, rig: Rig, holdings: Holdings) -> None:
        prompt, unnamed = tokens_of(1, 10 * BLOCK), tokens_of(2, 10 * BLOCK)
        assert rig.save(prompt)
        assert rig.save(unnamed)
        holdings.look_for(named(prompt))
        holdings.take_change()
        rig.engine.reset()
        assert rig.save(prompt)
        holdings.look_for(named(prompt))
        change = holdings.take_change()
        assert change.removed == list(hashes_of(prompt))  # the old record, and nothing unnamed
        assert change.stored == [BlockRun(None, list(hashes_of(prompt)))]  # the new one

    def test_retired_record_takes_what_follows_it_along(self, rig: Rig, holdings: Holdings) -> None:
        longer = tokens_of(1, 20 * BLOCK)
        assert rig.save(longer[: 8 * BLOCK])
        assert rig.save(longer)
        holdings.look_for(named(longer))
        holdings.take_change()
        rig.engine.retire(longer, start_token=8 * BLOCK)
        change = holdings.take_change()
        assert sorted(change.removed) == sorted(hashes_of(longer)[8:])
        assert not change.stored

    def test_what_was_there_before_is_reported_when_it_is_asked_for(
        self, rig: Rig, holdings: Holdings
    ) -> None:
        prompt = tokens_of(1, 10 * BLOCK)
        assert rig.save(prompt)
        again = rig.reopen()
        try:
            after = Holdings(again.engine, BLOCK)
            assert after.take_change() == HoldingsChange([], [])
            after.look_for(named(np.concatenate([prompt, tokens_of(2, 3 * BLOCK)])))
            assert after.take_change().stored == [BlockRun(None, list(hashes_of(prompt)))]
        finally:
            again.engine.close(30)

    def test_engine_that_failed_holds_nothing(self, rig: Rig, holdings: Holdings) -> None:
        prompt = tokens_of(1, 10 * BLOCK)
        assert rig.save(prompt)
        holdings.look_for(named(prompt))
        holdings.take_change()
        rig.engine._events.fault = RuntimeError("a bug")
        try:
            holdings.look_for(named(prompt))
            assert holdings.take_change() == HoldingsChange(list(hashes_of(prompt)), [])
        finally:
            rig.engine._events.fault = None

    def test_asking_does_not_keep_a_prompt_from_eviction(
        self, rig: Rig, holdings: Holdings
    ) -> None:
        cold, warm = tokens_of(1, 4 * BLOCK), tokens_of(2, 4 * BLOCK)
        assert rig.save(cold)
        assert rig.save(warm)
        before = [each.access_rank for each in rig.engine._catalog.directory.visible()]
        holdings.look_for(named(cold))
        assert holdings.take_change().stored
        assert [each.access_rank for each in rig.engine._catalog.directory.visible()] == before

    @pytest.mark.parametrize("seed", range(3))
    def test_what_is_reported_is_what_lookups_find(self, tmp_path: Path, seed: int) -> None:
        """In a store that is too small for all of them, where most saves evict something."""
        chance = np.random.default_rng(seed)
        rig = Rig(tmp_path / "small", capacity=4 * MIB)
        holdings = Holdings(rig.engine, BLOCK)
        prompts = [tokens_of(seed, 8 * BLOCK)]
        reported: set[bytes] = set()
        was_removed = False
        try:
            for turn in range(60):
                base = prompts[chance.integers(len(prompts))]
                cut = int(chance.integers(0, len(base) // BLOCK + 1)) * BLOCK
                tail = tokens_of(1000 * seed + turn + 1, int(chance.integers(1, 24)) * BLOCK)
                prompt = np.concatenate([base[:cut], tail])[: 64 * BLOCK]
                prompts.append(prompt)
                rig.save(prompt)
                holdings.look_for(named(prompt))
                change = holdings.take_change()
                was_removed |= bool(change.removed)
                assert reported.issuperset(change.removed)
                reported.difference_update(change.removed)
                for run in change.stored:
                    assert reported.isdisjoint(run.hashes)
                    assert run.parent is None or run.parent in reported
                    reported.update(run.hashes)
                held = {
                    block for each in prompts for block in hashes_of(each)[: rig.hit(each) // BLOCK]
                }
                assert reported == held
        finally:
            rig.engine.close(30)
        assert was_removed


class WatchedEngine:
    """As much of an engine as a worker needs for a step that only looks."""

    def __init__(self) -> None:
        self.asked: list[tuple[bytes, bytes]] = []

    def take_bad(self) -> list[Any]:
        return []

    def root(self, digest: bytes) -> int:
        return 0

    def save(self, *_: Any, **__: Any) -> None:
        return None

    def watch(self, prefixes: Sequence[tuple[bytes, memoryview]]) -> tuple[list[int], list[Any]]:
        self.asked += [(root, bytes(tokens)) for root, tokens in prefixes]
        return [], [[(1, 2 * BLOCK)] for _ in prefixes]


def test_worker_reports_what_the_requests_of_a_plan_have() -> None:
    engine: Any = WatchedEngine()
    worker = WorkerSide(engine, {"l.0": 0}, BLOCK, 5.0, 3, Holdings(engine, BLOCK))
    first, answer, load = (tokens_of(seed, 4 * BLOCK) for seed in (1, 2, 3))
    plan = StepPlan(
        requests=[
            RequestStep("a", b"", 16, True, first.tobytes(), 16, TENANT, hashes=hashes_of(first)),
            RequestStep("old", b"", 16, True),
        ],
        answered=[Answered("b", answer.tobytes(), b"", NO_SALT, hashes_of(answer))],
        loads=[
            BackgroundLoad(
                "c",
                load.tobytes(),
                pack_block_ids([1, 2]),
                RestoreBinding((0, 0, 0, 9), 0, 2 * BLOCK),
                NO_SALT,
                hashes_of(load),
            )
        ],
        step=1,
    )
    worker.before_overwrite(plan)
    worker.begin_step(plan)
    worker.end_step()
    report = worker.take_report()
    assert engine.asked == [
        (NO_SALT, answer.tobytes()),
        (TENANT, first.tobytes()),
        (NO_SALT, load.tobytes()),
    ]
    assert report.holdings == {3: HoldingsChange([], [BlockRun(None, list(hashes_of(answer)[:2]))])}
    assert not report.is_saving


def test_worker_reports_saves_that_have_ended(rig: Rig) -> None:
    layers = {f"l.{index}": index for index in range(rig.model.layer_count)}
    worker = WorkerSide(rig.engine, layers, BLOCK, 5.0, 0, Holdings(rig.engine, BLOCK))
    tokens = tokens_of(1, 6 * BLOCK)
    block_ids = rig.take(6)
    rig.produce(tokens, block_ids)
    prompt = tokens[: 4 * BLOCK].tobytes()

    def step(number: int, **fields: Any) -> StepReport:
        plan = StepPlan(step=number, settled_step=number - 1, **fields)
        worker.before_overwrite(plan)
        worker.begin_step(plan)
        for layer in layers:
            worker.layer_computed(layer)
        worker.end_step()
        return worker.take_report()

    def stored_after_all_saves(number: int, **fields: Any) -> list[BlockRun]:
        runs = step(number, **fields).holdings[0].stored
        assert rig.engine._events.wait_until(lambda: not rig.engine._saves.active, 30)
        after = step(number + 1)
        assert not after.is_saving
        return runs + after.holdings[0].stored

    hashes = list(hashes_of(tokens))
    request = RequestStep(
        *("a", pack_block_ids(block_ids[:4].tolist()), 4 * BLOCK, True, prompt, 4 * BLOCK),
        hashes=tuple(hashes[:4]),
    )
    first = step(1, requests=[request])
    assert first.holdings == {0: HoldingsChange([], [])}
    assert stored_after_all_saves(2) == [BlockRun(None, hashes[:4])]
    answered = Answered(
        "a", tokens.tobytes(), pack_block_ids(block_ids.tolist()), NO_SALT, tuple(hashes)
    )
    assert stored_after_all_saves(4, finished=["a"], answered=[answered]) == [
        BlockRun(hashes[3], hashes[4:])
    ]


def test_worker_without_events_asks_nothing() -> None:
    engine: Any = WatchedEngine()
    worker = WorkerSide(engine, {"l.0": 0}, BLOCK, 5.0)
    tokens = tokens_of(1, 2 * BLOCK)
    worker.begin_step(StepPlan([RequestStep("a", b"", 16, True, tokens.tobytes(), 16)]))
    assert worker.take_report().holdings == {}
    assert not engine.asked


def test_reports_of_ranks_are_joined() -> None:
    changes = [HoldingsChange([bytes([rank])], []) for rank in (0, 1)]
    joined = StepReport(1, holdings={0: changes[0]}).joined(
        StepReport(1, holdings={1: changes[1]}, is_saving=True)
    )
    assert joined.holdings == dict(enumerate(changes))
    assert joined.is_saving


def a_side(rank_count: int = 1, *, with_events: bool = True) -> SchedulerSide:
    return SchedulerSide(
        Settings("/kv"),
        BLOCK,
        FakeRanks(*[0] * rank_count),
        Announcements(rank_count) if with_events else None,
    )


def plan_of(side: SchedulerSide, request: Any) -> StepPlan:
    side.note_request(request)
    side.matched_tokens(request, 0)
    side.bind(request, 0)
    return side.plan(an_output({request.request_id: (list(range(7)), 0, request.num_tokens)}))


def test_hashes_go_with_the_tokens_that_they_are_of() -> None:
    side, request = a_side(), a_request(length=100)
    request.block_hashes = list(hashes_of(range(112)))  # it has grown since
    (step,) = plan_of(side, request).requests
    assert step.tokens == pack_tokens(range(100))
    assert step.hashes == hashes_of(range(100))
    request.all_token_ids = list(range(145))
    request.num_tokens, request.num_computed_tokens = 145, 140
    request.block_hashes = list(hashes_of(range(145)))  # KV of the last block is not whole
    side.finish(request, list(range(9)))
    (answered,) = side.plan(an_output(finished={"a"})).answered
    assert len(answered.tokens) == 4 * 8 * BLOCK
    assert answered.hashes == hashes_of(range(8 * BLOCK))


def test_hashes_go_with_a_load_in_the_background() -> None:
    side = SchedulerSide(Settings("/kv", load_mode="async"), BLOCK, FakeRanks(64), Announcements(1))
    request = a_request(block_hashes=list(hashes_of(range(100))))
    side.note_request(request)
    external = side.matched_tokens(request, 0)
    blocks: Any = type("Blocks", (), {"get_block_ids": lambda _: (list(range(7)),)})()
    side.bind(request, external, blocks)
    (load,) = side.plan(an_output()).loads
    assert load.hashes == hashes_of(range(100))
    assert load.root == NO_SALT


@pytest.mark.parametrize(("salt", "with_events"), [("", True), (None, False), ("a", False)])
def test_no_hashes(salt: str | None, with_events: bool) -> None:
    side = a_side(with_events=with_events)
    request = a_request(cache_salt=salt, block_hashes=list(hashes_of(range(100))))
    (step,) = plan_of(side, request).requests
    assert step.hashes == ()
    assert side.take_news() == []


def test_what_both_ranks_have_reported_is_news() -> None:
    side, run = a_side(2), BlockRun(None, [b"a"])
    side.note_report(StepReport(1, holdings={0: HoldingsChange([], [run])}))
    assert side.take_news() == []
    side.note_report(StepReport(2, holdings={1: HoldingsChange([], [run])}))
    assert side.take_news() == [run]
    assert side.take_news() == []


def test_idle_engine_steps_on_while_ranks_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("rangekv.engine.connector.scheduler.time.monotonic", lambda: now[0])
    side, request = a_side(), a_request(block_hashes=list(hashes_of(range(100))))
    plan_of(side, request)
    side.note_report(StepReport(1))
    side.plan(an_output())
    side.note_report(StepReport(2, is_saving=True))
    assert side.waits_for_step
    now[0] += NEWS_WAIT_S
    assert not side.waits_for_step  # a disk that stands still keeps nobody busy
    now[0] -= 1
    side.note_report(StepReport(3))
    assert not side.waits_for_step


def test_reset_is_announced_without_another_request(monkeypatch: pytest.MonkeyPatch) -> None:
    side, quiet = a_side(), a_side(with_events=False)
    for each in (side, quiet):
        each.plan(an_output())
        each.note_report(StepReport(1))
        each.plan(an_output())
        assert not each.waits_for_step
        assert each.reset()
    assert not quiet.waits_for_step
    side.note_report(StepReport(2))  # of a step that may have been over before the reset
    assert side.waits_for_step
    side.plan(an_output())
    side.note_report(StepReport(3))
    assert not side.waits_for_step
