"""``pdxfer top``: its frames say what happens, and can be read."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

from rich.console import Console

from pdxfer.cli.main import main
from pdxfer.cli.top import _look, frame
from pdxfer.errors import CorruptError, PeerError
from pdxfer.testing.faults import Fault
from tests.pairs import Ends, fails, hand_over, pair, withdraw
from tests.test_agent_damage import damaged
from tests.test_cli_operate import served
from tests.test_observe import ONE
from tests.test_page import browse


def test_a_frame_has_readiness_ranks_peers_and_transfers(tmp_path):
    with damaged("packed", Fault(kind="corrupt", at=0, on="payload")) as (source, target, faulty):  # noqa: SIM117
        with served(target, source):
            admin = os.environ["PDXFER_ADMIN"]
            before = _look(admin)
            fails(source, target, CorruptError, "request-17")
            faulty.plan = type(faulty.plan).of()
            hand_over(source, target, "request-18")
            journal = target.agents[0].journal
            odd = PeerError("[red]\x1b[2J", reason="PROTOCOL")
            journal.end(journal.begin("target", "odd\x1b[2J[/]", peer="[bold]"), "failed", error=odd)
            ends = Ends()
            source.offer("request-19", 20, on_end=ends)
            console = Console(record=True, width=118, file=io.StringIO(), force_terminal=True)
            console.print(frame(_look(admin), before))
            text = console.export_text(clear=False)
            withdraw(source, "request-19", ends)
    assert "is ready, 2 underway" in text
    for row in (
        r"D +0/1 +hybrid", r"P +0 +yes +1 +1 +\d+\.\d kB +\d+\.\d kB/s +CORRUPT",
        r"request-17 +target 0 +P +failed",
        r"request-18 +target 0 +P +completed", r"request-19 +source 1 +live", r"odd\?\[2J\[/\]",
    ):  # fmt: skip
        assert re.search(row, text), f"{row} is not in\n{text}"
    assert "\x1b[2J" not in text
    svg = tmp_path / "top.svg"
    svg.write_text(console.export_svg(title="pdxfer top"))
    picture = Path(os.environ.get("PDXFER_SCREENSHOTS", str(tmp_path))) / "top.png"
    browse(svg.as_uri(), tmp_path, f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000


def test_once_as_text_and_as_json(capsys):
    with pair(*ONE) as (source, target), served(target):
        hand_over(source, target, "one")
        assert main(["top", "--once"]) == 0
        assert "is ready" in capsys.readouterr().out
        assert main(["top", "--once", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["recent"][0]["transfer"] == "one"


def test_in_a_terminal_it_draws_again_until_interrupted():
    with pair(*ONE) as (source, target), served(target):
        ours, theirs = pty.openpty()
        size = {"TERM": "xterm-256color", "COLUMNS": "140", "LINES": "50"}
        process = subprocess.Popen(
            [sys.executable, "-m", "pdxfer", "top", "--interval", "0.1"],
            stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, env={**os.environ, **size},
        )  # fmt: skip
        os.close(theirs)
        seen = bytearray()
        drawn = threading.Event()

        def read():
            try:
                while chunk := os.read(ours, 65_536):
                    seen.extend(chunk)
                    if b"after-start" in seen:
                        drawn.set()
            except OSError:  # the terminal is gone
                pass

        thread = threading.Thread(target=read)
        thread.start()
        hand_over(source, target, "after-start")
        found = drawn.wait(60)
        process.send_signal(2)
        assert process.wait(60) == 130
        assert not process.stderr.read().strip()
        process.stderr.close()
        thread.join(60)
        os.close(ours)
        assert found, bytes(seen[-500:])
