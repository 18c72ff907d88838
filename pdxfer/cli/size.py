"""``pdxfer size``: what a model's caches cost, as tables for people or as one JSON object.

In come a model and assumptions; out goes what ``pdxfer.sizing`` computes. No arithmetic on caches in here.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from pdxfer.cli import show
from pdxfer.errors import MisuseError

if TYPE_CHECKING:
    from rich.console import Console

    from pdxfer.sizing import Assumptions, MemoryLedger, SizeReport
    from pdxfer.spec import CacheSpec

__all__ = ["size"]


@click.command()
@click.argument("model", metavar="MODEL|config.json")
@click.option("--tp", type=click.IntRange(1), default=1, show_default=True, help="Tensor-parallel size.")
@click.option("--tokens", type=click.IntRange(1), default=32768, show_default=True, help="Tokens of one request.")
@click.option("--concurrency", type=click.IntRange(1, 1 << 32), default=1, show_default=True, help="Requests at once.")
@click.option("--dtype", default="", help="Stored dtype of what grows with tokens.  [default: the model's]")
@click.option("--state-dtype", default="", help="Stored dtype of S.  [default: the config's, else float32]")
@click.option("--conv-dtype", default="", help="Stored dtype of convolution state.  [default: the model's]")
@click.option("--spec-tokens", type=click.IntRange(0), default=0, show_default=True, help="Draft tokens per step.")
@click.option("--gpu-memory", metavar="SIZE", help="Memory of one GPU, e.g. 80GiB: adds its ledger.")
@click.option("--weights", default="0", metavar="SIZE", show_default=True, help="Weights on one GPU.")
@click.option("--overhead", default="0", metavar="SIZE", show_default=True, help="Activations, graphs and the like.")
@click.option("--max-num-seqs", type=click.IntRange(1), help="Reserved requests.  [default: --concurrency]")
@click.option("--page-alignment", type=click.IntRange(1), help="Step of the unified page.  [default: 16; MLA 128]")
@click.option("--link-gbps", type=click.FloatRange(0), default=0.0, help="Link speed in Gbit/s: adds transfer times.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def size(
    model: str,
    tp: int,
    tokens: int,
    concurrency: int,
    dtype: str,
    state_dtype: str,
    conv_dtype: str,
    spec_tokens: int,
    gpu_memory: str | None,
    weights: str,
    overhead: str,
    max_num_seqs: int | None,
    page_alignment: int | None,
    link_gbps: float,
    as_json: bool,
) -> None:
    """Show what a model's caches cost per token, per request and per rank.

    MODEL is a preset's name, a config.json, or a directory that holds one.
    """
    from pdxfer.models import load_config, spec_from_config
    from pdxfer.sizing import Assumptions, size_report

    spec = spec_from_config(load_config(model))
    assumptions = Assumptions(
        tp=tp, kv_dtype=dtype, state_dtype=state_dtype, conv_dtype=conv_dtype, spec_tokens=spec_tokens
    )
    sizes = (gpu_memory, weights, overhead)
    memory = _ledger(spec, assumptions, sizes, max_num_seqs or concurrency, tokens)
    report = size_report(
        spec,
        assumptions,
        tokens=tokens,
        concurrency=concurrency,
        alignment_tokens=page_alignment or 0,
        memory=memory,
        link_bytes_per_s=link_gbps * 1e9 / 8,
    )
    if as_json:
        click.echo(json.dumps({"model": model, **report.to_json()}, indent=2))
    else:
        _print(model, report)


def _ledger(
    spec: CacheSpec, assumptions: Assumptions, sizes: tuple[str | None, str, str], max_num_seqs: int, tokens: int
) -> MemoryLedger | None:
    from pdxfer.sizing import memory_ledger, parse_bytes

    gpu, weights, overhead = (0 if text is None else parse_bytes(text) for text in sizes)
    if not gpu and (sizes[0] is not None or weights or overhead):
        raise MisuseError("--gpu-memory must be more than 0, and --weights and --overhead need it", hint="e.g. 80GiB")
    if not gpu:
        return None
    return memory_ledger(
        spec,
        assumptions,
        gpu_bytes=gpu,
        weights_bytes=weights,
        overhead_bytes=overhead,
        max_num_seqs=max_num_seqs,
        tokens_per_request=tokens,
    )


def _print(model: str, report: SizeReport) -> None:
    console = show.console()
    ranks = f"{report.assumptions.tp} rank{'s' if report.assumptions.tp > 1 else ''}"
    console.print(f"{model} ({report.model_type}), {report.tokens:,} tokens, {ranks}", style="bold", markup=False)
    _print_components(console, report)
    _print_crossovers(console, report)
    _print_pages(console, report)
    _print_memory(console, report)
    if report.transfer:
        one, many = (f"{s * 1e3:,.3f} ms" for s in (report.transfer.request_s, report.transfer.concurrent_s))
        speed = f"{report.transfer.link_bytes_per_s / 1e9:,.3g} GB/s"
        console.print(
            f"Transfer at {speed}, unique bytes only: one request {one}, {report.concurrency} together {many}"
        )


def _print_components(console: Console, report: SizeReport) -> None:
    table = show.table(
        "component", "layers", "dtype", "per token", "per request", "rank: per token", "rank: per request"
    )
    fields = ("bytes_per_token", "bytes_per_request", "rank_bytes_per_token", "rank_bytes_per_request")
    for c in report.components:
        table.add_row(c.name, str(c.layers), c.dtype, *(show.binary(getattr(c, f)) for f in fields))
    table.add_section()
    table.add_row("total", "", "", *(show.binary(report.total(f)) for f in fields))
    if report.concurrency > 1:
        many = (show.binary(report.total(f) * report.concurrency) if "request" in f else "" for f in fields)
        table.add_row(f"{report.concurrency} requests", "", "", *many)
    console.print(table)
    if report.assumptions.spec_tokens:
        kept = show.binary(report.total("rank_resident_bytes_per_request"))
        console.print(f"With {report.assumptions.spec_tokens} draft tokens a rank keeps {kept} per request")


def _print_crossovers(console: Console, report: SizeReport) -> None:
    for found in report.crossovers:
        state = f"S in {found.state_dtype}" if found.state_dtype else "no S"
        pair, whole = f"{found.layer_tokens:,}", f"{found.model_tokens:,}"
        console.print(
            f"Linear attention is the smaller cache from {pair} tokens on (layer against layer), "
            f"{whole} (whole model): {state}, one rank of TP {report.assumptions.tp}"
        )


def _print_pages(console: Console, report: SizeReport) -> None:
    pages = report.pages
    if pages is None:
        return
    console.print(
        f"Unified page: {pages.page_tokens:,} tokens, {show.binary(pages.page_bytes)} "
        f"(attention {show.binary(pages.attention_page_bytes)}, wasted {show.binary(pages.attention_padding_bytes)}; "
        f"state {show.binary(pages.state_page_bytes)}, wasted {show.binary(pages.state_padding_bytes)})"
    )


def _print_memory(console: Console, report: SizeReport) -> None:
    memory = report.memory
    if memory is None:
        return
    table = show.table("memory of one GPU", "bytes")
    table.add_row("weights", show.binary(memory.weights_bytes))
    table.add_row("overhead", show.binary(memory.overhead_bytes))
    reserved = f"{memory.max_num_seqs:,} request{'s' if memory.max_num_seqs > 1 else ''}"
    table.add_row(f"recurrent state, {reserved}", show.binary(memory.state_bytes))
    if memory.window_bytes:
        table.add_row(f"windows, {reserved}", show.binary(memory.window_bytes))
    table.add_row("left for caches that grow", show.binary(memory.free_bytes))
    table.add_section()
    table.add_row("total", show.binary(memory.gpu_bytes))
    console.print(table)
    if memory.free_bytes < 0:
        fit = f"with as many reserved as fit: {memory.requests_max:,} requests"
        console.print(f"That does not fit: {show.binary(-memory.free_bytes)} are missing ({fit})")
        return
    tokens = "any number of" if memory.tokens is None else f"{memory.tokens:,}"
    console.print(
        f"That holds {tokens} tokens, or {memory.requests:,} of the {memory.max_num_seqs:,} reserved requests at "
        f"{memory.tokens_per_request:,} tokens each (with as many reserved as fit: {memory.requests_max:,})"
    )
