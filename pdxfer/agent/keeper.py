"""Keeper: what a target says about tickets it has no session for: hold it for me, or free it.

In come tickets; out go Renew and Abort calls that show them. An engine may queue a request for longer than a
lease: the agent keeps the lease, not the engine's forward loop, which may be stuck in a long step. Nothing here
waits in, or raises to, the engine.

Calls go by lanes, one lane per address and at most one call underway in each, so that a dead source costs one
short call a second, however many tickets it gave out, and delays nobody else's lease::

    lane unix:///a   renew 1 ─ renew 2 ─ abort 3      due again a third of the lease after the answer
    lane tcp://b     renew 4 ─ (silence)              the whole lane waits before it is tried again
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdxfer.agent.peers import Peers
from pdxfer.agent.threads import start_thread
from pdxfer.errors import ExhaustedError, PdxferError, StaleError, TicketError
from pdxfer.messages import Abort, Renew
from pdxfer.ticket import Ticket

__all__ = ["Keeper"]

_CALL_S = 1.0
_RETRY_S = 1.0
_ROUND_S = 0.02  # what comes at the same moment is looked through once
_LANES_AT_ONCE = 8
_SILENCE_S = 30.0  # how long a source may be silent that has not answered yet
_DECLINE_S = 5.0  # how long it is worth telling: the lease ends by itself
_REASON_CHARS = 128
_LEASE_S_MAX = 3600.0  # a peer's word, and threads can't wait for just any number of seconds
_log = logging.getLogger("pdxfer.agent")


@dataclass(slots=True, eq=False, kw_only=True)
class _Note:
    """What one address is to be told of one ticket: renew, or (with a ``reason``) abort."""

    transfer: str
    ticket: bytes
    address: str
    reason: str = ""
    relay: bool = False
    due_s: float = 0.0
    dead_s: float = 0.0

    def __post_init__(self) -> None:
        self.dead_s = time.monotonic() + (_DECLINE_S if self.reason else _SILENCE_S)


class Keeper:
    """Kept and declined tickets of one agent. Thread-safe; every method but ``close`` returns at once."""

    def __init__(self, peers: Peers, worker: str, rank: int, epoch: bytes) -> None:
        self._peers = peers
        self._asker: dict[str, Any] = {"epoch": epoch, "session": b"", "target_worker": worker, "target_rank": rank}
        self._kept: dict[str, list[_Note]] = {}
        self._leaving: list[_Note] = []
        self._busy: set[str] = set()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, ticket: Ticket) -> None:
        """Renew its lease at every source rank, at once and then often enough, until ``forget`` or the source's end."""
        text = ticket.encode().encode()
        with self._changed:
            if ticket.transfer not in self._kept:
                notes = [_Note(transfer=ticket.transfer, ticket=text, address=part.address) for part in ticket.ranks]
                self._kept[ticket.transfer] = notes
                self._wake()

    def forget(self, transfer: str) -> None:
        """Renew it no more: a fetch has begun, or nobody wants it."""
        with self._changed:
            self._kept.pop(transfer, None)

    def decline(self, ticket: Ticket, reason: str, addresses: Iterable[str], *, relay: bool = False) -> None:
        """Tell the source ranks (or, ``relay``, siblings) at ``addresses`` that this rank will not come for it."""
        self.forget(ticket.transfer)
        text, reason = ticket.encode().encode(), reason[:_REASON_CHARS] or "declined"
        with self._changed:
            for address in addresses:
                note = _Note(transfer=ticket.transfer, ticket=text, address=address, reason=reason, relay=relay)
                self._leaving.append(note)
            self._wake()

    def kept(self) -> int:
        """How many tickets are kept."""
        with self._changed:
            return len(self._kept)

    def close(self) -> None:
        """End what is underway, after one last try to tell what was declined. Idempotent."""
        self._closing.set()
        with self._changed:
            self._kept = {}
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None and not self._busy)

    # -- inside ------------------------------------------------------------------------------------

    def _wake(self) -> None:
        if self._thread is None and not self._closing.is_set():
            try:
                self._thread = start_thread("pdxfer-keeper", self._run)
            except ExhaustedError as error:  # whoever wakes it next tries again
                _log.warning("no lease is renewed and nobody declined to now: %s", error)
        self._changed.notify_all()

    def _run(self) -> None:
        """Start the lanes that have something to say, until there is no note left."""
        while True:
            with self._changed:
                due, next_s = self._due(time.monotonic())
                self._busy.update(due)
                if not due and (self._closing.is_set() or not (self._kept or self._leaving)):
                    self._thread = None
                    self._changed.notify_all()
                    return
                if not due:
                    self._changed.wait(next_s)
            for address, notes in due.items():
                try:
                    start_thread("pdxfer-keeper-lane", self._tell, address, notes)
                except ExhaustedError as error:
                    _log.warning("%s is told later: %s", address, error)
                    self._leave(address)
            self._closing.wait(_ROUND_S)

    def _due(self, now_s: float) -> tuple[dict[str, list[_Note]], float]:
        """Notes that are due in lanes that may start now, and the seconds until others are."""
        due: dict[str, list[_Note]] = {}
        next_s = _LEASE_S_MAX
        for note in itertools.chain(self._leaving, *self._kept.values()):
            if note.address in self._busy or (note.address not in due and len(due) + len(self._busy) >= _LANES_AT_ONCE):
                continue
            if note.due_s <= now_s:
                due.setdefault(note.address, []).append(note)
                note.due_s = now_s + _RETRY_S  # until its answer says more
            next_s = min(next_s, note.due_s - now_s)
        return due, next_s

    def _tell(self, address: str, notes: Sequence[_Note]) -> None:
        """Say all that is due at one address; after silence the rest of it waits."""
        try:
            for index, note in enumerate(notes):
                if self._closing.is_set() and not note.reason:
                    continue
                try:
                    self._call(note)
                except (StaleError, TicketError) as error:
                    self._drop(note, error)
                except PdxferError as error:
                    self._retry_later(notes[index:], error)
                    return
        finally:
            self._leave(address)

    def _leave(self, address: str) -> None:
        with self._changed:
            self._busy.discard(address)
            self._changed.notify_all()

    def _call(self, note: _Note) -> None:
        client = self._peers.client(note.address)
        about: dict[str, Any] = {"transfer": note.transfer, "ticket": note.ticket, **self._asker}
        if note.reason:
            client.abort(Abort(reason=note.reason, relay=note.relay, **about), timeout_s=_CALL_S)
            self._drop(note, None)
            return
        lease_s = client.renew(Renew(**about), timeout_s=_CALL_S).lease_s
        with self._changed:
            now_s, lease_s = time.monotonic(), min(lease_s, _LEASE_S_MAX)
            note.due_s, note.dead_s = now_s + lease_s / 3, now_s + lease_s

    def _retry_later(self, notes: Sequence[_Note], error: PdxferError) -> None:
        """Nobody answers: where nobody even listens, no page is held either."""
        now_s, gone = time.monotonic(), error.reason == "PEER_UNREACHABLE"
        for note in notes:
            note.due_s = now_s + _RETRY_S
            if now_s > note.dead_s or (gone and note.reason):
                self._drop(note, error)
                self._peers.drop(note.address)

    def _drop(self, note: _Note, error: PdxferError | None) -> None:
        if error is not None:
            what = "declined" if note.reason else "kept"
            text, about = "transfer %s is %s no more at %s: %s", {"peer": note.address}
            _log.info(text, note.transfer, what, note.address, error.message, extra=about)
        with self._changed:
            if note in self._leaving:
                self._leaving.remove(note)
            elif note in self._kept.get(note.transfer, ()):
                del self._kept[note.transfer]
