"""Layout: how one worker's ranks hold the components of a CacheSpec, free of addresses.

In come a spec and either an engine's real strides (build ``Holding`` values yourself) or one of the
usual engine placements (``builders.py`` makes them for you); out goes a frozen, canonical, digestible
description. This file knows no memory address, no peer and no request.

An element of component c, layer l, row t (token / tokens_per_row), at indices i of c's axes lies at ::

    region[l] base
      + offset[l]                                      first element of the box in page 0
      + table[t' // page_rows] * page_stride           t' = t, counted among the rows this rank owns
      + (t' %  page_rows) * row_stride
      + sum((i_a - box.start_a) * stride_a)            one byte stride per axis

    one page   |<------------------------ page_stride ------------------------>|
               | row 0 | row 1 | ...  | row page_rows-1 | padding, other tensors |
                ^offset[l]

Per-request components have page_rows 1: their page is the slot. Axis orders, packed K and V, unified
and padded pages, extra taps and speculative rows are offsets and strides; none of them is a case.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from pdxfer.errors import MisuseError
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component, Growth, RequestSizes

__all__ = ["Box", "Holding", "Layout", "RankLayout", "RegionShape", "TokenOwnership", "boxes_cover"]


#: Addresses are computed in 64-bit integers; a peer's layout may not make them overflow.
_BYTES_MAX = 1 << 60


@dataclass(frozen=True, slots=True)
class Box:
    """Half-open hyper-rectangle in the element coordinates of a component's axes."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    _shape: tuple[int, ...] = field(default_factory=tuple, init=False, compare=False, repr=False)  # once asked for

    def __post_init__(self) -> None:
        sides = zip(self.starts, self.stops, strict=False)
        if len(self.starts) != len(self.stops) or any(not 0 <= a < b for a, b in sides):
            raise MisuseError(f"not a box: starts {self.starts}, stops {self.stops}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        found = self._shape
        if not found:
            found = tuple(b - a for a, b in zip(self.starts, self.stops, strict=True))
            object.__setattr__(self, "_shape", found)
        return found

    @property
    def volume(self) -> int:
        """Elements inside."""
        return math.prod(self.shape)

    def overlaps(self, other: Box) -> bool:
        """Whether the two share an element."""
        return all(map(operator.lt, self.starts, other.stops)) and all(map(operator.lt, other.starts, self.stops))

    def contains(self, other: Box) -> bool:
        """Whether ``other`` lies wholly inside."""
        return all(map(operator.le, self.starts, other.starts)) and all(map(operator.le, other.stops, self.stops))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenOwnership:
    """Which rows a context-parallel rank holds: row t iff (t // interleave) % size == index.

    ::

        interleave 2, size 2     row   0 1 2 3 4 5 6 7 8
                                 rank  0 0 1 1 0 0 1 1 0
                                 local 0 1 0 1 2 3 2 3 4
    """

    interleave: int = 1
    size: int = 1
    index: int = 0

    def __post_init__(self) -> None:
        if self.interleave < 1 or self.size < 1 or not 0 <= self.index < self.size:
            raise MisuseError(
                f"impossible token ownership: interleave {self.interleave}, index {self.index} of {self.size}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionShape:
    """A region of a rank by name and size in bytes."""

    name: str
    nbytes: int

    def __post_init__(self) -> None:
        if not 0 <= self.nbytes <= _BYTES_MAX:
            raise MisuseError(f"region {self.name!r} has {self.nbytes} B; at most {_BYTES_MAX} are possible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One rank's piece of one component, for some of its layers.

    Attributes:
        component: name in the spec.
        layers: model layer numbers held, ascending; ``regions`` and ``offsets`` run parallel to it.
        box: the part of the component's axes that this rank holds.
        dtype: what is stored, as the live engine says.
        table: the page table (or slot table) whose entries index pages; engines have one per cache group.
        regions: per layer, index into RankLayout.regions.
        offsets: per layer, bytes from the region's base to the box's first element in page 0.
        strides: bytes, one per axis of the component.
        row_stride: bytes between rows of one page; 0 for per-request components.
        page_rows: rows in a page; 1 for per-request components.
        page_stride: bytes between pages (slots).
        pages: number of pages (slots).
        tokens: rows that this rank owns under context parallelism.
        record_format: name of an opaque record format, or ""; equal names move as bytes.
        accepts: dtypes of the other side that this side agrees to convert with; conversion needs both sides' consent.
    """

    component: str
    layers: tuple[int, ...]
    box: Box
    dtype: str
    table: str
    regions: tuple[int, ...]
    offsets: tuple[int, ...]
    strides: tuple[int, ...]
    page_stride: int
    pages: int
    row_stride: int = 0
    page_rows: int = 1
    tokens: TokenOwnership = field(default_factory=TokenOwnership)
    record_format: str = ""
    accepts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise MisuseError(f"{self.component}: dtype {self.dtype!r} is unknown; known are {sorted(DTYPE_BYTES)}")
        if not len(self.layers) == len(self.regions) == len(self.offsets) > 0 or list(self.layers) != sorted(
            set(self.layers)
        ):
            raise MisuseError(f"{self.component}: layers, regions and offsets must run parallel, layers ascending")
        if len(self.strides) != len(self.box.starts):
            raise MisuseError(f"{self.component}: {len(self.strides)} strides for {len(self.box.starts)} axes")
        if (
            min(self.strides, default=1) < 1
            or min(self.offsets) < 0
            or min(self.page_stride, self.pages, self.page_rows) < 1
        ):
            raise MisuseError(f"{self.component}: strides, page_stride, pages and page_rows must be positive")
        sizes = (*self.strides, *self.offsets, self.row_stride, self.page_stride, self.pages, self.page_rows)
        if max(sizes) > _BYTES_MAX:
            raise MisuseError(f"{self.component}: a stride, offset or count is beyond {_BYTES_MAX}")
        self._check_no_overlap()

    def _check_no_overlap(self) -> None:
        """Elements must not share bytes: each stride must jump over all that smaller strides reach."""
        reach = self.itemsize
        for stride, extent in sorted(self._dimensions()):
            if extent > 1 and stride < reach:
                raise MisuseError(f"{self.component}: a stride of {stride} B runs into {reach} B of smaller axes")
            reach += stride * (extent - 1)

    def _dimensions(self) -> Iterator[tuple[int, int]]:
        yield from zip(self.strides, self.box.shape, strict=True)
        yield self.row_stride, self.page_rows
        yield self.page_stride, self.pages

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def span(self) -> int:
        """Bytes from the first to past the last element over all pages of one layer."""
        return self.itemsize + sum(stride * (extent - 1) for stride, extent in self._dimensions())

    def at(self, layer: int) -> tuple[int, int]:
        """Region index and byte offset of ``layer``."""
        i = self.layers.index(layer)
        return self.regions[i], self.offsets[i]


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """All that one rank holds. ``host`` groups ranks that share a machine (an index, not a name)."""

    rank: int
    regions: tuple[RegionShape, ...]
    holdings: tuple[Holding, ...]
    host: int = 0

    def __post_init__(self) -> None:
        for h in self.holdings:
            for region, offset in zip(h.regions, h.offsets, strict=True):
                if not 0 <= region < len(self.regions):
                    raise MisuseError(f"rank {self.rank}, {h.component}: there is no region {region}")
                if offset + h.span > self.regions[region].nbytes:
                    shape = self.regions[region]
                    raise MisuseError(
                        f"rank {self.rank}, {h.component}: {h.pages} pages end at byte {offset + h.span}"
                        f" of region {shape.name!r} with {shape.nbytes} B"
                    )

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is its inverse."""
        found: dict[str, Any] = json.loads(_rank_text(self, {}))
        return found

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RankLayout:
        """Rebuild one rank's layout; raises MisuseError for anything impossible."""
        try:
            return _rank_from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MisuseError(f"not a rank's layout: {type(error).__name__} {error}") from error

    def tables(self) -> dict[str, Holding]:
        """Page tables by name, each with one of the holdings it indexes."""
        return {h.table: h for h in self.holdings}

    @cached_property
    def addressing(self) -> tuple[int, ...]:
        """Of each holding a number, equal where rows lie alike in pages: then one request's offsets are equal."""
        known: dict[object, int] = {}
        alike = ((h.table, h.page_rows, h.page_stride, h.row_stride, h.pages, h.tokens) for h in self.holdings)
        return tuple(known.setdefault(how, len(known)) for how in alike)

    def pools(self) -> dict[str, str]:
        """Table name to pool name: tables whose stretches of one region overlap draw their pages from one pool.

        In unified placement an attention page and a state page are the same bytes, so a page number
        may be in only one table at a time. Tables that merely share an allocation do not meet.
        """
        return dict(self._pools)

    @cached_property
    def _pools(self) -> dict[str, str]:
        pools = {name: name for name in self.tables()}
        reach_region, reach, first = -1, 0, ""
        for region, start, stop, table in sorted(self._stretches()):
            if region != reach_region or start >= reach:
                reach_region, reach, first = region, stop, table
                continue
            reach = max(reach, stop)
            old, new = pools[table], pools[first]
            if old != new:
                pools = {name: new if pool == old else pool for name, pool in pools.items()}
        return pools

    def pages_per_unit(self) -> dict[str, int]:
        """Table name to how many of its pages lie in one unit of its pool, which is a page of the pool's largest table.

        vLLM addresses attention in kernel pages and state in whole blocks of the same memory::

            state table      |-------- page 0 --------|-------- page 1 --------|
            attention table  |  0  |  1  |  2  |  3  |  4  |  5  |  6  |  7  |      4 pages per unit

        Tables of a pool meet exactly where they name the same unit; all of an ``entangled`` pool is one unit.
        """
        return dict(self._per_unit)

    def entangled(self) -> list[str]:
        """Tables of pools whose pages are not nested like that, so that two pages may meet whatever their numbers."""
        return [table for table, pages in self._per_unit.items() if pages == _BYTES_MAX]

    @cached_property
    def _per_unit(self) -> dict[str, int]:
        members: dict[str, list[Holding]] = {}
        for h in self.holdings:
            members.setdefault(self._pools[h.table], []).append(h)
        return {table: pages for holdings in members.values() for table, pages in _pages_per_unit(holdings).items()}

    def _stretches(self) -> Iterator[tuple[int, int, int, str]]:
        """Of every layer of every holding: region, first byte, byte past the last, table."""
        for h in self.holdings:
            span = h.span
            for region, offset in zip(h.regions, h.offsets, strict=True):
                yield region, offset, offset + span, h.table


def _pages_per_unit(holdings: Sequence[Holding]) -> dict[str, int]:
    """Of one pool's tables."""
    strides: dict[str, set[int]] = {}
    for h in holdings:
        strides.setdefault(h.table, set()).add(h.page_stride)
    if len(strides) == 1:
        return dict.fromkeys(strides, 1)
    unit = max(map(max, strides.values()))
    even = all(len(found) == 1 and unit % min(found) == 0 for found in strides.values())
    if not even or not _aligned(holdings):
        return dict.fromkeys(strides, _BYTES_MAX)
    return {table: unit // min(found) for table, found in strides.items()}


def _aligned(holdings: Sequence[Holding]) -> bool:
    """Whether all pages 0 of what overlaps can begin at one byte, so that no page reaches out of its own stride.

    ::

        stride      |----- page 0 -----|----- page 1 -----|       of every table, from the same byte on
        a holding       |bytes|            |bytes|
        may begin   [...]^offset         from the offset back to where the bytes would still fit
    """
    low = high = stop = 0
    last = -1
    for region, offset, end, slack in sorted(
        (region, offset, offset + h.span, h.page_stride * h.pages - h.span)
        for h in holdings
        for region, offset in zip(h.regions, h.offsets, strict=True)
    ):
        if region != last or offset >= stop:
            last, stop, low, high = region, end, offset - slack, offset
        low, high, stop = max(low, offset - slack), min(high, offset), max(stop, end)
        if low > high:
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How one worker holds a spec's components. Frozen; ``digest`` names it.

    Attributes:
        spec: the caches described.
        ranks: one RankLayout per rank, rank i at index i.
    """

    spec: CacheSpec
    ranks: tuple[RankLayout, ...]

    def __post_init__(self) -> None:
        if not self.ranks or [r.rank for r in self.ranks] != list(range(len(self.ranks))):
            raise MisuseError("ranks must be numbered 0, 1, ... in order")
        for rank in self.ranks:
            for holding in rank.holdings:
                self._check(rank.rank, self.spec[holding.component], holding)

    @staticmethod
    def _check(rank: int, component: Component, holding: Holding) -> None:
        where = f"rank {rank}, {component.name}"
        if missing := set(holding.layers) - set(component.layers):
            raise MisuseError(f"{where}: layers {sorted(missing)} don't have this component")
        if len(holding.box.starts) != len(component.axes) or not Box(
            (0,) * len(component.shape), component.shape
        ).contains(holding.box):
            raise MisuseError(f"{where}: box {holding.box} is outside the component's {component.shape}")
        if component.growth is Growth.PER_REQUEST and (holding.page_rows != 1 or holding.tokens.size != 1):
            raise MisuseError(f"{where}: a per-request component has one row and no token ownership")
        if component.growth is not Growth.PER_REQUEST and holding.page_rows > 1 and holding.row_stride < 1:
            raise MisuseError(f"{where}: rows of a page need a row_stride")

    def __len__(self) -> int:
        return len(self.ranks)

    @cached_property
    def digest(self) -> str:
        """Hex digest of the canonical JSON form; equal to ``canonical_digest(self.to_json())``."""
        return hashlib.blake2b(self.to_bytes(), digest_size=16).hexdigest()

    @cached_property
    def request_sizes(self) -> RequestSizes:
        """What ``spec.request_bytes`` needs to say how long a request is, in the dtypes stored here."""
        dtypes = {h.component: h.dtype for rank in reversed(self.ranks) for h in rank.holdings}
        return tuple(
            (
                0 if c.growth is Growth.PER_REQUEST else c.tokens_per_row,
                c.window,
                len(c.layers) * c.row_elems * DTYPE_BYTES[dtypes.get(c.name, c.dtype)],
            )
            for c in self.spec.components
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is its inverse."""
        found: dict[str, Any] = json.loads(self.to_bytes())
        return found

    def to_bytes(self) -> bytes:
        """Canonical JSON as UTF-8, as Describe carries it."""
        known: dict[object, str] = {}
        ranks = ",".join(_rank_text(rank, known) for rank in self.ranks)
        return f'{{"ranks":[{ranks}],"spec":{_text_of(self.spec.to_json())}}}'.encode()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        """Rebuild a layout from a peer's or a file's JSON; raises MisuseError for anything impossible."""
        try:
            return cls(spec=CacheSpec.from_json(data["spec"]), ranks=tuple(_rank_from_json(r) for r in data["ranks"]))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise MisuseError(f"not a layout: {type(error).__name__} {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Inverse of ``to_bytes``; raises MisuseError."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MisuseError(f"not a layout: {error}") from error
        return cls.from_json(value)


def _int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected an integer, got {value!r}")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(map(_int, values))


_FIELDS = tuple(sorted(f.name for f in fields(Holding)))
# The canonical text, written out: ranks share most of their numbers, and the digest would cost more than the plan.


def _text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _text(value: object, known: dict[object, str]) -> str:
    found = known.get(value)
    if found is None:
        found = known[value] = _text_of(value)
    return found


def _rank_text(rank: RankLayout, known: dict[object, str]) -> str:
    holdings = ",".join(_holding_text(h, known) for h in rank.holdings)
    regions = ",".join(f'{{"name":{_text(r.name, known)},"nbytes":{r.nbytes}}}' for r in rank.regions)
    return f'{{"holdings":[{holdings}],"host":{rank.host},"rank":{rank.rank},"regions":[{regions}]}}'


def _holding_text(holding: Holding, known: dict[object, str]) -> str:
    box, tokens = holding.box, holding.tokens
    written = {
        "box": f'{{"starts":{_text(box.starts, known)},"stops":{_text(box.stops, known)}}}',
        "tokens": f'{{"index":{tokens.index},"interleave":{tokens.interleave},"size":{tokens.size}}}',
    }
    texts = [f'"{name}":{written.get(name) or _text(getattr(holding, name), known)}' for name in _FIELDS]
    return "{" + ",".join(texts) + "}"


def _rank_from_json(data: Mapping[str, Any]) -> RankLayout:
    regions = tuple(RegionShape(name=str(r["name"]), nbytes=_int(r["nbytes"])) for r in data["regions"])
    holdings = tuple(_holding_from_json(h) for h in data["holdings"])
    return RankLayout(rank=_int(data["rank"]), host=_int(data["host"]), regions=regions, holdings=holdings)


def _holding_from_json(data: Mapping[str, Any]) -> Holding:
    plain: dict[str, Any] = {name: str(data[name]) for name in ("component", "dtype", "table", "record_format")}
    plain |= {name: _ints(data[name]) for name in ("layers", "regions", "offsets", "strides")}
    plain |= {name: _int(data[name]) for name in ("row_stride", "page_rows", "page_stride", "pages")}
    return Holding(
        **plain,
        box=Box(_ints(data["box"]["starts"]), _ints(data["box"]["stops"])),
        tokens=TokenOwnership(**{name: _int(data["tokens"][name]) for name in ("interleave", "size", "index")}),
        accepts=tuple(str(a) for a in data["accepts"]),
    )


def boxes_cover(whole: Box, parts: list[Box]) -> bool:
    """Whether ``parts`` lie inside ``whole``, are disjoint, and have its volume: the proof of exact cover."""
    inside = all(whole.contains(p) for p in parts)
    disjoint = not any(a.overlaps(b) for a, b in itertools.combinations(parts, 2))
    return inside and disjoint and sum(p.volume for p in parts) == whole.volume
