"""UCX tag messages: one per payload, over whatever UCX finds between two processes (RDMA, shared memory, TCP).

In come payloads in any memory; out go one tagged send and one tagged receive each. Every channel has a UCX worker of
its own, told to the peer by a note with the tag of its first message, so that what one peer does reaches no other.

Nobody progresses a worker but the mover, while moves are underway: on the two cores where this was measured, short
rests between calls of ``progress`` beat ucxx's own progress threads and its asyncio API several times over.

UCX can report a peer's failure only over transports that know of it, and drops the quick ones of one host for that
(shared memory, reads of the peer's memory). Within a host the ZMQ line notices anyway, so there it isn't asked to.
There UCX aborts the whole process when its read of a peer's memory (``cma``) meets one that has just been killed.
``config={"TLS": "^cma"}`` avoids that, but then UCX leaves about three descriptors behind per channel.

Trust: UCX asks nobody who they are, encrypts nothing, and parses the peer's address in C.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import msgpack
import numpy as np

from pdxfer.errors import PdxferError, TransportError
from pdxfer.transport.base import Deadline
from pdxfer.transport.links import Link, Move, refuse_beside
from pdxfer.transport.planes import PlaneChannel, PlaneTransport
from pdxfer.transport.regions import parse_fields

__all__ = ["UcxTransport"]

_CANCEL_S = 1.0  # how long a cancelled request may take to end
_TAG_BITS = 64


class UcxTransport(PlaneTransport):
    """One UCX context.

    Args:
        config: UCX's settings by name without ``UCX_``, as ``{"TLS": "tcp"}``. Unless the plane may reach other hosts,
            NET_DEVICES is ``lo``.
        peer_failure: have UCX watch for peers that fail; by default only where they may be on other hosts.
        options: those of ``PlaneTransport`` and ``TcpTransport``.
    """

    scheme: ClassVar[str] = "ucx"
    can_export: ClassVar[bool] = False
    magic: ClassVar[str] = "pdxfer-ucx"

    def __init__(
        self, *, config: Mapping[str, str] | None = None, peer_failure: bool | None = None, **options: Any
    ) -> None:
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")  # ucxx sets one that its UCX doesn't know
        refuse_beside("nixl", "nixl_cu12", "nixl_cu13")
        from ucxx._lib import arr, libucxx

        self.api, self.array = libucxx, arr.Array
        super().__init__(**options)
        self.peer_failure = self.reaches_hosts if peer_failure is None else peer_failure
        given = dict(config or {})
        if not self.reaches_hosts:
            given["NET_DEVICES"] = "lo"
        try:
            with _mapped("be started"):
                self._context = libucxx.UCXContext(given)
        except TransportError:
            self.close()
            raise

    def make_link(self, channel: PlaneChannel, deadline: Deadline, *, connected: bool) -> Link:
        """Make a worker, exchange its address and first tag for the peer's."""
        with _mapped("make a worker"):
            worker = self.api.UCXWorker(self._context)
            tag = secrets.randbits(_TAG_BITS - 1)  # not to be guessed by who reaches the worker some other way
            channel.tell(msgpack.packb([bytes(worker.address), tag]))
            address, peer_tag = parse_fields(channel.hear(deadline), "an introduction", bytes, int)
            if not 0 <= peer_tag < 1 << (_TAG_BITS - 1):
                raise TransportError("the peer's first tag is out of bounds")
            found = self.api.UCXAddress.create_from_buffer(address)
            endpoint = self.api.UCXEndpoint.create_from_worker_address(
                worker, found, endpoint_error_handling=self.peer_failure
            )
        return _UcxLink(self, worker, endpoint, (tag, peer_tag))

    def close(self) -> None:
        """As the others; then the context goes."""
        super().close()
        self._context = None


class _UcxLink(Link):
    pushes: ClassVar[bool] = True

    def __init__(self, transport: UcxTransport, worker: Any, endpoint: Any, tags: tuple[int, int]) -> None:
        self._transport, self._worker, self._endpoint, self._tags = transport, worker, endpoint, tags
        self._lock = threading.Lock()

    def fetch(self, sequence: int, where: bytes, target: memoryview) -> Move:
        return self._begin("tag_recv", target, self._tags[0] + sequence)

    def push(self, sequence: int, payload: memoryview) -> Move:
        return self._begin("tag_send", payload, self._tags[1] + sequence)

    def _begin(self, verb: str, memory: memoryview, tag: int) -> Move:
        with self._lock, _mapped(f"begin a {verb}"):
            if self._endpoint is None:
                raise TransportError("the channel is closed")
            array = self._transport.array(np.frombuffer(memory, np.uint8))
            request = getattr(self._endpoint, verb)(array, self._transport.api.UCXXTag(tag % (1 << _TAG_BITS)))
            return _UcxMove(self, request)

    def progress(self) -> None:
        """Let UCX work until it has nothing to do for now."""
        with self._lock, _mapped("make progress"):
            if self._worker is not None:
                self._worker.progress()

    def abandon(self) -> None:
        """Cancel everything underway; the peer gets nothing more from here."""
        with self._lock, suppress(TransportError), _mapped("close an endpoint"):
            endpoint, self._endpoint = self._endpoint, None
            if endpoint is not None:
                self._worker.cancel_inflight_requests()
                endpoint.close()

    def close(self) -> None:
        self.abandon()
        self._worker = None


class _UcxMove(Move):
    def __init__(self, link: _UcxLink, request: Any) -> None:
        self._link, self._request = link, request

    def poll(self) -> bool:
        self._link.progress()
        if not self._request.completed:
            return False
        with _mapped("move a payload"):
            self._request.check_error()
        return True

    def cancel(self) -> bool:
        self._link.abandon()
        deadline = Deadline(_CANCEL_S)
        while not self._request.completed and deadline.left_s():
            with suppress(TransportError):
                self._link.progress()
        return bool(self._request.completed)


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    """Whatever ucxx raises becomes a TransportError."""
    try:
        yield
    except PdxferError:
        raise
    except Exception as error:  # UCX's errors have a common base, those of the bindings around them have not
        name = type(error).__name__
        raise TransportError(f"UCX can't {what}: {error} ({name})", details={"ucx": name}) from error
