"""The range arm: the product's own engine saves and restores the prefix.

Owns how a producer and a consumer of a given piece size speak to the engine; never looks inside it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.files import Files
from rangekv.format.errors import TransferError
from rangekv.format.namespace import Namespace

from rangectl.consumer import DEADLINE_S, PLAIN, Consumer
from rangectl.measure import Run, Sample, drop_residency
from rangectl.objects import Tokens, objects_of
from rangectl.paged_kv import BlockIds, PagedKV
from rangectl.short_reads import ShortReads


@dataclass(frozen=True, slots=True)
class RangeArm:
    """One bound store, the engine settings to open it with, and who consumes what it restores.

    Every save and every restore is a session of its own: the engine opens the store, works and
    closes it, so that a restore finds what a restart would find.
    """

    store: Path
    namespace: Namespace
    kv: PagedKV
    config: EngineConfig
    layerwise: bool
    consumer: Consumer = PLAIN

    def save(
        self, tokens: Sequence[Tokens], block_ids: Sequence[BlockIds]
    ) -> tuple[Sample, Counter[str], str]:
        """Announce the prefix piece by piece until it is published, alone in the store.

        Returns cost, counts, and how the engine reached the pack.
        """
        with self.session(replace(self.config, read_banks=1)) as engine:
            engine.reset()
            before = Counter(engine.stats().counters)
            run = Run()
            save = engine.save(RequestKey("save", "benchmark", 0), list(tokens))
            if save is None:
                raise TransferError(
                    "save-declined", f"the engine declined: {engine.stats().line()}"
                )
            for layer_index, span, ids in self._announcements(tokens, block_ids):
                save.layer_ready(layer_index, span, ids)
            extracted = save.extracted(DEADLINE_S)
            save.finish()
            if not (extracted and save.wait(DEADLINE_S)):
                raise TransferError("save-failed", f"nothing published: {engine.stats().line()}")
            path = engine.stats().path
            sample, counts = replace(run.done(), path=path), since(engine, before)
            counts["syscalls"] = counts["write_calls"]
            return sample, counts, path

    def restore(
        self, tokens: Sequence[Tokens], block_ids: Sequence[BlockIds]
    ) -> tuple[Sample, Counter[str]]:
        """Look up, claim and restore the prefix; return cost and counts of this one restore."""
        limit = self.consumer.read_bytes_max
        files = None if limit is None else ShortReads(limit)
        # A restore needs one save bank: none of it is used, and all of it takes time to map.
        with self.session(replace(self.config, save_banks=1), files) as engine:
            # Behind the open, which may have read through the cache to find out what GDS does.
            drop_residency(str(self.store / "range.pack"))
            opened = len(files.calls) if files is not None else 0
            sample, counts = self._restore(engine, tokens, block_ids)
            calls = counts["read_calls"] if files is None else len(files.calls) - opened
            counts["syscalls"] = calls
            return sample, counts

    def _restore(
        self, engine: Engine, tokens: Sequence[Tokens], block_ids: Sequence[BlockIds]
    ) -> tuple[Sample, Counter[str]]:
        consumer, index = self.consumer, self._index(tokens)
        before = Counter(engine.stats().counters)
        run = Run()
        named = [index[name] for name in self._names(tokens)] if index else []
        ahead = self._schedule(engine) if consumer.lookup_late else 0
        ticket = engine.lookup(RequestKey("restore", "benchmark", 0), list(tokens))
        ahead = ahead if consumer.lookup_late else self._schedule(engine)
        restore = engine.claim(ticket, list(tokens), list(block_ids))
        run.layers(consumer.consume(self.kv.model.layer_count, restore.wait_layer))
        restore.finish()
        sample = replace(run.done(), path=engine.stats().path)
        expected, failed = sum(map(len, tokens)), restore.failed_blocks()
        if ticket.token_count != expected or failed:
            raise TransferError(
                "incomplete-restore",
                f"{ticket.token_count} of {expected} tokens promised ({ticket.reason}), "
                f"{len(failed)} blocks failed",
            )
        counts = since(engine, before)
        counts.update(hashes=len(named), banks_ahead=ahead)
        return sample, counts

    def _schedule(self, engine: Engine) -> int:
        """Let the time pass that scheduling takes; return how many banks were read into by then."""
        if not self.consumer.claim_delay_seconds:
            return 0
        time.sleep(self.consumer.claim_delay_seconds)
        return engine.stats().read_banks_in_use

    def _names(self, tokens: Sequence[Tokens]) -> Iterator[str]:
        layers = self.kv.model.layer_count
        return (one.name for one in objects_of(tokens, layers, layerwise=self.layerwise))

    def _index(self, tokens: Sequence[Tokens]) -> dict[str, int]:
        """Return the index of a store of objects; empty for a consumer that does not ask it."""
        names = self._names(tokens) if self.consumer.name_objects else ()
        return {name: ordinal for ordinal, name in enumerate(names)}

    @contextmanager
    def session(self, config: EngineConfig, files: Files | None = None) -> Iterator[Engine]:
        """Open the store with paged KV attached, and require a clean close."""
        engine = Engine.open(
            str(self.store),
            namespace=self.namespace,
            geometry=self.kv.model,
            config=config,
            files=files,
        )
        try:
            engine.attach(self.kv.layers)
            yield engine
        finally:
            closed = engine.close(DEADLINE_S)
        if closed.state != "clean":
            raise TransferError("close-failed", f"the store stayed dirty: {closed.detail}")

    def _announcements(
        self, tokens: Sequence[Tokens], block_ids: Sequence[BlockIds]
    ) -> Iterator[tuple[int, tuple[int, int], BlockIds]]:
        """Yield (layer, token range, its blocks) in the producer's order."""
        spans, start = [], 0
        for piece in tokens:
            spans.append((start, start + len(piece)))
            start += len(piece)
        layers = range(self.kv.model.layer_count)
        pieces = list(zip(spans, block_ids, strict=True))
        if self.layerwise:
            yield from ((layer, span, ids) for layer in layers for span, ids in pieces)
        else:
            yield from ((layer, span, ids) for span, ids in pieces for layer in layers)


def since(engine: Engine, before: Counter[str]) -> Counter[str]:
    """Return what the engine has counted from `before` on."""
    after = Counter(engine.stats().counters)
    after.subtract(before)
    return after
