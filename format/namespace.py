"""Owns the namespace: the named facts under which cached KV may be used again.

Equal bytes mean equal namespaces and nothing else does; it never interprets a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import msgpack
from rangekv.format.checksum import Octets
from rangekv.format.errors import OutOfBounds, UsageError

NAMESPACE_BYTES_MAX = 2048
VALUE_BYTES_MAX = 256
FOLDER_DIGITS = 12

Value = str | int


class Namespace:
    """A sorted map of short strings and integers with one canonical encoding (msgpack).

    A string value over 256 bytes stands as the SHA-256 of its UTF-8 bytes, in hex. Raises
    UsageError `bad-namespace` for anything that has no canonical form.
    """

    __slots__ = ("_encoded", "_fields")

    def __init__(self, fields: Mapping[str, Value]) -> None:
        self._fields = {key: _stored(key, fields[key]) for key in sorted(fields)}
        try:
            self._encoded: bytes = msgpack.packb(self._fields)
        except (OverflowError, UnicodeEncodeError) as error:
            raise UsageError("bad-namespace", f"the namespace cannot be written: {error}") from None
        if len(self._encoded) > NAMESPACE_BYTES_MAX:
            raise UsageError(
                "namespace-too-long",
                f"the namespace takes {len(self._encoded)} bytes, a store keeps at most "
                f"{NAMESPACE_BYTES_MAX}; use fewer or shorter tags",
            )

    @classmethod
    def decode(cls, data: Octets) -> Namespace:
        """Return the namespace whose canonical encoding is `data`; raises OutOfBounds."""
        if len(data) > NAMESPACE_BYTES_MAX:
            raise OutOfBounds("bad-namespace", f"the namespace takes {len(data)} bytes")
        try:
            fields = msgpack.unpackb(
                data,
                raw=False,
                strict_map_key=True,
                max_str_len=NAMESPACE_BYTES_MAX,
                max_map_len=NAMESPACE_BYTES_MAX,
                max_array_len=0,
                max_bin_len=0,
                max_ext_len=0,
            )
            namespace = cls(fields)
        # msgpack raises many kinds for bytes that are not its own; all mean the same here.
        except Exception as error:
            raise OutOfBounds("bad-namespace", f"the namespace is unreadable: {error}") from None
        if namespace.encode() != data:
            raise OutOfBounds("bad-namespace", "the namespace is not in canonical form")
        return namespace

    @property
    def fields(self) -> Mapping[str, Value]:
        """The fields in sorted order; a copy."""
        return dict(self._fields)

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        return self._encoded

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical bytes."""
        return hashlib.sha256(self._encoded).digest()

    @property
    def folder(self) -> str:
        """Name of the namespace's folder: the first 12 hex digits of its digest."""
        return self.digest.hex()[:FOLDER_DIGITS]

    def differences(self, other: Namespace) -> list[tuple[str, Value | None, Value | None]]:
        """Return (key, mine, theirs) for every key that differs; None = the key is absent."""
        keys = sorted(self._fields.keys() | other._fields.keys())
        pairs = [(key, self._fields.get(key), other._fields.get(key)) for key in keys]
        return [(key, mine, theirs) for key, mine, theirs in pairs if mine != theirs]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._encoded == other._encoded

    def __hash__(self) -> int:
        return hash(self._encoded)

    def __repr__(self) -> str:
        return f"Namespace({self._fields!r})"


def _stored(key: object, value: object) -> Value:
    if not isinstance(key, str):
        raise UsageError("bad-namespace", f"namespace key {key!r} is not a string")
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise UsageError("bad-namespace", f"namespace value of {key!r} is no string or integer")
    octets = value.encode("utf-8", "surrogatepass")
    return value if len(octets) <= VALUE_BYTES_MAX else hashlib.sha256(octets).hexdigest()
