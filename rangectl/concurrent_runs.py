"""The runs behind the concurrency figures: one engine, many requests, saves beside restores.

Owns the prefixes, the threads that ask for them and the order of the runs; verifies what comes.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
from rangekv.engine import Engine, RequestKey
from rangekv.engine.testing.payload import Payload
from rangekv.format.errors import TransferError

from rangectl.benchmark_plan import Setup
from rangectl.benchmark_result import ArmResult
from rangectl.concurrency import (
    ALONE,
    BESIDE,
    RESTORES,
    SAVES,
    ArmConcurrency,
    ConcurrencyResult,
)
from rangectl.consumer import DEADLINE_S, PLAIN
from rangectl.measure import Run, Sample, drop_residency
from rangectl.objects import Tokens
from rangectl.paged_kv import BlockIds
from rangectl.range_arm import RangeArm, since

_COUNTS = (
    "leases_taken",
    "layer_events",
    "scatters",
    "direct_spans",
    "saves_published",
)
"""What a run does whatever else runs; what it reads depends on what was read ahead in vain."""


class ConcurrentRuns:
    """Requests of equal size that fill half of the payload, saved once and restored often.

    Beside all restores at once, half as many requests are saved from blocks that nobody restores
    to; what they save is forgotten after the run.
    """

    def __init__(self, setup: Setup, arms: dict[str, RangeArm]) -> None:
        self._setup = setup
        self._arms = arms
        self._kv = next(iter(arms.values())).kv
        self._ids = np.random.default_rng(setup.seed)
        self._tokens = [self._prompt() for _ in range(setup.request_count)]
        self._payloads = [
            Payload(setup.model, 1 << 16 | ordinal) for ordinal in range(setup.request_count)
        ]

    def run(self) -> ConcurrencyResult:
        """Save the requests, then restore them in all ways, interleaved, `repeat` times."""
        self._save_requests()
        count = self._setup.request_count
        save_count = max(1, count // 2)
        results = {}
        cases = []
        for name, arm in self._arms.items():
            at_once = {number: ArmResult() for number in sorted(self._setup.concurrency)}
            alone = {RESTORES: at_once[count], SAVES: ArmResult()}
            beside = {RESTORES: ArmResult(), SAVES: ArmResult()}
            cases += [(arm, number, 0, {RESTORES: result}) for number, result in at_once.items()]
            cases.append((arm, 0, save_count, {SAVES: alone[SAVES]}))
            cases.append((arm, count, save_count, beside))
            together = {(kind, ALONE): result for kind, result in alone.items()}
            together.update(((kind, BESIDE), result) for kind, result in beside.items())
            results[name] = ArmConcurrency(at_once, together)
        order = random.Random(self._setup.seed)
        for _ in range(self._setup.repeat):
            order.shuffle(cases)
            for arm, restores, saves, kept in cases:
                samples, counts = self._measure(arm, restores, saves)
                for kind, result in kept.items():
                    result.add(samples[kind], counts)
        request_bytes = self._setup.payload_bytes // (2 * count)
        return ConcurrencyResult(count, save_count, request_bytes, results)

    def _measure(
        self, arm: RangeArm, at_once: int, saves: int
    ) -> tuple[dict[str, Sample], Counter[str]]:
        """Restore all requests, so many at once (0: none), and save others beside."""
        blocks = self._blocks()
        restored = self._setup.request_count if at_once else 0
        prompts = [self._prompt() for _ in range(saves)]
        self._kv.poison()
        # A save bank takes time to map: only for saves.
        config = arm.config if saves else replace(arm.config, save_banks=1)
        with arm.session(config) as engine, ThreadPoolExecutor(at_once + 1) as threads:
            drop_residency(str(arm.store / "range.pack"))
            before = Counter(engine.stats().counters)
            saving = threads.submit(_save, engine, prompts, blocks[len(blocks) - saves :])
            waiting = deque(range(restored))
            run = Run()
            asking = [
                threads.submit(self._restore_waiting, engine, waiting, blocks)
                for _ in range(at_once)
            ]
            for asker in asking:
                asker.result()
            samples = {RESTORES: run.done(), SAVES: saving.result()}
            counted = since(engine, before)
            for prompt in prompts:
                engine.retire(prompt)
        for ordinal in range(restored):
            wrong = self._kv.check(self._payloads[ordinal], blocks[ordinal], whole=False)
            if wrong is not None:
                raise TransferError("wrong-bytes", f"restored at once: wrong KV: {wrong.line()}")
        return samples, Counter({name: counted[name] for name in _COUNTS})

    def _restore_waiting(self, engine: Engine, waiting: deque[int], blocks: BlockIds) -> None:
        """Restore one request after another until none waits any more."""
        while True:
            try:
                ordinal = waiting.popleft()
            except IndexError:
                return
            self._restore(engine, ordinal, blocks[ordinal])

    def _restore(self, engine: Engine, ordinal: int, block_ids: BlockIds) -> None:
        tokens = self._tokens[ordinal]
        ticket = engine.lookup(RequestKey(f"restore-{ordinal}", "benchmark", 0), tokens)
        if ticket.token_count != len(tokens):
            raise TransferError("incomplete-restore", f"request {ordinal}: {ticket.reason}")
        restore = engine.claim(ticket, tokens, block_ids)
        PLAIN.consume(self._setup.model.layer_count, restore.wait_layer)
        restore.finish()
        if restore.failed_blocks():
            raise TransferError("incomplete-restore", f"request {ordinal}: blocks failed")

    def _save_requests(self) -> None:
        blocks = self._blocks()
        for ordinal, payload in enumerate(self._payloads):
            self._kv.write(payload, blocks[ordinal])
        arm = next(iter(self._arms.values()))
        with arm.session(arm.config) as engine:
            engine.reset()
            _save(engine, self._tokens, blocks[: len(self._tokens)])

    def _prompt(self) -> Tokens:
        """Return the tokens of a new request."""
        count = self._setup.request_blocks * self._setup.model.block_tokens
        return self._ids.integers(0, 2**17, count, dtype=np.uint32)

    def _blocks(self) -> BlockIds:
        """Return random blocks for twice as many requests: int64[2 x requests, blocks of one]."""
        ids = self._ids.permutation(self._setup.block_count)
        return ids.reshape(-1, self._setup.request_blocks)


def _save(engine: Engine, prompts: Sequence[Tokens], blocks: BlockIds) -> Sample:
    """Save prompts one after another until all are published; return what it cost."""
    run = Run()
    saves = []
    for ordinal, (tokens, ids) in enumerate(zip(prompts, blocks, strict=True)):
        save = engine.save(RequestKey(f"save-{ordinal}", "benchmark", 0), tokens)
        if save is None:
            raise TransferError("save-declined", f"the engine declined: {engine.stats().line()}")
        for layer_index in range(engine.geometry.layer_count):
            save.layer_ready(layer_index, (0, len(tokens)), ids)
        save.extracted(DEADLINE_S)
        save.finish()
        saves.append(save)
    if not all([save.wait(DEADLINE_S) for save in saves]):
        raise TransferError("save-failed", f"nothing published: {engine.stats().line()}")
    return run.done()
