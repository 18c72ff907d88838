"""Step: what the scheduler's half of the vLLM connector tells every worker's half, once per engine step.

Plain frozen values, so that both halves can be read (and tested) without vLLM. A request is named by vLLM's id.
Block ids are vLLM's: per KV cache group, in group order; ``vllm_tensors`` turns them into pages.

::

    prefill   Offer ───────────────▶ (response with the ticket) ──▶ handed ─▶ worker reports it sent
                └▶ withdrawn (preempted, aborted: nobody has its ticket)
    decode    keep ─▶ Load ─▶ worker reports it received or failed
                │       └▶ cancelled
                └▶ declined (never needed)
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BlockIds", "Load", "Offer", "Step"]

BlockIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Prefill of a request ends in this step: offer its pages once the forward pass is launched.

    ``tokens`` is where state and KV stand; ``nonce``, ``context``, ``tenant`` and ``trace`` go into the ticket, which
    the scheduler writes.
    """

    request: str
    transfer: str
    blocks: BlockIds
    tokens: int
    nonce: bytes
    context: bytes
    tenant: str = ""
    trace: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Fetch a request into these blocks; rows before ``first_token`` are here already. ``error``: fail it at once."""

    request: str
    ticket: str
    blocks: BlockIds
    tokens: int
    first_token: int
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """All orders of one step; request ids unless said otherwise.

    Attributes:
        withdrawn: offers that nobody will come for. handed: offers whose ticket went out with the response.
        cancelled: loads of requests that ended. keep: tickets whose leases to renew until they are loaded.
        declined: (ticket, reason): the source may free it.
        idle: the step computes nothing; the engine only asks what became of transfers.
    """

    offers: tuple[Offer, ...] = ()
    withdrawn: tuple[str, ...] = ()
    handed: tuple[str, ...] = ()
    loads: tuple[Load, ...] = ()
    cancelled: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    declined: tuple[tuple[str, str], ...] = ()
    idle: bool = False
