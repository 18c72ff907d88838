"""Tensors: from the cache tensors that vLLM registers, as they really lie, to this rank's layout and page tables.

In come shapes, strides and the facts of vLLM's KV cache groups, as plain values; out comes a ``RankLayout``, of which
everything that is known twice was compared with the spec. How a release lays a cache out is ``vllm_forms.py``'s; this
file imports neither torch nor vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pdxfer.connectors.vllm_forms import KINDS, CacheGroup, CacheView, Piece, check_same, find_pieces
from pdxfer.errors import IncompatibleError, MisuseError
from pdxfer.layout import Box, Holding, RankLayout, RegionShape
from pdxfer.spec import CacheSpec, Component

__all__ = ["CacheGroup", "CacheView", "GroupTable", "RankTensors", "read_layout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTable:
    """How block ids of one group become a page table.

    ::

        block ids      |      7      |      3      |        pages_per_block 2
        page table     |  14  |  15  |  6   |  7   |        page_rows rows each
    """

    name: str
    group: int
    kind: str
    page_rows: int
    pages_per_block: int
    block_tokens: int
    mode: str = "none"

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
    reader = _Reader(spec, num_blocks, tp_rank, tp_size, conv_order, accepts)
    tables = [table for group in groups if (table := reader.group(group, views)) is not None]
    reader.check_complete(range(spec.num_layers) if layers_held is None else layers_held)
    return RankTensors(rank=reader.finish(rank), tables=tuple(tables), storages=tuple(reader.storages))


def _refuse_strangers(groups: Sequence[CacheGroup], views: Mapping[str, Sequence[CacheView]]) -> None:
    """Every registered tensor must be in a group that we know, and the other way round."""
    for group in groups:
        if group.kind not in KINDS:
            raise MisuseError(
                f"{', '.join(group.layers[:1])}: caches of kind {group.kind!r} are not supported",
                hint=f"group {group.index} of vLLM; known are {', '.join(KINDS)}",
            )
    grouped = {name for group in groups for name in group.layers}
    if strange := sorted(set(views) ^ grouped):
        where = "registered but in no group" if strange[0] in views else "in a group but not registered"
        raise MisuseError(f"{strange[0]}: a cache that is {where} can't be described")


class _Reader:
    """Reads group by group and collects this rank's holdings: one for all layers of the same geometry."""

    def __init__(
        self, spec: CacheSpec, num_blocks: int, tp_rank: int, tp_size: int, conv_order: str, accepts: tuple[str, ...]
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
            box = partial(self._box, group, name)
            pieces = find_pieces(group, name, components, views[name], conv_order=self.conv_order, box=box)
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
            raise MisuseError(
                f"{name}: layer {numbers[0]} is none of the model's {self.spec.num_layers}, nor a drafter's"
            )
        return numbers[0]

    def _hold(self, group: CacheGroup, name: str, layer: int, piece: Piece) -> None:
        component, tensor = self.spec[piece.component], piece.tensor
        box = self._box(group, name, component)
        check_same(name, component.name, "shape", piece.shape, box.shape)
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

    def _table(self, group: CacheGroup, name: str, pieces: Sequence[Piece]) -> GroupTable:
        """A layer's page table, and the check that its pages make up the scheduler's blocks."""
        component, pages, rows = pieces[0].component, pieces[0].pages, pieces[0].page_rows
        if pages % self.num_blocks or any(piece.pages != pages for piece in pieces):
            counts = ", ".join(str(piece.pages) for piece in pieces)
            raise MisuseError(f"{name}: {counts} pages can't make up {self.num_blocks} blocks")
        per_block = pages // self.num_blocks
        if group.kind == "state":
            check_same(name, component, "pages of a block", per_block, 1)
        else:
            tokens = per_block * rows * self.spec[component].tokens_per_row
            check_same(name, component, "tokens of a block", tokens, group.block_tokens)
        return GroupTable(
            name=_table_name(group), group=group.index, kind=group.kind, page_rows=rows, pages_per_block=per_block,
            block_tokens=group.block_tokens, mode=group.mode,
        )  # fmt: skip

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


def _table_name(group: CacheGroup) -> str:
    return f"group{group.index}"
