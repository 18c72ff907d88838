"""Tensors: from the cache tensors that vLLM registers, as they really lie, to this rank's layout.

In come shapes, strides and the facts of vLLM's KV cache groups, as plain values; out comes a ``RankLayout``, of which
everything that is known twice was compared with the spec. This file imports neither torch nor vLLM.

Forms of a layer's cache, by vLLM release (B blocks of r kernel pages, H heads, N rows of a page, D and W widths)::

    attention  [B*r, H, N, 2D]      0.29 on: K is the first D of a row, V the rest; any order of strides
               [B, 2, N, H, D]      0.25, any order of strides
               [2, B, N, H, D]      0.20
    latent     [B*r, 1, N, W]       0.29 on: latent, then rope;  [B, N, W] before
    state      [B, 1, 1, bytes]     0.29 on: the states of a layer one after the other in an int8 page
               one tensor per state, [B, *shape], strided, before

Conv is one state (rows, channels), or (channels, rows) with ``conv_order`` DS, of all parts in the spec's order; KDA
in 0.20 has one per part. The newest taps lie in rows [0, taps) after prefill: the kernels' state_len is the width - 1,
whatever rows there are, and rows behind it are for speculation (``causal_conv1d.py`` and its CPU twin).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pdxfer.errors import IncompatibleError, MisuseError
from pdxfer.layout import Box, Holding, RankLayout, RegionShape
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component

__all__ = ["CacheGroup", "CacheView", "GroupTable", "RankTensors", "read_layout"]

_KINDS = ("attention", "latent", "state")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """One registered tensor: shape and strides in elements, offset in bytes from its storage's start.

    ``storage`` is any number that names the storage.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: int
    storage_bytes: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One KV cache group of vLLM.

    Attributes:
        kind: ``attention``, ``latent`` or ``state``; anything else is refused by its name.
        block_tokens: tokens of one of the scheduler's blocks.
        kv_heads, head_size, head_size_v, dtype: of attention and latent; head_size_v 0 is head_size.
        interior: of an attention page: ``row`` (K is the first part of each row, V the rest) or ``cpu`` (of one head's
            rows, the first half is K as [dim, row], the second V as [row, dim]).
        state_shapes, state_dtypes: of one block, in the order in which they are stored.
        state_order: how S of the delta rule (GDN, KDA) is stored: VK, or KV on the CPU. vLLM's shape says (heads, V, K)
            either way.
        replicated: every rank holds the whole state.
        mode, speculative: mamba_cache_mode and the blocks for speculative tokens.
        draft: layers of a drafter are among the group's.
    """

    index: int
    layers: tuple[str, ...]
    kind: str
    block_tokens: int
    kv_heads: int = 0
    head_size: int = 0
    head_size_v: int = 0
    dtype: str = ""
    interior: str = "row"
    state_shapes: tuple[tuple[int, ...], ...] = ()
    state_dtypes: tuple[str, ...] = ()
    state_order: str = "VK"
    replicated: bool = False
    mode: str = "none"
    speculative: int = 0
    draft: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    """How block ids of one group become a page table.

    ::

        block ids      |      7      |      3      |        pages_per_block 2
        page table     |  14  |  15  |  6   |  7   |        page_rows rows each

    ``margin``: a state page has rows that no component covers (speculation's).
    """

    name: str
    group: int
    kind: str
    page_rows: int
    pages_per_block: int
    block_tokens: int
    mode: str = "none"
    margin: bool = False

    def pages(self, block_ids: Sequence[int], tokens: int, first_token: int = 0) -> list[int]:
        """The page table of a request that stands at ``tokens``, all pages of its last block included.

        Of a state group it is the one running slot. Other pages wholly before ``first_token`` are -1.

        Raises:
            MisuseError: a block that is needed is missing, or the null block.
        """
        blocks = -(-tokens // self.block_tokens)
        if self.kind == "state":
            return [self._block(block_ids, 0 if self.mode == "none" else max(blocks - 1, 0), tokens)]
        first, pages = first_token * self.pages_per_block // self.block_tokens, self.pages_per_block
        table = [-1] * min(first, blocks * pages)
        for entry in range(first, blocks * pages):
            table.append(self._block(block_ids, entry // pages, tokens) * pages + entry % pages)
        return table

    def _block(self, block_ids: Sequence[int], index: int, tokens: int) -> int:
        if index < len(block_ids) and block_ids[index] > 0:
            return block_ids[index]
        found = "the null block" if index < len(block_ids) else f"only {len(block_ids)} blocks"
        first = 0 if self.kind == "state" else index * self.block_tokens
        raise MisuseError(
            f"group {self.group} ({self.kind}): block {index}, for tokens from {first} of {tokens}, is needed"
            f" and there is {found}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTensors:
    """A rank's layout, how to make its page tables, and the storages in the order of its regions."""

    rank: RankLayout
    tables: tuple[GroupTable, ...]
    storages: tuple[int, ...]


def read_layout(
    spec: CacheSpec,
    groups: Sequence[CacheGroup],
    views: Mapping[str, Sequence[CacheView]],
    *,
    num_blocks: int,
    rank: int,
    tp_rank: int,
    tp_size: int,
    conv_order: str,
    accepts: tuple[str, ...] = (),
    layers_held: Sequence[int] | None = None,
) -> RankTensors:
    """Describe this rank.

    Args:
        views: layer name to its tensors: one, or one per state.
        conv_order: ``SD`` is (rows, channels), ``DS`` (channels, rows).
        accepts: dtypes of the other side that S may be converted with.
        layers_held: the model's layers on this pipeline stage; None is all of them.

    Raises:
        MisuseError, IncompatibleError: something can't be placed, or is not as the spec says; the message names the
            layer, the component, the field and both values.
    """
    _refuse_strangers(groups, views)
    reader = _Reader(
        spec=spec, num_blocks=num_blocks, tp_rank=tp_rank, tp_size=tp_size, conv_order=conv_order, accepts=accepts
    )
    tables = [table for group in groups if (table := reader.group(group, views)) is not None]
    reader.check_complete(range(spec.num_layers) if layers_held is None else layers_held)
    return RankTensors(rank=reader.finish(rank), tables=tuple(tables), storages=tuple(reader.storages))


def _refuse_strangers(groups: Sequence[CacheGroup], views: Mapping[str, Sequence[CacheView]]) -> None:
    """Every registered tensor must be in a group that we know, and the other way round."""
    for group in groups:
        if group.kind not in _KINDS:
            raise MisuseError(
                f"{', '.join(group.layers[:1])}: caches of kind {group.kind!r} are not supported",
                hint=f"group {group.index} of vLLM; known are {', '.join(_KINDS)}",
            )
    grouped = {name for group in groups for name in group.layers}
    if strange := sorted(set(views) ^ grouped):
        where = "registered but in no group" if strange[0] in views else "in a group but not registered"
        raise MisuseError(f"{strange[0]}: a cache that is {where} can't be described")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor, or a part of one, of one layer's cache: strides and offset in bytes."""

    layer: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: int
    storage_bytes: int
    offset: int

    @classmethod
    def of(cls, layer: str, view: CacheView) -> _Tensor:
        size = _itemsize(layer, view.dtype)
        return cls(
            layer=layer,
            shape=view.shape,
            strides=tuple(stride * size for stride in view.strides),
            dtype=view.dtype,
            storage=view.storage,
            storage_bytes=view.storage_bytes,
            offset=view.offset,
        )

    def cut(self, axis: int, start: int, stop: int) -> _Tensor:
        """The part [start, stop) of one axis."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.strides[axis])

    def dense(self, keep: int, shape: tuple[int, ...], dtype: str, start_bytes: int = 0) -> _Tensor:
        """What lies row-major from ``start_bytes`` on where the axes behind the first ``keep`` are."""
        size = _itemsize(self.layer, dtype)
        strides = tuple(size * math.prod(shape[i + 1 :]) for i in range(len(shape)))
        return replace(
            self,
            shape=self.shape[:keep] + shape,
            strides=self.strides[:keep] + strides,
            dtype=dtype,
            offset=self.offset + start_bytes,
        )

    def check_dense(self, component: str, keep: int) -> None:
        """Refuse gaps behind the first ``keep`` axes."""
        wanted = self.dense(keep, self.shape[keep:], self.dtype).strides
        _same(self.layer, component, "strides", self.strides, wanted)

    def piece(self, component: str, axes: Sequence[int], page: int = 0, row: int | None = None) -> _Piece:
        """All of it as ``component``: which axes are the component's, which the page and the row in it."""
        return _Piece(self, component, tuple(axes), page, row)


@dataclass(frozen=True, slots=True)
class _Piece:
    """One component in one layer's tensor; ``axes`` of the tensor are the component's, in its order."""

    tensor: _Tensor
    component: str
    axes: tuple[int, ...]
    page: int
    row: int | None

    @property
    def pages(self) -> int:
        return self.tensor.shape[self.page]

    @property
    def page_rows(self) -> int:
        return 1 if self.row is None else self.tensor.shape[self.row]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[axis] for axis in self.axes)

    def holding(self, box: Box, table: str, accepts: tuple[str, ...]) -> Holding:
        """As a holding of layer 0 at byte 0 of region 0."""
        strides = self.tensor.strides
        return Holding(
            component=self.component,
            layers=(0,),
            regions=(0,),
            offsets=(0,),
            box=box,
            dtype=self.tensor.dtype,
            table=table,
            strides=tuple(strides[axis] for axis in self.axes),
            row_stride=0 if self.row is None else strides[self.row],
            page_rows=self.page_rows,
            page_stride=strides[self.page],
            pages=self.pages,
            accepts=accepts,
        )


class _Reader:
    """Reads group by group and collects this rank's holdings: one for all layers of the same geometry."""

    def __init__(
        self, *, spec: CacheSpec, num_blocks: int, tp_rank: int, tp_size: int, conv_order: str, accepts: tuple[str, ...]
    ) -> None:
        self.spec, self.num_blocks, self.tp_rank, self.tp_size = spec, num_blocks, tp_rank, tp_size
        self.conv_order, self.accepts = conv_order, accepts
        self.storages: dict[int, int] = {}
        self.names: dict[tuple[str, int], str] = {}
        self.places: dict[Holding, dict[int, tuple[int, int]]] = {}

    # -- what is held ------------------------------------------------------------------------------

    def group(self, group: CacheGroup, views: Mapping[str, Sequence[CacheView]]) -> GroupTable | None:
        """Add the holdings of a group's layers; returns its table, None when they are all a drafter's."""
        table: GroupTable | None = None
        for name in group.layers:
            if (layer := self._layer(group, name)) is None:
                continue
            components = {c.name: c for c in self.spec.layer_components(layer)}
            tensors = [_Tensor.of(name, view) for view in views[name]]
            pieces = tuple(self._pieces(group, name, components, tensors))
            mine = self._table(group, name, pieces)
            if table is not None and mine != table:
                raise MisuseError(f"{name}: pages of one group differ: {mine} and {table}")
            table = mine
            for piece in pieces:
                self._hold(group, name, layer, piece)
        return table

    def _layer(self, group: CacheGroup, name: str) -> int | None:
        """The model's number of a layer; None for a drafter's, which are no part of the spec."""
        parts = name.split(".")
        numbers = [int(part) for part in parts if part.isdecimal()]
        if len(numbers) != 1:
            raise MisuseError(f"{name}: a layer's name must have one number, this has {len(numbers)}")
        beyond = numbers[0] >= self.spec.num_layers
        if "mtp" in parts or (group.draft and beyond):
            return None
        if beyond:
            raise IncompatibleError("*", "layer", numbers[0], f"below {self.spec.num_layers}", why=_why(name))
        return numbers[0]

    def _hold(self, group: CacheGroup, name: str, layer: int, piece: _Piece) -> None:
        component, tensor = self.spec[piece.component], piece.tensor
        box = self._box(group, name, component)
        _same(name, component.name, "shape", piece.shape, box.shape)
        try:
            held = piece.holding(box, _table_name(group), self.accepts if component.name == "S" else ())
        except MisuseError as error:
            raise MisuseError(f"{name}: {error.message}") from None
        if (end := tensor.offset + held.span) > tensor.storage_bytes:
            raise MisuseError(
                f"{name}, {component.name}: {held.pages} pages end at byte {end} of {tensor.storage_bytes} B of storage"
            )
        if (other := self.names.setdefault((component.name, layer), name)) != name:
            raise MisuseError(f"{name}, {component.name}: {other} is layer {layer} already")
        self.storages.setdefault(tensor.storage, tensor.storage_bytes)
        region = list(self.storages).index(tensor.storage)
        self.places.setdefault(held, {})[layer] = (region, tensor.offset)

    def _box(self, group: CacheGroup, name: str, component: Component) -> Box:
        own, cuts = component.ownership, []
        for axis in component.axes:
            whole = axis.name != own.axis or group.replicated
            try:
                cuts.append((0, axis.extent) if whole else own.interval(axis.extent, self.tp_rank, self.tp_size))
            except MisuseError as error:
                raise MisuseError(f"{name}, {component.name}: {error.message}") from None
        starts, stops = zip(*cuts, strict=True)
        return Box(starts, stops)

    def _table(self, group: CacheGroup, name: str, pieces: Sequence[_Piece]) -> GroupTable:
        """A layer's page table, and the check that its pages make up the scheduler's blocks."""
        component, pages, rows = pieces[0].component, pieces[0].pages, pieces[0].page_rows
        if pages % self.num_blocks or any(piece.pages != pages for piece in pieces):
            counts = ", ".join(str(piece.pages) for piece in pieces)
            raise MisuseError(f"{name}: {counts} pages can't make up {self.num_blocks} blocks")
        per_block = pages // self.num_blocks
        if group.kind == "state":
            _same(name, component, "pages of a block", per_block, 1)
        else:
            tokens = per_block * rows * self.spec[component].tokens_per_row
            _same(name, component, "tokens of a block", tokens, group.block_tokens)
        stored = sum(map(math.prod, group.state_shapes))
        return GroupTable(
            name=_table_name(group),
            group=group.index,
            kind=group.kind,
            page_rows=rows,
            pages_per_block=per_block,
            block_tokens=group.block_tokens,
            mode=group.mode,
            margin=group.kind == "state" and stored > sum(math.prod(piece.shape) for piece in pieces),
        )

    def check_complete(self, layers_held: Sequence[int]) -> None:
        """Every component of the spec must have been found in each of its layers that is held."""
        for component in self.spec.components:
            found = sorted(layer for name, layer in self.names if name == component.name)
            wanted = [layer for layer in component.layers if layer in layers_held]
            if found != wanted:
                raise IncompatibleError(component.name, "layers", found, wanted, why="vLLM's caches and the config")

    def finish(self, rank: int) -> RankLayout:
        """All that was found."""
        holdings = []
        for held, places in self.places.items():
            layers = tuple(sorted(places))
            regions, offsets = zip(*(places[layer] for layer in layers), strict=True)
            holdings.append(replace(held, layers=layers, regions=regions, offsets=offsets))
        shapes = tuple(RegionShape(name=f"kv.{i}", nbytes=n) for i, n in enumerate(self.storages.values()))
        return RankLayout(rank=rank, regions=shapes, holdings=tuple(holdings))

    # -- how it lies -------------------------------------------------------------------------------

    def _pieces(
        self, group: CacheGroup, name: str, components: Mapping[str, Component], tensors: Sequence[_Tensor]
    ) -> Iterator[_Piece]:
        if group.kind == "state":
            yield from self._state(group, name, components, tensors)
            return
        if len(tensors) != 1:
            raise MisuseError(f"{name}: {len(tensors)} tensors for one {group.kind} cache")
        if tensors[0].dtype in ("int8", "uint8"):
            raise MisuseError(f"{name}: a cache of {tensors[0].dtype} is a record of its own and is not supported")
        _same(name, "*", "dtype", tensors[0].dtype, group.dtype)
        read = _attention if group.kind == "attention" else _latent
        yield from read(group, tensors[0], components)

    @property
    def _conv_axes(self) -> tuple[int, int]:
        """Which axes of a conv tensor [page, ...] are channels and taps."""
        return (2, 1) if self.conv_order == "SD" else (1, 2)

    def _state(
        self, group: CacheGroup, name: str, components: Mapping[str, Component], tensors: Sequence[_Tensor]
    ) -> Iterator[_Piece]:
        conv = [c for c in components.values() if c.name.startswith("conv.")]
        states = _states(group, name, tensors)
        split = len(conv) if len(states) > 2 else min(len(conv), 1)
        shapes = [state.shape[1:] for state in states]
        if len(states) != split + ("S" in components) or any(len(shape) != 2 for shape in shapes[:split]):
            raise MisuseError(
                f"{name}: states of shapes {shapes} can't be placed; the model has {sorted(components)} here",
                hint="rings for speculative decoding (ReplaySSM, RecoverSSM) are not supported",
            )
        if split == 1:
            yield from self._conv(group, states[0], conv)
        else:
            for part, state in zip(conv, states, strict=False):
                yield from self._conv(group, state, [part])
        if "S" in components:
            yield _recurrent(group, states[-1], components["S"], delta=bool(conv))

    def _conv(self, group: CacheGroup, tensor: _Tensor, parts: Sequence[Component]) -> Iterator[_Piece]:
        """Parts side by side: Q, K, V in GDN and KDA, x, B, C in Mamba2, each cut by its own rule.

        ::

            channels   |  q  |  k  |   v   |
            rows       | taps, oldest first | speculation |
        """
        channel, row = self._conv_axes
        at = 0
        for part in parts:
            width, taps = self._box(group, tensor.layer, part).shape
            if tensor.shape[row] < taps:
                raise IncompatibleError(part.name, "rows", tensor.shape[row], taps, why=_why(tensor.layer))
            yield tensor.cut(channel, at, at + width).cut(row, 0, taps).piece(part.name, (channel, row))
            at += width
        _same(tensor.layer, parts[0].name, "channels of all parts", tensor.shape[channel], at)


def _attention(group: CacheGroup, tensor: _Tensor, components: Mapping[str, Component]) -> Iterator[_Piece]:
    _check_known(tensor, components, ("kv.k", "kv.v"))
    dims = {"kv.k": group.head_size, "kv.v": group.head_size_v or group.head_size}
    heads = 1 if len(tensor.shape) == 4 else 3
    if len(tensor.shape) not in (4, 5):
        raise MisuseError(f"{tensor.layer}: an attention cache of shape {tensor.shape} is of no known form")
    _same(tensor.layer, "kv.k", "heads", tensor.shape[heads], group.kv_heads)
    if len(tensor.shape) == 5:
        yield from _keys_then_values(group, tensor, dims)
        return
    width, rows = sum(dims.values()), tensor.shape[2]
    _same(tensor.layer, "kv.k", "width of K and V", tensor.shape[3], width)
    k, size = dims["kv.k"], _itemsize(tensor.layer, tensor.dtype)
    if group.interior == "row":
        yield tensor.cut(3, 0, k).piece("kv.k", (1, 3), row=2)
        yield tensor.cut(3, k, width).piece("kv.v", (1, 3), row=2)
    elif group.interior == "cpu":
        tensor.check_dense("kv.k", 2)
        yield tensor.dense(2, (k, rows), tensor.dtype).piece("kv.k", (1, 2), row=3)
        yield tensor.dense(2, (rows, dims["kv.v"]), tensor.dtype, k * rows * size).piece("kv.v", (1, 3), row=2)
    else:
        raise MisuseError(f"{tensor.layer}: attention pages packed as {group.interior!r} are not supported")


def _keys_then_values(group: CacheGroup, tensor: _Tensor, dims: Mapping[str, int]) -> Iterator[_Piece]:
    """Releases before 0.29: an axis of two, K and V, before or behind the pages."""
    pair = [axis for axis in (0, 1) if tensor.shape[axis] == 2]
    if len(pair) != 1 or group.interior != "row":
        raise MisuseError(
            f"{tensor.layer}: in shape {tensor.shape} (interior {group.interior!r}) K and V can't be told from pages"
        )
    for side, (name, dim) in enumerate(dims.items()):
        _same(tensor.layer, name, "width", tensor.shape[4], dim)
        yield tensor.cut(pair[0], side, side + 1).piece(name, (3, 4), page=1 - pair[0], row=2)


def _latent(group: CacheGroup, tensor: _Tensor, components: Mapping[str, Component]) -> Iterator[_Piece]:
    """MLA's row: latent, then rope; an indexer's keys are a layer of their own to vLLM."""
    names = ["index_k"] if "indexer" in tensor.layer.split(".") else ["latent"]
    if names == ["latent"] and "rope" in components:  # some models have no rotary part
        names.append("rope")
    _check_known(tensor, components, names)
    if len(tensor.shape) not in (3, 4) or (len(tensor.shape) == 4 and tensor.shape[1] != 1):
        raise MisuseError(f"{tensor.layer}: a latent cache of shape {tensor.shape} is of no known form")
    last, at = len(tensor.shape) - 1, 0
    _same(tensor.layer, names[0], "width", tensor.shape[last], group.head_size)
    for name in names:
        width = components[name].shape[-1]
        yield tensor.cut(last, at, at + width).piece(name, (last,), row=last - 1)
        at += width
    _same(tensor.layer, names[0], "width of all parts", tensor.shape[last], at)


def _states(group: CacheGroup, name: str, tensors: Sequence[_Tensor]) -> list[_Tensor]:
    """One tensor [page, *shape] per state of a layer, cut out of its int8 page or as vLLM gives them."""
    if len(tensors) == 1 and tensors[0].dtype == "int8" and tensors[0].shape[1:3] == (1, 1):
        page, states, at = tensors[0], [], 0
        for shape, dtype in zip(group.state_shapes, group.state_dtypes, strict=True):
            states.append(page.dense(1, shape, dtype, at))
            at += math.prod(shape) * _itemsize(name, dtype)
        _same(name, "*", "bytes of a state page", page.shape[3], at)
        return states
    found = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
    _same(name, "*", "states", found, list(zip(group.state_shapes, group.state_dtypes, strict=True)))
    return list(tensors)


def _recurrent(group: CacheGroup, tensor: _Tensor, component: Component, *, delta: bool) -> _Piece:
    """S, by its own axes.

    The delta rule's is [heads, V, K] in vLLM's GPU kernels, which address ``o_v * K + o_k`` (its copy of FLA:
    ``fused_recurrent.py``, ``chunk_delta_h.py``, and ``kda.py`` for KDA). Where K and V are equal no size would tell.
    Lightning, without a convolution, and Mamba keep the order of our axes.
    """
    axes = [axis.name for axis in component.axes]
    if len(tensor.shape) != len(axes) + 1:
        raise MisuseError(f"{tensor.layer}: S of shape {tensor.shape[1:]} has other axes than {axes}")
    if axes != ["heads", "K", "V"] or not delta:
        return tensor.piece("S", range(1, len(axes) + 1))
    if group.state_order == "VK":
        return tensor.piece("S", (1, 3, 2))
    if group.state_order != "KV":
        raise MisuseError(f"{tensor.layer}: S stored as {group.state_order!r} is not supported")
    tensor.check_dense("S", 1)
    heads, v, k = tensor.shape[1:]
    return tensor.dense(1, (heads, k, v), tensor.dtype).piece("S", (1, 2, 3))


def _itemsize(layer: str, dtype: str) -> int:
    if dtype not in DTYPE_BYTES:
        raise MisuseError(f"{layer}: a cache of {dtype} is not supported; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


def _check_known(tensor: _Tensor, components: Mapping[str, Component], names: Sequence[str]) -> None:
    for name in names:
        if name not in components:
            raise IncompatibleError(name, "presence", "held", "absent", why=_why(tensor.layer))


def _same(layer: str, component: str, field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise IncompatibleError(component, field, found, wanted, why=_why(layer))


def _why(layer: str) -> str:
    return f"{layer}: first what vLLM's tensors say, then what the model's or vLLM's config says"


def _table_name(group: CacheGroup) -> str:
    return f"group{group.index}"
