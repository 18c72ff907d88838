"""``pdxfer demo``: requests between two real workers, compared and shown as tables or as JSON.

In come options; out goes what ``pdxfer.demo.run`` or, with ``--engine vllm``, ``pdxfer.demo.vllm_run`` found. Exit code
0 when nothing is off, 4 when a byte of state is, 1 when only a logit or a token is (or, with vLLM, a request was not
handed over), and the error's own when a process fails.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pdxfer.cli import show
from pdxfer.errors import CorruptError, MisuseError

if TYPE_CHECKING:
    from pdxfer.demo.outcome import Outcome
    from pdxfer.demo.run import Options

__all__ = ["demo"]

_DEFAULT = click.core.ParameterSource.DEFAULT
_MODELS = ("falcon-h1", "kimi-linear", "nemotron-h", "qwen3-next")
_VLLM_MODELS = ("deepseek-v3", "llama", "qwen3-next")

# option -> the engine that alone has it
_TRANSPORTS = ("auto", "shm", "tcp", "nixl", "ucx", "gloo", "nccl")
_ONLY = {
    "every": "transformers",
    "prompt_tokens": "transformers",
    "transport": "transformers",
    "python": "vllm",
}


@click.command()
@click.option(
    "--engine",
    type=click.Choice(("transformers", "vllm")),
    default="transformers",
    show_default=True,
    help="What computes: this package's reference engine, or two vLLM servers and a proxy.",
)
@click.option(
    "--model",
    type=click.Choice(sorted({*_MODELS, *_VLLM_MODELS})),
    default="qwen3-next",
    show_default=True,
    help=f"Architecture. vLLM: {', '.join(_VLLM_MODELS)}; else {', '.join(_MODELS)}.",
)
@click.option("--prefill-tp", type=click.IntRange(1), show_default="4; vLLM 1", help="Ranks that prefill.")
@click.option("--decode-tp", type=click.IntRange(1), show_default="2", help="Ranks that decode.")
@click.option(
    "--prompt-tokens", type=click.IntRange(1, 16384), show_default="1000", help="Prompt length; not for vLLM."
)
@click.option("--transport", type=click.Choice(_TRANSPORTS), show_default="shm", help="Data path; not for vLLM.")
@click.option(
    "--prefill-page-tokens",
    type=click.IntRange(1, 65536),
    show_default="16; vLLM by model",
    help="Tokens per page; vLLM's --block-size.",
)
@click.option(
    "--decode-page-tokens",
    type=click.IntRange(1, 65536),
    show_default="10; vLLM by model",
    help="Tokens per page; vLLM's --block-size.",
)
@click.option("--python", metavar="INTERPRETER", show_default="this one", help="A Python with vLLM and pdxfer.")
@click.option("--all", "every", is_flag=True, help="Every model; TP 4 to 2, 2 to 4, 3 to 2 and 1 to 4. Not for vLLM.")
@click.option("--sidecar", is_flag=True, help="Agents in a daemon per worker, not in the ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def demo(ctx: click.Context, /, engine: str, every: bool, as_json: bool, **chosen: Any) -> int:
    """Move one request between two real hybrid-model workers and compare every byte.

    Each rank is a process of its own with its slice of a tiny model, its own paged caches and its own agent. The two
    workers differ in TP size, page size and axis order.

    With --engine vllm the workers are two vLLM servers behind pdxfer proxy, and the tokens of four requests are
    compared with the decode server's own. It needs no GPU.
    """
    given = [name for name in ctx.params if ctx.get_parameter_source(name) is not _DEFAULT]
    for name in given:
        if _ONLY.get(name, engine) != engine:
            raise MisuseError(f"{_flag(name)} is for --engine {_ONLY[name]}", hint=f"leave it out with {engine}")
    values = {name: value for name, value in chosen.items() if value is not None and (name != "sidecar" or value)}
    if engine == "vllm":
        return _demo_vllm(values, as_json)
    return _demo_transformers(
        values, every, [name for name in given if name in ("model", "prefill_tp", "decode_tp")], as_json
    )


def _flag(name: str) -> str:
    return "--all" if name == "every" else f"--{name.replace('_', '-')}"


def _demo_transformers(values: dict[str, Any], every: bool, chosen: list[str], as_json: bool) -> int:
    from pdxfer.cli.demo_report import print_outcome, print_summary
    from pdxfer.demo.run import ALL_PAIRS, Options

    if every and chosen:
        raise MisuseError(f"--all runs every model and TP size, so {_flag(chosen[0])} can't be chosen")
    cases = [{"model": n, "prefill_tp": p, "decode_tp": d} for n in _MODELS for p, d in ALL_PAIRS] if every else [{}]
    outcomes = _run([Options(**{**values, **case}) for case in cases])
    if as_json:
        results = [outcome.to_json() for outcome in outcomes]
        click.echo(json.dumps({"ok": all(o.ok for o in outcomes), "runs": results} if every else results[0], indent=2))
    elif every:
        print_summary(show.console(120), outcomes)
    else:
        print_outcome(show.console(120), outcomes[0])
    return _exit_code(outcomes)


def _exit_code(outcomes: list[Outcome]) -> int:
    if all(outcome.ok for outcome in outcomes):
        return 0
    return 1 if all(outcome.state_ok for outcome in outcomes) else CorruptError.exit_code


def _demo_vllm(values: dict[str, Any], as_json: bool) -> int:
    from pdxfer.cli.demo_report import print_vllm_outcome
    from pdxfer.demo.vllm_run import VllmOptions, run_vllm_demo

    names = {"prefill_page_tokens": "prefill_block_size", "decode_page_tokens": "decode_block_size"}
    options = VllmOptions(**{names.get(name, name): value for name, value in values.items()})
    with _signals_unwind(), _progress() as say:
        outcome = run_vllm_demo(options, say)
    if as_json:
        click.echo(json.dumps(outcome.to_json(), indent=2))
    else:
        print_vllm_outcome(show.console(120), outcome)
    return 0 if outcome.ok else 1


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """SIGTERM and SIGHUP end everything that was started, as ^C does: the servers are not our terminal's."""

    def stop(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(runs: list[Options]) -> list[Outcome]:
    from pdxfer.demo.run import run_demo

    outcomes = []
    with _progress() as say:
        for number, options in enumerate(runs, 1):
            which = f"[{number}/{len(runs)}] {options.model} TP {options.prefill_tp} to {options.decode_tp}: "
            before = which if len(runs) > 1 else ""
            outcomes.append(run_demo(options, lambda text, before=before: say(before + text)))  # type: ignore[misc]
    return outcomes


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
