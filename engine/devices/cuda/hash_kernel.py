"""Owns the Triton kernels of xxh3_64: one hash a page, every page of a launch at once.

They never check an address: their caller has. Importing it needs triton; it has been run under
Triton's interpreter and compiled for GPUs, never run on one.

A page of more than 240 bytes takes two kernels. Between two scrambles XXH3 only adds, so what each
block of 1024 bytes adds to the 8 lanes is known without the blocks before it: `sum_blocks` finds
all of that in parallel, where the bytes are. `finish_pages` then goes through a page's sums one by
one, 64 bytes for every 1024.

Words are uint64; pages are int64[pages, 2]: where one begins, and its bytes. A page is a run of
bytes (`block_bytes` 0; it begins at a byte behind `base`) or blocks of `block_bytes`, `stride`
apart (it begins at an index of `block_ids`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl
from rangekv.engine.devices.cuda import xxh3

PRIME32_1 = tl.constexpr(xxh3.PRIME32_1)
PRIME64_1 = tl.constexpr(xxh3.PRIME64_1)
PRIME64_2 = tl.constexpr(xxh3.PRIME64_2)
PRIME64_3 = tl.constexpr(xxh3.PRIME64_3)
PRIME_MX1 = tl.constexpr(xxh3.PRIME_MX1)
PRIME_MX2 = tl.constexpr(xxh3.PRIME_MX2)
SHORT_MAX = tl.constexpr(xxh3.SHORT_MAX)
SCRAMBLE_KEY = tl.constexpr(xxh3.SCRAMBLE_KEY)
LAST_STRIPE_KEY = tl.constexpr(xxh3.LAST_STRIPE_KEY)
MERGE_KEY = tl.constexpr(xxh3.MERGE_KEY)
INITIAL_AT = tl.constexpr(xxh3.INITIAL_AT)


@triton.jit
def _address(base, block_ids, stride, begin, offset, mask, block_bytes: tl.constexpr):
    """Return where byte `offset` of a page lies."""
    if block_bytes == 0:
        return base + begin + offset
    block = tl.load(block_ids + begin + offset // block_bytes, mask=mask, other=0)
    return base + block.to(tl.int64) * stride + offset % block_bytes


@triton.jit
def _words(
    base, block_ids, stride, begin, offset, mask, block_bytes: tl.constexpr, width: tl.constexpr
):
    """Return the words from byte `offset` on, 0 where masked; loads are `width` bytes wide."""
    if width == 8:
        at = _address(base, block_ids, stride, begin, offset, mask, block_bytes)
        word = tl.load(at.to(tl.pointer_type(tl.uint64)), mask=mask, other=0)
    else:
        part = tl.arange(0, 8 // width)
        parts = tl.expand_dims(offset, -1) + part * width
        mask = tl.expand_dims(mask, -1) & (part >= 0)
        at = _address(base, block_ids, stride, begin, parts, mask, block_bytes)
        if width == 4:
            value = tl.load(at.to(tl.pointer_type(tl.uint32)), mask=mask, other=0)
        else:
            value = tl.load(at.to(tl.pointer_type(tl.uint8)), mask=mask, other=0)
        word = tl.sum(value.to(tl.uint64) << (part * 8 * width).to(tl.uint64), axis=-1)
    return word


@triton.jit
def _key(table, offset):
    """Return the words of the secret from byte `offset` on."""
    return tl.load(table + offset).to(tl.uint64, bitcast=True)


@triton.jit
def _product(keyed):
    return (keyed & 0xFFFFFFFF) * (keyed >> 32)


@triton.jit
def _fold(left, right):
    """Return low half XOR high half of the 128-bit product."""
    return (left * right) ^ tl.umulhi(left, right)


@triton.jit
def _avalanche(word):
    word = (word ^ (word >> 37)) * PRIME_MX1
    return word ^ (word >> 32)


@triton.jit
def sum_blocks(
    pages,
    base,
    block_ids,
    stride,
    table,
    sums,
    blocks_max,
    block_bytes: tl.constexpr,
    width: tl.constexpr,
    tile: tl.constexpr,
):
    """Write what `tile` XXH3 blocks of a page add to its lanes: program (page, tile).

    `sums` is int64[pages, blocks_max, 8]. The last block of a page is what the stripes behind its
    last scramble add, and the stripe that ends with the page.
    """
    page = tl.program_id(0)
    begin = tl.load(pages + page * 2)
    size = tl.load(pages + page * 2 + 1).to(tl.int32)
    last = (size - 1) // 1024
    first = tl.program_id(1) * tile
    if (size > SHORT_MAX) & (first <= last):
        lane = tl.arange(0, 8)
        stripe = tl.arange(0, 16)
        block = first + tl.arange(0, tile)
        number = block[:, None, None] * 16 + stripe[None, :, None]
        offset = number * 64 + lane[None, None, :] * 8
        there = offset < (size - 1) // 64 * 64
        data = _words(base, block_ids, stride, begin, offset, there, block_bytes, width)
        keyed = data ^ _key(table, (stripe[:, None] + lane[None, :]) * 8)[None, :, :]
        added = tl.sum(tl.where(there, _product(keyed), 0), axis=1)
        plain = tl.sum(data, axis=1)

        ends = (block == last)[:, None] & (lane >= 0)[None, :]
        offset = size - 64 + lane[None, :] * 8 + block[:, None] * 0
        data = _words(base, block_ids, stride, begin, offset, ends, block_bytes, width)
        keyed = data ^ _key(table, LAST_STRIPE_KEY + lane * 8)[None, :]
        added += tl.where(ends, _product(keyed), 0)
        plain += data

        # Each lane's own words go to its neighbour.
        even, odd = tl.split(tl.reshape(plain, (tile, 4, 2)))
        added += tl.reshape(tl.join(odd, even), (tile, 8))
        at = (page.to(tl.int64) * blocks_max + block[:, None]) * 8 + lane[None, :]
        tl.store(sums + at, added.to(tl.int64, bitcast=True), mask=(block <= last)[:, None])


@triton.jit
def finish_pages(
    pages,
    base,
    block_ids,
    stride,
    table,
    sums,
    blocks_max,
    hashes,
    block_bytes: tl.constexpr,
):
    """Write the hash of one page, int64[pages], from its sums or, if it is short, its bytes."""
    page = tl.program_id(0)
    begin = tl.load(pages + page * 2)
    size = tl.load(pages + page * 2 + 1).to(tl.int32)
    if size > SHORT_MAX:
        result = _finish_long(sums + page.to(tl.int64) * blocks_max * 8, table, size)
    elif size > 16:
        result = _hash_middle(base, block_ids, stride, begin, table, size, block_bytes)
    else:
        result = _hash_small(base, block_ids, stride, begin, table, size, block_bytes)
    tl.store(hashes + page, result.to(tl.int64, bitcast=True))


@triton.jit
def _finish_long(sums, table, size):
    lane = tl.arange(0, 8)
    last = (size - 1) // 1024
    lanes = _key(table, INITIAL_AT + lane)
    scramble = _key(table, SCRAMBLE_KEY + lane * 8)
    # Loads do not wait for the chain of scrambles: unrolled, eight of them are under way at once.
    for block in tl.range(0, last, loop_unroll_factor=8):
        lanes += tl.load(sums + block * 8 + lane).to(tl.uint64, bitcast=True)
        lanes = (lanes ^ (lanes >> 47) ^ scramble) * PRIME32_1
    lanes += tl.load(sums + last * 8 + lane).to(tl.uint64, bitcast=True)
    lanes ^= _key(table, MERGE_KEY + lane * 8)
    left, right = tl.split(tl.reshape(lanes, (4, 2)))
    return _avalanche(tl.sum(_fold(left, right), axis=0) + size.to(tl.uint64) * PRIME64_1)


@triton.jit
def _mix(base, block_ids, stride, begin, table, at, key, mask, block_bytes: tl.constexpr):
    """Return the folded products of 16 bytes each, 0 where masked."""
    low = _words(base, block_ids, stride, begin, at, mask, block_bytes, 1)
    high = _words(base, block_ids, stride, begin, at + 8, mask, block_bytes, 1)
    return tl.where(mask, _fold(low ^ _key(table, key), high ^ _key(table, key + 8)), 0)


@triton.jit
def _hash_middle(base, block_ids, stride, begin, table, size, block_bytes: tl.constexpr):
    """Hash 17 to 240 bytes."""
    start = size.to(tl.uint64) * PRIME64_1
    step = tl.arange(0, 16)
    if size <= 128:
        # Pairs from both ends inwards: even steps from the front, odd ones from the back.
        pair = step // 2
        at = tl.where(step % 2 == 0, pair * 16, size - 16 * (pair + 1))
        mask = (size > 32 * pair) & (pair < 4)
        key = tl.where(mask, step * 16, 0)
        mixed = _mix(base, block_ids, stride, begin, table, at, key, mask, block_bytes)
        result = _avalanche(start + tl.sum(mixed, axis=0))
    else:
        mask = step < size // 16
        key = tl.where(step < 8, step * 16, (step - 8) * 16 + 3)
        mixed = _mix(base, block_ids, stride, begin, table, step * 16, key, mask, block_bytes)
        head = _avalanche(start + tl.sum(tl.where(step < 8, mixed, 0), axis=0))
        ends = step == 0
        mixed = tl.where(step < 8, 0, mixed) + _mix(
            base,
            block_ids,
            stride,
            begin,
            table,
            size - 16 + step * 0,
            step * 0 + 119,
            ends,
            block_bytes,
        )
        result = _avalanche(head + tl.sum(mixed, axis=0))
    return result


@triton.jit
def _little(base, block_ids, stride, begin, first, count: tl.constexpr, block_bytes: tl.constexpr):
    """Return `count` bytes from byte `first` on as one word, little-endian."""
    each = tl.arange(0, count)
    at = _address(base, block_ids, stride, begin, first + each, each >= 0, block_bytes)
    value = tl.load(at.to(tl.pointer_type(tl.uint8))).to(tl.uint64)
    return tl.sum(value << (each * 8).to(tl.uint64), axis=0)


@triton.jit
def _hash_small(base, block_ids, stride, begin, table, size, block_bytes: tl.constexpr):
    """Hash 1 to 16 bytes."""
    long = size.to(tl.uint64)
    if size > 8:
        low = _little(base, block_ids, stride, begin, 0, 8, block_bytes)
        high = _little(base, block_ids, stride, begin, size - 8, 8, block_bytes)
        low ^= _key(table, 24) ^ _key(table, 32)
        high ^= _key(table, 40) ^ _key(table, 48)
        turned = low * 0
        for byte in tl.static_range(8):
            turned |= ((low >> (8 * byte)) & 0xFF) << (56 - 8 * byte)
        result = _avalanche(long + turned + high + _fold(low, high))
    elif size > 3:
        word = _little(base, block_ids, stride, begin, size - 4, 4, block_bytes)
        word += _little(base, block_ids, stride, begin, 0, 4, block_bytes) << 32
        word ^= _key(table, 8) ^ _key(table, 16)
        word ^= ((word << 49) | (word >> 15)) ^ ((word << 24) | (word >> 40))
        word *= PRIME_MX2
        word = (word ^ ((word >> 35) + long)) * PRIME_MX2
        result = word ^ (word >> 28)
    else:
        word = _little(base, block_ids, stride, begin, 0, 1, block_bytes) << 16
        word |= _little(base, block_ids, stride, begin, size >> 1, 1, block_bytes) << 24
        word |= _little(base, block_ids, stride, begin, size - 1, 1, block_bytes) | (long << 8)
        secret = _key(table, 0)
        word ^= (secret & 0xFFFFFFFF) ^ (secret >> 32)
        word = (word ^ (word >> 33)) * PRIME64_2
        word = (word ^ (word >> 29)) * PRIME64_3
        result = word ^ (word >> 32)
    return result
