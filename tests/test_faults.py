"""What goes wrong between real processes: one named error in time, decode never begins, nothing is left behind.

Two workers live through all of a transport's tests and are counted after each: a source of two ranks and a target of
one. Victims are made where a test needs one to die, stop or lie. Transfers are cut into many small chunks, and a gate
in a rank's process (``tests/workers.py``) stops them at a chunk, so that "mid-transfer" is a fact and not a guess.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pdxfer.ticket import Ticket
from pdxfer.transport import known_schemes
from tests.rank_process import Failed, RankProcess, joined

TOKENS = 600
PAGED = {"page_tokens": 8, "kv_order": "HND", "conv_order": "TC", "pages": 512}
SOURCE = {"tp": 2}
TARGET = {"tp": 1, "placement": "unified", "storage": PAGED}
SMALL = {"chunk_bytes": 4096, "window": 1, "lease_s": 60.0}
KINDS = {
    "shm-packed": {"transports": ["shm"], "mode": "packed"},
    "shm-direct": {"transports": ["shm"], "mode": "direct"},
    "tcp": {"transports": ["tcp"]},
}
TIMEOUT_S = 20.0
GRACE_S = 3.0  # on a busy machine, between the deadline and the error


@dataclass
class Stage:
    """Where the tests of one transport play."""

    config: dict[str, Any]
    directory: Path
    sources: list[RankProcess] = field(default_factory=list)
    target: Any = None
    scheme: str = ""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count())

    def new(self, stack: ExitStack, **options: Any) -> RankProcess:
        """One more rank, with a directory of its own."""
        number = next(self._numbers)
        directory = options.pop("directory", self.directory / str(number))
        config = {**SMALL, **self.config, "worker": "P", **options}
        return stack.enter_context(RankProcess(directory, seed=number, **config))

    def new_sources(self, stack: ExitStack, **options: Any) -> list[RankProcess]:
        """A source worker of two ranks."""
        return [self.new(stack, layout=SOURCE, rank=rank, **options) for rank in (0, 1)]

    def key(self) -> str:
        """A fresh transfer id."""
        return f"request-{next(self._numbers)}"


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    """Living workers that have met each other."""
    if request.param.partition("-")[0] not in known_schemes():
        pytest.skip("no such transport")
    directory = Path(tempfile.mkdtemp(prefix="pdx"))
    found = Stage(KINDS[request.param], directory, scheme=request.param.partition("-")[0])
    try:
        with ExitStack() as stack:
            found.sources = found.new_sources(stack)
            found.target = found.new(stack, layout=TARGET, worker="D")
            hand_over(found, found.sources, found.target)
            yield found
    finally:
        shutil.rmtree(directory)


def offer(ranks: list[RankProcess], key: str, **options: Any) -> str:
    """Offer on all ranks; returns the ticket."""
    return joined([rank.ask("offer", key=key, tokens=TOKENS, **options) for rank in ranks])


def begin(target: RankProcess, key: str, ticket: str, timeout_s: float = TIMEOUT_S, **options: Any) -> None:
    """Begin to fetch."""
    target.ask("fetch", key=key, ticket=ticket, tokens=TOKENS, timeout_s=timeout_s, **options)


def hand_over(stage: Stage, sources: list[RankProcess], target: RankProcess) -> None:
    """A transfer that must succeed."""
    key = stage.key()
    begin(target, key, offer(sources, key))
    found = target.ask("wait", key=key)
    assert found["difference"] == ""
    assert found["modes"] == [stage.config.get("mode", "packed")]
    assert [source.ask("ended", key=key) for source in sources] == ["completed"] * len(sources)


def fails(target: RankProcess, key: str, timeout_s: float = TIMEOUT_S) -> Failed:
    """The fetch must end in an error in time, with its pages free."""
    with pytest.raises(Failed) as caught:
        target.ask("wait", key=key)
    assert caught.value.took_s < timeout_s + GRACE_S
    assert caught.value.details["state"] == "free"
    return caught.value


@contextmanager
def nothing_left(*survivors: RankProcess) -> Iterator[None]:
    """After the block each of these holds no more than before it, and decode never began on any of them."""
    before = [(rank.ask("held"), rank.ask("ready")) for rank in survivors]
    yield
    for rank, (held, ready) in zip(survivors, before, strict=True):
        assert rank.ask("held", at_most=held)["pages"] == 0
        assert rank.ask("ready") == ready


def all_free(*ranks: RankProcess) -> None:
    """No page and no staging of these is in use."""
    for rank in ranks:
        unbounded = dict.fromkeys(rank.ask("held"), 1 << 30)
        rank.ask("held", at_most={**unbounded, "pages": 0, "staged_bytes": 0})


def take_back(sources: list[RankProcess], key: str) -> None:
    """Withdraw what no reader ended."""
    for source in sources:
        source.ask("withdraw", key=key)
        source.ask("ended", key=key)
    all_free(*sources)


@contextmanager
def stopped_midway(rank: RankProcess, on: str = "receive", channels: int = 2, chunk: int = 1) -> Iterator[None]:
    """Inside the block, every channel of ``rank`` stands at a chunk. Begin the transfer before."""
    rank.ask("reached", channels=channels)
    try:
        yield
    finally:
        if not rank.killed:
            rank.ask("open_gate")


# ---------------------------------------------------------------- death


def test_the_prefill_worker_is_killed_mid_transfer(stage):
    target, key = stage.target, stage.key()
    with nothing_left(target), ExitStack() as stack:
        victims = stage.new_sources(stack)
        target.ask("gate", on="receive", chunk=1)
        begin(target, key, offer(victims, key))
        with stopped_midway(target):
            for victim in victims:
                victim.signal(signal.SIGKILL)
        error = fails(target, key)
        assert error.kind in ("TransportError", "PeerError")
        assert error.took_s < TIMEOUT_S / 2, "a death is noticed, not waited for"
    hand_over(stage, stage.sources, target)


def test_one_prefill_rank_is_killed_and_the_other_is_told(stage):
    target, key = stage.target, stage.key()
    with ExitStack() as stack:
        survivor, victim = sources = stage.new_sources(stack)
        hand_over(stage, sources, target)
        with nothing_left(target, survivor):
            target.ask("gate", on="receive", chunk=1)
            begin(target, key, offer(sources, key))
            with stopped_midway(target):
                victim.signal(signal.SIGKILL)
            assert fails(target, key).kind in ("TransportError", "PeerError")
            # Its own share may have been fetched before the other's death was noticed.
            assert survivor.ask("ended", key=key).startswith(("aborted", "completed"))


def test_the_decode_worker_is_killed_mid_transfer(stage):
    key = stage.key()
    with ExitStack() as stack:
        sources = stage.new_sources(stack, lease_s=0.5)
        hand_over(stage, sources, stage.target)
        with nothing_left(*sources):
            victim = stage.new(stack, layout=TARGET, worker="D")
            victim.ask("gate", on="receive", chunk=1)
            begin(victim, key, offer(sources, key))
            with stopped_midway(victim):
                victim.signal(signal.SIGKILL)
            for source in sources:
                assert source.ask("ended", key=key).startswith("expired")
        hand_over(stage, sources, stage.target)


def test_one_decode_rank_is_killed_and_its_sibling_is_not_left_waiting(stage):
    key, timeout_s = stage.key(), 5.0
    with ExitStack() as stack:
        survivor, victim = (stage.new(stack, layout={**TARGET, "tp": 2}, rank=rank, worker="D") for rank in (0, 1))
        sources = stage.new_sources(stack, lease_s=0.5)
        for rank in (survivor, victim):
            rank.ask("siblings", addresses=[survivor.address, victim.address])
        victim.ask("gate", on="receive", chunk=0)
        ticket = offer(sources, key)
        for rank in (survivor, victim):
            begin(rank, key, ticket, timeout_s)
        with stopped_midway(victim, channels=1, chunk=0):
            victim.signal(signal.SIGKILL)
        assert fails(survivor, key, timeout_s).kind in ("TransportError", "PeerError", "DeadlineError", "StaleError")
        assert survivor.ask("ready") == 0
        for source in sources:
            assert source.ask("ended", key=key).startswith(("expired", "aborted"))
        all_free(survivor, *sources)


def test_the_source_stops_answering(stage):
    target, key, timeout_s = stage.target, stage.key(), 1.5
    with nothing_left(target), ExitStack() as stack:
        stopped = stage.new_sources(stack, lease_s=1.0)
        target.ask("gate", on="receive", chunk=1)
        begin(target, key, offer(stopped, key), timeout_s)
        with stopped_midway(target):
            for rank in stopped:
                rank.signal(signal.SIGSTOP)
        try:
            assert fails(target, key, timeout_s).kind == "DeadlineError"
        finally:
            for rank in stopped:
                rank.signal(signal.SIGCONT)
        for rank in stopped:
            assert rank.ask("ended", key=key).startswith(("expired", "aborted"))
        all_free(*stopped)


def test_the_source_closes_during_a_transfer(stage):
    target, key = stage.target, stage.key()
    with nothing_left(target), ExitStack() as stack:
        closing = stage.new_sources(stack)
        target.ask("gate", on="receive", chunk=1)
        begin(target, key, offer(closing, key))
        with stopped_midway(target):
            for rank in closing:
                rank.ask("close_soon")
                assert rank.ask("ended", key=key) == "closing"
        assert fails(target, key).kind in ("TransportError", "PeerError", "StaleError")
        for rank in closing:
            held = rank.ask("close")
            assert (held["memfds"], held["threads"], held["files"], held["pages"]) == (0, 1, 0, 0)


def test_a_worker_that_quits_is_forgotten(stage):
    target = stage.target
    before = target.ask("held")
    with ExitStack() as stack:
        hand_over(stage, stage.new_sources(stack), target)
        assert target.ask("held")["sockets"] > before["sockets"], "its channels are kept for the next transfer"
    target.ask("held", at_most=before)


def test_what_a_killed_process_left_is_removed_by_the_next(stage):
    directory = stage.directory / "shared"
    with ExitStack() as stack:
        stage.new(stack, layout=TARGET, directory=directory).signal(signal.SIGKILL)
        assert list(directory.rglob("*"))
        stage.new(stack, layout=TARGET, directory=directory)
    assert not list(directory.rglob("*"))


# ---------------------------------------------------------------- tickets


def test_a_restart_at_the_same_address_makes_tickets_stale(stage):
    target = stage.target
    control = [f"unix://{stage.directory}/{stage.key()}/s" for _ in range(2)]
    with ExitStack() as stack:
        first = [stage.new(stack, layout=SOURCE, rank=r, control=[control[r]]) for r in (0, 1)]
        hand_over(stage, first, target)
        key = stage.key()
        ticket = offer(first, key)
        for rank in first:
            rank.signal(signal.SIGKILL)
        second = [stage.new(stack, layout=SOURCE, rank=r, control=[control[r]]) for r in (0, 1)]
        assert [rank.address for rank in second] == [rank.address for rank in first]
        begin(target, key, ticket)
        error = fails(target, key)
        assert (error.kind, error.reason) == ("StaleError", "EPOCH_CHANGED")
        hand_over(stage, second, target)
        with nothing_left(target):
            begin(target, key, ticket)
            assert fails(target, key).reason == "EPOCH_CHANGED"
        for rank in second:
            assert rank.ask("held")["pages"] == 0
    for address in control:
        Path(address.removeprefix("unix://")).parent.rmdir()


def test_a_ticket_is_used_twice(stage):
    target, key = stage.target, stage.key()
    ticket = offer(stage.sources, key)
    begin(target, key, ticket)
    assert target.ask("wait", key=key)["difference"] == ""
    with nothing_left(target, *stage.sources):
        begin(target, key, ticket)
        assert fails(target, key).reason in ("TICKET_USED", "TRANSFER_ENDED")


def test_a_lease_has_expired(stage):
    target, key = stage.target, stage.key()
    with nothing_left(target), ExitStack() as stack:
        sources = stage.new_sources(stack, lease_s=0.2)
        ticket = offer(sources, key)
        assert [source.ask("ended", key=key) for source in sources] == ["expired: the lease is over"] * 2
        begin(target, key, ticket)
        error = fails(target, key)
        assert error.kind == "StaleError"
        assert "lease" in str(error)
        all_free(*sources)


def test_a_ticket_was_edited(stage):
    target, key = stage.target, stage.key()
    with nothing_left(target, *stage.sources):
        text = offer(stage.sources, key)
        right = Ticket.decode(text)
        for edited in (
            replace(right, sampled=(1,)),
            replace(right, kv_tokens=TOKENS - 1),
            replace(right, transfer="x"),
        ):
            begin(target, key, edited.encode())
            assert fails(target, key).kind == "TicketError"
        for broken in (text[:-8], text[:50] + "A" + text[51:] if text[50] != "A" else text[:50] + "B" + text[51:]):
            with pytest.raises(Failed) as caught:
                _begin_and_wait(target, key, broken)
            assert caught.value.kind in ("TicketError", "StaleError", "PeerError")
        take_back(stage.sources, key)


def _begin_and_wait(target: RankProcess, key: str, ticket: str) -> None:
    begin(target, key, ticket)
    target.ask("wait", key=key)


# ---------------------------------------------------------------- wrong, full, absent


def test_a_page_table_is_wrong(stage):
    target, key = stage.target, stage.key()
    with nothing_left(target, *stage.sources):
        with pytest.raises(Failed, match="page table") as caught:
            stage.sources[0].ask("offer", key=stage.key(), tokens=TOKENS, wrong=True)
        assert caught.value.kind == "MisuseError"
        ticket = offer(stage.sources, key)
        with pytest.raises(Failed, match="page table") as caught:
            begin(target, key, ticket, wrong=True)
        assert caught.value.kind == "MisuseError"
        for source in stage.sources:
            source.ask("withdraw", key=key)
            assert source.ask("ended", key=key) == "withdrawn"


@pytest.mark.parametrize("stage", ["shm-packed", "tcp"], indirect=True)
def test_the_arena_is_full(stage):
    target, key = stage.target, stage.key()
    with nothing_left(target), ExitStack() as stack:
        sources = stage.new_sources(stack, arena_bytes=8192, stall_s=0.3)
        for source in sources:
            source.ask("fill_arena", scheme=stage.scheme)
        begin(target, key, offer(sources, key))
        error = fails(target, key)
        assert error.kind == "ExhaustedError"
        assert error.took_s < TIMEOUT_S / 2
        for source in sources:
            source.ask("free_arena", scheme=stage.scheme)
        take_back(sources, key)


@pytest.mark.parametrize("stage", ["shm-packed", "tcp"], indirect=True)
def test_a_chunk_is_larger_than_the_arena(stage):
    key = stage.key()
    with ExitStack() as stack:
        sources = stage.new_sources(stack, arena_bytes=8192)
        target = stage.new(stack, layout=TARGET, worker="D", chunk_bytes=64 << 10)
        begin(target, key, offer(sources, key))
        error = fails(target, key)
        assert error.kind == "ExhaustedError"
        assert "arena of 8192 B" in str(error)
        assert error.took_s < TIMEOUT_S / 2
        take_back(sources, key)


def _moved(ticket: str, address: str) -> str:
    """The ticket with every rank's address replaced: what a router that lies could do."""
    right = Ticket.decode(ticket)
    return replace(right, ranks=tuple(replace(part, address=address) for part in right.ranks)).encode()


def test_nobody_is_there(stage):
    target, key = stage.target, stage.key()
    with ExitStack() as stack:
        sources = stage.new_sources(stack)
        ticket = offer(sources, key)
        for source in sources:
            source.signal(signal.SIGKILL)
    with nothing_left(target):
        for _ in range(3):
            begin(target, key, ticket)
            error = fails(target, key)
            assert error.kind == "PeerError"
            assert error.took_s < TIMEOUT_S / 2


def test_somebody_listens_and_says_nothing(stage):
    target, key, timeout_s = stage.target, stage.key(), 1.0
    path = stage.directory / "silent"
    ticket = offer(stage.sources, key)
    with nothing_left(target), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        begin(target, key, _moved(ticket, f"unix://{path}"), timeout_s)
        assert fails(target, key, timeout_s).kind in ("DeadlineError", "PeerError")
    take_back(stage.sources, key)
    path.unlink()


# ---------------------------------------------------------------- two that do not fit


@pytest.mark.parametrize("stage", ["shm-packed"], indirect=True)
@pytest.mark.parametrize(
    ("other", "component", "field"),
    [
        ({"tp": 2, "spec": {"width": 5}}, "S", "axes"),
        ({"tp": 2, "spec": {"kv_heads": 4}}, "kv.k", "axes"),
        ({"tp": 2, "storage": {"state_dtype": "bfloat16"}}, "S", "dtype"),
        ({"tp": 2, "storage": {"state_dtype": "bfloat16", "accepts": ["float32"]}}, "S", "dtype"),
    ],
    ids=["another model", "other heads", "another dtype", "one-sided consent"],
)
def test_the_other_side_is_of_another_kind(stage, other, component, field):
    target, key = stage.target, stage.key()
    with nothing_left(target), ExitStack() as stack:
        sources = [stage.new(stack, layout=other, rank=rank) for rank in (0, 1)]
        begin(target, key, offer(sources, key))
        error = fails(target, key)
        assert (error.kind, error.details["component"]) == ("IncompatibleError", component)
        assert field in error.details["field"]
        assert error.details["source"] != error.details["target"]
        take_back(sources, key)
