"""Same tokens as one server, same bytes as the source, for every pair of unlike servers."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Fleet
from tests.vllm.hand_off import TOKENS, hand_off

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAIRS = [
    *(("qwen3-next", *pair) for pair in ("ab", "ba", "ac", "ca", "bc", "cb")),
    *(("llama", *pair) for pair in ("ab", "ba", "ca", "ac", "cb")),
    *(("deepseek-v3", *pair) for pair in ("ab", "ba", "ca", "ac")),
]


@pytest.mark.parametrize(("model", "source", "target"), PAIRS)
def test_two_servers_say_what_one_says(fleet: Fleet, prompts, model, source, target) -> None:
    source, target = f"{model} {source}", f"{model} {target}"
    found, expected = {}, {}
    for prompt in prompts[model]:
        found[len(prompt)] = hand_off(fleet, source, target, prompt, salt=f"{source} to {target}")
        expected[len(prompt)] = fleet.own_answer(target, prompt, TOKENS)
    assert found == expected


@pytest.mark.parametrize("target", ["b", "c"])
def test_only_pages_that_the_target_lacks_are_moved(fleet: Fleet, prompts, target) -> None:
    """The longest prompts begin alike: the second finds pages of the first in the target's prefix cache."""
    first, second = prompts["qwen3-next"][-2:]
    source, target = "qwen3-next a", f"qwen3-next {target}"
    server = fleet.servers(source, target)[1]
    moved = []
    for prompt in (first, second):
        before = server.metric("vllm:pdxfer_bytes_total")
        hand_off(fleet, source, target, prompt, salt=f"{source} to {target}, alike")
        moved.append(server.metric("vllm:pdxfer_bytes_total") - before)
    assert moved == []
