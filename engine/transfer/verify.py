"""Owns the check of restored pages against their checksums, and the policy that may skip it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import xxhash
from rangekv.engine.devices.cpu import BlockIds, Bytes, CpuDevice
from rangekv.engine.index.directory import Record
from rangekv.engine.transfer.spans import Segment, Span


def check_pages(span: Span, memory: Bytes, policy: str) -> tuple[int, Record | None]:
    """Return (pages hashed, record of the first bad page or None) for a span read into `memory`.

    A page is hashed with xxh3_64, seed 0, over its whole blocks (SPEC.md, checksums). Runs in a
    worker; marks verified pages for the `first-touch` policy.
    """
    view, run = memory.data, span.run

    def digest(segment: Segment, page: int) -> int:
        base = segment.bank_offset - run.page_begin[segment.page_first]
        begin = base + run.page_begin[page]
        return xxhash.xxh3_64_intdigest(view[begin : begin + run.page_bytes[page]])

    return _check(span, policy, digest)


def check_blocks(
    span: Span, device: CpuDevice, block_ids: BlockIds, policy: str
) -> tuple[int, Record | None]:
    """Do the same for a direct span, over the blocks it was read into.

    `block_ids` are the blocks of the span's pages, in token order.
    """
    run = span.run
    view, stride = device.block_rows(span.segments[0].layer_index)
    size = device.block_bytes
    starts = (block_ids * stride).tolist()

    def digest(segment: Segment, page: int) -> int:
        first = (run.page_begin[page] - run.page_begin[segment.page_first]) // size
        hasher = xxhash.xxh3_64()
        for start in starts[first : first + run.page_bytes[page] // size]:
            hasher.update(view[start : start + size])
        return hasher.intdigest()

    return _check(span, policy, digest)


def _check(
    span: Span, policy: str, digest: Callable[[Segment, int], int]
) -> tuple[int, Record | None]:
    run = span.run
    if policy == "off" or run.expected is None:
        return 0, None
    hashed = 0
    for segment in span.segments:
        expected = run.expected[segment.layer_index].tolist()
        for page in range(segment.page_first, segment.page_last):
            record = run.page_record[page]
            place = (segment.layer_index, run.page_index[page])
            if policy == "first-touch" and record.verified is not None and record.verified[place]:
                continue
            hashed += 1
            if digest(segment, page) != expected[page]:
                return hashed, record
            if policy == "first-touch":
                if record.verified is None and record.hashes is not None:
                    record.verified = np.zeros(record.hashes.shape, dtype=np.bool_)
                if record.verified is not None:
                    record.verified[place] = True
    return hashed, None
