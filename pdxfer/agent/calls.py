"""Calls: an engine's requests to its sidecar, and their answers, which whoever waits reads from the socket itself.

In come requests from any thread; out come their answers, or the sidecar's error. A thread that is woken by another one
which reads costs a hand-off of the interpreter as well: so answers have a socket of their own, and of those who wait
one reads, until its own answer comes; then another one does.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from pdxfer.agent.frames import Pipe, error_from
from pdxfer.errors import DeadlineError, PeerError

__all__ = ["Calls"]

_Said = tuple[str, Any]  # "ok" or "error", and values; in its place None: be the one who reads
_numbers = itertools.count(1)


class Calls:
    """Over one attachment. Any thread may ``ask``; ``close`` it once the sidecar is gone.

    Args:
        pipe: to say requests on. answers: to read answers from.
        lost: makes the error of those who wait when the sidecar goes.
        unclaimed: hears answers that nobody waits for any more.
    """

    def __init__(
        self, pipe: Pipe, answers: Pipe, lost: Callable[[], PeerError], unclaimed: Callable[[int, str, Any], None]
    ) -> None:
        self.pipe, self._answers, self._lost, self._unclaimed = pipe, answers, lost, unclaimed
        self._lock = threading.Lock()
        self._waiting: dict[int, SimpleQueue[_Said | None]] = {}
        self._reader = 0
        self._closed = False

    def ask(
        self,
        name: str,
        values: dict[str, Any],
        timeout_s: float,
        *,
        number: int = 0,
        meanwhile: Callable[[], None] | None = None,
    ) -> Any:
        """Ask, and wait for the answer.

        Args:
            number: from ``new_number``, for who has to know it. meanwhile: done while the sidecar is at it.

        Raises:
            PdxferError: the sidecar's answer. PeerError: it is gone, or went meanwhile. DeadlineError: it is silent.
        """
        number = number or self.new_number()
        box: SimpleQueue[_Said | None] = SimpleQueue()
        with self._lock:
            if self._closed:
                raise self._lost()
            self._waiting[number] = box
        try:
            self.pipe.send(number, name, values)
            if meanwhile is not None:
                meanwhile()
            found, said = self._await(number, box, time.monotonic() + timeout_s)
        except Empty:
            raise DeadlineError(f"the sidecar did not answer {name} within {timeout_s:g} s") from None
        finally:
            self._leave(number)
        if found != "ok":
            raise error_from(said)
        return said

    @staticmethod
    def new_number() -> int:
        """Of a request; none comes twice in a process."""
        return next(_numbers)

    def _await(self, number: int, box: SimpleQueue[_Said | None], until_s: float) -> _Said:
        with self._lock:
            reads = self._reader == 0
            if reads:
                self._reader = number
        if not reads and (said := box.get(timeout=max(0.0, until_s - time.monotonic()))) is not None:
            return said
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                frame = self._answers.receive(min(left_s, 1.0))
            except PeerError as error:
                raise self._lost() from error
            if frame is None:
                continue
            if frame[0] == number:
                return frame[1], frame[2]
            self._give(*frame[:3])
        raise Empty

    def _give(self, number: int, name: str, values: Any) -> None:
        with self._lock:
            box = self._waiting.pop(number, None)
        if box is None:
            self._unclaimed(number, name, values)
        else:
            box.put((name, values))

    def _leave(self, number: int) -> None:
        """It waits no longer; if it was the one who reads, another one is."""
        with self._lock:
            self._waiting.pop(number, None)
            if self._reader == number:
                self._reader = next(iter(self._waiting), 0)
                if self._reader:
                    self._waiting[self._reader].put(None)
            if self._closed and not self._waiting:
                self._answers.close()

    def close(self) -> None:
        """The sidecar is gone: whoever waits is told, and nobody can ask any more."""
        with self._lock:
            self._closed = True
            if self._waiting:
                self._answers.end()
            else:
                self._answers.close()
