"""What a store was told to keep, and from which operation on every crash must show it.

Owns the oracle's own idea of a journal: it looks at what is said to the store and at the trace,
never at what a reader makes of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rangekv.engine.folder import JOURNAL, SNAPSHOT, TEMP_PREFIX
from rangekv.engine.store import CloseResult, Store
from rangekv.engine.testing.crash.operations import (
    Kept,
    Log,
    Move,
    Operation,
    Sync,
    SyncDirectory,
    Write,
)
from rangekv.engine.testing.crash.oracle import TOKEN_BYTES, Blocks, Oracle, prompts
from rangekv.format.entries import NO_PARENT_ID, Entry, Publish, Reset, Retire, RetireRecord
from rangekv.format.records import NO_PARENT
from rangekv.format.tables import Tables

JOURNAL_TEMP = f"{TEMP_PREFIX}journal."  # the name under which its writer has it open


@dataclass(frozen=True, slots=True)
class _Record:
    parent_id: int
    generation: int
    prompt: bytes
    """All tokens up to its end."""
    token_start: int


_State = dict[int, _Record]


class Told:
    """The records that a session's snapshot and commits name, kept up while it lasts.

    It listens to one store with a journal, opened a moment ago with `tables`. A record that left
    the session's index without a word counts as kept: its bytes stay until its extent is said to
    be over.
    """

    def __init__(self, store: Store, tables: Tables, oracle: Oracle, log: Log) -> None:
        self._oracle = oracle
        self._log = log
        self._state = self._of(tables)
        self._before = self._state
        """Without the last commit, which could rot."""
        self._keep(len(log.operations), self._state, self._state)
        self._commit, self._checkpoint, self._close = store.commit, store.checkpoint, store.close
        store.commit = self._on_commit  # type: ignore[method-assign]
        store.checkpoint = self._on_checkpoint  # type: ignore[method-assign]
        store.close = self._on_close  # type: ignore[method-assign]

    @property
    def blocks(self) -> Blocks:
        """What is kept now."""
        return self._blocks(self._state)

    def _on_commit(self, said: Sequence[Entry], generation_max: int, *, last: bool = False) -> bool:
        begin, old = len(self._log.operations), self._state
        new = self._after(old, said)
        if not self._commit(said, generation_max, last=last):
            return self._given_up(begin)
        write = self._find(begin, lambda one: isinstance(one, Write) and _of_journal(one.name))
        sync = self._find(write, lambda one: isinstance(one, Sync) and _of_journal(one.name))
        self._keep(write, _both(old, new), _both(self._before, old))
        self._state, self._before = new, old
        self._keep(sync, new, old)
        return True

    def _on_checkpoint(self, tables: Tables) -> bool:
        begin = len(self._log.operations)
        if not self._checkpoint(tables):
            return self._given_up(begin)
        self._published(begin, tables)
        self._keep(len(self._log.operations), self._state, self._state)
        return True

    def _on_close(self, tables: Tables | None) -> CloseResult:
        begin = len(self._log.operations)
        result = self._close(tables)
        if result.state == "clean" and tables is not None:
            self._published(begin, tables)
        return result

    def _published(self, begin: int, tables: Tables) -> None:
        """A snapshot took the place of the one before and of what the journal said."""
        new = self._of(tables)
        name = self._find(begin, lambda one: isinstance(one, Move) and one.target == SNAPSHOT)
        sync = self._find(name, lambda one: isinstance(one, SyncDirectory))
        # From here on only one copy of the superblock has the epoch of what lies on disk.
        self._keep(name, _both(self._state, new), _both(self._before, new), either_slot=False)
        self._state = self._before = new
        self._keep(sync, new, new, either_slot=False)

    def _given_up(self, begin: int) -> bool:
        self._state = self._before = {}
        self._keep(begin, {}, {})
        return False

    def _keep(
        self, done: int, state: _State, without_last: _State, *, either_slot: bool = True
    ) -> None:
        kept = Kept(self._blocks(state), self._blocks(without_last), either_slot)
        self._log.note_at(done, kept)

    def _find(self, begin: int, wanted: Callable[[Operation], bool]) -> int:
        """Return how many operations are done with the first such one; all, if there is none."""
        operations = self._log.operations
        at = next((at for at in range(begin, len(operations)) if wanted(operations[at])), None)
        return len(operations) if at is None else at + 1

    def _of(self, tables: Tables) -> _State:
        state: _State = {}
        for record, prompt in prompts(tables):
            parent_id = NO_PARENT_ID
            if record.parent != NO_PARENT:
                parent_id = tables.records[record.parent].record_id
            generation = tables.extents[record.extent].generation
            state[record.record_id] = _Record(parent_id, generation, prompt, record.token_start)
        return state

    def _blocks(self, state: _State) -> Blocks:
        found: Blocks = frozenset()
        for record in state.values():
            found |= self._oracle.blocks_of(record.prompt) - self._oracle.blocks_of(
                record.prompt[: record.token_start * TOKEN_BYTES]
            )
        return found

    def _after(self, state: _State, said: Sequence[Entry]) -> _State:
        state = dict(state)
        for entry in said:
            if isinstance(entry, Reset):
                state.clear()
            elif isinstance(entry, RetireRecord):
                _take_out(state, set(entry.record_ids))
            elif isinstance(entry, Retire):
                over = {at for at, one in state.items() if one.generation in entry.generations}
                _take_out(state, over)
            elif isinstance(entry, Publish):
                for record_id, record in self._named(entry, state):
                    place = self._place(record)
                    _take_out(state, {at for at, one in state.items() if self._place(one) == place})
                    state[record_id] = record
        return state

    def _named(self, entry: Publish, state: _State) -> Iterator[tuple[int, _Record]]:
        """Yield the records of a PUBLISH one by one; `state` has those before."""
        tokens = memoryview(entry.tokens).cast("B")
        for row in entry.records:
            own = bytes(tokens[: row.token_count * TOKEN_BYTES])
            tokens = tokens[len(own) :]
            above = b""
            if row.parent_id != NO_PARENT_ID:
                above = state[row.parent_id].prompt[: row.token_start * TOKEN_BYTES]
            record = _Record(row.parent_id, row.generation, above + own, row.token_start)
            yield row.record_id, record

    def _place(self, record: _Record) -> tuple[int, bytes]:
        """Where a record hangs: two that begin alike cannot both be found."""
        end = record.token_start + self._oracle.model.block_tokens
        return record.parent_id, record.prompt[: end * TOKEN_BYTES]


def _take_out(state: _State, record_ids: set[int]) -> None:
    """Remove records with all that continues them."""
    while record_ids:
        for record_id in record_ids:
            state.pop(record_id, None)
        record_ids = {at for at, one in state.items() if one.parent_id in record_ids}


def _both(one: _State, other: _State) -> _State:
    return {record_id: record for record_id, record in one.items() if record_id in other}


def _of_journal(name: str) -> bool:
    return name == JOURNAL or name.startswith(JOURNAL_TEMP)
