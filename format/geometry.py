"""Owns the arithmetic of a pack file: stripes, extents, packs, pages, addresses.

Pure integers; it never touches a file and holds no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rangekv.format.errors import OutOfBounds, UsageError

ALIGNMENT = 4096
SUPERBLOCK_OFFSETS = (0, 512 * 1024)
DATA_OFFSET = 1024 * 1024
STRIPE_BYTES_CAP = 32 * 1024 * 1024
STRIPE_BYTES_FLOOR = 64 * 1024
PAGE_BYTES_TARGET = 256 * 1024
PACK_COUNT_MIN = 4  # asked of a new store, so that one pack is never the whole of it
PACK_COUNT_MAX = 65_536
LAYER_COUNT_MAX = 1_024

LAYOUT_TOKEN_MAJOR = 1
LAYOUT_OPAQUE_BLOCKS = 2
CHECKSUM_NONE = 0
CHECKSUM_XXH3_64_PAGES = 1


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """What the model and its engine fix, for one rank."""

    layer_count: int
    token_bytes: int
    """K and V of one token, one layer, this rank."""
    block_tokens: int

    def __post_init__(self) -> None:
        for name in ("layer_count", "token_bytes", "block_tokens"):
            value = getattr(self, name)
            if not 0 < value < 2**32:
                raise UsageError("bad-geometry", f"{name} is {value}, expected 1 to 2^32 - 1")
        if self.layer_count > LAYER_COUNT_MAX:
            raise UsageError(
                "bad-geometry",
                f"layer_count is {self.layer_count}, a store holds at most {LAYER_COUNT_MAX}",
            )
        if write_unit_bytes(self.block_bytes) > STRIPE_BYTES_CAP:
            raise UsageError(
                "block-too-large",
                f"blocks of {self.block_bytes} bytes need stripes above {STRIPE_BYTES_CAP} bytes; "
                "use a smaller block_tokens",
            )

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes


def write_unit_bytes(block_bytes: int) -> int:
    """Return the smallest number of bytes that is whole blocks and whole 4096-byte pieces."""
    return math.lcm(block_bytes, ALIGNMENT)


def stripe_bytes_floor(block_bytes: int) -> int:
    """Return the smallest stripe: the write unit, doubled until it is at least 64 KiB."""
    stripe_bytes = write_unit_bytes(block_bytes)
    while stripe_bytes < STRIPE_BYTES_FLOOR:
        stripe_bytes *= 2
    return stripe_bytes


def page_blocks_default(block_bytes: int) -> int:
    """Return the blocks of one checksum page: about 256 KiB, whole write units, at least one."""
    unit_blocks = write_unit_bytes(block_bytes) // block_bytes
    return max(unit_blocks, PAGE_BYTES_TARGET // block_bytes // unit_blocks * unit_blocks)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The fixed geometry of one bound store; the superblock carries these fields."""

    layer_count: int
    token_bytes: int
    block_tokens: int
    stripe_bytes_min: int
    stripe_bytes_max: int
    pack_bytes: int
    pack_count: int
    checksum_page_blocks: int
    layout_id: int = LAYOUT_OPAQUE_BLOCKS
    checksum_id: int = CHECKSUM_XXH3_64_PAGES

    @classmethod
    def derive(cls, model: ModelGeometry, capacity_bytes: int) -> Geometry:
        """Choose stripes and packs for `capacity_bytes` of pack space (file bytes - 1 MiB).

        The widest stripe up to 32 MiB for which at least four packs fit. Raises UsageError
        `capacity-too-small`, naming the smallest capacity that works.
        """
        stripe_min = stripe_bytes_floor(model.block_bytes)
        capacity_min = PACK_COUNT_MIN * model.layer_count * stripe_min
        if capacity_bytes < capacity_min:
            raise UsageError(
                "capacity-too-small",
                f"a capacity of {capacity_bytes} bytes per rank cannot hold {PACK_COUNT_MIN} packs "
                f"of {model.layer_count} layers; the smallest that works is {capacity_min} bytes",
            )
        stripe_max = stripe_min
        while (
            stripe_max * 2 <= STRIPE_BYTES_CAP
            and PACK_COUNT_MIN * model.layer_count * stripe_max * 2 <= capacity_bytes
        ):
            stripe_max *= 2
        pack_bytes = model.layer_count * stripe_max
        return cls(
            layer_count=model.layer_count,
            token_bytes=model.token_bytes,
            block_tokens=model.block_tokens,
            stripe_bytes_min=stripe_min,
            stripe_bytes_max=stripe_max,
            pack_bytes=pack_bytes,
            pack_count=min(capacity_bytes // pack_bytes, PACK_COUNT_MAX),
            checksum_page_blocks=page_blocks_default(model.block_bytes),
        )

    @property
    def model(self) -> ModelGeometry:
        return ModelGeometry(self.layer_count, self.token_bytes, self.block_tokens)

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def page_bytes(self) -> int:
        return self.checksum_page_blocks * self.block_bytes

    @property
    def page_tokens(self) -> int:
        return self.checksum_page_blocks * self.block_tokens

    @property
    def unit_bytes(self) -> int:
        """The smallest extent, and the unit of the allocator."""
        return self.layer_count * self.stripe_bytes_min

    @property
    def order_max(self) -> int:
        """How often the smallest extent doubles to become a whole pack."""
        return (self.stripe_bytes_max // self.stripe_bytes_min).bit_length() - 1

    @property
    def usable_bytes(self) -> int:
        return self.pack_count * self.pack_bytes

    @property
    def write_align_bytes(self) -> int:
        """A native write inside a save ends at a multiple of this, counted from its stripe."""
        return write_unit_bytes(self.block_bytes)

    def widths(self) -> tuple[int, ...]:
        """Return the allowed stripe widths in bytes, ascending."""
        return tuple(self.stripe_bytes_min << order for order in range(self.order_max + 1))

    def extent_bytes(self, width: int) -> int:
        return self.layer_count * width

    def pack_offset(self, pack_index: int) -> int:
        """Return the file offset of a pack."""
        return DATA_OFFSET + pack_index * self.pack_bytes

    def address(self, extent_offset: int, width: int, layer_index: int, token_index: int) -> int:
        """Return the file offset of a token of one layer; `token_index` counts in the extent."""
        return extent_offset + layer_index * width + token_index * self.token_bytes

    def page_count(self, token_count: int) -> int:
        """Return the checksum pages of one layer of a record of `token_count` tokens."""
        return -(-token_count // self.page_tokens)

    def check(self, file_bytes: int) -> None:
        """Raise OutOfBounds unless these fields, read from disk, agree with each other."""
        if not (0 < self.layer_count <= LAYER_COUNT_MAX and self.token_bytes and self.block_tokens):
            raise _refuse("layer_count, token_bytes or block_tokens is outside its limit")
        unit = write_unit_bytes(self.block_bytes)
        stripe_min, stripe_max = self.stripe_bytes_min, self.stripe_bytes_max
        if stripe_min == 0 or stripe_min % unit or not stripe_min <= stripe_max <= STRIPE_BYTES_CAP:
            raise _refuse(f"stripes of {stripe_min} to {stripe_max} bytes do not fit the blocks")
        if stripe_max != stripe_min << self.order_max:
            raise _refuse("stripe_bytes_max is not stripe_bytes_min times a power of two")
        if self.pack_bytes != self.layer_count * stripe_max:
            raise _refuse(f"pack_bytes is {self.pack_bytes}, not layer_count x stripe_bytes_max")
        if not 0 < self.pack_count <= PACK_COUNT_MAX:
            raise _refuse(f"pack_count is {self.pack_count}, outside 1 to {PACK_COUNT_MAX}")
        if DATA_OFFSET + self.usable_bytes > file_bytes:
            raise _refuse(f"the packs end behind file_bytes {file_bytes}")
        unit_blocks = unit // self.block_bytes
        if (
            self.checksum_page_blocks == 0
            or self.checksum_page_blocks % unit_blocks
            or self.page_bytes > STRIPE_BYTES_CAP
        ):
            raise _refuse(f"checksum_page_blocks is {self.checksum_page_blocks}")
        if self.layout_id not in (LAYOUT_TOKEN_MAJOR, LAYOUT_OPAQUE_BLOCKS):
            raise _refuse(f"layout_id {self.layout_id} is unknown")
        if self.checksum_id not in (CHECKSUM_NONE, CHECKSUM_XXH3_64_PAGES):
            raise _refuse(f"checksum_id {self.checksum_id} is unknown")


def _refuse(message: str) -> OutOfBounds:
    return OutOfBounds("bad-superblock", message)
