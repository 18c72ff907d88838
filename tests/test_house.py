"""House rules that no linter knows, checked on the source itself."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT / "pdxfer" / "control" / "v1"
SOURCES = sorted(path for path in (ROOT / "pdxfer").rglob("*.py") if GENERATED not in path.parents)
PLACES = ("pdxfer", "tests", "proto", "deploy", ".ci")
BINARY = {".bin", ".so", ".pyc", ".png"}

# first name of the import -> the modules that may import it at all
ALLOWED = {
    "aiohttp": r"proxy",
    "prometheus_client": r"observe\..*",
    "opentelemetry": r"observe\..*",
    "vllm": r"connectors\.vllm.*",
    "torch": r"kernels|transport\.torch_dist|(connectors|bench|demo|testing)(\..*)?",
    "triton": r"_triton",
    "transformers": r"(connectors|bench|demo|testing)(\..*)?",
    "grpc": r"(control|agent)(\..*)?",
    "grpc_health": r"(control|agent)(\..*)?",
    "grpc_reflection": r"(control|agent)(\..*)?",
    "grpc_status": r"(control|agent)(\..*)?",
    "google": r"(control|agent)(\..*)?",
}
# Running or unpacking somebody's bytes as code. A digest never needs it, and neither do we (law 5).
BANNED_IMPORTS = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "jsonpickle", "joblib"}
BANNED_NAMES = {"eval", "exec", "compile", "__import__"}
BANNED_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized"}
BANNED_DOTTED = {
    *(
        "torch.load",
        "torch.serialization.load",
        "torch.jit.load",
        "numpy.load",
        "np.load",
        "numpy.lib.format.read_array",
    ),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "builtins.eval", "builtins.exec"),
}
CORE = ("errors", "spec", "messages", "models", "layout", "plan", "packing", "wire", "transfer", "cli.main")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def exported(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def sort_key(name: str) -> tuple[int, str]:
    """Constants, then classes, then functions: ruff's order."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def texts() -> Iterator[Path]:
    """Every file that people wrote, tracked by git or about to be."""
    yield from (path for path in ROOT.iterdir() if path.is_file() and path.name != "LICENSE")
    for place in PLACES:
        for path in (ROOT / place).rglob("*"):
            hidden = {"__pycache__", "venv", "venv-vllm"} & set(path.parts[len(ROOT.parts) :])
            if path.is_file() and not hidden and path.suffix not in BINARY:
                yield path


every_source = pytest.mark.parametrize("path", SOURCES, ids=module_name)


@every_source
def test_all_is_sorted_and_its_names_exist(path: Path) -> None:
    tree, name = parsed(path), module_name(path)
    names = exported(tree)
    if names is None:
        defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        assert all(word.startswith("_") for word in defined), f"{name} defines {defined} and has no __all__"
        return
    assert names == sorted(set(names), key=sort_key)
    if name == "pdxfer.connectors.vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("it subclasses vLLM's own classes; where vLLM is, tests/vllm load it in real servers")
    if name == "pdxfer._triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("it is made of triton; tests/test_triton.py asks for it")
    module = importlib.import_module(name)
    assert [word for word in names if not hasattr(module, word)] == []


@every_source
def test_modules_use_each_other_by_all(path: Path) -> None:
    """What one module imports from another is in the other's __all__, or is a module itself."""
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("pdxfer"):
            continue
        base = ROOT.joinpath(*str(node.module).split("."))
        source = base.with_suffix(".py") if base.with_suffix(".py").exists() else base / "__init__.py"
        names = {alias.name for alias in node.names}
        modules = {word for word in names if any(base.glob(f"{word}.*")) or (base / word).is_dir()}
        if GENERATED not in source.parents:
            assert names - modules <= set(exported(parsed(source)) or ()), f"line {node.lineno}"


def runs_or_unpickles(tree: ast.AST) -> list[str]:
    """Lines that can run or unpickle bytes, by whatever name: aliases are followed."""
    found = [f"imports {name}" for name in imports(tree) if name.partition(".")[0] in BANNED_IMPORTS]
    real: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            real.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom):
            real.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name | ast.Attribute):
            if isinstance(node, ast.Call) and any(word.arg == "allow_pickle" for word in node.keywords):
                found.append(f"line {node.lineno}: allow_pickle")
            continue
        first, dot, rest = ast.unparse(node).partition(".")
        name = f"{real.get(first, first)}{dot}{rest}"
        if name in BANNED_NAMES | BANNED_DOTTED or name.rpartition(".")[2] in BANNED_METHODS:
            found.append(f"line {node.lineno}: {name}")
    return found


@every_source
def test_nothing_runs_or_unpickles_bytes(path: Path) -> None:
    assert runs_or_unpickles(parsed(path)) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import dill as d", "import marshal", "x = eval", "exec(b)",
        "import numpy as n\nn.load(f)", "from numpy import load as read\nread(f)", "from torch import load\nload(f)",
        "import torch as t\nf = t.load", "import yaml\nyaml.load(s)", "from yaml import unsafe_load\nunsafe_load(s)",
        "s.recv_pyobj()",
        "f = s.recv_pyobj", "read(f, allow_pickle=True)", "import torch.serialization as s\ns.load(f)",
    ],
)  # fmt: skip
def test_whatever_it_is_called_it_is_found(code: str) -> None:
    assert runs_or_unpickles(ast.parse(code))


@every_source
def test_heavy_libraries_stay_in_their_modules(path: Path) -> None:
    inner = module_name(path).partition(".")[2]
    for name in imports(parsed(path)):
        allowed = ALLOWED.get(name.partition(".")[0])
        assert allowed is None or re.fullmatch(allowed, inner), f"pdxfer.{inner} imports {name}"


def test_the_core_runs_without_torch_and_grpc() -> None:
    """A finder that refuses them stands in for a machine that lacks them."""
    code = f"""
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(ALLOWED)!r}:
            raise ModuleNotFoundError(f"{{name}} is refused here", name=name)
sys.meta_path.insert(0, Refuse())
for name in {CORE!r}:
    importlib.import_module(f"pdxfer.{{name}}")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_file_names_one_machine() -> None:
    """Absolute paths of a developer's machine and hosts of package registries."""
    place = re.compile(
        r"(?<![\w.~-])/(?:work|root|home/\w+|Users/\w+|tmp/\w)/|(?:pypi|npmjs|pythonhosted)\.(?:org|com)\b"
    )
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if place.search(line)
    ]
    assert not found


def test_generated_code_is_not_newer_than_the_lower_bounds() -> None:
    """Generated code refuses a protobuf or grpcio older than its generator, so pip must refuse it first."""
    bounds = {
        match[1]: tuple(map(int, match[2].split(".")))
        for line in metadata.requires("pdxfer") or ()
        if (match := re.match(r"(grpcio|protobuf)>=([\d.]+)$", line))
    }
    messages, service = (GENERATED / name for name in ("transfer_pb2.py", "transfer_pb2_grpc.py"))
    protobuf = re.search(r"# Protobuf Python Version: ([\d.]+)", messages.read_text(encoding="utf-8"))
    grpcio = re.search(r"GRPC_GENERATED_VERSION = '([\d.]+)'", service.read_text(encoding="utf-8"))
    assert protobuf
    assert grpcio
    assert tuple(map(int, protobuf[1].split("."))) <= bounds["protobuf"]
    assert tuple(map(int, grpcio[1].split("."))) <= bounds["grpcio"]


def test_the_typing_marker_is_shipped() -> None:
    assert (ROOT / "pdxfer" / "py.typed").is_file()


def test_every_promise_of_security_md_names_tests_that_exist() -> None:
    rows = [row for row in (ROOT / "SECURITY.md").read_text().splitlines() if "test_" in row]
    named = re.findall(r"`(test_\w+)\.py::(test_\w+)`", "".join(rows))
    assert len(rows) > 8
    assert len(named) >= len(rows)
    for file, test in named:
        assert f"def {test}(" in (ROOT / "tests" / f"{file}.py").read_text(encoding="utf-8"), f"{file}::{test}"


def test_readme_names_every_module() -> None:
    """The table of the modules restates the tree, so it is compared with it."""
    table = [line.split("|")[1] for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| `")]
    named = {name.strip("`/ ") for row in table for name in row.split(",")}
    tree = {path.stem for path in (ROOT / "pdxfer").iterdir() if path.suffix in ("", ".py", ".c")}
    assert tree - named <= {"__init__", "__main__", "__pycache__", "_xxh3"}


def test_every_reason_has_its_row() -> None:
    """What an error says for machines is explained to people, too."""
    from pdxfer import errors
    from pdxfer.agent.reasons import REASONS

    written = {r for path in SOURCES for r in re.findall(r'reason="([A-Z_]+)"', path.read_text(encoding="utf-8"))}
    classes = {c.reason for c in map(vars(errors).get, errors.__all__) if isinstance(c, type)}
    assert (written | classes) - {"ERROR"} == set(REASONS)
    assert [*REASONS] == sorted(REASONS)
