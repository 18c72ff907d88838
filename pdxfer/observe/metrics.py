"""Metrics: what an Observer knows, as Prometheus series, named in the table below, in base units.

In come counts and state at the time of a scrape, and the seconds of each transfer at its end; out comes the text that
Prometheus reads. Labels are from bounded sets: peers beyond the first 16 are counted as ``other``, and so is every word
a peer makes up. In the OpenMetrics format, durations carry the trace id of one transfer as an exemplar.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from pdxfer.agent import Agent
from pdxfer.agent.journal import Timeline, component_kind
from pdxfer.control.tls import Pem
from pdxfer.errors import MisuseError
from pdxfer.messages import PROTOCOL_VERSION
from pdxfer.observe.readiness import CHECKS
from pdxfer.ticket import TICKET_VERSION
from pdxfer.transfer import State

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from pdxfer.observe.observer import Observer

__all__ = ["COUNTERS", "GAUGES", "HISTOGRAMS", "Metrics"]

#: name without ``pdxfer_`` and ``_total`` -> labels, help.
COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "transfers": (("transport", "role", "outcome"), "Transfers that ended: fetches, offers, shares of a fan-out."),
    "transfer_failures": (("role", "reason"), "Fetches that failed, by the reason of the first error."),
    "transfer_bytes": (("transport", "component", "direction"), "Verified payload bytes, by kind of component."),
    "transfer_messages": (("direction",), "Data messages."),
    "integrity_failures": (("component", "transport"), "Transfers refused because bytes were not those sealed."),
    "stale_rejected": (("reason",), "Calls refused because epoch, generation, lease or session had moved on."),
    "tickets_rejected": (("reason",), "Calls refused because of their ticket."),
    "leases_expired": ((), "Offers that nobody fetched in time."),
    "peer_transfers": (("peer", "outcome"), "Transfers by the other worker: completed, or other."),
    "transport_fallbacks": (("from", "reason"), "Times that a better transport failed and the next was tried."),
    "backpressure_seconds": (("transport",), "Seconds that chunks waited for staging."),
    "backpressure_rejections": (("transport",), "Chunks given up because staging stayed full."),
    "telemetry_dropped": ((), "Marks and events that were lost."),
}
GAUGES: dict[str, tuple[tuple[str, ...], str]] = {
    "ready": ((), "1 when work should be sent here."),
    "ready_check": (("check",), "1 for every readiness check that holds."),
    "ranks": ((), "Ranks served by this process."),
    "inflight_transfers": (("role",), "Transfers underway."),
    "slots": (("state",), "Pages and slots by state, over all ranks and pools."),
    "staging_bytes": (("transport", "state"), "Staging memory."),
    "lease_age_seconds": ((), "Age of the oldest offer that has not ended."),
    "peer_up": (("peer",), "0 when the last transfer with this worker failed for lack of an answer."),
    "transport_fallback_peers": (("from",), "Peers now reached by another transport because this one fails."),
    "drain_state": ((), "1 while draining."),
    "drain_remaining_leases": ((), "Offers and fetches underway."),
    "insecure": ((), "1 when addresses are open to other hosts without saying who may come."),
    "certificate_expires_timestamp_seconds": ((), "When the first of our own TLS certificates ends, in Unix time."),
    "build_info": (("version", "python"), "1."),
    "compat_info": (("protocol", "ticket"), "1."),
}
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], str]] = {
    "transfer_duration_seconds": (
        "role",
        (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0),
        "A completed transfer: target: from the ticket to READY; source: from the offer to the last reader's word.",
    ),
    "transfer_stage_seconds": (
        "stage",
        (0.0001, 0.001, 0.005, 0.02, 0.1, 0.5, 2.5, 10.0),
        "Seconds of a completed fetch by stage, added over its edges.",
    ),
}
_STAGES = ("negotiate", "plan", "pack", "move", "unpack", "verify")
_ROLES = ("source", "relay", "target")


class Metrics:
    """The series of one Observer. Thread-safe; a journal's listener, for the histograms."""

    def __init__(self, observer: Observer) -> None:
        from prometheus_client import CollectorRegistry, Histogram

        self._observer = observer
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        self._histograms = {
            name: Histogram(f"pdxfer_{name}", text, [label], buckets=buckets, registry=None)
            for name, (label, buckets, text) in HISTOGRAMS.items()
        }

    def began(self, timeline: Timeline) -> None:
        """Nothing."""

    def ended(self, timeline: Timeline) -> None:
        """Observe what a completed transfer took."""
        if timeline.outcome != "completed":
            return
        parts = timeline.trace.split("-")
        exemplar = {"trace_id": parts[1]} if len(parts) == 4 else None
        duration = self._histograms["transfer_duration_seconds"].labels(timeline.role)
        duration.observe(timeline.elapsed_s, exemplar=exemplar)
        if timeline.role == "target":
            for stage in _STAGES:
                spent = self._histograms["transfer_stage_seconds"].labels(stage)
                spent.observe(timeline.seconds.get(stage, 0.0), exemplar=exemplar)

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The series as text, and its content type; ``accept`` is the scraper's header."""
        from prometheus_client.exposition import choose_encoder

        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """What the registry asks for at a scrape."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        counts = self._with_zeros()
        for name, (labels, text) in COUNTERS.items():
            counter = CounterMetricFamily(f"pdxfer_{name}", text, labels=labels)
            for (counted, *values), value in sorted(counts.items()):
                if counted == name:
                    counter.add_metric(values, value)
            yield counter
        gauges = self._gauges()
        for name, (labels, text) in GAUGES.items():
            gauge = GaugeMetricFamily(f"pdxfer_{name}", text, labels=labels)
            for labelled, number in sorted(gauges.get(name, {}).items()):
                gauge.add_metric(labelled, number)
            yield gauge
        for histogram in self._histograms.values():
            for metric in histogram.collect():
                metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
                yield metric

    def _with_zeros(self) -> Counter[tuple[str, ...]]:
        """Counts, with a 0 for what must be seen to rise from 0 to 1."""
        counts = self._observer.counts()
        zeros: list[tuple[str, ...]] = [(name,) for name, (labels, _) in COUNTERS.items() if not labels]
        for agent in self._observer.agents:
            kinds = {component_kind(component.name) for component in agent.memory.layout.spec.components}
            zeros += [("integrity_failures", kind, scheme) for kind in kinds for scheme in agent.config.transports]
        for key in zeros:
            counts.setdefault(key, 0)
        return counts

    def _gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        agents, problems = self._observer.agents, self._observer.problems()
        slots: Counter[tuple[str, ...]] = Counter({(state.value,): 0 for state in State})
        staging: Counter[tuple[str, ...]] = Counter()
        falling: Counter[tuple[str, ...]] = Counter({(s,): 0 for a in agents for s in a.config.transports})
        up: dict[tuple[str, ...], float] = {}
        for agent in agents:
            slots.update({(state,): n for state, n in agent.memory.ledger.counts().items()})
            falling.update((scheme,) for scheme in list(agent.peers.falling_back.values()))
            for scheme, arena in agent.memory.arenas().items():
                used = arena.used_bytes
                staging.update({(scheme, "used"): used, (scheme, "free"): arena.capacity_bytes - used})
            for peer in list(agent.journal.peers.values()):
                up[(peer.label,)] = min(up.get((peer.label,), 1.0), float(peer.up))
        live = [t for t in self._observer.timelines() if not t.outcome]
        waiting = [t.elapsed_s for t in live if t.role == "source"]
        return {
            "ready": {(): float(not any(problems.values()))},
            "ready_check": {(name,): float(not problems[name]) for name in CHECKS},
            "ranks": {(): len(agents)},
            "inflight_transfers": {(role,): sum(t.role == role for t in live) for role in _ROLES},
            "slots": dict(slots),
            "staging_bytes": dict(staging),
            "lease_age_seconds": {(): max(waiting, default=0.0)},
            "peer_up": up,
            "transport_fallback_peers": dict(falling),
            "drain_state": {(): float(bool(problems["draining"]))},
            "drain_remaining_leases": {(): sum(agent.underway() for agent in agents)},
            "insecure": {(): float(any(agent.counters.get("insecure_listeners") for agent in agents))},
            "certificate_expires_timestamp_seconds": _ends_of_certificates(agents),
            "build_info": {(self._observer.version, platform.python_version()): 1},
            "compat_info": {(str(PROTOCOL_VERSION), str(TICKET_VERSION)): 1},
        }


def _ends_of_certificates(agents: tuple[Agent, ...]) -> dict[tuple[str, ...], float]:
    """Nothing without TLS, and for files that can't be read, which ``keys`` of the readiness says."""
    ends: list[float] = []
    for tls in {agent.config.tls for agent in agents if agent.config.tls is not None}:
        with suppress(MisuseError):
            ends.append(Pem.read(tls).not_after())
    return {(): min(ends)} if ends else {}
