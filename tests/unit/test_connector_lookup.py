"""Lookups by socket and by a call: answers, deadlines, late answers; hostile frames, the folder."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rangekv.engine.connector import lookup_client, registry
from rangekv.engine.connector.endpoint import UNBORN_SUFFIX, private_folder, socket_path, sweep
from rangekv.engine.connector.lookup_client import RankGroup, RankLink
from rangekv.engine.connector.lookup_server import LookupServer
from rangekv.engine.connector.messages import FrameError, FrameReader, encode_frame
from rangekv.format.errors import EnvironmentFault, UsageError

CPUS = frozenset(os.sched_getaffinity(0))


class Rank:
    """A server whose lookups wait for `gate` when their argument asks for it, or lose patience."""

    patience_s = 10.0

    def __init__(self, path: str) -> None:
        self.gate = threading.Event()
        self.answered = threading.Event()
        self.server = LookupServer(path, self.answer, CPUS)

    def answer(self, kind: str, arguments: list[Any]) -> list[Any]:
        if arguments[0] == "refuse":
            raise UsageError("no", "not like this")
        if arguments[0] == "break":
            raise ZeroDivisionError
        if arguments[1:] == ["slow"]:
            self.gate.wait(self.patience_s)
        self.answered.set()
        return [arguments[0], 32, None]


def ask(link: RankLink, kind: str, *arguments: Any, deadline_s: float) -> list[Any] | None:
    deadline = time.monotonic() + deadline_s
    return link.collect(deadline) if link.post(kind, *arguments, deadline=deadline) else None


@pytest.fixture(params=["socket", "call"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How ranks of this process are asked; what comes back must not depend on it."""
    if request.param == "socket":
        monkeypatch.setattr(registry, "server_at", lambda path: None)
    else:
        monkeypatch.setattr(Rank, "patience_s", 0.3)  # the caller waits for it
    return str(request.param)


@pytest.fixture
def rank(tmp_path: Path, way: str) -> Iterator[Rank]:
    served = Rank(str(tmp_path / "r.sock"))
    yield served
    served.gate.set()
    served.server.close()


@pytest.fixture
def link(rank: Rank) -> Iterator[RankLink]:
    made = RankLink(rank.server.path)
    yield made
    made.close()


def test_answers(link: RankLink, way: str) -> None:
    assert ask(link, "lookup", 7, deadline_s=5) == [7, 32, None]
    assert ask(link, "lookup", 8, b"x" * 2_000_000, deadline_s=5) == [8, 32, None]
    assert link.calls == (2 if way == "call" else 0)


def test_errors_and_defects_become_no_answer_and_the_rank_goes_on(link: RankLink) -> None:
    assert ask(link, "lookup", "refuse", deadline_s=5) is None
    assert ask(link, "lookup", "break", deadline_s=5) is None
    assert ask(link, "lookup", 9, deadline_s=5) == [9, 32, None]
    assert link.unanswered == 0  # a rank that refuses is not silent


def test_late_answer_gives_its_ticket_back(rank: Rank, link: RankLink) -> None:
    assert ask(link, "lookup", 11, "slow", deadline_s=0.05) is None
    rank.gate.set()
    assert ask(link, "lookup", 12, deadline_s=5) == [12, 32, None]
    assert link.late_tickets == [11]


def test_no_rank_is_no_answer(tmp_path: Path) -> None:
    link = RankLink(str(tmp_path / "none.sock"))
    assert ask(link, "lookup", 1, deadline_s=0.05) is None


def test_silent_rank_rests(rank: Rank, link: RankLink, monkeypatch: pytest.MonkeyPatch) -> None:
    for ticket in range(lookup_client.SILENCES_MAX):
        assert ask(link, "lookup", ticket + 1, "slow", deadline_s=0.02) is None
    rank.gate.set()
    assert ask(link, "lookup", 50, deadline_s=5) is None  # rests: it is not even asked
    monkeypatch.setattr(link, "_rest_until", 0.0)
    assert ask(link, "lookup", 51, deadline_s=5) == [51, 32, None]


def test_reconnects_to_a_new_server(rank: Rank, link: RankLink) -> None:
    assert ask(link, "lookup", 1, deadline_s=5) == [1, 32, None]
    rank.server.close()
    again = Rank(rank.server.path)
    try:
        answers = [ask(link, "lookup", 2, deadline_s=5) for _ in range(2)]
        assert answers[-1] == [2, 32, None]
    finally:
        again.server.close()


class Quiet:
    """A rank that is there and never answers."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(path)
        self.listener.listen()

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def quiet(tmp_path: Path) -> Iterator[Quiet]:
    made = Quiet(str(tmp_path / "q.sock"))
    yield made
    made.close()


def test_group_asks_every_rank(rank: Rank, tmp_path: Path) -> None:
    other = Rank(str(tmp_path / "other.sock"))
    group = RankGroup([rank.server.path, other.server.path])
    try:
        assert len(group) == 2
        assert group.ask("lookup", 7, deadline_s=5) == [[7, 32, None], [7, 32, None]]
        other.server.close()
        assert group.ask("lookup", 8, deadline_s=5) == [[8, 32, None], None]
        assert group.unanswered == 1
    finally:
        group.close()
        other.server.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_silent_rank_costs_the_others_nothing_but_the_deadline(
    rank: Rank, quiet: Quiet, order: tuple[int, int]
) -> None:
    paths = [rank.server.path, quiet.path]
    group = RankGroup([paths[index] for index in order])
    begin = time.monotonic()
    answers = group.ask("lookup", 7, deadline_s=0.2)
    assert time.monotonic() - begin < 2
    assert [answers[order.index(index)] for index in (0, 1)] == [[7, 32, None], None]
    group.close()


def test_group_rests_while_one_rank_does_and_then_asks_again(
    rank: Rank, quiet: Quiet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup_client, "REST_S", 60)
    group = RankGroup([rank.server.path, quiet.path])
    for _ in range(lookup_client.SILENCES_MAX):
        assert not group.rests
        assert group.ask("lookup", 7, deadline_s=0.02)[1] is None
    assert group.rests
    for link in group._links:  # on a busy machine the first rank may have been late as well
        monkeypatch.setattr(link, "_rest_until", 0.0)
    assert not group.rests
    group.close()


def test_late_promises_of_a_group_carry_their_rank(rank: Rank, tmp_path: Path) -> None:
    other = Rank(str(tmp_path / "other.sock"))
    group = RankGroup([other.server.path, rank.server.path])
    other.gate.set()
    try:
        assert group.ask("lookup", 11, "slow", deadline_s=0.2) == [[11, 32, None], None]
        rank.gate.set()
        assert group.ask("lookup", 12, deadline_s=5) == [[12, 32, None], [12, 32, None]]
        assert group.take_late() == [(1, 11)]
        assert group.take_late() == []
    finally:
        group.close()
        other.server.close()


def test_full_socket_of_one_rank_is_no_answer_of_that_rank_alone(rank: Rank, quiet: Quiet) -> None:
    """A rank that reads nothing blocks the sender; the next one then has no time left."""
    group = RankGroup([quiet.path, rank.server.path])
    assert group.ask("lookup", b"x" * 2_000_000, deadline_s=0.1) == [None, None]
    assert group._links[1].unanswered == 0  # it was not even asked
    assert group.ask("lookup", 5, deadline_s=0.5)[1] == [5, 32, None]
    group.close()


@pytest.mark.parametrize(
    "sent",
    [
        b"\xff\xff\xff\xff",
        b"\x01\x00\x00\x00\xc1",
        encode_frame(["no sequence", "lookup"]),
        b"\x01\x00\x00\x00\x05",
    ],
)
def test_hostile_frames_end_only_their_connection(rank: Rank, link: RankLink, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(rank.server.path)
        peer.settimeout(5)
        peer.sendall(sent)
        assert peer.recv(1) == b""
    assert ask(link, "lookup", 3, deadline_s=5) == [3, 32, None]


def test_frames_are_cut_at_any_point() -> None:
    stream = encode_frame([1, "a", b"x"]) + encode_frame([2, "b"])
    reader = FrameReader(100)
    messages = []
    for at in range(len(stream)):
        reader.feed(stream[at : at + 1])
        while (message := reader.next_message()) is not None:
            messages.append(message)
    assert messages == [[1, "a", b"x"], [2, "b"]]


def test_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    reader = FrameReader(10)
    reader.feed(encode_frame([1, "x" * 20])[:4])
    with pytest.raises(FrameError):
        reader.next_message()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="rt", dir="/tmp") as folder:  # socket names are short
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield folder


def test_folder_is_private_and_swept(runtime: str) -> None:
    folder = private_folder()
    assert os.stat(folder).st_mode & 0o777 == 0o700
    live = LookupServer(socket_path(folder, "engine", 0), lambda kind, arguments: [], CPUS)
    dead = socket_path(folder, "other", 0)
    unborn = socket_path(folder, "third", 0) + UNBORN_SUFFIX
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as gone:
        gone.bind(dead)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(unborn)
        sweep(folder)
        assert os.path.lexists(unborn)  # it will listen in a moment
    assert os.path.lexists(live.path)
    assert not os.path.lexists(dead)
    live.close()
    assert not os.path.lexists(live.path)


def test_folder_of_loose_mode_is_refused(runtime: str) -> None:
    os.chmod(private_folder(), 0o755)
    with pytest.raises(EnvironmentFault, match="mode 0755"):
        private_folder()


def test_folder_that_is_a_link_is_refused(runtime: str) -> None:
    elsewhere = os.path.join(runtime, "elsewhere")
    os.mkdir(elsewhere, 0o700)
    os.symlink(elsewhere, os.path.join(runtime, f"rangekv-{os.geteuid()}"))
    with pytest.raises(EnvironmentFault, match="not a private folder"):
        private_folder()


def test_socket_names_differ_by_engine_and_rank() -> None:
    names = {socket_path("/x", engine, rank) for engine in "ab" for rank in (0, 1)}
    assert len(names) == 4
