"""The shell of the command line: what it imports, what it prints, and the exit code of every kind of error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata

import click
import pytest

from pdxfer import errors
from pdxfer.agent.spawn import module_command
from pdxfer.cli.demo import _TRANSPORTS
from pdxfer.cli.main import COMMANDS, cli, main
from pdxfer.transport import known_schemes

HEAVY = {"aiohttp", "torch", "transformers", "grpc", "google.protobuf", "numpy", "zmq", "rich", "msgpack",
         "prometheus_client", "cryptography", "pdxfer.layout"}  # fmt: skip


def run(*argv: str, code: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run the program, or ``code``, as a process of its own."""
    start = ["-c", code] if code else ["-m", "pdxfer"]
    clean = {name: value for name, value in os.environ.items() if name not in {"PDXFER_DEBUG", "NO_COLOR"}}
    return subprocess.run([sys.executable, *start, *argv], capture_output=True, text=True, check=False, env=clean | env)


@pytest.fixture
def failing() -> Iterator[list[BaseException]]:
    """A command ``fail`` that raises what the test puts into the list."""
    raises: list[BaseException] = []

    @click.command()
    def fail() -> None:
        raise raises[0]

    cli.add_command(fail)
    yield raises
    del cli.commands["fail"]


def every_command() -> Iterator[tuple[str, ...]]:
    """The program, its commands, and theirs."""
    yield ()
    for name in sorted(COMMANDS):
        yield (name,)
        command = cli.get_command(click.Context(cli), name)
        yield from ((name, inner) for inner in sorted(getattr(command, "commands", {})))


@pytest.mark.parametrize("command", list(every_command()), ids=" ".join)
def test_help_imports_nothing_heavy(command: tuple[str, ...]) -> None:
    code = "import sys; from pdxfer.cli.main import main; code = main(); print(*sys.modules, file=sys.stderr)"
    done = run(*command, "--help", code=f"{code}; sys.exit(code)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" ".join(("Usage: pdxfer", *command, "[OPTIONS]")))
    loaded = set(done.stderr.split())
    assert "click" in loaded
    assert not loaded & HEAVY


def test_help_lists_every_command_with_the_table_s_text() -> None:
    done = run("--help")
    assert (done.returncode, done.stderr) == (0, "")
    words = done.stdout.split()
    for name, (_, text) in COMMANDS.items():
        assert name in words
        assert text.split()[0] in words


def test_version_as_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert f"pdxfer       {metadata.version('pdxfer')}\n" in capsys.readouterr().out
    assert main(["version", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)
    assert parts["pdxfer"] == metadata.version("pdxfer")
    assert parts["copy_kernel"] in {"native", "numpy"}
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdxfer, version {metadata.version('pdxfer')}\n"


@pytest.mark.parametrize("argv", [["nonsense"], ["--nonsense"], ["version", "--nonsense"], ["version", "extra"], []])
def test_usage_errors_are_exit_2(argv: list[str]) -> None:
    done = run(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Usage: pdxfer")


CASES = [
    (errors.MisuseError("no such model", hint="try qwen3-next"), 2),
    (errors.TicketError("used twice"), 1),
    (errors.IncompatibleError("S", "dtype", "float32", "bfloat16"), 1),
    (errors.PeerError("gone"), 5),
    (errors.TransportError("broken"), 5),
    (errors.CorruptError("kv.k", "digest differs"), 4),
    (errors.InternalError("a bug"), 1),
]


@pytest.mark.parametrize(("error", "code"), CASES, ids=lambda value: type(value).__name__)
def test_errors_become_a_message_and_an_exit_code(
    error: errors.PdxferError, code: int, failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(error)
    assert main(["fail"]) == code
    hint = f"  hint: {error.hint}\n" if error.hint else ""
    assert capsys.readouterr() == ("", f"error: {error.message}\n{hint}")


def test_debug_shows_the_traceback(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing.append(errors.PeerError("gone"))
    assert main(["--debug", "fail"]) == 5
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    monkeypatch.setenv("PDXFER_DEBUG", "1")  # read at the call, not at import
    assert main(["fail"]) == 5
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    monkeypatch.setenv("PDXFER_DEBUG", "0")
    assert main(["fail"]) == 5
    assert "Traceback" not in capsys.readouterr().err


def test_an_interrupt_is_130(failing: list[BaseException]) -> None:
    failing.append(KeyboardInterrupt())
    assert main(["fail"]) == 130


def test_a_missing_optional_module_names_the_extra(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(ModuleNotFoundError("No module named 'torch'", name="torch.nn"))
    assert main(["fail"]) == 2
    assert "pip install 'pdxfer[hf]'" in capsys.readouterr().err


def test_bugs_leave_as_they_are(failing: list[BaseException]) -> None:
    failing.append(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        main(["fail"])
    failing[0] = ModuleNotFoundError("No module named 'pdxfer.nothing'", name="pdxfer.nothing")
    with pytest.raises(ModuleNotFoundError):
        main(["fail"])


def test_a_reader_that_went_away_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "pdxfer", "version"], stdout=gone, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_no_color_is_respected() -> None:
    """A terminal gets colour, unless NO_COLOR is set; tested on a real pseudo-terminal."""
    code = (
        "import sys, click\nfrom pdxfer import errors\nfrom pdxfer.cli.main import cli, main\n"
        "@cli.command()\ndef fail(): raise errors.PeerError('gone')\nsys.exit(main(['fail']))"
    )
    for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        clean = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        ours, theirs = os.openpty()
        done = subprocess.run(
            [sys.executable, "-c", code], stderr=theirs, check=False, env=clean | env | {"TERM": "xterm"}
        )
        os.close(theirs)
        with os.fdopen(ours, "rb") as terminal:
            shown = terminal.read1(4096)
        assert done.returncode == 5
        assert b"gone" in shown
        assert (b"\x1b[" in shown) is coloured


def test_children_run_this_package_and_not_one_in_the_working_directory(tmp_path, monkeypatch) -> None:
    (tmp_path / "pdxfer").mkdir()
    (tmp_path / "pdxfer" / "__init__.py").write_text("raise SystemExit('this is another one')\n")
    monkeypatch.setattr(sys, "path", [entry or os.getcwd() for entry in sys.path])
    monkeypatch.chdir(tmp_path)
    command = [*module_command("pdxfer"), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("pdxfer, version"), done.stderr


def test_the_demo_offers_the_transports_that_there_are() -> None:
    assert set(_TRANSPORTS) - {"auto"} <= set(known_schemes())
