"""Tracing: OpenTelemetry spans of transfers, for whoever has set OpenTelemetry up in this process.

In come a journal's timelines; out go spans: ``pdxfer.offer`` from the offer to the last reader's word, ``pdxfer.fetch``
from the ticket to READY, ``pdxfer.relay`` between siblings, each with its marks as events. A span's parent is what the
transfer came with: the request's own traceparent at a source, the source's span (by the ticket) at a target. Without
``opentelemetry-api`` there is no listener, and traceparents are still passed on.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from pdxfer.agent.journal import Listener, Timeline
from pdxfer.trace import HEADER, traceparent

__all__ = ["Tracing", "tracing_listeners"]

_NAMES = {"source": "pdxfer.offer", "target": "pdxfer.fetch", "relay": "pdxfer.relay"}


def tracing_listeners() -> tuple[Listener, ...]:
    """What an Observer, or an agent's journal, should have among its listeners here."""
    return (Tracing(),) if importlib.util.find_spec("opentelemetry") else ()


class Tracing:
    """Spans by the global tracer provider, or by ``provider``. A journal's listener."""

    def __init__(self, provider: Any = None) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = trace.get_tracer("pdxfer", tracer_provider=provider)
        self._trace, self._carrier = trace, TraceContextTextMapPropagator()
        self._spans: dict[int, Any] = {}

    def began(self, timeline: Timeline) -> None:
        """Start a span, and have the transfer carry it on."""
        parent = self._carrier.extract({HEADER: timeline.trace}) if timeline.trace else None
        span = self._tracer.start_span(
            _NAMES[timeline.role],
            context=parent,
            kind=self._trace.SpanKind.CLIENT if timeline.role == "target" else self._trace.SpanKind.SERVER,
            start_time=round(timeline.began_at * 1e9),
            attributes={"pdxfer.transfer": timeline.transfer, "pdxfer.peer": timeline.peer},
        )
        carrier: dict[str, str] = {}
        self._carrier.inject(carrier, self._trace.set_span_in_context(span))
        timeline.trace = traceparent(carrier.get(HEADER)) or timeline.trace
        self._spans[id(timeline)] = span

    def ended(self, timeline: Timeline) -> None:
        """End it, with everything the timeline says."""
        span = self._spans.pop(id(timeline), None)
        if span is None:
            return
        nbytes, messages = timeline.moved()
        span.set_attributes({
            "pdxfer.peer": timeline.peer, "pdxfer.outcome": timeline.outcome, "pdxfer.transport": timeline.transport,
            "pdxfer.bytes": nbytes, "pdxfer.messages": messages,
            **{f"pdxfer.{stage}_seconds": spent for stage, spent in timeline.seconds.items()},
        })  # fmt: skip
        for at_s, stage, detail in timeline.marks:
            span.add_event(f"pdxfer.{stage}", {"detail": detail}, timestamp=round((timeline.began_at + at_s) * 1e9))
        if timeline.outcome != "completed":
            span.set_attribute("error.type", timeline.reason or timeline.outcome)
            span.set_status(self._trace.StatusCode.ERROR, timeline.error)
        span.end(round((timeline.began_at + timeline.elapsed_s) * 1e9))
