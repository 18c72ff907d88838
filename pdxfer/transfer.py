"""The life of a transfer, and of the pages and slots it touches, as state tables without I/O.

In come events, with the time; out come new states, or an error and no change. This file opens nothing,
waits for nothing and knows no clock: ``driver.py`` and the agent do what it allows.

A *hold* is the set of pages and slots that one transfer may touch. Its states, at the two ends::

    source                                          target
    FREE ─allocate─▶ FILLING ─seal─▶ SEALED         FREE ─reserve─▶ RESERVED ─post─▶ RECEIVING
    SEALED ─issue─▶ LEASED ─last_done─▶ FREE        RECEIVING ─all_in─▶ VERIFYING ─verified─▶ READY
    FILLING, SEALED, LEASED ─give_up─▶ QUARANTINED  READY ─take─▶ HANDED ─release─▶ FREE
    QUARANTINED ─quiet─▶ FREE                       RESERVED ─cancel─▶ FREE
                                                    RESERVED .. READY ─give_up─▶ QUARANTINED ─quiet─▶ FREE

Only READY is visible to decode. A page is in one target hold, or in any number of source holds (requests
share prefixes), or free: the counts always add up to the total (``Ledger.check_integrity``).
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pdxfer.errors import AbortedError, InternalError, MisuseError, PeerError, StaleError, TicketError

__all__ = ["SOURCE", "TARGET", "Cancel", "Event", "Hold", "Intake", "Ledger", "Offer", "State"]


class State(str, Enum):
    """State of a hold."""

    FREE = "free"
    FILLING = "filling"
    SEALED = "sealed"
    LEASED = "leased"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    VERIFYING = "verifying"
    READY = "ready"
    HANDED = "handed"
    QUARANTINED = "quarantined"


class Event(str, Enum):
    """What can happen to a hold."""

    ALLOCATE = "allocate"
    SEAL = "seal"
    ISSUE = "issue"
    LAST_DONE = "last_done"
    RESERVE = "reserve"
    POST = "post"
    ALL_IN = "all_in"
    VERIFIED = "verified"
    TAKE = "take"
    RELEASE = "release"
    CANCEL = "cancel"
    GIVE_UP = "give_up"
    QUIET = "quiet"


_S, _E = State, Event
_WHY_CHARS = 200  # a peer may have written some of it

SOURCE: Mapping[tuple[State, Event], State] = {
    (_S.FREE, _E.ALLOCATE): _S.FILLING,
    (_S.FILLING, _E.SEAL): _S.SEALED,
    (_S.SEALED, _E.ISSUE): _S.LEASED,
    (_S.LEASED, _E.LAST_DONE): _S.FREE,
    (_S.FILLING, _E.GIVE_UP): _S.QUARANTINED,
    (_S.SEALED, _E.GIVE_UP): _S.QUARANTINED,
    (_S.LEASED, _E.GIVE_UP): _S.QUARANTINED,
    (_S.QUARANTINED, _E.QUIET): _S.FREE,
}

TARGET: Mapping[tuple[State, Event], State] = {
    (_S.FREE, _E.RESERVE): _S.RESERVED,
    (_S.RESERVED, _E.POST): _S.RECEIVING,
    (_S.RECEIVING, _E.ALL_IN): _S.VERIFYING,
    (_S.VERIFYING, _E.VERIFIED): _S.READY,
    (_S.READY, _E.TAKE): _S.HANDED,
    (_S.HANDED, _E.RELEASE): _S.FREE,
    (_S.RESERVED, _E.CANCEL): _S.FREE,
    (_S.RESERVED, _E.GIVE_UP): _S.QUARANTINED,
    (_S.RECEIVING, _E.GIVE_UP): _S.QUARANTINED,
    (_S.VERIFYING, _E.GIVE_UP): _S.QUARANTINED,
    (_S.READY, _E.GIVE_UP): _S.QUARANTINED,
    (_S.QUARANTINED, _E.QUIET): _S.FREE,
}

Units = frozenset[tuple[str, int]]


@dataclass(slots=True, eq=False)
class Hold:
    """Pages and slots of one transfer. Changed by its Ledger only.

    Attributes:
        transfer: id of the transfer.
        units: (pool, page) pairs; none once they are free, since a hold is remembered longer than that.
        generation: unique among all holds of this ledger; names this one use of the units.
    """

    transfer: str
    units: Units
    generation: int
    table: Mapping[tuple[State, Event], State]
    state: State = State.FREE

    @property
    def exclusive(self) -> bool:
        """Whether no other hold may contain its units."""
        return self.table is TARGET


class Ledger:
    """All holds of one rank, and where every page and slot is. Thread-safe.

    Args:
        totals: pages (slots) by pool.
    """

    def __init__(self, totals: Mapping[str, int]) -> None:
        self._totals = Counter(totals)  # 0 for a pool that there is not
        self._holds: set[Hold] = set()
        self._users: dict[tuple[str, int], tuple[Hold, ...]] = {}  # mostly alone, and one tuple for all its units
        self._generations = itertools.count(1)
        self._lock = threading.Lock()
        self.transitions: Counter[tuple[str, str]] = Counter()

    def open(self, transfer: str, units: Iterable[tuple[str, int]], table: Mapping[tuple[State, Event], State]) -> Hold:
        """Begin a use of ``units``; the first event of ``table`` has happened when this returns.

        Raises:
            MisuseError: a unit does not exist, or another transfer may still touch it; nothing changed.
        """
        wanted = frozenset(units)
        first = Event.RESERVE if table is TARGET else Event.ALLOCATE
        with self._lock:
            hold = Hold(transfer, wanted, next(self._generations), table)
            users, totals, alone = self._users, self._totals, (hold,)
            shared = set[tuple[str, int]]() if users.keys().isdisjoint(wanted) else wanted & users.keys()
            beyond = [page for pool, page in wanted if not 0 <= page < totals[pool]]
            if beyond or any(user.exclusive or hold.exclusive for unit in shared for user in users[unit]):
                for pool, page in sorted(wanted):
                    self._check_free(hold, pool, page)
            both = {unit: users[unit] + alone for unit in shared}
            users.update(dict.fromkeys(wanted, alone))  # a long prompt has thousands, and waits for them
            users.update(both)
            self._holds.add(hold)
            self._step(hold, first)
        return hold

    def _check_free(self, hold: Hold, pool: str, page: int) -> None:
        if not 0 <= page < self._totals[pool]:
            raise MisuseError(f"{hold.transfer}: pool {pool!r} of {self._totals[pool]} has no page {page}")
        for user in self._users.get((pool, page), ()):
            if user.exclusive or hold.exclusive:
                raise MisuseError(
                    f"{hold.transfer}: page {page} of {pool!r} is {user.state.value} in transfer {user.transfer!r}",
                    hint="wait until the agent has released it",
                )

    def fire(self, hold: Hold, event: Event) -> State:
        """Apply one event; an event that the table does not have raises InternalError and changes nothing."""
        with self._lock:
            return self._step(hold, event)

    def _step(self, hold: Hold, event: Event) -> State:
        after = hold.table.get((hold.state, event))
        if after is None or hold not in self._holds:
            raise InternalError(f"{hold.transfer}: {event.value} can't happen to a hold that is {hold.state.value}")
        self.transitions[(hold.state.value, after.value)] += 1
        hold.state = after
        if after is State.FREE:
            self._holds.discard(hold)
            for unit in hold.units:
                users = self._users.pop(unit)
                if len(users) > 1:
                    self._users[unit] = tuple(user for user in users if user is not hold)
            hold.units = frozenset()
        return after

    def counts(self) -> dict[str, int]:
        """Units by state, over all pools; a unit shared by several source holds counts once, by the first."""
        with self._lock:
            found = Counter(users[0].state.value for users in self._users.values())
            found[State.FREE.value] = sum(self._totals.values()) - len(self._users)
            return dict(found)

    def check_integrity(self) -> None:
        """Prove that holds and units agree and that nothing was lost; raises InternalError."""
        with self._lock:
            listed = Counter((unit, id(hold)) for unit, users in self._users.items() for hold in users)
            held = Counter((unit, id(hold)) for hold in self._holds for unit in hold.units)
            if listed != held:
                raise InternalError("the ledger's pages and holds disagree")
            for unit, users in self._users.items():
                if len(users) > 1 and any(hold.exclusive for hold in users):
                    raise InternalError(f"page {unit} is shared with a transfer that writes it")


@dataclass(slots=True)
class _Reader:
    session: bytes
    done: bool = False


@dataclass(slots=True)
class Offer:
    """The source's (or relaying sibling's) half of one transfer: who may read, until when, who is done.

    Every method checks and then changes, or raises and changes nothing. ``now_s`` is a monotonic clock.
    """

    transfer: str
    generation: int
    lease_s: float
    expires_s: float
    readers: frozenset[int] | None = None
    ended: str = ""
    _sessions: dict[int, _Reader] = field(default_factory=dict)

    def open(self, now_s: float, reader: int, readers: Iterable[int], session: bytes) -> bytes:
        """Admit one reader under a fresh session; returns its own earlier one, which this replaces, or nothing.

        Raises:
            StaleError: the lease is over or the transfer has ended. TicketError: not a reader, or already served.
        """
        self.check_live(now_s)
        expected = frozenset(readers)
        if reader not in expected or (self.readers is not None and self.readers != expected):
            raise TicketError(
                f"{self.transfer}: target rank {reader} is not a reader of this rank ({sorted(expected)})"
            )
        earlier = self._sessions.get(reader)
        if earlier is not None and earlier.done:
            raise TicketError(
                f"{self.transfer}: target rank {reader} has already used its ticket", reason="TICKET_USED"
            )
        self.readers = expected
        self._sessions[reader] = _Reader(session)
        self.expires_s = now_s + self.lease_s
        return b"" if earlier is None else earlier.session

    def check_live(self, now_s: float) -> None:
        """Raise StaleError when nothing may be read any more."""
        if self.ended:
            raise StaleError(
                f"{self.transfer}: the source has ended this transfer ({self.ended})", reason="TRANSFER_ENDED"
            )
        if now_s >= self.expires_s:
            raise StaleError(f"{self.transfer}: the lease of {self.lease_s:g} s is over", reason="LEASE_EXPIRED")

    def _reader(self, reader: int, session: bytes) -> _Reader:
        found = self._sessions.get(reader)
        if found is None or found.session != session:
            raise TicketError(f"{self.transfer}: target rank {reader} has no such session", reason="UNKNOWN_SESSION")
        return found

    def renew(self, now_s: float, reader: int, session: bytes) -> float:
        """Extend the lease; returns its seconds."""
        self._reader(reader, session)
        self.check_live(now_s)
        self.expires_s = now_s + self.lease_s
        return self.lease_s

    def hold(self, now_s: float, until_s: float) -> float:
        """Extend the lease before anything was opened, at most until ``until_s``; returns the seconds left."""
        self.check_live(now_s)
        self.expires_s = max(self.expires_s, min(now_s + self.lease_s, until_s))
        return self.expires_s - now_s

    def complete(self, now_s: float, reader: int, session: bytes, generation: int) -> bool:
        """Count one reader as done; True when it was the last. Repeating it is fine and False."""
        found = self._reader(reader, session)
        if found.done:
            return False
        self.check_live(now_s)
        if generation != self.generation:
            raise StaleError(
                f"{self.transfer}: generation {generation} was read, it is {self.generation}", reason="STALE_GENERATION"
            )
        found.done = True
        if self.readers is None or not all(r in self._sessions and self._sessions[r].done for r in self.readers):
            return False
        self.ended = "completed"
        return True

    def abort(self, reader: int, session: bytes, reason: str) -> bool:
        """End the transfer on a reader's word; False when it had already ended."""
        self._reader(reader, session)
        return self.end(f"aborted by target rank {reader}: {reason}")

    def end(self, why: str) -> bool:
        """End the transfer; False when it had already ended."""
        first = not self.ended
        self.ended = self.ended or why[:_WHY_CHARS]
        return first

    def expired(self, now_s: float) -> bool:
        """Whether the lease ran out while the transfer was live."""
        return not self.ended and now_s >= self.expires_s


class Intake:
    """The target's half of one edge: which chunks are wanted, underway and in. No chunk twice, none unasked.

    Args:
        chunks: how many there are. window: how many may be underway.
    """

    def __init__(self, chunks: int, window: int) -> None:
        if window < 1:
            raise MisuseError(f"the window must be at least 1, got {window}")
        self._chunks, self._window, self._next = chunks, window, 0
        self._underway: set[int] = set()
        self.received = 0

    def credit(self) -> list[int]:
        """Chunks to ask for now; they count as underway from here on."""
        room = min(self._window - len(self._underway), self._chunks - self._next)
        wanted = list(range(self._next, self._next + room))
        self._underway.update(wanted)
        self._next += room
        return wanted

    @property
    def underway(self) -> list[int]:
        """Chunks that were asked for and have not come, oldest first."""
        return sorted(self._underway)

    def expect(self, chunk: int) -> None:
        """Raise PeerError for a chunk that was not asked for or came before; call it before looking at the bytes."""
        if chunk not in self._underway:
            raise PeerError(f"chunk {chunk} came unasked", reason="PROTOCOL")

    def accept(self, chunk: int) -> None:
        """Count an arrived, verified chunk; raises as ``expect`` does."""
        self.expect(chunk)
        self._underway.remove(chunk)
        self.received += 1

    @property
    def complete(self) -> bool:
        """Whether all chunks are in."""
        return self.received == self._chunks


class Cancel:
    """One flag for all threads of a transfer, with the first reason kept."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self.error: Exception | None = None

    def set(self, error: Exception) -> bool:
        """Set with ``error``; False when it was set before."""
        with self._lock:
            first = self.error is None
            self.error = self.error or error
            self._event.set()
        return first

    def check(self) -> None:
        """Raise AbortedError when set."""
        if self._event.is_set():
            raise AbortedError(f"given up: {self.error}")

    def wait(self, timeout_s: float) -> bool:
        """Wait until set; True when it is."""
        return self._event.wait(timeout_s)
