"""Descriptors, disk and memory used up: an error that says so, nothing half-done, and all well when there is more."""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from pdxfer.agent import Fetch, Received
from pdxfer.agent.journal import Timeline
from pdxfer.agent.serve import SourceSession
from pdxfer.builders import Parallel
from pdxfer.directory import PrivateDirectory
from pdxfer.errors import ExhaustedError, PdxferError, TransportError
from pdxfer.messages import Mode, Open
from pdxfer.packing import EdgeProgram
from pdxfer.pages import Side
from pdxfer.plan import make_plan
from pdxfer.transfer import Hold, Offer
from tests.chaos import ERRORS, Play, play
from tests.pairs import SCHEMES, TOKENS, Ends, hand_over, pair, wait_until, withdraw
from tests.rank_process import Failed
from tests.workers import Worker, layouts, settle

COUNTS = (0, 1, 2, 4, 7, 12)


def squeezed(found: Play, count: int, *, survivors: bool) -> set[str]:
    """One first contact while some can open only so many descriptors more, and one when they can again."""
    fresh = found.mortal()
    cast, key = found.cast(fresh), found.key()
    ticket, squeezed = found.offer(cast, key), found.survivors if survivors else [fresh]
    for rank in squeezed:
        rank.ask("spare_files", count=count)
    found.fetch(cast, key, ticket, 5.0)
    outcomes = {_outcome(target, key) for target in cast[1]}
    for rank in squeezed:
        rank.ask("spare_files", count=-1)
    for source in cast[0]:
        source.ask("withdraw", key=key)
        source.ask("ended", key=key)
    found.hand_over(fresh)
    assert fresh.ask("held")["pages"] == 0
    fresh.signal(9)
    for rank, held in zip(found.survivors, found.held, strict=True):
        assert rank.ask("held", at_most=held)["pages"] == 0
    return outcomes


def _outcome(target, key: str) -> str:
    try:
        assert target.ask("wait", key=key, alone=False)["difference"] == ""
    except Failed as error:
        return error.kind if error.details["state"] == "free" else "not freed"
    return "whole"


@pytest.mark.parametrize("kind", ["shm-direct", "tcp"])
def test_a_target_without_descriptors_says_so(kind):
    with play(kind, "target") as found:
        outcomes = [squeezed(found, count, survivors=False) for count in COUNTS]
    assert outcomes[0] == {"ExhaustedError"}
    allowed = {"ExhaustedError", "whole"} | ({"TransportError"} if kind == "tcp" else set())  # ZMQ may just be silent
    assert set().union(*outcomes) <= allowed


@pytest.mark.parametrize("kind", ["shm-packed", "tcp"])
def test_a_source_without_descriptors_is_met_again_when_it_has_some(kind):
    """Its listener had ended for good, and it seemed to be on another host."""
    with play(kind, "target") as found:
        outcomes = [squeezed(found, count, survivors=True) for count in COUNTS[:3]]
    assert outcomes[0] != {"whole"}
    assert set().union(*outcomes) <= {*ERRORS, "whole"}


def test_whoever_can_t_accept_now_accepts_later(monkeypatch):
    with pair(*layouts(Parallel(), Parallel()), transports=("shm",)) as (source, target):
        listener = source.agents[0]._listeners[0]
        accept, failures = listener.accept, []

        def refuse(timeout_s):
            if len(failures) < 2:
                failures.append(timeout_s)
                raise TransportError("too many open files")
            return accept(timeout_s)

        monkeypatch.setattr(listener, "accept", refuse)
        assert wait_until(lambda: len(failures) == 2, timeout_s=30.0)
        hand_over(source, target, "one")


@pytest.mark.parametrize("count", [0, 1, 2, 4, 8])
def test_no_more_threads_is_an_error_that_ends(count, monkeypatch):
    """Pages stayed reserved, the keeper and gRPC's server ended for good, and ``close`` waited for ever."""
    start, left = threading.Thread.start, [math.inf]

    def scarce(thread):
        if left[0] <= 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pair(*layouts(Parallel(tp=2), Parallel(tp=2)), transports=("shm",)) as (source, target):
        ends, outcomes = Ends(), set()
        ticket = source.offer("lost", TOKENS, on_end=ends)
        target.reserve("lost", TOKENS)
        left[0] = count
        for rank in target.ranks:
            try:
                rank.agent.fetch(ticket, rank.tables["lost"], timeout_s=5.0).release()
            except PdxferError as error:
                outcomes.add(type(error).__name__)
        with suppress(ExhaustedError):
            target.agents[0].start_fetch(ticket, target.ranks[0].tables["lost"]).join(30.0)
        left[0] = math.inf
        assert outcomes <= {"ExhaustedError", *ERRORS}, "each by name"
        withdraw(source, "lost", ends)
        assert wait_until(lambda: not any(agent.underway() for agent in target.agents), timeout_s=30.0)
        hand_over(source, target, "one")


AGENT = """
import gc, os, sys, tempfile
from pdxfer.agent import Agent, AgentConfig
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.errors import ExhaustedError
from tests.workers import hybrid_spec
where = sys.argv[1]
layout = build_layout(hybrid_spec(), Parallel(), Storage())
def start():
    with Agent(AgentConfig(worker="w", arena_bytes=1 << 20, chunk_bytes=4096)) as agent:
        agent.attach(layout, agent.allocate(layout.ranks[0]))
        agent.start()
start()  # what libraries open once stays open
blocks = []
tempfile.tempdir = where
try:
    while True:
        blocks.append(f"{where}/{len(blocks)}")
        open(blocks[-1], "xb").close()
except OSError:
    blocks.pop()
before, failures = len(os.listdir("/proc/self/fd")), 0
while blocks:
    said = ""
    try:
        start()
    except ExhaustedError as error:
        said = str(error)
    if not said:
        break
    assert "No space left" in said, said
    assert sorted(os.listdir(where)) == sorted(map(os.path.basename, blocks))
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before, "descriptors were left open"
    failures += 1
    os.unlink(blocks.pop())
print(failures, len(blocks))
"""


def test_a_full_disk_is_said_and_nothing_is_left_on_it(tmp_path):
    """A file system with room for eight files; one after the other is freed, until an agent fits."""
    mount = 'mount -t tmpfs -o nr_inodes=9 none "$0" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, str(tmp_path), sys.executable, "-c", AGENT, str(tmp_path)]
    run = partial(subprocess.run, check=False, capture_output=True, text=True, cwd=Path(__file__).parent.parent)
    if shutil.which("unshare") is None or run([*command[:6], "true"]).returncode:
        pytest.skip("needs the right to mount a file system")
    done = run(command)
    assert done.returncode == 0, done.stderr
    failures, left = map(int, done.stdout.split())
    assert failures >= 3  # a directory for control, one for shm, a socket in each
    assert left


LIMITED = """
import os, resource
from pdxfer.errors import ExhaustedError
from pdxfer.transport import create_transport
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))  # memfds obey it, too
transport = create_transport("shm")
before = os.listdir("/proc/self/fd")
for nbytes in (1 << 24, 1 << 46):
    try:
        transport.allocate(nbytes)
    except ExhaustedError as error:
        assert str(nbytes) in str(error)
        assert os.listdir("/proc/self/fd") == before
    else:
        raise AssertionError("it was there")
transport.allocate(1 << 16)
"""


def test_memory_that_is_not_there_is_said_and_none_is_kept():
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_private_directory_without_a_descriptor_leaves_none(tmp_path, monkeypatch):
    """It left ten of them, and blamed a sweep."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        PrivateDirectory("x-", "s", str(tmp_path))
    assert not os.listdir(tmp_path)


@pytest.fixture
def no_logs():
    """pytest keeps the records of a test, and with an error's its frames."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("no_logs")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_kept_of_transfers_that_ended_does_not_grow(monkeypatch, scheme):
    """Of each agent so many records, and timelines (theirs and the latest); no page, program, session or fetch."""
    for module in ("source", "journal"):
        monkeypatch.setattr(f"pdxfer.agent.{module}._ENDED_MAX", 4)
    with pair(*layouts(Parallel(tp=2), Parallel(tp=4)), transports=(scheme,)) as (source, target):
        for number in range(20):
            if number % 4:
                hand_over(source, target, f"{number}", TOKENS + number)
            else:
                _cancelled(source, target, f"{number}")
            for rank in (*source.ranks, *target.ranks):
                rank.give_back(f"{number}")
        agents = len(source.ranks) + len(target.ranks)
        bounds = {Timeline: 8 * agents, **dict.fromkeys((Offer, Hold), 4 * agents),
                  **dict.fromkeys((Side, EdgeProgram, SourceSession, Fetch, Received), 0)}  # fmt: skip
        wait_until(lambda: not _over(bounds), timeout_s=30.0)
        assert _over(bounds) == {}
        records = [r for agent in source.agents for r in agent.source._records.values() if r.hold is not None]
        assert records
        assert not any(record.hold.units for record in records)


def test_a_reader_that_opens_again_and_again_has_one_session():
    """Each was remembered until the transfer had ended."""
    with pair(*layouts(Parallel(), Parallel()), transports=("shm",)) as (source, target):
        ends, (agent,), (serves,) = Ends(), target.agents, source.agents
        ticket = source.offer("one", TOKENS, on_end=ends)
        peer = agent.peers.get(serves.address, epoch=None, deadline_s=time.monotonic() + 30.0)
        message = Open(
            transfer="one", ticket=ticket.encode(), epoch=agent.epoch, source_epoch=serves.epoch, target_worker="D",
            target_rank=0, layout_digest=target.layout.digest, first_token=0, relay=False, chunk_bytes=64 << 10,
            plan_digest=make_plan(source.layout, target.layout).digest, mode=Mode.DIRECT,
            transport=serves.contact_addresses[0],
        )  # fmt: skip
        names = [peer.client.open(message, timeout_s=30.0).session for _ in range(20)]
        (record,) = serves.source._records.values()
        assert [[*record.sessions], record.session_names, [*serves.source._by_session]] == [names[-1:]] * 3
        target.reserve("one", TOKENS)
        target.fetch(ticket, "one")[0].release()
        ends.wait(1)
        assert ends.outcomes == ["completed"]


@pytest.mark.parametrize("forgotten", [True, False])
def test_clients_that_nobody_asks_for_are_closed(monkeypatch, forgotten):
    """Those of a peer that died are used no more, and there is another one after every restart."""
    with pair(*layouts(Parallel(), Parallel())) as (source, target):
        hand_over(source, target, "one")
        peers = target.agents[0].peers
        client = peers.client(source.agents[0].address)
        monkeypatch.setattr(f"pdxfer.agent.peers.{'_STRAY_S' if forgotten else '_KNOWN_S'}", 0.0)
        for peer, _ in peers.known() if forgotten else ():
            peers.forget(peer)
        assert wait_until(lambda: client._closed, timeout_s=30.0)  # the agent's own sweeper does it
        assert not peers._clients
        assert not peers._used
        hand_over(source, target, "two")


def _cancelled(source: Worker, target: Worker, key: str) -> None:
    ends = Ends()
    ticket = source.offer(key, TOKENS, on_end=ends)
    target.reserve(key, TOKENS)
    fetches = target.start(ticket, key)
    for fetch in fetches:
        fetch.cancel()
    with suppress(PdxferError):
        for received in settle(fetches):
            received.release()
    withdraw(source, key, ends)


def _over(bounds: dict[type, int]) -> dict[str, int]:
    """How many objects there are of each kind that has more than it may."""
    gc.collect()
    found = Counter(type(thing) for thing in gc.get_objects())
    return {kind.__name__: found[kind] for kind, most in bounds.items() if found[kind] > most}
