"""The network of a simulation: control calls and data channels between processes, and what goes wrong on them.

In come production's own messages; out they come at the other end, encoded and decoded by production's codecs, some of
them late, twice, damaged or not at all. Calls run in tasks of the process that answers, and end when it dies. Data
channels are the reference transport's, whose messages lie in the sender's memory until they are released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pdxfer import wire
from pdxfer.control.convert import CODES, METHODS, decode_error, encode_error
from pdxfer.errors import (
    AbortedError,
    DeadlineError,
    InternalError,
    MisuseError,
    PdxferError,
    PeerError,
    TransportError,
)
from pdxfer.testing.faults import WrappedChannel, WrappedRegion, WrappedTransport
from pdxfer.testing.simulation.virtual import Process, World
from pdxfer.transport.base import Channel, Deadline, Message, Sending, Transport
from pdxfer.transport.memory import MemoryTransport
from pdxfer.transport.regions import RemoteRegion
from pdxfer.transport.runs import Runs, byte_view

__all__ = ["CALL_FAULTS", "MESSAGE_FAULTS", "Network"]

#: What can happen to a message on a data channel, and to a control call.
MESSAGE_FAULTS = (
    "drop", "duplicate", "reorder", "delay", "corrupt", "truncate", "zero", "swap", "garble", "slow", "disconnect",
)  # fmt: skip
CALL_FAULTS = (
    "lose_call", "lose_answer", "delay_call", "cut_open", "repeat_open", "cut_call", "cut_answer", "repeat_call",
)  # fmt: skip
_LATENCY_S = 0.0005
_RETRIES = 3  # of idempotent calls, as the gRPC client is configured


@dataclass
class Network:
    """All processes' ways to each other.

    Attributes:
        rates: probability of each fault, per message or call. fired: what was injected.
    """

    world: World
    rates: dict[str, float] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    servers: dict[str, _Server] = field(default_factory=dict)
    transports: dict[Process, list[_Transport]] = field(default_factory=dict)

    def hit(self, *kinds: str) -> str:
        """Which of these faults happens now, or ""."""
        for kind in kinds:
            rate = self.rates.get(kind)
            if rate and self.world.random.random() < rate:
                self.fired[kind] += 1
                return kind
        return ""

    def latency_s(self) -> float:
        """How long something takes on its way."""
        return self.world.random.random() * _LATENCY_S

    def server(self, handler: Any, addresses: Sequence[str], **_: Any) -> _Server:
        """Stands in for ``ControlServer``."""
        return _Server(self, handler, addresses[0])

    def client(self, address: str, **_: Any) -> _Client:
        """Stands in for ``ControlClient``."""
        if not address.startswith("unix:///"):
            raise MisuseError(f"control address {address!r} has no known scheme")
        return _Client(self, address)

    def transport(self, scheme: str, **_: Any) -> Transport:
        """Stands in for ``create_transport``."""
        assert self.world.current is not None
        process = self.world.current.process
        made = _Transport(self, MemoryTransport())
        self.transports.setdefault(process, []).append(made)
        return made

    def bury(self, process: Process) -> None:
        """What an operating system does for a process that died: nothing of it can be reached any more."""
        self.servers = {a: s for a, s in self.servers.items() if s.process is not process}
        for transport in self.transports.pop(process, ()):
            transport.close()


# -- control calls -------------------------------------------------------------------------------


class _Server:
    def __init__(self, network: Network, handler: Any, address: str) -> None:
        assert network.world.current is not None
        self.network, self.handler, self.address = network, handler, address
        self.process = network.world.current.process
        self.contact_addresses = (address,)

    def start(self) -> None:
        self.network.servers[self.address] = self

    def set_serving(self, *_: object) -> None:
        """Nobody asks for health here."""

    def stop(self) -> None:
        if self.network.servers.get(self.address) is self:
            del self.network.servers[self.address]


class _Call:
    """One call underway: what gRPC would tell of it."""

    def __init__(self, world: World) -> None:
        self.world, self.waiting = world, world.current
        self.body: bytes | None = None
        self.status: Any = None
        self.code_: Any = None

    @property
    def over(self) -> bool:
        return self.body is not None or self.code_ is not None

    def end(self, *, body: bytes | None = None, status: Any = None, code: Any = None) -> None:
        if not self.over:
            self.body, self.status, self.code_ = body, status, code if status is None else status.code
            if self.waiting is not None:
                self.world.wake(self.waiting)

    def code(self) -> Any:
        return self.code_

    def details(self) -> str:
        return self.status.details if self.status else ""

    def trailing_metadata(self) -> Any:
        return self.status.trailing_metadata if self.status else ()


class _Client:
    """Stands in for ``ControlClient``: the same methods, the same errors."""

    def __init__(self, network: Network, address: str) -> None:
        self.network, self.address = network, address
        self._closed = False
        self._calls: list[_Call] = []
        for name in METHODS:
            setattr(self, name.lower(), self._method(name))

    def close(self) -> None:
        self._closed = True
        for call in self._calls:
            call.end(code=CODES[AbortedError])

    def _method(self, name: str) -> Callable[..., Any]:
        method = METHODS[name]

        def call(message: Any, timeout_s: float = 5.0) -> Any:
            body, until_s = method.request.encode(message), self.network.world.now_s + timeout_s
            for left in reversed(range(_RETRIES if method.idempotent else 1)):
                done = self._try(method, body, until_s, self._fault(method, left))
                if done.body is not None:
                    return method.response.decode(done.body)
                lost = done.status is None and done.code_ is CODES[PeerError]
                if not lost or not left or self._closed:
                    break
                self.network.world.sleep(0.05)
            if self._closed:
                raise AbortedError(f"the client of {self.address} was closed", reason="CLIENT_CLOSED")
            raise decode_error(done, method=name, peer=self.address)

        return call

    def _fault(self, method: Any, left: int) -> str:
        """What happens to this try; only a first one is cut."""
        if not method.idempotent:
            return self.network.hit(*CALL_FAULTS[:5])
        return self.network.hit(*CALL_FAULTS[:3], *CALL_FAULTS[5:] * (left == _RETRIES - 1))

    def _try(self, method: Any, body: bytes, until_s: float, fault: str) -> _Call:
        if self._closed:
            raise MisuseError(f"the client of {self.address} is closed", reason="CLIENT_CLOSED")
        network, world = self.network, self.network.world
        if world.now_s >= until_s:
            raise DeadlineError("the deadline had passed before the call was made")
        call = _Call(world)
        self._calls.append(call)
        server = network.servers.get(self.address)
        if server is None or not server.process.alive or fault in ("cut_call", "cut_open"):
            world.sleep(network.latency_s())
            call.end(code=CODES[PeerError])
        elif fault != "lose_call":
            late_s = network.latency_s() + (world.random.random() * 1.5 if fault == "delay_call" else 0.0)
            world.spawn(server.process, self._answer, server, method, body, call, until_s, late_s, fault, name="call")
            if fault in ("repeat_call", "repeat_open"):
                late_s = world.random.random() * world.random.choice((0.001, 1.0))
                again = _Call(world)
                again.waiting = None
                world.spawn(server.process, self._answer, server, method, body, again, until_s + 9, late_s, "")
        while not call.over and world.now_s < until_s:
            world.park(until_s - world.now_s)
        if not call.over:
            call.end(code=CODES[DeadlineError])
        self._calls.remove(call)
        return call

    def _answer(
        self, server: _Server, method: Any, body: bytes, call: _Call, until_s: float, late_s: float, fault: str
    ) -> None:
        """In a task of the server's process."""
        network, world = self.network, self.network.world
        try:
            world.sleep(late_s)
            if world.now_s >= until_s or network.servers.get(self.address) is not server:
                return  # a call that was cancelled never reaches a handler
            ask = getattr(server.handler, method.name.lower())
            answer: dict[str, Any]
            try:
                value = ask(method.request.decode(body), deadline_s=min(30.0, until_s - world.now_s))
                answer = {"body": method.response.encode(value)}
            except InternalError as error:
                world.errors.append(f"{method.name} at {self.address}: {error}")
                answer = {"status": encode_error(error)}
            except PdxferError as error:
                answer = {"status": encode_error(error)}
            world.sleep(network.latency_s())
            if fault == "lose_answer":
                call.waiting = None  # until its deadline
            elif fault != "cut_answer":
                call.end(**answer)
        finally:
            if call.waiting is not None:
                call.end(code=CODES[PeerError])  # it died, or stopped


# -- data channels -------------------------------------------------------------------------------


class _Transport(WrappedTransport):
    def __init__(self, network: Network, inner: MemoryTransport) -> None:
        super().__init__(inner, partial(_Channel, network))
        self.network = network

    def connect(self, address: str, *, timeout_s: float) -> Channel:
        if self.network.hit("refuse"):
            raise TransportError("the connection was refused on purpose")
        return super().connect(address, timeout_s=timeout_s)


class _Channel(WrappedChannel):
    """The reference channel; faults hit what it receives."""

    def __init__(self, network: Network, inner: Channel) -> None:
        super().__init__(inner)
        self.network = network
        self._held: list[Message] = []
        self._last = b""
        self._mapped = network.world.random.random() < 0.5

    def send_all(self, header: bytes, payload: memoryview | None = None, *, timeout_s: float) -> Sending:
        self.network.world.preempt()
        return super().send_all(header, payload, timeout_s=timeout_s)

    def receive(self, *, timeout_s: float) -> Message:
        network, world, deadline = self.network, self.network.world, Deadline(timeout_s)
        while True:
            if self._held:
                return self._held.pop(0)
            message = super().receive(timeout_s=deadline.left_s())
            if message.region is not None and not self._mapped:
                message.region = _Remote(self, message.region)
            kind = network.hit(*MESSAGE_FAULTS)
            if not kind and isinstance(wire.decode(message.header), wire.Closed) and network.hit("lose_closed"):
                kind = "disconnect"  # the answer to Done is lost with its channel: there is another way to say it
            if kind in ("delay", "slow"):
                world.sleep(world.random.random() * (0.02 if kind == "delay" else 1.0))
            elif kind == "drop":
                message.release()
                continue
            elif kind == "duplicate":
                self._held.append(_copy(message))
            elif kind == "reorder" and (later := self._next()) is not None:
                self._held.append(message)
                message = later
            elif kind == "disconnect":
                message.release()
                self.close()
                raise TransportError("the channel was disconnected on purpose")
            elif kind:
                message = self._damaged(message, kind)
            if message.payload.nbytes:
                self._last = bytes(message.payload)
            elif not kind and world.random.random() < 0.5:
                world.sleep(network.latency_s())
            return message

    def _next(self) -> Message | None:
        try:
            return super().receive(timeout_s=0.01)
        except PdxferError:
            return None

    def _damaged(self, message: Message, kind: str) -> Message:
        random, header, payload = self.network.world.random, bytearray(message.header), bytearray(message.payload)
        if kind == "garble" or not payload:
            self.network.fired["garble"] += kind != "garble"
            header[random.randrange(len(header))] ^= 1 << random.randrange(8)
        elif kind == "corrupt":
            payload[random.randrange(len(payload))] ^= 1 << random.randrange(8)
        elif kind == "swap" and len(self._last) == len(payload):
            payload = bytearray(self._last)
        elif kind == "truncate":
            del payload[random.randrange(len(payload)) :]
        else:
            start = random.randrange(len(payload))
            payload[start:] = bytes(len(payload) - start)
        return Message(bytes(header), memoryview(payload), region=message.region, on_release=message.release)


class _Remote(WrappedRegion):
    """A region that is read, not mapped, as over a network."""

    def __init__(self, channel: _Channel, inner: RemoteRegion) -> None:
        super().__init__(inner)
        self._channel = channel

    def read_runs(self, target: memoryview, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
        network = self._channel.network
        network.world.preempt()
        nbytes = super().read_runs(target, target_offsets, source_offsets, lengths)
        if nbytes and network.hit("corrupt"):
            random = network.world.random
            run = random.randrange(len(lengths))
            if lengths[run]:
                at = int(target_offsets[run]) + random.randrange(int(lengths[run]))
                byte_view(target, "target")[at] ^= 1 << random.randrange(8)
        return nbytes


def _copy(message: Message) -> Message:
    return Message(message.header, memoryview(bytes(message.payload)), region=message.region)
