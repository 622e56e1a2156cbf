"""Which lookup servers run in this very process, by the paths of their sockets.

Knows them from their start to their close, and none in a fork; never asks one.
"""

from __future__ import annotations

import os
from typing import Any, Protocol


class Server(Protocol):
    """What somebody in its process needs of a lookup server."""

    def reply(self, message: list[Any]) -> list[Any]: ...


# By process as well: a fork inherits the table, but none of the threads that an engine needs.
_servers: dict[tuple[int, str], Server] = {}


def enter(path: str, server: Server) -> None:
    """Let `server` be found at `path`; it replaces an earlier one, as its socket does."""
    _servers[os.getpid(), path] = server


def leave(path: str, server: Server) -> None:
    """Let `server` be found no more; one that has replaced it stays."""
    if server_at(path) is server:
        # A server that enters just here is lost: then it is asked over its socket.
        _servers.pop((os.getpid(), path), None)


def server_at(path: str) -> Server | None:
    """Return the server that this process runs at `path`, or None."""
    return _servers.get((os.getpid(), path))
