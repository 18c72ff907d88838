"""Quotas: who is over is told when to come back, loses nothing by it, and delays nobody else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdxfer.agent.arena import Arena
from pdxfer.agent.quotas import CallRates, Quotas, Usage
from pdxfer.builders import Parallel
from pdxfer.control import ControlClient
from pdxfer.errors import ExhaustedError, MisuseError
from pdxfer.messages import Abort, Renew
from pdxfer.ticket import Ticket
from tests.pairs import LONG, TOKENS, Ends, hand_over, pair, wait_until
from tests.workers import Gate, layouts, settle

PEER, TENANT = [("peer", "D")], [("peer", "D"), ("tenant", "t")]


def test_usage_counts_a_transfer_once_and_each_reader_s_bytes():
    usage = Usage(Quotas(peer_transfers=2, peer_bytes=100, tenant_transfers=1, tenant_bytes=50))
    for reader, nbytes in ((0, 20), (1, 20), (0, 30)):  # a reader that comes again replaces itself
        usage.check("a", reader, nbytes, TENANT)
        usage.take("a", reader, nbytes, TENANT)
    for transfer, reader, nbytes, owners in (
        ("a", 2, 1, TENANT), ("b", 0, 1, TENANT), ("b", 0, 51, PEER),
    ):  # fmt: skip
        with pytest.raises(ExhaustedError, match="at most") as caught:
            usage.check(transfer, reader, nbytes, owners)
        assert caught.value.reason == "QUOTA"
        assert caught.value.retry_after_s > 0
    usage.take("b", 0, 50, PEER)
    usage.check("c", 0, 1, [("peer", "E"), ("tenant", "u")])  # others have their own
    for transfer in ("a", "a", "b", "unknown"):
        usage.give_back(transfer)
    assert usage.open_transfers == 0
    usage.check("d", 0, 50, TENANT)


def test_calls_are_counted_by_caller_and_buckets_fill_with_time():
    now = [1000.0]
    rates = CallRates(Quotas(peer_calls_per_s=10), clock=lambda: now[0])
    for _ in range(10):
        rates.count("a")
    for _ in range(3):  # asking too often does not put it off
        with pytest.raises(ExhaustedError, match="calls a second") as caught:
            rates.count("a")
        assert caught.value.retry_after_s == pytest.approx(0.1)
    rates.count("b")
    now[0] += caught.value.retry_after_s + 0.001
    rates.count("a")
    for n in range(10_000):
        rates.count(n)
    assert len(rates._buckets) <= 4096


@pytest.mark.parametrize("wrong", [0, -1, float("inf"), float("nan"), True, "5", None])
def test_a_quota_is_a_positive_number(wrong):
    with pytest.raises(MisuseError, match="peer_bytes"):
        Quotas(peer_bytes=wrong)


def test_a_peer_over_its_quota_waits_and_is_served():
    """The quota is one transfer: while the first one stands still, the second waits; then it comes."""
    gate = Gate("send")
    one = {"quotas": {"peer_transfers": 1}, "wrap": gate.wrap}
    with pair(*layouts(Parallel(), Parallel()), of_source=one) as (source, target):
        agent = source.agents[0]
        ends = Ends()
        tickets = {key: source.offer(key, LONG, on_end=ends) for key in ("one", "two")}
        for key in tickets:
            target.reserve(key, LONG)
        first = target.start(tickets["one"], "one")
        with gate.closed():
            second = target.start(tickets["two"], "two")
            assert wait_until(lambda: agent.counters.get("quota_transfers", 0) >= 2, timeout_s=60)
            assert not second[0].done
        for received in (*settle(first), *settle(second)):
            received.release()
        ends.wait(2)
        assert ends.outcomes == ["completed"] * 2


def test_a_tenant_over_its_quota_delays_no_other():
    tiny = {"quotas": {"tenant_bytes": 1}}
    with pair(*layouts(Parallel(), Parallel()), of_source=tiny) as (source, target):
        ends = Ends()
        ticket = source.offer("big", TOKENS, tenant="t", on_end=ends)
        target.reserve("big", TOKENS)
        fetch = target.start(ticket, "big", timeout_s=1.0)
        hand_over(source, target, "no tenant")
        with pytest.raises(Exception, match="not ready in time"):
            settle(fetch)
        source.agents[0].withdraw("big")
        ends.wait(1)


def test_calls_over_the_rate_are_refused_and_counted():
    slow = {"quotas": {"peer_calls_per_s": 3}}
    with pair(*layouts(Parallel(), Parallel()), of_source=slow) as (source, _):
        agent = source.agents[0]
        ask = Renew(transfer="x", epoch=bytes(16), session=bytes(16), target_worker="D", target_rank=0)
        with ControlClient(agent.address) as client:
            outcomes = [type(_error(client.renew, ask)).__name__ for _ in range(6)]
            other = replace(ask, target_worker="E")
            assert type(_error(client.renew, other)).__name__ == "StaleError"
        assert outcomes[:3] == ["StaleError"] * 3
        assert "ExhaustedError" in outcomes
        assert agent.counters["quota_calls"] == outcomes.count("ExhaustedError")


def _error(call, *arguments):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
        call(*arguments)
    return caught.value


def test_every_end_gives_the_quota_back():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        agent = source.agents[0]
        hand_over(source, target, "completed")
        ends = Ends()
        for key, end in (
            ("withdrawn", lambda t: agent.withdraw(t.transfer)),
            ("declined", lambda t: agent.abort(
                Abort(transfer=t.transfer, epoch=bytes(16), session=b"", target_worker="D", target_rank=0,
                      reason="", ticket=t.encode().encode()), deadline_s=1)),
        ):  # fmt: skip
            ticket = Ticket.decode(source.offer(key, TOKENS, on_end=ends))
            end(ticket)
        ends.wait(2)
        assert agent.source.usage.open_transfers == 0


def test_staging_of_a_tenant_is_wiped_when_its_reader_has_released_it():
    memory = np.zeros(8 << 12, np.uint8)
    arena = Arena(memoryview(memory))
    one, two = arena.allocate(4096, "a", timeout_s=0), arena.allocate(4096, "b", timeout_s=0)
    np.frombuffer(one, np.uint8)[:] = 7
    np.frombuffer(two, np.uint8)[:] = 9
    arena.free(one, wipe=True)
    assert memory.tolist() == [0] * 4096 + [9] * 4096 + [0] * (6 << 12)
    arena.free(two)
    with pair(*layouts(Parallel(), Parallel()), mode="packed") as (source, target):
        hand_over(source, target, "one", tenant="t")
        source.check_idle()
        (staging,) = source.agents[0].memory._arenas.values()
        assert staging.peak_bytes
        assert not np.frombuffer(staging._memory, np.uint8).any()
        hand_over(source, target, "two")  # without tenants there is nobody to keep it from
        source.check_idle()
        assert np.frombuffer(staging._memory, np.uint8).any()
