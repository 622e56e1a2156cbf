"""Owns the rule of a reopen after a session that did not close: what its journal proves, if at all.

It compares and replays, and never touches a file. The rule is SPEC.md 11.6.
"""

from __future__ import annotations

from dataclasses import dataclass

from rangekv.format.envelope import Envelope
from rangekv.format.errors import FormatError
from rangekv.format.journal import Journal
from rangekv.format.marker import Marker
from rangekv.format.replay import replay
from rangekv.format.superblock import Superblock
from rangekv.format.tables import Tables

Doubt = tuple[str, str]
"""(reason code, detail)."""


@dataclass(frozen=True, slots=True)
class Remains:
    """What an unclosed session left beside the pack file and the snapshot."""

    marker: Marker | None
    marker_exists: bool
    journal: Journal | None
    journal_error: FormatError | None
    """Why there is a journal file that cannot be read."""

    def dirty(self, superblock: Superblock, envelope: Envelope) -> bool:
        """Whether the session that the superblock names did not close."""
        return self.marker_exists or envelope.epoch != superblock.epoch

    def follows(self, envelope: Envelope) -> bool:
        """Whether the journal holds what the session after this snapshot changed."""
        journal = self.journal
        return (
            journal is not None
            and journal.header.store_uuid == envelope.store_uuid
            and journal.header.epoch == envelope.epoch + 1
        )

    def doubt(self, superblock: Superblock, envelope: Envelope) -> Doubt | None:
        """Return why a dirty store's snapshot and journal prove nothing, or None if they do.

        The caller has compared the envelope with the store and the file.
        """
        if self.journal_error is not None:
            return self.journal_error.code, self.journal_error.message
        if self.follows(envelope):
            assert self.journal is not None
            if self.journal.header.geometry_digest != envelope.geometry_digest:
                return "journal-mismatch", "the journal was written for another geometry"
            if superblock.epoch not in (envelope.epoch, envelope.epoch + 1):
                return "journal-mismatch", (
                    f"the journal is of epoch {envelope.epoch + 1}, the superblock of "
                    f"{superblock.epoch}"
                )
            return None
        if self.journal is not None and (
            self.journal.header.store_uuid != envelope.store_uuid
            or self.journal.header.epoch > envelope.epoch
        ):
            return "journal-mismatch", (
                f"the journal is of epoch {self.journal.header.epoch} of store "
                f"{self.journal.header.store_uuid.hex()}, the snapshot of {envelope.epoch} of "
                f"{envelope.store_uuid.hex()}"
            )
        marker = self.marker
        complete = (
            superblock.epoch == envelope.epoch
            and marker is not None
            and marker.store_uuid == superblock.store_uuid
            and marker.epoch <= envelope.epoch
        )
        # The crash fell between the snapshot of a close and the removal of its marker.
        return None if complete else self.unclosed(superblock, envelope)

    def unclosed(self, superblock: Superblock, envelope: Envelope | None) -> Doubt | None:
        """Return why the index of a session that did not close is lost without a journal."""
        if self.marker_exists and self.marker is None:
            return "dirty-marker", "the session before did not close; its marker cannot be read"
        if self.marker is not None:
            return "dirty-marker", (
                f"the session before (process {self.marker.pid}, epoch {self.marker.epoch}) "
                "did not close"
            )
        if envelope is not None and envelope.epoch != superblock.epoch:
            return "epoch-mismatch", (
                f"the snapshot is of epoch {envelope.epoch}, the superblock of {superblock.epoch}"
            )
        return None

    def state(self, tables: Tables, superblock: Superblock, envelope: Envelope) -> Tables:
        """Return what is proved, where there is no doubt. Raises FormatError `bad-journal`."""
        if not self.follows(envelope) or superblock.geometry is None:
            return tables
        assert self.journal is not None
        return replay(tables, self.journal, superblock.geometry)
