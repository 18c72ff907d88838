"""The reader of vLLM's tensors: its layouts move a request as vLLM's kernels see it, and misfits are refused by name.

The law's engines are ``vllm_memory``'s.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from pdxfer.connectors.vllm_tensors import CacheGroup, CacheView, GroupTable, RankTensors, read_layout
from pdxfer.errors import IncompatibleError, MisuseError
from pdxfer.layout import Layout
from pdxfer.models import spec_from_config
from pdxfer.pages import RequestShape
from pdxfer.plan import make_plan
from pdxfer.spec import CacheSpec
from pdxfer.testing.oracle import Memory, Oracle
from pdxfer.testing.strategies import preset_spec
from tests.moving import move
from tests.vllm_memory import Engine, Form

QWEN = {
    "model_type": "qwen3_next", "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "full_attention_interval": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
    "vocab_size": 128,
}  # fmt: skip
#: K and V of other widths, so that sizes tell a transposed S too.
UNEQUAL = spec_from_config({**QWEN, "head_dim": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6})


def read(engine: Engine, **changes: Any) -> RankTensors:
    facts: dict[str, Any] = {"num_blocks": engine.num_blocks, "rank": engine.rank, "tp_rank": engine.rank}
    facts |= {"tp_size": engine.size, "conv_order": engine.form.conv_order}
    return read_layout(engine.spec, engine.groups, engine.views, **(facts | changes))


@dataclass
class Worker:
    """All ranks of an engine and one request's blocks, the same in every rank."""

    engines: list[Engine]
    tensors: list[RankTensors]
    blocks: list[list[int]]
    memory: Memory


def worker(spec: CacheSpec, form: Form, size: int, tokens: int, seed: int, **options: Any) -> Worker:
    engines = [Engine(spec, form, rank, size, num_blocks=1) for rank in range(size)]
    first = engines[0]
    each = [1 if g.kind == "state" else -(-tokens // first.block_tokens) for g in first.groups]
    engines = [Engine(spec, form, rank, size, num_blocks=sum(each) + 3) for rank in range(size)]
    rng = np.random.default_rng(seed)
    free = [int(b) for b in rng.permutation(sum(each) + 2) + 1]  # block 0 is vLLM's null block
    blocks = []
    for group, count in zip(first.groups, each, strict=True):
        nulls = -(-tokens // first.block_tokens) - 1 if group.kind == "state" and form.mode == "align" else 0
        blocks.append([0] * nulls + [free.pop() for _ in range(count)])
    for storage in (s for engine in engines for s in engine.storages.values()):
        storage[:] = rng.integers(0, 256, len(storage), dtype=np.uint8)
    tensors = [read(engine, **options) for engine in engines]
    tables = tuple(
        {table.name: np.array(table.pages(blocks[table.group], tokens)) for table in found.tables} for found in tensors
    )
    buffers = tuple(tuple(e.storages[s] for s in t.storages) for e, t in zip(engines, tensors, strict=True))
    layout = Layout(spec=spec, ranks=tuple(found.rank for found in tensors))
    return Worker(engines, tensors, blocks, Memory(layout=layout, buffers=buffers, tables=tables))


def check_law(spec: CacheSpec, source: tuple[Form, int], target: tuple[Form, int], tokens: int, **options: Any) -> None:
    """A request that ``source`` computed is in ``target`` as if that had computed it; other bytes are as before."""
    have, want = worker(spec, *source, tokens, 1, **options), worker(spec, *target, tokens, 2, **options)
    dtypes = {c.name: "bfloat16" for c in spec.components} | {"S": source[0].state_dtype}
    oracle = Oracle(spec, tokens=tokens, dtypes=dtypes)
    for engine in have.engines:
        engine.fill(have.blocks, oracle)
    for component in spec.components:  # an error of both sides' layouts would cancel out in a move
        for layer in component.layers:
            found = oracle.read(have.memory, component.name, layer)
            assert np.array_equal(found, oracle.tensor(component.name, layer)), f"{component.name}, layer {layer}"
    wanted = [{k: v.copy() for k, v in e.storages.items()} for e in want.engines]
    move(make_plan(have.memory.layout, want.memory.layout), have.memory, want.memory, RequestShape(kv_tokens=tokens))
    moved = [{k: v.copy() for k, v in e.storages.items()} for e in want.engines]
    for engine, before in zip(want.engines, wanted, strict=True):
        for name, storage in engine.storages.items():
            storage[:] = before[name]
        engine.fill(want.blocks, oracle)
        for name, storage in engine.storages.items():
            assert np.array_equal(moved[engine.rank][name], storage), f"rank {engine.rank}, storage {name}"


# ---------------------------------------------------------------- the law

PAIRS = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 1)]


@pytest.mark.parametrize(("source_tp", "target_tp"), PAIRS)
def test_gdn_between_orders(source_tp, target_tp):
    """Qwen3-Next with K and V of other widths, two KV heads on up to four ranks, other blocks, rows and orders."""
    gpu = Form(order="LBNHC", speculative=2)
    check_law(UNEQUAL, (gpu, source_tp), (Form(conv_order="DS", mode="none"), target_tp), 150)


@pytest.mark.parametrize(("source_tp", "target_tp"), PAIRS)
def test_gdn_from_gpu_to_cpu(source_tp, target_tp):
    cpu = Form(interior="cpu", state_order="KV")
    check_law(UNEQUAL, (cpu, source_tp), (Form(), target_tp), 100)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("target_tp", [1, 4])
def test_every_order_of_an_attention_model(order, target_tp):
    spec = preset_spec("llama-3.1-8b")
    check_law(spec, (Form(order=order), 2), (Form(order="LBNHC", kernel_pages=2), target_tp), 37)
    check_law(spec, (Form(), target_tp), (Form(order=order), 2), 37)


FAMILIES = [
    "kimi-linear-48b-a3b", "nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny", "falcon-h1-7b", "jamba-v0.1",
    "ring-mini-linear-2.0", "lfm2-1.2b", "deepseek-v3", "qwen3-next-80b-a3b", "llama-3.1-8b",
]  # fmt: skip


@pytest.mark.parametrize("preset", FAMILIES)
@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 4), (4, 2)])
@pytest.mark.parametrize("release", ["0.32", "0.25", "0.20"])
def test_families_and_releases(preset, source_tp, target_tp, release):
    """KDA, Mamba2 with eight groups and with one, Mamba1, lightning, short convolutions and MLA."""
    older = {
        "0.32": Form(kernel_pages=2),
        "0.25": Form(release="0.25", order="HND"),
        "0.20": Form(release="0.20", order="NHD"),
    }
    check_law(preset_spec(preset), (older[release], source_tp), (Form(order="LBNHC"), target_tp), 45)


@pytest.mark.parametrize(("source_tp", "target_tp"), [(1, 2), (2, 1)])
def test_kda_with_a_state_per_part(source_tp, target_tp):
    """Kimi-Linear in 0.20: conv of q, k and v are states of their own."""
    apart = Form(release="0.20", order="NHD", conv_apart=True)
    check_law(preset_spec("kimi-linear-48b-a3b"), (apart, source_tp), (Form(conv_order="DS"), target_tp), 45)


def test_state_held_whole_by_every_rank():
    check_law(UNEQUAL, (Form(replicated=True), 2), (Form(), 4), 45)
    check_law(UNEQUAL, (Form(), 4), (Form(replicated=True), 2), 45)


# ---------------------------------------------------------------- what real tensors gave


RECORDED = (
    CacheView(
        shape=(5461, 2, 384, 128), strides=(98304, 49152, 128, 1), dtype="bfloat16", storage=7, storage_bytes=1 << 30,
        offset=0,
    ),
    CacheView(
        shape=(5461, 1, 1, 137216), strides=(196608, 137216, 137216, 1), dtype="int8", storage=7,
        storage_bytes=1 << 30, offset=0,
    ),
)  # fmt: skip
FULL = CacheGroup(
    index=0, layers=("model.layers.3.self_attn.attn",), kind="attention", block_tokens=384, kv_heads=2, head_size=64,
    dtype="bfloat16", interior="cpu",
)  # fmt: skip
LINEAR = CacheGroup(
    index=1, layers=("model.layers.0.linear_attn",), kind="state", block_tokens=384,
    state_shapes=((3, 1024), (8, 64, 64)), state_dtypes=("bfloat16", "float32"), state_order="KV", mode="align",
)  # fmt: skip


def recorded(full: CacheGroup = FULL, linear: CacheGroup = LINEAR, **changes: Any) -> RankTensors:
    """The tiny Qwen3-Next on vLLM 0.32 for CPUs: four groups of one layer, all from byte 0 of one storage."""
    states = [replace(linear, index=i + 1, layers=(linear.layers[0].replace(".0.", f".{i}."),)) for i in range(3)]
    groups = [full, *states]
    whole = changes.pop("attention", RECORDED[0])
    views = {full.layers[0]: [whole] if isinstance(whole, CacheView) else whole}
    views |= {group.layers[0]: changes.pop("state", None) or [RECORDED[1]] for group in states}
    facts: dict[str, Any] = {"num_blocks": 5461, "rank": 0, "tp_rank": 0, "tp_size": 1, "conv_order": "SD"}
    spec = changes.pop("spec", spec_from_config(QWEN))
    return read_layout(spec, changes.pop("groups", groups), changes.pop("views", views), **(facts | changes))


def test_recorded_shapes():
    found = recorded()
    held = {h.component: h for h in found.rank.holdings if 0 in h.layers or 3 in h.layers}
    assert (held["kv.k"].strides, held["kv.k"].row_stride, held["kv.k"].page_rows) == ((98304, 768), 2, 384)
    assert (held["kv.v"].offsets, held["kv.v"].strides, held["kv.v"].row_stride) == ((49152,), (98304, 2), 128)
    assert {h.page_stride for h in held.values()} == {196608}
    assert [held[f"conv.{part}"].offsets for part in "qkv"] == [(0,), (512,), (1024,)]
    assert (held["conv.v"].strides, held["conv.v"].box.shape) == ((2, 2048), (512, 3))
    assert (held["S"].offsets, held["S"].strides, held["S"].dtype) == ((6144,), (16384, 256, 4), "float32")
    assert len(set(found.rank.pools().values())) == 1  # blocks of all groups are the same bytes
    assert found.rank.entangled() == []
    assert [(t.name, t.group, t.kind, t.pages_per_block) for t in found.tables] == [
        ("group0", 0, "attention", 1), *((f"group{i}", i, "state", 1) for i in (1, 2, 3))
    ]  # fmt: skip
    assert found.storages == (7,)


def test_gpu_order_of_the_same_shapes():
    found = recorded(replace(FULL, interior="row"), replace(LINEAR, state_order="VK"))
    held = {h.component: h for h in found.rank.holdings}
    assert (held["kv.k"].strides, held["kv.k"].row_stride) == ((98304, 2), 256)
    assert held["kv.v"].offsets == (128,)
    assert held["S"].strides == (16384, 4, 256)


def test_layers_of_one_geometry_share_a_holding():
    engine = Engine(preset_spec("llama-3.1-8b"), Form(), 0, 1, num_blocks=4)
    assert [(h.component, h.layers) for h in read(engine).rank.holdings] == [("kv.k", (0, 1, 2)), ("kv.v", (0, 1, 2))]


def test_accepted_dtypes_are_of_the_state_only():
    found = recorded(accepts=("bfloat16",)).rank.holdings
    assert {h.accepts for h in found if h.component == "S"} == {("bfloat16",)}
    assert {h.accepts for h in found if h.component != "S"} == {()}


def test_state_in_another_dtype():
    check_law(UNEQUAL, (Form(state_dtype="bfloat16"), 2), (Form(state_dtype="bfloat16", speculative=1), 1), 45)
    target = (Form(state_dtype="bfloat16"), 1)
    with pytest.raises(IncompatibleError, match="S: dtype"):
        check_law(UNEQUAL, (Form(), 2), target, 45)
    check_law(UNEQUAL, (Form(), 2), target, 45, accepts=("bfloat16", "float32"))


def test_a_drafters_layers_are_left_out():
    spec = preset_spec("llama-3.1-8b")
    engine = Engine(spec, Form(), 0, 1, num_blocks=4)
    view = engine.views[engine.groups[0].layers[0]]
    for name, flag in (("mtp.layers.0.self_attn.attn", False), ("model.layers.3.self_attn.attn", True)):
        with_draft = replace(engine.groups[0], layers=(*engine.groups[0].layers, name), draft=flag)
        facts: dict[str, Any] = {"num_blocks": 4, "rank": 0, "tp_rank": 0, "tp_size": 1, "conv_order": "SD"}
        found = read_layout(spec, [with_draft], engine.views | {name: view}, **facts)
        assert found == read(engine)
        alone = replace(with_draft, index=1, layers=(name,))
        assert read_layout(spec, [engine.groups[0], alone], engine.views | {name: view}, **facts) == read(engine)
    with pytest.raises(MisuseError, match=r"model.layers.3.self_attn.attn: layer 3 is none of the model's 3"):
        read_layout(spec, [replace(with_draft, draft=False)], engine.views | {name: view}, **facts)


def test_a_pipeline_stage_holds_some_layers():
    spec = preset_spec("llama-3.1-8b")
    engine = Engine(spec, Form(), 0, 1, num_blocks=4)
    names = engine.groups[0].layers[1:]
    engine.groups = [replace(engine.groups[0], layers=names)]
    engine.views = {name: engine.views[name] for name in names}
    assert [h.layers for h in read(engine, layers_held=(1, 2)).rank.holdings] == [(1, 2), (1, 2)]
    with pytest.raises(IncompatibleError, match=r"kv.k: layers is \[1, 2\] .* \[0, 1, 2\]"):
        read(engine)
    with pytest.raises(IncompatibleError, match=r"kv.k: layers is \[1, 2\] .* \[2\]"):
        read(engine, layers_held=(2,))


# ---------------------------------------------------------------- refusals

ATTENTION, STATE = RECORDED
NAME, STATE_NAME = "model.layers.3.self_attn.attn", "model.layers.0.linear_attn"
GROWN = {**QWEN, "linear_conv_kernel_dim": 5}


def attention(**changes: Any) -> CacheView:
    return replace(ATTENTION, **changes)


def linear(*shapes: tuple[int, ...], dtypes: tuple[str, ...] = ("bfloat16", "float32"), **changes: Any) -> CacheGroup:
    return replace(LINEAR, state_shapes=((3, 1024), *shapes), state_dtypes=dtypes, **changes)


#: More pages than blocks.
MANY = replace(STATE, shape=(10922, 1, 1, 137216), storage_bytes=1 << 32)


REFUSALS = {
    "kind": ({"full": replace(FULL, kind="SlidingWindowSpec")}, NAME, "SlidingWindowSpec"),
    "no tensor": ({"views": {}}, STATE_NAME, "in a group but not registered"),
    "no group": ({"groups": [FULL]}, STATE_NAME, "registered but in no group"),
    "no number": ({"full": replace(FULL, layers=("attn",))}, "attn", "one number, this has 0"),
    "two numbers": ({"full": replace(FULL, layers=("a.1.b.2",))}, "a.1.b.2", "one number, this has 2"),
    "heads of vLLM": ({"full": replace(FULL, kv_heads=4)}, NAME, "heads is 2 .* 4"),
    "heads of the spec": ({"tp_size": 2}, NAME, r"kv.k: shape is \(2, 64\) .* \(1, 64\)"),
    "width": ({"full": replace(FULL, head_size=32)}, NAME, "width of K and V is 128 .* 64"),
    "head size": ({"full": replace(FULL, head_size=96, head_size_v=32)}, NAME, r"\(2, 96\) .* \(2, 64\)"),
    "dtype of vLLM": ({"full": replace(FULL, dtype="float16")}, NAME, "dtype is 'bfloat16' .* 'float16'"),
    "unknown dtype": ({"attention": attention(dtype="int4")}, NAME, "a cache of int4 is not supported"),
    "record": ({"attention": attention(dtype="uint8")}, NAME, "a cache of uint8 is a record"),
    "more tensors": ({"attention": [ATTENTION, ATTENTION]}, NAME, "2 tensors for one attention cache"),
    "rank of the shape": ({"attention": attention(shape=(5461, 2), strides=(98304, 1))}, NAME, "of no known form"),
    "interior": ({"full": replace(FULL, interior="amx")}, NAME, "'amx'"),
    "gaps on a CPU": ({"attention": attention(strides=(98304, 128, 256, 1))}, NAME, "kv.k: strides"),
    "pages and blocks": ({"num_blocks": 5000}, NAME, "5461, 5461 pages can't make up 5000 blocks"),
    "tokens of a block": ({"full": replace(FULL, block_tokens=400)}, NAME, "tokens of a block is 384 .* 400"),
    "overlap": ({"attention": attention(strides=(4096, 49152, 128, 1))}, NAME, "runs into"),
    "storage": ({"attention": attention(offset=1 << 20)}, NAME, r"pages end at byte \d+ of 1073741824 B"),
    "state's page": ({"linear": linear((8, 64, 60))}, STATE_NAME, "bytes of a state page is 137216 .* 129024"),
    "order of conv": ({"conv_order": "DS"}, STATE_NAME, "channels of all parts is 3 .* 1024"),
    "taps": ({"spec": spec_from_config(GROWN)}, STATE_NAME, "conv.q: rows is 3 .* 4"),
    "heads of S": ({"linear": linear((4, 128, 64))}, STATE_NAME, r"S: shape is \(4, 64, 128\) .* \(8, 64, 64\)"),
    "axes of S": ({"linear": linear((8, 4096))}, STATE_NAME, "has other axes"),
    "order of S": ({"linear": linear((8, 64, 64), state_order="HKV")}, STATE_NAME, "'HKV'"),
    "rings": ({"linear": linear((8, 64, 64), (0, 8), dtypes=("bfloat16", "float32", "int8"))}, STATE_NAME, "be placed"),
    "records": (
        {"linear": linear((8, 64, 64), (0, 8), (0, 1), dtypes=("bfloat16", "float32", "int8", "int8"))},
        *(STATE_NAME, "be placed"),
    ),
    "states": ({"state": [STATE, STATE]}, STATE_NAME, "states is"),
    "tp": ({"tp_size": 3}, NAME, "2 units of axis 'heads' can't be extended over 3 ranks"),
    "state in pages": ({"state": [MANY]}, STATE_NAME, "pages of a block is 2 .* 1"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused_by_name(what):
    changes, layer, pattern = REFUSALS[what]
    with pytest.raises((MisuseError, IncompatibleError), match=pattern) as caught:
        recorded(**changes)
    assert layer in str(caught.value)


def test_a_layer_that_the_spec_has_otherwise():
    moved = replace(FULL, layers=("model.layers.2.self_attn.attn",))
    with pytest.raises(IncompatibleError, match=r"kv.k: presence is 'held' .* 'absent' .*layers.2.self_attn"):
        recorded(moved)


def test_two_layers_of_one_number():
    engine = Engine(preset_spec("llama-3.1-8b"), Form(), 0, 1, num_blocks=4)
    twin = "draft.layers.0.attn"
    engine.views[twin] = engine.views[engine.groups[0].layers[0]]
    engine.groups = [replace(engine.groups[0], layers=(*engine.groups[0].layers, twin))]
    with pytest.raises(MisuseError, match=r"draft.layers.0.attn, kv.k: .*layers.0.self_attn.attn is layer 0 already"):
        read(engine)


def test_pages_of_a_group_must_agree():
    engine = Engine(preset_spec("llama-3.1-8b"), Form(), 0, 1, num_blocks=4)
    name = engine.groups[0].layers[1]
    whole = engine.views[name][0]
    half = replace(whole, shape=(8, 8, 4, 4), strides=(whole.strides[0] // 2, 16, *whole.strides[2:]))
    engine.views[name] = [half]
    with pytest.raises(MisuseError, match=f"{name}: pages of one group differ"):
        read(engine)


def test_keys_and_pages_of_a_cache_of_two_blocks():
    engine = Engine(preset_spec("llama-3.1-8b"), Form(release="0.25", order="NHD"), 0, 1, num_blocks=2)
    with pytest.raises(MisuseError, match="K and V can't be told from pages"):
        read(engine)


def test_widths_before_release_029():
    engine = Engine(preset_spec("llama-3.1-8b"), Form(release="0.20", order="NHD"), 0, 1, num_blocks=4)
    engine.groups = [replace(engine.groups[0], head_size=4, head_size_v=4)]
    with pytest.raises(IncompatibleError, match=r"kv.k: width is 2 .* 4 .*layers.0.self_attn.attn"):
        read(engine)


def test_states_of_unequal_page_counts():
    engine = Engine(UNEQUAL, Form(release="0.25", order="NHD"), 0, 1, num_blocks=4)
    name = engine.groups[0].layers[0]
    conv, state = engine.views[name]
    engine.views[name] = [conv, replace(state, shape=(3, *state.shape[1:]))]
    with pytest.raises(MisuseError, match=f"{name}: 4, 4, 4, 3 pages can't make up 4 blocks"):
        read(engine)


def test_gaps_in_a_state_stored_otherwise():
    engine = Engine(UNEQUAL, Form(release="0.25", order="NHD", state_order="KV"), 0, 1, num_blocks=4)
    group = engine.groups[0]
    assert read(engine).tables[0].kind == group.kind == "state"
    conv, state = engine.views[group.layers[0]]
    engine.views[group.layers[0]] = [conv, replace(state, strides=(state.strides[0], 48, 8, 1))]
    with pytest.raises(IncompatibleError, match=rf"S: strides .*{group.layers[0]}"):
        read(engine)


@pytest.mark.parametrize(
    ("shape", "says", "pattern"),
    [
        ((4, 2, 8, 5), 5, "no known form"),
        ((4, 1, 8, 6), 5, "latent: width is 6 .* 5"),
        ((4, 1, 8, 6), 6, "latent: width of all parts is 6 .* 5"),
    ],
)
def test_latent_forms(shape, says, pattern):
    engine = Engine(preset_spec("deepseek-v3"), Form(), 0, 1, num_blocks=4)
    name = engine.groups[0].layers[0]
    engine.groups = [replace(engine.groups[0], head_size=says)]
    engine.views[name] = [replace(engine.views[name][0], shape=shape)]
    with pytest.raises((MisuseError, IncompatibleError), match=pattern) as caught:
        read(engine)
    assert name in str(caught.value)


def test_an_indexers_keys_are_a_layer_of_their_own():
    """DeepSeek-V3.2: index keys alone in a row are taken; vLLM's usual record of keys and scales is refused."""
    spec = preset_spec("deepseek-v3.2")
    engine = Engine(spec, Form(), 0, 1, num_blocks=4)
    latent = engine.groups[0]
    names = tuple(f"model.layers.{layer}.self_attn.indexer.k_cache" for layer in range(3))
    keys = replace(latent, index=1, layers=names, head_size=3)
    row = CacheView(
        shape=(4, latent.block_tokens, 3), strides=(latent.block_tokens * 3, 3, 1), dtype="bfloat16", storage=1,
        storage_bytes=4096, offset=0,
    )  # fmt: skip
    facts: dict[str, Any] = {"num_blocks": 4, "rank": 0, "tp_rank": 0, "tp_size": 1, "conv_order": "SD"}
    views = engine.views | {name: [replace(row, storage=i)] for i, name in enumerate(names)}
    found = read_layout(spec, [latent, keys], views, **facts)
    assert [h.layers for h in found.rank.holdings if h.component == "index_k"] == [(0, 1, 2)]
    with pytest.raises(MisuseError, match=r"indexer.k_cache: a cache of uint8 is a record of its own"):
        read_layout(spec, [latent, keys], views | {names[1]: [replace(row, dtype="uint8")]}, **facts)
    with pytest.raises(IncompatibleError, match="index_k: layers"):
        read(engine)


# ---------------------------------------------------------------- page tables


def table(kind: str = "attention", **changes: Any) -> GroupTable:
    facts: dict[str, Any] = {"page_rows": 4, "pages_per_block": 2, "block_tokens": 8}
    return GroupTable(name="group5", group=5, kind=kind, **(facts | changes))


def test_blocks_become_kernel_pages():
    assert table().pages([7, 3, 9], 17) == [14, 15, 6, 7, 18, 19]
    assert table().pages([7, 3, 9], 16) == [14, 15, 6, 7]
    assert table().pages([7, 3, 9], 17, first_token=7) == [-1, 15, 6, 7, 18, 19]
    assert table().pages([0, 3, 9], 17, first_token=8) == [-1, -1, 6, 7, 18, 19]  # shared blocks may be gone
    assert table().pages([0, 0], 16, first_token=16) == [-1, -1, -1, -1]


@pytest.mark.parametrize(("blocks", "pattern"), [([7], "only 1 blocks"), ([7, 0], "null block")])
def test_needed_blocks_that_are_not_there(blocks, pattern):
    with pytest.raises(MisuseError, match=f"group 5 .*block 1, for tokens from 8 of 9, .*{pattern}"):
        table().pages(blocks, 9)


@pytest.mark.parametrize(
    ("mode", "blocks", "tokens", "slot"),
    [
        ("none", [4], 1000, 4),
        ("none", [4, 5, 6], 1000, 4),  # slots of speculation behind it
        ("align", [0, 0, 1], 1000, 1),
        ("align", [0, 1, 6], 768, 1),
        ("align", [0, 0, 6], 1003, 6),
        ("all", [2, 3, 1], 384, 2),
    ],
)
def test_the_running_slot(mode, blocks, tokens, slot):
    state = table("state", page_rows=1, pages_per_block=1, block_tokens=384, mode=mode)
    assert state.pages(blocks, tokens) == [slot]
    assert state.pages(blocks, tokens, first_token=384) == [slot]


@pytest.mark.parametrize(("mode", "blocks"), [("none", []), ("none", [0]), ("align", [0, 0, 0]), ("align", [1, 1])])
def test_a_running_slot_that_is_not_there(mode, blocks):
    state = table("state", page_rows=1, pages_per_block=1, block_tokens=384, mode=mode)
    with pytest.raises(MisuseError, match=r"group 5 \(state\): block \d"):
        state.pages(blocks, 1000)
