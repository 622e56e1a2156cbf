"""Owns the dirty marker: the file that exists while a session may write payload.

Its existence is what counts; its fields only tell a person, and name the holder of a lock.
"""

from __future__ import annotations

from dataclasses import dataclass

from rangekv.format.checksum import Octets
from rangekv.format.errors import OutOfBounds
from rangekv.format.layout import COUNTER_MAX, Layout

MARKER_BYTES = 128
MARKER_VERSION = 1

MARKER = Layout(
    "bad-marker",
    MARKER_BYTES,
    (
        (0, 12, "magic"),
        (12, 4, "version"),
        (16, 16, "store_uuid"),
        (32, 8, "epoch"),
        (40, 8, "unix_ns"),
        (48, 4, "pid"),
        (52, 4, "reserved_0"),
        (56, 16, "boot_id"),
        (72, 48, "reserved_1"),
        (120, 8, "xxh3_64"),
    ),
    magic=b"\x89RANGEDM\r\n\x1a\n",
)


@dataclass(frozen=True, slots=True)
class Marker:
    """Who made the store dirty, and when."""

    store_uuid: bytes
    epoch: int
    unix_ns: int
    pid: int
    boot_id: bytes

    def encode(self) -> bytes:
        """Return the 128 bytes of the file."""
        return MARKER.pack(
            {
                "version": MARKER_VERSION,
                "epoch": self.epoch,
                "unix_ns": self.unix_ns,
                "pid": self.pid,
            },
            {"store_uuid": self.store_uuid, "boot_id": self.boot_id},
        )

    @classmethod
    def decode(cls, data: Octets) -> Marker:
        """Raises FormatError `bad-marker`; a marker that cannot be read is a marker still."""
        integers, octets = MARKER.unpack(data)
        if integers["version"] != MARKER_VERSION or integers["epoch"] > COUNTER_MAX:
            raise OutOfBounds("bad-marker", "version or epoch is outside its limit")
        MARKER.require_zero_reserved(data)
        return cls(
            store_uuid=octets["store_uuid"],
            epoch=integers["epoch"],
            unix_ns=integers["unix_ns"],
            pid=integers["pid"],
            boot_id=octets["boot_id"],
        )
