"""What a plane has to do for ``planes.py``, a ``Link`` per peer that begins ``Move``s; who watches them; their memory.

In come calls from channels; out go callbacks, one per move, on the mover's thread. Nothing here knows messages.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.transport.base import Deadline, Message
from pdxfer.transport.regions import Region, RemoteRegion

__all__ = ["Arriving", "Link", "Move", "Mover", "Staging", "refuse_beside"]

_log = logging.getLogger(__name__)

_POLL_S = (20e-6, 500e-6)  # how long the mover rests between two looks: at first, and at most
_STALLED_S = 0.5  # between two looks at moves that call it
_SMALLEST_BYTES = 64 << 10  # of a piece of staging


def refuse_beside(*packages: str) -> None:
    """Raise MisuseError when one of these is loaded: NIXL and ucxx bring a copy of UCX each, and two in one process
    crashed NIXL's threads in half of all runs (1.5.1 beside 0.52).
    """
    if loaded := sorted(sys.modules.keys() & set(packages)):
        raise MisuseError(
            f"{loaded[0]} has brought its own UCX into this process, and two of them crash",
            hint="use either the nixl or the ucx transport in a process",
        )


class Move(ABC):
    """Bytes underway on the plane. Used by one thread at a time.

    Attributes:
        calls: it calls the mover when it has ended, which need not look before.
    """

    calls: ClassVar[bool] = False

    @abstractmethod
    def poll(self) -> bool:
        """Whether all bytes are where they should be; raises TransportError when they never will be."""

    @abstractmethod
    def cancel(self) -> bool:
        """Give up. False when the plane may go on touching the memory, which then is never used again."""


class Link(ABC):
    """The peer of one channel, as the plane reaches it. Its methods raise TransportError; the mover calls them all
    but ``offer`` and ``access`` (the thread that sends) and ``close``.

    Attributes:
        pushes: the sender acts when the receiver is ready (PULL), else the receiver reads alone.
    """

    pushes: ClassVar[bool]

    def offer(self, payload: memoryview) -> bytes:
        """Return what the peer needs to find ``payload``; raises MisuseError when this plane can't send it."""
        return b""

    @abstractmethod
    def fetch(self, sequence: int, where: bytes, target: memoryview) -> Move:
        """Begin to bring the peer's payload of exactly this length into ``target``; ``where`` is the peer's word."""

    def push(self, sequence: int, payload: memoryview) -> Move:
        """Begin to send a payload that the peer is ready for."""
        raise NotImplementedError

    def access(self, region: Region) -> bytes:
        """Return what the peer needs to read ``region``."""
        raise NotImplementedError

    def open_region(self, access: bytes) -> RemoteRegion:
        """Return the peer's region; ``access`` is its word."""
        raise NotImplementedError

    def withdraw(self, region_id: int) -> bool:
        """Whether the peer was told of this region of ours, which closes now."""
        return False

    def forget(self, region_id: int) -> None:  # noqa: B027 - only planes that export know regions
        """The peer closed a region of its."""

    @abstractmethod
    def close(self) -> None:
        """Let the peer go; no move is underway. Any thread, may be called twice."""


# -- the mover ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Arriving:
    """A place in a channel's inbox. ``sequence`` is the region's number where there is no payload."""

    sequence: int
    nbytes: int
    header: bytes
    where: bytes
    begun: bool = False
    asked: bool = False
    retired: bool = False
    message: Message | None = None


@dataclass(slots=True)
class _Underway:
    owner: object
    move: Move
    deadline: Deadline
    ended: Callable[[str, bool], None]


class Mover:
    """Runs calls, and polls moves until each ended: ``ended(why or "", whether the memory is ours again)``.

    Args:
        stall_s: a move that takes longer is given up.
        tend: called between, too; returns after how many seconds it wants to be called again at the latest.
    """

    def __init__(self, name: str, stall_s: float, tend: Callable[[], float] = lambda: math.inf) -> None:
        self._stall_s, self._tend = stall_s, tend
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._underway: list[_Underway] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> bool:
        """Have ``function`` run on the thread; False when it has ended. ``function`` mustn't raise."""
        with self._changed:
            if not self._stopping:
                self._calls.append(function)
                self._changed.notify()
            return not self._stopping

    def watch(self, owner: object, move: Move, ended: Callable[[str, bool], None]) -> None:
        """Poll ``move`` until it ended. On the thread only."""
        self._underway.append(_Underway(owner, move, Deadline(self._stall_s), ended))

    def cancel(self, owner: object) -> None:
        """Give up all moves of ``owner``; waits until that is done. Not on the thread."""
        cancelled = threading.Event()

        def cancel() -> None:
            self.drop(owner)
            cancelled.set()

        if self.call(cancel):
            cancelled.wait()

    def drop(self, owner: object) -> None:
        """The same, on the thread only."""
        for one in [one for one in self._underway if one.owner is owner]:
            self._end(one, "the channel closed")

    def _run(self) -> None:
        rest_s, tend_s = _POLL_S[0], math.inf
        while True:
            with self._changed:
                if not self._calls and not self._stopping:
                    looked_at = any(not one.move.calls for one in self._underway)
                    move_s = rest_s if looked_at else _STALLED_S if self._underway else math.inf
                    wait_s = min(move_s, tend_s)
                    self._changed.wait(None if wait_s == math.inf else wait_s)
                calls, self._calls = self._calls, deque()
                if self._stopping and not calls:
                    return
            moved = [self._guard(call) for call in calls]
            moved += [self._guard(partial(self._poll, one)) for one in list(self._underway) if one in self._underway]
            tend_s = self._tend()
            rest_s = _POLL_S[0] if any(moved) else min(2 * rest_s, _POLL_S[1])

    @staticmethod
    def _guard(function: Callable[[], object]) -> object:
        """Our own fault on one channel must not stop the moves of all others."""
        try:
            return function() is not False
        except Exception:  # noqa: BLE001 - nobody else could report it; who waits for it has a deadline
            _log.exception("the mover failed")
            return True

    def _poll(self, one: _Underway) -> bool:
        """Whether it ended."""
        try:
            if one.move.poll():
                self._underway.remove(one)
                one.ended("", True)
                return True
            one.deadline.check("a payload on the plane")
        except (TransportError, DeadlineError) as error:
            self._end(one, error.message)
            return True
        return False

    def _end(self, one: _Underway, why: str) -> None:
        self._underway.remove(one)
        free = one.move.cancel()
        if not free:
            _log.warning("a move can't be stopped (%s); its memory is set aside", why)
        one.ended(why, free)

    def close(self) -> None:
        """Run what was called, end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()


class Staging:
    """Memory to receive into: pieces of a power of two, kept for the next message. Thread-safe.

    Attributes:
        lent_bytes: of the pieces that are lent; kept_bytes: of those that wait.
    """

    def __init__(self, bound_bytes: int, allocate: Callable[[int], Region]) -> None:
        self._bound_bytes, self._allocate = bound_bytes, allocate
        self._lock = threading.Lock()
        self._kept: defaultdict[int, list[Region]] = defaultdict(list)
        self.lent_bytes = self.kept_bytes = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether so much may be received before anyone asked for it."""
        return self.lent_bytes + nbytes <= self._bound_bytes

    def lend(self, nbytes: int) -> Region:
        """Return at least so much memory; raises ExhaustedError."""
        size = max(_SMALLEST_BYTES, 1 << (nbytes - 1).bit_length())
        with self._lock:
            self.lent_bytes += size
            if self._kept[size]:
                self.kept_bytes -= size
                return self._kept[size].pop()
        try:
            return self._allocate(size)
        except BaseException:
            with self._lock:
                self.lent_bytes -= size
            raise

    def take_back(self, staging: Region, *, reusable: bool = True) -> None:
        """The reverse of ``lend``. What the plane may still write to is never used again."""
        with self._lock:
            self.lent_bytes -= staging.nbytes
            keep = reusable and not staging.closed and self.kept_bytes + staging.nbytes <= self._bound_bytes
            if keep:
                self.kept_bytes += staging.nbytes
                self._kept[staging.nbytes].append(staging)
        if reusable and not keep:
            staging.close()
