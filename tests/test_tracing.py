"""One trace from prefill to decode: in tickets, in control calls, as spans, and in logs."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path

import pytest

import pdxfer
from pdxfer.agent import Agent
from pdxfer.builders import Parallel
from pdxfer.errors import CorruptError, TicketError
from pdxfer.observe.logs import JsonFormatter
from pdxfer.observe.tracing import Tracing, tracing_listeners
from pdxfer.testing.faults import Fault
from pdxfer.ticket import Ticket
from pdxfer.trace import current, traceparent
from tests.conftest import require
from tests.pairs import TOKENS, fails, hand_over, pair
from tests.test_agent_damage import damaged
from tests.test_observe import ONE
from tests.workers import layouts

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans():
    """A listener, and the spans that it has exported."""
    sdk = require("opentelemetry.sdk.trace")
    export = require("opentelemetry.sdk.trace.export")
    memory = require("opentelemetry.sdk.trace.export.in_memory_span_exporter").InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(memory))
    yield Tracing(provider), memory
    provider.shutdown()


@pytest.mark.parametrize(
    "text",
    ["", None, 7, "00-" + "0" * 32 + "-b7ad6b7169203331-01", PARENT.replace("b7ad6b7169203331", "0" * 16), PARENT + "0",
     PARENT.upper(), "01" + PARENT[2:], PARENT + "\n", PARENT[:-1]],
)  # fmt: skip
def test_what_is_no_traceparent_is_dropped(text):
    assert traceparent(text) == ""


def test_a_ticket_carries_a_trace_unsealed_and_checked():
    with pair(*ONE) as (source, target):
        ticket = Ticket.decode(source.offer("one", TOKENS, trace=PARENT))
        assert ticket.trace == PARENT
        plain = replace(ticket, trace="")
        assert len(ticket.encode()) - len(plain.encode()) <= 80
        other = replace(ticket, trace=PARENT.replace("0af7", "0af8")).encode()
        target.reserve("one", TOKENS)
        target.fetch(other, "one")[0].release()  # what nobody sealed decides nothing
        bad = replace(ticket, trace="x" * 5000)
        with pytest.raises(TicketError, match="written"):
            Ticket.decode(bad.encode())
        assert Ticket.decode(source.offer("two", TOKENS, trace="nonsense")).trace == ""
        for agent in source.agents:
            agent.withdraw("two")


def test_control_calls_carry_the_trace(monkeypatch):
    seen = []
    real = Agent.open

    def spy(self, message, *, deadline_s):
        seen.append(current.get())
        return real(self, message, deadline_s=deadline_s)

    monkeypatch.setattr(Agent, "open", spy)
    with pair(*ONE, transports=("tcp",)) as (source, target):
        hand_over(source, target, "one", trace=PARENT)
        hand_over(source, target, "two")
    assert seen == [PARENT, ""]
    assert current.get() == ""


def test_prefill_transfer_and_decode_are_one_trace(spans):
    listener, memory = spans
    with pair(*layouts(Parallel(tp=1), Parallel(tp=2))) as (source, target):
        for agent in (*source.agents, *target.agents):
            agent.journal.listeners.append(listener)
        hand_over(source, target, "request-17", trace=PARENT)
        hand_over(source, target, "request-18")
    found = [span for span in memory.get_finished_spans() if span.attributes["pdxfer.transfer"] == "request-17"]
    assert {format(span.context.trace_id, "032x") for span in found} == {"0af7651916cd43dd8448eb211c80319c"}
    (offer,) = [span for span in found if span.name == "pdxfer.offer"]
    assert format(offer.parent.span_id, "016x") == "b7ad6b7169203331"
    fetches = [span for span in found if span.name == "pdxfer.fetch"]
    assert {span.parent.span_id for span in fetches} == {offer.context.span_id}
    assert len(fetches) == 2
    for span in fetches:
        assert span.attributes["pdxfer.outcome"] == "completed"
        assert [event.name for event in span.events][-1] == "pdxfer.completed"
        assert span.start_time < span.end_time
    others = {span.context.trace_id for span in memory.get_finished_spans()} - {offer.context.trace_id}
    assert len(others) == 1  # without a parent, the offer begins a trace of its own
    assert not listener._spans


def test_a_failure_is_an_error_on_its_span(spans):
    listener, memory = spans
    with damaged("packed", Fault(kind="corrupt", at=0, on="payload")) as (source, target, _):
        target.agents[0].journal.listeners.append(listener)
        fails(source, target, CorruptError)
    (span,) = memory.get_finished_spans()
    assert span.attributes["error.type"] == "CORRUPT"
    assert span.status.status_code.name == "ERROR"


def test_without_a_provider_a_trace_is_passed_on_as_it_came():
    require("opentelemetry")
    with pair(*ONE) as (source, target):
        for agent in (*source.agents, *target.agents):
            agent.journal.listeners.extend(tracing_listeners())
        hand_over(source, target, "one", trace=PARENT)
        assert target.agents[0].journal.timelines()[0].trace == PARENT


def test_a_failure_s_log_lines_say_peer_epoch_and_trace_at_both_ends(caplog):
    formatter = JsonFormatter()
    with damaged("packed", Fault(kind="corrupt", at=0, on="payload")) as (source, target, _):
        fails(source, target, CorruptError, "one", trace=PARENT)
        epochs = [agent.epoch.hex() for agent in source.agents]
    lines = [json.loads(formatter.format(record)) for record in caplog.records if record.levelname == "WARNING"]
    (failed,) = [line for line in lines if "failed" in line["event"]]
    ended = [line for line in lines if "ended at the source" in line["event"]]
    assert (failed["peer"], failed["epoch"]) == ("P", ",".join(epochs))
    assert {(line["peer"], line["epoch"]) for line in ended} == {("D", epoch) for epoch in epochs}
    assert {(line["transfer_id"], line["trace_id"]) for line in (failed, *ended)} == {("one", PARENT.split("-")[1])}


def test_every_line_about_a_transfer_says_of_which():
    lines = [
        (path.name, text)
        for path in Path(pdxfer.__file__).parent.rglob("*.py")
        if path.name != "logs.py"  # the rule itself
        for text in re.findall(r"\"transfer %s[^\n]*(?:\n[^\n]*extra=)?[^\n]*", path.read_text())
    ]
    assert len(lines) > 6
    assert not [line for line in lines if "extra=" not in line[1]]


def test_logs_are_json_with_the_transfer_s_id():
    formatter = JsonFormatter()
    token = current.set(PARENT)
    record = logging.LogRecord("pdxfer.agent", logging.WARNING, "", 0, "transfer %s failed: %s", ("one", "x\ny"), None)
    found = json.loads(formatter.format(record))
    current.reset(token)
    assert found["ts"].endswith("Z")
    assert {k: v for k, v in found.items() if k != "ts"} == {
        "level": "warning", "logger": "pdxfer.agent", "transfer_id": "one", "event": "transfer one failed: x\ny",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
    }  # fmt: skip
    plain = json.loads(formatter.format(logging.LogRecord("x", 20, "", 0, "hello", (), None)))
    assert "transfer_id" not in plain
    assert "trace_id" not in plain
