"""Tickets that can't be served: the request fails, or is computed anew, as the policy says, and never from wrong state.

Servers a and d have the policy ``fail``, b and e ``recompute``; a and b keep their addresses when started again.
"""

from __future__ import annotations

import pytest

from pdxfer.errors import PeerError
from tests.vllm.conftest import Fleet
from tests.vllm.hand_off import TOKENS, Prefilled, decode, failures, hand_off, prefill, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

A, B, D, E = (f"qwen3-next {letter}" for letter in "abde")

WAYS = pytest.mark.parametrize(("source", "target"), [(A, B), (B, A)], ids=["recompute", "fail"])
BOTH_MODES = pytest.mark.parametrize(
    ("source", "target"),
    [(A, B), (B, A), (D, E), (E, D)],
    ids=["recompute", "fail", "recompute, sidecar", "fail, sidecar"],
)


def check_refused(fleet: Fleet, target: str, given: Prefilled) -> None:
    """The target can't load this: it says so in its counters, and does what its policy says."""
    (server,) = fleet.servers(target)
    before = failures(server)
    if target in (B, E):
        assert decode(server, given)[1] == fleet.own_answer(target, given.prompt, TOKENS)
    else:
        with pytest.raises(PeerError, match="answered 500"):
            decode(server, given)
    wait_for(lambda: failures(server) > before, f"{target} counts a failure")


@BOTH_MODES
def test_a_ticket_is_good_for_one_fetch(fleet: Fleet, prompts, source, target) -> None:
    prompt = prompts["qwen3-next"][3]
    servers = fleet.servers(source, target)
    given = prefill(servers[0], prompt, "used")
    assert decode(servers[1], given)[1] == fleet.own_answer(target, prompt, TOKENS)
    check_refused(fleet, target, Prefilled(prompt=prompt, salt=given.salt, request="", params=given.params))


def test_a_ticket_after_its_lease(fleet: Fleet, prompts) -> None:
    prompt = prompts["qwen3-next"][4]
    source = fleet.servers(A, B)[0]
    expired = {"name": "vllm:pdxfer_offers_total", "outcome": "expired"}
    before = source.metric(**expired)
    given = prefill(source, prompt, "late")
    wait_for(lambda: source.metric(**expired) > before, "the lease ends")
    check_refused(fleet, B, given)
    assert hand_off(fleet, A, B, prompt, "late") == fleet.own_answer(B, prompt, TOKENS)


@BOTH_MODES
def test_a_ticket_of_another_prompt(fleet: Fleet, prompts, source, target) -> None:
    mine, other = prompts["qwen3-next"][:2]
    given = prefill(fleet.servers(source, target)[0], other, "mixed up")
    check_refused(fleet, target, Prefilled(prompt=mine, salt=given.salt, request="", params=given.params))


@WAYS
def test_prefill_dies_and_comes_back(fleet: Fleet, prompts, source, target) -> None:
    """Between its answer and the fetch. Back at its address, it serves and is served without a restart of the other."""
    servers = fleet.servers(source, target)
    expected = [fleet.own_answer(target, prompt, TOKENS) for prompt in prompts["qwen3-next"]]
    first, second, third = (prefill(servers[0], prompt, "killed") for prompt in prompts["qwen3-next"][4:7])
    assert decode(servers[1], first)[1] == expected[4]
    servers[0].kill()
    check_refused(fleet, target, second)
    servers[0].start()
    servers[0].wait_ready()
    check_refused(fleet, target, third)
    for number in (5, 6):
        prompt = prompts["qwen3-next"][number]
        assert hand_off(fleet, source, target, prompt, "after") == expected[number]
        assert hand_off(fleet, target, source, prompt, "and back") == fleet.own_answer(source, prompt, TOKENS)


@pytest.mark.parametrize(("source", "target"), [(D, E), (E, D)], ids=["prefill's", "decode's"])
def test_a_sidecar_dies_and_comes_back(fleet: Fleet, prompts, source, target) -> None:
    """D's, between prefill's answer and the fetch: its servers hand over again, without a restart of theirs."""
    servers = fleet.servers(source, target)
    prompt = prompts["qwen3-next"][4]
    expected = fleet.own_answer(target, prompt, TOKENS)
    given = prefill(servers[0], prompt, f"its sidecar dies, to {target}")
    fleet.daemons[D].restart()
    if source == D:  # what was offered has gone with it
        check_refused(fleet, target, given)

    def serves_again() -> bool:
        try:
            return hand_off(fleet, source, target, prompt, "after") == expected
        except PeerError:  # not attached yet
            return False

    wait_for(serves_again, "the next hand-off")
