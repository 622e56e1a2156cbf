"""Owns the passage between the catalog and what lies on disk: tables both ways, commits one way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rangekv.engine.index.catalog import Catalog, Hashes
from rangekv.engine.index.directory import TOKEN_BYTES, Record
from rangekv.engine.index.extents import Extent
from rangekv.engine.index.roots import RootTable
from rangekv.format import records as rows
from rangekv.format.entries import HAS_CHECKSUMS, NO_PARENT_ID, Publish, Published
from rangekv.format.tables import Tables


def load(catalog: Catalog, tables: Tables) -> None:
    """Fill an empty catalog from tables that passed their reader's checks.

    Tokens and checksums of the records are views of the tables' buffers and keep them alive: one
    large buffer costs less than a copy for each record, while the records last.
    """
    geometry = catalog.geometry
    catalog.extents.generation_max = tables.generation_max
    catalog.roots = RootTable(tables.roots)
    extents: list[Extent] = []
    for row in tables.extents:
        order = (row.width // geometry.stripe_bytes_min).bit_length() - 1
        extent = Extent(row.generation, row.offset, row.width, row.pack_index, order)
        extent.append_mark_tokens = row.append_mark_tokens
        extent.listed = True
        catalog.extents.claim(extent)
        extents.append(extent)
    tokens = memoryview(tables.tokens).cast("B")
    checksums = np.frombuffer(tables.checksums, dtype="<u8")
    loaded: list[Record] = []
    for entry in tables.records:
        first = entry.token_index * TOKEN_BYTES
        record = Record(
            record_id=entry.record_id,
            root=entry.root,
            parent=None if entry.parent == rows.NO_PARENT else loaded[entry.parent],
            parent_tokens=entry.parent_tokens,
            token_start=entry.token_start,
            tokens=tokens[first : first + entry.token_count * TOKEN_BYTES],
            extent=extents[entry.extent],
            extent_token_start=entry.extent_token_start,
        )
        if entry.checksum_index != rows.NO_CHECKSUM:
            pages = geometry.page_count(entry.token_count)
            stop = entry.checksum_index + geometry.layer_count * pages
            record.hashes = checksums[entry.checksum_index : stop].reshape(-1, pages)
        record.access_rank = entry.access_rank
        record.listed = True
        catalog.directory.insert(record)
        catalog.settle_in(record)
        catalog.show(record)
        catalog.record_id_next = max(catalog.record_id_next, entry.record_id)
        catalog.access_clock = max(catalog.access_clock, entry.access_rank)
        loaded.append(record)
    for extent in extents:
        if extent.references == 0:
            # An extent without records holds nothing that can be looked up.
            catalog.extents.hold(extent)
            catalog.extents.drop(extent)


@dataclass(frozen=True, slots=True)
class Frozen:
    """The visible state of one moment: what of it can still change was copied."""

    records: list[Record]
    extents: dict[Extent, rows.Extent]
    digests: dict[int, bytes]
    generation_max: int

    def tables(self) -> Tables:
        """Return the state as tables, parents before children; needs no lock."""
        extents = sorted(self.extents, key=lambda extent: extent.offset)
        extent_index = {extent: index for index, extent in enumerate(extents)}
        record_index = {record: index for index, record in enumerate(self.records)}
        # Roots without records are left out, so numbers change; 0 is always there.
        roots = sorted(self.digests)
        root_index = {root: index for index, root in enumerate(roots)}
        token_index, checksum_index = 0, 0
        pages: list[Hashes] = []
        entries: list[rows.Record] = []
        for record in self.records:
            hashes = record.hashes
            entries.append(
                rows.Record(
                    record_id=record.record_id,
                    token_index=token_index,
                    checksum_index=rows.NO_CHECKSUM if hashes is None else checksum_index,
                    access_rank=record.access_rank,
                    extent=extent_index[record.extent],
                    extent_token_start=record.extent_token_start,
                    token_start=record.token_start,
                    token_count=record.token_count,
                    parent=rows.NO_PARENT if record.parent is None else record_index[record.parent],
                    parent_tokens=record.parent_tokens,
                    root=root_index[record.root],
                )
            )
            token_index += record.token_count
            if hashes is not None:
                checksum_index += hashes.size
                pages.append(hashes)
        return Tables(
            extents=[self.extents[extent] for extent in extents],
            records=entries,
            tokens=b"".join(record.tokens for record in self.records),
            checksums=_joined(pages, checksum_index),
            roots=[self.digests[root] for root in roots],
            generation_max=self.generation_max,
        )


def freeze(catalog: Catalog) -> Frozen:
    """Return the visible state as it is now; nothing reserved is in it. Under the engine's lock."""
    visible = list(catalog.directory.visible())
    return Frozen(
        records=visible,
        extents={extent: _row(extent) for extent in {record.extent for record in visible}},
        digests={
            root: catalog.roots.digest(root) for root in {0} | {record.root for record in visible}
        },
        generation_max=catalog.extents.generation_max,
    )


def dump(catalog: Catalog) -> Tables:
    """Return the visible state as tables. Under the engine's lock."""
    return freeze(catalog).tables()


def publication(catalog: Catalog, records: Sequence[Record]) -> Publish:
    """Return what a commit says of newly visible records, parents first, and of their extents."""
    extents = {record.extent.generation: record.extent for record in records}
    roots = sorted({record.root for record in records})
    root_index = {root: index for index, root in enumerate(roots)}
    pages = [record.hashes for record in records if record.hashes is not None]
    return Publish(
        extents=[_row(extent) for extent in extents.values()],
        records=[
            Published(
                record_id=record.record_id,
                parent_id=NO_PARENT_ID if record.parent is None else record.parent.record_id,
                generation=record.extent.generation,
                access_rank=record.access_rank,
                extent_token_start=record.extent_token_start,
                token_start=record.token_start,
                token_count=record.token_count,
                parent_tokens=record.parent_tokens,
                root=root_index[record.root],
                flags=0 if record.hashes is None else HAS_CHECKSUMS,
            )
            for record in records
        ],
        roots=[catalog.roots.digest(root) for root in roots],
        tokens=b"".join(record.tokens for record in records),
        checksums=_joined(pages, sum(hashes.size for hashes in pages)),
    )


def _row(extent: Extent) -> rows.Extent:
    return rows.Extent(
        extent.generation,
        extent.offset,
        extent.width,
        extent.pack_index,
        extent.append_mark_tokens,
    )


def _joined(pages: Sequence[Hashes], count: int) -> memoryview:
    """Return all checksums in one buffer of `count` u64, without a second copy on the way."""
    joined = np.empty(count, dtype="<u8")
    end = 0
    for hashes in pages:
        joined[end : end + hashes.size] = hashes.reshape(-1)
        end += hashes.size
    return joined.data.cast("B")
