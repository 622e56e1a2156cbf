"""The examples of section 16 of SPEC.md, as their tables and dumps say it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

SPEC = (Path(__file__).parent.parent.parent / "SPEC.md").read_text("utf-8")

Row = dict[str, str]


def names() -> list[str]:
    """Return the files that section 16 dumps."""
    return re.findall(r"^### 16\.\d+ `(.+)`$", SPEC, re.MULTILINE)


def example(name: str) -> tuple[list[list[Row]], bytes]:
    """Return the tables and the dumped bytes of one example of section 16."""
    text = SPEC.split(f" `{name}`\n")[1].split("\n##")[0]
    tables: list[list[Row]] = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *lines = (re.split(r" *\| *", line.strip("| ")) for line in block.splitlines())
        tables.append([dict(zip(head, line, strict=True)) for line in lines])
    data, rows = bytearray(), re.findall(r"^([0-9a-f]{4})  (.+)$", text, re.MULTILINE)
    for offset, octets in rows:
        data += bytes(int(offset, 16) - len(data)) + bytes.fromhex(octets)
    return tables, bytes(data)


def inputs(name: str) -> Row:
    """Return the first table of an example, `input` to `value`."""
    return {row["input"].split(" (")[0]: row["value"] for row in example(name)[0][0]}


def span(text: str) -> range:
    """Return the numbers of "3 to 5", or none."""
    if text == "none":
        return range(0)
    first, last = text.split(" to ")
    return range(int(first), int(last) + 1)


def root(text: str) -> bytes:
    """Return the SHA-256 of the name between backticks, or the root of no salt for "0"."""
    quoted = re.search(r"`(\w+)`", text)
    return hashlib.sha256(quoted[1].encode()).digest() if quoted else bytes(32)
