"""A verb that is stopped cleans up, however often it is asked; a kill is cleaned up by the next."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from rangectl.scratch import scratch_directory

COMMAND = [sys.executable, "-m", "rangectl"]


def stopped_at_work(folder: Path, *numbers: int) -> tuple[int, str]:
    """Start a benchmark, send the signals once it has written, return (exit status, stderr)."""
    with subprocess.Popen(
        [*COMMAND, "restore-benchmark", "--payload", "64MiB", "--repeat", "1000"],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not list(folder.glob(".rangectl-benchmark-*/store/range.pack")):
            assert process.poll() is None
        for number in numbers:
            process.send_signal(number)
        assert process.stderr is not None
        try:
            return process.wait(60), process.stderr.read()
        finally:
            process.kill()


@pytest.mark.parametrize(
    "numbers",
    [
        [signal.SIGINT],
        [signal.SIGTERM],
        [signal.SIGHUP],
        [signal.SIGINT, signal.SIGTERM, signal.SIGINT],
    ],
)
def test_a_stopped_benchmark_leaves_nothing(tmp_path: Path, numbers: list[int]) -> None:
    status, said = stopped_at_work(tmp_path, *numbers)
    assert (status, said) == (
        130,
        "rangectl: interrupted; what was unfinished is removed [interrupted]\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_benchmark_leaves_the_next_one_removes(tmp_path: Path) -> None:
    assert stopped_at_work(tmp_path, signal.SIGKILL)[0] == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with scratch_directory(tmp_path, "benchmark") as place:
        (place / "in-use").touch()
        assert [one.name for one in tmp_path.iterdir()] == [place.name]
        with scratch_directory(tmp_path, "benchmark") as other:
            assert {one.name for one in tmp_path.iterdir()} == {place.name, other.name}
    assert not left.exists()
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_in_the_midst_of_the_removal(tmp_path: Path, monkeypatch) -> None:
    remove = shutil.rmtree
    calls = count()

    def interrupted(place: Path, **how: bool) -> None:
        if next(calls) == 0:
            raise KeyboardInterrupt
        remove(place, **how)

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt), scratch_directory(tmp_path, "fault") as place:
        (place / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_what_the_caller_ignores_stays_ignored() -> None:
    script = (
        "import os, signal\n"
        "from rangectl import process\n"
        "process.interrupt_once()\n"
        "os.kill(os.getpid(), signal.SIGHUP)\n"
        "print(signal.getsignal(signal.SIGHUP).name)\n"
    )
    done = subprocess.run(
        ["sh", "-c", f"trap '' HUP; exec {sys.executable} -c \"$SCRIPT\""],
        env={**os.environ, "SCRIPT": script},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "SIG_IGN\n"
