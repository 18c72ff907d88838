"""The status page, in a real browser: what it says, that it asks nobody else, and that nothing a peer says runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pdxfer.errors import CorruptError, PeerError
from pdxfer.observe import Admin
from pdxfer.observe.page import POLICY, render
from pdxfer.testing.faults import Fault
from tests.pairs import Ends, fails, hand_over, withdraw
from tests.test_agent_damage import damaged
from tests.test_observe import get, watched

EVIL = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


class Tags(HTMLParser):
    """Counts tags, and refuses what is left open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.seen.append((tag, dict(attributes)))
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture
def busy():
    """An admin of agents with a failure, a completed hand-over, one underway, and a peer that writes HTML."""
    with damaged("packed", Fault(kind="corrupt", at=0, on="payload")) as (source, target, faulty):  # noqa: SIM117
        with watched(target, source) as observer, Admin(observer, "127.0.0.1:0") as admin:
            fails(source, target, CorruptError, "request-17")
            faulty.plan = type(faulty.plan).of()
            hand_over(source, target, "request-18")
            ends = Ends()
            source.offer("request-19", 20, on_end=ends)
            journal = target.agents[0].journal
            journal.end(journal.begin("target", EVIL, peer=EVIL), "failed", error=PeerError(EVIL, hint=EVIL))
            yield observer, admin
            withdraw(source, "request-19", ends)


def test_the_page_has_what_a_person_asks_for(busy):
    _, admin = busy
    code, text = get(admin, "/")
    assert code == 200
    for word in ("is <span", "ready", "request-17", "request-18", "request-19", "CORRUPT", "fetch again", "Peers"):
        assert word in text
    assert text.count("<svg") >= 1
    assert "live" in text


def test_nothing_a_peer_says_becomes_html(busy):
    observer, _ = busy
    found = Tags(render(observer))
    assert [tag for tag, _ in found.seen].count("script") == 1
    assert not [tag for tag, _ in found.seen if tag in ("img", "link", "iframe", "object", "form")]
    assert not [name for _, attributes in found.seen for name in attributes if name.startswith("on")]


def test_nothing_comes_from_elsewhere(busy):
    observer, _ = busy
    links = [value for _, a in Tags(render(observer)).seen for name, value in a.items() if name in ("src", "href")]
    assert links == []
    assert not re.search(r"https?://", render(observer))
    assert POLICY.startswith("default-src 'none'")


def chromium() -> str:
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
    )
    if not found:
        if os.environ.get("PDXFER_REQUIRE_BROWSER") == "1":
            pytest.fail("no Chromium (PDXFER_REQUIRE_BROWSER=1): apt-get install chromium")
        pytest.skip("no Chromium")
    return found


def browse(url: str, tmp_path: Path, *more: str) -> str:
    command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               f"--user-data-dir={tmp_path}/profile", "--window-size=1280,1250", *more, url]  # fmt: skip
    env = {**os.environ, "HOME": str(tmp_path)}
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=env).stdout


def test_a_browser_shows_it(busy, tmp_path):
    _, admin = busy
    picture = Path(os.environ.get("PDXFER_SCREENSHOTS", str(tmp_path))) / "page.png"
    browse(admin.url + "/", tmp_path, f"--screenshot={picture}")
    assert picture.stat().st_size > 20_000
    text = browse(admin.url + "/", tmp_path, "--virtual-time-budget=9000", "--dump-dom")
    assert "request-17" in text
    assert "owned" not in re.search(r"<title>(.*?)</title>", text)[1]
    assert Tags(re.sub(r"<!DOCTYPE html>", "", text)).seen


def test_the_browser_fetches_it_again_by_itself(busy, tmp_path):
    """What happened after the page was loaded is in the page: the script runs under the policy."""
    observer, admin = busy
    asked = []
    real = observer.status

    def status():
        asked.append(1)
        if len(asked) == 1:
            journal = observer.agents[0].journal
            journal.end(journal.begin("target", "after-load"), "completed")
            return {**real(), "version": "first"}
        return real()

    observer.status = status
    text = browse(admin.url + "/", tmp_path, "--virtual-time-budget=9000", "--dump-dom")
    assert len(asked) > 1
    assert "version first" not in text
