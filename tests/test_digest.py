"""Copies of many runs with a digest, against the xxhash package: what an agent without the kernel computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import require

native = require("pdxfer._native")

SOURCE = np.random.default_rng(7).integers(0, 256, 1 << 18, dtype=np.uint8)
# Lengths around what the algorithm treats apart: bytes, stripes of 64, blocks of 1 KiB, pieces of 8 KiB.
LENGTH = st.one_of(
    st.integers(0, 70),
    st.integers(0, 200).map(lambda n: 64 * n),
    st.integers(0, 40000),
    st.sampled_from([1023, 1024, 1025, 8191, 8192, 8193, 16384]),
)
RUNS = st.lists(st.tuples(st.integers(0, 1 << 17), LENGTH), min_size=1, max_size=12)
SEED = st.integers(0, 2**64 - 1)


def ints(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def joined(runs: list[tuple[int, int]]) -> bytes:
    return b"".join(SOURCE[at : at + n].tobytes() for at, n in runs)


def targets(runs: list[tuple[int, int]], gap: int) -> list[int]:
    """Offsets one after the other, last run first, so that order in the target is not order in the digest."""
    at, found = gap, []
    for _, n in reversed(runs):
        found.append(at)
        at += n + gap
    return found[::-1]


@given(RUNS, SEED, st.integers(0, 12), st.integers(0, 3))
def test_digests_are_those_of_the_package(runs: list[tuple[int, int]], seed: int, cut: int, gap: int) -> None:
    data = joined(runs)
    if len(data) <= 240:
        with pytest.raises(ValueError, match="of more than 240 bytes"):
            native.digest_parts([(SOURCE, 0, ints([a for a, _ in runs]), ints([n for _, n in runs]))], seed)
        return
    target = np.full(sum(n + gap for _, n in runs) + gap + 5, 0xA5, dtype=np.uint8)
    reading, copying = [], []
    for half, places in ((runs[:cut], targets(runs, gap)[:cut]), (runs[cut:], targets(runs, gap)[cut:])):
        at, n = ints([a for a, _ in half]), ints([n for _, n in half])
        reading.append((SOURCE, 0, at, n))
        copying.append((target, 5, ints(places), SOURCE, 0, at, n))
    expected = xxhash.xxh3_128_digest(data, seed)
    assert native.digest_parts(reading, seed) == expected
    assert native.copy_parts(copying, seed) == expected
    wanted = np.full_like(target, 0xA5)
    for (at, n), to in zip(runs, targets(runs, gap), strict=True):
        wanted[5 + to : 5 + to + n] = SOURCE[at : at + n]
    np.testing.assert_array_equal(target, wanted)
    target[:] = 0xA5
    assert native.copy_parts(copying) is None
    np.testing.assert_array_equal(target, wanted)


def test_the_digest_is_of_the_target_s_memory_not_of_the_source_s() -> None:
    """Two runs into one place: what is digested for the first is what then lies there, and only the last run does."""
    target = np.zeros(4096, np.uint8)
    twice = [(target, 0, ints([0, 0]), SOURCE, 0, ints([0, 4096]), ints([4096, 4096]))]
    clean = xxhash.xxh3_128_digest(SOURCE[:8192], 1)
    assert native.copy_parts(twice, 1) == clean  # each piece is read back before the next is written
    after = native.digest_parts([(target, 0, ints([0, 0]), ints([4096, 4096]))], 1)
    assert after == xxhash.xxh3_128_digest(np.tile(SOURCE[4096:8192], 2), 1) != clean


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: 1}, r"target_offsets\[0\] = 0 with 1 rows leaves the target of 511 bytes"),
        ({1: -1}, "leave the buffers"),
        ({1: 513}, "leave the buffers"),
        ({4: 1}, r"source_offsets\[0\] = 0 .* leaves the source of 511 bytes"),
        ({4: -1}, "leave the buffers"),
        ({5: ints([-1])}, r"source_offsets\[0\] = -1"),
        ({6: ints([-1])}, r"lengths\[0\] is -1"),
        ({6: ints([2**63 - 1])}, "source_offsets"),
        ({6: ints([1, 1])}, "lengths has 2 entries"),
        ({2: np.zeros(1, np.int32)}, "must be one row of int64"),
    ],
)
def test_one_wrong_part_refuses_all(change: dict[int, Any], message: str) -> None:
    target = bytearray(512)
    good = (target, 0, ints([0]), SOURCE[:512], 0, ints([0]), ints([512]))
    wrong = tuple(change.get(i, value) for i, value in enumerate(good))
    for seed in (None, 3):
        with pytest.raises(ValueError, match=message):
            native.copy_parts([good, wrong], seed)
        assert target == bytes(512)
    target.append(1)  # BufferError while an export is alive


def test_arguments_of_another_kind_are_refused() -> None:
    part = (SOURCE, 0, ints([0]), ints([512]))
    for bad in ([part[:3]], [list(part)], 5, [("text", 0, ints([0]), ints([512]))]):
        with pytest.raises(TypeError):
            native.digest_parts(bad, 1)
    for seed in (None, 1.5):
        with pytest.raises(TypeError):
            native.digest_parts([part], seed)
    for seed in (-1, 2**64):
        with pytest.raises(OverflowError):
            native.digest_parts([part], seed)
    with pytest.raises(TypeError):
        native.copy_parts([(b"read-only" * 60, 0, ints([0]), *part[:1], 0, *part[2:])])
