"""What every prompt's KV is, kept outside the engine: a function of all tokens before it.

Owns the expected bytes of paged KV and of the pack file; never asks the engine what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import xxhash
from rangekv.engine.testing.payload import Origin, Payload, as_words
from rangekv.format.geometry import Geometry, ModelGeometry
from rangekv.format.records import NO_PARENT, Record
from rangekv.format.tables import Tables

Tokens = npt.NDArray[np.uint32]
Rows = npt.NDArray[np.uint8]
ReadPack = Callable[[int, int], bytes]
"""(byte offset, length) of the pack file → what lies there."""

_TOKEN_BYTES = 4
_GENERATION_MASK = 2**32 - 1
_CACHED_MAX = 1024


class Oracle:
    """The bytes that belong to each token sequence.

    Like real KV, those of a block depend on every token up to its end: the generation that each 16
    bytes name is a hash of that prefix. `salt` tells models or ranks apart that see equal tokens.
    """

    def __init__(self, model: ModelGeometry, salt: int = 0) -> None:
        self.model = model
        self._salt = salt
        self._names: dict[int, str] = {}
        self._generations: dict[bytes, npt.NDArray[np.uint64]] = {}
        self._prompt_count = 0

    def rows(self, tokens: Tokens, layer_index: int, first_block: int, block_count: int) -> Rows:
        """Return whole blocks of one layer: uint8[block_count, block_bytes]."""
        size = self.model.block_tokens
        payload = self._payload(tokens, first_block, block_count)
        words = payload.blocks(layer_index, first_block * size, block_count * size)
        rows: Rows = words.view(np.uint8).reshape(block_count, self.model.block_bytes)
        return rows

    def check(self, tokens: Tokens, layer_index: int, first_block: int, rows: Rows) -> str | None:
        """Compare whole blocks with what they must be; return the first difference as one line."""
        payload = self._payload(tokens, first_block, len(rows))
        token_start = first_block * self.model.block_tokens
        wrong = payload.check(layer_index, token_start, as_words(np.ascontiguousarray(rows)))
        if wrong is None:
            return None
        return f"expected {self._name(wrong.expected)}, found {self._name(wrong.found)}"

    def note_saved(self, tokens: Tokens) -> None:
        """Note that somebody hands these tokens to a save: nothing else may ever be visible."""
        self._prompt_count += 1
        for block, generation in enumerate(self.generations(tokens).tolist()):
            self._names.setdefault(generation, f"block {block} of prompt {self._prompt_count}")

    def generations(self, tokens: Tokens) -> npt.NDArray[np.uint64]:
        """Return what stands for each whole block of a prompt: a hash of the tokens to its end."""
        data = tokens.tobytes()
        known = self._generations.get(data)
        if known is None:
            size = self.model.block_tokens * _TOKEN_BYTES
            hasher = xxhash.xxh3_64(seed=self._salt)
            found = []
            for end in range(size, len(data) + 1, size):
                hasher.update(data[end - size : end])
                found.append(hasher.intdigest() & _GENERATION_MASK)
            known = np.array(found, dtype=np.uint64)
            if len(self._generations) == _CACHED_MAX:
                self._generations.clear()
            self._generations[data] = known
        return known

    def check_tables(self, tables: Tables, geometry: Geometry, read: ReadPack) -> str | None:
        """Compare every record with the pack file, byte for byte; return the first difference."""
        for record, prompt in prefixes(tables):
            tokens = np.frombuffer(prompt, dtype=np.uint32)
            first = record.token_start // geometry.block_tokens
            if any(one not in self._names for one in self.generations(tokens)[first:].tolist()):
                return f"record {record.record_id} holds tokens that nobody saved"
            extent = tables.extents[record.extent]
            length = record.token_count * geometry.token_bytes
            for layer_index in range(geometry.layer_count):
                # The address rule of SPEC.md, on purpose not the engine's own code.
                at = extent.offset + layer_index * extent.width
                at += record.extent_token_start * geometry.token_bytes
                rows = np.frombuffer(read(at, length), dtype=np.uint8)
                if len(rows) != length:
                    return f"record {record.record_id} ends behind the pack file"
                wrong = self.check(
                    tokens, layer_index, first, rows.reshape(-1, geometry.block_bytes)
                )
                if wrong is not None:
                    return f"record {record.record_id}, byte {at}: {wrong}"
        return None

    def _payload(self, tokens: Tokens, first_block: int, block_count: int) -> Payload:
        generations = self.generations(tokens)[first_block : first_block + block_count]
        return Payload(self.model, generations)

    def _name(self, origin: Origin) -> str:
        known = self._names.get(origin.generation, f"generation {origin.generation:#x}")
        return (
            f"({known}, layer {origin.layer_index}, token {origin.token_index}, "
            f"word {origin.word_index})"
        )


def prefixes(tables: Tables) -> Iterator[tuple[Record, bytes]]:
    """Yield each record with all tokens from the start of its prompt to its own end."""
    tokens = memoryview(tables.tokens).cast("B")
    prompts: list[bytes] = []
    for record in tables.records:
        before = b""
        if record.parent != NO_PARENT:
            before = prompts[record.parent][: record.token_start * _TOKEN_BYTES]
        first = record.token_index * _TOKEN_BYTES
        prompts.append(before + bytes(tokens[first : first + record.token_count * _TOKEN_BYTES]))
        yield record, prompts[-1]
