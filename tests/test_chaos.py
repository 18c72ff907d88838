"""A few strikes of each kind of ``tests/chaos.py``, which has the long runs; and what they found, each by itself."""

from __future__ import annotations

import signal

import pytest

from pdxfer import wire
from pdxfer.builders import Parallel
from pdxfer.driver import EdgeReader
from tests.chaos import KINDS, play
from tests.failpoints import POINTS
from tests.pairs import hand_over, pair
from tests.workers import layouts

SCENES = [
    ("shm-packed", "source", ("accepted", "mid pack", "told it is done")),
    ("shm-direct", "target", ("opening", "mid unpack", "ready")),
    ("shm-direct", "source", ("greeted", "completed, not said")),
    ("tcp", "sibling", ("met", "relay ready", "after a chunk")),
    ("tcp", "source", ("describing", "packed, not sent")),
]


@pytest.mark.parametrize(("kind", "side", "points"), SCENES, ids=[f"{kind} {side}" for kind, side, _ in SCENES])
def test_whoever_dies_the_others_are_ready_at_once_and_hold_nothing_of_it(kind, side, points):
    assert kind in KINDS
    assert {*points} <= {*POINTS[side]}
    with play(kind, side) as found:
        for point in points:
            found.strike(point)


@pytest.mark.parametrize(("side", "point"), [("source", "after a chunk"), ("target", "before it is done")])
def test_whoever_stands_still_is_not_waited_for_and_can_go_on(side, point):
    with play("shm-packed", side) as found:
        found.strike(point, signal.SIGSTOP, 2.0)


@pytest.mark.parametrize("kind", ["shm-packed", "tcp"])
def test_a_source_back_at_its_address_believes_nothing_that_was_meant_for_the_dead_one(kind):
    with play(kind, "source") as found:
        addresses = found.addresses()
        found.spare.signal(signal.SIGKILL)
        found.spare = found.mortal(**addresses)
        for late in (True, False, True):
            found.restart(addresses, late=late)


def test_after_mixed_sizes_cancels_and_kills_survivors_hold_what_they_held():
    """Descriptors, sockets, memfds, threads and pages; only five minutes of it say something about resident memory."""
    with play("shm-packed", "source") as found:
        count, _ = found.soak(6.0, kill_s=2.0)
        assert count
        assert found.ready_s


# ---------------------------------------------------------------- found


def test_a_lease_is_not_renewed_once_all_is_said(monkeypatch):
    """A renewal after "done" was refused, for the source had ended the transfer: and a whole transfer failed."""
    send = EdgeReader._send

    def refused() -> None:
        raise AssertionError("renewed")

    def watched(reader: EdgeReader, frame: wire.Frame) -> None:
        send(reader, frame)
        if isinstance(frame, wire.Done):
            reader.renew = refused

    monkeypatch.setattr(EdgeReader, "_send", watched)
    with pair(*layouts(Parallel(), Parallel())) as workers:
        hand_over(*workers, "one")
