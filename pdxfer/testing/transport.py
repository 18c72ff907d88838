"""The transport contract as a suite. A backend's test is three lines::

    class TestMyTransport(TransportConformance):
        def make_transport(self) -> Transport:
            return MyTransport()

In comes a way to make transports; out come pass or fail for every promise of ``pdxfer.transport.base``. Nothing is
slept for and nothing is timed: deadlines are generous where something must happen, zero where nothing may. The
fault wrappers of ``pdxfer.testing.faults`` are exported here too.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest

from pdxfer.agent.spawn import module_command
from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.testing.faults import Fault, FaultPlan, FaultyTransport
from pdxfer.testing.joined import (
    LONG_S,
    MIB,
    Pair,
    connect_pair,
    fill_window,
    grown,
    in_thread,
    offsets,
    resources,
    until_raises,
)
from pdxfer.testing.transport_peer import EXPORT_NBYTES
from pdxfer.transport import (
    MAX_HEADER_BYTES,
    WINDOW_MESSAGES,
    Channel,
    RegionDescriptor,
    Sending,
    Transport,
    parse_address,
)

__all__ = ["Fault", "FaultPlan", "FaultyTransport", "Pair", "TransportConformance", "connect_pair", "offsets"]


class TransportConformance:
    """Subclass it as ``Test...`` and override ``make_transport``.

    Attributes:
        one_process: the transport reaches no other process, so the tests with one are skipped.
        done_means_released: a Sending is done when the receiver released, not earlier.
        peer_module: a module that the other process imports before it creates the transport; "" for none.
    """

    one_process = False
    done_means_released = True
    peer_module = ""

    def make_transport(self) -> Transport:
        """Return a new transport; the test closes it."""
        raise MisuseError("override make_transport()")

    @contextmanager
    def open_pair(self) -> Iterator[Pair]:
        """Two new transports and a channel between them."""
        with self.make_transport() as left_transport, self.make_transport() as right_transport:
            listener = right_transport.listen()
            left, right = connect_pair(left_transport, listener)
            yield Pair(
                left_transport=left_transport,
                right_transport=right_transport,
                listener=listener,
                left=left,
                right=right,
            )

    @pytest.fixture
    def pair(self) -> Iterator[Pair]:
        """As ``open_pair``."""
        with self.open_pair() as pair:
            yield pair

    @contextmanager
    def open_process(self) -> Iterator[tuple[Transport, Channel, subprocess.Popen[bytes]]]:
        """A channel to another process that runs ``transport_peer``."""
        if self.one_process:
            pytest.skip("this transport reaches no other process")
        with self.make_transport() as transport, transport.listen() as listener:
            command = module_command("pdxfer.testing.transport_peer")
            command += [transport.scheme, listener.contact_address]
            with subprocess.Popen(command + [self.peer_module] * bool(self.peer_module)) as process:
                try:
                    yield transport, listener.accept(LONG_S), process
                finally:
                    process.kill()

    # -- messages --------------------------------------------------------------------------------

    def test_a_header_alone(self, pair: Pair) -> None:
        for header in (b"", b"x", bytes(MAX_HEADER_BYTES)):
            sending = pair.left.send_all(header, timeout_s=LONG_S)
            with pair.right.receive(timeout_s=LONG_S) as message:
                assert (message.header, message.payload.nbytes, message.region) == (header, 0, None)
            sending.wait(LONG_S)

    def test_an_empty_payload_is_none(self, pair: Pair) -> None:
        with pair.left_transport.allocate(16) as region:
            sending = pair.left.send_all(b"h", region.view[:0], timeout_s=LONG_S)
            assert pair.right.receive(timeout_s=LONG_S).payload.nbytes == 0
            sending.wait(LONG_S)

    def test_payload_arrives_read_only_in_both_directions(self, pair: Pair) -> None:
        ways = ((pair.left_transport, pair.left, pair.right), (pair.right_transport, pair.right, pair.left))
        for transport, sender, receiver in ways:
            region = transport.allocate(100, "ends")
            region.view[:] = bytes(range(100))
            sending = sender.send_all(b"h", region.view[10:90], timeout_s=LONG_S)
            with receiver.receive(timeout_s=LONG_S) as message:
                assert bytes(message.payload) == bytes(range(10, 90))
                assert message.payload.readonly
            sending.wait(LONG_S)
            assert sending.done

    def test_order_with_more_messages_than_the_window(self, pair: Pair) -> None:
        count = 5 * WINDOW_MESSAGES
        region = pair.left_transport.allocate(count * 64)
        for i in range(count):
            region.view[i * 64 : (i + 1) * 64] = bytes([i % 256]) * 64

        def send() -> None:
            for i in range(count):
                payload = region.view[i * 64 : (i + 1) * 64] if i % 3 else None
                pair.left.send_all(str(i).encode(), payload, timeout_s=LONG_S)

        sent = in_thread(send)
        for i in range(count):
            with pair.right.receive(timeout_s=LONG_S) as message:
                assert message.header == str(i).encode()
                assert bytes(message.payload) == (bytes([i % 256]) * 64 if i % 3 else b"")
        sent.result(LONG_S)

    def test_big_payloads(self, pair: Pair) -> None:
        region = pair.left_transport.allocate(16 * MIB)
        np.frombuffer(region.view, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, 16 * MIB, np.uint8)
        pieces = [region.view[i * 8 * MIB : (i + 1) * 8 * MIB] for i in range(2)] * 5

        def send() -> None:
            for piece in pieces:
                pair.left.send_all(b"big", piece, timeout_s=LONG_S)

        sent = in_thread(send)
        for piece in pieces:
            with pair.right.receive(timeout_s=LONG_S) as message:
                assert message.payload == piece
        sent.result(LONG_S)

    def test_both_directions_at_once(self, pair: Pair) -> None:
        def talk(transport: Transport, channel: Channel) -> int:
            region = transport.allocate(4096)

            def send() -> None:
                for _ in range(100):
                    channel.send_all(b"t", region.view, timeout_s=LONG_S)

            sent, received = in_thread(send), 0
            for _ in range(100):
                with channel.receive(timeout_s=LONG_S) as message:
                    received += message.payload.nbytes
            sent.result(LONG_S)
            return received

        other = in_thread(lambda: talk(pair.right_transport, pair.right))
        assert talk(pair.left_transport, pair.left) == other.result(LONG_S) == 100 * 4096

    def test_payload_is_valid_until_release(self, pair: Pair) -> None:
        region = pair.left_transport.allocate(3 * MIB)
        for i in range(3):
            region.view[i * MIB : (i + 1) * MIB] = bytes([i + 1]) * MIB
            pair.left.send_all(b"", region.view[i * MIB : (i + 1) * MIB], timeout_s=LONG_S)
        messages = [pair.right.receive(timeout_s=LONG_S) for _ in range(3)]
        messages[1].release()
        assert messages[0].payload == bytes([1]) * MIB
        assert messages[2].payload == bytes([3]) * MIB
        messages[1].release()
        with pytest.raises(MisuseError):
            _ = messages[1].payload

    def test_sending_is_done_only_after_release(self, pair: Pair) -> None:
        region = pair.left_transport.allocate(128)
        sendings = [pair.left.send_all(b"", region.view[:64], timeout_s=LONG_S) for _ in range(3)]
        messages = [pair.right.receive(timeout_s=LONG_S) for _ in range(3)]
        if self.done_means_released:
            assert [s.done for s in sendings] == [False] * 3
            with pytest.raises(DeadlineError):
                sendings[0].wait(0)
        waiting = [in_thread(lambda s=s: s.wait(LONG_S)) for s in sendings]  # type: ignore[misc]
        messages[2].release()
        waiting[2].result(LONG_S)
        if self.done_means_released:
            assert [s.done for s in sendings] == [False, False, True]
        for message in messages:
            message.release()
        for future in waiting:
            future.result(LONG_S)
        assert [s.done for s in sendings] == [True] * 3

    def test_the_window_is_granted_and_bounded(self, pair: Pair) -> None:
        region, sendings = pair.left_transport.allocate(64), list[Sending]()
        for _ in range(WINDOW_MESSAGES):
            sendings.append(pair.left.send_all(b"", region.view, timeout_s=LONG_S))
        sendings += fill_window(pair.left, region.view)
        for _ in sendings:
            pair.right.receive(timeout_s=LONG_S).release()
        with pytest.raises(DeadlineError):
            pair.right.receive(timeout_s=0)  # what met its deadline was not sent
        pair.left.send_all(b"again", region.view, timeout_s=LONG_S)
        assert pair.right.receive(timeout_s=LONG_S).header == b"again"

    # -- arguments -------------------------------------------------------------------------------

    def test_bad_arguments_change_nothing(self, pair: Pair) -> None:
        region = pair.left_transport.allocate(64)
        bad_calls: list[Callable[[], object]] = [
            lambda: pair.left.send_all(bytes(MAX_HEADER_BYTES + 1), timeout_s=LONG_S),
            lambda: pair.left.send_all("text", timeout_s=LONG_S),  # type: ignore[arg-type]
            lambda: pair.left.send_all(b"", region.view[::2], timeout_s=LONG_S),
            lambda: pair.left.send_all(b"", timeout_s=float("nan")),
            lambda: pair.left.receive(timeout_s=-1),
            lambda: pair.left_transport.connect("nonsense", timeout_s=LONG_S),
            lambda: pair.left_transport.connect("other://x", timeout_s=LONG_S),
            lambda: pair.left_transport.listen("other://x"),
            lambda: pair.left_transport.allocate(0),
            lambda: pair.left_transport.allocate(1 << 60),
            lambda: pair.left_transport.allocate(1, "n" * 257),
            lambda: pair.left_transport.register(b"read-only"),
            lambda: pair.left_transport.register(bytearray()),
        ]
        for call in bad_calls:
            with pytest.raises(MisuseError):
                call()
        pair.left.send_all(b"fine", region.view, timeout_s=LONG_S)
        assert pair.right.receive(timeout_s=LONG_S).header == b"fine"

    def test_two_threads_on_one_side_are_refused(self, pair: Pair) -> None:
        blocked = in_thread(lambda: pair.right.receive(timeout_s=LONG_S))

        def receive() -> None:
            with pytest.raises(DeadlineError):  # until the other thread is inside
                pair.right.receive(timeout_s=0)

        until_raises(MisuseError, receive)
        pair.left.send_all(b"one", timeout_s=LONG_S)
        assert blocked.result(LONG_S)

    def test_regions(self) -> None:
        with self.make_transport() as transport:
            memory = bytearray(b"abc")
            allocated, registered = transport.allocate(10_000, "a"), transport.register(memory, "r")
            assert (allocated.nbytes, allocated.name, bytes(allocated.view)) == (10_000, "a", bytes(10_000))
            allocated.view[9_999] = 7
            registered.view[0] = ord("z")
            assert memory == b"zbc"
            kept = np.frombuffer(allocated.view, np.uint8)
            for region in (allocated, registered):
                region.close()
                region.close()
                with pytest.raises(MisuseError):
                    _ = region.view
            assert kept[9_999] == 7  # arrays made before stay valid

    def test_descriptors_round_trip_and_survive_garbage(self) -> None:
        with self.make_transport() as transport:
            descriptor = transport.register(bytearray(100), "näme").descriptor
        data = descriptor.to_bytes()
        assert RegionDescriptor.from_bytes(data) == descriptor
        assert (descriptor.nbytes, descriptor.name, descriptor.scheme) == (100, "näme", transport.scheme)
        choice = random.Random(7)  # noqa: S311 - to be repeated, not to be secret
        for _ in range(2000):
            garbage = bytearray(data if choice.random() < 0.7 else choice.randbytes(choice.randrange(64)))
            for _ in range(choice.randrange(1, 4)):
                at = choice.randrange(len(garbage) + 1)
                garbage[at : at + choice.randrange(3)] = choice.randbytes(choice.randrange(3))
            try:
                parsed = RegionDescriptor.from_bytes(bytes(garbage))
            except TransportError:
                continue
            assert parsed.nbytes >= 1
            assert parsed.address >= 0

    # -- deadlines and ends ----------------------------------------------------------------------

    def test_deadlines_leave_everything_usable(self, pair: Pair) -> None:
        for timeout_s in (0, 0.01):
            with pytest.raises(DeadlineError):
                pair.right.receive(timeout_s=timeout_s)
            with pytest.raises(DeadlineError):
                pair.listener.accept(timeout_s)
            with pytest.raises(DeadlineError):
                pair.left_transport.connect(pair.listener.contact_address, timeout_s=timeout_s)
        assert not pair.right.closed
        pair.left.send_all(b"h", timeout_s=LONG_S)
        assert pair.right.receive(timeout_s=LONG_S).header == b"h"

    def test_close_unblocks_receive(self, pair: Pair) -> None:
        blocked = in_thread(lambda: pair.right.receive(timeout_s=LONG_S))
        pair.right.close()
        with pytest.raises(TransportError):
            blocked.result(LONG_S)
        pair.right.close()
        assert pair.right.closed

    def test_close_unblocks_senders(self, pair: Pair) -> None:
        region = pair.left_transport.allocate(64)
        sendings = fill_window(pair.left, region.view)
        blocked = [in_thread(lambda: pair.left.send_all(b"", region.view, timeout_s=LONG_S))]
        if self.done_means_released:
            blocked += [in_thread(lambda s=s: s.wait(LONG_S)) for s in sendings[:3]]  # type: ignore[misc]
        pair.left.close()
        for future in blocked:
            with pytest.raises(TransportError):
                future.result(LONG_S)

    def test_close_unblocks_accept(self) -> None:
        with self.make_transport() as transport:
            listener = transport.listen()
            blocked = in_thread(lambda: listener.accept(LONG_S))
            listener.close()
            with pytest.raises(TransportError):
                blocked.result(LONG_S)
            listener.close()
            with pytest.raises(TransportError):
                listener.accept(0)
            with pytest.raises((TransportError, DeadlineError)):
                transport.connect(listener.contact_address, timeout_s=5)

    def test_everything_fails_after_close(self, pair: Pair) -> None:
        pair.left.close()
        with pytest.raises(TransportError):
            pair.left.send_all(b"h", timeout_s=LONG_S)
        with pytest.raises(TransportError):
            pair.left.receive(timeout_s=LONG_S)

    def test_peer_close_comes_after_its_messages(self, pair: Pair) -> None:
        region = pair.left_transport.allocate(1000)
        for i in range(3):
            sending = pair.left.send_all(str(i).encode(), timeout_s=LONG_S)
            sending.wait(LONG_S)
        last = pair.left.send_all(b"3", region.view, timeout_s=LONG_S)
        first = [pair.right.receive(timeout_s=LONG_S) for _ in range(4)]
        assert [m.header for m in first] == [b"0", b"1", b"2", b"3"]
        first[3].release()
        last.wait(LONG_S)
        pair.left.close()
        with pytest.raises(TransportError):
            pair.right.receive(timeout_s=LONG_S)
        assert pair.right.closed

    def test_peer_close_reaches_a_sender(self, pair: Pair) -> None:
        region = pair.left_transport.allocate(64)
        pair.right.close()
        until_raises(TransportError, lambda: pair.left.send_all(b"", region.view, timeout_s=LONG_S))
        assert pair.left.closed

    def test_peer_close_reaches_who_waits_for_release(self, pair: Pair) -> None:
        region = pair.left_transport.allocate(64)
        sending = pair.left.send_all(b"", region.view, timeout_s=LONG_S)
        pair.right.receive(timeout_s=LONG_S)
        pair.right.close()
        if self.done_means_released:
            with pytest.raises(TransportError):
                sending.wait(LONG_S)
            assert not sending.done
        else:
            with suppress(TransportError):  # it has been taken; the news of that and of the end race
                sending.wait(LONG_S)
            assert sending.done or pair.left.closed

    def test_many_channels_on_one_listener(self) -> None:
        with self.make_transport() as hub, ExitStack() as stack:
            listener = hub.listen()
            spokes = [stack.enter_context(self.make_transport()) for _ in range(3)]
            pairs = [connect_pair(spokes[i % 3], listener) for i in range(12)]
            for i, (connected, accepted) in enumerate(pairs):
                connected.send_all(f"up {i}".encode(), timeout_s=LONG_S)
                accepted.send_all(f"down {i}".encode(), timeout_s=LONG_S)
            pairs[5][0].close()
            listener.close()  # accepted channels live on
            for connected, accepted in pairs[6:]:
                connected.send_all(b"after", timeout_s=LONG_S)
                accepted.send_all(b"after", timeout_s=LONG_S)
            for i, (connected, accepted) in reversed(list(enumerate(pairs))):
                if i != 5:
                    assert accepted.receive(timeout_s=LONG_S).header == f"up {i}".encode()
                    assert connected.receive(timeout_s=LONG_S).header == f"down {i}".encode()
            for connected, accepted in pairs[6:]:
                assert (
                    connected.receive(timeout_s=LONG_S).header == accepted.receive(timeout_s=LONG_S).header == b"after"
                )
            until_raises(TransportError, lambda: pairs[5][1].receive(timeout_s=LONG_S))

    def test_several_threads_accept(self) -> None:
        with self.make_transport() as hub, self.make_transport() as spoke:
            listener = hub.listen()
            accepting = [in_thread(lambda: listener.accept(LONG_S)) for _ in range(4)]
            connected = [spoke.connect(listener.contact_address, timeout_s=LONG_S) for _ in range(4)]
            assert len({id(future.result(LONG_S)) for future in accepting}) == len(connected)

    def test_transport_close_ends_everything(self) -> None:
        with self.open_pair() as pair:
            region = pair.right_transport.allocate(10)
            blocked = [
                in_thread(lambda: pair.right.receive(timeout_s=LONG_S)),
                in_thread(lambda: pair.listener.accept(LONG_S)),
            ]
            pair.right_transport.close()
            for future in blocked:
                with pytest.raises(TransportError):
                    future.result(LONG_S)
            with pytest.raises(TransportError):
                pair.left.receive(timeout_s=LONG_S)
            with pytest.raises(MisuseError):
                _ = region.view
            with pytest.raises(MisuseError):
                pair.right_transport.listen()
            pair.right_transport.close()

    def test_address_is_a_url_of_the_scheme(self) -> None:
        with self.make_transport() as transport, transport.listen() as one, transport.listen() as two:
            assert parse_address(one.contact_address).scheme == transport.scheme
            assert one.contact_address != two.contact_address

    # -- regions told to the peer ----------------------------------------------------------------

    def test_export_is_refused_where_it_cannot_work(self, pair: Pair) -> None:
        if pair.left.closed or pair.left_transport.can_export:
            closed, foreign = pair.left_transport.allocate(10), pair.right_transport.allocate(10)
            closed.close()
            for region in (closed, foreign):
                with pytest.raises(MisuseError):
                    pair.left.export_region(region, b"", timeout_s=LONG_S)
        else:
            with pytest.raises(MisuseError):
                pair.left.export_region(pair.left_transport.allocate(10), b"", timeout_s=LONG_S)
        pair.left.send_all(b"fine", timeout_s=LONG_S)
        assert pair.right.receive(timeout_s=LONG_S).header == b"fine"

    @pytest.mark.parametrize("kind", ["allocated", "registered"])
    def test_exported_regions_can_be_read(self, pair: Pair, kind: str) -> None:
        if not pair.left_transport.can_export:
            pytest.skip("this transport exports no regions")
        pattern = (np.arange(100_000) % 251).astype(np.uint8)
        if kind == "allocated":
            region = pair.left_transport.allocate(len(pattern), "pattern")
            region.view[:] = pattern.tobytes()
        else:
            region = pair.left_transport.register(bytearray(pattern.tobytes()), "pattern")
        pair.left.export_region(region, b"look", timeout_s=LONG_S)
        message = pair.right.receive(timeout_s=LONG_S)
        remote = message.region
        assert remote is not None
        message.release()
        assert (message.header, remote.nbytes, remote.name) == (b"look", len(pattern), "pattern")
        if remote.view is not None:
            assert remote.view.readonly
            assert remote.view == region.view
        choice = np.random.default_rng(3)
        lengths = choice.integers(0, 40, 3000)
        sources = choice.integers(0, len(pattern) - 40, 3000)
        targets = np.cumsum(lengths) - lengths
        expected = np.concatenate([pattern[s : s + n] for s, n in zip(sources, lengths, strict=True)])
        target = bytearray(len(expected) + 10)
        assert remote.read_runs(memoryview(target), targets, sources, lengths) == len(expected)
        assert target == expected.tobytes() + bytes(10)
        region.view[0] = 99  # it is the owner's live memory
        assert remote.read_runs(memoryview(target), offsets(5), offsets(0), offsets(1)) == 1
        assert target[5] == 99
        assert remote.read_runs(memoryview(target), offsets(), offsets(), offsets()) == 0
        self._check_bounds(remote, target)
        region.close()
        pair.left.send_all(b"closed", timeout_s=LONG_S)
        assert pair.right.receive(timeout_s=LONG_S).header == b"closed"
        with pytest.raises(TransportError):
            remote.read_runs(memoryview(target), offsets(0), offsets(0), offsets(1))

    def _check_bounds(self, remote: object, target: bytearray) -> None:
        size, big = remote.nbytes, 1 << 62  # type: ignore[attr-defined]
        before = bytes(target)
        bad: list[tuple[object, ...]] = [
            (memoryview(target), offsets(0), offsets(size), offsets(1)),
            (memoryview(target), offsets(0), offsets(-1), offsets(1)),
            (memoryview(target), offsets(0), offsets(0), offsets(-1)),
            (memoryview(target), offsets(0, 0), offsets(0, size - 1), offsets(1, 2)),
            (memoryview(target), offsets(len(target)), offsets(0), offsets(1)),
            (memoryview(target), offsets(-1), offsets(0), offsets(1)),
            (memoryview(target), offsets(big), offsets(big), offsets(big)),
            (memoryview(target), offsets(0), offsets(big), offsets(2**63 - 1)),
            (memoryview(target), offsets(0, 1), offsets(0), offsets(1)),
            (memoryview(target), offsets(0).astype(np.int32), offsets(0), offsets(1)),
            (memoryview(bytes(8)), offsets(0), offsets(0), offsets(1)),
        ]
        for arguments in bad:
            with pytest.raises(MisuseError):
                remote.read_runs(*arguments)  # type: ignore[attr-defined]
        assert bytes(target) == before

    # -- another process -------------------------------------------------------------------------

    def test_two_processes(self) -> None:
        with self.open_process() as (transport, channel, _):
            region = transport.allocate(9 * MIB)
            np.frombuffer(region.view, np.uint8)[:] = np.random.default_rng(2).integers(0, 256, 9 * MIB, np.uint8)
            for piece in (region.view, region.view[1:1000], region.view[:0]):
                channel.send_all(b"echo", piece, timeout_s=LONG_S)
                with channel.receive(timeout_s=LONG_S) as message:
                    assert message.payload == piece

    def test_reading_another_process(self) -> None:
        with self.open_process() as (transport, channel, process):
            if not transport.can_export:
                pytest.skip("this transport exports no regions")
            channel.send_all(b"export", timeout_s=LONG_S)
            remote = channel.receive(timeout_s=LONG_S).region
            assert remote is not None
            count = EXPORT_NBYTES // 256
            lengths, sources = np.full(count, 100), np.arange(count)[::-1] * 256
            memory = bytearray(count * 128)
            view, target = memoryview(memory), np.frombuffer(memory, np.uint8).reshape(count, 128)
            read = remote.read_runs(view, np.arange(count) * 128, sources, lengths)
            assert read == count * 100
            assert (target[:, :100] == ((sources[:, None] + np.arange(100)) % 251)).all()
            assert not target[:, 100:].any()
            process.send_signal(signal.SIGKILL)
            process.wait()
            if remote.view is None:
                with pytest.raises(TransportError):
                    remote.read_runs(view, offsets(0), offsets(0), offsets(1))

    def test_a_killed_peer_is_noticed(self) -> None:
        with self.open_process() as (transport, channel, process):
            region = transport.allocate(MIB)
            sending = channel.send_all(b"hold", region.view, timeout_s=LONG_S)
            assert channel.receive(timeout_s=LONG_S).header == b"held"
            receiving = in_thread(lambda: channel.receive(timeout_s=LONG_S))
            waiting = in_thread(lambda: sending.wait(LONG_S))
            process.send_signal(signal.SIGKILL)
            with pytest.raises(TransportError):
                receiving.result(LONG_S)
            if self.done_means_released:
                with pytest.raises(TransportError):
                    waiting.result(LONG_S)
            with pytest.raises(TransportError):
                channel.send_all(b"", timeout_s=LONG_S)

    # -- leaks -----------------------------------------------------------------------------------

    def test_nothing_is_left_behind(self) -> None:
        def use() -> None:
            with self.open_pair() as pair:
                region = pair.left_transport.allocate(MIB, "leak")
                for _ in range(5):
                    pair.left.send_all(b"", region.view, timeout_s=LONG_S)
                    pair.right.receive(timeout_s=LONG_S).release()
                if pair.left_transport.can_export:
                    for exported in (region, pair.left_transport.register(bytearray(100))):
                        pair.left.export_region(exported, b"", timeout_s=LONG_S)
                        pair.right.receive(timeout_s=LONG_S)
                pair.left.send_all(b"never received", region.view, timeout_s=LONG_S)
                with pytest.raises(DeadlineError):
                    pair.left_transport.connect(pair.listener.contact_address, timeout_s=0)

        self._check_leaks(use)

    def test_nothing_is_left_behind_by_a_killed_peer(self) -> None:
        def use() -> None:
            with self.open_process() as (transport, channel, process):
                region = transport.allocate(MIB, "leak")
                channel.send_all(b"echo", region.view, timeout_s=LONG_S)
                message = channel.receive(timeout_s=LONG_S)
                process.send_signal(signal.SIGKILL)
                until_raises(TransportError, lambda: channel.receive(timeout_s=LONG_S))
                assert message.payload.nbytes == MIB  # what we had stays readable

        self._check_leaks(use)

    def _check_leaks(self, use: Callable[[], None]) -> None:
        use()  # the first time may load libraries and start threads that stay
        before = resources()
        for _ in range(3):
            use()
        give_up_at_s = time.monotonic() + LONG_S / 3
        while (more := grown(before)) and time.monotonic() < give_up_at_s:
            time.sleep(0.01)  # threads of libraries end a moment after they were asked to
        assert not more
