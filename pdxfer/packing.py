"""Packing: apply a plan to one request's page tables and move its bytes.

In come a plan's edge, how many tokens the request has, and each side's buffers with page tables; out come
bytes in staging, or bytes in pages. This file knows no peer, no wire and no digest.

The bytes of an edge form one stream, the same on both ends, computed from the plan and token counts alone::

    item 0 (S)            item 1 (conv.q)       item 2 (kv.k)
    |layer 0|layer 1|...  |layer 0|layer 1|...  |layer 3: row first, row first+1, ...|layer 7: ...
    |<- segment ->|<- segment ->|  ...          |<-- segment -->|<-- segment -->|
    |<------------------ chunk 0 ----------------------->|<---------- chunk 1 ------ ...

A *segment* is a run of whole layers, or of rows of one layer, of one item; it has its own digest. A *chunk*
is what one message carries. Inside a segment, bytes are ordered layer, row, then the box in the component's
canonical axis order.

Each copy is one primitive, with three interchangeable kernels (native C, NumPy, torch)::

    for i: for r < rows[i]: for index in shape:
        target[target_offsets[i] + r*target_row_stride + index . target_strides][:run_bytes] =
        source[source_offsets[i] + r*source_row_stride + index . source_strides][:run_bytes]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pdxfer.errors import MisuseError
from pdxfer.layout import Holding, RankLayout, TokenOwnership
from pdxfer.plan import CopyItem, Edge, Plan
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component, Growth

try:
    from pdxfer import _native
except ImportError:  # built without a compiler: slower, not wrong
    _native = None  # type: ignore[assignment]

__all__ = ["KERNELS", "Chunk", "EdgeProgram", "RequestShape", "RunReader", "Segment", "Side", "native_available"]

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


class RunReader(Protocol):
    """Source memory that isn't mapped here but can be read run by run (process_vm_readv)."""

    def read_runs(self, target: memoryview, target_offsets: Any, source_offsets: Any, lengths: Any) -> int:
        """Copy runs into ``target``; returns bytes copied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestShape:
    """What of one request is moved.

    Attributes:
        kv_tokens: tokens whose per-token rows are valid at the source.
        first_token: rows before this token are already at the target (prefix hit).
        state_tokens: the token count at which S and conv stand; it says which state, not how much.
    """

    kv_tokens: int
    first_token: int = 0
    state_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.first_token <= self.kv_tokens or self.state_tokens < 0:
            raise MisuseError(f"impossible request: first_token {self.first_token}, kv_tokens {self.kv_tokens}")

    def rows(self, component: Component) -> tuple[int, int]:
        """Half-open range of rows of ``component`` to move."""
        first, stop = component.rows(self.kv_tokens)
        if component.growth is not Growth.PER_REQUEST:
            first = min(max(first, self.first_token // component.tokens_per_row), stop)
        return first, stop


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
        self, plan: Plan, edge: Edge, shape: RequestShape, *, chunk_bytes: int, segment_bytes: int = 1 << 20
    ) -> None:
        self.plan, self.edge, self.shape = plan, edge, shape
        self.items: tuple[CopyItem, ...] = plan.edges.get(edge, ())
        giving = plan.target if edge.relay else plan.source
        self.source_rank: RankLayout = giving.ranks[edge.source]
        self.target_rank: RankLayout = plan.target.ranks[edge.target]
        self.chunk_bytes, self.segment_bytes = chunk_bytes, min(segment_bytes, chunk_bytes)
        self._rows: dict[object, Offsets] = {}
        self.rows: tuple[Offsets, ...] = tuple(self._item_rows(item) for item in self.items)
        self.chunks: tuple[Chunk, ...] = tuple(self._cut())
        self.payload_bytes: int = sum(chunk.nbytes for chunk in self.chunks)

    def source_dtype(self, item: CopyItem) -> str:
        """The dtype in which an item travels."""
        return self.source_rank.holdings[item.source_holding].dtype

    def row_bytes(self, item: CopyItem) -> int:
        """Bytes of one row of one layer of an item, as it travels."""
        return item.box.volume * DTYPE_BYTES[self.source_dtype(item)]

    def bytes_by_component(self) -> dict[str, int]:
        """Bytes that travel on this edge, by component."""
        total: dict[str, int] = {}
        for item, rows in zip(self.items, self.rows, strict=True):
            total[item.component] = total.get(item.component, 0) + len(item.layers) * len(rows) * self.row_bytes(item)
        return total

    def _item_rows(self, item: CopyItem) -> Offsets:
        """Rows of the request that the stripe covers and both sides own."""
        start, stop = self.shape.rows(self.plan.target.spec[item.component])
        key = (start, stop, item.stripe, item.stripes, item.source_tokens, item.target_tokens)
        if key not in self._rows:
            n = stop - start
            rows = np.arange(
                start + n * item.stripe // item.stripes, start + n * (item.stripe + 1) // item.stripes, dtype=np.int64
            )
            for own in (item.source_tokens, item.target_tokens):
                if own.size > 1:
                    rows = rows[(rows // own.interleave) % own.size == own.index]
            self._rows[key] = rows
        return self._rows[key]

    def _cut(self) -> list[Chunk]:
        """Fill chunks greedily: a chunk ends where the next row would not fit (a giant row gets its own)."""
        chunks: list[Chunk] = []
        segments: list[Segment] = []
        fill = 0
        for index, (item, rows) in enumerate(zip(self.items, self.rows, strict=True)):
            row_bytes, n, layer, row = self.row_bytes(item), len(rows), 0, 0
            while n and layer < len(item.layers):
                if segments and fill + row_bytes > self.chunk_bytes:
                    chunks.append(Chunk(len(chunks), fill, tuple(segments)))
                    segments, fill = [], 0
                room = max(row_bytes, min(self.chunk_bytes - fill, self.segment_bytes))
                whole = min(room // (n * row_bytes), len(item.layers) - layer) if row == 0 else 0
                layers, taken = (whole, n) if whole else (1, min(n - row, room // row_bytes))
                nbytes = layers * taken * row_bytes
                segments.append(Segment(index, layer, layer + layers, row, row + taken, fill, nbytes))
                fill += nbytes
                row = (row + taken) % n
                layer += layers if row == 0 else 0
        if segments:
            chunks.append(Chunk(len(chunks), fill, tuple(segments)))
        return chunks


class Side:
    """One rank's memory for one request: the rank's layout, its buffers, and the request's page tables.

    Args:
        rank: the rank's layout.
        buffers: one per region: uint8 NumPy arrays or memoryviews, torch tensors, or (for the other side
            in direct mode) RunReaders.
        tables: page numbers by table name; a per-request table has the slot as its only entry. Entries of
            pages that the request no longer has (outside a window) may be -1 if they are not touched.

    Raises:
        MisuseError: a table or buffer is missing, too short, or points outside the region. Page numbers are
            checked when a segment is first addressed, before any byte moves.
    """

    def __init__(self, rank: RankLayout, buffers: Sequence[Any], tables: Mapping[str, Sequence[int] | Offsets]) -> None:
        if len(buffers) != len(rank.regions):
            raise MisuseError(f"rank {rank.rank} has {len(rank.regions)} regions, got {len(buffers)} buffers")
        self.rank = rank
        self.buffers = tuple(_as_buffer(b) for b in buffers)
        self.tables: dict[str, Offsets] = {name: np.asarray(table, dtype=np.int64) for name, table in tables.items()}
        self._offsets: dict[object, tuple[Offsets, Offsets]] = {}  # keeps the rows, so that their id stays theirs

    def row_offsets(self, holding: Holding, rows: Offsets) -> Offsets:
        """Byte offset of each row from ``holding``'s layer offset; checks the page table."""
        key = (holding.table, holding.tokens, holding.page_rows, holding.page_stride, holding.row_stride, id(rows))
        if key not in self._offsets:
            self._offsets[key] = (rows, self._address(holding, rows))
        return self._offsets[key][1]

    def check(self, spec: CacheSpec, shape: RequestShape, *, exclusive: bool = False) -> None:
        """Check every page table against what a request of ``shape`` needs; ``exclusive`` refuses a page named twice.

        Raises:
            MisuseError: names table, entry and value.
        """
        for holding in self.rank.holdings:
            start, stop = shape.rows(spec[holding.component])
            rows = np.arange(start, stop, dtype=np.int64)
            own = holding.tokens
            self._address(holding, rows[(rows // own.interleave) % own.size == own.index] if own.size > 1 else rows)
        for name, holding in self.rank.tables().items():
            named = self.tables[name][self.tables[name] >= 0]
            if len(named) and int(named.max()) >= holding.pages:
                raise MisuseError(
                    f"rank {self.rank.rank}: page table {name!r} names page {int(named.max())} of {holding.pages}"
                )
        if exclusive:
            self._check_exclusive()

    def _check_exclusive(self) -> None:
        """No page twice in a table, nor in two tables that draw from one pool."""
        members: dict[str, list[str]] = {}
        for name, pool in self.rank.pools().items():
            members.setdefault(pool, []).append(name)
        for names in members.values():
            pages = np.sort(np.concatenate([self.tables[name] for name in names]))
            again = pages[1:][(pages[1:] == pages[:-1]) & (pages[1:] >= 0)]
            if len(again):
                where = " and ".join(repr(name) for name in names if int(again[0]) in self.tables[name])
                raise MisuseError(
                    f"rank {self.rank.rank}: page table {where} names page {int(again[0])} twice",
                    hint="every page that a transfer writes must be its own",
                )

    def _address(self, holding: Holding, rows: Offsets) -> Offsets:
        own = holding.tokens
        local = rows if own.size == 1 else _local_rows(rows, own)
        pages, within = np.divmod(local, holding.page_rows)
        if holding.table not in self.tables:
            raise MisuseError(
                f"rank {self.rank.rank}: no page table {holding.table!r}; given are {sorted(self.tables)}"
            )
        table = self.tables[holding.table]
        if len(pages) and int(pages[-1]) >= len(table):
            where = f"rank {self.rank.rank}: page table {holding.table!r}"
            raise MisuseError(f"{where} has {len(table)} pages, row {int(rows[-1])} needs page {int(pages[-1])}")
        numbers = table[pages]
        wrong = (numbers < 0) | (numbers >= holding.pages)
        if wrong.any():
            at = int(pages[int(np.argmax(wrong))])
            where = f"rank {self.rank.rank}: page table {holding.table!r}"
            raise MisuseError(f"{where} entry {at} is {int(table[at])}, outside [0, {holding.pages})")
        offsets: Offsets = numbers * holding.page_stride + within * holding.row_stride
        return offsets


def pack(program: EdgeProgram, segment: Segment, source: Side, out: Any, *, kernel: str = "auto") -> None:
    """Gather a segment from the source's pages into ``out`` (exactly ``segment.nbytes`` bytes)."""
    item = program.items[segment.item]
    _gather(program, segment, item, source, item.source_holding, out, kernel)


def read_back(program: EdgeProgram, segment: Segment, target: Side, out: Any, *, kernel: str = "auto") -> None:
    """Gather a segment from the target's pages, in the target's dtype, as ``pack`` does from the source's."""
    item = program.items[segment.item]
    _gather(program, segment, item, target, item.target_holding, out, kernel)


def unpack(program: EdgeProgram, segment: Segment, target: Side, data: Any, *, kernel: str = "auto") -> None:
    """Scatter a packed segment into the target's pages, converting the dtype where the item says so."""
    item = program.items[segment.item]
    have, want = program.source_dtype(item), target.rank.holdings[item.target_holding].dtype
    data = convert(data, have, want) if item.converts else data
    holding = target.rank.holdings[item.target_holding]
    packed = _packed_strides(item.box.shape, holding.itemsize)
    n = segment.row_stop - segment.row_start
    rows = target.row_offsets(holding, program.rows[segment.item])[segment.row_start : segment.row_stop]
    copier = _Copier(kernel, item, holding, (rows, *_strides(item, holding)), (_steps(n, packed[0]), *packed))
    for i, layer in enumerate(range(segment.layer_start, segment.layer_stop)):
        region, offset = holding.at(item.layers[layer])
        copier.copy(target.buffers[region], offset, _as_buffer(data), i * n * packed[0])


def direct(program: EdgeProgram, segment: Segment, source: Side, target: Side, *, kernel: str = "auto") -> None:
    """Copy a segment from the source's pages straight into the target's; not for converting items."""
    item = program.items[segment.item]
    if item.converts:
        raise MisuseError(f"{item.component}: a dtype conversion can't be done by a direct copy")
    have, want = source.rank.holdings[item.source_holding], target.rank.holdings[item.target_holding]
    span = slice(segment.row_start, segment.row_stop)
    from_rows, to_rows = (
        side.row_offsets(h, program.rows[segment.item])[span] for side, h in ((source, have), (target, want))
    )
    copier = _Copier(kernel, item, want, (to_rows, *_strides(item, want)), (from_rows, *_strides(item, have)), have)
    for layer in item.layers[segment.layer_start : segment.layer_stop]:
        (from_region, from_offset), (to_region, to_offset) = have.at(layer), want.at(layer)
        copier.copy(target.buffers[to_region], to_offset, source.buffers[from_region], from_offset)


def convert(data: Any, have: str, want: str) -> Bytes:
    """Convert packed elements between dtypes, rounding to nearest even; returns bytes."""
    return _as_host(data).view(numpy_dtype(have)).astype(numpy_dtype(want)).view(np.uint8)


def numpy_dtype(name: str) -> np.dtype[Any]:
    """NumPy dtype by our name (bfloat16 and float8 through ml_dtypes)."""
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def native_available() -> bool:
    """Whether the compiled kernel is installed."""
    return _native is not None


def _gather(
    program: EdgeProgram, segment: Segment, item: CopyItem, side: Side, index: int, out: Any, kernel: str
) -> None:
    holding = side.rank.holdings[index]
    packed = _packed_strides(item.box.shape, holding.itemsize)
    n = segment.row_stop - segment.row_start
    rows = side.row_offsets(holding, program.rows[segment.item])[segment.row_start : segment.row_stop]
    copier = _Copier(
        kernel, item, holding, (_steps(n, packed[0]), *packed), (rows, *_strides(item, holding)), holding, packs=True
    )
    for i, layer in enumerate(range(segment.layer_start, segment.layer_stop)):
        region, offset = holding.at(item.layers[layer])
        copier.copy(_as_buffer(out), i * n * packed[0], side.buffers[region], offset)


class _Copier:
    """One item's copy between two strided sides, with everything that does not depend on the layer worked out once."""

    def __init__(
        self,
        kernel: str,
        item: CopyItem,
        holding: Holding,
        target: tuple[Offsets, int, tuple[int, ...]],
        source: tuple[Offsets, int, tuple[int, ...]],
        source_holding: Holding | None = None,
        *,
        packs: bool = False,
    ) -> None:
        self.kernel = kernel
        to_rows, self.to_row, to_strides = target
        from_rows, self.from_row, from_strides = source
        self.shape, self.to_strides, self.from_strides, self.run = merge_axes(
            item.box.shape, to_strides, from_strides, holding.itemsize
        )
        starts, self.rows = _pieces(to_rows, self.to_row, from_rows, self.from_row)
        self.to_base = 0 if packs else _box_offset(item, holding)
        self.from_base = _box_offset(item, source_holding) if source_holding else 0
        self.to_offsets, self.from_offsets = to_rows[starts], from_rows[starts]
        self.lengths = self.rows * self.run
        self.flat = not self.shape and self.to_row == self.from_row == self.run

    def copy(self, target: Any, target_offset: int, source: Any, source_offset: int) -> None:
        """Copy all rows between two buffers; offsets are those of the layer on each side."""
        to, at = self.to_offsets + (target_offset + self.to_base), self.from_offsets + (source_offset + self.from_base)
        name = self.kernel if self.kernel != "auto" else _choose(target, source)
        if name == "runs" or (name == "native" and self.flat):
            self._copy_runs(name, target, to, source, at)
            return
        KERNELS[name](
            target,
            source,
            to,
            at,
            self.rows,
            self.to_row,
            self.from_row,
            self.shape,
            self.to_strides,
            self.from_strides,
            self.run,
        )

    def _copy_runs(self, name: str, target: Any, to: Offsets, source: Any, at: Offsets) -> None:
        lengths = self.lengths
        if not self.flat:
            to = _run_offsets(to, self.rows, self.to_row, self.shape, self.to_strides)
            at = _run_offsets(at, self.rows, self.from_row, self.shape, self.from_strides)
            lengths = np.full(len(to), self.run, dtype=np.int64)
        if name == "runs":
            source.read_runs(memoryview(target), to, at, lengths)
        else:
            _native.copy_runs(target, source, to, at, lengths)


def _strides(item: CopyItem, holding: Holding) -> tuple[int, tuple[int, ...]]:
    del item
    return holding.row_stride, holding.strides


def _box_offset(item: CopyItem, holding: Holding) -> int:
    """Bytes from the holding's first element to the item's."""
    return sum((a - b) * s for a, b, s in zip(item.box.starts, holding.box.starts, holding.strides, strict=True))


@lru_cache(maxsize=4096)
def _packed_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, tuple[int, ...]]:
    strides = tuple(math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape)))
    return math.prod(shape) * itemsize, strides


@lru_cache(maxsize=256)
def _steps(n: int, step: int) -> Offsets:
    steps = np.arange(n, dtype=np.int64) * step
    steps.flags.writeable = False
    return steps


@lru_cache(maxsize=4096)
def merge_axes(
    shape: tuple[int, ...], to_strides: tuple[int, ...], from_strides: tuple[int, ...], itemsize: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """Reorder axes by target stride and merge those that are contiguous on both sides.

    Returns the remaining shape (outermost first), both sides' strides, and the bytes of one contiguous run.
    """
    axes = sorted(
        ((t, s, n) for n, t, s in zip(shape, to_strides, from_strides, strict=True) if n > 1),
        key=lambda a: (a[0], a[1]),
    )
    merged: list[tuple[int, int, int]] = []
    run = itemsize
    for to, at, n in axes:
        if not merged and to == at == run:
            run *= n
        elif merged and to == merged[-1][0] * merged[-1][2] and at == merged[-1][1] * merged[-1][2]:
            merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] * n)
        else:
            merged.append((to, at, n))
    merged.reverse()
    return tuple(a[2] for a in merged), tuple(a[0] for a in merged), tuple(a[1] for a in merged), run


def _pieces(to: Offsets, to_row: int, at: Offsets, at_row: int) -> tuple[Offsets, Offsets]:
    """Group consecutive rows that are evenly spaced on both sides: first indices and row counts."""
    if len(to) < 2:
        return np.zeros(len(to), np.int64), np.ones(len(to), np.int64)
    breaks = np.flatnonzero((np.diff(to) != to_row) | (np.diff(at) != at_row)) + 1
    starts = np.concatenate(([0], breaks))
    return starts, np.diff(np.append(starts, len(to)))


def _local_rows(rows: Offsets, own: TokenOwnership) -> Offsets:
    return rows // (own.interleave * own.size) * own.interleave + rows % own.interleave


def _run_offsets(
    offsets: Offsets, rows: Offsets, row_stride: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Offsets:
    """Offset of every contiguous run, in the primitive's loop order."""
    firsts = np.repeat(offsets, rows)
    counts = np.arange(len(firsts), dtype=np.int64) - np.repeat(np.cumsum(rows) - rows, rows)
    runs = firsts + counts * row_stride
    for n, stride in zip(shape, strides, strict=True):
        runs = (runs[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return runs


def _copy_native(
    target: Any, source: Any, to: Offsets, at: Offsets, rows: Offsets, to_row: int, at_row: int,
    shape: tuple[int, ...], to_strides: tuple[int, ...], at_strides: tuple[int, ...], run: int,
) -> None:  # fmt: skip
    _native.copy_boxes(target, source, to, at, rows, to_row, at_row, shape, to_strides, at_strides, run)


def _copy_numpy(
    target: Any, source: Any, to: Offsets, at: Offsets, rows: Offsets, to_row: int, at_row: int,
    shape: tuple[int, ...], to_strides: tuple[int, ...], at_strides: tuple[int, ...], run: int,
) -> None:  # fmt: skip
    """The reference: one fancy assignment over overlapping windows of ``run`` bytes."""
    if not len(to):
        return
    to, at = _run_offsets(to, rows, to_row, shape, to_strides), _run_offsets(at, rows, at_row, shape, at_strides)
    _check_runs(to, run, target.nbytes, "target")
    _check_runs(at, run, source.nbytes, "source")
    _windows(target, run)[to] = _windows(source, run)[at]


def _copy_torch(
    target: Any, source: Any, to: Offsets, at: Offsets, rows: Offsets, to_row: int, at_row: int,
    shape: tuple[int, ...], to_strides: tuple[int, ...], at_strides: tuple[int, ...], run: int,
) -> None:  # fmt: skip
    """Gather and scatter by word index; either side may be on a device."""
    import torch

    to, at = _run_offsets(to, rows, to_row, shape, to_strides), _run_offsets(at, rows, at_row, shape, at_strides)
    if not len(to):
        return
    tensors = [b if isinstance(b, torch.Tensor) else torch.from_numpy(b) for b in (target, source)]
    word = math.gcd(run, 8, int(np.bitwise_or.reduce(to | at)) or 8, *(t.numel() | 8 for t in tensors))
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    flat = [t.view(-1)[: t.numel() // word * word].view(dtype) for t in tensors]
    within = np.arange(run // word, dtype=np.int64)
    to_index, at_index = (torch.from_numpy((o[:, None] // word + within).reshape(-1)) for o in (to, at))
    _check_runs(to, run, tensors[0].numel(), "target")
    _check_runs(at, run, tensors[1].numel(), "source")
    values = flat[1][at_index.to(flat[1].device)]
    flat[0][to_index.to(flat[0].device)] = values.to(flat[0].device)


KERNELS: Mapping[str, Callable[..., None]] = {"native": _copy_native, "numpy": _copy_numpy, "torch": _copy_torch}


def _check_runs(offsets: Offsets, run: int, nbytes: int, side: str) -> None:
    if int(offsets.min()) < 0 or int(offsets.max()) + run > nbytes:
        raise ValueError(f"{side} runs reach byte {int(offsets.max()) + run} of {nbytes}")


def _windows(buffer: Bytes, run: int) -> npt.NDArray[np.void]:
    """Every window of ``run`` bytes of a buffer, as overlapping void elements."""
    array = np.asarray(buffer)
    windows: npt.NDArray[np.void] = np.ndarray(
        array.nbytes - run + 1, dtype=np.dtype((np.void, run)), buffer=array.data, strides=(1,)
    )
    return windows


def _choose(target: Any, source: Any) -> str:
    if hasattr(source, "read_runs"):
        return "runs"
    if isinstance(target, np.ndarray) and isinstance(source, np.ndarray):
        return "native" if _native is not None else "numpy"
    return "torch"


def _as_buffer(buffer: Any) -> Any:
    """NumPy for host memory, the object itself for tensors and run readers."""
    if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint8:
        return buffer
    if isinstance(buffer, (bytes, bytearray, memoryview, np.ndarray)):
        return np.frombuffer(buffer, dtype=np.uint8)
    return buffer


def _as_host(data: Any) -> Bytes:
    array = _as_buffer(data)
    return array if isinstance(array, np.ndarray) else np.asarray(array.cpu().numpy())


def check_targets(program: EdgeProgram, side: Side) -> None:
    """``side.check`` for a program's target."""
    side.check(program.plan.target.spec, program.shape, exclusive=True)
