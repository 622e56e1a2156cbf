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
    from rangekv.engine.devices.cuda import runtime
    from support.gpu_stand_in import StandIn

    found = StandIn()
    monkeypatch.setattr(runtime, "TorchRuntime", lambda: found)
    return found


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
    gpu: Any, rangectl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rangekv.engine.devices.cuda.device import CudaDevice

    scatter = CudaDevice.scatter
    monkeypatch.setattr(
        CudaDevice,
        "scatter",
        lambda self, lane, source, strips, ids: scatter(
            self, lane, source, strips, ids[::-1].copy()
        ),
    )
    played = rangectl("replay-fault", "clean-reopen", "--device", "cuda", "--dir", tmp_path)
    assert played.status == ExitCode.CHECK_FAILED
    assert "--seed 0 --device cuda" in played.out


def test_a_gpu_that_is_not_there_is_said_once(rangectl: Any, tmp_path: Path) -> None:
    refused = rangectl("replay-fault", "--device", "cuda", "--dir", tmp_path)
    assert refused.status == ExitCode.ENVIRONMENT
    assert "[no-gpu]" in refused.err or "[no-torch]" in refused.err
    assert "cases held" not in refused.out
