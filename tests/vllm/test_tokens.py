"""Same tokens as one server, same bytes as the source, for every pair of unlike servers."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import Fleet
from tests.vllm.hand_off import TOKENS, hand_off, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PAIRS = [
    *(("qwen3-next", *pair) for pair in ("ab", "ba", "ac", "ca", "bc", "cb", "de", "ed")),
    *(("llama", *pair) for pair in ("ab", "ca")),
    *(("deepseek-v3", *pair) for pair in ("ab", "ca", "ac")),
]


@pytest.mark.parametrize(("target", "block_tokens"), [("b", 512), ("c", 384)])
def test_only_pages_that_the_target_lacks_are_moved(fleet: Fleet, prompts, target, block_tokens) -> None:
    """The second prompt shares 800 tokens with the first; whole blocks of them are in the target's prefix cache."""
    source, target = "qwen3-next a", f"qwen3-next {target}"
    server = fleet.servers(source, target)[1]
    row_bytes = 2 * (64 + 64) * 2
    state_bytes = 3 * (8 * 64 * 64 * 4 + 3 * (2 * 4 * 64 + 8 * 64) * 2)
    before = server.metric("vllm:pdxfer_bytes_total")
    for prompt, here in zip(prompts["qwen3-next"][-2:], (0, 800 // block_tokens * block_tokens), strict=True):
        hand_off(fleet, source, target, prompt, salt=f"{source} to {target}, alike")
        after = before + (len(prompt) - 1 - here) * row_bytes + state_bytes
        wait_for(lambda after=after: server.metric("vllm:pdxfer_bytes_total") == after, "the bytes that lack")
        before = after


@pytest.mark.parametrize(("model", "source", "target"), PAIRS)
def test_two_servers_say_what_one_says(fleet: Fleet, prompts, model, source, target) -> None:
    source, target = f"{model} {source}", f"{model} {target}"
    found, expected = {}, {}
    for prompt in prompts[model]:
        found[len(prompt)] = hand_off(fleet, source, target, prompt, salt=f"{source} to {target}")
        expected[len(prompt)] = fleet.own_answer(target, prompt, TOKENS)
    assert found == expected
