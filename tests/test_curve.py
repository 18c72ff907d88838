"""CURVE on the data plane: who was introduced gets in, nobody else, and nobody on the way reads along."""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack, suppress

import pytest
import zmq

from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Parallel
from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.transport import create_transport
from tests.certificates import Authority
from tests.pairs import hand_over, pair
from tests.workers import layouts

LONG_S, SHORT_S = 60.0, 0.5
PAYLOAD = b"a page of somebody's cache: " * 8192


class Ends:
    """A CURVE listener, and transports that connect to it."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self.server = self.transport(curve=True)
        self.listener = self.server.listen()

    def transport(self, **options):
        return self.stack.enter_context(create_transport("tcp", **options))

    def connect(self, transport, address: str = "", timeout_s: float = LONG_S):
        """Both ends of a channel, or the client's error."""
        accepted: list[object] = []
        failed = threading.Event()

        def accept() -> None:
            while not failed.is_set() and not accepted:
                try:
                    accepted.append(self.listener.accept(0.05))
                except DeadlineError:
                    continue

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            channel = transport.connect(address or self.listener.contact_address, timeout_s=timeout_s)
        except BaseException:
            failed.set()
            raise
        finally:
            thread.join()
        return channel, accepted[0]


@pytest.fixture
def ends():
    with ExitStack() as stack:
        yield Ends(stack)


def test_who_was_introduced_gets_in_until_it_has_another_key(ends):
    old, new = ends.transport(), ends.transport(curve=True)
    ends.server.admit("0/d", old.public_key)
    there, here = ends.connect(old)
    region = old.allocate(len(PAYLOAD))
    region.view[:] = PAYLOAD
    there.send_all(b"header", region.view, timeout_s=LONG_S)
    with here.receive(timeout_s=LONG_S) as message:
        assert message.payload == PAYLOAD
    ends.server.admit("0/d", new.public_key)
    ends.connect(new)
    with pytest.raises(TransportError):
        ends.connect(old)
    here.send_all(b"still", timeout_s=LONG_S)  # what was let in stays
    assert there.receive(timeout_s=LONG_S).header == b"still"


def test_strangers_and_downgrades_are_refused_at_either_end(ends):
    stranger, address = ends.transport(), ends.listener.contact_address
    with pytest.raises(TransportError):
        ends.connect(stranger)
    assert ends.server.own_curve.refused == 1
    ends.server.admit("0/d", stranger.public_key)
    plain, _, key = address.rpartition("/")
    with pytest.raises((TransportError, DeadlineError)):
        ends.connect(stranger, plain, timeout_s=SHORT_S)  # it speaks NULL
    wrong = bytes(b ^ 1 for b in bytes.fromhex(key)).hex()
    with pytest.raises((TransportError, DeadlineError)):
        ends.connect(stranger, f"{plain}/{wrong}", timeout_s=SHORT_S)  # somebody else answers there
    careful = ends.transport(curve=True)
    with pytest.raises(MisuseError, match="no key"):
        careful.connect(plain, timeout_s=SHORT_S)
    open_listener = stranger.listen()
    with pytest.raises((TransportError, DeadlineError)):  # it has no key to show
        careful.connect(f"{open_listener.contact_address}/{key}", timeout_s=SHORT_S)
    ends.connect(stranger)


@pytest.mark.parametrize("key", ["", "00", "0" * 63, "0" * 65, "G" * 64, "0" * 64 + "/x", "A" * 64])
def test_what_is_no_key_is_no_address(ends, key):
    place = ends.listener.contact_address.rpartition("/")[0]
    with pytest.raises(MisuseError, match="no key"):
        ends.server.connect(f"{place}/{key}", timeout_s=SHORT_S)
    if key in ("", "00"):
        with pytest.raises(MisuseError):
            ends.server.admit("x", bytes.fromhex(key))


def test_a_host_that_is_not_this_one_needs_curve_or_insecure_at_either_end(ends, caplog):
    plain, careful = ends.transport(), ends.transport(curve=True)
    with pytest.raises(MisuseError, match="other hosts"):
        plain.listen("tcp://192.0.2.1:0")
    with pytest.raises(MisuseError, match="no key"):
        plain.connect("tcp://192.0.2.1:7000", timeout_s=SHORT_S)
    with pytest.raises(TransportError, match="can't listen"):
        careful.listen("tcp://192.0.2.1:0")
    assert "INSECURE" not in caplog.text
    exposed = ends.transport(insecure=True, contact_host="127.0.0.1")
    exposed.listen("tcp://0.0.0.0:0").close()
    assert exposed.insecure_listeners == 1
    assert "INSECURE" in caplog.text


def test_nobody_on_the_way_reads_along(ends):
    client = ends.transport()
    ends.server.admit("0/d", client.public_key)
    place, _, key = ends.listener.contact_address.rpartition("/")
    seen = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
        tap = threading.Thread(target=_tap, args=(door, int(place.rpartition(":")[2]), seen))
        tap.start()
        there, here = ends.connect(client, f"tcp://127.0.0.1:{port}/{key}")
        region = client.allocate(len(PAYLOAD))
        region.view[:] = PAYLOAD
        there.send_all(b"its header", region.view, timeout_s=LONG_S)
        with here.receive(timeout_s=LONG_S) as message:
            assert message.payload == PAYLOAD
        there.close()
        here.close()
        tap.join()
    assert len(seen) > len(PAYLOAD)
    assert b"somebody's cache" not in seen
    assert b"its header" not in seen


def _tap(door: socket.socket, port: int, seen: bytearray) -> None:
    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # either end may hang up first
            while data := source.recv(65536):
                seen.extend(data)
                sink.sendall(data)
            sink.shutdown(socket.SHUT_RDWR)

    with door.accept()[0] as client, socket.create_connection(("127.0.0.1", port)) as server:
        back = threading.Thread(target=pump, args=(server, client), daemon=True)
        back.start()
        pump(client, server)
        back.join()


def test_a_raw_zmq_socket_without_a_key_gets_no_word_in(ends):
    place = ends.listener.contact_address.rpartition("/")[0]
    with zmq.Context() as context, context.socket(zmq.DEALER) as sock:
        sock.linger = 0
        sock.connect(place)
        sock.send_multipart([b"hello"])
        assert not sock.poll(300)
    with pytest.raises(DeadlineError):
        ends.listener.accept(0.1)


def test_two_agents_hand_over_with_tls_and_curve(tmp_path):
    authority = Authority(tmp_path / "ca")
    prefill, decode = "spiffe://prod/prefill/0", "spiffe://prod/decode/0"
    both = {"control": ("tcp://127.0.0.1:0",), "transports": ("tcp",)}
    mine = {"tls": authority.tls(prefill, common_name="p", peers=(f"{decode}=D", f"{prefill}=P"))}
    # As a file has it: the config turns a mapping into Tls.
    tls = authority.tls(decode, common_name="d", peers=(f"{prefill}=P", f"{decode}=D"))
    theirs = {"tls": {"ca": tls.ca, "cert": tls.cert, "key": tls.key, "peers": list(tls.peers)}}
    with pair(*layouts(Parallel(tp=2), Parallel(tp=4)), of_source=mine, of_target=theirs, **both) as (source, target):
        for key in ("one", "two"):
            hand_over(source, target, key, audience="D", tenant="t")
        for agent in (*source.agents, *target.agents):
            assert all("/" in listener.contact_address[6:] for listener in agent._listeners)
            assert "insecure_listeners" not in agent.counters
            assert agent.transports["tcp"].own_curve.refused == 0


def test_old_switches_open_nothing():
    with pytest.raises(TypeError):
        AgentConfig(worker="w", allow_remote=True)
    with (
        pytest.raises(MisuseError, match="allow_remote"),
        Agent(AgentConfig(worker="w", transport_options={"tcp": {"allow_remote": True}})),
    ):
        pass
