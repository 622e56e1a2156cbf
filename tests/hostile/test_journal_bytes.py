"""Every bit, every length, every field of a journal: a state of its past, or a refusal."""

from __future__ import annotations

import tracemalloc

import pytest
from rangekv.format import journal
from rangekv.format.entries import (
    HAS_CHECKSUMS,
    NO_PARENT_ID,
    Publish,
    Published,
    Reset,
    Retire,
    RetireRecord,
)
from rangekv.format.errors import FormatError
from rangekv.format.journal import FRAME, HEADER_BYTES, JournalHeader
from rangekv.format.records import NO_CHECKSUM, NO_PARENT
from rangekv.format.replay import replay
from rangekv.format.snapshot import Tables
from support.hostile import fields, journal_structures, put, sealed_journal
from support.recovered import named
from vectors import decoder, generate

BOUNDS = (0, 1, 2, 5, 63, 64, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
SUPERBLOCK = generate.superblock(generate.inputs("superblock-bound.bin"))
GEOMETRY = SUPERBLOCK.geometry
PAGE = decoder.decode_superblock(SUPERBLOCK.encode(0), 0)
EMPTY = {"records": [], "extents": [], "generation_max": 0}
HEADER = JournalHeader(SUPERBLOCK.store_uuid, SUPERBLOCK.epoch, SUPERBLOCK.geometry_digest(), 7)


def published() -> Publish:
    """Return the four records of SPEC.md as one entry."""
    tables = generate.tables_of("snapshot-four-records.bin")
    rows = [
        Published(
            record_id=record.record_id,
            parent_id=NO_PARENT_ID
            if record.parent == NO_PARENT
            else tables.records[record.parent].record_id,
            generation=tables.extents[record.extent].generation,
            access_rank=record.access_rank,
            extent_token_start=record.extent_token_start,
            token_start=record.token_start,
            token_count=record.token_count,
            parent_tokens=record.parent_tokens,
            root=record.root,
            flags=0 if record.checksum_index == NO_CHECKSUM else HAS_CHECKSUMS,
        )
        for record in tables.records
    ]
    return Publish(tables.extents, rows, tables.roots, tables.tokens, tables.checksums)


def journal_of(*commits: list) -> bytes:
    data = HEADER.encode()
    link = journal.digest_of(data)
    for number, said in enumerate(commits, 1):
        frame = journal.encode_frame(
            HEADER, said, commit=number, previous=link, generation_max=1000, unix_ns=number
        )
        data, link = data + frame, journal.digest_of(frame)
    return data


def state_of(data: bytes) -> dict:
    """Return what a journal leads to, from nothing; raises FormatError."""
    return named(replay(Tables.empty(), journal.decode(data), GEOMETRY), GEOMETRY)


def outcome(data: bytes) -> dict | str:
    """Return the state or the code of the refusal, on which two readers agree."""
    found = mine(data)
    assert theirs(data) == found, data.hex()
    return found


def mine(data: bytes) -> dict | str:
    try:
        return state_of(data)
    except FormatError as error:
        return error.code


def theirs(data: bytes) -> dict | str:
    try:
        return decoder.replay(decoder.decode_journal(data), EMPTY, PAGE)
    except decoder.Refused as refusal:
        return str(refusal)


ENTRY_OF = published()
SAID = (
    [ENTRY_OF],
    [RetireRecord([ENTRY_OF.records[-1].record_id])],
    [Retire([ENTRY_OF.extents[0].generation, 999])],
    [Reset()],
    [ENTRY_OF],
)
GOOD = journal_of(*SAID)
ENDS = [len(journal_of(*SAID[:count])) for count in range(len(SAID) + 1)]
PAST = [state_of(journal_of(*SAID[:count])) for count in range(len(SAID) + 1)]


def test_the_states_of_its_past_differ():
    assert [list(state["records"]) for state in PAST] == [
        [],
        [21, 22, 24, 25],
        [21, 22, 24],
        [],
        [],
        [21, 22, 24, 25],
    ]


def test_every_truncation_is_a_state_of_its_past():
    for length in range(len(GOOD)):
        whole = sum(end <= length for end in ENDS)
        expected = "bad-journal" if whole == 0 else PAST[whole - 1]
        assert outcome(GOOD[:length]) == expected, length


def test_a_flipped_bit_loses_the_last_commit_or_all():
    for bit in range(8 * len(GOOD)):
        at = bit // 8
        edited = bytearray(GOOD)
        edited[at] ^= 1 << bit % 8
        found = outcome(bytes(edited))
        if at >= ENDS[-2]:
            assert found == PAST[-2], bit
        elif at >= HEADER_BYTES:
            assert found == "bad-journal", bit
        else:
            assert found in ("bad-journal", "unsupported-version"), bit


def test_no_field_asks_for_memory_or_leads_anywhere_but_to_a_refusal():
    one = journal_of([ENTRY_OF])
    assert sealed_journal(one) == one, "this test seals as the codec does"
    assert len(list(journal_structures(one))) == 4 + 2 + 4
    told: set[str] = set()
    tracemalloc.start()
    try:
        for start, layout in journal_structures(one):
            for _, _, name in fields(layout):
                for value in BOUNDS:
                    found = outcome(sealed_journal(put(one, layout, start, name, value)))
                    if isinstance(found, str):
                        told.add(found)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert told == {"bad-journal", "unsupported-version"}


@pytest.mark.parametrize("frames", [1, 64, 1024])
def test_what_pretends_to_be_many_commits_is_hashed_a_bounded_number_of_times(frames, monkeypatch):
    tail = 64 * frames
    fakes = bytearray()
    for number in range(frames):
        head = bytearray(64)
        head[:8] = FRAME.magic
        head[24:32] = (tail - 64 * number).to_bytes(8, "little")
        fakes += head
    fakes += bytes(64)
    hashed = 0
    unpack = FRAME.unpack.__func__

    def counted(self, head, trailer=b""):
        nonlocal hashed
        hashed += len(head) + len(trailer)
        return unpack(self, head, trailer=trailer)

    monkeypatch.setattr(type(FRAME), "unpack", counted)
    mine(GOOD + bytes(fakes))
    assert 0 < hashed <= 10 * (len(GOOD) + len(fakes))
