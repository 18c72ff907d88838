"""Memory between two processes of one host: sealed memfds to map, and reads of a peer's own memory.

In come file descriptors and descriptors from a peer, none of them trusted; out go read-only mappings whose size
can't change under the reader, or copies into memory of ours. This file knows no sockets and no messages.

Two ways, because memory is of two kinds. What ``allocate`` made is a memfd: the peer maps it and sees every byte
without a copy. What an engine made itself can't be mapped afterwards, so the reader copies it out with
``process_vm_readv``, which the kernel allows like a debugger's access: same user, same PID namespace, and under
Yama only for a process that the owner named (``allow_reads_by``).
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import select

import numpy as np
from numpy.typing import NDArray

from pdxfer.errors import ExhaustedError, TransportError
from pdxfer.transport.regions import RegionDescriptor, RemoteRegion
from pdxfer.transport.runs import Runs, check_runs
from pdxfer.transport.unix import UseCount

__all__ = ["PeerProcess", "ProcessRegion", "allow_reads_by", "create_memfd", "map_memfd"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_IOV_MAX = 1024
_CALL_BYTES = 1 << 30  # the kernel stops a call a page below 2 GiB
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = -1

#: uint64, shape (n,).
Addresses = NDArray[np.uint64]

_libc = ctypes.CDLL(None, use_errno=True)


# -- memfd ---------------------------------------------------------------------------------------


def create_memfd(nbytes: int, name: str, *, backed: bool = True) -> tuple[int, memoryview]:
    """Return a sealed, fully backed memfd (close-on-exec) and a writable mapping of it.

    Args:
        backed: False takes memory only where something is written, for a region that is mostly not used.

    The three seals: no peer can be hurt by truncation (SIGBUS), none can grow it, and none can add F_SEAL_WRITE.

    Raises:
        ExhaustedError: no memory or no file descriptor left.
    """
    try:
        fd = os.memfd_create(f"pdxfer:{name[:200]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ExhaustedError(f"no memfd for region {name!r}: {error.strerror}") from error
    try:
        # Backed now, so that a full system is an error here and not a SIGBUS later.
        (os.posix_fallocate(fd, 0, nbytes) if backed else os.ftruncate(fd, nbytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if backed else 0))
    except (OSError, ValueError, OverflowError) as error:
        os.close(fd)
        raise ExhaustedError(f"no memory for region {name!r} of {nbytes} bytes: {error}") from error
    return fd, memoryview(mapping)


def map_memfd(fd: int, nbytes: int, *, writable: bool = False) -> memoryview:
    """Map a peer's memfd, read-only unless it is our own engine's. The caller still owns ``fd``.

    Raises:
        TransportError: not a memfd, a seal is missing, or its size is not ``nbytes``; nothing was mapped.
        ExhaustedError: no descriptor or memory is left here.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        found = os.fstat(fd)
    except OSError as error:
        raise TransportError(f"the peer sent a file that is not shared memory: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise TransportError("the peer sent shared memory without the seals that keep its size")
    if found.st_size != nbytes:
        raise TransportError(f"the peer sent shared memory of {found.st_size} bytes and said {nbytes}")
    prot = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    backed = writable and found.st_blocks * 512 >= nbytes  # there is nothing to take, only page tables to fill
    try:
        return memoryview(mmap.mmap(fd, nbytes, mmap.MAP_SHARED | (mmap.MAP_POPULATE if backed else 0), prot))
    except (OSError, ValueError, OverflowError) as error:
        ExhaustedError.check(error, f"the peer's shared memory of {nbytes} bytes can't be mapped")
        raise TransportError(f"the peer's shared memory of {nbytes} bytes can't be mapped: {error}") from error


# -- another process's memory --------------------------------------------------------------------


def allow_reads_by(process_id: int | None) -> None:
    """Tell Yama that this process (and its children) may read our memory; None means every one of our user.

    Only the last call counts. Without Yama, or with its scope at 0, nothing needs to be told.
    """
    _libc.prctl(_PR_SET_PTRACER, ctypes.c_long(_PR_SET_PTRACER_ANY if process_id is None else process_id), 0, 0, 0)


class PeerProcess:
    """The process at the other end of a channel, pinned by a pidfd so that a reused number is noticed.

    Args:
        process_id: what the kernel says about the socket (SO_PEERCRED), never what a message says.
    """

    def __init__(self, process_id: int) -> None:
        if process_id <= 0:
            raise TransportError(
                "the peer's process has no number here, so its memory can't be read",
                hint="both ends need one PID namespace (in Kubernetes: shareProcessNamespace: true)",
            )
        self.process_id = process_id
        try:
            self._pidfd = os.pidfd_open(process_id)
        except OSError as error:
            raise TransportError(f"the peer's process {process_id} can't be watched: {error.strerror}") from error
        self._use = UseCount(wake=lambda: None, release=lambda: os.close(self._pidfd))

    def close(self) -> None:
        """Forget the process; a read underway still ends well."""
        self._use.close()

    def read(self, address: int, target: int, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
        """Copy checked runs from the peer's ``address`` to our ``target`` address; returns the bytes copied."""
        lengths, target_offsets, source_offsets = _split_long(lengths, target_offsets, source_offsets)
        local = target_offsets.astype(np.uint64) + np.uint64(target)
        remote = source_offsets.astype(np.uint64) + np.uint64(address)
        ends = np.cumsum(lengths)
        start = copied = 0
        with self._use.use("the channel"):
            while start < len(lengths):
                stop = min(start + _IOV_MAX, int(np.searchsorted(ends, copied + _CALL_BYTES, side="right")))
                self._read_once(local[start:stop], remote[start:stop], lengths[start:stop])
                start, copied = stop, int(ends[stop - 1])
            self._check_alive()
        return copied

    def _check_alive(self) -> None:
        # The number could have changed hands while we read: only a process that still runs was surely the peer.
        ended = select.poll()
        ended.register(self._pidfd, select.POLLIN)
        if ended.poll(0):
            raise TransportError(f"the peer's process {self.process_id} ended while its memory was read")

    def _read_once(self, local: Addresses, remote: Addresses, lengths: Runs) -> None:
        into, out_of = _iovecs(local, lengths), _iovecs(remote, lengths)
        got = _process_vm_readv(self.process_id, into.ctypes.data, len(into), out_of.ctypes.data, len(out_of), 0)
        if got != int(lengths.sum()):
            # A short count means that the next page is unreadable: the same as EFAULT, only later.
            raise _explain(ctypes.get_errno() if got < 0 else errno.EFAULT, self.process_id)


_process_vm_readv = _libc.process_vm_readv
_process_vm_readv.restype = ctypes.c_ssize_t
_process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]


def _iovecs(addresses: Addresses, lengths: Runs) -> Addresses:
    """Rows of struct iovec; neighbours become one, for each row costs the kernel about a page's copy."""
    sizes = lengths.astype(np.uint64)
    starts = np.concatenate(([0], np.flatnonzero(addresses[1:] != addresses[:-1] + sizes[:-1]) + 1))
    rows = np.empty((len(starts), 2), np.uint64)
    rows[:, 0] = addresses[starts]
    rows[:, 1] = np.add.reduceat(sizes, starts)
    return rows


def _split_long(lengths: Runs, *offsets: Runs) -> tuple[Runs, ...]:
    """Cut runs so that none is longer than one call may copy."""
    if not len(lengths) or int(lengths.max()) <= _CALL_BYTES:
        return lengths, *offsets
    pieces = -(-lengths // _CALL_BYTES)
    firsts = np.repeat(np.cumsum(pieces) - pieces, pieces)
    within = (np.arange(int(pieces.sum())) - firsts) * _CALL_BYTES
    cut = np.minimum(np.repeat(lengths, pieces) - within, _CALL_BYTES)
    return cut, *(np.repeat(o, pieces) + within for o in offsets)


def _explain(number: int, process_id: int) -> TransportError:
    reason, hint = {
        errno.EPERM: (
            "the kernel doesn't allow reading the peer's memory",
            "both ends need the same user; with kernel.yama.ptrace_scope=1 the owner names one reader at a time "
            "(ShmTransport(readers='any') names all of its user), with 2 or 3 or a seccomp filter use packed mode",
        ),
        errno.ESRCH: ("the peer's process is gone", "or the two ends are in different PID namespaces"),
        errno.EFAULT: ("the peer no longer has memory there", "its owner freed the memory before closing the region"),
        errno.ENOSYS: ("this kernel has no process_vm_readv", "use packed mode"),
    }.get(number, (f"process_vm_readv failed: {os.strerror(number)}", "use packed mode"))
    return TransportError(
        f"{reason} (process {process_id})", hint=hint, details={"errno": errno.errorcode.get(number, str(number))}
    )


class ProcessRegion(RemoteRegion):
    """A peer's registered memory: no view, only copies."""

    def __init__(self, descriptor: RegionDescriptor, process: PeerProcess) -> None:
        super().__init__(descriptor)
        self._process: PeerProcess | None = process

    @property
    def view(self) -> None:
        """None: memory that is not a memfd can't be mapped."""
        self._live()

    def _live(self) -> PeerProcess:
        if self._process is None:
            raise TransportError(f"remote region {self.name!r} is closed", hint="its channel or its owner closed it")
        return self._process

    def read_runs(self, target: memoryview, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
        """Copy with ``process_vm_readv``, up to 1024 runs a call, without the GIL."""
        process = self._live()
        view, *runs = check_runs(target, self.nbytes, target_offsets, source_offsets, lengths)
        if not view.nbytes:
            return 0
        return process.read(self.descriptor.address, np.frombuffer(view, np.uint8).ctypes.data, *runs)

    def close(self) -> None:
        """Read no more."""
        self._process = None
