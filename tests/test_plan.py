"""Plans: exact, proved, the same on both sides, and refused by name when they can't be."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.builders import PLACEMENTS, Parallel, Storage, build_layout
from pdxfer.errors import IncompatibleError, InternalError
from pdxfer.footprint import Footprints
from pdxfer.layout import Box, Holding, Layout, RankLayout, RegionShape, TokenOwnership
from pdxfer.models import load_config, spec_from_config
from pdxfer.packing import EdgeProgram
from pdxfer.pages import RequestShape
from pdxfer.plan import CopyItem, Edge, Plan, make_plan, prove
from pdxfer.spec import Axis, Ownership, Rule
from pdxfer.testing.strategies import preset_spec

HYBRID = preset_spec("kimi-linear-48b-a3b")
GQA = preset_spec("qwen3-next-80b-a3b")
REPLICATED = Ownership(rule=Rule.REPLICATED)


def layout(spec, storage: Storage | None = None, placement: str = "per_layer", **parallel) -> Layout:
    return build_layout(spec, Parallel(**parallel), storage or Storage(), placement)


def altered(given: Layout, change: Callable[[int, Holding], Holding | None]) -> Layout:
    """A layout whose holdings are what ``change(rank, holding)`` says; None drops one."""
    ranks = []
    for rank in given.ranks:
        held = tuple(h for h in (change(rank.rank, h) for h in rank.holdings) if h)
        ranks.append(RankLayout(rank=rank.rank, host=rank.host, regions=rank.regions, holdings=held))
    return Layout(spec=given.spec, ranks=tuple(ranks))


def programs(plan: Plan, tokens: int, chunk_bytes: int = 8 << 20) -> dict[Edge, EdgeProgram]:
    return {e: EdgeProgram(plan, e, RequestShape(kv_tokens=tokens), chunk_bytes=chunk_bytes) for e in plan.edges}


# ---------------------------------------------------------------- the proof


PLAN = make_plan(layout(HYBRID, tp=4), layout(HYBRID, tp=2, cp=2, ranks_per_host=2))


def index_of(wanted: Callable[[CopyItem], bool]) -> int:
    return next(i for i, item in enumerate(PLAN.items) if wanted(item))


def is_relay(item: CopyItem) -> bool:
    return item.relay


def is_striped(item: CopyItem) -> bool:
    return item.stripes > 1 and not item.relay


def is_state(item: CopyItem) -> bool:
    return item.component == "S"


def moved(box: Box) -> Box:
    return Box((box.starts[0] + 1, *box.starts[1:]), (box.stops[0] + 1, *box.stops[1:]))


def smaller(box: Box) -> Box:
    return Box(box.starts, (*box.stops[:-1], box.stops[-1] - 1))


MUTATIONS: dict[str, tuple[Callable[[CopyItem], bool], Callable[[CopyItem], list[CopyItem]]]] = {
    "dropped": (is_state, lambda i: []),
    "dropped stripe": (is_striped, lambda i: []),
    "dropped relay": (is_relay, lambda i: []),
    "twice": (is_state, lambda i: [i, i]),
    "stripe twice": (is_striped, lambda i: [i, i]),
    "box shifted": (is_state, lambda i: [replace(i, box=moved(i.box))]),
    "box smaller": (is_state, lambda i: [replace(i, box=smaller(i.box))]),
    "box of all heads": (is_state, lambda i: [replace(i, box=Box((0, 0, 0), HYBRID["S"].shape))]),
    "stripe of another": (is_striped, lambda i: [replace(i, stripe=(i.stripe + 1) % i.stripes)]),
    "stripes counted otherwise": (is_striped, lambda i: [replace(i, stripes=i.stripes + 1)]),
    "layer dropped": (lambda i: len(i.layers) > 1, lambda i: [replace(i, layers=i.layers[1:])]),
    "layer not held": (is_state, lambda i: [replace(i, layers=(*i.layers, 2))]),
    "other source rank": (is_state, lambda i: [replace(i, source=(i.source + 1) % 4)]),
    "other target rank": (is_state, lambda i: [replace(i, target=(i.target + 1) % 2)]),
    "other source holding": (is_state, lambda i: [replace(i, source_holding=i.source_holding + 1)]),
    "other target holding": (is_state, lambda i: [replace(i, target_holding=i.target_holding + 1)]),
    "named otherwise": (is_state, lambda i: [replace(i, component="conv.q")]),
    "other rows at the source": (is_striped, lambda i: [replace(i, source_tokens=TokenOwnership(size=2, index=1))]),
    "other rows at the target": (
        is_striped,
        lambda i: [replace(i, target_tokens=TokenOwnership(size=2, index=1 - i.target_tokens.index))],
    ),
    "conversion not needed": (is_state, lambda i: [replace(i, converts=True)]),
    "relay of what never came": (
        is_striped,
        lambda i: [replace(i, relay=True, source=1 - i.target % 2 + i.target // 2 * 2)],
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_proof_catches_a_wrong_plan(name):
    prove(PLAN)
    wanted, mutate = MUTATIONS[name]
    at = index_of(wanted)
    items = (*PLAN.items[:at], *mutate(PLAN.items[at]), *PLAN.items[at + 1 :])
    with pytest.raises(InternalError) as caught:
        prove(replace(PLAN, items=items))
    assert PLAN.items[at].component in caught.value.message or name == "named otherwise"


# ---------------------------------------------------------------- digests


def test_both_sides_make_the_same_plan():
    source, target = layout(GQA, tp=4), layout(GQA, Storage(page_tokens=4, kv_order="HND"), tp=6 - 4)
    mine = make_plan(source, target)
    theirs = make_plan(Layout.from_bytes(source.to_bytes()), Layout.from_bytes(target.to_bytes()))
    assert theirs is mine, "an equal pair is cached"
    fresh = replace(mine, items=tuple(copy.deepcopy(mine.items)))
    assert fresh.digest == mine.digest


def test_the_digest_sees_every_field_of_an_item():
    item = next(i for i in PLAN.items if is_striped(i))
    other = {
        "component": "rope", "layers": item.layers[1:], "box": smaller(item.box), "source": item.source + 1,
        "target": item.target + 1, "source_holding": 99, "target_holding": 99, "source_tokens": TokenOwnership(size=9),
        "target_tokens": TokenOwnership(interleave=9), "stripe": item.stripe + 1, "stripes": item.stripes + 1,
        "relay": not item.relay, "converts": not item.converts,
    }  # fmt: skip
    assert set(other) == {f.name for f in fields(CopyItem)}
    digests = {replace(PLAN, items=(replace(item, **{name: value}),)).digest for name, value in other.items()}
    digests.add(replace(PLAN, items=(item,)).digest)
    assert len(digests) == len(other) + 1


def test_fan_out_is_part_of_the_plan():
    source, target = layout(HYBRID, tp=2), layout(HYBRID, tp=2)
    plans = [make_plan(source, target, fan_out=on) for on in (True, False)]
    assert plans[0].digest != plans[1].digest
    assert [any(i.relay for i in p.items) for p in plans] == [True, False]


# ---------------------------------------------------------------- replicas


@pytest.mark.parametrize("tokens", [32_768, 1003])
def test_kimi_linear_sends_mla_once_and_evenly(tokens):
    """The real model, TP 8 to TP 8 on one host: every latent row crosses once, an eighth from each source."""
    spec = spec_from_config(load_config("kimi-linear-48b-a3b"))
    plan = make_plan(layout(spec, tp=8), layout(spec, Storage(page_tokens=64), tp=8))
    sent, rows = dict.fromkeys(range(8), 0), dict.fromkeys(range(8), 0)
    relayed = 0
    for edge, program in programs(plan, tokens).items():
        by_component = program.bytes_by_component()
        nbytes = by_component.get("latent", 0) + by_component.get("rope", 0)
        relayed += nbytes if edge.relay else 0
        if not edge.relay:
            sent[edge.source] += nbytes
            rows[edge.source] += sum(
                len(r) for i, r in zip(program.items, program.rows, strict=True) if i.component == "latent"
            )
    unique = tokens * 7 * (512 + 64) * 2
    assert sum(sent.values()) == unique
    assert sum(rows.values()) == tokens
    assert max(rows.values()) - min(rows.values()) <= 1
    assert relayed == 7 * unique
    assert all(plan.readers(source) for source in range(8))


def test_two_target_hosts_get_two_copies():
    spec = spec_from_config(load_config("kimi-linear-48b-a3b"))
    plan = make_plan(layout(spec, tp=8), layout(spec, tp=8, ranks_per_host=4))
    sent = [0, 0]
    for edge, program in programs(plan, 1000).items():
        if not edge.relay:
            sent[edge.target // 4] += program.bytes_by_component().get("latent", 0)
        assert not edge.relay or edge.source // 4 == edge.target // 4, "relays stay on their host"
    assert sent == [1000 * 7 * 512 * 2] * 2


@pytest.mark.parametrize("spec", [HYBRID, GQA], ids=["mla", "gqa"])
@pytest.mark.parametrize("sizes", [(8, 2), (2, 8), (6, 4), (16, 1), (1, 16)])
def test_every_source_rank_has_a_reader(spec, sizes):
    sources = dict.fromkeys((c.name for c in spec.components), REPLICATED) if 6 in sizes else {}
    plan = make_plan(layout(spec, tp=sizes[0], ownership=sources), layout(spec, tp=sizes[1]))
    for source in range(len(plan.source)):
        readers = plan.readers(source)
        assert readers
        assert all(source in plan.sources(target) for target in readers)


def test_replicated_state_is_spread_by_layers():
    """transformers keeps S whole on every rank: each layer comes from one of them, by turns."""
    spec = preset_spec("qwen3.5-27b")
    own = {c.name: REPLICATED for c in spec.components if c.name == "S" or c.name.startswith("conv.")}
    plan = make_plan(layout(spec, tp=2, ownership=own), layout(spec, tp=1))
    givers = {i.source for i in plan.items if i.component == "S"}
    assert givers == {0, 1}
    assert sorted(x for i in plan.items if i.component == "S" for x in i.layers) == list(spec["S"].layers)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("kimi-linear-48b-a3b", (8, 8)),
        ("qwen3-next-80b-a3b", (4, 2)),
        ("nemotron-3-ultra-550b-a55b", (1, 8)),
        ("nemotron-3-ultra-550b-a55b", (8, 1)),
        ("kimi-k3", (12, 8)),
        ("falcon-h1-7b", (4, 6)),
    ],
)
def test_few_messages(name, sizes):
    """At most one message per 4 MiB and pair of ranks, plus one, with the default 8 MiB chunks."""
    spec = spec_from_config(load_config(name))
    plan = make_plan(*(layout(spec, Storage(page_tokens=64, pages=600), tp=tp) for tp in sizes))
    total = 0
    for program in programs(plan, 20_000).values():
        assert len(program.chunks) <= program.payload_bytes // (4 << 20) + 1
        total += len(program.chunks)
    assert total > 0


# ---------------------------------------------------------------- pipeline stages and context parallel


@pytest.mark.parametrize("stages", [((), (1, 4)), ((2, 3), (4, 1)), ((1, 1, 3), ()), ((1, 1, 1, 1, 1), (2, 3))])
def test_stages_exchange_only_layers_they_share(stages):
    assert HYBRID.num_layers == 5
    plan = make_plan(layout(HYBRID, tp=2, stages=stages[0]), layout(HYBRID, tp=2, stages=stages[1]))
    for item in plan.items:
        giving = plan.target if item.relay else plan.source
        assert set(item.layers) <= set(giving.ranks[item.source].holdings[item.source_holding].layers)
        assert set(item.layers) <= set(plan.target.ranks[item.target].holdings[item.target_holding].layers)
    state = [i for i in plan.items if i.component == "S" and not i.relay]
    assert sorted({x for i in state for x in i.layers}) == list(HYBRID["S"].layers)


@pytest.mark.parametrize(
    ("source", "target"), [((1, 1), (2, 4)), ((2, 1), (3, 2)), ((4, 16), (1, 1)), ((2, 4), (2, 4))]
)
def test_context_parallel_moves_each_row_once(source, target):
    plan = make_plan(
        layout(HYBRID, cp=source[0], interleave=source[1]), layout(HYBRID, cp=target[0], interleave=target[1])
    )
    seen: dict[int, list[int]] = {}
    for edge, program in programs(plan, 77).items():
        for item, rows in zip(program.items, program.rows, strict=True):
            if item.component == "latent":
                seen.setdefault(edge.target, []).extend(int(r) for r in rows)
    for rank, rows in seen.items():
        own = plan.target.ranks[rank].holdings[-1].tokens
        assert sorted(rows) == [t for t in range(77) if t // own.interleave % own.size == own.index]


# ---------------------------------------------------------------- refusals


def refusal(source: Layout, target: Layout) -> IncompatibleError:
    with pytest.raises(IncompatibleError) as caught:
        make_plan(source, target)
    assert caught.value.component
    assert caught.value.field
    return caught.value


def test_another_model_is_refused_by_component_and_field():
    spec = HYBRID
    wider = replace(
        spec,
        components=tuple(
            replace(c, axes=(replace(c.axes[0], extent=9),)) if c.name == "rope" else c for c in spec.components
        ),
    )
    error = refusal(layout(spec), layout(wider))
    assert (error.component, error.field, error.target) == ("rope", "axes", [["dim", 9]])
    error = refusal(layout(spec), layout(replace(spec, components=spec.components[:-1])))
    assert (error.component, error.field, error.target) == ("rope", "presence", "absent")
    error = refusal(layout(replace(spec, components=spec.components[1:])), layout(spec))
    assert (error.component, error.field, error.source) == ("S", "presence", "absent")


def test_a_source_that_lacks_layers_is_refused():
    def without_layer(rank: int, h: Holding) -> Holding | None:
        if h.component != "S":
            return h
        return replace(h, layers=h.layers[1:], regions=h.regions[1:], offsets=h.offsets[1:])

    error = refusal(altered(layout(HYBRID, tp=2), without_layer), layout(HYBRID, tp=1))
    assert (error.component, error.field, error.source) == ("S", "layers 0", "not held")


def test_a_source_that_lacks_heads_is_refused():
    error = refusal(
        altered(layout(HYBRID, tp=4), lambda r, h: None if r == 1 and h.component == "S" else h), layout(HYBRID)
    )
    assert (error.component, error.source, error.target) == ("S", "not held", "wanted")
    assert error.field == "box heads [8, 16), K [0, 3), V [0, 3)".replace("[0, 3)", f"[0, {HYBRID['S'].shape[1]})")


def test_a_target_that_lacks_heads_is_refused():
    error = refusal(
        layout(HYBRID), altered(layout(HYBRID, tp=4), lambda r, h: None if r == 3 and h.component == "conv.v" else h)
    )
    assert (error.component, error.source, error.target) == ("conv.v", "held", "not held")
    assert "channels" in error.field


def test_a_target_that_lacks_a_component_is_refused():
    error = refusal(layout(HYBRID), altered(layout(HYBRID), lambda r, h: None if h.component == "latent" else h))
    assert (error.component, error.target) == ("latent", "not held")


@pytest.mark.parametrize("side", [0, 1])
def test_a_missing_token_owner_is_refused(side):
    """Two context-parallel ranks that both hold the even rows leave the odd ones to nobody."""

    def even(rank: int, h: Holding) -> Holding:
        return replace(h, tokens=replace(h.tokens, index=0)) if h.tokens.size == 2 else h

    pair = [layout(HYBRID), layout(HYBRID)]
    pair[side] = altered(layout(HYBRID, cp=2), even)
    error = refusal(*pair)
    assert error.component == "latent"
    assert error.field.startswith("token owners")


def test_another_dtype_is_refused():
    error = refusal(layout(GQA, Storage(kv_dtype="float8_e4m3fn")), layout(GQA))
    assert (error.component, error.field, error.source, error.target) == ("kv.k", "dtype", "float8_e4m3fn", "bfloat16")
    assert "only S is converted" in error.message


def test_opaque_records_move_only_unchanged():
    def opaque(name: str) -> Callable[[int, Holding], Holding]:
        return lambda rank, h: replace(h, record_format=name) if h.component == "latent" else h

    same = [altered(layout(HYBRID), opaque("fp8_ds_mla")) for _ in range(2)]
    assert make_plan(*same).items
    error = refusal(same[0], altered(layout(HYBRID), opaque("nvfp4_ds_mla")))
    assert (error.component, error.field, error.target) == ("latent", "record_format", "nvfp4_ds_mla")
    error = refusal(same[0], altered(layout(HYBRID, Storage(page_tokens=64)), opaque("fp8_ds_mla")))
    assert (error.component, error.field, error.source, error.target) == ("latent", "page_rows", 16, 64)


def test_what_is_rounded_for_one_rank_is_not_handed_on_to_another():
    """Two ranks of one host want the same S, one of them exactly: it gets its own from the source."""
    agreed = {"accepts": ("float32", "bfloat16")}
    whole = {"ownership": {"S": REPLICATED}}
    exact, rounded = (layout(GQA, Storage(state_dtype=d, **agreed), tp=2, **whole) for d in ("float32", "bfloat16"))
    target = Layout(spec=GQA, ranks=(rounded.ranks[0], exact.ranks[1]))
    items = [i for i in make_plan(layout(GQA, Storage(**agreed)), target).items if i.component == "S"]
    assert {(i.target, i.relay, i.converts) for i in items} == {(0, False, True), (1, False, False)}


# ---------------------------------------------------------------- memory that is written twice


def _over(component: str, other: str) -> Layout:
    """``component`` stored where ``other`` is."""
    given = layout(GQA)
    place = next(h for h in given.ranks[0].holdings if h.component == other)
    where = {"regions": place.regions, "offsets": place.offsets}
    return altered(given, lambda _, h: replace(h, **where) if h.component == component else h)


def _all_layers_at_one_place() -> Layout:
    return altered(layout(GQA), lambda _, h: replace(h, regions=(h.regions[0],) * len(h.regions)))


def _pages_of_two_sizes() -> Layout:
    """KV and state in one region, but page n of the one is not page n of the other."""
    return altered(
        layout(GQA, placement="unified"),
        lambda _, h: replace(h, page_stride=h.page_stride // 2, pages=h.pages) if h.table.startswith("kv") else h,
    )


@pytest.mark.parametrize(
    "target",
    [_over("kv.v", "kv.k"), _all_layers_at_one_place(), _pages_of_two_sizes()],
    ids=["K and V", "layers", "pages"],
)
def test_a_target_that_would_write_over_itself_is_refused(target):
    """Each tensor alone is sound, and each is verified before the next is written over it."""
    with pytest.raises(IncompatibleError, match="shared with"):
        make_plan(layout(GQA), target)
    make_plan(target, layout(GQA))  # a source is only read: layers may share a cache


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_usual_placements_write_over_nothing(placement, packed):
    for spec in (HYBRID, GQA):
        storage = Storage(kv_packed=packed, latent_packed=packed, taps_before=1, kv_order="HND", conv_order="TC")
        make_plan(layout(spec), layout(spec, storage, placement, tp=2))


@given(
    grids=st.tuples(*[st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=3).map(tuple)] * 2),
    distance=st.integers(-30, 30),
    pages=st.tuples(st.integers(1, 12), st.integers(-3, 3), st.integers(0, 3)),
)
@settings(max_examples=200, derandomize=True, database=None)
def test_shared_bytes_are_those_of_point_sets(grids, distance, pages):
    stride, least, more = pages
    one, two = (
        {
            sum(n * s for n, (s, _) in zip(at, grid, strict=True))
            for at in itertools.product(*[range(e) for _, e in grid])
        }
        for grid in grids
    )
    moved = {a + n * stride for a in one for n in range(least, least + more + 1)}
    shared = bool(moved & {b + distance for b in two})
    assert Footprints().share(*grids, distance, stride, least, least + more) == shared


def test_a_hostile_number_of_cuts_is_refused():
    """Planning must not take a day because a peer says that it holds a thousand odd boxes."""
    given = layout(GQA)
    state = next(h for h in given.ranks[0].holdings if h.component == "S")
    axes = tuple(Axis(name=name, extent=500) for name in "abc")
    spec = replace(GQA, components=(replace(GQA["S"], axes=axes, ownership=REPLICATED),))
    boxes = [Box((n,) * 3, (500,) * 3) for n in range(400)]
    odd = [
        replace(state, box=box, layers=state.layers[:1], regions=(n,), offsets=(0,), strides=(1 << 22, 1 << 12, 4),
                page_stride=1 << 33, pages=1, table=f"t{n}")
        for n, box in enumerate(boxes)
    ]  # fmt: skip
    regions = tuple(RegionShape(name=f"r{n}", nbytes=1 << 40) for n in range(400))
    hostile = Layout(spec=spec, ranks=(RankLayout(rank=0, regions=regions, holdings=tuple(odd)),))
    with pytest.raises(IncompatibleError, match="too finely cut"):
        make_plan(hostile, hostile)
