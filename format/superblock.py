"""Owns the superblock: what a pack file is, whose it is, and how often it was opened to write.

Two copies lie in the file; this module decodes one page at a time and chooses between two,
and never reads or writes a file itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from rangekv.format.checksum import Octets, xxh3_128_le
from rangekv.format.errors import FormatError, NotAStore, OutOfBounds, UnsupportedVersion
from rangekv.format.geometry import ALIGNMENT, DATA_OFFSET, SUPERBLOCK_OFFSETS, Geometry
from rangekv.format.identity import FileIdentity
from rangekv.format.layout import COUNTER_MAX, Layout
from rangekv.format.namespace import NAMESPACE_BYTES_MAX, Namespace

SUPERBLOCK_BYTES = 4096
VERSION_MAJOR = 1
VERSION_MINOR = 0
RANKS_MAX = 65_536

SUPERBLOCK = Layout(
    "bad-superblock",
    SUPERBLOCK_BYTES,
    (
        (0, 12, "magic"),
        (12, 2, "version_major"),
        (14, 2, "version_minor"),
        (16, 4, "superblock_bytes"),
        (20, 4, "copy_index"),
        (24, 8, "feature_compat"),
        (32, 8, "feature_ro_compat"),
        (40, 8, "feature_incompat"),
        (48, 16, "store_uuid"),
        (64, 8, "sequence"),
        (72, 8, "epoch"),
        (80, 8, "file_bytes"),
        (88, 8, "data_offset"),
        (96, 8, "pack_bytes"),
        (104, 8, "stripe_bytes_max"),
        (112, 8, "stripe_bytes_min"),
        (120, 4, "pack_count"),
        (124, 4, "alignment"),
        (128, 4, "layer_count"),
        (132, 4, "token_bytes"),
        (136, 4, "block_tokens"),
        (140, 2, "layout_id"),
        (142, 2, "checksum_id"),
        (144, 8, "created_unix_ns"),
        (152, 8, "inode"),
        (160, 8, "btime_sec"),
        (168, 4, "btime_nsec"),
        (172, 4, "inode_generation"),
        (176, 4, "identity_flags"),
        (180, 4, "fs_magic"),
        (184, 4, "rank"),
        (188, 4, "world_size"),
        (192, 32, "namespace_sha256"),
        (224, 4, "namespace_bytes"),
        (228, 4, "checksum_page_blocks"),
        (232, 792, "reserved_0"),
        (1024, 2048, "namespace"),
        (3072, 1008, "reserved_1"),
        (4080, 16, "xxh3_128"),
    ),
    magic=b"\x89RANGEPK\r\n\x1a\n",
)

GEOMETRY_FIELDS = tuple(field.name for field in fields(Geometry))
IDENTITY_FIELDS = tuple(field.name for field in fields(FileIdentity))


@dataclass(frozen=True, slots=True)
class Superblock:
    """One decoded superblock. A blank store has neither geometry nor namespace."""

    store_uuid: bytes
    sequence: int
    epoch: int
    identity: FileIdentity
    fs_magic: int
    rank: int
    world_size: int
    created_unix_ns: int
    geometry: Geometry | None = None
    namespace: Namespace | None = None
    feature_compat: int = 0
    feature_ro_compat: int = 0
    feature_incompat: int = 0
    version_minor: int = VERSION_MINOR

    @property
    def file_bytes(self) -> int:
        return self.identity.file_bytes

    @property
    def capacity_bytes(self) -> int:
        """Bytes behind the superblocks, as asked for when the file was preallocated."""
        return self.file_bytes - DATA_OFFSET

    @property
    def blank(self) -> bool:
        return self.geometry is None

    @property
    def writable(self) -> bool:
        """False when a feature that this version does not know forbids writing."""
        return self.feature_ro_compat == 0

    def encode(self, copy_index: int) -> bytes:
        """Return the 4096 bytes of the copy that lies at SUPERBLOCK_OFFSETS[copy_index]."""
        namespace = b"" if self.namespace is None else self.namespace.encode()
        integers = dict.fromkeys(GEOMETRY_FIELDS, 0)
        if self.geometry is not None:
            integers.update((name, getattr(self.geometry, name)) for name in GEOMETRY_FIELDS)
        integers.update((name, getattr(self.identity, name)) for name in IDENTITY_FIELDS)
        integers.update(
            version_major=VERSION_MAJOR,
            version_minor=self.version_minor,
            superblock_bytes=SUPERBLOCK_BYTES,
            copy_index=copy_index,
            feature_compat=self.feature_compat,
            feature_ro_compat=self.feature_ro_compat,
            feature_incompat=self.feature_incompat,
            sequence=self.sequence,
            epoch=self.epoch,
            data_offset=DATA_OFFSET,
            alignment=ALIGNMENT,
            created_unix_ns=self.created_unix_ns,
            fs_magic=self.fs_magic,
            rank=self.rank,
            world_size=self.world_size,
            namespace_bytes=len(namespace),
        )
        return SUPERBLOCK.pack(
            integers,
            {
                "store_uuid": self.store_uuid,
                "namespace_sha256": bytes(32) if self.namespace is None else self.namespace.digest,
                "namespace": namespace,
            },
        )

    @classmethod
    def decode(cls, page: Octets, copy_index: int) -> Superblock:
        """Decode the copy at SUPERBLOCK_OFFSETS[copy_index].

        Raises FormatError `bad-superblock`, or UnsupportedVersion when a newer version wrote it.
        """
        integers, octets = SUPERBLOCK.unpack(page)
        if integers["version_major"] != VERSION_MAJOR or integers["feature_incompat"]:
            raise UnsupportedVersion(
                "unsupported-version",
                f"format {integers['version_major']}.{integers['version_minor']} with feature bits "
                f"{integers['feature_incompat']:#x}; this Range reads format {VERSION_MAJOR} "
                "without any: use the Range that wrote it",
            )
        SUPERBLOCK.require_zero_reserved(page)
        constants = {
            "superblock_bytes": SUPERBLOCK_BYTES,
            "data_offset": DATA_OFFSET,
            "alignment": ALIGNMENT,
            "copy_index": copy_index,
        }
        for name, expected in constants.items():
            if integers[name] != expected:
                raise _refuse(f"{name} is {integers[name]}, expected {expected}")
        if max(integers["sequence"], integers["epoch"]) > COUNTER_MAX:
            raise _refuse("sequence or epoch is outside its limit")
        if not integers["rank"] < integers["world_size"] <= RANKS_MAX:
            raise _refuse(f"rank {integers['rank']} of {integers['world_size']} cannot be")
        geometry, namespace = _decode_binding(integers, octets)
        return cls(
            store_uuid=octets["store_uuid"],
            sequence=integers["sequence"],
            epoch=integers["epoch"],
            identity=FileIdentity(**{name: integers[name] for name in IDENTITY_FIELDS}),
            fs_magic=integers["fs_magic"],
            rank=integers["rank"],
            world_size=integers["world_size"],
            created_unix_ns=integers["created_unix_ns"],
            geometry=geometry,
            namespace=namespace,
            feature_compat=integers["feature_compat"],
            feature_ro_compat=integers["feature_ro_compat"],
            version_minor=integers["version_minor"],
        )

    def geometry_digest(self) -> bytes:
        """Return the hash that ties a snapshot to this geometry (16 bytes)."""
        page = self.encode(0)
        return xxh3_128_le(page[80:144], page[228:232])


def _decode_binding(
    integers: dict[str, int], octets: dict[str, bytes]
) -> tuple[Geometry | None, Namespace | None]:
    """Return geometry and namespace, both or neither: a mixture is no store at all."""
    values = {name: integers[name] for name in GEOMETRY_FIELDS}
    namespace_bytes = integers["namespace_bytes"]
    if integers["file_bytes"] < DATA_OFFSET:
        raise _refuse(f"file_bytes is {integers['file_bytes']}, below {DATA_OFFSET}")
    if namespace_bytes > NAMESPACE_BYTES_MAX or any(octets["namespace"][namespace_bytes:]):
        raise _refuse("namespace_bytes does not cover the namespace")
    if namespace_bytes == 0 and not any(values.values()):
        if any(octets["namespace_sha256"]):
            raise _refuse("a blank store carries the digest of a namespace")
        return None, None
    geometry = Geometry(**values)
    geometry.check(integers["file_bytes"])
    try:
        namespace = Namespace.decode(octets["namespace"][:namespace_bytes])
    except OutOfBounds as error:
        raise _refuse(error.message) from None
    if namespace.digest != octets["namespace_sha256"]:
        raise _refuse("namespace_sha256 is not the digest of the namespace")
    return geometry, namespace


@dataclass(frozen=True, slots=True)
class Slot:
    """One of the two places of a superblock as it was found: decoded, or why it cannot be."""

    copy_index: int
    page: bytes
    superblock: Superblock | None
    problem: FormatError | None

    @classmethod
    def read(cls, page: bytes, copy_index: int) -> Slot:
        try:
            return cls(copy_index, page, Superblock.decode(page, copy_index), None)
        except FormatError as error:
            return cls(copy_index, page, None, error)

    @property
    def offset(self) -> int:
        """File offset of the slot."""
        return SUPERBLOCK_OFFSETS[self.copy_index]


def choose(slots: Sequence[Slot]) -> Superblock:
    """Return the valid superblock with the highest sequence; one bad slot is tolerated.

    Raises UnsupportedVersion when a newer version wrote either one, NotAStore when neither is
    usable.
    """
    for slot in slots:
        if isinstance(slot.problem, UnsupportedVersion):
            raise slot.problem
    valid = [slot.superblock for slot in slots if slot.superblock is not None]
    if not valid:
        problems = "; ".join(
            f"{'AB'[slot.copy_index]}: {slot.problem.message}" for slot in slots if slot.problem
        )
        raise NotAStore("not-a-store", f"neither superblock can be used ({problems})")
    return max(valid, key=lambda superblock: superblock.sequence)


def older(slots: Sequence[Slot]) -> Slot:
    """Return the slot that the next write may destroy: an invalid one, else the older one.

    Never the one that `choose` returns while the other one is valid.
    """
    return min(
        reversed(slots), key=lambda slot: slot.superblock.sequence if slot.superblock else -1
    )


def _refuse(message: str) -> OutOfBounds:
    return OutOfBounds("bad-superblock", message)
