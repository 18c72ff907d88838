"""Fetch: one transfer at its target, from ticket to READY or to one error with everything put back.

In come a ticket and our page tables; out comes ``Received`` or a PdxferError. One thread per edge reads;
this rank's siblings may read from us what crosses the network only once (fan-out).

::

    reserve ─▶ plan ─▶ network edges: Open, move, verify, Complete ─┐
                 │                                                  ├─▶ all in ─▶ our readers done ─▶ READY
                 └───▶ relay edges (from siblings, once theirs is in)┘
    any error: cancel all edges, Abort the sources, quarantine the pages until our threads are gone
"""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from pdxfer import wire
from pdxfer.agent.choice import Choice, Work
from pdxfer.agent.reasons import reason_of
from pdxfer.agent.threads import start_thread
from pdxfer.control.convert import METHODS
from pdxfer.driver import EdgeReader, EdgeStats, PeerChannel, answered, ask
from pdxfer.errors import (
    AbortedError,
    CorruptError,
    DeadlineError,
    ExhaustedError,
    IncompatibleError,
    InternalError,
    MisuseError,
    PdxferError,
    PeerError,
    StaleError,
    TicketError,
    TransportError,
)
from pdxfer.messages import Abort, Complete, Mode, Open, Opened, Renew, check_versions
from pdxfer.packing import EdgeProgram
from pdxfer.pages import RequestShape, Side
from pdxfer.plan import Edge, Plan, make_plan
from pdxfer.spec import request_bytes
from pdxfer.ticket import Ticket
from pdxfer.trace import current
from pdxfer.transfer import TARGET, Cancel, Event, Hold, Intake, Ledger, Offer, State

if TYPE_CHECKING:
    from pdxfer.agent.peers import Peer
    from pdxfer.agent.service import Agent

__all__ = ["Fetch", "Received"]

_JOIN_S = 10.0
_ASK_BYTES_MAX = 48 << 10  # of an Open that fits into a frame's header
_ABORT_S = 1.0
_log = logging.getLogger("pdxfer.agent")

_Asked = tuple[bytes, float]  # the name of the answer, and until when it may come
_Greeted = tuple[Intake, wire.Opened]


@dataclass(slots=True, kw_only=True)
class Received:
    """A complete, verified transfer in our pages. ``release`` it when the engine no longer uses them.

    Attributes:
        ticket: where state and KV stand, and what was sampled.
        edges: what each edge cost. seconds: of the whole, and of plan and negotiate.
        plan: who sent what; behind a sidecar it is worked out when it is looked at.
    """

    ticket: Ticket
    edges: tuple[EdgeStats, ...]
    seconds: dict[str, float]
    _plan: Callable[[], Plan] = field(repr=False)
    _release: Callable[[], None] = field(repr=False)
    _released: bool = field(default=False, repr=False)

    @property
    def plan(self) -> Plan:
        """See the class."""
        return self._plan()

    def release(self) -> None:
        """The engine has freed the pages. Idempotent."""
        if not self._released:
            self._released = True
            self._release()


class Fetch:
    """One running fetch. ``wait`` from one thread; ``cancel`` from any."""

    def __init__(
        self, agent: Agent, ticket: Ticket, tables: Mapping[str, Sequence[int]], *, first_token: int, timeout_s: float
    ) -> None:
        self.agent, self.ticket = agent, ticket
        self.deadline_s = time.monotonic() + timeout_s
        self._started_s = time.perf_counter()
        self.shape = RequestShape(
            kv_tokens=ticket.kv_tokens, first_token=min(first_token, ticket.kv_tokens), state_tokens=ticket.state_tokens
        )
        self._side: Side | None = (side := agent.memory.side(tables))  # while it runs: it maps the engine's memory
        side.check(agent.memory.layout.spec, self.shape, exclusive=True)
        self.ledger = agent.memory.ledger
        self.hold: Hold = self.ledger.open(ticket.transfer, agent.memory.units(side), TARGET)
        epochs = [part.epoch for part in ticket.ranks]
        begin = agent.journal.begin
        self.timeline = begin("target", ticket.transfer, peer=ticket.worker, trace=ticket.trace, epochs=epochs)
        self.timeline.layout = ticket.layout_digest
        self._cancel = Cancel()
        self._on_done: Callable[[], None] | None = None
        self._done = threading.Event()
        self._result: Received | None = None
        self._seconds: dict[str, float] = {"negotiate": 0.0, "plan": 0.0}
        self._stats: list[EdgeStats] = []
        self._plan: Plan | None = None
        self._window = 1
        self._relay: Offer | None = None
        self._opened: list[tuple[Peer, Opened]] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def start(self, on_done: Callable[[], None] | None = None) -> None:
        """Begin in a thread of its own; called once, or ``run`` is. ``on_done`` must not raise.

        Raises:
            ExhaustedError: there is no thread; it has ended, and ``on_done`` is not called.
        """
        self._on_done = on_done
        try:
            start_thread(f"pdxfer-{self.agent.config.rank}-fetch", self.run)
        except ExhaustedError as error:
            self._fail(error)
            self._done.set()
            raise

    @property
    def side(self) -> Side:
        """Our memory with the request's pages; raises AbortedError once it has ended."""
        if self._side is None:
            raise AbortedError(f"{self.ticket.transfer}: the fetch has ended")
        return self._side

    @property
    def state(self) -> State:
        """State of our pages; only READY (and HANDED) may be decoded from."""
        return self.hold.state

    @property
    def done(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._done.is_set()

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended, well or not, and its pages are put back; False when it has not in time."""
        return self._done.wait(timeout_s)

    def cancel(self, why: str = "cancelled by the engine") -> None:
        """Give up; ``wait`` raises AbortedError unless it was READY already."""
        self._cancel.set(AbortedError(f"{self.ticket.transfer}: {why}"))

    def wait(self) -> Received:
        """Wait for the end: returns once, and the pages are then HANDED to the engine; raises the first error."""
        while not self._done.wait(1.0):
            if time.monotonic() > self.deadline_s + _JOIN_S + 2 * self.agent.config.call_s:
                raise DeadlineError(
                    f"{self.ticket.transfer}: our own threads did not end in time; the pages stay quarantined"
                )
        if self._result is None:
            error = self._cancel.error
            assert error is not None
            raise error
        if self.hold.state is State.READY:
            self.ledger.fire(self.hold, Event.TAKE)
            self._mark("handed")
        return self._result

    # -- the fetch thread ----------------------------------------------------------------------------

    def run(self) -> None:
        """Do it all in this thread, whatever comes of it: ``wait`` then returns or raises at once. Called once."""
        try:
            plan, peers = self._prepare()
            self._plan = plan
            self.ledger.fire(self.hold, Event.POST)
            self._mark("planned", f"{len(peers)} source ranks")
            self._move(plan, peers)
            self._check_whole(plan)
            self.ledger.fire(self.hold, Event.ALL_IN)
            self._mark("all_in")
            self._await_readers()
            self._cancel.check()
            self._seconds["total"] = time.perf_counter() - self._started_s
            self._result = Received(
                ticket=self.ticket, edges=tuple(self._stats), seconds=self._seconds, _plan=lambda: plan,
                _release=partial(_release, self.ledger, self.hold, partial(self.agent.journal.mark, self.timeline)),
            )  # fmt: skip
            self.ledger.fire(self.hold, Event.VERIFIED)
            self.agent.fetched["fetched"] += 1
            self.agent.journal.end(self.timeline, "completed", seconds=self._seconds)
        except BaseException as error:
            self._result = None
            interrupted = AbortedError(f"{self.ticket.transfer}: interrupted by {type(error).__name__}")
            self._fail(error if isinstance(error, Exception) else interrupted)
            if not isinstance(error, Exception):
                raise
        finally:
            self._side = None
            self._done.set()
            if self._on_done is not None:
                self._on_done()

    def _prepare(self) -> tuple[Plan, dict[int, Peer]]:
        """Meet the sources and agree on layouts; returns the plan and our source peers by rank."""
        agent, ticket = self.agent, self.ticket
        if not ticket.ranks:
            raise TicketError(f"{ticket.transfer}: the ticket has no source rank's part")
        with self._timed("negotiate"):
            first = agent.peers.get(ticket.ranks[0].address, epoch=ticket.ranks[0].epoch, deadline_s=self.deadline_s)
        source = first.layout
        if source.digest != ticket.layout_digest or len(source) != len(ticket.ranks):
            raise StaleError(
                f"{ticket.transfer}: the source's layout is not the ticket's any more", reason="LAYOUT_CHANGED"
            )
        if ticket.nbytes != request_bytes(source.request_sizes, ticket.kv_tokens):
            raise TicketError(f"{ticket.transfer}: {ticket.nbytes} B is not the length of {ticket.kv_tokens} tokens")
        with self._timed("plan"):
            plan = make_plan(source, agent.memory.layout)
            plan.digest  # noqa: B018 - computed once here, so that it counts as planning
        peers: dict[int, Peer] = {}
        with self._timed("negotiate"):
            for rank in plan.sources(agent.config.rank):
                part = ticket.rank(rank)
                peers[rank] = first if part is ticket.ranks[0] else self._source(rank)
                found = peers[rank].description
                if found.rank != rank or found.worker != ticket.worker or found.layout_digest != source.digest:
                    have, want = f"rank {found.rank} of {found.worker!r}", f"rank {rank} of {ticket.worker!r}"
                    raise PeerError(f"{part.address} is {have}, the ticket says {want}")
        return plan, peers

    def _move(self, plan: Plan, peers: Mapping[int, Peer]) -> None:
        me = self.agent.config.rank
        relays = plan.sources(me, relay=True)
        if plan.readers(me, relay=True):
            self._relay = self.agent.source.offer_relay(self.ticket, self.side, self.shape, self.hold.generation, plan)
        if missing := [r for r in relays if r not in self.agent.siblings]:
            raise MisuseError(
                f"fan-out needs the control addresses of sibling ranks {missing}",
                hint="give them to attach(siblings=...)",
            )
        ranks = list(peers)  # none, where siblings hand on all that this rank holds
        self._window = self.agent.config.window_of(self.agent.fetching() * (len(ranks) + len(relays)))
        network = [self._spawn(plan, Edge(r, me, False), partial(self._source, r)) for r in ranks[1:]]
        siblings = [self._spawn(plan, Edge(rank, me, True), partial(self._sibling, rank)) for rank in relays]
        for rank in ranks[:1]:  # mostly the only one: no thread for it
            self._edge(plan, Edge(rank, me, False), partial(self._source, rank), peers[rank])
        self._join(network)
        if self._relay is not None:
            self.agent.source.relay_ready(self.ticket.transfer)
        self._join(siblings)

    def _check_whole(self, plan: Plan) -> None:
        """READY is never a conclusion from silence: every edge of the plan has said that it is in and verified."""
        me = self.agent.config.rank
        due = {(rank, relay) for relay in (False, True) for rank in plan.sources(me, relay=relay)}
        if missing := due - {(stats.source, stats.relay) for stats in self._stats}:
            raise InternalError(f"{self.ticket.transfer}: edges {sorted(missing)} ended without a word")

    def _source(self, rank: int) -> Peer:
        part = self.ticket.rank(rank)
        return self.agent.peers.get(part.address, epoch=part.epoch, deadline_s=self.deadline_s)

    def _sibling(self, rank: int) -> Peer:
        return self.agent.peers.get(self.agent.siblings[rank], epoch=None, deadline_s=self.deadline_s)

    def _spawn(self, plan: Plan, edge: Edge, peer: Callable[[], Peer]) -> threading.Thread:
        thread = start_thread(f"pdxfer-{edge.target}-from-{edge.source}", self._edge, plan, edge, peer)
        self._threads.append(thread)
        return thread

    def _join(self, threads: Sequence[threading.Thread]) -> None:
        for thread in threads:
            while thread.is_alive():
                thread.join(timeout=max(0.0, min(0.5, self.deadline_s - time.monotonic())))
                if time.monotonic() > self.deadline_s:
                    raise DeadlineError(f"{self.ticket.transfer}: not everything came within the deadline")
        if self._cancel.error is not None:
            raise self._cancel.error
        if time.monotonic() > self.deadline_s:  # however the last calls went: a late success is not one by chance
            raise DeadlineError(f"{self.ticket.transfer}: not everything came within the deadline")

    def _edge(self, plan: Plan, edge: Edge, find: Callable[[], Peer], peer: Peer | None = None) -> None:
        """In some thread: open, read and complete one edge; the first error of any edge cancels all.

        Args:
            peer: what ``find`` has just found.
        """
        token = current.set(self.timeline.trace)
        try:
            try:
                self._attempt(plan, edge, peer or find(), fresh=False)
            except _Again:
                self._attempt(plan, edge, find(), fresh=True)
        except Exception as error:  # noqa: BLE001 - reported through the cancel flag, which _join raises
            _clear_frames(error)
            gone = getattr(error, "reason", "") == "CLIENT_CLOSED"  # by another fetch, which found nobody there
            if self._cancel.set(PeerError(str(error), reason="PEER_UNREACHABLE") if gone else error):
                self.timeline.failed_in = _name(edge)
        finally:
            current.reset(token)

    def _attempt(self, plan: Plan, edge: Edge, peer: Peer, *, fresh: bool) -> None:
        stats = EdgeStats(edge.source, edge.target, edge.relay)
        self.timeline.edges.append(stats)
        make_program = cache(partial(self._program, plan, edge, stats))
        with stats.stage("negotiate"):
            address, channel, choice = self._lend(peer, lambda: Work.of(make_program()), fresh=fresh)
        opened: Opened | None = None
        try:
            with stats.stage("negotiate"):
                message = self._open_message(peer, plan, edge, address)
                window = self._window
                if check_versions(peer.description) < 2:  # which refuses chunks that there are not
                    window = min(window, len(make_program().chunks))
                asked = self._ask_on(channel, message, window)
            program = make_program()  # while the source looks at the ticket
            if asked is not None and message.mode is Mode.DIRECT:
                with stats.stage("plan"):
                    program.expect(self.side)
            with stats.stage("negotiate"):
                opened, greeted = self._open(peer, message, program, channel, asked)
            with self._lock:
                self._opened = [(p, o) for p, o in self._opened if p.address != peer.address] + [(peer, opened)]
            stats.transport, stats.mode = choice.transport, opened.mode.value
            choice = replace(choice, mode=opened.mode.value)
            stats.choice = str(choice)
            self.agent.peers.note(peer, choice)
            self._mark("opened", f"{_name(edge)} over {stats.transport}, {stats.mode}")
            reader = self._reader(peer, opened, program, channel, stats, greeted)
            self._read(reader, peer, opened)
            self._mark("moved", _name(edge))
            with stats.stage("negotiate"):
                if not reader.complete():
                    self._complete(peer, opened, stats)
        except BaseException as error:
            channel.close()
            doubtful = channel.uses > 1 or opened is None  # no answer yet: it may have ended
            if not fresh and self._worth_again(peer, edge, error, unread=not stats.messages, doubtful=doubtful):
                raise _Again from error
            raise
        with self._lock:
            self._opened.remove((peer, opened))
            self._stats.append(stats)
        self.agent.peers.give_back(peer, address, channel)

    def _lend(self, peer: Peer, work: Callable[[], Work], *, fresh: bool) -> tuple[str, PeerChannel, Choice]:
        """A channel; when there is none, the peer may have restarted with others, so it is asked once more."""
        try:
            return self.agent.peers.lend(peer, self.deadline_s, work, fresh=fresh)
        except TransportError as error:
            self.agent.peers.forget(peer)
            if fresh:
                raise
            raise _Again from error

    def _worth_again(self, peer: Peer, edge: Edge, error: BaseException, *, unread: bool, doubtful: bool) -> bool:
        """Whether what we kept of this peer was out of date: channel, client, its memory of our layout, its epoch."""
        reason = getattr(error, "reason", "")
        outdated = reason == "UNKNOWN_LAYOUT" or (reason == "EPOCH_CHANGED" and edge.relay)
        outdated = outdated or (reason == "CLIENT_CLOSED" and unread)  # another fetch found it dead a moment ago
        broken = isinstance(error, (TransportError, PeerError, DeadlineError)) and not isinstance(error, StaleError)
        if outdated or broken:
            self.agent.peers.forget(peer)
        return outdated or (unread and doubtful and isinstance(error, TransportError))

    def _program(self, plan: Plan, edge: Edge, stats: EdgeStats) -> EdgeProgram:
        with stats.stage("plan"):
            return EdgeProgram(plan, edge, self.shape, chunk_bytes=self.agent.config.chunk_bytes)

    def _open_message(self, peer: Peer, plan: Plan, edge: Edge, address: str) -> Open:
        config = self.agent.config
        return Open(
            transfer=self.ticket.transfer, ticket=self.ticket.encode().encode(), epoch=self.agent.epoch,
            source_epoch=peer.description.epoch, target_worker=config.worker, target_rank=config.rank,
            layout_digest=self.agent.memory.layout.digest, plan_digest=plan.digest, first_token=self.shape.first_token,
            relay=edge.relay, transport=address, mode=Mode.PACKED if config.mode == "packed" else Mode.DIRECT,
            chunk_bytes=config.chunk_bytes,
        )  # fmt: skip

    def _ask_on(self, channel: PeerChannel, message: Open, window: int) -> _Asked | None:
        """Ask on the channel itself, where that is as good as control: a wake-up instead of a call. None: it is not.

        Args:
            window: how many chunks to ask for, or as many as there are.
        """
        if not self.agent.transports[message.transport.partition("://")[0]].same_user:
            return None
        config, request = self.agent.config, METHODS["Open"].request.encode(message)
        if len(request) > _ASK_BYTES_MAX:
            return None
        deadline_s = min(self.deadline_s, time.monotonic() + config.call_s)
        session = secrets.token_bytes(wire.SESSION_BYTES)
        ask(channel, wire.Ask(session, request, config.digests, [*range(window)]), self._cancel, deadline_s)
        return session, deadline_s

    def _open(
        self, peer: Peer, message: Open, program: EdgeProgram, channel: PeerChannel, asked: _Asked | None
    ) -> tuple[Opened, _Greeted | None]:
        """Open the edge on its channel, which says Hello, too, or by control."""
        greeted = None
        answer = None if asked is None else answered(channel, asked[0], self._cancel, asked[1])
        if answer is not None:
            intake = Intake(len(program.chunks), self._window)
            intake.credit()  # what Ask has asked for
            opened, greeted = _decoded(answer), (intake, answer)
        else:
            opened = self._ask(lambda timeout_s: peer.client.open(message, timeout_s=timeout_s), patient=message.relay)
        if (opened.chunks, opened.payload_bytes) != (len(program.chunks), program.payload_bytes):
            have, want = (opened.chunks, opened.payload_bytes), (len(program.chunks), program.payload_bytes)
            raise IncompatibleError(
                "*", "chunks, payload bytes", have, want, why="the two sides cut the transfer differently"
            )
        if opened.epoch != peer.description.epoch:
            raise StaleError(f"{peer.address} restarted while we asked", reason="EPOCH_CHANGED")
        return opened, greeted

    def _ask(self, call: Callable[[float], Opened], *, patient: bool) -> Opened:
        """Call until it is answered; a busy source, or a sibling that is not ready, is asked again in time."""
        while True:
            self._cancel.check()
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"{self.ticket.transfer}: {'a sibling' if patient else 'the source'} was not ready in time"
                )
            try:
                return call(min(self.agent.config.call_s, left_s))
            except ExhaustedError as error:
                if not patient and error.reason != "QUOTA":
                    raise
                self._cancel.wait(min(error.retry_after_s, left_s))

    def _reader(
        self, peer: Peer, opened: Opened, program: EdgeProgram, channel: PeerChannel, stats: EdgeStats,
        greeted: _Greeted | None,
    ) -> EdgeReader:  # fmt: skip
        config = self.agent.config
        renewed = [time.monotonic()]

        def renew() -> None:
            now_s = time.monotonic()
            if now_s - renewed[0] > opened.lease_s / 3:
                renewed[0] = now_s
                self._renew(peer, opened)

        return EdgeReader(
            transfer=self.ticket.transfer, generation=opened.generation, session=opened.session, mode=opened.mode,
            program=program, target=self.side, peer=channel, cancel=self._cancel, deadline_s=self.deadline_s,
            renew=renew, stats=stats, window=self._window, digests=config.digests, kernel=config.kernel,
            copy_threads=config.copy_threads, greeted=greeted,
        )  # fmt: skip

    def _read(self, reader: EdgeReader, peer: Peer, opened: Opened) -> None:
        """Read it all. Where it breaks off, or pages change under a direct copy, the source may just have let go."""
        try:
            reader.run()
        except (CorruptError, TransportError) as broken:
            if opened.mode is Mode.DIRECT or isinstance(broken, TransportError):
                try:
                    self._renew(peer, opened, _ABORT_S)
                except StaleError:
                    raise
                except PdxferError as error:
                    what, about = "transfer %s: %s can't say whether it holds on: %s", self.timeline.about()
                    _log.info(what, self.ticket.transfer, peer.address, error, extra=about)
            raise

    def _renew(self, peer: Peer, opened: Opened, most_s: float = math.inf) -> None:
        """Extend the lease; raises StaleError when there is none any more."""
        config = self.agent.config
        message = Renew(
            transfer=self.ticket.transfer, epoch=self.agent.epoch, session=opened.session,
            target_worker=config.worker, target_rank=config.rank,
        )  # fmt: skip
        left_s = self.deadline_s - time.monotonic()
        peer.client.renew(message, timeout_s=max(0.001, min(config.call_s, left_s, most_s)))

    def _complete(self, peer: Peer, opened: Opened, stats: EdgeStats) -> None:
        config = self.agent.config
        message = Complete(
            transfer=self.ticket.transfer, epoch=self.agent.epoch, source_epoch=opened.epoch, session=opened.session,
            target_worker=config.worker, target_rank=config.rank, generation=opened.generation,
            payload_bytes=stats.payload_bytes,
        )  # fmt: skip
        peer.client.complete(message, timeout_s=max(0.001, min(config.call_s, self.deadline_s - time.monotonic())))

    def _await_readers(self) -> None:
        """Our pages may not change (and we are not READY) before every sibling has read its share."""
        relay = self._relay
        while relay is not None and (ended := relay.ended) != "completed":  # read once: others write it
            self._cancel.check()
            if ended:
                raise PeerError(f"{self.ticket.transfer}: a sibling gave up: {ended}")
            if time.monotonic() > self.deadline_s:
                raise DeadlineError(f"{self.ticket.transfer}: a sibling did not read its share in time")
            self._cancel.wait(0.0005)
        while relay is not None and not self.agent.source.end_relay(self.ticket.transfer, "completed"):
            self._cancel.check()  # a session that a sibling has replaced is closed, but its thread still packs a chunk
            if time.monotonic() > self.deadline_s:
                raise DeadlineError(f"{self.ticket.transfer}: a thread of ours still packs for a sibling")
            self._cancel.wait(0.0005)

    # -- the end ---------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> None:
        self._cancel.set(error)
        first = self._cancel.error or error
        if not isinstance(first, PdxferError):
            self._cancel.error = InternalError(f"{self.ticket.transfer}: {type(first).__name__}: {first}")
            self._cancel.error.__cause__ = first
        self.ledger.fire(self.hold, Event.GIVE_UP)
        self.agent.fetched[f"fetch_failed_{reason_of(getattr(first, 'reason', 'INTERNAL')).name}"] += 1
        self.agent.journal.end(self.timeline, "failed", error=first, seconds=self._seconds)
        _log.warning("transfer %s failed: %s", self.ticket.transfer, first, extra=self.timeline.about())
        if self._relay is not None:
            self.agent.source.end_relay(self.ticket.transfer, f"aborted: {first}")
        self._decline(first)
        self._abort_sources(str(getattr(first, "reason", "INTERNAL")))
        until_s = time.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(timeout=max(0.0, until_s - time.monotonic()))
        while not self.settle() and time.monotonic() < until_s:
            time.sleep(0.001)
        if not self.settle():
            what = "transfer %s: a thread may still write; its pages stay quarantined"
            _log.error(what, self.ticket.transfer, extra=self.timeline.about())

    def settle(self) -> bool:
        """Free quarantined pages once no thread of ours can touch them; True when none is quarantined (any more)."""
        with self._lock:
            if self.hold.state is not State.QUARANTINED:
                return True
            quiet = self._relay is None or self.agent.source.end_relay(self.ticket.transfer, "aborted")
            if not quiet or any(thread.is_alive() for thread in self._threads):
                return False
            self.ledger.fire(self.hold, Event.QUIET)
        return True

    def _decline(self, error: Exception) -> None:
        """Tell those whom we have not opened: sources need not hold their pages, nor siblings wait for us.

        Where the ticket itself was refused, the transfer may be somebody else's: sources are left alone.
        """
        plan, me, ticket = self._plan, self.agent.config.rank, self.ticket
        with self._lock:
            over = {(edge.source, edge.relay) for edge in self._stats}
            opened = {peer.address for peer, _ in self._opened}
        relays = None if plan is None else {r for r in plan.sources(me, relay=True) if (r, True) not in over}
        self.agent.leave_siblings(ticket, error, relays)
        if isinstance(error, (TicketError, StaleError)):
            return
        ranks = range(len(ticket.ranks)) if plan is None else plan.sources(me)
        addresses = [ticket.ranks[r].address for r in ranks if (r, False) not in over]
        reason = str(getattr(error, "reason", "INTERNAL"))
        self.agent.keeper.decline(ticket, reason, [a for a in addresses if a not in opened])

    def _abort_sources(self, reason: str) -> None:
        """Tell every source that was opened and not completed, so that it need not wait for its lease."""
        config = self.agent.config
        until_s = time.monotonic() + _ABORT_S
        with self._lock:
            opened = list(self._opened)
        for peer, answer in opened:
            message = Abort(
                transfer=self.ticket.transfer, epoch=self.agent.epoch, session=answer.session,
                target_worker=config.worker, target_rank=config.rank, reason=reason[:128],
            )  # fmt: skip
            try:
                peer.client.abort(message, timeout_s=max(0.05, until_s - time.monotonic()))
            except PdxferError as error:
                what, about = "transfer %s: %s could not be told: %s", self.timeline.about()
                _log.info(what, self.ticket.transfer, peer.address, error.message, extra=about)

    def _timed(self, name: str) -> _Timed:
        return _Timed(self._seconds, name)

    def _mark(self, stage: str, detail: str = "") -> None:
        self.agent.journal.mark(self.timeline, stage, detail)


def _release(ledger: Ledger, hold: Hold, mark: Callable[[str], None]) -> None:
    """What ``Received.release`` does: no method, or what was fetched would keep its Fetch, and that what it fetched."""
    ledger.fire(hold, Event.RELEASE)
    mark("released")


def _name(edge: Edge) -> str:
    return f"{'sibling' if edge.relay else 'source'} rank {edge.source}"


def _clear_frames(error: BaseException | None) -> None:
    """Drop what the frames of an error hold: a view of a dead peer's memory would keep all of that memory alive."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _decoded(answer: wire.Opened) -> Opened:
    try:
        opened: Opened = METHODS["Open"].response.decode(answer.answer)
    except MisuseError as error:
        what = f"the source gave Open an answer that can't be used: {error.message}"
        raise PeerError(what, reason="PROTOCOL") from error
    return opened


class _Again(Exception):  # not an error: what we kept of a peer was out of date
    """Begin the edge again, on a new channel."""


class _Timed:
    """Adds the time spent inside to one entry."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name, self._start = seconds, name, 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exc: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._start
