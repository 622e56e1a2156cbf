"""The scheduler's side of the connector: asks the ranks what they hold and plans each step.

Follows requests from lookup to finish by vLLM's own numbers; never touches KV, files or the engine.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from rangekv.engine.connector.admission import Admission
from rangekv.engine.connector.eligibility import skip_reason
from rangekv.engine.connector.events import Announcements
from rangekv.engine.connector.failures import BlockTable, forget_failed
from rangekv.engine.connector.forecast import Forecast, LoadChoice
from rangekv.engine.connector.messages import (
    Answered,
    BackgroundLoad,
    BlockRun,
    Loss,
    RequestStep,
    RestoreBinding,
    StepPlan,
    StepReport,
    pack_block_ids,
    pack_tokens,
)
from rangekv.engine.connector.promises import Promises, Ranks, Tracked
from rangekv.engine.connector.settings import Settings
from rangekv.engine.connector.tenant import root_digest

logger = logging.getLogger("vllm.rangekv")

RESET_DEADLINE_S = 30.0
OUTCOME_STEPS_MAX = 100  # empty steps made for an outcome before it is not waited for any more
NEWS_WAIT_S = 10.0  # how long an idle engine makes empty steps for what ranks have to announce


class Blocks(Protocol):
    """What vLLM says it has allocated (KVCacheBlocks)."""

    def get_block_ids(self) -> tuple[list[int], ...]: ...


class SchedulerSide:
    """Called by vLLM's scheduler thread only."""

    def __init__(
        self,
        settings: Settings,
        block_tokens: int,
        ranks: Ranks,
        announcements: Announcements | None = None,
    ) -> None:
        """`announcements` is there where vLLM wants to hear what all ranks hold."""
        self.promises = Promises(ranks, block_tokens, settings.lookup_timeout_ms / 1000)
        self.counts: Counter[str] = Counter()  # what the engines' counters cannot know
        self._settings = settings
        self._block_tokens = block_tokens
        self._requests: dict[str, Any] = {}  # all that vLLM holds, eligible or not
        self._tracked: dict[str, Tracked] = {}
        self._forecast = Forecast(settings.load_mode)
        self._admission = Admission(settings, block_tokens, self.counts)
        self._others_decode = False
        self._loads: list[BackgroundLoad] = []
        self._answered: list[Answered] = []
        self._step = 0
        self._saving_step = 0  # the last one that saves something
        self._settled_step = 0
        self._told_step = 0  # the last one that ranks know to be settled
        self._void_steps: list[int] = []
        self._lost: list[Loss] = []
        self._announcements = announcements
        self._ranks_save = False
        self._reset_step = -1  # the last one planned before a reset
        self._busy_at = 0.0

    def note_request(self, request: Any) -> None:
        """Remember a request that vLLM has accepted."""
        self._requests[request.request_id] = request

    def matched_tokens(self, request: Any, local_tokens: int) -> int:
        """Return how many tokens beyond `local_tokens` every rank can restore, whole blocks only.

        At least one token stays to be computed. Asking again is harmless: the same question
        renews its ticket, another one releases it first.
        """
        reason = skip_reason(request)
        if reason is not None:
            self.counts[f"not_eligible_{reason}"] += 1
            return 0
        tracked = self._track(request)
        query = (local_tokens, tracked.token_count)
        if tracked.query != query:
            self.promises.release(tracked)
            tracked.query = query
            tracked.limit = self._floor(tracked.token_count - 1)
        is_barred = request.skip_reading_prefix_cache or tracked.has_failed
        if tracked.limit <= local_tokens or is_barred:
            return 0
        external = self.promises.renew(tracked, local_tokens)
        if 0 < external < self._settings.min_restore_tokens:
            self.counts["declined_tokens_below-minimum"] += external
            external = 0
        if external and self._choose(tracked, external) is LoadChoice.DECLINED:
            self.counts["declined_tokens_slower-than-prefill"] += external
            external = 0
        if external == 0:
            self.promises.release(tracked)
        return external

    def loads_in_background(self, request: Any) -> bool:
        """Say whether the hit that was just matched is to be loaded before the request's steps."""
        tracked = self._tracked.get(request.request_id)
        return tracked is not None and tracked.promise is not None and tracked.in_background

    def _choose(self, tracked: Tracked, external: int) -> LoadChoice:
        choice = self._forecast.choose(external, others_decode=self._others_decode)
        tracked.in_background = choice is LoadChoice.BACKGROUND
        return choice

    def bind(self, request: Any, external_tokens: int, blocks: Blocks | None = None) -> None:
        """Note that `blocks` are allocated and `external_tokens` will be restored into them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        promise = tracked.promise
        if external_tokens == 0 or promise is None:
            self.promises.release(tracked)
            return
        end_token = promise.begin_token + external_tokens
        binding = RestoreBinding(promise.ticket_ids, promise.begin_token, end_token)
        if tracked.in_background and blocks is not None:
            begin, end = (at // self._block_tokens for at in (binding.begin_token, end_token))
            block_ids = pack_block_ids(blocks.get_block_ids()[0][begin:end])
            self._loads.append(
                BackgroundLoad(
                    request.request_id,
                    tracked.tokens,
                    block_ids,
                    binding,
                    tracked.root,
                    self._hashes(request, tracked.token_count),
                )
            )
            self.counts["background_loads"] += 1
            tracked.is_loading = True
        else:
            tracked.binding = binding
        tracked.promise = None
        tracked.query = None  # the ticket is used up: whoever asks next asks anew
        tracked.attempt += 1

    def plan(self, output: Any) -> StepPlan:
        """Return what the worker does in the step that `output` (SchedulerOutput) describes."""
        self._step += 1
        plan = StepPlan(
            preempted=list(output.preempted_req_ids or ()),
            finished=list(output.finished_req_ids),
            answered=self._answered,
            step=self._step,
            settled_step=self._settled_step,
            void_steps=self._void_steps,
            lost=self._lost,
            clock=self.promises.tick(),
            loads=self._loads,
            scheduled_tokens=sum(output.num_scheduled_tokens.values()),
        )
        self._answered, self._void_steps, self._lost, self._loads = [], [], [], []
        self._told_step = self._settled_step
        scheduled = output.num_scheduled_tokens
        cached = output.scheduled_cached_reqs
        self._others_decode = any(scheduled[each] == 1 for each in cached.req_ids)
        for new in output.scheduled_new_reqs:
            end = new.num_computed_tokens + scheduled[new.req_id]
            self._plan_first(plan, new.req_id, new.block_ids[0], end)
        for request_id, block_ids, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            new_ids = block_ids[0] if block_ids else []
            end = computed + scheduled[request_id]
            if request_id in cached.resumed_req_ids:
                self._plan_first(plan, request_id, new_ids, end)
            else:
                self._plan_next(plan, request_id, new_ids, computed, end)
        if plan.requests:
            self._saving_step = self._step
        if plan.scheduled_tokens:
            self._busy_at = time.monotonic()
        plan.released = self.promises.take_released()
        return plan

    def note_report(self, report: StepReport, failed: Iterable[int] = ()) -> None:
        """Take what all ranks say of a step; the next plan passes it on to each of them.

        `failed` are all blocks that are reported with it. What a step computed on one of them is
        void; those of a load in the background no step has read.
        """
        self._settled_step = max(self._settled_step, report.step)
        self._forecast.note(report.computed, report.loads)
        self._admission.budget.spend(report.written_bytes)
        self._ranks_save = report.is_saving
        if self._announcements is not None:
            self._announcements.note(report.holdings)
        unread: set[int] = set()
        for request_id, block_ids in report.failed_loads.items():
            unread.update(block_ids)
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.has_failed = True
        if not unread.issuperset(failed):
            self._void_steps.append(report.step)
        if len(self.promises.ranks) > 1:  # one rank alone has nobody to keep up with
            self._lost += report.lost

    @property
    def waits_for_step(self) -> bool:
        """Whether an idle engine is to make one more step.

        Ranks hold saves back until another step tells them how the last ones went, and what became
        of saves and of a reset is announced with a step.
        """
        waited = self._step - self._saving_step
        if self._told_step < self._saving_step and waited < OUTCOME_STEPS_MAX:
            return True
        has_news = self._ranks_save or self._settled_step <= self._reset_step
        return has_news and time.monotonic() - self._busy_at < NEWS_WAIT_S

    def take_news(self) -> list[list[bytes] | BlockRun]:
        """Return, in order and once, blocks that not all ranks hold any more and such that all do.

        Hashes of the former come as a list, the latter as runs.
        """
        return [] if self._announcements is None else self._announcements.take()

    def note_loaded(self, request_ids: Iterable[str]) -> None:
        """Note that background loads are over on every rank."""
        for request_id in request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.is_loading = False

    def clean_failed_blocks(self, failed: set[int], table: BlockTable) -> None:
        """Make vLLM forget blocks whose load failed: see `forget_failed`."""
        forget_failed(failed, self._requests.values(), table, self._block_tokens)

    def finish(self, request: Any, block_ids: Sequence[int]) -> None:
        """Forget a request; the next step saves its answer and releases a ticket it never used."""
        self._requests.pop(request.request_id, None)
        tracked = self._tracked.pop(request.request_id, None)
        if tracked is None:
            return
        self.promises.release(tracked)
        if tracked.is_loading:
            return  # aborted: its blocks do not hold yet what vLLM counts as computed
        # The last token was sampled, but its KV was never computed.
        end = self._floor(min(request.num_computed_tokens, request.num_tokens - 1))
        if self._admission.takes_answer(request) and end > self._floor(request.num_prompt_tokens):
            self._answered.append(
                Answered(
                    request.request_id,
                    pack_tokens(request.all_token_ids[:end]),
                    pack_block_ids(block_ids[: end // self._block_tokens]),
                    tracked.root,
                    self._hashes(request, end),
                )
            )

    def reset(self) -> bool:
        """Let every rank forget all that it stores; False unless all confirm."""
        if self._announcements is not None:
            self._reset_step, self._busy_at = self._step, time.monotonic()
        answers = self.promises.ranks.ask("reset", deadline_s=RESET_DEADLINE_S)
        return all(answer is not None for answer in answers)

    def close(self) -> None:
        """Drop the connections and log what this side has counted."""
        self.promises.ranks.close()
        totals = self.totals() | {"lookups_in_process": self.promises.ranks.calls}
        counts = " ".join(f"{name}={n}" for name, n in sorted(totals.items()))
        logger.info("range: scheduler %s", counts)

    def totals(self) -> dict[str, int]:
        """Return everything that this side has counted."""
        return {**self.counts, "unanswered": self.promises.ranks.unanswered}

    def _floor(self, token_count: int) -> int:
        return token_count // self._block_tokens * self._block_tokens

    def _hashes(self, request: Any, token_count: int) -> tuple[bytes, ...]:
        """Return vLLM's hashes of the full blocks of so many tokens, where it wants KV events.

        An empty salt is a tenant of its own in the store, but to vLLM's hashes it is none: what one
        of the two loses would seem lost to both.
        """
        if self._announcements is None or request.cache_salt == "":
            return ()
        return tuple(request.block_hashes[: token_count // self._block_tokens])

    def _track(self, request: Any) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = Tracked(request, root_digest(request))
            self._tracked[request.request_id] = tracked
            tracked.save_tokens = self._admission.prompt_tokens(request)
        if tracked.token_count != request.num_tokens:
            tracked.tokens = pack_tokens(request.all_token_ids)
            tracked.token_count = request.num_tokens
        return tracked

    def _plan_first(
        self, plan: StepPlan, request_id: str, block_ids: Sequence[int], end_token: int
    ) -> None:
        """Plan the first step of an attempt: the worker gets tokens, blocks and the ticket."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        binding, tracked.binding = tracked.binding, None
        tracked.is_complete = end_token >= tracked.save_tokens
        if binding is None and tracked.save_tokens == 0:
            return
        plan.requests.append(
            RequestStep(
                request_id=request_id,
                block_ids=pack_block_ids(block_ids),
                end_token=min(self._floor(end_token), tracked.save_tokens),
                last=tracked.is_complete,
                tokens=tracked.tokens,
                save_tokens=tracked.save_tokens,
                root=tracked.root,
                restore=binding,
                hashes=self._hashes(tracked.request, tracked.token_count),
            )
        )

    def _plan_next(
        self,
        plan: StepPlan,
        request_id: str,
        new_ids: Iterable[int],
        computed: int,
        end_token: int,
    ) -> None:
        """Plan a further chunk; a request that only decodes has nothing left to say.

        `computed` may be smaller than before: vLLM sets a request back when a load has failed.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or (tracked.is_complete and computed >= tracked.save_tokens):
            return
        tracked.is_complete = end_token >= tracked.save_tokens
        plan.requests.append(
            RequestStep(
                request_id=request_id,
                block_ids=pack_block_ids(new_ids),
                end_token=min(self._floor(end_token), tracked.save_tokens),
                last=tracked.is_complete,
            )
        )
