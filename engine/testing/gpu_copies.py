"""Measures what copies and hashes on a GPU cost, as ratios to a plain copy of the same bytes there.

`python -m rangekv.engine.testing.gpu_copies`; it needs a GPU, touches no file, and asserts nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from rangekv.engine.devices.cuda.device import CudaDevice
from rangekv.engine.devices.cuda.runtime import TorchRuntime
from rangekv.engine.devices.device import Strip
from rangekv.format.errors import RangeError

BANK_BYTES = 32 << 20
LAYERS = 4
REPEAT = 31
PAGE_BYTES = 1 << 20


def measure(block_bytes: int, runtime: Any = None, repeat: int = REPEAT) -> dict[str, float]:
    """Return GB/s of a device copy, scatter, gather and hash of one bank, taken in turns.

    The bank holds blocks of LAYERS layers; the paged KV is four times as large, its blocks in no
    order. Times are the host's, from the call to the proof that it has ended: what an engine waits.
    """
    runtime = runtime or TorchRuntime()
    blocks = BANK_BYTES // LAYERS // block_bytes
    device = CudaDevice(LAYERS, block_bytes, runtime)
    device.attach([_rows(runtime, 4 * blocks, block_bytes) for _ in range(LAYERS)])
    bank, other = (runtime.empty(BANK_BYTES) for _ in range(2))
    random = np.random.default_rng(0)
    ids = np.concatenate([random.permutation(4 * blocks)[:blocks] for _ in range(LAYERS)])
    ids = ids.astype(np.int64)
    strips = [Strip(n, n * blocks * block_bytes, n * blocks, blocks) for n in range(LAYERS)]
    lane = device.lane()
    pages = [(begin, PAGE_BYTES) for begin in range(0, BANK_BYTES, PAGE_BYTES)]
    work: dict[str, tuple[int, Callable[[], Any]]] = {
        "copy": (BANK_BYTES, lambda: device.put(lane, other, bank)),
        "scatter": (BANK_BYTES, lambda: device.scatter(lane, bank, strips, ids).wait()),
        "gather": (BANK_BYTES, lambda: device.gather(lane, bank, strips, ids).wait()),
        "hash": (BANK_BYTES, lambda: device.digests(lane, bank, pages)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for number in range(repeat + 1):
        for name, (_, run) in work.items():
            took = _timed(run)
            if number:  # the first compiles kernels
                seconds[name].append(took)
    return {name: size / median(seconds[name]) / 1e9 for name, (size, _) in work.items()}


def _timed(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()  # all of them return when the device has ended
    return time.perf_counter() - begin


def _rows(runtime: Any, count: int, block_bytes: int) -> Any:
    return runtime.empty(count * block_bytes).reshape(count, block_bytes)


def main() -> int:
    """Print one JSON object a block size: GB/s, and what each is of the plain copy."""
    try:
        for block_bytes in (16 << 10, 64 << 10, 128 << 10):
            rates = measure(block_bytes)
            ratios = {f"{name}_ratio": rates[name] / rates["copy"] for name in rates}
            rounded = {name: round(value, 3) for name, value in (rates | ratios).items()}
            print(json.dumps({"block_bytes": block_bytes, **rounded}))
    except RangeError as error:
        print(error.line(), file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
