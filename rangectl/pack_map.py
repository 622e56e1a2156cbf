"""The occupancy of a store's packs as a picture: one row of cells a pack, darker is younger.

Owns the picture, in colours on a terminal and in plain characters elsewhere; never reads a store.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rangekv.format.geometry import Geometry
from rangekv.format.records import Extent, Record

from rangectl.output import Drawn, counted, human_bytes

AGES = ("oldest", "older", "younger", "youngest")
_CELLS_MAX = 128
_WIDTH_ELSEWHERE = 100
# Cells from old to young, then room for the next turn, bytes of a damaged extent, free.
_GLYPHS = "░▒▓█-?."
_ASCII = "1234-?."
_ROOM, _DAMAGED, _FREE = 4, 5, 6
_NAMES = (*AGES, "room", "damaged", "free")
_COLOURS = (17, 25, 33, 51, 240, 196, 236)  # of the 256-colour palette


@dataclass(frozen=True, slots=True)
class PackRow:
    """One pack: `cells` are indices of the legend, each for an equal share of the pack."""

    index: int
    cells: bytes
    used_bytes: int
    extent_count: int


def pack_rows(
    geometry: Geometry,
    extents: Sequence[Extent],
    records: Sequence[Record],
    bad: frozenset[int],
    cell_count: int,
) -> Iterator[PackRow]:
    """Yield one row a pack. `bad` are rows of `extents` that cannot be trusted."""
    by_pack: dict[int, list[int]] = {}
    for ordinal, extent in enumerate(extents):
        by_pack.setdefault(extent.pack_index, []).append(ordinal)
    age = _ages(extents, records)
    for pack_index in range(geometry.pack_count):
        row = _Cells(geometry, pack_index, cell_count)
        mine = by_pack.get(pack_index, [])
        kinds = {one: _DAMAGED if one in bad else age.get(one, _ROOM) for one in mine}
        # Where extents share a cell the youngest is seen, and damage before all.
        for ordinal in sorted(mine, key=lambda one: (kinds[one] != _ROOM, kinds[one])):
            row.paint(extents[ordinal], kinds[ordinal])
        used = sum(geometry.extent_bytes(extents[one].width) for one in mine)
        yield PackRow(pack_index, bytes(row.cells), min(used, geometry.pack_bytes), len(mine))


def cells_of(geometry: Geometry) -> int:
    """Return how many cells a row has: the smallest extents, halved until they fit the terminal."""
    columns = shutil.get_terminal_size((_WIDTH_ELSEWHERE, 24)).columns if _is_terminal() else 0
    room = min(_CELLS_MAX, max(8, (columns or _WIDTH_ELSEWHERE) - 36))
    cells = 1 << geometry.order_max
    while cells > room:
        cells //= 2
    # Wide extents alone would make a row of two cells, which is no picture.
    while cells * 2 <= min(room, 32):
        cells *= 2
    return cells


def picture(geometry: Geometry, rows: Sequence[PackRow]) -> Iterator[str]:
    """Yield the map with its scale and legend; packs that look alike and follow are one row."""
    pen = _Pen.of_stdout()
    digits = len(str(geometry.pack_count - 1))
    cell_bytes = geometry.pack_bytes // len(rows[0].cells)
    scale = f"one row a pack of {human_bytes(geometry.pack_bytes)}"
    yield f"{scale}, one cell {human_bytes(cell_bytes)}"
    yield ""
    at = 0
    while at < len(rows):
        row, end = rows[at], at + 1
        while end < len(rows) and rows[end].cells == row.cells and row.extent_count == 0:
            end += 1
        name = f"{row.index:>{digits}}" + (f"-{rows[end - 1].index}" if end - at > 1 else "")
        share = 100 * row.used_bytes / geometry.pack_bytes
        note = counted(row.extent_count, "extent") if row.extent_count else "free"
        yield Drawn(f"{name:<{2 * digits + 1}}  {pen.draw(row.cells)}  {share:4.0f} %  {note}")
        at = end
    yield ""
    yield Drawn("   ".join(f"{pen.draw(bytes([kind]))} {name}" for kind, name in _legend(rows)))


def rows_json(rows: Sequence[PackRow]) -> list[dict[str, Any]]:
    """Return one object a pack; `cells` are runs of [what, cells]."""
    return [
        {
            "pack_index": row.index,
            "used_bytes": row.used_bytes,
            "extents": row.extent_count,
            "cells": [[_NAMES[cell], len(list(run))] for cell, run in groupby(row.cells)],
        }
        for row in rows
    ]


def _legend(rows: Sequence[PackRow]) -> Iterator[tuple[int, str]]:
    there = set(b"".join(row.cells for row in rows))
    yield from enumerate(AGES)
    yield _ROOM, "room for the next turn"
    if _DAMAGED in there:
        yield _DAMAGED, "damaged"
    yield _FREE, "free"


def _ages(extents: Sequence[Extent], records: Sequence[Record]) -> dict[int, int]:
    """Return the quarter of each extent by its last use, 0 the oldest; none where none is used."""
    last: dict[int, int] = {}
    for record in records:
        if record.extent < len(extents):
            last[record.extent] = max(last.get(record.extent, 0), record.access_rank)
    ranks = sorted(set(last.values()))
    place = {rank: index for index, rank in enumerate(ranks)}
    top = max(1, len(ranks) - 1)
    return {
        one: min(3, 4 * place[rank] // top) if len(ranks) > 1 else 3 for one, rank in last.items()
    }


class _Cells:
    """The cells of one pack while they are painted."""

    def __init__(self, geometry: Geometry, pack_index: int, count: int) -> None:
        self._geometry = geometry
        self._begin = geometry.pack_offset(pack_index)
        self._cell_bytes = geometry.pack_bytes / count
        self.cells = bytearray([_FREE] * count)

    def paint(self, extent: Extent, kind: int) -> None:
        """Fill the share of an extent; what is behind its append mark in every stripe is room."""
        size = self._geometry.extent_bytes(extent.width)
        filled = extent.append_mark_tokens * self._geometry.token_bytes / max(1, extent.width)
        start = extent.offset - self._begin
        self._fill(start, start + size, _ROOM)
        self._fill(start, start + size * min(1.0, filled), kind)

    def _fill(self, start: float, end: float, kind: int) -> None:
        first = int(start / self._cell_bytes)
        last = max(first + 1, round(end / self._cell_bytes))
        for cell in range(max(0, first), min(last, len(self.cells))):
            if kind != _ROOM or self.cells[cell] == _FREE:
                self.cells[cell] = kind


class _Pen:
    """Draws cells as the terminal can show them."""

    def __init__(self, glyphs: str, *, coloured: bool) -> None:
        self._glyphs = glyphs
        self._coloured = coloured

    @classmethod
    def of_stdout(cls) -> _Pen:
        try:
            _GLYPHS.encode(sys.stdout.encoding or "ascii")
        except UnicodeEncodeError:
            return cls(_ASCII, coloured=False)
        return cls(_GLYPHS, coloured=_is_terminal() and not os.environ.get("NO_COLOR"))

    def draw(self, cells: bytes) -> str:
        if not self._coloured:
            return "".join(self._glyphs[cell] for cell in cells)
        drawn = "".join(f"\x1b[38;5;{_COLOURS[cell]}m{self._glyphs[cell]}" for cell in cells)
        return f"{drawn}\x1b[0m"


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
