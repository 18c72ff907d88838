"""Kernels: the one strided copy that everything else is made of, and the digest of what it wrote.

In come buffers, byte offsets of rows, and a box with byte strides on either side; out come moved bytes, and the
XXH3-128 of the target's own memory if asked for. This file knows no page table, no component and no peer.

::

    for i: for r < counts[i]: for index in shape:
        target[to_offsets[i] + r*to_row + index . to_strides][:run_bytes] =
        source[from_offsets[i] + r*from_row + index . from_strides][:run_bytes]

Three interchangeable kernels do it (native C, NumPy, torch), in whatever order suits the strides: rows of a page may be
the near axis (vLLM's K on CPUs is [head, dim, token]). A digest runs over the rows in order and each row's box
in its canonical axis order, whatever the strides are; where runs are long enough, the native kernel takes it during
the copy, a few KiB behind it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
]

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

_LISTED_RUN_BYTES = 256  # below, a list of runs costs too much beside the bytes; boxes are walked instead
_SHORT_DIGEST_BYTES = 240  # the native digest is for more than that
_BY_NATIVE = ("auto", "native")
_BLOCK_BYTES = 256 << 10  # what is gathered at a time for a digest: it should still be in cache


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
            for block in self._blocks(max(1, _BLOCK_BYTES // row_bytes)):
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


@lru_cache(maxsize=4096)
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
    import torch

    to, at = _expand(to, rows, to_row, shape, to_strides), _expand(at, rows, at_row, shape, at_strides)
    if not len(to):
        return
    tensors = [b if isinstance(b, torch.Tensor) else torch.from_numpy(_writable(b)) for b in (target, source)]
    word = math.gcd(run, 8, int(np.bitwise_or.reduce(to | at)) or 8, *(t.numel() | 8 for t in tensors))
    dtype = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[word]
    flat = [t.view(-1)[: t.numel() // word * word].view(dtype) for t in tensors]
    within = np.arange(run // word, dtype=np.int64)
    to_index, at_index = (torch.from_numpy((o[:, None] // word + within).reshape(-1)) for o in (to, at))
    _check_runs(to, run, tensors[0].numel(), "target")
    _check_runs(at, run, tensors[1].numel(), "source")
    values = flat[1][at_index.to(flat[1].device)]
    flat[0][to_index.to(flat[0].device)] = values.to(flat[0].device)


class _Writable:
    """A received payload is read-only, and torch warns of such arrays even where it only reads them."""

    def __init__(self, array: Bytes) -> None:
        where = array.__array_interface__
        self.array, self.__array_interface__ = array, {**where, "data": (where["data"][0], False)}


def _writable(array: Bytes) -> Bytes:
    return array if array.flags.writeable else np.asarray(_Writable(array))


KERNELS: Mapping[str, Callable[..., None]] = {"native": _copy_native, "numpy": _copy_numpy, "torch": _copy_torch}


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
    return "torch"


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
