"""A few of the rolling restarts of ``tests/rolling.py``, which has the long run."""

from __future__ import annotations

import pytest

from tests.rolling import fleet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_source_and_a_target_restart_under_load_and_no_transfer_fails():
    with fleet() as found:
        with found.load() as check:
            for worker in (found.prefill[0], found.decode[0]):
                found.restart(worker)
                check()
        assert found.counts["whole"]
        assert found.counts["DRAINING"] + found.counts["SIDECAR_LOST"]
