"""Eight requests at a time, some given up on either side: the others stay right, and every page comes back."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from pdxfer.demo.vllm_servers import VllmServer
from pdxfer.errors import DeadlineError
from tests.vllm.conftest import Fleet
from tests.vllm.hand_off import TOKENS, decode, hand_off, prefill, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

REQUESTS = 24


def patience(rng: random.Random) -> float:
    """Seconds after which the client hangs up: soon for one in three."""
    return rng.uniform(0.0, 1.5) if rng.random() < 0.33 else 300.0


def all_free(server: VllmServer) -> bool:
    """Whether no page is in use; a request of one token makes the server look."""
    server.complete([1], 1)
    return server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize(("source", "target"), [("a", "b"), ("c", "a")])
def test_random_aborts(fleet: Fleet, prompts, source, target) -> None:
    source, target = f"qwen3-next {source}", f"qwen3-next {target}"
    salt = f"{source} to {target}, aborts"
    expected = [fleet.own_answer(target, prompt, TOKENS) for prompt in prompts["qwen3-next"]]
    servers = fleet.servers(source, target)
    wait_for(lambda: all(map(all_free, servers)), "both servers idle")

    def one(number: int) -> bool | None:
        """Whether the answer is right; None if the client had gone."""
        rng = random.Random(number)
        which = rng.randrange(len(expected))
        try:
            given = prefill(servers[0], prompts["qwen3-next"][which], salt, timeout_s=patience(rng))
            return decode(servers[1], given, timeout_s=patience(rng))[1] == expected[which]
        except DeadlineError:
            return None

    with ThreadPoolExecutor(8) as clients:
        right = list(clients.map(one, range(REQUESTS)))
    assert set(right) == {True, None}
    wait_for(lambda: all(map(all_free, servers)), "both servers have all their pages back")
    prompt = prompts["qwen3-next"][-1]
    assert hand_off(fleet, source, target, prompt, salt) == expected[-1]
