"""Owns what each payload path needs of a machine before it is tried: found, or named as missing.

That all is there proves nothing yet; `gds_probe` does.
"""

from __future__ import annotations

import ctypes
from importlib.util import find_spec

from rangekv.engine.files import OS_FILES, Files

NVIDIA_FS = ("/proc/driver/nvidia-fs", "/sys/module/nvidia_fs")


def missing(mode: str, *, direct: bool, files: Files = OS_FILES) -> list[str]:
    """Return what `mode` needs and does not find here, each with its remedy.

    `mode` is one of config.PAYLOADS; `direct` says whether the store's files can be read with
    O_DIRECT.
    """
    if mode == "posix":
        return []
    lacking = []
    if not importable("kvikio"):
        lacking.append("kvikio (pip install 'rangekv[gds-cu13]')")
    if not has_driver():
        lacking.append("libcuda.so.1 (the NVIDIA driver; a container needs --gpus)")
    if mode == "compat":
        return lacking
    if not has_gpu(files):
        lacking.append("a GPU (/dev/nvidia0)")
    if not has_udev(files):
        lacking.append("/run/udev (mount it into the container)")
    if not direct:
        lacking.append("O_DIRECT (use ext4 or xfs on a local NVMe SSD)")
    return lacking


def importable(name: str) -> bool:
    """Whether a module is installed; it is not imported."""
    try:
        return find_spec(name) is not None
    except ValueError:  # loaded, and without a spec
        return True


def has_driver() -> bool:
    """Whether a CUDA driver can be loaded, as KvikIO would; it is not initialised."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_gpu(files: Files) -> bool:
    """Whether there is a device node of a GPU."""
    return any(files.exists(f"/dev/nvidia{index}") for index in range(16))


def has_udev(files: Files) -> bool:
    """Whether udev's files can be seen: without them KvikIO quietly goes through the host."""
    return files.is_directory("/run/udev")


def has_nvidia_fs(files: Files) -> bool:
    """Whether the kernel module is loaded; where PCIe P2PDMA is set up, cuFile needs none."""
    return any(files.exists(place) for place in NVIDIA_FS)
