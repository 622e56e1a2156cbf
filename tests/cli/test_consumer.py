"""The consumer of a benchmark: in which order it waits, and what of its time is exposed."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from rangectl.consumer import PLAIN, Consumer
from rangectl.measure import Sample, layers_ready


def sample(*layer_seconds: float) -> Sample:
    return Sample(layer_seconds[-1], 0.0, layer_seconds, None)


@pytest.mark.parametrize(
    ("layers", "compute", "exposed"),
    [
        ((5.0, 6.0, 7.0), 2.0, 5.0),  # reading hides behind computing: only the first layer shows
        ((5.0, 9.0, 13.0), 1.0, 11.0),  # computing hides behind reading
        ((5.0, 6.0, 11.0), 2.0, 7.0),  # the last layer is late
        ((0.0, 0.0, 0.0), 2.0, 0.0),  # resident
    ],
)
def test_exposed_time_is_what_a_resident_prefix_would_not_take(
    layers: tuple[float, ...], compute: float, exposed: float
) -> None:
    assert sample(*layers).exposed_seconds(compute) == pytest.approx(exposed)


def test_a_layer_is_ready_with_its_last_piece() -> None:
    pieces = [(range(0, 2), 5), (range(1, 3), 7), (range(0, 1), 6), (range(2, 3), 1)]
    assert layers_ready(3, pieces) == [6, 7, 7]


class Layers:
    """Stands for a restore: every layer is there once it has been waited for with time."""

    def __init__(self, *there: int) -> None:
        self.there = set(there)
        self.waited: list[tuple[int, int]] = []

    def wait(self, layer_index: int, deadline_s: float) -> bool:
        if deadline_s and layer_index not in self.there:
            self.there.add(layer_index)
            self.waited.append((layer_index, time.monotonic_ns()))
        return layer_index in self.there


def test_layers_are_waited_for_in_turn_and_computed_between() -> None:
    layers = Layers()
    ready_ns = Consumer(compute_seconds=0.001).consume(3, layers.wait)
    assert [layer for layer, _ in layers.waited] == [0, 1, 2]
    assert all(later - earlier >= 1_000_000 for earlier, later in pairwise(ready_ns))


def test_being_woken_late_is_not_waiting_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(seconds + 0.002))
    ready_ns = Consumer(compute_seconds=0.001).consume(4, Layers(1, 2, 3).wait)
    assert [later - earlier for earlier, later in pairwise(ready_ns)] == [1_000_000] * 3


def test_a_barrier_waits_for_the_last_layer_before_it_uses_the_first() -> None:
    layers = Layers()
    assert Consumer(whole_prefix=True).consume(3, layers.wait)[0] >= layers.waited[2][1]
    layers = Layers()
    assert PLAIN.consume(3, layers.wait)[0] <= layers.waited[1][1]
