"""Builds the fake CUDA driver; skips what needs it unless RANGE_REQUIRE asks for kvikio."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.required import required

TESTS = Path(__file__).parents[1]
SOURCE = TESTS / "support" / "fake_libcuda.c"


@pytest.fixture(scope="session")
def fake_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake libcuda.so.1, compiled once a session."""
    if not required("kvikio"):
        if importlib.util.find_spec("kvikio") is None:
            pytest.skip("kvikio is not installed")
        if shutil.which("gcc") is None:
            pytest.skip("there is no gcc to build the fake CUDA driver with")
    library = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    subprocess.run(
        ["gcc", "-O1", "-fPIC", "-shared", "-Wl,-soname,libcuda.so.1", "-o", library, SOURCE],
        check=True,
        timeout=120,
    )
    return library


@pytest.fixture
def scene(fake_driver: Path, tmp_path: Path) -> Callable[..., str]:
    """Return a function that plays one scene of `support.kvikio_scenes` in a process of its own.

    The fake driver and KvikIO's one pool are global to a process: no other test may meet them.
    """

    def play(name: str, *, driver: bool = True) -> str:
        argv = [sys.executable, "-m", "support.kvikio_scenes", name, str(tmp_path)]
        done = subprocess.run(
            [*argv, str(fake_driver)] if driver else argv,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,  # cuFile leaves its log where it was started
            env={**os.environ, "PYTHONPATH": str(TESTS)},
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    return play
