"""Failpoints: named steps of a transfer at which a rank's own process kills or stops itself.

Production code knows nothing of them: ``arm`` wraps one of its functions, in the process that asks for it.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pdxfer import packing
from pdxfer.agent import Agent, Fetch, Received, service
from pdxfer.agent.peers import Peers
from pdxfer.agent.serve import SourceSession
from pdxfer.agent.source import Source
from pdxfer.driver import EdgeReader

__all__ = ["POINTS", "Failpoint", "arm"]


@dataclass(frozen=True)
class Failpoint:
    """Where it is: before or after the ``at``-th call of any of these functions.

    ``first``: it is reached at the first contact of two peers only.
    """

    places: tuple[tuple[Any, str], ...]
    after: bool = False
    at: int = 0
    first: bool = False


def _at(owner: Any, *names: str, **options: Any) -> Failpoint:
    return Failpoint(tuple((owner, name) for name in names), **options)


#: By the side that dies, in the order of a transfer.
POINTS: dict[str, dict[str, Failpoint]] = {
    "source": {
        "describing": _at(Agent, "describe", first=True),
        "accepted": _at(service, "serve_channel", first=True),
        "opening": _at(Source, "open"),
        "opened": _at(Source, "open", after=True),
        "greeted": _at(SourceSession, "begin", after=True),
        "before the first chunk": _at(SourceSession, "_gather"),
        "mid pack": _at(packing, "pack", "digest", at=3),
        "packed, not sent": _at(SourceSession, "_gather", after=True, at=2),
        "after a chunk": _at(SourceSession, "answer", after=True, at=1),
        "told it is done": _at(Source, "_complete"),
        "freeing": _at(Source, "_free"),
        "completed, not said": _at(Source, "_complete", after=True),
    },
    "target": {
        "introducing": _at(Peers, "_introduce", first=True),
        "met": _at(Peers, "_introduce", after=True, first=True),
        "opening": _at(Fetch, "_open"),
        "opened": _at(Fetch, "_open", after=True),
        "before the first chunk": _at(EdgeReader, "_place"),
        "mid unpack": _at(packing, "unpack", "direct", at=3),
        "after a chunk": _at(EdgeReader, "_verify", after=True, at=1),
        "before it is done": _at(EdgeReader, "complete"),
        "after it is done": _at(EdgeReader, "complete", after=True),
        "all in": _at(Fetch, "_check_whole"),
        "ready": _at(Fetch, "wait", after=True),
        "releasing": _at(Received, "release"),
    },
}
#: A target rank whose siblings read from it what crosses the network once.
POINTS["sibling"] = {
    **POINTS["target"],
    "relay offered": _at(Source, "offer_relay", after=True),
    "relay ready": _at(Source, "relay_ready", after=True),
    "asked by a sibling": _at(Source, "open"),
    "read by a sibling": _at(Source, "_complete", after=True),
}

_ARMED: dict[tuple[Any, str], Any] = {}


def arm(side: str, point: str, signal: int) -> None:
    """Have this process send itself ``signal`` at the point, once."""
    found, calls = POINTS[side][point], itertools.count()
    for place in found.places:
        function = _ARMED.setdefault(place, getattr(*place))
        setattr(*place, _wrapped(function, found, calls, signal))


def _wrapped(function: Callable[..., Any], point: Failpoint, calls: itertools.count[int], signal: int) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        due = next(calls) == point.at
        if due and not point.after:
            os.kill(os.getpid(), signal)
        result = function(*args, **options)
        if due and point.after:
            os.kill(os.getpid(), signal)
        return result

    return wrapper
