"""What the benches' results look like to people: tables on a terminal. Nothing is measured or judged in here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["changes", "console", "handoff", "link", "machine", "plan", "vllm"]


def console() -> Console:
    """Standard output; wide where it is no terminal."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=200)


def _table(title: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _verdict(value: float, target: float, *, at_most: bool) -> str:
    good = value <= target if at_most else value >= target
    return f"[green]holds[/green] ({'<=' if at_most else '>='} {target:g})" if good else f"[red]misses {target:g}[/red]"


def _ms(times: dict[str, float]) -> str:
    return f"{times['p50_ms']:.2f} / {times['p90_ms']:.2f}"


def plan(console: Console, results: dict[str, Any]) -> None:
    """Cold plans, requests, and how both grow."""
    table = _table(
        "cold, ms (p50 / p90)", "placement", "layout digests", "plan and proof", "plan digest", "all", "target"
    )
    for row in results["placements"]:
        verdict = _verdict(row["cold"]["p50_ms"], results["targets"]["cold_ms"], at_most=True)
        cells = [_ms(row[part]) for part in ("layout_digests", "plan", "plan_digest", "cold")]
        table.add_row(row["placement"], *cells, verdict)
    console.print(table)
    columns = ("placement", "ms (p50 / p90)", "edges", "chunks", "segments", "pages", "MB", "target")
    table = _table("per request: all that one target rank works out", *columns)
    for row in results["placements"]:
        counts = row["counts"]
        verdict = _verdict(row["request"]["p50_ms"], results["targets"]["request_ms"], at_most=True)
        cells = [f"{counts[f'rank_{name}']:,}" for name in ("edges", "chunks", "segments", "pages")]
        table.add_row(
            row["placement"], _ms(row["request"]), *cells, f"{counts['rank_payload_bytes'] / 1e6:,.0f}", verdict
        )
    console.print(table)
    table = _table("growth, per_layer, ms p50", "what", "ranks", "layers", "tokens", "cold", "per request")
    for row in results["rows"]:
        if row["growth"]:
            sizes = (f"{row[name]:,}" for name in ("ranks", "layers", "tokens"))
            table.add_row(row["growth"], *sizes, f"{row['cold_p50_ms']:.2f}", f"{row['request_p50_ms']:.3f}")
    console.print(table)
    copied = results["contiguous_copy"]
    console.print(f"contiguous copy of {copied['nbytes'] / 1e6:,.0f} MB: {copied['gb_per_s']:.2f} GB/s")


def handoff(console: Console, results: dict[str, Any]) -> None:
    """Whole transfers: one table per case, and the suite's verdicts."""
    for case in dict.fromkeys(row["case"] for row in results["rows"]):
        rows = [row for row in results["rows"] if row["case"] == case]
        columns = ("row", "ms p50 / p90 / p99", "spread", "GB/s", "of ceiling", "logical", "posted", "MB", "wire MB",
                   "dedup", "added ms", "plan / pack / wire / unpack / verify ms")  # fmt: skip
        title = f"{case}: {rows[0].get('model', '')}, {rows[0].get('layers', '?')} layers, {rows[0]['transport']}"
        table = _table(title, *columns)
        for row in rows:
            stages = ("plan_ms", "pack_ms", "wire_ms", "unpack_ms", "verify_ms")
            threads = row.get("ceiling_threads", 0)
            table.add_row(
                row["row"] + (f" ({threads} thread{'s' * (threads > 1)})" if threads else ""),
                " / ".join(f"{row[f'{q}_ms']:.2f}" for q in ("p50", "p90", "p99")),
                f"{row['spread_pct']:.0f} %",
                f"{row['gb_per_s']:.2f}",
                f"{row['pct_of_ceiling']:.1f} %",
                *(f"{row[name]:,}" if name in row else "" for name in ("descriptors_logical", "descriptors_posted")),
                f"{row['bytes_payload'] / 1e6:,.1f}",
                f"{row['bytes_wire'] / 1e6:,.1f}" if "bytes_wire" in row else "",
                f"{row['dedup_ratio']:.2f}" if "dedup_ratio" in row else "",
                f"{row['added_p50_ms']:.2f}" if "added_p50_ms" in row else "",
                " / ".join(f"{row[name]:.2f}" for name in stages) if "plan_ms" in row else "",
            )
        console.print(table)
        for row in rows:
            if "sidecar_ratio" in row:
                cost = f"{row['sidecar_ratio']:.3f} of the time embedded, {row['sidecar_added_ms']:+.2f} ms"
                console.print(f"{row['row']}: {cost} (medians over runs, each with its neighbour)", markup=False)
    if lines := results.get("lines"):
        table = _table("what is promised", "line", "measured", "target", "")
        marks = {True: "[green]holds[/green]", False: "[red]misses[/red]", None: "[yellow]not here[/yellow]"}
        for line in lines:
            table.add_row(line["line"], line["value"], line["target"], marks[line["holds"]])
        console.print(table)
    _notes(console, results)
    what = "stages: of all edges and requests, added up; of ceiling: each run to the ceiling's right before it"
    console.print(what, style="dim", markup=False)


def link(console: Console, results: dict[str, Any]) -> None:
    """A sweep, with nixlbench's columns."""
    for scheme in dict.fromkeys(row["transport"] for row in results["rows"]):
        columns = ("Block Size (B)", "Batch Size", "B/W (GB/Sec)", "Avg Lat. (us)", "Avg Prep (us)", "P99 Prep (us)",
                   "Avg Post (us)", "P99 Post (us)", "Avg Tx (us)", "P99 Tx (us)", "Ceiling", "of it")  # fmt: skip
        table = _table(scheme, *columns)
        for row in results["rows"]:
            if row["transport"] != scheme:
                continue
            steps = [f"{row[f'{q}_{step}_us']:.1f}" for step in ("prep", "post", "tx") for q in ("avg", "p99")]
            sizes = f"{row['block_size']:,}", f"{row['batch_size']:,}", f"{row['bw_gb_per_s']:.3f}"
            ceiling = f"{row['ceiling_gb_per_s']:.3f} ({row['ceiling']})", f"{row['pct_of_ceiling']:.1f} %"
            table.add_row(*sizes, f"{row['avg_lat_us']:.1f}", *steps, *ceiling)
        console.print(table)
    _notes(console, results)


def changes(console: Console, found: dict[str, Any]) -> None:
    """What changed between two reports."""
    names, common = _told_apart([change["row"] for change in found["changes"]])
    table = _table(found["what"], "row", "metric", "before", "after", "change")
    for change in found["changes"]:
        before, after = change["before"], change["after"]
        percent = f"{100 * (after / before - 1):+.1f} %" if before else ""
        table.add_row(names[change["row"]], change["metric"], f"{before:,.3f}", f"{after:,.3f}", percent)
    console.print(table)
    if common:
        console.print(f"in all rows: {common}", markup=False)
    for name in found["missing"]:
        console.print(f"only in one of them: {name}", style="yellow", markup=False)
    for failure in found["failures"]:
        where = f"{names[failure['row']]}, {failure['metric']} {failure['before']:.3f} to {failure['after']:.3f}"
        console.print(f"{failure['condition']}: {where}", style="red", markup=False)


def _told_apart(rows: list[str]) -> tuple[dict[str, str], str]:
    """Short names of rows that are key=value lists, without what they have in common, and that."""
    pieces = {row: re.split(r" (?=\w+=)", row) for row in rows}
    common = [p for p in pieces[rows[0]] if all(p in each for each in pieces.values())] if len(pieces) > 1 else []
    return {row: " ".join(p for p in each if p not in common) or row for row, each in pieces.items()}, " ".join(common)


def _notes(console: Console, results: dict[str, Any]) -> None:
    for note in results["notes"]:
        console.print(note, style="yellow", markup=False)


def vllm(console: Console, results: dict[str, Any]) -> None:
    """Two connectors beside each other."""
    columns = ("connector: prompt", "prefill ms", "decode ms", "transfer ms", "own ms", "MB", "posted", "tokens equal")
    table = _table("p50 (p10 .. p90)", *columns)
    for found in results["connectors"]:
        for row in found["rows"]:
            ties = f", {row['near_ties']} near ties" if row["near_ties"] else ""
            table.add_row(
                f"{found['connector']}: {row['prompt_tokens']:,}",
                *(_spread(row[key], 1) for key in ("prefill_ms", "decode_ms", "transfer_ms", "own_ms")),
                f"{row['bytes'] / 1e6:.2f}",
                f"{row['posted']:,.0f} in {row['transfers']:.0f}",
                f"{row['equal']} of {row['prompts']}{ties}",
            )
    for row in results["ratios"]:
        ratios = (_spread(row[key], 2) for key in ("prefill_ms", "decode_ms", "transfer_ms", "own_ms"))
        table.add_row(f"nixl / pdxfer: {row['prompt_tokens']:,}", *ratios, "", "", "")
    console.print(table)
    for found in results["connectors"]:
        if "floor_ms" in found:
            console.print(
                f"{found['connector']}: first contact {found['first_contact_ms']:.0f} ms;"
                f" a request of 2 tokens, without a hand-off, takes {found['floor_ms']:.1f} ms (the floor)"
            )
        if found["error"]:
            console.print(f"{found['connector']} could not do it all: {found['error']}", style="red", markup=False)
    console.print(
        "prefill, decode: one request to each, decode's with the hand-off in it; own: decode alone, no hand-off\n"
        "own's ratio should be 1: what it is off, the machine was busier for one of them\n"
        "posted, in how many transfers: chunks of which each has one message (pdxfer), or descriptors (nixl)\n"
        "transfer: pdxfer's has negotiation and verifying every byte in it, nixl's is the reads alone",
        style="dim",
    )


def _spread(found: dict[str, Any], digits: int) -> str:
    return f"{found['p50']:.{digits}f} ({found['p10']:.{digits}f} .. {found['p90']:.{digits}f})"


def machine(console: Console, facts: dict[str, Any]) -> None:
    """What ran it, and whether it was busy."""
    load = f"load {facts['load_average'][0]:.1f} before, {facts['load_average_after'][0]:.1f} after"
    memory = f"{facts['memory_bytes'] / 2**30:.0f} GiB"
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {memory}, {facts['copy_kernel']} kernel, {load}", markup=False
    )
    if max(facts["load_average"][0], facts["load_average_after"][0]) > facts["cores"] / 2:
        console.print("[yellow]The machine is busy[/yellow]: these figures, and whether targets hold, mean little.")
