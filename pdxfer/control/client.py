"""The asking end: one gRPC channel to one agent, with the five calls as methods.

In come values of ``pdxfer.messages``; out come their answers, or the very error the peer's handler raised.
What goes wrong on the way (nobody there, no answer in time, a foreign server) becomes an error of
``pdxfer.errors`` as well: no gRPC exception leaves this file. It knows no protobuf type of ours.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdxfer.control.convert import METHODS, SERVICE, Method, decode_error
from pdxfer.control.endpoint import MAX_MESSAGE_BYTES, SHARED_OPTIONS, Endpoint
from pdxfer.control.tls import LOCAL, Caller, Credentials
from pdxfer.errors import AbortedError, DeadlineError, ExhaustedError, MisuseError, PeerError
from pdxfer.messages import (
    Abort,
    Complete,
    Completed,
    Describe,
    Description,
    Open,
    Opened,
    Renew,
    Renewed,
)
from pdxfer.trace import HEADER, current

__all__ = ["ControlClient"]

#: Only lost calls are repeated, and only where doing a thing twice is doing it once.
_SERVICE_CONFIG = {
    "methodConfig": [
        {
            "name": [{"service": SERVICE, "method": name} for name, method in METHODS.items() if method.idempotent],
            "retryPolicy": {
                "maxAttempts": 3,
                "initialBackoff": "0.05s",
                "maxBackoff": "0.5s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ]
}

_CLIENT_OPTIONS = (
    *SHARED_OPTIONS,
    ("grpc.enable_http_proxy", 0),
    ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ("grpc.service_config_disable_resolution", 1),
    # An agent that restarts is back within a second; gRPC's own 20 s would outlast most callers' patience.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # In truth how long one attempt to connect may take; a peer whose cores are all busy needs more than a moment.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A connection of its own, so that close() closes it.
    ("grpc.use_local_subchannel_pool", 1),
)


_LOOK_AGAIN_S = 0.1


class _Link(NamedTuple):
    """One gRPC channel, and whom it leads to. ``leaf``: the certificate it accepts, and ours; b"" without TLS."""

    channel: grpc.Channel
    peer: Caller
    leaf: bytes
    calls: dict[str, Any]


class ControlClient:
    """Calls to the agent at one address. Safe to use from several threads; connects on the first call.

    Args:
        address: ``unix:///path`` or ``tcp://host:port``, a contact address of a ``ControlServer``.
        default_timeout_s: the deadline of calls that are given no ``timeout_s``.
        credentials: for TCP: who we are, and whom we believe. Without them only loopback is called,
        insecure: or, said in so many words, anybody.

    Raises:
        MisuseError: not an address, one that may not be called like this, or another user's Unix socket.

    Every call takes ``timeout_s`` (seconds; None: the default), and raises:

    - whatever the peer's handler raised, as the same class;
    - PeerError: nobody answers at this address (reason ``PEER_UNREACHABLE``), the peer stopped
      (``PEER_STOPPED``), or what answers is no pdxfer agent of a version we know (``PROTOCOL``);
    - DeadlineError: no answer in time. The peer may have acted or not;
    - ExhaustedError: the peer has too many calls at once;
    - MisuseError: the message can't be sent, or the client is closed;
    - AbortedError: the client was closed by another thread during the call.
    """

    def __init__(
        self,
        address: str,
        *,
        default_timeout_s: float = 5.0,
        credentials: Credentials | None = None,
        insecure: bool = False,
    ) -> None:
        endpoint = Endpoint.parse(address)
        if not endpoint.path and endpoint.port == 0:
            raise MisuseError(f"{address!r} has port 0, which is for servers", hint="use the server's contact address")
        self.address = str(endpoint)
        self._default_timeout_s = _checked_timeout_s(default_timeout_s)
        self._closed = False
        _check_callable(endpoint, secure=credentials is not None or insecure)
        self._endpoint, self._credentials = endpoint, None if endpoint.path else credentials
        self._lock = threading.Lock()
        self._link: _Link | None = None

    def describe(self, message: Describe, timeout_s: float | None = None) -> Description:
        """Introduce ourselves and learn who the peer is; repeated once or twice when the path fails."""
        found = cast("Description", self._call("Describe", message, timeout_s))
        if self._link is not None and not self._link.peer.speaks_for(found.worker):
            raise PeerError(f"{self.address} may not say that it is {found.worker!r}", reason="IDENTITY_REJECTED")
        return found

    def open(self, message: Open, timeout_s: float | None = None) -> Opened:
        """Ask for a share of a transfer; never repeated by us."""
        return cast("Opened", self._call("Open", message, timeout_s))

    def complete(self, message: Complete, timeout_s: float | None = None) -> Completed:
        """Say that the bytes are verified and committed; repeated when the path fails."""
        return cast("Completed", self._call("Complete", message, timeout_s))

    def abort(self, message: Abort, timeout_s: float | None = None) -> Completed:
        """Give a transfer up; repeated when the path fails."""
        return cast("Completed", self._call("Abort", message, timeout_s))

    def renew(self, message: Renew, timeout_s: float | None = None) -> Renewed:
        """Ask for more time; repeated when the path fails."""
        return cast("Renewed", self._call("Renew", message, timeout_s))

    def health(self, service: str = "", timeout_s: float | None = None) -> str:
        """Ask ``grpc.health.v1``: SERVING, NOT_SERVING, UNKNOWN, or SERVICE_UNKNOWN for a name nobody set."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = self._rpc("Check", request, timeout_s)
        except PeerError as error:
            if error.details.get("grpc_code") == "NOT_FOUND":
                return "SERVICE_UNKNOWN"
            raise
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def close(self) -> None:
        """Close the channel; running calls end with AbortedError. Idempotent."""
        self._closed = True
        link = self._link
        if link is not None:
            link.channel.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, message: Any, timeout_s: float | None) -> Any:
        method = METHODS[name]
        if not isinstance(message, method.request.value_type):
            raise MisuseError(f"{name} takes a {method.request.value_type.__name__}, not a {type(message).__name__}")
        body = method.request.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise MisuseError(f"{name} has {len(body)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
        return self._decoded(method, self._rpc(name, body, timeout_s))

    def _decoded(self, method: Method, body: bytes) -> Any:
        try:
            return method.response.decode(body)
        except MisuseError as error:
            message = f"{self.address} gave {method.name} an answer that can't be used: {error.message}"
            raise PeerError(message, hint=error.hint, reason="PROTOCOL") from error

    def _rpc(self, name: str, request: Any, timeout_s: float | None) -> Any:
        timeout_s = self._default_timeout_s if timeout_s is None else _checked_timeout_s(timeout_s)
        until_s = time.monotonic() + timeout_s
        while True:
            link = self._connected(until_s)
            left_s = _checked_timeout_s(until_s - time.monotonic())
            try:
                metadata = ((HEADER, trace),) if (trace := current.get()) else None
                answer = link.calls[name](request, timeout=left_s, metadata=metadata)
                if answer is None:  # gRPC is content with a success that has no message
                    raise PeerError(f"{self.address} answered {name} with nothing", reason="PROTOCOL")
                return answer
            except grpc.RpcError as raised:
                if self._closed:
                    message = f"the client of {self.address} was closed during {name}"
                    raise AbortedError(message, reason="CLIENT_CLOSED") from raised
                error = decode_error(raised, method=name, peer=self.address)
                if error.reason != "PEER_UNREACHABLE" or not self._look_again(link, until_s):
                    _check_descriptors(self.address)
                    raise error from raised
            except ValueError as error:
                if self._closed or self._link is link:
                    raise self._is_closed() from error

    def _is_closed(self) -> MisuseError:
        return MisuseError(f"the client of {self.address} is closed", reason="CLIENT_CLOSED")

    def _connected(self, until_s: float) -> _Link:
        """The channel; over TLS, who is at its end is looked at first."""
        if (link := self._link) is not None:
            return link
        with self._looking(until_s):
            return self._link or self._adopt(self._new_link(until_s))

    @contextmanager
    def _looking(self, until_s: float) -> Iterator[None]:
        """One thread looks who is there; the others wait for it, each until its own deadline."""
        if not self._lock.acquire(timeout=max(0.0, until_s - time.monotonic())):
            raise DeadlineError(f"{self.address} was still being looked at by another call")
        try:
            yield
        finally:
            self._lock.release()

    def _adopt(self, link: _Link) -> _Link:
        old, self._link = self._link, link
        if old is not None:
            old.channel.close()
        if self._closed:  # meanwhile: nobody else would close it
            link.channel.close()
            raise self._is_closed()
        return link

    def _new_link(self, until_s: float) -> _Link:
        where = self._endpoint
        peer, leaf, options = LOCAL, b"", _CLIENT_OPTIONS
        if self._credentials is None:
            channel = grpc.insecure_channel(where.grpc_target, options=options)
        else:
            left_s = _checked_timeout_s(until_s - time.monotonic())
            peer, leaf, credentials, name = self._credentials.meet(where.host, where.port, timeout_s=left_s)
            leaf += self._credentials.pem().cert  # a renewal of ours needs a new channel, too
            options = (*_CLIENT_OPTIONS, ("grpc.ssl_target_name_override", name))
            channel = grpc.secure_channel(where.grpc_target, credentials, options=options)
        calls: dict[str, Any] = {name: channel.unary_unary(method.path) for name, method in METHODS.items()}
        health: Any = health_pb2_grpc.HealthStub(channel)
        calls["Check"] = health.Check
        return _Link(channel, peer, leaf, calls)

    def _look_again(self, link: _Link, until_s: float) -> bool:
        """Whether a call that never arrived is worth another try: there is a new certificate."""
        if self._credentials is None or time.monotonic() + _LOOK_AGAIN_S > until_s:
            return False
        with self._looking(until_s):
            if self._link is not link:
                return True
            try:
                new = self._new_link(until_s)
            except (PeerError, DeadlineError):
                new = link
            if new.leaf != link.leaf or new.peer != link.peer:
                self._adopt(new)
                return True
            if new is not link:
                new.channel.close()
        return False


def _check_callable(endpoint: Endpoint, *, secure: bool) -> None:
    """Raise unless we may connect there: an address may have come in a ticket, from whoever wrote that."""
    if endpoint.path:
        try:
            owner = os.stat(endpoint.path).st_uid
        except OSError:
            return  # nobody is there, as the first call will find
        if owner != os.geteuid():
            raise MisuseError(f"the socket {endpoint.path!r} belongs to user {owner}, not to this process's user")
        return
    loopback = endpoint.host == "localhost" or (endpoint.ip is not None and endpoint.ip.is_loopback)
    if not loopback and not secure:
        hint = "set tls (ca, cert, key, peers) at both ends; insecure=true only on a network that nobody else is on"
        raise MisuseError(f"{endpoint} is on another host, and nothing would say who answers there", hint=hint)


def _check_descriptors(address: str) -> None:
    """Where a peer can't be reached because nothing more can be opened here, say so: gRPC doesn't."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        ExhaustedError.check(error, f"{address} can't be reached")


def _checked_timeout_s(timeout_s: float) -> float:
    if not math.isfinite(timeout_s):
        raise MisuseError(f"a timeout of {timeout_s} s is none; every call needs a deadline")
    if timeout_s <= 0:
        raise DeadlineError("the deadline had passed before the call was made")
    return timeout_s
