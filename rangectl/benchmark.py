"""The restore benchmark: every arm at every object size, interleaved, each run proved.

Owns the temporary store and the order of the runs; the arms do the work, the report counts it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from rangekv.engine import EngineConfig
from rangekv.engine.inspection import read_store
from rangekv.engine.store import create
from rangekv.engine.testing.payload import Payload
from rangekv.format.errors import TransferError
from rangekv.format.geometry import ALIGNMENT
from rangekv.format.namespace import Namespace

from rangectl.ablations import consumers
from rangectl.benchmark_plan import Point, Setup
from rangectl.benchmark_report import Report
from rangectl.benchmark_result import ArmResult, PointResult
from rangectl.ceiling_arm import CeilingArm
from rangectl.concurrency import ConcurrencyResult
from rangectl.concurrent_runs import ConcurrentRuns
from rangectl.consumer import Consumer
from rangectl.control_arm import PerObjectStore
from rangectl.fio_arm import FioArm, require_fio
from rangectl.machine import Machine, require_proof, require_room
from rangectl.measure import Sample
from rangectl.objects import Tokens
from rangectl.output import Advance
from rangectl.paged_kv import BlockIds, PagedKV
from rangectl.range_arm import RangeArm
from rangectl.raw_file import RawFile
from rangectl.raw_spans import SpanWorkers
from rangectl.scratch import scratch_directory

_NAMESPACE = Namespace({"model": "restore-benchmark"})


def run_benchmark(setup: Setup, advance: Advance) -> Report:
    """Run all points of `setup` in a temporary folder that is gone afterwards, whatever happens.

    `advance` is told the payload's bytes for each round over all arms.
    """
    points = setup.points()
    fio = require_fio() if setup.fio else None
    require_proof(setup.folder)
    require_room(setup.folder, disk_bytes=setup.disk_bytes, memory_bytes=setup.memory_bytes)
    with ExitStack() as stack:
        # Asks for direct I/O before anything is written.
        RawFile(setup.folder, 1 << 20, allow_buffered=setup.allow_buffered).close()
        folder = stack.enter_context(scratch_directory(setup.folder, "benchmark"))
        workers = SpanWorkers(setup.thread_count)
        stack.callback(workers.close)
        bench = _Bench(setup, folder, workers, fio)
        results = [
            bench.run_point(point, generation, advance)
            for generation, point in enumerate(points, start=1)
        ]
        concurrency = bench.run_concurrent() if setup.concurrency else None
        machine = Machine.at(folder, bench.filesystem)
        return Report(setup, machine, bench.path, results, concurrency)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is run once a round, and where its samples go."""

    call: Callable[[Sequence[BlockIds]], tuple[Sample, Counter[str]]]
    delivers: bool = True
    result: ArmResult = field(default_factory=ArmResult)


_Runs = dict[str, _Run]


class _Bench:
    """The store, the memory and the threads that all points share."""

    def __init__(self, setup: Setup, folder: Path, workers: SpanWorkers, fio: str | None) -> None:
        self._setup = setup
        self._folder = folder
        self._workers = workers
        self._fio = fio
        self._ids = np.random.default_rng(setup.seed)
        self._order = random.Random(setup.seed)
        self._kv = PagedKV(setup.model, setup.block_count, setup.device)
        self._store = folder / "store"
        created = create(
            str(self._store),
            capacity_bytes=setup.capacity_bytes,
            model=setup.model,
            namespace=_NAMESPACE,
        )
        self._config = EngineConfig(
            read_workers=setup.read_workers,
            read_banks=setup.bank_count,
            save_banks=setup.bank_count,
            placement="banks",
            device=setup.device,
            payload=setup.payload_path,
            allow_buffered=setup.allow_buffered,
            join_pieces=setup.join_pieces,
        )
        self.filesystem = created.filesystem
        self.path = "unknown"
        """Which way the engine's bytes took, by what it has counted."""

    @property
    def _direct(self) -> bool:
        """Whether the arms without an engine read with O_DIRECT, as the engine does."""
        if self._setup.device == "cpu":
            return self.path == "posix-direct"
        return not self._setup.allow_buffered

    def run_point(self, point: Point, generation: int, advance: Advance) -> PointResult:
        """Save the payload in pieces of this size and restore it, by every arm, interleaved."""
        setup = self._setup
        payload = Payload(setup.model, generation)
        source = self._block_ids()
        self._kv.write(payload, source)
        tokens = point.pieces(
            self._ids.integers(0, 2**17, setup.token_count, dtype=np.uint32),
            setup.model.block_tokens,
        )
        banks = RangeArm(self._store, _NAMESPACE, self._kv, self._config, point.layerwise)
        # This save turns preallocated extents into written ones; it is not a sample.
        self.path = banks.save(tokens, point.pieces(source, 1))[2]
        control = PerObjectStore(
            self._folder / "objects",
            self._kv,
            self._workers,
            layerwise=point.layerwise,
            direct=self._direct,
        )
        saves = self._save(banks, control, tokens, point.pieces(source, 1))
        engines = self._engines(banks)
        arms = self._arms(engines, control, tokens)
        computing = self._computing(engines, tokens)
        ablated = {
            name: _restoring(replace(banks, consumer=consumer), tokens)
            for name, consumer in consumers(setup, point).items()
        }
        runs = [*arms.items(), *computing.items(), *ablated.items()]
        if generation == 1:
            # The first run of an arm pays for threads and page tables; it is not a sample.
            self._round(point, payload, runs, keep=False)
        for number in range(setup.repeat):
            self._round(point, payload, runs, whole=number == 0)
            advance(setup.payload_bytes)
        control.discard()
        result = PointResult(point, *map(_results, (arms, saves, computing, ablated)))
        result.count_saves()
        return result

    def run_concurrent(self) -> ConcurrencyResult:
        """Restore many requests at once, in place of what the points have saved."""
        banks = RangeArm(self._store, _NAMESPACE, self._kv, self._config, layerwise=False)
        return ConcurrentRuns(self._setup, self._engines(banks)).run()

    def _engines(self, banks: RangeArm) -> dict[str, RangeArm]:
        """Return the arms of the engine: through banks, and in place where the disk allows it."""
        if self._setup.device != "cpu" or self.path != "posix-direct":
            return {"range": banks}
        in_place = replace(banks, config=replace(self._config, placement="direct"))
        return {"range": banks, "range_direct": in_place}

    def _save(
        self,
        banks: RangeArm,
        control: PerObjectStore,
        tokens: Sequence[Tokens],
        source: Sequence[BlockIds],
    ) -> _Runs:
        """Save by every arm in random order, and by the engine once more: it is to be restored.

        Raw writes go over what it has saved, in the closed store: the same spans of the same file.
        """
        saves = {
            "raw": _Run(lambda blocks: ceiling.save()),
            "range": _Run(lambda blocks: banks.save(tokens, blocks)[:2]),
            "control": _Run(lambda blocks: control.save(tokens, blocks)),
        }
        control.save(tokens, source)
        ceiling = self._ceiling()
        for _ in range(self._setup.repeat):
            for name, run in self._shuffled(saves.items()):
                run.result.add(*run.call(source))
                if name == "range":
                    ceiling = self._ceiling()
        banks.save(tokens, source)
        return saves

    def _arms(
        self, engines: dict[str, RangeArm], control: PerObjectStore, tokens: Sequence[Tokens]
    ) -> _Runs:
        ceiling = self._ceiling()
        arms = {"ceiling": _Run(lambda blocks: ceiling.restore(), delivers=False)}
        if self._fio is not None:
            fio = FioArm(self._fio, self._folder, ceiling, self._setup.thread_count)
            arms["fio"] = _Run(lambda blocks: fio.restore(), delivers=False)
        if "range_direct" in engines and self._setup.model.block_bytes % ALIGNMENT == 0:
            arms["scattered"] = _Run(
                lambda blocks: ceiling.restore_scattered(self._kv, np.concatenate(blocks))
            )
        arms.update((name, _restoring(arm, tokens)) for name, arm in engines.items())
        arms["control"] = _Run(lambda blocks: control.restore(tokens, blocks))
        return arms

    def _computing(self, engines: dict[str, RangeArm], tokens: Sequence[Tokens]) -> _Runs:
        if not self._setup.compute_seconds:
            return {}
        consumer = Consumer(compute_seconds=self._setup.compute_seconds)
        return {
            name: _restoring(replace(arm, consumer=consumer), tokens)
            for name, arm in engines.items()
        }

    def _round(
        self,
        point: Point,
        payload: Payload,
        runs: list[tuple[str, _Run]],
        *,
        keep: bool = True,
        whole: bool = False,
    ) -> None:
        """Run everything once, in random order, and prove what it delivered."""
        for name, run in self._shuffled(runs):
            block_ids = self._block_ids()
            self._kv.poison()
            sample, counts = run.call(point.pieces(block_ids, 1))
            wrong = self._kv.check(payload, block_ids, whole=whole) if run.delivers else None
            if wrong is not None:
                raise TransferError("wrong-bytes", f"{name} delivered wrong KV: {wrong.line()}")
            if keep:
                run.result.add(sample, counts)

    def _ceiling(self) -> CeilingArm:
        """Read from the closed store which spans a restore would need now."""
        found = read_store(str(self._store))
        if found.geometry is None or found.tables is None or found.state != "warm":
            raise TransferError("not-warm", f"the saved store is {found.state}: {found.detail}")
        return CeilingArm(
            self._store / "range.pack",
            found.geometry,
            found.tables,
            self._workers,
            direct=self._direct,
        )

    def _shuffled(self, runs: Iterable[tuple[str, _Run]]) -> list[tuple[str, _Run]]:
        shuffled = list(runs)
        self._order.shuffle(shuffled)
        return shuffled

    def _block_ids(self) -> BlockIds:
        return self._ids.permutation(self._setup.block_count)


def _results(runs: _Runs) -> dict[str, ArmResult]:
    return {name: run.result for name, run in runs.items()}


def _restoring(arm: RangeArm, tokens: Sequence[Tokens]) -> _Run:
    return _Run(lambda blocks: arm.restore(tokens, blocks))
