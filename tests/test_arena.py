"""The arena: blocks tile it, never overlap, and waiting for one ends."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pdxfer.agent.arena import Arena
from pdxfer.errors import ExhaustedError, InternalError

STEP = 4096


def arena_of(steps: int, extra: int = 0) -> tuple[Arena, np.ndarray]:
    memory = np.zeros(steps * STEP + extra, np.uint8)
    return Arena(memoryview(memory)), memory


def take(arena: Arena, nbytes: int, timeout_s: float = 0.0) -> memoryview:
    return arena.allocate(nbytes, object(), timeout_s=timeout_s)


class ArenaMachine(RuleBasedStateMachine):
    """Every block carries its own pattern; a block that overlaps another destroys one."""

    def __init__(self) -> None:
        super().__init__()
        self.arena, self.memory = arena_of(24, extra=100)
        self.blocks: dict[int, memoryview] = {}
        self.serial = 0

    @rule(nbytes=st.integers(1, 9 * STEP))
    def allocate(self, nbytes):
        steps = -(-nbytes // STEP)
        gaps = "".join("1" if used else "0" for used in self.used())
        try:
            block = take(self.arena, nbytes)
        except ExhaustedError:
            assert "0" * steps not in gaps
            return
        assert "0" * steps in gaps
        assert len(block) == steps * STEP
        self.serial = self.serial % 250 + 1
        block[:] = bytes([self.serial]) * len(block)
        self.blocks[self.serial] = block

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data):
        serial = data.draw(st.sampled_from(sorted(self.blocks)))
        block = self.blocks.pop(serial)
        block[:] = bytes(len(block))
        self.arena.free(block)

    @rule()
    def free_a_stranger(self):
        with pytest.raises(InternalError):
            self.arena.free(memoryview(bytearray(STEP)))

    def used(self) -> np.ndarray:
        return self.memory[: 24 * STEP].reshape(24, STEP).any(axis=1)

    @invariant()
    def tiles_and_never_overlaps(self):
        self.arena.check_integrity()
        for serial, block in self.blocks.items():
            assert bytes(block) == bytes([serial]) * len(block)
        assert self.arena.used_bytes == sum(map(len, self.blocks.values())) == int(self.used().sum()) * STEP
        assert self.arena.used_bytes <= self.arena.peak_bytes <= self.arena.capacity_bytes == 24 * STEP


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=40, stateful_step_count=40)


def test_freeing_twice_is_our_bug():
    arena, _ = arena_of(2)
    block = take(arena, 1)
    arena.free(block)
    with pytest.raises(InternalError):
        arena.free(block)
    arena.check_integrity()


def test_a_full_arena_ends_the_wait_with_its_deadline():
    arena, _ = arena_of(2)
    held = take(arena, 2 * STEP)
    start = time.monotonic()
    with pytest.raises(ExhaustedError, match=r"no room .* within 0\.2 s"):
        take(arena, 1, timeout_s=0.2)
    assert time.monotonic() - start >= 0.2
    arena.free(held)
    assert len(take(arena, 2 * STEP)) == 2 * STEP


def test_what_never_fits_is_refused_without_waiting():
    arena, _ = arena_of(2, extra=4000)
    with pytest.raises(ExhaustedError, match="does not fit"):
        take(arena, 2 * STEP + 1, timeout_s=1e9)


class Waiting:
    """A thread that waits for a block, and has its turn in the queue when this returns."""

    def __init__(self, arena: Arena, owner: object, served: list[object], nbytes: int = STEP) -> None:
        self.block: memoryview | None = None
        before = arena.waiting

        def wait() -> None:
            self.block = arena.allocate(nbytes, owner, timeout_s=60.0)
            served.append(owner)

        self.thread = threading.Thread(target=wait)
        self.thread.start()
        while arena.waiting == before:
            time.sleep(0.001)

    def join(self) -> memoryview:
        self.thread.join(60.0)
        assert self.block is not None
        return self.block


def test_who_waits_is_served_in_turn_and_nobody_overtakes():
    arena, _ = arena_of(2)
    held, served = [take(arena, STEP), take(arena, STEP)], []
    large = Waiting(arena, "large", served, 2 * STEP)
    small = Waiting(arena, "small", served)
    arena.free(held.pop())
    assert arena.try_allocate(STEP, "new") is None, "there is room, but others came first"
    assert served == []
    arena.free(held.pop())
    arena.free(large.join())
    arena.free(small.join())
    assert served == ["large", "small"]
    assert arena.waits == 2
    arena.check_integrity()


def test_who_gives_up_waiting_lets_the_next_one_pass():
    arena, _ = arena_of(2)
    held, served = take(arena, STEP), []

    def give_up() -> None:
        with pytest.raises(ExhaustedError):
            take(arena, 2 * STEP, 0.2)
        served.append("impatient")

    impatient = threading.Thread(target=give_up)
    impatient.start()
    while not arena.waiting:
        time.sleep(0.001)
    small = Waiting(arena, "small", served)
    impatient.join(60.0)
    arena.free(small.join())
    assert "impatient" in served
    arena.free(held)
    arena.check_integrity()


def test_sessions_take_turns():
    """Three that want ten blocks each, one after the other, in an arena of one."""
    arena, _ = arena_of(1)
    held, served, left = take(arena, STEP), [], [*"abc"]

    def work(owner: str) -> None:
        for number in range(10):
            block = arena.allocate(STEP, owner, timeout_s=60.0)
            served.append(owner)
            if number == 9:
                left.remove(owner)
            while arena.waiting < len(left) - (number < 9):  # until all others want one, too
                time.sleep(0.001)
            arena.free(block)

    threads = [threading.Thread(target=work, args=(owner,)) for owner in "abc"]
    for count, thread in enumerate(threads, 1):
        thread.start()
        while arena.waiting < count:
            time.sleep(0.001)
    arena.free(held)
    for thread in threads:
        thread.join(60.0)
    assert served == [*"abc"] * 10


def test_no_owner_gets_more_than_its_share_but_one_block_is_everybody_s():
    arena, _ = arena_of(8)
    greedy = []
    while (block := arena.try_allocate(STEP, "greedy")) is not None:
        greedy.append(block)
    assert len(greedy) == 4, "alone: half"
    second = []
    while (block := arena.try_allocate(STEP, "second")) is not None:
        second.append(block)
    assert len(second) == 2, "two: a third each"
    assert arena.try_allocate(STEP, "greedy") is None
    third = arena.try_allocate(2 * STEP, "third")
    assert third is not None, "what fits at all, one block of it, whatever the share"
    for block in (*greedy, *second, third):
        arena.free(block)
    arena.check_integrity()


def test_threads_never_share_a_byte():
    arena, _ = arena_of(8)
    wrong: list[int] = []

    def work(mark: int) -> None:
        rng = np.random.default_rng(mark)
        for _ in range(200):
            block = take(arena, int(rng.integers(1, 4 * STEP)), timeout_s=60.0)
            view = np.frombuffer(block, np.uint8)
            view[:] = mark
            if not (view == mark).all():
                wrong.append(mark)
            arena.free(block)

    threads = [threading.Thread(target=work, args=(i + 1,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not wrong
    assert arena.used_bytes == 0
    arena.check_integrity()
