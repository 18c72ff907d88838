"""The state tables, played against a model: what is allowed happens, what isn't changes nothing, pages add up."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from pdxfer.errors import AbortedError, InternalError, MisuseError, PeerError, StaleError, TicketError
from pdxfer.transfer import SOURCE, TARGET, Cancel, Event, Intake, Ledger, Offer, State

TOTALS = {"kv": 6, "state": 2}
BRIEFLY = settings(max_examples=50, stateful_step_count=30)
UNITS = [(pool, page) for pool, n in TOTALS.items() for page in range(n)]
BY_TABLE = {"source": SOURCE, "target": TARGET}

# The tables once more, as sentences of design.md section 6 put them: a slip in either is found.
PATHS = {
    "source": [
        "free filling sealed leased free",
        "filling quarantined free",
        "sealed quarantined",
        "leased quarantined",
    ],
    "target": [
        "free reserved receiving verifying ready handed free",
        "reserved free",
        "reserved quarantined free",
        "receiving quarantined",
        "verifying quarantined",
        "ready quarantined",
    ],
}


@pytest.mark.parametrize("name", BY_TABLE)
def test_the_table_is_the_picture(name):
    steps = {pair for path in PATHS[name] for pair in zip(path.split(), path.split()[1:], strict=False)}
    assert {(before.value, after.value) for (before, _), after in BY_TABLE[name].items()} == steps


@pytest.mark.parametrize("name", BY_TABLE)
def test_every_state_can_end(name):
    """From each state some events lead back to FREE: nothing can be stuck for lack of a row."""
    table = BY_TABLE[name]
    for state in {s for s, _ in table} | set(table.values()):
        reached, edge = {state}, {state}
        while edge:
            edge = {after for (before, _), after in table.items() if before in edge} - reached
            reached |= edge
        assert State.FREE in reached


def test_ready_is_reached_from_verifying_only():
    assert [key for key, after in TARGET.items() if after is State.READY] == [(State.VERIFYING, Event.VERIFIED)]
    assert State.READY not in SOURCE.values()


class LedgerMachine(RuleBasedStateMachine):
    """Any events on any holds, beside a model that is a plain list."""

    holds = Bundle("holds")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(TOTALS)
        self.live: list = []
        self.seen: set[int] = set()

    def snapshot(self):
        return (
            [(h, h.state, h.units, h.generation) for h in self.live],
            self.ledger.counts(),
            Counter(self.ledger.transitions),
        )

    @rule(target=holds, name=st.sampled_from(sorted(BY_TABLE)), units=st.sets(st.sampled_from(UNITS), max_size=4))
    def open(self, name, units):
        before = self.snapshot()
        clash = any(units & h.units and (h.table is TARGET or name == "target") for h in self.live)
        try:
            hold = self.ledger.open("t", units, BY_TABLE[name])
        except MisuseError:
            assert clash
            assert self.snapshot() == before
            return None
        assert not clash
        assert hold.state is (State.RESERVED if name == "target" else State.FILLING)
        assert hold.generation not in self.seen
        self.seen.add(hold.generation)
        self.live.append(hold)
        return hold

    @rule(name=st.sampled_from(sorted(BY_TABLE)), unit=st.sampled_from([("kv", 6), ("kv", -1), ("none", 0)]))
    def open_what_is_not_there(self, name, unit):
        before = self.snapshot()
        with pytest.raises(MisuseError, match="has no page"):
            self.ledger.open("t", [unit], BY_TABLE[name])
        assert self.snapshot() == before

    @rule(hold=holds, event=st.sampled_from(Event))
    def fire(self, hold, event):
        if hold is None:
            return
        expected = hold.table.get((hold.state, event)) if hold in self.live else None
        before = self.snapshot()
        if expected is None:
            with pytest.raises(InternalError, match=event.value):
                self.ledger.fire(hold, event)
            assert self.snapshot() == before
            return
        was = hold.state
        assert self.ledger.fire(hold, event) is hold.state is expected
        assert self.ledger.transitions[(was.value, expected.value)] == before[2][(was.value, expected.value)] + 1
        if expected is State.FREE:
            self.live.remove(hold)

    @invariant()
    def pages_add_up(self):
        self.ledger.check_integrity()
        counts = self.ledger.counts()
        assert sum(counts.values()) == len(UNITS)
        held = {unit for hold in self.live for unit in hold.units}
        assert counts[State.FREE.value] == len(UNITS) - len(held)

    @invariant()
    def a_written_page_is_nobody_else_s(self):
        for hold in self.live:
            others = [h for h in self.live if h is not hold and h.units & hold.units]
            assert not others or (hold.table is SOURCE and all(h.table is SOURCE for h in others))


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = BRIEFLY


def test_units_with_states_count_once_each():
    ledger = Ledger(TOTALS)
    shared = ledger.open("a", [("kv", 0), ("kv", 1)], SOURCE)
    ledger.open("b", [("kv", 1), ("kv", 2)], SOURCE)
    target = ledger.open("c", [("kv", 3), ("state", 0)], TARGET)
    ledger.fire(target, Event.POST)
    assert ledger.counts() == {"filling": 3, "receiving": 2, "free": 3}
    for event in (Event.SEAL, Event.ISSUE, Event.LAST_DONE):
        ledger.fire(shared, event)
    assert ledger.counts() == {"filling": 2, "receiving": 2, "free": 4}


def test_a_hold_of_one_ledger_is_unknown_to_another():
    hold = Ledger(TOTALS).open("a", UNITS[:1], SOURCE)
    with pytest.raises(InternalError):
        Ledger(TOTALS).fire(hold, Event.SEAL)
    assert hold.state is State.FILLING


@pytest.mark.parametrize("damage", ["lost unit", "lost hold", "shared"])
def test_the_check_finds_what_it_is_for(damage):
    ledger = Ledger(TOTALS)
    hold = ledger.open("a", UNITS[:2], TARGET)
    if damage == "lost unit":
        del ledger._users[UNITS[0]]
    elif damage == "lost hold":
        ledger._holds.discard(hold)
    else:
        other = ledger.open("b", UNITS[2:3], SOURCE)
        other.units = hold.units
        ledger._users[UNITS[0]] += (other,)
        ledger._users[UNITS[1]] += (other,)
        del ledger._users[UNITS[2]]
    with pytest.raises(InternalError):
        ledger.check_integrity()


def test_threads_reserve_a_page_once():
    ledger, won = Ledger({"kv": 50}), []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait(60.0)
        for page in range(50):
            try:
                won.append(ledger.open("t", [("kv", page)], TARGET))
            except MisuseError:
                continue

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert sorted(page for hold in won for _, page in hold.units) == list(range(50))
    ledger.check_integrity()


# ---------------------------------------------------------------- offers


def offer(now_s: float = 100.0, lease_s: float = 10.0) -> Offer:
    return Offer("t", 7, lease_s, now_s + lease_s)


def session(n: int) -> bytes:
    return bytes([n]) * 16


def test_the_last_of_all_readers_completes():
    o = offer()
    for reader in (0, 1, 2):
        o.open(100.0, reader, [0, 1, 2], session(reader))
    assert [o.complete(101.0, r, session(r), 7) for r in (1, 0, 2)] == [False, False, True]
    assert o.ended == "completed"


def test_a_reader_that_never_opened_is_waited_for():
    o = offer()
    o.open(100.0, 0, [0, 1], session(0))
    assert not o.complete(100.0, 0, session(0), 7)
    assert not o.ended
    o.open(100.0, 1, [0, 1], session(1))
    assert o.complete(100.0, 1, session(1), 7)


def test_complete_is_idempotent_even_after_the_end():
    o = offer()
    o.open(100.0, 0, [0], session(0))
    assert o.complete(100.0, 0, session(0), 7)
    for later_s in (100.0, 1e9):
        assert not o.complete(later_s, 0, session(0), 7)
    assert o.ended == "completed"


def test_a_second_use_is_refused():
    o = offer()
    o.open(100.0, 0, [0, 1], session(0))
    o.complete(100.0, 0, session(0), 7)
    with pytest.raises(TicketError) as caught:
        o.open(100.0, 0, [0, 1], session(9))
    assert caught.value.reason == "TICKET_USED"
    o.open(100.0, 1, [0, 1], session(1))
    o.complete(100.0, 1, session(1), 7)
    with pytest.raises(StaleError) as ended:
        o.open(100.0, 0, [0, 1], session(9))
    assert ended.value.reason == "TRANSFER_ENDED"


def test_a_reader_that_opens_again_replaces_its_own_session():
    o = offer()
    o.open(100.0, 0, [0, 1], session(1))
    o.open(100.0, 1, [0, 1], session(5))
    o.open(100.0, 0, [0, 1], session(2))
    for call in (lambda: o.complete(100.0, 0, session(1), 7), lambda: o.renew(100.0, 0, session(1)),
                 lambda: o.abort(0, session(1), "late")):  # fmt: skip
        with pytest.raises(TicketError) as caught:
            call()
        assert caught.value.reason == "UNKNOWN_SESSION"
    assert not o.ended
    assert not o.complete(100.0, 0, session(2), 7)
    assert o.complete(100.0, 1, session(5), 7)


def test_only_the_readers_of_the_plan_may_open_and_the_plan_may_not_change():
    o = offer()
    with pytest.raises(TicketError, match="not a reader"):
        o.open(100.0, 2, [0, 1], session(2))
    assert o.readers is None
    o.open(100.0, 0, [0, 1], session(0))
    with pytest.raises(TicketError):
        o.open(100.0, 0, [0], session(1))
    with pytest.raises(TicketError):
        o.open(100.0, 2, [0, 1, 2], session(2))
    assert not o.complete(100.0, 0, session(0), 7), "the session of before the refusal still holds"


def test_a_lease_ends_at_its_second_and_signs_of_life_extend_it():
    o = offer(now_s=100.0, lease_s=10.0)
    assert not o.expired(109.9)
    o.open(105.0, 0, [0], session(0))
    assert not o.expired(114.9)
    assert o.renew(114.9, 0, session(0)) == 10.0
    assert not o.expired(124.8)
    assert o.expired(124.9)
    for call in (lambda: o.open(124.9, 0, [0], session(1)), lambda: o.renew(124.9, 0, session(0)),
                 lambda: o.complete(124.9, 0, session(0), 7), lambda: o.check_live(124.9)):  # fmt: skip
        with pytest.raises(StaleError) as caught:
            call()
        assert caught.value.reason == "LEASE_EXPIRED"
    o.end("expired")
    assert not o.expired(1e9), "an ended offer has no lease"


def test_another_generation_is_stale_and_counts_for_nothing():
    o = offer()
    o.open(100.0, 0, [0], session(0))
    with pytest.raises(StaleError) as caught:
        o.complete(100.0, 0, session(0), 8)
    assert caught.value.reason == "STALE_GENERATION"
    assert not o.ended
    assert o.complete(100.0, 0, session(0), 7)


def test_abort_ends_for_all_and_once():
    o = offer()
    for reader in (0, 1):
        o.open(100.0, reader, [0, 1], session(reader))
    assert o.abort(0, session(0), "CORRUPT")
    assert not o.abort(1, session(1), "later")
    assert "rank 0" in o.ended
    assert "CORRUPT" in o.ended
    with pytest.raises(StaleError, match="CORRUPT"):
        o.complete(100.0, 1, session(1), 7)
    with pytest.raises(StaleError):
        o.renew(100.0, 1, session(1))
    assert not o.end("again")


def test_a_stranger_can_neither_abort_nor_complete():
    o = offer()
    o.open(100.0, 0, [0, 1], session(0))
    for reader, key in ((0, session(1)), (1, session(0)), (2, session(2)), (0, b"")):
        with pytest.raises(TicketError):
            o.abort(reader, key, "x")
        with pytest.raises(TicketError):
            o.complete(100.0, reader, key, 7)
    assert not o.ended


class OfferMachine(RuleBasedStateMachine):
    """Messages repeated and reordered at will, on a clock of our own: one commit, one hand-out each."""

    READERS = (0, 1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.serial = 0.0, 0
        self.offer = Offer("t", 7, 10.0, 10.0)
        self.sessions: dict[int, bytes] = {}
        self.old: list[tuple[int, bytes]] = []
        self.done: set[int] = set()
        self.until_s, self.ended, self.lasts = 10.0, False, 0

    @property
    def live(self) -> bool:
        return not self.ended and self.now_s < self.until_s

    @rule(delta_s=st.sampled_from([0.5, 3.0, 9.0]))
    def wait(self, delta_s):
        self.now_s += delta_s

    @rule(reader=st.integers(0, 3))
    def open(self, reader):
        self.serial += 1
        key = self.serial.to_bytes(16, "big")
        allowed = self.live and reader in self.READERS and reader not in self.done
        try:
            self.offer.open(self.now_s, reader, self.READERS, key)
        except (StaleError, TicketError):
            assert not allowed
            return
        assert allowed
        if reader in self.sessions:
            self.old.append((reader, self.sessions[reader]))
        self.sessions[reader], self.until_s = key, self.now_s + 10.0

    @rule(reader=st.sampled_from(READERS), generation=st.sampled_from([7, 7, 7, 8]))
    def complete(self, reader, generation):
        key = self.sessions.get(reader, b"?" * 16)
        repeated = reader in self.done
        allowed = repeated or (self.live and generation == 7 and reader in self.sessions)
        try:
            last = self.offer.complete(self.now_s, reader, key, generation)
        except (StaleError, TicketError):
            assert not allowed
            return
        assert allowed
        if not repeated:
            self.done.add(reader)
        assert last == (not repeated and self.done == set(self.READERS))
        self.lasts += last
        self.ended = self.ended or last

    @rule(data=st.data())
    def late_message(self, data):
        if self.old:
            reader, key = data.draw(st.sampled_from(self.old))
            with pytest.raises(TicketError):
                self.offer.complete(self.now_s, reader, key, 7)
            with pytest.raises(TicketError):
                self.offer.abort(reader, key, "late")

    @rule(reader=st.sampled_from(READERS))
    def renew(self, reader):
        allowed = self.live and reader in self.sessions
        try:
            assert self.offer.renew(self.now_s, reader, self.sessions.get(reader, b"?" * 16)) == 10.0
        except (StaleError, TicketError):
            assert not allowed
            return
        assert allowed
        self.until_s = self.now_s + 10.0

    @rule(reader=st.sampled_from(READERS), really=st.integers(0, 5))
    def abort(self, reader, really):
        if not really and reader in self.sessions:
            assert self.offer.abort(reader, self.sessions[reader], "x") == (not self.ended)
            self.ended = True

    @rule()
    def sweep(self):
        expired = not self.ended and self.now_s >= self.until_s
        assert self.offer.expired(self.now_s) == expired
        if expired:
            assert self.offer.end("expired")
            self.ended = True

    @invariant()
    def one_end(self):
        assert bool(self.offer.ended) == self.ended
        assert self.lasts == (self.offer.ended == "completed") <= 1


TestOfferMachine = OfferMachine.TestCase
TestOfferMachine.settings = BRIEFLY


# ---------------------------------------------------------------- intake


@given(st.integers(0, 30), st.integers(1, 6), st.randoms())
def test_chunks_in_any_order_within_the_window(chunks, window, random):
    intake, underway, asked = Intake(chunks, window), [], []
    while not intake.complete:
        wanted = intake.credit()
        asked += wanted
        underway += wanted
        assert len(underway) == min(window, chunks - intake.received)
        assert intake.credit() == []
        chunk = underway.pop(random.randrange(len(underway)))
        intake.accept(chunk)
    assert asked == list(range(chunks))
    assert intake.received == chunks
    assert intake.credit() == []


@given(st.integers(1, 10), st.integers(1, 4), st.integers(-2, 12))
def test_unasked_and_repeated_chunks_are_refused_and_change_nothing(chunks, window, stranger):
    intake = Intake(chunks, window)
    asked = intake.credit()
    if stranger not in asked:
        with pytest.raises(PeerError, match="unasked"):
            intake.accept(stranger)
    intake.accept(asked[0])
    with pytest.raises(PeerError):
        intake.accept(asked[0])
    assert intake.received == 1


def test_nothing_to_take_in_is_complete_at_once():
    assert Intake(0, 1).complete
    with pytest.raises(MisuseError):
        Intake(1, 0)


def test_cancel_keeps_the_first_reason():
    cancel = Cancel()
    cancel.check()
    assert not cancel.wait(0.0)
    first = MisuseError("first")
    assert cancel.set(first)
    assert not cancel.set(MisuseError("second"))
    assert cancel.error is first
    assert cancel.wait(0.0)
    with pytest.raises(AbortedError, match="first"):
        cancel.check()


def test_offers_are_plain_values_of_their_fields():
    """What the agent copies out of an offer must not tie two transfers together."""
    one, two = offer(), offer()
    one.open(100.0, 0, [0], session(0))
    with pytest.raises(TicketError):
        two.complete(100.0, 0, session(0), 7)
    assert replace(two, ended="x").ended == "x"
    assert not two.ended
