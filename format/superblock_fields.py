"""Owns what each field of a superblock ought to say, for one that may be damaged.

It explains and never decides: which superblock counts is for superblock.py.
"""

from __future__ import annotations

import hashlib

from rangekv.format.checksum import Octets
from rangekv.format.dissect import Structure, shown
from rangekv.format.errors import FormatError
from rangekv.format.geometry import (
    ALIGNMENT,
    CHECKSUM_NONE,
    CHECKSUM_XXH3_64_PAGES,
    DATA_OFFSET,
    LAYER_COUNT_MAX,
    LAYOUT_OPAQUE_BLOCKS,
    LAYOUT_TOKEN_MAJOR,
    PACK_COUNT_MAX,
    STRIPE_BYTES_CAP,
    SUPERBLOCK_OFFSETS,
    write_unit_bytes,
)
from rangekv.format.identity import BTIME_VALID, GENERATION_VALID, FileIdentity
from rangekv.format.layout import COUNTER_MAX
from rangekv.format.namespace import NAMESPACE_BYTES_MAX, Namespace
from rangekv.format.superblock import (
    GEOMETRY_FIELDS,
    RANKS_MAX,
    SUPERBLOCK,
    SUPERBLOCK_BYTES,
    VERSION_MAJOR,
    Superblock,
)

# What two copies of one store may differ in.
_OF_ONE_COPY = {"copy_index", "sequence", "epoch", "xxh3_128"}


def superblock_fields(
    page: Octets, copy_index: int, file: FileIdentity, other: Superblock | None
) -> Structure:
    """Return the copy at SUPERBLOCK_OFFSETS[copy_index] field by field.

    `file` is the pack file as it is now. `other` is the other copy where that one is valid: it
    says what a field was when the checksum of this one does not hold.
    """
    found = Structure(SUPERBLOCK, page, SUPERBLOCK_OFFSETS[copy_index])
    if not found.sealed and other is not None:
        _compare(found, other)
    found.expect("version_major", VERSION_MAJOR)
    found.expect("superblock_bytes", SUPERBLOCK_BYTES)
    found.expect("copy_index", copy_index)
    found.expect("feature_incompat", 0, "no other bit is known")
    found.expect("data_offset", DATA_OFFSET)
    found.expect("alignment", ALIGNMENT)
    for name in ("sequence", "epoch"):
        found.require(name, found.integer(name) <= COUNTER_MAX, f"at most {COUNTER_MAX}")
    world_size = found.integer("world_size")
    found.require("world_size", 0 < world_size <= RANKS_MAX, f"1 to {RANKS_MAX}")
    found.require("rank", found.integer("rank") < world_size, f"below world_size {world_size}")
    identity_fields(found, file)
    blank = found.integer("namespace_bytes") == 0 and not any(
        found.integer(name) for name in GEOMETRY_FIELDS
    )
    if blank:
        found.expect("namespace_sha256", bytes(32), "the store is blank")
    else:
        _geometry_fields(found)
        _namespace_fields(found)
    return found


def identity_fields(found: Structure, file: FileIdentity) -> None:
    """Mark what shows that the pack file is not the one which a structure describes."""
    why = "this pack file"
    found.expect("file_bytes", file.file_bytes, why)
    found.expect("inode", file.inode, why)
    common = found.integer("identity_flags") & file.identity_flags
    if common & BTIME_VALID:
        found.expect("btime_sec", file.btime_sec, why)
        found.expect("btime_nsec", file.btime_nsec, why)
    if common & GENERATION_VALID:
        found.expect("inode_generation", file.inode_generation, why)
    if not common & (BTIME_VALID | GENERATION_VALID):
        found.fault("identity_flags", f"{file.identity_flags} ({why}): one bit at least in common")


def _compare(found: Structure, other: Superblock) -> None:
    """Take the other copy as the word for every field in which two copies agree."""
    copy_index = SUPERBLOCK_OFFSETS.index(found.offset)
    page = Structure(SUPERBLOCK, other.encode(1 - copy_index), 0)
    for name, value in page.found.items():
        if name not in _OF_ONE_COPY:
            found.mend(name, value, f"superblock {'BA'[copy_index]}")


def _geometry_fields(found: Structure) -> None:
    get = found.integer
    layer_count, token_bytes, block_tokens = map(
        get, ("layer_count", "token_bytes", "block_tokens")
    )
    found.require("layer_count", 0 < layer_count <= LAYER_COUNT_MAX, f"1 to {LAYER_COUNT_MAX}")
    found.require("token_bytes", token_bytes > 0, "at least 1")
    found.require("block_tokens", block_tokens > 0, "at least 1")
    known = (LAYOUT_TOKEN_MAJOR, LAYOUT_OPAQUE_BLOCKS)
    found.require("layout_id", get("layout_id") in known, "1 or 2")
    known = (CHECKSUM_NONE, CHECKSUM_XXH3_64_PAGES)
    found.require("checksum_id", get("checksum_id") in known, "0 or 1")
    stripe_min, stripe_max, pack_bytes = map(
        get, ("stripe_bytes_min", "stripe_bytes_max", "pack_bytes")
    )
    block_bytes = token_bytes * block_tokens
    if block_bytes:
        unit = write_unit_bytes(block_bytes)
        whole = 0 < stripe_min <= STRIPE_BYTES_CAP and stripe_min % unit == 0
        found.require("stripe_bytes_min", whole, f"a multiple of {unit} up to {STRIPE_BYTES_CAP}")
        unit_blocks = unit // block_bytes
        pages = get("checksum_page_blocks")
        highest = STRIPE_BYTES_CAP // block_bytes
        found.require(
            "checksum_page_blocks",
            0 < pages <= highest and pages % unit_blocks == 0,
            f"a multiple of {unit_blocks} up to {highest}",
        )
    doubled = stripe_min > 0 and stripe_max % stripe_min == 0
    power = stripe_max // stripe_min if doubled else 0
    found.require(
        "stripe_bytes_max",
        0 < stripe_max <= STRIPE_BYTES_CAP and power > 0 and power & (power - 1) == 0,
        f"stripe_bytes_min times a power of two, up to {STRIPE_BYTES_CAP}",
    )
    found.expect("pack_bytes", layer_count * stripe_max, "layer_count x stripe_bytes_max")
    if pack_bytes:
        room = (get("file_bytes") - DATA_OFFSET) // pack_bytes
        highest = max(0, min(room, PACK_COUNT_MAX))
        found.require("pack_count", 0 < get("pack_count") <= highest, f"1 to {highest}")


def _namespace_fields(found: Structure) -> None:
    length, area = found.integer("namespace_bytes"), found.octets("namespace")
    used = len(area.rstrip(b"\0"))
    if not used <= length <= NAMESPACE_BYTES_MAX:
        found.fault("namespace_bytes", f"{used} to {NAMESPACE_BYTES_MAX}")
    text = area[: min(length, NAMESPACE_BYTES_MAX)]
    try:
        Namespace.decode(text)
    except FormatError as error:
        found.fault("namespace", f"a canonical msgpack map: {error.message}")
    digest = hashlib.sha256(text).digest()
    if found.octets("namespace_sha256") != digest:
        found.fault("namespace_sha256", f"{shown(digest)} (of the namespace)")
