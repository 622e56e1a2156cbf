"""Owns the filling of one save bank: blocks copied in, pages hashed, native writes laid out.

It runs in a worker and touches nothing but its bank and the rest it carries; it never writes a file
and never decides what becomes visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from rangekv.engine.devices.device import Device, Lane, Memory, Strip
from rangekv.engine.devices.fence import FenceState
from rangekv.engine.index.directory import Record
from rangekv.engine.transfer.pages import PageHasher
from rangekv.engine.transfer.production import Piece
from rangekv.format.errors import ensure
from rangekv.format.geometry import ALIGNMENT, Geometry


@dataclass(frozen=True, slots=True)
class Write:
    """One native write: bank bytes [begin, end) to file offset `offset`."""

    offset: int
    begin: int
    end: int


@dataclass(slots=True)
class Gathered:
    """What a filled bank holds: the evidence of its copy, its writes, memory taken on the way.

    `error` is what its hashes failed with; the bank is not to be written then.
    """

    state: FenceState
    writes: list[Write] = field(default_factory=list)
    temporaries: int = 0
    error: Exception | None = None


@dataclass(slots=True)
class Sources:
    """Where the pieces of one save come from, and what it carries from step to step.

    `hashers[part][layer]` sees the bytes in token order. `carried` holds, by (part, layer), the
    bytes behind the last write unit: direct I/O cannot write them before their successors come.
    """

    geometry: Geometry
    device: Device
    lane: Lane
    parts: list[Record]
    hashers: list[list[PageHasher]]
    carried: dict[tuple[int, int], Memory] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """Bank bytes of one piece: from `position` on its predecessor's rest, [begin, end) its blocks.

    `offset` is where the blocks go, in bytes from the start of the piece's part of the layer.
    """

    piece: Piece
    position: int
    begin: int
    end: int
    offset: int


def fill_bank(sources: Sources, pieces: Sequence[Piece], memory: Memory) -> Gathered:
    """Copy `pieces` one behind the other into `memory` and say how they are to be written.

    Each begins at a multiple of 4096: the carried rest, its blocks, and zeros up to 4096 where its
    record ends. Writes end at multiples of the write unit (SPEC.md, writer protocol).
    """
    places = _places(sources, pieces)
    outcome = Gathered(_copy(sources, places, memory))
    if outcome.state is not FenceState.DONE:
        return outcome
    try:
        _hash(sources, places, memory)
    except Exception as error:
        # The copies have ended and a hash only reads: the bank is free, the save has failed.
        outcome.state, outcome.error = FenceState.FAILED, error
        return outcome
    for place in places:
        _lay_out(sources, place, memory, outcome)
    if not sources.device.gathers_in_place:
        outcome.temporaries += len(places)
    return outcome


def _places(sources: Sources, pieces: Sequence[Piece]) -> list[_Place]:
    geometry, position = sources.geometry, 0
    places = []
    for piece in pieces:
        offset = (piece.begin - sources.parts[piece.part_index].token_start) * geometry.token_bytes
        begin = position + offset % geometry.write_align_bytes
        end = begin + (piece.end - piece.begin) * geometry.token_bytes
        places.append(_Place(piece, position, begin, end, offset))
        position += piece.room_bytes
    return places


def _copy(sources: Sources, places: Sequence[_Place], memory: Memory) -> FenceState:
    """Copy the blocks of all pieces at once."""
    strips, first = [], 0
    for place in places:
        count = len(place.piece.block_ids)
        strips.append(Strip(place.piece.layer_index, place.begin, first, count))
        first += count
    ids = np.concatenate([place.piece.block_ids for place in places])
    return sources.device.gather(sources.lane, memory, strips, ids).wait()


def _hash(sources: Sources, places: Sequence[_Place], memory: Memory) -> None:
    """Hash the blocks of all pieces: whole pages where they are, at once, others on the host."""
    device, whole, told = sources.device, [], []
    for place in places:
        hasher = sources.hashers[place.piece.part_index][place.piece.layer_index]
        shift = place.begin - place.offset  # from places in the part to places in the bank
        for begin, end, is_whole in hasher.cut(place.offset, place.end - place.begin):
            if is_whole:
                whole.append((begin + shift, end - begin))
                told.append((hasher, begin))
            else:
                part = memory[begin + shift : end + shift]
                hasher.update(begin, device.host_view(sources.lane, part))
    digests = device.digests(sources.lane, memory, whole) if whole else ()
    for (hasher, begin), digest in zip(told, digests, strict=True):
        hasher.note(begin, digest)


def _lay_out(sources: Sources, place: _Place, memory: Memory, outcome: Gathered) -> None:
    """Put the carried rest before the blocks of a piece, zeros or nothing behind them: a write."""
    geometry, device, lane = sources.geometry, sources.device, sources.lane
    piece, unit = place.piece, geometry.write_align_bytes
    part, key = sources.parts[piece.part_index], (piece.part_index, piece.layer_index)
    rest = sources.carried.pop(key, None)
    ensure(
        (0 if rest is None else rest.nbytes) == place.begin - place.position,
        "a piece does not follow what was carried",
    )
    if rest is not None:
        device.put(lane, memory[place.position : place.begin], rest)
    write_end = place.position + (place.end - place.position) // unit * unit
    if piece.end == part.token_start + part.token_count:
        write_end = -(-place.end // ALIGNMENT) * ALIGNMENT
        device.put(lane, memory[place.end : write_end], None)
    elif write_end < place.end:
        sources.carried[key] = device.copy_of(lane, memory[write_end : place.end])
        outcome.temporaries += 1
    if write_end > place.position:
        stripe = geometry.address(
            part.extent.offset, part.extent.width, piece.layer_index, part.extent_token_start
        )
        offset = stripe + place.offset - (place.begin - place.position)
        outcome.writes.append(Write(offset, place.position, write_end))


def join_writes(writes: Sequence[Write], size_max: int) -> list[Write]:
    """Merge writes that follow each other in the bank and in the file, up to `size_max` bytes."""
    joined: list[Write] = []
    for write in writes:
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.end == write.begin
            and last.offset + last.end - last.begin == write.offset
            and write.end - last.begin <= size_max
        ):
            joined[-1] = Write(last.offset, last.begin, write.end)
        else:
            joined.append(write)
    return joined
