"""Workers for tests: real agents over memory that the oracle can fill and check, and gates that stop a transfer.

In comes a layout; out come agents of all its ranks in this process (``Worker``), or of one rank (``Rank``) in
whatever process asks. Page tables are drawn at random and never overlap between requests that are alive.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from pdxfer import wire
from pdxfer.agent import Agent, AgentConfig, Fetch, Received, SidecarAgent
from pdxfer.agent.config import DaemonConfig
from pdxfer.agent.daemon import Daemon
from pdxfer.agent.journal import component_kind
from pdxfer.agent.reasons import reason_of
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import PeerError, TransportError
from pdxfer.layout import Layout
from pdxfer.spec import Axis, CacheSpec, Component, Growth, Ownership, Rule
from pdxfer.testing.faults import WrappedChannel, WrappedTransport
from pdxfer.testing.oracle import Memory, Oracle, random_tables
from pdxfer.ticket import Ticket
from pdxfer.transport import Channel, Message, Sending, Transport

__all__ = ["CountingAgent", "Gate", "Rank", "Tap", "Worker", "hybrid_spec", "layouts", "resources", "settle"]


def _component(name: str, layers: Sequence[int], axes: Mapping[str, int], own: Ownership, growth: Growth, dtype: str):
    named = tuple(Axis(name=n, extent=e) for n, e in axes.items())
    return Component(name=name, layers=tuple(layers), axes=named, dtype=dtype, growth=growth, ownership=own)


def hybrid_spec(*, kv_heads: int = 2, width: int = 4) -> CacheSpec:
    """Six layers with every way to own something: sharded, extended and replicated; per request and per token."""
    linear, full = (0, 1, 3, 4), (2, 5)
    once, grows = Growth.PER_REQUEST, Growth.PER_TOKEN

    def heads(n: int, axis: str = "heads", rule: Rule = Rule.SHARDED) -> Ownership:
        return Ownership(rule=rule, axis=axis, units=n)

    kv, whole = heads(kv_heads, rule=Rule.EXTENDED), Ownership(rule=Rule.REPLICATED)
    parts = (
        _component("S", linear, {"heads": 12, "K": width, "V": width + 2}, heads(12), once, "float32"),
        _component("conv.q", linear, {"channels": 24, "taps": 3}, heads(12, "channels"), once, "bfloat16"),
        _component("conv.B", linear, {"channels": 4, "taps": 3}, heads(1, "channels", Rule.EXTENDED), once, "bfloat16"),
        _component("kv.k", full, {"heads": kv_heads, "dim": width + 2}, kv, grows, "bfloat16"),
        _component("kv.v", full, {"heads": kv_heads, "dim": width}, kv, grows, "bfloat16"),
        _component("latent", full, {"dim": width * 2}, whole, grows, "bfloat16"),
    )
    return CacheSpec(model="hybrid", num_layers=6, query_heads=12, components=parts)


class CountingAgent(Agent):
    """Counts the control calls that reach it."""

    def __init__(self, config: AgentConfig) -> None:
        super().__init__(config)
        self.calls: Counter[str] = Counter()

    def _counted(self, name: str, message: Any, deadline_s: float) -> Any:
        self.calls[name] += 1
        return getattr(Agent, name)(self, message, deadline_s=deadline_s)

    def describe(self, message, *, deadline_s):
        return self._counted("describe", message, deadline_s)

    def open(self, message, *, deadline_s):
        return self._counted("open", message, deadline_s)

    def complete(self, message, *, deadline_s):
        return self._counted("complete", message, deadline_s)

    def abort(self, message, *, deadline_s):
        return self._counted("abort", message, deadline_s)

    def renew(self, message, *, deadline_s):
        return self._counted("renew", message, deadline_s)


class Rank:
    """One rank: an agent, its memory full of noise, and page tables by request."""

    def __init__(
        self,
        layout: Layout,
        rank: int = 0,
        *,
        wrap: Callable[[Transport], Transport] | None = None,
        seed: int = 0,
        own_memory: str = "",
        sidecar: str = "",
        **config: Any,
    ) -> None:
        small = {"worker": f"w{seed}", "arena_bytes": 1 << 20, "chunk_bytes": 64 << 10}
        self.layout, self.rank = layout, rank
        self.sidecar = sidecar
        if not sidecar:
            self.agent = CountingAgent(AgentConfig(rank=rank, **{**small, **config}))
        else:
            self.agent = SidecarAgent(sidecar, worker=config.get("worker", f"w{seed}"), rank=rank)
        if wrap is not None and not sidecar:
            for scheme, transport in self.agent.transports.items():
                self.agent.transports[scheme] = wrap(transport)
        self.rng = np.random.default_rng([seed, rank])
        shapes = layout.ranks[rank]
        if own_memory:
            self.buffers = tuple(np.zeros(shape.nbytes, np.uint8) for shape in shapes.regions)
            regions: Sequence[Any] = [_tensor(b) for b in self.buffers] if own_memory == "torch" else self.buffers
        else:
            regions = self.agent.allocate(shapes)
            self.buffers = tuple(np.frombuffer(region.view, np.uint8) for region in regions)
        for buffer in self.buffers:
            buffer[:] = self.rng.integers(0, 256, buffer.nbytes, dtype=np.uint8)
        self.agent.attach(layout, regions)
        self.agent.start()
        self.tables: dict[str, dict[str, np.ndarray]] = {}
        self.pools, self.per_unit = shapes.pools(), shapes.pages_per_unit()
        units = {pool: shapes.tables()[table].pages // self.per_unit[table] for table, pool in self.pools.items()}
        self.free = {pool: [int(p) for p in self.rng.permutation(n)] for pool, n in units.items()}

    def reserve(self, key: str, tokens: int) -> dict[str, np.ndarray]:
        """Page tables for one request, scattered, of units that no other request has."""
        drawn = random_tables(self.layout.spec, self.layout.ranks[self.rank], tokens, self.rng)
        self.tables[key] = {name: self._draw(name, len(table)) for name, table in drawn.items()}
        return self.tables[key]

    def _draw(self, table: str, pages: int) -> np.ndarray:
        size = self.per_unit[table]
        units = np.array([self.free[self.pools[table]].pop() for _ in range(-(-pages // size))], np.int64)
        return (units[:, None] * size + np.arange(size)).reshape(-1)[:pages]

    def give_back(self, key: str) -> None:
        """The request is over."""
        for name, table in self.tables.pop(key).items():
            self.free[self.pools[name]] += np.unique(table // self.per_unit[name]).tolist()

    def check_idle(self) -> None:
        """Every page is free, and nothing was lost. Staging is free once the channels' threads have looked."""
        if self.sidecar:
            for _ in range(1000):
                held = {state: n for state, n in self.agent.check_integrity().items() if n}
                if set(held) == {"free"}:
                    return
                time.sleep(0.01)
            raise AssertionError(f"the sidecar still holds {held}")
        memory = self.agent.memory
        for arena in list(memory._arenas.values()):
            with arena._changed:
                assert arena._changed.wait_for(lambda arena=arena: not arena._blocks, 30.0), (
                    "staging was not given back"
                )
        self.agent.check_integrity()
        counts = {state: n for state, n in memory.ledger.counts().items() if n}
        assert set(counts) <= {"free"}, counts


class Worker:
    """All ranks of a worker in this process. Use as a context manager.

    Args:
        sidecar: directory for the socket of a daemon (here, too) that the agents live in; "" is none.
    """

    def __init__(self, layout: Layout, *, seed: int = 0, worker: str = "", sidecar: str = "", **config: Any) -> None:
        self.layout, self.stack = layout, ExitStack()
        self.ranks: list[Rank] = []
        with self.stack:
            if sidecar:
                config["sidecar"] = self.stack.enter_context(_daemon(sidecar, config)).config.socket
            for rank in range(len(layout)):
                self.ranks.append(Rank(layout, rank, seed=seed, worker=worker or f"w{seed}", **config))
                self.stack.callback(self.ranks[-1].agent.close)
            self.stack = self.stack.pop_all()
        addresses = {r.rank: r.agent.address for r in self.ranks}
        for rank in self.ranks:
            rank.agent.siblings.update(addresses)

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stack.close()

    @property
    def agents(self) -> list[CountingAgent]:
        """Agents by rank."""
        return [rank.agent for rank in self.ranks]

    def memory(self, key: str) -> Memory:
        """The worker's memory with one request's tables."""
        buffers, tables = zip(*[(r.buffers, r.tables[key]) for r in self.ranks], strict=True)
        return Memory(layout=self.layout, buffers=buffers, tables=tables)

    def reserve(self, key: str, tokens: int) -> Memory:
        """Page tables on every rank."""
        for rank in self.ranks:
            rank.reserve(key, tokens)
        return self.memory(key)

    def offer(self, key: str, tokens: int, *, oracle: Oracle | None = None, **options: Any) -> str:
        """Fill the pages of a fresh request and offer them; returns the ticket's text. ``on_end`` frees the pages."""
        memory = self.reserve(key, tokens)
        (oracle or Oracle.of(self.layout, key=key, tokens=tokens)).put(memory)
        parts = [r.agent.offer(key, r.tables[key], kv_tokens=tokens, **options) for r in self.ranks]
        return Ticket.join(parts).encode()

    def start(self, ticket: str, key: str, **options: Any) -> list[Fetch]:
        """Begin on every rank; the pages must be reserved."""
        options.setdefault("timeout_s", 30.0)
        return [r.agent.start_fetch(ticket, r.tables[key], **options) for r in self.ranks]

    def fetch(self, ticket: str, key: str, **options: Any) -> list[Received]:
        """Fetch on every rank; raises the first rank's error, after all have ended."""
        return settle(self.start(ticket, key, **options))

    def check_idle(self) -> None:
        """See ``Rank.check_idle``."""
        for rank in self.ranks:
            rank.check_idle()


def _daemon(directory: str, config: dict[str, Any]) -> Daemon:
    """A daemon whose agents have this config, of which only what is an engine's own remains."""
    of_agent = {name: config.pop(name) for name in list(config) if name not in ("own_memory", "wrap")}
    agent = AgentConfig(**{"worker": "w", "arena_bytes": 1 << 20, "chunk_bytes": 64 << 10, **of_agent})
    return Daemon(DaemonConfig(socket=f"{directory}/{secrets.token_hex(4)}/s", agent=agent))


def _check_counted(fetch: Fetch) -> None:
    """Whatever ended a fetch has moved its counter, and is in its timeline. (In a sidecar both are the daemon's.)"""
    if not isinstance(fetch, Fetch):
        return
    timeline, counts = fetch.timeline, fetch.agent.journal.counts
    reason = reason_of(timeline.reason).name
    assert timeline.outcome in ("failed", "cancelled"), timeline
    assert counts["transfer_failures", "target", reason], (reason, counts)
    assert counts["transfers", timeline.transport, "target", timeline.outcome], counts
    if reason == "CORRUPT":
        kind = component_kind(timeline.component)
        assert counts["integrity_failures", kind, timeline.transport], counts


def settle(fetches: Sequence[Fetch]) -> list[Received]:
    """Wait for all; raise the first error, the cause before those who heard of it from a sibling; each is counted."""
    received, errors = [], []
    for fetch in fetches:
        try:
            received.append(fetch.wait())
        except Exception as error:
            errors.append(error)
            _check_counted(fetch)
    for error in sorted(errors, key=lambda e: type(e) is PeerError):
        for done in received:
            done.release()
        raise error
    return received


def _tensor(buffer: np.ndarray) -> Any:
    import torch

    return torch.from_numpy(buffer)


# ---------------------------------------------------------------- taps and gates


class Tap:
    """Sees what passes on the channels of the transports it wraps, and may change it."""

    def sending(self, header: bytes) -> None:
        """Called before a message is sent."""

    def received(self, message: Message) -> list[Message]:
        """Called with each received message; returns what is handed out in its place."""
        return [message]

    def wrap(self, transport: Transport) -> Transport:
        """Pass to ``Rank(wrap=...)``, or put it into an agent's ``transports`` before it connects."""
        return WrappedTransport(transport, partial(_TappedChannel, self))


class Gate(Tap):
    """Stops every channel at one data frame, so that a test can act in the middle of a transfer.

    Args:
        on: ``receive`` (a target that has got the chunk and not yet looked at it) or ``send`` (a source that has
            packed the chunk and not yet sent it).
        chunk: which one.
    """

    def __init__(self, on: str, chunk: int = 0) -> None:
        self.on, self.chunk = on, chunk
        self.opened = threading.Event()
        self._arrived = threading.Semaphore(0)

    def open(self) -> None:
        """Let it, and all that follow, go on."""
        self.opened.set()

    def wait(self, channels: int = 1) -> None:
        """Wait until so many channels stand before it."""
        for _ in range(channels):
            assert self._arrived.acquire(timeout=60.0), "the gate was not reached"

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Wait until it is reached; open it at the end."""
        try:
            self.wait()
            yield
        finally:
            self.open()

    def sending(self, header: bytes) -> None:
        """Stop a source."""
        if self.on == "send":
            self._stop_at(header)

    def received(self, message: Message) -> list[Message]:
        """Stop a target."""
        if self.on == "receive":
            self._stop_at(message.header)
        return [message]

    def _stop_at(self, header: bytes) -> None:
        if self.opened.is_set():
            return
        frame = wire.decode(header)
        if isinstance(frame, wire.Data) and frame.chunk == self.chunk:
            self._arrived.release()
            if not self.opened.wait(100.0):
                raise TransportError("nobody opened the gate")


class _TappedChannel(WrappedChannel):
    def __init__(self, tap: Tap, inner: Channel) -> None:
        super().__init__(inner)
        self._tap = tap
        self._waiting: list[Message] = []

    def send_all(self, header: bytes, payload: memoryview | None = None, *, timeout_s: float) -> Sending:
        self._tap.sending(header)
        return super().send_all(header, payload, timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> Message:
        while not self._waiting:
            self._waiting = self._tap.received(super().receive(timeout_s=timeout_s))
        return self._waiting.pop(0)


# ---------------------------------------------------------------- what a process holds


def resources(directory: str, process: str | int = "self") -> dict[str, int]:
    """What a process and its temporary directory hold now; compare two of them."""
    links = []
    for fd in os.listdir(f"/proc/{process}/fd"):
        try:
            links.append(os.readlink(f"/proc/{process}/fd/{fd}"))
        except FileNotFoundError:  # the one that lists
            continue
    with open(f"/proc/{process}/maps", encoding="utf-8") as maps:
        memfds = sum("memfd:" in line for line in maps)
    files = sum(len(dirs) + len(names) for _, dirs, names in os.walk(directory))
    return {
        "fds": len(links),
        "sockets": sum(link.startswith("socket:") for link in links),
        "memfds": memfds + sum("memfd:" in link for link in links),
        "threads": threading.active_count() if process == "self" else len(os.listdir(f"/proc/{process}/task")),
        "files": files,
    }


def layouts(
    source: Parallel, target: Parallel, *, spec: CacheSpec | None = None, source_storage: Storage | None = None,
    target_storage: Storage | None = None,
) -> tuple[Layout, Layout]:  # fmt: skip
    """Two layouts that differ in pages, axis orders and placement."""
    spec = spec or hybrid_spec()
    other = Storage(page_tokens=8, kv_order="HND", conv_order="TC", state_order="VK", pages=256)
    return (
        build_layout(spec, source, source_storage or Storage(), "per_layer"),
        build_layout(spec, target, target_storage or other, "unified"),
    )
