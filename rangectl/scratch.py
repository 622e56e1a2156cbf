"""A temporary directory on the user's disk that does not outlive its use, not even a kill for long.

Owns its making and its removal, and that of what killed runs have left; never looks inside.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rangekv.engine.faults import translated


@contextmanager
def scratch_directory(folder: Path, purpose: str) -> Iterator[Path]:
    """Make `.rangectl-PURPOSE-…` in `folder` and remove it at the end; raises EnvironmentFault.

    It is locked while it is used, so that the next run can tell what a killed one has left.
    """
    prefix = f".rangectl-{purpose}-"
    _sweep(folder, prefix)
    # Named before it is made: whenever an interrupt comes, it is known what to remove.
    place = folder / f"{prefix}{secrets.token_hex(8)}"
    with ExitStack() as undo:
        undo.callback(_remove, place)
        with translated(str(folder), "make a temporary directory"):
            place.mkdir(0o700)
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        undo.callback(os.close, lock)
        with suppress(OSError):  # no locks here: then the next run finds none to break either
            fcntl.flock(lock, fcntl.LOCK_SH)
        yield place


def _remove(place: Path) -> None:
    try:
        shutil.rmtree(place, ignore_errors=True)
    except KeyboardInterrupt:
        shutil.rmtree(place, ignore_errors=True)
        raise


def _sweep(folder: Path, prefix: str) -> None:
    """Remove the directories of this user that no process holds any more.

    An empty one may be about to be locked by the run that has just made it.
    """
    for place in folder.glob(f"{prefix}*"):
        try:
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        with suppress(OSError):
            if os.fstat(lock).st_uid == os.geteuid() and os.listdir(lock):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove(place)
        os.close(lock)
