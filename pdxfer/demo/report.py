"""Prints a demo run for people. In comes an ``Outcome``, out go tables; this file judges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdxfer.demo.outcome import LOGIT_LIMIT, STAGES, Kind, Outcome

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_outcome", "print_summary"]


def print_outcome(console: Console, outcome: Outcome) -> None:
    """Print one run: what moved, what it took, and whether anything is off."""
    o = outcome
    console.print(f"{o.model}, {o.prompt_tokens:,} tokens over {o.transport} ({o.mode}):", style="bold")
    console.print(
        f"TP {o.prefill_tp}, pages of {o.prefill_page_tokens} tokens, K/V NHD, conv (channels, taps), S (K, V)"
    )
    console.print(f"to TP {o.decode_tp}, pages of {o.decode_page_tokens}, K/V HND, conv (taps, channels), S (V, K)")
    _print_kinds(console, o)
    _print_times(console, o)
    _print_verdict(console, o)


def _print_kinds(console: Console, o: Outcome) -> None:
    table = _table("component", "unique B", "held B", "moved B", "fanned out B", "dedup", "messages")
    for kind in o.kinds:
        table.add_row(*_kind_cells(kind), str(kind.messages))
    table.add_section()
    total = Kind(
        name="all",
        unique_bytes=sum(k.unique_bytes for k in o.kinds),
        held_bytes=sum(k.held_bytes for k in o.kinds),
        moved_bytes=o.moved_bytes,
        relayed_bytes=sum(k.relayed_bytes for k in o.kinds),
    )
    table.add_row(*_kind_cells(total), str(o.messages))
    console.print(table)
    console.print("held: by all target ranks; dedup: held / moved; a message may carry several", style="dim")


def _kind_cells(k: Kind) -> tuple[str, ...]:
    amounts = (k.unique_bytes, k.held_bytes, k.moved_bytes, k.relayed_bytes)
    return k.name, *(f"{amount:,}" for amount in amounts), f"{k.dedup:.2f}"


def _print_times(console: Console, o: Outcome) -> None:
    table = _table("time (slowest rank)", "first contact", *["again"] * (len(o.rounds) - 1))
    for name in STAGES:
        table.add_row(name, *(_ms(r.stages[name]) if r.stages[name] else "-" for r in o.rounds))
    table.add_section()
    table.add_row("whole fetch", *(_ms(r.transfer_s) for r in o.rounds))
    table.add_row("bytes moved / whole fetch", *(_rate(o.moved_bytes / r.transfer_s) for r in o.rounds))
    table.add_row("this machine's memcpy", *[_rate(o.copy_bytes_per_s)] * len(o.rounds))
    console.print(table)
    console.print(
        "each stage of its own slowest rank, with its pairs added up, though they run side by side; digests are part of"
        " pack, move and unpack (verify: of what is converted on the way); -: not needed",
        style="dim",
    )
    console.print(
        f"Prefill of the prompt took {_ms(o.prefill_s)}, the whole run {o.total_s:.1f} s. A request of a tiny model is"
        " all latency; see pdxfer bench for large ones.",
        style="dim",
    )


def _print_verdict(console: Console, o: Outcome) -> None:
    state = f"state   {o.wrong_bytes:,} of {o.compared_bytes:,} B in {len(o.rounds)} hand-offs differ from the source's"
    console.print(_mark(o.state_ok) + state + (f" ({', '.join(o.wrong_where)})" if o.wrong_where else ""))
    logits = f"logits  at most {o.logit_error:.1e} off a single-process run's (limit {LOGIT_LIMIT:.0e})"
    console.print(_mark(o.logits_ok) + logits)
    equal = sum(a == b for a, b in zip(o.tokens, o.reference_tokens, strict=True))
    tokens = f"tokens  {equal} of {len(o.tokens)} equal a single-process run's: {' '.join(map(str, o.tokens))}"
    console.print(_mark(o.tokens_ok) + tokens)


def print_summary(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print one row per run."""
    columns = ("model", "TP", "state", "logits", "tokens", "moved B", "dedup", "first", "again")
    table = _table(*columns)
    for o in outcomes:
        held = sum(k.held_bytes for k in o.kinds)
        table.add_row(
            o.model,
            f"{o.prefill_tp} to {o.decode_tp}",
            "equal" if o.state_ok else "differs",
            f"{o.logit_error:.1e}",
            "equal" if o.tokens_ok else "differ",
            f"{o.moved_bytes:,}",
            f"{held / o.moved_bytes:.2f}",
            *(f"{r.transfer_s * 1e3:,.1f}" for r in o.rounds),
            style=None if o.ok else "red",
        )
    console.print(table)
    console.print("first, again: ms of a whole fetch by agents that had never met, and that had", style="dim")
    console.print("TP 3 needs a variant of the model with more heads, hence more bytes", style="dim")
    good = sum(o.ok for o in outcomes)
    console.print(f"{_mark(good == len(outcomes))}{good} of {len(outcomes)} runs without a byte, logit or token off")


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _mark(good: bool) -> str:
    return "[green]ok[/]    " if good else "[bold red]WRONG[/] "


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:,.2f} MB/s"
