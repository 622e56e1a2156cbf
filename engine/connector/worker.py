"""The worker's side of the connector: carries out each step's plan on the rank's engine.

Maps plans to tickets, restores and saves and reports what failed; never decides what to load or
save, and never lets a failure of the cache become a failure of the model.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rangekv.engine import RequestKey
from rangekv.engine.connector.background import BackgroundLoads
from rangekv.engine.connector.events import Holdings, Named
from rangekv.engine.connector.keeper import Held, SaveKeeper
from rangekv.engine.connector.messages import (
    Answered,
    BackgroundLoad,
    Loss,
    RequestStep,
    RestoreBinding,
    StepPlan,
    StepReport,
)
from rangekv.format.errors import RangeError, UsageError

if TYPE_CHECKING:
    from rangekv.engine import Engine, Restore, Ticket

logger = logging.getLogger("vllm.rangekv")

EXTRACTION_DEADLINE_S = 0.5  # how long a step may wait for save banks before pieces are dropped
TICKETS_MAX = 4096  # unclaimed tickets that are kept at once; the oldest is released


@dataclass(slots=True)
class _Restoring:
    """One restore of a step and the blocks that it fills."""

    restore: Restore
    block_ids: npt.NDArray[np.int32]
    is_late: bool = False  # a layer was not delivered in time

    def end(self) -> list[int]:
        """Let the restore go and return the blocks that must be computed instead."""
        self.restore.finish()
        failed = self.restore.failed_blocks()
        return self.block_ids.tolist() if self.is_late and not failed else failed


@dataclass(slots=True)
class _Step:
    """State of one step; replaced at its start, because hooks may run in any order after it."""

    number: int = 0
    tokens: int = 0
    begin: float = 0.0
    computed: tuple[int, float] = (0, 0.0)
    loaded_tokens: int = 0
    waited_s: float = 0.0  # for its restores
    loads: list[tuple[int, float]] = field(default_factory=list)
    failed_loads: dict[str, list[int]] = field(default_factory=dict)
    bindings: list[tuple[Held, RestoreBinding]] = field(default_factory=list)
    restores: list[_Restoring] = field(default_factory=list)
    saves: list[tuple[Held, RequestStep]] = field(default_factory=list)
    failed_blocks: set[int] = field(default_factory=set)
    restore_begin: float = 0.0
    restore_deadline: float = 0.0
    is_void: bool = False  # a restore has failed: what this step computed may be wrong

    def fail(self, block_ids: list[int]) -> None:
        """Note blocks that hold no proved KV; nothing of the step counts then."""
        self.failed_blocks.update(block_ids)
        self.is_void |= bool(block_ids)


class WorkerSide:
    """Hooks are called by the model's thread, `answer` by lookup threads.

    `layer_indices` names the layers that own KV, in layer order; layers that share another's KV
    are not in it and need no hook of ours.
    """

    def __init__(
        self,
        engine: Engine,
        layer_indices: dict[str, int],
        block_tokens: int,
        restore_deadline_s: float,
        rank: int = 0,
        holdings: Holdings | None = None,
    ) -> None:
        """`holdings` is there where vLLM wants to hear what the store holds."""
        self._engine = engine
        self._rank = rank
        self._layer_indices = layer_indices
        self._block_tokens = block_tokens
        self._restore_deadline_s = restore_deadline_s
        self._lock = threading.Lock()  # protects _tickets
        self._tickets: OrderedDict[int, Ticket] = OrderedDict()
        self._holdings = holdings
        self.keeper = SaveKeeper(engine, layer_indices.values(), block_tokens, holdings)
        self._background = BackgroundLoads()
        self._step = _Step()
        self.restore_s = 0.0  # from the start of restores to their end
        self.save_s = 0.0  # that steps waited for extraction

    def answer(self, kind: str, arguments: list[Any]) -> list[Any]:
        """Answer one message of the scheduler side; runs beside a forward."""
        if kind == "reset":
            self._engine.reset()
            return []
        if kind == "stats":  # of whoever looks at a live store
            return [self._engine.store.path, self._engine.stats().as_dict()]
        match kind, arguments:
            case (
                "lookup",
                [
                    str(request_id),
                    str(session),
                    int(attempt),
                    bytes(tokens),
                    int(skip),
                    int(limit),
                    bytes(root),
                    int(clock),
                ],
            ):
                key = RequestKey(request_id, session, attempt)
                ticket = self._engine.lookup(
                    key,
                    tokens,
                    root=self._engine.root(root),
                    skip_tokens=skip,
                    max_tokens=limit,
                    clock=clock,
                )
                return self._promise(ticket, skip)
        raise UsageError("bad-message", f"unknown message {kind[:40]!r}")

    def _promise(self, ticket: Ticket, skip: int) -> list[Any]:
        if ticket.token_count <= skip:
            self._engine.release(ticket)
            return [0, 0, ticket.reason]
        with self._lock:
            self._tickets[ticket.ticket_id] = ticket
            oldest = None
            if len(self._tickets) > TICKETS_MAX:
                _, oldest = self._tickets.popitem(last=False)
        if oldest is not None:
            self._engine.release(oldest)
        return [ticket.ticket_id, ticket.token_count, ticket.reason]

    def _take_ticket(self, ticket_id: int) -> Ticket | None:
        with self._lock:
            return self._tickets.pop(ticket_id, None)

    def before_overwrite(self, plan: StepPlan) -> None:
        """End what concerns blocks that this step may overwrite: extract answers, then publish."""
        self.keeper.clock = plan.clock
        self.keeper.settle(plan.settled_step, plan.void_steps)
        for loss in plan.lost:
            self._retire(loss)
        for request_id in (*plan.preempted, *plan.finished):
            self.keeper.let_go(request_id)
        deadline = time.monotonic() + EXTRACTION_DEADLINE_S
        for answered in plan.answered:
            self._look_for(answered)
            self.keeper.save_answer(answered, deadline)

    def begin_step(self, plan: StepPlan) -> None:
        """Take over one step's plan: open its saves and note its restores."""
        self.keeper.clock = plan.clock
        self._step = _Step(plan.step, plan.scheduled_tokens, time.monotonic())
        for rank, ticket_id in plan.released:
            ticket = self._take_ticket(ticket_id) if rank == self._rank else None
            if ticket is not None:
                self._engine.release(ticket)
        for request in plan.requests:
            held = self.keeper.hold(request)
            if held is None:
                continue
            self._look_for(request)
            if request.restore is not None:
                self._step.bindings.append((held, request.restore))
            if self.keeper.open(request.request_id, held):
                self._step.saves.append((held, request))
        for load in plan.loads:
            self._look_for(load)
            self._load_in_background(load)

    def _look_for(self, part: RequestStep | Answered | BackgroundLoad) -> None:
        """Have it found out with the next report what the store holds of a request."""
        if self._holdings is not None and part.hashes and part.tokens is not None:
            self._holdings.look_for(Named(part.root, part.tokens, part.hashes))

    def _load_in_background(self, load: BackgroundLoad) -> None:
        binding, block_ids = load.restore, np.frombuffer(load.block_ids, np.int32)
        try:
            restore = self._claim(binding, load.tokens, block_ids)
        except RangeError as error:
            logger.warning("range: restore refused code=%s", error.code)
            self._background.refuse(load.request_id, block_ids.tolist())
        else:
            token_count = binding.end_token - binding.begin_token
            self._background.start(load.request_id, restore, token_count)

    def _claim(
        self, binding: RestoreBinding, tokens: bytes, block_ids: npt.NDArray[np.int32]
    ) -> Restore:
        ticket = self._take_ticket(binding.ticket_ids[self._rank])
        if ticket is None:
            raise UsageError("unknown-ticket", "the ticket is not held here any more")
        return self._engine.claim(ticket, tokens, block_ids)

    def start_restores(self) -> None:
        """Claim the tickets of this step; idempotent within it."""
        step = self._step
        bindings, step.bindings = step.bindings, []
        step.restore_begin = time.monotonic()
        step.restore_deadline = step.restore_begin + self._restore_deadline_s
        for held, binding in bindings:
            block_ids = self._destination(held, binding)
            try:
                restore = self._claim(binding, held.tokens, block_ids)
                step.restores.append(_Restoring(restore, block_ids))
                step.loaded_tokens += binding.end_token - binding.begin_token
            except RangeError as error:
                logger.warning("range: restore refused code=%s", error.code)
                step.fail(block_ids.tolist())

    def wait_layer(self, layer_name: str) -> None:
        """Wait until one layer of every restore of this step is delivered or has failed."""
        layer_index = self._layer_indices.get(layer_name)
        if layer_index is None:
            return
        if self._step.bindings:
            self.start_restores()
        for each in self._step.restores:
            self._wait(each, layer_index)

    def layer_computed(self, layer_name: str) -> None:
        """Announce one layer of what this step has computed, and of what lies before it."""
        layer_index = self._layer_indices.get(layer_name)
        if layer_index is None or self._step.is_void:
            return
        for held, request in self._step.saves:
            self.keeper.announce(held, layer_index, request.end_token)

    def end_step(self) -> None:
        """Finish this step's restores and extract its saves; after it the blocks are vLLM's."""
        step = self._step
        for held, binding in step.bindings:  # never started, so the forward went without them
            step.fail(self._destination(held, binding).tolist())
        for each in step.restores:
            for layer_index in self._layer_indices.values():
                self._wait(each, layer_index)
            step.fail(each.end())
        begin = time.monotonic()
        step.computed = (step.tokens, begin - step.begin - step.waited_s)
        if step.restores:
            self.restore_s += begin - step.restore_begin
            if not step.is_void:
                step.loads.append((step.loaded_tokens, step.waited_s))
        step.bindings, step.restores = [], []
        deadline = begin + EXTRACTION_DEADLINE_S
        for held, request in step.saves:
            if step.is_void:
                self.keeper.void(held)
            else:
                self.keeper.extract(held, request, step.number, deadline)
        step.saves = []
        self.save_s += time.monotonic() - begin

    def take_report(self) -> StepReport:
        """Return what the scheduler side must know after this step."""
        step = self._step
        bad = [Loss(*each) for each in self._engine.take_bad()]
        report = StepReport(
            step.number,
            bad + self.keeper.take_losses(),
            step.failed_loads,
            step.computed,
            step.loads,
        )
        if self._holdings is not None:
            report.holdings[self._rank] = self._holdings.take_change()
            report.is_saving = self._holdings.is_saving
        return report

    def take_loaded(self) -> set[str]:
        """Return the requests whose background load is over, failed ones included, once.

        No step has read their blocks yet: a failure makes nothing void.
        """
        step, loaded = self._step, set()
        for ended in self._background.take_ended():
            loaded.add(ended.request_id)
            self.restore_s += ended.seconds
            if ended.failed_blocks:
                step.failed_blocks.update(ended.failed_blocks)
                step.failed_loads[ended.request_id] = ended.failed_blocks
            else:
                step.loads.append((ended.token_count, ended.seconds))
        return loaded

    def take_failed_blocks(self) -> set[int]:
        """Return the blocks of this step whose restore has failed, once."""
        failed, self._step.failed_blocks = self._step.failed_blocks, set()
        return failed

    def _destination(self, held: Held, binding: RestoreBinding) -> npt.NDArray[np.int32]:
        begin, end = (at // self._block_tokens for at in (binding.begin_token, binding.end_token))
        return held.block_ids[begin:end]

    def _wait(self, each: _Restoring, layer_index: int) -> None:
        begin = time.monotonic()
        left = max(0.0, self._step.restore_deadline - begin)
        if not each.restore.wait_layer(layer_index, left):
            each.is_late = self._step.is_void = True
        self._step.waited_s += time.monotonic() - begin

    def _retire(self, loss: Loss) -> None:
        """Forget what another rank has lost, or this one itself: no hit could reach it."""
        try:
            root = self._engine.root(loss.root)
            self._engine.retire(loss.tokens, root=root, start_token=loss.start_token)
        except RangeError as error:
            logger.warning("range: retiring refused code=%s", error.code)
