"""Observer: all agents of one process, watched: what metrics, admin, page and commands are made of.

In come agents, as they come and go; out come counts that never go back, readiness, and one JSON value with everything
a person asks for. It publishes readiness to every agent's ``grpc.health.v1``. It opens no port: ``Admin`` does.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from pdxfer.agent import Agent
from pdxfer.agent.journal import Listener, Timeline
from pdxfer.agent.reasons import reason_of
from pdxfer.errors import MisuseError
from pdxfer.observe.metrics import Metrics
from pdxfer.observe.readiness import Readiness

__all__ = ["SCHEMA_VERSION", "Observer"]

SCHEMA_VERSION = 1
_PUBLISH_S = 2.0
_SECRET_WORDS = ("key", "secret", "token", "password", "nonce")


def _version() -> str:
    try:
        return metadata.version("pdxfer")
    except metadata.PackageNotFoundError:
        return "0"  # a tree that was never installed


class Observer:
    """Watches agents. Thread-safe; use as a context manager, or ``close`` it.

    Args:
        config: what ``/configz`` shows; by default the agents' own configs. What looks like a secret is not shown.
        actions: by name, what a POST does beside ping, drain and undrain (or in their place): takes the query's fields,
            returns JSON (the latter two: draining, underway), may raise PdxferError.
        listeners: who else hears of every agent's transfers. draining: of the whole process, also without an agent.
    """

    def __init__(
        self,
        *,
        config: Callable[[], Mapping[str, Any]] | None = None,
        actions: Mapping[str, Callable[[Mapping[str, str]], Mapping[str, Any]]] | None = None,
        listeners: tuple[Listener, ...] = (),
        draining: Callable[[], bool] = lambda: False,
    ) -> None:
        self.started_at, self.version = time.time(), _version()
        self.readiness = Readiness(lambda: self.agents, draining)
        self.actions = {"ping": self._ping, "drain": self._drain, "undrain": self._undrain, **(actions or {})}
        self.metrics = Metrics(self)
        self.listeners: tuple[Listener, ...] = (self.readiness.window, self.metrics, *listeners)
        self._config = config
        self._agents: list[Agent] = []
        self._gone: Counter[tuple[str, ...]] = Counter()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="pdxfer-observer", daemon=True)
        self._thread.start()

    def add(self, agent: Agent) -> None:
        """Watch an agent, attached and started, from now on."""
        with self._lock:
            self._agents.append(agent)
        agent.journal.listeners.extend(self.listeners)

    def remove(self, agent: Agent) -> None:
        """Watch it no more, before or after it closed; what it counted stays counted."""
        with self._lock:
            if agent in self._agents:
                self._agents.remove(agent)
                self._gone.update(_counts(agent))
        agent.journal.listeners[:] = [heard for heard in agent.journal.listeners if heard not in self.listeners]

    @property
    def agents(self) -> tuple[Agent, ...]:
        """Those that are watched now."""
        with self._lock:
            return tuple(self._agents)

    def counts(self) -> Counter[tuple[str, ...]]:
        """Everything counted, by name and labels, over all agents there ever were."""
        with self._lock:
            found = Counter(self._gone)
            agents = tuple(self._agents)
        for agent in agents:
            found.update(_counts(agent))
        return found

    def timelines(self) -> list[Timeline]:
        """Live ones, then ended ones, each newest first."""
        found = [timeline for agent in self.agents for timeline in agent.journal.timelines()]
        return sorted(found, key=lambda t: (bool(t.outcome), -t.began_s))

    def problems(self) -> dict[str, str]:
        """Readiness by check; see ``readiness``."""
        return self.readiness.problems()

    def config(self) -> dict[str, Any]:
        """The config, without secrets."""
        shown = self._config() if self._config else {"agents": [dataclasses.asdict(a.config) for a in self.agents]}
        found = _redacted(shown)
        assert isinstance(found, dict)
        return found

    def act(self, name: str, fields: Mapping[str, str]) -> Mapping[str, Any]:
        """Do what a POST asks for; raises PdxferError."""
        if name not in self.actions:
            known = ", ".join(sorted(self.actions)) or "nothing"
            raise MisuseError(f"this process can't {name}; it can {known}", reason="NOT_FOUND")
        return self.actions[name](fields)

    def _ping(self, fields: Mapping[str, str]) -> Mapping[str, Any]:
        from pdxfer.observe.probe import ping, resolve

        agent, address = resolve(self.agents, fields.get("peer", ""))
        return ping(agent, address)

    def _drain(self, fields: Mapping[str, str]) -> Mapping[str, Any]:
        for agent in self.agents:
            agent.drain()
        return {"draining": True, "underway": sum(agent.underway() for agent in self.agents)}

    def _undrain(self, fields: Mapping[str, str]) -> Mapping[str, Any]:
        for agent in self.agents:
            agent.undrain()
        return {"draining": False, "underway": sum(agent.underway() for agent in self.agents)}

    def status(self) -> dict[str, Any]:
        """Everything, as JSON."""
        agents, timelines, problems = self.agents, self.timelines(), self.problems()
        ended = Counter(t.outcome or "live" for t in timelines)
        return {
            "schema_version": SCHEMA_VERSION,
            "version": self.version,
            "pid": os.getpid(),
            "started_at": self.started_at,
            "ready": not any(problems.values()),
            "checks": problems,
            "draining": bool(problems["draining"]),
            "underway": sum(agent.underway() for agent in agents),
            "transfers": dict(ended),
            "agents": [_agent(agent) for agent in agents],
            "peers": [peer for agent in agents for peer in _peers(agent)],
        }

    def close(self) -> None:
        """Watch nothing any more. Idempotent."""
        self._stop.set()
        self._thread.join()
        for agent in self.agents:
            self.remove(agent)

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _publish(self) -> None:
        while not self._stop.wait(_PUBLISH_S):
            self._publish_now()

    def _publish_now(self) -> None:
        """In a frame of its own, which keeps no agent alive between two looks."""
        problems = self.problems()
        for agent in self.agents:
            agent.publish_health(not any(problems.values()), planes=not problems["planes"])


def _counts(agent: Agent) -> Counter[tuple[str, ...]]:
    found = Counter(agent.journal.counts)
    for (scheme, reason), times in list(agent.peers.fallbacks.items()):
        found[("transport_fallbacks", scheme, reason if reason == "NOT_IN_COMMON" else reason_of(reason).name)] += times
    for scheme, arena in agent.memory.arenas().items():
        found[("backpressure_seconds", scheme)] += arena.waited_s  # type: ignore[assignment]
        found[("backpressure_rejections", scheme)] += arena.refusals
    return found


def _agent(agent: Agent) -> dict[str, Any]:
    layout = agent.memory.layout
    return {
        "worker": agent.config.worker,
        "rank": agent.config.rank,
        "ranks": len(layout),
        "epoch": agent.epoch.hex(),
        "address": agent.address,
        "transports": list(agent.contact_addresses),
        "model": layout.spec.model,
        "layout": layout.digest,
        "slots": agent.memory.ledger.counts(),
        "staging": {
            scheme: {"used_bytes": a.used_bytes, "peak_bytes": a.peak_bytes, "capacity_bytes": a.capacity_bytes}
            for scheme, a in agent.memory.arenas().items()
        },
        "leases": agent.journal.live("source"),
        "fetches": agent.journal.live("target"),
        "kept_tickets": agent.keeper.kept(),
        "draining": agent.draining,
    }


def _peers(agent: Agent) -> list[dict[str, Any]]:
    """By worker, what transfers told; with the addresses of those that we fetched from."""
    paths: dict[str, list[dict[str, Any]]] = {}
    for peer, idle in agent.peers.known():
        about = peer.description
        paths.setdefault(about.worker, []).append({
            "rank": about.rank, "address": peer.address, "epoch": about.epoch.hex(), "idle_channels": idle,
            "same_host": about.host == agent.host, "layout": about.layout_digest, "transports": list(about.transports),
            "falling_back_from": agent.peers.falling_back.get(peer.address, ""),
        })  # fmt: skip
    seen = dict(agent.journal.peers)
    return [
        {
            "of_rank": agent.config.rank,
            "worker": worker,
            "paths": paths.get(worker, []),
            **(dataclasses.asdict(seen[worker]) if worker in seen else {}),
        }
        for worker in sorted({*paths, *seen})
    ]


def _redacted(value: Any, name: str = "") -> Any:
    if isinstance(value, Mapping):
        return {str(key): _redacted(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, bytes) or (value and any(word in name.lower() for word in _SECRET_WORDS)):
        return "(not shown)"
    if isinstance(value, (list, tuple)):
        return [_redacted(inner, name) for inner in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
