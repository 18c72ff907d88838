"""Daemon: agents of one worker's local ranks, beside the engines that use them (``pdxfer agent``).

In come engines over a Unix socket (``client.py`` is their end), which hand over memory and a layout and then say what
an embedded ``Agent`` would be called with; out go answers and events. One ``Agent`` per attached rank does the work;
this file knows who is attached, and when to end.

::

    engine rank 0 ─ Unix socket (memfds, frames) ─▶ Attached ─ Agent ─┐
    engine rank 1 ─ Unix socket (memfds, frames) ─▶ Attached ─ Agent ─┼─ control and data, to other agents
    pdxfer drain  ─ Unix socket ─▶ Attached (attaches nothing)        │
    probes        ─ grpc.health.v1: "" (ready), "live" ──────────┘

An engine that dies closes its socket, and everything of it ends: offers are withdrawn, fetches cancelled, pages wait
until no thread of ours is at them, memory is unmapped; only then may its next life attach. In the other direction the
socket is closed last: an engine that sees it closed knows that nothing here can touch its memory any more.

**The order of an end.** ``drain`` first says NOT_SERVING (``""``; ``"live"`` stays SERVING until the process goes),
so that routers look elsewhere; then offers and fetches are refused (DRAINING), while leases that live are served, for
``drain_s`` at most; then everything closes. The engine has to live as long: its pages are what is read. So drain
*before* the engine is stopped: in Kubernetes ``pdxfer drain --wait`` is the engine container's preStop (a native
sidecar gets its own SIGTERM only after the engine has gone), under systemd an ExecStop of the engine's unit, which
says ``After=`` the sidecar's and so stops first. When only the engine restarts, the daemon is still draining: its next
life begins with ``pdxfer undrain`` (postStart, ExecStartPre), or could not attach.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol

from pdxfer.agent.attached import Attached
from pdxfer.agent.config import DaemonConfig
from pdxfer.agent.frames import Pipe, check_private
from pdxfer.agent.service import Agent
from pdxfer.control import ControlServer
from pdxfer.directory import clear_stale_socket, remove_socket
from pdxfer.errors import MisuseError, PdxferError
from pdxfer.messages import ControlHandler

__all__ = ["Daemon", "Watch"]

_TICK_S = 0.1
_TAKEN_S = 20.0  # how long an engine's next life waits for the end of its last
_JOIN_S = 30.0
_TIDY_S = 1.0
_log = logging.getLogger("pdxfer.daemon")


class _Nobody(ControlHandler):
    """Answers at the health addresses, where no rank lives."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise MisuseError("no rank is at this address, only its health")

    describe = open = complete = abort = renew = _refuse


class Watch(Protocol):
    """Hears of agents as they come and go (``observe.Observer``)."""

    def add(self, agent: Agent) -> None:
        """It is attached and started."""

    def remove(self, agent: Agent) -> None:
        """It has closed."""


class Daemon:
    """One daemon: construct (binds), ``start``, ``drain``, ``close``. Any thread may call.

    Attributes:
        agents: the attached ranks' agents, by rank.
        draining: whether it takes nothing new.

    Raises:
        MisuseError: the socket's directory is not ours alone, or another daemon listens there.
    """

    def __init__(self, config: DaemonConfig, watch: Watch | None = None) -> None:
        self.config, self._watch = config, watch
        self.agents: dict[int, Agent] = {}
        self.draining = False
        self._changed = threading.Condition()
        self._engines: set[Attached] = set()
        self._closing = threading.Event()
        self._tidy: threading.Timer | None = None
        self._socket = _listen(config.socket)
        self._inode = os.stat(config.socket).st_ino
        self._accepting = threading.Thread(target=self._accept, name="pdxfer-daemon-accept", daemon=True)
        self._health: ControlServer | None = None
        if config.health:
            try:
                # Probes speak no TLS, and there is nothing here but whether we are well.
                self._health = ControlServer(_Nobody(), config.health, max_workers=2, reflection=False, insecure=True)
            except BaseException:
                self._unlink()
                raise

    def start(self) -> None:
        """Accept engines, and be ready."""
        self._accepting.start()
        if self._health is not None:
            self._health.start()
            self._health.set_serving(True, "live")
        _log.info("engines may attach at %s", self.config.socket)

    def set_ready(self, ready: bool) -> None:
        """What readiness checks say of the whole; a daemon that drains stays not ready."""
        if self._health is not None:
            self._health.set_serving(ready and not self.draining)

    def reconfigure(self, config: DaemonConfig) -> None:
        """Take over what may change while we run: the log level, ``drain_s``, and ``RELOADABLE`` of every agent."""
        with self._changed:
            agent = self.config.agent.reloaded(config.agent)
            self.config = replace(self.config, drain_s=config.drain_s, log_level=config.log_level, agent=agent)
            agents = list(self.agents.values())
        logging.getLogger("pdxfer").setLevel(config.log_level.upper())
        for each in agents:
            each.reconfigure(agent)

    def drain(self) -> None:
        """Take nothing new from now on; see the module for the order. Idempotent, returns at once."""
        with self._changed:  # for all of it: an undrain at the same moment comes before, or after
            self.draining = True
            self.set_ready(False)
            for agent in self.agents.values():
                agent.drain()

    def undrain(self) -> None:
        """Take new work and engines again: a drain that was meant for an engine's restart is over. Idempotent."""
        with self._changed:
            self.draining = False
            for agent in self.agents.values():
                agent.undrain()

    def underway(self) -> int:
        """Offers and fetches whose end their engine has not been told."""
        with self._changed:
            engines = list(self._engines)
        return sum(engine.underway() for engine in engines)

    def close(self) -> None:
        """End every engine's agent, then the sockets. Idempotent."""
        self._closing.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._accepting.is_alive():
            self._accepting.join(_JOIN_S)
        with self._changed:
            engines = list(self._engines)
        for engine in engines:
            engine.stop()
        for engine in engines:
            engine.ended.wait(_JOIN_S)
        if self._health is not None:
            self._health.stop()
        self._unlink()

    def _unlink(self) -> None:
        self._socket.close()
        remove_socket(self.config.socket, self._inode)

    def __enter__(self) -> Daemon:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- for Attached ---------------------------------------------------------------------------------

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                engine = Attached(self, Pipe(self._socket.accept()[0]))
            except PdxferError as error:
                _log.warning("somebody was turned away: %s", error)
                continue
            except OSError as error:
                if not self._closing.wait(_TICK_S):
                    _log.warning("no engine could be accepted: %s", error)
                continue
            with self._changed:
                self._engines.add(engine)
            try:
                engine.start()
            except RuntimeError as error:  # no thread is left
                _log.warning("an engine is turned away: %s", error)
                self.forget(engine)
                engine.pipe.close()

    def take(self, rank: int, agent: Agent) -> None:
        """Give a rank to an agent; its former one may just be ending. Raises MisuseError when it lives."""
        with self._changed:
            if not self._changed.wait_for(lambda: rank not in self.agents, _TAKEN_S):
                raise MisuseError(f"rank {rank} is attached already", hint="end its other engine process")
            self.agents[rank] = agent

    def taken(self, agent: Agent) -> None:
        """A rank's agent has started."""
        if self._watch is not None:
            self._watch.add(agent)
        with self._changed:  # what began while it was attached
            agent.reconfigure(self.config.agent)
            if self.draining:
                agent.drain()

    def tidy_soon(self) -> None:
        """Collect what went in circles when it ended (errors and their frames, agents and their peers): it may keep
        memory mapped, and in an idle process nothing else would.
        """
        with self._changed:
            if self._tidy is None and not self._closing.is_set():
                timer = threading.Timer(_TIDY_S, self._tidy_up)
                timer.daemon = True
                with suppress(RuntimeError):  # no thread is left: the next end tries again
                    timer.start()
                    self._tidy = timer

    def _tidy_up(self) -> None:
        with self._changed:
            self._tidy = None
        gc.collect()

    def give_up(self, rank: int, agent: Agent) -> None:
        """A rank's agent has closed."""
        if self._watch is not None:
            self._watch.remove(agent)
        with self._changed:
            if self.agents.get(rank) is agent:
                del self.agents[rank]
            self._changed.notify_all()

    def forget(self, engine: Attached) -> None:
        """An engine is gone."""
        with self._changed:
            self._engines.discard(engine)


def _listen(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        check_private(os.path.dirname(path))
        clear_stale_socket(path)
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(64)
    except OSError as error:
        sock.close()
        raise MisuseError(f"can't listen at {path}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    return sock
