"""A file seam that stops at its n-th call: with one error, or with the death of the process."""

from __future__ import annotations

import errno
import os

from support.stores import AnyFiles

# What asks the kernel for something that can fail; `close` is what a death does by itself.
CALLS = frozenset(
    {"open_dir", "open_file", "open_pack", "create_temp", "flock", "statx", "statx_at"}
    | {"free_bytes", "fallocate", "pwrite", "preadv", "pwritev", "fsync", "fdatasync", "fsync_dir"}
    | {"rename", "rename_noreplace", "unlink", "mkdir", "rmdir", "listdir"}
)
OPENING = frozenset({"open_dir", "open_file", "open_pack", "create_temp"})


class Died(BaseException):
    """The process is gone: nothing that would have followed happens, no clean-up either."""


class Interrupted(AnyFiles):
    """Lets `at - 1` calls through; then one fails, or all that follow do not happen.

    `bury` closes what a dead process had open, as the kernel would.
    """

    def __init__(self, at: int, *, death: bool) -> None:
        self.at, self.death = at, death
        self.count = 0
        self.reached = ""
        self.open_fds: set[int] = set()

    def __getattribute__(self, name: str):
        value = super().__getattribute__(name)
        if name == "close":
            return self._close
        return self._through(name, value) if name in CALLS else value

    def _through(self, name: str, method):
        def call(*args, **kwargs):
            self.count += 1
            if self.count == self.at:
                self.reached = name
            if self.count >= self.at and self.death:
                raise Died
            if self.count == self.at:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            result = method(*args, **kwargs)
            if name in OPENING:
                self.open_fds.add(result)
            return result

        return call

    def _close(self, fd: int) -> None:
        self.open_fds.discard(fd)
        os.close(fd)

    def bury(self) -> None:
        for fd in self.open_fds:
            os.close(fd)
        self.open_fds.clear()
