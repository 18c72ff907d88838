"""Serve: the source's end of data channels: what one reader may ask for, and what of it is underway.

In come frames of a reader, an admitted session, and staging; out come chunks, or one Fail frame. It opens no connection
and makes no control call; ``driver.py`` is the other end.

Staging is shared. A chunk that was sent keeps its block until the reader has released it, so a reader that stands still
keeps what it has; what it can have is bounded twice: by its share of the arena (``arena.py``), and, when others wait,
by time: a chunk that nobody took for half of ``stall_s`` costs its reader the channel.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from pdxfer import packing, wire
from pdxfer.agent.arena import Arena
from pdxfer.errors import DeadlineError, InternalError, MisuseError, PdxferError, PeerError, StaleError, TransportError
from pdxfer.lanes import lane
from pdxfer.messages import Mode
from pdxfer.packing import Chunk, EdgeProgram
from pdxfer.pages import Side
from pdxfer.transport import Channel, Region, Sending

__all__ = ["Ask", "SourceSession", "serve_channel"]

_SLICE_S = 0.1  # how long a blocked thread stays deaf to close
_NAME_BYTES = 1100  # a table's name of 256 characters and the numbers beside it, at most
_log = logging.getLogger("pdxfer.driver")

#: Opens a transfer as control would: the encoded Open in, the session's name and the encoded answer out.
Ask = Callable[[bytes], tuple[bytes, bytes]]


class Sent:
    """Blocks of staging that one channel's reader has not released yet; used by the channel's thread only."""

    def __init__(self, staging: Arena, stall_s: float) -> None:
        self._staging, self._stall_s = staging, stall_s
        self._blocks: deque[tuple[Sending, memoryview, float, bool]] = deque()

    def add(self, sending: Sending, block: memoryview, *, wipe: bool) -> None:
        """Keep a block until its message is released."""
        self._blocks.append((sending, block, time.monotonic(), wipe))

    def reap(self) -> int:
        """Free what was released; returns how many were not."""
        while self._blocks and self._blocks[0][0].done:
            self._free_oldest()
        return len(self._blocks)

    def room(self, nbytes: int) -> memoryview:
        """A block for one more chunk: what the reader has not released yet has to make room before others have to.

        Raises:
            ExhaustedError: none in time, or ever. TransportError: the channel died.
        """
        while (block := self._staging.try_allocate(nbytes, self)) is None and self._blocks:
            self.check_taken()
            with suppress(DeadlineError):
                self._blocks[0][0].wait(_SLICE_S)
            self.reap()
        return block or self._staging.allocate(nbytes, self, timeout_s=self._stall_s)

    def check_taken(self) -> None:
        """Raise TransportError when others wait for staging that this reader has not taken for long."""
        idle_s = time.monotonic() - self._blocks[0][2] if self._blocks else 0.0
        if self._staging.waiting and idle_s > self._stall_s / 2:  # they wait for all of it, and must not be late
            raise TransportError(f"the reader has not taken a chunk for {idle_s:.1f} s, and others wait for its memory")

    def drop(self) -> None:
        """The channel is closed: free everything."""
        while self._blocks:
            self._free_oldest()

    def _free_oldest(self) -> None:
        _, block, _, wipe = self._blocks.popleft()
        self._staging.free(block, wipe=wipe)


class SourceSession:
    """The source's end of one edge: what one reader may ask for. Used by the thread of its channel only,
    except ``close`` and ``quiet``.

    Args:
        wipe: zero staging after use: peers that map it, or read it by themselves, see what lies there.
        about: what log lines carry beside the transfer's id.
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
        complete: Callable[[SourceSession, int], object],
        staging: Arena,
        wipe: bool = False,
        stall_s: float = 5.0,
        kernel: str = "auto",
        about: Callable[[], Mapping[str, str]] = dict,
        copy_threads: int = 0,
    ) -> None:
        self.transfer, self.generation, self.session, self.mode = transfer, generation, session, mode
        self.about = about
        self.program, self.source, self.regions = program, source, regions
        self.check_live, self.complete = check_live, complete
        self.staging, self.wipe, self.stall_s = staging, wipe, stall_s
        self.kernel, self.copy_threads = kernel, copy_threads
        self.digests = True
        self.unsure = False  # staging of chunks that the reader may still have read is others' by now
        self._busy = threading.Lock()
        self._channel: Channel | None = None
        self._closed = False

    def finish(self) -> None:
        """Its reader has all that it wanted: nothing more will be read, and the channel may serve others."""
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

    def begin(self, channel: Channel, digests: bool) -> None:
        """From here on ``channel`` serves it; raises StaleError when it is over."""
        self._channel, self.digests = channel, digests
        if self._closed:
            raise StaleError(f"{self.transfer}: the session is closed")
        self.check_live()

    def export(self, channel: Channel, exported: set[int]) -> None:
        """In direct mode, let the reader see the regions that it does not know yet."""
        if self.mode is not Mode.DIRECT or len(exported) == len(self.regions):
            return
        for index in sorted(self.program.touched[1] - exported):
            header = wire.encode(wire.Exported(self.session, index))
            channel.export_region(self.regions[index], header, timeout_s=self.stall_s)
            exported.add(index)

    def tables(self) -> Iterator[wire.Tables]:
        """In direct mode, the source's page tables that the edge uses, in as few frames as hold them."""
        if self.mode is not Mode.DIRECT:
            return
        pieces, room = list[list[Any]](), wire.TABLES_BYTES_MAX
        for name in self.program.touched[0]:
            table = self.source.tables[name].astype("<i8").tobytes()
            start = 0
            while start < len(table) or not start:
                if room < _NAME_BYTES + 8:
                    yield wire.Tables(self.session, pieces, False)
                    pieces, room = [], wire.TABLES_BYTES_MAX
                entries = table[start : start + (room - _NAME_BYTES) // 8 * 8]
                pieces.append([name, start // 8, len(table) // 8, entries])
                start, room = start + len(entries), room - len(entries) - _NAME_BYTES
                if not table:
                    break
        yield wire.Tables(self.session, pieces, True)

    def answer(self, channel: Channel, index: int, sent: Sent) -> None:
        """Send one chunk: packed with its digests, or its digests alone."""
        if index >= len(self.program.chunks):
            raise PeerError(f"chunk {index} of {len(self.program.chunks)} was wanted", reason="PROTOCOL")
        chunk = self.program.chunks[index]
        block = sent.room(chunk.nbytes) if self.mode is Mode.PACKED else None
        try:
            with lane(chunk.nbytes, self.copy_threads, digests=self.digests), self._busy:
                if self._closed:
                    raise StaleError(f"{self.transfer}: the session is closed")
                self.check_live()
                frame = self._gather(chunk, block)
            payload = None if block is None else block[: chunk.nbytes]
            sending = channel.send_all(wire.encode(frame), payload, timeout_s=self.stall_s)
        except BaseException:
            if block is not None:
                self.staging.free(block, wipe=self.wipe)
            raise
        if block is not None:
            sent.add(sending, block, wipe=self.wipe)

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
    ask: Ask | None,
    staging: Arena,
    stop: threading.Event,
    stall_s: float,
) -> None:
    """Serve one accepted channel until it or the agent closes; one session after the other.

    Args:
        lookup: finds the session that a Hello names. ask: opens one, or None where only control may.

    Whatever one session does wrong ends that session with a Fail frame; whatever the channel does wrong ends
    the channel. Staging is given back in every case.
    """
    served = _Served(channel, lookup, ask, Sent(staging, stall_s))
    try:
        while not stop.is_set():
            served.sent.reap()
            try:
                message = channel.receive(timeout_s=_SLICE_S)
            except DeadlineError:
                served.sent.check_taken()
                continue
            with message:
                frame = wire.decode(message.header)
            served.handle(frame)
    except PdxferError as error:
        _log.debug("channel ends: %s", error.message)
    finally:
        if served.sent.reap() and served.current is not None and not served.current.digests:
            served.current.unsure = True  # with digests, the reader itself has seen what it got
        channel.close()
        served.sent.drop()


class _Served:
    """One channel and the session that it serves now."""

    def __init__(self, channel: Channel, lookup: Callable[[bytes], SourceSession], ask: Ask | None, sent: Sent) -> None:
        self.channel, self.lookup, self.ask, self.sent = channel, lookup, ask, sent
        self.answers = b""  # the session that a failure is to name
        self.exported: set[int] = set()
        self.current: SourceSession | None = None

    def handle(self, frame: wire.Frame) -> None:
        """Do what a frame asks for; raises TransportError when the channel is over."""
        self.answers = frame.session
        try:
            self._dispatch(frame)
        except TransportError:
            raise
        except Exception as raised:  # noqa: BLE001 - our own bug must reach the target as an error, too
            error = raised if isinstance(raised, PdxferError) else _own_bug(raised)
            if self.current is not None:  # else control says it: to Ask, it is just a no
                _log.warning("transfer %s: %s", self.current.transfer, error.message, extra=self.current.about())
            fail = wire.Fail(self.answers, type(error).__name__, error.reason, error.message[:1024])
            self.channel.send_all(wire.encode(fail), timeout_s=_SLICE_S)

    def _dispatch(self, frame: wire.Frame) -> None:
        if isinstance(frame, (wire.Hello, wire.Ask)):
            self.current = None
            self._begin(frame)
            return
        session = self.current
        if session is None or frame.session != session.session:
            return  # a late frame of a session that is over
        if isinstance(frame, wire.Want):
            self._answer(session, frame.chunks)
        elif isinstance(frame, wire.Done):
            session.complete(session, frame.generation)
            self.current = None
            self._send(wire.Closed(frame.session), session)
        else:
            raise PeerError(f"a target does not send {type(frame).__name__}", reason="PROTOCOL")

    def _begin(self, frame: wire.Hello | wire.Ask) -> None:
        """Tell the reader all that it must know before it can read, then what it wants first.

        What Ask answers has the first page tables with it: a wake-up less where no region has to come before them.
        """
        name, answer = frame.session, b""
        if isinstance(frame, wire.Ask):
            if self.ask is None:
                raise MisuseError("transfers are opened by control here")
            name, answer = self.ask(frame.request)
        session = self.lookup(name)
        session.begin(self.channel, frame.digests)
        tables, chunks = session.tables(), frame.chunks
        if isinstance(frame, wire.Ask):
            chunks = [chunk for chunk in chunks if chunk < len(session.program.chunks)]
            known = len(self.exported) == len(session.regions)
            first = next(tables, None) if known else None
            pieces, last = (first.pieces, first.last) if first else ([], False)
            self._send(wire.Opened(frame.session, answer, pieces, last), session)
        self.current, self.answers = session, name
        session.export(self.channel, self.exported)
        for told in tables:
            self._send(told, session)
        self._answer(session, chunks)

    def _send(self, frame: wire.Frame, session: SourceSession) -> None:
        self.channel.send_all(wire.encode(frame), timeout_s=session.stall_s)

    def _answer(self, session: SourceSession, chunks: list[int]) -> None:
        for chunk in chunks:
            session.answer(self.channel, chunk, self.sent)


def _own_bug(raised: Exception) -> InternalError:
    _log.error("serving a channel failed unexpectedly", exc_info=raised)
    return InternalError(f"the source failed unexpectedly ({type(raised).__name__}); its log has more")
