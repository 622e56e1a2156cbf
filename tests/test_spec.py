"""SPEC.md and the code say the same: fields, limits, codes, labels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from rangekv.format import envelope, geometry, identity, journal, namespace, superblock, tables
from rangekv.format.checksum import xxh3_64, xxh3_128_le
from rangekv.format.entries import ENTRY, PUBLISH, PUBLISHED, EntryKind
from rangekv.format.envelope import ENTRY_BYTES, HEADER, SECTION, SectionKind
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.journal import FRAME, JOURNAL
from rangekv.format.layout import COUNTER_MAX, Layout
from rangekv.format.marker import MARKER
from rangekv.format.records import EXTENT, RECORD
from rangekv.format.superblock import SUPERBLOCK
from rangekv.format.tables import TableLimits

ROOT = Path(__file__).parent.parent
SPEC = (ROOT / "SPEC.md").read_text("utf-8")
FIELD_TABLES = {
    "6. Superblock": SUPERBLOCK,
    "8.1 Header": HEADER,
    "8.2 Section table": SECTION,
    "8.3 Extents": EXTENT,
    "8.4 Records": RECORD,
    "9.1 Dirty marker": MARKER,
    "9.2 Journal": JOURNAL,
    "9.3 Frames": FRAME,
    "9.4 Entries": ENTRY,
    "9.5 Publishing": PUBLISH,
    "9.6 Published records": PUBLISHED,
}
STEPS = {
    letter: [f"{letter}{at}" for at in range(1, last + 1)]
    for letter, last in {"F": 9, "B": 4, "O": 7, "C": 6, "R": 7, "J": 4, "K": 5, "D": 5}.items()
}
STEPS["O"] += ["O5a", "O5b"]
# Where a store is opened, read and refused: every code of these files is in SPEC.md.
READERS = [
    *(
        ROOT / "engine" / f"{name}.py"
        for name in ("folder", "pack", "reopen", "recovery", "journals", "snapshots")
    ),
    *(ROOT / "format").glob("*.py"),
]
# Said by these files about settings, not about a store.
NOT_OF_A_STORE = {
    "bad-geometry",
    "bad-namespace",
    "block-too-large",
    "capacity-too-small",
    "namespace-too-long",
}
# Policies of the engine: the format does not know them.
NOT_OF_THE_FORMAT = {"no-direct-io", "posix-direct", "posix-buffered"}


def chapter(title: str) -> str:
    """Return the text of one heading, without the next one of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", SPEC, re.MULTILINE | re.DOTALL)
    assert found, f"SPEC.md has no heading {title!r}"
    return found[1]


def rows(text: str) -> Iterator[list[str]]:
    """Yield the cells of every line of the tables in a text, heads included."""
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|-"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("title", FIELD_TABLES)
def test_a_field_table_is_that_of_the_code(title):
    layout = FIELD_TABLES[title]
    head, *fields = (row for row in rows(chapter(title)) if len(row) == 4)
    assert head == ["offset", "size", "field", "value"]
    assert [(int(at), int(size), name) for at, size, name, _ in fields] == list(layout.rows)


def test_no_field_table_escapes_comparison():
    assert SPEC.count("| offset | size | field | value |") == len(FIELD_TABLES)


@pytest.mark.parametrize("layout", [SUPERBLOCK, HEADER, MARKER, JOURNAL, FRAME])
def test_the_magics_are_those_of_the_code(layout: Layout):
    assert f"| 0 | {len(layout.magic)} | magic | `{layout.magic.hex(' ')}` |" in SPEC


def test_the_section_kinds_are_those_of_the_code():
    listed = [row for row in rows(chapter("8.2 Section table")) if len(row) == 3][1:]
    assert [(int(kind), name) for kind, name, _ in listed] == [
        (kind.value, kind.name) for kind in SectionKind
    ]
    for kind, _, entry in listed:
        assert f" {ENTRY_BYTES[SectionKind(int(kind))]} bytes" in entry


def test_the_entry_kinds_are_those_of_the_code():
    listed = [row for row in rows(chapter("9.4 Entries")) if len(row) == 3][1:]
    assert [(int(kind), name) for kind, name, _ in listed] == [
        (kind.value, kind.name) for kind in EntryKind
    ]


def test_the_hashes_of_nothing_are_those_of_the_code():
    text = chapter("4. Conventions")
    assert f"`{xxh3_64(b'').to_bytes(8, 'little').hex(' ')}`" in text
    assert f"`{xxh3_128_le(b'').hex(' ')}`" in text


def limits() -> dict[str, str]:
    return {row[0]: row[1] for row in rows(chapter("10. Limits")) if len(row) == 3}


def test_the_fixed_limits_are_those_of_the_code():
    found = {name: int(value) for name, value in limits().items() if value.isdigit()}
    assert found == {
        "layer_count": geometry.LAYER_COUNT_MAX,
        "pack_count": geometry.PACK_COUNT_MAX,
        "world_size": superblock.RANKS_MAX,
        "stripe_bytes_max": geometry.STRIPE_BYTES_CAP,
        "page_bytes": geometry.STRIPE_BYTES_CAP,
        "namespace_bytes": namespace.NAMESPACE_BYTES_MAX,
        "sequence": COUNTER_MAX,
        "epoch": COUNTER_MAX,
        "generation_max": COUNTER_MAX,
        "record_id": COUNTER_MAX,
        "access_rank": COUNTER_MAX,
        "token_start + token_count": tables.TOKEN_POSITION_MAX,
        "section_count": envelope.SECTION_COUNT_MAX,
        "length of a section of unknown kind": envelope.UNKNOWN_SECTION_BYTES_MAX,
        "roots": tables.ROOTS_MAX,
        "length of a journal": journal.JOURNAL_BYTES_MAX,
    }


@pytest.mark.parametrize("model", [(2, 4096, 16), (61, 1152, 16), (32, 4096, 8)])
def test_the_derived_limits_are_those_of_the_code(model):
    shape = Geometry.derive(ModelGeometry(*model), 64 * 1024**3)
    names = {name: getattr(shape, name) for name in Geometry.__dataclass_fields__}
    names |= {"block_bytes": shape.block_bytes, "floor": int}
    for name in ("extents", "records", "tokens", "checksums"):
        names[name] = int(eval(limits()[name].replace(" x ", " * "), {}, names))
    assert TableLimits.of(shape) == TableLimits(
        names["extents"], names["records"], names["tokens"], names["checksums"]
    )
    assert TableLimits.of(None) == TableLimits(0, 0, 0, 0)


def test_the_registers_are_those_of_the_code():
    listed = [row for row in rows(chapter("14. Versions and features")) if len(row) == 3]
    values = {(name, value) for name, value, _ in listed if value.isdigit()}
    assert values == {
        ("layout_id", str(geometry.LAYOUT_TOKEN_MAJOR)),
        ("layout_id", str(geometry.LAYOUT_OPAQUE_BLOCKS)),
        ("checksum_id", str(geometry.CHECKSUM_NONE)),
        ("checksum_id", str(geometry.CHECKSUM_XXH3_64_PAGES)),
        ("identity_flags", str(identity.BTIME_VALID)),
        ("identity_flags", str(identity.GENERATION_VALID)),
    }


def test_every_step_is_in_the_text_and_in_the_code_and_no_other():
    label = re.compile(rf"\b([{''.join(STEPS)}]\d+[a-b]?)\b")
    expected = {step for steps in STEPS.values() for step in steps}
    in_text = set(label.findall(SPEC.split("## 16.")[0]))
    in_code: set[str] = set()
    for path in (ROOT / "engine").glob("*.py"):
        for line in path.read_text("utf-8").splitlines():
            in_code |= set(label.findall(line.partition("#")[2]))
            in_code |= set(label.findall(line)) if '"""' in line else set()
    assert in_text == expected
    assert in_code - expected == set()
    # A step in a doc string such as "F2 to F7" stands for those between as well.
    assert expected - in_code == set()


def test_every_step_has_its_line_in_the_text():
    for steps in STEPS.values():
        for step in steps:
            assert re.search(rf"^- {step}: ", SPEC, re.MULTILINE), step


def codes(text: str) -> set[str]:
    return set(re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text))


def test_every_code_is_in_the_text_and_in_the_code():
    said = {
        code
        for path in READERS
        for code in re.findall(r'"([a-z]+(?:-[a-z]+)+)"', path.read_text("utf-8"))
    }
    sources = "\n".join(path.read_text("utf-8") for path in (ROOT / "engine").glob("*.py"))
    sources += "\n".join(path.read_text("utf-8") for path in (ROOT / "format").glob("*.py"))
    told = codes(SPEC)
    assert said - told - NOT_OF_A_STORE - NOT_OF_THE_FORMAT == set()
    assert {code for code in told if f'"{code}"' not in sources} == set()
