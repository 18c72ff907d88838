"""Arena: one bounded region cut into blocks for packed chunks.

In come sizes; out come blocks, or ExhaustedError in time. It knows neither chunks nor channels.

::

    region  |block A....|free......|block B|free..................|
             first fit, neighbours merge when freed, blocks start on 4 KiB
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pdxfer.errors import ExhaustedError, InternalError

__all__ = ["Arena"]

_STEP = 4096
_POLL_S = 0.01


class Arena:
    """First-fit blocks of a buffer. Thread-safe."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._gaps: list[tuple[int, int]] = [(0, len(memory) // _STEP * _STEP)]
        self._blocks: dict[int, int] = {}
        self._address: dict[int, int] = {}
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

    def allocate(self, nbytes: int, *, timeout_s: float, reap: Callable[[], None]) -> memoryview:
        """Return a block of at least ``nbytes``, waiting for room.

        Args:
            reap: called while waiting, without the lock, to free what the caller itself no longer needs.

        Raises:
            ExhaustedError: no room in time, or ever.
        """
        need = -(-nbytes // _STEP) * _STEP
        if need > self.capacity_bytes:
            raise ExhaustedError(
                f"a chunk of {nbytes} B does not fit into the arena of {self.capacity_bytes} B",
                hint="raise arena_bytes, or lower chunk_bytes",
            )
        began_s = time.monotonic()
        until_s = began_s + timeout_s
        while True:
            with self._changed:
                block = self._take(need)
                if block is not None:
                    return block
                self.waits += 1
            reap()
            with self._changed:
                block = self._take(need)
                if block is not None:
                    self.waited_s += time.monotonic() - began_s
                    return block
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    self.waited_s += time.monotonic() - began_s
                    self.refusals += 1
                    raise ExhaustedError(
                        f"the arena of {self.capacity_bytes} B had no room for {nbytes} B within {timeout_s:g} s",
                        hint="a reader is slow, or arena_bytes is too small for the load",
                    )
                self._changed.wait(min(left_s, _POLL_S))

    def _take(self, need: int) -> memoryview | None:
        for i, (start, size) in enumerate(self._gaps):
            if size >= need:
                self._gaps[i : i + 1] = [(start + need, size - need)] if size > need else []
                self._blocks[start] = need
                block = self._memory[start : start + need]
                self._address[id(block)] = start
                self.peak_bytes = max(self.peak_bytes, sum(self._blocks.values()))
                return block
        return None

    def free(self, block: memoryview) -> None:
        """Give a block back; the same memoryview object that ``allocate`` returned."""
        with self._changed:
            start = self._address.pop(id(block), None)
            if start is None:
                raise InternalError("a block that is not of this arena was freed")
            gap = (start, self._blocks.pop(start))
            self._gaps = _merge(sorted([*self._gaps, gap]))
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


def _merge(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, size in gaps:
        if merged and merged[-1][0] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((start, size))
    return merged
