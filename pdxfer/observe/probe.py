"""Probe: how far a peer is: one control round trip, and for each data plane a round trip and a rate.

In come one of our agents and a control address; out comes JSON. The peer needs no part for it: a Hello with a session
that nobody has is answered by Fail, and payloads that come with late frames are taken and dropped. Both ends' logs have
a line about it. Nothing is offered, fetched or kept.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from pdxfer import wire
from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import MisuseError, PdxferError
from pdxfer.plan import make_plan
from pdxfer.spec import Axis, CacheSpec, Component, Growth, Ownership, Rule
from pdxfer.transport import Channel, Transport

__all__ = ["passing_agent", "ping", "resolve"]

_TIMES = 5
_PAYLOAD_BYTES, _PAYLOADS = 4 << 20, 16
_CONNECT_S, _ANSWER_S = 5.0, 30.0


def ping(agent: Agent, address: str, *, compare: bool = True) -> dict[str, Any]:
    """Measure the way from ``agent`` to the agent at ``address``.

    Args:
        compare: whether to say if the peer's layout can be mapped to ours.

    Raises:
        PdxferError: it does not answer at all. A plane that fails is in the answer.
    """
    peer = agent.peers.get(address, epoch=None, deadline_s=time.monotonic() + _CONNECT_S)
    about = peer.description
    control_s = _best(lambda: peer.client.health(timeout_s=_CONNECT_S))
    found: dict[str, Any] = {
        "address": address, "worker": about.worker, "rank": about.rank, "same_host": about.host == agent.host,
        "layout": about.layout_digest, "control": {"round_trip_s": control_s}, "planes": [],
    }  # fmt: skip
    for scheme, transport in agent.transports.items():
        for contact in (c for c in about.transports if c.startswith(f"{scheme}://")):
            plane = {"transport": scheme, "address": contact}
            if scheme == "shm" and not found["same_host"]:
                found["planes"].append({**plane, "skipped": "the peer is on another machine"})
                continue
            try:
                found["planes"].append({**plane, **_plane(transport, contact)})
            except PdxferError as error:
                found["planes"].append({**plane, "error": error.message})
    if compare:
        try:
            make_plan(peer.layout, agent.memory.layout)
            found["fits"] = ""
        except PdxferError as error:
            found["fits"] = error.message
    return found


def _best(call: Callable[[], object]) -> float:
    spent: list[float] = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
    return round(min(spent), 7)


def _plane(transport: Transport, contact: str) -> Mapping[str, Any]:
    region = transport.allocate(_PAYLOAD_BYTES, "ping")
    try:
        with transport.connect(contact, timeout_s=_CONNECT_S) as channel:
            round_trip_s = _best(lambda: _hello(channel))
            if transport.can_export:
                source = np.frombuffer(region.view, np.uint8)
                copy = np.empty_like(source)
                seconds = _best(lambda: np.copyto(copy, source))
                return _rate(round_trip_s, _PAYLOAD_BYTES / seconds, "one copy on this machine")
            late, began = wire.encode(wire.Want(secrets.token_bytes(16), [])), time.perf_counter()
            for _ in range(_PAYLOADS):
                channel.send_all(late, region.view, timeout_s=_ANSWER_S)
            _hello(channel)  # answered in turn, so all before it has come
            seconds = time.perf_counter() - began
            return _rate(round_trip_s, _PAYLOADS * _PAYLOAD_BYTES / seconds, "received by the peer")
    finally:
        region.close()


def _hello(channel: Channel) -> None:
    channel.send_all(wire.encode(wire.Hello(secrets.token_bytes(16), False, [])), timeout_s=_ANSWER_S)
    channel.receive(timeout_s=_ANSWER_S).release()


def _rate(round_trip_s: float, bytes_per_s: float, how: str) -> Mapping[str, Any]:
    return {"round_trip_s": round_trip_s, "bytes_per_s": round(bytes_per_s), "how": how}


@contextmanager
def passing_agent(config: AgentConfig | None = None) -> Iterator[Agent]:
    """An agent that is there for a moment, with a cache of one page, where none runs that could ask."""
    axis, own = (Axis(name="dim", extent=8),), Ownership(rule=Rule.REPLICATED)
    part = Component(name="latent", layers=(0,), axes=axis, dtype="bfloat16", growth=Growth.PER_TOKEN, ownership=own)
    spec = CacheSpec(model="ping", num_layers=1, query_heads=1, components=(part,))
    layout = build_layout(spec, Parallel(), Storage(pages=1), "per_layer")
    with Agent(config or AgentConfig(worker=f"ping-{os.getpid()}")) as agent:
        agent.attach(layout, agent.allocate(layout.ranks[0]))
        agent.start()
        yield agent


def resolve(agents: tuple[Agent, ...], peer: str) -> tuple[Agent, str]:
    """Which agent asks whom: an address as it is, a worker's name as far as one of us has met it."""
    if not agents:
        raise MisuseError("no engine is attached, so there is nobody to ask from")
    if "://" in peer:
        return agents[0], peer
    for agent in agents:
        for known, _ in agent.peers.known():
            if known.description.worker == peer:
                return agent, known.address
    hint = "pdxfer peers lists them; an address (unix:///path, tcp://host:port) can be asked at any time"
    raise MisuseError(f"no worker {peer!r} has been met", hint=hint, reason="NOT_FOUND")
