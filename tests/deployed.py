"""What deploy/ holds, as the tools that will read it read it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import require

__all__ = [
    "DEPLOY",
    "agent_of",
    "charted",
    "container",
    "documents",
    "environment",
    "kustomized",
    "metrics_in",
    "queries",
    "ran",
    "tool",
]

DEPLOY = Path(__file__).resolve().parent.parent / "deploy"


def tool(name: str) -> str:
    """Path of a command of this environment or the system's; without it the test is skipped.

    With PDXFER_REQUIRE_OPTIONAL=1 it fails instead, if CI installs the command: pip's always, others as it says.
    """
    from_pip = name in ("kubectl", "hadolint", "docker-compose")
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        from_ci = from_pip or ("prom" in name and "prometheus" in (DEPLOY.parent / ".ci" / "run").read_text())
        where = "the dependency group deploy" if from_pip else "Debian's prometheus, systemd, iproute2"
        reason = f"{name} is missing, of {where}"
        if from_ci and os.environ.get("PDXFER_REQUIRE_OPTIONAL") == "1":
            pytest.fail(f"{reason} (PDXFER_REQUIRE_OPTIONAL=1)", pytrace=False)
        pytest.skip(reason)
    return found


def ran(*command: str | Path, ok: bool = True, timeout: float = 110, **options: Any) -> str:
    """What a command printed; it must have succeeded, or with ``ok=False`` failed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout, check=False, **options)
    assert (done.returncode == 0) == ok, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in require("yaml").safe_load_all(text) if document]


def kustomized(folder: str | Path) -> list[dict[str, Any]]:
    """The objects of a kustomization below deploy/."""
    return documents(ran(tool("kubectl"), "kustomize", DEPLOY / folder))


def charted(**values: Any) -> list[dict[str, Any]]:
    """The objects of the Helm chart's release ``r`` with these values."""
    helm = require("helm_python")
    with helm.Chart.load(DEPLOY / "helm" / "pdxfer") as chart:
        chart.validate_schema(values)
        rendered = chart.render(values, name="r", namespace="n", is_install=True)
    return [found for name, text in rendered.items() if name.endswith(".yaml") for found in documents(text)]


def agent_of(objects: list[dict[str, Any]], role: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A role's Deployment among objects: its pod's spec, and the agent's own config."""
    (deployment,) = (o for o in objects if o["kind"] == "Deployment" and role in o["metadata"]["name"])
    pod = deployment["spec"]["template"]["spec"]
    (name,) = (v["configMap"]["name"] for v in pod["volumes"] if "configMap" in v)
    (config,) = (o for o in objects if o["kind"] == "ConfigMap" and o["metadata"]["name"] == name)
    (found,) = documents(config["data"]["agent.yaml"])
    return pod, found


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    """One container of a pod, native sidecars included."""
    (found,) = (c for c in [*pod["initContainers"], *pod["containers"]] if c["name"] == name)
    return found


def environment(of: dict[str, Any], **fields: str) -> dict[str, str]:
    """A container's variables as the kubelet sets them; ``fields`` by the last part of their path (podIP, name)."""
    found: dict[str, str] = {}
    for each in of["env"]:
        value = each.get("value", "")
        if "valueFrom" in each:
            value = fields[each["valueFrom"]["fieldRef"]["fieldPath"].rpartition(".")[2]]
        found[each["name"]] = expanded(value, found)
    return found


def expanded(text: str, variables: dict[str, str]) -> str:
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), text)


def queries() -> Iterator[tuple[str, str]]:
    """Every PromQL expression of dashboard and alerts, with what it is for; the dashboard's variables are set."""
    board = json.loads((DEPLOY / "monitoring" / "dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            expr = target["expr"].replace("$job", ".*").replace("$instance", ".*")
            yield f"panel {panel['title']}", expr.replace("$__rate_interval", "10s")
    (rules,) = documents((DEPLOY / "monitoring" / "alerts.yaml").read_text())
    for rule in rules["groups"][0]["rules"]:
        yield f"alert {rule['alert']}", rule["expr"]


def metrics_in(expr: str) -> set[str]:
    """Names of the metrics of ours that an expression asks for."""
    return set(re.findall(r"\bpdxfer_\w+", expr))
