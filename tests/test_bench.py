"""The benches at tiny sizes: what they count must be right, and their JSON whole. No time is looked at."""

from __future__ import annotations

import csv
import io
import json

import pytest
from click.testing import CliRunner

from pdxfer.bench import measure
from pdxfer.bench.cli import bench
from pdxfer.bench.plan import PlanOptions, _layouts
from pdxfer.bench.vllm import _ratios
from pdxfer.builders import PLACEMENTS
from pdxfer.errors import MisuseError
from pdxfer.models import load_config, spec_from_config


def run(*argv: str) -> dict:
    done = CliRunner().invoke(bench, [*argv, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["schema_version"] == measure.SCHEMA_VERSION
    assert report["bench"] == argv[0]
    assert isinstance(report["command_line"], list)
    facts = report["machine"]
    assert facts["cores"] >= 1
    assert facts["memory_bytes"] > 1 << 20
    assert {"cpu", "system", "copy_kernel", "load_average", "load_average_after", "versions"} <= set(facts)
    assert {"python", "numpy", "xxhash"} <= set(facts["versions"])
    return report["results"]


def shown(*argv: str) -> str:
    done = CliRunner().invoke(bench, argv, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


PLAN = ("plan", "--layers", "8", "--ranks", "4", "--tokens", "100", "--repeats", "2", "--megabytes", "1")


def test_plan_counts() -> None:
    results = run(*PLAN)
    assert [row["placement"] for row in results["placements"]] == list(PLACEMENTS)
    for row in results["placements"]:
        counts = row["counts"]
        assert counts["items"] >= counts["edges"] >= 4
        assert counts["rank_edges"] >= 1
        assert counts["rank_segments"] >= counts["rank_chunks"] >= counts["rank_edges"]
        # Two layers of attention with one of two KV heads of 256 in K and V, six of linear attention in fp32.
        kv = 2 * 100 * 2 * 256 * 2
        state = 6 * (8 * 128 * 128 * 4 + (2 * 4 * 128 + 8 * 128) * 3 * 2)
        assert counts["rank_payload_bytes"] == kv + state
        for part in ("layout_digests", "plan", "plan_digest", "cold", "request"):
            assert 0 < row[part]["min_ms"] <= row[part]["p50_ms"] <= row[part]["p90_ms"] <= row[part]["p99_ms"]
        assert row["cold"]["p50_ms"] >= row["plan"]["p50_ms"]
    assert results["contiguous_copy"]["nbytes"] == 1 << 20
    grown = {what: [row for row in results["rows"] if row["growth"] == what] for what in ("ranks", "layers", "tokens")}
    assert [row["ranks"] for row in grown["ranks"]] == [1, 2, 4]
    assert [row["layers"] for row in grown["layers"]] == [4, 8]
    assert [row["tokens"] for row in grown["tokens"]] == [25, 100, 400]
    assert [row["rank_payload_bytes"] for row in grown["tokens"]] == [kv * n // 100 + state for n in (25, 100, 400)]


def test_plan_table_and_csv() -> None:
    rows = list(csv.DictReader(io.StringIO(shown(*PLAN, "--csv"))))
    assert {(row["schema_version"], row["bench"]) for row in rows} == {(str(measure.SCHEMA_VERSION), "plan")}
    assert [row["growth"] for row in rows].count("ranks") == 3
    text = shown(*PLAN)
    assert all(placement in text for placement in PLACEMENTS)
    assert "contiguous copy of 1 MB" in text


@pytest.mark.parametrize(
    ("values", "q", "expected"), [([3.0], 0.9, 3.0), ([4.0, 2.0], 0.5, 3.0), ([1.0, 2.0, 3.0, 4.0, 5.0], 0.9, 4.6)]
)
def test_quantiles(values: list[float], q: float, expected: float) -> None:
    assert measure.quantile(values, q) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--connector", "lmcache"], "'lmcache' is unknown; there are pdxfer, nixl"),
        (["--model", "gpt2"], "'gpt2' is unknown"),
        (["--prompt-tokens", "1"], "2 to 1900"),
        (["--prompt-tokens", "many"], "whole numbers"),
        (["--python", "/nowhere/python"], "can't be run"),
    ],
)
def test_vllm_bench_refuses_before_it_starts_a_server(options: list[str], says: str) -> None:
    with pytest.raises(MisuseError, match=says):
        CliRunner().invoke(bench, ["vllm", *options], catch_exceptions=False)


def test_ratios_of_two_connectors_are_taken_prompt_by_prompt_where_both_ran() -> None:
    def found(connector: str, lengths: tuple[int, ...], *all_: float) -> dict:
        times = {key: {"all": list(all_)} for key in ("prefill_ms", "decode_ms", "transfer_ms", "own_ms")}
        return {"connector": connector, "rows": [{"prompt_tokens": n, **times} for n in lengths]}

    ours, nixl = found("pdxfer", (8, 16), 1.0, 2.0, 4.0), found("nixl", (16, 32), 3.0, 2.0, 8.0)
    (ratio,) = _ratios([ours, nixl])
    assert ratio["prompt_tokens"] == 16
    assert ratio["decode_ms"] == {"p10": pytest.approx(1.2), "p50": 2.0, "p90": pytest.approx(2.8)}
    assert _ratios([ours]) == []


def test_no_two_layouts_are_alike_so_that_every_plan_is_cold() -> None:
    options = PlanOptions(layers=4, ranks=1)
    spec = spec_from_config({**load_config("qwen3-next-80b-a3b"), "num_hidden_layers": 4})
    digests = [layout.digest for _ in range(3) for layout in _layouts(spec, options, "per_layer")]
    assert len(set(digests)) == len(digests)
