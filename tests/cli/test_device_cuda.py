"""`--device cuda`, over what stands in for a GPU, and what is said where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rangekv.format.errors import ExitCode
from support.required import required

OWNERS = ("read-bank", "save-bank", "ticket")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for the one GPU of this machine."""
    if not required("torch"):
        pytest.importorskip("torch")
    from support.gpu_stand_in import stand_in

    return stand_in(monkeypatch)


@pytest.mark.parametrize("owner", OWNERS)
def test_every_cell_holds_on_the_cuda_device(
    gpu: Any, rangectl: Any, tmp_path: Path, owner: str
) -> None:
    played = rangectl(
        "replay-fault", "run", "--owner", owner, "--device", "cuda", "--dir", tmp_path, "--json"
    )
    lines = [json.loads(line) for line in played.out.splitlines()]
    assert [line["violation"] for line in lines[:-1] if line["verdict"] == "violated"] == []
    assert played.status == ExitCode.OK
    assert lines[-1]["held"] > 15
    assert lines[-1]["device"] == "cuda"
    assert any(copies.launches for copies in gpu.copied), "no cell copied on the device"


def test_a_broken_rule_says_how_to_repeat_it_on_the_device(
    gpu: Any, rangectl: Any, tmp_path: Path, scatter_backwards: Any
) -> None:
    from rangekv.engine.devices.cuda.device import CudaDevice

    scatter_backwards(CudaDevice)
    played = rangectl("replay-fault", "clean-reopen", "--device", "cuda", "--dir", tmp_path)
    assert played.status == ExitCode.CHECK_FAILED
    assert "--seed 0 --device cuda" in played.out


def test_a_gpu_that_is_not_there_is_said_once(rangectl: Any, tmp_path: Path) -> None:
    refused = rangectl("replay-fault", "--device", "cuda", "--dir", tmp_path)
    assert refused.status == ExitCode.ENVIRONMENT
    assert "[no-gpu]" in refused.err or "[no-torch]" in refused.err
    assert "cases held" not in refused.out


def test_the_benchmark_restores_to_the_device_and_says_which_way(
    gpu: Any, rangectl: Any, tmp_path: Path
) -> None:
    shape = ("--payload", "64MiB", "--repeat", 1, "--layers", 4)
    measured = rangectl(
        *("restore-benchmark", "--dir", tmp_path, "--device", "cuda", "--payload-path", "posix"),
        *(*shape, "--ablate", "whole-prefix-barrier", "--concurrent", "1,2", "--json"),
    )
    assert measured.status == ExitCode.OK, measured.err
    found = measured.json
    assert found["memory"] == "cuda"
    for point in found["points"]:
        assert point["arms"]["range"]["paths"] == ["posix-direct"]
        assert set(point["arms"]) == {"ceiling", "range", "control"}
    launched = {kind for copies in gpu.copied for kind, _, _ in copies.launches}
    assert launched == {"gather", "scatter"}


def test_gds_is_what_a_gpu_is_asked_for(gpu: Any, rangectl: Any, tmp_path: Path) -> None:
    gpu.in_host_memory = False
    refused = rangectl("restore-benchmark", "--dir", tmp_path, "--device", "cuda")
    assert refused.status == ExitCode.ENVIRONMENT
    assert "payload 'gds' is refused" in refused.err
    assert "[payload-refused]" in refused.err
    assert list(tmp_path.iterdir()) == []


def test_copies_are_compared_with_a_plain_copy(gpu: Any) -> None:
    from rangekv.engine.testing.gpu_copies import measure

    rates = measure(64 << 10, gpu, repeat=1)
    assert set(rates) == {"copy", "scatter", "gather", "hash"}
    assert all(rate > 0 for rate in rates.values())
