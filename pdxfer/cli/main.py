"""The shell of ``pdxfer``: finds the command, runs it, and turns what it raises into a message and an exit code.

In come arguments, out goes an exit code. A command is a row of ``COMMANDS``; its module is imported only when it runs,
so ``pdxfer --help`` costs Python and click; imports inside functions here save a third of that. This file knows no
command's work.

====  ==================================================================
code  meaning
====  ==================================================================
0     done
1     failed; ``PdxferError.exit_code`` of the class has other numbers (4 corrupt, 5 peer or transport)
2     misuse: arguments, options, files
130   interrupted
====  ==================================================================
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import click

from pdxfer.errors import MisuseError, PdxferError

__all__ = ["COMMANDS", "CommandTable", "cli", "completion", "main", "version"]

# name -> (where the click command is, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "agent": ("pdxfer.cli.agent:agent", "Run the sidecar daemon that engines attach to."),
    "bench": ("pdxfer.bench.cli:bench", "Measure hand-offs, links and plans against this machine's own ceilings."),
    "completion": ("pdxfer.cli.main:completion", "Print the completion script of a shell."),
    "config": ("pdxfer.cli.config:config", "Check, show, describe or begin the daemon's config."),
    "demo": ("pdxfer.cli.demo:demo", "Move one request between two real hybrid-model workers and compare every byte."),
    "doctor": ("pdxfer.cli.doctor:doctor", "Look at everything that may go wrong, with a fix for each fault."),
    "drain": ("pdxfer.cli.operate:drain", "Have a running agent take nothing new, and wait for the rest."),
    "explain": ("pdxfer.cli.operate:explain", "Tell what became of a transfer, and what to do."),
    "peers": ("pdxfer.cli.operate:peers", "Show the workers that a running agent has met."),
    "ping": ("pdxfer.cli.operate:ping", "Measure the way to a peer: control, and every data plane."),
    "plan": ("pdxfer.cli.plan:plan", "Show who sends what to whom between two worker layouts."),
    "proxy": ("pdxfer.cli.proxy:proxy", "Route OpenAI requests through a prefill and a decode server."),
    "size": ("pdxfer.cli.size:size", "Show what a model's caches cost per token, per request and per rank."),
    "slots": ("pdxfer.cli.operate:slots", "Show where a running agent's pages and slots are."),
    "status": ("pdxfer.cli.operate:status", "Show whether a running agent is ready, and what it does."),
    "top": ("pdxfer.cli.top:top", "Watch a running agent in the terminal."),
    "transfers": ("pdxfer.cli.operate:transfers", "List the transfers that a running agent remembers."),
    "undrain": ("pdxfer.cli.operate:undrain", "Have a drained agent take new work and engines again."),
    "version": ("pdxfer.cli.main:version", "Show the version and which optional parts are installed."),
}

# module that an optional command may miss -> the extra that brings it
EXTRAS = {"aiohttp": "proxy", "matplotlib": "bench", "torch": "hf", "transformers": "hf", "yaml": "yaml"}


@dataclass(slots=True)
class Options:
    """What the group's options said; ``main`` reads it after a command has failed."""

    debug: bool = False


class CommandTable(click.Group):
    """A click group over ``COMMANDS``: lists without importing, imports on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all names, sorted."""
        return sorted({*COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return the command, or None for an unknown name (click then says so)."""
        if cmd_name not in COMMANDS:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command), f"{module}:{attribute} is no click command"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the table's own help texts."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(COMMANDS.items())])


@click.group(cls=CommandTable, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, envvar="PDXFER_DEBUG", help="Show tracebacks.  [env: PDXFER_DEBUG]")
@click.version_option(package_name="pdxfer", prog_name="pdxfer")
@click.pass_obj
def cli(options: Options, debug: bool) -> None:
    """Move the caches of one LLM request from a prefill worker to a decode worker, whole or not at all."""
    options.debug = debug


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def version(as_json: bool) -> None:
    """Show the version and which optional parts are installed."""
    import contextlib
    import json
    import platform
    from importlib import metadata, util

    parts = {
        "pdxfer": metadata.version("pdxfer"),
        "python": platform.python_version(),
        "copy kernel": "native" if util.find_spec("pdxfer._native") else "numpy",
    }
    for name in ("numpy", "grpcio", "pyzmq", "torch", "transformers"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            parts[name] = metadata.version(name)
    if as_json:
        click.echo(json.dumps({name.replace(" ", "_"): value for name, value in parts.items()}))
        return
    for name, value in parts.items():
        click.echo(f"{name:<13}{value}")


@click.command()
@click.argument("shell", type=click.Choice(("bash", "fish", "zsh")))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the script.")
def completion(shell: str, as_json: bool) -> None:
    """Print the completion script of SHELL; for bash: eval "$(pdxfer completion bash)"."""
    import json

    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(cli, {}, "pdxfer", "_PDXFER_COMPLETE").source()
    click.echo(json.dumps({"shell": shell, "script": script}) if as_json else script)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; ``argv`` defaults to the process's arguments.

    Only a bug of ours leaves this function as an exception.
    """
    options = Options()
    try:
        code = cli.main(argv, prog_name="pdxfer", standalone_mode=False, obj=options, color=_color())
        sys.stdout.flush()  # a reader that is gone shows here, not in the interpreter's last breath
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        return report(MisuseError(f"{error.name} is not installed", hint=f"pip install 'pdxfer[{extra}]'"), options)
    except PdxferError as error:
        return report(error, options)
    return code if isinstance(code, int) else 0


def report(error: PdxferError, options: Options) -> int:
    """Write one error for people to stderr and return its exit code. Called while the exception is handled."""
    if options.debug:
        import traceback

        traceback.print_exc()
    click.echo(f"{click.style('error:', fg='red', bold=True)} {error.message}", err=True, color=_color())
    if error.hint:
        click.echo(f"  hint: {error.hint}", err=True)
    return error.exit_code


def _color() -> bool | None:
    """No colour under NO_COLOR; otherwise click asks the terminal."""
    return False if os.environ.get("NO_COLOR") else None
