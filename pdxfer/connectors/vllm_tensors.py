"""Tensors: from the cache tensors that vLLM registers, as they really lie, to this rank's layout.

In come shapes, strides and the facts of vLLM's KV cache groups, as plain values; out comes a ``RankLayout``, checked
against the spec. It imports neither torch nor vLLM. (First version: the forms of vLLM 0.32.)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdxfer.errors import IncompatibleError, MisuseError
from pdxfer.layout import Box, Holding, RankLayout, RegionShape
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component

__all__ = ["CacheGroup", "CacheView", "GroupTable", "RankTensors", "read_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheView:
    """One registered tensor: shape and strides in elements, offset in bytes from its storage's start."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: int
    storage_bytes: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One KV cache group of vLLM. ``kind``: attention, latent or state; anything else is refused by its name.

    ``interior`` of an attention page: ``row`` (K is the first part of each row, V the rest) or ``cpu`` (of one head's
    rows, the first half is K as [dim, token], the second V as [token, dim]). ``state_order``: VK, or KV on the CPU.
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
    """How block ids of one group become a page table. ``margin``: a state page has bytes that no component covers."""

    name: str
    group: int
    kind: str
    page_rows: int
    pages_per_block: int
    block_tokens: int
    mode: str = "none"
    margin: bool = False

    def pages(self, block_ids: Sequence[int], tokens: int, first_token: int = 0) -> list[int]:
        """Kernel pages in token order, -1 for those wholly before ``first_token``; of a state group the running slot.

        Raises:
            MisuseError: a block that is needed is missing, or the null block.
        """
        if self.kind == "state":
            index = 0 if self.mode == "none" else -(-tokens // self.block_tokens) - 1
            return [self._block(block_ids, index, tokens)]
        pages = []
        for page in range(-(-tokens // self.block_tokens) * self.pages_per_block):
            index, within = divmod(page, self.pages_per_block)
            here = (page + 1) * self.page_rows <= first_token
            pages.append(-1 if here else self._block(block_ids, index, tokens) * self.pages_per_block + within)
        return pages

    def _block(self, block_ids: Sequence[int], index: int, tokens: int) -> int:
        if index >= len(block_ids) or not block_ids[index]:
            raise MisuseError(f"group {self.group}: no block at {index} for a request of {tokens} tokens")
        return block_ids[index]


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
) -> RankTensors:
    """Describe this rank; raises MisuseError or IncompatibleError that names the layer, component and field."""
    storages = {view.storage: view.storage_bytes for tensors in views.values() for view in tensors}
    reader = _Reader(spec, tuple(storages), num_blocks, tp_rank, tp_size, conv_order, accepts)
    tables = [reader.group(group, views) for group in groups if not group.draft]
    regions = tuple(RegionShape(name=f"kv.{i}", nbytes=nbytes) for i, nbytes in enumerate(storages.values()))
    layout = RankLayout(rank=rank, regions=regions, holdings=tuple(reader.holdings))
    return RankTensors(rank=layout, tables=tuple(tables), storages=tuple(storages))


@dataclass(slots=True)
class _Reader:
    spec: CacheSpec
    storages: tuple[int, ...]
    num_blocks: int
    tp_rank: int
    tp_size: int
    conv_order: str
    accepts: tuple[str, ...]
    holdings: list[Holding]

    def __init__(
        self, spec: CacheSpec, storages: tuple[int, ...], num_blocks: int, tp_rank: int, tp_size: int,
        conv_order: str, accepts: tuple[str, ...],
    ) -> None:  # fmt: skip
        self.spec, self.storages, self.num_blocks = spec, storages, num_blocks
        self.tp_rank, self.tp_size, self.conv_order, self.accepts = tp_rank, tp_size, conv_order, accepts
        self.holdings = []

    def group(self, group: CacheGroup, views: Mapping[str, Sequence[CacheView]]) -> GroupTable:
        """Add the holdings of a group's layers; returns its table."""
        read = {"attention": self._attention, "latent": self._latent, "state": self._state}.get(group.kind)
        if read is None:
            raise MisuseError(f"{group.layers[0]}: caches of kind {group.kind} are not supported")
        found: GroupTable | None = None
        for name in group.layers:
            table = read(group, name, views[name][0])
            if found is not None and table != found:
                raise MisuseError(f"{name}: pages of one group differ: {table} and {found}")
            found = table
        assert found is not None
        return found

    def _attention(self, group: CacheGroup, name: str, view: CacheView) -> GroupTable:
        pages, heads, rows, width = view.shape
        size, dim = DTYPE_BYTES[view.dtype], group.head_size
        self._same(name, "kv", "row width", width, dim + group.head_size_v)
        head, row = view.strides[1] * size, view.strides[2] * size
        if group.interior == "cpu":
            places = (("kv.k", 0, (head, rows * size), size), ("kv.v", rows * dim * size, (head, size), dim * size))
        else:
            places = (("kv.k", 0, (head, size), row), ("kv.v", dim * size, (head, size), row))
        for component, offset, strides, row_stride in places:
            box = self._box(self.spec[component])
            self._same(name, component, "shape", box.shape, (heads, dim if component == "kv.k" else group.head_size_v))
            self._hold(component, group, name, view, box, view.dtype, offset, strides, row_stride)
        return self._table(group, rows, pages)

    def _latent(self, group: CacheGroup, name: str, view: CacheView) -> GroupTable:
        pages, _, rows, width = view.shape
        size, offset = DTYPE_BYTES[view.dtype], 0
        for component in ("latent", "rope"):
            if component in self.spec:
                box = self._box(self.spec[component])
                row = view.strides[2] * size
                self._hold(component, group, name, view, box, view.dtype, offset, (size,), row)
                offset += box.shape[0] * size
        self._same(name, "latent", "row width", width * size, offset)
        return self._table(group, rows, pages)

    def _state(self, group: CacheGroup, name: str, view: CacheView) -> GroupTable:
        conv, state = group.state_shapes
        rows, channels = conv if self.conv_order == "SD" else conv[::-1]
        size, at = DTYPE_BYTES[group.state_dtypes[0]], 0
        strides = (size, channels * size) if self.conv_order == "SD" else (rows * size, size)
        taps = 0
        for component in (c for c in self.spec.components if c.name.startswith("conv.")):
            box = self._box(component)
            self._hold(component.name, group, name, view, box, group.state_dtypes[0], at * strides[0], strides, 0)
            at, taps = at + box.shape[0], box.shape[1]
        self._same(name, "conv", "channels", channels, at)
        box = self._box(self.spec["S"])
        size = DTYPE_BYTES[group.state_dtypes[1]]
        packed = [math.prod(state[i + 1 :]) * size for i in range(len(state))]
        if group.state_order == "VK" and len(state) == 3:
            packed[1], packed[2] = packed[2], packed[1]
        self._same(name, "S", "elements", math.prod(state), box.volume)
        offset = math.prod(conv) * DTYPE_BYTES[group.state_dtypes[0]]
        self._hold("S", group, name, view, box, group.state_dtypes[1], offset, tuple(packed), 0, self.accepts)
        return self._table(group, 1, view.shape[0], margin=rows > taps)

    def _table(self, group: CacheGroup, rows: int, pages: int, *, margin: bool = False) -> GroupTable:
        return GroupTable(
            name=f"group{group.index}",
            group=group.index,
            kind=group.kind,
            page_rows=rows,
            pages_per_block=pages // self.num_blocks,
            block_tokens=group.block_tokens,
            mode=group.mode,
            margin=margin,
        )

    def _hold(
        self, component: str, group: CacheGroup, name: str, view: CacheView, box: Box, dtype: str, offset: int,
        strides: tuple[int, ...], row_stride: int, accepts: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.holdings.append(
            Holding(
                component=component,
                layers=(_layer(name),),
                box=box,
                dtype=dtype,
                table=f"group{group.index}",
                regions=(self.storages.index(view.storage),),
                offsets=(view.offset + offset,),
                strides=strides,
                row_stride=row_stride,
                page_rows=view.shape[2] if row_stride else 1,
                page_stride=view.strides[0] * DTYPE_BYTES[view.dtype],
                pages=view.shape[0],
                accepts=accepts,
            )
        )

    def _box(self, component: Component) -> Box:
        starts, stops = zip(*self._intervals(component), strict=True)
        return Box(starts, stops)

    def _intervals(self, component: Component) -> Iterator[tuple[int, int]]:
        for axis in component.axes:
            cut = axis.name == component.ownership.axis
            yield component.ownership.interval(axis.extent, self.tp_rank, self.tp_size) if cut else (0, axis.extent)

    def _same(self, layer: str, component: str, field: str, found: object, wanted: object) -> None:
        if found != wanted:
            raise IncompatibleError(component, field, found, wanted, why=f"{layer} of vLLM and the model's config")


def _layer(name: str) -> int:
    found = re.search(r"\.(\d+)\.", name)
    if found is None:
        raise MisuseError(f"{name}: a layer without a number is not supported")
    return int(found[1])
