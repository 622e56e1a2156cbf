"""Owns taking records out of a closed store: which rows go, and the tables that are left.

It opens and closes the store by the usual protocol; a crash in between leaves all or the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace

from rangekv.engine.files import OS_FILES, Files
from rangekv.engine.inspection import StoreReport
from rangekv.engine.store import Store
from rangekv.format.checksum import Octets
from rangekv.format.errors import EnvironmentFault, ExitCode, RangeError
from rangekv.format.geometry import Geometry
from rangekv.format.records import NO_CHECKSUM, NO_PARENT, Record
from rangekv.format.tables import Tables, check_tables

Choice = Callable[[Tables], Set[int]]
"""Names the rows of the record table that are to go."""


class NotWarm(RangeError):
    """An open discards the index of this store: nothing can be taken out of it."""

    exit_code = ExitCode.COLD


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was taken out of one store, or would be, and what is left."""

    path: str
    records: int
    tokens: int
    freed_bytes: int
    """Room of extents that hold no record any more; their bytes stay until they are reused."""
    records_left: int
    tokens_left: int


def with_descendants(tables: Tables, rows: Set[int]) -> set[int]:
    """Return `rows` and every row that continues one of them: it could not be reached alone."""
    condemned = set(rows)
    for row, record in enumerate(tables.records):
        # A parent is always an earlier row.
        if record.parent != NO_PARENT and record.parent in condemned:
            condemned.add(row)
    return condemned


def without(tables: Tables, geometry: Geometry, condemned: Set[int]) -> Tables:
    """Return new tables without the rows `condemned`, which holds all their descendants.

    Extents keep their generation and append mark; those without records and roots without records
    are left out, as a close leaves them out.
    """
    kept = [row for row in range(len(tables.records)) if row not in condemned]
    new_row = {row: ordinal for ordinal, row in enumerate(kept)}
    extents = sorted({tables.records[row].extent for row in kept})
    roots = sorted({0, *(tables.records[row].root for row in kept)})
    new_extent = {row: ordinal for ordinal, row in enumerate(extents)}
    new_root = {row: ordinal for ordinal, row in enumerate(roots)}
    tokens, checksums = _Column(tables.tokens, 4), _Column(tables.checksums, 8)
    records: list[Record] = []
    for row in kept:
        record = tables.records[row]
        pages = geometry.layer_count * geometry.page_count(record.token_count)
        no_checksum = record.checksum_index == NO_CHECKSUM
        records.append(
            record._replace(
                token_index=tokens.take(record.token_index, record.token_count),
                checksum_index=NO_CHECKSUM
                if no_checksum
                else checksums.take(record.checksum_index, pages),
                extent=new_extent[record.extent],
                parent=NO_PARENT if record.parent == NO_PARENT else new_row[record.parent],
                root=new_root[record.root],
            )
        )
    left = replace(
        tables,
        extents=[tables.extents[row] for row in extents],
        records=records,
        tokens=tokens.taken,
        checksums=checksums.taken,
        roots=[tables.roots[row] for row in roots],
    )
    check_tables(left, geometry)
    return left


def plan(report: StoreReport, choice: Choice) -> Pruned:
    """Return what `prune` would take out of the store of a report that keeps its index."""
    geometry, tables = report.geometry, report.tables
    if geometry is None or tables is None:
        return Pruned(report.path, 0, 0, 0, 0, 0)
    condemned = with_descendants(tables, choice(tables))
    return _told(report.path, geometry, tables, without(tables, geometry, condemned))


def prune(report: StoreReport, choice: Choice, files: Files = OS_FILES) -> Pruned:
    """Open the store that was found, take the chosen records and their descendants out, close it.

    The store reopens warm without them. `choice` is asked again about the tables that the open
    accepts. Raises StoreLocked and the other errors of Store.open; NotWarm when the open has
    discarded the index; EnvironmentFault `not-closed` when the close fails: the store is cold then.
    """
    superblock, namespace, geometry = report.superblock, report.namespace, report.geometry
    if superblock is None or namespace is None or geometry is None:
        return Pruned(report.path, 0, 0, 0, 0, 0)
    store = Store.open(
        report.path,
        namespace=namespace,
        model=geometry.model,
        files=files,
        rank=superblock.rank,
        world_size=superblock.world_size,
        allow_buffered=True,
        recover=True,
    )
    tables = store.tables
    if tables is None:
        store.close(Tables.empty())
        raise NotWarm("not-warm", store.open_result.detail, path=report.path)
    left = tables
    try:
        left = without(tables, geometry, with_descendants(tables, choice(tables)))
    finally:
        # Interrupted or not: what the open accepted, or what is left of it, is published again.
        closed = store.close(left)
    if closed.state != "clean":
        raise EnvironmentFault("not-closed", closed.detail, path=report.path)
    return _told(report.path, geometry, tables, left)


def _told(path: str, geometry: Geometry, before: Tables, after: Tables) -> Pruned:
    def room(tables: Tables) -> int:
        return sum(geometry.extent_bytes(extent.width) for extent in tables.extents)

    return Pruned(
        path=path,
        records=len(before.records) - len(after.records),
        tokens=before.token_count - after.token_count,
        freed_bytes=room(before) - room(after),
        records_left=len(after.records),
        tokens_left=after.token_count,
    )


class _Column:
    """One section's entries while those that stay are put behind each other."""

    def __init__(self, entries: Octets, entry_bytes: int) -> None:
        self._entries = memoryview(entries).cast("B")
        self._entry_bytes = entry_bytes
        self.taken = bytearray()

    def take(self, first: int, count: int) -> int:
        """Keep `count` entries from `first` on; return where they begin now."""
        start = len(self.taken) // self._entry_bytes
        self.taken += self._entries[first * self._entry_bytes : (first + count) * self._entry_bytes]
        return start
