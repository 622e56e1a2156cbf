"""Owns the way of bytes between files and a GPU in fault cases: the kernel's own reads, through the
host, so that faults can be injected into files. No engine in use takes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rangekv.engine.devices.cpu import Bytes, bank_memory
from rangekv.engine.files import Files
from rangekv.engine.payload.posix import PosixPayload
from rangekv.engine.testing.gpu_blocks import settle


class BouncedPayload(PosixPayload):
    """PosixPayload for buffers that are tensors; arrays go the usual way."""

    def read(self, offset: int, buffers: Sequence[Any]) -> int:
        """Fill the buffers; what a failed read has brought reaches none of them."""
        hosts = [_host(buffer) for buffer in buffers]
        calls = super().read(offset, hosts)
        for buffer, host in zip(buffers, hosts, strict=True):
            if buffer is not host:
                _to_device(buffer, host)
        return calls

    def write(self, offset: int, buffers: Sequence[Any]) -> int:
        """Write the buffers."""
        hosts = [_host(buffer) for buffer in buffers]
        for buffer, host in zip(buffers, hosts, strict=True):
            if buffer is not host:
                host[:] = buffer.cpu().numpy()
        return super().write(offset, hosts)


def open_bounced(mode: str, files: Files, pack_fd: int, **place: Any) -> BouncedPayload:
    """Stand in the place of `payload.path.open_payload`."""
    return BouncedPayload(files, pack_fd, direct=place["direct"])


def _host(buffer: Any) -> Bytes:
    return buffer if isinstance(buffer, np.ndarray) else bank_memory(buffer.nbytes)


def _to_device(buffer: Any, host: Bytes) -> None:
    import torch

    buffer.copy_(torch.from_numpy(host))
    settle(buffer)
