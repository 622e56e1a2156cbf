"""Listens to the KV events that a vLLM process publishes, from the first one on."""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import msgpack

NEWS_S = 120
NUDGE_S = 15  # longer than an idle engine steps on for its saves
POLL_S = 0.2

Event = dict[str, Any]  # the fields that differ from their defaults; `type` names its class


class Listener:
    """Has the events in the order of their publication.

    It asks the publisher's memory, so that it is never too late: use it while the process lives.
    """

    def __init__(self) -> None:
        import zmq  # vLLM brings it

        # Not pytest's folder: the name of a socket has 107 characters at most.
        self._folder = tempfile.TemporaryDirectory(prefix="range-")
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{self._folder.name}/events",
            "replay_endpoint": f"ipc://{self._folder.name}/replay",
        }
        self.events: list[Event] = []
        self._batches = 0
        self._context = zmq.Context()
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(self.config["replay_endpoint"])

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)
        self._folder.cleanup()

    @property
    def arguments(self) -> tuple[str, str]:
        """What a server's command line needs."""
        return "--kv-events-config", json.dumps(self.config)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Take the events of a process that ends by itself; its very last ones may be missed."""
        over = threading.Event()

        def follow() -> None:
            while not over.wait(POLL_S):
                self._catch_up(lambda: not over.is_set())

        thread = threading.Thread(target=follow)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def wait_for(self, what: Callable[[], bool], nudge: Callable[[], object]) -> None:
        """Return once `what` holds; `nudge` makes the engine step, should it have become idle."""
        nudged = time.monotonic()
        deadline = nudged + NEWS_S
        while True:
            self._catch_up(lambda: time.monotonic() < deadline)
            if what():
                return
            now = time.monotonic()
            assert now < deadline, [(each["type"], each.get("medium")) for each in self.events]
            if now - nudged > NUDGE_S:
                nudge()
                nudged = now
            time.sleep(POLL_S)

    def told(self, kind: str, medium: str) -> list[Event]:
        """Return the events of one kind about one medium."""
        return [
            each for each in self.events if each["type"] == kind and each.get("medium") == medium
        ]

    def held(self, medium: str) -> set[Any]:
        """Return the hashes of the blocks that a medium holds by what was told."""
        held: set[Any] = set()
        for each in self.events:
            if each.get("medium") == medium and each["type"] == "BlockStored":
                held.update(each["block_hashes"])
            elif each.get("medium") == medium:
                held.difference_update(each["block_hashes"])
        return held

    def _catch_up(self, goes_on: Callable[[], bool]) -> None:
        """Ask for all batches since the last one that is known; wait for them while it goes on."""
        self._replay.send_multipart([b"", self._batches.to_bytes(8, "big")])
        while True:
            while not self._replay.poll(POLL_S * 1000):
                if not goes_on():
                    return
            *_, sequence, batch = self._replay.recv_multipart()
            if not batch:
                return
            assert int.from_bytes(sequence, "big") == self._batches
            self._batches += 1
            _, events, *_ = msgpack.unpackb(batch)
            self.events += events


def blocks_of(events: list[Event]) -> list[Any]:
    """Return the hashes that events name, in their order."""
    return [block for event in events for block in event["block_hashes"]]
