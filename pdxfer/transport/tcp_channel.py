"""One channel over ZMQ: messages, credits, goodbye.

In come headers and any memory; out they come at the peer in memory that ZMQ received into. Frames of a message::

    HELLO    [1, magic, version, max payload bytes]     connecting side, first
    WELCOME  [2, magic, version, max payload bytes]     listening side, when accept() takes it
    READY    [3]                                        connecting side; now both have a channel
    REFUSE   [4, reason]                                instead of WELCOME
    DATA     [5] + header (+ payload)
    GRANT    [6, count]                                 the receiver is finished with so many messages
    BYE      [7]                                        nothing follows; the other side hangs up

A sender begins with CREDITS and spends one for each DATA; the receiver gives it back when the message is released
(received, if it has no payload). So neither ZMQ's queues nor our inbox ever hold more, whatever the threads above do.

Two sides live here: methods for the caller's threads, and ``_on_...`` callbacks on the I/O thread. ``_changed`` guards
what they share.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import msgpack
import zmq

from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.transport.base import (
    MAX_HEADER_BYTES,
    WINDOW_MESSAGES,
    Channel,
    Deadline,
    DoneSending,
    Message,
    Sending,
    check_header,
)
from pdxfer.transport.regions import Closable, Region, parse_fields
from pdxfer.transport.runs import byte_view
from pdxfer.transport.tcp_io import Frames, IoThread, Line

__all__ = [
    "BYE", "CREDITS", "DATA", "GRANT", "HELLO", "MAGIC", "READY", "REFUSE", "VERSION", "WELCOME", "TcpChannel",
    "TcpSending", "pack",
]  # fmt: skip

MAGIC, VERSION = "pdxfer-tcp", 1
HELLO, WELCOME, READY, REFUSE, DATA, GRANT, BYE = range(1, 8)

_GRANT_BATCH = 8
#: More than the window by what the receiver may hold back before it is worth a GRANT.
CREDITS = WINDOW_MESSAGES + _GRANT_BATCH

_COPY_BYTES = 64 << 10  # below, copying is cheaper than ZMQ's bookkeeping for borrowed memory
_GOODBYE_S = 0.5  # how long close() waits for the peer to hang up, so that what was sent before arrives
_FREE_S = 1.0  # how long close() waits for ZMQ to let go of payloads
_TRACKER_SLICE_S = 0.05
_EMPTY = memoryview(b"")


def pack(*fields: Any) -> bytes:
    """Return the first frame of a message; ``parse_fields`` reads it."""
    packed: bytes = msgpack.packb(list(fields))
    return packed


class TcpSending(Sending):
    """One payload that ZMQ borrowed. Done when its bytes are with the kernel (or were dropped with the channel)."""

    def __init__(self, channel: TcpChannel, tracker: zmq.MessageTracker) -> None:
        self._channel, self._tracker = channel, tracker

    @property
    def done(self) -> bool:
        """Whether ZMQ gave the memory back."""
        return bool(self._tracker.done)

    def wait(self, timeout_s: float) -> None:
        """Wait until ZMQ gave the memory back."""
        deadline = Deadline(timeout_s)
        while True:
            # In slices, for a tracker can't be told that the channel died.
            with suppress(zmq.NotDone):
                self._tracker.wait(deadline.left_s(_TRACKER_SLICE_S))
                return
            if self._channel.ended:
                raise TransportError("the channel closed before the message was sent")
            deadline.check("the message to be sent")


class TcpOwner(Protocol):
    """What a channel needs from its transport."""

    def _disown(self, thing: Closable) -> None: ...


class TcpChannel(Channel):
    """See the module. Made on the I/O thread, from a line whose peer said who it is."""

    def __init__(self, transport: TcpOwner, io: IoThread, line: Line, peer_max_bytes: int) -> None:
        self._transport, self._io, self._line, self._peer_max_bytes = transport, io, line, peer_max_bytes
        self._sender, self._receiver = threading.Lock(), threading.Lock()
        self._changed = threading.Condition()
        self._closed = False
        self._broken = ""  # why the line ended
        self._line_ended = threading.Event()
        self._credits = CREDITS
        self._borrowed: deque[zmq.MessageTracker] = deque()
        self._inbox: deque[Any] = deque()  # Messages
        self._held = 0  # messages received and not granted again
        self._owed = 0  # of these, finished with
        line.on_message, line.on_end = self._on_message, self._on_end

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    @property
    def ended(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closed or bool(self._broken)

    # The caller's threads.

    @contextmanager
    def _alone(self, lock: threading.Lock, verb: str) -> Iterator[None]:
        if not lock.acquire(blocking=False):
            raise MisuseError(f"two threads {verb} on one channel", hint="give each its own channel")
        try:
            yield
        except TransportError:
            self.close()
            raise
        finally:
            lock.release()

    def send_all(self, header: bytes, payload: memoryview | None = None, *, timeout_s: float) -> Sending:
        """Spend a credit and hand the frames to the I/O thread; big payloads are borrowed, small ones copied."""
        deadline = Deadline(timeout_s)
        check_header(header)
        view = byte_view(_EMPTY if payload is None else payload, "payload")
        self._check_taken(view.nbytes)
        with self._alone(self._sender, "send"):
            self._spend_credit(deadline)
            frames: list[bytes | zmq.Frame] = [pack(DATA), header]
            sending: Sending = DoneSending()
            if view.nbytes >= _COPY_BYTES:
                frame = zmq.Frame(view, track=True, copy=False)
                frames.append(frame)
                sending = TcpSending(self, self._borrow(frame))
            elif view.nbytes:
                frames.append(bytes(view))
            self._io.call(lambda: self._line.post(frames))
            return sending

    def _check_taken(self, nbytes: int) -> None:
        if nbytes > self._peer_max_bytes:
            raise MisuseError(
                f"the payload has {nbytes} bytes; the peer takes {self._peer_max_bytes}",
                hint="send smaller messages, or raise max_payload_bytes of the peer's transport",
            )

    def _spend_credit(self, deadline: Deadline) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.ended or self._credits, deadline.left_s())
            if self.ended:
                raise TransportError(self._why())
            if not self._credits:
                raise DeadlineError("the peer holds all the messages it may, and released none in time")
            self._credits -= 1

    def _borrow(self, frame: zmq.Frame) -> zmq.MessageTracker:
        while self._borrowed and self._borrowed[0].done:
            self._borrowed.popleft()
        tracker: zmq.MessageTracker = frame.tracker
        self._borrowed.append(tracker)
        return tracker

    def _why(self) -> str:
        return "the channel is closed" if self._closed else self._broken

    def receive(self, *, timeout_s: float) -> Message:
        """Take the oldest message of the inbox."""
        deadline = Deadline(timeout_s)
        with self._alone(self._receiver, "receive"):
            with self._changed:
                self._changed.wait_for(lambda: self._has_next() or self.ended, deadline.left_s())
                if self._closed or (self._broken and not self._has_next()):
                    raise TransportError(self._why())
                if not self._has_next():
                    raise DeadlineError("no message came in time")
                message = self._take_next()
            if not message.payload.nbytes:
                self._give_back()
            return message

    def _has_next(self) -> bool:
        return bool(self._inbox)

    def _take_next(self) -> Message:
        message: Message = self._inbox.popleft()
        return message

    def export_region(self, region: Region, header: bytes, *, timeout_s: float) -> None:
        """Always MisuseError: no memory can be read over ZMQ."""
        raise MisuseError("this transport can't export regions", hint="send the bytes as payload (packed mode)")

    def _give_back(self) -> None:
        with self._changed:
            self._owed += 1
            if self._owed < _GRANT_BATCH:
                return
            count, self._owed = self._owed, 0
            self._held -= count
        self._io.call(lambda: self._line.post([pack(GRANT, count)]))

    def close(self) -> None:
        """Say goodbye, give the peer a moment to take what was sent before it, hang up."""
        self.say_goodbye()
        self._line_ended.wait(_GOODBYE_S)
        self._io.call(lambda: self._line.end("closed here"))
        self._line_ended.wait(_FREE_S)
        deadline = Deadline(_FREE_S)
        for tracker in list(self._borrowed):  # afterwards nobody reads the payloads' memory
            with suppress(zmq.NotDone):
                tracker.wait(deadline.left_s())
        self._transport._disown(self)

    def say_goodbye(self) -> None:
        """The first half of ``close``: nothing goes out after it."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            unread, self._inbox = list(self._inbox), deque()
            self._changed.notify_all()
        self._discard(unread)
        self._io.call(lambda: self._line.post([pack(BYE)]))

    def _discard(self, messages: list[Any]) -> None:
        """Nobody will receive these: nothing to do, for the memory of what ZMQ received goes with them."""

    # The I/O thread.

    def _on_end(self, why: str) -> None:
        with self._changed:
            self._broken = why
            self._changed.notify_all()
        self._line_ended.set()

    def _on_message(self, frames: Frames) -> None:
        try:
            self._read(frames)
        except TransportError as error:
            self._line.end(error.message)

    def _read(self, frames: Frames) -> None:
        first = frames[0].buffer
        if len(first) > 16:
            raise TransportError("the peer sent a message of an unknown kind")
        if first == _DATA and 2 <= len(frames) <= 3:
            self._take(frames)
        elif first == _BYE:
            self._on_goodbye()
        elif len(frames) == 1:
            kind, count = parse_fields(first, "a message", int, int)
            if kind != GRANT or not 1 <= count <= CREDITS - self._credits:
                raise TransportError("the peer gave back messages that it was not sent")
            with self._changed:
                self._credits += count
                self._changed.notify_all()
        else:
            raise TransportError("the peer sent a message of an unknown kind")

    def _on_goodbye(self) -> None:
        self._line.end("the peer closed the channel")

    def _take(self, frames: Frames) -> None:
        header = frames[1].bytes if len(frames[1]) <= MAX_HEADER_BYTES else None
        if header is None or self._held >= CREDITS:
            raise TransportError("the peer sent a header that is too long, or more messages than it may")
        payload = memoryview(frames[2].buffer) if len(frames) == 3 else _EMPTY
        release: Callable[[], None] | None = self._give_back if payload.nbytes else None
        self._enqueue(Message(header, payload, on_release=release))

    def _enqueue(self, message: Any) -> None:
        """Count a message against the credits and put it, or what will become it, in its place."""
        with self._changed:
            self._held += 1
            if not self._closed:
                self._inbox.append(message)
                self._changed.notify_all()


_DATA, _BYE = pack(DATA), pack(BYE)
