"""``pdxfer agent``: the daemon's process.

In come config and signals; out go a running ``Daemon``, its admin and log lines. SIGTERM and SIGINT drain, then end (a
second one ends at once); SIGHUP reads the config again and takes over what may change.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from pdxfer.cli.config import load, with_sources
from pdxfer.errors import PdxferError

if TYPE_CHECKING:
    from pdxfer.agent.daemon import Daemon
    from pdxfer.config import Loaded

__all__ = ["agent"]

_POLL_S, _READY_S = 0.1, 2.0
_log = logging.getLogger("pdxfer.daemon")


@click.command()
@with_sources
def agent(**sources: Any) -> int:
    """Run the sidecar daemon: agents of one worker's local ranks, for engines that attach by a Unix socket.

    Flags go before PDXFER_* variables (PDXFER_AGENT__LEASE_S=30s), these before the file, and that before defaults.
    SIGTERM drains and ends; SIGHUP reads the config again.
    """
    signals: list[int] = []
    arrived = threading.Event()

    def note(number: int, _: object) -> None:
        signals.append(number)
        arrived.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    from pdxfer.observe.logs import log_to_stderr

    loaded = load(**sources)
    log_to_stderr(loaded.config.log_format, loaded.config.log_level)
    with _running(loaded) as (daemon, problems):
        _tell_systemd("READY=1")
        while True:
            if not arrived.wait(_READY_S):
                daemon.set_ready(not any(problems().values()))
            _tell_systemd("WATCHDOG=1")
            arrived.clear()
            while signals:
                if signals.pop(0) == signal.SIGHUP:
                    loaded = _reload(daemon, loaded, sources)
                    continue
                _tell_systemd("STOPPING=1")
                daemon.drain()
                until_s = time.monotonic() + daemon.config.drain_s
                while (left := daemon.underway()) and time.monotonic() < until_s and not signals:
                    arrived.wait(_POLL_S)
                _log.info("ends with %d transfers underway", left)
                return 0


def _tell_systemd(state: str) -> None:
    """Of a unit with Type=notify and WatchdogSec; nothing where nobody asked to be told."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


@contextmanager
def _running(loaded: Loaded) -> Iterator[tuple[Daemon, Callable[[], Mapping[str, str]]]]:
    """The daemon with its admin, and how to ask what is wrong with it."""
    from pdxfer.agent.daemon import Daemon
    from pdxfer.observe import Admin, Observer
    from pdxfer.observe.tracing import tracing_listeners

    made: list[Daemon] = []  # the observer comes first, the daemon tells it of every agent

    def drained(_: Mapping[str, str]) -> Mapping[str, Any]:
        made[0].drain()
        return {"draining": True, "underway": made[0].underway()}

    def undrained(_: Mapping[str, str]) -> Mapping[str, Any]:
        made[0].undrain()
        return {"draining": False, "underway": made[0].underway()}

    with Observer(
        config=lambda: {key: value for key, value, _ in loaded.rows()},
        actions={"drain": drained, "undrain": undrained},
        listeners=tracing_listeners(),
        draining=lambda: bool(made) and made[0].draining,
    ) as observer:
        daemon = Daemon(loaded.config, observer)
        made.append(daemon)
        with ExitStack() as stack:
            if loaded.config.admin:
                stack.callback(Admin(observer, loaded.config.admin).close)
            if loaded.config.metrics:
                stack.callback(Admin(observer, loaded.config.metrics, probes_only=True).close)
            stack.enter_context(daemon)
            yield daemon, observer.problems


def _reload(daemon: Daemon, before: Loaded, sources: Any) -> Loaded:
    """Take over what may change, and say what else has changed; a config that is wrong changes nothing."""
    try:
        after = load(**sources)
    except PdxferError as error:
        _log.error("the config is not taken over: %s", error)
        return before
    daemon.reconfigure(after.config)
    now = {key: value for key, value, _ in replace(after, config=daemon.config).rows()}
    late = sorted(key for key, value, _ in after.rows() if now[key] != value)
    _log.warning("config read again; needs a restart: %s", ", ".join(late) or "nothing")
    return after
