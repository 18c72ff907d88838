"""Simulation: two workers, many requests, faults by rounds, and what must hold after every step.

In comes a seed; out comes a ``Report``. Rounds are clean, gentle (faults that no request may notice) or rough; between
them everything comes to rest, and then nothing may be left: no page, slot, session, credit, staging block or thread.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from pdxfer import packing
from pdxfer.agent.serve import SourceSession
from pdxfer.agent.service import Agent
from pdxfer.errors import MisuseError
from pdxfer.testing.simulation.network import CALL_FAULTS, MESSAGE_FAULTS, Network
from pdxfer.testing.simulation.requests import LEASE_S, STORIES, Gone, Request
from pdxfer.testing.simulation.threads import installed
from pdxfer.testing.simulation.virtual import Killed, World
from pdxfer.testing.simulation.worker import Held, Rank, Worker
from pdxfer.transfer import TARGET, Event, Hold, Ledger, State

__all__ = ["Report", "Simulation", "simulate"]

_ROUND = 60  # requests
_AT_ONCE = 5
_GENTLE = ("delay", "cut_call", "cut_answer", "repeat_call", "lose_closed")
_OTHER_FAULTS = ("lose_closed", "refuse", "stall", "crash", "crash both", "leap")
_REMEMBERED = 24  # transfers that a source remembers after their end, so that forgetting is exercised, too


@dataclass(kw_only=True)
class Report:
    """What became of one seed.

    Attributes:
        errors: what must not be; empty when all held. trace: equal for equal runs.
    """

    seed: int
    transfers: int
    errors: list[str]
    outcomes: dict[str, int]
    faults: dict[str, int]
    virtual_s: float
    steps: int
    trace: str


class _Interrupted:
    """Packing whose callers may be preempted before and after every copy."""

    def __init__(self, world: World) -> None:
        for name in ("pack", "unpack", "direct", "digest"):
            setattr(self, name, self._interrupted(world, getattr(packing, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(packing, name)

    @staticmethod
    def _interrupted(world: World, copy: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            world.preempt()
            found = copy(*args, **options)
            world.preempt()
            return found

        return run


class _Bound(NamedTuple):
    world: World
    until_s: float
    lost_s: float

    @property
    def passed(self) -> bool:
        return self.world.now_s > self.until_s + self.world.lost_s - self.lost_s


class Simulation:
    """One seed's world.

    Args:
        faults: only these, in every round, and often; () draws them by rounds. stories: only these.
    """

    def __init__(self, seed: int, transfers: int, *, faults: Sequence[str] = (), stories: Sequence[str] = ()) -> None:
        self.seed, self.transfers, self.faults = seed, transfers, tuple(faults)
        known = (*MESSAGE_FAULTS, *CALL_FAULTS, *_OTHER_FAULTS)
        if unknown := {*faults} - {*known} | {*stories} - {*STORIES}:
            raise MisuseError(
                f"no such fault or story: {sorted(unknown)}", hint=f"known: {', '.join([*known, *STORIES])}"
            )
        self.stories = {name: n for name, n in STORIES.items() if not stories or name in stories}
        self.world = World(seed)
        self.network = Network(self.world)
        self.random = self.world.random
        self.known: list[tuple[str, int]] = []
        self.old_tickets: dict[str, str] = {}
        self.reading: Counter[tuple[bool, int, int]] = Counter()
        self.served: Counter[tuple[str, Any]] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.number = self._uses = 0
        self.gentle = True
        self._ledgers: dict[Ledger, Rank] = {}
        self.source, self.target = self._workers()

    def _workers(self) -> tuple[Worker, Worker]:
        return self._worker("s"), self._worker("t")

    def _worker(self, name: str) -> Worker:
        r = self.random
        return Worker(
            self.world, self.network, name, r.choice((1, 2)), r.choice((0, 1)), self.known,
            same_address=r.random() < 0.5, mode=r.choice(("auto", "packed", "direct")), chunk_bytes=4096,
            arena_bytes=4096 * r.randint(1, 5), window=r.randint(1, 3), lease_s=LEASE_S, hold_max_s=6.0,
            call_s=0.4, stall_s=0.4,
        )  # fmt: skip

    # -- for requests ------------------------------------------------------------------------------

    def transfer_name(self, number: int) -> str:
        """Mostly a fresh id; now and then one that was used long ago, and may be forgotten by now."""
        if number > _REMEMBERED and self.random.random() < 0.05:
            return f"r{self.random.randrange(1, number - 10)}"
        return f"r{number}"

    def next_use(self) -> int:
        """Numbers uses of target pages."""
        self._uses += 1
        return self._uses

    def bound(self, seconds: float) -> _Bound:
        """Something whose ``passed`` says whether so much time went by that nobody stole."""
        return _Bound(self.world, self.world.now_s + seconds, self.world.lost_s)

    def living(self, worker: Worker) -> list[Rank]:
        """All ranks of a worker, once all are there."""
        while not all(rank.alive and rank.ready for rank in worker.ranks):
            self.world.sleep(0.01)
        return list(worker.ranks)

    def call(self, rank: Rank, what: Callable[[], Any]) -> Any:
        """Call something of a rank's agent in its own process."""
        box: list[Any] = []

        def run() -> None:
            try:
                box.append((what(), None))
            except Exception as error:  # noqa: BLE001 - raised where it was asked for
                box.append((None, error))

        try:
            task = self.world.spawn(rank.process, run, name="engine")
        except Killed:
            raise Gone from None
        self.world.join(task)
        if not box:
            raise Gone
        value, error = box[0]
        if error is not None:
            raise error
        return value

    def check_free(self, rank: Rank, held: Held) -> None:
        """The agent must not count pages as used that it has just given back."""
        if left := held.names & rank.agent.memory.ledger._users.keys():
            self.fail(f"{rank.name}: {held.key} has ended, but {sorted(left)[:3]} are still in use")

    def check_unread(self, rank: Rank, held: Held) -> None:
        """No thread of the agent may be packing pages that it has given back (each request has a slot of its own)."""
        if self.reading[rank.worker is self.target, rank.rank, int(held.tables["state"][0])]:
            self.fail(f"{rank.name}: pages of {held.key} are free, and a thread still reads them")

    def await_free(self, rank: Rank, held: Held) -> None:
        """A fetch has ended: its pages are free, or will be soon."""
        bound = self.bound(12.0)
        while rank.alive and held.names & rank.agent.memory.ledger._users.keys():
            if bound.passed:
                self.fail(f"{rank.name}: pages of {held.key} were never freed")
                return
            self.world.sleep(0.01)

    def fail(self, what: str) -> None:
        """Note what must not be, and stop."""
        self.world.errors.append(what)
        self.world.stopping = True

    # -- the run -----------------------------------------------------------------------------------

    def run(self) -> Report:
        """Run it all, with production's modules in this world."""
        directory = SimpleNamespace(file_path="/nowhere", close=lambda: None)
        step, gather = Ledger._step, SourceSession._gather

        def watched_gather(session: SourceSession, *chunk: Any) -> Any:
            name = (session.program.edge.relay, session.program.edge.source, int(session.source.tables["state"][0]))
            self.reading[name] += 1
            try:
                return gather(session, *chunk)
            finally:
                self.reading[name] -= 1

        def checked_step(ledger: Ledger, hold: Hold, event: Event) -> State:
            after = step(ledger, hold, event)
            self._stepped(ledger, hold, after)
            return after

        logging.disable(logging.CRITICAL)
        try:
            with (
                installed(
                    self.world,
                    agent__service__ControlServer=self.network.server,
                    agent__peers__ControlClient=self.network.client,
                    agent__service__create_transport=self.network.transport,
                    agent__service___private_directory=lambda: directory,
                    agent__service__host_name=lambda: "host",
                    agent__source___ENDED_MAX=_REMEMBERED,
                    transport__memory___listeners={},
                    driver__packing=_Interrupted(self.world),
                    agent__serve__packing=_Interrupted(self.world),
                ),
                mock.patch.object(Ledger, "_step", checked_step),
                mock.patch.object(SourceSession, "_gather", watched_gather),
            ):
                self.world.run(self._main)
        finally:
            logging.disable(logging.NOTSET)
        return Report(
            seed=self.seed, transfers=self.number, errors=self.world.errors, outcomes=dict(self.outcomes),
            faults=dict(self.network.fired), virtual_s=self.world.now_s - 1000.0, steps=self.world.steps,
            trace=f"{self.world.trace:016x}",
        )  # fmt: skip

    def _main(self) -> None:
        for worker in (self.source, self.target):
            for rank in range(worker.tp):
                self._boot(worker, rank)
        while self.number < self.transfers and not self.world.stopping:
            self._round(min(_ROUND, self.transfers - self.number))
        self._close()

    def _boot(self, worker: Worker, rank: int) -> None:
        made = worker.boot(rank)
        self._ledgers[made.agent.memory.ledger] = made

    def _round(self, requests: int) -> None:
        kind = "rough" if self.faults else self.random.choice(("clean", "gentle", "rough", "rough"))
        self._set_faults(kind)
        last = self.number + requests
        workers = [self.world.spawn(self.world.outside, self._work, last, name="requests") for _ in range(_AT_ONCE)]
        chaos = self.world.spawn(self.world.outside, self._chaos, workers, name="chaos") if kind == "rough" else None
        for task in workers:
            self.world.join(task)
        if chaos is not None:
            self.world.join(chaos)
        self._set_faults("rest")
        self.world.sleep(LEASE_S * 3)
        for rank in (*self.living(self.source), *self.living(self.target)):
            self._check_idle(rank)

    def _set_faults(self, kind: str) -> None:
        r, network = self.random, self.network
        self.gentle = kind != "rough" or (bool(self.faults) and {*self.faults} <= {*_GENTLE})
        network.rates, self.world.stall = {}, 0.0
        if kind == "gentle":
            network.rates = {name: 0.1 for name in _GENTLE if r.random() < 0.5}
        elif kind == "rough":
            chosen = [name for name in (*MESSAGE_FAULTS, *CALL_FAULTS, "refuse") if r.random() < 0.25]
            network.rates = {name: r.choice((0.005, 0.03)) for name in chosen}
            if self.faults:
                network.rates = dict.fromkeys(self.faults, 0.05)
            if "stall" in self.faults or (not self.faults and r.random() < 0.25):
                self.world.stall, self.world.stall_s = 0.002, r.choice((0.01, 1.0))

    def _work(self, last: int) -> None:
        while self.number < last and not self.world.stopping:
            self.number += 1
            Request(self, self.number).run()

    def _chaos(self, workers: list[Any]) -> None:
        """Crashes and leaps of the clock at random moments, until the round's requests are over."""
        r, every = self.random, ("crash", "crash both", "leap")
        kinds = [k for k in every if (k in self.faults if self.faults else r.random() < 0.35)]
        while kinds and not all(task.done for task in workers):
            self.world.sleep(r.expovariate(2.0))
            kind = r.choice(kinds)
            self.network.fired[kind] += 1
            if kind == "leap":
                self.world.jump(r.random() * 3.0)
                continue
            for worker in r.sample((self.source, self.target), 1 + (kind == "crash both")):
                self._crash(worker, r.randrange(worker.tp))

    def _crash(self, worker: Worker, rank: int) -> None:
        old = worker.ranks[rank]
        if not (old.alive and old.ready):
            return
        for _ in range(self.random.randrange(200)):  # at any step, not only where time passes
            self.world.preempt()
        self._ledgers.pop(old.agent.memory.ledger, None)
        worker.crash(rank)
        self.world.sleep(self.random.random() * self.random.choice((0.01, 0.5)))
        worker.renew(rank)
        self._boot(worker, rank)

    # -- what must hold ------------------------------------------------------------------------------

    def _stepped(self, ledger: Ledger, hold: Hold, after: State) -> None:
        """After every transition of any hold."""
        rank = self._ledgers.get(ledger)
        if rank is None or not rank.alive:
            return
        engine = {name for held in rank.held.values() for name in held.names}
        if lost := ledger._users.keys() - engine:
            self.fail(f"{rank.name}: {sorted(lost)[:3]} are in use, but no request has them")
        if sum(ledger.transitions.values()) and any(not users for users in ledger._users.values()):
            self.fail(f"{rank.name}: a page is in no state")
        if after is State.READY:
            held = rank.promised.get(hold.units)
            if held is None:
                self.fail(f"{rank.name}: {hold.transfer} is READY in pages that nobody fetches into")
            else:
                rank.expect(held, "READY with wrong bytes")
        elif hold.table is TARGET and after is State.HANDED and hold.units not in rank.promised:
            self.fail(f"{rank.name}: {hold.transfer} was handed out without a fetch")

    def _check_idle(self, rank: Rank) -> None:
        """Nothing is underway: nothing may be left."""
        agent: Agent = rank.agent
        memory, source = agent.memory, agent.source
        counts = {state: n for state, n in memory.ledger.counts().items() if n}
        accepted = sum(task.name.startswith(f"pdxfer-{rank.rank}-serve") for task in rank.process.tasks)
        channels = [c for t in self.network.transports[rank.process] for c in t.inner._owned if hasattr(c, "_underway")]
        pooled = sum(len(idle) for idle in agent.peers._idle.values())
        left = {
            "pages": set(counts) - {"free"},
            "requests": list(rank.held),
            "staging": sum(arena.used_bytes for arena in memory._arenas.values()),
            "quarantined": source._quarantined,
            "offers": [r.offer.transfer for r in source._records.values() if not r.offer.ended],
            "sessions": [r.offer.transfer for r in source._records.values() if r.sessions or r.side is not None],
            "fetches": agent._fetches,
            "kept tickets": agent.keeper._leaving or agent.keeper._kept or agent.keeper._busy,
            "credits": sum(channel._underway for channel in channels),
            "channels": len(channels) - accepted - pooled,
            "threads": len(rank.process.tasks) - accepted - 2,
            "timelines": [t.transfer for t in agent.journal._live.values()],
            "records": len(source._records) > 2 * _REMEMBERED,
        }
        if left := {what: n for what, n in left.items() if n}:
            names = sorted(task.name for task in rank.process.tasks)
            self.fail(f"{rank.name} is idle, but has left {left}; threads {names}")
        for pool, at in rank.places.units.items():
            if not np.array_equal(rank.flat[at[rank.free[pool]]], rank.patterns[pool][rank.free[pool]]):
                self.fail(f"{rank.name}: a free page of {pool} was written to")
        agent.check_integrity()

    def _close(self) -> None:
        """Agents end, and with them every thread."""
        for rank in (*self.source.ranks, *self.target.ranks):
            if self.world.stopping:
                return
            bound = self.bound(15.0)
            self.call(rank, rank.agent.close)
            self.world.sleep(0.5)
            if bound.passed or rank.process.tasks or any(t.inner._owned for t in self.network.transports[rank.process]):
                names = sorted(task.name for task in rank.process.tasks)
                self.fail(f"{rank.name} closed, and left threads {names}")


def simulate(seed: int, transfers: int = 200, *, faults: Sequence[str] = (), stories: Sequence[str] = ()) -> Report:
    """Run one seed; errors of the simulation itself are raised."""
    # Garbage is collected between seeds only: it saves an eighth of the time, and no finalizer runs when it likes.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return Simulation(seed, transfers, faults=faults, stories=stories).run()
    finally:
        if collecting:
            gc.enable()
        gc.collect()
