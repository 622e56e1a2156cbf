"""`serve-benchmark` against a server that behaves as told, and with RANGE_LONG against vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from rangekv.format.errors import EnvironmentFault
from support.kv_copies import Copy, plus, write_copies

from rangectl import serve_benchmark, serve_run, server
from rangectl.cli import run as run_command_line
from rangectl.serve_connectors import leave_page_cache, offers_example
from rangectl.serve_run import ServePlan
from rangectl.server import Answer, Server

PLAN = ServePlan(
    prefix_tokens=64, suffix_tokens=24, repeat=4, beside=2, seed=3, vocabulary=500, example=True
)
DIFFERENCE = 2.0**-9
"""Between restored and computed KV of an honest server, in units of its RMS."""

GAP_S = 1000.0
HINT = "; it needs a prompt in one step: -- --max-num-batched-tokens 88 or more"


class FakeServer:
    """Answers by the sum of the prompt and remembers prefixes, the store's across servers."""

    def __init__(self, launcher: Launcher, connector: str, part: str) -> None:
        self.launcher, self.connector, self.part = launcher, connector, part
        self.memory: set[tuple[Any, ...]] = set()
        self.is_stopped = False

    def spoils(self, what: str) -> bool:
        return self.part == "measure" and self.launcher.spoils == f"{self.connector} {what}"

    def ask(self, prompt: list[int], answer_tokens: int, **fields: Any) -> Answer:
        self.launcher.asked.append((self.connector, self.part, prompt))
        if self.spoils("server"):
            raise EnvironmentFault("server-failed", "the server did not answer: gone")
        store, salt = self.launcher.stores[self.connector], fields.get("cache_salt")
        prefix = (salt, *prompt[: PLAN.prefix_tokens])
        # ExampleConnector knows neither prefixes nor tenants.
        stored = prefix if self.connector == "range" else tuple(prompt)
        in_memory, in_store = prefix in self.memory, stored in store
        is_hit = (in_memory or in_store) and not self.spoils("hit")
        first_s = 0.1 if in_memory else 0.2 if in_store else 1.0
        first_s *= 2 if self.connector == "example" else 1
        if self.connector == "range":
            change = DIFFERENCE if salt is None else 0.0
            change = 0.5 if in_store and self.spoils("kv") else change
            self.launcher.copies.setdefault((salt, *prompt), Copy(salt, prompt, plus(change)))
        self.memory.add(prefix)
        store.add(stored)
        token = sum(prompt) + (self.spoils("answer") and in_store and not in_memory)
        seconds = [first_s + 0.01 * at for at in range(answer_tokens)]
        if answer_tokens == serve_run.DECODE_TOKENS:  # held up while the others are served
            seconds = [0.0] + [GAP_S + each for each in seconds[1:]]
        return Answer([token] * answer_tokens, seconds, PLAN.prefix_tokens if is_hit else 0)

    def stop(self) -> None:
        self.is_stopped = True


class Launcher:
    """Starts servers that spoil one thing: `range answer` is a wrong answer of Range's second."""

    def __init__(self, spoils: str | None = None) -> None:
        self.stores: dict[str, set[tuple[Any, ...]]] = {"range": set(), "example": set()}
        self.copies: dict[tuple[Any, ...], Copy] = {}
        self.spoils = spoils
        self.started: list[str] = []
        self.asked: list[tuple[str, str, list[int]]] = []

    @contextmanager
    def __call__(self, connector: str, part: str) -> Iterator[FakeServer]:
        if self.spoils == f"{connector} {part}":
            raise EnvironmentFault("server-failed", "vLLM did not start")
        self.started.append(f"{connector} {part}")
        server = FakeServer(self, connector, part)
        yield server
        assert server.is_stopped or self.spoils is not None

    @contextmanager
    def running(
        self, model: str, transfer: dict[str, Any], arguments: Any, log: Path, *, start_s: float
    ) -> Iterator[FakeServer]:
        """Take the place of the function that starts vLLM, and leave a store as it would."""
        connector, part = log.stem.split("-")
        settings = transfer["kv_connector_extra_config"]
        with self(connector, part) as server:
            if connector == "example":
                assert transfer["kv_connector"] == "ExampleConnector"
                Path(settings["shared_storage_path"], "layer.safetensors").write_bytes(b"KV")
            yield server
        if (connector, part) == ("range", "measure"):
            write_copies(Path(settings["store"]), self.measured_copies())

    def measured_copies(self) -> list[Copy]:
        """What the second server of Range has served from the store, and computed for a tenant."""
        salted = [copy for copy in self.copies.values() if str(copy.salt).startswith("fresh")]
        return [self.copies[(None, *copy.tokens)] for copy in salted] + salted


def test_no_two_servers_run_at_a_time_and_prompts_are_paired() -> None:
    launcher = Launcher()
    asked = []
    samples = serve_run.run(PLAN, launcher, asked.append)  # type: ignore[arg-type]
    assert launcher.started == ["range fill", "example fill", "range measure", "example measure"]
    assert len(asked) == 4 * (PLAN.repeat + PLAN.beside)
    assert samples.faults == []
    assert samples.absent == {}
    assert samples.seconds == {
        "recompute": [1.0] * PLAN.repeat,
        "range": [0.2] * PLAN.repeat,
        "prefix_cache": [0.1] * PLAN.repeat,
        "example": [0.4] * PLAN.repeat,
    }
    paired = [promise.tokens for promise in samples.promises]
    filled, measured = (
        [prompt for *where, prompt in launcher.asked if where == ["example", part]]
        for part in ("fill", "measure")
    )
    assert filled[: PLAN.repeat] == paired
    assert measured[serve_run.WARM_UPS :][: PLAN.repeat] == paired
    restored = [prompt for *where, prompt in launcher.asked if where == ["range", "measure"]]
    assert all(restored.count(prompt) == 2 for prompt in paired)
    assert [promise.promised_tokens for promise in samples.promises] == [64] * PLAN.repeat


def test_without_the_example_nothing_is_asked_of_it() -> None:
    launcher = Launcher()
    samples = serve_run.run(replace(PLAN, example=False), launcher, lambda done: None)  # type: ignore[arg-type]
    assert launcher.started == ["range fill", "range measure"]
    assert "example" not in samples.seconds


@pytest.mark.parametrize(
    ("spoils", "fault"),
    [("range answer", "restored answer differs"), ("range hit", "range hit 0 tokens")],
)
def test_what_is_wrong_is_a_fault_and_not_a_figure(spoils: str, fault: str) -> None:
    samples = serve_run.run(PLAN, Launcher(spoils), lambda done: None)  # type: ignore[arg-type]
    assert len([each for each in samples.faults if fault in each]) == PLAN.repeat


@pytest.mark.parametrize(
    ("spoils", "reason"),
    [
        ("example fill", "vLLM did not start"),
        ("example measure", f"vLLM did not start{HINT}"),
        ("example server", f"the server did not answer: gone{HINT}"),
        ("example hit", "prompt 0: it hit 0 tokens"),
        ("example answer", "prompt 0: its answer differs from a computed one"),
    ],
)
def test_example_that_does_not_work_is_left_out_and_no_fault(spoils: str, reason: str) -> None:
    samples = serve_run.run(PLAN, Launcher(spoils), lambda done: None)  # type: ignore[arg-type]
    assert samples.absent == {"example": reason}
    assert samples.faults == []
    assert set(samples.seconds) == {"recompute", "range", "prefix_cache"}


def test_gaps_are_those_that_overlap() -> None:
    answer = Answer([1] * 5, [1.0, 2.0, 4.0, 5.0, 9.0], 0)
    assert answer.gaps(2.5, 4.5) == [2.0, 1.0]
    assert answer.gaps(9.5, 11) == []


GOLDEN = """\
prompts      64 tokens of prefix, 24 of their own
samples      15 of each arm, taken in turn, seed 0; median (range)
             example: on the same prompts, by a server of its own afterwards

arm                     first token  cached tokens
recompute     1.000 s (1.000-1.000)            0-0
range         0.200 s (0.200-0.200)          64-64
prefix_cache  0.100 s (0.100-0.100)          64-64
example       0.400 s (0.400-0.400)          64-64

range ÷ prefix_cache  2.00 (2.00-2.00)  target ≤ 1.10: missed
range ÷ recompute  0.20 (0.20-0.20)
range ÷ example  0.50 (0.50-0.50)

a request that decodes: 10 ms between tokens
longest beside range: 1001010 ms
longest beside recompute: 1001010 ms
longest beside example: 1002010 ms

KV compared: 960 tokens x 2 layers, largest difference 0.002 of an element's RMS (allowed 0.01)
and computed on top of them: 240 tokens
"""


class Stream(BaseHTTPRequestHandler):
    """Answers any completion with one token and then the error of an engine that has died."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()
        for event in ({"choices": [{"token_ids": [1]}]}, {"error": {"message": "engine died"}}):
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def test_error_in_the_stream_is_told() -> None:
    with HTTPServer(("127.0.0.1", 0), Stream) as http:
        thread = Thread(target=http.handle_request)
        thread.start()
        server = Server(f"http://127.0.0.1:{http.server_port}", None)  # type: ignore[arg-type]
        with pytest.raises(EnvironmentFault, match="did not answer: engine died"):
            server.ask([1, 2], 4)
        thread.join()


LINE = ["serve-benchmark", "model", "--prefix", "64", "--suffix", "24", "--beside", "1"]


@pytest.fixture
def serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run the verb with servers that spoil one thing; return its status and what it printed."""

    def invoke(*arguments: str, spoils: str | None = None, offered: bool = True) -> tuple[int, str]:
        monkeypatch.setattr(serve_benchmark, "running", Launcher(spoils).running)
        monkeypatch.setattr(serve_benchmark, "offers_example", lambda: offered)
        status = run_command_line([*LINE, "--dir", str(tmp_path), *arguments])
        assert not list(tmp_path.iterdir())
        return status, capsys.readouterr().out

    return invoke


def test_verb_prints_all_of_it(serve: Callable[..., tuple[int, str]]) -> None:
    status, text = serve("--repeat", "15")
    assert (status, text) == (0, GOLDEN)


def test_verb_gives_all_of_it_as_json(serve: Callable[..., tuple[int, str]]) -> None:
    status, text = serve("--repeat", "3", "--json")
    result = json.loads(text)
    beside = result.pop("beside")
    assert min(beside["quiet_gap_seconds"]) == pytest.approx(0.01)
    assert set(beside["longest_gap_seconds"]) == {"recompute", "range", "example"}
    assert status == 0
    assert result == {
        "schema": "rangectl.serve-benchmark/1",
        "ok": True,
        "prefix_tokens": 64,
        "suffix_tokens": 24,
        "seed": 0,
        "arms": {
            "recompute": {"first_token_seconds": [1.0] * 3, "cached_tokens": [0] * 3},
            "range": {"first_token_seconds": [0.2] * 3, "cached_tokens": [64] * 3},
            "prefix_cache": {"first_token_seconds": [0.1] * 3, "cached_tokens": [64] * 3},
            "example": {"first_token_seconds": [0.4] * 3, "cached_tokens": [64] * 3},
        },
        "absent": {},
        "ratios": {
            "range ÷ prefix_cache": {"median": 2.0, "low": 2.0, "high": 2.0},
            "range ÷ recompute": {"median": 0.2, "low": 0.2, "high": 0.2},
            "range ÷ example": {"median": 0.5, "low": 0.5, "high": 0.5},
        },
        "kv": {
            "promised_tokens": 3 * 64,
            "behind_tokens": 3 * 16,
            "layers": 2,
            "largest_difference": DIFFERENCE,
            "tolerance": 0.01,
        },
        "faults": [],
    }


@pytest.mark.parametrize(
    ("spoils", "fault"),
    [
        ("range answer", "prompt 0: the restored answer differs from a computed one"),
        (
            "range kv",
            "prompt 0, rank 0: restored KV differs from computed KV, most in layer 1, by 0.5 of "
            "its RMS; 0.01 is allowed",
        ),
    ],
)
def test_wrong_answer_and_wrong_kv_are_faults(
    serve: Callable[..., tuple[int, str]], spoils: str, fault: str
) -> None:
    status, text = serve("--repeat", "2", spoils=spoils)
    assert status == 1
    assert f"FAULT {fault}\n" in text
    status, text = serve("--repeat", "2", "--json", spoils=spoils)
    assert status == 1
    result = json.loads(text)
    assert not result["ok"]
    assert fault in result["faults"]
    assert len(result["faults"]) == 2


@pytest.mark.parametrize(
    ("arguments", "offered", "absent"),
    [
        ((), False, {"example": "the installed vLLM does not have it"}),
        (("--no-example",), True, {}),
    ],
)
def test_without_the_example_the_others_are_measured(
    serve: Callable[..., tuple[int, str]],
    arguments: tuple[str, ...],
    offered: bool,
    absent: dict[str, str],
) -> None:
    status, text = serve("--repeat", "1", "--json", *arguments, offered=offered)
    result = json.loads(text)
    assert status == 0
    assert set(result["arms"]) == {"recompute", "range", "prefix_cache"}
    assert result["absent"] == absent
    status, text = serve("--repeat", "1", *arguments, offered=offered)
    assert ("example is left out: the installed vLLM does not have it\n" in text) == (not offered)


def test_files_are_on_the_disk_before_they_leave_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append(os.readlink(f"/proc/self/fd/{fd}")))
    monkeypatch.setattr(
        os,
        "posix_fadvise",
        lambda fd, *what: calls.append((os.readlink(f"/proc/self/fd/{fd}"), *what)),
    )
    path = tmp_path.resolve() / "prompt" / "layer.safetensors"
    path.parent.mkdir()
    path.write_bytes(b"KV")
    leave_page_cache(tmp_path)
    assert calls == [str(path), (str(path), 0, 0, os.POSIX_FADV_DONTNEED)]


def test_example_is_looked_for_without_importing_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "vllm"
    folder = package / "distributed" / "kv_transfer" / "kv_connector" / "v1"
    folder.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    assert not offers_example()
    (folder / "example_connector.py").touch()
    assert offers_example()


def test_model_without_a_vocabulary_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert run_command_line(["serve-benchmark", str(tmp_path), "--dir", str(tmp_path)]) == 2
    assert "vocab_size" in capsys.readouterr().err


@pytest.mark.skipif(not os.environ.get("RANGE_LONG"), reason="two servers; RANGE_LONG=1 runs it")
def test_real_servers_restore_what_was_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    from support.vllm_model import LAYERS, write_model
    from support.vllm_process import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    line = ["serve-benchmark", str(write_model(tmp_path / "model")), "--dir", str(tmp_path)]
    sizes = ["--capacity", "1GiB", "--prefix", "1024", "--repeat", "3", "--beside", "1", "--json"]
    vllm = ["--", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
    assert run_command_line([*line, *sizes, *vllm, "--block-size", "32"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert min(result["arms"]["range"]["cached_tokens"]) >= 1024
    assert max(result["arms"]["recompute"]["cached_tokens"]) == 0
    assert min(result["arms"]["example"]["cached_tokens"]) >= 1024
    assert result["absent"] == {}
    assert result["kv"]["promised_tokens"] == 3 * 1024
    assert result["kv"]["behind_tokens"] > 0
    assert result["kv"]["layers"] == LAYERS
    assert result["kv"]["largest_difference"] <= result["kv"]["tolerance"] / 10


@pytest.mark.parametrize(
    ("script", "start_s", "said"),
    [
        ("raise SystemExit(3)", 30, "ended with status 3 while it started; the end of its log: no"),
        ("import time; time.sleep(60)", 1, "did not answer within 1 s of its start"),
    ],
    ids=["died", "silent"],
)
def test_server_that_does_not_come_says_how_it_failed(tmp_path, script, start_s, said) -> None:
    log = tmp_path / "log"
    log.write_text("no\n  such model\n")
    with subprocess.Popen([sys.executable, "-c", script]) as process:
        try:
            with pytest.raises(EnvironmentFault, match=said):
                server._wait_until_ready("http://127.0.0.1:1", process, log, start_s)
        finally:
            process.kill()
