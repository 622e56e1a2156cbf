"""What tells the namespaces of a directory apart: the fields that differ, side by side.

Owns that comparison; what a difference means for a hit is decided by the engine alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rangekv.engine.stores import Place, list_stores
from rangekv.format.errors import ExitCode, NotAStore, UsageError
from rangekv.format.namespace import Namespace, Value

from rangectl.output import Output, columns, counted
from rangectl.target import stores_at


@dataclass(frozen=True, slots=True)
class Side:
    """One namespace and where it was found."""

    name: str
    path: str
    namespace: Namespace


def show_differences(paths: Sequence[str], *, as_json: bool) -> ExitCode:
    """Print in which fields the namespaces at `paths` differ; OTHER_NAMESPACE when any does.

    One path stands for all namespaces below it; with two, each must hold one. Raises StoreMissing,
    UsageError, NotAStore.
    """
    sides = _below(paths[0]) if len(paths) == 1 else [_only(path) for path in paths]
    if len(sides) < 2:
        raise UsageError(
            "one-namespace",
            "one namespace lies there; --diff compares two: give a second PATH",
            path=paths[0],
        )
    rows = differing(sides)
    fields = {
        "namespaces": [
            {"name": side.name, "path": side.path, "sha256": side.namespace.digest.hex()}
            for side in sides
        ],
        "differences": [{"field": key, "values": list(values)} for key, values in rows],
    }
    Output("inspect", as_json=as_json).result(not rows, fields, _as_text(sides, rows))
    return ExitCode.OTHER_NAMESPACE if rows else ExitCode.OK


def differing(sides: Sequence[Side]) -> list[tuple[str, list[Value | None]]]:
    """Return (field, its value on every side) for each that differs; None where it is absent."""
    all_fields = [side.namespace.fields for side in sides]
    keys = sorted({key for fields in all_fields for key in fields})
    rows = [(key, [fields.get(key) for fields in all_fields]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _below(path: str) -> list[Side]:
    """Return the namespaces of a directory, one side each, however many ranks it has."""
    sides: dict[Namespace, Side] = {}
    for place in _readable(path):
        if place.namespace is not None:
            side = Side(place.namespace.folder, place.path, place.namespace)
            sides.setdefault(place.namespace, side)
    return list(sides.values())


def _only(path: str) -> Side:
    found = _below(path)
    if len(found) == 1:
        return Side(os.path.relpath(path), found[0].path, found[0].namespace)
    raise UsageError(
        "several-stores" if found else "no-namespace",
        f"{counted(len(found), 'namespace')} found, expected one; give the path of a store",
        path=path,
    )


def _readable(path: str) -> list[Place]:
    stores_at(path)  # says what is wrong where there is none
    places = list_stores(path)
    for place in places:
        if place.problem is not None:
            raise NotAStore("not-a-store", place.problem, path=place.path)
    return places


def _as_text(
    sides: Sequence[Side], rows: Sequence[tuple[str, Sequence[Value | None]]]
) -> Iterator[str]:
    if not rows:
        yield f"{' and '.join(side.name for side in sides)} are one namespace"
        return
    table = [["field", *(side.name for side in sides)]]
    table += [
        [key, *("absent" if one is None else str(one) for one in values)] for key, values in rows
    ]
    yield from columns(table)
