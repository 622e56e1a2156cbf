"""`RangeConnector`: the class that vLLM loads through `kv_connector_module_path`.

Maps vLLM's callbacks to the scheduler side and to the rank; holds no policy of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rangekv.engine.connector import versions
from rangekv.engine.connector.eligibility import (
    refuse_unproved,
    refuse_unproved_cache,
    warn_of_kill,
)
from rangekv.engine.connector.endpoint import private_folder, socket_path
from rangekv.engine.connector.events import Announcements
from rangekv.engine.connector.lookup_client import RankGroup
from rangekv.engine.connector.messages import BlockRun, StepPlan, StepReport
from rangekv.engine.connector.meter import Differences
from rangekv.engine.connector.metrics import SCHEDULER, RangePromMetrics, RangeStats
from rangekv.engine.connector.rank import Rank
from rangekv.engine.connector.scheduler import SchedulerSide
from rangekv.engine.connector.settings import Settings
from rangekv.engine.connector.worker import WorkerSide
from rangekv.format.errors import InvariantError, RangeError
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

logger = logging.getLogger("vllm.rangekv")
# vLLM configures its own loggers only; the engine's few lines belong beside them.
logging.getLogger("rangekv").parent = logger


@dataclass
class RangeMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """One step's plan on its way from scheduler to workers."""

    plan: StepPlan


@dataclass
class RangeReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a rank reports of one step; vLLM joins those of all ranks."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RangeReport:
        return RangeReport(self.report.joined(other.report))


@dataclass
class RangeHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a rank answers lookups."""

    endpoint: str


class RangeConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Restores prefixes from SSD into vLLM's paged KV and saves prompts from it.

    vLLM makes one in the scheduler's process and one in each worker; every setting that Range does
    not support is refused here, before a store is touched.
    """

    if versions.disk_hit_source() is not None:
        _cache_hit_source = versions.disk_hit_source()

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._manager: Any = None
        self._counted = Differences()
        self._rank: Rank | None = None
        with _refusal_in_one_line():
            self._settings = Settings.parse(self._kv_transfer_config.kv_connector_extra_config)
            refuse_unproved(vllm_config, self._settings)
            specs = versions.layer_specs(kv_cache_config)
            kinds = [versions.spec_kind(spec) for spec in specs]
            refuse_unproved_cache(specs, kinds, len(kv_cache_config.kv_cache_groups))
            if role is KVConnectorRole.SCHEDULER:
                # Where vLLM carries no handshake, the sockets' names are known all the same.
                folder, engine_id = private_folder(), self._kv_transfer_config.engine_id
                ranks = range(vllm_config.parallel_config.world_size)
                self._scheduler = SchedulerSide(
                    self._settings,
                    vllm_config.cache_config.block_size,
                    RankGroup([socket_path(folder, engine_id, rank) for rank in ranks]),
                    self._announcements(kinds[0]),
                )
                warn_of_kill(vllm_config, self._settings)

    def _announcements(self, kind: str) -> Announcements | None:
        """Return the ledger of KV events, where vLLM wants them and names blocks as Range does."""
        config = self._vllm_config
        self._event_kind = kind
        self._block_tokens = config.cache_config.block_size
        if not versions.wants_kv_events(config):
            return None
        hashed = versions.hash_block_tokens(config, self._kv_cache_config)
        if hashed != self._block_tokens:
            logger.warning(
                "range: no kv events: vLLM hashes blocks of %d tokens, Range stores blocks of %d",
                hashed,
                self._block_tokens,
            )
            return None
        logger.info("range: kv events medium=%s block_tokens=%d", versions.STORAGE, hashed)
        return Announcements(config.parallel_config.world_size)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a save that is lost costs a later miss, nothing else

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True  # a replayed full graph would skip the layer hooks

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with _refusal_in_one_line():
            self._rank = Rank(self._vllm_config, self._kv_cache_config, self._settings, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._rank is None else RangeHandshake(self._rank.endpoint)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        self._worker.before_overwrite(kv_connector_metadata.plan)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._worker.start_restores()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        self._worker.end_step()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_loaded() or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self._rank is None else RangeReport(self._rank.take_report())

    @property
    def _worker(self) -> WorkerSide:
        if self._rank is None:
            raise InvariantError("invariant", "a worker hook ran before register_kv_caches")
        return self._rank.worker

    # Scheduler

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        # Inside MultiConnector they may be a sibling's: then the names by rule stay.
        ours = [
            metadata[rank].endpoint
            for rank in sorted(metadata)
            if isinstance(metadata[rank], RangeHandshake)
        ]
        if len(ours) == len(self._scheduler.promises.ranks):
            self._scheduler.promises.ranks.close()
            self._scheduler.promises.ranks = RankGroup(ours)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._manager = kv_cache_manager

    def on_new_request(self, request: Any) -> None:
        self._scheduler.note_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        external = self._scheduler.matched_tokens(request, num_computed_tokens)
        return external, external > 0 and self._scheduler.loads_in_background(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.bind(request, num_external_tokens, blocks)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return RangeMetadata(self._scheduler.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, RangeReport):
            self._scheduler.note_report(report.report, connector_output.invalid_block_ids or ())
        self._scheduler.note_loaded(connector_output.finished_recving or ())
        if connector_output.invalid_block_ids:
            self._scheduler.clean_failed_blocks(connector_output.invalid_block_ids, self._manager)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finish(request, block_ids)
        return False, None

    def take_events(self) -> Iterator[Any]:
        for each in self._scheduler.take_news():
            if isinstance(each, BlockRun):
                yield versions.stored_event(
                    each.hashes, each.parent, self._block_tokens, self._event_kind
                )
            else:
                yield versions.removed_event(each)

    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    def has_pending_push_work(self) -> bool:
        return self._scheduler.waits_for_step

    # Both

    def get_kv_connector_stats(self) -> RangeStats | None:
        if self._role is KVConnectorRole.SCHEDULER:
            return RangeStats.of(SCHEDULER, self._counted.take(self._scheduler.totals()), {})
        if self._rank is None:
            return None
        return RangeStats.of(str(self._rank.number), *self._rank.meter.take())

    def shutdown(self) -> None:
        if self._role is KVConnectorRole.SCHEDULER:
            self._scheduler.close()
        elif self._rank is not None:
            rank, self._rank = self._rank, None
            rank.close()

    # The API process

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> RangeStats:
        return RangeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> RangePromMetrics:
        return RangePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


@contextmanager
def _refusal_in_one_line() -> Iterator[None]:
    """Log a refusal as one line of its own: vLLM prints it again, inside a long traceback."""
    try:
        yield
    except RangeError as error:
        logger.error("range: refused to start: %s", error.line())
        raise
