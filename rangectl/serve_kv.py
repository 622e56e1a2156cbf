"""KV that was restored against KV of the same prompt computed anew: both lie in the store.

Owns the comparison and its tolerance; reads through the engine's own restore, writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
from rangekv.engine import Engine, EngineConfig, RequestKey
from rangekv.engine.connector.tenant import root_digest
from rangekv.engine.devices.cpu import bank_memory
from rangekv.engine.inspection import read_store
from rangekv.engine.stores import find_stores
from rangekv.format.errors import EnvironmentFault, RangeError, UsageError
from rangekv.format.geometry import Geometry

from rangectl.serve_run import Promise

TOLERANCES = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}
"""By KV dtype, in units of an element's RMS over all blocks: sums of another order stay far below,
the KV of another token is 1 and more."""

COPIES = 2.25
"""Of each prompt: the one restored, a tenant's, and the suffixes that are saved behind them."""
EXTRA_PROMPTS = 4  # those that warm a server up, and the ones that decode

_FLOOR = 1e-3  # of a layer's RMS: an element that is nearly 0 in all blocks has no scale of its own
_DEADLINE_S = 300.0

_Floats = npt.NDArray[np.float32]


@dataclass(slots=True)
class Comparison:
    """What was compared on every rank; `faults` says in one line each what is not as it must be."""

    promised_tokens: int = 0
    behind_tokens: int = 0
    """Positions behind the promised ones: computed on top of what was restored, saved, compared."""
    layer_count: int = 0
    """Of all ranks together."""
    largest: float = 0.0
    """The largest difference of two elements, in units of the element's RMS over all blocks."""
    tolerance: float = 0.0
    faults: list[str] = field(default_factory=list)


def compare(directory: Path, promises: Sequence[Promise]) -> Comparison:
    """Compare the two copies that the stores below `directory` hold of each prompt.

    The unsalted copy of the promised positions is the one that was restored; the tenant's was
    computed. The stores are closed and nobody else's; what cannot be compared is a fault.
    """
    result = Comparison()
    counts = []
    try:
        for path in find_stores(str(directory)):
            counts.append(_compare_rank(path, promises, result))
    except RangeError as error:
        result.faults.append(f"KV could not be compared: {error.line()}")
    if not counts:
        result.faults.append("KV of no rank was compared")
        return result
    result.promised_tokens = min(promised for promised, _ in counts)
    result.behind_tokens = min(behind for _, behind in counts)
    return result


def require_room(directory: Path, prompt_count: int) -> None:
    """Refuse to measure with stores that are too small for what a run adds to their prompts.

    They hold `prompt_count` prompts. Each comes again as a tenant's copy, and new ones with it: a
    store that evicts would turn promised hits into misses, which is no fault of the connector.
    Raises UsageError `capacity-too-small`; stores that cannot be read are left to `compare`.
    """
    for path in find_stores(str(directory)):
        report = read_store(path)
        if report.geometry is None or report.tables is None:
            continue
        used = sum(report.geometry.extent_bytes(extent.width) for extent in report.tables.extents)
        needed = int(used * (COPIES + EXTRA_PROMPTS / prompt_count))
        if needed > report.geometry.usable_bytes:
            ranks = report.superblock.world_size if report.superblock is not None else 1
            gibibytes = -(-needed * ranks >> 30)
            raise UsageError(
                "capacity-too-small",
                f"{prompt_count} prompts take {used} bytes a rank, what a run adds makes that "
                f"{needed}, and the store has {report.geometry.usable_bytes}; give --capacity "
                f"{gibibytes}GiB",
                path=path,
            )


def _compare_rank(path: str, promises: Sequence[Promise], result: Comparison) -> tuple[int, int]:
    """Return how many promised positions were compared on this rank, and how many behind them."""
    report = read_store(path)
    namespace, geometry, superblock = report.namespace, report.geometry, report.superblock
    if namespace is None or geometry is None or superblock is None or not report.keeps_index:
        raise EnvironmentFault("no-kv", f"its store is {report.state}, {report.detail}")
    dtype = str(namespace.fields["kv_dtype"])
    if dtype not in TOLERANCES:
        raise EnvironmentFault("no-kv", f"its dtype is {dtype!r}")
    result.layer_count += geometry.layer_count
    result.tolerance = TOLERANCES[dtype]
    config = EngineConfig(
        rank=superblock.rank,
        world_size=superblock.world_size,
        save_banks=1,
        allow_buffered=True,
        restore_deadline_s=_DEADLINE_S,
    )
    promised = behind = 0
    with Engine.open(path, namespace=namespace, geometry=geometry.model, config=config) as engine:
        copies = _Copies(engine, geometry, max((len(one.tokens) for one in promises), default=0))
        for promise in promises:
            end = copies.restore(promise)
            promised += min(end, promise.promised_tokens)
            behind += max(0, end - promise.promised_tokens)
            name = f"prompt {promise.number}, rank {superblock.rank}"
            if end < promise.promised_tokens:
                result.faults.append(
                    f"{name}: KV of {end:,} of {promise.promised_tokens:,} promised tokens could "
                    "be compared; the rest is not stored twice (a larger --capacity?)"
                )
            differences = [
                _largest_difference(*copies.layer(layer_index, end, dtype))
                for layer_index in range(geometry.layer_count)
            ]
            largest = max(differences)
            result.largest = max(result.largest, largest)
            if largest > result.tolerance:
                result.faults.append(
                    f"{name}: restored KV differs from computed KV, most in layer "
                    f"{differences.index(largest)}, by {largest:.2g} of its RMS; "
                    f"{result.tolerance:g} is allowed"
                )
    return promised, behind


class _Copies:
    """Memory for both copies of one prompt, filled by the engine as it fills a server's."""

    def __init__(self, engine: Engine, geometry: Geometry, token_count: int) -> None:
        self._engine = engine
        self._geometry = geometry
        self._blocks = max(1, token_count // geometry.block_tokens)
        rows = 2 * self._blocks
        self._layers = [
            bank_memory(rows * geometry.block_bytes).reshape(rows, geometry.block_bytes)
            for _ in range(geometry.layer_count)
        ]
        engine.attach(self._layers)

    def restore(self, promise: Promise) -> int:
        """Restore both copies and return where the shorter one ends, in tokens."""
        ends = []
        for first_block, salt in ((0, None), (self._blocks, promise.salt)):
            root = self._engine.root(root_digest(SimpleNamespace(cache_salt=salt)))
            key = RequestKey(f"{promise.number}-{salt}", "compare")
            tokens = np.asarray(promise.tokens, dtype=np.uint32)
            ticket = self._engine.lookup(key, tokens, root=root)
            ends.append(ticket.token_count)
            if not ticket.token_count:
                continue
            count = ticket.token_count // self._geometry.block_tokens
            restore = self._engine.claim(
                ticket, tokens, np.arange(first_block, first_block + count)
            )
            for layer_index in range(self._geometry.layer_count):
                restore.wait_layer(layer_index, _DEADLINE_S)
            restore.finish()
            failed = restore.failed_blocks()
            if failed:
                ends[-1] = (min(failed) - first_block) * self._geometry.block_tokens
        return min(ends)

    def layer(self, layer_index: int, token_count: int, dtype: str) -> tuple[_Floats, _Floats]:
        """Return one layer of both copies, each [blocks, elements of a block]."""
        count = token_count // self._geometry.block_tokens
        rows = self._layers[layer_index]
        fresh = rows[self._blocks : self._blocks + count]
        return _floats(rows[:count], dtype), _floats(fresh, dtype)


def _floats(rows: npt.NDArray[np.uint8], dtype: str) -> _Floats:
    if dtype == "bfloat16":  # the upper half of a float32
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return rows.view(dtype).astype(np.float32)


def _largest_difference(restored: _Floats, fresh: _Floats) -> float:
    """Return the largest difference in units of the element's RMS over all blocks.

    The same place of every block is the same head and channel, in K or in V, in any layout: K and V
    differ in size by far. What is not a number anywhere is infinitely different.
    """
    if not fresh.size:
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(fresh).mean(axis=0)
        usual = np.sqrt(np.maximum(squares, _FLOOR**2 * squares.mean()))
        usual[usual == 0] = 1  # all of the layer is 0: then a difference counts as it is
        largest = float((np.abs(restored - fresh) / usual).max())
    return largest if np.isfinite(largest) else float("inf")
