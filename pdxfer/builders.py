"""Builders: layouts of the usual engine placements, from a spec, a parallel arrangement and a storage format.

In come numbers; out goes a ``Layout``. An engine whose caches look otherwise builds its holdings itself
from real tensors' strides; nothing downstream can tell the difference.

Every placement stores *tensors*: one or several components side by side on one axis::

    conv   [ channels: q | k | v ][ taps ]        or  [ taps ][ channels ]
    kv     [ row ][ heads ][ dim: K | V ]         or  [ heads ][ row ][ dim ], K and V packed or apart
    latent [ row ][ dim: latent | rope ]
    S      [ heads ][ K ][ V ]                    or  [ heads ][ V ][ K ]

and differs in where a layer's tensors go::

    per_layer     one region per tensor and layer, dense pages
    per_request   state of all layers in one slot, one after the other; KV as per_layer
    unified       one region; page p of the j-th layer of every group is bytes [(p * J + j) * page_bytes, +page_bytes),
                  KV and state pages of equal size, each group with its own table (vLLM's hybrid allocator)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pdxfer.errors import MisuseError
from pdxfer.layout import Box, Holding, Layout, RankLayout, RegionShape, TokenOwnership
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component, Growth, Ownership

__all__ = ["PLACEMENTS", "Parallel", "Storage", "build_layout"]

PLACEMENTS = ("per_layer", "per_request", "unified")

_Pieces = list[tuple[int, dict[str, Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How a worker's ranks split a model. Rank number = (stage * cp + cp index) * tp + tp index.

    Attributes:
        tp: tensor-parallel size.
        stages: layers per pipeline stage, in order; () is one stage with all. May be uneven.
        cp: context-parallel size; interleave: consecutive rows per owner.
        ranks_per_host: how many ranks share a machine; 0 is all of them.
        ownership: component name to a rule that overrides the model's (engines differ).
    """

    tp: int = 1
    stages: tuple[int, ...] = ()
    cp: int = 1
    interleave: int = 1
    ranks_per_host: int = 0
    ownership: Mapping[str, Ownership] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_at_least(1, tp=self.tp, cp=self.cp, interleave=self.interleave, stages=min(self.stages, default=1))
        _check_at_least(0, ranks_per_host=self.ranks_per_host)

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """Layer numbers of each stage; raises MisuseError unless the stages add up to ``num_layers``."""
        stages = self.stages or (num_layers,)
        if sum(stages) != num_layers:
            raise MisuseError(f"stages {stages} hold {sum(stages)} layers, the model has {num_layers}")
        stops = [sum(stages[: i + 1]) for i in range(len(stages))]
        return tuple(range(stop - n, stop) for n, stop in zip(stages, stops, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """An engine's storage habits.

    Attributes:
        page_tokens: tokens per page (for ``unified`` the least; it grows until it covers the state page).
        kv_order: ``NHD`` (row, head, dim) or ``HND`` (head, row, dim) inside a page.
        kv_packed, latent_packed: K and V, or latent and rope, side by side in one row.
        conv_order: ``CT`` (channels, taps) or ``TC`` (taps, channels). conv_fused: parts in one tensor.
        state_order: ``KV`` or ``VK`` for S with axes K and V; other S are stored in their own order.
        taps_before, taps_after: columns stored beside the taps that matter: older ones in front
            (transformers keeps 1), rows for speculative tokens behind.
        kv_dtype, conv_dtype, state_dtype: what is stored; "" is the spec's suggestion.
        accepts: dtypes of the other side to convert with, for state (``S``) only.
        pages, slots: capacity; alignment_tokens: step in which ``unified`` grows the page.
    """

    page_tokens: int = 16
    kv_order: str = "NHD"
    kv_packed: bool = False
    latent_packed: bool = True
    conv_order: str = "CT"
    conv_fused: bool = True
    state_order: str = "KV"
    taps_before: int = 0
    taps_after: int = 0
    kv_dtype: str = ""
    conv_dtype: str = ""
    state_dtype: str = ""
    accepts: tuple[str, ...] = ()
    pages: int = 64
    slots: int = 8
    alignment_tokens: int = 16

    def __post_init__(self) -> None:
        choices = {"kv_order": ("NHD", "HND"), "conv_order": ("CT", "TC"), "state_order": ("KV", "VK")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise MisuseError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        sizes = {"page_tokens": self.page_tokens, "pages": self.pages, "slots": self.slots}
        _check_at_least(1, **sizes, alignment_tokens=self.alignment_tokens)
        _check_at_least(0, taps_before=self.taps_before, taps_after=self.taps_after)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """Components stored side by side on ``concat``; ``order`` runs from the outermost axis to the innermost."""

    parts: tuple[Component, ...]
    order: tuple[str, ...]
    concat: str
    dtype: str
    margin: tuple[int, int]
    paged: bool


def build_layout(spec: CacheSpec, parallel: Parallel, storage: Storage, placement: str = "per_layer") -> Layout:
    """Lay a spec out on ``parallel`` ranks as ``placement`` engines do.

    Raises:
        MisuseError: the model can't be cut that way; the message names component and sizes.
    """
    if placement not in PLACEMENTS:
        raise MisuseError(f"placement {placement!r} is unknown; known are {', '.join(PLACEMENTS)}")
    tensors = tuple(_tensors(spec, storage))
    ranks: list[RankLayout] = []
    for layers in parallel.stage_layers(spec.num_layers):
        for cp in range(parallel.cp):
            tokens = TokenOwnership(interleave=parallel.interleave, size=parallel.cp, index=cp)
            for tp in range(parallel.tp):
                rank = len(ranks)
                builder = _RankBuilder(storage, parallel, tp, tokens, tuple(layers))
                builder.place(tensors, placement)
                host = rank // parallel.ranks_per_host if parallel.ranks_per_host else 0
                ranks.append(builder.finish(rank, host))
    return Layout(spec=spec, ranks=tuple(ranks))


def _tensors(spec: CacheSpec, storage: Storage) -> Iterator[_Tensor]:
    """Group the spec's components into the tensors that this storage format keeps."""
    for names in _side_by_side(spec, storage):
        parts = tuple(spec[name] for name in names)
        first = parts[0]
        conv, state = names[0].startswith("conv."), names[0] == "S"
        axes = [a.name for a in first.axes]
        if conv and storage.conv_order == "TC":
            axes.reverse()
        if state and {"K", "V"} <= set(axes) and storage.state_order == "VK":
            axes = [{"K": "V", "V": "K"}.get(a, a) for a in axes]
        if first.growth is not Growth.PER_REQUEST:
            axes.insert(1 if "heads" in axes and storage.kv_order == "HND" else 0, "row")
        chosen = storage.state_dtype if state else storage.conv_dtype if conv else storage.kv_dtype
        yield _Tensor(
            parts=parts,
            order=tuple(axes),
            concat="channels" if conv else "dim",
            dtype=chosen or first.dtype,
            margin=(storage.taps_before, storage.taps_after) if conv else (0, 0),
            paged=first.growth is not Growth.PER_REQUEST,
        )


def _side_by_side(spec: CacheSpec, storage: Storage) -> Iterator[tuple[str, ...]]:
    conv = tuple(c.name for c in spec.components if c.name.startswith("conv."))
    packs = [conv] if storage.conv_fused else []
    packs += [("kv.k", "kv.v"), ("window.k", "window.v")] if storage.kv_packed else []
    packs += [("latent", "rope")] if storage.latent_packed else []
    done: set[str] = set()
    for component in spec.components:
        pack = next((p for p in packs if component.name in p), (component.name,))
        held = tuple(name for name in pack if name in spec)
        if component.name not in done:
            done.update(held)
            yield held


class _RankBuilder:
    """Collects regions and holdings of one rank."""

    def __init__(
        self, storage: Storage, parallel: Parallel, tp: int, tokens: TokenOwnership, layers: tuple[int, ...]
    ) -> None:
        self.storage, self.parallel, self.tp, self.tokens, self.layers = storage, parallel, tp, tokens, layers
        self.regions: list[RegionShape] = []
        self.holdings: list[Holding] = []

    def finish(self, rank: int, host: int) -> RankLayout:
        return RankLayout(rank=rank, host=host, regions=tuple(self.regions), holdings=tuple(self.holdings))

    def place(self, tensors: tuple[_Tensor, ...], placement: str) -> None:
        if placement == "unified":
            self._unified(tensors)
            return
        state = [t for t in tensors if not t.paged]
        if placement == "per_request" and any(self._held(t) for t in state):
            self._one_block_per_request(state)
        for tensor in tensors:
            if tensor.paged or placement == "per_layer":
                self._per_layer(tensor)

    def _held(self, tensor: _Tensor) -> tuple[int, ...]:
        return tuple(x for x in tensor.parts[0].layers if x in self.layers)

    def _per_layer(self, tensor: _Tensor) -> None:
        pieces, nbytes = self._pieces(tensor, self.storage.page_tokens)
        pages = self.storage.pages if tensor.paged else self.storage.slots
        at = {x: (self._region(f"{tensor.parts[0].name}.{x}", pages * nbytes), 0) for x in self._held(tensor)}
        self._hold(tensor, pieces, at, nbytes, pages, _table(tensor))

    def _one_block_per_request(self, tensors: list[_Tensor]) -> None:
        """Slot: layer by layer, all tensors of a layer one after the other."""
        cursor = 0
        offsets: list[dict[int, int]] = [{} for _ in tensors]
        for layer in self.layers:
            for tensor, mine in zip(tensors, offsets, strict=True):
                if layer in tensor.parts[0].layers:
                    mine[layer] = _align(cursor, 16)
                    cursor = mine[layer] + self._pieces(tensor, 1)[1]
        stride = _align(cursor, 64)
        region = self._region("state", stride * self.storage.slots)
        for tensor, mine in zip(tensors, offsets, strict=True):
            at = {layer: (region, offset) for layer, offset in mine.items()}
            self._hold(tensor, self._pieces(tensor, 1)[0], at, stride, self.storage.slots, "state")

    def _unified(self, tensors: tuple[_Tensor, ...]) -> None:
        kinds = [[t for t in tensors if _table(t) == name and self._held(t)] for name in ("kv", "window", "state")]
        kinds = [k for k in kinds if k]
        if not kinds:
            return
        page_tokens, page_bytes = self._unified_page(kinds)
        depth = min(len(self._kind_layers(k)) for k in kinds)
        groups = [(k, g, chunk) for k in kinds for g, chunk in enumerate(_chunks(self._kind_layers(k), depth))]
        block_stride = depth * page_bytes
        region = self._region("pages", block_stride * self.storage.pages)
        for kind, g, chunk in groups:
            cursor = 0
            for tensor in kind:
                pieces, nbytes = self._pieces(tensor, page_tokens)
                held = [x for x in chunk if x in tensor.parts[0].layers]
                at = {x: (region, chunk.index(x) * page_bytes + cursor) for x in held}
                self._hold(tensor, pieces, at, block_stride, self.storage.pages, f"{_table(tensor)}.{g}")
                cursor = _align(cursor + nbytes, 16)

    def _unified_page(self, kinds: list[list[_Tensor]]) -> tuple[int, int]:
        """Tokens and bytes of the one page size."""
        paged = [k for k in kinds if k[0].paged]
        state_bytes = max((self._cell_bytes(k, 1) for k in kinds if not k[0].paged), default=0)
        step = max(self.storage.page_tokens, self.storage.alignment_tokens if paged and state_bytes else 1)
        if not paged:
            return step, _align(state_bytes, 64)
        per_token = max(self._cell_bytes(k, step) for k in paged) / step
        tokens = step * max(1, math.ceil(state_bytes / (per_token * step)))
        return tokens, _align(max(state_bytes, *(self._cell_bytes(k, tokens) for k in paged)), 64)

    def _cell_bytes(self, kind: list[_Tensor], page_tokens: int) -> int:
        cursor = 0
        for tensor in kind:
            cursor = _align(cursor, 16) + self._pieces(tensor, page_tokens)[1]
        return cursor

    def _kind_layers(self, kind: list[_Tensor]) -> list[int]:
        return sorted({layer for tensor in kind for layer in self._held(tensor)})

    def _region(self, name: str, nbytes: int) -> int:
        self.regions.append(RegionShape(name=name, nbytes=nbytes))
        return len(self.regions) - 1

    def _pieces(self, tensor: _Tensor, page_tokens: int) -> tuple[_Pieces, int]:
        """Cut one tensor for this rank: each component's first byte in page 0 and its geometry; bytes of one page."""
        boxes = [self._box(c) for c in tensor.parts]
        name, per_row = tensor.parts[0].name, tensor.parts[0].tokens_per_row
        rows = page_tokens // per_row if tensor.paged else 1
        if rows * per_row != page_tokens and tensor.paged:
            raise MisuseError(f"{name}: {page_tokens} tokens per page don't divide into rows of {per_row} tokens")
        names = [a.name for a in tensor.parts[0].axes]
        extents = dict(zip(names, boxes[0].shape, strict=True)) | {"row": rows}
        if len(boxes) > 1:
            extents[tensor.concat] = sum(b.shape[names.index(tensor.concat)] for b in boxes)
        if "taps" in extents:
            extents["taps"] += sum(tensor.margin)
        strides, reach = {"row": 0}, DTYPE_BYTES[tensor.dtype]
        for axis in reversed(tensor.order):
            strides[axis] = reach
            reach *= extents[axis]
        pieces: _Pieces = []
        along = 0
        geometry = {"strides": tuple(strides[n] for n in names), "row_stride": strides["row"], "page_rows": rows}
        for component, box in zip(tensor.parts, boxes, strict=True):
            start = along * strides.get(tensor.concat, 0) + tensor.margin[0] * strides.get("taps", 0)
            pieces.append((start, {"component": component.name, "box": box, **geometry}))
            along += box.shape[names.index(tensor.concat)] if tensor.concat in names else 0
        return pieces, reach

    def _box(self, component: Component) -> Box:
        rule = self.parallel.ownership.get(component.name, component.ownership)
        starts, stops = [], []
        for axis in component.axes:
            start, stop = 0, axis.extent
            if axis.name == rule.axis:
                try:
                    start, stop = rule.interval(axis.extent, self.tp, self.parallel.tp)
                except MisuseError as error:
                    raise MisuseError(f"{component.name}: {error.message}", hint=_TP_HINT) from None
            starts.append(start)
            stops.append(stop)
        return Box(tuple(starts), tuple(stops))

    def _hold(
        self, tensor: _Tensor, pieces: _Pieces, at: dict[int, tuple[int, int]], page_stride: int, pages: int, table: str
    ) -> None:
        """``at``: region and offset of each layer held."""
        tokens = self.tokens if tensor.paged else TokenOwnership()
        for start, piece in pieces if at else ():
            held = Holding(
                **piece, layers=tuple(at), regions=tuple(region for region, _ in at.values()), dtype=tensor.dtype,
                offsets=tuple(offset + start for _, offset in at.values()), page_stride=page_stride, pages=pages,
                table=table, tokens=tokens, accepts=self.storage.accepts if piece["component"] == "S" else (),
            )  # fmt: skip
            self.holdings.append(held)


_TP_HINT = "choose a TP size that divides it (spec.tp_sizes lists them), or override the component's ownership"


def _table(tensor: _Tensor) -> str:
    return {Growth.PER_TOKEN: "kv", Growth.PER_WINDOW: "window", Growth.PER_REQUEST: "state"}[tensor.parts[0].growth]


def _check_at_least(least: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < least:
            raise MisuseError(f"{name} must be at least {least}, got {size}")


def _chunks(items: list[int], n: int) -> Iterable[list[int]]:
    return (items[i : i + n] for i in range(0, len(items), n))


def _align(value: int, step: int) -> int:
    return -(-value // step) * step
