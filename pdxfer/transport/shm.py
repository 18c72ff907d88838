"""Shared memory between processes of one user on one host: payloads don't move, only references to them do.

In come an address and memory; out go channels (``shm_channel.py``) and regions (memfds, or the caller's own
memory that a peer may read, ``vm.py``). Addresses are ``shm:///path/of/a/unix/socket``.

Trust: the socket lies in a directory that only its user can enter, and the kernel's word about the peer's user
(SO_PEERCRED) is checked by both ends before a byte of theirs is read.
"""

from __future__ import annotations

import bisect
import errno
import os
import select
import socket
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar, Literal

import msgpack
import numpy as np

from pdxfer.directory import PrivateDirectory
from pdxfer.errors import DeadlineError, ExhaustedError, MisuseError, TransportError
from pdxfer.transport.base import Address, Channel, Deadline, Listener, Transport, format_address, parse_address
from pdxfer.transport.regions import Closable, Region, parse_fields
from pdxfer.transport.runs import check_nbytes, writable_view
from pdxfer.transport.shm_channel import SharedRegion, ShmChannel, ShmRegion
from pdxfer.transport.unix import UseCount, check_peer, try_receive, try_send, wait_for

__all__ = ["ShmTransport", "answer_hello"]

_MAGIC = "pdxfer-shm"
_VERSION = 1
_SUN_PATH_BYTES = 107  # sun_path is 108 bytes with its closing zero
_HELLO_S = 5.0  # a peer that connected has so long to introduce itself
_GRACE_S = 1.0  # and so long at least, when it came at the end of accept's time
_SEND_BUFFER_BYTES = 1 << 20
_DIRECTORY_PREFIX = "pdxfer-shm-"


class ShmTransport(Transport):
    """Memfds and Unix sockets.

    Args:
        directory: where fresh sockets go; the system's temporary directory by default. Keep it short.
        readers: whom ``export_region`` of registered memory names to Yama: ``"peer"``, the one at the other end of
            that channel (the last one counts), or ``"any"`` process of this user, which several peers at a time need
            where kernel.yama.ptrace_scope is 1.
    """

    scheme: ClassVar[str] = "shm"
    can_export: ClassVar[bool] = True
    same_user: ClassVar[bool] = True

    def __init__(self, *, directory: str = "", readers: Literal["peer", "any"] = "peer") -> None:
        super().__init__()
        if readers not in ("peer", "any"):
            raise MisuseError(f"readers is {readers!r}; it can be 'peer' or 'any'")
        self.readers: str = readers
        self._directory = directory or tempfile.gettempdir()
        self._starts: list[int] = []  # addresses of the allocated regions, ascending
        self._shared: dict[int, SharedRegion] = {}

    def listen(self, address: str = "") -> Listener:
        """Listen on a fresh socket in a 0700 directory, or on the given path, whose directory must be private."""
        self._check_usable()
        if address:
            path = _path(parse_address(address).expect(self.scheme))
            _check_private(os.path.dirname(path))
            return self._adopt(ShmListener(self, path))
        try:
            return self._adopt(_listen_fresh(self, self._directory))
        except OSError as error:
            ExhaustedError.check(error, f"can't make a socket directory under {self._directory}")
            raise TransportError(
                f"can't make a socket directory under {self._directory}: {error.strerror}",
                hint="set TMPDIR, or say ShmTransport(directory=...)",
            ) from error

    def connect(self, address: str, *, timeout_s: float) -> Channel:
        """Connect to a socket of the same user."""
        self._check_usable()
        deadline = Deadline(timeout_s)
        path = _path(parse_address(address).expect(self.scheme))
        data = _new_socket()
        try:
            _connect(data, path, deadline)
            process_id = check_peer(data)
            acks = _introduce(data, deadline)
        except (OSError, TransportError, DeadlineError) as error:
            data.close()
            if isinstance(error, OSError):
                ExhaustedError.check(error, f"can't connect to {address}")
                raise TransportError(f"can't connect to {address}: {error.strerror}") from error
            raise
        return self._adopt(ShmChannel(self, data, acks, process_id))

    def allocate(self, nbytes: int, name: str = "") -> Region:
        """Return a sealed memfd, backed and mapped."""
        return self._share(nbytes, name, -1)

    def adopt(self, fd: int, nbytes: int, name: str = "") -> Region:
        """The same over a sealed memfd that another process of ours made, which we may write; ``fd`` is copied.

        Raises:
            TransportError: not a memfd, a seal is missing, or its size is not ``nbytes``.
        """
        return self._share(nbytes, name, fd)

    def _share(self, nbytes: int, name: str, fd: int) -> Region:
        self._check_usable()
        descriptor = self._describe(check_nbytes(nbytes, f"region {name!r}"), name)
        region = SharedRegion(descriptor=descriptor, on_close=self._disown, fd=fd)
        start = _address_of(region.view)
        with self._owned_lock:
            bisect.insort(self._starts, start)
            self._shared[start] = region
        return self._adopt(region)

    def register(self, buffer: Any, name: str = "") -> Region:
        """Borrow ``buffer``; peers read it with process_vm_readv once it is exported to them."""
        self._check_usable()
        view = writable_view(buffer, f"region {name!r}")
        descriptor = self._describe(view.nbytes, name, _address_of(view))
        return self._adopt(ShmRegion(view=view, descriptor=descriptor, on_close=self._disown))

    def locate(self, payload: memoryview) -> tuple[SharedRegion, int]:
        """Return the allocated region that ``payload`` lies in, and the offset there."""
        start = _address_of(payload)
        with self._owned_lock:
            i = bisect.bisect_right(self._starts, start) - 1
            region = self._shared[self._starts[i]] if i >= 0 else None
        if region is None or start + payload.nbytes > self._starts[i] + region.nbytes:
            raise MisuseError(
                "the payload doesn't lie in a region from allocate() of this shm transport",
                hint="pack it into region.view, or export registered memory with export_region",
            )
        return region, start - self._starts[i]

    def owns(self, region: Region) -> bool:
        """Whether the region is open and ours."""
        with self._owned_lock:
            return region in self._owned

    def _disown(self, thing: Closable) -> None:
        super()._disown(thing)
        if isinstance(thing, SharedRegion):
            with self._owned_lock:
                for start in [s for s, region in self._shared.items() if region is thing]:
                    del self._shared[start]
                    self._starts.remove(start)


class ShmListener(Listener):
    """A bound Unix socket, and the directory when it was made for it."""

    def __init__(self, transport: ShmTransport, path: str, cleanup: Callable[[], None] = lambda: None) -> None:
        self._transport, self._path, self._cleanup = transport, path, cleanup
        self._socket = _new_socket()
        try:
            _bind(self._socket, path)
            os.chmod(path, 0o600)
            self._socket.listen(128)
        except OSError as error:
            self._socket.close()
            ExhaustedError.check(error, f"can't listen at shm://{path}")
            raise TransportError(f"can't listen at shm://{path}: {error.strerror}") from error
        self._open = UseCount(wake=lambda: self._socket.shutdown(socket.SHUT_RDWR), release=self._socket.close)

    @property
    def contact_address(self) -> str:
        """``shm:///path``."""
        return format_address(Address(scheme="shm", location=self._path))

    def accept(self, timeout_s: float) -> Channel:
        """Take the next peer of our user that introduces itself; one that is slow may add up to a second."""
        deadline = Deadline(timeout_s)
        with self._open.use(self.contact_address):
            while True:
                if not wait_for(self._socket, select.POLLIN, deadline):
                    raise DeadlineError(f"nobody connected to {self.contact_address} in time")
                data = self._try_accept()
                if data is None:
                    continue
                channel = self._try_welcome(data, Deadline(max(_GRACE_S, deadline.left_s(_HELLO_S))))
                if channel is not None:
                    return channel

    def _try_accept(self) -> socket.socket | None:
        if self._open.closing:
            raise TransportError(f"{self.contact_address} is closed")
        try:
            return self._socket.accept()[0]
        except (BlockingIOError, ConnectionAbortedError):
            return None  # another thread took it, or it went away
        except OSError as error:
            raise TransportError(f"can't accept at {self.contact_address}: {error.strerror}") from error

    def _try_welcome(self, data: socket.socket, deadline: Deadline) -> Channel | None:
        try:
            process_id = check_peer(data)
            acks = answer_hello(data, deadline)
        except (TransportError, DeadlineError, OSError):
            data.close()
            return None
        return self._transport._adopt(ShmChannel(self._transport, data, acks, process_id))

    def close(self) -> None:
        """Remove the socket, and the directory when it was made for it."""
        if self._open.closing:
            return
        with suppress(FileNotFoundError):
            os.unlink(self._path)
        self._open.close()
        self._cleanup()
        self._transport._disown(self)


# -- introductions -------------------------------------------------------------------------------


def _introduce(data: socket.socket, deadline: Deadline) -> socket.socket:
    """The connecting side: say who we are, hand over one end of the ack sockets, wait for the answer."""
    data.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    acks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs:
            _push(data, msgpack.packb([_MAGIC, _VERSION]), [theirs.fileno()], deadline)
        answer, fds = _pull(data, deadline)
        _close_all(fds)
        magic, version, refusal = parse_fields(answer, "the welcome", str, int, str)
        if magic != _MAGIC or version != _VERSION or refusal:
            raise TransportError(f"the peer refused: {refusal or f'it speaks {magic} {version}'}")
    except BaseException:
        acks.close()
        raise
    return acks


def answer_hello(data: socket.socket, deadline: Deadline) -> socket.socket:
    """The listening side: check the introduction and answer it; returns our end of the ack sockets."""
    data.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    hello, fds = _pull(data, deadline)
    try:
        magic, version = parse_fields(hello, "the introduction", str, int)
        if magic != _MAGIC or version != _VERSION:
            _push(data, msgpack.packb([_MAGIC, _VERSION, f"this side speaks {_MAGIC} {_VERSION}"]), [], deadline)
            raise TransportError(f"the peer speaks {magic} {version}")
        if len(fds) != 1:
            raise TransportError("the introduction brings no socket")
        acks = _adopt_socket(fds.pop())
    finally:
        _close_all(fds)
    try:
        _push(data, msgpack.packb([_MAGIC, _VERSION, ""]), [], deadline)
    except BaseException:
        acks.close()
        raise
    return acks


def _adopt_socket(fd: int) -> socket.socket:
    try:
        sock = socket.socket(fileno=fd)
    except OSError as error:
        os.close(fd)
        raise TransportError("the introduction brings a file that is no socket") from error
    if (sock.family, sock.type) != (socket.AF_UNIX, socket.SOCK_SEQPACKET):
        sock.close()
        raise TransportError("the introduction brings a socket of the wrong kind")
    return sock


def _push(data: socket.socket, packet: bytes, fds: list[int], deadline: Deadline) -> None:
    while not try_send(data, [packet], fds):
        if not wait_for(data, select.POLLOUT, deadline):
            raise DeadlineError("the peer doesn't read the introduction")


def _pull(data: socket.socket, deadline: Deadline) -> tuple[bytes, list[int]]:
    buffer = bytearray(1024)
    while (packet := try_receive(data, buffer)) is None:
        if not wait_for(data, select.POLLIN, deadline):
            raise DeadlineError("the peer did not accept in time")
    if not packet[0]:
        raise TransportError("the peer closed the connection without an introduction")
    return bytes(buffer[: packet[0]]), packet[1]


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


# -- paths ---------------------------------------------------------------------------------------


def _path(location: str) -> str:
    if not location.startswith("/"):
        raise MisuseError(f"shm://{location} has no absolute path", hint="write shm:///run/pdxfer/name")
    length = len(os.fsencode(location))
    if length > _SUN_PATH_BYTES:
        raise MisuseError(
            f"the socket path has {length} bytes; Unix sockets allow {_SUN_PATH_BYTES}",
            hint="use a shorter directory (ShmTransport(directory=...) or TMPDIR)",
        )
    return location


def _check_private(directory: str) -> None:
    try:
        found = os.stat(directory)
    except OSError as error:
        raise MisuseError(f"the directory {directory} can't be used: {error.strerror}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o027:
        raise MisuseError(
            f"the directory {directory} is not private (mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid})",
            hint="make one with mode 0700 for the user that runs the agents",
        )


def _listen_fresh(transport: ShmTransport, base: str) -> ShmListener:
    directory = PrivateDirectory(_DIRECTORY_PREFIX, "s", base)
    try:
        return ShmListener(transport, _path(directory.file_path), directory.close)
    except BaseException:
        directory.close()
        raise


def _new_socket() -> socket.socket:
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise ExhaustedError(f"no file descriptor for a socket: {error.strerror}") from error


def _bind(sock: socket.socket, path: str) -> None:
    try:
        sock.bind(path)
        return
    except OSError as error:
        if error.errno != errno.EADDRINUSE or not _is_dead(path):
            raise
    os.unlink(path)
    sock.bind(path)


def _is_dead(path: str) -> bool:
    """Whether a socket file has nobody behind it."""
    with _new_socket() as probe:
        return stat.S_ISSOCK(os.lstat(path).st_mode) and probe.connect_ex(path) == errno.ECONNREFUSED


def _connect(sock: socket.socket, path: str, deadline: Deadline) -> None:
    while True:
        try:
            sock.connect(path)
            return
        except BlockingIOError:
            # The backlog is full. Unix sockets can't be polled for that, so ask again a little later.
            deadline.check(f"room in the queue of shm://{path}")
            time.sleep(min(0.005, deadline.left_s()))


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
