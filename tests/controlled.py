"""A control handler that answers what a test put into it, its server and its clients."""

from __future__ import annotations

import contextlib
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from pdxfer.control import ControlClient, ControlServer
from pdxfer.control.endpoint import Endpoint
from pdxfer.errors import (
    PeerError,
)
from pdxfer.messages import (
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
