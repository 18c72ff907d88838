"""Stats: what the vLLM connector counts, in vLLM's own KV-connector log line and Prometheus endpoint.

In come results of offers and loads in a worker; out come what vLLM expects of a ``KVConnectorStats`` (sums and samples,
plain values, merged over ranks on their way to the scheduler) and of a ``KVConnectorPromMetrics``. Both are used by
their methods only, so this file imports no vLLM.

=====================================  ==========================================================
metric                                 meaning
=====================================  ==========================================================
vllm:pdxfer_transfers_total            loads by ``outcome``: received, cancelled, or the error's reason
vllm:pdxfer_offers_total               offers by ``outcome``: completed, expired, aborted, withdrawn ...
vllm:pdxfer_bytes_total                payload bytes received
vllm:pdxfer_messages_total             data messages received
vllm:pdxfer_transfer_seconds           one rank's load, from its start to READY
=====================================  ==========================================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PdxferPromMetrics", "PdxferStats"]

_SUMS = ("bytes", "messages")
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


def _empty() -> dict[str, Any]:
    return {"transfers": {}, "offers": {}, "seconds": [], **dict.fromkeys(_SUMS, 0)}


@dataclass
class PdxferStats:
    """One interval of one rank, or several merged."""

    data: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data = _empty() | self.data

    def count(self, kind: str, outcome: str) -> None:
        """Count one ``transfers`` or ``offers`` outcome."""
        self.data[kind][outcome] = self.data[kind].get(outcome, 0) + 1

    def received(self, seconds: float, **sums: int) -> None:
        """Count one load that is READY, with its bytes and messages."""
        self.count("transfers", "received")
        self.data["seconds"].append(seconds)
        for name, value in sums.items():
            self.data[name] += value

    def to_dict(self) -> dict[str, Any]:
        """What travels to the process that logs."""
        return self.data

    def reset(self) -> None:
        """Begin a new interval."""
        self.data = _empty()

    def aggregate(self, other: PdxferStats) -> PdxferStats:
        """Add another rank's, or a later interval's, to this one."""
        for kind in ("transfers", "offers"):
            self.data[kind] = dict(Counter(self.data[kind]) + Counter(other.data[kind]))
        self.data["seconds"] = [*self.data["seconds"], *other.data["seconds"]]
        for name in _SUMS:
            self.data[name] += other.data[name]
        return self

    def reduce(self) -> dict[str, int | float]:
        """A few representative values for the log line."""
        seconds = sorted(self.data["seconds"])
        received = len(seconds)
        failed = sum(n for outcome, n in self.data["transfers"].items() if outcome not in ("received", "cancelled"))
        lost = sum(n for outcome, n in self.data["offers"].items() if outcome not in ("completed", "withdrawn"))
        return {
            "Transfers received": received,
            "Transfers failed": failed,
            "Offers completed": self.data["offers"].get("completed", 0),
            "Offers not taken": lost,
            "Median transfer (ms)": round(1e3 * seconds[received // 2], 1) if seconds else 0,
            "MB received": round(self.data["bytes"] / 1e6, 1),
            "Messages": self.data["messages"],
        }

    def is_empty(self) -> bool:
        """Whether nothing happened."""
        return bool(self.data == _empty())


class PdxferPromMetrics:
    """The table above, registered with vLLM's endpoint.

    Args:
        metric_types: vLLM's own class for each of Prometheus' (they differ where a Ray cluster collects metrics).
    """

    def __init__(
        self, metric_types: Mapping[type, Any], labelnames: list[str], labelvalues: Mapping[int, list[object]]
    ) -> None:
        classes = {kind.__name__: own for kind, own in metric_types.items()}
        self._counter_cls, self._labelvalues = classes["Counter"], labelvalues
        outcome = [*labelnames, "outcome"]
        self._outcomes = {
            "transfers": self._counter("transfers", "Loads by outcome.", outcome),
            "offers": self._counter("offers", "Offers by outcome.", outcome),
        }
        self._sums = {
            "bytes": self._counter("bytes", "Payload bytes received.", labelnames),
            "messages": self._counter("messages", "Data messages received.", labelnames),
        }
        self._seconds = classes["Histogram"](
            name="vllm:pdxfer_transfer_seconds",
            documentation="One rank's load, from its start to READY.",
            labelnames=labelnames,
            buckets=_BUCKETS,
        )

    def _counter(self, name: str, documentation: str, labelnames: list[str]) -> Any:
        return self._counter_cls(name=f"vllm:pdxfer_{name}", documentation=documentation, labelnames=labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one interval."""
        labels = self._labelvalues[engine_idx]
        for kind, counter in self._outcomes.items():
            for outcome, count in transfer_stats_data[kind].items():
                counter.labels(*labels, outcome).inc(count)
        for name, counter in self._sums.items():
            counter.labels(*labels).inc(transfer_stats_data[name])
        histogram = self._seconds.labels(*labels)
        for seconds in transfer_stats_data["seconds"]:
            histogram.observe(seconds)
