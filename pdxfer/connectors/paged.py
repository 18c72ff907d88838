"""Paged caches of one rank in its own memory: an allocator of pages and slots, and strided views of what lies in them.

In come a layout, a rank and buffers; out come page tables, and any component's rows as ``[rows, *box]`` whatever the
axis order, packing and padding of the layout. This file knows no engine, no tensor library, no transport and no peer.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pdxfer.errors import ExhaustedError, InternalError, MisuseError
from pdxfer.layout import Holding, Layout
from pdxfer.spec import Component

__all__ = ["BIT_DTYPES", "Bits", "PageTables", "PagedCaches"]

#: Page numbers by table name, in the order of the request's rows; a per-request table has its slot as only entry.
PageTables = Mapping[str, npt.NDArray[np.int64]]

#: Page numbers, or row numbers.
Rows = npt.NDArray[np.int64]

#: Elements as bit patterns: integers of the element's size, so that nothing converts and NaNs keep their payload.
Bits = npt.NDArray[Any]

#: Integer dtype by element size in bytes.
BIT_DTYPES: dict[int, np.dtype[Any]] = {n: np.dtype(name) for n, name in ((1, "u1"), (2, "i2"), (4, "i4"), (8, "i8"))}


class PagedCaches:
    """One rank's paged memory: an allocator of pages and slots, and strided views of what lies in them.

    Free pages are handed out in an order shuffled by ``seed``, so that page tables are as scattered as in a server
    that has run for a while. ``allocate`` and ``free`` may be called from any thread, the rest from one at a time.

    Args:
        layout: the worker's layout.
        rank: which of its ranks this is.
        buffers: one writable buffer of bytes per region (memoryview, NumPy array, torch tensor on the CPU).

    Raises:
        MisuseError: buffers don't fit the regions, or the layout needs what this connector doesn't have.
    """

    def __init__(self, layout: Layout, rank: int, buffers: Sequence[Any], *, seed: int = 0) -> None:
        self.layout, self.rank = layout, layout.ranks[rank]
        regions = self.rank.regions
        if len(buffers) != len(regions):
            raise MisuseError(f"rank {rank} has {len(regions)} regions, got {len(buffers)} buffers")
        self._buffers = [_as_bytes(b, shape.name, shape.nbytes) for b, shape in zip(buffers, regions, strict=True)]
        self._holdings: dict[tuple[str, int], Holding] = {}
        for holding in self.rank.holdings:
            self._add(holding)
        self._lock = threading.Lock()
        self._pool_of = self.rank.pools()
        self._totals: dict[str, int] = {}
        for h in self.rank.holdings:
            pool = self._pool_of[h.table]
            self._totals[pool] = min(self._totals.get(pool, h.pages), h.pages)
        self._free = {pool: _shuffled(total, f"{seed}/{rank}/{pool}") for pool, total in self._totals.items()}
        self._used: dict[str, set[int]] = {pool: set() for pool in self._totals}

    def _add(self, holding: Holding) -> None:
        if holding.tokens.size > 1:
            raise MisuseError(f"{holding.component}: context-parallel ranks are not supported here")
        if holding.record_format:
            raise MisuseError(
                f"{holding.component}: record format {holding.record_format!r} is opaque; elements are needed here"
            )
        for layer in holding.layers:
            if (holding.component, layer) in self._holdings:
                raise MisuseError(f"rank {self.rank.rank} holds {holding.component} of layer {layer} twice")
            self._holdings[holding.component, layer] = holding

    def components(self) -> Iterator[tuple[int, Component]]:
        """Layer numbers with the components held of them: layers ascending, components in the spec's order."""
        for layer in range(self.layout.spec.num_layers):
            for component in self.layout.spec.layer_components(layer):
                if (component.name, layer) in self._holdings:
                    yield layer, component

    def holding(self, component: str, layer: int) -> Holding:
        """The rank's holding of one component of one layer; raises MisuseError when there is none."""
        try:
            return self._holdings[component, layer]
        except KeyError:
            raise MisuseError(f"rank {self.rank.rank} does not hold {component} of layer {layer}") from None

    def allocate(self, tokens: int) -> PageTables:
        """Reserve pages and slots for a request of up to ``tokens`` tokens.

        Returns:
            One array per table. Entries before a sliding window are -1: that page was never needed.

        Raises:
            ExhaustedError: not enough pages; nothing was reserved.
        """
        needs = {table: self._entries(table, tokens) for table in self._pool_of}
        with self._lock:
            for pool, free in self._free.items():
                wanted = sum(stop - first for table, (first, stop) in needs.items() if self._pool_of[table] == pool)
                if wanted > len(free):
                    have = f"{len(free)} of {self._totals[pool]} are free"
                    raise ExhaustedError(f"{pool}: {tokens} tokens need {wanted} pages, {have}")
            return {table: self._take(self._pool_of[table], *entries) for table, entries in needs.items()}

    def _entries(self, table: str, tokens: int) -> tuple[int, int]:
        """Half-open range of the table's entries that a request of ``tokens`` tokens needs."""
        ranges = []
        for holding in self.rank.holdings:
            if holding.table == table:
                first, stop = self.layout.spec[holding.component].rows(tokens)
                ranges.append((first // holding.page_rows, -(-stop // holding.page_rows)))
        return min(r[0] for r in ranges), max(r[1] for r in ranges)

    def _take(self, pool: str, first: int, stop: int) -> npt.NDArray[np.int64]:
        pages = [self._free[pool].popleft() for _ in range(stop - first)]
        self._used[pool].update(pages)
        return np.array([-1] * first + pages, dtype=np.int64)

    def free(self, tables: PageTables) -> None:
        """Give pages and slots back; raises MisuseError, changing nothing, when one of them is not in use."""
        pages = {table: [int(p) for p in numbers if p >= 0] for table, numbers in tables.items()}
        with self._lock:
            for table, numbers in pages.items():
                if stray := set(numbers) - self._used[self._pool_of[table]]:
                    raise MisuseError(f"table {table!r}: pages {sorted(stray)} are not in use")
            for table, numbers in pages.items():
                self._used[self._pool_of[table]].difference_update(numbers)
                self._free[self._pool_of[table]].extend(numbers)

    def check_integrity(self) -> None:
        """Raise InternalError unless every page is either free or used, once."""
        with self._lock:
            for pool, total in self._totals.items():
                if sorted([*self._free[pool], *self._used[pool]]) != list(range(total)):
                    counts = f"{len(self._free[pool])} free and {len(self._used[pool])} used"
                    raise InternalError(f"{pool}: {counts} pages are not {total} different ones")

    def free_pages(self) -> dict[str, int]:
        """Free pages (slots) by pool; tables that index the same memory share a pool."""
        with self._lock:
            return {pool: len(free) for pool, free in self._free.items()}

    def totals(self) -> dict[str, int]:
        """All pages (slots) by pool."""
        return dict(self._totals)

    def read(self, component: str, layer: int, tables: PageTables, tokens: int) -> Bits:
        """Return the rows of one component of one layer as ``[rows, *box]``, a copy."""
        rows: Bits = self._view(component, layer)[self._index(component, layer, tables, tokens)]
        return rows

    def write(self, component: str, layer: int, tables: PageTables, tokens: int, values: Bits) -> None:
        """Put the rows of one component of one layer, ``[rows, *box]``, into their pages."""
        self._view(component, layer)[self._index(component, layer, tables, tokens)] = values

    def _view(self, component: str, layer: int) -> Bits:
        """All of one component's memory in one layer, strided: ``[pages, page_rows, *box]``."""
        holding = self.holding(component, layer)
        region, offset = holding.at(layer)
        view: Bits = np.ndarray(
            (holding.pages, holding.page_rows, *holding.box.shape),
            dtype=BIT_DTYPES[holding.itemsize],
            buffer=self._buffers[region].data,
            offset=offset,
            strides=(holding.page_stride, holding.row_stride, *holding.strides),
        )
        return view

    def _index(self, component: str, layer: int, tables: PageTables, tokens: int) -> tuple[Rows, Rows]:
        """Page and row-in-page of every row of the request."""
        holding = self.holding(component, layer)
        rows = np.arange(*self.layout.spec[component].rows(tokens), dtype=np.int64)
        entry, within = np.divmod(rows, holding.page_rows)
        table = tables[holding.table]
        if len(entry) and (entry[-1] >= len(table) or table[entry].min() < 0):
            where = f"layer {layer}, {component}"
            raise MisuseError(f"{where}: page table {holding.table!r} has no page for some of {tokens} tokens")
        return table[entry], within


def _as_bytes(buffer: Any, name: str, nbytes: int) -> npt.NDArray[np.uint8]:
    array = buffer.numpy() if hasattr(buffer, "data_ptr") else np.asarray(memoryview(buffer))
    if not array.flags.c_contiguous or not array.flags.writeable:
        raise MisuseError(f"region {name!r}: the buffer must be contiguous and writable")
    flat = array.reshape(-1).view(np.uint8)
    if flat.nbytes != nbytes:
        raise MisuseError(f"region {name!r} has {nbytes} B in the layout, the buffer has {flat.nbytes} B")
    return flat


def _shuffled(total: int, seed: str) -> deque[int]:
    pages = list(range(total))
    random.Random(seed).shuffle(pages)  # noqa: S311 - scatters pages, guards nothing
    return deque(pages)
