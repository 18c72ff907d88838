"""Mirror: an engine's own cache memory, copied row by row to and from shared memory that a sidecar can see.

In come both memories of one rank and a request's page tables; exactly the request's rows are copied, by the copy
kernels, in the engine's process: that needs no leave to read another process's memory (Yama, PID namespaces, seccomp),
and works for a device's memory, for which the sidecar then needs no library. It costs one more copy; the shared memory
is taken as it is written and given back when nothing is underway.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from pdxfer.errors import MisuseError
from pdxfer.kernels import BoundCopy, End, Part, RowCopy, as_buffer, settle
from pdxfer.layout import Layout
from pdxfer.pages import RequestShape, Side
from pdxfer.transport.vm import create_memfd

__all__ = ["Mirror", "SharedMemory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedMemory:
    """Memory that the sidecar sees, too; ``view`` is flat and writable."""

    name: str
    fd: int
    view: memoryview

    @classmethod
    def create(cls, nbytes: int, name: str, *, backed: bool = True) -> SharedMemory:
        """Zeroed memory; raises ExhaustedError. ``backed``: see ``create_memfd``."""
        fd, view = create_memfd(nbytes, name, backed=backed)
        return cls(name=name, fd=fd, view=view)


class Mirror:
    """One rank's engine memory (``own``) and its shared twin, by region."""

    def __init__(self, layout: Layout, rank: int, own: Sequence[Any], shared: Sequence[memoryview]) -> None:
        self.layout, self.rank = layout, layout.ranks[rank]
        self._own, self._shared = [_bytes_of(region) for region in own], shared
        for buffer, shape in zip(self._own, self.rank.regions, strict=True):
            if buffer.nbytes < shape.nbytes:
                raise MisuseError(f"region {shape.name!r} has {buffer.nbytes} B, its layout says {shape.nbytes} B")

    def out(
        self, tables: Mapping[str, Sequence[int]], shape: RequestShape, fence: Callable[[], None] | None = None
    ) -> None:
        """Copy a request's rows from the engine's memory into the shared one, once ``fence`` has passed."""
        if fence is not None:
            fence()
        for copy in self._copies(tables, shape, self._own, self._shared):
            copy.copy()

    def back(self, tables: Mapping[str, Sequence[int]], shape: RequestShape) -> None:
        """Copy what a transfer wrote into the shared memory to the engine's."""
        for copy in self._copies(tables, shape, self._shared, self._own):
            copy.copy()
        settle(self._own)  # a device has only queued it, on a stream that is not the engine's

    def clear(self) -> None:
        """Give the shared memory back to the system; only while no transfer is underway."""
        for view in self._shared:
            if isinstance(view.obj, mmap.mmap):
                with suppress(OSError, ValueError):
                    view.obj.madvise(mmap.MADV_REMOVE)

    def _copies(
        self, tables: Mapping[str, Sequence[int]], shape: RequestShape, source: Sequence[Any], target: Sequence[Any]
    ) -> list[BoundCopy]:
        at, to = Side(self.rank, source, tables), Side(self.rank, target, tables)
        copies = []
        for holding in self.rank.holdings:
            rows = np.arange(*shape.rows(self.layout.spec[holding.component]), dtype=np.int64)
            own = holding.tokens
            rows = rows[(rows // own.interleave) % own.size == own.index]
            if not len(rows):
                continue
            end = End(at.row_offsets(holding, rows), holding.row_stride, holding.strides)
            copy = RowCopy(holding.box.shape, holding.itemsize, end, end, np.ones(len(rows), dtype=np.int64))
            places = zip(holding.regions, holding.offsets, strict=True)
            copies.append(copy.bind([Part(to.buffers[r], offset, at.buffers[r], offset) for r, offset in places]))
        return copies


def _bytes_of(region: Any) -> Any:
    """A tensor of a device as it is, all else as NumPy's bytes."""
    on_host = hasattr(region, "data_ptr") and region.device.type == "cpu"
    return as_buffer(region.numpy() if on_host else region)
