"""Replay against a naive model: a dict of records, searched from end to end for every question."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hypothesis import example, given, settings
from hypothesis import strategies as st
from rangekv.format import journal
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
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.journal import JournalHeader
from rangekv.format.records import NO_CHECKSUM, NO_PARENT, NO_SALT, Extent, Record
from rangekv.format.replay import replay
from rangekv.format.tables import Tables, check_tables
from support.recovered import named

GEOMETRY = Geometry.derive(ModelGeometry(3, 4096, 16), 24 << 20)
BLOCK = GEOMETRY.block_tokens
WIDTH = 8 * GEOMETRY.block_bytes
PER_PACK = GEOMETRY.stripe_bytes_max // WIDTH
SLOTS = PER_PACK * GEOMETRY.pack_count
HEADER = JournalHeader(bytes(16), 1, bytes(16))
ROOTS = (NO_SALT, b"\x01" * 32, b"\x02" * 32)
PUBLISH, GROW, RETIRE, RETIRE_RECORD, RESET = range(5)


def tokens_of(blocks: tuple[int, ...]) -> list[int]:
    return [number for block in blocks for number in [block] * BLOCK]


@dataclass
class Held:
    """A record that is visible."""

    parent: int | None
    parent_blocks: int
    root: bytes
    start: int
    """Blocks of the prompt before its own."""
    blocks: tuple[int, ...]
    generation: int
    place: int
    """First block in the extent."""
    checksums: list[int] | None


@dataclass
class Model:
    """What a session has said so far. `extents` holds slot and append mark in blocks."""

    records: dict[int, Held] = field(default_factory=dict)
    extents: dict[int, list[int]] = field(default_factory=dict)
    generation_max: int = 0
    named: int = 0

    def publish(self, where: int, above: int, first: int, more: int, *, grow: bool) -> int | None:
        """Let a record become visible; return its id, or None where an engine could not do so."""
        parent, before, root, start = None, 0, ROOTS[above % 3], 0
        if above % 2 and self.records:
            parent = list(self.records)[above % len(self.records)]
            held = self.records[parent]
            before, root = 1 + where % len(held.blocks), held.root
            start = held.start + before
            if held.blocks[before : before + 1] == (first,):
                return None
        blocks = (first, *range(10, 10 + more))
        generation = self._extent(where, len(blocks), grow)
        if generation is None:
            return None
        for other, held in list(self.records.items()):
            same = (held.parent, held.parent_blocks, held.root, held.blocks[0])
            if same == (parent, before, root, first):
                self.take_out({other})
        self.named += 1
        extent = self.extents[generation]
        pages = GEOMETRY.layer_count * GEOMETRY.page_count(BLOCK * len(blocks))
        sums = [1000 * self.named + page for page in range(pages)] if where % 3 else None
        self.records[self.named] = Held(
            parent, before, root, start, blocks, generation, extent[1], sums
        )
        # At times tokens behind it are handed out as well, and nothing comes of them.
        extent[1] = min(8, extent[1] + len(blocks) + (where % 4 == 0))
        return self.named

    def _extent(self, where: int, blocks: int, grow: bool) -> int | None:
        roomy = [one for one, (_, mark) in self.extents.items() if mark + blocks <= 8]
        if grow and roomy:
            return roomy[where % len(roomy)]
        taken = {slot for slot, _ in self.extents.values()}
        free = [slot for slot in range(SLOTS) if slot not in taken]
        if not free:
            return None
        generation = self.generation_max + 1
        self.extents[generation] = [free[where % len(free)], 0]
        # At times another one is handed out, and nothing comes of it.
        self.generation_max += 1 + (where % 5 == 0)
        return generation

    def retire(self, generation: int) -> None:
        self.take_out({one for one, held in self.records.items() if held.generation == generation})
        self.extents.pop(generation, None)

    def take_out(self, gone: set[int]) -> None:
        while more := {one for one, held in self.records.items() if held.parent in gone} - gone:
            gone |= more
        self.records = {one: held for one, held in self.records.items() if one not in gone}

    def extent(self, generation: int) -> Extent:
        slot, mark = self.extents[generation]
        pack, at = divmod(slot, PER_PACK)
        offset = GEOMETRY.pack_offset(pack) + at * GEOMETRY.extent_bytes(WIDTH)
        return Extent(generation, offset, WIDTH, pack, mark * BLOCK)

    def entry(self, ids: list[int]) -> Publish:
        """Return what says that these records became visible."""
        held = [self.records[one] for one in ids]
        roots = sorted({one.root for one in held}, reverse=True)
        return Publish(
            extents=[self.extent(one) for one in sorted({one.generation for one in held})],
            records=[
                Published(
                    record_id=name,
                    parent_id=NO_PARENT_ID if one.parent is None else one.parent,
                    generation=one.generation,
                    access_rank=name,
                    extent_token_start=one.place * BLOCK,
                    token_start=one.start * BLOCK,
                    token_count=len(one.blocks) * BLOCK,
                    parent_tokens=one.parent_blocks * BLOCK,
                    root=roots.index(one.root),
                    flags=0 if one.checksums is None else HAS_CHECKSUMS,
                )
                for name, one in zip(ids, held, strict=True)
            ],
            roots=roots,
            tokens=array("I", [t for one in held for t in tokens_of(one.blocks)]).tobytes(),
            checksums=array("Q", [s for one in held for s in one.checksums or ()]).tobytes(),
        )

    def tables(self) -> Tables:
        """Return the tables of a snapshot; extents without records stay in it."""
        tokens, checksums, rows = array("I"), array("Q"), []
        generations, ids = list(self.extents), list(self.records)
        for name, one in self.records.items():
            rows.append(
                Record(
                    record_id=name,
                    token_index=len(tokens),
                    checksum_index=NO_CHECKSUM if one.checksums is None else len(checksums),
                    access_rank=name,
                    extent=generations.index(one.generation),
                    extent_token_start=one.place * BLOCK,
                    token_start=one.start * BLOCK,
                    token_count=len(one.blocks) * BLOCK,
                    parent=NO_PARENT if one.parent is None else ids.index(one.parent),
                    parent_tokens=one.parent_blocks * BLOCK,
                    root=ROOTS.index(one.root),
                )
            )
            tokens.extend(tokens_of(one.blocks))
            checksums.extend(one.checksums or ())
        extents = [self.extent(one) for one in generations]
        found = Tables(extents, rows, tokens, checksums, list(ROOTS), self.generation_max)
        check_tables(found, GEOMETRY)
        return found

    def state(self) -> dict:
        """Return what replay has to find, in the words of `named`."""
        needed = sorted({one.generation for one in self.records.values()})
        return {
            "generation_max": self.generation_max,
            "extents": {one: self.extent(one)._asdict() for one in needed},
            "records": {
                name: {
                    "access_rank": name,
                    "extent_token_start": one.place * BLOCK,
                    "token_start": one.start * BLOCK,
                    "token_count": len(one.blocks) * BLOCK,
                    "parent": one.parent,
                    "parent_tokens": one.parent_blocks * BLOCK,
                    "root": one.root,
                    "generation": one.generation,
                    "tokens": tokens_of(one.blocks),
                    "checksums": one.checksums,
                }
                for name, one in self.records.items()
            },
        }


def one_step(model: Model, step: tuple[int, ...]) -> Entry | None:
    """Change the model; return the entry that says so, None where nothing happened."""
    kind, where, above, first, more = step
    if kind == RETIRE:
        generation = 1 + where % (model.generation_max + 1)  # or one that never was
        model.retire(generation)
        return Retire([generation])
    if kind == RETIRE_RECORD:
        name = 1 + where % (model.named + 1)
        model.take_out({name} & model.records.keys())
        return RetireRecord([name])
    if kind == RESET:
        model.records, model.extents = {}, {}
        return Reset()
    name = model.publish(where, above, first, more, grow=kind == GROW)
    return None if name is None else model.entry([name])


def joined(entries: list[Entry]) -> list[Entry]:
    """Let PUBLISH entries that follow one another be one, as the session would say it."""
    found: list[Entry] = []
    for entry in entries:
        last = found[-1] if found else None
        if not isinstance(entry, Publish) or not isinstance(last, Publish):
            found.append(entry)
            continue
        roots = sorted({*last.roots, *entry.roots})
        found[-1] = Publish(
            extents=list({one.generation: one for one in (*last.extents, *entry.extents)}.values()),
            records=[
                row._replace(root=roots.index(one.roots[row.root]))
                for one in (last, entry)
                for row in one.records
            ],
            roots=roots,
            tokens=last.tokens + entry.tokens,
            checksums=last.checksums + entry.checksums,
        )
    return found


STEP = st.tuples(
    st.sampled_from([PUBLISH] * 3 + [GROW] * 5 + [RETIRE, RETIRE_RECORD, RETIRE_RECORD, RESET]),
    st.integers(0, 11),
    st.integers(0, 11),
    st.integers(0, 2),
    st.integers(0, 5),
)
FAMILY = [(PUBLISH, 1, 0, 0, 1), (GROW, 1, 1, 1, 0), (GROW, 3, 1, 2, 0)]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(STEP, max_size=12),
    st.lists(st.lists(STEP, max_size=5), max_size=6),
    st.booleans(),
)
@example([], [[step] for step in FAMILY] + [[(RETIRE_RECORD, 0, 0, 0, 0)]], False)
@example(FAMILY, [[FAMILY[0]]], False)  # what takes a place takes out who was there, and theirs
@example(FAMILY, [[(GROW, 1, 0, 0, 5)], [(RETIRE, 0, 0, 0, 0)]], True)
def test_any_order_of_entries_leads_where_a_dict_leads(before, commits, join):
    model = Model()
    for step in before:
        one_step(model, step)
    base = model.tables()
    data = HEADER.encode()
    link = journal.digest_of(data)
    assert named(replay(base, journal.decode(data), GEOMETRY), GEOMETRY) == model.state()
    for number, steps in enumerate(commits, 1):
        said = [entry for step in steps if (entry := one_step(model, step)) is not None]
        frame = journal.encode_frame(
            HEADER,
            joined(said) if join else said,
            commit=number,
            previous=link,
            generation_max=model.generation_max,
            unix_ns=number,
        )
        data, link = data + frame, journal.digest_of(frame)
        after = replay(base, journal.decode(data), GEOMETRY)
        assert named(after, GEOMETRY) == model.state()


def test_the_steps_reach_what_they_are_for():
    assert (SLOTS, GEOMETRY.page_count(6 * BLOCK)) == (16, 2)
    model = Model()
    for step in FAMILY:
        assert one_step(model, step) is not None
    assert [one.parent for one in model.records.values()] == [None, 1, 2]
    assert len({one.generation for one in model.records.values()}) == 1
    assert one_step(model, FAMILY[0]) is not None
    assert list(model.records) == [4], "record 1 made way, and those behind it went too"
