"""Agent: serves one rank of a worker: its offers to others, its fetches from others, and all they hold.

In come an engine's layout, memory and page tables; out come tickets at a source, and complete verified caches
(or one error) at a target. It owns the control server, data listeners, arenas, leases and threads, and ends
them all in ``close``. Engines never see a peer, a channel or a plan.

::

    engine ──offer──▶ Agent ◀──Describe, Open, Renew, Complete, Abort──▶ Agent ◀──fetch── engine
              ticket   │  └─ data listeners, one thread per channel ───────┘ │
                       └─ source.py: leases, sessions                        └─ fetch.py: a thread per edge
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdxfer.agent.choice import preference
from pdxfer.agent.config import AgentConfig, Incarnation
from pdxfer.agent.fetch import Fetch, Received
from pdxfer.agent.journal import Journal
from pdxfer.agent.keeper import Keeper
from pdxfer.agent.memory import Memory
from pdxfer.agent.peers import Layouts, Peers
from pdxfer.agent.quotas import CallRates
from pdxfer.agent.serve import serve_channel
from pdxfer.agent.source import OnEnd, Source, check_id
from pdxfer.agent.threads import start_thread
from pdxfer.control import Caller, ControlServer, Credentials
from pdxfer.control.convert import METHODS
from pdxfer.control.tls import LOCAL
from pdxfer.directory import PrivateDirectory
from pdxfer.errors import (
    DeadlineError,
    ExhaustedError,
    MisuseError,
    PdxferError,
    PeerError,
    StaleError,
    TicketError,
    TransportError,
)
from pdxfer.keys import TicketKeys
from pdxfer.layout import Layout, RankLayout
from pdxfer.messages import (
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    Abort,
    Complete,
    Completed,
    ControlHandler,
    Describe,
    Description,
    Open,
    Opened,
    Renew,
    Renewed,
    check_versions,
)
from pdxfer.pages import RequestShape
from pdxfer.ticket import RankIssuer, Ticket, plain
from pdxfer.transport import NETWORK_SCHEMES, Listener, Region, Transport, create_transport, known_schemes
from pdxfer.transport.curve import new_keys

__all__ = ["Agent", "host_name"]

_SWEEP_S = 0.05
_log = logging.getLogger("pdxfer.agent")
_PEERS_EVERY = 10
_JOIN_S = 10.0
_ACCEPT_AGAIN_S = 0.2


class Agent(ControlHandler):
    """One rank's agent. Construct, ``allocate``, ``attach``, ``start``, then offers and fetches, ``close``."""

    def __init__(self, config: AgentConfig, incarnation: Incarnation | None = None) -> None:
        self.config = config
        self.epoch = (incarnation or Incarnation()).epoch
        given = (incarnation.key,) if incarnation and not config.ticket_keys else ()
        self._keys = TicketKeys(given) if given else TicketKeys.create(config.ticket_keys)
        self._rates = CallRates(config.quotas)
        self.draining = False
        self.siblings: dict[int, str] = {}
        self.fetched: Counter[str] = Counter()
        self.journal = Journal(config.rank, self.epoch)
        self.layouts = Layouts()
        self.transports: dict[str, Transport] = {}
        auto = config.transports == ("auto",)
        self._host = host_name()  # asked once: later there may be no descriptor for it
        self.peers = Peers(self._introduction, self.layouts, self.transports, self._host, config.call_s, auto=auto)
        self.keeper = Keeper(self.peers, config.worker, config.rank, self.epoch)
        self._memory: Memory | None = None
        self._source: Source | None = None
        self._server: ControlServer | None = None
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listeners: list[Listener] = []
        self._fetches: list[Fetch] = []
        self._lock = threading.Lock()
        self._directory = _private_directory()
        try:
            self.credentials = None if config.tls is None else Credentials(config.tls)
            self.peers.trust(self.credentials, insecure=config.insecure)
            self.transports.update(_transports(config))
        except BaseException:
            self.close()
            raise

    # -- set-up ------------------------------------------------------------------------------------

    def allocate(self, rank: RankLayout) -> list[Region]:
        """Memory for every region of ``rank``, of the kind our best transport moves from without a copy."""
        best = next((t for t in self.transports.values() if t.can_export), next(iter(self.transports.values())))
        return [best.allocate(shape.nbytes, shape.name) for shape in rank.regions]

    def attach(self, layout: Layout, regions: Sequence[Any], *, siblings: Mapping[int, str] | None = None) -> None:
        """Take over the engine's memory: one Region, buffer or tensor per region of our rank's layout.

        Args:
            siblings: control addresses of the worker's other ranks, by rank; needed for fan-out. May also be
                set later, before the first fetch.
        """
        if self._memory is not None:
            raise MisuseError("a layout is attached already")
        self._memory = Memory(self.config, self.transports, layout, regions)
        self._source = Source(self._memory, self.epoch, self._keys, self.journal)
        self.siblings.update(siblings or {})

    def start(self) -> None:
        """Open control and data listeners; from here on peers can reach us."""
        source = self.source
        for scheme, transport in self.transports.items():
            listener = transport.listen(self.config.listen.get(scheme, ""))
            self._listeners.append(listener)
            self._spawn(f"accept-{scheme}", self._accept, listener, scheme, source)
        addresses = self.config.control or (f"unix://{self._directory.file_path}",)
        self._server = ControlServer(
            self, addresses, credentials=self.credentials, insecure=self.config.insecure, admit=self._admit_call
        )
        self._server.start()
        self._server.set_serving(True, "live")
        self._spawn("sweep", self._sweep, source)

    @property
    def memory(self) -> Memory:
        """What ``attach`` took over; raises MisuseError before it."""
        if self._memory is None:
            raise MisuseError("no layout is attached", hint="call attach before start")
        return self._memory

    @property
    def source(self) -> Source:
        """The half that others read from; raises MisuseError before ``attach``."""
        if self._source is None:
            raise MisuseError("no layout is attached", hint="call attach before start")
        return self._source

    @property
    def address(self) -> str:
        """Our first control address, as peers dial it."""
        if self._server is None:
            raise MisuseError("the agent was not started")
        return self._server.contact_addresses[0]

    @property
    def contact_addresses(self) -> tuple[str, ...]:
        """Where our data listeners are, best first; none before ``start``."""
        return tuple(listener.contact_address for listener in self._listeners)

    def publish_health(self, ready: bool, *, planes: bool) -> None:
        """Set what ``grpc.health.v1`` says: of the whole, and of ``transport/SCHEME``; ``live`` always serves."""
        if self._server is not None:
            self._server.set_serving(ready and not self.draining)
            for scheme in self.transports:
                self._server.set_serving(planes, f"transport/{scheme}")

    @property
    def counters(self) -> dict[str, int]:
        """What happened so far: offers and relays by outcome, fetches by outcome; and ``insecure_listeners``: how many
        addresses are open to other hosts without saying who may come.
        """
        exposed = sum(transport.insecure_listeners for transport in self.transports.values())
        exposed += len(self._server.insecure_addresses) if self._server else 0
        found = {**(self._source.counters if self._source else {}), **self.fetched}
        return {**found, "insecure_listeners": exposed} if exposed else found

    @property
    def host(self) -> str:
        """The machine that our memory is on, as peers compare it."""
        return self._host

    def reconfigure(self, config: AgentConfig) -> None:
        """Take over what may change while we run (``RELOADABLE``), for transfers from now on; ignores the rest."""
        self.config = self.config.reloaded(config)
        self.peers.call_s, self._rates = self.config.call_s, CallRates(self.config.quotas)
        if self._memory is not None:
            self._memory.config = self.source.config = self.config
            self.source.usage.quotas = self.config.quotas

    def drain(self) -> None:
        """Take nothing new: health says NOT_SERVING, offers and fetches are refused. What is underway goes on."""
        self.draining = True
        if self._server is not None:
            self._server.set_serving(False)

    def undrain(self) -> None:
        """Take new offers and fetches again; health follows when readiness is next looked at."""
        self.draining = False

    def underway(self) -> int:
        """Offers with a live lease, and fetches that run."""
        return self.fetching() + (0 if self._source is None else self._source.live())

    def fetching(self) -> int:
        """Fetches that run."""
        with self._lock:
            return sum(1 for fetch in self._fetches if not fetch.done)

    def _check_taking(self) -> None:
        if self.draining:
            raise PeerError("this agent drains: it takes nothing new", reason="DRAINING", hint="ask another worker")

    def close(self) -> None:
        """End every transfer, thread, socket and region. Idempotent."""
        self._stop.set()
        with self._lock:
            fetches = list(self._fetches)
        for fetch in fetches:
            fetch.cancel("the agent closes")
        if self._source is not None:
            self._source.withdraw_all("closing")
        if self._server is not None:
            self._server.stop()
        for listener in self._listeners:
            listener.close()
        for fetch in fetches:
            fetch.join(_JOIN_S)
        for thread in self._threads:
            thread.join(timeout=_JOIN_S)
        if self._source is not None:
            self._source.sweep()  # nobody reads any more: what was quarantined is free
        self._settle()
        self.keeper.close()
        self.peers.close()
        if self._memory is not None:
            self._memory.close()
        for transport in self.transports.values():
            transport.close()
        if self._memory is not None:
            self._memory.forget()
        self._directory.close()

    def __enter__(self) -> Agent:
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
        """Seal a request's pages and slots; return this rank's part of its ticket (``Ticket.join`` makes the whole).

        It does not wait: neither for a peer nor for the device.

        Args:
            transfer: id, the same on all ranks of the worker, unique while this process lives.
            tables: page numbers by table name; all of them stay untouched until ``on_end``, apart from work already
                launched, which ``fence`` waits for.
            kv_tokens: tokens with valid per-token rows; state_tokens: where the state stands (default kv_tokens).
            context: digest of what the caches were computed from; the target's engine compares it.
            nonce: 16 random bytes for the ticket; given when the worker's scheduler writes the ticket itself.
            tenant: whose request it is; the ticket says so, sealed. audience: the only worker that may fetch it.
            trace: W3C traceparent of the request, for the ticket.
            fence: waits until the device has written everything; called once, before the first byte is read, by a
                peer's call. If it fails, so does the transfer.
            on_end: called with (transfer, outcome) once the pages are free again: completed, expired, aborted ...

        Raises:
            MisuseError: the id is in use, or a page table is wrong; nothing was sealed.
            PeerError: DRAINING.
        """
        check_id(transfer)
        stands = kv_tokens if state_tokens is None else state_tokens
        nonce = secrets.token_bytes(16) if nonce is None else nonce
        ticket = self.issuer.issue(
            transfer, kv_tokens=kv_tokens, state_tokens=stands, sampled=sampled, context=context, nonce=nonce,
            tenant=tenant, audience=audience,
        )  # fmt: skip
        told = self.seal(
            transfer, tables, kv_tokens=kv_tokens, state_tokens=stands, nonce=nonce, tenant=tenant, trace=trace,
            fence=fence, on_end=on_end,
        )  # fmt: skip
        return ticket if ticket.trace == told else replace(ticket, trace=told)

    def seal(
        self, transfer: str, tables: Mapping[str, Sequence[int]], *, kv_tokens: int, state_tokens: int, **about: Any
    ) -> str:
        """The half of ``offer`` that writes no ticket (of the ``nonce`` in ``about``). Returns the trace."""
        self._check_taking()
        shape = RequestShape(kv_tokens=plain(kv_tokens), state_tokens=plain(state_tokens))
        return self.source.seal(transfer, tables, shape, **about)

    @property
    def issuer(self) -> RankIssuer:
        """Writes tickets in this rank's name, for the worker's own scheduler process; there once started."""
        return self.source.issuer(self.address)

    def withdraw(self, transfer: str) -> None:
        """Take an offer back; its pages are free when ``on_end`` is called. Unknown or ended ones are ignored."""
        self.source.withdraw(transfer)

    def keep(self, ticket: Ticket | str) -> None:
        """Hold a ticket's lease at its source until a fetch of it begins here, or ``decline``. Returns at once."""
        self.keeper.keep(_parsed(ticket))

    def decline(self, ticket: Ticket | str, reason: str) -> None:
        """Nobody will fetch this: its source may free it now. Best effort; returns at once."""
        parsed = _parsed(ticket)
        self.keeper.decline(parsed, reason, [part.address for part in parsed.ranks])

    def start_fetch(
        self,
        ticket: Ticket | str,
        tables: Mapping[str, Sequence[int]],
        *,
        first_token: int = 0,
        timeout_s: float = 30.0,
        tenant: str | None = None,
        on_done: Callable[[], None] | None = None,
    ) -> Fetch:
        """Begin to fetch a transfer into our own pages; see ``fetch``. Returns at once, or raises MisuseError, or
        ExhaustedError where no thread is left.

        What is raised here is told to siblings, too: a worker of several ranks needs a fresh ticket then.

        Args:
            on_done: called by the fetch's thread at the end.
        """
        fetch = self.new_fetch(ticket, tables, first_token, timeout_s, tenant)
        fetch.start(on_done)
        return fetch

    def new_fetch(
        self,
        ticket: Ticket | str,
        tables: Mapping[str, Sequence[int]],
        first_token: int,
        timeout_s: float,
        tenant: str | None = None,
    ) -> Fetch:
        """A fetch that has not begun: for who calls its ``start`` or ``run`` at once, as these here do."""
        if math.isnan(timeout_s):
            raise MisuseError("a timeout that is no number never passes")
        parsed = _parsed(ticket)
        self.keeper.forget(parsed.transfer)
        with self._lock:
            if self._stop.is_set():
                raise MisuseError("the agent is closed")
            try:
                self._check_taking()
                _check_meant(parsed, self.config.worker, tenant)
                fetch = Fetch(self, parsed, tables, first_token=plain(first_token), timeout_s=timeout_s)
            except PdxferError as error:
                self.leave_siblings(parsed, error)
                raise
            self._fetches = [*(f for f in self._fetches if not (f.done and f.settle())), fetch]
        return fetch

    def fetch(
        self,
        ticket: Ticket | str,
        tables: Mapping[str, Sequence[int]],
        *,
        first_token: int = 0,
        timeout_s: float = 30.0,
        tenant: str | None = None,
    ) -> Received:
        """Fetch a transfer into our own pages and slots: complete and verified, or one error.

        Args:
            ticket: the joined ticket. tables: our pages by table name, for all ``kv_tokens`` of the ticket.
            first_token: rows before it are already here and stay untouched (state always moves).
            timeout_s: bound of the whole. tenant: whose request the pages are for; another one's ticket is refused.

        Returns:
            Received: keep it while the pages are in use, then ``release()`` it.

        Raises:
            PdxferError: and the pages are free again (not to be read): see the tree in ``errors.py``.
        """
        fetch = self.new_fetch(ticket, tables, first_token, timeout_s, tenant)
        fetch.run()
        return fetch.wait()

    # -- what peers call (ControlHandler) ----------------------------------------------------------

    def describe(self, message: Describe, *, deadline_s: float) -> Description:
        """See ``ControlHandler``."""
        check_versions(message)
        self.layouts.add(message.layout)
        for transport in self.transports.values() if message.data_key else ():
            transport.admit(f"{message.rank}/{message.worker}", message.data_key)
        layout = self.memory.layout
        return Description(
            protocol_version=PROTOCOL_OLDEST,
            protocol_newest=PROTOCOL_VERSION,
            epoch=self.epoch,
            worker=self.config.worker,
            rank=self.config.rank,
            layout_digest=layout.digest,
            layout=b"" if message.known_layout_digest == layout.digest else layout.to_bytes(),
            transports=self.contact_addresses,
            host=self._host,
        )

    def open(self, message: Open, *, deadline_s: float) -> Opened:
        """See ``ControlHandler``."""
        with self.journal.judging():
            self._check_epoch(message.source_epoch)
            layout = self.layouts.get(message.layout_digest)
            if layout is None:
                what = f"layout {message.layout_digest} is unknown here"
                raise StaleError(what, reason="UNKNOWN_LAYOUT", hint="describe again")
            return self.source.open(message, layout, deadline_s)

    def complete(self, message: Complete, *, deadline_s: float) -> Completed:
        """See ``ControlHandler``."""
        with self.journal.judging():
            self._check_epoch(message.source_epoch)
            return self.source.complete(message)

    def abort(self, message: Abort, *, deadline_s: float) -> Completed:
        """See ``ControlHandler``."""
        with self.journal.judging():
            return self.source.abort(message)

    def renew(self, message: Renew, *, deadline_s: float) -> Renewed:
        """See ``ControlHandler``."""
        with self.journal.judging():
            return self.source.renew(message)

    def _check_epoch(self, epoch: bytes) -> None:
        if epoch != self.epoch:
            raise StaleError("this agent has restarted since the ticket was made", reason="EPOCH_CHANGED")

    # -- inside ------------------------------------------------------------------------------------

    def leave_siblings(self, ticket: Ticket, error: Exception, ranks: Iterable[int] | None = None) -> None:
        """We give up: siblings that would ask us, or that wait until we have read from them, need not until their
        deadline. ``ranks``: those we would read from; all, before that is known.
        """
        self.source.refuse_relay(ticket.transfer, str(error))
        wanted = {*self.siblings} if ranks is None else {*ranks}
        others = [self.siblings[rank] for rank in sorted(wanted & {*self.siblings} - {self.config.rank})]
        self.keeper.decline(ticket, str(error), others, relay=True)

    def _introduction(self, known_digest: str) -> Describe:
        return Describe(
            protocol_version=PROTOCOL_OLDEST,
            protocol_newest=PROTOCOL_VERSION,
            epoch=self.epoch,
            worker=self.config.worker,
            rank=self.config.rank,
            layout=self.memory.layout.to_bytes(),
            known_layout_digest=known_digest,
            data_key=next((t.public_key for t in self.transports.values() if t.public_key), b""),
        )

    def _admit_call(self, caller: Caller, worker: str) -> None:
        try:
            self._rates.count((caller.identity, worker))
        except ExhaustedError:
            self.fetched["quota_calls"] += 1
            raise

    def _spawn(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = start_thread(f"pdxfer-{self.config.rank}-{name}", target, *args)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]

    def _accept(self, listener: Listener, scheme: str, source: Source) -> None:
        while not self._stop.is_set():
            try:
                channel = listener.accept(timeout_s=0.2)
            except DeadlineError:
                continue
            except TransportError as error:  # out of descriptors, say; when it is closed, so are we
                if not self._stop.wait(_ACCEPT_AGAIN_S):
                    _log.warning("nobody can be accepted now: %s", error)
                continue
            try:
                arena, stall_s = self.memory.arena(scheme), self.config.stall_s
                ask = self._ask_open if self.transports[scheme].same_user else None
                self._spawn(f"serve-{scheme}", serve_channel, channel, source.lookup, ask, arena, self._stop, stall_s)
            except ExhaustedError as error:  # no memory for staging, or for a thread
                _log.warning("a peer is turned away: %s", error)
                channel.close()

    def _ask_open(self, request: bytes) -> tuple[bytes, bytes]:
        """Open, asked for on a data channel by a process of our user: see ``serve.Ask``."""
        method = METHODS["Open"]
        message = method.request.decode(request)
        self._admit_call(LOCAL, message.target_worker)
        opened = self.open(message, deadline_s=self.config.call_s)
        return opened.session, method.response.encode(opened)

    def _sweep(self, source: Source) -> None:
        rounds = itertools.count()
        while not self._stop.wait(_SWEEP_S):
            source.sweep()
            self._settle()
            if next(rounds) % _PEERS_EVERY == 0:
                self.peers.sweep()
        source.sweep()

    def _settle(self) -> None:
        """Let go of fetches that ended, once their pages are free."""
        with self._lock:
            self._fetches = [f for f in self._fetches if not (f.done and f.settle())]

    def check_integrity(self) -> None:
        """Prove that ledger and arenas lost nothing; call when idle. Raises InternalError."""
        self.memory.check_integrity()


def _transports(config: AgentConfig) -> dict[str, Transport]:
    """The transports that a config names, or (auto) all that work here, best first."""
    keys = new_keys()
    if config.transports != ("auto",):
        return {scheme: _transport(config, scheme, keys) for scheme in config.transports}
    found: dict[str, Transport] = {}
    for scheme in sorted(known_schemes(), key=preference):
        # memory reaches nobody but us; the others load torch, and a CUDA context, into whoever has no use for them.
        if scheme in ("memory", "gloo", "nccl") and scheme not in config.transport_options:
            continue
        try:
            found[scheme] = _transport(config, scheme, keys)
        except PdxferError as error:
            if scheme in config.transport_options:
                raise
            _log.info("transport %s is not here: %s", scheme, error.message)
    return found


def _transport(config: AgentConfig, scheme: str, keys: Any) -> Transport:
    options: dict[str, Any] = {}
    if scheme in NETWORK_SCHEMES:
        options = {"curve": config.tls is not None, "curve_keys": keys, "insecure": config.insecure}
    return create_transport(scheme, **{**options, **config.transport_options.get(scheme, {})})


def _private_directory() -> PrivateDirectory:
    try:
        return PrivateDirectory("pdxfer-agent-", "control.sock")
    except OSError as error:
        raise ExhaustedError(f"no directory for the control socket: {error.strerror}", hint="set TMPDIR") from error


def _parsed(ticket: Ticket | str) -> Ticket:
    return ticket if isinstance(ticket, Ticket) else Ticket.decode(ticket)


def _check_meant(ticket: Ticket, worker: str, tenant: str | None) -> None:
    if tenant is not None and ticket.tenant != tenant:
        raise TicketError(f"{ticket.transfer}: the ticket is another tenant's", reason="WRONG_TENANT")
    if ticket.audience not in ("", worker):
        raise TicketError(f"{ticket.transfer}: the ticket is for another worker", reason="WRONG_AUDIENCE")


def host_name() -> str:
    """Names this machine and mount namespace: equal on two agents means that they can share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/mnt').st_ino}"
    except OSError:
        return f"unknown/{os.getpid()}"
