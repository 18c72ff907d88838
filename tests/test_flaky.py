"""Two agents and a network that cuts, stalls, resets and flips: each transfer ends in time, whole or with an error."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter

import pytest

from pdxfer.agent import Agent
from pdxfer.builders import Parallel
from pdxfer.errors import PdxferError
from pdxfer.testing.oracle import Oracle
from tests.flaky import FAULTS, FlakyProxy
from tests.pairs import Ends, hand_over, pair, withdraw
from tests.workers import Worker, layouts

#: Transfers for each fault and plane; ``PDXFER_ROUNDS=200`` is the long run.
ROUNDS = int(os.environ.get("PDXFER_ROUNDS", "5"))
TOKENS, TIMEOUT_S, BUSY_S = 300, 1.5, 3.0


@pytest.fixture(params=["data", "control"])
def behind_proxy(request, monkeypatch):
    """A source whose data listener, or control server, is reached through a proxy only."""
    options = {"tcp": {"contact_host": "127.0.0.2", "heartbeat_s": 0.2, "dead_after_s": 1.0}}
    config = {"transports": ("tcp",), "chunk_bytes": 4096, "lease_s": 60.0, "call_s": 1.0}
    of_source = {"control": ("tcp://127.0.0.1:0",)}
    if request.param == "data":
        of_source["transport_options"] = options
    with pair(*layouts(Parallel(), Parallel()), **config, of_source=of_source) as (source, target):
        agent = source.agents[0]
        address = agent.contact_addresses[0] if request.param == "data" else agent.address
        port = int(address.rpartition(":")[2])
        proxy = FlakyProxy(("127.0.0.2", port), ("127.0.0.1", port))
        if request.param == "control":
            monkeypatch.setattr(Agent, "address", f"tcp://127.0.0.2:{port}")
        try:
            yield source, target, proxy
        finally:
            proxy.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_each_transfer_ends_in_time_whole_or_with_an_error(behind_proxy, fault):
    source, target, proxy = behind_proxy
    outcomes: Counter[str] = Counter()
    hand_over(source, target, "before")
    hits = 0
    for number in range(ROUNDS):
        proxy.set(fault, random.Random(number).choice((0, 20, 300, 3000, 20_000)))
        outcomes[_attempt(source, target, f"{fault} {number}")] += 1
        hits += proxy.hits
    proxy.set("")
    _recovers(source, target, fault)
    print(fault, dict(outcomes), f"{hits} connections hit")
    assert hits, "no connection was hit"


def _recovers(source: Worker, target: Worker, fault: str) -> None:
    """A path that has died without a word is found dead by heartbeats (5 s) or pings (8 s)."""
    until_s = time.monotonic() + 15.0
    for number in itertools.count():
        if _attempt(source, target, f"after {fault} {number}") == "whole":
            return
        assert time.monotonic() < until_s, "it stays broken"


def _attempt(source: Worker, target: Worker, key: str) -> str:
    ends, oracle = Ends(), Oracle.of(source.layout, key=key, tokens=TOKENS)
    ticket = source.offer(key, TOKENS, oracle=oracle, on_end=ends)
    before = target.reserve(key, TOKENS).copy()
    began_s, outcome = time.monotonic(), "whole"
    try:
        for received in target.fetch(ticket, key, timeout_s=TIMEOUT_S):
            oracle.check(target.memory(key), before)
            received.release()
    except PdxferError as error:
        outcome = type(error).__name__
    assert time.monotonic() - began_s < TIMEOUT_S + BUSY_S
    assert outcome != "InternalError", "nothing that a network does is our own fault"
    withdraw(source, key, ends)
    for worker in (source, target):
        for rank in worker.ranks:
            rank.give_back(key)
    return outcome
