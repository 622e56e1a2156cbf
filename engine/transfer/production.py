"""Owns what a producer has announced of one save and which pieces of it fill a bank.

Integers and block id arrays only; it never reads paged KV, takes a bank or writes a byte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass

import numpy as np
from rangekv.engine.devices.device import BlockIds
from rangekv.engine.index.directory import Record
from rangekv.format.geometry import ALIGNMENT, Geometry


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens [begin, end) of one layer that lie in one extent and are gathered together.

    `room_bytes` is what it takes of a bank: its blocks, the rest that its predecessor could not
    write yet, and padding to 4096.
    """

    part_index: int
    layer_index: int
    begin: int
    end: int
    block_ids: BlockIds
    room_bytes: int


class LayerProduction:
    """One layer of one save: announced up to `noted_end`, handed out for gathering to `taken_end`.

    Announcements are joined in token order, whatever order they come in; what was announced before
    is ignored.
    """

    __slots__ = ("_early", "_ids", "noted_end", "taken_end")

    def __init__(self, begin: int) -> None:
        self.noted_end = begin
        self.taken_end = begin
        self._ids: deque[BlockIds] = deque()
        self._early: dict[int, tuple[int, BlockIds]] = {}

    def note(self, begin: int, end: int, block_ids: BlockIds, block_tokens: int) -> None:
        """Add tokens [begin, end); `block_ids[i]` holds block begin/block_tokens + i."""
        if begin > self.noted_end:
            known = self._early.get(begin)
            if known is None or known[0] < end:
                self._early[begin] = (end, block_ids)
            return
        self._append(begin, end, block_ids, block_tokens)
        while self._early:
            first = min(self._early)
            if first > self.noted_end:
                return
            self._append(first, *self._early.pop(first), block_tokens)

    def _append(self, begin: int, end: int, block_ids: BlockIds, block_tokens: int) -> None:
        if end <= self.noted_end:
            return
        self._ids.append(block_ids[(self.noted_end - begin) // block_tokens :])
        self.noted_end = end

    def take(self, end: int, block_tokens: int) -> BlockIds:
        """Hand out the block ids of tokens [taken_end, end)."""
        left = (end - self.taken_end) // block_tokens
        taken: list[BlockIds] = []
        while left:
            ids = self._ids.popleft()
            if len(ids) > left:
                self._ids.appendleft(ids[left:])
                ids = ids[:left]
            taken.append(ids)
            left -= len(ids)
        self.taken_end = end
        return taken[0] if len(taken) == 1 else np.concatenate(taken)


class Production:
    """All layers of one save, cut by the extents of its parts."""

    def __init__(self, geometry: Geometry, parts: list[Record], bank_bytes: int) -> None:
        self.geometry = geometry
        self.begin = parts[0].token_start
        self.end = parts[-1].token_start + parts[-1].token_count
        self.layers = [LayerProduction(self.begin) for _ in range(geometry.layer_count)]
        self._part_begins = [part.token_start for part in parts]
        self._part_ends = [part.token_start + part.token_count for part in parts]
        page = geometry.page_tokens
        bank_tokens = bank_bytes // geometry.token_bytes
        # A full bank holds whole pages; a page that is longer than a bank cannot happen here.
        self._piece_tokens = bank_tokens // page * page

    def note(self, layer_index: int, begin: int, end: int, block_ids: BlockIds) -> None:
        """Note a producer's piece, clipped to what the save wants."""
        block_tokens = self.geometry.block_tokens
        if begin < self.begin:
            block_ids = block_ids[(self.begin - begin) // block_tokens :]
            begin = self.begin
        end = min(end, self.end)
        if end > begin:
            count = (end - begin) // block_tokens
            self.layers[layer_index].note(begin, end, block_ids[:count], block_tokens)

    def take_full(self, layer_index: int) -> list[Piece]:
        """Return the pieces of a layer that end their extent or fill a bank."""
        return self._take(layer_index, everything=False)

    def take_all(self) -> list[Piece]:
        """Return everything noted and not yet taken, layer by layer."""
        layers = range(self.geometry.layer_count)
        return [piece for layer in layers for piece in self._take(layer, everything=True)]

    def _take(self, layer_index: int, *, everything: bool) -> list[Piece]:
        layer = self.layers[layer_index]
        pieces: list[Piece] = []
        while layer.taken_end < layer.noted_end:
            begin = layer.taken_end
            part = bisect_right(self._part_begins, begin) - 1
            # Pieces end at page boundaries of their part, so that hashing starts anew behind them.
            offset = begin - self._part_begins[part]
            full = begin - offset % self.geometry.page_tokens + self._piece_tokens
            stop = min(self._part_ends[part], full)
            if layer.noted_end < stop:
                if not everything:
                    break
                stop = layer.noted_end
            ids = layer.take(stop, self.geometry.block_tokens)
            rest = offset * self.geometry.token_bytes % self.geometry.write_align_bytes
            size = rest + (stop - begin) * self.geometry.token_bytes
            room = -(-size // ALIGNMENT) * ALIGNMENT
            pieces.append(Piece(part, layer_index, begin, stop, ids, room))
        return pieces
