"""``pdxfer demo --engine vllm``: requests from a real vLLM prefill server to a real vLLM decode server, and the proof.

In come ``VllmOptions``; out goes a ``VllmOutcome``, or the first error, with what the servers' logs say about it. All
processes are real and gone at the end: two servers of unequal TP, block size and conv layout, and ``pdxfer proxy``.

::

    prompt ──▶ proxy ──▶ prefill server ══ caches ══▶ decode server ──▶ 32 tokens ─┐
    prompt ────────────────────────────────────────▶ decode server ──▶ 32 tokens ─┴─ the same?

Prefill's arithmetic is not decode's to the last bit (bfloat16, another TP size), so where the two best tokens are
nearly tied, either may win: tokens count as far as decode's own answer is sure of them. The prompts are such that it
mostly is.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pdxfer.agent.spawn import DaemonProcess
from pdxfer.demo.vllm_models import NEAR_TIE, SERVER_ARGUMENTS, VLLM_MODELS, demo_prompts
from pdxfer.demo.vllm_servers import ServerConfig, VllmServer, check_python, connector_config, make_model
from pdxfer.errors import DeadlineError, MisuseError, PdxferError, PeerError

__all__ = ["HandOff", "VllmOptions", "VllmOutcome", "run_vllm_demo"]

_TP_SIZES = {"deepseek-v3": (1, 2, 4, 8), "llama": (1, 2, 4, 8), "qwen3-next": (1, 2, 4)}

# Prefill's and decode's --block-size. Of a hybrid model, vLLM takes multiples that hold a state page (268 tokens here);
# of MLA on a CPU it takes 16 only.
_BLOCK_SIZES = {"deepseek-v3": (16, 16), "llama": (128, 96), "qwen3-next": (384, 288)}

_READY_S = 600.0
_ANSWER_S = 300.0
_COUNTED_S = 10.0
_POLL_S = 0.1

# Where two cores do all this, everybody is slow at times; the connector's own defaults are for machines that serve.
_AGENT = {"call_s": 120, "stall_s": 120, "lease_s": 300}
_TIMEOUT_S = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """One run. ``python`` is an interpreter with vLLM; a block size of 0 and a TP size of 0 are the demo's choice.

    With ``sidecar`` each server's agents live in a daemon's process, not in its ranks'.
    """

    model: str = "qwen3-next"
    prefill_tp: int = 1
    decode_tp: int = 0
    prefill_block_size: int = 0
    decode_block_size: int = 0
    python: str = sys.executable
    steps: int = 32
    sidecar: bool = False

    def __post_init__(self) -> None:
        if self.model not in VLLM_MODELS:
            known = ", ".join(VLLM_MODELS)
            raise MisuseError(f"there is no demo model {self.model!r} for vLLM", hint=f"choose one of {known}")
        sizes = _TP_SIZES[self.model]
        chosen = {
            "decode_tp": self.decode_tp or min(2, len(os.sched_getaffinity(0))),
            "prefill_block_size": self.prefill_block_size or _BLOCK_SIZES[self.model][0],
            "decode_block_size": self.decode_block_size or _BLOCK_SIZES[self.model][1],
        }
        for name, value in chosen.items():
            object.__setattr__(self, name, value)
        for name in ("prefill_tp", "decode_tp"):
            if getattr(self, name) not in sizes:
                raise MisuseError(f"{self.model} can't be cut over {name} {getattr(self, name)}; TP can be {sizes}")

    @property
    def conv_layouts(self) -> dict[str, Literal["SD", "DS"]]:
        """The servers' VLLM_SSM_CONV_STATE_LAYOUT, where the model has such a state."""
        return {"prefill": "SD", "decode": "DS"} if self.model == "qwen3-next" else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOff:
    """One request: seconds of its parts, what decode's ranks counted, and its tokens beside decode's own.

    Attributes:
        prefill_s: at the prefill server; first_s: after that, up to decode's first token; whole_s: to the last one.
        alone_s: decode's own whole answer, prompt included.
        ranks: of decode, that received it whole; transfer_s: one rank's load (mean), nbytes and messages: of all.
        sure: how many of decode's own tokens come before its first near tie.
        logprob_error: greatest difference of a token's log probability, as far as the tokens are equal.
    """

    prompt_tokens: int
    prefill_s: float
    first_s: float
    whole_s: float
    alone_s: float
    ranks: int
    transfer_s: float
    nbytes: int
    messages: int
    tokens: tuple[int, ...]
    own_tokens: tuple[int, ...]
    sure: int
    logprob_error: float

    @property
    def equal(self) -> int:
        """How many tokens are decode's own, up to the first that is not."""
        return _equal(self.tokens, self.own_tokens)

    @property
    def tokens_ok(self) -> bool:
        """All tokens are decode's own, or those before its first near tie."""
        return self.equal == len(self.tokens) or self.equal >= self.sure > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOutcome:
    """One run of the demo. ``offers``: how many the prefill server's ranks counted as completed."""

    options: VllmOptions
    hand_offs: tuple[HandOff, ...]
    offers: int
    total_s: float

    @property
    def received(self) -> int:
        """How many loads decode's ranks took whole."""
        return sum(h.ranks for h in self.hand_offs)

    @property
    def moved_ok(self) -> bool:
        """Every rank of both servers counted every request: nothing was computed anew on the quiet."""
        count, o = len(self.hand_offs), self.options
        return (self.received, self.offers) == (count * o.decode_tp, count * o.prefill_tp) and count > 0

    @property
    def tokens_ok(self) -> bool:
        """Every token is decode's own, near ties apart."""
        return all(h.tokens_ok for h in self.hand_offs)

    @property
    def ok(self) -> bool:
        """Nothing is off."""
        return self.moved_ok and self.tokens_ok

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        options = {name: value for name, value in asdict(self.options).items() if name != "python"}
        hand_offs = [{**asdict(h), "equal": h.equal, "ok": h.tokens_ok} for h in self.hand_offs]
        return {
            "schema_version": 1,
            "engine": "vllm",
            "ok": self.ok,
            **options,
            "received": self.received,
            "offers": self.offers,
            "total_s": self.total_s,
            "hand_offs": hand_offs,
        }


def run_vllm_demo(options: VllmOptions, progress: Callable[[str], None] = lambda _: None) -> VllmOutcome:
    """Hand requests from one vLLM server to another, and compare with what the second says alone.

    Args:
        progress: called with what is done now, for people, every few seconds.

    Raises:
        MisuseError: the interpreter lacks something.
        PdxferError: a process failed, died or did not answer in time. No process is left, whatever is raised.
    """
    started_s = time.perf_counter()
    check_python(options.python)
    with tempfile.TemporaryDirectory(prefix="pdxfer-demo-") as name:
        directory = Path(name)
        progress(f"making a tiny {options.model}")
        model = directory / options.model
        make_model(options.python, options.model, model)
        with _servers(options, model, progress) as (prefill, decode):
            prompts = demo_prompts(options.model)[::3]
            progress(f"{len(prompts)} prompts to the decode server alone")
            own = [_ask(decode.address, model.name, prompt, options.steps, "the decode server") for prompt in prompts]
            hand_offs = []
            with _proxy(options.python, prefill, decode, directory / "proxy.log") as address:
                for number, prompt in enumerate(prompts):
                    progress(f"hand-off {number + 1} of {len(prompts)}: {len(prompt):,} tokens")
                    hand_offs.append(_hand_off(address, decode, prompt, own[number]))
            offers = _count(prefill, "offers", "completed", len(prompts) * options.prefill_tp)
            progress("stopping the servers")
    total_s = time.perf_counter() - started_s
    return VllmOutcome(options=options, hand_offs=tuple(hand_offs), offers=offers, total_s=total_s)


# -- processes -----------------------------------------------------------------------------------------


@contextmanager
def _servers(
    options: VllmOptions, model: Path, progress: Callable[[str], None]
) -> Iterator[tuple[VllmServer, VllmServer]]:
    """Both servers, ready. An error inside gets what their logs say: these are gone with their directory."""
    prefill, decode = VllmServer(_config(options, model, "prefill")), VllmServer(_config(options, model, "decode"))

    def waiting(text: str) -> None:
        progress(text.replace("prefill is", "both servers are"))
        decode.check_alive()

    known: set[str] = set()
    with ExitStack() as stack:
        if options.sidecar:
            for server in (prefill, decode):
                stack.enter_context(_daemon(server.config))
        stack.enter_context(prefill)
        stack.enter_context(decode)
        try:
            progress(f"starting two vLLM servers: prefill TP {options.prefill_tp}, decode TP {options.decode_tp}")
            prefill.wait_ready(waiting, timeout_s=_READY_S)
            decode.wait_ready(progress, timeout_s=_READY_S)
            known.update(prefill.telling_lines(), decode.telling_lines())  # complaints of servers that work
            yield prefill, decode
        except PdxferError as error:
            said = [line for server in (prefill, decode) for line in _complaints(server, known)]
            new = [line for line in dict.fromkeys(said) if line.split(": ", 1)[-1] not in error.message]
            raise type(error)("\n    ".join([error.message, *new])) from error


def _complaints(server: VllmServer, known: set[str]) -> Iterator[str]:
    """That it ended by itself, and what its log says beyond what is ``known``."""
    try:
        server.check_alive()
    except PeerError as error:
        yield error.message.partition("\n")[0]
    except MisuseError:
        pass  # that it ended is what the error says
    yield from (f"{server.config.name}: {line}" for line in server.telling_lines() if line not in known)


def _daemon(config: ServerConfig) -> DaemonProcess:
    """The daemon of one server, whose socket its connector names."""
    settings = {"worker": config.name, "drain_s": 0, "log_level": "warning"}
    assert config.connector is not None
    socket: str = config.connector["kv_connector_extra_config"]["sidecar"]
    return DaemonProcess(socket, settings | {f"agent.{key}": value for key, value in _AGENT.items()})


def _config(options: VllmOptions, model: Path, name: Literal["prefill", "decode"]) -> ServerConfig:
    prefill = name == "prefill"
    scratch = model.parent / name[0]  # short: Unix sockets lie in it, and no path of one may have 108 characters
    scratch.mkdir()
    extra: dict[str, Any] = {"mode": "sidecar", "sidecar": f"{scratch}/agent/s"} if options.sidecar else dict(_AGENT)
    return ServerConfig(
        model=model,
        directory=model.parent,
        name=name,
        tp=options.prefill_tp if prefill else options.decode_tp,
        connector=connector_config("kv_producer" if prefill else "kv_consumer", timeout_s=_TIMEOUT_S, **extra),
        block_size=options.prefill_block_size if prefill else options.decode_block_size,
        conv_layout=options.conv_layouts.get(name),
        arguments=SERVER_ARGUMENTS[options.model],
        environment={"TMPDIR": str(scratch)},
        python=options.python,
    )


@contextmanager
def _proxy(python: str, prefill: VllmServer, decode: VllmServer, log: Path) -> Iterator[str]:
    """``pdxfer proxy`` in front of both; yields ``host:port``."""
    servers = ("--prefill", f"http://{prefill.address}", "--decode", f"http://{decode.address}")
    command = [python, "-m", "pdxfer", "proxy", *servers, "--listen", "127.0.0.1:0", "--json"]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise PeerError(f"pdxfer proxy ended: {log.read_text(errors='replace').strip()}")
            yield urlsplit(json.loads(line)["listen"]).netloc
        finally:
            process.kill()


# -- requests ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Answer:
    """What came of one request, token by token. ``leads``: of the best token over the second, in log probability."""

    prefill_s: float = 0.0
    first_s: float = 0.0
    whole_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    leads: list[float] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """Take over what a choice of ``/v1/completions`` says, whole or a part of a stream."""
        self.tokens += choice.get("token_ids") or ()
        found = choice.get("logprobs") or {"token_logprobs": (), "top_logprobs": ()}
        self.logprobs += found["token_logprobs"]
        for likely in found["top_logprobs"]:
            best, second = sorted(likely.values(), reverse=True)[:2]
            self.leads.append(best - second)

    @property
    def sure(self) -> int:
        """How many tokens come before the first near tie."""
        return next((index for index, lead in enumerate(self.leads) if lead < NEAR_TIE), len(self.leads))


#: Log probabilities of the two best tokens, named by their ids as there is no tokenizer.
_LOGPROBS = {"logprobs": 2, "return_tokens_as_token_ids": True, "ignore_eos": True}


def _ask(address: str, model: str, prompt: Sequence[int], steps: int, who: str) -> _Answer:
    """Ask for a greedy completion, token by token; raises PeerError or DeadlineError."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": steps, "temperature": 0, "stream": True, **_LOGPROBS}
    body["return_token_ids"] = True
    answer, said, started_s = _Answer(), None, time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=_ANSWER_S)
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise PeerError(f"{who} answered {response.status}: {response.read(500).decode(errors='replace')}")
            answer.prefill_s = float(response.getheader("X-Pdxfer-Prefill-Ms", "0")) / 1e3
            for line in response:
                if line.startswith(b"data: {"):
                    said = json.loads(line.removeprefix(b"data: "))
                    for choice in said.get("choices", ()):
                        answer.add(choice)
                    answer.first_s = answer.first_s or time.perf_counter() - started_s - answer.prefill_s
        except TimeoutError as error:
            raise DeadlineError(f"{who} was silent for {_ANSWER_S:g} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(f"{who} can't be asked: {error}") from error
    answer.whole_s = time.perf_counter() - started_s - answer.prefill_s
    if len(answer.tokens) != steps:
        raise PeerError(f"{who} ended its answer after {len(answer.tokens)} of {steps} tokens: {said}")
    return answer


def _hand_off(address: str, decode: VllmServer, prompt: Sequence[int], own: _Answer) -> HandOff:
    """Ask the proxy, and read what decode's ranks counted meanwhile."""
    before = _figures(decode)
    answer = _ask(address, decode.config.model.name, prompt, len(own.tokens), "the proxy")
    _count(decode, "transfers", "received", before["ranks"] + decode.config.tp)
    counted = {name: value - before[name] for name, value in _figures(decode).items()}
    ranks = int(counted["ranks"])
    errors = [abs(one - other) for one, other in zip(answer.logprobs, own.logprobs, strict=True)]
    return HandOff(
        prompt_tokens=len(prompt),
        prefill_s=answer.prefill_s,
        first_s=answer.first_s,
        whole_s=answer.whole_s,
        alone_s=own.whole_s,
        ranks=ranks,
        transfer_s=counted["seconds"] / max(ranks, 1),
        nbytes=int(counted["bytes"]),
        messages=int(counted["messages"]),
        tokens=tuple(answer.tokens),
        own_tokens=tuple(own.tokens),
        sure=own.sure,
        logprob_error=max(errors[: _equal(answer.tokens, own.tokens)], default=0.0),
    )


def _equal(tokens: Sequence[int], own: Sequence[int]) -> int:
    pairs = enumerate(zip(tokens, own, strict=True))
    return next((index for index, (one, other) in pairs if one != other), len(tokens))


def _figures(decode: VllmServer) -> dict[str, float]:
    return {
        "ranks": decode.metric("vllm:pdxfer_transfers_total", outcome="received"),
        "seconds": decode.metric("vllm:pdxfer_transfer_seconds_sum"),
        "bytes": decode.metric("vllm:pdxfer_bytes_total"),
        "messages": decode.metric("vllm:pdxfer_messages_total"),
    }


def _count(server: VllmServer, kind: str, outcome: str, wanted: float) -> int:
    """A counter of the connector, once it stands at ``wanted``: ranks report a little after the fact, if they do."""
    deadline_s = time.monotonic() + _COUNTED_S
    while (found := server.metric(f"vllm:pdxfer_{kind}_total", outcome=outcome)) < wanted:
        if time.monotonic() > deadline_s:
            break
        time.sleep(_POLL_S)
    return int(found)
