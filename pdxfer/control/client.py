"""The asking end: one gRPC channel to one agent, with the five calls as methods.

In come values of ``pdxfer.messages``; out come their answers, or the very error the peer's handler raised.
What goes wrong on the way (nobody there, no answer in time, a foreign server) becomes an error of
``pdxfer.errors`` as well: no gRPC exception leaves this file. It knows no protobuf type of ours.
"""

from __future__ import annotations

import json
import math
from types import TracebackType
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdxfer.control.convert import METHODS, SERVICE, Method, decode_error
from pdxfer.control.endpoint import MAX_MESSAGE_BYTES, SHARED_OPTIONS, Endpoint
from pdxfer.errors import AbortedError, DeadlineError, MisuseError, PeerError
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


class ControlClient:
    """Calls to the agent at one address. Safe to use from several threads; connects on the first call.

    Args:
        address: ``unix:///path`` or ``tcp://host:port``, a contact address of a ``ControlServer``.
        default_timeout_s: the deadline of calls that are given no ``timeout_s``.

    Every call takes ``timeout_s`` (seconds; None: the default) and ``wait_for_ready`` (wait for a peer that is
    not there yet until the deadline, rather than fail at once), and raises:

    - whatever the peer's handler raised, as the same class;
    - PeerError: nobody answers at this address (reason ``PEER_UNREACHABLE``), the peer stopped
      (``PEER_STOPPED``), or what answers is no pdxfer agent of a version we know (``PROTOCOL``);
    - DeadlineError: no answer in time. The peer may have acted or not;
    - ExhaustedError: the peer has too many calls at once;
    - MisuseError: the message can't be sent, or the client is closed;
    - AbortedError: the client was closed by another thread during the call.
    """

    def __init__(self, address: str, *, default_timeout_s: float = 5.0) -> None:
        endpoint = Endpoint.parse(address)
        if not endpoint.path and endpoint.port == 0:
            raise MisuseError(f"{address!r} has port 0, which is for servers", hint="use the server's contact address")
        self.address = str(endpoint)
        self._default_timeout_s = _checked_timeout_s(default_timeout_s)
        self._closed = False
        self._channel = grpc.insecure_channel(endpoint.grpc_target, options=_CLIENT_OPTIONS)
        self._calls: dict[str, Any] = {name: self._channel.unary_unary(method.path) for name, method in METHODS.items()}
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    def describe(
        self, message: Describe, timeout_s: float | None = None, *, wait_for_ready: bool = False
    ) -> Description:
        """Introduce ourselves and learn who the peer is; repeated once or twice when the path fails."""
        return cast("Description", self._call("Describe", message, timeout_s, wait_for_ready))

    def open(self, message: Open, timeout_s: float | None = None, *, wait_for_ready: bool = False) -> Opened:
        """Ask for a share of a transfer; never repeated by us."""
        return cast("Opened", self._call("Open", message, timeout_s, wait_for_ready))

    def complete(self, message: Complete, timeout_s: float | None = None, *, wait_for_ready: bool = False) -> Completed:
        """Say that the bytes are verified and committed; repeated when the path fails."""
        return cast("Completed", self._call("Complete", message, timeout_s, wait_for_ready))

    def abort(self, message: Abort, timeout_s: float | None = None, *, wait_for_ready: bool = False) -> Completed:
        """Give a transfer up; repeated when the path fails."""
        return cast("Completed", self._call("Abort", message, timeout_s, wait_for_ready))

    def renew(self, message: Renew, timeout_s: float | None = None, *, wait_for_ready: bool = False) -> Renewed:
        """Ask for more time; repeated when the path fails."""
        return cast("Renewed", self._call("Renew", message, timeout_s, wait_for_ready))

    def health(self, service: str = "", timeout_s: float | None = None) -> str:
        """Ask ``grpc.health.v1``: SERVING, NOT_SERVING, UNKNOWN, or SERVICE_UNKNOWN for a name nobody set."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = self._rpc("Check", self._health.Check, request, timeout_s, False)
        except PeerError as error:
            if error.details.get("grpc_code") == "NOT_FOUND":
                return "SERVICE_UNKNOWN"
            raise
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))

    def close(self) -> None:
        """Close the channel; running calls end with AbortedError. Idempotent."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call(self, name: str, message: Any, timeout_s: float | None, wait_for_ready: bool) -> Any:
        method = METHODS[name]
        if not isinstance(message, method.request.value_type):
            raise MisuseError(f"{name} takes a {method.request.value_type.__name__}, not a {type(message).__name__}")
        body = method.request.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise MisuseError(f"{name} has {len(body)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
        return self._decoded(method, self._rpc(name, self._calls[name], body, timeout_s, wait_for_ready))

    def _decoded(self, method: Method, body: bytes) -> Any:
        try:
            return method.response.decode(body)
        except MisuseError as error:
            message = f"{self.address} gave {method.name} an answer that can't be used: {error.message}"
            raise PeerError(message, hint=error.hint, reason="PROTOCOL") from error

    def _rpc(self, name: str, call: Any, request: Any, timeout_s: float | None, wait_for_ready: bool) -> Any:
        timeout_s = self._default_timeout_s if timeout_s is None else _checked_timeout_s(timeout_s)
        try:
            return call(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.RpcError as error:
            if self._closed:
                message = f"the client of {self.address} was closed during {name}"
                raise AbortedError(message, reason="CLIENT_CLOSED") from error
            raise decode_error(error, method=name, peer=self.address) from error
        except ValueError as error:
            raise MisuseError(f"the client of {self.address} is closed", reason="CLIENT_CLOSED") from error


def _checked_timeout_s(timeout_s: float) -> float:
    if not math.isfinite(timeout_s):
        raise MisuseError(f"a timeout of {timeout_s} s is none; every call needs a deadline")
    if timeout_s <= 0:
        raise DeadlineError("the deadline had passed before the call was made")
    return timeout_s
