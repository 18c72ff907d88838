"""``pdxfer plan``: who sends what to whom between two workers, as tables and a picture, or as one JSON object.

In come a model and two workers; out goes what ``plan_report`` computes. No arithmetic on layouts in here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from pdxfer.cli import show
from pdxfer.errors import MisuseError

if TYPE_CHECKING:
    from rich.console import Console

    from pdxfer.cli.plan_report import ComponentShare, Pair, PlanReport

__all__ = ["plan"]

_SHADES = "·░▒▓█"


@click.command()
@click.argument("model", metavar="MODEL|config.json")
@click.option("--from", "source", default="tp=1", show_default=True, metavar="WORKER", help="The source worker.")
@click.option("--to", "target", default="tp=1", show_default=True, metavar="WORKER", help="The target worker.")
@click.option(
    "--tokens", type=click.IntRange(1, 1 << 24), default=32768, show_default=True, help="Tokens of the request."
)
@click.option("--first-token", type=click.IntRange(0), default=0, help="Tokens that the target has already.")
@click.option("--chunk", default="8MiB", show_default=True, metavar="SIZE", help="Upper bound of one message.")
@click.option("--fan-out/--no-fan-out", default=True, show_default=True, help="Send once per host and relay there.")
@click.option("--pairs", type=click.IntRange(0), default=32, show_default=True, help="Rows of pairs; 0 shows all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(
    model: str,
    source: str,
    target: str,
    tokens: int,
    first_token: int,
    chunk: str,
    fan_out: bool,
    pairs: int,
    as_json: bool,
) -> None:
    """Show who sends what to whom between two worker layouts.

    MODEL is a preset's name, a config.json, or a directory that holds one.

    WORKER is a list such as tp=4,pp=30+34,page=64,placement=unified. Keys: tp, pp, cp, interleave, page, placement
    (per_layer, per_request, unified), order (nhd, hnd), packed (yes, no), conv (ct, tc), state (kv, vk), kv_dtype,
    conv_dtype, state_dtype, accepts, before, spec, hosts, ranks_per_host.
    """
    from pdxfer.cli.plan_report import parse_worker, plan_report
    from pdxfer.models import load_config, spec_from_config
    from pdxfer.sizing import parse_bytes

    spec = spec_from_config(load_config(model))
    if first_token > tokens:
        raise MisuseError(f"--first-token {first_token} is beyond --tokens {tokens}")
    chunk_bytes = parse_bytes(chunk)
    if chunk_bytes < 4096:
        raise MisuseError(f"--chunk {chunk} is too small; a message has at least 4 KiB")
    layouts = [parse_worker(text, spec, tokens) for text in (source, target)]
    report = plan_report(*layouts, tokens=tokens, first_token=first_token, chunk_bytes=chunk_bytes, fan_out=fan_out)
    if as_json:
        click.echo(json.dumps({"model": model, "from": source, "to": target, **report.to_json()}, indent=2))
    else:
        _print(f"{model} ({spec.model}), {tokens:,} tokens: {source} to {target}", report, pairs)


def _print(title: str, report: PlanReport, pairs: int) -> None:
    console = show.console()
    console.print(title, style="bold", markup=False)
    _print_pairs(console, report, pairs)
    _print_components(console, report)
    _print_matrix(console, report, relay=False)
    if any(pair.relay for pair in report.pairs):
        _print_matrix(console, report, relay=True)
    _print_totals(console, report)


def _print_pairs(console: Console, report: PlanReport, most: int) -> None:
    rows = sorted(report.pairs, key=lambda p: (p.relay, -p.nbytes, p.source, p.target))
    shown = rows[:most] if most else rows
    table = show.table("who sends to whom", "bytes", "messages", "components", left=["components"])
    for pair in sorted(shown, key=lambda p: (p.relay, p.source, p.target)):
        arrow = (
            f"target {pair.source} -> target {pair.target}, relay" if pair.relay else f"{pair.source} -> {pair.target}"
        )
        table.add_row(arrow, show.binary(pair.nbytes), str(pair.messages), _families(pair))
    console.print(table)
    if left := rows[len(shown) :]:
        nbytes = show.binary(sum(p.nbytes for p in left))
        console.print(f"... and {len(left)} more pairs with {nbytes} together (--pairs 0 shows all)", markup=False)


def _families(pair: Pair) -> str:
    """Bytes by family: conv.q, conv.k and conv.v are shown as one."""
    found: dict[str, int] = {}
    for name, nbytes in pair.components.items():
        family = name.partition(".")[0]
        found[family] = found.get(family, 0) + nbytes
    return (
        ", ".join(f"{name} {show.binary(nbytes)}" for name, nbytes in found.items() if nbytes)
        or "nothing: only completes"
    )


def _print_components(console: Console, report: PlanReport) -> None:
    table = show.table("component", "unique", "network", "x unique", "relayed", "dedup", "per source rank")
    for share in report.shares:
        table.add_row(share.component, *_share_cells(share), _span(share))
    table.add_section()
    whole = [report.total(f) for f in ("unique_bytes", "network_bytes", "relayed_bytes")]
    ratio = whole[1] / whole[0] if whole[0] else 1.0
    table.add_row(
        "total",
        show.binary(whole[0]),
        show.binary(whole[1]),
        f"{ratio:.2f}",
        show.binary(whole[2]),
        f"{report.dedup_ratio:.2f}",
        "",
    )
    console.print(table)


def _share_cells(share: ComponentShare) -> tuple[str, ...]:
    data = share.to_json()
    return (
        show.binary(share.unique_bytes),
        show.binary(share.network_bytes),
        f"{data['network_to_unique']:.2f}",
        show.binary(share.relayed_bytes),
        f"{data['dedup_ratio']:.2f}",
    )


def _span(share: ComponentShare) -> str:
    least, most = show.binary(share.least_bytes_per_source), show.binary(share.most_bytes_per_source)
    return most if least == most else f"{least} to {most}"


def _print_matrix(console: Console, report: PlanReport, *, relay: bool) -> None:
    """One cell per pair of ranks, darker for more bytes."""
    cells = {(p.source, p.target): p.nbytes for p in report.pairs if p.relay == relay}
    rows = len(report.plan.target if relay else report.plan.source)
    columns = len(report.plan.target)
    most = max(cells.values(), default=0)
    givers = "target rank" if relay else "source rank"
    what = "relays inside target hosts" if relay else "bytes over the network"
    console.print(f"{what}: rows are {givers}s, columns target ranks", markup=False)
    wide = max(2, len(str(columns - 1)) + 1) if columns * 3 < console.width - 8 else 1
    if wide > 1:
        console.print(" " * 6 + "".join(f"{column:>{wide}}" for column in range(columns)), markup=False)
    for row in range(rows):
        shades = (_shade(cells.get((row, column), 0), most) for column in range(columns))
        console.print(f"{row:>5} " + "".join(f"{shade:>{wide}}" for shade in shades), markup=False, soft_wrap=True)
    steps = len(_SHADES) - 1
    legend = (f"{shade} up to {show.binary(most * i // steps)}" for i, shade in enumerate(_SHADES) if i)
    console.print(f"      {_SHADES[0]} nothing  {'  '.join(legend)}\n", markup=False)


def _shade(nbytes: int, most: int) -> str:
    return _SHADES[-(-nbytes * (len(_SHADES) - 1) // most)] if nbytes else _SHADES[0]


def _print_totals(console: Console, report: PlanReport) -> None:
    hosts = len({r.host for r in report.plan.target.ranks})
    naive, sent = show.binary(report.total("naive_bytes")), show.binary(report.total("network_bytes"))
    relays = (
        f"; relayed on {hosts} target host{'s' if hosts > 1 else ''} {show.binary(report.total('relayed_bytes'))}"
        f" in {report.messages(relay=True):,}"
    )
    lines = (
        f"Unique {show.binary(report.total('unique_bytes'))}; sent over the network {sent} in {report.messages():,}"
        f" messages of at most {show.binary(report.chunk_bytes)}{relays if report.total('relayed_bytes') else ''}",
        f"If every target rank fetched its own copy: {naive}, {report.dedup_ratio:.2f} times as much",
        f"Plan: {len(report.plan.items):,} copy items, digest {report.plan.digest}",
    )
    for line in lines:
        console.print(line, markup=False)
