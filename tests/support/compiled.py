"""Compiles kernels for GPUs on a machine that has none; the result can be read, not run."""

from __future__ import annotations

from typing import Any


def ptx(
    module: str, kernel: str, signature: dict[str, str], constants: dict[str, Any], capability: int
) -> str:
    """Return the PTX of a kernel in engine/devices/cuda; it has gone through ptxas as well."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(f"rangekv.engine.devices.cuda.{module}"), kernel)
    source = ASTSource(
        fn=function,
        signature={**signature, **dict.fromkeys(constants, "constexpr")},
        constexprs=constants,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    return compiled.asm["ptx"]
