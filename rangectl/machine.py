"""What a measurement ran on: file system, block device, huge pages, cores, room.

Owns reading those facts from the kernel, for the first lines of every report; never judges speed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rangekv.engine.faults import translated
from rangekv.engine.files import OS_FILES
from rangekv.engine.pack import NEVER_WARM, filesystem_name
from rangekv.format.errors import EnvironmentFault

from rangectl.output import human_bytes

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a run took place, as far as the kernel says; "unknown" where it does not."""

    filesystem: str
    device: str
    huge_pages: str
    cpu_count: int

    @classmethod
    def at(cls, folder: Path, filesystem: str) -> Machine:
        """Describe this machine and the device under `folder`."""
        number = folder.stat().st_dev
        link = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        device = link.resolve().name if link.exists() else "unknown"
        return cls(filesystem, device, huge_pages(), len(os.sched_getaffinity(0)))


def require_proof(folder: Path) -> None:
    """Raise EnvironmentFault where a store that was closed cleanly would be cold again."""
    with translated(str(folder), "open the directory"):
        directory = OS_FILES.open_dir(os.path.realpath(folder))
    try:
        filesystem = filesystem_name(OS_FILES.filesystem_magic(directory))
    finally:
        OS_FILES.close(directory)
    if filesystem in NEVER_WARM:
        raise EnvironmentFault(
            "unsupported-filesystem",
            f"{filesystem} cannot prove that a file is the one that was written, so nothing would"
            " be restored; choose a --dir on a disk's own file system, such as ext4 or xfs (in a"
            " container: a mounted volume)",
            path=str(folder),
        )


def require_room(folder: Path, *, disk_bytes: int, memory_bytes: int) -> None:
    """Raise EnvironmentFault unless the disk and the memory are free that a run will take."""
    free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    if free_bytes < disk_bytes:
        raise EnvironmentFault(
            "no-space",
            f"{human_bytes(free_bytes)} free, {human_bytes(disk_bytes)} needed; make room, choose"
            " another --dir or a smaller size",
            path=str(folder),
        )
    available_bytes = available_memory()
    if available_bytes is not None and available_bytes < memory_bytes:
        raise EnvironmentFault(
            "no-memory",
            f"{human_bytes(available_bytes)} of memory available, {human_bytes(memory_bytes)}"
            " needed; choose a smaller size",
        )


def available_memory() -> int | None:
    """Return the bytes that can be taken without swapping, or None where the kernel is silent."""
    try:
        lines = _MEMORY.read_text().splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return next(found, None)


def huge_pages() -> str:
    """Return the setting in brackets, as in `always [madvise] never`."""
    try:
        words = _HUGE_PAGES.read_text().split()
    except OSError:
        return "unknown"
    return next((word[1:-1] for word in words if word.startswith("[")), "unknown")
