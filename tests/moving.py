"""Run a plan between two workers' memories in one process, edge by edge, as the driver would."""

from __future__ import annotations

import numpy as np
import xxhash

from pdxfer.layout import RankLayout
from pdxfer.packing import EdgeProgram, direct, pack, read_back, unpack
from pdxfer.pages import RequestShape, Side
from pdxfer.plan import Plan
from pdxfer.testing.oracle import Memory

__all__ = ["move"]


def move(
    plan: Plan,
    source: Memory,
    target: Memory,
    shape: RequestShape,
    *,
    kernel: str = "auto",
    mode: str = "packed",
    chunk_bytes: int = 1 << 20,
    segment_bytes: int = 1 << 20,
    read_back_too: bool = True,
    digests: bool = False,
) -> int:
    """Move one request: network edges first, then relays among the target's ranks. Returns bytes moved.

    The plan may be one made of wrong layouts: only ranks' numbers tie it to the memories.
    """
    moved = 0
    sides: dict[tuple[bool, int], Side] = {}

    def side(memory: Memory, rank: RankLayout) -> Side:
        key = (memory is target, rank.rank)
        if key not in sides:
            sides[key] = Side(rank, memory.buffers[rank.rank], memory.tables[rank.rank])
            sides[key].check(plan.target.spec, shape, exclusive=memory is target)
        return sides[key]

    for edge in plan.edges:  # sorted: relays last
        program = EdgeProgram(plan, edge, shape, chunk_bytes=chunk_bytes, segment_bytes=segment_bytes)
        have = side(target if edge.relay else source, program.source_rank)
        want = side(target, program.target_rank)
        for chunk in program.chunks:
            staging = np.full(chunk.nbytes, 0xA5, dtype=np.uint8)
            for segment in chunk.segments:
                part = staging[segment.offset : segment.offset + segment.nbytes]
                converts = program.items[segment.item].converts
                seed = chunk.number if digests else None
                if mode == "packed" or converts:
                    pack(program, segment, have, part, kernel=kernel)
                    found = unpack(program, segment, want, part, kernel=kernel, seed=seed)
                else:
                    found = direct(program, segment, have, want, kernel=kernel, seed=seed)
                    if digests or read_back_too:
                        pack(program, segment, have, part, kernel=kernel)
                if digests and not converts:
                    assert found == xxhash.xxh3_128_digest(part.data, chunk.number)
                if read_back_too and not converts:
                    again = np.empty_like(part)
                    read_back(program, segment, want, again, kernel=kernel)
                    assert np.array_equal(part, again), f"{edge}: item {segment.item} reads back otherwise"
            moved += chunk.nbytes
    return moved
