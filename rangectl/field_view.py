"""Structures of a store's files in words and in JSON: every field, and what was expected of it.

Owns how a field is written; never judges one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import UUID

from rangekv.engine.pack import filesystem_name
from rangekv.format.dissect import Field, Structure, shown
from rangekv.format.errors import FormatError
from rangekv.format.namespace import Namespace
from rangekv.format.records import NO_CHECKSUM, NO_PARENT

from rangectl.output import columns, utc

BAD = "!"
_HEX_BYTES = 16
_NONE = {"parent": NO_PARENT, "checksum_index": NO_CHECKSUM}


def structure_lines(structure: Structure, *, as_hex: bool) -> Iterator[str]:
    """Yield one line a field; a bad one begins with `!` and ends with what was expected."""
    fields = structure.fields()
    width = max(len(field.name) for field in fields)
    for field in fields:
        mark = " " if field.expected is None else BAD
        expected = "" if field.expected is None else f"   expected {field.expected}"
        text = _value(field)
        if not as_hex:
            yield f"{mark} {field.name:<{width}}  {text}{expected}"
            continue
        first, *rest = _dump(field.raw)
        place = f"{field.offset:#010x} {len(field.raw):>5}"
        yield f"{mark} {place}  {field.name:<{width}}  {first:<{_HEX_BYTES * 3}} {text}{expected}"
        yield from (f"{'':{len(place) + width + 6}}{line}" for line in rest)


def table_lines(rows: Iterable[Structure], skipped: frozenset[str]) -> Iterator[str]:
    """Yield rows of one kind as a table, each bad field in a line of its own below its row."""
    head: list[str] = []
    cells: list[list[str]] = []
    faults: list[list[str]] = []
    for ordinal, row in enumerate(rows):
        shown_fields = [field for field in row.fields() if field.name not in skipped]
        head = head or [f"{BAD} row", *(field.name for field in shown_fields)]
        mark = " " if row.ok else BAD
        cells.append([f"{mark} {ordinal}", *map(_value, shown_fields)])
        faults.append(
            [
                f"{BAD}     {field.name} is {_value(field)}, expected {field.expected}"
                for field in row.fields()
                if field.expected is not None
            ]
        )
    if not cells:
        yield "  none"
        return
    first, *lines = columns([head, *cells])
    yield " " + first[1:]
    for line, below in zip(lines, faults, strict=True):
        yield line
        yield from below


def structure_json(structure: Structure, *, as_hex: bool) -> dict[str, Any]:
    """Return every field of one structure; integers as they are, octets as hex."""
    return {
        "offset": structure.offset,
        "ok": structure.ok,
        "fields": [_field_json(field, as_hex) for field in structure.fields()],
    }


def row_json(structure: Structure, *, as_hex: bool) -> dict[str, Any]:
    """Return one row of a table: its fields by name, and the bad ones with what was expected."""
    fields = structure.fields()
    more = {"hex": structure.data.hex()} if as_hex else {}
    return {
        "offset": structure.offset,
        "ok": structure.ok,
        **{f.name: _plain(f) for f in fields if not f.name.startswith("reserved")},
        "bad": {f.name: f.expected for f in fields if f.expected is not None},
        **more,
    }


def _field_json(field: Field, as_hex: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": field.name,
        "offset": field.offset,
        "value": _plain(field),
        "expected": field.expected,
    }
    return fields | {"hex": field.raw.hex()} if as_hex else fields


def _plain(field: Field) -> int | str:
    return field.value if isinstance(field.value, int) else field.value.hex()


def _value(field: Field) -> str:
    """Return a value as a person reads it."""
    name, value = field.name, field.value
    if name == "xxh3_64":
        return field.raw.hex()
    if isinstance(value, bytes):
        if name.startswith("reserved"):
            return shown(value) if any(value) else "zero"
        return _octets(name, value)
    if name.endswith("unix_ns"):
        moment = utc(value)
        return f"{value} ({moment})" if moment else str(value)
    if name == "fs_magic":
        return f"{value:#x} ({filesystem_name(value)})"
    return "none" if value == _NONE.get(name) else str(value)


def _octets(name: str, value: bytes) -> str:
    if name == "store_uuid":
        return str(UUID(bytes=value))
    if name == "namespace":
        try:
            fields = Namespace.decode(value.rstrip(b"\0")).fields
        except FormatError:
            return shown(value)
        return ", ".join(f"{key}={item}" for key, item in fields.items())
    return shown(value)


def _dump(raw: bytes) -> list[str]:
    """Return lines of up to 16 bytes in hex; what is zero at the end is counted instead."""
    used = raw.rstrip(b"\0")
    zeros = len(raw) - len(used)
    if len(raw) <= _HEX_BYTES:
        return [raw.hex(" ")]
    lines = [used[at : at + _HEX_BYTES].hex(" ") for at in range(0, len(used), _HEX_BYTES)]
    return [*lines, f"{zeros} zero bytes"] if zeros else lines
