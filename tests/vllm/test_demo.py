"""``pdxfer demo --engine vllm``: a whole run as a user starts it, what a stopped one leaves, and its judgement."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from pdxfer.cli.demo import demo
from pdxfer.cli.demo_report import print_vllm_outcome
from pdxfer.demo.vllm_run import HandOff, VllmOptions, VllmOutcome
from pdxfer.errors import MisuseError
from tests.conftest import require


@pytest.fixture
def directory() -> Iterator[str]:
    """A short one: Unix sockets lie below it."""
    path = tempfile.mkdtemp(prefix="d-")
    yield path
    shutil.rmtree(path)


def start(directory: str, *arguments: str) -> subprocess.Popen[str]:
    require("vllm")
    return subprocess.Popen(
        [sys.executable, "-m", "pdxfer", "demo", "--engine", "vllm", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": directory},
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arguments", ["", "--sidecar --model llama --decode-tp 1"], ids=["embedded", "sidecar"])
def test_a_run_hands_every_request_over_and_ends_with_nothing_left(directory, arguments):
    process = start(directory, "--json", *arguments.split())
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    found = json.loads(stdout)
    hand_offs = found["hand_offs"]
    assert found["ok"]
    assert [h["prompt_tokens"] for h in hand_offs] == [17, 384, 700, 1500]
    assert found["received"] == 4 * found["decode_tp"]
    assert found["offers"] == 4
    assert found["prefill_block_size"] != found["decode_block_size"]
    assert all(len(h["tokens"]) == 32 and h["nbytes"] > 0 and h["prefill_s"] > 0 for h in hand_offs)
    assert [h["nbytes"] for h in hand_offs] == sorted(h["nbytes"] for h in hand_offs), "longer prompts, more bytes"
    assert os.listdir(directory) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_leaves_no_process_and_no_file(directory, number, code):
    process = start(directory, "--model", "llama")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("both servers are starting"):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(number)
    process.communicate()
    assert process.returncode == code
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert os.listdir(directory) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--engine vllm --all", "--all is for --engine transformers"),
        ("--engine vllm --transport shm", "--transport is for --engine transformers"),
        ("--engine vllm --prompt-tokens 9", "--prompt-tokens is for --engine transformers"),
        ("--engine vllm --model falcon-h1", "no demo model 'falcon-h1' for vLLM"),
        ("--engine vllm --decode-tp 3", "can't be cut over decode_tp 3"),
        ("--engine vllm --python nowhere/python", "nowhere/python can't be run"),
        ("--python nowhere/python", "--python is for --engine vllm"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(arguments, words):
    with pytest.raises(MisuseError, match=words):
        CliRunner().invoke(demo, arguments.split(), catch_exceptions=False)


# -- judgement -------------------------------------------------------------------------------------------

HAND_OFF = HandOff(
    prompt_tokens=17,
    prefill_s=0.1,
    first_s=0.1,
    whole_s=0.3,
    alone_s=0.4,
    ranks=2,
    transfer_s=0.02,
    nbytes=1234,
    messages=2,
    tokens=(1, 2, 3),
    own_tokens=(1, 2, 3),
    sure=3,
    logprob_error=0.01,
)
OUTCOME = VllmOutcome(options=VllmOptions(decode_tp=2, steps=3), hand_offs=(HAND_OFF,) * 2, offers=2, total_s=60.0)


@pytest.mark.parametrize(
    ("change", "offers", "good", "words"),
    [
        ({}, 2, True, ["ok    moved   4 of 4", "ok    tokens  2 of 2", "2,468", "6 of 6"]),
        ({"tokens": (1, 2, 4)}, 2, False, ["ok    moved", "WRONG tokens  1 of 2", "5 of 6"]),
        ({"tokens": (1, 2, 4), "sure": 2}, 2, True, ["ok    tokens  2 of 2", "1 of them up to a near tie"]),
        ({"tokens": (4, 2, 3), "sure": 0}, 2, False, ["WRONG tokens"]),
        ({"ranks": 1}, 2, False, ["WRONG moved   3 of 4", "ok    tokens"]),
        ({}, 1, False, ["WRONG moved   4 of 4", "1 of 2 offers"]),
    ],
)
def test_anything_off_is_shown_and_judged(change, offers, good, words):
    found = replace(OUTCOME, hand_offs=(HAND_OFF, replace(HAND_OFF, **change)), offers=offers)
    assert found.ok == good
    assert found.to_json()["ok"] == good
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        print_vllm_outcome(console, found)
    text = console.export_text()
    for word in words:
        assert word in text


def test_without_requests_nothing_is_proved():
    assert not replace(OUTCOME, hand_offs=(), offers=0).ok
