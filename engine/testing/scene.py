"""The stage of a fault case: a small store on the user's file system, prompts, and paged KV.

Owns what every case needs to save and restore; the faults are the cases' own, and what must hold at
the end of all of them is in checks.py.
"""

from __future__ import annotations

import math
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.devices.device import BlockIds
from rangekv.engine.index.tickets import Ticket
from rangekv.engine.inspection import read_store
from rangekv.engine.payload.path import open_payload
from rangekv.engine.store import CloseResult, create
from rangekv.engine.testing import checks
from rangekv.engine.testing.bounced import open_bounced
from rangekv.engine.testing.checks import (
    POISON,
    Absent,
    BankWatch,
    Violation,
    reason_without_journal,
)
from rangekv.engine.testing.faulty_files import Act, Call, FaultyFiles, Hold
from rangekv.engine.testing.gpu_blocks import layers_of, paged_memory
from rangekv.engine.testing.oracle import Oracle
from rangekv.engine.transfer.restore import Restore
from rangekv.engine.transfer.save import Save
from rangekv.format.errors import RangeError
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace

Prompt = npt.NDArray[np.uint32]
"""Token ids."""

MODEL = ModelGeometry(layer_count=4, token_bytes=256, block_tokens=16)
UNALIGNED_MODEL = ModelGeometry(layer_count=4, token_bytes=144, block_tokens=16)
CAPACITY_BYTES = 4 << 20  # four packs of four 256 KiB stripes
BANK_BYTES = 256 << 10
PROMPT_TOKENS = 256
PATIENCE_S = 20.0

NAMESPACE = Namespace({"model": "replay-fault"})
_KV_BLOCKS = 160
_PROMPT_BLOCKS = PROMPT_TOKENS // MODEL.block_tokens


class Scene:
    """One store, and paged KV for sources and destinations.

    Everything that is random follows from `seed`. Cases append to `states` and `evidence`.
    `patience_s` bounds every wait: a rule that is broken ends as a violation, not as a hang.
    """

    def __init__(
        self,
        store: Path,
        seed: int,
        *,
        model: ModelGeometry = MODEL,
        patience_s: float = PATIENCE_S,
        device: str = "cpu",
    ) -> None:
        self.random = random.Random(seed)
        self.store = store
        self.model = model
        self.patience_s = patience_s
        self.files = FaultyFiles()
        self.oracle = Oracle(model)
        self.states: list[str] = []
        self.evidence: list[str] = []
        self.quarantined = 0
        """Banks that this case leaves in quarantine, as its rule says."""
        self.published: list[Prompt] = []
        self._requests = count()
        self._holds: list[Hold] = []
        self.device = device
        self.kv = paged_memory(device, (model.layer_count, _KV_BLOCKS, model.block_bytes))
        self.kv[:] = POISON
        self._free_blocks = list(range(_KV_BLOCKS))
        random.Random(f"blocks {seed}").shuffle(self._free_blocks)

    @classmethod
    def new(
        cls,
        folder: Path,
        seed: int,
        *,
        model: ModelGeometry = MODEL,
        patience_s: float = PATIENCE_S,
        device: str = "cpu",
    ) -> Scene:
        """Create a fresh store below `folder`, on the file system under test."""
        store = folder / "store"
        create(str(store), capacity_bytes=CAPACITY_BYTES, model=model, namespace=NAMESPACE)
        return cls(store, seed, model=model, patience_s=patience_s, device=device)

    # -- the engine --------------------------------------------------------------------------------

    @contextmanager
    def engine(self, **settings: Any) -> Iterator[Engine]:
        """Open the store, and at the end check it, close it and check what it left.

        A case that failed is closed all the same, and raises what it failed with.
        """
        engine = self.open(**settings)
        watch = BankWatch(engine)
        try:
            yield engine
            self.evidence.append(checks.check_quiet(engine, self.oracle, self, watch))
        except BaseException:
            self.let_go()
            engine.close(0.0)
            raise
        closed = engine.close(self.patience_s)
        self.require(closed.state == "clean", f"the close is clean ({closed.detail})")
        self.check_closed()

    def open(
        self, *, store: Path | None = None, namespace: Namespace = NAMESPACE, **settings: Any
    ) -> Engine:
        """Open this store, or another; the caller closes it. Settings are those of EngineConfig."""
        chosen: dict[str, Any] = {
            "allow_buffered": True,
            "read_banks": 4,
            "save_banks": 4,
            "read_bank": BANK_BYTES,
            "save_bank": BANK_BYTES if self.model.block_bytes % 4096 == 0 else 2 * BANK_BYTES,
            "read_workers": 2,
            "placement": "banks",
            "device": self.device,
            "lock_wait_s": 0.0,
            # What holds without a journal; cells of the journal say that they have one.
            "recovery": "discard",
        }
        config = EngineConfig(**chosen | settings)
        if config.placement == "direct" and self.device != "cpu":
            raise Absent("nothing is read straight into a GPU's blocks")
        engine = Engine.open(
            str(store or self.store),
            namespace=namespace,
            geometry=self.model,
            config=config,
            files=self.files,
            # Faults are injected into files, which a GPU's own way does not use.
            payload=open_payload if self.device == "cpu" else open_bounced,
        )
        engine.attach(layers_of(self.kv))
        return engine

    @contextmanager
    def short_deadlines(self, engine: Engine) -> Iterator[None]:
        """Let restores that are claimed and writes that are begun meanwhile have 10 ms."""
        owners: tuple[Any, ...] = (engine._restores, engine._saves)
        before = [owner._deadline_s for owner in owners]
        for owner in owners:
            owner._deadline_s = 0.01
        try:
            yield
        finally:
            for owner, deadline_s in zip(owners, before, strict=True):
                owner._deadline_s = deadline_s

    def expire(self, engine: Engine, restore: Restore) -> set[int]:
        """Let the deadline of a claimed restore pass now, however fast or slow the machine is.

        Returns the layers that are being copied at that moment.
        """
        with engine._events.lock:
            copied = {part.layer_index for span in restore.scattering for part in span.segments}
            assert restore.deadline is not None
            restore.deadline.cancel()
            engine._events.post(engine._restores._expire, restore)
            return copied

    def reopened(self, expected_reason: str | None) -> None:
        """Require how a reopen without a journal would go: a reason for cold, or None for warm."""
        reason = reason_without_journal(read_store(str(self.store)))
        self.states.append("warm" if reason is None else f"cold ({reason})")
        self.require(
            reason == expected_reason,
            f"a reopen is {expected_reason or 'warm'}, not {reason or 'warm'}",
        )

    def check_closed(self) -> None:
        """Require that a reopen would be warm, and that all it would show is right."""
        report = read_store(str(self.store))
        self.require(report.state == "warm", f"the closed store is warm ({report.reason})")
        self.require(report.tables is not None, "the closed store has an index")
        assert report.tables is not None
        assert report.geometry is not None
        wrong = self.oracle.check_tables(report.tables, report.geometry, self.read_pack)
        self.require(wrong is None, f"what the snapshot shows is what was saved: {wrong}")
        self.evidence.append(f"closed warm with {report.tables.token_count} tokens byte for byte")

    def read_pack(self, offset: int, length: int) -> bytes:
        """Read the pack file past the engine."""
        with open(self.store / "range.pack", "rb") as pack:
            pack.seek(offset)
            return pack.read(length)

    def rot(self, offset: int) -> None:
        """Flip one bit of the pack file as a disk does it: no time of the file changes."""
        place = self.store / "range.pack"
        before = place.stat()
        with open(place, "r+b") as pack:
            pack.seek(offset)
            byte = pack.read(1)[0]
            pack.seek(offset)
            pack.write(bytes([byte ^ 1 << self.random.randrange(8)]))
        os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))

    # -- requests ----------------------------------------------------------------------------------

    def key(self) -> RequestKey:
        """Return a request that nobody has used before."""
        return RequestKey(f"request-{next(self._requests)}", "replay-fault", 0)

    def prompt(
        self, like: Prompt | None = None, *, same_tokens: int = 0, token_count: int = PROMPT_TOKENS
    ) -> Prompt:
        """Return a new prompt whose first `same_tokens` tokens are those of `like`."""
        drawn = [self.random.randrange(1, 2**17) for _ in range(token_count)]
        tokens = np.array(drawn, dtype=np.uint32)
        if like is not None:
            tokens[:same_tokens] = like[:same_tokens]
            if same_tokens < min(len(like), token_count):
                tokens[same_tokens] = like[same_tokens] + 1
        return tokens

    def blocks_of(self, prompt: Prompt) -> int:
        """Return the number of whole blocks of a prompt."""
        return len(prompt) // self.model.block_tokens

    def take(self, block_count: int) -> BlockIds:
        """Take blocks of paged KV, poisoned and in no order."""
        self.require(block_count <= len(self._free_blocks), "the scene has enough blocks")
        taken = np.array(self._free_blocks[:block_count], dtype=np.int64)
        del self._free_blocks[:block_count]
        self.kv[:, taken] = POISON
        return taken

    def give(self, blocks: BlockIds) -> None:
        """Give blocks back, as a serving engine does: somebody else's bytes may come at once."""
        self.kv[:, blocks] = POISON
        self._free_blocks.extend(blocks.tolist())

    # -- saving ------------------------------------------------------------------------------------

    def produce(self, prompt: Prompt, blocks: BlockIds) -> None:
        """Compute the KV of the first len(blocks) blocks of a prompt."""
        for layer_index, layer in enumerate(self.kv):
            layer[blocks] = self.oracle.rows(prompt, layer_index, 0, len(blocks))

    def begin_save(self, engine: Engine, prompt: Prompt) -> tuple[Save, BlockIds]:
        """Open a save of a prompt with its KV in place; nothing is announced yet."""
        self.oracle.note_saved(prompt)
        save = engine.save(self.key(), prompt)
        self.require(save is not None, "a save of what the store lacks is accepted")
        assert save is not None
        blocks = self.take(self.blocks_of(prompt))
        self.produce(prompt, blocks)
        return save, blocks

    def announce(self, save: Save, blocks: BlockIds, *, layers: Any = None) -> None:
        """Announce all blocks of some layers (all where none is named)."""
        token_count = len(blocks) * self.model.block_tokens
        for layer_index in range(self.model.layer_count) if layers is None else layers:
            save.layer_ready(layer_index, (0, token_count), blocks)

    def save(self, engine: Engine, prompt: Prompt) -> bool:
        """Save a whole prompt; return whether it was published."""
        save, blocks = self.begin_save(engine, prompt)
        self.announce(save, blocks)
        save.extracted(self.patience_s)
        self.give(blocks)
        save.finish()
        published = save.wait(self.patience_s)
        if published:
            self.published.append(prompt)
        return published

    def saved(self, engine: Engine, **how: Any) -> Prompt:
        """Save a new prompt and require that it is published."""
        prompt = self.prompt(**how)
        self.require(self.save(engine, prompt), "a save without a fault is published")
        return prompt

    def fill(self, engine: Engine) -> None:
        """Save new prompts until everything that may be evicted has been."""
        for _ in range(20):
            self.save(engine, self.prompt(token_count=4 * PROMPT_TOKENS))

    # -- restoring ---------------------------------------------------------------------------------

    def lookup(self, engine: Engine, prompt: Prompt, **how: Any) -> Ticket:
        """Look a prompt up as a new request."""
        return engine.lookup(self.key(), prompt, **how)

    def hit(self, engine: Engine, prompt: Prompt) -> int:
        """Return how many tokens of a prompt the store promises now."""
        ticket = self.lookup(engine, prompt)
        engine.release(ticket)
        return ticket.token_count

    def claim(self, engine: Engine, ticket: Ticket, prompt: Prompt) -> tuple[Restore, BlockIds]:
        """Claim a ticket into fresh blocks."""
        size = self.model.block_tokens
        blocks = self.take((ticket.token_count - ticket.skip_tokens) // size)
        return engine.claim(ticket, prompt, blocks), blocks

    def started(self, engine: Engine, prompt: Prompt) -> tuple[Restore, BlockIds]:
        """Look up and claim all that is stored of a prompt."""
        return self.claim(engine, self.lookup(engine, prompt), prompt)

    def started_unread(self, engine: Engine, prompt: Prompt) -> tuple[Restore, BlockIds]:
        """Do the same before any of it is read: what a read finds comes after the claim."""
        hold = self.hold()
        self.files.on_read(hold, times=math.inf)
        try:
            return self.started(engine, prompt)
        finally:
            self.files.disarm(hold)
            hold.let_go()

    def delivered(self, restore: Restore) -> list[bool]:
        """Wait for every layer of a restore; return which of them were delivered."""
        layers = range(self.model.layer_count)
        return [restore.wait_layer(layer_index, self.patience_s) for layer_index in layers]

    def restore(self, engine: Engine, prompt: Prompt, **how: Any) -> int:
        """Restore what the store promises of a prompt, prove every byte, return the endpoint."""
        ticket = self.lookup(engine, prompt, **how)
        if ticket.token_count == 0:
            return 0
        restore, blocks = self.claim(engine, ticket, prompt)
        ready = self.delivered(restore)
        restore.finish()
        self.require(all(ready) and not restore.failed_blocks(), "every promised block arrives")
        self.require_delivered(prompt, blocks, first_token=ticket.skip_tokens)
        self.give(blocks)
        return ticket.token_count

    # -- what must hold ----------------------------------------------------------------------------

    def require_delivered(
        self, prompt: Prompt, blocks: BlockIds, *, first_token: int = 0, layers: Any = None
    ) -> None:
        """Require the KV of a prompt from `first_token` on in these blocks."""
        first = first_token // self.model.block_tokens
        for layer_index in range(self.model.layer_count) if layers is None else layers:
            wrong = self.oracle.check(prompt, layer_index, first, self.kv[layer_index][blocks])
            self.require(wrong is None, f"the saved KV is delivered: {wrong}")

    def require_untouched(self, blocks: BlockIds, layers: Any = None) -> None:
        """Require that nothing was delivered to these blocks."""
        chosen = self.kv if layers is None else self.kv[list(layers)]
        self.require(bool((chosen[:, blocks] == POISON).all()), "no byte reaches these blocks")

    def require_failed(self, restore: Restore, blocks: BlockIds) -> None:
        """Require that every block of a restore is reported as failed."""
        failed = sorted(restore.failed_blocks())
        self.require(failed == sorted(blocks.tolist()), "every block is reported as failed")

    def refused(self, code: str, call: Callable[[], object]) -> None:
        """Require that a call raises a RangeError of this code."""
        try:
            call()
        except RangeError as refused:
            self.evidence.append(f"refused: {refused.code}")
            self.require(refused.code == code, f"it is refused as {code}, not as {refused.code}")
        else:
            self.require(False, f"it is refused as {code}")

    def hold(self, then: Act = Call.go) -> Hold:
        """Return a place for calls to stand still in; it opens if the case fails."""
        self._holds.append(Hold(then))
        return self._holds[-1]

    def let_go(self) -> None:
        """Let everything go on that stands still."""
        for hold in self._holds:
            hold.let_go()

    def hold_copies(
        self, engine: Engine, kind: str, hold: Hold | None = None, *, skip: int = 0
    ) -> Hold:
        """Let copies (`scatter` or `gather`) stand still before they begin, but for the first."""
        hold = hold or self.hold()
        real, numbers = getattr(engine._device, kind), count()

        def held(*arguments: Any) -> Any:
            if next(numbers) >= skip:
                hold.stand()
            return real(*arguments)

        setattr(engine._device, kind, held)
        return hold

    @contextmanager
    def copies_through(
        self, engine: Engine, kind: str, faulty: Callable[..., Any]
    ) -> Iterator[None]:
        """Let `faulty` stand in the place of the device's `scatter` or `gather`."""
        real = getattr(engine._device, kind)
        setattr(engine._device, kind, faulty)
        try:
            yield
        finally:
            setattr(engine._device, kind, real)

    def require_waits(self, end: Callable[[], object], let_go: Callable[[], None]) -> None:
        """Require that `end` returns when something is let go, and not before."""
        begun, ended = threading.Event(), threading.Event()

        def run() -> None:
            begun.set()
            end()
            ended.set()

        threading.Thread(target=run, daemon=True).start()
        begun.wait()
        self.require(not ended.wait(0.02), "it waits for what is under way")
        let_go()
        self.require(ended.wait(self.patience_s), "it returns when that has ended")

    def until(self, engine: Engine, predicate: Callable[[], bool], what: str) -> None:
        """Wait for an event of the engine and require that it comes."""
        self.require(engine._events.wait_until(predicate, self.patience_s), what)

    def reached(self, hold: Hold) -> None:
        """Require that a call comes to stand in a hold."""
        self.require(hold.wait_reached(self.patience_s), "the call that is to be held comes")

    def closed(self, result: CloseResult, state: str) -> None:
        """Require how a close went."""
        self.states.append(f"closed {result.state}")
        self.require(result.state == state, f"the close is {state} ({result.detail})")

    def require(self, holds: bool, rule: str) -> None:
        """Raise Violation unless the rule holds."""
        if not holds:
            raise Violation(rule)
