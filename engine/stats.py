"""Owns the counters of one engine and their snapshot; it never decides anything from them.

Writers hold the engine's lock, so a snapshot is consistent in itself.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Everything an engine counts. Bytes and tokens are totals since the engine was opened.

    `reads` and `writes` count spans, `read_calls` and `write_calls` system calls; `scatters` counts
    one copy per (span, layer), `gathers` one per bank filled, `writes_held` banks whose writes
    waited for the journal. `overread_bytes` were read only to verify a page or to reach alignment.
    `payload_allocations` counts payload memory taken after
    start: 0 on every path that moves whole aligned blocks.
    """

    lookups: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0
    delivered_tokens: int = 0
    reads: int = 0
    read_bytes: int = 0
    overread_bytes: int = 0
    read_calls: int = 0
    writes: int = 0
    write_bytes: int = 0
    write_calls: int = 0
    writes_held: int = 0
    scatters: int = 0
    direct_spans: int = 0
    gathers: int = 0
    layer_events: int = 0
    leases_taken: int = 0
    leases_released: int = 0
    payload_allocations: int = 0
    records_selected: int = 0
    checksum_pages: int = 0
    checksum_failures: int = 0
    records_retired: int = 0
    evicted_bytes: int = 0
    saves: int = 0
    saves_published: int = 0
    pieces_dropped: int = 0
    prefetch_dropped_bytes: int = 0
    saves_declined: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Stats:
    """One consistent snapshot of an engine: its counters, its contents and how it was opened.

    `path` is the way that payload is known to have taken: posix-direct, posix-buffered, or through
    KvikIO cufile-compat, cufile-gds, and `unproved` while no count shows it.
    """

    counters: dict[str, int]
    records: int
    extents: int
    used_bytes: int
    capacity_bytes: int
    tokens: int
    banks_quarantined: int
    banks_in_quarantine: int
    read_banks_in_use: int
    save_banks_in_use: int
    leases_open: int
    journal_commits: int
    journal_bytes: int
    path: str
    state: str
    reason: str | None

    def as_dict(self) -> dict[str, int | str | None]:
        """Return one flat mapping with CONTRACT names, counters first."""
        contents = {
            name: getattr(self, name) for name in self.__dataclass_fields__ if name != "counters"
        }
        return {**self.counters, **contents}

    def line(self) -> str:
        """Return the key=value line that is logged at close."""
        return " ".join(f"{key}={value}" for key, value in self.as_dict().items())


def flatten(counters: Counters) -> dict[str, int]:
    """Return the counters as one mapping; reasons become `saves_declined_<reason>` and the like."""
    flat: dict[str, int] = {}
    for name in counters.__dataclass_fields__:
        value = getattr(counters, name)
        if isinstance(value, Counter):
            prefix = "miss" if name == "misses" else name
            flat.update({f"{prefix}_{reason}": count for reason, count in sorted(value.items())})
        else:
            flat[name] = value
    return flat
