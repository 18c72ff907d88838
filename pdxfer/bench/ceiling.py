"""Ceilings: the same bytes moved by hand, as fast as this machine can, to put a hand-off's time beside.

In comes a case; out come seconds of one run. Lists of runs and page tables are worked out before; nothing is
negotiated, nothing verified.

::

    one pass   (host memory)   source pages ── memcpy per run, in T threads of one process ──▶ target pages
    by hand    (a network)     source pages ── memcpy per run ──▶ buffer ── one message ──▶ buffer ── memcpy ──▶ pages
                               a thread per edge at either end, two processes, some messages underway
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from pdxfer.bench.case import Case, End, check, fill
from pdxfer.bench.peer import Child, Clock, Line, main
from pdxfer.bench.runs import Move, Part, moves
from pdxfer.errors import MisuseError
from pdxfer.kernels import Bytes, native_available
from pdxfer.layout import Layout
from pdxfer.transport import Channel, Message, Sending, Transport, create_transport

__all__ = ["HOST_MEMORY", "Ceiling", "serve"]

#: Transports whose ceiling is a memcpy.
HOST_MEMORY = ("shm", "memory")

_UNDERWAY = 4
_WAIT_S = 60.0
Role = Literal["one pass", "send", "receive"]
Job = tuple[Bytes, Bytes, Part]


class Ceiling:
    """A ceiling, ready to run: its own processes with their own memory. A context manager."""

    def __init__(self, case: Case, transport: str, *, chunk_bytes: int, threads: int, clock: Clock) -> None:
        self.by_hand = transport not in HOST_MEMORY
        self._stack = ExitStack()
        asked: dict[str, Any] = {
            "case": case.to_json(),
            "transport": transport,
            "chunk_bytes": chunk_bytes,
            "threads": threads,
        }
        try:
            roles: tuple[Role, ...] = ("receive", "send") if self.by_hand else ("one pass",)
            self._lines = [self._stack.enter_context(Child(serve, clock, role=role, **asked)) for role in roles]
            self.facts = self._lines[0].hear()
            if self.by_hand:
                self._lines[1].hear()
                for line in self._lines:
                    line.tell(do="meet", address=self.facts["address"])
                for line in self._lines:
                    line.hear()
        except BaseException:
            self._stack.close()
            raise

    @property
    def name(self) -> str:
        """What it is, for a table's row."""
        return "ceiling: by hand" if self.by_hand else "ceiling: memcpy per run"

    def run(self) -> float:
        """Move everything once; returns seconds."""
        for line in self._lines:
            line.tell(do="run")
        times = [line.hear() for line in self._lines]
        return float(times[0]["ended"] - times[-1]["started"])

    def check(self) -> int:
        """Compare what came with what it must be; returns bytes."""
        return int(self._lines[0].ask(do="check")["nbytes"])

    def __enter__(self) -> Ceiling:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.__exit__(*exc)


def serve(line: Line, *, case: dict[str, Any], transport: str, chunk_bytes: int, threads: int, role: Role) -> None:
    """One process of a ceiling."""
    if not native_available():
        raise MisuseError("the copy kernel was not built, so there is no ceiling", hint="install with a C compiler")
    made = Case.from_json(case)
    work = moves(made, chunk_bytes=chunk_bytes)
    with create_transport(transport if transport != "memory" else "shm") as plane:
        end: _OnePass | _Sender | _Receiver
        if role == "one pass":
            end = _OnePass(made, plane, work, threads)
        else:
            end = (_Sender if role == "send" else _Receiver)(made, plane, work, chunk_bytes)
        runs = sum(move.runs for move in work if not move.edge.relay)
        line.tell(address=end.address, threads=end.threads, runs=runs)
        for question in line.questions():
            line.tell(**(end.meet(question["address"]) if question["do"] == "meet" else _do(end, question["do"])))
        end.close()


def _do(end: _OnePass | _Sender | _Receiver, what: str) -> dict[str, Any]:
    return end.check() if what == "check" else end.run()


def _memory(case: Case, end: End, plane: Transport) -> list[list[Bytes]]:
    """A worker's memory of the kind that agents have, every page of it touched; the source's is filled."""
    found = [_buffers(case.layout(end), rank, plane) for rank in range(len(case.layout(end)))]
    for rank, buffers in enumerate(found):
        if end == "prefill":
            fill(case, end, rank, buffers)
        for buffer in buffers if end == "decode" else ():
            buffer[:] = 1
    return found


def _buffers(layout: Layout, rank: int, plane: Transport) -> list[Bytes]:
    return [np.frombuffer(plane.allocate(r.nbytes, r.name).view, np.uint8) for r in layout.ranks[rank].regions]


class _OnePass:
    """Both workers' memory in one process."""

    address = ""

    def __init__(self, case: Case, plane: Transport, work: Sequence[Move], threads: int) -> None:
        self.case, self.threads = case, threads
        self._source, self._target = _memory(case, "prefill", plane), _memory(case, "decode", plane)
        network, relays = ([m for m in work if m.edge.relay == relay] for relay in (False, True))
        self._stages = [self._shares(network), self._shares(relays)] if relays else [self._shares(network)]
        self._pool = ThreadPoolExecutor(threads)

    def _shares(self, work: Sequence[Move]) -> list[list[Job]]:
        """For each thread its share of every part."""
        shares: list[list[Job]] = [[] for _ in range(self.threads)]
        for move in work:
            source = (self._target if move.edge.relay else self._source)[move.edge.source]
            for part in move.parts:
                for i, share in enumerate(_cut(part, self.threads)):
                    job = self._target[move.edge.target][part.target_region], source[part.source_region], share
                    shares[i].append(job)
        return shares

    def meet(self, address: str) -> dict[str, Any]:
        raise MisuseError(f"one pass meets nobody: {address!r}")

    def run(self) -> dict[str, Any]:
        started = time.perf_counter()
        for shares in self._stages:
            if self.threads == 1:
                _copy(shares[0])
            else:
                list(self._pool.map(_copy, shares))
        return {"started": started, "ended": time.perf_counter()}

    def check(self) -> dict[str, Any]:
        return {"nbytes": sum(check(self.case, "decode", r, buffers) for r, buffers in enumerate(self._target))}

    def close(self) -> None:
        self._pool.shutdown()


def _cut(part: Part, pieces: int) -> list[Part]:
    """A part's runs in pieces of about as many bytes; a few long runs are cut themselves."""
    at, to, lengths = part.at, part.to, part.lengths
    if len(lengths) < 8 * pieces:
        steps = (lengths[:, None] * np.arange(pieces + 1) // pieces // 64 * 64).T
        steps[-1] = lengths
        bounds = [(at + a, to + a, b - a) for a, b in itertools.pairwise(steps)]
    else:
        bounds = list(zip(*(np.array_split(x, pieces) for x in (at, to, lengths)), strict=True))
    return [replace(part, at=at, to=to, lengths=lengths) for at, to, lengths in bounds]


def _copy(jobs: Sequence[Job]) -> None:
    from pdxfer import _native

    for target, source, part in jobs:
        _native.copy_runs(target, source, part.to, part.at, part.lengths)


class _Hand:
    """One end of a network: a channel and a thread for every edge that crosses it."""

    def __init__(self, case: Case, plane: Transport, work: Sequence[Move], chunk_bytes: int) -> None:
        self.case, self.plane, self.chunk_bytes = case, plane, max(chunk_bytes, max(max(m.nbytes) for m in work))
        edges = dict.fromkeys(m.edge for m in work if not m.edge.relay)
        self.queues = [[m for m in work if m.edge == edge] for edge in edges]
        self.threads = len(self.queues)
        self.channels: list[Channel] = []
        self.memory = _memory(case, "prefill" if isinstance(self, _Sender) else "decode", plane)
        self._pool = ThreadPoolExecutor(self.threads)

    def run_all(self, job: Callable[[int], None]) -> dict[str, Any]:
        started = time.perf_counter()
        if self.threads == 1:
            job(0)
        else:
            list(self._pool.map(job, range(self.threads)))
        return {"started": started, "ended": time.perf_counter()}

    def close(self) -> None:
        self._pool.shutdown()


class _Sender(_Hand):
    address = ""

    def meet(self, address: str) -> dict[str, Any]:
        self.channels = [self.plane.connect(address, timeout_s=_WAIT_S) for _ in self.queues]
        for number, channel in enumerate(self.channels):
            channel.send_all(str(number).encode(), timeout_s=_WAIT_S)
        count = self.threads * _UNDERWAY
        self._staging = [self.plane.allocate(self.chunk_bytes, "staging").view for _ in range(count)]
        return {}

    def run(self) -> dict[str, Any]:
        return self.run_all(self._send)

    def check(self) -> dict[str, Any]:
        raise MisuseError("the sending end has nothing to check")

    def _send(self, number: int) -> None:
        from pdxfer import _native

        free = deque(self._staging[number * _UNDERWAY : (number + 1) * _UNDERWAY])
        underway: deque[tuple[Sending, memoryview]] = deque()
        for move in self.queues[number]:
            for parts, nbytes in zip(move.chunks, move.nbytes, strict=True):
                if not free:
                    sending, block = underway.popleft()
                    sending.wait(_WAIT_S)
                    free.append(block)
                block, source = free.popleft(), self.memory[move.edge.source]
                for part in parts:
                    _native.copy_runs(block, source[part.source_region], part.packed, part.at, part.lengths)
                sending = self.channels[number].send_all(b"", block[:nbytes], timeout_s=_WAIT_S)
                underway.append((sending, block))
        for sending, _ in underway:
            sending.wait(_WAIT_S)


class _Receiver(_Hand):
    def __init__(self, case: Case, plane: Transport, work: Sequence[Move], chunk_bytes: int) -> None:
        super().__init__(case, plane, work, chunk_bytes)
        self._relays = [m for m in work if m.edge.relay]
        self._listener = plane.listen()
        self.address = self._listener.contact_address

    def meet(self, address: str) -> dict[str, Any]:
        del address
        accepted = [self._listener.accept(_WAIT_S) for _ in self.queues]
        numbered: dict[int, Channel] = {}
        for channel in accepted:
            with channel.receive(timeout_s=_WAIT_S) as message:
                numbered[int(message.header)] = channel
        self.channels = [numbered[i] for i in range(self.threads)]
        return {}

    def run(self) -> dict[str, Any]:
        found = self.run_all(self._receive)
        for move in self._relays:
            pair = self.memory[move.edge.target], self.memory[move.edge.source]
            _copy([(pair[0][part.target_region], pair[1][part.source_region], part) for part in move.parts])
        return {**found, "ended": time.perf_counter()}

    def check(self) -> dict[str, Any]:
        return {"nbytes": sum(check(self.case, "decode", r, buffers) for r, buffers in enumerate(self.memory))}

    def _receive(self, number: int) -> None:
        for move in self.queues[number]:
            for parts in move.chunks:
                with self.channels[number].receive(timeout_s=_WAIT_S) as message:
                    self._unpack(move, parts, message)

    def _unpack(self, move: Move, parts: Sequence[Part], message: Message) -> None:
        from pdxfer import _native

        target = self.memory[move.edge.target]
        for part in parts:
            _native.copy_runs(target[part.target_region], message.payload, part.to, part.packed, part.lengths)


if __name__ == "__main__":
    main(serve)
