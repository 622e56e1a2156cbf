"""One vLLM server for a measurement: started, asked over HTTP, timed, ended as an operator does.

Knows vLLM's command line and HTTP only, imports none of it; never decides what is asked.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rangekv.format.errors import EnvironmentFault

SHUTDOWN_S = 60
ANSWER_S = 600
_LOG_LINES = 12  # of a server that does not start


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed completion: when each token came, in seconds since it was asked for."""

    tokens: list[int]
    seconds: list[float]
    cached_tokens: int

    @property
    def first_token_s(self) -> float:
        return self.seconds[0]

    def gaps(self, begin: float, end: float) -> list[float]:
        """Return the times between tokens that overlap [begin, end] of this answer's own clock."""
        pairs = zip(self.seconds, self.seconds[1:], strict=False)
        return [after - before for before, after in pairs if after > begin and before < end]


class Server:
    """A server that answers; every request is greedy and by token ids."""

    def __init__(self, address: str, process: subprocess.Popen[bytes]) -> None:
        self._address = address
        self._process = process

    def ask(self, prompt: Sequence[int], answer_tokens: int, **fields: Any) -> Answer:
        """Return the answer to one prompt, of exactly `answer_tokens` tokens."""
        body = {
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "detokenize": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | fields
        request = urllib.request.Request(
            f"{self._address}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        tokens: list[int] = []
        seconds: list[float] = []
        cached_tokens = 0
        begin = time.perf_counter()
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                for line in response:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(event["error"].get("message") or event["error"])
                    for choice in event["choices"]:
                        new = choice["token_ids"] or []
                        tokens += new
                        seconds += [time.perf_counter() - begin] * len(new)
                    if event.get("usage"):
                        details = event["usage"].get("prompt_tokens_details") or {}
                        cached_tokens = int(details.get("cached_tokens") or 0)
        except (OSError, KeyError, ValueError) as error:
            raise EnvironmentFault(
                "server-failed", f"the server did not answer: {error}; see its log"
            ) from error
        return Answer(tokens, seconds, cached_tokens)

    def stop(self) -> None:
        """End the server by SIGTERM, so that its stores are closed; raises EnvironmentFault."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(2 * SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            raise EnvironmentFault(
                "server-failed", f"the server did not end within {2 * SHUTDOWN_S} s of SIGTERM"
            ) from None


@contextmanager
def running(
    model: str, transfer: dict[str, Any], arguments: Sequence[str], log: Path, *, start_s: float
) -> Iterator[Server]:
    """Run a server with this kv-transfer-config; whatever is left of it at the end is killed.

    Raises EnvironmentFault with the end of its log when it does not start.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--host", "127.0.0.1", "--port", str(port)),
        *("--enable-prompt-tokens-details", "--shutdown-timeout", str(SHUTDOWN_S)),
        *("--kv-transfer-config", json.dumps(transfer)),
        *arguments,
    ]
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_ready(address, process, log, start_s)
        yield Server(address, process)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_ready(
    address: str, process: subprocess.Popen[bytes], log: Path, start_s: float
) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)  # there is no event to wait for
    status = process.poll()
    what = (
        f"vLLM did not answer within {start_s:.0f} s of its start"
        if status is None
        else f"vLLM ended with status {status} while it started"
    )
    last = log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    raise EnvironmentFault(
        "server-failed", f"{what}; the end of its log: {' | '.join(line.strip() for line in last)}"
    )
