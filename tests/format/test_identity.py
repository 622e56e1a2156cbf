"""When a file is the same file."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rangekv.format.identity import BTIME_VALID, GENERATION_VALID, FileIdentity

BOTH = BTIME_VALID | GENERATION_VALID
KNOWN = FileIdentity(7, 4096, 100, 5, 42, BOTH)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"file_bytes": 8192}, "size-mismatch"),
        ({"inode": 8}, "inode-mismatch"),
        ({"btime_nsec": 6}, "birth-time-mismatch"),
        ({"btime_sec": 101}, "birth-time-mismatch"),
        ({"inode_generation": 43}, "generation-mismatch"),
        ({"identity_flags": 0}, "no-identity"),
        ({"identity_flags": BTIME_VALID, "inode_generation": 0}, None),
        ({"identity_flags": GENERATION_VALID, "btime_sec": 0, "btime_nsec": 0}, None),
        ({"identity_flags": GENERATION_VALID, "inode_generation": 1}, "generation-mismatch"),
    ],
)
def test_reasons(changes, reason):
    found = replace(KNOWN, **changes)
    assert KNOWN.mismatch(found) == reason
    assert found.mismatch(KNOWN) == reason


def test_an_inode_alone_proves_nothing():
    bare = FileIdentity(7, 4096)
    assert bare.mismatch(bare) == "no-identity"
