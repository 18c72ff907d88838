"""Sizes against published figures, brute force and invariants; and ``pdxfer size`` through click's runner.

Page sizes and crossovers are those of vLLM's allocator and of the model pages, computed here by no code under test.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from pdxfer.cli.main import main
from pdxfer.cli.size import size
from pdxfer.errors import MisuseError
from pdxfer.models import load_config, preset_names, spec_from_config
from pdxfer.sizing import (
    Assumptions,
    Crossover,
    crossover,
    memory_ledger,
    page_report,
    parse_bytes,
    parse_dtype,
    size_report,
    unify_pages,
)
from pdxfer.spec import DTYPE_BYTES, CacheSpec, Growth, Rule

GIB = 1 << 30
REFUSED = ("deepseek-v4-flash", "deepseek-v4-pro", "qwen3.8-flash-next")
SPECS = {name: spec_from_config(load_config(name)) for name in preset_names() if name not in REFUSED}
HYBRIDS = [n for n in SPECS if load_config(n)["_fixture"]["expect"].get("per_layer_crossover_tokens")]
TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
QWEN, KIMI = SPECS["qwen3-next-80b-a3b"], SPECS["kimi-linear-48b-a3b"]


# ---------------------------------------------------------------- crossover


@pytest.mark.parametrize(
    ("spec", "dtype", "layer_tokens", "model_tokens"),
    [
        (QWEN, "bfloat16", 536, 1608),
        (KIMI, "bfloat16", 975, 2784),
        (QWEN, "float32", 1048, 3144),
        (KIMI, "float32", 1885, 5385),
    ],
    ids=["qwen-16", "kimi-16", "qwen-32", "kimi-32"],
)
def test_crossover_is_the_published_one(spec: CacheSpec, dtype: str, layer_tokens: int, model_tokens: int) -> None:
    found = crossover(spec, Assumptions(state_dtype=dtype))
    assert found == Crossover(state_dtype=dtype, layer_tokens=layer_tokens, model_tokens=model_tokens)


@pytest.mark.parametrize("name", HYBRIDS)
def test_crossover_of_every_hybrid_preset_is_the_fixtures(name: str) -> None:
    expect = load_config(name)["_fixture"]["expect"]["per_layer_crossover_tokens"]
    for dtype, key in (("bfloat16", "S_16bit"), ("float32", "S_32bit")):
        found = crossover(SPECS[name], Assumptions(state_dtype=dtype))
        assert found is not None
        assert found.layer_tokens == math.ceil(expect[key])


def test_crossover_depends_on_tp_kv_dtype_and_draft_tokens() -> None:
    # At TP 8 each rank holds a whole KV head (of 2) but an eighth of the state: 137,216 B against 1,024 B per token.
    assert crossover(QWEN, Assumptions(tp=8, state_dtype="bf16")).layer_tokens == 134
    assert crossover(QWEN, Assumptions(kv_dtype="fp8", state_dtype="bf16")).layer_tokens == 1072
    # One draft token: S twice, convolution 4 rows for 3: (2 * 1,048,576 + 65,536) / 2,048.
    assert crossover(QWEN, Assumptions(spec_tokens=1, state_dtype="bf16")).layer_tokens == 1056


@pytest.mark.parametrize("name", ["qwen3-8b", "deepseek-v3", "plamo-2-1b", "gemma-3-27b"])
def test_no_crossover_where_one_kind_of_cache_is_missing(name: str) -> None:
    assert crossover(SPECS[name], Assumptions()) is None


# ---------------------------------------------------------------- unified pages


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen3-next-80b-a3b", (1056, 1056, 528, 272)),
        ("qwen3.5-397b-a17b", (2096, 2096, 1056, 528)),
        ("kimi-linear-48b-a3b", (1920, 1024, 512, 256)),
    ],
)
def test_unified_pages_are_the_allocators(name: str, tokens: tuple[int, ...]) -> None:
    found = [page_report(SPECS[name], Assumptions(tp=tp, state_dtype="float32")) for tp in (1, 2, 4, 8)]
    assert tuple(p.page_tokens for p in found) == tokens
    assert all(p.page_bytes == max(p.attention_page_bytes, p.state_page_bytes) for p in found)


def test_page_alignment_is_the_callers_when_given() -> None:
    assert page_report(KIMI, Assumptions(), 64).page_tokens == 1920
    assert page_report(KIMI, Assumptions(), 16).page_tokens == 1888
    assert page_report(QWEN, Assumptions(), 256).page_tokens == 1280
    assert page_report(SPECS["qwen3-8b"], Assumptions()) is None
    assert page_report(SPECS["plamo-2-1b"], Assumptions()).attention_bytes_per_token == 512


def test_draft_tokens_widen_the_state_page_by_convolution_rows_only() -> None:
    plain, drafting = (page_report(QWEN, Assumptions(spec_tokens=n)) for n in (0, 3))
    assert drafting.state_page_bytes - plain.state_page_bytes == 49_152


@given(st.integers(1, 5000), st.integers(0, 10**7), st.integers(1, 256))
def test_unified_page_is_the_least_that_covers_the_state(row: int, state: int, step: int) -> None:
    tokens = step
    while tokens * row < state:
        tokens += step
        if tokens > 40 * step:  # the loop is the definition; long ones say nothing new
            return
    found = unify_pages(row, state, step)
    assert (found.page_tokens, found.page_bytes) == (tokens, tokens * row)
    assert (found.attention_padding_bytes, found.state_padding_bytes) == (0, tokens * row - state)


# ---------------------------------------------------------------- bytes


@pytest.mark.parametrize(
    ("name", "kv", "conv", "state"),
    [
        ("qwen3-next-80b-a3b", 24_576, 1_769_472, 75_497_472),
        ("kimi-k3", 27_648, 15_261_696, 434_110_464),
        ("nemotron-3-ultra-550b-a55b", 12_288, 5_308_416, 402_653_184),
        ("llama-3.1-405b", 516_096, 0, 0),
    ],
)
def test_bytes_are_the_model_pages_figures(name: str, kv: int, conv: int, state: int) -> None:
    report = size_report(SPECS[name], Assumptions(), tokens=1000)
    assert report.total("bytes_per_token") == kv
    held = {c.name: c.bytes_per_request for c in report.components}
    assert sum(v for k, v in held.items() if k.startswith("conv.")) == conv
    assert held.get("S", 0) == state
    assert report.total("bytes_per_request") == kv * 1000 + conv + state


def test_windows_stop_growing_and_pooled_rows_count_by_their_fraction() -> None:
    oss = {c.name: c for c in size_report(SPECS["gpt-oss-20b"], Assumptions(), tokens=1000).components}
    assert (oss["window.k"].bytes_per_token, oss["window.k"].bytes_per_request) == (0, 12 * 8 * 64 * 2 * 128)
    short = {c.name: c for c in size_report(SPECS["gpt-oss-20b"], Assumptions(), tokens=10).components}
    assert short["window.k"].bytes_per_request == 12 * 8 * 64 * 2 * 10
    glm = {c.name: c for c in size_report(SPECS["glm-5.3-flash"], Assumptions(), tokens=10).components}
    assert (glm["index_k"].bytes_per_token, glm["index_k"].bytes_per_request) == (11 * 256 / 4, 11 * 256 * 3)


@settings(deadline=None)
@given(st.sampled_from(sorted(SPECS)), st.sampled_from(TP_SIZES), st.integers(1, 10**6))
def test_ranks_hold_all_of_it_and_share_what_is_sharded(name: str, tp: int, tokens: int) -> None:
    spec = SPECS[name]
    if spec.why_not_tp(tp):
        with pytest.raises(MisuseError, match=f"TP {tp}"):
            size_report(spec, Assumptions(tp=tp), tokens=tokens)
        return
    for component, found in zip(
        spec.components, size_report(spec, Assumptions(tp=tp), tokens=tokens).components, strict=True
    ):
        rule, units = component.ownership.rule, component.ownership.units
        cuts = {Rule.SHARDED: tp, Rule.REPLICATED: 1, Rule.EXTENDED: min(tp, units)}[rule]
        assert found.rank_bytes_per_request * cuts == found.bytes_per_request
        assert found.rank_bytes_per_token * cuts == found.bytes_per_token
        assert found.rank_resident_bytes_per_request == found.rank_bytes_per_request
        rows = {Growth.PER_REQUEST: 1, Growth.PER_WINDOW: min(tokens, component.window)}
        per_layer = component.row_elems * rows.get(component.growth, -(-tokens // component.tokens_per_row))
        assert found.bytes_per_request == per_layer * len(component.layers) * DTYPE_BYTES[component.dtype]


def test_dtypes_apply_to_their_own_components() -> None:
    report = size_report(QWEN, Assumptions(kv_dtype="fp8", conv_dtype="fp32", state_dtype="bf16"), tokens=1)
    dtypes = {c.name: c.dtype for c in report.components}
    assert (dtypes["kv.k"], dtypes["conv.v"], dtypes["S"]) == ("float8_e4m3fn", "float32", "bfloat16")
    with pytest.raises(MisuseError, match="fp3"):
        Assumptions(kv_dtype="fp3")


def test_draft_tokens_are_resident_but_not_moved() -> None:
    plain, drafting = (size_report(QWEN, Assumptions(spec_tokens=n), tokens=64) for n in (0, 2))
    assert plain.total("bytes_per_request") == drafting.total("bytes_per_request")
    extra = drafting.total("rank_resident_bytes_per_request") - plain.total("rank_resident_bytes_per_request")
    assert extra == 2 * 75_497_472 + 1_769_472 // 3 * 2


# ---------------------------------------------------------------- memory


def ledger(spec: CacheSpec, **changes):
    given_ = {"gpu_bytes": 80 * GIB, "weights_bytes": 20 * GIB, "overhead_bytes": 2 * GIB, "max_num_seqs": 64}
    assumptions = changes.pop("assumptions", Assumptions())
    return memory_ledger(spec, assumptions, **{**given_, "tokens_per_request": 32768, **changes})


def test_ledger_adds_up_and_the_tokens_are_the_most_that_fit() -> None:
    found = ledger(QWEN)
    assert found.state_bytes == 64 * (75_497_472 + 1_769_472)
    parts = found.weights_bytes + found.overhead_bytes + found.state_bytes + found.window_bytes + found.free_bytes
    assert parts == found.gpu_bytes
    assert found.tokens * 24_576 <= found.free_bytes < (found.tokens + 1) * 24_576
    assert found.requests == 64
    request = 32768 * 24_576 + 75_497_472 + 1_769_472
    assert found.requests_max * request <= 58 * GIB < (found.requests_max + 1) * request
    assert ledger(QWEN, tokens_per_request=262_144).requests == found.free_bytes // (262_144 * 24_576)


def test_ledger_of_one_rank_shrinks_with_tp_as_far_as_heads_go() -> None:
    one, eight = ledger(QWEN), ledger(QWEN, assumptions=Assumptions(tp=8))
    assert eight.state_bytes * 8 == one.state_bytes
    assert eight.tokens == eight.free_bytes // 12_288


def test_ledger_counts_windows_as_reserved_and_pure_state_as_boundless() -> None:
    gemma = ledger(SPECS["gemma-3-27b"], max_num_seqs=8)
    assert (gemma.state_bytes, gemma.window_bytes) == (0, 8 * 52 * 16 * 128 * 2 * 2 * 1024)
    mamba = {
        "model_type": "mamba",
        "num_hidden_layers": 4,
        "hidden_size": 64,
        "expand": 2,
        "state_size": 16,
        "conv_kernel": 4,
    }
    found = ledger(spec_from_config(mamba))
    assert (found.tokens, found.requests) == (None, 64)


def test_ledger_where_nothing_fits_says_so() -> None:
    found = ledger(QWEN, weights_bytes=79 * GIB)
    assert found.free_bytes < 0
    assert (found.tokens, found.requests, found.requests_max) == (0, 0, 0)
    for wrong in ({"max_num_seqs": 0}, {"gpu_bytes": -1}, {"tokens_per_request": 0}):
        with pytest.raises(MisuseError):
            ledger(QWEN, **wrong)


# ---------------------------------------------------------------- quantities


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 << 30),
        ("500MB", 500_000_000),
        ("1.5 gib", 3 << 29),
        ("17", 17),
        (" 2kB ", 2000),
        ("0", 0),
        ("1TiB", 1 << 40),
    ],
)
def test_sizes_are_read_in_both_kinds_of_units(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1GB", "4G", "nan", "1e9", "4GiB/s", "4 5", "9999999TiB", "٣GB", "1" * 99]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(MisuseError):
        parse_bytes(text)


def test_dtypes_have_short_names() -> None:
    assert [parse_dtype(t) for t in ("bf16", "fp8", "float32")] == ["bfloat16", "float8_e4m3fn", "float32"]


# ---------------------------------------------------------------- the command


def run_json(*arguments: str) -> dict:
    result = CliRunner().invoke(size, [*arguments, "--json"], catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(result.output)


def test_json_has_a_schema_version_and_every_part() -> None:
    model = ["qwen3-next-80b-a3b", "--tp", "2", "--tokens", "4096", "--concurrency", "16", "--state-dtype", "bf16"]
    memory = ["--gpu-memory", "80GiB", "--weights", "20GiB", "--overhead", "2GiB", "--max-num-seqs", "32"]
    found = run_json(*model, *memory, "--link-gbps", "400")
    assert (found["schema_version"], found["model"], found["tp"]) == (1, "qwen3-next-80b-a3b", 2)
    assert found["totals"]["bytes_per_token"] == 24_576
    assert found["totals"]["rank_bytes_per_token"] == 12_288
    assert found["totals"]["concurrent_bytes"] == 16 * found["totals"]["bytes_per_request"]
    assert [c["state_dtype"] for c in found["crossover"]] == ["bfloat16", "float32"]
    assert found["pages"]["page_tokens"] == 544  # 548,864 B of 16-bit state and convolution at 1,024 B per token
    assert found["memory"]["max_num_seqs"] == 32
    assert found["transfer"]["request_s"] == found["totals"]["bytes_per_request"] / 50e9


def test_json_crossovers_are_the_published_ones() -> None:
    for model, layer, whole in (("qwen3-next-80b-a3b", 536, 1608), ("kimi-linear-48b-a3b", 975, 2784)):
        first = run_json(model, "--state-dtype", "bfloat16")["crossover"][0]
        assert (first["layer_tokens"], first["model_tokens"]) == (layer, whole)


def test_a_config_file_reads_like_its_preset(tmp_path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(load_config("kimi-k3")))
    from_file, from_preset = run_json(str(path), "--tp", "3"), run_json("kimi-k3", "--tp", "3")
    assert from_file.pop("model") == str(path)
    assert from_preset.pop("model") == "kimi-k3"
    assert from_file == from_preset


@pytest.mark.parametrize("name", sorted(SPECS))
def test_the_tables_print_for_every_preset(name: str) -> None:
    arguments = [name, "--gpu-memory", "640GiB", "--spec-tokens", "1", "--link-gbps", "400", "--concurrency", "2"]
    result = CliRunner().invoke(size, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    assert all(c.name in result.output for c in SPECS[name].components)
    assert "memory of one GPU" in result.output
    assert "…" not in result.output


def test_weights_beyond_the_memory_are_said_to_be() -> None:
    result = CliRunner().invoke(size, ["qwen3-8b", "--gpu-memory", "10GiB", "--weights", "16GiB"])
    assert "That does not fit: 6.0 GiB are missing" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing-like-it"], ("neither a preset nor a file", "bamba-9b", "qwen3-next-80b-a3b")),
        (["qwen3-next"], ("did you mean qwen3-next-80b-a3b?",)),
        (["qwen3-nex-80b"], ("neither a preset nor a file", "did you mean", "qwen3-next-80b-a3b")),
        (["deepseek-v4-pro"], ("deepseek_v4", "hint")),
        (["qwen3-next-80b-a3b", "--tp", "3"], ("TP 3", "possible up to 64: 1, 2, 4, 8, 16")),
        (["qwen3-8b", "--dtype", "int3"], ("int3", "known are")),
        (["qwen3-8b", "--gpu-memory", "80G"], ("80G", "GiB")),
        (["qwen3-8b", "--gpu-memory", "0"], ("--gpu-memory", "hint")),
        (["qwen3-8b", "--weights", "1GiB"], ("--gpu-memory", "hint")),
        (["qwen3-8b", "--link-gbps", "nan"], ("link", "nan B/s")),
        (["qwen3-8b", "--tokens", "0"], ("--tokens",)),
    ],
)
def test_misuse_is_an_error_with_a_hint_and_exit_code_2(arguments: list[str], words: tuple[str, ...], capsys) -> None:
    assert main(["size", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert all(word in shown.err for word in words)


def test_sizing_needs_neither_torch_nor_grpc() -> None:
    code = "import sys, pdxfer.cli.size; print(sorted({'torch', 'grpc', 'rich', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
