"""What is special about shared memory: who may connect, what a peer may claim, what is left on disk."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import mmap
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest

from pdxfer.errors import MisuseError, TransportError
from pdxfer.testing.transport import LONG_S, connect_pair, offsets
from pdxfer.transport import RegionDescriptor, create_transport, shm, vm
from pdxfer.transport.base import Deadline

PREFIX = struct.Struct("<B3xIQQQQ")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def transport():
    with create_transport("shm") as transport:
        yield transport


class Impostor:
    """A peer that shakes hands properly and then sends whatever it likes."""

    def __init__(self, transport):
        self.data = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        listener = transport.listen()
        accepted = []
        accepting = threading.Thread(target=lambda: accepted.append(listener.accept(LONG_S)))
        accepting.start()
        self.data.connect(listener.contact_address.removeprefix("shm://"))
        self.acks = shm._introduce(self.data, Deadline(LONG_S))
        accepting.join()
        self.victim = accepted[0]

    def send(self, packet, fds=()):
        self.data.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])

    def close(self):
        self.data.close()
        self.acks.close()


@pytest.fixture
def impostor(transport):
    impostor = Impostor(transport)
    yield impostor
    impostor.close()


def memfd(nbytes=4096, seals=SEALS):
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def described(nbytes=4096, region_id=1, address=0, scheme="shm"):
    return RegionDescriptor(scheme=scheme, region_id=region_id, name="", nbytes=nbytes, address=address).to_bytes()


def payload_packet(*, header=b"h", offset=0, length=10, region_id=1, description=b""):
    return PREFIX.pack(2, len(header), 1, region_id, offset, length) + header + description


def test_the_impostor_can_also_behave(impostor):
    fd = memfd()
    impostor.send(payload_packet(description=described(), offset=4086), [fd])
    with impostor.victim.receive(timeout_s=LONG_S) as message:
        assert bytes(message.payload) == bytes(10)
    assert impostor.acks.recv(100) == struct.pack("<Q", 1)
    os.close(fd)


@pytest.mark.parametrize(
    ("packet", "make_fd"),
    [
        (payload_packet(description=described(), offset=4087), memfd),  # one byte too far
        (payload_packet(description=described(), offset=2**63), memfd),
        (payload_packet(description=described(), length=2**64 - 1), memfd),
        (payload_packet(description=described(), length=0), memfd),
        (payload_packet(description=described(nbytes=8192), length=8000), memfd),  # bigger than it is
        (payload_packet(description=described(nbytes=100)), memfd),
        (payload_packet(description=described(region_id=2)), memfd),
        (payload_packet(description=described(scheme="tcp")), memfd),
        (payload_packet(description=described(address=4096)), memfd),
        (payload_packet(description=b"\xff" * 40), memfd),
        (payload_packet(), memfd),
        (payload_packet(description=described()), lambda: memfd(seals=0)),
        (payload_packet(description=described()), lambda: memfd(seals=fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)),
        (payload_packet(description=described()), lambda: os.open("/dev/zero", os.O_RDWR)),
        (payload_packet(description=described()), lambda: os.open(__file__, os.O_RDONLY)),
        (payload_packet(), None),  # never passed
        (PREFIX.pack(3, 0, 0, 1, 0, 0) + described(), None),  # an export of nothing
        (PREFIX.pack(1, 0, 0, 0, 0, 0) + b"extra", None),
        (PREFIX.pack(1, 5, 0, 0, 0, 0) + b"four", None),
        (PREFIX.pack(1, 0xFFFFFFFF, 0, 0, 0, 0), None),
        (PREFIX.pack(9, 0, 0, 0, 0, 0), None),
        (PREFIX.pack(1, 0, 0, 0, 0, 0), memfd),
        (b"short", None),
        (bytes(100_000), None),
    ],
)
def test_a_lying_peer_loses_its_channel(impostor, packet, make_fd):
    fd = make_fd() if make_fd else None
    before = set(os.listdir("/proc/self/fd"))
    impostor.send(packet, [fd] if make_fd else [])
    with pytest.raises(TransportError):
        impostor.victim.receive(timeout_s=LONG_S)
    assert impostor.victim.closed
    assert set(os.listdir("/proc/self/fd")) <= before  # what came with the packet was closed
    if make_fd:
        os.close(fd)


def test_two_files_in_one_packet(impostor):
    fds = [memfd(), memfd()]
    before = len(os.listdir("/proc/self/fd"))
    impostor.send(payload_packet(description=described()), fds)
    with pytest.raises(TransportError):
        impostor.victim.receive(timeout_s=LONG_S)
    assert len(os.listdir("/proc/self/fd")) <= before
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("seed", range(20))
def test_random_packets(impostor, seed):
    choice = np.random.default_rng(seed)
    fd = memfd()
    template = bytearray(payload_packet(description=described()))
    for _ in range(5):
        template[choice.integers(0, len(template))] = choice.integers(0, 256)
    impostor.send(bytes(template), [fd])
    impostor.data.close()

    def receive_all():
        while True:
            impostor.victim.receive(timeout_s=LONG_S).release()

    with pytest.raises(TransportError):
        receive_all()
    os.close(fd)


def test_false_acks_end_the_channel(impostor, transport):
    region = transport.allocate(100)
    for ack in (struct.pack("<Q", 77), b"bad"):
        impostor.acks.send(ack)
    sending = impostor.victim.send_all(b"", region.view, timeout_s=LONG_S)
    assert not sending.done
    with pytest.raises(TransportError, match="not sent"):
        sending.wait(LONG_S)


@pytest.mark.parametrize("hello", [b"", b"GET / HTTP/1.1", b"\x92\xaapdxfer-shm\x63", b"\x92\xaapdxfer-shm\x01"])
def test_bad_introductions_are_dropped_and_the_listener_lives(transport, hello):
    listener = transport.listen()
    path = listener.contact_address.removeprefix("shm://")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.connect(path)
        raw.send(hello)
        with create_transport("shm") as other:
            connected, accepted = connect_pair(other, listener)
            connected.send_all(b"well", timeout_s=LONG_S)
            assert accepted.receive(timeout_s=LONG_S).header == b"well"
        raw.settimeout(LONG_S)
        while raw.recv(1000):  # a refusal perhaps, then the end
            pass


AS_NOBODY = """
import os, socket, sys
from pdxfer.errors import TransportError
from pdxfer.transport import create_transport, shm, vm
address, parent = sys.argv[1], int(sys.argv[2])
shm.ShmTransport
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    shm.ShmTransport().connect(address, timeout_s=30)
except TransportError as error:
    print("connect:", error.message)
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
    raw.connect(address.removeprefix("shm://"))
    try:
        shm._introduce(raw, shm.Deadline(30))
    except (TransportError, OSError) as error:
        print("raw:", error)
try:
    vm.PeerProcess(parent).read(4096, 4096, *[shm.np.zeros(1, shm.np.int64)] * 2, shm.np.ones(1, shm.np.int64))
except TransportError as error:
    print("read:", error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_refused_at_every_door(transport):
    listener = transport.listen()
    path = listener.contact_address.removeprefix("shm://")
    os.chmod(os.path.dirname(path), 0o711)  # let it come as far as the kernel's word about its user
    os.chmod(path, 0o666)
    command = [sys.executable, "-c", AS_NOBODY, listener.contact_address, str(os.getpid())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, create_transport("shm") as friend:
        accepted = []
        accepting = threading.Thread(target=lambda: accepted.append(listener.accept(LONG_S)))
        accepting.start()
        said = child.stdout.read()
        assert not accepted
        with friend.connect(listener.contact_address, timeout_s=LONG_S):
            accepting.join()
    assert "connect: the peer runs as user 0, this process as 65534" in said
    assert "raw: the peer closed" in said or "raw: [Errno" in said
    assert "read: the kernel doesn't allow reading the peer's memory" in said
    assert len(accepted) == 1


def test_sockets_are_private_and_leave_no_trace(transport):
    listener = transport.listen()
    path = listener.contact_address.removeprefix("shm://")
    assert stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    listener.close()
    assert not os.path.exists(os.path.dirname(path))


LISTENS = """
import sys
from pdxfer.transport import create_transport
listener = create_transport("shm", directory=sys.argv[1]).listen(*sys.argv[2:])
print(listener.contact_address, flush=True)
sys.stdin.read()
"""


def killed_listener(directory, *address):
    command = [sys.executable, "-c", LISTENS, str(directory), *address]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        url = child.stdout.readline().strip()
        assert os.path.exists(url.removeprefix("shm://"))
        child.send_signal(signal.SIGKILL)
    return url


def test_what_a_killed_listener_left_is_swept(tmp_path):
    with create_transport("shm", directory=str(tmp_path)) as transport:
        alive = transport.listen()
        left = os.path.dirname(killed_listener(tmp_path).removeprefix("shm://"))
        assert os.path.exists(left)
        transport.listen()
        assert not os.path.exists(left)
        with create_transport("shm") as other:
            connect_pair(other, alive)  # what lives is left alone


def test_a_given_path_is_taken_over_only_from_the_dead(tmp_path):
    tmp_path.chmod(0o700)
    url = f"shm://{tmp_path}/agent"
    assert killed_listener(tmp_path, url) == url
    with create_transport("shm") as transport, transport.listen(url) as listener:
        assert listener.contact_address == url
        with pytest.raises(TransportError, match="in use"):
            transport.listen(url)
        (tmp_path / "file").write_text("not a socket")
        with pytest.raises(TransportError):
            transport.listen(f"shm://{tmp_path}/file")
        assert (tmp_path / "file").read_text() == "not a socket"


def test_bad_places_to_listen(transport, tmp_path):
    tmp_path.chmod(0o755)
    for address, why in (
        (f"shm://{tmp_path}/s", "not private"),
        ("shm://relative/s", "absolute"),
        ("shm:///" + "x" * 120, "bytes"),
        (f"shm://{tmp_path}/none/s", "can't be used"),
    ):
        with pytest.raises(MisuseError, match=why):
            transport.listen(address)
    with (
        create_transport("shm", directory=f"{tmp_path}/none") as lost,
        pytest.raises(TransportError, match="directory"),
    ):
        lost.listen()
    long_directory = tmp_path / ("d" * 100)
    long_directory.mkdir()
    with create_transport("shm", directory=str(long_directory)) as long, pytest.raises(MisuseError, match="bytes"):
        long.listen()
    assert not list(long_directory.iterdir())
    with pytest.raises(MisuseError):
        create_transport("shm", readers="everyone")


def test_payloads_come_from_allocated_regions_only(transport):
    with create_transport("shm") as other:
        sender, receiver = connect_pair(other, transport.listen())
        registered, foreign = other.register(bytearray(100)), transport.allocate(100)
        regions = [other.allocate(5000) for _ in range(5)]
        closed = other.allocate(100)
        view = closed.view
        closed.close()
        for payload in (memoryview(bytearray(10)), registered.view, foreign.view, view):
            with pytest.raises(MisuseError, match="allocate"):
                sender.send_all(b"", payload, timeout_s=LONG_S)
        for i, region in enumerate(regions):
            region.view[:] = bytes([i]) * 5000
            for piece in (region.view[:1], region.view[4999:], region.view.toreadonly()):
                sender.send_all(b"", piece, timeout_s=LONG_S)
                with receiver.receive(timeout_s=LONG_S) as message:
                    assert message.payload == piece


def mapped():
    with open("/proc/self/maps") as maps:
        return sum("pdxfer:short-lived" in line for line in maps)


def test_a_closed_region_is_unmapped_on_both_sides(transport):
    with create_transport("shm") as other:
        sender, receiver = connect_pair(other, transport.listen())
        for _ in range(1100):  # more than a peer may have mapped at a time
            with other.allocate(4096, "short-lived") as region:
                sender.send_all(b"", region.view, timeout_s=LONG_S)
                receiver.receive(timeout_s=LONG_S).release()
        sender.send_all(b"", timeout_s=LONG_S)
        receiver.receive(timeout_s=LONG_S)
        assert mapped() == 0


def test_every_descriptor_is_close_on_exec(transport):
    before = set(os.listdir("/proc/self/fd"))
    with create_transport("shm") as other:
        sender, receiver = connect_pair(other, transport.listen())
        for region in (other.allocate(100), other.register(bytearray(100))):
            sender.export_region(region, b"", timeout_s=LONG_S)
            assert receiver.receive(timeout_s=LONG_S).region.read_runs(bytearray(1), offsets(0), offsets(0), offsets(1))
        new = [int(fd) for fd in set(os.listdir("/proc/self/fd")) - before]
        assert len(new) > 8
        assert [fd for fd in new if os.path.exists(f"/proc/self/fd/{fd}") and os.get_inheritable(fd)] == []


def test_the_peer_cannot_change_or_shrink_the_memory(transport):
    with create_transport("shm") as other:
        sender, receiver = connect_pair(other, transport.listen())
        sender.send_all(b"", other.allocate(100).view, timeout_s=LONG_S)
        view = receiver.receive(timeout_s=LONG_S).payload
        with pytest.raises(TypeError):
            view[0] = 1
    fd, _ = vm.create_memfd(4096, "sealed")
    for change in (lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 8192)):
        with pytest.raises(PermissionError):
            change()
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


# -- process_vm_readv ----------------------------------------------------------------------------


def address_of(memory):
    return np.frombuffer(memory, np.uint8).ctypes.data


def test_reads_are_cut_into_calls(monkeypatch):
    monkeypatch.setattr(vm, "_CALL_BYTES", 1000)
    monkeypatch.setattr(vm, "_IOV_MAX", 7)
    choice = np.random.default_rng(0)
    source, lengths = choice.integers(0, 256, 100_000, np.uint8), choice.integers(1, 3000, 60)
    sources, targets = choice.integers(0, 97_000, 60), np.cumsum(lengths) - lengths + np.arange(60) % 2
    target, expected = np.zeros(200_000, np.uint8), np.zeros(200_000, np.uint8)
    for t, s, n in zip(targets, sources, lengths, strict=True):
        expected[t : t + n] = source[s : s + n]
    process = vm.PeerProcess(os.getpid())
    assert process.read(address_of(source), address_of(target), targets, sources, lengths) == lengths.sum()
    assert (target == expected).all()
    process.close()
    with pytest.raises(TransportError, match="closed"):
        process.read(address_of(source), address_of(target), targets, sources, lengths)


def test_memory_that_is_not_there_is_an_error_and_not_a_crash():
    process, target = vm.PeerProcess(os.getpid()), np.zeros(100_000, np.uint8)
    with pytest.raises(TransportError, match="no longer has memory"):
        process.read(4096, address_of(target), offsets(0), offsets(0), offsets(10))
    page, memory = mmap.PAGESIZE, mmap.mmap(-1, 2 * mmap.PAGESIZE)
    second = ctypes.c_void_p(address_of(memory) + page)
    assert vm._libc.mprotect(second, page, 0) == 0
    arguments = address_of(memory), address_of(target), offsets(0), offsets(0)
    assert process.read(*arguments, offsets(page)) == page
    with pytest.raises(TransportError, match="no longer has memory"):  # the kernel copies one page and says so
        process.read(*arguments, offsets(2 * page))
    assert vm._libc.mprotect(second, page, mmap.PROT_READ | mmap.PROT_WRITE) == 0
    process.close()


def test_a_process_that_ended_is_noticed():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process, target = vm.PeerProcess(child.pid), np.zeros(10, np.uint8)
    child.kill()
    child.communicate()
    with pytest.raises(TransportError, match="gone"):
        process.read(4096, address_of(target), offsets(0), offsets(0), offsets(1))
    with pytest.raises(TransportError, match="ended"):
        process.read(4096, address_of(target), offsets(), offsets(), offsets())
    with pytest.raises(TransportError, match="watched"):
        vm.PeerProcess(child.pid)
    with pytest.raises(TransportError, match="PID namespace"):
        vm.PeerProcess(0)
    process.close()


@pytest.mark.parametrize("name", ["EPERM", "ESRCH", "EFAULT", "ENOSYS", "EINVAL"])
def test_every_error_of_the_kernel_has_a_hint(name):
    error = vm._explain(getattr(errno, name), 7)
    assert error.hint
    assert error.details["errno"] == name
