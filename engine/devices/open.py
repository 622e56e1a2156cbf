"""Owns the choice of the device that an engine's paged KV lies on, as the setting `device` says."""

from __future__ import annotations

from rangekv.engine.devices.cpu import CpuDevice
from rangekv.engine.devices.device import Device


def open_device(name: str, layer_count: int, block_bytes: int) -> Device:
    """Return the device: `cpu`, or `cuda` for torch's current one.

    Raises EnvironmentFault `no-torch`, `no-gpu`.
    """
    if name == "cpu":
        return CpuDevice(layer_count, block_bytes)
    # torch and Triton are imported only where a GPU is asked for.
    from rangekv.engine.devices.cuda.device import CudaDevice
    from rangekv.engine.devices.cuda.runtime import TorchRuntime

    return CudaDevice(layer_count, block_bytes, TorchRuntime())
