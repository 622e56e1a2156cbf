"""Owns which way payload takes, as the setting `payload` says, and the refusal of what it cannot.

The way never changes while an engine runs, and none is taken in place of another.
"""

from __future__ import annotations

import os

from rangekv.engine.files import Files
from rangekv.engine.folder import PACK
from rangekv.engine.payload.gds_probe import probe
from rangekv.engine.payload.io import PayloadIO
from rangekv.engine.payload.kvikio import KvikioPayload
from rangekv.engine.payload.posix import PosixPayload
from rangekv.engine.payload.requirements import has_nvidia_fs, missing
from rangekv.format.errors import EnvironmentFault


def open_payload(
    mode: str,
    files: Files,
    pack_fd: int,
    *,
    store_path: str,
    direct: bool,
    threads: int,
    device_memory: bool,
) -> PayloadIO:
    """Return the payload I/O that `mode` names: posix, compat or gds.

    `direct` says whether the pack is open with O_DIRECT, `device_memory` whether the engine's banks
    lie in GPU memory. Raises EnvironmentFault `payload-refused` with all that is missing, and as
    KvikioPayload does.
    """
    if mode == "posix" and device_memory:
        raise EnvironmentFault(
            "payload-refused",
            "payload 'posix' is refused, the banks of this engine lie in a GPU's memory, which the "
            "kernel's reads do not reach; set payload to gds, or to compat to go through the host",
        )
    if mode == "posix":
        return PosixPayload(files, pack_fd, direct=direct)
    lacking = missing(mode, direct=direct, files=files)
    if lacking:
        raise _refused(mode, "missing: " + ", ".join([*lacking, *_perhaps(mode, files)]))
    if mode == "gds":
        if not device_memory:
            raise _refused(mode, "the banks of this engine lie in host memory")
        told = probe(os.path.join(store_path, PACK))
        if not told.proved:
            raise _refused(mode, "; ".join([told.detail, *_perhaps(mode, files)]))
    payload = KvikioPayload(files, pack_fd, mode=mode, threads=threads)
    if direct and not payload.direct:
        payload.close()
        raise _refused(mode, "KvikIO could not open the pack with O_DIRECT, the store has")
    return payload


def _perhaps(mode: str, files: Files) -> list[str]:
    """What may be the cause, and is none where the machine does it another way."""
    if mode != "gds" or has_nvidia_fs(files):
        return []
    return ["nvidia-fs (its kernel module, unless PCIe P2PDMA is set up)"]


def _refused(mode: str, why: str) -> EnvironmentFault:
    would = "bytes would pass the host" if mode == "gds" else "KvikIO cannot move them"
    return EnvironmentFault(
        "payload-refused", f"payload {mode!r} is refused, {would}: {why}; or set payload to posix"
    )
