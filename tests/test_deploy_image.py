"""The image's steps run by hand, and in what they made the pod's agent as Kubernetes would start it: its own user, a
read-only root, its own network, the pod's config, TLS files and probes. No container engine is needed, but root is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.certificates import Authority
from tests.conftest import require
from tests.deployed import DEPLOY, agent_of, container, environment, kustomized, metrics_in, queries, ran, tool

USER = 65532
#: Unshares mounts, and with them the program's whole world; then ``$@`` runs.
WORLD = """
set -e
mount --bind "$OPT" /opt
if [ -n "$POD" ]; then
    ip link set lo up && ip address add "$IP" dev lo
    # An interpreter below a home that its user may not enter is as good as none.
    mount --bind "$BASE" /mnt && mount -t tmpfs -o mode=0755 tmpfs "$HIDDEN"
    mkdir -p "$BASE" && mount --bind /mnt "$BASE"
    mount -t tmpfs -o mode=0755 tmpfs /run && install -d -m 0777 /run/pdxfer
    mkdir "$POD/upper" "$POD/work"
    mount -t overlay -o "lowerdir=/etc,upperdir=$POD/upper,workdir=$POD/work" overlay /etc
    install -d /etc/pdxfer /etc/pdxfer/tls && cp "$POD"/agent.yaml "$POD"/driver.py /etc/pdxfer
    install -m 0440 -g "$USER_ID" "$POD"/tls.crt "$POD"/tls.key "$POD"/ca.crt /etc/pdxfer/tls
    chmod 0444 /etc/pdxfer/*.*
    mount -o remount,bind,ro /
    mount -o remount,bind,ro /opt
    mount -o remount,bind,ro /etc
    set -- setpriv --reuid "$USER_ID" --regid "$USER_ID" --clear-groups --no-new-privs --bounding-set=-all "$@"
fi
exec "$@"
"""
#: An engine and a kubelet beside the agent, as its user.
DRIVER = """
import http.client, json, os, shutil, signal, subprocess, sys, time
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pdxfer.agent import AgentConfig, create_agent
from pdxfer.builders import Parallel, Storage, build_layout
from pdxfer.models import load_config, spec_from_config

told = json.load(sys.stdin)
env, seen = told["env"], {}
probed = env["PDXFER_HEALTH"].removeprefix("tcp://")
def command(*words):
    return [shutil.which(words[0], path=env["PATH"]), *words[1:]]
def run(*words):
    done = subprocess.run(command(*words), env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr
def health(service):
    with grpc.insecure_channel(probed) as channel:
        try:
            found = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
            return health_pb2.HealthCheckResponse.ServingStatus.Name(found.status)
        except grpc.RpcError as error:
            return error.code().name
def until(service, status):
    for _ in range(300):
        if health(service) == status:
            return True
        assert agent.poll() is None, agent.poll()
        time.sleep(0.1)
def get(path):
    connection = http.client.HTTPConnection(env["PDXFER_METRICS"], timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()

agent = subprocess.Popen(command(*told["start"]), env=env)
try:
    seen["started"], seen["ready"] = until("live", "SERVING"), until("", "SERVING")
    spec = spec_from_config(load_config("qwen3-next-80b-a3b"))
    layout = build_layout(spec, Parallel(), Storage(page_tokens=16, pages=8, slots=2))
    with create_agent(AgentConfig(worker="engine"), told["socket"]) as engine:
        engine.attach(layout, engine.allocate(layout.ranks[0]))
        engine.start()
        seen["address"] = engine.address
        seen["status"] = run("pdxfer", "status", "--json")
        seen["doctor"] = run("pdxfer", "doctor", "--json", *told["start"][2:])
        seen["readyz"], seen["metrics"], seen["statusz"] = map(get, ("/readyz", "/metrics", "/statusz"))
        seen["stop"] = run(*told["stop"])
        seen["unready"], seen["live"] = until("", "NOT_SERVING"), health("live")
    seen["again"], seen["ready again"] = run(*told["again"]), until("", "SERVING")
    with create_agent(AgentConfig(worker="engine"), told["socket"]) as engine:  # its next life
        engine.attach(layout, engine.allocate(layout.ranks[0]))
        engine.start()
        seen["drained"] = run(*told["stop"])
    agent.send_signal(signal.SIGTERM)
    seen["end"], seen["left"] = agent.wait(60), os.listdir("/run/pdxfer/agent")
finally:
    agent.kill()
print(json.dumps(seen))
"""
POD_IP = "10.9.8.7"
HOOKS = {"stop": "preStop", "again": "postStart"}


def steps() -> tuple[list[str], dict[str, str], dict[str, str]]:
    """Of the Dockerfile: what stage ``build`` runs (but for Debian's packages), its arguments, the image's ENV."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    build, final = (re.search(rf"^FROM {stage}\n(.*?)(?=^FROM|\Z)", text, re.DOTALL | re.MULTILINE)[1]
                    for stage in (r"python:\$\{PYTHON\}-slim AS build", r"python:\$\{PYTHON\}-slim"))  # fmt: skip
    commands = [line[4:] for line in build.splitlines() if line.startswith("RUN ") and "apt-get" not in line]
    arguments = dict(line[4:].split("=", 1) for line in build.splitlines() if line.startswith("ARG "))
    (variables,) = (line[4:] for line in final.splitlines() if line.startswith("ENV "))
    assert f"USER {USER}:{USER}" in final
    return commands, arguments, dict(pair.split("=", 1) for pair in variables.split())


def in_world(opt: Path, *command: str, pod: str = "", env: Mapping[str, str] = os.environ, **options) -> str:
    hidden = [path for path in Path(sys.base_prefix).parents if not path.stat().st_mode & 0o001]
    told = {"OPT": opt, "POD": pod, "IP": POD_IP, "USER_ID": USER, "BASE": sys.base_prefix,
            "HIDDEN": hidden[-1] if hidden else Path(sys.base_prefix).parent}  # fmt: skip
    unshare = ["unshare", "--mount", "--propagation", "private", *(["--net"] if pod else [])]
    return ran(
        *unshare, "sh", "-c", WORLD, "sh", *command, env={**env, **{k: str(v) for k, v in told.items()}}, **options
    )


@pytest.fixture(scope="module")
def opt(tmp_path_factory):
    """/opt of the image, made by the Dockerfile's own lines from what it copies."""
    require("yaml")
    tool("ip")
    probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if os.getuid() or probe.returncode:
        pytest.skip("needs to be root, with leave to unshare mounts")
    folder = tmp_path_factory.mktemp("image")
    (folder / "src").mkdir()
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    for name in kept:
        path, without = DEPLOY.parent / name, shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(path, folder / "src" / name, ignore=without) if path.is_dir() else shutil.copy(
            path, folder / "src"
        )
    (folder / "opt").mkdir()
    commands, arguments, _ = steps()
    env = {**os.environ, **arguments, "PATH": f"{sys.base_prefix}/bin:{os.environ['PATH']}"}
    for command in commands:
        in_world(folder / "opt", "sh", "-ec", command, env=env, cwd=folder / "src", timeout=500)
    return folder / "opt"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_pod_s_agent_runs_as_its_manifest_says(opt, tmp_path):
    pod, config = agent_of(kustomized("kubernetes/base"), "prefill")
    agent, engine = container(pod, "agent"), container(pod, "engine")
    tls = Authority(tmp_path).tls("spiffe://pdxfer/prefill", common_name="prefill", peers=("spiffe://pdxfer/decode",))
    for path, name in ((tls.ca, "ca.crt"), (tls.cert, "tls.crt"), (tls.key, "tls.key")):
        shutil.copy(path, tmp_path / name)
    (tmp_path / "agent.yaml").write_text(json.dumps(config))
    (tmp_path / "driver.py").write_text(DRIVER)
    hooks = {name: engine["lifecycle"][hook]["exec"]["command"] for name, hook in HOOKS.items()}
    env = {name: value.replace("$PATH", "/usr/bin:/bin") for name, value in steps()[2].items()}
    told = {
        "env": {**env, **environment(agent, podIP=POD_IP, name="prefill-0"), "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        "start": ["pdxfer", *agent["args"]],
        **hooks,
        "socket": config["socket"],
    }
    command = ["/opt/pdxfer/bin/python", "-P", "/etc/pdxfer/driver.py"]
    out = in_world(opt, *command, pod=str(tmp_path), env={**env, "PATH": os.environ["PATH"]}, input=json.dumps(told))
    seen = json.loads(out[out.index('{"started"') :].splitlines()[0])
    assert (seen["started"], seen["ready"]) == (True, True), "both probes"
    assert seen["address"] == f"tcp://{POD_IP}:7000"
    assert seen["status"][0] == 0
    assert json.loads(seen["status"][1])["agents"][0]["worker"] == "prefill-0"
    found = json.loads(seen["doctor"][1])["checks"]
    assert seen["doctor"][0] == 0, found
    assert (found["config"]["values"]["status"], found["sockets"]["engines"]["status"]) == ("ok", "ok")
    assert f"tcp://{POD_IP}:7000" in found["sockets"]["bind"]["what"], "the config that the agent has"
    assert [found["kubernetes"][check]["status"] for check in ("grace", "sidecar")] == ["ok", "ok"]
    assert found["versions"]["kernel"]["what"] == "native copy kernel"
    assert found["sockets"]["directory"]["status"] == "ok"
    assert (seen["readyz"][0], seen["statusz"][0]) == (200, 404), "the port for probes has no admin"
    exported = set(re.findall(r"^# TYPE (\w+) ", seen["metrics"][1], re.MULTILINE))
    wanted = {name for _, expr in queries() for name in metrics_in(expr)}
    assert {re.sub(r"(_seconds)_(bucket|sum|count)$", r"\1", name) for name in wanted} <= exported
    assert "\npdxfer_insecure 0.0\n" in seen["metrics"][1]
    assert (seen["stop"][0], seen["unready"], seen["live"]) == (0, True, "SERVING"), "a drain: unready, but alive"
    assert (seen["again"][0], seen["ready again"], seen["drained"][0]) == (0, True, 0), "an engine that restarts alone"
    assert (seen["end"], seen["left"]) == (0, [])
