"""The consumer of a restore: how it asks, how it waits for layers, how long it computes on each.

Owns the habits that the benchmark varies one at a time; never moves or checks a byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

DEADLINE_S = 600.0
"""How long a layer is waited for; what has not come by then fails the run."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """What a consumer does beside waiting for each layer in turn; the default is nothing.

    It computes by sleeping: a model computes on an accelerator, and on a machine with few cores a
    busy loop would measure the loss of a core, not the wait for data.
    """

    compute_seconds: float = 0.0
    """On each layer, once it is ready and the layer before it is computed."""
    whole_prefix: bool = False
    """Waits for the last layer before it uses the first."""
    name_objects: bool = False
    """Hashes the prefix of every object and looks each of them up."""
    read_bytes_max: int | None = None
    """No native read moves more."""
    claim_delay_seconds: float = 0.0
    """From the lookup to the claim: what scheduling takes."""
    lookup_late: bool = False
    """Looks up behind that delay, so that nothing is read ahead in it."""

    def consume(self, layer_count: int, wait: Callable[[int, float], object]) -> list[int]:
        """Wait for layers and compute on them; return the monotonic ns at which each was had.

        `wait` takes a layer and a deadline in seconds; it is false while the layer is not there. A
        consumer that the kernel wakes late has not waited for data: what is there by then counts
        as had when it should have woken.
        """
        if self.whole_prefix:
            for layer_index in range(layer_count):
                wait(layer_index, DEADLINE_S)
        ready_ns = []
        computed_ns = time.monotonic_ns()
        for layer_index in range(layer_count):
            if self.compute_seconds and wait(layer_index, 0.0):
                had_ns = computed_ns
            else:
                wait(layer_index, DEADLINE_S)
                had_ns = time.monotonic_ns()
            ready_ns.append(had_ns)
            computed_ns = max(had_ns, computed_ns) + round(self.compute_seconds * 1e9)
            if self.compute_seconds:
                time.sleep(max(0, computed_ns - time.monotonic_ns()) / 1e9)
        return ready_ns


PLAIN = Consumer()
"""Waits for each layer in turn, and that is all."""
