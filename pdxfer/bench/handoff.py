"""Bench of hand-offs: two agents in two processes, one offers, the other fetches.

In come sizes; out come latencies of offer and fetch, what of them was the copy itself, calls and bytes. The router's
part (a ticket's way from one engine to the other) is not in it: the offer is timed in the source's process, the fetch
in the target's. *The copy itself* is the same request, between two buffers of one process, without digests, its
programs and page tables worked out before; it is measured between the fetches. ``control_call`` is an empty call to the
source's control server: a hand-off makes two.

::

    source process   offer ─ticket─▶ (pipe) ─▶ target process   fetch ─ Open ─ copy, verify ─ Complete ─▶ READY
                     |timed|                                    |------------------ timed -----------------|
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdxfer import packing
from pdxfer.agent import Agent, AgentConfig, Received
from pdxfer.bench.measure import Samples, Tick, contiguous_copy, quantile, repeat
from pdxfer.bench.peer import Child, answer, questions
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.control import ControlClient
from pdxfer.driver import EdgeStats
from pdxfer.errors import MisuseError
from pdxfer.layout import Layout
from pdxfer.messages import Abort, Complete, Completed, Describe, Description, Open, Opened, Renew, Renewed
from pdxfer.models import load_config, spec_from_config
from pdxfer.packing import EdgeProgram, RequestShape, Segment, Side
from pdxfer.plan import Edge, make_plan
from pdxfer.spec import DTYPE_BYTES, Growth
from pdxfer.ticket import Ticket

__all__ = ["ADDED_TARGET_MS", "WAYS", "HandoffOptions", "Way", "bench_handoff"]

ADDED_TARGET_MS = 1.5
_MODULE = "pdxfer.bench.handoff"
_PAGE_TOKENS = 16
_WAIT_S = 60.0
#: A hybrid of eight layers whose small hand-off is small: 1.5 MiB of state, 4 KiB a token.
_CONFIG = {
    **load_config("qwen3-next-80b-a3b"),
    "num_hidden_layers": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A transport and a mode."""

    name: str
    transport: str
    mode: str = "auto"
    digests: bool = True


WAYS = (
    Way(name="shm, direct", transport="shm"),
    Way(name="shm, direct, no digests", transport="shm", digests=False),
    Way(name="shm, packed", transport="shm", mode="packed"),
    Way(name="tcp, packed", transport="tcp", mode="packed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffOptions:
    """How much and how often; small requests are repeated ten times as often as big ones."""

    small_tokens: int = 64
    megabytes: int = 256
    repeats: int = 20
    ways: tuple[Way, ...] = WAYS

    def __post_init__(self) -> None:
        if min(self.small_tokens, self.megabytes, self.repeats) < 1:
            raise MisuseError(f"at least one of everything: {self}")

    @property
    def big_tokens(self) -> int:
        """Tokens whose rows are about ``megabytes``."""
        spec = spec_from_config(_CONFIG)
        paged = [c for c in spec.components if c.growth is not Growth.PER_REQUEST]
        per_token = sum(c.row_elems * DTYPE_BYTES[c.dtype] * len(c.layers) for c in paged)
        return max(self.small_tokens, (self.megabytes << 20) // per_token)


def bench_handoff(options: HandoffOptions, tick: Tick) -> dict[str, Any]:
    """Measure every way; returns a JSON-ready value."""
    tick("contiguous copy")
    nbytes = options.megabytes << 20
    copy = contiguous_copy(nbytes, max(3, options.repeats // 2))
    return {
        "what": "offer and fetch between two processes, one rank each, 8-layer hybrid, TP 1 to TP 1",
        "targets": {"added_p50_ms": ADDED_TARGET_MS, "request": "small", "way": WAYS[0].name},
        "contiguous_copy": {"nbytes": nbytes, "gb_per_s": nbytes / quantile(copy.wall_s, 0.5) / 1e9},
        "ways": [_run_way(way, options, tick) for way in options.ways],
    }


def _layout(tokens: int, *, target: bool) -> Layout:
    storage = Storage(page_tokens=_PAGE_TOKENS, pages=-(-tokens // _PAGE_TOKENS) + 8, slots=4)
    del target  # the two engines are alike: the copy is as cheap as it can be, and all else shows
    return build_layout(spec_from_config(_CONFIG), Parallel(), storage)


def _config(way: Way, worker: str) -> AgentConfig:
    return AgentConfig(worker=worker, transports=(way.transport,), mode=way.mode, digests=way.digests)


def _run_way(way: Way, options: HandoffOptions, tick: Tick) -> dict[str, Any]:
    tick(f"{way.name}: start")
    layout = _layout(options.big_tokens, target=True)
    asked = {"transport": way.transport, "mode": way.mode, "digests": way.digests, "tokens": options.big_tokens}
    with Child(_MODULE, **asked) as child, Agent(_config(way, "decode")) as agent:
        address = child.hear()["address"]
        regions = agent.allocate(layout.ranks[0])
        agent.attach(layout, regions)
        agent.start()
        bench = _HandoffBench(child, agent, layout, [np.frombuffer(r.view, np.uint8) for r in regions])
        sizes = {"small": (options.small_tokens, 10 * options.repeats), "big": (options.big_tokens, options.repeats)}
        requests = [bench.run(name, *size, lambda what: tick(f"{way.name}: {what}")) for name, size in sizes.items()]
        agent.check_integrity()
        with ControlClient(address) as client:
            call = repeat(client.health, 10 * options.repeats, warmup=5)
        source = child.ask(do="check")
        return {"way": way.name, "requests": requests, "control_call": call.to_json(), "source": source}


class _HandoffBench:
    """One pair of agents."""

    def __init__(self, child: Child, agent: Agent, layout: Layout, buffers: list[Any]) -> None:
        self.child, self.agent, self.layout, self.buffers = child, agent, layout, buffers
        self._alone = [np.ones_like(b) for b in buffers]
        self._number = 0
        self._rng = np.random.default_rng(0)

    def run(self, name: str, tokens: int, repeats: int, tick: Tick) -> dict[str, Any]:
        """Fetch one size of request ``repeats`` times, after two times for nothing."""
        tables = _tables(self.layout, tokens, self._rng)
        copy = _CopyAlone(self.layout, tokens, self._alone, self.buffers, tables)
        offer, fetch, alone = Samples(), Samples(), Samples()
        stages: Counter[str] = Counter()
        before = self.child.ask(do="calls")
        for number in range(repeats + 2):
            tick(name)
            into = (offer, fetch, alone) if number > 1 else (Samples(), Samples(), Samples())
            edges = self._once(tokens, tables, into[0], into[1])
            into[2].time(copy.run)
            for edge in edges if number > 1 else ():
                stages.update(edge.seconds)
        calls = Counter(self.child.ask(do="calls"))
        calls.subtract(before)
        payload = sum(edge.payload_bytes for edge in edges)
        total = [o + f for o, f in zip(offer.wall_s, fetch.wall_s, strict=True)]
        added = [t - quantile(alone.wall_s, 0.5) for t in total]
        return {
            "request": name,
            "tokens": tokens,
            "payload_bytes": payload,
            "messages": sum(edge.messages for edge in edges),
            "mode": edges[0].mode,
            "rpcs_per_request": {call: n / (repeats + 2) for call, n in calls.items()},
            "offer": offer.to_json(),
            "fetch": fetch.to_json(),
            "copy_alone": alone.to_json(),
            "added_ms": {f"p{q}": quantile(added, q / 100) * 1e3 for q in (50, 90, 99)},
            "gb_per_s": payload / quantile(fetch.wall_s, 0.5) / 1e9,
            "copy_alone_gb_per_s": payload / quantile(alone.wall_s, 0.5) / 1e9,
            "stage_ms": {stage: 1e3 * s / repeats for stage, s in sorted(stages.items())},
        }

    def _once(self, tokens: int, tables: dict[str, list[int]], offer: Samples, fetch: Samples) -> tuple[EdgeStats, ...]:
        self._number += 1
        said = self.child.ask(do="offer", transfer=f"bench-{self._number}", tokens=tokens)
        offer.wall_s.append(said["offer_s"])
        offer.cpu_s.append(said["offer_s"])
        ticket = Ticket.decode(said["ticket"])
        received: list[Received] = []
        fetch.time(lambda: received.append(self.agent.fetch(ticket, tables, timeout_s=_WAIT_S)))
        received[0].release()
        return received[0].edges


class _CopyAlone:
    """The request's bytes from page to page in one process, thought out before."""

    def __init__(
        self, layout: Layout, tokens: int, source: list[Any], target: list[Any], tables: dict[str, list[int]]
    ) -> None:
        plan = make_plan(layout, layout)
        shape = RequestShape(kv_tokens=tokens)
        self._program = EdgeProgram(plan, Edge(0, 0, False), shape, chunk_bytes=AgentConfig(worker="x").chunk_bytes)
        self._source, self._target = Side(layout.ranks[0], source, tables), Side(layout.ranks[0], target, tables)
        packing.prepare(self._program, self._source, self._target, digests=False)

    def run(self) -> None:
        """Copy."""
        for segment in self._segments():
            packing.direct(self._program, segment, self._source, self._target)

    def _segments(self) -> Iterator[Segment]:
        return (segment for chunk in self._program.chunks for segment in chunk.segments)


def _tables(layout: Layout, tokens: int, rng: np.random.Generator) -> dict[str, list[int]]:
    """Scattered pages and a slot."""
    found = {}
    for name, holding in layout.ranks[0].tables().items():
        count = 1 if name.startswith("state") else -(-tokens // holding.page_rows)
        found[name] = rng.permutation(holding.pages)[:count].tolist()
    return found


class _CountingAgent(Agent):
    """An agent that counts the calls it answers."""

    def __init__(self, config: AgentConfig) -> None:
        self.calls: Counter[str] = Counter()
        super().__init__(config)

    def describe(self, message: Describe, *, deadline_s: float) -> Description:
        self.calls["Describe"] += 1
        return super().describe(message, deadline_s=deadline_s)

    def open(self, message: Open, *, deadline_s: float) -> Opened:
        self.calls["Open"] += 1
        return super().open(message, deadline_s=deadline_s)

    def complete(self, message: Complete, *, deadline_s: float) -> Completed:
        self.calls["Complete"] += 1
        return super().complete(message, deadline_s=deadline_s)

    def abort(self, message: Abort, *, deadline_s: float) -> Completed:
        self.calls["Abort"] += 1
        return super().abort(message, deadline_s=deadline_s)

    def renew(self, message: Renew, *, deadline_s: float) -> Renewed:
        self.calls["Renew"] += 1
        return super().renew(message, deadline_s=deadline_s)


def _child(transport: str, mode: str, digests: bool, tokens: int) -> None:
    """The source's process: offers what it is asked to."""
    way = Way(name="", transport=transport, mode=mode, digests=digests)
    layout, rng = _layout(tokens, target=False), np.random.default_rng(1)
    agent = _CountingAgent(_config(way, "prefill"))
    with agent:
        regions = agent.allocate(layout.ranks[0])
        for region in regions:
            view = np.frombuffer(region.view, np.uint8)
            view[:] = np.frombuffer(rng.bytes(len(view)), np.uint8)
        agent.attach(layout, regions)
        agent.start()
        answer(address=agent.address)
        tables: dict[int, dict[str, list[int]]] = {}
        for question in questions():
            if question["do"] == "offer":
                n = question["tokens"]
                mine = tables.setdefault(n, _tables(layout, n, rng))
                spent, tickets = Samples(), list[Ticket]()
                spent.time(
                    lambda q=question, n=n, mine=mine, into=tickets: into.append(  # type: ignore[misc]
                        Ticket.join([agent.offer(q["transfer"], mine, kv_tokens=n)])
                    )
                )
                answer(ticket=tickets[0].encode(), offer_s=spent.wall_s[0])
            elif question["do"] == "calls":
                answer(**agent.calls)
            else:
                agent.check_integrity()
                answer(pages=agent.memory.ledger.counts())


if __name__ == "__main__":
    import json
    import sys

    _child(**json.loads(sys.argv[1]))
