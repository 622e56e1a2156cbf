"""Owns the look at one structure field by field: what was found and what was expected there.

It never raises for content and proves nothing: a structure is accepted by its own module alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rangekv.format.checksum import Octets
from rangekv.format.layout import INTEGER_CODES, Layout

Value = int | bytes

# In longer fields only changed bits are looked for: every value of every byte would take seconds.
_SHORT_BYTES = 32


@dataclass(frozen=True, slots=True)
class Field:
    """One field as it lies in its file. `expected` is None where nothing is wrong with it."""

    offset: int
    """In the file."""
    name: str
    raw: bytes
    """Shorter than the field where the file ends inside it."""
    value: Value
    expected: str | None


class Structure:
    """One structure of a file, read whatever its bytes say.

    `faults` says by field name what was expected; magic, reserved bytes, length and seal are judged
    here, all else by the caller. When one changed byte explains a seal that does not match, the
    field with that byte is the fault and the seal is not.
    """

    def __init__(
        self, layout: Layout, data: Octets, offset: int, trailer: Octets = b"", *, mend: bool = True
    ) -> None:
        self.layout = layout
        self.offset = offset
        self.data = bytes(data[: layout.size])
        self.faults: dict[str, str] = {}
        self.mended = False
        """Whether the seal does not hold and the field that is to blame is known."""
        self.right = self.data
        """The bytes with which the seal holds, where one changed byte is to blame."""
        self.trailer_fault: tuple[int, int] | None = None
        """(position, right byte) when the changed byte lies in the trailer."""
        whole = self.data.ljust(layout.size, b"\0")
        self.found: dict[str, Value] = {
            name: value
            for (_, _, name), value in zip(layout.rows, layout.struct.unpack(whole), strict=True)
        }
        self.values = dict(self.found)
        """As most likely meant: the right value where it is known. All judging goes by these."""
        self.sealed = self._judge_seal(whole, bytes(trailer), mend)
        self._judge_shape(whole)

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def doubtful(self) -> bool:
        """Whether the seal does not hold and nothing says which field is to blame."""
        return not (self.sealed or self.mended)

    def integer(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int), name
        return value

    def octets(self, name: str) -> bytes:
        value = self.values[name]
        assert isinstance(value, bytes), name
        return value

    def fault(self, name: str, expected: str) -> None:
        """Mark a field; the first thing that is said about it stays."""
        self.faults.setdefault(name, expected)

    def mend(self, name: str, right: Value, why: str) -> None:
        """Mark a field whose right value is known, and go by that one from now on."""
        if self.found[name] != right:
            self.fault(name, f"{shown(right)} ({why})")
            self.values[name] = right
            self.mended = True

    def expect(self, name: str, expected: Value, why: str = "") -> None:
        """Mark a field unless it has this value."""
        if self.values[name] != expected:
            self.fault(name, shown(expected) + (f" ({why})" if why else ""))

    def require(self, name: str, condition: bool, expected: str) -> None:
        """Mark a field unless `condition`."""
        if not condition:
            self.fault(name, expected)

    def fields(self) -> list[Field]:
        """Return all fields in their order."""
        return [
            Field(
                self.offset + offset,
                name,
                self.data[offset : offset + length],
                self.found[name],
                self.faults.get(name),
            )
            for offset, length, name in self.layout.rows
        ]

    def _judge_shape(self, whole: bytes) -> None:
        for offset, length, name in self.layout.rows:
            if offset + length > len(self.data):
                self.fault(name, f"{length} bytes; the file ends before")
            elif name.startswith("reserved") and any(whole[offset : offset + length]):
                self.fault(name, "zero bytes only")
        if self.layout.magic:
            self.expect("magic", self.layout.magic)

    def _judge_seal(self, whole: bytes, trailer: bytes, mend: bool) -> bool:
        """Return whether the seal holds; mark what is wrong otherwise."""
        layout = self.layout
        if not layout.sealed:
            return True
        end = layout.seal_offset
        found, body = whole[end:], whole[:end]
        right = layout.seal(body, trailer)
        if found == right:
            return True
        name = layout.rows[-1][2]
        changed = None
        if mend and len(self.data) == layout.size and _differing(found, right) > 1:
            changed = self._changed_byte(
                body + trailer, lambda data: layout.seal(data[:end], data[end:]) == found
            )
        if changed is None:
            self.fault(name, f"{right.hex()} (over the bytes it covers)")
        elif changed[0] < end:
            self.fault_at(*changed)
        else:
            self.trailer_fault = (changed[0] - end, changed[1])
            self.mended = True
            self.fault(name, f"{right.hex()} (one byte that it covers has changed)")
        return False

    def _changed_byte(
        self, body: bytes, fits: Callable[[memoryview], bool]
    ) -> tuple[int, int] | None:
        """Return (position, right byte) of the one byte that must change for `fits` to hold."""
        trial = bytearray(body)
        view = memoryview(trial)
        for position, byte in enumerate(body):
            for other in self._candidates(position, byte):
                trial[position] = other
                if fits(view):
                    return position, other
            trial[position] = byte
        return None

    def _candidates(self, position: int, byte: int) -> Iterator[int]:
        """Yield what a byte may have been: reserved ones were zero."""
        for offset, length, name in self.layout.rows:
            if offset <= position < offset + length and position < self.layout.seal_offset:
                if name.startswith("reserved"):
                    yield from (0,) if byte else ()
                    return
                if length > _SHORT_BYTES:
                    yield from (byte ^ 1 << bit for bit in range(8))
                    return
        yield from (byte ^ mask for mask in range(1, 256))

    def fault_at(self, position: int, byte: int) -> None:
        """Mark the field that holds one changed byte, with the value that it had."""
        before = bytearray(self.data)
        before[position] = byte
        self.right = bytes(before)
        for offset, length, name in self.layout.rows:
            if offset <= position < offset + length:
                part = bytes(before[offset : offset + length])
                is_integer = length in INTEGER_CODES and name != "magic"
                right = int.from_bytes(part, "little") if is_integer else part
                self.mend(name, right, "then the checksum is right")


def shown(value: Value) -> str:
    """Return a value as people read it: integers in decimal, octets in hex, shortened."""
    if isinstance(value, int):
        return str(value)
    text = value.rstrip(b"\0").hex() if len(value) > 32 else value.hex()
    return f"{text[:64]}… ({len(value)} bytes)" if len(text) > 64 else text or "all zero"


def _differing(left: bytes, right: bytes) -> int:
    return sum(a != b for a, b in zip(left, right, strict=True))
