"""Arena: one bounded region cut into blocks for packed chunks, and fairly shared.

In come sizes and owners; out come blocks, or ExhaustedError in time. It knows neither chunks nor channels.

::

    region  |block A....|free......|block B|free..................|
             first fit, neighbours merge when freed, blocks start on 4 KiB

Who waits is served in turn, and nobody overtakes: with owners that come with nothing (``serve.Sent.room``), that is one
chunk for each, round and round. One block an owner can always have, if there is room; more of them only within its
share: with n owners, 1/(n+1) of the arena, so that something is left for the next one to come.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from pdxfer.errors import ExhaustedError, InternalError

__all__ = ["Arena"]

_STEP = 4096


@dataclass(slots=True, eq=False)
class _Waiter:
    owner: Hashable
    need: int
    block: memoryview | None = None
    served: threading.Event = field(default_factory=threading.Event)


class Arena:
    """First-fit blocks of a buffer. Thread-safe."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._gaps: list[tuple[int, int]] = [(0, len(memory) // _STEP * _STEP)]
        self._blocks: dict[int, int] = {}
        self._taken: dict[int, tuple[int, Hashable]] = {}  # by the block's id: its start and owner
        self._held: Counter[Hashable] = Counter()  # bytes by owner
        self._waiters: deque[_Waiter] = deque()
        self._changed = threading.Condition()
        self.peak_bytes = 0
        self.waits, self.waited_s, self.refusals = 0, 0.0, 0

    @property
    def capacity_bytes(self) -> int:
        """Bytes in all."""
        return len(self._memory) // _STEP * _STEP

    @property
    def used_bytes(self) -> int:
        """Bytes in blocks."""
        with self._changed:
            return sum(self._blocks.values())

    @property
    def waiting(self) -> int:
        """How many callers wait for room."""
        return len(self._waiters)

    def try_allocate(self, nbytes: int, owner: Hashable) -> memoryview | None:
        """Return a block of at least ``nbytes`` if there is room, nobody waits, and ``owner`` is within its share."""
        need = -(-nbytes // _STEP) * _STEP
        with self._changed:
            return None if self._waiters or not self._within_share(owner, need) else self._take(need, owner)

    def allocate(self, nbytes: int, owner: Hashable, *, timeout_s: float) -> memoryview:
        """Return a block of at least ``nbytes``, waiting in turn for room and for the owner's share.

        Raises:
            ExhaustedError: no room in time, or ever.
        """
        need = -(-nbytes // _STEP) * _STEP
        if need > self.capacity_bytes:
            raise ExhaustedError(
                f"a chunk of {nbytes} B does not fit into the arena of {self.capacity_bytes} B",
                hint="raise arena_bytes, or lower chunk_bytes",
            )
        waiter, began_s = _Waiter(owner, need), time.monotonic()
        with self._changed:
            self._waiters.append(waiter)
            self._serve()
            if waiter.block is not None:
                return waiter.block
            self.waits += 1
        waiter.served.wait(timeout_s)
        with self._changed:
            self.waited_s += time.monotonic() - began_s
            if waiter.block is not None:
                return waiter.block
            self.refusals += 1
            self._waiters.remove(waiter)
            self._serve()  # those behind it may fit
        raise ExhaustedError(
            f"the arena of {self.capacity_bytes} B had no room for {nbytes} B within {timeout_s:g} s",
            hint="a reader is slow, or arena_bytes is too small for the load",
        )

    def _within_share(self, owner: Hashable, need: int) -> bool:
        held = self._held.get(owner, 0)  # not [owner]: a Counter would keep it
        return not held or held + need <= self.capacity_bytes // (len(self._held) + 1)

    def _serve(self) -> None:
        """Give room to those who wait, in turn; who is over its share lets others pass."""
        for waiter in list(self._waiters):
            if not self._within_share(waiter.owner, waiter.need):
                continue
            waiter.block = self._take(waiter.need, waiter.owner)
            if waiter.block is None:
                return
            self._waiters.remove(waiter)
            waiter.served.set()

    def _take(self, need: int, owner: Hashable) -> memoryview | None:
        for i, (start, size) in enumerate(self._gaps):
            if size >= need:
                self._gaps[i : i + 1] = [(start + need, size - need)] if size > need else []
                self._blocks[start] = need
                block = self._memory[start : start + need]
                self._taken[id(block)] = start, owner
                self._held[owner] += need
                self.peak_bytes = max(self.peak_bytes, sum(self._blocks.values()))
                return block
        return None

    def free(self, block: memoryview, *, wipe: bool = False) -> None:
        """Give a block back; the same memoryview object that ``allocate`` returned. ``wipe``: zero it first."""
        if wipe:
            np.frombuffer(block, np.uint8).fill(0)
        with self._changed:
            start, owner = self._taken.pop(id(block), (-1, None))
            if start < 0:
                raise InternalError("a block that is not of this arena was freed")
            nbytes = self._blocks.pop(start)
            self._gaps = _merge(sorted([*self._gaps, (start, nbytes)]))
            self._held[owner] -= nbytes
            if not self._held[owner]:
                del self._held[owner]
            self._serve()
            self._changed.notify_all()

    def check_integrity(self) -> None:
        """Prove that gaps and blocks tile the arena; raises InternalError."""
        with self._changed:
            parts = sorted([*self._gaps, *self._blocks.items()])
            at = 0
            for start, size in parts:
                if start != at or size <= 0:
                    raise InternalError(f"the arena is not tiled at byte {start}")
                at += size
            if at != self.capacity_bytes:
                raise InternalError(f"the arena lost {self.capacity_bytes - at} B")
            if sum(self._held.values()) != sum(self._blocks.values()):
                raise InternalError("the arena's owners do not hold its blocks")


def _merge(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, size in gaps:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged
