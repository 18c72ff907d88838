"""Agents of two workers in one process: every byte arrives, every page comes back, or there is one named error."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from pdxfer import wire
from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.control import ControlClient
from pdxfer.errors import (
    AbortedError,
    CorruptError,
    DeadlineError,
    ExhaustedError,
    IncompatibleError,
    MisuseError,
    PdxferError,
    PeerError,
    StaleError,
    TicketError,
    TransportError,
)
from pdxfer.layout import Layout
from pdxfer.messages import Abort, Complete, Mode, Open, Renew
from pdxfer.packing import KERNELS, native_available
from pdxfer.plan import make_plan
from pdxfer.spec import Ownership, Rule
from pdxfer.testing.faults import Fault, FaultPlan, FaultyTransport
from pdxfer.testing.oracle import Oracle
from pdxfer.ticket import Ticket
from pdxfer.transfer import State
from pdxfer.transport import Message, known_schemes
from tests.conftest import require
from tests.workers import Gate, Tap, Worker, hybrid_spec, layouts, settle

SCHEMES = [s for s in ("memory", "shm", "tcp") if s in known_schemes()]
TOKENS, LONG = 70, 300
MIB4 = 4 << 20


@contextmanager
def pair(source: Layout, target: Layout, *, of_source=None, of_target=None, **both) -> Iterator[tuple[Worker, Worker]]:
    """Two workers; after the test both must hold nothing."""
    both.setdefault("transports", ("memory",))
    with ExitStack() as stack:
        one = stack.enter_context(Worker(source, seed=1, worker="P", **{**both, **(of_source or {})}))
        two = stack.enter_context(Worker(target, seed=2, worker="D", **{**both, **(of_target or {})}))
        yield one, two
        one.check_idle()
        two.check_idle()


def hand_over(source: Worker, target: Worker, key: str, tokens: int = TOKENS, *, first_token: int = 0, **options):
    """Offer, fetch, compare every byte of the target, release; returns what each rank received."""
    oracle = Oracle.of(source.layout, key=key, tokens=tokens)
    ended: list[tuple[str, str]] = []
    ticket = source.offer(key, tokens, oracle=oracle, on_end=lambda *end: ended.append(end), **options)
    before = target.reserve(key, tokens).copy()
    received = target.fetch(ticket, key, first_token=first_token)
    oracle.check(target.memory(key), before, first_token=first_token)
    assert ended == [(key, "completed")] * len(source.ranks)
    for rank in received:
        rank.release()
        rank.release()
    return received


def fails(
    source: Worker, target: Worker, expected: type[PdxferError], key: str = "lost", *, match: str = ".", **options
):
    """Offer and fetch; the first error must be ``expected``. Nothing becomes READY. Returns the error."""
    ends = Ends()
    ticket = source.offer(key, LONG, on_end=ends)
    target.reserve(key, LONG)
    fetches = target.start(ticket, key, **options)
    with pytest.raises(expected, match=match) as caught:
        settle(fetches)
    assert not any(fetch.state in (State.READY, State.HANDED) for fetch in fetches)
    withdraw(source, key, ends)
    return caught.value


class Ends:
    """Collects what ``on_end`` is told; ``wait`` until so many ranks' pages are free again."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self._told = threading.Semaphore(0)

    def __call__(self, transfer: str, outcome: str) -> None:
        self.outcomes.append(outcome)
        self._told.release()

    def wait(self, ranks: int) -> None:
        for _ in range(ranks):
            assert self._told.acquire(timeout=60.0), self.outcomes


def wait_until(holds: Callable[[], object], *, timeout_s: float) -> bool:
    """Whether ``holds`` becomes true in time, for what tells nobody."""
    until_s = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.01)
    return bool(holds())


def withdraw(source: Worker, key: str, ends: Ends) -> None:
    """Take back what no reader has ended, and wait until the pages are free."""
    for agent in source.agents:
        agent.withdraw(key)
    ends.wait(len(source.ranks))


# ---------------------------------------------------------------- what arrives


ARRANGEMENTS = {
    "tp4 to tp2": (Parallel(tp=4), Parallel(tp=2)),
    "tp2 to tp4, fan-out": (Parallel(tp=2), Parallel(tp=4)),
    "tp1 to tp4, two hosts": (Parallel(tp=1), Parallel(tp=4, ranks_per_host=2)),
    "tp4 to tp6": (Parallel(tp=4), Parallel(tp=6)),
    "pp2 to tp4": (Parallel(tp=1, stages=(3, 3)), Parallel(tp=4)),
    "tp2 to pp3": (Parallel(tp=2), Parallel(tp=1, stages=(1, 4, 1))),
    "cp2 to tp2": (Parallel(tp=1, cp=2, interleave=4), Parallel(tp=2)),
    "tp2 to cp3": (Parallel(tp=2), Parallel(tp=1, cp=3)),
}


@pytest.mark.parametrize("mode", ["packed", "direct"])
@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_every_arrangement_arrives(name, mode):
    with pair(*layouts(*ARRANGEMENTS[name]), mode=mode) as (source, target):
        for key in ("one", "two"):
            received = hand_over(source, target, key)
            assert {edge.mode for rank in received for edge in rank.edges} == {mode}


@pytest.mark.parametrize("mode", ["packed", "direct"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_transport_carries(scheme, mode):
    with pair(*layouts(Parallel(tp=2), Parallel(tp=4)), mode=mode, transports=(scheme,)) as (source, target):
        received = [hand_over(source, target, key) for key in ("one", "two")]
        modes = {edge.mode for ranks in received for rank in ranks for edge in rank.edges}
        assert modes == {"packed" if scheme == "tcp" else mode}
        assert {edge.transport for ranks in received for rank in ranks for edge in rank.edges} == {scheme}


def test_data_comes_by_the_address_that_was_configured():
    reachable = {"allow_remote": True, "contact_host": "127.0.0.1"}
    config = {"listen": {"tcp": "tcp://0.0.0.0:0"}, "transport_options": {"tcp": reachable}}
    with pair(*layouts(Parallel(), Parallel()), transports=("tcp",), of_source=config) as (source, target):
        hand_over(source, target, "one")
        (listener,) = source.agents[0]._listeners
        assert not listener.contact_address.startswith("tcp://0.0.0.0")
    refused = AgentConfig(worker="w", transports=("tcp",), listen={"tcp": "tcp://0.0.0.0:0"})
    source, _ = layouts(Parallel(), Parallel())
    with Agent(refused) as agent:
        agent.attach(source, agent.allocate(source.ranks[0]))
        with pytest.raises(MisuseError, match="can be reached from other hosts"):
            agent.start()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_every_kernel_moves(kernel, mode):
    if kernel == "torch":
        require("torch")
    if kernel == "native" and not native_available():
        pytest.skip("pdxfer was built without a compiler")
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), mode=mode, kernel=kernel) as (source, target):
        hand_over(source, target, "one")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_of_the_engine_s_own(scheme):
    """Buffers that no transport allocated: read directly where that works, packed elsewhere."""
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), transports=(scheme,), own_memory=True) as (source, target):
        hand_over(source, target, "one")


def test_small_chunks_in_any_window():
    plan = layouts(Parallel(tp=2), Parallel(tp=4))
    for window in (1, 3, 32):
        with pair(*plan, mode="packed", chunk_bytes=4096, window=window) as (source, target):
            received = hand_over(source, target, "one", 400)
            assert max(edge.messages for rank in received for edge in rank.edges) > 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"window": 65},
        {"window": 0},
        {"kernel": "fast"},
        {"mode": "both"},
        {"lease_s": 0},
        {"lease_s": float("nan")},
        {"stall_s": float("inf")},
        {"transports": ("shm",), "listen": {"tcp": "tcp://127.0.0.1:0"}},
    ],
)
def test_a_configuration_that_can_t_work_is_refused(wrong):
    with pytest.raises(MisuseError, match=next(iter(wrong))):
        AgentConfig(worker="w", **wrong)


@pytest.mark.parametrize("first_token", [1, 8, 33, TOKENS])
def test_a_prefix_hit_leaves_earlier_rows_untouched(first_token):
    with pair(*layouts(Parallel(tp=2), Parallel(tp=4))) as (source, target):
        received = hand_over(source, target, "one", first_token=first_token)
        moved = sum(e.component_bytes["kv.k"] for r in received for e in r.edges if not e.relay)
        assert moved == (TOKENS - first_token) * 2 * 2 * 6 * 2


@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_ranks_that_want_different_rows_are_refused(mode):
    """Stripes of other rows: a sibling would be asked for rows that it has yet to get from another sibling."""
    with pair(*layouts(Parallel(tp=1), Parallel(tp=4)), mode=mode) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        fetches = [
            rank.agent.start_fetch(ticket, rank.tables["one"], first_token=first)
            for rank, first in zip(target.ranks, (0, 40, 0, 64), strict=True)
        ]
        for fetch in fetches:
            with pytest.raises(PdxferError):
                fetch.wait()
            assert fetch.state not in (State.READY, State.HANDED)
        assert any(type(f._cancel.error) is IncompatibleError for f in fetches)
        withdraw(source, "one", ends)


class LongWay(Tap):
    """As if what siblings wait for took longer to come than any lease."""

    def __init__(self) -> None:
        self.agents: list = []

    def received(self, message: Message) -> list[Message]:
        for agent in self.agents:
            for (relay, _), record in list(agent.source._records.items()):
                if relay and not record.ready.is_set():
                    record.offer.expires_s = 0.0
        return [message]


def test_a_share_is_leased_to_siblings_from_when_it_is_in():
    way = LongWay()
    with pair(*layouts(Parallel(tp=1), Parallel(tp=4)), of_target={"wrap": way.wrap}) as (source, target):
        way.agents = target.agents
        hand_over(source, target, "one")


def test_a_rank_that_gave_up_tells_a_sibling_that_asks():
    with pair(*layouts(Parallel(tp=1), Parallel(tp=4))) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        first, second = target.agents[:2]
        with pytest.raises(MisuseError, match="no page table"):
            first.fetch(ticket, {})
        with pytest.raises(AbortedError, match=r"this rank has given up: .*no page table"):
            second.fetch(ticket, target.ranks[1].tables["one"])
        withdraw(source, "one", ends)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t + 0.5, lambda t: [str(n) for n in t], lambda t: None, lambda t: t[None, :], lambda t: t > 0,
        lambda t: [1 << 70] * len(t), lambda t: 5, lambda t: set(t.tolist()),
    ],
    ids=["fractions", "texts", "nothing", "two dimensions", "flags", "huge", "one number", "a set"],
)  # fmt: skip
def test_what_is_no_page_table_is_refused(wrong):
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        tables = {name: wrong(table) for name, table in target.ranks[0].tables["one"].items()}
        with pytest.raises(MisuseError, match="is not a list of page numbers"):
            target.agents[0].fetch(ticket, tables)
        with pytest.raises(MisuseError, match="is not a list of page numbers"):
            target.agents[0].offer("two", tables, kv_tokens=TOKENS)
        target.fetch(ticket, "one")[0].release()


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_tokens": 70.0}, {"kv_tokens": True}, {"kv_tokens": None}, {"state_tokens": "7"}, {"sampled": (-1,)},
        {"sampled": (1 << 70,)}, {"sampled": range(20_000)}, {"transfer": ""}, {"transfer": "x" * 257},
        {"transfer": 5}, {"transfer": "\ud800"},
    ],
    ids=str,
)  # fmt: skip
def test_an_offer_that_no_ticket_can_carry_is_refused(wrong):
    with pair(*layouts(Parallel(), Parallel())) as (source, _):
        source.reserve("one", TOKENS)
        with pytest.raises(MisuseError):
            source.agents[0].offer(
                **{"transfer": "one", "tables": source.ranks[0].tables["one"], "kv_tokens": 70, **wrong}
            )


def test_counts_may_be_numpy_s():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        ticket = source.offer("one", np.int64(TOKENS), sampled=np.array([3, 4]))
        target.reserve("one", TOKENS)
        (received,) = target.fetch(ticket, "one", first_token=np.int32(3))
        assert (received.ticket.kv_tokens, received.ticket.sampled) == (TOKENS, (3, 4))
        received.release()


def test_a_timeout_that_never_passes_is_refused():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        with pytest.raises(MisuseError, match="timeout"):
            target.fetch(ticket, "one", timeout_s=float("nan"))
        withdraw(source, "one", ends)


@pytest.mark.parametrize("tokens", [0, 1, 16, 17])
def test_short_requests(tokens):
    with pair(*layouts(Parallel(tp=2), Parallel(tp=4))) as (source, target):
        hand_over(source, target, "one", tokens)


def test_sources_that_have_nothing_to_give_are_told_too():
    """Five ranks hold the same rows of one token: four send nothing, and their pages are free as soon."""
    spec = hybrid_spec()
    spec = replace(spec, components=tuple(c for c in spec.components if c.name == "latent"))
    with pair(*layouts(Parallel(tp=5), Parallel(tp=2), spec=spec)) as (source, target):
        received = hand_over(source, target, "one", 1)
        network = [e for rank in received for e in rank.edges if not e.relay]
        assert {e.source for e in network} == set(range(5))
        assert sum(1 for e in network if e.messages == 0) > 0


def test_a_rank_that_gets_everything_from_siblings():
    """One state, whole on every rank: it crosses to one rank, and the others have no edge to the source at all."""
    spec = hybrid_spec()
    whole = Ownership(rule=Rule.REPLICATED)
    state = replace(spec["S"], layers=(0,), ownership=whole)
    with pair(*layouts(Parallel(), Parallel(tp=3), spec=replace(spec, components=(state,)))) as (source, target):
        received = hand_over(source, target, "one")
        assert sum(1 for rank in received if all(edge.relay for edge in rank.edges)) == 2


def test_what_the_engine_said_travels():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        (received,) = hand_over(source, target, "one", state_tokens=TOKENS - 1, sampled=(5, 7))
        ticket = received.ticket
        assert (ticket.kv_tokens, ticket.state_tokens, ticket.sampled) == (TOKENS, TOKENS - 1, (5, 7))


def test_a_conversion_both_sides_agreed_to():
    agreed = {"accepts": ("float32", "bfloat16")}
    one = Storage(state_dtype="float32", **agreed)
    two = Storage(state_dtype="bfloat16", page_tokens=8, pages=256, **agreed)
    for parallel in (Parallel(tp=1), Parallel(tp=4)):
        plan = layouts(Parallel(tp=2), parallel, source_storage=one, target_storage=two)
        with pair(*plan) as (source, target):
            received = hand_over(source, target, "one")
            converted = [e for rank in received for e in rank.edges if e.component_bytes["S"] and not e.relay]
            assert {edge.mode for edge in converted} == {"packed"}


def test_a_conversion_only_one_side_agreed_to_is_refused():
    one, two = Storage(state_dtype="float32", accepts=("bfloat16",)), Storage(state_dtype="bfloat16")
    plan = layouts(Parallel(tp=2), Parallel(tp=2), source_storage=one, target_storage=two)
    with pair(*plan) as (source, target):
        error = fails(source, target, IncompatibleError)
        assert (error.component, error.field, error.source, error.target) == ("S", "dtype", "float32", "bfloat16")


def test_another_model_is_refused_by_component_and_field():
    one = build_layout(hybrid_spec(), Parallel(tp=2), Storage(), "per_layer")
    two = build_layout(hybrid_spec(width=5), Parallel(tp=2), Storage(), "per_layer")
    with pair(one, two) as (source, target):
        error = fails(source, target, IncompatibleError)
        assert error.component in ("S", "kv.k", "kv.v", "latent")
        assert "axes" in error.field
        assert error.source != error.target


# ---------------------------------------------------------------- what it costs


def test_two_calls_per_edge_once_peers_know_each_other():
    with pair(*layouts(Parallel(tp=4), Parallel(tp=2))) as (source, target):
        hand_over(source, target, "first")
        for agent in source.agents + target.agents:
            agent.calls.clear()
        received = hand_over(source, target, "second")
        edges = [edge for rank in received for edge in rank.edges]
        network, relays = (sum(e.relay == relay for e in edges) for relay in (False, True))
        assert network > 4
        assert _calls(source) == {"open": network, "complete": network}
        # A sibling asks again until this rank's own share is in; no call but these.
        calls = _calls(target)
        assert calls["complete"] == relays > 0
        assert calls["open"] >= relays
        assert set(calls) == {"open", "complete"}


def _calls(worker: Worker) -> Counter[str]:
    return sum((agent.calls for agent in worker.agents), start=Counter())


@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_few_messages(mode):
    with pair(
        *layouts(Parallel(tp=4), Parallel(tp=2)), mode=mode, chunk_bytes=8 << 20, arena_bytes=16 << 20
    ) as workers:
        received = hand_over(*workers, "one", 250)
        for edge in (edge for rank in received for edge in rank.edges):
            assert edge.messages <= edge.payload_bytes // MIB4 + 1


def test_every_byte_of_the_network_is_counted_once():
    """Fan-out: what several ranks of a host need crosses once."""
    with pair(*layouts(Parallel(tp=1), Parallel(tp=4))) as (source, target):
        received = hand_over(source, target, "one")
        moved = sum(e.component_bytes["latent"] for r in received for e in r.edges if not e.relay)
        relayed = sum(e.component_bytes["latent"] for r in received for e in r.edges if e.relay)
        unique = TOKENS * 2 * 8 * 2
        assert (moved, relayed) == (unique, 3 * unique)


def _channels(worker: Worker) -> int:
    return sum(len(idle) for agent in worker.agents for idle in agent.peers._idle.values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_channels_are_used_again_and_a_dead_one_is_survived(scheme):
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), transports=(scheme,)) as (source, target):
        hand_over(source, target, "one")
        assert _channels(target) == 2
        hand_over(source, target, "two")
        assert _channels(target) == 2
        threads = [t for agent in source.agents for t in agent._threads if "serve" in t.name and t.is_alive()]
        assert len(threads) == 2
        peers = target.agents[0].peers
        idle = [kept for channels in peers._idle.values() for kept in channels]
        assert {kept.uses for kept in idle} == {2}
        # The source's ends die without the target's looking: as when the path between them broke while idle.
        for agent in source.agents:
            _close_served(agent)
        for thread in threads:
            thread.join(60.0)
        hand_over(source, target, "three")
        assert _channels(target) == 2


def _close_served(agent) -> None:
    """Close the channels that this agent serves, behind its back."""
    for transport in agent.transports.values():
        for thing in list(transport._owned):
            if hasattr(thing, "send_all") and not thing.closed:
                thing.close()


# ---------------------------------------------------------------- when decode may begin


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


# ---------------------------------------------------------------- refusals


def test_a_ticket_is_used_once():
    with pair(*layouts(Parallel(tp=2), Parallel(tp=4))) as (source, target):
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        for done in target.fetch(ticket, "one"):
            done.release()
        before = target.memory("one").copy()
        with pytest.raises((TicketError, StaleError)) as caught:
            target.fetch(ticket, "one")
        assert caught.value.reason in ("TICKET_USED", "TRANSFER_ENDED")
        for mine, old in zip(target.memory("one").buffers, before.buffers, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, old, strict=True))


def test_one_rank_s_second_use_is_refused_while_the_others_have_not_fetched():
    with pair(*layouts(Parallel(tp=1), Parallel(tp=2, ranks_per_host=1))) as (source, target):
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        first, second = target.ranks
        first.agent.fetch(ticket, first.tables["one"]).release()
        with pytest.raises(TicketError) as caught:
            first.agent.fetch(ticket, first.tables["one"])
        assert caught.value.reason == "TICKET_USED"
        second.agent.fetch(ticket, second.tables["one"]).release()


def test_the_same_fetch_twice_at_once_is_refused():
    """The same pages can't be written by two."""
    gate = Gate("receive")
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = gate.wrap(agent.transports["memory"])
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        (fetch,) = target.start(ticket, "one")
        with gate.closed(), pytest.raises(MisuseError, match="receiving"):
            target.start(ticket, "one")
        fetch.wait().release()


def test_an_edited_ticket_is_refused_and_the_right_one_still_works():
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1))) as (source, target):
        right = Ticket.decode(source.offer("one", TOKENS))
        target.reserve("one", TOKENS)
        edits = {
            replace(right, sampled=(1,)): TicketError,
            replace(right, state_tokens=TOKENS + 1): TicketError,
            replace(right, kv_tokens=TOKENS - 1): TicketError,
            replace(right, transfer="two"): TicketError,
            replace(right, worker="Q"): PeerError,
            replace(right, layout_digest="0" * 64): StaleError,
            replace(right, ranks=right.ranks[:1]): StaleError,
        }
        for edited, expected in edits.items():
            with pytest.raises(expected):
                target.fetch(edited.encode(), "one")
            target.check_idle()
        for done in target.fetch(right.encode(), "one"):
            done.release()


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        ({"nonce": bytes(16)}, TicketError),
        ({"seal": bytes(32)}, TicketError),
        ({"epoch": bytes(16)}, StaleError),
        ({"address": "nowhere"}, PeerError),
        ({"address": "unix:///nowhere/at/all.sock"}, PeerError),
    ],
)
def test_one_rank_s_part_edited(edit, expected):
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1))) as (source, target):
        ends = Ends()
        right = Ticket.decode(source.offer("one", TOKENS, on_end=ends))
        target.reserve("one", TOKENS)
        for edited in (replace(right.ranks[1], **edit), replace(right.ranks[1], address=right.ranks[0].address)):
            with pytest.raises((expected, PeerError)):
                target.fetch(replace(right, ranks=(right.ranks[0], edited)).encode(), "one")
            target.check_idle()
        withdraw(source, "one", ends)


def test_token_counts_of_an_edited_ticket_are_no_sizes():
    """A ticket is checked by its source; what it says before that must not be used to allocate memory."""
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        right = Ticket.decode(source.offer("one", TOKENS))
        target.reserve("one", TOKENS)
        for kv_tokens in (1 << 40, 1 << 63, (1 << 64) - 1):
            with pytest.raises(MisuseError, match=r"page table|impossible"):
                target.fetch(replace(right, kv_tokens=kv_tokens).encode(), "one")
        source.agents[0].withdraw("one")


def test_wrong_page_tables_are_refused_before_anything_moves():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        ticket = source.offer("good", TOKENS)
        for worker in (source, target):
            good = worker.reserve("bad", TOKENS).tables[0]
            paged = next(name for name, table in good.items() if len(table) > 1)

            def try_it(tables, worker=worker):
                if worker is source:
                    worker.agents[0].offer("bad", tables, kv_tokens=TOKENS)
                else:
                    worker.agents[0].fetch(ticket, tables)

            wrong = {
                "page table": [
                    {**good, paged: good[paged][:-1]},
                    {**good, paged: [*good[paged][:-1], 1 << 40]},
                    {**good, paged: [-1, *good[paged][1:]]},
                    {name: table for name, table in good.items() if name != paged},
                ]
            }
            if worker is target:
                wrong["twice"] = [{**good, paged: [good[paged][1], *good[paged][1:]]}]
            for match, tables in wrong.items():
                for table in tables:
                    with pytest.raises(MisuseError, match=match):
                        try_it(table)
            worker.ranks[0].agent.check_integrity()
        for done in target.fetch(ticket, "bad"):
            done.release()


def test_pages_under_a_lease_can_be_offered_again_but_not_written():
    with pair(*layouts(Parallel(), Parallel(), target_storage=Storage())) as (source, target):
        source.offer("one", TOKENS)
        tables = source.ranks[0].tables["one"]
        other = source.agents[0].offer("shares a prefix", tables, kv_tokens=TOKENS)
        ticket = target.offer("two", TOKENS)
        with pytest.raises(MisuseError, match="leased"):
            source.agents[0].fetch(ticket, tables)
        target.agents[0].withdraw("two")
        source.agents[0].withdraw("one")
        target.reserve("other", TOKENS)
        for done in target.fetch(other.encode(), "other"):
            done.release()


def test_an_id_is_offered_once():
    with pair(*layouts(Parallel(), Parallel())) as (source, _):
        source.offer("one", TOKENS)
        with pytest.raises(MisuseError, match="offered before"):
            source.agents[0].offer("one", source.ranks[0].tables["one"], kv_tokens=TOKENS)
        source.agents[0].withdraw("one")


def test_a_fence_is_awaited_once_and_by_the_reader():
    with pair(*layouts(Parallel(), Parallel(tp=2))) as (source, target):
        awaited, go = [], threading.Event()

        def fence() -> None:
            awaited.append(threading.current_thread())
            assert go.wait(10)

        ends = Ends()
        ticket = source.offer("one", TOKENS, fence=fence, on_end=ends)  # returns though the device is busy
        assert not awaited
        target.reserve("one", TOKENS)
        threading.Timer(0.05, go.set).start()
        for done in target.fetch(ticket, "one"):
            done.release()
        assert len(awaited) == 1
        assert awaited[0] is not threading.main_thread()
        ends.wait(1)
        assert ends.outcomes == ["completed"]


def test_a_fence_that_fails_ends_the_transfer_at_both_ends():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):

        def fence() -> None:
            raise RuntimeError("the device is gone")

        ends = Ends()
        ticket = source.offer("one", TOKENS, fence=fence, on_end=ends)
        target.reserve("one", TOKENS)
        with pytest.raises(AbortedError, match="device is gone"):
            target.fetch(ticket, "one")
        ends.wait(1)
        assert ends.outcomes[0].startswith("aborted: the fence failed")
        source.check_idle()
        hand_over(source, target, "two")


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


def opening(source: Worker, target: Worker, text: str, **changes) -> Open:
    """The Open that target rank 0 sends source rank 0, with changes."""
    right = Open(
        transfer=Ticket.decode(text).transfer,
        ticket=text.encode(),
        epoch=target.agents[0].epoch,
        source_epoch=source.agents[0].epoch,
        target_worker="D",
        target_rank=0,
        layout_digest=target.layout.digest,
        plan_digest=make_plan(source.layout, target.layout).digest,
        first_token=0,
        relay=False,
        transport=source.agents[0]._listeners[0].contact_address,
        mode=Mode.PACKED,
        chunk_bytes=4096,
    )
    return replace(right, **changes)


def test_what_a_target_may_not_ask():
    """Control calls made by hand, as by a peer that breaks the rules."""
    with pair(*layouts(Parallel(), Parallel(tp=2, ranks_per_host=1))) as (source, target):
        hand_over(source, target, "before")
        ends = Ends()
        ticket, other = source.offer("one", TOKENS, on_end=ends), source.offer("two", TOKENS)
        wrong = {
            StaleError: [{"source_epoch": bytes(16)}, {"layout_digest": "0" * 64}, {"transfer": "two"}],
            TicketError: [{"ticket": b"nonsense"}, {"target_rank": 2}],
            IncompatibleError: [{"plan_digest": "0" * 64}],
            MisuseError: [{"first_token": TOKENS + 1}, {"transport": "pigeon://loft"}],
            ExhaustedError: [{"relay": True}],
        }
        with ControlClient(source.agents[0].address) as client:
            for expected, changes in wrong.items():
                for change in changes:
                    with pytest.raises(expected):
                        client.open(opening(source, target, ticket, **change))
            opened = client.open(opening(source, target, ticket))
            about = {"transfer": "one", "epoch": bytes(16), "target_worker": "D", "target_rank": 0}
            about["session"] = opened.session
            done = {**about, "source_epoch": source.agents[0].epoch, "payload_bytes": 0}
            done["generation"] = opened.generation
            for expected, change in [(StaleError, {"session": bytes(16)}), (StaleError, {"transfer": "two"}),
                                     (StaleError, {"source_epoch": bytes(16)}), (TicketError, {"target_rank": 1}),
                                     (StaleError, {"generation": opened.generation + 1})]:  # fmt: skip
                with pytest.raises(expected):
                    client.complete(Complete(**{**done, **change}))
            with pytest.raises(StaleError):
                client.renew(Renew(**{**about, "session": bytes(16)}))
            assert client.renew(Renew(**about)).lease_s == 30.0
            assert client.abort(Abort(**{**about, "session": b""}, reason="stranger")).state == "unknown"
            assert not ends.outcomes
            assert client.abort(Abort(**about, reason="enough")).state.startswith("aborted")
            assert client.abort(Abort(**about, reason="again")).state.startswith("aborted")
            ends.wait(1)
            again = client.open(opening(source, target, other))
            done |= {"transfer": "two", "session": again.session, "generation": again.generation}
            states = [client.complete(Complete(**done)).state for _ in range(2)]
            last = client.open(opening(source, target, other, target_rank=1))
            done |= {"target_rank": 1, "session": last.session}
            states += [client.complete(Complete(**done)).state for _ in range(3)]
            assert states == ["leased"] * 2 + ["completed"] * 3, "repeated calls get the same answer"


def test_only_siblings_with_the_ticket_get_a_fan_out():
    gate, spec = Gate("receive"), hybrid_spec()
    spec = replace(spec, components=tuple(c for c in spec.components if c.name == "latent"))
    with pair(*layouts(Parallel(), Parallel(tp=2), spec=spec), mode="packed") as (source, target):
        reader, giver = target.agents
        reader.transports["memory"] = gate.wrap(reader.transports["memory"])
        ticket, other = source.offer("one", 1), source.offer("two", 1)
        target.reserve("one", 1)
        fetches = target.start(ticket, "one")
        with gate.closed(), ControlClient(giver.address) as client:
            for change in ({"target_worker": "E"}, {"ticket": other.encode()}, {"ticket": b""}):
                message = opening(source, target, ticket, relay=True, source_epoch=giver.epoch, **change)
                with pytest.raises(TicketError, match="sibling"):
                    client.open(message)
        for done in settle(fetches):
            done.release()
        for agent in source.agents:
            agent.withdraw("two")


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        ({"chunks": 1 << 10}, IncompatibleError),
        ({"payload_bytes": 1}, IncompatibleError),
        ({"epoch": bytes(16)}, StaleError),
        ({"session": bytes(16)}, TicketError),
        ({"generation": 1 << 30}, CorruptError),
        ({"mode": Mode.DIRECT}, PeerError),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value.__name__,
)
def test_a_source_that_lies_about_what_it_opened(lie, expected):
    with pair(*layouts(Parallel(), Parallel()), mode="packed") as (source, target):
        liar = source.agents[0].source
        honest = liar.open
        liar.open = lambda *asked: replace(honest(*asked), **lie)
        fails(source, target, expected, timeout_s=5.0)
        liar.open = honest
        hand_over(source, target, "again")


# ---------------------------------------------------------------- leases


def test_an_expired_lease_frees_the_pages_and_refuses_the_ticket():
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), of_source={"lease_s": 0.2}) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        ends.wait(2)
        assert {outcome.partition(":")[0] for outcome in ends.outcomes} == {"expired"}
        source.check_idle()
        target.reserve("one", TOKENS)
        with pytest.raises(StaleError) as caught:
            target.fetch(ticket, "one")
        assert caught.value.reason in ("LEASE_EXPIRED", "TRANSFER_ENDED")


def test_a_slow_reader_renews():
    """The move takes three leases; the target keeps asking for time."""
    plan = layouts(Parallel(), Parallel())
    with pair(*plan, of_source={"lease_s": 0.6}, mode="packed", chunk_bytes=4096, window=1) as (source, target):
        agent = target.agents[0]
        faults = FaultPlan.of(*[Fault(kind="delay", at=at, delay_s=0.3) for at in range(6)])
        agent.transports["memory"] = slow = FaultyTransport(agent.transports["memory"], faults)
        hand_over(source, target, "one", 400)
        assert len(slow.fired) == 6
        assert source.agents[0].calls["renew"] >= 3


def test_a_lease_that_ends_in_the_middle_ends_the_transfer():
    gate = Gate("receive")
    with pair(
        *layouts(Parallel(), Parallel()), of_source={"lease_s": 0.3}, mode="packed", chunk_bytes=4096, window=1
    ) as (
        source,
        target,
    ):
        agent = target.agents[0]
        agent.transports["memory"] = gate.wrap(agent.transports["memory"])
        ended = threading.Event()
        ticket = source.offer("one", 400, on_end=lambda *_: ended.set())
        target.reserve("one", 400)
        (fetch,) = target.start(ticket, "one")
        with gate.closed():
            assert ended.wait(60.0)
            source.check_idle()
        with pytest.raises((StaleError, TransportError, TicketError)):
            fetch.wait()
        assert fetch.state is State.FREE


# ---------------------------------------------------------------- damage on the way


@contextmanager
def damaged(mode: str, *faults: Fault, **config) -> Iterator[tuple[Worker, Worker, FaultyTransport]]:
    """Two workers; the target's transport damages what it receives."""
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), mode=mode, chunk_bytes=4096, **config) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = faulty = FaultyTransport(agent.transports["memory"], FaultPlan.of(*faults))
        yield source, target, faulty


@pytest.mark.parametrize("mode", ["packed", "direct"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_flipped_bit_is_found_and_its_component_named(mode, at):
    with damaged(mode, Fault(kind="corrupt", at=at, on="payload" if mode == "packed" else "read")) as workers:
        source, target, faulty = workers
        error = fails(source, target, CorruptError, match="digest")
        assert faulty.fired
        assert error.component in [c.name for c in source.layout.spec.components]
        faulty.plan = FaultPlan.of()
        hand_over(source, target, "again")


def test_a_truncated_payload_is_found():
    with damaged("packed", Fault(kind="truncate", at=1)) as (source, target, faulty):
        assert fails(source, target, CorruptError, match="bytes").component != "*"
        assert faulty.fired


def test_a_dropped_message_ends_with_the_deadline():
    with damaged("packed", Fault(kind="drop", at=0)) as (source, target, faulty):
        fails(source, target, DeadlineError, timeout_s=0.5)
        assert faulty.fired


def test_a_broken_channel_is_a_transport_error():
    with damaged("packed", Fault(kind="disconnect", at=1)) as (source, target, faulty):
        fails(source, target, TransportError)
        assert faulty.fired


def test_without_digests_the_flipped_bit_is_not_found():
    """The control experiment: it is the digest that finds it."""
    with damaged("packed", Fault(kind="corrupt", at=0), digests=False) as (source, target, faulty):
        ticket = source.offer("one", TOKENS)
        before = target.reserve("one", TOKENS).copy()
        for done in target.fetch(ticket, "one"):
            done.release()
        assert faulty.fired
        with pytest.raises(CorruptError):
            Oracle.of(source.layout, key="one", tokens=TOKENS).check(target.memory("one"), before)


@pytest.mark.parametrize("trick", ["twice", "unasked", "beyond", "other session", "no digests", "no data", "swapped"])
def test_frames_that_the_protocol_does_not_have_are_refused(trick):
    with pair(*layouts(Parallel(), Parallel()), mode="packed", chunk_bytes=4096) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = Trickster(trick).wrap(agent.transports["memory"])
        error = fails(source, target, PdxferError)
        assert isinstance(error, CorruptError if trick == "swapped" else PeerError)


class Trickster(Tap):
    """Makes a source's data frames wrong on their way to the target."""

    def __init__(self, trick: str) -> None:
        self.trick, self.kept = trick, b""

    def received(self, message: Message) -> list[Message]:
        frame = wire.decode(message.header)
        if not isinstance(frame, wire.Data):
            return [message]
        payload = bytes(message.payload)
        message.release()
        if self.trick == "twice":
            return [_message(frame, payload), _message(frame, payload)]
        if self.trick == "unasked":
            return [_message(replace(frame, chunk=frame.chunk + 3), payload)]
        if self.trick == "beyond":
            return [_message(replace(frame, chunk=1 << 40), payload)]
        if self.trick == "other session":
            return [_message(replace(frame, session=bytes(16)), payload)]
        if self.trick == "no digests":
            return [_message(replace(frame, digests=[]), payload)]
        if self.trick == "no data":
            return [Message(wire.encode(wire.Done(frame.session)), memoryview(b""))]
        # Swapped: every chunk comes with the payload of the one before it, cut or padded to fit.
        other, self.kept = self.kept or bytes(len(payload)), payload
        return [_message(frame, other[: len(payload)].ljust(len(payload), b"x"))]


def _message(frame: wire.Frame, payload: bytes) -> Message:
    return Message(wire.encode(frame), memoryview(payload))


def test_an_arena_that_is_too_small_for_a_chunk_is_said_at_once():
    small = {"arena_bytes": 8192, "chunk_bytes": 8192}
    with pair(*layouts(Parallel(), Parallel()), mode="packed", of_source=small) as (source, target):
        error = fails(source, target, ExhaustedError, match="arena of 8192 B")
        assert "chunk_bytes" in error.hint


def test_a_full_arena_is_said_in_time():
    small = {"arena_bytes": 8192, "chunk_bytes": 8192, "stall_s": 0.2}
    plan = layouts(Parallel(), Parallel())
    with pair(*plan, mode="packed", of_source=small, of_target={"chunk_bytes": 4096}) as (source, target):
        arena = source.agents[0].memory.arena("memory")
        held = arena.allocate(8192, timeout_s=0.0, reap=lambda: None)
        fails(source, target, ExhaustedError, match="at the source")
        arena.free(held)
        hand_over(source, target, "again")


# ---------------------------------------------------------------- the end


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
            with pytest.raises((StaleError, TransportError, PeerError, AbortedError)):
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


def test_an_agent_is_used_in_order():
    plan = layouts(Parallel(), Parallel())
    with pair(*plan) as (source, _):
        agent = source.agents[0]
        with pytest.raises(MisuseError):
            agent.attach(plan[0], [])
    with pytest.raises(MisuseError, match="no transport for scheme"):
        Worker(plan[0], transports=("pigeon",))


def test_a_kept_ticket_outlives_its_lease_and_a_declined_one_is_freed_at_once():
    with pair(*layouts(Parallel(tp=2), Parallel()), lease_s=0.3) as (source, target):
        kept, declined, left = Ends(), Ends(), Ends()
        agent = target.agents[0]
        tickets = {name: source.offer(name, TOKENS, on_end=end) for name, end in
                   [("kept", kept), ("declined", declined), ("left", left)]}  # fmt: skip
        agent.keep(tickets["kept"])
        agent.keep(tickets["declined"])
        agent.decline(tickets["declined"], "not needed")
        declined.wait(2)
        assert all(outcome.startswith("declined by") for outcome in declined.outcomes)
        left.wait(2)  # its lease was over; the kept one is as old
        assert all(outcome.startswith("expired") for outcome in left.outcomes)
        target.reserve("kept", TOKENS)
        for done in target.fetch(tickets["kept"], "kept"):
            done.release()
        kept.wait(2)
        assert kept.outcomes == ["completed", "completed"]
        assert agent.keeper.kept() == 0


def test_nobody_keeps_a_ticket_for_longer_than_the_source_allows():
    with pair(*layouts(Parallel(), Parallel()), lease_s=0.2, hold_max_s=0.5) as (source, target):
        ends = Ends()
        target.agents[0].keep(source.offer("one", TOKENS, on_end=ends))
        ends.wait(1)
        assert ends.outcomes == ["expired: the lease is over"]


def test_a_dead_source_s_ticket_does_not_delay_another_s_lease():
    with pair(*layouts(Parallel(), Parallel()), lease_s=0.4) as (source, target):
        ends = Ends()
        right = Ticket.decode(source.offer("one", TOKENS, on_end=ends))
        agent = target.agents[0]
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))
            deaf.listen()
            for n in range(3):
                nowhere = replace(right.ranks[0], address=f"tcp://127.0.0.1:{deaf.getsockname()[1]}")
                agent.keep(replace(right, transfer=f"nowhere-{n}", ranks=(nowhere,)))
            agent.keep(right)
            assert not wait_until(lambda: ends.outcomes, timeout_s=1.0)
        target.reserve("one", TOKENS)
        for done in target.fetch(right.encode(), "one"):
            done.release()


@pytest.mark.parametrize("edit", [{"nonce": bytes(16)}, {"seal": bytes(32)}])
def test_only_the_ticket_itself_renews_or_declines(edit):
    with pair(*layouts(Parallel(), Parallel()), lease_s=0.3) as (source, target):
        ends = Ends()
        right = Ticket.decode(source.offer("one", TOKENS, on_end=ends))
        wrong = replace(right, ranks=(replace(right.ranks[0], **edit),))
        target.agents[0].keep(wrong)
        assert wait_until(lambda: target.agents[0].keeper.kept() == 0, timeout_s=10.0)
        target.agents[0].decline(wrong, "mine")
        ends.wait(1)
        assert ends.outcomes == ["expired: the lease is over"]


def test_a_ticket_of_an_earlier_offer_of_the_same_id_is_stale():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        ends = Ends()
        right = Ticket.decode(source.offer("one", TOKENS, on_end=ends))
        issuer = source.agents[0].issuer
        facts = {"kv_tokens": TOKENS, "state_tokens": TOKENS}
        assert issuer.issue("one", nonce=right.ranks[0].nonce, **facts) == right
        target.reserve("one", TOKENS)
        with pytest.raises(StaleError, match="earlier offer"):
            target.fetch(issuer.issue("one", nonce=bytes(16), **facts).encode(), "one")
        withdraw(source, "one", ends)
