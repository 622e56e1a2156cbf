"""xxh3_64 of pages, by kernels and by torch, equal to the xxhash library at every length."""

from __future__ import annotations

import random

import pytest
from support.compiled import compile_launches
from support.hash_checks import check_bank, check_blocks, check_refusals, launch, launches_of
from support.paged_kv import Shape

# Lengths at which XXH3 takes another way, and both neighbours of each.
TURNS = (1, 3, 4, 8, 9, 16, 17, 32, 64, 96, 128, 129, 144, 160, 192, 224, 240, 241, 256)
STRIPES = (320, 1024, 1025, 1024 + 64, 2048, 3 * 1024, 8 * 1024, 9 * 1024 + 64)
EDGES = sorted({size + d for size in (*TURNS, *STRIPES) for d in (-1, 0, 1)} - {0})


@pytest.mark.parametrize("gap", [8, 1])
def test_every_edge(check, gap):
    check(check_bank, EDGES, None, gap)


@pytest.mark.parametrize("fill", [0, 0xFF])
def test_data_of_one_value(check, fill):
    check(check_bank, EDGES[::2], fill, 3)


def test_lengths_at_random(check):
    draw = random.Random(7)
    sizes = [draw.randint(1, 240) for _ in range(30)] + [draw.randint(241, 5000) for _ in range(40)]
    check(check_bank, sizes, None, 5, seed=1)


def test_every_length_of_two_blocks_by_torch(torch):
    check_bank("torch", range(1, 2200), None, 1)


@pytest.mark.parametrize(("unit", "gap"), [(8, 8), (4, 4), (2, 2)])
def test_every_width_of_a_load(check, unit, gap):
    check(check_bank, [unit * words for words in (1, 3, 31, 61, 129, 300, 515)], None, gap)


def test_the_pages_of_a_span(check):
    check(check_bank, [262144, 262144, 98304], None, 4096)


def test_many_small_pages(check):
    check(check_bank, [1536] * 60, None, 0)


@pytest.mark.parametrize("order", ["LBNHC", "BLHNC"])
def test_pages_scattered_over_blocks(check, order):
    pages = [(0, 4), (4, 4), (8, 1), (3, 2), (0, 9)]
    for dtype, id_dtype in (("bfloat16", "int32"), ("float32", "int64")):
        check(check_blocks, order, dtype, Shape(), id_dtype, pages)


@pytest.mark.parametrize(
    ("tokens", "content"), [(1, 2), (1, 6), (1, 14), (5, 22), (7, 36), (9, 156), (3, 1366)]
)
def test_pages_scattered_over_blocks_of_any_size(check, tokens, content):
    shape = Shape(heads=1, tokens=tokens, content=content)
    pages = [(0, 1), (1, 1), (2, 3), (5, 4), (0, 9)]
    check(check_blocks, "BLNHC", "uint8", shape, "int32", pages)


def test_what_cannot_be_hashed_is_refused(check):
    check(check_refusals)


def test_any_number_of_pages_takes_two_launches(interpreted):
    assert interpreted(launches_of, [8192, 8192, 4104], 8) == [
        ("sum_blocks", (3, 1), 8),
        ("finish_pages", (3,), None),
    ]
    assert interpreted(launches_of, [262144] * 128, 4) == [
        ("sum_blocks", (128, 32), 4),
        ("finish_pages", (128,), None),
    ]
    assert interpreted(launches_of, [241], 0) == [
        ("sum_blocks", (1, 1), 1),
        ("finish_pages", (1,), None),
    ]
    assert interpreted(launches_of, [240] * 7, 0) == [("finish_pages", (7,), None)]


@pytest.mark.parametrize(
    ("capability", "begin", "sizes", "block_bytes", "id_dtype", "width"),
    [
        (80, 4096, [262144, 98304], 0, "int64", 8),
        (90, 4096, [262144, 98304], 0, "int64", 8),
        (90, 4, [4100], 0, "int64", 4),
        (90, 3, [300], 0, "int64", 1),
        (80, 1, [8192, 4096], 4096, "int32", 8),
        (90, 0, [1001], 1001, "int64", 1),
    ],
)
def test_launches_compile(compiling, capability, begin, sizes, block_bytes, id_dtype, width):
    args = (launch, begin, sizes, block_bytes, id_dtype)
    (first, sums), (last, finish) = compiling(compile_launches, capability, *args)
    assert (first, last) == ("sum_blocks", "finish_pages")
    assert f"ld.global.b{8 * width}" in sums
    assert "mul.hi.u64" in finish
