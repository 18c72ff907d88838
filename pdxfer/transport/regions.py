"""Regions: memory of mine, the same as told to a peer, and a peer's as seen from here.

In come memory and what a peer says about its own; out go things that can be closed. ``RegionDescriptor.from_bytes``
is where a peer's words about memory become numbers that were checked. Nothing here knows channels or sockets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import msgpack

from pdxfer.errors import MisuseError, TransportError
from pdxfer.transport.runs import MAX_REGION_BYTES, Runs, check_nbytes, check_runs, copy_runs

__all__ = [
    "MAX_NAME_CHARS",
    "Closable",
    "MappedRegion",
    "Region",
    "RegionDescriptor",
    "RemoteRegion",
    "parse_fields",
]

MAX_NAME_CHARS = 256

_Self = TypeVar("_Self", bound="Closable")


def parse_fields(data: bytes | memoryview, what: str, *types: type) -> list[Any]:
    """Read a msgpack array of exactly these types from a peer; the bytes are bounded by the caller.

    Raises:
        TransportError: anything else: not msgpack, trailing bytes, wrong count, wrong type.
    """
    try:
        fields = msgpack.unpackb(data, raw=False, max_ext_len=0, max_map_len=0, max_array_len=len(types))
    except Exception as error:  # msgpack raises a dozen classes for bad bytes; all mean the same here
        raise TransportError(f"{what} from the peer can't be read: {type(error).__name__}") from error
    if not isinstance(fields, list) or [type(f) for f in fields] != list(types):
        raise TransportError(f"{what} from the peer has the wrong fields")
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionDescriptor:
    """A region as told to a peer: plain numbers that give no access by themselves.

    Attributes:
        scheme: the transport that made the region.
        region_id: unique in the owner's transport.
        name: for logs.
        nbytes: size; a reader checks every access against it.
        address: where the region lies in its *owner's* memory, or 0 when readers get it another way. A reader
            uses it only on the process at the other end of the channel it came by (never on a process, or a
            memory, that a message names).
    """

    scheme: str
    region_id: int
    name: str
    nbytes: int
    address: int = 0

    def __post_init__(self) -> None:
        if len(self.name) > MAX_NAME_CHARS or not 1 <= len(self.scheme) <= 32:
            raise MisuseError(f"region name has {len(self.name)} characters; at most {MAX_NAME_CHARS} are allowed")
        check_nbytes(self.nbytes, f"region {self.name!r}")
        if not 0 <= self.region_id < 1 << 63 or not 0 <= self.address <= MAX_REGION_BYTES - self.nbytes:
            raise MisuseError(f"region {self.name!r}: id or address is out of bounds")

    def to_bytes(self) -> bytes:
        """Return the descriptor as msgpack; ``from_bytes`` is the inverse."""
        packed: bytes = msgpack.packb([self.scheme, self.region_id, self.name, self.nbytes, self.address])
        return packed

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> RegionDescriptor:
        """Parse what a peer sent; raises TransportError for anything that ``to_bytes`` can't have made."""
        if len(data) > 2048:
            raise TransportError(f"a region descriptor from the peer has {len(data)} bytes")
        scheme, region_id, name, nbytes, address = parse_fields(data, "a region descriptor", str, int, str, int, int)
        try:
            return cls(scheme=scheme, region_id=region_id, name=name, nbytes=nbytes, address=address)
        except MisuseError as error:
            raise TransportError(f"a region descriptor from the peer is out of bounds: {error.message}") from error


class Closable(ABC):
    """Something with an end: a context manager whose ``close`` may be called twice, from any thread."""

    @abstractmethod
    def close(self) -> None:
        """End it; does nothing the second time, never raises."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Region(Closable):
    """Memory of this process that a transport may send from, and export if it can. Made by a Transport only.

    ``close`` ends what peers may begin with it; messages underway are not recalled, so wait for their
    ``Sending`` first. Allocated memory goes back to the system when the last view of it is gone: numpy
    arrays made from ``view`` stay valid as long as they live. Registered memory stays the caller's.
    """

    def __init__(self, *, view: memoryview, descriptor: RegionDescriptor, on_close: Callable[[Region], None]) -> None:
        self._view: memoryview | None = view
        self._on_close = on_close
        self.descriptor = descriptor

    @property
    def name(self) -> str:
        """The name given to ``allocate`` or ``register``; for logs."""
        return self.descriptor.name

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.descriptor.nbytes

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._view is None

    @property
    def view(self) -> memoryview:
        """The memory, flat, writable, one byte an item; raises MisuseError after ``close``."""
        view = self._view
        if view is None:
            raise MisuseError(f"region {self.name!r} is closed")
        return view

    def close(self) -> None:
        """Give the region up; see the class for what that means to views and to messages underway."""
        if self._view is not None:
            self._view = None
            self._on_close(self)


class RemoteRegion(Closable):
    """A peer's region, read-only. Valid until it, its channel, or the peer's region is closed.

    What it shows may change at any time, for it is the peer's live memory: verify what was copied.
    One thread at a time reads.
    """

    def __init__(self, descriptor: RegionDescriptor) -> None:
        self.descriptor = descriptor

    @property
    def name(self) -> str:
        """The owner's name for it."""
        return self.descriptor.name

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.descriptor.nbytes

    @property
    @abstractmethod
    def view(self) -> memoryview | None:
        """The memory itself, read-only, or None where only ``read_runs`` works; TransportError once closed."""

    @abstractmethod
    def read_runs(self, target: memoryview, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
        """Copy ``lengths[i]`` bytes from ``source_offsets[i]`` here to ``target_offsets[i]`` in ``target``, for all i.

        Args:
            target: writable contiguous memory of this process. Runs must not overlap in it.
            target_offsets, source_offsets, lengths: int64 arrays of shape (n,), in bytes.

        Returns:
            The bytes copied: ``lengths.sum()``.

        Raises:
            MisuseError: see ``check_runs``; nothing was copied.
            TransportError: the peer is gone, withdrew the region or may not be read. Part of ``target`` may have
                been written. The *channel* stays open: its messages are another path, which may still work.
        """


class MappedRegion(RemoteRegion):
    """A RemoteRegion that lies in this process's address space."""

    def __init__(self, descriptor: RegionDescriptor, view: memoryview) -> None:
        super().__init__(descriptor)
        self._view: memoryview | None = view.toreadonly()

    @property
    def view(self) -> memoryview:
        """The mapping."""
        view = self._view
        if view is None:
            raise TransportError(f"remote region {self.name!r} is closed", hint="its channel or its owner closed it")
        return view

    def read_runs(self, target: memoryview, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
        """Copy by memcpy."""
        source = self.view
        checked = check_runs(target, self.nbytes, target_offsets, source_offsets, lengths)
        return copy_runs(checked[0], source, *checked[1:])

    def close(self) -> None:
        """Drop the mapping; it goes when the last view of it is gone."""
        self._view = None
