"""Sizes: what is read, what is refused, and that refusals say what to write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rangekv.engine.sizes import format_size, parse_size
from rangekv.format.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("16GiB", 16 * 2**30),
        ("512MiB", 512 * 2**20),
        ("4 KiB", 4096),
        ("1TiB", 2**40),
        ("4096", 4096),
        ("4096B", 4096),
        (4096, 4096),
        ("+1", 1),
    ],
)
def test_reads(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("16G", "write 16GiB"),
        ("16g", "write 16GiB"),
        ("16GB", "write 16GiB"),
        ("16gib", "write 16GiB"),
        ("5k", "write 5KiB"),
        ("7X", "unknown unit"),
        ("16 Bananas", "unknown unit"),
        ("-1", "positive"),
        ("-1GiB", "positive"),
        ("0", "positive"),
        ("0GiB", "positive"),
        (0, "positive"),
        (-5, "positive"),
        ("", "not a size"),
        ("GiB", "not a size"),
        ("0x10", "not a size"),
        ("1e9", "not a size"),
        ("１６GiB", "not a size"),
        ("9" * 400, "not a size"),
        ("1.5GiB", "fraction"),
        (True, "not a size"),
        (1.5, "not a size"),
        (None, "not a size"),
    ],
)
def test_refuses_with_a_hint(text: object, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text, name="capacity")  # type: ignore[arg-type]
    assert caught.value.code == "bad-size"
    assert caught.value.message.startswith("capacity: ")
    assert hint in caught.value.message


def test_refuses_a_size_that_is_no_multiple() -> None:
    with pytest.raises(UsageError, match="not a multiple of 4KiB; 4KiB would be"):
        parse_size(5000, multiple_of=4096)


@given(st.integers(min_value=1, max_value=2**60))
def test_what_is_printed_reads_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes
