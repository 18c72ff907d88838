"""Chaos: real rank processes that die, stop and come back while transfers are underway; what survives is counted.

    python -m tests.chaos kills --count 200
    python -m tests.chaos restarts --count 500
    python -m tests.chaos soak --count 300

Each prints what it did, and fails at the first thing that is not as promised: a byte that is wrong, a survivor that is
not ready again in time, a message that a dead process meant and another one believed, anything left behind.
``tests/test_chaos.py`` runs a few of each.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.failpoints import POINTS
from tests.pairs import wait_until
from tests.rank_process import Failed, RankProcess, joined

__all__ = ["KINDS", "READY_S", "SIDES", "Play", "main", "play"]

READY_S = 5.0
TOKENS, TIMEOUT_S, BUSY_S = 600, 8.0, 3.0
SOURCE = {"storage": {"pages": 256}}
TARGET = {
    "placement": "unified",
    "storage": {"page_tokens": 8, "kv_order": "HND", "conv_order": "TC", "pages": 512},
}
SMALL = {"chunk_bytes": 4096, "arena_bytes": 1 << 20, "window": 1, "lease_s": 3.0, "call_s": 5.0}
KINDS: dict[str, dict[str, Any]] = {
    "shm-packed": {"transports": ["shm"], "mode": "packed"},
    "shm-direct": {"transports": ["shm"], "mode": "direct"},
    "tcp": {"transports": ["tcp"]},
    "nixl": {
        "transports": ["nixl"], "transport_options": {"nixl": {"inline_bytes": 0}}, "mode": "packed",
        "lease_s": 5.0, "call_s": 20.0,
    },
}  # fmt: skip
#: Who dies -> ranks of the source worker P and of the target worker D; the last of its worker is the mortal one.
SIDES = {"source": (2, 1), "target": (2, 1), "sibling": (1, 2)}
#: How a transfer may end at its target when somebody dies, stops or restarts: with an error of these kinds, or whole.
ERRORS = ("AbortedError", "DeadlineError", "PeerError", "StaleError", "TicketError", "TransportError")

_POOL_THREADS = 3  # of control's pool, which grows with calls at the same moment and never shrinks

Cast = tuple[list[RankProcess], list[RankProcess]]


@dataclass
class Play:
    """Two workers of which one rank is mortal; every dead one is replaced by a fresh process.

    Attributes:
        survivors: those who live through it all. held: by them, when idle. spare: the mortal rank, met and idle.
    """

    kind: str
    side: str
    directory: Path
    survivors: list[RankProcess] = field(default_factory=list)
    spare: Any = None
    ready_s: list[float] = field(default_factory=list)
    held: list[dict[str, int]] = field(default_factory=list)
    made: list[RankProcess] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def new(self, worker: str, rank: int, **options: Any) -> RankProcess:
        """One more process of a worker."""
        number, (sources, targets) = next(self.numbers), SIDES[self.side]
        layout = {**SOURCE, "tp": sources} if worker == "P" else {**TARGET, "tp": targets}
        # Only where a target dies is a lease waited for; elsewhere a machine that stood still must not end one.
        lease = {} if self.side == "target" else {"lease_s": 15.0}
        config = {**SMALL, **KINDS[self.kind], **lease, **options}
        where = self.directory / str(number)
        self.made = [rank for rank in self.made if not rank.killed]
        self.made.append(RankProcess(where, layout=layout, rank=rank, seed=number, worker=worker, **config))
        return self.made[-1]

    def begin(self) -> None:
        """Start all of them."""
        sources, targets = SIDES[self.side]
        ranks = [("P", r) for r in range(sources)] + [("D", r) for r in range(targets)]
        for worker, rank in ranks:
            if (worker, rank) != self._mortal():
                self.survivors.append(self.new(worker, rank))
        self.spare = self.mortal()
        self.hand_over(self.spare)
        self._two_at_once()
        self.held = [rank.ask("held") for rank in self.survivors]
        for held in self.held:
            held["threads"] += _POOL_THREADS

    def _two_at_once(self) -> None:
        """Fill the pools of idle channels that survivors keep, as far as a strike will."""
        cast, keys = self.cast(self.spare), (self.key(), self.key())
        keepers = [target for target in cast[1] if target in self.survivors]
        for target in keepers:
            target.ask("gate", on="receive", chunk=0)
        for key in keys:
            self.fetch(cast, key, self.offer(cast, key), TIMEOUT_S)
        for target in keepers:
            target.ask("reached", channels=2 * len(cast[0]))
            target.ask("open_gate")
        for key, target in itertools.product(keys, cast[1]):
            found = target.ask("wait", key=key, alone=False)
            assert found["difference"] == "", found

    def _mortal(self) -> tuple[str, int]:
        sources, targets = SIDES[self.side]
        return ("P", sources - 1) if self.side == "source" else ("D", targets - 1)

    def mortal(self, **options: Any) -> RankProcess:
        """A fresh one of those that die."""
        return self.new(*self._mortal(), **options)

    def cast(self, mortal: RankProcess) -> Cast:
        """Source ranks and target ranks, with this one among them."""
        count = SIDES[self.side][0]
        ranks = [*self.survivors[: count - 1], mortal, *self.survivors[count - 1 :]]
        ranks = ranks if self.side == "source" else [*self.survivors, mortal]
        targets = ranks[count:]
        if len(targets) > 1:
            for rank in targets:
                rank.ask("siblings", addresses=[other.address for other in targets])
        return ranks[:count], targets

    def key(self) -> str:
        """A fresh transfer id."""
        return f"request-{next(self.numbers)}"

    def offer(self, cast: Cast, key: str, tokens: int = TOKENS) -> str:
        """Offer on all source ranks; returns the ticket."""
        return joined([rank.ask("offer", key=key, tokens=tokens) for rank in cast[0]])

    def fetch(self, cast: Cast, key: str, ticket: str, timeout_s: float, tokens: int = TOKENS) -> None:
        """Begin to fetch on all target ranks."""
        for target in cast[1]:
            target.ask("fetch", key=key, ticket=ticket, tokens=tokens, timeout_s=timeout_s)

    def hand_over(self, mortal: RankProcess, tokens: int = TOKENS) -> None:
        """A transfer that must succeed, compared byte for byte."""
        cast, key = self.cast(mortal), self.key()
        self.fetch(cast, key, self.offer(cast, key, tokens), 30.0, tokens)
        for target in cast[1]:
            found = target.ask("wait", key=key, alone=False)
            assert found["difference"] == "", found
        assert [source.ask("ended", key=key) for source in cast[0]] == ["completed"] * len(cast[0])

    def outcome(self, key: str, target: RankProcess, timeout_s: float) -> str:
        """How a fetch ended: whole and right, or by an error that says why, in time."""
        try:
            found = target.ask("wait", key=key, alone=False)
        except Failed as raised:
            error = raised
        else:
            assert found["difference"] == "", found
            return "whole"
        assert error.kind in ERRORS, error
        assert error.took_s < timeout_s + BUSY_S, error
        assert error.details["state"] == "free"
        return error.kind

    # -- one that dies or stops -----------------------------------------------------------------------

    def strike(self, point: str, number: int = signal.SIGKILL, timeout_s: float = TIMEOUT_S) -> str:
        """Let the mortal rank of one transfer die (or stop) at a failpoint; returns how the transfer ended.

        A transfer with another one, which the survivors have not met yet, must be right within READY_S, and afterwards
        they hold what they held at first, to the last descriptor.
        """
        found = POINTS[self.side].get(point)
        fresh = self.mortal()
        victim, other = (fresh, self.spare) if found and found.first else (self.spare, fresh)
        cast, key = self.cast(victim), self.key()
        ticket = self.offer(cast, key)
        if found is not None:
            victim.ask("arm", side=self.side, point=point, number=int(number))
        self._fetch_of_victim(victim, cast, key, ticket, timeout_s)
        if found is None:  # anywhere: in C code, too
            time.sleep(random.uniform(0, 0.03))
            victim.signal(number)
        _fallen(victim, number, point)
        began_s = time.monotonic()
        self.hand_over(other)
        self.ready_s.append(time.monotonic() - began_s)
        assert self.ready_s[-1] < READY_S, f"{point}: ready after {self.ready_s[-1]:.1f} s"
        ended = self._ended(victim, cast, key, timeout_s)
        if number == signal.SIGSTOP:
            self._revive(victim, cast, key, timeout_s)
        for rank, held in zip(self.survivors, self.held, strict=True):
            assert rank.ask("held", at_most=held)["pages"] == 0
        self.spare = other
        self.outcomes[ended] += 1
        return ended

    def _fetch_of_victim(self, victim: RankProcess, cast: Cast, key: str, ticket: str, timeout_s: float) -> None:
        """Begin on all target ranks; the victim may die before it answers."""
        sources, targets = cast
        self.fetch((sources, [target for target in targets if target is not victim]), key, ticket, timeout_s)
        if victim in targets:
            with suppress(BrokenPipeError):
                victim.tell("fetch", key=key, ticket=ticket, tokens=TOKENS, timeout_s=timeout_s)
                victim.tell("wait", key=key)

    def _ended(self, victim: RankProcess, cast: Cast, key: str, timeout_s: float) -> str:
        """How the transfer ended at those of it that live: at targets, if there is one."""
        sources, targets = ([rank for rank in ranks if rank is not victim] for ranks in cast)
        at_targets = [self.outcome(key, target, timeout_s) for target in targets]
        at_sources = [source.ask("ended", key=key).partition(":")[0].split()[0] for source in sources]
        return (at_targets or at_sources)[0]

    def _revive(self, victim: RankProcess, cast: Cast, key: str, timeout_s: float) -> None:
        """What stood still goes on, finds that it is late, and is as good as new."""
        victim.signal(signal.SIGCONT)
        if victim in cast[1]:
            victim.drain(timeout_s + BUSY_S)
        else:
            victim.ask("ended", key=key)
        self.hand_over(victim)
        assert victim.ask("held")["pages"] == 0
        victim.signal(signal.SIGKILL)

    # -- one that comes back at its address -----------------------------------------------------------

    def addresses(self) -> dict[str, Any]:
        """Fixed ones for the mortal rank, which it keeps through restarts."""
        for name in ("control", "data"):
            (self.directory / name).mkdir(mode=0o700)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        scheme = KINDS[self.kind]["transports"][0]
        listen = f"shm://{self.directory}/data/s" if scheme == "shm" else f"{scheme}://127.0.0.1:{port}"
        return {"control": [f"unix://{self.directory}/control/s"], "listen": {scheme: listen}}

    def restart(self, addresses: dict[str, Any], *, late: bool, flights: int = 3) -> int:
        """Kill the mortal source while its readers stand still mid-transfer, and start it again where it was.

        The readers go on and say to the new process what was meant for the old one; it believes none of it. Returns
        how many such messages it has refused: most when they stop ``late``, with all bytes of one edge in.
        """
        victim, (target,) = self.spare, self.survivors[-1:]
        cast, keys = self.cast(victim), [self.key() for _ in range(flights)]
        tickets = [self.offer(cast, key, 200) for key in keys]
        if late:
            target.ask("arm", side="target", point="before it is done", number=int(signal.SIGSTOP))
        for key, ticket in zip(keys, tickets, strict=True):
            target.tell("fetch", key=key, ticket=ticket, tokens=200, timeout_s=TIMEOUT_S)
        if not late:
            time.sleep(random.uniform(0, 0.02))
            target.signal(signal.SIGSTOP)
        _fallen(target, signal.SIGSTOP, "before it is done")
        victim.signal(signal.SIGKILL)
        self.spare = self.mortal(**addresses)
        target.signal(signal.SIGCONT)
        target.drain(BUSY_S + TIMEOUT_S)
        for key in keys:
            self.outcomes[self.outcome(key, target, TIMEOUT_S)] += 1
        for key, ticket in zip(keys, tickets, strict=True):  # once more, from the start
            target.ask("fetch", key=key, ticket=ticket, tokens=200, timeout_s=TIMEOUT_S)
            assert self.outcome(key, target, TIMEOUT_S) != "whole", "a ticket of a dead process was good"
        for source in cast[0][:-1]:
            for key in keys:
                source.ask("ended", key=key)
        assert not self.spare.ask("counters").keys() & {"offered", "offers_completed"}
        self.hand_over(self.spare)
        counters = self.spare.ask("counters")
        assert (counters["offered"], counters["offers_completed"]) == (1, 1)
        refused: int = counters["refused"]
        return refused

    # -- a long life ----------------------------------------------------------------------------------

    def soak(self, seconds: float, *, kill_s: float = 20.0) -> tuple[int, list[float]]:
        """Mixed sizes, one in ten cancelled, a kill each ``kill_s``: what survivors hold must stay flat.

        Returns how many transfers there were, and by what share the memory of each survivor has grown, from the
        third sixth of the time to the last: before it, pools and what is remembered fill.
        """
        began_s = time.monotonic()
        struck_s, count, memory = began_s, 0, list[list[int]]()
        while (now_s := time.monotonic()) < began_s + seconds:
            if now_s > struck_s + kill_s:
                self.strike(random.choice([*POINTS[self.side]]))
                struck_s = now_s
            self._one_of_many(random.randrange(1, 1200), cancel=random.random() < 0.1)
            count += 1
            if now_s > began_s + seconds / 2:
                memory.append([_resident(rank) for rank in self.survivors])
        for rank, held in zip(self.survivors, self.held, strict=True):
            assert rank.ask("held", at_most=held)["pages"] == 0
        third = max(1, len(memory) // 3)
        early, late = (
            [sum(column) / third for column in zip(*part, strict=True)] for part in (memory[:third], memory[-third:])
        )
        return count, [after / before - 1 for before, after in zip(early, late, strict=True)]

    def _one_of_many(self, tokens: int, *, cancel: bool) -> None:
        if not cancel:
            self.hand_over(self.spare, tokens)
            return
        cast, key = self.cast(self.spare), self.key()
        self.fetch(cast, key, self.offer(cast, key, tokens), TIMEOUT_S, tokens)
        for target in cast[1]:
            target.ask("cancel", key=key)
            self.outcome(key, target, TIMEOUT_S)
        for source in cast[0]:
            source.ask("ended", key=key)


def _resident(rank: RankProcess) -> int:
    return int(Path(f"/proc/{rank.process.pid}/statm").read_text().split()[1])


def _fallen(victim: RankProcess, number: int, point: str) -> None:
    """Wait until the process is dead or stopped."""
    if number == signal.SIGKILL:
        victim.process.join(60.0)
        assert victim.process.exitcode == -signal.SIGKILL, f"{point} was not reached"
        victim.killed = True
        return
    stat = Path(f"/proc/{victim.process.pid}/stat")
    stopped = wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", timeout_s=60.0)
    assert stopped, f"{point} was not reached"


@contextmanager
def play(kind: str, side: str) -> Iterator[Play]:
    """Living workers that have met."""
    directory = Path(tempfile.mkdtemp(prefix="pdx"))
    found, failed = Play(kind, side, directory), True
    try:
        found.begin()
        yield found
        failed = False
    finally:
        for rank in found.made:
            rank.__exit__(RuntimeError if failed else None, None, None)
        shutil.rmtree(directory)


# -- the command -----------------------------------------------------------------------------------


def kills(options: argparse.Namespace) -> None:
    """Every failpoint of every side in turn, on every transport."""
    scenes = list(itertools.product(options.kinds, SIDES))
    share, total = -(-options.count // len(scenes)), 0
    for kind, side in scenes:
        points = itertools.cycle([*POINTS[side], "anywhere"])
        with play(kind, side) as found:
            for point in itertools.islice(points, share):
                total += 1
                stop = options.stops and total % options.stops == 0 and point != "anywhere"
                try:
                    found.strike(point, *((signal.SIGSTOP, 3.0) if stop else ()))
                except BaseException:
                    print(f"{kind} {side}: {'stopped' if stop else 'killed'} {point}", flush=True)
                    raise
            slowest, outcomes = max(found.ready_s), dict(found.outcomes)
        print(f"{kind:11} {side:8} {share} fell, {outcomes}; ready after {slowest:.2f} s at most", flush=True)
    print(f"{total} fell, nothing was left behind")


def restarts(options: argparse.Namespace) -> None:
    """A source at the same address, with transfers in flight."""
    share = -(-options.count // len(options.kinds))
    for kind in options.kinds:
        refused, step = 0, max(1, share // 5)
        with play(kind, "source") as found:
            addresses = found.addresses()
            found.spare.signal(signal.SIGKILL)
            found.spare = found.mortal(**addresses)
            for number in range(1, share + 1):
                refused += found.restart(addresses, late=number % 2 == 0)
                if number % step == 0:
                    said = f"in flight: {dict(found.outcomes)}; {refused} messages of old epochs refused, 0 accepted"
                    print(f"{kind:11} {number} restarts, {said}", flush=True)


def soak(options: argparse.Namespace) -> None:
    """Mixed sizes, cancels and kills; ``--count`` is seconds."""
    for kind in options.kinds:
        with play(kind, "source") as found:
            count, growth = found.soak(options.count / len(options.kinds))
        said = ", ".join(f"{share:+.2%}" for share in growth)
        print(
            f"{kind:11} {count} transfers, {len(found.ready_s)} kills; resident memory of survivors {said}", flush=True
        )
        assert max(growth) < 0.02, "memory grows"


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True)

    def command(run: Callable[[argparse.Namespace], None], count: int) -> argparse.ArgumentParser:
        added = commands.add_parser(run.__name__, help=run.__doc__)
        added.set_defaults(run=run)
        added.add_argument("--count", type=int, default=count)
        added.add_argument("--kinds", type=lambda text: text.split(","), default=["shm-packed", "shm-direct", "tcp"])
        return added

    command(kills, 200).add_argument("--stops", type=int, default=8, help="every how many one is a SIGSTOP; 0: none")
    command(restarts, 500)
    command(soak, 300)
    options = parser.parse_args(arguments)
    began_s = time.monotonic()
    options.run(options)
    print(f"in {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
