"""Payloads on a plane of their own: headers, credits and goodbyes go over ZMQ, bulk bytes by another library.

In come what ``tcp_channel.py`` takes and a ``Link`` (NIXL, UCX, torch.distributed: a module each); out come the same
messages. The receiver decides when a payload moves, so its staging is bounded whatever senders do::

    sender                                             receiver
      ── DATA    header (+ small payload) ────────▶    as over tcp
      ── OFFER   sequence, bytes, header, where ──▶    a place in the inbox; when it is its turn, memory for it
      ◀─ PULL    sequence ─────────────────────────    only where the sender has to act
      ══ payload, by the plane ═══════════════════▶    or read by the receiver itself
      ◀─ TAKEN   sequence ─────────────────────────    the sender's memory is free: its Sending is done
      ◀─ GRANT   count ────────────────────────────    as over tcp: messages were released
      ── REGION  id, header, access ──────────────▶    RemoteRegion, where the plane can read
      ── RETIRE  id ──────────────────────────────▶    it closes
      ◀▶ NOTE    bytes ───────────────────────────     what two links tell each other to get to know

Three kinds of threads meet here: the callers', ZMQ's I/O thread (``_on_...``), and the mover, one per transport, which
begins moves and watches those underway (``links.py``). ``_changed`` guards what they share.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from pdxfer.errors import DeadlineError, MisuseError, PdxferError, TransportError
from pdxfer.transport.base import MAX_HEADER_BYTES, Deadline, Message, Sending, check_header
from pdxfer.transport.links import Arriving, Link, Mover, Staging
from pdxfer.transport.regions import Closable, Region, RemoteRegion, parse_fields
from pdxfer.transport.runs import byte_view
from pdxfer.transport.tcp import TcpTransport
from pdxfer.transport.tcp_channel import CREDITS, TcpChannel, pack
from pdxfer.transport.tcp_io import Frames, Line

__all__ = ["NOTE_MAX_BYTES", "PlaneChannel", "PlaneTransport"]

_log = logging.getLogger(__name__)

NOTE, OFFER, PULL, TAKEN, REGION, RETIRE = range(8, 14)

#: What links may tell each other at once, and what may say where a payload lies; ZMQ cuts off who sends more.
NOTE_MAX_BYTES = MAX_HEADER_BYTES
_NOTES_MAX, _AHEAD = 64, 2  # notes that wait to be heard; payloads moved before anyone asked for them
_EMPTY = memoryview(b"")


class _PlaneSending(Sending):
    """A payload that the peer was told of. Done when the peer has it all, and our side has let go of it, too."""

    def __init__(self, channel: PlaneChannel, sequence: int, payload: memoryview) -> None:
        self._channel, self.sequence, self.payload = channel, sequence, payload
        self.owed, self.pulled = {TAKEN}, False

    @property
    def done(self) -> bool:
        return not self.owed

    def wait(self, timeout_s: float) -> None:
        self._channel.wait_until(lambda: self.done, Deadline(timeout_s), "the receiver to take the message")


class PlaneChannel(TcpChannel):
    """See the module."""

    _transport: PlaneTransport

    def __init__(self, transport: PlaneTransport, line: Line, peer_max_bytes: int) -> None:
        super().__init__(transport, transport.io, line, peer_max_bytes)
        self._mover = transport.mover
        self.link: Link | None = None
        self._notes: deque[bytes] = deque()
        self._sequence = 0
        self._offered: dict[int, _PlaneSending] = {}
        self._remotes: dict[int, RemoteRegion] = {}
        self._leaving = False  # the peer said goodbye, and we still take what it sent before
        self._kinds: dict[int, tuple[int, int, Callable[..., None]]] = {  # numbers, frames, who reads it
            NOTE: (0, 1, self._on_note),
            OFFER: (2, 2, self._on_offer),
            PULL: (1, 0, self._on_pull),
            TAKEN: (1, 0, self._on_taken),
            REGION: (1, 2, self._on_region),
            RETIRE: (1, 0, self._on_retire),
        }

    # Getting to know each other.

    def tell(self, note: bytes) -> None:
        """Send a note to the peer's link."""
        self._io.call(lambda: self._line.post([pack(NOTE), note]))

    def hear(self, deadline: Deadline) -> bytes:
        """Wait for a note from the peer's link; raises TransportError, DeadlineError."""
        self.wait_until(lambda: bool(self._notes), deadline, "the peer's plane to introduce itself")
        return self._notes.popleft()

    def wait_until(self, holds: Callable[[], bool], deadline: Deadline, what: str) -> None:
        """Wait for something that happens under ``_changed``; TransportError once the channel ended without it."""
        with self._changed:
            self._changed.wait_for(lambda: holds() or self.ended, deadline.left_s())
            if holds():
                return
            if self.ended:
                raise TransportError(self._why())
        raise DeadlineError(f"gave up waiting for {what}")

    # The caller's threads.

    def _linked(self) -> Link:
        assert self.link is not None, "a channel is used only after its link was made"
        return self.link

    def send_all(self, header: bytes, payload: memoryview | None = None, *, timeout_s: float) -> Sending:
        """Offer the payload to the peer, or send it along when it is small."""
        view = byte_view(_EMPTY if payload is None else payload, "payload")
        if view.nbytes <= min(self._transport.inline_bytes, self._peer_max_bytes):
            return super().send_all(header, view, timeout_s=timeout_s)
        deadline = Deadline(timeout_s)
        check_header(header)
        self._check_taken(view.nbytes)
        with self._alone(self._sender, "send"):
            where = self._spend_on(lambda link: link.offer(view), deadline)
            self._sequence += 1
            sending = _PlaneSending(self, self._sequence, view)
            with self._changed:
                self._offered[sending.sequence] = sending
            self._mover.call(lambda: None)  # it may have to help the peer to read
            self._io.call(lambda: self._line.post([pack(OFFER, sending.sequence, view.nbytes), header, where]))
            return sending

    def export_region(self, region: Region, header: bytes, *, timeout_s: float) -> None:
        """Tell the peer how to read ``region``."""
        if not self._transport.can_export:
            raise MisuseError("this transport can't export regions", hint="send the bytes as payload (packed mode)")
        deadline = Deadline(timeout_s)
        check_header(header)
        if not self._transport.owns(region):
            raise MisuseError(f"region {region.name!r} is closed or belongs to another transport")
        with self._alone(self._sender, "send"):
            access = self._spend_on(lambda link: link.access(region), deadline)
            self._io.call(lambda: self._line.post([pack(REGION, region.descriptor.region_id), header, access]))

    def _spend_on(self, describe: Callable[[Link], bytes], deadline: Deadline) -> bytes:
        self._spend_credit(deadline)
        try:
            return describe(self._linked())
        except BaseException:
            with self._changed:
                self._credits += 1
            raise

    def retire(self, region_id: int) -> None:
        """A region of ours closed: tell the peer if it knows it. Any thread."""
        if self.link is not None and self.link.withdraw(region_id):
            self._io.call(lambda: self._line.post([pack(RETIRE, region_id)]))

    def _has_next(self) -> bool:
        head = self._inbox[0] if self._inbox else None
        if not isinstance(head, Arriving) or head.message is not None:
            return head is not None
        if not head.asked:
            head.asked = True
            self._mover.call(self._advance)
        return False

    def _take_next(self) -> Message:
        head = self._inbox.popleft()
        if any(isinstance(entry, Arriving) and not entry.begun for entry in self._inbox):
            self._mover.call(self._advance)
        message: Any = head.message if isinstance(head, Arriving) else head
        return cast("Message", message)

    def _discard(self, messages: list[Any]) -> None:
        for entry in messages:
            if isinstance(entry, Arriving) and entry.message is not None:
                entry.message.release()

    def close(self) -> None:
        """As over tcp; then the plane lets go of all memory and of the peer."""
        super().close()
        self._mover.cancel(self)
        with self._changed:
            remotes = list(self._remotes.values())
        for remote in remotes:
            remote.close()
        if self.link is not None:
            self.link.close()

    # The I/O thread.

    def _on_end(self, why: str) -> None:
        with self._changed:  # what never came, and all behind it, is lost
            arrived = next(
                (i for i, e in enumerate(self._inbox) if isinstance(e, Arriving) and e.message is None), None
            )
            lost = [] if arrived is None else [self._inbox.pop() for _ in range(len(self._inbox) - arrived)]
        super()._on_end(why)
        self._discard(lost)
        self._mover.call(lambda: self._mover.drop(self))

    def _read(self, frames: Frames) -> None:
        first = frames[0].buffer
        kind = first[1] if 2 <= len(first) <= 32 else 0
        if kind not in self._kinds:
            super()._read(frames)
            return
        numbers, blobs, handler = self._kinds[kind]
        fields = parse_fields(first, "a message", *[int] * (numbers + 1))
        if len(frames) != 1 + blobs or any(not 0 <= n < 1 << 63 for n in fields):
            raise TransportError("the peer sent a message of an unknown kind")
        handler(*fields[1:], *(frame.bytes for frame in frames[1:]))  # no frame is above NOTE_MAX_BYTES

    def _on_note(self, note: bytes) -> None:
        with self._changed:
            if len(self._notes) >= _NOTES_MAX:
                raise TransportError("the peer sent more notes than were asked for")
            self._notes.append(note)
            self._changed.notify_all()

    def _on_offer(self, sequence: int, nbytes: int, header: bytes, where: bytes) -> None:
        if not 1 <= nbytes <= self._transport.max_payload_bytes:
            raise TransportError(f"the peer offers {nbytes} bytes; {self._transport.max_payload_bytes} are taken")
        self._await(Arriving(sequence, nbytes, header, where))

    def _on_region(self, region_id: int, header: bytes, access: bytes) -> None:
        if not self._transport.can_export:
            raise TransportError("the peer exports a region, which this transport can't")
        self._await(Arriving(region_id, 0, header, access))

    def _await(self, entry: Arriving) -> None:
        if self._held >= CREDITS:
            raise TransportError("the peer sent more messages than it may")
        self._enqueue(entry)
        self._mover.call(self._advance)

    def _on_retire(self, region_id: int) -> None:
        with self._changed:
            for entry in self._inbox:
                if isinstance(entry, Arriving) and not entry.nbytes and entry.sequence == region_id:
                    entry.retired = True
            remote = self._remotes.pop(region_id, None)
        if remote is not None:
            remote.close()
        self._mover.call(lambda: self._linked().forget(region_id))

    def _on_pull(self, sequence: int) -> None:
        sending = self._offered.get(sequence)
        if sending is None or sending.pulled or not self._linked().pushes:
            raise TransportError("the peer pulls a message that it was not offered, or twice")
        sending.owed.add(PULL)
        sending.pulled = True
        self._mover.call(lambda: self._push(sending))

    def _on_taken(self, sequence: int) -> None:
        if sequence not in self._offered:
            raise TransportError("the peer took a message that it was not offered")
        self._paid(self._offered[sequence], TAKEN)

    def _paid(self, sending: _PlaneSending, owed: int) -> None:
        with self._changed:
            sending.owed.discard(owed)
            if sending.done:
                self._offered.pop(sending.sequence, None)
            self._changed.notify_all()

    def _on_goodbye(self) -> None:
        self._leaving = True
        self._mover.call(self._advance)

    # The mover's thread.

    def _end_line(self, why: str) -> None:
        self._io.call(lambda: self._line.end(why))

    def _advance(self) -> None:
        """Begin what may begin; hang up on a peer that said goodbye when nothing more can come from it."""
        if self.link is None or self.ended:
            return
        while (entry := self._choose()) is not None:
            try:
                self._begin(self.link, entry)
            except PdxferError as error:
                self._end_line(error.message)
                return
        if self._leaving and not any(isinstance(e, Arriving) and e.message is None for e in list(self._inbox)):
            self._end_line("the peer closed the channel")

    def _choose(self) -> Arriving | None:
        with self._changed:
            arriving = [entry for entry in self._inbox if isinstance(entry, Arriving)]
            waiting = [entry for entry in arriving if not entry.begun]
            if not waiting:
                return None
            first, ahead = waiting[0], len(arriving) - len(waiting)
            early = ahead < (CREDITS if self._leaving else _AHEAD) and self._transport.staging.has_room(first.nbytes)
            if not (first.asked or early):
                return None
            first.begun = True
            return first

    def _begin(self, link: Link, entry: Arriving) -> None:
        if not entry.nbytes:
            self._open_region(link, entry)
            return
        staging = self._transport.staging.lend(entry.nbytes)
        view = staging.view[: entry.nbytes]
        try:
            move = link.fetch(entry.sequence, entry.where, view)
        except BaseException:
            self._transport.staging.take_back(staging)
            raise
        if link.pushes:
            self._io.call(lambda: self._line.post([pack(PULL, entry.sequence)]))
        self._mover.watch(self, move, partial(self._fetched, entry, staging, view))

    def _fetched(self, entry: Arriving, staging: Region, view: memoryview, why: str, free: bool) -> None:
        if why:
            self._transport.staging.take_back(staging, reusable=free)
            self._end_line(why)
            return

        def release() -> None:
            self._transport.staging.take_back(staging)
            self._give_back()

        self._io.call(lambda: self._line.post([pack(TAKEN, entry.sequence)]))
        self._arrived(entry, Message(entry.header, view, on_release=release))

    def _open_region(self, link: Link, entry: Arriving) -> None:
        remote = link.open_region(entry.where)
        with self._changed:
            retired = entry.retired or self.ended
            if not retired:
                self._remotes[entry.sequence] = remote
        if retired:
            remote.close()
        self._arrived(entry, Message(entry.header, _EMPTY, region=remote))

    def _arrived(self, entry: Arriving, message: Message) -> None:
        with self._changed:
            entry.message = message
            wanted = any(e is entry for e in self._inbox)
            self._changed.notify_all()
        if not wanted:
            message.release()
        if self._leaving:
            self._mover.call(self._advance)

    def _push(self, sending: _PlaneSending) -> None:
        def pushed(why: str, free: bool) -> None:
            if why:
                self._end_line(why)
            else:
                self._paid(sending, PULL)

        try:
            move = self._linked().push(sending.sequence, sending.payload)
        except PdxferError as error:
            self._end_line(error.message)
            return
        self._mover.watch(self, move, pushed)


class PlaneTransport(TcpTransport):
    """What the planes share. A plane says what its ``Link`` is, and overrides how regions are made.

    Args:
        staging_bytes: received payloads that nobody asked for yet lie in at most so much memory, of all channels
            together; beyond, each waits until its receiver does.
        inline_bytes: payloads up to here go with their header.
        stall_s: a payload that takes longer on the plane ends its channel.
        insecure_plane: let the plane reach other hosts, though it neither encrypts nor asks who is there: what CURVE
            does for headers it can't do for payloads. ``insecure`` implies it; else the plane stays on this host.
        options: those of ``TcpTransport``.
    """

    def __init__(
        self,
        *,
        staging_bytes: int = 256 << 20,
        inline_bytes: int = 32 << 10,
        stall_s: float = 30.0,
        insecure_plane: bool = False,
        **options: Any,
    ) -> None:
        if staging_bytes < 0 or not 0 <= inline_bytes < 64 << 10 or not 0 < stall_s <= 3600:
            raise MisuseError(
                f"staging_bytes {staging_bytes}, inline_bytes {inline_bytes}, stall_s {stall_s} are out of bounds"
            )
        super().__init__(**options)
        self.options = replace(self.options, max_frame_bytes=NOTE_MAX_BYTES, queue_messages=32 * CREDITS)
        self.inline_bytes, self.stall_s = inline_bytes, stall_s
        self.reaches_hosts = insecure_plane or self.insecure
        if self.reaches_hosts:
            self.insecure_listeners += 1
            _log.warning("INSECURE: whoever can connect to the %s plane of this process can use it", self.scheme)
        self.mover = Mover(f"{self.magic}-mover", stall_s, self.tend)
        self.staging = Staging(staging_bytes, lambda nbytes: self.allocate(nbytes, "received"))
        # Threads of the planes' libraries must not outlive the interpreter: exits have been seen to crash or abort.
        atexit.register(self._close_at_exit)

    def _close_at_exit(self) -> None:
        if os.getpid() == self._process_id:
            self.close()

    def tend(self) -> float:
        """On the mover's thread: help peers that read here; returns when to be called again, in seconds."""
        return math.inf

    def offers(self) -> bool:
        """Whether a peer was offered a payload that it has not taken."""
        with self._owned_lock:
            return any(c._offered for c in self._owned if isinstance(c, PlaneChannel))

    @abstractmethod
    def make_link(self, channel: PlaneChannel, deadline: Deadline, *, connected: bool) -> Link:
        """Get to know the peer by notes; ``connected`` on exactly one of the two sides.

        Raises:
            TransportError, DeadlineError: it didn't work out; the channel will be closed.
        """

    def make_channel(self, line: Line, peer_max_bytes: int) -> TcpChannel:
        """Return this end of a channel. On the I/O thread."""
        return PlaneChannel(self, line, peer_max_bytes)

    def _settle(self, channel: TcpChannel, deadline: Deadline, *, connected: bool) -> None:
        assert isinstance(channel, PlaneChannel)
        channel.link = self.make_link(channel, deadline, connected=connected)
        self.mover.call(channel._advance)

    def owns(self, region: Region) -> bool:
        """Whether the region is open and ours."""
        with self._owned_lock:
            return region in self._owned

    def _disown(self, thing: Closable) -> None:
        super()._disown(thing)
        if isinstance(thing, Region):
            with self._owned_lock:
                channels = [c for c in self._owned if isinstance(c, PlaneChannel)]
            for channel in channels:
                channel.retire(thing.descriptor.region_id)

    def close(self) -> None:
        """As over tcp; then end the mover."""
        atexit.unregister(self._close_at_exit)
        super().close()
        self.mover.close()
