"""Media damage on top of a power cut: a superblock slot, or a commit of the journal, went bad.

Owns which damage there is and what may be lost by it; the bytes themselves are the image's.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

from rangekv.engine.folder import JOURNAL, PACK
from rangekv.engine.testing.crash.image import Image
from rangekv.format import journal
from rangekv.format.errors import FormatError
from rangekv.format.geometry import SUPERBLOCK_OFFSETS
from rangekv.format.superblock import SUPERBLOCK_BYTES, Slot


class Rot(Enum):
    """One thing that cannot be read any more."""

    SLOT_A = "slot-a"
    SLOT_B = "slot-b"
    LAST_COMMIT = "last-commit"
    """It looks torn."""
    OTHER_COMMIT = "other-commit"
    """The first one, where there are more."""


def rotten(image: Image) -> Iterator[tuple[Rot, Image]]:
    """Yield the image with each of them, where a store is there and the journal holds commits."""
    names = next((names for names in image.entries.values() if PACK in names), None)
    if names is None:
        return
    pack = image.nodes[names[PACK]].data
    holds = [
        Slot.read(pack.read(offset, SUPERBLOCK_BYTES), index).superblock is not None
        for index, offset in enumerate(SUPERBLOCK_OFFSETS)
    ]
    if all(holds):  # one that a power cut tore is the damage already
        for rot, offset in zip((Rot.SLOT_A, Rot.SLOT_B), SUPERBLOCK_OFFSETS, strict=True):
            yield rot, _written(image, names[PACK], offset, bytes(SUPERBLOCK_BYTES))
    if JOURNAL not in names:
        return
    content = image.nodes[names[JOURNAL]].data
    data = content.read(0, content.size)
    try:
        frames = journal.decode(data).frames
    except FormatError:
        return
    for rot, frame in ((Rot.LAST_COMMIT, frames[-1:]), (Rot.OTHER_COMMIT, frames[:-1])):
        if frame:
            end = frame[0].end
            yield rot, _written(image, names[JOURNAL], end - 1, bytes([data[end - 1] ^ 1]))


def _written(image: Image, key: int, offset: int, data: bytes) -> Image:
    bad = image.copy()
    bad.update(key, bad.nodes[key].data.written(offset, data))
    return bad
