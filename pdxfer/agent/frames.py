"""Frames between an engine and its sidecar: requests, answers and events on one Unix stream socket.

In come plain values and at most one file descriptor each; out they come at the other side. Every frame is bounded,
and nothing in it is an address, a path or code. This file knows no frame's meaning but the greeting's version.

::

    u32 length (little endian) │ msgpack [number, name, values]

    number > 0   a request of the engine's, and its answer: name "ok" or "error"
    number = 0   said without an answer: orders of the engine's, events of the sidecar's

A frame that brings a descriptor is sent when all before it are answered.

Trust: the socket's directory is its user's alone, and both ends ask the kernel who the other is (SO_PEERCRED).
"""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack

from pdxfer import errors
from pdxfer.errors import MisuseError, PdxferError, PeerError
from pdxfer.transport.unix import check_peer, try_receive

__all__ = ["FRAMES_VERSION", "Pipe", "check_private", "error_from", "error_to", "open_socket"]

FRAMES_VERSION = 2
_MAX_BYTES = 8 << 20  # a layout has at most 3 MiB
_LENGTH = struct.Struct("<I")
_READ_BYTES = 64 << 10
_STALL_S = 10.0  # whoever does not read for so long is as good as gone
_EXTRA = ("component", "field", "retry_after_s", "source", "target")
_CLASSES = {name: getattr(errors, name) for name in errors.__all__}


class Pipe:
    """One end. Any thread may send; one receives. Every failure is a PeerError, and the end of the pipe."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(_STALL_S), 0))
        self._socket, self._sending = sock, threading.Lock()
        self._buffer, self._begun, self._fds = bytearray(_READ_BYTES), bytearray(), list[int]()
        self._patience_s = 0.0
        try:
            self.process_id = check_peer(sock)
        except (PdxferError, OSError) as error:
            sock.close()
            raise PeerError(f"the other end of the socket is not ours: {error}", reason="SIDECAR_REFUSED") from error

    def send(self, number: int, name: str, values: Any, fd: int = -1) -> None:
        """Send one frame, whole; raises PeerError when the other end is gone or does not read."""
        try:
            body = msgpack.packb([number, name, values], default=_plain)
        except (TypeError, ValueError, OverflowError) as error:
            raise MisuseError(f"{name} can't be said: {error}") from error
        if len(body) > _MAX_BYTES:
            raise MisuseError(f"{name} has {len(body)} B; at most {_MAX_BYTES} can be sent")
        data = _LENGTH.pack(len(body)) + body
        try:
            with self._sending:
                sent = socket.send_fds(self._socket, [data], [fd]) if fd >= 0 else 0
                self._socket.sendall(memoryview(data)[sent:])
        except OSError as error:
            self.end()
            raise PeerError(f"{name} could not be said: {error.strerror}", reason="SIDECAR_LOST") from error

    def receive(self, timeout_s: float) -> tuple[int, str, Any, list[int]] | None:
        """The next frame with its descriptors (the caller's to close), or None when none has begun in time.

        Raises:
            PeerError: the other end is gone (reason SIDECAR_LOST), or sent what is no frame.
        """
        try:
            while (body := self._whole()) is None:
                if not self._read_some(_STALL_S if self._begun else timeout_s):
                    return None
            number, name, values = msgpack.unpackb(body, max_ext_len=0, strict_map_key=False)
            if type(number) is not int or type(name) is not str or len(self._fds) > 1:
                raise PeerError("a frame with wrong fields came", reason="PROTOCOL")
        except Exception as error:  # whatever msgpack says of bad bytes, too
            self.end()
            for fd in self._fds:
                os.close(fd)
            self._fds = []
            if isinstance(error, PeerError):
                raise
            raise PeerError(f"no frame could be read: {error}", reason="SIDECAR_LOST") from error
        fds, self._fds = self._fds, []
        return number, name, values, fds

    def _whole(self) -> bytes | None:
        """Take a frame's body from what has been read; None while it is not all there."""
        if len(self._begun) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._begun)[0]
        if end > _MAX_BYTES + _LENGTH.size:
            raise PeerError(f"a frame of {end - _LENGTH.size} B came", reason="PROTOCOL")
        if len(self._begun) < end:
            return None
        body = bytes(memoryview(self._begun)[_LENGTH.size : end])
        del self._begun[:end]
        return body

    def _read_some(self, patience_s: float) -> bool:
        """Wait for bytes; False when none came, and none of a frame were there."""
        if patience_s != self._patience_s:  # one call of the kernel for all of a frame, mostly
            seconds = max(patience_s, 1e-3)  # 0 would be for ever
            limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._patience_s = patience_s
        packet = try_receive(self._socket, self._buffer, wait=True)
        if packet is None:
            if self._begun:
                raise PeerError("a frame was not finished in time", reason="SIDECAR_LOST")
            return False
        self._fds += packet[1]
        if not packet[0]:
            raise PeerError("the other end is gone", reason="SIDECAR_LOST")
        self._begun += memoryview(self._buffer)[: packet[0]]
        return True

    def ask(self, name: str, values: Any, timeout_s: float, fd: int = -1) -> Any:
        """Request and answer while nobody else receives (the greeting); raises the answer's error."""
        self.send(1, name, values, fd)
        frame = self.receive(timeout_s)
        if frame is None or frame[0] != 1 or frame[3]:
            self.end()
            raise PeerError(f"{name} was not answered within {timeout_s:g} s", reason="SIDECAR_LOST")
        if frame[1] != "ok":
            raise error_from(frame[2])
        return frame[2]

    def end(self) -> None:
        """End both directions; whoever receives is told. The socket is closed by ``close``."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close the socket: for the receiving thread, or when there is none."""
        self.end()
        with self._sending:  # whoever sends has been told by now
            self._socket.close()


def _plain(value: Any) -> Any:
    """Arrays and NumPy's numbers, which engines have, as Python's; mappings as dicts."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{type(value).__name__} is no plain value")


def error_to(error: Exception) -> dict[str, Any]:
    """An error as plain values; what is not ours becomes INTERNAL by its class's name alone."""
    if not isinstance(error, PdxferError):
        return {
            "class": "InternalError",
            "message": f"the sidecar failed: {type(error).__name__}",
            "reason": "INTERNAL",
        }
    extra = {name: getattr(error, name) for name in _EXTRA if hasattr(error, name)}
    extra |= {name: str(extra[name]) for name in ("source", "target") if name in extra}
    found = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _CLASSES)
    said = {"message": error.message, "hint": error.hint, "reason": error.reason, "details": error.details}
    return {"class": found, **said, "extra": extra}


def error_from(values: Any) -> PdxferError:
    """The inverse of ``error_to``, as the same class."""
    if not isinstance(values, dict):
        return PeerError("an error that can't be read came", reason="PROTOCOL")
    cls = _CLASSES.get(str(values.get("class")), PdxferError)
    error: PdxferError = cls.__new__(cls)  # past the constructors, which would compose the message anew
    details = {str(k): str(v) for k, v in dict(values.get("details") or {}).items()}
    message, hint = str(values.get("message")), str(values.get("hint", ""))
    PdxferError.__init__(error, message, hint=hint, reason=str(values.get("reason")), details=details)
    for name, value in dict(values.get("extra") or {}).items():
        if name in _EXTRA:
            setattr(error, name, value)
    return error


def open_socket(path: str) -> socket.socket:
    """A connected socket; raises PeerError (SIDECAR_UNREACHABLE) when nobody listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        check_private(os.path.dirname(path))
        sock.settimeout(_STALL_S)
        sock.connect(path)
    except (OSError, MisuseError) as error:
        sock.close()
        raise PeerError(
            f"no sidecar can be reached at {path}: {error}",
            hint="start one: pdxfer agent --socket PATH",
            reason="SIDECAR_UNREACHABLE",
        ) from error
    return sock


def check_private(directory: str) -> None:
    """Refuse a directory that is not ours alone; raises MisuseError, or OSError when there is none."""
    found = os.stat(directory)
    mode = stat.S_IMODE(found.st_mode)
    if found.st_uid != os.geteuid() or mode & 0o077:
        what = f"directory {directory} of the sidecar's socket has owner {found.st_uid} and mode {mode:04o}"
        raise MisuseError(what, hint="use a directory of your own with mode 0700")
