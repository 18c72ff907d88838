"""``bench compare`` and ``bench report``: what they read, what they say, and with which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdxfer.bench.compare import Condition
from pdxfer.bench.measure import SCHEMA_VERSION
from pdxfer.bench.show import _told_apart
from pdxfer.cli.main import main
from tests.conftest import require

PNG = b"\x89PNG\r\n\x1a\n"


def saved(path: Path, *rows: dict, bench: str = "handoff", version: int = SCHEMA_VERSION, **results: object) -> str:
    machine = {"cpu": "a <cpu>", "cores": 2, "load_average": [0.1, 0, 0]}
    report = {"schema_version": version, "bench": bench, "machine": machine,
              "results": {"what": "something", "rows": list(rows), "notes": ["a & b"], **results}}  # fmt: skip
    path.write_text(json.dumps(report))
    return str(path)


def row(name: str = "pdxfer direct", case: str = "a case", **measured: object) -> dict:
    return {"case": case, "row": name, "kind": "pdxfer", "transport": "shm", "p50_ms": 10.0, "p99_ms": 20.0,
            "gb_per_s": 4.0, **measured}  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "code"),
    [
        ("p99>+5%", 1),
        ("p99>+10.1%", 0),
        ("p99_ms>+1.9", 1),
        ("p99>+2.1", 0),
        ("gb_per_s<-20%", 1),
        ("gb_per_s<-30%", 0),
        ("p50>=0", 1),
        ("p50>0%", 0),
    ],
)
def test_conditions_decide_the_exit_code(
    condition: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = saved(tmp_path / "a.json", row(), row("ceiling"))
    second = saved(tmp_path / "b.json", row("new"), row("ceiling"), row(p99_ms=22.0, gb_per_s=3.0))
    assert main(["bench", "compare", first, second, "--fail-if", "p50>+100%", "--fail-if", condition, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert len(found["failures"]) == (2 * code if condition == "p50>=0" else code)
    assert found["missing"] == ["case=a case row=new transport=shm"]
    assert {c["metric"] for c in found["changes"]} == {"p50_ms", "p99_ms", "gb_per_s"}
    assert main(["bench", "compare", first, second]) == 0
    assert "+10.0 %" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["missing", "not json", "no report", "old", "no rows", "no common", "metric", "words"])
def test_bad_input_is_exit_code_2(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = saved(tmp_path / "a.json", row()), saved(tmp_path / "b.json", row())
    condition = "p99>+5%"
    if what == "missing":
        second = str(tmp_path / "nowhere.json")
    elif what == "not json":
        Path(second).write_text("{")
    elif what == "no report":
        Path(second).write_text("[1]")
    elif what == "old":
        second = saved(tmp_path / "b.json", row(), version=1)
    elif what == "no rows":
        Path(second).write_text(
            json.dumps({"schema_version": SCHEMA_VERSION, "bench": "copy", "results": {"cases": []}})
        )
    elif what == "no common":
        second = saved(tmp_path / "b.json", row(case="another"))
    elif what == "metric":
        condition = "sparkle>+5%"
    else:
        condition = "p99 is worse"
    assert main(["bench", "compare", first, second, "--fail-if", condition]) == 2
    said = capsys.readouterr().err
    assert "error:" in said
    assert ("p99_ms" in said) == (what == "metric")  # what there is instead


def test_rows_are_shown_by_what_tells_them_apart() -> None:
    rows = ["row=ceiling: memcpy per run tp=2 tokens=5", "row=pdxfer tp=2 tokens=5 mode=direct"]
    names, common = _told_apart(rows)
    assert (names[rows[0]], names[rows[1]]) == ("row=ceiling: memcpy per run", "row=pdxfer mode=direct")
    assert common == "tp=2 tokens=5"
    assert _told_apart(rows[:1]) == ({rows[0]: rows[0]}, "")
    assert _told_apart([]) == ({}, "")


def test_a_change_from_nothing_is_without_bound() -> None:
    assert Condition.parse("waits>+5%").met(0, 1)
    assert not Condition.parse("waits>+5%").met(0, 0)
    assert Condition.parse(" p99 <= -3 ").met(10, 7)


def test_report_is_one_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require("matplotlib")
    growth = [row(case=f"{n} tokens", tokens=n, growth="tokens", p50_ms=n / 100) for n in (4096, 8192, 16384)]
    line = {"line": "a promise", "value": "0.9", "target": ">= 1", "holds": False}
    first = saved(tmp_path / "a.json", row(), *growth, lines=[line])
    second = saved(tmp_path / "b.json", {"transport": "tcp", "block_size": 4096, "batch_size": 1, "bw_gb_per_s": 1.5})
    assert main(["bench", "report", first, second, "-o", str(tmp_path / "out.html")]) == 0
    page, picture = (tmp_path / "out.html").read_text(), (tmp_path / "out.png").read_bytes()
    assert capsys.readouterr().out.split() == [str(tmp_path / "out.html"), str(tmp_path / "out.png")]
    assert picture.startswith(PNG)
    assert "data:image/png;base64," in page
    assert all(text in page for text in ("a promise", "misses", "a &lt;cpu&gt;", "a &amp; b", "4,096"))
    assert "http" not in page, "nothing is loaded from elsewhere"
    assert main(["bench", "report", first, "-o", str(tmp_path / "only.png")]) == 0
    assert not (tmp_path / "only.html").exists()
    assert main(["bench", "report", first, "-o", str(tmp_path / "out.pdf")]) == 2
    assert main(["bench", "report", str(tmp_path / "nothing.json")]) == 2
