"""The two engines of a simulation: tiny layouts, pages with known contents, and who holds which.

In come requests; out come pages reserved, filled, compared and given back. Every byte is known at any time: pages that
nobody holds carry a pattern of their own, held ones a keyed function of (request, component, layer, offset), so that
whatever differs is named: stale, foreign, swapped, never written, or of nobody.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.layout import Layout, RankLayout
from pdxfer.spec import DTYPE_BYTES, Axis, CacheSpec, Component, Growth, Ownership, Rule
from pdxfer.testing.oracle import Oracle, owned_rows
from pdxfer.testing.simulation.network import Network
from pdxfer.testing.simulation.virtual import Process, World

__all__ = ["Held", "Rank", "Worker", "tiny_layout"]

Bytes = npt.NDArray[np.uint8]
_TABLE_BYTES = 1 << 20
_TABLE: Bytes = np.random.default_rng(0).integers(0, 256, _TABLE_BYTES, dtype=np.uint8)
_NAMED = 200  # how many requests back a stray byte is looked for


def _words(key: str, count: int) -> Bytes:
    """``count`` keyed bytes."""
    start = xxhash.xxh3_64_intdigest(key.encode()) % (_TABLE_BYTES // 2) & ~7
    return _TABLE[start : start + count]


class _Contents(Oracle):
    """An oracle whose bytes are looked up rather than computed."""

    def tensor(self, component: str, layer: int, dtype: str = "") -> Any:
        found = self._tensors.get((component, layer))
        if found is None:
            c = self.spec[component]
            shape = (c.rows(self.tokens)[1], *c.shape)
            word = f"u{DTYPE_BYTES[self.dtypes[component]]}"
            data = _words(f"{self.key}/{component}/{layer}", int(np.prod(shape)) * np.dtype(word).itemsize)
            found = self._tensors[component, layer] = data.view(word).reshape(shape)
        return found


def _component(name: str, layers: tuple[int, ...], axes: dict[str, int], own: Ownership, once: bool) -> Component:
    named = tuple(Axis(name=n, extent=e) for n, e in axes.items())
    growth, dtype = (Growth.PER_REQUEST, "float32") if once else (Growth.PER_TOKEN, "bfloat16")
    return Component(name=name, layers=layers, axes=named, dtype=dtype, growth=growth, ownership=own)


@lru_cache(maxsize=64)
def tiny_layout(tp: int, style: int) -> Layout:
    """A hybrid of four layers: sharded state, a convolution with a shared part, K and V, and a replicated latent."""
    heads = Ownership(rule=Rule.SHARDED, axis="heads", units=2)
    channels = Ownership(rule=Rule.SHARDED, axis="channels", units=2)
    shared = Ownership(rule=Rule.EXTENDED, axis="channels", units=1)
    parts = (
        _component("S", (0, 1), {"heads": 2, "K": 8, "V": 8}, heads, once=True),
        _component("conv.q", (0, 1), {"channels": 8, "taps": 3}, channels, once=True),
        _component("conv.B", (0, 1), {"channels": 4, "taps": 3}, shared, once=True),
        _component("kv.k", (2, 3), {"heads": 2, "dim": 16}, heads, once=False),
        _component("kv.v", (2, 3), {"heads": 2, "dim": 16}, heads, once=False),
        _component("latent", (2, 3), {"dim": 64}, Ownership(rule=Rule.REPLICATED), once=False),
    )
    spec = CacheSpec(model="tiny", num_layers=4, query_heads=4, components=parts)
    one = Storage(page_tokens=4, pages=40, slots=7, conv_fused=False)
    two = Storage(page_tokens=8, pages=22, slots=7, kv_order="HND", conv_order="TC", state_order="VK")
    return build_layout(spec, Parallel(tp=tp), (one, two)[style], "per_layer")


class _Places:
    """Where the bytes of each page and slot lie in a rank's memory; per layout, computed once."""

    def __init__(self, rank: RankLayout) -> None:
        self.bases = [0, *np.cumsum([shape.nbytes for shape in rank.regions]).tolist()]
        pools, per_unit = rank.pools(), rank.pages_per_unit()
        self.units: dict[str, npt.NDArray[np.int64]] = {}  # by pool: byte positions [unit, bytes]
        for pool in dict.fromkeys(pools.values()):
            columns: list[npt.NDArray[np.int64]] = []
            for h in (h for h in rank.holdings if pools[h.table] == pool):
                size = per_unit[h.table]
                shape, strides = (size, h.page_rows, *h.box.shape), (h.page_stride, h.row_stride, *h.strides)
                steps = [np.arange(n) * s for n, s in zip(shape, strides, strict=True)]
                inside = np.asarray(sum(np.ix_(*steps, np.arange(h.itemsize)))).reshape(-1)
                for layer in h.layers:
                    region, offset = h.at(layer)
                    starts = self.bases[region] + offset + np.arange(h.pages // size) * size * h.page_stride
                    columns.append(starts[:, None] + inside[None, :])
            count = min(len(c) for c in columns)
            self.units[pool] = np.concatenate([c[:count] for c in columns], axis=1)


@lru_cache(maxsize=64)
def _places(tp: int, style: int, rank: int) -> _Places:
    return _Places(tiny_layout(tp, style).ranks[rank])


@dataclass(kw_only=True)
class Held:
    """One request's pages on one rank.

    Attributes:
        units: by pool. where: their bytes' positions. wanted: what must lie there, once known.
    """

    key: str
    tables: dict[str, Any]  # page numbers by table
    units: dict[str, list[int]]
    where: npt.NDArray[np.int64]
    wanted: Bytes

    @cached_property
    def names(self) -> frozenset[tuple[str, int]]:
        """The units as the ledger names them."""
        return frozenset((pool, unit) for pool, mine in self.units.items() for unit in mine)


@dataclass(eq=False, kw_only=True)
class Rank:
    """One incarnation of one rank: its process, agent and memory."""

    world: World
    network: Network
    worker: Worker
    rank: int
    process: Process
    held: dict[str, Held] = field(default_factory=dict)
    promised: dict[frozenset[tuple[str, int]], Held] = field(default_factory=dict)
    ready: bool = False

    def __post_init__(self) -> None:
        places = _places(self.worker.tp, self.worker.style, self.rank)
        self.layout = self.worker.layout.ranks[self.rank]
        self.flat: Bytes = np.zeros(places.bases[-1], np.uint8)
        self.places = places
        self.pools, self.per_unit = self.layout.pools(), self.layout.pages_per_unit()
        self.patterns = {pool: self._pattern(pool, at.shape) for pool, at in places.units.items()}
        self.free = {pool: list(range(len(at))) for pool, at in places.units.items()}
        for pool, at in places.units.items():
            self.world.random.shuffle(self.free[pool])
            self.flat[at] = self.patterns[pool]

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.worker.name}{self.rank}"

    @property
    def alive(self) -> bool:
        """Whether its process lives."""
        return self.process.alive

    def boot(self) -> None:
        """Start the agent; runs in the rank's process."""
        w = self.worker
        listen = {"memory": f"memory://{self.name}"} if w.same_address else {}
        config = AgentConfig(
            worker=w.name, rank=self.rank, control=(w.address(self.rank),), transports=("memory",), listen=listen,
            **w.config,
        )  # fmt: skip
        self.agent = Agent(config)
        buffers = [self.flat[a:b] for a, b in pairwise(self.places.bases)]
        siblings = {r: w.address(r) for r in range(w.tp)}
        self.agent.attach(w.layout, buffers, siblings=siblings)
        self.agent.start()
        self.ready = True

    # -- pages -------------------------------------------------------------------------------------

    def reserve(self, key: str, tokens: int) -> Held | None:
        """Pages and a slot for a request; None when there are not enough."""
        wanted = {t: self._pages(t, tokens) for t in self.layout.tables()}
        units = {t: -(-n // self.per_unit[t]) for t, n in wanted.items()}
        needed: dict[str, int] = {}
        for table, n in units.items():
            needed[self.pools[table]] = needed.get(self.pools[table], 0) + n
        if any(len(self.free[pool]) < n for pool, n in needed.items()):
            return None
        taken: dict[str, list[int]] = {pool: [] for pool in needed}
        tables = {}
        for table, n in units.items():
            pool, size = self.pools[table], self.per_unit[table]
            mine = [self.free[pool].pop() for _ in range(n)]
            taken[pool] += mine
            tables[table] = (np.array(mine, np.int64)[:, None] * size + np.arange(size)).reshape(-1)[: wanted[table]]
        where = np.concatenate([self.places.units[pool][mine].reshape(-1) for pool, mine in taken.items()])
        pattern = np.concatenate([self.patterns[pool][mine].reshape(-1) for pool, mine in taken.items()])
        held = Held(key=key, tables=tables, units=taken, where=where, wanted=pattern)
        self.expect(held, "a free page was written to")
        self.held[key] = held
        return held

    def give_back(self, held: Held) -> None:
        """The request is over: its pages show at once that they are nobody's."""
        if self.held.pop(held.key, None) is not held:
            self.world.errors.append(f"{self.name}: the pages of {held.key} were freed twice")
            return
        for pool, mine in held.units.items():
            self.flat[self.places.units[pool][mine]] = self.patterns[pool][mine]
            self.free[pool] += mine

    def fill(self, held: Held, key: str, tokens: int) -> None:
        """Write the request, as a prefill does."""
        self._put(self.flat, held, key, tokens, 0)
        held.wanted = self.flat[held.where]

    def due(self, held: Held, key: str, tokens: int, first_token: int) -> None:
        """What a correct transfer makes of the pages from here on."""
        scratch = self.flat.copy()
        scratch[held.where] = held.wanted
        self._put(scratch, held, key, tokens, first_token)
        held.wanted = scratch[held.where]

    def expect(self, held: Held, what: str) -> None:
        """Report bytes that are not what they must be."""
        found = self.flat[held.where]
        if not np.array_equal(found, held.wanted):
            at = int(np.argmax(found != held.wanted))
            count = int(np.count_nonzero(found != held.wanted))
            self.world.errors.append(
                f"{self.name}: {what}: {held.key}, {count} of {len(found)} bytes differ, from {self._where(held, at)}: "
                f"{self._whose(held, at, found)}"
            )
            self.world.stopping = True

    # -- inside ------------------------------------------------------------------------------------

    def _pages(self, table: str, tokens: int) -> int:
        needed = 0
        for h in self.layout.holdings:
            if h.table == table:
                _, local = _rows(self.worker.tp, self.worker.style, self.rank, h.component, tokens)
                needed = max(needed, int(local[-1]) // h.page_rows + 1 if len(local) else 0)
        return needed

    def _put(self, flat: Bytes, held: Held, key: str, tokens: int, first_token: int) -> None:
        buffers = tuple(flat[a:b] for a, b in pairwise(self.places.bases))
        contents = self.worker.contents(key, tokens)
        for piece in contents._pieces(self.layout, buffers, held.tables, first_token, None):
            piece.view[piece.pages, piece.within] = contents._expected(piece)

    def _pattern(self, pool: str, shape: tuple[int, ...]) -> Bytes:
        return _words(f"free/{self.name}/{pool}", shape[0] * shape[1]).reshape(shape)

    def _where(self, held: Held, at: int) -> str:
        position = int(held.where[at])
        for h in self.layout.holdings:
            for layer in h.layers:
                region, offset = h.at(layer)
                for index, page in enumerate(held.tables[h.table].tolist()):
                    start = self.places.bases[region] + offset + page * h.page_stride
                    if start <= position < start + h.page_stride:
                        return f"{h.component}, layer {layer}, page {index} ({page})"
        return f"byte {position}"

    def _whose(self, held: Held, at: int, found: Bytes) -> str:
        """Say what the wrong bytes are, by looking for whose they would be right."""
        pattern = np.concatenate([self.patterns[pool][mine].reshape(-1) for pool, mine in held.units.items()])
        some = slice(at, at + 8)
        if np.array_equal(found[some], pattern[some]):
            return "never written"
        raw = found[some].tobytes()
        if not any(raw):
            return "zeros"
        for key, tokens in reversed(self.worker.known[-_NAMED:]):
            contents = self.worker.contents(key, tokens)
            for c in contents.spec.components:
                for layer in c.layers:
                    if raw in contents.tensor(c.name, layer).tobytes():
                        kind = "swapped" if key == held.key else "foreign"
                        return f"{kind} bytes, of {key}, {c.name}, layer {layer}"
        for pool, patterns in self.patterns.items():
            if raw in patterns.tobytes():
                return f"stale: the pattern of free pages of {pool}"
        return "bytes of nobody"


@lru_cache(maxsize=4096)
def _rows(tp: int, style: int, rank: int, component: str, tokens: int) -> tuple[Any, Any]:
    layout = tiny_layout(tp, style)
    (holding, *_) = [h for h in layout.ranks[rank].holdings if h.component == component]
    return owned_rows(layout.spec[component], holding, tokens)


class Worker:
    """All ranks of one worker, each in a process of its own that may die and come back.

    ``known``: requests so far, as (key, tokens), shared by both workers. ``same_address``: whether the data listener,
    too, comes back where it was.
    """

    def __init__(
        self, world: World, network: Network, name: str, tp: int, style: int, known: list[tuple[str, int]],
        *, same_address: bool, **config: Any,
    ) -> None:  # fmt: skip
        self.world, self.network, self.name, self.tp, self.style = world, network, name, tp, style
        self.layout, self.config, self.known = tiny_layout(tp, style), config, known
        self.same_address = same_address
        self._contents: dict[tuple[str, int], _Contents] = {}
        self.ranks = [self._new(rank) for rank in range(tp)]

    def address(self, rank: int) -> str:
        """Control address; the same in every incarnation."""
        return f"unix:///{self.name}{rank}"

    def contents(self, key: str, tokens: int) -> _Contents:
        """What a request's bytes are."""
        found = self._contents.get((key, tokens))
        if found is None:
            found = self._contents[key, tokens] = _Contents(self.layout.spec, key=key, tokens=tokens)
            while len(self._contents) > _NAMED:
                del self._contents[next(iter(self._contents))]
        return found

    def _new(self, rank: int) -> Rank:
        process = Process(f"{self.name}{rank}")
        return Rank(world=self.world, network=self.network, worker=self, rank=rank, process=process)

    def boot(self, rank: int) -> Rank:
        """Start a rank's process; waits until its agent serves."""
        made = self.ranks[rank]
        self.world.join(self.world.spawn(made.process, made.boot, name="boot"))
        return made

    def crash(self, rank: int) -> None:
        """Kill a rank's process and let the system bury it."""
        self.world.kill(self.ranks[rank].process)
        self.world.spawn(self.world.outside, self.network.bury, self.ranks[rank].process, name="bury")

    def renew(self, rank: int) -> None:
        """A new process with the old addresses, and nothing in its memory; ``boot`` starts it."""
        self.ranks[rank] = self._new(rank)
