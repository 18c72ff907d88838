"""The reference connector: a transformers cache through pages and back, in every axis order, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.connectors import hf
from pdxfer.connectors.paged import PagedCaches
from pdxfer.demo import models
from pdxfer.errors import ExhaustedError, MisuseError
from tests.conftest import require

torch = require("torch")
transformers = require("transformers")

torch.set_num_threads(1)  # tiny tensors: threads only wait for each other

TOKENS, STEPS = 37, 5

STORAGES = {
    "plain": (Storage(), "per_layer"),
    "odd pages, HND, packed": (Storage(page_tokens=7, kv_order="HND", kv_packed=True), "per_layer"),
    "one-token pages, taps first": (Storage(page_tokens=1, conv_order="TC", latent_packed=False), "per_layer"),
    "V first, parts apart": (Storage(page_tokens=3, state_order="VK", conv_fused=False), "per_layer"),
    "kernel-wide conv, spare rows": (Storage(page_tokens=64, taps_before=1, taps_after=2), "per_layer"),
    "rows of taps, spare rows": (Storage(page_tokens=5, conv_order="TC", taps_before=1, taps_after=3), "per_request"),
    "state in one block": (Storage(page_tokens=11, state_order="VK", kv_packed=True), "per_request"),
    "unified": (Storage(page_tokens=1, alignment_tokens=1), "unified"),
    "unified, everything turned": (
        Storage(page_tokens=3, alignment_tokens=3, kv_order="HND", conv_order="TC", state_order="VK", taps_after=1),
        "unified",
    ),
}

OTHERS = {
    "gemma3_text": {"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 8,
        "expert_layer_offset": 7,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_dt_rank": 4,
        "num_experts": 2,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3, "block_ff_dim": 64},
    "qwen3": {},
}


def caches(layout: Any, rank: int = 0, seed: int = 0) -> PagedCaches:
    return PagedCaches(layout, rank, [bytearray(r.nbytes) for r in layout.ranks[rank].regions], seed=seed)


def prompt(seed: int, tokens: int = TOKENS) -> Any:
    return torch.randint(0, models.VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(seed))


def prefill(model: Any, ids: Any) -> Any:
    cache = hf.new_cache(model.config)
    with torch.inference_mode():
        hf.forward(model, ids, cache)
    return cache


def decode(model: Any, cache: Any) -> Any:
    """Logits of five steps that feed fixed tokens, ``[5, vocabulary]``."""
    with torch.inference_mode():
        return torch.stack([hf.forward(model, torch.tensor([[7 * i + 1]]), cache)[0, -1] for i in range(STEPS)])


def tiny(model_type: str) -> Any:
    shared = {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "vocab_size": models.VOCABULARY,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return transformers.AutoConfig.for_model(model_type, **{**shared, **OTHERS[model_type]})


@pytest.fixture(scope="module", params=models.MODELS)
def model(request):
    return models.build_model(models.demo_config(request.param))


@pytest.fixture(scope="module")
def qwen():
    return models.build_model(models.demo_config("qwen3-next"))


@pytest.mark.parametrize("name", STORAGES)
def test_a_request_continues_from_pages_as_if_never_interrupted(model, name):
    storage, placement = STORAGES[name]
    paged = caches(hf.layout_for_model(model.config, 1, replace(storage, pages=256, slots=4), placement))
    tables, neighbour = paged.allocate(TOKENS), paged.allocate(TOKENS + 9)
    hf.write_cache(paged, tables, prefill(model, prompt(1)), TOKENS)
    hf.write_cache(paged, neighbour, prefill(model, prompt(2, TOKENS + 9)), TOKENS + 9)

    first = hf.read_cache(paged, tables, model.config, TOKENS)
    second = hf.read_cache(paged, neighbour, model.config, TOKENS + 9)

    assert torch.equal(decode(model, first), decode(model, prefill(model, prompt(1))))
    assert torch.equal(decode(model, second), decode(model, prefill(model, prompt(2, TOKENS + 9))))
    paged.check_integrity()


@pytest.mark.parametrize("tokens", [1, 2, 3, 5])
def test_prompts_shorter_than_the_convolution_have_zeros_as_older_taps(model, tokens):
    paged = caches(hf.layout_for_model(model.config, 1, Storage(page_tokens=2)))
    tables = paged.allocate(tokens)
    for layer, component in paged.components():
        paged.write(component.name, layer, tables, tokens, -1)
    hf.write_cache(paged, tables, prefill(model, prompt(1, tokens)), tokens)
    cache = hf.read_cache(paged, tables, model.config, tokens)
    assert torch.equal(decode(model, cache), decode(model, prefill(model, prompt(1, tokens))))


@pytest.mark.parametrize("model_type", OTHERS)
@pytest.mark.parametrize("tokens", [5, 8, 9, 40])
def test_other_families(model_type, tokens):
    """Sliding windows not yet full, just full and long full; Mamba1; convolution without S; plain attention."""
    model = models.build_model(tiny(model_type))
    paged = caches(hf.layout_for_model(model.config, 1, Storage(page_tokens=3)))
    tables = paged.allocate(tokens)
    hf.write_cache(paged, tables, prefill(model, prompt(1, tokens)), tokens)
    cache = hf.read_cache(paged, tables, model.config, tokens)
    assert torch.equal(decode(model, cache), decode(model, prefill(model, prompt(1, tokens))))


def test_bfloat16_models_keep_their_bits():
    model = models.build_model(models.demo_config("qwen3-next")).to(torch.bfloat16)
    layout = hf.layout_for_model(model.config, 1, dtype="bfloat16")
    assert {h.component: h.dtype for h in layout.ranks[0].holdings}["S"] == "float32"
    paged = caches(layout)
    tables = paged.allocate(TOKENS)
    hf.write_cache(paged, tables, prefill(model, prompt(1)), TOKENS)
    cache = hf.read_cache(paged, tables, model.config, TOKENS)
    assert torch.equal(decode(model, cache), decode(model, prefill(model, prompt(1))))


def test_regions_may_be_torch_tensors_or_arrays(qwen):
    layout = hf.layout_for_model(qwen.config, 1)
    kinds = (lambda n: torch.zeros(n, dtype=torch.uint8), lambda n: np.zeros(n, np.uint8), bytearray)
    shares = []
    for kind in kinds:
        buffers = [kind(region.nbytes) for region in layout.ranks[0].regions]
        paged = PagedCaches(layout, 0, buffers)
        hf.write_cache(paged, paged.allocate(TOKENS), prefill(qwen, prompt(1)), TOKENS)
        shares.append(b"".join(bytes(b.numpy() if hasattr(b, "data_ptr") else b) for b in buffers))
    assert len(set(shares)) == 1
    assert any(shares[0])


def test_buffers_that_do_not_fit_are_refused(qwen):
    layout = hf.layout_for_model(qwen.config, 1)
    buffers = [bytearray(region.nbytes) for region in layout.ranks[0].regions]
    with pytest.raises(MisuseError, match="regions, got"):
        PagedCaches(layout, 0, buffers[1:])
    with pytest.raises(MisuseError, match=layout.ranks[0].regions[-1].name):
        PagedCaches(layout, 0, [*buffers[:-1], bytearray(8)])
    with pytest.raises(MisuseError, match="writable"):
        PagedCaches(layout, 0, [bytes(buffers[0]), *buffers[1:]])


def test_page_tables_are_scattered_and_repeat_with_the_seed(qwen):
    layout = hf.layout_for_model(qwen.config, 1, Storage(page_tokens=1))
    tables = [caches(layout, seed=seed).allocate(40)["kv"].tolist() for seed in (1, 1, 2)]
    assert tables[0] == tables[1] != tables[2]
    assert tables[0] != sorted(tables[0])
    assert len(set(tables[0])) == 40


def test_allocation_gives_all_or_nothing_and_takes_back_only_what_it_gave(qwen):
    paged = caches(hf.layout_for_model(qwen.config, 1, Storage(page_tokens=4, pages=10, slots=2)))
    before = paged.free_pages()
    tables = paged.allocate(24)
    with pytest.raises(ExhaustedError, match="20 tokens need 5 pages, 4 of 10"):
        paged.allocate(20)
    assert paged.free_pages() == {pool: n - {"kv": 6, "state": 1}[pool] for pool, n in before.items()}
    paged.free(tables)
    with pytest.raises(MisuseError, match="not in use"):
        paged.free(tables)
    assert paged.free_pages() == before
    paged.check_integrity()


def test_tables_of_unified_pages_draw_from_one_pool():
    config = models.demo_config("falcon-h1")
    storage = Storage(page_tokens=1, alignment_tokens=1, pages=32)
    paged = caches(hf.layout_for_model(config, 1, storage, "unified"))
    tables = paged.allocate(3)
    numbers = [n for table in tables.values() for n in table.tolist()]
    assert len(tables) > 1
    assert len(set(numbers)) == len(numbers)
    assert list(paged.free_pages().values()) == [32 - len(numbers)]


def test_pages_before_a_window_are_not_allocated():
    paged = caches(hf.layout_for_model(tiny("gemma3_text"), 1, Storage(page_tokens=4)))
    assert [n < 0 for n in paged.allocate(20)["window"].tolist()] == [True] * 3 + [False] * 2


def check_refused(paged: PagedCaches, cache: Any, tokens: int, *words: str) -> None:
    tables = paged.allocate(tokens)
    with pytest.raises(MisuseError) as caught:
        hf.write_cache(paged, tables, cache, tokens)
    for word in words:
        assert word in str(caught.value)
    for layer, component in paged.components():
        assert not paged.read(component.name, layer, tables, tokens).any(), "something was written"
    paged.free(tables)


def test_caches_that_record_their_past_are_refused(qwen):
    cache = prefill(qwen, prompt(1))
    cache.activate_past_recording()
    check_refused(caches(hf.layout_for_model(qwen.config, 1)), cache, TOKENS, "records its past", "layer 0")


def test_another_token_count_is_refused(qwen):
    paged = caches(hf.layout_for_model(qwen.config, 1))
    check_refused(paged, prefill(qwen, prompt(1)), TOKENS + 1, "layer 3", "kv.k", "37", "38")
    check_refused(paged, hf.new_cache(qwen.config), TOKENS, "layer 0", "S", "recurrent_states")


def test_shapes_of_another_cut_are_refused(qwen):
    layout = hf.layout_for_model(models.demo_config("qwen3-next"), 2)
    check_refused(caches(layout), prefill(qwen, prompt(1)), TOKENS, "layer 0, S", "(1, 16, 8, 16)", "(1, 8, 8, 16)")
    cache = prefill(qwen, prompt(1))
    cache.layers[0].conv_states[0] = cache.layers[0].conv_states[0][:, :-1]
    check_refused(caches(hf.layout_for_model(qwen.config, 1)), cache, TOKENS, "layer 0, conv.q", "383", "conv.v")
    cache = prefill(qwen, prompt(1))
    cache.layers[3].values = cache.layers[3].values[:, :1]
    check_refused(caches(hf.layout_for_model(qwen.config, 1)), cache, TOKENS, "layer 3, kv.v", "(37, 1, 16)")


def test_another_dtype_is_refused(qwen):
    layout = hf.layout_for_model(qwen.config, 1, Storage(state_dtype="bfloat16"))
    check_refused(caches(layout), prefill(qwen, prompt(1)), TOKENS, "layer 0, S", "float32", "bfloat16")


def test_other_kinds_of_cache_are_refused(qwen):
    cache = prefill(qwen, prompt(1))
    cache.layers[3] = transformers.StaticCache(config=tiny("qwen3"), max_cache_len=64).layers[0]
    check_refused(caches(hf.layout_for_model(qwen.config, 1)), cache, TOKENS, "layer 3", "StaticLayer")
    cache = prefill(qwen, torch.cat([prompt(1), prompt(2)]))
    check_refused(caches(hf.layout_for_model(qwen.config, 1)), cache, TOKENS, "layer 0, S")
    cache = prefill(models.build_model(tiny("qwen3")), prompt(1))
    layout = hf.layout_for_model(models.demo_config("nemotron-h"), 1)
    check_refused(caches(layout), cache, TOKENS, "layer 1", "nothing there")


def test_layouts_that_need_more_than_this_connector_are_refused(qwen):
    spec = hf.layout_for_model(qwen.config, 1).spec
    with pytest.raises(MisuseError, match="context-parallel"):
        caches(build_layout(spec, Parallel(cp=2), Storage()))
    paged = caches(build_layout(spec, Parallel(stages=(2, 2)), Storage()), rank=1)
    assert {layer for layer, _ in paged.components()} == {2, 3}
    with pytest.raises(MisuseError, match="does not hold S of layer 0"):
        paged.holding("S", 0)
    with pytest.raises(MisuseError, match="no page"):
        paged.read("kv.k", 3, paged.allocate(3), 99)
