"""Two workers of agents in one process: hand a request over, or fail by name, and be idle again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest

from pdxfer.agent.reasons import reason_of
from pdxfer.errors import PdxferError
from pdxfer.layout import Layout
from pdxfer.testing.oracle import Oracle
from pdxfer.transfer import State
from pdxfer.transport import known_schemes
from tests.workers import Worker, settle

__all__ = ["LONG", "SCHEMES", "TOKENS", "Ends", "fails", "hand_over", "pair", "wait_until", "withdraw"]


SCHEMES = [s for s in ("memory", "shm", "tcp") if s in known_schemes()]


TOKENS, LONG = 70, 300


@contextmanager
def pair(source: Layout, target: Layout, *, of_source=None, of_target=None, **both) -> Iterator[tuple[Worker, Worker]]:
    """Two workers; after the test both must hold nothing."""
    both.setdefault("transports", ("memory",))
    with ExitStack() as stack:
        one = stack.enter_context(Worker(source, seed=1, worker="P", **{**both, **(of_source or {})}))
        two = stack.enter_context(Worker(target, seed=2, worker="D", **{**both, **(of_target or {})}))
        yield one, two
        one.check_idle()
        two.check_idle()


def hand_over(source: Worker, target: Worker, key: str, tokens: int = TOKENS, *, first_token: int = 0, **options):
    """Offer, fetch, compare every byte of the target, release; returns what each rank received."""
    oracle = Oracle.of(source.layout, key=key, tokens=tokens)
    ended: list[tuple[str, str]] = []
    ticket = source.offer(key, tokens, oracle=oracle, on_end=lambda *end: ended.append(end), **options)
    before = target.reserve(key, tokens).copy()
    received = target.fetch(ticket, key, first_token=first_token)
    oracle.check(target.memory(key), before, first_token=first_token)
    assert ended == [(key, "completed")] * len(source.ranks)
    for rank in received:
        rank.release()
        rank.release()
    return received


def fails(
    source: Worker, target: Worker, expected: type[PdxferError], key: str = "lost", *, match: str = ".",
    trace: str = "", **options,
):  # fmt: skip
    """Offer and fetch; the first error must be ``expected``. Nothing becomes READY. Returns the error."""
    ends = Ends()
    ticket = source.offer(key, LONG, on_end=ends, trace=trace)
    target.reserve(key, LONG)
    fetches = target.start(ticket, key, **options)
    with pytest.raises(expected, match=match) as caught:
        settle(fetches)
    assert not any(fetch.state in (State.READY, State.HANDED) for fetch in fetches)
    counted = ("transfer_failures", "target", reason_of(caught.value.reason).name)
    assert any(agent.journal.counts[counted] for agent in target.agents), "no counter moved"
    withdraw(source, key, ends)
    return caught.value


class Ends:
    """Collects what ``on_end`` is told; ``wait`` until so many ranks' pages are free again."""

    def __init__(self) -> None:
        self.outcomes: list[str] = []
        self._told = threading.Semaphore(0)

    def __call__(self, transfer: str, outcome: str) -> None:
        self.outcomes.append(outcome)
        self._told.release()

    def wait(self, ranks: int) -> None:
        for _ in range(ranks):
            assert self._told.acquire(timeout=60.0), self.outcomes


def wait_until(holds: Callable[[], object], *, timeout_s: float) -> bool:
    """Whether ``holds`` becomes true in time, for what tells nobody."""
    until_s = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.01)
    return bool(holds())


def withdraw(source: Worker, key: str, ends: Ends) -> None:
    """Take back what no reader has ended, and wait until the pages are free."""
    for agent in source.agents:
        agent.withdraw(key)
    ends.wait(len(source.ranks))
