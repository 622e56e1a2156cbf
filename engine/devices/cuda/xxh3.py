"""Owns the constants of XXH3 (64 bits, seed 0, default secret); it hashes nothing itself.

They are those of SPEC.md's checksums and of the xxHash specification; tests compare what is made of
them with the xxhash library.
"""

from __future__ import annotations

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)

PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
PRIME_MX1, PRIME_MX2 = 0x165667919E3779F9, 0x9FB21C651E98DF25

# Accumulators of an input of more than 240 bytes, one a lane.
INITIAL = (
    *(PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3),
    *(PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1),
)

SHORT_MAX = 240  # bytes up to which an input is hashed without accumulators
STRIPE_BYTES = 64  # 8 lanes of 8 bytes
BLOCK_BYTES = 1024  # of XXH3, not of KV: 16 stripes, each with the secret 8 bytes further on

# Where in the secret, in bytes, an input of more than 240 bytes takes its keys from.
SCRAMBLE_KEY, LAST_STRIPE_KEY, MERGE_KEY = 128, 121, 11


def signed(value: int) -> int:
    """Return the int64 of the same 64 bits: torch has no arithmetic on uint64."""
    return value - (1 << 64) if value >> 63 else value


def secret_word(offset: int) -> int:
    """Return the 8 bytes of the secret from byte `offset` on, as an unsigned integer."""
    return int.from_bytes(SECRET[offset : offset + 8], "little")


def table() -> list[int]:
    """Return what a kernel looks up, as int64: the secret at every byte offset, then INITIAL."""
    words = [secret_word(offset) for offset in range(len(SECRET) - 7)]
    return [signed(word) for word in (*words, *INITIAL)]


INITIAL_AT = len(SECRET) - 7  # index of INITIAL in `table`
