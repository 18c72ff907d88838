"""Real vLLM servers for these tests, started once each; the test process itself never imports vLLM.

All run the spy connector as kv_both, so that each is also its own single-server baseline. What differs between the
servers of a model: TP, block size, conv layout, prefix caching, chunked prefill. A start takes most of a minute and
a gigabyte or two per rank, so at most ``_ALIVE`` live at a time: tests are ordered by the servers they use.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pdxfer.agent.spawn import DaemonProcess
from pdxfer.demo.vllm_models import SERVER_ARGUMENTS, demo_prompts, save_vllm_model
from pdxfer.demo.vllm_servers import ServerConfig, VllmServer, connector_config, free_port

__all__ = ["CONFIGS", "Fleet"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

_ALIVE = 3
_AGENT = {"call_s": 30.0, "stall_s": 30.0}  # cores may be few, and busy with other tests

#: name -> what differs from vLLM's defaults. The first word is the model. A request whose load failed ends with an
#: error, but at the servers b and e of the policy ``recompute``.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-next a": {"conv_layout": "SD"},
    "qwen3-next b": {"conv_layout": "DS", "block_size": 512, "max_batched_tokens": 512, "prefix_caching": True},
    "qwen3-next c": {"conv_layout": "SD", "tp": 2, "prefix_caching": True},
    # d and e: their agents in a daemon, with which all else is the same.
    "qwen3-next d": {"conv_layout": "SD"},
    "qwen3-next e": {"conv_layout": "SD", "tp": 2, "prefix_caching": True},
    "llama a": {},
    "llama b": {"block_size": 32, "max_batched_tokens": 256, "prefix_caching": True},
    "llama c": {"tp": 2, "prefix_caching": True},
    "deepseek-v3 a": {},
    "deepseek-v3 b": {"max_batched_tokens": 256, "prefix_caching": True},
    "deepseek-v3 c": {"tp": 2},
}


class Fleet:
    """The servers of ``CONFIGS``, started when they are first asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._servers: dict[str, VllmServer] = {}  # the least recently used first
        self._short = tempfile.mkdtemp(prefix="v-")  # for sockets
        self.daemons: dict[str, DaemonProcess] = {}
        self._answers: dict[tuple[str, tuple[int, ...], int], list[int]] = {}

    def servers(self, *names: str) -> list[VllmServer]:
        """These servers, running; others may be stopped for them. Those that are missing start at the same time."""
        for name in names:
            if name in self._servers:
                self._servers[name] = self._servers.pop(name)
        missing = [name for name in dict.fromkeys(names) if name not in self._servers]
        for name in [name for name in self._servers if name not in names][: len(self._servers) + len(missing) - _ALIVE]:
            self._servers.pop(name).stop()
        for name in missing:
            self._servers[name] = server = VllmServer(self._config(name))
            server.start()
        for name in missing:
            self._servers[name].wait_ready()
        return [self._servers[name] for name in names]

    def spied(self, name: str) -> Path:
        """Where this server's spy writes."""
        return self.directory / f"{name} spy"

    def own_answer(self, name: str, prompt: Sequence[int], tokens: int) -> list[int]:
        """What this server alone says to a prompt, computed from its first token."""
        key = (name, tuple(prompt), tokens)
        if key not in self._answers:
            answer = self.servers(name)[0].complete(prompt, tokens, cache_salt="alone")
            self._answers[key] = answer["choices"][0]["token_ids"]
        return self._answers[key]

    def stop(self) -> None:
        """End all."""
        while self._servers:
            self._servers.popitem()[1].stop()
        while self.daemons:
            self.daemons.popitem()[1].__exit__(None)
        shutil.rmtree(self._short)

    def _connector(self, name: str, letter: str) -> dict[str, Any]:
        if letter not in "de":
            return _connector(letter, **_AGENT, **({"control": [_address()]} if letter in "ab" else {}))
        if name not in self.daemons:
            agent = {**_AGENT, "lease_s": 30.0, **({"control": [_address()]} if letter == "d" else {})}
            settings = {"worker": name.replace(" ", "-"), "drain_s": 0, "log_level": "warning"}
            settings |= {f"agent.{key}": value for key, value in agent.items()}
            self.daemons[name] = DaemonProcess(f"{self._short}/{letter}/s", settings)
        return _connector(letter, mode="sidecar", sidecar=self.daemons[name].socket)

    def _config(self, name: str) -> ServerConfig:
        model, _, letter = name.partition(" ")
        checkpoint = self.directory / model
        if not checkpoint.exists():
            save_vllm_model(model, checkpoint)
        self.spied(name).mkdir(exist_ok=True)
        cores = sorted(os.sched_getaffinity(0))
        options = {"cores": [cores["abd".index(letter) % len(cores)]]} if letter in "abd" else {}
        return ServerConfig(
            model=checkpoint,
            directory=self.directory,
            name=name,
            connector=self._connector(name, letter),
            arguments=SERVER_ARGUMENTS[model],
            environment={"PYTHONPATH": str(ROOT), "SPY_DIRECTORY": str(self.spied(name))},
            **{**options, **CONFIGS[name]},
        )


def _connector(letter: str, **extra: Any) -> dict[str, Any]:
    """The spy, which is the connector and writes down what it sees."""
    spy = {"kv_connector": "SpyConnector", "kv_connector_module_path": "tests.vllm.spy"}
    policy = {"kv_load_failure_policy": "recompute" if letter in "be" else "fail"}
    return {**connector_config(timeout_s=100.0, accept_state_dtypes=["bfloat16"], **extra), **spy, **policy}


def _address() -> str:
    """Of an agent of one rank, which keeps it over restarts."""
    return f"tcp://127.0.0.1:{free_port()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those with agents in daemons come last, so that the servers d and e start once."""
    items.sort(key=_by_sidecar)


def _by_sidecar(item: pytest.Item) -> bool:
    ends = getattr(item, "callspec", None)
    names = [ends.params.get("source"), ends.params.get("target")] if ends and item.path.parent == HERE else []
    return any(name and name[-1] in "de" for name in names)


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Servers on demand."""
    if find_spec("vllm") is None:
        reason = f"{sys.executable} has no vLLM; PDXFER_ENGINE=vllm tests/run tests/vllm"
        if os.environ.get("PDXFER_REQUIRE_OPTIONAL") == "1":
            pytest.fail(f"{reason} (PDXFER_REQUIRE_OPTIONAL=1)", pytrace=False)
        pytest.skip(reason)
    found = Fleet(tmp_path_factory.mktemp("vllm"))
    try:
        yield found
    finally:
        found.stop()


@pytest.fixture(scope="session")
def prompts() -> dict[str, list[list[int]]]:
    """Prompts of each model whose greedy answers have wide margins."""
    return {model: demo_prompts(model) for model in SERVER_ARGUMENTS}
