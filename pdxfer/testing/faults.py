"""A transport that misbehaves on purpose, the same way every time.

In come any Transport and a plan of faults; out goes a Transport that obeys the contract except where the plan
says otherwise. Faults hit what is *received* (give it to the target side), counted per channel from 0, so that they
don't depend on how threads interleave::

    with FaultyTransport(create_transport("shm"), FaultPlan.of(Fault(kind="corrupt", at=2))) as transport:
        ...  # the third payload of every channel has one flipped byte

``fired`` lists what was injected: assert on it, or a test may pass because nothing happened.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.transport.base import Channel, Deadline, Listener, Message, Sending, Transport
from pdxfer.transport.regions import Region, RemoteRegion
from pdxfer.transport.runs import Runs, byte_view

__all__ = ["Fault", "FaultPlan", "FaultyTransport", "WrappedChannel", "WrappedRegion", "WrappedTransport"]

Kind = Literal["delay", "drop", "truncate", "corrupt", "swap", "zero", "disconnect"]
Place = Literal["message", "payload", "read"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        kind: ``delay`` waits ``delay_s``; ``drop`` swallows the message (its sender sees it released); ``truncate``
            cuts the payload at a byte; ``corrupt`` flips one bit of one byte; ``swap`` exchanges two equal halves of a
            piece of it; ``zero`` clears its end from a byte on; ``disconnect`` closes the channel.
        at: hits the at-th of what ``on`` counts, on every channel.
        on: ``message`` counts all messages, ``payload`` those with one, ``read`` the calls of ``read_runs``.
        delay_s: seconds, for ``delay``.
    """

    kind: Kind
    at: int
    on: Place = "payload"
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        if self.at < 0 or (self.kind == "delay") != (self.delay_s > 0):
            raise MisuseError(f"{self.kind} at {self.at} with delay_s {self.delay_s} makes no sense")
        if self.on == "read" and self.kind in ("drop", "truncate", "swap", "zero"):
            raise MisuseError(f"a read can't be hit by {self.kind}", hint="use corrupt, delay or disconnect")
        if self.on == "message" and self.kind in ("truncate", "corrupt", "swap", "zero"):
            raise MisuseError(f"{self.kind} needs a payload", hint='use on="payload"')


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Faults, and the seed that chooses which byte a ``corrupt`` flips."""

    faults: tuple[Fault, ...]
    seed: int = 0

    @classmethod
    def of(cls, *faults: Fault, seed: int = 0) -> FaultPlan:
        """Return a plan of exactly these."""
        return cls(faults=faults, seed=seed)


class WrappedTransport(Transport):
    """Does all that ``inner`` does and closes it; every channel goes through ``wrap``."""

    def __init__(self, inner: Transport, wrap: Callable[[Channel], Channel]) -> None:
        super().__init__()
        vars(self).update(scheme=inner.scheme, can_export=inner.can_export, same_user=inner.same_user)
        self.inner, self._wrap = inner, wrap

    def listen(self, address: str = "") -> Listener:
        return _WrappedListener(self.inner.listen(address), self._wrap)

    def connect(self, address: str, *, timeout_s: float) -> Channel:
        return self._wrap(self.inner.connect(address, timeout_s=timeout_s))

    def allocate(self, nbytes: int, name: str = "") -> Region:
        return self.inner.allocate(nbytes, name)

    def register(self, buffer: Any, name: str = "") -> Region:
        return self.inner.register(buffer, name)

    def close(self) -> None:
        self.inner.close()


class _WrappedListener(Listener):
    def __init__(self, inner: Listener, wrap: Callable[[Channel], Channel]) -> None:
        self._inner, self._wrap = inner, wrap

    @property
    def contact_address(self) -> str:
        return self._inner.contact_address

    def accept(self, timeout_s: float) -> Channel:
        return self._wrap(self._inner.accept(timeout_s))

    def close(self) -> None:
        self._inner.close()


class WrappedChannel(Channel):
    """Does all that ``inner`` does."""

    def __init__(self, inner: Channel) -> None:
        self.inner = inner

    @property
    def closed(self) -> bool:
        return self.inner.closed

    def send_all(self, header: bytes, payload: memoryview | None = None, *, timeout_s: float) -> Sending:
        return self.inner.send_all(header, payload, timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> Message:
        return self.inner.receive(timeout_s=timeout_s)

    def export_region(self, region: Region, header: bytes, *, timeout_s: float) -> None:
        self.inner.export_region(region, header, timeout_s=timeout_s)

    def close(self) -> None:
        self.inner.close()


class WrappedRegion(RemoteRegion):
    """A region that is only ever read, never mapped, so that every access can be hit."""

    def __init__(self, inner: RemoteRegion) -> None:
        super().__init__(inner.descriptor)
        self.inner = inner

    @property
    def view(self) -> None:
        return None

    def read_runs(self, target: memoryview, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
        return self.inner.read_runs(target, target_offsets, source_offsets, lengths)

    def close(self) -> None:
        self.inner.close()


class FaultyTransport(WrappedTransport):
    """See the module. Takes over ``inner``: closing this closes that.

    Attributes:
        fired: the faults injected so far, in order.
        damaged: header, and number of the first byte that is not as it was sent, of each payload that was damaged.
    """

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        super().__init__(inner, partial(_FaultyChannel, self))
        self.plan = plan
        self.fired: list[Fault] = []
        self.damaged: list[tuple[bytes, int]] = []


class _FaultyChannel(WrappedChannel):
    def __init__(self, transport: FaultyTransport, inner: Channel) -> None:
        super().__init__(inner)
        self._transport = transport
        self._counts: dict[Place, int] = {"message": 0, "payload": 0, "read": 0}
        self._random = random.Random(transport.plan.seed)  # noqa: S311 - as above
        self._ended = threading.Event()

    def close(self) -> None:
        self._ended.set()
        super().close()

    def receive(self, *, timeout_s: float) -> Message:
        deadline = Deadline(timeout_s)
        while True:
            message: Message | None = super().receive(timeout_s=deadline.left_s())
            assert message is not None
            if message.region is not None:
                message.region = _FaultyRegion(self, message.region)
            for fault in self.due("message") + (self.due("payload") if message.payload.nbytes else []):
                message = self._hit(message, fault) if message is not None else None
            if message is not None:
                return message
            if deadline.left_s() == 0:
                raise DeadlineError("no message came in time (one was dropped on purpose)")

    def due(self, place: Place) -> list[Fault]:
        """Count one more of ``place`` and return the faults that hit it."""
        index = self._counts[place]
        self._counts[place] += 1
        due = [f for f in self._transport.plan.faults if f.on == place and f.at == index]
        self._transport.fired.extend(due)
        return due

    def _hit(self, message: Message, fault: Fault) -> Message | None:
        if fault.kind == "drop":
            message.release()
            return None
        if fault.kind in ("delay", "disconnect"):
            self.stall_or_break(fault)
            return message
        sent, damaged = bytes(message.payload), bytearray(message.payload)
        self._damage(fault.kind, damaged)
        if damaged == sent:  # zeros were cleared, or equal bytes exchanged
            self.flip(memoryview(damaged))
        pairs = enumerate(zip(sent, damaged, strict=False))
        first = next((at for at, (was, is_) in pairs if was != is_), min(len(sent), len(damaged)))
        self._transport.damaged.append((message.header, first))
        return Message(message.header, memoryview(damaged), region=message.region, on_release=message.release)

    def _damage(self, kind: Kind, data: bytearray) -> None:
        at = self._random.randrange(len(data))
        if kind == "truncate":
            del data[at:]
        elif kind == "zero":
            data[at:] = bytes(len(data) - at)
        elif kind == "swap" and len(data) > 1:
            length = self._random.randrange(1, len(data) // 2 + 1)
            one = at % (len(data) - 2 * length + 1)
            two = one + length
            data[one:two], data[two : two + length] = data[two : two + length], data[one:two]
        else:
            self.flip(memoryview(data))

    def stall_or_break(self, fault: Fault) -> None:
        """Wait (until the delay is over or the channel closed) or close the channel and raise."""
        if fault.kind == "delay":
            self._ended.wait(fault.delay_s)
        elif fault.kind == "disconnect":
            self.close()
            raise TransportError("the channel was disconnected on purpose")

    def flip(self, memory: memoryview) -> None:
        """Flip one bit, chosen by the plan's seed."""
        memory[self._random.randrange(memory.nbytes)] ^= 1 << self._random.randrange(8)


class _FaultyRegion(WrappedRegion):
    def __init__(self, channel: _FaultyChannel, inner: RemoteRegion) -> None:
        super().__init__(inner)
        self._channel = channel

    def read_runs(self, target: memoryview, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
        faults = self._channel.due("read")
        for fault in faults:
            self._channel.stall_or_break(fault)
        nbytes = super().read_runs(target, target_offsets, source_offsets, lengths)
        for fault in faults:
            if fault.kind == "corrupt" and nbytes:
                run = int(np.argmax(lengths))
                start = int(target_offsets[run])
                self._channel.flip(byte_view(target, "target")[start : start + int(lengths[run])])
        return nbytes
