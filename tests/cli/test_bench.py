"""`bench` gives one read and one write figure, and leaves nothing in the directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("--size", "64MiB", "--repeat", 1, "--threads", 2, "--allow-buffered")


def test_one_read_and_one_write_figure(rangectl, tmp_path: Path) -> None:
    done = rangectl("bench", "--dir", tmp_path, *SMALL)
    assert (done.status, done.err) == (0, "")
    for name in ("write", "read"):
        assert sum(line.startswith(f"{name} ") for line in done.out.splitlines()) == 1
    assert os.listdir(tmp_path) == []


def test_json_holds_all_samples(rangectl, tmp_path: Path) -> None:
    fields = rangectl("bench", "--dir", tmp_path, *SMALL, "--json").json
    assert (fields["schema"], fields["ok"]) == ("rangectl.bench/1", True)
    assert (fields["size_bytes"], fields["span_bytes"]) == (64 << 20, 32 << 20)
    for name in ("write", "read"):
        assert len(fields[name]["seconds"]) == 1
        assert fields[name]["bytes_per_second"] > 0


def test_a_size_of_no_whole_spans_is_refused(rangectl, tmp_path: Path) -> None:
    refused = rangectl("bench", "--dir", tmp_path, "--size", "100MiB")
    assert refused.status == 2
    assert "96MiB would be" in refused.err


def test_a_sweep_measures_every_combination(rangectl, tmp_path: Path) -> None:
    done = rangectl(
        *("bench", "--dir", tmp_path, *SMALL, "--json", "--sweep", "read,write,mixed"),
        *("--threads", "1,2", "--request-size", "1MiB,32MiB", "--io", "buffered"),
    )
    fields = done.json
    assert fields["threads"] == 2, "the two figures take the largest"
    places = [
        (c["direction"], c["path"], c["threads"], c["request_bytes"]) for c in fields["sweep"]
    ]
    assert places == [
        (direction, "buffered", threads, size)
        for direction in ("read", "write", "mixed")
        for threads in (1, 2)
        for size in (1 << 20, 32 << 20)
    ]
    for cell in fields["sweep"]:
        kinds = {"read", "write"} if cell["direction"] == "mixed" else {cell["direction"]}
        latencies = cell["latency_seconds"]
        assert set(latencies) == kinds
        assert {one["requests"] for one in latencies.values()} == {
            (64 << 20) // cell["request_bytes"] // len(kinds)
        }
        assert all(one["p50"] <= one["p95"] <= one["p99"] for one in latencies.values())


def test_a_sweep_is_printed_below_the_two_figures(rangectl, tmp_path: Path) -> None:
    done = rangectl("bench", "--dir", tmp_path, *SMALL, "--sweep", "mixed", "--io", "buffered")
    lines = done.out.splitlines()
    assert sum(line.startswith(("mixed: read ", "mixed: write ")) for line in lines) == 2
    assert (done.status, os.listdir(tmp_path)) == (0, [])


def test_a_request_that_does_not_divide_the_file_is_refused(rangectl, tmp_path: Path) -> None:
    for size in ("64MiB", "12KiB"):
        refused = rangectl("bench", "--dir", tmp_path, *SMALL, "--request-size", size)
        assert (refused.status, os.listdir(tmp_path)) == (2, [])
        assert "expected at most 32MiB" in refused.err


@pytest.mark.parametrize("option", ["--sweep", "--threads", "--request-size", "--io"])
def test_an_empty_list_is_refused(rangectl, tmp_path: Path, option: str) -> None:
    for value in ("", "8,"):
        refused = rangectl("bench", "--dir", tmp_path, *SMALL, option, value)
        assert (refused.status, os.listdir(tmp_path)) == (2, []), value


def test_ctrl_c_ends_in_130_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from rangectl.cli import main; main()", "bench"]
    arguments = ["--dir", str(tmp_path), "--size", "64MiB", "--repeat", "1000", "--allow-buffered"]
    with subprocess.Popen(
        command + arguments,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not Path(f"/proc/{process.pid}/task").exists() or _threads(process.pid) < 4:
            assert process.poll() is None, "it is still measuring"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert err == "rangectl: interrupted; what was unfinished is removed [interrupted]\n"
    assert os.listdir(tmp_path) == []


def _threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))
