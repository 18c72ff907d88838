"""``pdxfer plan``: its numbers against sums done by hand, its picture, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from pdxfer.cli.main import main
from pdxfer.cli.plan import plan
from pdxfer.cli.plan_report import parse_worker, plan_report
from pdxfer.errors import IncompatibleError, MisuseError
from pdxfer.models import load_config, spec_from_config
from pdxfer.testing.oracle import Oracle, random_memory
from pdxfer.testing.strategies import preset_spec


def run(*args: str) -> str:
    result = CliRunner().invoke(plan, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def as_json(*args: str) -> dict:
    return json.loads(run(*args, "--json"))


def test_kimi_linear_on_one_host():
    """The issue's own example: MLA crosses once, an eighth from each source, and is relayed seven times."""
    data = as_json("kimi-linear-48b-a3b", "--from", "tp=8", "--to", "tp=8", "--tokens", "32768")
    shares = {c["component"]: c for c in data["components"]}
    for name, width in (("latent", 512), ("rope", 64)):
        unique = 32768 * 7 * width * 2
        share = shares[name]
        assert (share["unique_bytes"], share["network_bytes"], share["relayed_bytes"]) == (unique, unique, 7 * unique)
        assert share["network_to_unique"] == 1.0
        assert share["dedup_ratio"] == 8.0
        assert share["least_bytes_per_source"] == share["most_bytes_per_source"] == unique // 8
    assert shares["S"]["network_bytes"] == 20 * 32 * 128 * 128 * 4
    assert shares["S"]["dedup_ratio"] == 1.0
    assert data["schema_version"] == 1
    assert data["source"]["ranks"] == data["target"]["ranks"] == 8


def test_totals_are_the_sums_of_pairs():
    data = as_json("qwen3-next-80b-a3b", "--from", "tp=4,page=64", "--to", "tp=8,page=16,hosts=2", "--tokens", "5000")
    network = [p for p in data["pairs"] if not p["relay"]]
    assert sum(p["bytes"] for p in network) == data["totals"]["network_bytes"]
    assert sum(p["messages"] for p in network) == data["totals"]["network_messages"]
    assert all(p["bytes"] == sum(p["components"].values()) for p in data["pairs"])
    assert all(p["source"] // 4 == p["target"] // 4 for p in data["pairs"] if p["relay"])
    assert data["totals"]["naive_bytes"] == data["totals"]["network_bytes"] + data["totals"]["relayed_bytes"]
    without = as_json(
        "qwen3-next-80b-a3b", "--from", "tp=4", "--to", "tp=8,hosts=2", "--tokens", "5000", "--no-fan-out"
    )
    assert without["totals"]["network_bytes"] == data["totals"]["naive_bytes"]
    assert without["totals"]["relayed_bytes"] == 0
    assert without["digest"] != data["digest"]


def test_the_digest_is_the_plan_s_and_stable():
    args = ("falcon-h1-7b", "--from", "tp=4", "--to", "tp=6", "--tokens", "100")
    assert as_json(*args)["digest"] == as_json(*args)["digest"]
    assert as_json(*args)["digest"] in run(*args)


def test_a_prefix_is_not_sent():
    part, whole = (
        as_json("llama-3.1-8b", "--from", "tp=2", "--to", "tp=4", "--tokens", "1000", "--first-token", first)["totals"]
        for first in ("900", "0")
    )
    assert part["network_bytes"] * 10 == whole["network_bytes"]
    nothing = as_json("llama-3.1-8b", "--tokens", "1000", "--first-token", "1000")["totals"]
    assert (nothing["network_bytes"], nothing["dedup_ratio"]) == (0, 1.0)


def test_the_picture():
    out = run("qwen3-next-80b-a3b", "--from", "tp=4", "--to", "tp=2,pp=12+36", "--tokens", "4096")
    lines = out.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("bytes over the network"))
    assert lines[top + 1].split() == ["0", "1", "2", "3"]
    grid = [line.split() for line in lines[top + 2 : top + 6]]
    assert [row[0] for row in grid] == ["0", "1", "2", "3"]
    assert [[cell == "·" for cell in row[1:]] for row in grid] == [[False, True] * 2] * 2 + [[True, False] * 2] * 2
    assert grid[0][3] == "█"
    assert grid[0][1] in "░▒▓"
    assert "nothing" in lines[top + 6]
    assert "relays inside" not in out
    relays = run("qwen3-next-80b-a3b", "--from", "tp=1", "--to", "tp=4", "--tokens", "4096")
    assert "relays inside target hosts" in relays
    assert "target 0 -> target 1, relay" in relays


def test_many_pairs_are_cut_short():
    args = ("kimi-linear-48b-a3b", "--from", "tp=8", "--to", "tp=8", "--tokens", "100")
    assert "and 32 more pairs" in run(*args)
    assert "more pairs" not in run(*args, "--pairs", "0")


def test_an_idle_source_is_shown():
    """One target rank that needs rank 0's copy only: the others still get a reader that completes them."""
    out = run("llama-3.1-8b", "--from", "tp=16", "--to", "tp=1", "--tokens", "1")
    assert "nothing: only completes" in out


@pytest.mark.parametrize(
    ("text", "says", "hint"),
    [
        ("tp=4,pgae=64", "no 'pgae'", "did you mean page"),
        ("tp=four", "tp=four is no whole number", "tensor-parallel"),
        ("page=99999999999", "page=99999999999 is no whole number from 0 to 999999999", "tokens per page"),
        ("tp", "'tp' is not key=value", "tp=4"),
        ("tp=2,tp=4", "'tp' is given twice", ""),
        ("pp=30+34", r"stages \(30, 34\) hold 64 layers, the model has 48", ""),
        ("pp=99", "pp=99 stages can't share 48 layers", ""),
        ("order=dhn", "order=dhn is unknown", "nhd, hnd"),
        ("kv_dtype=int3", "kv_dtype=int3 is unknown", "bfloat16"),
        ("placement=flat", "placement 'flat' is unknown", ""),
        ("tp=3", "can't be sharded over 3 ranks", "override"),
        ("tp=4,hosts=3", "4 ranks can't be spread evenly over hosts=3", ""),
        ("tp=4,hosts=2,ranks_per_host=2", "say the same thing", ""),
        ("tp=0", "must be at least", ""),
        ("page=0", "must be at least", ""),
        ("tp=100000", "makes 100000 ranks", ""),
    ],
)
def test_workers_that_are_refused(text, says, hint):
    spec = spec_from_config(load_config("qwen3-next-80b-a3b"))
    with pytest.raises(MisuseError, match=says) as caught:
        parse_worker(text, spec, 1000)
    assert hint in caught.value.hint


def test_every_key_reaches_the_layout():
    spec = spec_from_config(load_config("qwen3-next-80b-a3b"))
    plain = parse_worker("tp=2", spec, 1000)
    alone = (
        "tp=4", "pp=2", "cp=2", "cp=2,interleave=4", "page=32", "placement=unified", "order=hnd", "packed=yes",
        "conv=tc", "state=vk", "kv_dtype=float8_e4m3fn", "conv_dtype=float16", "state_dtype=bfloat16",
        "accepts=float32+bfloat16", "before=1", "spec=3", "hosts=2", "ranks_per_host=1,page=8",
    )  # fmt: skip
    texts = [text if text == "tp=4" else f"tp=2,{text}" for text in alone]
    digests = {parse_worker(text, spec, 1000).digest for text in texts}
    assert len(digests | {plain.digest}) == len(texts) + 1
    assert parse_worker("tp=2,hosts=2", spec, 1000).digest == parse_worker("tp=2,ranks_per_host=1", spec, 1000).digest


@pytest.mark.parametrize(
    "text", ["tp=2,page=4", "cp=2,interleave=4,page=4", "placement=unified,page=4", "pp=2,page=64"]
)
@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "gemma-3-27b", "kimi-linear-48b-a3b", "glm-5.3-flash"])
def test_the_pages_hold_the_request(name, text):
    """The oracle finds room for the tokens that the layout was made for."""
    spec = preset_spec(name)
    layout = parse_worker(text, spec, 61)
    oracle = Oracle.of(layout, tokens=61)
    oracle.put(random_memory(layout, 61, np.random.default_rng(0)))


def test_a_pair_that_does_not_fit_is_refused():
    spec = spec_from_config(load_config("qwen3-next-80b-a3b"))
    source, target = (parse_worker(text, spec, 100) for text in ("state_dtype=float32", "state_dtype=bfloat16"))
    with pytest.raises(IncompatibleError, match="S: dtype"):
        plan_report(source, target, tokens=100)


@pytest.mark.parametrize(
    ("argv", "code", "says"),
    [
        (["plan", "no-such-model"], 2, "neither a preset nor a file"),
        (["plan", "x" * 5000], 2, "can't read"),
        (["plan", "/no/such/config.json"], 2, "there is no file /no/such/config.json"),
        (["size", "pdxfer/presets"], 2, "there is no file pdxfer/presets/config.json"),
        (["size", "qwen3-next-80b-a3b", "--gpu-memory", ""], 2, "'' is not a size"),
        (["size", "qwen3-next-80b-a3b", "--weights", "1GiB"], 2, "--gpu-memory must be more than 0"),
        (["plan", "qwen3-next-80b-a3b", "--to", "kv_dtype=float16"], 1, "only S is converted"),
        (["plan", "qwen3-next-80b-a3b", "--tokens", str(1 << 30)], 2, "--tokens"),
        (["size", "qwen3-next-80b-a3b", "--concurrency", "9" * 400], 2, "--concurrency"),
        (["plan", "qwen3-next-80b-a3b", "--to", "tpp=2"], 2, "did you mean tp"),
        (["plan", "qwen3-next-80b-a3b", "--to", "state_dtype=float16"], 1, "S: dtype"),
        (["plan", "qwen3-next-80b-a3b", "--tokens", "5", "--first-token", "6"], 2, "beyond --tokens"),
        (["plan", "qwen3-next-80b-a3b", "--chunk", "1KiB"], 2, "too small"),
        (["plan", "qwen3-next-80b-a3b", "--tokens", "0"], 2, "Invalid value"),
    ],
)
def test_exit_codes(argv, code, says, capsys):
    assert main(argv) == code
    assert says in capsys.readouterr().err


def test_a_config_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(load_config("llama-3.1-8b")))
    mine, preset = (as_json(str(p), "--tokens", "10")["digest"] for p in (path, "llama-3.1-8b"))
    assert mine == preset


def test_the_planner_runs_without_torch():
    code = "import sys; from pdxfer.cli.main import main; main(); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "llama-3.1-8b", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["network_bytes"] == 32768 * 32 * 2 * 8 * 128 * 2
    assert not {"torch", "grpc", "rich"} & set(done.stderr.split())
