"""Owns the bytes of a journal file: its header, its chain of frames, and where the chain ends.

One frame is one commit. A frame that does not hold is a torn tail if nothing valid lies behind it,
else damage; what the entries of a frame change is for replay.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rangekv.format import entries
from rangekv.format.checksum import Octets
from rangekv.format.entries import Entry
from rangekv.format.errors import FormatError, OutOfBounds, UnsupportedVersion
from rangekv.format.layout import COUNTER_MAX, Layout
from rangekv.format.tables import TableLimits

HEADER_BYTES = 128
JOURNAL_BYTES_MAX = 1 << 30
FRAME_ALIGN = 64
STRAY_PASSES = 8  # over the bytes behind the chain; no engine leaves anything that needs a second
STRAY_TRIES = 10_000  # of places that begin like a frame; no engine leaves more than one
VERSION_MAJOR = 1
VERSION_MINOR = 0

JOURNAL = Layout(
    "bad-journal",
    HEADER_BYTES,
    (
        (0, 12, "magic"),
        (12, 2, "version_major"),
        (14, 2, "version_minor"),
        (16, 16, "store_uuid"),
        (32, 8, "epoch"),
        (40, 8, "unix_ns"),
        (48, 16, "geometry_xxh3_128"),
        (64, 48, "reserved"),
        (112, 16, "xxh3_128"),
    ),
    magic=b"\x89RANGEJL\r\n\x1a\n",
)

FRAME = Layout(
    "bad-journal",
    96,
    (
        (0, 8, "magic"),
        (8, 8, "commit"),
        (16, 8, "epoch"),
        (24, 8, "frame_bytes"),
        (32, 8, "unix_ns"),
        (40, 8, "generation_max"),
        (48, 16, "previous_xxh3_128"),
        (64, 4, "entry_count"),
        (68, 12, "reserved"),
        (80, 16, "xxh3_128"),
    ),
    magic=b"\x89RJF\r\n\x1a\n",
)


@dataclass(frozen=True, slots=True)
class JournalHeader:
    """Which store and session a journal belongs to."""

    store_uuid: bytes
    epoch: int
    geometry_digest: bytes
    unix_ns: int = 0

    def encode(self) -> bytes:
        """Return the first HEADER_BYTES of the file; the last 16 of them seed the chain."""
        return JOURNAL.pack(
            {
                "version_major": VERSION_MAJOR,
                "version_minor": VERSION_MINOR,
                "epoch": self.epoch,
                "unix_ns": self.unix_ns,
            },
            {"store_uuid": self.store_uuid, "geometry_xxh3_128": self.geometry_digest},
        )

    @classmethod
    def decode(cls, head: Octets) -> JournalHeader:
        """Raises FormatError `bad-journal`, UnsupportedVersion `unsupported-version`."""
        integers, octets = JOURNAL.unpack(memoryview(head)[:HEADER_BYTES])
        if integers["version_major"] != VERSION_MAJOR:
            raise UnsupportedVersion(
                "unsupported-version",
                f"journal version {integers['version_major']}, expected {VERSION_MAJOR}",
            )
        JOURNAL.require_zero_reserved(memoryview(head)[:HEADER_BYTES])
        if integers["epoch"] > COUNTER_MAX:
            raise _refuse("the epoch is outside its limit")
        return cls(
            octets["store_uuid"],
            integers["epoch"],
            octets["geometry_xxh3_128"],
            integers["unix_ns"],
        )


@dataclass(frozen=True, slots=True)
class Frame:
    """One commit that was read; `body` is what `entries` takes apart."""

    offset: int
    commit: int
    epoch: int
    size: int
    unix_ns: int
    generation_max: int
    previous: bytes
    entry_count: int
    digest: bytes
    body: memoryview

    @property
    def end(self) -> int:
        return self.offset + self.size

    def entries(self, limits: TableLimits) -> list[Entry]:
        """Return what the commit says, in the order of events; raises FormatError."""
        return list(entries.decode(self.body, self.entry_count, limits))


@dataclass(frozen=True, slots=True)
class Journal:
    """A journal that was read: its header, its proved chain of commits, what lies behind them."""

    header: JournalHeader
    frames: tuple[Frame, ...]
    length: int
    """Bytes up to the end of the last proved frame."""
    torn_bytes: int
    """Bytes behind it: a commit that was under way."""


def encode_frame(
    header: JournalHeader,
    said: Sequence[Entry],
    *,
    commit: int,
    previous: bytes,
    generation_max: int,
    unix_ns: int,
) -> bytes:
    """Return one commit; its last seal (`digest_of`) is what the next one names as `previous`."""
    body = b"".join(entries.encode(entry) for entry in said)
    size = FRAME.size + len(body)
    padding = -size % FRAME_ALIGN
    body += bytes(padding)
    head = FRAME.pack(
        {
            "commit": commit,
            "epoch": header.epoch,
            "frame_bytes": size + padding,
            "unix_ns": unix_ns,
            "generation_max": generation_max,
            "entry_count": len(said),
        },
        {"previous_xxh3_128": previous},
        trailer=body,
    )
    return head + body


def digest_of(structure: Octets) -> bytes:
    """Return the seal of an encoded header or frame, the link for what follows it."""
    layout = JOURNAL if memoryview(structure)[: len(JOURNAL.magic)] == JOURNAL.magic else FRAME
    return bytes(memoryview(structure)[layout.seal_offset : layout.size])


def decode(data: Octets) -> Journal:
    """Read a whole journal file. Raises FormatError `bad-journal` for damage.

    Frames are views into `data`, which must not change any more.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise _refuse(f"the file ends after {len(view)} bytes, inside its header")
    header = JournalHeader.decode(view)
    frames: list[Frame] = []
    end, link = HEADER_BYTES, digest_of(view[:HEADER_BYTES])
    while end < len(view):
        frame = frame_at(view, end, header.epoch)
        if frame is None:
            break
        if (frame.previous, frame.commit) != (link, len(frames) + 1):
            raise _refuse(f"commit {frame.commit} does not follow the one before it", end)
        frames.append(frame)
        end, link = frame.end, frame.digest
    stray = stray_frame(view, end, header.epoch)
    if stray is not None:
        raise _refuse(f"a commit is damaged and commit {stray.commit} follows it", end)
    return Journal(header, tuple(frames), end, len(view) - end)


def frame_at(view: memoryview, offset: int, epoch: int) -> Frame | None:
    """Return the frame of this epoch that begins at `offset`, or None where none holds."""
    head = view[offset : offset + FRAME.size]
    if len(head) < FRAME.size or head[: len(FRAME.magic)] != FRAME.magic:
        return None
    size = frame_bytes(head)
    if size % FRAME_ALIGN or not FRAME.size <= size <= len(view) - offset:
        return None
    body = view[offset + FRAME.size : offset + size]
    try:
        integers, octets = FRAME.unpack(head, trailer=body)
        FRAME.require_zero_reserved(head)
    except FormatError:
        return None
    if integers["epoch"] != epoch or integers["generation_max"] > COUNTER_MAX:
        return None
    return Frame(
        offset=offset,
        commit=integers["commit"],
        epoch=integers["epoch"],
        size=size,
        unix_ns=integers["unix_ns"],
        generation_max=integers["generation_max"],
        previous=octets["previous_xxh3_128"],
        entry_count=integers["entry_count"],
        digest=octets["xxh3_128"],
        body=body,
    )


def frame_bytes(head: Octets) -> int:
    """Return how long a frame says that it is, unproved."""
    return int.from_bytes(memoryview(head)[24:32], "little")


def stray_frame(view: memoryview, end: int, epoch: int) -> Frame | None:
    """Return a frame that holds behind the end of the chain: what lies between is damaged.

    Raises FormatError `bad-journal` where the search would take too long.
    """
    rest = bytes(view[end:])
    hashed = tries = 0
    at = rest.find(FRAME.magic)
    while at >= 0:
        if (end + at) % FRAME_ALIGN == 0:
            frame = frame_at(view, end + at, epoch)
            if frame is not None:
                return frame
            hashed += min(frame_bytes(rest[at : at + FRAME.size]), len(rest))
            tries += 1
            if hashed > STRAY_PASSES * len(rest) or tries > STRAY_TRIES:
                raise _refuse("what lies behind the last commit pretends to be many commits", end)
        at = rest.find(FRAME.magic, at + 1)
    return None


def _refuse(message: str, offset: int | None = None) -> OutOfBounds:
    return OutOfBounds("bad-journal", message, offset=offset)
