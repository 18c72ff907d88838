"""The scheduler's half of the vLLM connector, driven as vLLM's scheduler does; what vLLM would pass in is made here."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import Any

import pytest

from pdxfer.connectors.context import prompt_context
from pdxfer.connectors.vllm_scheduler import TICKET_KEY, SchedulerSide
from pdxfer.connectors.vllm_settings import Settings, check_version
from pdxfer.connectors.vllm_step import Step
from pdxfer.errors import MisuseError
from pdxfer.keys import TicketKeys
from pdxfer.ticket import RankIssuer, Ticket

BLOCKS = ((4, 5, 6), (0, 0, 1))
NOTHING = Step(idle=True)


@dataclass
class Request:
    """The attributes of vLLM's ``Request`` that the connector uses."""

    request_id: str
    prompt_token_ids: list[int] | None
    kv_transfer_params: Any = None
    max_tokens: int = 16
    lora_request: Any = None
    cache_salt: str | None = None
    mm_features: Any = None
    skip_reading_prefix_cache: bool = False
    trace_headers: Any = None
    num_prompt_tokens: int = 0
    _all_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._all_token_ids = list(self.prompt_token_ids or [])
        self.num_prompt_tokens = len(self._all_token_ids) or 8


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class New:
    req_id: str
    num_computed_tokens: int


@dataclass
class Output:
    """The attributes of vLLM's ``SchedulerOutput`` that the connector uses."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    preempted_req_ids: set[str] | None = None


def issuers(size: int = 2) -> list[RankIssuer]:
    return [
        RankIssuer(
            worker="p0", layout_digest="0" * 32, rank=rank, address=f"unix:///tmp/p{rank}.sock",
            epoch=secrets.token_bytes(16), keys=TicketKeys.create(),
        )
        for rank in range(size)
    ]  # fmt: skip


def scheduler(*, producer: bool = True, consumer: bool = True) -> SchedulerSide:
    side = SchedulerSide(engine_id="e", producer=producer, consumer=consumer, blocks_of=lambda _: BLOCKS)
    side.meet_workers(reversed(issuers()))
    return side


def prefill(side: SchedulerSide, prompt: list[int], chunks: list[int], request_id: str = "r") -> Request:
    """A prefill request that has been computed in ``chunks``; it is not finished yet."""
    request = Request(request_id, list(prompt), {"do_remote_decode": True}, max_tokens=1)
    side.add(request)
    side.step(Output({request_id: chunks[0]}, [New(request_id, 0)]))
    done = chunks[0]
    for chunk in chunks[1:]:
        side.step(Output({request_id: chunk}, scheduled_cached_reqs=Cached([request_id], [done])))
        done += chunk
    return request


def handed(prompt: list[int]) -> dict[str, Any]:
    """What a prefill server answers for ``prompt``."""
    side = scheduler()
    request = prefill(side, prompt, [len(prompt) - 1])
    kept, params = side.finished(request, well=True)
    assert kept
    assert params is not None
    return params


PROMPT = list(range(100, 117))


def test_prefill_stops_one_token_short_and_offers_in_the_step_that_ends_it() -> None:
    side = scheduler()
    request = Request("r", list(PROMPT), {"do_remote_decode": True}, max_tokens=99)
    side.add(request)
    assert request.prompt_token_ids == request._all_token_ids == PROMPT[:-1]
    assert (request.num_prompt_tokens, request.max_tokens) == (16, 1)
    assert side.step(Output({"r": 10}, [New("r", 0)])).offers == ()
    (offer,) = side.step(Output({"r": 6}, scheduled_cached_reqs=Cached(["r"], [10]))).offers
    assert (offer.request, offer.tokens, offer.blocks) == ("r", 16, BLOCKS)
    assert offer.context == prompt_context(PROMPT[:-1])
    kept, params = side.finished(request, well=True)
    assert kept
    assert params is not None
    ticket = Ticket.decode(params[TICKET_KEY])
    assert (ticket.transfer, ticket.kv_tokens, ticket.state_tokens) == (offer.transfer, 16, 16)
    assert ticket.context == offer.context
    assert [part.rank for part in ticket.ranks] == [0, 1]
    assert {part.nonce for part in ticket.ranks} == {offer.nonce}
    assert side.step(Output()) == Step(handed=("r",), idle=True)


def test_the_local_prefix_cache_counts_as_computed() -> None:
    side = scheduler()
    side.add(Request("r", list(PROMPT), {"do_remote_decode": True}))
    (offer,) = side.step(Output({"r": 4}, [New("r", 12)])).offers
    assert offer.tokens == 16


@pytest.mark.parametrize("well", [True, False])
def test_an_aborted_prefill_is_withdrawn_and_a_finished_one_is_kept(well: bool) -> None:
    side = scheduler()
    request = prefill(side, PROMPT, [16])
    kept, params = side.finished(request, well=well)
    assert (kept, params is not None) == (well, well)
    step = side.step(Output())
    assert (step.handed, step.withdrawn) == ((("r",), ()) if well else ((), ("r",)))


def test_a_preempted_prefill_is_withdrawn_and_offered_anew_under_another_name() -> None:
    side = scheduler()
    side.add(Request("r", list(PROMPT), {"do_remote_decode": True}))
    (first,) = side.step(Output({"r": 16}, [New("r", 0)])).offers
    assert side.step(Output(preempted_req_ids={"r"})).withdrawn == ("r",)
    (again,) = side.step(Output({"r": 16}, scheduled_cached_reqs=Cached(["r"], [0]))).offers
    assert again.transfer != first.transfer
    assert again.nonce != first.nonce


def test_an_abort_before_the_prefill_is_done_leaves_nothing() -> None:
    side = scheduler()
    request = prefill(side, PROMPT, [10])
    assert side.finished(request, well=False) == (False, None)
    assert side.step(Output()) == NOTHING


@pytest.mark.parametrize(
    "request_",
    [
        Request("r", [1], {"do_remote_decode": True}),
        Request("r", None, {"do_remote_decode": True}),
        Request("r", PROMPT, {"do_remote_decode": True}, skip_reading_prefix_cache=True),
        Request("r", PROMPT, "do_remote_decode"),
        Request("r", PROMPT, None),
    ],
    ids=["one token", "embeddings", "prompt logprobs", "no dict", "nothing"],
)
def test_requests_that_are_not_handed_over_run_as_they_are(request_: Request) -> None:
    side = scheduler()
    before = list(request_._all_token_ids)
    side.add(request_)
    assert request_._all_token_ids == before
    assert side.step(Output({"r": 16}, [New("r", 0)])) == Step()
    assert side.finished(request_, well=True) == (False, None)


def test_rows_of_drafts_beyond_the_prompt_are_not_handed_over() -> None:
    side = scheduler()
    request = Request("r", list(PROMPT), {"do_remote_decode": True})
    side.add(request)
    assert side.step(Output({"r": 19}, [New("r", 0)])).offers == ()
    assert side.finished(request, well=True) == (False, None)


def test_decode_keeps_the_lease_until_it_loads_what_is_missing() -> None:
    side, params = scheduler(), handed(PROMPT)
    request = Request("d", list(PROMPT), params)
    side.add(request)
    assert side.step(Output()).keep == (params[TICKET_KEY],)
    assert side.matched_tokens(request, 4) == side.matched_tokens(request, 4) == (12, True)
    side.allocated(request, BLOCKS, 12)
    (load,) = side.step(Output()).loads
    assert (load.request, load.ticket, load.blocks) == ("d", params[TICKET_KEY], BLOCKS)
    assert (load.tokens, load.first_token, load.error) == (16, 4, "")
    side.allocated(request, BLOCKS, 0)  # vLLM's second call
    side.received(["d"])
    assert side.matched_tokens(request, 0) == (0, False)
    side.finished(request, well=True)
    assert side.step(Output()) == NOTHING


def test_a_failed_load_is_not_tried_again() -> None:
    side = scheduler()
    request = Request("d", list(PROMPT), handed(PROMPT))
    side.add(request)
    side.allocated(request, BLOCKS, 16)
    side.step(Output())
    side.received(["d"])
    assert side.matched_tokens(request, 0) == (0, False)
    side.allocated(request, BLOCKS, 0)
    assert side.step(Output()) == NOTHING


def test_a_request_that_ends_while_it_loads_is_cancelled_and_one_that_waits_is_declined() -> None:
    side, params = scheduler(), handed(PROMPT)
    loading, waiting = Request("a", list(PROMPT), params), Request("b", list(PROMPT), handed(PROMPT))
    for request in (loading, waiting):
        side.add(request)
    side.allocated(loading, BLOCKS, 16)
    side.step(Output())
    for request in (loading, waiting):
        assert side.finished(request, well=False) == (False, None)
    step = side.step(Output())
    assert step.cancelled == ("a",)
    assert [ticket for ticket, _ in step.declined] == [waiting.kv_transfer_params[TICKET_KEY]]


def test_a_prompt_that_is_all_in_the_local_cache_declines_its_ticket() -> None:
    side, params = scheduler(), handed(PROMPT)
    request = Request("d", list(PROMPT), params)
    side.add(request)
    assert side.matched_tokens(request, 16) == (0, False)
    side.allocated(request, BLOCKS, 0)
    assert side.step(Output()).declined == ((params[TICKET_KEY], "not needed"),)


def _edited(**changes: Any) -> dict[str, Any]:
    return {**handed(PROMPT), **changes}


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ([7, *PROMPT[1:]], handed(PROMPT), "another prompt"),
        ([*PROMPT, 1], handed(PROMPT), "stands at token 16"),
        (PROMPT, _edited(**{TICKET_KEY: None}), "no pdxfer_ticket"),
        (PROMPT, _edited(**{TICKET_KEY: 5}), "no pdxfer_ticket"),
        (PROMPT, _edited(**{TICKET_KEY: "AAAA"}), "not a ticket"),
        (PROMPT, {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_host": "h"}, "no pdxfer_ticket"),
    ],
    ids=["other prompt", "other length", "none", "number", "garbage", "another connector's"],
)
def test_a_wrong_ticket_becomes_a_load_that_fails(prompt: list[int], params: dict[str, Any], says: str) -> None:
    side = scheduler()
    request = Request("d", list(prompt), params)
    side.add(request)
    count, asynchronous = side.matched_tokens(request, 0)
    assert (count, asynchronous) == (len(prompt) - 1, True)
    side.allocated(request, BLOCKS, count)
    step = side.step(Output())
    assert says in step.loads[0].error
    assert step.keep == ()
    assert side.finished(request, well=False) == (False, None)
    assert side.step(Output()).declined == ()  # whosever ticket it is, it is not ours to end


def test_roles_are_kept() -> None:
    producer, consumer = scheduler(consumer=False), scheduler(producer=False)
    request = Request("d", list(PROMPT), handed(PROMPT))
    producer.add(request)
    producer.allocated(request, BLOCKS, 16)
    assert "kv_producer" in producer.step(Output()).loads[0].error
    request = Request("p", list(PROMPT), {"do_remote_decode": True})
    consumer.add(request)
    assert request.prompt_token_ids == PROMPT


def test_everything_that_caches_depend_on_is_in_the_context() -> None:
    contexts = [
        prompt_context(PROMPT),
        prompt_context(PROMPT[:-1]),
        prompt_context(PROMPT, adapter="a"),
        prompt_context(PROMPT, salt="a"),
        prompt_context(PROMPT, media=["a"]),
        prompt_context(PROMPT, media=["a", ""]),
    ]
    assert len(set(contexts)) == len(contexts)
    assert all(len(context) == 16 for context in contexts)
    with pytest.raises(MisuseError, match="not token ids"):
        prompt_context([1 << 40])


def test_settings_name_the_key_and_what_is_known() -> None:
    settings = Settings.parse({"timeout_s": 5, "lease_s": 9, "transports": ["tcp"], "transfer_mode": "packed"}, "e")
    assert (settings.worker, settings.timeout_s, settings.agent.lease_s) == ("e", 5.0, 9)
    assert (settings.agent.transports, settings.agent.mode) == (("tcp",), "packed")
    for extra, says in [
        ({"timeout": 5}, "'timeout_s'"),
        ({"mode": "sidecar"}, "sidecar"),
        ({"timeout_s": "long"}, "long"),
        ({"timeout_s": 0}, "positive"),
        ({"lease_s": -1}, "lease_s"),
        ({"transports": []}, "transport"),
    ]:
        with pytest.raises(MisuseError) as caught:
            Settings.parse(extra, "e")
        assert says in f"{caught.value.message} {caught.value.hint}"


def test_ranks_of_one_machine_get_ports_of_their_own() -> None:
    extra = {"control": ["tcp://127.0.0.1:7000"], "listen": {"tcp": "tcp://127.0.0.1:0"}, "transports": ["tcp"]}
    config = Settings.parse(extra, "e").agent_config(3)
    assert (config.rank, config.control, config.listen) == (3, ("tcp://127.0.0.1:7003",), {"tcp": "tcp://127.0.0.1:0"})


def test_versions_are_refused_by_name() -> None:
    check_version("0.32.0", allow_untested=False)
    check_version("0.34.1", allow_untested=True)
    for version, allow in [("0.29.0", True), ("0.34.1", False), ("0.29.0", False), ("dev", False)]:
        with pytest.raises(MisuseError, match=version):
            check_version(version, allow_untested=allow)


@pytest.mark.parametrize("headers", [None, {}, {"traceparent": "nonsense"}, "nonsense"])
def test_the_trace_of_the_request_s_headers_is_in_the_ticket(headers: Any) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for sent, carried in ((headers, ""), ({"traceparent": trace}, trace)):
        side = scheduler()
        request = Request("r", list(PROMPT), {"do_remote_decode": True}, trace_headers=sent)
        side.add(request)
        step = side.step(Output({"r": len(PROMPT) - 1}, [New("r", 0)]))
        assert step.offers[0].trace == carried
        _, params = side.finished(request, well=True)
        assert params is not None
        assert Ticket.decode(params[TICKET_KEY]).trace == carried
