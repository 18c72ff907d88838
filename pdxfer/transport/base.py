"""The transport contract: bytes from one agent to another, in order and whole, or a failed channel.

In come headers (opaque bytes) and payloads (memory); out they come at the peer. A transport never sees
a layout, a component or a plan, and it promises nothing about what the bytes mean: who needs integrity
hashes the bytes, who needs completeness counts the messages.

Five nouns, each with one owner::

    Transport ── one per agent and scheme; owns everything below, close() ends it all
      ├── Region     memory of mine that bytes leave from   ── descriptor ──▶  RegionDescriptor (plain bytes)
      ├── Listener   where peers find me                    ── accept()   ──▶  Channel
      └── Channel    an ordered path to one peer
            send_all(header, payload) ──▶ Sending          "may I reuse the payload's memory?"
            receive()                 ──▶ Message          valid until release()
            export_region(region)     ──▶ Message.region   a RemoteRegion at the peer, read-only

Threads. Everything is synchronous and may be driven from ordinary threads. On one channel at most one
thread sends (``send_all``, ``export_region``) and at most one receives at a time; a second one gets
MisuseError. ``Sending``, ``Message.release`` and every ``close`` may be called from any thread at any time.
``connect`` waits until the peer's ``accept`` took it, so one thread can't do both ends in turn.

Failure. MisuseError changes nothing. DeadlineError from a channel means that nothing was sent or received:
the channel is as usable as before. TransportError from a channel means that it is closed, for good, on this
side; what the peer sent before an orderly close is still handed out first, as far as its ``Sending`` was done.

Flow control. A peer that does not receive or release makes the sender wait, never grow: at least
``WINDOW_MESSAGES`` messages (with headers of up to 1 KiB) may be sent and not yet released, from there on
``send_all`` may wait.
"""

from __future__ import annotations

import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from pdxfer.errors import DeadlineError, ExhaustedError, MisuseError, TransportError
from pdxfer.transport.regions import Closable, Region, RegionDescriptor, RemoteRegion
from pdxfer.transport.runs import anonymous_memory, check_nbytes, writable_view

__all__ = [
    "MAX_HEADER_BYTES",
    "WINDOW_MESSAGES",
    "Address",
    "Channel",
    "Deadline",
    "DoneSending",
    "Listener",
    "LocalMemoryTransport",
    "Message",
    "Region",
    "RegionDescriptor",
    "RemoteRegion",
    "Sending",
    "Transport",
    "check_header",
    "format_address",
    "parse_address",
]

#: A header is small by contract: what is big belongs into the payload.
MAX_HEADER_BYTES = 64 << 10
#: Messages that every transport lets a sender have underway (sent, not yet released by the receiver).
WINDOW_MESSAGES = 32

_Thing = TypeVar("_Thing", bound=Closable)

# -- addresses -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """``scheme://location``; what a location means is the scheme's affair."""

    scheme: str
    location: str

    def __post_init__(self) -> None:
        if not self.scheme or not all(c.isascii() and (c.isalnum() or c in "+-.") for c in self.scheme):
            raise MisuseError(f"address scheme {self.scheme!r} is not a URL scheme")
        if not self.location or any(ord(c) < 33 or ord(c) == 127 for c in self.location):
            raise MisuseError(f"address location {self.location!r} is empty or has blanks or control characters")

    def expect(self, scheme: str) -> str:
        """Return the location; raises MisuseError when the address belongs to another scheme."""
        if self.scheme != scheme:
            raise MisuseError(f"address {format_address(self)!r} is not a {scheme}:// address")
        return self.location


def parse_address(url: str) -> Address:
    """Split a URL such as ``shm:///run/x/sock``, ``tcp://10.0.0.1:7000`` or ``memory://name``.

    Raises:
        MisuseError: there is no ``://``, or a part is empty or has blanks. ``format_address`` is the inverse.
    """
    scheme, separator, location = url.partition("://")
    if not separator:
        raise MisuseError(f"{url!r} is not an address", hint="write scheme://location, e.g. tcp://127.0.0.1:7000")
    return Address(scheme=scheme, location=location)


def format_address(address: Address) -> str:
    """Return the URL; ``parse_address`` is the inverse."""
    return f"{address.scheme}://{address.location}"


# -- deadlines and headers ---------------------------------------------------------------------


class Deadline:
    """A moment on the monotonic clock; one per public call, handed down so that waits never add up."""

    __slots__ = ("_at_s",)

    def __init__(self, timeout_s: float) -> None:
        if not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise MisuseError(f"timeout_s is {timeout_s!r}; it must be a finite number of seconds, at least 0")
        self._at_s = time.monotonic() + timeout_s

    def left_s(self, cap_s: float = threading.TIMEOUT_MAX) -> float:
        """Seconds left, at least 0 and at most ``cap_s``."""
        return min(max(0.0, self._at_s - time.monotonic()), cap_s)

    def left_ms(self) -> int:
        """Milliseconds left for ``poll``, rounded up so that waiting ends after the deadline, not just before."""
        return min(math.ceil(self.left_s() * 1000), 2**31 - 1)

    def check(self, waited_for: str) -> None:
        """Raise DeadlineError when the moment has passed."""
        if self.left_s() == 0:
            raise DeadlineError(f"gave up waiting for {waited_for}")


def check_header(header: bytes) -> bytes:
    """Return ``header``; raises MisuseError when it isn't bytes or is over MAX_HEADER_BYTES."""
    if not isinstance(header, bytes):
        raise MisuseError(f"a header must be bytes, not {type(header).__name__}")
    if len(header) > MAX_HEADER_BYTES:
        raise MisuseError(
            f"the header has {len(header)} bytes; at most {MAX_HEADER_BYTES} are allowed", hint="send it as payload"
        )
    return header


# -- the nouns -----------------------------------------------------------------------------------


class Message(Closable):
    """One received message.

    Attributes:
        header: the sender's header, unchanged.
        region: what the peer exported with this message, or None. It outlives ``release``.
    """

    def __init__(
        self,
        header: bytes,
        payload: memoryview,
        *,
        region: RemoteRegion | None = None,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self.header = header
        self.region = region
        self._payload: memoryview | None = payload.toreadonly()
        self._on_release = on_release
        self._lock = threading.Lock()

    @property
    def payload(self) -> memoryview:
        """The payload, flat, read-only, empty when there is none; raises MisuseError after ``release``."""
        payload = self._payload
        if payload is None:
            raise MisuseError("the message was released, so its payload is no longer ours")
        return payload

    def release(self) -> None:
        """Give the payload's memory back to the sender: from now on it may change. Any thread; idempotent.

        Views made of ``payload`` stay memory-safe but may show other bytes.
        """
        with self._lock:
            released, self._on_release = self._on_release, None
            self._payload = None
        if released is not None:
            released()

    def close(self) -> None:
        """The same as ``release``."""
        self.release()


class Sending(ABC):
    """The sender's view of one message underway."""

    @property
    @abstractmethod
    def done(self) -> bool:
        """True when the payload's memory may be reused; never blocks, never raises."""

    @abstractmethod
    def wait(self, timeout_s: float) -> None:
        """Wait until ``done``. Several threads may wait, for the same or for different messages.

        It says that the transport is finished with the memory, not that the peer understood the message.

        Raises:
            DeadlineError: not yet; waiting again is fine.
            TransportError: the channel died first. The memory may be reused only after ``channel.close()``;
                a peer that is still reading then sees other bytes, which its digests will tell.
        """


class DoneSending(Sending):
    """A message whose payload was empty or copied."""

    @property
    def done(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Return at once."""
        Deadline(timeout_s)


class Channel(Closable):
    """An ordered path to one peer; made by ``Transport.connect`` and ``Listener.accept``."""

    @abstractmethod
    def send_all(self, header: bytes, payload: memoryview | None = None, *, timeout_s: float) -> Sending:
        """Send one message, whole. It is on its way when this returns; the payload's memory is not yet free.

        Args:
            header: at most MAX_HEADER_BYTES bytes; may be empty.
            payload: contiguous memory, not to be changed until the returned Sending is done. Over shm it must
                lie inside one region from ``allocate`` of this transport. None and empty are the same.
            timeout_s: how long to wait for room.

        Raises:
            MisuseError: header too long, payload outside a region, two threads sending; nothing was sent.
            DeadlineError: no room in time; nothing was sent, the channel is usable.
            TransportError: the peer is gone or the channel is closed; it is closed now.
            ExhaustedError: no descriptor or memory is left here; it is closed now. So ``receive``.
        """

    @abstractmethod
    def receive(self, *, timeout_s: float) -> Message:
        """Return the next message, in the order sent. Release it soon: the sender's memory waits for that.

        Raises:
            MisuseError: two threads receiving.
            DeadlineError: none came in time; the channel is usable.
            TransportError: the peer is gone, broke the protocol, or the channel is closed; it is closed now.
        """

    @abstractmethod
    def export_region(self, region: Region, header: bytes, *, timeout_s: float) -> None:
        """Let the peer read ``region``: its ``receive`` returns a message with this header and ``.region``.

        Closing the region withdraws it, though a read underway may still finish.

        Raises:
            MisuseError: ``can_export`` is False, or the region is closed or another transport's.
            DeadlineError, TransportError: as ``send_all``.
        """

    @property
    @abstractmethod
    def closed(self) -> bool:
        """True once ``close`` was called or TransportError was raised; the peer's end may be dead earlier."""

    @abstractmethod
    def close(self) -> None:
        """Close both directions; blocked threads get TransportError at once, the peer soon.

        Messages whose Sending was not done may be lost. Remote regions that came by this channel are closed.
        Received messages that were not released stay readable, as far as their views live.
        """


class Listener(Closable):
    """Where peers connect to. Any thread may accept, several at a time."""

    @property
    @abstractmethod
    def contact_address(self) -> str:
        """The URL that peers pass to ``connect``; may differ from the address listened on."""

    @abstractmethod
    def accept(self, timeout_s: float) -> Channel:
        """Return a channel to the next peer. A peer that fails the handshake is dropped and not reported.

        Raises:
            DeadlineError: nobody came in time.
            TransportError: the listener is closed.
        """

    @abstractmethod
    def close(self) -> None:
        """Stop listening; a blocked ``accept`` gets TransportError. Accepted channels live on."""


class Transport(Closable):
    """One way to move bytes, for one agent. All methods may be called from any thread.

    A transport belongs to the process that made it; after a fork the child must make its own.

    Attributes:
        scheme: of its addresses.
        insecure_listeners: how many addresses were opened to other hosts without saying who may come.
        reaches_hosts: whether its bytes may leave this host; else peers of others are called by it last.
        can_export: whether ``export_region`` works, so that peers can read registered memory themselves.
        same_user: whether whoever is at the other end surely runs as our user, by the kernel's word. Then a transfer
            may be opened on the channel itself; else only by control, which knows how to check who asks.
    """

    scheme: ClassVar[str]
    can_export: ClassVar[bool]
    same_user: ClassVar[bool] = False
    reaches_hosts: bool = True

    def __init__(self) -> None:
        self._owned: dict[Closable, None] = {}
        self._owned_lock = threading.Lock()
        self._closed = False
        self._process_id = os.getpid()
        self._region_ids = 0
        self.insecure_listeners = 0

    @abstractmethod
    def listen(self, address: str = "") -> Listener:
        """Begin to listen; "" is a fresh private address.

        Raises:
            MisuseError: not an address of this scheme, or one that this transport's policy refuses.
            TransportError: the address is taken or can't be bound.
        """

    @abstractmethod
    def connect(self, address: str, *, timeout_s: float) -> Channel:
        """Connect to a peer's contact address and wait until it accepted.

        Raises:
            MisuseError: not an address of this scheme.
            DeadlineError: the peer did not accept in time.
            TransportError: nobody listens there, access was refused, or the peer speaks another version.
        """

    @abstractmethod
    def allocate(self, nbytes: int, name: str = "") -> Region:
        """Return zeroed memory that this transport sends from best.

        Raises:
            MisuseError: ``nbytes`` or ``name`` is out of bounds.
            ExhaustedError: the system has no memory left.
        """

    @abstractmethod
    def register(self, buffer: Any, name: str = "") -> Region:
        """Return a region over memory that exists already; ``buffer`` is kept alive until ``close``.

        Raises:
            MisuseError: not contiguous, not writable, or empty.
        """

    @property
    def public_key(self) -> bytes:
        """What a peer's listener must be told (``admit``) to let this transport in; b"" where nobody is asked."""
        return b""

    def admit(self, peer: str, public_key: bytes) -> None:
        """Let the holder of this key connect to our listeners; it replaces an earlier key of the same peer.

        Raises:
            MisuseError: it is no key.
        """

    def close(self) -> None:
        """Close every listener, channel and region of this transport, then what it needs itself."""
        with self._owned_lock:
            self._closed = True
            owned, self._owned = list(self._owned), {}
        for kind in (Listener, Channel, Region):
            for thing in owned:
                if isinstance(thing, kind):
                    thing.close()

    # For the implementations.

    def _check_usable(self) -> None:
        if self._closed:
            raise MisuseError(f"this {self.scheme} transport is closed")
        if os.getpid() != self._process_id:
            raise MisuseError(
                f"this {self.scheme} transport belongs to another process", hint="make one after the fork"
            )

    def _adopt(self, thing: _Thing) -> _Thing:
        """Own ``thing`` until ``_disown``; closes it and raises when the transport was closed meanwhile."""
        with self._owned_lock:
            if not self._closed:
                self._owned[thing] = None
                return thing
        thing.close()
        raise TransportError(f"this {self.scheme} transport was closed meanwhile")

    def _disown(self, thing: Closable) -> None:
        with self._owned_lock:
            self._owned.pop(thing, None)

    def _describe(self, nbytes: int, name: str, address: int = 0) -> RegionDescriptor:
        with self._owned_lock:
            self._region_ids += 1
            region_id = self._region_ids
        return RegionDescriptor(scheme=self.scheme, region_id=region_id, name=name, nbytes=nbytes, address=address)


class LocalMemoryTransport(Transport):
    """Regions for transports that send from any memory: allocated ones are anonymous, registered ones borrowed."""

    def allocate(self, nbytes: int, name: str = "") -> Region:
        """Return anonymous, page-aligned memory."""
        self._check_usable()
        check_nbytes(nbytes, f"region {name!r}")
        try:
            memory = anonymous_memory(nbytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ExhaustedError(f"no memory for region {name!r} of {nbytes} bytes: {error}") from error
        return self._adopt(self._make_region(memory, name))

    def register(self, buffer: Any, name: str = "") -> Region:
        """Borrow ``buffer``."""
        self._check_usable()
        return self._adopt(self._make_region(writable_view(buffer, f"region {name!r}"), name))

    def _make_region(self, view: memoryview, name: str) -> Region:
        return Region(view=view, descriptor=self._describe(view.nbytes, name), on_close=self._disown)
