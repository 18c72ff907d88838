"""Bit flips, swaps, truncations and zeroed tails on every real transport: all caught, the component named.

``PDXFER_ROUNDS=10000`` is the long run: so many damaged transfers on each transport, and so many clean ones.
"""

from __future__ import annotations

import os
from collections import Counter
from itertools import cycle, islice

import pytest

from pdxfer import wire
from pdxfer.builders import Parallel
from pdxfer.errors import CorruptError, TransportError
from pdxfer.packing import EdgeProgram
from pdxfer.pages import RequestShape
from pdxfer.plan import Edge, make_plan
from pdxfer.testing.faults import Fault, FaultPlan, FaultyTransport
from pdxfer.testing.oracle import Oracle
from pdxfer.ticket import Ticket
from tests.conftest import require
from tests.pairs import pair
from tests.workers import Worker, layouts

ROUNDS = int(os.environ.get("PDXFER_ROUNDS", "40"))
TOKENS, CHUNK_BYTES = 70, 4096
DAMAGES = ("corrupt", "swap", "truncate", "zero")


@pytest.fixture(params=["shm", "tcp", "nixl"])
def workers(request):
    """A source and a target whose transport damages what it receives, as it is told."""
    if request.param == "nixl":
        require("nixl_cu12")
    config = {"transports": (request.param,), "mode": "packed", "chunk_bytes": CHUNK_BYTES}
    if request.param == "nixl":
        config["transport_options"] = {"nixl": {"inline_bytes": 0}}
    faulty = []

    def wrap(transport):
        faulty.append(FaultyTransport(transport, FaultPlan.of()))
        return faulty[-1]

    with pair(*layouts(Parallel(), Parallel()), **config, of_target={"wrap": wrap}) as (source, target):
        Oracle.of(source.layout, tokens=TOKENS).put(source.reserve("one", TOKENS))
        target.reserve("one", TOKENS)
        yield source, target, faulty[0]


def _offered(source: Worker, number: int | str) -> Ticket:
    """The same pages under a fresh id."""
    rank = source.ranks[0]
    return Ticket.join([rank.agent.offer(f"request-{number}", rank.tables["one"], kv_tokens=TOKENS)])


def _hit(source: Worker, target: Worker, faulty: FaultyTransport, number: int) -> CorruptError:
    """Fetch until the damage is done: on a busy machine, a channel may break before."""
    for attempt in range(10):
        del faulty.damaged[:]
        try:
            target.agents[0].fetch(_offered(source, f"{number}-{attempt}"), target.ranks[0].tables["one"])
        except CorruptError as error:
            return error
        except TransportError:
            if faulty.damaged:
                raise
        else:
            break
    raise AssertionError(f"damage {number} was not found: {faulty.damaged}")


@pytest.mark.timeout(7200)
def test_all_damage_is_caught_and_its_component_named(workers):
    source, target, faulty = workers
    plan = make_plan(source.layout, target.layout)
    shape = RequestShape(kv_tokens=TOKENS, state_tokens=TOKENS)
    chunks = EdgeProgram(plan, Edge(0, 0, False), shape, chunk_bytes=CHUNK_BYTES)
    caught: Counter[str] = Counter()
    for number, kind in enumerate(islice(cycle(DAMAGES), ROUNDS)):
        faulty.plan = FaultPlan.of(Fault(kind=kind, at=number // 4 % len(chunks.chunks)), seed=number)
        error = _hit(source, target, faulty, number)
        (header, first), frame = faulty.damaged[0], wire.decode(faulty.damaged[0][0])
        assert isinstance(frame, wire.Data)
        hit = next(s for s in chunks.chunks[frame.chunk].segments if first < s.offset + s.nbytes)
        assert error.component == chunks.items[hit.item].component, (kind, header, first)
        caught[kind] += 1
        if number % 1000 == 999:
            print(dict(caught), flush=True)


@pytest.mark.timeout(7200)
def test_clean_transfers_raise_no_alarm(workers):
    source, target, _ = workers
    for number in range(ROUNDS):
        target.agents[0].fetch(_offered(source, number), target.ranks[0].tables["one"]).release()
