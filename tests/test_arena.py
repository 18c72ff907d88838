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


def nothing() -> None:
    """Reap nothing."""


def arena_of(steps: int, extra: int = 0) -> tuple[Arena, np.ndarray]:
    memory = np.zeros(steps * STEP + extra, np.uint8)
    return Arena(memoryview(memory)), memory


def take(arena: Arena, nbytes: int, timeout_s: float = 0.0) -> memoryview:
    return arena.allocate(nbytes, timeout_s=timeout_s, reap=nothing)


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
    reaped = []
    with pytest.raises(ExhaustedError, match="does not fit"):
        arena.allocate(2 * STEP + 1, timeout_s=1e9, reap=lambda: reaped.append(1))
    assert not reaped


def test_the_caller_s_own_finished_blocks_make_room():
    arena, _ = arena_of(1)
    mine = [take(arena, 1)]
    assert len(arena.allocate(STEP, timeout_s=0.0, reap=lambda: arena.free(mine.pop()))) == STEP
    assert not mine


def test_a_waiter_gets_what_another_thread_frees():
    arena, _ = arena_of(1)
    held, got = take(arena, 1), []
    waiting = threading.Event()
    thread = threading.Thread(target=lambda: got.append(arena.allocate(1, timeout_s=60.0, reap=waiting.set)))
    thread.start()
    assert waiting.wait(60.0)
    arena.free(held)
    thread.join(60.0)
    assert len(got) == 1
    assert arena.waits >= 1


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
