"""One part of a store's metadata, as it lies on disk: what `inspect PATH VIEW` shows.

Owns which view shows what, for damaged files too; never judges a field and never writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rangekv.engine.dissection import (
    SnapshotLook,
    dissect_journal,
    dissect_slots,
    dissecting,
)
from rangekv.engine.faults import translated
from rangekv.engine.inspection import Reading, StoreReport, reading
from rangekv.format.dissect import Structure
from rangekv.format.envelope import SectionKind
from rangekv.format.errors import NotAStore, StoreLocked
from rangekv.format.records import NO_PARENT

from rangectl import field_view, journal_view, pack_map
from rangectl.describe import state_line
from rangectl.output import counted, facts
from rangectl.token_tree import root_name, tree_lines

_QUIET = frozenset({"reserved", "xxh3_64", "flags"})


@dataclass(frozen=True, slots=True)
class Shown:
    """One view, ready to be printed."""

    report: StoreReport
    bad_fields: int
    fields: dict[str, Any]
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a view is to be shown."""

    as_json: bool
    as_hex: bool
    show_tokens: bool


def show(path: str, view: str, wanted: Wanted) -> Shown:
    """Return what one view of the store at `path` shows.

    Raises StoreLocked where a session holds the store and the view is of its snapshot, which is
    that of the session before; and the errors of `reading`.
    """
    with reading(path) as current, translated(path, "read the store's metadata"):
        report = current.report
        if view == "superblock":
            return _shown(report, view, _superblock(report, wanted))
        if report.state == "live":
            raise StoreLocked(
                "store-locked",
                f"{report.detail}, and the snapshot is from before its session; stop it first",
                path=path,
            )
        if view == "journal":
            return _shown(report, view, _journal(current, wanted))
        with dissecting(current) as look:
            if look is None:
                return _shown(report, view, _Part(0, {"snapshot": None}, ["no snapshot to read"]))
            return _shown(report, view, _PARTS[view](current, look, wanted))


def _journal(current: Reading, wanted: Wanted) -> _Part:
    look = dissect_journal(current)
    if look is None:
        why = current.report.detail if current.report.reason else "a closed session has none"
        return _Part(0, {"journal": None}, [f"no journal to read: {why}"])
    lines = ["header", *field_view.structure_lines(look.header, as_hex=wanted.as_hex)]
    for one in look.commits:
        lines += ["", *journal_view.commit_lines(one, as_hex=wanted.as_hex)]
    if look.torn_bytes:
        lines += ["", f"{counted(look.torn_bytes, 'byte')} behind the last commit: a torn one"]
    fields = {
        "header": field_view.structure_json(look.header, as_hex=wanted.as_hex),
        "commits": [journal_view.commit_json(one, as_hex=wanted.as_hex) for one in look.commits],
        "torn_bytes": look.torn_bytes,
    }
    return _Part(look.bad_fields, fields, lines)


class _Marked:
    """Structures that pass by once, and what is marked in them: a table may have 100,000 rows."""

    def __init__(self, structures: Iterable[Structure]) -> None:
        self._structures = structures
        self.bad_fields = 0
        self.bad_rows: list[int] = []

    def __iter__(self) -> Iterator[Structure]:
        for row, structure in enumerate(self._structures):
            if not structure.ok:
                self.bad_fields += len(structure.faults)
                self.bad_rows.append(row)
            yield structure

    def all_bad(self) -> frozenset[int]:
        """Let all of them pass and return the rows that are marked."""
        for _ in self:
            pass
        return frozenset(self.bad_rows)


@dataclass(slots=True)
class _Part:
    bad_fields: int
    fields: dict[str, Any]
    lines: list[str]


def _shown(report: StoreReport, view: str, part: _Part) -> Shown:
    bad = part.bad_fields
    head = [("state", state_line(report)), ("path", report.path)]
    head.append(("bad fields", str(bad) if bad else "none"))
    if report.state == "would-recover" and view not in ("superblock", "journal"):
        head.append(("shown", "the snapshot below the journal; rangectl recover joins the two"))
    fields = {
        "path": report.path,
        "state": report.state,
        "reason": report.reason,
        "view": view,
        "bad_fields": bad,
        **part.fields,
    }
    return Shown(report, bad, fields, [*facts(head), "", *part.lines])


def _superblock(report: StoreReport, wanted: Wanted) -> _Part:
    slots = dissect_slots(report)
    lines: list[str] = []
    for slot, structure in zip(report.slots, slots, strict=True):
        counts = slot.superblock is not None and slot.superblock == report.superblock
        verdict = "valid" if slot.problem is None else f"refused: {slot.problem.message}"
        lines.append(
            f"superblock {'AB'[slot.copy_index]} at byte {slot.offset}: {verdict}"
            + (", and the one that counts" if counts else "")
        )
        lines += [*field_view.structure_lines(structure, as_hex=wanted.as_hex), ""]
    fields = [field_view.structure_json(one, as_hex=wanted.as_hex) for one in slots]
    for one, slot in zip(fields, report.slots, strict=True):
        one["valid"] = slot.problem is None
    return _Part(sum(len(one.faults) for one in slots), {"superblocks": fields}, lines[:-1])


def _snapshot(current: Reading, look: SnapshotLook, wanted: Wanted) -> _Part:
    lines = ["header", *field_view.structure_lines(look.header, as_hex=wanted.as_hex)]
    for row in look.sections:
        kind = row.integer("kind")
        name = SectionKind(kind).name if kind in list(SectionKind) else f"kind {kind}"
        lines += ["", f"section {name}: {'ok' if row.ok else 'damaged'}"]
        lines += field_view.structure_lines(row, as_hex=wanted.as_hex)
    fields = {
        "header": field_view.structure_json(look.header, as_hex=wanted.as_hex),
        "sections": [field_view.structure_json(one, as_hex=wanted.as_hex) for one in look.sections],
    }
    bad = sum(len(one.faults) for one in (look.header, *look.sections))
    return _Part(bad, fields, lines)


def _table(name: str, structures: Iterable[Structure], wanted: Wanted) -> _Part:
    rows = _Marked(structures)
    fields: dict[str, Any] = {}
    lines: list[str] = []
    if wanted.as_json:
        fields[name] = [field_view.row_json(row, as_hex=wanted.as_hex) for row in rows]
    elif wanted.as_hex:
        for ordinal, row in enumerate(rows):
            lines += [f"{name[:-1]} {ordinal}", *field_view.structure_lines(row, as_hex=True), ""]
        lines = lines[:-1] or ["none"]
    else:
        lines = list(field_view.table_lines(rows, _QUIET))
    return _Part(rows.bad_fields, fields, lines)


def _extents(current: Reading, look: SnapshotLook, wanted: Wanted) -> _Part:
    return _table("extents", look.extents(), wanted)


def _records(current: Reading, look: SnapshotLook, wanted: Wanted) -> _Part:
    return _table("records", look.records(), wanted)


def _packs(current: Reading, look: SnapshotLook, wanted: Wanted) -> _Part:
    geometry = look.geometry
    if geometry is None:
        if current.report.blank:
            return _Part(0, {"packs": []}, ["blank: it has no packs before an engine binds it"])
        raise NotAStore(
            "not-a-store",
            "no superblock says how the packs lie; look at inspect superblock",
            path=current.report.path,
        )
    marked = _Marked(look.extents())
    bad = marked.all_bad()
    rows = list(
        pack_map.pack_rows(
            geometry,
            look.extent_table.rows,
            look.record_table.rows,
            bad,
            pack_map.cells_of(geometry),
        )
    )
    lines = list(pack_map.picture(geometry, rows))
    lines += [f"! extent {row} is damaged: see inspect extents" for row in sorted(bad)]
    fields = {"pack_bytes": geometry.pack_bytes, "packs": pack_map.rows_json(rows)}
    return _Part(marked.bad_fields, fields, lines)


def _tree(current: Reading, look: SnapshotLook, wanted: Wanted) -> _Part:
    marked = _Marked(look.records())
    bad = marked.all_bad()
    records, roots = look.record_table.rows, look.roots
    tokens = look.tokens() if wanted.show_tokens else None
    lines = list(tree_lines(records, roots, bad, tokens))
    fields: dict[str, Any] = {
        "roots": [
            {"root": root, "sha256": digest.hex(), "name": root_name(roots, root)}
            for root, digest in enumerate(roots)
        ],
        "records": [
            {
                "row": row,
                "record_id": record.record_id,
                "root": record.root,
                "parent": None if record.parent == NO_PARENT else record.parent,
                "token_start": record.token_start,
                "token_count": record.token_count,
                "ok": row not in bad,
            }
            for row, record in enumerate(records)
        ],
    }
    if tokens is not None:
        for record, one in zip(records, fields["records"], strict=True):
            first = record.token_index
            one["token_ids"] = list(tokens[first : first + record.token_count])
    return _Part(marked.bad_fields, fields, lines)


_PARTS: dict[str, Callable[[Reading, SnapshotLook, Wanted], _Part]] = {
    "snapshot": _snapshot,
    "extents": _extents,
    "records": _records,
    "packs": _packs,
    "tree": _tree,
}
