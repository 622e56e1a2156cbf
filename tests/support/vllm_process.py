"""Runs one scenario in a fresh vLLM process and gathers what came out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

SERVE = Path(__file__).with_name("vllm_serve.py")
TIMEOUT_S = 480  # a loaded machine takes minutes to start an engine
LOGPROB_TOLERANCE = 1e-3  # sums of another order differ in the 6th digit; wrong KV in the first
BLOCK_TOKENS = 32

# One thread count in all arms (a connector alone would change it, and with it the sums).
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # A disk that others keep busy must not turn a clean end into a kill.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "60",
}


# The engine core and its worker in the process of the test's script: the start takes half as long.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Output:
    """What one request got."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    finish: str
    prompt_logprobs: list[float] = field(default_factory=list)


def assert_same(output: Output, plain: Output) -> None:
    """Two runs gave a request the same: tokens, logprobs, reason to end."""
    assert output.finish == plain.finish
    assert output.tokens == plain.tokens
    assert output.logprobs == pytest.approx(plain.logprobs, abs=LOGPROB_TOLERANCE)
    assert output.prompt_logprobs == pytest.approx(plain.prompt_logprobs, abs=LOGPROB_TOLERANCE)


def rangectl(*arguments: str) -> str:
    """Run the command line of the environment that runs the tests; return what it printed."""
    command = [str(Path(sys.executable).parent / "rangectl"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True)
class Run:
    """Outputs by batch, and what the processes logged."""

    batches: list[list[Output]]
    log: str
    returncode: int

    @property
    def opened(self) -> dict[str, str]:
        """The fields of Range's start-up line."""
        return (_fields(self.log, "range: open ") or [{}])[-1]

    @property
    def counters(self) -> dict[str, str]:
        """The counters that Range logs when it closes."""
        return (self.counters_of_ranks or [{}])[-1]

    @property
    def counters_of_scheduler(self) -> dict[str, str]:
        """The counters that the scheduler side logs when it closes."""
        return (_fields(self.log, "range: scheduler ") or [{}])[-1]

    @property
    def counters_of_ranks(self) -> list[dict[str, str]]:
        """The counters of each rank, in no order."""
        return _fields(self.log, "range: lookups=", "lookups=")


def _fields(log: str, marker: str, keep: str = "") -> list[dict[str, str]]:
    lines = [line for line in log.splitlines() if marker in line]
    return [dict(re.findall(r"(\S+?)=(\S*)", keep + line.split(marker, 1)[1])) for line in lines]


def run_vllm(
    folder: Path,
    model: Path,
    steps: list[dict[str, Any]],
    *,
    connector: dict[str, Any] | None = None,
    transfer: dict[str, Any] | None = None,
    killed_by: list[int] | None = None,
    environment: dict[str, str] | None = None,
    **llm: Any,
) -> Run:
    """Serve `steps` in a new process; it dies by SIGKILL while it decodes prompt `killed_by`."""
    folder.mkdir(parents=True, exist_ok=True)
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": BLOCK_TOKENS,
        "max_model_len": 4096,
        "max_num_batched_tokens": 4096,
        "dtype": "float32",
    } | llm
    if connector is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "RangeConnector",
            "kv_connector_module_path": "rangekv.engine.vllm_connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": connector,
        } | (transfer or {})
    result = folder / "result.json"
    scenario = folder / "scenario.json"
    scenario.write_text(
        json.dumps(
            {"llm": arguments, "steps": steps, "result": str(result), "killed_by": killed_by}
        )
    )
    log_path = folder / "log.txt"
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            [sys.executable, str(SERVE), str(scenario)],
            env=os.environ | ENVIRONMENT | (environment or {}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    batches = json.loads(result.read_text()) if result.exists() else []
    return Run(
        [[Output(**each) for each in batch] for batch in batches],
        log_path.read_text(),
        returncode,
    )
