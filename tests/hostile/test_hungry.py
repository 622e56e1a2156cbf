"""Files that ask for memory get none: what they claim is checked before it is allocated."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rangekv.format.envelope import HEADER, HEADER_BYTES, SECTION
from support.hostile import put, sealed_snapshot, sections
from support.stores import filled_tables, make_store, open_store

TESTS = Path(__file__).parent.parent
TERABYTE = 1 << 40


def long_file(path: Path) -> None:
    """A terabyte without blocks."""
    os.truncate(path, TERABYTE)


def claimed_length(path: Path) -> None:
    """The header says so too."""
    data = put(path.read_bytes(), HEADER, 0, "snapshot_bytes", TERABYTE)
    path.write_bytes(sealed_snapshot(data))
    os.truncate(path, TERABYTE)


def one_section_grown(kind: int, entry_bytes: int) -> Callable[[Path], None]:
    """A section fills the terabyte, and those behind it start where they then must."""

    def edit(path: Path) -> None:
        data = path.read_bytes()
        end, grown = 0, False
        for entry, found, offset, length in sections(data):
            start = -(-end // 64) * 64 if grown else offset
            data = put(data, SECTION, entry, "offset", start)
            end = start + length
            if found == kind:
                grown, count = True, TERABYTE // entry_bytes
                data = put(data, SECTION, entry, "count", count)
                data = put(data, SECTION, entry, "length", count * entry_bytes)
                end = start + count * entry_bytes
        data = put(data, HEADER, 0, "snapshot_bytes", end)
        path.write_bytes(sealed_snapshot(data))
        os.truncate(path, end)

    return edit


def unknown_section(path: Path) -> None:
    """A section of a later version, one that may be skipped, fills the terabyte."""
    data = path.read_bytes()
    table_end = HEADER_BYTES + 5 * SECTION.size
    entry = SECTION.struct.pack(9, 0, 0, TERABYTE, 1, bytes(16))
    # 48 bytes are inserted behind the table; the padding there makes room for nearly all of them.
    shift = 64
    data = data[:table_end] + entry + bytes(16) + data[table_end:]
    data = put(data, HEADER, 0, "section_count", 6)
    end = 0
    for at, _, offset, length in sections(data):
        start = offset + shift if offset else -(-end // 64) * 64
        data = put(data, SECTION, at, "offset", start)
        end = start + length
    data = put(data, HEADER, 0, "snapshot_bytes", end)
    path.write_bytes(sealed_snapshot(data))
    os.truncate(path, end)


CASES = {
    "range.snapshot long": (long_file, "bad-snapshot"),
    "range.snapshot claimed": (claimed_length, "bad-snapshot"),
    "range.snapshot records": (one_section_grown(1, 96), "snapshot-limits"),
    "range.snapshot tokens": (one_section_grown(2, 4), "snapshot-limits"),
    "range.snapshot checksums": (one_section_grown(3, 8), "snapshot-limits"),
    "range.snapshot extents": (one_section_grown(4, 48), "snapshot-limits"),
    "range.snapshot roots": (one_section_grown(5, 32), "snapshot-limits"),
    "range.snapshot unknown": (unknown_section, "snapshot-limits"),
    "range.pack long": (long_file, "size-mismatch"),
    "range.dirty long": (lambda path: (path.touch(0o600), long_file(path)), "dirty-marker"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_claim_is_checked_before_it_is_allocated(tmp_path, case):
    store = make_store(tmp_path / "store")
    opened = open_store(store)
    opened.close(filled_tables(opened.geometry))
    name = case.split()[0]
    edit, reason = CASES[case]
    try:
        edit(store / name)
    except OSError as error:
        pytest.skip(f"this file system has no file of a terabyte: {error}")
    done = subprocess.run(
        [sys.executable, "-m", "support.hungry", str(store)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, [reason, reason]), done.stderr
