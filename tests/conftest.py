"""What every test may use: optional parts, and hypothesis profiles without a clock."""

from __future__ import annotations

import importlib
import os
import signal
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

__all__ = ["require"]

pytest.register_assert_rewrite("pdxfer.testing.transport")  # before any test imports the conformance suite

# A background job of a shell ignores SIGINT, and so would every child that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared two-core machine is slow at random: nothing here may depend on how long an example took.
settings.register_profile("pdxfer", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("pdxfer")


def require(name: str) -> ModuleType:
    """Import an optional module for the calling test or test module, or skip it.

    With PDXFER_REQUIRE_OPTIONAL=1, as in CI, a missing module is a failure: a skip there would hide an install step.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = f"{name} can't be imported: {error}"
        if os.environ.get("PDXFER_REQUIRE_OPTIONAL") == "1":
            pytest.fail(f"{reason} (PDXFER_REQUIRE_OPTIONAL=1)", pytrace=False)
        pytest.skip(reason, allow_module_level=True)
