"""Compiles what a call would launch, on a machine without a GPU; the result is read, never run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock


def compile_launches(
    capability: int, function: Callable[..., None], *args: Any
) -> list[tuple[str, str]]:
    """Return (kernel, its PTX) of every launch in `function(*args)`; ptxas has taken each.

    All of a launch but its last step is real: arguments are bound and specialised as on a GPU of
    that compute capability (90 is Hopper).
    """
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    class NoDevice:
        """A driver that names a GPU and has none."""

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return capability  # compiled kernels are kept by device

        def get_current_stream(self, _: int | None = None) -> int:
            return 0

    launched: list[tuple[str, str]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        assert kernel.asm["cubin"]
        launched.append((self.__name__, kernel.asm["ptx"]))

    driver.set_active(NoDevice())
    with mock.patch.object(JITFunction, "run", compile_only):
        function(*args)
    return launched
