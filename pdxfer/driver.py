"""Driver: moves one edge of one transfer over one channel, at its target (``agent/serve.py`` has the other end).

In come an opened session, an edge's program, this rank's memory and a channel; out come verified bytes in this
rank's pages, or one error. This file does the I/O that ``transfer.py`` allows; it opens no connections and
makes no control calls.

What happens to a segment::

    packed   source pages ─pack─▶ staging ──payload──▶ staging ─unpack─▶ target pages ─read back─▶ digest == sealed?
    direct   source pages ─────────one copy──────────▶ target pages ─read back─▶ digest == sealed?
             (the source digests the same chunk meanwhile, where it lies)

Digests are taken of what lies in the target's own pages, so that a wrong copy is found as surely as a wrong byte on
the way. Where the native kernel takes them a few KiB behind the copy, their time is in the stage that copies.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdxfer import packing, wire
from pdxfer.errors import (
    AbortedError,
    CorruptError,
    DeadlineError,
    ExhaustedError,
    MisuseError,
    PdxferError,
    PeerError,
    StaleError,
    TicketError,
    TransportError,
)
from pdxfer.kernels import Offsets, as_buffer, settle
from pdxfer.lanes import lane
from pdxfer.messages import Mode
from pdxfer.packing import Chunk, EdgeProgram, Segment
from pdxfer.pages import Buffers, Side
from pdxfer.transfer import Cancel, Intake
from pdxfer.transport.base import Channel, Message, RemoteRegion

__all__ = ["EdgeReader", "EdgeStats", "PeerChannel", "answered", "ask"]

_SLICE_S = 0.1  # how long a blocked thread stays deaf to cancel and close

#: Errors that a source may report over the data channel, by class name; anything else is the peer's fault.
_REPORTED: Mapping[str, type[PdxferError]] = {
    cls.__name__: cls for cls in (StaleError, TicketError, AbortedError, DeadlineError, PeerError, TransportError)
}

#: Of these, what a source answers to Ask is its last word.
_FINAL = (StaleError.__name__, TicketError.__name__)


@dataclass(slots=True)
class EdgeStats:
    """What one edge cost: seconds by stage, messages and bytes, as counted by the target.

    ``choice``: why this transport and mode, with estimates where there were any (``agent/choice.py``).
    """

    source: int
    target: int
    relay: bool
    transport: str = ""
    mode: str = ""
    choice: str = ""
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
        self._buffers: Buffers | None = None

    def adopt(self, index: int, region: RemoteRegion) -> None:
        """Keep a region that came."""
        self.regions[index], self._buffers = region, None

    def buffers(self, count: int) -> Buffers:
        """Per region of the source rank: a mapped view, a reader, or nothing where none came.

        Raises:
            TransportError: the peer took one back.
        """
        views = {
            index: region.view for index, region in self.regions.items()
        }  # which says whether they are still there
        if self._buffers is None or len(self._buffers) != count:
            nothing = np.empty(0, np.uint8)
            found = (
                nothing if i not in views else self.regions[i] if views[i] is None else views[i] for i in range(count)
            )
            self._buffers = Buffers(map(as_buffer, found))
        return self._buffers

    def close(self) -> None:
        """Close channel and regions."""
        self._buffers = None  # it holds views of the peer's memory
        self.channel.close()


class EdgeReader:
    """The target's end of one edge. ``run`` is called once, by one thread.

    Args:
        greeted: with the credit that ``ask`` has given, and its answer; without, ``run`` says Hello.
    """

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
        copy_threads: int = 0,
        greeted: tuple[Intake, wire.Opened] | None = None,
    ) -> None:
        self.transfer, self.generation, self.session, self.mode = transfer, generation, session, mode
        self.program, self.target, self.peer, self.cancel = program, target, peer, cancel
        self.deadline_s, self.renew, self.stats = deadline_s, renew, stats
        self.window, self.digests, self.kernel, self.greeted = window, digests, kernel, greeted
        self.copy_threads = copy_threads

    def run(self) -> None:
        """Read the whole edge into the target's pages, verified.

        Raises:
            CorruptError: a length or digest is wrong; names the component.
            PeerError, StaleError, ExhaustedError, TransportError: the source failed or said so.
            DeadlineError, AbortedError: out of time; given up elsewhere.
        """
        ahead: dict[int, list[bytes | None]] = {}
        intake, told = self.greeted or (Intake(len(self.program.chunks), self.window), None)
        if told is None:
            self._send(wire.Hello(self.session, self.digests, intake.credit()))
        source = self._import(told) if self.mode is Mode.DIRECT else None
        if source is not None:
            with self._planning():
                self.program.address(source, self.target)
        while not intake.complete:
            self._want(intake)
            if source is not None and not ahead:  # all wanted chunks are copied while the source digests them
                chunks = [self.program.chunks[number] for number in intake.underway]
                with self._planning():  # of these alone: other edges' copies need not wait for all of ours
                    packing.prepare(self.program, chunks, source, self.target, digests=self.digests)
                ahead.update(zip(intake.underway, self._place(chunks, None, source), strict=True))
            asked = time.perf_counter()
            with self._receive() as message:
                frame = self._frame(message, wire.Data)
                waited = time.perf_counter() - asked
                self.stats.seconds["pack"] += frame.pack_s + frame.digest_s
                self.stats.seconds["move"] += max(0.0, waited - frame.pack_s - frame.digest_s)
                intake.expect(frame.chunk)
                chunk = self.program.chunks[frame.chunk]
                self._check_frame(chunk, frame, message, source)
                found = ahead.pop(frame.chunk, None) or self._place([chunk], message, source)[0]
                self._verify(chunk, frame, message, found)
            intake.accept(frame.chunk)
            self.stats.messages += 1
        settle(self.target.buffers)

    def complete(self) -> bool:
        """After ``run``: tell the source that it may let go; False when this path can't tell (say it by control then).

        Raises:
            StaleError, TicketError, AbortedError: the source had ended the transfer by then.
        """
        try:
            self._send(wire.Done(self.session, self.generation))
            # Not renewed any more: where Done has been read, there is no lease.
            with _receive(self.peer, self.cancel, self.deadline_s, lambda: None, self.transfer) as message:
                self._frame(message, wire.Closed)
        except TransportError:
            return False
        return True

    @contextmanager
    def _planning(self) -> Iterator[None]:
        """Apply both sides' page tables. Ours were checked before: what does not fit now is the source's."""
        try:
            with self.stats.stage("plan"):
                yield
        except MisuseError as error:
            raise PeerError(f"the source's page tables can't be right: {error.message}", reason="PROTOCOL") from error

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
            found = len(message.payload)
            lacking = next((s for s in chunk.segments if found < s.offset + s.nbytes), chunk.segments[-1])
            component = self.program.items[lacking.item].component
            raise CorruptError(component, f"chunk {chunk.number} has {found} of {expected} bytes")

    def _place(self, chunks: Sequence[Chunk], message: Message | None, source: Side | None) -> list[list[bytes | None]]:
        """Put chunks into the target's pages; returns the digest of what lies there, for each segment of each.

        Those of a direct copy go in one lane: another thread would have to wake up between any two.
        """
        found: list[list[bytes | None]] = []
        payload = np.empty(0, np.uint8) if message is None else np.frombuffer(message.payload, np.uint8)
        # What a plane reads keeps no core busy, and may stand still: with a lane, all of this process would.
        copied = 0 if source is not None and self._reads(source) else sum(chunk.nbytes for chunk in chunks)
        with (
            lane(copied, self.copy_threads, digests=self.digests),
            self.stats.stage("unpack" if source is None else "move"),
        ):
            for chunk in chunks:
                found.append(placed := [])
                for index, segment in enumerate(chunk.segments):
                    self.cancel.check()
                    converts = self.program.items[segment.item].converts
                    seed = self._seed(chunk, index) if self.digests and not converts else None
                    if source is None:
                        data = payload[segment.offset : segment.offset + segment.nbytes]
                        got = packing.unpack(self.program, segment, self.target, data, kernel=self.kernel, seed=seed)
                    else:
                        got = packing.direct(self.program, segment, source, self.target, kernel=self.kernel, seed=seed)
                    placed.append(got)
        return found

    def _reads(self, source: Side) -> bool:
        return any(hasattr(source.buffers[region], "read_runs") for region in self.program.touched[1])

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

    def _import(self, told: wire.Opened | None) -> Side:
        """Receive the source's regions (those not yet known on this channel) and page tables; some came with Opened."""
        tables: dict[str, Offsets] = {}
        names, regions = self.program.touched
        missing = dict.fromkeys(names, -1)  # entries, once the total is known
        last = told is not None and self._fill(tables, missing, told)
        while not last:
            with self._receive() as message:
                frame = self._frame(message, wire.Exported, wire.Tables)
                if isinstance(frame, wire.Exported):
                    self._adopt(frame.region, message)
                else:
                    last = self._fill(tables, missing, frame)
        if any(missing.values()):
            raise PeerError(f"of page tables {sorted(missing)} some entries are missing", reason="PROTOCOL")
        if lacking := regions - self.peer.regions.keys():
            raise PeerError(f"regions {sorted(lacking)} of the source never came", reason="PROTOCOL")
        rank = self.program.source_rank
        return Side(rank, self.peer.buffers(len(rank.regions)), tables)

    def _fill(self, tables: dict[str, Offsets], missing: dict[str, int], frame: wire.Opened | wire.Tables) -> bool:
        """Add pieces of page tables; returns whether they were the last."""
        for name, start, total, entries in frame.pieces:
            if name in missing and missing[name] < 0:
                tables[name], missing[name] = np.empty(total, np.int64), total
            count = len(entries) // 8
            if missing.get(name, -1) < count or start != total - missing[name] or total != len(tables[name]):
                raise PeerError(f"page table {name!r} came unasked or out of order", reason="PROTOCOL")
            tables[name][start : start + count] = np.frombuffer(entries, "<i8")
            missing[name] -= count
        return frame.last

    def _adopt(self, region: int, message: Message) -> None:
        shapes = self.program.source_rank.regions
        if message.region is None or region >= len(shapes) or message.region.nbytes < shapes[region].nbytes:
            raise PeerError(f"region {region} came without memory of the size its layout says", reason="PROTOCOL")
        self.peer.adopt(region, message.region)

    def _send(self, frame: wire.Frame) -> None:
        _send(self.peer, frame, self.cancel, self.deadline_s)

    def _receive(self) -> Message:
        return _receive(self.peer, self.cancel, self.deadline_s, self.renew, self.transfer)

    def _frame(self, message: Message, *kinds: type) -> Any:
        frame = wire.decode(message.header)
        if isinstance(frame, wire.Fail) and frame.session == self.session:
            raise _reported(frame)
        if frame.session != self.session or not isinstance(frame, kinds):
            raise PeerError(
                f"{type(frame).__name__} came where {' or '.join(k.__name__ for k in kinds)} was due", reason="PROTOCOL"
            )
        return frame


def ask(peer: PeerChannel, frame: wire.Ask, cancel: Cancel, deadline_s: float) -> None:
    """Begin to open a transfer on its channel; ``answered`` has the answer. There is time for other work meanwhile.

    Raises:
        TransportError, DeadlineError, AbortedError: as ``EdgeReader.run``.
    """
    _send(peer, frame, cancel, deadline_s)


def answered(peer: PeerChannel, session: bytes, cancel: Cancel, deadline_s: float) -> wire.Opened | None:
    """What the source answers to the Ask of ``session``, or None where it says no (control knows why).

    Raises:
        StaleError, TicketError: the source refuses for good: asked again, it would count one late ticket twice.
        TransportError, DeadlineError, AbortedError: as ``EdgeReader.run``.
    """
    while True:
        with _receive(peer, cancel, deadline_s, lambda: None, "open") as message:
            answer = wire.decode(message.header)
        if answer.session == session:
            if isinstance(answer, wire.Fail) and answer.error in _FINAL:
                raise _reported(answer)
            return answer if isinstance(answer, wire.Opened) else None


def _send(peer: PeerChannel, frame: wire.Frame, cancel: Cancel, deadline_s: float) -> None:
    cancel.check()
    peer.channel.send_all(wire.encode(frame), timeout_s=max(0.0, min(5.0, deadline_s - time.monotonic())))


def _receive(peer: PeerChannel, cancel: Cancel, deadline_s: float, renew: Callable[[], None], transfer: str) -> Message:
    """Wait for the next message, awake to cancel, deadline and lease."""
    while True:
        cancel.check()
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"{transfer}: the source sent nothing more in time")
        renew()
        try:
            return peer.channel.receive(timeout_s=min(_SLICE_S, left_s))
        except DeadlineError:
            continue


def _reported(frame: wire.Fail) -> PdxferError:
    if frame.error == ExhaustedError.__name__:
        return ExhaustedError(f"at the source: {frame.message}")
    if frame.error == CorruptError.__name__:
        return CorruptError("*", f"at the source: {frame.message}")
    return _REPORTED.get(frame.error, PeerError)(f"at the source: {frame.message}", reason=frame.reason)
