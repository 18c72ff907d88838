"""The control plane over real sockets: every message and error both ways, bounds, deaths, and what is left behind."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer import errors
from pdxfer.control import ControlClient
from pdxfer.control.convert import CODES, METHODS, SERVICE, code_of, encode_error
from pdxfer.control.endpoint import MAX_MESSAGE_BYTES, Endpoint
from pdxfer.control.v1 import transfer_pb2, transfer_pb2_grpc
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
    LIMITS,
    Abort,
    Mode,
    Renewed,
)
from tests import controlled
from tests.controlled import (
    ANSWERS,
    COMPLETE,
    DESCRIBE,
    EPOCH,
    OPEN,
    RENEW,
    WAIT_S,
    Handler,
    raw_channel,
    serving,
)

address, echo, socket_dir = controlled.address, controlled.echo, controlled.socket_dir


def refused(call: Any, request: Any) -> grpc.RpcError:
    """The error with which a foreign client's call ends."""
    with pytest.raises(grpc.RpcError) as caught:
        call(request, timeout=WAIT_S)
    return caught.value


def wire_request(name: str, message: Any) -> Any:
    return getattr(transfer_pb2, f"{name}Request").FromString(METHODS[name].request.encode(message))


# Messages, both ways.

epochs = st.binary(min_size=16, max_size=16)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=LIMITS["name_chars"])
ranks = st.integers(0, 2**32 - 1)
counters = st.integers(0, 2**64 - 1)
leases = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
by_field = {
    "epoch": epochs, "source_epoch": epochs, "session": epochs, "rank": ranks, "target_rank": ranks,
    "protocol_version": ranks, "protocol_newest": ranks,
    "generation": counters, "payload_bytes": counters, "first_token": counters,
    "chunks": st.integers(0, LIMITS["chunks"]), "chunk_bytes": st.integers(4096, 1 << 30),
    "mode": st.sampled_from(Mode), "relay": st.booleans(), "lease_s": leases,
    "layout": st.binary(max_size=200), "ticket": st.binary(max_size=200),
    "data_key": st.sampled_from((b"", bytes(range(32)))),
    "transports": st.lists(names, max_size=3).map(tuple),
}  # fmt: skip


def values(cls: type) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{f.name: by_field.get(f.name, names) for f in dataclasses.fields(cls)})


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("side", ["request", "response"])
def test_codecs_are_inverse(name: str, side: str) -> None:
    codec = getattr(METHODS[name], side)

    @given(values(codec.value_type))
    def check(value: Any) -> None:
        assert codec.decode(codec.encode(value)) == value

    check()


@pytest.mark.parametrize("name", METHODS)
def test_every_message_arrives_whole(name: str, echo: tuple[Handler, list[ControlClient]]) -> None:
    handler, clients = echo
    method = METHODS[name]

    @settings(max_examples=20)
    @given(values(method.request.value_type), values(method.response.value_type))
    def check(request: Any, response: Any) -> None:
        handler.answers[name] = response
        for client in clients:
            assert getattr(client, name.lower())(request) == response
            seen, deadline_s = handler.seen.get_nowait()
            assert seen == request
            assert type(seen) is type(request)
            assert 0 < deadline_s <= 30

    check()
    handler.answers.clear()


def test_dataclasses_and_protobuf_have_the_same_fields() -> None:
    for method in METHODS.values():
        for codec in (method.request, method.response):
            ours = {field.name for field in dataclasses.fields(codec.value_type)}
            assert ours == {field.name for field in codec.wire_type.DESCRIPTOR.fields}
    service = transfer_pb2.DESCRIPTOR.services_by_name["TransferService"]
    assert {m.name for m in service.methods} == set(METHODS)


@pytest.mark.parametrize(
    "message",
    [
        dataclasses.replace(COMPLETE, generation=2**64),
        dataclasses.replace(COMPLETE, target_rank=2**32),
        dataclasses.replace(COMPLETE, transfer="\ud800"),
        dataclasses.replace(COMPLETE, generation=1.5),
        DESCRIBE,
    ],
)
def test_what_the_wire_cannot_carry_is_misuse(message: Any, echo: tuple[Handler, list[ControlClient]]) -> None:
    handler, clients = echo
    with pytest.raises(MisuseError):
        clients[0].complete(message)
    assert handler.seen.empty()


# Errors, both ways.

ERRORS: list[PdxferError] = [
    PdxferError("plain", hint="look"),
    MisuseError("bad", hint="do not", details={"a": "b"}),
    MisuseError("what transfer?", reason="NOT_FOUND"),
    MisuseError("other content", reason="ALREADY_EXISTS"),
    TicketError("edited", reason="TICKET_SEAL"),
    TicketError("none", reason="TICKET_MISSING"),
    IncompatibleError("kv.k", "page_tokens", 16, 64, why="pages", hint="restart"),
    IncompatibleError("S", "axes", [["heads", 4]], "text"),
    PeerError("sibling died", reason="PEER_DIED"),
    StaleError("generation moved on", reason="STALE_GENERATION", details={"slot": "4", "want": "7", "have": "9"}),
    TransportError("closed"),
    DeadlineError("too late"),
    ExhaustedError("arena full", retry_after_s=1.25, hint="wait"),
    CorruptError("conv.q", "digest differs", hint="recompute"),
    AbortedError("drained", reason="DRAINING"),
    InternalError("invariant"),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: f"{type(e).__name__}-{e.reason}")
def test_an_error_is_raised_as_it_was(error: PdxferError, echo: tuple[Handler, list[ControlClient]]) -> None:
    handler, clients = echo
    handler.answers["Complete"] = error
    for client in clients:
        with pytest.raises(PdxferError) as caught:
            client.complete(COMPLETE)
        assert type(caught.value) is type(error)
        assert vars(caught.value) | {"reason": caught.value.reason} == vars(error) | {"reason": error.reason}
        assert str(caught.value) == str(error)
        handler.seen.get_nowait()
        assert handler.seen.empty(), "an answered call was repeated"
    handler.answers.clear()


def test_every_error_class_has_a_code_and_a_case() -> None:
    declared = {getattr(errors, name) for name in errors.__all__}
    assert set(CODES) == declared == {type(error) for error in ERRORS}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (StaleError("x"), "ABORTED"),
        (IncompatibleError("a", "b", 1, 2), "FAILED_PRECONDITION"),
        (ExhaustedError("x"), "RESOURCE_EXHAUSTED"),
        (CorruptError("a", "x"), "DATA_LOSS"),
        (DeadlineError("x"), "DEADLINE_EXCEEDED"),
        (TicketError("x"), "PERMISSION_DENIED"),
        (TicketError("x", reason="TICKET_MISSING"), "UNAUTHENTICATED"),
        (AbortedError("x"), "CANCELLED"),
        (MisuseError("x"), "INVALID_ARGUMENT"),
        (MisuseError("x", reason="NOT_FOUND"), "NOT_FOUND"),
        (PeerError("x"), "UNAVAILABLE"),
        (TransportError("x"), "UNAVAILABLE"),
        (InternalError("x"), "INTERNAL"),
    ],
)
def test_codes_are_those_of_the_table(error: PdxferError, code: str) -> None:
    assert code_of(error).name == code


def test_a_subclass_travels_as_its_parent(echo: tuple[Handler, list[ControlClient]]) -> None:
    class Special(StaleError):
        reason = "SPECIAL"

    handler, clients = echo
    handler.answers["Renew"] = Special("moved on")
    with pytest.raises(StaleError) as caught:
        clients[0].renew(RENEW)
    assert type(caught.value) is StaleError
    assert caught.value.reason == "SPECIAL"
    handler.answers.clear()
    handler.seen.get_nowait()


anything = st.text(max_size=5000)


@settings(max_examples=60)
@given(message=anything, hint=anything, details=st.dictionaries(st.text(max_size=100), anything, max_size=30))
def test_errors_of_any_size_fit_and_arrive(
    message: str, hint: str, details: dict[str, str], echo: tuple[Handler, list[ControlClient]]
) -> None:
    error = CorruptError("kv.k", message, hint=hint)
    error.details.update(details)
    status = encode_error(error)
    assert sum(len(value) for _, value in status.trailing_metadata) * 4 / 3 + len(quote(status.details)) < 8000
    handler, clients = echo
    handler.answers["Complete"] = error
    for client in clients:
        with pytest.raises(CorruptError) as caught:
            client.complete(COMPLETE)
        handler.seen.get_nowait()
        assert caught.value.message[:50] == error.message[:50].encode("utf-8", "replace").decode()
    handler.answers.clear()


def test_foreign_clients_get_rich_errors(address: str) -> None:
    answers = {"Open": IncompatibleError("kv.k", "dtype", "a", "b"), "Complete": ExhaustedError("x", retry_after_s=2)}
    with serving(address, answers) as (_, server, _), raw_channel(server) as channel:
        stub = transfer_pb2_grpc.TransferServiceStub(channel)
        incompatible = rpc_status.from_call(refused(stub.Open, wire_request("Open", OPEN)))
        exhausted = rpc_status.from_call(refused(stub.Complete, wire_request("Complete", COMPLETE)))
    info, failure = error_details_pb2.ErrorInfo(), error_details_pb2.PreconditionFailure()
    assert incompatible.details[0].Unpack(info)
    assert (info.domain, info.reason, info.metadata["component"]) == ("pdxfer", "INCOMPATIBLE", "kv.k")
    assert incompatible.details[1].Unpack(failure)
    assert failure.violations[0].subject == "kv.k.dtype"
    retry = error_details_pb2.RetryInfo()
    assert exhausted.details[1].Unpack(retry)
    assert retry.retry_delay.seconds == 2


def test_an_unexpected_exception_tells_the_peer_nothing(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(address, {"Complete": KeyError("secret")}) as (_, _, client), pytest.raises(InternalError) as caught:
        client.complete(COMPLETE)
    assert "secret" not in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert "secret" in caplog.text


def test_a_wrong_answer_of_the_handler_is_an_internal_error(address: str) -> None:
    with serving(address, {"Complete": Renewed(lease_s=1.0)}) as (_, _, client), pytest.raises(InternalError):
        client.complete(COMPLETE)


# What a peer may send.


@pytest.mark.parametrize(
    ("name", "message", "field", "value"),
    [
        ("Describe", DESCRIBE, "epoch", b"123"),
        ("Describe", DESCRIBE, "layout", b"x" * (LIMITS["layout_bytes"] + 1)),
        ("Describe", DESCRIBE, "worker", "w" * 257),
        ("Open", OPEN, "mode", 0),
        ("Open", OPEN, "mode", 77),
        ("Open", OPEN, "chunk_bytes", 1 << 40),
        ("Open", OPEN, "ticket", b"t" * (LIMITS["ticket_bytes"] + 1)),
        ("Complete", COMPLETE, "session", b""),
        ("Complete", COMPLETE, "epoch", b"e" * 17),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_requests_out_of_bounds_are_refused_before_the_handler(
    name: str, message: Any, field: str, value: Any, echo: tuple[Handler, list[ControlClient]]
) -> None:
    handler, clients = echo
    request = wire_request(name, message)
    setattr(request, field, value)
    for client in clients:
        with grpc.insecure_channel(Endpoint.parse(client.address).grpc_target) as channel:
            error = refused(getattr(transfer_pb2_grpc.TransferServiceStub(channel), name), request)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert handler.seen.empty()


def test_bytes_that_are_no_message_are_refused_before_the_handler(address: str) -> None:
    with serving(address) as (handler, server, _), raw_channel(server) as channel:
        call = channel.unary_unary(METHODS["Open"].path)
        assert refused(call, b"\xff\xff\xff").code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused(call, b"x" * (MAX_MESSAGE_BYTES + 1)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert handler.seen.empty()


def test_fields_of_a_newer_peer_are_ignored(address: str) -> None:
    newer = b"\xfa\x3e\x03new"  # field 1007, bytes
    with serving(address) as (handler, server, _), raw_channel(server) as channel:
        call = channel.unary_unary(METHODS["Open"].path)
        answer = call(METHODS["Open"].request.encode(OPEN) + newer, timeout=WAIT_S)
    assert handler.seen.get_nowait()[0] == OPEN
    assert METHODS["Open"].response.decode(answer + newer) == ANSWERS["Open"]


def test_a_full_sized_layout_passes_both_ways(address: str) -> None:
    layout = os.urandom(LIMITS["layout_bytes"])
    answers = {"Describe": dataclasses.replace(ANSWERS["Describe"], layout=layout)}
    with serving(address, answers) as (handler, _, client):
        assert client.describe(dataclasses.replace(DESCRIBE, layout=layout)).layout == layout
    assert handler.seen.get_nowait()[0].layout == layout


@pytest.fixture
def foreign() -> Iterator[tuple[ControlClient, dict[str, Any]]]:
    """A client of a server that is not ours; ``replies`` maps a method's name to bytes, a function of the context, or
    None: success without a message."""
    replies: dict[str, Any] = {}

    def reply(name: str) -> Any:
        def behaviour(body: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            if replies[name] is not None:
                yield replies[name] if isinstance(replies[name], bytes) else replies[name](context)

        return grpc.unary_stream_rpc_method_handler(behaviour)

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        handlers = {name: reply(name) for name in METHODS if name != "Renew"}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with ControlClient(f"tcp://127.0.0.1:{port}", default_timeout_s=WAIT_S) as client:
            yield client, replies
        server.stop(None).wait()


def test_a_foreign_server_becomes_a_peer_error(foreign: tuple[ControlClient, dict[str, Any]]) -> None:
    client, replies = foreign
    replies["Open"] = b"\xff\xff"
    replies["Describe"] = transfer_pb2.DescribeResponse(epoch=b"short").SerializeToString()
    replies["Complete"] = lambda context: context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not ours")
    replies["Abort"] = lambda context: context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy")
    for call in (lambda: client.open(OPEN), lambda: client.describe(DESCRIBE), lambda: client.complete(COMPLETE)):
        with pytest.raises(PeerError) as caught:
            call()
        assert caught.value.reason == "PROTOCOL"
    with pytest.raises(ExhaustedError):
        client.abort(Abort(transfer="t", epoch=EPOCH, session=b"", target_worker="w", target_rank=1, reason=""))
    with pytest.raises(PeerError) as caught:
        client.renew(RENEW)
    assert caught.value.details["grpc_code"] == "UNIMPLEMENTED"


def test_a_success_without_a_message_is_the_peer_s_fault(foreign: tuple[ControlClient, dict[str, Any]]) -> None:
    """One flipped bit in the frame around a message is enough: gRPC then hands out None."""
    client, replies = foreign
    replies["Complete"] = None
    with pytest.raises(PeerError, match="answered Complete with nothing") as caught:
        client.complete(COMPLETE)
    assert caught.value.reason == "PROTOCOL"


def test_a_lease_that_is_no_number_is_refused(foreign: tuple[ControlClient, dict[str, Any]]) -> None:
    client, replies = foreign
    wire = transfer_pb2.OpenResponse.FromString(METHODS["Open"].response.encode(ANSWERS["Open"]))
    wire.lease_s = float("nan")
    replies["Open"] = wire.SerializeToString()
    with pytest.raises(PeerError):
        client.open(OPEN)


def failing(code: grpc.StatusCode, text: str, body: bytes) -> Callable[[grpc.ServicerContext], bytes]:
    """A reply that fails with these details in the trailers."""

    def fail(context: grpc.ServicerContext) -> bytes:
        context.set_trailing_metadata((("grpc-status-details-bin", body),))
        context.abort(code, text)
        return b""

    return fail


@pytest.mark.parametrize(
    "sent", [StaleError("moved"), IncompatibleError("a", "b", 1, 2), ExhaustedError("full")], ids=lambda e: e.reason
)
def test_a_status_of_a_newer_version_keeps_its_blame(
    sent: PdxferError, foreign: tuple[ControlClient, dict[str, Any]]
) -> None:
    client, replies = foreign
    status = encode_error(sent)
    name = type(sent).__name__.encode()
    body = dict(status.trailing_metadata)["grpc-status-details-bin"]
    assert name in body
    replies["Open"] = failing(status.code, status.details, body.replace(name, b"X" * len(name)))
    with pytest.raises(type(sent)) as caught:
        client.open(OPEN)
    assert type(caught.value) is type(sent)
    assert caught.value.message == sent.message


def test_a_status_that_cannot_be_read_is_a_peer_error(foreign: tuple[ControlClient, dict[str, Any]]) -> None:
    client, replies = foreign
    replies["Open"] = failing(grpc.StatusCode.ABORTED, "x", b"\xff\xff")
    with pytest.raises(PeerError) as caught:
        client.open(OPEN)
    assert caught.value.reason == "PROTOCOL"
