"""The copy kernel against a slow reference that is obvious: same bytes, same counts, and nothing written on refusal."""

from __future__ import annotations

import array
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import require

native = require("pdxfer._native")

MAX = 2**63 - 1
BOX: dict[str, Any] = {
    "target_offsets": [0, 64],
    "source_offsets": [64, 0],
    "rows": [2, 1],
    "target_row_stride": 16,
    "source_row_stride": 32,
    "shape": (2,),
    "target_strides": (8,),
    "source_strides": (16,),
    "run_bytes": 4,
}


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def copy_boxes(target: Any, source: Any, box: dict[str, Any]) -> int:
    arrays = {name: ints(value) if isinstance(value, list) else value for name, value in box.items()}
    return native.copy_boxes(target, source, **arrays)


def reference_boxes(target: bytearray, source: bytes, box: dict[str, Any]) -> int:
    moved, run = 0, box["run_bytes"]
    target_strides = (box["target_row_stride"], *box["target_strides"])
    source_strides = (box["source_row_stride"], *box["source_strides"])
    for to, at, rows in zip(box["target_offsets"], box["source_offsets"], box["rows"], strict=True):
        for index in itertools.product(range(rows), *map(range, box["shape"])):
            to_byte = to + sum(i * stride for i, stride in zip(index, target_strides, strict=True))
            at_byte = at + sum(i * stride for i, stride in zip(index, source_strides, strict=True))
            target[to_byte : to_byte + run] = source[at_byte : at_byte + run]
            moved += run
    return moved


def span(extents: list[int], strides: list[int], run: int) -> int:
    return run + sum(max(e - 1, 0) * s for e, s in zip(extents, strides, strict=True))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[dict[str, Any], int, int]:
    """A valid box call with the least lengths of its target and source. Target bytes are written once."""
    small = st.lists(st.integers(0, 3), max_size=6).filter(lambda e: np.prod(e) <= 200)
    wide = st.lists(st.integers(1, 35), min_size=2, max_size=2)  # past one tile of the kernel
    shape = draw(small | wide)
    run = draw(st.sampled_from([1, 2, 4, 8, 16, 3, 24]))
    rows = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    extents = [max(rows), *shape]
    target_strides = [0] * len(extents)
    reach = run
    for axis in draw(st.permutations(range(len(extents)))):
        target_strides[axis] = reach + draw(st.integers(0, 3))
        reach = span(extents, target_strides, run)
    source_strides = [draw(st.sampled_from([0, 1, run, 2 * run, 7, 64])) for _ in extents]
    if draw(st.booleans()):
        source_strides = list(target_strides)
    order = draw(st.permutations(range(len(rows))))
    gap, source_span = draw(st.integers(0, 5)), span(extents, source_strides, run)
    source_offsets = draw(st.lists(st.integers(0, 50), min_size=len(rows), max_size=len(rows)))
    box = {
        "target_offsets": [place * (reach + gap) for place in order],
        "source_offsets": source_offsets,
        "rows": rows,
        "target_row_stride": target_strides[0],
        "source_row_stride": source_strides[0],
        "shape": tuple(shape),
        "target_strides": tuple(target_strides[1:]),
        "source_strides": tuple(source_strides[1:]),
        "run_bytes": run,
    }
    return box, len(rows) * (reach + gap), max(source_offsets) + source_span


@settings(max_examples=400)
@given(boxes(), st.randoms(use_true_random=False))
def test_boxes_equal_the_reference(drawn: tuple[dict[str, Any], int, int], random: Any) -> None:
    box, target_bytes, source_bytes = drawn
    source, target = random.randbytes(source_bytes), bytearray(random.randbytes(target_bytes))
    expected = bytearray(target)
    moved = reference_boxes(expected, source, box)
    assert copy_boxes(target, source, box) == moved
    assert target == expected


@settings(max_examples=200)
@given(boxes(), st.sampled_from(["target", "source"]), st.integers(0, 3))
def test_one_byte_short_is_refused_and_nothing_is_written(drawn: Any, side: str, which: int) -> None:
    """Shift one item so that its last byte lies one behind the buffer: refused when, and only when, it has bytes."""
    box, target_bytes, source_bytes = drawn
    item = which % len(box["rows"])
    extents = [box["rows"][item], *box["shape"]]
    strides = [box[f"{side}_row_stride"], *box[f"{side}_strides"]]
    length = {"target": target_bytes, "source": source_bytes}[side]
    shifted = list(box[f"{side}_offsets"])
    shifted[item] = length - span(extents, strides, box["run_bytes"]) + 1
    box[f"{side}_offsets"] = shifted
    source, target = bytes(source_bytes), bytearray(b"\xff" * target_bytes)
    if np.prod(extents) == 0:
        assert copy_boxes(target, source, box) == reference_boxes(bytearray(target), source, box)
        return
    message = rf"{side}_offsets\[{item}\] = {shifted[item]} .*leaves the {side} of {length} bytes"
    with pytest.raises(ValueError, match=message):
        copy_boxes(target, source, box)
    assert target == b"\xff" * target_bytes


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), min_size=1), st.randoms(use_true_random=False))
def test_runs_equal_the_reference(runs: list[tuple[int, int]], random: Any) -> None:
    lengths = [length for _, length in runs]
    ends = list(itertools.accumulate(lengths))
    source, target = random.randbytes(80), bytearray(ends[-1])
    target_offsets = [end - length for end, length in zip(ends, lengths, strict=True)]
    expected = b"".join(source[at : at + length] for at, length in runs)
    moved = native.copy_runs(target, source, ints(target_offsets), ints([at for at, _ in runs]), ints(lengths))
    assert moved == len(expected)
    assert target == expected


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.complex128])
@pytest.mark.parametrize("shape", [(37, 53), (16, 16), (128, 3), (1, 40)])
def test_transposes(dtype: type, shape: tuple[int, int]) -> None:
    """Two matrices one behind the other, [A, B] to [B, A]."""
    size, (high, wide) = np.dtype(dtype).itemsize, shape
    source = np.arange(2 * high * wide).astype(dtype).reshape(2, high, wide)
    target = np.zeros((2, wide, high), dtype)
    box = BOX | {
        "target_offsets": [0],
        "source_offsets": [0],
        "rows": [2],
        "target_row_stride": high * wide * size,
        "source_row_stride": high * wide * size,
        "shape": shape,
        "target_strides": (size, high * size),
        "source_strides": (wide * size, size),
        "run_bytes": size,
    }
    assert copy_boxes(target, source, box) == source.nbytes
    np.testing.assert_array_equal(target, source.transpose(0, 2, 1))


def test_nothing_to_do() -> None:
    nothing = ints([])
    assert native.copy_runs(bytearray(4), b"1234", nothing, nothing, nothing) == 0
    assert native.copy_boxes(bytearray(), b"", nothing, nothing, nothing, 0, 0, (), (), (), 1) == 0


REFUSED = [
    ({"target_offsets": [0, -1]}, r"target_offsets\[1\] = -1"),
    ({"source_offsets": [64, MAX]}, r"source_offsets\[1\] = 9223372036854775807"),
    ({"rows": [2, -1]}, r"rows\[1\] is -1"),
    ({"rows": [MAX, 1]}, r"target_offsets\[0\] = 0 with 9223372036854775807 rows"),
    ({"rows": [2]}, r"rows has 1 entries, target_offsets has 2"),
    ({"rows": [3, 1], "target_row_stride": 0}, r"rows\[0\] is 3; .*target_row_stride of 0"),
    ({"target_row_stride": -16}, r"row strides -16, 32 must not be negative"),
    ({"source_row_stride": -1}, r"row strides 16, -1 must not be negative"),
    ({"source_row_stride": MAX}, r"source_offsets\[0\] = 64 with 2 rows"),
    ({"shape": (-1,)}, r"shape\[0\] is -1"),
    ({"shape": (1 << 70,)}, r"shape\[0\] does not fit in 64 bits"),
    ({"shape": (MAX,), "target_strides": (MAX,)}, r"shape\[0\] times its stride"),
    ({"shape": (MAX, 0), "target_strides": (1, 1), "source_strides": (3, 1)}, r"shape\[0\] times its stride"),
    ({"shape": (2, 2)}, r"target_strides has 1 entries"),
    ({"shape": (1,) * 7, "target_strides": (1,) * 7, "source_strides": (1,) * 7}, r"shape has 7 entries; .* at most 6"),
    ({"target_strides": (0,)}, r"target_strides\[0\] is 0: 2 elements"),
    ({"target_strides": (-8,)}, r"target_strides\[0\] is -8"),
    ({"source_strides": (-16,)}, r"source_strides\[0\] is -16"),
    ({"run_bytes": 0}, r"run_bytes 0 must be at least 1"),
    ({"run_bytes": MAX}, r"shape\[0\] times its stride"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_refusals_name_the_index(change: dict[str, Any], message: str) -> None:
    target = bytearray(256)
    assert copy_boxes(bytearray(256), b"\xff" * 256, BOX) == 24  # the box itself is fine
    with pytest.raises(ValueError, match=message):
        copy_boxes(target, b"\xff" * 256, BOX | change)
    assert target == bytes(256)


@pytest.mark.parametrize(
    ("offsets", "at", "lengths", "message"),
    [
        ([0, 9], [0, 0], [4, 8], r"target_offsets\[1\] = 9 with 1 rows leaves the target of 16 bytes"),
        ([0, 0], [0, 13], [4, 4], r"source_offsets\[1\] = 13 .* leaves the source of 16 bytes"),
        ([0, 0], [0, 0], [4, -4], r"lengths\[1\] is -4"),
        ([0, 1], [0, 0], [4, MAX], r"target_offsets\[1\] = 1"),
        ([-1], [0], [4], r"target_offsets\[0\] = -1"),
        ([0], [0, 0], [4], r"source_offsets has 2 entries"),
    ],
)
def test_runs_refuse(offsets: list[int], at: list[int], lengths: list[int], message: str) -> None:
    target = bytearray(16)
    with pytest.raises(ValueError, match=message):
        native.copy_runs(target, b"\xff" * 16, ints(offsets), ints(at), ints(lengths))
    assert target == bytes(16)


@pytest.mark.parametrize(
    "offsets",
    [
        np.zeros(1, np.int32),
        np.zeros(1, np.uint64),
        np.zeros(1, np.float64),
        np.zeros((1, 1), np.int64),
        np.zeros(1, ">i8"),
        b"\0" * 8,
    ],
)
def test_offsets_of_another_format_are_refused(offsets: Any) -> None:
    with pytest.raises(ValueError, match="source_offsets must be one row of int64"):
        native.copy_runs(bytearray(8), b"12345678", ints([0]), offsets, ints([8]))


def test_offsets_may_be_any_int64_buffer() -> None:
    target, one = bytearray(8), array.array("q", [0])
    assert native.copy_runs(target, b"12345678", one, memoryview(bytes(8)).cast("q"), ints([8])) == 8
    assert target == b"12345678"


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (b"read-only", b"123456789"),
        (np.zeros((8, 8), np.uint8)[:, ::2], b"123456789"),
        (bytearray(9), np.zeros((8, 8), np.uint8)[:, ::2]),
        (bytearray(9), "text"),
    ],
)
def test_buffers_that_cannot_be_used_are_type_errors(target: Any, source: Any) -> None:
    with pytest.raises((TypeError, ValueError, BufferError)):
        native.copy_runs(target, source, ints([0]), ints([0]), ints([8]))


def test_strides_are_tuples() -> None:
    with pytest.raises(TypeError, match="shape must be a tuple of ints, not list"):
        native.copy_boxes(bytearray(8), b"12345678", ints([0]), ints([0]), ints([1]), 0, 0, [], (), (), 8)
    with pytest.raises(TypeError):
        native.copy_boxes(bytearray(8), b"12345678", ints([0]), ints([0]), ints([1]), 0, 0, (1.5,), (1,), (1,), 8)


def test_a_failed_call_releases_its_buffers() -> None:
    target = bytearray(8)
    for lengths in ([9], [1, 1]):
        with pytest.raises(ValueError, match="target_offsets"):
            native.copy_runs(target, b"12345678", ints([0]), ints([0]), ints(lengths))
    target.extend(b"x")  # BufferError while an export is alive
    assert len(target) == 9


def test_offsets_past_four_gigabytes() -> None:
    """A sparse target: only the touched pages exist."""
    reach = 5 << 30
    target = np.zeros(reach, np.uint8)
    assert native.copy_runs(target, b"12345678", ints([reach - 8]), ints([0]), ints([8])) == 8
    assert target[-8:].tobytes() == b"12345678"


def test_two_threads_copy_into_their_halves() -> None:
    source = np.arange(1 << 16, dtype=np.uint32)
    target = np.zeros_like(source)
    half = source.nbytes // 2

    def copy(first: int) -> None:
        offsets = first * half + np.arange(0, half, 64, dtype=np.int64)
        native.copy_runs(target, source, offsets, offsets, np.full(len(offsets), 64))

    threads = [threading.Thread(target=copy, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(target, source)
