"""Owns what each field of a journal ought to say, for a file that may be damaged.

It explains and never decides: what is accepted is for journal.py, what it changes for replay.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rangekv.format.checksum import Octets
from rangekv.format.dissect import Structure
from rangekv.format.entries import Entry
from rangekv.format.errors import FormatError
from rangekv.format.geometry import Geometry
from rangekv.format.journal import (
    FRAME,
    FRAME_ALIGN,
    HEADER_BYTES,
    JOURNAL,
    VERSION_MAJOR,
    Frame,
    frame_at,
    frame_bytes,
    stray_frame,
)
from rangekv.format.layout import COUNTER_MAX
from rangekv.format.superblock import Superblock
from rangekv.format.tables import TableLimits

# In a longer frame the one changed byte is not looked for: it would take seconds.
MENDED_FRAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Commit:
    """One frame of a journal, whatever its bytes say."""

    head: Structure
    said: Sequence[Entry]
    """What it says; empty where that cannot be read."""
    problem: str | None
    """Why what it says cannot be read."""
    skipped_bytes: int = 0
    """Bytes before it that belong to no frame."""


@dataclass(frozen=True, slots=True)
class JournalLook:
    """A journal file field by field; `torn_bytes` lie behind the last frame that holds."""

    header: Structure
    commits: Sequence[Commit]
    torn_bytes: int

    @property
    def bad_fields(self) -> int:
        """Count what is marked, a frame that cannot be read as one."""
        heads = sum(len(one.head.faults) or bool(one.problem) for one in self.commits)
        return len(self.header.faults) + heads


def journal_fields(
    data: Octets, superblock: Superblock | None, snapshot_epoch: int | None
) -> JournalLook:
    """Return the fields of a whole journal file.

    It ought to be that of `superblock`, on top of the snapshot with this epoch.
    """
    view = memoryview(data)
    header = Structure(JOURNAL, view[:HEADER_BYTES], 0)
    header.expect("version_major", VERSION_MAJOR)
    if superblock is not None:
        header.expect("store_uuid", superblock.store_uuid, "the superblock")
        header.expect("geometry_xxh3_128", superblock.geometry_digest(), "the superblock")
    if snapshot_epoch is not None:
        header.expect("epoch", snapshot_epoch + 1, "one more than the snapshot")
    header.require("epoch", header.integer("epoch") <= COUNTER_MAX, f"at most {COUNTER_MAX}")
    geometry = None if superblock is None else superblock.geometry
    commits = list(_commits(view, header, geometry))
    end = HEADER_BYTES
    if commits:
        end = commits[-1].head.offset + commits[-1].head.integer("frame_bytes")
    return JournalLook(header, commits, max(0, len(view) - end))


def _commits(view: memoryview, header: Structure, geometry: Geometry | None) -> Iterator[Commit]:
    """Yield the frames up to the last one that holds; those in between may be damaged."""
    epoch, link, commit, at = header.integer("epoch"), header.octets("xxh3_128"), 1, HEADER_BYTES
    while (holds := _next_frame(view, at, epoch)) is not None:
        if holds.offset > at and view[at : at + len(FRAME.magic)] == FRAME.magic:
            head = _damaged(view, at, holds.offset, epoch, commit, link)
            yield Commit(head, (), "it is damaged, and a commit that holds follows it")
            # What its seal ought to be is not known: the next one is not judged by it.
            commit, link, skipped = commit + 1, holds.previous, 0
        else:
            skipped = holds.offset - at
        head = Structure(FRAME, view[holds.offset :], holds.offset, holds.body, mend=False)
        head.expect("commit", commit, "one more than the frame before")
        head.expect("previous_xxh3_128", link, "the seal before it")
        said, problem = _said(holds, geometry)
        yield Commit(head, said, problem, skipped)
        at, link, commit = holds.end, holds.digest, holds.commit + 1


def _next_frame(view: memoryview, at: int, epoch: int) -> Frame | None:
    """Return the first frame that holds from `at` on."""
    frame = frame_at(view, at, epoch)
    if frame is None:
        with suppress(FormatError):
            frame = stray_frame(view, at, epoch)
    return frame


def _damaged(
    view: memoryview, offset: int, end: int, epoch: int, commit: int, link: bytes
) -> Structure:
    size = frame_bytes(view[offset : offset + FRAME.size])
    fits = FRAME.size <= size <= end - offset and size % FRAME_ALIGN == 0
    body = view[offset + FRAME.size : offset + size if fits else end]
    head = Structure(
        FRAME, view[offset:end], offset, body, mend=FRAME.size + len(body) <= MENDED_FRAME_BYTES
    )
    head.require("frame_bytes", fits, f"a multiple of {FRAME_ALIGN} up to {end - offset}")
    head.expect("commit", commit, "one more than the frame before")
    head.expect("epoch", epoch, "the header")
    head.expect("previous_xxh3_128", link, "the seal before it")
    return head


def _said(frame: Frame, geometry: Geometry | None) -> tuple[Sequence[Entry], str | None]:
    if geometry is None:
        return (), "no superblock says what its entries may hold"
    try:
        return frame.entries(TableLimits.of(geometry)), None
    except FormatError as error:
        return (), error.message
