"""Journal: what became of one agent's transfers: live ones, a ring of ended ones, and counts.

In come marks from offers, fetches and peers' calls; out come timelines, newest first, counts by bounded labels, and a
word to listeners (metrics, traces) when a transfer begins and ends. Whatever a peer names is cut, or counted as other:
nothing here grows with requests or peers. It knows no metric system.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from pdxfer.agent.reasons import reason_of
from pdxfer.errors import AbortedError, CorruptError, IncompatibleError, StaleError, TicketError

if TYPE_CHECKING:
    from pdxfer.driver import EdgeStats
    from pdxfer.packing import EdgeProgram

__all__ = ["Journal", "Listener", "PeerSeen", "Timeline", "component_kind"]

_ENDED_MAX, _MARKS_MAX, _PEERS_MAX, _TEXT_CHARS = 512, 64, 256, 500
_NAMED_PEERS = 16  # as labels; the others are counted together
_KINDS = ("kv", "latent", "S", "conv", "index", "*")
_OUTCOMES = ("completed", "failed", "cancelled", "expired", "aborted", "declined", "withdrawn", "closing")
_SILENT = ("PEER_UNREACHABLE", "PEER_STOPPED", "TRANSPORT_FAILED", "DEADLINE_EXCEEDED")
_log = logging.getLogger("pdxfer.agent")


def component_kind(name: str) -> str:
    """The kind of a component: kv, latent, S, conv, index; ``*`` is all, and ``other`` none of them."""
    head = name.partition(".")[0].partition("_")[0]
    return head if head in _KINDS else "other"


@dataclass(slots=True, eq=False, kw_only=True)
class Timeline:
    """One transfer at one agent. Changed by its Journal only.

    Attributes:
        role: ``source`` (an engine's offer), ``relay`` (our share of a fan-out), ``target`` (a fetch).
        rank: ours. peer: the other worker, as far as it is known; layout: the digest of its layout.
        epoch: of the source (at a target: of all its ranks), hex: with ``transfer``, one name for it at both ends.
        trace: W3C traceparent, or "".
        began_at: Unix time. marks: (seconds since then, stage, detail).
        edges: what each edge of a fetch costs so far. nbytes: by (transport, component), set at the end.
        outcome: "" while it is live. reason, error, hint, component, failed_in: of the error that ended it.
    """

    transfer: str
    role: str
    rank: int = 0
    peer: str = ""
    epoch: str = ""
    layout: str = ""
    trace: str = ""
    began_at: float = field(default_factory=time.time)
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    marks: list[tuple[float, str, str]] = field(default_factory=list)
    edges: list[EdgeStats] = field(default_factory=list)
    transports: set[str] = field(default_factory=set)
    seconds: dict[str, float] = field(default_factory=dict)
    nbytes: Counter[tuple[str, str]] = field(default_factory=Counter)
    messages: int = 0
    outcome: str = ""
    reason: str = ""
    error: str = ""
    hint: str = ""
    component: str = ""
    failed_in: str = ""

    @property
    def transport(self) -> str:
        """The transports it used, joined; "none" before there is any."""
        return "+".join(sorted(self.transports)) or "none"

    @property
    def elapsed_s(self) -> float:
        """Seconds from its begin to its end, or to now."""
        return (self.ended_s if self.outcome else time.monotonic()) - self.began_s

    def moved(self) -> tuple[int, int]:
        """Bytes and messages so far."""
        return sum(self.nbytes.values()) + sum(e.payload_bytes for e in self.edges), self.messages + sum(
            e.messages for e in self.edges
        )

    def about(self) -> dict[str, str]:
        """What a log line about it carries beside its id, as ``extra``."""
        return {"peer": self.peer, "epoch": self.epoch, "trace": self.trace}

    def forget(self) -> None:
        """Nobody will ask for it any more; whoever still has it needs only what log lines carry."""
        self.marks, self.seconds, self.nbytes = [], {}, Counter()

    def to_json(self) -> dict[str, Any]:
        """Everything, with who is to blame and what to do where it failed."""
        nbytes, messages = self.moved()
        found: dict[str, Any] = {
            "transfer": self.transfer, "role": self.role, "rank": self.rank, "peer": self.peer, "epoch": self.epoch,
            "began_at": round(self.began_at, 6),
            "elapsed_s": round(self.elapsed_s, 6), "outcome": self.outcome or "live", "transport": self.transport,
            "bytes": nbytes, "messages": messages, "trace": self.trace,
            "seconds": {stage: round(spent, 6) for stage, spent in self.seconds.items()},
            "components": dict(sum((Counter({c: n}) for (_, c), n in self.nbytes.items()), Counter())),
            "marks": [[round(at, 6), stage, detail] for at, stage, detail in list(self.marks)],
        }  # fmt: skip
        if reason := self.reason or ("LEASE_EXPIRED" if self.outcome == "expired" else ""):
            row = reason_of(reason)
            found["failure"] = {
                "reason": reason, "message": self.error, "component": self.component, "in": self.failed_in,
                "blame": row.blame, "cause": row.cause, "remedy": self.hint or row.remedy,
            }  # fmt: skip
        return found


@dataclass(slots=True, kw_only=True)
class PeerSeen:
    """What transfers told of one worker. ``label`` is its name among metrics."""

    label: str
    layout: str = ""
    up: bool = True
    completed: int = 0
    failed: int = 0
    nbytes: int = 0
    last_at: float = 0.0
    last_failure: str = ""


class Listener(Protocol):
    """Who wants to hear of transfers; called by the transfer's own thread, so it must be quick."""

    def began(self, timeline: Timeline) -> None:
        """A transfer begins; ``trace`` may be set."""

    def ended(self, timeline: Timeline) -> None:
        """It has ended; called once."""


class Journal:
    """All timelines of one agent. Thread-safe; no method raises.

    Args:
        rank, epoch: the agent's own.
    """

    def __init__(self, rank: int = 0, epoch: bytes = b"") -> None:
        self._rank, self._epoch = rank, epoch.hex()
        self.counts: Counter[tuple[str, ...]] = Counter()
        self.peers: OrderedDict[str, PeerSeen] = OrderedDict()
        self.listeners: list[Listener] = []
        self._labels: set[str] = set()
        self._live: dict[int, Timeline] = {}
        self._ended: deque[Timeline] = deque(maxlen=_ENDED_MAX)
        self._lock = threading.Lock()

    def begin(
        self, role: str, transfer: str, *, peer: str = "", trace: str = "", epochs: Iterable[bytes] = ()
    ) -> Timeline:
        """A transfer begins here. ``epochs``: of its source, where that is not this agent."""
        epoch = ",".join(dict.fromkeys(each.hex() for each in epochs)) or self._epoch
        timeline = Timeline(
            transfer=transfer[:_TEXT_CHARS], role=role, rank=self._rank, peer=peer[:_TEXT_CHARS],
            epoch=epoch[:_TEXT_CHARS], trace=trace,
        )  # fmt: skip
        with self._lock:
            self._live[id(timeline)] = timeline
        self._tell("began", timeline)
        return timeline

    def mark(self, timeline: Timeline, stage: str, detail: str = "") -> None:
        """It has come so far; also after its end (the engine's own steps)."""
        if len(timeline.marks) < _MARKS_MAX:
            timeline.marks.append((time.monotonic() - timeline.began_s, stage, detail[:_TEXT_CHARS]))
        else:
            self.count("telemetry_dropped")

    def end(
        self, timeline: Timeline, outcome: str, *, why: str = "", error: Exception | None = None,
        seconds: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        """It has ended. Only the first end counts."""
        with self._lock:
            if self._live.pop(id(timeline), None) is None:
                return
            timeline.ended_s = time.monotonic()
            self._sum_edges(timeline, seconds or {})
            if error is not None:
                outcome = "cancelled" if isinstance(error, AbortedError) else "failed"
                self._note_error(timeline, error)
            elif why:
                timeline.error = why[:_TEXT_CHARS]
            timeline.outcome = outcome if outcome in _OUTCOMES else "failed"
            if len(self._ended) == self._ended.maxlen:
                self._ended[0].forget()
            self._ended.append(timeline)
            self._count_end(timeline)
        self.mark(timeline, timeline.outcome, timeline.error)
        self._tell("ended", timeline)

    def served(self, timeline: Timeline, program: EdgeProgram, reader: int) -> None:
        """A reader has all of one edge, verified; called once for each."""
        for component, nbytes in program.bytes_by_component().items():
            timeline.nbytes[(timeline.transport, component)] += nbytes
        timeline.messages += len(program.chunks)
        self.mark(timeline, "read", f"by rank {reader}")

    def count(self, name: str, *labels: str) -> None:
        """Count what is no transfer's end; ``labels`` must come from bounded sets."""
        with self._lock:
            key = (name, *labels)
            self.counts[key] += 1

    @contextmanager
    def judging(self) -> Iterator[None]:
        """Count what is refused inside: because of its ticket or session, or because it came too late."""
        try:
            yield
        except (TicketError, StaleError) as error:
            kind = "tickets_rejected" if isinstance(error, TicketError) else "stale_rejected"
            self.count(kind, reason_of(error.reason).name)
            raise

    def timelines(self) -> list[Timeline]:
        """Live ones, then ended ones, each newest first."""
        with self._lock:
            return [*list(self._live.values())[::-1], *reversed(self._ended)]

    def live(self, role: str) -> int:
        """How many of a role are underway."""
        with self._lock:
            return sum(t.role == role for t in self._live.values())

    # -- inside, under the lock ----------------------------------------------------------------------

    def _sum_edges(self, timeline: Timeline, seconds: Mapping[str, float]) -> None:
        spent, edges = Counter(seconds), timeline.edges
        for edge in edges:
            spent.update(edge.seconds)
            timeline.messages += edge.messages
            for component, nbytes in edge.component_bytes.items():
                timeline.nbytes[(edge.transport or "none", component)] += nbytes
        timeline.transports.update(edge.transport for edge in edges if edge.transport)
        timeline.seconds, timeline.edges = dict(spent), []

    def _note_error(self, timeline: Timeline, error: Exception) -> None:
        timeline.reason = getattr(error, "reason", "INTERNAL")[:64]
        timeline.error = str(getattr(error, "message", error))[:_TEXT_CHARS]
        timeline.hint = str(getattr(error, "hint", ""))[:_TEXT_CHARS]
        last = timeline.marks[-1][1] if timeline.marks else "begun"
        timeline.failed_in = f"{timeline.failed_in or 'preparing'}, after {last}"
        if isinstance(error, (CorruptError, IncompatibleError)):
            timeline.component = error.component[:64]
        if isinstance(error, CorruptError):
            self.counts[("integrity_failures", component_kind(error.component), timeline.transport)] += 1
        self.counts[("transfer_failures", timeline.role, reason_of(timeline.reason).name)] += 1

    def _count_end(self, timeline: Timeline) -> None:
        role, outcome = timeline.role, timeline.outcome
        self.counts[("transfers", timeline.transport, role, outcome)] += 1
        if outcome == "expired":
            self.counts[("leases_expired",)] += 1
        direction = "in" if role == "target" else "out"
        for (transport, component), nbytes in timeline.nbytes.items():
            self.counts[("transfer_bytes", transport, component_kind(component), direction)] += nbytes
        self.counts[("transfer_messages", direction)] += timeline.messages
        if not timeline.peer or role == "relay":
            return
        peer = self._peer(timeline.peer)
        peer.last_at, peer.layout = time.time(), timeline.layout or peer.layout
        peer.nbytes += sum(timeline.nbytes.values())
        if outcome == "completed":
            peer.up, peer.completed = True, peer.completed + 1
        elif outcome not in ("cancelled", "withdrawn", "closing"):
            peer.failed += 1
            peer.last_failure = f"{timeline.reason or outcome}: {timeline.error}"
            peer.up = peer.up and timeline.reason not in _SILENT
        self.counts[("peer_transfers", peer.label, "completed" if outcome == "completed" else "other")] += 1

    def _peer(self, name: str) -> PeerSeen:
        if name not in self.peers:
            if len(self._labels) < _NAMED_PEERS:
                self._labels.add(name)
            self.peers[name] = PeerSeen(label=name if name in self._labels else "other")
        self.peers.move_to_end(name)
        while len(self.peers) > _PEERS_MAX:
            self.peers.popitem(last=False)
        return self.peers[name]

    def _tell(self, what: str, timeline: Timeline) -> None:
        for listener in tuple(self.listeners):
            try:
                getattr(listener, what)(timeline)
            except Exception:  # noqa: BLE001 - whoever watches a transfer must not end it
                self.count("telemetry_dropped")
                _log.exception("a listener of the journal failed")
