"""Checks of BlockCopies against CpuDevice, byte for byte, wherever triton may be loaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rangekv.engine.devices.cpu import CpuDevice

from support.paged_kv import Shape, paged_kv


def copies_of(kind: str, rows: Sequence[Any]) -> Any:
    """Return the implementation that a test names."""
    from rangekv.engine.devices.cuda.copies import TorchCopies, TritonCopies

    return {"triton": TritonCopies, "torch": TorchCopies}[kind](rows)


def reference(rows: Sequence[Any]) -> CpuDevice:
    """Return the numpy device over the same memory."""
    device = CpuDevice(len(rows), rows[0].shape[1])
    device.attach([row.numpy() for row in rows])
    return device


def check_layout(
    kind: str,
    order: str,
    dtype: str,
    shape: Shape,
    id_dtype: str,
    strips: Sequence[tuple[int, int, int, int]],
    *,
    shift: int = 0,
    seed: int = 0,
) -> None:
    """Scatter and gather `strips` and compare all memory with what CpuDevice makes of it.

    `shift` moves the bank away from its alignment, in bytes.
    """
    import torch
    from rangekv.engine.devices.cuda.rows import block_rows
    from rangekv.engine.devices.device import Strip

    torch.manual_seed(seed)
    memory, tensors = paged_kv(order, shape, getattr(torch, dtype))
    rows = [block_rows(f"layers.{i}", t, shape.blocks) for i, t in enumerate(tensors)]
    size = rows[0].shape[1]
    places = [Strip(*strip) for strip in strips]
    bank_bytes = max((s.bank_offset + s.block_count * size for s in places), default=0) + 40
    bank = torch.randint(0, 256, (bank_bytes + 16,), dtype=torch.uint8)[shift : shift + bank_bytes]
    # One permutation for each layer: a scatter may name a block only once.
    ids = torch.cat([torch.randperm(shape.blocks) for _ in range(shape.layers)])
    ids = ids.to(getattr(torch, id_dtype))
    before = memory.clone()

    expected_bank = bank.clone().numpy()
    device = reference(rows)
    host_ids = ids.numpy().astype(np.int64)
    device.gather(device.lane(), expected_bank, places, host_ids)
    copies_of(kind, rows).gather(places, ids, bank)
    assert torch.equal(memory, before), "a gather wrote to paged KV"
    assert np.array_equal(bank.numpy(), expected_bank)

    bank.copy_(torch.randint(0, 256, bank.shape, dtype=torch.uint8))
    bank_before = bank.clone()
    device.scatter(device.lane(), bank.numpy(), places, host_ids)
    expected = memory.clone()
    memory.copy_(before)
    copies_of(kind, rows).scatter(bank, places, ids)
    assert torch.equal(memory, expected)
    assert torch.equal(bank, bank_before), "a scatter wrote to the bank"


def launches_of(strips: Sequence[tuple[int, int, int, int]]) -> list[tuple[tuple[int, ...], int]]:
    """Return (grid, word bytes) of each launch that one scatter of `strips` makes."""
    import torch
    from rangekv.engine.devices.cuda.copies import TritonCopies
    from rangekv.engine.devices.device import Strip

    rows = [torch.zeros((9, 4096), dtype=torch.uint8) for _ in range(3)]
    copies = TritonCopies(rows)
    seen: list[tuple[tuple[int, ...], int]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, word_bytes, **__: seen.append((grid, word_bytes))

    copies._kernel = Recorder()
    bank = torch.zeros(1 << 16, dtype=torch.uint8)
    copies.scatter(bank, [Strip(*strip) for strip in strips], torch.arange(9))
    return seen


def launch(shift: int, id_dtype: str) -> None:
    """Launch a scatter and a gather of blocks in a bank `shift` bytes off its alignment."""
    import torch
    from rangekv.engine.devices.cuda.copies import TritonCopies
    from rangekv.engine.devices.device import Strip

    copies = TritonCopies([torch.zeros((9, 4096 + 16), dtype=torch.uint8)] * 2)
    bank = torch.zeros(1 << 16, dtype=torch.uint8)
    ids = torch.arange(9, dtype=getattr(torch, id_dtype))
    strips = [Strip(0, shift, 0, 2), Strip(1, shift + 8224, 2, 1)]
    copies.scatter(bank, strips, ids)
    copies.gather(strips, ids, bank)
