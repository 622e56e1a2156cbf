"""The scheduler's end of the ranks' lookup sockets: one question, one deadline, else no answer.

Calls a rank in its own process without a socket, keeps framing intact across timeouts, collects
tickets of late answers and rests a rank that stays silent; never raises for what a rank does and
never decides what an answer means.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Sequence
from typing import Any

from rangekv.engine.connector import registry
from rangekv.engine.connector.messages import (
    ANSWER_BYTES_MAX,
    FrameError,
    FrameReader,
    encode_frame,
)

logger = logging.getLogger("vllm.rangekv")

SILENCES_MAX = 3  # unanswered questions in a row before the rank rests
REST_S = 5.0
_RECEIVE_BYTES = 1 << 16
# A call cannot be given up at its deadline. A lookup waits for the engine's lock alone, for which
# the one thread of scheduler and worker waits in every step anyway; a reset waits for the disk.
_CALLED = ("lookup",)


class RankLink:
    """Asks one rank, `post` and then `collect`; used by one thread.

    `late_tickets` are promises that came after their deadline; whoever takes them releases them.
    `calls` counts the questions to a rank in this process, which took no socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.late_tickets: list[int] = []
        self.unanswered = 0
        self.calls = 0
        self._called: list[Any] | None = None  # what the last question got, if it was a call
        self._socket: socket.socket | None = None
        self._reader = FrameReader(ANSWER_BYTES_MAX)
        self._sequence = 0
        self._silences = 0
        self._rest_until = 0.0

    @property
    def rests(self) -> bool:
        """Whether the rank was silent so often that it is not asked for a while."""
        return time.monotonic() < self._rest_until

    def post(self, kind: str, *arguments: Any, deadline: float) -> bool:
        """Send a question that `collect` will wait for; False if the rank rests or takes none."""
        if self.rests or time.monotonic() >= deadline:
            return False
        self._sequence += 1
        message = [self._sequence, kind, *arguments]
        server = registry.server_at(self.path) if kind in _CALLED else None
        if server is not None:
            return self._call(server, message, deadline)
        try:
            connection = self._connected(deadline)
            connection.settimeout(_left(deadline))
            connection.sendall(encode_frame(message))
        except OSError as error:
            self.close()  # half a frame may be on the wire
            self._note_silence(error)
            return False
        return True

    def collect(self, deadline: float) -> list[Any] | None:
        """Return the values of the answer to the last question that was posted, or None."""
        try:
            message = self._receive(deadline)
        except (OSError, FrameError) as error:
            if not isinstance(error, TimeoutError):
                self.close()
            self._note_silence(error)
            return None
        self._silences = 0
        if message[1] != "ok":
            logger.warning("range: rank refused socket=%s answer=%s", self.path, message[2:])
            return None
        return message[2:]

    def close(self) -> None:
        """Drop the connection; the next question opens a new one."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._reader = FrameReader(ANSWER_BYTES_MAX)

    def _call(self, server: registry.Server, message: list[Any], deadline: float) -> bool:
        """Ask a rank in this process; the answer of one that took too long is late as any is."""
        self.calls += 1
        try:
            answer = server.reply(message)
        except OSError as error:
            self._note_silence(error)
            return False
        if time.monotonic() > deadline:
            self._note_late(answer)
            self._note_silence(TimeoutError("deadline"))
            return False
        self._called = answer
        return True

    def _receive(self, deadline: float) -> list[Any]:
        called, self._called = self._called, None
        if called is not None:
            return called
        connection = self._socket
        if connection is None:
            raise ConnectionResetError("the connection is closed")
        while True:
            while (message := self._reader.next_message()) is not None:
                if message[0] == self._sequence:
                    return message
                self._note_late(message)
            # What has arrived already is taken even where another rank used up the time.
            connection.settimeout(max(0.0, deadline - time.monotonic()))
            try:
                chunk = connection.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                raise TimeoutError("deadline") from None
            if not chunk:
                raise ConnectionResetError("the rank closed the connection")
            self._reader.feed(chunk)

    def _connected(self, deadline: float) -> socket.socket:
        if self._socket is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.settimeout(_left(deadline))
                connection.connect(self.path)
            except OSError:
                connection.close()
                raise
            self._socket = connection
        return self._socket

    def _note_late(self, message: list[Any]) -> None:
        """A lookup answers [ticket_id, ...]; what nobody waits for any more must be released."""
        if message[1] == "ok" and len(message) > 2 and isinstance(message[2], int) and message[2]:
            self.late_tickets.append(message[2])

    def _note_silence(self, error: Exception) -> None:
        self.unanswered += 1
        self._silences += 1
        if self._silences >= SILENCES_MAX:
            self._silences = 0
            self._rest_until = time.monotonic() + REST_S
            logger.warning(
                "range: rank is silent socket=%s error=%s lookups rest for %g s",
                self.path,
                error,
                REST_S,
            )


class RankGroup:
    """Asks all ranks of one engine at once; `links[r]` leads to rank r. Used by one thread."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._links = [RankLink(path) for path in paths]

    def __len__(self) -> int:
        return len(self._links)

    @property
    def unanswered(self) -> int:
        return sum(link.unanswered for link in self._links)

    @property
    def calls(self) -> int:
        return sum(link.calls for link in self._links)

    @property
    def rests(self) -> bool:
        """Whether some rank is not asked for a while, so that no answer would be complete."""
        return any(link.rests for link in self._links)

    def ask(self, kind: str, *arguments: Any, deadline_s: float) -> list[list[Any] | None]:
        """Return each rank's answer, None where there is none; all share one deadline."""
        deadline = time.monotonic() + deadline_s
        posted = [link.post(kind, *arguments, deadline=deadline) for link in self._links]
        return [
            link.collect(deadline) if sent else None
            for link, sent in zip(self._links, posted, strict=True)
        ]

    def take_late(self) -> list[tuple[int, int]]:
        """Return (rank, ticket id) of promises that came too late, once."""
        late = [(rank, each) for rank, link in enumerate(self._links) for each in link.late_tickets]
        for link in self._links:
            link.late_tickets = []
        return late

    def close(self) -> None:
        """Drop all connections."""
        for link in self._links:
            link.close()


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline")
    return left
