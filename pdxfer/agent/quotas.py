"""Quotas: what one peer, or one tenant, may take of a source at a time. Who is over gets a refusal that says when to
come back, and nobody else notices.

In come openings, endings and calls; out comes nothing, or ExhaustedError with reason ``QUOTA``. It knows no transfer.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields

from pdxfer.errors import ExhaustedError, MisuseError

__all__ = ["CallRates", "Owners", "Quotas", "Usage"]

_RETRY_S = 0.05
_CALLERS_MAX = 4096

#: Who is counted: ("peer", worker), and ("tenant", name) where there is one.
Owners = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quotas:
    """Bounds per source rank. A peer is a worker, as far as it can prove it; tenants' hold where there are tenants.

    Attributes:
        peer_transfers, tenant_transfers: open ones; peer_bytes, tenant_bytes: what these will move.
        peer_calls_per_s: control calls; as many may come at once.
    """

    peer_transfers: int = 1024
    peer_bytes: int = 256 << 30
    tenant_transfers: int = 1024
    tenant_bytes: int = 256 << 30
    peer_calls_per_s: float = 5000.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise MisuseError(f"quotas.{field.name} must be positive and finite, got {value!r}")


class Usage:
    """What is open now, by peer and tenant. Not thread-safe: its owner has a lock."""

    def __init__(self, quotas: Quotas) -> None:
        self.quotas = quotas
        self._open: dict[Hashable, dict[Hashable, int]] = {}
        self._owners: dict[Hashable, Owners] = {}
        self._transfers: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[tuple[str, str]] = Counter()

    def check(self, transfer: Hashable, reader: Hashable, nbytes: int, owners: Owners) -> None:
        """Raise ExhaustedError when ``take`` would be too much."""
        readers = self._open.get(transfer, {})
        more = nbytes - readers.get(reader, 0)
        for kind, name in owners:
            open_now, bytes_now = self._transfers[kind, name] + (not readers), self._bytes[kind, name] + more
            most, most_bytes = getattr(self.quotas, f"{kind}_transfers"), getattr(self.quotas, f"{kind}_bytes")
            if open_now > most or bytes_now > most_bytes:
                raise _over(
                    f"this {kind} has {open_now - (not readers)} transfers of {bytes_now - more} B open here; "
                    f"at most {most} of {most_bytes} B are allowed",
                    _RETRY_S,
                )

    def take(self, transfer: Hashable, reader: Hashable, nbytes: int, owners: Owners) -> None:
        """Count one reader of a transfer; one that comes again replaces itself."""
        readers = self._open.get(transfer, {})
        more = nbytes - readers.get(reader, 0)
        if not readers:
            self._open[transfer], self._owners[transfer] = readers, owners
            self._transfers.update(owners)
        readers[reader] = nbytes
        for owner in owners:
            self._bytes[owner] += more

    def give_back(self, transfer: Hashable) -> None:
        """The transfer is over; unknown ones are ignored."""
        nbytes = sum(self._open.pop(transfer, {}).values())
        for owner in self._owners.pop(transfer, ()):
            self._transfers[owner] -= 1
            self._bytes[owner] -= nbytes
            if not self._transfers[owner]:
                del self._transfers[owner], self._bytes[owner]

    @property
    def open_transfers(self) -> int:
        """How many are counted."""
        return len(self._open)


class CallRates:
    """A bucket of calls for each caller that fills with time. Thread-safe."""

    def __init__(self, quotas: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_s, self._clock = quotas.peer_calls_per_s, clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self._lock = threading.Lock()

    def count(self, caller: Hashable) -> None:
        """Count one call; raises ExhaustedError when it is one too many."""
        most = max(self._per_s, 1.0)
        with self._lock:
            now_s = self._clock()
            left, then_s = self._buckets.pop(caller, (most, now_s))
            left = min(most, left + (now_s - then_s) * self._per_s)
            self._buckets[caller] = (left - 1 if left >= 1 else left, now_s)
            while len(self._buckets) > _CALLERS_MAX:
                self._buckets.popitem(last=False)
        if left < 1:
            raise _over(f"this peer makes more than {self._per_s:g} calls a second", (1 - left) / self._per_s)


def _over(what: str, retry_after_s: float) -> ExhaustedError:
    hint = "it is asked again by itself, within its deadline"
    return ExhaustedError(what, retry_after_s=retry_after_s, hint=hint, reason="QUOTA")
