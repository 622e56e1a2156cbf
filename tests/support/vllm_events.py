"""Listens to the KV events that a vLLM process publishes, from the first one on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgpack

NEWS_S = 120
NUDGE_S = 15  # longer than an idle engine steps on for its saves
ANSWER_MS = 30_000
POLL_S = 0.2

Event = dict[str, Any]  # the fields that differ from their defaults; `type` names its class


class Listener:
    """Has the events in the order of their publication.

    It asks the publisher's memory, so that it is never too late: use it while the process lives.
    """

    def __init__(self, folder: Path) -> None:
        import zmq  # vLLM brings it

        self._replay_endpoint = f"ipc://{folder}/replay"
        self._endpoint = f"ipc://{folder}/events"
        self.events: list[Event] = []
        self._batches = 0
        self._context = zmq.Context()
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(self._replay_endpoint)

    def __enter__(self) -> Listener:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    @property
    def arguments(self) -> tuple[str, str]:
        """What a server's command line needs."""
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self._endpoint,
            "replay_endpoint": self._replay_endpoint,
        }
        return "--kv-events-config", json.dumps(config)

    def wait_for(self, what: Callable[[], bool], nudge: Callable[[], object]) -> None:
        """Return once `what` holds; `nudge` makes the engine step, should it have become idle."""
        nudged = time.monotonic()
        deadline = nudged + NEWS_S
        while True:
            self._catch_up()
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

    def _catch_up(self) -> None:
        """Ask for all batches since the last one that is known."""
        self._replay.send_multipart([b"", self._batches.to_bytes(8, "big")])
        while True:
            assert self._replay.poll(ANSWER_MS), "the publisher does not answer"
            *_, sequence, batch = self._replay.recv_multipart()
            if not batch:
                return
            assert int.from_bytes(sequence, "big") == self._batches
            self._batches += 1
            _, events, *_ = msgpack.unpackb(batch)
            self.events += events
