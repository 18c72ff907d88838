"""Two ends of a channel in one process, calls that block there, and what is left: for tests of transports."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from pdxfer.errors import DeadlineError
from pdxfer.transport import WINDOW_MESSAGES, Channel, Listener, Sending, Transport
from pdxfer.transport.runs import Runs

__all__ = [
    "LONG_S",
    "MIB",
    "Pair",
    "connect_pair",
    "fill_window",
    "grown",
    "in_thread",
    "offsets",
    "resources",
    "until_raises",
]

#: Long enough for anything that must happen, on a machine that is busy with other things.
LONG_S = 60.0
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two transports and a channel between them: ``left`` connected, ``right`` accepted."""

    left_transport: Transport
    right_transport: Transport
    listener: Listener
    left: Channel
    right: Channel


def offsets(*values: int) -> Runs:
    """Return an int64 array, as ``read_runs`` wants it."""
    return np.array(values, np.int64)


def connect_pair(left: Transport, listener: Listener) -> tuple[Channel, Channel]:
    """Connect ``left`` to ``listener``, both in this process; returns the connected and the accepted end."""
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, LONG_S)
        return left.connect(listener.contact_address, timeout_s=LONG_S), accepted.result()


def in_thread(call: Callable[[], object]) -> Future[object]:
    """Run ``call`` in a thread of its own, which has begun when this returns."""
    begun, future = threading.Event(), Future[object]()

    def run() -> None:
        begun.set()
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - the thread that asks for the result gets it
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    begun.wait(LONG_S)
    return future


def until_raises(error: type[Exception], call: Callable[[], object]) -> None:
    """Call until it raises ``error``, at most LONG_S: for what a peer's end notices only a little later."""
    give_up_at_s = time.monotonic() + LONG_S

    def call_on() -> None:
        while time.monotonic() < give_up_at_s:
            call()

    with pytest.raises(error):
        call_on()


def fill_window(channel: Channel, payload: memoryview) -> list[Sending]:
    """Send until there is no room for another message, which must come soon."""
    sendings: list[Sending] = []

    def send_on() -> None:
        while len(sendings) < 100 * WINDOW_MESSAGES:
            sendings.append(channel.send_all(b"", payload, timeout_s=0))

    with pytest.raises(DeadlineError):
        send_on()
    return sendings


def resources() -> dict[str, int]:
    """What this process holds that a leak would show in."""
    with open("/proc/self/maps") as maps:
        mapped = sum("pdxfer" in line for line in maps)
    return {"fds": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")), "maps": mapped}


def grown(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What is more now than ``before``; three uses that leak one thing each can't hide behind a late thread."""
    now = resources()
    return {what: (before[what], now[what]) for what in now if now[what] > before[what]}
