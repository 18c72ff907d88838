"""The law: pack, move, unpack equals slicing the global tensor, bit for bit, for every pair the planner accepts."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from pdxfer import packing
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import CorruptError, IncompatibleError, MisuseError
from pdxfer.models import load_config, preset_names, spec_from_config
from pdxfer.packing import EdgeProgram, direct, pack, unpack
from pdxfer.pages import RequestShape, Side
from pdxfer.plan import make_plan
from pdxfer.testing.oracle import Oracle, random_memory
from pdxfer.testing.strategies import Case, cases, preset_spec, shrink_spec, usable_presets
from tests.conftest import require
from tests.moving import move

torch = require("torch")

KERNELS = (
    ("native", "native", "native", "numpy", "numpy", "numpy", "torch")
    if packing.native_available()
    else ("numpy", "torch")
)
#: Every random pair is drawn from fixed seeds; nothing is stored between runs.
RANDOM = settings(
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
PAIRS_PER_BATCH = 500


@pytest.fixture(autouse=True)
def one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def check_refusal(error: IncompatibleError | MisuseError, case: Case) -> None:
    """A refusal names the component and what is wrong with it."""
    if isinstance(error, IncompatibleError):
        assert error.component in case.spec
        assert error.field
        assert error.source != error.target
    else:
        assert error.message.split(":")[0] in case.spec
        assert "axis" in error.message


def holds(case: Case, kernel: str, mode: str, tally: Counter, pairs: set[tuple[str, str]]) -> None:
    """Check the law on one case, or that its refusal names what differs; count which."""
    try:
        source, target = case.source.build(case.spec), case.target.build(case.spec)
        plan = make_plan(source, target, fan_out=case.fan_out)
    except (IncompatibleError, MisuseError) as error:
        check_refusal(error, case)
        tally["refused"] += 1
        return
    rng = np.random.default_rng(case.seed)
    have, want = (random_memory(layout, case.tokens, rng, spare=case.seed % 2) for layout in (source, target))
    oracle = Oracle.of(source, key=str(case.seed), tokens=case.tokens)
    oracle.put(have)
    before = want.copy()
    shape = RequestShape(kv_tokens=case.tokens, first_token=case.first_token)
    sizes = {"chunk_bytes": case.chunk_bytes, "segment_bytes": case.segment_bytes}
    checks = {"read_back_too": case.seed % 4 == 0, "digests": case.seed % 4 == 1}
    move(plan, have, want, shape, kernel=kernel, mode=mode, **checks, **sizes)
    oracle.check(want, before, first_token=case.first_token)
    tally["accepted"] += 1
    pairs.add((source.digest, target.digest))
    tally["relayed"] += any(edge.relay for edge in plan.edges)
    tally[kernel, mode] += 1


def run_law(strategy, examples: int, from_seed: int, tally: Counter, pairs: set[tuple[str, str]]) -> None:
    @seed(from_seed)
    @settings(RANDOM, max_examples=examples)
    @given(strategy, st.sampled_from(KERNELS), st.sampled_from(("packed", "direct")))
    def law(case, kernel, mode):
        holds(case, kernel, mode, tally, pairs)

    law()


@pytest.mark.slow
@pytest.mark.parametrize("batch", range(4))
def test_random_pairs(batch):
    """Go on until so many *different* pairs were tried: hypothesis likes to vary an example it has."""
    tally: Counter = Counter()
    pairs: set[tuple[str, str]] = set()
    for round_number in range(100):
        run_law(cases(), 10, 1000 * batch + round_number, tally, pairs)
        if len(pairs) >= PAIRS_PER_BATCH:
            break
    tried, refused = tally["accepted"] + tally["refused"], tally["refused"]
    print(f"{len(pairs)} pairs, {tally['accepted']} accepted, {refused} refused, {tally['relayed']} with relays")
    assert len(pairs) >= PAIRS_PER_BATCH
    assert 0 < refused <= tried / 10
    assert tally["relayed"] > tried / 20
    assert all(tally[kernel, mode] > 5 for kernel, mode in itertools.product(set(KERNELS), ("packed", "direct")))


@pytest.mark.parametrize("name", preset_names())
def test_every_preset(name):
    """Each real model, scaled down, between random workers. Models that can't be described are refused by name."""
    if name not in usable_presets():
        with pytest.raises(MisuseError, match="model_type") as caught:
            spec_from_config(load_config(name))
        assert caught.value.reason == "UNSUPPORTED_MODEL"
        return
    tally: Counter = Counter()
    run_law(cases(preset_spec(name)), 3, 0, tally, set())
    assert tally["accepted"] >= 2


@pytest.mark.parametrize("name", usable_presets())
def test_small_specs_keep_the_structure(name):
    spec, small = spec_from_config(load_config(name)), preset_spec(name)
    sizes = (1, 2, 3, 4, 6, 8, 12, 16)
    assert small.tp_sizes(sizes) == spec.tp_sizes(sizes)
    assert [(c.name, c.growth, c.ownership.rule, len(c.axes)) for c in small.components] == [
        (c.name, c.growth, c.ownership.rule, len(c.axes)) for c in spec.components
    ]
    kinds = [{tuple(c.name for c in s.layer_components(x)) for x in range(s.num_layers)} for s in (spec, small)]
    assert kinds[0] == kinds[1]
    widest = [
        {c.name: [a.extent == b.extent for a, b in itertools.pairwise(c.axes[1:])] for c in s.components}
        for s in (spec, small)
    ]
    assert {n: w for n, w in widest[0].items() if n == "S"} == {n: w for n, w in widest[1].items() if n == "S"}
    assert shrink_spec(small).digest == small.digest


# ---------------------------------------------------------------- one fixed pair, looked at closely


SPEC = preset_spec("qwen3-next-80b-a3b")


def pair(
    *, tokens: int = 21, source: Storage | None = None, target: Storage | None = None, tps: tuple[int, int] = (2, 4)
):
    """Two workers' layouts, plan, memories and oracle; the source is filled."""
    a = build_layout(SPEC, Parallel(tp=tps[0]), source or Storage(page_tokens=4, pages=12))
    b = build_layout(
        SPEC, Parallel(tp=tps[1]), target or Storage(page_tokens=3, pages=12, kv_order="HND", state_order="VK")
    )
    rng = np.random.default_rng(7)
    have, want = random_memory(a, tokens, rng), random_memory(b, tokens, rng)
    oracle = Oracle.of(a, tokens=tokens)
    oracle.put(have)
    return make_plan(a, b), have, want, oracle


def test_a_prefix_at_the_target_is_left_alone():
    plan, have, want, oracle = pair()
    oracle.put(want, stop_token=8)
    before = want.copy()
    shape = RequestShape(kv_tokens=21, first_token=8)
    whole = sum(EdgeProgram(plan, e, RequestShape(kv_tokens=21), chunk_bytes=1 << 20).payload_bytes for e in plan.edges)
    assert move(plan, have, want, shape) < whole
    oracle.check(want, before, first_token=8)
    oracle.check(want, before, first_token=0)


def test_the_oracle_sees_every_single_byte():
    plan, have, want, oracle = pair()
    before = want.copy()
    move(plan, have, want, RequestShape(kv_tokens=21))
    assert oracle.difference(want, before) is None
    rng = np.random.default_rng(0)
    for _ in range(200):
        rank = int(rng.integers(len(want.buffers)))
        region = int(rng.integers(len(want.buffers[rank])))
        byte = int(rng.integers(want.buffers[rank][region].size))
        want.buffers[rank][region][byte] ^= 1 << int(rng.integers(8))
        found = oracle.difference(want, before)
        assert found is not None
        assert (found.rank, found.region) == (rank, want.layout.ranks[rank].regions[region].name)
        assert found.byte <= byte < found.byte + 4, "the difference names the element that holds the byte"
        want.buffers[rank][region][:] = before.buffers[rank][region]
        want = before.copy()
        oracle.put(want)


def test_a_difference_is_named():
    plan, have, want, oracle = pair()
    before = want.copy()
    move(plan, have, want, RequestShape(kv_tokens=21))
    rank = want.layout.ranks[3]
    holding = next(h for h in rank.holdings if h.component == "kv.v")
    region, offset = holding.at(holding.layers[1])
    page = int(want.tables[3]["kv"][5])  # page 5 of 3 rows: row 16 is its second
    want.buffers[3][region][offset + page * holding.page_stride + holding.row_stride + 2 * holding.strides[1]] ^= 1
    found = oracle.difference(want, before)
    assert (found.component, found.layer, found.row, found.coordinates) == ("kv.v", holding.layers[1], 16, (1, 2))
    with pytest.raises(CorruptError, match=r"kv\.v, layer \d, row 16, at \(1, 2\)"):
        oracle.check(want, before)


def test_the_oracle_reads_back_what_it_wrote():
    _, have, _, oracle = pair()
    for component in SPEC.components:
        for layer in component.layers:
            assert np.array_equal(oracle.read(have, component.name, layer), oracle.tensor(component.name, layer))
    assert not np.array_equal(Oracle(SPEC, key="other", tokens=21).tensor("S", 0), oracle.tensor("S", 0))


@given(chunk=st.integers(1, 9000), segment=st.integers(1, 9000), tokens=st.integers(1, 30), first=st.integers(0, 60))
@settings(max_examples=25, derandomize=True, database=None)
def test_chunks_carry_each_row_once(chunk, segment, tokens, first):
    """Segments tile (layer, row) of each item; a chunk is within its bound unless one row is not."""
    plan = make_plan(*(build_layout(SPEC, Parallel(tp=tp), Storage(pages=99)) for tp in (1, 2)))
    shape = RequestShape(kv_tokens=tokens, first_token=min(first, tokens))
    for edge in plan.edges:
        program = EdgeProgram(plan, edge, shape, chunk_bytes=chunk, segment_bytes=segment)
        seen = Counter()
        for index, part in enumerate(program.chunks):
            assert part.number == index
            assert [s.offset for s in part.segments] == [0, *itertools.accumulate(s.nbytes for s in part.segments)][:-1]
            assert part.nbytes == sum(s.nbytes for s in part.segments)
            assert part.nbytes <= chunk or len(part.segments) == 1
            for s in part.segments:
                cells = itertools.product([s.item], range(s.layer_start, s.layer_stop), range(s.row_start, s.row_stop))
                seen.update(cells)
                assert s.nbytes == (s.layer_stop - s.layer_start) * (s.row_stop - s.row_start) * program.row_bytes(
                    program.items[s.item]
                )
        want = {
            (i, layer, row)
            for i, (item, rows) in enumerate(zip(program.items, program.rows, strict=True))
            for layer, row in itertools.product(range(len(item.layers)), range(len(rows)))
        }
        assert seen == Counter(want)
        assert program.payload_bytes == sum(program.bytes_by_component().values())


@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_kernels_agree(mode):
    results = []
    for kernel in [*sorted(set(KERNELS)), "auto"]:
        plan, have, want, oracle = pair()
        before = want.copy()
        move(
            plan, have, want, RequestShape(kv_tokens=21), kernel=kernel, mode=mode, chunk_bytes=1000, segment_bytes=500
        )
        oracle.check(want, before)
        results.append(want)
    for other in results[1:]:
        assert all(
            np.array_equal(a, b)
            for r, s in zip(results[0].buffers, other.buffers, strict=True)
            for a, b in zip(r, s, strict=True)
        )


def test_torch_tensors_as_buffers():
    plan, have, want, oracle = pair()
    before = want.copy()
    for edge in plan.edges:
        giving = want if edge.relay else have
        program = EdgeProgram(plan, edge, RequestShape(kv_tokens=21), chunk_bytes=1 << 20)
        source = Side(
            program.source_rank, [torch.from_numpy(b) for b in giving.buffers[edge.source]], giving.tables[edge.source]
        )
        target = Side(
            program.target_rank, [torch.from_numpy(b) for b in want.buffers[edge.target]], want.tables[edge.target]
        )
        for chunk in program.chunks:
            staging = torch.zeros(chunk.nbytes, dtype=torch.uint8)
            for s in chunk.segments:
                part = staging[s.offset : s.offset + s.nbytes]
                pack(program, s, source, part)
                unpack(program, s, target, part)
    oracle.check(want, before)


# ---------------------------------------------------------------- wrong page tables


def target_side(change):
    """A program and the target side of rank 0 after ``change(tables)``."""
    plan, _, want, _ = pair()
    tables = {name: table.copy() for name, table in want.tables[0].items()}
    change(tables)
    edge = next(e for e in plan.edges if e.target == 0)
    return EdgeProgram(plan, edge, RequestShape(kv_tokens=21), chunk_bytes=1 << 20), Side(
        want.layout.ranks[0], want.buffers[0], tables
    )


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update(kv=t["kv"][:-1]), r"'kv' has 6 pages, row 20 needs page 6"),
        (lambda t: t.update(kv=np.append(t["kv"][:-1], 12)), r"'kv' entry 6 is 12, outside \[0, 12\)"),
        (lambda t: t.update(kv=np.append(t["kv"][:-1], -1)), r"'kv' entry 6 is -1, outside \[0, 12\)"),
        (lambda t: t.update(kv=np.append(t["kv"][:-1], t["kv"][0])), r"'kv' names page \d+ twice"),
        (lambda t: t.pop("kv"), r"no page table 'kv'; given are \['state'\]"),
        (lambda t: t.pop("state"), r"no page table 'state'"),
        (lambda t: t.update(state=np.array([8])), r"'state' entry 0 is 8, outside \[0, 8\)"),
        (lambda t: t.update(state=np.array([], dtype=np.int64)), r"'state' has 0 pages, row 0 needs page 0"),
    ],
    ids=["short", "beyond", "negative", "twice", "missing", "no-slot-table", "slot-beyond", "no-slot"],
)
def test_a_wrong_target_table_is_refused(change, says):
    program, side = target_side(change)
    before = [b.copy() for b in side.buffers]
    with pytest.raises(MisuseError, match=says):
        side.check(program.plan.target.spec, program.shape, exclusive=True)
    assert all(np.array_equal(a, b) for a, b in zip(before, side.buffers, strict=True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.update(kv=t["kv"][:-1]), r"rank 0: page table 'kv' has 5 pages"),
        (lambda t: t.update(kv=np.append(t["kv"][:-1], 12)), r"entry 5 is 12, outside \[0, 12\)"),
        (lambda t: t.update(kv=np.append(t["kv"][:-1], -7)), r"entry 5 is -7"),
        (lambda t: t.pop("kv"), r"no page table 'kv'"),
    ],
    ids=["short", "beyond", "negative", "missing"],
)
@pytest.mark.parametrize("mode", ["packed", "direct"])
def test_a_wrong_source_table_is_refused(change, says, mode):
    plan, have, want, _ = pair()
    change(have.tables[0])
    programs = [
        EdgeProgram(plan, e, RequestShape(kv_tokens=21), chunk_bytes=1 << 20) for e in plan.edges if e.source == 0
    ]
    program = next(p for p in programs if not p.edge.relay and any(20 in rows for rows in p.rows))
    edge = program.edge
    source = Side(program.source_rank, have.buffers[0], have.tables[0])
    target = Side(program.target_rank, want.buffers[edge.target], want.tables[edge.target])
    segments = [s for c in program.chunks for s in c.segments if program.items[s.item].component == "kv.k"]

    def run():
        for s in segments:
            if mode == "packed":
                pack(program, s, source, np.empty(s.nbytes, np.uint8))
            else:
                direct(program, s, source, target)

    with pytest.raises(MisuseError, match=says):
        run()


def test_a_page_in_two_tables_of_one_pool_is_refused():
    """In unified pages a KV page and a state page are the same bytes."""
    layout = build_layout(SPEC, Parallel(), Storage(pages=20), "unified")
    memory = random_memory(layout, 21, np.random.default_rng(0))
    rank, tables = layout.ranks[0], dict(memory.tables[0])
    shape = RequestShape(kv_tokens=21)
    Side(rank, memory.buffers[0], tables).check(SPEC, shape, exclusive=True)
    tables["state.0"] = tables["kv.0"][:1]
    with pytest.raises(MisuseError, match=rf"'kv.0' and 'state.0' names page {tables['kv.0'][0]} twice"):
        Side(rank, memory.buffers[0], tables).check(SPEC, shape, exclusive=True)


def test_the_number_of_buffers_must_fit():
    _, have, _, _ = pair()
    with pytest.raises(MisuseError, match=r"regions, got 1 buffers"):
        Side(have.layout.ranks[0], have.buffers[0][:1], have.tables[0])


def test_an_impossible_request_is_refused():
    with pytest.raises(MisuseError, match="first_token 9, kv_tokens 8"):
        RequestShape(kv_tokens=8, first_token=9)
