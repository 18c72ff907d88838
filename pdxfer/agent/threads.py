"""Threads: one more of the agent's own, or an error that says that there is none left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from pdxfer.errors import ExhaustedError

__all__ = ["start_thread"]


def start_thread(name: str, target: Callable[..., object], *args: Any) -> threading.Thread:
    """Run ``target`` in a daemon thread, started; raises ExhaustedError where the system gives no more."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        hint = "raise the limit of threads (ulimit -u; a container's pids.max)"
        raise ExhaustedError(f"{name} can't run: {error}", hint=hint) from error
    return thread
