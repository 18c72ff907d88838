"""Commands that ask a running agent, against real agents in this process."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from pdxfer.builders import Parallel
from pdxfer.cli import operate
from pdxfer.cli.main import main
from pdxfer.errors import CorruptError, PeerError
from pdxfer.observe import DEFAULT_ADMIN, Admin
from pdxfer.observe.probe import ping
from pdxfer.testing.faults import Fault
from tests.certificates import Authority
from tests.pairs import Ends, fails, hand_over, pair, withdraw
from tests.test_agent_damage import damaged
from tests.test_observe import ONE, watched
from tests.workers import hybrid_spec, layouts


@pytest.fixture
def pdxfer(capsys):
    """Run a command; returns its exit code and what it printed."""

    def run(*argv: str) -> tuple[int, str]:
        code = main(argv)
        return code, capsys.readouterr().out

    return run


@contextmanager
def served(*workers):
    """An admin over these workers, for commands of this process."""
    with watched(*workers) as observer, Admin(observer, "127.0.0.1:0") as admin, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDXFER_ADMIN", admin.url)
        yield observer


def test_the_default_address_is_the_admin_s():
    assert operate._DEFAULT_ADMIN == DEFAULT_ADMIN


def test_status_says_whether_and_why(pdxfer):
    with pair(*ONE) as (source, target), served(target) as observer:
        hand_over(source, target, "one")
        code, text = pdxfer("status")
        assert (code, "ready" in text, "D " in text) == (0, True, True)
        assert "1 completed" in text
        target.agents[0].drain()
        code, text = pdxfer("status")
        assert (code, "NOT READY" in text, "draining" in text) == (3, True, True)
        code, text = pdxfer("status", "--json")
        assert (code, json.loads(text)["ready"]) == (3, False)
        assert observer.problems()["draining"]


def test_peers_and_slots(pdxfer):
    with pair(*ONE) as (source, target), served(target):
        for done in hand_over(source, target, "one"):
            done.release()
        code, text = pdxfer("peers")
        assert code == 0
        assert text.splitlines()[1].split()[:4] == ["P", "yes", "1", "0"]
        assert json.loads(pdxfer("peers", "--json")[1])["peers"][0]["worker"] == "P"
        code, text = pdxfer("slots")
        head, row = (line.split() for line in text.splitlines())
        assert (head[:3], row[0]) == (["WORKER", "RANK", "free"], "D")
        found = json.loads(pdxfer("slots", "--json")[1])["slots"][0]["slots"]
        assert found == target.agents[0].memory.ledger.counts()


def test_transfers_and_explain(pdxfer):
    with damaged("packed", Fault(kind="corrupt", at=0, on="payload")) as (source, target, _), served(source, target):
        error = fails(source, target, CorruptError, "broken/one")
        code, text = pdxfer("transfers")
        assert code == 0
        lines = text.splitlines()
        assert len(lines) == 4  # the head, two source ranks and one target rank
        assert any("failed" in line and "CORRUPT" in line and line.endswith("broken/one") for line in lines)
        code, text = pdxfer("explain", "broken/one")
        assert code == 0
        assert "broken/one: failed as target, from P" in text
        assert f"what failed:  bytes, component {error.component}; in: source rank" in text
        assert "why:          CORRUPT" in text
        assert "what to do:   fetch again or prefill again" in text
        assert len(json.loads(pdxfer("explain", "broken/one", "--json")[1])["transfers"]) == 3
        assert json.loads(pdxfer("transfers", "--live", "--json")[1])["transfers"] == []
        assert pdxfer("explain", "unknown")[0] == 1


def test_live_transfers_are_listed(pdxfer):
    with pair(*ONE) as (source, _), served(source):
        ends = Ends()
        source.offer("waiting", 20, on_end=ends)
        assert "waiting" in pdxfer("transfers", "--live")[1]
        withdraw(source, "waiting", ends)
        assert "waiting" not in pdxfer("transfers", "--live")[1]
        assert "withdrawn" in pdxfer("transfers")[1]


def test_watch_goes_on_until_interrupted():
    with pair(*ONE) as (source, _), served(source):
        command = [sys.executable, "-m", "pdxfer", "transfers", "--watch", "--interval", "0.1", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        seen = 0
        for line in process.stdout:
            seen += line == "}\n"
            if seen == 3:
                break
        process.send_signal(2)
        process.stdout.close()
        assert process.wait(30) in (1, 130)


@pytest.mark.parametrize("transports", [("memory",), ("shm", "tcp")])
def test_ping_measures_control_and_every_plane(pdxfer, transports):
    with pair(*ONE, transports=transports) as (source, target), served(target):
        address = source.agents[0].address
        code, text = pdxfer("ping", address)
        assert code == 0, text
        assert "GB/s" in text
        assert "layout   can be mapped to ours" in text
        found = json.loads(pdxfer("ping", "P", "--json")[1])
        assert found["worker"] == "P"
        assert found["control"]["round_trip_s"] > 0
        assert [p["transport"] for p in found["planes"]] == list(transports)
        assert all(p["bytes_per_s"] > 0 and p["round_trip_s"] > 0 for p in found["planes"])
        hand_over(source, target, "after")


def test_ping_without_a_running_agent(pdxfer):
    with pair(*ONE, transports=("shm", "tcp")) as (source, _):
        code, text = pdxfer("ping", "--direct", source.agents[0].address, "--json")
        assert code == 0
        assert [p["transport"] for p in json.loads(text)["planes"]] == ["shm", "tcp"]
        assert pdxfer("ping", "--direct", "P")[0] == 2


def test_ping_says_which_plane_fails(pdxfer):
    with pair(*ONE, transports=("shm", "tcp")) as (source, target), served(target):
        source.agents[0]._listeners[1].close()
        code, text = pdxfer("ping", source.agents[0].address, "--json")
        assert code == 5
        assert ["error" in plane for plane in json.loads(text)["planes"]] == [False, True]


def test_ping_of_a_stranger_and_of_nobody(pdxfer, tmp_path):
    with pair(*ONE) as (_, target), served(target):
        assert pdxfer("ping", "nobody")[0] == 1
        assert pdxfer("ping", f"unix://{tmp_path}/none.sock")[0] == 5


def test_layouts_that_do_not_fit_are_said():
    wide = layouts(Parallel(), Parallel(), spec=hybrid_spec(width=8))[1]
    with pair(ONE[0], wide) as (source, target):
        assert "at the source and" in ping(target.agents[0], source.agents[0].address)["fits"]


def test_planes_with_curve_are_pinged_and_ready(tmp_path):
    tls = Authority(tmp_path / "ca").tls("worker.example", peers=("worker.example",), common_name="worker")
    with pair(*ONE, transports=("tcp",), tls=tls) as (source, target), watched(source, target) as observer:
        assert not any(observer.readiness.problems(fresh=True).values())
        found = ping(target.agents[0], source.agents[0].address)
        assert found["planes"][0]["bytes_per_s"] > 0
        os.unlink(tls.key)
        assert tls.key in observer.readiness.problems(fresh=True)["keys"]


def test_drain_waits_for_what_is_underway(pdxfer):
    with pair(*ONE) as (source, _), served(source):
        ends = Ends()
        source.offer("last", 20, on_end=ends)
        code, text = pdxfer("drain", "--wait", "--timeout", "0.3", "--json")
        assert (code, json.loads(text)) == (1, {"draining": True, "underway": 1})
        withdraw(source, "last", ends)
        assert pdxfer("drain", "--wait")[0] == 0
        with pytest.raises(PeerError, match="drains"):
            source.offer("late", 20)
        assert pdxfer("undrain", "--json") == (0, '{\n  "draining": false,\n  "underway": 0\n}\n')
        source.offer("on time", 20, on_end=ends)
        withdraw(source, "on time", ends)
        assert pdxfer("status")[0] == 0


def test_the_admin_may_be_a_private_unix_socket(pdxfer, tmp_path):
    path = tmp_path / "admin.sock"
    with pair(*ONE) as (_, target), watched(target) as observer:
        with Admin(observer, f"unix://{path}") as admin:
            assert path.stat().st_mode & 0o777 == 0o600
            assert pdxfer("status", "--admin", admin.url)[0] == 0
        assert not path.exists()


def test_nobody_answers(pdxfer, tmp_path):
    for command in ("status", "peers", "slots", "transfers", "explain x", "drain", "undrain", "ping x"):
        assert pdxfer(*command.split(), "--admin", f"unix://{tmp_path}/none.sock")[0] == 5


def test_what_is_no_admin_is_said(pdxfer):
    """Both ended in a traceback."""

    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[1]")

        def log_message(self, *_):
            return

    for wrong in ("", "127.0.0.1:port", "127.0.0.1", "127.0.0.1:99999", "tcp://127.0.0.1:9464", ":9464", "unix://here"):
        assert pdxfer("status", "--admin", wrong)[0] == 2, wrong
    with http.server.HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        assert pdxfer("status", "--admin", f"127.0.0.1:{other.server_port}")[0] == 5


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(pdxfer, shell):
    if shell == "bash":
        assert "_PDXFER_COMPLETE" in pdxfer("completion", shell)[1]
    assert "_PDXFER_COMPLETE" in json.loads(pdxfer("completion", shell, "--json")[1])["script"]


def test_completion_completes():
    env = {**os.environ, "_PDXFER_COMPLETE": "bash_complete", "COMP_WORDS": "pdxfer exp", "COMP_CWORD": "1"}
    done = subprocess.run([sys.executable, "-m", "pdxfer"], env=env, capture_output=True, text=True, check=False)
    assert "plain,explain" in done.stdout.split()
