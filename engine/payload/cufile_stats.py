"""Owns cuFile's own counts of how its reads and writes went; it never interprets a failure to tell.

Only layouts that were compared with NVIDIA's header are read: cuFile fills a struct that it knows
and we would have guessed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

LAYOUTS = frozenset({(1, 20)})  # cuFile versions with the struct below (cufile.h of CUDA 13)
GPUS_MAX = 16
LEVEL = 3  # with counts per GPU
# The words of one GPU's counts, in their order.
_PER_GPU = (
    "read_bytes",
    "read_bw_bytes_per_sec",
    "read_utilization",
    "read_duration_us",
    "n_total_reads",
    "n_p2p_reads",
    "n_nvfs_reads",
    "n_posix_reads",
    "n_unaligned_reads",
    "n_dr_reads",
    "n_sparse_regions",
    "n_inline_regions",
    "n_reads_err",
    "writes_bytes",
    "write_bw_bytes_per_sec",
    "write_utilization",
    "write_duration_us",
    "n_total_writes",
    "n_p2p_writes",
    "n_nvfs_writes",
    "n_posix_writes",
    "n_unaligned_writes",
    "n_dr_writes",
    "n_writes_err",
    "n_mmap",
    "n_mmap_ok",
    "n_mmap_err",
    "n_mmap_free",
    "reg_bytes",
)


class CufileError(ctypes.Structure):
    """CUfileError_t; `err` 0 is success."""

    _fields_ = (("err", ctypes.c_int), ("cu_err", ctypes.c_int))


class PerGpu(ctypes.Structure):
    """CUfilePerGpuStats_t."""

    _fields_ = (
        ("uuid", ctypes.c_char * 16),
        *((name, ctypes.c_uint64) for name in _PER_GPU),
    )


class Level3(ctypes.Structure):
    """CUfileStatsLevel3_t. What precedes the GPUs is not looked at."""

    _fields_ = (
        # Level 1: 23 pairs of counters and 32 single ones; level 2 adds two histograms of 32.
        ("detailed", ctypes.c_uint64 * (23 * 2 + 32 + 64)),
        ("num_gpus", ctypes.c_uint32),
        ("per_gpu", PerGpu * GPUS_MAX),
    )


@dataclass(frozen=True, slots=True)
class Calls:
    """Reads and writes of all GPUs since the count began."""

    direct: int
    """By nvidia-fs or PCIe P2PDMA: past the host."""
    bounced: int
    """By POSIX calls of cuFile: through the host, under the same name."""


class CufileStats:
    """The counts of the cuFile that this process has loaded."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def start(cls, library: Any, version: tuple[int, int]) -> CufileStats | None:
        """Make cuFile count from now on; None where it cannot, or tells in an unknown layout."""
        if version not in LAYOUTS:
            return None
        for name in ("cuFileSetStatsLevel", "cuFileStatsStart", "cuFileGetStatsL3"):
            if not hasattr(library, name):
                return None
            getattr(library, name).restype = CufileError
        if library.cuFileSetStatsLevel(LEVEL).err or library.cuFileStatsStart().err:
            return None
        return cls(library)

    def calls(self) -> Calls | None:
        """Return the counts, or None where cuFile does not tell them now."""
        told = Level3()
        if self._library.cuFileGetStatsL3(ctypes.byref(told)).err:
            return None
        if told.num_gpus > GPUS_MAX:
            return None
        gpus = told.per_gpu[: told.num_gpus]
        return Calls(
            direct=sum(
                one.n_p2p_reads + one.n_nvfs_reads + one.n_p2p_writes + one.n_nvfs_writes
                for one in gpus
            ),
            bounced=sum(one.n_posix_reads + one.n_posix_writes for one in gpus),
        )
