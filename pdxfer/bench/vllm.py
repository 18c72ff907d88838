"""Bench: hand-offs between two real vLLM servers, by this connector and by vLLM's own NixlConnector, in one run.

In come a model and prompt lengths; out go, per connector and length, the wall time of decode's first token through
the hand-off, what the connector itself says of the transfer, and how many pieces it posted. Both get the same servers:
same flags, block size and TP, conv layout DS (NIXL needs it), no prefix cache, a fresh prompt each time.

::

    floor      a prompt of two tokens at the decode server: what any request costs there
    prefill    the request to the prefill server: computing, and what the connector does to offer it
    decode     from the decode request to its first token: floor + transfer + what the connector adds around it
    transfer   as the connector counts it: ours from fetch to READY with all bytes verified, NIXL's the reads alone
    own        the decode server's answer to the same prompt without a hand-off: what the hand-off is there to save

The connectors run one after the other (idle servers of vLLM spin), so a busy machine may be slower for one of them.
``own`` and the floor use no connector: how far their ratio is from 1 is how little the other ratios mean.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdxfer.bench.measure import Tick, quantile
from pdxfer.demo.vllm_models import NEAR_TIE, SERVER_ARGUMENTS, VOCABULARY
from pdxfer.demo.vllm_servers import ServerConfig, VllmServer, check_python, connector_config, free_port, make_model
from pdxfer.errors import DeadlineError, MisuseError, PdxferError, PeerError

__all__ = ["CONNECTORS", "VllmOptions", "bench_vllm"]

_SETTLE_S = 3.0
_ANSWER_S = 120.0

# vLLM's own choice at TP 1, for all TP sizes: NIXL needs equal ones.
_BLOCK_SIZES = {"deepseek-v3": 16, "llama": 128, "qwen3-next": 384}

#: What a row has of every prompt, and ratios are made of.
_TIMES = ("prefill_ms", "decode_ms", "transfer_ms", "own_ms")

#: Connector to its metrics: transfers and their seconds, bytes, and pieces posted.
CONNECTORS: dict[str, dict[str, str]] = {
    "pdxfer": {"seconds": "vllm:pdxfer_transfer_seconds", "bytes": "vllm:pdxfer_bytes_total",
               "posted": "vllm:pdxfer_messages_total"},
    "nixl": {"seconds": "vllm:nixl_xfer_time_seconds", "bytes": "vllm:nixl_bytes_transferred_sum",
             "posted": "vllm:nixl_num_descriptors_sum"},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """One run. ``python``: an interpreter with vLLM (and nixl). ``max_time_s``: after it, what is left fails."""

    python: str = sys.executable
    model: str = "qwen3-next"
    prefill_tp: int = 1
    decode_tp: int = 1
    prompt_tokens: tuple[int, ...] = (128, 512, 1500)
    repeats: int = 7
    connectors: tuple[str, ...] = tuple(CONNECTORS)
    max_time_s: float = 1800.0

    def __post_init__(self) -> None:
        if unknown := sorted({*self.connectors} - {*CONNECTORS}):
            raise MisuseError(f"connector {unknown[0]!r} is unknown; there are {', '.join(CONNECTORS)}")
        if self.model not in SERVER_ARGUMENTS:
            raise MisuseError(f"model {self.model!r} is unknown; there are {', '.join(sorted(SERVER_ARGUMENTS))}")
        if any(not 2 <= n <= 1900 for n in self.prompt_tokens):
            raise MisuseError(f"prompts of 2 to 1900 tokens are possible, got {self.prompt_tokens}")


def bench_vllm(options: VllmOptions, tick: Tick) -> dict[str, Any]:
    """Run every connector in turn; one that can't go on has an ``error`` beside the rows it had."""
    found: list[dict[str, Any]] = []
    end_s = time.monotonic() + options.max_time_s
    with tempfile.TemporaryDirectory(prefix="pdxfer-bench-") as directory:
        check_python(options.python)
        tick("making the model")
        make_model(options.python, options.model, Path(directory) / options.model)
        for number, name in enumerate(options.connectors):
            # The time that is left is shared: one that hangs leaves the others theirs.
            left_s = (end_s - time.monotonic()) / (len(options.connectors) - number)
            pair = _Pair(name, options, Path(directory), time.monotonic() + left_s)
            found.append(row := {"connector": name, "error": "", "rows": []})
            try:
                with pair.started(tick):
                    pair.measure(tick, row)
            except PdxferError as error:
                row["error"] = str(error)
    servers = f"{options.model}, vLLM TP {options.prefill_tp} to {options.decode_tp}"
    what = f"{servers}, {options.repeats} prompts of each length"
    return {"what": what, "connectors": found, "ratios": _ratios(found)}


def _ratios(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """NIXL's times over ours, prompt by prompt, per prompt length that both have."""
    rows = {c["connector"]: {row["prompt_tokens"]: row for row in c["rows"]} for c in found}
    ours, theirs = rows.get("pdxfer", {}), rows.get("nixl", {})
    return [
        {"prompt_tokens": n, **{key: _quotient(theirs[n][key], ours[n][key]) for key in _TIMES}}
        for n in sorted(ours.keys() & theirs.keys())
    ]


def _quotient(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, float]:
    return _spread([one / other for one, other in zip(theirs["all"], ours["all"], strict=True)])


class _Pair:
    """A prefill and a decode server with one connector."""

    def __init__(self, name: str, options: VllmOptions, directory: Path, end_s: float) -> None:
        self._name, self._options, self._end_s = name, options, end_s
        self._random = random.Random(1)  # noqa: S311 # prompts, no secrets; the same ones for every connector
        cores = sorted(os.sched_getaffinity(0))
        self._servers = [
            VllmServer(
                ServerConfig(
                    model=directory / options.model, directory=directory, name=f"{name}-{role}", tp=tp,
                    connector=self._connector(), block_size=_BLOCK_SIZES[options.model], conv_layout="DS",
                    python=options.python, cores=[cores[index % len(cores)]] if tp == 1 else (),
                    arguments=SERVER_ARGUMENTS[options.model], environment=_side_channel(index),
                )
            )
            for index, (role, tp) in enumerate([("prefill", options.prefill_tp), ("decode", options.decode_tp)])
        ]  # fmt: skip

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
                server.wait_ready(lambda text: tick(f"{self._name}: {text}"), timeout_s=self._left_s())
            return stack.pop_all()

    def measure(self, tick: Tick, into: dict[str, Any]) -> None:
        """First contact, the floor, and a row per prompt length; ``into`` has what there is at any time."""
        into["first_contact_ms"] = self._hand_off(self._prompt(64))["decode_ms"]
        floor = [self._ask(1, self._prompt(2))[0] for _ in range(self._options.repeats)]
        into["floor_ms"] = statistics.median(floor)
        for tokens in self._options.prompt_tokens:
            into["rows"].append(self._row(tokens, tick))

    def _row(self, tokens: int, tick: Tick) -> dict[str, Any]:
        seen = []
        for _ in range(self._options.repeats + 1):
            tick(f"{self._name}: {tokens} tokens")
            seen.append(self._once(self._prompt(tokens)))
        timed = seen[1:]  # the first was for nothing
        return {
            "prompt_tokens": tokens,
            **{key: {**_spread(all_ := [one[key] for one in timed]), "all": all_} for key in _TIMES},
            **{key: statistics.median(one[key] for one in timed) for key in ("transfers", "bytes", "posted")},
            "prompts": len(timed),
            "equal": sum(one["token"] == one["own"] for one in timed),
            "near_ties": sum(one["token"] != one["own"] and one["lead"] < NEAR_TIE for one in timed),
        }

    def _once(self, prompt: Sequence[int]) -> dict[str, Any]:
        """One prompt: through the hand-off, and then by the decode server alone."""
        before = self._counted()
        found = self._hand_off(prompt)
        spent = self._counted_since(before)
        found["transfer_ms"] = spent["seconds_sum"] / spent["seconds_count"] * 1e3
        own_ms, answer = self._ask(1, prompt, logprobs=2, return_tokens_as_token_ids=True)
        best, second = sorted(answer["logprobs"]["top_logprobs"][0].values(), reverse=True)[:2]
        own = {"own_ms": own_ms, "own": answer["token_ids"], "lead": best - second}
        return {**found, **own, "transfers": spent["seconds_count"], "bytes": spent["bytes"], "posted": spent["posted"]}

    def _hand_off(self, prompt: Sequence[int]) -> dict[str, Any]:
        offer = {"do_remote_decode": True, "do_remote_prefill": False}
        prefill_ms, answer = self._ask(0, prompt, kv_transfer_params=offer)
        decode_ms, answer = self._ask(1, prompt, kv_transfer_params=answer["kv_transfer_params"])
        return {"prefill_ms": prefill_ms, "decode_ms": decode_ms, "token": answer["token_ids"]}

    def _ask(self, server: int, prompt: Sequence[int], **fields: Any) -> tuple[float, dict[str, Any]]:
        """One token of a server: milliseconds, and the choice with the answer's ``kv_transfer_params``."""
        left_s, start_s = self._left_s(), time.perf_counter()
        answer = self._servers[server].complete(prompt, 1, timeout_s=min(left_s, _ANSWER_S), **fields)
        elapsed_ms = (time.perf_counter() - start_s) * 1e3
        return elapsed_ms, {**answer["choices"][0], "kv_transfer_params": answer.get("kv_transfer_params")}

    def _left_s(self) -> float:
        left_s = self._end_s - time.monotonic()
        if left_s <= 0:
            raise DeadlineError(f"{self._name}: its share of --max-time is over", hint="more time, or fewer repeats")
        return left_s

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
                raise PeerError(f"{self._name}: decode counted no transfer: it computed the prompt itself")
            time.sleep(0.05)

    def _prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(VOCABULARY), k=tokens)


def _side_channel(index: int) -> dict[str, str]:
    """Where NixlConnector's servers find each other; ours needs no port."""
    port = str(free_port() + index * 8)
    return {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": port}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{round(q * 100)}": quantile(values, q) for q in (0.1, 0.5, 0.9)}
