"""Ranks: the agents of some ranks of one worker, in a process of their own, doing what the bench asks.

=============  ==================================================================================
question       answer
=============  ==================================================================================
(start)        ``addresses``: control address by rank
``siblings``   done; the target's ranks now know each other
``offer``      ``tickets`` by rank and request, ``seconds``
``fetch``      ``started`` and ``ended`` on the machine's clock, ``edges``: what each edge cost
``clear``      done; all pages are zero
``check``      ``nbytes`` that were compared with what they must be
``facts``      calls answered, resident memory, and that nothing is held any more
=============  ==================================================================================
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pdxfer.agent import AgentConfig, Received, SidecarAgent, create_agent
from pdxfer.agent.spawn import DaemonProcess
from pdxfer.bench.case import Case, End, check, fill
from pdxfer.bench.peer import Line, main
from pdxfer.errors import MisuseError
from pdxfer.ticket import Ticket

__all__ = ["Way", "serve"]

_CALLS = ("describe", "open", "complete", "abort", "renew")
_WAIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How it is moved: transports (with commas, best first), mode, digests.

    Attributes:
        chunk_bytes: bound of a message. threads: of one agent's copies, 0 for its own choice.
        memory: of the source: ``shared``, which peers on its host can map, or ``own``, as an engine allocates it.
        insecure: meet other hosts, with nobody authenticated. sidecar: agents in a daemon's process, one per worker's
            process of the bench, not in that itself; ``mode`` and ``digests`` are then the daemon's, for all fetches.
    """

    transport: str = "shm"
    mode: str = "auto"
    digests: bool = True
    chunk_bytes: int = 8 << 20
    threads: int = 0
    memory: str = "shared"
    insecure: bool = False
    sidecar: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def config(self, worker: str, rank: int, host: str) -> AgentConfig:
        """An agent's: patient, as a bench may fill every core. ``host``: to bind to, where peers are elsewhere."""
        more: dict[str, Any] = {"transports": tuple(self.transport.split(","))}
        if host and self.transport == "auto":
            raise MisuseError("two hosts need a transport by name", hint="say --transport tcp, or another")
        config = AgentConfig(
            worker=worker, rank=rank, mode=self.mode, digests=self.digests, chunk_bytes=self.chunk_bytes,
            arena_bytes=max(8 * self.chunk_bytes, 64 << 20), lease_s=120.0, call_s=60.0, stall_s=60.0,
            insecure=self.insecure, copy_threads=self.threads, **more,
        )  # fmt: skip
        if not host:
            return config
        away = [scheme for scheme in config.transports if scheme not in ("shm", "memory")]
        return replace(config, control=(f"tcp://{host}:0",), listen={s: f"{s}://{host}:0" for s in away})


def serve(line: Line, *, case: dict[str, Any], way: dict[str, Any], end: End, ranks: list[int], host: str = "") -> None:
    """Run the agents and answer until nobody asks any more."""
    with ExitStack() as stack:
        served = _Ranks(Case.from_json(case), Way(**way), end, ranks, host, stack)
        line.tell(addresses=[[rank, agent.address] for rank, agent in served.agents.items()])
        for question in line.questions():
            line.tell(**served.answer(**question))


class _Ranks:
    def __init__(self, case: Case, way: Way, end: End, ranks: Sequence[int], host: str, stack: ExitStack) -> None:
        self.case, self.end = case, end
        self.anonymous = end == "prefill" and way.memory == "own"
        self.agents: dict[int, Any] = {}
        self.buffers: dict[int, list[Any]] = {}
        self.calls: Counter[str] = Counter()
        layout = case.layout(end)
        daemon = _daemon(way.config(end, 0, host), stack) if way.sidecar else ""
        for rank in ranks:
            agent: Any = stack.enter_context(create_agent(way.config(end, rank, host), daemon))
            regions: list[Any]
            if self.anonymous:
                self.buffers[rank] = regions = [np.zeros(r.nbytes, np.uint8) for r in layout.ranks[rank].regions]
            else:
                regions = agent.allocate(layout.ranks[rank])
                self.buffers[rank] = [np.frombuffer(region.view, np.uint8) for region in regions]
            if end == "prefill":
                fill(case, end, rank, self.buffers[rank])
            agent.attach(layout, regions)
            for name in _CALLS if not daemon else ():
                setattr(agent, name, self._counted(name, getattr(agent, name)))
            agent.start()
            self.agents[rank] = agent

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return call(*args, **kwargs)

        return counted

    def answer(self, do: str, **asked: Any) -> dict[str, Any]:
        """Do what is asked."""
        known: dict[str, Callable[..., dict[str, Any]]] = {
            "siblings": self._siblings, "offer": self._offer, "fetch": self._fetch, "clear": self._clear,
            "check": self._check, "facts": self._facts,
        }  # fmt: skip
        if do not in known:
            raise MisuseError(f"{do!r} is no question; there are {', '.join(known)}")
        return known[do](**asked)

    def _siblings(self, addresses: list[tuple[int, str]]) -> dict[str, Any]:
        for rank, agent in self.agents.items():
            agent.siblings.update({r: address for r, address in addresses if r != rank})
        return {}

    def _offer(self, transfers: list[str]) -> dict[str, Any]:
        tables = [self.case.tables(self.end, i) for i in range(len(transfers))]
        plain = [{name: table.tolist() for name, table in found.items()} for found in tables]
        started = time.perf_counter()
        offered = {
            rank: [agent.offer(t, plain[i], kv_tokens=self.case.tokens) for i, t in enumerate(transfers)]
            for rank, agent in self.agents.items()
        }
        seconds = time.perf_counter() - started
        return {"tickets": [[rank, [t.encode() for t in found]] for rank, found in offered.items()], "seconds": seconds}

    def _fetch(self, tickets: list[str], mode: str, digests: bool) -> dict[str, Any]:
        parsed = [Ticket.decode(ticket) for ticket in tickets]
        tables = [{n: t.tolist() for n, t in self.case.tables(self.end, i).items()} for i in range(len(tickets))]
        for agent in self.agents.values():
            agent.config = replace(agent.config, mode=mode, digests=digests)  # read anew by every fetch
        jobs = [(agent, *job) for job in zip(parsed, tables, strict=True) for agent in self.agents.values()]
        started = time.perf_counter()
        if len(jobs) == 1:  # as an engine's own thread does it
            received = [agent.fetch(ticket, pages, timeout_s=_WAIT_S) for agent, ticket, pages in jobs]
        else:
            fetches = [agent.start_fetch(ticket, pages, timeout_s=_WAIT_S) for agent, ticket, pages in jobs]
            received = [fetch.wait() for fetch in fetches]
        ended = time.perf_counter()
        for one in received:
            one.release()
        return {"started": started, "ended": ended, "edges": _edges(received)}

    def _clear(self) -> dict[str, Any]:
        for buffers in self.buffers.values():
            for buffer in buffers:
                buffer[:] = 0
        return {}

    def _check(self) -> dict[str, Any]:
        return {"nbytes": sum(check(self.case, self.end, rank, b) for rank, b in self.buffers.items())}

    def _facts(self) -> dict[str, Any]:
        until_s = time.monotonic() + 10.0
        while any(_held(agent) for agent in self.agents.values()):
            if time.monotonic() > until_s:
                raise MisuseError("pages are still held ten seconds after the last hand-off")
            time.sleep(0.01)
        for agent in self.agents.values():
            agent.check_integrity()
        own = _anonymous_bytes()
        mapped = any("shm" in getattr(a, "transports", ("shm",)) for a in self.agents.values())  # of files
        if self.anonymous or not mapped:
            own -= sum(buffer.nbytes for buffers in self.buffers.values() for buffer in buffers)
        return {"calls": dict(self.calls), "own_bytes": own}


def _held(agent: Any) -> set[str]:
    """States of pages that are not free."""
    counts = agent.check_integrity() if isinstance(agent, SidecarAgent) else agent.memory.ledger.counts()
    return {state for state, n in counts.items() if n} - {"free", "staged_bytes"}


def _daemon(config: AgentConfig, stack: ExitStack) -> str:
    """A daemon with that config; returns its socket."""
    directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdxfer-bench-"))
    names = (
        "transports",
        "mode",
        "digests",
        "chunk_bytes",
        "arena_bytes",
        "copy_threads",
        "lease_s",
        "call_s",
        "stall_s",
        "insecure",
    )
    settings = {f"agent.{name}": getattr(config, name) for name in names}
    settings |= {"worker": config.worker, "drain_s": 0, "log_level": "warning"}
    return stack.enter_context(DaemonProcess(f"{directory}/d/s", settings)).socket


def _anonymous_bytes() -> int:
    """Resident memory of this process that no file, memfds included, is behind."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def _edges(received: Sequence[Received]) -> list[dict[str, Any]]:
    """What each edge cost, requests added up; a fetch's own time is on an edge of its own target."""
    found: dict[tuple[int, int, bool], dict[str, Any]] = {}
    for one in received:
        for edge in one.edges:
            into = found.setdefault(
                (edge.source, edge.target, edge.relay),
                {"source": edge.source, "target": edge.target, "relay": edge.relay, "transport": edge.transport,
                 "mode": edge.mode, "messages": 0, "nbytes": 0, "seconds": Counter(), "components": Counter()},
            )  # fmt: skip
            into["messages"] += edge.messages
            into["nbytes"] += edge.payload_bytes
            into["seconds"].update(edge.seconds)
            into["components"].update(edge.component_bytes)
        into["seconds"].update({name: one.seconds[name] for name in ("plan", "negotiate")})
    return list(found.values())


if __name__ == "__main__":
    main(serve)
