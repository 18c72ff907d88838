"""Readiness: whether these agents should be sent work, check by check, each with what is wrong.

In come agents; out come texts, empty where all is well. Looking costs a connection to each of our own listeners, so an
answer is kept for a moment. One slow answer is no failure: cores may be busy; two in a row are.

==========  =====================================================================================
check       fails when
==========  =====================================================================================
control     our own control address does not answer, or not in time
planes      a data listener takes no connection
arena       staging or the ledger of pages lost count
keys        there is no key to seal tickets with, or its file or a certificate's can't be read any more
draining    the agent takes nothing new
transfers   over half of at least four transfers failed, for 10 seconds on end
==========  =====================================================================================
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

from pdxfer.agent import Agent
from pdxfer.agent.journal import Timeline
from pdxfer.control.tls import Pem
from pdxfer.errors import DeadlineError, PdxferError
from pdxfer.keys import check_key, read_secret

__all__ = ["CHECKS", "FailureWindow", "Readiness"]

_KEPT_S = 2.0
_CALL_S = 2.0
_WINDOW_S = 10.0
_WINDOW_MIN = 4
_WINDOW_MAX = 4096
#: Failures that say nothing about us: somebody's bad ticket or changed mind.
_NOT_OURS = frozenset({"ABORTED", "MISUSE", "TICKET_REJECTED", "TICKET_USED", "TICKET_EXPIRED", "STALE_TICKET"})


class FailureWindow:
    """Whether over half of the transfers of the last 10 s failed, and has for as long. A journal's listener."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[tuple[float, bool]] = deque(maxlen=_WINDOW_MAX)
        self._bad_since_s: float | None = None
        self._lock = threading.Lock()

    def began(self, timeline: Timeline) -> None:
        """Nothing yet."""

    def ended(self, timeline: Timeline) -> None:
        """Count it, unless its end was somebody's wish or somebody's bad ticket."""
        if timeline.outcome in ("completed", "failed") and timeline.reason not in _NOT_OURS:
            with self._lock:
                self._ends.append((self._clock(), timeline.outcome == "failed"))
                self._judge()

    def problem(self) -> str:
        """What is wrong, or ""."""
        with self._lock:
            failed, of = self._judge()
            lasting = self._bad_since_s is not None and self._clock() - self._bad_since_s >= _WINDOW_S
        return f"{failed} of the last {of} transfers failed" if lasting else ""

    def _judge(self) -> tuple[int, int]:
        now_s = self._clock()
        while self._ends and now_s - self._ends[0][0] > _WINDOW_S:
            self._ends.popleft()
        failed, of = sum(bad for _, bad in self._ends), len(self._ends)
        if of < _WINDOW_MIN or 2 * failed <= of:
            self._bad_since_s = None
        elif self._bad_since_s is None:
            self._bad_since_s = now_s
        return failed, of


def _control(agent: Agent) -> str:
    status = agent.peers.client(agent.address).health("live", timeout_s=_CALL_S)
    return "" if status == "SERVING" else f"{agent.address} is {status}"


def _planes(agent: Agent) -> str:
    missing = {*agent.transports} - {address.partition("://")[0] for address in agent.contact_addresses}
    for address in agent.contact_addresses:
        transport = agent.transports[address.partition("://")[0]]
        if transport.public_key:
            transport.admit(f"{agent.config.rank}/{agent.config.worker}", transport.public_key)
        transport.connect(address, timeout_s=_CALL_S).close()
    return f"nothing listens for {', '.join(sorted(missing))}" if missing else ""


def _arena(agent: Agent) -> str:
    agent.check_integrity()
    return ""


def _keys(agent: Agent) -> str:
    keys = agent.source.keys
    if keys.path:
        read_secret(keys.path)
    for key in keys.active():
        check_key(key)
    if agent.config.tls is not None:
        Pem.read(agent.config.tls)
    return "" if keys.active() else "there is no ticket key"


def _draining(agent: Agent) -> str:
    return f"draining, {agent.underway()} underway" if agent.draining else ""


_OF_AGENT: Mapping[str, Callable[[Agent], str]] = {
    "control": _control, "planes": _planes, "arena": _arena, "keys": _keys, "draining": _draining,
}  # fmt: skip

CHECKS = (*_OF_AGENT, "transfers")


class Readiness:
    """The checks of a changing set of agents. Thread-safe."""

    def __init__(self, agents: Callable[[], Sequence[Agent]], draining: Callable[[], bool]) -> None:
        self.window = FailureWindow()
        self._agents, self._draining = agents, draining
        self._slow: Counter[tuple[str, int]] = Counter()
        self._kept: dict[str, str] = {}
        self._kept_s = -_KEPT_S
        self._lock = threading.Lock()

    def problems(self, *, fresh: bool = False) -> dict[str, str]:
        """What is wrong by check, "" where nothing is. ``fresh``: look now, whatever was seen a moment ago."""
        with self._lock:
            if fresh or time.monotonic() - self._kept_s > _KEPT_S:
                self._kept = {name: self._over_agents(name) for name in _OF_AGENT}
                self._kept_s = time.monotonic()
            draining = self._over_agents("draining") or ("draining" if self._draining() else "")
            now = {"draining": draining, "transfers": self.window.problem()}
            return {**self._kept, **now}

    def _over_agents(self, name: str) -> str:
        found = [self._ask(name, agent) for agent in self._agents()]
        return "; ".join(text for text in found if text)

    def _ask(self, name: str, agent: Agent) -> str:
        key = (name, id(agent))
        try:
            problem = _OF_AGENT[name](agent)
        except DeadlineError as error:
            self._slow[key] += 1
            problem = error.message if self._slow[key] > 1 else ""
        except PdxferError as error:
            problem = error.message
        except Exception as error:  # noqa: BLE001 - e.g. an agent that closes meanwhile; the other checks go on
            problem = f"the check failed: {type(error).__name__}: {error}"
        else:
            self._slow.pop(key, None)
        return f"rank {agent.config.rank}: {problem}" if problem else ""
