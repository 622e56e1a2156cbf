"""The canonical encoding of a namespace."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rangekv.format.errors import OutOfBounds, UsageError
from rangekv.format.namespace import Namespace

FIELDS = st.dictionaries(
    st.text(max_size=12), st.text(max_size=40) | st.integers(-(2**63), 2**64 - 1), max_size=12
)


@given(FIELDS)
def test_round_trip_in_any_order(fields):
    namespace = Namespace(fields)
    assert Namespace(dict(reversed(fields.items()))) == namespace
    assert Namespace.decode(namespace.encode()) == namespace
    assert dict(namespace.fields) == fields
    assert namespace.digest == hashlib.sha256(namespace.encode()).digest()
    assert namespace.folder == namespace.digest.hex()[:12]


def test_the_encoding_is_plain_sorted_msgpack():
    assert Namespace({"b": 1, "a": "x"}).encode() == bytes.fromhex("82a161a178a16201")


def test_long_values_stand_as_their_digest():
    value = "é" * 129
    assert Namespace({"k": value}).fields["k"] == hashlib.sha256(value.encode()).hexdigest()
    assert Namespace({"k": "x" * 256}).fields["k"] == "x" * 256


def test_differences_name_both_sides():
    mine, theirs = Namespace({"a": 1, "b": "x"}), Namespace({"b": "y", "c": 2})
    assert mine.differences(theirs) == [("a", 1, None), ("b", "x", "y"), ("c", None, 2)]
    assert mine.differences(mine) == []


@pytest.mark.parametrize(
    "fields", [{"a": True}, {"a": 1.5}, {"a": None}, {1: "a"}, {"a": 2**64}, {"a": "\ud800"}]
)
def test_what_has_no_canonical_form_is_refused(fields):
    with pytest.raises(UsageError, match="bad-namespace"):
        Namespace(fields)


def test_too_long_is_refused():
    with pytest.raises(UsageError, match="namespace-too-long"):
        Namespace({f"key{index}": "x" * 250 for index in range(9)})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x00",
        b"\xc0",
        b"\x01",
        msgpack.packb(["a"]),
        msgpack.packb({"b": 1, "a": 2}),  # not sorted
        b"\x81\xa1a\xcc\x01",  # not the shortest integer
        b"\x81\xd9\x01a\x01",  # not the shortest string
        b"\x82\xa1a\x01\xa1a\x01",  # a key twice
        msgpack.packb({"a": [1]}),
        msgpack.packb({"a": b"x"}),
        msgpack.packb({"a": {"b": 1}}),
        msgpack.packb({"a": "x" * 300}),
        b"\x81\xa1a\xa1\xff",  # no UTF-8
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 2048,
        b"\x80" * 2049,
    ],
)
def test_other_bytes_are_refused(data):
    with pytest.raises(OutOfBounds, match="bad-namespace"):
        Namespace.decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_give_a_namespace_or_a_format_error(data):
    with suppress(OutOfBounds):
        assert Namespace.decode(data).encode() == data
