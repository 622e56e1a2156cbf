"""Every bit, every length, every field at its bounds: two readers decide alike."""

from __future__ import annotations

from collections import Counter

import pytest
from rangekv.format.envelope import HEADER, HEADER_BYTES, SECTION
from rangekv.format.errors import FormatError
from rangekv.format.layout import Layout
from rangekv.format.marker import MARKER
from rangekv.format.records import EXTENT, RECORD
from rangekv.format.superblock import SUPERBLOCK
from rangekv.format.tables import Tables
from support.fuzz import (
    Markers,
    Mutator,
    Snapshots,
    Superblocks,
    geometries,
    snapshot_of,
    superblock_of,
)
from support.hostile import (
    fields,
    put,
    sealed_marker,
    sealed_snapshot,
    sealed_superblock,
    structures,
)
from vectors import decoder, generate

LIMITS = (
    {1024, 2048, 65536, 33554432, 1048576, 2**32 - 1, 2**63 - 1}  # section 10 of SPEC.md
    | {8, 256, 4096, 10**9, 512, 513}
)
# For the figures: what all cases of one kind add up to.
TOTALS: Counter[str] = Counter()
BOUNDS = {0, 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1}
BOUNDS |= {limit + step for limit in LIMITS for step in (-1, 0, 1)}


class Reader:
    """One parser with its second reader; `check` is what must hold for whatever is accepted."""

    def __init__(self, target, wrap=lambda data: data) -> None:
        self.target, self.wrap = target, wrap
        self.codes: Counter[str | None] = Counter()

    def show(self, data: bytes) -> str | None:
        case = self.wrap(data)
        try:
            found = self.target.read(case)
            code = None
        except FormatError as error:
            code = error.code
        else:
            self.target.check(case, found)
        try:
            self.target.decode(case)
            theirs = None
        except decoder.Refused as refusal:
            theirs = str(refusal)
        assert theirs == code, data.hex()
        self.codes[code] += 1
        return code


def large_tables() -> Tables:
    """Tables whose snapshot takes about 2 KiB."""
    tables = generate.tables_of("snapshot-four-records.bin")
    tables.roots += [bytes([number]) * 32 for number in range(1, 19)]
    return tables


SUPERBLOCK_PAGES = {
    "bound": (superblock_of(geometries()[0], 5).encode(0), 0),
    "narrow": (superblock_of(geometries()[1], 5).encode(0), 0),
    "blank": (superblock_of(None, 5).encode(1), 1),
}
SNAPSHOT = snapshot_of(geometries()[0], large_tables())
MARKER_BYTES = Markers(Mutator(0)).good


def superblocks(copy: int) -> Reader:
    return Reader(Superblocks(Mutator(0)), lambda page: (page, copy))


def snapshots() -> Reader:
    return Reader(Snapshots(Mutator(0)))


def markers() -> Reader:
    return Reader(Markers(Mutator(0)))


CASES = {
    **{
        f"superblock-{name}": (lambda copy=copy: superblocks(copy), page, sealed_superblock)
        for name, (page, copy) in SUPERBLOCK_PAGES.items()
    },
    "snapshot": (snapshots, SNAPSHOT, sealed_snapshot),
    "marker": (markers, MARKER_BYTES, sealed_marker),
}


def test_the_snapshot_is_of_the_size_that_the_figures_say():
    assert 1900 < len(SNAPSHOT) < 2200
    assert snapshots().show(SNAPSHOT) is None


@pytest.mark.parametrize("name", CASES)
def test_every_flipped_bit_is_refused(name, figure):
    make, data, _ = CASES[name]
    reader, edited = make(), bytearray(data)
    for bit in range(len(data) * 8):
        edited[bit // 8] ^= 1 << bit % 8
        assert reader.show(bytes(edited)) is not None, bit
        edited[bit // 8] ^= 1 << bit % 8
    TOTALS["flipped"] += len(data) * 8
    figure("flipped bits", f"{TOTALS['flipped']:,}, all refused")


@pytest.mark.parametrize("name", CASES)
def test_every_flipped_bit_under_good_checksums_is_read_alike(name, figure):
    make, data, seal = CASES[name]
    reader, edited = make(), bytearray(data)
    for bit in range(len(data) * 8):
        edited[bit // 8] ^= 1 << bit % 8
        reader.show(seal(bytes(edited)))
        edited[bit // 8] ^= 1 << bit % 8
    accepted = reader.codes.pop(None)
    assert 0 < accepted < len(data) * 8
    TOTALS["sealed"] += len(data) * 8
    TOTALS["sealed accepted"] += accepted
    figure(
        "flipped bits, sealed anew",
        f"{TOTALS['sealed']:,}, {TOTALS['sealed accepted']:,} accepted, two readers agree",
    )


@pytest.mark.parametrize("name", CASES)
def test_every_other_length_is_refused(name):
    make, data, seal = CASES[name]
    reader = make()
    for length in range(len(data)):
        assert reader.show(data[:length]) is not None, length
    for extra in (1, 63, 64, 4096):
        assert reader.show(data + bytes(extra)) is not None
    if seal is sealed_snapshot:
        for length in range(HEADER_BYTES, len(data)):
            claimed = put(data[:length], HEADER, 0, "snapshot_bytes", length)
            assert reader.show(sealed_snapshot(claimed)) is not None, length


def values(found: int, size: int) -> set[int]:
    top = 256**size - 1
    near = {found - 1, found + 1, found * 2, found // 2, top - 1, top}
    return {one for one in near | BOUNDS if 0 <= one <= top and one != found}


def bounds(data: bytes, start: int, layout: Layout):
    """Yield every integer field of one structure at every value on a bound."""
    for offset, size, name in fields(layout):
        found = int.from_bytes(data[start + offset : start + offset + size], "little")
        for value in sorted(values(found, size)):
            yield put(data, layout, start, name, value)


@pytest.mark.parametrize("name", CASES)
def test_every_field_at_its_bounds_is_read_alike(name, figure):
    make, data, seal = CASES[name]
    reader = make()
    if name == "snapshot":
        places = list(structures(data))
        assert Counter(layout for _, layout in places) == {
            HEADER: 1, SECTION: 5, RECORD: 4, EXTENT: 2,
        }  # fmt: skip
    else:
        places = [(0, MARKER if name == "marker" else SUPERBLOCK)]
    for start, layout in places:
        for edited in bounds(data, start, layout):
            reader.show(seal(edited))
    total, accepted = reader.codes.total(), reader.codes[None]
    assert accepted > 0
    TOTALS["bounds"] += total
    TOTALS["bounds accepted"] += accepted
    figure(
        "fields at their bounds, sealed anew",
        f"{TOTALS['bounds']:,}, {TOTALS['bounds accepted']:,} accepted, two readers agree",
    )
