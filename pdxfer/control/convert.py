"""Between the values of ``pdxfer.messages`` and ``pdxfer.errors`` and their form on the wire, both ways.

In come dataclasses, errors or bytes from a peer; out go bytes and statuses, or values that are valid by
construction: the bounds are those of ``messages``, whose constructors run on everything that arrives. The
only module that knows both protobuf and our own types; it opens no channel and keeps no state.

An error travels as a google.rpc.Status in the trailers::

    ErrorInfo            reason, domain "pdxfer", metadata: the error's details plus pdxfer-class, pdxfer-hint, ...
    RetryInfo            for ExhaustedError: seconds until a retry can succeed
    PreconditionFailure  for IncompatibleError: the field that differs

gRPC bounds all trailers of a call to about 8 KiB, so texts are clipped until the whole fits ``_STATUS_BYTES``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pdxfer.control.v1 import transfer_pb2 as pb
from pdxfer.errors import (
    AbortedError,
    CorruptError,
    DeadlineError,
    ExhaustedError,
    IncompatibleError,
    InternalError,
    MisuseError,
    PdxferError,
    PeerError,
    StaleError,
    TicketError,
    TransportError,
)
from pdxfer.messages import (
    Abort,
    Complete,
    Completed,
    Describe,
    Description,
    Mode,
    Open,
    Opened,
    Renew,
    Renewed,
)

__all__ = ["CODES", "METHODS", "SERVICE", "Codec", "Method", "code_of", "decode_error", "encode_error"]

SERVICE: str = pb.DESCRIPTOR.services_by_name["TransferService"].full_name

T = TypeVar("T")

_MODE_TO_WIRE = {Mode.PACKED: pb.MODE_PACKED, Mode.DIRECT: pb.MODE_DIRECT}
_MODE_FROM_WIRE = {number: mode for mode, number in _MODE_TO_WIRE.items()}


@dataclass(frozen=True, kw_only=True)
class Codec(Generic[T]):
    """One dataclass and its protobuf twin, whose fields have the same names."""

    value_type: type[T]
    wire_type: type[Message]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        return tuple(field.name for field in fields(self.value_type))  # type: ignore[arg-type]

    def encode(self, value: T) -> bytes:
        """Serialise; raises MisuseError when a field has a type or range that the wire can't carry."""
        try:
            return self.wire_type(**{name: _to_wire(getattr(value, name)) for name in self._names}).SerializeToString()
        except (AttributeError, TypeError, ValueError) as error:
            raise MisuseError(f"{self.value_type.__name__} can't be sent: {error}") from error

    def decode(self, body: bytes) -> T:
        """Parse and validate; raises MisuseError on anything malformed. Unknown fields are ignored."""
        try:
            wire = self.wire_type.FromString(body)
        except DecodeError as error:
            raise MisuseError(f"{self.value_type.__name__} can't be read: not a valid message") from error
        return self.value_type(**{name: _from_wire(name, getattr(wire, name)) for name in self._names})


def _to_wire(value: object) -> object:
    return _MODE_TO_WIRE[value] if isinstance(value, Mode) else value


def _from_wire(name: str, value: Any) -> object:
    if name == "mode":
        if value not in _MODE_FROM_WIRE:
            raise MisuseError(f"mode {value} is unknown", hint="the peer may run a newer version")
        return _MODE_FROM_WIRE[value]
    return value if isinstance(value, (int, float, str, bytes)) else tuple(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One call of the service; ``idempotent`` ones may be repeated by gRPC when the path fails."""

    name: str
    request: Codec[Any]
    response: Codec[Any]
    idempotent: bool

    @property
    def path(self) -> str:
        """The call's full name on the wire."""
        return f"/{SERVICE}/{self.name}"


def _method(name: str, request: type, response: type, *, idempotent: bool = True) -> Method:
    return Method(
        name=name,
        request=Codec(value_type=request, wire_type=getattr(pb, f"{name}Request")),
        response=Codec(value_type=response, wire_type=getattr(pb, f"{name}Response")),
        idempotent=idempotent,
    )


#: Every call, by its name in the service; the handler's method is the name in lower case.
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        _method("Describe", Describe, Description),
        _method("Open", Open, Opened, idempotent=False),
        _method("Complete", Complete, Completed),
        _method("Abort", Abort, Completed),
        _method("Renew", Renew, Renewed),
    )
}

Code = grpc.StatusCode

#: The code of each error class; a class that is not here has its parent's.
CODES: Mapping[type[PdxferError], grpc.StatusCode] = {
    PdxferError: Code.UNKNOWN,
    MisuseError: Code.INVALID_ARGUMENT,
    TicketError: Code.PERMISSION_DENIED,
    IncompatibleError: Code.FAILED_PRECONDITION,
    PeerError: Code.UNAVAILABLE,
    StaleError: Code.ABORTED,
    TransportError: Code.UNAVAILABLE,
    DeadlineError: Code.DEADLINE_EXCEEDED,
    ExhaustedError: Code.RESOURCE_EXHAUSTED,
    CorruptError: Code.DATA_LOSS,
    AbortedError: Code.CANCELLED,
    InternalError: Code.INTERNAL,
}

#: Reasons that change the code of their class.
_CODES_BY_REASON = {
    (MisuseError, "NOT_FOUND"): Code.NOT_FOUND,
    (MisuseError, "ALREADY_EXISTS"): Code.ALREADY_EXISTS,
    (TicketError, "TICKET_MISSING"): Code.UNAUTHENTICATED,
}

#: Which class to raise for a pdxfer status whose class this version does not know.
_CLASS_BY_CODE: Mapping[grpc.StatusCode, type[PdxferError]] = {
    **{code: cls for cls, code in list(CODES.items())[::-1]},
    **{code: cls for (cls, _), code in _CODES_BY_REASON.items()},
}
_CLASS_BY_NAME: Mapping[str, type[PdxferError]] = {cls.__name__: cls for cls in CODES}

_DOMAIN = "pdxfer"
_STATUS_BYTES = 6 << 10
_CLIP_CHARS = (512, 256, 128, 64, 32)
_DETAILS_MAX = 16
_RETRY_AFTER_S_MAX = 3600.0


def code_of(error: PdxferError) -> grpc.StatusCode:
    """The gRPC code under which ``error`` travels."""
    for cls in type(error).__mro__:
        code = _CODES_BY_REASON.get((cls, error.reason)) or CODES.get(cls)  # type: ignore[arg-type]
        if code is not None:
            return code
    raise InternalError(f"{type(error).__name__} has no gRPC code")


def encode_error(error: PdxferError) -> grpc.Status:
    """Pack an error for ``context.abort_with_status``; long texts are clipped, further details dropped."""
    for clip_chars in _CLIP_CHARS:
        status = _build_status(error, clip_chars)
        # The message travels twice: base64 in the details, and percent-encoded (3 for 1 at worst) in its own header.
        if status.ByteSize() * 4 // 3 + 3 * len(status.message.encode()) <= _STATUS_BYTES:
            break
    return rpc_status.to_status(status)


def _build_status(error: PdxferError, clip_chars: int) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=_clip(error.reason, 63), domain=_DOMAIN)
    for key, value in list(error.details.items())[:_DETAILS_MAX]:
        info.metadata[_clip(str(key), 64)] = _clip(str(value), clip_chars)
    info.metadata["pdxfer-class"] = next(cls.__name__ for cls in type(error).__mro__ if cls in CODES)
    if error.hint:
        info.metadata["pdxfer-hint"] = _clip(error.hint, clip_chars)
    if isinstance(error, IncompatibleError):
        info.metadata["pdxfer-source"] = _value_to_wire(error.source, clip_chars)
        info.metadata["pdxfer-target"] = _value_to_wire(error.target, clip_chars)
    status = status_pb2.Status(code=code_of(error).value[0], message=_clip(error.message, 2 * clip_chars))
    status.details.add().Pack(info)
    if isinstance(error, ExhaustedError):
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(_bounded_delay_s(error.retry_after_s) * 1e9))
        status.details.add().Pack(retry)
    if isinstance(error, IncompatibleError):
        failure = error_details_pb2.PreconditionFailure()
        subject = _clip(f"{error.component}.{error.field}", clip_chars)
        failure.violations.add(type="INCOMPATIBLE", subject=subject, description="differs between source and target")
        status.details.add().Pack(failure)
    return status


def _clip(text: str, chars: int) -> str:
    """Valid UTF-8 of at most ``chars`` characters; what is missing is marked by dots."""
    text = text if len(text) <= chars else text[: chars - 3] + "..."
    return text.encode("utf-8", "replace").decode()


def _value_to_wire(value: object, clip_chars: int) -> str:
    """JSON when it gives the value back as it was, else its clipped ``repr`` as a JSON string."""
    try:
        text = json.dumps(value, allow_nan=False)
        if len(text) <= clip_chars and json.loads(text) == value:
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    return json.dumps(_clip(repr(value), clip_chars // 2), ensure_ascii=False)


def _value_from_wire(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _bounded_delay_s(delay_s: float) -> float:
    return min(max(delay_s, 0.0), _RETRY_AFTER_S_MAX) if math.isfinite(delay_s) else _RETRY_AFTER_S_MAX


def decode_error(call: Any, *, method: str, peer: str) -> PdxferError:
    """Turn a failed call (``grpc.RpcError`` that is also a ``grpc.Call``) into the error to raise.

    A status of ours becomes the class it was at the peer; anything else came from gRPC itself or from a
    foreign server, and is judged by its code.
    """
    try:
        status = rpc_status.from_call(call)
        info = _unpack(status, error_details_pb2.ErrorInfo) if status is not None else None
        if info is not None and info.domain == _DOMAIN:
            return _rebuild(call.code(), status, info)
    except (ValueError, DecodeError, KeyError):
        pass  # damaged on its way
    return _from_grpc_itself(call.code(), call.details() or "", method=method, peer=peer)


def _unpack(status: status_pb2.Status, wire_type: type[Any]) -> Any:
    for detail in status.details:
        if detail.Is(wire_type.DESCRIPTOR):
            found = wire_type()
            detail.Unpack(found)
            return found
    return None


def _rebuild(code: grpc.StatusCode, status: status_pb2.Status, info: Any) -> PdxferError:
    metadata = dict(info.metadata)
    cls = _CLASS_BY_NAME.get(metadata.get("pdxfer-class", "")) or _CLASS_BY_CODE.get(code, PdxferError)
    details = {key: value for key, value in metadata.items() if not key.startswith("pdxfer-")}
    # Past the constructors: they would compose the message anew from fields that may have been clipped.
    error = cls.__new__(cls)
    PdxferError.__init__(
        error, status.message, hint=metadata.get("pdxfer-hint", ""), reason=info.reason or cls.reason, details=details
    )
    if isinstance(error, IncompatibleError):
        error.field = details.get("field", "*")
        error.source = _value_from_wire(metadata.get("pdxfer-source", ""))
        error.target = _value_from_wire(metadata.get("pdxfer-target", ""))
    if isinstance(error, (CorruptError, IncompatibleError)):
        error.component = details.get("component", "*")
    if isinstance(error, ExhaustedError):
        retry = _unpack(status, error_details_pb2.RetryInfo)
        delay = retry.retry_delay if retry is not None else None
        error.retry_after_s = _bounded_delay_s(delay.seconds + delay.nanos / 1e9) if delay is not None else 0.1
    return error


def _from_grpc_itself(code: grpc.StatusCode, text: str, *, method: str, peer: str) -> PdxferError:
    details = {"peer": peer, "method": method, "grpc_code": code.name, "grpc_details": _clip(text, 512)}
    if code is Code.DEADLINE_EXCEEDED:
        return DeadlineError(f"{peer} did not answer {method} in time", hint="check the agent's load", details=details)
    if code is Code.UNAVAILABLE:
        hint = "check that the agent runs and listens at this address"
        return PeerError(f"{peer} can't be reached for {method}", hint=hint, reason="PEER_UNREACHABLE", details=details)
    if code is Code.CANCELLED:
        return PeerError(f"{peer} stopped during {method}", reason="PEER_STOPPED", details=details)
    if code is Code.RESOURCE_EXHAUSTED and "larger than max" not in text:
        error = ExhaustedError(f"{peer} has too many calls at once to take {method}", hint="try again later")
        error.details.update(details)
        return error
    if code is Code.UNIMPLEMENTED:
        hint = "compare the versions of the two agents, and the address"
        return PeerError(f"{peer} does not offer {method}", hint=hint, reason="PROTOCOL", details=details)
    return PeerError(f"{peer} answered {method} with {code.name}", reason="PROTOCOL", details=details)
