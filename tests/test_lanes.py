"""Lanes bound how many large chunks of a process are copied at a time, and small ones pass by."""

from __future__ import annotations

import os
import threading

import pytest

from pdxfer.agent import AgentConfig
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import MisuseError
from pdxfer.lanes import lane
from pdxfer.testing.oracle import Oracle
from pdxfer.transport.vm import ProcessRegion
from tests.pairs import TOKENS, pair
from tests.workers import hybrid_spec, settle

LARGE = 1 << 20


@pytest.mark.parametrize("mode", ["packed", "direct"])
@pytest.mark.parametrize("digests", [True, False])
def test_a_fetch_waits_for_a_lane_and_then_arrives(mode, digests):
    sizes = {"chunk_bytes": 4 << 20, "arena_bytes": 32 << 20}
    layout = build_layout(hybrid_spec(width=96), Parallel(), Storage(), "per_layer")  # 1.8 MB, in one chunk
    with pair(layout, layout, mode=mode, digests=digests, copy_threads=1, **sizes) as (source, target):
        oracle = Oracle.of(source.layout, key="one", tokens=TOKENS)
        ticket = source.offer("one", TOKENS, oracle=oracle)
        before = target.reserve("one", TOKENS).copy()
        with lane(LARGE, 1, digests=digests):
            fetches = target.start(ticket, "one")
            assert not fetches[0].join(0.5)
        received = settle(fetches)
        oracle.check(target.memory("one"), before)
        for rank in received:
            rank.release()


def test_a_read_that_stands_still_has_no_lane(monkeypatch):
    """It may wait for a peer that is gone: with each of them a lane less, until nothing large moved in the process."""
    sizes = {"chunk_bytes": 4 << 20, "arena_bytes": 32 << 20}
    layout = build_layout(hybrid_spec(width=96), Parallel(), Storage(), "per_layer")
    reading, goes_on, read = threading.Event(), threading.Event(), ProcessRegion.read_runs

    def stands_still(region, *runs):
        reading.set()
        assert goes_on.wait(60.0)
        return read(region, *runs)

    monkeypatch.setattr(ProcessRegion, "read_runs", stands_still)
    config = {"transports": ("shm",), "mode": "direct", "copy_threads": 1, "of_source": {"own_memory": "numpy"}}
    with pair(layout, layout, **config, **sizes) as (source, target):
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        fetches = target.start(ticket, "one")
        assert reading.wait(30.0)
        others = lane(LARGE, 1, digests=True)
        assert others.acquire(timeout=30.0)  # the source's digest may have it for a moment
        others.release()
        goes_on.set()
        (received,) = settle(fetches)
        assert [edge.mode for edge in received.edges] == ["direct"]
        received.release()


def test_as_many_hold_a_lane_as_there_are():
    inside, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(2)

    def hold() -> None:
        nonlocal inside, most
        for _ in range(50):
            with lane(LARGE, 2, digests=False):
                with lock:
                    inside += 1
                    most = max(most, inside)
                with lock:
                    inside -= 1
        with lane(LARGE, 2, digests=False):
            together.wait(10.0)  # two at once, or nobody gets on

    threads = [threading.Thread(target=hold) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert most <= 2
    assert not together.broken


def test_small_chunks_and_copies_without_digests_need_none():
    half = max(1, len(os.sched_getaffinity(0)) // 2)
    held = [lane(LARGE, 0, digests=True) for _ in range(half)]
    for one in held:
        one.__enter__()
    try:
        with lane(LARGE - 1, 0, digests=True), lane(LARGE, 0, digests=False):
            assert not lane(LARGE, half, digests=False).acquire(blocking=False)
    finally:
        for one in held:
            one.__exit__(None, None, None)


def test_a_negative_number_of_threads_is_refused():
    with pytest.raises(MisuseError, match=r"copy_threads.*-1"):
        AgentConfig(worker="w", copy_threads=-1)
