"""What is special about tcp: who can reach it, what a peer may send, networks that fail."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress

import msgpack
import psutil
import pytest
import zmq

from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.testing.transport import LONG_S, connect_pair
from pdxfer.transport import create_transport, tcp
from pdxfer.transport.tcp_channel import BYE, CREDITS, DATA, GRANT, HELLO, MAGIC, READY, VERSION, WELCOME, pack


@pytest.fixture
def transport():
    with create_transport("tcp") as transport:
        yield transport


# -- addresses and policy ------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "192.0.2.1", "10.1.2.3", "[2001:db8::1]"])
def test_only_loopback_by_default(transport, host):
    with pytest.raises(MisuseError, match="reached from other hosts"):
        transport.listen(f"tcp://{host}:0")


def listening_addresses():
    connections = psutil.Process().net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def test_the_sockets_really_open_are_loopback_only(transport):
    before = listening_addresses()
    transport.listen()
    transport.listen("tcp://localhost:0")
    assert listening_addresses() - before <= {"127.0.0.1", "::1"}


def test_a_wildcard_needs_permission_and_a_contact_host():
    with create_transport("tcp", insecure=True) as transport, pytest.raises(MisuseError, match="contact_host"):
        transport.listen("tcp://0.0.0.0:0")
    with create_transport("tcp", insecure=True, contact_host="127.0.0.1") as transport:
        listener = transport.listen("tcp://*:0")
        assert listener.contact_address.startswith("tcp://127.0.0.1:")
        sender, receiver = connect_pair(transport, listener)
        sender.send_all(b"h", timeout_s=LONG_S)
        assert receiver.receive(timeout_s=LONG_S).header == b"h"


def test_ipv6():
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        with create_transport("tcp") as transport:
            listener = transport.listen("tcp://[::1]:0")
            assert listener.contact_address.startswith("tcp://[::1]:")
            sender, receiver = connect_pair(transport, listener)
            sender.send_all(b"h", timeout_s=LONG_S)
            assert receiver.receive(timeout_s=LONG_S).header == b"h"
            return
    pytest.skip("this machine has no IPv6 loopback")


def test_bad_addresses(transport):
    for address in ("tcp://nohost", "tcp://:1", "tcp://h:", "tcp://h:x", "tcp://h:65536", "tcp://::1:5", "tcp://h:-1"):
        with pytest.raises(MisuseError):
            transport.listen(address)
        with pytest.raises(MisuseError):
            transport.connect(address, timeout_s=LONG_S)
    with pytest.raises(TransportError, match="resolved"):
        transport.connect("tcp://no-such-host.invalid:1", timeout_s=LONG_S)
    taken = transport.listen().contact_address
    with pytest.raises(TransportError, match="can't listen"):
        transport.listen(taken)
    for host, port in (("127.0.0.1", 1), ("::1", 65535), ("name.example", 80)):
        assert tcp.split_host_port(tcp.join_host_port(host, port)) == (host, port)


@pytest.mark.parametrize("options", [{"max_payload_bytes": 0}, {"heartbeat_s": 2.0, "dead_after_s": 1.0}])
def test_bad_options(options):
    with pytest.raises(MisuseError):
        create_transport("tcp", **options)


def test_payloads_the_peer_does_not_take(transport):
    with create_transport("tcp", max_payload_bytes=1000) as small:
        sender, receiver = connect_pair(transport, small.listen())
        with pytest.raises(MisuseError, match="takes 1000"):
            sender.send_all(b"", memoryview(bytes(1001)), timeout_s=LONG_S)
        sender.send_all(b"", memoryview(bytes(1000)), timeout_s=LONG_S)
        assert receiver.receive(timeout_s=LONG_S).payload.nbytes == 1000
        receiver.send_all(b"", memoryview(bytes(1 << 20)), timeout_s=LONG_S)  # each side has its own bound
        assert sender.receive(timeout_s=LONG_S).payload.nbytes == 1 << 20


# -- peers that don't keep to the protocol ---------------------------------------------------------


class Impostor:
    """A ZMQ peer that shakes hands properly and then sends whatever it likes."""

    def __init__(self, listener):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger, self.socket.rcvtimeo = 0, round(LONG_S * 1000)
        self.socket.connect(listener.contact_address)

    def shake_hands(self, listener):
        accepted = []
        accepting = threading.Thread(target=lambda: accepted.append(listener.accept(LONG_S)))
        accepting.start()
        self.socket.send(pack(HELLO, MAGIC, VERSION, 1 << 20))
        assert msgpack.unpackb(self.socket.recv())[:3] == [WELCOME, MAGIC, VERSION]
        self.socket.send(pack(READY))
        accepting.join()
        return accepted[0]

    def close(self):
        self.socket.close()
        self.context.term()


@pytest.fixture
def hub():
    with create_transport("tcp", max_payload_bytes=1 << 20) as hub:
        yield hub


@pytest.fixture
def listener(hub):
    return hub.listen()


@pytest.fixture
def impostor(listener):
    impostor = Impostor(listener)
    yield impostor
    impostor.close()


def check_alive(transport, listener):
    sender, receiver = connect_pair(transport, listener)
    sender.send_all(b"well", timeout_s=LONG_S)
    assert receiver.receive(timeout_s=LONG_S).header == b"well"


def test_the_impostor_can_also_behave(impostor, listener):
    victim = impostor.shake_hands(listener)
    impostor.socket.send_multipart([pack(DATA), b"h", b"payload"])
    with victim.receive(timeout_s=LONG_S) as message:
        assert (message.header, bytes(message.payload)) == (b"h", b"payload")
    impostor.socket.send(pack(BYE))
    with pytest.raises(TransportError, match="closed"):
        victim.receive(timeout_s=LONG_S)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xff" * 10],
        [b"x" * 1000],
        [pack(99)],
        [pack(DATA)],
        [pack(DATA), b"h", b"p", b"more"],
        [pack(DATA), bytes((64 << 10) + 1)],
        [pack(DATA), b"h", bytes((1 << 20) + 1)],  # ZMQ cuts the connection
        [pack(GRANT, 1)],
        [pack(GRANT, 1 << 60)],
        [pack(GRANT, -1)],
        [pack(GRANT, "1")],
        [pack(HELLO, MAGIC, VERSION, 1)],
    ],
)
def test_a_lying_peer_loses_its_channel_only(transport, impostor, listener, frames):
    other, other_accepted = connect_pair(transport, listener)
    victim = impostor.shake_hands(listener)
    impostor.socket.send_multipart(frames)
    with pytest.raises(TransportError):
        victim.receive(timeout_s=LONG_S)
    assert victim.closed
    other.send_all(b"still here", timeout_s=LONG_S)
    assert other_accepted.receive(timeout_s=LONG_S).header == b"still here"
    check_alive(transport, listener)


def test_more_messages_than_the_credits(impostor, listener):
    victim = impostor.shake_hands(listener)
    for _ in range(CREDITS + 1):
        impostor.socket.send_multipart([pack(DATA), b"h"])
    assert victim._line_ended.wait(LONG_S)
    for _ in range(CREDITS):
        victim.receive(timeout_s=LONG_S)
    with pytest.raises(TransportError, match="more messages than it may"):
        victim.receive(timeout_s=LONG_S)


@pytest.mark.parametrize(
    "frames",
    [
        [b"nonsense"],
        [pack(HELLO, MAGIC, VERSION + 1, 1)],
        [pack(HELLO, "other", VERSION, 1)],
        [pack(DATA), b"h"],
        [b"x" * 999],
    ],
)
def test_bad_introductions_are_refused(transport, impostor, listener, frames):
    impostor.socket.send_multipart(frames)
    assert "pdxfer-tcp 1" in msgpack.unpackb(impostor.socket.recv())[1]
    with pytest.raises(DeadlineError):
        listener.accept(0)
    check_alive(transport, listener)


def test_who_does_not_wait_for_the_welcome_is_cut(transport, impostor, listener):
    impostor.socket.send(pack(HELLO, MAGIC, VERSION, 1))
    impostor.socket.send_multipart([pack(DATA), b"h"])
    check_alive(transport, listener)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f\x03",
        b"\x01\x00" + b"\x05\x00abcd" * 100,  # ZMTP 1.0, which has no handshake
        b"",
        *(random.Random(seed).randbytes(1000) for seed in range(20)),
    ],
)
def test_what_is_not_zmq_at_all(transport, listener, data):
    host, port = tcp.split_host_port(listener.contact_address.removeprefix("tcp://"))
    with socket.create_connection((host, port)) as raw:
        raw.sendall(data)
        check_alive(transport, listener)


def test_a_listener_that_is_not_ours(transport):
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    port = router.bind_to_random_port("tcp://127.0.0.1")
    failed = []

    def connect():
        try:
            transport.connect(f"tcp://127.0.0.1:{port}", timeout_s=LONG_S)
        except TransportError as error:
            failed.append(error.message)

    for answer in (b"nonsense", pack(WELCOME, MAGIC, VERSION + 1, 1), pack(WELCOME, MAGIC, VERSION, 0)):
        thread = threading.Thread(target=connect)
        thread.start()
        identity, _ = router.recv_multipart()
        router.send_multipart([identity, answer])
        thread.join()
    assert len(failed) == 3
    router.close()
    context.term()


# -- processes and networks that stop --------------------------------------------------------------


def start_peer(address, *prefix):
    return subprocess.Popen([*prefix, sys.executable, "-m", "pdxfer.testing.transport_peer", "tcp", address])


def test_a_stopped_process_is_noticed_by_its_silence():
    with create_transport("tcp", heartbeat_s=0.1, dead_after_s=0.5) as hub, ExitStack() as stack:
        listener = hub.listen()
        peer = stack.enter_context(start_peer(listener.contact_address))
        stack.callback(peer.kill)
        channel = listener.accept(LONG_S)
        peer.send_signal(signal.SIGSTOP)
        with pytest.raises(TransportError):
            channel.receive(timeout_s=LONG_S)


HUB = """
import sys
from pdxfer.errors import TransportError
from pdxfer.transport import create_transport
with create_transport("tcp", insecure=True, heartbeat_s=0.2, dead_after_s=1.0) as hub:
    listener = hub.listen(sys.argv[1])
    print(listener.contact_address, flush=True)
    channel = listener.accept(60)
    payload = memoryview(bytes(range(256)) * 4096)
    channel.send_all(b"echo", payload, timeout_s=60)
    with channel.receive(timeout_s=60) as message:
        print(message.payload == payload, flush=True)
    try:
        channel.receive(timeout_s=60)
    except TransportError:
        print("lost", flush=True)
"""


def ip(*arguments):
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def two_hosts():
    """Two network namespaces joined by one link: (their names, the first one's address)."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    names = [f"pdxfer-{os.getpid()}-{side}" for side in "ab"]
    with ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip("link", "add", "link0", "netns", names[0], "type", "veth", "peer", "name", "link0", "netns", names[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
        for i, name in enumerate(names, 1):
            ip("-n", name, "address", "add", f"192.0.2.{i}/24", "dev", "link0")
            ip("-n", name, "link", "set", "link0", "up")
        yield names, "192.0.2.1"


def test_between_network_namespaces_until_the_link_dies(two_hosts):
    names, host = two_hosts
    command = ["ip", "netns", "exec", names[0], sys.executable, "-c", HUB, f"tcp://{host}:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as hub:
        address = hub.stdout.readline().strip()
        assert address.startswith(f"tcp://{host}:")
        with start_peer(address, "ip", "netns", "exec", names[1]) as peer:
            try:
                assert hub.stdout.readline() == "True\n"
                ip("-n", names[1], "link", "set", "link0", "down")
                assert hub.stdout.readline() == "lost\n"
            finally:
                peer.kill()
                hub.kill()
