"""Snapshots that somebody else wrote: other tables, another envelope, sealed as if by us.

Owns the forging for fault cases; a checksum alone must never make a store believe one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rangekv.engine.folder import SNAPSHOT
from rangekv.engine.inspection import read_store
from rangekv.format import snapshot
from rangekv.format.envelope import (
    HEADER,
    HEADER_BYTES,
    SECTION,
    SECTION_COUNT_MAX,
    Envelope,
)
from rangekv.format.tables import Tables

if TYPE_CHECKING:
    from rangekv.engine.testing.scene import Scene


def forge(scene: Scene, change: Callable[[Tables], Any], **envelope: Any) -> None:
    """Replace the snapshot of a closed store by one with changed tables or envelope fields."""
    report = read_store(str(scene.store))
    assert report.tables is not None
    assert report.header is not None
    change(report.tables)
    sealed: Envelope = replace(report.header.envelope, **envelope)
    data = b"".join(bytes(piece) for piece in snapshot.encode(report.tables, sealed))
    (scene.store / SNAPSHOT).write_bytes(data)


def reseal(data: bytearray) -> bytes:
    """Return a snapshot file whose header was changed, sealed again."""
    section_count = int.from_bytes(data[20:24], "little")
    table_end = HEADER_BYTES + min(section_count, SECTION_COUNT_MAX) * SECTION.size
    body = bytes(data[: HEADER.seal_offset])
    seal = HEADER.seal(body, bytes(data[HEADER_BYTES:table_end]))
    return body + seal + bytes(data[HEADER_BYTES:])
