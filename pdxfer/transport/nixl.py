"""NIXL: RDMA, NVLink, EFA or TCP, whatever its back-end finds between two agents. The receiver reads.

In come payloads that lie in regions of this transport; out go READs of whole payloads into staging that is registered
once and kept, or, for exported regions, of lists of runs into the caller's memory. Addresses are ``nixl://host:port``,
of the ZMQ listener (``planes.py``); NIXL itself is told by notes who the peer is and, region by region at first use,
how to read it. So a peer can read what it was offered or shown, not all that is registered.

Trust: who is told of a region can read it until the region and every channel to that peer are closed, by NIXL's own
rules: with no check of ours, over TCP even after it was deregistered, and so can whoever gets hold of the note. Our
side reads only inside the region that the peer described, whatever it says later. NIXL parses the peer's metadata in
C++: connect only to peers that you trust not to attack your process.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import msgpack
import numpy as np
from numpy.typing import NDArray

from pdxfer.errors import ExhaustedError, MisuseError, PdxferError, TransportError
from pdxfer.transport.base import Deadline
from pdxfer.transport.links import Link, Move, refuse_beside
from pdxfer.transport.planes import PlaneChannel, PlaneTransport
from pdxfer.transport.regions import Closable, Region, RegionDescriptor, RemoteRegion, parse_fields
from pdxfer.transport.runs import Runs, check_runs

__all__ = ["NixlTransport"]

_log = logging.getLogger(__name__)

_MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")  # the meta package, and what it stands for
_REGIONS_MAX = 1024  # that one channel's peer may tell us of at a time
_PAUSE_S = (20e-6, 500e-6)
_TEND_S = (50e-6, 500e-6)  # between two looks after peers that may be reading here: at first, and at most

#: uint64, shape (n, 3): address, bytes, device.
Rows = NDArray[np.uint64]


class NixlTransport(PlaneTransport):
    """One NIXL agent.

    Args:
        backend: UCX, LIBFABRIC or another that moves host memory; all but UCX need ``insecure_plane``.
        backend_options: for its ``create_backend``. Unless ``insecure_plane``, UCX is confined to the loopback device
            and to shared memory.
        options: those of ``PlaneTransport`` and ``TcpTransport``.
    """

    scheme: ClassVar[str] = "nixl"
    can_export: ClassVar[bool] = True
    magic: ClassVar[str] = "pdxfer-nixl"

    def __init__(
        self, *, backend: str = "UCX", backend_options: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        api = _load()
        self._lock = threading.Lock()  # an agent is not thread-safe
        self._agent: Any = None
        self._registered: dict[Region, Any] = {}
        self._peers: Counter[str] = Counter()  # channels by the peer's agent
        self.exported = False  # whether peers may read whenever they like
        self._rest_s = _TEND_S[0]
        super().__init__(**options)
        given = dict(backend_options or {})
        if not self.reaches_hosts:
            if backend != "UCX":
                self.close()
                raise MisuseError(f"NIXL's {backend} can't be kept from other hosts", hint="say insecure_plane=True")
            given.setdefault("engine_config", "NET_DEVICES=lo")
        #: A new name for every agent: one that came back under an old name would be taken for the one that died.
        self.agent_name = f"pdxfer-{secrets.token_hex(16)}"
        try:
            # Its progress thread never rests: an idle agent takes a core, and readers of the same host most of their
            # speed. The mover makes progress where somebody may need it.
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            config = api.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=strict)
            agent = api.nixl_agent(self.agent_name, config)
            agent.create_backend(backend, given)
            self._empty = api.nixlBind.nixlRegDList(api.nixlBind.DRAM_SEG)
        except Exception as error:
            self.close()
            raise TransportError(
                f"NIXL's {backend} can't be started: {error or type(error).__name__}",
                hint="NIXL_LOG_LEVEL=DEBUG and UCX_LOG_LEVEL=info say more",
            ) from error
        self._agent = agent

    @contextmanager
    def calls(self, what: str) -> Iterator[Any]:
        """The agent, for one thread at a time; whatever it raises becomes a TransportError."""
        with self._lock:
            if self._agent is None:
                raise TransportError("the nixl transport is closed")
            try:
                yield self._agent
            except PdxferError:
                raise
            except Exception as error:  # its classes have no common base
                name = type(error).__name__
                raise TransportError(f"NIXL can't {what}: {error} ({name})", details={"nixl": name}) from error

    @property
    def gone(self) -> bool:
        """Whether there is no agent (any more): nothing is underway then."""
        return self._agent is None

    def make_link(self, channel: PlaneChannel, deadline: Deadline, *, connected: bool) -> Link:
        """Exchange names and where the agents' back-ends are reached."""
        with self.calls("describe this agent") as agent:
            connection = agent.get_partial_agent_metadata(self._empty, True, list(agent.backends))
        channel.tell(msgpack.packb([self.agent_name, connection]))
        name, metadata = parse_fields(channel.hear(deadline), "an introduction", str, bytes)
        self.add_peer(name, metadata)
        return _NixlLink(self, name)

    def tend(self) -> float:
        """Answer peers that read over a path on which the owner must act (TCP); others need nothing from us."""
        if not (self.exported or self.offers()):
            self._rest_s = _TEND_S[0]
            return math.inf
        with suppress(TransportError), self.calls("make progress") as agent:
            agent.get_new_notifs()  # serves a reader until it has all; what peers say by these means nothing to us
        self._rest_s = min(2 * self._rest_s, _TEND_S[1])
        return self._rest_s

    def add_peer(self, name: str, metadata: bytes) -> None:
        """Count a channel to this agent; it becomes known to ours with the first."""
        with self.calls("add the peer") as agent:
            if not self._peers[name]:
                self._load_metadata(agent, name, metadata)
            self._peers[name] += 1

    def drop_peer(self, name: str) -> None:
        """Count one channel less; with the last one the agent is forgotten."""
        with suppress(TransportError), self.calls("remove the peer") as agent:
            self._peers[name] -= 1
            if not self._peers[name]:
                del self._peers[name]
                if name != self.agent_name:
                    agent.remove_remote_agent(name)
                    agent.get_new_notifs()  # sockets of what was closed go when progress is made, and not before

    def learn(self, name: str, metadata: bytes) -> None:
        """Take in how a region of this peer is read."""
        with self.calls("take in a region of the peer") as agent:
            self._load_metadata(agent, name, metadata)

    def _load_metadata(self, agent: Any, name: str, metadata: bytes) -> None:
        if name == self.agent_name:
            return  # a channel of ours to ourselves
        loaded = agent.add_remote_agent(metadata)
        if loaded not in (name, name.encode()):
            raise TransportError("the peer describes another agent than itself")

    # Memory.

    def _make_region(self, view: memoryview, name: str) -> Region:
        address = _address_of(view)
        region = Region(view=view, descriptor=self._describe(view.nbytes, name, address), on_close=self._disown)
        try:
            self._registered[region] = self.register_rows(address, view.nbytes)
        except TransportError as error:
            raise ExhaustedError(f"region {name!r} of {view.nbytes} bytes: {error.message}") from error
        return region

    def register_rows(self, address: int, nbytes: int) -> Any:
        """Register memory of this process; returns NIXL's list, for ``unregister``."""
        with self.calls("register memory") as agent:
            return agent.register_memory([(address, nbytes, 0, "")], "DRAM")

    def unregister(self, registered: Any) -> None:
        """The reverse of ``register_rows``."""
        with suppress(TransportError), self.calls("deregister memory") as agent:
            agent.deregister_memory(registered)

    def _disown(self, thing: Closable) -> None:
        super()._disown(thing)
        registered = self._registered.pop(thing, None) if isinstance(thing, Region) else None
        if registered is not None:
            self.unregister(registered)

    def locate(self, address: int, nbytes: int) -> Region | None:
        """The region of ours that this memory lies in."""
        for region in list(self._registered):
            start = region.descriptor.address
            if start <= address and address + nbytes <= start + region.nbytes:
                return region
        return None

    def metadata_of(self, region: Region) -> bytes:
        """How to read ``region``, for a peer's agent."""
        with self.calls("describe a region") as agent:
            if region not in self._registered:
                raise MisuseError(f"region {region.name!r} is closed")
            metadata: bytes = agent.get_partial_agent_metadata(self._registered[region], False)
            return metadata

    def begin_read(self, peer: str, target: Rows, source: Rows) -> _Read:
        """Post a READ of ``source[i]`` at the peer into ``target[i]`` here, for all i."""
        with self.calls("read from the peer") as agent:
            local, remote = (agent.get_xfer_descs(rows, "DRAM") for rows in (target, source))
            handle = agent.initialize_xfer("READ", local, remote, peer)
            try:
                return _Read(self, handle, agent.transfer(handle))
            except BaseException:
                with suppress(Exception):
                    handle.release()
                raise

    def close(self) -> None:
        """As the others; then the agent goes, and with it its threads and sockets."""
        super().close()
        with self._lock:
            self._agent = None


class _Read(Move):
    """One posted READ."""

    def __init__(self, transport: NixlTransport, handle: Any, state: str) -> None:
        self._transport, self._handle, self._state = transport, handle, state

    def poll(self) -> bool:
        if self._state == "PROC":
            with self._transport.calls("read from the peer") as agent:
                self._state = agent.check_xfer_state(self._handle)
        if self._state == "ERR":
            raise TransportError("NIXL can't read from the peer", details={"nixl": "ERR"})
        return self._state == "DONE" and self.cancel()

    def cancel(self) -> bool:
        try:
            with self._transport.calls("release a transfer"):
                self._handle.release()
        except TransportError as error:
            _log.debug("a READ can't be cancelled: %s", error.message)
            return self._state == "DONE"
        return True

    def wait(self, timeout_s: float) -> None:
        """Poll until it is done; raises TransportError."""
        deadline, pause_s = Deadline(timeout_s), _PAUSE_S[0]
        try:
            while not self.poll():
                if not deadline.left_s():
                    raise TransportError(f"a READ did not end in {timeout_s} s")
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S[1])
        except TransportError:
            patience: Deadline | None = Deadline(timeout_s)
            while not (self.cancel() or self._transport.gone):  # nobody reuses the target while we are here
                if patience is not None and not patience.left_s():
                    if self._state != "PROC":
                        break  # it has failed, and it is only the handle that stays
                    patience = None
                    _log.error("a READ can be neither ended nor cancelled: it may still write to its target")
                time.sleep(_PAUSE_S[1])
            raise


class _NixlLink(Link):
    pushes: ClassVar[bool] = False

    def __init__(self, transport: NixlTransport, peer: str) -> None:
        self.transport, self.peer = transport, peer
        self._told: set[int] = set()
        self._theirs: dict[int, RegionDescriptor] = {}
        self._closed = False

    def offer(self, payload: memoryview) -> bytes:
        address = _address_of(payload)
        region = self.transport.locate(address, payload.nbytes)
        if region is None:
            raise MisuseError(
                "the payload doesn't lie in a region of this nixl transport",
                hint="pack it into region.view of allocate(), or register() its memory",
            )
        known = region.descriptor.region_id in self._told
        access = b"" if known else self._describe(region)
        packed: bytes = msgpack.packb([region.descriptor.region_id, address - region.descriptor.address, access])
        return packed

    def access(self, region: Region) -> bytes:
        self.transport.exported = True
        self.transport.mover.call(lambda: None)
        return self._describe(region)

    def _describe(self, region: Region) -> bytes:
        packed: bytes = msgpack.packb([region.descriptor.to_bytes(), self.transport.metadata_of(region)])
        self._told.add(region.descriptor.region_id)
        return packed

    def withdraw(self, region_id: int) -> bool:
        known = region_id in self._told
        self._told.discard(region_id)
        return known

    def fetch(self, sequence: int, where: bytes, target: memoryview) -> Move:
        region_id, offset, access = parse_fields(where, "an offer", int, int, bytes)
        if access and self._learn(access).region_id != region_id:
            raise TransportError("the peer offers one region and describes another")
        found = self._theirs.get(region_id)
        if found is None or not 0 <= offset <= found.nbytes - target.nbytes:
            raise TransportError(f"the peer offers {target.nbytes} bytes outside the regions it described")
        rows = [np.array([[at, target.nbytes, 0]], np.uint64) for at in (_address_of(target), found.address + offset)]
        return self.transport.begin_read(self.peer, *rows)

    def open_region(self, access: bytes) -> RemoteRegion:
        return _NixlRegion(self, self._learn(access))

    def _learn(self, access: bytes) -> RegionDescriptor:
        described, metadata = parse_fields(access, "access to a region", bytes, bytes)
        descriptor = RegionDescriptor.from_bytes(described)
        if descriptor.scheme != self.transport.scheme or len(self._theirs) >= _REGIONS_MAX:
            raise TransportError("the peer described a region of another transport, or too many")
        self.transport.learn(self.peer, metadata)
        return self._theirs.setdefault(descriptor.region_id, descriptor)

    def forget(self, region_id: int) -> None:
        self._theirs.pop(region_id, None)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.transport.drop_peer(self.peer)


class _NixlRegion(RemoteRegion):
    """A peer's registered memory: no view, only copies."""

    def __init__(self, link: _NixlLink, descriptor: RegionDescriptor) -> None:
        super().__init__(descriptor)
        self._link: _NixlLink | None = link

    @property
    def view(self) -> None:
        """None: a peer's memory can't be mapped."""
        self._live()

    def _live(self) -> _NixlLink:
        if self._link is None:
            raise TransportError(f"remote region {self.name!r} is closed", hint="its channel or its owner closed it")
        return self._link

    def read_runs(self, target: memoryview, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
        """READ all runs in one transfer; memory that no region of ours covers is registered for as long."""
        link = self._live()
        view, to, at, sizes = check_runs(target, self.nbytes, target_offsets, source_offsets, lengths)
        if not len(sizes):
            return 0
        base, transport = _address_of(view), link.transport
        borrowed = None
        if transport.locate(base, view.nbytes) is None:
            borrowed = transport.register_rows(base, view.nbytes)
        try:
            rows = [_rows(base, to, sizes), _rows(self.descriptor.address, at, sizes)]
            transport.begin_read(link.peer, *rows).wait(transport.stall_s)
        finally:
            if borrowed is not None:
                transport.unregister(borrowed)
        return int(sizes.sum())

    def close(self) -> None:
        """Read no more."""
        self._link = None


def _rows(base: int, offsets: Runs, lengths: Runs) -> Rows:
    rows = np.zeros((len(lengths), 3), np.uint64)
    rows[:, 0] = offsets.astype(np.uint64) + np.uint64(base)
    rows[:, 1] = lengths
    return rows


def _address_of(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def _load() -> Any:
    """NIXL's Python API under whichever name it is installed; raises ImportError."""
    refuse_beside("ucxx")
    for name in _MODULES:
        first = name not in sys.modules
        try:
            api = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise
            continue
        if first:  # it logs to standard output, which may be a program's result
            logger = logging.getLogger("nixl")
            logger.handlers.clear()
            logger.propagate = True
            if "NIXL_LOG_LEVEL" not in os.environ:
                logger.setLevel(logging.WARNING)
        return api
    raise ImportError("NIXL is not installed")
