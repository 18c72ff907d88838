"""The source's end: many readers share its staging fairly, and the channel itself says when all is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from pdxfer import wire
from pdxfer.builders import Parallel
from pdxfer.errors import CorruptError, StaleError, TransportError
from pdxfer.messages import PROTOCOL_VERSION
from pdxfer.transport import Message
from tests.pairs import LONG, hand_over, pair, wait_until
from tests.workers import CountingAgent, Gate, Tap, Worker, layouts, settle

STEP = 4096


@contextmanager
def readers(
    count: int, *, chunks: int, stall_s: float, digests: bool = True
) -> Iterator[tuple[Worker, list[Worker], list[Gate]]]:
    """A source with staging for so many chunks, a reader that runs, and ``count`` that stop at their first chunk."""
    plan = layouts(Parallel(), Parallel())
    both = {"transports": ("memory",), "mode": "packed", "chunk_bytes": STEP, "window": 8, "digests": digests}
    gates = [Gate("receive") for _ in range(count)]
    with ExitStack() as stack:
        source = Worker(plan[0], seed=1, worker="P", arena_bytes=chunks * STEP, stall_s=stall_s, **both)
        stack.enter_context(source)
        targets = [
            stack.enter_context(Worker(plan[1], seed=2 + i, worker=f"D{i}", wrap=gate.wrap if gate else None, **both))
            for i, gate in enumerate([None, *gates])
        ]
        yield source, targets, gates
        for worker in (source, *targets):
            worker.check_idle()


def begin(source: Worker, target: Worker, key: str) -> list:
    ticket = source.offer(key, LONG)
    target.reserve(key, LONG)
    return target.start(ticket, key)


def test_a_reader_that_stands_still_leaves_room_for_others():
    with readers(1, chunks=8, stall_s=60.0) as (source, (running, stalled), (gate,)):
        fetches = begin(source, stalled, "slow")
        with gate.closed():
            arena = source.agents[0].memory.arena("memory")
            assert wait_until(lambda: arena.used_bytes == 4 * STEP, timeout_s=30.0), "its share, alone: half"
            hand_over(source, running, "quick", LONG)
            assert arena.used_bytes == 4 * STEP
        for received in settle(fetches):
            received.release()


@pytest.mark.parametrize("digests", [True, False])
def test_a_reader_that_stands_still_loses_its_chunk_when_others_wait_for_its_memory(digests):
    """At its last chunk, and it must not find what lies there now."""
    with readers(1, chunks=1, stall_s=1.0, digests=digests) as (source, (running, stalled), (gate,)):
        (received,) = hand_over(source, running, "first", LONG)
        gate.chunk = received.edges[0].messages - 1
        fetches = begin(source, stalled, "slow")
        with gate.closed():
            assert source.agents[0].memory.arena("memory").used_bytes == STEP
            hand_over(source, running, "quick", LONG)
        with pytest.raises(CorruptError if digests else StaleError):
            settle(fetches)
        source.agents[0].withdraw("slow")


class Broken(Tap):
    """The target's channel breaks when Done is sent, or when its answer comes."""

    def __init__(self, at: type) -> None:
        self.at, self.broken = at, 0
        self.before = lambda: None

    def sending(self, header: bytes) -> None:
        if isinstance(wire.decode(header), self.at):
            self._break()

    def received(self, message: Message) -> list[Message]:
        if isinstance(wire.decode(message.header), self.at):
            self._break()
        return [message]

    def _break(self) -> None:
        self.broken += 1
        self.before()
        raise TransportError("broken for a test")


@pytest.mark.parametrize("at", [wire.Done, wire.Closed])
def test_where_the_channel_cannot_say_it_control_does(at):
    tap = Broken(at)
    with pair(*layouts(Parallel(tp=2), Parallel()), of_target={"wrap": tap.wrap}) as (source, target):
        hand_over(source, target, "one")
        assert tap.broken == 2
        assert [agent.calls["complete"] for agent in source.agents] == [1, 1]


def test_an_offer_that_ended_before_done_was_said_is_stale():
    tap = Broken(wire.Done)
    with pair(*layouts(Parallel(), Parallel()), of_target={"wrap": tap.wrap}) as (source, target):
        tap.before = lambda: source.agents[0].withdraw("one")
        ticket = source.offer("one", LONG)
        target.reserve("one", LONG)
        with pytest.raises(StaleError):
            target.fetch(ticket, "one")


class Asked(Tap):
    """Chunks that each Ask wants."""

    def __init__(self) -> None:
        self.chunks: list[list[int]] = []

    def sending(self, header: bytes) -> None:
        frame = wire.decode(header)
        if isinstance(frame, wire.Ask):
            self.chunks.append(frame.chunks)


@pytest.mark.parametrize(("version", "wanted"), [(1, [0]), (PROTOCOL_VERSION, [0, 1, 2, 3])])
def test_who_speaks_version_1_is_asked_for_chunks_that_there_are_and_others_at_once(monkeypatch, version, wanted):
    tap, describe = Asked(), CountingAgent.describe

    def described(self, message, *, deadline_s):
        return replace(describe(self, message, deadline_s=deadline_s), protocol_newest=version)

    monkeypatch.setattr(CountingAgent, "describe", described)
    with pair(*layouts(Parallel(), Parallel()), transports=("shm",), window=4, wrap=tap.wrap) as (source, target):
        (received,) = hand_over(source, target, "one")
        assert received.edges[0].messages == 1
        assert tap.chunks == [wanted]
