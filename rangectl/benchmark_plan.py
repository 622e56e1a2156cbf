"""What a restore benchmark runs: the payload, the object sizes, the pieces they come in.

Owns arithmetic and its refusals; never touches memory or disk.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rangekv.format.errors import UsageError
from rangekv.format.geometry import PACK_COUNT_MIN, Geometry, ModelGeometry

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MIB = 1 << 20
OBJECT_SIZES = (32 * MIB, 8 * MIB, 2 * MIB, MIB)
LAYERWISE_TOKENS = 256

_Scalar = TypeVar("_Scalar", bound="np.generic")


@dataclass(frozen=True, slots=True)
class Point:
    """One object size: how the producer announces the payload and the consumer asks for it."""

    object_bytes: int
    objects: int
    layerwise: bool
    piece_blocks: int
    """blocks of one layer in one object"""

    def pieces(self, items: npt.NDArray[_Scalar], per_block: int) -> list[npt.NDArray[_Scalar]]:
        """Cut an array with `per_block` items a block into pieces of one object each."""
        step = self.piece_blocks * per_block
        return [items[start : start + step] for start in range(0, len(items), step)]


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything a run depends on; `join_pieces` False exists for tests."""

    folder: Path
    model: ModelGeometry
    payload_bytes: int
    repeat: int
    seed: int
    allow_buffered: bool = False
    compute_seconds: float = 0.0
    """A consumer computes this long on each layer; 0 leaves it out."""
    ablations: tuple[str, ...] = ()
    claim_delay_seconds: float = 0.02
    """From lookup to claim where reading ahead is compared with not doing so."""
    fio: bool = False
    concurrency: tuple[int, ...] = ()
    """Numbers of restores that run at once; empty leaves them out."""
    join_pieces: bool = True
    thread_count: int = 8
    read_workers: int = 8
    """Spans that Range's arms read at once: the fewer, the sooner the first layer is whole."""
    device: str = "cpu"
    """Where paged KV and banks lie."""
    payload_path: str = "posix"
    """Which way Range's bytes take: the engine's setting `payload`."""
    bank_count: int = 8
    """Read banks, and as many save banks, of the engine."""

    @property
    def block_count(self) -> int:
        """Blocks of one layer in the payload."""
        return self.payload_bytes // (self.model.layer_count * self.model.block_bytes)

    @property
    def token_count(self) -> int:
        return self.block_count * self.model.block_tokens

    @property
    def capacity_bytes(self) -> int:
        """Twice the payload, so that it fills half of the packs, or the smallest store there is."""
        floor = PACK_COUNT_MIN * Geometry.derive(self.model, 1 << 62).stripe_bytes_min
        return max(2 * self.payload_bytes, floor * self.model.layer_count)

    @property
    def disk_bytes(self) -> int:
        """The store and, beside it, the payload once more as the control's objects."""
        return self.capacity_bytes + self.payload_bytes

    @property
    def request_count(self) -> int:
        """Requests of the concurrency runs; together they fill half of the payload."""
        return max(self.concurrency)

    @property
    def request_blocks(self) -> int:
        """Blocks of one layer in one of them."""
        return self.block_count // (2 * self.request_count)

    @property
    def memory_bytes(self) -> int:
        """Paged KV, where the host has it, and banks of the engine and of the raw reads."""
        banks = 2 * self.bank_count + self.thread_count
        paged_kv = self.payload_bytes if self.device == "cpu" else 0
        return paged_kv + banks * 32 * MIB

    def points(self) -> list[Point]:
        """Return the object sizes this payload divides into; raises UsageError if none."""
        model = self.model
        block_all_layers = model.layer_count * model.block_bytes
        points = [
            Point(size, self.payload_bytes // size, False, size // block_all_layers)
            for size in OBJECT_SIZES
            if size % block_all_layers == 0 and self.payload_bytes % size == 0
        ]
        blocks = LAYERWISE_TOKENS // model.block_tokens
        if blocks and self.block_count % blocks == 0:
            size = blocks * model.block_bytes
            points.append(Point(size, self.payload_bytes // size, True, blocks))
        if self.payload_bytes % block_all_layers or not points:
            raise UsageError(
                "bad-payload",
                f"--payload of {self.payload_bytes} bytes is not a whole number of objects;"
                f" take a multiple of 32MiB and blocks of {block_all_layers} bytes over all layers"
                " that divide 32MiB",
            )
        if self.concurrency and self.block_count % (2 * self.request_count):
            raise UsageError(
                "bad-concurrency",
                f"{self.request_count} requests cannot share {self.block_count // 2} blocks"
                " equally; take powers of two",
            )
        return points
