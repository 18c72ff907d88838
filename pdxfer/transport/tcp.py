"""TCP through ZMQ, for agents on different hosts, in different network namespaces or of different users.

In come an address and options; out go channels (``tcp_channel.py``) that one I/O thread per transport serves
(``tcp_io.py``). Addresses are ``tcp://host:port``, with an IPv6 host in brackets, and ``/key`` (64 hexadecimal digits)
after it where the listener speaks CURVE (``curve.py``).

Trust: ZMQ's NULL mechanism authenticates nobody. So other hosts' addresses are bound and connected to with CURVE only,
or with ``insecure``; every frame is bounded and checked before it is used, and whoever breaks the rules loses that one
connection. What a peer may fetch is decided above (tickets and sessions), never by having reached the port. Who is let
in (with NULL: who reaches the port) can make ZMQ collect one message of many frames without limit before we see it.
"""

from __future__ import annotations

import concurrent.futures
import ipaddress
import logging
import re
import socket
import threading
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import ClassVar

import zmq

from pdxfer.errors import DeadlineError, ExhaustedError, MisuseError, PdxferError, TransportError
from pdxfer.transport.base import (
    MAX_HEADER_BYTES,
    Address,
    Channel,
    Deadline,
    Listener,
    LocalMemoryTransport,
    format_address,
    parse_address,
)
from pdxfer.transport.curve import Curve
from pdxfer.transport.regions import parse_fields
from pdxfer.transport.tcp_channel import CREDITS, HELLO, MAGIC, READY, REFUSE, VERSION, WELCOME, TcpChannel, pack
from pdxfer.transport.tcp_io import ConnectedLine, Frames, Hub, IoThread, Line, Secure, SocketOptions

__all__ = ["TcpTransport", "join_host_port", "read_hello", "read_welcome", "split_host_port"]

_log = logging.getLogger(__name__)
_WAITING_MAX = 128  # connections that said hello and wait for accept
_READY_S = 5.0


class TcpTransport(LocalMemoryTransport):
    """ZMQ sockets behind one thread.

    Args:
        curve: listen with CURVE, and connect to nobody without it: only peers that ``admit`` was told of come in.
        curve_keys: public and secret key, which transports of one agent share (``curve.new_keys``); else a new pair.
        insecure: let ``listen`` and ``connect`` use addresses of other hosts without, with nobody authenticated.
        contact_host: the host that peers should connect to when it is not the one bound to (a wildcard, a forwarded
            port); the port stays.
        max_payload_bytes: the longest payload this side takes; longer ones end the connection.
        heartbeat_s, dead_after_s: a peer that is silent for so long is taken for dead. It must be longer than one
            payload takes on the wire.
    """

    scheme: ClassVar[str] = "tcp"
    can_export: ClassVar[bool] = False
    magic: ClassVar[str] = MAGIC  # both sides must say the same

    def __init__(
        self,
        *,
        curve: bool = False,
        curve_keys: tuple[bytes, bytes] | None = None,
        insecure: bool = False,
        contact_host: str = "",
        max_payload_bytes: int = 64 << 20,
        heartbeat_s: float = 1.0,
        dead_after_s: float = 5.0,
    ) -> None:
        super().__init__()
        if not 1 <= max_payload_bytes <= 1 << 31 or not 0.01 <= heartbeat_s < dead_after_s <= 600:
            raise MisuseError(
                f"max_payload_bytes {max_payload_bytes}, heartbeat_s {heartbeat_s}, dead_after_s {dead_after_s} "
                "are out of bounds"
            )
        self.insecure, self.contact_host, self.max_payload_bytes = insecure, contact_host, max_payload_bytes
        self.options = SocketOptions(
            max_frame_bytes=max(max_payload_bytes, MAX_HEADER_BYTES),
            queue_messages=4 * CREDITS,
            heartbeat_s=heartbeat_s,
            dead_after_s=dead_after_s,
        )
        try:
            self.io = IoThread(self.magic)
        except (OSError, zmq.ZMQError) as error:
            raise ExhaustedError(f"no thread or file descriptor for a {self.scheme} transport: {error}") from error
        self._only_curve, self._curve = curve, Curve(self.io, curve_keys) if curve or zmq.has("curve") else None

    @property
    def own_curve(self) -> Curve | None:
        """What listeners of this transport use; None without CURVE."""
        return self._curve if self._only_curve else None

    @property
    def public_key(self) -> bytes:
        """What listeners with CURVE must be told of, to let this transport in."""
        return self._curve.public_key if self._curve else b""

    def admit(self, peer: str, public_key: bytes) -> None:
        """Let a peer's transport in."""
        if self._curve:
            self._curve.admit(peer, public_key)

    def listen(self, address: str = "") -> Listener:
        """Bind; "" is a free loopback port, port 0 a free one of that host."""
        self._check_usable()
        host, port = split_host_port(parse_address(address or f"{self.scheme}://127.0.0.1:0").expect(self.scheme))
        resolved = self._check_bind(host)
        return self._adopt(TcpListener(self, resolved, port))

    def _check_bind(self, host: str) -> str:
        resolved = "0.0.0.0" if host == "*" else _resolve(host)  # noqa: S104 - refused two lines below
        ip = ipaddress.ip_address(resolved.partition("%")[0])
        if not (ip.is_loopback or self._only_curve or self.insecure):
            raise MisuseError(
                f"{self.scheme}://{host} can be reached from other hosts, and nothing authenticates them",
                hint="bind to loopback, or set the agent's tls; insecure=True opens it to everybody who can reach it",
            )
        if ip.is_unspecified and not self.contact_host:
            raise MisuseError(
                f"peers can't connect to {host!r}", hint="say which host they shall use: contact_host=..."
            )
        if not (ip.is_loopback or self._only_curve):
            self.insecure_listeners += 1
            _log.warning("INSECURE: whoever can connect to %s://%s can talk to the data plane", self.scheme, host)
        return resolved

    def connect(self, address: str, *, timeout_s: float) -> Channel:
        """Connect, say hello, wait to be welcomed."""
        self._check_usable()
        deadline = Deadline(timeout_s)
        location, key = _split_key(parse_address(address).expect(self.scheme))
        host, port = split_host_port(location)
        resolved = _resolve(host)
        local = not self._only_curve and ipaddress.ip_address(resolved.partition("%")[0]).is_loopback
        if not (key or local or self.insecure):
            raise MisuseError(
                f"{address} has no key, and nothing would say who answers there",
                hint="set the peer's tls, too; insecure=True connects to anybody",
            )
        secure: Secure | None = None
        if key and self._curve is not None:
            secure = partial(self._curve.secure_connection, server_key=key)
        elif key:
            raise MisuseError(f"{address} speaks CURVE, and this libzmq does not")
        welcomed: Future[TcpChannel] = Future()
        line = self.io.run(partial(self._begin, resolved, port, address, welcomed, secure))
        try:
            channel = welcomed.result(deadline.left_s())
        except concurrent.futures.TimeoutError:
            self.io.run(lambda: line.end("gave up"))
            raise DeadlineError(f"{address} did not accept in time") from None
        try:
            self._settle(channel, deadline, connected=True)
        except BaseException:
            channel.close()
            raise
        return self._adopt(channel)

    def make_channel(self, line: Line, peer_max_bytes: int) -> TcpChannel:
        """Return this end of a channel. On the I/O thread."""
        return TcpChannel(self, self.io, line, peer_max_bytes)

    def _settle(self, channel: TcpChannel, deadline: Deadline, *, connected: bool) -> None:
        """What else both ends have to agree on before a channel is handed out: nothing, over tcp alone."""

    def _begin(self, host: str, port: int, address: str, welcomed: Future[TcpChannel], secure: Secure | None) -> Line:
        """On the I/O thread: connect and say hello."""
        endpoint, options = f"tcp://{join_host_port(host, port)}", {} if secure is None else {"secure": secure}
        try:
            line = ConnectedLine(self.io, endpoint, self.options, ipv6=":" in host, **options)
        except zmq.ZMQError as error:
            ExhaustedError.check(error, f"can't connect to {address}")
            raise TransportError(f"can't connect to {address}: {error}") from error

        def on_end(why: str) -> None:
            if not welcomed.done():
                hint = "is an agent listening there, and does it speak this version?"
                welcomed.set_exception(TransportError(f"can't connect to {address}: {why}", hint=hint))

        def on_message(frames: Frames) -> None:
            try:
                max_bytes = read_welcome(frames, self.magic)
            except TransportError as error:
                line.end(error.message)
                return
            welcomed.set_result(self.make_channel(line, max_bytes))
            line.post([pack(READY)])

        line.on_end, line.on_message = on_end, on_message
        line.post([pack(HELLO, self.magic, VERSION, self.max_payload_bytes)])
        return line

    def close(self) -> None:
        """Say goodbye to all peers, then close everything and end the thread."""
        with self._owned_lock:
            channels = [c for c in self._owned if isinstance(c, TcpChannel)]
        for channel in channels:
            channel.say_goodbye()  # all at once, so that the waits for answers overlap
        super().close()
        self.io.close()


class TcpListener(Listener):
    """A hub, and the lines that said hello to it and wait for ``accept``."""

    def __init__(self, transport: TcpTransport, host: str, port: int) -> None:
        self._transport, self._io = transport, transport.io
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Line, int]] = deque()
        self._closed = False
        try:
            self._hub = self._io.run(lambda: self._bind(host, port))
        except zmq.ZMQError as error:
            where = f"{transport.scheme}://{join_host_port(host, port)}"
            raise TransportError(f"can't listen at {where}: {error}") from error
        bound_host, bound_port = split_host_port(parse_address(self._hub.bound).location)
        location = join_host_port(transport.contact_host or bound_host, bound_port)
        if transport.own_curve is not None:
            location += f"/{transport.public_key.hex()}"
        self._contact_address = format_address(Address(scheme=transport.scheme, location=location))

    def _bind(self, host: str, port: int) -> Hub:
        endpoint = f"tcp://{join_host_port(host, port)}"
        curve, secure = self._transport.own_curve, {}
        if curve is not None:
            secure["secure"] = curve.secure_listener
        return Hub(self._io, endpoint, self._transport.options, ipv6=":" in host, on_first=self._on_hello, **secure)

    @property
    def contact_address(self) -> str:
        """``scheme://host:port``, with the real port."""
        return self._contact_address

    def _on_hello(self, line: Line, frames: Frames) -> None:
        """On the I/O thread: queue who says hello properly, refuse everyone else."""
        line.on_message = lambda _: line.end("the peer didn't wait for its welcome")
        try:
            max_bytes = read_hello(frames, self._transport.magic)
        except TransportError:
            self._refuse(line, f"this side speaks {self._transport.magic} {VERSION}")
            return
        with self._changed:
            self._waiting = deque(entry for entry in self._waiting if entry[0].alive)
            room = len(self._waiting) < _WAITING_MAX and not self._closed
            if room:
                self._waiting.append((line, max_bytes))
                self._changed.notify_all()
        if not room:
            self._refuse(line, "the listener is closed" if self._closed else "too many peers wait to be accepted")

    def _refuse(self, line: Line, why: str) -> None:
        # The peer hangs up when it has read this; one that doesn't has a line without rights, until it sends again.
        line.post([pack(REFUSE, why)])

    def accept(self, timeout_s: float) -> Channel:
        """Welcome the oldest peer that waits; skip those that are gone. One that is slow may add up to a second."""
        deadline = Deadline(timeout_s)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting, deadline.left_s())
                if self._closed:
                    raise TransportError(f"{self.contact_address} is closed")
                if not self._waiting:
                    raise DeadlineError(f"nobody connected to {self.contact_address} in time")
                line, max_bytes = self._waiting.popleft()
            channel = self._try_welcome(line, max_bytes, deadline)
            if channel is not None and self._settled(channel, deadline):
                return self._transport._adopt(channel)

    def _settled(self, channel: TcpChannel, deadline: Deadline) -> bool:
        try:
            self._transport._settle(channel, Deadline(max(deadline.left_s(_READY_S), 1.0)), connected=False)
        except PdxferError:
            channel.close()
            return False
        return True

    def _try_welcome(self, line: Line, max_bytes: int, deadline: Deadline) -> TcpChannel | None:
        ready: Future[TcpChannel | None] = Future()

        def on_ready(frames: Frames) -> None:
            try:
                (kind,) = parse_fields(_only(frames), "the answer to the welcome", int)
            except TransportError:
                kind = 0
            if kind == READY:
                ready.set_result(self._transport.make_channel(line, max_bytes))
            else:
                line.end("the peer didn't answer its welcome")

        def on_end(_: str) -> None:
            if not ready.done():
                ready.set_result(None)

        def welcome() -> None:
            line.on_message, line.on_end = on_ready, on_end
            if line.alive:
                line.post([pack(WELCOME, self._transport.magic, VERSION, self._transport.max_payload_bytes)])
            else:
                on_end("gone")

        self._io.run(welcome)
        try:
            return ready.result(max(deadline.left_s(_READY_S), 1.0))
        except concurrent.futures.TimeoutError:
            self._io.run(lambda: line.end("the peer didn't answer its welcome"))
            return None

    def close(self) -> None:
        """Send away who waits and who comes. The port is free once the accepted channels are closed, too."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()

        def stop() -> None:
            for line, _ in waiting:
                line.end("the listener is closed")
            self._hub.stop_listening()

        self._io.call(stop)
        self._transport._disown(self)


# -- frames and addresses ------------------------------------------------------------------------


def _only(frames: Frames) -> memoryview:
    if len(frames) != 1 or len(frames[0]) > 256:
        raise TransportError("the peer's introduction is too long")
    return frames[0].buffer


def read_hello(frames: Frames, own_magic: str) -> int:
    """The longest payload that the peer takes, by its hello; raises TransportError for anything else."""
    kind, magic, version, max_bytes = parse_fields(_only(frames), "the hello", int, str, int, int)
    if (kind, magic, version) != (HELLO, own_magic, VERSION) or not 1 <= max_bytes <= 1 << 31:
        raise TransportError(f"the peer speaks {magic[:32]} {version}")
    return int(max_bytes)


def read_welcome(frames: Frames, own_magic: str) -> int:
    """The same by its welcome; raises TransportError, with its reason when it refuses."""
    first = _only(frames)
    if first[:2] == pack(REFUSE, "")[:2]:
        raise TransportError(f"refused: {parse_fields(first, 'the refusal', int, str)[1]}")
    kind, magic, version, max_bytes = parse_fields(first, "the welcome", int, str, int, int)
    if (kind, magic, version) != (WELCOME, own_magic, VERSION) or not 1 <= max_bytes <= 1 << 31:
        raise TransportError(f"the peer speaks {magic[:32]} {version}")
    return int(max_bytes)


def split_host_port(location: str) -> tuple[str, int]:
    """Split ``host:port`` or ``[v6]:port``; raises MisuseError. ``join_host_port`` is the inverse."""
    host, colon, port = location.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise MisuseError(
            f"{location!r} has no host and port", hint="write e.g. tcp://127.0.0.1:7000 or tcp://[::1]:7000"
        )
    return host, int(port)


def _split_key(location: str) -> tuple[str, bytes]:
    """Take the listener's public key off a location; b"" when there is none."""
    place, slash, key = location.partition("/")
    if slash and not re.fullmatch("[0-9a-f]{64}", key):
        raise MisuseError(f"tcp://{location[:128]} has no key after its port", hint="write tcp://host:port/key")
    return place, bytes.fromhex(key)


def join_host_port(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _resolve(host: str) -> str:
    """Return a numeric address, so that what was checked is what is used."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise TransportError(f"the host name {host!r} can't be resolved: {error}") from error
    return str(found[0][4][0])
