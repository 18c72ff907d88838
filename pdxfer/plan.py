"""Plan: which box of which component goes from which source rank to which target rank.

In come two layouts; out goes a frozen, address-free Plan, the same on both sides, with a digest that they
compare before any byte moves. This file knows no page table, no memory and no kind of cache: there is no
branch on a component's name here.

For every target box exactly one source is chosen::

    target box          [--------------- heads 0..6 ---------------)
    source boxes        [---- rank 0: 0..4 ----)[---- rank 1: 4..8 ----)
    cells               [---- 0..4 from 0 -----)[- 4..6 from 1 -)

    replicas            cell held by ranks 0, 1, 2: rows are striped over them   |0000|1111|2222|
    fan-out             cell wanted by targets 4, 5 of one host: stripes arrive    4    5    4
                        once, then siblings fetch them from each other (relay)     5    4    5

Stripes cut a request's rows (per-token components) or the item's layers (per-request ones).
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pdxfer.errors import IncompatibleError, InternalError
from pdxfer.footprint import Footprints
from pdxfer.layout import Box, Holding, Layout, TokenOwnership, boxes_cover
from pdxfer.spec import Component, Growth, canonical_digest, compare_specs

__all__ = ["CopyItem", "Edge", "Plan", "make_plan"]

_STRIPES_MAX = 64
_STEPS_MAX = 1 << 22  # some seconds; a worker of 64 ranks to another of 64 needs a tenth of it


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyItem:
    """One box for some layers, from one rank's holding to another's.

    Attributes:
        component, layers, box: what is copied, in global coordinates.
        source, target: ranks; of the two workers, or both of the target worker when ``relay``.
        source_holding, target_holding: indices into those ranks' holdings.
        source_tokens: rows that the source owns; rows are copied that both sides own.
        stripe, stripes: of the request's rows, this item has the ``stripe``-th of ``stripes`` even parts.
        converts: the two dtypes differ, by consent of both layouts.
    """

    component: str
    layers: tuple[int, ...]
    box: Box
    source: int
    target: int
    source_holding: int
    target_holding: int
    source_tokens: TokenOwnership
    target_tokens: TokenOwnership
    stripe: int
    stripes: int
    relay: bool
    converts: bool

    def key(self) -> list[object]:
        """Canonical form for the plan digest."""
        tokens = [(t.interleave, t.size, t.index) for t in (self.source_tokens, self.target_tokens)]
        return [
            self.component, self.layers, self.box.starts, self.box.stops, self.source, self.target,
            self.source_holding, self.target_holding, tokens, self.stripe, self.stripes, self.relay, self.converts,
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edge:
    """A pair of ranks between which items flow; ``relay`` edges join two ranks of the target worker."""

    source: int
    target: int
    relay: bool


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All copy items of one layout pair, proved to cover every target box exactly once.

    ``edges`` maps each pair to its items in sending order (per-request state first). Every source rank has at
    least one edge, perhaps without items, so that completion at a source is a plain count of readers.
    """

    source: Layout
    target: Layout
    fan_out: bool
    items: tuple[CopyItem, ...]

    @cached_property
    def edges(self) -> dict[Edge, tuple[CopyItem, ...]]:
        """Items by pair of ranks."""
        found: dict[Edge, list[CopyItem]] = defaultdict(list)
        for item in self.items:
            found[Edge(item.source, item.target, item.relay)].append(item)
        busy = {edge.source for edge in found if not edge.relay}
        for rank in range(len(self.source)):
            if rank not in busy:
                found[Edge(rank, rank % len(self.target), False)] = []
        return {edge: tuple(found[edge]) for edge in sorted(found, key=lambda e: (e.relay, e.source, e.target))}

    @cached_property
    def row_bytes(self) -> dict[Edge, tuple[int, ...]]:
        """Bytes of one row of one layer of each item, as it travels, in the order of ``edges``."""
        found = {}
        for edge, items in self.edges.items():
            holdings = (self.target if edge.relay else self.source).ranks[edge.source].holdings
            found[edge] = tuple(item.box.volume * holdings[item.source_holding].itemsize for item in items)
        return found

    @cached_property
    def touched(self) -> dict[Edge, tuple[tuple[str, ...], frozenset[int]]]:
        """Page tables (by name, in order) and regions of the giving rank that the items of each edge lie in."""
        found = {}
        for edge, items in self.edges.items():
            giving = (self.target if edge.relay else self.source).ranks[edge.source].holdings
            tables = sorted({giving[item.source_holding].table for item in items})
            regions = frozenset(giving[item.source_holding].at(layer)[0] for item in items for layer in item.layers)
            found[edge] = tuple(tables), regions
        return found

    def readers(self, source: int, *, relay: bool = False) -> tuple[int, ...]:
        """Target ranks that read from ``source``."""
        return tuple(e.target for e in self.edges if e.source == source and e.relay == relay)

    def sources(self, target: int, *, relay: bool = False) -> tuple[int, ...]:
        """Ranks that ``target`` reads from."""
        return tuple(e.source for e in self.edges if e.target == target and e.relay == relay)

    @cached_property
    def digest(self) -> str:
        """Hex digest of both layouts and every item."""
        return canonical_digest([self.source.digest, self.target.digest, [item.key() for item in self.items]])


@dataclass(frozen=True, slots=True)
class _Class:
    """Ranks that hold the same box of the same layers and rows of one component."""

    layers: tuple[int, ...]
    box: Box
    tokens: TokenOwnership
    members: tuple[tuple[int, int], ...]  # (rank, index of holding)
    layer_set: frozenset[int]


_cache: dict[tuple[str, str, bool], Plan] = {}
_cache_lock = threading.Lock()
_CACHE_MAX = 64


def make_plan(source: Layout, target: Layout, *, fan_out: bool = True) -> Plan:
    """Plan a layout pair, or return the cached plan of an equal pair.

    Args:
        fan_out: let boxes that several target ranks of one host need cross once and be relayed there.

    Raises:
        IncompatibleError: the pair can't be mapped exactly; names component, field and both values.
    """
    key = (source.digest, target.digest, fan_out)
    with _cache_lock:
        plan = _cache.get(key)
    if plan is None:
        plan = _make_plan(source, target, fan_out)
        with _cache_lock:
            while len(_cache) >= _CACHE_MAX:
                del _cache[next(iter(_cache))]
            _cache[key] = plan
    return plan


def _make_plan(source: Layout, target: Layout, fan_out: bool) -> Plan:
    if source.spec.digest != target.spec.digest:
        compare_specs(source.spec, target.spec)
    _check_apart(target)
    items: list[CopyItem] = []
    work = _Work()
    for component in target.spec.components:
        items += _component_items(component, source, target, fan_out, work)
    plan = Plan(source=source, target=target, fan_out=fan_out, items=tuple(items))
    prove(plan)
    return plan


class _Work:
    """What planning one pair may cost: layouts come from peers, and 100 kB of tiny boxes would take a day."""

    def __init__(self) -> None:
        self.steps = 0

    def spend(self, component: Component, steps: int) -> None:
        """Count; raises IncompatibleError beyond the bound."""
        self.steps += steps
        if self.steps > _STEPS_MAX:
            found, why = f"more than {_STEPS_MAX} steps", "the boxes of the two sides are too finely cut to plan"
            raise IncompatibleError(component.name, "planning", "any", found, why=why)


def _component_items(
    component: Component, source: Layout, target: Layout, fan_out: bool, work: _Work
) -> Iterator[CopyItem]:
    givers = _classes(component.name, source, by_host=False)
    takers = _classes(component.name, target, by_host=True, split=not fan_out)
    _check_complete(component, takers, work)
    for turn, taker in enumerate(takers):
        work.spend(component, len(givers))
        for layers, candidates in _by_layer_sources(taker, givers):
            if not candidates:
                raise IncompatibleError(component.name, f"layers {_span(layers)}", "not held", "wanted")
            for cell in _cells(component, taker.box, [c.box for c in candidates], work):
                holders = [c for c in candidates if c.box.contains(cell)]
                if not holders:
                    raise IncompatibleError(component.name, f"box {_show(component, cell)}", "not held", "wanted")
                for replicas in _token_families(component, holders):
                    work.spend(component, len(taker.members) * len(taker.members))
                    yield from _stripes(component, layers, cell, replicas, taker, turn, source, target)


def _classes(name: str, layout: Layout, *, by_host: bool, split: bool = False) -> list[_Class]:
    """Group a component's holdings into classes; targets of different hosts, and of different dtypes, stay apart.

    What was rounded for one target rank must not be handed on to another that stores it exactly.
    """
    groups: dict[tuple[tuple[int, ...], Box, TokenOwnership, object], list[tuple[int, int]]] = defaultdict(list)
    for rank in layout.ranks:
        for index, h in enumerate(rank.holdings):
            if h.component == name:
                apart = (rank.rank if split else rank.host, h.dtype, h.record_format) if by_host else 0
                groups[(h.layers, h.box, h.tokens, apart)].append((rank.rank, index))
    layer_sets = {key[0]: frozenset(key[0]) for key in groups}
    return [_Class(*key[:3], tuple(members), layer_sets[key[0]]) for key, members in groups.items()]


def _check_complete(component: Component, takers: Sequence[_Class], work: _Work) -> None:
    """The target worker as a whole must hold every element, or decode would miss state."""
    whole = Box((0,) * len(component.shape), component.shape)
    everything = _Class(component.layers, whole, TokenOwnership(), (), frozenset(component.layers))
    for layers, holders in _by_layer_sources(everything, takers):
        for cell in _cells(component, whole, [h.box for h in holders], work):
            found = [h for h in holders if h.box.contains(cell)]
            if not found:
                raise IncompatibleError(
                    component.name, f"layers {_span(layers)}, box {_show(component, cell)}", "held", "not held"
                )
            list(_token_families(component, found))


def _check_apart(target: Layout) -> None:
    """What arrives must not be written over what else arrives."""
    footprints = Footprints()
    for rank in target.ranks:
        if (found := footprints.first_collision(rank)) is not None:
            (component, layer), (other, other_layer) = found
            where, shared = (
                f"memory of layer {layer} on rank {rank.rank}",
                f"shared with {other} of layer {other_layer}",
            )
            raise IncompatibleError(component, where, "apart", shared, why="each needs bytes of its own")


def _by_layer_sources(taker: _Class, givers: Sequence[_Class]) -> Iterator[tuple[tuple[int, ...], list[_Class]]]:
    """Cut the taker's layers into groups that the same givers hold."""
    near: list[_Class] = []
    apart: dict[int, bool] = {}  # by the identity of the givers' layers, which most of them share
    for g in givers:
        key = id(g.layer_set)
        if key not in apart:
            apart[key] = g.layer_set.isdisjoint(taker.layers)
        if not apart[key] and g.box.overlaps(taker.box):
            near.append(g)
    if all(g.layers == taker.layers for g in near):
        yield taker.layers, near
        return
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for layer in taker.layers:
        groups[tuple(i for i, g in enumerate(near) if layer in g.layer_set)].append(layer)
    for who, layers in groups.items():
        yield tuple(layers), [near[i] for i in who]


def _cells(component: Component, whole: Box, boxes: Sequence[Box], work: _Work) -> Iterator[Box]:
    """Cut ``whole`` at every edge of ``boxes``: each cell lies wholly in or wholly out of each of them."""
    if all(box.contains(whole) for box in boxes):
        yield whole
        return
    spans: list[list[tuple[int, int]]] = []
    for axis, (start, stop) in enumerate(zip(whole.starts, whole.stops, strict=True)):
        edges = {start, stop} | {e for b in boxes for e in (b.starts[axis], b.stops[axis]) if start < e < stop}
        spans.append(list(itertools.pairwise(sorted(edges))))
    count = math.prod(map(len, spans))
    work.spend(component, count * (len(boxes) + count // 8))  # the proof compares cells with one another
    for cell in itertools.product(*spans):
        yield Box(tuple(a for a, _ in cell), tuple(b for _, b in cell))


def _token_families(component: Component, holders: Sequence[_Class]) -> list[list[_Class]]:
    """Return, for each owner index of one complete family of token owners, the classes that replicate it."""
    families: dict[tuple[int, int], dict[int, list[_Class]]] = defaultdict(lambda: defaultdict(list))
    for h in holders:
        families[(h.tokens.size, h.tokens.interleave)][h.tokens.index].append(h)
    for (size, _), owners in sorted(families.items()):
        if len(owners) == size:
            return [owners[i] for i in range(size)]
    have = {key: sorted(owners) for key, owners in families.items()}
    raise IncompatibleError(
        component.name, "token owners (size, interleave): indices", have, "all indices", why="some tokens have no owner"
    )


def _stripes(
    component: Component, layers: tuple[int, ...], cell: Box, replicas: Sequence[_Class], taker: _Class,
    turn: int, source: Layout, target: Layout,
) -> Iterator[CopyItem]:  # fmt: skip
    """Spread one cell evenly over the ranks that have it and the ranks of the host that want it."""
    givers = sorted(m for c in replicas for m in c.members)
    givers = givers[turn % len(givers) :] + givers[: turn % len(givers)]
    stripes = math.lcm(len(givers), len(taker.members))
    stripes = stripes if stripes <= _STRIPES_MAX else max(len(givers), len(taker.members))
    per_request = component.growth is Growth.PER_REQUEST
    for k in range(stripes):
        part = layers[len(layers) * k // stripes : len(layers) * (k + 1) // stripes] if per_request else layers
        if not part:
            continue
        giver, receiver = givers[k % len(givers)], taker.members[k % len(taker.members)]
        stripe = (0, 1) if per_request else (k, stripes)
        rows = replicas[0].tokens
        yield _item(component, part, cell, source, giver, rows, target, receiver, stripe, relay=False)
        for sibling in taker.members:
            if sibling != receiver:
                yield _item(component, part, cell, target, receiver, rows, target, sibling, stripe, relay=True)


def _item(
    component: Component, layers: tuple[int, ...], cell: Box, giving: Layout, giver: tuple[int, int],
    rows: TokenOwnership, taking: Layout, taker: tuple[int, int], stripe: tuple[int, int], *, relay: bool,
) -> CopyItem:  # fmt: skip
    have = giving.ranks[giver[0]].holdings[giver[1]]
    want = taking.ranks[taker[0]].holdings[taker[1]]
    _check_formats(component.name, have, want)
    return CopyItem(
        component=component.name, layers=layers, box=cell, source=giver[0], target=taker[0],
        source_holding=giver[1], target_holding=taker[1], source_tokens=rows, target_tokens=want.tokens,
        stripe=stripe[0], stripes=stripe[1], relay=relay, converts=have.dtype != want.dtype,
    )  # fmt: skip


def _check_formats(name: str, have: Holding, want: Holding) -> None:
    if have.record_format != want.record_format:
        raise IncompatibleError(name, "record_format", have.record_format, want.record_format)
    if have.record_format:
        for attribute in ("page_rows", "box", "strides", "row_stride", "dtype"):
            mine, theirs = getattr(have, attribute), getattr(want, attribute)
            if mine != theirs:
                raise IncompatibleError(
                    name, attribute, mine, theirs, why=f"records of {have.record_format!r} are opaque"
                )
    if have.dtype != want.dtype and not (have.dtype in want.accepts and want.dtype in have.accepts):
        why, hint = "only S is converted", "configure the same dtype on both"
        if name == "S":
            why = "conversion needs both sides' consent"
            hint = "let both sides accept the other's dtype (accept_state_dtypes), or configure the same state dtype"
        raise IncompatibleError(name, "dtype", have.dtype, want.dtype, why=why, hint=hint)


def _show(component: Component, box: Box) -> str:
    return ", ".join(f"{a.name} [{lo}, {hi})" for a, lo, hi in zip(component.axes, box.starts, box.stops, strict=True))


def _span(layers: Sequence[int]) -> str:
    return f"{layers[0]}..{layers[-1]}" if len(layers) > 1 else str(layers[0])


def prove(plan: Plan) -> None:
    """Prove that every element of every target holding is written exactly once.

    Independent of how the items were made: in bounds, disjoint, volumes add up; for each (box, layer) all
    token owners and all stripes are there, once.

    Raises:
        InternalError: the plan is wrong; names component, rank and interval. Never a reason to go on.
    """
    by_holding: dict[tuple[int, int], list[CopyItem]] = defaultdict(list)
    relayed = {item.component for item in plan.items if item.relay}
    received = {(i.target, *_what(i)) for i in plan.items if not i.relay and i.component in relayed}
    for item in plan.items:
        _prove_ends(plan, item)
        if item.relay and (item.source, *_what(item)) not in received:
            what = f"{item.box}, stripe {item.stripe}"
            raise InternalError(f"{item.component}: target rank {item.source} relays {what} without receiving it")
        by_holding[(item.target, item.target_holding)].append(item)
    for rank in plan.target.ranks:
        for index, holding in enumerate(rank.holdings):
            _prove_holding(rank.rank, holding, by_holding[(rank.rank, index)])


def _what(item: CopyItem) -> tuple[object, ...]:
    """What an item carries, whoever gives and takes it."""
    return item.component, item.layers, item.box, item.source_tokens, item.stripe, item.stripes


def _within(item: CopyItem, holding: Holding) -> bool:
    return item.layers == holding.layers or set(item.layers) <= set(holding.layers)


def _prove_ends(plan: Plan, item: CopyItem) -> None:
    """Both ends hold what the item says they hold, in the rows and dtypes that it says."""
    have = (plan.target if item.relay else plan.source).ranks[item.source].holdings[item.source_holding]
    want = plan.target.ranks[item.target].holdings[item.target_holding]
    if have.component != item.component or not have.box.contains(item.box) or not _within(item, have):
        raise InternalError(
            f"{item.component}: source rank {item.source} does not hold {item.box} of layers {item.layers}"
        )
    if want.component != item.component:
        raise InternalError(
            f"{item.component}: holding {item.target_holding} of target rank {item.target} is {want.component}"
        )
    if have.tokens != (item.target_tokens if item.relay else item.source_tokens) or want.tokens != item.target_tokens:
        raise InternalError(
            f"{item.component}: ranks {item.source} and {item.target} own other rows than the item says"
        )
    if item.converts != (have.dtype != want.dtype):
        raise InternalError(f"{item.component}: from {have.dtype} to {want.dtype}, but converts is {item.converts}")


def _prove_holding(rank: int, holding: Holding, items: list[CopyItem]) -> None:
    where = f"target rank {rank}, {holding.component}"
    if not all(_within(item, holding) for item in items):
        raise InternalError(f"{where}: an item writes layers that the rank does not hold")
    groups: dict[tuple[int, ...], int] = {}
    if all(item.layers == holding.layers for item in items):
        groups[tuple(range(len(items)))] = holding.layers[0]
    else:
        held = [frozenset(item.layers) for item in items]
        for layer in holding.layers:
            groups.setdefault(tuple(i for i, layers in enumerate(held) if layer in layers), layer)
    for who, layer in groups.items():
        boxes: dict[Box, list[CopyItem]] = defaultdict(list)
        for i in who:
            boxes[items[i].box].append(items[i])
        if not boxes_cover(holding.box, list(boxes)):
            raise InternalError(f"{where}, layer {layer}: {list(boxes)} do not cover {holding.box} exactly")
        for box, parts in boxes.items():
            families = {(p.source_tokens.interleave, p.source_tokens.size) for p in parts}
            seen = sorted((p.source_tokens.index, p.stripe * _STRIPES_MAX**2 // p.stripes, p.stripes) for p in parts)
            owners = {p.source_tokens.index: p.stripes for p in parts}
            want = sorted((o, s * _STRIPES_MAX**2 // n, n) for o, n in owners.items() for s in range(n))
            if len(families) != 1 or seen != want or set(owners) != set(range(next(iter(families))[1])):
                raise InternalError(f"{where}, layer {layer}, {box}: rows are not covered exactly once")
