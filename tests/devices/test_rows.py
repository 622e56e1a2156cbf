"""KV tensors as rows: the layouts that vLLM has, and by what name the others are refused."""

from __future__ import annotations

import pytest
from rangekv.engine.devices.cuda.rows import block_rows
from rangekv.format.errors import UsageError
from support.paged_kv import IN_ONE_PIECE, ORDERS_4D, ORDERS_5D, Shape, paged_kv

SHAPE = Shape()


@pytest.mark.parametrize("order", IN_ONE_PIECE)
def test_a_row_is_the_memory_of_one_block_in_place(torch, order):
    memory, layers = paged_kv(order, SHAPE, torch.bfloat16)
    for index, layer in enumerate(layers):
        rows = block_rows(f"layers.{index}", layer, SHAPE.blocks)
        assert rows.shape == (SHAPE.blocks, SHAPE.block_elements * 2)
        assert rows.data_ptr() == layer.data_ptr()
        for block in (0, 1, SHAPE.blocks - 1):
            before = memory.clone()
            rows[block] ^= 0xFF
            changed = (memory != before).sum()
            assert changed == rows.shape[1]
            rows[block] ^= 0xFF
            # Elements of one block, whatever their order, are the row's: none is left out.
            elements = layer[block].contiguous().view(torch.uint8).flatten().sort().values
            assert torch.equal(elements, rows[block].sort().values)


@pytest.mark.parametrize("order", sorted({*ORDERS_4D, *ORDERS_5D} - {*IN_ONE_PIECE}))
def test_a_block_in_pieces_is_refused_by_the_name_of_its_layer(torch, order):
    _, layers = paged_kv(order, SHAPE, torch.bfloat16)
    with pytest.raises(UsageError, match=r"'layers\.1'.*not in one piece") as caught:
        block_rows("layers.1", layers[1], SHAPE.blocks)
    assert caught.value.code == "unknown-layout"


def test_kernel_blocks_are_joined_to_the_blocks_that_ids_name(torch):
    _, layers = paged_kv("LBNHC", Shape(blocks=12), torch.float32)
    rows = block_rows("layers.0", layers[0], 3)
    assert rows.shape == (3, 4 * SHAPE.block_elements * 4)
    assert rows.stride() == (rows.shape[1], 1)


@pytest.mark.parametrize(
    ("order", "blocks", "found"),
    [("LBNHC", 10, "9 blocks"), ("LBNHC", 0, "9 blocks"), ("BLNHC", 3, "torn apart")],
)
def test_blocks_that_do_not_add_up_are_refused(torch, order, blocks, found):
    _, layers = paged_kv(order, SHAPE, torch.bfloat16)
    with pytest.raises(UsageError, match=found):
        block_rows("layers.0", layers[0], blocks)


def test_other_dimensions_overlap_and_empty_blocks_are_refused(torch):
    for tensor in (
        torch.zeros(9, 4, 32),
        torch.zeros(32).as_strided((9, 2, 2, 4), (1, 8, 4, 1)),
        torch.zeros(9, 2, 0, 4),
    ):
        with pytest.raises(UsageError, match=r"unknown-layout"):
            block_rows("layers.0", tensor, 9)
