"""Scheduler: the half of the vLLM connector that runs in the engine core: which request to offer, load, or neither.

In come vLLM's scheduler hooks; out come ``Step`` orders for the workers and tickets for responses. It opens no
connection and touches no memory. Requests are used by the attributes that vLLM's ``Request`` has; every value
in their ``kv_transfer_params`` may come from a client and is checked. No hook raises: an exception here would end
the engine, so a bad ticket becomes a load that fails, which vLLM answers by its ``kv_load_failure_policy``.

The N-1 rule: decode must run the prompt's last token itself (it wants its logits), and for that needs the state
*before* it. Prefill therefore drops the last token, and both sides stand at T = N - 1 tokens. It holds for models
without recurrent state too: one rule, one token.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdxfer.connectors.context import prompt_context, tenant_of
from pdxfer.connectors.vllm_step import BlockIds, Load, Offer, Step
from pdxfer.errors import MisuseError, PdxferError, TicketError
from pdxfer.ticket import RankIssuer, Ticket, issue_ticket
from pdxfer.trace import HEADER, traceparent

__all__ = ["TICKET_KEY", "SchedulerSide"]

#: Where the ticket lies in ``kv_transfer_params``; the other names there are those of vLLM's own connectors.
TICKET_KEY = "pdxfer_ticket"

_log = logging.getLogger("pdxfer.vllm")


@dataclass(slots=True, kw_only=True)
class _Prefill:
    """A request whose caches we shall hand out. ``offer`` is set while its pages are sealed."""

    tokens: int
    context: bytes
    tenant: str
    trace: str
    offer: Offer | None = None


@dataclass(slots=True, kw_only=True)
class _Decode:
    """A request whose caches we shall fetch: ``tokens`` of them. ``waiting`` until the load is ordered or needless."""

    tokens: int
    text: str = ""
    error: str = ""
    waiting: bool = True
    loading: bool = False


@dataclass(slots=True)
class _Orders:
    """What the next ``Step`` will say."""

    offers: list[Offer] = field(default_factory=list)
    withdrawn: list[str] = field(default_factory=list)
    handed: list[str] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    declined: list[tuple[str, str]] = field(default_factory=list)

    def step(self, *, idle: bool) -> Step:
        return Step(idle=idle, **{name: tuple(getattr(self, name)) for name in self.__slots__})


class SchedulerSide:
    """Bookkeeping of one engine. Called from the engine core's thread only.

    Args:
        engine_id: ours, as vLLM names it. producer, consumer: what our role allows.
        blocks_of: block ids of a request, per group.
    """

    def __init__(
        self, *, engine_id: str, producer: bool, consumer: bool, blocks_of: Callable[[str], Sequence[Sequence[int]]]
    ) -> None:
        self._engine_id, self._producer, self._consumer, self._blocks_of = engine_id, producer, consumer, blocks_of
        self._issuers: tuple[RankIssuer, ...] = ()
        self._prefills: dict[str, _Prefill] = {}
        self._decodes: dict[str, _Decode] = {}
        self._orders = _Orders()

    def meet_workers(self, issuers: Iterable[RankIssuer]) -> None:
        """Learn how to write tickets in the name of every rank's agent; once, at start-up."""
        self._issuers = tuple(sorted(issuers, key=lambda issuer: issuer.rank))

    # -- a request comes ---------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """vLLM's ``on_new_request``."""
        params = request.kv_transfer_params
        if not isinstance(params, Mapping):
            return
        if params.get("do_remote_decode"):
            self._add_prefill(request)
        elif params.get("do_remote_prefill"):
            self._add_decode(request, params)

    def _add_prefill(self, request: Any) -> None:
        tokens = request.num_prompt_tokens - 1
        why_not = (
            "this server's kv_role is kv_consumer" if not self._producer
            else "a prompt of one token leaves nothing to hand over" if tokens < 1
            else "prompt embeddings have no token ids to name them by" if request.prompt_token_ids is None
            else "decode computes the whole prompt of such a request itself (prompt logprobs)"
            if request.skip_reading_prefix_cache
            else "the workers have not said how to reach them" if not self._issuers
            else ""
        )  # fmt: skip
        if why_not:
            _log.info("request %s is not handed over: %s", request.request_id, why_not)
            return
        try:
            context = _context_of(request, tokens)
        except MisuseError as error:
            _log.warning("request %s is not handed over: %s", request.request_id, error)
            return
        _drop_last_token(request)
        self._prefills[request.request_id] = _Prefill(
            tokens=tokens, context=context, tenant=tenant_of(request.cache_salt), trace=_trace_of(request)
        )

    def _add_decode(self, request: Any, params: Mapping[str, Any]) -> None:
        text = params.get(TICKET_KEY)
        decode = _Decode(tokens=request.num_prompt_tokens - 1, text=text if isinstance(text, str) else "")
        try:
            if not self._consumer:
                raise MisuseError("this server's kv_role is kv_producer", hint="send the request to a kv_consumer")
            _check_ticket(request, params, decode.tokens)
            self._orders.keep.append(decode.text)
        except PdxferError as error:
            decode.error = f"{error.reason}: {error.message}"
            _log.warning("request %s can't be fetched: %s", request.request_id, error)
        self._decodes[request.request_id] = decode

    # -- it is scheduled ---------------------------------------------------------------------------

    def matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        """vLLM's ``get_num_new_matched_tokens``: how many tokens we would bring beyond ``computed`` local ones."""
        decode = self._decodes.get(request.request_id)
        count = decode.tokens - computed if decode is not None and decode.waiting else 0
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Any, blocks: Sequence[Sequence[int]], external: int) -> None:
        """vLLM's ``update_state_after_alloc``: called with our count, or with 0 for anything else."""
        decode = self._decodes.get(request.request_id)
        if decode is None or not decode.waiting:
            return
        decode.waiting = False
        if not external:  # all of it is in the local prefix cache, or may not be read from a cache at all
            self._decline(decode, "not needed")
            return
        decode.loading = True
        load = Load(
            request=request.request_id,
            ticket=decode.text,
            blocks=_block_ids(blocks),
            tokens=decode.tokens,
            first_token=decode.tokens - external,
            error=decode.error,
        )
        self._orders.loads.append(load)

    def step(self, output: Any) -> Step:
        """vLLM's ``build_connector_meta``: everything ordered since the last step, and offers for what ends in this."""
        for request_id in output.preempted_req_ids or ():
            prefill = self._prefills.get(request_id)
            if prefill is not None and prefill.offer is not None:  # its pages are free again; it will be offered anew
                self._orders.withdrawn.append(request_id)
                prefill.offer = None
        cached = output.scheduled_cached_reqs
        before = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, scheduled in output.num_scheduled_tokens.items():
            prefill = self._prefills.get(request_id)
            if prefill is not None and prefill.offer is None:
                self._offer_if_done(request_id, prefill, before.get(request_id, 0) + scheduled)
        orders, self._orders = self._orders, _Orders()
        return orders.step(idle=not output.num_scheduled_tokens)

    def _offer_if_done(self, request_id: str, prefill: _Prefill, computed: int) -> None:
        if computed < prefill.tokens:
            return
        if computed > prefill.tokens:  # rows of drafts were padded in: the state may stand beyond T
            _log.warning("request %s is not handed over: it stands at %d, not %d", request_id, computed, prefill.tokens)
            del self._prefills[request_id]
            return
        prefill.offer = Offer(
            request=request_id,
            transfer=f"{request_id[-64:]}:{secrets.token_hex(8)}",
            blocks=_block_ids(self._blocks_of(request_id)),
            tokens=prefill.tokens,
            nonce=secrets.token_bytes(16),
            context=prefill.context,
            tenant=prefill.tenant,
            trace=prefill.trace,
        )
        self._orders.offers.append(prefill.offer)

    # -- it ends -----------------------------------------------------------------------------------

    def finished(self, request: Any, *, well: bool) -> tuple[bool, dict[str, Any] | None]:
        """vLLM's ``request_finished_all_groups``: whether we keep its blocks, and what the router gets.

        Args:
            well: it ended by itself (length or stop), not by abort or error.
        """
        decode = self._decodes.pop(request.request_id, None)
        if decode is not None and decode.waiting:
            self._decline(decode, "the request ended before it was scheduled")
        elif decode is not None and decode.loading:
            self._orders.cancelled.append(request.request_id)
        prefill = self._prefills.pop(request.request_id, None)
        if prefill is None or prefill.offer is None:
            return False, None
        if not well:
            self._orders.withdrawn.append(request.request_id)
            return False, None
        self._orders.handed.append(request.request_id)
        return True, self._params(prefill.offer)

    def _params(self, offer: Offer) -> dict[str, Any]:
        ticket = issue_ticket(
            self._issuers,
            offer.transfer,
            kv_tokens=offer.tokens,
            state_tokens=offer.tokens,
            context=offer.context,
            nonce=offer.nonce,
            tenant=offer.tenant,
            trace=offer.trace,
        )
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": offer.request,
            "remote_block_ids": [],
            "remote_host": None,
            "remote_port": None,
            "tp_size": len(self._issuers),
            "remote_num_tokens": offer.tokens,
            TICKET_KEY: ticket.encode(),
        }

    def received(self, request_ids: Iterable[str]) -> None:
        """vLLM's ``update_connector_output``: these loads are over, well or not."""
        for request_id in request_ids:
            decode = self._decodes.get(request_id)
            if decode is not None:
                decode.loading = False

    def _decline(self, decode: _Decode, reason: str) -> None:
        if decode.text and not decode.error:
            self._orders.declined.append((decode.text, reason))


def _trace_of(request: Any) -> str:
    """The traceparent that came with the request's HTTP headers, or ""."""
    headers = getattr(request, "trace_headers", None)
    return traceparent(headers.get(HEADER)) if isinstance(headers, Mapping) else ""


def _context_of(request: Any, tokens: int) -> bytes:
    """What the caches of the first ``tokens`` tokens are computed from."""
    return prompt_context(
        request.prompt_token_ids[:tokens],
        adapter=request.lora_request.lora_name if request.lora_request is not None else "",
        salt=request.cache_salt or "",
        media=[str(feature.identifier) for feature in request.mm_features or ()],
    )


def _check_ticket(request: Any, params: Mapping[str, Any], tokens: int) -> None:
    """Raise unless the ticket is one for exactly this prompt, at the token where this engine continues."""
    text = params.get(TICKET_KEY)
    if not isinstance(text, str):
        hint = "the prefill server must run this connector, and the router must pass kv_transfer_params on unchanged"
        raise TicketError(f"kv_transfer_params has no {TICKET_KEY}", hint=hint)
    ticket = Ticket.decode(text)
    if (ticket.state_tokens, ticket.kv_tokens) != (tokens, tokens):
        raise TicketError(
            f"the ticket stands at token {ticket.state_tokens} (KV {ticket.kv_tokens}), this prompt needs {tokens}",
            hint="vLLM continues from the prompt without its last token",
        )
    if ticket.tenant != tenant_of(request.cache_salt):
        raise TicketError("the ticket is another tenant's", hint="both requests need the same cache_salt")
    if request.prompt_token_ids is None or ticket.context != _context_of(request, tokens):
        raise TicketError("the ticket is of another prompt", hint="the router gave this request another one's ticket")


def _drop_last_token(request: Any) -> None:
    """Shorten a prompt by one token, everywhere vLLM's ``Request`` keeps it, and ask for one token."""
    request.prompt_token_ids = request.prompt_token_ids[:-1]  # the list may be shared with others of n > 1
    del request._all_token_ids[-1:]  # its own, and seen through a read-only view made at its start
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def _block_ids(blocks: Sequence[Sequence[int]]) -> BlockIds:
    return tuple(tuple(group) for group in blocks)
