"""Oracle: what every byte of a request must be, worked out slowly and apart from the planner and the packer.

In come a spec, a key and a number of tokens; out come the global tensors of that request, written into or
read out of any layout's buffers by slicing them with NumPy. Every element is a keyed function of
(request, component, layer, row, offset), so a byte that ends in the wrong place is seen. This file may not
use ``plan.py`` or ``packing.py``: a shared mistake would be invisible.

::

    Oracle.put(source memory) -> your engine, your transport, your connector -> Oracle.difference(target memory)

The comparison is over whole buffers: the bytes around the request must be what they were before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.errors import CorruptError, MisuseError
from pdxfer.layout import Holding, Layout, RankLayout
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component, Growth

__all__ = ["Difference", "Memory", "Oracle", "owned_rows", "random_memory", "random_tables"]

Words = npt.NDArray[Any]
Offsets = npt.NDArray[np.int64]

#: Clearing the top exponent bit of a random float leaves a finite one, so that a dtype conversion is defined.
_TOP_EXPONENT_BIT = {
    "float64": 62, "float32": 30, "bfloat16": 14, "float16": 14, "float8_e4m3fn": 6, "float8_e5m2": 6,
}  # fmt: skip
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first byte that is not what it must be.

    ``component`` is "" when the byte belongs to nothing of the request: something wrote where it must not.
    ``coordinates`` are global, in the order of the component's axes; values are the element's raw bits.
    """

    rank: int
    region: str
    byte: int
    component: str = ""
    layer: int = -1
    row: int = -1
    coordinates: tuple[int, ...] = ()
    expected: int = 0
    found: int = 0

    def __str__(self) -> str:
        where = f"rank {self.rank}, region {self.region!r}, byte {self.byte}"
        if not self.component:
            return f"{where}: belongs to no row of the request and changed from {self.expected:#x} to {self.found:#x}"
        at = f"{self.component}, layer {self.layer}, row {self.row}, at {self.coordinates}"
        return f"{at}: {self.found:#x} instead of {self.expected:#x} ({where})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """One worker's buffers, and one request's page tables, rank by rank."""

    layout: Layout
    buffers: tuple[tuple[npt.NDArray[np.uint8], ...], ...]
    tables: tuple[dict[str, Offsets], ...]

    def copy(self) -> Memory:
        """The same tables over a copy of the bytes."""
        buffers = tuple(tuple(b.copy() for b in rank) for rank in self.buffers)
        return Memory(layout=self.layout, buffers=buffers, tables=self.tables)


class Oracle:
    """The caches of one request, globally.

    Args:
        spec: the model's caches.
        key: names the request; another key gives other contents.
        tokens: tokens of which the caches hold something.
        dtypes: the dtype in which a component's contents are defined, where it is not the spec's; a layout
            that stores another dtype holds them rounded to nearest even.
    """

    def __init__(
        self, spec: CacheSpec, *, key: str = "request", tokens: int, dtypes: Mapping[str, str] | None = None
    ) -> None:
        self.spec, self.key, self.tokens = spec, key, tokens
        self.dtypes = {c.name: c.dtype for c in spec.components} | dict(dtypes or {})
        self._tensors: dict[tuple[str, int], Words] = {}

    @classmethod
    def of(cls, layout: Layout, *, key: str = "request", tokens: int) -> Oracle:
        """An oracle whose contents are defined in the dtypes that ``layout`` stores."""
        dtypes = {h.component: h.dtype for rank in layout.ranks for h in rank.holdings}
        return cls(layout.spec, key=key, tokens=tokens, dtypes=dtypes)

    def tensor(self, component: str, layer: int, dtype: str = "") -> Words:
        """Raw elements [rows, *axes] of one layer, as unsigned words, in ``dtype`` or the defining one.

        Rows count from the request's first token, also for a window (of which earlier rows are never stored).
        """
        if (component, layer) not in self._tensors:
            c = self.spec[component]
            shape = (c.rows(self.tokens)[1], *c.shape)
            words = _words(f"{self.key}/{component}/{layer}", int(np.prod(shape)), self.dtypes[component])
            self._tensors[component, layer] = words.reshape(shape)
        words = self._tensors[component, layer]
        return words if dtype in ("", self.dtypes[component]) else _rounded(words, self.dtypes[component], dtype)

    def put(self, memory: Memory, *, first_token: int = 0, stop_token: int | None = None) -> None:
        """Write the request into a worker's buffers.

        Args:
            first_token: per-token rows before it are left alone, and with ``stop_token`` those after it.
        """
        for rank, buffers, tables in zip(memory.layout.ranks, memory.buffers, memory.tables, strict=True):
            for piece in self._pieces(rank, buffers, tables, first_token, stop_token):
                piece.view[piece.pages, piece.within] = self._expected(piece)

    def read(self, memory: Memory, component: str, layer: int) -> Words:
        """Assemble the global tensor of one layer from the ranks that hold it; words as stored.

        Raises:
            MisuseError: nobody holds some element.
        """
        c = self.spec[component]
        found = np.zeros((c.rows(self.tokens)[1], *c.shape), dtype=_word(self._stored_dtype(memory, component)))
        missing = np.ones(found.shape, dtype=bool)
        for rank, buffers, tables in zip(memory.layout.ranks, memory.buffers, memory.tables, strict=True):
            for piece in self._pieces(rank, buffers, tables, 0, None):
                if (piece.holding.component, piece.layer) == (component, layer):
                    where: Any = (piece.rows, *_slices(piece.holding))
                    found[where] = piece.view[piece.pages, piece.within]
                    missing[where] = False
        if missing[c.rows(self.tokens)[0] :].any():
            raise MisuseError(f"{component}, layer {layer}: no rank holds element {tuple(np.argwhere(missing)[0])}")
        return found

    def difference(self, memory: Memory, before: Memory, *, first_token: int = 0) -> Difference | None:
        """Compare a target's buffers with what a correct transfer makes of ``before``; None when they are equal."""
        wanted = before.copy()
        self.put(wanted, first_token=first_token)
        for rank, buffers in enumerate(memory.buffers):
            wrong = [not np.array_equal(a, b) for a, b in zip(buffers, wanted.buffers[rank], strict=True)]
            if any(wrong):
                return self._locate(rank, memory, wanted, wrong)
        return None

    def check(self, memory: Memory, before: Memory, *, first_token: int = 0) -> None:
        """Raise CorruptError, naming component, layer, row and coordinates, unless the buffers are right."""
        if (found := self.difference(memory, before, first_token=first_token)) is not None:
            raise CorruptError(found.component or "*", str(found))

    def _stored_dtype(self, memory: Memory, component: str) -> str:
        for rank in memory.layout.ranks:
            for h in rank.holdings:
                if h.component == component:
                    return h.dtype
        raise MisuseError(f"no rank holds {component}")

    def _expected(self, piece: _Piece) -> Words:
        where: Any = (piece.rows, *_slices(piece.holding))
        expected: Words = self.tensor(piece.holding.component, piece.layer, piece.holding.dtype)[where]
        return expected

    def _pieces(
        self,
        rank: RankLayout,
        buffers: Sequence[Any],
        tables: Mapping[str, Offsets],
        first_token: int,
        stop_token: int | None,
    ) -> Iterator[_Piece]:
        """Every (holding, layer) of a rank with a view of all its pages and the places of its rows."""
        for h in rank.holdings:
            rows, local = owned_rows(self.spec[h.component], h, self.tokens, first_token, stop_token)
            pages = np.asarray(tables[h.table], dtype=np.int64)[local // h.page_rows]
            for layer, region, offset in zip(h.layers, h.regions, h.offsets, strict=True):
                view = np.ndarray(
                    (h.pages, h.page_rows, *h.box.shape),
                    dtype=_word(h.dtype),
                    buffer=np.asarray(buffers[region]).data,
                    offset=offset,
                    strides=(h.page_stride, h.row_stride, *h.strides),
                )
                yield _Piece(h, layer, view, rows, pages, local % h.page_rows)

    def _locate(self, rank: int, memory: Memory, wanted: Memory, wrong: list[bool]) -> Difference:
        """Say whose byte differs first: in the order of holdings, else of regions."""
        layout, buffers, tables = memory.layout.ranks[rank], memory.buffers[rank], memory.tables[rank]
        mine = self._pieces(layout, buffers, tables, 0, None)
        for piece, good in zip(mine, self._pieces(layout, wanted.buffers[rank], tables, 0, None), strict=True):
            found, expected = (p.view[p.pages, p.within] for p in (piece, good))
            if not np.array_equal(found, expected):
                return _difference(rank, layout, piece, expected, found)
        region = wrong.index(True)
        expected, found = wanted.buffers[rank][region], buffers[region]
        byte = int(np.argmax(expected != found))
        name = layout.regions[region].name
        return Difference(rank=rank, region=name, byte=byte, expected=int(expected[byte]), found=int(found[byte]))


@dataclass(frozen=True, slots=True)
class _Piece:
    """One holding's layer: a view [pages, page rows, *axes] of all pages, and where the request's rows lie in it."""

    holding: Holding
    layer: int
    view: Words
    rows: Offsets
    pages: Offsets
    within: Offsets


def owned_rows(
    component: Component, holding: Holding, tokens: int, first_token: int = 0, stop_token: int | None = None
) -> tuple[Offsets, Offsets]:
    """Rows of a request that a holding keeps, and each one's position among all rows that its rank owns.

    Args:
        first_token, stop_token: of per-token components, only rows of tokens in this range.
    """
    first, stop = component.rows(tokens)
    everything = np.arange(stop, dtype=np.int64)
    own = holding.tokens
    mine = everything[everything // own.interleave % own.size == own.index]
    local = np.arange(len(mine), dtype=np.int64)
    if component.growth is not Growth.PER_REQUEST:
        last = stop if stop_token is None else component.rows(stop_token)[1]
        keep = (mine >= max(first, first_token // component.tokens_per_row)) & (mine < last)
        mine, local = mine[keep], local[keep]
    return mine, local


def random_tables(
    spec: CacheSpec, rank: RankLayout, tokens: int, rng: np.random.Generator, *, spare: int = 0
) -> dict[str, Offsets]:
    """Page tables for one request: scattered, unsorted, no page in two tables of one pool.

    Args:
        spare: pages allocated ahead, behind the ones in use, where the pool has them.

    Pages that lie wholly outside a window may be -1, as engines free them.

    Raises:
        MisuseError: a pool has too few pages.
    """
    used = {table: _used_pages(spec, rank, table, tokens) for table in rank.tables()}
    free: dict[str, list[int]] = {}
    for table, pool in rank.pools().items():
        pages = min(h.pages for h in rank.holdings if h.table == table)
        free.setdefault(pool, [int(p) for p in rng.permutation(pages)])
    tables: dict[str, Offsets] = {}
    for table, pool in rank.pools().items():
        dead, needed = used[table]
        if needed > len(free[pool]):
            left = len(free[pool])
            raise MisuseError(f"rank {rank.rank}: table {table!r} needs {needed} pages, the pool has {left} left")
        entries = [free[pool].pop() for _ in range(needed)]
        entries[:dead] = [-1 if rng.random() < 0.5 else page for page in entries[:dead]]
        tables[table] = np.array(entries, dtype=np.int64)
    for table, pool in rank.pools().items():
        ahead = [free[pool].pop() for _ in range(min(spare, len(free[pool])))]
        if not table.startswith("state"):
            tables[table] = np.concatenate([tables[table], np.array(ahead, dtype=np.int64)])
    return tables


def _used_pages(spec: CacheSpec, rank: RankLayout, table: str, tokens: int) -> tuple[int, int]:
    """Pages at the front that no row uses any more, and pages in all."""
    dead, needed = 1 << 62, 0
    for h in rank.holdings:
        if h.table == table:
            _, local = owned_rows(spec[h.component], h, tokens)
            dead = min(dead, int(local[0]) // h.page_rows if len(local) else 0)
            needed = max(needed, int(local[-1]) // h.page_rows + 1 if len(local) else 0)
    return dead, needed


def random_memory(layout: Layout, tokens: int, rng: np.random.Generator, *, spare: int = 0) -> Memory:
    """Buffers full of noise for every rank of a layout, and page tables for one request."""
    buffers = tuple(
        tuple(np.frombuffer(bytearray(rng.bytes(region.nbytes)), dtype=np.uint8) for region in rank.regions)
        for rank in layout.ranks
    )
    tables = tuple(random_tables(layout.spec, rank, tokens, rng, spare=spare) for rank in layout.ranks)
    return Memory(layout=layout, buffers=buffers, tables=tables)


def _difference(rank: int, layout: RankLayout, piece: _Piece, expected: Words, found: Words) -> Difference:
    at: Any = tuple(int(i) for i in np.argwhere(expected != found)[0])
    row, index = at[0], at[1:]
    h = piece.holding
    region, offset = h.at(piece.layer)
    byte = offset + int(piece.pages[row]) * h.page_stride + int(piece.within[row]) * h.row_stride
    return Difference(
        rank=rank,
        region=layout.regions[region].name,
        byte=byte + sum(i * s for i, s in zip(index, h.strides, strict=True)),
        component=h.component,
        layer=piece.layer,
        row=int(piece.rows[row]),
        coordinates=tuple(i + s for i, s in zip(index, h.box.starts, strict=True)),
        expected=int(expected[at]),
        found=int(found[at]),
    )


def _slices(holding: Holding) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(holding.box.starts, holding.box.stops, strict=True))


def _word(dtype: str) -> np.dtype[Any]:
    """The unsigned integer as wide as one element: contents are bits, not numbers."""
    return np.dtype(f"u{DTYPE_BYTES[dtype]}")


def _words(key: str, count: int, dtype: str) -> Words:
    """``count`` keyed pseudo-random elements (splitmix64 over the element's index)."""
    seed = np.uint64(int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little"))
    x = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN + seed
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words: Words = (x ^ (x >> np.uint64(31))).astype(_word(dtype))
    bit = _TOP_EXPONENT_BIT.get(dtype)
    return words if bit is None else words & ~np.array(1 << bit, dtype=words.dtype)


def _rounded(words: Words, have: str, want: str) -> Words:
    """Round finite floats to nearest even, by way of float32 (which holds both 16-bit formats exactly)."""
    if {have, want} - {"float32", "bfloat16", "float16"}:
        raise MisuseError(f"the oracle can't convert {have} to {want}")
    if have == "bfloat16":
        single = (words.astype(np.uint32) << np.uint32(16)).view(np.float32)
    else:
        single = words.view(np.float16 if have == "float16" else np.float32).astype(np.float32)
    if want == "bfloat16":
        bits: Words = single.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        half: Words = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(np.uint16)
        return half
    rounded: Words = single.astype(np.float16).view(np.uint16) if want == "float16" else single.view(np.uint32)
    return rounded
