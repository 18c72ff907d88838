"""The vLLM connector: hands hybrid-model requests from one vLLM server to another. Loaded by vLLM itself::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "PdxferConnector",
        "kv_connector_module_path": "pdxfer.connectors.vllm", "kv_role": "kv_producer"}'

vLLM makes one instance in the engine core (SCHEDULER) and one per rank (WORKER); they share nothing but what
``PdxferMetadata`` carries down in each step and ``PdxferHandshake`` up at start-up. This file is the only one that
subclasses vLLM's classes; what it says about vLLM's own objects is checked against 0.32.

===========================  ==========================  =================================================
process                      file                        does
===========================  ==========================  =================================================
engine core                  ``vllm_scheduler.py``       which request to offer or load; writes tickets
every rank                   ``vllm_worker.py``          the agent: offers, loads, results
every rank, at start-up      ``vllm_tensors.py``         registered tensors to a layout, checked against the spec
===========================  ==========================  =================================================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from pdxfer.connectors import vllm_engine
from pdxfer.connectors.vllm_scheduler import SchedulerSide
from pdxfer.connectors.vllm_settings import Settings, check_version
from pdxfer.connectors.vllm_stats import PdxferPromMetrics, PdxferStats
from pdxfer.connectors.vllm_step import Step
from pdxfer.connectors.vllm_worker import WorkerSide
from pdxfer.ticket import RankIssuer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["PdxferConnector", "PdxferHandshake", "PdxferMetadata"]


@dataclass
class PdxferMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """One step's orders, on their way from the engine core to every rank."""

    step: Step


@dataclass
class PdxferHandshake(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """How to write tickets in a rank's name, on its way from the rank to the engine core (same worker, trusted)."""

    issuer: RankIssuer


class PdxferConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """See the module. Raises MisuseError or IncompatibleError at start-up for whatever can't be served."""

    def __init__(self, vllm_config: VllmConfig, role: base.KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        config = self._kv_transfer_config
        self._settings = Settings.parse(config.kv_connector_extra_config, str(config.engine_id))
        check_version(vllm.__version__, allow_untested=self._settings.allow_untested)
        vllm_engine.check_parallel(vllm_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is base.KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(
                engine_id=str(config.engine_id),
                producer=config.is_kv_producer,
                consumer=config.is_kv_consumer,
                blocks_of=lambda request_id: self._kv_cache_manager.get_block_ids(request_id),
            )
        else:
            spec = vllm_engine.spec_of(vllm_config)
            self._worker = WorkerSide(self._settings, vllm_engine.ranks(), spec, self.watch)

    # -- facts -------------------------------------------------------------------------------------

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """The state always comes with a load, so a local prefix hit may be as deep as the KV's."""
        return True

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Every group is loaded, not just those that a prefix cache could hold."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    # -- engine core -------------------------------------------------------------------------------

    @property
    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "vLLM calls this in the engine core only"
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], PdxferHandshake]) -> None:
        """At start-up: all ranks' issuers."""
        self._scheduling.meet_workers(handshake.issuer for handshake in metadata.values())

    def on_new_request(self, request: Any) -> None:
        """A request arrives."""
        self._scheduling.add(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens a load would bring; no side effects."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are there: order the load."""
        self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> PdxferMetadata:
        """The orders of this step."""
        return PdxferMetadata(self._scheduling.step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """What became of loads."""
        self._scheduling.received(connector_output.finished_recving or ())

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks stay until they were fetched, and the router's parameters."""
        return self._scheduling.finished(request, well=vllm_engine.ended_well(request))

    # -- every rank --------------------------------------------------------------------------------

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "vLLM calls this in the workers only"
        return self._worker

    @property
    def _step(self) -> Step:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PdxferMetadata)
        return metadata.step

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """At start-up, all ranks together: read the tensors' layout, start the agent."""
        tensors, storages = vllm_engine.read_caches(
            self._vllm_config, self._kv_cache_config, kv_caches, self._working.spec, self._settings
        )
        self._working.register(tensors, storages)

    def get_handshake_metadata(self) -> PdxferHandshake | None:
        """Our issuer, for the engine core."""
        issuer = self._working.issuer
        return None if issuer is None else PdxferHandshake(issuer)

    def handle_preemptions(self, kv_connector_metadata: PdxferMetadata) -> None:
        """Before this step writes anything."""
        self._working.before_forward(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin loads; they run in the agent's threads."""
        self._working.start(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads end between steps: no layer waits."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """State layers never call this (vLLM runs it for attention only): all is offered at the step's end."""

    def wait_for_save(self) -> None:
        """The forward pass is launched: offer what it completes."""
        self._working.after_forward(self._step, vllm_engine.fence())

    def get_transfer_results(self, finished_req_ids: set[str]) -> base.KVConnectorTransferResults:
        """What was sent, received and failed since the last step."""
        sent, received, failed = self._working.results(self._step)
        return base.KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_kv_connector_stats(self) -> PdxferStats | None:
        """Counters since the last call."""
        return None if self._worker is None else self._worker.take_stats()

    def shutdown(self) -> None:
        """The engine stops."""
        if self._worker is not None:
            self._worker.shutdown()

    def watch(self, what: str, request_id: str, blocks: tuple[tuple[int, ...], ...], tokens: int) -> None:
        """Called in the rank's main thread when a request was ``offered`` or ``received``; for a subclass that looks.

        Args:
            blocks: vLLM's block ids per KV cache group; tokens: where state and KV stand.
        """

    # -- metrics -----------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PdxferStats:
        """Stats of these counters."""
        return PdxferStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PdxferPromMetrics:
        """Our metrics on vLLM's endpoint."""
        return PdxferPromMetrics(metric_types, labelnames, per_engine_labelvalues)
