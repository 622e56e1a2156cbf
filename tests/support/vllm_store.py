"""Looks into the stores that vLLM processes have left, and damages them."""

from __future__ import annotations

import os

import numpy as np
from rangekv.engine import inspection


def flip_byte_of(
    report: inspection.StoreReport, prompt: list[int], *, layer_index: int, token: int
) -> None:
    """Flip one bit of one stored token's KV; the file keeps its modification time."""
    tables, geometry = report.tables, report.geometry
    assert tables is not None
    assert geometry is not None
    record = next(
        each for each in tables.records if tokens_of(report, each) == prompt[: each.token_count]
    )
    assert token < record.token_count
    extent = tables.extents[record.extent]
    offset = geometry.address(
        extent.offset, extent.width, layer_index, record.extent_token_start + token
    )
    pack = os.path.join(report.path, "range.pack")
    before = os.stat(pack)
    with open(pack, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x80]))
    os.utime(pack, ns=(before.st_atime_ns, before.st_mtime_ns))


def tokens_of(report: inspection.StoreReport, record: object) -> list[int]:
    """Return the tokens of one record of a report."""
    tables = report.tables
    assert tables is not None
    all_tokens = np.frombuffer(tables.tokens, "<u4")
    begin = record.token_index  # type: ignore[attr-defined]
    return all_tokens[begin : begin + record.token_count].tolist()  # type: ignore[attr-defined]


def stored_tokens(report: inspection.StoreReport) -> int:
    assert report.tables is not None
    return sum(record.token_count for record in report.tables.records)
