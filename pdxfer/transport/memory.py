"""The reference transport: two ends in one process, joined by queues. Where the others differ, they are wrong.

In come messages, out they come as views of the very same memory, so ``release`` matters here as it does
over shared memory: the sender's ``Sending`` is done when the receiver released, not before. A listener is a
name in a table of this process; addresses are ``memory://name``.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.transport.base import (
    WINDOW_MESSAGES,
    Address,
    Channel,
    Deadline,
    DoneSending,
    Listener,
    LocalMemoryTransport,
    Message,
    Sending,
    check_header,
    format_address,
    parse_address,
)
from pdxfer.transport.regions import Closable, MappedRegion, Region
from pdxfer.transport.runs import byte_view

__all__ = ["MemoryTransport"]

_listeners: dict[str, MemoryListener] = {}
_listeners_lock = threading.Lock()


class MemoryTransport(LocalMemoryTransport):
    """Moves nothing: both ends see the same memory."""

    scheme: ClassVar[str] = "memory"
    can_export: ClassVar[bool] = True
    same_user: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._exports: dict[Closable, weakref.WeakSet[MappedRegion]] = {}

    def track(self, region: Region, remote: MappedRegion) -> None:
        """Remember that ``remote`` must end with ``region``."""
        with self._owned_lock:
            if region in self._owned:
                self._exports.setdefault(region, weakref.WeakSet()).add(remote)
                return
        remote.close()

    def _disown(self, thing: Closable) -> None:
        with self._owned_lock:
            self._owned.pop(thing, None)
            remotes = list(self._exports.pop(thing, ()))
        for remote in remotes:
            remote.close()

    def listen(self, address: str = "") -> Listener:
        """Take a name in this process; "" takes a random one."""
        self._check_usable()
        name = parse_address(address).expect(self.scheme) if address else secrets.token_hex(8)
        listener = MemoryListener(self, name)
        with _listeners_lock:
            if _listeners.setdefault(name, listener) is not listener:
                raise TransportError(f"memory://{name} is taken", hint='listen("") takes a free name')
        return self._adopt(listener)

    def connect(self, address: str, *, timeout_s: float) -> Channel:
        """Queue at the listener of that name and wait to be accepted."""
        self._check_usable()
        deadline = Deadline(timeout_s)
        name = parse_address(address).expect(self.scheme)
        with _listeners_lock:
            listener = _listeners.get(name)
        if listener is None:
            raise TransportError(
                f"nobody listens at {address} in this process", hint="memory:// reaches no other process"
            )
        return self._adopt(listener.join(self, deadline))


class MemoryListener(Listener):
    """A queue of channels that wait to be accepted."""

    def __init__(self, transport: MemoryTransport, name: str) -> None:
        self._transport = transport
        self._name = name
        self._changed = threading.Condition()
        self._waiting: deque[MemoryChannel] = deque()
        self._closed = False

    @property
    def contact_address(self) -> str:
        """``memory://name``."""
        return format_address(Address(scheme="memory", location=self._name))

    def join(self, transport: MemoryTransport, deadline: Deadline) -> MemoryChannel:
        """The connecting side: make both ends, leave one here, wait until it is taken."""
        lock = threading.Condition()
        mine, theirs = MemoryChannel(transport, lock), MemoryChannel(self._transport, lock)
        mine.peer, theirs.peer = theirs, mine
        with self._changed:
            self._waiting.append(theirs)
            self._changed.notify_all()
            taken = self._changed.wait_for(lambda: self._closed or theirs not in self._waiting, deadline.left_s())
            if taken and not self._closed:
                return mine
            if theirs in self._waiting:
                self._waiting.remove(theirs)
        mine.close()
        theirs.close()
        if not taken:
            raise DeadlineError(f"{self.contact_address} did not accept in time")
        raise TransportError(f"{self.contact_address} stopped listening")

    def accept(self, timeout_s: float) -> Channel:
        """Take the oldest waiting channel."""
        deadline = Deadline(timeout_s)
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or self._waiting, deadline.left_s()):
                raise DeadlineError(f"nobody connected to {self.contact_address} in time")
            if self._closed:
                raise TransportError(f"{self.contact_address} is closed")
            channel = self._waiting.popleft()
            self._changed.notify_all()
        return self._transport._adopt(channel)

    def close(self) -> None:
        """Free the name."""
        with _listeners_lock:
            if _listeners.get(self._name) is self:
                del _listeners[self._name]
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._transport._disown(self)


class _MemorySending(Sending):
    def __init__(self, channel: MemoryChannel) -> None:
        self._channel = channel
        self.released = False

    @property
    def done(self) -> bool:
        return self.released

    def wait(self, timeout_s: float) -> None:
        deadline, channel = Deadline(timeout_s), self._channel
        with channel.changed:
            channel.changed.wait_for(lambda: self.released or channel.broken, deadline.left_s())
            if self.released:
                return
            if channel.broken:
                raise TransportError("the channel closed before the receiver released the message")
        raise DeadlineError("the receiver has not released the message yet")


class MemoryChannel(Channel):
    """One end of a pair. Both ends share one condition, which guards all their state."""

    peer: MemoryChannel

    def __init__(self, transport: MemoryTransport, changed: threading.Condition) -> None:
        self._transport = transport
        self.changed = changed
        self._inbox: deque[Message] = deque()
        self._underway = 0
        self._imported: list[MappedRegion] = []
        self._busy: set[str] = set()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    @property
    def broken(self) -> bool:
        """Whether either end is closed."""
        return self._closed or self.peer._closed

    def send_all(self, header: bytes, payload: memoryview | None = None, *, timeout_s: float) -> Sending:
        """Append a view of ``payload`` to the peer's inbox."""
        deadline = Deadline(timeout_s)
        check_header(header)
        view = byte_view(b"" if payload is None else payload, "payload")
        if not view.nbytes:
            self._put(lambda done: Message(header, view, on_release=done), deadline)
            return DoneSending()
        sending = _MemorySending(self)

        def release(done: Callable[[], None]) -> None:
            sending.released = True
            done()

        self._put(lambda done: Message(header, view, on_release=lambda: release(done)), deadline)
        return sending

    def export_region(self, region: Region, header: bytes, *, timeout_s: float) -> None:
        """Hand the peer a read-only view."""
        deadline = Deadline(timeout_s)
        check_header(header)
        if region not in self._transport._owned:
            raise MisuseError(f"region {region.name!r} is closed or belongs to another transport")
        remote = MappedRegion(region.descriptor, region.view)
        self._put(lambda done: Message(header, memoryview(b""), region=remote, on_release=done), deadline)
        self._transport.track(region, remote)
        with self.changed:
            self.peer._imported.append(remote)

    def _put(self, make: Callable[[Callable[[], None]], Message], deadline: Deadline) -> None:
        with self.changed:
            self._enter("send")
            try:
                self.changed.wait_for(lambda: self.broken or self._underway < WINDOW_MESSAGES, deadline.left_s())
                if self.broken:
                    raise self._break()
                if self._underway >= WINDOW_MESSAGES:
                    raise DeadlineError(f"the peer holds {WINDOW_MESSAGES} messages it has not released")
                self._underway += 1
                self.peer._inbox.append(make(self._released))
                self.changed.notify_all()
            finally:
                self._busy.discard("send")

    def _released(self) -> None:
        with self.changed:
            self._underway -= 1
            self.changed.notify_all()

    def receive(self, *, timeout_s: float) -> Message:
        """Take the oldest message of the inbox."""
        deadline = Deadline(timeout_s)
        with self.changed:
            self._enter("receive")
            try:
                self.changed.wait_for(lambda: self.broken or self._inbox, deadline.left_s())
                if self._closed or (self.broken and not self._inbox):
                    raise self._break()
                if not self._inbox:
                    raise DeadlineError("no message came in time")
                return self._inbox.popleft()
            finally:
                self._busy.discard("receive")

    def _enter(self, what: str) -> None:
        if what in self._busy:
            raise MisuseError(f"two threads {what} on one channel", hint="give each its own channel")
        self._busy.add(what)

    def _break(self) -> TransportError:
        mine = self._closed
        self._closed = True
        self.changed.notify_all()
        self._transport._disown(self)
        return TransportError("the channel is closed" if mine else "the peer closed the channel")

    def close(self) -> None:
        """Close this end; the peer's next call notices."""
        with self.changed:
            self._break()
            for remote in self._imported:
                remote.close()
