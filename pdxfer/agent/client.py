"""Sidecar client: an engine's end of the socket to its sidecar, with the methods of an embedded ``Agent``.

In come what an ``Agent`` is called with; out come tickets, verified caches and errors of the same classes. The sidecar
(``daemon.py``) does the work; here is the memory it works in, and what it was asked for::

    allocate()     memory made here and shared by its file: nothing is copied
    own memory     tensors, arrays: copied to and from a shared twin, row by row, by this process (``mirror.py``)

A sidecar that dies ends what is underway: offers as ``lost``, fetches and calls as PeerError SIDECAR_LOST; the kernel
has unmapped its memory before that shows, so pages are free at once. This client then attaches anew, for as long as
it takes; offers and fetches fail by that name until it has. Epoch, ticket key and addresses stay, so issuers in a
scheduler stay good.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from pdxfer.agent.calls import Calls
from pdxfer.agent.config import AgentConfig, Incarnation
from pdxfer.agent.fetch import Received
from pdxfer.agent.frames import FRAMES_VERSION, Pipe, error_from, open_socket
from pdxfer.agent.mirror import Mirror, SharedMemory
from pdxfer.agent.service import Agent
from pdxfer.agent.sidecar_fetch import SidecarFetch, edge_from
from pdxfer.agent.source import OnEnd, check_id
from pdxfer.agent.threads import start_thread
from pdxfer.errors import (
    AbortedError,
    DeadlineError,
    ExhaustedError,
    InternalError,
    MisuseError,
    PdxferError,
    PeerError,
)
from pdxfer.keys import TicketKeys
from pdxfer.layout import Layout, RankLayout
from pdxfer.pages import RequestShape
from pdxfer.plan import Plan, make_plan
from pdxfer.ticket import RankIssuer, Ticket

__all__ = ["SidecarAgent", "create_agent"]

_CALL_S = 30.0
_ATTACH_S = 60.0
_RETRY_S = (0.02, 1.0)
_log = logging.getLogger("pdxfer.agent")


def create_agent(config: AgentConfig, sidecar: str = "") -> Agent | SidecarAgent:
    """The rank's agent: in this process, or at the sidecar that listens at ``sidecar`` (whose config then counts)."""
    return SidecarAgent(sidecar, worker=config.worker, rank=config.rank) if sidecar else Agent(config)


@dataclass(slots=True, kw_only=True)
class _Offered:
    """An offer; ``lock`` is held while its fence (and copy) runs, which it may not once the offer has ended.

    ``answered``: the sidecar has sealed it. An end that comes sooner waits in ``early`` for the answer; when an error
    comes in its place, that error is all that the engine hears.
    """

    fence: Callable[[], None] | None
    on_end: OnEnd | None
    ended: bool = False
    answered: bool = False
    early: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        """From here on nothing of ours reads its pages."""
        with self.lock:
            self.ended = True


class SidecarAgent:
    """An agent that lives in a sidecar. Construct (connects), ``allocate``, ``attach``, ``start``; then as ``Agent``.

    Args:
        path: of the sidecar's socket. worker: name of the worker, unless the sidecar's config has one.
        connect_s: how long to wait for a sidecar that is not there yet.

    Raises:
        PeerError: nobody listens there (SIDECAR_UNREACHABLE), or not as our user (SIDECAR_REFUSED).
        MisuseError: it is of another version.
    """

    def __init__(self, path: str, *, worker: str = "engine", rank: int = 0, connect_s: float = 10.0) -> None:
        self.path, self.host = path, ""
        self.config = AgentConfig(worker=worker, rank=rank)
        self.siblings: dict[int, str] = {}
        self._told_siblings: dict[int, str] = {}
        self._incarnation = Incarnation()
        self._layout: Layout | None = None
        self._shared: list[SharedMemory] = []
        self._allocated: list[SharedMemory] = []
        self._mirror: Mirror | None = None
        self._address = ""
        self._keys: TicketKeys | None = None
        self._offers: dict[str, _Offered] = {}
        self._fetches: dict[int, _Fetching] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.reattached = 0
        self._calls: Calls | None = None  # while attached
        self._pipe: Pipe | None = self._greet(connect_s)

    def _greet(self, patience_s: float) -> Pipe:
        until_s, pause_s = time.monotonic() + patience_s, _RETRY_S[0]
        while True:
            try:
                pipe = Pipe(open_socket(self.path))
                with _closed_on_failure(pipe):
                    self.host = str(pipe.ask("hello", {"version": FRAMES_VERSION}, _CALL_S)["host"])
                return pipe
            except PeerError:
                if time.monotonic() > until_s or self._closing.wait(pause_s):
                    raise
                pause_s = min(2 * pause_s, _RETRY_S[1])

    # -- set-up ------------------------------------------------------------------------------------

    def allocate(self, rank: RankLayout) -> list[SharedMemory]:
        """Memory for every region of ``rank``, shared with the sidecar."""
        made = [SharedMemory.create(shape.nbytes, shape.name) for shape in rank.regions]
        self._allocated += made
        return made

    def attach(self, layout: Layout, regions: Sequence[Any], *, siblings: Mapping[int, str] | None = None) -> None:
        """Say what memory there is: what ``allocate`` made, or the engine's own; see ``Agent.attach``."""
        if self._layout is not None:
            raise MisuseError("a layout is attached already")
        rank = layout.ranks[self.config.rank]
        if len(regions) != len(rank.regions):
            raise MisuseError(f"rank {rank.rank} has {len(rank.regions)} regions, got {len(regions)}")
        own = [not isinstance(region, SharedMemory) for region in regions]
        if any(own) and not all(own):
            raise MisuseError("either all regions are from allocate, or none")
        self._shared = list(regions)
        if any(own):
            self._shared = [SharedMemory.create(r.nbytes, r.name, backed=False) for r in rank.regions]
            self._allocated += self._shared
            views = [shared.view for shared in self._shared]
            self._mirror = Mirror(layout, rank.rank, regions, views)
        self.siblings.update(siblings or {})
        self._layout = layout

    def start(self) -> None:
        """Hand the memory to the sidecar; from here on peers can reach it."""
        pipe = self._pipe
        if self._layout is None or pipe is None or self._threads:
            raise MisuseError("start comes once, after attach")
        self._calls = self._hand_over(pipe, self._layout)
        for name, target in (("reader", self._run), ("callbacks", self._work)):
            self._threads.append(start_thread(f"pdxfer-{self.config.rank}-sidecar-{name}", target))

    def _hand_over(self, pipe: Pipe, layout: Layout) -> Calls:
        for shared in self._shared:
            pipe.ask("region", {"nbytes": shared.view.nbytes, "name": shared.name}, _CALL_S, fd=shared.fd)
        mine = {"rank": self.config.rank, "worker": self.config.worker, "layout": layout.to_bytes()}
        secret = {"epoch": self._incarnation.epoch, "key": self._incarnation.key}
        ours, theirs = socket.socketpair()
        with theirs, _closed_on_failure(answers := Pipe(ours)):
            answer = pipe.ask("attach", {**mine, **secret}, _ATTACH_S, fd=theirs.fileno())
        if self._address not in ("", answer["address"]):
            what = "the sidecar's address is now %s, but a scheduler's tickets say %s: give its agents fixed ports"
            _log.warning(what, answer["address"], self._address)
        self._address = answer["address"]
        file = answer["key_file"] if os.access(answer["key_file"], os.R_OK) else ""
        self._keys = TicketKeys.create(file) if file else TicketKeys(tuple(answer["keys"]))
        self.config = AgentConfig(rank=self.config.rank, **answer["config"])
        self._told_siblings = {}
        return Calls(pipe, answers, partial(_lost, self.path), self._on_unclaimed)

    @property
    def address(self) -> str:
        """The rank's control address, as peers dial it."""
        if not self._address:
            raise MisuseError("the agent was not started")
        return self._address

    @property
    def issuer(self) -> RankIssuer:
        """See ``Agent.issuer``. It stays good over restarts of the sidecar."""
        if self._layout is None or self._keys is None:
            raise MisuseError("the agent was not started")
        return RankIssuer(
            worker=self.config.worker,
            layout_digest=self._layout.digest,
            rank=self.config.rank,
            address=self.address,
            epoch=self._incarnation.epoch,
            keys=self._keys,
            sizes=self._layout.request_sizes,
            lifetime_s=math.ceil(self.config.hold_max_s),
        )

    @property
    def counters(self) -> dict[str, int]:
        """See ``Agent.counters``; they begin anew with the sidecar."""
        return dict(self._call("counters"))

    def check_integrity(self) -> dict[str, int]:
        """Let the sidecar prove that nothing is lost; returns its pages by state, and staging in use."""
        return dict(self._call("check"))

    def close(self) -> None:
        """End every transfer, and let go of the sidecar. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._threads:
            with suppress(PdxferError):
                self._call("detach", _ATTACH_S)
        with self._lock:
            pipe = self._pipe
        if pipe is not None:
            pipe.end()
        for thread in self._threads:  # the reader, and when it has ended those it asked to be called
            if thread is not threading.current_thread():
                thread.join(_ATTACH_S)
            self._jobs.put(None)
        if pipe is not None and not self._threads:
            pipe.close()
        for shared in self._allocated:
            os.close(shared.fd)
        self._allocated, self._shared = [], []

    def __enter__(self) -> SidecarAgent:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- what engines call -------------------------------------------------------------------------

    def offer(
        self,
        transfer: str,
        tables: Mapping[str, Sequence[int]],
        *,
        kv_tokens: int,
        state_tokens: int | None = None,
        sampled: Sequence[int] = (),
        context: bytes = b"",
        nonce: bytes | None = None,
        tenant: str = "",
        audience: str = "",
        trace: str = "",
        fence: Callable[[], None] | None = None,
        on_end: OnEnd | None = None,
    ) -> Ticket:
        """See ``Agent.offer``. ``fence`` runs here, when a peer first asks, and then the copy of own memory."""
        check_id(transfer)
        stands, nonce = kv_tokens if state_tokens is None else state_tokens, nonce or secrets.token_bytes(16)
        issue = partial(
            self.issuer.issue, transfer, kv_tokens=kv_tokens, state_tokens=stands, sampled=sampled, context=context,
            nonce=nonce, tenant=tenant, audience=audience,
        )  # fmt: skip
        if self._mirror is not None:
            fence = partial(self._mirror.out, tables, RequestShape(kv_tokens=int(kv_tokens)), fence)
        offered, tickets = _Offered(fence=fence, on_end=on_end), list[Ticket]()
        with self._lock:
            if transfer in self._offers:
                raise MisuseError(f"transfer {transfer!r} is offered already")
            self._offers[transfer] = offered
        try:
            said: dict[str, Any] = {"transfer": transfer, "tables": tables, "kv_tokens": kv_tokens, "nonce": nonce}
            said |= {"state_tokens": stands, "tenant": tenant, "trace": trace, "fence": fence is not None}
            trace = self._calling().ask("seal", said, _CALL_S, meanwhile=lambda: tickets.append(issue()))
        except BaseException as error:
            with self._lock:
                if self._offers.get(transfer) is offered:
                    del self._offers[transfer]
            if isinstance(error, DeadlineError) or not tickets:  # it has heard of it, or may yet
                offered.end()
                self.tell("withdraw", transfer=transfer)
            raise
        with self._lock:
            offered.answered = True
        if offered.early:
            self._jobs.put(partial(self._ended, offered, transfer, offered.early))
        return tickets[0] if tickets[0].trace == trace else replace(tickets[0], trace=trace)

    def withdraw(self, transfer: str) -> None:
        """See ``Agent.withdraw``. A sidecar that is gone has nothing to withdraw."""
        with self._lock:
            offered = self._offers.get(transfer)
        with suppress(PeerError):
            self._call("withdraw", transfer=transfer)
        if offered is not None:
            offered.end()

    def keep(self, ticket: Ticket | str) -> None:
        """See ``Agent.keep``."""
        self.tell("keep", ticket=_parsed(ticket).encode())

    def decline(self, ticket: Ticket | str, reason: str) -> None:
        """See ``Agent.decline``."""
        self.tell("decline", ticket=_parsed(ticket).encode(), reason=reason)

    def start_fetch(
        self,
        ticket: Ticket | str,
        tables: Mapping[str, Sequence[int]],
        *,
        first_token: int = 0,
        timeout_s: float = 30.0,
        on_done: Callable[[], None] | None = None,
        **facts: Any,
    ) -> SidecarFetch:
        """See ``Agent.start_fetch``. ``on_done`` is called by a thread of ours."""
        fetch, about = self._prepare(ticket, tables, first_token, timeout_s, on_done)
        try:
            self._call("start_fetch", **about, **facts)
        except DeadlineError:  # it may yet begin: its end, which the sidecar will tell, is that of the pages, too
            fetch.cancel("the sidecar was silent when it was to begin")
        except BaseException:
            self._forget(fetch)
            raise
        with self._lock:
            fetch.begun, over = True, fetch.done
        if over and on_done is not None:
            self._jobs.put(on_done)
        return fetch

    def _prepare(
        self,
        ticket: Ticket | str,
        tables: Mapping[str, Sequence[int]],
        first_token: int,
        timeout_s: float,
        on_done: Callable[[], None] | None = None,
    ) -> tuple[SidecarFetch, dict[str, Any]]:
        """A fetch, and how to ask for it."""
        parsed, number = _parsed(ticket), Calls.new_number()
        bring = None
        if self._mirror is not None:
            shape = RequestShape(kv_tokens=parsed.kv_tokens, first_token=min(int(first_token), parsed.kv_tokens))
            bring = partial(
                self._mirror.back, {name: np.array(table).tolist() for name, table in tables.items()}, shape
            )
        if self._told_siblings != self.siblings:
            addresses = dict(self.siblings)
            self._call("siblings", addresses=addresses)
            self._told_siblings = addresses
        fetch = SidecarFetch(self, number, parsed, timeout_s, bring)
        with self._lock:
            self._fetches[number] = fetch, on_done
        text = ticket if isinstance(ticket, str) else ticket.encode()
        about = {"ticket": text, "tables": tables, "first_token": first_token, "timeout_s": timeout_s}
        return fetch, {"fetch": number, **about}

    def _forget(self, fetch: SidecarFetch) -> None:
        with self._lock:
            self._fetches.pop(fetch.number, None)

    def fetch(
        self,
        ticket: Ticket | str,
        tables: Mapping[str, Sequence[int]],
        *,
        first_token: int = 0,
        timeout_s: float = 30.0,
        **facts: Any,
    ) -> Received:
        """See ``Agent.fetch``. Its end is the answer: a wake-up less than that of ``start_fetch``."""
        fetch, about = self._prepare(ticket, tables, first_token, timeout_s)
        try:
            end = self._calling().ask("fetch", {**about, **facts}, fetch.left_s(), number=fetch.number)
        except DeadlineError:  # whatever becomes of it, its pages stay taken
            fetch.cancel("the sidecar does not say how it ended")
            raise
        except PdxferError:
            self._forget(fetch)
            raise
        except BaseException as error:
            fetch.cancel(f"interrupted by {type(error).__name__}")
            raise
        self._on_fetched(fetch.number, **end)
        return fetch.wait()

    # -- the socket --------------------------------------------------------------------------------

    def tell(self, name: str, **values: Any) -> None:
        """Say something that needs no answer; a sidecar that is gone need not hear it."""
        pipe = self._pipe
        if pipe is not None:
            with suppress(PeerError):
                pipe.send(0, name, values)

    def _calling(self) -> Calls:
        with self._lock:
            if self._calls is None:
                raise _lost(self.path)
            return self._calls

    def _call(self, name: str, timeout_s: float = 0.0, /, **values: Any) -> Any:
        """Ask, and wait for the answer; see ``Calls.ask``."""
        return self._calling().ask(name, values, timeout_s or _CALL_S)

    def _on_unclaimed(self, number: int, name: str, values: Any) -> None:
        """An answer that nobody waits for any more: of a fetch, it ends it."""
        if number in self._fetches and isinstance(values, dict):
            ended = values if name == "ok" else {"error": values}
            self._on_fetched(number, **ended)

    def _run(self) -> None:
        """The reading thread: frames, until the sidecar is gone; then the next sidecar."""
        while not self._closing.is_set():
            pipe = self._pipe
            assert pipe is not None
            try:
                while True:
                    if (frame := pipe.receive(3600.0)) is not None:
                        self._handle(*frame[1:])
            except Exception as error:  # noqa: BLE001 - gone, or nothing that this version understands
                self._lose(pipe, error)
            if not self._closing.is_set():
                self._reattach()

    def _handle(self, name: str, values: Any, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if (event := _EVENTS.get(name)) is not None:
            event(self, **values)

    def _on_ended(self, transfer: str, outcome: str) -> None:
        with self._lock:
            offered = self._offers.pop(transfer, None)
        if offered is not None:
            self._note_end(offered, transfer, outcome)

    def _note_end(self, offered: _Offered, transfer: str, outcome: str) -> None:
        with self._lock:
            if not offered.answered:
                offered.early = outcome
                return
        self._jobs.put(partial(self._ended, offered, transfer, outcome))

    def _ended(self, offered: _Offered, transfer: str, outcome: str) -> None:
        offered.end()
        self._calm()
        if offered.on_end is not None:
            offered.on_end(transfer, outcome)

    def _on_fence(self, transfer: str) -> None:
        with self._lock:
            offered = self._offers.get(transfer)
        try:
            start_thread("pdxfer-fence", self._pass_fence, transfer, offered)
        except ExhaustedError as error:
            self.tell("fenced", transfer=transfer, error=str(error))

    def _pass_fence(self, transfer: str, offered: _Offered | None) -> None:
        error = ""
        try:
            if offered is None or offered.fence is None:
                raise AbortedError("the offer has ended")
            with offered.lock:
                if offered.ended:
                    raise AbortedError("the offer has ended")
                offered.fence()
        except Exception as caught:  # noqa: BLE001 - the engine's own code; the peer learns that this transfer is over
            error = f"{type(caught).__name__}: {caught}"
        self.tell("fenced", transfer=transfer, error=error)

    def _on_fetched(self, fetch: int, error: Any = None, settled: bool = True, **values: Any) -> None:
        with self._lock:
            found = self._fetches.get(fetch)
        if found is None:
            return
        if error is not None:
            self._finish(fetch, found, error_from(error), settled=settled)
            return
        received = Received(
            ticket=found[0].ticket,
            edges=tuple(map(edge_from, values["edges"])),
            seconds=values["seconds"],
            _plan=partial(self._plan, values["source"]),
            _release=partial(self.tell, "release", fetch=fetch),
        )
        if found[0].bring is None:
            self._finish(fetch, found, received)
        else:
            found[0].arrived = True
            self._jobs.put(partial(self._bring_back, fetch, found, received))

    def _bring_back(self, number: int, found: _Fetching, received: Received) -> None:
        fetch = found[0]
        assert fetch.bring is not None
        try:
            fetch.bring()
        except Exception as error:  # noqa: BLE001 - the engine must hear of it
            self.tell("release", fetch=number)
            what = f"{fetch.ticket.transfer}: it can't be copied into the engine's memory: {error}"
            self._finish(number, found, InternalError(what))
            return
        self._finish(number, found, received)

    def _finish(self, number: int, found: _Fetching, result: Received | PdxferError, *, settled: bool = True) -> None:
        fetch, on_done = found
        with self._lock:
            fetch.finish(result, settled=settled)
            if fetch.settle():
                self._fetches.pop(number, None)
            begun = fetch.begun  # else whoever begins it sees that it has ended, or raises and nothing is called
        if begun and on_done is not None:
            self._jobs.put(on_done)
        self._calm()

    def _on_settled(self, fetch: int) -> None:
        with self._lock:
            found = self._fetches.get(fetch)
            if found is not None:
                found[0].settled()
                if found[0].done:  # else its end has not been read yet
                    del self._fetches[fetch]

    def _calm(self) -> None:
        """Give the twin of own memory back when nothing is underway in it."""
        if self._mirror is not None:
            with self._lock:
                if not self._offers and not self._fetches:
                    self._mirror.clear()

    def _plan(self, digest: str) -> Plan:
        assert self._layout is not None
        return make_plan(Layout.from_bytes(self._call("layout", digest=digest)), self._layout)

    def _work(self) -> None:
        """The thread that calls the engine back, one call after the other."""
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:  # noqa: BLE001 - the engine's own code
                _log.exception("a callback of the engine's failed")

    # -- a sidecar that is gone ----------------------------------------------------------------------

    def _lose(self, pipe: Pipe, error: Exception) -> None:
        with self._lock:
            self._pipe, calls, self._calls = None, self._calls, None
            offers, self._offers = self._offers, {}
            fetches = {number: found for number, found in self._fetches.items() if not found[0].arrived}
            self._fetches = {number: found for number, found in self._fetches.items() if found[0].arrived}
        pipe.close()
        assert calls is not None
        calls.close()
        if not self._closing.is_set():
            _log.error("the sidecar at %s is gone (%s): %d offers and %d fetches are lost",
                       self.path, error, len(offers), len(fetches))  # fmt: skip
        for transfer, offered in offers.items():
            self._note_end(offered, transfer, "lost: the sidecar is gone")
        for number, found in fetches.items():
            if found[0].done:
                found[0].settled()
            else:
                self._finish(number, found, _lost(self.path))

    def _reattach(self) -> None:
        assert self._layout is not None
        pause_s = _RETRY_S[0]
        while not self._closing.is_set():
            try:
                pipe = self._greet(0.0)
                with _closed_on_failure(pipe):
                    calls = self._hand_over(pipe, self._layout)
            except PdxferError as error:
                level = logging.DEBUG if error.reason == "SIDECAR_UNREACHABLE" else logging.WARNING
                _log.log(level, "not attached to the sidecar yet: %s", error)
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _RETRY_S[1])
                continue
            with self._lock:
                self._pipe, self._calls = pipe, calls
                self.reattached += 1
            if self._closing.is_set():
                calls.close()
                pipe.close()
            _log.warning("attached to the sidecar at %s again", self.path)
            return


_Fetching = tuple[SidecarFetch, "Callable[[], None] | None"]

_EVENTS: dict[str, Callable[..., None]] = {
    "ended": SidecarAgent._on_ended,
    "fence": SidecarAgent._on_fence,
    "fetched": SidecarAgent._on_fetched,
    "settled": SidecarAgent._on_settled,
}


@contextmanager
def _closed_on_failure(pipe: Pipe) -> Iterator[None]:
    try:
        yield
    except BaseException:
        pipe.close()
        raise


def _lost(path: str) -> PeerError:
    hint = "it is attached to again as soon as one listens there; later offers and fetches then work"
    return PeerError(f"the sidecar at {path} is gone", reason="SIDECAR_LOST", hint=hint)


def _parsed(ticket: Ticket | str) -> Ticket:
    return ticket if isinstance(ticket, Ticket) else Ticket.decode(ticket)
