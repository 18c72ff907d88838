"""Same tokens as one server, same bytes as the source, for every pair of unlike servers."""

from __future__ import annotations

import itertools

import pytest

from tests.vllm.compare import first_difference, read_record
from tests.vllm.conftest import Fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TOKENS = 32

PAIRS = [
    *(("qwen3-next", prefill, decode) for prefill, decode in ("ab", "ba", "ac", "ca", "bc", "cb")),
    *(("llama", prefill, decode) for prefill, decode in ("ab", "ba", "ca", "ac", "cb")),
    *(("deepseek-v3", prefill, decode) for prefill, decode in ("ab", "ba", "ca", "ac")),
]
_numbers = itertools.count()


def hand_off(fleet: Fleet, prefill: str, decode: str, prompt: list[int], salt: str) -> list[int]:
    """Serve a prompt by two servers; the tokens, once the caches were found to be equal."""
    source, target = fleet.servers(prefill, decode)
    name = f"t{next(_numbers)}"
    first = source.complete(
        prompt, 1, request_id=f"{name}p", cache_salt=salt, kv_transfer_params={"do_remote_decode": True}
    )
    second = target.complete(
        prompt, TOKENS, request_id=f"{name}d", cache_salt=salt, kv_transfer_params=first["kv_transfer_params"]
    )
    offered = read_record(fleet.spied(prefill), "offered", f"cmpl-{name}p-")
    received = read_record(fleet.spied(decode), "received", f"cmpl-{name}d-")
    assert offered.tokens == len(prompt) - 1
    assert first_difference(offered, received) == ""
    return second["choices"][0]["token_ids"]


@pytest.mark.parametrize(("model", "prefill", "decode"), PAIRS)
def test_two_servers_say_what_one_says(fleet: Fleet, prompts, model, prefill, decode) -> None:
    prefill, decode = f"{model} {prefill}", f"{model} {decode}"
    salt = f"{prefill} to {decode}"
    found, expected = {}, {}
    for prompt in prompts[model]:
        found[len(prompt)] = hand_off(fleet, prefill, decode, prompt, salt)
        expected[len(prompt)] = fleet.own_answer(decode, prompt, TOKENS)
    assert found == expected
