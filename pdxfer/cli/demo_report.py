"""Prints a demo run for people. In comes an ``Outcome`` or ``VllmOutcome``, out go tables; this file judges nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdxfer.cli import show
from pdxfer.demo.outcome import LOGIT_LIMIT, STAGES, Kind, Outcome

if TYPE_CHECKING:
    from rich.console import Console

    from pdxfer.demo.vllm_run import VllmOutcome

__all__ = ["print_outcome", "print_summary", "print_vllm_outcome"]


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
    table = show.table("component", "unique B", "held B", "moved B", "fanned out B", "dedup", "messages")
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
    table = show.table("time (slowest rank)", "first contact", *["again"] * (len(o.rounds) - 1))
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
    table = show.table(*columns)
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


def print_vllm_outcome(console: Console, outcome: VllmOutcome) -> None:
    """Print a run of two vLLM servers: one row per request, and whether anything is off."""
    o, hand_offs = outcome.options, outcome.hand_offs
    console.print(f"{o.model}, two vLLM servers and pdxfer proxy:", style="bold")
    for role in ("prefill", "decode"):
        layout = "".join(f", conv {v}" for k, v in o.conv_layouts.items() if k == role)
        tp, block_size = getattr(o, f"{role}_tp"), getattr(o, f"{role}_block_size")
        console.print(f"{role:<8} TP {tp}, --block-size {block_size}{layout}")
    last = f"{o.steps} tokens"
    table = show.table("prompt", "prefill", "first token", last, "alone", "moved B", "messages", "transfer", "equal")
    for h in hand_offs:
        times = (h.prefill_s, h.first_s, h.whole_s, h.alone_s)
        counts = (f"{h.nbytes:,}", str(h.messages), _short_ms(h.transfer_s), f"{h.equal} of {len(h.tokens)}")
        table.add_row(f"{h.prompt_tokens:,}", *map(_short_ms, times), *counts, style=None if h.tokens_ok else "red")
    table.add_section()
    moved, messages = sum(h.nbytes for h in hand_offs), sum(h.messages for h in hand_offs)
    took_s, equal = sum(h.transfer_s for h in hand_offs), sum(h.equal for h in hand_offs)
    tokens = sum(len(h.tokens) for h in hand_offs)
    table.add_row("all", "", "", "", "", f"{moved:,}", str(messages), _short_ms(took_s), f"{equal} of {tokens}")
    console.print(table)
    console.print(
        f"prompt in tokens, times in ms. first token, {last}: through the proxy, counted from prefill's answer; alone:"
        f" {last} by the decode server from the prompt, without a hand-off; transfer: one rank's load, mean of"
        f" {o.decode_tp}; bytes, messages and transfers as vLLM's metrics count them",
        style="dim",
    )
    console.print(f"The whole run took {outcome.total_s:.0f} s, nearly all of it to start the servers.", style="dim")
    _print_vllm_verdict(console, outcome)


def _print_vllm_verdict(console: Console, outcome: VllmOutcome) -> None:
    o, hand_offs = outcome.options, outcome.hand_offs
    loads, offers = len(hand_offs) * o.decode_tp, len(hand_offs) * o.prefill_tp
    moved = f"moved   {outcome.received} of {loads} loads verified by decode's ranks"
    console.print(f"{_mark(outcome.moved_ok)}{moved}, {outcome.offers} of {offers} offers of prefill's ranks completed")
    good, ties = sum(h.tokens_ok for h in hand_offs), sum(h.tokens_ok and h.equal < len(h.tokens) for h in hand_offs)
    tokens = f"tokens  {good} of {len(hand_offs)} requests continue as the decode server alone does"
    console.print(_mark(outcome.tokens_ok) + tokens + (f", {ties} of them up to a near tie" if ties else ""))
    error = max(h.logprob_error for h in hand_offs)
    console.print(f"      their log probabilities are at most {error:.3f} off: bfloat16 at two TP sizes", style="dim")


def _mark(good: bool) -> str:
    return "[green]ok[/]    " if good else "[bold red]WRONG[/] "


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _short_ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:,.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:,.2f} MB/s"
