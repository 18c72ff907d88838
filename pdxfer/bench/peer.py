"""Peer: the other ends of a bench, and how the first one talks to them.

One JSON object a line, each way: over a child's standard input and output, over pipes to a thread, or over a socket to
another host. A child ends when its input ends, so it can't outlive its parent; what it raises reaches the parent as
the same error. Whoever waits for an answer waits no longer than the bench's clock allows.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Protocol

from pdxfer import errors
from pdxfer.agent.spawn import module_command
from pdxfer.errors import CorruptError, DeadlineError, MisuseError, PdxferError, PeerError, TransportError
from pdxfer.transport import parse_address

__all__ = ["Away", "Child", "Clock", "Group", "Line", "Peers", "listen", "main"]

_END_S = 20.0
_CONNECT_S = 10.0
_LINE_MAX_BYTES = 256 << 20


class Clock:
    """The end of a bench's time, which every wait looks at."""

    def __init__(self, max_time_s: float = 1e9) -> None:
        self.max_time_s = max_time_s
        self._until_s = time.monotonic() + max_time_s

    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._until_s - time.monotonic())

    def part(self, share: float) -> Clock:
        """A clock that ends after a share of what is left."""
        return Clock(self.left_s() * share)

    def check(self) -> None:
        """Raise DeadlineError when it is over."""
        if not self.left_s():
            raise DeadlineError(f"the bench's {self.max_time_s:g} s are over", hint="raise --max-time")


class Line:
    """JSON objects over two file descriptors, which it owns. One thread reads, one writes."""

    def __init__(self, read_fd: int, write_fd: int, clock: Clock | None = None) -> None:
        self._read, self._write, self.clock = read_fd, write_fd, clock or Clock()
        self._rest = bytearray()

    def tell(self, **said: Any) -> None:
        """Say something; raises PeerError when the other end is gone."""
        data = memoryview(json.dumps(said).encode() + b"\n")
        try:
            while data:
                data = data[os.write(self._write, data) :]
        except OSError as error:
            raise PeerError("the bench's other process has ended") from error

    def hear(self) -> dict[str, Any]:
        """Wait for what the other end says.

        Raises:
            PeerError: it has ended. DeadlineError: the clock is over. PdxferError: whatever it raised.
        """
        while (stop := self._rest.find(b"\n")) < 0:
            if not select.select([self._read], [], [], min(self.clock.left_s(), 1e6))[0]:
                self.clock.check()
                continue
            data = os.read(self._read, 1 << 20)
            if not data or len(self._rest) > _LINE_MAX_BYTES:
                raise PeerError("the bench's other process has ended", hint="its own error is above")
            self._rest += data
        said = json.loads(self._rest[:stop])
        del self._rest[: stop + 1]
        if not isinstance(said, dict):
            raise PeerError("the bench's other end does not speak our language")
        if "error" in said:
            raise _raised(**said)
        return said

    def ask(self, **question: Any) -> dict[str, Any]:
        """``tell``, then ``hear``."""
        self.tell(**question)
        return self.hear()

    def questions(self) -> Iterator[dict[str, Any]]:
        """What the other end asks, until it is gone."""
        with suppress(PeerError):
            while True:
                yield self.hear()

    def close(self) -> None:
        """Close both ends; idempotent."""
        fds = {self._read, self._write} - {-1}
        self._read = self._write = -1
        for fd in fds:
            os.close(fd)


def _raised(error: str, message: str, hint: str, component: str) -> PdxferError:
    """What the other end raised."""
    if error == CorruptError.__name__:
        return CorruptError(component, message.removeprefix(f"{component}: "), hint=hint)
    kind = getattr(errors, error, PeerError)
    if not (isinstance(kind, type) and issubclass(kind, PdxferError)) or kind is errors.IncompatibleError:
        kind = PeerError
    return kind(message, hint=hint)


def _tell_error(line: Line, error: PdxferError) -> None:
    with suppress(PeerError):
        component = error.details.get("component", "*")
        line.tell(error=type(error).__name__, message=error.message, hint=error.hint, component=component)


Serve = Callable[..., None]


def _serve(serve: Serve, line: Line) -> None:
    """Run one end: the first line has its arguments; an error is told instead of an answer."""
    try:
        serve(line, **line.hear())
    except PdxferError as error:
        _tell_error(line, error)


def main(serve: Serve) -> None:
    """In a child: serve over standard input and output; whatever else is printed goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    with suppress(KeyboardInterrupt):
        _serve(serve, Line(0, answers))


class Child:
    """Another end on this machine: a process that runs ``serve``'s module, or (``inside``) a thread of this one.

    A context manager that ends it.
    """

    def __init__(
        self,
        serve: Serve,
        clock: Clock,
        *,
        inside: bool = False,
        environ: Mapping[str, str] | None = None,
        **asked: Any,
    ) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        self.line = Line(ours_in, ours_out, clock)
        if inside:
            line = Line(theirs_in, theirs_out)
            self._thread = threading.Thread(target=_inside, args=(serve, line), name="pdxfer-bench", daemon=True)
            self._thread.start()
        else:
            command = module_command(serve.__module__)
            env = {**os.environ, **(environ or {})}
            self._process = subprocess.Popen(command, stdin=theirs_in, stdout=theirs_out, env=env)
            os.close(theirs_in)
            os.close(theirs_out)
        try:
            self.line.tell(**asked)
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __enter__(self) -> Line:
        return self.line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.line.close()
        if self._process is None:
            self._thread.join(_END_S)
            return
        try:
            self._process.wait(_END_S if kind is None else 2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _inside(serve: Serve, line: Line) -> None:
    try:
        _serve(serve, line)
    finally:
        line.close()


class Away:
    """Another end on another host, behind ``listen`` there. A context manager."""

    def __init__(self, address: str, clock: Clock, **asked: Any) -> None:
        self._clock, self._asked = clock, {**asked, "host": _host_port(address)[0]}
        try:
            self._socket = socket.create_connection(_host_port(address), timeout=_CONNECT_S)
        except OSError as error:
            raise TransportError(f"can't connect to {address}: {error}", hint="run --listen there first") from error

    def __enter__(self) -> Line:
        line = _socket_line(self._socket, self._clock)
        line.tell(**self._asked)
        return line

    def __exit__(self, *exc: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def listen(address: str, serve: Serve, clock: Clock, tick: Callable[[str], None]) -> None:
    """Serve one bench that another host runs. Who connects says what is made: for networks that you trust.

    Raises:
        DeadlineError: nobody came in time. TransportError: the address can't be bound.
    """
    host, port = _host_port(address)
    try:
        server = socket.create_server((host, port))
    except OSError as error:
        raise TransportError(f"can't listen at {address}: {error}") from error
    with server:
        server.settimeout(min(clock.left_s(), 1e6))
        tick(f"waits at tcp://{host}:{server.getsockname()[1]}")
        try:
            connection, _ = server.accept()
        except TimeoutError as error:
            raise DeadlineError(f"nobody came to {address} in time") from error
        with connection:
            _serve(serve, _socket_line(connection, clock))


def _socket_line(connection: socket.socket, clock: Clock) -> Line:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Line(os.dup(connection.fileno()), os.dup(connection.fileno()), clock)


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = parse_address(address).expect("tcp").rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise MisuseError(f"{address!r} is not tcp://host:port")
    return host.strip("[]"), int(port)


class Peers(Protocol):
    """Several ends that are asked the same."""

    def ask(self, **question: Any) -> list[dict[str, Any]]:
        """Ask all at once; their answers in order."""

    def close(self) -> None:
        """Nobody asks any more, so that they end."""


class Group:
    """Ends on this machine."""

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines

    def ask(self, **question: Any) -> list[dict[str, Any]]:
        """Ask all at once; their answers in order."""
        for line in self._lines:
            line.tell(**question)
        return [line.hear() for line in self._lines]

    def close(self) -> None:
        """Nobody asks any more."""
        for line in self._lines:
            line.close()
