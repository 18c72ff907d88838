"""The config parser against every real config's independent ``expect``, each trap, and garbled configs.

``presets/*.json`` carry ``_fixture.expect``, derived apart from this parser; ``REFUSED`` names those whose state
a spec can't describe. Configs of families without a preset are written out here, with totals from public tables.
"""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.errors import MisuseError
from pdxfer.hf_config import Fields
from pdxfer.models import known_model_types, load_config, preset_names, spec_from_config
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Growth, Rule

REFUSED = ("deepseek-v4-flash", "deepseek-v4-pro", "qwen3.8-flash-next")
DESCRIBED = tuple(name for name in preset_names() if name not in REFUSED)
TP_CANDIDATES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 64)
UNBOUNDED = ("kv.k", "kv.v", "latent", "rope")


def expected_components(kind: dict) -> dict[str, tuple]:
    """One fixture layer kind -> {component name: (axes, rule, units, window, tokens per row)}."""
    found: dict[str, tuple] = {}
    for part, channels, units in kind.get("conv_parts", ()):
        rule = Rule.EXTENDED if part in "BC" and units == 1 else Rule.SHARDED
        found[f"conv.{part}"] = ((("channels", channels), ("taps", kind["taps"])), rule, units, 0, 1)
    if "S" in kind:
        axes = tuple(zip(kind["S_axes"].split(","), kind["S"], strict=True))
        found["S"] = (axes, Rule.SHARDED, kind["S"][0], 0, 1)
    if "kv_heads" in kind:
        heads, window = kind["kv_heads"], kind.get("window", 0)
        for part in "kv":
            axes = (("heads", heads), ("dim", kind[f"{part}_dim"]))
            found[f"{'window' if window else 'kv'}.{part}"] = (axes, Rule.EXTENDED, heads, window, 1)
    for name in ("latent", "rope"):
        if kind.get(name):
            found[name] = ((("dim", kind[name]),), Rule.REPLICATED, 1, 0, 1)
    if "index_heads" in kind:
        axes = (("heads", kind["index_heads"]), ("dim", kind["index_dim"]))
        found["index_k"] = (axes, Rule.EXTENDED, kind["index_heads"], 0, kind.get("index_tokens_per_row", 1))
    elif "index_dim" in kind:
        found["index_k"] = ((("dim", kind["index_dim"]),), Rule.REPLICATED, 1, 0, kind["index_tokens_per_row"])
    return found


def found_components(spec: CacheSpec, layer: int) -> dict[str, tuple]:
    return {
        c.name: (
            tuple((a.name, a.extent) for a in c.axes),
            c.ownership.rule,
            c.ownership.units,
            c.window,
            c.tokens_per_row,
        )
        for c in spec.layer_components(layer)
    }


def elems(spec: CacheSpec, *prefixes: str) -> int:
    return sum(c.row_elems * len(c.layers) for c in spec.components if c.name.startswith(prefixes))


def preset(name: str, **changes) -> dict:
    """A preset's config with fields of its language model changed; None stays null, ``...`` drops the field."""
    config = load_config(name)
    text = config.get("text_config", config)
    for field, value in changes.items():
        text.pop(field, None) if value is ... else text.update({field: value})
    return config


def refused(config: object, field: str) -> MisuseError:
    with pytest.raises(MisuseError) as caught:
        spec_from_config(config)
    assert field in caught.value.message
    return caught.value


# ---------------------------------------------------------------- the independent oracle


@pytest.mark.parametrize("name", DESCRIBED)
def test_preset_has_exactly_the_expected_components_in_every_layer(name: str) -> None:
    config = load_config(name)
    expect, spec = config["_fixture"]["expect"], spec_from_config(config)
    assert spec.num_layers == len(expect["layers"])
    for layer, kind in enumerate(expect["layers"]):
        assert found_components(spec, layer) == expected_components(expect["per_layer"].get(kind, {})), (layer, kind)


@pytest.mark.parametrize("name", DESCRIBED)
def test_preset_has_the_expected_totals_and_tp_sizes(name: str) -> None:
    config = load_config(name)
    expect, spec = config["_fixture"]["expect"], spec_from_config(config)
    assert elems(spec, *UNBOUNDED) == expect["kv_elems_per_token"]
    assert elems(spec, "conv.") == expect["conv_elems_per_request"]
    assert elems(spec, "S") == expect["S_elems_per_request"]
    assert list(spec.tp_sizes(TP_CANDIDATES)) == expect["tp_sizes"]


@pytest.mark.parametrize("name", [n for n in DESCRIBED if load_config(n)["_fixture"]["expect"]["S_elems_per_request"]])
def test_one_state_layer_crosses_one_attention_layer_where_expected(name: str) -> None:
    config = load_config(name)
    expect, spec = config["_fixture"]["expect"], spec_from_config(config)
    crossover = expect.get("per_layer_crossover_tokens")
    kv = sum(c.row_elems for c in spec.components if c.name in UNBOUNDED)
    if crossover is None:
        assert kv == 0
        return
    conv = sum(c.row_elems for c in spec.components if c.name.startswith("conv."))
    for key, width in (("S_16bit", 2), ("S_32bit", 4)):
        assert round((spec["S"].row_elems * width + conv * 2) / (kv * 2), 2) == crossover[key]


def test_every_preset_is_either_described_or_refused_by_name() -> None:
    assert len(preset_names()) == 57
    for name in REFUSED:
        error = refused(load_config(name), load_config(name)["model_type"])
        assert error.reason == "UNSUPPORTED_MODEL"
    assert "compressor buffers" in refused(load_config("deepseek-v4-pro"), "deepseek_v4").message
    assert "QSA" in refused(load_config("qwen3.8-flash-next"), "qwen4_exp").message


@pytest.mark.parametrize("name", DESCRIBED)
def test_state_comes_first_and_json_round_trips(name: str) -> None:
    spec = spec_from_config(load_config(name))
    growths = [c.growth is Growth.PER_REQUEST for c in spec.components]
    assert growths == sorted(growths, reverse=True)
    assert CacheSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


# ---------------------------------------------------------------- families without a preset


def periodic(count: int, every: int, full: str, other: str) -> list[str]:
    return [full if (i + 1) % every == 0 else other for i in range(count)]


GEMMA_4 = {
    "model_type": "gemma4", "text_config": {
        "model_type": "gemma4_text", "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 256, "global_head_dim": 512, "num_global_key_value_heads": 2, "attention_k_eq_v": True,
        "sliding_window": 1024, "layer_types": periodic(30, 6, "full_attention", "sliding_attention"),
    },
}  # fmt: skip
MIMO = {
    "model_type": "mimo_v2_flash", "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 4,
    "head_dim": 192, "v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
    "swa_head_dim": 192, "swa_v_head_dim": 128, "sliding_window": 128,
    "hybrid_layer_pattern": [0 if i == 0 or (i + 1) % 6 == 0 else 1 for i in range(48)],
}  # fmt: skip
LING_3 = {
    "model_type": "bailing_hybrid", "num_hidden_layers": 42, "num_attention_heads": 32, "num_key_value_heads": 32,
    "head_dim": 128, "layer_group_size": 6, "short_conv_kernel_size": 4, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
}  # fmt: skip
OLMO = {
    "model_type": "olmo_hybrid", "num_hidden_layers": 32, "hidden_size": 3840, "num_attention_heads": 30,
    "layer_types": periodic(32, 4, "full_attention", "linear_attention"), "linear_num_key_heads": 30,
    "linear_num_value_heads": 30, "linear_key_head_dim": 96, "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4,
}  # fmt: skip
LFM_3 = {
    "model_type": "lfm3", "num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 128, "conv_L_cache": 7, "sliding_window": 256,
    "layer_types": ["conv", "conv", "full_attention", "conv", "sliding_attention", "conv", "full_attention", "conv"],
}  # fmt: skip


def glm_52(**changes) -> dict:
    modes = ["full" if i == 0 or i % 4 == 1 else "shared" for i in range(78)]
    return preset("glm-5.1", head_dim=192, indexer_types=modes, **changes)


def test_gemma_4_full_layers_have_their_own_heads_and_widths() -> None:
    spec = spec_from_config(GEMMA_4)
    assert elems(spec, *UNBOUNDED) * 2 == 20480
    assert (spec["kv.k"].shape, spec["window.k"].shape) == ((2, 512), (8, 256))
    assert list(spec.tp_sizes(TP_CANDIDATES)) == [1, 2, 4, 8, 16]


def test_gemma_4_as_transformers_5_saves_it_reads_the_per_layer_overrides() -> None:
    config = copy.deepcopy(GEMMA_4)
    text = config["text_config"]
    del text["global_head_dim"], text["num_global_key_value_heads"]
    text["per_layer_config"] = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    text["per_layer_config"]["05"] = text["per_layer_config"].pop("5")
    assert spec_from_config(config) == spec_from_config(GEMMA_4)
    text["per_layer_config"]["05"]["head_dim"] = 256
    refused(config, "per_layer_config")


def test_olmo_hybrid_has_keys_and_values_of_different_width() -> None:
    spec = spec_from_config(OLMO)
    assert spec["S"].shape == (30, 96, 192)
    assert (spec["conv.q"].shape, spec["conv.v"].shape) == ((2880, 3), (5760, 3))
    assert spec["kv.k"].shape == (30, 128)


def test_lfm_3_mixes_convolution_window_and_full_layers() -> None:
    spec = spec_from_config(LFM_3)
    assert (spec["conv.x"].layers, spec["conv.x"].shape) == ((0, 1, 3, 5, 7), (2048, 6))
    assert (spec["kv.k"].layers, spec["window.k"].layers, spec["window.k"].window) == ((2, 6), (4,), 256)


def test_pure_mamba_models_have_no_attention() -> None:
    base = {"num_hidden_layers": 4, "hidden_size": 64, "expand": 2, "state_size": 16, "conv_kernel": 4}
    for config, shape in (
        ({"model_type": "mamba"}, (128, 16)),
        ({"model_type": "falcon_mamba", "expand": 16, "intermediate_size": 128}, (128, 16)),
        ({"model_type": "mamba2", "num_heads": 8, "head_dim": 16, "n_groups": 2}, (8, 16, 16)),
    ):
        spec = spec_from_config({**base, **config})
        assert (spec["S"].shape, spec.query_heads) == (shape, 0)
        assert "kv.k" not in spec


def test_minimax_text_01_reads_numbers_or_names() -> None:
    m1 = load_config("minimax-m1-80k")
    names = ["full_attention" if kind else "linear_attention" for kind in m1["attn_type_list"]]
    renamed = {**m1, "model_type": "minimax", "attn_type_list": None, "layer_types": names}
    assert spec_from_config(renamed).components == spec_from_config(m1).components
    refused({**m1, "layer_types": names[::-1]}, "layer_types")


def test_qwen_with_sliding_window_switched_on() -> None:
    on = preset("qwen3-8b", sliding_window=4096, use_sliding_window=True, max_window_layers=28)
    assert spec_from_config(on)["window.k"].layers == tuple(range(28, 36))
    off = preset("qwen3-8b", sliding_window=4096, use_sliding_window=False, max_window_layers=28)
    assert spec_from_config(off) == spec_from_config(load_config("qwen3-8b"))
    refused(
        preset("qwen3-30b-a3b", sliding_window=64, use_sliding_window=True, max_window_layers=2), "use_sliding_window"
    )
    refused(preset("glm-4.5", sliding_window=4096), "max_window_layers")


def test_minimax_m3_as_transformers_names_it() -> None:
    m3 = load_config("minimax-m3")
    sparse = m3.pop("sparse_attention_config")
    kinds = ["minimax_m3_sparse" if x else "full_attention" for x in sparse["sparse_attention_freq"]]
    text = {**m3, "model_type": "minimax_m3_vl_text", "layer_types": kinds, "index_n_heads": 4, "index_head_dim": 128}
    spec = spec_from_config({"model_type": "minimax_m3_vl", "text_config": text})
    assert spec.components == spec_from_config(load_config("minimax-m3")).components
    dense = {**load_config("minimax-m3"), "sparse_attention_config": {**sparse, "use_sparse_attention": False}}
    assert "index_k" not in spec_from_config(dense)


# ---------------------------------------------------------------- traps (each one a test)


def test_trap_layer_lists_count_from_one_or_from_zero() -> None:
    kimi, glm = load_config("kimi-linear-48b-a3b"), load_config("glm-5.3-flash")
    assert spec_from_config(kimi)["latent"].layers == (3, 7, 11, 15, 19, 23, 26)
    del glm["text_config"]["layer_types"]
    assert spec_from_config(glm) == spec_from_config(load_config("glm-5.3-flash"))
    lists = kimi["linear_attn_config"]
    shifted = {**lists, **{k: [x - 1 for x in lists[k]] for k in ("kda_layers", "full_attn_layers")}}
    assert spec_from_config({**kimi, "linear_attn_config": shifted}) == spec_from_config(kimi)


@pytest.mark.parametrize("kda", [[1, 2, 3], [1, 2, 2, 3], [0, 1, 3], [1, 2, 4], [2, 3, 5], []])
def test_trap_lists_that_do_not_cover_the_layers_exactly_once_are_refused(kda: list[int]) -> None:
    config = preset("kimi-linear-48b-a3b", num_hidden_layers=5)
    config["linear_attn_config"] = {**config["linear_attn_config"], "kda_layers": kda, "full_attn_layers": [4]}
    refused(config, "linear_attn_config.kda_layers")


def test_trap_the_last_full_layer_breaks_the_period() -> None:
    assert spec_from_config(load_config("kimi-linear-48b-a3b"))["latent"].layers[-2:] == (23, 26)
    assert spec_from_config(load_config("kimi-k3"))["latent"].layers[-2:] == (91, 92)
    tail = preset("ring-mini-linear-2.0", num_hidden_layers=22)
    assert spec_from_config(tail)["kv.k"].layers == (4, 9, 14, 19, 20, 21)
    interval = preset("qwen3.5-27b", full_attention_interval=2)
    assert spec_from_config(interval) == spec_from_config(load_config("qwen3.5-27b"))


@pytest.mark.parametrize(
    ("name", "junk"), [("kimi-linear-48b-a3b", 72), ("glm-5", 64), ("glm-5", 192), ("deepseek-v3", 7)]
)
def test_trap_junk_head_dim_is_never_read_by_mla(name: str, junk: int) -> None:
    assert spec_from_config(preset(name, head_dim=junk)) == spec_from_config(preset(name, head_dim=...))


def test_trap_a_zero_width_rope_is_no_component() -> None:
    spec = spec_from_config(load_config("glm-5.3-flash"))
    assert "rope" not in spec
    assert spec["latent"].shape == (512,)
    assert (spec["index_k"].tokens_per_row, spec["index_k"].layers) == (4, spec["latent"].layers)
    whole = spec_from_config(preset("glm-5.3-flash", index_kpool_compress=False))
    assert whole["index_k"].tokens_per_row == 1


def test_trap_mamba_keys_without_mamba_layers() -> None:
    spec = spec_from_config(load_config("trap-granite-all-attention"))
    assert {c.name for c in spec.components} == {"kv.k", "kv.v"}


def test_trap_no_num_hidden_layers() -> None:
    config = load_config("nemotron-3-ultra-550b-a55b")
    assert "num_hidden_layers" not in config
    assert spec_from_config(config).num_layers == 108
    refused({**config, "num_hidden_layers": 107}, "layers_block_type")


def test_trap_a_list_longer_than_the_model_ends_in_mtp_layers() -> None:
    whole = load_config("qwen3.5-27b")
    text = whole["text_config"]
    longer = [*text["layer_types"], "full_attention"]
    assert spec_from_config(preset("qwen3.5-27b", layer_types=longer)) == spec_from_config(whole)
    refused(preset("qwen3.5-27b", layer_types=longer, mtp_num_hidden_layers=0), "layer_types")
    refused(preset("qwen3.5-27b", layer_types=[*longer, "full_attention"]), "layer_types")
    refused(preset("qwen3.5-27b", layer_types=text["layer_types"][:-1]), "layer_types")


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2-instruct", "glm-5.1", "kimi-k3"])
def test_trap_kv_heads_present_but_unused_by_mla(name: str) -> None:
    assert spec_from_config(preset(name, num_key_value_heads=3)) == spec_from_config(
        preset(name, num_key_value_heads=...)
    )


def test_trap_shared_index_layers_hold_no_index_key() -> None:
    spec = spec_from_config(glm_52())
    assert (len(spec["index_k"].layers), len(spec["latent"].layers)) == (21, 78)
    assert elems(spec, *UNBOUNDED) * 2 == 89_856
    letters = "".join("F" if i in spec["index_k"].layers else "S" for i in range(78))
    assert spec_from_config(preset("glm-5.1", index_topk_pattern=letters)) == spec
    assert spec_from_config(preset("glm-5.1", index_topk_freq=4)) == spec
    assert len(spec_from_config(preset("glm-5.1", index_topk_freq=4, index_skip_topk_offset=0))["index_k"].layers) == 19
    refused(preset("glm-5.1", indexer_types=["full"] * 77 + ["half"]), "indexer_types")


def test_trap_kv_shared_layers_own_no_cache() -> None:
    config = copy.deepcopy(GEMMA_4)
    config["text_config"]["num_kv_shared_layers"] = 12
    spec = spec_from_config(config)
    assert (spec.num_layers, spec["kv.k"].layers, spec["window.k"].layers[-1]) == (30, (5, 11, 17), 16)
    config["text_config"]["num_kv_shared_layers"] = 26
    refused(config, "num_kv_shared_layers")
    config["text_config"]["num_kv_shared_layers"] = 30
    refused(config, "num_kv_shared_layers")


def test_trap_same_family_other_math() -> None:
    kda = spec_from_config(LING_3)
    assert (elems(kda, "conv.") * 2, elems(kda, "S") * 4) == (2_580_480, 73_400_320)
    assert elems(kda, *UNBOUNDED) * 2 == 8064
    lightning = spec_from_config({**LING_3, "short_conv_kernel_size": None})
    assert "conv.q" not in lightning
    assert lightning["S"].shape == (32, 128, 128)
    saved = {**LING_3, "linear_head_dim": 128, "head_dim": 64}
    assert spec_from_config(saved) == kda


def test_trap_keys_and_values_of_different_width() -> None:
    spec = spec_from_config(MIMO)
    assert elems(spec, *UNBOUNDED) * 2 == 23_040
    assert (len(spec["kv.k"].layers), len(spec["window.k"].layers)) == (9, 39)
    assert (spec["kv.k"].shape, spec["kv.v"].shape) == ((4, 192), (4, 128))
    assert (spec["window.k"].shape, spec["window.v"].shape) == ((8, 192), (8, 128))
    refused({k: v for k, v in MIMO.items() if k != "v_head_dim"}, "v_head_dim")


def test_trap_mlp_and_moe_layers_own_nothing_and_keep_their_numbers() -> None:
    spec = spec_from_config(load_config("nemotron-3-nano-30b-a3b"))
    assert spec["kv.k"].layers == (5, 12, 19, 26, 33, 42)
    assert spec.layer_components(1) == ()
    letters = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    names = [letters[c] for c in load_config("nemotron-3-nano-30b-a3b")["hybrid_override_pattern"]]
    listed = preset("nemotron-3-nano-30b-a3b", hybrid_override_pattern=..., layers_block_type=names)
    assert spec_from_config(listed) == spec
    refused(preset("nemotron-3-nano-30b-a3b", layers_block_type=names[::-1]), "layer_types")
    refused(preset("nemotron-h-8b", hybrid_override_pattern="X" * 52), "hybrid_override_pattern")


def test_trap_quantised_kv_asked_by_the_file_is_left_to_the_live_engine() -> None:
    config = load_config("qwen3.6-27b-nvfp4")
    assert config["quantization_config"]["kv_cache_scheme"]["num_bits"] == 8
    spec = spec_from_config(config)
    assert spec["kv.k"].dtype == "bfloat16"
    assert spec.digest == spec_from_config(load_config("qwen3.5-27b")).digest


# ---------------------------------------------------------------- wrappers, types, dtypes


def test_a_wrapper_is_looked_into_however_deep() -> None:
    inner = load_config("kimi-k3")["text_config"]
    nested = {"model_type": "some_omni", "dtype": "float16", "text_config": {"text_config": {**inner, "dtype": None}}}
    spec = spec_from_config(nested)
    assert (spec.model, spec.digest) == ("kimi_linear", spec_from_config(load_config("kimi-k3")).digest)
    assert (spec["latent"].dtype, spec["S"].dtype) == ("float16", "float32")
    del nested["text_config"]["text_config"]["model_type"]
    refused(nested, "some_omni")
    assert spec_from_config({**nested, "model_type": "kimi_k3"}).digest == spec.digest


def test_a_wrapper_without_a_language_model_is_an_error_that_names_its_type() -> None:
    assert "known are" in refused({"model_type": "some_vl", "vision_config": {}}, "some_vl").message
    refused({"model_type": "qwen3_5", "text_config": []}, "text_config")
    refused({"num_hidden_layers": 3}, "model_type")
    refused({"model_type": 5}, "model_type")
    deep: dict = {"model_type": "llama"}
    for _ in range(9):
        deep = {"text_config": deep}
    refused(deep, "text_config")


def test_an_unknown_type_lists_the_known_and_suggests_the_nearest() -> None:
    error = refused({"model_type": "qwen3_nxt"}, "qwen3_nxt")
    assert all(name in error.message for name in known_model_types())
    assert "qwen3_next" in error.hint


def test_state_declared_by_an_unexpected_field_is_refused_in_any_family() -> None:
    for field in ("ple_layer_ids", "compress_ratios", "indexer_compress_ratio"):
        assert refused(preset("qwen3.5-27b", **{field: [2]}), field).reason == "UNSUPPORTED_MODEL"


def test_dtypes_are_what_the_config_suggests() -> None:
    spec = spec_from_config(load_config("nemotron-3-nano-30b-a3b"))
    assert (spec["S"].dtype, spec["conv.x"].dtype, spec["kv.k"].dtype) == ("float32", "bfloat16", "bfloat16")
    changed = spec_from_config(preset("qwen3-next-80b-a3b", torch_dtype="torch.float16", mamba_ssm_dtype="bfloat16"))
    assert (changed["S"].dtype, changed["conv.q"].dtype, changed["kv.v"].dtype) == ("bfloat16", "float16", "float16")
    assert spec_from_config(preset("qwen3-next-80b-a3b", torch_dtype=None))["kv.k"].dtype == "bfloat16"
    refused(preset("qwen3-8b", torch_dtype="fp4"), "dtype")


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("qwen3-8b", "num_hidden_layers", ...),
        ("qwen3-8b", "num_key_value_heads", 5),
        ("qwen3-8b", "num_key_value_heads", True),
        ("qwen3-8b", "num_key_value_heads", "8"),
        ("qwen3-8b", "head_dim", -128),
        ("qwen3-8b", "head_dim", 128.0),
        ("qwen3-8b", "num_hidden_layers", 10**9),
        ("llama-3.1-8b", "hidden_size", 4097),
        ("deepseek-v3", "kv_lora_rank", None),
        ("deepseek-v3", "qk_rope_head_dim", ...),
        ("deepseek-v3.2", "index_head_dim", ...),
        ("qwen3-next-80b-a3b", "full_attention_interval", ...),
        ("qwen3-next-80b-a3b", "linear_num_value_heads", 17),
        ("qwen3-next-80b-a3b", "linear_conv_kernel_dim", 1),
        ("kimi-linear-48b-a3b", "linear_attn_config", 7),
        ("nemotron-h-8b", "attention_head_dim", ...),
        ("nemotron-h-8b", "n_groups", 7),
        ("falcon-h1-7b", "mamba_n_heads", 25),
        ("jamba-v0.1", "attn_layer_offset", 8),
        ("bamba-9b", "attn_layer_indices", [9, 32]),
        ("lfm2-1.2b", "full_attn_idxs", [2, 2]),
        ("granite-4.0-h-tiny", "layer_types", ...),
        ("gpt-oss-20b", "sliding_window", None),
        ("minimax-m1-80k", "attn_type_list", [True] * 80),
        ("plamo-2-1b", "mamba_step", 1),
        ("gemma-3-27b", "sliding_window_pattern", ...),
    ],
)
def test_a_missing_or_impossible_value_is_an_error_that_names_the_field(name: str, field: str, value: object) -> None:
    refused(preset(name, **{field: value}), field)


# ---------------------------------------------------------------- loading


def test_load_config_finds_presets_files_and_directories(tmp_path) -> None:
    assert load_config("Qwen3-8B")["model_type"] == "qwen3"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_config(str(tmp_path)) == load_config(str(tmp_path / "config.json")) == {"model_type": "llama"}


@pytest.mark.parametrize("text", ["[1]", "{", "\x00", "[" * 100_000])
def test_load_config_refuses_what_is_no_json_object(tmp_path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(MisuseError, match=r"config\.json"):
        load_config(str(tmp_path))


def test_load_config_suggests_the_nearest_preset() -> None:
    with pytest.raises(MisuseError) as caught:
        load_config("qwen3-next-80b")
    assert "qwen3-next-80b-a3b" in caught.value.hint
    with pytest.raises(MisuseError, match="neither a preset nor a file"):
        load_config("/no/such/thing")


# ---------------------------------------------------------------- properties

GARBAGE = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 300), st.floats(allow_nan=True), st.text(max_size=5), st.just({}),
    st.lists(st.one_of(st.integers(-2, 99), st.booleans(), st.text(max_size=3)), max_size=5), st.just(10**400),
)  # fmt: skip
#: Dropping or zeroing one of these is legal and can change the meaning: each has a documented alternative.
OPTIONAL = {"head_dim", "num_key_value_heads", "mamba_d_ssm", "index_topk", "model_type", "short_conv_kernel_size"}


def leaves(config: dict, prefix: tuple = ()) -> list[tuple]:
    found = []
    for key, value in config.items():
        found.append((*prefix, key))
        if isinstance(value, dict):
            found.extend(leaves(value, (*prefix, key)))
    return found


@settings(deadline=None, max_examples=400)
@given(st.sampled_from(DESCRIBED), st.data())
def test_a_config_with_one_field_garbled_is_an_error_or_a_spec(name: str, data) -> None:
    config = load_config(name)
    del config["_fixture"]
    want = spec_from_config(config)
    path = data.draw(st.sampled_from(leaves(config)))
    level = config
    for key in path[:-1]:
        level = level[key]
    old = level[path[-1]]
    action = data.draw(st.sampled_from(["drop", "replace", "cut", "swap"]))
    if action == "drop":
        del level[path[-1]]
    elif action == "replace" or not isinstance(old, list) or not old:
        level[path[-1]] = data.draw(GARBAGE)
    elif action == "cut":
        level[path[-1]] = old[: data.draw(st.integers(0, len(old) - 1))]
    else:
        level[path[-1]] = [
            data.draw(GARBAGE) if i == data.draw(st.integers(0, len(old))) else x for i, x in enumerate(old)
        ]
    try:
        got = spec_from_config(config)
    except MisuseError as error:
        got, named = None, error.details.get("field") or ("model_type" in error.message)
    if got is None:
        assert named
        return
    if action == "drop" and path[-1] not in OPTIONAL:
        assert got.digest == want.digest
    if action == "cut" and isinstance(old, list) and "num_hidden_layers" in level:
        assert got.digest == want.digest or path[-1] in {"attn_layer_indices", "full_attn_idxs"}


@settings(deadline=None, max_examples=200)
@given(st.sampled_from(known_model_types()), st.dictionaries(st.text(max_size=12), GARBAGE, max_size=4))
def test_any_object_with_a_known_type_is_an_error_or_a_spec(model_type: str, rest: dict) -> None:
    try:
        spec = spec_from_config({**rest, "model_type": model_type})
    except MisuseError:
        return
    assert all(c.dtype in DTYPE_BYTES for c in spec.components)


@given(st.integers(1, 30), st.integers(0, 1), st.data())
def test_an_exact_cover_gives_each_layer_its_kind_at_either_base(count: int, base: int, data) -> None:
    kinds = data.draw(st.lists(st.sampled_from("ab"), min_size=count, max_size=count))
    lists = {kind: [base + i for i, k in enumerate(kinds) if k == kind] for kind in "ab"}
    assert Fields(lists).covered({"a": "a", "b": "b"}, count) == tuple(kinds)
    victim = data.draw(st.sampled_from([k for k in "ab" if lists[k]]))
    lists[victim] = lists[victim][1:]
    # One missing number leaves no cover, except that losing 0 of 0..n-1 would start at 1 and then lacks n.
    with pytest.raises(MisuseError):
        Fields(lists).covered({"a": "a", "b": "b"}, count)


def rewritten(config: dict) -> dict | None:
    """The language model's config as the transformers class of its type loads and saves it; None without a class."""
    transformers = pytest.importorskip("transformers")
    text = config.get("text_config", config)
    if text["model_type"] not in transformers.CONFIG_MAPPING:
        return None
    fields = {k: v for k, v in text.items() if k not in ("model_type", "_fixture")}
    return json.loads(transformers.CONFIG_MAPPING[text["model_type"]](**fields).to_json_string())


def test_configs_rewritten_by_transformers_give_the_same_spec() -> None:
    compared = 0
    for config in (*map(load_config, DESCRIBED), LING_3, OLMO, LFM_3, GEMMA_4, glm_52()):
        saved = rewritten(config)
        if saved is None:
            continue
        compared += 1
        got, want = spec_from_config(saved), spec_from_config(config)
        assert (got.digest, got.query_heads) == (want.digest, want.query_heads), config["model_type"]
    assert compared >= 45
