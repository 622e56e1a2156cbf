"""Range's figures on their way through vLLM to its Prometheus endpoint and its log.

Carries and shows numbers; where they come from is the meter's business.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from rangekv.engine.connector.meter import Figures
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

PREFIX = "vllm:range_"
SCHEDULER = "scheduler"  # stands where figures of a rank carry its number
COUNTERS = {
    "lookups": "Lookups answered",
    "lookup_tokens": "Tokens that were looked up",
    "hit_tokens": "Tokens that lookups found",
    "delivered_tokens": "Tokens restored into paged KV",
    "declined_tokens": "Tokens found and computed all the same, by reason",
    "miss": "Lookups that found nothing, by reason",
    "not_eligible": "Questions about requests that Range leaves alone, by reason",
    "background_loads": "Hits that were loaded beside the steps of other requests",
    "unanswered": "Questions that ranks did not answer in time",
    "read_bytes": "Bytes read from the store",
    "write_bytes": "Bytes written to the store",
    "restore_seconds": "Seconds from the start of restores to their end",
    "save_seconds": "Seconds that steps waited for the extraction of saves",
    "checksum_failures": "Pages whose checksum was wrong",
    "records_retired": "Records taken out of the index, for damage or for room",
    "evicted_bytes": "Bytes given up for room",
    "saves_published": "Saves that became visible",
    "saves_declined": "Saves that were not begun or failed, by reason",
    "pieces_dropped": "Pieces of saves dropped because no bank came free",
}
GAUGES = {
    "read_banks_in_use": "Read banks that hold or await bytes",
    "save_banks_in_use": "Save banks that hold or await bytes",
    "banks_in_quarantine": "Banks whose last operation is not proved done",
    "used_bytes": "Bytes of the store in use",
    "capacity_bytes": "Bytes that the store can hold",
    "saves_accepted_ratio": "Share of the last 100 prompts whose save was accepted",
}
WITH_REASON = ("declined_tokens", "miss", "not_eligible", "saves_declined")


class RangeStats(KVConnectorStats):  # type: ignore[misc]
    """`data[source]` = [counters, gauges]; source is a rank's number or `scheduler`."""

    @classmethod
    def of(cls, source: str, counters: Figures, gauges: Figures) -> RangeStats | None:
        """Return the figures of one source, or None where there is nothing to tell."""
        return cls({source: [counters, gauges]}) if counters or gauges else None

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for source, (counters, gauges) in other.data.items():
            mine, shown = self.data.setdefault(source, [{}, {}])
            for name, value in counters.items():
                mine[name] = mine.get(name, 0) + value
            shown.update(gauges)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what vLLM logs: totals over the ranks of what moved since the last line."""
        totals: dict[str, int | float] = {}
        for counters, _ in self.data.values():
            for name, value in counters.items():
                totals[name] = round(totals.get(name, 0) + value, 3)
        return totals

    def is_empty(self) -> bool:
        return not self.data


class RangePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Registers Range's metrics in the API process and adds to them what steps report."""

    def __init__(
        self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, gauge = metric_types[Counter], metric_types[Gauge]
        self._metrics = {
            name: counter(
                name=PREFIX + name,
                documentation=text,
                labelnames=[*labelnames, "rank", *(["reason"] if name in WITH_REASON else [])],
            )
            for name, text in COUNTERS.items()
        } | {
            name: gauge(
                name=PREFIX + name,
                documentation=text,
                labelnames=[*labelnames, "rank"],
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        engine = self.per_engine_labelvalues[engine_idx]
        for source, (counters, gauges) in transfer_stats_data.items():
            for name, value in counters.items():
                kind = next((each for each in WITH_REASON if name.startswith(each + "_")), name)
                reason = [name[len(kind) + 1 :]] if kind in WITH_REASON else []
                self._metrics[kind].labels(*engine, source, *reason).inc(value)
            for name, value in gauges.items():
                self._metrics[name].labels(*engine, source).set(value)
