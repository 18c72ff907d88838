"""The one thread that touches ZMQ: sockets, their monitors, and the connections behind them.

In come calls from other threads (``IoThread.call``); out go callbacks on this thread, one per message and one when a
connection ends. This file knows frames and connections, not what the frames mean.

::

    channel's threads ── call(post frames) ──▶ IoThread ──▶ DEALER (one per connected channel)   ConnectedLine
                      ◀── on_message, on_end ──        ◀──▶ ROUTER (one per listener)            AcceptedLine, many

A ROUTER can't hang up on one peer, and says who disconnected only by file descriptor. So an AcceptedLine keeps a
duplicate of its connection's descriptor, by which it is told apart and shut down. It is taken when the connection
says hello, between two readings of the monitor: ZMQ reports a disconnection before it closes the number, so a number
that was not reported is still the same connection.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from pdxfer.errors import TransportError

__all__ = ["AcceptedLine", "ConnectedLine", "Frames", "Hub", "IoThread", "Line", "Secure", "SocketOptions"]

Frames = list[zmq.Frame]
Secure = Callable[["zmq.Socket[bytes]"], None]
_Result = TypeVar("_Result")

_log = logging.getLogger(__name__)

_BATCH = 32  # messages read from one socket before the others get their turn
_SRCFD = 2  # ZMQ_SRCFD, a message property that pyzmq has no name for
_FAILED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketOptions:
    """What every socket is set to; all bounds of ZMQ that have no default one."""

    max_frame_bytes: int
    queue_messages: int
    heartbeat_s: float
    dead_after_s: float

    def apply(self, sock: zmq.Socket[bytes], *, ipv6: bool) -> None:
        """Set the options; before bind or connect."""
        sock.linger = 0
        sock.ipv6 = ipv6
        sock.maxmsgsize = self.max_frame_bytes
        sock.sndhwm = sock.rcvhwm = self.queue_messages
        sock.reconnect_ivl = -1  # a channel that broke stays broken
        sock.handshake_ivl = round(self.dead_after_s * 1000)
        # Answered by ZMQ's own thread: a peer that is busy in Python is not taken for dead.
        sock.heartbeat_ivl = round(self.heartbeat_s * 1000)
        sock.heartbeat_timeout = sock.heartbeat_ttl = round(self.dead_after_s * 1000)


class IoThread:
    """Runs calls and socket handlers, one after the other, until ``close``."""

    def __init__(self, name: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self._calls: deque[Callable[[], None]] = deque()
        self._handlers: dict[Any, Callable[[], None]] = {}
        self.lines: weakref.WeakSet[Line] = weakref.WeakSet()
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._wake, zmq.POLLIN)
        self._lock = threading.Lock()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], None]) -> bool:
        """Have ``function`` run on the thread, after all calls before it; False when the thread has ended."""
        with self._lock:
            if self._stopping:
                return False
            self._calls.append(function)
            os.eventfd_write(self._wake, 1)
        return True

    def run(self, function: Callable[[], _Result]) -> _Result:
        """Run ``function`` on the thread and return its result, or raise what it raised."""
        future: Future[_Result] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - handed to the caller, whose fault it is
                future.set_exception(error)

        if not self.call(run):
            raise TransportError("the transport is closed")
        return future.result()

    def watch(self, sock: zmq.Socket[bytes], handler: Callable[[], None]) -> None:
        """Call ``handler`` whenever ``sock`` is readable. On the thread only."""
        self._handlers[sock] = handler
        self._poller.register(sock, zmq.POLLIN)

    def drop(self, sock: zmq.Socket[bytes]) -> None:
        """Stop watching and close, at once. On the thread only."""
        if self._handlers.pop(sock, None) is not None:
            self._poller.unregister(sock)
        sock.close(0)

    def _run(self) -> None:
        while True:
            ready = self._poller.poll()
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            while self._calls:
                self._guard(self._calls.popleft())
            if self._stopping and not self._calls:
                return
            for sock, _ in ready:
                handler = self._handlers.get(sock)  # an earlier handler may have dropped it
                if handler is not None:
                    self._guard(handler)

    def _guard(self, function: Callable[[], None]) -> None:
        """Our own fault must not leave other threads waiting for a thread that died."""
        try:
            function()
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody else could report it
            _log.exception("the tcp transport's I/O thread failed; its channels are closed")
            for line in list(self.lines):
                line.end(f"the I/O thread failed: {error!r}")

    def _end_lines(self) -> None:
        for line in list(self.lines):
            line.end("the transport is closed")

    def close(self) -> None:
        """Run what was called, end all lines and the thread, then close what is left of the sockets."""
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self._calls.append(self._end_lines)
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)
        for sock in list(self._handlers):
            sock.close(0)
        self.context.term()


# -- lines ---------------------------------------------------------------------------------------


class Line(ABC):
    """One connection. Its methods and callbacks run on the I/O thread only.

    Attributes:
        on_message: called with the frames of each message.
        on_end: called once, with the reason, when the connection is gone; nothing follows.
        alive: False from then on.
    """

    def __init__(self, io: IoThread) -> None:
        self._io = io
        io.lines.add(self)
        self.alive = True
        self.on_message: Callable[[Frames], None] = _ignore
        self.on_end: Callable[[str], None] = _ignore

    def post(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        """Send one message; ends the line when that is impossible. Does nothing once it ended."""
        if self.alive:
            try:
                self._send(frames)
            except zmq.Again:
                self.end("the peer grants more messages than it takes")
            except zmq.ZMQError as error:
                self.end("the peer is gone" if error.errno == zmq.EHOSTUNREACH else f"ZMQ failed: {error}")

    def end(self, why: str) -> None:
        """Hang up, dropping what is queued, and say so."""
        if self.alive:
            self.alive = False
            self._hang_up()
            self.on_end(why)

    def deliver(self, frames: Frames) -> None:
        """Pass one message on."""
        if self.alive and frames:
            self.on_message(frames)

    @abstractmethod
    def _send(self, frames: Sequence[bytes | zmq.Frame]) -> None: ...

    @abstractmethod
    def _hang_up(self) -> None: ...


def _readable(sock: zmq.Socket[bytes]) -> bool:
    return bool(int(sock.get(zmq.EVENTS)) & zmq.POLLIN)


def _ignore(_: object) -> None:
    """The callback of a line that nobody listens to."""


def _plain(_: object) -> None:
    """What ``secure`` does where nobody is asked who they are."""


class ConnectedLine(Line):
    """The connecting end: a DEALER socket of its own."""

    def __init__(
        self, io: IoThread, endpoint: str, options: SocketOptions, *, ipv6: bool, secure: Secure = _plain
    ) -> None:
        super().__init__(io)
        self._socket: zmq.Socket[bytes] = io.context.socket(zmq.DEALER)
        options.apply(self._socket, ipv6=ipv6)
        secure(self._socket)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_FAILED)
        io.watch(self._socket, self._read)
        io.watch(self._monitor, self._read_monitor)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError:
            self._hang_up()
            raise

    def _send(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def _hang_up(self) -> None:
        self._socket.disable_monitor()
        self._io.drop(self._monitor)
        self._io.drop(self._socket)

    def _read(self) -> None:
        for _ in range(_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return  # nothing left, or the line was ended by what it delivered
            self.deliver(frames)

    def _read_monitor(self) -> None:
        recv_monitor_message(self._monitor, zmq.NOBLOCK)
        while self.alive and _readable(self._socket):
            self._read()  # what came before the end is delivered before the end
        self.end("the peer is gone")


class AcceptedLine(Line):
    """The accepting end: one identity on the listener's ROUTER."""

    def __init__(self, io: IoThread, hub: Hub, identity: bytes, connection: socket.socket) -> None:
        super().__init__(io)
        self._hub, self.identity, self._connection = hub, identity, connection

    def _send(self, frames: Sequence[bytes | zmq.Frame]) -> None:
        self._hub.socket.send_multipart([self.identity, *frames], zmq.NOBLOCK, copy=False)

    def _hang_up(self) -> None:
        with suppress(OSError):  # the peer may have gone first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._hub.forget(self)


class Hub:
    """A listener's ROUTER and the lines that came by it. On the I/O thread only.

    Args:
        endpoint: ZMQ's, port 0 for a free one; ``bound`` is what it became.
        on_first: called with a new line and its first message; it sets the line's callbacks, or ends it.
        secure: called with the socket before it is bound.
    """

    def __init__(
        self,
        io: IoThread,
        endpoint: str,
        options: SocketOptions,
        *,
        ipv6: bool,
        on_first: Callable[[Line, Frames], None],
        secure: Secure = _plain,
    ) -> None:
        self._io, self._on_first = io, on_first
        self._lines: dict[bytes, AcceptedLine] = {}
        self._by_fd: dict[int, AcceptedLine] = {}
        self._listening = True
        self.socket: zmq.Socket[bytes] = io.context.socket(zmq.ROUTER)
        options.apply(self.socket, ipv6=ipv6)
        secure(self.socket)
        self.socket.router_mandatory = True
        self._monitor: zmq.Socket[bytes] = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        io.watch(self.socket, self._read)
        io.watch(self._monitor, self._read_monitor)
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError:
            self._close()
            raise
        self.bound = self.socket.last_endpoint.rstrip(b"\0").decode()

    def stop_listening(self) -> None:
        """Close with the last line. Until then ``on_first`` must refuse: unbinding would cut accepted lines."""
        self._listening = False
        self._close_if_idle()

    def forget(self, line: AcceptedLine) -> None:
        """Drop a line that has ended."""
        self._lines.pop(line.identity, None)
        for fd in [fd for fd, other in self._by_fd.items() if other is line]:
            del self._by_fd[fd]
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._listening and not self._lines:
            self._close()

    def _close(self) -> None:
        self.socket.disable_monitor()
        self._io.drop(self._monitor)
        self._io.drop(self.socket)

    def _read(self) -> None:
        for _ in range(_BATCH):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.ZMQError:
                return  # nothing left, or closed with its last line
            line = self._lines.get(identity.bytes)
            if line is not None:
                line.deliver(frames)
            elif frames:
                self._greet(identity.bytes, frames)

    def _read_monitor(self) -> None:
        while not self.socket.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.ZMQError:
                return
            line = self._by_fd.get(int(event["value"]))
            if line is not None:
                self._read_rest_of(line)
                line.end("the peer is gone")

    def _read_rest_of(self, line: AcceptedLine) -> None:
        """Deliver what came before the end; a new connection can't have taken the number yet, see the module."""
        while line.alive and not self.socket.closed and _readable(self.socket):
            self._read()

    def _greet(self, identity: bytes, frames: Frames) -> None:
        """First message of a connection: find its file descriptor and make it a line."""
        try:
            fd = int(frames[0].get(_SRCFD))
        except zmq.ZMQError:
            return  # garbage that ZMQ took for its oldest protocol, in which connections have no properties
        self._read_monitor()  # so that an older connection with this number is gone from our books
        try:
            connection = socket.socket(fileno=os.dup(fd))
        except OSError:
            return  # it is gone already
        line = AcceptedLine(self._io, self, identity, connection)
        older, self._by_fd[fd] = self._by_fd.get(fd), line
        if older is not None:
            older.end("the peer is gone")
        self._lines[identity] = line
        self._read_monitor()  # ends the line if the number was free between the two readings
        if line.alive:
            self._on_first(line, frames)
