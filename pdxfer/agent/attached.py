"""Attached: one connection to a daemon: an engine's rank with its agent, or somebody who only asks.

In come frames, in order; out go answers, and events from the agent's threads. What a request may be is a ``do_`` method
here; ``client.py`` is the other end, ``daemon.py`` knows all of them.

One thread reads. It runs what it has read, so that nobody need be woken for it; before it runs a whole fetch, it wakes
another one to read on. Answers go to the socket that came with ``attach``, which the engine's callers read themselves.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from pdxfer.agent.config import Incarnation
from pdxfer.agent.fetch import Fetch, Received
from pdxfer.agent.frames import FRAMES_VERSION, Pipe, error_to
from pdxfer.agent.service import Agent, host_name
from pdxfer.agent.sidecar_fetch import edge_to
from pdxfer.errors import AbortedError, MisuseError, PdxferError, PeerError
from pdxfer.layout import Layout
from pdxfer.transport.shm import ShmTransport
from pdxfer.transport.vm import map_memfd

if TYPE_CHECKING:
    from pdxfer.agent.daemon import Daemon

__all__ = ["Attached"]

_REGIONS_MAX = 4096
_TICK_S = 0.1
_FENCE_S = 120.0
_SPARE_MAX = 2
_log = logging.getLogger("pdxfer.daemon")


class Attached:
    """One connection. Events come from the agent's threads.

    Attributes:
        pipe: requests come by it, and events go. ended: all that it held is given back.
    """

    def __init__(self, daemon: Daemon, pipe: Pipe) -> None:
        self._owner, self.pipe, self._answers = daemon, pipe, pipe
        self._rank = 0
        self._agent: Agent | None = None
        self._regions: list[tuple[int, int, str]] = []
        self._answering = False
        self._offers: set[str] = set()
        self._fetches: dict[int, Fetch] = {}
        self._received: dict[int, Received] = {}
        self._unsettled: dict[int, Fetch] = {}
        self._fences: dict[str, tuple[threading.Event, list[str]]] = {}
        self._gone, self.ended = threading.Event(), threading.Event()
        self._spare = 0
        self._lock, self._turns = threading.Lock(), SimpleQueue[None]()

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._run, name="pdxfer-daemon-engine", daemon=True).start()

    def stop(self) -> None:
        """End it all, soon; ``ended`` says when. Only then does the engine see the socket closed."""
        self._gone.set()

    def underway(self) -> int:
        """Offers and fetches whose end the engine has not been told, and a request that may become one: with less, a
        drain would cut off its last word.
        """
        asked = self._answering and self._agent is not None
        return len(self._offers) + len(self._fetches) + asked

    def _run(self) -> None:
        """A thread that reads when it is its turn, until the engine is gone or threads enough wait for theirs."""
        while self._read() and self._wait():
            continue

    def _read(self) -> bool:
        """Serve it, and when it is gone end all that it held; True when another thread reads on."""
        begun: Callable[[], None] | None = None
        try:
            while not self._gone.is_set():
                if (frame := self.pipe.receive(_TICK_S)) is not None:
                    self._answering = True
                    later = self._answer(*frame)
                    self._answering = False
                    if later is not None:
                        if self._hand_on():
                            begun = later
                            break
                        later()
                self._tell_settled()
        except PeerError as error:
            _log.log(logging.INFO if error.reason == "SIDECAR_LOST" else logging.ERROR, "an engine is gone: %s", error)
        finally:
            if begun is None:
                self._end()
        if begun is not None:
            begun()
        return begun is not None

    def _hand_on(self) -> bool:
        """Let another thread read; False when there is none left."""
        with self._lock:
            spare, self._spare = self._spare, max(0, self._spare - 1)
        if spare:
            self._turns.put(None)
            return True
        try:
            self.start()
        except RuntimeError:
            return False
        return True

    def _wait(self) -> bool:
        """Wait for this thread's turn to read; False when it is not needed."""
        with self._lock:
            if self._spare >= _SPARE_MAX or self._gone.is_set():
                return False
            self._spare += 1
        self._turns.get()
        return not self._gone.is_set()

    def _end(self) -> None:
        self._gone.set()
        with self._lock:
            spare, self._spare = self._spare, 0
        for _ in range(spare):
            self._turns.put(None)
        for passed, _ in list(self._fences.values()):
            passed.set()
        agent, self._agent = self._agent, None
        self._close_regions()
        if agent is not None:
            agent.close()
            self._offers, self._fetches, self._received, self._unsettled = set(), {}, {}, {}
            _log.info("rank %d is detached", self._rank)
        self._answers.close()  # the engine may use its pages from here on
        self.pipe.close()
        self._owner.forget(self)
        if agent is not None:
            self._owner.give_up(self._rank, agent)
            self._owner.tidy_soon()
        self.ended.set()

    def _close_regions(self) -> None:
        for fd, _, _ in self._regions:
            os.close(fd)
        self._regions = []

    # -- requests ------------------------------------------------------------------------------------

    def _answer(self, number: int, name: str, values: Any, fds: list[int]) -> Callable[[], None] | None:
        """Run a request and answer it; returns what is yet to be run of it, by a thread that does not read."""
        answers = self._answers
        try:
            call = _REQUESTS.get(name)
            if call is None or not isinstance(values, dict) or any(type(key) is not str for key in values):
                raise MisuseError(f"the sidecar knows no request {name!r}", hint="compare the two versions of pdxfer")
            if call in _WITH_FILES:
                values["fds"] = fds
            answer = call(self, **values)
        except Exception as error:  # noqa: BLE001 - the engine is told, and our log has the rest
            if not isinstance(error, PdxferError):
                _log.exception("request %s failed", name)
            if isinstance(error, TypeError):
                error = MisuseError(f"request {name!r} has wrong arguments: {error}")
            if number:
                answers.send(number, "error", error_to(error))
            return None
        finally:
            for fd in fds:
                os.close(fd)
        if call is Attached.do_fetch:
            return partial(answer, number)
        if number:
            answers.send(number, "ok", answer)
        return None

    @property
    def agent(self) -> Agent:
        """Our agent; raises MisuseError before ``attach``."""
        if self._agent is None:
            raise MisuseError("this engine has attached no rank")
        return self._agent

    def do_hello(self, version: int) -> dict[str, Any]:
        """The greeting."""
        if version != FRAMES_VERSION:
            what = f"the engine's pdxfer speaks sidecar protocol {version}, this one {FRAMES_VERSION}"
            raise MisuseError(what, reason="PROTOCOL_VERSION", hint="run one version on both sides")
        return {"version": FRAMES_VERSION, "host": host_name()}

    def do_region(self, fds: list[int], nbytes: int, name: str) -> None:
        """Memory of the rank that is about to attach."""
        if self._agent is not None or len(self._regions) >= _REGIONS_MAX or len(fds) != 1:
            raise MisuseError("a region comes with its file, before attach")
        self._regions.append((os.dup(fds[0]), nbytes, name))

    def do_attach(
        self, fds: list[int], rank: int, worker: str, layout: bytes, epoch: bytes, key: bytes
    ) -> dict[str, Any]:
        """Make the rank's agent over the regions that came; later answers go to the socket that comes along."""
        if self._agent is not None:
            raise MisuseError("this engine has attached already")
        if self._owner.draining:
            raise PeerError("this sidecar drains: it takes nothing new", reason="DRAINING")
        if len(fds) != 1:
            raise MisuseError("an engine attaches with a socket for its answers")
        config = self._owner.config.of_rank(rank, worker)
        agent = Agent(config, Incarnation(epoch=epoch, key=key))
        try:
            self._owner.take(rank, agent)
            self._rank, self._agent = rank, agent
            regions = [_adopt(agent, *region) for region in self._regions]
            agent.attach(Layout.from_bytes(layout), regions)
            agent.start()
            self._answers = Pipe(socket.socket(fileno=os.dup(fds[0])))
        except BaseException:
            agent.close()
            self._agent = None
            self._owner.give_up(rank, agent)
            raise
        finally:
            self._close_regions()
        self._owner.taken(agent)
        _log.info("rank %d of %s is attached by process %d", rank, config.worker, self.pipe.process_id)
        issuer = agent.issuer
        return {
            "address": issuer.address,
            "keys": issuer.keys.active(),
            "key_file": issuer.keys.path,
            "config": {
                "worker": config.worker,
                "hold_max_s": config.hold_max_s,
                "arena_bytes": config.arena_bytes,
                "chunk_bytes": config.chunk_bytes,
            },
        }

    def do_seal(self, transfer: str, tables: Mapping[str, Any], fence: bool, **facts: Any) -> str:
        """See ``Agent.seal``."""
        wait = partial(self._fence, transfer) if fence else None
        known = transfer in self._offers  # then it is refused, and the other one goes on
        self._offers.add(transfer)
        try:
            return self.agent.seal(transfer, tables, fence=wait, on_end=self._on_end, **facts)
        except BaseException:
            if not known:
                self._offers.discard(transfer)
            raise

    def do_withdraw(self, transfer: str) -> None:
        """See ``Agent.withdraw``."""
        self.agent.withdraw(transfer)

    def do_keep(self, ticket: str) -> None:
        """See ``Agent.keep``."""
        self.agent.keep(ticket)

    def do_decline(self, ticket: str, reason: str) -> None:
        """See ``Agent.decline``."""
        self.agent.decline(ticket, reason)

    def do_siblings(self, addresses: dict[int, str]) -> None:
        """Control addresses of the worker's other ranks."""
        self.agent.siblings.clear()
        self.agent.siblings.update(addresses)

    def do_start_fetch(self, fetch: int, ticket: str, tables: Mapping[str, Any], **how: Any) -> None:
        """Begin a fetch; ``fetched`` is told when it has ended."""
        begun = threading.Event()

        def on_done() -> None:
            begun.wait()
            self._end_fetch(fetch, lambda end: self._say("fetched", fetch=fetch, **end))

        self._fetches[fetch] = self.agent.start_fetch(ticket, tables, on_done=on_done, **how)
        begun.set()

    def do_fetch(self, fetch: int, ticket: str, tables: Mapping[str, Any], **how: Any) -> Callable[[int], None]:
        """A whole fetch, which is answered at its end; returns what runs it."""
        running = self._fetches[fetch] = self.agent.new_fetch(ticket, tables, **how)

        def run(number: int) -> None:
            running.run()
            with suppress(PeerError):
                self._end_fetch(fetch, lambda end: self._answers.send(number, "ok", end))

        return run

    def do_cancel(self, fetch: int, why: str) -> None:
        """Give a fetch up."""
        if (found := self._fetches.get(fetch)) is not None:
            found.cancel(why)

    def do_release(self, fetch: int) -> None:
        """The engine has freed the pages."""
        if (received := self._received.pop(fetch, None)) is not None:
            received.release()

    def do_fenced(self, transfer: str, error: str) -> None:
        """The engine's fence has passed, or failed."""
        if (waiting := self._fences.get(transfer)) is not None:
            waiting[1].append(error)
            waiting[0].set()

    def do_counters(self) -> dict[str, int]:
        """See ``Agent.counters``."""
        return self.agent.counters

    def do_check(self) -> dict[str, int]:
        """Prove that nothing is lost; returns pages by state, and bytes of staging in use."""
        self.agent.check_integrity()
        memory = self.agent.memory
        return {**memory.ledger.counts(), "staged_bytes": sum(a.used_bytes for a in memory.arenas().values())}

    def do_layout(self, digest: str) -> bytes:
        """The layout of a peer, for who wants to see the plan."""
        found = self.agent.layouts.get(digest)
        if found is None:
            raise MisuseError(f"layout {digest} is unknown here")
        return found.to_bytes()

    def do_detach(self) -> None:
        """End it all; the answer is the last thing but the socket's end."""
        if self._agent is not None:
            self._agent.close()
        self._gone.set()

    def do_drain(self) -> dict[str, Any]:
        """See ``Daemon.drain``; asked again, it says what is still underway."""
        self._owner.drain()
        return self.do_status()

    def do_status(self) -> dict[str, Any]:
        """What the daemon does."""
        ranks = sorted(self._owner.agents)
        return {"draining": self._owner.draining, "underway": self._owner.underway(), "ranks": ranks}

    # -- events, from the agent's threads --------------------------------------------------------------

    def _say(self, name: str, **values: Any) -> None:
        with suppress(PeerError):  # it is gone; its own thread sees to that
            self.pipe.send(0, name, values)

    def _on_end(self, transfer: str, outcome: str) -> None:
        self._say("ended", transfer=transfer, outcome=outcome)
        self._offers.discard(transfer)

    def _fence(self, transfer: str) -> None:
        """In a peer's call: let the engine wait for its device."""
        passed, errors = self._fences[transfer] = threading.Event(), list[str]()
        try:
            if self._gone.is_set():  # nobody will pass it
                raise AbortedError("the engine is gone")
            self._say("fence", transfer=transfer)
            if not passed.wait(_FENCE_S) or not errors:
                raise AbortedError("the engine did not pass its fence")
            if errors[0]:
                raise AbortedError(errors[0])
        finally:
            del self._fences[transfer]

    def _end_fetch(self, number: int, tell: Callable[[dict[str, Any]], None]) -> None:
        if (fetch := self._fetches.get(number)) is not None:  # else the engine is gone
            tell(self._outcome(number, fetch))
            self._fetches.pop(number, None)

    def _outcome(self, number: int, fetch: Fetch) -> dict[str, Any]:
        """How it ended, as the engine is told."""
        try:
            received = self._received[number] = fetch.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, the engine must hear of it
            self._owner.tidy_soon()
            if not (settled := fetch.settle()):
                self._unsettled[number] = fetch
            return {"error": error_to(error), "settled": settled}
        edges = [edge_to(edge) for edge in received.edges]
        return {"edges": edges, "seconds": received.seconds, "source": received.plan.source.digest}

    def _tell_settled(self) -> None:
        for number in [number for number, fetch in list(self._unsettled.items()) if fetch.settle()]:
            del self._unsettled[number]
            self._say("settled", fetch=number)


_REQUESTS: dict[str, Callable[..., Any]] = {
    name[3:]: call for name, call in vars(Attached).items() if name.startswith("do_")
}
_WITH_FILES = (Attached.do_region, Attached.do_attach)


def _adopt(agent: Agent, fd: int, nbytes: int, name: str) -> Any:
    """An engine's memory as the transport wants it that lets peers read it, or mapped."""
    for transport in agent.transports.values():
        if isinstance(transport, ShmTransport):
            return transport.adopt(fd, nbytes, name)
    return map_memfd(fd, nbytes, writable=True)
