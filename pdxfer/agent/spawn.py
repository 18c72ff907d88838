"""Spawn: our modules in processes of their own; a daemon for demos, benches and tests: ready on entry, gone on exit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from pdxfer.agent.frames import open_socket
from pdxfer.errors import DeadlineError, PeerError

__all__ = ["DaemonProcess", "module_command"]

_READY_S = 60.0
_END_S = 30.0


def module_command(module: str) -> list[str]:
    """The command that runs a module as ``python -m`` does, but looks for modules where this process does.

    ``-m`` looks into the working directory first. In a checkout that would be its sources, whose kernel may not be
    built, beside an installed package whose kernel is.
    """
    run = f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return [sys.executable, "-c", f"import runpy, sys; sys.path[:] = {sys.path!r}; {run}"]


class DaemonProcess:
    """``pdxfer agent`` at ``socket``; a context manager.

    Args:
        settings: by dotted key, as ``--set`` takes them (lists as lists, tables as dicts).
        config: path of a config file. stderr: a file for its log.

    Raises:
        PeerError: it ended at once. DeadlineError: it does not listen.
    """

    def __init__(
        self, socket: str, settings: Mapping[str, Any] | None = None, *, config: str = "", stderr: Any = None
    ) -> None:
        self.socket, self._stderr = socket, stderr
        self._command = [*module_command("pdxfer"), "agent", "--socket", socket]
        self._command += ["--config", config] if config else []
        for key, value in {"admin": "", **(settings or {})}.items():
            self._command += ["--set", f"{key}={_text(value)}"]
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self._command, stderr=self._stderr)
        until_s = time.monotonic() + _READY_S
        while True:
            try:
                open_socket(self.socket).close()
                return process
            except PeerError as error:
                if process.poll() is not None:
                    raise PeerError(f"the daemon ended with {process.returncode} before it was ready") from error
                if time.monotonic() > until_s:
                    process.kill()
                    process.wait()
                    raise DeadlineError("the daemon was not ready in time") from error
                time.sleep(0.02)

    def restart(self, number: int = signal.SIGKILL) -> None:
        """End it by this signal, unless it has ended, and start it again."""
        if self.process.poll() is None:
            self.stop(number)
        self.process = self._start()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(_END_S)

    def __enter__(self) -> DaemonProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            try:
                self.stop()
            except subprocess.TimeoutExpired:
                self.stop(signal.SIGKILL)


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return json.dumps(value) if isinstance(value, (dict, bool)) else str(value)
