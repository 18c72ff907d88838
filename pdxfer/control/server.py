"""The answering end: one gRPC server over Unix sockets, loopback and (with mutual TLS) TCP; asks a ``ControlHandler``.

In come addresses and a handler; out go answers, or errors with class, reason and details. The server knows
no protobuf type of ours (``convert`` has the codecs) and holds no state of any transfer.

What the network may do to an agent ends here: messages are bounded, calls at once are bounded, every call has
a deadline, an unexpected exception becomes InternalError and its traceback stays in our log. gRPC does not
ask who is at the other end of a Unix socket, so the guard is the directory: owned by us, closed to others. Over TLS
it is the allow-list, which also says which worker a caller may claim to be.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from pdxfer.control.convert import METHODS, SERVICE, Method, encode_error
from pdxfer.control.endpoint import MAX_MESSAGE_BYTES, SHARED_OPTIONS, Endpoint
from pdxfer.control.tls import LOCAL, Caller, Credentials
from pdxfer.directory import clear_stale_socket, remove_socket
from pdxfer.errors import DeadlineError, ExhaustedError, InternalError, MisuseError, PdxferError, TicketError
from pdxfer.messages import ControlHandler, Describe
from pdxfer.trace import HEADER, current, traceparent

__all__ = ["ControlServer"]

_LOG = logging.getLogger(__name__)

Admit = Callable[[Caller, str], None]

_SERVER_OPTIONS = (
    *SHARED_OPTIONS,
    ("grpc.max_concurrent_streams", 128),
    # Without this, a second server on the same port would silently take half of the calls.
    ("grpc.so_reuseport", 0),
)

#: gRPC reports the time left of a call without a deadline as centuries.
_NO_DEADLINE_S = 7 * 86_400.0


class ControlServer:
    """Serve one handler at several addresses; bound on construction, answering from ``start()`` to ``stop()``.

    Args:
        handler: answers the calls; called from up to ``max_workers`` threads at once.
        addresses: ``unix:///path`` or ``tcp://host:port`` (port 0: a free one). A missing directory of a Unix
            socket is made with mode 0700; an existing one must be ours and closed to other users.
        max_workers: threads; four times as many calls may wait, the next is refused as ExhaustedError.
        reflection: whether tools may ask for the service's description.
        credentials: for every TCP address: who we are, and whom we let in. Without them only loopback is bound,
        insecure: or, said in so many words, any address, and whoever can connect can call.
        admit: asked about every call by (caller, the worker it speaks for); raises to refuse it.
        deadline_cap_s: upper bound of the ``deadline_s`` that a handler sees. A call without any deadline is
            cancelled after it.

    Raises:
        MisuseError: an address is malformed, taken, not permitted, or its directory is not safe.
    """

    def __init__(
        self,
        handler: ControlHandler,
        addresses: Sequence[str],
        *,
        max_workers: int = 16,
        reflection: bool = True,
        credentials: Credentials | None = None,
        insecure: bool = False,
        admit: Admit = lambda caller, worker: None,
        deadline_cap_s: float = 30.0,
    ) -> None:
        if not addresses or max_workers < 1 or not deadline_cap_s > 0:
            raise MisuseError("a control server needs an address, a worker and a positive deadline cap")
        self._lock = threading.Lock()
        self._state = "new"
        self._sockets: list[tuple[str, int]] = []
        self._contact: list[str] = []
        self._credentials = credentials
        self.insecure_addresses: list[str] = []
        self._pool = _Pool(max_workers, thread_name_prefix="pdxfer-control")
        self._server = grpc.server(self._pool, options=_SERVER_OPTIONS, maximum_concurrent_rpcs=4 * max_workers)
        self._health = health.HealthServicer()
        self._register(handler, _Rules(credentials, admit, deadline_cap_s), with_reflection=reflection)
        try:
            for address in addresses:
                self._bind(Endpoint.parse(address), insecure)
        except BaseException:
            self.stop(0)
            raise

    @property
    def contact_addresses(self) -> tuple[str, ...]:
        """Where a client can reach this server, in the order given, with the ports really bound."""
        return tuple(self._contact)

    def start(self) -> ControlServer:
        """Begin to answer, and report healthy; returns self. Raises MisuseError after ``stop()``."""
        with self._lock:
            if self._state == "stopped":
                raise MisuseError("the control server was stopped; make a new one")
            if self._state == "new":
                self._pool.submit(int)  # a first thread, while there is one
                self._server.start()
                self._state = "started"
                self.set_serving(True)
        return self

    def set_serving(self, serving: bool, service: str | None = None) -> None:
        """Set what ``grpc.health.v1`` answers, for one service name or (None) for the whole server."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE) if service is None else (service,):
            self._health.set(name, status)

    def stop(self, grace_s: float = 0.5) -> None:
        """Refuse new calls, give running ones ``grace_s``, then cancel them and remove the sockets. Idempotent.

        A handler that outlives its cancelled call is waited for one second more and then reported in the log.
        """
        with self._lock:
            if self._state == "stopped":
                return
            if self._state == "new":
                # gRPC frees listeners of a server that never ran only by running it.
                self._server.start()
            self._state = "stopped"
            self._health.enter_graceful_shutdown()
            self._server.stop(grace_s).wait(grace_s + 5.0)
            self._join_workers(1.0)
            for path, inode in self._sockets:
                remove_socket(path, inode)
            # Its completion queue holds file descriptors for as long as it exists.
            del self._server

    def __enter__(self) -> ControlServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _join_workers(self, timeout_s: float) -> None:
        joiner = threading.Thread(target=self._pool.shutdown, kwargs={"cancel_futures": True}, daemon=True)
        joiner.start()
        joiner.join(timeout_s)
        if joiner.is_alive():
            _LOG.warning("control handlers still run %.1f s after their calls were cancelled", timeout_s)

    def _register(self, handler: ControlHandler, rules: _Rules, *, with_reflection: bool) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(_behaviour(method, handler, rules))
            for name, method in METHODS.items()
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_serving(False)
        if with_reflection:
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    def _bind(self, endpoint: Endpoint, insecure: bool) -> None:
        if endpoint.path:
            _prepare_directory(os.path.dirname(endpoint.path))
            clear_stale_socket(endpoint.path)
        else:
            endpoint, exposed = _permitted(endpoint, self._credentials is not None or insecure)
            if exposed and self._credentials is None:
                _LOG.warning("INSECURE: whoever can connect to %s can call the control plane", endpoint)
                self.insecure_addresses.append(str(endpoint))
        try:
            if endpoint.path or self._credentials is None:
                port = self._server.add_insecure_port(endpoint.grpc_target)
            else:
                port = self._server.add_secure_port(endpoint.grpc_target, self._credentials.server())
        except RuntimeError as error:
            _check_room(endpoint)
            raise MisuseError(f"can't listen at {endpoint}: {error}", hint="is another process there?") from error
        if endpoint.path:
            os.chmod(endpoint.path, 0o600)
            self._sockets.append((endpoint.path, os.stat(endpoint.path).st_ino))
            self._contact.append(str(endpoint))
        else:
            self._contact.append(str(Endpoint(host=endpoint.host, port=port)))


class _Pool(ThreadPoolExecutor):
    """Where no more threads can be had, calls wait for those that there are: gRPC's own thread would end of it."""

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise


@dataclass(frozen=True, slots=True)
class _Rules:
    """What a server asks before its handler."""

    credentials: Credentials | None
    admit: Admit
    deadline_cap_s: float

    def caller(self, context: grpc.ServicerContext) -> Caller:
        """Who calls; raises TicketError for whom we don't know, and says no more."""
        found: dict[str, Any] = dict(context.auth_context())
        if found.get("transport_security_type") != [b"ssl"]:
            return LOCAL
        names = [*found.get("peer_uri", ()), *found.get("peer_dns", ())]
        caller = self.credentials.tls.caller(n.decode("utf-8", "replace") for n in names) if self.credentials else None
        if caller is None:
            raise TicketError("this peer is not one that is let in here", reason="IDENTITY_REJECTED")
        return caller

    def check(self, caller: Caller, message: Any) -> None:
        """Raise unless the caller may speak for the worker that the message names, now."""
        worker = message.worker if isinstance(message, Describe) else message.target_worker
        if not caller.speaks_for(worker):
            raise TicketError("this peer may not speak for that worker", reason="IDENTITY_REJECTED")
        self.admit(caller, worker)


def _behaviour(
    method: Method, handler: ControlHandler, rules: _Rules
) -> Callable[[bytes, grpc.ServicerContext], bytes]:
    """What gRPC runs for one call: bytes in, bytes out, every failure as a status.

    A plain function: were it a method, the gRPC server and its owner would refer to each other, and descriptors
    would stay open until the garbage collector comes by.
    """
    ask = getattr(handler, method.name.lower())

    def behaviour(body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return _answer(method, ask, body, context, rules)
        except PdxferError as error:
            outcome = error
        except Exception as error:  # noqa: BLE001 - the last frame that is ours: the peer gets a named error
            _LOG.exception("%s failed on an unexpected error", method.name)
            outcome = InternalError(
                f"{method.name} failed unexpectedly ({type(error).__name__}); the peer's log has more"
            )
        status = encode_error(outcome)
        # The call did arrive: gRPC retries are for lost calls, and must not repeat one that was answered.
        context.set_trailing_metadata((*(status.trailing_metadata or ()), ("grpc-retry-pushback-ms", "-1")))
        context.abort(status.code, status.details)
        raise AssertionError("abort returned")

    return behaviour


def _answer(
    method: Method, ask: Callable[..., Any], body: bytes, context: grpc.ServicerContext, rules: _Rules
) -> bytes:
    caller = rules.caller(context)
    message = method.request.decode(body)
    rules.check(caller, message)
    current.set(next((traceparent(value) for key, value in context.invocation_metadata() or () if key == HEADER), ""))
    left_s = context.time_remaining()
    if left_s is not None and left_s <= 0:
        raise DeadlineError(f"{method.name} waited for a worker until its deadline had passed")
    with _ended_without_deadline(context, left_s, rules.deadline_cap_s) as deadline_s:
        value = ask(message, deadline_s=deadline_s)
    try:
        answer = method.response.encode(value)
    except MisuseError as error:
        raise InternalError(f"the handler's answer to {method.name} can't be sent: {error.message}") from error
    if len(answer) > MAX_MESSAGE_BYTES:
        raise InternalError(f"the answer to {method.name} has {len(answer)} B; at most {MAX_MESSAGE_BYTES} can be sent")
    return answer


@contextlib.contextmanager
def _ended_without_deadline(
    context: grpc.ServicerContext, left_s: float | None, deadline_cap_s: float
) -> Iterator[float]:
    """Yield the handler's deadline in seconds; a caller that gave none is cancelled when the cap is reached."""
    if left_s is not None and left_s < _NO_DEADLINE_S:
        yield min(left_s, deadline_cap_s)
        return
    watchdog = threading.Timer(deadline_cap_s, context.cancel)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield deadline_cap_s
    finally:
        watchdog.cancel()


def _prepare_directory(path: str) -> None:
    """Make the directory, or check that nobody else can put or reach anything in it."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        info = os.stat(path)
    except OSError as error:
        raise MisuseError(f"directory {path!r} of the control socket can't be used: {error.strerror}") from error
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.geteuid() or mode & 0o027:
        raise MisuseError(
            f"directory {path!r} of the control socket has owner {info.st_uid} and mode {mode:04o}",
            hint="use a directory of your own with mode 0700: it is what keeps other users away from the socket",
        )


def _permitted(endpoint: Endpoint, allowed: bool) -> tuple[Endpoint, bool]:
    """Resolve the host once, so that what was checked is what is bound; refuse wildcards, and others unless allowed.

    Returns:
        The numeric endpoint, and whether other machines can reach it.
    """
    try:
        found = socket.getaddrinfo(endpoint.host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise MisuseError(f"host {endpoint.host!r} can't be resolved: {error}") from error
    # IPv4 first: localhost has both, and containers often lack IPv6.
    hosts = [str(entry[4][0]) for entry in sorted(found, key=lambda entry: entry[0] != socket.AF_INET)]
    exposed = endpoint.check_open(ipaddress.ip_address(hosts[0]), allowed=allowed)
    return Endpoint(host=hosts[0], port=endpoint.port), exposed


def _check_room(endpoint: Endpoint) -> None:
    """Where a socket can't be made because disk or descriptors are used up, say so: gRPC doesn't."""
    probe = f"{endpoint.path}~" if endpoint.path else os.devnull
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_RDONLY | os.O_CLOEXEC, 0o600))
        if endpoint.path:
            os.unlink(probe)
    except OSError as error:
        ExhaustedError.check(error, f"can't listen at {endpoint}")
