"""Bench of links: blocks of one size in batches over one transport, with nixlbench's names.

In come sizes; out comes one row per block and batch size. WRITE sends a batch as one message per block, and the other
end copies each to its place; READ reads a batch from the other end's exported memory in one call. *Prep* is making the
batch's list, *post* handing it over, *tx* from then until the other end has said that it has all (READ: until it is
here). The ceiling of a row is the same bytes in one piece: one memcpy where memory can be shared, else one message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdxfer.bench.ceiling import HOST_MEMORY
from pdxfer.bench.measure import Tick, quantile
from pdxfer.bench.peer import Away, Child, Clock, Line, main
from pdxfer.errors import CorruptError, MisuseError, PdxferError
from pdxfer.transport import Channel, Region, Transport, create_transport, known_schemes

__all__ = ["Options", "bench_link", "serve"]

_WAIT_S = 60.0
_BULK_MAX_BYTES = 32 << 20  # of one message: transports bound what they take
_PERIOD = 251


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A sweep: block and batch sizes double from ``start`` to ``max``; what exceeds the total is left out."""

    transports: tuple[str, ...] = ("shm", "tcp")
    op_type: str = "WRITE"
    start_block_size: int = 4 << 10
    max_block_size: int = 16 << 20
    start_batch_size: int = 1
    max_batch_size: int = 1
    total_buffer_size: int = 64 << 20
    num_iter: int = 100
    warmup_iter: int = 5
    num_threads: int = 1
    check_consistency: bool = True
    peer: str = ""
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.op_type not in ("WRITE", "READ"):
            raise MisuseError(f"op_type {self.op_type!r} is neither WRITE nor READ")
        counts = (self.num_iter, self.warmup_iter, self.num_threads, self.start_block_size, self.start_batch_size)
        if min(counts) < 1:
            raise MisuseError(f"block and batch sizes, iterations and threads must be at least 1, got {counts}")
        if not any(self.sizes()):
            blocks = f"blocks of {self.start_block_size} to {self.max_block_size} B"
            batches = f"batches of {self.start_batch_size} to {self.max_batch_size}"
            most = f"total_buffer_size {self.total_buffer_size} B"
            raise MisuseError(f"no size to measure: {blocks} in {batches}, within {most}")

    def sizes(self) -> Iterator[tuple[int, int]]:
        """Block and batch sizes."""
        block = self.start_block_size
        while block <= self.max_block_size:
            batch = self.start_batch_size
            while batch <= self.max_batch_size:
                if block * batch <= self.total_buffer_size:
                    yield block, batch
                batch *= 2
            block *= 2


def bench_link(options: Options, tick: Tick, clock: Clock) -> dict[str, Any]:
    """Sweep every transport; those that are not installed, or can't do it, are left out with a note saying why."""
    rows: list[dict[str, Any]] = []
    notes: list[str] = []
    for scheme in options.transports:
        if scheme not in known_schemes():
            raise MisuseError(f"{scheme!r} is no transport; there are {', '.join(sorted(known_schemes()))}")
        try:
            rows += _sweep(scheme, options, tick, clock, notes)
        except PdxferError as error:
            notes.append(f"{scheme}: {error.message}")
    if not rows:
        raise MisuseError("; ".join(notes))
    return {"what": f"{options.op_type} of blocks in batches, {options.num_threads} threads", "rows": rows,
            "notes": notes}  # fmt: skip


def _sweep(scheme: str, options: Options, tick: Tick, clock: Clock, notes: list[str]) -> Iterator[dict[str, Any]]:
    asked: dict[str, Any] = {"scheme": scheme, "op_type": options.op_type, "threads": options.num_threads,
             "nbytes": options.total_buffer_size, "insecure": options.insecure}  # fmt: skip
    with ExitStack() as stack:
        transport = stack.enter_context(_transport(scheme, options.insecure))
        away = Away(options.peer, clock, **asked) if options.peer else None
        line = stack.enter_context(away or Child(serve, clock, inside=scheme == "memory", **asked))
        sweep = _Sweep(transport, line, options)
        for block, batch in options.sizes():
            if not clock.left_s():
                notes.append(f"{scheme}: --max-time ended it before {block} B x {batch}")
                return
            tick(f"{scheme}: {block} B x {batch}")
            yield {"transport": scheme, "op_type": options.op_type, "threads": options.num_threads,
                   **sweep.measure(block, batch)}  # fmt: skip


def _transport(scheme: str, insecure: bool) -> Transport:
    return create_transport(scheme, **({"insecure": True} if insecure else {}))


@dataclass(slots=True)
class _Times:
    """Seconds of each iteration, by step; ``span`` is of all of them, threads at once."""

    prep: list[float] = field(default_factory=list)
    post: list[float] = field(default_factory=list)
    tx: list[float] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0


class _Sweep:
    """This end: one channel per thread."""

    def __init__(self, transport: Transport, line: Line, options: Options) -> None:
        self.line, self.options = line, options
        address = line.hear()["address"]
        line.tell(do="accept")
        self.channels = [transport.connect(address, timeout_s=_WAIT_S) for _ in range(options.num_threads)]
        line.hear()
        nbytes = max(options.total_buffer_size, 1)
        self.regions: list[Region] = [transport.allocate(nbytes, "blocks") for _ in self.channels]
        for region in self.regions:
            np.frombuffer(region.view, np.uint8)[:] = _pattern(nbytes)
        self.shared = transport.scheme in HOST_MEMORY
        self.remote: list[Any] = []
        if options.op_type == "READ":
            self.remote = [channel.receive(timeout_s=_WAIT_S).region for channel in self.channels]
        self._pool = ThreadPoolExecutor(options.num_threads)

    def measure(self, block: int, batch: int) -> dict[str, Any]:
        """One row."""
        found = self._all(block, batch)
        total, options = block * batch, self.options
        span_s = max(t.ended for t in found) - min(t.started for t in found)
        speed = total * options.num_iter * len(found) / span_s / 1e9
        row: dict[str, Any] = {"block_size": block, "batch_size": batch, "bw_gb_per_s": speed}
        row["avg_lat_us"] = 1e6 * span_s / (options.num_iter * batch * len(found))
        for step in ("prep", "post", "tx"):
            seconds = [s for times in found for s in getattr(times, step)]
            row[f"avg_{step}_us"] = 1e6 * sum(seconds) / len(seconds)
            row[f"p99_{step}_us"] = 1e6 * quantile(seconds, 0.99)
        name, ceiling = self._ceiling(total)
        return {**row, "ceiling": name, "ceiling_gb_per_s": ceiling, "pct_of_ceiling": 100 * speed / ceiling}

    def _ceiling(self, total: int) -> tuple[str, float]:
        if self.shared:
            copies = _Times()
            source, target = (np.frombuffer(self.regions[0].view, np.uint8)[:total], np.zeros(total, np.uint8))
            for number in range(self.options.warmup_iter + self.options.num_iter):
                if number == self.options.warmup_iter:
                    copies.started = time.perf_counter()
                np.copyto(target, source)
            return "one memcpy", total * self.options.num_iter / (time.perf_counter() - copies.started) / 1e9
        bulk = min(total, _BULK_MAX_BYTES)
        (times,) = self._all(bulk, 1, channels=1)
        return f"one message of {bulk} B", bulk * self.options.num_iter / (times.ended - times.started) / 1e9

    def _all(self, block: int, batch: int, channels: int = 0) -> list[_Times]:
        numbers = range(channels or len(self.channels))
        rounds = self.options.warmup_iter + self.options.num_iter
        if self.options.op_type == "WRITE":
            asked = {"block": block, "batch": batch, "rounds": rounds, "channels": len(numbers)}
            self.line.tell(do="receive", check=self.options.check_consistency, **asked)
        job = self._write if self.options.op_type == "WRITE" else self._read
        found = list(self._pool.map(lambda n: job(n, block, batch, rounds), numbers))
        if self.options.op_type == "WRITE":
            self.line.hear()
        return found

    def _write(self, number: int, block: int, batch: int, rounds: int) -> _Times:
        channel, view, times = self.channels[number], self.regions[number].view, _Times()
        for turn in range(rounds):
            start = time.perf_counter()
            blocks = [view[i * block : (i + 1) * block] for i in range(batch)]
            ready = time.perf_counter()
            sendings = [channel.send_all(b"", payload, timeout_s=_WAIT_S) for payload in blocks]
            posted = time.perf_counter()
            channel.receive(timeout_s=_WAIT_S).release()
            self._note(times, turn, start, ready, posted)
            for sending in sendings:
                sending.wait(_WAIT_S)
        return times

    def _read(self, number: int, block: int, batch: int, rounds: int) -> _Times:
        region, view, times = self.remote[number], self.regions[number].view, _Times()
        order = np.random.default_rng(number).permutation(batch).astype(np.int64)
        if self.options.check_consistency:
            np.frombuffer(view, np.uint8)[: block * batch] = 0
        for turn in range(rounds):
            start = time.perf_counter()
            at, lengths = order * block, np.full(batch, block, np.int64)
            ready = time.perf_counter()
            region.read_runs(view, at, at, lengths)
            self._note(times, turn, start, ready, ready)
        if self.options.check_consistency:
            _compare(np.frombuffer(view, np.uint8)[: block * batch])
        return times

    def _note(self, times: _Times, turn: int, start: float, ready: float, posted: float) -> None:
        now = time.perf_counter()
        if turn < self.options.warmup_iter:
            times.started = now
            return
        times.prep.append(ready - start)
        times.post.append(posted - ready)
        times.tx.append(now - ready)
        times.ended = now


def _pattern(nbytes: int) -> Any:
    return np.resize(np.arange(_PERIOD, dtype=np.uint8), nbytes)


def _compare(found: Any) -> None:
    if not np.array_equal(found, _pattern(len(found))):
        at = int(np.flatnonzero(found != _pattern(len(found)))[0])
        raise CorruptError("*", f"byte {at} of {len(found)} did not come as it was")


def serve(
    line: Line, *, scheme: str, op_type: str, threads: int, nbytes: int, host: str = "", insecure: bool = False
) -> None:
    """The other end: takes blocks, or lets its memory be read."""
    with _transport(scheme, insecure) as transport:
        listener = transport.listen(f"{scheme}://{host}:0" if host else "")
        memory = [transport.allocate(nbytes, "blocks") for _ in range(threads)]
        channels: list[Channel] = []
        line.tell(address=listener.contact_address)
        for question in line.questions():
            if question.pop("do") == "accept":
                channels = [listener.accept(_WAIT_S) for _ in range(threads)]
                for channel, region in zip(channels, memory, strict=True) if op_type == "READ" else ():
                    np.frombuffer(region.view, np.uint8)[:] = _pattern(nbytes)
                    channel.export_region(region, b"", timeout_s=_WAIT_S)
            else:
                count = question.pop("channels")
                with ThreadPoolExecutor(count) as pool:
                    jobs = [
                        pool.submit(_receive, *pair, **question)
                        for pair in zip(channels[:count], memory[:count], strict=True)
                    ]
                    for job in jobs:
                        job.result()
            line.tell()


def _receive(channel: Channel, region: Region, block: int, batch: int, rounds: int, check: bool) -> None:
    target = region.view
    for _ in range(rounds):
        for i in range(batch):
            with channel.receive(timeout_s=_WAIT_S) as message:
                target[i * block : (i + 1) * block] = message.payload
        channel.send_all(b"", timeout_s=_WAIT_S)
    if check:
        found = np.frombuffer(target, np.uint8)[: block * batch]
        _compare(found)
        found[:] = 0


if __name__ == "__main__":
    main(serve)
