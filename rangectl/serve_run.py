"""The run of `serve-benchmark`: what is asked of which server, in which order, and what came.

Owns prompts, arms and samples; never starts a process itself and never prints.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from rangekv.format.errors import EnvironmentFault

from rangectl.server import Answer, Server

RANGE = "range"
EXAMPLE = "example"
ARMS = ("recompute", RANGE, "prefix_cache", EXAMPLE)
ANSWER_TOKENS = 4
WARM_UPS = 2
DECODE_TOKENS = 400  # of the request that decodes beside others
FIRST_TOKEN_ID = 10  # below lie the special tokens of most vocabularies

Launch = Callable[[str, str], AbstractContextManager[Server]]
"""Starts a server for (`range` or `example`, `fill` or `measure`)."""

Tokens = list[int]


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What is asked. Lengths in tokens; `vocabulary` is what prompts are drawn from."""

    prefix_tokens: int
    suffix_tokens: int
    repeat: int
    beside: int
    seed: int
    vocabulary: int
    example: bool
    """Whether vLLM's ExampleConnector is measured too, by two servers of its own."""


@dataclass(frozen=True, slots=True)
class Promise:
    """A prompt that was restored up to `promised_tokens` and computed anew for tenant `salt`."""

    number: int
    tokens: Tokens
    promised_tokens: int
    salt: str


@dataclass(slots=True)
class Samples:
    """What came: seconds to the first token by arm, one a pair, and what was wrong."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    cached: dict[str, list[int]] = field(default_factory=dict)
    quiet_gap_s: list[float] = field(default_factory=list)
    longest_gap_s: dict[str, list[float]] = field(default_factory=dict)
    """By arm: the longest time between two tokens of a request that decodes beside it."""
    promises: list[Promise] = field(default_factory=list)
    computed: dict[int, Tokens] = field(default_factory=dict)
    """By prompt: the answer that was computed without any cache."""
    absent: dict[str, str] = field(default_factory=dict)
    """Arms that have no figures, and why; not a fault of Range."""
    faults: list[str] = field(default_factory=list)

    def add(self, arm: str, answer: Answer) -> None:
        self.seconds.setdefault(arm, []).append(answer.first_token_s)
        self.cached.setdefault(arm, []).append(answer.cached_tokens)

    def leave_out(self, arm: str, reason: str) -> None:
        """Forget what came of an arm whose figures would be worth nothing."""
        self.absent[arm] = reason
        for by_arm in (self.seconds, self.cached, self.longest_gap_s):
            by_arm.pop(arm, None)


class Prompts:
    """Prefixes, each with the suffixes that arms ask behind it; all follow from the seed."""

    def __init__(self, plan: ServePlan) -> None:
        self._plan = plan
        self._chance = random.Random(plan.seed)
        count = plan.repeat + plan.beside
        self.prefixes = [self.draw(plan.prefix_tokens) for _ in range(count)]
        self.restored = [self.extend(prefix) for prefix in self.prefixes]
        """What Range restores and ExampleConnector loads: it knows whole prompts only."""

    def draw(self, count: int) -> Tokens:
        chance, plan = self._chance, self._plan
        return [chance.randrange(FIRST_TOKEN_ID, plan.vocabulary) for _ in range(count)]

    def extend(self, prefix: Tokens) -> Tokens:
        """Return the prefix with a suffix that nobody has seen."""
        return prefix + self.draw(self._plan.suffix_tokens)

    def place(self, count: int) -> int:
        """Return one of `count` places, by chance."""
        return self._chance.randrange(count)


def run(plan: ServePlan, launch: Launch, advance: Callable[[int], None]) -> Samples:
    """Fill stores, restart the servers, ask all arms; `advance` is told of each request.

    Each prefix is computed and saved by a first server. A second one restores it, then finds it in
    its own memory, and computes the same prompt anew for a tenant that has nothing. One server of
    ExampleConnector is filled before that second one starts, another is asked after it has ended:
    no two servers ever run at a time, and its arm asks the prompts of the others in their order.
    """
    prompts = Prompts(plan)
    samples = Samples()
    with launch(RANGE, "fill") as server:
        for prefix in prompts.prefixes:
            server.ask(prompts.extend(prefix), 1)
            advance(1)
        server.stop()
    if plan.example:
        _try_example(samples, "", lambda: _fill_example(launch, prompts, advance))
    with launch(RANGE, "measure") as server:
        _warm_up(plan, server, prompts)
        for number in range(plan.repeat):
            _ask_in_turn(plan, server, samples, number, prompts)
            advance(1)
        for number in range(plan.repeat, plan.repeat + plan.beside):
            salted = {"cache_salt": f"beside-{number}"}
            arms: list[tuple[str, dict[str, Any]]] = [(RANGE, {}), ("recompute", salted)]
            samples.quiet_gap_s += _ask_beside(server, samples, number, prompts, arms)
            advance(1)
        server.stop()
    if plan.example and EXAMPLE not in samples.absent:
        # It takes the blocks of a prompt's first step for all of them.
        length = plan.prefix_tokens + plan.suffix_tokens
        hint = f"; it needs a prompt in one step: -- --max-num-batched-tokens {length} or more"
        _try_example(
            samples, hint, lambda: _measure_example(plan, launch, samples, prompts, advance)
        )
    return samples


def _warm_up(plan: ServePlan, server: Server, prompts: Prompts) -> None:
    for _ in range(WARM_UPS):
        server.ask(prompts.draw(plan.prefix_tokens), ANSWER_TOKENS)


def _ask_in_turn(
    plan: ServePlan, server: Server, samples: Samples, number: int, prompts: Prompts
) -> None:
    """Take one pair of each arm; a restore comes before the hit in memory that it leaves."""
    restored, salt = prompts.restored[number], f"fresh-{number}"
    asked: list[tuple[str, Tokens, dict[str, Any]]] = [
        (RANGE, restored, {}),
        ("prefix_cache", prompts.extend(prompts.prefixes[number]), {}),
    ]
    asked.insert(prompts.place(3), ("recompute", restored, {"cache_salt": salt}))
    answers: dict[str, Answer] = {}
    for arm, prompt, fields in asked:
        answers[arm] = answer = server.ask(prompt, ANSWER_TOKENS, **fields)
        samples.add(arm, answer)
    samples.computed[number] = answers["recompute"].tokens
    if answers["recompute"].cached_tokens:
        samples.faults.append(f"prompt {number}: a tenant with nothing was served from a cache")
    for arm in (RANGE, "prefix_cache"):
        if not _is_hit(plan, answers[arm]):
            samples.faults.append(f"prompt {number}: {arm} hit {answers[arm].cached_tokens} tokens")
    if answers[RANGE].tokens != answers["recompute"].tokens:
        samples.faults.append(f"prompt {number}: the restored answer differs from a computed one")
    samples.promises.append(Promise(number, restored, answers[RANGE].cached_tokens, salt))


def _is_hit(plan: ServePlan, answer: Answer) -> bool:
    # Where a prefix ends within a block, vLLM computes that block anew, however long it is.
    return answer.cached_tokens >= plan.prefix_tokens // 2


def _ask_beside(
    server: Server,
    samples: Samples,
    number: int,
    prompts: Prompts,
    arms: list[tuple[str, dict[str, Any]]],
) -> list[float]:
    """Let one request decode beside each arm and see how long it was held up.

    Returns the times between its tokens once nobody else was served.
    """
    spans = {}
    begun = perf_counter()
    with ThreadPoolExecutor(1, "decode") as thread:
        decoding = thread.submit(server.ask, prompts.draw(64), DECODE_TOKENS)
        server.ask(prompts.draw(64), ANSWER_TOKENS)  # by now the other one decodes
        for arm, fields in arms:
            begin = perf_counter() - begun
            server.ask(prompts.restored[number], 1, **fields)
            spans[arm] = (begin, perf_counter() - begun)
        answer = decoding.result()
    for arm, span in spans.items():
        if gaps := answer.gaps(*span):  # else it had ended before
            samples.longest_gap_s.setdefault(arm, []).append(max(gaps))
    return answer.gaps(spans[arms[-1][0]][1], float("inf"))


def _try_example(samples: Samples, hint: str, part: Callable[[], None]) -> None:
    """Do a part of the arm of ExampleConnector, which says nothing about Range when it fails."""
    try:
        part()
    except EnvironmentFault as error:
        samples.leave_out(EXAMPLE, error.message + hint)


def _fill_example(launch: Launch, prompts: Prompts, advance: Callable[[int], None]) -> None:
    """Let the very prompts that are asked later be computed and saved."""
    with launch(EXAMPLE, "fill") as server:
        for prompt in prompts.restored:
            server.ask(prompt, 1)
            advance(1)
        server.stop()


def _measure_example(
    plan: ServePlan,
    launch: Launch,
    samples: Samples,
    prompts: Prompts,
    advance: Callable[[int], None],
) -> None:
    with launch(EXAMPLE, "measure") as server:
        _warm_up(plan, server, prompts)
        for number in range(plan.repeat):
            answer = server.ask(prompts.restored[number], ANSWER_TOKENS)
            samples.add(EXAMPLE, answer)
            if not _is_hit(plan, answer):
                reason = f"prompt {number}: it hit {answer.cached_tokens} tokens"
                return samples.leave_out(EXAMPLE, reason)
            if answer.tokens != samples.computed[number]:
                reason = f"prompt {number}: its answer differs from a computed one"
                return samples.leave_out(EXAMPLE, reason)
            advance(1)
        for number in range(plan.repeat, plan.repeat + plan.beside):
            _ask_beside(server, samples, number, prompts, [(EXAMPLE, {})])
            advance(1)
        server.stop()
