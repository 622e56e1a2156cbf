"""The two hashes and their byte order, against the values that the xxHash project publishes."""

from __future__ import annotations

from rangekv.format.checksum import xxh3_64, xxh3_128_le


def test_digests_of_nothing_are_the_published_ones():
    assert xxh3_64(b"") == 0x2D06800538D394C2
    assert xxh3_64(b"").to_bytes(8, "little").hex() == "c294d3380580062d"
    assert xxh3_128_le(b"")[::-1].hex() == "99aa06d3014798d86001c324468d497f"


def test_a_trailer_counts_as_if_it_followed():
    assert xxh3_128_le(b"head", b"tail") == xxh3_128_le(b"headtail")
