"""Agent: serves one rank of a worker: its offers to others, its fetches from others, and all they hold.

In come an engine's layout, memory and page tables; out come tickets at a source, and complete verified caches
(or one error) at a target. It owns the control server, data listeners, arenas, leases and threads, and ends
them all in ``close``. Engines never see a peer, a channel or a plan.

::

    engine ──offer──▶ Agent ◀──Describe, Open, Renew, Complete, Abort──▶ Agent ◀──fetch── engine
              ticket   │  └─ data listeners, one thread per channel ───────┘ │
                       └─ ledger, leases (a sweeper thread)                  └─ ledger, one thread per edge
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdxfer.agent.arena import Arena
from pdxfer.agent.fetch import Fetch, Received
from pdxfer.agent.peers import Layouts, Peers
from pdxfer.control import ControlServer
from pdxfer.driver import SourceSession, serve_channel
from pdxfer.errors import (
    DeadlineError,
    ExhaustedError,
    IncompatibleError,
    MisuseError,
    PdxferError,
    StaleError,
    TicketError,
    TransportError,
)
from pdxfer.layout import Layout, RankLayout
from pdxfer.messages import (
    PROTOCOL_VERSION,
    Abort,
    Complete,
    Completed,
    ControlHandler,
    Describe,
    Description,
    Mode,
    Open,
    Opened,
    Renew,
    Renewed,
)
from pdxfer.packing import EdgeProgram, RequestShape, Side
from pdxfer.plan import Edge, Plan, make_plan
from pdxfer.ticket import RankTicket, Ticket, seal_rank, unseal
from pdxfer.transfer import SOURCE, Event, Hold, Ledger, Offer, State
from pdxfer.transport import Listener, Region, Transport, create_transport

__all__ = ["Agent", "AgentConfig"]

_ENDED_MAX = 4096
_SWEEP_S = 0.05
_RELAY_WAIT_S = 0.02
_log = logging.getLogger("pdxfer.agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """How one rank's agent works.

    Attributes:
        worker: name of the worker, unique among peers; rank: this rank's number.
        control: control addresses to bind (``unix:///path``, ``tcp://host:port``); () is a private Unix socket.
        transports: data transports to offer and use, best first; transport_options: by scheme.
        mode: ``auto``, ``packed`` or ``direct``. kernel: ``auto``, ``native``, ``numpy`` or ``torch``.
        arena_bytes: bound of the staging memory of one transport; chunk_bytes: bound of a message.
        window: chunks underway per edge; lease_s: how long an offer waits for its next sign of life.
        stall_s: how long a chunk waits for staging or for room on a channel.
        allow_remote: bind addresses other hosts can reach (until peers are authenticated: trusted networks only).
    """

    worker: str
    rank: int = 0
    control: tuple[str, ...] = ()
    transports: tuple[str, ...] = ("shm", "tcp")
    transport_options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    mode: str = "auto"
    kernel: str = "auto"
    digests: bool = True
    arena_bytes: int = 64 << 20
    chunk_bytes: int = 8 << 20
    window: int = 2
    lease_s: float = 30.0
    stall_s: float = 5.0
    allow_remote: bool = False

    def __post_init__(self) -> None:
        if not self.worker or self.rank < 0 or not self.transports:
            raise MisuseError(f"a worker name, a rank and a transport are needed: {self}")
        if self.mode not in ("auto", "packed", "direct"):
            raise MisuseError(f"mode must be auto, packed or direct, got {self.mode!r}")
        if not 4096 <= self.chunk_bytes <= self.arena_bytes:
            raise MisuseError(f"chunk_bytes {self.chunk_bytes} must be in [4096, arena_bytes {self.arena_bytes}]")
        if min(self.window, self.lease_s, self.stall_s) <= 0:
            raise MisuseError(f"window, lease_s and stall_s must be positive: {self}")


@dataclass(slots=True, kw_only=True)
class _Record:
    """One transfer that others read from us: an engine's offer, or our part of a fan-out."""

    offer: Offer
    side: Side
    shape: RequestShape
    ticket: Ticket | None = None
    ticket_bytes: bytes = b""
    hold: Hold | None = None
    on_end: Callable[[str, str], None] | None = None
    ready: threading.Event | None = None
    sessions: dict[bytes, SourceSession] = field(default_factory=dict)


class Agent(ControlHandler):
    """One rank's agent. Construct, ``allocate``, ``attach``, ``start``, then offers and fetches, ``close``."""

    def __init__(self, config: AgentConfig) -> None:
        self.config = config
        self.epoch = secrets.token_bytes(16)
        self._key = secrets.token_bytes(32)
        self._directory = tempfile.mkdtemp(prefix="pdxfer-")
        self.transports: dict[str, Transport] = {}
        try:
            for scheme in config.transports:
                self.transports[scheme] = create_transport(scheme, **config.transport_options.get(scheme, {}))
        except BaseException:
            self.close()
            raise
        self.layouts = Layouts()
        self.peers = Peers(self._introduction, self.layouts, self.transports, host_name())
        self.counters: Counter[str] = Counter()
        self._arenas: dict[str, Arena] = {}
        self._records: OrderedDict[tuple[bool, str], _Record] = OrderedDict()
        self._quarantined: list[_Record] = []
        self._by_session: dict[bytes, _Record] = {}
        self._relay_plans: dict[str, Plan] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listeners: list[Listener] = []
        self._regions: list[Region] = []
        self._server: ControlServer | None = None
        self.siblings: dict[int, str] = {}
        self.layout: Layout
        self.ledger: Ledger

    # -- set-up ------------------------------------------------------------------------------------

    def allocate(self, rank: RankLayout) -> list[Region]:
        """Memory for every region of ``rank``, of the kind our best transport moves from without a copy."""
        best = next((t for t in self.transports.values() if t.can_export), next(iter(self.transports.values())))
        return [best.allocate(shape.nbytes, shape.name) for shape in rank.regions]

    def attach(self, layout: Layout, regions: Sequence[Any], *, siblings: Mapping[int, str] | None = None) -> None:
        """Take over the engine's memory: one Region, buffer or tensor per region of our rank's layout.

        Args:
            siblings: control addresses of the worker's other ranks, by rank; needed for fan-out.
        """
        rank = layout.ranks[self.config.rank]
        if len(regions) != len(rank.regions):
            raise MisuseError(f"rank {rank.rank} has {len(rank.regions)} regions, got {len(regions)}")
        self.layout, self.siblings = layout, dict(siblings or {})
        exporter = next((t for t in self.transports.values() if t.can_export), None)
        for shape, region in zip(rank.regions, regions, strict=True):
            self._regions.append(_as_region(region, shape.name, exporter))
        self._buffers = [r.view if isinstance(r, Region) else r for r in self._regions]
        totals: dict[str, int] = {}
        for table, pool in rank.pools().items():
            totals[pool] = rank.tables()[table].pages
        self.ledger = Ledger(totals)

    def start(self) -> None:
        """Open control and data listeners; from here on peers can reach us."""
        if not hasattr(self, "layout"):
            raise MisuseError("attach a layout before start")
        for scheme, transport in self.transports.items():
            listener = transport.listen()
            self._listeners.append(listener)
            self._spawn(f"accept-{scheme}", self._accept, listener, scheme)
        addresses = self.config.control or (f"unix://{self._directory}/control.sock",)
        self._server = ControlServer(self, addresses, allow_remote=self.config.allow_remote)
        self._server.start()
        self._spawn("sweep", self._sweep)

    @property
    def address(self) -> str:
        """Our first control address, as peers dial it."""
        if self._server is None:
            raise MisuseError("the agent was not started")
        return self._server.contact_addresses[0]

    def close(self) -> None:
        """End every transfer, thread, socket and region. Idempotent."""
        self._stop_serving()
        for thread in getattr(self, "_threads", []):
            thread.join(timeout=10.0)
        if hasattr(self, "peers"):
            self.peers.close()
        for region in getattr(self, "_regions", []):
            if isinstance(region, Region):
                region.close()
        for transport in self.transports.values():
            transport.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _stop_serving(self) -> None:
        if not hasattr(self, "_stop"):
            return
        self._stop.set()
        with self._lock:
            records = list(self._records.values())
        for record in records:
            if record.offer.end("the agent closes"):
                self._end(record, Event.GIVE_UP)
        if self._server is not None:
            self._server.stop()
        for listener in self._listeners:
            listener.close()

    def __enter__(self) -> Agent:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _spawn(self, name: str, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name=f"pdxfer-{self.config.rank}-{name}", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    # -- what engines call -------------------------------------------------------------------------

    def offer(
        self,
        transfer: str,
        tables: Mapping[str, Sequence[int]],
        *,
        kv_tokens: int,
        state_tokens: int | None = None,
        sampled: Sequence[int] = (),
        fence: Callable[[], None] | None = None,
        on_end: Callable[[str, str], None] | None = None,
    ) -> Ticket:
        """Seal a request's pages and slots and return this rank's part of its ticket (``Ticket.join`` makes the whole).

        Args:
            transfer: id, the same on all ranks of the worker, unique while this process lives.
            tables: page numbers by table name; all of them stay untouched until ``on_end``.
            kv_tokens: tokens with valid per-token rows; state_tokens: where the state stands (default kv_tokens).
            fence: waits until the device has written everything; called before the pages are sealed.
            on_end: called with (transfer, outcome) once the pages are free again: completed, expired, aborted ...

        Raises:
            MisuseError: the id is in use, or a page table is wrong; nothing was sealed.
        """
        shape = RequestShape(kv_tokens=kv_tokens, state_tokens=kv_tokens if state_tokens is None else state_tokens)
        rank = self.layout.ranks[self.config.rank]
        side = Side(rank, self._buffers, tables)
        side.check(self.layout.spec, shape)
        with self._lock:
            if (False, transfer) in self._records:
                raise MisuseError(f"transfer {transfer!r} was offered before", hint="use a fresh id for every hand-off")
            hold = self.ledger.open(transfer, self._units(side), SOURCE)
            if fence is not None:
                fence()
            self.ledger.fire(hold, Event.SEAL)
            record = _Record(
                offer=Offer(transfer, hold.generation, self.config.lease_s, time.monotonic() + self.config.lease_s),
                side=side, shape=shape, hold=hold, on_end=on_end,
            )  # fmt: skip
            part = RankTicket(rank=rank.rank, address=self.address, epoch=self.epoch, generation=hold.generation)
            common = Ticket(
                transfer=transfer, worker=self.config.worker, layout_digest=self.layout.digest,
                state_tokens=shape.state_tokens, kv_tokens=shape.kv_tokens, sampled=tuple(sampled),
            )  # fmt: skip
            record.ticket = seal_rank(common, part, self._key)
            self.ledger.fire(hold, Event.ISSUE)
            self._remember((False, transfer), record)
            self.counters["offered"] += 1
        return record.ticket

    def withdraw(self, transfer: str) -> None:
        """Take an offer back; its pages are free when ``on_end`` is called. Unknown or ended ones are ignored."""
        record = self._records.get((False, transfer))
        if record is not None and record.offer.end("withdrawn"):
            self._end(record, Event.GIVE_UP)

    def start_fetch(
        self,
        ticket: Ticket | str,
        tables: Mapping[str, Sequence[int]],
        *,
        first_token: int = 0,
        timeout_s: float = 30.0,
    ) -> Fetch:
        """Begin to fetch a transfer into our own pages; see ``fetch``."""
        parsed = ticket if isinstance(ticket, Ticket) else Ticket.decode(ticket)
        fetch = Fetch(self, parsed, tables, first_token=first_token, timeout_s=timeout_s)
        fetch.start()
        return fetch

    def fetch(
        self,
        ticket: Ticket | str,
        tables: Mapping[str, Sequence[int]],
        *,
        first_token: int = 0,
        timeout_s: float = 30.0,
    ) -> Received:
        """Fetch a transfer into our own pages and slots: complete and verified, or one error.

        Args:
            ticket: the joined ticket. tables: our pages by table name, for all ``kv_tokens`` of the ticket.
            first_token: rows before it are already here and stay untouched (state always moves).
            timeout_s: bound of the whole.

        Returns:
            Received: keep it while the pages are in use, then ``release()`` it.

        Raises:
            PdxferError: and the pages are free again (not to be read): see the tree in ``errors.py``.
        """
        return self.start_fetch(ticket, tables, first_token=first_token, timeout_s=timeout_s).wait()

    # -- what peers call (ControlHandler) ----------------------------------------------------------

    def describe(self, message: Describe, *, deadline_s: float) -> Description:
        """See ``ControlHandler``."""
        if message.protocol_version != PROTOCOL_VERSION:
            raise IncompatibleError("*", "protocol_version", PROTOCOL_VERSION, message.protocol_version)
        if message.layout:
            self.layouts.add(message.layout)
        same = message.known_layout_digest == self.layout.digest
        return Description(
            protocol_version=PROTOCOL_VERSION,
            epoch=self.epoch,
            worker=self.config.worker,
            rank=self.config.rank,
            layout_digest=self.layout.digest,
            layout=b"" if same else self.layout.to_bytes(),
            transports=tuple(listener.contact_address for listener in self._listeners),
            host=host_name(),
        )

    def open(self, message: Open, *, deadline_s: float) -> Opened:
        """See ``ControlHandler``."""
        if message.source_epoch != self.epoch:
            raise StaleError("this agent has restarted since the ticket was made", reason="EPOCH_CHANGED")
        record = self._admit(message)
        layout = self.layouts.get(message.layout_digest)
        if layout is None:
            raise StaleError(
                f"layout {message.layout_digest} is unknown here", reason="UNKNOWN_LAYOUT", hint="describe again"
            )
        plan = self._agreed_plan(message, layout)
        if record.ready is not None and not record.ready.wait(min(_RELAY_WAIT_S, deadline_s)):
            raise ExhaustedError(f"{message.transfer}: this rank's own share is not in yet", retry_after_s=0.005)
        edge = Edge(self.config.rank, message.target_rank, message.relay)
        shape = RequestShape(
            kv_tokens=record.shape.kv_tokens, first_token=message.first_token, state_tokens=record.shape.state_tokens
        )
        program = EdgeProgram(plan, edge, shape, chunk_bytes=message.chunk_bytes)
        return self._admit_session(message, record, plan, program)

    def _admit(self, message: Open) -> _Record:
        """The record that a ticket opens; refuses edited, foreign and outlived tickets."""
        if not message.relay:
            part = unseal(Ticket.decode(message.ticket), self.config.rank, self.epoch, self._key)
        record = self._records.get((message.relay, message.transfer))
        if record is None:
            reason = "NOT_READY" if message.relay else "UNKNOWN_TRANSFER"
            if message.relay:
                raise ExhaustedError(
                    f"{message.transfer}: this rank has not begun to fetch it ({reason})", retry_after_s=0.005
                )
            raise StaleError(f"transfer {message.transfer!r} is not (or no longer) offered here", reason=reason)
        if message.relay:
            same_worker = message.target_worker == self.config.worker
            if not same_worker or not hmac.compare_digest(record.ticket_bytes, message.ticket):
                raise TicketError(f"{message.transfer}: only a sibling with the same ticket may ask for its fan-out")
        elif part.generation != record.offer.generation:
            raise StaleError(
                f"{message.transfer}: the ticket is of generation {part.generation}, it is {record.offer.generation}",
                reason="STALE_GENERATION",
            )
        return record

    def _agreed_plan(self, message: Open, layout: Layout) -> Plan:
        source = self.layout
        if message.relay:
            found = self._relay_plans.get(message.transfer)
            if found is None:
                raise StaleError(f"{message.transfer}: the fan-out has ended", reason="TRANSFER_ENDED")
            plan = found
        else:
            plan = make_plan(source, layout)
        if plan.digest != message.plan_digest:
            raise IncompatibleError(
                "*", "plan_digest", plan.digest, message.plan_digest, why="the two sides plan differently"
            )
        return plan

    def _admit_session(self, message: Open, record: _Record, plan: Plan, program: EdgeProgram) -> Opened:
        session = secrets.token_bytes(16)
        mode = self._choose_mode(message, program)
        largest = max((c.nbytes for c in program.chunks), default=0)
        scheme = message.transport.partition("://")[0]
        arena = self._arena(scheme)
        if mode is Mode.PACKED and largest > arena.capacity_bytes:
            raise ExhaustedError(
                f"a chunk of {largest} B does not fit into the arena of {arena.capacity_bytes} B",
                hint="lower chunk_bytes at the target",
            )
        served = SourceSession(
            transfer=message.transfer, generation=record.offer.generation, session=session, mode=mode, program=program,
            source=record.side, regions={i: r for i, r in enumerate(self._regions) if isinstance(r, Region)},
            check_live=lambda: record.offer.check_live(time.monotonic()), staging=arena,
            stall_s=self.config.stall_s, kernel=self.config.kernel,
        )  # fmt: skip
        with self._lock:
            record.offer.open(
                time.monotonic(), message.target_rank, plan.readers(self.config.rank, relay=message.relay), session
            )
            record.sessions[session] = served
            self._by_session[session] = record
        return Opened(
            epoch=self.epoch, generation=record.offer.generation, session=session, lease_s=record.offer.lease_s,
            chunks=len(program.chunks), payload_bytes=program.payload_bytes, mode=mode,
        )  # fmt: skip

    def _choose_mode(self, message: Open, program: EdgeProgram) -> Mode:
        transport = self.transports.get(message.transport.partition("://")[0])
        if transport is None:
            raise MisuseError(f"transport {message.transport!r} is not served here")
        exports = transport.can_export and all(isinstance(r, Region) for r in self._regions)
        able = exports and self.config.mode != "packed" and not any(item.converts for item in program.items)
        if message.mode is Mode.DIRECT and able:
            return Mode.DIRECT
        return Mode.PACKED

    def complete(self, message: Complete, *, deadline_s: float) -> Completed:
        """See ``ControlHandler``."""
        with self._lock:
            record = self._record_of(message.session, message.transfer)
            if message.source_epoch != self.epoch:
                raise StaleError("this agent has restarted since the ticket was made", reason="EPOCH_CHANGED")
            last = record.offer.complete(time.monotonic(), message.target_rank, message.session, message.generation)
        if last:
            self._end(record, Event.LAST_DONE)
        return Completed(state=record.offer.ended or State.LEASED.value)

    def abort(self, message: Abort, *, deadline_s: float) -> Completed:
        """See ``ControlHandler``."""
        with self._lock:
            try:
                record = self._record_of(message.session, message.transfer)
            except StaleError:
                return Completed(state="unknown")
            first = record.offer.abort(message.target_rank, message.session, message.reason)
        if first:
            self._end(record, Event.GIVE_UP)
        return Completed(state=record.offer.ended)

    def renew(self, message: Renew, *, deadline_s: float) -> Renewed:
        """See ``ControlHandler``."""
        with self._lock:
            record = self._record_of(message.session, message.transfer)
            return Renewed(lease_s=record.offer.renew(time.monotonic(), message.target_rank, message.session))

    def _record_of(self, session: bytes, transfer: str) -> _Record:
        record = self._by_session.get(session)
        if record is None or record.offer.transfer != transfer:
            raise StaleError(f"transfer {transfer!r} has no such session here", reason="UNKNOWN_SESSION")
        return record

    # -- fan-out, used by Fetch --------------------------------------------------------------------

    def offer_relay(
        self, transfer: str, ticket_bytes: bytes, side: Side, shape: RequestShape, generation: int, plan: Plan
    ) -> Offer:
        """Let siblings ask for what this rank is about to receive for them; opened by ``relay_ready``."""
        record = _Record(
            offer=Offer(transfer, generation, self.config.lease_s, time.monotonic() + self.config.lease_s),
            side=side, shape=shape, ticket_bytes=ticket_bytes, ready=threading.Event(),
        )  # fmt: skip
        with self._lock:
            old = self._records.get((True, transfer))
            if old is not None and not old.offer.ended:
                raise MisuseError(f"transfer {transfer!r} is being fetched already")
            self._relay_plans[transfer] = plan
            self._remember((True, transfer), record)
        return record.offer

    def relay_ready(self, transfer: str) -> None:
        """This rank's share is in and verified: siblings may read it."""
        ready = self._records[(True, transfer)].ready
        assert ready is not None
        ready.set()

    def end_relay(self, transfer: str, why: str) -> bool:
        """End the fan-out; True when no thread reads for it any more (call again until it is)."""
        record = self._records.get((True, transfer))
        self._relay_plans.pop(transfer, None)
        if record is None:
            return True
        completed = record.offer.ended == "completed"
        record.offer.end(why)
        for session in record.sessions.values():
            session.finish() if completed else session.close()
        return all(session.quiet() for session in record.sessions.values())

    # -- inside ------------------------------------------------------------------------------------

    def _introduction(self, known_digest: str) -> Describe:
        return Describe(
            protocol_version=PROTOCOL_VERSION, epoch=self.epoch, worker=self.config.worker, rank=self.config.rank,
            layout=self.layout.to_bytes(), known_layout_digest=known_digest,
        )  # fmt: skip

    def _units(self, side: Side) -> list[tuple[str, int]]:
        pools = side.rank.pools()
        return [(pools[name], int(page)) for name, table in side.tables.items() for page in table if page >= 0]

    def units(self, side: Side) -> list[tuple[str, int]]:
        """(pool, page) pairs of a request's tables."""
        return self._units(side)

    @property
    def buffers(self) -> list[Any]:
        """This rank's memory, one buffer per region."""
        return self._buffers

    def _arena(self, scheme: str) -> Arena:
        with self._lock:
            if scheme not in self._arenas:
                region = self.transports[scheme].allocate(self.config.arena_bytes, "staging")
                self._arenas[scheme] = Arena(region.view)
            return self._arenas[scheme]

    def _remember(self, key: tuple[bool, str], record: _Record) -> None:
        """Keep ended records for a while, so that repeated calls get the same answer."""
        self._records[key] = record
        if len(self._records) > _ENDED_MAX:
            for old, candidate in list(self._records.items()):
                if candidate.offer.ended and candidate not in self._quarantined:
                    del self._records[old]
                    for session in candidate.sessions:
                        self._by_session.pop(session, None)
                    break

    def _lookup(self, session: bytes) -> SourceSession:
        record = self._by_session.get(session)
        served = record.sessions.get(session) if record else None
        if served is None:
            raise TicketError("no such session here", reason="UNKNOWN_SESSION")
        return served

    def _accept(self, listener: Listener, scheme: str) -> None:
        while not self._stop.is_set():
            try:
                channel = listener.accept(timeout_s=0.2)
            except DeadlineError:
                continue
            except TransportError:
                return
            self._spawn(f"serve-{scheme}", serve_channel, channel, self._lookup, self._arena(scheme), self._stop)

    def _end(self, record: _Record, event: Event) -> None:
        """An offer has ended: free its hold, or quarantine it until nobody reads for it."""
        outcome = record.offer.ended
        self.counters[f"offers_{outcome.split(' ')[0].rstrip(':')}"] += 1
        if event is Event.LAST_DONE:
            for session in record.sessions.values():
                session.finish()
            self._free(record, event)
            return
        _log.warning("transfer %s ended: %s", record.offer.transfer, outcome)
        for session in record.sessions.values():
            session.close()
        if record.hold is not None:
            with self._lock:
                self.ledger.fire(record.hold, Event.GIVE_UP)
                self._quarantined.append(record)
            self._release_quiet()

    def _free(self, record: _Record, event: Event) -> None:
        if record.hold is not None:
            self.ledger.fire(record.hold, event)
        if record.on_end is not None:
            record.on_end(record.offer.transfer, record.offer.ended)

    def _release_quiet(self) -> None:
        with self._lock:
            quiet = [r for r in self._quarantined if all(s.quiet() for s in r.sessions.values())]
            self._quarantined = [r for r in self._quarantined if r not in quiet]
        for record in quiet:
            self._free(record, Event.QUIET)

    def _sweep(self) -> None:
        """Expire leases and free what was quarantined."""
        while not self._stop.wait(_SWEEP_S):
            now_s = time.monotonic()
            with self._lock:
                expired = [r for r in self._records.values() if r.hold is not None and r.offer.expired(now_s)]
                expired = [r for r in expired if r.offer.end("expired: the lease is over")]
            for record in expired:
                self._end(record, Event.GIVE_UP)
            self._release_quiet()

    def check_integrity(self) -> None:
        """Prove that ledger and arenas lost nothing; call when idle. Raises InternalError."""
        self.ledger.check_integrity()
        for arena in self._arenas.values():
            arena.check_integrity()


def _as_region(region: Any, name: str, exporter: Transport | None) -> Any:
    """A transport's Region where a peer could read it directly, else the buffer itself."""
    if isinstance(region, Region) or exporter is None or hasattr(region, "data_ptr"):
        return region
    return exporter.register(region, name)


def host_name() -> str:
    """Names this machine and mount namespace: equal on two agents means that they can share memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/mnt').st_ino}"
    except OSError:
        return f"unknown/{os.getpid()}"


def error_reason(error: BaseException) -> str:
    """The stable reason of an error, for an Abort."""
    return error.reason if isinstance(error, PdxferError) else type(error).__name__
