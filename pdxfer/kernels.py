"""Kernels: the one strided copy that everything else is made of, and the digest of what it wrote.

In come buffers, byte offsets of rows, and a box with byte strides on either side; out come moved bytes, and the
XXH3-128 of the target's own memory if asked for. This file knows no page table, no component and no peer.

::

    for i: for r < counts[i]: for index in shape:
        target[to_offsets[i] + r*to_row + index . to_strides][:run_bytes] =
        source[from_offsets[i] + r*from_row + index . from_strides][:run_bytes]

Interchangeable kernels do it (native C, NumPy; torch and triton for devices), in whatever order suits the strides: rows
of a page may be the near axis (vLLM's K on CPUs is [head, dim, token]). A digest runs over the rows in order and each
row's box in its canonical axis order, whatever the strides are; where runs are long enough, the native kernel takes it
during the copy, a few KiB behind it. Bytes of a device are digested on the host, for XXH3 goes through its input in one
order, which is one thread of a GPU: they cross to the host once more, as packed bytes do anyhow.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

try:
    from pdxfer import _native
except ImportError:  # built without a compiler: slower, not wrong
    _native = None  # type: ignore[assignment]

__all__ = [
    "KERNELS",
    "BoundCopy",
    "Bytes",
    "End",
    "Offsets",
    "Part",
    "RowCopy",
    "RunReader",
    "as_buffer",
    "as_host",
    "longest_run",
    "native_available",
    "on_device",
    "pin",
    "settle",
    "triton_available",
    "unpin",
]

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_LISTED_RUN_BYTES = 256  # below, a list of runs costs too much beside the bytes; boxes are walked instead
_SHORT_DIGEST_BYTES = 240  # the native digest is for more than that
_BY_NATIVE = ("auto", "native")
_BLOCK_BYTES = 256 << 10  # what is gathered at a time for a digest: it should still be in cache
_DEVICE_BLOCK_BYTES = 8 << 20  # the same of a device: every block is a launch and a crossing


class RunReader(Protocol):
    """Source memory that isn't mapped here but can be read run by run (process_vm_readv)."""

    def read_runs(self, target: memoryview, target_offsets: Any, source_offsets: Any, lengths: Any) -> int:
        """Copy runs into ``target``; returns bytes copied."""


class End(NamedTuple):
    """Where the rows lie on one side: the offset of each piece's first row, the step between rows, strides in a row."""

    offsets: Offsets
    row_stride: int
    strides: tuple[int, ...]


class Part(NamedTuple):
    """One application of a copy: two buffers, and the byte in each that the offsets count from."""

    target: Any
    target_base: int
    source: Any
    source_base: int


@dataclass(frozen=True, slots=True)
class _Pattern:
    """One row's box after merging: extents, strides on both sides (outermost first), bytes of a contiguous run."""

    shape: tuple[int, ...]
    to_strides: tuple[int, ...]
    from_strides: tuple[int, ...]
    run: int


def native_available() -> bool:
    """Whether the compiled kernel is installed."""
    return _native is not None


class RowCopy:
    """A copy of rows of one box between two strided sides; applied to any number of parts (layers).

    Args:
        shape: extents of the box, in canonical order. itemsize: bytes of an element.
        counts: rows in each piece; a piece's rows are evenly spaced on both sides.
    """

    def __init__(self, shape: tuple[int, ...], itemsize: int, to: End, source: End, counts: Offsets) -> None:
        rows = int(counts.sum())
        self.nbytes = rows * math.prod(shape) * itemsize
        self._alone = rows == len(counts)  # no piece has a second row, so the steps between rows say nothing
        self._shape, self._itemsize, self._to, self._from, self._counts = shape, itemsize, to, source, counts
        self._pattern = _merge(shape, to.strides, source.strides, itemsize, False)
        self._ordered = _merge(shape, to.strides, source.strides, itemsize, True)
        self._lists: dict[_Pattern, tuple[Offsets, Offsets, Offsets]] = {}
        self._long: tuple[Offsets, Offsets, Offsets] | None = None

    def bind(self, parts: Sequence[Part]) -> BoundCopy:
        """The copy of these parts, ready to run."""
        return BoundCopy(self, parts)

    def native_parts(self, parts: Sequence[Part], *, digests: bool) -> list[Any] | None:
        """What the native kernel takes for all parts at once, or None where it can't."""
        pattern = self._ordered if digests else self._pattern
        if _native is None or not self._listed(pattern):
            return None
        if digests and self.nbytes * len(parts) <= _SHORT_DIGEST_BYTES:
            return None
        if not all(isinstance(p.target, np.ndarray) and isinstance(p.source, np.ndarray) for p in parts):
            return None
        to, at, lengths = self._runs(pattern)
        return [(p.target, p.target_base, to, p.source, p.source_base, at, lengths) for p in parts]

    def copy_slowly(self, kernel: str, part: Part) -> None:
        """Copy one part by any kernel, box by box or through a reader. ``kernel``: a name of KERNELS, or "auto"."""
        name = _choose(kernel, part)
        if name == "runs":
            self._read(part)
        else:
            self._boxes(name, part)

    def digest_source(self, kernel: str, parts: Sequence[Part], seed: int) -> bytes:
        """Digest of the sources alone, as if they were copied to a packed target; the parts' targets are not used."""
        if self._digestible(kernel, parts):
            _, at, lengths = self._runs(self._ordered)
            return _native.digest_parts([(p.source, p.source_base, at, lengths) for p in parts], seed)
        state = xxhash.xxh3_128(seed=seed)
        row_bytes = math.prod(self._shape) * self._itemsize
        for part in parts:
            block_bytes = _DEVICE_BLOCK_BYTES if _on_device(part.source) else _BLOCK_BYTES
            for block in self._blocks(max(1, block_bytes // row_bytes)):
                scratch = np.empty(block.nbytes, np.uint8)
                block.bind([Part(scratch, 0, part.source, part.source_base)]).copy(kernel)
                state.update(scratch.data)
        return state.digest()

    def _digestible(self, kernel: str, parts: Sequence[Part]) -> bool:
        able = kernel in _BY_NATIVE and _native is not None and self._listed(self._ordered)
        long = self.nbytes * len(parts) > _SHORT_DIGEST_BYTES
        return able and long and all(isinstance(p.source, np.ndarray) for p in parts)

    def _blocks(self, rows: int) -> list[RowCopy]:
        """The same copy, at most ``rows`` rows at a time, each to the start of a packed target."""
        total = int(self._counts.sum())
        if total <= rows:
            return [self]
        blocks, stops = [], np.cumsum(self._counts)
        starts = stops - self._counts
        for start in range(0, total, rows):
            chosen = slice(int(np.searchsorted(stops, start, side="right")), int(np.searchsorted(starts, start + rows)))
            ahead = np.maximum(start - starts[chosen], 0)  # rows of the first piece that were in the block before
            counts = np.minimum(stops[chosen], start + rows) - starts[chosen] - ahead
            to, at = (
                End(end.offsets[chosen] + ahead * end.row_stride, end.row_stride, end.strides)
                for end in (self._to, self._from)
            )
            to = to._replace(offsets=to.offsets - to.offsets[0])
            blocks.append(RowCopy(self._shape, self._itemsize, to, at, counts))
        return blocks

    def _flat(self, pattern: _Pattern) -> bool:
        """Whether all rows of a piece are one run."""
        return not pattern.shape and (self._alone or self._to.row_stride == self._from.row_stride == pattern.run)

    def _listed(self, pattern: _Pattern) -> bool:
        return self._flat(pattern) or (pattern is self._ordered and pattern.run >= _LISTED_RUN_BYTES)

    def _runs(self, pattern: _Pattern) -> tuple[Offsets, Offsets, Offsets]:
        """Every contiguous run: offsets on both sides, and lengths."""
        if pattern not in self._lists:
            to, at, lengths = self._to.offsets, self._from.offsets, self._counts * pattern.run
            if not self._flat(pattern):
                to = _expand(to, self._counts, self._to.row_stride, pattern.shape, pattern.to_strides)
                at = _expand(at, self._counts, self._from.row_stride, pattern.shape, pattern.from_strides)
                lengths = np.full(len(to), pattern.run, dtype=np.int64)
            self._lists[pattern] = to, at, lengths
        return self._lists[pattern]

    def _long_runs(self) -> tuple[Offsets, Offsets, Offsets]:
        """Every run, in whatever order makes them longest: pieces of equal counts have one pattern, rows and all."""
        if self._long is None:
            lists: list[tuple[Offsets, ...]] = []
            to, at = self._to, self._from
            for count in np.unique(self._counts).tolist():
                strides = (to.row_stride, *to.strides), (at.row_stride, *at.strides)
                pattern = _merge((count, *self._shape), *strides, self._itemsize, False)
                chosen = self._counts == count
                once = np.ones(int(chosen.sum()), np.int64)
                ends = (to.offsets, pattern.to_strides), (at.offsets, pattern.from_strides)
                runs = [_expand(offsets[chosen], once, 0, pattern.shape, strides) for offsets, strides in ends]
                lists.append((*runs, np.full(len(runs[0]), pattern.run, np.int64)))
            runs = [np.concatenate(found) for found in zip(*lists, strict=True)]
            self._long = runs[0], runs[1], runs[2]
        return self._long

    def _read(self, part: Part) -> None:
        to, at, lengths = self._long_runs()
        part.source.read_runs(memoryview(part.target), to + part.target_base, at + part.source_base, lengths)

    def _boxes(self, name: str, part: Part) -> None:
        to, at, pattern = self._to.offsets + part.target_base, self._from.offsets + part.source_base, self._pattern
        rows = self._counts, self._to.row_stride, self._from.row_stride
        box = pattern.shape, pattern.to_strides, pattern.from_strides, pattern.run
        KERNELS[name](part.target, part.source, to, at, *rows, *box)


class BoundCopy:
    """A copy with its buffers, made before bytes move: afterwards they fill the caches, and Python is slow."""

    __slots__ = ("_made", "_parts", "_rows")

    def __init__(self, rows: RowCopy, parts: Sequence[Part]) -> None:
        self._rows, self._parts = rows, parts
        self._made: dict[bool, list[Any] | None] = {}

    def native_parts(self, *, digests: bool) -> list[Any] | None:
        """Make what the native kernel needs, or return what was made before."""
        if digests not in self._made:
            self._made[digests] = self._rows.native_parts(self._parts, digests=digests)
        return self._made[digests]

    def copy(self, kernel: str = "auto") -> None:
        """Copy all rows of every part. ``kernel``: a name of KERNELS, or "auto"."""
        found = self.native_parts(digests=False) if kernel in _BY_NATIVE else None
        if found is not None:
            _native.copy_parts(found)
            return
        for part in self._parts:
            self._rows.copy_slowly(kernel, part)

    def copy_and_digest(self, kernel: str, seed: int) -> bytes | None:
        """Copy, and return the digest of what then lies in the targets; None, and nothing done, if it can't do both."""
        found = self.native_parts(digests=True) if kernel in _BY_NATIVE else None
        return None if found is None else _native.copy_parts(found, seed)


@lru_cache(maxsize=512)
def _merge(
    shape: tuple[int, ...], to_strides: tuple[int, ...], from_strides: tuple[int, ...], itemsize: int, ordered: bool
) -> _Pattern:
    """Merge axes that are contiguous on both sides, sorted by target stride or (``ordered``) in canonical order."""
    axes = [(t, s, n) for n, t, s in zip(shape, to_strides, from_strides, strict=True) if n > 1]
    axes = axes[::-1] if ordered else sorted(axes, key=lambda a: (a[0], a[1]))
    merged: list[tuple[int, int, int]] = []
    run = itemsize
    for to, at, n in axes:
        if not merged and to == at == run:
            run *= n
        elif merged and to == merged[-1][0] * merged[-1][2] and at == merged[-1][1] * merged[-1][2]:
            merged[-1] = (merged[-1][0], merged[-1][1], merged[-1][2] * n)
        else:
            merged.append((to, at, n))
    merged.reverse()
    return _Pattern(tuple(a[2] for a in merged), tuple(a[0] for a in merged), tuple(a[1] for a in merged), run)


def longest_run(
    shape: tuple[int, ...], to_strides: tuple[int, ...], from_strides: tuple[int, ...], itemsize: int
) -> int:
    """Bytes that are contiguous on both sides when axes may be walked in any order."""
    return _merge(shape, to_strides, from_strides, itemsize, False).run


def _expand(
    offsets: Offsets, counts: Offsets, row_stride: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> Offsets:
    """Offset of every contiguous run, in the primitive's loop order."""
    firsts = np.repeat(offsets, counts)
    within = np.arange(len(firsts), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    runs: Offsets = firsts + within * row_stride
    for n, stride in zip(shape, strides, strict=True):
        runs = (runs[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return runs


def _copy_native(
    target: Any, source: Any, to: Offsets, at: Offsets, rows: Offsets, to_row: int, at_row: int,
    shape: tuple[int, ...], to_strides: tuple[int, ...], at_strides: tuple[int, ...], run: int,
) -> None:  # fmt: skip
    _native.copy_boxes(target, source, to, at, rows, to_row, at_row, shape, to_strides, at_strides, run)


def _copy_numpy(
    target: Any, source: Any, to: Offsets, at: Offsets, rows: Offsets, to_row: int, at_row: int,
    shape: tuple[int, ...], to_strides: tuple[int, ...], at_strides: tuple[int, ...], run: int,
) -> None:  # fmt: skip
    """The reference: one fancy assignment over overlapping windows of ``run`` bytes."""
    if not len(to):
        return
    to, at = _expand(to, rows, to_row, shape, to_strides), _expand(at, rows, at_row, shape, at_strides)
    _check_runs(to, run, target.nbytes, "target")
    _check_runs(at, run, source.nbytes, "source")
    _windows(target, run)[to] = _windows(source, run)[at]


def _copy_torch(
    target: Any, source: Any, to: Offsets, at: Offsets, rows: Offsets, to_row: int, at_row: int,
    shape: tuple[int, ...], to_strides: tuple[int, ...], at_strides: tuple[int, ...], run: int,
) -> None:  # fmt: skip
    """Gather and scatter by word index; either side may be on a device."""
    to, at = _expand(to, rows, to_row, shape, to_strides), _expand(at, rows, at_row, shape, at_strides)
    if len(to):
        _move_words(target, source, to, at, run, by_index=True)


def _copy_triton(
    target: Any, source: Any, to: Offsets, at: Offsets, rows: Offsets, to_row: int, at_row: int,
    shape: tuple[int, ...], to_strides: tuple[int, ...], at_strides: tuple[int, ...], run: int,
) -> None:  # fmt: skip
    """One launch where both sides are on one device; else one on each side that is on one, and a copy between."""
    to, at = _expand(to, rows, to_row, shape, to_strides), _expand(at, rows, at_row, shape, at_strides)
    if len(to):
        _move_words(target, source, to, at, run, by_index=False)


def _move_words(target: Any, source: Any, to: Offsets, at: Offsets, run: int, *, by_index: bool) -> None:
    """Copy runs between tensors or arrays, as words as wide as all offsets allow.

    Between a device and the host, what travels is packed on the device's side, by one kernel, and crosses as one
    contiguous copy; the current stream has finished with it when this returns. On one device the copy is only queued.
    """
    import torch

    tensors = [b if isinstance(b, torch.Tensor) else torch.from_numpy(_writable(b)) for b in (target, source)]
    _check_runs(to, run, tensors[0].numel(), "target")
    _check_runs(at, run, tensors[1].numel(), "source")
    word = math.gcd(run, 8, int(np.bitwise_or.reduce(to | at)) or 8, *(t.numel() | 8 for t in tensors))
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    into, out_of = (t.view(-1)[: t.numel() // word * word].view(dtype) for t in tensors)
    to, at, words = to // word, at // word, run // word
    if into.device == out_of.device:
        _copy_words(into, out_of, to, at, words, by_index=by_index)
        return
    packed = np.arange(len(to), dtype=np.int64) * words
    crossing = _stretch(out_of, at - packed, len(to) * words)
    if crossing is None:
        crossing = torch.empty(len(to) * words, dtype=dtype, device=out_of.device)
        _copy_words(crossing, out_of, packed, at, words, by_index=by_index)
    landing = _stretch(into, to - packed, len(to) * words)
    if landing is not None:  # staging, which may be pinned
        landing.copy_(crossing)
    else:
        _copy_words(into, crossing.to(into.device), to, packed, words, by_index=by_index)


def _stretch(buffer: Any, starts: Offsets, words: int) -> Any:
    """The part of a flat tensor that runs make up, when they follow each other (all would start at one place)."""
    return buffer.narrow(0, int(starts[0]), words) if int(starts.min()) == int(starts.max()) else None


def _copy_words(target: Any, source: Any, to: Offsets, at: Offsets, words: int, *, by_index: bool) -> None:
    """Copy runs of words between two tensors of one device."""
    import torch

    into, out_of = (torch.from_numpy(o).to(target.device) for o in (to, at))
    if not by_index and (target.device.type == "cuda" or _interpreted()):
        from pdxfer._triton import copy_words

        copy_words(target, source, into, out_of, words)
        return
    within = torch.arange(words, device=target.device)
    target_index, source_index = ((o[:, None] + within).reshape(-1) for o in (into, out_of))
    target[target_index] = source[source_index]


def settle(buffers: Iterable[Any]) -> None:
    """Wait until what this thread has queued for the buffers' devices is done: by an event on its stream there, which
    waits for nobody else's work. Host memory needs no waiting. (No GPU has run this yet.)
    """
    devices = {b.device for b in buffers if _on_device(b)}
    if not devices:
        return
    import torch

    for device in devices:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        event.synchronize()


def pin(memory: memoryview) -> bool:
    """Lock host memory for a GPU's own reads and writes; False where the driver refuses. (No GPU has run this yet.)"""
    import torch

    address = int(np.frombuffer(memory, np.uint8).ctypes.data)
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    return int(driver.cudaHostRegister(address, memory.nbytes, 0)) == 0


def unpin(memory: memoryview) -> None:
    """Undo ``pin``."""
    import torch

    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(int(np.frombuffer(memory, np.uint8).ctypes.data))


def on_device(buffers: Iterable[Any]) -> bool:
    """Whether any of them is memory of a GPU."""
    return any(map(_on_device, buffers))


def _on_device(buffer: Any) -> bool:
    return getattr(getattr(buffer, "device", None), "type", "") == "cuda"


def _interpreted() -> bool:
    """Whether triton runs on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@lru_cache(maxsize=1)
def triton_available() -> bool:
    """Whether the kernel for GPUs can be had; torch for CUDA brings triton along."""
    return importlib.util.find_spec("triton") is not None


class _Writable:
    """A received payload is read-only, and torch warns of such arrays even where it only reads them."""

    def __init__(self, array: Bytes) -> None:
        where = array.__array_interface__
        self.array, self.__array_interface__ = array, {**where, "data": (where["data"][0], False)}


def _writable(array: Bytes) -> Bytes:
    return array if array.flags.writeable else np.asarray(_Writable(array))


KERNELS: Mapping[str, Callable[..., None]] = {
    "native": _copy_native,
    "numpy": _copy_numpy,
    "torch": _copy_torch,
    "triton": _copy_triton,
}


def _check_runs(offsets: Offsets, run: int, nbytes: int, side: str) -> None:
    if int(offsets.min()) < 0 or int(offsets.max()) + run > nbytes:
        raise ValueError(f"{side} runs reach byte {int(offsets.max()) + run} of {nbytes}")


def _windows(buffer: Bytes, run: int) -> npt.NDArray[np.void]:
    """Every window of ``run`` bytes of a buffer, as overlapping void elements."""
    array = np.asarray(buffer)
    windows: npt.NDArray[np.void] = np.ndarray(
        array.nbytes - run + 1, dtype=np.dtype((np.void, run)), buffer=array.data, strides=(1,)
    )
    return windows


def _choose(kernel: str, part: Part) -> str:
    if hasattr(part.source, "read_runs"):
        return "runs"
    if kernel != "auto":
        return kernel
    if isinstance(part.target, np.ndarray) and isinstance(part.source, np.ndarray):
        return "native" if _native is not None else "numpy"
    return "triton" if on_device((part.target, part.source)) and triton_available() else "torch"


def as_buffer(buffer: Any) -> Any:
    """NumPy for host memory, the object itself for tensors and run readers."""
    if type(buffer) is np.ndarray and buffer.dtype.char == "B":
        return buffer
    if isinstance(buffer, (bytes, bytearray, memoryview, np.ndarray)):
        return np.frombuffer(buffer, dtype=np.uint8)
    return buffer


def as_host(data: Any) -> Bytes:
    """Bytes in host memory, copied from a device if need be."""
    array = as_buffer(data)
    return array if isinstance(array, np.ndarray) else np.asarray(array.cpu().numpy())
