"""One channel over shared memory: references to payloads and their acknowledgements, on two Unix sockets.

In come headers and views of memfd regions; out they come at the peer as views of the same pages. Acknowledgements
have a socket of their own, so that they never queue behind messages::

    sender                                                receiver
      data  ── MESSAGE  header ─────────────────────────▶   receive()
      data  ── PAYLOAD  header, region, offset, length ─▶   receive(): checked view of a read-only mapping
               (+ descriptor and memfd, the first time)
      data  ── REGION   header, descriptor (+ memfd) ───▶   receive(): RemoteRegion
      data  ── RETIRE   region ─────────────────────────▶   mapping dropped
      acks  ◀────────────────────────── sequence number ─   Message.release()

Who reads the acks? Whoever needs one: ``Sending.wait`` (one waiter polls for all the others), ``Sending.done``, and
a ``send_all`` whose window is full. ``receive`` need not run for it. The window keeps the acks that nobody has
read yet fewer than their socket holds, so ``release`` never blocks.

This file knows the packets, not how two processes found each other (``shm.py``).
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from pdxfer.errors import DeadlineError, ExhaustedError, MisuseError, TransportError
from pdxfer.transport.base import (
    MAX_HEADER_BYTES,
    WINDOW_MESSAGES,
    Channel,
    Deadline,
    DoneSending,
    Message,
    Sending,
    check_header,
)
from pdxfer.transport.regions import Closable, MappedRegion, Region, RegionDescriptor, RemoteRegion
from pdxfer.transport.runs import byte_view
from pdxfer.transport.unix import UseCount, try_receive, try_send, wait_for
from pdxfer.transport.vm import PeerProcess, ProcessRegion, allow_reads_by, create_memfd, map_memfd

__all__ = ["SharedRegion", "ShmChannel", "ShmOwner", "ShmRegion"]

_MESSAGE, _PAYLOAD, _REGION, _RETIRE = 1, 2, 3, 4
_PREFIX = struct.Struct("<B3xIQQQQ")  # kind, header bytes, sequence number, region id, offset, length
_ACK = struct.Struct("<Q")
_PACKET_BYTES = _PREFIX.size + MAX_HEADER_BYTES + 4096
_REGIONS_MAX = 1024  # that a peer may have mapped here at a time
_EMPTY = memoryview(b"")


# -- what is sent --------------------------------------------------------------------------------


class ShmRegion(Region):
    """A region that remembers which channels' peers know it, to tell them when it is closed."""

    def __init__(self, *, view: memoryview, descriptor: RegionDescriptor, on_close: Callable[[Region], None]) -> None:
        super().__init__(view=view, descriptor=descriptor, on_close=on_close)
        self._lock = threading.Lock()
        self._known_to: weakref.WeakSet[ShmChannel] = weakref.WeakSet()

    def tell(self, channel: ShmChannel) -> None:
        """Note that the peer of ``channel`` is about to know this region; raises MisuseError once closed."""
        with self._lock:
            if self.closed:
                raise MisuseError(f"region {self.name!r} is closed")
            self._known_to.add(channel)

    def close(self) -> None:
        """Give the memory up: here now, at each peer when it has read our next message."""
        with self._lock:
            if self.closed:
                return
            super().close()
            self._release()
            known_to = list(self._known_to)
        for channel in known_to:
            channel.retire(self.descriptor.region_id)

    def _release(self) -> None:
        """What else ends with the region."""


class SharedRegion(ShmRegion):
    """A memfd mapped here: one of ours, or an engine's (``fd``, which is copied)."""

    def __init__(self, *, descriptor: RegionDescriptor, on_close: Callable[[Region], None], fd: int = -1) -> None:
        if fd < 0:
            self._fd, view = create_memfd(descriptor.nbytes, descriptor.name)
        else:
            view = map_memfd(fd, descriptor.nbytes, writable=True)
            self._fd = os.dup(fd)
        super().__init__(view=view, descriptor=descriptor, on_close=on_close)

    def lend(self, channel: ShmChannel) -> int:
        """Return a copy of the file descriptor, to be sent over ``channel`` and closed."""
        self.tell(channel)
        with self._lock:
            if self.closed:
                raise MisuseError(f"region {self.name!r} is closed")
            return os.dup(self._fd)

    def _release(self) -> None:
        os.close(self._fd)


class ShmSending(Sending):
    """One payload that the peer has not released yet."""

    def __init__(self, channel: ShmChannel, sequence: int) -> None:
        self._channel, self._sequence = channel, sequence

    @property
    def done(self) -> bool:
        """Whether the receiver released the message."""
        return self._channel.released(self._sequence)

    def wait(self, timeout_s: float) -> None:
        """Wait until the receiver released the message."""
        self._channel.wait_released(self._sequence, Deadline(timeout_s))


class ShmOwner(Protocol):
    """What a channel needs from its transport."""

    readers: str

    def locate(self, payload: memoryview) -> tuple[SharedRegion, int]:
        """Return the allocated region that ``payload`` lies in, and where; raises MisuseError when there is none."""

    def owns(self, region: Region) -> bool:
        """Whether the region is open and this transport's."""

    def _disown(self, thing: Closable) -> None: ...


# -- the channel ---------------------------------------------------------------------------------


class ShmChannel(Channel):
    """See the module. Takes over both sockets.

    Locks: ``_sender`` and ``_receiver`` are held by the one thread that sends or receives; ``_changed`` guards the
    acks, the mappings and ``_closed``, and is never held while blocked.
    """

    def __init__(self, transport: ShmOwner, data: socket.socket, acks: socket.socket, process_id: int) -> None:
        self._transport, self._data, self._acks, self._process_id = transport, data, acks, process_id
        self._open = UseCount(wake=self._wake, release=self._release_sockets)
        self._sender, self._receiver = threading.Lock(), threading.Lock()
        self._changed = threading.Condition(threading.Lock())
        self._closed = False
        # sending
        self._sequence = 0
        self._unreleased: set[int] = set()
        self._polling = False  # a thread polls the acks for all that wait
        self._announced: set[int] = set()
        self._retired: deque[int] = deque()
        # receiving
        self._buffer = bytearray(_PACKET_BYTES)
        self._mapped: dict[int, tuple[RegionDescriptor, memoryview]] = {}
        self._remotes: weakref.WeakSet[RemoteRegion] = weakref.WeakSet()
        self._process: PeerProcess | None = None

    @property
    def closed(self) -> bool:
        """Whether this end is closed."""
        return self._closed

    def close(self) -> None:
        """Close both sockets, unmap what the peer sent, wake who waits."""
        self._open.close()
        with self._changed:
            self._closed = True
            self._mapped = {}
            remotes, process = list(self._remotes), self._process
            self._changed.notify_all()
        for remote in remotes:
            remote.close()
        if process is not None:
            process.close()
        self._transport._disown(self)

    def _wake(self) -> None:
        for sock in (self._data, self._acks):
            with suppress(OSError):  # the peer may have gone first
                sock.shutdown(socket.SHUT_RDWR)

    def _release_sockets(self) -> None:
        self._data.close()
        self._acks.close()

    def _failed(self, error: BaseException) -> None:
        """Every failure of the path closes the channel; what the system said is raised in our words."""
        if isinstance(error, OSError):
            closing = self._open.closing
            self.close()
            ExhaustedError.check(error, "the channel had to be closed")
            raise TransportError("the channel is closed" if closing else _explain(error)) from error
        if isinstance(error, (ExhaustedError, TransportError)):
            self.close()

    # Sending.

    def send_all(self, header: bytes, payload: memoryview | None = None, *, timeout_s: float) -> Sending:
        """Send a reference to ``payload``, which must lie in a region from ``allocate``."""
        deadline = Deadline(timeout_s)
        check_header(header)
        view = byte_view(_EMPTY if payload is None else payload, "payload")
        with _Alone(self, self._sender, "send"):
            self._send_retired()
            if not view.nbytes:
                self._push([_PREFIX.pack(_MESSAGE, len(header), 0, 0, 0, 0), header], [], deadline)
                return DoneSending()
            region, offset = self._transport.locate(view)
            return self._send_payload(header, region, offset, view.nbytes, deadline)

    def _send_payload(
        self, header: bytes, region: SharedRegion, offset: int, nbytes: int, deadline: Deadline
    ) -> ShmSending:
        self._await_acks(lambda: len(self._unreleased) < WINDOW_MESSAGES, deadline, "the receiver to release a message")
        self._sequence += 1
        sequence, region_id = self._sequence, region.descriptor.region_id
        prefix = _PREFIX.pack(_PAYLOAD, len(header), sequence, region_id, offset, nbytes)
        with self._changed:
            self._unreleased.add(sequence)
        try:
            self._push_with_region([prefix, header], region, deadline, describe=False)
        except BaseException:
            with self._changed:
                self._unreleased.discard(sequence)
            raise
        return ShmSending(self, sequence)

    def export_region(self, region: Region, header: bytes, *, timeout_s: float) -> None:
        """Pass the memfd, or say where registered memory lies and let the peer's process read it."""
        deadline = Deadline(timeout_s)
        check_header(header)
        if not (isinstance(region, ShmRegion) and self._transport.owns(region)):
            raise MisuseError(f"region {region.name!r} is closed or belongs to another transport")
        descriptor = region.descriptor
        prefix = _PREFIX.pack(_REGION, len(header), 0, descriptor.region_id, 0, 0)
        with _Alone(self, self._sender, "send"):
            self._send_retired()
            if isinstance(region, SharedRegion):
                self._push_with_region([prefix, header], region, deadline, describe=True)
                return
            region.tell(self)
            allow_reads_by(None if self._transport.readers == "any" else self._process_id)
            self._push([prefix, header, descriptor.to_bytes()], [], deadline)

    def retire(self, region_id: int) -> None:
        """Remember to tell the peer, with the next message, that a region is gone. Any thread."""
        self._retired.append(region_id)

    def _send_retired(self) -> None:
        while self._retired:
            region_id = self._retired[0]
            if not try_send(self._data, [_PREFIX.pack(_RETIRE, 0, 0, region_id, 0, 0)]):
                return  # no room: the next message will try again
            self._retired.popleft()
            self._announced.discard(region_id)

    def _push_with_region(
        self, parts: list[bytes], region: SharedRegion, deadline: Deadline, *, describe: bool
    ) -> None:
        known = region.descriptor.region_id in self._announced
        if describe or not known:
            parts.append(region.descriptor.to_bytes())
        if known:
            self._push(parts, [], deadline)
            return
        fd = region.lend(self)
        try:
            self._push(parts, [fd], deadline)
        finally:
            os.close(fd)
        self._announced.add(region.descriptor.region_id)

    def _push(self, parts: Sequence[bytes], fds: Sequence[int], deadline: Deadline) -> None:
        while not try_send(self._data, parts, fds):
            if not wait_for(self._data, select.POLLOUT, deadline):
                raise DeadlineError("the peer doesn't receive: no room for another message")

    # Acknowledgements of what we sent.

    def released(self, sequence: int) -> bool:
        """Whether the peer released this message; never blocks."""
        with suppress(TransportError, OSError), self._changed, self._open.use("the channel"):
            self._read_acks()
        return sequence not in self._unreleased

    def wait_released(self, sequence: int, deadline: Deadline) -> None:
        """Wait until the peer released this message."""
        try:
            self._await_acks(lambda: sequence not in self._unreleased, deadline, "the receiver to release the message")
        except (OSError, ExhaustedError, TransportError) as error:
            self._failed(error)
            raise

    def _await_acks(self, ready: Callable[[], bool], deadline: Deadline, waited_for: str) -> None:
        with self._changed:
            while not ready():
                if self._closed:
                    raise TransportError("the channel closed before the receiver released the message")
                deadline.check(waited_for)
                if self._polling:
                    self._changed.wait(deadline.left_s())
                else:
                    self._poll_acks(deadline)

    def _poll_acks(self, deadline: Deadline) -> None:
        """Wait, for every waiter, until acks can be read, and read them. Called and left with ``_changed`` held."""
        with self._open.use("the channel"):
            self._polling = True
            self._changed.release()
            try:
                wait_for(self._acks, select.POLLIN, deadline)
            finally:
                self._changed.acquire()
                self._polling = False
                self._changed.notify_all()
            self._read_acks()

    def _read_acks(self) -> None:
        while True:
            try:
                ack = self._acks.recv(_ACK.size + 1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except ConnectionResetError:
                continue  # as in _pull: what the peer wrote before it closed is still here
            if not ack:
                raise TransportError("the channel is closed" if self._open.closing else "the peer is gone")
            if len(ack) != _ACK.size or _ACK.unpack(ack)[0] not in self._unreleased:
                raise TransportError("the peer released a message that it was not sent")
            self._unreleased.discard(_ACK.unpack(ack)[0])
            self._changed.notify_all()

    # Receiving.

    def receive(self, *, timeout_s: float) -> Message:
        """Return the next message; its payload is a view of the sender's memory."""
        deadline = Deadline(timeout_s)
        with _Alone(self, self._receiver, "receive"):
            while True:
                packet = self._pull(deadline)
                try:
                    message = self._read(*packet)
                finally:
                    for fd in packet[1]:
                        os.close(fd)
                if message is not None:
                    return message

    def _pull(self, deadline: Deadline) -> tuple[int, list[int]]:
        while True:
            try:
                packet = try_receive(self._data, self._buffer)
            except ConnectionResetError:
                continue  # the peer closed without reading everything of ours; what it sent is still here, or EOF is
            if packet is None:
                if not wait_for(self._data, select.POLLIN, deadline):
                    raise DeadlineError("no message came in time")
            elif not packet[0]:
                raise TransportError("the channel is closed" if self._open.closing else "the peer is gone")
            else:
                return packet

    def _read(self, nbytes: int, fds: list[int]) -> Message | None:
        """Make a message of the packet in the buffer, or None when it was for the channel itself."""
        if nbytes < _PREFIX.size:
            raise TransportError("the peer sent a packet that is too short")
        kind, header_bytes, sequence, region_id, offset, length = _PREFIX.unpack_from(self._buffer)
        split = _PREFIX.size + header_bytes
        if header_bytes > MAX_HEADER_BYTES or split > nbytes:
            raise TransportError("the peer sent a header of a wrong length")
        header, rest = bytes(memoryview(self._buffer)[_PREFIX.size : split]), bytes(self._buffer[split:nbytes])
        if kind == _MESSAGE and not fds and not rest:
            return Message(header, _EMPTY)
        if kind == _PAYLOAD:
            payload = self._memory(region_id, rest, fds)[1]
            if not length or offset > payload.nbytes or length > payload.nbytes - offset:
                raise TransportError(f"the peer refers to {length} bytes at {offset} of {payload.nbytes}")
            view = payload[offset : offset + length]
            return Message(header, view, on_release=partial(self._acknowledge, sequence))
        if kind == _REGION:
            return Message(header, _EMPTY, region=self._remote_region(region_id, rest, fds))
        if kind == _RETIRE and not fds and not rest and not header_bytes:
            self._forget(region_id)
            return None
        raise TransportError("the peer sent a packet of an unknown kind")

    def _memory(self, region_id: int, description: bytes, fds: list[int]) -> tuple[RegionDescriptor, memoryview]:
        if not fds:
            try:
                return self._mapped[region_id]
            except KeyError:
                raise TransportError("the peer refers to a region that it never passed") from None
        descriptor = _parse(description, region_id)
        if region_id in self._mapped or len(self._mapped) >= _REGIONS_MAX or descriptor.address:
            raise TransportError("the peer passed a region twice, or too many")
        memory = descriptor, map_memfd(fds[0], descriptor.nbytes)
        with self._changed:
            if not self._closed:
                self._mapped[region_id] = memory
        return memory

    def _remote_region(self, region_id: int, description: bytes, fds: list[int]) -> RemoteRegion:
        descriptor = _parse(description, region_id)
        remote: RemoteRegion
        if descriptor.address and not fds:
            remote = ProcessRegion(descriptor, self._peer_process())
        else:
            remote = MappedRegion(*self._memory(region_id, description, fds))
        with self._changed:
            self._remotes.add(remote)
            closed = self._closed
        if closed:
            remote.close()
        return remote

    def _peer_process(self) -> PeerProcess:
        if self._process is not None:
            return self._process
        process = PeerProcess(self._process_id)
        with self._changed:
            self._process = process
            closed = self._closed
        if closed:
            process.close()
        return process

    def _forget(self, region_id: int) -> None:
        with self._changed:
            self._mapped.pop(region_id, None)
            remotes = [r for r in self._remotes if r.descriptor.region_id == region_id]
        for remote in remotes:
            remote.close()

    def _acknowledge(self, sequence: int) -> None:
        try:
            with self._open.use("the channel"):
                sent = try_send(self._acks, [_ACK.pack(sequence)])
        except (TransportError, OSError):
            return  # closed at either end: nobody waits for this ack
        if not sent:
            self.close()  # the peer sends more than its window and doesn't read its acks


class _Alone:
    """One thread at a time sends, and one receives; every failure inside closes the channel.

    Not three generators, which it would be: every message passes here, at both ends.
    """

    __slots__ = ("_channel", "_lock", "_verb")

    def __init__(self, channel: ShmChannel, lock: threading.Lock, verb: str) -> None:
        self._channel, self._lock, self._verb = channel, lock, verb

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise MisuseError(f"two threads {self._verb} on one channel", hint="give each its own channel")
        try:
            self._channel._open.enter("the channel")
        except TransportError as error:
            self._lock.release()
            self._channel._failed(error)
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._channel._open.leave()
        try:
            if error is not None:
                self._channel._failed(error)
        finally:
            self._lock.release()


def _parse(description: bytes, region_id: int) -> RegionDescriptor:
    descriptor = RegionDescriptor.from_bytes(description)
    if descriptor.scheme != "shm" or descriptor.region_id != region_id:
        raise TransportError("the peer passed a region under another name")
    return descriptor


def _explain(error: OSError) -> str:
    if error.errno in (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN):
        return "the peer is gone"
    return f"the Unix socket failed: {error.strerror}"
