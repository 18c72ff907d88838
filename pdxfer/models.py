"""HF config dict -> CacheSpec: one short function per model family, one table from ``model_type`` to it.

In comes a decoded ``config.json`` (a multimodal wrapper's ``text_config`` is found); out goes a frozen
``CacheSpec``. This file knows families and their field names, never ranks, bytes or engines. A family
function answers two questions, what each layer is and which function describes each kind of layer::

    kinds   ("gdn", "gdn", "gdn", "gqa", ...)      "+" joins two caches of one layer, "none" owns nothing
    makers  gdn=_gdn, gqa=_gqa                     called only when a layer of that kind exists

What is true for all: nothing is guessed. A value no field states is an error that names the field, since a
wrong default corrupts caches silently; an unknown ``model_type`` lists the known ones; models with state that
a spec can't describe yet are refused by name. dtypes are what the config suggests (KV and conv: the model's
dtype; S: ``mamba_ssm_dtype`` or ``mamba_ssm_cache_dtype``, else float32); a layout states what is stored.
Multi-token-prediction layers are left out for now: their caches are a component set of their own.

Sources: the checkpoints' own configs (``presets/``, ``_fixture.source``) and transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pdxfer.errors import MisuseError
from pdxfer.hf_config import Fields, did_you_mean, load_config, preset_names, text_fields
from pdxfer.spec import Axis, CacheSpec, Component, Growth, Ownership, Rule

__all__ = ["known_model_types", "load_config", "preset_names", "spec_from_config"]

Layers = tuple[int, ...]
Maker = Callable[[Fields, Layers], list[Component]]
Family = Callable[[str, Fields], CacheSpec]

_ORDER = ("S", "conv.q", "conv.k", "conv.v", "conv.x", "conv.B", "conv.C",
          "kv.k", "kv.v", "window.k", "window.v", "latent", "rope", "index_k")  # fmt: skip
_REPLICATED = Ownership(rule=Rule.REPLICATED)


def spec_from_config(config: Mapping[str, Any]) -> CacheSpec:
    """Describe the caches of the model that ``config`` (a decoded ``config.json``) defines.

    Raises:
        MisuseError: the model type is unknown or refused (reason ``UNSUPPORTED_MODEL``), or a field is
            missing or impossible; the message names it.
    """
    types, fields = text_fields(config)
    for name in types:
        if name in _REFUSED:
            raise _unsupported(f"model_type {name!r} is not supported: its {_REFUSED[name]} can't be described yet")
    for field, what in _UNDESCRIBED.items():
        if fields.has(field):
            raise _unsupported(f"{field}: {what} can't be described yet")
    # A wrapper whose text_config has no type of its own is parsed as the wrapper's usual language model.
    if not types:
        raise fields.error("model_type", f"is missing; known are {', '.join(known_model_types())}")
    family = _FAMILIES.get(types[-1])
    if family is None:
        raise MisuseError(
            f"model_type {types[-1]!r} is not known; known are {', '.join(known_model_types())}",
            hint=did_you_mean(types[-1], known_model_types()) or "add a family function to pdxfer/models.py",
            reason="UNSUPPORTED_MODEL",
        )
    return family(types[-1], fields)


def known_model_types() -> tuple[str, ...]:
    """Every ``model_type`` that ``spec_from_config`` accepts, sorted."""
    return tuple(sorted(_FAMILIES))


def _unsupported(message: str) -> MisuseError:
    return MisuseError(
        message, hint="pdxfer refuses rather than move part of a request's state", reason="UNSUPPORTED_MODEL"
    )


def _spec(model: str, f: Fields, kinds: tuple[str, ...], **makers: Maker) -> CacheSpec:
    """Assemble a spec: call each kind's maker with the layers of that kind."""
    layers: dict[str, list[int]] = {}
    for layer, kind in enumerate(kinds):
        for cache in kind.split("+"):
            layers.setdefault(cache, []).append(layer)
    layers.pop("none", None)
    components = [c for cache, numbers in layers.items() for c in makers[cache](f, tuple(numbers))]
    if not components:
        raise f.error("layer_types", "leave no layer that owns a cache")
    components.sort(key=lambda c: _ORDER.index(c.name))
    return CacheSpec(
        model=model, num_layers=len(kinds), query_heads=_query_heads(f, kinds), components=tuple(components)
    )


def _query_heads(f: Fields, kinds: tuple[str, ...]) -> int:
    """Query heads that TP must divide; a common divisor where window layers have another count; 0 without attention."""
    attends = any(cache in ("gqa", "swa", "mla", "lightning") for kind in kinds for cache in kind.split("+"))
    heads = f.integer("num_attention_heads", default=None if attends else 0)
    if any("swa" in kind for kind in kinds):
        heads = math.gcd(heads, f.integer("swa_num_attention_heads", default=heads))
    return heads if attends else 0


# ---------------------------------------------------------------- what one kind of layer keeps


def _model_dtype(f: Fields) -> str:
    return f.dtype("dtype", "torch_dtype", default="bfloat16")


def _per_request(
    f: Fields, name: str, layers: Layers, axes: dict[str, int], units: int, rule: Rule = Rule.SHARDED
) -> Component:
    """A state component, cut along its first axis."""
    named = tuple(Axis(name=n, extent=e) for n, e in axes.items())
    is_recurrent = name == "S"
    dtype = f.dtype("mamba_ssm_dtype", "mamba_ssm_cache_dtype", default="float32") if is_recurrent else _model_dtype(f)
    ownership = Ownership(rule=rule, axis=named[0].name, units=units)
    return Component(name=name, layers=layers, axes=named, dtype=dtype, growth=Growth.PER_REQUEST, ownership=ownership)


def _conv(f: Fields, layers: Layers, kernel: tuple[str, ...], parts: dict[str, tuple[int, int]]) -> list[Component]:
    """Convolution parts name -> (channels, units), kernel - 1 taps each."""
    taps = f.integer(*kernel, minimum=2) - 1
    return [
        _per_request(f, f"conv.{part}", layers, {"channels": channels, "taps": taps}, units)
        for part, (channels, units) in parts.items()
    ]


def _delta(
    f: Fields, layers: Layers, keys: tuple[int, int], values: tuple[int, int], kernel: tuple[str, ...]
) -> list[Component]:
    """Delta-rule attention (GDN, KDA) from (heads, width) of keys and values."""
    (key_heads, key_dim), (value_heads, value_dim) = keys, values
    query_or_key = (key_heads * key_dim, key_heads)
    parts = {"q": query_or_key, "k": query_or_key, "v": (value_heads * value_dim, value_heads)}
    state = _per_request(f, "S", layers, {"heads": value_heads, "K": key_dim, "V": value_dim}, value_heads)
    return [state, *_conv(f, layers, kernel, parts)]


def _gdn(f: Fields, layers: Layers) -> list[Component]:
    keys = f.integer("linear_num_key_heads"), f.integer("linear_key_head_dim")
    values = f.integer("linear_num_value_heads"), f.integer("linear_value_head_dim")
    if values[0] % keys[0]:
        raise f.error("linear_num_value_heads", f"{values[0]} does not divide by linear_num_key_heads {keys[0]}")
    return _delta(f, layers, keys, values, ("linear_conv_kernel_dim",))


def _kda(f: Fields, layers: Layers) -> list[Component]:
    """Kimi Delta Attention; transformers 5 writes the nested fields again at the top level."""
    heads = (
        f.integer("linear_attn_config.num_heads", "linear_num_heads"),
        f.integer("linear_attn_config.head_dim", "linear_head_dim"),
    )
    return _delta(f, layers, heads, heads, ("linear_attn_config.short_conv_kernel_size", "linear_conv_kernel_dim"))


def _mamba2(
    f: Fields, layers: Layers, *, heads: int, head_dim: int, groups: int, state: str, kernel: str
) -> list[Component]:
    """Mamba2. With one group every rank holds B and C whole (both engines); else groups are cut like heads."""
    if heads % groups:
        raise f.error("n_groups", f"{groups} does not divide {heads} Mamba heads")
    width = f.integer(state)
    components = [
        _per_request(f, "S", layers, {"heads": heads, "head_dim": head_dim, "state": width}, heads),
        *_conv(f, layers, (kernel,), {"x": (heads * head_dim, heads)}),
    ]
    taps = components[1].axis("taps").extent
    rule = Rule.SHARDED if groups > 1 else Rule.EXTENDED
    axes = {"channels": groups * width, "taps": taps}
    return [*components, *(_per_request(f, f"conv.{part}", layers, axes, groups, rule) for part in "BC")]


def _mamba2_nemotron(f: Fields, layers: Layers) -> list[Component]:
    # "expand" times the hidden size is not the inner width in Nemotron-3, so it isn't read.
    heads, head_dim = f.integer("mamba_num_heads"), f.integer("mamba_head_dim")
    groups = f.integer("n_groups", "mamba_n_groups")
    kernel = "conv_kernel" if f.has("conv_kernel") or not f.has("mamba_d_conv") else "mamba_d_conv"
    return _mamba2(f, layers, heads=heads, head_dim=head_dim, groups=groups, state="ssm_state_size", kernel=kernel)


def _mamba2_ibm(f: Fields, layers: Layers) -> list[Component]:
    """Bamba, Granite 4 and Falcon-H1; ``mamba_d_head`` may be ``auto``."""
    heads = f.integer("mamba_n_heads")
    inner = f.integer("mamba_d_ssm") if f.has("mamba_d_ssm") else f.integer("mamba_expand") * f.integer("hidden_size")
    head_dim = inner // heads if f.get("mamba_d_head") in ("auto", None) else f.integer("mamba_d_head")
    if heads * head_dim != inner:
        raise f.error(
            "mamba_n_heads",
            f"{heads} heads of {head_dim} do not make the inner width {inner} (mamba_d_ssm or expand x hidden)",
        )
    more: dict[str, Any] = {"groups": f.integer("mamba_n_groups"), "state": "mamba_d_state", "kernel": "mamba_d_conv"}
    return _mamba2(f, layers, heads=heads, head_dim=head_dim, **more)


def _mamba2_pure(f: Fields, layers: Layers) -> list[Component]:
    heads, head_dim, groups = f.integer("num_heads"), f.integer("head_dim"), f.integer("n_groups")
    return _mamba2(f, layers, heads=heads, head_dim=head_dim, groups=groups, state="state_size", kernel="conv_kernel")


def _mamba2_plamo(f: Fields, layers: Layers) -> list[Component]:
    """PLaMo-2 convolves x only; B, C and dt are projected after it."""
    heads, head_dim = f.integer("mamba_num_heads"), f.integer("hidden_size_per_head")
    axes = {"heads": heads, "head_dim": head_dim, "state": f.integer("mamba_d_state")}
    recurrent = _per_request(f, "S", layers, axes, heads)
    return [recurrent, *_conv(f, layers, ("mamba_d_conv",), {"x": (heads * head_dim, heads)})]


def _mamba1(f: Fields, layers: Layers, *, inner: int, state: str, kernel: str) -> list[Component]:
    recurrent = _per_request(f, "S", layers, {"channels": inner, "state": f.integer(state)}, inner)
    return [recurrent, *_conv(f, layers, (kernel,), {"x": (inner, inner)})]


def _mamba1_jamba(f: Fields, layers: Layers) -> list[Component]:
    inner = f.integer("mamba_expand") * f.integer("hidden_size")
    return _mamba1(f, layers, inner=inner, state="mamba_d_state", kernel="mamba_d_conv")


def _mamba1_pure(f: Fields, layers: Layers) -> list[Component]:
    # Falcon-Mamba states an expand of 16 that its intermediate_size overrules.
    inner = (
        f.integer("intermediate_size") if f.has("intermediate_size") else f.integer("expand") * f.integer("hidden_size")
    )
    return _mamba1(f, layers, inner=inner, state="state_size", kernel="conv_kernel")


def _lightning(f: Fields, layers: Layers) -> list[Component]:
    heads, width = f.integer("num_attention_heads"), _head_dim(f, ("linear_head_dim", "head_dim"))
    return [_per_request(f, "S", layers, {"heads": heads, "K": width, "V": width}, heads)]


def _kda_bailing(f: Fields, layers: Layers) -> list[Component]:
    # transformers 5 overwrites head_dim with the rope width and keeps the true one in linear_head_dim.
    heads = f.integer("num_attention_heads"), f.integer("linear_head_dim", "head_dim")
    return _delta(f, layers, heads, heads, ("short_conv_kernel_size",))


def _shortconv(f: Fields, layers: Layers) -> list[Component]:
    hidden = f.integer("hidden_size")
    return _conv(f, layers, ("conv_L_cache",), {"x": (hidden, hidden)})


def _head_dim(f: Fields, names: tuple[str, ...]) -> int:
    return f.integer(*names) if f.has(*names) else f.divided("hidden_size", "num_attention_heads")


def _per_token(
    f: Fields, name: str, layers: Layers, axes: dict[str, int], ownership: Ownership, **more: Any
) -> Component:
    named = tuple(Axis(name=n, extent=e) for n, e in axes.items())
    growth = Growth.PER_WINDOW if more.get("window") else Growth.PER_TOKEN
    return Component(
        name=name, layers=layers, axes=named, dtype=_model_dtype(f), growth=growth, ownership=ownership, **more
    )


def _attention(
    f: Fields, layers: Layers, *, name: str = "kv", window: int = 0, queries: tuple[str, ...] = (),
    heads: tuple[str, ...] = ("num_key_value_heads",), k: tuple[str, ...] = ("head_dim",),
    v: tuple[str, ...] | None = None,
) -> list[Component]:  # fmt: skip
    """Keys and values of softmax attention, each width from the first field present, else hidden size / heads."""
    kv_heads = f.override(layers, "num_key_value_heads") or f.integer(*heads)
    query_heads = f.override(layers, "num_attention_heads") or f.integer(*queries, "num_attention_heads")
    if query_heads % kv_heads:
        raise f.error("num_attention_heads", f"{query_heads} does not divide by num_key_value_heads {kv_heads}")
    k_dim = f.override(layers, "head_dim") or _head_dim(f, k)
    v_dim = k_dim if v is None else f.override(layers, "v_head_dim") or f.integer(*v)
    ownership = Ownership(rule=Rule.EXTENDED, axis="heads", units=kv_heads)
    return [
        _per_token(f, f"{name}.{part}", layers, {"heads": kv_heads, "dim": dim}, ownership, window=window)
        for part, dim in (("k", k_dim), ("v", v_dim))
    ]


def _gqa(f: Fields, layers: Layers) -> list[Component]:
    return _attention(f, layers)


def _gqa_or_mha(f: Fields, layers: Layers) -> list[Component]:
    """For classes where an absent ``num_key_value_heads`` means one per query head."""
    return _attention(f, layers, heads=("num_key_value_heads", "num_attention_heads"))


def _swa(f: Fields, layers: Layers) -> list[Component]:
    return _attention(f, layers, name="window", window=f.integer("sliding_window"))


def _mla(f: Fields, layers: Layers) -> list[Component]:
    """The latent row and its rotary part; never ``head_dim`` or ``num_key_value_heads``, which are junk here."""
    latent = _per_token(f, "latent", layers, {"dim": f.integer("kv_lora_rank")}, _REPLICATED)
    width = f.integer("qk_rope_head_dim", minimum=0)
    return [latent, *([_per_token(f, "rope", layers, {"dim": width}, _REPLICATED)] if width else [])]


def _index(f: Fields, layers: Layers, tokens_per_row: int = 1) -> list[Component]:
    """Sparse attention's index keys."""
    axes = {"dim": f.integer("index_head_dim")}
    return [_per_token(f, "index_k", layers, axes, _REPLICATED, tokens_per_row=tokens_per_row)]


def _index_pooled(f: Fields, layers: Layers) -> list[Component]:
    """GLM-5.3 pools the keys of ``index_kpool`` tokens into one row, unless it says it doesn't."""
    pools = f.flag("index_kpool_compress", default=True)
    return _index(f, layers, f.integer("index_kpool") if pools else 1)


def _index_minimax(f: Fields, layers: Layers) -> list[Component]:
    """MiniMax-M3's index keys per index head, as engines cut them; transformers 5.24 keeps one key for all heads."""
    heads = f.integer("sparse_attention_config.sparse_num_index_heads", "index_n_heads")
    axes = {"heads": heads, "dim": f.integer("sparse_attention_config.sparse_index_dim", "index_head_dim")}
    return [_per_token(f, "index_k", layers, axes, Ownership(rule=Rule.EXTENDED, axis="heads", units=heads))]


# ---------------------------------------------------------------- what each layer of a family is


def _required(f: Fields, kinds: tuple[str, ...] | None, *names: str) -> tuple[str, ...]:
    if kinds is None:
        raise f.missing(*names)
    return kinds


def _every(f: Fields, period: str, periodic: str, other: str) -> tuple[str, ...]:
    """Kinds by a period p: layer i is ``periodic`` iff (i + 1) % p == 0."""
    count, every = f.layer_count(), f.integer(period)
    return tuple(periodic if (layer + 1) % every == 0 else other for layer in range(count))


def _dense(model: str, f: Fields) -> CacheSpec:
    """All layers softmax attention, some of them with a window where ``layer_types`` (or Qwen's switch) says so."""
    kinds = f.layer_types({"full_attention": "gqa", "sliding_attention": "swa"})
    if kinds is None:
        first_window = count = f.layer_count()
        if f.has("sliding_window") and f.flag("use_sliding_window", default=not f.has("max_window_layers")):
            first_window = f.integer("max_window_layers", minimum=0)
            if model.endswith("_moe"):
                what = f"{model} does not say which layers have the window"
                raise f.error("use_sliding_window", what, hint="state layer_types")
        kinds = tuple("swa" if layer >= first_window else "gqa" for layer in range(count))
    f.agreed([kinds, f.mapped("attn_type_list", {1: "gqa"}) if f.has("attn_type_list") else None])
    return _spec(model, f, kinds, gqa=_gqa, swa=_swa)


def _llama(model: str, f: Fields) -> CacheSpec:
    return _spec(model, f, f.layer_types({"full_attention": "gqa"}) or ("gqa",) * f.layer_count(), gqa=_gqa_or_mha)


def _qwen_hybrid(model: str, f: Fields) -> CacheSpec:
    """Qwen3-Next, 3.5, 3.6: a list where there is one, else the interval."""
    kinds = f.layer_types({"linear_attention": "gdn", "full_attention": "gqa"})
    return _spec(model, f, kinds or _every(f, "full_attention_interval", "gqa", "gdn"), gdn=_gdn, gqa=_gqa)


def _olmo_hybrid(model: str, f: Fields) -> CacheSpec:
    kinds = _required(f, f.layer_types({"linear_attention": "gdn", "full_attention": "gqa"}), "layer_types")
    return _spec(model, f, kinds, gdn=_gdn, gqa=_gqa_or_mha)


def _kda_mla_lists(f: Fields, full: str) -> tuple[str, ...] | None:
    if not f.has("linear_attn_config.kda_layers", "linear_attn_config.full_attn_layers"):
        return None
    lists = {"linear_attn_config.kda_layers": "kda", "linear_attn_config.full_attn_layers": full}
    return f.covered(lists, f.layer_count())


def _kimi_linear(model: str, f: Fields) -> CacheSpec:
    """Never by a period: the last layers break it, and the class defaults are another model's pattern."""
    by_type = f.layer_types({"linear_attention": "kda", "full_attention": "mla"})
    kinds = _required(f, f.agreed([_kda_mla_lists(f, "mla"), by_type]), "linear_attn_config.kda_layers", "layer_types")
    return _spec(model, f, kinds, kda=_kda, mla=_mla)


def _indexed(f: Fields, kinds: tuple[str, ...]) -> tuple[str, ...]:
    """Drop the index from "shared" layers, which reuse the choice of the full layer before them."""
    names = {"full": "full", "shared": "shared", "F": "full", "S": "shared"}
    for field in ("indexer_types", "index_topk_pattern"):
        if f.has(field):
            modes = f.mapped(field, names, count=len(kinds))
            break
    else:
        every = f.integer("index_topk_freq", default=1)
        offset = f.integer("index_skip_topk_offset", minimum=0, default=2)
        modes = tuple("shared" if max(layer - offset + 1, 0) % every else "full" for layer in range(len(kinds)))
    return tuple(k.removesuffix("+index") if m == "shared" else k for k, m in zip(kinds, modes, strict=True))


def _glm5_next(model: str, f: Fields) -> CacheSpec:
    meaning = {"linear_attention": "kda", "indexed_attention": "mla+index", "full_attention": "mla+index"}
    kinds = f.agreed([f.layer_types(meaning), _kda_mla_lists(f, "mla+index")])
    kinds = _indexed(f, _required(f, kinds, "layer_types", "linear_attn_config.kda_layers"))
    return _spec(model, f, kinds, kda=_kda, mla=_mla, index=_index_pooled)


def _deepseek_sparse(model: str, f: Fields) -> CacheSpec:
    kinds = f.layer_types({"indexed_attention": "mla+index"}) or ("mla+index",) * f.layer_count()
    return _spec(model, f, _indexed(f, kinds), mla=_mla, index=_index)


def _deepseek(model: str, f: Fields) -> CacheSpec:
    """All MLA. Engines take ``index_topk`` in such a config as V3.2's sign, whatever the type says."""
    if f.has("index_topk"):
        return _deepseek_sparse(model, f)
    return _spec(model, f, f.layer_types({"full_attention": "mla"}) or ("mla",) * f.layer_count(), mla=_mla)


def _nemotron_h(model: str, f: Fields) -> CacheSpec:
    """The pattern's length is the layer count; Ultra has no ``num_hidden_layers``. MLP and MoE layers own nothing."""
    by_type = f.layer_types({"linear_attention": "mamba2", "full_attention": "gqa", "moe": "none", "mlp": "none"})
    letters = {"M": "mamba2", "*": "gqa", "E": "none", "-": "none"}
    by_letter = f.mapped("hybrid_override_pattern", letters) if f.has("hybrid_override_pattern") else None
    kinds = _required(f, f.agreed([by_letter, by_type]), "hybrid_override_pattern", "layers_block_type")

    def attention(fields: Fields, layers: Layers) -> list[Component]:
        # Its head width is no quotient of the hidden size, so there is nothing to derive it from.
        fields.integer("head_dim", "attention_head_dim")
        return _attention(fields, layers, k=("head_dim", "attention_head_dim"))

    return _spec(model, f, kinds, mamba2=_mamba2_nemotron, gqa=attention)


_MAMBA_OR_ATTENTION = {"linear_attention": "mamba", "full_attention": "gqa"}


def _jamba(model: str, f: Fields) -> CacheSpec:
    kinds = f.layer_types(_MAMBA_OR_ATTENTION)
    if kinds is None:
        count, period = f.layer_count(), f.integer("attn_layer_period")
        offset = f.integer("attn_layer_offset", minimum=0)
        if offset >= period:
            raise f.error("attn_layer_offset", f"is {offset}; it must be below attn_layer_period {period}")
        kinds = tuple("gqa" if layer % period == offset else "mamba" for layer in range(count))
    return _spec(model, f, kinds, mamba=_mamba1_jamba, gqa=_gqa)


def _falcon_h1(model: str, f: Fields) -> CacheSpec:
    kinds = f.layer_types({"hybrid": "gqa+mamba2"}) or ("gqa+mamba2",) * f.layer_count()
    return _spec(model, f, kinds, mamba2=_mamba2_ibm, gqa=_gqa)


def _granite(model: str, f: Fields) -> CacheSpec:
    """The pattern decides: an all-attention Granite keeps its ``mamba_*`` keys."""
    kinds = _required(f, f.layer_types(_MAMBA_OR_ATTENTION), "layer_types")
    return _spec(model, f, kinds, mamba=_mamba2_ibm, gqa=_gqa_or_mha)


def _bamba(model: str, f: Fields) -> CacheSpec:
    kinds = f.layer_types(_MAMBA_OR_ATTENTION)
    if kinds is None and f.has("attn_layer_indices"):
        kinds = f.chosen("attn_layer_indices", "gqa", "mamba", f.layer_count())
    kinds = _required(f, kinds, "attn_layer_indices", "layers_block_type")
    return _spec(model, f, kinds, mamba=_mamba2_ibm, gqa=_gqa)


def _minimax(model: str, f: Fields) -> CacheSpec:
    by_type = f.layer_types({"linear_attention": "lightning", "full_attention": "gqa"})
    by_number = f.mapped("attn_type_list", {0: "lightning", 1: "gqa"}) if f.has("attn_type_list") else None
    kinds = _required(f, f.agreed([by_number, by_type]), "attn_type_list", "layer_types")
    return _spec(model, f, kinds, lightning=_lightning, gqa=_gqa)


def _minimax_m3(model: str, f: Fields) -> CacheSpec:
    field, count = "sparse_attention_config.sparse_attention_freq", f.layer_count()
    kinds = f.layer_types({"full_attention": "gqa", "minimax_m3_sparse": "gqa+index"})
    if kinds is None or f.has(field):
        kinds = f.agreed([kinds, f.mapped(field, {0: "gqa", 1: "gqa+index"}, count=count)])
    if not f.flag("sparse_attention_config.use_sparse_attention", default=True):
        kinds = ("gqa",) * count
    return _spec(model, f, _required(f, kinds, field), gqa=_gqa, index=_index_minimax)


def _bailing(model: str, f: Fields) -> CacheSpec:
    """Ring and Ling: the last layer of each group is full, and so is the rest that makes no whole group."""
    full = "mla" if f.has("kv_lora_rank") else "gqa"
    linear = "kda" if f.has("short_conv_kernel_size") else "lightning"
    kinds = f.layer_types({"linear_attention": linear, "full_attention": full})
    if kinds is None:
        group, count = f.integer("layer_group_size"), f.layer_count()
        by_period = _every(f, "layer_group_size", full, linear)
        kinds = tuple(full if layer >= count // group * group else kind for layer, kind in enumerate(by_period))
    return _spec(model, f, kinds, mla=_mla, gqa=_gqa, kda=_kda_bailing, lightning=_lightning)


def _lfm(model: str, f: Fields) -> CacheSpec:
    kinds = f.layer_types({"conv": "conv", "full_attention": "gqa", "sliding_attention": "swa"})
    if kinds is None and f.has("full_attn_idxs"):
        kinds = f.chosen("full_attn_idxs", "gqa", "conv", f.layer_count())
    return _spec(model, f, _required(f, kinds, "layer_types", "full_attn_idxs"), conv=_shortconv, gqa=_gqa, swa=_swa)


def _plamo2(model: str, f: Fields) -> CacheSpec:
    count, step = f.layer_count(), f.integer("mamba_step", minimum=2)
    attends = {count - 1} if count <= step // 2 else {layer for layer in range(count) if layer % step == step // 2}
    kinds = tuple("swa" if layer in attends else "mamba" for layer in range(count))

    def attention(fields: Fields, layers: Layers) -> list[Component]:
        window = fields.integer("attention_window_size")
        return _attention(fields, layers, name="window", window=window, k=("hidden_size_per_head",))

    return _spec(model, f, kinds, mamba=_mamba2_plamo, swa=attention)


def _gpt_oss(model: str, f: Fields) -> CacheSpec:
    kinds = _required(f, f.layer_types({"full_attention": "gqa", "sliding_attention": "swa"}), "layer_types")
    return _spec(model, f, kinds, gqa=_gqa, swa=_swa)


def _gemma(model: str, f: Fields) -> CacheSpec:
    """Gemma 3, 3n, 4. The last ``num_kv_shared_layers`` reuse an earlier layer's cache and own none."""
    kinds = f.layer_types({"full_attention": "gqa", "sliding_attention": "swa"})
    if kinds is None:
        pattern = "sliding_window_pattern" if f.has("sliding_window_pattern") else "_sliding_window_pattern"
        by_period = _every(f, pattern, "gqa", "swa") if f.has(pattern) else None
        kinds = _required(f, by_period, "layer_types", "sliding_window_pattern")
    if model.startswith("gemma4") and kinds[-1] != "gqa":
        raise f.error("layer_types", "end in a window layer; Gemma 4 makes the last layer full")
    shared = f.integer("num_kv_shared_layers", minimum=0, maximum=len(kinds) - 1, default=0)
    own = len(kinds) - shared
    if set(kinds[own:]) - set(kinds[:own]):
        raise f.error("num_kv_shared_layers", f"{shared} leaves a shared layer without one of its kind to share with")
    return _spec(model, f, kinds[:own] + ("none",) * shared, gqa=_gqa_gemma, swa=_swa)


def _gqa_gemma(f: Fields, layers: Layers) -> list[Component]:
    """Gemma 4's full layers have their own widths; the head count counts unless ``attention_k_eq_v`` is false."""
    ungated = f.flag("attention_k_eq_v", default=True)
    heads = ("num_global_key_value_heads", "num_key_value_heads") if ungated else ("num_key_value_heads",)
    return _attention(f, layers, heads=heads, k=("global_head_dim", "head_dim"))


def _mimo_v2(model: str, f: Fields) -> CacheSpec:
    """K and V of different width, and other heads in the window layers."""
    by_type = f.layer_types({"full_attention": "gqa", "sliding_attention": "swa"})
    by_number = f.mapped("hybrid_layer_pattern", {0: "gqa", 1: "swa"}) if f.has("hybrid_layer_pattern") else None
    kinds = _required(f, f.agreed([by_number, by_type]), "hybrid_layer_pattern", "layer_types")

    def full(fields: Fields, layers: Layers) -> list[Component]:
        return _attention(fields, layers, v=("v_head_dim",))

    def window(fields: Fields, layers: Layers) -> list[Component]:
        return _attention(
            fields, layers, name="window", window=fields.integer("sliding_window", "sliding_window_size"),
            queries=("swa_num_attention_heads",), heads=("swa_num_key_value_heads", "num_key_value_heads"),
            k=("swa_head_dim", "head_dim"), v=("swa_v_head_dim", "v_head_dim"),
        )  # fmt: skip

    return _spec(model, f, kinds, gqa=full, swa=window)


def _mamba(model: str, f: Fields) -> CacheSpec:
    maker = _mamba2_pure if model == "mamba2" else _mamba1_pure
    return _spec(model, f, ("mamba",) * f.layer_count(), mamba=maker)


_FAMILIES: Mapping[str, Family] = {
    "bailing_hybrid": _bailing, "bailing_moe_linear": _bailing, "bailing_moe_v2_5": _bailing, "bamba": _bamba,
    "deepseek_v2": _deepseek, "deepseek_v3": _deepseek, "deepseek_v32": _deepseek_sparse,
    "falcon_h1": _falcon_h1, "falcon_mamba": _mamba,
    "gemma3": _gemma, "gemma3_text": _gemma, "gemma3n": _gemma, "gemma3n_text": _gemma,
    "gemma4": _gemma, "gemma4_text": _gemma,
    "glm4_moe": _dense, "glm4_moe_lite": _deepseek, "glm5_next": _glm5_next, "glm5_next_text": _glm5_next,
    "glm_moe_dsa": _deepseek_sparse, "gpt_oss": _gpt_oss, "granitemoehybrid": _granite, "jamba": _jamba,
    "kimi_k2": _deepseek, "kimi_k25": _deepseek, "kimi_k3": _kimi_linear, "kimi_linear": _kimi_linear,
    "lfm2": _lfm, "lfm2_moe": _lfm, "lfm3": _lfm, "llama": _llama, "mamba": _mamba, "mamba2": _mamba,
    "mimo_v2_flash": _mimo_v2,
    "minimax": _minimax, "minimax_m1": _minimax, "minimax_text_01": _minimax, "minimax_m2": _dense,
    "minimax_m3": _minimax_m3, "minimax_m3_vl": _minimax_m3, "minimax_m3_vl_text": _minimax_m3,
    "nemotron_h": _nemotron_h, "olmo_hybrid": _olmo_hybrid, "plamo2": _plamo2,
    "qwen2": _dense, "qwen2_moe": _dense, "qwen3": _dense, "qwen3_moe": _dense, "qwen3_next": _qwen_hybrid,
    "qwen3_5": _qwen_hybrid, "qwen3_5_text": _qwen_hybrid, "qwen3_5_moe": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
}  # fmt: skip

_QSA_AND_PLE = (
    "block-compressed index keys with a ring of raw keys per request (QSA), and n-gram convolution state (PLE),"
)
_REFUSED = {
    "deepseek_v4": "compressed rows, compressor buffers of pending tokens and window ring",
    "qwen4_exp": _QSA_AND_PLE,
    "qwen4_exp_text": _QSA_AND_PLE,
}
#: Fields that declare such state in a family that usually has none.
_UNDESCRIBED = {
    "compress_ratios": "compressed attention rows",
    "indexer_compress_ratio": "block-compressed index keys",
    "ple_layer_ids": "n-gram convolution state (PLE)",
}
