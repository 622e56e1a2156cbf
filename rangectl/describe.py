"""One store in words and in JSON: what init, format and inspect say about it.

Owns names and order of the fields; never reads a store.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from rangekv.engine.inspection import StoreReport
from rangekv.format.geometry import Geometry
from rangekv.format.identity import BTIME_VALID, GENERATION_VALID
from rangekv.format.journal import Journal
from rangekv.format.records import NO_CHECKSUM, NO_PARENT
from rangekv.format.superblock import VERSION_MAJOR, Slot, Superblock
from rangekv.format.tables import Tables

from rangectl.output import age, counted, human_bytes

Fact = tuple[str, str]


def state_line(report: StoreReport) -> str:
    """Return the state with its reason or what is kept, as in `cold (dirty-marker)`."""
    told = report.detail if report.state in ("live", "would-recover") else None
    why = report.reason or told
    return report.state if why is None else f"{report.state} ({why})"


def content_line(report: StoreReport) -> str:
    """Return state and content in one line, for questions and refusals."""
    if report.blank:
        return f"{state_line(report)}, blank"
    if report.tables is None or report.state == "would-recover":
        return state_line(report)
    records = counted(len(report.tables.records), "record")
    return f"{state_line(report)}, {records}, {counted(report.tables.token_count, 'token')}"


def used_bytes(report: StoreReport) -> int:
    """Return the bytes of all extents, or 0 where there is no index."""
    geometry, tables = report.geometry, report.tables
    if geometry is None or tables is None:
        return 0
    return sum(geometry.extent_bytes(extent.width) for extent in tables.extents)


def store_facts(report: StoreReport) -> Iterator[Fact]:
    """Yield the lines of `inspect`; the first one is the state."""
    yield "state", state_line(report)
    if report.reason is not None:
        yield "detail", report.detail
    yield "path", report.path
    superblock = report.superblock
    for slot in report.slots:
        if slot.problem is not None:
            yield "damaged", f"superblock {'AB'[slot.copy_index]}: {slot.problem.message}"
    if superblock is None:
        return
    yield "format", f"{VERSION_MAJOR}.{superblock.version_minor} on {report.filesystem}"
    yield (
        "store",
        f"{UUID(bytes=superblock.store_uuid)}   epoch {superblock.epoch}"
        f"   rank {superblock.rank} of {superblock.world_size}",
    )
    if superblock.namespace is None:
        yield "namespace", "none: blank, the first engine that opens it binds it"
    else:
        yield "namespace", superblock.namespace.folder
        fields = superblock.namespace.fields
        width = max(map(len, fields), default=0)
        yield from (("", f"{key:<{width}}  {value}") for key, value in fields.items())
    if superblock.geometry is None:
        yield "capacity", human_bytes(superblock.capacity_bytes)
    else:
        yield from shape_facts(superblock.geometry, superblock.capacity_bytes)
    if report.tables is not None:
        yield "used", _used(report, report.tables)
    if report.journal is not None:
        yield "journal", _journal(report.journal)


def shape_facts(geometry: Geometry, capacity_bytes: int) -> Iterator[Fact]:
    """Yield how `capacity_bytes` of pack space are divided."""
    yield (
        "geometry",
        f"{geometry.layer_count} layers x {geometry.token_bytes:,} bytes a token,"
        f" blocks of {geometry.block_tokens} tokens ({human_bytes(geometry.block_bytes)}),"
        f" stripes {human_bytes(geometry.stripe_bytes_min)}"
        f" to {human_bytes(geometry.stripe_bytes_max)}",
    )
    unused = capacity_bytes - geometry.usable_bytes
    behind = f"   {human_bytes(unused)} behind the last pack is unused" if unused else ""
    yield (
        "capacity",
        f"{human_bytes(geometry.usable_bytes)}   {geometry.pack_count} packs x"
        f" {human_bytes(geometry.pack_bytes)}{behind}",
    )


def token_facts(tables: Tables) -> Iterator[Fact]:
    """Yield the token ids of every record: what users wrote."""
    ids = memoryview(tables.tokens).cast("B").cast("I")
    for record in tables.records:
        own = ids[record.token_index : record.token_index + record.token_count]
        last = record.token_start + record.token_count - 1
        yield (
            f"record {record.record_id}",
            (f"tokens {record.token_start}-{last}: {' '.join(map(str, own))}"),
        )


def store_json(report: StoreReport, *, show_tokens: bool) -> dict[str, Any]:
    """Return every field of one store; integers are bytes, hashes are hex."""
    superblock, tables, marker = report.superblock, report.tables, report.marker
    fields: dict[str, Any] = {
        "path": report.path,
        "state": report.state,
        "reason": report.reason,
        "detail": report.detail,
        "filesystem": report.filesystem,
        "identity": {
            "inode": report.identity.inode,
            "file_bytes": report.identity.file_bytes,
            "birth_time_known": bool(report.identity.identity_flags & BTIME_VALID),
            "generation_known": bool(report.identity.identity_flags & GENERATION_VALID),
            "mtime_ns": report.mtime_ns,
        },
        "superblocks": [_slot_json(slot) for slot in report.slots],
        "marker": {"pid": marker.pid, "epoch": marker.epoch} if marker else None,
        "marker_exists": report.marker_exists,
        "journal": None if report.journal is None else _journal_json(report.journal),
    }
    if superblock is not None:
        fields |= superblock_json(superblock)
    if tables is not None:
        fields |= {
            "used_bytes": used_bytes(report),
            "records": len(tables.records),
            "extents": len(tables.extents),
            "tokens": tables.token_count,
            "roots": len(tables.roots),
            "record_table": [_record_json(tables, row) for row in range(len(tables.records))],
        }
        if show_tokens:
            ids = memoryview(tables.tokens).cast("B").cast("I")
            for record, row in zip(tables.records, fields["record_table"], strict=True):
                first = record.token_index
                row["token_ids"] = list(ids[first : first + record.token_count])
    return fields


def superblock_json(superblock: Superblock) -> dict[str, Any]:
    """Return identity, namespace and geometry of a store."""
    namespace, geometry = superblock.namespace, superblock.geometry
    return {
        "format": f"{VERSION_MAJOR}.{superblock.version_minor}",
        "store_uuid": str(UUID(bytes=superblock.store_uuid)),
        "epoch": superblock.epoch,
        "rank": superblock.rank,
        "world_size": superblock.world_size,
        "blank": superblock.blank,
        "namespace": None
        if namespace is None
        else {"sha256": namespace.digest.hex(), "fields": dict(namespace.fields)},
        "capacity_bytes": superblock.capacity_bytes,
        "geometry": None if geometry is None else geometry_json(geometry),
    }


def geometry_json(geometry: Geometry) -> dict[str, int]:
    """Return how a store is divided."""
    return {
        "layers": geometry.layer_count,
        "token_bytes": geometry.token_bytes,
        "block_tokens": geometry.block_tokens,
        "stripe_bytes_min": geometry.stripe_bytes_min,
        "stripe_bytes_max": geometry.stripe_bytes_max,
        "pack_bytes": geometry.pack_bytes,
        "pack_count": geometry.pack_count,
        "usable_bytes": geometry.usable_bytes,
        "checksum_page_blocks": geometry.checksum_page_blocks,
    }


def _used(report: StoreReport, tables: Tables) -> str:
    packs = len({extent.pack_index for extent in tables.extents})
    return (
        f"{human_bytes(used_bytes(report))}   {counted(len(tables.records), 'record')}"
        f"   {counted(tables.token_count, 'token')}   {counted(packs, 'pack')} in use"
    )


def _journal(journal: Journal) -> str:
    commits = counted(len(journal.frames), "commit")
    torn = f"   {counted(journal.torn_bytes, 'byte')} of a torn one" if journal.torn_bytes else ""
    if journal.frames:
        commits += f", the last {age(journal.frames[-1].unix_ns, time.time_ns())},"
    return f"{commits} in {human_bytes(journal.length)}   epoch {journal.header.epoch}{torn}"


def _journal_json(journal: Journal) -> dict[str, int | None]:
    return {
        "epoch": journal.header.epoch,
        "commits": len(journal.frames),
        "bytes": journal.length,
        "torn_bytes": journal.torn_bytes,
        "last_commit_unix_ns": journal.frames[-1].unix_ns if journal.frames else None,
    }


def _slot_json(slot: Slot) -> dict[str, Any]:
    if slot.superblock is None:
        problem = slot.problem
        return {
            "valid": False,
            "code": problem.code if problem else None,
            "message": problem.message if problem else None,
        }
    return {
        "valid": True,
        "sequence": slot.superblock.sequence,
        "epoch": slot.superblock.epoch,
    }


def _record_json(tables: Tables, row: int) -> dict[str, Any]:
    record = tables.records[row]
    extent = tables.extents[record.extent]
    return {
        "record_id": record.record_id,
        "token_start": record.token_start,
        "token_count": record.token_count,
        "parent": None if record.parent == NO_PARENT else record.parent,
        "root": record.root,
        "pack_index": extent.pack_index,
        "offset": extent.offset,
        "width": extent.width,
        "generation": extent.generation,
        "checksums": record.checksum_index != NO_CHECKSUM,
    }
