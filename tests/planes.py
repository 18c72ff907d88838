"""What every plane has to hold beyond the transport contract: ``PlaneSuite``, to subclass as ``Test...``.

Processes are real, so are the libraries; a lying peer is a real channel that is made to send what it should not.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack, contextmanager

import numpy as np
import psutil
import pytest

from pdxfer.builders import Parallel
from pdxfer.errors import CorruptError, MisuseError, PdxferError, TransportError
from pdxfer.testing.faults import Fault, FaultPlan, FaultyTransport
from pdxfer.testing.transport import LONG_S, MIB, TransportConformance, connect_pair
from pdxfer.transport import WINDOW_MESSAGES, create_transport
from pdxfer.transport.planes import NOTE, OFFER, PULL, REGION, RETIRE, TAKEN
from pdxfer.transport.tcp_channel import CREDITS, pack
from tests.pairs import fails, hand_over, pair, wait_until
from tests.workers import layouts

__all__ = ["PlaneSuite", "post", "run_child"]

SERVE = """
import sys
from pdxfer.errors import TransportError
from pdxfer.transport import create_transport
transport = create_transport(sys.argv[1])
listener = transport.listen(sys.argv[2])
print(listener.contact_address, flush=True)
while True:
    channel = listener.accept(60)
    region = transport.allocate(1 << 20)
    region.view[:] = bytes([int(sys.argv[3])]) * region.nbytes
    try:
        while True:
            channel.receive(timeout_s=60).release()
            channel.send_all(b"answer", region.view, timeout_s=60)
    except TransportError:
        pass
"""

LEAVE = """
import sys
from pdxfer.testing.transport import connect_pair
from pdxfer.transport import create_transport
one, two = create_transport(sys.argv[1]), create_transport(sys.argv[1])
left, right = connect_pair(one, two.listen())
region = one.allocate(1 << 20)
sending = left.send_all(b"h", region.view, timeout_s=60)
message = right.receive(timeout_s=60)
assert message.payload == region.view
print("moved", flush=True)
if sys.argv[2] == "closed":
    one.close()
    two.close()
"""


def run_child(code, *arguments, **options):
    return subprocess.Popen([sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True, **options)


@contextmanager
def serving(scheme, address, fill):
    with run_child(SERVE, scheme, address, str(fill)) as child:
        try:
            yield child, child.stdout.readline().strip()
        finally:
            child.kill()


def listening():
    connections = psutil.Process().net_connections(kind="inet")
    return {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}


def receive_on(channel):
    while True:
        channel.receive(timeout_s=LONG_S).release()


def post(channel, frames):
    """Make a channel send what it should not."""
    channel._io.call(lambda: channel._line.post(frames))


class PlaneSuite(TransportConformance):
    """Messages of any size take the plane here, for inline_bytes is 0."""

    scheme = ""
    done_means_released = False
    modes = ("packed",)

    def make_transport(self, **options):
        return create_transport(self.scheme, **{"inline_bytes": 0, **options})

    # -- who can reach it ------------------------------------------------------------------------

    def test_only_loopback_listens(self):
        before = listening()
        with self.open_pair() as pair:
            region = pair.left_transport.allocate(MIB)
            pair.left.send_all(b"", region.view, timeout_s=LONG_S)
            pair.right.receive(timeout_s=LONG_S).release()
            assert listening() - before <= {"127.0.0.1", "::1"}
            with pytest.raises(MisuseError, match="reached from other hosts"):
                pair.left_transport.listen(f"{self.scheme}://0.0.0.0:0")

    def test_it_speaks_to_its_own_kind_only(self):
        with self.make_transport() as transport, create_transport("tcp") as tcp:
            address = tcp.listen().contact_address.replace("tcp://", f"{self.scheme}://")
            with pytest.raises(TransportError, match="speaks"):
                transport.connect(address, timeout_s=LONG_S)

    @pytest.mark.parametrize("options", [{"inline_bytes": 1 << 20}, {"staging_bytes": -1}, {"stall_s": 0}, {"no": 1}])
    def test_bad_options(self, options):
        with pytest.raises(MisuseError):
            self.make_transport(**options)

    # -- flow ------------------------------------------------------------------------------------

    def test_small_and_big_messages_keep_their_order(self):
        with self.make_transport(inline_bytes=1000) as left, self.make_transport() as right:
            sender, receiver = connect_pair(left, right.listen())
            region = left.allocate(2000)
            region.view[:] = bytes(i % 256 for i in range(2000))
            sizes = [2000, 10, 0, 2000, 1000, 1001, 0, 5]
            for size in sizes:
                sender.send_all(str(size).encode(), region.view[:size], timeout_s=LONG_S)
            for size in sizes:
                with receiver.receive(timeout_s=LONG_S) as message:
                    assert (message.header, message.payload) == (str(size).encode(), region.view[:size])

    def test_one_transport_may_talk_to_itself(self):
        with self.make_transport() as transport:
            sender, receiver = connect_pair(transport, transport.listen())
            region = transport.allocate(MIB)
            region.view[:] = b"x" * MIB
            sender.send_all(b"", region.view, timeout_s=LONG_S).wait(LONG_S)
            assert receiver.receive(timeout_s=LONG_S).payload == region.view

    def test_what_nobody_asks_for_takes_bounded_memory(self):
        """A full window waits at the sender; the receiver holds what its staging allows, then what it is asked for."""
        with self.make_transport() as left, self.make_transport(staging_bytes=MIB) as right:
            listener = right.listen()
            pairs = [connect_pair(left, listener) for _ in range(3)]
            region = left.allocate(MIB // 2)
            region.view[:] = b"y" * region.nbytes
            for sender, _ in pairs:
                for _ in range(WINDOW_MESSAGES):
                    sender.send_all(b"", region.view, timeout_s=LONG_S)
            assert wait_until(lambda: right.staging.lent_bytes == MIB, timeout_s=LONG_S)
            for _, receiver in pairs:
                for _ in range(WINDOW_MESSAGES):
                    with receiver.receive(timeout_s=LONG_S) as message:
                        assert right.staging.lent_bytes <= MIB + 3 * region.nbytes
                        assert message.payload == region.view
            assert wait_until(lambda: right.staging.lent_bytes == 0, timeout_s=LONG_S)
            assert right.staging.kept_bytes <= MIB

    def test_a_receiver_that_sleeps_holds_nobody_back(self):
        with self.make_transport() as left, self.make_transport() as right:
            listener = right.listen()
            (slow, _), (sender, receiver) = (connect_pair(left, listener) for _ in range(2))
            region = left.allocate(MIB)
            for _ in range(WINDOW_MESSAGES):
                slow.send_all(b"", region.view, timeout_s=LONG_S)
            for _ in range(10):
                sending = sender.send_all(b"", region.view, timeout_s=LONG_S)
                receiver.receive(timeout_s=LONG_S).release()
                sending.wait(LONG_S)

    def test_what_was_sent_before_an_orderly_end_arrives(self):
        with self.open_pair() as pair:
            region = pair.left_transport.allocate(4 * MIB)
            np.frombuffer(region.view, np.uint8)[:] = np.arange(4 * MIB) % 251
            for _ in range(3):
                pair.left.send_all(b"p", region.view, timeout_s=LONG_S)
            pair.left.send_all(b"last", timeout_s=LONG_S)
            pair.left.close()
            for _ in range(3):
                with pair.right.receive(timeout_s=LONG_S) as message:
                    assert np.array_equal(np.frombuffer(message.payload, np.uint8), np.arange(4 * MIB) % 251)
            assert pair.right.receive(timeout_s=LONG_S).header == b"last"

    # -- peers that come, go and lie ---------------------------------------------------------------

    def test_a_peer_killed_and_back_at_its_address(self):
        with self.make_transport() as transport, ExitStack() as stack:
            address = f"{self.scheme}://127.0.0.1:0"
            for fill in (1, 2):
                child, address = stack.enter_context(serving(self.scheme, address, fill))
                for _ in range(2):  # left, and met again
                    channel = transport.connect(address, timeout_s=LONG_S)
                    channel.send_all(b"ask", timeout_s=LONG_S)
                    with channel.receive(timeout_s=LONG_S) as message:
                        assert message.payload == bytes([fill]) * MIB
                    if not _:
                        channel.close()
                for _ in range(20):  # so that payloads are underway when it dies
                    channel.send_all(b"ask", timeout_s=LONG_S)
                channel.receive(timeout_s=LONG_S)
                child.kill()
                child.wait()
                with pytest.raises(TransportError):
                    receive_on(channel)

    def test_a_lying_peer_loses_its_channel_only(self):
        lies = [
            [pack(OFFER, 1, 1 << 62), b"h", b""],
            [pack(OFFER, 1, 0), b"h", b""],
            [pack(OFFER, 1, 100), b"h"],
            [pack(OFFER, 1, 100), b"h", b"", b"more"],
            [pack(OFFER, -1, 100), b"h", b""],
            [pack(OFFER, 1, "100"), b"h", b""],
            [pack(PULL, 1)],
            [pack(TAKEN, 1)],
            [pack(RETIRE, 1, 2)],
            [pack(NOTE)],
            [pack(REGION, 1), b"h", b"\xff" * 100],
        ]
        with self.open_pair() as pair:
            region = pair.left_transport.allocate(MIB)
            for frames in lies:
                liar, victim = connect_pair(pair.left_transport, pair.listener)
                post(liar, frames)
                with pytest.raises(TransportError):
                    victim.receive(timeout_s=LONG_S)
                assert victim.closed
                pair.left.send_all(b"", region.view, timeout_s=LONG_S)
                with pair.right.receive(timeout_s=LONG_S) as message:
                    assert message.payload == region.view

    def test_more_offers_than_the_credits(self, pair):
        for i in range(CREDITS + 5):
            post(pair.left, [pack(OFFER, i + 1, 10), b"h", b""])
        with pytest.raises(TransportError):
            pair.right.receive(timeout_s=LONG_S)

    def test_more_notes_than_were_asked_for(self, pair):
        for _ in range(200):
            post(pair.left, [pack(NOTE), b"hello"])
        with pytest.raises(TransportError, match="notes"):
            pair.right.receive(timeout_s=LONG_S)

    @pytest.mark.parametrize("how", ["open", "closed"])
    def test_a_process_ends_as_it_should(self, how):
        """Whether or not its transports were closed: no crash in what a library does at exit, nothing lost before."""
        with run_child(LEAVE, self.scheme, how) as child:
            assert child.stdout.read() == "moved\n"
            assert child.wait(LONG_S) == 0

    # -- agents ------------------------------------------------------------------------------------

    def test_agents_hand_over(self):
        for mode in self.modes:
            config = {
                "mode": mode,
                "transports": (self.scheme,),
                "transport_options": {self.scheme: {"inline_bytes": 0}},
            }
            with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), **config) as (source, target):
                received = [hand_over(source, target, key) for key in ("one", "two")]
                edges = [edge for ranks in received for rank in ranks for edge in rank.edges]
                assert {(edge.transport, edge.mode) for edge in edges} == {(self.scheme, mode)}

    @pytest.mark.parametrize("kind", ["delay", "drop", "truncate", "corrupt", "disconnect"])
    def test_agents_meet_faults(self, kind):
        """A fault at the target ends in the named error or, where it only delays, in a whole hand-off."""
        fault = Fault(kind=kind, at=0, delay_s=0.05 * (kind == "delay"))
        config = {
            "mode": "packed",
            "transports": (self.scheme,),
            "transport_options": {self.scheme: {"inline_bytes": 0}},
        }
        faulty = []

        def wrap(transport):
            faulty.append(FaultyTransport(transport, FaultPlan.of(fault)))
            return faulty[-1]

        with pair(*layouts(Parallel(), Parallel()), of_target={"wrap": wrap}, **config) as (source, target):
            if kind == "delay":
                hand_over(source, target, "one")
            else:
                expected = {"drop": PdxferError, "disconnect": TransportError}.get(kind, CorruptError)
                fails(source, target, expected, timeout_s=3.0 if kind == "drop" else 30.0)
            assert faulty[0].fired

    def test_memory_of_one_transport_is_not_shown_over_another(self):
        source, target = layouts(Parallel(), Parallel())
        config = {
            "mode": "direct",
            "of_source": {"transports": (self.scheme, "shm")},
            "of_target": {"transports": ("shm",)},
        }
        with pair(source, target, **config) as workers:
            (received,) = hand_over(*workers, "one")
            exporter = create_transport(self.scheme)
            with exporter:
                assert {edge.mode for edge in received.edges} == {"packed" if exporter.can_export else "direct"}
