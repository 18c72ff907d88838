"""The simulator: clean seeds hold, equal seeds run alike, and what it promises to see it sees."""

from __future__ import annotations

import json

import pytest

from tests.conftest import require

require("greenlet")

from pdxfer.testing.simulation import Simulation, simulate  # noqa: E402
from pdxfer.testing.simulation.__main__ import main  # noqa: E402
from pdxfer.testing.simulation.virtual import World  # noqa: E402


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_holds(seed):
    report = simulate(seed, 100)
    assert report.errors == []
    assert report.transfers == 100
    assert report.outcomes["fetched"] > 10


def test_equal_seeds_run_alike_and_others_do_not():
    one, again, other = simulate(11, 40), simulate(11, 40), simulate(12, 40)
    assert one == again
    assert one.trace != other.trace


def test_a_failing_seed_says_how_to_see_it_again(capsys, monkeypatch):
    monkeypatch.setattr(Simulation, "_close", lambda self: self.fail("something is wrong"))
    assert main(["--seed", "3", "--seeds", "2", "--transfers", "5", "--json"]) == 1
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["failed_seeds"] == [3]
    assert found["failures"][0]["errors"] == ["something is wrong"]
    assert "reproduce: python -m pdxfer.testing.simulation --seed 3 --transfers 5" in printed.err


def test_a_world_without_anything_to_do_is_a_deadlock():
    world = World(0)
    world.run(lambda: world.park() and None)
    assert any("deadlock" in error for error in world.errors)


def test_a_world_that_spins_is_a_livelock(monkeypatch):
    monkeypatch.setattr("pdxfer.testing.simulation.virtual._SPIN", 100)
    world = World(0)

    def spin() -> None:
        while True:
            world.preempt()

    world.run(spin)
    assert any("livelock" in error for error in world.errors)


def test_threads_of_a_process_that_is_killed_unwind_and_start_nothing():
    world, seen = World(0), []
    victim = world.outside.__class__("victim")

    def live() -> None:
        try:
            world.sleep(100.0)
        finally:
            seen.append("unwound")
            world.sleep(1.0)
            seen.append("blocked after death")

    def main_task() -> None:
        world.spawn(victim, live)
        world.sleep(1.0)
        world.kill(victim)
        world.sleep(1.0)

    world.run(main_task)
    assert seen == ["unwound"]
    assert world.errors == []
