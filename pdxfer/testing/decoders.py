"""Decoders: everything of pdxfer that reads bytes of a peer, a client or a file, as functions of bytes, for fuzzing.

In come bytes; out comes nothing, or a ``PdxferError``: that is what each of them promises for any input. Where frames
act on a channel, the real channel gets them, at the end of a real socket.

==============  ==============================================================================================
name            reads
==============  ==============================================================================================
``control``     a request or answer of the control plane (first byte: which), as protobuf
``status``      an error in the trailers of a call (google.rpc.Status)
``frame``       a header on a data channel
``ticket``      a ticket's text, from a router or client
``layout``      a worker's layout as JSON, and what planning makes of it
``region``      a region descriptor
``shm.hello``   a packet of the introduction over a Unix socket
``shm``         a packet of a shared-memory channel
``tcp.hello``   hello, welcome and refusal of the tcp transport
``tcp``         a message of a tcp channel (frames are told apart by their length in two bytes)
``config``      a model's ``config.json``, and the spec made of it
``settings``    ``kv_connector_extra_config``
``keys``        a file of ticket keys
==============  ==============================================================================================
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pdxfer.errors import DeadlineError, ExhaustedError, IncompatibleError, MisuseError, PdxferError, TransportError

__all__ = ["DECODERS", "Made"]

_ID = bytes(range(16))


#: A decoder, and valid inputs.
Made = tuple[Callable[[bytes], object], list[bytes]]


# -- control plane ---------------------------------------------------------------------------------


def _control() -> Made:
    from pdxfer import messages as m
    from pdxfer.control.convert import METHODS

    codecs: list[Any] = [codec for method in METHODS.values() for codec in (method.request, method.response)]
    reader: dict[str, Any] = {"transfer": "t", "epoch": _ID, "target_worker": "D", "target_rank": 1}
    values = (
        m.Describe(protocol_version=1, epoch=_ID, worker="P", rank=0, layout=b"{}", data_key=_ID * 2),
        m.Description(
            protocol_version=1, epoch=_ID, worker="P", rank=0, layout_digest="d", layout=b"{}",
            transports=("shm:///s", "tcp://127.0.0.1:1"), host="h",
        ),
        m.Open(
            **reader, ticket=b"ticket", source_epoch=_ID, layout_digest="d", plan_digest="p", first_token=3, relay=True,
            transport="shm:///s", mode=m.Mode.DIRECT, chunk_bytes=1 << 20,
        ),
        m.Opened(
            epoch=_ID, generation=1, session=_ID, lease_s=30.0, chunks=4, payload_bytes=1 << 20, mode=m.Mode.PACKED
        ),
        m.Complete(**reader, source_epoch=_ID, session=_ID, generation=1, payload_bytes=5),
        m.Completed(state="leased"),
        m.Abort(**reader, session=_ID, reason="why", ticket=b"ticket", relay=True),
        m.Completed(state="ended"),
        m.Renew(**reader, session=_ID, ticket=b"ticket"),
        m.Renewed(lease_s=3.5),
    )  # fmt: skip
    seeds = [bytes([i]) + codec.encode(value) for i, (codec, value) in enumerate(zip(codecs, values, strict=True))]
    return lambda data: codecs[data[0] % len(codecs)].decode(data[1:]) if data else None, seeds


class _FailedCall:
    """What gRPC shows of a failed call."""

    def __init__(self, code: Any, details: str, trailers: Any) -> None:
        self._code, self._details, self._trailers = code, details, trailers

    def code(self) -> Any:
        return self._code

    def details(self) -> str:
        return self._details

    def trailing_metadata(self) -> Any:
        return self._trailers


def _status() -> Made:
    from pdxfer.control.convert import code_of, decode_error, encode_error

    errors = (
        MisuseError("wrong", hint="right"),
        IncompatibleError("kv.k", "heads", [1, {"a": 2.5}], "two", why="because"),
        ExhaustedError("full", retry_after_s=2.5),
    )

    def decode(data: bytes) -> object:
        code = code_of(errors[data[0] % len(errors) if data else 0])
        call = _FailedCall(code, "details", (("grpc-status-details-bin", data[1:]), ("other", "x")))
        found = decode_error(call, method="Open", peer="unix:///p")
        assert isinstance(found, PdxferError)
        return str(found)

    statuses: list[Any] = [dict(encode_error(error).trailing_metadata or ()) for error in errors]
    return decode, [bytes([i]) + status["grpc-status-details-bin"] for i, status in enumerate(statuses)]


# -- tickets, frames, layouts ----------------------------------------------------------------------


def _frame() -> Made:
    from pdxfer import wire

    frames: Sequence[wire.Frame] = (
        wire.Hello(_ID, True, [0, 1]), wire.Exported(_ID, 2), wire.Tables(_ID, [["kv", 0, 2, bytes(16)]], True),
        wire.Want(_ID, [1, 2, 3]), wire.Data(_ID, 5, [_ID, _ID], 0.5, 0.25), wire.Done(_ID, 7),
        wire.Fail(_ID, "StaleError", "STALE", "gone"), wire.Closed(_ID),
        wire.Ask(_ID, b"request", True, [0]), wire.Opened(_ID, b"answer", [["kv", 0, 1, bytes(8)]], False),
    )  # fmt: skip
    return wire.decode, [wire.encode(frame) for frame in frames]


def _ticket() -> Made:
    from pdxfer.errors import StaleError, TicketError
    from pdxfer.keys import TicketKeys
    from pdxfer.ticket import RankIssuer, Ticket, issue_ticket, unseal

    issuers = [
        RankIssuer(
            worker="P", layout_digest="d" * 32, rank=rank, address=f"unix:///run/{rank}", epoch=_ID,
            keys=TicketKeys((bytes(32),)), sizes=((1, 0, 100), (0, 0, 7)),
        )
        for rank in range(3)
    ]  # fmt: skip
    facts: dict[str, Any] = {"kv_tokens": 9, "state_tokens": 8, "nonce": _ID, "sampled": [1, 70_000], "context": _ID}
    tickets = [issue_ticket(issuers, "request-1", **facts, tenant="t", audience="D"),
               issue_ticket(issuers[:1], "r", **facts)]  # fmt: skip
    issued = {t.sealed_bytes(t.ranks[0]) for t in tickets}

    def decode(data: bytes) -> object:
        ticket = Ticket.decode(data)
        with suppress(StaleError, TicketError):
            part = unseal(ticket, 0, _ID, [bytes(32)])  # other ranks' parts are sealed by these
            assert ticket.sealed_bytes(part) in issued, "a ticket that nobody issued was accepted"
        return ticket.encode()

    return decode, [ticket.encode().encode() for ticket in tickets]


def _layout() -> Made:
    from pdxfer.builders import Parallel, Storage, build_layout
    from pdxfer.layout import Layout
    from pdxfer.models import load_config, spec_from_config
    from pdxfer.plan import make_plan

    # Of four layers only: short inputs are mutated better.
    spec = spec_from_config({**load_config("qwen3-next-80b-a3b"), "num_hidden_layers": 4})
    small = Storage(page_tokens=16, pages=8, slots=2)
    layouts = [build_layout(spec, Parallel(tp=tp), small) for tp in (1, 2)]

    def decode(data: bytes) -> object:
        layout = Layout.from_bytes(data)
        assert layout.digest == Layout.from_bytes(layout.to_bytes()).digest
        return make_plan(layouts[0], layout).digest

    return decode, [layout.to_bytes() for layout in layouts]


def _region() -> Made:
    from pdxfer.transport import RegionDescriptor

    one = RegionDescriptor(scheme="shm", region_id=3, name="staging", nbytes=1 << 20)
    two = RegionDescriptor(scheme="shm", region_id=1, name="", nbytes=1, address=4096)
    return RegionDescriptor.from_bytes, [one.to_bytes(), two.to_bytes()]


# -- transports ------------------------------------------------------------------------------------


def _pair() -> tuple[socket.socket, socket.socket]:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    return one, two


def _shm_hello() -> Made:
    import msgpack

    from pdxfer.transport.base import Deadline
    from pdxfer.transport.shm import answer_hello

    ends = [end.detach() for end in _pair()]
    files: Sequence[list[int]] = ([], ends[:1], [os.memfd_create("fuzz")])

    def decode(data: bytes) -> None:
        mine, peer = _pair()
        with mine, peer:
            socket.send_fds(peer, [data[1:4096] or b"\0"], files[data[0] % 3] if data else [])
            answer_hello(mine, Deadline(0.0)).close()

    return decode, [bytes([n]) + msgpack.packb(["pdxfer-shm", version]) for n, version in ((1, 1), (1, 2), (2, 1))]


def _shm() -> Made:
    from pdxfer.transport.shm import ShmTransport
    from pdxfer.transport.shm_channel import ShmChannel
    from pdxfer.transport.vm import create_memfd

    transport = ShmTransport()
    unsealed = os.memfd_create("fuzz")
    os.truncate(unsealed, 1 << 20)
    files: Sequence[list[int]] = ([], [create_memfd(1 << 20, "fuzz")[0]], [unsealed])  # which, the first byte says

    def decode(data: bytes) -> None:
        (mine, peer), (acks, peer_acks) = _pair(), _pair()
        with peer, peer_acks:
            channel = ShmChannel(transport, mine, acks, 1)
            try:
                for packet in data[1:].split(b"|next|")[:4]:
                    socket.send_fds(peer, [packet[: 64 << 10] or b"\0"], files[data[0] % 3] if data else [])
                peer_acks.send(data[-8:] or b"\0")
                with suppress(DeadlineError):
                    while True:
                        channel.receive(timeout_s=0.0).release()
            finally:
                channel.close()

    prefix, (one, two) = struct.Struct("<B3xIQQQQ"), _region()[1]
    message = prefix.pack(1, 6, 0, 0, 0, 0) + b"header"
    return decode, [
        b"\0" + message,
        b"\1" + prefix.pack(2, 2, 1, 3, 0, 16) + b"hh" + one,
        b"\1" + prefix.pack(3, 2, 0, 3, 0, 0) + b"hh" + one,
        b"\2" + prefix.pack(3, 2, 0, 3, 0, 0) + b"hh" + one,
        b"\0" + prefix.pack(3, 2, 0, 1, 0, 0) + b"hh" + two,
        b"\0" + prefix.pack(4, 0, 0, 3, 0, 0) + b"|next|" + message,
    ]


def _tcp_hello() -> Made:
    import zmq

    from pdxfer.transport.tcp import read_hello, read_welcome
    from pdxfer.transport.tcp_channel import HELLO, MAGIC, REFUSE, VERSION, WELCOME, pack

    def decode(data: bytes) -> object:
        frames = [zmq.Frame(part) for part in _frames(data)]
        with suppress(TransportError):
            return read_hello(frames, MAGIC)
        return read_welcome(frames, MAGIC)

    said = (pack(HELLO, MAGIC, VERSION, 1 << 20), pack(WELCOME, MAGIC, VERSION, 1 << 20), pack(REFUSE, "no"))
    return decode, [_joined(frame) for frame in said]


def _tcp() -> Made:
    import zmq

    from pdxfer.transport.tcp import TcpTransport
    from pdxfer.transport.tcp_channel import BYE, DATA, GRANT, TcpChannel, pack
    from pdxfer.transport.tcp_io import Line

    class Loose(Line):
        """A line whose peer is this function."""

        def _send(self, frames: Any) -> None: ...

        def _hang_up(self) -> None: ...

        def end(self, why: str) -> None:
            said.append(why)
            super().end(why)

    said: list[str] = []
    transport = TcpTransport()

    def decode(data: bytes) -> object:
        said.clear()
        line = Loose(transport.io)
        channel = TcpChannel(transport, transport.io, line, 1 << 20)
        for message in data.split(b"|next|")[:64]:
            line.deliver([zmq.Frame(part) for part in _frames(message)])
        line.end("enough")
        channel.close()
        return said[0]

    data = _joined(pack(DATA), b"header", b"payload")
    seeds = [_joined(pack(DATA), b"header"), data, data + b"|next|" + _joined(pack(GRANT, 3)), _joined(pack(BYE))]
    return decode, seeds


def _frames(data: bytes) -> Iterator[bytes]:
    """Parts that are told apart by two bytes of length before each; at most eight."""
    for _ in range(8):
        if len(data) < 2:
            return
        nbytes = int.from_bytes(data[:2], "little")
        yield data[2 : 2 + nbytes]
        data = data[2 + nbytes :]


def _joined(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(2, "little") + part for part in parts)


# -- files -----------------------------------------------------------------------------------------


def _config() -> Made:
    from pdxfer.hf_config import decode_config
    from pdxfer.models import load_config, spec_from_config

    names = ("qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "nemotron-3-ultra-550b-a55b", "glm-5.3-flash")
    seeds = [json.dumps(load_config(name)).encode() for name in names]
    return lambda data: spec_from_config(decode_config(data, "fuzz")).digest, seeds


def _settings() -> Made:
    from pdxfer.connectors.vllm_settings import Settings

    def decode(data: bytes) -> object:
        try:
            extra = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MisuseError("vLLM parses it before us") from error
        if not isinstance(extra, dict):
            raise MisuseError("vLLM takes an object only")
        return Settings.parse(extra, "e").agent_config(1)

    tls = {"ca": "ca.pem", "cert": "c.pem", "key": "c.key", "peers": ["spiffe://prod/decode/*"]}
    one = {"worker": "w", "control": ["tcp://127.0.0.1:7000"], "listen": {"tcp": "tcp://127.0.0.1:7001"}, "tls": tls}
    two = {
        "timeout_s": 5, "transports": ["shm"], "transfer_mode": "packed", "accept_state_dtypes": ["float32"],
        "window": 2, "lease_s": 3.5, "quotas": {"peer_bytes": 5}, "digests": False, "ticket_keys": "",
    }  # fmt: skip
    return decode, [json.dumps(one).encode(), json.dumps(two).encode()]


def _keys() -> Made:
    from pdxfer.keys import parse_keys

    seeds = [b"# two\n" + b"0f" * 32 + b"\n" + b"A1" * 40 + b" # old\n", b"00" * 32]
    return lambda data: parse_keys(data, "fuzz"), seeds


#: Each makes its decoder; once per process is enough.
DECODERS: Mapping[str, Callable[[], Made]] = {
    "config": _config, "control": _control, "frame": _frame, "keys": _keys, "layout": _layout, "region": _region,
    "settings": _settings, "shm": _shm, "shm.hello": _shm_hello, "status": _status, "tcp": _tcp,
    "tcp.hello": _tcp_hello, "ticket": _ticket,
}  # fmt: skip
