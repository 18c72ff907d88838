"""``pdxfer bench``: measures of this machine, as tables for people or as one JSON object.

In come sizes and repeats; out goes what ``plan.py``, ``copy.py`` and ``handoff.py`` measured, with the facts of the
machine. Nothing is measured in here.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from pdxfer.bench.measure import Tick

__all__ = ["bench", "copy", "handoff", "plan", "vllm"]

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _sizes(repeats: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The options that all benches have."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        for option in (
            _json,
            click.option(
                "--megabytes", type=click.IntRange(1), default=256, show_default=True, help="MiB copied at a time."
            ),
            click.option(
                "--repeats", type=click.IntRange(1), default=repeats, show_default=True, help="Timed repeats."
            ),
        ):
            command = option(command)
        return command

    return decorate


@click.group()
def bench() -> None:
    """Measure copies, plans and hand-offs against this machine's own ceilings.

    Times mean something only beside the ceilings of the same run, and on a quiet machine.
    """


@bench.command()
@click.option("--layers", type=click.IntRange(4), default=64, show_default=True, help="Layers of the hybrid.")
@click.option("--ranks", type=click.IntRange(1), default=16, show_default=True, help="TP on both sides.")
@click.option("--tokens", type=click.IntRange(1), default=32768, show_default=True, help="Tokens of the request.")
@click.option("--page-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens per page.")
@_sizes(15)
def plan(layers: int, ranks: int, tokens: int, page_tokens: int, repeats: int, megabytes: int, as_json: bool) -> None:
    """Time a cold plan, and one rank's work per request, in three placements."""
    from pdxfer.bench.plan import PlanOptions, bench_plan

    options = PlanOptions(
        layers=layers, ranks=ranks, tokens=tokens, page_tokens=page_tokens, repeats=repeats, megabytes=megabytes
    )
    _report("plan", lambda tick: bench_plan(options, tick), 3 * (5 * repeats + 1) + 1, as_json, _show_plan)


@bench.command()
@click.option("--case", "names", multiple=True, help="Only cases whose name begins so; may be repeated.")
@_sizes(9)
def copy(names: tuple[str, ...], repeats: int, megabytes: int, as_json: bool) -> None:
    """Copy scattered pages of another process, beside a native loop of one memcpy per run."""
    from pdxfer.bench.copy import CASES, CopyOptions, bench_copy
    from pdxfer.errors import MisuseError

    cases = tuple(case for case in CASES if not names or case.name.startswith(names))
    if not cases:
        raise MisuseError(f"no case begins with {' or '.join(names)}; there are {_names(CASES)}")
    options = CopyOptions(repeats=repeats, megabytes=megabytes, cases=cases)
    steps = len(cases) * (8 * (repeats + 1) + 1)
    _report("copy", lambda tick: bench_copy(options, tick), steps, as_json, _show_copy)


@bench.command()
@click.option("--small-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of the small request.")
@click.option("--way", "names", multiple=True, help="Only ways whose name begins so; may be repeated.")
@_sizes(20)
def handoff(small_tokens: int, names: tuple[str, ...], repeats: int, megabytes: int, as_json: bool) -> None:
    """Time offer and fetch between two agents in two processes, minus the copy itself."""
    from pdxfer.bench.handoff import WAYS, HandoffOptions, bench_handoff
    from pdxfer.errors import MisuseError

    ways = tuple(way for way in WAYS if not names or way.name.startswith(names))
    if not ways:
        raise MisuseError(f"no way begins with {' or '.join(names)}; there are {_names(WAYS)}")
    options = HandoffOptions(small_tokens=small_tokens, repeats=repeats, megabytes=megabytes, ways=ways)
    steps = 1 + len(ways) * (11 * repeats + 5)
    _report("handoff", lambda tick: bench_handoff(options, tick), steps, as_json, _show_handoff)


@bench.command()
@click.option("--python", default=sys.executable, help="An interpreter with vLLM, nixl and pdxfer; ours by default.")
@click.option("--model", default="qwen3-next", show_default=True, help="qwen3-next, llama or deepseek-v3.")
@click.option("--prefill-tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks that prefill.")
@click.option("--decode-tp", type=click.IntRange(1), default=1, show_default=True, help="Ranks that decode.")
@click.option("--prompt-tokens", default="128,512,1500", show_default=True, help="Prompt lengths, with commas.")
@click.option("--connector", "names", multiple=True, help="Only this one (pdxfer or nixl); may be repeated.")
@click.option("--repeats", type=click.IntRange(1), default=7, show_default=True, help="Timed prompts of each length.")
@click.option("--max-time", type=click.FloatRange(1), default=1800, show_default=True, help="Seconds, shared evenly.")
@_json
def vllm(
    python: str,
    model: str,
    prefill_tp: int,
    decode_tp: int,
    prompt_tokens: str,
    names: tuple[str, ...],
    repeats: int,
    max_time: float,
    as_json: bool,
) -> int:
    """Hand requests over between two real vLLM servers, by this connector and by vLLM's NixlConnector.

    Exit code 1 when a connector could not do all of it; the rows say why.
    """
    from pdxfer.bench.vllm import CONNECTORS, VllmOptions, bench_vllm
    from pdxfer.errors import MisuseError

    try:
        lengths = tuple(int(length) for length in prompt_tokens.split(","))
    except ValueError:
        raise MisuseError(f"--prompt-tokens are whole numbers with commas between, got {prompt_tokens!r}") from None
    options = VllmOptions(
        python=python,
        model=model,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prompt_tokens=lengths,
        repeats=repeats,
        connectors=names or tuple(CONNECTORS),
        max_time_s=max_time,
    )
    steps = 1 + len(options.connectors) * (2 + len(lengths) * (repeats + 1))
    # The servers are not our terminal's: SIGTERM must unwind as ^C does, to end them.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        results = _report("vllm", lambda tick: bench_vllm(options, tick), steps, as_json, _show_vllm)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 1 if any(found["error"] for found in results["connectors"]) else 0


def _names(rows: Iterable[Any]) -> str:
    return ", ".join(f"'{row.name}'" for row in rows)


def _report(
    name: str,
    measure: Callable[[Tick], dict[str, Any]],
    steps: int,
    as_json: bool,
    show: Callable[[Console, dict[str, Any]], None],
) -> dict[str, Any]:
    from pdxfer.bench.measure import SCHEMA_VERSION, machine

    facts = machine()
    with _progress(steps) as tick:
        results = measure(tick)
    facts["load_average_after"] = machine()["load_average"]
    report = {
        "schema_version": SCHEMA_VERSION,
        "bench": name,
        "command_line": sys.argv[1:],
        "machine": facts,
        "results": results,
    }
    if as_json:
        click.echo(json.dumps(report, indent=2))
        return results
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=140)
    console.print(results["what"], style="bold", markup=False)
    show(console, results)
    _show_machine(console, facts)
    return results


@contextmanager
def _progress(steps: int) -> Iterator[Tick]:
    """A progress bar on a terminal's standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    # Redrawn only between steps: a thread that draws would be measured, too.
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps)

        def tick(what: str) -> None:
            progress.update(task, description=what, advance=1, refresh=True)

        yield tick


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


def _show_plan(console: Console, results: dict[str, Any]) -> None:
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
    _show_ceiling(console, results["contiguous_copy"])


def _show_copy(console: Console, results: dict[str, Any]) -> None:
    for case in results["cases"]:
        title = f"{case['case']}: {case['nbytes'] / 1e6:,.0f} MB"
        table = _table(
            f"{title} in {case['runs']:,} runs" if case["runs"] else title,
            *("way", "GB/s", "of ceiling", "p10 .. p90", "target"),
        )
        for row in case["rows"]:
            spread = f"{row['ratio_p10']:.2f} .. {row['ratio_p90']:.2f}" if "ratio_p10" in row else "the ceiling"
            target = results["targets"].get(row["way"]) if case["counts_for_targets"] else None
            verdict = "" if target is None else _verdict(row["ratio"], target, at_most=False)
            table.add_row(row["way"], f"{row['gb_per_s']:.2f}", f"{row['ratio']:.3f}", spread, verdict)
        console.print(table)
        for note in case["notes"]:
            console.print(note, markup=False)
    console.print("of ceiling: median over repeats, each beside the ceiling's run right before it", style="dim")


def _show_handoff(console: Console, results: dict[str, Any]) -> None:
    columns = ("ms", "MB", "offer", "fetch", "copy", "added p50 / p90 / p99", "GB/s (copy)", "calls x ms", "target")
    table = _table("", *columns)
    for way in results["ways"]:
        call_ms = way["control_call"]["p50_ms"]
        for row in way["requests"]:
            targets = results["targets"]
            aimed = (way["way"], row["request"]) == (targets["way"], targets["request"])
            verdict = _verdict(row["added_ms"]["p50"], targets["added_p50_ms"], at_most=True) if aimed else ""
            table.add_row(
                f"{way['way']}: {row['request']}",
                f"{row['payload_bytes'] / 1e6:,.1f}",
                *(f"{row[part]['p50_ms']:.2f}" for part in ("offer", "fetch", "copy_alone")),
                " / ".join(f"{row['added_ms'][p]:.2f}" for p in ("p50", "p90", "p99")),
                f"{row['gb_per_s']:.2f} ({row['copy_alone_gb_per_s']:.2f})",
                f"{sum(row['rpcs_per_request'].values()):.2f} x {call_ms:.2f}",
                verdict,
            )
    console.print(table)
    _show_ceiling(console, results["contiguous_copy"])


def _show_vllm(console: Console, results: dict[str, Any]) -> None:
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


def _show_ceiling(console: Console, copied: dict[str, Any]) -> None:
    console.print(f"contiguous copy of {copied['nbytes'] / 1e6:,.0f} MB: {copied['gb_per_s']:.2f} GB/s")


def _show_machine(console: Console, facts: dict[str, Any]) -> None:
    load = f"load {facts['load_average'][0]:.1f} before, {facts['load_average_after'][0]:.1f} after"
    memory = f"{facts['memory_bytes'] / 2**30:.0f} GiB"
    console.print(
        f"{facts['cpu']}, {facts['cores']} cores, {memory}, {facts['copy_kernel']} kernel, {load}", markup=False
    )
    if max(facts["load_average"][0], facts["load_average_after"][0]) > facts["cores"] / 2:
        console.print("[yellow]The machine is busy[/yellow]: these figures, and whether targets hold, mean little.")
