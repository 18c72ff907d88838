"""``pdxfer bench``: measures of this machine, as tables for people, one JSON object, or comma-separated values.

In come sizes and repeats; out goes what the modules beside this one measured, with the facts of the machine. Nothing is
measured in here.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pdxfer.bench import show

if TYPE_CHECKING:
    from rich.console import Console

    from pdxfer.bench.measure import Tick

__all__ = ["bench", "compare", "handoff", "link", "plan", "report", "vllm"]

_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


def _choices(*options: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _count(name: str, default: int, text: str, least: int = 1) -> Callable[..., Any]:
    """A number; names of nixlbench's, too, which have underscores."""
    names = (name, f"--{name[2:].replace('-', '_')}") if "-" in name[2:] else (name,)
    return click.option(*names, type=click.IntRange(least), default=default, show_default=True, help=text)


_listen = click.option("--listen", default="", metavar="ADDRESS", help="Play the other end at tcp://host:port.")
_peer = click.option("--peer", default="", metavar="ADDRESS", help="The other end, on another host, at --listen there.")
_insecure = click.option("--insecure", is_flag=True, help="Other hosts may come and be met, with nobody authenticated.")
_max_time = click.option("--max-time", type=click.FloatRange(1), default=1800, show_default=True, help="Seconds.")
_csv = click.option("--csv", "as_csv", is_flag=True, help="Print rows of comma-separated values.")
_save_as = click.option("--save", default="", metavar="FILE", help="Write the JSON object there, too.")


@click.group()
def bench() -> None:
    """Measure hand-offs, links and plans against this machine's own ceilings.

    Times mean something only beside the ceilings of the same run, and on a quiet machine.
    """


@bench.command(short_help="Time a cold plan, and one rank's work per request.")
@click.option("--layers", type=click.IntRange(4), default=64, show_default=True, help="Layers of the hybrid.")
@click.option("--ranks", type=click.IntRange(1), default=16, show_default=True, help="TP on both sides.")
@click.option("--tokens", type=click.IntRange(1), default=32768, show_default=True, help="Tokens of the request.")
@click.option("--page-tokens", type=click.IntRange(1), default=16, show_default=True, help="Tokens per page.")
@click.option(
    "--megabytes", type=click.IntRange(1), default=256, show_default=True, help="MiB of the memcpy beside it."
)
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True, help="Timed repeats.")
@_choices(_json, _csv, _save_as)
def plan(as_json: bool, as_csv: bool, save: str, **sizes: int) -> None:
    """Time a cold plan, and one rank's work per request, in three placements."""
    from pdxfer.bench.plan import PlanOptions, bench_plan, growth_points

    options = PlanOptions(**sizes)
    measured = [options] * 3 + [point for _, point in growth_points(options)]
    steps = sum(5 * point.repeats + 1 for point in measured) + 1
    _report("plan", lambda tick: bench_plan(options, tick), steps, as_json, show.plan, as_csv=as_csv, save=save)


@bench.command(short_help="Sweep block and batch sizes over raw transports.")
@click.option(
    "--transport", "--backend", "transports", default="shm,tcp", show_default=True, help="With commas; or all."
)
@click.option("--op-type", "--op_type", type=click.Choice(["WRITE", "READ"], case_sensitive=False), default="WRITE",
              show_default=True, help="Messages, or reads of exported memory.")  # fmt: skip
@_choices(
    _count("--start-block-size", 4 << 10, "Bytes of the smallest block."),
    _count("--max-block-size", 16 << 20, "Bytes of the largest."),
    _count("--start-batch-size", 1, "Blocks of the smallest batch."),
    _count("--max-batch-size", 1, "Of the largest."),
    _count("--total-buffer-size", 64 << 20, "Bytes at most of block times batch."),
    _count("--num-iter", 100, "Timed iterations of each size."),
    _count("--warmup-iter", 5, "Untimed ones."),
    _count("--num-threads", 1, "Channels at once, a thread for each."),
)
@click.option("--check-consistency/--no-check-consistency", "--check_consistency", default=True, show_default=True,
              help="Compare the bytes of each size's last iteration.")  # fmt: skip
@_choices(_listen, _peer, _insecure, _max_time, _json, _csv, _save_as)
def link(transports: str, op_type: str, listen: str, peer: str, max_time: float, as_json: bool, as_csv: bool,
         save: str, **sizes: Any) -> None:  # fmt: skip
    """Sweep block and batch sizes over raw transports, with nixlbench's names and columns."""
    from pdxfer.bench import peer as peers
    from pdxfer.bench.link import Options, bench_link, serve
    from pdxfer.transport import known_schemes

    clock = peers.Clock(max_time)
    if listen:
        peers.listen(listen, serve, clock, lambda text: click.echo(text, err=True))
        return
    schemes = tuple(sorted(known_schemes())) if transports == "all" else tuple(transports.lower().split(","))
    options = Options(transports=schemes, op_type=op_type.upper(), peer=peer, **sizes)
    steps = len(schemes) * len(list(options.sizes()))
    _report("link", lambda tick: bench_link(options, tick, clock), steps, as_json, show.link, as_csv=as_csv, save=save)


@bench.command(short_help="Time whole hand-offs, beside the same bytes copied by hand.")
@click.option("--model", default="qwen3-next-80b-a3b", show_default=True, metavar="MODEL|config.json",
              help="A preset, a config.json, or fragments-SIZE: ten layers of pages of SIZE.")  # fmt: skip
@click.option("--layers", type=click.IntRange(0), default=0, help="Only the model's first so many.  [default: all]")
@_choices(
    _count("--prefill-tp", 1, "Ranks of the source."),
    _count("--decode-tp", 1, "Ranks of the target."),
    _count("--page-tokens", 16, "Tokens per page."),
    _count("--decode-page-tokens", 0, "Of the target; 0 is the same.", 0),
    _count("--tokens", 8192, "Tokens of one request."),
    _count("--concurrency", 1, "Requests at once."),
)
@click.option("--fragmentation", type=click.FloatRange(0, 1), default=1.0, show_default=True,
              help="Share of a page table's neighbours that lie apart: 0 is one stretch, 1 a permutation.")  # fmt: skip
@click.option("--placement", type=click.Choice(["per_layer", "per_request", "unified"]), default="per_layer",
              show_default=True, help="Where layers lie.")  # fmt: skip
@_count("--seed", 0, "Of pages and contents.", 0)
@click.option("--transport", "--backend", default="shm", show_default=True, help="With commas, best first; or auto.")
@click.option("--mode", type=click.Choice(["auto", "packed", "direct"]), default="auto", show_default=True, help="How.")
@click.option("--digest/--no-digest", default=True, show_default=True, help="Verify every byte in the target's pages.")
@click.option("--verify/--no-verify", default=True, show_default=True, help="Compare all bytes after the runs.")
@click.option("--engines/--no-engines", default=True, show_default=True, help="NIXL and Mooncake on the same bytes.")
@click.option("--memory", type=click.Choice(["shared", "own"]), default="shared", show_default=True,
              help="Of the source's caches: mappable by peers, or an engine's own.")  # fmt: skip
@click.option("--sidecar", is_flag=True, help="In turn with agents in a daemon beside each process: what that costs.")
@click.option("--chunk", default="8MiB", show_default=True, metavar="SIZE", help="Upper bound of one message.")
@_choices(
    _count("--runs", 9, "Timed hand-offs."),
    _count("--warmup", 2, "Untimed ones."),
    _count("--threads", 0, "Copying threads of a process and of the ceiling; 0 lets them choose.", 0),
)
@click.option("--processes", type=click.Choice(["rank", "worker", "one"]), default="rank", show_default=True,
              help="One for each rank, for each worker, or this one.")  # fmt: skip
@click.option("--suite", type=click.Choice(["reference"]), help="Measure and judge all that hand-offs promise.")
@click.option("--only", multiple=True, metavar="GROUP", help="Only this group of the suite; may be repeated.")
@_count("--shrink", 1, "Divide the suite's tokens, to try it out.")
@_choices(_listen, _peer, _insecure, _max_time, _json, _csv, _save_as)
def handoff(
    suite: str | None, listen: str, max_time: float, as_json: bool, as_csv: bool, save: str, **asked: Any
) -> int:
    """Time whole hand-offs of a model's caches, beside the same bytes copied by hand and by others.

    With --suite, which takes no other options but --only, --shrink, --runs, --max-time, --json, --csv and --save, exit
    code 1 when a line does not hold.
    """
    from pdxfer.bench import peer as peers
    from pdxfer.bench.handoff import bench_handoff, serve_source
    from pdxfer.bench.suite import GROUPS, bench_suite

    clock = peers.Clock(max_time)
    only, shrink = tuple(asked.pop("only")), asked.pop("shrink")
    _check_suite(suite, asked)
    if listen:
        peers.listen(listen, serve_source, clock, lambda text: click.echo(text, err=True))
        return 0
    if suite:
        groups, runs = only or tuple(GROUPS), max(7, asked["runs"]) if shrink == 1 else asked["runs"]
        found = _report("handoff", lambda tick: bench_suite(groups, runs, shrink, tick, clock), None, as_json,
                        show.handoff, as_csv=as_csv, save=save)  # fmt: skip
        return 1 if any(line["holds"] is False for line in found["lines"]) else 0
    options = _handoff_options(**asked)
    _report("handoff", lambda tick: bench_handoff(options, tick, clock), options.runs + 7, as_json, show.handoff,
            as_csv=as_csv, save=save)  # fmt: skip
    return 0


def _check_suite(suite: str | None, asked: Mapping[str, Any]) -> None:
    """Refuse options of the suite without it, and with it those of a single case."""
    context = click.get_current_context()
    said = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    wrong = said & {*asked} - {"runs"} if suite else said & {"only", "shrink"}
    if wrong:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(wrong))
        raise click.UsageError(f"{names}: {'not with --suite' if suite else 'only with --suite reference'}")


def _handoff_options(
    model: str, layers: int, transport: str, mode: str, digest: bool, chunk: str, memory: str, runs: int, warmup: int,
    threads: int, processes: Any, engines: bool, verify: bool, peer: str, insecure: bool, sidecar: bool, **case: Any,
) -> Any:  # fmt: skip
    from pdxfer.bench.case import Case, load_spec
    from pdxfer.bench.handoff import Options
    from pdxfer.bench.ranks import Way
    from pdxfer.sizing import parse_bytes

    spec = load_spec(model, page_tokens=case["page_tokens"], layers=layers)
    way = Way(transport=transport, mode=mode, digests=digest, chunk_bytes=parse_bytes(chunk), threads=threads,
              memory=memory, insecure=insecure)  # fmt: skip
    ways = (way, replace(way, sidecar=True)) if sidecar else (way,)
    facts = {"model": model, "layers": spec.num_layers}
    return Options(
        case=Case(spec=spec, **case), facts=facts, ways=ways, runs=runs, warmup=warmup, threads=threads,
        processes=processes, engines=engines, verify=verify, peer=peer,
    )  # fmt: skip


@bench.command(short_help="Show what changed from A to B, row by row.")
@click.argument("first", metavar="A.json")
@click.argument("second", metavar="B.json")
@click.option("--fail-if", multiple=True, metavar="CONDITION", help="E.g. 'p99>+5%' or 'gb_per_s<-10%'; repeatable.")
@_json
def compare(first: str, second: str, fail_if: tuple[str, ...], as_json: bool) -> int:
    """Show what changed from A to B, row by row; exit code 1 when a condition is met."""
    from pdxfer.bench.compare import Condition, compare

    found = compare(first, second, [Condition.parse(text) for text in fail_if])
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show.changes(show.console(), found)
    return 1 if found["failures"] else 0


@bench.command(short_help="Draw reports: an HTML file with plots and rows, and PNGs.")
@click.argument("reports", nargs=-1, required=True, metavar="A.json [B.json ...]")
@click.option("-o", "--output", default="report.html", show_default=True, help=".html (and .png beside it), or .png.")
def report(reports: tuple[str, ...], output: str) -> None:
    """Draw reports: one HTML file with plots and all rows, and the plots as PNG."""
    from pdxfer.bench.report import write_report

    for written in write_report(reports, output):
        click.echo(written)


@bench.command(short_help="Compare this connector with vLLM's own on two real servers.")
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
        results = _report("vllm", lambda tick: bench_vllm(options, tick), steps, as_json, show.vllm)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 1 if any(found["error"] for found in results["connectors"]) else 0


def _report(
    name: str,
    measure: Callable[[Tick], dict[str, Any]],
    steps: int | None,
    as_json: bool,
    shown: Callable[[Console, dict[str, Any]], None],
    *,
    as_csv: bool = False,
    save: str = "",
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
    if save:
        _save(save, json.dumps(report, indent=2) + "\n")
    if as_json:
        click.echo(json.dumps(report, indent=2))
    elif as_csv:
        _print_csv(name, results["rows"])
    else:
        console = show.console()
        console.print(results["what"], style="bold", markup=False)
        shown(console, results)
        show.machine(console, facts)
    return results


def _save(path: str, text: str) -> None:
    from pdxfer.errors import MisuseError

    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise MisuseError(f"can't write {path}: {error.strerror}") from error


def _print_csv(name: str, rows: list[dict[str, Any]]) -> None:
    import csv

    from pdxfer.bench.measure import SCHEMA_VERSION

    columns = dict.fromkeys(column for row in rows for column in row)
    writer = csv.DictWriter(sys.stdout, ["schema_version", "bench", *columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"schema_version": SCHEMA_VERSION, "bench": name, **row} for row in rows)


@contextmanager
def _progress(steps: int | None) -> Iterator[Tick]:
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
