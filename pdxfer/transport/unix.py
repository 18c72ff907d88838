"""Unix sockets that several threads use: whole packets or none, at most one file descriptor each, a known peer.

In come packets and deadlines; out come packets, or the fact that there is no room or nothing there. This file knows
no packet's meaning. Every call is without blocking, but for ``wait_for`` and ``try_receive`` where it is told to wait.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence

from pdxfer.errors import TransportError
from pdxfer.transport.base import Deadline

__all__ = ["UseCount", "check_peer", "try_receive", "try_send", "wait_for"]


# As plain numbers: an enum's ``|`` is a dozen calls, and every message needs two.
_RECEIVE_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC)
_WAIT_FLAGS = int(socket.MSG_CMSG_CLOEXEC)
_SEND_FLAGS = int(socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
_CUT_FLAGS = int(socket.MSG_TRUNC | socket.MSG_CTRUNC)
_RIGHTS_BYTES = socket.CMSG_SPACE(4 * array.array("i").itemsize)


class UseCount:
    """Closes file descriptors that threads may still be blocked on, without ever letting a number be reused under them.

    ``close`` first runs ``wake`` (what ends a blocking wait), and ``release`` when the last user has left.
    """

    def __init__(self, *, wake: Callable[[], None], release: Callable[[], None]) -> None:
        self._wake, self._release = wake, release
        self._lock = threading.Lock()
        self._users = 0
        self.closing = False

    def use(self, what: str) -> _Use:
        """Hold the descriptors open inside ``with``; entering raises TransportError when they are closed or closing."""
        return _Use(self, what)

    def enter(self, what: str) -> None:
        """Hold them open until ``leave``; as ``use``."""
        with self._lock:
            if self.closing:
                raise TransportError(f"{what} is closed")
            self._users += 1

    def leave(self) -> None:
        """The other half of ``enter``."""
        with self._lock:
            self._users -= 1
            last = self.closing and not self._users
        if last:
            self._release()

    def close(self) -> None:
        """End it; idempotent. Does not wait for the users."""
        with self._lock:
            if self.closing:
                return
            self.closing = True
            idle = not self._users
            if not idle:
                self._wake()
        if idle:
            self._release()


class _Use:
    """See ``UseCount.use``; no generator, since every message enters two of these."""

    __slots__ = ("_count", "_what")

    def __init__(self, count: UseCount, what: str) -> None:
        self._count, self._what = count, what

    def __enter__(self) -> None:
        self._count.enter(self._what)

    def __exit__(self, *exc: object) -> None:
        self._count.leave()


def wait_for(sock: socket.socket, event: int, deadline: Deadline) -> bool:
    """Wait until the socket is ready for ``event`` or broken; False when the deadline came first."""
    poll = select.poll()
    poll.register(sock, event)
    return bool(poll.poll(deadline.left_ms()))


def try_send(sock: socket.socket, parts: Sequence[bytes], fds: Sequence[int] = ()) -> bool:
    """Send one packet whole, or return False when there is no room."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    try:
        sock.sendmsg(parts, rights, _SEND_FLAGS)
    except BlockingIOError:
        return False
    return True


def try_receive(sock: socket.socket, buffer: bytearray, *, wait: bool = False) -> tuple[int, list[int]] | None:
    """Receive one packet into ``buffer``; None when there is none.

    Args:
        wait: for one, as long as the socket's SO_RCVTIMEO says.

    Returns:
        Its size (0 means that the peer is gone) and at most one file descriptor, which is now the caller's.

    Raises:
        TransportError: the packet was cut off or brought more descriptors; they are closed.
    """
    try:
        nbytes, rights, flags, _ = sock.recvmsg_into([buffer], _RIGHTS_BYTES, _WAIT_FLAGS if wait else _RECEIVE_FLAGS)
    except BlockingIOError:
        return None
    if not rights and not flags & _CUT_FLAGS:
        return nbytes, []
    fds = array.array("i")
    for level, kind, data in rights:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    if len(fds) > 1 or flags & _CUT_FLAGS:
        for fd in fds:
            os.close(fd)
        raise TransportError("a packet is too long, brings too many files, or found no descriptor left for one")
    return nbytes, fds.tolist()


def check_peer(sock: socket.socket) -> int:
    """Return the peer's process id as the kernel tells it; raises TransportError when it runs as another user."""
    process_id, user_id, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if user_id != os.geteuid():
        raise TransportError(
            f"the peer runs as user {user_id}, this process as {os.geteuid()}",
            hint="shared memory is for processes of one user; use tcp:// between users",
        )
    return int(process_id)
