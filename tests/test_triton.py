"""The kernel for GPUs in triton's interpreter, on the CPU, against the NumPy reference: no GPU has run it yet."""

from __future__ import annotations

import importlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdxfer import kernels
from pdxfer.errors import IncompatibleError, MisuseError
from pdxfer.pages import RequestShape
from pdxfer.plan import make_plan
from pdxfer.testing.oracle import random_memory
from pdxfer.testing.strategies import cases
from tests.conftest import require
from tests.moving import move

torch = require("torch")
require("triton")


@pytest.fixture
def launches(monkeypatch):
    """Triton made anew for the interpreter; counts launches, lest another kernel did it."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    module = importlib.reload(importlib.import_module("pdxfer._triton"))
    counted: Counter[str] = Counter()
    launch = module.copy_words

    def copy_words(*args):
        counted["launches"] += 1
        launch(*args)

    monkeypatch.setattr(module, "copy_words", copy_words)
    return counted


def test_random_pairs_move_as_numpy_moves_them(launches):
    tally: Counter[str] = Counter()

    @settings(max_examples=14, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
    @given(cases(), st.sampled_from(("packed", "direct")))
    def law(case, mode):
        try:
            plan = make_plan(case.source.build(case.spec), case.target.build(case.spec), fan_out=case.fan_out)
        except (IncompatibleError, MisuseError):
            return
        rng = np.random.default_rng(case.seed)
        have, want = (random_memory(layout, case.tokens, rng) for layout in (plan.source, plan.target))
        shape = RequestShape(kv_tokens=case.tokens, first_token=case.first_token)
        ends = {kernel: want.copy() for kernel in ("triton", "numpy")}
        for kernel, end in ends.items():
            move(plan, have, end, shape, kernel=kernel, mode=mode, read_back_too=False)
        for rank, buffers in enumerate(ends["triton"].buffers):
            assert all(np.array_equal(a, b) for a, b in zip(buffers, ends["numpy"].buffers[rank], strict=True))
        tally[mode] += 1

    law()
    assert tally["packed"] > 2
    assert tally["direct"] > 2
    assert launches["launches"] > 100


@pytest.mark.parametrize("run", [1, 2, 6, 8, 24, 1000])
def test_runs_of_any_length_at_any_word(launches, run):
    """One launch each, whatever the number of runs; words are as wide as offsets and lengths allow."""
    rng = np.random.default_rng(run)
    step = run + run % 3
    source = torch.from_numpy(rng.integers(0, 256, 40 * step, dtype=np.uint8))
    target, reference = torch.zeros_like(source), np.zeros(source.numel(), np.uint8)
    to, at = (kernels.End(rng.permutation(40).astype(np.int64) * step, 1, (1,)) for _ in range(2))
    rows = kernels.RowCopy((run,), 1, to, at, np.ones(40, np.int64))
    rows.bind([kernels.Part(target, 0, source, 0)]).copy("triton")
    rows.bind([kernels.Part(reference, 0, source.numpy(), 0)]).copy("numpy")
    assert np.array_equal(target.numpy(), reference)
    assert launches["launches"] == 1


def test_runs_outside_the_buffers_are_refused_before_the_launch(launches):
    small = torch.zeros(64, dtype=torch.uint8)
    end = kernels.End(np.array([60], np.int64), 8, (1,))
    rows = kernels.RowCopy((8,), 1, end, end, np.ones(1, np.int64))
    with pytest.raises(ValueError, match="reach byte 68 of 64"):
        rows.bind([kernels.Part(small, 0, torch.zeros_like(small), 0)]).copy("triton")
    assert not launches
