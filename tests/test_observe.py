"""What a process shows of its agents: readiness by check, metrics with few series, and the admin's answers."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from pdxfer.agent.journal import component_kind
from pdxfer.builders import Parallel
from pdxfer.driver import EdgeStats
from pdxfer.errors import AbortedError, CorruptError, DeadlineError, MisuseError, PeerError, StaleError, TransportError
from pdxfer.observe import Admin, Observer
from pdxfer.observe.metrics import COUNTERS, GAUGES, HISTOGRAMS
from pdxfer.observe.readiness import CHECKS
from pdxfer.testing.faults import Fault
from tests.certificates import Authority
from tests.pairs import fails, hand_over, pair, wait_until
from tests.test_agent_damage import damaged
from tests.workers import layouts

ONE = layouts(Parallel(), Parallel())


@contextmanager
def watched(*workers):
    with Observer() as observer:
        for worker in workers:
            for agent in worker.agents:
                observer.add(agent)
        yield observer


@pytest.fixture
def both():
    with pair(*ONE) as (source, target), watched(source, target) as observer:
        yield source, target, observer


def get(admin: Admin, path: str, method: str = "GET", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(admin.url + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def series(observer: Observer) -> list[str]:
    return [line for line in observer.metrics.expose()[0].decode().splitlines() if line and line[0] != "#"]


def value(observer: Observer, name: str) -> float:
    """Of one series, as it is exposed."""
    found = dict(line.rsplit(" ", 1) for line in series(observer))
    return float(found[name])


def give_back(key: str, *workers) -> None:
    for rank in (rank for worker in workers for rank in worker.ranks):
        rank.give_back(key)


def problem(observer: Observer, check: str) -> str:
    """What is wrong, when nothing but ``check`` is; as probes see it, too."""
    problems = observer.readiness.problems(fresh=True)
    assert [name for name in CHECKS if problems[name]] in ([], [check])
    assert value(observer, f'pdxfer_ready_check{{check="{check}"}}') == float(not problems[check])
    with Admin(observer, "127.0.0.1:0") as admin:
        assert get(admin, "/livez") == (200, "ok\n")
        for path in ("/readyz", f"/readyz/{check}"):
            code, text = get(admin, path)
            assert (code, f"[-] {check}" in text) == ((503, True) if problems[check] else (200, False))
    return problems[check]


# -- readiness -------------------------------------------------------------------------------------


def test_ready_when_nothing_is_wrong(both):
    source, target, observer = both
    hand_over(source, target, "one")
    assert not any(observer.readiness.problems(fresh=True).values())
    assert value(observer, "pdxfer_ready") == 1


def test_not_ready_when_a_plane_is_down(both):
    _, target, observer = both
    target.agents[0]._listeners[0].close()
    assert "memory" in problem(observer, "planes")


def test_not_ready_when_the_control_plane_is_down(both):
    _, target, observer = both
    target.agents[0]._server.stop()
    assert "can't be reached" in problem(observer, "control")


def test_not_ready_when_the_arena_lost_count():
    with pair(*ONE, mode="packed") as (source, target), watched(source) as observer:
        hand_over(source, target, "one")
        arena = source.agents[0].memory.arena("memory")
        kept, arena._gaps = arena._gaps, arena._gaps[:-1]
        assert "the arena lost" in problem(observer, "arena")
        arena._gaps = kept
        assert not problem(observer, "arena")


def test_not_ready_when_keys_are_missing(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ab" * 32)
    keys.chmod(0o600)
    with pair(*ONE, ticket_keys=str(keys)) as (source, _), watched(source) as observer:
        assert not problem(observer, "keys")
        keys.unlink()
        assert str(keys) in problem(observer, "keys")


def test_not_ready_while_draining(both):
    _, target, observer = both
    target.agents[0].drain()
    assert "0 underway" in problem(observer, "draining")
    assert value(observer, "pdxfer_drain_state") == 1


def test_a_process_without_engines_is_ready_unless_it_drains():
    draining = []
    with Observer(draining=lambda: bool(draining)) as observer:
        assert not any(observer.problems().values())
        draining.append(1)
        assert problem(observer, "draining") == "draining"
        assert observer.status()["draining"] is True


def test_not_ready_while_over_half_of_transfers_fail_for_ten_seconds():
    now, flipped = [0.0], Fault(kind="corrupt", at=0, on="payload")
    with damaged("packed", flipped) as (source, target, faulty), watched(target) as observer:
        observer.readiness.window._clock = lambda: now[0]
        for number in range(12):
            fails(source, target, CorruptError, f"t{number}")
            give_back(f"t{number}", source, target)
            assert not observer.readiness.window.problem()
            now[0] += 0.9 if number < 11 else 3.9
        assert problem(observer, "transfers") == "7 of the last 7 transfers failed"
        faulty.plan = type(faulty.plan).of()
        for number in range(9):
            hand_over(source, target, f"good{number}")
            give_back(f"good{number}", source, target)
        assert not problem(observer, "transfers")
        now[0] += 100.0
        assert not problem(observer, "transfers")


def test_what_others_did_wrong_leaves_us_ready(both):
    _, target, observer = both
    now = [0.0]
    observer.readiness.window._clock = lambda: now[0]
    journal = target.agents[0].journal
    for number in range(100):
        journal.end(journal.begin("target", f"t{number}"), "failed", error=AbortedError("by the engine"))
        now[0] += 1.0
    assert not problem(observer, "transfers")


def test_one_slow_answer_is_no_failure(both):
    _, target, observer = both
    agent = target.agents[0]
    real, answers = agent.transports["memory"].connect, [DeadlineError("busy"), DeadlineError("busy")]

    def connect(address, *, timeout_s):
        if answers:
            raise answers.pop()
        return real(address, timeout_s=timeout_s)

    agent.transports["memory"].connect = connect
    assert not problem(observer, "planes")
    assert "busy" in problem(observer, "planes")
    assert not problem(observer, "planes")


def test_readiness_is_told_to_grpc_health(both):
    _, target, _ = both
    agent = target.agents[0]
    client = agent.peers.client(agent.address)
    assert wait_until(lambda: client.health("transport/memory") == "SERVING", timeout_s=30)
    assert client.health("") == "SERVING"
    agent._listeners[0].close()
    assert wait_until(lambda: client.health("") == "NOT_SERVING", timeout_s=30)
    assert client.health("transport/memory") == "NOT_SERVING"
    assert client.health("live") == "SERVING"


# -- metrics ---------------------------------------------------------------------------------------


def test_every_metric_of_the_table_is_exported_and_no_other(both):
    source, target, observer = both
    hand_over(source, target, "one")
    text = observer.metrics.expose()[0].decode()
    exported = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")}
    table = {f"pdxfer_{n}_total" for n in COUNTERS} | {f"pdxfer_{n}" for n in {**GAUGES, **HISTOGRAMS}}
    assert exported == table
    assert value(observer, 'pdxfer_transfers_total{outcome="completed",role="target",transport="memory"}') == 1
    assert value(observer, 'pdxfer_transfer_duration_seconds_count{role="target"}') == 1
    got = value(observer, 'pdxfer_transfer_bytes_total{component="S",direction="in",transport="memory"}')
    assert got == value(observer, 'pdxfer_transfer_bytes_total{component="S",direction="out",transport="memory"}') > 0
    assert value(observer, 'pdxfer_slots{state="free"}') > 0
    assert value(observer, "pdxfer_ranks") == 2


def test_integrity_failures_rise_from_zero():
    with damaged("packed", Fault(kind="corrupt", at=0, on="payload")) as (source, target, _), watched(target) as seen:
        name = 'pdxfer_integrity_failures_total{{component="{}",transport="memory"}}'
        before = {kind: value(seen, name.format(kind)) for kind in ("S", "kv", "conv", "latent")}
        error = fails(source, target, CorruptError)
        after = {kind: value(seen, name.format(kind)) for kind in before}
        assert set(before.values()) == {0}
        assert after == {kind: float(kind == component_kind(error.component)) for kind in before}
        failed = 'pdxfer_transfer_failures_total{reason="CORRUPT",role="target"}'
        assert value(seen, failed) == 1


def test_fall_back_in_use_is_seen(monkeypatch):
    monkeypatch.setattr("pdxfer.agent.peers._REST_S", (0.0, 0.0))  # the path that failed is tried first again
    with pair(*ONE, transports=("shm", "tcp")) as (source, target), watched(target) as observer:
        shm = target.agents[0].transports["shm"]
        real = shm.connect

        def connect(address, *, timeout_s):
            raise TransportError("refused by the test")

        shm.connect = connect
        hand_over(source, target, "one")
        assert value(observer, 'pdxfer_transport_fallback_peers{from="shm"}') == 1
        assert value(observer, 'pdxfer_transport_fallbacks_total{from="shm",reason="TRANSPORT_FAILED"}') == 1
        shm.connect = real
        hand_over(source, target, "two")
        assert value(observer, 'pdxfer_transport_fallback_peers{from="shm"}') == 0


def test_the_end_of_a_certificate_is_seen(tmp_path):
    tls = Authority(tmp_path).tls("spiffe://prod/p", common_name="p", peers=("spiffe://prod/*",), days=3)
    name = "pdxfer_certificate_expires_timestamp_seconds"
    with pair(*ONE, of_source={"tls": tls}) as (source, target), watched(source, target) as observer:
        assert 2.9 * 86_400 < value(observer, name) - time.time() < 3.1 * 86_400
        os.unlink(tls.cert)
        assert not [line for line in series(observer) if line.startswith(name)]


def test_counts_never_go_back_when_agents_leave(both):
    source, target, observer = both
    hand_over(source, target, "one")
    before = observer.counts()
    observer.remove(target.agents[0])
    assert observer.counts() == before
    assert value(observer, "pdxfer_ranks") == 1
    hand_over(source, target, "two")  # seen by the source's journal alone
    ended = observer.counts()
    assert ended["transfers", "memory", "target", "completed"] == 1
    assert ended["transfers", "memory", "source", "completed"] == 2


def test_few_series_after_ten_thousand_requests_over_64_peers():
    """Each agent's own journal is fed with what transfers feed it; running as many would take minutes."""
    errors = [None, None, CorruptError("kv.k", "x"), PeerError("x", reason="NEVER_HEARD_OF"), DeadlineError("x")]
    outcomes = ["completed", "expired", "aborted", "declined", "withdrawn"]
    with pair(*ONE, transports=("shm", "tcp")) as (source, target), watched(source, target) as observer:
        hand_over(source, target, "one")
        journals = [worker.agents[0].journal for worker in (source, target)]
        names = [component.name for component in ONE[0].spec.components]
        for number in range(10_000):
            journal, role = journals[number % 2], ("source", "target", "relay")[number % 3]
            timeline = journal.begin(role, f"request-{number}", peer=f"worker-{number % 64}")
            transport = ("shm", "tcp")[number // 5 % 2]
            stats = EdgeStats(0, 0, relay=False, transport=transport, component_bytes=Counter(dict.fromkeys(names, 9)))
            timeline.edges.append(stats)
            journal.end(timeline, outcomes[number % 5], error=errors[number // 7 % 5])
            with suppress(StaleError), journal.judging():
                raise StaleError("x", reason=f"R{number}")
        found = series(observer)
    assert sum(observer.counts()[key] for key in observer.counts() if key[0] == "transfers") == 10_002
    assert len(found) <= 500, Counter(line.partition("{")[0] for line in found).most_common()
    print(f"{len(found)} series")


def test_durations_carry_a_trace_as_exemplar(both):
    _, target, observer = both
    journal = target.agents[0].journal
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    journal.end(journal.begin("target", "one", trace=trace), "completed")
    with Admin(observer, "127.0.0.1:0") as admin:
        code, text = get(admin, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert code == 200
    assert '# {trace_id="0af7651916cd43dd8448eb211c80319c"}' in text
    assert text.endswith("# EOF\n")


# -- admin -----------------------------------------------------------------------------------------


def test_admin_answers_as_its_table_says(both):
    source, target, observer = both
    hand_over(source, target, "one")
    with Admin(observer, "127.0.0.1:0") as admin:
        status = json.loads(get(admin, "/statusz")[1])
        assert status["ready"] is True
        assert [agent["worker"] for agent in status["agents"]] == ["P", "D"]
        (peer,) = [peer for peer in status["peers"] if peer["paths"]]
        assert (peer["worker"], peer["up"], peer["completed"]) == ("P", True, 1)
        listed = json.loads(get(admin, "/transferz?limit=1")[1])
        assert (listed["known"], len(listed["transfers"])) == (2, 1)
        assert {t["role"] for t in json.loads(get(admin, "/transferz/one")[1])["transfers"]} == {"source", "target"}
        config = get(admin, "/configz")[1]
        assert json.loads(config)["agents"][0]["worker"] == "P"
        assert json.loads(config)["agents"][0]["chunk_bytes"] == 64 << 10
        for path, code in (
            ("/transferz/none", 404),
            ("/readyz/none", 404),
            ("/none", 404),
            ("/transferz?limit=x", 400),
        ):
            assert get(admin, path)[0] == code, path
        assert get(admin, "/none", "POST")[0] == 404
        assert get(admin, "/statusz", "HEAD") == (200, "")


def test_actions_are_posts_and_their_errors_have_codes(both):
    *_, observer = both
    asked: list[dict[str, str]] = []

    def act(fields):
        asked.append(dict(fields))
        if "bad" in fields:
            raise MisuseError("bad is bad")
        return {"done": True}

    observer.actions["act"] = act
    with Admin(observer, "127.0.0.1:0") as admin:
        assert json.loads(get(admin, "/act?x=1", "POST")[1]) == {"done": True}
        assert get(admin, "/act?x=1")[0] == 404
        assert get(admin, "/act?bad=1", "POST")[0] == 400
        assert get(admin, "/act", "POST", Origin="http://elsewhere.example")[0] == 403
        assert get(admin, "/statusz", Host="elsewhere.example")[0] == 403
    assert asked == [{"x": "1"}, {"bad": "1"}]


def test_the_second_address_answers_probes_alone(both):
    *_, observer = both
    with Admin(observer, "127.0.0.1:0", probes_only=True) as admin:
        assert [get(admin, path, Host="pod.example")[0] for path in ("/livez", "/readyz", "/metrics")] == [200] * 3
        assert [get(admin, path)[0] for path in ("/", "/statusz", "/configz", "/transferz")] == [404] * 4


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "192.0.2.1:0", "127.0.0.1", "127.0.0.1:x", ":1", "unix:///"])
def test_addresses_that_others_can_reach_are_refused(both, listen):
    *_, observer = both
    threads = threading.active_count()
    with pytest.raises(MisuseError, match="admin address"):
        Admin(observer, listen)
    assert threading.active_count() == threads


def test_a_taken_port_is_misuse(both):
    *_, observer = both
    with Admin(observer, "127.0.0.1:0") as admin, pytest.raises(MisuseError, match="can't be bound"):
        Admin(observer, admin.url.removeprefix("http://"))


def answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(path))
        asking.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
        return b" 200 " in asking.recv(64)


def test_a_socket_of_a_living_admin_stays_and_that_of_a_dead_one_goes(both, tmp_path):
    *_, observer = both
    path = tmp_path / "a"
    with Admin(observer, f"unix://{path}"):
        with pytest.raises(MisuseError, match="can't be bound"):
            Admin(observer, f"unix://{path}")
        assert answers(path), "it is the first one's"
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    with Admin(observer, f"unix://{path}"):
        assert answers(path)
    path.write_text("a file")
    with pytest.raises(MisuseError, match="not a socket"):
        Admin(observer, f"unix://{path}")
    assert path.read_text() == "a file"


def test_secrets_are_not_shown(both):
    *_, observer = both
    secret = {"ticket_keys": "/etc/keys", "nested": {"password": "p", "blob": b"x", "empty_token": ""}, "worker": "w"}
    observer._config = lambda: secret
    hidden = "(not shown)"
    shown = {"ticket_keys": hidden, "nested": {"password": hidden, "blob": hidden, "empty_token": ""}, "worker": "w"}
    assert observer.config() == shown
