"""What the two watched seams share: a log, one call at a time, an injected failure, and death.

Owns no call of its own.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from rangekv.engine.files import Files
from rangekv.engine.testing.crash.operations import Log

if TYPE_CHECKING:
    from rangekv.engine.files import Segments

EXT4 = 0xEF53

_Function = TypeVar("_Function", bound=Callable[..., Any])


class WatchedFiles(Files):
    """One process whose calls are written to `log`. It fails every call once it has died."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.dead = False
        self.fail_sync_of = ""
        """Let the next fsync or fdatasync of a file fail whose name begins like this."""
        self._serial = threading.RLock()

    def fails(self, name: str) -> bool:
        """Whether this sync is the one that fails."""
        if not self.fail_sync_of or not name.startswith(self.fail_sync_of):
            return False
        self.fail_sync_of = ""
        return True

    def die(self) -> None:
        """End as a killed process does: nothing is closed in order, all locks are gone."""
        with self._serial:
            self.dead = True


def views(buffers: Segments) -> Iterator[memoryview]:
    """Yield the bytes of each buffer."""
    for buffer in buffers:
        yield memoryview(buffer).cast("B")  # type: ignore[arg-type]


def serial(function: _Function) -> _Function:
    """Let one call of a seam run at a time: an engine calls from several threads."""

    @wraps(function)
    def call(self: WatchedFiles, *args: Any, **kwargs: Any) -> Any:
        with self._serial:
            if self.dead and function.__name__ != "close":
                raise OSError(errno.EIO, "the process has died")
            return function(self, *args, **kwargs)

    return call  # type: ignore[return-value]
