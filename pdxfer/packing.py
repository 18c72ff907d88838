"""Packing: apply a plan to one request's page tables and move its bytes.

In come a plan's edge, how many tokens the request has, and each side's buffers with page tables; out come
bytes in staging, or bytes in pages, with their digest where one is asked for (a seed is given): it is taken while the
bytes are in cache. This file knows no peer and no wire.

The bytes of an edge form one stream, the same on both ends, computed from the plan and token counts alone::

    item 0 (S)            item 1 (conv.q)       item 2 (kv.k)
    |layer 0|layer 1|...  |layer 0|layer 1|...  |layer 3: row first, row first+1, ...|layer 7: ...
    |<- segment ->|<- segment ->|  ...          |<-- segment -->|<-- segment -->|
    |<------------------ chunk 0 ----------------------->|<---------- chunk 1 ------ ...

A *segment* is a run of whole layers, or of rows of one layer, of one item; it has its own digest. A *chunk*
is what one message carries. Inside a segment, bytes are ordered layer, row, then the box in the component's
canonical axis order.

Rows become *pieces* before anything is copied: rows that lie one after the other in one page of either side, merged
where the next page follows. Pieces do not depend on the layer, so a request's page tables are applied once::

    source pages   |0 1 2 3|4 5 6 7|8 9 ...          rows 1..9, 4 rows a page here, 3 there
    target pages   |0 1 2|3 4 5|6 7 8|9 ...
    pieces           |1 2|3|4 5|6 7|8|9
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

from pdxfer.errors import MisuseError
from pdxfer.kernels import (
    KERNELS,
    BoundCopy,
    Bytes,
    End,
    Offsets,
    Part,
    RowCopy,
    RunReader,
    as_buffer,
    as_host,
    longest_run,
    native_available,
)
from pdxfer.layout import Holding, RankLayout
from pdxfer.pages import RequestShape, Side
from pdxfer.plan import CopyItem, Edge, Plan
from pdxfer.spec import DTYPE_BYTES

__all__ = [
    "KERNELS",
    "Chunk",
    "EdgeProgram",
    "RunReader",
    "Segment",
    "convert",
    "digest",
    "direct",
    "native_available",
    "numpy_dtype",
    "pack",
    "prepare",
    "read_back",
    "unpack",
]

#: Part of the protocol: both ends must cut alike. As long as chunks let it be: kernels and digests work in pieces of a
#: few KiB anyhow, and every return to Python costs some 50 us when a copy has swept the caches.
_SEGMENT_BYTES = 32 << 20
_ZERO, _ONE = np.zeros(1, np.int64), np.ones(1, np.int64)
_KNOWN_MAX = 4096


class Segment(NamedTuple):
    """Whole layers [layer_start, layer_stop) or rows [row_start, row_stop) of one layer of one item.

    Layers index ``item.layers``; rows index the item's own row list; ``offset`` is in bytes in the chunk.
    """

    item: int
    layer_start: int
    layer_stop: int
    row_start: int
    row_stop: int
    offset: int
    nbytes: int


class Chunk(NamedTuple):
    """One message's worth of segments."""

    number: int
    nbytes: int
    segments: tuple[Segment, ...]


class EdgeProgram:
    """An edge of a plan applied to one request: its rows, segments and chunks. Equal on both ends."""

    def __init__(
        self, plan: Plan, edge: Edge, shape: RequestShape, *, chunk_bytes: int, segment_bytes: int = _SEGMENT_BYTES
    ) -> None:
        self.plan, self.edge, self.shape = plan, edge, shape
        self.items: tuple[CopyItem, ...] = plan.edges.get(edge, ())
        giving = plan.target if edge.relay else plan.source
        self.source_rank: RankLayout = giving.ranks[edge.source]
        self.target_rank: RankLayout = plan.target.ranks[edge.target]
        self.chunk_bytes, self.segment_bytes = chunk_bytes, min(segment_bytes, chunk_bytes)
        self._pieces: dict[object, tuple[_Pieces, object]]  # the object keeps the sides, so their ids stay theirs
        self._copiers: dict[object, tuple[RowCopy, object]]
        self._bound: dict[object, tuple[BoundCopy, object]]
        self._cuts: dict[object, tuple[Offsets, Offsets, Offsets]]
        self._firsts: dict[object, tuple[Offsets, object]]
        self.forget()
        self.rows: tuple[Offsets, ...] = tuple(self._all_rows())
        row_bytes = plan.row_bytes.get(edge, ())
        sizes = tuple(
            (len(item.layers), len(rows), nbytes)
            for item, rows, nbytes in zip(self.items, self.rows, row_bytes, strict=True)
        )
        self.chunks: tuple[Chunk, ...] = _cut(sizes, self.chunk_bytes, self.segment_bytes)
        self.payload_bytes: int = sum(chunk.nbytes for chunk in self.chunks)

    @property
    def touched(self) -> tuple[tuple[str, ...], frozenset[int]]:
        """The source's page tables, by name, and its regions that the edge's items lie in."""
        return self.plan.touched.get(self.edge, ((), frozenset()))

    def source_dtype(self, item: CopyItem) -> str:
        """The dtype in which an item travels."""
        return self.source_rank.holdings[item.source_holding].dtype

    def row_bytes(self, item: CopyItem) -> int:
        """Bytes of one row of one layer of an item, as it travels."""
        return item.box.volume * DTYPE_BYTES[self.source_dtype(item)]

    def bytes_by_component(self) -> dict[str, int]:
        """Bytes that travel on this edge, by component."""
        total: dict[str, int] = {}
        row_bytes = self.plan.row_bytes.get(self.edge, ())
        for item, rows, nbytes in zip(self.items, self.rows, row_bytes, strict=True):
            total[item.component] = total.get(item.component, 0) + len(item.layers) * len(rows) * nbytes
        return total

    def run_bytes(self) -> int:
        """Bytes that lie together on both sides, on average over all runs."""
        runs = 0
        for item, rows in zip(self.items, self.rows, strict=True):
            have = self.source_rank.holdings[item.source_holding]
            want = self.target_rank.holdings[item.target_holding]
            together = math.gcd(have.page_rows, want.page_rows) if have.tokens.size == want.tokens.size == 1 else 1
            shape = min(together, max(1, len(rows))), *item.box.shape
            strides = (want.row_stride, *want.strides), (have.row_stride, *have.strides)
            run = longest_run(shape, *strides, have.itemsize)
            runs += -(-len(item.layers) * len(rows) * self.row_bytes(item) // run)
        return self.payload_bytes // max(1, runs)

    def address(self, source: Side | None, target: Side | None) -> None:
        """Apply the page tables of one side or both to all rows, ahead of the first copy (which else does it).

        Raises:
            MisuseError: a page table is missing, too short, or points outside its region; names table and entry.
        """
        for index, rows in enumerate(self.rows):
            if len(rows):
                self._item_pieces(index, source, target, of_target=False)

    def expect(self, target: Side) -> None:
        """Do the part of ``address`` that needs the target's page tables alone, while the source's are on their way.

        Raises:
            MisuseError: as ``address``.
        """
        for item, rows in zip(self.items, self.rows, strict=True):
            if len(rows):
                have = self.source_rank.holdings[item.source_holding]
                want = target.rank.holdings[item.target_holding]
                self._offsets(rows, _even_rows(rows, (have, want)), target, want)

    def forget(self) -> None:
        """Drop what was worked out from page tables; it is worked out again where it is needed."""
        self._pieces, self._copiers, self._bound, self._cuts, self._firsts = {}, {}, {}, {}, {}

    def copier(self, segment: Segment, source: Side | None, target: Side | None, *, of_target: bool = False) -> RowCopy:
        """The copy of a segment's rows, the same for each of its layers; a side of None is packed bytes.

        Args:
            of_target: ``source`` is the edge's target, which is read back.
        """
        index, start, stop = segment.item, segment.row_start, segment.row_stop
        key = (index, start, stop, id(source), id(target), of_target)
        known = self._copiers.get(key)
        if known is None:
            ends = self._ends(index, source, target, of_target=of_target)
            pieces = self._item_pieces(index, source, target, of_target=of_target)
            pieces = pieces.cut(start, stop, [h.row_stride for _, h in ends])
            holding, shape = ends[-1][1], self.items[index].box.shape
            found = [End(o, h.row_stride, h.strides) for o, (_, h) in zip(pieces.sides, ends, strict=True)]
            if len(found) == 1:
                row_bytes, strides = _packed_strides(shape, holding.itemsize)
                packed = End((pieces.starts - start) * row_bytes, row_bytes, strides)
                found.insert(source is not None, packed)
            at, to = found
            copier = RowCopy(shape, holding.itemsize, to, at, pieces.counts)
            known = self._copiers[key] = copier, (source, target)
        return known[0]

    def bound(self, segment: Segment, source: Side, target: Side) -> BoundCopy:
        """The direct copy of a segment, ready to run; raises MisuseError for an item that converts."""
        key = (segment, id(source), id(target))
        known = self._bound.get(key)
        if known is None:
            item = self.items[segment.item]
            if item.converts:
                raise MisuseError(f"{item.component}: a dtype conversion can't be done by a direct copy")
            have, want = source.rank.holdings[item.source_holding], target.rank.holdings[item.target_holding]
            pairs = zip(_places(self, segment, target, want), _places(self, segment, source, have), strict=True)
            bound = self.copier(segment, source, target).bind([Part(*to, *at) for to, at in pairs])
            known = self._bound[key] = bound, (source, target)
        return known[0]

    def _ends(
        self, index: int, source: Side | None, target: Side | None, *, of_target: bool
    ) -> list[tuple[Side, Holding]]:
        """The sides that have pages, each with the holding that an item uses there."""
        item = self.items[index]
        first = item.target_holding if of_target else item.source_holding
        ends = ((source, first), (target, item.target_holding))
        return [(side, side.rank.holdings[holding]) for side, holding in ends if side is not None]

    def _item_pieces(self, index: int, source: Side | None, target: Side | None, *, of_target: bool) -> _Pieces:
        item, rows = self.items[index], self.rows[index]
        first = item.target_holding if of_target else item.source_holding
        at = None if source is None else source.rank.addressing[first]
        to = None if target is None else target.rank.addressing[item.target_holding]
        key = (id(rows), id(source), at, id(target), to)
        known = self._pieces.get(key)
        if known is None:
            ends = self._ends(index, source, target, of_target=of_target)
            known = self._pieces[key] = self._find_pieces(rows, ends), (source, target)
        return known[0]

    def _find_pieces(self, rows: Offsets, ends: Sequence[tuple[Side, Holding]]) -> _Pieces:
        """Cut rows where a page ends on a side, and merge again where the next page follows on all sides."""
        if len(rows) == 1:
            return _Pieces(_ZERO, _ONE, tuple(self._offsets(rows, 1, *end) for end in ends))
        step = _even_rows(rows, [h for _, h in ends])
        starts, counts, _ = self._cut(rows, step)
        return _merged(starts, counts, [self._offsets(rows, step, *end) for end in ends], ends, len(rows))

    def _cut(self, rows: Offsets, step: int) -> tuple[Offsets, Offsets, Offsets]:
        """Stretches between multiples of ``step``: index of the first row, how many, and the first row's number."""
        key = (id(rows), step)
        known = self._cuts.get(key)
        if known is None:
            starts = _piece_starts(rows, step)
            known = self._cuts[key] = starts, _gaps(starts, len(rows)), rows[starts]
        return known

    def _offsets(self, rows: Offsets, step: int, side: Side, holding: Holding) -> Offsets:
        """Of the first row of each stretch, on one side; equal for holdings that differ in layer or box alone."""
        h = holding
        key = (id(rows), step, id(side), h.table, h.page_rows, h.page_stride, h.row_stride, h.pages, h.tokens)
        known = self._firsts.get(key)
        if known is None:
            firsts = rows if len(rows) == 1 else self._cut(rows, step)[2]
            found = side.row_offsets(h, firsts, page_by_page=1 < step == h.page_rows)
            known = self._firsts[key] = found, side
        return known[0]

    def _all_rows(self) -> Iterator[Offsets]:
        """For each item the rows of the request that its stripe covers and both sides own; equal ones are shared."""
        known: dict[object, Offsets] = {}
        spans: dict[str, tuple[int, int]] = {}
        for item in self.items:
            if item.component not in spans:
                spans[item.component] = self.shape.rows(self.plan.target.spec[item.component])
            start, stop = spans[item.component]
            n, owners = stop - start, [o for o in (item.source_tokens, item.target_tokens) if o.size > 1]
            first, last = start + n * item.stripe // item.stripes, start + n * (item.stripe + 1) // item.stripes
            key = (first, last, *owners)
            if key not in known:
                rows = np.arange(first, last, dtype=np.int64)
                for own in owners:
                    rows = rows[(rows // own.interleave) % own.size == own.index]
                known[key] = rows
            yield known[key]


@lru_cache(maxsize=256)
def _cut(sizes: tuple[tuple[int, int, int], ...], chunk_bytes: int, segment_bytes: int) -> tuple[Chunk, ...]:
    """Fill chunks greedily: a chunk ends where the next row would not fit (a giant row gets its own).

    Args:
        sizes: layers, rows and bytes of a row, for each item. Edges of one request often have the same.
    """
    chunks: list[Chunk] = []
    segments: list[Segment] = []
    fill = 0
    for index, (stop, n, row_bytes) in enumerate(sizes):
        layer = row = 0
        layer_bytes = n * row_bytes
        while n and layer < stop:
            if segments and fill + row_bytes > chunk_bytes:
                chunks.append(Chunk(len(chunks), fill, tuple(segments)))
                segments, fill = [], 0
            room = min(segment_bytes, chunk_bytes - fill)
            room = max(row_bytes, room)
            if row == 0 and layer_bytes <= room:
                layers = min(room // layer_bytes, stop - layer)
                segments.append(Segment(index, layer, layer + layers, 0, n, fill, layers * layer_bytes))
                fill, layer = fill + layers * layer_bytes, layer + layers
                continue
            taken = min(n - row, room // row_bytes)
            segments.append(Segment(index, layer, layer + 1, row, row + taken, fill, taken * row_bytes))
            fill, row = fill + taken * row_bytes, row + taken
            if row == n:
                layer, row = layer + 1, 0
    if segments:
        chunks.append(Chunk(len(chunks), fill, tuple(segments)))
    return tuple(chunks)


def pack(
    program: EdgeProgram, segment: Segment, source: Side, out: Any, *, kernel: str = "auto", seed: int | None = None
) -> bytes | None:
    """Gather a segment from the source's pages into ``out`` (exactly ``segment.nbytes`` bytes).

    Args:
        seed: of the digest of what then lies in ``out``, or None for no digest.
    """
    found = _gather(program, segment, source, out, kernel, seed, of_target=False)
    return found if seed is None or found else xxhash.xxh3_128_digest(as_host(out).data, seed)


def read_back(program: EdgeProgram, segment: Segment, target: Side, out: Any, *, kernel: str = "auto") -> None:
    """Gather a segment from the target's pages, in the target's dtype, as ``pack`` does from the source's."""
    _gather(program, segment, target, out, kernel, None, of_target=True)


def unpack(
    program: EdgeProgram, segment: Segment, target: Side, data: Any, *, kernel: str = "auto", seed: int | None = None
) -> bytes | None:
    """Scatter a packed segment into the target's pages, converting the dtype where the item says so.

    Args:
        seed: of the digest of what then lies in the target's pages, or None for no digest.
    """
    item = program.items[segment.item]
    want = target.rank.holdings[item.target_holding]
    data = convert(data, program.source_dtype(item), want.dtype) if item.converts else as_buffer(data)
    copier = program.copier(segment, None, target)
    step = (segment.row_stop - segment.row_start) * _packed_strides(item.box.shape, want.itemsize)[0]
    places = _places(program, segment, target, want)
    bound = copier.bind([Part(*place, data, i * step) for i, place in enumerate(places)])
    return _run(bound, kernel, seed) or (
        None if seed is None else digest(program, segment, target, seed, of_target=True, kernel=kernel)
    )


def direct(
    program: EdgeProgram, segment: Segment, source: Side, target: Side, *, kernel: str = "auto", seed: int | None = None
) -> bytes | None:
    """Copy a segment from the source's pages straight into the target's; not for converting items.

    Args:
        seed: of the digest of what then lies in the target's pages, or None for no digest.
    """
    return _run(program.bound(segment, source, target), kernel, seed) or (
        None if seed is None else digest(program, segment, target, seed, of_target=True, kernel=kernel)
    )


def prepare(program: EdgeProgram, chunks: Iterable[Chunk], source: Side, target: Side, *, digests: bool) -> None:
    """Do the thinking of the ``direct`` copies of chunks, with or without digests, before the first byte moves.

    Raises:
        MisuseError: a page table is wrong, or an item converts its dtype.
    """
    for chunk in chunks:
        for segment in chunk.segments:
            program.bound(segment, source, target).native_parts(digests=digests)


def digest(
    program: EdgeProgram, segment: Segment, side: Side, seed: int, *, of_target: bool, kernel: str = "auto"
) -> bytes:
    """XXH3-128 of a segment where it lies, as of its packed bytes; ``side`` is the edge's source or target."""
    item = program.items[segment.item]
    holding = side.rank.holdings[item.target_holding if of_target else item.source_holding]
    copier = program.copier(segment, side, None, of_target=of_target)
    parts = [Part(None, 0, *place) for place in _places(program, segment, side, holding)]
    return copier.digest_source(kernel, parts, seed)


def _run(bound: BoundCopy, kernel: str, seed: int | None) -> bytes | None:
    """Copy; returns the digest where it came with the copy."""
    found = None if seed is None else bound.copy_and_digest(kernel, seed)
    if found is None:
        bound.copy(kernel)
    return found


def _gather(
    program: EdgeProgram, segment: Segment, side: Side, out: Any, kernel: str, seed: int | None, *, of_target: bool
) -> bytes | None:
    item = program.items[segment.item]
    holding = side.rank.holdings[item.target_holding if of_target else item.source_holding]
    copier = program.copier(segment, side, None, of_target=of_target)
    out, places = as_buffer(out), _places(program, segment, side, holding)
    bound = copier.bind([Part(out, i * copier.nbytes, *place) for i, place in enumerate(places)])
    return _run(bound, kernel, seed)


def _places(program: EdgeProgram, segment: Segment, side: Side, holding: Holding) -> list[tuple[Any, int]]:
    """For each layer of a segment: the buffer, and the byte in it that row offsets count from."""
    item, known = program.items[segment.item], side.buffers.known
    key = (id(item), id(holding), segment.layer_start, segment.layer_stop)
    found = known.get(key)
    if found is None:
        box = _box_offset(item, holding)
        places = [holding.at(layer) for layer in item.layers[segment.layer_start : segment.layer_stop]]
        if len(known) >= _KNOWN_MAX:
            known.clear()
        # With item and holding in it, their ids stay theirs.
        found = known[key] = [(side.buffers[region], offset + box) for region, offset in places], item, holding
    placed: list[tuple[Any, int]] = found[0]
    return placed


def convert(data: Any, have: str, want: str) -> Bytes:
    """Convert packed elements between dtypes, rounding to nearest even; returns bytes."""
    return as_host(data).view(numpy_dtype(have)).astype(numpy_dtype(want)).view(np.uint8)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy dtype by our name (bfloat16 and float8 through ml_dtypes)."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def _box_offset(item: CopyItem, holding: Holding) -> int:
    """Bytes from the holding's first element to the item's."""
    return sum((a - b) * s for a, b, s in zip(item.box.starts, holding.box.starts, holding.strides, strict=True))


@lru_cache(maxsize=512)
def _packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...]]:
    strides = tuple(math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape)))
    return math.prod(shape) * itemsize, strides


class _Pieces(NamedTuple):
    """An item's rows in pieces: index of each piece's first row, how many rows, and their offsets on the sides."""

    starts: Offsets
    counts: Offsets
    sides: tuple[Offsets, ...]

    def cut(self, start: int, stop: int, row_strides: Sequence[int]) -> _Pieces:
        """The pieces of rows [start, stop)."""
        if start == 0 and stop == int(self.starts[-1] + self.counts[-1]):
            return self
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop))
        starts = np.maximum(self.starts[first:last], start)
        ahead = starts - self.starts[first:last]
        sides = tuple(o[first:last] + ahead * stride for o, stride in zip(self.sides, row_strides, strict=True))
        return _Pieces(starts, _gaps(starts, stop), sides)


def _merged(
    starts: Offsets, counts: Offsets, sides: list[Offsets], ends: Sequence[tuple[Side, Holding]], rows: int
) -> _Pieces:
    """Stretches as pieces: merged where on all sides the next one follows."""
    follows = None
    for offsets, (_, holding) in zip(sides, ends, strict=True):
        touching = offsets[1:] == (offsets + counts * holding.row_stride)[:-1]
        follows = touching if follows is None else follows & touching
    if follows is not None and np.logical_or.reduce(follows):
        keep = np.concatenate(([0], np.flatnonzero(~follows) + 1))
        starts, sides = starts[keep], [offsets[keep] for offsets in sides]
        counts = _gaps(starts, rows)
    return _Pieces(starts, counts, tuple(sides))


def _gaps(starts: Offsets, stop: int) -> Offsets:
    """From each start to the next, and from the last to ``stop``."""
    gaps = np.empty_like(starts)
    np.subtract(starts[1:], starts[:-1], out=gaps[:-1])
    gaps[-1] = stop - starts[-1]
    return gaps


def _even_rows(rows: Offsets, holdings: Sequence[Holding]) -> int:
    """Rows that every page holds whole numbers of, or 1 where rows are not simply one after the other."""
    alone = all(h.tokens.size == 1 for h in holdings) and int(rows[-1]) - int(rows[0]) == len(rows) - 1
    return math.gcd(*[h.page_rows for h in holdings]) if alone else 1


def _piece_starts(rows: Offsets, step: int) -> Offsets:
    """Index of the first row of each stretch between multiples of ``step``."""
    head = -int(rows[0]) % step
    starts = np.arange(head - step if head else 0, len(rows), step, dtype=np.int64)
    starts[0] = 0
    return starts
