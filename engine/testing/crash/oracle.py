"""What the stores of an exploration were told to keep, and the proof that nothing else is visible.

Owns the expected bytes, outside the engine: KV follows from all tokens before it, as in a model.
Payload is compared byte for byte; its checksums are not looked at, they would hide a missing sync.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import xxhash
from rangekv.engine.testing.crash.image import Content
from rangekv.engine.testing.payload import Payload, as_words
from rangekv.format.geometry import ModelGeometry
from rangekv.format.records import NO_PARENT, Record
from rangekv.format.tables import Tables

TOKEN_BYTES = 4

Blocks = frozenset[bytes]
"""Digests of prompt prefixes that end with a block: which blocks somebody holds."""


class WrongKv(Exception):
    """A record is visible that is not, byte for byte, what was saved."""


class Oracle:
    """Prompts, their KV, and the comparison of what a store shows with them."""

    def __init__(self, model: ModelGeometry) -> None:
        self.model = model
        self.prompts: list[bytes] = []
        self._known: set[bytes] = set()
        self._kv: dict[tuple[bytes, int], bytes] = {}

    def prompt(self, name: str, block_count: int, *, after: bytes = b"") -> bytes:
        """Return `after` and `block_count` blocks of tokens that follow from `name`.

        From now on it counts as saved; uint32 little-endian.
        """
        chance = random.Random(name)
        count = block_count * self.model.block_tokens
        tokens = after + array("I", [chance.randrange(1, 2**17) for _ in range(count)]).tobytes()
        if tokens not in self.prompts:
            self.prompts.append(tokens)
            self._known.update(self.blocks_of(tokens))
        return tokens

    def prefix(self, tokens: bytes, block_count: int) -> bytes:
        """Return the first blocks of a prompt."""
        return tokens[: block_count * self.model.block_tokens * TOKEN_BYTES]

    def blocks_of(self, tokens: bytes) -> Blocks:
        """Return the digests of all whole blocks of a prompt."""
        size = self.model.block_tokens * TOKEN_BYTES
        return frozenset(_digest(tokens[:end]) for end in range(size, len(tokens) + 1, size))

    def kv(self, prefix: bytes, layer_index: int) -> bytes:
        """Return the bytes of the last block of `prefix` in one layer."""
        key = (_digest(prefix), layer_index)
        known = self._kv.get(key)
        if known is None:
            payload, start = self._payload(prefix)
            known = payload.blocks(layer_index, start, self.model.block_tokens).tobytes()
            self._kv[key] = known
        return known

    def check_block(self, prefix: bytes, layers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Raise WrongKv unless `layers` hold the last block of `prefix`."""
        for layer_index, block in enumerate(layers):
            found = block.tobytes()
            if found != self.kv(prefix, layer_index):
                raise WrongKv(f"a restored block: {self.explain(prefix, layer_index, found)}")

    def shown(self, tables: Tables | None) -> Blocks:
        """Return the blocks that an index shows, unproved."""
        found: Blocks = frozenset()
        for record, prompt in [] if tables is None else prompts(tables):
            found |= self.blocks_of(prompt) - self.blocks_of(
                prompt[: record.token_start * TOKEN_BYTES]
            )
        return found

    def rows(self, tables: Tables, prompt: bytes) -> set[int]:
        """Return the rows of the records that end where `prompt` ends."""
        return {row for row, (_, tokens) in enumerate(prompts(tables)) if tokens == prompt}

    def check(self, tables: Tables, pack: Content) -> None:
        """Raise WrongKv unless every visible record is, byte for byte, what was saved."""
        for record, prompt in prompts(tables):
            extent = tables.extents[record.extent]
            for at in range(0, record.token_count, self.model.block_tokens):
                end = record.token_start + at + self.model.block_tokens
                prefix = prompt[: end * TOKEN_BYTES]
                if _digest(prefix) not in self._known:
                    raise WrongKv(f"record {record.record_id} holds tokens that were never saved")
                for layer_index in range(self.model.layer_count):
                    # The address rule of SPEC.md, on purpose not the engine's own code.
                    address = (
                        extent.offset
                        + layer_index * extent.width
                        + (record.extent_token_start + at) * self.model.token_bytes
                    )
                    found = pack.read(address, self.model.block_bytes)
                    if found != self.kv(prefix, layer_index):
                        raise WrongKv(
                            f"record {record.record_id}, token {end - self.model.block_tokens}, "
                            f"byte {address}: {self.explain(prefix, layer_index, found)}"
                        )

    def explain(self, prefix: bytes, layer_index: int, found: bytes) -> str:
        """Say in one line what stands where the last block of `prefix` should stand."""
        payload, start = self._payload(prefix)
        rows = np.frombuffer(found.ljust(self.model.block_bytes, b"\0"), dtype=np.uint8)
        mismatch = payload.check(layer_index, start, as_words(rows.reshape(1, -1)))
        return "the right bytes" if mismatch is None else mismatch.line()

    def _payload(self, prefix: bytes) -> tuple[Payload, int]:
        generation = xxhash.xxh3_64_intdigest(prefix) & (2**32 - 1)
        start = len(prefix) // TOKEN_BYTES - self.model.block_tokens
        return Payload(self.model, generation), start


def prompts(tables: Tables) -> Iterator[tuple[Record, bytes]]:
    """Yield each record with all tokens from the start of its prompt to its own end."""
    tokens = bytes(memoryview(tables.tokens).cast("B"))
    prompts: list[bytes] = []
    for record in tables.records:
        before = b""
        if record.parent != NO_PARENT:
            before = prompts[record.parent][: record.token_start * TOKEN_BYTES]
        first = record.token_index * TOKEN_BYTES
        prompts.append(before + tokens[first : first + record.token_count * TOKEN_BYTES])
        yield record, prompts[-1]


def _digest(prefix: bytes) -> bytes:
    return xxhash.xxh3_128_digest(prefix)
