"""Owns the Triton kernel that moves whole blocks between paged KV and a bank, one launch a span.

It never checks an address: its caller has. Importing it needs triton; it has been run under
Triton's interpreter and compiled for GPUs, never run on one.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

STRIP_FIELDS = tl.constexpr(5)  # layer address, block stride, bank address, first block id, blocks


@triton.jit
def copy_blocks(
    strips,
    block_ids,
    block_words: tl.constexpr,
    chunks: tl.constexpr,
    word_bytes: tl.constexpr,
    chunk_words: tl.constexpr,
    to_bank: tl.constexpr,
):
    """Copy one chunk of one block: program (block of the strip x chunk, strip).

    `strips` is int64[strips, STRIP_FIELDS], addresses and strides in bytes. With `word_bytes` 16
    words are pairs of 8 bytes, which the compiler moves in one instruction; `block_words` then
    counts 8 bytes each.
    """
    strip = strips + tl.program_id(1) * STRIP_FIELDS
    row = tl.program_id(0) // chunks
    if row < tl.load(strip + 4):
        block = tl.load(block_ids + tl.load(strip + 3) + row).to(tl.int64)
        block_bytes: tl.constexpr = block_words * (8 if word_bytes == 16 else word_bytes)
        in_layer = tl.load(strip) + block * tl.load(strip + 1)
        in_bank = tl.load(strip + 2) + row.to(tl.int64) * block_bytes
        if word_bytes >= 8:
            paged = in_layer.to(tl.pointer_type(tl.int64))
            banked = in_bank.to(tl.pointer_type(tl.int64))
        elif word_bytes == 4:
            paged = in_layer.to(tl.pointer_type(tl.int32))
            banked = in_bank.to(tl.pointer_type(tl.int32))
        else:
            paged = in_layer.to(tl.pointer_type(tl.int8))
            banked = in_bank.to(tl.pointer_type(tl.int8))
        # Loaded addresses carry no alignment; without it the compiler would move 8 bytes at most.
        paged = tl.multiple_of(paged, word_bytes)
        banked = tl.multiple_of(banked, word_bytes)
        words = tl.program_id(0) % chunks * chunk_words + tl.arange(0, chunk_words)
        mask = words < block_words
        if to_bank:
            tl.store(banked + words, tl.load(paged + words, mask=mask), mask=mask)
        else:
            tl.store(paged + words, tl.load(banked + words, mask=mask), mask=mask)
