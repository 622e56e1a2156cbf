"""The objects that a per-object store makes of a prefix: what each is called, what it holds.

Owns their names, chained hashes of token ids; never stores, reads or finds anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One object of a prefix: its name, the layers it holds, and the ordinal of its piece."""

    name: str
    layers: range
    piece: int


def objects_of(
    tokens: Sequence[Tokens], layer_count: int, *, layerwise: bool
) -> Iterator[StoredObject]:
    """Name the objects of a prefix in the order in which a consumer needs them: one hash each."""
    digest = b""
    prefixes = []
    for piece in tokens:
        digest = xxhash.xxh3_128_digest(digest + piece.tobytes())
        prefixes.append(digest)
    if not layerwise:
        for ordinal, prefix in enumerate(prefixes):
            yield StoredObject(prefix.hex(), range(layer_count), ordinal)
        return
    for layer_index in range(layer_count):
        suffix = layer_index.to_bytes(4, "little")
        for ordinal, prefix in enumerate(prefixes):
            name = xxhash.xxh3_128_hexdigest(prefix + suffix)
            yield StoredObject(name, range(layer_index, layer_index + 1), ordinal)
