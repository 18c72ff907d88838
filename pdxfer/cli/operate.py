"""Commands that ask a running agent: status, peers, slots, transfers, explain, ping, drain, undrain.

In comes the admin address; out come tables, or the admin's own JSON. Only the standard library is imported, so that a
probe or a preStop hook costs little.

====  ==========================================
code  beside those of every command
====  ==========================================
1     nothing has this name; drain ran out of time
3     ``status``: not ready
5     nobody answers at the admin address
====  ==========================================
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import quote

import click

from pdxfer.errors import MisuseError, PdxferError, PeerError

__all__ = [
    "ask",
    "drain",
    "explain",
    "human_bytes",
    "peers",
    "ping",
    "printable",
    "slots",
    "status",
    "table",
    "transfers",
    "undrain",
    "with_admin",
]

#: As ``observe.DEFAULT_ADMIN``, which would bring gRPC with it.
_DEFAULT_ADMIN = "127.0.0.1:9464"
_ASK_S, _PING_S = 10.0, 90.0

_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_admin(function: _Function) -> _Function:
    """Give a command ``--admin`` and ``--json``."""
    text = "HOST:PORT or unix:///path of the agent's admin.  [env: PDXFER_ADMIN]"
    admin = click.option("--admin", envvar="PDXFER_ADMIN", default=_DEFAULT_ADMIN, show_default=True, help=text)
    as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
    return admin(as_json(function))


def ask(admin: str, path: str, *, method: str = "GET", timeout_s: float = _ASK_S) -> dict[str, Any]:
    """What the admin answers, as JSON; raises PeerError when nobody does, and what it says is wrong."""
    import http.client
    import socket

    host = admin.removeprefix("http://").rstrip("/")
    there = re.fullmatch(r"(?:\[[^\]/]+\]|[^:/\[\]]+):(\d{1,5})", host)
    if not host.startswith("unix:///") and not (there and int(there[1]) < 1 << 16):
        raise MisuseError(f"{admin!r} is no address of an admin", hint="say HOST:PORT or unix:///path")
    connection = http.client.HTTPConnection(host if there else "localhost", timeout=timeout_s)
    try:
        if host.startswith("unix://"):
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(timeout_s)
            connection.sock.connect(host.removeprefix("unix://"))
        connection.request(method, path)
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        hint = "is an agent running, and is this its admin? say --admin or PDXFER_ADMIN"
        raise PeerError(f"no agent answers at {admin}: {error}", hint=hint, reason="PEER_UNREACHABLE") from error
    finally:
        connection.close()
    found: Any = None
    with suppress(ValueError):
        found = json.loads(body)
    if not isinstance(found, dict):
        hint = "is this the port of admin? say --admin or PDXFER_ADMIN"
        raise PeerError(f"what answers at {admin} is no agent's admin", hint=hint, reason="PROTOCOL")
    if answer.status == 200:
        return found
    kind = PeerError if found.get("reason", "").startswith("PEER") else PdxferError
    raise kind(str(found.get("error")), hint=str(found.get("hint", "")), reason=str(found.get("reason")))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest entry; the last one is not padded."""
    lines = [[printable(cell) for cell in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def printable(cell: object) -> str:
    """A peer's words without what moves the cursor."""
    return "".join(c if c.isprintable() else "?" for c in str(cell))


def human_bytes(nbytes: float) -> str:
    """1.5 MB, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000 or unit == "GB":
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    raise AssertionError


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _print(as_json: bool, found: Any, text: Callable[[], str]) -> None:
    click.echo(json.dumps(found, indent=2) if as_json else text())


@click.command()
@with_admin
def status(admin: str, as_json: bool) -> int:
    """Show a running agent: whether it is ready and why not, its ranks, and what they hold.

    Exit code 3 when it is not ready.
    """
    found = ask(admin, "/statusz")
    _print(as_json, found, lambda: _status_text(found))
    return 0 if found["ready"] else 3


def _status_text(found: dict[str, Any]) -> str:
    ready = "ready" if found["ready"] else "NOT READY"
    up_s = max(0.0, time.time() - found["started_at"])
    parts = [f"pdxfer {found['version']}, process {found['pid']}, up {up_s:.0f} s: {ready}"]
    parts += [f"  {name}: {why}" for name, why in found["checks"].items() if why]
    rows = [
        (a["worker"], f"{a['rank']}/{a['ranks']}", a["model"], a["leases"], a["fetches"],
         human_bytes(sum(s["used_bytes"] for s in a["staging"].values())), a["address"])
        for a in found["agents"]
    ]  # fmt: skip
    parts.append(table(("WORKER", "RANK", "MODEL", "OFFERED", "FETCHING", "STAGING", "CONTROL"), rows))
    ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(found["transfers"].items()))
    if not rows:
        parts[-1] = "no engine has attached"
    return "\n".join([*parts, f"transfers remembered: {ended or 'none'}"])


@click.command()
@with_admin
def peers(admin: str, as_json: bool) -> None:
    """Show the workers that this one has met: how they are reached, and how transfers with them went."""
    found = ask(admin, "/statusz")["peers"]
    _print(as_json, {"schema_version": 1, "peers": found}, lambda: table(
        ("WORKER", "UP", "OK", "FAILED", "BYTES", "PATHS", "LAST FAILURE"), list(_peer_rows(found)),
    ) if found else "no worker has been met")  # fmt: skip


def _peer_rows(found: list[dict[str, Any]]) -> Iterator[tuple[object, ...]]:
    for peer in found:
        falling = {p["falling_back_from"] for p in peer["paths"]} - {""}
        paths = f"{len(peer['paths'])} ranks" + (f", falling back from {', '.join(sorted(falling))}" if falling else "")
        yield (
            peer["worker"], "yes" if peer.get("up", True) else "NO", peer.get("completed", 0), peer.get("failed", 0),
            human_bytes(peer.get("nbytes", 0)), paths, peer.get("last_failure", "").partition("\n")[0][:60],
        )  # fmt: skip


@click.command()
@with_admin
def slots(admin: str, as_json: bool) -> None:
    """Show where every page and slot is: free, sealed, leased, received into, quarantined."""
    found = [{k: a[k] for k in ("worker", "rank", "slots", "staging")} for a in ask(admin, "/statusz")["agents"]]
    states = sorted({state for a in found for state in a["slots"]}, key=lambda s: (s != "free", s))
    rows = [(a["worker"], a["rank"], *(a["slots"].get(state, 0) for state in states)) for a in found]
    _print(as_json, {"schema_version": 1, "slots": found}, lambda: (
        table(("WORKER", "RANK", *states), rows) if rows else "no engine has attached"
    ))  # fmt: skip


@click.command()
@click.option("--live", is_flag=True, help="Only those underway.")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="How many, newest first.")
@click.option("--watch", is_flag=True, help="Again and again, until interrupted.")
@click.option("--interval", type=click.FloatRange(0.1), default=1.0, show_default=True, help="Seconds between.")
@with_admin
def transfers(admin: str, as_json: bool, live: bool, limit: int, watch: bool, interval: float) -> None:
    """List the transfers that a running agent remembers, newest first; ``explain`` has the rest."""
    while True:
        found = ask(admin, f"/transferz?limit={limit}{'&live=1' if live else ''}")
        if watch and not as_json:
            click.clear()
        _print(as_json, found, lambda: _transfers_text(found["transfers"]))  # noqa: B023 - called at once
        if not watch:
            return
        time.sleep(interval)


def _transfers_text(found: list[dict[str, Any]]) -> str:
    rows = [
        (time.strftime("%H:%M:%S", time.localtime(t["began_at"])), t["role"], t["peer"] or "-", t["outcome"],
         _ms(t["elapsed_s"]), human_bytes(t["bytes"]), t["transport"], t.get("failure", {}).get("reason", ""),
         t["transfer"]) for t in found
    ]  # fmt: skip
    if not rows:
        return "no transfer is remembered"
    return table(("BEGAN", "ROLE", "PEER", "OUTCOME", "TOOK", "BYTES", "OVER", "REASON", "TRANSFER"), rows)


@click.command()
@click.argument("transfer", required=False)
@click.option("--reasons", is_flag=True, help="Print every reason that a failure may have instead; asks nobody.")
@with_admin
def explain(admin: str, as_json: bool, transfer: str | None, reasons: bool) -> None:
    """Tell what became of TRANSFER: its timeline, what failed, whose fault that is, and what to do."""
    if reasons:
        from pdxfer.agent.reasons import REASONS

        rows = [row._asdict() for row in REASONS.values()]
        text = "{name}\n  what failed:  {blame}\n  why:          {cause}\n  what to do:   {remedy}"
        _print(as_json, {"reasons": rows}, lambda: "\n".join(text.format(**row) for row in rows))
        return
    if transfer is None:
        raise click.UsageError("name a transfer, or say --reasons")
    found = ask(admin, f"/transferz/{quote(transfer, safe='')}")
    _print(as_json, found, lambda: "\n\n".join(map(_explained, found["transfers"])))


def _explained(t: dict[str, Any]) -> str:
    peer = f", {'from' if t['role'] == 'target' else 'to'} {t['peer']}" if t["peer"] else ""
    lines = [
        f"{t['transfer']}: {t['outcome']} as {t['role']}{peer}, after {_ms(t['elapsed_s'])}",
        (
            f"  {human_bytes(t['bytes'])} in {t['messages']} messages over {t['transport']}"
            if t["messages"]
            else "  nothing has been moved"
        )
        + (f", trace {t['trace']}" if t["trace"] else ""),
    ]
    if t["components"]:
        lines.append(f"  components: {', '.join(f'{c} {human_bytes(n)}' for c, n in sorted(t['components'].items()))}")
    if t["seconds"]:
        lines.append(f"  stages: {', '.join(f'{stage} {_ms(spent)}' for stage, spent in t['seconds'].items())}")
    lines += [f"  {_ms(at):>12}  {stage:<10} {detail}".rstrip() for at, stage, detail in t["marks"]]
    if failure := t.get("failure"):
        part = f", component {failure['component']}" if failure["component"] else ""
        lines += [
            f"  what failed:  {failure['blame']}{part}" + f"; in: {failure['in']}" * bool(failure["in"]),
            f"  why:          {failure['reason']}: {failure['cause']}",
            f"  what to do:   {failure['remedy']}",
        ]
    return "\n".join(map(printable, lines))


@click.command()
@click.argument("peer")
@click.option("--direct", is_flag=True, help="Ask from this process, not from the running agent; PEER is an address.")
@with_admin
def ping(admin: str, as_json: bool, peer: str, direct: bool) -> int:
    """Measure the way to PEER, a worker's name or its control address: a control round trip, and each plane's rate.

    Exit code 5 when a plane does not work.
    """
    if direct:
        from pdxfer.observe.probe import passing_agent
        from pdxfer.observe.probe import ping as measure

        if "://" not in peer:
            raise MisuseError(f"{peer!r} is no control address", hint="unix:///path or tcp://host:port")
        with passing_agent() as agent:
            found = measure(agent, peer, compare=False)
    else:
        found = ask(admin, f"/ping?peer={quote(peer, safe='')}", method="POST", timeout_s=_PING_S)
    _print(as_json, found, lambda: _ping_text(found))
    return 5 if any("error" in plane for plane in found["planes"]) else 0


def _ping_text(found: dict[str, Any]) -> str:
    lines = [
        f"{found['worker']} rank {found['rank']} at {found['address']}",
        f"  control  {_ms(found['control']['round_trip_s'])}",
    ]
    for plane in found["planes"]:
        said = plane.get("error") or plane.get("skipped")
        if not said:
            rate = f"{plane['bytes_per_s'] / 1e9:.2f} GB/s"
            said = f"{_ms(plane['round_trip_s'])}, {rate} ({plane['how']})"
        lines.append(f"  {plane['transport']:<8} {said}")
    if "fits" in found:
        lines.append(f"  layout   {found['fits'] or 'can be mapped to ours'}")
    return "\n".join(lines)


@click.command()
@click.option("--wait", is_flag=True, help="Until nothing is underway any more.")
@click.option("--timeout", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds for --wait.")
@with_admin
def drain(admin: str, as_json: bool, wait: bool, timeout: float) -> int:
    """Have a running agent take nothing new: it is unready at once, and what is underway goes on to its end.

    With --wait, exit code 1 when something is still underway after --timeout.
    """
    until_s = time.monotonic() + timeout
    found = dict(ask(admin, "/drain", method="POST"))
    while wait and found["underway"] and time.monotonic() < until_s:
        time.sleep(0.1)
        try:
            found["underway"] = ask(admin, "/statusz")["underway"]
        except PeerError:  # a daemon that has drained ends
            found["underway"] = 0
    _print(as_json, found, lambda: f"draining, {found['underway']} underway")
    return 1 if wait and found["underway"] else 0


@click.command()
@with_admin
def undrain(admin: str, as_json: bool) -> None:
    """Have a drained agent take new work and engines again, as when only its engine restarts."""
    found = ask(admin, "/undrain", method="POST")
    _print(as_json, found, lambda: "not draining")
