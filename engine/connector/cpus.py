"""Owns which CPUs the threads of one rank may use beside a model that computes on CPUs itself.

It reads masks of threads and sets none.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress

logger = logging.getLogger("vllm.rangekv")


def allowed_cpus() -> frozenset[int]:
    """Return the CPUs that this process was given before vLLM pinned its main thread.

    Threads inherit the pin; the parent (vLLM's engine core) keeps the mask that the user chose.
    """
    allowed = os.sched_getaffinity(0)
    try:
        allowed |= os.sched_getaffinity(os.getppid())
    except ProcessLookupError:
        logger.debug("range: the parent is gone, its CPUs are not known")
    return frozenset(allowed)


def spare_cpus(allowed: frozenset[int]) -> frozenset[int]:
    """Return those of `allowed` to which no thread of this process is pinned, or all if none is.

    On a CPU vLLM pins each thread that computes to a core of its own and keeps some cores free
    (VLLM_CPU_NUM_OF_RESERVED_CPU). A checksum on a core that computes would hold up all of them.
    """
    pinned: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):
            mask = os.sched_getaffinity(int(thread))
            if mask < allowed:
                pinned |= mask
    return allowed - pinned or allowed
