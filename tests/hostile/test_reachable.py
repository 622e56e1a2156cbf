"""Every state that an engine can reach passes its own reader, and a second one, byte for byte."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rangekv.engine.index.catalog import Catalog
from rangekv.engine.index.image import dump, load
from rangekv.engine.index.reservation import Reservation, ReservationState
from rangekv.engine.inspection import read_store
from rangekv.engine.stats import Counters
from rangekv.format import snapshot
from rangekv.format.envelope import HEAD_BYTES_MAX, Envelope, SnapshotHeader
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.records import NO_CHECKSUM, NO_PARENT
from rangekv.format.tables import TableLimits, Tables
from support.effort import effort
from support.fuzz import superblock_of
from support.rig import MIB, SMALL, Rig, save_some_turn, tokens_of
from support.stores import AnyFiles
from vectors import decoder

GEOMETRIES = [
    Geometry.derive(ModelGeometry(2, 256, 16), 2 * MIB),
    Geometry.derive(ModelGeometry(3, 1152, 16), 8 * MIB),  # blocks of 4.5 direct-I/O pieces
    Geometry.derive(ModelGeometry(1, 4096, 4), 4 * MIB),
]
# Few different blocks, so that prompts share prefixes and part inside records; some take more than
# one extent.
PROMPT = st.builds(
    lambda blocks, times: blocks * times,
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.sampled_from([1, 1, 1, 4]),
)
TENANT = st.integers(0, 3)
SELDOM = st.integers(0, 7)
SEEN = {"states": 0, "records": 0}


def read(geometry: Geometry, tables: Tables, check_second: bool) -> Tables:
    """Encode, read back with both readers; return what ours read."""
    store = superblock_of(geometry, 1)
    envelope = Envelope(store.store_uuid, 7, store.identity, 1, store.geometry_digest(), 2)
    data = b"".join(snapshot.encode(tables, envelope))
    header = SnapshotHeader.decode(data[:HEAD_BYTES_MAX], len(data), TableLimits.of(geometry))
    found = snapshot.decode(data, header, geometry)
    assert found == tables
    assert b"".join(snapshot.encode(found, header.envelope)) == data
    if check_second:
        decoder.decode_snapshot(data, decoder.decode_superblock(store.encode(0), 0))
    SEEN["states"] += 1
    SEEN["records"] += len(tables.records)
    return found


def meaning(geometry: Geometry, tables: Tables) -> set[tuple[object, ...]]:
    """Return what tables say, whatever the order of their rows."""
    tokens, checksums = memoryview(tables.tokens), memoryview(tables.checksums)
    found: set[tuple[object, ...]] = set()
    for row in tables.records:
        parent = None if row.parent == NO_PARENT else tables.records[row.parent].record_id
        pages: bytes | None = None
        if row.checksum_index != NO_CHECKSUM:
            count = geometry.layer_count * geometry.page_count(row.token_count)
            pages = bytes(checksums[8 * row.checksum_index : 8 * (row.checksum_index + count)])
        own = bytes(tokens[4 * row.token_index : 4 * (row.token_index + row.token_count)])
        found.add(
            (
                row._replace(token_index=0, checksum_index=0, extent=0, parent=0, root=0),
                parent,
                tables.roots[row.root],
                tables.extents[row.extent],
                own,
                pages,
            )
        )
    return found


class Life(RuleBasedStateMachine):
    """A catalog's whole life: saves that end in every way, reads, eviction, reset, reopen."""

    @initialize(geometry=st.sampled_from(GEOMETRIES))
    def begin(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.catalog = Catalog(geometry, Counters())
        self.open: list[tuple[Reservation, int]] = []
        self.unsettled: list[Reservation] = []
        self.leases: list = []

    def packed(self, prompt: list[int]) -> memoryview:
        return memoryview(np.repeat(np.array(prompt, "<u4"), self.geometry.block_tokens).tobytes())

    def root(self, tenant: int) -> int:
        return self.catalog.root(hashlib.sha256(bytes([tenant])).digest()) if tenant else 0

    @rule(prompt=PROMPT, tenant=TENANT, short=st.integers(0, 3), hashed=st.booleans())
    def save(self, prompt: list[int], tenant: int, short: int, hashed: bool) -> None:
        """A save from its beginning to its end."""
        before = len(self.open)
        self.reserve(prompt, tenant)
        if len(self.open) > before:
            self.write(before, len(prompt))
            self.publish(before, short, hashed)
            self.settle(len(self.unsettled) - 1)

    @rule(prompt=PROMPT, tenant=TENANT)
    def another_save(self, prompt: list[int], tenant: int) -> None:
        """The most usual thing: one tenant, all is well."""
        self.save(prompt, tenant // 3, 0, True)

    @rule(prompt=PROMPT, tenant=TENANT)
    def reserve(self, prompt: list[int], tenant: int) -> None:
        tokens = self.packed(prompt)
        outcome = self.catalog.reserve(self.root(tenant), tokens, 0, len(tokens) // 4)
        if isinstance(outcome, Reservation):
            self.open.append((outcome, outcome.token_begin))

    @precondition(lambda self: self.open)
    @rule(at=st.integers(0, 99), blocks=st.integers(1, 30))
    def write(self, at: int, blocks: int) -> None:
        """Some more blocks of a save are handed to writers."""
        reservation, written = self.open[at % len(self.open)]
        end = min(written + blocks * self.geometry.block_tokens, reservation.token_end)
        self.open[at % len(self.open)] = (reservation, end)
        if reservation.state is not ReservationState.OPEN:
            return
        for part in reservation.parts:
            stop = min(end, part.token_start + part.token_count)
            if stop > part.token_start:
                self.catalog.raise_append_mark(part, stop)

    @precondition(lambda self: self.open)
    @rule(at=st.integers(0, 99), short=st.integers(0, 3), hashed=st.booleans())
    def publish(self, at: int, short: int, hashed: bool) -> None:
        """What was written, or a little less, becomes visible."""
        reservation, written = self.open.pop(at % len(self.open))
        self.unsettled.append(reservation)
        end = max(written - short * self.geometry.block_tokens, reservation.token_begin)
        pages = [
            np.arange(
                self.geometry.layer_count
                * self.geometry.page_count(min(part.token_count, end - part.token_start)),
                dtype=np.uint64,
            ).reshape(self.geometry.layer_count, -1)
            if hashed
            else None
            for part in reservation.parts
            if part.token_start < end
        ]
        self.catalog.publish(reservation, end, pages)

    @precondition(lambda self: self.open)
    @rule(at=st.integers(0, 99))
    def void(self, at: int) -> None:
        reservation, _ = self.open.pop(at % len(self.open))
        self.unsettled.append(reservation)
        self.catalog.void(reservation)

    @precondition(lambda self: self.unsettled)
    @rule(at=st.integers(0, 99))
    def settle(self, at: int) -> None:
        self.catalog.settle(self.unsettled.pop(at % len(self.unsettled)))

    @rule(prompt=PROMPT, tenant=TENANT, keep=st.booleans())
    def find(self, prompt: list[int], tenant: int, keep: bool) -> None:
        tokens = self.packed(prompt)
        path = self.catalog.find(self.root(tenant), tokens, len(tokens) // 4)
        if keep and path:
            self.leases.append(self.catalog.leases.take([match.record for match in path]))

    @precondition(lambda self: self.leases)
    @rule(at=st.integers(0, 99))
    def release(self, at: int) -> None:
        self.catalog.leases.release(self.leases.pop(at % len(self.leases)))

    @rule(at=st.integers(0, 999))
    def retire(self, at: int) -> None:
        visible = list(self.catalog.directory.visible())
        if visible:
            self.catalog.retire(visible[at % len(visible)])

    @rule(dice=SELDOM)
    def reset(self, dice: int) -> None:
        if dice == 0:
            self.catalog.retire_all()

    @precondition(lambda self: not (self.open or self.unsettled or self.leases))
    @rule()
    def reopen(self) -> None:
        tables = read(self.geometry, dump(self.catalog), check_second=False)
        self.catalog = Catalog(self.geometry, Counters())
        load(self.catalog, tables)
        assert meaning(self.geometry, dump(self.catalog)) == meaning(self.geometry, tables)

    @rule(dice=SELDOM)
    def close_and_reopen(self, dice: int) -> None:
        """Whatever is under way ends first, as Engine.close makes it end."""
        if dice:
            return
        for reservation, _ in self.open:
            self.catalog.void(reservation)
        for reservation in [one for one, _ in self.open] + self.unsettled:
            self.catalog.settle(reservation)
        for lease in self.leases:
            self.catalog.leases.release(lease)
        self.open, self.unsettled, self.leases = [], [], []
        self.reopen()

    @invariant()
    def passes_its_own_reader(self) -> None:
        if hasattr(self, "catalog"):
            read(self.geometry, dump(self.catalog), check_second=SEEN["states"] % 4 == 0)


def test_every_state_of_a_catalog_passes_its_own_reader(figure):
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=effort(150, 3000), stateful_step_count=effort(60, 100), deadline=None
        ),
    )
    assert SEEN["records"] > SEEN["states"]
    figure(
        "states of an engine read back",
        f"{SEEN['states']:,} with {SEEN['records']:,} records, all accepted",
    )


@pytest.mark.parametrize("seed", range(effort(3, 30)))
def test_the_file_of_a_real_engine_passes_both_readers(tmp_path, seed):
    """Saves, branches, growth, eviction, partial publication and several roots, then a close."""
    rig = Rig(tmp_path / "store", model=SMALL, capacity=8 * MIB)
    random = np.random.default_rng(seed)
    prompts = [tokens_of(seed, 4 * SMALL.block_tokens)]
    for turn in range(40):
        prompts.append(save_some_turn(rig, random, seed, turn, prompts))
        rig.hit(prompts[random.integers(len(prompts))])
    assert rig.engine.close(30).state == "clean"
    report = read_store(str(rig.path), AnyFiles())
    assert report.state == "warm"
    assert len(report.tables.records) > 5
    assert len({record.root for record in report.tables.records}) > 1
    with (rig.path / "range.pack").open("rb") as file:
        pages = [file.read(4096), (file.seek(524288), file.read(4096))[1]]
    copies = [decoder.decode_superblock(page, copy) for copy, page in enumerate(pages)]
    data = (rig.path / "range.snapshot").read_bytes()
    found = decoder.decode_snapshot(data, max(copies, key=lambda one: one["sequence"]))
    assert [row._asdict() for row in report.tables.records] == found["records"]
    assert [row._asdict() for row in report.tables.extents] == found["extents"]
