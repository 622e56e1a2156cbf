"""Owns the verdict on a store's index: warm, recovered from the journal, or cold for one reason.

It only reads. Every doubt is a reason, and a reason only ever costs cached KV.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from rangekv.engine import journals, markers, snapshots
from rangekv.engine.pack import NEVER_WARM, Pack, Slots
from rangekv.engine.recovery import Remains
from rangekv.format.envelope import Envelope, SnapshotHeader
from rangekv.format.errors import FormatError
from rangekv.format.identity import FileIdentity
from rangekv.format.superblock import Superblock
from rangekv.format.tables import Tables

logger = logging.getLogger("rangekv.engine")

TOLD_BYTES = 8 << 20  # of a journal whose replay is announced


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reopen finds. `reason` says why it is cold, else it is None and `tables` is there."""

    reason: str | None
    detail: str
    identity: FileIdentity
    same_file: bool
    """False when the pack file is not proved to be the one that its superblock describes."""
    header: SnapshotHeader | None
    remains: Remains
    tables: Tables | None
    recovered: bool
    """The session before did not close; `tables` is what snapshot and journal prove."""

    @property
    def state(self) -> Literal["warm", "recovered", "cold"]:
        if self.reason is not None:
            return "cold"
        return "recovered" if self.recovered else "warm"

    @property
    def commits(self) -> int:
        """How many commits of the journal were applied: no snapshot holds their outcome yet."""
        if not self.recovered or self.header is None or self.remains.journal is None:
            return 0
        if not self.remains.follows(self.header.envelope):
            return 0
        return len(self.remains.journal.frames)

    @property
    def line(self) -> str:
        """Say why it is cold, or what an unclosed session has kept and where its journal ends."""
        tables, journal = self.tables, self.remains.journal
        if not self.recovered or tables is None:
            return self.detail
        kept = f"{len(tables.records)} records, {tables.token_count} tokens"
        if not self.commits or journal is None:
            return f"{kept}; the session before ended without a commit"
        end = "its journal is complete"
        if journal.torn_bytes:
            end = f"a commit of which {journal.torn_bytes} bytes were written is lost"
        return f"{kept}; {self.commits} commits, {end}"

    def epoch(self, superblock: Superblock, slots: Slots) -> int:
        """Return the epoch of the state that was accepted; the session that begins has the next.

        A cold open takes the highest epoch that any file of this store names, so that nothing which
        an earlier session left can ever pair up with a later one.
        """
        if self.reason is None and self.header is not None:
            return self.header.envelope.epoch + bool(self.commits)
        named = [
            (slot.superblock.store_uuid, slot.superblock.epoch) for slot in slots if slot.superblock
        ]
        if self.remains.marker is not None:
            named.append((self.remains.marker.store_uuid, self.remains.marker.epoch))
        if self.header is not None:
            named.append((self.header.envelope.store_uuid, self.header.envelope.epoch))
        if self.remains.journal is not None:
            header = self.remains.journal.header
            named.append((header.store_uuid, header.epoch))
        own = [epoch for uuid, epoch in named if uuid == superblock.store_uuid]
        return max([superblock.epoch, *own])


def judge(
    pack: Pack, superblock: Superblock, *, recover: bool = True, read_anyway: bool = False
) -> Verdict:
    """Return the verdict; `read_anyway` reads the tables even when they would be discarded.

    Without `recover` what a session left that did not close is discarded, whatever it proves.
    Raises OSError only when the pack file itself cannot be examined.
    """
    identity, mtime_ns = pack.stat()
    reasons: list[tuple[str, str]] = []
    if pack.filesystem in NEVER_WARM:  # O3
        reasons.append(
            ("unsupported-filesystem", f"{pack.filesystem} gives no proof that this is the file")
        )
    file_reason = superblock.identity.mismatch(identity)
    if file_reason is not None:
        reasons.append((file_reason, _other_file(superblock.identity, identity)))
    remains = _remains(pack)  # O4
    header, tables, recovered = None, None, False
    try:
        found = snapshots.find(pack.folder, superblock)
    except FormatError as error:
        reasons += [reason for reason in [remains.unclosed(superblock, None)] if reason]
        reasons.append((error.code, error.message))
    else:
        header = found.header
        envelope = header.envelope
        try:
            dirty = remains.dirty(superblock, envelope) or (recover and remains.follows(envelope))
            stale = _other_store(envelope, superblock, identity)
            if not dirty:
                stale = stale or _modified(envelope, mtime_ns)
            elif recover and stale is None:
                stale = remains.doubt(superblock, envelope)
            elif remains.marker_exists or stale is None:
                stale = remains.unclosed(superblock, envelope)
            if stale is not None:
                reasons.append(stale)
            if read_anyway or not reasons:
                tables = found.read_tables(superblock)
            if tables is not None and dirty and not reasons:
                if remains.journal is not None and remains.journal.length > TOLD_BYTES:
                    logger.info(
                        "store recover path=%s commits=%d journal_bytes=%d: takes some seconds",
                        pack.folder.path,
                        len(remains.journal.frames),
                        remains.journal.length,
                    )
                tables, recovered = remains.state(tables, superblock, envelope), True
        except FormatError as error:
            reasons.append((error.code, error.message))
        finally:
            found.close()
    reason, detail = reasons[0] if reasons else (None, "")
    return Verdict(
        reason=reason,
        detail=detail,
        identity=identity,
        same_file=file_reason is None,
        header=header,
        remains=remains,
        tables=tables,
        recovered=recovered,
    )


def _remains(pack: Pack) -> Remains:
    marker, marker_exists = markers.read(pack.folder)
    try:
        return Remains(marker, marker_exists, journals.read(pack.folder), None)
    except FormatError as error:
        return Remains(marker, marker_exists, None, error)


def _other_store(
    envelope: Envelope, superblock: Superblock, identity: FileIdentity
) -> tuple[str, str] | None:
    """Return (reason, detail) unless the envelope fits the superblock and the file."""
    if envelope.store_uuid != superblock.store_uuid:
        return "uuid-mismatch", (
            f"the snapshot belongs to store {envelope.store_uuid.hex()}, "
            f"this is {superblock.store_uuid.hex()}"
        )
    if envelope.geometry_digest != superblock.geometry_digest():
        return "geometry-mismatch", "the snapshot was written for another geometry"
    reason = envelope.identity.mismatch(identity)
    if reason is not None:
        return reason, _other_file(envelope.identity, identity)
    return None


def _modified(envelope: Envelope, mtime_ns: int) -> tuple[str, str] | None:
    """Return (reason, detail) when a closed store was written afterwards."""
    if envelope.pack_mtime_ns == mtime_ns:
        return None
    return "mtime-changed", (
        f"the pack file was modified at {mtime_ns} ns, the snapshot says {envelope.pack_mtime_ns}"
    )


def _other_file(expected: FileIdentity, found: FileIdentity) -> str:
    return f"the pack file was copied, restored or resized: found {found}, expected {expected}"
