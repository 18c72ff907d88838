"""``pdxfer demo``: whole runs as a user starts them, the judgement that ends them, and what is left after a failure."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from multiprocessing import Pipe

import numpy as np
import psutil
import pytest
from click.testing import CliRunner
from rich.console import Console

from pdxfer.cli import demo as command
from pdxfer.cli.demo_report import print_outcome, print_summary
from pdxfer.demo import outcome
from pdxfer.demo.outcome import Held, Kind, Outcome, Round
from pdxfer.demo.run import Options
from pdxfer.demo.worker import Link, array_from, array_to
from pdxfer.errors import CorruptError, DeadlineError, MisuseError, PdxferError, PeerError
from pdxfer.spec import Axis, CacheSpec, Component, Growth, Ownership, Rule
from tests.conftest import require

require("torch")
require("transformers")


@pytest.fixture
def directory():
    """A short one: Unix sockets lie below it."""
    path = tempfile.mkdtemp(prefix="d-")
    yield path
    shutil.rmtree(path)


def start(directory: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pdxfer", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": directory},
    )


def left_behind(directory: str) -> list[str]:
    """What lies there and is ours; torch keeps a folder of its own."""
    return [name for name in os.listdir(directory) if not name.startswith("torch")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "prefill_tp", "decode_tp", "transport", "more"),
    [("kimi-linear", 2, 4, "shm", ""), ("qwen3-next", 3, 2, "tcp", ""), ("qwen3-next", 1, 2, "shm", " --sidecar")],
)
def test_a_run_moves_every_byte_and_ends_with_nothing_left(directory, model, prefill_tp, decode_tp, transport, more):
    arguments = (
        f"--json --model {model} --prefill-tp {prefill_tp} --decode-tp {decode_tp} --transport {transport}{more}"
    )
    process = start(directory, *arguments.split(), "--prompt-tokens", "77")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    found = json.loads(stdout)
    assert found["ok"]
    assert found["wrong_bytes"] == 0
    assert found["logit_error"] < 1e-5
    assert found["tokens"] == found["reference_tokens"]
    assert len(found["tokens"]) == 9
    assert found["transport"] == transport
    moved = {kind["name"]: kind["moved_bytes"] / kind["unique_bytes"] for kind in found["kinds"]}
    assert set(moved.values()) == {1.0}, "every byte crosses once"
    assert found["compared_bytes"] == 2 * sum(kind["held_bytes"] for kind in found["kinds"])
    assert all(0 < r["transfer_s"] < found["total_s"] for r in found["rounds"])
    if model == "kimi-linear":
        dedup = {kind["name"]: kind["dedup"] for kind in found["kinds"]}
        assert dedup == {"S": 1.0, "Conv": 1.0, "MLA": 4.0}, "each of four ranks has the latent; it crossed once"
    assert left_behind(directory) == []


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_run_with_its_name_and_leaves_nothing(directory):
    process = start(directory, "--model", "nemotron-h", "--prompt-tokens", "77")
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("prefill"):
            break
    family = psutil.Process(process.pid).children(recursive=True)
    ranks = [p for p in family if p.parent().pid != process.pid]  # children of the fork server
    assert len(ranks) == 7
    ranks[0].kill()
    stdout, stderr = process.communicate()
    assert process.returncode == PeerError.exit_code, stderr
    assert stdout == ""
    assert "(exit code -9)" in stderr
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    assert left_behind(directory) == []


def test_impossible_options_are_refused_before_anything_starts():
    with pytest.raises(MisuseError, match="qwen3-next can't be cut over TP sizes"):
        Options(prefill_tp=8, decode_tp=3)
    with pytest.raises(MisuseError, match="no demo model"):
        Options(model="llama")
    with pytest.raises(MisuseError, match="steps must be at least 1"):
        Options(steps=0)
    process = subprocess.run(
        [sys.executable, "-m", "pdxfer", "demo", "--decode-tp", "5"], capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert "can't be cut" in process.stderr
    assert "{1, 2, 4, 8}" in process.stderr


# -- judgement -------------------------------------------------------------------------------------------


def held(starts, stops, values, component="S", layer=0):
    bits = np.asarray(values, dtype=np.int32).reshape(1, *(b - a for a, b in zip(starts, stops, strict=True)))
    return Held(component=component, layer=layer, starts=starts, stops=stops, bits=bits)


SOURCE = [held((0, 0), (2, 2), [1, 2, 3, 4]), held((2, 0), (4, 2), [5, 6, 7, 8])]


def test_states_are_equal_across_cuts():
    target = [held((0, 0), (3, 2), [1, 2, 3, 4, 5, 6]), held((3, 0), (4, 2), [7, 8])]
    assert outcome.compare_states(SOURCE, target) == (32, 0, ())


def test_one_wrong_element_is_found_and_named():
    target = [held((0, 0), (3, 2), [1, 2, 3, 4, 5, 6]), held((3, 0), (4, 2), [7, 9])]
    assert outcome.compare_states(SOURCE, target) == (32, 4, ("S of layer 0",))


def test_elements_that_no_source_holds_are_wrong():
    assert outcome.compare_states(SOURCE, [held((3, 0), (5, 2), [7, 8, 0, 0])]) == (16, 8, ("S of layer 0",))
    assert outcome.compare_states(SOURCE, [held((0, 0), (1, 1), [1], layer=1)]) == (4, 4, ("S of layer 1",))
    narrow = replace(held((0, 0), (1, 1), [1]), bits=np.ones((1, 1, 1), np.int16))
    assert outcome.compare_states(SOURCE, [narrow])[1] == 2


def test_replicas_may_each_have_given_a_part():
    source = [held((0,), (2,), [1, 2]), held((0,), (2,), [1, 3])]
    assert outcome.compare_states(source, [held((0,), (2,), [1, 3])])[1] == 0
    assert outcome.compare_states(source, [held((0,), (2,), [1, 4])])[1] == 4


def spec():
    heads = Ownership(rule=Rule.SHARDED, axis="heads", units=4)
    everywhere = Ownership(rule=Rule.REPLICATED)
    axes = (Axis(name="heads", extent=4), Axis(name="K", extent=2))
    state = Component(name="S", layers=(0, 2), axes=axes, dtype="float32", growth=Growth.PER_REQUEST, ownership=heads)
    latent = Component(
        name="latent",
        layers=(1,),
        axes=(Axis(name="dim", extent=3),),
        dtype="bfloat16",
        growth=Growth.PER_TOKEN,
        ownership=everywhere,
    )
    return CacheSpec(model="m", num_layers=3, query_heads=4, components=(state, latent))


def edge(*, relay, component_bytes, carried):
    return {"relay": relay, "component_bytes": component_bytes, "carried": carried, "seconds": {"move": 0.5, "pack": 1}}


def test_kinds_count_bytes_by_their_way():
    edges = [
        edge(relay=False, component_bytes={"S": 64, "latent": 60}, carried=[["S", "latent"], ["latent"]]),
        edge(relay=True, component_bytes={"latent": 60}, carried=[["latent"]]),
    ]
    rows = np.zeros((10, 3), np.int16)
    target = [Held(component="latent", layer=1, starts=(0,), stops=(3,), bits=rows) for _ in range(2)]
    found = outcome.kinds(spec(), 10, {"S": 4, "latent": 2}, target, edges)
    assert found == (
        Kind(name="S", unique_bytes=64, moved_bytes=64, messages=1),
        Kind(name="MLA", unique_bytes=60, held_bytes=120, moved_bytes=60, relayed_bytes=60, messages=2),
    )
    assert [kind.dedup for kind in found] == [0.0, 2.0]


def test_times_are_of_the_slowest_rank():
    one = {"seconds": {"plan": 3, "total": 4}, "edges": [edge(relay=False, component_bytes={}, carried=[])] * 2}
    other = {"seconds": {"plan": 1, "total": 5}, "edges": []}
    found = outcome.timing([one, other])
    assert found.transfer_s == 5
    assert found.stages == {"negotiate": 0, "plan": 3, "pack": 2, "move": 1.0, "unpack": 0, "verify": 0}


GOOD = Outcome(
    model="m",
    prefill_tp=4,
    decode_tp=2,
    prompt_tokens=1000,
    prefill_page_tokens=16,
    decode_page_tokens=10,
    transport="shm",
    mode="direct",
    compared_bytes=10,
    wrong_bytes=0,
    wrong_where=(),
    logit_error=1e-6,
    tokens=(1, 2),
    reference_tokens=(1, 2),
    kinds=(Kind(name="S", unique_bytes=10, held_bytes=20, moved_bytes=10, messages=1),),
    messages=1,
    rounds=tuple(Round(transfer_s=0.1, stages=dict.fromkeys(outcome.STAGES, 0.01)) for _ in range(2)),
    prefill_s=1.0,
    total_s=2.0,
    copy_bytes_per_s=1e9,
)


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        ({}, 0, ["ok    state", "ok    logits", "ok    tokens", "2 of 2"]),
        ({"wrong_bytes": 4, "wrong_where": ("S of layer 0",)}, CorruptError.exit_code, ["WRONG state", "S of layer 0"]),
        ({"compared_bytes": 0}, CorruptError.exit_code, ["WRONG state"]),
        ({"logit_error": 1e-5}, 1, ["WRONG logits"]),
        ({"logit_error": float("inf")}, 1, ["WRONG logits"]),
        ({"tokens": (1, 3)}, 1, ["WRONG tokens", "1 of 2"]),
    ],
)
def test_anything_off_is_shown_and_decides_the_exit_code(change, code, words):
    found = replace(GOOD, **change)
    assert command._exit_code([GOOD, found]) == code
    assert found.to_json()["ok"] == (code == 0)
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        print_outcome(console, found)
        print_summary(console, [GOOD, found])
    text = console.export_text()
    for word in words:
        assert word in text
    assert f"{2 if code == 0 else 1} of 2 runs" in text


def test_a_narrow_terminal_folds_numbers_and_cuts_none():
    console = Console(width=44, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        print_outcome(console, GOOD)
        print_summary(console, [GOOD])
    assert "…" not in console.export_text()


def test_all_leaves_nothing_to_choose():
    with pytest.raises(MisuseError, match="--decode-tp can't be chosen"):
        CliRunner().invoke(command.demo, ["--all", "--decode-tp", "2"], catch_exceptions=False)


def test_logits_that_are_not_numbers_are_wrong():
    from pdxfer.demo.run import _greatest_error

    reference = np.zeros((3, 4), np.float32)
    rest = reference[1:].copy()
    assert _greatest_error(reference, [reference[0]], [rest]) == 0
    rest[1, 2] = np.nan
    assert _greatest_error(reference, [reference[0]], [rest, reference[1:]]) == float("inf")


# -- links -----------------------------------------------------------------------------------------------


@pytest.fixture
def links():
    ends = Pipe()
    yield tuple(Link(end) for end in ends)
    for end in ends:
        end.close()


def test_links_carry_events_and_arrays(links):
    left, right = links
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    left.send("state", bits=array_to(array), n=3)
    values = right.receive("state", 1.0)
    assert values["n"] == 3
    assert np.array_equal(array_from(values["bits"]), array)


def test_links_pass_errors_on_as_what_they_are(links):
    left, right = links
    left.send("error", reason="CORRUPT", message="rank 1: S: bad", hint="again", exit_code=4)
    with pytest.raises(PdxferError, match="rank 1: S: bad") as caught:
        right.receive("state", 1.0)
    assert (caught.value.reason, caught.value.hint, caught.value.exit_code) == ("CORRUPT", "again", 4)


def test_links_say_who_is_silent_gone_or_out_of_turn(links):
    left, right = links
    with pytest.raises(DeadlineError, match="no 'state' came"):
        right.receive("state", 0.0)
    left.send("offered")
    with pytest.raises(PeerError, match="'offered' where 'state'"):
        right.receive("state", 1.0)
    left.connection.close()
    with pytest.raises(PeerError, match="ended before it said 'state'"):
        right.receive("state", 1.0)
    with pytest.raises(PeerError, match="could not say"):
        right.send("end")
