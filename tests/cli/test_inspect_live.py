"""`inspect PATH live`: the engine that holds a store is asked, and nothing else."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine.connector.endpoint import private_folder, socket_path
from rangekv.engine.connector.lookup_server import LookupServer
from support.stores import make_store

from rangectl.cli import run

CPUS = frozenset(os.sched_getaffinity(0))
STATS = {
    "lookups": 12_345,
    "checksum_failures": 0,
    "records": 7,
    "tokens": 2080,
    "used_bytes": 16 << 20,
    "capacity_bytes": 2 << 30,
    "state": "warm",
    "reason": None,
}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "store")


@pytest.fixture
def engine(store: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Two ranks that answer, the second one for `store`; yields what they were asked."""
    asked: list[str] = []

    def answer(path: str) -> Any:
        def tell(kind: str, arguments: list[Any]) -> list[Any]:
            asked.append(kind)
            return [path, STATS]

        return tell

    with tempfile.TemporaryDirectory() as folder:  # short: a socket's name has 107 bytes
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        paths = [socket_path(private_folder(), "engine", rank) for rank in range(2)]
        servers = [
            LookupServer(path, answer(held), CPUS)
            for path, held in zip(paths, ["/elsewhere", str(store)], strict=True)
        ]
        yield asked
        for server in servers:
            server.close()


def test_engine_of_the_store_tells_its_counters(
    engine: list[str], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(store), "live"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["state", "live,", "opened", "warm"]
    assert any("16.00 MiB of 2.00 GiB" in line for line in lines)
    assert any(line.split() == ["lookups", "12,345"] for line in lines)
    assert not any("checksum_failures" in line for line in lines)
    assert set(engine) == {"stats"}


def test_json_has_all_of_them(
    engine: list[str], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(store), "live", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["live"] == STATS


def test_store_that_nobody_serves_is_said_to_be_so(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        assert run(["inspect", str(store), "live"]) == 3
    assert "no-live-engine" in capsys.readouterr().err
