"""Sizes as people write them: `16GiB`, `512MiB`, plain bytes.

Parses, checks and prints; never guesses: `16G` could mean two numbers and is refused.
"""

from __future__ import annotations

import re

from rangekv.format.errors import UsageError

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50}
_PATTERN = re.compile(r"([+-]?)(\d+)(\.\d+)?\s*([A-Za-z]*)", re.ASCII)
_DIGITS_MAX = 20


def parse_size(value: str | int, *, name: str = "size", multiple_of: int = 1) -> int:
    """Return `value` in bytes: an int or digits are bytes, else one of KiB MiB GiB TiB PiB follows.

    `name` is the option or setting that an error speaks of. Raises UsageError with code
    `bad-size` unless the result is positive and a multiple of `multiple_of` bytes.
    """
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise _bad(name, value, "is not a size; write 16GiB, 512MiB or plain bytes")
    size_bytes = value if isinstance(value, int) else _parse_text(value.strip(), name)
    if size_bytes <= 0:
        raise _bad(name, value, "is not a positive size; write 16GiB, 512MiB or plain bytes")
    if size_bytes % multiple_of:
        lower = size_bytes // multiple_of * multiple_of or multiple_of
        raise _bad(
            name,
            value,
            f"is not a multiple of {format_size(multiple_of)}; {format_size(lower)} would be",
        )
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Return the shortest exact spelling that `parse_size` reads back to the same number."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)


def _parse_text(text: str, name: str) -> int:
    match = _PATTERN.fullmatch(text)
    if match is None or len(match[2]) > _DIGITS_MAX:
        raise _bad(name, text, "is not a size; write 16GiB, 512MiB or plain bytes")
    sign, digits, fraction, unit = match.groups()
    if fraction:
        raise _bad(name, text, "has a fraction; write a whole number of a smaller unit")
    if unit not in _UNITS:
        raise _bad(name, text, _unit_hint(digits, unit))
    return (-1 if sign == "-" else 1) * int(digits) * _UNITS[unit]


def _unit_hint(digits: str, unit: str) -> str:
    """Say which binary unit was probably meant, and never take it silently."""
    binary = f"{unit[0].upper()}iB"
    if binary in _UNITS and unit.lower().rstrip("ib") == unit[0].lower():
        return f"is ambiguous; write {digits}{binary} (powers of 1024) or plain bytes"
    return f"has the unknown unit {unit!r}; use KiB, MiB, GiB, TiB or plain bytes"


def _bad(name: str, value: object, problem: str) -> UsageError:
    return UsageError("bad-size", f"{name}: {str(value)[:40]!r} {problem}")
