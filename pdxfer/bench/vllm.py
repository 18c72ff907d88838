"""Bench: hand-offs between two real vLLM servers, by this connector and by vLLM's own NixlConnector, in one run.

In come a model and prompt lengths; out go, per connector and length, the wall time of decode's first token through
the hand-off, what the connector itself says of the transfer, and how many pieces it posted. Both get the same servers:
same flags, block size and TP, conv layout DS (NIXL needs it), no prefix cache, a fresh prompt each time.

::

    floor      a prompt of two tokens at the decode server: what any request costs there
    decode     from the decode request to its first token: floor + transfer + what the connector adds around it
    transfer   as the connector counts it: ours from fetch to READY with all bytes verified, NIXL's the reads alone
"""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdxfer.bench.measure import Tick, quantile
from pdxfer.demo.vllm_models import SERVER_ARGUMENTS, VOCABULARY
from pdxfer.demo.vllm_servers import ServerConfig, VllmServer, check_python, connector_config
from pdxfer.errors import MisuseError, PdxferError

__all__ = ["CONNECTORS", "VllmOptions", "bench_vllm"]

_MAKE_MODEL = (
    "import sys, pathlib; from pdxfer.demo.vllm_models import save_vllm_model;"
    " save_vllm_model(sys.argv[1], pathlib.Path(sys.argv[2]))"
)
_SETTLE_S = 3.0

#: Connector to its metrics: transfers and their seconds, bytes, and pieces posted.
CONNECTORS: dict[str, dict[str, str]] = {
    "pdxfer": {
        "seconds": "vllm:pdxfer_transfer_seconds",
        "bytes": "vllm:pdxfer_bytes_total",
        "posted": "vllm:pdxfer_messages_total",
    },
    "nixl": {
        "seconds": "vllm:nixl_xfer_time_seconds",
        "bytes": "vllm:nixl_bytes_transferred_sum",
        "posted": "vllm:nixl_num_descriptors_sum",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """One run. ``python``: an interpreter with vLLM (and nixl)."""

    python: str = sys.executable
    model: str = "qwen3-next"
    prefill_tp: int = 1
    decode_tp: int = 1
    prompt_tokens: tuple[int, ...] = (128, 512, 1500)
    repeats: int = 7
    connectors: tuple[str, ...] = tuple(CONNECTORS)

    def __post_init__(self) -> None:
        if unknown := sorted({*self.connectors} - {*CONNECTORS}):
            raise MisuseError(f"connector {unknown[0]!r} is unknown; there are {', '.join(CONNECTORS)}")
        if self.model not in SERVER_ARGUMENTS:
            raise MisuseError(f"model {self.model!r} is unknown; there are {', '.join(sorted(SERVER_ARGUMENTS))}")
        if any(not 2 <= n <= 1900 for n in self.prompt_tokens):
            raise MisuseError(f"prompts of 2 to 1900 tokens are possible, got {self.prompt_tokens}")


def bench_vllm(options: VllmOptions, tick: Tick) -> dict[str, Any]:
    """Run every connector in turn; one that can't run has an ``error`` instead of rows."""
    found = []
    with tempfile.TemporaryDirectory(prefix="pdxfer-bench-") as directory:
        check_python(options.python)
        tick("making the model")
        made = [options.python, "-c", _MAKE_MODEL, options.model, f"{directory}/{options.model}"]
        done = subprocess.run(made, capture_output=True, text=True, check=False)
        if done.returncode:
            raise MisuseError(f"{options.python} can't make the model: {done.stderr.strip()[-300:]}")
        for name in options.connectors:
            pair = _Pair(name, options, Path(directory))
            try:
                with pair.started(tick):
                    found.append({"connector": name, "error": "", **pair.measure(tick)})
            except PdxferError as error:
                found.append({"connector": name, "error": str(error), "rows": []})
    servers = f"{options.model}, vLLM TP {options.prefill_tp} to {options.decode_tp}"
    return {
        "what": f"{servers}, {options.repeats} prompts of each length",
        "connectors": found,
        "ratios": _ratios(found),
    }


def _ratios(found: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """NIXL's medians over ours, per prompt length."""
    rows = {c["connector"]: {row["prompt_tokens"]: row for row in c["rows"]} for c in found}
    both = sorted(rows.get("pdxfer", {}).keys() & rows.get("nixl", {}).keys())
    return [
        {
            "prompt_tokens": n,
            **{
                key: rows["nixl"][n][key]["p50"] / rows["pdxfer"][n][key]["p50"] for key in ("decode_ms", "transfer_ms")
            },
        }
        for n in both
    ]


class _Pair:
    """A prefill and a decode server with one connector."""

    def __init__(self, name: str, options: VllmOptions, directory: Path) -> None:
        self._name, self._options, self._random = name, options, random.Random(1)  # noqa: S311 # prompts, no secrets
        cores = sorted(os.sched_getaffinity(0))
        self._servers = [
            VllmServer(
                ServerConfig(
                    model=directory / options.model,
                    directory=directory,
                    name=f"{name}-{role}",
                    tp=tp,
                    connector=self._connector(),
                    conv_layout="DS",
                    python=options.python,
                    cores=[cores[index % len(cores)]] if tp == 1 else (),
                    arguments=SERVER_ARGUMENTS[options.model],
                    environment=_side_channel(index),
                )
            )
            for index, (role, tp) in enumerate([("prefill", options.prefill_tp), ("decode", options.decode_tp)])
        ]

    def _connector(self) -> dict[str, Any]:
        if self._name == "pdxfer":
            return connector_config("kv_both", call_s=60, stall_s=60)
        return {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}

    def started(self, tick: Tick) -> ExitStack:
        """Start both; leaving the result stops them."""
        with ExitStack() as stack:
            for server in self._servers:
                stack.enter_context(server)
            for server in self._servers:
                tick(f"{self._name}: starting vLLM")
                server.wait_ready(lambda text: tick(f"{self._name}: {text}"))
            return stack.pop_all()

    def measure(self, tick: Tick) -> dict[str, Any]:
        """First contact, the floor, and a row per prompt length."""
        first_s = self._hand_off(self._prompt(64))[0]
        floor = [
            self._timed(lambda: self._servers[1].complete(self._prompt(2), 1))[0] for _ in range(self._options.repeats)
        ]
        rows = [self._row(n, tick) for n in self._options.prompt_tokens]
        return {"first_contact_ms": first_s * 1e3, "floor_ms": statistics.median(floor) * 1e3, "rows": rows}

    def _row(self, tokens: int, tick: Tick) -> dict[str, Any]:
        decode, transfer, moved, posted, equal = [], [], [], [], 0
        for number in range(self._options.repeats + 1):  # the first is for nothing
            tick(f"{self._name}: {tokens} tokens")
            prompt = self._prompt(tokens)
            before = self._counted()
            seconds, answer = self._hand_off(prompt)
            spent = self._counted_since(before)
            own = self._servers[1].complete(prompt, 1)["choices"][0]["token_ids"]
            if number:
                equal += answer == own
                decode.append(seconds * 1e3)
                transfer.append(spent["seconds_sum"] / spent["seconds_count"] * 1e3)
                moved.append(spent["bytes"])
                posted.append(spent["posted"])
        return {
            "prompt_tokens": tokens,
            "decode_ms": _spread(decode),
            "transfer_ms": _spread(transfer),
            "bytes": statistics.median(moved),
            "posted": statistics.median(posted),
            "equal": equal,
        }

    def _hand_off(self, prompt: Sequence[int]) -> tuple[float, list[int]]:
        prefill, decode = self._servers
        answer = prefill.complete(prompt, 1, kv_transfer_params={"do_remote_decode": True, "do_remote_prefill": False})
        params = answer["kv_transfer_params"]
        seconds, answer = self._timed(lambda: decode.complete(prompt, 1, kv_transfer_params=params))
        tokens: list[int] = answer["choices"][0]["token_ids"]
        return seconds, tokens

    def _timed(self, ask: Callable[[], dict[str, Any]]) -> tuple[float, dict[str, Any]]:
        start = time.perf_counter()
        answer = ask()
        return time.perf_counter() - start, answer

    def _counted(self) -> dict[str, float]:
        names, decode = CONNECTORS[self._name], self._servers[1]
        seconds = {f"seconds_{part}": decode.metric(f"{names['seconds']}_{part}") for part in ("sum", "count")}
        return {**seconds, **{key: decode.metric(names[key]) for key in ("bytes", "posted")}}

    def _counted_since(self, before: dict[str, float]) -> dict[str, float]:
        """What was counted since; vLLM publishes a step's counters a moment after its answer."""
        until_s = time.monotonic() + _SETTLE_S
        while True:
            now = {key: value - before[key] for key, value in self._counted().items()}
            if now["seconds_count"] >= self._options.decode_tp:
                return now
            if time.monotonic() > until_s:
                raise MisuseError(f"{self._name}: decode counted no transfer: it computed the prompt itself")
            time.sleep(0.05)

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=tokens)


def _side_channel(index: int) -> dict[str, str]:
    """Where NixlConnector's servers find each other; ours needs no port."""
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port() + index * 8)}


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{round(q * 100)}": quantile(values, q) for q in (0.1, 0.5, 0.9)}
