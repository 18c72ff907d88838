"""Runs: a case's bytes as lists of contiguous stretches, worked out apart from the packer.

In comes a case; out come, chunk by chunk, byte offsets at both ends and lengths: what a loop of memcpy would copy, and
what a transfer engine without packing would post one descriptor each for. The plan says what goes where; how that lies
in memory is worked out here again, slowly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pdxfer.bench.case import Case, End
from pdxfer.errors import InternalError
from pdxfer.kernels import Offsets
from pdxfer.layout import Holding
from pdxfer.packing import Chunk, EdgeProgram, Segment
from pdxfer.pages import Side
from pdxfer.plan import CopyItem, Edge, make_plan

__all__ = ["Move", "Part", "moves"]


@dataclass(frozen=True, slots=True)
class Part:
    """Runs between two regions; ``packed`` says where they lie in a chunk's message, one after the other."""

    source_region: int
    target_region: int
    at: Offsets
    to: Offsets
    lengths: Offsets
    packed: Offsets


@dataclass(frozen=True, slots=True)
class Move:
    """One request's bytes on one edge, by chunk."""

    edge: Edge
    chunks: tuple[tuple[Part, ...], ...]
    nbytes: tuple[int, ...]

    @property
    def parts(self) -> list[Part]:
        """Those of all chunks."""
        return [part for chunk in self.chunks for part in chunk]

    @property
    def runs(self) -> int:
        """How many there are."""
        return sum(len(part.lengths) for part in self.parts)


def moves(case: Case, *, chunk_bytes: int, fan_out: bool = True) -> list[Move]:
    """All that has to be moved, network edges first; relays read what those have brought."""
    plan = make_plan(case.layout("prefill"), case.layout("decode"), fan_out=fan_out)
    edges = sorted(plan.edges, key=lambda edge: (edge.relay, edge.source, edge.target))
    programs = [EdgeProgram(plan, edge, case.shape, chunk_bytes=chunk_bytes) for edge in edges]
    return [_move(case, program, request) for program in programs for request in range(case.concurrency)]


def _move(case: Case, program: EdgeProgram, request: int) -> Move:
    giving: End = "decode" if program.edge.relay else "prefill"
    source = Side(program.source_rank, [b""] * len(program.source_rank.regions), case.tables(giving, request))
    target = Side(program.target_rank, [b""] * len(program.target_rank.regions), case.tables("decode", request))
    chunks = tuple(tuple(_parts(program, chunk, source, target)) for chunk in program.chunks)
    for parts, chunk in zip(chunks, program.chunks, strict=True):
        if sum(int(part.lengths.sum()) for part in parts) != chunk.nbytes:
            raise InternalError(f"the runs of chunk {chunk.number} of {program.edge} are not its {chunk.nbytes} B")
    return Move(program.edge, chunks, tuple(chunk.nbytes for chunk in program.chunks))


def _parts(program: EdgeProgram, chunk: Chunk, source: Side, target: Side) -> Iterator[Part]:
    filled = 0
    for segment in chunk.segments:
        item = program.items[segment.item]
        have, want = program.source_rank.holdings[item.source_holding], target.rank.holdings[item.target_holding]
        to, at, lengths = _runs(program, segment, item, (source, have), (target, want))
        for layer in item.layers[segment.layer_start : segment.layer_stop]:
            (from_region, from_base), (to_region, to_base) = have.at(layer), want.at(layer)
            stops = np.cumsum(lengths) + filled
            yield Part(from_region, to_region, at + from_base, to + to_base, lengths, stops - lengths)
            filled = int(stops[-1])


def _runs(
    program: EdgeProgram, segment: Segment, item: CopyItem, source: tuple[Side, Holding], target: tuple[Side, Holding]
) -> tuple[Offsets, Offsets, Offsets]:
    """Of one layer: offsets from the layer's first byte at the target and at the source, and lengths."""
    rows = program.rows[segment.item][segment.row_start : segment.row_stop]
    ends = [(side.row_offsets(h, rows), h) for side, h in (target, source)]
    to, at = (offsets + _box_start(item, h) for offsets, h in ends)
    run, axes = target[1].itemsize, list(range(len(item.box.shape)))
    while axes and (item.box.shape[axes[-1]] == 1 or all(h.strides[axes[-1]] == run for _, h in ends)):
        run *= item.box.shape[axes.pop()]
    for axis in axes:
        steps = np.arange(item.box.shape[axis], dtype=np.int64)
        to, at = (
            (o[..., None] + steps * h.strides[axis]).reshape(len(rows), -1)
            for o, (_, h) in zip((to, at), ends, strict=True)
        )
    pages = np.repeat(rows // target[1].page_rows, to.size // max(1, len(rows)))
    to, at = to.reshape(-1), at.reshape(-1)
    if axes:  # rows may lie nearer to each other than what is inside of a row: page by page in the target's order
        order = np.lexsort((to, pages))
        to, at = to[order], at[order]
    return _merged(to, at, run)


def _merged(to: Offsets, at: Offsets, run: int) -> tuple[Offsets, Offsets, Offsets]:
    """Runs that touch at both ends become one."""
    follows = (to[1:] == to[:-1] + run) & (at[1:] == at[:-1] + run)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return to[starts], at[starts], np.diff(np.append(starts, len(to))) * run


def _box_start(item: CopyItem, h: Holding) -> int:
    return sum((a - b) * s for a, b, s in zip(item.box.starts, h.box.starts, h.strides, strict=True))
