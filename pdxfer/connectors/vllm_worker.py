"""Worker: the half of the vLLM connector in every rank's process: the rank's agent, driven by ``Step`` orders.

In come the registered cache tensors and one ``Step`` per engine step; out come which requests were sent, received
or failed. Nothing here waits for a peer: fetches run in the agent's threads, and the forward loop only polls them.

::

    register   tensors ─read_layout─▶ RankLayout ─all ranks' (gloo)─▶ Layout ─▶ agent (attach, start)
    a step     withdraw, cancel, decline, keep ─▶ loads start ─▶ (forward pass) ─▶ offers ─▶ results
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pdxfer.agent import Agent, SidecarAgent, create_agent
from pdxfer.agent.config import shifted
from pdxfer.connectors.vllm_settings import Settings
from pdxfer.connectors.vllm_stats import PdxferStats
from pdxfer.connectors.vllm_step import BlockIds, Load, Offer, Step
from pdxfer.connectors.vllm_tensors import GroupTable, RankTensors
from pdxfer.errors import MisuseError, PdxferError
from pdxfer.layout import Holding, Layout, RankLayout
from pdxfer.observe import Admin, Observer
from pdxfer.observe.tracing import tracing_listeners
from pdxfer.spec import CacheSpec, Growth
from pdxfer.ticket import RankIssuer

if TYPE_CHECKING:
    import torch

    from pdxfer.agent import Fetch, SidecarFetch

__all__ = ["Gather", "Ranks", "Watch", "WorkerSide"]

#: Every rank of the worker gives some bytes and gets all ranks', in rank order.
Gather = Callable[[bytes], list[bytes]]

#: Told that a request was ``offered`` or ``received``: what, request id, block ids, tokens.
Watch = Callable[[str, str, BlockIds, int], None]

#: How long an idle step waits: what a request that comes meanwhile may be delayed by.
_IDLE_S = 0.002

_log = logging.getLogger("pdxfer.vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this rank stands among the worker's ``size``, and how it hears from the others."""

    rank: int
    size: int
    gather: Gather


@dataclass(slots=True)
class _Sent:
    """An offer: reported as sent once its ticket went out (``handed``) and nobody may read its pages (``ended``)."""

    transfer: str
    handed: bool = False
    ended: bool = False


@dataclass(slots=True)
class _Loading:
    """A load; ``fetch`` is None when it could not even start."""

    load: Load
    fetch: Fetch | SidecarFetch | None
    cancelled: bool = False

    def over(self) -> bool:
        """Whether it has ended and no thread of ours can touch its pages."""
        return self.fetch is None or (self.fetch.done and self.fetch.settle())


class WorkerSide:
    """One rank's agent and what it has underway. Called from the worker's main thread; callbacks come from others."""

    def __init__(self, settings: Settings, ranks: Ranks, spec: CacheSpec, watch: Watch) -> None:
        self._settings, self._ranks, self.spec, self._watch = settings, ranks, spec, watch
        self._agent: Agent | SidecarAgent | None = None
        self._observed = ExitStack()
        self._layout = Layout(spec=spec, ranks=(RankLayout(rank=0, regions=(), holdings=()),))
        self._storages: list[torch.Tensor] = []
        self._tables: tuple[GroupTable, ...] = ()
        self._sent: dict[str, _Sent] = {}
        self._loading: dict[str, _Loading] = {}
        self._stats = PdxferStats()
        self._lock = threading.Lock()
        self._news = threading.Event()

    # -- start-up ----------------------------------------------------------------------------------

    def register(self, tensors: RankTensors, storages: Mapping[int, torch.Tensor]) -> None:
        """Take over this rank's cache memory and start its agent; called by all ranks of the worker together.

        Args:
            tensors: this rank's layout. storages: the memory itself as bytes, by the names in ``tensors.storages``.
        """
        self.shutdown()
        agent = create_agent(self._settings.agent_config(self._ranks.rank), self._settings.sidecar)
        observed = ExitStack()
        try:
            layout = self._worker_layout(agent.host, tensors.rank)
            self._layout, self._storages = layout, [storages[name] for name in tensors.storages]
            agent.attach(layout, self._storages)
            agent.start()
            if isinstance(agent, Agent):
                self._observe(agent, observed)
            addresses = [data.decode() for data in self._ranks.gather(agent.address.encode())]
        except BaseException:
            observed.close()
            agent.close()
            raise
        self._observed = observed
        agent.siblings.update({rank: a for rank, a in enumerate(addresses) if rank != self._ranks.rank})
        self._agent, self._tables = agent, tensors.tables
        _log.info("rank %d of %d serves at %s", self._ranks.rank, self._ranks.size, agent.address)

    def _observe(self, agent: Agent, observed: ExitStack) -> None:
        """Spans of its transfers where OpenTelemetry is, and the admin that the settings ask for."""
        listeners, admin = tracing_listeners(), self._settings.admin
        if not admin:
            agent.journal.listeners.extend(listeners)
            return
        observer = observed.enter_context(Observer(listeners=listeners))
        observer.add(agent)
        served = observed.enter_context(Admin(observer, shifted(admin, self._ranks.rank)))
        _log.info("rank %d shows itself at %s", self._ranks.rank, served.url)

    def _worker_layout(self, host: str, mine: RankLayout) -> Layout:
        """Put all ranks' own layouts together; ranks that share a machine get the same host number."""
        said = [json.loads(data) for data in self._ranks.gather(json.dumps([host, mine.to_json()]).encode())]
        hosts = list(dict.fromkeys(host for host, _ in said))
        ranks = (replace(RankLayout.from_json(rank), host=hosts.index(host)) for host, rank in said)
        return Layout(spec=self.spec, ranks=tuple(ranks))

    @property
    def agent(self) -> Agent | SidecarAgent:
        """The agent; there from ``register`` on."""
        assert self._agent is not None, "vLLM registers its caches before it runs a step"
        return self._agent

    @property
    def issuer(self) -> RankIssuer | None:
        """How the scheduler writes tickets in our name; None before ``register``."""
        return None if self._agent is None else self._agent.issuer

    def shutdown(self) -> None:
        """End every transfer and the agent. Idempotent."""
        if self._agent is not None:
            self._observed.close()
            self._agent.close()
            self._agent = None

    # -- a step ------------------------------------------------------------------------------------

    def before_forward(self, step: Step) -> None:
        """Let go of pages that the engine uses again in this very step."""
        for request in step.withdrawn:
            if (sent := self._sent.pop(request, None)) is not None:
                self.agent.withdraw(sent.transfer)

    def start(self, step: Step) -> None:
        """Begin the loads of this step, and end what is not wanted any more."""
        self.before_forward(step)
        for request in step.cancelled:
            if (loading := self._loading.get(request)) is not None:
                loading.cancelled = True
                if loading.fetch is not None:
                    loading.fetch.cancel("the request was aborted")
        if self._ranks.rank == 0:  # one rank speaks for all
            for ticket, reason in step.declined:
                self._quietly(lambda t=ticket, r=reason: self.agent.decline(t, r))  # type: ignore[misc]
            for ticket in step.keep:
                self._quietly(lambda t=ticket: self.agent.keep(t))  # type: ignore[misc]
        for load in step.loads:
            self._loading[load.request] = _Loading(load, self._fetch(load))

    def _quietly(self, call: Callable[[], None]) -> None:
        try:
            call()
        except PdxferError as error:
            _log.warning("%s", error)

    def _fetch(self, load: Load) -> Fetch | SidecarFetch | None:
        if load.error:
            self._failed(load, load.error.partition(":")[0], load.error)
            return None
        try:
            tables = self.tables(load.blocks, load.tokens, load.first_token)
            self._clear_behind(tables, load.tokens)
            return self.agent.start_fetch(
                load.ticket,
                tables,
                first_token=load.first_token,
                timeout_s=self._settings.timeout_s,
                on_done=self._news.set,
            )
        except PdxferError as error:
            self._failed(load, error.reason, str(error))
            return None

    def _failed(self, load: Load, reason: str, message: str) -> None:
        with self._lock:
            self._stats.count("transfers", reason)
        _log.error("request %s: nothing was loaded: %s", load.request, message)

    def tables(self, blocks: BlockIds, tokens: int, first_token: int = 0) -> dict[str, Sequence[int]]:
        """Page tables of a request that stands at ``tokens``; pages wholly before ``first_token`` are left out."""
        return {t.name: t.pages(blocks[t.group], tokens, first_token) for t in self._tables}

    def _clear_behind(self, tables: Mapping[str, Sequence[int]], tokens: int) -> None:
        """Zero what the load will not write in its pages: vLLM leaves that to us, and reads it, masked (NaN * 0).

        ::

            |  page  |  page  |# # # # 0 0|0 0 0 0 0|      # rows of the request, 0 rows (and pages) after ``tokens``
        """
        for holding in self._layout.ranks[self._ranks.rank].holdings:
            if self.spec[holding.component].growth is Growth.PER_REQUEST:
                continue
            rows = -(-tokens // self.spec[holding.component].tokens_per_row)
            for index in range(rows // holding.page_rows, len(tables[holding.table])):
                page, first = tables[holding.table][index], max(0, rows - index * holding.page_rows)
                if not 0 <= page < holding.pages:
                    raise MisuseError(f"page {page} of table {holding.table!r} is none of {holding.pages}")
                for region, offset in zip(holding.regions, holding.offsets, strict=True):
                    at = offset + page * holding.page_stride + first * holding.row_stride
                    _zero(self._storages[region], holding, at, holding.page_rows - first)

    def after_forward(self, step: Step, fence: Callable[[], None] | None = None) -> None:
        """Offer what prefill has just computed (``fence`` waits until it really has)."""
        for offer in step.offers:
            self._sent[offer.request] = sent = _Sent(offer.transfer)
            try:
                self._offer(offer, sent, fence)
                self._watch("offered", offer.request, offer.blocks, offer.tokens)
            except PdxferError as error:
                _log.error("request %s can't be offered: %s", offer.request, error)
                self._end(sent, error.reason)
        for request in step.handed:
            self._sent.setdefault(request, _Sent("", ended=True)).handed = True

    def _offer(self, offer: Offer, sent: _Sent, fence: Callable[[], None] | None) -> None:
        self.agent.offer(
            offer.transfer,
            self.tables(offer.blocks, offer.tokens),
            kv_tokens=offer.tokens,
            state_tokens=offer.tokens,
            context=offer.context,
            nonce=offer.nonce,
            tenant=offer.tenant,
            trace=offer.trace,
            fence=fence,
            on_end=lambda _transfer, outcome: self._end(sent, outcome.split()[0].rstrip(":")),
        )

    def _end(self, sent: _Sent, outcome: str) -> None:
        """In some thread of the agent: nobody reads these pages any more."""
        with self._lock:
            self._stats.count("offers", outcome)
        sent.ended = True
        self._news.set()

    # -- what came of it ---------------------------------------------------------------------------

    def results(self, step: Step) -> tuple[set[str], set[str], set[str]]:
        """Requests sent, received (failed ones too) and failed since the last call.

        While it holds blocks for others, an idle engine steps without a pause. A step that has nothing else to do
        waits here for news, a moment at most: else this loop would keep the agent's threads from the interpreter.
        """
        if step.idle and (self._sent or self._loading):
            self._news.wait(_IDLE_S)
        self._news.clear()
        sent = {request for request, s in self._sent.items() if s.handed and s.ended}
        for request in sent:
            del self._sent[request]
        over = {r: loading for r, loading in self._loading.items() if loading.over()}
        failed = {request for request, loading in over.items() if not self._take(loading)}
        for request in over:
            del self._loading[request]
        return sent, set(over), failed

    def _take(self, loading: _Loading) -> bool:
        """Whether the pages hold the request now. They are the engine's from here on, well or not."""
        if loading.fetch is None:
            return False
        try:
            received = loading.fetch.wait()
        except PdxferError as error:
            with self._lock:
                self._stats.count("transfers", "cancelled" if loading.cancelled else error.reason)
            level = logging.INFO if loading.cancelled else logging.ERROR
            _log.log(level, "request %s: the load failed: %s", loading.load.request, error)
            return False
        self._watch("received", loading.load.request, loading.load.blocks, loading.load.tokens)
        received.release()
        edges = received.edges
        with self._lock:
            self._stats.received(
                received.seconds["total"],
                bytes=sum(edge.payload_bytes for edge in edges),
                messages=sum(edge.messages for edge in edges),
            )
        return True

    def take_stats(self) -> PdxferStats | None:
        """What was counted since the last call; None when nothing was."""
        with self._lock:
            if self._stats.is_empty():
                return None
            stats, self._stats = self._stats, PdxferStats()
        return stats


def _zero(storage: torch.Tensor, holding: Holding, at: int, rows: int) -> None:
    """Zero ``rows`` rows of a holding's box from byte ``at`` of the storage, on the engine's own stream."""
    import torch

    size = holding.itemsize
    words = storage.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    strides = [stride // size for stride in (holding.row_stride, *holding.strides)]
    words.as_strided((rows, *holding.box.shape), strides, at // size).zero_()
