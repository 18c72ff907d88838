"""``pdxfer config``: check, show, describe and begin a daemon's config file; see ``pdxfer.config`` for its sources."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from pdxfer.errors import MisuseError

if TYPE_CHECKING:
    from pdxfer.config import Loaded

__all__ = ["config", "load", "with_sources"]


def with_sources(command: Any) -> Any:
    """Give a command ``--config``, ``--socket``, ``--worker``, ``--log-level`` and ``--set``, for ``load``."""
    for option in (
        click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any key: agent.lease_s=30s."),
        click.option("--log-level", metavar="LEVEL", help="debug, info, warning or error."),
        click.option("--worker", help="Name of the worker among peers; else its engine says."),
        click.option("--socket", metavar="PATH", help="Unix socket for engines."),
        click.option(
            "--config", "path", metavar="FILE", envvar="PDXFER_CONFIG", help="TOML or YAML.  [env: PDXFER_CONFIG]"
        ),
    ):
        command = option(command)
    return command


def load(path: str | None, settings: tuple[str, ...], **flags: Any) -> Loaded:
    """What the options of ``with_sources`` and the other sources say; raises MisuseError."""
    from pdxfer.config import load_config

    said: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise MisuseError(f"--set takes KEY=VALUE, not {setting!r}")
        said[key] = value
    return load_config(path or "", {**said, **{name: value for name, value in flags.items() if value is not None}})


@click.group()
def config() -> None:
    """Check, show, describe or begin the config of pdxfer agent."""


@config.command()
@with_sources
def check(**sources: Any) -> None:
    """Read every source; exit code 2 and the reason when one is wrong."""
    load(**sources)
    click.echo("the config is good")


@config.command()
@with_sources
@click.option("--origin", is_flag=True, help="Say where each value comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(origin: bool, as_json: bool, **sources: Any) -> None:
    """Print every key with the value that counts."""
    rows = list(load(**sources).rows())
    if as_json:
        click.echo(json.dumps({k: {"value": v, "origin": o} if origin else v for k, v, o in rows}, indent=2))
        return
    for key, value, where in rows:
        text = f"{key} = {json.dumps(value)}"
        click.echo(f"{text:<60}# {where}" if origin else text)


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file."""
    from pdxfer.config import schema as made

    click.echo(json.dumps(made(), indent=2))


@config.command()
def init() -> None:
    """Print a TOML file with every key at its default."""
    from pdxfer.config import template

    click.echo(template(), nl=False)
