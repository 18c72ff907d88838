"""Hypothesis strategies: specs, arrangements of workers, and pairs of them, as engines have them.

In comes nothing but hypothesis; out come small versions of real models (scaled down in size, not in
structure) on random parallel arrangements and storage formats. A pair is described by ``Arrangement``
values, not layouts, since a few of them are meant to be refused when they are built.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from pdxfer.builders import PLACEMENTS, Parallel, Storage, build_layout
from pdxfer.errors import MisuseError
from pdxfer.layout import Layout
from pdxfer.models import load_config, preset_names, spec_from_config
from pdxfer.spec import Axis, CacheSpec, Component, Growth, Ownership, Rule

__all__ = [
    "Arrangement",
    "Case",
    "arrangements",
    "cases",
    "made_specs",
    "preset_spec",
    "shrink_spec",
    "specs",
    "usable_presets",
]

_TP_SIZES = (1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 4, 4, 4, 6, 6, 8, 16)
_REPLICATED = Ownership(rule=Rule.REPLICATED)
_LAYERS_PER_KIND, _WINDOW = 2, 6  # of a small spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """What ``build_layout`` needs beside a spec."""

    parallel: Parallel
    storage: Storage
    placement: str = "per_layer"

    @property
    def ranks(self) -> int:
        """How many ranks the worker has."""
        return self.parallel.tp * self.parallel.cp * max(1, len(self.parallel.stages))

    def build(self, spec: CacheSpec) -> Layout:
        """The layout; raises MisuseError where the model can't be cut so."""
        return build_layout(spec, self.parallel, self.storage, self.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One request between two workers, and how its bytes are to be moved."""

    spec: CacheSpec
    source: Arrangement
    target: Arrangement
    tokens: int
    first_token: int
    fan_out: bool
    chunk_bytes: int
    segment_bytes: int
    seed: int


# ---------------------------------------------------------------- specs


def shrink_spec(spec: CacheSpec) -> CacheSpec:
    """A small spec of the same structure.

    Kept: components, growth, rules, units (heads and groups, so what divides still divides), taps, rows per
    token, layers of every kind in their order, the last layer, and which widths are equal or greater.
    Shrunk: layer count, widths, windows, and units above 512 (Mamba-1 and short convolutions cut by channel).
    """
    kept = _kept_layers(spec)
    number = {layer: i for i, layer in enumerate(kept)}
    widths = {w: i + 2 for i, w in enumerate(sorted({w for c in spec.components for w in _widths(c)}))}
    components = []
    for c in spec.components:
        own = c.ownership
        units = own.units if own.units <= 512 else _halved(own.units)
        axes = tuple(Axis(name=a.name, extent=_shrunk_extent(c, a, units, widths)) for a in c.axes)
        layers = tuple(number[x] for x in c.layers if x in number)
        small, window = replace(own, units=units), min(c.window, _WINDOW)
        components.append(replace(c, layers=layers, axes=axes, ownership=small, window=window))
    return replace(spec, num_layers=len(kept), components=tuple(components))


def _halved(units: int) -> int:
    while units > 128 and units % 2 == 0:
        units //= 2
    return units


def _kept_layers(spec: CacheSpec) -> list[int]:
    seen: dict[tuple[str, ...], int] = {}
    kept = []
    for layer in range(spec.num_layers):
        kind = tuple(c.name for c in spec.layer_components(layer))
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= _LAYERS_PER_KIND or layer == spec.num_layers - 1:
            kept.append(layer)
    return kept


def _widths(component: Component) -> list[int]:
    """Extents that may shrink: what one unit is wide, and every axis that is not cut, taps apart."""
    own = component.ownership
    widths = [a.extent // own.units if a.name == own.axis else a.extent for a in component.axes if a.name != "taps"]
    return [w for w in widths if w > 1]


def _shrunk_extent(component: Component, axis: Axis, units: int, widths: dict[int, int]) -> int:
    own = component.ownership
    if axis.name == "taps":
        return axis.extent
    if axis.name == own.axis:
        return units * widths.get(axis.extent // own.units, 1)
    return widths.get(axis.extent, axis.extent)


@functools.lru_cache(maxsize=256)
def preset_spec(name: str) -> CacheSpec:
    """The small spec of a preset."""
    return shrink_spec(spec_from_config(load_config(name)))


@functools.lru_cache(maxsize=1)
def usable_presets() -> tuple[str, ...]:
    """Presets that can be described; the others are refused by name."""
    return tuple(name for name in preset_names() if _usable(name))


def _usable(name: str) -> bool:
    try:
        preset_spec(name)
    except MisuseError:
        return False
    return True


def _component(
    name: str, layers: Sequence[int], axes: dict[str, int], own: Ownership, growth: Growth = Growth.PER_REQUEST, *,
    dtype: str = "bfloat16", window: int = 0, tokens_per_row: int = 1,
) -> Component:  # fmt: skip
    named = tuple(Axis(name=n, extent=e) for n, e in axes.items())
    return Component(
        name=name, layers=tuple(layers), axes=named, dtype=dtype, growth=growth, ownership=own, window=window,
        tokens_per_row=tokens_per_row,
    )  # fmt: skip


def _own(axis: str, units: int, rule: Rule = Rule.SHARDED) -> Ownership:
    return Ownership(rule=rule, axis=axis, units=units)


@st.composite
def made_specs(draw: st.DrawFn) -> CacheSpec:
    """A hybrid that no preset is: head counts that 3 and 6 divide, K and V of any widths, any mix of layers."""
    num_layers = draw(st.integers(2, 6))
    kinds = [draw(st.sampled_from(("linear", "full", "both", "none"))) for _ in range(num_layers)]
    kinds[draw(st.integers(0, num_layers - 1))] = "both"
    linear = [i for i, kind in enumerate(kinds) if kind in ("linear", "both")]
    full = [i for i, kind in enumerate(kinds) if kind in ("full", "both")]
    state = draw(st.sampled_from(("delta", "mamba2", "mamba1")))
    components = [*_made_state(draw, state, linear), *_made_attention(draw, full)]
    return CacheSpec(model="made", num_layers=num_layers, query_heads=0, components=tuple(components))


def _made_state(draw: st.DrawFn, kind: str, layers: list[int]) -> list[Component]:
    heads, groups = draw(st.sampled_from((4, 6, 12, 16, 24, 48))), draw(st.sampled_from((1, 2, 4, 6)))
    taps, width, other = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(1, 5))

    def conv(part: str, units: int, per_unit: int, rule: Rule = Rule.SHARDED) -> Component:
        axes = {"channels": units * per_unit, "taps": taps}
        return _component(f"conv.{part}", layers, axes, _own("channels", units, rule))

    if kind == "delta":
        key_heads = heads // draw(st.sampled_from((1, 2)))
        axes = {"heads": heads, "K": width, "V": other}
        parts = [conv("q", key_heads, width), conv("k", key_heads, width), conv("v", heads, other)]
        return [_component("S", layers, axes, _own("heads", heads), dtype="float32"), *parts]
    if kind == "mamba2":
        axes = {"heads": heads, "head_dim": width, "state": other}
        parts = [conv("x", heads, width), *(conv(p, groups, other, Rule.EXTENDED) for p in "BC")]
        return [_component("S", layers, axes, _own("heads", heads), dtype="float32"), *parts]
    axes = {"channels": heads * 4, "state": other}
    return [_component("S", layers, axes, _own("channels", heads * 4), dtype="float32"), conv("x", heads * 4, 1)]


def _made_attention(draw: st.DrawFn, layers: list[int]) -> list[Component]:
    kind = draw(st.sampled_from(("gqa", "mla", "window", "indexed")))
    heads, k_dim, v_dim = draw(st.sampled_from((1, 2, 3, 4, 8))), draw(st.integers(1, 5)), draw(st.integers(1, 5))
    if kind in ("gqa", "window"):
        name, growth = ("kv", Growth.PER_TOKEN) if kind == "gqa" else ("window", Growth.PER_WINDOW)
        window = draw(st.integers(1, 9)) if kind == "window" else 0
        own = _own("heads", heads, Rule.EXTENDED)
        return [
            _component(f"{name}.{part}", layers, {"heads": heads, "dim": dim}, own, growth, window=window)
            for part, dim in (("k", k_dim), ("v", v_dim))
        ]
    latent = [_component("latent", layers, {"dim": k_dim + 3}, _REPLICATED, Growth.PER_TOKEN)]
    if draw(_BOOLEANS):
        latent.append(_component("rope", layers, {"dim": v_dim}, _REPLICATED, Growth.PER_TOKEN))
    if kind == "indexed":
        axes, per_row = {"dim": v_dim + 1}, draw(st.sampled_from((1, 4)))
        latent.append(_component("index_k", layers, axes, _REPLICATED, Growth.PER_TOKEN, tokens_per_row=per_row))
    return latent


def specs() -> st.SearchStrategy[CacheSpec]:
    """Small specs: presets and made ones, half and half."""
    return st.one_of(st.sampled_from(usable_presets()).map(preset_spec), made_specs())


# ---------------------------------------------------------------- workers


# Strategies that every draw uses, made once: making them again costs more than drawing from them.
_BOOLEANS = st.booleans()
_PERCENT = st.integers(0, 99)
_PAGE_TOKENS = st.sampled_from((1, 2, 3, 4, 5, 8, 16, 64))
_PLACED = st.sampled_from(PLACEMENTS)
_KV_ORDERS, _CONV_ORDERS, _STATE_ORDERS = (st.sampled_from(x) for x in (("NHD", "HND"), ("CT", "TC"), ("KV", "VK")))
_TAPS_BEFORE, _TAPS_AFTER = st.sampled_from((0, 0, 1, 2)), st.sampled_from((0, 0, 1, 3))
_SLOTS, _ALIGNMENT = st.integers(1, 3), st.sampled_from((1, 4, 16))
_HOSTS, _INTERLEAVE = st.sampled_from((0, 0, 1, 2, 4)), st.sampled_from((1, 2, 4, 16))
_STATE_DTYPES = st.sampled_from(("float32", "bfloat16", "float16"))
_KV_DTYPES = st.sampled_from(("", "", "float16", "float8_e4m3fn", "float32"))


def _rarely(draw: st.DrawFn, percent: int) -> bool:
    return draw(_PERCENT) >= 100 - percent


@st.composite
def arrangements(
    draw: st.DrawFn,
    spec: CacheSpec,
    tokens: int,
    *,
    kv_dtype: str = "",
    state_dtype: str = "",
    accepts: tuple[str, ...] = (),
    ranks_max: int = 16,
) -> Arrangement:
    """A worker of at most ``ranks_max`` ranks for ``spec``, with room for a request of ``tokens`` tokens."""
    parallel = draw(_parallels(spec, ranks_max))
    per_row = max(c.tokens_per_row for c in spec.components)
    page_tokens = draw(_PAGE_TOKENS) * per_row
    placement = draw(_PLACED)
    kinds = 12 if placement == "unified" else 1
    storage = Storage(
        page_tokens=page_tokens,
        kv_order=draw(_KV_ORDERS),
        kv_packed=draw(_BOOLEANS),
        latent_packed=draw(_BOOLEANS),
        conv_order=draw(_CONV_ORDERS),
        conv_fused=draw(_BOOLEANS),
        state_order=draw(_STATE_ORDERS),
        taps_before=draw(_TAPS_BEFORE),
        taps_after=draw(_TAPS_AFTER),
        kv_dtype=kv_dtype,
        state_dtype=state_dtype,
        accepts=accepts,
        pages=-(-tokens // page_tokens) * min(kinds, 6) + kinds + 2,
        slots=draw(_SLOTS),
        alignment_tokens=draw(_ALIGNMENT) * per_row,
    )
    return Arrangement(parallel=parallel, storage=storage, placement=placement)


@st.composite
def _parallels(draw: st.DrawFn, spec: CacheSpec, ranks_max: int) -> Parallel:
    tp = draw(st.sampled_from([n for n in _TP_SIZES if n <= ranks_max]))
    cp = draw(st.sampled_from([n for n in (1, 1, 1, 1, 2, 3) if n * tp <= ranks_max]))
    most = min(spec.num_layers, ranks_max // (tp * cp), 3)
    cuts = draw(st.sets(st.integers(1, spec.num_layers - 1), max_size=most - 1)) if most > 1 else set()
    edges = [0, *sorted(cuts), spec.num_layers]
    return Parallel(
        tp=tp,
        stages=tuple(b - a for a, b in itertools.pairwise(edges)) if cuts else (),
        cp=cp,
        interleave=draw(_INTERLEAVE) if cp > 1 else 1,
        ranks_per_host=draw(_HOSTS),
        ownership=_overrides(draw, spec, tp),
    )


def _overrides(draw: st.DrawFn, spec: CacheSpec, tp: int) -> dict[str, Ownership]:
    """Rules of engines that cut otherwise: state whole on every rank (transformers), KV whole, groups shared.

    A component that can't be cut by its own rule is replicated, except rarely, when a refusal is wanted.
    """
    whole = {"state": _rarely(draw, 10), "kv": _rarely(draw, 5)}
    refuse = _rarely(draw, 3)
    found: dict[str, Ownership] = {}
    for c in spec.components:
        own = c.ownership
        kind = "state" if c.growth is Growth.PER_REQUEST else "kv"
        if whole[kind]:
            found[c.name] = _REPLICATED
        elif own.rule is not Rule.REPLICATED and own.units % tp:
            shared = replace(own, rule=Rule.EXTENDED) if tp % own.units == 0 else _REPLICATED
            if own.rule is Rule.SHARDED or tp % own.units:
                found.update({} if refuse else {c.name: shared})
    return found


@st.composite
def cases(draw: st.DrawFn, spec: CacheSpec | None = None) -> Case:
    """A request between two workers; a few differ in dtype, with consent or (rarely) without.

    Mostly at most 48 pairs of ranks, which keeps one case at some 30 ms.
    """
    spec = spec if spec is not None else draw(specs())
    tokens = draw(st.integers(1, 40))
    kv_dtype = draw(_KV_DTYPES)
    accepts = ("float32", "bfloat16", "float16") if _rarely(draw, 30) else ()
    states = [draw(_STATE_DTYPES)] * 2
    if accepts or _rarely(draw, 2):
        states[1] = draw(_STATE_DTYPES)
    more: dict[str, Any] = {"kv_dtype": kv_dtype, "accepts": accepts}
    source = draw(arrangements(spec, tokens, state_dtype=states[0], **more))
    ranks_max = 16 if _rarely(draw, 2) else min(16, 48 // source.ranks)
    target = draw(arrangements(spec, tokens, state_dtype=states[1], ranks_max=ranks_max, **more))
    # Cuts of a few bytes make thousands of segments: only where there are few ranks.
    few = source.ranks * target.ranks <= 4
    return Case(
        spec=spec,
        source=source,
        target=target,
        tokens=tokens,
        first_token=draw(st.sampled_from((0, 0, 0, 1, tokens // 2, tokens))),
        fan_out=draw(st.sampled_from((True, True, True, False))),
        chunk_bytes=draw(st.sampled_from((100, 1000, 10_000) if few else (5000, 20_000, 1 << 20))),
        segment_bytes=draw(st.sampled_from((1, 300, 1 << 20) if few else (1500, 1 << 20, 1 << 20))),
        seed=draw(st.integers(0, 1 << 31)),
    )
