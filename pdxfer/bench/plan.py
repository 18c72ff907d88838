"""Bench of plans: a 64-layer hybrid, 16 ranks to 16, in every placement.

In come repeats; out come rows of times and counts. *Cold* is all that two workers pay once when they meet: both
layout digests, the plan with its proof, and the plan digest, on layouts never seen before. *Per request* is all that
one target rank does for one request before its first byte moves: the program (rows, segments, chunks) of every edge
that ends at it, and its page tables applied at both ends. How both grow with ranks, layers and tokens is measured in
the first placement.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdxfer.bench.measure import Samples, Tick, contiguous_copy
from pdxfer.builders import PLACEMENTS, Parallel, Storage, build_layout
from pdxfer.errors import MisuseError
from pdxfer.kernels import Offsets
from pdxfer.layout import Layout, RankLayout
from pdxfer.models import load_config, spec_from_config
from pdxfer.packing import EdgeProgram
from pdxfer.pages import Buffers, RequestShape, Side
from pdxfer.plan import Edge, Plan, make_plan
from pdxfer.spec import CacheSpec

__all__ = ["COLD_TARGET_MS", "REQUEST_TARGET_MS", "PlanOptions", "bench_plan", "growth_points"]

COLD_TARGET_MS = 50.0
REQUEST_TARGET_MS = 1.0
_CHUNK_BYTES = 8 << 20
_PRESET = "qwen3-next-80b-a3b"
_UNSEEN = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is planned."""

    layers: int = 64
    ranks: int = 16
    tokens: int = 32768
    page_tokens: int = 16
    repeats: int = 15
    megabytes: int = 256

    def __post_init__(self) -> None:
        if self.layers < 4 or min(self.ranks, self.tokens, self.page_tokens, self.repeats, self.megabytes) < 1:
            raise MisuseError(f"at least 4 layers, and one of everything else, not {self}")


def bench_plan(options: PlanOptions, tick: Tick) -> dict[str, Any]:
    """Measure; returns a JSON-ready value with one row per placement."""
    rows = [_placement(options, placement, tick) for placement in PLACEMENTS]
    flat = [_flat(row, options, "") for row in rows] + list(_growth(options, tick))
    tick("contiguous copy")
    nbytes = options.megabytes << 20
    copied = {"nbytes": nbytes, "gb_per_s": contiguous_copy(nbytes, options.repeats) / 1e9}
    return {
        "what": f"{_PRESET} with {options.layers} layers, {options.ranks} ranks to {options.ranks}, one host each, "
        f"{options.tokens} tokens at {options.page_tokens}-token pages",
        "targets": {"cold_ms": COLD_TARGET_MS, "request_ms": REQUEST_TARGET_MS},
        "placements": rows,
        "rows": flat,
        "contiguous_copy": copied,
    }


def growth_points(options: PlanOptions) -> list[tuple[str, PlanOptions]]:
    """What grows, and sizes up to those asked for (four times as many tokens), with fewer repeats."""
    some = replace(options, repeats=max(2, options.repeats // 5))
    ranks = {max(1, options.ranks // n) for n in (8, 4, 2, 1)}
    layers = {max(4, options.layers // n) for n in (4, 2, 1)}
    tokens = {max(1, int(options.tokens * n)) for n in (0.25, 1, 4)}
    sizes = (("ranks", ranks), ("layers", layers), ("tokens", tokens))
    return [(what, replace(some, **{what: n})) for what, values in sizes for n in sorted(values)]


def _growth(options: PlanOptions, tick: Tick) -> Iterator[dict[str, Any]]:
    for what, point in growth_points(options):
        yield _flat(_placement(point, PLACEMENTS[0], tick), point, what)


def _flat(row: Mapping[str, Any], options: PlanOptions, growth: str) -> dict[str, Any]:
    times = {f"{part}_{q}_ms": row[part][f"{q}_ms"] for part in ("cold", "request") for q in ("p50", "p90", "p99")}
    sizes = {"ranks": options.ranks, "layers": options.layers, "tokens": options.tokens}
    return {"placement": row["placement"], **sizes, "growth": growth, **times, **row["counts"]}


def _layouts(spec: CacheSpec, options: PlanOptions, placement: str) -> tuple[Layout, Layout]:
    """Two workers' layouts that no cache has seen: every pair has another number of pages."""
    pages = 2 * -(-options.tokens // options.page_tokens) + 64 + next(_UNSEEN)
    here = Storage(page_tokens=options.page_tokens, pages=pages)
    there = Storage(page_tokens=options.page_tokens, pages=pages, kv_order="HND", conv_order="TC", state_order="VK")
    parallel = Parallel(tp=options.ranks)
    return build_layout(spec, parallel, here, placement), build_layout(spec, parallel, there, placement)


def _placement(options: PlanOptions, placement: str, tick: Tick) -> dict[str, Any]:
    spec = spec_from_config({**load_config(_PRESET), "num_hidden_layers": options.layers})
    parts = {name: Samples() for name in ("layout_digests", "plan", "plan_digest", "cold")}
    found: list[Plan] = []
    for number in range(options.repeats + 1):
        tick(f"{placement}: cold plan")
        pair = _layouts(spec, options, placement)
        into = parts if number else {name: Samples() for name in parts}
        into["cold"].time(lambda pair=pair, into=into: found.append(_plan_cold(pair, into)))  # type: ignore[misc]
    plan = found[-1]
    rank = max(range(options.ranks), key=lambda r: sum(edge.target == r for edge in plan.edges))
    work = _RankWork(plan, rank, options)
    request = Samples()
    for number in range(4 * options.repeats):
        tick(f"{placement}: request")
        shape = RequestShape(kv_tokens=max(1, options.tokens - number))  # no two alike, so nothing is remembered
        request.time(lambda shape=shape: work.run(shape))  # type: ignore[misc]
    return {
        "placement": placement,
        **{name: samples.to_json() for name, samples in parts.items()},
        "request": request.to_json(),
        "counts": {"items": len(plan.items), "edges": len(plan.edges), **work.counts()},
    }


def _plan_cold(pair: tuple[Layout, Layout], parts: Mapping[str, Samples]) -> Plan:
    """What two workers pay once: on layouts whose digests were never asked for."""
    found: list[Plan] = []
    parts["layout_digests"].time(lambda: [layout.digest for layout in pair])
    parts["plan"].time(lambda: found.append(make_plan(*pair)))
    parts["plan_digest"].time(lambda: found[0].digest)
    return found[0]


class _RankWork:
    """All that one target rank does for a request before the first byte moves."""

    def __init__(self, plan: Plan, rank: int, options: PlanOptions) -> None:
        self.plan, self.rank, self.options = plan, rank, options
        self.edges = [edge for edge in plan.edges if edge.target == rank]
        rng = np.random.default_rng(0)
        self.target = plan.target.ranks[rank]
        self.tables = _tables(self.target, options.tokens, rng)
        self.sources = {edge: (plan.target if edge.relay else plan.source).ranks[edge.source] for edge in self.edges}
        self.source_tables = {edge: _tables(layout, options.tokens, rng) for edge, layout in self.sources.items()}
        self.buffers = {id(layout): _no_memory(layout) for layout in (self.target, *self.sources.values())}

    def run(self, shape: RequestShape) -> list[EdgeProgram]:
        """Programs of all edges, with both ends' pages applied."""
        target = Side(self.target, self.buffers[id(self.target)], self.tables)
        return [self._edge(edge, shape, target) for edge in self.edges]

    def _edge(self, edge: Edge, shape: RequestShape, target: Side) -> EdgeProgram:
        layout = self.sources[edge]
        program = EdgeProgram(self.plan, edge, shape, chunk_bytes=_CHUNK_BYTES)
        program.address(Side(layout, self.buffers[id(layout)], self.source_tables[edge]), target)
        return program

    def counts(self) -> dict[str, int]:
        """What one request is made of, for this rank."""
        programs = self.run(RequestShape(kv_tokens=self.options.tokens))
        return {
            "target_rank": self.rank,
            "rank_edges": len(self.edges),
            "rank_chunks": sum(len(p.chunks) for p in programs),
            "rank_segments": sum(len(c.segments) for p in programs for c in p.chunks),
            "rank_payload_bytes": sum(p.payload_bytes for p in programs),
            "rank_pages": sum(len(t) for t in self.tables.values())
            + sum(len(t) for tables in self.source_tables.values() for t in tables.values()),
        }


def _no_memory(layout: RankLayout) -> Buffers:
    """Addressing touches no memory; a rank has its buffers, made once, anyhow."""
    return Buffers(np.empty(0, np.uint8) for _ in layout.regions)


def _tables(layout: RankLayout, tokens: int, rng: np.random.Generator) -> dict[str, Offsets]:
    """Scattered pages for every table."""
    found = {}
    for name, holding in layout.tables().items():
        count = 1 if holding.row_stride == 0 else -(-tokens // holding.page_rows)
        found[name] = rng.permutation(holding.pages)[:count].astype(np.int64)
    return found
