"""deploy/ as its readers see it: Kubernetes' schemas, Helm, Compose, systemd, hadolint, and pdxfer itself.

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
from pathlib import Path

import pytest

from pdxfer.cli.main import main
from pdxfer.errors import TicketError
from tests.certificates import Authority
from tests.conftest import require
from tests.deployed import (
    DEPLOY,
    agent_of,
    charted,
    container,
    documents,
    environment,
    kustomized,
    ran,
    tool,
)
from tests.pairs import hand_over, pair
from tests.test_observe import ONE
from tests.test_tls import call

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


def test_with_these_certificates_the_roles_hand_over_and_nobody_else_is_let_in(example, tmp_path):
    """What cert-manager would sign, signed here, with the allow-lists of the pods' own configs."""
    authority = Authority(tmp_path)
    made = {o["spec"]["secretName"]: o["spec"] for o in example if o["kind"] == "Certificate"}
    sides = {}
    for role in ROLES:
        peers = tuple(agent_of(example, role)[1]["agent"]["tls"]["peers"])
        spec = made[f"{role}-tls"]
        tls = authority.tls(*spec["uris"], common_name=spec["commonName"], peers=peers)
        sides[role] = {"tls": tls, "control": ("tcp://127.0.0.1:0",)}
    both = {"transports": ("tcp",), "listen": {"tcp": "tcp://127.0.0.1:0"}}
    with pair(*ONE, of_source=sides["prefill"], of_target=sides["decode"], **both) as (source, target):
        hand_over(source, target, "one")
        stranger = authority.tls("spiffe://pdxfer/router", common_name="router", peers=sides["decode"]["tls"].peers)
        with pytest.raises(TicketError) as caught:
            call(source.agents[0].address, stranger)
        assert caught.value.reason == "IDENTITY_REJECTED"


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
