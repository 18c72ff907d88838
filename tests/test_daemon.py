"""Engines behind a sidecar: the bytes and errors of an embedded agent, and real processes that die and come back.

``PDXFER_ROUNDS`` (7) is how often engines and daemons are killed.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from pdxfer.agent import SidecarAgent, client
from pdxfer.agent.config import DaemonConfig
from pdxfer.agent.daemon import Daemon
from pdxfer.agent.frames import FRAMES_VERSION, Pipe, open_socket
from pdxfer.agent.spawn import DaemonProcess
from pdxfer.builders import Parallel
from pdxfer.control import ControlClient
from pdxfer.errors import AbortedError, DeadlineError, MisuseError, PdxferError, PeerError, TicketError
from pdxfer.testing.oracle import Memory, Oracle
from pdxfer.ticket import issue_ticket
from pdxfer.transfer import State
from tests.pairs import Ends, hand_over, pair, wait_until
from tests.rank_process import Failed, RankProcess, joined
from tests.workers import Rank, Worker, layouts, resources

ROUNDS = int(os.environ.get("PDXFER_ROUNDS", "7"))
TOKENS = 70


def stand_still(daemon):
    """All its threads, before this returns: the signal alone leaves them a moment to answer in."""
    daemon.process.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{daemon.process.pid}/task")
    assert wait_until(lambda: all(") T " in (t / "stat").read_text() for t in threads.iterdir()), timeout_s=20.0)


#: What gRPC's pool and pollers add, which grow with calls at the same moment; of dead engines' memory nothing stays.
POOLS = {"fds": 12, "sockets": 6, "threads": 6}
LAYOUT = {"tp": 1, "storage": {"page_tokens": 8, "pages": 256}}


@pytest.fixture
def directory():
    """A short one: Unix sockets lie below it."""
    path = tempfile.mkdtemp(prefix="s-")
    yield path
    shutil.rmtree(path)


# ---------------------------------------------------------------- the same as embedded


@pytest.mark.parametrize(
    ("sides", "transport", "memory"),
    [
        ("both", "shm", ""),
        ("both", "shm", "numpy"),
        ("both", "tcp", "torch"),
        ("source", "shm", "torch"),
        ("source", "tcp", ""),
        ("target", "shm", ""),
        ("target", "tcp", "numpy"),
    ],
)
def test_every_byte_arrives_whoever_has_a_sidecar(directory, sides, transport, memory):
    if memory == "torch":
        pytest.importorskip("torch")
    by_sidecar = {"sidecar": directory, "own_memory": memory}
    config = {
        "of_source": by_sidecar if sides != "target" else {},
        "of_target": by_sidecar if sides != "source" else {},
    }
    with pair(*layouts(Parallel(tp=1), Parallel(tp=2)), transports=(transport,), **config) as (source, target):
        for key in ("one", "two"):
            (first, *_) = hand_over(source, target, key)
        if transport == "shm":
            assert {edge.mode for edge in first.edges} == {"direct"}, "shared memory, whoever made it, is read in place"
        assert first.plan.source.digest == source.layout.digest
        hand_over(source, target, "three", first_token=33)


@contextmanager
def both(directory, **config):
    with pair(*layouts(Parallel(), Parallel()), sidecar=directory, **config) as workers:
        yield workers


def test_errors_come_as_the_classes_they_are(directory):
    with both(directory) as (source, target):
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        with pytest.raises(TicketError):
            target.agents[0].fetch("AAAA", target.ranks[0].tables["one"])
        with pytest.raises(MisuseError, match="is offered"):
            source.agents[0].offer("one", source.ranks[0].tables["one"], kv_tokens=TOKENS)
        with pytest.raises(MisuseError, match="page table"):
            target.agents[0].fetch(ticket, {"kv": [0.5]})
        (received,) = target.fetch(ticket, "one")
        received.release()
        again = target.start(ticket, "one")[0]
        with pytest.raises(PeerError, match="ended") as caught:
            again.wait()
        assert caught.value.reason == "TRANSFER_ENDED" or caught.value.reason.startswith("STALE")
        assert wait_until(again.settle, timeout_s=30.0)
        assert again.state is State.FREE


def test_a_fence_is_passed_once_in_the_engine_before_the_first_byte(directory):
    passed = []
    with both(directory) as (source, target):
        ticket = source.offer("one", TOKENS, fence=lambda: passed.append(threading.current_thread().name))
        target.reserve("one", TOKENS)
        assert passed == []
        target.fetch(ticket, "one")[0].release()
        assert passed == ["pdxfer-fence"]

        def broken():
            raise RuntimeError("the device is lost")

        ends = Ends()
        ticket = source.offer("two", TOKENS, fence=broken, on_end=ends)
        target.reserve("two", TOKENS)
        with pytest.raises(PdxferError, match="the device is lost"):
            target.fetch(ticket, "two")
        ends.wait(1)


def test_callers_that_wait_at_once_read_each_other_s_answers(directory):
    """One of them reads: for the others too, and when it has its own answer, another one does."""
    with both(directory) as (source, target), ThreadPoolExecutor(3) as pool:
        engine, passes = target.agents[0], [threading.Event() for _ in range(3)]
        fetches = []
        for number, passed in enumerate(passes):
            ticket = source.offer(f"{number}", TOKENS, fence=lambda passed=passed: passed.wait(20.0))
            target.reserve(f"{number}", TOKENS)
            tables = target.ranks[0].tables[f"{number}"]
            fetches.append(pool.submit(engine.fetch, ticket, tables))
            assert wait_until(lambda n=number: len(engine._calls._waiting) == n + 1, timeout_s=20.0)
        for done, (passed, fetch) in enumerate(zip(passes, fetches, strict=True)):  # whoever reads goes first
            assert engine.counters.get("fetched", 0) == done
            passed.set()
            fetch.result(60.0).release()


def test_withdrawn_cancelled_declined_and_kept(directory):
    with both(directory, lease_s=1.5) as (source, target):
        ends = Ends()
        source.offer("one", TOKENS, on_end=ends)
        source.agents[0].withdraw("one")
        declined, kept = source.offer("two", TOKENS, on_end=ends), source.offer("three", TOKENS)
        target.agents[0].keep(kept)
        target.agents[0].decline(declined, "not needed")
        ends.wait(2)
        assert [outcome.split()[0] for outcome in ends.outcomes] == ["withdrawn", "declined"]
        time.sleep(2.5)  # more than a lease
        target.reserve("three", TOKENS)
        target.fetch(kept, "three")[0].release()
        lost = source.offer("four", TOKENS, on_end=ends)
        source.agents[0].withdraw("four")
        target.reserve("four", TOKENS)
        fetch = target.start(lost, "four")[0]
        fetch.cancel()
        with pytest.raises(PdxferError):
            fetch.wait()
        assert source.agents[0].counters["offered"] == 4


def test_a_scheduler_s_issuer_writes_tickets_that_outlive_the_daemon(directory):
    with DaemonProcess(f"{directory}/p/s") as daemon, Worker(layouts(Parallel(), Parallel())[1], seed=2) as target:
        layout = layouts(Parallel(), Parallel())[0]
        with SidecarAgent(daemon.socket, worker="P") as source:
            regions = source.allocate(layout.ranks[0])
            for region in regions:
                np.frombuffer(region.view, np.uint8)[:] = 7
            source.attach(layout, regions)
            source.start()
            issuer = source.issuer
            daemon.restart()
            assert wait_until(lambda: source.reattached == 1, timeout_s=60.0)
            assert source.issuer == issuer
            nonce = bytes(16)
            tables = {n: [*range(5)] if h.page_rows > 1 else [0] for n, h in layout.ranks[0].tables().items()}
            source.offer("one", tables, kv_tokens=TOKENS, nonce=nonce)
            ticket = issue_ticket([issuer], "one", kv_tokens=TOKENS, state_tokens=TOKENS, nonce=nonce)
            target.reserve("one", TOKENS)
            target.fetch(ticket.encode(), "one")[0].release()


# ---------------------------------------------------------------- who may attach, and what is refused


def test_only_this_user_s_private_directory_will_do(directory):
    os.chmod(directory, 0o755)
    with pytest.raises(MisuseError, match="mode 0755"):
        Daemon(DaemonConfig(socket=f"{directory}/s"))
    with Daemon(DaemonConfig(socket=f"{directory}/p/s")) as daemon:
        assert os.stat(f"{directory}/p").st_mode & 0o777 == 0o700
        with pytest.raises(MisuseError, match="another server"):
            Daemon(daemon.config)
    assert os.listdir(f"{directory}/p") == []
    with pytest.raises(PeerError) as caught:
        SidecarAgent(f"{directory}/p/s", connect_s=0.0)
    assert caught.value.reason == "SIDECAR_UNREACHABLE"


def test_frames_that_are_none_end_their_own_connection_alone(directory):
    rng = random.Random(7)
    with Daemon(DaemonConfig(socket=f"{directory}/p/s")) as daemon:
        for _ in range(50):
            with open_socket(daemon.config.socket) as sock:
                sock.sendall(rng.choice([b"", b"\xff\xff\xff\xff", b"\x05\0\0\0"]) + rng.randbytes(rng.randrange(64)))
        pipe = Pipe(open_socket(daemon.config.socket))
        with pytest.raises(MisuseError, match="protocol 99"):
            pipe.ask("hello", {"version": 99}, 5.0)
        for name, values in (
            ("nothing", {}),
            ("offer", {"x": 1}),
            ("region", {"nbytes": 1, "name": "r"}),
            ("check", {}),
        ):
            with pytest.raises(MisuseError):
                pipe.ask(name, values, 5.0)
        with open("/dev/zero", "rb") as file:
            pipe.ask("region", {"nbytes": 4096, "name": "r"}, 5.0, fd=file.fileno())
        layout = layouts(Parallel(), Parallel())[0]
        attach = {"rank": 0, "worker": "w", "layout": layout.to_bytes(), "epoch": bytes(16), "key": bytes(32)}
        with pytest.raises(MisuseError, match="a socket for its answers"):
            pipe.ask("attach", attach, 5.0)
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(PdxferError, match="not shared memory"):
            pipe.ask("attach", attach, 5.0, fd=theirs.fileno())
        assert pipe.ask("hello", {"version": FRAMES_VERSION}, 5.0)["version"] == FRAMES_VERSION
        pipe.close()
        assert daemon.agents == {}


def test_an_engine_that_attaches_at_the_second_try_ends_with_the_daemon(directory):
    layout = layouts(Parallel(), Parallel())[0]
    with Daemon(DaemonConfig(socket=f"{directory}/p/s")) as daemon, SidecarAgent(daemon.config.socket) as engine:
        engine.attach(layout, [np.zeros(region.nbytes, np.uint8) for region in layout.ranks[0].regions])
        daemon.draining = True
        with pytest.raises(PeerError):
            engine.start()
        daemon.draining = False
        bad = {"rank": 0, "worker": "w", "layout": b"no layout", "epoch": bytes(16), "key": bytes(32)}
        ours, theirs = socket.socketpair()
        with ours, theirs, pytest.raises(PdxferError):
            engine._pipe.ask("attach", bad, 30.0, fd=theirs.fileno())
        engine.start()
        (attached,) = daemon._engines
        daemon.close()
        assert attached.ended.is_set()
        assert daemon.agents == {}


def test_what_a_silent_sidecar_begins_late_ends_by_itself(directory, monkeypatch):
    """Nothing says sooner that the pages are free."""
    layout = layouts(Parallel(), Parallel())[0]
    with DaemonProcess(f"{directory}/p/s") as daemon, Worker(layout, seed=1) as peer:
        rank = Rank(layout, seed=2, sidecar=daemon.socket)
        with rank.agent as engine:
            ticket = peer.offer("one", TOKENS)
            stand_still(daemon)
            monkeypatch.setattr(client, "_CALL_S", 0.2)
            fetch = engine.start_fetch(ticket, rank.reserve("one", TOKENS))
            with pytest.raises(DeadlineError):
                engine.offer("two", rank.reserve("two", TOKENS), kv_tokens=TOKENS)
            assert (fetch.done, fetch.settle()) == (False, False)
            monkeypatch.undo()
            daemon.process.send_signal(signal.SIGCONT)
            with suppress(AbortedError):  # it may be too quick to be stopped; then the pages are ours
                fetch.wait().release()
            assert wait_until(fetch.settle, timeout_s=30.0)
            rank.check_idle()


def test_a_fetch_that_can_t_even_begin_says_so_at_once(directory):
    with both(directory) as (source, target):
        ticket = source.offer("one", TOKENS)
        target.reserve("one", TOKENS)
        with pytest.raises(MisuseError, match="wrong arguments"):
            target.agents[0].fetch(ticket, target.ranks[0].tables["one"], speed="high")
        target.fetch(ticket, "one")[0].release()


def test_a_device_has_it_all_before_the_engine_hears_of_it(directory, monkeypatch):
    """Copies to a device are queued on a stream of ours, for which the engine's does not wait."""
    states = []
    with both(directory, own_memory="numpy") as (source, target):
        target.reserve("one", TOKENS)
        (rank,) = target.ranks
        before = [buffer.copy() for buffer in rank.buffers]

        def waits(buffers):
            copied = any((now != then).any() for now, then in zip(rank.buffers, before, strict=True))
            states.append((len(buffers), copied, [fetch.state for fetch, _ in rank.agent._fetches.values()]))

        monkeypatch.setattr("pdxfer.agent.mirror.settle", waits)
        target.fetch(source.offer("one", TOKENS), "one")[0].release()
        assert states == [(len(rank.buffers), True, [State.RECEIVING])]


# ---------------------------------------------------------------- death


def sidecars(directory, **settings):
    small = {
        "agent.arena_bytes": "1MiB",
        "agent.chunk_bytes": "64KiB",
        "agent.lease_s": "20s",
        "drain_s": 0,
        **settings,
    }
    return [DaemonProcess(f"{directory}/{name}/s", {**small, "worker": name}) for name in "PD"]


def engine(directory, name, seed):
    return RankProcess(Path(directory) / f"e{name}", layout=LAYOUT, seed=seed, sidecar=f"{directory}/{name}/s")


def transfer(source, target, key):
    """One whole hand-off; the target's process compares every byte."""
    ticket = joined([source.ask("offer", key=key, tokens=TOKENS)])
    target.ask("fetch", key=key, ticket=ticket, tokens=TOKENS, timeout_s=20.0)
    assert target.ask("wait", key=key)["difference"] == ""
    assert source.ask("ended", key=key) == "completed"


def test_engines_die_under_living_daemons(directory):
    """The other side gets one error by name; the daemon gives everything back; the next life of the engine works."""
    rng, held, worst_s = random.Random(3), None, 0.0
    p, d = sidecars(directory)
    with p, d:
        source, target = engine(directory, "P", 1), engine(directory, "D", 2)
        for number in range(ROUNDS):
            transfer(source, target, f"before-{number}")
            ticket = joined([source.ask("offer", key=f"lost-{number}", tokens=TOKENS)])
            if number % 2:
                target.tell("fetch", key="lost", ticket=ticket, tokens=TOKENS, timeout_s=20.0)
                time.sleep(rng.random() * 0.01)
                target.signal(signal.SIGKILL)
                started_s = time.monotonic()
                target.__exit__(None)
                target = engine(directory, "D", 2)
            else:
                source.signal(signal.SIGKILL)
                target.ask("fetch", key="lost", ticket=ticket, tokens=TOKENS, timeout_s=20.0)
                with pytest.raises(Failed) as caught:
                    target.ask("wait", key="lost")
                assert caught.value.kind in ("PeerError", "StaleError", "AbortedError", "TransportError")
                started_s = time.monotonic()
                source.__exit__(None)
                source = engine(directory, "P", 1)
            transfer(source, target, f"after-{number}")
            worst_s = max(worst_s, time.monotonic() - started_s)
            if number == 2:
                held = [settled(each, directory) for each in (p, d)]
        assert_no_more(directory, held, (p, d))
        source.__exit__(None), target.__exit__(None)
    print(f"engines killed {ROUNDS} times: the slowest was back with a hand-off after {worst_s:.2f} s")


def test_daemons_die_under_living_engines(directory):
    """What was underway ends by name, pages come back at once, and after a restart offers work without a restart."""
    held, worst_s = None, 0.0
    p, d = sidecars(directory)
    with p, d, engine(directory, "P", 1) as source, engine(directory, "D", 2) as target:
        for number in range(ROUNDS):
            transfer(source, target, f"before-{number}")
            ticket = joined([source.ask("offer", key=f"lost-{number}", tokens=TOKENS)])
            if number % 2:
                target.ask("fetch", key="lost", ticket=ticket, tokens=TOKENS, timeout_s=20.0)
                d.stop(signal.SIGKILL)
                with suppress(Failed):  # it may have been quicker; how it is told otherwise is tested above
                    target.ask("wait", key="lost")
                source.ask("withdraw", key=f"lost-{number}")
                source.ask("ended", key=f"lost-{number}")
            else:
                p.stop(signal.SIGKILL)
                assert source.ask("ended", key=f"lost-{number}") == "lost: the sidecar is gone"
                with pytest.raises(Failed) as caught:
                    source.ask("offer", key="none", tokens=TOKENS)
                assert caught.value.reason == "SIDECAR_LOST"
            started_s = time.monotonic()
            (d if number % 2 else p).restart()
            (target if number % 2 else source).ask("attached", times=number // 2 + 1)
            transfer(source, target, f"after-{number}")
            worst_s = max(worst_s, time.monotonic() - started_s)
            if number == 1:
                held = [each.ask("held") for each in (source, target)]
        for each, before in zip((source, target), held or (), strict=True):
            each.ask("held", at_most=before)
    print(f"daemons killed {ROUNDS} times: the slowest was back with a hand-off after {worst_s:.2f} s")


def test_what_is_refused_by_a_sidecar_that_dies_is_not_ended_once_more(directory):
    """An engine frees its pages where the call raises; an end told as well would free them twice."""
    layout = layouts(Parallel(), Parallel())[0]
    with DaemonProcess(f"{directory}/p/s") as daemon, Worker(layout, seed=1) as peer:
        rank = Rank(layout, seed=2, sidecar=daemon.socket)
        with rank.agent as engine, ThreadPoolExecutor(2) as pool:
            ticket, called = peer.offer("one", TOKENS), []
            stand_still(daemon)
            begun = [
                pool.submit(
                    engine.offer,
                    "two",
                    rank.reserve("two", TOKENS),
                    kv_tokens=TOKENS,
                    on_end=lambda *a: called.append(a),
                ),
                pool.submit(
                    engine.start_fetch, ticket, rank.reserve("one", TOKENS), on_done=lambda: called.append("fetch")
                ),
            ]
            assert wait_until(lambda: len(engine._calls._waiting) == 2, timeout_s=20.0)
            daemon.restart()
            for each in begun:
                with pytest.raises(PeerError) as caught:
                    each.result()
                assert caught.value.reason == "SIDECAR_LOST"
            assert wait_until(lambda: engine.reattached == 1, timeout_s=60.0)
            last = []
            engine.offer("three", rank.reserve("three", TOKENS), kv_tokens=TOKENS, on_end=lambda *a: last.append(a))
            engine.withdraw("three")
            assert wait_until(lambda: last, timeout_s=20.0)  # by the same thread, in order
            assert called == []


def test_a_sidecar_that_dies_leaves_what_has_arrived(directory):
    """It was lost, its pages free; then it was copied into them all the same, READY, from a twin that was cleared."""
    at_source, at_target = layouts(Parallel(), Parallel())
    called, goes_on, ended = threading.Event(), threading.Event(), []

    def slow(*_):
        called.set()
        goes_on.wait(60.0)

    with DaemonProcess(f"{directory}/p/s") as daemon, Worker(at_source, seed=1) as peer:
        rank = Rank(at_target, seed=2, sidecar=daemon.socket, own_memory="numpy")
        with rank.agent as engine:
            engine.offer("busy", rank.reserve("busy", TOKENS), kv_tokens=TOKENS, on_end=slow)
            engine.withdraw("busy")
            assert called.wait(20.0)
            oracle = Oracle.of(at_source, key="one", tokens=TOKENS)
            ticket, tables = peer.offer("one", TOKENS, oracle=oracle), rank.reserve("one", TOKENS)
            memory = Memory(layout=at_target, buffers=(rank.buffers,), tables=(tables,))
            before = memory.copy()
            fetch = engine.start_fetch(ticket, tables, on_done=lambda: ended.append(fetch.state))
            assert wait_until(lambda: not engine._jobs.empty(), timeout_s=20.0)
            daemon.restart()
            assert wait_until(lambda: engine.reattached == 1, timeout_s=60.0)
            assert (fetch.done, fetch.settle(), fetch.state) == (False, False, State.RECEIVING)
            goes_on.set()
            fetch.wait().release()
            oracle.check(memory, before)
            assert wait_until(lambda: ended, timeout_s=20.0)
            assert len(ended) == 1


def test_nobody_waits_for_the_fence_of_an_engine_that_is_gone(directory):
    """A peer's call that had come so far at that moment waited two minutes for it."""
    layout = layouts(Parallel(), Parallel())[0]
    with Daemon(DaemonConfig(socket=f"{directory}/p/s")) as daemon, ThreadPoolExecutor(1) as pool:
        rank = Rank(layout, seed=1, sidecar=daemon.config.socket)
        (attached,) = daemon._engines
        rank.agent.close()
        assert attached.ended.wait(30.0)
        with pytest.raises(AbortedError, match="engine is gone"):
            pool.submit(attached._fence, "one").result(30.0)


def settled(daemon, directory):
    time.sleep(3.0)  # more than an ended agent needs to be collected
    return resources(directory, daemon.process.pid)


def assert_no_more(directory, before, daemons):
    for daemon, then in zip(daemons, before or (), strict=True):
        over = {}

        def no_more(daemon=daemon, then=then, over=over):
            over.clear()
            over.update(
                {
                    k: (v, then[k])
                    for k, v in resources(directory, daemon.process.pid).items()
                    if v > then[k] + POOLS.get(k, 0)
                }
            )
            return not over

        assert wait_until(no_more, timeout_s=15.0), f"more than before at {daemon.socket}: {over}"


# ---------------------------------------------------------------- drain


def test_a_drain_under_load_fails_nothing(directory):
    """Not ready first, new work refused at once, live leases served, then gone."""
    health = f"unix://{directory}/P/health"
    p, d = sidecars(directory, drain_s=30)
    with p, d:
        p.stop()
        p = DaemonProcess(p.socket, {"worker": "P", "health": health, "drain_s": 30, "agent.lease_s": "20s"})
        with (
            p,
            engine(directory, "P", 1) as source,
            engine(directory, "D", 2) as target,
            ControlClient(health) as probe,
        ):
            assert (probe.health(""), probe.health("live")) == ("SERVING", "SERVING")
            live = [joined([source.ask("offer", key=f"live-{n}", tokens=TOKENS)]) for n in range(4)]
            p.process.send_signal(signal.SIGTERM)
            assert wait_until(lambda: probe.health("") == "NOT_SERVING", timeout_s=20.0)
            assert probe.health("live") == "SERVING"
            with ControlClient(source.address) as rank:
                assert wait_until(lambda: rank.health("") == "NOT_SERVING", timeout_s=20.0)
            with pytest.raises(Failed) as caught:
                source.ask("offer", key="new", tokens=TOKENS)
            assert (caught.value.kind, caught.value.reason) == ("PeerError", "DRAINING")
            for number, ticket in enumerate(live):
                assert p.process.poll() is None
                target.ask("fetch", key=f"live-{number}", ticket=ticket, tokens=TOKENS, timeout_s=20.0)
                assert target.ask("wait", key=f"live-{number}")["difference"] == ""
                assert source.ask("ended", key=f"live-{number}") == "completed"
            assert p.process.wait(30.0) == 0


def test_a_drain_by_call_waits_and_is_bounded(directory):
    with pair(*layouts(Parallel(), Parallel()), of_source={"sidecar": directory}) as (source, target):
        ticket = source.offer("one", TOKENS)
        pipe = Pipe(open_socket(source.ranks[0].sidecar))
        assert pipe.ask("drain", {}, 5.0) == {"draining": True, "underway": 1, "ranks": [0]}
        with pytest.raises(PeerError, match="drains") as caught:
            source.agents[0].offer("two", source.ranks[0].tables["one"], kv_tokens=TOKENS)
        assert caught.value.reason == "DRAINING"
        target.reserve("one", TOKENS)
        target.fetch(ticket, "one")[0].release()
        assert wait_until(lambda: pipe.ask("status", {}, 5.0)["underway"] == 0, timeout_s=20.0)
        pipe.close()
