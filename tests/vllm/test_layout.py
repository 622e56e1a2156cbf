"""KV tensors as rows of bytes: every proved layout round-trips, every other one is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from rangekv.engine.connector.layout import paged_layers
from rangekv.format.errors import UsageError

if TYPE_CHECKING:
    import torch

BLOCKS, HEADS, TOKENS, CONTENT, LAYERS = 5, 3, 16, 8, 4
# Physical order of (layer, block, head, token, content), by vLLM's name of the layout.
DENSE = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
}
SCATTERED = {"LHBNC": (0, 2, 1, 3, 4), "BHLNC": (1, 2, 0, 3, 4)}


def tensors_of(order: tuple[int, ...], kernel_ratio: int = 1) -> dict[str, torch.Tensor]:
    """Return one [block, head, token, content] view per layer of one allocation in `order`."""
    import torch

    shape = (LAYERS, BLOCKS * kernel_ratio, HEADS, TOKENS // kernel_ratio, CONTENT)
    physical = torch.arange(int(np.prod(shape)), dtype=torch.float32)
    logical = physical.view([shape[axis] for axis in order]).permute(
        [order.index(axis) for axis in range(5)]
    )
    return {f"model.layers.{layer}.attn": logical[layer] for layer in range(LAYERS)}


@pytest.mark.parametrize("name", DENSE)
def test_rows_are_the_blocks_in_place(name: str) -> None:
    tensors = tensors_of(DENSE[name])
    layers = paged_layers(tensors, BLOCKS, TOKENS)
    assert layers.names == tuple(tensors)
    assert layers.block_bytes == HEADS * TOKENS * CONTENT * 4
    assert layers.kernel_block_tokens == TOKENS
    for rows, tensor in zip(layers.rows, tensors.values(), strict=True):
        assert rows.shape == (BLOCKS, layers.block_bytes)
        for block in range(BLOCKS):
            values = np.sort(tensor[block].flatten().numpy())
            assert np.array_equal(np.sort(rows[block].view(np.float32)), values)
        rows[2][:] = 0  # writable, and really vLLM's memory
        assert not tensor[2].any()
        assert tensor[1].any()


def test_geometry_is_that_of_one_token() -> None:
    layers = paged_layers(tensors_of(DENSE["LBNHC"]), BLOCKS, TOKENS)
    geometry = layers.geometry(TOKENS)
    assert geometry.layer_count == LAYERS
    assert geometry.token_bytes == HEADS * CONTENT * 4
    assert geometry.block_bytes == layers.block_bytes


def test_kernel_blocks_are_grouped_to_those_of_the_manager() -> None:
    tensors = tensors_of(DENSE["LBHNC"], kernel_ratio=4)
    layers = paged_layers(tensors, BLOCKS, TOKENS)
    assert layers.kernel_block_tokens == TOKENS // 4
    assert layers.rows[0].shape == (BLOCKS, HEADS * TOKENS * CONTENT * 4)
    first = next(iter(tensors.values()))
    assert np.array_equal(layers.rows[0][1].view(np.float32), first[4:8].flatten().numpy())


def test_layers_come_in_the_order_of_their_numbers() -> None:
    tensors = tensors_of(DENSE["LBHNC"])
    names = [f"model.layers.{number}.attn" for number in (10, 9, 2, 0)]
    shuffled = dict(zip(names, tensors.values(), strict=True))
    assert paged_layers(shuffled, BLOCKS, TOKENS).names == tuple(reversed(names))


def test_layer_that_shares_anothers_memory_is_left_out() -> None:
    tensors = tensors_of(DENSE["LBHNC"])
    tensors["model.layers.7.attn"] = tensors["model.layers.1.attn"]
    assert len(paged_layers(tensors, BLOCKS, TOKENS).names) == LAYERS


def test_five_dimensions_are_rows_too() -> None:
    import torch

    tensor = torch.arange(BLOCKS * 2 * TOKENS * HEADS * 4, dtype=torch.float16)
    layers = paged_layers({"l.0": tensor.view(BLOCKS, 2, TOKENS, HEADS, 4)}, BLOCKS, TOKENS)
    assert layers.block_bytes == 2 * TOKENS * HEADS * 4 * 2


def not_dense() -> Any:
    return tensors_of(SCATTERED["LHBNC"])


def interleaved_layers() -> Any:
    return tensors_of(SCATTERED["BHLNC"])


def kernel_blocks_apart() -> Any:
    return tensors_of(DENSE["BLHNC"], kernel_ratio=2)


def kv_first() -> Any:
    import torch

    return {"l.0": torch.zeros(2, BLOCKS, TOKENS, HEADS, CONTENT)}


def two_of_one_number() -> Any:
    tensors = tensors_of(DENSE["LBHNC"])
    tensors["model.layers.0.cross"] = tensors["model.layers.1.attn"].clone()
    return tensors


def unnumbered() -> Any:
    return {"model.attn": tensors_of(DENSE["LBHNC"])["model.layers.0.attn"]}


def of_two_sizes() -> Any:
    tensors = tensors_of(DENSE["LBHNC"])
    tensors["model.layers.4.attn"] = tensors["model.layers.0.attn"].clone().double()
    return tensors


@pytest.mark.parametrize(
    "make",
    [
        not_dense,
        interleaved_layers,
        kernel_blocks_apart,
        kv_first,
        two_of_one_number,
        unnumbered,
        of_two_sizes,
    ],
)
def test_what_is_not_proved_is_refused(make: Any) -> None:
    with pytest.raises(UsageError) as caught:
        paged_layers(make(), BLOCKS, TOKENS)
    assert caught.value.code == "unknown-layout"
