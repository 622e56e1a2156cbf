"""Owns the metadata of a store as five tables, and the proof that they agree with each other.

Nothing here is trusted because a checksum matched: every bound is checked against the geometry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rangekv.format.checksum import Octets
from rangekv.format.errors import OutOfBounds
from rangekv.format.geometry import Geometry
from rangekv.format.layout import COUNTER_MAX
from rangekv.format.records import NO_CHECKSUM, NO_PARENT, NO_SALT, ROOT_BYTES, Extent, Record

ROOTS_MAX = 65_536
TOKEN_POSITION_MAX = 2**32 - 1


@dataclass(slots=True)
class Tables:
    """Everything that a clean close keeps. Buffers may be views into one larger buffer."""

    extents: list[Extent] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    tokens: Octets = b""
    """u32 little-endian each."""
    checksums: Octets = b""
    """u64 little-endian each; per record a layer-major list of pages."""
    roots: list[bytes] = field(default_factory=lambda: [NO_SALT])
    """32 bytes each; entry 0 is all zero: requests without a salt."""
    generation_max: int = 0
    """The highest generation ever handed out."""

    @classmethod
    def empty(cls, generation_max: int = 0) -> Tables:
        return cls(generation_max=generation_max)

    @property
    def token_count(self) -> int:
        return memoryview(self.tokens).nbytes // 4

    @property
    def checksum_count(self) -> int:
        return memoryview(self.checksums).nbytes // 8


@dataclass(frozen=True, slots=True)
class TableLimits:
    """How many entries each section can have at most; a blank store can have none."""

    extents_max: int
    records_max: int
    tokens_max: int
    checksums_max: int
    roots_max: int = ROOTS_MAX

    @classmethod
    def of(cls, geometry: Geometry | None) -> TableLimits:
        """Derive the limits from a validated superblock, before anything is allocated."""
        if geometry is None:
            return cls(0, 0, 0, 0)
        extents_max = geometry.pack_count << geometry.order_max
        pack_blocks = geometry.pack_bytes // (geometry.layer_count * geometry.block_bytes)
        records_max = geometry.pack_count * pack_blocks
        return cls(
            extents_max,
            records_max,
            tokens_max=records_max * geometry.block_tokens,
            checksums_max=records_max * geometry.layer_count,
        )


def check_tables(tables: Tables, geometry: Geometry | None) -> None:
    """Raise OutOfBounds `bad-snapshot` unless the tables could have been written by an engine."""
    if tables.generation_max > COUNTER_MAX:
        raise _refuse("generation_max is outside its limit")
    _check_roots(tables.roots)
    if geometry is None:
        if tables.extents or tables.records or tables.token_count or tables.checksum_count:
            raise _refuse("a blank store holds entries")
        return
    _check_extents(tables.extents, tables.generation_max, geometry)
    _check_records(tables, geometry)


def _check_roots(roots: Sequence[bytes]) -> None:
    if not 0 < len(roots) <= ROOTS_MAX or roots[0] != NO_SALT:
        raise _refuse("the first root is not the one without a salt")
    if any(len(root) != ROOT_BYTES for root in roots) or len(set(roots)) != len(roots):
        raise _refuse("roots are not distinct digests")


def _check_extents(extents: Sequence[Extent], generation_max: int, geometry: Geometry) -> None:
    widths = frozenset(geometry.widths())
    for ordinal, extent in enumerate(extents):
        place = f"extent {ordinal}"
        if extent.width not in widths or extent.pack_index >= geometry.pack_count:
            raise _refuse(f"{place} has width {extent.width} in pack {extent.pack_index}")
        pack_relative = extent.offset - geometry.pack_offset(extent.pack_index)
        extent_bytes = geometry.extent_bytes(extent.width)
        if (
            not 0 <= pack_relative <= geometry.pack_bytes - extent_bytes
            or pack_relative % extent_bytes
        ):
            raise _refuse(f"{place} at {extent.offset} is misplaced in pack {extent.pack_index}")
        if (
            extent.append_mark_tokens * geometry.token_bytes > extent.width
            or extent.append_mark_tokens % geometry.block_tokens
        ):
            raise _refuse(f"{place} has append mark {extent.append_mark_tokens}")
        if extent.generation > generation_max:
            raise _refuse(f"{place} has generation {extent.generation}, above {generation_max}")
    end = 0
    for extent in sorted(extents, key=lambda extent: extent.offset):
        if extent.offset < end:
            raise _refuse(f"two extents share byte {extent.offset}")
        end = extent.offset + geometry.extent_bytes(extent.width)


def _check_records(tables: Tables, geometry: Geometry) -> None:
    token_index = checksum_index = 0
    for ordinal, record in enumerate(tables.records):
        if record.flags or record.root >= len(tables.roots):
            raise _refuse(f"record {ordinal} has flags {record.flags} and root {record.root}")
        if max(record.record_id, record.access_rank) > COUNTER_MAX:
            raise _refuse(f"record {ordinal} has an id or an access rank outside its limit")
        _check_range(ordinal, record, tables.extents, geometry)
        if record.token_index != token_index:
            raise _refuse(f"record {ordinal} names token {record.token_index}, not {token_index}")
        token_index += record.token_count
        if record.checksum_index != NO_CHECKSUM:
            if record.checksum_index != checksum_index:
                raise _refuse(
                    f"record {ordinal} names checksum {record.checksum_index}, not {checksum_index}"
                )
            checksum_index += geometry.layer_count * geometry.page_count(record.token_count)
        _check_parent(ordinal, record, tables.records)
    if (token_index, checksum_index) != (tables.token_count, tables.checksum_count):
        raise _refuse(
            f"the records own {token_index} tokens and {checksum_index} checksums of "
            f"{tables.token_count} and {tables.checksum_count}"
        )
    if len({record.record_id for record in tables.records}) != len(tables.records):
        raise _refuse("two records have the same id")
    _check_shares(tables.records)
    _check_branches(tables, geometry)


def _check_range(
    ordinal: int, record: Record, extents: Sequence[Extent], geometry: Geometry
) -> None:
    """Refuse a record that is not whole blocks inside what its extent ever handed out."""
    if record.extent >= len(extents):
        raise _refuse(f"record {ordinal} names extent {record.extent} of {len(extents)}")
    extent_end = record.extent_token_start + record.token_count
    if record.token_count == 0 or extent_end > extents[record.extent].append_mark_tokens:
        raise _refuse(f"record {ordinal} ends at token {extent_end}, behind the append mark")
    block_tokens = geometry.block_tokens
    if (
        record.token_count % block_tokens
        or record.token_start % block_tokens
        or record.extent_token_start % block_tokens
        or record.token_start + record.token_count > TOKEN_POSITION_MAX
    ):
        raise _refuse(f"record {ordinal} does not lie on block boundaries")


def _check_parent(ordinal: int, record: Record, records: Sequence[Record]) -> None:
    """Refuse a record that does not continue an earlier one, or a root from token 0."""
    if record.parent == NO_PARENT:
        if record.token_start or record.parent_tokens:
            raise _refuse(f"record {ordinal} has no parent and does not start at token 0")
        return
    # An earlier row only: a cycle cannot be written down.
    if record.parent >= ordinal:
        raise _refuse(f"record {ordinal} names row {record.parent} as its parent")
    parent = records[record.parent]
    if (
        not 0 < record.parent_tokens <= parent.token_count
        or record.token_start != parent.token_start + record.parent_tokens
        or record.root != parent.root
    ):
        raise _refuse(f"record {ordinal} does not continue its parent {record.parent}")


def _check_shares(records: Sequence[Record]) -> None:
    """Refuse two records that own the same tokens of one extent."""
    shares = sorted(
        (record.extent, record.extent_token_start, record.token_count) for record in records
    )
    last_extent, end = -1, 0
    for extent, start, count in shares:
        if extent == last_extent and start < end:
            raise _refuse(f"two records share token {start} of extent {extent}")
        last_extent, end = extent, start + count


def _check_branches(tables: Tables, geometry: Geometry) -> None:
    """Refuse two ways to go on with the same block: a prefix would not lead to one record."""
    tokens = memoryview(tables.tokens).cast("B")
    block_tokens = geometry.block_tokens

    def block(token_index: int) -> bytes:
        return bytes(tokens[4 * token_index : 4 * (token_index + block_tokens)])

    seen: set[tuple[int, int, int, bytes]] = set()
    for ordinal, record in enumerate(tables.records):
        first = block(record.token_index)
        if record.parent != NO_PARENT:
            parent = tables.records[record.parent]
            if record.parent_tokens < parent.token_count and first == block(
                parent.token_index + record.parent_tokens
            ):
                raise _refuse(f"record {ordinal} begins as its parent goes on")
        seen.add((record.root, record.parent, record.parent_tokens, first))
        if len(seen) <= ordinal:
            raise _refuse(f"record {ordinal} begins as another one in its place does")


def _refuse(message: str) -> OutOfBounds:
    return OutOfBounds("bad-snapshot", message)
