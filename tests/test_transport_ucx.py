"""UCX, in processes of its own: beside NIXL's copy of UCX, which other tests load, it can't run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import require
from tests.planes import run_child

BOTH = """
import sys
from pdxfer.errors import MisuseError
from pdxfer.transport import create_transport
first, second = sys.argv[1:]
with create_transport(first):
    try:
        create_transport(second)
    except MisuseError as error:
        print(error.message, flush=True)
"""


@pytest.fixture(autouse=True)
def installed():
    if importlib.util.find_spec("ucxx") is None:
        require("ucxx")  # skips or fails; what is there isn't imported here


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_suite_in_a_process_of_its_own():
    suite = Path(__file__).with_name("ucx_suite.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", str(suite)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-8000:]


@pytest.mark.parametrize("order", [("ucx", "nixl"), ("nixl", "ucx")])
def test_two_copies_of_ucx_are_refused(order):
    if importlib.util.find_spec("nixl_cu12") is None:
        require("nixl_cu12")
    with run_child(BOTH, *order) as child:
        assert "has brought its own UCX" in child.stdout.read()
        assert child.wait(60) == 0
