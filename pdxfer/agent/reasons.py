"""Reasons: every stable reason of an error, with who is to blame, why it happens, and what to do.

In comes a reason; out comes a row, also for one that a peer made up: what a peer writes becomes no label and no key.
``pdxfer explain`` shows a row; metrics have its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["REASONS", "Reason", "reason_of"]


class Reason(NamedTuple):
    """One row. ``blame``: the part that failed."""

    name: str
    blame: str
    cause: str
    remedy: str


_ROWS = (
    ("ABORTED", "whoever gave up", "the engine, a sibling rank or the other worker gave it up",
     "look for the first error of the same transfer on the other ranks and on the other worker"),
    ("CLIENT_CLOSED", "this agent", "the agent was closing", "none: it ends with the process"),
    ("CORRUPT", "bytes", "bytes in the target's pages are not those that were sealed",
     "prefill again; if it comes back, test memory and network of both hosts (pdxfer doctor --peer)"),
    ("DEADLINE_EXCEEDED", "load, or the path", "nobody answered in time",
     "pdxfer ping the peer; raise call_s, stall_s or the fetch's timeout_s where cores are overbooked"),
    ("DRAINING", "nobody", "the agent takes nothing new: it is about to end", "send the request to another worker"),
    ("EPOCH_CHANGED", "the source", "its agent restarted after the ticket was made", "prefill again"),
    ("EXHAUSTED", "staging", "a bounded resource was full",
     "raise arena_bytes, lower chunk_bytes, or send fewer requests at once"),
    ("IDENTITY_REJECTED", "the pair of identities", "a certificate names nobody whom the other end lets in",
     "compare tls.peers with the URI or DNS name in the peer's certificate"),
    ("INCOMPATIBLE", "the pair of layouts", "the two workers can't be mapped exactly",
     "compare the field named in the message on both servers; restart one with the other's value"),
    ("INTERNAL", "pdxfer", "an invariant of pdxfer did not hold", "keep the log of both ends and report it"),
    ("LAYOUT_CHANGED", "the source", "its layout is not the one in the ticket", "prefill again"),
    ("LEASE_EXPIRED", "the target, too slow", "nobody opened or renewed it within the lease",
     "raise lease_s or hold_max_s, or shorten decode's queue"),
    ("MISUSE", "the caller", "the engine or its settings broke a documented rule", "see the message"),
    ("NOT_FOUND", "the caller", "nothing here has this name", "see the message"),
    ("PEER_FAILED", "the peer", "the other agent failed", "read its log for this transfer"),
    ("PEER_STOPPED", "the peer", "the other agent stopped during the call", "none, if it was meant; else read its log"),
    ("PEER_UNREACHABLE", "the peer, or the path", "nobody answers at its control address",
     "is the process there, is the address right, does a firewall or NetworkPolicy let it through?"),
    ("PROTOCOL", "the peer", "it sent what the protocol does not have", "compare the versions of the two agents"),
    ("PROTOCOL_VERSION", "the pair of versions", "the two agents speak different protocols", "upgrade the older one"),
    ("QUOTA", "one peer or tenant", "it takes more of the source at a time than quotas allow",
     "none: it is asked again; raise quotas, or send it fewer requests"),
    ("SIDECAR_LOST", "the sidecar", "the pdxfer agent of this engine is gone, or was, while it was asked",
     "none if it restarts: it is attached to again by itself; else start it"),
    ("SIDECAR_REFUSED", "the sidecar's owner", "what listens at the socket runs as another user",
     "run engine and sidecar as one user, each with that user's own directory for the socket"),
    ("SIDECAR_UNREACHABLE", "the sidecar", "nobody listens at its socket", "start pdxfer agent, or correct the path"),
    ("STALE", "the source", "what the ticket points to has moved on", "prefill again"),
    ("STALE_GENERATION", "the source", "its pages were used anew while they were read", "prefill again"),
    ("STALE_TICKET", "the router", "the ticket is of an earlier offer of this id", "pass tickets on once, unchanged"),
    ("TICKET_EXPIRED", "the router, too slow", "the ticket is older than its lifetime",
     "raise hold_max_s, or shorten decode's queue"),
    ("TICKET_REJECTED", "the router", "the ticket was edited, or is another agent's", "pass it on unchanged"),
    ("TICKET_USED", "the router", "the ticket has been used before", "one decode request per ticket: retry by prefill"),
    ("TRANSFER_ENDED", "the source", "the source had given it up (its timeline says why)", "prefill again"),
    ("TRANSPORT_FAILED", "the data path", "the connection for the bytes broke or could not be made",
     "pdxfer ping the peer: is its process alive, is the data port open, do both have a plane in common?"),
    ("UNKNOWN_LAYOUT", "the source", "it has forgotten our layout", "none: it is told again at once"),
    ("UNKNOWN_SESSION", "the source", "it has no such session (any more)", "prefill again"),
    ("UNKNOWN_TRANSFER", "the source", "it offers no such transfer (any more)",
     "tickets last for lease_s: let decode fetch earlier, or raise it"),
    ("UNSUPPORTED_MODEL", "the caller", "the model's config is of a type that is not known", "see the message"),
    ("WRONG_AUDIENCE", "the router", "the ticket is for another worker", "send the request where the ticket is for"),
    ("WRONG_TENANT", "the router", "the ticket is of another tenant's request", "never mix tenants' tickets up"),
)  # fmt: skip
_OTHER = Reason("OTHER", "the peer", "it gave a reason that this version does not know", "read the message")

REASONS: Mapping[str, Reason] = {row[0]: Reason(*row) for row in _ROWS}


def reason_of(name: str) -> Reason:
    """The row of a reason; one for all that are not known."""
    return REASONS.get(name, _OTHER)
