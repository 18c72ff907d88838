"""README's tables that restate code: equal to it, row by row. ``python -m tests.test_readme`` writes them anew."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from pdxfer.agent.config import DaemonConfig
from pdxfer.agent.reasons import REASONS
from pdxfer.cli.main import COMMANDS, cli, main
from pdxfer.config import Loaded, load_config
from pdxfer.messages import PROTOCOL_OLDEST, PROTOCOL_VERSION
from pdxfer.observe.metrics import COUNTERS, GAUGES, HISTOGRAMS
from pdxfer.ticket import TICKET_VERSION

README = Path(__file__).resolve().parent.parent / "README.md"
DEPLOYED = README.parent / "deploy" / "README.md"


def reasons() -> Iterator[tuple[str, ...]]:
    """The error reference."""
    yield "reason", "what failed", "why", "what to do"
    yield from ((f"`{r.name}`", r.blame, r.cause, r.remedy) for r in REASONS.values())


def metrics() -> Iterator[tuple[str, ...]]:
    """What a daemon exports; ``test_observe`` compares the same tables with a live registry."""
    yield "`pdxfer_`...", "labels", "meaning"
    rows = [(f"{name}_total", labels, text) for name, (labels, text) in COUNTERS.items()]
    rows += [(name, labels, text) for name, (labels, text) in GAUGES.items()]
    rows += [(name, (label,), text) for name, (label, _, text) in HISTOGRAMS.items()]
    yield from ((f"`{name}`", ", ".join(labels), text) for name, labels, text in rows)


TABLES = {"reasons": reasons, "metrics": metrics}


def lines(name: str) -> list[str]:
    """A table as it is written."""
    head, *rows = TABLES[name]()
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def written(name: str) -> list[str]:
    """A table as README has it."""
    found = README.read_text(encoding="utf-8").splitlines()
    first = found.index(lines(name)[0])
    return found[first : next(n for n in range(first, len(found)) if not found[n].startswith("|"))]


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_code_says(name):
    assert written(name) == lines(name)


def test_the_same_reference_is_a_command(capsys):
    assert main(["explain", "--reasons"]) == 0
    text = capsys.readouterr().out
    assert all(row.name in text and row.cause in text and row.remedy in text for row in REASONS.values())
    assert main(["explain", "--reasons", "--json"]) == 0
    assert {row["name"] for row in json.loads(capsys.readouterr().out)["reasons"]} == set(REASONS)
    assert main(["explain"]) == 2


def tuned() -> list[tuple[str, str]]:
    """Key and default of every row of the tuning table."""
    found = README.read_text(encoding="utf-8").partition("| knob | default |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `([a-z_.]+)` \| ([^|]+) \|", found, re.MULTILINE)


def test_the_tuning_table_has_keys_that_are_there_with_their_defaults():
    defaults = {key: value for key, value, _ in Loaded(config=DaemonConfig(socket="/s"), origins={}).rows()}
    assert len(tuned()) > 8
    for key, text in tuned():
        if isinstance(defaults[key], tuple):
            assert text == ", ".join(defaults[key])
            continue
        loaded = load_config(flags={"socket": "/s", key: text}, environ={}).rows()
        assert {k: v for k, v, _ in loaded}[key] == defaults[key], key


def test_the_tuning_table_s_signs_are_metrics():
    known = {f"pdxfer_{name}" for name in {**GAUGES, **HISTOGRAMS}} | {f"pdxfer_{name}_total" for name in COUNTERS}
    found = README.read_text(encoding="utf-8").partition("| knob | default |")[2].partition("\n\n")[0]
    named = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"pdxfer_\w+", found)}
    assert named
    assert named <= known


def test_the_versions_of_the_upgrade_policy_are_the_code_s():
    text = README.read_text(encoding="utf-8")
    assert f"protocol {PROTOCOL_VERSION}, {PROTOCOL_OLDEST} too; ticket {TICKET_VERSION}" in text


@pytest.mark.parametrize("path", [README, DEPLOYED], ids=["README", "deploy/README"])
def test_every_command_and_option_named_is_there(path):
    """``pdxfer COMMAND ... --option`` in text and code; what runs is run by the tests of the command."""
    text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    spans += [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    seen = set()
    for span in "\n".join(spans).replace(" | ", "\npdxfer ").splitlines():
        found = re.search(r"(?:^|bin/)pdxfer ([a-z]+)(.*)", span)
        if found is None or found[1] not in COMMANDS:
            assert found is None, span
            continue
        seen.add(found[1])
        parameters = [p for command in _commands(found[1], found[2].split()) for p in command.params]
        known = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", found[2])) <= known | {"--help"}, span
    assert len(seen) > 2


def _commands(name: str, words: list[str]) -> list[click.Command]:
    """The command, or those of its own that ``a|b`` names."""
    command = cli.get_command(click.Context(cli), name)
    inner = getattr(command, "commands", {})
    return [inner[word] for word in (words or [""])[0].split("|") if word in inner] or [command]


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    for name in TABLES:
        text = text.replace("\n".join(written(name)), "\n".join(lines(name)))
    README.write_text(text, encoding="utf-8")
    sys.exit(0)
