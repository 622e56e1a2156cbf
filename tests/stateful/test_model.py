"""A store against a dictionary: whatever is saved, evicted, reopened or lost, they agree."""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.index.tickets import TicketState
from rangekv.engine.store import Store, create
from rangekv.engine.testing import checks
from rangekv.engine.testing.checks import BankWatch
from rangekv.engine.testing.faulty_files import FaultyFiles, error
from rangekv.engine.testing.machine import Machine, MachinePool
from rangekv.engine.testing.oracle import Oracle
from rangekv.engine.testing.scene import MODEL, NAMESPACE
from rangekv.format.errors import TicketError
from support.effort import LONG, effort

CAPACITY = 1 << 20  # four packs of 16 blocks in four layers
KV_BLOCKS = 64
BLOCK = MODEL.block_tokens
EXAMPLES, STEPS = effort(200, 5_000), effort(50, 100)


class StoreAgainstDictionary(RuleBasedStateMachine):
    """`held` is the naive store: the block prefixes that are visible, and nothing else."""

    prompts = Bundle("prompts")
    tickets = Bundle("tickets")

    # -- sessions ----------------------------------------------------------------------------------

    @initialize(seed=st.integers(0, 2**32 - 1))
    def begin(self, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="range-model-"))
        self.store_path = str(self.folder / "store")
        create(self.store_path, capacity_bytes=CAPACITY, model=MODEL, namespace=NAMESPACE)
        self.chance = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.oracle = Oracle(MODEL)
        self.held: set[int] = set()
        self.known: list[np.ndarray] = []
        self.open_tickets: list = []
        self.keys = 0
        self.patience_s, self.quarantined = 0.0, 0
        self.start("warm")

    def start(self, state: str) -> None:
        self.files, self.machine = FaultyFiles(), Machine(self.chance)
        store = Store.open(
            self.store_path,
            namespace=NAMESPACE,
            model=MODEL,
            files=self.files,
            lock_wait_s=0.0,
            allow_buffered=True,
        )
        config = EngineConfig(
            read_bank=256 << 10,
            save_bank=256 << 10,
            read_banks=3,
            save_banks=2,
            placement="banks",
            ticket_deadline_s=1e6,
        )
        self.engine = Engine(store, config, events=self.machine, pool_type=MachinePool)
        self.kv = np.full((MODEL.layer_count, KV_BLOCKS, MODEL.block_bytes), 0xDB, np.uint8)
        self.engine.attach(list(self.kv))
        self.watch = BankWatch(self.engine)
        assert self.engine.open_result.state == state, self.engine.open_result

    @rule()
    def reopen(self) -> None:
        """After a clean close everything is there, and nothing else."""
        self.end_tickets()
        assert self.engine.close(1.0).state == "clean"
        self.start("warm")
        self.agree()

    @precondition(lambda self: self.is_rich())
    @rule()
    def crash(self) -> None:
        """After a death nothing is there."""
        self.end_tickets()
        self.engine.store.abandon()
        self.held.clear()
        self.start("cold")
        self.agree()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            try:
                self.end_tickets()
                self.drain()
                checks.check_quiet(self.engine, self.oracle, self, self.watch)
                self.agree()
                assert self.engine.close(1.0).state == "clean"
            finally:
                shutil.rmtree(self.folder)

    def read_pack(self, offset: int, length: int) -> bytes:
        with open(f"{self.store_path}/range.pack", "rb") as pack:
            pack.seek(offset)
            return pack.read(length)

    # -- prompts -----------------------------------------------------------------------------------

    def fresh(self, count: int) -> np.ndarray:
        return self.numbers.integers(0, 1 << 17, count, dtype=np.uint32)

    def learn(self, tokens: np.ndarray) -> np.ndarray:
        self.known.append(tokens)
        return tokens

    @rule(target=prompts, count=st.integers(1, 8 * BLOCK))
    def new_prompt(self, count: int) -> np.ndarray:
        return self.learn(self.fresh(count))

    @rule(target=prompts, before=prompts, share=st.floats(0, 1), count=st.integers(1, 6 * BLOCK))
    def branch(self, before: np.ndarray, share: float, count: int) -> np.ndarray:
        """A prompt that shares the beginning of another: all of it, or up to any token."""
        same = len(before) if share > 0.5 else int(len(before) * 2 * share)
        return self.learn(np.concatenate([before[:same], self.fresh(count)])[: 16 * BLOCK])

    def stored(self, pick: int) -> np.ndarray:
        """Return a prompt of which something is held, or which goes on behind such a one."""
        found = [tokens for tokens in self.known if self.expected(tokens)]
        return found[pick % len(found)]

    def is_rich(self) -> bool:
        """Whether there is enough to lose: else nothing would ever be there to be found."""
        return len(self.held) > 12

    # -- the oracle --------------------------------------------------------------------------------

    def expected(self, tokens: np.ndarray) -> int:
        """Tokens that a lookup must promise: the longest prefix of which every block is held."""
        blocks = 0
        for generation in self.oracle.generations(tokens).tolist():
            if generation not in self.held:
                break
            blocks += 1
        return blocks * BLOCK

    def hit(self, tokens: np.ndarray) -> int:
        ticket = self.engine.lookup(self.key(), tokens)
        self.engine.release(ticket)
        return ticket.token_count

    def agree(self) -> None:
        for tokens in self.known:
            assert self.hit(tokens) == self.expected(tokens)

    def follow_evictions(self, before: int) -> None:
        """Where space was short the store has less than the dictionary, never more or other."""
        if self.engine._counters.evicted_bytes == before:
            return
        hits = [(tokens, self.hit(tokens)) for tokens in self.known]
        kept = set()
        for tokens, hit in hits:
            assert hit <= self.expected(tokens)
            kept.update(self.oracle.generations(tokens)[: hit // BLOCK].tolist())
        self.held &= kept
        for ticket, tokens in self.open_tickets:
            if ticket.state is TicketState.OPEN and ticket.valid():
                assert self.expected(tokens) >= ticket.token_count, "leased bytes were evicted"

    def key(self) -> RequestKey:
        self.keys += 1
        return RequestKey(f"request-{self.keys}", "model", 0)

    def drain(self) -> None:
        while self.machine.step():
            pass

    # -- saving ------------------------------------------------------------------------------------

    def saved(self, tokens: np.ndarray, blocks: int, end: str) -> None:
        """Save the first blocks of a prompt; `end` says how the save is ended."""
        expected, whole = self.expected(tokens), len(tokens) // BLOCK
        evicted, counters = self.engine._counters.evicted_bytes, self.engine._counters
        declined = sum(counters.saves_declined.values())
        self.oracle.note_saved(tokens)
        save = self.engine.save(self.key(), tokens)
        if save is None:
            assert sum(counters.saves_declined.values()) == declined + 1
            assert expected == whole * BLOCK or self.open_tickets, "a save that fits is accepted"
            self.follow_evictions(evicted)
            return
        assert save.start_token == expected
        ids = np.arange(whole)
        for layer in range(MODEL.layer_count):
            self.kv[layer][ids] = self.oracle.rows(tokens, layer, 0, whole)
            save.layer_ready(layer, (0, blocks * BLOCK), ids[:blocks])
        assert save.extracted(100.0) or end == "failed"
        self.kv[:] = 0xDB
        save.cancel() if end == "cancelled" else save.finish()
        published = save.wait(100.0)
        assert published == (end == "finished" and blocks * BLOCK > expected)
        if published:
            self.held.update(self.oracle.generations(tokens)[:blocks].tolist())
        self.follow_evictions(evicted)

    @rule(tokens=prompts)
    def save(self, tokens: np.ndarray) -> None:
        self.saved(tokens, len(tokens) // BLOCK, "finished")

    @rule(tokens=prompts, share=st.floats(0, 1))
    def save_a_part(self, tokens: np.ndarray, share: float) -> None:
        self.saved(tokens, int(len(tokens) // BLOCK * share), "finished")

    @rule(tokens=prompts)
    def cancel_a_save(self, tokens: np.ndarray) -> None:
        self.saved(tokens, len(tokens) // BLOCK, "cancelled")

    @rule(tokens=prompts)
    def fail_a_save(self, tokens: np.ndarray) -> None:
        if self.expected(tokens) < len(tokens) // BLOCK * BLOCK:
            self.files.on_write(error(errno.EIO))
            self.saved(tokens, len(tokens) // BLOCK, "failed")
            self.files.disarm()

    @precondition(lambda self: self.is_rich())
    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        """Save more than there is room for."""
        for _ in range(count):
            self.saved(self.learn(self.fresh(16 * BLOCK)), 16, "finished")

    @precondition(lambda self: self.is_rich())
    @rule(pick=st.integers(0))
    def retire(self, pick: int) -> None:
        """Forget a prompt: its first record goes, with all that hangs on it."""
        tokens = self.stored(pick)
        self.engine.retire(tokens)
        roots = self.oracle.generations(tokens)[:1].tolist()
        for other in self.known:
            generations = self.oracle.generations(other).tolist()
            if generations[:1] == roots:
                self.held.difference_update(generations)

    @precondition(lambda self: self.is_rich())
    @rule()
    def reset(self) -> None:
        self.engine.reset()
        self.held.clear()

    # -- restoring ---------------------------------------------------------------------------------

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0), limit=st.none() | st.integers(0, 200))
    def look_up_and_restore(self, pick: int, limit: int | None) -> None:
        tokens = self.stored(pick)
        ticket = self.engine.lookup(self.key(), tokens, max_tokens=limit)
        most = len(tokens) if limit is None else limit
        assert ticket.token_count == min(self.expected(tokens), most // BLOCK * BLOCK)
        if ticket.token_count:
            self.restored(ticket, tokens)

    def restored(self, ticket, tokens: np.ndarray) -> None:
        first, last = ticket.skip_tokens // BLOCK, ticket.token_count // BLOCK
        ids = self.numbers.permutation(KV_BLOCKS)[: last - first]
        restore = self.engine.claim(ticket, tokens, ids)
        for layer in range(MODEL.layer_count):
            assert restore.wait_layer(layer, 100.0)
            assert self.oracle.check(tokens, layer, first, self.kv[layer][ids]) is None
        restore.finish()
        self.kv[:] = 0xDB

    @precondition(lambda self: self.held and len(self.open_tickets) < 3)
    @rule(target=tickets, pick=st.integers(0), skip=st.integers(0, 3))
    def look_up(self, pick: int, skip: int):
        """Take a ticket to keep: its bytes stay, whatever is saved meanwhile."""
        tokens = self.stored(pick)
        expected = self.expected(tokens)
        ticket = self.engine.lookup(self.key(), tokens, skip_tokens=skip * BLOCK)
        assert ticket.token_count == (expected if expected > skip * BLOCK else 0)
        if ticket.token_count:
            self.open_tickets.append((ticket, tokens))
        return ticket, tokens

    @rule(one=tickets)
    def claim(self, one) -> None:
        ticket, tokens = one
        if not any(ticket is other for other, _ in self.open_tickets):
            return
        self.open_tickets = [(t, p) for t, p in self.open_tickets if t is not ticket]
        if ticket.valid():
            self.restored(ticket, tokens)
            return
        count = (ticket.token_count - ticket.skip_tokens) // BLOCK
        try:
            self.engine.claim(ticket, tokens, np.arange(count))
        except TicketError as refused:
            assert refused.code == "stale-ticket"  # noqa: PT017 (most claims are not refused)
        else:
            raise AssertionError("a stale ticket was accepted")

    @rule(one=tickets)
    def release(self, one) -> None:
        ticket, _ = one
        if any(ticket is other for other, _ in self.open_tickets):
            self.engine.release(ticket)
            self.open_tickets = [(t, p) for t, p in self.open_tickets if t is not ticket]

    def end_tickets(self) -> None:
        for ticket, _ in self.open_tickets:
            self.engine.release(ticket)
        self.open_tickets = []

    # -- always ------------------------------------------------------------------------------------

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.drain()
        assert self.machine.fault is None
        assert len(self.engine._catalog.leases.open) == len(self.open_tickets)
        if not self.open_tickets:
            checks.check_space(self.engine)
        self.watch.look()


def test_a_store_and_a_dictionary_agree(figure):
    run_state_machine_as_test(
        StoreAgainstDictionary,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=not LONG,
            suppress_health_check=list(HealthCheck),
        ),
    )
    figure(
        "store against dictionary",
        f"{EXAMPLES} histories of up to {STEPS} steps (pytest tests/stateful/test_model.py)",
    )
