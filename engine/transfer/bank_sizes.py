"""Owns how large the banks of an engine are: what settings ask for, what a device has room for.

It takes no memory and knows no device but by its free bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from rangekv.engine.config import MIB, EngineConfig
from rangekv.format.errors import EnvironmentFault, UsageError
from rangekv.format.geometry import ALIGNMENT, Geometry

# The larger a bank, the fewer launches a prompt needs; on a host they only cost memory.
SAVE_BANK_DEVICE = 256 * MIB
SAVE_BANK_HOST = 32 * MIB
# Of a device's free memory, what is left to the tables of kernels, on each stream, and the driver.
DEVICE_MARGIN = 256 * MIB


class BankSizes(NamedTuple):
    """Bytes of one bank of each kind, multiples of 4096."""

    read: int
    save: int


def bank_sizes(config: EngineConfig, geometry: Geometry, free_bytes: int | None) -> BankSizes:
    """Return the sizes: the settings, at most one pack, at least one page.

    `free_bytes` is what the device has left, None for a host. Without a `save_bank` of the user it
    is halved until all banks fit. Raises UsageError `bank-too-small`, EnvironmentFault
    `no-device-memory`.
    """
    read = _clamped("read_bank", config.read_bank, _page_room(geometry), geometry)
    room = _page_room(geometry)
    if geometry.block_bytes % ALIGNMENT:
        room += geometry.write_align_bytes + ALIGNMENT
    wanted = config.save_bank or (SAVE_BANK_HOST if free_bytes is None else SAVE_BANK_DEVICE)
    save = _clamped("save_bank", wanted, room, geometry)
    if free_bytes is None:
        return BankSizes(read, save)
    while _all_banks(config, read, save) > free_bytes - DEVICE_MARGIN:
        smaller = save // 2 // ALIGNMENT * ALIGNMENT
        if config.save_bank is not None or smaller < max(room, SAVE_BANK_HOST):
            raise _no_memory(config, read, save, free_bytes)
        save = smaller
    return BankSizes(read, save)


def _page_room(geometry: Geometry) -> int:
    return -(-geometry.page_bytes // ALIGNMENT) * ALIGNMENT


def _clamped(name: str, wanted: int, room: int, geometry: Geometry) -> int:
    if wanted < room:
        raise UsageError(
            "bank-too-small",
            f"{name} is {wanted} bytes; a checksum page of this model needs {room}",
        )
    return max(room, min(wanted, geometry.pack_bytes)) // ALIGNMENT * ALIGNMENT


def _all_banks(config: EngineConfig, read: int, save: int) -> int:
    return config.read_banks * read + config.save_banks * save


def _no_memory(config: EngineConfig, read: int, save: int, free_bytes: int) -> EnvironmentFault:
    return EnvironmentFault(
        "no-device-memory",
        f"{config.read_banks} read banks of {read} bytes and {config.save_banks} save banks of "
        f"{save} need {_all_banks(config, read, save)} bytes of the GPU's memory and "
        f"{DEVICE_MARGIN} beside, {free_bytes} are free; lower vLLM's --gpu-memory-utilization, or "
        "save_bank, save_banks or read_banks",
    )
