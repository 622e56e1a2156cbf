"""Saves of one rank, from the first chunk of a prompt until it is known how its last step went.

Opens, announces, extracts and publishes them and notes what was lost; never waits for a write.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from rangekv.engine import RequestKey
from rangekv.engine.connector.events import Holdings, Named
from rangekv.engine.connector.messages import Answered, Loss, RequestStep
from rangekv.format.errors import RangeError

if TYPE_CHECKING:
    from rangekv.engine import Engine, Save

logger = logging.getLogger("vllm.rangekv")

TOKEN_BYTES = 4


@dataclass(slots=True)
class Held:
    """What the worker knows of one request until its prompt is saved or it is gone."""

    tokens: bytes
    save_tokens: int
    root: bytes
    block_ids: npt.NDArray[np.int32]
    hashes: tuple[bytes, ...] = ()  # vLLM's of the full blocks of `tokens`, where it wants events
    save: Save | None = None
    is_declined: bool = False
    announced_token: int = 0  # KV of tokens before it was announced to `save`
    step: int = 0  # the last one that announced something
    is_ended: bool = False  # nothing more will be announced: publish once `step` is settled


@dataclass(frozen=True, slots=True)
class _Publication:
    """A save that is being published, and how far it should reach."""

    save: Save
    root: bytes
    tokens: bytes
    end_token: int
    hashes: tuple[bytes, ...]

    def loss(self) -> Loss | None:
        """Return what did not become visible, once the save has settled."""
        published = self.save.published_end
        if published >= self.end_token:
            return None
        return Loss(self.root, self.tokens[: TOKEN_BYTES * self.end_token], published)


class SaveKeeper:
    """Used by the model's thread; publishes a save once the outcome of its last step is known."""

    def __init__(
        self,
        engine: Engine,
        layers: Iterable[int],
        block_tokens: int,
        holdings: Holdings | None = None,
    ) -> None:
        """`holdings` is told of every save that ends, where there is one."""
        self.prompts = 0  # those that had something to save
        self.clock = 0  # by which all ranks say what they used last
        self._engine = engine
        self._layers = tuple(layers)
        self._block_tokens = block_tokens
        self._holdings = holdings
        self._held: dict[str, Held] = {}
        self._parked: list[Held] = []  # requests that are gone before their last step is settled
        self._published: list[_Publication] = []  # it is to be reported how they end
        self._save_count = 0
        self._settled_step = 0

    def hold(self, request: RequestStep) -> Held | None:
        """Return what is held of a request after this step's plan; None if it is not known."""
        block_ids = np.frombuffer(request.block_ids, np.int32)
        if request.tokens is not None:
            self.let_go(request.request_id)
            held = Held(
                request.tokens, request.save_tokens, request.root, block_ids, request.hashes
            )
            self._held[request.request_id] = held
            self.prompts += request.save_tokens > 0
            return held
        found = self._held.get(request.request_id)
        if found is not None and len(block_ids):
            found.block_ids = np.concatenate((found.block_ids, block_ids))
        return found

    def open(self, request_id: str, held: Held) -> bool:
        """Say whether `held` has a save, and open one where it may have it."""
        if held.save is None and not held.is_declined and held.save_tokens:
            tokens = memoryview(held.tokens)[: TOKEN_BYTES * held.save_tokens]
            held.save = self._new_save(request_id, tokens, held.root)
            held.is_declined = held.save is None
        return held.save is not None and not held.is_ended

    def _new_save(self, request_id: str, tokens: bytes | memoryview, root: bytes) -> Save | None:
        self._save_count += 1
        key = RequestKey(request_id, "save", self._save_count)
        try:
            number = self._engine.root(root)
            return self._engine.save(key, tokens, root=number, clock=self.clock)
        except RangeError as error:
            logger.warning("range: save refused code=%s", error.code)
            return None

    def save_answer(self, answered: Answered, deadline: float) -> None:
        """Save all that the store lacks of a request that has ended, from its freed blocks."""
        save = self._new_save(answered.request_id, answered.tokens, answered.root)
        if save is None:
            return
        block_ids = np.frombuffer(answered.block_ids, np.int32)
        token_range = (0, len(answered.tokens) // TOKEN_BYTES)
        for layer_index in self._layers:
            save.layer_ready(layer_index, token_range, block_ids)
        save.extracted(max(0.0, deadline - time.monotonic()))
        self._finish(
            _Publication(save, answered.root, answered.tokens, token_range[1], answered.hashes)
        )

    def announce(self, held: Held, layer_index: int, end_token: int) -> None:
        """Tell the save that one layer of tokens up to `end_token` lies in paged KV."""
        begin = held.announced_token
        if held.save is not None and begin < end_token:
            size = self._block_tokens
            block_ids = held.block_ids[begin // size : end_token // size]
            held.save.layer_ready(layer_index, (begin, end_token), block_ids)

    def void(self, held: Held) -> None:
        """Drop a save that ran beside a failed restore; a later step may start it anew."""
        if held.save is not None:
            held.save.cancel()
        held.save = None
        held.is_ended = held.is_declined = False
        held.announced_token = 0

    def extract(self, held: Held, request: RequestStep, step: int, deadline: float) -> None:
        """Take what step number `step` has announced out of paged KV."""
        if held.save is None:
            return
        is_whole = held.save.extracted(max(0.0, deadline - time.monotonic()))
        held.announced_token = max(held.announced_token, request.end_token)
        held.step = step
        # With a piece dropped, only what lies before it counts.
        held.is_ended = request.last or not is_whole

    def settle(self, step: int, void_steps: list[int]) -> None:
        """Publish what ended by `step`; drop what was saved in void steps or since.

        A load that failed on one rank has spoilt what all of them computed beside it.
        """
        if void_steps:
            for held in (*self._held.values(), *self._parked):
                if held.step >= min(void_steps):
                    self.void(held)
        self._settled_step = max(self._settled_step, step)
        for request_id, held in list(self._held.items()):
            if held.is_ended and held.step <= self._settled_step:
                del self._held[request_id]
                self._publish(held)
        parked, self._parked = self._parked, []
        for held in parked:
            if held.step <= self._settled_step:
                self._publish(held)
            else:
                self._parked.append(held)

    def _publish(self, held: Held) -> None:
        if held.save is not None:
            self._finish(
                _Publication(held.save, held.root, held.tokens, held.announced_token, held.hashes)
            )

    def _finish(self, publication: _Publication) -> None:
        publication.save.finish()
        self._published.append(publication)
        if self._holdings is not None:
            named = Named(publication.root, publication.tokens, publication.hashes)
            self._holdings.expect(publication.save, named)

    def take_losses(self) -> list[Loss]:
        """Return what did not become visible of the saves that have ended, once."""
        lost, published, self._published = [], self._published, []
        for each in published:
            if not each.save.settled:
                self._published.append(each)
            elif (loss := each.loss()) is not None:
                lost.append(loss)
        return lost

    def let_go(self, request_id: str) -> None:
        """Publish what is proved of a request that ends here; its blocks may be overwritten."""
        held = self._held.pop(request_id, None)
        if held is None or held.save is None:
            return
        if held.step <= self._settled_step:
            self._publish(held)
        else:
            held.is_ended = True
            self._parked.append(held)

    def close(self) -> None:
        """Publish what is proved of prompts still in work; the engine is closed by its owner.

        What was computed in a step of unknown outcome is not proved.
        """
        for request_id in list(self._held):
            self.let_go(request_id)
        for held in self._parked:
            self.void(held)
        self._parked = []
