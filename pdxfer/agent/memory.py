"""Memory: one rank's regions, the ledger of their pages, and staging.

In come a layout and an engine's buffers, tensors or regions; out come sides for packing, the units that page tables
name, and arenas. It knows no peer and no transfer.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from pdxfer.agent.arena import Arena
from pdxfer.errors import MisuseError
from pdxfer.kernels import as_buffer, on_device, pin, unpin
from pdxfer.layout import Layout, RegionShape
from pdxfer.pages import Buffers, Side
from pdxfer.transfer import Ledger
from pdxfer.transport import Region, Transport

if TYPE_CHECKING:
    from pdxfer.agent.config import AgentConfig

__all__ = ["Memory"]

_log = logging.getLogger("pdxfer.agent")


class Memory:
    """One rank's layout with its memory: regions, the ledger of their pages, and staging. Thread-safe.

    ``regions`` holds those that a peer may read directly, by index; ``buffers`` all, as packing wants them.
    """

    def __init__(
        self, config: AgentConfig, transports: Mapping[str, Transport], layout: Layout, regions: Sequence[Any]
    ) -> None:
        self.config, self.transports, self.layout = config, transports, layout
        self.rank = layout.ranks[config.rank]
        if len(regions) != len(self.rank.regions):
            raise MisuseError(f"rank {config.rank} has {len(self.rank.regions)} regions, got {len(regions)}")
        exporter = next((t for t in transports.values() if t.can_export), None)
        shared = [_as_region(r, s, exporter) for r, s in zip(regions, self.rank.regions, strict=True)]
        self.regions = {i: region for i, region in enumerate(shared) if isinstance(region, Region)}
        self.buffers = Buffers(as_buffer(r.view if isinstance(r, Region) else r) for r in shared)
        for buffer, shape in zip(self.buffers, self.rank.regions, strict=True):
            if buffer.nbytes < shape.nbytes:
                raise MisuseError(f"region {shape.name!r} has {buffer.nbytes} B, its layout says {shape.nbytes} B")
        self._pools = self.rank.pools()
        totals: dict[str, int] = {}
        self._per_unit = self.rank.pages_per_unit()
        if entangled := self.rank.entangled():
            _log.warning("tables %s share memory in pages that are not nested: one transfer at a time", entangled)
        for holding in self.rank.holdings:
            pool = self._pools[holding.table]
            totals[pool] = max(totals.get(pool, 0), -(-holding.pages // self._per_unit[holding.table]))
        self.ledger = Ledger(totals)
        self._arenas: dict[str, Arena] = {}
        self._pinned: list[memoryview] = []
        self._lock = threading.Lock()

    def side(self, tables: Mapping[str, Sequence[int]]) -> Side:
        """Our memory with one request's page tables."""
        return Side(self.rank, self.buffers, tables)

    def units(self, side: Side) -> frozenset[tuple[str, int]]:
        """(pool, unit) pairs that a request's tables name."""
        named = ((name, table) for name, table in side.tables.items() if name in self._pools)
        units = ((self._pools[n], table[table >= 0] // self._per_unit[n]) for n, table in named)
        return frozenset(chain.from_iterable(zip(repeat(pool), pages.tolist()) for pool, pages in units))

    def arena(self, scheme: str) -> Arena:
        """The staging arena of a transport; made on first use."""
        with self._lock:
            if scheme not in self._arenas:
                region = self.transports[scheme].allocate(self.config.arena_bytes, "staging")
                if on_device(self.buffers):
                    if pin(region.view):
                        self._pinned.append(region.view)
                    else:
                        _log.warning("staging of %s can't be pinned: copies from and to the GPU take a detour", scheme)
                self._arenas[scheme] = Arena(region.view)
            return self._arenas[scheme]

    def arenas(self) -> dict[str, Arena]:
        """The staging arenas that were made, by scheme."""
        with self._lock:
            return dict(self._arenas)

    def close(self) -> None:
        """No byte moves any more: staging is ordinary memory again. Idempotent."""
        with self._lock:
            while self._pinned:
                unpin(self._pinned.pop())

    def forget(self) -> None:
        """Let go of the engine's memory, once its agent has closed: whoever still knows us keeps none of it mapped."""
        self.regions, self.buffers, self._arenas = {}, Buffers(()), {}

    def check_integrity(self) -> None:
        """Prove that ledger and arenas lost nothing; raises InternalError."""
        self.ledger.check_integrity()
        for arena in self.arenas().values():
            arena.check_integrity()


def _as_region(region: Any, shape: RegionShape, exporter: Transport | None) -> Any:
    """A transport's Region where a peer could read it directly, else the buffer itself (memory of a device)."""
    tensor = hasattr(region, "data_ptr")
    if tensor and (region.element_size() != 1 or region.dim() != 1):
        what = f"region {shape.name!r} is a tensor of {region.dtype} in {region.dim()} dimensions"
        raise MisuseError(what, hint="pass its bytes: tensor.view(-1).view(torch.uint8)")
    if not isinstance(region, Region) and exporter is not None and (not tensor or region.device.type == "cpu"):
        return exporter.register(region.numpy() if tensor else region, shape.name)
    return region
