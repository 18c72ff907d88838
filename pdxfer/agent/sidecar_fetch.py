"""Sidecar fetch: one fetch as the engine sees it while its sidecar runs it; the methods are those of ``Fetch``."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from pdxfer.agent.fetch import Received
from pdxfer.driver import EdgeStats
from pdxfer.errors import DeadlineError, PdxferError
from pdxfer.ticket import Ticket
from pdxfer.transfer import State

if TYPE_CHECKING:
    from pdxfer.agent.client import SidecarAgent

__all__ = ["SidecarFetch", "edge_from", "edge_to"]

_EDGE = tuple(each.name for each in fields(EdgeStats))
_PATIENCE_S = 60.0  # how much later than its deadline a fetch's end may be told


class SidecarFetch:
    """One fetch that a sidecar runs; see ``Fetch``, whose methods these are."""

    def __init__(
        self, agent: SidecarAgent, number: int, ticket: Ticket, timeout_s: float, bring: Callable[[], None] | None
    ) -> None:
        self._agent, self.number, self.ticket, self.bring = agent, number, ticket, bring
        self._deadline_s = time.monotonic() + timeout_s + _PATIENCE_S
        self.begun = False  # what it raises at its beginning is all that the engine hears
        self.arrived = False  # whole and verified in memory that is ours: no end of the sidecar takes it back
        self._over = threading.Event()
        self._settled = False
        self._taken = False
        self._result: Received | PdxferError | None = None

    @property
    def state(self) -> State:
        """State of our pages; only READY (and HANDED) may be decoded from."""
        if self._result is None:
            return State.RECEIVING
        if isinstance(self._result, Received):
            return State.HANDED if self._taken else State.READY
        return State.FREE if self._settled else State.QUARANTINED

    @property
    def done(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._over.is_set()

    def join(self, timeout_s: float) -> bool:
        """Wait until it has ended; False when it has not in time."""
        return self._over.wait(timeout_s)

    def left_s(self) -> float:
        """How long its end may still take to be told."""
        return max(0.0, min(self._deadline_s - time.monotonic(), threading.TIMEOUT_MAX))

    def cancel(self, why: str = "cancelled by the engine") -> None:
        """Give up; ``wait`` raises AbortedError unless it was READY already."""
        self._agent.tell("cancel", fetch=self.number, why=why)

    def settle(self) -> bool:
        """Whether nobody can touch the pages of a failed fetch any more."""
        return self._settled or isinstance(self._result, Received)

    def wait(self) -> Received:
        """Wait for the end: the pages are then the engine's; raises the error it ended with."""
        if not self._over.wait(self.left_s()):
            raise DeadlineError(f"{self.ticket.transfer}: the sidecar does not say how it ended; its pages stay taken")
        if isinstance(self._result, Received):
            self._taken = True
            return self._result
        assert self._result is not None
        raise self._result

    def finish(self, result: Received | PdxferError, *, settled: bool = True) -> None:
        """The sidecar has said how it ended, or is gone."""
        self._result, self._settled = result, settled or self._settled
        self._over.set()

    def settled(self) -> None:
        """The sidecar has said that its threads are gone from the pages."""
        self._settled = True


def edge_to(edge: EdgeStats) -> dict[str, Any]:
    """What an edge cost, as plain values."""
    return {name: getattr(edge, name) for name in _EDGE}


def edge_from(values: dict[str, Any]) -> EdgeStats:
    """The inverse of ``edge_to``."""
    seconds, counted = defaultdict(float, values.pop("seconds")), Counter(values.pop("component_bytes"))
    return EdgeStats(**values, seconds=seconds, component_bytes=counted)
