"""Footprint: whether two pieces of a rank's memory share a byte.

In come holdings, out comes the first pair of tensors that would be written over each other. This file knows strides
and pages, no plan and no address. A layout checks that one tensor's own elements lie apart; that a layer's K does not
lie on its V is found here, before anything is written there.

::

    one page    |<- kv.k, layer 2 ->|<- kv.v, layer 2 ->|<- kv.k, layer 5 ->| ...      apart
    tables of   | kv    page 7      | state slot 8      |                              take turns on equal pages
    one pool    | state slot 7      | kv    page 8      |
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from pdxfer.layout import Holding, RankLayout

__all__ = ["Footprints"]

_STEPS_MAX = 200_000  # about a fifth of a second; what takes longer is no engine's layout, and counts as sharing

Grid = tuple[tuple[int, int], ...]  # (stride, extent) per dimension, bytes of an element among them


@dataclass(frozen=True, slots=True)
class _Tensor:
    """One layer of one holding; bytes of its page 0 lie in [start, stop), all of them in [start, end)."""

    holding: Holding
    layer: int
    start: int
    stop: int
    end: int
    grid: Grid

    @property
    def pages(self) -> tuple[int, int]:
        return self.holding.page_stride, self.holding.pages


class Footprints:
    """Looks for tensors that are stored over each other, with a bound on the work for all ranks it is asked about."""

    def __init__(self) -> None:
        self._steps = 0
        self._known: dict[object, bool] = {}
        self._clean: set[object] = set()

    def first_collision(self, rank: RankLayout) -> tuple[tuple[str, int], tuple[str, int]] | None:
        """The first two (component, layer) of a rank that share a byte, or None.

        Pages of different tables may be the same bytes where their units say so: no request uses a unit in two tables.
        """
        shape = tuple(_shape(h) for h in rank.holdings)  # ranks differ in what they hold, rarely in where it lies
        if shape in self._clean:
            return None
        entangled = {*rank.entangled()}
        for tensors in _by_region(rank):
            for a, b in _near(tensors, entangled):
                self._steps += 1
                if self._collide(a, b):
                    return (a.holding.component, a.layer), (b.holding.component, b.layer)
        self._clean.add(shape)
        return None

    def _collide(self, a: _Tensor, b: _Tensor) -> bool:
        distance = b.start - a.start
        if a.pages == b.pages or a.pages[0] == b.pages[0]:
            stride, least, most = a.pages[0], 1 - b.pages[1], a.pages[1] - 1  # a's page number less b's
            if a.holding.table == b.holding.table:
                return self.share(a.grid, b.grid, distance, stride, least, most)
            behind = least < 0 and self.share(a.grid, b.grid, distance, stride, least, -1)
            return behind or (most > 0 and self.share(a.grid, b.grid, distance, stride, 1, most))
        return self.share((*a.grid, a.pages), (*b.grid, b.pages), distance)

    def share(self, a: Grid, b: Grid, distance: int, stride: int = 1, least: int = 0, most: int = 0) -> bool:
        """Whether two grids, b's first byte ``distance`` behind a's, have a byte in common.

        Args:
            stride, least, most: a may also be moved by ``least`` to ``most`` strides.
        """
        key = (a, b, distance, stride, least, most)
        if key not in self._known:
            bounds: dict[int, list[int]] = defaultdict(lambda: [0, 0])
            for step, extent in a:
                bounds[step][1] += extent - 1
            for step, extent in b:
                bounds[step][0] -= extent - 1
            bounds[stride][0] += least
            bounds[stride][1] += most
            terms = sorted(((step, lo, hi) for step, (lo, hi) in bounds.items()), reverse=True)
            self._known[key] = self._reachable(distance, terms)
        return self._known[key]

    def _reachable(self, rest: int, terms: Sequence[tuple[int, int, int]]) -> bool:
        """Whether ``rest`` is a sum of one multiple of each term's stride, each multiple within its bounds."""
        self._steps += 1
        if not terms or self._steps > _STEPS_MAX:
            return rest == 0 or self._steps > _STEPS_MAX
        (stride, low, high), smaller = terms[0], terms[1:]
        least, most = sum(s * lo for s, lo, _ in smaller), sum(s * hi for s, _, hi in smaller)
        low, high = max(low, -((most - rest) // stride)), min(high, (rest - least) // stride)
        return any(self._reachable(rest - stride * n, smaller) for n in range(low, high + 1))


def _shape(h: Holding) -> object:
    within = h.itemsize, h.strides, h.box.shape, h.row_stride, h.page_rows
    return h.table, h.regions, h.offsets, h.page_stride, h.pages, within


def _by_region(rank: RankLayout) -> Iterable[list[_Tensor]]:
    regions: dict[int, list[_Tensor]] = defaultdict(list)
    for h in rank.holdings:
        dimensions = ((1, h.itemsize), *zip(h.strides, h.box.shape, strict=True), (h.row_stride, h.page_rows))
        grid = tuple((stride, extent) for stride, extent in dimensions if extent > 1)
        reach = 1 + sum(stride * (extent - 1) for stride, extent in grid)
        for layer, region, offset in zip(h.layers, h.regions, h.offsets, strict=True):
            regions[region].append(_Tensor(h, layer, offset, offset + reach, offset + h.span, grid))
    return regions.values()


def _near(tensors: list[_Tensor], entangled: set[str]) -> Iterator[tuple[_Tensor, _Tensor]]:
    """Pairs that may share bytes: few, since tensors that lie one after the other in every page are left out."""
    tables: dict[str, list[_Tensor]] = defaultdict(list)
    for tensor in tensors:
        tables[tensor.holding.table].append(tensor)
    for group in tables.values():
        yield from _sweep(group, page_by_page=_alike(group))
    for a, b in _sweep([t for t in tensors if t.holding.table in entangled], page_by_page=False):
        if a.holding.table != b.holding.table:
            yield a, b


def _alike(tensors: list[_Tensor]) -> bool:
    """Whether all have pages of one size, and page 0 of all of them fits into that size."""
    strides = {t.holding.page_stride for t in tensors}
    return len(strides) == 1 and max(t.stop for t in tensors) - min(t.start for t in tensors) <= min(strides)


def _sweep(tensors: list[_Tensor], *, page_by_page: bool) -> Iterator[tuple[_Tensor, _Tensor]]:
    underway: list[_Tensor] = []
    for tensor in sorted(tensors, key=lambda t: t.start):
        underway = [t for t in underway if (t.stop if page_by_page else t.end) > tensor.start]
        for other in underway:
            yield other, tensor
        underway.append(tensor)
