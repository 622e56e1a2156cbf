"""The ceiling: the very spans a restore reads and a save writes, moved by native calls alone.

Owns their list, made from the published tables and not by the engine's planner; no checksum, no
copy, no index, so that nothing that goes through banks can be faster.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rangekv.engine.devices.cpu import Bytes
from rangekv.format.geometry import ALIGNMENT, Geometry
from rangekv.format.tables import Tables

from rangectl.measure import Run, Sample, drop_residency, layers_ready
from rangectl.paged_kv import BlockIds, PagedKV
from rangectl.raw_spans import SPAN_BYTES, Span, SpanWorkers

IOV_MAX = 1024
"""Pieces of memory that one native call takes on Linux."""


class CeilingArm:
    """Moves everything that `tables` publish, layer by layer; the store must be closed."""

    def __init__(
        self, pack: Path, geometry: Geometry, tables: Tables, workers: SpanWorkers, *, direct: bool
    ) -> None:
        self.pack = pack
        self.direct = direct
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._workers = workers
        self._layer_count = geometry.layer_count
        self._block_tokens = geometry.block_tokens
        self._planned = sorted(_spans(geometry, tables), key=lambda planned: planned.layers.start)
        self._layers = [planned.layers for planned in self._planned]
        self.spans = [planned.span for planned in self._planned]

    def restore(self) -> tuple[Sample, Counter[str]]:
        """Read every span once; return cost and counts."""
        drop_residency(str(self.pack))
        fd = os.open(self.pack, self._flags | os.O_RDONLY)
        try:
            run = Run()
            finished_ns = [moved.end_ns for moved in self._workers.read(fd, self.spans)]
            layers = zip(self._layers, finished_ns, strict=True)
            run.layers(layers_ready(self._layer_count, layers))
            counts = Counter(reads=len(self.spans), syscalls=len(self.spans), payload_allocations=0)
            return run.done(), counts
        finally:
            os.close(fd)

    def restore_scattered(self, kv: PagedKV, block_ids: BlockIds) -> tuple[Sample, Counter[str]]:
        """Read every span once into the blocks themselves, token 0 … into `block_ids`.

        What it costs more than `restore` is the device's and the kernel's price for memory in
        pieces of a block: nothing that reads in place is spared it.
        """
        reads: list[tuple[Span, Sequence[Bytes]]] = []
        carried: list[range] = []
        for layers, tokens, span in self._planned:
            for done, memory in self._memory(kv, block_ids, layers, tokens):
                reads.append((Span(span.offset + done, sum(map(len, memory))), memory))
                carried.append(layers)
        drop_residency(str(self.pack))
        fd = os.open(self.pack, self._flags | os.O_RDONLY)
        try:
            run = Run()
            finished_ns = [moved.end_ns for moved in self._workers.read_into(fd, reads)]
            run.layers(layers_ready(self._layer_count, zip(carried, finished_ns, strict=True)))
            return run.done(), Counter(reads=len(reads), syscalls=len(reads))
        finally:
            os.close(fd)

    def _memory(
        self, kv: PagedKV, block_ids: BlockIds, layers: range, tokens: range
    ) -> Iterator[tuple[int, Sequence[Bytes]]]:
        """Yield (bytes of the span before, memory) of each native call."""
        first, end = tokens.start // self._block_tokens, tokens.stop // self._block_tokens
        blocks = [kv.blocks[layer][block] for layer in layers for block in block_ids[first:end]]
        for at in range(0, len(blocks), IOV_MAX):
            yield at * kv.model.block_bytes, blocks[at : at + IOV_MAX]

    def save(self) -> tuple[Sample, Counter[str]]:
        """Write every span once, over what the store holds there; not durable by itself."""
        fd = os.open(self.pack, self._flags | os.O_WRONLY)
        try:
            run = Run()
            self._workers.write(fd, self.spans)
            return run.done(), Counter(writes=len(self.spans), syscalls=len(self.spans))
        finally:
            os.close(fd)


class _Planned(NamedTuple):
    """One span and what it carries: whole stripes of some layers, or one layer of some tokens."""

    layers: range
    tokens: range
    span: Span


def _spans(geometry: Geometry, tables: Tables) -> Iterator[_Planned]:
    """Yield the spans of each record; full narrow stripes of adjacent layers join."""
    for record in tables.records:
        extent = tables.extents[record.extent]
        stripe_bytes = record.token_count * geometry.token_bytes
        full = stripe_bytes == extent.width
        step = max(1, SPAN_BYTES // extent.width) if full else 1
        tokens = range(record.token_start, record.token_start + record.token_count)
        for layer_index in range(0, geometry.layer_count, step):
            layers = min(step, geometry.layer_count - layer_index)
            length_bytes = (layers - 1) * extent.width + stripe_bytes
            offset = geometry.address(
                extent.offset, extent.width, layer_index, record.extent_token_start
            )
            carried = range(layer_index, layer_index + layers)
            span = Span(offset, -(-length_bytes // ALIGNMENT) * ALIGNMENT)
            yield _Planned(carried, tokens, span)
