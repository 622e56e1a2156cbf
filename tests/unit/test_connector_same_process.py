"""Scheduler side and rank in one process: lookups without a socket, and when there must be one."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine.connector import lookup_client, registry
from rangekv.engine.connector.lookup_client import RankGroup, RankLink
from rangekv.engine.connector.lookup_server import LookupServer
from rangekv.engine.connector.messages import ANSWER_BYTES_MAX, FrameReader, encode_frame
from rangekv.engine.connector.worker import WorkerSide
from rangekv.format.records import NO_SALT
from support.rig import Rig, tokens_of

CPUS = frozenset(os.sched_getaffinity(0))
PROMPT = tokens_of(1, 100)
SAVED = len(PROMPT) // 16 * 16

Serve = Callable[..., LookupServer]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Starts servers, by name; each answers its lookups with its name if nothing else is given."""
    servers = []

    def start(name: str, answer: Any = None) -> LookupServer:
        answers = answer or (lambda kind, arguments: [name])
        servers.append(LookupServer(str(tmp_path / f"{name}.sock"), answers, CPUS))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """An engine that holds the whole blocks of PROMPT."""
    made = Rig(tmp_path / "store")
    assert made.save(PROMPT[:SAVED])
    yield made
    made.engine.close(30)


@pytest.fixture
def worker(rig: Rig) -> WorkerSide:
    return WorkerSide(rig.engine, {"l.0": 0}, 16, 1.0)


def a_lookup(name: str, tokens: Any = PROMPT, skip: int = 0, limit: int = SAVED) -> list[Any]:
    return ["lookup", name, "session", 0, tokens.tobytes(), skip, limit, NO_SALT, 1]


def ask(link: RankLink, kind: str, *arguments: Any, deadline_s: float = 10) -> list[Any] | None:
    deadline = time.monotonic() + deadline_s
    return link.collect(deadline) if link.post(kind, *arguments, deadline=deadline) else None


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What links have opened."""
    opened: list[Any] = []
    make = lookup_client.RankLink._connected

    def counted(link: RankLink, deadline: float) -> socket.socket:
        if link._socket is None:
            opened.append(link.path)
        return make(link, deadline)

    monkeypatch.setattr(RankLink, "_connected", counted)
    return opened


def over_the_socket(path: str, message: list[Any]) -> list[Any]:
    """Ask with frames and nothing else."""
    reader = FrameReader(ANSWER_BYTES_MAX)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(path)
        peer.settimeout(10)
        peer.sendall(encode_frame(message))
        while (answer := reader.next_message()) is None:
            reader.feed(peer.recv(1 << 16))
    return answer


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (a_lookup("hit"), [1, SAVED, None]),
        (a_lookup("part", skip=32, limit=64), [1, 64, None]),
        (a_lookup("absent", tokens_of(2, 64)), [0, 0, "absent"]),
        (a_lookup("held already", skip=SAVED, limit=SAVED), [0, 0, "nothing-beyond-skip"]),
        (a_lookup("one token", limit=1), [0, 0, "below-one-block"]),
        (a_lookup("askew", skip=3), "bad-skip"),
        (a_lookup("late", PROMPT)[:-1], "bad-message"),
        (["lookup"], "bad-message"),
        (["nonsense", 1], "bad-message"),
        (["lookup", "a", "s", 0, b"odd", 0, 96, NO_SALT, 1], None),
        (["lookup", "a", "s", 0, PROMPT.tobytes(), 0, 96, b"no digest", 1], None),
        (["stats"], None),
        (["reset"], []),
    ],
)
def test_a_call_is_answered_as_the_socket_is(
    worker: WorkerSide, serve: Serve, question: list[Any], expected: Any
) -> None:
    """Asked again under the same key, an engine renews what it has promised."""
    server = serve("r", worker.answer)
    answer = server.reply([1, *question])
    assert answer == over_the_socket(server.path, [1, *question])
    if expected is not None:
        assert (answer[2] if answer[1] == "error" else answer[2:]) == expected


def test_tokens_that_changed_under_a_key_are_refused_either_way(
    worker: WorkerSide, serve: Serve
) -> None:
    server = serve("r", worker.answer)
    server.reply([1, *a_lookup("a")])
    other = [1, *a_lookup("a", tokens_of(3, 64))]
    assert server.reply(other)[1:3] == ["error", "tokens-changed"]
    assert server.reply(other) == over_the_socket(server.path, other)


def test_defect_of_ours_is_logged_and_told_either_way(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(kind: str, arguments: list[Any]) -> list[Any]:
        raise OSError("not one of the connection's")

    server = serve("r", answer)
    assert server.reply([1, "lookup"])[1:3] == ["error", "internal"]
    assert server.reply([1, "lookup"]) == over_the_socket(server.path, [1, "lookup"])
    link = RankLink(server.path)
    assert ask(link, "lookup") is None
    assert (link.calls, link.unanswered) == (1, 0)
    assert caplog.text.count("lookup failed kind=lookup") == 4


def test_lookups_open_no_socket_and_run_in_the_thread_that_asks(
    serve: Serve, sockets: list[Any]
) -> None:
    server = serve("r", lambda kind, arguments: [threading.get_ident()])
    group = RankGroup([server.path])
    for _ in range(5):
        assert group.ask("lookup", 1, deadline_s=10) == [[threading.get_ident()]]
    assert group.calls == 5
    assert not sockets
    assert not server._connections


def test_reset_takes_the_socket_since_it_may_wait_for_a_disk(
    serve: Serve, sockets: list[Any]
) -> None:
    """Were it called, nothing could end the wait."""
    gate = threading.Event()

    def answer(kind: str, arguments: list[Any]) -> list[Any]:
        return [] if kind == "reset" and gate.wait(30) else [7, 32, None]

    server = serve("r", answer)
    link = RankLink(server.path)
    assert ask(link, "reset", deadline_s=0.05) is None
    assert ask(link, "lookup", 1) == [7, 32, None]  # meanwhile
    gate.set()
    assert ask(link, "reset") == []
    assert sockets == [server.path]
    assert (link.calls, link.late_tickets) == (1, [])
    link.close()


def test_server_that_has_closed_is_silent_and_the_next_one_is_called_at_once(
    serve: Serve, sockets: list[Any]
) -> None:
    link = RankLink(serve("r").path)
    assert ask(link, "lookup") == ["r"]
    registry.server_at(link.path).close()  # type: ignore[union-attr]
    assert registry.server_at(link.path) is None
    assert ask(link, "lookup") is None
    assert (link.calls, link.unanswered) == (1, 1)
    serve("r", lambda kind, arguments: ["again"])
    assert ask(link, "lookup") == ["again"]
    assert (link.calls, sockets) == (2, [link.path])  # nobody answered at it


def test_answer_of_a_server_that_closes_meanwhile_is_none(serve: Serve) -> None:
    """Its engine closes next: what it has promised could not be claimed."""
    asked, closed = threading.Event(), threading.Event()

    def answer(kind: str, arguments: list[Any]) -> list[Any]:
        asked.set()
        closed.wait(10)
        return [7, 32, None]

    server = serve("r", answer)
    link = RankLink(server.path)
    with ThreadPoolExecutor(1) as threads:
        answered = threads.submit(ask, link, "lookup", 1)
        assert asked.wait(10)
        server.close()
        closed.set()
        assert answered.result(10) is None
    assert (link.unanswered, link.late_tickets) == (1, [])


def test_two_engines_of_a_process_answer_for_themselves(serve: Serve) -> None:
    group = RankGroup([serve("a").path, serve("b").path])
    assert group.ask("lookup", deadline_s=10) == [["a"], ["b"]]
    registry.server_at(group._links[0].path).close()  # type: ignore[union-attr]
    assert group.ask("lookup", deadline_s=10) == [None, ["b"]]


def test_server_that_was_replaced_takes_nothing_with_it(serve: Serve) -> None:
    old, new = serve("r", lambda kind, arguments: ["old"]), serve("r")
    old.close()
    assert registry.server_at(new.path) is new
    assert ask(RankLink(new.path), "lookup") == ["r"]
    new.close()
    assert registry.server_at(new.path) is None


def test_fork_asks_its_parent_over_the_socket(serve: Serve) -> None:
    """The child's copy of an engine has no threads, and locks that nobody may ever open."""
    server = serve("r", lambda kind, arguments: [os.getpid()])
    link = RankLink(server.path)
    assert ask(link, "lookup") == [os.getpid()]
    child = os.fork()
    if child == 0:
        own = registry.server_at(server.path) is None
        right = ask(link, "lookup") == [os.getppid()] and link.calls == 1
        os._exit(0 if own and right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert registry.server_at(server.path) is server


def test_calls_and_sockets_at_once_share_one_engine(
    rig: Rig, worker: WorkerSide, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serve("r", worker.answer)
    by_call, by_socket = [RankLink(server.path) for _ in range(2)], RankLink(server.path)
    monkeypatch.setattr(by_socket, "path", server.path + ".")  # nobody is found there,
    by_socket._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    by_socket._socket.connect(server.path)  # but it is connected

    def many(link: RankLink) -> list[Any]:
        return [ask(link, *a_lookup(f"{id(link)} {number}")) for number in range(200)]

    with ThreadPoolExecutor(3) as threads:
        answers = [each for found in threads.map(many, [*by_call, by_socket]) for each in found]
    by_socket.close()
    assert [link.calls for link in (*by_call, by_socket)] == [200, 200, 0]
    assert len({ticket_id for ticket_id, *_ in answers}) == 600
    assert {tuple(rest) for _, *rest in answers} == {(SAVED, None)}
    for ticket_id, *_ in answers:
        rig.engine.release(worker._take_ticket(ticket_id))
    rig.check_quiet()
