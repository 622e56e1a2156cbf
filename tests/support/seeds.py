"""Plays a range of simulation seeds, in a module that spawned processes can import."""

from __future__ import annotations

import logging
from collections import Counter

from rangekv.engine.testing.simulation import simulate

CHUNK = 50


def play(first: int) -> Counter[str]:
    """Return what happened over the CHUNK seeds from `first` on."""
    logging.getLogger("rangekv").setLevel(logging.CRITICAL + 1)
    total: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        total += simulate(seed)
    return total
