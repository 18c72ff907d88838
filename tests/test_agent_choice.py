"""Which transport and mode, and why: estimates from rates, rates from this machine, and one warning per slow path."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, replace
from types import SimpleNamespace

import pytest

from pdxfer.agent import Agent, AgentConfig, service
from pdxfer.agent import peers as peers_module
from pdxfer.agent.choice import LinkRates, Rates, Work, estimates, pick, preference
from pdxfer.agent.peers import Layouts, Peers
from pdxfer.agent.probe import link_rates, memory_rates
from pdxfer.builders import Parallel
from pdxfer.errors import MisuseError
from pdxfer.packing import EdgeProgram
from pdxfer.pages import RequestShape
from pdxfer.plan import Edge, make_plan
from pdxfer.transport import create_transport
from tests.conftest import require
from tests.pairs import TOKENS, hand_over, pair
from tests.workers import Worker, hybrid_spec, layouts

RATES = Rates(copy_byte_s=1e-10, copy_run_s=1e-8, digest_byte_s=0.4e-10)
SHM = LinkRates(byte_s=0.0, message_s=5e-5, read_byte_s=0.5e-10, read_run_s=5e-7)
TCP = LinkRates(byte_s=4e-10, message_s=1e-4)
SIZE = 64 << 20


def work(run: int, chunk: int = 8 << 20) -> Work:
    return Work(SIZE, SIZE // run, chunk)


def quickest(found: dict[str, float]) -> str:
    return min(found, key=lambda mode: found[mode])


def test_one_copy_of_mapped_pages_beats_two():
    for run in (64, 4096, 1 << 20):
        assert quickest(estimates(work(run), RATES, SHM, direct=True)) == "direct"
    assert set(estimates(work(4096), RATES, TCP, direct=False)) == {"packed"}


def test_short_runs_are_packed_and_long_ones_are_read():
    found = [estimates(work(run), RATES, SHM, direct=True, mapped=False) for run in (256, 4096, 1 << 20)]
    assert [*map(quickest, found)] == ["packed", "packed", "direct"]
    forbidden = replace(SHM, read_byte_s=math.inf, read_run_s=math.inf)
    assert quickest(estimates(work(1 << 20), RATES, forbidden, direct=True, mapped=False)) == "packed"


def test_a_pipeline_costs_its_slowest_stage_and_once_the_others():
    one = estimates(Work(8 << 20, 0, 8 << 20), RATES, TCP, direct=False)["packed"]
    gather, wire = (8 << 20) * 1e-10, (8 << 20) * 4e-10 + 1e-4
    assert one == pytest.approx(2 * gather + wire)
    assert estimates(work(1 << 40), RATES, TCP, direct=False)["packed"] == pytest.approx(2 * gather + 8 * wire)


def test_the_preferred_is_taken_unless_it_is_really_slower():
    assert pick({"shm": 1.9, "tcp": 1.0})[0] == "shm"
    chosen, why = pick({"shm": 3.0, "tcp": 1.0})
    assert (chosen, why) == ("tcp", "shm would be 3.0 times as slow")
    assert pick({"tcp": 1.0}) == ("tcp", "it is the only one in common")
    assert sorted(["tcp", "new", "ucx", "gloo", "nccl", "nixl", "shm"], key=preference) == [
        "shm", "nixl", "nccl", "ucx", "gloo", "new", "tcp"
    ]  # fmt: skip


def test_what_was_measured_is_positive_and_measured_once():
    assert all(value >= 0 for value in astuple(memory_rates()))
    assert 0 < memory_rates().copy_byte_s < 1e-6
    assert memory_rates() is memory_rates()
    for scheme in ("memory", "shm", "tcp"):
        with create_transport(scheme) as transport:
            found = link_rates(transport)
            assert link_rates(transport) is found
        assert 0 <= found.byte_s < 1e-6
        assert 0 < found.message_s < 1.0
        assert math.isfinite(found.read_byte_s) == math.isfinite(found.read_run_s) == (scheme != "tcp")


def test_a_transport_that_can_t_be_probed_comes_last():
    transport = create_transport("memory")
    transport.close()
    transport.__class__ = type("Broken", (type(transport),), {"scheme": "broken"})
    assert link_rates(transport).message_s == math.inf


def test_memory_that_can_t_be_mapped_goes_the_way_that_the_estimates_say():
    spec = hybrid_spec(width=4096)
    spec = replace(spec, components=tuple(c for c in spec.components if c.name == "latent"))
    both = layouts(Parallel(), Parallel(), spec=spec)
    with pair(*both, transports=("shm",), own_memory="numpy") as (source, target):
        (received,) = hand_over(source, target, "one")
        plan, chunk = make_plan(*both), target.agents[0].config.chunk_bytes
        program = EdgeProgram(plan, Edge(0, 0, False), RequestShape(kv_tokens=TOKENS), chunk_bytes=chunk)
        links = link_rates(source.agents[0].transports["shm"])
        found = estimates(Work.of(program), memory_rates(), links, direct=True, mapped=False)
        expected = "direct" if found["direct"] <= 1.25 * found["packed"] else "packed"
        assert [edge.mode for edge in received.edges] == [expected]


def test_auto_takes_shared_memory_and_says_why_once(monkeypatch, caplog):
    # Other transports may be installed; some of them must not be loaded into this process.
    monkeypatch.setattr(service, "known_schemes", lambda: dict.fromkeys(("tcp", "memory", "shm"), ""))
    with (
        caplog.at_level(logging.INFO, "pdxfer.agent"),
        pair(*layouts(Parallel(), Parallel()), transports=("auto",)) as (source, target),
    ):
        assert list(target.agents[0].transports) == ["shm", "tcp"]
        for key in ("one", "two"):
            (received,) = hand_over(source, target, key)
            (edge,) = received.edges
            assert (edge.transport, edge.mode) == ("shm", "direct")
            assert edge.choice.startswith("shm direct: ")
            assert all(name in edge.choice for name in ("shm packed", "tcp packed"))
    assert sum("data path to" in record.message for record in caplog.records) == 1


def slow_paths(caplog) -> list[str]:
    return [record.message for record in caplog.records if "slow data path" in record.message]


def test_a_fall_back_is_warned_of_once(caplog):
    with pair(*layouts(Parallel(), Parallel()), transports=("shm", "tcp")) as (source, target):
        address = source.agents[0]._listeners[0].contact_address
        os.unlink(address.removeprefix("shm://"))
        for key in ("one", "two"):
            (received,) = hand_over(source, target, key)
            assert "shm does not connect" in received.edges[0].choice
        assert sum(target.agents[0].peers.fallbacks.values()) == 2
    assert len(slow_paths(caplog)) == 1


def test_a_transport_that_did_not_connect_rests_before_it_is_tried_again():
    """It is there again at once, and taken once its time has come; its failures double that time."""
    with pair(*layouts(Parallel(), Parallel()), transports=("shm", "tcp")) as (source, target):
        path = source.agents[0]._listeners[0].contact_address.removeprefix("shm://")
        peers = target.agents[0].peers

        def taken(key: str) -> str:
            (received,) = hand_over(source, target, key)
            return received.edges[0].transport

        os.rename(path, f"{path}.away")
        assert taken("one") == "tcp"
        os.rename(f"{path}.away", path)
        assert taken("two") == "tcp"
        ((key, rest),) = peers._failed.items()
        assert set(peers.falling_back.values()) == {"shm"}
        rest.until_s = 0.0  # its time has come
        os.rename(path, f"{path}.away")
        assert taken("three") == "tcp"
        assert peers._failed[key].rest_s == 2 * rest.rest_s
        os.rename(f"{path}.away", path)
        peers._failed[key].until_s = 0.0
        assert taken("four") == "shm"
        assert not peers._failed
        assert not peers.falling_back


def test_what_fails_for_all_at_once_has_failed_once(monkeypatch):
    """Eight at the same moment made it rest for five minutes."""
    with pair(*layouts(Parallel(), Parallel()), transports=("shm", "tcp")) as (source, target):
        peers, shm = target.agents[0].peers, target.agents[0].transports["shm"]
        peer = peers.get(source.agents[0].address, epoch=None, deadline_s=time.monotonic() + 30.0)
        os.unlink(source.agents[0]._listeners[0].contact_address.removeprefix("shm://"))
        all_there, connect = threading.Barrier(8), shm.connect

        def together(address, *, timeout_s):
            all_there.wait(30.0)
            return connect(address, timeout_s=timeout_s)

        monkeypatch.setattr(shm, "connect", together)
        with ThreadPoolExecutor(8) as pool:
            lent = [pool.submit(peers.lend, peer, time.monotonic() + 30.0, lambda: work(4096)) for _ in range(8)]
            for each in lent:
                each.result()[1].close()
        assert [rest.rest_s for rest in peers._failed.values()] == [peers_module._REST_S[0]]


def test_one_alone_tries_again_what_did_not_connect(monkeypatch):
    with pair(*layouts(Parallel(), Parallel()), transports=("shm", "tcp")) as (source, target):
        peers, shm = target.agents[0].peers, target.agents[0].transports["shm"]
        peer = peers.get(source.agents[0].address, epoch=None, deadline_s=time.monotonic() + 60.0)
        path = source.agents[0]._listeners[0].contact_address.removeprefix("shm://")
        os.rename(path, f"{path}.away")
        hand_over(source, target, "one")
        os.rename(f"{path}.away", path)
        tries, goes_on, connect = threading.Semaphore(0), threading.Event(), shm.connect

        def slow(address, *, timeout_s):
            tries.release()
            assert goes_on.wait(30.0)
            return connect(address, timeout_s=timeout_s)

        def lend():
            address, channel, _ = peers.lend(peer, time.monotonic() + 60.0, lambda: work(4096))
            channel.close()
            return address.partition("://")[0]

        monkeypatch.setattr(shm, "connect", slow)
        monkeypatch.setattr(peers_module, "_CONNECT_S", 60.0)  # that long nobody else tries: cores may be busy
        (rest,) = peers._failed.values()
        rest.until_s = 0.0  # its time has come
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(lend)
            assert tries.acquire(timeout=30.0)
            assert [lend(), lend()] == ["tcp", "tcp"]
            goes_on.set()
            assert first.result() == "shm"
        assert not tries.acquire(blocking=False)
        assert not peers._failed


def test_of_peers_that_are_gone_no_path_rests():
    """Each restart of a peer with a broken path left an entry, with the fetch that had met it."""
    at_source, at_target = layouts(Parallel(), Parallel())
    with Worker(at_target, seed=2, transports=("shm", "tcp")) as target:
        peers = target.agents[0].peers
        for key in ("one", "two"):
            with Worker(at_source, seed=1, transports=("shm", "tcp")) as source:
                os.unlink(source.agents[0]._listeners[0].contact_address.removeprefix("shm://"))
                hand_over(source, target, key)
                assert len(peers._failed) == 1
                gone = source.agents[0].address
            peers.drop(gone)
            assert not peers._failed
            assert not peers._idle


def test_a_neighbour_without_shared_memory_is_warned_of_once(caplog):
    both = layouts(Parallel(), Parallel())
    config = {"of_source": {"transports": ("tcp",)}, "of_target": {"transports": ("shm", "tcp")}}
    with pair(*both, **config) as (source, target):
        for key in ("one", "two"):
            hand_over(source, target, key)
    (warning,) = slow_paths(caplog)
    assert "shm is not in common" in warning


def test_names_of_transports():
    assert AgentConfig(worker="w", transports=("nccl", "tcp")).transports == ("nccl", "tcp")
    with pytest.raises(MisuseError, match="stands alone"):
        AgentConfig(worker="w", transports=("auto", "tcp"))
    assert AgentConfig(worker="w", transports="auto").transports == ("auto",)
    assert AgentConfig(worker="w", transports=("auto",), transport_options={"shm": {"readers": "any"}})


def test_what_only_loopback_reaches_is_tried_last_with_another_host():
    with create_transport("tcp") as tcp, create_transport("memory") as plane:
        plane.__class__ = type("Plane", (type(plane),), {"scheme": "plane", "reaches_hosts": False})
        peers = Peers(lambda digest: None, Layouts(), {"plane": plane, "tcp": tcp}, "our host", 5.0)

        def order(host: str, *addresses: str) -> list[str]:
            peer = SimpleNamespace(address="a", description=SimpleNamespace(host=host, transports=addresses))
            return [address for _, address in peers._ordered(peer, lambda: work(4096))[2]]

        confined, here, there = "plane://10.0.0.7:1", "tcp://127.0.0.1:2/aa", "tcp://10.0.0.7:3/aa"
        assert order("our host", confined, here) == [confined, here]
        assert order("another", confined, there) == [there, confined], "the plane can't leave this host"
        assert order("another", here, there) == [there, here]
        assert order("another", "tcp://[::1]:2", "tcp://[fe80::1]:2") == ["tcp://[fe80::1]:2", "tcp://[::1]:2"]
        assert order("another", here) == [here], "a container beside ours, whose loopback is ours, too"
        peers.close()


def test_auto_loads_torch_for_nobody():
    with Agent(AgentConfig(worker="w", transports=("auto",))) as agent:
        assert {"shm", "tcp"} <= agent.transports.keys()
        assert not {"gloo", "memory", "nccl"} & agent.transports.keys()
    require("torch")
    with Agent(AgentConfig(worker="w", transports=("auto",), transport_options={"gloo": {}})) as agent:
        assert "gloo" in agent.transports
