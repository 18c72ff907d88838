"""Measure: clocks, statistics, and the facts of this machine.

In come functions to call; out come seconds and ratios. It knows nothing of what is measured.

A shared machine gets slower and faster by itself. So no time stands alone: every repeat of a job is preceded by its
ceiling, the ratio is taken between neighbours, and the median of the ratios is reported with its spread::

    repeat 1   ceiling, job A, ceiling, job B, ...
    repeat 2   ceiling, job A, ceiling, job B, ...
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from pdxfer.kernels import native_available

__all__ = ["SCHEMA_VERSION", "Samples", "Tick", "contiguous_copy", "machine", "quantile"]

SCHEMA_VERSION = 2
#: Called with a label before each step, to show progress.
Tick = Callable[[str], None]


def quantile(values: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1), between neighbours by weight; raises on no values."""
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(slots=True)
class Samples:
    """Seconds of one job, wall clock and this thread's processor time."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def time(self, job: Callable[[], object]) -> None:
        """Run ``job`` once and add what it took."""
        wall, cpu = time.perf_counter(), time.thread_time()
        job()
        self.cpu_s.append(time.thread_time() - cpu)
        self.wall_s.append(time.perf_counter() - wall)

    def to_json(self) -> dict[str, float]:
        """Milliseconds: smallest, p50, p90 and p99 of the wall clock, and the median of processor time."""
        quantiles = {f"p{round(100 * q)}_ms": 1e3 * quantile(self.wall_s, q) for q in (0.5, 0.9, 0.99)}
        return {"min_ms": 1e3 * min(self.wall_s), **quantiles, "cpu_p50_ms": 1e3 * quantile(self.cpu_s, 0.5)}


def contiguous_copy(nbytes: int, repeats: int) -> float:
    """Bytes per second of one memcpy of ``nbytes`` between two buffers that were touched before: the median."""
    import numpy as np

    source, target, samples = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8), Samples()
    for _ in range(repeats):
        samples.time(lambda: np.copyto(target, source))
    return nbytes / quantile(samples.wall_s, 0.5)


def machine() -> dict[str, Any]:
    """What ran this: processor, memory, versions, and how busy the machine was."""
    versions = {"python": platform.python_version()}
    for name in ("pdxfer", "numpy", "xxhash", "grpcio", "torch"):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": list(os.getloadavg()),
        "copy_kernel": "native" if native_available() else "numpy",
        "versions": versions,
    }


def _cpu_model() -> str:
    with suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return value.strip()
    return platform.processor() or "unknown"
