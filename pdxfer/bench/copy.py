"""Bench of copies: scattered pages of another process's memory into our own, beside what the machine can do.

In come a run length and a size; out come GB/s per way of copying, and ratios to the ceiling of the same run: a native
loop with one memcpy per run, over the very same runs, with its arrays made before. The source's pages lie in memfds of
another process that came over the shm transport; ours is what ``driver.EdgeReader`` does per transfer, from the
program and the page tables on. Every way is checked once: the bytes must have come.

::

    other process   memfd per layer  |page 7|page 2|...  <- random pages of 16 rows
    this process    memfd per layer  |page 0|page 5|...  <- other random pages, perhaps of another order
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pdxfer import packing
from pdxfer.bench.measure import Ratio, Samples, Tick, against, quantile
from pdxfer.bench.peer import Child, Clock, Line, main
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import InternalError, MisuseError, TransportError
from pdxfer.kernels import Offsets, native_available
from pdxfer.layout import Layout
from pdxfer.packing import EdgeProgram, RequestShape, Segment, Side
from pdxfer.plan import Edge, make_plan
from pdxfer.spec import Axis, CacheSpec, Component, Growth, Ownership, Rule
from pdxfer.transport import Channel, Transport, create_transport

__all__ = ["CASES", "DIGEST_TARGET", "DIRECT_TARGET", "CopyCase", "CopyOptions", "bench_copy", "serve"]

DIRECT_TARGET = 0.95
DIGEST_TARGET = 0.80
_CHUNK_BYTES = 8 << 20
_PAGE_ROWS = 16
_LAYERS = 4
_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCase:
    """One kind of memory to copy.

    Attributes:
        run_bytes: contiguous bytes at both ends. page_bytes: of one layer's page, or of the state of one request.
        source_order, target_order: of the storage, ``HDN`` being vLLM's K on CPUs; ``state`` is S with K and V swapped,
            else pages of K rows.
        heads, dim: of the component.
        counts: whether the design's targets are for it; the others are for information.
    """

    name: str
    run_bytes: int
    page_bytes: int
    heads: int
    dim: int
    source_order: str = "NHD"
    target_order: str = "NHD"
    state: bool = False
    counts: bool = True


CASES = (
    CopyCase(name="4 KiB runs", run_bytes=4 << 10, page_bytes=4 << 10, heads=1, dim=128),
    CopyCase(name="16 KiB runs", run_bytes=16 << 10, page_bytes=16 << 10, heads=4, dim=128),
    CopyCase(name="64 KiB runs", run_bytes=64 << 10, page_bytes=64 << 10, heads=8, dim=256),
    CopyCase(
        name="NHD to HND, 512 B rows", run_bytes=512, page_bytes=32 << 10, heads=4, dim=256, target_order="HND",
        counts=False,
    ),
    CopyCase(
        name="K of vLLM on CPUs to NHD, 2 B runs", run_bytes=2, page_bytes=16 << 10, heads=4, dim=128,
        source_order="HDN", counts=False,
    ),
    CopyCase(
        name="S transposed, 4 B runs", run_bytes=4, page_bytes=2 << 20, heads=32, dim=128, state=True, counts=False
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """How much, how often, which."""

    megabytes: int = 256
    repeats: int = 9
    cases: tuple[CopyCase, ...] = CASES

    def __post_init__(self) -> None:
        if min(self.megabytes, self.repeats) < 1:
            raise MisuseError(f"at least one megabyte and one repeat: {self}")


def bench_copy(options: CopyOptions, tick: Tick) -> dict[str, Any]:
    """Measure every case; returns a JSON-ready value."""
    return {
        "what": "pages of another process's memory into our own, one thread",
        "targets": {"direct": DIRECT_TARGET, "direct, digests": DIGEST_TARGET},
        "cases": [_run_case(case, options, tick) for case in options.cases],
    }


def _run_case(case: CopyCase, options: CopyOptions, tick: Tick) -> dict[str, Any]:
    pair = _Pair.of(case, options.megabytes << 20)
    tick(f"{case.name}: the other process fills its memory")
    with Child(serve, Clock(), regions=pair.region_bytes) as child, create_transport("shm") as transport:
        address = child.hear()["address"]
        child.tell(do="accept")
        bench = _CopyBench(pair, transport, transport.connect(address, timeout_s=_WAIT_S))
        jobs, notes = bench.checked_jobs()
        found = against(bench.ceiling, jobs, options.repeats, lambda name: tick(f"{case.name}: {name}"))
        return {
            "case": case.name,
            "run_bytes": case.run_bytes,
            "counts_for_targets": case.counts,
            "nbytes": pair.program().payload_bytes,
            "runs": bench.runs,
            "ceiling": bench.ceiling_name,
            "rows": list(_rows(found, pair.program().payload_bytes, bench.ceiling_name)),
            "notes": notes,
        }


def _rows(found: dict[str, Ratio], nbytes: int, ceiling_name: str) -> Iterator[dict[str, Any]]:
    beneath = Samples(*(list(itertools.chain(*samples)) for samples in _ceilings(found)))
    yield {"way": ceiling_name, "gb_per_s": nbytes / quantile(beneath.wall_s, 0.5) / 1e9, "ratio": 1.0}
    for name, ratio in found.items():
        yield {"way": name, "gb_per_s": nbytes / quantile(ratio.job.wall_s, 0.5) / 1e9, **ratio.to_json()}


def _ceilings(found: dict[str, Ratio]) -> tuple[list[list[float]], list[list[float]]]:
    return [r.ceiling.wall_s for r in found.values()], [r.ceiling.cpu_s for r in found.values()]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two layouts, and one request's scattered pages on either side."""

    case: CopyCase
    source: Layout
    target: Layout
    source_tables: dict[str, Offsets]
    target_tables: dict[str, Offsets]
    tokens: int

    @classmethod
    def of(cls, case: CopyCase, nbytes: int) -> _Pair:
        pages = 1 if case.state else max(2, nbytes // _LAYERS // case.page_bytes)
        layers = max(1, nbytes // case.page_bytes) if case.state else _LAYERS
        spec = CacheSpec(
            model="bench", num_layers=layers, query_heads=case.heads, components=(_component(case, layers),)
        )
        here = Storage(page_tokens=_PAGE_ROWS, pages=pages, slots=1, kv_order=case.source_order.replace("HDN", "NHD"))
        there = replace(here, kv_order=case.target_order, state_order="VK")
        rng = np.random.default_rng(0)
        tables = [{"state" if case.state else "kv": rng.permutation(pages).astype(np.int64)} for _ in range(2)]
        layouts = [build_layout(spec, Parallel(), storage) for storage in (here, there)]
        layouts[0] = _token_near(layouts[0]) if case.source_order == "HDN" else layouts[0]
        tokens = 1 if case.state else pages * _PAGE_ROWS
        return cls(case, layouts[0], layouts[1], tables[0], tables[1], tokens)

    @property
    def region_bytes(self) -> list[int]:
        return [region.nbytes for region in self.source.ranks[0].regions]

    def program(self) -> EdgeProgram:
        """A fresh program, as every transfer makes one."""
        plan = make_plan(self.source, self.target)
        return EdgeProgram(plan, Edge(0, 0, False), RequestShape(kv_tokens=self.tokens), chunk_bytes=_CHUNK_BYTES)


def _token_near(layout: Layout) -> Layout:
    """The same pages, but in each a head is [dim, token]."""
    (rank,) = layout.ranks
    (h,) = rank.holdings
    row = h.itemsize * h.page_rows
    near = replace(h, row_stride=h.itemsize, strides=(row * h.box.shape[1], row))
    return replace(layout, ranks=(replace(rank, holdings=(near,)),))


def _component(case: CopyCase, layers: int) -> Component:
    axes: tuple[Axis, ...] = (Axis(name="heads", extent=case.heads), Axis(name="dim", extent=case.dim))
    if case.state:
        axes = (*axes[:1], Axis(name="K", extent=case.dim), Axis(name="V", extent=case.dim))
    return Component(
        name="S" if case.state else "kv.k",
        layers=tuple(range(layers)),
        axes=axes,
        dtype="float32" if case.state else "bfloat16",
        growth=Growth.PER_REQUEST if case.state else Growth.PER_TOKEN,
        ownership=Ownership(rule=Rule.SHARDED, axis="heads", units=case.heads),
    )


class _CopyBench:
    """The jobs of one case: each copies the whole request once."""

    def __init__(self, pair: _Pair, transport: Transport, channel: Channel) -> None:
        self.pair, self._channel = pair, channel
        mapped, readers = ([self._receive() for _ in pair.region_bytes] for _ in range(2))
        self._mapped = [np.frombuffer(region.view, np.uint8) for region in mapped]
        self._readers = readers
        rank = pair.target.ranks[0]
        self._target = [np.frombuffer(transport.allocate(r.nbytes, r.name).view, np.uint8) for r in rank.regions]
        self._staging = np.zeros(_CHUNK_BYTES, np.uint8)
        self._sealed = self._digests()
        self._lists = self._run_lists()
        self.runs = sum(len(lengths) for *_, lengths in self._lists)
        self.ceiling_name = "native memcpy per run" if pair.case.run_bytes >= 512 else "contiguous memcpy"

    def _receive(self) -> Any:
        region = self._channel.receive(timeout_s=_WAIT_S).region
        assert region is not None
        return region

    def ceiling(self) -> None:
        """One memcpy per run, over precomputed arrays; for tiny runs one memcpy per layer."""
        from pdxfer import _native

        if self.pair.case.run_bytes < 512:
            self._contiguous()
            return
        for target, source, to, at, lengths in self._lists:
            _native.copy_runs(target, source, to, at, lengths)

    def _contiguous(self) -> None:
        for target, source in zip(self._target, self._mapped, strict=True):
            np.copyto(target, source)

    def _run_lists(self) -> list[tuple[Any, Any, Offsets, Offsets, Offsets]]:
        """The request's contiguous runs, worked out apart from the packer."""
        if self.pair.case.run_bytes < 512:
            return []
        (have,), (want,) = (layout.ranks[0].holdings for layout in (self.pair.source, self.pair.target))
        rows = np.arange(self.pair.tokens, dtype=np.int64)
        found = []
        to, at = (
            table[rows // _PAGE_ROWS] * h.page_stride + rows % _PAGE_ROWS * h.row_stride
            for h, table in ((want, self.pair.target_tables["kv"]), (have, self.pair.source_tables["kv"]))
        )
        if self.pair.case.run_bytes == self.pair.case.page_bytes:
            to, at = to[::_PAGE_ROWS].copy(), at[::_PAGE_ROWS].copy()
        else:
            heads = np.arange(self.pair.case.heads, dtype=np.int64)
            to, at = ((o[:, None] + heads * h.strides[0]).reshape(-1) for o, h in ((to, want), (at, have)))
        lengths = np.full(len(to), self.pair.case.run_bytes, dtype=np.int64)
        for target, source in zip(self._target, self._mapped, strict=True):
            found.append((target, source, to, at, lengths))
        return found

    # -- ours

    def checked_jobs(self) -> tuple[dict[str, Callable[[], None]], list[str]]:
        """Every way of copying that works here, each run once and its bytes compared; notes say what doesn't."""
        jobs: dict[str, Callable[[], None]] = {
            "contiguous memcpy": self._contiguous,
            "direct": lambda: self._direct(self._mapped, digests=False),
            "direct, digests": lambda: self._direct(self._mapped, digests=True),
            "source digests": lambda: self._compare(self._digests()),
            "packed": lambda: self._packed(digests=False),
            "packed, digests": lambda: self._packed(digests=True),
            "process_vm_readv": lambda: self._direct(self._readers, digests=False),
            "direct, numpy kernel": lambda: self._direct(self._mapped, digests=False, kernel="numpy"),
        }
        notes: list[str] = []
        if not native_available():
            raise MisuseError("the copy kernel was not built, so there is no ceiling", hint="install with a C compiler")
        if self.pair.case.run_bytes < 512:
            del jobs["process_vm_readv"], jobs["direct, numpy kernel"], jobs["contiguous memcpy"]
        for name in list(jobs):
            try:
                self._check(name, jobs[name])
            except TransportError as error:
                notes.append(f"{name}: {error.message}")
                del jobs[name]
        return jobs, notes

    def _check(self, name: str, job: Callable[[], None]) -> None:
        for region in self._target:
            region[:] = 0
        job()
        if name not in ("contiguous memcpy", "source digests"):
            self._compare(self._digests(of_target=True))

    def _segments(self, program: EdgeProgram) -> Iterator[tuple[int, Segment]]:
        return enumerate(segment for chunk in program.chunks for segment in chunk.segments)

    def _sides(self, program: EdgeProgram, buffers: list[Any]) -> tuple[Side, Side]:
        source = Side(program.source_rank, buffers, self.pair.source_tables)
        return source, Side(program.target_rank, self._target, self.pair.target_tables)

    def _direct(self, buffers: list[Any], *, digests: bool, kernel: str = "auto") -> None:
        program = self.pair.program()
        source, target = self._sides(program, buffers)
        packing.prepare(program, source, target, digests=digests)
        for seed, segment in self._segments(program):
            found = packing.direct(program, segment, source, target, kernel=kernel, seed=seed if digests else None)
            if digests and found != self._sealed[seed]:
                raise InternalError(f"segment {seed} differs from its source")

    def _packed(self, *, digests: bool) -> None:
        program = self.pair.program()
        source, target = self._sides(program, self._mapped)
        for seed, segment in self._segments(program):
            block = self._staging[: segment.nbytes]
            packing.pack(program, segment, source, block, seed=seed if digests else None)
            found = packing.unpack(program, segment, target, block, seed=seed if digests else None)
            if digests and found != self._sealed[seed]:
                raise InternalError(f"segment {seed} differs from its source")

    def _digests(self, *, of_target: bool = False) -> list[bytes]:
        program = self.pair.program()
        side = self._sides(program, self._mapped)[of_target]
        return [packing.digest(program, s, side, seed, of_target=of_target) for seed, s in self._segments(program)]

    def _compare(self, found: list[bytes]) -> None:
        if found != self._sealed:
            raise InternalError("the bytes did not come as they were")


def serve(line: Line, *, regions: list[int]) -> None:
    """The other process: regions full of noise, as memfds and as memory of its own, for one reader."""
    rng = np.random.default_rng(1)
    with create_transport("shm", readers="any") as transport, transport.listen() as listener:
        line.tell(address=listener.contact_address)
        shared = [transport.allocate(nbytes, "pages") for nbytes in regions]
        for region in shared:
            view = np.frombuffer(region.view, np.uint8)
            view[:] = np.frombuffer(rng.bytes(len(view)), np.uint8)
        own = [transport.register(np.frombuffer(region.view, np.uint8).copy(), "own pages") for region in shared]
        for _ in line.questions():  # one: that the parent is about to connect
            channel = listener.accept(_WAIT_S)
            for region in (*shared, *own):
                channel.export_region(region, b"", timeout_s=_WAIT_S)


if __name__ == "__main__":
    main(serve)
