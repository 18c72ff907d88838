"""``python -m pdxfer.testing.simulation``: run seeds, say what failed and how to see it again.

Exit code 0: all held. 1: something did not, and a line ``reproduce:`` says with which command.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from dataclasses import asdict

from pdxfer.testing.simulation.run import Report, simulate

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(argv)
    began_s, reports = time.monotonic(), list[Report]()
    for seed in range(options.seed, options.seed + options.seeds):
        if options.seconds and time.monotonic() - began_s > options.seconds:
            break
        reports.append(simulate(seed, options.transfers, faults=options.fault, stories=options.story))
        _progress(reports[-1], len(reports), options, time.monotonic() - began_s)
        if reports[-1].errors and not options.keep_going:
            break
    print(_summary(reports, time.monotonic() - began_s, as_json=options.json))
    return int(any(report.errors for report in reports))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pdxfer.testing.simulation", description=(__doc__ or "").strip())
    parser.add_argument("--seeds", type=int, default=1, help="how many, from --seed on")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--transfers", type=int, default=1000, help="of each seed")
    parser.add_argument("--fault", action="append", default=[], help="only this one, in every round; may be repeated")
    parser.add_argument("--story", action="append", default=[], help="only this one; may be repeated")
    parser.add_argument("--seconds", type=float, default=0.0, help="begin no seed after so long; 0 is no limit")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that failed")
    parser.add_argument("--json", action="store_true", help="print the result, seeds that failed in full, as JSON")
    return parser


def _progress(report: Report, done: int, options: argparse.Namespace, spent_s: float) -> None:
    note = "FAILED" if report.errors else "held"
    rate = f"{report.transfers} transfers, {report.virtual_s:.0f} s virtual, trace {report.trace}"
    print(f"[{done}/{options.seeds}, {spent_s:.0f} s] seed {report.seed} {note}: {rate}", file=sys.stderr, flush=True)
    for error in report.errors:
        print(f"  {error}", file=sys.stderr)
    if report.errors:
        command = f"python -m pdxfer.testing.simulation --seed {report.seed} --transfers {options.transfers}"
        chosen = [("--fault", f) for f in options.fault] + [("--story", s) for s in options.story]
        command += "".join(f" {option} {shlex.quote(name)}" for option, name in chosen)
        print(f"  reproduce: {command}", file=sys.stderr, flush=True)


def _summary(reports: list[Report], spent_s: float, *, as_json: bool) -> str:
    outcomes: Counter[str] = sum((Counter(r.outcomes) for r in reports), Counter())
    faults: Counter[str] = sum((Counter(r.faults) for r in reports), Counter())
    failed = [r for r in reports if r.errors]
    transfers = sum(r.transfers for r in reports)
    found = {
        "seeds": len(reports), "transfers": transfers, "failed_seeds": [r.seed for r in failed],
        "seconds": round(spent_s, 1), "transfers_per_s": round(transfers / max(spent_s, 1e-9), 1),
        "virtual_seconds": round(sum(r.virtual_s for r in reports)), "outcomes": dict(outcomes.most_common()),
        "faults": dict(faults.most_common()),
    }  # fmt: skip
    if as_json:
        return json.dumps({**found, "failures": [asdict(r) for r in failed]}, indent=2)
    lines = [f"{key}: {value}" for key, value in found.items() if not isinstance(value, dict)]
    for key in ("outcomes", "faults"):
        counts = found[key]
        assert isinstance(counts, dict)
        lines.append(f"{key}: " + ", ".join(f"{name} {n}" for name, n in counts.items()))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
