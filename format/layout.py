"""Owns the description of one fixed structure on disk: a table of (offset, size, name) rows.

The same table packs, unpacks and is compared with SPEC.md by a test, so the two cannot drift;
it knows nothing about what a field means.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

from rangekv.format.checksum import Octets, xxh3_64, xxh3_128_le
from rangekv.format.errors import BadChecksum, BadMagic, OutOfBounds

INTEGER_CODES = {2: "H", 4: "I", 8: "Q"}
SEAL_BYTES = {"xxh3_64": 8, "xxh3_128": 16}
COUNTER_MAX = 2**63 - 1  # sequences and epochs only rise; half their range is never reached


class Layout:
    """One structure: little-endian, no gaps, sealed by the hash in its last field.

    Fields of 2, 4 or 8 bytes are unsigned integers, all others are byte strings; fields named
    `reserved…` are written zero. A structure whose last field is not
    named after a hash carries no seal of its own. `code` is the error code of every refusal.
    """

    def __init__(
        self, code: str, size: int, rows: Iterable[tuple[int, int, str]], magic: bytes = b""
    ) -> None:
        self.code = code
        self.size = size
        self.rows = tuple(rows)
        self.magic = magic
        end = 0
        formats = ["<"]
        for offset, length, name in self.rows:
            if offset != end:
                raise AssertionError(f"{name} starts at {offset}, the field before ends at {end}")
            end = offset + length
            is_integer = length in INTEGER_CODES and name != "magic"
            formats.append(INTEGER_CODES[length] if is_integer else f"{length}s")
        if end != size:
            raise AssertionError(f"fields end at {end}, the structure at {size}")
        self.struct = struct.Struct("".join(formats))
        seal_offset, seal_bytes, seal_name = self.rows[-1]
        self.sealed = SEAL_BYTES.get(seal_name) == seal_bytes
        self.seal_offset = seal_offset if self.sealed else size

    def pack(
        self, integers: Mapping[str, int], octets: Mapping[str, bytes], trailer: Octets = b""
    ) -> bytes:
        """Return the sealed structure; the seal of a header also covers `trailer`."""
        values: list[int | bytes] = []
        for _, length, name in self.rows:
            if name == "magic":
                values.append(self.magic)
            elif name.startswith("reserved") or name in SEAL_BYTES:
                values.append(0 if length in INTEGER_CODES else b"")
            elif length in INTEGER_CODES:
                values.append(integers[name])
            else:
                values.append(octets[name])
        body = self.struct.pack(*values)[: self.seal_offset]
        return body + self.seal(body, trailer) if self.sealed else body

    def seal(self, body: Octets, trailer: Octets = b"") -> bytes:
        """Return the seal of `body` (everything before the last field) as it lies on disk."""
        if self.size - self.seal_offset == 8:
            return xxh3_64(body).to_bytes(8, "little")
        return xxh3_128_le(body, trailer)

    def unpack(
        self, data: Octets, trailer: Octets = b""
    ) -> tuple[dict[str, int], dict[str, bytes]]:
        """Return (integers, octets) by field name.

        Raises BadMagic, BadChecksum or OutOfBounds with this layout's code.
        """
        view = memoryview(data)
        if len(view) != self.size:
            raise OutOfBounds(
                self.code, f"the structure is {len(view)} bytes long, expected {self.size}"
            )
        if view[: len(self.magic)] != self.magic:
            raise BadMagic(self.code, f"the first {len(self.magic)} bytes are not the magic")
        if self.sealed and view[self.seal_offset :] != self.seal(view[: self.seal_offset], trailer):
            raise BadChecksum(self.code, "the checksum does not match the bytes it covers")
        integers: dict[str, int] = {}
        octets: dict[str, bytes] = {}
        for (_, _, name), value in zip(self.rows, self.struct.unpack(view), strict=True):
            if isinstance(value, int):
                integers[name] = value
            else:
                octets[name] = value
        return integers, octets

    def require_zero_reserved(self, data: Octets) -> None:
        """Raise OutOfBounds when a reserved byte is set; asked once the version is known."""
        for offset, length, name in self.rows:
            if name.startswith("reserved") and any(data[offset : offset + length]):
                raise OutOfBounds(self.code, "reserved bytes are not zero", offset=offset)

    def pack_rows(self, rows: Iterable[tuple[int, ...]]) -> bytearray:
        """Return a table: each row's plain fields, its zero `reserved`, its 64-bit seal."""
        table = bytearray()
        reserved: int | bytes = 0 if self.rows[-2][1] in INTEGER_CODES else b""
        for row in rows:
            body = self.struct.pack(*row, reserved, 0)[: self.seal_offset]
            table += body + xxh3_64(body).to_bytes(8, "little")
        return table

    def unpack_rows(self, table: Octets) -> Iterator[tuple[int, ...]]:
        """Yield each row's plain fields in order; raises BadChecksum or OutOfBounds."""
        view = memoryview(table)
        seal_offset = self.seal_offset
        reserved: int | bytes = 0 if self.rows[-2][1] in INTEGER_CODES else bytes(self.rows[-2][1])
        for ordinal, values in enumerate(self.struct.iter_unpack(view)):
            start = ordinal * self.size
            if values[-1] != xxh3_64(view[start : start + seal_offset]):
                raise BadChecksum(self.code, f"row {ordinal} does not match its checksum")
            if values[-2] != reserved:
                raise OutOfBounds(self.code, f"row {ordinal} has reserved bytes that are not zero")
            yield values[:-2]
