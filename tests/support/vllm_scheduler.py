"""What the scheduler side of the connector sees in tests: ranks, requests and steps of vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

BLOCK = 16


class FakeRank:
    """Answers every lookup with `hit` tokens under a new ticket, or the same one for one key."""

    def __init__(self, hit: int | None = 0) -> None:
        self.hit = hit
        self.asked: list[tuple[Any, ...]] = []
        self.tickets: dict[tuple[Any, ...], int] = {}

    def answer(self, kind: str, *arguments: Any) -> list[Any] | None:
        self.asked.append((kind, *arguments))
        if self.hit is None:
            return None
        if kind == "reset":
            return []
        skip, limit = arguments[4:6]
        hit = min(self.hit, limit)
        if hit <= skip:
            return [0, 0, "absent"]
        ticket = self.tickets.setdefault((*arguments[:3], limit), len(self.tickets) + 1)
        return [ticket, hit, None]


class FakeRanks:
    """A group of ranks that answer what the test says."""

    def __init__(self, *hits: int | None) -> None:
        self.each = [FakeRank(hit) for hit in hits]
        self.late: list[tuple[int, int]] = []
        self.unanswered = self.calls = 0
        self.rests = False

    def __len__(self) -> int:
        return len(self.each)

    def ask(self, kind: str, *arguments: Any, deadline_s: float) -> list[list[Any] | None]:
        return [rank.answer(kind, *arguments) for rank in self.each]

    def take_late(self) -> list[tuple[int, int]]:
        late, self.late = self.late, []
        return late

    def close(self) -> None:
        self.late = []


def a_request(request_id: str = "a", length: int = 100, **fields: Any) -> Any:
    plain: dict[str, Any] = {
        "request_id": request_id,
        "all_token_ids": list(range(length)),
        "prompt_token_ids": list(range(length)),
        "num_tokens": length,
        "num_prompt_tokens": length,
        "num_computed_tokens": 0,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
        "cache_salt": None,
        "skip_reading_prefix_cache": False,
    }
    return SimpleNamespace(**plain | fields)


def an_output(
    new: dict[str, tuple[list[int], int, int]] | None = None,
    cached: dict[str, tuple[list[int] | None, int, int]] | None = None,
    resumed: set[str] | None = None,
    finished: set[str] | None = None,
    preempted: set[str] | None = None,
) -> Any:
    """Both maps: request id -> (block ids, computed tokens, scheduled tokens)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)
            for name, (blocks, computed, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            new_block_ids=[None if each[0] is None else (each[0],) for each in cached.values()],
            num_computed_tokens=[each[1] for each in cached.values()],
            resumed_req_ids=resumed or set(),
        ),
        num_scheduled_tokens={name: each[2] for name, each in (new | cached).items()},
        finished_req_ids=finished or set(),
        preempted_req_ids=preempted or set(),
    )
