"""Source: the half of an agent that others read from: its engine's offers and its share of fan-outs.

In come an engine's offers and peers' control calls; out come tickets, sessions for the data channels, and
pages that are free again. It runs no thread and opens no connection; ``service.py`` calls ``sweep``.

An offer ends exactly once: completed by its last reader, or given up (aborted, expired, withdrawn). A given-up
hold stays quarantined until no thread of ours reads its pages.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from pdxfer.agent.choice import Work, estimates
from pdxfer.agent.journal import Journal, Timeline
from pdxfer.agent.probe import link_rates, memory_rates
from pdxfer.agent.quotas import Owners, Usage
from pdxfer.agent.serve import SourceSession
from pdxfer.errors import AbortedError, ExhaustedError, IncompatibleError, MisuseError, StaleError, TicketError
from pdxfer.keys import TicketKeys
from pdxfer.messages import LIMITS, Abort, Complete, Completed, Mode, Open, Opened, Renew, Renewed
from pdxfer.packing import EdgeProgram
from pdxfer.pages import RequestShape, Side
from pdxfer.plan import Edge, Plan, make_plan
from pdxfer.ticket import RankIssuer, Ticket, unseal
from pdxfer.trace import current, traceparent
from pdxfer.transfer import SOURCE, Event, Hold, Offer, State

if TYPE_CHECKING:
    from pdxfer.agent.memory import Memory
    from pdxfer.layout import Layout
    from pdxfer.transport import Transport

__all__ = ["OnEnd", "Source", "check_id"]

_ENDED_MAX = 1024
_RELAY_WAIT_S = 0.02
_RETRY_S = 0.005
_REFUSAL_CHARS = 1000
_READ_WORTH = (
    1.25  # reading run by run may take so much longer than packing, which costs two cores and twice the traffic
)
_log = logging.getLogger("pdxfer.agent")

OnEnd = Callable[[str, str], None]
_Key = TypeVar("_Key", str, bytes)


@dataclass(slots=True, kw_only=True, eq=False)
class _Record:
    """One transfer that others read from us; a relay has a plan and ``ready``, an engine's offer has a hold.

    ``reader``: the worker that has opened it; its ticket is no other's from then on.

    Once it has ended and is quiet, only what answers repeated calls is kept: no side, no sessions, their names alone.
    """

    offer: Offer
    side: Side | None
    shape: RequestShape
    timeline: Timeline
    nonce: bytes = b""
    tenant: str = ""
    reader: str = ""
    fence: Callable[[], None] | None = None
    born_s: float = field(default_factory=time.monotonic)
    hold: Hold | None = None
    on_end: OnEnd | None = None
    plan: Plan | None = None
    ticket_text: bytes = b""
    ready: threading.Event | None = None
    sessions: dict[bytes, SourceSession] = field(default_factory=dict)
    session_names: list[bytes] = field(default_factory=list)
    replaced: list[bytes] = field(default_factory=list)
    read: set[bytes] = field(default_factory=set)
    fencing: threading.Lock = field(default_factory=threading.Lock)

    def quiet(self) -> bool:
        """Whether no thread reads its pages, nor will."""
        return all(session.quiet() for session in list(self.sessions.values()))

    def forget_request(self) -> None:
        """Drop what grows with the request's length."""
        self.side, self.sessions = None, {}


class Source:
    """All that peers may read from one rank. Thread-safe."""

    def __init__(self, memory: Memory, epoch: bytes, keys: TicketKeys, journal: Journal) -> None:
        self.memory, self.config, self.epoch, self.journal = memory, memory.config, epoch, journal
        self.counters: Counter[str] = Counter()
        self.keys = keys
        self.usage = Usage(memory.config.quotas)
        self._records: OrderedDict[tuple[bool, str], _Record] = OrderedDict()
        self._by_session: dict[bytes, _Record] = {}
        self._quarantined: list[_Record] = []
        self._refused: dict[str, str] = {}
        self._left: dict[bytes, str] = {}
        self._lock = threading.RLock()

    # -- for the engine ------------------------------------------------------------------------------

    def seal(
        self,
        transfer: str,
        tables: Mapping[str, Sequence[int]],
        shape: RequestShape,
        *,
        nonce: bytes,
        tenant: str = "",
        trace: str = "",
        fence: Callable[[], None] | None = None,
        on_end: OnEnd | None = None,
    ) -> str:
        """Seal and lease a request's pages, for the ticket with that nonce; see ``Agent.seal``."""
        check_id(transfer)
        memory = self.memory
        side = memory.side(tables)
        side.check(memory.layout.spec, shape)
        with self._lock:
            if (False, transfer) in self._records:
                raise MisuseError(f"transfer {transfer!r} was offered before", hint="use a fresh id for every hand-off")
            hold = memory.ledger.open(transfer, memory.units(side), SOURCE)
            memory.ledger.fire(hold, Event.SEAL)
            memory.ledger.fire(hold, Event.ISSUE)
            offer = self._new_offer(transfer, hold.generation)
            record = _Record(
                offer=offer,
                side=side,
                shape=shape,
                timeline=self.journal.begin("source", transfer, trace=traceparent(trace)),
                nonce=nonce,
                tenant=tenant,
                fence=fence,
                hold=hold,
                on_end=on_end,
            )
            self._remember((False, transfer), record)
            self.counters["offered"] += 1
        return record.timeline.trace

    def issuer(self, address: str) -> RankIssuer:
        """What writes tickets in our name; peers reach us at ``address``."""
        layout = self.memory.layout
        return RankIssuer(
            worker=self.config.worker,
            layout_digest=layout.digest,
            rank=self.config.rank,
            address=address,
            epoch=self.epoch,
            keys=self.keys,
            sizes=layout.request_sizes,
            lifetime_s=math.ceil(self.config.hold_max_s),
        )

    def withdraw(self, transfer: str, why: str = "withdrawn") -> None:
        """End an offer; unknown and ended ones are ignored."""
        record = self._records.get((False, transfer))
        if record is not None and self._first_end(record, why):
            self._give_up(record)

    def live(self) -> int:
        """How many of the engine's offers have not ended."""
        with self._lock:
            return sum(1 for record in self._records.values() if record.hold is not None and not record.offer.ended)

    def withdraw_all(self, why: str) -> None:
        """End every offer and every share of a fan-out."""
        with self._lock:
            records = list(self._records.values())
        for record in records:
            if self._first_end(record, why):
                self._give_up(record)

    def _first_end(self, record: _Record, why: str) -> bool:
        """End an offer under the lock: every session that was admitted before is then known to ``_give_up``."""
        with self._lock:
            return record.offer.end(why)

    # -- for peers, by control call ------------------------------------------------------------------

    def open(self, message: Open, layout: Layout, deadline_s: float) -> Opened:
        """Admit one reader of one transfer and promise what it will get."""
        record = self._admit(message)
        if record.offer.ended or record.ready is None or record.ready.is_set():  # before that, nothing is leased
            record.offer.check_live(time.monotonic())  # first, since it knows why a transfer ended
        plan = record.plan or make_plan(self.memory.layout, layout)
        if plan.digest != message.plan_digest:
            why = "the two sides plan differently"
            raise IncompatibleError("*", "plan_digest", plan.digest, message.plan_digest, why=why)
        if record.ready is not None and not record.ready.wait(min(_RELAY_WAIT_S, deadline_s)):
            raise ExhaustedError(f"{message.transfer}: this rank's own share is not in yet", retry_after_s=_RETRY_S)
        if record.ready is not None and message.first_token != record.shape.first_token:
            # Stripes of other rows: it would read some that a sibling, not the source, has yet to bring here.
            mine, why = record.shape.first_token, "ranks of one worker must fetch the same rows"
            raise IncompatibleError("*", "first_token", mine, message.first_token, why=why)
        shape = RequestShape(
            kv_tokens=record.shape.kv_tokens,
            first_token=message.first_token,
            state_tokens=record.shape.state_tokens,
        )
        self._fence(record)
        readers = plan.readers(self.config.rank, relay=message.relay)
        if message.target_rank not in readers:
            raise TicketError(f"{message.transfer}: target rank {message.target_rank} does not read from this rank")
        edge = Edge(self.config.rank, message.target_rank, message.relay)
        program = EdgeProgram(plan, edge, shape, chunk_bytes=message.chunk_bytes)
        served = self._session(message, record, program)
        with self._lock:
            _check_reader(record, message.target_worker)
            share = (record, message.target_rank, program.payload_bytes)
            owners = [("peer", message.target_worker)] + ([("tenant", record.tenant)] if record.tenant else [])
            if not message.relay:
                self._check_quota(*share, owners)
            replaced = record.offer.open(time.monotonic(), message.target_rank, readers, served.session)
            record.reader = message.target_worker
            if not message.relay:
                self.usage.take(*share, owners)
            record.sessions[served.session] = served
            record.session_names.append(served.session)
            self._by_session[served.session] = record
            earlier = record.sessions.get(replaced)
        if earlier is not None:  # nobody may read for it any more: its reader has come anew
            earlier.close()
            self._forget_replaced(record, replaced)
        scheme = message.transport.partition("://")[0]
        record.timeline.peer, record.timeline.layout = message.target_worker, message.layout_digest
        record.timeline.trace = record.timeline.trace or current.get()
        record.timeline.transports.add(scheme)
        self.journal.mark(
            record.timeline, "opened", f"by rank {message.target_rank} over {scheme}, {served.mode.value}"
        )
        return Opened(
            epoch=self.epoch,
            generation=record.offer.generation,
            session=served.session,
            lease_s=record.offer.lease_s,
            chunks=len(program.chunks),
            payload_bytes=program.payload_bytes,
            mode=served.mode,
        )

    def _forget_replaced(self, record: _Record, name: bytes) -> None:
        """Forget a session, and those before it, once no thread packs for them: readers may come anew without end."""
        with self._lock:
            record.replaced.append(name)
            for each in [n for n in record.replaced if n not in record.sessions or record.sessions[n].quiet()]:
                record.replaced.remove(each)
                record.sessions.pop(each, None)
                if each in record.session_names:
                    record.session_names.remove(each)
                    del self._by_session[each]

    def _check_quota(self, record: _Record, reader: int, nbytes: int, owners: Owners) -> None:
        try:
            self.usage.check(record, reader, nbytes, owners)
        except ExhaustedError:
            self.counters["quota_transfers"] += 1
            raise

    def _fence(self, record: _Record) -> None:
        """Wait, once, until the device has written the pages: in this peer's call, not in the engine's loop.

        Whoever comes meanwhile waits, too. A device that failed ends the offer before anyone else is let through.
        """
        with record.fencing:
            fence, record.fence = record.fence, None
            if fence is None:
                return
            try:
                fence()
            except Exception as error:  # the engine's own code; the peer learns that this transfer is over
                if self._first_end(record, f"aborted: the fence failed: {error}"):
                    self._give_up(record)
                raise AbortedError(f"{record.offer.transfer}: the source could not finish it: {error}") from error

    def _admit(self, message: Open) -> _Record:
        """The record that a ticket opens; refuses edited, foreign and outlived tickets."""
        return self._admit_sibling(message) if message.relay else self._admit_target(message)

    def _admit_target(self, message: Open | Abort | Renew) -> _Record:
        ticket = Ticket.decode(message.ticket)
        part = unseal(ticket, self.config.rank, self.epoch, self.keys.active())
        record = self._records.get((False, ticket.transfer))
        if record is None or ticket.transfer != message.transfer:
            what = f"transfer {ticket.transfer!r} is not (or no longer) offered here"
            raise StaleError(what, reason="UNKNOWN_TRANSFER")
        if not hmac.compare_digest(part.nonce, record.nonce):
            what = f"{ticket.transfer}: the ticket is of an earlier offer of this id"
            raise StaleError(what, reason="STALE_TICKET")
        if time.monotonic() >= record.born_s + ticket.lifetime_s:
            what = f"{ticket.transfer}: the ticket was good for {ticket.lifetime_s} s"
            raise StaleError(what, reason="TICKET_EXPIRED")
        if ticket.audience not in ("", message.target_worker):
            raise TicketError(f"{ticket.transfer}: the ticket is for another worker", reason="WRONG_AUDIENCE")
        _check_reader(record, message.target_worker)
        return record

    def _admit_sibling(self, message: Open) -> _Record:
        record = self._records.get((True, message.transfer))
        if record is None and message.transfer in self._refused:
            raise AbortedError(f"{message.transfer}: this rank has given up: {self._refused[message.transfer]}")
        if record is None:
            raise ExhaustedError(f"{message.transfer}: this rank does not fetch it yet", retry_after_s=_RETRY_S)
        same_worker = message.target_worker == self.config.worker
        if not same_worker or not hmac.compare_digest(record.ticket_text, message.ticket):
            raise TicketError(f"{message.transfer}: only a sibling with the same ticket may ask for its fan-out")
        return record

    def _session(self, message: Open, record: _Record, program: EdgeProgram) -> SourceSession:
        side = record.side
        if side is None:
            why = record.offer.ended
            raise StaleError(f"{message.transfer}: the source has ended this transfer ({why})", reason="TRANSFER_ENDED")
        mode = self._mode(message, program)
        arena = self.memory.arena(message.transport.partition("://")[0])
        largest = max((c.nbytes for c in program.chunks), default=0)
        if mode is Mode.PACKED and largest > arena.capacity_bytes:
            raise ExhaustedError(
                f"a chunk of {largest} B does not fit into the source's arena of {arena.capacity_bytes} B",
                hint="lower chunk_bytes at the target, or raise arena_bytes at the source",
            )
        return SourceSession(
            transfer=message.transfer,
            generation=record.offer.generation,
            session=secrets.token_bytes(16),
            mode=mode,
            program=program,
            source=side,
            regions=self.memory.regions,
            check_live=lambda: record.offer.check_live(time.monotonic()),
            complete=partial(self._complete_by_channel, record, message.target_rank),
            staging=arena,
            wipe=bool(record.tenant),
            stall_s=self.config.stall_s,
            kernel=self.config.kernel,
            about=record.timeline.about,
            copy_threads=self.config.copy_threads,
        )

    def _mode(self, message: Open, program: EdgeProgram) -> Mode:
        transport = self.memory.transports.get(message.transport.partition("://")[0])
        if transport is None:
            raise MisuseError(f"transport {message.transport!r} is not served here")
        shown = [r for r in self.memory.regions.values() if r.descriptor.scheme == transport.scheme]
        exported = transport.can_export and len(shown) == len(program.source_rank.regions)
        able = exported and self.config.mode != "packed" and not any(item.converts for item in program.items)
        if able and self.config.mode == "auto" and any(r.descriptor.address for r in shown):
            found = self._estimates(Work.of(program), transport)
            able = found["direct"] <= _READ_WORTH * found["packed"]
            _log.debug("transfer %s: %s", message.transfer, found, extra={"peer": message.target_worker})
        return Mode.DIRECT if able and message.mode is Mode.DIRECT else Mode.PACKED

    def _estimates(self, work: Work, transport: Transport) -> dict[str, float]:
        """Seconds by mode, of memory of ours that peers can't map."""
        return estimates(work, memory_rates(), link_rates(transport), direct=True, mapped=False)

    def complete(self, message: Complete) -> Completed:
        """Count one reader as done; the last one frees the pages."""
        record = self._record(message.session, message.transfer)
        served = record.sessions.get(message.session)
        return self._complete(record, message.target_rank, served or message.session, message.generation)

    def _complete_by_channel(self, record: _Record, reader: int, session: SourceSession, generation: int) -> Completed:
        with self.journal.judging():
            return self._complete(record, reader, session, generation)

    def _complete(self, record: _Record, reader: int, session: SourceSession | bytes, generation: int) -> Completed:
        name = session if isinstance(session, bytes) else session.session
        if not isinstance(session, bytes) and session.unsure:
            what = f"{record.offer.transfer}: the channel broke before its last chunks were released"
            raise StaleError(what, reason="STALE_GENERATION", hint="nobody can tell what was read: switch digests on")
        with self._lock:
            last = record.offer.complete(time.monotonic(), reader, name, generation)
            if not isinstance(session, bytes) and name not in record.read:
                record.read.add(name)
                self.journal.served(record.timeline, session.program, reader)
        if not isinstance(session, bytes):
            session.finish()
        if last:
            self._count(record)
            self._free_completed(record)
        return Completed(state=record.offer.ended or State.LEASED.value)

    def _free_completed(self, record: _Record) -> None:
        """Free the pages, unless a thread still packs them for a session that was replaced."""
        with self._lock:
            quiet = record.quiet()
            if not quiet and record.hold is not None:
                self.memory.ledger.fire(record.hold, Event.GIVE_UP)
                self._quarantined.append(record)
        if quiet:
            self._free(record, Event.LAST_DONE)

    def abort(self, message: Abort) -> Completed:
        """End a transfer on a reader's word, or on that of whoever holds its ticket."""
        if message.relay:
            return self._abort_share(message)
        record = self._admit_target(message) if message.ticket else self._by_session.get(message.session)
        if record is None:
            return Completed(state="unknown")
        with self._lock:
            if message.ticket:
                first = record.offer.end(f"declined by {message.target_worker}: {message.reason}")
            else:
                record = self._record(message.session, message.transfer)
                first = record.offer.abort(message.target_rank, message.session, message.reason)
        if first:
            self._give_up(record)
        return Completed(state=record.offer.ended)

    def _abort_share(self, message: Abort) -> Completed:
        """A sibling will not read our share: we need not wait for it, even if our own fetch has yet to begin."""
        if message.target_worker != self.config.worker:
            raise TicketError(f"{message.transfer}: only a sibling may decline its share of the fan-out")
        why = f"aborted by target rank {message.target_rank}: {message.reason}"
        with self._lock:
            record = self._records.get((True, message.transfer))
            if record is None or not hmac.compare_digest(record.ticket_text, message.ticket):
                _keep_newest(self._left, hashlib.sha256(message.ticket).digest(), why)
                return Completed(state="unknown")
            first = record.offer.end(why)
        if first:
            self._give_up(record)
        return Completed(state=record.offer.ended)

    def renew(self, message: Renew) -> Renewed:
        """Extend a lease; with only a ticket to show, no longer than ``hold_max_s`` after the offer."""
        if message.ticket:
            record = self._admit_target(message)
            with self._lock:
                return Renewed(lease_s=record.offer.hold(time.monotonic(), record.born_s + self.config.hold_max_s))
        with self._lock:
            record = self._record(message.session, message.transfer)
            return Renewed(lease_s=record.offer.renew(time.monotonic(), message.target_rank, message.session))

    def lookup(self, session: bytes) -> SourceSession:
        """The session that a data channel's Hello names; raises TicketError."""
        record = self._by_session.get(session)
        served = None if record is None else record.sessions.get(session)
        if served is None:
            raise TicketError("no such session here (any more)", reason="UNKNOWN_SESSION")
        return served

    def _record(self, session: bytes, transfer: str) -> _Record:
        record = self._by_session.get(session)
        if record is None or record.offer.transfer != transfer:
            raise StaleError(f"transfer {transfer!r} has no such session here", reason="UNKNOWN_SESSION")
        return record

    # -- fan-out, for Fetch --------------------------------------------------------------------------

    def offer_relay(self, ticket: Ticket, side: Side, shape: RequestShape, generation: int, plan: Plan) -> Offer:
        """Let siblings ask for what this rank is about to receive for them too; ``relay_ready`` lets them in.

        Raises:
            AbortedError: one of them has given up already.
        """
        key, text = (True, ticket.transfer), ticket.encode().encode()
        with self._lock:
            old = self._records.get(key)
            if old is not None and not old.offer.ended:
                raise MisuseError(f"transfer {ticket.transfer!r} is being fetched already")
            if left := self._left.pop(hashlib.sha256(text).digest(), ""):
                raise AbortedError(f"{ticket.transfer}: a sibling has given up: {left}")
            record = _Record(
                offer=self._new_offer(ticket.transfer, generation),
                side=side,
                shape=shape,
                timeline=self.journal.begin("relay", ticket.transfer, peer=self.config.worker, trace=ticket.trace),
                plan=plan,
                ticket_text=text,
                ready=threading.Event(),
            )
            self._remember(key, record)
        return record.offer

    def relay_ready(self, transfer: str) -> None:
        """This rank's share is in and verified: siblings may read it."""
        record = self._records[(True, transfer)]
        assert record.ready is not None
        record.offer.expires_s = time.monotonic() + record.offer.lease_s  # until now there was nothing to lease
        record.ready.set()

    def refuse_relay(self, transfer: str, why: str) -> None:
        """Our fetch failed before it could offer anything: siblings need not wait for us until their deadline."""
        with self._lock:
            _keep_newest(self._refused, transfer, why[:_REFUSAL_CHARS])

    def end_relay(self, transfer: str, why: str) -> bool:
        """End our part of a fan-out; True when no thread of ours reads for it (else call again)."""
        record = self._records.get((True, transfer))
        if record is None:
            return True
        if self._first_end(record, why):
            self._give_up(record)
        quiet = record.quiet()
        if quiet:
            record.forget_request()
        return quiet

    # -- inside --------------------------------------------------------------------------------------

    def _new_offer(self, transfer: str, generation: int) -> Offer:
        lease_s = self.config.lease_s
        return Offer(transfer, generation, lease_s, time.monotonic() + lease_s)

    def _remember(self, key: tuple[bool, str], record: _Record) -> None:
        """Keep it, so that repeated calls get the same answer; beyond a bound the oldest ended ones are forgotten."""
        self._records[key] = record
        self._records.move_to_end(key)
        for old in list(self._records) if len(self._records) > _ENDED_MAX else ():
            candidate = self._records[old]
            if candidate.offer.ended and candidate not in self._quarantined and candidate.quiet():
                del self._records[old]
                for session in candidate.session_names:
                    self._by_session.pop(session, None)
                return

    def _count(self, record: _Record) -> None:
        """It has ended: from here on it is remembered longer than all that ended before."""
        kind, key = "relays" if record.hold is None else "offers", (record.hold is None, record.offer.transfer)
        with self._lock:
            if self._records.get(key) is record:
                self._records.move_to_end(key)
            self.usage.give_back(record)
        outcome = record.offer.ended.split()[0].rstrip(":")
        self.counters[f"{kind}_{outcome}"] += 1
        self.journal.end(record.timeline, outcome, why=record.offer.ended)

    def _give_up(self, record: _Record) -> None:
        """An offer ended otherwise than by its last reader: close its channels, quarantine its pages."""
        self._count(record)
        what, about = "transfer %s ended at the source: %s", record.timeline.about()
        _log.warning(what, record.offer.transfer, record.offer.ended, extra=about)
        for session in list(record.sessions.values()):
            session.close()
        if record.hold is not None:
            with self._lock:
                self.memory.ledger.fire(record.hold, Event.GIVE_UP)
                self._quarantined.append(record)
            self._release_quiet()

    def _release_quiet(self) -> None:
        with self._lock:
            quiet = [r for r in self._quarantined if r.quiet()]
            self._quarantined = [r for r in self._quarantined if r not in quiet]
        for record in quiet:
            self._free(record, Event.QUIET)

    def _free(self, record: _Record, event: Event) -> None:
        record.forget_request()
        if record.hold is not None:
            self.memory.ledger.fire(record.hold, event)
        if record.on_end is None:
            return
        try:
            record.on_end(record.offer.transfer, record.offer.ended)
        except Exception:  # noqa: BLE001 - the engine's own code: it must not stop the sweeper, nor fail a peer's call
            what = "transfer %s: the engine's on_end failed"
            _log.exception(what, record.offer.transfer, extra=record.timeline.about())

    def sweep(self) -> None:
        """Expire leases and free what was quarantined; call it often."""
        now_s = time.monotonic()
        with self._lock:
            expired = [r for r in self._records.values() if r.hold is not None and r.offer.expired(now_s)]
            expired = [r for r in expired if r.offer.end("expired: the lease is over")]
        for record in expired:
            self._give_up(record)
        self._release_quiet()


def check_id(transfer: object) -> None:
    """Raise MisuseError for what can't be the id of an offer."""
    if not isinstance(transfer, str) or not 0 < len(transfer) <= LIMITS["name_chars"]:
        raise MisuseError(f"a transfer's id is a text of 1 to {LIMITS['name_chars']} characters, got {transfer!r}")


def _check_reader(record: _Record, worker: str) -> None:
    if record.reader not in ("", worker):
        raise TicketError(f"{record.offer.transfer}: another worker has used this ticket", reason="TICKET_USED")


def _keep_newest(known: dict[_Key, str], key: _Key, why: str) -> None:
    """Add an entry to what is remembered, and forget the oldest beyond a bound."""
    known[key] = why
    while len(known) > _ENDED_MAX:
        del known[next(iter(known))]
