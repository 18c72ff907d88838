"""The control plane over real sockets: every message and error both ways, bounds, deaths, and what is left behind."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import queue
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer import errors
from pdxfer.control import ControlClient, ControlServer
from pdxfer.control.convert import CODES, METHODS, SERVICE, code_of, encode_error
from pdxfer.control.endpoint import MAX_MESSAGE_BYTES, SHARED_OPTIONS, Endpoint
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
    Complete,
    Completed,
    ControlHandler,
    Describe,
    Description,
    Mode,
    Open,
    Opened,
    Renew,
    Renewed,
)

EPOCH, SESSION = b"e" * 16, b"s" * 16
WAIT_S = 60.0


class Handler(ControlHandler):
    """Answers what the test put into ``answers``; remembers what it saw; waits at ``gate`` when told to."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.answers: dict[str, Any] = answers or {}
        self.seen: queue.Queue[tuple[Any, float]] = queue.Queue()
        self.gate = threading.Event()
        self.gate.set()

    def _answer(self, name: str, message: Any, deadline_s: float) -> Any:
        self.seen.put((message, deadline_s))
        self.gate.wait(WAIT_S)
        answer = self.answers.get(name, ANSWERS[name])
        if isinstance(answer, Exception):
            raise answer
        return answer

    def describe(self, message: Describe, *, deadline_s: float) -> Description:
        return self._answer("Describe", message, deadline_s)

    def open(self, message: Open, *, deadline_s: float) -> Opened:
        return self._answer("Open", message, deadline_s)

    def complete(self, message: Complete, *, deadline_s: float) -> Completed:
        return self._answer("Complete", message, deadline_s)

    def abort(self, message: Abort, *, deadline_s: float) -> Completed:
        return self._answer("Abort", message, deadline_s)

    def renew(self, message: Renew, *, deadline_s: float) -> Renewed:
        return self._answer("Renew", message, deadline_s)


ANSWERS: dict[str, Any] = {
    "Describe": Description(
        protocol_version=1,
        epoch=EPOCH,
        worker="w",
        rank=0,
        layout_digest="d",
        layout=b"{}",
        transports=("tcp://h:1",),
        host="h",
    ),
    "Open": Opened(
        epoch=EPOCH, generation=3, session=SESSION, lease_s=2.5, chunks=4, payload_bytes=5, mode=Mode.PACKED
    ),
    "Complete": Completed(state="done"),
    "Abort": Completed(state="aborted"),
    "Renew": Renewed(lease_s=1.5),
}
DESCRIBE = Describe(protocol_version=1, epoch=EPOCH, worker="w", rank=0, layout=b"{}")
OPEN = Open(
    transfer="t", ticket=b"k", epoch=EPOCH, source_epoch=EPOCH, target_worker="w", target_rank=1, layout_digest="l",
    plan_digest="p", first_token=0, relay=False, transport="tcp://h:1", mode=Mode.DIRECT, chunk_bytes=1 << 20,
)  # fmt: skip
COMPLETE = Complete(
    transfer="t",
    epoch=EPOCH,
    source_epoch=EPOCH,
    session=SESSION,
    target_worker="w",
    target_rank=1,
    generation=3,
    payload_bytes=5,
)


RENEW = Renew(transfer="t", epoch=EPOCH, session=SESSION, target_worker="w", target_rank=1)


@pytest.fixture
def socket_dir() -> Iterator[str]:
    """A directory with a short name: pytest's own can be longer than a socket path may be."""
    path = tempfile.mkdtemp(prefix="pdx")
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["unix", "tcp"])
def address(request: pytest.FixtureRequest, socket_dir: str) -> str:
    return f"unix://{socket_dir}/control.sock" if request.param == "unix" else "tcp://127.0.0.1:0"


@contextlib.contextmanager
def serving(
    address: str, answers: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[Handler, ControlServer, ControlClient]]:
    """A handler, its server at ``address``, and a client of it."""
    handler = Handler(answers)
    with ControlServer(handler, [address], **options) as server:
        try:
            with ControlClient(server.contact_addresses[0], default_timeout_s=WAIT_S) as client:
                yield handler, server, client
        finally:
            handler.gate.set()


@pytest.fixture(scope="module")
def echo() -> Iterator[tuple[Handler, list[ControlClient]]]:
    """One handler behind both kinds of address, kept for the property tests."""
    handler, path = Handler(), tempfile.mkdtemp(prefix="pdx")
    with ControlServer(handler, [f"unix://{path}/control.sock", "tcp://127.0.0.1:0"]) as server:
        clients = [ControlClient(a, default_timeout_s=WAIT_S) for a in server.contact_addresses]
        yield handler, clients
        for client in clients:
            client.close()
    shutil.rmtree(path)


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether ``condition`` becomes true within a generous time."""
    end = time.monotonic() + 20
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def once_there(call: Callable[[], Any]) -> Any:
    """What it answers once the client has found the new server: it looks again every moment."""
    end = time.monotonic() + WAIT_S
    while True:
        try:
            return call()
        except PeerError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def raw_channel(server: ControlServer) -> grpc.Channel:
    """A foreign client: gRPC alone, without our options."""
    return grpc.insecure_channel(Endpoint.parse(server.contact_addresses[0]).grpc_target)


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


# Deadlines, deaths, load.


def test_the_client_gives_up_at_its_deadline(address: str) -> None:
    with serving(address) as (handler, _, client):
        handler.gate.clear()
        with pytest.raises(DeadlineError):
            client.complete(COMPLETE, 0.5)
        assert handler.seen.get(timeout=WAIT_S)[1] < 1.0  # gRPC rounds a deadline up a little.
        handler.gate.set()
        assert client.complete(COMPLETE) == ANSWERS["Complete"]


def test_timeouts_that_are_none(echo: tuple[Handler, list[ControlClient]]) -> None:
    handler, clients = echo
    with pytest.raises(DeadlineError):
        clients[0].complete(COMPLETE, 0.0)
    for timeout_s in (float("inf"), float("nan")):
        with pytest.raises(MisuseError):
            clients[0].complete(COMPLETE, timeout_s)
    assert handler.seen.empty()


def test_a_call_without_deadline_is_capped_and_cancelled(address: str) -> None:
    body = METHODS["Complete"].request.encode(COMPLETE)
    with serving(address, deadline_cap_s=0.25) as (handler, server, _), raw_channel(server) as channel:
        handler.gate.clear()
        call = channel.unary_unary(METHODS["Complete"].path)
        with pytest.raises(grpc.RpcError) as caught:
            call(body)
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        assert handler.seen.get_nowait()[1] == 0.25
        handler.gate.set()
        call(body, timeout=WAIT_S)
        assert handler.seen.get_nowait()[1] == 0.25


def test_too_many_calls_at_once_are_refused_not_queued(address: str) -> None:
    outcomes: queue.Queue[object] = queue.Queue()

    def call(client: ControlClient) -> None:
        try:
            outcomes.put(client.complete(COMPLETE))
        except PdxferError as error:
            outcomes.put(error)

    with serving(address, max_workers=2) as (handler, _, client), ThreadPoolExecutor(12) as pool:
        handler.gate.clear()
        for _ in range(12):
            pool.submit(call, client)
        # Eight are running or waiting behind the gate, so the first four outcomes are the refusals.
        assert all(isinstance(outcomes.get(timeout=WAIT_S), ExhaustedError) for _ in range(4))
        handler.gate.set()
        assert [outcomes.get(timeout=WAIT_S) for _ in range(8)] == [ANSWERS["Complete"]] * 8


def test_one_client_serves_many_threads(echo: tuple[Handler, list[ControlClient]]) -> None:
    handler, clients = echo
    messages = [dataclasses.replace(COMPLETE, generation=i) for i in range(100)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda message: clients[message.generation % 2].complete(message), messages))
    assert answers == [ANSWERS["Complete"]] * 100
    assert sorted(handler.seen.get_nowait()[0].generation for _ in range(100)) == list(range(100))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_nobody_there_is_a_peer_error_with_a_hint(socket_dir: str) -> None:
    for address in (f"unix://{socket_dir}/none.sock", f"tcp://127.0.0.1:{free_port()}"):
        with ControlClient(address, default_timeout_s=WAIT_S) as client:
            for call in (lambda: client.open(OPEN), lambda: client.complete(COMPLETE), client.health):
                with pytest.raises(PeerError) as caught:
                    call()
                assert caught.value.reason == "PEER_UNREACHABLE"
                assert caught.value.hint
                assert caught.value.details["peer"] == address


CHILD = """
import sys
from pdxfer.control import ControlServer
from tests.test_control import Handler
handler = Handler()
handler.gate.clear()
with ControlServer(handler, [sys.argv[1]]) as server:
    print(server.contact_addresses[0], flush=True)
    handler.seen.get()
    print("called", flush=True)
    handler.gate.wait()
"""


def test_a_server_killed_during_a_call_and_its_successor(address: str) -> None:
    root = Path(__file__).resolve().parent.parent
    child = subprocess.Popen([sys.executable, "-c", CHILD, address], stdout=subprocess.PIPE, text=True, cwd=root)
    with child, ThreadPoolExecutor(1) as pool:
        contact = child.stdout.readline().strip()
        with ControlClient(contact) as client:
            answer = pool.submit(client.open, OPEN, WAIT_S)
            assert child.stdout.readline() == "called\n"
            child.send_signal(signal.SIGKILL)
            with pytest.raises(PeerError) as caught:
                answer.result(WAIT_S)
            assert caught.value.reason in {"PEER_UNREACHABLE", "PEER_STOPPED"}
            child.wait()
            # The dead one's socket file is no obstacle, and the old client finds the new server.
            with ControlServer(Handler(), [contact]):
                assert once_there(lambda: client.complete(COMPLETE, WAIT_S)) == ANSWERS["Complete"]


def test_a_server_stopped_during_a_call(address: str) -> None:
    with serving(address) as (handler, server, client), ThreadPoolExecutor(2) as pool:
        handler.gate.clear()
        answer = pool.submit(client.open, OPEN)
        handler.seen.get(timeout=WAIT_S)
        stopped = pool.submit(server.stop, 0)
        with pytest.raises(PeerError):
            answer.result(WAIT_S)
        handler.gate.set()
        stopped.result(WAIT_S)


def test_a_running_call_may_finish_in_the_grace_of_stop(address: str) -> None:
    with serving(address) as (handler, server, client), ThreadPoolExecutor(2) as pool:
        handler.gate.clear()
        answer = pool.submit(client.open, OPEN)
        handler.seen.get(timeout=WAIT_S)
        stopped = pool.submit(server.stop, WAIT_S)
        handler.gate.set()
        assert answer.result(WAIT_S) == ANSWERS["Open"]
        stopped.result(WAIT_S)


def test_a_stuck_handler_is_reported_and_does_not_hold_stop(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with serving(address) as (handler, server, client), ThreadPoolExecutor(1) as pool:
        handler.gate.clear()
        answer = pool.submit(client.open, OPEN)
        handler.seen.get(timeout=WAIT_S)
        server.stop(0)
        assert "still run" in caplog.text
        with pytest.raises(PeerError):
            answer.result(WAIT_S)


def test_closing_a_client_ends_its_calls(address: str) -> None:
    with serving(address) as (handler, _, client), ThreadPoolExecutor(1) as pool:
        handler.gate.clear()
        answer = pool.submit(client.open, OPEN)
        handler.seen.get(timeout=WAIT_S)
        client.close()
        client.close()
        with pytest.raises(AbortedError) as caught:
            answer.result(WAIT_S)
        assert caught.value.reason == "CLIENT_CLOSED"
        with pytest.raises(MisuseError):
            client.complete(COMPLETE)


# Addresses and sockets.


@pytest.mark.parametrize(
    "text",
    ["", "localhost:80", "http://a:1", "unix://relative", "unix:///dir/", "unix:///a\0b", "tcp://", "tcp://host", "tcp://:5",
     "tcp://host:x", "tcp://host:70000", "tcp://user@host:5", "tcp://host:5/path", "tcp://[::1:5"],
)  # fmt: skip
def test_malformed_addresses_are_misuse(text: str) -> None:
    for make in (ControlClient, lambda address: ControlServer(Handler(), [address])):
        with pytest.raises(MisuseError):
            make(text)


@given(st.sampled_from(["127.0.0.1", "host.example", "::1"]), st.integers(0, 65535))
def test_tcp_addresses_parse_and_print(host: str, port: int) -> None:
    endpoint = Endpoint(host=host, port=port)
    assert Endpoint.parse(str(endpoint)) == endpoint


def test_socket_paths_too_long_are_refused_clearly(socket_dir: str) -> None:
    room = 107 - len(socket_dir) - 1
    with serving(f"unix://{socket_dir}/{'s' * room}") as (_, _, client):
        assert client.complete(COMPLETE) == ANSWERS["Complete"]
    with pytest.raises(MisuseError, match="107"):
        ControlServer(Handler(), [f"unix://{socket_dir}/{'s' * (room + 1)}"])


def test_socket_paths_with_odd_characters(socket_dir: str) -> None:
    address = f"unix://{socket_dir}/a %41?#ü.sock"
    with ControlServer(Handler(), [address]) as server, ControlClient(address) as client:
        assert server.contact_addresses == (address,)
        assert client.complete(COMPLETE, WAIT_S) == ANSWERS["Complete"]
        assert os.listdir(socket_dir) == ["a %41?#ü.sock"]


def test_the_socket_is_private_and_gone_after_stop(socket_dir: str) -> None:
    path = Path(socket_dir) / "made" / "control.sock"
    server = ControlServer(Handler(), [f"unix://{path}"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    server.start()
    server.stop()
    server.stop()
    assert list(path.parent.iterdir()) == []
    with pytest.raises(MisuseError):
        server.start()


def test_directories_open_to_others_are_refused(socket_dir: str) -> None:
    for mode in (0o770, 0o755, 0o777):
        os.chmod(socket_dir, mode)
        with pytest.raises(MisuseError, match="mode"):
            ControlServer(Handler(), [f"unix://{socket_dir}/control.sock"])
    os.chmod(socket_dir, 0o750)
    ControlServer(Handler(), [f"unix://{socket_dir}/control.sock"]).stop()


def test_what_lies_at_the_socket_path_is_respected(socket_dir: str) -> None:
    path = Path(socket_dir) / "control.sock"
    path.write_text("precious")
    with pytest.raises(MisuseError, match="not a socket"):
        ControlServer(Handler(), [f"unix://{path}"])
    assert path.read_text() == "precious"
    path.unlink()
    with ControlServer(Handler(), [f"unix://{path}"]), ControlClient(f"unix://{path}") as client:
        with pytest.raises(MisuseError, match="another server"):
            ControlServer(Handler(), [f"unix://{path}"])
        assert client.complete(COMPLETE, WAIT_S) == ANSWERS["Complete"]


def test_a_taken_port_is_refused() -> None:
    with serving("tcp://127.0.0.1:0") as (_, _, client), pytest.raises(MisuseError, match="can't listen"):
        ControlServer(Handler(), [client.address])


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "[2001:db8::1]"])
def test_addresses_other_machines_can_reach_are_refused(host: str) -> None:
    with pytest.raises(MisuseError):
        ControlServer(Handler(), [f"tcp://{host}:0"])


def test_wildcards_are_refused_even_when_remote_is_allowed() -> None:
    with pytest.raises(MisuseError, match="every interface"):
        ControlServer(Handler(), ["tcp://0.0.0.0:0"], insecure=True)
    with pytest.raises(MisuseError, match="can't listen"):
        ControlServer(Handler(), ["tcp://192.0.2.1:0"], insecure=True)


def test_two_servers_at_once_and_one_at_two_addresses(socket_dir: str) -> None:
    first, second = Handler({"Complete": Completed(state="first")}), Handler({"Complete": Completed(state="second")})
    with (
        ControlServer(first, [f"unix://{socket_dir}/1.sock", "tcp://localhost:0"]) as one,
        ControlServer(second, ["tcp://127.0.0.1:0", f"unix://{socket_dir}/2.sock"]) as two,
    ):
        for server, state in ((one, "first"), (two, "second")):
            for contact in server.contact_addresses:
                with ControlClient(contact) as client:
                    assert client.complete(COMPLETE, WAIT_S).state == state


def test_no_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with serving("tcp://127.0.0.1:0") as (_, _, client):
        assert client.complete(COMPLETE) == ANSWERS["Complete"]


# Health, reflection, traces left.


def test_health(address: str) -> None:
    with serving(address) as (_, server, client):
        assert client.health() == client.health(SERVICE) == "SERVING"
        assert client.health("transport.tcp") == "SERVICE_UNKNOWN"
        server.set_serving(True, "transport.tcp")
        server.set_serving(False)
        assert client.health() == client.health(SERVICE) == "NOT_SERVING"
        assert client.health("transport.tcp") == "SERVING"
        assert client.complete(COMPLETE) == ANSWERS["Complete"]


def test_reflection_can_be_had_or_not(address: str) -> None:
    ask = [reflection_pb2.ServerReflectionRequest(list_services="")]
    with ControlServer(Handler(), [address]) as server, raw_channel(server) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter(ask), timeout=WAIT_S)
        listed = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, health_pb2.DESCRIPTOR.services_by_name["Health"].full_name} <= listed
    with ControlServer(Handler(), [address], reflection=False) as server, raw_channel(server) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.ServerReflectionInfo(iter(ask), timeout=WAIT_S))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_nothing_is_left_open(socket_dir: str) -> None:
    def cycle(*, start: bool) -> None:
        server = ControlServer(Handler(), [f"unix://{socket_dir}/control.sock", "tcp://127.0.0.1:0"])
        if start:
            server.start()
            for contact in server.contact_addresses:
                with ControlClient(contact) as client:
                    client.complete(COMPLETE, WAIT_S)
                    client.health("", WAIT_S)
        server.stop()

    cycle(start=True)  # What gRPC opens once per process is not ours to close.
    fds, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for start in (True, True, False, False):
        cycle(start=start)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds)
    assert eventually(lambda: set(threading.enumerate()) <= threads)


def test_importing_the_package_does_not_load_grpc() -> None:
    code = "import sys, pdxfer.control; assert not {'grpc', 'google.protobuf'} & set(sys.modules), 'loaded'"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).resolve().parent.parent)


def test_both_ends_agree_on_keepalive() -> None:
    options = dict(SHARED_OPTIONS)
    # A server that sees pings more often than it permits closes the connection.
    assert options["grpc.keepalive_time_ms"] > options["grpc.http2.min_ping_interval_without_data_ms"]
    assert LIMITS["layout_bytes"] + 16 * LIMITS["name_chars"] * 4 < MAX_MESSAGE_BYTES
