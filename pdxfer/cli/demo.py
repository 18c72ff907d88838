"""``pdxfer demo``: one request between two real workers, compared byte by byte, as tables or as JSON.

In come options; out goes what ``pdxfer.demo.run`` found. Exit code 0 when nothing is off, 4 when a byte of state is,
1 when only a logit or a token is, and the error's own when a process fails.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import click

from pdxfer.errors import CorruptError, MisuseError

if TYPE_CHECKING:
    from pdxfer.demo.outcome import Outcome
    from pdxfer.demo.run import Options

__all__ = ["demo"]

_DEFAULT = click.core.ParameterSource.DEFAULT
_MODELS = ("falcon-h1", "kimi-linear", "nemotron-h", "qwen3-next")


@click.command()
@click.option("--model", type=click.Choice(_MODELS), default="qwen3-next", show_default=True, help="Architecture.")
@click.option("--prefill-tp", type=click.IntRange(1), default=4, show_default=True, help="Ranks that prefill.")
@click.option("--decode-tp", type=click.IntRange(1), default=2, show_default=True, help="Ranks that decode.")
@click.option("--prompt-tokens", type=click.IntRange(1, 16384), default=1000, show_default=True, help="Prompt length.")
@click.option("--transport", type=click.Choice(("shm", "tcp")), default="shm", show_default=True, help="Data path.")
@click.option(
    "--prefill-page-tokens", type=click.IntRange(1, 65536), default=16, show_default=True, help="Tokens per page."
)
@click.option(
    "--decode-page-tokens", type=click.IntRange(1, 65536), default=10, show_default=True, help="Tokens per page."
)
@click.option("--all", "every", is_flag=True, help="Every model; TP 4 to 2, 2 to 4, 3 to 2 and 1 to 4.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def demo(
    ctx: click.Context,
    model: str,
    prefill_tp: int,
    decode_tp: int,
    prompt_tokens: int,
    transport: str,
    prefill_page_tokens: int,
    decode_page_tokens: int,
    every: bool,
    as_json: bool,
) -> int:
    """Move one request between two real hybrid-model workers and compare every byte.

    Each rank is a process of its own with its slice of a tiny model, its own paged caches and its own agent. The two
    workers differ in TP size, page size and axis order.
    """
    from pdxfer.demo.run import ALL_PAIRS, Options

    chosen = [n for n in ("model", "prefill_tp", "decode_tp") if ctx.get_parameter_source(n) is not _DEFAULT]
    if every and chosen:
        raise MisuseError(f"--all runs every model and TP size, so --{chosen[0].replace('_', '-')} can't be chosen")
    cases = [(name, *pair) for name in _MODELS for pair in ALL_PAIRS] if every else [(model, prefill_tp, decode_tp)]
    runs = [
        Options(
            model=name,
            prefill_tp=prefill,
            decode_tp=decode,
            prompt_tokens=prompt_tokens,
            transport=transport,
            prefill_page_tokens=prefill_page_tokens,
            decode_page_tokens=decode_page_tokens,
        )
        for name, prefill, decode in cases
    ]
    outcomes = _run(runs)
    if as_json:
        results = [outcome.to_json() for outcome in outcomes]
        click.echo(json.dumps({"ok": all(o.ok for o in outcomes), "runs": results} if every else results[0], indent=2))
    else:
        _print(outcomes, every)
    return _exit_code(outcomes)


def _run(runs: list[Options]) -> list[Outcome]:
    from pdxfer.demo.run import run_demo

    outcomes = []
    with _progress() as say:
        for number, options in enumerate(runs, 1):
            before = f"[{number}/{len(runs)}] {options.model} TP {options.prefill_tp} to {options.decode_tp}: "
            outcomes.append(run_demo(options, partial(_say_after, say, before if len(runs) > 1 else "")))
    return outcomes


def _say_after(say: Callable[[str], None], before: str, text: str) -> None:
    say(before + text)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """What is being done now, on stderr: one changing line on a terminal, lines elsewhere."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: click.echo(text, err=True)
        return
    with console.status("") as status:
        yield lambda text: status.update(text.replace("[", r"\["))


def _print(outcomes: list[Outcome], every: bool) -> None:
    from rich.console import Console

    from pdxfer.demo.report import print_outcome, print_summary

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    if every:
        print_summary(console, outcomes)
    else:
        print_outcome(console, outcomes[0])


def _exit_code(outcomes: list[Outcome]) -> int:
    if all(outcome.ok for outcome in outcomes):
        return 0
    return 1 if all(outcome.state_ok for outcome in outcomes) else CorruptError.exit_code
