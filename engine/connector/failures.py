"""What a failed load leaves in vLLM's own books, and how it is taken out of them.

Changes vLLM's prefix cache and what it counts as computed; touches neither KV nor tickets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class BlockTable(Protocol):
    """What it needs of vLLM's KV cache manager."""

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]: ...

    def evict_blocks(self, block_ids: set[int]) -> None: ...


def forget_failed(
    failed: set[int], requests: Iterable[Any], table: BlockTable, block_tokens: int
) -> None:
    """Make vLLM forget blocks whose load failed and all that was computed behind them.

    vLLM keeps them hashed while it recomputes, so an abort in between would leave wrong KV in its
    prefix cache. A request that shares a failed block with another is set back as well: vLLM leaves
    the recomputation to the other one, which may be aborted before it is done.
    """
    evicted = set(failed)
    for request in requests:
        block_ids = next(iter(table.get_block_ids(request.request_id)), [])
        first = next((at for at, each in enumerate(block_ids) if each in failed), None)
        if first is None:
            continue
        evicted.update(block_ids[first:])
        request.num_computed_tokens = min(request.num_computed_tokens, first * block_tokens)
    table.evict_blocks(evicted)
