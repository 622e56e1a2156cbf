"""Owns the two hashes of the format and how their digests lie on disk (little-endian).

It never decides what a mismatch means: callers compare and raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import xxhash

Octets: TypeAlias = bytes | bytearray | memoryview


def xxh3_64(data: Octets) -> int:
    """Return the 64-bit hash of `data`, seed 0: table rows, markers and payload pages."""
    return xxhash.xxh3_64_intdigest(data)


def xxh3_128_le(data: Octets, trailer: Octets = b"") -> bytes:
    """Return the 16-byte little-endian hash of `data` followed by `trailer`, seed 0.

    The library's own digest() is big-endian, so it must not reach the disk.
    """
    state = xxhash.xxh3_128(data)
    state.update(trailer)
    return state.intdigest().to_bytes(16, "little")


def xxh3_128_of(pieces: Iterable[Octets]) -> bytes:
    """Return the 16-byte little-endian hash of `pieces` one after another, seed 0."""
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.intdigest().to_bytes(16, "little")
