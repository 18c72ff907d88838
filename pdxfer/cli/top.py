"""``pdxfer top``: a running agent in the terminal, refreshed until interrupted.

In comes what the admin says now and said a moment ago; out comes one frame: readiness, rates, ranks, peers, transfers.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from pdxfer.cli.operate import ask, human_bytes, printable, with_admin

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

__all__ = ["frame", "top"]

_ROWS = 15


@click.command()
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between frames.")
@click.option("--once", is_flag=True, help="Print one frame and end.")
@with_admin
def top(admin: str, as_json: bool, interval: float, once: bool) -> None:
    """Watch a running agent: rates, ranks, peers and transfers, until interrupted.

    With --json, one line per frame.
    """
    before = _look(admin)
    if as_json:
        while True:
            click.echo(json.dumps(before))
            if once:
                return
            time.sleep(interval)
            before = _look(admin)
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once:
        console.print(frame(before, before))
        return
    with Live(frame(before, before), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(interval)
            now = _look(admin)
            live.update(frame(now, before), refresh=True)
            before = now


def _look(admin: str) -> dict[str, Any]:
    return {**ask(admin, "/statusz"), "at": time.time(), "recent": ask(admin, f"/transferz?limit={_ROWS}")["transfers"]}


def frame(now: dict[str, Any], before: dict[str, Any]) -> Group:
    """One screenful."""
    from rich.console import Group
    from rich.text import Text

    wrong = {name: why for name, why in now["checks"].items() if why}
    head = Text.assemble(
        ("pdxfer ", "bold"), " ".join(sorted({a["worker"] for a in now["agents"]})), " is ",
        ("not ready", "bold red") if wrong else ("ready", "bold green"),
        f", {now['underway']} underway, up {now['at'] - now['started_at']:.0f} s",
    )  # fmt: skip
    why = [Text(f"  {name}: {text}", style="red") for name, text in wrong.items()]
    return Group(head, *why, _ranks(now), _peers(now, before), _transfers(now))


def _table(title: str, *names: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1))
    for name in names:
        numeric = name in (
            "our rank",
            "offered",
            "fetching",
            "done",
            "failed",
            "bytes",
            "rate",
            "took",
            "free",
            "busy",
            "quarantined",
        )
        table.add_column(name, justify="right" if numeric else "left", no_wrap=numeric, overflow="ellipsis")
    return table


def _ranks(now: dict[str, Any]) -> Table:
    table = _table("ranks", "worker", "rank", "model", "offered", "fetching", "free", "busy", "quarantined")
    for a in now["agents"]:
        slots = a["slots"]
        free, quarantined = slots.get("free", 0), slots.get("quarantined", 0)
        busy = sum(slots.values()) - free - quarantined
        cells = (
            a["worker"],
            f"{a['rank']}/{a['ranks']}",
            a["model"],
            a["leases"],
            a["fetches"],
            free,
            busy,
            quarantined,
        )
        table.add_row(*map(_safe, cells), style="yellow" if quarantined else "")
    return table


def _peers(now: dict[str, Any], before: dict[str, Any]) -> Table:
    table = _table("peers", "worker", "our rank", "up", "done", "failed", "bytes", "rate", "last failure")
    past = {(p["of_rank"], p["worker"]): p.get("nbytes", 0) for p in before["peers"]}
    for p in now["peers"]:
        nbytes = p.get("nbytes", 0)
        gained = nbytes - past.get((p["of_rank"], p["worker"]), 0)
        rate = gained / max(1e-3, now["at"] - before["at"])
        up = "yes" if p.get("up", True) else "NO"
        cells = (p["worker"], p["of_rank"], up, p.get("completed", 0), p.get("failed", 0), human_bytes(nbytes),
                 f"{human_bytes(rate)}/s", _short(p.get("last_failure", "")))  # fmt: skip
        table.add_row(*map(_safe, cells), style="red" if up == "NO" else "")
    return table


def _transfers(now: dict[str, Any]) -> Table:
    table = _table("transfers", "transfer", "role", "peer", "outcome", "took", "bytes", "over", "reason")
    colours = {"completed": "green", "live": "cyan", "failed": "red"}
    for t in now["recent"]:
        cells = (t["transfer"], f"{t['role']} {t['rank']}", t["peer"], t["outcome"], f"{t['elapsed_s'] * 1e3:.1f} ms",
                 human_bytes(t["bytes"]), t["transport"], t.get("failure", {}).get("reason", ""))  # fmt: skip
        table.add_row(*map(_safe, cells), style=colours.get(t["outcome"], "yellow"))
    return table


def _short(text: str, chars: int = 60) -> str:
    line = text.partition("\n")[0]
    return line if len(line) <= chars else f"{line[: chars - 1]}…"


def _safe(cell: object) -> str:
    from rich.markup import escape

    return escape(printable(cell))
