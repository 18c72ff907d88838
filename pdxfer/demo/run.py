"""The demo's parent process: starts two workers and a reference, routes the ticket, and compares what they say.

In come ``Options``; out goes an ``Outcome``, or the first error of any process. The parent is the router and the judge:
it holds no model, no cache and no agent, and imports no tensor library.

Processes come from multiprocessing's fork server, which has imported torch and transformers once and started no
thread, so that a dozen ranks start in seconds. All of them are gone when ``run_demo`` returns or raises.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np

from pdxfer.bench.measure import contiguous_copy
from pdxfer.demo.models import variant
from pdxfer.demo.outcome import Held, Outcome, compare_states, kinds, timing
from pdxfer.demo.worker import PATIENCE_S, PRELOAD, ROUNDS, Job, Link, array_from, rank_main
from pdxfer.errors import DeadlineError, MisuseError, PdxferError, PeerError
from pdxfer.spec import CacheSpec
from pdxfer.ticket import Ticket

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

    from pdxfer.agent.spawn import DaemonProcess

__all__ = ["ALL_PAIRS", "Options", "run_demo"]

#: (prefill TP, decode TP) of ``--all``.
ALL_PAIRS = ((4, 2), (2, 4), (3, 2), (1, 4))

#: Options that an outcome repeats.
_SHOWN = ("model", "prefill_tp", "decode_tp", "prompt_tokens", "prefill_page_tokens", "decode_page_tokens")
_COPY_BYTES = 64 << 20  # larger than caches
_SIGNAL_SEEN_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run. ``transport`` is a scheme; ``steps`` tokens follow the first; no wait is longer than ``timeout_s``.

    With ``sidecar`` each worker's agents live in a daemon's process, not in its ranks'.
    """

    model: str = "qwen3-next"
    prefill_tp: int = 4
    decode_tp: int = 2
    prompt_tokens: int = 1000
    transport: str = "shm"
    prefill_page_tokens: int = 16
    decode_page_tokens: int = 10
    steps: int = 8
    seed: int = 0
    timeout_s: float = 120.0
    sidecar: bool = False

    def __post_init__(self) -> None:
        sizes = ("prefill_tp", "decode_tp", "prompt_tokens", "prefill_page_tokens", "decode_page_tokens", "steps")
        for name in sizes:
            if getattr(self, name) < 1:
                raise MisuseError(f"{name} must be at least 1, got {getattr(self, name)}")
        variant(self.model, (self.prefill_tp, self.decode_tp))


class _Process:
    """One process of the demo, and the link to it."""

    def __init__(self, context: Any, job: Job) -> None:
        mine, theirs = context.Pipe()
        self.job, self.link = job, Link(mine)
        self.process: ForkServerProcess = context.Process(target=rank_main, args=(job, theirs), name=job.name)
        self.process.start()
        theirs.close()

    def receive(self, event: str) -> dict[str, Any]:
        """The next event, which must be this one; raises what the process reported, or PeerError when it died."""
        try:
            return self.link.receive(event, 0.0)
        except PeerError as error:
            self.process.join(timeout=1.0)
            code = self.process.exitcode
            raise PeerError(f"{self.job.name} {error.message} (exit code {code})") from error

    def close(self) -> None:
        """End the process if it still runs."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.link.connection.close()


class _Group:
    """Processes that do the same."""

    def __init__(self, processes: Sequence[_Process], timeout_s: float) -> None:
        self.processes, self.timeout_s = processes, timeout_s

    def tell(self, event: str, **values: Any) -> None:
        """Send the same event to all."""
        for process in self.processes:
            process.link.send(event, **values)

    def gather(self, event: str) -> list[dict[str, Any]]:
        """Wait for one event of each, in rank order. The first error of any ends the wait: others may wait for it."""
        found: dict[_Process, dict[str, Any]] = {}
        deadline_s = time.monotonic() + self.timeout_s
        while pending := {p.link.connection: p for p in self.processes if p not in found}:
            ready = wait(list(pending), timeout=max(0.0, deadline_s - time.monotonic()))
            if not ready:
                names = ", ".join(p.job.name for p in pending.values())
                raise DeadlineError(f"no {event!r} within {self.timeout_s:g} s from {names}")
            for connection in ready:
                process = pending[connection]  # type: ignore[index] # wait returns what it was given
                found[process] = process.receive(event)
        return [found[process] for process in self.processes]


@contextmanager
def _started(options: Options) -> Iterator[tuple[_Group, _Group, _Group]]:
    """Prefill ranks, decode ranks and the reference; gone, with their directory, at the end."""
    for library in ("torch", "transformers"):
        if find_spec(library) is None:
            raise MisuseError(f"the demo needs {library}", hint="pip install 'pdxfer[hf]'")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    processes: list[_Process] = []

    def start(role: str, tp: int, page_tokens: int) -> _Group:
        ranks = range(tp)
        group = [_Process(context, _job(options, role, rank, tp, page_tokens, directory)) for rank in ranks]
        processes.extend(group)
        return _Group(group, options.timeout_s)

    with tempfile.TemporaryDirectory(prefix="pdxfer-demo-") as directory, ExitStack() as daemons:
        try:
            if options.sidecar:
                for role in ("prefill", "decode"):
                    daemons.enter_context(_daemon(options, role, directory))
            yield (
                start("prefill", options.prefill_tp, options.prefill_page_tokens),
                start("decode", options.decode_tp, options.decode_page_tokens),
                start("reference", 1, 1),
            )
        except PdxferError as error:
            if killed := _killed(processes):
                raise killed from error
            raise
        finally:
            for process in processes:
                process.close()


def _killed(processes: Sequence[_Process]) -> PeerError | None:
    """The first process that a signal ended: others then fail as well, and may say so before we see it."""
    wait([p.process.sentinel for p in processes], timeout=_SIGNAL_SEEN_S)
    for process in processes:
        if (process.process.exitcode or 0) < 0:
            return PeerError(f"{process.job.name} ended (exit code {process.process.exitcode})")
    return None


def _job(options: Options, role: str, rank: int, tp: int, page_tokens: int, directory: str) -> Job:
    return Job(
        role=role, rank=rank, tp=tp, tp_sizes=(options.prefill_tp, options.decode_tp), model=options.model,
        seed=options.seed, prompt_tokens=options.prompt_tokens, steps=options.steps, page_tokens=page_tokens,
        transports=(options.transport,), directory=directory, timeout_s=options.timeout_s,
        sidecar=_socket(directory, role) if options.sidecar and role != "reference" else "",
    )  # fmt: skip


def _socket(directory: str, role: str) -> str:
    return f"{directory}/{role}/agent.sock"


def _daemon(options: Options, role: str, directory: str) -> DaemonProcess:
    """The daemon of one worker; as patient as embedded agents, see ``worker.py``."""
    from pdxfer.agent.spawn import DaemonProcess

    agent = {"transports": (options.transport,), "call_s": PATIENCE_S, "stall_s": PATIENCE_S}
    settings = {"worker": role, "drain_s": 0, "log_level": "warning"}
    settings |= {f"agent.{key}": value for key, value in agent.items()}
    return DaemonProcess(_socket(directory, role), settings)


def run_demo(options: Options, progress: Callable[[str], None] = lambda _: None) -> Outcome:
    """Move one request between two workers and compare every byte, logit and token.

    Args:
        progress: called with what begins now, for people.

    Raises:
        PdxferError: a process failed, died or did not answer in time; none is left.
    """
    started_s = time.perf_counter()
    count = options.prefill_tp + options.decode_tp
    progress(f"starting {count} ranks and a single-process run of {options.model}")
    with _started(options) as (prefill, decode, reference):
        spec = CacheSpec.from_json(reference.gather("built")[0]["spec"])
        prefill.gather("built")
        addresses = [[rank, built["address"]] for rank, built in enumerate(decode.gather("built"))]
        progress(f"prefill: {options.prompt_tokens:,} tokens on {_ranks(options.prefill_tp)}")
        source = prefill.gather("state")
        rounds = []
        for number in range(ROUNDS):
            again = ", now that they have met" if number else ""
            progress(f"hand-off to {_ranks(options.decode_tp)} over {options.transport}{again}")
            rounds.append(_hand_off(prefill, decode, addresses))
        progress(f"decode: {options.steps} tokens on {_ranks(options.decode_tp)}")
        generated = decode.gather("result")
        expected = reference.gather("result")[0]
        for group in (decode, prefill, reference):
            group.tell("end")
            group.gather("ended")
        copy_bytes_per_s = contiguous_copy(_COPY_BYTES, 5)
    progress("comparing states, logits and tokens")
    said = _Said(spec, source, rounds, generated, array_from(expected["logits"]), copy_bytes_per_s)
    return _outcome(options, said, time.perf_counter() - started_s)


def _ranks(n: int) -> str:
    return f"{n} rank{'s' if n > 1 else ''}"


def _hand_off(prefill: _Group, decode: _Group, addresses: list[list[Any]]) -> list[dict[str, Any]]:
    """Route one ticket from all prefill ranks to all decode ranks; returns what the decode ranks then hold."""
    ticket = Ticket.join([Ticket.decode(said["ticket"]) for said in prefill.gather("offered")])
    decode.tell("fetch", ticket=ticket.encode(), siblings=addresses)
    states = decode.gather("state")
    for process, said in zip(prefill.processes, prefill.gather("offer ended"), strict=True):
        if said["outcome"] != "completed":
            raise PeerError(f"{process.job.name}: its offer ended as {said['outcome']!r}")
    return states


@dataclass(frozen=True, slots=True)
class _Said:
    """What all processes said; lists are in rank order, ``rounds`` has one list per hand-off."""

    spec: CacheSpec
    source: list[dict[str, Any]]
    rounds: list[list[dict[str, Any]]]
    generated: list[dict[str, Any]]
    reference: Any
    copy_bytes_per_s: float


def _outcome(options: Options, said: _Said, total_s: float) -> Outcome:
    there = [held for rank in said.source for held in _held(rank["state"])]
    here = [[held for rank in states for held in _held(rank["state"])] for states in said.rounds]
    compared, wrong, where = compare_states(there, [held for states in here for held in states])
    firsts = [array_from(rank["logits"]) for rank in said.source]
    rests = [array_from(rank["logits"]) for rank in said.generated]
    edges = [edge for rank in said.rounds[-1] for edge in rank["edges"]]
    network = [edge for edge in edges if not edge["relay"]]
    itemsize = {held.component: held.bits.itemsize for held in there}
    return Outcome(
        **{name: getattr(options, name) for name in _SHOWN},
        transport="+".join(sorted({edge["transport"] for edge in network})),
        mode="+".join(sorted({edge["mode"] for edge in network})),
        compared_bytes=compared,
        wrong_bytes=wrong,
        wrong_where=where,
        logit_error=_greatest_error(said.reference, firsts, rests),
        tokens=tuple(int(x) for x in [firsts[0].argmax(), *rests[0].argmax(-1)]),
        reference_tokens=tuple(int(x) for x in said.reference.argmax(-1)),
        kinds=kinds(said.spec, options.prompt_tokens, itemsize, here[-1], edges),
        messages=sum(edge["messages"] for edge in network),
        rounds=tuple(timing(states) for states in said.rounds),
        prefill_s=max(rank["prefill_s"] for rank in said.source),
        total_s=total_s,
        copy_bytes_per_s=said.copy_bytes_per_s,
    )


def _held(state: Sequence[Sequence[Any]]) -> Iterator[Held]:
    for component, layer, starts, stops, bits in state:
        yield Held(component=component, layer=layer, starts=tuple(starts), stops=tuple(stops), bits=array_from(bits))


def _greatest_error(reference: Any, firsts: Sequence[Any], rests: Sequence[Any]) -> float:
    """Greatest difference of any rank's logits from the reference; what is not a number is infinitely wrong."""
    errors = [np.abs(first - reference[0]).max() for first in firsts]
    errors += [np.abs(rest - reference[1:]).max() for rest in rests]
    return max(float("inf") if np.isnan(error) else float(error) for error in errors)
