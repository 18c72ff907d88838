"""Digests where bytes lie: of source pages, and of target pages after a copy, they are those of packed bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer import kernels, packing
from pdxfer.errors import IncompatibleError, MisuseError
from pdxfer.packing import EdgeProgram
from pdxfer.pages import RequestShape, Side
from pdxfer.plan import make_plan
from pdxfer.testing.oracle import random_memory
from pdxfer.testing.strategies import cases
from pdxfer.transport.runs import copy_runs
from tests.conftest import require

KERNELS = ("auto", "native", "numpy") if kernels.native_available() else ("auto", "numpy")


def check_segments(program: EdgeProgram, source: Side, target: Side, kernel: str, mode: str, tally: Counter) -> None:
    for chunk in program.chunks:
        for seed, segment in enumerate(chunk.segments):
            item = program.items[segment.item]
            data = np.empty(segment.nbytes, np.uint8)
            packing.pack(program, segment, source, data, kernel="numpy")
            expected = xxhash.xxh3_128_digest(data.data, seed)
            again = np.empty_like(data)
            assert packing.pack(program, segment, source, again, kernel=kernel, seed=seed) == expected
            assert np.array_equal(again, data)
            assert packing.digest(program, segment, source, seed, of_target=False, kernel=kernel) == expected
            if item.converts or mode == "packed":
                found = packing.unpack(program, segment, target, data.data, kernel=kernel, seed=seed)
            else:
                found = packing.direct(program, segment, source, target, kernel=kernel, seed=seed)
            if item.converts:
                continue
            assert found == expected
            assert packing.digest(program, segment, target, seed, of_target=True, kernel=kernel) == expected
            tally["short" if segment.nbytes <= 240 else "long"] += 1
            tally["many layers"] += segment.layer_stop - segment.layer_start > 1
            tally["part of the rows"] += segment.row_stop - segment.row_start < len(program.rows[segment.item])


@pytest.mark.parametrize("kernel", KERNELS)
def test_digests_of_random_pairs(kernel: str) -> None:
    tally: Counter = Counter()

    @settings(max_examples=25, derandomize=True, database=None)
    @given(cases(), st.sampled_from(("packed", "direct")))
    def run(case, mode):
        try:
            source, target = case.source.build(case.spec), case.target.build(case.spec)
            plan = make_plan(source, target, fan_out=case.fan_out)
        except (IncompatibleError, MisuseError):
            return
        rng = np.random.default_rng(case.seed)
        have, want = (random_memory(layout, case.tokens, rng) for layout in (source, target))
        shape = RequestShape(kv_tokens=case.tokens, first_token=case.first_token)
        sizes = {"chunk_bytes": case.chunk_bytes, "segment_bytes": case.segment_bytes}
        for edge in plan.edges:
            program = EdgeProgram(plan, edge, shape, **sizes)
            giving = want if edge.relay else have
            at = Side(program.source_rank, giving.buffers[edge.source], giving.tables[edge.source])
            to = Side(program.target_rank, want.buffers[edge.target], want.tables[edge.target])
            program.address(at, to)
            check_segments(program, at, to, kernel, mode, tally)

    run()
    assert all(tally[name] > 20 for name in ("short", "long", "many layers", "part of the rows")), tally


def test_a_digest_sees_one_changed_bit() -> None:
    rows, row = 64, 512
    source, target = (np.arange(rows * row, dtype=np.uint32).astype(np.uint8) for _ in range(2))
    at = np.random.default_rng(0).permutation(rows).astype(np.int64) * row
    end = kernels.End(at, row, (2,))
    copy = kernels.RowCopy((row // 2,), 2, end, end, np.ones(rows, np.int64))
    part = kernels.Part(target, 0, source, 0)
    bound = copy.bind([part])
    good = bound.copy_and_digest("auto", 5) or copy.digest_source("auto", [part], 5)
    back = kernels.Part(None, 0, target, 0)
    for byte in (0, rows * row - 1, 12345):
        target[byte] ^= 16
        assert copy.digest_source("auto", [back], 5) != good
        target[byte] ^= 16
    assert copy.digest_source("auto", [back], 5) == good == copy.digest_source("numpy", [back], 5)


def test_torch_tensors_have_digests_too() -> None:
    torch = require("torch")
    data = torch.arange(8192, dtype=torch.int32).view(torch.uint8)
    end = kernels.End(np.arange(8, dtype=np.int64) * 4096, 4096, (1,))
    packed = kernels.End(np.arange(8, dtype=np.int64) * 1000, 1000, (1,))
    copy = kernels.RowCopy((1000,), 1, packed, end, np.ones(8, np.int64))
    joined = data.numpy().reshape(8, 4096)[:, :1000].tobytes()
    assert copy.digest_source("auto", [kernels.Part(None, 0, data, 0)], 3) == xxhash.xxh3_128_digest(joined, 3)


class Reader:
    """Source memory that can only be read run by run; it remembers the runs' lengths."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.lengths = memory, np.empty(0, np.int64)

    def read_runs(self, target, target_offsets, source_offsets, lengths) -> int:
        self.lengths = lengths
        return copy_runs(target, memoryview(self.memory), target_offsets, source_offsets, lengths)


def token_near(rows: int, heads: int, dim: int) -> tuple[int, tuple[int, int], int]:
    """vLLM's K on CPUs, [head, dim, token] with V of equal size behind each head: row stride, strides, page bytes."""
    return 2, (4 * rows * dim, 2 * rows), 4 * rows * dim * heads


def row_major(rows: int, heads: int, dim: int) -> tuple[int, tuple[int, int], int]:
    return 2 * heads * dim, (2 * dim, 2), 2 * rows * heads * dim


@pytest.mark.parametrize("kernel", [*KERNELS, "reader"])
@pytest.mark.parametrize(
    ("source", "target"),
    [((token_near, 4), (token_near, 16)), ((token_near, 12), (row_major, 4)), ((row_major, 2), (token_near, 8)),
     ((token_near, 8), (token_near, 8)), ((row_major, 8), (row_major, 8))],
    ids=["other pages", "to rows", "from rows", "same pages", "rows"],
)  # fmt: skip
@pytest.mark.parametrize(("heads", "dim", "tokens"), [(2, 24, 29), (1, 8, 3), (3, 1, 40)])
def test_tokens_may_lie_element_by_element(source, target, kernel: str, heads: int, dim: int, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    step = int(np.gcd(source[1], target[1]))
    firsts = np.arange(0, tokens, step)
    counts = np.minimum(step, tokens - firsts).astype(np.int64)
    ends, memories, places = [], [], []
    for layout, rows in (target, source):
        row, strides, page = layout(rows, heads, dim)
        table = rng.permutation(-(-tokens // rows))
        ends.append(kernels.End(table[firsts // rows] * page + firsts % rows * row, row, strides))
        memories.append(rng.integers(0, 256, len(table) * page, dtype=np.uint8))
        at = np.arange(tokens)
        grid = np.ix_(table[at // rows] * page + at % rows * row, np.arange(heads) * strides[0])
        places.append((sum(grid)[:, :, None] + np.arange(dim) * strides[1])[..., None] + np.arange(2))
    expected, reader = memories[0].copy(), Reader(memories[1])
    expected[places[0]] = memories[1][places[1]]
    copy = kernels.RowCopy((heads, dim), 2, *ends, counts)
    given = reader if kernel == "reader" else memories[1]
    copy.bind([kernels.Part(memories[0], 0, given, 0)]).copy("auto" if kernel == "reader" else kernel)
    assert np.array_equal(memories[0], expected)
    if kernel == "reader":
        near = source[0] is target[0]
        assert reader.lengths.max() >= 2 * (min(step, tokens) if near and source[0] is token_near else 1)
        return
    packed = kernels.End(firsts * 2 * heads * dim, 2 * heads * dim, (2 * dim, 2))
    back = kernels.RowCopy((heads, dim), 2, packed, ends[0], counts)
    for rows_at_once in (5, 1000):
        blocks = back._blocks(rows_at_once)
        scratch = [np.empty(block.nbytes, np.uint8) for block in blocks]
        for block, out in zip(blocks, scratch, strict=True):
            block.bind([kernels.Part(out, 0, memories[0], 0)]).copy(kernel)
        assert np.array_equal(np.concatenate(scratch), expected[places[0]].reshape(-1))
    seeded = back.digest_source(kernel, [kernels.Part(None, 0, memories[0], 0)], 7)
    assert seeded == xxhash.xxh3_128_digest(expected[places[0]].tobytes(), 7)
