"""One rank at work in a vLLM worker: its store, its engine, its lookup socket, from start to close.

Puts the parts together in the order that makes refusals come first; never plans or moves KV.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rangekv.engine import Engine, stores
from rangekv.engine.connector import versions
from rangekv.engine.connector.cpus import allowed_cpus, spare_cpus
from rangekv.engine.connector.endpoint import private_folder, socket_path, sweep
from rangekv.engine.connector.events import Holdings
from rangekv.engine.connector.identity import model_namespace
from rangekv.engine.connector.layout import PagedLayers, paged_layers
from rangekv.engine.connector.lookup_server import LookupServer
from rangekv.engine.connector.messages import StepReport
from rangekv.engine.connector.meter import RankMeter
from rangekv.engine.connector.settings import Settings
from rangekv.engine.connector.worker import WorkerSide
from rangekv.engine.sizes import format_size
from rangekv.format.namespace import Namespace

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.rangekv")


class Rank:
    """Opened once the KV tensors exist; owns everything of Range in this process until `close`.

    The tensors must outlive it: the engine reads and writes them in place.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        block_tokens = vllm_config.cache_config.block_size
        rank, world_size = vllm_config.parallel_config.rank, vllm_config.parallel_config.world_size
        affinity = spare_cpus(allowed_cpus())
        folder = private_folder()
        sweep(folder)
        self.endpoint = socket_path(folder, vllm_config.kv_transfer_config.engine_id, rank)
        layers = paged_layers(tensors, kv_cache_config.num_blocks, block_tokens)
        geometry = layers.geometry(block_tokens)
        namespace = model_namespace(vllm_config, kv_cache_config, layers, settings)
        path = stores.resolve(
            settings.store,
            namespace=namespace,
            geometry=geometry,
            rank=rank,
            world_size=world_size,
            replica=versions.replica_number(vllm_config),
            capacity_bytes=settings.capacity,
            dir_capacity_bytes=settings.dir_capacity,
            lock_wait_s=settings.lock_wait_s,
        )
        config = settings.engine_config(
            step_bytes=_step_bytes(vllm_config, layers, block_tokens),
            rank=rank,
            world_size=world_size,
            affinity=affinity,
        )
        self._settings = settings
        self._written_bytes = 0
        self.number = rank
        with ExitStack() as undo:
            self._engine = Engine.open(path, namespace=namespace, geometry=geometry, config=config)
            undo.callback(self._engine.close, settings.close_deadline_s)
            self._engine.attach(list(layers.rows))
            self.worker = WorkerSide(
                self._engine,
                {name: index for index, name in enumerate(layers.names)},
                block_tokens,
                settings.restore_deadline_s,
                rank,
                Holdings(self._engine, block_tokens)
                if versions.wants_kv_events(vllm_config)
                else None,
            )
            self.meter = RankMeter(self._engine, self.worker)
            self._server = LookupServer(self.endpoint, self.worker.answer, affinity)
            undo.pop_all()
        self._log_start()
        _log_neighbour(settings.store, namespace)

    def take_report(self) -> StepReport:
        """Return what the scheduler side must know after a step."""
        report = self.worker.take_report()
        written_bytes = self._engine.stats().counters["write_bytes"]
        report.written_bytes = written_bytes - self._written_bytes
        self._written_bytes = written_bytes
        return report

    def close(self) -> None:
        """Stop lookups, publish what is proved and close the store; idempotent."""
        self._server.close()
        self.worker.keeper.close()
        result = self._engine.close(self._settings.close_deadline_s)
        logger.info("range: close state=%s detail=%s", result.state, result.detail)
        logger.info("range: %s", self._engine.stats().line())

    def _log_start(self) -> None:
        opened, stats = self._engine.open_result, self._engine.stats()
        logger.info(
            "range: open store=%s state=%s reason=%s records=%d tokens=%d used=%s capacity=%s "
            "path=%s placement=%r verify=%s save_generated=%s",
            self._engine.store.path,
            opened.state,
            opened.reason or "none",
            stats.records,
            stats.tokens,
            format_size(stats.used_bytes),
            format_size(stats.capacity_bytes),
            stats.path,
            self._engine.placement,
            self._settings.verify,
            "on" if self._settings.save_generated else "off",
        )


def _log_neighbour(directory: str, namespace: Namespace) -> None:
    """Say how this model differs from the nearest other one that has a cache here."""
    other = stores.nearest_other(directory, namespace)
    if other is not None:
        logger.info(
            "range: other namespace store=%s differs=%s",
            other.path,
            ",".join(key for key, _, _ in other.differences),
        )


def _step_bytes(vllm_config: Any, layers: PagedLayers, block_tokens: int) -> int:
    """Return the KV bytes that one step can produce."""
    token_bytes = len(layers.names) * layers.block_bytes // block_tokens
    return int(vllm_config.scheduler_config.max_num_batched_tokens) * token_bytes
