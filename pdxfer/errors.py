"""Every error pdxfer raises, in one tree sorted by who is to blame.

::

    PdxferError
    ├── MisuseError            the caller of this process (bad argument, bad config, wrong order of calls)
    │   └── TicketError        the ticket: edited, stale, expired, used twice, meant for someone else
    ├── IncompatibleError      the pair: two specs or layouts that can't be mapped; names component, field, both values
    ├── PeerError              the other agent: unreachable, died, restarted (epoch), broke the protocol
    │   └── StaleError         the other side's pages or slot moved on: generation, epoch or lease
    ├── TransportError         the path between two agents
    ├── DeadlineError          nobody answered in time
    ├── ExhaustedError         a bounded resource is full: arena, pages, slots, quota
    ├── CorruptError           bytes or lengths differ from what was sealed; names the component
    ├── AbortedError           someone asked for the end: cancel, drain
    └── InternalError          us: an invariant of pdxfer does not hold

Each class has a stable ``reason`` (wire and logs) and an ``exit_code`` (the command line).
"""

from __future__ import annotations

import errno
import os

__all__ = [  # classes alone: sidecars, status codes and reasons go by it
    "AbortedError",
    "CorruptError",
    "DeadlineError",
    "ExhaustedError",
    "IncompatibleError",
    "InternalError",
    "MisuseError",
    "PdxferError",
    "PeerError",
    "StaleError",
    "TicketError",
    "TransportError",
]

_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC, errno.EDQUOT)


class PdxferError(Exception):
    """Base of all errors of this package.

    Args:
        message: what happened, in one sentence.
        hint: what the reader can do next; shown on a line of its own.
        reason: stable upper-case name; defaults to the class's own.
        details: string pairs for logs and the wire (no secrets).
    """

    reason: str = "ERROR"
    exit_code: int = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        reason: str | None = None,
        details: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.details = dict(details or {})
        if reason is not None:
            self.reason = reason

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class MisuseError(PdxferError):
    """The caller broke a documented rule; nothing was changed."""

    reason = "MISUSE"
    exit_code = 2


class TicketError(MisuseError):
    """The ticket was not accepted; no byte was shown."""

    reason = "TICKET_REJECTED"
    exit_code = 1


class IncompatibleError(PdxferError):
    """Two sides can't be mapped exactly, so nothing is moved.

    Args:
        component: the component, or ``"*"`` when the whole spec is meant.
        field: the field that differs.
        source: the value on the source side.
        target: the value on the target side.
    """

    reason = "INCOMPATIBLE"

    def __init__(
        self, component: str, field: str, source: object, target: object, *, why: str = "", hint: str = "",
        reason: str | None = None,
    ) -> None:  # fmt: skip
        self.component, self.field, self.source, self.target = component, field, source, target
        message = f"{component}: {field} is {source!r} at the source and {target!r} at the target"
        super().__init__(
            f"{message} ({why})" if why else message,
            hint=hint,
            reason=reason,
            details={
                "component": component,
                "field": field,
                "source": repr(source),
                "target": repr(target),
                "why": why,
            },
        )


class PeerError(PdxferError):
    """The other agent can't be reached, died, or broke the protocol."""

    reason = "PEER_FAILED"
    exit_code = 5


class StaleError(PeerError):
    """What the ticket points to has moved on (epoch, generation, lease)."""

    reason = "STALE"
    exit_code = 1


class TransportError(PdxferError):
    """The data path failed; the channel is closed and must not be used again."""

    reason = "TRANSPORT_FAILED"
    exit_code = 5


class DeadlineError(PdxferError):
    """A deadline passed; the operation has been given up on both sides or will be by its lease."""

    reason = "DEADLINE_EXCEEDED"


class ExhaustedError(PdxferError):
    """A bounded resource is full; trying again later can succeed.

    Args:
        retry_after_s: a hint in seconds.
    """

    reason = "EXHAUSTED"

    def __init__(self, message: str, *, retry_after_s: float = 0.1, hint: str = "", reason: str | None = None) -> None:
        super().__init__(message, hint=hint, reason=reason, details={"retry_after_s": f"{retry_after_s:g}"})
        self.retry_after_s = retry_after_s

    @classmethod
    def check(cls, error: Exception, what: str) -> None:
        """Raise this when an OSError (or ZMQError) says that descriptors, memory or disk are used up here."""
        number = getattr(error, "errno", None)
        if number in _USED_UP:
            hint = "raise the limit of open files (ulimit -n)" if number in (errno.EMFILE, errno.ENFILE) else ""
            raise cls(f"{what}: {os.strerror(number)}", hint=hint) from error


class CorruptError(PdxferError):
    """Bytes on the destination are not the bytes that were sealed; nothing was committed.

    Args:
        component: the component whose bytes are wrong, or ``"*"`` when a frame can't be read at all.
    """

    reason = "CORRUPT"
    exit_code = 4

    def __init__(self, component: str, message: str, *, hint: str = "") -> None:
        super().__init__(f"{component}: {message}", hint=hint, details={"component": component})
        self.component = component


class AbortedError(PdxferError):
    """The transfer was cancelled on purpose, here or by the peer."""

    reason = "ABORTED"


class InternalError(PdxferError):
    """An invariant of pdxfer itself does not hold; please report it."""

    reason = "INTERNAL"
