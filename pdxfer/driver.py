"""Driver: moves one edge of one transfer over one channel, from either end.

In come an opened session, an edge's program, this rank's memory and a channel; out come verified bytes in the
target's pages, or one error. This file does the I/O that ``transfer.py`` allows; it opens no connections and
makes no control calls.

What happens to a segment::

    packed   source pages ─pack─▶ staging ──payload──▶ staging ─unpack─▶ target pages ─read back─▶ digest == sealed?
    direct   source pages ─────────one copy──────────▶ target pages ─read back─▶ digest == sealed?
             (the source digests the same chunk meanwhile, where it lies)

Digests are taken of what lies in the target's own pages, so that a wrong copy is found as surely as a wrong byte on
the way. Where the native kernel takes them a few KiB behind the copy, their time is in the stage that copies.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pdxfer import packing, wire
from pdxfer.errors import (
    AbortedError,
    CorruptError,
    DeadlineError,
    ExhaustedError,
    InternalError,
    PdxferError,
    PeerError,
    StaleError,
    TicketError,
    TransportError,
)
from pdxfer.messages import Mode
from pdxfer.packing import Chunk, EdgeProgram, Segment, Side
from pdxfer.transfer import Cancel, Intake
from pdxfer.transport.base import Channel, Message, Region, RemoteRegion, Sending

__all__ = ["EdgeReader", "EdgeStats", "PeerChannel", "SourceSession", "Staging", "serve_channel"]

_SLICE_S = 0.1  # how long a blocked thread stays deaf to cancel and close
_log = logging.getLogger("pdxfer.driver")

#: Errors that a source may report over the data channel, by class name; anything else is the peer's fault.
_REPORTED: Mapping[str, type[PdxferError]] = {
    cls.__name__: cls for cls in (StaleError, TicketError, AbortedError, DeadlineError, PeerError, TransportError)
}


class Staging(Protocol):
    """Bounded memory for packed chunks (``agent.arena.Arena``)."""

    def allocate(self, nbytes: int, *, timeout_s: float, reap: Callable[[], None]) -> memoryview:
        """Wait for room; raises ExhaustedError. ``reap`` frees what the caller no longer needs."""

    def free(self, block: memoryview) -> None:
        """Give a block back."""


@dataclass(slots=True)
class EdgeStats:
    """What one edge cost: seconds by stage, messages and bytes, as counted by the target."""

    source: int
    target: int
    relay: bool
    transport: str = ""
    mode: str = ""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    messages: int = 0
    payload_bytes: int = 0
    component_bytes: Counter[str] = field(default_factory=Counter)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``seconds[name]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start


class PeerChannel:
    """A channel with the regions that came by it; used by one transfer at a time, then pooled."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.regions: dict[int, RemoteRegion] = {}
        self.uses = 1

    def close(self) -> None:
        """Close channel and regions."""
        self.channel.close()


class EdgeReader:
    """The target's end of one edge. ``run`` is called once, by one thread."""

    def __init__(
        self,
        *,
        transfer: str,
        generation: int,
        session: bytes,
        mode: Mode,
        program: EdgeProgram,
        target: Side,
        peer: PeerChannel,
        cancel: Cancel,
        deadline_s: float,
        renew: Callable[[], None],
        stats: EdgeStats,
        window: int = 2,
        digests: bool = True,
        kernel: str = "auto",
    ) -> None:
        self.transfer, self.generation, self.session, self.mode = transfer, generation, session, mode
        self.program, self.target, self.peer, self.cancel = program, target, peer, cancel
        self.deadline_s, self.renew, self.stats = deadline_s, renew, stats
        self.window, self.digests, self.kernel = window, digests, kernel

    def run(self) -> None:
        """Read the whole edge into the target's pages, verified.

        Raises:
            CorruptError: a length or digest is wrong; names the component.
            PeerError, StaleError, ExhaustedError, TransportError: the source failed or said so.
            DeadlineError, AbortedError: out of time; given up elsewhere.
        """
        intake = Intake(len(self.program.chunks), self.window)
        ahead: dict[int, list[bytes | None]] = {}
        self._send(wire.Hello(self.session, self.digests))
        self._want(intake)  # at once: the source works on the first chunks while we get to know its regions
        source = self._import() if self.mode is Mode.DIRECT else None
        if source is not None:
            with self.stats.stage("plan"):
                packing.prepare(self.program, source, self.target, digests=self.digests)
        while not intake.complete:
            self._want(intake)
            if source is not None:  # the oldest wanted chunk is copied while the source digests it
                oldest = intake.oldest
                if oldest not in ahead:
                    ahead[oldest] = self._place(self.program.chunks[oldest], None, source)
            asked = time.perf_counter()
            with self._receive() as message:
                frame = self._frame(message, wire.Data)
                waited = time.perf_counter() - asked
                self.stats.seconds["pack"] += frame.pack_s + frame.digest_s
                self.stats.seconds["move"] += max(0.0, waited - frame.pack_s - frame.digest_s)
                intake.expect(frame.chunk)
                chunk = self.program.chunks[frame.chunk]
                self._check_frame(chunk, frame, message, source)
                found = ahead.pop(frame.chunk, None) or self._place(chunk, message, source)
                self._verify(chunk, frame, message, found)
            intake.accept(frame.chunk)
            self.stats.messages += 1
        self._send(wire.Done(self.session))

    def _want(self, intake: Intake) -> None:
        """Give the source credit for as many chunks as may be underway."""
        wanted = intake.credit()
        if wanted:
            self._send(wire.Want(self.session, wanted))

    def _check_frame(self, chunk: Chunk, frame: wire.Data, message: Message, source: Side | None) -> None:
        if self.digests and len(frame.digests) != len(chunk.segments):
            raise PeerError(
                f"chunk {chunk.number} came with {len(frame.digests)} of {len(chunk.segments)} digests",
                reason="PROTOCOL",
            )
        expected = chunk.nbytes if source is None else 0
        if len(message.payload) != expected:
            first = self.program.items[chunk.segments[0].item]
            raise CorruptError(first.component, f"chunk {chunk.number} has {len(message.payload)} of {expected} bytes")

    def _place(self, chunk: Chunk, message: Message | None, source: Side | None) -> list[bytes | None]:
        """Put one chunk's segments into the target's pages; returns the digest of what lies there, for each."""
        found: list[bytes | None] = []
        payload = np.empty(0, np.uint8) if message is None else np.frombuffer(message.payload, np.uint8)
        with self.stats.stage("unpack" if source is None else "move"):
            for index, segment in enumerate(chunk.segments):
                self.cancel.check()
                converts = self.program.items[segment.item].converts
                seed = self._seed(chunk, index) if self.digests and not converts else None
                if source is None:
                    data = payload[segment.offset : segment.offset + segment.nbytes]
                    digest = packing.unpack(self.program, segment, self.target, data, kernel=self.kernel, seed=seed)
                else:
                    digest = packing.direct(self.program, segment, source, self.target, kernel=self.kernel, seed=seed)
                found.append(digest)
        return found

    def _seed(self, chunk: Chunk, index: int) -> int:
        edge = self.program.edge
        return wire.digest_seed(self.transfer, self.generation, edge.source, edge.target, chunk.number, index)

    def _verify(self, chunk: Chunk, frame: wire.Data, message: Message, found: list[bytes | None]) -> None:
        """Compare what lies in the target's pages with what was sealed; count the segments that are right."""
        for index, segment in enumerate(chunk.segments):
            item = self.program.items[segment.item]
            if self.digests:
                sealed = frame.digests[index]
                if found[index] is None:
                    intact = self._verify_converted(chunk, index, segment, message, sealed)
                else:
                    intact = found[index] == sealed
                if not intact:
                    layers = item.layers[segment.layer_start : segment.layer_stop]
                    where = (
                        f"layers {layers[0]}..{layers[-1]}, chunk {chunk.number}, from rank {self.program.edge.source}"
                    )
                    raise CorruptError(
                        item.component,
                        f"the digest of {segment.nbytes} B does not match ({where})",
                        hint="fetch again or prefill again",
                    )
            self.stats.component_bytes[item.component] += segment.nbytes
            self.stats.payload_bytes += segment.nbytes

    def _verify_converted(self, chunk: Chunk, index: int, segment: Segment, message: Message, sealed: bytes) -> bool:
        """What came is what was sealed, and what lies in the pages is that, converted."""
        with self.stats.stage("verify"):
            item = self.program.items[segment.item]
            have, want = self.program.source_dtype(item), self.target.rank.holdings[item.target_holding].dtype
            data = message.payload[segment.offset : segment.offset + segment.nbytes]
            wanted = packing.convert(data, have, want)
            found = np.empty(wanted.nbytes, np.uint8)
            packing.read_back(self.program, segment, self.target, found, kernel=self.kernel)
            return wire.digest(data, self._seed(chunk, index)) == sealed and np.array_equal(found, wanted)

    def _import(self) -> Side:
        """Receive the source's regions (those not yet known on this channel) and page tables."""
        tables: dict[str, Any] = {}
        filled: Counter[str] = Counter()
        wanted = set(_source_tables(self.program))
        regions_done = False
        while not regions_done or any(name not in tables or filled[name] < len(tables[name]) for name in wanted):
            with self._receive() as message:
                frame = self._frame(message, wire.Exported, wire.Table)
                if isinstance(frame, wire.Exported):
                    regions_done = frame.region < 0
                    self._adopt(frame.region, message)
                    continue
                if (
                    frame.name not in wanted
                    or frame.start != filled[frame.name]
                    or (frame.start and frame.total != len(tables[frame.name]))
                ):
                    raise PeerError(f"page table {frame.name!r} came unasked or out of order", reason="PROTOCOL")
                table = tables.setdefault(frame.name, np.empty(frame.total, np.int64))
                table[frame.start : frame.start + len(frame.entries) // 8] = np.frombuffer(frame.entries, "<i8")
                filled[frame.name] += len(frame.entries) // 8
        return Side(self.program.source_rank, self._region_buffers(), tables)

    def _adopt(self, region: int, message: Message) -> None:
        if region < 0:
            return
        shapes = self.program.source_rank.regions
        if message.region is None or region >= len(shapes) or message.region.nbytes < shapes[region].nbytes:
            raise PeerError(f"region {region} came without memory of the size its layout says", reason="PROTOCOL")
        self.peer.regions[region] = message.region

    def _region_buffers(self) -> list[Any]:
        """Per region of the source rank: a mapped view, a reader, or nothing where no item needs it."""
        buffers: list[Any] = []
        for index in range(len(self.program.source_rank.regions)):
            region = self.peer.regions.get(index)
            view = region.view if region is not None else np.empty(0, np.uint8)
            buffers.append(region if view is None else view)
        return buffers

    def _send(self, frame: wire.Frame) -> None:
        self.cancel.check()
        self.peer.channel.send_all(wire.encode(frame), timeout_s=max(0.0, min(5.0, self.deadline_s - time.monotonic())))

    def _receive(self) -> Message:
        """Wait for the next message, awake to cancel, deadline and lease."""
        while True:
            self.cancel.check()
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError(
                    f"{self.transfer}: source rank {self.program.edge.source} sent nothing more in time"
                )
            self.renew()
            try:
                return self.peer.channel.receive(timeout_s=min(_SLICE_S, left_s))
            except DeadlineError:
                continue

    def _frame(self, message: Message, *kinds: type) -> Any:
        frame = wire.decode(message.header)
        if isinstance(frame, wire.Fail) and frame.session == self.session:
            raise _reported(frame)
        if frame.session != self.session or not isinstance(frame, kinds):
            raise PeerError(
                f"{type(frame).__name__} came where {' or '.join(k.__name__ for k in kinds)} was due", reason="PROTOCOL"
            )
        return frame


def _reported(frame: wire.Fail) -> PdxferError:
    if frame.error == ExhaustedError.__name__:
        return ExhaustedError(f"at the source: {frame.message}")
    if frame.error == CorruptError.__name__:
        return CorruptError("*", f"at the source: {frame.message}")
    return _REPORTED.get(frame.error, PeerError)(f"at the source: {frame.message}", reason=frame.reason)


def _source_tables(program: EdgeProgram) -> list[str]:
    """Names of the source's page tables that the edge's items use."""
    return sorted({program.source_rank.holdings[item.source_holding].table for item in program.items})


class SourceSession:
    """The source's end of one edge: what one reader may ask for. Used by the thread of its channel only,
    except ``close`` and ``quiet``.
    """

    def __init__(
        self,
        *,
        transfer: str,
        generation: int,
        session: bytes,
        mode: Mode,
        program: EdgeProgram,
        source: Side,
        regions: Mapping[int, Region],
        check_live: Callable[[], None],
        staging: Staging,
        stall_s: float = 5.0,
        kernel: str = "auto",
    ) -> None:
        self.transfer, self.generation, self.session, self.mode = transfer, generation, session, mode
        self.program, self.source, self.regions = program, source, regions
        self.check_live, self.staging, self.stall_s, self.kernel = check_live, staging, stall_s, kernel
        self.digests = True
        self._busy = threading.Lock()
        self._channel: Channel | None = None
        self._closed = False

    def finish(self) -> None:
        """Its reader has all it wanted: nothing more will be read, and the channel may serve others."""
        self._closed, self._channel = True, None
        self.program.forget()

    def close(self) -> None:
        """End it from outside: the channel that serves it closes, so its thread stops soon."""
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def quiet(self) -> bool:
        """Whether no thread is reading pages for it and none will begin."""
        if not self._closed or not self._busy.acquire(blocking=False):
            return False
        self._busy.release()
        return True

    def begin(self, channel: Channel, hello: wire.Hello, exported: set[int]) -> None:
        """Answer Hello: in direct mode, export regions and tell page tables."""
        self._channel, self.digests = channel, hello.digests
        if self._closed:
            raise StaleError(f"{self.transfer}: the session is closed")
        self.check_live()
        if self.mode is not Mode.DIRECT:
            return
        for index in sorted(self._needed_regions() - exported):
            header = wire.encode(wire.Exported(self.session, index))
            channel.export_region(self.regions[index], header, timeout_s=self.stall_s)
            exported.add(index)
        channel.send_all(wire.encode(wire.Exported(self.session, -1)), timeout_s=self.stall_s)
        for name in _source_tables(self.program):
            table = self.source.tables[name].astype("<i8")
            for start in range(0, max(1, len(table)), wire.TABLE_ENTRIES_MAX // 2):
                entries = table[start : start + wire.TABLE_ENTRIES_MAX // 2].tobytes()
                frame = wire.Table(self.session, name, start, len(table), entries)
                channel.send_all(wire.encode(frame), timeout_s=self.stall_s)

    def _needed_regions(self) -> set[int]:
        found: set[int] = set()
        for item in self.program.items:
            holding = self.program.source_rank.holdings[item.source_holding]
            found.update(holding.at(layer)[0] for layer in item.layers)
        return found

    def answer(
        self, channel: Channel, index: int, outstanding: deque[tuple[Sending, memoryview]], reap: Callable[[], None]
    ) -> None:
        """Send one chunk: packed with its digests, or its digests alone."""
        if index >= len(self.program.chunks):
            raise PeerError(f"chunk {index} of {len(self.program.chunks)} was wanted", reason="PROTOCOL")
        chunk = self.program.chunks[index]
        block = None
        if self.mode is Mode.PACKED:
            block = self.staging.allocate(chunk.nbytes, timeout_s=self.stall_s, reap=reap)
        try:
            with self._busy:
                if self._closed:
                    raise StaleError(f"{self.transfer}: the session is closed")
                self.check_live()
                frame = self._gather(chunk, block)
            payload = None if block is None else block[: chunk.nbytes]
            sending = channel.send_all(wire.encode(frame), payload, timeout_s=self.stall_s)
        except BaseException:
            if block is not None:
                self.staging.free(block)
            raise
        if block is not None:
            outstanding.append((sending, block))

    def _gather(self, chunk: Chunk, block: memoryview | None) -> wire.Data:
        """Pack a chunk into ``block`` and digest it there, or digest it where it lies."""
        edge, digests = self.program.edge, list[bytes]()
        start = time.perf_counter()
        for index, segment in enumerate(chunk.segments):
            seed = None
            if self.digests:
                seed = wire.digest_seed(self.transfer, self.generation, edge.source, edge.target, chunk.number, index)
            found = None
            if block is not None:
                out = block[segment.offset : segment.offset + segment.nbytes]
                found = packing.pack(self.program, segment, self.source, out, kernel=self.kernel, seed=seed)
            elif seed is not None:
                found = packing.digest(self.program, segment, self.source, seed, of_target=False, kernel=self.kernel)
            if found is not None:
                digests.append(found)
        spent_s = time.perf_counter() - start
        return wire.Data(self.session, chunk.number, digests, *((0.0, spent_s) if block is None else (spent_s, 0.0)))


def serve_channel(
    channel: Channel,
    lookup: Callable[[bytes], SourceSession],
    staging: Staging,
    stop: threading.Event,
) -> None:
    """Serve one accepted channel until it or the agent closes; one session after the other.

    Whatever one session does wrong ends that session with a Fail frame; whatever the channel does wrong ends
    the channel. Staging is given back in every case.
    """
    outstanding: deque[tuple[Sending, memoryview]] = deque()
    exported: set[int] = set()
    current: SourceSession | None = None

    def reap() -> None:
        while outstanding and outstanding[0][0].done:
            staging.free(outstanding.popleft()[1])

    try:
        while not stop.is_set():
            reap()
            try:
                message = channel.receive(timeout_s=_SLICE_S)
            except DeadlineError:
                continue
            with message:
                frame = wire.decode(message.header)
            try:
                current = _dispatch(channel, frame, current, lookup, outstanding, exported, reap)
            except TransportError:
                raise
            except Exception as raised:  # noqa: BLE001 - our own bug must reach the target as an error, too
                error = raised if isinstance(raised, PdxferError) else _own_bug(raised)
                _log.warning("transfer %s: %s", current.transfer if current else "?", error.message)
                fail = wire.Fail(frame.session, type(error).__name__, error.reason, error.message[:1024])
                channel.send_all(wire.encode(fail), timeout_s=_SLICE_S)
    except PdxferError as error:
        _log.debug("channel ends: %s", error.message)
    finally:
        channel.close()
        for _, block in outstanding:
            staging.free(block)


def _own_bug(raised: Exception) -> InternalError:
    _log.error("serving a channel failed unexpectedly", exc_info=raised)
    return InternalError(f"the source failed unexpectedly ({type(raised).__name__}); its log has more")


def _dispatch(
    channel: Channel, frame: wire.Frame, current: SourceSession | None, lookup: Callable[[bytes], SourceSession],
    outstanding: deque[tuple[Sending, memoryview]], exported: set[int], reap: Callable[[], None],
) -> SourceSession | None:  # fmt: skip
    if isinstance(frame, wire.Hello):
        session = lookup(frame.session)
        session.begin(channel, frame, exported)
        return session
    if current is None or frame.session != current.session:
        return current  # a late frame of a session that is over
    if isinstance(frame, wire.Want):
        for chunk in frame.chunks:
            current.answer(channel, chunk, outstanding, reap)
        return current
    if isinstance(frame, wire.Done):
        current.finish()
        return None
    raise PeerError(f"a target does not send {type(frame).__name__}", reason="PROTOCOL")
