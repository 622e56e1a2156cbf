"""Two copies of a prompt in a store: equal up to the tolerance, or a fault that says where."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from rangekv.engine.store import create
from rangekv.format.errors import UsageError
from rangekv.format.geometry import DATA_OFFSET
from rangekv.format.namespace import Namespace
from support.kv_copies import CAPACITY_BYTES, MODEL, Change, Copy, plus, write_copies

from rangectl.serve_kv import TOLERANCES, compare, require_room
from rangectl.serve_run import Promise

PROMPT = list(range(100, 100 + 5 * 16 + 3))
PROMISE = Promise(number=7, tokens=PROMPT, promised_tokens=4 * 16, salt="fresh-7")


def two_copies(change: Change) -> list[Copy]:
    return [Copy(None, PROMPT, change), Copy("fresh-7", PROMPT)]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_largest_difference_is_found_and_judged_by_the_dtype(tmp_path: Path, dtype: str) -> None:
    small = TOLERANCES[dtype] / 2
    write_copies(tmp_path / "same", two_copies(plus(0)), dtype=dtype)
    write_copies(tmp_path / "near", two_copies(plus(small)), dtype=dtype)
    write_copies(tmp_path / "wrong", two_copies(plus(1, layer_index=0, block=4)), dtype=dtype)
    same, near, wrong = (compare(tmp_path / name, [PROMISE]) for name in ("same", "near", "wrong"))
    assert (same.largest, same.faults) == (0, [])
    assert near.faults == []
    assert near.largest == pytest.approx(small, rel=0.1)
    assert (same.promised_tokens, same.behind_tokens, same.layer_count) == (4 * 16, 16, 2)
    assert wrong.largest == 1
    assert wrong.faults == [
        "prompt 7, rank 0: restored KV differs from computed KV, most in layer 0, by 1 of its RMS; "
        f"{TOLERANCES[dtype]:g} is allowed"
    ]


def test_difference_is_measured_by_the_element_and_not_by_its_larger_neighbours(
    tmp_path: Path,
) -> None:
    def small_values(wrong: float) -> Change:
        def change(layer_index: int, values: np.ndarray) -> np.ndarray:
            values[:, 5] /= 100
            values[2, 5] += wrong / 100
            return values

        return change

    copies = [Copy(None, PROMPT, small_values(1)), Copy("fresh-7", PROMPT, small_values(0))]
    write_copies(tmp_path, copies)
    assert compare(tmp_path, [PROMISE]).largest == pytest.approx(1)


def test_what_is_not_a_number_is_infinitely_different(tmp_path: Path) -> None:
    write_copies(tmp_path, two_copies(plus(float("nan"))))
    result = compare(tmp_path, [PROMISE])
    assert result.largest == float("inf")
    assert len(result.faults) == 1


def test_every_rank_is_compared(tmp_path: Path) -> None:
    write_copies(tmp_path, two_copies(plus(0)), rank=0, world_size=2)
    write_copies(tmp_path, two_copies(plus(1)), rank=1, world_size=2)
    result = compare(tmp_path, [PROMISE])
    assert (result.promised_tokens, result.layer_count) == (4 * 16, 4)
    assert [fault.split(":")[0] for fault in result.faults] == ["prompt 7, rank 1"]


def test_position_counts_when_every_rank_has_it(tmp_path: Path) -> None:
    write_copies(tmp_path, two_copies(plus(0)), rank=0, world_size=2)
    write_copies(tmp_path, [Copy(None, PROMPT[:32]), two_copies(plus(0))[1]], rank=1, world_size=2)
    result = compare(tmp_path, [PROMISE])
    assert (result.promised_tokens, result.behind_tokens) == (32, 0)


@pytest.mark.parametrize(
    "copies",
    [
        [Copy(None, PROMPT), Copy("fresh-7", PROMPT[:32])],
        [Copy(None, PROMPT[:32]), Copy("fresh-7", PROMPT)],
    ],
)
def test_promised_position_that_is_not_stored_twice_is_a_fault(
    tmp_path: Path, copies: list[Copy]
) -> None:
    write_copies(tmp_path, copies)
    result = compare(tmp_path, [PROMISE])
    assert (result.promised_tokens, result.behind_tokens) == (32, 0)
    assert len(result.faults) == 1
    assert "KV of 32 of 64 promised tokens" in result.faults[0]


def test_byte_that_decayed_is_not_compared_and_a_fault(tmp_path: Path) -> None:
    path = write_copies(tmp_path, two_copies(plus(0)))
    pack = path / "range.pack"
    modified = pack.stat().st_mtime_ns
    at = pack.read_bytes().index(np.float32([1, -1]).tobytes(), DATA_OFFSET)
    with open(pack, "r+b") as file:
        file.seek(at)
        file.write(b"\x55")
    os.utime(pack, ns=(modified, modified))
    result = compare(tmp_path, [PROMISE])
    assert result.promised_tokens < PROMISE.promised_tokens
    assert "promised tokens could be compared" in result.faults[0]


def test_store_that_is_not_warm_is_not_compared(tmp_path: Path) -> None:
    path = write_copies(tmp_path, two_copies(plus(0)))
    os.utime(path / "range.pack")
    result = compare(tmp_path, [PROMISE])
    assert result.promised_tokens == 0
    assert "KV could not be compared: its store is cold" in result.faults[0]


def test_no_store_is_a_fault(tmp_path: Path) -> None:
    assert compare(tmp_path, [PROMISE]).faults == ["KV of no rank was compared"]


def test_dtype_without_a_tolerance_is_a_fault(tmp_path: Path) -> None:
    namespace = Namespace({"model": "copies", "kv_dtype": "float8_e4m3fn"})
    create(str(tmp_path / "s"), capacity_bytes=CAPACITY_BYTES, model=MODEL, namespace=namespace)
    result = compare(tmp_path, [PROMISE])
    assert "KV could not be compared: its dtype is 'float8_e4m3fn'" in result.faults[0]


def test_store_that_could_not_hold_a_run_is_refused_before_it(tmp_path: Path) -> None:
    prompts = [Copy(None, [token + 1000 * number for token in PROMPT]) for number in range(16)]
    write_copies(tmp_path / "room", prompts[:4])
    require_room(tmp_path / "room", 4)
    write_copies(tmp_path / "none", prompts)
    with pytest.raises(UsageError, match=r"16 prompts take 4194304 bytes .* give --capacity 1GiB"):
        require_room(tmp_path / "none", 16)
