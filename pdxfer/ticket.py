"""The ticket: what a source worker hands out so that one target worker may fetch one transfer, once.

In come the facts of an offer; out goes a short text that travels through routers and clients, none of whom
is trusted. Each source rank seals its own part with a key that never leaves its worker, so an edited, invented
or outlived ticket is refused by the rank it is shown to. Addresses in a ticket are where the target connects:
only show tickets from routers you run.

A rank's ``RankIssuer`` writes its part: in the agent itself, or in the worker's scheduler process, which must
answer before it hears from the ranks.

::

    Ticket ── transfer, worker, layout digest, token counts, bytes, tokens sampled, context,   the same for all ranks
       │      tenant, audience, lifetime
       └── RankTicket x ranks ── control address, epoch, nonce, key id, seal                   one per source rank
                                                              seal = HMAC-SHA256 over everything left of it

Pages, slots and their generation are sealed through the nonce: the source keeps it with the very hold that has them,
gives every offer a new one, and forgets it with the offer. (The scheduler that writes a ticket knows the nonce, but
not yet which generation the ranks will give out.) The lifetime is a duration, counted by the source on its own
monotonic clock from the offer on, so that no clock has to agree with another.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgpack

from pdxfer.errors import StaleError, TicketError
from pdxfer.keys import TicketKeys, check_key, key_id
from pdxfer.spec import RequestSizes, request_bytes
from pdxfer.trace import traceparent

__all__ = ["TICKET_VERSION", "RankIssuer", "RankTicket", "Ticket", "issue_ticket", "plain", "seal_rank", "unseal"]

TICKET_VERSION = 3
#: Default of how long a ticket is good for, in seconds; the lease may end sooner.
LIFETIME_S = 600
_MAX_TEXT = 64 << 10
_MAX_NAME = 256
_MAX_ITEMS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTicket:
    """One source rank's part. ``nonce``: 16 random bytes, new for every offer, so that an id may be used again.
    ``key_id``: which of the source's keys made the seal.
    """

    rank: int
    address: str
    epoch: bytes
    nonce: bytes
    key_id: bytes = bytes(8)
    seal: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A whole offer.

    Attributes:
        transfer: id of the transfer, unique while the source lives.
        worker: the source worker; layout_digest: of its layout.
        state_tokens: how many tokens S and Conv have seen (vLLM hands over N-1, transformers and SGLang N).
        kv_tokens: tokens whose per-token rows are valid.
        sampled: tokens that the source already sampled after the prompt.
        context: digest of what the caches were computed from, at most 32 bytes; engines compare it. Empty: not said.
        nbytes: of the request's unique state in the source's dtypes; the target computes it, too, and compares.
        tenant: whose request it is; "" where there is only one. audience: the only worker that may fetch it, or "":
            any that the source lets in; the first one that opens it is then the only one.
        lifetime_s: seconds from the offer on in which the source looks at it at all.
        ranks: one part per source rank, in rank order.
        trace: W3C traceparent, or "". Not sealed: it decides nothing.
    """

    transfer: str
    worker: str
    layout_digest: str
    state_tokens: int
    kv_tokens: int
    sampled: tuple[int, ...] = ()
    context: bytes = b""
    nbytes: int = 0
    tenant: str = ""
    audience: str = ""
    lifetime_s: int = LIFETIME_S
    ranks: tuple[RankTicket, ...] = ()
    trace: str = ""
    _text: str = field(default_factory=str, init=False, compare=False, repr=False)  # what it was decoded from

    def encode(self) -> str:
        """ASCII text (base64 of msgpack); ``decode`` is the inverse."""
        if self._text:
            return self._text
        return self._written([[r.rank, r.address, r.epoch, r.nonce, r.key_id, r.seal] for r in self.ranks])

    def _written(self, ranks: list[list[Any]]) -> str:
        trace = [self.trace] if self.trace else []
        return base64.urlsafe_b64encode(msgpack.packb([TICKET_VERSION, *self._common(), ranks, *trace])).decode()

    @classmethod
    def decode(cls, text: str | bytes) -> Ticket:
        """Parse a ticket; raises TicketError for anything that is not one."""
        return _decode(text)

    @classmethod
    def _decoded(cls, text: str | bytes) -> Ticket:
        if len(text) > _MAX_TEXT:
            raise TicketError(f"the ticket has {len(text)} characters; at most {_MAX_TEXT} are allowed")
        try:
            raw = base64.b64decode(text, altchars=b"-_", validate=True)
            fields = msgpack.unpackb(raw, max_ext_len=0, max_map_len=0, max_array_len=_MAX_ITEMS)
            version, *common = fields
        except (ValueError, TypeError, binascii.Error, msgpack.UnpackException) as error:
            raise TicketError("not a ticket: it can't be decoded", hint="was it cut off on its way?") from error
        if version != TICKET_VERSION:
            raise TicketError(f"ticket version {version!r}; this pdxfer reads version {TICKET_VERSION}")
        trace = common.pop() if len(common) == 13 else ""
        *common, ranks = _list(common, 12)
        transfer, worker, digest, state_tokens, kv_tokens, sampled, context, nbytes, tenant, audience, lifetime_s = (
            common
        )
        _expect([transfer, worker, digest, tenant, audience], str)
        _expect([state_tokens, kv_tokens, nbytes, lifetime_s, *_list(sampled)], int)
        _expect([context], bytes)
        if max(map(len, (transfer, worker, digest, tenant, audience))) > _MAX_NAME:
            raise TicketError("not a ticket: a name in it is too long")
        if len(context) > 32:
            raise TicketError(f"not a ticket: its context has {len(context)} bytes")
        ticket = cls(
            transfer=transfer,
            worker=worker,
            layout_digest=digest,
            state_tokens=state_tokens,
            kv_tokens=kv_tokens,
            sampled=tuple(sampled),
            context=context,
            nbytes=nbytes,
            tenant=tenant,
            audience=audience,
            lifetime_s=lifetime_s,
            ranks=tuple(_rank(r) for r in _list(ranks)),
            trace=traceparent(trace),
        )
        # base64 and msgpack can write one value in many ways; with one text per ticket, any edit is seen.
        written = ticket.encode()
        if written.encode() != (text.encode() if isinstance(text, str) else text):
            raise TicketError("not a ticket: it is not written as we write it", hint="was it changed on its way?")
        object.__setattr__(ticket, "_text", written)
        return ticket

    def rank(self, rank: int) -> RankTicket:
        """The part of one source rank; raises TicketError when it is missing."""
        for part in self.ranks:
            if part.rank == rank:
                return part
        raise TicketError(f"the ticket of {self.transfer!r} has no part for source rank {rank}")

    @classmethod
    def join(cls, parts: Sequence[Ticket]) -> Ticket:
        """Make one ticket of the source ranks' own; raises TicketError when they disagree."""
        if not parts:
            raise TicketError("there is no ticket to join")
        for part in parts[1:]:
            if part._common() != parts[0]._common():
                raise TicketError(
                    f"ranks disagree about transfer {parts[0].transfer!r}: {parts[0]._common()} and {part._common()}"
                )
        ranks = sorted((r for part in parts for r in part.ranks), key=lambda r: r.rank)
        if [r.rank for r in ranks] != list(range(len(ranks))):
            raise TicketError(f"the parts of {parts[0].transfer!r} are of ranks {[r.rank for r in ranks]}")
        return replace(parts[0], ranks=tuple(ranks))

    def _common(self) -> list[Any]:
        tokens = [self.state_tokens, self.kv_tokens, list(self.sampled)]
        who = [self.nbytes, self.tenant, self.audience, self.lifetime_s]
        return [self.transfer, self.worker, self.layout_digest, *tokens, self.context, *who]

    def sealed_bytes(self, part: RankTicket) -> bytes:
        """What a rank's seal covers."""
        packed: bytes = msgpack.packb(
            [TICKET_VERSION, *self._common(), part.rank, part.address, part.epoch, part.nonce, part.key_id]
        )
        return packed


@lru_cache(maxsize=64)
def _decode(text: str | bytes) -> Ticket:
    """Whoever offers, keeps, fetches or serves a transfer comes with the same text again."""
    return Ticket._decoded(text)


def seal_rank(ticket: Ticket, part: RankTicket, key: bytes) -> Ticket:
    """Return the ticket with ``part`` sealed under ``key`` as its only rank."""
    part = replace(part, key_id=key_id(key))
    return replace(ticket, ranks=(replace(part, seal=hmac.digest(key, ticket.sealed_bytes(part), "sha256")),))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIssuer:
    """Writes one rank's part of tickets. Whoever has it can offer in the rank's name: it stays in the worker."""

    worker: str
    layout_digest: str
    rank: int
    address: str
    epoch: bytes
    keys: TicketKeys = field(repr=False)
    sizes: RequestSizes = ()
    lifetime_s: int = LIFETIME_S

    def issue(
        self,
        transfer: str,
        *,
        kv_tokens: int,
        state_tokens: int,
        nonce: bytes,
        sampled: Sequence[int] = (),
        context: bytes = b"",
        tenant: str = "",
        audience: str = "",
        trace: str = "",
    ) -> Ticket:
        """Return the ticket with this rank's sealed part; raises TicketError when no ticket can carry it."""
        try:
            tokens = plain(kv_tokens)
            key = self.keys.active()[0]
            part = RankTicket(rank=self.rank, address=self.address, epoch=self.epoch, nonce=nonce, key_id=key_id(key))
            common = Ticket(
                transfer=transfer,
                worker=self.worker,
                layout_digest=self.layout_digest,
                state_tokens=plain(state_tokens),
                kv_tokens=tokens,
                sampled=tuple(map(plain, sampled)),
                context=context,
                nbytes=request_bytes(self.sizes, tokens),
                tenant=tenant,
                audience=audience,
                lifetime_s=self.lifetime_s,
                trace=traceparent(trace),
            )
            seal = hmac.digest(key, common.sealed_bytes(part), "sha256")
            fields = [part.rank, part.address, part.epoch, part.nonce, part.key_id, seal]
            return Ticket.decode(common._written([fields]))  # which checks them as every reader will
        except (TypeError, ValueError, OverflowError) as error:
            raise TicketError(f"{transfer!r}: no ticket can carry this offer: {error}") from error


def plain(number: Any) -> Any:
    """NumPy's integers, which engines have, as Python's, which a ticket can carry; all else as it is, to be judged."""
    return number if isinstance(number, bool) or not hasattr(number, "__index__") else operator.index(number)


def issue_ticket(issuers: Sequence[RankIssuer], transfer: str, **facts: Any) -> Ticket:
    """Return the whole ticket of all ranks; ``facts`` as in ``RankIssuer.issue``, one nonce for all."""
    return Ticket.join([issuer.issue(transfer, **facts) for issuer in issuers])


def unseal(ticket: Ticket, rank: int, epoch: bytes, keys: Sequence[bytes]) -> RankTicket:
    """Return the part of ``rank`` when its seal is ours: made with one of ``keys``, the active ones.

    Raises:
        StaleError: it was sealed in another life of this agent (the key of that epoch is gone).
        TicketError: it was edited.
    """
    part = ticket.rank(rank)
    if part.epoch != epoch:
        raise StaleError(f"the ticket of {ticket.transfer!r} is of another epoch of this agent", reason="EPOCH_CHANGED")
    sealed = ticket.sealed_bytes(part)
    # Every key is tried, whatever the id says: how long it takes tells nobody which of them exists.
    ours = [hmac.compare_digest(part.seal, hmac.digest(key, sealed, "sha256")) for key in keys if check_key(key)]
    if not any(ours):
        hint = "it was edited on its way, or sealed by another agent"
        raise TicketError(
            f"the ticket of {ticket.transfer!r} does not carry this agent's seal for rank {rank}", hint=hint
        )
    return part


def _rank(fields: Any) -> RankTicket:
    rank, address, epoch, nonce, key, seal = _list(fields, 6)
    _expect([rank], int)
    _expect([epoch, nonce, key, seal], bytes)
    _expect([address], str)
    if [len(b) for b in (epoch, nonce, key, seal)] != [16, 16, 8, 32] or len(address) > _MAX_NAME:
        raise TicketError("not a ticket: a rank's part is out of bounds")
    return RankTicket(rank=rank, address=address, epoch=epoch, nonce=nonce, key_id=key, seal=seal)


def _list(value: Any, n: int = -1) -> list[Any]:
    if not isinstance(value, list) or len(value) > _MAX_ITEMS or (n >= 0 and len(value) != n):
        raise TicketError("not a ticket: a list is missing, too long or too short")
    return value


def _expect(values: Sequence[Any], kind: type) -> None:
    if any(type(v) is not kind for v in values) or (kind is int and min(values, default=0) < 0):
        raise TicketError(f"not a ticket: expected {kind.__name__} values")
