"""The worker side alone, on an engine that does what the test says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from rangekv.engine.connector.messages import (
    Answered,
    BackgroundLoad,
    Loss,
    RequestStep,
    RestoreBinding,
    StepPlan,
    pack_block_ids,
    pack_tokens,
)
from rangekv.engine.connector.worker import WorkerSide
from rangekv.format.errors import TicketError, UsageError
from rangekv.format.records import NO_SALT

BLOCK = 16
LAYERS = {"l.0": 0, "l.1": 1}


@dataclass
class FakeRestore:
    block_ids: list[int]
    bad_layers: set[int] = field(default_factory=set)
    failed: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    is_finished: bool = False
    is_settled: bool = False

    def wait_layer(self, layer_index: int, deadline_s: float) -> bool:
        self.waited.append(layer_index)
        return layer_index not in self.bad_layers

    def failed_blocks(self) -> list[int]:
        return self.failed

    def finish(self) -> None:
        self.is_finished = True


@dataclass
class FakeSave:
    tokens: bytes
    announced: list[tuple[int, int, int, list[int]]] = field(default_factory=list)
    is_whole: bool = True
    outcome: str = "open"
    settled: bool = False
    published_end: int = 0

    def layer_ready(self, layer: int, tokens: tuple[int, int], block_ids: Any) -> None:
        self.announced.append((layer, *tokens, block_ids.tolist()))

    def extracted(self, deadline_s: float) -> bool:
        return self.is_whole

    def finish(self) -> None:
        self.outcome = "finished"

    def cancel(self) -> None:
        self.outcome = "cancelled"


@dataclass
class FakeTicket:
    ticket_id: int
    token_count: int
    reason: str | None = None


class FakeEngine:
    def __init__(self) -> None:
        self.saves: list[FakeSave] = []
        self.restores: list[FakeRestore] = []
        self.released: list[int] = []
        self.is_declining = False
        self.claim_error: TicketError | None = None
        self.bad_layers: set[int] = set()
        self.failed: list[int] = []
        self.hit = 64
        self.resets = 0
        self.roots = {NO_SALT: 0}
        self.asked_roots: list[int] = []
        self.retired: list[tuple[bytes, int, int]] = []
        self.bad: list[tuple[bytes, bytes, int]] = []

    def take_bad(self) -> list[tuple[bytes, bytes, int]]:
        bad, self.bad = self.bad, []
        return bad

    def retire(self, tokens: bytes, *, root: int, start_token: int) -> None:
        self.retired.append((tokens, root, start_token))

    def root(self, digest: bytes) -> int:
        return self.roots.setdefault(digest, len(self.roots))

    def lookup(
        self, key: Any, tokens: bytes, *, root: int, skip_tokens: int, max_tokens: int, clock: int
    ) -> FakeTicket:
        self.asked_roots.append(root)
        return FakeTicket(key.attempt + 1, self.hit)

    def release(self, ticket: FakeTicket) -> None:
        self.released.append(ticket.ticket_id)

    def claim(self, ticket: FakeTicket, tokens: bytes, block_ids: Any) -> FakeRestore:
        if self.claim_error is not None:
            raise self.claim_error
        restore = FakeRestore(block_ids.tolist(), set(self.bad_layers), list(self.failed))
        self.restores.append(restore)
        return restore

    def save(self, key: Any, tokens: Any, *, root: int, clock: int) -> FakeSave | None:
        self.asked_roots.append(root)
        if self.is_declining:
            return None
        self.saves.append(FakeSave(bytes(tokens)))
        return self.saves[-1]

    def reset(self) -> None:
        self.resets += 1


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def worker(engine: FakeEngine) -> WorkerSide:
    return WorkerSide(engine, LAYERS, BLOCK, 5.0)  # type: ignore[arg-type]


def a_first_step(
    blocks: list[int], end: int, *, name: str = "a", length: int = 96, **fields: Any
) -> RequestStep:
    return RequestStep(
        request_id=name,
        block_ids=pack_block_ids(blocks),
        end_token=end,
        last=end >= length,
        tokens=pack_tokens(range(length)),
        save_tokens=length,
        **fields,
    )


def a_next_step(blocks: list[int], end: int, *, last: bool, name: str = "a") -> RequestStep:
    return RequestStep(name, pack_block_ids(blocks), end, last)


def run_step(worker: WorkerSide, *requests: RequestStep, **fields: Any) -> set[int]:
    """Call the hooks in vLLM's order for a step with synchronous loads; return failed blocks.

    Unless the test says otherwise, the scheduler side has heard of all steps before.
    """
    last = worker._step.number
    plan = StepPlan(list(requests), **{"step": last + 1, "settled_step": last} | fields)
    worker.before_overwrite(plan)
    worker.begin_step(plan)
    worker.start_restores()
    for layer in LAYERS:
        worker.wait_layer(layer)
        worker.layer_computed(layer)
    worker.end_step()
    return worker.take_failed_blocks()


def test_prompt_in_chunks_is_announced_once_and_published_at_its_end(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    run_step(worker, a_first_step([5, 6], 32))
    run_step(worker, a_next_step([7, 8, 9], 80, last=False))
    assert engine.saves[0].outcome == "open"
    run_step(worker, a_next_step([4], 96, last=True))
    assert engine.saves[0].outcome == "open"
    run_step(worker)
    (save,) = engine.saves
    assert save.outcome == "finished"
    assert save.tokens == pack_tokens(range(96))
    assert [each for each in save.announced if each[0] == 0] == [
        (0, 0, 32, [5, 6]),
        (0, 32, 80, [7, 8, 9]),
        (0, 80, 96, [4]),
    ]
    assert not worker.keeper._held


def test_restore_waits_for_each_layer_and_is_finished_in_its_step(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    worker.answer("lookup", ["a", "s", 0, b"", 32, 96, NO_SALT, 1])
    failed = run_step(
        worker, a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((1,), 32, 64))
    )
    (restore,) = engine.restores
    assert restore.block_ids == [3, 4]
    assert restore.waited[:2] == [0, 1]
    assert restore.is_finished
    assert not failed
    assert engine.saves[0].announced[0] == (0, 0, 96, [1, 2, 3, 4, 5, 6])


@pytest.mark.parametrize("bad_layer", [0, 1])
def test_failed_restore_voids_every_save_of_its_step_and_reports_its_blocks(
    worker: WorkerSide, engine: FakeEngine, bad_layer: int
) -> None:
    run_step(worker, a_first_step([20, 21], 32, name="other"))
    worker.answer("lookup", ["a", "s", 0, b"", 0, 96, NO_SALT, 1])
    engine.bad_layers, engine.failed = {bad_layer}, [2]
    failed = run_step(
        worker,
        a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((1,), 0, 64)),
        a_next_step([22], 48, last=False, name="other"),
    )
    assert failed == {2}
    assert [save.outcome for save in engine.saves] == ["cancelled", "cancelled"]
    run_step(
        worker,
        a_next_step([], 96, last=True),
        a_next_step([23, 24, 25], 96, last=True, name="other"),
    )
    run_step(worker)
    assert [save.outcome for save in engine.saves[2:]] == ["finished", "finished"]
    starts = {each[1] for save in engine.saves[2:] for each in save.announced}
    assert starts == {0}  # the new saves begin from the front


def test_restore_that_is_late_without_naming_blocks_fails_all_of_them(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    worker.answer("lookup", ["a", "s", 0, b"", 0, 96, NO_SALT, 1])
    engine.bad_layers = {1}
    step = a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((1,), 0, 64))
    assert run_step(worker, step) == {1, 2, 3, 4}


@pytest.mark.parametrize("is_known", [True, False])
def test_refused_claim_fails_its_blocks(
    worker: WorkerSide, engine: FakeEngine, is_known: bool
) -> None:
    if is_known:
        worker.answer("lookup", ["a", "s", 0, b"", 0, 96, NO_SALT, 1])
        engine.claim_error = TicketError("stale-ticket", "gone")
    step = a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((1,), 16, 64))
    assert run_step(worker, step) == {2, 3, 4}
    assert engine.saves[0].outcome == "cancelled"


def test_failed_blocks_are_reported_once(worker: WorkerSide, engine: FakeEngine) -> None:
    step = a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((1,), 0, 16))
    assert run_step(worker, step) == {1}
    assert worker.take_failed_blocks() == set()
    assert run_step(worker) == set()


def test_restore_that_never_started_has_failed(worker: WorkerSide, engine: FakeEngine) -> None:
    worker.answer("lookup", ["a", "s", 0, b"", 0, 96, NO_SALT, 1])
    worker.begin_step(
        StepPlan([a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((1,), 0, 64))])
    )
    worker.end_step()
    assert not engine.restores
    assert worker.take_failed_blocks() == {1, 2, 3, 4}
    assert engine.saves[0].outcome == "cancelled"


def test_first_layer_starts_restores_that_nobody_started(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    worker.answer("lookup", ["a", "s", 0, b"", 0, 96, NO_SALT, 1])
    worker.begin_step(
        StepPlan([a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((1,), 0, 64))])
    )
    worker.wait_layer("l.0")
    assert engine.restores[0].waited == [0]
    worker.end_step()
    assert worker.take_failed_blocks() == set()


def test_declined_save_is_not_asked_for_again(worker: WorkerSide, engine: FakeEngine) -> None:
    engine.is_declining = True
    run_step(worker, a_first_step([1, 2], 32))
    engine.is_declining = False
    run_step(worker, a_next_step([3], 48, last=False))
    assert not engine.saves


def test_dropped_piece_ends_the_save_with_what_lies_before_it(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    run_step(worker, a_first_step([1, 2], 32))
    engine.saves[0].is_whole = False
    run_step(worker, a_next_step([3], 48, last=False))
    run_step(worker)
    assert engine.saves[0].outcome == "finished"
    run_step(worker, a_next_step([4], 64, last=False))
    assert len(engine.saves) == 1


@pytest.mark.parametrize("why", ["preempted", "finished"])
def test_interrupted_prompt_publishes_what_is_proved_before_its_blocks_are_reused(
    worker: WorkerSide, engine: FakeEngine, why: str
) -> None:
    run_step(worker, a_first_step([1, 2], 32))
    run_step(worker, **{why: ["a", "unknown"]})
    assert engine.saves[0].outcome == "finished"
    assert not worker.keeper._held


def test_answer_is_extracted_before_its_blocks_are_reused(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    run_step(worker, a_first_step([1, 2], 32))
    plan = StepPlan(
        settled_step=1,
        finished=["a"],
        answered=[Answered("a", pack_tokens(range(48)), pack_block_ids([1, 2, 3]))],
    )
    worker.before_overwrite(plan)
    prompt, answer = engine.saves
    assert prompt.outcome == answer.outcome == "finished"
    assert answer.announced == [(0, 0, 48, [1, 2, 3]), (1, 0, 48, [1, 2, 3])]


def test_resumed_in_the_step_of_its_preemption(worker: WorkerSide, engine: FakeEngine) -> None:
    run_step(worker, a_first_step([1, 2], 32))
    run_step(worker, a_first_step([7, 8, 9], 48), preempted=["a"])
    assert engine.saves[0].outcome == "finished"
    assert engine.saves[1].announced[0] == (0, 0, 48, [7, 8, 9])


def test_step_of_an_unknown_request_is_ignored(worker: WorkerSide, engine: FakeEngine) -> None:
    run_step(worker, a_next_step([1], 16, last=True, name="never-seen"))
    assert not engine.saves


def test_layers_that_share_anothers_kv_are_left_alone(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    worker.begin_step(StepPlan([a_first_step([1, 2, 3, 4, 5, 6], 96)]))
    worker.wait_layer("l.9")
    worker.layer_computed("l.9")
    assert not engine.saves[0].announced


def test_lookup_beyond_the_local_hit_is_a_ticket_and_any_other_none(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    assert worker.answer("lookup", ["a", "s", 6, b"", 48, 96, NO_SALT, 1]) == [7, 64, None]
    assert worker.answer("lookup", ["a", "s", 7, b"", 64, 96, NO_SALT, 1]) == [0, 0, None]
    assert engine.released == [8]
    run_step(worker, released=[(0, 7), (0, 99), (1, 7)])
    assert engine.released == [8, 7]


def test_messages_are_checked(worker: WorkerSide, engine: FakeEngine) -> None:
    for kind, arguments in [
        ("lookup", []),
        ("lookup", ["a", "s", 0, b"", 0, 1, NO_SALT, "now"]),
        ("lookup", ["a", "s", 0, "text", 0, 1, NO_SALT, 1]),
        ("lookup", [1, "s", 0, b"", 0, 1, NO_SALT, 1]),
        ("shutdown", []),
    ]:
        with pytest.raises(UsageError):
            worker.answer(kind, arguments)
    assert worker.answer("reset", []) == []
    assert engine.resets == 1


def test_close_publishes_what_is_proved(worker: WorkerSide, engine: FakeEngine) -> None:
    run_step(worker, a_first_step([1, 2], 32))
    run_step(worker)
    worker.keeper.close()
    assert engine.saves[0].outcome == "finished"


def test_block_ids_are_arrays(worker: WorkerSide) -> None:
    run_step(worker, a_first_step([1, 2], 32))
    assert worker.keeper._held["a"].block_ids.dtype == np.int32


SALTED = b"s" * 32


def test_each_tenant_has_its_own_root(worker: WorkerSide, engine: FakeEngine) -> None:
    worker.answer("lookup", ["a", "s", 0, b"", 0, 96, SALTED, 1])
    run_step(worker, a_first_step([1, 2], 32, root=SALTED))
    run_step(worker, a_first_step([3, 4], 32, name="b"))
    plan = StepPlan(answered=[Answered("a", pack_tokens(range(16)), pack_block_ids([1]), SALTED)])
    worker.before_overwrite(plan)
    assert engine.asked_roots == [1, 1, 0, 1]


@pytest.fixture
def second(engine: FakeEngine) -> WorkerSide:
    """Rank 1 of several."""
    return WorkerSide(engine, LAYERS, BLOCK, 5.0, 1)  # type: ignore[arg-type]


def test_rank_takes_its_own_ticket_only(second: WorkerSide, engine: FakeEngine) -> None:
    second.answer("lookup", ["a", "s", 6, b"", 0, 96, NO_SALT, 1])
    run_step(second, released=[(0, 7)])
    assert not engine.released
    step = a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((99, 7), 0, 64))
    assert run_step(second, step) == set()
    assert engine.restores[0].block_ids == [1, 2, 3, 4]


def test_save_is_published_when_all_ranks_have_reported_on_its_last_step(
    second: WorkerSide, engine: FakeEngine
) -> None:
    run_step(second, a_first_step([1, 2, 3, 4, 5, 6], 96), step=1)
    report = second.take_report()
    assert (report.step, report.lost) == (1, [])
    assert engine.saves[0].outcome == "open"
    run_step(second, step=2, settled_step=1)
    assert engine.saves[0].outcome == "finished"
    assert not second.keeper._held


def test_restore_that_failed_on_another_rank_voids_the_saves_beside_it(
    second: WorkerSide, engine: FakeEngine
) -> None:
    run_step(second, a_first_step([1, 2, 3, 4, 5, 6], 96), step=1)
    run_step(second, a_next_step([], 96, last=True), step=2, settled_step=1, void_steps=[1])
    assert [save.outcome for save in engine.saves] == ["cancelled", "open"]
    run_step(second, step=3, settled_step=2)
    assert [save.outcome for save in engine.saves] == ["cancelled", "finished"]


@pytest.mark.parametrize(("void_steps", "outcome"), [([], "finished"), ([1], "cancelled")])
def test_request_that_is_gone_before_its_step_is_settled(
    second: WorkerSide, engine: FakeEngine, void_steps: list[int], outcome: str
) -> None:
    run_step(second, a_first_step([1, 2], 32), step=1)
    run_step(second, finished=["a"], step=2, settled_step=0)
    assert engine.saves[0].outcome == "open"
    run_step(second, step=3, settled_step=2, void_steps=void_steps)
    assert engine.saves[0].outcome == outcome
    assert not second.keeper._parked


def test_close_drops_what_no_other_rank_has_confirmed(
    second: WorkerSide, engine: FakeEngine
) -> None:
    run_step(second, a_first_step([1, 2], 32), step=1)
    second.keeper.close()
    assert engine.saves[0].outcome == "cancelled"


def test_what_one_rank_lost_is_reported_and_retired_on_all(
    second: WorkerSide, engine: FakeEngine
) -> None:
    engine.bad = [(SALTED, b"tokens", 32)]
    run_step(second, step=1)
    report = second.take_report()
    (loss,) = report.lost
    assert loss == Loss(SALTED, b"tokens", 32)
    assert not second.take_report().lost
    run_step(second, step=2, lost=[loss])
    assert engine.retired == [(b"tokens", 1, 32)]


@pytest.mark.parametrize(("published", "is_lost"), [(96, False), (32, True), (0, True)])
def test_save_that_did_not_reach_its_end_is_reported(
    second: WorkerSide, engine: FakeEngine, published: int, is_lost: bool
) -> None:
    run_step(second, a_first_step([1, 2, 3, 4, 5, 6], 96), step=1)
    run_step(second, step=2, settled_step=1)
    engine.saves[0].published_end = published
    report = second.take_report()
    assert not report.lost  # its writes are still under way
    engine.saves[0].settled = True
    report = second.take_report()
    assert report.lost == ([Loss(NO_SALT, pack_tokens(range(96)), published)] if is_lost else [])


def a_load(worker: WorkerSide) -> BackgroundLoad:
    worker.answer("lookup", ["a", "s", 0, b"", 32, 96, NO_SALT, 1])
    tokens, block_ids = pack_tokens(range(96)), pack_block_ids([3, 4])
    return BackgroundLoad("a", tokens, block_ids, RestoreBinding((1,), 32, 64))


def test_load_in_background_is_reported_once_when_it_is_over(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    assert run_step(worker, loads=[a_load(worker)]) == set()
    (restore,) = engine.restores
    assert restore.block_ids == [3, 4]
    assert not restore.waited
    assert worker.take_loaded() == set()
    run_step(worker)
    restore.is_settled = True
    assert worker.take_loaded() == {"a"}
    assert restore.is_finished
    report = worker.take_report()
    assert not report.failed_loads
    assert [tokens for tokens, _ in report.loads] == [32]
    assert worker.take_loaded() == set()
    assert worker.take_failed_blocks() == set()


def test_failed_load_in_background_reports_its_blocks_and_voids_no_save(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    engine.failed = [4]
    run_step(worker, a_first_step([5, 6], 32, name="b", length=32), loads=[a_load(worker)])
    engine.restores[0].is_settled = True
    assert worker.take_loaded() == {"a"}
    assert worker.take_failed_blocks() == {4}
    report = worker.take_report()
    assert report.failed_loads == {"a": [4]}
    assert not report.loads
    run_step(worker)
    assert [save.outcome for save in engine.saves] == ["finished"]


def test_load_in_background_that_cannot_begin_has_failed(
    worker: WorkerSide, engine: FakeEngine
) -> None:
    load = a_load(worker)
    engine.claim_error = TicketError("stale-ticket", "no")
    run_step(worker, loads=[load])
    assert worker.take_loaded() == {"a"}
    assert worker.take_failed_blocks() == {3, 4}


def test_step_tells_what_its_tokens_and_its_loads_have_cost(worker: WorkerSide) -> None:
    worker.answer("lookup", ["a", "s", 0, b"", 32, 96, NO_SALT, 1])
    first = a_first_step([1, 2, 3, 4, 5, 6], 96, restore=RestoreBinding((1,), 32, 64))
    run_step(worker, first, scheduled_tokens=32)
    report = worker.take_report()
    assert report.computed[0] == 32
    assert report.computed[1] > 0
    assert [tokens for tokens, _ in report.loads] == [32]
    joined = report.joined(type(report)(9, computed=(32, 1e6), loads=[(5, 1.0)]))
    assert joined.computed == (32, 1e6)
    assert len(joined.loads) == 2
