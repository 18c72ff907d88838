"""Wire: the small headers that travel on a data channel beside payloads, and the digests they carry.

In come frames; out come bytes for a transport, and back. This file knows no layout and moves nothing.

::

    target                                   source
      | Hello(session, digests, chunks)        |
      |--------------------------------------->|   which transfer this channel now serves, and the first credit
      |                                        |   (or Ask, answered by Opened: a control call and Hello in one)
      |          Exported(region) ... Tables(name, entries, ...)    direct mode only
      |<---------------------------------------|
      |          Data(chunk, digests) + payload (none in direct mode)
      |<---------------------------------------|
      | Want(chunks)            (the credit)   |
      |--------------------------------------->|
      |   ...one Want for each chunk worked off|
      | Done(generation)                       |
      |--------------------------------------->|   all is in and verified: the source may let go of it
      |          Closed                        |
      |<---------------------------------------|   and did; the channel is idle and may serve another transfer
      |          Fail(reason, ...) instead of any answer

Every frame names the session, so that a late one is known and dropped. A digest covers the segment's bytes
and, through its seed, transfer, generation, chunk and position: a right segment in a wrong place is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import xxhash

from pdxfer.errors import PeerError

__all__ = [
    "Ask",
    "Closed",
    "Data",
    "Done",
    "Exported",
    "Fail",
    "Frame",
    "Hello",
    "Opened",
    "Tables",
    "Want",
    "decode",
    "digest",
    "digest_seed",
    "encode",
]

SESSION_BYTES = 16
DIGEST_BYTES = 16
TABLES_BYTES_MAX = 48 << 10  # of entries and names in one frame
_MAX_HEADER = 64 << 10


@dataclass(frozen=True, slots=True)
class Hello:
    """Target: this channel now serves ``session``; ``digests`` asks for them, ``chunks`` are the first ones wanted."""

    kind: ClassVar[int] = 1
    session: bytes
    digests: bool
    chunks: list[int]


@dataclass(frozen=True, slots=True)
class Exported:
    """Source: the message carries region ``region`` of the source rank."""

    kind: ClassVar[int] = 2
    session: bytes
    region: int


@dataclass(frozen=True, slots=True)
class Tables:
    """Source: pieces of page tables, each [name, start, total, entries]: int64 little-endian entries from ``start`` on.

    ``last``: with it, all regions and page tables have been told.
    """

    kind: ClassVar[int] = 3
    session: bytes
    pieces: list[list[Any]]
    last: bool


@dataclass(frozen=True, slots=True)
class Want:
    """Target: credit for these chunks."""

    kind: ClassVar[int] = 4
    session: bytes
    chunks: list[int]


@dataclass(frozen=True, slots=True)
class Data:
    """Source: one chunk, with one digest per segment (none if not asked for) and the seconds they took."""

    kind: ClassVar[int] = 5
    session: bytes
    chunk: int
    digests: list[bytes]
    pack_s: float
    digest_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """Target: all that it wants of ``generation`` is in and verified, and all payloads have been released."""

    kind: ClassVar[int] = 6
    session: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class Fail:
    """Source: this session ends; ``error`` is the class name of a PdxferError."""

    kind: ClassVar[int] = 7
    session: bytes
    error: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Closed:
    """Source: this reader is counted as done."""

    kind: ClassVar[int] = 8
    session: bytes


@dataclass(frozen=True, slots=True)
class Ask:
    """Target: Open (``request``, as control encodes it) and Hello in one; ``session`` is a fresh name of the answer.

    ``chunks`` are wanted as far as there are so many: the target works out how many while the source does.
    """

    kind: ClassVar[int] = 9
    session: bytes
    request: bytes
    digests: bool
    chunks: list[int]


@dataclass(frozen=True, slots=True)
class Opened:
    """Source: what Open answers, as control encodes it, and the first page tables; what follows names its session.

    ``pieces``, ``last``: as of ``Tables``.
    """

    kind: ClassVar[int] = 10
    session: bytes
    answer: bytes
    pieces: list[list[Any]]
    last: bool


Frame = Hello | Exported | Tables | Want | Data | Done | Fail | Closed | Ask | Opened


def _chunks(found: Any) -> bool:
    return isinstance(found, list) and len(found) <= 64 and all(type(c) is int and c >= 0 for c in found)


def _piece(found: Any) -> bool:
    if not isinstance(found, list) or [type(field) for field in found] != [str, int, int, bytes]:
        return False
    name, start, total, entries = found
    return len(name) <= 256 and len(entries) % 8 == 0 and 0 <= start <= start + len(entries) // 8 <= total <= 1 << 24


def _pieces(found: Any) -> bool:
    return type(found.last) is bool and isinstance(found.pieces, list) and all(map(_piece, found.pieces))


# Field checks beside the types: what a field may be at most, before anyone acts on it.
_CHECKS: dict[type, tuple[Callable[[Any], bool], ...]] = {
    Hello: (lambda f: type(f.digests) is bool and _chunks(f.chunks),),
    Exported: (lambda f: type(f.region) is int and 0 <= f.region < 1 << 20,),
    Tables: (_pieces,),
    Want: (lambda f: _chunks(f.chunks),),
    Data: (
        lambda f: type(f.chunk) is int and f.chunk >= 0,
        lambda f: all(isinstance(s, float) and 0 <= s < math.inf for s in (f.pack_s, f.digest_s)),
        lambda f: (
            isinstance(f.digests, list) and all(isinstance(d, bytes) and len(d) == DIGEST_BYTES for d in f.digests)
        ),
    ),
    Done: (lambda f: type(f.generation) is int and 0 <= f.generation < 1 << 63,),
    Fail: (lambda f: all(isinstance(t, str) and len(t) <= 4096 for t in (f.error, f.reason, f.message)),),
    Closed: (),
    Ask: (lambda f: isinstance(f.request, bytes) and type(f.digests) is bool and _chunks(f.chunks),),
    Opened: (lambda f: isinstance(f.answer, bytes) and _pieces(f),),
}
_BY_KIND = {frame.kind: frame for frame in (Hello, Exported, Tables, Want, Data, Done, Fail, Closed, Ask, Opened)}


def encode(frame: Frame) -> bytes:
    """Header bytes of a frame."""
    packed: bytes = msgpack.packb([frame.kind, *[getattr(frame, name) for name in frame.__slots__]])
    return packed


def decode(header: bytes) -> Frame:
    """Parse a header from a peer; raises PeerError for anything that is not a frame of this protocol."""
    if len(header) > _MAX_HEADER:
        raise PeerError(f"a header of {len(header)} bytes came; at most {_MAX_HEADER} are allowed", reason="PROTOCOL")
    try:
        kind, *fields = msgpack.unpackb(header, max_ext_len=0, max_map_len=0, max_array_len=8192)
        known = _BY_KIND[kind]
        frame: Frame = known(*fields[: len(known.__slots__)])  # what follows is a later version's
    except Exception as error:  # msgpack and a wrong shape raise many kinds; all mean the same here
        raise PeerError(
            f"a header is not a frame of this protocol: {type(error).__name__}", reason="PROTOCOL"
        ) from error
    session_fits = isinstance(frame.session, bytes) and len(frame.session) == SESSION_BYTES
    if not session_fits or not all(check(frame) for check in _CHECKS[type(frame)]):
        raise PeerError(f"a {type(frame).__name__} frame has a field out of bounds", reason="PROTOCOL")
    return frame


def digest_seed(transfer: str, generation: int, source: int, target: int, chunk: int, segment: int) -> int:
    """Seed (64 bit) that binds a digest to its place: transfer, generation, rank pair, chunk and segment."""
    return xxhash.xxh3_64_intdigest(msgpack.packb([transfer, generation, source, target, chunk, segment]))


def digest(data: Any, seed: int) -> bytes:
    """XXH3-128 of a buffer: finds accidents, not attackers."""
    return xxhash.xxh3_128_digest(data, seed)
