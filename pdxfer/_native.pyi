"""The compiled copy kernel (``_native.c``); optional, ``packing.py`` has a NumPy path for when it was not built.

All functions check every argument before the first byte moves, in arithmetic that can't overflow, and copy without
the GIL. The caller keeps the offset arrays unchanged meanwhile. Target and source must not overlap in memory; that is
not checked. Buffers are C-contiguous; offsets, rows and lengths are one-dimensional int64 arrays of one length.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

def copy_boxes(
    target: memoryview | bytearray | npt.NDArray[Any],
    source: memoryview | bytearray | bytes | npt.NDArray[Any],
    target_offsets: npt.NDArray[np.int64],
    source_offsets: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    target_row_stride: int,
    source_row_stride: int,
    shape: tuple[int, ...],
    target_strides: tuple[int, ...],
    source_strides: tuple[int, ...],
    run_bytes: int,
) -> int:
    """Copy ``rows[i]`` boxes at every offset ``i`` and return the bytes copied.

    All offsets and strides are in bytes. For every i, r < rows[i] and index of ``shape`` (0 to 6 extents, an empty
    tuple being one run), ``run_bytes`` bytes go from ``source_offsets[i] + r * source_row_stride +
    sum(index * source_strides)`` to the same expression of the target. Loops run in whatever order
    suits the strides, rows among them, and innermost loops whose runs touch on both sides become one run.

    Raises:
        ValueError: negative or out-of-bounds offset, row count, extent or stride (the message names the index), arrays
            of another format or of unequal length, a target stride of 0 with an extent above 1, run_bytes below 1.
        TypeError: a target that can't be written, a source without contiguous bytes, strides that are not tuples.
        OverflowError: a scalar argument outside 64 bits.
    """

_Buffer = memoryview | bytearray | npt.NDArray[Any]
_Runs = npt.NDArray[np.int64]

def copy_parts(
    parts: Sequence[tuple[_Buffer, int, _Runs, _Buffer | bytes, int, _Runs, _Runs]], seed: int | None = None
) -> bytes | None:
    """Copy runs between several pairs of buffers, and digest what then lies in the targets.

    Args:
        parts: (target, target_base, target_offsets, source, source_base, source_offsets, lengths); an offset counts
            from its base. All parts are checked before the first byte moves.
        seed: of XXH3-128 (64 bit), or None for no digest.

    Returns:
        None without a seed; else the 16 bytes of the digest of all runs in order, read back from the targets' own
        memory a few KiB behind the copy, as ``xxhash.xxh3_128_digest`` has them.

    Raises:
        ValueError, TypeError: as ``copy_runs``; also a digest of 240 bytes or less (their rule is another one).
    """

def copy_runs(
    target: memoryview | bytearray | npt.NDArray[Any],
    source: memoryview | bytearray | bytes | npt.NDArray[Any],
    target_offsets: npt.NDArray[np.int64],
    source_offsets: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
) -> int:
    """Copy ``lengths[i]`` bytes for every i, one memcpy each, and return their sum.

    Also the ceiling that benchmarks compare with: a native one-pass loop over the same runs.

    Raises:
        ValueError, TypeError: as ``copy_boxes``.
    """

def digest_parts(parts: Sequence[tuple[_Buffer | bytes, int, _Runs, _Runs]], seed: int) -> bytes:
    """Digest runs of several buffers where they lie: parts are (buffer, base, offsets, lengths); see ``copy_parts``."""
