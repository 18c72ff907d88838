"""One rank in a process of its own, for tests: does what JSON messages on a pipe ask, and says what it holds.

Every request is an object with ``do``; the answer has ``ok``, or ``error`` (class, reason, text, component, field) with
the error that the agent raised. Processes are forked from one server that has imported everything, so that they start
in milliseconds; none of them has ever been the test's own process.
"""

from __future__ import annotations

import gc
import itertools
import json
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy.ma  # noqa: F401 - numpy imports it late, when there may be no descriptor left

from pdxfer.agent import Fetch
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import PdxferError
from pdxfer.layout import Layout
from pdxfer.testing.oracle import Memory, Oracle
from pdxfer.ticket import Ticket
from pdxfer.transport import Transport
from tests.failpoints import arm
from tests.workers import Gate, Rank, Tap, hybrid_spec, resources

__all__ = ["RankProcess", "layout_of"]

_ENDS_MAX = 64
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


def layout_of(options: Mapping[str, Any]) -> Layout:
    """A layout from plain values: ``tp``, ``hosts`` (ranks per host), ``spec`` and ``storage``, ``placement``."""
    spec = hybrid_spec(**options.get("spec", {}))
    parallel = Parallel(tp=options.get("tp", 1), ranks_per_host=options.get("hosts", 0))
    return build_layout(
        spec,
        parallel,
        Storage(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.get("storage", {}).items()}),
        options.get("placement", "per_layer"),
    )


class _Inner(Tap):
    """Lets the gate be exchanged after the transport was wrapped."""

    def __init__(self) -> None:
        self.gate = Tap()

    def sending(self, header):
        self.gate.sending(header)

    def received(self, message):
        return self.gate.received(message)


class _Server:
    """The process's side."""

    def __init__(self, options: dict[str, Any], directory: str) -> None:
        self.directory, self.tap = directory, _Inner()
        self.layout = layout_of(options["layout"])
        self.rank = Rank(self.layout, options["rank"], wrap=self._wrap, seed=options["seed"], **options["config"])
        self.agent = self.rank.agent
        self.fetches: dict[str, tuple[Fetch, float, Memory]] = {}
        self.ends: dict[str, str] = {}
        self.ended = threading.Condition()
        self.held: memoryview | None = None

    def _wrap(self, transport: Transport) -> Transport:
        return self.tap.wrap(transport)

    def view(self, key: str) -> Memory:
        """This rank alone, as a worker of one."""
        alone = Layout(spec=self.layout.spec, ranks=(replace(self.layout.ranks[self.rank.rank], rank=0, host=0),))
        return Memory(layout=alone, buffers=(self.rank.buffers,), tables=(self.rank.tables[key],))

    def on_end(self, transfer: str, outcome: str) -> None:
        with self.ended:
            self.ends[transfer] = outcome
            if len(self.ends) > _ENDS_MAX:
                del self.ends[next(iter(self.ends))]
            self.rank.give_back(transfer)
            self.ended.notify_all()

    # -- what can be asked ---------------------------------------------------------------------------

    def do_address(self) -> str:
        return self.agent.address

    def do_siblings(self, addresses: list[str]) -> None:
        self.agent.siblings.update(enumerate(addresses))

    def do_offer(self, key: str, tokens: int, wrong: bool = False) -> str:
        tables = self.rank.reserve(key, tokens)
        Oracle.of(self.layout, key=key, tokens=tokens).put(self.view(key))
        offered = {name: table[:-1] for name, table in tables.items()} if wrong else tables
        try:
            return self.agent.offer(key, offered, kv_tokens=tokens, on_end=self.on_end).encode()
        except PdxferError:
            self.rank.give_back(key)
            raise

    def do_withdraw(self, key: str) -> None:
        self.agent.withdraw(key)

    def do_ended(self, key: str, timeout_s: float = 30.0) -> str:
        """Wait until the pages of an offer are free; returns how it ended."""
        with self.ended:
            assert self.ended.wait_for(lambda: key in self.ends, timeout_s), f"{key} has not ended"
            return self.ends[key]

    def do_fetch(self, key: str, ticket: str, tokens: int, timeout_s: float, wrong: bool = False) -> None:
        tables = self.rank.reserve(key, tokens)
        before = self.view(key).copy()
        fetched = {name: table[:-1] for name, table in tables.items()} if wrong else tables
        try:
            fetch = self.agent.start_fetch(ticket, fetched, timeout_s=timeout_s)
        except PdxferError:
            self.rank.give_back(key)
            raise
        self.fetches[key] = fetch, time.monotonic(), before

    def do_cancel(self, key: str) -> None:
        self.fetches[key][0].cancel()

    def do_state(self, key: str) -> str:
        return self.fetches[key][0].state.value

    def do_wait(self, key: str, alone: bool = True) -> dict[str, Any]:
        """Wait for the end of a fetch; raises its error, or compares the bytes and releases.

        ``alone``: nothing else may have changed meanwhile, not even a byte of padding; else only its rows are compared.
        """
        fetch, started_s, before = self.fetches.pop(key)
        try:
            received = fetch.wait()
            difference = Oracle.of(self.layout, key=key, tokens=fetch.ticket.kv_tokens).difference(
                self.view(key), before
            )
            if difference is not None and not (alone or difference.component):
                difference = None  # somebody else's bytes
            received.release()
        except PdxferError as error:
            error.details["took_s"] = f"{time.monotonic() - started_s:.3f}"
            error.details["state"] = fetch.state.value
            raise
        finally:
            self.rank.give_back(key)
        return {"difference": str(difference or ""), "modes": sorted({e.mode for e in received.edges})}

    def do_gate(self, on: str, chunk: int) -> None:
        self.tap.gate = Gate(on, chunk)

    def do_reached(self, channels: int = 1) -> None:
        self.tap.gate.wait(channels)

    def do_open_gate(self) -> None:
        self.tap.gate.open()

    def do_arm(self, side: str, point: str, number: int) -> None:
        arm(side, point, number)

    def do_spare_files(self, count: int) -> None:
        """From here on this process can open so many more descriptors; -1: as many as it ever could."""
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        soft = hard
        if count >= 0:  # the limit is on the number, and the lowest free one is taken
            opened = {int(fd) for fd in os.listdir("/proc/self/fd")}
            free = (fd for fd in itertools.count() if fd not in opened)
            soft = next(itertools.islice(free, count, None))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    def do_fill_arena(self, scheme: str) -> None:
        arena = self.agent.memory.arena(scheme)
        self.held = arena.allocate(arena.capacity_bytes, "test", timeout_s=0.0)

    def do_free_arena(self, scheme: str) -> None:
        self.agent.memory.arena(scheme).free(self.held)

    def do_attached(self, times: int) -> None:
        """Wait until a sidecar was attached to again so often."""
        until_s = time.monotonic() + 60.0
        while self.agent.reattached < times:
            assert time.monotonic() < until_s, "not attached again"
            time.sleep(0.01)

    def do_counters(self) -> dict[str, int]:
        """What the agent counted, and the messages that it refused because of their ticket, session or epoch."""
        counts = self.agent.journal.counts
        refused = sum(n for (kind, *_), n in counts.items() if kind in ("stale_rejected", "tickets_rejected"))
        return {**self.agent.counters, "refused": refused}

    def do_ready(self) -> int:
        """How many times pages have ever become READY."""
        return sum(n for (_, after), n in self.agent.memory.ledger.transitions.items() if after == "ready")

    def do_held(self, at_most: dict[str, int] | None = None, timeout_s: float = 15.0) -> dict[str, int]:
        """Count what this process holds; wait until it is no more than ``at_most``, and no page is in use."""
        until_s = time.monotonic() + timeout_s
        while True:
            held = self._count()
            over = {k: (v, at_most[k]) for k, v in held.items() if v > at_most[k]} if at_most else {}
            if not over or time.monotonic() > until_s:
                break
            threading.Event().wait(0.02)
        names = sorted(t.name for t in threading.enumerate())
        assert not over, f"more than before: {over}; threads {names}"
        self.agent.check_integrity()
        return held

    def _count(self) -> dict[str, int]:
        if self.rank.sidecar:
            held = self.agent.check_integrity()
            pages = sum(n for state, n in held.items() if state not in ("free", "staged_bytes"))
            return {**resources(self.directory), "pages": pages, "staged_bytes": held["staged_bytes"]}
        memory = self.agent.memory
        pages = sum(n for state, n in memory.ledger.counts().items() if state != "free")
        staged = sum(arena.used_bytes for arena in memory._arenas.values())
        return {**resources(self.directory), "pages": pages, "staged_bytes": staged}

    def do_close(self) -> dict[str, int]:
        """Close, and drop what is left of the agent and the engine's own views of its memory; nothing waits for gc."""
        gc.disable()
        self.agent.close()
        pages = self._count()["pages"]
        self.fetches.clear()
        del self.agent, self.rank
        return {**resources(self.directory), "pages": pages}


def _answer(server: _Server, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"ok": getattr(server, f"do_{request.pop('do')}")(**request)}
    except PdxferError as error:
        names = ("reason", "component", "field", "source", "target")
        found = {name: str(getattr(error, name, "")) for name in names}
        return {"error": {"kind": type(error).__name__, "text": str(error), **found, **error.details}}
    except BaseException as error:
        return {"crash": f"{type(error).__name__}: {error}"}


def _serve(pipe: Connection, options: dict[str, Any], directory: str) -> None:
    tempfile.tempdir = directory
    server = _Server(options, directory)
    pipe.send_bytes(json.dumps({"ok": server.agent.address}).encode())
    closing = None
    while True:
        request = json.loads(pipe.recv_bytes())
        if request["do"] == "quit":
            break
        if request["do"] == "close_soon":  # while the transfer underway keeps this process's other threads busy
            closing = threading.Thread(target=server.agent.close)
            closing.start()
            answer: dict[str, Any] = {"ok": None}
        else:
            answer = _answer(server, request)
        pipe.send_bytes(json.dumps(answer).encode())
    if closing is not None:
        closing.join()
    if hasattr(server, "agent"):
        server.agent.close()


class Failed(Exception):
    """What the rank's agent raised, by name."""

    def __init__(self, details: dict[str, str]) -> None:
        super().__init__(f"{details['kind']} ({details['reason']}): {details['text']}")
        self.kind, self.reason, self.details = details["kind"], details["reason"], details
        self.took_s = float(details.get("took_s", 0))


class RankProcess:
    """The test's side. Use as a context manager: it ends with the process gone and its directory empty, or fails.

    Args:
        directory: becomes the process's directory for temporary files; short, for socket paths.
    """

    def __init__(
        self, directory: Path, *, layout: Mapping[str, Any], rank: int = 0, seed: int = 0, **config: Any
    ) -> None:
        directory.mkdir(exist_ok=True)
        self.directory, self.killed, self._told = directory, False, 1
        self._pipe, theirs = _context.Pipe()
        options = {"layout": dict(layout), "rank": rank, "seed": seed, "config": config}
        self.process = _context.Process(target=_serve, args=(theirs, options, str(directory)))
        self.process.start()
        theirs.close()
        self.address: str = self._answer()

    def ask(self, do: str, **arguments: Any) -> Any:
        """Ask and wait for the answer; raises Failed when the agent raised."""
        self.tell(do, **arguments)
        return self._answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """Ask only, of one that is about to die, or to be drained."""
        self._pipe.send_bytes(json.dumps({"do": do, **arguments}).encode())
        self._told += 1

    def _answer(self) -> Any:
        assert self._pipe.poll(90.0), "the rank's process does not answer"
        answer = json.loads(self._pipe.recv_bytes())
        self._told -= 1
        if "error" in answer:
            raise Failed(answer["error"])
        assert "ok" in answer, answer
        return answer["ok"]

    def drain(self, timeout_s: float) -> None:
        """Read the answers to everything that was told, whatever they are."""
        while self._told and self._pipe.poll(timeout_s):
            self._pipe.recv_bytes()
            self._told -= 1
        assert not self._told, "the rank's process does not answer"

    def signal(self, number: int) -> None:
        """Send a signal; SIGKILL is waited for."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)
        if number == signal.SIGKILL:
            self.killed = True
            self.process.join(60.0)
            assert self.process.exitcode == -signal.SIGKILL

    def __enter__(self) -> RankProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.killed and kind is None:
            self.tell("quit")
        elif not self.killed:
            self.process.kill()
        self.process.join(60.0)
        self._pipe.close()
        if kind is None and not self.killed:
            assert self.process.exitcode == 0
            assert not list(self.directory.rglob("*")), f"left behind: {list(self.directory.rglob('*'))}"
        self.process.close()


def joined(parts: list[str]) -> str:
    """One ticket of all ranks' parts."""
    return Ticket.join([Ticket.decode(part) for part in parts]).encode()
