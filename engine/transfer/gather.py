"""Owns the filling of one save bank: blocks copied in, pages hashed, native writes laid out.

It runs in a worker and touches nothing but its bank and the rest it carries; it never writes a file
and never decides what becomes visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rangekv.engine.devices.device import Device, Lane, Memory
from rangekv.engine.devices.fence import FenceState
from rangekv.engine.index.directory import Record
from rangekv.engine.transfer.pages import PageHasher
from rangekv.engine.transfer.production import Piece
from rangekv.format.geometry import ALIGNMENT, Geometry


@dataclass(frozen=True, slots=True)
class Write:
    """One native write: bank bytes [begin, end) to file offset `offset`."""

    offset: int
    begin: int
    end: int


@dataclass(slots=True)
class Gathered:
    """What a filled bank holds: its writes, the evidence of its copies, memory taken on the way.

    `error` is what its hashes failed with; the bank is not to be written then.
    """

    writes: list[Write] = field(default_factory=list)
    states: list[FenceState] = field(default_factory=list)
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


def fill_bank(sources: Sources, pieces: Sequence[Piece], memory: Memory) -> Gathered:
    """Copy `pieces` one behind the other into `memory` and say how they are to be written.

    Each begins at a multiple of 4096: the carried rest, its blocks, and zeros up to 4096 where its
    record ends. Writes end at multiples of the write unit (SPEC.md, writer protocol).
    """
    geometry, device, lane = sources.geometry, sources.device, sources.lane
    unit = geometry.write_align_bytes
    outcome = Gathered()
    position = 0
    for piece in pieces:
        part = sources.parts[piece.part_index]
        place = (piece.part_index, piece.layer_index)
        rest = sources.carried.pop(place, None)
        begin = position
        if rest is not None:
            begin += len(rest)
            device.put(lane, memory[position:begin], rest)
        end = begin + (piece.end - piece.begin) * geometry.token_bytes
        target = memory[begin:end]
        fence = device.gather(lane, piece.layer_index, piece.block_ids, target)
        outcome.states.append(fence.wait())
        offset_in_part = (piece.begin - part.token_start) * geometry.token_bytes
        hasher = sources.hashers[piece.part_index][piece.layer_index]
        try:
            _hash(sources, hasher, offset_in_part, target)
        except Exception as error:
            # The copies have ended and a hash only reads: the bank is free, the save has failed.
            outcome.states.append(FenceState.FAILED)
            outcome.error = error
            return outcome
        write_end = position + (end - position) // unit * unit
        if piece.end == part.token_start + part.token_count:
            write_end = -(-end // ALIGNMENT) * ALIGNMENT
            device.put(lane, memory[end:write_end], None)
        elif write_end < end:
            sources.carried[place] = device.copy_of(lane, memory[write_end:end])
            outcome.temporaries += 1
        if write_end > position:
            stripe = geometry.address(
                part.extent.offset, part.extent.width, piece.layer_index, part.extent_token_start
            )
            offset = stripe + offset_in_part - (begin - position)
            outcome.writes.append(Write(offset, position, write_end))
        position += piece.room_bytes
    if not device.gathers_in_place:
        outcome.temporaries += len(pieces)
    return outcome


def _hash(sources: Sources, hasher: PageHasher, position: int, data: Memory) -> None:
    """Hash what lies at byte `position` of a part: whole pages where they are, others here."""
    device, whole = sources.device, []
    for begin, end, is_whole in hasher.cut(position, data.nbytes):
        if is_whole:
            whole.append((begin - position, end - begin))
        else:
            part = data[begin - position : end - position]
            hasher.update(begin, device.host_view(sources.lane, part))
    digests = device.digests(sources.lane, data, whole) if whole else ()
    for (begin, _), digest in zip(whole, digests, strict=True):
        hasher.note(position + begin, digest)


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
