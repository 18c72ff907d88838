"""Forms: how vLLM lays a layer's cache out, release by release, and which part of it is which component.

In come a registered tensor's shape and strides and the facts of its group, as plain values; out come *pieces*: one
component of the spec each, with a byte stride for every axis. What a piece should measure is the reader's to check
(``vllm_tensors.py``). This file imports neither torch nor vLLM.

Forms by vLLM release (B blocks of r kernel pages, H heads, N rows of a page, D and W widths)::

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from pdxfer.errors import IncompatibleError, MisuseError
from pdxfer.layout import Box, Holding
from pdxfer.spec import DTYPE_BYTES, Component

__all__ = ["KINDS", "CacheGroup", "CacheView", "Piece", "check_same", "find_pieces"]

#: Kinds of groups that can be described.
KINDS = ("attention", "latent", "state")


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
        mode: mamba_cache_mode.
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
    draft: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
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
            component=self.component, layers=(0,), regions=(0,), offsets=(0,), box=box, dtype=self.tensor.dtype,
            table=table, strides=tuple(strides[axis] for axis in self.axes), page_stride=strides[self.page],
            row_stride=0 if self.row is None else strides[self.row], page_rows=self.page_rows, pages=self.pages,
            accepts=accepts,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor(CacheView):
    """A tensor, or a part of one, of one layer's cache; strides are in bytes here, too."""

    layer: str

    @classmethod
    def of(cls, layer: str, view: CacheView) -> _Tensor:
        size = _itemsize(layer, view.dtype)
        return cls(layer=layer, **{**asdict(view), "strides": tuple(stride * size for stride in view.strides)})

    def cut(self, axis: int, start: int, stop: int) -> _Tensor:
        """The part [start, stop) of one axis."""
        shape = (*self.shape[:axis], stop - start, *self.shape[axis + 1 :])
        return replace(self, shape=shape, offset=self.offset + start * self.strides[axis])

    def dense(self, keep: int, shape: tuple[int, ...], dtype: str, start_bytes: int = 0) -> _Tensor:
        """What lies row-major from ``start_bytes`` on where the axes behind the first ``keep`` are."""
        size = _itemsize(self.layer, dtype)
        strides = tuple(size * math.prod(shape[i + 1 :]) for i in range(len(shape)))
        shape, strides = self.shape[:keep] + shape, self.strides[:keep] + strides
        return replace(self, shape=shape, strides=strides, dtype=dtype, offset=self.offset + start_bytes)

    def check_dense(self, component: str, keep: int) -> None:
        """Refuse gaps behind the first ``keep`` axes."""
        wanted = self.dense(keep, self.shape[keep:], self.dtype).strides
        check_same(self.layer, component, "strides", self.strides, wanted)

    def piece(self, component: str, axes: Sequence[int], page: int = 0, row: int | None = None) -> Piece:
        """All of it as ``component``: which axes are the component's, which the page and the row in it."""
        return Piece(self, component, tuple(axes), page, row)


def find_pieces(
    group: CacheGroup,
    layer: str,
    components: Mapping[str, Component],
    views: Sequence[CacheView],
    *,
    conv_order: str,
    box: Callable[[Component], Box],
) -> list[Piece]:
    """Say what lies where in one layer's tensors.

    Args:
        components: what the spec has in this layer.
        box: what this rank holds of a component; the widths of conv's parts can't be read off a tensor.

    Raises:
        MisuseError, IncompatibleError: the tensors are of no known form or don't fit their group.
    """
    tensors = [_Tensor.of(layer, view) for view in views]
    if group.kind == "state":
        return list(_state(group, layer, components, tensors, conv_order, box))
    if len(tensors) != 1:
        raise MisuseError(f"{layer}: {len(tensors)} tensors for one {group.kind} cache")
    if tensors[0].dtype in ("int8", "uint8"):
        raise MisuseError(f"{layer}: a cache of {tensors[0].dtype} is a record of its own and is not supported")
    check_same(layer, "*", "dtype", tensors[0].dtype, group.dtype)
    read = _attention if group.kind == "attention" else _latent
    return list(read(group, tensors[0], components))


def _attention(group: CacheGroup, tensor: _Tensor, components: Mapping[str, Component]) -> Iterator[Piece]:
    _check_known(tensor, components, ("kv.k", "kv.v"))
    dims = {"kv.k": group.head_size, "kv.v": group.head_size_v or group.head_size}
    heads = 1 if len(tensor.shape) == 4 else 3
    if len(tensor.shape) not in (4, 5):
        raise MisuseError(f"{tensor.layer}: an attention cache of shape {tensor.shape} is of no known form")
    check_same(tensor.layer, "kv.k", "heads", tensor.shape[heads], group.kv_heads)
    if len(tensor.shape) == 5:
        yield from _keys_then_values(group, tensor, dims)
        return
    width, rows = sum(dims.values()), tensor.shape[2]
    check_same(tensor.layer, "kv.k", "width of K and V", tensor.shape[3], width)
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


def _keys_then_values(group: CacheGroup, tensor: _Tensor, dims: Mapping[str, int]) -> Iterator[Piece]:
    """Releases before 0.29: an axis of two, K and V, before or behind the pages."""
    pair = [axis for axis in (0, 1) if tensor.shape[axis] == 2]
    if len(pair) != 1 or group.interior != "row":
        raise MisuseError(
            f"{tensor.layer}: in shape {tensor.shape} (interior {group.interior!r}) K and V can't be told from pages"
        )
    for side, (name, dim) in enumerate(dims.items()):
        check_same(tensor.layer, name, "width", tensor.shape[4], dim)
        yield tensor.cut(pair[0], side, side + 1).piece(name, (3, 4), page=1 - pair[0], row=2)


def _latent(group: CacheGroup, tensor: _Tensor, components: Mapping[str, Component]) -> Iterator[Piece]:
    """MLA's row: latent, then rope; an indexer's keys are a layer of their own to vLLM."""
    names = ["index_k"] if "indexer" in tensor.layer.split(".") else ["latent"]
    if names == ["latent"] and "rope" in components:  # some models have no rotary part
        names.append("rope")
    _check_known(tensor, components, names)
    if len(tensor.shape) not in (3, 4) or (len(tensor.shape) == 4 and tensor.shape[1] != 1):
        raise MisuseError(f"{tensor.layer}: a latent cache of shape {tensor.shape} is of no known form")
    last, at = len(tensor.shape) - 1, 0
    check_same(tensor.layer, names[0], "width", tensor.shape[last], group.head_size)
    for name in names:
        width = components[name].shape[-1]
        yield tensor.cut(last, at, at + width).piece(name, (last,), row=last - 1)
        at += width
    check_same(tensor.layer, names[0], "width of all parts", tensor.shape[last], at)


def _state(
    group: CacheGroup,
    layer: str,
    components: Mapping[str, Component],
    tensors: Sequence[_Tensor],
    conv_order: str,
    box: Callable[[Component], Box],
) -> Iterator[Piece]:
    parts = [c for c in components.values() if c.name.startswith("conv.")]
    states = _states(group, layer, tensors)
    apart = len(parts) if len(states) > 2 else min(len(parts), 1)
    shapes = [state.shape[1:] for state in states]
    if len(states) != apart + ("S" in components) or any(len(shape) != 2 for shape in shapes[:apart]):
        raise MisuseError(
            f"{layer}: states of shapes {shapes} can't be placed; the model has {sorted(components)} here",
            hint="rings for speculative decoding (ReplaySSM, RecoverSSM) are not supported",
        )
    for i in range(apart):
        yield from _conv(states[i], parts if apart == 1 else parts[i : i + 1], conv_order, box)
    if "S" in components:
        yield _recurrent(group, states[-1], components["S"], delta=bool(parts))


def _conv(
    tensor: _Tensor, parts: Sequence[Component], conv_order: str, box: Callable[[Component], Box]
) -> Iterator[Piece]:
    """Parts side by side: Q, K, V in GDN and KDA, x, B, C in Mamba2, each cut by its own rule.

    ::

        channels   |  q  |  k  |   v   |
        rows       | taps, oldest first | speculation |
    """
    channel, row = {"SD": (2, 1), "DS": (1, 2)}[conv_order]
    at = 0
    for part in parts:
        width, taps = box(part).shape
        if tensor.shape[row] < taps:
            raise IncompatibleError(part.name, "rows", tensor.shape[row], taps, why=_why(tensor.layer))
        yield tensor.cut(channel, at, at + width).cut(row, 0, taps).piece(part.name, (channel, row))
        at += width
    check_same(tensor.layer, parts[0].name, "channels of all parts", tensor.shape[channel], at)


def _states(group: CacheGroup, name: str, tensors: Sequence[_Tensor]) -> list[_Tensor]:
    """One tensor [page, *shape] per state of a layer, cut out of its int8 page or as vLLM gives them."""
    if len(tensors) == 1 and tensors[0].dtype == "int8" and tensors[0].shape[1:3] == (1, 1):
        page, states, at = tensors[0], [], 0
        for shape, dtype in zip(group.state_shapes, group.state_dtypes, strict=True):
            states.append(page.dense(1, shape, dtype, at))
            at += math.prod(shape) * _itemsize(name, dtype)
        check_same(name, "*", "bytes of a state page", page.shape[3], at)
        return states
    found = [(tensor.shape[1:], tensor.dtype) for tensor in tensors]
    check_same(name, "*", "states", found, list(zip(group.state_shapes, group.state_dtypes, strict=True)))
    return list(tensors)


def _recurrent(group: CacheGroup, tensor: _Tensor, component: Component, *, delta: bool) -> Piece:
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


def check_same(layer: str, component: str, field: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise IncompatibleError(component, field, found, wanted, why=_why(layer))


def _why(layer: str) -> str:
    return f"{layer}: first what vLLM's tensors say, then what the model's or vLLM's config says"
