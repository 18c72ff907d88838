"""NIXL: the contract, what all planes hold, and what is special about memory that a peer reads by itself."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import msgpack
import numpy as np
import pytest

from pdxfer.errors import MisuseError, TransportError
from pdxfer.testing.transport import LONG_S, MIB, connect_pair, offsets
from pdxfer.transport import create_transport
from pdxfer.transport.nixl import _Read
from pdxfer.transport.planes import OFFER
from pdxfer.transport.tcp_channel import pack
from tests.conftest import require
from tests.pairs import wait_until
from tests.planes import PlaneSuite, post

require("nixl_cu12")


class TestNixl(PlaneSuite):
    scheme = "nixl"
    modes = ("packed", "direct")


@pytest.fixture
def ends():
    with create_transport("nixl", inline_bytes=0) as left, create_transport("nixl") as right:
        yield left, right, *connect_pair(left, right.listen())


def test_who_owes_nobody_anything_rests(ends):
    """The owner of memory works for its readers only while there may be some."""
    left, right, sender, receiver = ends
    region = left.allocate(MIB)
    for _ in range(3):
        sending = sender.send_all(b"", region.view, timeout_s=LONG_S)
        receiver.receive(timeout_s=LONG_S).release()
        sending.wait(LONG_S)
        assert left.tend() == right.tend() == math.inf
    for _ in range(5):  # more than are moved ahead
        sender.send_all(b"", region.view, timeout_s=LONG_S)
    assert left.tend() < math.inf
    assert right.tend() == math.inf
    for _ in range(5):
        receiver.receive(timeout_s=LONG_S).release()
    sender.export_region(region, b"", timeout_s=LONG_S)
    assert left.tend() < math.inf


def test_payloads_lie_in_regions(ends):
    left, _, sender, receiver = ends
    with pytest.raises(MisuseError, match="region"):
        sender.send_all(b"", memoryview(bytes(MIB)), timeout_s=LONG_S)
    own = bytearray(b"z" * MIB)
    left.register(own)
    sender.send_all(b"", memoryview(own)[100:], timeout_s=LONG_S)
    assert receiver.receive(timeout_s=LONG_S).payload == own[100:]


def test_addresses_that_are_used_again(ends):
    """A new region where an old one lay is the new one, to a peer that knew the old one."""
    left, _, sender, receiver = ends
    memory = bytearray(4 * MIB)
    for fill, nbytes in ((1, MIB), (2, 2 * MIB), (3, 4 * MIB), (4, MIB // 2)):
        view = memoryview(memory)[:nbytes]
        view[:] = bytes([fill]) * nbytes
        with left.register(view) as region:
            sender.send_all(b"", region.view, timeout_s=LONG_S)
            with receiver.receive(timeout_s=LONG_S) as message:
                assert message.payload == view
            sender.export_region(region, b"", timeout_s=LONG_S)
            remote = receiver.receive(timeout_s=LONG_S).region
            target = bytearray(10)
            remote.read_runs(memoryview(target), offsets(0), offsets(nbytes - 10), offsets(10))
            assert target == bytes([fill]) * 10


def test_runs_are_read_into_regions_and_into_other_memory(ends):
    left, right, sender, receiver = ends
    region = left.allocate(8 * MIB)
    pattern = np.frombuffer(region.view, np.uint8)
    pattern[:] = np.random.default_rng(1).integers(0, 256, len(pattern), np.uint8)
    sender.export_region(region, b"", timeout_s=LONG_S)
    remote = receiver.receive(timeout_s=LONG_S).region
    pages = np.random.default_rng(2).permutation(2048)[:1000] * 4096
    registered = len(right._registered)
    for target in (right.allocate(1000 * 4096).view, memoryview(bytearray(1000 * 4096))):
        remote.read_runs(target, np.arange(1000) * 4096, pages, np.full(1000, 4096))
        assert np.array_equal(np.frombuffer(target, np.uint8), pattern[pages[:, None] + np.arange(4096)].reshape(-1))
    assert len(right._registered) == registered + 1


def test_only_what_was_shown_can_be_reached(ends):
    """The peer's agent knows no region of ours that was neither offered nor exported."""
    left, right, sender, receiver = ends
    shown, hidden = left.allocate(MIB), left.allocate(MIB)
    sender.export_region(shown, b"", timeout_s=LONG_S)
    remote = receiver.receive(timeout_s=LONG_S).region
    target = right.allocate(MIB)
    rows = [np.array([[r.descriptor.address, MIB, 0]], np.uint64) for r in (target, hidden)]
    with pytest.raises(TransportError, match="NotFound"):
        right.begin_read(left.agent_name, *rows)
    assert remote.read_runs(target.view, offsets(0), offsets(0), offsets(MIB)) == MIB


@pytest.mark.parametrize(
    "where",
    [
        b"",
        b"\xff" * 10,
        msgpack.packb([99, 0, b""]),
        msgpack.packb([99, 0, b"\x00" * 100]),
        msgpack.packb([0, -1, b""]),
        msgpack.packb([0, MIB - 99, b""]),
        msgpack.packb([0, 1 << 62, b""]),
        msgpack.packb([0, 0, msgpack.packb([b"x", b"y"])]),
    ],
)
def test_offers_of_memory_that_was_not_described(ends, where):
    left, _, sender, receiver = ends
    region = left.allocate(MIB)
    sender.send_all(b"", region.view, timeout_s=LONG_S)
    receiver.receive(timeout_s=LONG_S).release()
    if where and where[:1] == b"\x93" and msgpack.unpackb(where)[0] == 0:
        _, offset, access = msgpack.unpackb(where)
        where = msgpack.packb([region.descriptor.region_id, offset, access])
    post(sender, [pack(OFFER, 2, 100), b"h", where])
    with pytest.raises(TransportError):
        receiver.receive(timeout_s=LONG_S)


def test_metadata_of_another_agent_is_refused(ends):
    *_, sender, receiver = ends
    with create_transport("nixl") as third:
        foreign = third.allocate(MIB)
        described, metadata = foreign.descriptor.to_bytes(), third.metadata_of(foreign)
        where = msgpack.packb([foreign.descriptor.region_id, 0, msgpack.packb([described, metadata])])
        post(sender, [pack(OFFER, 1, 100), b"h", where])
        with pytest.raises(TransportError):
            receiver.receive(timeout_s=LONG_S)


def test_back_ends_that_do_not_exist_or_can_not_be_confined():
    with pytest.raises(MisuseError, match="kept from other hosts"):
        create_transport("nixl", backend="LIBFABRIC")
    with pytest.raises(TransportError, match="can't be started"):
        create_transport("nixl", backend="NONSENSE", insecure_plane=True)


def test_a_read_that_can_t_be_stopped_is_not_over_before_it_is(ends):
    """Whoever waits for it holds the pages that it writes to."""
    left, *_ = ends
    tries, over = [], threading.Event()

    class Handle:
        def release(self) -> None:
            tries.append(over.is_set())
            if not over.is_set():
                raise RuntimeError("still active")

    def wait() -> None:
        with pytest.raises(TransportError, match="did not end"):
            _Read(left, Handle(), "PROC").wait(0.01)

    left._agent, agent = SimpleNamespace(check_xfer_state=lambda handle: "PROC"), left._agent
    try:
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert wait_until(lambda: len(tries) > 100, timeout_s=LONG_S)
        assert waiting.is_alive()
        over.set()
        waiting.join(LONG_S)
        assert tries[-1]
    finally:
        left._agent = agent
