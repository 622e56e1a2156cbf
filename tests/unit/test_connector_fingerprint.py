"""Weights fingerprint: what it sees, wherever in a checkpoint it changes."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
from rangekv.engine.connector.fingerprint import WINDOW_BYTES, weights_fingerprint
from rangekv.format.errors import UsageError

TENSOR_BYTES = (40_000, 100, 1_000_000)


def write_checkpoint(path: Path) -> Path:
    """Write a file with a safetensors header and three tensors of zeros."""
    header, end = {}, 0
    for number, size in enumerate(TENSOR_BYTES):
        header[f"t{number}"] = {
            "dtype": "U8",
            "shape": [size],
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return path


def patch(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        file.write(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model-1.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_same_bytes_elsewhere_are_the_same_weights(folder: Path, tmp_path: Path) -> None:
    before = weights_fingerprint(str(folder))
    moved = tmp_path / "moved"
    moved.mkdir()
    write_checkpoint(moved / "model-1.safetensors")
    (moved / "README").write_text("another name, other small files")
    assert weights_fingerprint(str(moved)) == before


@pytest.mark.parametrize("tensor", range(len(TENSOR_BYTES)))
def test_changed_tensor_changes_it(folder: Path, tensor: int) -> None:
    before = weights_fingerprint(str(folder))
    path = folder / "model-1.safetensors"
    size = path.stat().st_size
    begin = size - sum(TENSOR_BYTES) + sum(TENSOR_BYTES[:tensor])
    patch(path, begin, os.urandom(TENSOR_BYTES[tensor]))
    assert weights_fingerprint(str(folder)) != before


def test_name_size_header_and_number_of_files_count(folder: Path) -> None:
    path = folder / "model-1.safetensors"
    seen = {weights_fingerprint(str(folder))}
    patch(path, 8 + 30, b"q")  # inside the header
    seen.add(weights_fingerprint(str(folder)))
    path.rename(folder / "model-2.safetensors")
    seen.add(weights_fingerprint(str(folder)))
    write_checkpoint(folder / "model-3.safetensors")
    seen.add(weights_fingerprint(str(folder)))
    assert len(seen) == 4


def test_file_without_a_header_is_sampled_all_over(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(bytes(64 * WINDOW_BYTES))
    seen = {weights_fingerprint(str(tmp_path))}
    for at in range(64):
        patch(path, at * WINDOW_BYTES, b"x" * WINDOW_BYTES)
        seen.add(weights_fingerprint(str(tmp_path)))
    assert len(seen) == 65


@pytest.mark.parametrize(
    "content",
    [b"", b"short", struct.pack("<Q", 2**63) + b"x", struct.pack("<Q", 2) + b"[]" + bytes(100)],
)
def test_damaged_headers_are_plain_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert len(weights_fingerprint(str(tmp_path))) == 64


def test_one_file_is_a_model_too(folder: Path) -> None:
    assert len(weights_fingerprint(str(folder / "model-1.safetensors"))) == 64


def test_no_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no weight file"):
        weights_fingerprint(str(tmp_path))
