"""One vLLM server over HTTP: starts, answers completions of token ids, shows metrics, is ended."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.vllm_process import BLOCK_TOKENS, ENVIRONMENT

START_S = 240
END_S = 60
# The worker in the engine core's process, where nobody kills it alone: the start takes less.
# It needs IN_PROCESS as well: without it vLLM makes `mp` of it on a CPU.
UNI = ("--distributed-executor-backend", "uni")


class Server:
    """A running server; `log` is what its processes have printed so far."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
        self.process = process
        self._address = f"http://127.0.0.1:{port}"
        self._log_path = log_path

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def wait_until_ready(self) -> None:
        """Return once the server answers; there is no event to wait for, so it is asked again."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self._address}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError(f"the server did not start:\n{self.log[-3000:]}")

    def complete(self, prompt: list[int], *, max_tokens: int = 4, **fields: Any) -> dict[str, Any]:
        """Return the answer to a prompt of token ids."""
        with self._post(prompt, max_tokens, fields) as response:
            answer: dict[str, Any] = json.load(response)
        return answer

    def stream(self, prompt: list[int], *, max_tokens: int = 4) -> list[int]:
        """Return the token ids of an answer that is streamed."""
        tokens: list[int] = []
        with self._post(prompt, max_tokens, {"stream": True}) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    tokens += choice["token_ids"] or []
        return tokens

    def abandon(self, prompt: list[int], *, max_tokens: int) -> None:
        """Ask for a long answer and hang up at its first token: the server aborts the request."""
        with self._post(prompt, max_tokens, {"stream": True}) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    return

    def metrics(self) -> dict[tuple[str, str], float]:
        """Return Range's metrics by (name, rank, reason if any, joined by a blank)."""
        with urllib.request.urlopen(f"{self._address}/metrics", timeout=30) as response:
            text = response.read().decode()
        found = {}
        for name, labels, value in re.findall(r"^vllm:range_(\w+)\{(.*)\} (\S+)$", text, re.M):
            values = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            found[name, " ".join(values[key] for key in ("rank", "reason") if key in values)] = (
                float(value)
            )
        return found

    def reset(self) -> None:
        """Empty vLLM's prefix cache and the connector's; needs VLLM_SERVER_DEV_MODE=1."""
        address = f"{self._address}/reset_prefix_cache?reset_external=true"
        request = urllib.request.Request(address, method="POST")
        with urllib.request.urlopen(request, timeout=120) as response:
            assert json.load(response)["success"]

    def terminate(self) -> int:
        """End the server as an operator does and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_S)

    def _post(self, prompt: list[int], max_tokens: int, fields: dict[str, Any]) -> Any:
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
        } | fields
        request = urllib.request.Request(
            f"{self._address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=120)


@contextmanager
def serving(
    folder: Path, model: Path, transfer: dict[str, Any] | None, *arguments: str, **environment: str
) -> Iterator[Server]:
    """Run a server with this kv-transfer-config; whatever is left of it is killed at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--skip-tokenizer-init", "--enforce-eager", "--block-size", str(BLOCK_TOKENS)),
        *("--max-model-len", "4096", "--dtype", "float32", "--enable-prompt-tokens-details"),
        *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()),
        *arguments,
    ]
    log_path = folder / "log.txt"
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            command,
            env=os.environ | ENVIRONMENT | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            server = Server(process, port, log_path)
            server.wait_until_ready()
            yield server
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
