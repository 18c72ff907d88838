"""Layouts: JSON and digests, what is refused, the builders' placements, and page sizes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.builders import PLACEMENTS, Parallel, Storage, build_layout
from pdxfer.errors import MisuseError
from pdxfer.layout import Box, Holding, Layout, RankLayout, RegionShape, TokenOwnership, boxes_cover
from pdxfer.models import load_config, spec_from_config
from pdxfer.sizing import unify_pages
from pdxfer.spec import Growth, Ownership, Rule, canonical_digest
from pdxfer.testing.strategies import Case, cases, preset_spec

SPEC = preset_spec("qwen3-next-80b-a3b")
SOME = settings(max_examples=60, derandomize=True, database=None)


def holding(**changes) -> Holding:
    """A small valid holding: 2 pages of 4 rows of 3 heads of 5 elements of 2 bytes."""
    values = {
        "component": "kv.k", "layers": (0,), "box": Box((0, 0), (3, 5)), "dtype": "bfloat16", "table": "kv",
        "regions": (0,), "offsets": (0,), "strides": (10, 2), "row_stride": 30, "page_rows": 4, "page_stride": 120,
        "pages": 2,
    }  # fmt: skip
    return Holding(**(values | changes))


# ---------------------------------------------------------------- JSON and digests


@given(case=cases())
@SOME
def test_json_round_trip(case: Case):
    try:
        layout = case.source.build(case.spec)
    except MisuseError:
        return
    again = Layout.from_bytes(layout.to_bytes())
    assert again == layout
    assert again.digest == layout.digest
    assert again.to_bytes() == layout.to_bytes()


def test_the_digest_does_not_change_between_versions():
    """Two agents of different versions compare these: change it only with the protocol version."""
    assert build_layout(SPEC, Parallel(tp=2), Storage()).digest == build_layout(SPEC, Parallel(tp=2), Storage()).digest
    tiny = Layout(spec=SPEC, ranks=(RankLayout(rank=0, regions=(), holdings=()),))
    assert tiny.digest == DIGEST_OF_TINY
    for placement in PLACEMENTS:
        layout = build_layout(SPEC, Parallel(tp=2), Storage(), placement)
        assert layout.to_bytes() == json.dumps(layout.to_json(), sort_keys=True, separators=(",", ":")).encode()
        assert layout.digest == canonical_digest(layout.to_json())


DIGEST_OF_TINY = "cedbdbd3aafccf4a719a575ec7d331f1"


def test_the_digest_sees_every_field():
    base = holding()
    changes = [
        {"layers": (1,)}, {"box": Box((1, 0), (4, 5))}, {"dtype": "float16"}, {"table": "x"}, {"regions": (1,)},
        {"offsets": (8,)}, {"page_rows": 3}, {"row_stride": 32, "page_stride": 200}, {"page_stride": 128}, {"pages": 1},
        {"tokens": TokenOwnership(size=2)}, {"record_format": "r"}, {"accepts": ("float32",)}, {"component": "kv.v"},
        {"box": Box((0, 0), (5, 3)), "strides": (6, 2)},
    ]  # fmt: skip
    others = [holding(**change) for change in changes]
    spec = preset_spec("llama-3.1-8b")
    spec = replace(
        spec, components=tuple(replace(c, axes=(c.axes[0], replace(c.axes[1], extent=5))) for c in spec.components)
    )
    regions = tuple(RegionShape(name=n, nbytes=1000) for n in "ab")
    digests = {
        Layout(spec=spec, ranks=(RankLayout(rank=0, regions=regions, holdings=(h,)),)).digest for h in [base, *others]
    }
    digests.add(Layout(spec=spec, ranks=(RankLayout(rank=0, host=1, regions=regions, holdings=(base,)),)).digest)
    digests.add(Layout(spec=spec, ranks=(RankLayout(rank=0, regions=regions[::-1], holdings=(base,)),)).digest)
    assert len(digests) == len(others) + 3


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(data=st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()))
@SOME
def test_garbage_is_misuse(data):
    with pytest.raises(MisuseError):
        Layout.from_bytes(data)


def paths(value, prefix=()):
    """Every place in a JSON value."""
    yield prefix
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in children:
        yield from paths(inner, (*prefix, key))


VALID = json.loads(build_layout(SPEC, Parallel(tp=2, cp=2), Storage(), "unified").to_bytes())
PATHS = list(paths(VALID))[1:]


@given(where=st.sampled_from(PATHS), junk=JSON, drop=st.booleans())
@settings(max_examples=300, derandomize=True, database=None)
def test_one_wrong_value_is_misuse_or_another_layout(where, junk, drop):
    """A peer's layout with any one value replaced or removed: MisuseError, or a layout that is valid as it stands."""
    data = json.loads(json.dumps(VALID))
    inner = data
    for key in where[:-1]:
        inner = inner[key]
    if drop:
        del inner[where[-1]]
    else:
        inner[where[-1]] = junk
    try:
        layout = Layout.from_bytes(json.dumps(data).encode())
    except MisuseError:
        return
    assert Layout.from_bytes(layout.to_bytes()).digest == layout.digest


def test_an_infinite_number_is_misuse():
    spec = b'{"model":"a","num_layers":Infinity,"query_heads":1,"components":[]}'
    with pytest.raises(MisuseError, match="OverflowError"):
        Layout.from_bytes(b'{"ranks":[],"spec":' + spec + b"}")


def test_deep_nesting_is_misuse():
    with pytest.raises(MisuseError, match="not a layout"):
        Layout.from_bytes(b"[" * 200_000)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"strides": (8, 2)}, "a stride of 8 B runs into 10 B"),
        ({"strides": (10, 1)}, "a stride of 1 B runs into 2 B"),
        ({"row_stride": 28}, "a stride of 28 B runs into 30 B"),
        ({"page_stride": 100}, "a stride of 100 B runs into 120 B"),
        ({"strides": (10, 0)}, "must be positive"),
        ({"strides": (10,)}, "1 strides for 2 axes"),
        ({"offsets": (-1,)}, "must be positive"),
        ({"pages": 0}, "must be positive"),
        ({"regions": (0, 1)}, "run parallel"),
        ({"layers": (1, 0), "regions": (0, 0), "offsets": (0, 0)}, "ascending"),
        ({"page_stride": 1 << 63, "pages": 1}, "beyond"),
        ({"offsets": (1 << 70,)}, "beyond"),
        ({"dtype": "int4"}, "dtype 'int4' is unknown"),
    ],
)
def test_impossible_holdings(changes, says):
    with pytest.raises(MisuseError, match=says):
        holding(**changes)


def test_interleaved_axes_do_not_overlap():
    """HND inside a page: rows lie closer together than heads; that is no overlap."""
    assert holding(strides=(40, 2), row_stride=10).span == 240


def test_a_region_must_hold_all_pages():
    with pytest.raises(MisuseError, match=r"2 pages end at byte 240 of region 'a' with 239 B"):
        RankLayout(rank=0, regions=(RegionShape(name="a", nbytes=239),), holdings=(holding(),))
    with pytest.raises(MisuseError, match=r"region 'a' has \d+ B; at most"):
        RegionShape(name="a", nbytes=1 << 63)
    with pytest.raises(MisuseError, match="there is no region 1"):
        RankLayout(rank=0, regions=(RegionShape(name="a", nbytes=999),), holdings=(holding(regions=(1,)),))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"component": "kv.x"}, "no component 'kv.x'"),
        ({"layers": (0,)}, r"layers \[0\] don't have this component"),
        ({"layers": (2,), "box": Box((0, 0), (3, 5))}, "is outside the component's"),
        ({"layers": (2,), "box": Box((0,), (1,)), "strides": (2,)}, "is outside the component's"),
        (
            {"layers": (2,), "box": Box((0, 0), (1, 2)), "row_stride": 0, "strides": (8, 2)},
            "need a row_stride|runs into",
        ),
    ],
)
def test_holdings_must_fit_the_spec(changes, says):
    def make():
        region = RegionShape(name="a", nbytes=999)
        return Layout(spec=SPEC, ranks=(RankLayout(rank=0, regions=(region,), holdings=(holding(**changes),)),))

    with pytest.raises(MisuseError, match=says):
        make()


def test_ranks_are_numbered():
    rank = RankLayout(rank=1, regions=(), holdings=())
    for ranks in ((), (rank,)):
        with pytest.raises(MisuseError, match="numbered"):
            Layout(spec=SPEC, ranks=ranks)


@pytest.mark.parametrize("bounds", [((0,), (0,)), ((2,), (1,)), ((-1,), (1,)), ((0, 0), (1,))])
def test_impossible_boxes(bounds):
    with pytest.raises(MisuseError, match="not a box"):
        Box(*bounds)


# ---------------------------------------------------------------- boxes

INTERVAL = st.tuples(st.integers(0, 4), st.integers(1, 3)).map(lambda t: (t[0], t[0] + t[1]))
BOXES = st.lists(INTERVAL, min_size=2, max_size=2).map(lambda i: Box((i[0][0], i[1][0]), (i[0][1], i[1][1])))


def points(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*map(range, box.starts, box.stops)))


@given(a=BOXES, b=BOXES)
@SOME
def test_box_algebra_is_that_of_point_sets(a, b):
    assert a.overlaps(b) == bool(points(a) & points(b))
    assert a.contains(b) == (points(b) <= points(a))
    assert a.volume == len(points(a))


@given(whole=BOXES, parts=st.lists(BOXES, max_size=4))
@SOME
def test_exact_cover(whole, parts):
    counted = sum(len(points(p)) for p in parts)
    assert boxes_cover(whole, parts) == (set().union(*map(points, parts)) == points(whole) and counted == whole.volume)


# ---------------------------------------------------------------- ownership and builders


@pytest.mark.parametrize(
    ("units", "size", "starts"),
    [(2, 4, [0, 0, 1, 1]), (4, 2, [0, 2]), (1, 3, [0, 0, 0]), (8, 8, list(range(8))), (3, 6, [0, 0, 1, 1, 2, 2])],
)
def test_extended_ownership_is_shared_by_neighbours(units, size, starts):
    own = Ownership(rule=Rule.EXTENDED, axis="heads", units=units)
    assert [own.interval(units, r, size)[0] for r in range(size)] == starts


def test_a_cut_that_is_impossible_names_the_component():
    with pytest.raises(MisuseError, match=r"S: 32 units of axis 'heads' can't be sharded over 3 ranks") as caught:
        build_layout(SPEC, Parallel(tp=3), Storage())
    assert caught.value.hint


def test_stages_must_add_up():
    with pytest.raises(MisuseError, match=r"stages \(1, 1\) hold 2 layers, the model has 5"):
        build_layout(SPEC, Parallel(stages=(1, 1)), Storage())
    with pytest.raises(MisuseError, match="placement 'flat' is unknown"):
        build_layout(SPEC, Parallel(), Storage(), "flat")
    with pytest.raises(MisuseError, match="kv_order must be one of"):
        Storage(kv_order="DHN")


@given(case=cases())
@SOME
def test_holdings_share_no_byte(case: Case):
    """Inside one pool of pages, every (page, holding, layer, element) of a rank has bytes of its own."""
    try:
        layout = case.target.build(case.spec)
    except MisuseError:
        return
    rank = layout.ranks[-1]
    pools = rank.pools()
    taken = [np.zeros(r.nbytes, dtype=np.uint8) for r in rank.regions]
    for h in rank.holdings:
        # Tables of one pool take turns on the same bytes, so each gets a page of its own.
        page = sorted(t for t in pools if pools[t] == pools[h.table]).index(h.table) % h.pages
        if page >= h.pages:
            continue
        for region, offset in zip(h.regions, h.offsets, strict=True):
            one = np.ndarray(
                (h.page_rows, *h.box.shape, h.itemsize), np.uint8, taken[region].data, offset + page * h.page_stride,
                (h.row_stride, *h.strides, 1),
            )  # fmt: skip
            one += 1
    assert all(t.max(initial=0) <= 1 for t in taken)


def test_token_ownership():
    own = [TokenOwnership(interleave=2, size=2, index=i) for i in (0, 1)]
    layout = build_layout(SPEC, Parallel(tp=1, cp=2, interleave=2), Storage())
    kept = [{h.tokens for h in rank.holdings if h.component == "kv.k"} for rank in layout.ranks]
    assert kept == [{own[0]}, {own[1]}]
    assert {h.tokens for rank in layout.ranks for h in rank.holdings if h.component == "S"} == {TokenOwnership()}
    with pytest.raises(MisuseError, match="index 2 of 2"):
        TokenOwnership(size=2, index=2)


# ---------------------------------------------------------------- page sizes


@pytest.mark.parametrize(("tp", "tokens"), [(1, 1056), (2, 1056), (8, 272)])
def test_unified_pages_of_qwen3_next(tp, tokens):
    """vLLM's page sizes with an fp32 state: half the heads and half the state leave the page as long (TP 2)."""
    spec = spec_from_config(load_config("qwen3-next-80b-a3b"))
    layout = build_layout(spec, Parallel(tp=tp), Storage(kv_packed=True, pages=8), "unified")
    held = {h.component: h for h in layout.ranks[0].holdings}
    assert held["kv.k"].page_rows == tokens
    state = (
        sum(c.row_elems * (4 if c.name == "S" else 2) for c in spec.components if c.growth is Growth.PER_REQUEST) // tp
    )
    per_token = 2 * max(1, 2 // tp) * 256 * 2
    pages = unify_pages(per_token, state)
    assert pages.page_tokens == tokens
    assert pages.page_bytes == tokens * per_token
    assert (pages.attention_padding_bytes, pages.state_padding_bytes) == (0, tokens * per_token - state)


def test_pages_without_state_are_one_step():
    assert unify_pages(1024, 0).page_tokens == 16


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pools(placement):
    layout = build_layout(SPEC, Parallel(), Storage(), placement)
    pools = layout.ranks[0].pools()
    assert len(set(pools.values())) == (1 if placement == "unified" else 2)
    assert set(pools) == set(layout.ranks[0].tables())


def test_tables_that_only_share_an_allocation_have_pools_of_their_own():
    layout = build_layout(SPEC, Parallel(), Storage(pages=4, slots=2), "per_layer")
    rank = layout.ranks[0]
    starts = [sum(r.nbytes for r in rank.regions[:i]) for i in range(len(rank.regions))]
    holdings = tuple(
        replace(
            h,
            regions=(0,) * len(h.layers),
            offsets=tuple(starts[r] + o for r, o in zip(h.regions, h.offsets, strict=True)),
        )
        for h in rank.holdings
    )
    one = replace(
        rank, regions=(RegionShape(name="all", nbytes=sum(r.nbytes for r in rank.regions)),), holdings=holdings
    )
    assert one.pools() == rank.pools()
    closer = tuple(replace(h, offsets=tuple(0 for _ in h.offsets)) for h in holdings)
    assert len(set(replace(one, holdings=closer).pools().values())) == 1


def nested(offset: int = 0, stride: int = 1024) -> RankLayout:
    """State pages of 4 KiB and attention kernel pages of 1 KiB in the same bytes, two layers each."""
    common = {"layers": (0, 1), "regions": (0, 0), "dtype": "uint8"}
    state = Holding(
        component="S", box=Box((0,), (3000,)), table="state", strides=(1,), offsets=(0, 8 * 4096),
        page_stride=4096, pages=8, **common,
    )  # fmt: skip
    keys = Holding(
        component="kv.k", box=Box((0,), (512,)), table="kv", strides=(1,), offsets=(offset, 8 * 4096 + offset),
        page_stride=stride, pages=32, **common,
    )  # fmt: skip
    return RankLayout(rank=0, regions=(RegionShape(name="r", nbytes=1 << 20),), holdings=(state, keys))


def test_small_pages_inside_large_ones_share_their_unit() -> None:
    rank = nested()
    assert len(set(rank.pools().values())) == 1
    assert rank.pages_per_unit() == {"state": 1, "kv": 4}
    assert nested(offset=512).pages_per_unit() == {"state": 1, "kv": 4}
    assert rank.entangled() == []


def test_the_memory_of_a_pool_may_begin_anywhere() -> None:
    rank = nested(offset=512)
    moved = tuple(replace(h, offsets=tuple(o + 2000 for o in h.offsets)) for h in rank.holdings)
    assert replace(rank, holdings=moved).pages_per_unit() == {"state": 1, "kv": 4}


def _a_page_apart() -> RankLayout:
    rank = nested(stride=4096)
    apart = [replace(h, pages=7, offsets=tuple(o + 3600 * (h.table == "kv") for o in h.offsets)) for h in rank.holdings]
    return replace(rank, holdings=tuple(apart))


def _one_table_of_two_strides() -> RankLayout:
    rank = nested()
    more = replace(rank.holdings[1], component="kv.v", page_stride=512, offsets=(512, 8 * 4096 + 512))
    return replace(rank, holdings=(*rank.holdings, more))


@pytest.mark.parametrize(
    "rank",
    [
        nested(offset=1024),
        nested(offset=513),
        nested(stride=1000),
        _a_page_apart(),
        _one_table_of_two_strides(),
    ],
    ids=["shifted", "reaches out", "not nested", "a page apart", "two strides"],
)
def test_pages_that_are_not_nested_make_one_unit_of_the_pool(rank: RankLayout) -> None:
    assert min(rank.pages_per_unit().values()) >= 32
    assert rank.entangled() == ["state", "kv"]


def test_one_stride_or_one_table_is_one_page_per_unit() -> None:
    for placement in PLACEMENTS:
        layout = build_layout(SPEC, Parallel(), Storage(), placement)
        assert set(layout.ranks[0].pages_per_unit().values()) == {1}
