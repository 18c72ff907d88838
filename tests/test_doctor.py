"""Doctor: every check is shown on a good machine and on a forged bad one, with its fix."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time

import pytest

from pdxfer.cli import doctor_checks
from pdxfer.cli.doctor_checks import CHECKS, Machine, examine
from pdxfer.cli.main import main
from pdxfer.control.tls import Pem
from pdxfer.errors import MisuseError, PeerError
from tests.certificates import Authority
from tests.pairs import pair
from tests.test_cli_operate import served
from tests.test_observe import ONE

NAMES = {(group, name) for group, of in CHECKS.items() for name in of}
PORT = "sys/class/infiniband/mlx5_0/ports/1"
GOOD = {
    "proc/sys/kernel/yama/ptrace_scope": "0",
    "proc/modules": "nvidia_peermem 16384 0 - Live",
    "sys/fs/cgroup/memory.max": str(8 << 30),
    "sys/fs/cgroup/memory.current": str(1 << 30),
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
    "sys/class/net/eth0/mtu": "9000",
    "sys/class/net/eth0/operstate": "up",
    f"{PORT}/state": "4: ACTIVE",
    f"{PORT}/link_layer": "Ethernet",
    f"{PORT}/gid_attrs/types/0": "IB/RoCE v1",
    f"{PORT}/gid_attrs/types/1": "RoCE v2",
    "sys/bus/pci/devices/0000:01:00.0/class": "0x030200",
    "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
    "sys/bus/pci/devices/0000:01:00.0/numa_node": "1",
    "sys/bus/pci/devices/0000:02:00.0/class": "0x020700",
    "sys/bus/pci/devices/0000:02:00.0/numa_node": "1",
}
ENV = {
    "KUBERNETES_SERVICE_HOST": "192.0.2.1", "PDXFER_POD_GRACE_S": "65", "PDXFER_POD_DRAIN_S": "55",
    "PDXFER_POD_SIDECAR": "native", "UCX_TLS": "rc,cuda_copy", "UCX_NET_DEVICES": "mlx5_0:1", "NCCL_IB_HCA": "=mlx5_0",
}  # fmt: skip
ANSWER = {"worker": "P", "rank": 0, "planes": [{"transport": "tcp"}], "layout": "0" * 64, "fits": ""}
GPU, IB, NET = "sys/bus/pci/devices/0000:01:00.0", PORT, "sys/class/net/eth0"

#: check -> (status, files, environment, other fields): what is different on the bad machine.
BAD = {
    ("config", "values"): ("fail", {}, {}, {"refused": MisuseError("there is no key 'agent.leas_s'")}),
    ("versions", "packages"): ("fail", {}, {}, {"version": lambda name: "0.0.1"}),
    ("versions", "kernel"): ("warn", {}, {"PDXFER_KERNEL": "numpy"}, {}),
    ("versions", "connector"): ("fail", {}, {}, {"version": lambda n: "0.31.0" if n == "vllm" else "99"}),
    ("planes", "loops"): ("fail", {}, {}, {"transports": ("carrier-pigeon",)}),
    ("planes", "ptrace"): ("warn", {"proc/sys/kernel/yama/ptrace_scope": "2"}, {}, {}),
    ("limits", "memlock"): ("fail", {}, {}, {"limit": lambda name: 64 << 10 if name == "MEMLOCK" else 1 << 40}),
    ("limits", "nofile"): ("fail", {}, {}, {"limit": lambda name: 256 if name == "NOFILE" else 1 << 40}),
    ("limits", "shm"): ("fail", {}, {}, {"free_bytes": lambda path: 16 << 20}),
    ("limits", "cgroup"): ("fail", {"sys/fs/cgroup/memory.current": str((8 << 30) - 4096)}, {}, {}),
    ("limits", "huge-pages"): ("warn", {"sys/kernel/mm/transparent_hugepage/shmem_enabled": "always [never]"}, {}, {}),
    ("sockets", "directory"): ("fail", {}, {}, {"directory": "open"}),
    ("sockets", "engines"): ("fail", {}, {}, {"socket": "open/agent.sock"}),
    ("sockets", "bind"): ("fail", {}, {}, {"addresses": ("tcp://0.0.0.0:0",)}),
    ("secrets", "keys"): ("fail", {}, {}, {"keys": "open-keys"}),
    ("secrets", "certificates"): ("fail", {}, {}, {"tls": "ended"}),
    ("network", "clock"): ("warn", {}, {}, {"unsynchronised": lambda: True}),
    ("network", "mtu"): ("warn", {f"{NET}/mtu": "1280"}, {}, {}),
    ("network", "rdma"): ("fail", {f"{IB}/state": "1: DOWN"}, {}, {}),
    ("network", "roce"): ("fail", {f"{IB}/gid_attrs/types/1": "IB/RoCE v1"}, {}, {}),
    ("network", "variables"): ("fail", {}, {"NCCL_IB_HCA": "mlx5_7"}, {}),
    ("devices", "affinity"): ("warn", {f"{GPU}/numa_node": "0"}, {}, {}),
    ("devices", "gpudirect"): ("warn", {"proc/modules": ""}, {}, {}),
    ("kubernetes", "grace"): ("fail", {}, {"PDXFER_POD_GRACE_S": "30"}, {}),
    ("kubernetes", "sidecar"): ("warn", {}, {"PDXFER_POD_SIDECAR": ""}, {}),
    ("peer", "reach"): ("fail", {}, {}, {"answer": PeerError("tcp://192.0.2.1:1 can't be reached")}),
    ("peer", "layout"): ("fail", {}, {}, {"answer": {**ANSWER, "fits": "kv.k: dim is 6 here and 8 there"}}),
}


@pytest.fixture
def forge(tmp_path):
    """A machine on which all is well, but for what is given."""
    if (keys := tmp_path / "open-keys") and not keys.exists():
        keys.write_text("ab" * 32)
        keys.chmod(0o644)
    (tmp_path / "open").mkdir(mode=0o700)
    (tmp_path / "open").chmod(0o777)

    def machine(files=(), env=(), **fields) -> Machine:
        root = tmp_path / "root"
        for path, text in {**GOOD, **dict(files)}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        for name in ("keys", "directory", "socket"):
            if name in fields:
                fields[name] = str(tmp_path / fields[name])
        if fields.get("tls") == "ended":
            fields["tls"] = Authority(tmp_path / "ca").tls("a.example", peers=("a.example",), days=-1)
        good = {
            "requires": lambda: ["numpy>=1.26"],
            "limit": lambda name: 1 << 40, "version": lambda name: "" if name.startswith("vllm") else "99",
            "free_bytes": lambda path: 1 << 40, "unsynchronised": lambda: False, "directory": "/tmp",
            "socket": f"{tmp_path}/own/agent.sock",
            "transports": ("shm", "tcp"), "answer": ANSWER,
        }  # fmt: skip
        return Machine(root=str(root), env={**ENV, **dict(env)}, **{**good, **fields})

    return machine


def test_every_check_has_a_bad_machine():
    assert set(BAD) == NAMES


def test_nothing_is_wrong_on_a_good_machine(forge):
    found = examine(forge())
    assert {f.status for of in found.values() for f in of.values()} <= {"ok", "skip"}, found
    skipped = {(group, name) for group, of in found.items() for name, f in of.items() if f.status == "skip"}
    assert skipped == {("versions", "connector"), ("secrets", "certificates")}


@pytest.mark.parametrize(("group", "name"), sorted(NAMES))
def test_a_bad_machine_fails_that_check_with_a_fix(forge, group, name):
    status, files, env, fields = BAD[(group, name)]
    found = CHECKS[group][name](forge(files, env, **fields))
    assert found.status == status
    assert found.what
    assert found.fix


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"addresses": ("http://127.0.0.1:1",)}, "no known scheme"),
        ({"addresses": ("tcp://203.0.113.250:1",)}, "assign"),
        ({"directory": "x" * 120}, "longer than"),
        ({"directory": "missing"}, "No such file"),
    ],
)
def test_addresses_and_directories_that_can_not_be_used(forge, fields, what):
    found = [f for of in examine(forge(**fields)).values() for f in of.values() if f.status == "fail"]
    assert [what in f.what for f in found] == [True], found


def test_a_taken_port_is_found(forge):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        check = CHECKS["sockets"]["bind"]
        assert "in use" in check(forge(addresses=(address,))).what
        assert check(forge(addresses=(address,), running=True)).status == "ok", "the running agent has it"


def test_an_open_address_without_tls_is_a_warning_where_it_is_meant(forge):
    assert CHECKS["sockets"]["bind"](forge(addresses=("tcp://0.0.0.0:0",), insecure=True)).status == "warn"


def test_a_socket_whose_directory_can_not_be_made(forge, monkeypatch):
    monkeypatch.setattr(doctor_checks.os, "access", lambda *_: False)
    found = CHECKS["sockets"]["engines"](forge(socket="none/deeper/agent.sock"))
    assert (found.status, "can't be made" in found.what, bool(found.fix)) == ("fail", True, True)


def test_variables_that_contradict_each_other(forge):
    check = CHECKS["network"]["variables"]
    assert "not here" in check(forge(env={"UCX_NET_DEVICES": "mlx5_9:1", "NCCL_IB_HCA": ""})).what
    assert "NCCL_IB_DISABLE" in check(forge(env={"NCCL_IB_DISABLE": "1"})).what
    assert "no cuda" in check(forge(env={"UCX_TLS": "rc"})).what
    assert check(forge(env={"NCCL_IB_HCA": "^mlx5_7"})).status == "ok"


def test_certificates_that_end_soon_and_later(forge, tmp_path):
    authority = Authority(tmp_path / "ca2")
    check = CHECKS["secrets"]["certificates"]
    for days, status in ((1, "warn"), (90, "ok")):
        tls = authority.tls("a.example", peers=("a.example",), days=days)
        assert abs(Pem.read(tls).not_after() - time.time() - days * 86_400) < 7200
        assert check(forge(tls=tls)).status == status
    os.unlink(tls.cert)
    assert check(forge(tls=tls)).status == "fail"


def test_a_check_that_breaks_is_a_failure(forge, monkeypatch):
    monkeypatch.setitem(doctor_checks.CHECKS["network"], "clock", lambda machine: 1 / 0)
    assert "ZeroDivisionError" in examine(forge())["network"]["clock"].what


def test_this_machine_can_be_examined():
    found = examine(dataclasses.replace(Machine(), need_bytes=1))
    assert found["planes"]["loops"].status == "ok"
    assert not [f for of in found.values() for f in of.values() if "the check itself failed" in f.what]


def test_the_command_shows_a_tree_and_its_exit_code(capsys, tmp_path):
    small = ["doctor", "--set", "agent.arena_bytes=4096", "--set", "agent.chunk_bytes=4096"]
    code = main(small)
    text = capsys.readouterr().out
    assert code == (3 if "FAIL" in text else 0)
    assert "planes" in text.splitlines()
    assert main([*small, "--set", f"agent.ticket_keys={tmp_path}/none"]) == 3
    assert "fix: " in capsys.readouterr().out
    assert main([*small, "--json", "--set", "agent.transports=carrier-pigeon"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is False
    assert {(g, n) for g, of in found["checks"].items() for n in of} == NAMES


def test_the_agent_s_own_config_is_looked_at_with_its_precedence(capsys, tmp_path, monkeypatch):
    def doctor(*argv: str) -> dict[str, dict[str, dict[str, str]]]:
        main(["doctor", "--json", "--admin", f"unix://{tmp_path}/none.sock", "--config", str(config), *argv])
        return json.loads(capsys.readouterr().out)["checks"]

    config, keys = tmp_path / "agent.toml", {name: tmp_path / name for name in ("file", "environment", "flag")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        config.write_text(f"[agent]\nticket_keys = '{keys['file']}'\narena_bytes = '8EiB'\n")
        assert "arena_bytes can't be '8EiB'" in doctor()["config"]["values"]["what"]
        config.write_text(f"[agent]\nticket_keys = '{keys['file']}'\nlisten = {{tcp = '{address}'}}\n")
        found = doctor()
        assert "in use" in found["sockets"]["bind"]["what"]
        assert str(keys["file"]) in found["secrets"]["keys"]["what"]
        monkeypatch.setenv("PDXFER_AGENT__TICKET_KEYS", str(keys["environment"]))
        assert str(keys["environment"]) in doctor()["secrets"]["keys"]["what"]
        assert str(keys["flag"]) in doctor("--set", f"agent.ticket_keys={keys['flag']}")["secrets"]["keys"]["what"]


def test_the_peer_is_asked_by_the_running_agent_or_from_here(capsys, tmp_path):
    admin = f"unix://{tmp_path}/none.sock"
    with pair(*ONE, transports=("shm", "tcp")) as (source, target), served(target):
        address = source.agents[0].address
        for argv in (["--peer", address], ["--peer", address, "--admin", admin]):
            main(["doctor", "--json", *argv])
            found = json.loads(capsys.readouterr().out)["checks"]["peer"]
            assert found["reach"]["status"] == "ok", found
            assert found["layout"]["status"] == ("skip" if "--admin" in argv else "ok")
        main(["doctor", "--json", "--peer", f"unix://{tmp_path}/dead.sock"])
        assert json.loads(capsys.readouterr().out)["checks"]["peer"]["reach"]["status"] == "fail"
