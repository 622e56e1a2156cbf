"""Skips the tests with real vLLM where there is none, unless RANGE_REQUIRE asks for them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

REQUIRED = "vllm" in os.environ.get("RANGE_REQUIRE", "").split(",")
# This folder alone would make `vllm` a namespace package, which has no origin.
SPEC = importlib.util.find_spec("vllm")
HAS_VLLM = SPEC is not None and SPEC.origin is not None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs vLLM; where it was required, the missing import fails instead."""
    if HAS_VLLM or REQUIRED:
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="vllm is not installed"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama on disk."""
    from support.vllm_model import write_model

    return write_model(tmp_path_factory.mktemp("model"))
