"""Case: which bytes a bench moves: a model, two workers, requests of some length, and pages scattered by a seed.

In come numbers; out come layouts, page tables and what every byte must be. Every end of a bench works them out for
itself from the same case. Contents are a function of (request, component, layer, row, element), so a byte that ends in
the wrong place is seen; nothing here knows the planner or the packer, which are what is measured.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import CorruptError, MisuseError
from pdxfer.layout import Holding, Layout, RankLayout
from pdxfer.models import load_config, spec_from_config
from pdxfer.pages import RequestShape
from pdxfer.sizing import parse_bytes
from pdxfer.spec import Axis, CacheSpec, Component, Growth, Ownership, Rule

__all__ = ["Case", "End", "Tables", "check", "fill", "load_spec"]

End = Literal["prefill", "decode"]
Tables = dict[str, npt.NDArray[np.int64]]

_NOISE_BYTES = 8 << 20
_FRAGMENT_LAYERS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is moved. ``page_tokens`` and ``decode_page_tokens`` are of either worker (0: as the other's).

    Attributes:
        fragmentation: share of neighbouring pages in a page table that do not lie side by side; 1 is a random
            permutation, 0 one stretch.
        concurrency: requests at once, each of ``tokens`` tokens.
    """

    spec: CacheSpec
    tokens: int
    prefill_tp: int = 1
    decode_tp: int = 1
    page_tokens: int = 16
    decode_page_tokens: int = 0
    concurrency: int = 1
    fragmentation: float = 1.0
    seed: int = 0
    placement: str = "per_layer"

    def __post_init__(self) -> None:
        counts = self.tokens, self.prefill_tp, self.decode_tp, self.page_tokens, self.concurrency
        if min(counts) < 1 or self.decode_page_tokens < 0 or not 0 <= self.fragmentation <= 1:
            what = f"{counts}, fragmentation {self.fragmentation}"
            raise MisuseError(f"tokens, TP, page tokens and concurrency are at least 1, fragmentation 0 to 1: {what}")
        for tp in (self.prefill_tp, self.decode_tp):
            if why := self.spec.why_not_tp(tp):
                raise MisuseError(f"TP {tp} is impossible for this model: {why}")

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is its inverse."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"spec": self.spec.to_json()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """Rebuild a case; raises MisuseError."""
        try:
            return cls(**{**data, "spec": CacheSpec.from_json(data["spec"])})
        except (TypeError, KeyError) as error:
            raise MisuseError(f"not a bench's case: {error}") from error

    @property
    def shape(self) -> RequestShape:
        """Every request's."""
        return RequestShape(kv_tokens=self.tokens, state_tokens=self.tokens)

    def layout(self, end: End) -> Layout:
        """One worker's layout, with room for all requests and some more."""
        return _layout(self, end)

    def tables(self, end: End, request: int) -> Tables:
        """One request's pages, the same on every rank of a worker, as in engines."""
        return _tables(self, end)[request]


def load_spec(model: str, *, page_tokens: int, layers: int = 0) -> CacheSpec:
    """The caches of a preset, a config.json, or ``fragments-SIZE``: ten layers of pages of SIZE each.

    Args:
        layers: keep only the model's first so many; 0 keeps all.
    """
    if size := re.fullmatch(r"fragments-(\w+)", model):
        return _fragments(parse_bytes(size[1]), page_tokens)
    spec = spec_from_config(load_config(model))
    if not 0 < layers < spec.num_layers:
        return spec
    held = ((c, tuple(x for x in c.layers if x < layers)) for c in spec.components)
    components = tuple(replace(c, layers=kept) for c, kept in held if kept)
    return replace(spec, num_layers=layers, components=components)


def _fragments(nbytes: int, page_tokens: int) -> CacheSpec:
    dim, rest = divmod(nbytes, 2 * page_tokens)
    if rest or not dim:
        raise MisuseError(f"fragments of {nbytes} B are not {page_tokens} rows of whole bfloat16")
    rows = Component(
        name="kv.k",
        layers=tuple(range(_FRAGMENT_LAYERS)),
        axes=(Axis(name="heads", extent=1), Axis(name="dim", extent=dim)),
        dtype="bfloat16",
        growth=Growth.PER_TOKEN,
        ownership=Ownership(rule=Rule.EXTENDED, axis="heads", units=1),
    )
    return CacheSpec(model="fragments", num_layers=_FRAGMENT_LAYERS, query_heads=0, components=(rows,))


# -- where it lies -------------------------------------------------------------------------------


@lru_cache(maxsize=32)
def _layout(case: Case, end: End) -> Layout:
    tp = case.prefill_tp if end == "prefill" else case.decode_tp
    page_tokens = case.page_tokens if end == "prefill" else case.decode_page_tokens or case.page_tokens
    storage = Storage(page_tokens=page_tokens, pages=1, slots=1)
    rank = build_layout(case.spec, Parallel(tp=tp), storage, case.placement).ranks[0]
    pools: dict[str, int] = {}
    for table, count in _pages(rank, case).items():
        pool = rank.pools()[table]
        pools[pool] = pools.get(pool, 0) + count * case.concurrency
    pages = max(pools.values(), default=1)
    storage = replace(storage, pages=pages + pages // 8 + 1, slots=case.concurrency + 2)
    return build_layout(case.spec, Parallel(tp=tp), storage, case.placement)


def _pages(rank: RankLayout, case: Case) -> dict[str, int]:
    """Pages that one request needs, by table."""
    found: dict[str, int] = {}
    for h in rank.holdings:
        _, stop = case.shape.rows(case.spec[h.component])
        found[h.table] = max(found.get(h.table, 0), -(-stop // h.page_rows))
    return found


@lru_cache(maxsize=32)
def _tables(case: Case, end: End) -> list[Tables]:
    rank = case.layout(end).ranks[0]
    rng = np.random.default_rng([case.seed, end == "decode"])
    free: dict[str, npt.NDArray[np.int64]] = {}
    found: list[Tables] = [{} for _ in range(case.concurrency)]
    for tables in found:
        for name, count in _pages(rank, case).items():
            pool = rank.pools()[name]
            if pool not in free:
                free[pool] = _scattered(rank.tables()[name].pages, case.fragmentation, rng)
            tables[name], free[pool] = free[pool][:count], free[pool][count:]
    return found


def _scattered(pages: int, fragmentation: float, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """All page numbers, cut at random places and shuffled."""
    cuts = np.flatnonzero(rng.random(pages - 1) < fragmentation) + 1
    stretches = np.split(np.arange(pages, dtype=np.int64), cuts)
    return np.concatenate([stretches[i] for i in rng.permutation(len(stretches))])


# -- what it holds -------------------------------------------------------------------------------


def fill(case: Case, end: End, rank: int, buffers: Sequence[Any]) -> None:
    """Write every request's part of a rank into its memory."""
    for holding, layer, request, view, at, wanted in _pieces(case, end, rank, buffers):
        del holding, layer, request
        view[at] = wanted


def check(case: Case, end: End, rank: int, buffers: Sequence[Any]) -> int:
    """Compare a rank's memory with what every request must be; returns the bytes compared.

    Raises:
        CorruptError: names component, layer, row and coordinates of the first element that is wrong.
    """
    nbytes = 0
    for holding, layer, request, view, at, wanted in _pieces(case, end, rank, buffers):
        found = view[at]
        nbytes += found.nbytes
        if not np.array_equal(found, wanted):
            row, *inner = (int(x) for x in np.argwhere(found != wanted)[0])
            row += case.shape.rows(case.spec[holding.component])[0]
            place = tuple(start + x for start, x in zip(holding.box.starts, inner, strict=True))
            where = f"request {request}, layer {layer}, row {row}, at {place} on {end} rank {rank}"
            raise CorruptError(holding.component, f"the bytes did not come as they were ({where})")
    return nbytes


def _pieces(case: Case, end: End, rank: int, buffers: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Per holding, layer and request: (holding, layer, request, all pages, index of the request's rows, contents)."""
    for h in case.layout(end).ranks[rank].holdings:
        component = case.spec[h.component]
        rows = np.arange(*case.shape.rows(component), dtype=np.int64)
        box = (slice(None), *(slice(a, b) for a, b in zip(h.box.starts, h.box.stops, strict=True)))
        for layer in h.layers:
            view = _view(h, layer, buffers)
            for request in range(case.concurrency):
                pages = case.tables(end, request)[h.table][rows // h.page_rows]
                wanted = _content(case, component, h, layer, request, len(rows))[box]
                yield h, layer, request, view, (pages, rows % h.page_rows), wanted


def _view(h: Holding, layer: int, buffers: Sequence[Any]) -> npt.NDArray[Any]:
    """[pages, rows of a page, *box] of one layer."""
    region, offset = h.at(layer)
    shape, strides = (h.pages, h.page_rows, *h.box.shape), (h.page_stride, h.row_stride, *h.strides)
    view: npt.NDArray[Any] = np.ndarray(shape, f"u{h.itemsize}", buffers[region], offset, strides)
    return view


@lru_cache(maxsize=4)
def _noise(seed: int) -> npt.NDArray[np.uint8]:
    return np.frombuffer(np.random.default_rng([seed, 2]).bytes(2 * _NOISE_BYTES), np.uint8)


def _content(case: Case, component: Component, h: Holding, layer: int, request: int, rows: int) -> npt.NDArray[Any]:
    """[rows, *axes] of one layer of one request, globally: noise from a place that depends on all of these."""
    start = zlib.crc32(f"{request}/{component.name}/{layer}".encode()) % (_NOISE_BYTES // 16) * 16
    nbytes = rows * component.row_elems * h.itemsize
    noise = np.resize(_noise(case.seed)[start:], nbytes).view(f"u{h.itemsize}")
    found: npt.NDArray[Any] = noise.reshape(rows, *component.shape)
    return found
