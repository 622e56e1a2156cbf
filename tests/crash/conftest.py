"""The explorations that several tests look at. RANGE_LONG=1 takes one more crash and more cuts."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import pytest
from rangekv.engine.testing.crash.findings import Findings
from rangekv.engine.testing.crash.guards import Guard
from support.explorations import DEPTH, SCENARIO_OF, WITHOUT_MARKER, explore

Explored = Callable[..., Findings]


@pytest.fixture(scope="session")
def depth() -> int:
    """Crashes in a row."""
    return DEPTH


@pytest.fixture(scope="session")
def explored() -> Iterator[Explored]:
    """Explore a scenario once a session, without some checks or with payload verified.

    Who asks for one scenario will ask for others of its kind: every core works on them meanwhile.
    """
    running: dict[tuple[str, frozenset[Guard], bool], Future[Findings]] = {}
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(os.cpu_count(), mp_context=context)

    def ask(name: str, *without: Guard, verified: bool = False) -> Findings:
        kind = SCENARIO_OF[name].recovers
        others = [other for other, each in SCENARIO_OF.items() if each.recovers == kind]
        for one in (name, *(WITHOUT_MARKER if kind and without else others)):
            key = (one, frozenset(without), verified)
            if key not in running:
                running[key] = pool.submit(explore, *key)
        return running[name, frozenset(without), verified].result()

    yield ask
    pool.shutdown(cancel_futures=True)
