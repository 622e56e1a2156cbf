"""Stripes, packs and addresses for real models, and the refusals."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from rangekv.format.errors import OutOfBounds, UsageError
from rangekv.format.geometry import DATA_OFFSET, STRIPE_BYTES_CAP, Geometry, ModelGeometry

GIB = 1024**3
MODELS = [
    ModelGeometry(layer_count=layers, token_bytes=token_bytes, block_tokens=block_tokens)
    for layers, token_bytes, block_tokens in itertools.product(
        (1, 28, 32, 36, 61, 80), (1152, 2048, 4096), (8, 16, 24)
    )
]


def test_llama_8b_at_16_gib_has_the_packs_of_the_paper():
    geometry = Geometry.derive(ModelGeometry(32, 4096, 16), 16 * GIB)
    assert (geometry.pack_count, geometry.pack_bytes) == (16, GIB)
    assert (geometry.stripe_bytes_min, geometry.stripe_bytes_max) == (65536, STRIPE_BYTES_CAP)
    assert (geometry.order_max, geometry.unit_bytes) == (9, 32 * 65536)
    assert geometry.usable_bytes == 16 * GIB


def test_the_benchmark_page_is_eight_blocks():
    geometry = Geometry.derive(ModelGeometry(32, 4096, 8), 4 * GIB)
    assert (geometry.checksum_page_blocks, geometry.page_bytes) == (8, 256 * 1024)
    assert geometry.page_count(256 * 1024 * 1024 // 4096 // 32) == 32


@pytest.mark.parametrize("model", MODELS)
def test_every_model_gets_whole_blocks_and_aligned_stripes(model):
    smallest = 4 * model.layer_count * Geometry.derive(model, 1 << 50).stripe_bytes_min
    for capacity in (smallest, smallest + 4096, 3 * smallest + 8192, GIB * 16):
        if capacity < smallest:
            continue
        geometry = Geometry.derive(model, capacity)
        geometry.check(DATA_OFFSET + capacity)
        for width in geometry.widths():
            assert width % model.block_bytes == 0
            assert width % 4096 == 0
            assert geometry.pack_bytes % geometry.extent_bytes(width) == 0
        assert geometry.widths()[-1] == geometry.stripe_bytes_max <= STRIPE_BYTES_CAP
        assert geometry.pack_count >= 4
        assert geometry.usable_bytes <= capacity
        assert geometry.page_bytes % 4096 == 0
        assert geometry.page_bytes % model.block_bytes == 0
        assert geometry.write_align_bytes % 4096 == 0
        assert geometry.page_count(0) == 0
        assert geometry.page_count(1) == geometry.page_count(geometry.page_tokens) == 1
        assert geometry.page_count(geometry.page_tokens + 1) == 2
        assert geometry.model == model


def test_addresses_are_layer_major():
    geometry = Geometry.derive(ModelGeometry(4, 4096, 16), GIB)
    width = geometry.widths()[1]
    start = geometry.pack_offset(2)
    assert start == DATA_OFFSET + 2 * geometry.pack_bytes
    assert geometry.address(start, width, 0, 0) == start
    assert geometry.address(start, width, 3, 5) == start + 3 * width + 5 * 4096


def test_too_small_names_the_smallest_capacity():
    model = ModelGeometry(32, 4096, 16)
    with pytest.raises(UsageError, match="capacity-too-small") as caught:
        Geometry.derive(model, 4096)
    smallest = 4 * 32 * 65536
    assert str(smallest) in str(caught.value)
    assert Geometry.derive(model, smallest).pack_count == 4
    with pytest.raises(UsageError):
        Geometry.derive(model, smallest - 1)


@pytest.mark.parametrize(
    ("layers", "token_bytes", "block_tokens"),
    [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1025, 1, 1), (1, 2**32, 1), (1, 4097, 65536), (-1, 1, 1)],
)
def test_impossible_models_are_refused(layers, token_bytes, block_tokens):
    with pytest.raises(UsageError):
        ModelGeometry(layers, token_bytes, block_tokens)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_count", 0),
        ("layer_count", 3),
        ("layer_count", 1025),
        ("token_bytes", 0),
        ("token_bytes", 2**32 - 1),
        ("block_tokens", 0),
        ("block_tokens", 17),
        ("stripe_bytes_min", 0),
        ("stripe_bytes_min", 4096),
        ("stripe_bytes_min", 2**40),
        ("stripe_bytes_max", 0),
        ("stripe_bytes_max", 3 * 65536),
        ("stripe_bytes_max", 64 * 1024**2),
        ("pack_bytes", 0),
        ("pack_bytes", 2**40),
        ("pack_count", 0),
        ("pack_count", 65),
        ("pack_count", 65_537),
        ("checksum_page_blocks", 0),
        ("checksum_page_blocks", 513),
        ("layout_id", 0),
        ("layout_id", 3),
        ("checksum_id", 2),
    ],
)
def test_contradicting_fields_are_refused(field, value):
    good = Geometry.derive(ModelGeometry(4, 4096, 16), 64 * 1024**2)
    with pytest.raises(OutOfBounds):
        replace(good, **{field: value}).check(DATA_OFFSET + 64 * 1024**2)
