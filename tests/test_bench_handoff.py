"""Hand-off and link benches at tiny sizes: counts, verification, two hosts, the end of time. No time is looked at."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace

import click
import numpy as np
import pytest
from click.testing import CliRunner

from pdxfer.bench import engines, link, ranks
from pdxfer.bench.case import Case, check, fill, load_spec
from pdxfer.bench.ceiling import Ceiling
from pdxfer.bench.cli import bench
from pdxfer.bench.handoff import Options, bench_handoff
from pdxfer.bench.measure import SCHEMA_VERSION
from pdxfer.bench.peer import Child, Clock, Line
from pdxfer.bench.ranks import Way, _Ranks
from pdxfer.bench.runs import moves
from pdxfer.bench.suite import bench_suite
from pdxfer.errors import CorruptError, DeadlineError, ExhaustedError, MisuseError, PeerError
from pdxfer.kernels import native_available
from pdxfer.plan import make_plan
from tests.conftest import require

pytestmark = pytest.mark.skipif(not native_available(), reason="the ceiling is a loop of the compiled kernel")

QWEN, KIMI = "qwen3-next-80b-a3b", "kimi-linear-48b-a3b"


def case(model: str = QWEN, *, layers: int = 4, page_tokens: int = 16, **more: object) -> Case:
    spec = load_spec(model, page_tokens=page_tokens, layers=layers)
    return Case(**{"spec": spec, "tokens": 50, "page_tokens": page_tokens, **more})


def memory(made: Case, end: str) -> list[list[np.ndarray]]:
    return [[np.zeros(r.nbytes, np.uint8) for r in rank.regions] for rank in made.layout(end).ranks]


def run(*argv: str, code: int = 0) -> dict:
    done = CliRunner().invoke(bench, [*argv, "--json"], catch_exceptions=False, standalone_mode=False)
    assert done.exception is None
    assert (done.return_value or 0) == code, done.output
    report = json.loads(done.stdout)
    assert report["schema_version"] == SCHEMA_VERSION
    return report["results"]


# -- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["per_layer", "per_request", "unified"])
@pytest.mark.parametrize("model", [QWEN, KIMI, "gemma-3-27b"])
def test_pages_are_apart_and_a_flipped_byte_is_found(model: str, placement: str) -> None:
    made = case(model, layers=6, placement=placement, concurrency=3, decode_tp=2, decode_page_tokens=8)
    assert Case.from_json(json.loads(json.dumps(made.to_json()))) == made
    rank = made.layout("decode").ranks[1]
    pools = rank.pools()
    pages = [(pools[n], p) for i in range(3) for n, t in made.tables("decode", i).items() for p in t.tolist()]
    assert len(pages) == len(set(pages)), "no page belongs to two requests"
    (buffers,) = memory(made, "decode")[1:]
    fill(made, "decode", 1, buffers)
    whole = check(made, "decode", 1, buffers)
    assert whole == sum(int(np.prod(h.box.shape)) * h.itemsize * len(h.layers) * 3
                        * (made.shape.rows(made.spec[h.component])[1] - made.shape.rows(made.spec[h.component])[0])
                        for h in rank.holdings)  # fmt: skip
    h = rank.holdings[-1]
    region, offset = h.at(h.layers[-1])
    page = int(made.tables("decode", 2)[h.table][-1])
    buffers[region][offset + page * h.page_stride] ^= 1
    with pytest.raises(CorruptError, match=f"request 2, layer {h.layers[-1]}") as caught:
        check(made, "decode", 1, buffers)
    assert caught.value.details["component"] == h.component


@pytest.mark.parametrize(("fragmentation", "neighbours"), [(0.0, 63), (1.0, None), (0.25, None)])
def test_fragmentation(fragmentation: float, neighbours: int | None) -> None:
    table = case(tokens=1024, fragmentation=fragmentation).tables("prefill", 0)["kv"]
    together = int((np.diff(table) == 1).sum())
    assert sorted(set(table.tolist())) == sorted(table.tolist())
    assert together == neighbours if neighbours else together < 60
    assert fragmentation < 1 or together < 5


@pytest.mark.parametrize(("model", "decode_page_tokens", "tp"), [(QWEN, 0, 2), (KIMI, 8, 4), ("fragments-4KiB", 0, 1)])
def test_runs_are_all_bytes_once(model: str, decode_page_tokens: int, tp: int) -> None:
    made = case(model, prefill_tp=2, decode_tp=tp, decode_page_tokens=decode_page_tokens, concurrency=2)
    source, target = memory(made, "prefill"), memory(made, "decode")
    for rank, buffers in enumerate(source):
        fill(made, "prefill", rank, buffers)
    written = [[np.zeros_like(b) for b in buffers] for buffers in target]
    for move in moves(made, chunk_bytes=1 << 20):
        giving = (target if move.edge.relay else source)[move.edge.source]
        for part in move.parts:
            for at, to, n in zip(part.at, part.to, part.lengths, strict=True):
                target[move.edge.target][part.target_region][to : to + n] = giving[part.source_region][at : at + n]
                written[move.edge.target][part.target_region][to : to + n] += 1
    assert max(int(b.max()) for buffers in written for b in buffers) == 1
    landed = sum(int(b.sum()) for buffers in written for b in buffers)
    assert sum(check(made, "decode", rank, buffers) for rank, buffers in enumerate(target)) == landed


def test_unknown_fragments_and_sizes_are_refused() -> None:
    with pytest.raises(MisuseError, match="not 16 rows of whole bfloat16"):
        load_spec("fragments-33B", page_tokens=16)
    with pytest.raises(MisuseError, match="TP 3 is impossible"):
        case(decode_tp=3)
    with pytest.raises(MisuseError, match=r"fragmentation 0 to 1: .*fragmentation 1\.5"):
        case(fragmentation=1.5)


# -- hand-offs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "name"), [("shm", "memcpy per run"), ("tcp", "by hand")])
def test_a_ceiling_moves_the_same_bytes(transport: str, name: str) -> None:
    made = case(KIMI, prefill_tp=2, decode_tp=2, concurrency=2)
    with Ceiling(made, transport, chunk_bytes=1 << 18, threads=2, clock=Clock(60)) as ceiling:
        assert name in ceiling.name
        assert ceiling.run() > 0
        per_rank = [sum(made.shape.rows(made.spec[h.component])[1] * int(np.prod(h.box.shape)) * h.itemsize
                        * len(h.layers) for h in rank.holdings) for rank in made.layout("decode").ranks]  # fmt: skip
        assert ceiling.check() == 2 * sum(per_rank)


def test_handoff_counts() -> None:
    """Two ranks each, whose MLA crosses the network once, half of it from either source."""
    argv = ("--model", KIMI, "--layers", "4", "--tokens", "50", "--prefill-tp", "2", "--decode-tp", "2")
    results = run("handoff", *argv, "--runs", "2", "--warmup", "1", "--no-engines", "--processes", "worker")
    ceiling, row = results["rows"]
    assert (ceiling["kind"], row["kind"], row["runs"]) == ("ceiling", "pdxfer", 2)
    made = case(KIMI, prefill_tp=2, decode_tp=2)
    plan = make_plan(made.layout("prefill"), made.layout("decode"))
    mla = sum(len(c.layers) * c.row_elems * 2 * 50 for c in made.spec.components if c.name in ("latent", "rope"))
    state = sum(len(c.layers) * c.row_elems * (4 if c.name == "S" else 2) for c in made.spec.components
                if c.name not in ("latent", "rope"))  # fmt: skip
    assert row["bytes_wire"] == state + mla
    assert row["bytes_payload"] == row["verified_bytes"] == ceiling["bytes_payload"] == state + 2 * mla
    assert row["dedup_ratio"] == pytest.approx((state + 2 * mla) / (state + mla))
    assert row["descriptors_posted"] == len([e for e in plan.edges if not e.relay])
    assert row["descriptors_logical"] == ceiling["descriptors_logical"]
    assert row["calls_per_edge"] <= 4, "a sibling that is not ready is asked again"
    assert 0 < row["min_ms"] <= row["p50_ms"] <= row["p90_ms"] <= row["p99_ms"]
    assert 0 < row["pct_of_ceiling_p10"] <= row["pct_of_ceiling"] <= row["pct_of_ceiling_p90"]
    assert {f"{stage}_ms" for stage in ("plan", "pack", "wire", "unpack", "verify")} <= set(row)
    assert {edge["source"] for edge in results["edges"]} == {0, 1}


def test_handoff_in_one_process_as_csv_and_table() -> None:
    argv = ["handoff", "--layers", "4", "--tokens", "20", "--transport", "memory", "--runs", "1", "--no-engines"]
    done = CliRunner().invoke(bench, [*argv, "--csv"], catch_exceptions=False)
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert [(row["bench"], row["schema_version"], row["kind"]) for row in rows] == [
        ("handoff", str(SCHEMA_VERSION), kind) for kind in ("ceiling", "pdxfer")
    ]
    table = CliRunner().invoke(bench, argv, catch_exceptions=False).stdout
    assert "memcpy per run" in table
    assert "plan / pack / wire" in table


def test_an_engines_own_memory() -> None:
    argv = ("--model", "fragments-4KiB", "--tokens", "32", "--runs", "1", "--no-engines", "--processes", "worker")
    rows = run("handoff", *argv, "--memory", "own", "--mode", "direct")["rows"]
    assert (rows[1]["mode"], rows[1]["memory"]) == ("direct", "own")
    assert rows[1]["verified_bytes"] == rows[1]["bytes_payload"] == 20 * 4096


def test_two_hosts_need_one_address() -> None:
    argv = ["handoff", "--layers", "4", "--tokens", "20", "--runs", "1"]
    other = [sys.executable, "-m", "pdxfer", "bench", "handoff", "--listen", "tcp://127.0.0.1:0", "--max-time", "60"]
    with subprocess.Popen(other, stderr=subprocess.PIPE, text=True) as source:
        assert source.stderr is not None
        address = source.stderr.readline().split()[-1]
        rows = run(*argv, "--transport", "tcp", "--peer", address)["rows"]
        assert source.wait(30) == 0, source.stderr.read()
    assert rows[1]["mode"] == "packed"
    assert rows[1]["verified_bytes"] == rows[1]["bytes_payload"]


def test_verification_after_the_runs_sees_a_byte_of_the_targets_memory() -> None:
    made = case()
    with ExitStack() as stack:
        source, target = (_Ranks(made, Way(), end, [0], "", stack) for end in ("prefill", "decode"))
        offered = source.answer("offer", transfers=["one"])
        fetched = target.answer("fetch", tickets=offered["tickets"][0][1], mode="auto", digests=True)
        assert fetched["ended"] > fetched["started"]
        assert target.answer("check")["nbytes"] == fetched["edges"][0]["nbytes"]
        h = made.layout("decode").ranks[0].holdings[0]
        region, offset = h.at(h.layers[0])
        target.buffers[0][region][offset + int(made.tables("decode", 0)[h.table][0]) * h.page_stride] ^= 0x80
        with pytest.raises(CorruptError, match="did not come as they were"):
            target.answer("check")
        target.answer("clear")
        with pytest.raises(CorruptError):
            target.answer("check")
        assert target.answer("facts")["calls"] == {}
        calls = source.answer("facts")["calls"]
        assert calls["describe"] == 1
        assert sum(calls.values()) <= 3
        with pytest.raises(MisuseError, match="no question"):
            target.answer("dance")


def test_a_sidecar_is_measured_in_turn_with_none_and_compared() -> None:
    ways = (Way(), Way(sidecar=True))
    options = Options(case=case("fragments-4KiB", tokens=32), ways=ways, runs=2, engines=False)
    _, embedded, sidecar = bench_handoff(options, lambda _: None, Clock(100))["rows"]
    assert (embedded["sidecar"], sidecar["sidecar"]) == (False, True)
    assert embedded["verified_bytes"] == sidecar["verified_bytes"] == 2 * 20 * 4096
    assert sidecar["sidecar_ratio"] > 0
    assert isinstance(sidecar["sidecar_added_ms"], float)
    assert "sidecar_ratio" not in embedded


def test_time_and_memory_have_an_end() -> None:
    argv = ["handoff", "--layers", "4", "--tokens", "20", "--max-time", "1", "--runs", "10000"]
    done = CliRunner().invoke(bench, argv, standalone_mode=False)
    assert isinstance(done.exception, DeadlineError) or "of 10000 runs" in done.output
    with pytest.raises(ExhaustedError, match="GiB") as caught:
        bench_handoff(Options(case=case(tokens=1 << 24)), lambda _: None, Clock(60))
    assert "--tokens" in caught.value.hint
    with pytest.raises(MisuseError, match="differ in mode, digests and sidecar only"):
        Options(case=case(), ways=(Way(), Way(transport="tcp")))


@pytest.mark.parametrize("engine", engines.ENGINES, ids=lambda engine: engine.name)
def test_other_engines_move_the_same_bytes(engine: engines.Engine) -> None:
    if why := engines.missing(engine):
        if "nixl" in engine.name:
            require("nixl_cu12")
        pytest.skip(why)  # Mooncake's wheel needs libraries of the system
    made = case("fragments-4KiB", tokens=32)
    with engines.Pair(engine, made, Clock(60)) as pair:
        assert pair.descriptors == 20
        assert pair.check() == 20 * 4096


# -- the suite -----------------------------------------------------------------------------------


def test_suite_judges_what_it_measured() -> None:
    results = bench_suite(("small",), 1, 4096, lambda _: None, Clock(100))
    lines = {line["line"]: line for line in results["lines"]}
    assert lines["512 tokens, 4 layers: control calls"]["holds"] is True
    assert isinstance(lines["512 tokens, 4 layers: added to the copy"]["holds"], bool)
    assert [row["kind"] for row in results["rows"]] == ["ceiling", "pdxfer", "pdxfer"]
    assert [row.get("digests") for row in results["rows"]] == [None, False, True]
    assert "divided by 4096" in results["what"]
    with pytest.raises(MisuseError, match="no group of the suite"):
        bench_suite(("everything",), 1, 1, lambda _: None, Clock(10))


def test_suite_says_what_it_could_not_measure() -> None:
    for argv, message in ((["--only", "kimi"], "--only: only with"), (["--tokens", "3"], "--tokens: not with")):
        with pytest.raises(click.UsageError, match=message):
            run("handoff", *argv, *(["--suite", "reference"] if "not" in message else []))
    results = run("handoff", "--suite", "reference", "--only", "kimi", "--max-time", "1", "--shrink", "2048", code=1)
    (line,) = results["lines"]
    assert line["holds"] is False
    assert "not measured" in line["value"]


def test_suite_passes_over_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdxfer.bench.suite.known_schemes", lambda: {"shm": "", "pigeon": ""})
    (line,) = bench_suite(("planes",), 1, 4096, lambda _: None, Clock(100))["lines"]
    assert line["holds"] is None
    assert "no transport for scheme 'pigeon'" in line["value"]


# -- links ---------------------------------------------------------------------------------------

LINK = ("--start-block-size", "4096", "--max_block_size", "8192", "--max-batch-size", "4", "--num-iter", "3",
        "--warmup-iter", "1")  # fmt: skip


@pytest.mark.parametrize(
    ("transport", "op_type"), [("shm", "WRITE"), ("shm", "READ"), ("tcp", "WRITE"), ("memory", "READ")]
)
def test_link_counts(transport: str, op_type: str) -> None:
    results = run("link", *LINK, "--backend", transport, "--op_type", op_type, "--num_threads", "2")
    assert [(row["block_size"], row["batch_size"]) for row in results["rows"]] == [
        (block, batch) for block in (4096, 8192) for batch in (1, 2, 4)
    ]
    for row in results["rows"]:
        assert row["threads"] == 2
        assert row["bw_gb_per_s"] > 0
        assert row["ceiling"] == ("one message of {} B".format(row["block_size"] * row["batch_size"])
                                  if transport == "tcp" else "one memcpy")  # fmt: skip


def test_link_leaves_out_what_can_not_be_done_and_says_why() -> None:
    results = run("link", *LINK, "--transport", "tcp,memory", "--op-type", "READ")
    assert {row["transport"] for row in results["rows"]} == {"memory"}
    assert len(results["notes"]) == 1
    assert results["notes"][0].startswith("tcp: ")
    with pytest.raises(MisuseError, match="'pigeon' is no transport"):
        link.bench_link(link.Options(transports=("pigeon",)), lambda _: None, Clock(10))
    with pytest.raises(MisuseError, match="no size to measure"):
        link.Options(total_buffer_size=100)


def test_link_compares_bytes() -> None:
    found = link._pattern(1000)
    link._compare(found)
    with pytest.raises(CorruptError, match="byte 700 of 1000"):
        link._compare(np.concatenate([found[:700], found[:300]]))


# -- ends ----------------------------------------------------------------------------------------


RANKS = {"end": "prefill", "ranks": [0]}


def test_a_child_that_ends_is_a_named_error() -> None:
    with (
        Child(engines.missing, Clock(60)) as child,  # the module runs, but takes no such arguments
        pytest.raises(PeerError, match="other process has ended"),
    ):
        child.hear()


def _corrupt(line: Line) -> None:
    del line
    raise CorruptError("kv.k", "not as it was", hint="look")


def test_a_corrupt_byte_elsewhere_is_corrupt_here() -> None:
    with Child(_corrupt, Clock(60), inside=True) as child, pytest.raises(CorruptError) as caught:
        child.hear()
    assert (caught.value.message, caught.value.hint, caught.value.exit_code) == ("kv.k: not as it was", "look", 4)


@pytest.mark.parametrize("inside", [False, True])
def test_a_childs_error_is_ours(inside: bool) -> None:
    asked = {**RANKS, "case": case().to_json(), "way": Way(transport="pigeon").to_json()}
    with (
        Child(ranks.serve, Clock(60), inside=inside, **asked) as child,
        pytest.raises(MisuseError, match="no transport for scheme 'pigeon'"),
    ):
        child.hear()


def test_a_silent_end_costs_no_more_than_the_clock() -> None:
    asked = {**RANKS, "case": case().to_json(), "way": Way().to_json()}
    with (
        Child(ranks.serve, Clock(0.01), inside=True, **asked) as child,
        pytest.raises(DeadlineError, match=r"0.01 s are over"),
    ):
        child.hear()


def test_a_child_ends_with_its_parent() -> None:
    """Kill a parent that has a child: the child's input ends, and so does the child, which closes our pipe."""
    code = (
        "import time\nfrom pdxfer.bench.link import serve\nfrom pdxfer.bench.peer import Child, Clock\n"
        "child = Child(serve, Clock(), scheme='shm', op_type='WRITE', threads=1, nbytes=4096)\n"
        "print(child.line.hear()['address'], flush=True)\n"
        "time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stderr is not None
    assert parent.stdout.readline().startswith("shm://")
    parent.kill()
    parent.wait()
    parent.stderr.read()  # the child has the same standard error: this returns when both are gone
    parent.stderr.close()
    parent.stdout.close()


def test_ways_are_configs() -> None:
    config = Way(transport="shm,tcp", mode="packed", digests=False).config("prefill", 1, "127.0.0.1")
    assert config.transports == ("shm", "tcp")
    assert config.listen == {"tcp": "tcp://127.0.0.1:0"}
    assert replace(config, mode="auto").digests is False
