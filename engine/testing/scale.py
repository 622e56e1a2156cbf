"""What the metadata of a large store costs: open, also after a kill, lookup, close, inspect.

    python -m rangekv.engine.testing.scale [--tokens 32000000] [--records 100000] [--dir .]

The pack file has no blocks: only metadata is written and read. Every step runs in a process of
its own, so that memory is its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rangekv.engine.config import MIB, EngineConfig
from rangekv.engine.engine import Engine
from rangekv.engine.files import Files
from rangekv.engine.index.tickets import RequestKey
from rangekv.engine.inspection import read_store
from rangekv.engine.store import Store, create
from rangekv.format.entries import HAS_CHECKSUMS, NO_PARENT_ID, Publish, Published
from rangekv.format.geometry import (
    STRIPE_BYTES_CAP,
    STRIPE_BYTES_FLOOR,
    Geometry,
    ModelGeometry,
)
from rangekv.format.namespace import Namespace
from rangekv.format.records import NO_PARENT, NO_SALT, Extent, Record
from rangekv.format.tables import Tables

MODEL = ModelGeometry(layer_count=32, token_bytes=4096, block_tokens=16)
NAMESPACE = Namespace({"model": "scale"})
TURNS = 5  # records of one conversation, if so many fit
LOOKUPS = 200
TALKS_A_COMMIT = 100
BANK_BYTES = 32 * MIB
SEED = 7


class SparseFiles(Files):
    """Real calls; a pack file gets its length and no blocks, and any file system may hold it."""

    def fallocate(self, fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length)

    def free_bytes(self, fd: int) -> int:
        return 1 << 62


@dataclass(frozen=True, slots=True)
class Shape:
    """Conversations of equal length: each one extent, each turn one record in its tail."""

    talks: int
    turns: int
    turn_tokens: int

    @classmethod
    def of(cls, token_count: int, record_count: int) -> Shape:
        """Return the shape with about so many tokens and records."""
        block = MODEL.block_tokens
        turn_tokens = max(block, token_count // record_count // block * block)
        turns = min(TURNS, STRIPE_BYTES_CAP // (turn_tokens * MODEL.token_bytes))
        if turns == 0:
            raise SystemExit("so many tokens do not fit into one record: ask for more records")
        return cls(record_count // turns, turns, turn_tokens)

    @property
    def tokens(self) -> int:
        """Of one conversation."""
        return self.turns * self.turn_tokens

    @property
    def width(self) -> int:
        """Stripe bytes of one conversation's extent."""
        return max(1 << (self.tokens * MODEL.token_bytes - 1).bit_length(), STRIPE_BYTES_FLOOR)

    @property
    def capacity_bytes(self) -> int:
        """What all extents take, and some more, so that packs have their full size."""
        return max(int(self.talks * self.width * MODEL.layer_count * 1.05), 16 << 30)


def tables_of(geometry: Geometry, shape: Shape) -> Tables:
    """Return full tables, every token random."""
    turn_tokens = shape.turn_tokens
    extent_bytes = geometry.extent_bytes(shape.width)
    pages = geometry.layer_count * geometry.page_count(turn_tokens)
    extents: list[Extent] = []
    records: list[Record] = []
    for talk in range(shape.talks):
        pack_index, place = divmod(talk, geometry.pack_bytes // extent_bytes)
        offset = geometry.pack_offset(pack_index) + place * extent_bytes
        extents.append(Extent(talk + 1, offset, shape.width, pack_index, shape.tokens))
        for turn in range(shape.turns):
            row = len(records)
            records.append(
                Record(
                    record_id=row + 1,
                    token_index=row * turn_tokens,
                    checksum_index=row * pages,
                    access_rank=talk,
                    extent=talk,
                    extent_token_start=turn * turn_tokens,
                    token_start=turn * turn_tokens,
                    token_count=turn_tokens,
                    parent=row - 1 if turn else NO_PARENT,
                    parent_tokens=turn_tokens if turn else 0,
                    root=0,
                )
            )
    chance = np.random.default_rng(SEED)
    return Tables(
        extents,
        records,
        tokens=chance.integers(0, 2**32, len(records) * turn_tokens, np.uint32).tobytes(),
        checksums=chance.integers(0, 2**64, len(records) * pages, np.uint64).tobytes(),
        generation_max=shape.talks,
    )


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


@contextmanager
def seconds(found: dict[str, float], name: str) -> Iterator[None]:
    begin = time.perf_counter()
    yield
    found[name] = round(time.perf_counter() - begin, 3)


def build(path: str, shape: Shape) -> dict[str, float]:
    """Make the store and close it with full tables."""
    files = SparseFiles()
    create(
        path,
        capacity_bytes=shape.capacity_bytes,
        model=MODEL,
        namespace=NAMESPACE,
        files=files,
    )
    store = Store.open(path, namespace=NAMESPACE, model=MODEL, files=files, allow_buffered=True)
    tables = tables_of(store.geometry, shape)
    found: dict[str, float] = {"tokens": tables.token_count, "records": len(tables.records)}
    with seconds(found, "store_close_s"):
        result = store.close(tables)
    if result.state != "clean":
        raise SystemExit(result.detail)
    found["snapshot_bytes"] = os.stat(os.path.join(path, "range.snapshot")).st_size
    return found


def use(path: str, shape: Shape) -> dict[str, float]:
    """Open an engine, look prompts up, close it; memory is what the open added."""
    length = shape.tokens
    tokens = np.random.default_rng(SEED).integers(0, 2**32, shape.talks * length, np.uint32)
    picked = random.Random(SEED).sample(range(shape.talks), min(LOOKUPS, shape.talks))
    prompts = [tokens[one * length : (one + 1) * length].copy() for one in picked]
    del tokens
    gc.collect()
    before = resident_bytes()
    found: dict[str, float] = {}
    config = EngineConfig(
        read_bank=BANK_BYTES,
        read_banks=1,
        save_bank=BANK_BYTES,
        save_banks=1,
        read_workers=1,
        allow_buffered=True,
    )
    before += 2 * BANK_BYTES
    with seconds(found, "open_s"):
        engine = Engine.open(
            path, namespace=NAMESPACE, geometry=MODEL, config=config, files=SparseFiles()
        )
    if engine.open_result.state != "warm":
        raise SystemExit(engine.open_result.detail)
    gc.collect()
    found["memory_bytes"] = resident_bytes() - before
    found["peak_bytes"] = peak_bytes() - before
    with seconds(found, "lookups_s"):
        for number, prompt in enumerate(prompts):
            ticket = engine.lookup(RequestKey(f"{number}", "scale"), prompt)
            if ticket.token_count != length:
                raise SystemExit("a stored prompt was not found")
            engine.release(ticket)
    found["lookup_ms"] = round(found.pop("lookups_s") / len(prompts) * 1000, 3)
    with seconds(found, "close_s"):
        result = engine.close(60)
    if result.state != "clean":
        raise SystemExit(result.detail)
    found["close_peak_bytes"] = peak_bytes() - before
    return found


def inspect(path: str, shape: Shape) -> dict[str, float]:
    """Look at the store as `rangectl inspect` does."""
    before, found = resident_bytes(), dict[str, float]()
    with seconds(found, "inspect_s"):
        report = read_store(path)
    if report.state != "warm":
        raise SystemExit(report.detail)
    found["inspect_peak_bytes"] = peak_bytes() - before
    return found


def killed(path: str) -> str:
    """Return the place of the store whose session was killed."""
    return f"{path}-killed"


def kill(path: str, shape: Shape) -> dict[str, float]:
    """Make a store whose session told its journal of everything, and then ended without a close."""
    files = SparseFiles()
    create(
        killed(path),
        capacity_bytes=shape.capacity_bytes,
        model=MODEL,
        namespace=NAMESPACE,
        files=files,
    )
    store = Store.open(
        killed(path),
        namespace=NAMESPACE,
        model=MODEL,
        files=files,
        allow_buffered=True,
        recover=True,
    )
    tables = tables_of(store.geometry, shape)
    found: dict[str, float] = {}
    with seconds(found, "journal_write_s"):
        for first in range(0, shape.talks, TALKS_A_COMMIT):
            said = publication_of(tables, shape, first, min(first + TALKS_A_COMMIT, shape.talks))
            if not store.commit([said], shape.talks):
                raise SystemExit("the journal cannot be written")
    found["journal_bytes"] = 0 if store.journal is None else store.journal.length
    store.abandon()
    return found


def publication_of(tables: Tables, shape: Shape, first: int, last: int) -> Publish:
    """Return conversations [first, last) as one commit tells of them."""
    rows = tables.records[first * shape.turns : last * shape.turns]
    checksums = memoryview(tables.checksums).cast("B").cast("Q")
    tokens = memoryview(tables.tokens).cast("B").cast("I")
    end = last * shape.turns
    stop = tables.records[end].checksum_index if end < len(tables.records) else len(checksums)
    return Publish(
        extents=tables.extents[first:last],
        records=[
            Published(
                record_id=row.record_id,
                parent_id=NO_PARENT_ID if row.parent == NO_PARENT else row.record_id - 1,
                generation=tables.extents[row.extent].generation,
                access_rank=row.access_rank,
                extent_token_start=row.extent_token_start,
                token_start=row.token_start,
                token_count=row.token_count,
                parent_tokens=row.parent_tokens,
                root=0,
                flags=HAS_CHECKSUMS,
            )
            for row in rows
        ],
        roots=[NO_SALT],
        tokens=tokens[first * shape.tokens : last * shape.tokens].cast("B"),
        checksums=checksums[rows[0].checksum_index : stop].cast("B"),
    )


def recover(path: str, shape: Shape) -> dict[str, float]:
    """Open the store of the killed session."""
    before, found = resident_bytes(), dict[str, float]()
    with seconds(found, "recover_s"):
        store = Store.open(
            killed(path),
            namespace=NAMESPACE,
            model=MODEL,
            files=SparseFiles(),
            allow_buffered=True,
            recover=True,
        )
    tables = store.tables
    if tables is None or tables.token_count != shape.talks * shape.tokens:
        raise SystemExit(f"the journal does not hold everything: {store.open_result.detail}")
    found["recover_peak_bytes"] = peak_bytes() - before
    store.abandon()
    return found


STEPS: dict[str, Callable[[str, Shape], dict[str, float]]] = {
    "build": build,
    "use": use,
    "inspect": inspect,
    "kill": kill,
    "recover": recover,
}


def measure(directory: str, token_count: int, record_count: int) -> dict[str, float]:
    """Run all steps in a fresh store below `directory`, which is removed again."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="range-scale-", dir=directory) as place:
        path = os.path.join(place, "store")
        for step in STEPS:
            command = [sys.executable, "-m", "rangekv.engine.testing.scale", "--step", step]
            command += ["--dir", path, "--tokens", f"{token_count}", "--records", f"{record_count}"]
            answer = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            found |= json.loads(answer.stdout)
    found["memory_bytes_per_token"] = round(found["memory_bytes"] / found["tokens"], 2)
    found["memory_bytes_per_record"] = round(
        (found["memory_bytes"] - found["snapshot_bytes"]) / found["records"]
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, default=32_000_000)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--step", choices=sorted(STEPS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.step is None:
        found = measure(given.dir, given.tokens, given.records)
    else:
        found = STEPS[given.step](given.dir, Shape.of(given.tokens, given.records))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
