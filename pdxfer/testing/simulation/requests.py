"""What engines and routers do with one request, from prefill to decode, and what they may expect in return.

In comes a story (fetch it, cancel it, let it expire, show its ticket twice, ...); out comes its outcome, or an entry
in the world's errors: wrong bytes, an error that nothing explains, something that did not end in time.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pdxfer.agent import Fetch, Received
from pdxfer.errors import AbortedError, InternalError, MisuseError, PdxferError, StaleError, TicketError
from pdxfer.testing.simulation.virtual import Killed
from pdxfer.testing.simulation.worker import Held, Rank
from pdxfer.ticket import Ticket
from pdxfer.transfer import State

if TYPE_CHECKING:
    from pdxfer.testing.simulation.run import Simulation

__all__ = ["LEASE_S", "STORIES", "Gone", "Request"]

#: What may happen to a request, and how often.
STORIES = {
    "plain": 56, "prefix": 8, "kept": 6, "expired": 3, "cancelled": 6, "withdrawn": 4, "declined": 3, "replayed": 4,
    "forged": 4, "doubled": 3, "outlived": 3, "misdirected": 2,
}  # fmt: skip
TIMEOUT_S = 2.0
SLACK_S = 2.0  # how long after its deadline a fetch may still tidy up
LEASE_S = 1.0


class Gone(Exception):
    """The process that was asked died."""


class Request:
    """One request on its way."""

    def __init__(self, sim: Simulation, number: int) -> None:
        self.sim, self.world, self.random = sim, sim.world, sim.world.random
        self.key, self.transfer = f"r{number}", sim.transfer_name(number)
        self.story = self.random.choices(list(sim.stories), list(sim.stories.values()))[0]
        if self.transfer != self.key:
            self.story = "outlived"  # a name that was used before: its old ticket must not open the new offer
        self.tokens = min(self.random.randint(1, 48), self.random.randint(1, 48))
        self.ended: dict[Rank, str] = {}
        self.offered: list[tuple[Rank, Held]] = []
        self.successes = 0
        self.excuses = {self.story} - {"plain", "prefix", "kept", "replayed"}

    def run(self) -> None:
        """Live through it; every page is back afterwards."""
        text = None
        try:
            text = self._offer()
            if text is not None:
                self._tell(text)
        except Gone:
            self.sim.outcomes["gone"] += 1
        self._await_sources()
        if text:
            self.sim.old_tickets[self.transfer] = text

    # -- the source --------------------------------------------------------------------------------

    def _offer(self) -> str | None:
        ranks = self.sim.living(self.sim.source)
        held = self._reserve(ranks, self.key, self.tokens)
        self.sim.known.append((self.key, self.tokens))
        parts = []
        audience = "another" if self.story == "misdirected" else self.random.choice(("", "t"))
        late = self.random.random() < 0.1  # the device is still writing
        for rank, mine in zip(ranks, held, strict=True):
            fence = partial(self._fill_slowly, rank, mine) if late else None
            if not late:
                rank.fill(mine, self.key, self.tokens)
            offer = partial(
                rank.agent.offer, self.transfer, mine.tables, kv_tokens=self.tokens, fence=fence,
                audience=audience,
                on_end=partial(self._on_end, rank, mine),
            )  # fmt: skip
            try:
                parts.append(self.sim.call(rank, offer))
            except MisuseError as error:
                if self.transfer == self.key:
                    self._blame(f"offer was refused: {error}")
                rank.give_back(mine)  # a name that is still remembered: engines use fresh ones
                continue
            except Gone:
                continue
            self.offered.append((rank, mine))
        if len(parts) == len(ranks):
            return Ticket.join(parts).encode()
        for rank, _ in self.offered:
            self._quietly(rank, partial(rank.agent.withdraw, self.transfer))
        return None

    def _fill_slowly(self, rank: Rank, held: Held) -> None:
        self.world.sleep(self.random.random() * 0.01)
        if rank not in self.ended:
            rank.fill(held, self.key, self.tokens)

    def _on_end(self, rank: Rank, held: Held, transfer: str, outcome: str) -> None:
        """In a task of the source's process: its pages are ours again."""
        if rank in self.ended:
            self._blame(f"on_end was called twice: {self.ended[rank]}, {outcome}")
        self.ended[rank] = outcome
        rank.expect(held, "a source's page was changed")
        self.sim.check_free(rank, held)
        self.sim.check_unread(rank, held)
        rank.give_back(held)

    def _await_sources(self) -> None:
        """However it went, offers end within a lease."""
        bound = self.sim.bound(LEASE_S * 1.2 + SLACK_S)
        for rank, _ in self.offered:
            while rank.alive and rank not in self.ended and not bound.passed:
                self.world.sleep(0.02)
            if rank.alive and rank not in self.ended:
                self._blame(f"its offer at {rank.name} never ended")
        outcomes = {self.ended.get(rank, "").split(":")[0].split()[0] for rank, _ in self.offered if rank in self.ended}
        if self.successes == self.sim.target.tp and outcomes - {"completed"}:
            self._unless_explained(f"it was fetched, but its offer ended as {sorted(outcomes)}", None)

    # -- the target --------------------------------------------------------------------------------

    def _tell(self, text: str) -> None:
        story = self.story
        if story == "declined":
            rank = self.random.choice(self.sim.living(self.sim.target))
            self._quietly(rank, partial(rank.agent.decline, text, "nobody wants it"))
            return
        if story == "withdrawn":
            self.world.spawn(self.world.outside, self._withdraw_soon, name="withdraw")
        if story in ("kept", "expired"):
            ranks = self.sim.living(self.sim.target)
            for rank in ranks * (story == "kept"):
                self._quietly(rank, partial(rank.agent.keep, text))
            self.world.sleep(LEASE_S * (1.1 + self.random.random()))
        if story == "forged":
            self._fetch(self._forged(text), must_fail="forged")
        if story == "outlived" and (old := self._outlived()):
            self._fetch(old, must_fail="outlived")
        if story == "misdirected":
            self._fetch(text, must_fail="misdirected")
            return
        if story == "doubled":
            other = self.world.spawn(self.world.outside, self._fetch_again, text, name="double")
            self._fetch(text)
            self.world.join(other)
        else:
            self._fetch(text)
        if story == "replayed":
            whole = self.successes == self.sim.target.tp
            self._fetch(text, must_fail="replayed" if whole else "")

    def _outlived(self) -> str:
        """The ticket of an offer that is over, of this very name where there is one."""
        old = self.sim.old_tickets
        return old.get(self.transfer) or self.random.choice([*old.values(), ""])

    def _withdraw_soon(self) -> None:
        self.world.sleep(self.random.random() * 0.005)
        for rank, _ in self.offered:
            self._quietly(rank, partial(rank.agent.withdraw, self.transfer))

    def _fetch_again(self, text: str) -> None:
        try:
            self._fetch(text)
        except Gone:
            self.sim.outcomes["gone"] += 1

    def _forged(self, text: str) -> str:
        """A ticket that nobody issued."""
        ticket = Ticket.decode(text)
        sealed: dict[str, Any] = {
            "transfer": f"x{ticket.transfer}",
            "kv_tokens": ticket.kv_tokens + 1,
            "context": b"other",
        }
        field = self.random.choice([*sealed, "seal", "nonce"])
        if field in sealed:
            return replace(ticket, **{field: sealed[field]}).encode()
        ranks = []
        for part in ticket.ranks:
            other: Any = {field: bytes(b ^ 1 for b in getattr(part, field))}
            ranks.append(replace(part, **other))
        return replace(ticket, ranks=tuple(ranks)).encode()

    def _fetch(self, text: str, *, must_fail: str = "") -> None:
        """All target ranks fetch; each checks, uses and frees its own pages."""
        ranks = self.sim.living(self.sim.target)
        use = f"{self.key}.{self.sim.next_use()}{must_fail or self.story}"
        tokens = Ticket.decode(text).kv_tokens
        held = self._reserve(ranks, use, tokens)
        first = self.random.randint(0, tokens) if self.story == "prefix" else 0
        fetches: list[Fetch | None] = []
        bound = self.sim.bound(TIMEOUT_S + SLACK_S)
        for rank, mine in zip(ranks, held, strict=True):
            rank.due(mine, self.key, min(self.tokens, tokens), first)
            rank.promised[mine.names] = mine
            start = partial(rank.agent.start_fetch, text, mine.tables, first_token=first, timeout_s=TIMEOUT_S)
            try:
                fetches.append(self.sim.call(rank, start))
            except Gone:
                fetches.append(None)
            except PdxferError as error:
                fetches.append(None)
                self._judge(error, must_fail)
        if self.story == "cancelled":
            self.world.sleep(self.random.random() * 0.004)
            for fetch in fetches:
                if fetch is not None:
                    fetch.cancel()
        for rank, mine, fetch in zip(ranks, held, fetches, strict=True):
            self._await(rank, mine, fetch, bound, must_fail)

    def _await(self, rank: Rank, held: Held, fetch: Fetch | None, bound: Any, must_fail: str) -> None:
        received: Received | None = None
        if fetch is not None:
            while rank.alive and not fetch.done and not bound.passed:
                self.world.sleep(0.002)
            if rank.alive and not fetch.done:
                self._blame(f"its fetch at {rank.name} did not end in time: {fetch.state.value}")
            if rank.alive and fetch.done:
                try:
                    received = self.sim.call(rank, fetch.wait)
                except Gone:
                    pass
                except Exception as error:  # noqa: BLE001 - judged there
                    self._judge(error, must_fail)
        if received is not None and fetch is not None and rank.alive:
            self._use(rank, held, fetch, received, must_fail)
        if rank.alive:
            self.sim.await_free(rank, held)
            self.sim.check_unread(rank, held)
            rank.promised.pop(held.names, None)
            rank.give_back(held)

    def _use(self, rank: Rank, held: Held, fetch: Fetch, received: Received, must_fail: str) -> None:
        self.successes += 1
        self.sim.outcomes["fetched"] += 1
        if must_fail:
            self._blame(f"a {must_fail} ticket was accepted at {rank.name}")
        if fetch.state is not State.HANDED:
            self._blame(f"wait returned although its pages are {fetch.state.value}")
        self.sim.served[self.key, rank.process] += 1
        if self.sim.served[self.key, rank.process] > 1:
            self._blame(f"it was handed out twice at {rank.name}")
        rank.expect(held, "handed out with wrong bytes")
        self.world.sleep(self.random.random() * self.random.choice((0.001, 0.1)))
        rank.expect(held, "changed while decode used it")
        if rank.alive:
            self._quietly(rank, received.release)
            self._quietly(rank, received.release)  # it is idempotent

    # -- judging -----------------------------------------------------------------------------------

    def _judge(self, error: Exception, must_fail: str) -> None:
        """A fetch failed: is there a reason?"""
        name = getattr(error, "reason", type(error).__name__)
        self.sim.outcomes[f"failed {name}"] += 1
        misused = isinstance(error, MisuseError) and not isinstance(error, TicketError)
        if not isinstance(error, PdxferError) or isinstance(error, InternalError):
            self._blame(f"a bug: {type(error).__name__}: {error}")
        elif misused and self.story not in ("doubled", "forged", "outlived"):
            self._blame(f"misuse that was none: {error}")
        elif not must_fail:
            self._unless_explained(f"failed for no reason: {type(error).__name__}: {error}", error)
        elif self.sim.gentle and not isinstance(error, (TicketError, StaleError, AbortedError)):
            self._blame(f"a {must_fail} ticket was refused by {type(error).__name__}: {error}")

    def _unless_explained(self, what: str, error: Exception | None) -> None:
        if self.sim.gentle and not self.excuses and all(rank.alive for rank, _ in self.offered):
            self._blame(what)

    def _blame(self, what: str) -> None:
        self.world.errors.append(f"{self.key} ({self.story}): {what}")
        self.world.stopping = True

    def _reserve(self, ranks: list[Rank], key: str, tokens: int) -> list[Held]:
        """Pages on all of them, when there are some; a worker that loses a rank meanwhile is Gone."""
        bound = self.sim.bound(60.0)
        while all(rank.alive for rank in ranks):
            held = [rank.reserve(key, tokens) for rank in ranks]
            if None not in held:
                return [mine for mine in held if mine is not None]
            for rank, mine in zip(ranks, held, strict=True):
                if mine is not None:
                    rank.give_back(mine)
            if bound.passed:
                self._blame("no page became free in a minute")
            self.world.sleep(0.01)
        raise Gone

    def _quietly(self, rank: Rank, what: Callable[[], Any]) -> None:
        with suppress(Gone, Killed):
            self.sim.call(rank, what)
