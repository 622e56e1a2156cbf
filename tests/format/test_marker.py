"""The dirty marker's bytes."""

from __future__ import annotations

import pytest
from rangekv.format.errors import FormatError
from rangekv.format.marker import MARKER, Marker

GOOD = Marker(bytes(range(16)), 5, 1_700_000_000_000_000_000, 4321, bytes(range(16, 32)))


def test_round_trip():
    assert len(GOOD.encode()) == 128
    assert Marker.decode(GOOD.encode()) == GOOD


def test_every_flipped_bit_and_every_other_length_is_refused():
    page = bytearray(GOOD.encode())
    for bit in range(len(page) * 8):
        page[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError, match="bad-marker"):
            Marker.decode(page)
        page[bit // 8] ^= 1 << bit % 8
    for length in (*range(128), 129):
        with pytest.raises(FormatError):
            Marker.decode(bytes(page + b"\x00")[:length])


def test_sealed_nonsense_is_refused():
    page = GOOD.encode()
    for offset, octets in ((12, b"\x02"), (52, b"\x01"), (100, b"\x01"), (39, b"\xff")):
        body = bytearray(page[:120])
        body[offset : offset + len(octets)] = octets
        with pytest.raises(FormatError):
            Marker.decode(bytes(body) + MARKER.seal(body))
