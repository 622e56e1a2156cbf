"""Fingerprint of model weights on disk: names, sizes, safetensors headers and sampled bytes.

Reads a few MiB of a checkpoint of any size; never loads weights and never follows a network.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from typing import Any

import msgpack
from rangekv.format.errors import UsageError

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
WINDOW_BYTES = 4096
WINDOW_COUNT = 256  # per file without a safetensors header
_HEADER_BYTES_MAX = 128 << 20


def weights_fingerprint(path: str) -> str:
    """Return the SHA-256 over every weight file of `path` (a directory or one file), in hex.

    Of a safetensors file each tensor is sampled at its start, middle and end, so that a changed
    tensor changes the result wherever it lies. Raises UsageError where there is no weight file.
    """
    files = _weight_files(path)
    if not files:
        raise UsageError(
            "no-weights",
            f"no weight file ({', '.join(WEIGHT_SUFFIXES)}) is there; without one KV cannot be "
            "tied to its model",
            path=path,
        )
    digest = hashlib.sha256()
    for name in files:
        with open(name, "rb") as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            header, offsets = _plan(descriptor, size)
            _add(digest, os.path.basename(name).encode(), struct.pack("<Q", size), header)
            for offset in offsets:
                _add(digest, os.pread(descriptor, WINDOW_BYTES, offset))
    return digest.hexdigest()


def _weight_files(path: str) -> list[str]:
    if os.path.isfile(path):
        return [path]
    found = (entry.path for entry in os.scandir(path) if entry.is_file())
    return sorted(each for each in found if each.endswith(WEIGHT_SUFFIXES))


def _plan(descriptor: int, size: int) -> tuple[bytes, list[int]]:
    """Return the header of a file (empty if it has none) and the offsets of its windows."""
    prefix = os.pread(descriptor, 8, 0)
    length = int.from_bytes(prefix, "little")
    if len(prefix) == 8 and length <= min(_HEADER_BYTES_MAX, size - 8):
        header = os.pread(descriptor, length, 8)
        spans = _tensor_spans(header, 8 + length)
        if spans:
            return header, [at for begin, end in spans for at in _windows(begin, end, 3)]
    return b"", _windows(0, size, WINDOW_COUNT)


def _tensor_spans(header: bytes, data_offset: int) -> list[tuple[int, int]]:
    """Return (begin, end) of each tensor in file order; empty when this is no such header."""
    try:
        tensors: Any = json.loads(header)
        offsets = [each["data_offsets"] for name, each in tensors.items() if name != "__metadata__"]
        return sorted((data_offset + begin, data_offset + end) for begin, end in offsets)
    except (ValueError, KeyError, TypeError, AttributeError):
        return []


def _windows(begin: int, end: int, count: int) -> list[int]:
    """Return offsets of up to `count` windows spread over [begin, end), both ends included."""
    last = max(begin, end - WINDOW_BYTES)
    return sorted({begin + (last - begin) * at // (count - 1) for at in range(count)})


def _add(digest: Any, *parts: bytes) -> None:
    """Add parts so that no two different lists of parts look the same."""
    digest.update(msgpack.packb(list(parts)))
