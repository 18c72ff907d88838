"""Agents of two workers in one process: every byte arrives, every page comes back, and it costs few calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import MisuseError
from pdxfer.layout import Layout
from pdxfer.packing import KERNELS, native_available
from pdxfer.spec import Ownership, Rule
from tests.conftest import require
from tests.pairs import SCHEMES, TOKENS, hand_over, pair
from tests.workers import Worker, hybrid_spec, layouts

MIB4 = 4 << 20


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
    reachable = {"insecure": True, "contact_host": "127.0.0.1"}
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
    if kernel in ("torch", "triton"):  # triton's is for devices: on the host it is torch's
        require("torch")
    if kernel == "native" and not native_available():
        pytest.skip("pdxfer was built without a compiler")
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), mode=mode, kernel=kernel) as (source, target):
        hand_over(source, target, "one")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("memory", ["numpy", "torch"])
def test_memory_of_the_engine_s_own(memory, scheme):
    """Buffers and tensors that no transport allocated: read directly if asked to and able, else packed (short runs)."""
    if memory == "torch":
        require("torch")
    for mode, packs in (("direct", ("tcp",)), ("auto", ("tcp", "shm"))):
        config = {"transports": (scheme,), "own_memory": memory, "mode": mode}
        with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), **config) as (source, target):
            received = hand_over(source, target, "one")
            used = {edge.mode for rank in received for edge in rank.edges}
            assert used == {"packed" if scheme in packs else "direct"}


def nested(layout: Layout, pieces: int) -> Layout:
    """As vLLM lies on the CPU: layer after layer, and attention in kernel pages, so many to a block of state."""
    ranks = []
    for rank in layout.ranks:
        holdings = []
        for h in rank.holdings:
            block = h.page_stride // 2  # of one layer; two share a page
            offsets = tuple(o // block * block * h.pages + o % block for o in h.offsets)
            n = pieces if h.page_rows > 1 else 1
            holdings.append(
                replace(h, offsets=offsets, page_rows=h.page_rows // n, page_stride=block // n, pages=h.pages * n)
            )
        ranks.append(replace(rank, holdings=tuple(holdings)))
    return replace(layout, ranks=tuple(ranks))


def nested_pair() -> tuple[Layout, Layout]:
    spec = hybrid_spec()
    spec = replace(spec, components=tuple(c for c in spec.components if c.name != "latent"))
    storages = Storage(kv_packed=True, page_tokens=16), Storage(kv_packed=True, page_tokens=8, pages=256)
    one, two = (build_layout(spec, Parallel(tp=tp), s, "unified") for tp, s in zip((2, 1), storages, strict=True))
    return nested(one, 4), nested(two, 2)


def test_kernel_pages_inside_blocks_arrive():
    source, target = nested_pair()
    assert {*source.ranks[0].pages_per_unit().values()} == {1, 4}
    assert {*target.ranks[0].pages_per_unit().values()} == {1, 2}
    with pair(source, target) as workers:
        for key in ("one", "two"):
            hand_over(*workers, key)


def test_a_block_is_in_one_table_whatever_its_pages_are_called():
    """Two kernel pages to a block: state's page 5 is attention's 10 and 11, and not attention's 5."""
    _, layout = nested_pair()
    with pair(layout, layout) as (source, target):
        ticket, state, (agent,) = source.offer("one", 3), {"state.0": [5], "state.1": [7]}, target.agents
        with pytest.raises(MisuseError, match=r"'kv.0' and 'state.0' names page 5 twice"):
            agent.fetch(ticket, {**state, "kv.0": [11]})
        received = agent.fetch(ticket, {**state, "kv.0": [5]})
        elsewhere = {"state.0": [3], "state.1": [4]}
        with pytest.raises(MisuseError, match=r"page 5 of 'state.0' is handed"):
            agent.offer("two", {**elsewhere, "kv.0": [10]}, kv_tokens=3)
        agent.offer("two", {**elsewhere, "kv.0": [12]}, kv_tokens=3)
        agent.withdraw("two")
        received.release()


def test_no_page_is_none_that_two_tables_name():
    """All rows are here, so each table may say -1 for its only page."""
    spec = hybrid_spec()
    swapped = {(0, 1, 3, 4): (0, 3), (2, 5): (1, 2, 4, 5)}  # twice as many layers that grow: two tables of one pool
    spec = replace(spec, components=tuple(replace(c, layers=swapped[c.layers]) for c in spec.components))
    layout = build_layout(spec, Parallel(), Storage(page_tokens=8), "unified")
    with pair(layout, layout) as (source, target):
        ticket = source.offer("one", 8)
        target.agents[0].fetch(ticket, {"kv.0": [-1], "kv.1": [-1], "state.0": [3]}, first_token=8).release()


def test_small_chunks_in_any_window():
    plan = layouts(Parallel(tp=2), Parallel(tp=4))
    for window in (1, 3, 32):
        with pair(*plan, mode="packed", chunk_bytes=4096, window=window) as (source, target):
            received = hand_over(source, target, "one", 400)
            assert max(edge.messages for rank in received for edge in rank.edges) > 2


@pytest.mark.parametrize("first_token", [1, 8, 33, TOKENS])
def test_a_prefix_hit_leaves_earlier_rows_untouched(first_token):
    with pair(*layouts(Parallel(tp=2), Parallel(tp=4))) as (source, target):
        received = hand_over(source, target, "one", first_token=first_token)
        moved = sum(e.component_bytes["kv.k"] for r in received for e in r.edges if not e.relay)
        assert moved == (TOKENS - first_token) * 2 * 2 * 6 * 2


def test_counts_may_be_numpy_s():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        ticket = source.offer("one", np.int64(TOKENS), sampled=np.array([3, 4]))
        target.reserve("one", TOKENS)
        (received,) = target.fetch(ticket, "one", first_token=np.int32(3))
        assert (received.ticket.kv_tokens, received.ticket.sampled) == (TOKENS, (3, 4))
        received.release()


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


def test_one_call_per_edge_once_peers_know_each_other():
    """The channel itself says that all is in: Complete is for when it breaks."""
    with pair(*layouts(Parallel(tp=4), Parallel(tp=2))) as (source, target):
        hand_over(source, target, "first")
        for agent in source.agents + target.agents:
            agent.calls.clear()
        received = hand_over(source, target, "second")
        edges = [edge for rank in received for edge in rank.edges]
        network, relays = (sum(e.relay == relay for e in edges) for relay in (False, True))
        assert network > 4
        assert _calls(source) == {"open": network}
        # A sibling asks again until this rank's own share is in; no call but these.
        calls = _calls(target)
        assert calls["open"] >= relays > 0
        assert set(calls) == {"open"}


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
