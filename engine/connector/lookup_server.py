"""The worker's end of the lookup socket: accepts, checks the peer, answers frame by frame.

Hands every message, from its own process as well, to one callable and frames what it returns; knows
nothing of lookups itself.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from rangekv.engine.connector import registry
from rangekv.engine.connector.endpoint import UNBORN_SUFFIX, is_same_user
from rangekv.engine.connector.messages import (
    REQUEST_BYTES_MAX,
    FrameError,
    FrameReader,
    encode_frame,
)
from rangekv.format.errors import RangeError

logger = logging.getLogger("vllm.rangekv")

CONNECTIONS_MAX = 8
_RECEIVE_BYTES = 1 << 20

Answer = Callable[[str, list[Any]], list[Any]]


class LookupServer:
    """Listens on `path` from construction to `close`.

    `answer(kind, arguments)` runs on its threads, several at once, and on those that call `reply`.
    It returns the values of the reply; a RangeError that it raises travels as code and message,
    anything else is logged and travels as `internal`.
    """

    def __init__(self, path: str, answer: Answer, affinity: frozenset[int]) -> None:
        self.path = path
        self._answer = answer
        self._affinity = affinity
        self._lock = threading.Lock()  # protects _connections and _closed
        self._connections: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A bound socket that does not listen yet looks like a dead one to whoever sweeps: it gets
        # its name when it listens. What lies there is of an earlier engine with the same id.
        fresh = path + UNBORN_SUFFIX
        if os.path.lexists(fresh):
            os.unlink(fresh)
        self._listener.bind(fresh)
        self._listener.listen(CONNECTIONS_MAX)
        os.rename(fresh, path)
        self._start(self._accept, "range-lookup")
        registry.enter(path, self)

    def reply(self, message: list[Any]) -> list[Any]:
        """Return the message that answers `message`, as the socket would carry it.

        For callers in this process, in their thread: it lasts as long as the answer takes. Raises
        ConnectionResetError where the server is closed by then: what was promised is void.
        """
        reply = self._reply(message)
        with self._lock:
            if self._closed:
                raise ConnectionResetError("the server is closed")
        return reply

    def close(self) -> None:
        """Stop listening and drop every connection; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connections = list(self._connections)
        registry.leave(self.path, self)
        for each in (self._listener, *connections):
            try:
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits on it
            except OSError:
                continue  # the peer was faster
        self._listener.close()
        if os.path.lexists(self.path):
            os.unlink(self.path)

    def _start(self, target: Callable[..., None], name: str, *args: Any) -> None:
        threading.Thread(target=target, name=name, args=args, daemon=True).start()

    def _accept(self) -> None:
        os.sched_setaffinity(0, self._affinity)
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                welcome = not self._closed and len(self._connections) < CONNECTIONS_MAX
                if welcome and is_same_user(connection):
                    self._connections.add(connection)
                    self._start(self._serve, "range-lookup-peer", connection)
                else:
                    connection.close()

    def _serve(self, connection: socket.socket) -> None:
        os.sched_setaffinity(0, self._affinity)
        reader = FrameReader(REQUEST_BYTES_MAX)
        try:
            while chunk := connection.recv(_RECEIVE_BYTES):
                reader.feed(chunk)
                while (message := reader.next_message()) is not None:
                    connection.sendall(encode_frame(self._reply(message)))
        except (OSError, FrameError) as error:
            logger.debug("range: lookup connection dropped error=%s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _reply(self, message: list[Any]) -> list[Any]:
        sequence, kind, *arguments = message
        try:
            return [sequence, "ok", *self._answer(str(kind), arguments)]
        except RangeError as error:
            return [sequence, "error", error.code, error.line()]
        except Exception:  # a defect of ours must become a miss for the peer, not a dead thread
            logger.exception("range: lookup failed kind=%s", kind)
            return [sequence, "error", "internal", "see the worker's log"]
