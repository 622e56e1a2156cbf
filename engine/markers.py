"""Owns the dirty marker of one store: writing it and reading it, never what it means.

A marker that cannot be read exists all the same.
"""

from __future__ import annotations

from rangekv.engine.folder import MARKER, Folder, read_all
from rangekv.format.errors import FormatError
from rangekv.format.marker import MARKER_BYTES, Marker
from rangekv.format.superblock import Superblock


def write(folder: Folder, session: Superblock) -> None:
    """Write the marker of `session`; durable once the caller has synced the folder."""
    marker = Marker(
        store_uuid=session.store_uuid,
        epoch=session.epoch,
        unix_ns=folder.files.unix_ns(),
        pid=folder.files.pid(),
        boot_id=folder.files.boot_id(),
    )
    folder.replace(MARKER, [marker.encode()])


def holder(folder: Folder) -> str:
    """Return who has the store open, as far as its marker tells: a forked child keeps the lock."""
    marker, _ = read(folder)
    return "another process" if marker is None else f"process {marker.pid} or a child of it"


def read(folder: Folder) -> tuple[Marker | None, bool]:
    """Return (marker, exists)."""
    try:
        fd = folder.files.open_file(folder.fd, MARKER)
    except FileNotFoundError:
        return None, False
    except OSError:
        return None, True
    try:
        return Marker.decode(read_all(folder.files, fd, MARKER_BYTES + 1)), True
    except (OSError, FormatError):
        return None, True
    finally:
        folder.files.close(fd)
