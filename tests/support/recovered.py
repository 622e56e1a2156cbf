"""What Range makes of the journal of a session that did not close, in names instead of rows."""

from __future__ import annotations

from rangekv.engine.recovery import Remains
from rangekv.format import journal
from rangekv.format.envelope import Envelope
from rangekv.format.errors import FormatError
from rangekv.format.geometry import Geometry
from rangekv.format.journal import Journal
from rangekv.format.marker import Marker
from rangekv.format.records import NO_CHECKSUM, NO_PARENT
from rangekv.format.superblock import Superblock
from rangekv.format.tables import Tables


def recovered(
    data: bytes, marker: Marker | None, tables: Tables, envelope: Envelope, superblock: Superblock
) -> tuple[Journal, Tables]:
    """Return a journal and the state that it leads to; raises FormatError with the reason."""
    found, refused = None, None
    try:
        found = journal.decode(data)
    except FormatError as error:
        refused = error.with_traceback(None)  # it would hold this frame, and the bytes with it
    remains = Remains(marker, marker is not None, found, refused)
    doubt = remains.doubt(superblock, envelope)
    if doubt is not None:
        raise FormatError(*doubt)
    return found, remains.state(tables, superblock, envelope)


def named(tables: Tables, geometry: Geometry) -> dict:
    """Return a state by generations and record_ids, as the second reader does."""
    tokens = memoryview(tables.tokens).cast("B").cast("I")
    checksums = memoryview(tables.checksums).cast("B").cast("Q")
    records = {}
    for row in tables.records:
        one = row._asdict()
        for name in ("record_id", "token_index", "checksum_index", "extent", "flags"):
            del one[name]
        one["generation"] = tables.extents[row.extent].generation
        one["parent"] = None
        if row.parent != NO_PARENT:
            one["parent"] = tables.records[row.parent].record_id
        one["root"] = tables.roots[row.root]
        one["tokens"] = tokens[row.token_index : row.token_index + row.token_count].tolist()
        one["checksums"] = None
        if row.checksum_index != NO_CHECKSUM:
            pages = geometry.layer_count * geometry.page_count(row.token_count)
            one["checksums"] = checksums[row.checksum_index : row.checksum_index + pages].tolist()
        records[row.record_id] = one
    extents = {row.generation: row._asdict() for row in tables.extents}
    return {"generation_max": tables.generation_max, "extents": extents, "records": records}


def summary(state: dict) -> dict:
    """Return what vectors.json says of a state."""
    return {
        "generation_max": state["generation_max"],
        "extents": {str(key): one["append_mark_tokens"] for key, one in state["extents"].items()},
        "records": {str(key): one["parent"] for key, one in state["records"].items()},
    }
