"""Bytes and frames damaged on their way, and staging that is full: found, named, and nothing is READY."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from pdxfer import wire
from pdxfer.builders import Parallel
from pdxfer.errors import (
    CorruptError,
    DeadlineError,
    ExhaustedError,
    PdxferError,
    PeerError,
    StaleError,
    TransportError,
)
from pdxfer.testing.faults import Fault, FaultPlan, FaultyTransport
from pdxfer.testing.oracle import Oracle
from pdxfer.transport import Message
from tests.pairs import LONG, TOKENS, fails, hand_over, pair
from tests.workers import Tap, Worker, layouts


@contextmanager
def damaged(mode: str, *faults: Fault, **config) -> Iterator[tuple[Worker, Worker, FaultyTransport]]:
    """Two workers; the target's transport damages what it receives."""
    with pair(*layouts(Parallel(tp=2), Parallel(tp=1)), mode=mode, chunk_bytes=4096, **config) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = faulty = FaultyTransport(agent.transports["memory"], FaultPlan.of(*faults))
        yield source, target, faulty


@pytest.mark.parametrize("mode", ["packed", "direct"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_flipped_bit_is_found_and_its_component_named(mode, at):
    with damaged(mode, Fault(kind="corrupt", at=at, on="payload" if mode == "packed" else "read")) as workers:
        source, target, faulty = workers
        error = fails(source, target, CorruptError, match="digest")
        assert faulty.fired
        assert error.component in [c.name for c in source.layout.spec.components]
        faulty.plan = FaultPlan.of()
        hand_over(source, target, "again")


def test_a_truncated_payload_is_found():
    with damaged("packed", Fault(kind="truncate", at=1)) as (source, target, faulty):
        assert fails(source, target, CorruptError, match="bytes").component != "*"
        assert faulty.fired


def test_a_dropped_message_ends_with_the_deadline():
    with damaged("packed", Fault(kind="drop", at=0)) as (source, target, faulty):
        fails(source, target, DeadlineError, timeout_s=0.5)
        assert faulty.fired


def test_a_broken_channel_is_a_transport_error():
    with damaged("packed", Fault(kind="disconnect", at=1)) as (source, target, faulty):
        fails(source, target, TransportError)
        assert faulty.fired


def test_without_digests_the_flipped_bit_is_not_found():
    """The control experiment: it is the digest that finds it."""
    with damaged("packed", Fault(kind="corrupt", at=0), digests=False) as (source, target, faulty):
        ticket = source.offer("one", TOKENS)
        before = target.reserve("one", TOKENS).copy()
        for done in target.fetch(ticket, "one"):
            done.release()
        assert faulty.fired
        with pytest.raises(CorruptError):
            Oracle.of(source.layout, key="one", tokens=TOKENS).check(target.memory("one"), before)


@pytest.mark.parametrize("trick", ["twice", "unasked", "beyond", "other session", "no digests", "no data", "swapped"])
def test_frames_that_the_protocol_does_not_have_are_refused(trick):
    with pair(*layouts(Parallel(), Parallel()), mode="packed", chunk_bytes=4096, window=2) as (source, target):
        agent = target.agents[0]
        agent.transports["memory"] = Trickster(trick).wrap(agent.transports["memory"])
        error = fails(source, target, PdxferError)
        assert isinstance(error, CorruptError if trick == "swapped" else PeerError)


class Trickster(Tap):
    """Makes a source's data frames wrong on their way to the target."""

    def __init__(self, trick: str) -> None:
        self.trick, self.kept = trick, b""

    def received(self, message: Message) -> list[Message]:
        frame = wire.decode(message.header)
        if not isinstance(frame, wire.Data):
            return [message]
        payload = bytes(message.payload)
        message.release()
        if self.trick == "twice":
            return [_message(frame, payload), _message(frame, payload)]
        if self.trick == "unasked":
            return [_message(replace(frame, chunk=frame.chunk + 3), payload)]
        if self.trick == "beyond":
            return [_message(replace(frame, chunk=1 << 40), payload)]
        if self.trick == "other session":
            return [_message(replace(frame, session=bytes(16)), payload)]
        if self.trick == "no digests":
            return [_message(replace(frame, digests=[]), payload)]
        if self.trick == "no data":
            return [Message(wire.encode(wire.Done(frame.session, 0)), memoryview(b""))]
        # Swapped: every chunk comes with the payload of the one before it, cut or padded to fit.
        other, self.kept = self.kept or bytes(len(payload)), payload
        return [_message(frame, other[: len(payload)].ljust(len(payload), b"x"))]


def _message(frame: wire.Frame, payload: bytes) -> Message:
    return Message(wire.encode(frame), memoryview(payload))


def test_an_arena_that_is_too_small_for_a_chunk_is_said_at_once():
    small = {"arena_bytes": 8192, "chunk_bytes": 8192}
    with pair(*layouts(Parallel(), Parallel()), mode="packed", of_source=small) as (source, target):
        error = fails(source, target, ExhaustedError, match="arena of 8192 B")
        assert "chunk_bytes" in error.hint


def test_a_full_arena_is_said_in_time():
    small = {"arena_bytes": 8192, "chunk_bytes": 8192, "stall_s": 0.2}
    plan = layouts(Parallel(), Parallel())
    with pair(*plan, mode="packed", of_source=small, of_target={"chunk_bytes": 4096}) as (source, target):
        arena = source.agents[0].memory.arena("memory")
        held = arena.allocate(8192, "test", timeout_s=0.0)
        fails(source, target, ExhaustedError, match="at the source")
        arena.free(held)
        hand_over(source, target, "again")


class Withdrawing(Tap):
    """The engine takes its pages back, and writes into them, while a target copies the second chunk straight from them.

    The first chunk's frame is held at the target until the source has digested the second.
    """

    def __init__(self) -> None:
        self.digested = threading.Event()
        self.source: Worker | None = None

    def sending(self, header: bytes) -> None:
        frame = wire.decode(header)
        if isinstance(frame, wire.Data) and frame.chunk == 1:
            self.digested.set()

    def received(self, message: Message) -> list[Message]:
        frame = wire.decode(message.header)
        if isinstance(frame, wire.Data) and frame.chunk < 2:
            assert self.source is not None
            if frame.chunk == 0:
                assert self.digested.wait(60.0)
                for buffer in self.source.ranks[0].buffers:
                    buffer ^= 0xFF
            else:
                self.source.agents[0].withdraw("one")
        return [message]


def test_pages_that_are_taken_back_under_a_direct_copy_are_stale_not_corrupt():
    tap = Withdrawing()
    plan = layouts(Parallel(), Parallel())
    with pair(*plan, mode="direct", transports=("shm",), chunk_bytes=4096, wrap=tap.wrap) as (source, target):
        tap.source = source
        ticket = source.offer("one", LONG)
        target.reserve("one", LONG)
        with pytest.raises(StaleError, match="withdrawn") as caught:
            target.fetch(ticket, "one")
        assert caught.value.reason == "TRANSFER_ENDED"
        assert "integrity_failures" not in {name for name, *_ in target.agents[0].journal.counts}
