"""Choice: which transport and which mode one hand-off takes, by estimated seconds, and why.

In come bytes and fragments of an edge and the rates of this machine (``probe.py``); out come estimates and one Choice.
Pure functions: nothing here measures, connects or logs.

Three ways to move an edge of B bytes in n runs (contiguous at both ends) and c chunks::

    one copy   target reads mapped pages      B * copy + n * copy_run                            + c messages
    read       by the target, run by run      B * (read + digest) + n * read_run                 + c messages
    packed     pack, message, unpack          one chunk through all three, then c-1 times the slowest of them

The source digests while the target copies, and pack and unpack digest what is in cache, so digests cost little there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pdxfer.packing import EdgeProgram

__all__ = ["Choice", "LinkRates", "Rates", "Work", "estimates", "pick", "preference"]

#: Best first, where nothing was measured (between hosts, a probe of our own loopback says nothing).
_PREFERENCE = ("memory", "shm", "nixl", "nccl", "ucx", "gloo", "tcp")
_WORTH = 2.0  # another path has to be so much quicker than the one that is preferred: estimates are rough


class Work(NamedTuple):
    """One edge: its bytes, its runs, and the bytes of a chunk."""

    nbytes: int
    runs: int
    chunk_bytes: int

    @classmethod
    def of(cls, program: EdgeProgram) -> Work:
        """That of an edge of one request."""
        nbytes = program.payload_bytes
        return cls(nbytes, -(-nbytes // max(1, program.run_bytes())), program.chunk_bytes)

    @property
    def chunks(self) -> int:
        """Messages that it takes."""
        return max(1, -(-self.nbytes // self.chunk_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Seconds per byte and per run of this machine's memory, one thread."""

    copy_byte_s: float
    copy_run_s: float
    digest_byte_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Seconds per byte and per message of a transport, between two ends on this machine.

    ``read``: of registered memory, by the target itself and run by run; infinite where that can't be done.
    """

    byte_s: float
    message_s: float
    read_byte_s: float = math.inf
    read_run_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen for one edge, and why.

    Attributes:
        transport: scheme. mode: "direct" or "packed", once the source has said it.
        why: one line for people.
        seconds: estimates by candidate ("shm direct"), where there are any.
        slow: it is a fall-back: something better should be there and is not.
    """

    transport: str
    mode: str = ""
    why: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    slow: bool = False

    def __str__(self) -> str:
        estimates = ", ".join(
            f"{name} {s * 1e3:.2f} ms" for name, s in sorted(self.seconds.items(), key=lambda e: e[1])
        )
        return f"{self.transport} {self.mode}".strip() + f": {self.why}" + (f" ({estimates})" if estimates else "")


def preference(scheme: str) -> tuple[int, str]:
    """Sort key of schemes: best first, unknown ones behind those that we know, by name; tcp last."""
    known = _PREFERENCE.index(scheme) if scheme in _PREFERENCE else len(_PREFERENCE) - 1.5
    return round(2 * known), scheme


def estimates(work: Work, rates: Rates, link: LinkRates, *, direct: bool, mapped: bool = True) -> dict[str, float]:
    """Seconds by mode.

    Args:
        direct: whether the target can read the source's pages at all; mapped: whether it sees them, or reads by calls.
    """
    found = {"packed": _packed_s(work, rates, link)}
    if direct:
        found["direct"] = (_one_copy_s if mapped else _read_s)(work, rates, link)
    return found


def _one_copy_s(work: Work, rates: Rates, link: LinkRates) -> float:
    return work.nbytes * rates.copy_byte_s + work.runs * rates.copy_run_s + work.chunks * link.message_s


def _read_s(work: Work, rates: Rates, link: LinkRates) -> float:
    moved = work.nbytes * (link.read_byte_s + rates.digest_byte_s) + work.runs * link.read_run_s
    return moved + work.chunks * link.message_s


def _packed_s(work: Work, rates: Rates, link: LinkRates) -> float:
    one = min(work.nbytes, work.chunk_bytes)
    gather = one * rates.copy_byte_s + work.runs / work.chunks * rates.copy_run_s
    stages = gather, one * link.byte_s + link.message_s, gather
    return sum(stages) + (work.chunks - 1) * max(stages)


def pick(seconds: Mapping[str, float]) -> tuple[str, str]:
    """The candidate to take, and why; candidates are in order of preference, best first."""
    names = list(seconds)
    quickest = min(names, key=lambda name: seconds[name])
    if quickest == names[0] or seconds[names[0]] <= _WORTH * seconds[quickest]:
        return names[0], "it is the best of those in common" if len(names) > 1 else "it is the only one in common"
    return quickest, f"{names[0]} would be {seconds[names[0]] / seconds[quickest]:.1f} times as slow"
