"""Where kernels are tested: interpreted in a process of their own, or compiled without a GPU.

Tests skip without torch or triton, unless RANGE_REQUIRE names torch: then the import fails.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

import pytest
from support.interpreter import Call, process

REQUIRED = "torch" in os.environ.get("RANGE_REQUIRE", "").split(",")


def _need(name: str) -> ModuleType | None:
    spec = importlib.util.find_spec(name)
    if (spec is None or spec.origin is None) and not REQUIRED:
        pytest.skip(f"{name} is not installed")
    # Triton's switch is read at its import: it is imported in processes of its own only.
    return importlib.import_module(name) if name != "triton" else None


@pytest.fixture(scope="session")
def torch() -> ModuleType | None:
    return _need("torch")


@pytest.fixture(scope="session")
def interpreted(torch: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Call a function of tests/support where kernels are interpreted on the CPU."""
    _need("triton")
    cache = str(tmp_path_factory.mktemp("triton"))
    with process(TRITON_INTERPRET="1", TRITON_CACHE_DIR=cache) as call:
        yield call


@pytest.fixture(scope="session")
def compiling(torch: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Call a function of tests/support where kernels are compiled for GPUs, and cannot run."""
    _need("triton")
    cache = str(tmp_path_factory.mktemp("triton"))
    with process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache) as call:
        yield call


@pytest.fixture(params=["triton", "torch"])
def check(request: pytest.FixtureRequest) -> Call:
    """Call check(function, …) with the implementation to test as the function's first argument."""
    if request.param == "torch":
        request.getfixturevalue("torch")
        return lambda function, *args, **kwargs: function("torch", *args, **kwargs)
    call = request.getfixturevalue("interpreted")
    return lambda function, *args, **kwargs: call(function, "triton", *args, **kwargs)
