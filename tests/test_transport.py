"""Every transport against the contract; the registry, addresses, runs and fault wrappers."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdxfer.errors import DeadlineError, MisuseError, TransportError
from pdxfer.testing.faults import Fault, FaultPlan, FaultyTransport
from pdxfer.testing.transport import LONG_S, TransportConformance, connect_pair, offsets
from pdxfer.transport import Transport, create_transport, format_address, known_schemes, parse_address, runs


class TestMemory(TransportConformance):
    one_process = True

    def make_transport(self) -> Transport:
        return create_transport("memory")


class TestShm(TransportConformance):
    def make_transport(self) -> Transport:
        return create_transport("shm")


class TestTcp(TransportConformance):
    done_means_released = False

    def make_transport(self) -> Transport:
        return create_transport("tcp")


class TestFaultlessWrapper(TransportConformance):
    """With an empty plan the wrapper keeps the whole contract."""

    one_process = True

    def make_transport(self) -> Transport:
        return FaultyTransport(create_transport("memory"), FaultPlan.of())


# -- registry and addresses ----------------------------------------------------------------------


def test_unknown_scheme_lists_the_known_ones():
    with pytest.raises(MisuseError, match=r"'carrier-pigeon'.*memory, n.*, shm, tcp") as caught:
        create_transport("carrier-pigeon")
    assert "pdxfer.transports" in caught.value.hint


def test_unknown_option_is_misuse():
    with pytest.raises(MisuseError, match="velocity"):
        create_transport("memory", velocity=3)


def write_plugin(directory, object_name):
    (directory / "pigeon.py").write_text(
        "from pdxfer.transport.memory import MemoryTransport\n"
        "class Pigeon(MemoryTransport):\n    scheme = 'pigeon'\n"
        "def not_a_class(): ...\n"
    )
    info = directory / "pigeon-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1\n")
    points = f"[pdxfer.transports]\npigeon = {object_name}\nshm = pigeon:Pigeon\n"
    (info / "entry_points.txt").write_text(points)


def test_entry_points_add_schemes_but_replace_none(tmp_path, monkeypatch):
    write_plugin(tmp_path, "pigeon:Pigeon")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pigeon", raising=False)
    assert known_schemes()["pigeon"] == "pigeon:Pigeon"
    assert known_schemes()["shm"] == "pdxfer.transport.shm:ShmTransport"
    with create_transport("pigeon") as transport:
        assert transport.scheme == "pigeon"
    with pytest.raises(MisuseError, match="pigeon"):
        create_transport("unknown")


@pytest.mark.parametrize(
    ("points_to", "error"), [("missing_module:X", "library"), ("pigeon:not_a_class", "not a Trans")]
)
def test_broken_entry_points_are_named(tmp_path, monkeypatch, points_to, error):
    write_plugin(tmp_path, points_to)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pigeon", raising=False)
    with pytest.raises(MisuseError, match=error):
        create_transport("pigeon")


@given(st.text(max_size=30))
def test_addresses_parse_or_are_misuse(text):
    try:
        address = parse_address(text)
    except MisuseError:
        return
    assert format_address(address) == text
    assert parse_address(format_address(address)) == address


@pytest.mark.parametrize("url", ["", "tcp", "tcp:/x", "://x", "tcp://", "t cp://x", "tcp://a b", "tcp://a\n", "té://x"])
def test_bad_addresses(url):
    with pytest.raises(MisuseError):
        parse_address(url)


# -- runs ----------------------------------------------------------------------------------------


@st.composite
def run_lists(draw):
    """Runs of one source of 300 bytes to ascending, disjoint places of a target; many are neighbours at both ends."""
    targets, sources, lengths = [], [], []
    target_at, source_at = 0, draw(st.integers(0, 100))
    for _ in range(draw(st.integers(0, 12))):
        length = draw(st.integers(0, 20))
        if draw(st.booleans()):
            target_at, source_at = target_at + draw(st.integers(0, 3)), draw(st.integers(0, 280))
        if source_at + length > 300:
            source_at = 0
        targets.append(target_at)
        sources.append(source_at)
        lengths.append(length)
        target_at, source_at = target_at + length, source_at + length
    return offsets(*targets), offsets(*sources), offsets(*lengths)


@pytest.mark.parametrize("kernel", ["native", "python"])
@given(run_lists())
def test_runs_copy_what_they_say(kernel, lists):
    source = bytes(i % 256 for i in range(300))
    target, expected = bytearray(400), bytearray(400)
    for t, s, n in zip(*lists, strict=True):
        expected[t : t + n] = source[s : s + n]
    view, *merged = runs.check_runs(memoryview(target), len(source), *lists)
    if kernel == "native" and runs._native is None:
        pytest.skip("the copy kernel was not built")
    with pytest.MonkeyPatch.context() as patch:
        if kernel == "python":
            patch.setattr(runs, "_native", None)
        assert runs.copy_runs(view, memoryview(source), *merged) == lists[2].sum()
    assert target == expected
    assert len(merged[0]) <= max(1, np.count_nonzero(lists[2]))


def test_neighbours_at_both_ends_are_merged():
    _, *merged = runs.check_runs(
        memoryview(bytearray(50)), 50, offsets(0, 5, 9, 20), offsets(10, 15, 19, 30), offsets(5, 4, 0, 6)
    )
    assert [a.tolist() for a in merged] == [[0, 20], [10, 30], [9, 6]]


# -- faults --------------------------------------------------------------------------------------


def send_three(plan, scheme="memory"):
    """Three payloads through a faulty receiver: what arrived, how it ended, what fired."""
    with create_transport(scheme) as left, FaultyTransport(create_transport(scheme), plan) as right:
        sender, receiver = connect_pair(left, right.listen())
        region = left.allocate(300)
        region.view[:] = bytes(range(100)) * 3
        for i in range(3):
            sender.send_all(b"header only", timeout_s=LONG_S)
            sender.send_all(str(i).encode(), region.view[i * 100 : (i + 1) * 100], timeout_s=LONG_S)
        arrived = []
        try:
            while True:
                with receiver.receive(timeout_s=0.2) as message:
                    if message.payload.nbytes:
                        arrived.append((message.header, bytes(message.payload)))
        except (DeadlineError, TransportError) as error:
            return arrived, type(error), right.fired


WHOLE = bytes(range(100))


@pytest.mark.parametrize("scheme", ["memory", "shm"])
def test_corrupt_flips_one_bit_of_one_payload(scheme):
    fault = Fault(kind="corrupt", at=1)
    arrived, _, fired = send_three(FaultPlan.of(fault, seed=5), scheme)
    assert fired == [fault]
    assert [h for h, _ in arrived] == [b"0", b"1", b"2"]
    assert arrived[0][1] == arrived[2][1] == WHOLE
    flipped = [a ^ b for a, b in zip(arrived[1][1], WHOLE, strict=True) if a != b]
    assert len(flipped) == 1
    assert flipped[0].bit_count() == 1
    assert send_three(FaultPlan.of(fault, seed=5), scheme)[0] == arrived


def test_drop_truncate_and_disconnect():
    arrived, ended, _ = send_three(FaultPlan.of(Fault(kind="drop", at=0), Fault(kind="truncate", at=2)))
    assert arrived[0] == (b"1", WHOLE)
    assert len(arrived[1][1]) < len(WHOLE)
    assert WHOLE.startswith(arrived[1][1])
    assert ended is DeadlineError
    arrived, ended, _ = send_three(FaultPlan.of(Fault(kind="disconnect", at=2, on="message")))
    assert arrived == [(b"0", WHOLE)]
    assert ended is TransportError


def test_delay_changes_nothing_but_time():
    fault = Fault(kind="delay", at=0, delay_s=0.01)
    arrived, _, fired = send_three(FaultPlan.of(fault))
    assert [payload for _, payload in arrived] == [WHOLE] * 3
    assert fired == [fault]


def test_reads_can_be_hit():
    plan = FaultPlan.of(Fault(kind="corrupt", at=1, on="read"), Fault(kind="disconnect", at=2, on="read"))
    with create_transport("shm") as left, FaultyTransport(create_transport("shm"), plan) as right:
        sender, receiver = connect_pair(left, right.listen())
        sender.export_region(left.register(bytearray(WHOLE)), b"", timeout_s=LONG_S)
        remote = receiver.receive(timeout_s=LONG_S).region
        target = bytearray(100)
        arguments = memoryview(target), offsets(0), offsets(0), offsets(100)
        assert remote.read_runs(*arguments) == 100
        assert target == WHOLE
        assert remote.read_runs(*arguments) == 100
        assert sum(a != b for a, b in zip(target, WHOLE, strict=True)) == 1
        with pytest.raises(TransportError):
            remote.read_runs(*arguments)
        assert receiver.closed


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "drop", "at": -1},
        {"kind": "delay", "at": 0},
        {"kind": "drop", "at": 0, "delay_s": 1.0},
        {"kind": "truncate", "at": 0, "on": "read"},
        {"kind": "corrupt", "at": 0, "on": "message"},
    ],
)
def test_faults_that_make_no_sense(fields):
    with pytest.raises(MisuseError):
        Fault(**fields)
