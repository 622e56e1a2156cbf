"""The control: a per-object store built as well as we can, to compare Range with.

Owns one file per object, an index of prefix hashes, and what each object costs: one hash, one
lookup, one open, one direct read, one checksum, one delivery. It has the same threads, huge-page
banks, copies and checksum as Range and shares nothing else with it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from rangekv.engine.devices.cpu import Bytes
from rangekv.format.errors import TransferError

from rangectl.measure import Run, Sample, drop_residency, layers_ready
from rangectl.objects import StoredObject, Tokens, objects_of
from rangectl.paged_kv import BlockIds, PagedKV
from rangectl.raw_spans import SpanWorkers


class PerObjectStore:
    """Objects of whole blocks, of all layers each or, with `layerwise`, of one layer each.

    The folder belongs to this store; `discard` empties it. Not safe for concurrent calls.
    """

    def __init__(
        self, folder: Path, kv: PagedKV, workers: SpanWorkers, *, layerwise: bool, direct: bool
    ) -> None:
        self._folder = folder
        self._kv = kv.blocks.view(np.int64)
        self._workers = workers
        self._layerwise = layerwise
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._checksums: dict[str, int] = {}
        """the index: what is stored, by name"""
        folder.mkdir()

    def save(
        self, tokens: Sequence[Tokens], block_ids: Sequence[BlockIds]
    ) -> tuple[Sample, Counter[str]]:
        """Store every object of the prefix in place of what is stored; return cost and counts."""
        self._empty()
        run = Run()
        objects = self._objects(tokens)
        self._workers.each([self._write_job(one, block_ids[one.piece]) for one in objects])
        sample = run.done()
        # What is durable must not depend on when the kernel writes the folder back.
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        count = len(objects)
        return sample, Counter(
            hashes=count, opens=count, writes=count, gathers=count, syscalls=3 * count
        )

    def restore(
        self, tokens: Sequence[Tokens], block_ids: Sequence[BlockIds]
    ) -> tuple[Sample, Counter[str]]:
        """Bring every object of the prefix into its blocks; return cost and counts."""
        for name in self._checksums:
            drop_residency(str(self._folder / name))
        ready_ns: list[tuple[range, int]] = []
        run = Run()
        objects = self._objects(tokens)
        jobs = [self._read_job(one, block_ids[one.piece], ready_ns) for one in objects]
        self._workers.each(jobs)
        run.layers(layers_ready(len(self._kv), ready_ns))
        counts = Counter(
            hashes=len(objects),
            lookups=len(objects),
            records_selected=len(objects),
            opens=len(objects),
            reads=len(objects),
            syscalls=3 * len(objects),  # open, read, close
            checksum_pages=len(objects),
            scatters=len(objects),
            layer_events=len(self._kv),
            payload_allocations=0,
        )
        return run.done(), counts

    def discard(self) -> None:
        """Remove every object and the folder."""
        self._empty()
        self._folder.rmdir()

    def _empty(self) -> None:
        for name in self._checksums:
            (self._folder / name).unlink()
        self._checksums.clear()

    def _objects(self, tokens: Sequence[Tokens]) -> list[StoredObject]:
        return list(objects_of(tokens, len(self._kv), layerwise=self._layerwise))

    def _write_job(self, one: StoredObject, ids: BlockIds) -> Callable[[Bytes], None]:
        def write(bank: Bytes) -> None:
            content = self._content(bank, one, ids)
            content[:] = self._kv[_rows(one), ids]
            flags = self._flags | os.O_WRONLY | os.O_CREAT | os.O_EXCL
            fd = os.open(self._folder / one.name, flags, 0o600)
            try:
                _whole(os.pwritev(fd, [content.data], 0), content.nbytes, one.name)
                if not self._flags & os.O_DIRECT:
                    os.fdatasync(fd)
            finally:
                os.close(fd)
            self._checksums[one.name] = xxhash.xxh3_64_intdigest(content.data)

        return write

    def _read_job(
        self, one: StoredObject, ids: BlockIds, ready_ns: list[tuple[range, int]]
    ) -> Callable[[Bytes], None]:
        expected = self._checksums[one.name]

        def read(bank: Bytes) -> None:
            content = self._content(bank, one, ids)
            fd = os.open(self._folder / one.name, self._flags | os.O_RDONLY)
            try:
                _whole(os.preadv(fd, [content.data], 0), content.nbytes, one.name)
            finally:
                os.close(fd)
            if xxhash.xxh3_64_intdigest(content.data) != expected:
                raise TransferError("checksum-mismatch", "an object of the control has changed")
            self._kv[_rows(one), ids] = content
            ready_ns.append((one.layers, time.monotonic_ns()))

        return read

    def _content(self, bank: Bytes, one: StoredObject, ids: BlockIds) -> npt.NDArray[Any]:
        """Return the part of a bank that one object fills, as [layers, blocks, words]."""
        shape = (len(one.layers), len(ids), self._kv.shape[2])
        words: npt.NDArray[np.int64] = bank.view(np.int64)
        return words[: shape[0] * shape[1] * shape[2]].reshape(shape)


def _rows(one: StoredObject) -> slice:
    return slice(one.layers.start, one.layers.stop)


def _whole(count: int, asked: int, name: str) -> None:
    if count != asked:
        raise TransferError("short-transfer", f"object {name}: {count} of {asked} bytes moved")
