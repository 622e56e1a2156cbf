"""The payload of a warm store against its checksums, page by page.

Owns the reading order and the three counts; never writes, repairs or stamps a checksum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock

import numpy as np
import numpy.typing as npt
from rangekv.engine.devices.cpu import bank_memory
from rangekv.engine.files import OS_FILES
from rangekv.engine.inspection import Reading
from rangekv.format.checksum import xxh3_64
from rangekv.format.geometry import ALIGNMENT, Geometry
from rangekv.format.records import NO_CHECKSUM
from rangekv.format.tables import Tables

from rangectl.measure import physical_read_bytes
from rangectl.output import Advance

BAD_PAGES_NAMED_MAX = 100

Mask = npt.NDArray[np.bool_]
"""One bool a checksum, in the order of the CHECKSUMS section: which pages are to be read."""


@dataclass(frozen=True, slots=True)
class BadPage:
    """A page whose bytes are not those that were saved, or cannot be read."""

    record_id: int
    layer_index: int
    token_start: int
    offset: int
    problem: str
    extent: int
    """Row of the extent table."""
    pack_index: int
    page_index: int
    """Of the record's layer."""


@dataclass(slots=True)
class PayloadCounts:
    """Pages by what is known of them; only the first 100 bad ones are named."""

    ok: int = 0
    bad: int = 0
    unverifiable: int = 0
    """Pages without a checksum: their bytes never passed a hasher."""
    read_bytes: int = 0
    bad_pages: list[BadPage] = field(default_factory=list)
    bad_records: list[int] = field(default_factory=list)
    """Ids of the records with a bad page, ascending."""


@dataclass(frozen=True, slots=True)
class Media:
    """What shows that a device was read and not memory."""

    direct: bool
    physical_read_bytes: int | None
    """What the kernel counted for this process; None where it does not count."""
    proved: bool


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pages of one record's layer: contiguous bytes, one read."""

    record: int
    """Row of the record table."""
    layer_index: int
    page_first: int
    page_last: int
    offset: int
    length_bytes: int


def page_sizes(geometry: Geometry, tables: Tables) -> npt.NDArray[np.int64]:
    """Return the bytes of every page that has a checksum, in the order of CHECKSUMS."""
    sizes = np.full(tables.checksum_count, geometry.page_bytes, dtype=np.int64)
    for record in tables.records:
        if record.checksum_index == NO_CHECKSUM:
            continue
        pages = geometry.page_count(record.token_count)
        last = record.token_count * geometry.token_bytes - (pages - 1) * geometry.page_bytes
        first = record.checksum_index
        sizes[first + pages - 1 : first + pages * geometry.layer_count : pages] = last
    return sizes


def check_payload(
    reading: Reading,
    geometry: Geometry,
    tables: Tables,
    chosen: Mask,
    advance: Advance,
    threads: int = 1,
) -> tuple[PayloadCounts, Media]:
    """Read the chosen pages from the device and compare them; `reading` holds the lock."""
    before = physical_read_bytes()
    if not reading.direct:
        os.posix_fadvise(reading.pack_fd, 0, 0, os.POSIX_FADV_DONTNEED)
    check = _Check(reading, geometry, tables, _runs(geometry, tables, chosen), advance)
    check.work(threads)
    counts = check.counts
    counts.unverifiable = sum(
        geometry.layer_count * geometry.page_count(record.token_count)
        for record in tables.records
        if record.checksum_index == NO_CHECKSUM
    )
    counts.bad_pages.sort(key=lambda page: page.offset)
    counts.bad_records = sorted(check.bad_records)
    after = physical_read_bytes()
    physical = None if before is None or after is None else after - before
    proved = physical is not None and physical >= counts.read_bytes > 0
    return counts, Media(reading.direct, physical, proved)


def _runs(geometry: Geometry, tables: Tables, chosen: Mask) -> Iterator[Run]:
    """Yield what is to be read; a record of which nothing is chosen costs one look."""
    for row, record in enumerate(tables.records):
        if record.checksum_index == NO_CHECKSUM:
            continue
        extent = tables.extents[record.extent]
        pages = geometry.page_count(record.token_count)
        length = record.token_count * geometry.token_bytes
        first = record.checksum_index
        mine = chosen[first : first + geometry.layer_count * pages].reshape(-1, pages)
        if not mine.any():
            continue
        for layer_index in np.flatnonzero(mine.any(axis=1)).tolist():
            offset = geometry.address(
                extent.offset, extent.width, layer_index, record.extent_token_start
            )
            for begin, end in _spells(mine[layer_index]):
                start = begin * geometry.page_bytes
                stop = min(end * geometry.page_bytes, length)
                yield Run(row, layer_index, begin, end, offset + start, stop - start)


def _spells(mask: Mask) -> Iterator[tuple[int, int]]:
    """Yield (first, behind the last) of every run of True."""
    if mask.all():
        yield 0, len(mask)
        return
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


class _Check:
    """The runs still to be read and what was found so far; workers take one after another."""

    def __init__(
        self,
        reading: Reading,
        geometry: Geometry,
        tables: Tables,
        runs: Iterator[Run],
        advance: Advance,
    ) -> None:
        self.counts = PayloadCounts()
        self.bad_records: set[int] = set()
        self._reading = reading
        self._geometry = geometry
        self._tables = tables
        self._checksums = memoryview(tables.checksums).cast("B").cast("Q")
        self._runs = runs
        self._advance = advance
        self._stopped = False
        self._lock = Lock()  # protects the runs, the counts and the bar

    def work(self, threads: int) -> None:
        """Read all runs; an error or Ctrl-C waits for the reads in flight and no others."""
        with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
            workers = [pool.submit(self._work) for _ in range(threads)]
            try:
                for worker in workers:
                    worker.result()
            except BaseException:
                self._stopped = True
                raise

    def _work(self) -> None:
        bank = bank_memory(self._geometry.stripe_bytes_max + ALIGNMENT).data
        while True:
            with self._lock:
                run = None if self._stopped else next(self._runs, None)
            if run is None:
                return
            bad = self._bad_pages(run, bank)
            with self._lock:
                self._count(run, bad)

    def _count(self, run: Run, bad: list[BadPage]) -> None:
        counts = self.counts
        counts.ok += run.page_last - run.page_first - len(bad)
        counts.bad += len(bad)
        counts.read_bytes += run.length_bytes
        counts.bad_pages += bad[: BAD_PAGES_NAMED_MAX - len(counts.bad_pages)]
        self.bad_records.update(page.record_id for page in bad)
        self._advance(run.length_bytes)

    def _bad_pages(self, run: Run, bank: memoryview) -> list[BadPage]:
        geometry, record = self._geometry, self._tables.records[run.record]
        problem = self._read(run, bank)
        pages = geometry.page_count(record.token_count)
        first = record.checksum_index + run.layer_index * pages
        bad: list[BadPage] = []
        for page in range(run.page_first, run.page_last):
            start = (page - run.page_first) * geometry.page_bytes
            end = min(start + geometry.page_bytes, run.length_bytes)
            if problem is None and xxh3_64(bank[start:end]) == self._checksums[first + page]:
                continue
            bad.append(
                BadPage(
                    record_id=record.record_id,
                    layer_index=run.layer_index,
                    token_start=record.token_start + page * geometry.page_tokens,
                    offset=run.offset + start,
                    problem=problem or "checksum mismatch",
                    extent=record.extent,
                    pack_index=self._tables.extents[record.extent].pack_index,
                    page_index=page,
                )
            )
        return bad

    def _read(self, run: Run, bank: memoryview) -> str | None:
        """Fill `bank`; return what went wrong, or None."""
        wanted = -(-run.length_bytes // ALIGNMENT) * ALIGNMENT
        try:
            count = OS_FILES.preadv(self._reading.pack_fd, [bank[:wanted]], run.offset)
        except OSError as error:
            return error.strerror or str(error)
        if count >= run.length_bytes:
            return None
        return f"{count} of {wanted} bytes could be read"
