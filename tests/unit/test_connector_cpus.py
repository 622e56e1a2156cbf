"""Which CPUs a rank's threads take: those that the model leaves free."""

from __future__ import annotations

import os
import threading

import pytest
from rangekv.engine.connector.cpus import spare_cpus

ALLOWED = frozenset(os.sched_getaffinity(0))
TWO = pytest.mark.skipif(len(ALLOWED) < 2, reason="one CPU")


def run_pinned(cpus, call):
    """Return what `call` returns while a thread is pinned to `cpus`."""
    pinned, done = threading.Event(), threading.Event()

    def stay():
        os.sched_setaffinity(0, cpus)
        pinned.set()
        done.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    assert pinned.wait(10)
    try:
        return call()
    finally:
        done.set()
        thread.join()


def test_all_are_spare_where_nobody_is_pinned():
    assert spare_cpus(ALLOWED) == ALLOWED


@TWO
def test_a_core_that_computes_is_left_alone():
    first, *others = sorted(ALLOWED)
    assert run_pinned({first}, lambda: spare_cpus(ALLOWED)) == frozenset(others)


@TWO
def test_where_every_core_computes_all_are_shared():
    first, *others = sorted(ALLOWED)

    def both():
        return run_pinned(set(others), lambda: spare_cpus(ALLOWED))

    assert run_pinned({first}, both) == ALLOWED
