"""Protocol versions: today's agents against one of an earlier version, replayed as ``recorded/record.py`` took it down.

``protocol-1.bin`` was recorded at commit 4b5d3d3, the last that spoke version 1 alone. Each end is replayed: what we
say must be, but for what is random, what the earlier agent said itself, or it would not have understood.
"""

from __future__ import annotations

import base64
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import msgpack
import pytest
import zmq

from pdxfer.agent.service import host_name
from pdxfer.control.convert import SERVICE
from pdxfer.errors import IncompatibleError
from pdxfer.messages import PROTOCOL_OLDEST, PROTOCOL_VERSION, Describe, check_versions
from pdxfer.testing.oracle import Oracle
from pdxfer.ticket import TICKET_VERSION
from pdxfer.transport.tcp_channel import DATA, GRANT
from tests.pairs import Ends, wait_until
from tests.test_observe import ONE
from tests.workers import Worker

Fields = list[tuple[int, Any]]
RECORDED = Path(__file__).parent / "recorded" / f"protocol-{PROTOCOL_OLDEST}.bin"
FUTURE = (1000, b"of a version to come")
NEWEST = {"asked": 8, "answered": 9}  # the number of protocol_newest in Describe's two messages


def fields_of(body: bytes) -> Fields:
    """A protobuf message's top-level fields, read without any schema."""
    found, at = [], 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte, at = body[at], at + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(body):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        value = body[at : at + size]
        found.append((key >> 3, value if key & 7 == 2 else (key & 7, value)))
        at += size
    return found


def body_of(fields: Fields) -> bytes:
    """The inverse of ``fields_of``."""
    out = bytearray()

    def varint(value: int) -> None:
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        out.append(value)

    for number, value in fields:
        kind = 0 if isinstance(value, int) else 2 if isinstance(value, bytes) else value[0]
        varint(number << 3 | kind)
        if kind == 0:
            varint(value)
            continue
        if kind == 2:
            varint(len(value))
        out += value if kind == 2 else value[1]
    return bytes(out)


def changed(body: bytes, changes: dict[Any, Any]) -> bytes:
    return body_of([(n, changes.get(v, v)) for n, v in fields_of(body)])


def later(body: bytes, name: str, newest: int) -> bytes:
    """The same from the next version: fields that we do not know and, in Describe, a range that overlaps ours."""
    found = fields_of(body)
    if name == "Describe":
        found = [(1, PROTOCOL_VERSION), *found[1:], (newest, PROTOCOL_VERSION + 1)]
    return body_of([*found, FUTURE])


class Recording:
    """One conversation, and what was random in it."""

    def __init__(self) -> None:
        found = msgpack.unpackb(RECORDED.read_bytes())
        self.protocol, self.ticket_version = found["protocol"], found["ticket_version"]
        self.transfer, self.tokens, self.address = found["transfer"], found["tokens"], found["address"]
        self.tickets = [ticket.encode() for ticket in found["tickets"]]
        self.calls = {name: (asked, answer) for _, name, asked, answer in _calls(found["events"])}
        self.data = [event for event in found["events"] if event[0] != "call" and msgpack.unpackb(event[1])[0] != GRANT]
        request, answer = (dict(fields_of(body)) for body in self.calls["Describe"])
        self.target_epoch, self.data_key, self.source_epoch = request[2], request[7], answer[2]
        self.data_address, self.host = answer[7], answer[8]
        self.session = dict(fields_of(self.calls["Open"][1]))[3]


def _calls(events: list[list[Any]]) -> Iterator[list[Any]]:
    return (event for event in events if event[0] == "call")


def said(body: bytes, expected: bytes) -> None:
    """All that the earlier version said is said; what comes on top, it ignores."""
    missing = [field for field in fields_of(expected) if field not in fields_of(body)]
    assert not missing, (missing, fields_of(body))


@pytest.fixture
def recorded() -> Recording:
    return Recording()


def test_the_recording_is_of_the_version_before_and_tickets_have_not_changed(recorded):
    assert (recorded.protocol, PROTOCOL_OLDEST) == (PROTOCOL_VERSION - 1, PROTOCOL_VERSION - 1)
    assert recorded.ticket_version == TICKET_VERSION
    assert set(recorded.calls) == {"Describe", "Open", "Renew", "Abort"}
    assert [msgpack.unpackb(event[1])[0] for event in recorded.data].count(DATA) == 4


# -- the recorded source -----------------------------------------------------------------------------


class OldSource:
    """Answers as recorded, at addresses of its own, and notes what it was asked."""

    def __init__(self, recorded: Recording, *, answers: dict[str, bytes], future: bool) -> None:
        self.recorded, self.asked, self.future = recorded, dict[str, bytes](), future
        self.wrong: list[Any] = []
        self._directory = tempfile.TemporaryDirectory(prefix="pdxfer-recorded-")
        self.address = f"unix://{self._directory.name}/control"
        self._hub = zmq.Context()
        self._socket = self._hub.socket(zmq.ROUTER)
        self._socket.linger = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1", min_port=20_000)
        self.data_address = f"tcp://127.0.0.1:{port}".encode()
        self._answers = answers
        self._server = grpc.server(ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers((self,))
        self._server.add_insecure_port(self.address.replace("unix://", "unix:"))
        self._server.start()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def ticket(self, number: int) -> bytes:
        """A recorded ticket with our address in it."""
        packed = base64.urlsafe_b64decode(self.recorded.tickets[number])
        return base64.urlsafe_b64encode(packed.replace(self.recorded.address.encode(), self.address.encode()))

    def service(self, details: Any) -> Any:
        """For gRPC: the handler of a call."""
        name = details.method.rpartition("/")[2]

        def answer(request: bytes, context: Any) -> bytes:
            self.asked[name] = request
            body = self._answers.get(name) or self.recorded.calls[name][1]
            body = changed(body, {self.recorded.data_address: self.data_address})
            return later(body, name, NEWEST["answered"]) if self.future else body

        return grpc.unary_unary_rpc_method_handler(answer)

    def _serve(self) -> None:
        for what, *frames in self.recorded.data:
            if what == "sent":
                while True:
                    if not self._socket.poll(20_000):
                        self.wrong.append(("nothing came", frames))
                        return
                    name, *found = self._socket.recv_multipart()
                    if msgpack.unpackb(found[0])[0] != GRANT:
                        break
                if found != frames:
                    self.wrong.append((found, frames))
            else:
                if self.future and len(frames) > 1:
                    frames[1] = msgpack.packb([*msgpack.unpackb(frames[1]), FUTURE[1]])
                self._socket.send_multipart([name, *frames])

    def close(self, *, served: bool = True) -> None:
        """End. ``served``: whether the whole recording must have been played."""
        if served:
            self._thread.join(30)
            assert not self.wrong
        self._server.stop(0).wait()
        self._thread.join(30)
        self._hub.destroy(linger=0)
        self._directory.cleanup()


@contextmanager
def old_source(recorded: Recording, *, served: bool = True, future: bool = False, **answers: bytes):
    source = OldSource(recorded, answers=answers, future=future)
    try:
        with Worker(ONE[1], seed=2, worker="D", transports=("tcp",)) as target:
            yield source, target
            target.check_idle()
    finally:
        source.close(served=served)


@pytest.mark.parametrize("future", [False, True], ids=["as recorded", "as a later version may speak"])
def test_today_s_target_fetches_from_a_source_of_the_version_before(recorded, future):
    with old_source(recorded, future=future) as (source, target):
        before = target.reserve(recorded.transfer, recorded.tokens).copy()
        (received,) = target.fetch(source.ticket(0).decode(), recorded.transfer)
        oracle = Oracle.of(ONE[0], key=recorded.transfer, tokens=recorded.tokens)
        oracle.check(target.memory(recorded.transfer), before, first_token=0)
        received.release()
        target.ranks[0].give_back(recorded.transfer)
        (agent,) = target.agents
        agent.keep(source.ticket(1).decode())
        assert wait_until(lambda: "Renew" in source.asked, timeout_s=30)
        agent.decline(source.ticket(1).decode(), "ABORTED")
        assert wait_until(lambda: "Abort" in source.asked, timeout_s=30)
    changes = {recorded.target_epoch: agent.epoch, recorded.data_address: source.data_address}
    changes |= {ticket: source.ticket(number) for number, ticket in enumerate(recorded.tickets)}
    changes[recorded.data_key] = dict(fields_of(source.asked["Describe"]))[7]
    for name, body in source.asked.items():
        said(body, changed(recorded.calls[name][0], changes))


def test_a_source_without_a_version_in_common_is_refused_with_both_ranges(recorded):
    newer = [(n, 3 if n == 1 else v) for n, v in fields_of(recorded.calls["Describe"][1])]
    with old_source(recorded, served=False, Describe=body_of([*newer, (NEWEST["answered"], 4)])) as (source, target):
        target.reserve(recorded.transfer, recorded.tokens)
        with pytest.raises(IncompatibleError, match=r"'3 to 4' at the source and '1 to 2' at the target") as caught:
            target.fetch(source.ticket(0).decode(), recorded.transfer)
        target.ranks[0].give_back(recorded.transfer)
        assert "Open" not in source.asked
    assert caught.value.reason == "PROTOCOL_VERSION"
    assert "upgrade the target" in caught.value.hint


# -- the recorded target -----------------------------------------------------------------------------


@contextmanager
def calling(address: str):
    """A function from a call's name and bytes to its answer's."""
    with grpc.insecure_channel(address.replace("unix://", "unix:")) as channel:
        yield lambda name, body: channel.unary_unary(f"/{SERVICE}/{name}")(body, timeout=30)


def replay_data(recorded: Recording, address: str, session: bytes, future: bool) -> None:
    hub = zmq.Context()
    socket = hub.socket(zmq.DEALER)
    try:
        socket.connect(address)
        for what, *frames in recorded.data:
            frames = [frame.replace(recorded.session, session) for frame in frames]
            if what == "sent":
                if future and len(frames) > 1:
                    frames[1] = msgpack.packb([*msgpack.unpackb(frames[1]), FUTURE[1]])
                socket.send_multipart(frames)
                continue
            while True:
                assert socket.poll(30_000), frames
                found = socket.recv_multipart()
                if msgpack.unpackb(found[0])[0] != GRANT:
                    break
            assert found[0] == frames[0]
            assert found[2:] == frames[2:]
            if len(frames) > 1:
                timed = 2 * (len(frames) > 2)  # seconds of packing and digesting
                ours, theirs = (msgpack.unpackb(each[1]) for each in (found, frames))
                assert ours[: len(theirs) - timed] == theirs[: len(theirs) - timed]
    finally:
        hub.destroy(linger=500)


@pytest.mark.parametrize("future", [False, True], ids=["as recorded", "as a later version may speak"])
def test_a_target_of_the_version_before_fetches_from_today_s_source(recorded, future):
    with Worker(ONE[0], seed=1, worker="P", transports=("tcp",)) as source:
        (agent,) = source.agents
        (data,) = agent.contact_addresses
        changes = {recorded.source_epoch: agent.epoch, recorded.data_address: data.encode()}
        changes[recorded.host] = host_name().encode()
        with calling(agent.address) as real:

            def call(name: str) -> bytes:
                asked, answer = (changed(body, changes) for body in recorded.calls[name])
                found = real(name, later(asked, name, NEWEST["asked"]) if future else asked)
                if name == "Open":
                    changes[recorded.session] = dict(fields_of(found))[3]
                    answer = changed(answer, changes)
                said(found, answer)
                return found

            call("Describe")
            ends = Ends()
            oracle = Oracle.of(ONE[0], key=recorded.transfer, tokens=recorded.tokens)
            ticket = source.offer(recorded.transfer, recorded.tokens, oracle=oracle, on_end=ends)
            changes[recorded.tickets[0]] = ticket.encode()
            call("Open")
            replay_data(recorded, data, changes[recorded.session], future)
            ends.wait(1)
            changes[recorded.tickets[1]] = source.offer("declined", recorded.tokens, on_end=ends).encode()
            call("Renew")
            call("Abort")
            ends.wait(1)
        assert [outcome.partition(" ")[0].rstrip(":") for outcome in ends.outcomes] == ["completed", "declined"]
        for key in (recorded.transfer, "declined"):
            source.ranks[0].give_back(key)
        source.check_idle()


@pytest.mark.parametrize(
    ("oldest", "newest", "agreed"),
    [(1, 0, 1), (1, 1, 1), (1, 2, 2), (2, 0, 2), (2, 9, 2), (1, 9, 2), (3, 0, 0), (3, 4, 0), (0, 0, 0)],
)
def test_the_newest_version_in_common_counts(oldest, newest, agreed):
    about = Describe(protocol_version=oldest, protocol_newest=newest, epoch=bytes(16), worker="D", rank=0, layout=b"{}")
    if agreed:
        assert check_versions(about) == agreed
        return
    with Worker(ONE[0], seed=1, worker="P", transports=("tcp",)) as source:
        (agent,) = source.agents
        ranges = f"'{PROTOCOL_OLDEST} to {PROTOCOL_VERSION}' at the source and '{oldest} to {newest or oldest}' at the"
        with pytest.raises(IncompatibleError, match=ranges) as caught:
            agent.peers.client(agent.address).describe(about, timeout_s=30)
    assert caught.value.reason == "PROTOCOL_VERSION"
    assert f"upgrade the {'source' if oldest else 'target'}" in caught.value.hint
