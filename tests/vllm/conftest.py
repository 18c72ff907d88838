"""Real vLLM servers for these tests, started once each; the test process itself never imports vLLM.

All run the spy connector as kv_both, so that each is also its own single-server baseline. What differs between the
servers of a model: TP, block size, conv layout, prefix caching, chunked prefill. A start takes most of a minute and
a gigabyte or two per rank, so at most ``_ALIVE`` live at a time: tests are ordered by the servers they use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pdxfer.demo.vllm_models import SERVER_ARGUMENTS, demo_prompts, save_vllm_model
from pdxfer.demo.vllm_servers import ServerConfig, VllmServer, connector_config, free_port

__all__ = ["CONFIGS", "Fleet"]

ROOT = Path(__file__).resolve().parent.parent.parent

_ALIVE = 3

#: name -> what differs from vLLM's defaults. The first word is the model. A request whose load failed ends with an
#: error, but at the servers b of the policy ``recompute``.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-next a": {"conv_layout": "SD"},
    "qwen3-next b": {"conv_layout": "DS", "block_size": 512, "max_batched_tokens": 512, "prefix_caching": True},
    "qwen3-next c": {"conv_layout": "SD", "tp": 2, "prefix_caching": True},
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

    def _config(self, name: str) -> ServerConfig:
        model, _, letter = name.partition(" ")
        checkpoint = self.directory / model
        if not checkpoint.exists():
            save_vllm_model(model, checkpoint)
        self.spied(name).mkdir(exist_ok=True)
        cores = sorted(os.sched_getaffinity(0))
        options = {"cores": [cores["ab".index(letter) % len(cores)]]} if letter in "ab" else {}
        return ServerConfig(
            model=checkpoint,
            directory=self.directory,
            name=name,
            connector=_connector(letter),
            arguments=SERVER_ARGUMENTS[model],
            environment={"PYTHONPATH": str(ROOT), "SPY_DIRECTORY": str(self.spied(name))},
            **{**options, **CONFIGS[name]},
        )


def _connector(letter: str) -> dict[str, Any]:
    """The spy; an agent of one rank keeps its address over restarts. Cores may be few, and busy with other tests."""
    extra: dict[str, Any] = {
        "call_s": 30.0,
        "stall_s": 30.0,
        "timeout_s": 100.0,
        "accept_state_dtypes": ["bfloat16"],
    }
    if letter in "ab":
        extra["control"] = [f"tcp://127.0.0.1:{free_port()}"]
    spy = {"kv_connector": "SpyConnector", "kv_connector_module_path": "tests.vllm.spy"}
    policy = {"kv_load_failure_policy": "recompute" if letter == "b" else "fail"}
    return {**connector_config(**extra), **spy, **policy}


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
