"""Owns the state that commits lead to: a snapshot's tables, changed by one entry after another.

It proves each entry against what came before it, and the outcome as a snapshot is proved; whether
a journal may be replayed at all is not decided here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from rangekv.format.checksum import Octets
from rangekv.format.entries import (
    HAS_CHECKSUMS,
    NO_PARENT_ID,
    Entry,
    Publish,
    Published,
    Reset,
    Retire,
    RetireRecord,
)
from rangekv.format.errors import FormatError, OutOfBounds
from rangekv.format.geometry import Geometry
from rangekv.format.journal import Journal
from rangekv.format.records import NO_CHECKSUM, NO_PARENT, NO_SALT, Record
from rangekv.format.tables import TableLimits, Tables, check_tables

Place = tuple[bytes | int, int, bytes]
"""(root's digest or parent's id, parent_tokens, first block): where a record hangs."""


@dataclass(slots=True, eq=False)
class _Node:
    """A record that is visible so far."""

    row: Published
    root: bytes
    tokens: memoryview
    checksums: memoryview
    place: Place
    children: dict[int, None] = field(default_factory=dict)


def replay(tables: Tables, journal: Journal, geometry: Geometry) -> Tables:
    """Return the state after the last commit of `journal` on top of `tables`.

    Raises FormatError `bad-journal` where a commit contradicts what came before it.
    """
    state = _State(tables, geometry)
    limits = TableLimits.of(geometry)
    for frame in journal.frames:
        for entry in frame.entries(limits):
            state.apply(entry)
        state.generation_max = max(state.generation_max, frame.generation_max)
    after = state.tables()
    try:
        check_tables(after, geometry)
    except FormatError as error:
        raise _refuse(f"its commits do not lead to a sound index: {error.message}") from error
    return after


class _State:
    def __init__(self, tables: Tables, geometry: Geometry) -> None:
        self.generation_max = tables.generation_max
        self._geometry = geometry
        self._block_bytes = 4 * geometry.block_tokens
        self._extents = {extent.generation: extent for extent in tables.extents}
        self._nodes: dict[int, _Node] = {}
        self._places: dict[Place, int] = {}
        self._in_extent: dict[int, dict[int, None]] = {}
        tokens = memoryview(tables.tokens).cast("B")
        checksums = memoryview(tables.checksums).cast("B")
        for record in tables.records:
            parent_id = NO_PARENT_ID
            if record.parent != NO_PARENT:
                parent_id = tables.records[record.parent].record_id
            row = Published(
                record_id=record.record_id,
                parent_id=parent_id,
                generation=tables.extents[record.extent].generation,
                access_rank=record.access_rank,
                extent_token_start=record.extent_token_start,
                token_start=record.token_start,
                token_count=record.token_count,
                parent_tokens=record.parent_tokens,
                root=0,
                flags=0 if record.checksum_index == NO_CHECKSUM else HAS_CHECKSUMS,
            )
            first = 8 * record.checksum_index if row.flags else 0
            self._add(
                row,
                tables.roots[record.root],
                tokens[4 * record.token_index :],
                checksums[first:],
            )

    def apply(self, entry: Entry) -> None:
        """Change the state by one entry; raises FormatError `bad-journal`."""
        if isinstance(entry, Publish):
            self._publish(entry)
        elif isinstance(entry, Retire):
            for generation in entry.generations:
                for record_id in list(self._in_extent.get(generation, ())):
                    self._retire(record_id)
                self._extents.pop(generation, None)
        elif isinstance(entry, RetireRecord):
            for record_id in entry.record_ids:
                self._retire(record_id)
        elif isinstance(entry, Reset):
            self._nodes.clear()
            self._places.clear()
            self._in_extent.clear()
            self._extents.clear()

    def _publish(self, entry: Publish) -> None:
        for extent in entry.extents:
            known = self._extents.get(extent.generation)
            if known is not None and (
                known[1:4] != extent[1:4] or extent.append_mark_tokens < known.append_mark_tokens
            ):
                raise _refuse(f"extent of generation {extent.generation} changed its place")
            self._extents[extent.generation] = extent
            self.generation_max = max(self.generation_max, extent.generation)
        tokens = memoryview(entry.tokens).cast("B")
        checksums = memoryview(entry.checksums).cast("B")
        for row in entry.records:
            if row.root >= len(entry.roots) or row.generation not in self._extents:
                raise _refuse(f"record {row.record_id} names a root or extent that is not there")
            if row.record_id in self._nodes:
                raise _refuse(f"record {row.record_id} is published twice")
            node = self._add(row, entry.roots[row.root], tokens, checksums)
            tokens = tokens[len(node.tokens) :]
            checksums = checksums[len(node.checksums) :]
        if tokens or checksums:
            raise _refuse("a commit holds tokens or checksums of no record")

    def _add(self, row: Published, root: bytes, tokens: memoryview, checksums: memoryview) -> _Node:
        """Hang a record into its place; one that was there has been evicted, and nobody said so."""
        pages = 0
        if row.flags & HAS_CHECKSUMS:
            pages = self._geometry.layer_count * self._geometry.page_count(row.token_count)
        own = tokens[: 4 * row.token_count]
        sums = checksums[: 8 * pages]
        if not own or len(own) != 4 * row.token_count or len(sums) != 8 * pages:
            raise _refuse(f"record {row.record_id} has no tokens, or fewer than it says")
        above: bytes | int = root
        if row.parent_id != NO_PARENT_ID:
            parent = self._nodes.get(row.parent_id)
            if parent is None or parent.root != root:
                raise _refuse(f"record {row.record_id} continues one that is not there")
            above = row.parent_id
        place = (above, row.parent_tokens, bytes(own[: self._block_bytes]))
        evicted = self._places.get(place)
        if evicted is not None:
            self._retire(evicted)
        node = _Node(row, root, own, sums, place)
        self._nodes[row.record_id] = node
        self._places[place] = row.record_id
        self._in_extent.setdefault(row.generation, {})[row.record_id] = None
        if row.parent_id != NO_PARENT_ID:
            self._nodes[row.parent_id].children[row.record_id] = None
        return node

    def _retire(self, record_id: int) -> None:
        """Take out a record with all that continues it; one that is gone already is no error."""
        if record_id not in self._nodes:
            return
        parent = self._nodes.get(self._nodes[record_id].row.parent_id)
        if parent is not None:
            del parent.children[record_id]
        waiting = [record_id]
        while waiting:
            node = self._nodes.pop(waiting.pop())
            del self._places[node.place]
            del self._in_extent[node.row.generation][node.row.record_id]
            waiting += node.children

    def tables(self) -> Tables:
        """Return the state as the tables of a snapshot."""
        nodes = list(self._nodes.values())
        ordinal = {node.row.record_id: at for at, node in enumerate(nodes)}
        held = sorted({node.row.generation for node in nodes})
        extent_at = {generation: at for at, generation in enumerate(held)}
        roots = [NO_SALT, *sorted({node.root for node in nodes} - {NO_SALT})]
        root_at = {root: at for at, root in enumerate(roots)}
        rows: list[Record] = []
        token_index, checksum_index = 0, 0
        for node in nodes:
            row = node.row
            rows.append(
                Record(
                    record_id=row.record_id,
                    token_index=token_index,
                    checksum_index=checksum_index if row.flags else NO_CHECKSUM,
                    access_rank=row.access_rank,
                    extent=extent_at[row.generation],
                    extent_token_start=row.extent_token_start,
                    token_start=row.token_start,
                    token_count=row.token_count,
                    parent=ordinal.get(row.parent_id, NO_PARENT),
                    parent_tokens=row.parent_tokens,
                    root=root_at[node.root],
                )
            )
            token_index += row.token_count
            checksum_index += len(node.checksums) // 8
        return Tables(
            extents=[self._extents[generation] for generation in held],
            records=rows,
            tokens=_joined(node.tokens for node in nodes),
            checksums=_joined(node.checksums for node in nodes),
            roots=roots,
            generation_max=self.generation_max,
        )


def _joined(pieces: Iterable[Octets]) -> Octets:
    return b"".join(_views(pieces))


def _views(pieces: Iterable[Octets]) -> Iterator[memoryview]:
    for piece in pieces:
        yield memoryview(piece)


def _refuse(message: str) -> OutOfBounds:
    return OutOfBounds("bad-journal", message)
