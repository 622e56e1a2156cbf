"""Gather and scatter of whole blocks, by kernel and by torch, equal to CpuDevice byte for byte."""

from __future__ import annotations

import sys

import pytest
from rangekv.format.errors import EnvironmentFault, UsageError
from support.compiled import compile_launches
from support.copy_checks import check_layout, launch, launches_of
from support.paged_kv import IN_ONE_PIECE, Shape

SHAPE = Shape()
SIZE = SHAPE.block_elements * 2  # bytes of a block in bfloat16
ALL = [(layer, layer * 9 * SIZE, layer * 9, 9) for layer in range(3)]


@pytest.mark.parametrize("order", IN_ONE_PIECE)
def test_every_layout(check, order):
    for id_dtype in ("int32", "int64"):
        check(check_layout, order, "bfloat16", SHAPE, id_dtype, ALL)


@pytest.mark.parametrize(
    "strips",
    [
        [],
        [(1, 64, 0, 0)],
        [(2, 0, 4, 1)],
        [(0, 48, 2, 5), (1, 48 + 5 * SIZE, 9, 0), (2, 48 + 6 * SIZE, 20, 7)],
        [(1, 0, 3, 2), (1, 2 * SIZE, 5, 3)],
    ],
    ids=["nothing", "empty", "one block", "of unequal length", "twice one layer"],
)
def test_every_form_of_a_span(check, strips):
    for order in ("LBNHC", "BLHNC"):
        check(check_layout, order, "bfloat16", SHAPE, "int64", strips)


@pytest.mark.parametrize("shift", [0, 8, 4, 2, 1])
def test_every_alignment_of_the_bank(check, shift):
    check(check_layout, "BLNHC", "bfloat16", SHAPE, "int32", ALL, shift=shift)


@pytest.mark.parametrize(
    ("tokens", "content", "dtype"),
    [
        (1, 2, "uint8"),
        (3, 10, "uint8"),
        (5, 14, "bfloat16"),
        (3, 2, "float32"),
        (37, 46, "float32"),
    ],
)
def test_every_size_of_a_block(check, tokens, content, dtype):
    shape = Shape(layers=2, blocks=4, heads=1, tokens=tokens, content=content)
    size = shape.block_elements * {"uint8": 1, "bfloat16": 2, "float32": 4}[dtype]
    strips = [(0, 0, 0, 4), (1, 4 * size, 4, 3)]
    for order in ("LBNHC", "BLHNC"):
        check(check_layout, order, dtype, shape, "int64", strips)


def test_a_block_of_several_chunks(check):
    shape = Shape(layers=1, blocks=3, heads=4, tokens=33, content=160)  # 42,240 bytes: 5,280 words
    check(check_layout, "LBHNC", "bfloat16", shape, "int64", [(0, 0, 0, 3)])


def test_a_span_is_one_launch_in_the_widest_words(interpreted):
    three = [(layer, layer * 4096, layer, 1) for layer in range(3)]
    assert interpreted(launches_of, three) == [((1, 3), 16)]
    assert interpreted(launches_of, [(0, 8, 0, 2)]) == [((2, 1), 8)]
    assert interpreted(launches_of, [(0, 4, 0, 2)]) == [((2, 1), 4)]
    assert interpreted(launches_of, [(0, 0, 0, 2), (1, 8193, 2, 1)]) == [((4, 2), 1)]
    assert interpreted(launches_of, [(0, 0, 0, 0)]) == []


@pytest.mark.parametrize(
    ("strip", "named"),
    [
        ((3, 0, 0, 1), "3 layers"),
        ((-1, 0, 0, 1), "layer_index=-1"),
        ((0, -1, 0, 1), "bank_offset=-1"),
        ((0, 0, -1, 1), "block_begin=-1"),
        ((0, 0, 0, -1), "block_count=-1"),
        ((0, 0, 5, 5), "9 block ids"),
        ((0, 1, 0, 2), "bank of 128 bytes"),
    ],
)
def test_a_strip_outside_its_bounds_is_refused(torch, strip, named):
    from rangekv.engine.devices.cuda.copies import TorchCopies
    from rangekv.engine.devices.device import Strip

    copies = TorchCopies([torch.zeros((9, 64), dtype=torch.uint8)] * 3)
    bank, ids = torch.zeros(128, dtype=torch.uint8), torch.arange(9)
    for start in (
        lambda: copies.scatter(bank, [Strip(*strip)], ids),
        lambda: copies.gather([Strip(*strip)], ids, bank),
    ):
        with pytest.raises(UsageError, match=named) as caught:
            start()
        assert caught.value.code == "bad-strip"


def test_other_tensors_than_bytes_and_ids_are_refused(torch):
    from rangekv.engine.devices.cuda.copies import TorchCopies

    rows = torch.zeros((9, 64), dtype=torch.uint8)
    for layers in (
        [],
        [rows.view(torch.int64)],
        [rows.t()],
        [rows, rows[1:]],
        [rows, rows.to("meta")],
    ):
        with pytest.raises(UsageError, match="bad-layers"):
            TorchCopies(layers)
    copies = TorchCopies([rows])
    bank, ids = torch.zeros(128, dtype=torch.uint8), torch.arange(9)
    for bad in (bank.view(2, 64), bank[::2], bank.view(torch.int8)):
        with pytest.raises(UsageError, match="bad-bank"):
            copies.scatter(bad, [], ids)
    for bad in (ids[::2], ids.view(3, 3), ids.to(torch.int16)):
        with pytest.raises(UsageError, match="bad-block-id"):
            copies.scatter(bank, [], bad)
    with pytest.raises(UsageError, match="bad-device"):
        copies.gather([], ids, bank.to("meta"))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    ("shift", "load", "store"),
    [
        (0, "ld.global.v2.b64", "st.global.v2.b64"),
        (8, "ld.global.b64", "st.global.b64"),
        (4, "ld.global.b32", "st.global.b32"),
        (1, "ld.global.b8", "st.global.b8"),
    ],
)
def test_a_launch_compiles_to_words_of_its_width(compiling, capability, shift, load, store):
    id_dtype = "int32" if capability == 80 else "int64"
    launches = compiling(compile_launches, capability, launch, shift, id_dtype)
    assert [kernel for kernel, _ in launches] == ["copy_blocks", "copy_blocks"]
    for _, code in launches:
        assert load in code
        assert store in code
        assert (".v2." in code) == (shift == 0)


def test_without_triton_a_launch_says_what_to_install(torch, monkeypatch):
    from rangekv.engine.devices.cuda.copies import TritonCopies
    from rangekv.engine.devices.cuda.hashes import TritonHashes

    monkeypatch.setitem(sys.modules, "triton", None)
    for make in (
        lambda: TritonCopies([torch.zeros((9, 64), dtype=torch.uint8)]),
        lambda: TritonHashes("cpu"),
    ):
        with pytest.raises(EnvironmentFault, match="install") as caught:
            make()
        assert caught.value.code == "no-triton"
