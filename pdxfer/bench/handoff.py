"""Bench of hand-offs: whole transfers between the agents of two workers, beside the same bytes moved by hand.

In come a case and ways to move it; out come rows of times, bytes and shares of a ceiling that is measured in turn with
them. A hand-off's time is the source's offers and the target's fetches, from the first rank's begin to the last one's
end, with every byte in its page; the router's part (a ticket's way between engines) is not in it. Afterwards the
target's memory is cleared, one more hand-off made, and every byte of both workers compared with what it must be.

::

    source ranks   offer ─tickets─▶ this process ─▶ target ranks   fetch ─ Open ─ move, verify ─ Complete ─▶ READY
                   |timed|                                         |------------------- timed -----------------|
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pdxfer.bench import ranks
from pdxfer.bench.case import Case, End
from pdxfer.bench.ceiling import Ceiling
from pdxfer.bench.engines import ENGINES, Pair, missing
from pdxfer.bench.measure import Tick, quantile
from pdxfer.bench.peer import Away, Child, Clock, Group, Line, Peers
from pdxfer.bench.ranks import Way
from pdxfer.errors import ExhaustedError, InternalError, MisuseError, PdxferError
from pdxfer.ticket import Ticket

__all__ = ["Options", "bench_handoff", "serve_source"]

_STAGES = {"plan": "plan", "negotiate": "negotiate", "pack": "pack", "move": "wire", "unpack": "unpack",
           "verify": "verify"}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a case is measured.

    Attributes:
        label: of the case, for the tables. facts: what else identifies it there (model, layers).
        ways: measured in turn; all of one transport. Those with and without a sidecar have agents of their own, the
            others share them.
        threads: of the ceiling; 0 is one per edge, at most one per core.
        processes: one for each rank, one for each worker, or this one for all.
        engines: whether others move the same bytes, too, where the ceiling is host memory.
        peer: address of ``serve_source``, where the source is on another host.
    """

    case: Case
    label: str = "hand-off"
    facts: dict[str, Any] = field(default_factory=dict)
    ways: tuple[Way, ...] = (Way(),)
    runs: int = 7
    warmup: int = 1
    threads: int = 0
    processes: Literal["rank", "worker", "one"] = "rank"
    engines: bool = True
    verify: bool = True
    peer: str = ""

    def __post_init__(self) -> None:
        if self.runs < 1 or self.warmup < 1 or self.threads < 0 or not self.ways:
            raise MisuseError(f"at least one run, one warm-up (the pages' first touch) and one way: {self.ways}")
        if len({(way.transport, way.chunk_bytes, way.threads) for way in self.ways}) > 1:
            raise MisuseError("ways that are measured in turn differ in mode, digests and sidecar only")


# -- both workers --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Outcome:
    offer_s: float
    fetch_s: float
    edges: list[dict[str, Any]]

    @property
    def total_s(self) -> float:
        return self.offer_s + self.fetch_s

    @property
    def nbytes(self) -> int:
        return sum(edge["nbytes"] for edge in self.edges)

    @property
    def wire_bytes(self) -> int:
        return sum(edge["nbytes"] for edge in self.edges if not edge["relay"])


class _Workers:
    """The agents of both workers. A context manager."""

    def __init__(self, options: Options, way: Way, clock: Clock) -> None:
        self.case, self._stack, self._number, self._edges = options.case, ExitStack(), 0, 0
        processes = "one" if way.transport == "memory" else options.processes
        try:
            if options.peer:
                away = Away(options.peer, clock, case=self.case.to_json(), way=way.to_json())
                self.source: Peers = _Remote(self._stack.enter_context(away))
            else:
                self.source, _ = _local(self.case, way, "prefill", processes, clock, self._stack)
            self.target, addresses = _local(self.case, way, "decode", processes, clock, self._stack)
            self.target.ask(do="siblings", addresses=addresses)
        except BaseException:
            self._stack.close()
            raise

    def once(self, way: Way) -> _Outcome:
        """Hand all requests over, at once."""
        self._number += 1
        transfers = [f"bench-{self._number}-{i}" for i in range(self.case.concurrency)]
        offers = self.source.ask(do="offer", transfers=transfers)
        parts = [rank_tickets for offer in offers for _, rank_tickets in offer["tickets"]]
        tickets = [Ticket.join([Ticket.decode(part) for part in one]).encode() for one in zip(*parts, strict=True)]
        fetched = self.target.ask(do="fetch", tickets=tickets, mode=way.mode, digests=way.digests)
        fetch_s = max(f["ended"] for f in fetched) - min(f["started"] for f in fetched)
        edges = [edge for f in fetched for edge in f["edges"]]
        self._edges += len(edges)
        return _Outcome(max(offer["seconds"] for offer in offers), fetch_s, edges)

    def check(self, way: Way) -> int:
        """Clear the target, hand over once more, and compare every byte of both; returns bytes of the target."""
        self.target.ask(do="clear")
        self.once(way)
        self.source.ask(do="check")
        return sum(int(found["nbytes"]) for found in self.target.ask(do="check"))

    def facts(self) -> dict[str, Any]:
        """Control calls for each edge of each request, and the most anonymous memory that a process has."""
        found = [*self.source.ask(do="facts"), *self.target.ask(do="facts")]
        calls: Counter[str] = Counter()
        for one in found:
            calls.update(one["calls"])
        calls.pop("describe", None)
        return {
            "calls_per_edge": calls.total() / (self._edges * self.case.concurrency),
            "own_bytes_max": max(one["own_bytes"] for one in found),
        }

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *exc: Any) -> None:
        for peers in (self.source, self.target):
            peers.close()  # all at once: each then only has to be waited for
        self._stack.__exit__(*exc)


def _local(
    case: Case, way: Way, end: End, processes: str, clock: Clock, stack: ExitStack, host: str = ""
) -> tuple[Peers, list[Any]]:
    """Start one worker's agents here; returns them and the control addresses by rank."""
    every = list(range(len(case.layout(end))))
    groups = [[rank] for rank in every] if processes == "rank" else [every]
    asked = {"case": case.to_json(), "way": way.to_json(), "end": end, "host": host}
    inside = processes == "one"
    lines = [
        stack.enter_context(Child(ranks.serve, clock, inside=inside, **asked, ranks=group))  # type: ignore[arg-type]
        for group in groups
    ]
    return Group(lines), [address for line in lines for address in line.hear()["addresses"]]


class _Remote:
    """A source on another host, behind ``serve_source``."""

    def __init__(self, line: Line) -> None:
        self._line = line
        line.hear()

    def ask(self, **question: Any) -> list[dict[str, Any]]:
        """Ask all its ranks; their answers in order."""
        found: list[dict[str, Any]] = self._line.ask(**question)["answers"]
        return found

    def close(self) -> None:
        """Nobody asks any more."""
        self._line.close()


def serve_source(line: Line, *, case: dict[str, Any], way: dict[str, Any], host: str) -> None:
    """Play the source for a bench on another host."""
    with ExitStack() as stack:
        group, addresses = _local(Case.from_json(case), Way(**way), "prefill", "rank", line.clock, stack, host)
        line.tell(addresses=addresses)
        for question in line.questions():
            line.tell(answers=group.ask(**question))


# -- measuring -----------------------------------------------------------------------------------


def bench_handoff(options: Options, tick: Tick, clock: Clock) -> dict[str, Any]:
    """Measure one case; returns a JSON-ready value with one row per way, engine, and for the ceiling.

    Raises:
        DeadlineError: the clock was over before anything was measured. PdxferError: a hand-off failed.
        CorruptError: the bytes are not what they must be.
    """
    notes: list[str] = []
    _check_memory(options)
    with ExitStack() as stack:
        first_ways = {way.sidecar: way for way in reversed(options.ways)}
        made = {sidecar: stack.enter_context(_Workers(options, way, clock)) for sidecar, way in first_ways.items()}
        workers = [made[way.sidecar] for way in options.ways]
        tick(f"{options.label}: warm-up")
        ready = zip(options.ways, workers, strict=True)
        first, *_ = [each.once(way) for way, each in ready for _ in range(options.warmup)]
        transport = "/".join(sorted({edge["transport"] for edge in first.edges if not edge["relay"]}))
        chunk_bytes, threads = options.ways[0].chunk_bytes, _threads(options, first)
        with Ceiling(options.case, transport, chunk_bytes=chunk_bytes, threads=threads, clock=clock) as ceiling:
            ceiling.run()
            rounds = _rounds(options, workers, ceiling, tick, clock, notes)
            verified = 0
            if options.verify:
                tick(f"{options.label}: verify")
                ceiling.check()
                verified = sum(each.check(way) for way, each in zip(options.ways, workers, strict=True))
            host_memory, name, logical = not ceiling.by_hand, ceiling.name, int(ceiling.facts["runs"])
            threads = int(ceiling.facts["threads"])
        facts = [{**each.facts(), "verified_bytes": verified} for each in workers]
    base = _identity(options, transport)
    ceilings = [seconds for turn in rounds for seconds, _ in turn]
    nbytes = first.nbytes
    more = {"ceiling_threads": threads, "descriptors_logical": logical}
    rows = [{**base, **_row(name, "ceiling", ceilings, ceilings, nbytes), **more}]
    for way, fact, found in zip(options.ways, facts, zip(*rounds, strict=True), strict=True):
        rows.append({**base, **_handoff_row(way, found, logical), **fact})
    _compare_sidecar(options.ways, rows[1:], rounds)
    if options.engines and host_memory:
        rows += [{**base, **row} for row in _engine_rows(options, ceilings, nbytes, tick, clock, notes)]
    return {"what": _title(options, transport), "rows": rows, "edges": _plain_edges(first), "notes": notes}


def _check_memory(options: Options) -> None:
    """Refuse what would not fit: both workers' caches, and as much again for what they are compared with."""
    ends: tuple[End, End] = ("prefill", "decode")
    caches = sum(r.nbytes for end in ends for rank in options.case.layout(end).ranks for r in rank.regions)
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) << 10 for line in file if line.startswith("MemAvailable"))
    times = 1 + len({way.sidecar for way in options.ways})
    if times * caches > 0.9 * free:
        what = f"{options.label} needs {times * caches / 2**30:.1f} GiB, this machine has {free / 2**30:.1f} free"
        raise ExhaustedError(what, hint="fewer --layers, --tokens or --concurrency")


def _rounds(
    options: Options, workers: Sequence[_Workers], ceiling: Ceiling, tick: Tick, clock: Clock, notes: list[str]
) -> list[list[tuple[float, _Outcome]]]:
    """Run after run, each way with the ceiling right before it; ends early when the time would not do."""
    found: list[list[tuple[float, _Outcome]]] = []
    before_s = clock.left_s()
    for number in range(options.runs):
        left_s = clock.left_s()
        if number and left_s < 3 * (before_s - left_s):
            notes.append(f"{options.label}: {number} of {options.runs} runs, since --max-time comes to its end")
            break
        before_s = left_s
        turn = []
        for way, each in zip(options.ways, workers, strict=True):
            tick(f"{options.label}: {number + 1} of {options.runs}")
            turn.append((ceiling.run(), each.once(way)))
        found.append(turn)
    return found


def _threads(options: Options, first: _Outcome) -> int:
    """Of the ceiling: as many as copy at the same time in the hand-off, unless there are fewer cores."""
    at_once, cores = len(first.edges) * options.case.concurrency, len(os.sched_getaffinity(0))
    processes = options.case.decode_tp if options.processes == "rank" else 1
    return options.threads or min(cores, at_once, processes * (options.ways[0].threads or cores))


def _identity(options: Options, transport: str) -> dict[str, Any]:
    case = options.case
    names = ("prefill_tp", "decode_tp", "page_tokens", "tokens", "concurrency", "fragmentation", "seed", "placement")
    return {"case": options.label, **options.facts, **{n: getattr(case, n) for n in names}, "transport": transport}


def _title(options: Options, transport: str) -> str:
    case = options.case
    model = options.facts.get("model", case.spec.model)
    return (
        f"{model}, {case.spec.num_layers} layers, {case.tokens:,} tokens x {case.concurrency}, TP {case.prefill_tp} to"
        f" {case.decode_tp}, {case.page_tokens}-token pages, fragmentation {case.fragmentation:g}, {transport}"
    )


def _row(name: str, kind: str, seconds: Sequence[float], ceilings: Sequence[float], nbytes: int) -> dict[str, Any]:
    """Times of one row; its share of the ceiling is of each run beside the ceiling's right before it."""
    shares = [100 * c / s for c, s in zip(ceilings, seconds, strict=True)]
    p50, p90, p99 = (quantile(seconds, q) * 1e3 for q in (0.5, 0.9, 0.99))
    return {
        "row": name,
        "kind": kind,
        "runs": len(seconds),
        "min_ms": min(seconds) * 1e3,
        "p50_ms": p50,
        "p90_ms": p90,
        "p99_ms": p99,
        "spread_pct": 100 * (p90 - quantile(seconds, 0.1) * 1e3) / p50,
        "gb_per_s": nbytes / p50 / 1e6,
        "pct_of_ceiling": quantile(shares, 0.5),
        "pct_of_ceiling_p10": quantile(shares, 0.1),
        "pct_of_ceiling_p90": quantile(shares, 0.9),
        "bytes_payload": nbytes,
    }


def _handoff_row(way: Way, found: Sequence[tuple[float, _Outcome]], logical: int) -> dict[str, Any]:
    outcomes, ceilings = [outcome for _, outcome in found], [seconds for seconds, _ in found]
    total = [o.total_s for o in outcomes]
    one = outcomes[-1]
    network = [edge for edge in one.edges if not edge["relay"]]
    stages: dict[str, list[float]] = {}
    for outcome in outcomes:
        spent: Counter[str] = Counter()
        for edge in outcome.edges:
            spent.update({_STAGES.get(name, name): seconds for name, seconds in edge["seconds"].items()})
        for name in {*spent, *_STAGES.values()}:
            stages.setdefault(name, []).append(spent[name])
    mode = "/".join(sorted({edge["mode"] for edge in network}))
    if len({(o.nbytes, o.wire_bytes) for o in outcomes}) > 1:
        raise InternalError("two hand-offs of one case moved different numbers of bytes")
    name = f"pdxfer {mode}, {'digests' if way.digests else 'no digests'}{', sidecar' if way.sidecar else ''}"
    return {
        **_row(name, "pdxfer", total, ceilings, one.nbytes),
        "mode": mode,
        "digests": way.digests,
        "memory": way.memory,
        "sidecar": way.sidecar,
        "offer_p50_ms": 1e3 * quantile([o.offer_s for o in outcomes], 0.5),
        "fetch_p50_ms": 1e3 * quantile([o.fetch_s for o in outcomes], 0.5),
        "added_p50_ms": 1e3 * quantile([t - c for t, c in zip(total, ceilings, strict=True)], 0.5),
        **{f"{name}_ms": 1e3 * quantile(seconds, 0.5) for name, seconds in sorted(stages.items())},
        "descriptors_logical": logical,
        "descriptors_posted": sum(edge["messages"] for edge in network),
        "bytes_wire": one.wire_bytes,
        "dedup_ratio": one.nbytes / one.wire_bytes if one.wire_bytes else 1.0,
    }


def _compare_sidecar(
    ways: Sequence[Way], rows: Sequence[dict[str, Any]], rounds: Sequence[Sequence[tuple[float, _Outcome]]]
) -> None:
    """Add to a sidecar's row what it costs over the same way embedded: medians over runs, each with its neighbour."""
    for number, way in enumerate(ways):
        other = replace(way, sidecar=False)
        if not way.sidecar or other not in ways:
            continue
        pairs = [(turn[number][1].total_s, turn[ways.index(other)][1].total_s) for turn in rounds]
        rows[number]["sidecar_ratio"] = quantile([here / there for here, there in pairs], 0.5)
        rows[number]["sidecar_added_ms"] = 1e3 * quantile([here - there for here, there in pairs], 0.5)


def _plain_edges(outcome: _Outcome) -> list[dict[str, Any]]:
    return [{name: value for name, value in edge.items() if name != "seconds"} for edge in outcome.edges]


def _engine_rows(
    options: Options, ceilings: Sequence[float], nbytes: int, tick: Tick, clock: Clock, notes: list[str]
) -> Iterator[dict[str, Any]]:
    """Others on the same bytes. Their idle threads take time, so the ceiling is not measured beside them again."""
    middle = quantile(ceilings, 0.5)
    for engine in ENGINES:
        if why := missing(engine):
            notes.append(f"{engine.name} can't be used here: {why}")
            continue
        tick(f"{options.label}: {engine.name}")
        seconds: list[float] = []
        verified = 0
        try:
            with Pair(engine, options.case, clock) as pair:
                for number in range(options.warmup + options.runs):
                    spent = pair.run()
                    if number >= options.warmup:
                        seconds.append(spent)
                if options.verify:
                    verified = pair.check()
        except PdxferError as error:
            notes.append(f"{engine.name} after {len(seconds)} runs: {error.message}")
        if seconds:
            row = _row(engine.name, "engine", seconds, [middle] * len(seconds), nbytes)
            posted = {"descriptors_logical": pair.descriptors, "descriptors_posted": pair.descriptors}
            yield {**row, **posted, "bytes_wire": nbytes, "dedup_ratio": 1.0, "verified_bytes": verified}
