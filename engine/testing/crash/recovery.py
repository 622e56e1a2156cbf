"""What a process does that finds the disk as a crash left it: open, save over old space, close.

Owns a session without threads on the real store and catalog; its payload goes through the file
seam in one write a layer, as the engine's does.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
from rangekv.engine.index import image as index_image
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.directory import Record
from rangekv.engine.stats import Counters
from rangekv.engine.store import Store
from rangekv.engine.testing.crash.disk_files import DiskFiles
from rangekv.engine.testing.crash.image import Content
from rangekv.engine.testing.crash.operations import Closed
from rangekv.engine.testing.crash.oracle import TOKEN_BYTES, Oracle
from rangekv.engine.testing.crash.scenarios import Session
from rangekv.engine.testing.crash.stage import Stage
from rangekv.engine.testing.crash.told import Told
from rangekv.format.entries import Entry
from rangekv.format.errors import ensure
from rangekv.format.geometry import ALIGNMENT
from rangekv.format.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Reopened:
    """A store as the process found it, and the pack file at that moment."""

    store: Store
    pack: Content

    @property
    def reason(self) -> str | None:
        """Why the open was cold; None when it was warm."""
        return self.store.open_result.reason

    @property
    def records(self) -> int:
        """How many records it shows."""
        return 0 if self.store.tables is None else len(self.store.tables.records)


def reopen(stage: Stage, files: DiskFiles) -> Reopened:
    """Open the store; raises Lost and the store's own errors."""
    store = stage.open(files)
    return Reopened(store, files.content(store.pack_fd))


def carry_on(reopened: Reopened, files: DiskFiles, oracle: Oracle, name: str) -> None:
    """Retire something old, save two prompts, one of them in two turns, and close.

    A session with a journal commits after each save, and before it writes space again.
    """
    store, log = reopened.store, files.disk.log
    catalog = Catalog(store.geometry, Counters())
    if store.tables is not None:
        index_image.load(catalog, store.tables)
    told = None
    if store.journal is not None:
        catalog.ledger.active = True
        told = Told(store, index_image.dump(catalog), oracle, log)
    for record in catalog.directory.top()[:1]:
        catalog.retire(record)
    first_turn = oracle.prompt(f"{name} first turn", 2)
    for prompt in (
        first_turn,
        oracle.prompt(f"{name} other", 3),
        oracle.prompt(f"{name} second turn", 2, after=first_turn),
    ):
        _save(store, catalog, files, oracle, prompt)
        if told is not None:
            _commit(store, catalog)
            shown = oracle.shown(index_image.dump(catalog))
            ensure(shown <= told.blocks, "a commit left out what is visible")
    tables = index_image.dump(catalog)
    blocks = oracle.shown(tables)
    if store.close(tables).state == "clean":
        log.note(Closed(blocks))


def restore_all(stage: Stage, files: DiskFiles, oracle: Oracle, namespace: Namespace) -> int:
    """Restore every prompt through an engine that verifies payload, and die.

    Returns how many promised blocks were not delivered; raises WrongKv if one is not what was
    saved.
    """
    session = Session.open(stage, files, oracle, namespace)
    try:
        return sum(session.restore(prompt) for prompt in oracle.prompts)
    finally:
        session.die()


def _save(store: Store, catalog: Catalog, files: DiskFiles, oracle: Oracle, prompt: bytes) -> None:
    reservation = catalog.reserve(0, memoryview(prompt), 0, len(prompt) // TOKEN_BYTES)
    if isinstance(reservation, str):
        return
    after = max(part.extent.writable_after for part in reservation.parts)
    while not catalog.ledger.reusable(after):
        _commit(store, catalog, over_only=True)
    hashes = []
    for part in reservation.parts:
        catalog.raise_append_mark(part, part.token_start + part.token_count)
        layers = [
            _part_bytes(store, oracle, prompt, part, n) for n in range(oracle.model.layer_count)
        ]
        for layer_index, data in enumerate(layers):
            _write(store, files, part, layer_index, data)
        hashes.append(np.stack([_page_hashes(store, data) for data in layers]))
    catalog.publish(reservation, reservation.token_end, hashes)
    catalog.settle(reservation)


def _commit(store: Store, catalog: Catalog, *, over_only: bool = False) -> None:
    cut = catalog.ledger.cut(over_only=over_only)
    said: list[Entry] = list(cut.over)
    if cut.published:
        said.append(index_image.publication(catalog, cut.published))
    ensure(store.commit(said, catalog.extents.generation_max), "a commit of a recovery failed")
    catalog.ledger.committed(cut)


def _part_bytes(
    store: Store, oracle: Oracle, prompt: bytes, part: Record, layer_index: int
) -> bytes:
    step = store.geometry.block_tokens
    ends = range(part.token_start + step, part.token_start + part.token_count + 1, step)
    return b"".join(oracle.kv(prompt[: end * TOKEN_BYTES], layer_index) for end in ends)


def _write(store: Store, files: DiskFiles, part: Record, layer_index: int, data: bytes) -> None:
    length = -(-len(data) // ALIGNMENT) * ALIGNMENT
    offset = store.geometry.address(
        part.extent.offset, part.extent.width, layer_index, part.extent_token_start
    )
    with mmap.mmap(-1, length) as buffer:  # aligned, as direct I/O wants it
        buffer[: len(data)] = data
        files.pwritev(store.pack_fd, [buffer], offset)


def _page_hashes(store: Store, data: bytes) -> npt.NDArray[np.uint64]:
    page = store.geometry.page_bytes
    return np.array(
        [xxhash.xxh3_64_intdigest(data[at : at + page]) for at in range(0, len(data), page)],
        dtype=np.uint64,
    )
