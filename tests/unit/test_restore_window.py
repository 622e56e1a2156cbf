"""How many reads of one restore share the disk: an early first layer, and a disk kept busy."""

from __future__ import annotations

from types import SimpleNamespace

from rangekv.engine.devices.cpu import HostLane
from rangekv.engine.transfer.restore import IN_FLIGHT_BYTES_MAX, Restore

MIB = 1 << 20


def restore_of(length: int, *, layers: int = 16, spans_a_layer: int = 1) -> Restore:
    spans = [
        SimpleNamespace(layer_first=layer, length=length, segments=())
        for layer in range(layers)
        for _ in range(spans_a_layer)
    ]
    return Restore(None, spans, SimpleNamespace(layer_count=layers), None, HostLane())


def begun(restore: Restore) -> list:
    """Begin all reads that may begin now."""
    spans = []
    while restore.may_read:
        spans.append(restore.begin_read())
    return spans


def test_the_first_layer_has_the_disk_for_itself():
    assert [span.layer_first for span in begun(restore_of(MIB, spans_a_layer=3))] == [0, 0, 0]


def test_each_read_that_returns_lets_two_more_begin():
    restore = restore_of(MIB)
    flying = begun(restore)
    counts = [len(flying)]
    while flying:
        restore.note_returned(flying.pop(0))
        flying += begun(restore)
        counts.append(len(flying))
    assert counts[:6] == [1, 2, 3, 4, 5, 6]
    assert not restore.pending
    assert counts[-1] == 0


def test_no_more_bytes_are_under_way_than_keep_a_disk_busy():
    restore = restore_of(IN_FLIGHT_BYTES_MAX // 2)
    flying = begun(restore)
    counts = [len(flying)]
    while flying:
        restore.note_returned(flying.pop(0))
        flying += begun(restore)
        counts.append(len(flying))
    assert max(counts) == 2
    assert not restore.pending


def test_a_read_that_is_larger_than_that_goes_alone():
    restore = restore_of(IN_FLIGHT_BYTES_MAX + 4096, layers=2, spans_a_layer=2)
    for _ in range(4):
        (span,) = begun(restore)
        restore.note_returned(span)
    assert not restore.pending
