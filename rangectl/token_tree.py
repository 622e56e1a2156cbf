"""The token trees of a store: which record continues which, by token counts.

Owns the drawing; prints token ids only when it is given them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rangekv.format.records import NO_PARENT, NO_SALT, Record

from rangectl.output import counted


@dataclass(frozen=True, slots=True)
class Trees:
    """Every record's children, and what hangs nowhere because its parent is damaged."""

    tops: dict[int, list[int]]
    """By root."""
    children: dict[int, list[int]]
    """Rows by the row of their parent, in the order in which they leave it."""
    orphans: list[int]

    @classmethod
    def of(cls, records: Sequence[Record]) -> Trees:
        tops: dict[int, list[int]] = {}
        children: dict[int, list[int]] = {}
        orphans: list[int] = []
        for row, record in enumerate(records):
            if record.parent == NO_PARENT:
                tops.setdefault(record.root, []).append(row)
            elif record.parent < row:
                children.setdefault(record.parent, []).append(row)
            else:
                orphans.append(row)
        for below in children.values():
            below.sort(key=lambda row: records[row].parent_tokens)
        return cls(tops, children, orphans)


def tree_lines(
    records: Sequence[Record],
    roots: Sequence[bytes],
    bad: frozenset[int],
    tokens: memoryview | None,
) -> Iterator[str]:
    """Yield every root and below it its records; one that alone goes on stays in its column."""
    trees = Trees.of(records)
    for root in sorted(trees.tops):
        rows = list(_below(trees, trees.tops[root]))
        token_count = sum(records[row].token_count for _, row in rows)
        yield (
            f"root {root}   {root_name(roots, root)}"
            f"   {counted(len(rows), 'record')}   {counted(token_count, 'token')}"
        )
        yield from _lines(records, rows, bad, tokens)
    if trees.orphans:
        yield "no root   the parent is damaged"
        yield from _lines(records, list(_below(trees, trees.orphans)), bad, tokens)
    if not records:
        yield "empty"


def root_name(roots: Sequence[bytes], root: int) -> str:
    """Return whose tree it is: the head of the tenant's digest, enough to tell it apart."""
    if root >= len(roots):
        return "not in the table of roots"
    return "no salt" if roots[root] == NO_SALT else f"salt {roots[root].hex()[:16]}"


def _lines(
    records: Sequence[Record],
    rows: Sequence[tuple[str, int]],
    bad: frozenset[int],
    tokens: memoryview | None,
) -> Iterator[str]:
    for drawn, row in rows:
        record = records[row]
        last = record.token_start + record.token_count - 1
        mark = "!" if row in bad else " "
        line = (
            f"{mark} {drawn}tokens {record.token_start:,}-{last:,}"
            f"   record {record.record_id}   extent {record.extent}"
        )
        if tokens is not None:
            own = tokens[record.token_index : record.token_index + record.token_count]
            line += f"   {' '.join(map(str, own))}"
        yield line


def _below(trees: Trees, tops: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield (branches drawn before it, row), parents first; chains may be thousands long."""
    stack = [("├─ ", "│  ", row) for row in tops[:-1]] + [("└─ ", "   ", tops[-1])]
    stack.reverse()
    while stack:
        drawn, indent, row = stack.pop()
        yield drawn, row
        below = trees.children.get(row, [])
        if len(below) == 1:
            stack.append((indent, indent, below[0]))
            continue
        for child in reversed(below):
            last = child == below[-1]
            stack.append(
                (indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  "), child)
            )
