"""Planted bugs: each changes a line or two of production while inside, and nothing of production knows of it.

In comes a name of ``MUTATIONS``; out comes production with that one bug. A text that is not found, or found twice, is
an error: production has moved on, and the bug has to be planted anew.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from unittest import mock

__all__ = ["FIRST", "FOCUS", "MUTATIONS", "SCALED", "Mutation", "planted"]


@dataclass(frozen=True)
class Mutation:
    """``old`` becomes ``new`` in the function ``where`` (module:qualified.name); both are pieces of its source."""

    where: str
    old: str
    new: str


def _m(where: str, old: str, new: str) -> Mutation:
    return Mutation(f"pdxfer.{where}", old, new)


_COMPLETE = "transfer:Offer.complete"

MUTATIONS: dict[str, tuple[Mutation, ...]] = {
    "a Complete is not checked against lease and generation": (
        _m(_COMPLETE, "self.check_live(now_s)", "pass"),
        _m(_COMPLETE, "generation != self.generation", "False"),
    ),
    "a second Complete completes again": (_m(_COMPLETE, "return False\n    self.check", "pass\n    self.check"),),
    "a second Complete is an error": (
        _m(_COMPLETE, "if found.done:\n        return False", "if found.done:\n        raise StaleError('twice')"),
    ),
    "READY before verified": (_m("driver:EdgeReader._verify", "if not intact", "if False"),),
    "the first segment is not verified": (_m("driver:EdgeReader._verify", "if not intact", "if index and not intact"),),
    "a duplicate chunk is accepted": (
        _m("transfer:Intake.expect", "if chunk not in self._underway", "if False"),
        _m("transfer:Intake.accept", "self._underway.remove(chunk)", "self._underway.discard(chunk)"),
    ),
    "a credit is lost with every chunk": (
        _m("transfer:Intake.accept", "self._underway.remove(chunk)", "pass"),
    ),
    "a source's pages are free before its threads are quiet": (
        _m("agent.source:Source._release_quiet", "if r.quiet()", "if True"),
    ),
    "a completed source does not wait for sessions that were replaced": (
        _m("agent.source:Source._free_completed", "quiet = record.quiet()", "quiet = True"),
    ),
    "a lease ends without fencing": (_m("agent.source:_Record.quiet", "return all(", "return True or all("),),
    "a lease never ends": (_m("transfer:Offer.expired", "return not self.ended and", "return False and"),),
    "an ended session is still served": (
        _m("agent.serve:SourceSession.answer", "if self._closed:", "if False:"),
        _m("agent.serve:SourceSession.answer", "self.check_live()", "pass"),
        _m(_COMPLETE, "self.check_live(now_s)", "pass"),
    ),
    "siblings read before everything is in": (
        _m(
            "agent.fetch:Fetch._move",
            "if self._relay is not None:\n        self.agent.source.relay_ready(self.ticket.transfer)",
            "pass",
        ),
        _m(
            "agent.fetch:Fetch._move",
            "ranks = list(peers)",
            "self._relay and self.agent.source.relay_ready(self.ticket.transfer)\n    ranks = list(peers)",
        ),
    ),
    "READY before siblings have read": (_m("agent.fetch:Fetch._await_readers", "relay = self._relay", "relay = None"),),
    "an edge's error is swallowed": (
        _m("agent.fetch:Fetch._edge", "if self._cancel.set(", "if False and self._cancel.set("),
        _m("agent.fetch:Fetch._check_whole", "if missing :=", "if False and (missing := True) and"),
    ),
    "a ticket's seal is not checked": (_m("agent.source:unseal", "if not any(ours)", "if False"),),
    "a ticket's nonce is not checked": (
        _m("agent.source:Source._admit_target", "if not hmac.compare_digest(part.nonce, record.nonce)", "if False"),
    ),
    "a ticket for another worker is accepted": (
        _m("agent.source:Source._admit_target", "if ticket.audience not in ", "if False and ticket.audience not in "),
        _m("agent.service:_check_meant", "if ticket.audience not in ", "if False and ticket.audience not in "),
    ),
    "a ticket works twice": (
        _m("transfer:Offer.open", "if earlier is not None and earlier.done", "if False"),
        _m("transfer:Offer.open", "self.check_live(now_s)", "pass"),
        _m("agent.source:Source.open", "record.offer.check_live(time.monotonic())", "pass"),
        _m("agent.source:_Record.forget_request", "self.side, self.sessions = None, {}", "pass"),
    ),
    "the deadline of a fetch is ignored": (
        _m("driver:_receive", "if left_s <= 0", "if False"),
        _m("driver:_receive", "min(_SLICE_S, left_s)", "_SLICE_S"),
    ),
    "staging is freed before its message is released": (
        _m("agent.serve:Sent.reap", "self._blocks and self._blocks[0][0].done", "self._blocks"),
    ),
    "staging leaks when a session has ended": (
        _m("agent.serve:SourceSession.answer", "self.staging.free(block, wipe=self.wipe)", "pass"),
    ),
    "pages leak when a hold ends": (_m("transfer:Ledger._step", "self._users.pop(unit)", "self._users[unit]"),),
    "the fence is not awaited": (_m("agent.source:Source._fence", "fence()", "pass"),),
    "leases of kept tickets are not renewed": (
        _m("agent.keeper:Keeper.keep", "self._kept[ticket.transfer] = notes", "pass"),
    ),
    "a prefix that is here already is overwritten": (
        _m("pages:RequestShape.rows", "self.first_token // component.tokens_per_row", "0"),
    ),
    "a replaced session may complete": (
        _m("transfer:Offer._reader", "found.session != session", "False"),
        _m("agent.source:Source.open", "earlier.close()", "pass"),
    ),
    "channels of a dead peer are kept open": (
        _m("agent.peers:Peers.give_back", "not channel.channel.closed and", "False and"),
        _m("agent.peers:Peers.give_back", "channel.close()", "pass"),
    ),
}  # fmt: skip

#: Where to look for the rarer ones: faults and stories that the simulator keeps to.
FOCUS: dict[str, dict[str, tuple[str, ...]]] = {
    "the first segment is not verified": {"faults": ("corrupt", "truncate", "zero")},
    "READY before verified": {"faults": ("corrupt", "zero")},
    "a duplicate chunk is accepted": {"faults": ("duplicate",)},
    "a second Complete completes again": {"faults": ("lose_closed", "cut_answer")},
    "a second Complete is an error": {"faults": ("lose_closed", "cut_answer")},
    "a source's pages are free before its threads are quiet": {"faults": ("stall",), "stories": ("withdrawn",)},
    "a completed source does not wait for sessions that were replaced": {"faults": ("stall",), "stories": ("doubled",)},
    "a lease ends without fencing": {"faults": ("stall",), "stories": ("withdrawn",)},
    "an ended session is still served": {"stories": ("withdrawn", "expired", "doubled")},
    "a ticket's seal is not checked": {"stories": ("forged",)},
    "a ticket's nonce is not checked": {"stories": ("outlived", "plain")},
    "a ticket for another worker is accepted": {"stories": ("misdirected",)},
    "the deadline of a fetch is ignored": {"faults": ("drop",)},
    "staging leaks when a session has ended": {"stories": ("withdrawn", "cancelled")},
    "staging is freed before its message is released": {"stories": ("plain",)},
    "a replaced session may complete": {"stories": ("doubled",)},
}

#: A seed that is known to find a rare one; when production changes, the search goes on from seed 0.
FIRST: dict[str, int] = {
    "a source's pages are free before its threads are quiet": 9,
    "a completed source does not wait for sessions that were replaced": 8,
    "a lease ends without fencing": 5,
    "a duplicate chunk is accepted": 4,
    "a credit is lost with every chunk": 4,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Production with one bug of ``MUTATIONS``, or (``scaled``) with a plan that scales a replicated part."""
    with ExitStack() as stack:
        for mutation in MUTATIONS.get(name, ()):
            stack.enter_context(_replaced(mutation))
        if name == SCALED:
            for module in ("pdxfer.agent.source", "pdxfer.agent.fetch"):
                stack.enter_context(mock.patch(f"{module}.make_plan", _scaled(import_module(module).make_plan)))
        yield


SCALED = "a replicated part is scaled as if it were sharded"


def _scaled(make_plan):
    made = {}

    def scaled(source, target):
        plan = make_plan(source, target)
        if id(plan) not in made:
            edges = {edge: tuple(map(_halved, items)) for edge, items in plan.edges.items()}
            made[id(plan)] = plan, replace(plan)
            vars(made[id(plan)][1]).update(edges=edges, digest=plan.digest)
        return made[id(plan)][1]

    return scaled


def _halved(item):
    if item.component != "latent":
        return item
    box = replace(item.box, stops=tuple((a + b) // 2 for a, b in zip(item.box.starts, item.box.stops, strict=True)))
    return replace(item, box=box)


@contextmanager
def _replaced(mutation: Mutation) -> Iterator[None]:
    module, _, path = mutation.where.partition(":")
    *outer, name = path.split(".")
    owner = import_module(module)
    for part in outer:
        owner = getattr(owner, part)
    original = vars(owner)[name]
    source = getattr(original, "mutated_source", None) or textwrap.dedent(inspect.getsource(original))
    if source.count(mutation.old) != 1:
        raise LookupError(f"{mutation.where} has {source.count(mutation.old)} of {mutation.old!r}: plant it anew")
    changed = source.replace(mutation.old, mutation.new)
    found: dict = {}
    exec(compile(changed, f"<{mutation.where}, mutated>", "exec"), original.__globals__, found)
    made = found[name]
    made.mutated_source = changed
    with mock.patch.object(owner, name, made):
        yield
