"""Pages: which bytes of a rank's memory are one request's.

In come token counts, page tables and buffers; out come byte offsets of rows, or a refusal that names table, entry and
value. Nothing is read or written here; ``packing.py`` moves what is found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdxfer.errors import MisuseError
from pdxfer.kernels import Offsets, as_buffer
from pdxfer.layout import Holding, RankLayout, TokenOwnership
from pdxfer.spec import CacheSpec, Component, Growth

__all__ = ["Buffers", "RequestShape", "Side"]

_LARGEST = np.maximum.reduce
_TOKENS_MAX = 1 << 48  # far beyond any request, and no byte offset overflows


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
        counts = (self.first_token, self.kv_tokens, self.state_tokens)
        if any(type(n) is not int for n in counts):
            raise MisuseError(f"impossible request: first_token, kv_tokens, state_tokens {counts} are not all integers")
        if not 0 <= self.first_token <= self.kv_tokens <= _TOKENS_MAX or self.state_tokens < 0:
            raise MisuseError(f"impossible request: first_token {self.first_token}, kv_tokens {self.kv_tokens}")

    def rows(self, component: Component) -> tuple[int, int]:
        """Half-open range of rows of ``component`` to move."""
        first, stop = component.rows(self.kv_tokens)
        if component.growth is not Growth.PER_REQUEST:
            first = min(max(first, self.first_token // component.tokens_per_row), stop)
        return first, stop


class Buffers(tuple[Any, ...]):
    """A rank's buffers as the kernels take them; made once (``Buffers(map(as_buffer, ...))``), used by every Side.

    ``known``: what was worked out of the rank and its buffers alone; it is the same for every request.
    """

    known: dict[object, Any]

    def __new__(cls, buffers: Iterable[Any]) -> Buffers:
        made = super().__new__(cls, buffers)
        made.known = {}
        return made


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
        self.buffers = buffers if isinstance(buffers, Buffers) else Buffers(map(as_buffer, buffers))
        self.tables: dict[str, Offsets] = {name: _page_numbers(name, table) for name, table in tables.items()}

    def row_offsets(self, holding: Holding, rows: Offsets, *, page_by_page: bool = False) -> Offsets:
        """Byte offset of each row from ``holding``'s layer offset; checks the page table.

        Args:
            page_by_page: the rows are one of each page, in order, and all but the first begin theirs: a short cut.

        Raises:
            MisuseError: the table is missing or too short, or an entry is outside the region's pages.
        """
        own, table = holding.tokens, self._table(holding)
        local = rows if own.size == 1 else _local_rows(rows, own)
        if page_by_page and (first := int(local[0])) // holding.page_rows + len(rows) <= len(table):
            page = first // holding.page_rows
            numbers = table[page : page + len(rows)]
            if _LARGEST(numbers.view(np.uint64)) < holding.pages:
                offsets: Offsets = numbers * holding.page_stride
                offsets[0] += (first - page * holding.page_rows) * holding.row_stride
                return offsets
        if len(local) == 1:  # state: one row, one slot
            page, within = divmod(int(local[0]), holding.page_rows)
            number = int(table[page]) if page < len(table) else -1
            if 0 <= number < holding.pages:
                return np.array([number * holding.page_stride + within * holding.row_stride], dtype=np.int64)
        pages = local // holding.page_rows
        if len(pages) and pages[-1] >= len(table):
            what = f"has {len(table)} pages, row {int(rows[-1])} needs page {int(pages[-1])}"
            raise MisuseError(f"rank {self.rank.rank}: page table {holding.table!r} {what}")
        numbers = table[pages]
        if len(numbers) and _LARGEST(numbers.view(np.uint64)) >= holding.pages:  # -1 is a large number, too
            at = int(pages[int(np.argmax(numbers.view(np.uint64) >= holding.pages))])
            what = f"entry {at} is {int(table[at])}, outside [0, {holding.pages})"
            raise MisuseError(f"rank {self.rank.rank}: page table {holding.table!r} {what}")
        offsets = numbers * holding.page_stride
        offsets += (local - pages * holding.page_rows) * holding.row_stride
        return offsets

    def _table(self, holding: Holding) -> Offsets:
        table = self.tables.get(holding.table)
        if table is None:
            raise MisuseError(
                f"rank {self.rank.rank}: no page table {holding.table!r}; given are {sorted(self.tables)}"
            )
        return table

    def check(self, spec: CacheSpec, shape: RequestShape, *, exclusive: bool = False) -> None:
        """Check every page table against what a request of ``shape`` needs; ``exclusive`` refuses a page named twice.

        Raises:
            MisuseError: names table, entry and value.
        """
        whole = {name for name, pages in self._fewest_pages().items() if self._within(name, pages)}
        for component, holding in self._unlike(spec):
            start, stop = shape.rows(component)
            simple = holding.table in whole and holding.tokens.size == 1  # every entry is a page: are they enough?
            if not simple or (start < stop and (stop - 1) // holding.page_rows >= len(self.tables[holding.table])):
                self._check_rows(holding, start, stop)
        for name, holding in self.rank.tables().items() if len(whole) < len(self.tables) else ():
            if (last := int(self.tables[name].max(initial=-1))) >= holding.pages:
                raise MisuseError(f"rank {self.rank.rank}: page table {name!r} names page {last} of {holding.pages}")
        if exclusive:
            self._check_exclusive()

    def _check_rows(self, holding: Holding, start: int, stop: int) -> None:
        own = holding.tokens
        self._check_length(holding, start, stop)
        rows = np.arange(start, stop, dtype=np.int64)
        rows = rows[(rows // own.interleave) % own.size == own.index] if own.size > 1 else rows
        if own.size == 1 and stop > start:  # one row of each page, and the last, say as much as all
            firsts = np.arange(start - start % holding.page_rows, stop, holding.page_rows, dtype=np.int64)
            rows = np.append(np.maximum(firsts, start), stop - 1)
        self.row_offsets(holding, rows)

    def _fewest_pages(self) -> dict[str, int]:
        """By table: the number of pages that all holdings which use it have."""
        known = self.buffers.known.get("pages")
        if known is None:
            known = self.buffers.known["pages"] = {}
            for h in self.rank.holdings:
                known[h.table] = min(h.pages, known.get(h.table, h.pages))
        fewest: dict[str, int] = known
        return fewest

    def _within(self, name: str, pages: int) -> bool:
        """Whether every entry of a table is a page; -1 is none, and a large number when seen as unsigned."""
        table = self.tables.get(name)
        return table is not None and len(table) > 0 and _LARGEST(table.view(np.uint64)) < pages

    def _unlike(self, spec: CacheSpec) -> list[tuple[Component, Holding]]:
        """Holdings whose tables and rows differ, each with its component: what holds for one holds for its like."""
        known = self.buffers.known.get("unlike")
        if known is None or known[0] is not spec:
            found: dict[object, tuple[Component, Holding]] = {}
            for h in self.rank.holdings:
                c = spec[h.component]
                alike = (h.table, h.page_rows, h.pages, h.tokens, c.growth, c.tokens_per_row, c.window)
                found.setdefault(alike, (c, h))
            known = self.buffers.known["unlike"] = spec, list(found.values())
        unlike: list[tuple[Component, Holding]] = known[1]
        return unlike

    def _check_exclusive(self) -> None:
        """No page twice in a table, and no unit of a pool in two tables."""
        users: dict[str, dict[str, Offsets]] = {}
        for name, (pool, per_unit) in self._pooled().items():
            table = self.tables[name]
            pages = np.sort(table[table >= 0]) if len(table) > 1 else table[table >= 0]
            if len(pages) > 1:
                self._refuse_twice({name: pages}, pages)
            if per_unit:
                users.setdefault(pool, {})[name] = pages if per_unit == 1 else _distinct(pages // per_unit)
        for tables in users.values():
            if len(tables) > 1:
                self._refuse_twice(tables, np.sort(np.concatenate([*tables.values()])))

    def _pooled(self) -> dict[str, tuple[str, int]]:
        """By table its pool, and how many of its pages make a unit there; 0 where it does not have to be compared."""
        known = self.buffers.known.get("pooled")
        if known is None:
            per_unit, entangled = self.rank.pages_per_unit(), self.rank.entangled()
            pools = [*self.rank.pools().items()]
            pooled = Counter(pool for _, pool in pools)  # a table that has its pool for itself meets no other
            alone = {name for name, pool in pools if pooled[pool] == 1} | {*entangled}
            known = {name: (pool, 0 if name in alone else per_unit[name]) for name, pool in pools}
            self.buffers.known["pooled"] = known
        by_table: dict[str, tuple[str, int]] = known
        return by_table

    def _refuse_twice(self, tables: Mapping[str, Offsets], pages: Offsets) -> None:
        if np.logical_or.reduce(same := pages[1:] == pages[:-1]):
            again = pages[1:][same]
            where = " and ".join(repr(name) for name, named in tables.items() if again[0] in named)
            raise MisuseError(
                f"rank {self.rank.rank}: page table {where} names page {int(again[0])} twice",
                hint="every page that a transfer writes must be its own",
            )

    def _check_length(self, holding: Holding, start: int, stop: int) -> None:
        """Refuse what can't fit before an array of that size is made: counts may come from an unchecked ticket."""
        own, table = holding.tokens, self._table(holding)
        if (stop - start) // own.size - own.interleave > (len(table) + 1) * holding.page_rows:
            where = f"rank {self.rank.rank}: page table {holding.table!r}"
            raise MisuseError(
                f"{where} has {len(table)} pages of {holding.page_rows} rows, the request has {stop} rows"
            )


def _distinct(units: Offsets) -> Offsets:
    """Each once; they are sorted."""
    keep = np.ones(len(units), bool)
    np.not_equal(units[1:], units[:-1], out=keep[1:])
    return units[keep]


def _local_rows(rows: Offsets, own: TokenOwnership) -> Offsets:
    return rows // (own.interleave * own.size) * own.interleave + rows % own.interleave


def _page_numbers(name: str, table: Sequence[int] | Offsets) -> Offsets:
    """A page table as an array; refuses what NumPy would round, parse or wrap into numbers of other pages."""
    try:
        found = np.asarray(table)
    except (TypeError, ValueError) as error:
        raise MisuseError(f"page table {name!r} is not a list of page numbers: {error}") from error
    fits = found.size == 0 or (found.dtype.kind in "iu" and int(found.max()) < 1 << 63)
    if found.ndim != 1 or not fits:
        what = f"{found.ndim} dimensions of {found.dtype}"
        raise MisuseError(f"page table {name!r} is not a list of page numbers (-1 for none), it has {what}")
    return found.astype(np.int64)
