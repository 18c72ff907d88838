"""What a router does, for tests: a prompt to the prefill server, its answer's parameters to the decode server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic, sleep
from typing import Any

from pdxfer.demo.vllm_servers import VllmServer
from tests.vllm.compare import first_difference, read_record
from tests.vllm.conftest import Fleet

__all__ = ["TOKENS", "Prefilled", "decode", "failures", "hand_off", "prefill", "wait_for"]

TOKENS = 32

_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A prompt that a server has prefilled; ``request`` begins vLLM's id of it."""

    prompt: Sequence[int]
    salt: str
    request: str
    params: dict[str, Any]


def prefill(server: VllmServer, prompt: Sequence[int], salt: str, *, timeout_s: float = 120.0) -> Prefilled:
    """Prefill; prompts share prefix caches under the same ``salt`` only."""
    request = f"p{next(_numbers)}"
    wanted = {"do_remote_decode": True}
    answer = server.complete(
        prompt, 1, timeout_s=timeout_s, request_id=request, cache_salt=salt, kv_transfer_params=wanted
    )
    return Prefilled(prompt=prompt, salt=salt, request=f"cmpl-{request}-", params=answer["kv_transfer_params"])


def decode(server: VllmServer, given: Prefilled, *, timeout_s: float = 120.0) -> tuple[str, list[int]]:
    """Continue what was prefilled; how the request's id at this server begins, and the tokens."""
    request = f"d{next(_numbers)}"
    answer = server.complete(
        given.prompt,
        TOKENS,
        timeout_s=timeout_s,
        request_id=request,
        cache_salt=given.salt,
        kv_transfer_params=given.params,
    )
    return f"cmpl-{request}-", answer["choices"][0]["token_ids"]


def hand_off(fleet: Fleet, source: str, target: str, prompt: Sequence[int], salt: str) -> list[int]:
    """Serve a prompt by two servers; the tokens, once the caches were found to be equal, bit for bit."""
    first, second = fleet.servers(source, target)
    given = prefill(first, prompt, salt)
    request, tokens = decode(second, given)
    offered = read_record(fleet.spied(source), "offered", given.request)
    received = read_record(fleet.spied(target), "received", request)
    assert offered.tokens == len(prompt) - 1
    assert first_difference(offered, received) == ""
    return tokens


def failures(server: VllmServer) -> float:
    """How many loads its ranks have given up, as its endpoint says."""
    name = "vllm:pdxfer_transfers_total"
    return server.metric(name) - sum(server.metric(name, outcome=fine) for fine in ("received", "cancelled"))


def wait_for(holds: Callable[[], bool], what: str, timeout_s: float = 90.0) -> None:
    """Wait until ``holds``; vLLM publishes its metrics now and then, and tells nobody."""
    deadline_s = monotonic() + timeout_s
    while not holds():
        assert monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        sleep(0.2)
