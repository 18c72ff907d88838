"""What two agents say to each other about a transfer: one frozen value per call, checked on construction.

The driver (``transfer.py``) makes and reads these; ``control/convert.py`` turns them into protobuf and
back; neither knows the other. No tensor byte and no memory address that anyone would trust is in here.

=============  =======================================================  ==========================
call           who asks, when                                           answer
=============  =======================================================  ==========================
``Describe``   target, on first contact with a peer's epoch             ``Description``
``Open``       target rank, once per source rank and transfer           ``Opened``
``Complete``   target rank, after it verified and committed             ``Completed``
``Abort``      either, when a transfer is given up                      ``Completed``
``Renew``      target rank, before half of the lease is gone            ``Renewed``
=============  =======================================================  ==========================
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum

from pdxfer.errors import IncompatibleError, MisuseError

__all__ = [
    "LIMITS",
    "PROTOCOL_OLDEST",
    "PROTOCOL_VERSION",
    "Abort",
    "Complete",
    "Completed",
    "ControlHandler",
    "Describe",
    "Description",
    "Mode",
    "Open",
    "Opened",
    "Renew",
    "Renewed",
    "check_versions",
]

#: What two agents say to each other, control and data frames: the newest version and the oldest that we speak.
#: 2: Describe says both, and a reader ignores fields that follow those it knows (1 refuses a frame that has any).
PROTOCOL_VERSION, PROTOCOL_OLDEST = 2, 1

#: Bounds on what a peer may send, checked before anything is allocated.
LIMITS = {
    "layout_bytes": 3 << 20,
    "ticket_bytes": 64 << 10,
    "name_chars": 256,
    "transports": 16,
    "chunks": 1 << 20,
    "chunk_bytes": 1 << 30,
    "text_chars": 4096,
}


class Mode(str, Enum):
    """How bytes leave the source: packed chunks in staging, or read by the target from the source's own pages."""

    PACKED = "packed"
    DIRECT = "direct"


def _bounded(text: str, field: str) -> None:
    if len(text) > LIMITS["name_chars"]:
        raise MisuseError(f"{field} has {len(text)} characters; at most {LIMITS['name_chars']} are allowed")


def _reader_bounded(message: Complete | Abort | Renew, *, session_sizes: tuple[int, ...] = (16,)) -> None:
    """Check what every call about an opened transfer says of its asker."""
    kind = type(message).__name__
    for text in (message.transfer, message.target_worker):
        _bounded(text, f"{kind} text")
    if len(message.epoch) != 16 or len(message.session) not in session_sizes or message.target_rank < 0:
        sizes = f"epoch {len(message.epoch)} B, session {len(message.session)} B, rank {message.target_rank}"
        raise MisuseError(f"{kind} is out of bounds: {sizes}")


def _shown_bounded(ticket: bytes) -> None:
    if len(ticket) > LIMITS["ticket_bytes"]:
        raise MisuseError(f"a ticket of {len(ticket)} B is out of bounds")


def _lease_bounded(lease_s: float) -> None:
    if not (lease_s > 0 and math.isfinite(lease_s)):
        raise MisuseError(f"a lease of {lease_s} s is out of bounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Describe:
    """Introduce one rank's agent and ask for the peer's description.

    Attributes:
        protocol_version, protocol_newest: the oldest and newest version that the asker speaks; 0: the only one.
        epoch: 16 random bytes, new at every process start.
        layout: canonical JSON of the worker's whole layout, UTF-8.
        data_key: public key of our data transports, or b"": only its holder is let in where the path is encrypted.
        known_layout_digest: the peer layout digest already cached here, or "": an equal one is not sent again.
    """

    protocol_version: int
    epoch: bytes
    worker: str
    rank: int
    layout: bytes
    known_layout_digest: str = ""
    data_key: bytes = b""
    protocol_newest: int = 0

    def __post_init__(self) -> None:
        _bounded(self.worker, "worker")
        _bounded(self.known_layout_digest, "known_layout_digest")
        keys_fit = len(self.epoch) == 16 and len(self.data_key) in (0, 32)
        if not keys_fit or self.rank < 0 or len(self.layout) > LIMITS["layout_bytes"]:
            raise MisuseError(
                f"Describe is out of bounds: epoch {len(self.epoch)} B, rank {self.rank}, layout {len(self.layout)} B"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Answer to Describe. ``layout`` is empty when the caller already knows it. Versions: as of Describe.

    ``transports`` are contact addresses (URLs) of this rank's data listeners, fastest first.
    ``host`` identifies the machine (boot id and namespaces); equal means shared memory can work.
    """

    protocol_version: int
    epoch: bytes
    worker: str
    rank: int
    layout_digest: str
    layout: bytes
    transports: tuple[str, ...]
    host: str
    protocol_newest: int = 0

    def __post_init__(self) -> None:
        for text in (self.worker, self.layout_digest, self.host, *self.transports):
            _bounded(text, "Description text")
        if (
            len(self.epoch) != 16
            or self.rank < 0
            or len(self.transports) > LIMITS["transports"]
            or len(self.layout) > LIMITS["layout_bytes"]
        ):
            raise MisuseError("Description is out of bounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Ask one source rank for its share of one transfer.

    Attributes:
        transfer: the transfer id of the ticket.
        ticket: the whole encoded ticket; the source checks its own seal on it.
        epoch: the asking agent's epoch; source_epoch: the epoch the asker expects to find.
        target_worker, target_rank: who asks; its layout was given by Describe and is named by layout_digest.
        plan_digest: of the plan computed by the target; the source computes its own and compares.
        first_token: the first token whose per-token rows are wanted (a prefix hit at the target skips some).
        relay: True when asked of a sibling target rank for its part of the fan-out.
        transport: the address (from Description.transports) the asker will connect to, or is connected to.
        mode: preferred mode; the source may answer with PACKED instead.
        chunk_bytes: upper bound of one packed chunk.
    """

    transfer: str
    ticket: bytes
    epoch: bytes
    source_epoch: bytes
    target_worker: str
    target_rank: int
    layout_digest: str
    plan_digest: str
    first_token: int
    relay: bool
    transport: str
    mode: Mode
    chunk_bytes: int

    def __post_init__(self) -> None:
        for text in (self.transfer, self.target_worker, self.layout_digest, self.plan_digest, self.transport):
            _bounded(text, "Open text")
        sizes_fit = len(self.epoch) == len(self.source_epoch) == 16 and len(self.ticket) <= LIMITS["ticket_bytes"]
        if (
            not sizes_fit
            or self.target_rank < 0
            or self.first_token < 0
            or not 4096 <= self.chunk_bytes <= LIMITS["chunk_bytes"]
        ):
            raise MisuseError("Open is out of bounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The source rank's promise: what will be moved, under which generation and lease.

    Attributes:
        generation: of the sealed pages and slot; checked again at Complete.
        session: random token; the first message on the data channel must carry it.
        lease_s: seconds from now until the source gives up unless renewed.
        chunks, payload_bytes: what the target must count; compared with its own computation.
        mode: the mode chosen.
    """

    epoch: bytes
    generation: int
    session: bytes
    lease_s: float
    chunks: int
    payload_bytes: int
    mode: Mode

    def __post_init__(self) -> None:
        if len(self.epoch) != 16 or len(self.session) != 16 or not 0 <= self.chunks <= LIMITS["chunks"]:
            raise MisuseError("Opened is out of bounds")
        if self.generation < 0 or self.payload_bytes < 0:
            raise MisuseError(f"Opened is out of bounds: generation {self.generation}, payload {self.payload_bytes} B")
        _lease_bounded(self.lease_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Complete:
    """The target rank holds verified bytes and needs the source no more. Idempotent."""

    transfer: str
    epoch: bytes
    source_epoch: bytes
    session: bytes
    target_worker: str
    target_rank: int
    generation: int
    payload_bytes: int

    def __post_init__(self) -> None:
        _reader_bounded(self)
        if len(self.source_epoch) != 16 or self.generation < 0 or self.payload_bytes < 0:
            raise MisuseError("Complete is out of bounds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """``state`` is the transfer's state at the answering side, for logs."""

    state: str

    def __post_init__(self) -> None:
        _bounded(self.state, "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Give up one transfer; the other side quarantines and frees. Idempotent, also for unknown transfers.

    ``session`` is empty when nothing was opened; then the ``ticket`` shows that the asker may. ``relay``: said to a
    sibling, of its share of the fan-out. ``reason`` is for logs, at most ``LIMITS["text_chars"]`` characters.
    """

    transfer: str
    epoch: bytes
    session: bytes
    target_worker: str
    target_rank: int
    reason: str
    ticket: bytes = b""
    relay: bool = False

    def __post_init__(self) -> None:
        _reader_bounded(self, session_sizes=(0, 16))
        _shown_bounded(self.ticket)
        if len(self.reason) > LIMITS["text_chars"]:
            raise MisuseError(f"reason has {len(self.reason)} characters; at most {LIMITS['text_chars']} are allowed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Renew:
    """Ask for more time: a reader by its ``session``, or with a ``ticket`` before anything was opened."""

    transfer: str
    epoch: bytes
    session: bytes
    target_worker: str
    target_rank: int
    ticket: bytes = b""

    def __post_init__(self) -> None:
        _reader_bounded(self, session_sizes=(0, 16) if self.ticket else (16,))
        _shown_bounded(self.ticket)


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewed:
    """Seconds from now until the lease ends."""

    lease_s: float

    def __post_init__(self) -> None:
        _lease_bounded(self.lease_s)


class ControlHandler(ABC):
    """What an agent answers. Every method may raise any PdxferError: the control layer carries class, reason,
    details and hint to the caller, where the same class is raised. Methods are called from several threads.
    ``deadline_s`` is the time left of the caller's deadline.
    """

    @abstractmethod
    def describe(self, message: Describe, *, deadline_s: float) -> Description:
        """Answer who this agent is."""

    @abstractmethod
    def open(self, message: Open, *, deadline_s: float) -> Opened:
        """Check the ticket, compare plans, start serving."""

    @abstractmethod
    def complete(self, message: Complete, *, deadline_s: float) -> Completed:
        """Release this reader's hold."""

    @abstractmethod
    def abort(self, message: Abort, *, deadline_s: float) -> Completed:
        """End the transfer for this reader."""

    @abstractmethod
    def renew(self, message: Renew, *, deadline_s: float) -> Renewed:
        """Extend the lease."""


def check_versions(found: Describe | Description) -> int:
    """The newest version of the protocol that both ends speak: theirs as they say, and ours.

    Raises:
        IncompatibleError: there is none; its reason is PROTOCOL_VERSION.
    """
    oldest, newest = found.protocol_version, max(found.protocol_version, found.protocol_newest)
    agreed = min(newest, PROTOCOL_VERSION)
    if agreed >= max(oldest, PROTOCOL_OLDEST):
        return agreed
    ends = {True: f"{oldest} to {newest}", False: f"{PROTOCOL_OLDEST} to {PROTOCOL_VERSION}"}
    by_source = isinstance(found, Description)
    older = "source" if by_source == (newest < PROTOCOL_OLDEST) else "target"
    raise IncompatibleError(
        "*", "protocol_version", ends[by_source], ends[not by_source], reason="PROTOCOL_VERSION",
        hint=f"upgrade the {older}, or go by way of a release that speaks both",
    )  # fmt: skip
