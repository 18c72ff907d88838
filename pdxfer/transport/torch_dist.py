"""torch.distributed point to point: gloo between CPUs (``gloo://``), NCCL between GPUs (``nccl://``).

In come payloads in any memory; out go one send and one receive each, in process groups of exactly two ranks that
belong to one channel: made when the peer comes, gone when it goes, and none of them the process's default group. The
groups find each other by a TCPStore of their own, which the accepting side serves at one address (loopback unless the
plane may reach other hosts) and the connecting side is told of by a note. The receive is posted before the sender is
asked to send (PULL in ``planes.py``), so nothing waits unmatched and both directions may be busy at once.

Trust: neither the store nor gloo nor NCCL asks who connects, or encrypts. A peer that sends more than it offered makes
gloo end this process (its own check); nothing is written beyond the payload's memory.
"""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, ClassVar

import msgpack
import numpy as np

from pdxfer.errors import MisuseError, TransportError
from pdxfer.transport.base import Deadline
from pdxfer.transport.links import Link, Move
from pdxfer.transport.planes import PlaneChannel, PlaneTransport
from pdxfer.transport.regions import parse_fields

__all__ = ["GlooTransport", "NcclTransport"]

_LOOPBACK = "127.0.0.1"
_TAGS = 1 << 31  # gloo's are 32 bits


class _TorchTransport(PlaneTransport):
    """What the two back-ends share.

    Args:
        plane_host: numeric address of this host that stores and groups bind to. Loopback by default, and where the
            plane may not reach other hosts; else it must be given here or as ``contact_host``.
        options: those of ``PlaneTransport`` and ``TcpTransport``.
    """

    can_export: ClassVar[bool] = False

    def __init__(self, *, plane_host: str = "", **options: Any) -> None:
        import torch

        self.torch: Any = torch
        super().__init__(**options)
        self.plane_host = plane_host or (self.contact_host if self.reaches_hosts else _LOOPBACK)
        try:
            _numeric(self.plane_host, anywhere=self.reaches_hosts)
        except TransportError as error:
            self.close()
            raise MisuseError(f"plane_host: {error.message}", hint="say plane_host='10.0.0.1' or the like") from error

    def make_link(self, channel: PlaneChannel, deadline: Deadline, *, connected: bool) -> Link:
        """Agree on a store, then join the groups of this pair."""
        timeout = timedelta(seconds=max(deadline.left_s(self.stall_s), 0.001))
        try:
            store = self._join_store(channel, deadline, timeout) if connected else self._serve_store(channel, timeout)
            return self._join_groups(store, 0 if connected else 1, timeout)
        except RuntimeError as error:  # torch.distributed raises it and its subclasses
            raise TransportError(f"no process group with the peer: {_brief(error)}") from error

    def _serve_store(self, channel: PlaneChannel, timeout: timedelta) -> Any:
        bound = socket.create_server((self.plane_host, 0), family=_family(self.plane_host))
        port = bound.getsockname()[1]
        store = self.torch.distributed.TCPStore(
            self.plane_host, port, 2, is_master=True, timeout=timeout, wait_for_workers=False,
            master_listen_fd=bound.detach(),
        )  # fmt: skip
        channel.tell(msgpack.packb([self.plane_host, port]))
        return store

    def _join_store(self, channel: PlaneChannel, deadline: Deadline, timeout: timedelta) -> Any:
        host, port = parse_fields(channel.hear(deadline), "where the peer's store is", str, int)
        if not 0 < port < 1 << 16:
            raise TransportError("the peer's store has no port")
        host = _numeric(host, anywhere=self.reaches_hosts)
        return self.torch.distributed.TCPStore(host, port, 2, is_master=False, timeout=timeout)

    def _join_groups(self, store: Any, rank: int, timeout: timedelta) -> Link:
        raise NotImplementedError

    def tensor(self, view: memoryview) -> Any:
        """``view`` as a tensor of bytes, without a copy; read-only memory too, which nobody writes to."""
        return self.torch.from_numpy(np.asarray(_Memory(view)))


class GlooTransport(_TorchTransport):
    """Gloo over TCP, from host memory to host memory. See ``_TorchTransport`` for the arguments."""

    scheme: ClassVar[str] = "gloo"
    magic: ClassVar[str] = "pdxfer-gloo"

    def _join_groups(self, store: Any, rank: int, timeout: timedelta) -> Link:
        gloo = self.torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=self.plane_host)]
        options._timeout = timeout
        group = gloo(self.torch.distributed.PrefixStore("pair", store), rank, 2, options)
        group.set_timeout(timedelta(seconds=self.stall_s))
        return _GlooLink(self, group, 1 - rank)


class _GlooLink(Link):
    """Gloo's work can only be waited for, and not be stopped: a thread for each direction does that."""

    pushes: ClassVar[bool] = True

    def __init__(self, transport: _TorchTransport, group: Any, peer: int) -> None:
        self._tensor, self._group, self._peer = transport.tensor, group, peer
        self._ended = lambda _: transport.mover.call(lambda: None)  # which looks, then
        self._sends, self._receives = _Waiter("gloo-sends"), _Waiter("gloo-receives")

    def fetch(self, sequence: int, where: bytes, target: memoryview) -> Move:
        return self._begin(self._receives, "recv", target, sequence)

    def push(self, sequence: int, payload: memoryview) -> Move:
        return self._begin(self._sends, "send", payload, sequence)

    def _begin(self, waiter: _Waiter, verb: str, memory: memoryview, sequence: int) -> Move:
        group = self._group
        if group is None:
            raise TransportError("the channel is closed")
        try:
            work = getattr(group, verb)([self._tensor(memory)], self._peer, sequence % _TAGS)
        except RuntimeError as error:
            raise TransportError(f"gloo can't {verb}: {_brief(error)}") from error
        return _Waited(waiter.submit(work.wait, self._ended))

    def close(self) -> None:
        self._group = None  # once no thread waits on it, its sockets close
        self._sends.close()
        self._receives.close()


class _Waiter:
    """A thread, made when it is needed first, that calls one function after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable[[], object], ended: Callable[[object], object]) -> Future[object]:
        """Have it called, and ``ended`` afterwards; one thread at a time submits."""
        future: Future[object] = Future()
        future.add_done_callback(ended)
        self._calls.put((future, function))
        if self._thread is None:
            # A daemon: where a peer is stuck, the end of the process must not wait for it.
            self._thread = threading.Thread(target=self._run, name=f"pdxfer-{self._name}", daemon=True)
            self._thread.start()
        return future

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001 - whoever polls the move gets it
                future.set_exception(error)
            del call, future, function  # not to hold a group that is closed

    def close(self) -> None:
        """End the thread when it has called everything."""
        self._calls.put(None)


class _Waited(Move):
    calls: ClassVar[bool] = True

    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def poll(self) -> bool:
        if not self._future.done():
            return False
        error = self._future.exception()
        if error is not None:
            raise TransportError(f"gloo failed: {_brief(error)}")
        return True

    def cancel(self) -> bool:
        return self._future.done()


class NcclTransport(_TorchTransport):
    """NCCL between two GPUs; the two ends of a channel need different ones.

    Payloads lie in host memory, as everywhere in pdxfer: they are copied to the GPU, sent, and copied back.

    Args:
        device: the CUDA device to send from and receive on.
        options: those of ``_TorchTransport``.
    """

    scheme: ClassVar[str] = "nccl"
    magic: ClassVar[str] = "pdxfer-nccl"

    def __init__(self, *, device: str = "cuda", **options: Any) -> None:
        super().__init__(**options)
        torch = self.torch
        if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
            self.close()
            raise MisuseError("nccl needs a CUDA device and a build of torch with NCCL", hint="use gloo on CPUs")
        self.device = torch.device(device, None if ":" in device else torch.cuda.current_device())

    def _join_groups(self, store: Any, rank: int, timeout: timedelta) -> Link:
        """Two groups: sends and receives of one would wait for each other."""
        dist, groups = self.torch.distributed, []
        for name in ("forth", "back"):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            groups.append(dist.ProcessGroupNCCL(dist.PrefixStore(name, store), rank, 2, options))
        return _NcclLink(self, groups[rank], groups[1 - rank], 1 - rank)


class _NcclLink(Link):
    pushes: ClassVar[bool] = True

    def __init__(self, transport: NcclTransport, sends: Any, receives: Any, peer: int) -> None:
        self._transport, self._sends, self._receives, self._peer = transport, sends, receives, peer

    def fetch(self, sequence: int, where: bytes, target: memoryview) -> Move:
        torch, device = self._transport.torch, self._transport.device
        staged = torch.empty(target.nbytes, dtype=torch.uint8, device=device)
        return self._begin(self._receives, "recv", staged, lambda: self._transport.tensor(target).copy_(staged))

    def push(self, sequence: int, payload: memoryview) -> Move:
        staged = self._transport.tensor(payload).to(self._transport.device)
        return self._begin(self._sends, "send", staged, lambda: None)

    def _begin(self, group: Any, verb: str, staged: Any, finish: Callable[[], object]) -> Move:
        try:
            return _NcclMove(getattr(group, verb)([staged], self._peer, 0), group, staged, finish)
        except RuntimeError as error:
            raise TransportError(f"NCCL can't {verb}: {_brief(error)}") from error

    def close(self) -> None:
        for group in (self._sends, self._receives):
            with suppress(RuntimeError):
                group.abort()


class _NcclMove(Move):
    def __init__(self, work: Any, group: Any, staged: Any, finish: Callable[[], object]) -> None:
        self._work, self._group, self._staged, self._finish = work, group, staged, finish

    def poll(self) -> bool:
        try:
            if not self._work.is_completed():
                return False
            self._work.wait()
            self._finish()
        except RuntimeError as error:
            raise TransportError(f"NCCL failed: {_brief(error)}") from error
        return True

    def cancel(self) -> bool:
        """Only the GPU's own memory is underway, so the payload's is free."""
        with suppress(RuntimeError):
            self._group.abort()
        return True


class _Memory:
    """Memory for NumPy, writable whether or not the view is, as torch wants it."""

    def __init__(self, view: memoryview) -> None:
        self._array = np.frombuffer(view, np.uint8)
        data = (self._array.ctypes.data, False)
        self.__array_interface__ = {"data": data, "shape": self._array.shape, "typestr": "|u1", "version": 3}


def _numeric(host: str, *, anywhere: bool) -> str:
    """Return a numeric address to bind or connect to; TransportError when it is none, or not ours to reach."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise TransportError(f"{host[:64]!r} is not a numeric address") from error
    if not (anywhere or address.is_loopback):
        raise TransportError(f"{address} is on the network, and this plane stays on its host (insecure_plane)")
    return str(address)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _brief(error: BaseException) -> str:
    return str(error).splitlines()[0][:300] if str(error) else type(error).__name__
