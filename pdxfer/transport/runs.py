"""Memory as a transport sees it: flat bytes, and lists of runs to copy between two of them.

In come buffers and offsets from callers and peers; out go checked views and checked, merged runs. Pure functions:
no region, no channel, no process is known here.
"""

from __future__ import annotations

from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdxfer.errors import MisuseError

try:
    from pdxfer import _native
except ImportError:  # no compiler where pdxfer was installed
    _native = None  # type: ignore[assignment]

__all__ = [
    "MAX_REGION_BYTES",
    "Runs",
    "anonymous_memory",
    "byte_view",
    "check_nbytes",
    "check_runs",
    "copy_runs",
    "writable_view",
]

#: User address space of x86-64 and arm64.
MAX_REGION_BYTES = 1 << 47

#: int64, shape (n,), in bytes.
Runs = NDArray[np.int64]


def byte_view(buffer: Any, what: str) -> memoryview:
    """Return ``buffer`` as a flat memoryview of bytes; raises MisuseError when it isn't contiguous memory."""
    try:
        view = memoryview(buffer)
        return view if view.format == "B" and view.ndim == 1 and view.c_contiguous else view.cast("B")
    except (TypeError, ValueError, BufferError) as error:
        raise MisuseError(
            f"{what} is not contiguous memory: {error}", hint="pass a C-contiguous buffer of bytes"
        ) from error


def writable_view(buffer: Any, what: str) -> memoryview:
    """Return ``buffer`` as flat writable bytes; raises MisuseError when it is read-only, empty or scattered."""
    view = byte_view(buffer, what)
    if view.readonly:
        raise MisuseError(f"{what} is read-only memory")
    check_nbytes(view.nbytes, what)
    return view


def check_nbytes(nbytes: int, what: str) -> int:
    """Return ``nbytes``; raises MisuseError when it can't be the size of a region."""
    if not 1 <= nbytes <= MAX_REGION_BYTES:
        raise MisuseError(f"{what} must have 1 to {MAX_REGION_BYTES} bytes, not {nbytes!r}")
    return nbytes


def anonymous_memory(nbytes: int) -> memoryview:
    """Return page-aligned, zeroed, private memory; it goes back to the system with the last view of it."""
    return memoryview(mmap(-1, nbytes, flags=MAP_PRIVATE | MAP_ANONYMOUS))


# -- runs ----------------------------------------------------------------------------------------


def check_runs(
    target: memoryview, source_nbytes: int, target_offsets: Runs, source_offsets: Runs, lengths: Runs
) -> tuple[memoryview, Runs, Runs, Runs]:
    """Check a list of copies against both ends and return it merged: neighbours at both ends become one run.

    ::

        source  |..[aaaa][bbbb]......[cc]..|     run i: source[s_i, s_i + n_i) -> target[t_i, t_i + n_i)
        target  |[aaaa][bbbb][cc]..........|     a and b are adjacent at both ends: one run

    Raises:
        MisuseError: target not writable, arrays not one-dimensional int64 of one length, or a run that is
            negative or leaves either end. Nothing was copied.
    """
    view = byte_view(target, "target")
    if view.readonly:
        raise MisuseError("target is read-only memory")
    arrays = (target_offsets, source_offsets, lengths)
    if any(getattr(a, "dtype", None) != np.int64 or a.ndim != 1 or len(a) != len(lengths) for a in arrays):
        raise MisuseError(
            "target_offsets, source_offsets and lengths must be one-dimensional int64 arrays of one length"
        )
    for offsets, nbytes, end in ((target_offsets, view.nbytes, "target"), (source_offsets, source_nbytes, "source")):
        # Compared as offset > size - length, which can't overflow once length lies in [0, size].
        bad = (lengths < 0) | (lengths > nbytes) | (offsets < 0)
        bad |= offsets > nbytes - np.where(bad, 0, lengths)
        if bad.any():
            i = int(np.argmax(bad))
            raise MisuseError(
                f"run {i} of {int(lengths[i])} bytes at {int(offsets[i])} leaves the {end} of {nbytes} bytes"
            )
    return view, *_merge(target_offsets, source_offsets, lengths)


def _merge(target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> tuple[Runs, Runs, Runs]:
    keep = lengths > 0
    if not keep.all():
        target_offsets, source_offsets, lengths = target_offsets[keep], source_offsets[keep], lengths[keep]
    if len(lengths) < 2:
        return target_offsets, source_offsets, lengths
    follows = target_offsets[1:] == target_offsets[:-1] + lengths[:-1]
    follows &= source_offsets[1:] == source_offsets[:-1] + lengths[:-1]
    if not follows.any():
        return target_offsets, source_offsets, lengths
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return target_offsets[starts], source_offsets[starts], np.add.reduceat(lengths, starts)


def copy_runs(target: memoryview, source: memoryview, target_offsets: Runs, source_offsets: Runs, lengths: Runs) -> int:
    """Copy checked runs between two memories of this process, without the GIL where the kernel was built.

    Returns:
        The bytes copied.
    """
    if _native is not None:
        return _native.copy_runs(target, source, target_offsets, source_offsets, lengths)
    for t, s, n in zip(target_offsets.tolist(), source_offsets.tolist(), lengths.tolist(), strict=True):
        target[t : t + n] = source[s : s + n]
    return int(lengths.sum())
