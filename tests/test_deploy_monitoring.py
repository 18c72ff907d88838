"""Alerts and dashboard: read by promtool, and shown by a Prometheus that scrapes live agents."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import pytest

from pdxfer.errors import StaleError, TicketError
from pdxfer.observe import Admin
from pdxfer.ticket import Ticket
from tests.deployed import DEPLOY, charted, documents, kustomized, metrics_in, queries, ran, tool
from tests.pairs import TOKENS, hand_over, pair, wait_until
from tests.test_observe import ONE, give_back, watched

MONITORING = DEPLOY / "monitoring"
ALL = {"monitoring": {"enabled": True, "runbookBase": "https://runbooks.example/pdxfer/"}}


def test_every_alert_fires_in_promtool_and_has_its_page(tmp_path):
    promtool = tool("promtool")
    ran(promtool, "check", "rules", "--lint-fatal", MONITORING / "alerts.yaml")
    ran(promtool, "test", "rules", MONITORING / "alerts.test.yaml")
    ran(promtool, "check", "config", MONITORING / "prometheus.yaml")
    (rules,), (tests,) = (documents((MONITORING / f"alerts{t}.yaml").read_text()) for t in ("", ".test"))
    alerts = [rule["alert"] for rule in rules["groups"][0]["rules"]]
    (fired,) = (t["promql_expr_test"][0]["exp_samples"] for t in tests["tests"] if t["name"] == "every alert fires")
    assert {re.search(r'alertname="(\w+)"', sample["labels"])[1] for sample in fired} == set(alerts)
    pages = re.findall(r"^### (\w+)$", (DEPLOY / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert pages == alerts
    for rule in rules["groups"][0]["rules"]:
        assert rule["annotations"]["runbook_url"] == f"RUNBOOK.md#{rule['alert'].lower()}"
    # One that never fires is noticed.
    rules["groups"][0]["rules"][-1]["expr"] += " and on () vector(1) < 0"
    (tmp_path / "alerts.yaml").write_text(json.dumps(rules))
    (tmp_path / "alerts.test.yaml").write_text((MONITORING / "alerts.test.yaml").read_text())
    ran(promtool, "test", "rules", tmp_path / "alerts.test.yaml", ok=False)


def test_rules_in_the_cluster_are_the_rules():
    example = kustomized("kubernetes/example")
    (rules,) = documents((MONITORING / "alerts.yaml").read_text())
    chart = charted(**ALL)
    (in_base,), (in_chart,) = (
        [o["spec"] for o in objects if o["kind"] == "PrometheusRule"] for objects in (example, chart)
    )
    assert in_base == rules
    absolute = json.dumps(rules).replace("RUNBOOK.md", "https://runbooks.example/pdxfer/RUNBOOK.md")
    assert in_chart == json.loads(absolute)
    board = json.loads((MONITORING / "dashboard.json").read_text())
    for objects in (example, chart):
        assert board in [
            json.loads(o["data"]["dashboard.json"]) for o in objects if "dashboard.json" in o.get("data", {})
        ]


def test_the_dashboard_s_panels_fit(tmp_path):
    board = json.loads((MONITORING / "dashboard.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


#: Panels about what does not happen here: TLS, a fall-back, full staging.
QUIET = {"pdxfer_certificate_expires_timestamp_seconds", "pdxfer_transport_fallbacks_total"}


@contextmanager
def prometheus(target: str, folder):
    """A Prometheus that scrapes ``target`` once a second; yields a function from a query to its series."""
    command = tool("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    scrape = {"job_name": "pdxfer", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [scrape]}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    flags = {"config.file": folder / "prometheus.yml", "storage.tsdb.path": folder / "data",
             "web.listen-address": f"127.0.0.1:{port}", "log.level": "error"}  # fmt: skip
    process = subprocess.Popen([command, *(f"--{name}={value}" for name, value in flags.items())])
    try:

        def ask(query):
            url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]["result"]

        def up():
            try:
                return bool(ask("up == 1"))
            except OSError:
                return False

        assert wait_until(up, timeout_s=30)
        yield ask
    finally:
        process.terminate()
        process.wait(30)


def test_every_panel_shows_something_of_live_agents_and_every_metric_is_exported(tmp_path):
    """A Prometheus scrapes two agents that hand over; some fetches are refused."""
    tool("prometheus")
    with (
        pair(*ONE, transports=("shm", "tcp"), mode="packed") as (source, target),
        watched(source, target) as observer,
        Admin(observer, "127.0.0.1:0", probes_only=True) as admin,
        prometheus(admin.url.removeprefix("http://"), tmp_path) as ask,
    ):
        with urllib.request.urlopen(f"{admin.url}/metrics", timeout=30) as answer:
            exported = {line.split()[2] for line in answer.read().decode().splitlines() if line.startswith("# TYPE ")}
        for what, expr in queries():
            plain = {
                re.sub(r"_(bucket|sum|count)$", "", name) if "seconds_" in name else name for name in metrics_in(expr)
            }
            assert plain <= exported, what
        left = {f"{what}: {expr}": expr for what, expr in queries() if what.startswith("panel")}
        left = {name: expr for name, expr in left.items() if not metrics_in(expr) & QUIET}
        count = 0

        def shown():
            nonlocal count
            count += 1
            hand_over(source, target, f"t{count}")
            with pytest.raises(TicketError):  # somebody edits a ticket; somebody withdraws an offer
                target.fetch(
                    replace(Ticket.decode(source.offer(f"e{count}", TOKENS)), sampled=(1,)).encode(), f"t{count}"
                )
            ticket = source.offer(f"w{count}", TOKENS)
            for agent, key in product(source.agents, "ew"):
                agent.withdraw(f"{key}{count}")
            with pytest.raises(StaleError):
                target.fetch(ticket, f"t{count}")
            for worker, keys in ((source, "tew"), (target, "t")):
                for key in keys:
                    give_back(f"{key}{count}", worker)
            for name in [name for name, expr in left.items() if ask(expr)]:
                del left[name]
            time.sleep(0.5)  # of a scrape's second
            return not left

        wait_until(shown, timeout_s=40)
        assert not left
        assert ask("count(pdxfer_ready == 1)")[0]["value"][1] == "1"
