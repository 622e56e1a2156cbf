"""What only a GPU can show. Skipped where there is none, unless RANGE_REQUIRE names gpu."""

from __future__ import annotations

import pytest
from support.required import required


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    """Require torch's current GPU, Triton and KvikIO."""
    if required("gpu"):
        import kvikio  # noqa: F401
        import torch
        import triton  # noqa: F401

        assert torch.cuda.is_available(), f"torch {torch.__version__} finds no GPU"
        return
    for name in ("torch", "triton", "kvikio"):
        pytest.importorskip(name)
    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no GPU here")
