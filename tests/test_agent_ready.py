"""When decode may begin, and how a fetch ends: READY after everything, cancelled, quarantined, closed."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

from pdxfer.builders import Parallel
from pdxfer.errors import AbortedError, DeadlineError, PeerError, TicketError, TransportError
from pdxfer.testing.oracle import Oracle
from pdxfer.transfer import State
from tests.pairs import LONG, TOKENS, Ends, hand_over, pair, withdraw
from tests.workers import Gate, Worker, hybrid_spec, layouts, settle


@pytest.mark.parametrize("mode", ["packed", "direct"])
@pytest.mark.parametrize("parallel", [Parallel(tp=2, ranks_per_host=1), Parallel(tp=4)], ids=["apart", "fan-out"])
def test_ready_is_after_everything(mode, parallel):
    """One chunk of one edge is held back; all else is in, and no rank that depends on it is READY."""
    gate = Gate("receive")
    plan = layouts(Parallel(tp=2), parallel)
    with pair(*plan, mode=mode) as (source, target):
        late = target.ranks[0].agent
        late.transports["memory"] = gate.wrap(late.transports["memory"])
        oracle = Oracle.of(plan[0], key="one", tokens=TOKENS)
        ticket = source.offer("one", TOKENS, oracle=oracle)
        before = target.reserve("one", TOKENS).copy()
        fetches = target.start(ticket, "one")
        with gate.closed():
            # Whoever does not need rank 0's share ends now; nobody else may.
            if parallel.tp == 2:
                assert fetches[1].wait().ticket.transfer == "one"
                assert fetches[1].state is State.HANDED
                assert [f.state for f in fetches[:1]] == [State.RECEIVING]
            else:
                assert not any(fetch.done or fetch.state is State.READY for fetch in fetches)
            assert late.memory.ledger.counts().get("ready", 0) == 0
        received = [fetch.wait() for fetch in fetches]
        oracle.check(target.memory("one"), before)
        assert {fetch.state for fetch in fetches} == {State.HANDED}
        for rank in received:
            rank.release()


def test_ready_waits_until_siblings_have_read_their_share():
    """One row crosses the network to rank 1 and from there to rank 0: rank 1's engine may not touch it before."""
    gate, spec = Gate("receive"), hybrid_spec()
    spec = replace(spec, components=tuple(c for c in spec.components if c.name == "latent"))
    with pair(*layouts(Parallel(), Parallel(tp=2), spec=spec), mode="packed") as (source, target):
        reader = target.agents[0]
        reader.transports["memory"] = gate.wrap(reader.transports["memory"])
        ticket = source.offer("one", 1)
        target.reserve("one", 1)
        fetches = target.start(ticket, "one")
        with gate.closed():
            assert not fetches[1].join(0.5)
            assert fetches[1].state is State.VERIFYING
        for done in settle(fetches):
            done.release()


def test_peers_that_forgot_us_or_restarted_are_met_again():
    with pair(*layouts(Parallel(tp=2), Parallel(tp=4))) as (source, target):
        hand_over(source, target, "one")
        for agent in source.agents:
            agent.layouts._known.clear()
        hand_over(source, target, "two")
        siblings = {agent.address for agent in target.agents}
        for agent in target.agents:
            for address, peer in agent.peers._peers.items():
                if address in siblings:
                    peer.description = replace(peer.description, epoch=bytes(16))
        hand_over(source, target, "three")


def test_a_cancelled_fetch_frees_both_sides():
    gate = Gate("receive")
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1))) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = gate.wrap(agent.transports["memory"])
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        (fetch,) = target.start(ticket, "one")
        with gate.closed():
            fetch.cancel("the client hung up")
        with pytest.raises(AbortedError, match="the client hung up"):
            fetch.wait()
        assert fetch.state is State.FREE
        # Rank 0 or 1 may not have been opened yet, then nobody could tell it: the engine takes that offer back.
        withdraw(source, "one", ends)


def test_pages_that_a_thread_still_reads_stay_quarantined():
    """The lock that a serving thread holds while it packs is taken, as if it were just packing."""
    gate = Gate("receive")
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = gate.wrap(agent.transports["memory"])
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        (fetch,) = target.start(ticket, "one")
        with gate.closed():
            (record,) = source.agents[0].source._by_session.values()
            (session,) = record.sessions.values()
            assert session._busy.acquire(timeout=60.0)
            fetch.cancel()
        with pytest.raises(AbortedError):
            fetch.wait()
        assert fetch.state is State.FREE
        source.agents[0].source.sweep()
        assert record.hold.state is State.QUARANTINED
        assert not ends.outcomes
        session._busy.release()
        ends.wait(1)
        assert record.hold.state is State.FREE


def test_pages_that_a_thread_still_writes_are_not_free_at_the_deadline():
    gate = Gate("receive")
    with pair(*layouts(Parallel(tp=2), Parallel()), mode="packed", chunk_bytes=4096, window=1) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = gate.wrap(agent.transports["memory"])
        ends = Ends()
        ticket = source.offer("one", LONG, on_end=ends)
        target.reserve("one", LONG)
        (fetch,) = target.start(ticket, "one", timeout_s=0.3)
        with gate.closed():
            assert not fetch.join(0.8)
            assert fetch.state in (State.RECEIVING, State.QUARANTINED)
        with pytest.raises(DeadlineError):
            fetch.wait()
        assert fetch.state is State.FREE
        withdraw(source, "one", ends)


def test_cancel_after_ready_is_too_late():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        (fetch,) = target.start(ticket, "one")
        received = fetch.wait()
        fetch.cancel()
        assert fetch.wait() is received
        assert fetch.state is State.HANDED
        received.release()


def test_many_transfers_at_once():
    """Two targets' worth of requests between the same agents, at the same moment."""
    plan = layouts(Parallel(tp=2), Parallel(tp=4))
    with pair(*plan, chunk_bytes=4096) as (source, target):
        keys = [f"request-{i}" for i in range(3)]
        oracles = {key: Oracle.of(plan[0], key=key, tokens=TOKENS) for key in keys}
        tickets = {key: source.offer(key, TOKENS, oracle=oracles[key]) for key in keys}
        for key in keys:
            target.reserve(key, TOKENS)
        before = {key: target.memory(key).copy() for key in keys}
        fetches = {key: target.start(tickets[key], key) for key in keys}
        received = [done for key in keys for done in settle(fetches[key])]
        wanted = before[keys[0]]
        for key in keys:
            oracles[key].put(replace(wanted, tables=target.memory(key).tables))
        for mine, right in zip(target.memory(keys[0]).buffers, wanted.buffers, strict=True):
            for a, b in zip(mine, right, strict=True):
                assert np.array_equal(a, b)
        for done in received:
            done.release()


def test_an_engine_s_own_callback_can_t_break_the_agent():
    def broken(*_: str) -> None:
        raise RuntimeError("a bug of the engine")

    with pair(*layouts(Parallel(), Parallel()), lease_s=0.3) as (source, target):
        ticket = source.offer("one", TOKENS, on_end=broken)
        target.reserve("one", TOKENS)
        for done in target.fetch(ticket, "one"):
            done.release()
        source.offer("two", TOKENS, on_end=broken)
        ended = threading.Event()
        source.offer("three", TOKENS, on_end=lambda *_: ended.set())
        assert ended.wait(60.0), "the sweeper must have survived the end of the second"


def test_closing_ends_what_is_underway_and_leaves_no_thread():
    gate = Gate("receive")
    before = threading.active_count()
    plan = layouts(Parallel(tp=2), Parallel(tp=1))
    with Worker(plan[0], seed=1, worker="P", transports=("memory",)) as source:
        with Worker(plan[1], seed=2, worker="D", transports=("memory",), mode="packed", chunk_bytes=4096) as target:
            agent = target.agents[0]
            agent.transports["memory"] = gate.wrap(agent.transports["memory"])
            ends = Ends()
            ticket = source.offer("one", 400, on_end=ends)
            target.reserve("one", 400)
            (fetch,) = target.start(ticket, "one")
            with gate.closed():
                closer = threading.Thread(target=source.stack.close)
                closer.start()
                ends.wait(2)
                closer.join(60.0)
            with pytest.raises((TicketError, TransportError, PeerError, AbortedError)):  # wherever its edges were
                fetch.wait()
            assert fetch.state is State.FREE
            target.check_idle()
        source.check_idle()
    assert threading.active_count() <= before


def test_closing_a_target_ends_its_fetches():
    gate = Gate("receive")
    plan = layouts(Parallel(), Parallel())
    with pair(*plan, mode="packed", chunk_bytes=4096) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = gate.wrap(agent.transports["memory"])
        ends = Ends()
        ticket = source.offer("one", 400, on_end=ends)
        target.reserve("one", 400)
        (fetch,) = target.start(ticket, "one")
        with gate.closed():
            closer = threading.Thread(target=agent.close)
            closer.start()
        closer.join(60.0)
        with pytest.raises((AbortedError, TransportError)):
            fetch.wait()
        assert fetch.state is State.FREE
        withdraw(source, "one", ends)
