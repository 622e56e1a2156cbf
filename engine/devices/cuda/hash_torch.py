"""Owns xxh3_64 of equally long inputs in torch's int64 arithmetic, which wraps as uint64 does.

It never splits work into pages or chooses what is hashed; it runs where there is no triton.
So far that has been on CPU tensors only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rangekv.engine.devices.cuda import xxh3
from rangekv.engine.devices.cuda.xxh3 import secret_word, signed

if TYPE_CHECKING:
    import torch

_LOW = 0xFFFFFFFF


def hash_rows(data: torch.Tensor) -> torch.Tensor:
    """Return int64[rows]: the 64 bits of xxh3_64 of each row of uint8[rows, size], size > 0."""
    size = data.shape[1]
    if size <= 3:
        return _hash_3(data)
    if size <= 8:
        return _hash_8(data)
    if size <= 16:
        return _hash_16(data)
    if size <= 128:
        return _hash_128(data)
    if size <= xxh3.SHORT_MAX:
        return _hash_240(data)
    return _hash_long(data)


def _hash_3(data: torch.Tensor) -> torch.Tensor:
    import torch

    size = data.shape[1]
    first, middle, last = (data[:, at].to(torch.int64) for at in (0, size >> 1, size - 1))
    word = first << 16 | middle << 24 | last | size << 8
    flip = secret_word(0) & _LOW ^ secret_word(0) >> 32
    word = word ^ flip
    word = (word ^ _shr(word, 33)) * signed(xxh3.PRIME64_2)
    word = (word ^ _shr(word, 29)) * signed(xxh3.PRIME64_3)
    return word ^ _shr(word, 32)


def _hash_8(data: torch.Tensor) -> torch.Tensor:
    import torch

    size = data.shape[1]
    ends = torch.cat((data[:, size - 4 :], data[:, :4]), dim=1)
    word = _words(ends)[:, 0] ^ signed(secret_word(8) ^ secret_word(16))
    word = word ^ _rotl(word, 49) ^ _rotl(word, 24)
    word = word * signed(xxh3.PRIME_MX2)
    word = (word ^ _shr(word, 35) + size) * signed(xxh3.PRIME_MX2)
    return word ^ _shr(word, 28)


def _hash_16(data: torch.Tensor) -> torch.Tensor:
    size = data.shape[1]
    flip = secret_word(24) ^ secret_word(32)
    low = _words(data[:, :8])[:, 0] ^ signed(flip)
    turned = int.from_bytes(flip.to_bytes(8, "little"), "big")
    low_turned = _words(data[:, :8].flip(1))[:, 0] ^ signed(turned)
    high = _words(data[:, size - 8 :])[:, 0] ^ signed(secret_word(40) ^ secret_word(48))
    return _avalanche(low_turned + high + _fold(low, high) + size)


def _hash_128(data: torch.Tensor) -> torch.Tensor:
    size = data.shape[1]
    total = data.new_full((len(data),), signed(size * xxh3.PRIME64_1 & (1 << 64) - 1), dtype=_i64())
    for step in range((size - 1) // 32 + 1):
        total = total + _mix(data, 16 * step, 32 * step)
        total = total + _mix(data, size - 16 * (step + 1), 32 * step + 16)
    return _avalanche(total)


def _hash_240(data: torch.Tensor) -> torch.Tensor:
    size = data.shape[1]
    total = data.new_full((len(data),), signed(size * xxh3.PRIME64_1 & (1 << 64) - 1), dtype=_i64())
    for step in range(8):
        total = total + _mix(data, 16 * step, 16 * step)
    total = _avalanche(total)
    for step in range(8, size // 16):
        total = total + _mix(data, 16 * step, 16 * (step - 8) + 3)
    return _avalanche(total + _mix(data, size - 16, 119))


def _hash_long(data: torch.Tensor) -> torch.Tensor:
    import torch

    rows, size = data.shape

    def keys(*offsets: int) -> torch.Tensor:
        return torch.tensor([signed(secret_word(at)) for at in offsets], device=data.device)

    full = (size - 1) // xxh3.BLOCK_BYTES
    stripes = (size - 1) // xxh3.STRIPE_BYTES - 16 * full
    stripe_keys = keys(*range(0, 192 - 8, 8)).unfold(0, 8, 1)[:16]  # [stripe, lane]
    scramble_keys = keys(*range(xxh3.SCRAMBLE_KEY, 192, 8))
    end = full * xxh3.BLOCK_BYTES
    words = _words(data[:, :end]).view(rows, full, 16, 8)
    sums = _contribution(words, stripe_keys).sum(dim=2)
    lanes = torch.tensor([signed(word) for word in xxh3.INITIAL], device=data.device)
    lanes = lanes.expand(rows, 8)
    for block in range(full):
        lanes = lanes + sums[:, block]
        lanes = lanes ^ _shr(lanes, 47) ^ scramble_keys
        lanes = lanes * xxh3.PRIME32_1
    words = _words(data[:, end : end + stripes * xxh3.STRIPE_BYTES]).view(rows, stripes, 8)
    lanes = lanes + _contribution(words, stripe_keys[:stripes]).sum(dim=1)
    last_keys = keys(*range(xxh3.LAST_STRIPE_KEY, xxh3.LAST_STRIPE_KEY + 64, 8))
    lanes = lanes + _contribution(_words(data[:, size - 64 :]), last_keys)
    lanes = lanes ^ keys(*range(xxh3.MERGE_KEY, xxh3.MERGE_KEY + 64, 8))
    total = _fold(lanes[:, 0::2], lanes[:, 1::2]).sum(dim=1)
    return _avalanche(total + signed(size * xxh3.PRIME64_1 & (1 << 64) - 1))


def _contribution(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return what stripes [..., lane] add to the lanes; each lane's own word goes to the other."""
    keyed = words ^ keys
    neighbours = words.unflatten(-1, (4, 2)).flip(-1).flatten(-2)
    return (keyed & _LOW) * _shr(keyed, 32) + neighbours


def _mix(data: torch.Tensor, at: int, key: int) -> torch.Tensor:
    words = _words(data[:, at : at + 16])
    low, high = words[:, 0] ^ signed(secret_word(key)), words[:, 1] ^ signed(secret_word(key + 8))
    return _fold(low, high)


def _fold(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return low half XOR high half of the 128-bit product of two unsigned words."""
    left_low, left_high = left & _LOW, _shr(left, 32)
    right_low, right_high = right & _LOW, _shr(right, 32)
    middle = left_high * right_low
    cross = _shr(left_low * right_low, 32) + (middle & _LOW) + left_low * right_high
    return left * right ^ _shr(middle, 32) + _shr(cross, 32) + left_high * right_high


def _avalanche(word: torch.Tensor) -> torch.Tensor:
    word = (word ^ _shr(word, 37)) * signed(xxh3.PRIME_MX1)
    return word ^ _shr(word, 32)


def _shr(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift right as an unsigned word."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _rotl(word: torch.Tensor, bits: int) -> torch.Tensor:
    return word << bits | _shr(word, 64 - bits)


def _words(data: torch.Tensor) -> torch.Tensor:
    """Return uint8[rows, 8n] as int64[rows, n], little-endian, wherever it starts in memory."""
    import torch

    if not data.shape[1]:
        return data.new_empty(data.shape, dtype=torch.int64)
    return data.clone(memory_format=torch.contiguous_format).view(torch.int64)


def _i64() -> torch.dtype:
    import torch

    return torch.int64
