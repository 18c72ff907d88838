"""``pdxfer doctor``: everything that can be looked at before it goes wrong, as a tree with a fix per fault.

In comes the config that an agent is to have, from the agent's own sources; out come findings. Exit code 3 when one of
them is a failure.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from pdxfer.cli.config import load, with_sources
from pdxfer.cli.operate import ask, with_admin
from pdxfer.errors import MisuseError, PdxferError, PeerError

if TYPE_CHECKING:
    from pdxfer.cli.doctor_checks import Finding

__all__ = ["doctor"]

_MARKS = {"ok": ("ok", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red"), "skip": ("-", "white")}


@click.command()
@click.option("--peer", metavar="ADDR", default="", help="A peer's control address, to look at the way to it, too.")
@click.option("-q", "--quiet", is_flag=True, help="Only warnings and failures.")
@with_sources
@with_admin
def doctor(admin: str, as_json: bool, peer: str, quiet: bool, **sources: Any) -> int:
    """Look at versions, data planes, limits, sockets, keys, network, devices and, with --peer, the way to a peer.

    What the agent is to have comes from where pdxfer agent has it: flags, PDXFER_* variables, --config, defaults. The
    peer is asked by the running agent where there is one (its layouts are then compared, too), else from here. Exit
    code 3 when something fails.
    """
    from pdxfer.cli.doctor_checks import Machine, examine

    answer = _ask_peer(admin, peer) if peer else None
    try:
        machine = Machine.of(load(**sources), running=_is_running(admin), answer=answer)
    except MisuseError as error:
        machine = Machine(refused=error, answer=answer)
    found = examine(machine)
    failed = any(f.status == "fail" for of in found.values() for f in of.values())
    if as_json:
        checks = {group: {name: f._asdict() for name, f in of.items()} for group, of in found.items()}
        click.echo(json.dumps({"schema_version": 1, "ok": not failed, "checks": checks}, indent=2))
    else:
        _show(found, quiet)
    return 3 if failed else 0


def _is_running(admin: str) -> bool:
    """Whether an agent is here already, which holds its own addresses."""
    try:
        ask(admin, "/statusz")
    except PdxferError:
        return False
    return True


def _ask_peer(admin: str, peer: str) -> dict[str, Any] | PdxferError:
    from urllib.parse import quote

    try:
        return ask(admin, f"/ping?peer={quote(peer, safe='')}", method="POST", timeout_s=90.0)
    except PeerError as error:
        if not error.message.startswith("no agent answers"):
            return error
    except PdxferError as error:
        return error
    from pdxfer.observe.probe import passing_agent, ping

    try:
        if "://" not in peer:
            raise MisuseError(f"no agent runs here, and {peer!r} is no control address")
        with passing_agent() as agent:
            return ping(agent, peer, compare=False)
    except PdxferError as error:
        return error


def _show(found: dict[str, dict[str, Finding]], quiet: bool) -> None:
    for group, of in found.items():
        shown = {name: f for name, f in of.items() if not quiet or f.status in ("warn", "fail")}
        if shown:
            click.secho(group, bold=True)
        for name, finding in shown.items():
            word, colour = _MARKS[finding.status]
            click.echo(f"  {click.style(f'{word:<4}', fg=colour)} {name:<13} {finding.what}")
            if finding.fix:
                click.echo(f"       {'':<13} fix: {finding.fix}")
