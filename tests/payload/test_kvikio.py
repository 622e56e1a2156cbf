"""KvikIO's real host and bounce paths over a fake CUDA driver, and its hazards, one by one."""

from __future__ import annotations

import pytest

HAZARDS = [
    "host_memory",
    "many_places",
    "device_memory",
    "end_of_file",
    "errors",
    "read_only",
    "owned",
    "forked",
    "forked_before",
    "settings",
    "the_locked_file",
    "evidence",
    "probe_answer",
    "engine",
]


@pytest.mark.parametrize("name", HAZARDS)
def test_with_a_driver(scene, name: str) -> None:
    assert scene(name) == ""


def test_without_a_driver(scene) -> None:
    if scene("no_driver", driver=False):
        pytest.skip("this machine has a CUDA driver")
