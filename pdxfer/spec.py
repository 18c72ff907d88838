"""CacheSpec: the caches one model keeps per request, globally and free of any worker.

In come numbers from ``models.py`` (or from an engine author); out goes a frozen description that
``layout.py`` places on ranks. This file knows neither bytes in memory nor ranks' addresses.

A *component* is one named logical tensor, the same in every layer that has it::

    kv.k      [layer, token, heads, dim]      per_token
    window.k  [layer, token, heads, dim]      per_window    (sliding window layers)
    latent    [layer, token, dim]             per_token     (MLA; ``rope`` is its own component)
    index_k   [layer, row, dim]               per_token, one row per ``tokens_per_row`` tokens
    S         [layer, heads, K, V]            per_request   (GDN, KDA, lightning)
    S         [layer, heads, head_dim, state] per_request   (Mamba2);  [layer, channels, state] (Mamba1)
    conv.q    [layer, channels, taps]         per_request   (also conv.k, conv.v; conv.x, conv.B, conv.C)

``axes`` lists what is right of the layer and the token. Convolution state is several components
because a TP rank holds a slice of *each* part, not one slice of their concatenation (vllm#55208).
``taps`` is kernel - 1: the columns that matter; what an engine stores beside them is its layout's affair.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from pdxfer.errors import IncompatibleError, MisuseError

__all__ = [
    "DTYPE_BYTES",
    "Axis",
    "CacheSpec",
    "Component",
    "Growth",
    "Ownership",
    "RequestSizes",
    "Rule",
    "canonical_digest",
    "compare_specs",
    "request_bytes",
]

#: For each component: tokens that share a row (0: one row in all), window, bytes of one row in all layers.
RequestSizes = tuple[tuple[int, int, int], ...]

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip


class Growth(str, Enum):
    """How a component grows with the request."""

    PER_TOKEN = "per_token"
    PER_WINDOW = "per_window"
    PER_REQUEST = "per_request"


class Rule(str, Enum):
    """How tensor-parallel ranks own the cut axis."""

    SHARDED = "sharded"
    REPLICATED = "replicated"
    EXTENDED = "extended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One named axis with its global extent in elements."""

    name: str
    extent: int

    def __post_init__(self) -> None:
        if self.extent < 1:
            raise MisuseError(f"axis {self.name!r} has extent {self.extent}; it must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ownership:
    """Which part of one axis rank r of n holds, in indivisible units (heads, groups, channels).

    ::

        units            |  0  |  1  |  2  |  3  |
        sharded,  n = 2  |- rank 0 --|- rank 1 --|      rank r: [r*u/n, (r+1)*u/n), n must divide u
        extended, n = 8  |r0 r1|r2 r3|r4 r5|r6 r7|      rank r: unit r*u // n      (neighbours share)
        replicated       |-------- every rank ---|

    ``extended`` is ``sharded`` while n <= units. The neighbour rule, not ``r % u``, is what engines
    use for KV heads fewer than ranks (sglang#30997 fixed the modulo).
    """

    rule: Rule
    axis: str = ""
    units: int = 1

    def interval(self, extent: int, rank: int, size: int) -> tuple[int, int]:
        """Return the half-open element interval that ``rank`` of ``size`` holds on an axis of ``extent``.

        Raises:
            MisuseError: the rule has no answer for this size; the message names units and size.
        """
        if not 0 <= rank < size:
            raise MisuseError(f"rank {rank} is not in a group of {size}")
        if self.rule is Rule.REPLICATED:
            return 0, extent
        width = extent // self.units
        if self.units % size == 0:
            per_rank = self.units // size
            return rank * per_rank * width, (rank + 1) * per_rank * width
        if self.rule is Rule.EXTENDED and size % self.units == 0:
            unit = rank * self.units // size
            return unit * width, (unit + 1) * width
        raise MisuseError(f"{self.units} units of axis {self.axis!r} can't be {self.rule.value} over {size} ranks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One named logical tensor over the layers that have it.

    Attributes:
        name: unique in the spec, e.g. ``kv.k`` or ``conv.x``.
        layers: the model's own layer numbers, ascending (layers that own nothing are skipped).
        axes: axes right of layer and token, in the canonical order.
        dtype: what the config suggests; a layout says what is really stored. Not part of the digest.
        growth: per token, per window or per request.
        ownership: the usual TP rule; a layout may override it.
        tokens_per_row: tokens that share one row (pooled index keys); 1 otherwise.
        window: tokens kept by a ``per_window`` component; 0 otherwise.
    """

    name: str
    layers: tuple[int, ...]
    axes: tuple[Axis, ...]
    dtype: str
    growth: Growth
    ownership: Ownership
    tokens_per_row: int = 1
    window: int = 0

    def __post_init__(self) -> None:
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise MisuseError(f"{self.name}: layers must be ascending, unique and not empty, got {self.layers}")
        if self.dtype not in DTYPE_BYTES:
            raise MisuseError(f"{self.name}: dtype {self.dtype!r} is unknown; known are {sorted(DTYPE_BYTES)}")
        if self.tokens_per_row < 1 or (self.growth is Growth.PER_WINDOW) != (self.window > 0):
            raise MisuseError(
                f"{self.name}: tokens_per_row {self.tokens_per_row}, window {self.window} don't fit {self.growth.value}"
            )
        own = self.ownership
        if own.rule is not Rule.REPLICATED:
            extent = self.axis(own.axis).extent
            if own.units < 1 or extent % own.units:
                raise MisuseError(f"{self.name}: {own.units} units do not divide axis {own.axis!r} of {extent}")

    def axis(self, name: str) -> Axis:
        """Return the axis called ``name``; raises MisuseError when there is none."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise MisuseError(f"{self.name} has no axis {name!r}; it has {[a.name for a in self.axes]}")

    @property
    def shape(self) -> tuple[int, ...]:
        """Global extents of ``axes``."""
        return tuple(axis.extent for axis in self.axes)

    @property
    def row_elems(self) -> int:
        """Elements of one row (one token, or one request) in one layer."""
        return math.prod(self.shape)

    def rows(self, tokens: int) -> tuple[int, int]:
        """Return the half-open range of rows that a request of ``tokens`` tokens has.

        A row that is still being pooled counts as a row.
        """
        if self.growth is Growth.PER_REQUEST:
            return 0, 1
        first = max(0, tokens - self.window) if self.growth is Growth.PER_WINDOW else 0
        return first // self.tokens_per_row, -(-tokens // self.tokens_per_row)

    def geometry(self) -> dict[str, Any]:
        """Everything that must be equal on both sides (dtype is not)."""
        return {
            "name": self.name,
            "layers": list(self.layers),
            "axes": [[a.name, a.extent] for a in self.axes],
            "growth": self.growth.value,
            "ownership": [self.ownership.rule.value, self.ownership.axis, self.ownership.units],
            "tokens_per_row": self.tokens_per_row,
            "window": self.window,
        }


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """All caches of one model.

    Attributes:
        model: the text model's ``model_type``.
        num_layers: the model's layer count, including layers that own no cache.
        query_heads: attention query heads (engines also need TP to divide them); 0 if unknown.
        components: in a fixed order; state first, as it is sent first.
    """

    model: str
    num_layers: int
    query_heads: int
    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        names = [c.name for c in self.components]
        if len(set(names)) != len(names):
            raise MisuseError(f"component names repeat: {names}")
        for c in self.components:
            if c.layers[-1] >= self.num_layers:
                raise MisuseError(f"{c.name}: layer {c.layers[-1]} is outside the model's {self.num_layers} layers")

    def __getitem__(self, name: str) -> Component:
        for component in self.components:
            if component.name == name:
                return component
        raise MisuseError(f"no component {name!r}; the spec has {[c.name for c in self.components]}")

    def __contains__(self, name: object) -> bool:
        return any(c.name == name for c in self.components)

    def layer_components(self, layer: int) -> tuple[Component, ...]:
        """Components that ``layer`` owns, possibly none."""
        return tuple(c for c in self.components if layer in c.layers)

    def tp_sizes(self, candidates: Iterable[int]) -> tuple[int, ...]:
        """Return the candidates at which every component and the query heads can be cut."""
        return tuple(n for n in candidates if self.why_not_tp(n) is None)

    def why_not_tp(self, size: int) -> str | None:
        """Say why TP ``size`` is impossible for this model, or None when it is possible."""
        if self.query_heads and self.query_heads % size:
            return f"{self.query_heads} query heads do not divide by {size}"
        for c in self.components:
            try:
                c.ownership.interval(c.axis(c.ownership.axis).extent if c.ownership.axis else 1, 0, size)
            except MisuseError as error:
                return f"{c.name}: {error.message}"
        return None

    @cached_property
    def digest(self) -> str:
        """Digest of the geometry (not of suggested dtypes): equal means the same caches."""
        return canonical_digest(sorted((c.geometry() for c in self.components), key=lambda g: str(g["name"])))

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``from_json`` is its inverse."""
        return {
            "model": self.model,
            "num_layers": self.num_layers,
            "query_heads": self.query_heads,
            "components": [{**c.geometry(), "dtype": c.dtype} for c in self.components],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CacheSpec:
        """Rebuild a spec; raises MisuseError when a value is missing or impossible."""
        try:
            return cls(
                model=str(data["model"]),
                num_layers=int(data["num_layers"]),
                query_heads=int(data["query_heads"]),
                components=tuple(_component_from_json(c) for c in data["components"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise MisuseError(f"not a cache spec: {type(error).__name__} {error}") from error


def _component_from_json(data: Mapping[str, Any]) -> Component:
    rule, axis, units = data["ownership"]
    return Component(
        name=str(data["name"]),
        layers=tuple(int(x) for x in data["layers"]),
        axes=tuple(Axis(name=str(n), extent=int(e)) for n, e in data["axes"]),
        dtype=str(data["dtype"]),
        growth=Growth(data["growth"]),
        ownership=Ownership(rule=Rule(rule), axis=str(axis), units=int(units)),
        tokens_per_row=int(data["tokens_per_row"]),
        window=int(data["window"]),
    )


def request_bytes(sizes: RequestSizes, tokens: int) -> int:
    """Bytes of one request of ``tokens`` tokens, every unique byte once."""
    total = 0
    for tokens_per_row, window, row_bytes in sizes:
        first = max(0, tokens - window) // tokens_per_row if window else 0
        total += row_bytes * (-(-tokens // tokens_per_row) - first if tokens_per_row else 1)
    return total


def canonical_digest(value: Any) -> str:
    """Hex digest of a JSON value in canonical form (sorted keys, no spaces)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def compare_specs(source: CacheSpec, target: CacheSpec) -> None:
    """Raise IncompatibleError at the first component and field in which two specs differ."""
    here, there = ({c.name: c.geometry() for c in spec.components} for spec in (source, target))
    for name in {**here, **there}:
        mine, theirs = ({"presence": "held", **s[name]} if name in s else {"presence": "absent"} for s in (here, there))
        for field, value in mine.items():
            if value != theirs[field]:
                why = f"models {source.model} and {target.model}"
                raise IncompatibleError(name, field, value, theirs[field], why=why)
