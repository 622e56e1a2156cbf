"""Memory of a device is registered with cuFile once, and let go of before anybody can free it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rangekv.engine.payload import kvikio
from rangekv.engine.payload.kvikio import KvikioPayload
from rangekv.format.errors import EnvironmentFault


class Library:
    """The two calls of KvikIO, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.error: Exception | None = None

    def memory_register(self, memory: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(("register", memory.nbytes))

    def memory_deregister(self, memory: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(("deregister", memory.nbytes))


def payload_of(library: Library, mode: str) -> KvikioPayload:
    """Return one whose file is open already: opening it takes a driver."""
    payload = KvikioPayload.__new__(KvikioPayload)
    payload.mode = mode
    payload.library = library
    payload._registered = []
    payload._file = SimpleNamespace(close=lambda: library.calls.append(("close", 0)))
    return payload


def test_banks_are_registered_until_the_close() -> None:
    library = Library()
    payload = payload_of(library, "gds")
    payload.register(np.empty(8192, np.uint8))
    payload.close()
    payload.close()
    assert library.calls == [("register", 8192), ("deregister", 8192), ("close", 0)]


def test_the_way_through_the_host_registers_nothing() -> None:
    library = Library()
    payload = payload_of(library, "compat")
    payload.register(np.empty(8192, np.uint8))
    payload.close()
    assert library.calls == [("close", 0)]


def test_memory_that_cannot_be_let_go_of_is_kept_and_the_close_goes_on() -> None:
    library = Library()
    payload = payload_of(library, "gds")
    memory = np.empty(4096, np.uint8)
    payload.register(memory)
    library.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    payload.close()
    assert library.calls[-1] == ("close", 0)
    assert any(one is memory for one in kvikio._kept)


def test_memory_that_is_not_registered_is_a_refusal_with_a_remedy() -> None:
    library = Library()
    library.error = RuntimeError("cuFile error: internal error\nat somewhere")
    with pytest.raises(EnvironmentFault, match="8192 bytes of the GPU") as refused:
        payload_of(library, "gds").register(np.empty(8192, np.uint8))
    assert refused.value.code == "not-registered"
    assert "set payload to compat" in str(refused.value)
