"""Who holds what for how long: leases, renewals, fences, kept and declined tickets, siblings that give up."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.control import ControlClient
from pdxfer.errors import (
    AbortedError,
    ExhaustedError,
    IncompatibleError,
    MisuseError,
    PeerError,
    StaleError,
    TicketError,
    TransportError,
)
from pdxfer.messages import Abort, Renewed
from pdxfer.plan import make_plan
from pdxfer.spec import Ownership, Rule
from pdxfer.testing.faults import Fault, FaultPlan, FaultyTransport
from pdxfer.ticket import Ticket
from pdxfer.transfer import State
from pdxfer.transport import Message
from tests.pairs import TOKENS, Ends, hand_over, pair, wait_until, withdraw
from tests.workers import Gate, Tap, hybrid_spec, layouts, settle


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


@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_what_the_source_took_back_is_not_its_path_s_fault(mode):
    """Its channel ends, and the source seemed to be down: TRANSPORT_FAILED, and ``peer_up`` 0."""
    gate = Gate("send")
    with pair(*layouts(Parallel(), Parallel()), transports=("shm",), mode=mode, of_source={"wrap": gate.wrap}) as (
        source,
        target,
    ):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        fetches = target.start(ticket, "one")
        with gate.closed():
            source.agents[0].withdraw("one")
            with pytest.raises(StaleError, match="withdrawn") as caught:
                settle(fetches)
        assert caught.value.reason == "TRANSFER_ENDED"
        assert target.agents[0].journal.peers["P"].up
        ends.wait(1)


def test_a_rank_that_gave_up_tells_a_sibling_that_asks():
    with pair(*layouts(Parallel(tp=1), Parallel(tp=4))) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        first, second = target.agents[:2]
        with pytest.raises(MisuseError, match="no page table"):
            first.fetch(ticket, {})
        with pytest.raises(AbortedError, match=r"has given up: .*no page table"):  # asked, or told before
            second.fetch(ticket, target.ranks[1].tables["one"])
        withdraw(source, "one", ends)


def test_a_rank_that_drains_tells_a_sibling_whose_fetch_has_begun():
    with pair(*layouts(Parallel(tp=1), Parallel(tp=4))) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        first, second = target.agents[:2]
        fetch = second.start_fetch(ticket, target.ranks[1].tables["one"], timeout_s=3600.0)
        first.drain()
        with pytest.raises(PeerError, match="drains"):
            first.fetch(ticket, target.ranks[0].tables["one"])
        with pytest.raises((PeerError, AbortedError), match=r"given up: .*drains"):
            fetch.wait()
        withdraw(source, "one", ends)


SHARED = replace(hybrid_spec(), components=tuple(c for c in hybrid_spec().components if c.name == "latent"))


@pytest.mark.parametrize("waiting", [True, False], ids=["while it waits", "before it begins"])
def test_a_rank_does_not_wait_for_a_sibling_that_has_given_up(waiting):
    """One state, whole on both ranks: it goes to one, from where the other would read it, were its table right."""
    spec = hybrid_spec()
    state = replace(spec["S"], layers=(0,), ownership=Ownership(rule=Rule.REPLICATED))
    plan = layouts(Parallel(), Parallel(tp=2), spec=replace(spec, components=(state,)))
    with pair(*plan) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        giver, reader = sorted(target.agents, key=lambda agent: not make_plan(*plan).sources(agent.config.rank))
        tables = target.ranks[giver.config.rank].tables["one"]
        if waiting:
            fetch = giver.start_fetch(ticket, tables, timeout_s=3600.0)
            assert wait_until(lambda: fetch.state is State.VERIFYING, timeout_s=60.0)
        with pytest.raises(MisuseError, match="no page table"):
            reader.fetch(ticket, {})
        if not waiting:
            assert wait_until(lambda: giver.calls["abort"], timeout_s=60.0)
            fetch = giver.start_fetch(ticket, tables, timeout_s=3600.0)
        with pytest.raises((PeerError, AbortedError), match=r"a sibling (gave|has given) up: .*no page table"):
            fetch.wait()
        ends.wait(1)
        assert ends.outcomes == ["completed" if waiting else "declined by D: ABORTED"]


def test_only_a_sibling_declines_its_share():
    gate = Gate("receive")
    with pair(*layouts(Parallel(), Parallel(tp=2), spec=SHARED), mode="packed") as (source, target):
        reader, giver = target.agents
        reader.transports["memory"] = gate.wrap(reader.transports["memory"])
        ticket = source.offer("one", 1)
        target.reserve("one", 1)
        fetches = target.start(ticket, "one")
        about = {"transfer": "one", "epoch": reader.epoch, "session": b"", "target_rank": 0, "relay": True}
        with gate.closed(), ControlClient(giver.address) as client:
            with pytest.raises(TicketError, match="only a sibling"):
                client.abort(Abort(**about, target_worker="E", ticket=ticket.encode(), reason="no"))
            wrong = Abort(**about, target_worker="D", ticket=b"another", reason="no")
            assert client.abort(wrong).state == "unknown"
        for done in settle(fetches):
            done.release()


def test_sources_are_told_of_a_fetch_that_never_opened_them():
    one = build_layout(hybrid_spec(), Parallel(tp=2), Storage(), "per_layer")
    two = build_layout(hybrid_spec(width=5), Parallel(), Storage(), "per_layer")
    with pair(one, two) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        with pytest.raises(IncompatibleError):
            target.fetch(ticket, "one")
        ends.wait(2)
        assert ends.outcomes == ["declined by D: INCOMPATIBLE"] * 2


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
    """Two readers come at the same time: neither is let through, and the device is asked once."""
    awaited = []
    with pair(*layouts(Parallel(), Parallel(tp=2, ranks_per_host=1))) as (source, target):

        def fence() -> None:
            awaited.append(threading.current_thread())
            assert wait_until(lambda: source.agents[0].calls["open"] == 2, timeout_s=60.0)
            raise RuntimeError("the device is gone" + " for good" * 100)

        ends = Ends()
        ticket = source.offer("one", TOKENS, fence=fence, on_end=ends)
        target.reserve("one", TOKENS)
        fetches = target.start(ticket, "one")
        for fetch in fetches:
            with pytest.raises((AbortedError, StaleError), match="device is gone"):
                fetch.wait()
        assert len(awaited) == 1
        ends.wait(1)
        assert ends.outcomes[0].startswith("aborted: the fence failed")
        source.check_idle()
        hand_over(source, target, "two")


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


def test_a_kept_ticket_outlives_its_lease_and_a_declined_one_is_freed_at_once():
    with pair(*layouts(Parallel(tp=2), Parallel()), lease_s=1.5) as (source, target):
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


def test_a_busy_source_is_asked_again():
    with pair(*layouts(Parallel(), Parallel()), lease_s=4.0) as (source, target):
        busy, honest = source.agents[0].source, source.agents[0].source.renew
        answers = [ExhaustedError("too many calls at once")]
        busy.renew = lambda message: _raised(answers.pop()) if answers else honest(message)
        ends, agent = Ends(), target.agents[0]
        agent.keep(source.offer("one", TOKENS, on_end=ends))
        assert wait_until(lambda: source.agents[0].calls["renew"] >= 3, timeout_s=60.0)
        assert agent.keeper.kept() == 1
        agent.decline(source.agents[0].issuer.issue("one", **_facts(busy, "one")), "enough")
        ends.wait(1)


def _raised(error: Exception):
    raise error


def _facts(source, transfer: str) -> dict:
    """What the ticket of an offer was made of."""
    nonce = source._records[False, transfer].nonce
    return {"kv_tokens": TOKENS, "state_tokens": TOKENS, "nonce": nonce}


def test_a_source_that_grants_an_absurd_time_stops_no_other_lease():
    with pair(*layouts(Parallel(), Parallel()), lease_s=0.4) as (source, target):
        liar, honest = source.agents[0].source, source.agents[0].source.renew
        liar.renew = lambda message: Renewed(lease_s=1e300) if message.transfer == "lie" else honest(message)
        lie, kept, agent = Ends(), Ends(), target.agents[0]
        agent.keep(source.offer("lie", TOKENS, on_end=lie))
        lie.wait(1)
        assert lie.outcomes == ["expired: the lease is over"]
        ticket = source.offer("kept", TOKENS, on_end=kept)
        agent.keep(ticket)
        assert not wait_until(lambda: kept.outcomes, timeout_s=1.0)
        target.reserve("kept", TOKENS)
        for done in target.fetch(ticket, "kept"):
            done.release()


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
            for n in range(40):
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
