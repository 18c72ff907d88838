"""Remaps that engines got wrong, each done right, and each done wrong to show that the oracle would see it.

A wrong remap is a wrong belief about a layout: the plan is made from what the engine *believes* of a worker,
applied to that worker's real memory, and the result compared with the truth. Sources: models.md 4.3 and 9.6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import IncompatibleError
from pdxfer.layout import Box, Holding, Layout, RankLayout
from pdxfer.models import load_config, spec_from_config
from pdxfer.packing import EdgeProgram
from pdxfer.pages import RequestShape
from pdxfer.plan import CopyItem, Plan, make_plan
from pdxfer.spec import Axis, CacheSpec, Component, Growth, Ownership, Rule
from pdxfer.testing.oracle import Difference, Memory, Oracle, random_memory
from pdxfer.testing.strategies import preset_spec
from tests.moving import move

TOKENS = 23


def outcome(source: Layout, target: Layout, plan: Plan, *, tokens: int = TOKENS) -> Difference | None:
    """Move by ``plan`` between real memories of ``source`` and ``target``; what the oracle says of the result."""
    rng = np.random.default_rng(11)
    have, want = random_memory(source, tokens, rng), random_memory(target, tokens, rng)
    oracle = Oracle.of(source, tokens=tokens)
    oracle.put(have)
    before = want.copy()
    move(plan, have, want, RequestShape(kv_tokens=tokens), read_back_too=False)
    return oracle.difference(want, before)


def check_trap(
    source: Layout, target: Layout, *, believed_source: Layout | None = None, believed_target: Layout | None = None,
    components: tuple[str, ...],
) -> Difference:  # fmt: skip
    """Right with the true layouts; with the believed ones, one of ``components`` is reported."""
    assert outcome(source, target, make_plan(source, target)) is None
    wrong = outcome(source, target, make_plan(believed_source or source, believed_target or target))
    assert wrong is not None, "the corrupted variant went unseen"
    assert wrong.component in components, str(wrong)
    return wrong


def altered(layout: Layout, change: Callable[[int, Holding], Holding | None], spec: CacheSpec | None = None) -> Layout:
    """A layout whose holdings are what ``change(rank, holding)`` says; None drops one."""
    ranks = []
    for rank in layout.ranks:
        held = [change(rank.rank, h) for h in rank.holdings]
        ranks.append(
            RankLayout(rank=rank.rank, host=rank.host, regions=rank.regions, holdings=tuple(h for h in held if h))
        )
    return Layout(spec=spec or layout.spec, ranks=tuple(ranks))


def as_believed(true: Layout, believed: Layout) -> Layout:
    """The strides of ``believed`` over the regions, pages and offsets-by-component of ``true``."""
    ranks = []
    for real, thought in zip(true.ranks, believed.ranks, strict=True):
        paged = {h.component: h for h in real.holdings}
        held = tuple(replace(h, page_stride=paged[h.component].page_stride) for h in thought.holdings)
        ranks.append(RankLayout(rank=real.rank, host=real.host, regions=real.regions, holdings=held))
    return Layout(spec=true.spec, ranks=tuple(ranks))


def build(spec: CacheSpec, tp: int, placement: str = "per_layer", **storage) -> Layout:
    return build_layout(spec, Parallel(tp=tp), Storage(pages=24, page_tokens=4, **storage), placement)


# ---------------------------------------------------------------- convolution


def one_slice(layout: Layout) -> Layout:
    """The belief that a rank's conv tensor is one slice of the global one, cut evenly."""
    parts = [c for c in layout.spec.components if c.name.startswith("conv.")]
    total, taps = sum(c.axis("channels").extent for c in parts), parts[0].axis("taps").extent
    own = Ownership(rule=Rule.SHARDED, axis="channels", units=total)
    merged = Component(
        name="conv", layers=parts[0].layers, axes=(Axis(name="channels", extent=total), Axis(name="taps", extent=taps)),
        dtype=parts[0].dtype, growth=Growth.PER_REQUEST, ownership=own,
    )  # fmt: skip
    others = tuple(c for c in layout.spec.components if c not in parts)
    n = len(layout.ranks)

    def change(rank: int, h: Holding) -> Holding | None:
        if h.component == parts[0].name:
            return replace(h, component="conv", box=Box((rank * total // n, 0), ((rank + 1) * total // n, taps)))
        return None if h.component.startswith("conv.") else h

    return altered(layout, change, replace(layout.spec, components=(*others, merged)))


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "nemotron-3-nano-30b-a3b"])
@pytest.mark.parametrize("tps", [(1, 2), (2, 1), (2, 4), (4, 1)])
def test_conv_is_not_one_slice(name, tps):
    source, target = (build(preset_spec(name), tp) for tp in tps)
    parts = tuple(c.name for c in preset_spec(name).components if c.name.startswith("conv."))
    check_trap(source, target, believed_source=one_slice(source), believed_target=one_slice(target), components=parts)


@pytest.mark.parametrize("tps", [(1, 2), (2, 1)])
def test_conv_with_all_kernel_taps_on_one_side(tps):
    """transformers stores K taps, engines K - 1: the K - 1 newest are meant."""
    spec = preset_spec("qwen3-next-80b-a3b")
    source, target = build(spec, tps[0], taps_before=1), build(spec, tps[1])
    oldest = build(spec, tps[0], taps_after=1)  # the belief that the K - 1 first columns are meant
    check_trap(source, target, believed_source=oldest, components=("conv.q", "conv.k", "conv.v"))
    check_trap(target, source, believed_target=oldest, components=("conv.q", "conv.k", "conv.v"))


@pytest.mark.parametrize("fused", [True, False])
def test_conv_orientation(fused):
    spec = preset_spec("kimi-linear-48b-a3b")
    source, target = (
        build(spec, 2, conv_order="CT", conv_fused=fused),
        build(spec, 1, conv_order="TC", conv_fused=fused),
    )
    believed = build(spec, 1, conv_order="CT", conv_fused=fused)
    check_trap(source, target, believed_target=believed, components=("conv.q", "conv.k", "conv.v"))


@pytest.mark.parametrize("rows", [(3, 0), (0, 2), (3, 1)])
def test_rows_for_speculative_tokens(rows):
    """Columns behind the taps belong to speculative tokens; they widen the stride and stay where they are."""
    spec = preset_spec("qwen3-next-80b-a3b")
    source, target = (build(spec, tp, taps_after=n) for tp, n in zip((2, 1), rows, strict=True))
    ignored = [as_believed(layout, build(spec, len(layout), taps_after=0)) for layout in (source, target)]
    check_trap(
        source,
        target,
        believed_source=ignored[0],
        believed_target=ignored[1],
        components=("conv.q", "conv.k", "conv.v"),
    )


# ---------------------------------------------------------------- recurrent state


@pytest.mark.parametrize("placement", ["per_layer", "per_request", "unified"])
def test_state_transposed_where_k_equals_v(placement):
    spec = preset_spec("kimi-linear-48b-a3b")
    assert spec["S"].shape[1] == spec["S"].shape[2]
    source, target = build(spec, 2, placement, state_order="KV"), build(spec, 4, placement, state_order="VK")
    check_trap(source, target, believed_target=build(spec, 4, placement, state_order="KV"), components=("S",))


def test_state_dtype_is_refused_unless_both_agree():
    spec = preset_spec("qwen3-next-80b-a3b")
    makes = {
        (dtype, agrees): build(spec, tp, state_dtype=dtype, accepts=("float32", "bfloat16") if agrees else ())
        for dtype, tp in (("float32", 2), ("bfloat16", 1))
        for agrees in (True, False)
    }
    for agreed in ((False, False), (True, False), (False, True)):
        with pytest.raises(IncompatibleError, match="S: dtype is 'float32' at the source and 'bfloat16' at the target"):
            make_plan(makes["float32", agreed[0]], makes["bfloat16", agreed[1]])
    source, target = makes["float32", True], makes["bfloat16", True]
    for one, other in ((source, target), (target, source)):
        assert outcome(one, other, make_plan(one, other)) is None


def test_truncation_is_not_rounding():
    """Half of the fp32 states round up: keeping the upper 16 bits is seen, and so is one unit in the last place."""
    spec = preset_spec("qwen3-next-80b-a3b")
    layouts = [build(spec, 1, state_dtype=d, accepts=("float32", "bfloat16")) for d in ("float32", "bfloat16")]
    memories = [random_memory(layout, TOKENS, np.random.default_rng(1)) for layout in layouts]
    exact = Oracle.of(layouts[0], tokens=TOKENS)
    exact.put(memories[0])
    before = memories[1].copy()
    move(make_plan(*layouts), *memories, RequestShape(kv_tokens=TOKENS))
    assert exact.difference(memories[1], before) is None
    bits = exact.tensor("S", 0)
    cut, rounded = (bits >> 16).astype(np.uint16), exact.tensor("S", 0, "bfloat16")
    assert 0.3 < np.mean(cut != rounded) < 0.7
    slot = int(memories[1].tables[0]["state"][0])
    holding = next(h for h in layouts[1].ranks[0].holdings if h.component == "S")
    region, offset = holding.at(0)
    start = offset + slot * holding.page_stride
    memories[1].buffers[0][region][start : start + cut.nbytes] = np.frombuffer(cut.tobytes(), np.uint8)
    assert exact.difference(memories[1], before).component == "S"


# ---------------------------------------------------------------- Mamba2 groups


def mamba2(groups: int, rule: Rule = Rule.EXTENDED) -> CacheSpec:
    """Falcon-H1's kind: state and attention in one layer, few groups."""

    def component(
        name: str, axes: dict[str, int], units: int, rule: Rule, growth: Growth = Growth.PER_REQUEST
    ) -> Component:
        named = tuple(Axis(name=n, extent=e) for n, e in axes.items())
        own = Ownership(rule=rule, axis=named[0].name, units=units)
        return Component(name=name, layers=(0, 1, 2), axes=named, dtype="bfloat16", growth=growth, ownership=own)

    return CacheSpec(
        model="mamba2", num_layers=3, query_heads=24,
        components=(
            component("S", {"heads": 24, "head_dim": 3, "state": 8}, 24, Rule.SHARDED),
            component("conv.x", {"channels": 72, "taps": 3}, 24, Rule.SHARDED),
            component("conv.B", {"channels": groups * 12, "taps": 3}, groups, rule),
            component("conv.C", {"channels": groups * 12, "taps": 3}, groups, rule),
            component("kv.k", {"heads": 2, "dim": 4}, 2, Rule.EXTENDED, Growth.PER_TOKEN),
            component("kv.v", {"heads": 2, "dim": 4}, 2, Rule.EXTENDED, Growth.PER_TOKEN),
        ),
    )  # fmt: skip


def scaled_by_tp(layout: Layout) -> Layout:
    """The belief that rank r of n holds the r-th n-th of B and C, though every rank holds them whole (vllm#55208)."""
    n = len(layout.ranks)

    def change(rank: int, h: Holding) -> Holding:
        if h.component not in ("conv.B", "conv.C"):
            return h
        channels, taps = layout.spec[h.component].shape
        return replace(h, box=Box((rank * channels // n, 0), ((rank + 1) * channels // n, taps)))

    return altered(layout, change)


@pytest.mark.parametrize("tps", [(1, 2), (2, 1), (4, 2), (2, 6), (6, 4), (1, 12), (12, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_groups_fewer_than_ranks(groups, tps):
    source, target = (build(mamba2(groups), tp) for tp in tps)
    more = [layout for layout in (source, target) if len(layout) > groups]
    for layout in more:
        side = "believed_source" if layout is source else "believed_target"
        check_trap(source, target, **{side: scaled_by_tp(layout)}, components=("conv.B", "conv.C"))
    if not more:
        assert outcome(source, target, make_plan(source, target)) is None


@pytest.mark.parametrize("tps", [(1, 4), (4, 1), (4, 2), (8, 6)])
@pytest.mark.parametrize("sides", ["source", "target", "both"])
def test_groups_whole_on_every_rank_by_override(tps, sides):
    """One engine shares two groups among neighbours, another keeps all of them everywhere."""
    spec = mamba2(2)
    whole = {name: Ownership(rule=Rule.REPLICATED) for name in ("conv.B", "conv.C")}
    source, target = (
        build_layout(
            spec,
            Parallel(tp=tp, ownership=whole if side in (sides, "both") or sides == "both" else {}),
            Storage(pages=24),
        )
        for tp, side in zip(tps, ("source", "target"), strict=True)
    )
    assert outcome(source, target, make_plan(source, target)) is None


def test_granite_group_offsets_are_those_of_the_bug_report():
    """Granite-4.0-H-Tiny, TP 1 to 2: x 18,432 B, B and C 768 B each; the released remap read C beyond the end."""
    layout = build_layout(spec_from_config(load_config("granite-4.0-h-tiny")), Parallel(), Storage())
    conv = {h.component: h for h in layout.ranks[0].holdings if h.component.startswith("conv.")}
    assert [conv[f"conv.{part}"].offsets[0] for part in "xBC"] == [0, 18_432, 19_200]
    assert conv["conv.C"].page_stride == 19_968
    half = build_layout(layout.spec, Parallel(tp=2), Storage())
    items = [i for i in make_plan(layout, half).items if i.component in ("conv.B", "conv.C")]
    assert {i.box for i in items} == {Box((0, 0), (128, 3))}


# ---------------------------------------------------------------- heads


def by_modulo(layout: Layout) -> Layout:
    """The belief that rank r holds KV head r % kv (sglang#30997)."""
    heads = layout.spec["kv.k"].shape[0]

    def change(rank: int, h: Holding) -> Holding:
        if not h.component.startswith("kv."):
            return h
        return replace(h, box=Box((rank % heads, 0), (rank % heads + 1, h.box.stops[1])))

    return altered(layout, change)


@pytest.mark.parametrize("tps", [(1, 4), (4, 1), (4, 8), (8, 4), (2, 8), (8, 16)])
def test_kv_heads_fewer_than_ranks(tps):
    spec = preset_spec("qwen3-next-80b-a3b")  # two KV heads
    source, target = (build(spec, tp, kv_order=order) for tp, order in zip(tps, ("NHD", "HND"), strict=True))
    assert [r.holdings[-1].box.starts[0] for r in build(spec, 4).ranks] == [0, 0, 1, 1]
    for layout, side in ((source, "believed_source"), (target, "believed_target")):
        if len(layout) > 2:
            check_trap(source, target, **{side: by_modulo(layout)}, components=("kv.k", "kv.v"))


@pytest.mark.parametrize("tps", [(4, 6), (6, 4), (3, 2), (2, 3)])
def test_tp_sizes_that_do_not_divide(tps):
    """Corrupted: each target rank reads state from one source rank only, as if the sizes divided."""
    ownership = whole_kv() if 3 in tps else {}
    source, target = (build_layout(mamba2(1), Parallel(tp=tp, ownership=ownership), Storage(pages=24)) for tp in tps)
    plan = make_plan(source, target)
    assert outcome(source, target, plan) is None
    s, t = tps
    alone = [i for i in plan.items if i.component != "S" or i.relay or i.source == i.target * s // t]
    assert len(alone) < len(plan.items)
    wrong = outcome(source, target, replace(plan, items=tuple(alone)))
    assert wrong is not None
    assert wrong.component == "S"


def whole_kv() -> dict[str, Ownership]:
    """Two KV heads can't be cut three ways, nor shared by three: every rank keeps both."""
    return {name: Ownership(rule=Rule.REPLICATED) for name in ("kv.k", "kv.v")}


# ---------------------------------------------------------------- pages


def test_page_size_depends_on_tp():
    """Qwen3-Next's own sizes: unified pages are 1,056 tokens at TP 1 and 272 at TP 8 (fp32 state)."""
    full = spec_from_config(load_config("qwen3-next-80b-a3b"))
    spec = replace(
        full, num_layers=4,
        components=tuple(replace(c, layers=tuple(x for x in c.layers if x < 4)) for c in full.components),
    )  # fmt: skip
    storage = Storage(kv_packed=True, pages=10, state_order="VK")
    source, target = (build_layout(spec, Parallel(tp=tp), storage, "unified") for tp in (1, 8))
    pages = [
        next(h.page_rows for h in layout.ranks[0].holdings if h.component == "kv.k") for layout in (source, target)
    ]
    assert pages == [1056, 272]

    def as_if_equal(rank: int, h: Holding) -> Holding:
        return replace(h, page_rows=272) if h.component.startswith("kv.") else h

    tokens = 1500
    assert outcome(source, target, make_plan(source, target), tokens=tokens) is None
    assert outcome(target, source, make_plan(target, source), tokens=tokens) is None
    # The belief that both count pages alike needs more source pages than there are: the table is refused ...
    believed = altered(source, as_if_equal)
    rng = np.random.default_rng(0)
    have, want = random_memory(source, tokens, rng, spare=4), random_memory(target, tokens, rng)
    oracle = Oracle.of(source, tokens=tokens)
    oracle.put(have)
    before = want.copy()
    # ... and where the engine allocated ahead, so that it is long enough, the oracle sees it.
    move(make_plan(believed, target), have, want, RequestShape(kv_tokens=tokens), read_back_too=False)
    wrong = oracle.difference(want, before)
    assert (wrong.component, wrong.row) == ("kv.k", 272)


# ---------------------------------------------------------------- replicas


def bytes_from(plan: Plan, names: tuple[str, ...], tokens: int) -> dict[int, int]:
    """Bytes of some components that each source rank sends over the network."""
    sent = dict.fromkeys(range(len(plan.source)), 0)
    for edge in plan.edges:
        if not edge.relay:
            program = EdgeProgram(plan, edge, RequestShape(kv_tokens=tokens), chunk_bytes=8 << 20)
            sent[edge.source] += sum(n for name, n in program.bytes_by_component().items() if name in names)
    return sent


def test_hybrid_mla_is_sent_once_and_every_state_too():
    """Corrupted: with MLA only rank 0 is read, which is right for a pure MLA model and loses the other ranks' state."""
    spec = preset_spec("kimi-linear-48b-a3b")
    source, target = build(spec, 4), build(spec, 4)
    plan = make_plan(source, target)
    assert outcome(source, target, plan) is None
    unique = sum(TOKENS * len(spec[n].layers) * spec[n].row_elems * 2 for n in ("latent", "rope"))
    assert sum(bytes_from(plan, ("latent", "rope"), TOKENS).values()) == unique
    state = bytes_from(plan, ("S", "conv.q", "conv.k", "conv.v"), TOKENS)
    assert len(set(state.values())) == 1
    assert state[0] > 0

    def rank_0_only(item: CopyItem) -> CopyItem | None:
        if item.component in ("latent", "rope"):
            return replace(item, source=0) if not item.relay else item
        return item if item.source == 0 else None

    kept = tuple(item for item in map(rank_0_only, plan.items) if item is not None)
    wrong = outcome(source, target, replace(plan, items=kept))
    assert wrong is not None
    assert (wrong.rank, wrong.component) == (1, "S")


def test_memory_and_difference_are_plain_values():
    """The helpers above stand on these; a copy shares tables and no byte."""
    memory = random_memory(build(mamba2(1), 1), TOKENS, np.random.default_rng(0))
    other = memory.copy()
    assert isinstance(other, Memory)
    other.buffers[0][0][:] ^= 0xFF
    assert not np.array_equal(other.buffers[0][0], memory.buffers[0][0])
