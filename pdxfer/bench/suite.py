"""The reference suite: what hand-offs promise, each promise measured and judged in one run.

In come a number of runs and which groups; out come all rows, and one line per promise with the value, the target and
whether it holds. A line about what is not here (a transport that is not installed) says so instead.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdxfer.bench.case import Case, load_spec
from pdxfer.bench.ceiling import HOST_MEMORY
from pdxfer.bench.handoff import Options, bench_handoff
from pdxfer.bench.measure import Tick
from pdxfer.bench.peer import Clock
from pdxfer.bench.ranks import Way
from pdxfer.errors import MisuseError, PdxferError
from pdxfer.spec import DTYPE_BYTES
from pdxfer.transport import known_schemes

__all__ = ["GROUPS", "bench_suite"]

_QWEN, _KIMI = "qwen3-next-80b-a3b", "kimi-linear-48b-a3b"
_BARE, _SEALED = Way(digests=False), Way()
_OWN_MAX_BYTES = 256 << 20  # besides the arena: an interpreter, its libraries, and what grows with page tables
_ARENA_BYTES = 64 << 20
Row = dict[str, Any]


@dataclass(slots=True)
class _Suite:
    """What is asked for, and what was found so far."""

    runs: int
    shrink: int
    tick: Tick
    clock: Clock
    rows: list[Row] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def measure(
        self, label: str, model: str, tokens: int, *, layers: int = 0, ways: tuple[Way, ...] = (_SEALED,),
        engines: bool = False, growth: str = "", threads: int = 0, **case: Any,
    ) -> tuple[list[Row], list[dict[str, Any]]]:  # fmt: skip
        """Measure one case; returns its rows (the ceiling's first) and its edges."""
        spec = load_spec(model, page_tokens=case.get("page_tokens", 16), layers=layers)
        made = Case(spec=spec, tokens=max(16, tokens // self.shrink), **case)
        facts = {"model": model, "layers": spec.num_layers, **({"growth": growth} if growth else {})}
        ways = tuple(replace(way, threads=threads) for way in ways)
        options = Options(
            case=made, label=label, facts=facts, ways=ways, runs=self.runs, engines=engines, threads=threads,
            processes="worker" if threads else "rank",
        )  # fmt: skip
        found = bench_handoff(options, self.tick, self.clock.part(0.5))
        self.rows += found["rows"]
        self.notes += found["notes"]
        return found["rows"], found["edges"]

    def judge(
        self, line: str, value: float, target: float, unit: str, *, at_most: bool = False, more: str = ""
    ) -> None:
        """Add one line."""
        holds = value <= target if at_most else value >= target
        self.lines.append(
            {"line": line, "value": f"{value:.3g}{unit}{f' ({more})' if more else ''}",
             "target": f"{'<=' if at_most else '>='} {target:g}{unit}", "holds": holds}
        )  # fmt: skip


def _qwen(suite: _Suite) -> None:
    """Full size: 48 layers; both workers, and once more for the ceiling, take 5 GiB.

    Judged with an agent process per worker and half the cores copying in it, so that the source has the others for its
    digests; shown besides, with a process per rank and every core copying.
    """
    label, ways = "Qwen3-Next, 32k tokens, TP 4 to 2", (_BARE, _SEALED)
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    (_, bare, sealed), _ = suite.measure(label, _QWEN, 32768, prefill_tp=4, decode_tp=2, ways=ways, threads=half)
    if suite.shrink == 1:
        suite.measure(f"{label}, a process per rank", _QWEN, 32768, prefill_tp=4, decode_tp=2, ways=ways)
    _judge_share(suite, "Qwen3-Next, TP 4 to 2, shm, no digests", bare, 95)
    _judge_share(suite, "Qwen3-Next, TP 4 to 2, shm, digests", sealed, 80)
    _judge_digests(suite, "shm", bare, sealed, 20)


def _judge_share(suite: _Suite, line: str, row: Row, target: float) -> None:
    low, high = row["pct_of_ceiling_p10"], row["pct_of_ceiling_p90"]
    more = f"p10 {low:.0f}, p90 {high:.0f}, {row['gb_per_s']:.2f} GB/s"
    suite.judge(f"{line}: share of the ceiling", row["pct_of_ceiling"], target, " %", more=more)


def _judge_digests(suite: _Suite, plane: str, bare: Row, sealed: Row, target: float) -> None:
    cost = 100 * (sealed["p50_ms"] / bare["p50_ms"] - 1)
    suite.judge(f"{plane}: what digests cost", cost, target, " %", at_most=True)


def _fragments(suite: _Suite) -> None:
    """Ten layers with one page table, as engines have it: 20,000 fragments are 32k tokens."""
    for size, count in (("4KiB", 20000), ("64KiB", 1500), ("1MiB", 100)):
        label, model = f"{count:,} fragments of {size}", f"fragments-{size}"
        (_, bare, sealed, *others), _ = suite.measure(
            label, model, 16 * count // 10, ways=(_BARE, _SEALED), engines=True
        )
        times = {row["row"]: row["p50_ms"] for row in others if row["row"].startswith("nixl")}
        if len(times) < 3:
            suite.lines.append(
                _unmeasured(f"{label}: against NIXL", "see the notes", holds=None if not times else False)
            )
            continue
        ratios = {name: ms / bare["p50_ms"] for name, ms in times.items()}
        more = f"{times['nixl WRITE'] / sealed['p50_ms']:.2f} with digests, which NIXL has not"
        if size == "4KiB":
            suite.judge(f"{label}: to NIXL WRITE by default", ratios.pop("nixl WRITE"), 8, " times", more=more)
        best = min(ratios, key=lambda name: ratios[name])
        wanted = 2.5 if size == "4KiB" else 1
        suite.judge(f"{label}: to NIXL's best", ratios[best], wanted, " times", more=best)


def _planes(suite: _Suite) -> None:
    """Every transport that is not memory: half of Qwen3-Next, 16k tokens, one edge: 240 MB."""
    for scheme in sorted(set(known_schemes()) - {*HOST_MEMORY}):
        ways = tuple(Way(transport=scheme, mode="packed", digests=digests) for digests in (False, True))
        label = f"{scheme}, packed"
        try:
            (_, bare, sealed), _ = suite.measure(label, _QWEN, 16384, layers=24, ways=ways)
        except PdxferError as error:
            here = not isinstance(error, MisuseError)  # else it is not installed, or has no such device
            suite.lines.append(_unmeasured(label, error.message, holds=False if here else None))
            continue
        _judge_share(suite, label, bare, 90)
        if bare["gb_per_s"] < 1:
            _judge_digests(suite, scheme, bare, sealed, 5)


def _kimi(suite: _Suite) -> None:
    """Full size, 64-token pages: 27 layers; 9 GiB."""
    label = "Kimi-Linear, 32k tokens, TP 8 to 8"
    (_, row), edges = suite.measure(label, _KIMI, 32768, prefill_tp=8, decode_tp=8, page_tokens=64)
    spec = load_spec(_KIMI, page_tokens=64)
    mla = [spec[name] for name in ("latent", "rope") if name in spec]
    unique = sum(len(c.layers) * c.row_elems * DTYPE_BYTES[c.dtype] for c in mla) * row["tokens"]
    by_source: Counter[int] = Counter(dict.fromkeys(range(8), 0))
    for edge in edges:
        if not edge["relay"]:
            by_source[edge["source"]] += sum(edge["components"].get(c.name, 0) for c in mla)
    uneven = 100 * (max(by_source.values()) / max(1, min(by_source.values())) - 1)
    suite.judge(f"{label}: MLA's wire bytes to unique bytes", by_source.total() / unique, 1, "", at_most=True)
    suite.judge(f"{label}: most to least bytes of a source", uneven, 5, " %", at_most=True)


def _small(suite: _Suite) -> None:
    """512 tokens of 4 layers of Qwen3-Next (3 states, 1 KV) and, for information, of all 48."""
    label = "512 tokens, 4 layers"
    runs, suite.runs = suite.runs, suite.runs if suite.shrink > 1 else max(50, suite.runs)
    try:
        (_, bare, sealed), _ = suite.measure(label, _QWEN, 512, layers=4, ways=(_BARE, _SEALED))
        if suite.shrink == 1:
            suite.measure("512 tokens, 48 layers", _QWEN, 512, ways=(_BARE, _SEALED))
    finally:
        suite.runs = runs
    more = f"{bare['added_p50_ms']:.2f} without digests; the copy of {sealed['bytes_payload'] / 1e6:.1f} MB apart"
    suite.judge(f"{label}: added to the copy", sealed["added_p50_ms"], 1.5, " ms", at_most=True, more=more)
    suite.judge(f"{label}: control calls", sealed["calls_per_edge"], 2, "", at_most=True)


def _sidecar(suite: _Suite) -> None:
    """The reference hand-off and the small one, embedded and by sidecar in turn."""
    both = (_SEALED, replace(_SEALED, sidecar=True))
    (*_, big), _ = suite.measure(
        "Qwen3-Next, 32k tokens, TP 4 to 2, sidecar", _QWEN, 32768, prefill_tp=4, decode_tp=2, ways=both
    )
    suite.judge("sidecar, Qwen3-Next, TP 4 to 2: time to that embedded", big["sidecar_ratio"], 1.1, "", at_most=True)
    runs, suite.runs = suite.runs, suite.runs if suite.shrink > 1 else max(50, suite.runs)
    try:
        (*_, small), _ = suite.measure("512 tokens, 4 layers, sidecar", _QWEN, 512, layers=4, ways=both)
    finally:
        suite.runs = runs
    suite.judge("sidecar, 512 tokens, 4 layers: added to embedded", small["sidecar_added_ms"], 1, " ms", at_most=True)


def _tokens(suite: _Suite) -> None:
    """12 layers of Qwen3-Next (3 KV, 9 states), TP 1 to 1: 128k tokens of them take 4 GiB."""
    points = [suite.measure(f"{n >> 10}k tokens, 12 layers", _QWEN, n, layers=12, growth="tokens")[0][1]
              for n in (4096, 8192, 16384, 32768, 65536, 131072)]  # fmt: skip
    first, last = points[2], points[-1]
    slope = math.log(last["p50_ms"] / first["p50_ms"]) / math.log(last["bytes_payload"] / first["bytes_payload"])
    suite.judge("16k to 128k tokens: exponent of time over bytes", slope, 1.1, "", at_most=True)


def _concurrency(suite: _Suite) -> None:
    """4 layers of Qwen3-Next, 4k tokens: 15 MB each, of which 64 take 4 GiB with the ceiling."""
    points = [suite.measure(f"{n} at once, 4 layers", _QWEN, 4096, layers=4, concurrency=n, growth="concurrency")[0][1]
              for n in (1, 2, 4, 8, 16, 32, 64)]  # fmt: skip
    one, many = points[0], points[-1]
    suite.judge("64 at once: aggregate GB/s to that of one", many["gb_per_s"] / one["gb_per_s"], 0.9, "")
    mib, limit = 2.0**20, (_ARENA_BYTES + _OWN_MAX_BYTES) / 2**20
    more = f"{one['own_bytes_max'] / mib:.0f} MiB with one"
    suite.judge("64 at once: memory of a process, caches apart", many["own_bytes_max"] / mib, limit, " MiB",
                at_most=True, more=more)  # fmt: skip


GROUPS: Mapping[str, Callable[[_Suite], None]] = {
    "qwen": _qwen,
    "fragments": _fragments,
    "planes": _planes,
    "kimi": _kimi,
    "small": _small,
    "sidecar": _sidecar,
    "tokens": _tokens,
    "concurrency": _concurrency,
}


def bench_suite(groups: tuple[str, ...], runs: int, shrink: int, tick: Tick, clock: Clock) -> dict[str, Any]:
    """Measure the groups (all when none is named) and judge them.

    Args:
        shrink: divides every number of tokens, to try the suite out; its figures then mean nothing.
    """
    if unknown := [name for name in groups if name not in GROUPS]:
        raise MisuseError(f"{unknown[0]!r} is no group of the suite; there are {', '.join(GROUPS)}")
    suite = _Suite(runs, shrink, tick, clock)
    for name in groups or GROUPS:
        try:
            GROUPS[name](suite)
        except PdxferError as error:
            suite.lines.append(_unmeasured(name, error.message))
    what = f"reference suite, medians of {runs} runs{f', tokens divided by {shrink}' if shrink > 1 else ''}"
    return {"what": what, "lines": suite.lines, "rows": suite.rows, "notes": suite.notes}


def _unmeasured(line: str, why: str, *, holds: bool | None = False) -> dict[str, Any]:
    """A line without a value. ``holds`` is None where what it is about is not on this machine."""
    return {"line": line, "value": f"not measured: {why}", "target": "", "holds": holds}
