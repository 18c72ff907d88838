"""What the simulator found in the agents, each fault by itself, without the simulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdxfer import wire
from pdxfer.agent import Fetch
from pdxfer.builders import Parallel
from pdxfer.errors import InternalError, PeerError, TransportError
from pdxfer.messages import Complete, Mode, Open
from pdxfer.plan import make_plan
from pdxfer.transport import Message
from tests.pairs import TOKENS, fails, hand_over, pair
from tests.workers import Tap, layouts, settle


class Damage(Tap):
    """Changes the frames that tell a target where the source's pages are."""

    def __init__(self, change) -> None:
        self.change = change

    def received(self, message: Message) -> list[Message]:
        changed = self.change(wire.decode(message.header))
        return [] if changed is None else [Message(wire.encode(changed), message.payload, region=message.region)]


def elsewhere(frame: wire.Frame) -> wire.Frame:
    """Every page far outside the source's memory."""
    if not isinstance(frame, wire.Tables):
        return frame
    pieces = [[*where, (np.frombuffer(entries, "<i8") + (1 << 40)).tobytes()] for *where, entries in frame.pieces]
    return replace(frame, pieces=pieces)


def without_regions(frame: wire.Frame) -> wire.Frame | None:
    """The messages that carry memory are lost."""
    return None if isinstance(frame, wire.Exported) and frame.region >= 0 else frame


@pytest.mark.parametrize("change", [elsewhere, without_regions])
def test_where_the_source_s_pages_are_is_the_source_s_fault(change):
    """Both were errors of ours: one blamed the engine (MisuseError), one pdxfer (InternalError)."""
    with pair(*layouts(Parallel(), Parallel()), mode="direct") as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = Damage(change).wrap(agent.transports["memory"])
        assert fails(source, target, PeerError, match="source").reason == "PROTOCOL"


def test_a_replaced_session_is_closed_and_its_pages_are_not_free_while_it_packs():
    """A reader that opened twice left a thread packing pages that the second session's end had freed."""
    with pair(*layouts(Parallel(), Parallel()), mode="packed") as (source, target):
        agent = source.agents[0]
        ended: list[str] = []
        ticket = source.offer("one", TOKENS, on_end=lambda _, outcome: ended.append(outcome))
        target.reserve("one", TOKENS)
        (record,) = agent.source._records.values()
        peer, message = _asked(target, source, ticket)
        first = peer.client.open(message, timeout_s=5.0)
        session = record.sessions[first.session]
        assert session._busy.acquire(blocking=False)  # as its thread does for the time of one chunk
        second = peer.client.open(message, timeout_s=5.0)
        assert session._closed
        assert not record.sessions[second.session]._closed
        peer.client.complete(_completed(target, message, second), timeout_s=5.0)
        assert agent.memory.ledger.counts()["quarantined"] > 0
        assert not ended
        session._busy.release()
        agent.source.sweep()
        assert ended == ["completed"]
        assert agent.counters["offers_completed"] == 1


def _asked(target, source, ticket):
    agent = target.agents[0]
    peer = agent.peers.get(source.agents[0].address, epoch=None, deadline_s=float("inf"))
    plan = make_plan(source.layout, target.layout)
    message = Open(
        transfer="one", ticket=ticket.encode(), epoch=agent.epoch, source_epoch=peer.description.epoch,
        target_worker=agent.config.worker, target_rank=0, layout_digest=target.layout.digest, plan_digest=plan.digest,
        first_token=0, relay=False, transport=peer.description.transports[0], mode=Mode.PACKED, chunk_bytes=65536,
    )  # fmt: skip
    return peer, message


def _completed(target, asked, opened):
    return Complete(
        transfer=asked.transfer, epoch=asked.epoch, source_epoch=opened.epoch, session=opened.session,
        target_worker=asked.target_worker, target_rank=0, generation=opened.generation,
        payload_bytes=opened.payload_bytes,
    )  # fmt: skip


def test_an_edge_that_ended_without_a_word_is_no_success(monkeypatch):
    """READY was concluded from threads that were gone and had not complained."""
    edge = Fetch._edge
    monkeypatch.setattr(Fetch, "_edge", lambda self, plan, at, *how: None if at.relay else edge(self, plan, at, *how))
    with pair(*layouts(Parallel(tp=1), Parallel(tp=2))) as (source, target):
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        with pytest.raises(InternalError, match="without a word"):
            settle(target.start(ticket, "one", timeout_s=2.0))


def test_what_ended_last_is_remembered_longest(monkeypatch):
    """A long-lived offer was forgotten as soon as it had completed, so that a repeated Complete failed."""
    monkeypatch.setattr("pdxfer.agent.source._ENDED_MAX", 2)
    with pair(*layouts(Parallel(), Parallel()), mode="packed") as (source, target):
        ticket = source.offer("one", TOKENS)
        hand_over(source, target, "two")
        peer, message = _asked(target, source, ticket)
        opened = peer.client.open(message, timeout_s=5.0)
        done = _completed(target, message, opened)
        assert peer.client.complete(done, timeout_s=5.0).state == "completed"
        source.offer("three", TOKENS)
        assert peer.client.complete(done, timeout_s=5.0).state == "completed"
        source.agents[0].withdraw("three")


def test_what_a_thread_still_packs_is_not_forgotten(monkeypatch):
    """Its transfer was ended, and beyond the bound of what is remembered: its pages were then taken for quiet."""
    monkeypatch.setattr("pdxfer.agent.source._ENDED_MAX", 1)
    with pair(*layouts(Parallel(), Parallel()), mode="packed") as (source, target):
        ticket = source.offer("one", TOKENS)
        peer, message = _asked(target, source, ticket)
        opened = peer.client.open(message, timeout_s=5.0)
        (record,) = source.agents[0].source._records.values()
        session = record.sessions[opened.session]
        record.hold, hold = None, record.hold  # as a share of a fan-out has none
        assert session._busy.acquire(blocking=False)  # as its thread does for the time of one chunk
        record.offer.end("aborted")
        for key in ("two", "three"):
            hand_over(source, target, key)
        assert record in source.agents[0].source._records.values()
        session.close()
        session._busy.release()
        record.hold = hold
        source.agents[0].source._give_up(record)


class Invented(Tap):
    """What should be a chunk is a failure for a reason that nobody has heard of."""

    def received(self, message: Message) -> list[Message]:
        frame = wire.decode(message.header)
        if not isinstance(frame, wire.Data):
            return [message]
        message.release()
        fail = wire.Fail(frame.session, "PeerError", f"REASON_{id(message)}", "no")
        return [Message(wire.encode(fail), memoryview(b""))]


def test_a_peer_s_reasons_are_counted_by_bounded_names():
    with pair(*layouts(Parallel(), Parallel()), mode="packed") as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = Invented().wrap(agent.transports["memory"])
        for number in range(3):
            fails(source, target, PeerError, key=f"lost {number}")
        assert len([name for name in agent.counters if name.startswith("fetch_failed")]) == 1


class Cut(Tap):
    """The channel breaks as the target says Done, and somebody has closed the client meanwhile."""

    def __init__(self, agent) -> None:
        self.agent = agent

    def sending(self, header: bytes) -> None:
        if isinstance(wire.decode(header), wire.Done):
            for peer in self.agent.peers._peers.values():
                peer.client.close()
            raise TransportError("cut on purpose")


def test_a_client_that_another_fetch_closed_in_the_middle_is_a_peer_that_is_gone():
    with pair(*layouts(Parallel(), Parallel()), mode="packed") as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = Cut(agent).wrap(agent.transports["memory"])
        assert fails(source, target, PeerError).reason == "PEER_UNREACHABLE"


def test_a_client_that_another_fetch_closed_is_nobody_s_misuse():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        hand_over(source, target, "one")
        (peer,) = target.agents[0].peers._peers.values()
        target.agents[0].peers._clients.pop(peer.address)
        peer.client.close()
        hand_over(source, target, "two")
