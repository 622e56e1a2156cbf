"""What is recorded for an exploration: the real engine on a store, from its creation on.

Owns the courses of events; each runs on any watched seam.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import numpy.typing as npt
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.folder import PACK
from rangekv.engine.index import image as index_image
from rangekv.engine.index.directory import Record
from rangekv.engine.inspection import read_store
from rangekv.engine.pruning import prune
from rangekv.engine.removal import remove_namespace
from rangekv.engine.store import reformat
from rangekv.engine.testing.crash.operations import Closed, Dropped, Kept, Removing
from rangekv.engine.testing.crash.oracle import TOKEN_BYTES, Blocks, Oracle
from rangekv.engine.testing.crash.seam import WatchedFiles
from rangekv.engine.testing.crash.stage import (
    MODEL,
    NAMESPACE,
    OTHER_NAMESPACE,
    UNALIGNED_MODEL,
    Placing,
    Stage,
)
from rangekv.engine.testing.crash.told import JOURNAL_TEMP, Told
from rangekv.format.entries import Entry
from rangekv.format.errors import ensure
from rangekv.format.geometry import ModelGeometry
from rangekv.format.namespace import Namespace
from rangekv.format.tables import Tables

DEADLINE_S = 20.0
KV_BLOCKS = 48


@dataclass(slots=True)
class Session:
    """One engine on the store, with paged KV to save from and restore into."""

    engine: Engine
    files: WatchedFiles
    oracle: Oracle
    layers: list[npt.NDArray[np.uint8]]
    requests: Iterator[int] = field(default_factory=count)
    told: Told | None = None
    """What must survive, where the session keeps a journal."""

    @classmethod
    def open(
        cls,
        stage: Stage,
        files: WatchedFiles,
        oracle: Oracle,
        namespace: Namespace = NAMESPACE,
        recovery: str = "journal",
    ) -> Session:
        """Start an engine of one thread and one bank each, so that a trace repeats itself."""
        engine = Engine.open(
            stage.locate(files, namespace),
            namespace=namespace,
            geometry=stage.model,
            config=EngineConfig(
                read_banks=1,
                save_banks=1,
                read_workers=1,
                lock_wait_s=0.0,
                placement="banks",
                allow_buffered=True,
                recovery=recovery,
                commit_interval_s=3600,  # by request only
            ),
            files=files,
        )
        model = stage.model
        layers = [
            np.zeros((KV_BLOCKS, model.block_bytes), np.uint8) for _ in range(model.layer_count)
        ]
        engine.attach(layers)
        told = None
        if engine.store.journal is not None:
            told = Told(engine.store, index_image.dump(engine._catalog), oracle, files.log)
        return cls(engine, files, oracle, layers, told=told)

    def save(self, prompt: bytes) -> None:
        """Save what the store lacks of a prompt and wait until it is visible."""
        rows = self._rows(prompt)
        for layer_index, layer in enumerate(self.layers):
            for row in rows:
                kv = self.oracle.kv(self.oracle.prefix(prompt, int(row) + 1), layer_index)
                layer[row] = np.frombuffer(kv, dtype=np.uint8)
        save = self.engine.save(self._key(), prompt)
        assert save is not None, "a save of the recording was declined"
        token_count = len(rows) * self.oracle.model.block_tokens
        for layer_index in range(len(self.layers)):
            save.layer_ready(layer_index, (0, token_count), rows)
        save.extracted(DEADLINE_S)
        save.finish()
        ensure(save.wait(DEADLINE_S), "a save of the recording was not published")

    def commit(self) -> None:
        """Make what is visible survive every crash from here on."""
        ensure(self.engine.commit(DEADLINE_S), "a commit of the recording failed")
        assert self.told is not None
        ensure(self.blocks() <= self.told.blocks, "a commit left out what is visible")

    def fail_to_commit(self, name: str) -> None:
        """Let the sync of the pack file or of the journal fail: there is no journal any more."""
        self.files.fail_sync_of = name
        ensure(not self.engine.commit(DEADLINE_S), "a commit without its sync succeeded")

    def retire(self, prompt: bytes) -> None:
        """Forget a prompt and what continues it, for good once a commit and a next one return."""
        shown = self.blocks()
        self.engine.retire(prompt)
        gone = shown - self.blocks()
        self.commit()
        self.commit()  # the last one could rot
        self.files.log.note(Dropped(gone))

    def reset(self, saving: bytes) -> None:
        """Forget everything for good; the commit that says so has `saving` too."""
        shown = self.blocks()
        settle = self.engine._commits.settle

        def settle_later(event: int) -> None:
            self.save(saving)
            self.commit()
            settle(event)

        self.engine._commits.settle = settle_later  # type: ignore[method-assign]
        try:
            self.engine.reset()
        finally:
            self.engine._commits.settle = settle  # type: ignore[method-assign]
        self.files.log.note(Dropped(shown))

    def evict(self, prompt: bytes) -> None:
        """Take out the last record of a prompt to make room; its extent goes on with the others.

        No commit says so, and a crash brings it back.
        """
        assert self.told is not None
        with self.engine._events.lock:
            self.engine._catalog.retire(self._records(prompt)[-1])
        self.commit()
        ensure(self.blocks() < self.told.blocks, "an eviction took a whole extent")

    def checkpoint(self, *, visible: bytes, saving: bytes, evicting: bytes) -> None:
        """Commit and begin a new journal.

        `visible` is saved after the commit and before the cut; between the cut and the sync of the
        pack file `saving` is saved, and `evicting` leaves with the space that it takes.
        """
        engine, store, commits = self.engine, self.engine.store, self.engine._commits
        commit, checkpoint, limit = store.commit, store.checkpoint, commits.checkpoint_bytes

        def on_commit(said: Sequence[Entry], generation_max: int, *, last: bool = False) -> bool:
            done = commit(said, generation_max, last=last)
            self.save(visible)
            return done

        def on_checkpoint(tables: Tables) -> bool:
            self.save(saving)
            with engine._events.lock:
                engine._catalog.retire(self._records(evicting)[0])
            store.commit, store.checkpoint = commit, checkpoint  # type: ignore[method-assign]
            commits.checkpoint_bytes = limit
            return checkpoint(tables)

        store.commit, store.checkpoint = on_commit, on_checkpoint  # type: ignore[method-assign]
        commits.checkpoint_bytes = 0
        epoch = store.epoch
        ensure(engine.commit(DEADLINE_S), "a commit before a checkpoint failed")
        self.commit()  # comes after the checkpoint
        ensure(store.epoch == epoch + 1, "no checkpoint was made")

    @contextmanager
    def leased(self, prompt: bytes) -> Iterator[None]:
        """Hold a ticket: while it is open no byte that it promises is written over."""
        ticket = self.engine.lookup(self._key(), prompt)
        try:
            yield
        finally:
            self.engine.release(ticket)

    def restore(self, prompt: bytes) -> int:
        """Restore what the store promises of a prompt; raises WrongKv for a block that is not it.

        Returns how many promised blocks were not delivered.
        """
        ticket = self.engine.lookup(self._key(), prompt)
        block_count = ticket.token_count // self.oracle.model.block_tokens
        if block_count == 0:
            return 0
        restore = self.engine.claim(ticket, prompt, np.arange(block_count))
        for layer_index in range(len(self.layers)):
            restore.wait_layer(layer_index, DEADLINE_S)
        failed = {int(block) for block in restore.failed_blocks()}
        restore.finish()
        for block in set(range(block_count)) - failed:
            prefix = self.oracle.prefix(prompt, block + 1)
            self.oracle.check_block(prefix, [layer[block] for layer in self.layers])
        return len(failed)

    def blocks(self) -> Blocks:
        """Return the blocks of all prompts that the engine would promise now."""
        found: Blocks = frozenset()
        for prompt in self.oracle.prompts:
            ticket = self.engine.lookup(self._key(), prompt)
            found |= self.oracle.blocks_of(prompt[: ticket.token_count * TOKEN_BYTES])
            self.engine.release(ticket)
        return found

    def close(self) -> None:
        """Close, and note what a reopen must show if the close was clean."""
        blocks = self.blocks()
        if self.engine.close(DEADLINE_S).state == "clean":
            self.files.log.note(Closed(blocks))

    def die(self) -> None:
        """End the process without a close."""
        self.engine._commits.close()  # a dead one's last commit would only complain
        self.files.die()
        self.engine.close(DEADLINE_S)

    def _records(self, prompt: bytes) -> list[Record]:
        directory = self.engine._catalog.directory
        path = directory.walk(0, memoryview(prompt), len(prompt) // TOKEN_BYTES)
        return [match.record for match in path]

    def _rows(self, prompt: bytes) -> npt.NDArray[np.int64]:
        return np.arange(len(prompt) // TOKEN_BYTES // self.oracle.model.block_tokens)

    def _key(self) -> RequestKey:
        return RequestKey(f"request-{next(self.requests)}", "crash", 0)


@dataclass(slots=True)
class Play:
    """A scenario on its way: every session is a new process on the same files."""

    stage: Stage
    oracle: Oracle
    process: Callable[[], WatchedFiles]

    @contextmanager
    def session(self, namespace: Namespace = NAMESPACE, recovery: str = "") -> Iterator[Session]:
        """Open an engine and close it at the end, unless it has died; journal as recoveries do."""
        recovery = recovery or ("journal" if self.stage.recovers else "discard")
        files = self.process()
        kept = files.log.kept
        files.log.note(Kept(kept.blocks, kept.without_last) if recovery == "journal" else Kept())
        session = Session.open(self.stage, files, self.oracle, namespace, recovery)
        try:
            yield session
        finally:
            if not session.files.dead:
                session.close()

    def reformat(self, namespace: Namespace = NAMESPACE) -> None:
        """Empty the store under `namespace`."""
        files = self.process()
        files.log.note(Kept())
        reformat(
            self.stage.locate(files),
            model=self.stage.model,
            namespace=namespace,
            files=files,
            lock_wait_s=0,
        )
        files.log.note(Closed(frozenset()))

    def drop(self, prompt: bytes, *, after: bytes = b"") -> None:
        """Take out the record that continues `after` up to the end of `prompt`, and what follows.

        A tenant's root goes the same way: its records are the ones that are chosen.
        """
        files, oracle = self.process(), self.oracle
        report = read_store(self.stage.locate(files), files)
        before = oracle.blocks_of(after)
        own = oracle.blocks_of(prompt) - before
        followers = [blocks for blocks in map(oracle.blocks_of, oracle.prompts) if blocks & own]
        shown = oracle.shown(report.tables)
        gone = shown & frozenset[bytes]().union(*followers) - before
        ensure(own <= gone < shown, "the recording drops what is not there, or all there is")
        left = shown - gone
        kept = files.log.kept
        files.log.note(Kept(kept.blocks - gone, kept.without_last - gone))
        prune(report, lambda tables: oracle.rows(tables, prompt), files)
        files.log.note(Dropped(gone))
        files.log.note(Closed(left))
        if self.stage.recovers:
            files.log.note(Kept(left, left))

    def remove(self) -> None:
        """Remove the namespace with its store, and preallocate another one."""
        files = self.process()
        path = self.stage.locate(files)
        shown = self.oracle.shown(read_store(path, files).tables)
        files.log.note(Removing())
        remove_namespace(os.path.dirname(path), files)
        files.log.note(Dropped(shown))
        self.stage.create(files)


@dataclass(frozen=True, slots=True)
class Scenario:
    """One course of events; `name` is what the command line calls it."""

    name: str
    play: Callable[[Play], None]
    model: ModelGeometry = MODEL
    placing: Placing = Placing.BOUND
    reformats: bool = False
    """Whether every recovery begins with a reformat."""
    recovers: bool = False
    """Whether recoveries keep what a journal proves."""
    rots: bool = False
    """Whether the first crash also damages the medium."""


def serve(play: Play) -> None:
    """Save, close, reopen, grow a record in place, leave it in a branch, close."""
    prompt = play.oracle.prompt
    first = prompt("first", 4)
    with play.session() as session:
        session.save(first)
        session.save(prompt("second", 3))
    with play.session() as session:
        session.restore(first)
        session.save(prompt("first, next turn", 3, after=first))
        session.save(prompt("branch", 2, after=play.oracle.prefix(first, 2)))


def evict(play: Play) -> None:
    """Fill the store, evict, die, reopen cold, save over old space, close, reopen."""
    prompt = play.oracle.prompt
    with play.session() as session:
        for number in range(7):
            session.save(prompt(f"filling {number}", 2))
    with play.session() as session:
        session.restore(prompt("filling 0", 2))
        session.save(prompt("evicting", 20))
    with play.session() as session:
        session.save(prompt("evicting again", 3))
        session.die()
    last = prompt("after death", 3)
    with play.session() as session:
        session.save(last)
    with play.session() as session:
        session.restore(last)


def reformats(play: Play) -> None:
    """Save, close, reformat, save again, die, reformat under another namespace, save, close."""
    prompt = play.oracle.prompt
    with play.session() as session:
        session.save(prompt("before", 3))
        session.save(prompt("before too", 2))
    play.reformat()
    with play.session() as session:
        session.save(prompt("between", 3))
        session.die()
    play.reformat(OTHER_NAMESPACE)
    with play.session(OTHER_NAMESPACE) as session:
        session.save(prompt("after", 2))


def failed_sync(play: Play) -> None:
    """Save, fail to sync at the close, reopen cold, save again, close."""
    prompt = play.oracle.prompt
    with play.session() as session:
        session.save(prompt("kept", 2))
    with play.session() as session:
        session.save(prompt("unsynced", 3))
        session.files.fail_sync_of = PACK
    with play.session() as session:
        session.save(prompt("afterwards", 2))


def drop(play: Play) -> None:
    """Save, drop a later turn, save over its room, drop a prompt with its branch, save, close."""
    prompt = play.oracle.prompt
    first, other = prompt("first", 2), prompt("other", 2)
    longer = prompt("first, next turn", 2, after=first)
    with play.session() as session:
        session.save(first)
        session.save(longer)
        session.save(prompt("branch", 2, after=play.oracle.prefix(first, 1)))
        session.save(other)
    play.drop(longer, after=first)
    with play.session() as session:
        session.save(prompt("in its room", 3))
    play.drop(first)
    with play.session() as session:
        session.restore(other)
        session.save(prompt("last", 2))


def drop_namespace(play: Play) -> None:
    """Save, close, remove the namespace, preallocate again, save, close."""
    prompt = play.oracle.prompt
    with play.session() as session:
        session.save(prompt("before", 2))
    play.remove()
    with play.session() as session:
        session.save(prompt("afterwards", 2))


def journal_once(play: Play) -> None:
    """Save, commit, die, recover, close."""
    first = play.oracle.prompt("first", 1)
    with play.session() as session:
        session.save(first)
        session.commit()
        session.die()
    with play.session() as session:
        session.restore(first)


def journal_grow(play: Play) -> None:
    """Save, commit, grow in place, commit, evict what was grown, save it again, commit, die,
    recover, branch, die uncommitted, recover.
    """
    prompt = play.oracle.prompt
    first = prompt("first", 2)
    grown = prompt("first, next turn", 2, after=first)
    with play.session() as session:
        session.save(first)
        session.commit()
        session.save(grown)
        session.commit()
        session.evict(grown)
        session.save(grown)
        session.commit()
        session.die()
    with play.session() as session:
        session.restore(grown)
        session.save(prompt("branch", 2, after=play.oracle.prefix(first, 1)))
        session.commit()
        session.save(prompt("uncommitted", 2))
        session.die()
    with play.session() as session:
        session.restore(grown)


def journal_evict(play: Play) -> None:
    """Fill the store, commit, write listed space again, die, recover, evict again, close."""
    prompt = play.oracle.prompt
    with play.session() as session:
        for number in range(7):
            session.save(prompt(f"filling {number}", 2))
        session.commit()
        session.save(prompt("evicting", 12))
        session.commit()
        session.die()
    with play.session() as session:
        session.save(prompt("evicting again", 10))


def journal_forget(play: Play) -> None:
    """Commit, retire under a lease with descendants, reset, save again, die, recover, close."""
    prompt = play.oracle.prompt
    first = prompt("first", 2)
    longer = prompt("first, next turn", 2, after=first)
    other = prompt("other", 2)
    with play.session() as session:
        session.save(first)
        session.save(longer)
        session.save(other)
        session.commit()
        with session.leased(longer):
            session.retire(first)
        between = prompt("between", 2)
        session.save(between)
        session.commit()
        with session.leased(other), session.leased(between):
            session.reset(saving=prompt("meanwhile", 2))
        session.save(prompt("after", 3))
        session.commit()
        session.die()
    with play.session() as session:
        session.save(prompt("last", 2))


def journal_discard(play: Play) -> None:
    """Commit, die, open without a journal, save over it, die, recover, reformat, commit, close."""
    prompt = play.oracle.prompt
    with play.session() as session:
        session.save(prompt("kept", 2))
        session.commit()
        session.die()
    with play.session(recovery="discard") as session:
        session.save(prompt("without", 3))
        session.die()
    with play.session() as session:
        session.save(prompt("with", 2))
        session.commit()
        session.die()
    play.reformat()
    with play.session() as session:
        session.save(prompt("after", 2))
        session.commit()


def journal_drop(play: Play) -> None:
    """Save, commit, die, drop a later turn of what a recovery keeps, save over its room, close."""
    prompt = play.oracle.prompt
    first = prompt("first", 1)
    longer = prompt("first, next turn", 1, after=first)
    with play.session() as session:
        session.save(first)
        session.save(longer)
        session.commit()
        session.die()
    play.drop(longer, after=first)
    with play.session() as session:
        session.save(prompt("in its room", 1))


def journal_failed(play: Play) -> None:
    """Commit, fail to sync the journal, write listed space again, die; save, fail to sync the pack
    file, close; save.
    """
    prompt = play.oracle.prompt
    first = prompt("first", 2)
    with play.session() as session:
        session.save(first)
        session.commit()
        session.save(prompt("unlisted", 1))
        session.fail_to_commit(JOURNAL_TEMP)
        session.engine.retire(first)
        session.save(prompt("over the first", 2))
        session.die()
    with play.session() as session:
        session.save(prompt("second", 1))
        session.commit()
        session.save(prompt("unsynced", 1))
        session.fail_to_commit(PACK)
    with play.session() as session:
        session.restore(first)


def journal_checkpoint(play: Play) -> None:
    """Commit, begin a new journal under load, write space of before again, twice; die, recover."""
    prompt = play.oracle.prompt
    first, second = prompt("first", 2), prompt("second", 2)
    with play.session() as session:
        session.save(first)
        session.checkpoint(visible=second, saving=prompt("meanwhile", 2), evicting=first)
        session.save(prompt("over the first", 2))
        session.commit()
        session.checkpoint(
            visible=prompt("third", 2), saving=prompt("meanwhile too", 2), evicting=second
        )
        session.die()
    with play.session() as session:
        session.save(prompt("last", 2))


SCENARIOS: tuple[Scenario, ...] = (
    Scenario("serve", serve),
    Scenario("serve-unaligned", serve, model=UNALIGNED_MODEL),
    Scenario("evict", evict),
    Scenario("bind", serve, placing=Placing.BELOW_BLANK),
    Scenario("bind-in-place", serve, placing=Placing.BLANK),
    Scenario("reformat", reformats),
    Scenario("reformat-the-crashed", serve, reformats=True),
    Scenario("failed-sync", failed_sync),
    Scenario("drop", drop),
    Scenario("drop-namespace", drop_namespace, placing=Placing.BELOW_BLANK),
)

JOURNAL_SCENARIOS: tuple[Scenario, ...] = (
    Scenario("journal-once", journal_once, recovers=True, rots=True),
    Scenario("journal-grow", journal_grow, recovers=True, rots=True),
    Scenario("journal-evict", journal_evict, recovers=True, rots=True),
    Scenario("journal-forget", journal_forget, recovers=True, rots=True),
    Scenario("journal-discard", journal_discard, recovers=True, rots=True),
    Scenario("journal-drop", journal_drop, recovers=True, rots=True),
    Scenario("journal-failed", journal_failed, recovers=True, rots=True),
    Scenario("journal-checkpoint", journal_checkpoint, recovers=True, rots=True),
    Scenario("journal-bind", journal_once, placing=Placing.BELOW_BLANK, recovers=True, rots=True),
)
