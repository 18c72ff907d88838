"""deploy/ as its readers see it: Kubernetes' schemas, Helm, promtool, Prometheus, Compose, systemd, hadolint.

Nothing here has run on a cluster; deploy/README.md says so.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from pdxfer.cli.main import main
from pdxfer.errors import StaleError, TicketError
from pdxfer.observe import Admin
from pdxfer.ticket import Ticket
from tests.conftest import require
from tests.deployed import (
    DEPLOY,
    agent_of,
    charted,
    container,
    documents,
    environment,
    kustomized,
    metrics_in,
    queries,
    ran,
    tool,
)
from tests.pairs import TOKENS, hand_over, pair, wait_until
from tests.test_observe import ONE, give_back, watched

ROLES = ("prefill", "decode")
MONITORING = DEPLOY / "monitoring"
RDMA = {"rdma": {"enabled": True}, "gpu": {"count": 0}}
INSECURE = {"tls": {"enabled": False}, "networkPolicy": {"enabled": False}}
ALL = {"monitoring": {"enabled": True, "runbookBase": "https://runbooks.example/pdxfer/"}}


@pytest.fixture(scope="module")
def base():
    return kustomized("kubernetes/base")


@pytest.fixture(scope="module")
def example():
    return kustomized("kubernetes/example")


@pytest.fixture(scope="module")
def with_rdma(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rdma")
    below = [str(DEPLOY / "kubernetes" / part) for part in ("base", "components/rdma")]
    parts = [str(os.path.relpath(path, folder.resolve())) for path in below]
    (folder / "kustomization.yaml").write_text(json.dumps({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization",
        "resources": parts[:1], "components": parts[1:],
    }))  # fmt: skip
    return kustomized(folder)


# -- Kubernetes ------------------------------------------------------------------------------------


def check(objects) -> None:
    """Every object against the schema of its kind, in the oldest Kubernetes that we support and the newest known."""
    validate = require("kubernetes_validate")
    cert, prometheus = (require(f"cloudcoil.models.{m}.v1") for m in ("cert_manager", "prometheus_operator"))
    for found in objects:
        group = found["apiVersion"].partition("/")[0]
        module = {"cert-manager.io": cert, "monitoring.coreos.com": prometheus}.get(group)
        if module is not None:
            getattr(module, found["kind"]).model_validate(found)
            continue
        for version in ("1.29", validate.latest_version()):
            validate.validate(found, version, strict=True)


def test_the_checks_see_a_wrong_field(base):
    validate = require("kubernetes_validate")
    (broken, *_) = (json.loads(json.dumps(o)) for o in base if o["kind"] == "Deployment")
    broken["spec"]["template"]["spec"]["initContainers"][0]["startupProbe"]["grpc"]["prot"] = 1
    with pytest.raises(validate.ValidationError):
        check([broken])


def test_kustomizations_fit_the_schemas(base, example, with_rdma):
    for objects in (base, example, with_rdma):
        check(objects)


@pytest.mark.parametrize("values", [{}, RDMA, INSECURE, ALL], ids=["plain", "rdma", "insecure", "monitoring"])
def test_the_chart_fits_the_schemas(values):
    check(charted(**values))
    report = require("helm_python").lint(DEPLOY / "helm" / "pdxfer", values, strict=True, kube_version="v1.29.0")
    assert not report["errors"]
    assert [m for m in report["messages"] if m["severity"] > 1] == []


@pytest.mark.parametrize(
    "values",
    [{"drainSeconds": "55s"}, {"roles": {"prefill": {"kvRole": "kv_prefill", "replicas": 1}}}, {"tsl": {}},
     {"config": {"agent": {"leas_s": 3}}}],
    ids=["unit", "role", "unknown", "agent's key"],
)  # fmt: skip
def test_the_chart_refuses_wrong_values(values):
    with pytest.raises(require("helm_python").HelmError):
        charted(**values)


@pytest.mark.parametrize("role", ROLES)
def test_the_chart_s_pods_are_the_base_s_pods(base, role):
    def neutral(pod):
        text = json.dumps(pod, sort_keys=True)
        text = re.sub(r'"(?:r-)?(prefill|decode)(-agent|-tls)(?:-\w{10})?"', r'"\1\2"', text)
        found = json.loads(text.replace('"pdxfer:0.1.0"', '"pdxfer"').replace("pdxfer-vllm:0.1.0", "pdxfer-vllm"))
        for each in [*found["initContainers"], *found["containers"]]:
            each.pop("imagePullPolicy", None)
            each["env"].sort(key=lambda e: e["name"])
        found["volumes"].sort(key=lambda v: v["name"])
        return found

    (ours, config), (chart, chart_config) = agent_of(base, role), agent_of(charted(), role)
    assert neutral(chart) == neutral(ours)
    normal = {**chart_config, "drain_s": f"{chart_config['drain_s']}s"}
    normal["agent"]["tls"]["peers"].sort()
    config["agent"]["tls"]["peers"].sort()
    assert normal == config


@pytest.mark.parametrize("role", ROLES)
def test_pods_are_hardened_and_hold_together(example, with_rdma, role):
    for objects in (example, with_rdma, charted(), charted(**RDMA)):
        pod, config = agent_of(objects, role)
        agent, engine = container(pod, "agent"), container(pod, "engine")
        assert (agent["restartPolicy"], pod["initContainers"]) == ("Always", [agent]), "a native sidecar"
        # What Pod Security's profile "restricted" asks for, and a root file system that can't be written.
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(pod)
        assert {kind for v in pod["volumes"] for kind in v} == {"name", "emptyDir", "configMap", "secret"}
        for each in (agent, engine):
            context = each["securityContext"]
            assert (context["allowPrivilegeEscalation"], context["capabilities"]) == (False, {"drop": ["ALL"]})
        assert agent["securityContext"]["readOnlyRootFilesystem"]
        # Probes and policy speak of ports that are there, and drain of times that fit.
        ports = {port["name"]: port["containerPort"] for port in agent["ports"]}
        told = environment(agent, podIP="192.0.2.7", name="p")
        health, metrics = (int(told[f"PDXFER_{name}"].rpartition(":")[2]) for name in ("HEALTH", "METRICS"))
        probes = [agent[f"{kind}Probe"]["grpc"] for kind in ("startup", "liveness", "readiness")]
        assert [(p["port"], p.get("service", "")) for p in probes] == [(health, "live"), (health, "live"), (health, "")]
        assert (ports["health"], ports["metrics"]) == (health, metrics)
        stop = engine["lifecycle"]["preStop"]["exec"]["command"]
        assert engine["lifecycle"]["postStart"]["exec"]["command"] == ["pdxfer", "undrain"]
        assert stop[:-1] == ["pdxfer", "drain", "--wait", "--timeout"]
        assert told["PDXFER_POD_DRAIN_S"] == stop[-1] == str(config["drain_s"]).removesuffix("s")
        assert told["PDXFER_POD_GRACE_S"] == str(pod["terminationGracePeriodSeconds"])
        assert pod["terminationGracePeriodSeconds"] >= int(stop[-1]) + 30
        # Both containers see the socket; every mount is a volume; what the engine is told is JSON.
        assert all(["run", "/run/pdxfer"] in [[m["name"], m["mountPath"]] for m in c["volumeMounts"]]
                   for c in (agent, engine))  # fmt: skip
        assert {m["name"] for c in (agent, engine) for m in c["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        transfer = json.loads(engine["args"][2].partition("=")[2])
        assert transfer["kv_connector_extra_config"]["sidecar"] == config["socket"]


def test_certificates_name_whom_agents_let_in_and_are_mounted(example):
    for objects in (example, charted(), charted(tls={"trustDomain": "prod.example"})):
        made = {o["spec"]["secretName"]: o["spec"] for o in objects if o["kind"] == "Certificate"}
        issuers = {o["metadata"]["name"] for o in objects if o["kind"] == "Issuer"}
        assert {spec["issuerRef"]["name"] for spec in made.values()} <= issuers
        for role in ROLES:
            pod, config = agent_of(objects, role)
            (secret,) = (v["secret"] for v in pod["volumes"] if v["name"] == "tls")
            spec = made[secret["secretName"]]
            assert spec["uris"][0] in config["agent"]["tls"]["peers"]
            assert len(config["agent"]["tls"]["peers"]) == len(ROLES)
            assert {"server auth", "client auth"} <= set(spec["usages"])


def test_services_and_policies_select_the_pods(example):
    for objects in (example, charted()):
        for role in ROLES:
            (deployment,) = (o for o in objects if o["kind"] == "Deployment" and role in o["metadata"]["name"])
            labels = deployment["spec"]["template"]["metadata"]["labels"].items()
            (service,) = (o for o in objects if o["kind"] == "Service" and role in o["metadata"]["name"])
            (policy,) = (o for o in objects if o["kind"] == "NetworkPolicy" and role in o["metadata"]["name"])
            assert service["spec"]["selector"].items() <= labels
            chosen = policy["spec"]["podSelector"]["matchLabels"].items()
            assert chosen <= labels
            assert ("app.kubernetes.io/component", role) in chosen
            (expression,) = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchExpressions"]
            assert dict(labels)[expression["key"]] in expression["values"]
            assert set(expression["values"]) == set(ROLES)


# -- the agent's own config -------------------------------------------------------------------------


def accepted(path, variables=None) -> None:
    """What ``pdxfer config check`` says, with only these variables of ours."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PDXFER_")]:
            patch.delenv(name)
        for name, value in (variables or {}).items():
            patch.setenv(name, value)
        assert main(["config", "check", *(["--config", str(path)] if path else [])]) == 0


def test_pdxfer_accepts_every_config(base, tmp_path):
    accepted(DEPLOY / "systemd" / "agent.toml")
    text = (DEPLOY / "systemd" / "agent.toml").read_text()
    (tmp_path / "other.toml").write_text(re.sub(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE))
    assert (tmp_path / "other.toml").read_text() != text
    accepted(tmp_path / "other.toml")
    (tmp_path / "slip.toml").write_text(text.replace("drain_s", "drian_s"))
    with pytest.raises(AssertionError):
        accepted(tmp_path / "slip.toml")
    for number, objects in enumerate((base, charted(**RDMA), charted(**INSECURE))):
        pod, config = agent_of(objects, "decode")
        (tmp_path / f"{number}.yaml").write_text(json.dumps(config))
        accepted(tmp_path / f"{number}.yaml", environment(container(pod, "agent"), podIP="192.0.2.7", name="decode-0"))
    for service in documents((DEPLOY / "compose" / "compose.yaml").read_text())[0]["services"].values():
        if service.get("command") == ["agent"]:
            accepted("", service["environment"])


def test_what_restates_other_files_is_up_to_date():
    require("yaml")
    environ = {**os.environ, "PYTHONPATH": str(DEPLOY.parent)}
    assert ran(sys.executable, DEPLOY / "generate", "--check", env=environ) == ""


# -- monitoring ------------------------------------------------------------------------------------


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


def test_rules_in_the_cluster_are_the_rules(example):
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


# -- one machine -----------------------------------------------------------------------------------


def test_compose_reads_its_file():
    text = ran(tool("docker-compose"), "-f", DEPLOY / "compose" / "compose.yaml", "config", "--format", "json")
    services = json.loads(text)["services"]
    for name in ("prefill", "decode"):
        agent, engine = services[f"{name}-agent"], services[name]
        assert agent["read_only"]
        assert {tuple(s["cap_drop"]) for s in (agent, engine)} == {("ALL",)}
        assert agent["environment"]["PDXFER_ADMIN"] == engine["environment"]["PDXFER_ADMIN"]
        transfer = json.loads(engine["command"][-1].partition("=")[2])
        mounted = [{(v["source"], v["target"]) for v in s["volumes"]} for s in (agent, engine)]
        assert (f"{name}-run", "/run/pdxfer") in mounted[0] & mounted[1]
        assert transfer["kv_connector_extra_config"]["sidecar"].startswith("/run/pdxfer/")
    (scrape,) = documents((MONITORING / "prometheus.yaml").read_text())[0]["scrape_configs"]
    targets = {t for group in scrape["static_configs"] for t in group["targets"]}
    assert targets == {services[f"{name}-agent"]["environment"]["PDXFER_METRICS"] for name in ROLES}


def test_systemd_accepts_the_unit_and_finds_little_exposed(tmp_path):
    analyze = tool("systemd-analyze")
    program = tmp_path / "pdxfer"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "pdxfer-agent.service"
    text = (DEPLOY / "systemd" / unit.name).read_text()
    unit.write_text(text.replace("/opt/pdxfer/bin/pdxfer", str(program)))
    engine = tmp_path / "vllm.service"
    engine.write_text(f"[Service]\nExecStart={program} serve\n")
    (tmp_path / "vllm.service.d").mkdir()
    drop_in = (DEPLOY / "systemd" / "vllm.service.d" / "pdxfer.conf").read_text()
    (tmp_path / "vllm.service.d" / "pdxfer.conf").write_text(drop_in.replace("/opt/pdxfer/bin/pdxfer", str(program)))
    assert ran(analyze, "verify", unit, engine) == ""
    ran(analyze, "security", "--offline=true", "--threshold=15", unit)
    unit.write_text(unit.read_text().replace("User=pdxfer", "Usr=pdxfer"))
    assert "Usr" in ran(analyze, "verify", unit)


def test_the_agent_tells_systemd(tmp_path):
    folder = Path(tempfile.mkdtemp(prefix="n-"))  # sockets have short paths
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(folder / "notify"))
        told.settimeout(60)
        env = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify")}
        command = [sys.executable, "-m", "pdxfer", "agent", "--socket", str(folder / "a" / "s"), "--set", "admin="]
        agent = subprocess.Popen(command, env=env, cwd=DEPLOY.parent)
        try:
            assert [told.recv(100) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
            agent.terminate()
            assert told.recv(100) in (b"WATCHDOG=1", b"STOPPING=1")
            assert agent.wait(60) == 0
        finally:
            agent.kill()
            shutil.rmtree(folder)


def test_hadolint_finds_nothing_in_the_dockerfile():
    assert ran(tool("hadolint"), DEPLOY / "Dockerfile") == ""
