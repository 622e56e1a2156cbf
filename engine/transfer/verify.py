"""Owns the check of restored pages against their checksums, and the policy that may skip it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import xxhash
from rangekv.engine.devices.device import BlockIds, Device, Lane, Memory
from rangekv.engine.index.directory import Record
from rangekv.engine.transfer.spans import Segment, Span

Place = tuple[Segment, int]  # a page of a span's run, in one layer


def check_pages(
    span: Span, device: Device, lane: Lane, memory: Memory, policy: str
) -> tuple[int, Record | None]:
    """Return (pages hashed, record of the first bad page or None) for a span read into `memory`.

    A page is hashed with xxh3_64, seed 0, over its whole blocks (SPEC.md, checksums). Runs in a
    worker; marks verified pages for the `first-touch` policy.
    """
    run = span.run

    def digests(places: list[Place]) -> Iterable[int]:
        pages = []
        for segment, page in places:
            base = segment.bank_offset - run.page_begin[segment.page_first]
            pages.append((base + run.page_begin[page], run.page_bytes[page]))
        return device.digests(lane, memory, pages)

    return _check(span, policy, digests)


def check_blocks(
    span: Span, device: Device, block_ids: BlockIds, policy: str
) -> tuple[int, Record | None]:
    """Do the same for a direct span, over the blocks it was read into.

    `block_ids` are the blocks of the span's pages, in token order.
    """
    run = span.run
    view, stride = device.block_rows(span.segments[0].layer_index)
    size = device.block_bytes
    starts = (block_ids * stride).tolist()

    def digests(places: list[Place]) -> Iterator[int]:
        for segment, page in places:
            first = (run.page_begin[page] - run.page_begin[segment.page_first]) // size
            hasher = xxhash.xxh3_64()
            for start in starts[first : first + run.page_bytes[page] // size]:
                hasher.update(view[start : start + size])
            yield hasher.intdigest()

    return _check(span, policy, digests)


def _check(
    span: Span, policy: str, digests: Callable[[list[Place]], Iterable[int]]
) -> tuple[int, Record | None]:
    run = span.run
    if policy == "off" or run.expected is None:
        return 0, None
    places = [
        (segment, page)
        for segment in span.segments
        for page in range(segment.page_first, segment.page_last)
        if policy != "first-touch" or not _is_verified(span, segment, page)
    ]
    hashed = 0
    for (segment, page), digest in zip(places, digests(places), strict=True):
        hashed += 1
        record = run.page_record[page]
        if digest != run.expected[segment.layer_index, page]:
            return hashed, record
        if policy == "first-touch":
            if record.verified is None and record.hashes is not None:
                record.verified = np.zeros(record.hashes.shape, dtype=np.bool_)
            if record.verified is not None:
                record.verified[segment.layer_index, run.page_index[page]] = True
    return hashed, None


def _is_verified(span: Span, segment: Segment, page: int) -> bool:
    verified = span.run.page_record[page].verified
    place = (segment.layer_index, span.run.page_index[page])
    return verified is not None and bool(verified[place])
