"""Range's figures as vLLM carries them: joined over ranks, sent as plain data, shown by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rangekv.engine.connector import meter


def a_registry() -> tuple[Any, Any]:
    """Return Range's metrics in a Prometheus registry of their own, and that registry."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
    from rangekv.engine.connector.metrics import RangePromMetrics

    registry = CollectorRegistry()

    class OwnCounter(Counter):  # type: ignore[misc]
        def __init__(self, *names: Any, **fields: Any) -> None:
            super().__init__(*names, registry=registry, **fields)

    class OwnGauge(Gauge):  # type: ignore[misc]
        def __init__(self, *names: Any, **fields: Any) -> None:
            super().__init__(*names, registry=registry, **fields)

    types = {Counter: OwnCounter, Gauge: OwnGauge, Histogram: Histogram}
    config = SimpleNamespace(kv_transfer_config=None)
    return RangePromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]}), registry


def test_every_figure_that_a_rank_can_tell_has_a_metric() -> None:
    from rangekv.engine.connector.metrics import COUNTERS, GAUGES, WITH_REASON

    assert {*meter.COUNTED, *meter.REASONED, "restore_seconds", "save_seconds"} <= {*COUNTERS}
    assert {*meter.SHOWN, "saves_accepted_ratio"} == {*GAUGES}
    assert {*meter.REASONED, "declined_tokens", "not_eligible"} == {*WITH_REASON}


def test_dashboard_shows_every_metric_and_no_other() -> None:
    from rangekv.engine.connector.metrics import COUNTERS, GAUGES

    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    shown = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for each in shown for name in re.findall(r"vllm:range_(\w+)", each)}
    assert names == {*(f"{name}_total" for name in COUNTERS), *GAUGES}


def test_ranks_are_shown_side_by_side_and_steps_add_up() -> None:
    from rangekv.engine.connector.metrics import RangeStats
    from rangekv.engine.vllm_connector import RangeConnector

    first = RangeStats.of("0", {"lookups": 2, "miss_absent": 1}, {"used_bytes": 5})
    second = RangeStats.of("1", {"lookups": 2}, {"used_bytes": 6})
    later = RangeStats.of("0", {"lookups": 3}, {"used_bytes": 9})
    assert first is not None
    assert second is not None
    assert later is not None
    joined = RangeConnector.build_kv_connector_stats(first.aggregate(second).to_dict())
    joined = joined.aggregate(later)
    assert joined.reduce() == {"lookups": 7, "miss_absent": 1}
    metrics, registry = a_registry()
    metrics.observe(joined.to_dict(), engine_idx=1)
    metrics.observe({"scheduler": [{"not_eligible_mm_features": 4}, {}]}, engine_idx=1)

    def value(name: str, **labels: str) -> float | None:
        shown: float | None = registry.get_sample_value(
            f"vllm:range_{name}", {"engine": "1"} | labels
        )
        return shown

    assert value("lookups_total", rank="0") == 5
    assert value("lookups_total", rank="1") == 2
    assert value("miss_total", rank="0", reason="absent") == 1
    assert value("used_bytes", rank="0") == 9
    assert value("not_eligible_total", rank="scheduler", reason="mm_features") == 4
    assert not joined.is_empty()
    joined.reset()
    assert joined.is_empty()


@pytest.mark.parametrize("gauges", [{}, {"used_bytes": 1}])
def test_nothing_to_tell_is_not_sent(gauges: dict[str, float]) -> None:
    from rangekv.engine.connector.metrics import RangeStats

    assert (RangeStats.of("0", {}, gauges) is None) == (not gauges)


def test_name_is_registered_once_however_often_it_is_asked_for() -> None:
    from rangekv.engine.connector.plugin import register
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    register()
    register()
    connector = KVConnectorFactory.get_connector_class_by_name("RangeConnector")
    assert connector.__name__ == "RangeConnector"
