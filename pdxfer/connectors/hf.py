"""The reference connector: the way between a rank's paged caches and a transformers cache, in both directions.

In come ``PagedCaches`` (``paged.py``) and a ``DynamicCache`` of the same rank's shard; out come pages and slots that an
agent can offer, or a fresh cache made of pages that an agent filled. This file knows no transport, peer or ticket.

How to write a connector, with this one as the example:

1. Describe the caches. ``layout_for_model`` takes the usual placement; an engine with tensors of its own makes one
   ``Holding`` per component from their real ``data_ptr`` offsets, strides and dtype (never from the config's dtype).
2. Give the agent the memory: one region per ``RankLayout.regions`` entry, allocated by a transport or registered.
3. To hand a request over: finish the step that writes it, then offer page tables, slot and token counts. Keep the pages
   until the agent says that it has released them.
4. To take one: allocate pages and a slot first, fetch into them, and let the scheduler see the request only once
   every rank's fetch came back READY. On any error free the pages and prefill here instead.

Where a transformers cache layer (batch 1) keeps what::

    component             attribute             shape there         shape in pages, per row
    S                     recurrent_states[0]   [1, heads, ...]     [heads, ...]             one row: the slot
    conv.q | conv.k | ..  conv_states[0]        [1, channels, K]    [channels, K - 1] each   the newest columns
    kv.k, window.k        keys                  [1, heads, T, dim]  [heads, dim]             T rows
    kv.v, window.v        values                [1, heads, T, dim]  [heads, dim]
    latent, rope          keys, values          [1, 1, T, dim]      [dim]

transformers keeps window - 1 tokens of a sliding window, pages have room for window: the oldest is zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.connectors.paged import BIT_DTYPES, Bits, PagedCaches, PageTables
from pdxfer.errors import MisuseError
from pdxfer.layout import Holding, Layout
from pdxfer.models import spec_from_config
from pdxfer.spec import Component, Growth

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

__all__ = ["PageTables", "PagedCaches", "forward", "layout_for_model", "new_cache", "read_cache", "write_cache"]

_KEYS = ("kv.k", "window.k", "latent")
_VALUES = ("kv.v", "window.v", "rope")

#: Cache layers whose attributes are as in the table above; others (static, quantised, indexed) hold more or otherwise.
_LAYER_CLASSES = (
    "DummyLayer",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "LinearAttentionLayer",
)


def layout_for_model(
    config: PretrainedConfig,
    tp: int,
    storage: Storage | None = None,
    placement: str = "per_layer",
    *,
    dtype: str = "float32",
) -> Layout:
    """Return the layout of a worker that runs the model of ``config`` (the full one) on ``tp`` ranks.

    Args:
        storage: page size, axis orders, capacity; dtypes left empty become what transformers really stores.
        dtype: the dtype the model runs in, e.g. ``str(model.dtype).removeprefix("torch.")``; S is fp32 in any case.

    Raises:
        MisuseError: the model type is unknown, or can't be cut over ``tp`` ranks.
    """
    storage = storage or Storage()
    storage = replace(
        storage,
        kv_dtype=storage.kv_dtype or dtype,
        conv_dtype=storage.conv_dtype or dtype,
        state_dtype=storage.state_dtype or "float32",
    )
    return build_layout(spec_from_config(config.to_dict()), Parallel(tp=tp), storage, placement)


def write_cache(paged: PagedCaches, tables: PageTables, cache: DynamicCache, tokens: int) -> None:
    """Copy a transformers cache of this rank's share into the request's pages and slot.

    Args:
        tables: from ``paged.allocate(n)`` with n >= tokens.
        cache: of batch size 1, standing at ``tokens`` tokens.

    Raises:
        MisuseError: the cache is of another kind, records its past, stands at another token, or a layer's shape or
            dtype is not what the layout says. Names layer and component; nothing was written.
    """
    cache_layers = list(cache.layers)
    _check_nothing_is_lost(paged, cache_layers)
    pieces = []
    for layer, component in paged.components():
        if layer >= len(cache_layers):
            raise MisuseError(f"layer {layer}, {component.name}: the cache has {len(cache_layers)} layers")
        where = f"layer {layer}, {component.name}"
        _check_layer(cache_layers[layer], where)
        values = _rows_of(paged, layer, component, cache_layers[layer], tokens, where)
        bits = _checked(paged.holding(component.name, layer), values, component, tokens, where)
        pieces.append((component.name, layer, bits))
    for name, layer, bits in pieces:
        paged.write(name, layer, tables, tokens, bits)


def _check_nothing_is_lost(paged: PagedCaches, cache_layers: Sequence[Any]) -> None:
    """A layer with content that the spec doesn't know would silently stay behind."""
    for index, layer in enumerate(cache_layers):
        states = getattr(layer, "conv_states", None) or {}
        filled = getattr(layer, "keys", None) is not None or any(s is not None for s in states.values())
        if filled and not paged.layout.spec.layer_components(index):
            model = paged.layout.spec.model
            raise MisuseError(f"layer {index} of the cache holds data, but the spec of {model} has nothing there")


def _check_layer(layer: Any, where: str) -> None:
    if type(layer).__name__ not in _LAYER_CLASSES:
        kind = type(layer).__name__
        raise MisuseError(f"{where}: cache layers of class {kind} are not supported", hint="pass a DynamicCache")
    if getattr(layer, "record_past", False):
        raise MisuseError(
            f"{where}: the cache records its past",
            hint="activate_past_recording() keeps more columns than one state has",
        )
    if getattr(layer, "number_of_states", 1) != 1:
        raise MisuseError(f"{where}: the layer has {layer.number_of_states} states, the spec describes one")


def _rows_of(paged: PagedCaches, layer: int, component: Component, source: Any, tokens: int, where: str) -> Tensor:
    """Take one component out of a cache layer, as ``[rows, *axes]`` of this rank."""
    name = component.name
    if name == "S":
        return _present(source, "recurrent_states", where)
    if name.startswith("conv."):
        conv = _present(source, "conv_states", where)
        widths = _conv_widths(paged, layer)
        if conv.dim() != 3 or conv.shape[1] != sum(widths.values()) or conv.shape[2] < component.shape[1]:
            expected = f"channels {widths} and {component.shape[1]} taps"
            raise MisuseError(f"{where}: the cache has conv of shape {tuple(conv.shape)}, the layout has {expected}")
        start = sum(width for part, width in widths.items() if list(widths).index(part) < list(widths).index(name))
        return conv[:, start : start + widths[name], conv.shape[2] - component.shape[1] :]
    if name not in _KEYS + _VALUES:
        raise MisuseError(f"{where}: this connector does not carry {name!r}")
    held = getattr(source, "keys" if name in _KEYS else "values", None)
    at = 0 if held is None else source.get_seq_length()
    if held is None or at != tokens:
        raise MisuseError(f"{where}: the cache stands at {at} tokens, not at {tokens}")
    if held.dim() != 4 or held.shape[0] != 1:
        raise MisuseError(f"{where}: the cache has shape {tuple(held.shape)}; [1, heads, tokens, dim] is expected")
    rows = held[0].transpose(0, 1)
    rows = rows if len(component.axes) == 2 else rows.reshape(len(rows), -1)
    first, stop = component.rows(tokens)
    full_window = component.growth is Growth.PER_WINDOW and tokens >= component.window
    return _with_zero_row(rows) if full_window and len(rows) == stop - first - 1 else rows


def _present(source: Any, attribute: str, where: str) -> Tensor:
    tensor: Tensor | None = getattr(source, attribute, {}).get(0)
    if tensor is None or not source.has_previous_state[0]:
        raise MisuseError(f"{where}: the cache has no {attribute} there yet")
    return tensor


def _with_zero_row(rows: Tensor) -> Tensor:
    import torch

    return torch.cat([rows.new_zeros((1, *rows.shape[1:])), rows])


def _conv_widths(paged: PagedCaches, layer: int) -> dict[str, int]:
    """Channels of this rank by part, in the order in which transformers concatenates them (the spec's)."""
    parts = [c.name for at, c in paged.components() if at == layer and c.name.startswith("conv.")]
    return {name: paged.holding(name, layer).box.shape[0] for name in parts}


def _checked(holding: Holding, values: Tensor, component: Component, tokens: int, where: str) -> Bits:
    """The bits of ``values`` once shape and dtype are what the layout says."""
    first, stop = component.rows(tokens)
    expected = (stop - first, *holding.box.shape)
    if tuple(values.shape) != expected:
        raise MisuseError(f"{where}: the cache has shape {tuple(values.shape)}, the layout has {expected}")
    if str(values.dtype) != f"torch.{holding.dtype}":
        raise MisuseError(f"{where}: the cache holds {values.dtype}, the layout says {holding.dtype}")
    return _to_bits(values, holding.itemsize)


def _to_bits(values: Tensor, itemsize: int) -> Bits:
    import torch

    whole = getattr(torch, BIT_DTYPES[itemsize].name)
    bits: Bits = values.detach().cpu().contiguous().view(whole).numpy()
    return bits


def _from_bits(bits: Bits, dtype: str) -> Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(bits)).view(getattr(torch, dtype))


def read_cache(paged: PagedCaches, tables: PageTables, config: PretrainedConfig, tokens: int) -> DynamicCache:
    """Return a fresh transformers cache at ``tokens`` tokens, made of the request's pages and slot (copies).

    Args:
        config: the model's config; of a sharded model its own (``model.config``).
    """
    cache = new_cache(config)
    by_layer: dict[int, dict[str, Tensor]] = {}
    for layer, component in paged.components():
        bits = paged.read(component.name, layer, tables, tokens)
        by_layer.setdefault(layer, {})[component.name] = _from_bits(bits, paged.holding(component.name, layer).dtype)
    for layer, pieces in by_layer.items():
        _fill_state(cache, layer, pieces)
        _fill_keys_and_values(cache, layer, pieces, tokens)
    return cache


def _fill_state(cache: DynamicCache, layer: int, pieces: Mapping[str, Tensor]) -> None:
    import torch

    parts = [rows for name, rows in pieces.items() if name.startswith("conv.")]
    if parts:
        conv = torch.cat(parts, dim=1)
        cache.update_conv_state(conv, layer, state_idx=0, conv_kernel_size=conv.shape[2] + 1)
    if "S" in pieces:
        cache.update_recurrent_state(pieces["S"], layer, state_idx=0)
    if parts or "S" in pieces:
        cache.layers[layer].has_previous_state[0] = True  # else the layer would start afresh


def _fill_keys_and_values(cache: DynamicCache, layer: int, pieces: Mapping[str, Tensor], tokens: int) -> None:
    keys = next((pieces[name] for name in _KEYS if name in pieces), None)
    if keys is None:
        return
    values = next((pieces[name] for name in _VALUES if name in pieces), keys[..., :0])  # MLA without a rope part
    keys, values = (t.unsqueeze(1) if t.dim() == 2 else t for t in (keys, values))
    cache.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None], layer)
    if hasattr(cache.layers[layer], "cumulative_length"):  # a window knows its position only by this
        cache.layers[layer].cumulative_length = tokens


def new_cache(config: PretrainedConfig) -> DynamicCache:
    """Return an empty cache with the layers that ``config`` asks for."""
    from transformers import DynamicCache

    return DynamicCache(config=config)


def forward(model: PreTrainedModel, input_ids: Tensor, cache: DynamicCache) -> Tensor:
    """Run one step that continues ``cache`` in place; return logits ``[batch, tokens, vocabulary]``.

    transformers renamed the argument from ``past_key_values`` to ``cache`` in 5.2x; this is the one place that knows.
    """
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits: Tensor = model(input_ids=input_ids, use_cache=True, **{argument: cache}).logits
    return logits
