"""The simulator finds every planted bug, and nothing where none is planted."""

from __future__ import annotations

import pytest

from tests.conftest import require

require("greenlet")

from pdxfer.testing.simulation import simulate  # noqa: E402
from tests.mutations import FIRST, FOCUS, MUTATIONS, SCALED, planted  # noqa: E402

SEEDS, TRANSFERS = 60, 100


def found(name: str) -> str:
    """The first error that a planted bug causes; "" when no seed finds it."""
    with planted(name):
        for seed in (FIRST.get(name, 0), *range(SEEDS)):
            report = simulate(seed, TRANSFERS, **FOCUS.get(name, {}))
            if report.errors:
                return report.errors[0]
    return ""


@pytest.mark.parametrize("name", [*MUTATIONS, SCALED])
def test_a_planted_bug_is_found(name):
    assert found(name)


def test_there_are_enough():
    assert len(MUTATIONS) >= 20


@pytest.mark.parametrize("name", sorted(FIRST))
def test_what_looks_for_the_rare_ones_finds_nothing_else(name):
    """The same seed, faults and stories without the bug; the common ones are held by tests/test_simulation.py."""
    assert simulate(FIRST[name], TRANSFERS, **FOCUS.get(name, {})).errors == []
