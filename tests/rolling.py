"""Rolling restarts: daemons that drain, end and start again, one after the other, under load that must not notice.

    python -m tests.rolling --count 100

Two workers prefill, two decode, each an engine's process beside its own ``pdxfer agent``; clients play the router: what
is refused as new (DRAINING, or no sidecar there) they give to the next worker, and nothing else is ever tried again.
All bytes of every transfer are compared. Fails at the first transfer that does not end well at both ends, at a daemon
that ends before it was unready or takes new work while it drains, and at anything that engines hold afterwards.
``tests/test_rolling.py`` runs a few.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdxfer.agent.frames import Pipe, open_socket
from pdxfer.agent.spawn import DaemonProcess
from pdxfer.errors import PeerError
from tests.pairs import wait_until
from tests.rank_process import Failed, RankProcess, joined

__all__ = ["Fleet", "fleet", "main"]

CLIENTS, TOKENS, QUEUED_S, PATIENCE_S = 4, 200, 0.3, 60.0
LAYOUTS: dict[str, dict[str, Any]] = {
    "P": {"tp": 1, "storage": {"pages": 512, "slots": 32}},
    "D": {"tp": 1, "storage": {"page_tokens": 8, "pages": 1024, "slots": 32}, "placement": "unified"},
}
SETTINGS = {"drain_s": 30, "agent.lease_s": "20s", "agent.arena_bytes": "1MiB", "agent.chunk_bytes": "64KiB"}
#: How work is refused that has not begun: a router asks the next worker.
REFUSALS = ("DRAINING", "SIDECAR_LOST")


class Refused(Exception):
    """A worker takes nothing new; ``reason`` says why."""

    def __init__(self, error: Failed) -> None:
        super().__init__(str(error))
        self.reason = error.reason


@contextmanager
def _beginning() -> Iterator[None]:
    """What is raised inside happened before a byte moved."""
    try:
        yield
    except Failed as error:
        if error.kind != "PeerError" or error.reason not in REFUSALS:
            raise
        raise Refused(error) from error


class Worker:
    """One engine and its daemon. Any thread may call; the engine's pipe has one question at a time."""

    def __init__(self, directory: Path, name: str, seed: int, log: Any) -> None:
        self.name, self.health = name, f"unix://{directory}/{name}/health"
        settings = {**SETTINGS, "worker": name, "health": self.health}
        self.daemon = DaemonProcess(f"{directory}/{name}/s", settings, stderr=log)
        self._engine = RankProcess(
            directory / f"e{name}", layout=LAYOUTS[name[0]], seed=seed, sidecar=self.daemon.socket
        )
        self._lock = threading.Lock()

    def close(self) -> None:
        """End both."""
        self._engine.__exit__(None)
        self.daemon.__exit__(None)

    def ask(self, do: str, **arguments: Any) -> Any:
        """See ``RankProcess.ask``."""
        with self._lock:
            return self._engine.ask(do, **arguments)

    def offer(self, key: str) -> str:
        """Prefill: a ticket; raises Refused."""
        with _beginning():
            return str(self.ask("offer", key=key, tokens=TOKENS))

    def fetch(self, key: str, ticket: str) -> str:
        """Decode: how the bytes differ; raises Refused, and Failed once it has begun."""
        with self._lock:
            with _beginning():
                self._engine.ask("fetch", key=key, ticket=ticket, tokens=TOKENS, timeout_s=20.0)
            return str(self._engine.ask("wait", key=key, alone=False)["difference"])

    def attached(self) -> bool:
        """Whether the engine is attached to the daemon."""
        with suppress(PeerError):
            pipe = Pipe(open_socket(self.daemon.socket))
            try:
                return bool(pipe.ask("status", {}, 5.0)["ranks"])
            finally:
                pipe.close()
        return False


class _Watch:
    """What a daemon says of its health, as it changes, in order: "ready SERVING", "live NOT_SERVING", "live gone"."""

    def __init__(self, address: str) -> None:
        self.said: list[str] = []
        self._channel = grpc.insecure_channel(address.replace("unix://", "unix:"))
        self._threads = [
            threading.Thread(target=self._listen, args=(name, service), daemon=True)
            for name, service in (("ready", ""), ("live", "live"))
        ]

    def _listen(self, name: str, service: str) -> None:
        call = health_pb2_grpc.HealthStub(self._channel).Watch(health_pb2.HealthCheckRequest(service=service))
        with suppress(grpc.RpcError):
            for answer in call:
                self.said.append(f"{name} {health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}")
        self.said.append(f"{name} gone")

    def __enter__(self) -> _Watch:
        for thread in self._threads:
            thread.start()
        assert wait_until(lambda: {"ready SERVING", "live SERVING"} <= {*self.said}, timeout_s=PATIENCE_S), self.said
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
        self._channel.close()

    def ends(self) -> list[str]:
        """Who stopped serving, in order."""
        return [what.split()[0] for what in self.said if what in ("ready NOT_SERVING", "live NOT_SERVING", "live gone")]


@dataclass(kw_only=True)
class Fleet:
    """The workers, the load, and what came of it.

    Attributes:
        counts: whole transfers, and refusals by reason. refused_s: of each. restart_s: of each, from the signal until
            the engine is attached again.
    """

    prefill: list[Worker]
    decode: list[Worker]
    counts: Counter[str] = field(default_factory=Counter)
    refused_s: list[float] = field(default_factory=list)
    restart_s: list[float] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def load(self) -> Iterator[Callable[[], None]]:
        """Clients that hand over one request after the other; what is yielded raises what one of them has raised."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [pool.submit(self._client) for _ in range(CLIENTS)]

            def check() -> None:
                for client in clients:
                    if client.done():
                        client.result()

            try:
                yield check
            finally:
                self._stop.set()
        check()

    def _client(self) -> None:
        rng = random.Random()
        while not self._stop.is_set():
            key = f"request-{next(self._numbers)}"
            source, part = self._placed(rng, self.prefill, lambda worker, key=key: worker.offer(key))
            ticket = joined([part])
            time.sleep(rng.uniform(0, QUEUED_S))  # in decode's queue: a restart meets leases that live
            target, found = self._placed(rng, self.decode, lambda worker, key=key, t=ticket: worker.fetch(key, t))
            assert found == "", f"{key} of {source.name} at {target.name}: {found}"
            ended = source.ask("ended", key=key)
            assert ended == "completed", f"{key} of {source.name}, whole at {target.name}, ended there: {ended}"
            self.counts["whole"] += 1

    def _placed(self, rng: random.Random, workers: Sequence[Worker], do: Callable[[Worker], str]) -> tuple[Worker, str]:
        """Give work to one of them; where it is refused as new, to the next."""
        turn, until_s = rng.randrange(len(workers)), time.monotonic() + PATIENCE_S
        while True:
            worker, began_s = workers[turn % len(workers)], time.monotonic()
            try:
                return worker, do(worker)
            except Refused as error:
                self.refused_s.append(time.monotonic() - began_s)
                self.counts[error.reason] += 1
                reason, turn = error.reason, turn + 1
            assert time.monotonic() < until_s, f"nobody takes it: {reason}"

    def restart(self, worker: Worker) -> None:
        """Drain one daemon and start it again; it is back when its engine is attached to it."""
        began_s = time.monotonic()
        with _Watch(worker.health) as watch:
            worker.daemon.process.send_signal(signal.SIGTERM)
            assert wait_until(watch.ends, timeout_s=PATIENCE_S), f"{worker.name} does not drain"
            self._must_refuse(worker)
            assert worker.daemon.process.wait(PATIENCE_S) == 0
        assert watch.ends()[0] == "ready", watch.said
        worker.daemon.restart()
        assert wait_until(worker.attached, timeout_s=PATIENCE_S), f"{worker.name} was not attached again"
        self.restart_s.append(time.monotonic() - began_s)

    def _must_refuse(self, worker: Worker) -> None:
        """What is new, by name, as UNAVAILABLE is what PeerError travels as."""
        key, reason = f"new-{next(self._numbers)}", ""
        other = next(each for each in self.prefill if each is not worker)
        ticket = joined([other.offer(key)])
        try:
            worker.offer(key) if worker in self.prefill else worker.fetch(key, ticket)
        except Refused as error:
            reason = error.reason
        assert reason, f"{worker.name} took something new while it drained"
        self.counts[f"{reason}, once unready"] += 1
        other.ask("withdraw", key=key)


@contextmanager
def fleet(log: Any = None) -> Iterator[Fleet]:
    """Two workers of each kind, idle; at the end their engines hold what they held, and nothing is left."""
    directory = Path(tempfile.mkdtemp(prefix="r-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        workers = []
        for seed, name in enumerate(("P0", "P1", "D0", "D1")):
            workers.append(Worker(directory, name, seed, log))
            stack.callback(workers[-1].close)
        found = Fleet(prefill=workers[:2], decode=workers[2:])
        held = [worker.ask("held") for worker in workers]
        yield found
        for worker, before in zip(workers, held, strict=True):
            assert worker.ask("held", at_most=before)["pages"] == 0


def main(arguments: Sequence[str] | None = None) -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.rolling", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="restarts")
    parser.add_argument("--log", default="/dev/null", help="where the daemons' logs go")
    options = parser.parse_args(arguments)
    with open(options.log, "wb") as log, fleet(log) as found:
        workers = [*found.prefill, *found.decode]
        with found.load() as check:
            for number in range(options.count):
                found.restart(workers[number % len(workers)])
                check()
                if (number + 1) % 10 == 0:
                    print(f"{number + 1} restarts: {dict(found.counts)}", flush=True)
    print(
        f"{options.count} restarts, 0 of {found.counts['whole']} transfers failed; a restart took "
        f"{sorted(found.restart_s)[len(found.restart_s) // 2]:.1f} s (at most {max(found.restart_s):.1f}),"
        f" a refusal {1e3 * sorted(found.refused_s)[len(found.refused_s) // 2]:.1f} ms"
        f" (at most {1e3 * max(found.refused_s):.0f})"
    )


if __name__ == "__main__":
    main()
