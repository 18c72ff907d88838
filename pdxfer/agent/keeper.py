"""Keeper: what a target says about tickets it has not opened yet: hold it for me, or free it.

In come tickets; out go Renew and Abort calls that show them. An engine may queue a request for longer than a lease:
the agent keeps the lease, not the engine's forward loop, which may be stuck in a long step. Calls run in a few
threads with short timeouts, so a dead source delays nobody else's lease; nothing here raises to the engine.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdxfer.agent.peers import Peers
from pdxfer.errors import DeadlineError, PdxferError, PeerError, StaleError
from pdxfer.messages import Abort, Renew
from pdxfer.ticket import RankTicket, Ticket

__all__ = ["Keeper"]

_CALL_S = 1.0
_THREADS = 4
_FIRST_LEASE_S = 30.0
_log = logging.getLogger("pdxfer.agent")


@dataclass(slots=True)
class _Kept:
    """One source rank's part of a kept ticket: when to renew it, and until when it may be silent."""

    ticket: Ticket
    part: RankTicket
    due_s: float = 0.0
    dead_s: float = field(default_factory=lambda: time.monotonic() + _FIRST_LEASE_S)


class Keeper:
    """Kept tickets of one agent. Thread-safe; every method returns at once."""

    def __init__(self, peers: Peers, worker: str, rank: int, epoch: bytes) -> None:
        self._peers, self._facts = peers, {"epoch": epoch, "target_worker": worker, "target_rank": rank}
        self._kept: dict[str, list[_Kept]] = {}
        self._changed = threading.Condition()
        self._pool: ThreadPoolExecutor | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def keep(self, ticket: Ticket) -> None:
        """Renew its lease at every source rank, at once and then often enough, until ``forget`` or the source's end."""
        with self._changed:
            if self._closed or ticket.transfer in self._kept:
                return
            self._kept[ticket.transfer] = [_Kept(ticket, part) for part in ticket.ranks]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pdxfer-keeper", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, transfer: str) -> None:
        """Renew it no more: a fetch has begun, or nobody wants it."""
        with self._changed:
            self._kept.pop(transfer, None)

    def decline(self, ticket: Ticket, reason: str) -> None:
        """Tell every source rank, once, that nobody will come for it."""
        self.forget(ticket.transfer)
        for part in ticket.ranks:
            self._submit(partial(self._abort, ticket, part, reason))

    def kept(self) -> int:
        """How many tickets are kept."""
        with self._changed:
            return len(self._kept)

    def close(self) -> None:
        """Forget all, after what is underway. Idempotent."""
        with self._changed:
            self._closed, self._kept = True, {}
            self._changed.notify()
            pool, thread = self._pool, self._thread
        if thread is not None:
            thread.join()
        if pool is not None:
            pool.shutdown(wait=True)

    def _submit(self, call: Callable[[], Any]) -> None:
        with self._changed:
            if self._closed:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="pdxfer-keeper")
            self._pool.submit(call)

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now_s = time.monotonic()
                parts = [part for kept in self._kept.values() for part in kept]
                due = [part for part in parts if part.due_s <= now_s]
                for part in due:
                    part.due_s = now_s + _CALL_S  # until its answer says more
                if not due:
                    next_s = min((part.due_s for part in parts), default=None)
                    self._changed.wait(None if next_s is None else next_s - now_s)
            for part in due:
                self._submit(partial(self._renew, part))

    def _renew(self, kept: _Kept) -> None:
        transfer = kept.ticket.transfer
        message = Renew(transfer=transfer, session=b"", ticket=kept.ticket.encode().encode(), **self._facts)  # type: ignore[arg-type]
        try:
            lease_s = self._peers.client(kept.part.address).renew(message, timeout_s=_CALL_S).lease_s
        except PdxferError as error:
            gone = isinstance(error, StaleError) or not isinstance(error, (PeerError, DeadlineError))
            if gone or time.monotonic() > kept.dead_s:
                _log.info("transfer %s: its lease is not kept any more: %s", transfer, error.message)
                self.forget(transfer)
            return
        now_s = time.monotonic()
        with self._changed:
            kept.due_s, kept.dead_s = now_s + lease_s / 3, now_s + lease_s
            self._changed.notify()

    def _abort(self, ticket: Ticket, part: RankTicket, reason: str) -> None:
        message = Abort(
            transfer=ticket.transfer, session=b"", ticket=ticket.encode().encode(), reason=reason[:128], **self._facts  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            self._peers.client(part.address).abort(message, timeout_s=_CALL_S)
        except PdxferError as error:
            _log.info("transfer %s: %s could not be told: %s", ticket.transfer, part.address, error.message)
