"""Compare two runs of a bench: what changed, row by row, and whether that is too much.

In come two files that ``--json`` wrote and conditions such as ``p99>+5%``; out come changes and the conditions that are
met. A row is found again by what was measured (its case, sizes and name), never by its place.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdxfer.bench.measure import SCHEMA_VERSION
from pdxfer.errors import MisuseError

__all__ = ["Condition", "compare", "load", "row_name"]

_CONDITION = re.compile(r"\s*(\w+)\s*(<|>|<=|>=)\s*([+-]?\d+(?:\.\d+)?)\s*(%?)\s*")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, ">": operator.gt, "<=": operator.le, ">=": operator.ge,
}  # fmt: skip
#: What says which row it is; all else in a row was measured.
_IDENTITY = (
    "case", "row", "model", "layers", "prefill_tp", "decode_tp", "page_tokens", "tokens", "concurrency",
    "fragmentation", "placement", "transport", "mode", "digests", "memory", "op_type", "threads", "block_size",
    "batch_size", "ranks",
)  # fmt: skip
_METRICS = ("p50_ms", "p90_ms", "p99_ms", "gb_per_s", "bw_gb_per_s", "avg_lat_us", "pct_of_ceiling", "cold_p50_ms",
            "request_p50_ms")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """``METRIC OPERATOR CHANGE[%]``: a change from the first file to the second, in percent or in the metric's unit."""

    metric: str
    sign: str
    amount: float
    percent: bool

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition; raises MisuseError."""
        found = _CONDITION.fullmatch(text)
        if not found:
            raise MisuseError(f"--fail-if {text!r} is no condition", hint="write e.g. 'p99>+5%' or 'gb_per_s<-10%'")
        return cls(metric=found[1], sign=found[2], amount=float(found[3]), percent=bool(found[4]))

    def metric_in(self, row: dict[str, Any]) -> str:
        """The row's field that is meant (``p99`` is ``p99_ms``), or an empty string."""
        names = (self.metric, f"{self.metric}_ms", f"{self.metric}_us")
        return next((name for name in names if isinstance(row.get(name), (int, float))), "")

    def met(self, before: float, after: float) -> bool:
        """Whether the change is of that size."""
        change = after - before
        if self.percent:
            change = 100 * change / before if before else 0.0 if not change else float("inf")
        return _OPERATORS[self.sign](change, self.amount)


def load(path: str) -> dict[str, Any]:
    """Read a report that ``pdxfer bench ... --json`` wrote; raises MisuseError for anything else."""
    try:
        report = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise MisuseError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise MisuseError(f"{path} is not JSON: {error}") from error
    if not isinstance(report, dict) or not isinstance(report.get("results"), dict) or "bench" not in report:
        raise MisuseError(f"{path} is no report of a bench", hint="make one with pdxfer bench ... --json > FILE")
    if report.get("schema_version") != SCHEMA_VERSION:
        raise MisuseError(f"{path} has schema version {report.get('schema_version')}, this is {SCHEMA_VERSION}")
    rows = report["results"].get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise MisuseError(f"{path} is of 'bench {report['bench']}', which has no rows to compare")
    return report


def row_name(row: dict[str, Any]) -> str:
    """What a row is, in words."""
    return " ".join(f"{name}={row[name]}" for name in _IDENTITY if row.get(name) not in (None, ""))


def compare(first: str, second: str, conditions: Sequence[Condition]) -> dict[str, Any]:
    """Compare the rows that both files have.

    Returns:
        ``changes`` of the usual metrics and of those in conditions; ``failures``, each with its condition.

    Raises:
        MisuseError: a file can't be read, no row is in both, or no common row has a condition's metric.
    """
    before, after = ({row_name(row): row for row in load(path)["results"]["rows"]} for path in (first, second))
    names = [name for name in before if name in after]
    if not names:
        raise MisuseError(f"{first} and {second} have no row in common")
    wanted = {*_METRICS, *(c.metric_in(row) for c in conditions for row in before.values())} - {""}
    changes = [
        {"row": name, "metric": metric, "before": before[name][metric], "after": after[name][metric]}
        for name in names
        for metric in sorted(wanted)
        if all(isinstance(side[name].get(metric), (int, float)) for side in (before, after))
    ]
    failures = []
    for condition in conditions:
        found = [c for c in changes if c["metric"] == condition.metric_in(before[c["row"]])]
        if not found:
            known = sorted(
                {k for n in names for k, v in before[n].items() if isinstance(v, (int, float))} - {*_IDENTITY}
            )
            raise MisuseError(
                f"no row in common has {condition.metric!r}",
                hint=f"there are {', '.join(known)}; _ms and _us may be left out",
            )
        text = f"{condition.metric}{condition.sign}{condition.amount:+g}{'%' * condition.percent}"
        failures += [{"condition": text, **c} for c in found if condition.met(c["before"], c["after"])]
    missing = sorted({*before} ^ {*after})
    return {"what": f"{first} to {second}", "changes": changes, "failures": failures, "missing": missing}
