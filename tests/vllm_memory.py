"""vLLM, as far as memory goes: allocates as a release does and fills pages through the very arrays it would register.

Written from vLLM's side, by slicing of its own: nothing of the layouts that its tests are about is used here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdxfer.connectors.vllm_tensors import CacheGroup, CacheView
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Component
from pdxfer.testing.oracle import Oracle


@dataclass(frozen=True, kw_only=True)
class Form:
    """How one release and its options lay caches out."""

    release: str = "0.32"
    order: str = "LBHNC"
    kernel_pages: int = 1
    conv_order: str = "SD"
    speculative: int = 0
    state_order: str = "VK"
    interior: str = "row"
    state_dtype: str = "float32"
    mode: str = "align"
    conv_apart: bool = False
    replicated: bool = False


@dataclass
class Engine:
    """One rank: its memory, and what it would register."""

    spec: CacheSpec
    form: Form
    rank: int
    size: int
    num_blocks: int
    views: dict[str, list[CacheView]] = field(default_factory=dict)
    arrays: dict[str, list[np.ndarray]] = field(default_factory=dict)
    groups: list[CacheGroup] = field(default_factory=list)
    storages: dict[int, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kinds = {kind: self.layers(kind) for kind in ("state", "attention", "latent")}
        kinds = {kind: layers for kind, layers in kinds.items() if layers}
        depth = min(map(len, kinds.values()))
        self.block_tokens = self._block_tokens(kinds)
        chunks = [(k, layers[i : i + depth]) for k, layers in kinds.items() for i in range(0, len(layers), depth)]
        self.page = max(self._nbytes(kind) for kind in kinds)
        for kind, layers in chunks:
            self.groups.append(self._group(len(self.groups), kind, layers))
        if self.form.release == "0.32":
            self._storage(depth * self.num_blocks * self.page)
        for slot in range(depth):
            if self.form.release != "0.32":
                self._storage(self.num_blocks * self.page)
            for group in self.groups:
                if slot < len(group.layers):
                    self._register(group, slot, depth)

    def layers(self, kind: str) -> list[int]:
        first = {"state": ("S", "conv.x"), "attention": ("kv.k",), "latent": ("latent",)}[kind]
        return sorted({x for c in self.spec.components if c.name in first for x in c.layers})

    def _storage(self, nbytes: int) -> None:
        self.storages[1000 + len(self.storages)] = np.zeros(nbytes, np.uint8)

    # -- sizes, as vLLM's calculators have them

    def heads(self) -> list[int]:
        units = self.spec["kv.k"].shape[0]
        if units >= self.size:
            return list(range(self.rank * units // self.size, (self.rank + 1) * units // self.size))
        return [self.rank // (self.size // units)]

    def conv(self) -> list[Component]:
        return [c for c in self.spec.components if c.name.startswith("conv.")]

    def chunk(self, name: str, values: np.ndarray) -> np.ndarray:
        """What this rank has of a state component, cut along its first axis."""
        if self.form.replicated or (name in ("conv.B", "conv.C") and self.spec[name].ownership.units == 1):
            return values
        width = len(values) // self.size
        return values[self.rank * width : (self.rank + 1) * width]

    def states(self, values: dict[str, np.ndarray]) -> list[np.ndarray]:
        """All states of a layer from its global components, as the kernels keep them."""
        found = []
        if parts := [self.chunk(c.name, values[c.name]) for c in self.conv()]:
            for part in parts if self.form.conv_apart else [np.concatenate(parts)]:
                rows = np.full((part.shape[1] + self.form.speculative, len(part)), 0xEEEE, part.dtype)
                rows[: part.shape[1]] = part.T
                found.append(rows if self.form.conv_order == "SD" else rows.T)
        if "S" in values:
            state = self.chunk("S", values["S"])
            if parts and state.ndim == 3 and "V" in [a.name for a in self.spec["S"].axes]:
                state = state.transpose(0, 2, 1)
            found.append(state)
        return found

    def _zeros(self) -> list[np.ndarray]:
        words = {name: np.dtype(f"u{DTYPE_BYTES[self._dtype(name)]}") for name in self._state_names()}
        return self.states({name: np.zeros(self.spec[name].shape, word) for name, word in words.items()})

    def _state_names(self) -> list[str]:
        return [c.name for c in self.spec.components if c.name == "S" or c.name.startswith("conv.")]

    def _dtype(self, name: str) -> str:
        return self.form.state_dtype if name == "S" else "bfloat16"

    def _row(self, kind: str) -> int:
        names = {"attention": ("kv.k", "kv.v"), "latent": ("latent", "rope")}[kind]
        return sum(self.spec[name].shape[-1] for name in names if name in self.spec)

    def _block_tokens(self, kinds: dict[str, list[int]]) -> int:
        paged = "attention" if "attention" in kinds else "latent"
        row = 2 * self._row(paged) * (len(self.heads()) if paged == "attention" else 1)
        step = 4 * self.form.kernel_pages
        return step * max(2, -(-(self._nbytes("state") if "state" in kinds else 0) // (row * step)))

    def _nbytes(self, kind: str) -> int:
        if kind == "state":
            return -(-sum(state.nbytes for state in self._zeros()) // 4) * 4
        return 2 * self.block_tokens * self._row(kind) * (len(self.heads()) if kind == "attention" else 1)

    def _group(self, index: int, kind: str, layers: list[int]) -> CacheGroup:
        ends = {"state": "mixer", "attention": "self_attn.attn", "latent": "self_attn.mla"}
        facts: dict[str, Any] = {}
        if kind == "state":
            states = self._zeros()
            dtypes = [self._dtype("conv")] * (len(states) - ("S" in self.spec)) + [self._dtype("S")] * (
                "S" in self.spec
            )
            facts = {"state_shapes": tuple(s.shape for s in states), "state_dtypes": tuple(dtypes)}
            facts |= {"state_order": self.form.state_order, "mode": self.form.mode, "replicated": self.form.replicated}
        elif kind == "attention":
            dims = self.spec["kv.k"].shape[1], self.spec["kv.v"].shape[1]
            facts = {"kv_heads": len(self.heads()), "head_size": dims[0], "head_size_v": dims[1], "dtype": "bfloat16"}
            facts["interior"] = self.form.interior
        else:
            facts = {"kv_heads": 1, "head_size": self._row(kind), "dtype": "bfloat16"}
        names = tuple(f"language_model.model.layers.{layer}.{ends[kind]}" for layer in layers)
        return CacheGroup(index=index, layers=names, kind=kind, block_tokens=self.block_tokens, **facts)

    # -- tensors

    def _register(self, group: CacheGroup, slot: int, depth: int) -> None:
        read = {"0.32": self._unified, "0.25": self._slots, "0.20": self._slots}[self.form.release]
        storage = list(self.storages)[-1]
        arrays, dtypes = read(group, slot, depth)
        self.arrays[group.layers[slot]] = arrays
        base = self.storages[storage].__array_interface__["data"][0]
        self.views[group.layers[slot]] = [
            CacheView(
                shape=a.shape, strides=tuple(s // a.itemsize for s in a.strides), dtype=dtype, storage=storage,
                storage_bytes=self.storages[storage].nbytes, offset=a.__array_interface__["data"][0] - base,
            )
            for a, dtype in zip(arrays, dtypes, strict=True)
        ]  # fmt: skip

    def _array(self, shape: tuple[int, ...], strides: tuple[int, ...], word: str, offset: int) -> np.ndarray:
        return np.ndarray(shape, word, self.storages[list(self.storages)[-1]].data, offset, strides)

    def _unified(self, group: CacheGroup, slot: int, depth: int) -> tuple[list[np.ndarray], list[str]]:
        """One allocation; [L, B, H, N, C] in any order."""
        order, blocks = self.form.order, self.num_blocks
        layers_outside = order.index("L") < order.index("B")
        layer, block = (blocks * self.page, self.page) if layers_outside else (self.page, depth * self.page)
        if group.kind == "state":
            nbytes = sum(state.nbytes for state in self._zeros())
            return [self._array((blocks, 1, 1, nbytes), (block, nbytes, nbytes, 1), "i1", slot * layer)], ["int8"]
        heads, width = (
            (len(self.heads()), self._row("attention")) if group.kind == "attention" else (1, self._row("latent"))
        )
        extents = {"L": depth, "B": blocks, "H": heads, "N": self.block_tokens, "C": width}
        strides, reach = {}, 2
        for axis in reversed(order):
            strides[axis], reach = reach, reach * extents[axis]
        pages = self.form.kernel_pages
        if self.layers("state"):
            strides |= {"L": layer, "B": block}
        rows = self.block_tokens // pages
        if pages > 1:  # a block is dense then, and so are its kernel pages
            assert (order, strides["B"]) == ("LBNHC", 2 * heads * self.block_tokens * width) or order == "LBHNC"
            strides["B"], strides["H"] = strides["B"] // pages, strides["H"] // (pages if order == "LBHNC" else 1)
        shape = (blocks * pages, heads, rows, width)
        return [self._array(shape, tuple(strides[a] for a in "BHNC"), "u2", slot * strides["L"])], ["bfloat16"]

    def _slots(self, group: CacheGroup, slot: int, depth: int) -> tuple[list[np.ndarray], list[str]]:
        """One allocation per slot; K and V apart; every state a tensor."""
        blocks, rows = self.num_blocks, self.block_tokens
        if group.kind == "state":
            found, at = [], 0
            for state in self._zeros():
                found.append(self._array((blocks, *state.shape), (self.page, *_dense(state)), state.dtype.str, at))
                at += state.nbytes
            return found, list(group.state_dtypes)
        if group.kind == "latent":
            width = 2 * self._row("latent")
            return [self._array((blocks, rows, width // 2), (self.page, width, 2), "u2", 0)], ["bfloat16"]
        heads, dim = len(self.heads()), group.head_size
        pair, block = rows * heads * dim * 2, self.page
        if self.form.release == "0.20" and not self.layers("state"):  # in hybrids a block's K and V are neighbours
            pair, block = blocks * pair, pair
        within = (heads * dim * 2, dim * 2) if self.form.order == "NHD" else (dim * 2, rows * dim * 2)
        strides = {"0.25": (block, pair), "0.20": (pair, block)}[self.form.release]
        shape = {"0.25": (blocks, 2), "0.20": (2, blocks)}[self.form.release]
        return [self._array((*shape, rows, heads, dim), (*strides, *within, 2), "u2", 0)], ["bfloat16"]

    # -- a request

    def fill(self, blocks: list[list[int]], oracle: Oracle) -> None:
        """Write a request as the model would."""
        for group in self.groups:
            for name in group.layers:
                layer = int(name.split(".")[3])
                if group.kind == "state":
                    names = [n for n in self._state_names() if layer in self.spec[n].layers]
                    values = {n: oracle.tensor(n, layer, self._dtype(n))[0] for n in names}
                    index = -(-oracle.tokens // self.block_tokens) - 1 if self.form.mode == "align" else 0
                    self._write_state(self.arrays[name], blocks[group.index][index], values)
                    continue
                for token in range(oracle.tokens):
                    index, row = divmod(token, self.block_tokens)
                    self._write_token(
                        group, self.arrays[name][0], blocks[group.index][index], row, token, layer, oracle
                    )

    def _write_state(self, arrays: list[np.ndarray], block: int, values: dict[str, np.ndarray]) -> None:
        kept = self.states(values)
        if self.form.state_order == "KV":  # the same shape, other bytes
            kept[-1] = np.ascontiguousarray(kept[-1].transpose(0, 2, 1)).reshape(kept[-1].shape)
        if len(arrays) > 1 or arrays[0].dtype != np.int8:
            for array, state in zip(arrays, kept, strict=True):
                where = array[block] != 0xEEEE  # never: speculation's rows are kept as they are
                array[block] = np.where((state == 0xEEEE) & where, array[block], state)
            return
        page, at = arrays[0][block, 0, 0], 0
        for state in kept:
            raw = np.ascontiguousarray(state)
            old = np.frombuffer(page[at : at + raw.nbytes].tobytes(), raw.dtype).reshape(raw.shape)
            page[at : at + raw.nbytes] = np.frombuffer(np.where(raw == 0xEEEE, old, raw).tobytes(), np.int8)
            at += raw.nbytes

    def _write_token(
        self, group: CacheGroup, array: np.ndarray, block: int, row: int, token: int, layer: int, oracle: Oracle
    ) -> None:
        if group.kind == "latent":
            parts = [oracle.tensor(n, layer)[token] for n in ("latent", "rope") if n in self.spec]
            page, row = block * self.form.kernel_pages, row
            rows = self.block_tokens // self.form.kernel_pages
            target = array[page + row // rows] if array.ndim == 3 else array[page + row // rows, 0]
            target[row % rows] = np.concatenate(parts)
            return
        for local, head in enumerate(self.heads()):
            k, v = oracle.tensor("kv.k", layer)[token, head], oracle.tensor("kv.v", layer)[token, head]
            if array.ndim == 5:
                (array[block, 0] if self.form.release == "0.25" else array[0, block])[row, local] = k
                (array[block, 1] if self.form.release == "0.25" else array[1, block])[row, local] = v
                continue
            rows = array.shape[2]
            page, within = block * self.form.kernel_pages + row // rows, row % rows
            if self.form.interior == "row":
                array[page, local, within] = np.concatenate([k, v])
                continue
            flat = array[page, local].reshape(-1)
            flat[: rows * len(k)].reshape(len(k), rows)[:, within] = k
            flat[rows * len(k) :].reshape(rows, len(v))[within] = v


def _dense(array: np.ndarray) -> tuple[int, ...]:
    return tuple(array.itemsize * math.prod(array.shape[i + 1 :]) for i in range(array.ndim))
