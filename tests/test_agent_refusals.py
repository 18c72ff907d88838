"""What an agent refuses, by name and with nothing changed: tickets, page tables, counts, calls made by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.control import ControlClient
from pdxfer.errors import (
    CorruptError,
    ExhaustedError,
    IncompatibleError,
    MisuseError,
    PdxferError,
    PeerError,
    StaleError,
    TicketError,
)
from pdxfer.messages import Abort, Complete, Mode, Open, Renew
from pdxfer.plan import make_plan
from pdxfer.ticket import Ticket
from pdxfer.transfer import State
from tests.conftest import require
from tests.pairs import TOKENS, Ends, fails, hand_over, pair, withdraw
from tests.workers import Gate, Worker, hybrid_spec, layouts, settle


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


def test_many_edges_at_once_have_smaller_windows():
    """What they may have underway together fits into an arena, unless that is two chunks for each."""
    config = AgentConfig(worker="w", arena_bytes=64 << 20, chunk_bytes=8 << 20, window=4)
    assert [config.window_of(edges) for edges in (0, 1, 2, 3, 4, 64)] == [4, 4, 4, 2, 2, 2]
    assert AgentConfig(worker="w", window=1).window_of(1) == 1


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


def test_a_timeout_that_never_passes_is_refused():
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        ends = Ends()
        ticket = source.offer("one", TOKENS, on_end=ends)
        target.reserve("one", TOKENS)
        with pytest.raises(MisuseError, match="timeout"):
            target.fetch(ticket, "one", timeout_s=float("nan"))
        withdraw(source, "one", ends)


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
            assert client.abort(Abort(**about, reason="enough " * 500)).state.startswith("aborted")
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


def test_an_agent_is_used_in_order():
    plan = layouts(Parallel(), Parallel())
    with pair(*plan) as (source, _):
        agent = source.agents[0]
        with pytest.raises(MisuseError):
            agent.attach(plan[0], [])
    with pytest.raises(MisuseError, match="no transport for scheme"):
        Worker(plan[0], transports=("pigeon",))


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


@pytest.mark.parametrize(
    ("region", "why"),
    [(lambda n: np.zeros(n - 1, np.uint8), "has .* B"), (lambda n: _floats(n // 2), "bfloat16"),
     (lambda n: _floats(n // 2).view(-1, 1).view(require("torch").uint8), "2 dimensions")],
    ids=["too small", "a tensor of numbers", "a tensor of rows"],
)  # fmt: skip
def test_memory_that_is_not_what_its_layout_says_is_refused(region, why):
    layout, _ = layouts(Parallel(), Parallel())
    shapes = layout.ranks[0].regions
    with Agent(AgentConfig(worker="w", transports=("memory",))) as agent, pytest.raises(MisuseError, match=why):
        agent.attach(layout, [region(shape.nbytes) for shape in shapes])


def _floats(n: int):
    torch = require("torch")
    return torch.zeros(n, dtype=torch.bfloat16)
