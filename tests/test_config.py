"""The daemon's config: who goes before whom, units, slips that are refused, what a running daemon takes over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import fields

import pytest
import tomllib
from click.testing import CliRunner

from pdxfer.agent.config import AgentConfig, DaemonConfig
from pdxfer.agent.spawn import DaemonProcess
from pdxfer.cli.config import config as command
from pdxfer.config import load_config, schema, template
from pdxfer.connectors.vllm_settings import Settings
from pdxfer.errors import MisuseError
from tests.conftest import require
from tests.pairs import wait_until

TOML = """
worker = "prefill-0"
[agent]
lease_s = "2m"
arena_bytes = "1GiB"
transports = ["tcp"]
listen = {tcp = "tcp://127.0.0.1:7001"}
[agent.transport_options.tcp]
contact_host = "127.0.0.1"
[agent.quotas]
peer_bytes = "2GiB"
"""
YAML = """
worker: prefill-0
agent:
  lease_s: 2m
  arena_bytes: 1GiB
  transports: [tcp]
  listen: {tcp: "tcp://127.0.0.1:7001"}
  transport_options: {tcp: {contact_host: 127.0.0.1}}
  quotas: {peer_bytes: 2GiB}
"""


def written(directory, text, name="agent.toml"):
    path = directory / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("name", "text"), [("agent.toml", TOML), ("agent.yaml", YAML)])
def test_toml_and_yaml_say_the_same(tmp_path, name, text):
    if name.endswith("yaml"):
        require("yaml")
    config = load_config(written(tmp_path, text, name), environ={}).config
    assert (config.worker, config.agent.lease_s, config.agent.arena_bytes) == ("prefill-0", 120.0, 1 << 30)
    assert (config.agent.transports, config.agent.listen) == (("tcp",), {"tcp": "tcp://127.0.0.1:7001"})
    assert config.agent.transport_options == {"tcp": {"contact_host": "127.0.0.1"}}
    assert config.agent.quotas.peer_bytes == 2 << 30
    assert config.of_rank(3, "engine").listen == {"tcp": "tcp://127.0.0.1:7004"}
    assert config.of_rank(3, "engine").worker == "prefill-0"


def test_flags_before_environment_before_file_before_defaults(tmp_path):
    path = written(tmp_path, "drain_s = 1\nlog_level = 'error'\n[agent]\nwindow = 3\nlease_s = 4\ncall_s = 5\n")
    environ = {"PDXFER_AGENT__WINDOW": "6", "PDXFER_AGENT__LEASE_S": "7s", "PDXFER_LOG_LEVEL": "debug"}
    loaded = load_config(path, {"agent.window": "8"}, environ)
    rows = {key: (value, origin) for key, value, origin in loaded.rows()}
    assert rows["agent.window"] == (8, "flag agent.window")
    assert rows["agent.lease_s"] == (7.0, "environment PDXFER_AGENT__LEASE_S")
    assert rows["log_level"] == ("debug", "environment PDXFER_LOG_LEVEL")
    assert rows["agent.call_s"] == (5.0, path)
    assert rows["agent.stall_s"] == (5.0, "default")
    assert rows["drain_s"] == (1.0, path)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("4GiB", 4 << 30), ("64MB", 64_000_000), ("65536", 65536), ("1.5 MiB", 3 << 19), (70000, 70000),
    ],
)  # fmt: skip
def test_sizes(text, found):
    config = load_config(flags={"agent.chunk_bytes": "4096", "agent.arena_bytes": text}, environ={}).config
    assert config.agent.arena_bytes == found


def test_a_transport_that_nobody_knows_is_refused_before_any_engine_comes():
    with pytest.raises(MisuseError, match=r"transports has \['warp'\]; known are auto, gloo, "):
        load_config(flags={"agent.transports": "shm,warp"}, environ={})
    assert load_config(flags={"agent.transports": "auto"}, environ={}).config.agent.transports == ("auto",)


@pytest.mark.parametrize(
    ("text", "found"), [("250ms", 0.25), ("30s", 30.0), ("2m", 120.0), ("1h", 3600.0), ("0.5", 0.5)]
)
def test_times(text, found):
    assert load_config(flags={"drain_s": text}, environ={}).config.drain_s == found


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("lease_s = 3", "no key 'lease_s'", "'agent.lease_s'"),
        ("[agent]\nleases_s = 3", "no key 'agent.leases_s'", "'agent.lease_s'"),
        ("[agents]\nlease_s = 3", "no key 'agents'", ""),
        ("[agent]\nrank = 3", "no key 'agent.rank'", ""),
        ("[agent.quotas]\npeer_byte = 3", "no key 'agent.quotas.peer_byte'", "'agent.quotas.peer_bytes'"),
        ("[agent]\nlease_s = '3 parsecs'", r"agent.lease_s can't be '3 parsecs'.*unit of ms, s", ""),
        ("[agent]\nwindow = 1.5", "agent.window can't be 1.5: a whole number", ""),
        ("[agent]\nwindow = true", "agent.window can't be True", ""),
        ("[agent]\ntransports = 'tcp'", "agent.transports can't be 'tcp': a list", ""),
        ("[agent]\ndigests = 'yes'", "agent.digests can't be 'yes': true or false", ""),
        ("[agent]\nwindow = 99", r"^window must be in [^(]*, got 99$", ""),
        ("[agent]\nlease_s = 0", r"^lease_s must be positive [^(]*, got 0.0$", ""),
        ("agent = 3", "'agent' is a table", "agent.lease_s"),
        ("[agent.tls]\nca = 'ca.pem'", r"^agent.tls.cert, agent.tls.key, agent.tls.peers: missing", "all of them"),
        ("admin = 'here'", r"^admin: .*'here' is not HOST:PORT \(", "HOST:PORT"),
        ("admin = '127.0.0.1:99999'", r"^admin: .* is not HOST:PORT", "HOST:PORT"),
        ("admin = '0.0.0.0:9464'", r"^admin: .*from other machines", "metrics"),
        (
            "[agent]\ncontrol = ['tcp://0.0.0.0:7000']\ninsecure = true",
            "would listen on every interface",
            "one interface",
        ),
        ("[agent]\ncontrol = ['tcp://192.0.2.7:7000']", "nothing would say who calls", "set tls"),
        ("[agent]\ncontrol = ['127.0.0.1:7000']", "no known scheme", "tcp://host:port"),
        ("metrics = '9465'", r"^metrics: .*'9465' is not HOST:PORT", "HOST:PORT"),
        ("log_level = 'loud'", "log_level must be", ""),
        ("log_format = 'xml'", "log_format must be", ""),
        ("a = ", "can't be read", ""),
    ],
)
def test_a_file_that_is_wrong_is_refused_by_key(tmp_path, text, message, hint):
    path = written(tmp_path, text)
    with pytest.raises(MisuseError, match=message) as caught:
        load_config(path, environ={})
    assert hint in caught.value.hint
    done = CliRunner().invoke(command, ["check", "--config", path])
    assert isinstance(done.exception, MisuseError)
    assert done.exception.exit_code == 2


def test_the_environment_s_slips_are_refused_and_what_a_cluster_sets_is_not():
    for name in ("PDXFER_SOKET", "PDXFER_AGENT__LEASE", "PDXFER_AGENT__RANK"):
        with pytest.raises(MisuseError, match="environment"):
            load_config(environ={name: "1"})
    cluster = {"PDXFER_SERVICE_HOST": "10.0.0.1", "PDXFER_PORT_7000_TCP_ADDR": "10.0.0.1", "PDXFER_DEBUG": "1"}
    assert load_config(environ=cluster).config == load_config(environ={}).config


def test_every_field_is_a_key_and_every_key_is_in_schema_and_template(tmp_path):
    keys = [key for key, _, _ in load_config(environ={}).rows()]
    nested = {"tls", "quotas"}
    for cls, prefix, skip in ((DaemonConfig, "", {"agent"}), (AgentConfig, "agent.", {"worker", "rank", *nested})):
        assert {f"{prefix}{f.name}" for f in fields(cls)} - {prefix + s for s in skip} <= set(keys)
    described = schema()["properties"]
    for key in keys:
        *tables, name = key.split(".")
        at = described
        for table in tables:
            assert at[table]["additionalProperties"] is False
            at = at[table]["properties"]
        assert name in at
    plain = "\n".join(line.removeprefix("# ") for line in template().splitlines()[1:] if not line.endswith('= "..."'))
    parsed = tomllib.loads("\n".join(line for line in plain.splitlines() if not line.endswith("= ...")))
    parsed["agent"].pop("tls")
    path = written(tmp_path, template())
    assert load_config(path, environ={}).config == load_config(environ={}).config
    assert parsed["agent"]["lease_s"] == 30.0


def test_show_says_where_a_value_comes_from():
    done = CliRunner(env={"PDXFER_WORKER": "p"}).invoke(command, ["show", "--origin", "--json", "--set", "drain_s=3s"])
    shown = json.loads(done.output)
    assert shown["worker"] == {"value": "p", "origin": "environment PDXFER_WORKER"}
    assert shown["drain_s"] == {"value": 3.0, "origin": "flag drain_s"}
    assert shown["agent.lease_s"]["origin"] == "default"


def test_a_command_line_that_is_wrong_ends_with_2():
    done = subprocess.run(
        [sys.executable, "-m", "pdxfer", "agent", "--set", "agent.leas_s=3"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "did you mean 'agent.lease_s'?" in done.stderr


@pytest.mark.parametrize(
    ("flags", "message", "hint"),
    [
        ({"agent.listen": "tcp://127.0.0.1:7001"}, "a JSON object is needed", ""),
        ({"agent.listen.tcp": "tcp://127.0.0.1:7001"}, "'agent.listen' is one value", "agent.listen={...}"),
    ],
)
def test_a_table_on_the_command_line_is_json(flags, message, hint):
    with pytest.raises(MisuseError, match=message) as caught:
        load_config(flags=flags, environ={})
    assert hint in caught.value.hint
    assert load_config(flags={"agent.listen": '{"tcp": "tcp://127.0.0.1:7001"}'}, environ={}).config.agent.listen


def test_a_file_that_can_t_be_read_is_refused_in_one_line(tmp_path):
    for path in (str(tmp_path / "none.toml"), str(tmp_path), written(tmp_path, "a: [1", "bad.yaml")):
        with pytest.raises(MisuseError, match=r"can't be read: [^\n\[]*") as caught:
            load_config(path, environ={})
        assert "\n" not in caught.value.message
        assert "Errno" not in caught.value.message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("insecure", "false"), ("digests", 0), ("digests", None), ("window", 2.5), ("window", True),
        ("copy_threads", "2"), ("rank", "0"),
        ("lease_s", "30"), ("stall_s", 1e12), ("control", 5000), ("control", [7]), ("tls", "none"),
        ("quotas", 5), ("transports", 7), ("transport_options", {"shm": 1}), ("arena_bytes", 1 << 60),
        ("chunk_bytes", 1 << 31), ("listen", []),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(key, value):
    """The text "false" opened every port to everybody; others were found out by a traceback, or by each fetch."""
    room = {"arena_bytes": 1 << 32} if key == "chunk_bytes" else {}
    with pytest.raises(MisuseError, match=key):
        AgentConfig(worker="w", **room, **{key: value})
    if key != "rank":
        with pytest.raises(MisuseError, match=key):
            Settings.parse({**room, key: value}, "engine")


def test_one_control_address_may_stand_alone():
    assert AgentConfig(worker="w", control="tcp://127.0.0.1:7000").control == ("tcp://127.0.0.1:7000",)


def test_a_hangup_takes_over_what_may_change(tmp_path):
    path, log = written(tmp_path, "drain_s = 1\nlog_level = 'warning'\n"), tmp_path / "log"
    os.chmod(tmp_path, 0o700)
    with open(log, "wb") as file, DaemonProcess(f"{tmp_path}/s", config=path, stderr=file) as daemon:

        def says(text):
            assert wait_until(lambda: text in log.read_text(), timeout_s=30.0), log.read_text()

        written(tmp_path, "drain_s = 2\nworker = 'w'\n[agent]\nlease_s = '5s'\nwindow = 5\n")
        daemon.process.send_signal(signal.SIGHUP)
        says("needs a restart: agent.window, worker")
        written(tmp_path, "drane_s = 2\n")
        daemon.process.send_signal(signal.SIGHUP)
        says("not taken over: there is no key 'drane_s'")
        assert daemon.process.poll() is None
    for line in log.read_text().splitlines():  # no terminal, so it is JSON
        assert {"ts", "level", "logger", "event"} <= {*json.loads(line)}
