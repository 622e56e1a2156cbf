"""Kernels compiled for this GPU: every byte and every hash equal to the host's."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import xxhash

LAYERS, BLOCKS = 3, 40


def rows(block_bytes: int, stride: int) -> list[Any]:
    import torch

    memory = torch.randint(0, 256, (LAYERS, BLOCKS, stride), dtype=torch.uint8, device="cuda")
    return [memory[layer, :, :block_bytes] for layer in range(LAYERS)]


@pytest.mark.parametrize("kind", ["TritonCopies", "TorchCopies"])
@pytest.mark.parametrize(
    ("block_bytes", "stride"),
    [(65536, 65536), (384, 512), (1000, 1000), (1004, 1004), (1001, 1001)],
)
def test_blocks_arrive_whole(kind: str, block_bytes: int, stride: int) -> None:
    import torch
    from rangekv.engine.devices.cuda import copies
    from rangekv.engine.devices.device import Strip

    layers = rows(block_bytes, stride)
    moved = getattr(copies, kind)(layers)
    ids = torch.cat([torch.randperm(BLOCKS)[:20] for _ in range(LAYERS)]).cuda()
    strips = [Strip(n, n * 20 * block_bytes, n * 20, 20) for n in range(LAYERS)]
    bank = torch.zeros(LAYERS * 20 * block_bytes, dtype=torch.uint8, device="cuda")
    moved.gather(strips, ids, bank)
    torch.cuda.synchronize()
    for strip in strips:
        chosen = ids[strip.block_begin : strip.block_begin + 20]
        got = bank[strip.bank_offset : strip.bank_offset + 20 * block_bytes].view(20, -1)
        assert torch.equal(got, layers[strip.layer_index][chosen])
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer.fill_(0xDB)
    moved.scatter(bank, strips, ids)
    torch.cuda.synchronize()
    for strip in strips:
        chosen = ids[strip.block_begin : strip.block_begin + 20]
        layer = layers[strip.layer_index]
        assert torch.equal(layer[chosen], before[strip.layer_index][chosen])
        others = torch.ones(BLOCKS, dtype=torch.bool)
        others[chosen.cpu()] = False
        assert (layer[others.cuda()] == 0xDB).all(), "a block was written that was not named"


@pytest.mark.parametrize("kind", ["TritonHashes", "TorchHashes"])
def test_hashes_are_those_of_the_host(kind: str) -> None:
    import torch
    from rangekv.engine.devices.cuda import hashes

    sizes = [1, 16, 17, 128, 129, 240, 241, 1023, 1024, 1025, 65536, 1 << 20, (1 << 20) + 384]
    begins = [0]
    for size in sizes[:-1]:
        begins.append(-(-(begins[-1] + size) // 64) * 64)
    bank = torch.randint(0, 256, (begins[-1] + sizes[-1],), dtype=torch.uint8, device="cuda")
    made = hashes.TritonHashes("cuda") if kind == "TritonHashes" else hashes.TorchHashes()
    found = made.in_bank(bank, begins, sizes).cpu().numpy().view(np.uint64)
    host = bank.cpu().numpy()
    expected = [
        xxhash.xxh3_64_intdigest(host[begin : begin + size].data)
        for begin, size in zip(begins, sizes, strict=True)
    ]
    assert found.tolist() == expected


def test_threads_may_launch_a_kernel_for_the_first_time_at_once() -> None:
    """Reads end in any order: several workers hash the first spans of a restore together."""
    import torch
    from rangekv.engine.devices.cuda.hashes import TritonHashes

    size = 4096 + 8 * 97  # a shape that no other test compiles for
    banks = [torch.randint(0, 256, (4 * size,), dtype=torch.uint8, device="cuda") for _ in range(9)]
    made, gate = TritonHashes("cuda"), threading.Barrier(len(banks))

    def hashed(bank: Any) -> list[int]:
        gate.wait(60)
        with torch.cuda.stream(torch.cuda.Stream()):
            found = made.in_bank(bank, [n * size for n in range(4)], [size] * 4).cpu()
        return list(found.numpy().view(np.uint64).tolist())

    torch.cuda.synchronize()
    with ThreadPoolExecutor(len(banks)) as threads:
        found = list(threads.map(hashed, banks))
    for bank, digests in zip(banks, found, strict=True):
        host = bank.cpu().numpy()
        pages = [host[n * size : (n + 1) * size].data for n in range(4)]
        assert digests == [xxhash.xxh3_64_intdigest(page) for page in pages]
