"""One fuzzing process: mutated files against the parsers, under a limit of memory.

    python -m support.fuzz SEED COUNT

prints one JSON object. Half of the inputs are sealed anew after the mutation: otherwise checksums
would hide everything behind them. Memory is limited by the kernel, so a length field that asks for
more than a store may need ends the process.
"""

from __future__ import annotations

import gc
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from rangekv.engine.index import image
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.stats import Counters
from rangekv.format import journal, snapshot
from rangekv.format.entries import (
    HAS_CHECKSUMS,
    NO_PARENT_ID,
    Entry,
    Publish,
    Published,
    Reset,
    Retire,
    RetireRecord,
)
from rangekv.format.envelope import (
    ENTRY_BYTES,
    HEAD_BYTES_MAX,
    SECTION,
    SECTION_ALIGN,
    SECTION_COUNT_MAX,
    UNKNOWN_SECTION_BYTES_MAX,
    Envelope,
    SectionKind,
    SnapshotHeader,
)
from rangekv.format.errors import FormatError
from rangekv.format.geometry import DATA_OFFSET, Geometry, ModelGeometry
from rangekv.format.identity import FileIdentity
from rangekv.format.journal import Journal
from rangekv.format.layout import Layout
from rangekv.format.marker import MARKER, Marker
from rangekv.format.namespace import Namespace
from rangekv.format.records import Extent
from rangekv.format.superblock import SUPERBLOCK, Superblock
from rangekv.format.tables import TableLimits, Tables, check_tables
from vectors import decoder, generate, journals

from support.hostile import (
    fields,
    journal_structures,
    put,
    sealed,
    sealed_journal,
    sealed_snapshot,
    sections,
    structures,
)
from support.recovered import named, recovered
from support.stores import filled_tables

HEADROOM_BYTES = 64 * 1024 * 1024
INTERESTING = (0, 1, 2, 2**31, 2**32 - 1, 2**63, 2**64 - 1, 4096, 65536)
DECODER_SHARE = 8  # one refused input in so many is also shown to the second reader
# How inputs are shared out, in per cent.
SHARES = {"superblock": 32, "snapshot": 17, "journal": 5, "marker": 27, "namespace": 19}


def geometries() -> list[Geometry]:
    return [
        Geometry.derive(ModelGeometry(2, 4096, 16), 4 * 1024**2),
        Geometry.derive(ModelGeometry(61, 1152, 16), 64 * 1024**2),
        Geometry.derive(ModelGeometry(32, 4096, 16), 16 * 1024**3),
    ]


def superblock_of(geometry: Geometry | None, sequence: int) -> Superblock:
    usable = 4 * 1024**2 if geometry is None else geometry.usable_bytes
    return Superblock(
        store_uuid=bytes(range(16)),
        sequence=sequence,
        epoch=7,
        identity=FileIdentity(4660, DATA_OFFSET + usable, 1_700_000_000, 250_000_000, 77, 3),
        fs_magic=0xEF53,
        rank=1,
        world_size=2,
        created_unix_ns=1_700_000_000_000_000_000,
        geometry=geometry,
        namespace=None if geometry is None else Namespace({"model": "tiny", "tp_size": 2}),
    )


def snapshot_of(geometry: Geometry, tables: Tables) -> bytes:
    store = superblock_of(geometry, 1)
    envelope = Envelope(store.store_uuid, 7, store.identity, 1, store.geometry_digest(), 2)
    return b"".join(snapshot.encode(tables, envelope))


def snapshot_bytes_max(limits: TableLimits) -> int:
    """Return what section 10 of SPEC.md allows a snapshot file to take."""
    entries = {
        SectionKind.RECORDS: limits.records_max,
        SectionKind.TOKENS: limits.tokens_max,
        SectionKind.CHECKSUMS: limits.checksums_max,
        SectionKind.EXTENTS: limits.extents_max,
        SectionKind.ROOTS: limits.roots_max,
    }
    known = sum(count * ENTRY_BYTES[kind] for kind, count in entries.items())
    unknown = (SECTION_COUNT_MAX - len(entries)) * UNKNOWN_SECTION_BYTES_MAX
    return HEAD_BYTES_MAX + known + unknown + SECTION_COUNT_MAX * (SECTION_ALIGN - 1)


@dataclass(slots=True)
class Tally:
    """What one process saw."""

    inputs: Counter[str] = field(default_factory=Counter)
    sealed: int = 0
    accepted: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)


class Mutator:
    """Turns good bytes into bad ones; everything follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def blind(self, data: bytes) -> bytes:
        """Damage that knows nothing of the format."""
        pick = self.random.random
        edited = bytearray(data)
        how = int(pick() * 6)
        at = int(pick() * len(edited))
        if how <= 1:
            for _ in range(1 + int(pick() * 4)):
                edited[int(pick() * len(edited))] ^= 1 << int(pick() * 8)
        elif how == 2:
            length = 1 + int(pick() * 32)
            edited[at : at + length] = self.random.randbytes(length)
        elif how == 3:
            del edited[at:]
        elif how == 4:
            length = 1 + int(pick() * 64)
            edited[at : at + length] = edited[: length % (len(edited) - at + 1)]
        else:
            edited += self.random.randbytes(1 + int(pick() * 64))
        return bytes(edited)

    def value(self, size: int, found: int) -> int:
        """A number that a careless reader would trip over."""
        top = 256**size - 1
        how = int(self.random.random() * 8)
        if how <= 2:
            return INTERESTING[int(self.random.random() * len(INTERESTING))] & top
        if how == 3:
            return (found + 1) & top
        if how == 4:
            return (found - 1) & top
        if how == 5:
            return found ^ 1 << int(self.random.random() * size * 8)
        return top if how == 6 else self.random.getrandbits(size * 8)

    def fields(self, data: bytes, places: list[tuple[int, int]]) -> bytes:
        """Set up to three of the integers at (offset, size)."""
        edited = bytearray(data)
        for _ in range(1 + int(self.random.random() * 3)):
            offset, size = places[int(self.random.random() * len(places))]
            found = int.from_bytes(edited[offset : offset + size], "little")
            edited[offset : offset + size] = self.value(size, found).to_bytes(size, "little")
        return bytes(edited)

    def choose(self, options: list) -> object:
        return options[int(self.random.random() * len(options))]


def integer_places(layout: Layout, start: int = 0) -> list[tuple[int, int]]:
    return [(start + offset, size) for offset, size, _ in fields(layout)]


class Target:
    """One parser: `make` an input, `read` it, `check` what was accepted, show it to `decode`."""

    def agree(self, found: object, theirs: object) -> None:
        """Compare what the two readers found in an input that both accept."""


class Superblocks(Target):
    """Superblock.decode, and encode of what it accepted."""

    def __init__(self, mutate: Mutator) -> None:
        self.mutate = mutate
        stores = [superblock_of(one, index) for index, one in enumerate([*geometries(), None])]
        self.pages = [(store.encode(copy), copy) for store in stores for copy in (0, 1)]
        self.places = integer_places(SUPERBLOCK)
        # Bytes of strings and reserved room, to be damaged under a good checksum.
        strings = (range(48, 64), range(192, 240), range(1024, 1100), range(3072, 3080))
        self.rest = [at for places in strings for at in places]

    def make(self, seal: bool) -> tuple[bytes, int]:
        page, copy = self.mutate.choose(self.pages)
        if not seal:
            return self.mutate.blind(page), copy
        page = self.mutate.fields(page, self.places)
        if self.mutate.random.random() < 0.25:
            at = self.mutate.choose(self.rest)
            page = page[:at] + self.mutate.random.randbytes(1) + page[at + 1 :]
        return sealed(page, SUPERBLOCK), copy

    def read(self, case: tuple[bytes, int]) -> Superblock:
        return Superblock.decode(*case)

    def check(self, case: tuple[bytes, int], found: Superblock) -> None:
        assert found.encode(case[1]) == case[0]

    def decode(self, case: tuple[bytes, int]) -> None:
        decoder.decode_superblock(*case)


class Markers(Target):
    """Marker.decode, and encode of what it accepted."""

    def __init__(self, mutate: Mutator) -> None:
        self.mutate = mutate
        self.good = Marker(bytes(range(16)), 5, 1_700_000_000_000_000_000, 4321, bytes(16)).encode()
        self.places = integer_places(MARKER)

    def make(self, seal: bool) -> bytes:
        if seal:
            return sealed(self.mutate.fields(self.good, self.places), MARKER)
        return self.mutate.blind(self.good)

    def read(self, case: bytes) -> Marker:
        return Marker.decode(case)

    def check(self, case: bytes, found: Marker) -> None:
        assert found.encode() == case

    def decode(self, case: bytes) -> None:
        decoder.decode_marker(case)


class Namespaces(Target):
    """Namespace.decode; there is no checksum, so all inputs reach the parser."""

    def __init__(self, mutate: Mutator) -> None:
        self.mutate = mutate
        self.good = [
            Namespace(one).encode()
            for one in (
                {},
                {"a": 1},
                {"model": "tiny", "revision": "x" * 256, "tp_size": 2**40, "low": -(2**40)},
                {f"key {number}": number * 1000 - 9000 for number in range(20)},
            )
        ]

    def make(self, seal: bool) -> bytes:
        data = self.mutate.choose(self.good)
        if seal:  # msgpack's own type bytes, where they matter
            edited = bytearray(data)
            edited[int(self.mutate.random.random() * len(edited))] = 0x80 + int(
                self.mutate.random.random() * 128
            )
            return bytes(edited)
        return self.mutate.blind(data)

    def read(self, case: bytes) -> Namespace:
        return Namespace.decode(case)

    def check(self, case: bytes, found: Namespace) -> None:
        assert Namespace(found.fields).encode() == case

    def decode(self, case: bytes) -> None:
        decoder.demand(len(case) <= decoder.NAMESPACE_MAX, "bad-namespace")
        decoder.decode_namespace(case, "bad-namespace")


class Snapshots(Target):
    """SnapshotHeader.decode and snapshot.decode; then the engine's own tables and back."""

    def __init__(self, mutate: Mutator) -> None:
        self.mutate = mutate
        self.geometry = geometries()[0]
        self.limits = TableLimits.of(self.geometry)
        self.superblock = decoder.decode_superblock(superblock_of(self.geometry, 1).encode(0), 0)
        self.good = [
            self._with_places(snapshot_of(self.geometry, tables))
            for tables in (
                filled_tables(self.geometry),
                generate.tables_of("snapshot-four-records.bin"),
                Tables.empty(),
            )
        ]

    @staticmethod
    def _with_places(data: bytes) -> tuple[bytes, list[tuple[int, int]]]:
        places = [
            place for start, layout in structures(data) for place in integer_places(layout, start)
        ]
        return data, places

    def make(self, seal: bool) -> bytes:
        data, places = self.mutate.choose(self.good)
        if not seal:
            return self.mutate.blind(data)
        how = self.mutate.random.random()
        if how < 0.2:
            return sealed_snapshot(self.mutate.blind(data).ljust(256, b"\x00"))
        if how < 0.3:
            return sealed_snapshot(self._counted(data))
        return sealed_snapshot(self.mutate.fields(data, places))

    def _counted(self, data: bytes) -> bytes:
        """Let one section claim another number of entries, and the length that goes with it."""
        entry, kind, _, _ = self.mutate.choose(sections(data))
        count = self.mutate.value(8, int.from_bytes(data[entry + 24 : entry + 32], "little"))
        count %= 2**64 // ENTRY_BYTES[SectionKind(kind)]
        data = put(data, SECTION, entry, "count", count)
        return put(data, SECTION, entry, "length", count * ENTRY_BYTES[SectionKind(kind)])

    def read(self, case: bytes) -> tuple[SnapshotHeader, Tables]:
        header = SnapshotHeader.decode(case[:HEAD_BYTES_MAX], len(case), self.limits)
        return header, snapshot.decode(case, header, self.geometry)

    def check(self, case: bytes, found: tuple[SnapshotHeader, Tables]) -> None:
        header, tables = found
        again = b"".join(snapshot.encode(tables, header.envelope))
        plain = int.from_bytes(case[14:16], "little") == 0 and len(header.sections) == 5
        assert again == case or (not plain and self.read(again)[1] == tables)
        catalog = Catalog(self.geometry, Counters())
        image.load(catalog, tables)
        self.read(b"".join(snapshot.encode(image.dump(catalog), header.envelope)))

    def decode(self, case: bytes) -> None:
        decoder.decode_snapshot(case, self.superblock)


class Journals(Target):
    """Whether a journal counts, its chain, and its replay on the snapshot of SPEC.md 16.3."""

    def __init__(self, mutate: Mutator) -> None:
        self.mutate = mutate
        self.superblock = generate.superblock(generate.inputs("superblock-bound.bin"))
        self.geometry = self.superblock.geometry
        files = generate.good_files()
        data = files["snapshot-four-records.bin"]
        limits = TableLimits.of(self.geometry)
        head = SnapshotHeader.decode(data[:HEAD_BYTES_MAX], len(data), limits)
        self.envelope, self.tables = head.envelope, snapshot.decode(data, head, self.geometry)
        self.marker = Marker.decode(files["marker.bin"])
        self.limits = limits
        page = decoder.decode_superblock(files["superblock-bound.bin"], 0)
        marker = decoder.decode_marker(files["marker.bin"])
        self.beside = (marker, decoder.decode_snapshot(data, page), page)
        self.header = journals.header_of(
            self.superblock.store_uuid, self.superblock.geometry_digest()
        )
        self.good = [self._with_places(one.data) for one in journals.accepted(self.header).values()]

    @staticmethod
    def _with_places(data: bytes) -> tuple[bytes, list[tuple[int, int]]]:
        found = journal_structures(data)
        return data, [place for start, one in found for place in integer_places(one, start)]

    def make(self, seal: bool) -> bytes:
        data, places = self.mutate.choose(self.good)
        if not seal:
            return self.mutate.blind(data)
        how = self.mutate.random.random()
        if how < 0.15:
            return sealed_journal(self.mutate.blind(data))
        if how < 0.5:
            return sealed_journal(self.mutate.fields(data, places), linked=how > 0.2)
        return journals.framed(self.header, *(self._said() for _ in range(int(how * 4))))

    def _said(self) -> list[Entry]:
        """Return what one commit says: nothing damaged, but perhaps a contradiction."""
        how = self.mutate.random.random()
        if how < 0.1:
            return []
        if how < 0.2:
            return [RetireRecord([self.mutate.choose(RECORD_IDS)])]
        if how < 0.3:
            return [Retire([self.mutate.choose(GENERATIONS)])]
        if how < 0.35:
            return [Reset()]
        return [self._publish() for _ in range(1 + int(how * 2))]

    def _publish(self) -> Publish:
        """Return one block in an extent of its own, or behind what extent 7 holds."""
        choose = self.mutate.choose
        slot = choose(range(32))
        extent = Extent(20 + slot, DATA_OFFSET + slot * 131072, 65536, slot // 8, 16)
        start = 0
        if slot < 4:
            extent, start = Extent(7, DATA_OFFSET, 262144, 0, 64), 48
        parent, token_start, parent_tokens = choose(PARENTS)
        sums = choose((0, 2))
        row = Published(
            record_id=choose(RECORD_IDS),
            parent_id=parent,
            generation=extent.generation,
            access_rank=slot,
            extent_token_start=start,
            token_start=token_start,
            token_count=16,
            parent_tokens=parent_tokens,
            root=0,
            flags=HAS_CHECKSUMS if sums else 0,
        )
        return Publish(
            extents=[extent],
            records=[row],
            roots=[choose(self.tables.roots)],
            tokens=journals.numbers("I", choose((1000, 1016, 1032, 2000, 3000)), 16),
            checksums=journals.numbers("Q", slot, sums),
        )

    def read(self, case: bytes) -> tuple[Journal, Tables]:
        return recovered(case, self.marker, self.tables, self.envelope, self.superblock)

    def check(self, case: bytes, found: tuple[Journal, Tables]) -> None:
        read, tables = found
        assert read.length + read.torn_bytes == len(case)
        for frame in read.frames:
            again = journal.encode_frame(
                read.header,
                frame.entries(self.limits),
                commit=frame.commit,
                previous=frame.previous,
                generation_max=frame.generation_max,
                unix_ns=frame.unix_ns,
            )
            assert again == case[frame.offset : frame.end]
        catalog = Catalog(self.geometry, Counters())
        image.load(catalog, tables)
        check_tables(image.dump(catalog), self.geometry)

    def decode(self, case: bytes) -> dict:
        return decoder.recover(case, *self.beside)

    def agree(self, found: tuple[Journal, Tables], theirs: dict) -> None:
        read, tables = found
        assert theirs["ends"][1:] == [frame.end for frame in read.frames]
        mine = named(tables, self.geometry)
        assert mine == {key: theirs[key] for key in mine}


RECORD_IDS = (21, 22, 24, 25, *range(31, 43))
GENERATIONS = (7, 9, *range(20, 52))
# (parent, where its child starts, own tokens of the parent before that)
PARENTS = (
    *((NO_PARENT_ID, 0, 0),) * 2,
    *((21, 16, 16), (21, 32, 32), (22, 48, 16), (24, 32, 16), (25, 16, 16)),
    *((number, 16, 16) for number in (31, 32, 33)),
)


def timed(target, case) -> tuple[str | None, object, float]:
    """Return (code, what was read, seconds of CPU)."""
    begin = time.thread_time()
    try:
        code, found = None, target.read(case)
    except FormatError as error:
        code, found = error.code, None
    return code, found, time.thread_time() - begin


def attempt(target, case, tally: Tally, compare: bool) -> str | None:
    """Show one input to the parser; return its code, or None when it was accepted."""
    code, found, seconds = timed(target, case)
    if seconds > tally.slowest_s:  # unless it was the machine that was slow
        tally.slowest_s = max(
            tally.slowest_s, min(seconds, *(timed(target, case)[2] for _ in range(3)))
        )
    if code is None:
        target.check(case, found)
    if code is None or compare:
        tally.compared += 1
        try:
            theirs, other = None, target.decode(case)
        except decoder.Refused as refusal:
            theirs = str(refusal)
        assert theirs == code, f"the second reader says {theirs}"
        if code is None:
            target.agree(found, other)
    return code


def fuzz(seed: int, count: int) -> Tally:
    """Run `count` inputs that follow from `seed`."""
    mutate = Mutator(seed)
    makers: dict[str, Callable[[Mutator], object]] = {
        "superblock": Superblocks,
        "snapshot": Snapshots,
        "journal": Journals,
        "marker": Markers,
        "namespace": Namespaces,
    }
    tally = Tally()
    for name, share in SHARES.items():
        target = makers[name](mutate)
        for number in range(count * share // 100):
            if number % 1000 == 0:
                gc.collect()  # the engine's tables refer to each other
            seal = number % 2 == 0
            case = target.make(seal)
            tally.inputs[name] += 1
            tally.sealed += seal
            try:
                code = attempt(target, case, tally, number // 2 % DECODER_SHARE == 0)
            except BaseException as error:  # whatever it is, it is the finding
                data = case[0] if isinstance(case, tuple) else case
                tally.failures.append(f"{name} seed {seed} number {number}: {error!r} {data.hex()}")
                if len(tally.failures) > 10 or isinstance(error, KeyboardInterrupt):
                    return tally
                continue
            if code is None:
                tally.accepted[name] += 1
            else:
                tally.codes[code] += 1
    return tally


def limit_memory() -> int:
    """Allow what the process has, the largest snapshot, and some headroom; return the limit."""
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    limits = TableLimits.of(geometries()[0])
    limit = pages * resource.getpagesize() + snapshot_bytes_max(limits) + HEADROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return limit


def main(seed: int, count: int) -> None:
    gc.disable()  # a collection in the middle would count as a slow input
    gc.freeze()
    limit_memory()
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.process_time()
    tally = fuzz(seed, count)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
    print(
        json.dumps(
            {
                "inputs": dict(tally.inputs),
                "sealed": tally.sealed,
                "accepted": dict(tally.accepted),
                "codes": dict(tally.codes),
                "compared": tally.compared,
                "slowest_s": tally.slowest_s,
                "failures": tally.failures,
                "cpu_s": time.process_time() - begin,
                "grown_bytes": grown_kib * 1024,
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
