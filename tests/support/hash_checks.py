"""Checks of PageHashes against the xxhash library; they run wherever triton may be loaded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from rangekv.format.errors import UsageError

from support.paged_kv import Shape, paged_kv


def hashes_of(kind: str) -> Any:
    """Return the implementation that a test names, on the CPU."""
    from rangekv.engine.devices.cuda.hashes import TorchHashes, TritonHashes

    return TritonHashes("cpu") if kind == "triton" else TorchHashes()


def unsigned(hashes: Any) -> list[int]:
    """Return hashes as the host has them."""
    return hashes.numpy().view(np.uint64).tolist()


def check_bank(kind: str, sizes: Sequence[int], fill: int | None, gap: int, seed: int = 0) -> None:
    """Hash pages of all `sizes` in one call, `gap` bytes apart; `fill` None is random bytes."""
    import torch

    torch.manual_seed(seed)
    begins = [gap + sum(sizes[:i]) + gap * i for i in range(len(sizes))]
    # What lies between and behind pages must not matter: it is never all zeros.
    bank = torch.randint(1, 256, (begins[-1] + sizes[-1] + gap,), dtype=torch.uint8)
    if fill is not None:
        for begin, size in zip(begins, sizes, strict=True):
            bank[begin : begin + size] = fill
    before = bank.clone()
    # Pages are named in another order than they lie.
    order = random.Random(seed).sample(range(len(sizes)), len(sizes))
    got = hashes_of(kind).in_bank(bank, [begins[i] for i in order], [sizes[i] for i in order])
    view = bank.numpy().data
    wrong = [
        sizes[i]
        for i, found in zip(order, unsigned(got), strict=True)
        if found != xxhash.xxh3_64_intdigest(view[begins[i] : begins[i] + sizes[i]])
    ]
    assert not wrong, f"pages of these sizes got another hash than the host's: {sorted(wrong)}"
    assert torch.equal(bank, before)


def check_blocks(
    kind: str, order: str, dtype: str, shape: Shape, id_dtype: str, pages: Sequence[tuple[int, int]]
) -> None:
    """Hash `pages` (first block id, blocks) that lie scattered over paged KV."""
    import torch
    from rangekv.engine.devices.cuda.rows import block_rows

    torch.manual_seed(len(pages))
    _, tensors = paged_kv(order, shape, getattr(torch, dtype))
    rows = block_rows("layers.1", tensors[1], shape.blocks)
    size = rows.shape[1]
    ids = torch.randperm(shape.blocks).to(getattr(torch, id_dtype))
    firsts, sizes = [first for first, _ in pages], [blocks * size for _, blocks in pages]
    got = hashes_of(kind).in_blocks(rows, ids, firsts, sizes)
    expected = [
        xxhash.xxh3_64_intdigest(rows[ids[first : first + blocks].long()].numpy().tobytes())
        for first, blocks in pages
    ]
    assert unsigned(got) == expected


def check_refusals(kind: str) -> None:
    """Refuse pages that leave what they lie in, by code, and hash no page at all."""
    import torch

    hashes = hashes_of(kind)
    bank, layer = torch.zeros(256, dtype=torch.uint8), torch.zeros((4, 64), dtype=torch.uint8)
    ids = torch.arange(4)
    assert unsigned(hashes.in_bank(bank, [], [])) == []
    assert unsigned(hashes.in_blocks(layer, ids, [], [])) == []
    if kind == "triton":  # which keeps a table on its own device
        for call in (
            lambda: hashes.in_bank(bank.to("meta"), [0], [8]),
            lambda: hashes.in_blocks(layer.to("meta"), ids.to("meta"), [0], [64]),
        ):
            with pytest.raises(UsageError, match="bad-device"):
                call()
    for code, call in (
        ("bad-page", lambda: hashes.in_bank(bank, [0], [0])),
        ("bad-page", lambda: hashes.in_bank(bank, [-1], [8])),
        ("bad-page", lambda: hashes.in_bank(bank, [0, 193], [64, 64])),
        ("bad-page", lambda: hashes.in_blocks(layer, ids, [0], [65])),
        ("bad-page", lambda: hashes.in_blocks(layer, ids, [2], [192])),
        ("bad-bank", lambda: hashes.in_bank(bank[::2], [0], [8])),
        ("bad-layers", lambda: hashes.in_blocks(layer.t(), ids, [0], [64])),
        ("bad-block-id", lambda: hashes.in_blocks(layer, ids.to(torch.int16), [0], [64])),
        ("bad-device", lambda: hashes.in_blocks(layer, ids.to("meta"), [0], [64])),
    ):
        with pytest.raises(UsageError) as caught:
            call()
        assert caught.value.code == code


def launches_of(sizes: Sequence[int], begin: int) -> list[tuple[str, tuple[int, ...], Any]]:
    """Return (kernel, grid, bytes of a load) of each launch that hashes pages of `sizes`."""
    import torch

    hashes = hashes_of("triton")
    seen: list[tuple[str, tuple[int, ...], Any]] = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, width=None, **__: seen.append((self.name, grid, width))

    hashes._kernels = SimpleNamespace(
        sum_blocks=Recorder("sum_blocks"), finish_pages=Recorder("finish_pages")
    )
    hashes.in_bank(torch.zeros(1 << 20, dtype=torch.uint8), [begin] * len(sizes), sizes)
    return seen


def launch(begin: int, sizes: Sequence[int], block_bytes: int, id_dtype: str) -> None:
    """Launch the hashes of pages from `begin` on: in a bank, or with `block_bytes` over blocks."""
    import torch

    hashes = hashes_of("triton")
    begins = [begin] * len(sizes)
    if block_bytes:
        layer = torch.zeros((64, block_bytes), dtype=torch.uint8)
        ids = torch.arange(64, dtype=getattr(torch, id_dtype))
        hashes.in_blocks(layer, ids, begins, sizes)
    else:
        hashes.in_bank(torch.zeros(1 << 20, dtype=torch.uint8), begins, sizes)
