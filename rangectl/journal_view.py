"""Commits of a journal in words and in JSON: where each lies, what it says, what is wrong in it.

Owns how a commit is written; never reads a file and never judges.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rangekv.format.entries import Entry, Publish, Retire, RetireRecord
from rangekv.format.journal_fields import Commit

from rangectl import field_view
from rangectl.output import counted, human_bytes, utc


def commit_lines(commit: Commit, *, as_hex: bool) -> Iterator[str]:
    """Yield a line that says what a commit does; its fields where one is bad, or as hex."""
    head = commit.head
    if commit.skipped_bytes:
        yield f"! {counted(commit.skipped_bytes, 'byte')} that are no commit"
    said = commit.problem or ", ".join(map(_words, commit.said)) or "nothing"
    yield (
        f"commit {head.integer('commit')} at byte {head.offset}, "
        f"{human_bytes(head.integer('frame_bytes'))}, {utc(head.integer('unix_ns'))}: {said}"
    )
    if as_hex or not head.ok:
        yield from field_view.structure_lines(head, as_hex=as_hex)


def commit_json(commit: Commit, *, as_hex: bool) -> dict[str, Any]:
    """Return the fields of a commit's head and its entries in order."""
    return {
        **field_view.structure_json(commit.head, as_hex=as_hex),
        "entries": [_entry_json(entry) for entry in commit.said],
        "problem": commit.problem,
        "skipped_bytes": commit.skipped_bytes,
    }


def _words(entry: Entry) -> str:
    if isinstance(entry, Publish):
        tokens = sum(record.token_count for record in entry.records)
        return (
            f"{counted(len(entry.records), 'record')} of {counted(tokens, 'token')} became visible"
        )
    if isinstance(entry, Retire):
        return f"{counted(len(entry.generations), 'extent')} retired"
    if isinstance(entry, RetireRecord):
        return f"{counted(len(entry.record_ids), 'record')} retired"
    return "all forgotten"


def _entry_json(entry: Entry) -> dict[str, Any]:
    if isinstance(entry, Publish):
        return {
            "kind": "publish",
            "roots": [root.hex() for root in entry.roots],
            "extents": [one._asdict() for one in entry.extents],
            "records": [one._asdict() for one in entry.records],
        }
    if isinstance(entry, Retire):
        return {"kind": "retire", "generations": entry.generations}
    if isinstance(entry, RetireRecord):
        return {"kind": "retire-record", "record_ids": entry.record_ids}
    return {"kind": "reset"}
