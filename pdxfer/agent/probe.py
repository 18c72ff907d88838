"""Probe: how quick this machine's memory and transports are, measured once per process when somebody asks.

In come nothing or a transport; out come rates for ``choice.py``. It takes some ten milliseconds for memory and about
as much for a transport, on a machine that has a core to spare; on a busy one the rates are of a busy machine. A
transport is measured between two ends in this process: no statement about a network, and none is made of it.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import numpy as np

from pdxfer.agent.choice import LinkRates, Rates
from pdxfer.errors import PdxferError
from pdxfer.kernels import End, Offsets, Part, RowCopy
from pdxfer.transport import Channel, Listener, RemoteRegion, Transport

__all__ = ["link_rates", "memory_rates"]

_BYTES = 8 << 20  # in each buffer: what does not fit into caches, as pages do not
_RUNS = {64 << 10: 128, 256: 2048}  # bytes of a run: how many, anywhere in the buffers
_MESSAGE_BYTES = 4 << 20
_TIMES = 3
_MESSAGES = 2
_LINK_S = 2.0  # a link that needs longer for a few MiB is slow, and that is all one needs to know
_log = logging.getLogger("pdxfer.agent")

_UNUSABLE = LinkRates(byte_s=math.inf, message_s=math.inf)
_lock = threading.Lock()
_memory: list[Rates] = []
_links: dict[str, LinkRates] = {}


def memory_rates() -> Rates:
    """Rates of this process's memory; measured by the first caller, while others wait for it."""
    with _lock:
        if not _memory:
            started = time.perf_counter()
            _memory.append(_measure_memory())
            _log.debug("memory probed in %.1f ms: %s", (time.perf_counter() - started) * 1e3, _memory[0])
        return _memory[0]


def link_rates(transport: Transport) -> LinkRates:
    """Rates of a transport by its scheme; measured by the first caller, while others wait for it."""
    with _lock:
        if transport.scheme not in _links:
            started = time.perf_counter()
            try:
                _links[transport.scheme] = _measure_link(transport)
            except PdxferError as error:
                _log.info("transport %s can't be probed, so it is taken last: %s", transport.scheme, error.message)
                _links[transport.scheme] = _UNUSABLE
            spent_ms = (time.perf_counter() - started) * 1e3
            _log.debug("transport %s probed in %.1f ms: %s", transport.scheme, spent_ms, _links[transport.scheme])
        return _links[transport.scheme]


def _measure_memory() -> Rates:
    source, target = (np.ones(_BYTES, np.uint8) for _ in range(2))  # touched
    copies = dict[int, float]()
    for run, to, at, lengths in _scattered():
        ones = np.ones(len(lengths), np.int64)
        rows = RowCopy((run,), 1, End(to, run, (1,)), End(at, run, (1,)), ones)
        copies[run] = _quickest(rows.bind([Part(target, 0, source, 0)]).copy)
    whole = End(np.zeros(1, np.int64), _BYTES, (1,))
    rows = RowCopy((_BYTES,), 1, whole, whole, np.ones(1, np.int64))
    digest_s = _quickest(lambda: rows.digest_source("auto", [Part(None, 0, source, 0)], 0))
    copy_byte_s, copy_run_s = _fit(copies)
    return Rates(copy_byte_s=copy_byte_s, copy_run_s=copy_run_s, digest_byte_s=digest_s / _BYTES)


def _scattered() -> Iterator[tuple[int, Offsets, Offsets, Offsets]]:
    """Bytes of a run; offsets in two buffers, and lengths."""
    rng = np.random.default_rng(0)
    for run, count in _RUNS.items():
        to, at = (rng.permutation(_BYTES // run)[:count].astype(np.int64) * run for _ in range(2))
        yield run, to, at, np.full(count, run, np.int64)


def _quickest(job: Callable[[], object]) -> float:
    times = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        job()
        times.append(time.perf_counter() - start)
    return min(times)


def _fit(times: dict[int, float]) -> tuple[float, float]:
    """Seconds per byte and per run, from two lengths of runs."""
    (long, many), (short, few) = sorted(((run, _RUNS[run]) for run in times), reverse=True)
    share = short * few / (long * many)
    per_run = max(0.0, (times[short] - times[long] * share) / (few - many * share))
    return max(1e-12, (times[long] - many * per_run) / (long * many)), per_run


def _measure_link(transport: Transport) -> LinkRates:
    """Every message is answered, so that none counts as sent before it has come."""
    reads = dict[int, float]()
    with transport.listen() as listener, transport.allocate(_MESSAGE_BYTES, "probe") as region:
        peer = threading.Thread(target=_be_peer, args=(listener, reads), name="pdxfer-probe", daemon=True)
        peer.start()
        with transport.connect(listener.contact_address, timeout_s=_LINK_S) as channel:
            round_s = _quickest(lambda: _exchange(channel, region.view[:8], 1))
            large_s = _quickest(lambda: _exchange(channel, region.view, _MESSAGES))
            if transport.can_export:
                _let_read(transport, channel)
        peer.join(_LINK_S)
    read_byte_s, read_run_s = _fit(reads) if len(reads) == len(_RUNS) else (math.inf, math.inf)
    return LinkRates(
        byte_s=max(0.0, large_s - round_s) / _MESSAGES / _MESSAGE_BYTES,
        message_s=round_s / 2,
        read_byte_s=read_byte_s,
        read_run_s=read_run_s,
    )


def _let_read(transport: Transport, channel: Channel) -> None:
    """Memory of our own, as an engine's; the peer answers when it has read it."""
    with transport.register(np.ones(_BYTES, np.uint8), "probe") as region:
        channel.export_region(region, b"", timeout_s=_LINK_S)
        channel.receive(timeout_s=_LINK_S).release()


def _exchange(channel: Channel, payload: memoryview, count: int) -> None:
    sendings = [channel.send_all(b"", payload, timeout_s=_LINK_S) for _ in range(count)]
    for sending in sendings:
        channel.receive(timeout_s=_LINK_S).release()
        sending.wait(_LINK_S)


def _be_peer(listener: Listener, reads: dict[int, float]) -> None:
    """Answer every message; read a region that comes, and note how long that took."""
    try:
        with listener.accept(_LINK_S) as channel:
            while True:
                with channel.receive(timeout_s=_LINK_S) as message:
                    remote = message.region
                if remote is not None:
                    with suppress(PdxferError):  # it may not be allowed here
                        _read(remote, reads)
                channel.send_all(b"", timeout_s=_LINK_S)
    except PdxferError:
        return  # the other end has closed, or tells by its own error


def _read(remote: RemoteRegion, reads: dict[int, float]) -> None:
    target = np.ones(_BYTES, np.uint8).data
    for run, to, at, lengths in _scattered():
        reads[run] = _quickest(partial(remote.read_runs, target, to, at, lengths))
